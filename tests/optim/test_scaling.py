"""The loss scale against `torch.amp.GradScaler`, norms and clipping against torch's, and the norm's fixed order."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir.errors import PlanError
from lightning_elixir.optim import LossScaler, absolute_max, clip_coefficient, scaling, square_sums
from lightning_elixir.optim.scaling import LossScaling
from lightning_elixir.plan.types import ALIGN_NUMEL


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def _implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled sums of the host, and without."""
    if request.param == "torch":
        monkeypatch.setattr(scaling.cpu, "square_sums", lambda *operands: None)


# Loss scale


def grad_scaler(**settings: Any) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", **settings)
    scaler.scale(torch.zeros(()))  # makes its tensors
    return scaler


def update_grad_scaler(scaler: torch.amp.GradScaler, found_inf: bool) -> None:
    """One step of torch's scaler through its public calls, with a gradient that overflows or does not."""
    p = nn.Parameter(torch.zeros(1))
    p.grad = torch.full((1,), math.inf if found_inf else 0.0)
    optimizer = torch.optim.SGD([p], lr=0.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def overflows(num_steps: int, share: float) -> list[bool]:
    source = random.Random(int(share * 100))
    return [source.random() < share for _ in range(num_steps)]


@pytest.mark.parametrize(
    "settings",
    [
        {"init_scale": 2.0**16, "growth_interval": 3},
        {"init_scale": 1000.0, "growth_interval": 2, "growth_factor": 1.37, "backoff_factor": 0.71},
        {"init_scale": 2.0**126, "growth_interval": 1},
        {"init_scale": 1e-30, "growth_interval": 5, "backoff_factor": 0.1},
    ],
    ids=["powers_of_two", "odd_factors", "fp32_overflow", "tiny"],
)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_same_scale_as_grad_scaler_at_every_step(settings: dict[str, Any], share: float) -> None:
    theirs = grad_scaler(**settings)
    initial_scale = settings["init_scale"]
    others = {k: v for k, v in settings.items() if k != "init_scale"}
    ours = LossScaler(LossScaling(initial_scale=initial_scale, **others))
    assert ours.scale == theirs.get_scale()
    for found_inf in overflows(60, share):
        update_grad_scaler(theirs, found_inf)
        ours.update(found_inf)
        assert ours.scale == theirs.get_scale()
        assert ours.state_dict()["_growth_tracker"] == theirs.state_dict()["_growth_tracker"]


def test_defaults_are_those_of_grad_scaler() -> None:
    ours, theirs = LossScaler().state_dict(), grad_scaler().state_dict()
    assert {name: ours[name] for name in theirs} == theirs


def test_inverse_scale_unscales() -> None:
    assert LossScaler(LossScaling(initial_scale=1024.0)).inverse_scale == 1.0 / 1024.0


def test_scale_stays_within_its_bounds() -> None:
    scaler = LossScaler(LossScaling(initial_scale=8.0, min_scale=3.0, max_scale=20.0, growth_interval=1))
    seen = []
    for found_inf in (True, True, True, False, False, False, False):
        scaler.update(found_inf)
        seen.append(scaler.scale)
    assert seen == [4.0, 3.0, 3.0, 6.0, 12.0, 20.0, 20.0]


def test_hysteresis_counts_overflows_since_the_last_growth() -> None:
    scaler = LossScaler(LossScaling(initial_scale=16.0, hysteresis=3, growth_interval=2))
    seen = []
    for found_inf in (True, False, True, True, True, False, False, True, True):
        scaler.update(found_inf)
        seen.append(scaler.scale)
    assert seen == [16.0, 16.0, 16.0, 8.0, 4.0, 4.0, 8.0, 8.0, 8.0]


def test_disabled_scaler_stays_at_one() -> None:
    scaler = LossScaler(enabled=False)
    for found_inf in (True, False, True):
        scaler.update(found_inf)
    scaler.load_state_dict({})
    assert (scaler.scale, scaler.inverse_scale, scaler.state_dict()) == (1.0, 1.0, {})


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_resumed_scaler_goes_on_as_the_first(hysteresis: int) -> None:
    settings: dict[str, Any] = {"initial_scale": 100.0, "growth_interval": 4, "hysteresis": hysteresis}
    first = LossScaler(LossScaling(growth_factor=3.0, **settings))
    for found_inf in (False, False, True, False, False):
        first.update(found_inf)
    second = LossScaler(LossScaling(**settings))
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    for found_inf in overflows(40, 0.2):
        first.update(found_inf)
        second.update(found_inf)
        assert second.state_dict() == first.state_dict()


def test_state_dict_is_interchangeable_with_grad_scaler() -> None:
    theirs, ours = grad_scaler(init_scale=64.0, growth_interval=3), LossScaler(LossScaling(initial_scale=2.0))
    update_grad_scaler(theirs, found_inf=False)
    ours.load_state_dict(theirs.state_dict())
    back = grad_scaler()
    back.load_state_dict(ours.state_dict())
    for found_inf in (False, False, True, False):
        update_grad_scaler(theirs, found_inf)
        update_grad_scaler(back, found_inf)
        ours.update(found_inf)
        assert ours.scale == theirs.get_scale() == back.get_scale()


def test_empty_state_dict_raises() -> None:
    with pytest.raises(PlanError, match="without loss scaling"):
        LossScaler().load_state_dict({})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial_scale": 0.0}, "initial_scale .* got 0.0"),
        ({"initial_scale": math.inf}, "initial_scale .* got inf"),
        ({"initial_scale": 4.0, "max_scale": 2.0}, r"initial_scale .*max_scale=2.0, got 4.0"),
        ({"min_scale": -1.0}, "min_scale .* got -1.0"),
        ({"growth_factor": 1.0}, "growth_factor must be > 1, got 1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor .* got 1.0"),
        ({"growth_interval": 0}, "growth_interval .* got 0"),
        ({"hysteresis": 0}, "hysteresis .* got 0"),
    ],
)
def test_scaler_settings_out_of_range_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        LossScaling(**settings)


