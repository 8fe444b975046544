"""The compiled GPU kernels against torch's operations on the CPU, bit for bit.

Under TRITON_INTERPRET=1 the same tests run on CPU tensors, at the sizes an interpreter can do
(`tests/kernels/test_gpu_kernels.py` starts them so).
"""

from __future__ import annotations

import logging
import math
import os

import pytest
import torch
from torch import Tensor

from lightning_elixir.core import comm
from lightning_elixir.kernels import gpu
from lightning_elixir.kernels.sequence import Operands, Scalars, Table, run_sequence
from lightning_elixir.optim import scaling
from lightning_elixir.plan.types import ALIGN_NUMEL

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
if not IS_INTERPRETED:
    pytestmark = pytest.mark.gpu

fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _kernels_are_used(caplog: pytest.LogCaptureFixture) -> None:
    """Falling back to torch would pass every comparison."""
    caplog.set_level(logging.WARNING, "lightning_elixir.kernels.gpu")
    assert gpu._kernels().are_usable, caplog.text


def numbers(**changes: float) -> Scalars:
    usual = Scalars(
        grad_factor=0.37,
        l2=0.0,
        shrink=1.0 - 1e-5,
        beta1=0.9,
        one_minus_beta1=1.0 - 0.9,
        beta2=0.999,
        one_minus_beta2=1.0 - 0.999,
        eps=1e-8 * math.sqrt(1.0 - 0.999**3),
        minus_step_size=-1e-3 * math.sqrt(1.0 - 0.999**3) / (1.0 - 0.9**3),
    )
    return usual._replace(**changes)


NUMBERS = {
    "adamw": numbers(),
    "adam": numbers(l2=0.01, shrink=1.0),
    "vanishing_l2": numbers(l2=1e-60),
    "maximize": numbers(grad_factor=-1.0),
    "unscaled": numbers(grad_factor=1.0, shrink=1.0),
    "small_beta1": numbers(beta1=0.3, one_minus_beta1=0.7),
    "half_beta1": numbers(beta1=0.5, one_minus_beta1=0.5),
    "just_above_half_beta1": numbers(beta1=0.5 + 2**-40, one_minus_beta1=0.5 - 2**-40),
    "first_step": numbers(eps=1e-8 * math.sqrt(0.001), minus_step_size=-1e-3 * math.sqrt(0.001) / 0.1),
    "overflowing": numbers(grad_factor=1e300),
    "nan": numbers(grad_factor=math.nan),
}

# parameter, gradient, moments, compute
DTYPES = [
    (fp32, fp32, fp32, None),
    (fp32, fp32, fp32, fp32),
    (fp32, fp32, fp32, bf16),
    (fp32, bf16, fp32, bf16),
    (fp32, fp16, fp32, fp16),
    (fp32, bf16, fp32, fp16),
    (bf16, bf16, bf16, None),
    (fp16, fp16, fp16, None),
    (bf16, fp32, bf16, fp16),
    (bf16, bf16, fp32, fp32),
]

Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def wild(numel: int, dtype: torch.dtype) -> Tensor:
    """Numbers of all magnitudes, with zeros of both signs, denormals, infinities and nan."""
    x = torch.randn(numel) * torch.pow(10.0, torch.randint(-30, 3, (numel,)).float())
    x[::17] = 0.0
    x[1::19] = -0.0
    x[5::97] = torch.randn(x[5::97].shape) * 1e-40
    x[7::101] = torch.randn(x[7::101].shape) * 3e-8  # denormals of fp16
    x[11::397] = math.inf
    x[13::401] = -math.inf
    x[17::409] = math.nan
    x.view(torch.int32)[23::419] = 0x7FFFFFFF  # the nan of a GPU: rounding its bits up would make it -0
    x[19::211] = 3.38e38  # rounds to bf16's largest or to inf
    return x.to(dtype)


def start(numel: int, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype | None]) -> Tensors:
    param, grad, moments, compute = dtypes
    return (
        wild(numel, param),
        wild(numel, grad),
        wild(numel, moments),
        wild(numel, moments).abs(),
        None if compute is None else torch.full((numel,), 7.0, dtype=compute),
    )


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """The same bits; a nan may be any nan."""
    actual = actual.cpu()
    assert torch.equal(actual.isnan(), expected.isnan())
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.itemsize]
    where = ~expected.isnan()
    assert torch.equal(actual.view(bits)[where], expected.view(bits)[where])


