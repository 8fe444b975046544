"""`HybridAdam` and `CPUAdam` as drop-ins for torch's Adam and AdamW."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir.errors import PlanError
from lightning_elixir.kernels.cpu import implementation
from lightning_elixir.kernels.sequence import Operands, Scalars
from lightning_elixir.optim import CPUAdam, HybridAdam, hybrid_adam
from lightning_elixir.optim.adam import AdamHyper
from tests.helpers.tiers import crossed

TORCH_CLASS: dict[bool, type[torch.optim.Adam]] = {True: torch.optim.AdamW, False: torch.optim.Adam}
SHAPES: list[tuple[int, ...]] = [(1,), (130_000,), (17, 33), (3, 5, 7), (), (0,), (4, 0), (2049,)]


def make_parameters(shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(parameters: list[nn.Parameter], step: int, skip: int | None = None) -> None:
    """The same gradients for every list of parameters of the same shapes; None for the one to skip."""
    generator = torch.Generator().manual_seed(100 + step)
    for i, p in enumerate(parameters):
        grad = torch.randn(p.shape, generator=generator) * 10.0 ** (step % 3 - 2)
        p.grad = None if i == skip else grad.to(p.dtype).to(p.device)


def train(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(parameters, step)
        optimizer.step()


def assert_close_to_torch(actual: list[Tensor], expected: list[Tensor], num_steps: int, per_step: float) -> None:
    """Within rounding that adds up like a random walk: torch contracts multiply-adds and takes MKL's inexact roots.

    One ulp after one step and about `sqrt(steps)` after many was measured, as far from fp64 as torch is. An ulp is
    taken at the magnitude of the element, or of `per_step` (what one step can move) where that is more.
    """
    for a, b in zip(actual, expected, strict=True):
        eps = torch.finfo(b.dtype).eps
        ulp = torch.clamp(b.abs(), min=per_step) * eps
        worst = ((a - b).abs() / ulp).max().item() if b.numel() else 0.0
        assert worst <= 1.0 + 1.5 * num_steps**0.5, f"{worst} ulps after {num_steps} steps"


def assert_same_values(actual: list[nn.Parameter], expected: list[nn.Parameter]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@crossed(
    dtype=[torch.float32, torch.float64],
    adamw_mode=[True, False],
    weight_decay=[0.0, 0.1],
    betas=[(0.9, 0.999), (0.3, 0.95), (0.0, 0.9)],
    together=1,
)
def test_close_to_torch_over_many_steps(
    betas: tuple[float, float], weight_decay: float, adamw_mode: bool, dtype: torch.dtype
) -> None:
    ours, theirs = make_parameters(dtype=dtype), make_parameters(dtype=dtype)
    optimizer = HybridAdam(ours, lr=1e-2, betas=betas, weight_decay=weight_decay, adamw_mode=adamw_mode)
    reference = TORCH_CLASS[adamw_mode](theirs, lr=1e-2, betas=betas, weight_decay=weight_decay, foreach=False)
    for step in range(50):
        train(optimizer, ours, range(step, step + 1))
        train(reference, theirs, range(step, step + 1))
        if step in (0, 9, 49):
            assert_close_to_torch([p.data for p in ours], [p.data for p in theirs], step + 1, per_step=0.1)
    for name, largest in (("exp_avg", 0.1), ("exp_avg_sq", 1e-3)):
        states = [optimizer.state[p][name] for p in ours]
        assert_close_to_torch(states, [reference.state[p][name] for p in theirs], 50, per_step=largest)
    assert [optimizer.state[p]["step"].item() for p in ours] == [50.0] * len(ours)


@pytest.mark.parametrize("maximize", [True, False])
def test_groups_keep_their_own_settings(maximize: bool) -> None:
    def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": parameters[:3], "weight_decay": 0.1, "lr": 3e-3},
            {"params": parameters[3:], "betas": (0.8, 0.9), "eps": 1e-3},
        ]

    ours, theirs = make_parameters(), make_parameters()
    train(HybridAdam(groups(ours), lr=1e-2, weight_decay=0.0, maximize=maximize), ours, range(10))
    reference = torch.optim.AdamW(groups(theirs), lr=1e-2, weight_decay=0.0, maximize=maximize, foreach=False)
    train(reference, theirs, range(10))
    assert_close_to_torch([p.data for p in ours], [p.data for p in theirs], 10, per_step=0.1)


def test_without_bias_correction_the_first_step_is_larger() -> None:
    p = nn.Parameter(torch.zeros(1))
    p.grad = torch.ones(1)
    HybridAdam([p], lr=1.0, eps=0.0, bias_correction=False).step()
    assert p.item() == pytest.approx(-0.1 / 0.001**0.5, rel=1e-6)


def _strided(value: Tensor) -> Tensor:
    holder = torch.full((*value.shape, 2), 7.0)
    holder[..., 0] = value
    return holder[..., 0]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "permuted": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "with_gaps": _strided,
    "offset": lambda x: torch.cat([torch.ones(3), x.flatten()])[3:].view(x.shape),
}


@pytest.mark.parametrize("grad_layout", ["contiguous", "same"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_in_memory_does_not_matter(layout: str, grad_layout: str) -> None:
    value = torch.randn(4, 3, 5, 2)
    plain, other = nn.Parameter(value.clone()), nn.Parameter(LAYOUTS[layout](value.clone()))
    assert other.stride() != plain.stride() or other.storage_offset()
    optimizers = [HybridAdam([p], weight_decay=0.1) for p in (plain, other)]
    for _ in range(3):
        grad = torch.randn(4, 3, 5, 2)
        plain.grad = grad
        other.grad = LAYOUTS[layout](grad) if grad_layout == "same" else grad
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(other, plain)
    assert torch.equal(optimizers[1].state[other]["exp_avg"], optimizers[0].state[plain]["exp_avg"])


@pytest.mark.parametrize("layout", ["transposed", "permuted", "channels_last", "offset"])
def test_dense_layouts_are_updated_without_a_copy(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = nn.Parameter(LAYOUTS[layout](torch.randn(4, 3, 5, 2)))
    p.grad = LAYOUTS[layout](torch.randn(4, 3, 5, 2))
    addresses = []

    def update(operands: Operands, scalars: Scalars) -> None:
        addresses.extend(x.data_ptr() for x in operands[:4])

    optimizer = HybridAdam([p])
    monkeypatch.setattr(hybrid_adam, "adam_update_", update)
    optimizer.step()
    state = optimizer.state[p]
    assert addresses == [x.data_ptr() for x in (p, p.grad, state["exp_avg"], state["exp_avg_sq"])]


def test_parameter_with_gaps_leaves_its_neighbours_alone() -> None:
    holder = torch.full((6, 2), 7.0)
    p = nn.Parameter(holder[:, 0])
    p.grad = torch.ones(6)
    HybridAdam([p], lr=1.0).step()
    assert torch.equal(holder[:, 1], torch.full((6,), 7.0))
    assert torch.allclose(holder[:, 0], torch.full((6,), 6.0))


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("optimizer_class", [HybridAdam, CPUAdam])
def test_fp32_parameter_takes_other_gradients(optimizer_class: type[HybridAdam], grad_dtype: torch.dtype) -> None:
    narrow, wide = make_parameters(), make_parameters()
    optimizers = optimizer_class(narrow), optimizer_class(wide)
    for p in narrow:
        p.grad_dtype = grad_dtype
    for _ in range(3):
        for p, q in zip(narrow, wide, strict=True):
            p.grad = torch.randn(p.shape).to(grad_dtype)
            q.grad = p.grad.float()
            assert p.grad.dtype == grad_dtype
        for optimizer in optimizers:
            optimizer.step()
    assert_same_values(narrow, wide)


def test_16_bit_gradient_put_in_place_through_data() -> None:
    p, q = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    p.grad, q.grad = torch.zeros(5), torch.full((5,), 0.3).bfloat16().float()
    p.grad.data = torch.full((5,), 0.3).bfloat16()
    for parameter in (p, q):
        HybridAdam([parameter]).step()
    assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_states_are_made_at_the_first_step_in_the_parameters_dtype(dtype: torch.dtype) -> None:
    parameters = make_parameters(dtype=dtype)
    optimizer = HybridAdam(parameters)
    assert not optimizer.state
    set_gradients(parameters, 0, skip=1)
    optimizer.step()
    assert parameters[1] not in optimizer.state
    state = optimizer.state[parameters[0]]
    assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (dtype, dtype)
    assert (state["step"].dtype, state["step"].shape, state["step"].device.type) == (torch.float32, (), "cpu")


def test_parameter_without_gradient_is_untouched() -> None:
    parameters = make_parameters()
    optimizer = HybridAdam(parameters, weight_decay=0.5)
    train(optimizer, parameters, range(2))
    before = parameters[1].detach().clone()
    state = copy.deepcopy(optimizer.state[parameters[1]])
    set_gradients(parameters, 2, skip=1)
    optimizer.step()
    assert torch.equal(parameters[1], before)
    assert all(torch.equal(optimizer.state[parameters[1]][name], state[name]) for name in state)
    assert optimizer.state[parameters[0]]["step"].item() == 3.0


@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("direction", ["from_torch", "to_torch"])
def test_state_dict_is_interchangeable_with_torch(direction: str, adamw_mode: bool) -> None:
    def ours(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return HybridAdam(parameters, lr=5.0, adamw_mode=adamw_mode)

    def theirs(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return TORCH_CLASS[adamw_mode](parameters, lr=5.0, foreach=False)

    first, second = (theirs, ours) if direction == "from_torch" else (ours, theirs)
    parameters = make_parameters()
    optimizer = first(parameters)
    optimizer.param_groups[0].update(lr=1e-2, weight_decay=0.1, betas=(0.8, 0.99), eps=1e-7)
    train(optimizer, parameters, range(3))
    moved = [nn.Parameter(p.detach().clone()) for p in parameters]
    loaded = second(moved)
    loaded.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    assert loaded.param_groups[0]["lr"] == 1e-2
    for p, q in zip(parameters, moved, strict=True):
        assert all(torch.equal(optimizer.state[p][name], loaded.state[q][name]) for name in optimizer.state[p])
    train(optimizer, parameters, range(3, 8))
    train(loaded, moved, range(3, 8))
    assert_close_to_torch([p.data for p in moved], [p.data for p in parameters], 5, per_step=0.1)
    assert [loaded.state[p]["step"].item() for p in moved] == [8.0] * len(moved)


def test_loaded_choice_of_implementation_is_dropped() -> None:
    theirs = make_parameters()
    reference = torch.optim.AdamW(theirs, fused=True)
    train(reference, theirs, range(1))
    saved = reference.state_dict()
    saved["param_groups"][0]["capturable"] = True
    saved["state"][0]["step"] = 1  # as torch 1.11 saved it
    ours = make_parameters()
    optimizer = HybridAdam(ours)
    optimizer.load_state_dict(saved)
    assert set(optimizer.param_groups[0]) == set(HybridAdam(make_parameters()).param_groups[0])
    assert [optimizer.state[p]["step"].device.type for p in ours] == ["cpu"] * len(ours)
    train(optimizer, ours, range(1, 2))
    assert optimizer.state[ours[0]]["step"].item() == 2.0


def test_mode_is_the_optimizers_not_the_checkpoints() -> None:
    theirs, ours = make_parameters(), make_parameters()
    first, second = ({"params": ours[:3]}, {"params": ours[3:], "decoupled_weight_decay": False})
    optimizer = HybridAdam([first, second], adamw_mode=True)
    optimizer.load_state_dict(torch.optim.Adam([{"params": theirs[:3]}, {"params": theirs[3:]}]).state_dict())
    for other in (optimizer, copy.deepcopy(optimizer)):
        assert [other.hyper_parameters(group).adamw_mode for group in other.param_groups] == [True, False]


def test_amsgrad_state_dict_is_refused_and_changes_nothing() -> None:
    parameters = make_parameters()
    optimizer = HybridAdam(parameters, lr=0.25)
    train(optimizer, parameters, range(1))
    with pytest.raises(PlanError, match="amsgrad"):
        optimizer.load_state_dict(torch.optim.AdamW(make_parameters(), amsgrad=True).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.state[parameters[0]]["step"].item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bitwise(dtype: torch.dtype) -> None:
    parameters = make_parameters(dtype=dtype)
    optimizer = HybridAdam(parameters, lr=1e-2, weight_decay=0.1, bias_correction=False)
    train(optimizer, parameters, range(4))
    resumed = [nn.Parameter(p.detach().clone()) for p in parameters]
    other = HybridAdam(resumed)
    other.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    for o, ps in ((optimizer, parameters), (other, resumed)):
        train(o, ps, range(4, 8))
    assert_same_values(resumed, parameters)
    assert not other.param_groups[0]["bias_correction"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
@pytest.mark.parametrize("adamw_mode", [True, False])
def test_copies_go_on_bitwise_and_apart(adamw_mode: bool, duplicate: Callable[[Any], Any]) -> None:
    parameters = make_parameters()
    optimizer = HybridAdam(parameters, weight_decay=0.3, adamw_mode=adamw_mode)
    train(optimizer, parameters, range(3))
    other = duplicate(optimizer)
    copies = other.param_groups[0]["params"]
    assert other.adamw_mode is adamw_mode
    train(other, copies, range(3, 6))
    assert optimizer.state[parameters[0]]["step"].item() == 3.0
    train(optimizer, parameters, range(3, 6))
    assert_same_values(copies, parameters)


def test_lr_scheduler_takes_effect() -> None:
    parameters, manual = make_parameters(), make_parameters()
    optimizer, other = HybridAdam(parameters, lr=1.0), HybridAdam(manual, lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for step in range(4):
        train(optimizer, parameters, range(step, step + 1))
        scheduler.step()
        other.param_groups[0]["lr"] = 0.5**step
        train(other, manual, range(step, step + 1))
    assert_same_values(parameters, manual)


def test_lr_as_tensor() -> None:
    parameters, plain = make_parameters(), make_parameters()
    optimizer = HybridAdam(parameters, lr=torch.tensor(0.5))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(optimizer, parameters, range(3))
    train(HybridAdam(plain, lr=0.5), plain, range(3))
    assert_same_values(parameters, plain)


def test_closure_runs_with_gradients_and_its_value_is_returned() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = HybridAdam([p])

    def closure() -> float:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss.item()

    with torch.no_grad():
        assert optimizer.step(closure) == 3.0
    assert p.max().item() < 1.0
    assert optimizer.step() is None


def test_argument_order_of_the_ancestors() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = HybridAdam([p], 0.1, False, (0.5, 0.6), 1e-4, 0.2, False, 0.0, None)
    assert optimizer.hyper_parameters(optimizer.param_groups[0]) == AdamHyper(
        lr=0.1, beta1=0.5, beta2=0.6, eps=1e-4, weight_decay=0.2, adamw_mode=False, bias_correction=False
    )


def test_simd_log_names_the_implementation(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning_elixir"):
        CPUAdam(make_parameters(), simd_log=True)
    assert f"CPUAdam: on the CPU {implementation()}, 1 threads" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be a finite number >= 0, got -1.0"),
        ({"lr": float("inf")}, "lr .* got inf"),
        ({"lr": float("nan")}, "lr .* got nan"),
        ({"lr": torch.tensor(-0.5)}, "lr .* got -0.5"),
        ({"lr": torch.ones(2)}, r"one element, got shape \(2,\)"),
        ({"eps": -1e-8}, "eps .* got -1e-08"),
        ({"weight_decay": -0.1}, "weight_decay .* got -0.1"),
        ({"betas": (1.0, 0.9)}, r"betas .* got \(1.0, 0.9\)"),
        ({"betas": (0.9, -0.1)}, r"betas .* got \(0.9, -0.1\)"),
        ({"betas": (0.9,)}, r"betas must be two numbers"),
        ({"amsgrad": True}, "amsgrad"),
        ({"nvme_offload_fraction": 1.5}, "nvme_offload_fraction must be between 0 and 1, got 1.5"),
        ({"nvme_offload_fraction": -0.5}, "between 0 and 1, got -0.5"),
        ({"nvme_offload_fraction": float("nan")}, "between 0 and 1, got nan"),
        ({"nvme_offload_fraction": "0.5"}, "between 0 and 1, as an int or a float, got '0.5'"),
        ({"nvme_offload_fraction": True}, "between 0 and 1, as an int or a float, got True"),
        ({"nvme_offload_dir": 3}, "nvme_offload_dir must be the path of a folder, got 3"),
        ({"nvme_offload_dir": ""}, "nvme_offload_dir must be the path of a folder, got ''"),
        ({"nvme_backend": "floppy"}, "unknown nvme_backend 'floppy': choose one of direct, tensornvme"),
    ],
)
def test_settings_out_of_range_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HybridAdam(make_parameters(), **settings)


@pytest.mark.parametrize("name", ["foreach", "fused", "capturable", "differentiable"])
def test_torch_implementation_arguments_are_not_accepted(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        HybridAdam(make_parameters(), **{name: True})


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"lr": -2.0}, "lr .* got -2.0"),
        ({"amsgrad": True}, "amsgrad"),
        ({"adamw_mode": False}, "decoupled_weight_decay=True for AdamW"),
        ({"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]}, "number 0 of its group .*complex64"),
    ],
)
def test_bad_group_is_not_added(group: dict[str, Any], message: str) -> None:
    optimizer = HybridAdam(make_parameters())
    with pytest.raises(PlanError, match=message):
        optimizer.add_param_group({"params": make_parameters([(2,)]), **group})
    assert len(optimizer.param_groups) == 1


def test_no_parameters_raise() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        HybridAdam([])


def test_sparse_gradient_raises_before_anything_is_updated() -> None:
    dense, table = nn.Parameter(torch.ones(3)), nn.Embedding(4, 2, sparse=True).weight
    optimizer = HybridAdam([("dense", dense), ("table", table)])
    dense.grad = torch.ones(3)
    nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum().backward()
    with pytest.raises(PlanError, match=r"gradient of parameter 'table' of shape \(4, 2\) is torch.sparse_coo"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(3))
    assert not optimizer.state


def test_gradient_on_another_device_raises() -> None:
    # torch lets no such gradient be assigned, but a gradient can stay behind when the parameter moves.
    p = nn.Parameter(torch.ones(3))
    optimizer = HybridAdam([p])

    class Moved(nn.Parameter):
        grad = torch.ones(3, device="meta")

    p.__class__ = Moved
    with pytest.raises(PlanError, match="is on cpu but its gradient on meta"):
        optimizer.step()


def test_cpu_adam_refuses_other_devices() -> None:
    with pytest.raises(PlanError, match="is on meta; use HybridAdam"):
        CPUAdam([nn.Parameter(torch.ones(3, device="meta"))])


@pytest.mark.full
def test_import_and_step_do_not_initialise_cuda() -> None:
    program = (
        "import torch; from lightning_elixir.optim import HybridAdam; p = torch.nn.Parameter(torch.ones(2));"
        "p.grad = torch.ones(2); HybridAdam([p]).step(); raise SystemExit(torch.cuda.is_initialized())"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adamw_mode", [True, False])
def test_cuda_gives_the_bits_of_the_cpu(adamw_mode: bool, dtype: torch.dtype) -> None:
    on_cpu = make_parameters(dtype=dtype)
    on_cuda = [nn.Parameter(p.detach().cuda()) for p in on_cpu]
    for parameters in (on_cpu, on_cuda):
        train(HybridAdam(parameters, lr=1e-2, weight_decay=0.1, adamw_mode=adamw_mode), parameters, range(10))
    assert_same_values([nn.Parameter(p.detach().cpu()) for p in on_cuda], on_cpu)


@pytest.mark.gpu
def test_state_dict_of_a_fused_cuda_optimizer() -> None:
    theirs, ours = make_parameters(), make_parameters()
    theirs, ours = ([nn.Parameter(p.detach().cuda()) for p in ps] for ps in (theirs, ours))
    reference = torch.optim.AdamW(theirs, lr=1e-3, fused=True)
    train(reference, theirs, range(2))
    optimizer = HybridAdam(ours)
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.state[ours[0]]["step"].device.type == "cpu"
    assert optimizer.state[ours[0]]["exp_avg"].device.type == "cuda"
    train(optimizer, ours, range(2, 4))
    assert optimizer.state[ours[0]]["step"].item() == 4.0


@pytest.mark.gpu
def test_cuda_parameter_with_cpu_gradient_raises() -> None:
    p = nn.Parameter(torch.ones(3, device="cuda"))

    class Moved(nn.Parameter):
        grad = torch.ones(3)

    p.__class__ = Moved
    with pytest.raises(PlanError, match="is on cuda:0 but its gradient on cpu"):
        HybridAdam([p]).step()
    with pytest.raises(PlanError, match="is on cuda:0; use HybridAdam"):
        CPUAdam([p])