# Norms

SIZES = [1, 511, 512, 513, 0, 5000, 262_144, 262_145, 600_000]


def pack(tensors: list[Tensor], filler: float = math.nan, gap_blocks: int = 0) -> tuple[Tensor, list[tuple[int, int]]]:
    """A shard of these tensors at aligned offsets, with the filler between them."""
    segments = []
    offset = gap_blocks * ALIGN_NUMEL
    for x in tensors:
        segments.append((offset, x.numel()))
        offset += (-(-x.numel() // ALIGN_NUMEL) + gap_blocks) * ALIGN_NUMEL
    shard = torch.full((offset,), filler, dtype=tensors[0].dtype, device=tensors[0].device)
    for x, (start, numel) in zip(tensors, segments, strict=True):
        shard[start : start + numel] = x
    return shard, segments


def make_tensors(dtype: torch.dtype = torch.float32, sizes: list[int] = SIZES) -> list[Tensor]:
    return [(torch.randn(n) * torch.pow(10.0, torch.randint(-4, 3, (n,)).float())).to(dtype) for n in sizes]


def halving_sum(values: list[float]) -> float:
    """The documented order of additions, one Python float at a time."""
    while len(values) > 1 or not values:
        values = values + [0.0] * (-len(values) % ALIGN_NUMEL or (0 if values else ALIGN_NUMEL))
        sums = []
        for start in range(0, len(values), ALIGN_NUMEL):
            row = values[start : start + ALIGN_NUMEL]
            while len(row) > 1:
                half = len(row) // 2
                row = [row[i] + row[i + half] for i in range(half)]
            sums.append(row[0])
        values = sums
    return values[0]


def test_square_sums_add_in_the_documented_order() -> None:
    tensors = make_tensors(sizes=[1, 2, 511, 512, 513, 0, 40_000, 270_000])
    result = square_sums(*pack(tensors))
    expected = [halving_sum((x.double() ** 2).tolist()) for x in tensors]
    assert result.dtype == torch.float64
    assert result.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_square_sums_do_not_depend_on_the_shard(dtype: torch.dtype) -> None:
    tensors = make_tensors(dtype)
    alone = torch.cat([square_sums(x, [(0, x.numel())]) for x in tensors])
    assert torch.equal(square_sums(*pack(tensors)), alone)
    assert torch.equal(square_sums(*pack(tensors, gap_blocks=3, filler=1e4)), alone)
    assert torch.equal(square_sums(*pack(tensors[::-1], filler=math.inf)), alone.flip(0))
    shard, segments = pack(tensors)
    assert torch.equal(square_sums(shard, segments[::-2]), alone[torch.arange(len(tensors) - 1, -1, -2)])


@pytest.mark.parametrize("blocks", [1, 3, 8192])
def test_square_sums_do_not_depend_on_piece_size_or_threads(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, segments = pack(make_tensors())
    expected = square_sums(shard, segments)
    torch.set_num_threads(2)
    monkeypatch.setattr(scaling, "_CPU_PIECE_NUMEL_PER_THREAD", blocks * ALIGN_NUMEL)
    if blocks == 1:  # one piece for every block would take long
        shard, segments, expected = shard[: 20 * ALIGN_NUMEL], segments[:5], expected[:5]
    assert torch.equal(square_sums(shard, segments), expected)


def test_scale_and_clamp_come_before_squaring() -> None:
    tensors = make_tensors()
    shard, segments = pack(tensors)
    prepared = [(x.double() * 0.3).clamp(-2.0, 2.0) for x in tensors]
    assert torch.equal(square_sums(shard, segments, scale=0.3, clamp=2.0), square_sums(*pack(prepared)))
    expected = torch.stack([x.abs().max() if x.numel() else torch.tensor(0.0).double() for x in prepared])
    assert torch.equal(absolute_max(shard, segments, scale=-0.3, clamp=2.0), expected)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_only_the_segment_with_inf_or_nan_shows_it(dtype: torch.dtype, bad: float) -> None:
    tensors = make_tensors(dtype)
    tensors[5][4999] = bad
    for result in (square_sums(*pack(tensors)), absolute_max(*pack(tensors))):
        assert (~result.isfinite()).nonzero().flatten().tolist() == [5]


def test_square_sums_of_the_largest_fp32_numbers_are_finite() -> None:
    largest = torch.full((100_000,), torch.finfo(torch.float32).max)
    assert square_sums(largest, [(0, 100_000)]).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_absolute_max_is_the_infinity_norm(dtype: torch.dtype) -> None:
    tensors = [x for x in make_tensors(dtype) if x.numel()]
    expected = torch.stack([torch.linalg.vector_norm(x, math.inf).double() for x in tensors])
    assert torch.equal(absolute_max(*pack(tensors, filler=math.inf)), expected)


@pytest.mark.parametrize("norm", [square_sums, absolute_max])
def test_no_segments_and_empty_segments(norm: Any) -> None:
    assert norm(torch.ones(1024), []).shape == (0,)
    assert norm(torch.ones(1024), [(0, 0), (1024, 0)]).tolist() == [0.0, 0.0]
    assert norm(torch.ones(0), [(0, 0)]).tolist() == [0.0]


@pytest.mark.parametrize("norm", [square_sums, absolute_max])
def test_shard_is_read_only(norm: Any) -> None:
    shard, segments = pack(make_tensors(), filler=7.0)
    before = shard.clone()
    norm(shard, segments, scale=0.5, clamp=0.1)
    assert torch.equal(shard, before)


@pytest.mark.parametrize("norm", [square_sums, absolute_max])
@pytest.mark.parametrize(
    ("shard", "segments", "message"),
    [
        (torch.zeros(1024), [(100, 5)], r"\(100, 5\) must start at a multiple of 512"),
        (torch.zeros(1024), [(512, 513)], "inside the shard of 1024"),
        (torch.zeros(1024), [(-512, 5)], "inside the shard of 1024"),
        (torch.zeros(4, 4), [(0, 4)], r"shape \(4, 4\)"),
        (torch.zeros(1024, dtype=torch.int32), [(0, 4)], "int32"),
    ],
)
def test_bad_shards_and_segments_raise(norm: Any, shard: Tensor, segments: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        norm(shard, segments)


@pytest.mark.parametrize("max_norm", [0.0, 1e-4, 0.1, 1.0, 1e6])
@pytest.mark.parametrize("size", [0.0, 1e-3, 3.0, math.inf, math.nan])
def test_clip_coefficient_is_torchs(size: float, max_norm: float) -> None:
    grad = torch.full((9,), size)
    p = nn.Parameter(torch.zeros(9))
    p.grad = grad.clone()
    total_norm = torch.nn.utils.clip_grad_norm_([p], max_norm)
    ours = math.sqrt(square_sums(grad, [(0, 9)]).item())
    assert ours == pytest.approx(total_norm.item(), rel=1e-6, nan_ok=True)
    # torch's coefficient is fp32: within an ulp of the one in double.
    torch.testing.assert_close(grad * clip_coefficient(ours, max_norm), p.grad, rtol=3e-7, atol=0.0, equal_nan=True)


def test_clip_coefficient_of_nan_is_nan() -> None:
    assert math.isnan(clip_coefficient(math.nan, 1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_cuda_gives_the_bits_of_the_cpu(dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ELIXIR_KERNELS", kernels)
    shard, segments = pack(make_tensors(dtype, [*SIZES, 5_000_000]))
    for norm in (square_sums, absolute_max):
        expected = norm(shard, segments, scale=0.3, clamp=2.0)
        assert torch.equal(norm(shard.cuda(), segments, scale=0.3, clamp=2.0).cpu(), expected)


@pytest.mark.gpu
def test_cuda_shards_go_to_the_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    result = torch.ones(1)
    monkeypatch.setattr(scaling.gpu, "square_sums", lambda *operands: seen.append(operands) or result)
    shard = torch.ones(600, device="cuda")
    assert square_sums(shard, [(0, 600)], 0.5, 2.0) is result
    assert seen == [(shard, ((0, 600),), 0.5, 2.0)]