def check_adam(tensors: Tensors, table: Table) -> None:
    expected = tuple(None if x is None else x.clone() for x in tensors)
    param, grad, exp_avg, exp_avg_sq, compute = expected
    assert param is not None
    assert grad is not None
    assert exp_avg is not None
    assert exp_avg_sq is not None
    for first, numel, scalars in table:
        span = slice(first, first + numel)
        narrow = None if compute is None else compute[span]
        run_sequence(param[span], grad[span], exp_avg[span], exp_avg_sq[span], scalars, narrow)
    p, g, m, v, c = (None if x is None else x.to(DEVICE) for x in tensors)
    assert p is not None
    assert g is not None
    assert m is not None
    assert v is not None
    assert gpu.adam_update(Operands(p, g, m, v, c), table)
    for x, y in zip((p, g, m, v, c), expected, strict=True):
        if x is not None and y is not None:
            assert_same(x, y)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_adam_keeps_the_written_sequence_for_all_dtypes(
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype | None],
) -> None:
    check_adam(start(3000, dtypes), [(0, 3000, numbers())])


@pytest.mark.parametrize("name", NUMBERS)
def test_adam_keeps_the_written_sequence_for_all_settings(name: str) -> None:
    check_adam(start(3000, (fp32, bf16, fp32, bf16)), [(0, 3000, NUMBERS[name])])


@pytest.mark.parametrize("numel", [0, 1, 511, 1023, 1024, 1025, 2048])
def test_adam_of_any_length(numel: int) -> None:
    check_adam(start(numel, (fp32, bf16, fp32, bf16)), [(0, numel, numbers())])


@pytest.mark.parametrize("skip", [1, 2, 3])
def test_adam_of_tensors_that_start_anywhere(skip: int) -> None:
    whole = start(3000, (fp32, bf16, fp32, bf16))
    buffers = [None if x is None else x.to(DEVICE) for x in whole]
    parts = [None if x is None else x[skip:2500] for x in buffers]
    expected = [None if x is None else x[skip:2500].clone() for x in whole]
    assert gpu.adam_update(Operands(*parts), [(0, 2500 - skip, numbers())])  # type: ignore[arg-type]
    run_sequence(*expected[:4], numbers(), expected[4])  # type: ignore[arg-type]
    for buffer, original, updated in zip(buffers, whole, expected, strict=True):
        if buffer is not None and original is not None and updated is not None:
            assert_same(buffer, torch.cat([original[:skip], updated, original[2500:]]))


def test_what_lies_between_the_parts_stays() -> None:
    first, second, third = numbers(), numbers(l2=0.01, shrink=1.0), numbers(beta1=0.3, one_minus_beta1=0.7)
    table = [
        (0, 1024, first),
        (1024, 700, first),  # touches the one before
        (2048, 1, second),
        (2560, 0, first),
        (2560, 1500, first),
        (4608, 2048, second),
        (8192, 1025, third),
    ]
    check_adam(start(10_000, (fp32, bf16, fp32, bf16)), table)


@pytest.mark.parametrize("num_settings", [1, 3])
def test_adam_of_many_parts(num_settings: int) -> None:
    num_parts = 20 if IS_INTERPRETED else 300
    settings = [numbers(minus_step_size=-1e-3 * (i + 1)) for i in range(num_settings)]
    table = []
    first = 0
    for i in range(num_parts):
        numel = (i * 37) % 1500 + 1
        table.append((first, numel, settings[i % num_settings]))
        first += -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL
    check_adam(start(first, (fp32, fp16, fp32, fp16)), table)


@pytest.mark.parametrize("dtype", [fp32, bf16, fp16])
def test_compute_may_be_the_gradients_memory(dtype: torch.dtype) -> None:
    param, grad, exp_avg, exp_avg_sq, compute = start(5000, (fp32, dtype, fp32, dtype))
    assert compute is not None
    p, g, m, v = (x.clone().to(DEVICE) for x in (param, grad, exp_avg, exp_avg_sq))
    table = [(0, 2000, numbers()), (2048, 2952, numbers())]
    for first, numel, scalars in table:
        part = slice(first, first + numel)
        run_sequence(param[part], grad[part], exp_avg[part], exp_avg_sq[part], scalars, compute[part])
    assert gpu.adam_update(Operands(p, g, m, v, g), table)
    for x, y in zip((p, m, v), (param, exp_avg, exp_avg_sq), strict=True):
        assert_same(x, y)
    assert_same(g, torch.cat([compute[:2000], grad[2000:2048], compute[2048:]]))


