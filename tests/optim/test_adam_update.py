"""`adam_update_`: the written sequence, bitwise, on every device and for every way of cutting the tensor."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from lightning_elixir.kernels import sequence
from lightning_elixir.optim import adam
from lightning_elixir.optim.adam import AdamHyper, Operands, adam_update_, load_adam, update_parts_
from tests.helpers.tiers import full

SETTINGS: dict[str, AdamHyper] = {
    "adamw": AdamHyper(
        lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, adamw_mode=True, bias_correction=True
    ),
    "adam": AdamHyper(
        lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-6, weight_decay=0.1, adamw_mode=False, bias_correction=True
    ),
    "uncorrected": AdamHyper(
        lr=3e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, adamw_mode=True, bias_correction=False
    ),
    "small_beta1": AdamHyper(
        lr=1e-2, beta1=0.3, beta2=0.99, eps=1e-8, weight_decay=0.0, adamw_mode=True, bias_correction=True
    ),
}

# parameter, gradient, states
DTYPES = [
    pytest.param(torch.float32, torch.float32, torch.float32, id="fp32"),
    pytest.param(torch.float32, torch.bfloat16, torch.float32, id="fp32-bf16-grad"),
    pytest.param(torch.float32, torch.float16, torch.float32, id="fp32-fp16-grad"),
    pytest.param(torch.float32, torch.float64, torch.float32, id="fp32-fp64-grad"),
    pytest.param(torch.float64, torch.float64, torch.float64, id="fp64"),
    pytest.param(torch.bfloat16, torch.bfloat16, torch.bfloat16, id="bf16"),
    pytest.param(torch.float16, torch.float16, torch.float16, id="fp16"),
    pytest.param(torch.bfloat16, torch.bfloat16, torch.float32, id="bf16-fp32-states"),
]


def random_gradient(numel: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gradients over many magnitudes, with zeros and denormals among them."""
    exponents = torch.randint(-12, 2, (numel,), generator=generator).float()
    grad = torch.randn(numel, generator=generator) * torch.pow(10.0, exponents)
    grad[::17] = 0.0
    grad[5::97] = 1e-41
    return grad.to(dtype)


def random_start(
    numel: int,
    param_dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(numel)
    param = torch.randn(numel, generator=generator).to(param_dtype)
    return (
        param,
        random_gradient(numel, generator, grad_dtype),
        torch.zeros(numel, dtype=state_dtype),
        torch.zeros(numel, dtype=state_dtype),
    )


def run_steps(
    start: tuple[Tensor, Tensor, Tensor, Tensor], settings: AdamHyper, num_steps: int = 3, device: str = "cpu"
) -> list[Tensor]:
    """Parameter and moments after some steps with the gradient scaled a little differently in each, on the CPU."""
    param, grad, exp_avg, exp_avg_sq = (x.clone().to(device) for x in start)
    for step in range(1, num_steps + 1):
        adam_update_(Operands(param, grad, exp_avg, exp_avg_sq), settings.scalars(step, 1.0 / step))
    return [x.cpu() for x in (param, exp_avg, exp_avg_sq)]


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def numpy_sequence(
    p: npt.NDArray[np.float32],
    g: npt.NDArray[np.float32],
    m: npt.NDArray[np.float32],
    v: npt.NDArray[np.float32],
    step: int,
    s: AdamHyper,
) -> list[npt.NDArray[np.float32]]:
    """The docstring of `adam_update_`, literally, in numpy: its element-wise operations are single IEEE ones."""
    f = p.dtype.type
    one = f(1.0)
    c1 = 1.0 - s.beta1**step if s.bias_correction else 1.0
    c2 = math.sqrt(1.0 - s.beta2**step) if s.bias_correction else 1.0
    if s.adamw_mode:
        p = p * f(1.0 - s.lr * s.weight_decay)
    else:
        g = g + p * f(s.weight_decay)
    m = m + (g - m) * f(1.0 - s.beta1) if 1.0 - s.beta1 < 0.5 else g - (g - m) * f(s.beta1)
    v = v * f(s.beta2) + (g * f(1.0 - s.beta2)) * g
    with np.errstate(divide="ignore"):
        d = one / (one / np.sqrt(v)) + f(s.eps * c2)
    p = p + (m * f(-s.lr * c2 / c1)) / d
    return [p, m, v]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SETTINGS)