def test_autograd_sees_that_the_parameter_has_changed() -> None:
    param, grad, exp_avg, exp_avg_sq, _ = (None if x is None else x.to(DEVICE) for x in start(10, (fp32,) * 4))
    assert param is not None
    leaf = param.requires_grad_()
    loss = (leaf * leaf).sum()
    assert gpu.adam_update(Operands(leaf, grad, exp_avg, exp_avg_sq), [(0, 10, numbers())])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Sums of squares


def pack(sizes: list[int], dtype: torch.dtype) -> tuple[Tensor, tuple[tuple[int, int], ...]]:
    """A shard of parts of these sizes, with nan between them."""
    segments = []
    first = 0
    for numel in sizes:
        segments.append((first, numel))
        first += -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL
    shard = torch.full((first,), math.nan)
    for first, numel in segments:
        shard[first : first + numel] = torch.randn(numel) * torch.pow(10.0, torch.randint(-6, 3, (numel,)).float())
    return shard.to(dtype), tuple(segments)


def check_sums(
    shard: Tensor, segments: tuple[tuple[int, int], ...], scale: float = 1.0, clamp: float | None = None
) -> None:
    result = gpu.square_sums(shard.to(DEVICE), segments, scale, clamp)
    assert result is not None
    assert result.dtype == torch.float64
    assert_same(result, scaling.square_sums(shard, segments, scale, clamp))


@pytest.mark.parametrize("dtype", [fp32, bf16, fp16, torch.float64])
def test_square_sums_add_in_the_written_order(dtype: torch.dtype) -> None:
    check_sums(*pack([1, 511, 512, 513, 0, 4096, 4097], dtype))


@pytest.mark.parametrize(("scale", "clamp"), [(0.3, None), (1.0, 2.0), (-0.3, 0.7), (1.0, 0.0), (0.0, None)])
def test_scale_and_clamp_come_before_squaring(scale: float, clamp: float | None) -> None:
    check_sums(*pack([700, 5000], fp32), scale, clamp)


def test_square_sums_over_three_levels() -> None:
    check_sums(*pack([262_145, 3], fp32))


@pytest.mark.parametrize("segments", [(), ((0, 0),), ((0, 0), (512, 0)), ((1024, 3), (0, 600), (1024, 3))])
def test_square_sums_of_nothing_and_in_any_order(segments: tuple[tuple[int, int], ...]) -> None:
    check_sums(torch.randn(2000), segments)


@pytest.mark.skipif(IS_INTERPRETED, reason="an interpreter compiles nothing")
@pytest.mark.parametrize("dtype", [fp32, bf16, fp16])
def test_nothing_is_compiled_for_sums_after_they_have_been_loaded(dtype: torch.dtype) -> None:
    scaling.load_square_sums(DEVICE, dtype)
    compiled = gpu._kernels().code.sum_kernel.device_caches[0][0]
    known = len(compiled)
    segments = [(start * 1000 * ALIGN_NUMEL, 999 * ALIGN_NUMEL + start) for start in range(16)]
    values = torch.ones(16_000 * ALIGN_NUMEL, dtype=dtype, device=DEVICE)
    for scale in (1.0, 1 / 3, 2.0**-16):
        scaling.square_sums(values, segments, scale)
    scaling.square_sums(values, segments[:1])
    assert known >= 2
    assert len(compiled) == known


def test_square_sums_of_many_segments() -> None:
    check_sums(*pack([(i * 37) % 1500 for i in range(20 if IS_INTERPRETED else 300)], bf16))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_only_the_segment_with_inf_or_nan_shows_it(bad: float) -> None:
    shard, segments = pack([600, 5000, 100], fp16)
    shard[segments[1][0] + 4999] = bad
    check_sums(shard, segments)
    check_sums(shard, segments, clamp=1.0)


def test_square_sums_of_denormals_and_of_the_largest_numbers() -> None:
    check_sums(torch.full((1500,), 1e-41), ((0, 1500),))
    check_sums(torch.full((1500,), 1e-39).to(bf16), ((0, 1500),))
    check_sums(torch.full((1500,), torch.finfo(fp32).max), ((0, 1500),))


@pytest.mark.parametrize("numel", [2047, 3 * 2048 + 1])
@pytest.mark.parametrize("num_rows", [2, 5])
@pytest.mark.parametrize(("dtype", "wider"), [(fp32, fp32), (bf16, bf16), (fp16, fp16), (bf16, fp32)])
def test_means_add_up_from_the_first_row_on(dtype: torch.dtype, wider: torch.dtype, num_rows: int, numel: int) -> None:
    rows = (torch.randn(num_rows, numel) * torch.randint(-12, 12, (num_rows, numel)).exp2()).to(dtype)
    rows[:, 0] = torch.tensor([math.inf, 1.0, -0.0, math.nan, 2.0])[:num_rows]
    around, expected = torch.zeros(numel + 1024, dtype=wider, device=DEVICE), torch.empty(numel, dtype=wider)
    comm.mean_of_rows(rows, expected)
    mean = around[512 : 512 + numel]
    version = mean._version
    assert gpu.mean_of_rows(rows.to(DEVICE), mean)
    assert_same(mean, expected)
    assert mean._version > version
    assert not around[:512].any()
    assert not around[512 + numel :].any()


# What only a device can do


@pytest.mark.gpu
def test_more_than_two_to_the_31_bytes() -> None:
    numel = 2**30 + 777
    generator = torch.Generator(DEVICE).manual_seed(0)
    tensors = [torch.randn(numel, device=DEVICE, generator=generator) for _ in range(3)]
    param, exp_avg, exp_avg_sq = tensors[0], tensors[1], tensors[2].abs_()
    grad = torch.randn(numel, device=DEVICE, dtype=bf16, generator=generator)
    tail = slice(numel - 10_000, numel)
    expected = [x[tail].cpu() for x in (param, grad, exp_avg, exp_avg_sq)]
    run_sequence(*expected, numbers())  # type: ignore[arg-type]
    assert gpu.adam_update(Operands(param, grad, exp_avg, exp_avg_sq), [(0, numel, numbers())])
    for x, y in zip((param, grad, exp_avg, exp_avg_sq), expected, strict=True):
        assert_same(x[tail], y)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    numel = 2**31 + 5 * ALIGN_NUMEL
    shard = torch.zeros(numel, dtype=bf16, device=DEVICE)
    param, exp_avg, exp_avg_sq = (torch.zeros_like(shard) for _ in range(3))
    far = 2**31 + ALIGN_NUMEL
    shard[far:] = torch.randn(4 * ALIGN_NUMEL, device=DEVICE)
    head = torch.randn(700, device=DEVICE).to(bf16)
    shard[:700] = head
    segments = ((0, 700), (far, 4 * ALIGN_NUMEL))
    result = gpu.square_sums(shard, segments)
    assert result is not None
    near = torch.cat([shard[:1024], shard[far:]]).cpu()
    assert_same(result, scaling.square_sums(near, ((0, 700), (1024, 4 * ALIGN_NUMEL))))
    table = [(0, 700, numbers()), (far, 4 * ALIGN_NUMEL - 3, numbers())]
    expected = [torch.zeros(4 * ALIGN_NUMEL - 3, dtype=bf16) for _ in range(3)]
    run_sequence(expected[0], near[1024:-3], expected[1], expected[2], numbers())
    assert gpu.adam_update(Operands(param, shard, exp_avg, exp_avg_sq), table)
    for x, y in zip((param, exp_avg, exp_avg_sq), expected, strict=True):
        assert_same(x[far : numel - 3], y)
        assert not x[700:far].any()
        assert not x[numel - 3 :].any()


@pytest.mark.gpu
def test_a_table_is_in_place_on_every_stream() -> None:
    table = [(i * 1024, 700, numbers()) for i in range(100)]
    tensors = start(100 * 1024, (fp32, bf16, fp32, bf16))
    check_adam(tensors, table)
    for _ in range(3):
        with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
            check_adam(tensors, table)


@pytest.mark.gpu
def test_a_step_like_the_last_neither_copies_nor_waits() -> None:
    shard, segments = pack([700] * 20, bf16)
    tensors = [x.to(DEVICE) for x in start(shard.numel(), (fp32, bf16, fp32, bf16)) if x is not None]
    grad = shard.to(DEVICE)

    def step(size: float) -> None:
        table = [(first, numel, numbers(minus_step_size=size)) for first, numel in segments]
        assert gpu.adam_update(Operands(*tensors), table)
        assert gpu.square_sums(grad, segments, scale=size) is not None

    step(-1e-3)
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        step(-2e-3)
    names = {event.name for event in profile.events()} - {"cudaDeviceSynchronize"}  # the profiler's own
    assert not [name for name in names if "Memcpy" in name or "Synchronize" in name]