def test_follows_the_written_sequence_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    param, grad, exp_avg, exp_avg_sq = random_start(100_003, dtype, dtype, dtype)
    expected = [param.numpy().copy(), exp_avg.numpy().copy(), exp_avg_sq.numpy().copy()]
    for step in range(1, 4):
        adam_update_(Operands(param, grad, exp_avg, exp_avg_sq), SETTINGS[name].scalars(step))
        expected = numpy_sequence(expected[0], grad.numpy(), expected[1], expected[2], step, SETTINGS[name])
    assert_same_bits([param, exp_avg, exp_avg_sq], [torch.from_numpy(x) for x in expected])


@pytest.mark.parametrize("stride", [full(1), 31])
def test_cpu_root_and_quotient_are_correctly_rounded(stride: int) -> None:
    # Mantissas at both parities of the exponent. fp64 has more than twice fp32's digits: rounding twice is exact.
    bits = torch.arange(0x3F800000, 0x40800000, stride, dtype=torch.int32)
    x = bits.view(torch.float32)
    root = x.double().sqrt().float()
    inverse = torch.rsqrt(x)
    assert torch.equal(inverse, (1.0 / root.double()).float())
    assert torch.equal(inverse.reciprocal(), (1.0 / inverse.double()).float())


@pytest.mark.parametrize(("param_dtype", "grad_dtype", "state_dtype"), DTYPES)
def test_any_split_gives_the_same_bits(
    param_dtype: torch.dtype, grad_dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    start = random_start(70_001, param_dtype, grad_dtype, state_dtype)
    whole = run_steps(start, SETTINGS["adamw"])
    cuts = [0, 1, 2, 9, 40, 41, 1000, 33_333, 66_007, 70_001]
    parts = [run_steps(tuple(x[a:b] for x in start), SETTINGS["adamw"]) for a, b in zip(cuts, cuts[1:], strict=False)]
    assert_same_bits([torch.cat(x) for x in zip(*parts, strict=True)], whole)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_thread_count_does_not_matter(num_threads: int) -> None:
    start = random_start(300_007, grad_dtype=torch.bfloat16)
    torch.set_num_threads(1)
    expected = run_steps(start, SETTINGS["adamw"])
    torch.set_num_threads(num_threads)
    assert_same_bits(run_steps(start, SETTINGS["adamw"]), expected)


@pytest.mark.parametrize("piece", [1, 7, 64, 1000])
def test_piece_size_does_not_matter(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start = random_start(1234, torch.bfloat16, torch.bfloat16, torch.bfloat16)
    expected = run_steps(start, SETTINGS["adam"])
    monkeypatch.setattr(sequence, "_CPU_PIECE_NUMEL_PER_THREAD", piece)
    assert_same_bits(run_steps(start, SETTINGS["adam"]), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradient_is_widened_exactly(dtype: torch.dtype) -> None:
    narrow = random_start(5000, grad_dtype=dtype)
    wide = (narrow[0], narrow[1].float(), narrow[2], narrow[3])
    assert_same_bits(run_steps(narrow, SETTINGS["adam"]), run_steps(wide, SETTINGS["adam"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_storage_is_rounded_once_a_step(dtype: torch.dtype) -> None:
    narrow = random_start(5000, dtype, dtype, dtype)
    wide = (narrow[0].float(), narrow[1].float(), narrow[2].float(), narrow[3].float())
    actual = run_steps(narrow, SETTINGS["adamw"], num_steps=1)
    assert_same_bits(actual, [x.to(dtype) for x in run_steps(wide, SETTINGS["adamw"], num_steps=1)])


def test_gradient_is_read_only() -> None:
    for settings in SETTINGS.values():
        param, grad, exp_avg, exp_avg_sq = random_start(999)
        before = grad.clone()
        adam_update_(Operands(param, grad, exp_avg, exp_avg_sq), replace(settings, maximize=True).scalars(1, 0.5))
        assert torch.equal(grad, before)


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_grad_factor_multiplies_the_gradient(name: str) -> None:
    first, second = random_start(4000), random_start(4000)
    adam_update_(Operands(*first), SETTINGS[name].scalars(1, 0.3))
    adam_update_(Operands(second[0], second[1] * 0.3, *second[2:]), SETTINGS[name].scalars(1))
    assert_same_bits([first[0], *first[2:]], [second[0], *second[2:]])


def test_maximize_negates_the_gradient() -> None:
    first, second = random_start(4000), random_start(4000)
    adam_update_(Operands(*first), replace(SETTINGS["adam"], maximize=True).scalars(1))
    adam_update_(Operands(second[0], -second[1], *second[2:]), SETTINGS["adam"].scalars(1))
    assert_same_bits([first[0], *first[2:]], [second[0], *second[2:]])


@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
def test_compute_receives_the_updated_parameter(param_dtype: torch.dtype) -> None:
    start = random_start(70_000, param_dtype)
    compute = torch.full((70_000,), math.nan, dtype=torch.float16)
    plain = run_steps(start, SETTINGS["adamw"], num_steps=1)
    param, grad, exp_avg, exp_avg_sq = start
    adam_update_(Operands(param, grad, exp_avg, exp_avg_sq, compute), SETTINGS["adamw"].scalars(1))
    assert_same_bits([param, exp_avg, exp_avg_sq], plain)
    assert torch.equal(compute, param.half())


def test_updates_a_leaf_that_requires_grad() -> None:
    param, grad, exp_avg, exp_avg_sq = random_start(10)
    leaf = param.clone().requires_grad_()
    adam_update_(Operands(leaf, grad, exp_avg, exp_avg_sq), SETTINGS["adamw"].scalars(1))
    assert not torch.equal(leaf, param)
    assert leaf.grad_fn is None


def test_empty_tensors_are_fine() -> None:
    adam_update_(Operands(*random_start(0)), SETTINGS["adamw"].scalars(1))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"grad": torch.zeros(3)}, "3 elements on cpu beside a parameter of 4"),
        ({"grad": torch.zeros(4, device="meta")}, "on meta beside a parameter of 4 on cpu"),
        ({"exp_avg": torch.zeros(2, 2)}, r"got shape \(2, 2\)"),
        ({"exp_avg_sq": torch.zeros(8)[::2]}, r"stride \(2,\)"),
        ({"grad": torch.zeros(4, dtype=torch.int64)}, "int64"),
        ({"compute": torch.zeros(5)}, "5 elements"),
    ],
)
def test_tensors_that_do_not_fit_raise(broken: dict[str, Tensor], message: str) -> None:
    good = {name: torch.zeros(4) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}
    with pytest.raises(ValueError, match=message):
        adam_update_(Operands(**{**good, **broken}), SETTINGS["adamw"].scalars(1))


@pytest.mark.parametrize(("start", "numel"), [(-1, 2), (0, 5), (3, 2), (2, -1)])
def test_part_outside_the_tensors_raises(start: int, numel: int) -> None:
    tensors = [torch.zeros(4) for _ in range(4)]
    with pytest.raises(ValueError, match=f"part of {numel} elements from {start} on is not within 4"):
        update_parts_(Operands(*tensors), [(start, numel, SETTINGS["adamw"].scalars(1))])


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("param_dtype", "grad_dtype", "state_dtype"), DTYPES)
def test_cuda_gives_the_bits_of_the_cpu(
    param_dtype: torch.dtype, grad_dtype: torch.dtype, state_dtype: torch.dtype, name: str
) -> None:
    start = random_start(1_000_003, param_dtype, grad_dtype, state_dtype)
    on_cpu = run_steps(start, SETTINGS[name], num_steps=5)
    assert_same_bits(run_steps(start, SETTINGS[name], num_steps=5, device="cuda"), on_cpu)


@pytest.mark.gpu
def test_cuda_piece_size_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    start = random_start(1_000_003, grad_dtype=torch.float16)
    expected = run_steps(start, SETTINGS["adamw"], device="cuda")
    monkeypatch.setattr(sequence, "_DEVICE_PIECE_NUMEL", 100_001)
    assert_same_bits(run_steps(start, SETTINGS["adamw"], device="cuda"), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_loading_is_one_update_of_such_dtypes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[Operands] = []

    def update(operands: Operands, *args: object, **options: object) -> None:
        updates.append(operands)
        update_parts_(operands, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(adam, "update_parts_", update)
    fp32, bf16 = torch.float32, torch.bfloat16
    load_adam(torch.device(device), [fp32, bf16, fp32, fp32, bf16])
    load_adam(torch.device(device), [bf16, bf16, bf16, bf16])
    shown = [[None if x is None else (x.dtype, x.device.type) for x in operands[:5]] for operands in updates]
    mixed = [fp32, bf16, fp32, fp32, bf16]
    assert shown == [[(dtype, device) for dtype in mixed], [*[(bf16, device)] * 4, None]]
