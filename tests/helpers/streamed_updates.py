"""Ways to train and places of what is trained; the same training at one place as at another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_elixir.optim import CPUAdam, HybridAdam, execution
from lightning_elixir.optim.streaming import StateStream
from lightning_elixir.plan.types import ChunkSpec, Plan, Tier
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.once import computed_once
from tests.helpers.plans import make_plan
from tests.helpers.zoo import ZOO, make

CPU = torch.device("cpu")


@dataclass(frozen=True)
class How:
    """How to train."""

    name: str = "gpt2"
    dtype: torch.dtype = torch.bfloat16
    master: bool = True
    micro_batches: int = 1
    clip_norm: float = 0.0
    clip_value: float = 0.0
    max_norm: float = 0.0
    scale: float = 0.0
    """Loss scale; 0: none."""
    overflow_at: int = -1
    """Step whose loss is infinite."""
    optimizer: Callable[..., HybridAdam] = HybridAdam
    adamw_mode: bool = True
    has_groups: bool = False
    init_step: bool = False
    steps: int = 4


@dataclass
class Result:
    values: dict[str, Tensor]
    optimizer_state: dict[str, Any]
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    numel: tuple[int, int, int] = (0, 0, 0)
    """Updated in the last step on the device, streamed, on the host."""


HOWS = {
    "bf16": How(),
    "fp32": How(dtype=torch.float32),
    "bf16_true": How(master=False),
    "accumulated": How(micro_batches=3),
    "accumulated_clipped": How(micro_batches=2, clip_norm=0.05),
    "clipped": How(clip_norm=0.05),
    "max_norm": How(max_norm=0.05),
    "clipped_by_value": How(clip_value=0.003),
    "fp32_clipped_by_value": How(dtype=torch.float32, clip_value=0.003, micro_batches=2),
    "bf16_true_clipped_by_value": How(master=False, clip_value=0.003),
    "scaled": How(scale=64.0, overflow_at=2),
    "scaled_clipped": How(scale=64.0, overflow_at=1, clip_norm=0.05, clip_value=0.003),
    "adam": How(adamw_mode=False),
    "cpu_adam": How(optimizer=CPUAdam),
    "groups": How(has_groups=True),
    "groups_adam_clipped": How(has_groups=True, adamw_mode=False, clip_norm=0.05),
    "init_step": How(init_step=True),
    "unused": How(name="branching"),
    "unused_fp32": How(name="branching", dtype=torch.float32, init_step=True),
    "frozen": How(name="frozen"),
    "odd": How(name="odd"),
    "tied": How(name="tied"),
    "conv": How(name="conv", dtype=torch.float32),
}


# What to make of a chunk that the "cpu" policy made: everything of it on the host.
SITES: dict[str, Callable[[ChunkSpec], ChunkSpec]] = {
    "host": lambda c: c,
    "streamed": lambda c: replace(c, is_update_streamed=True),
    "mixed": lambda c: replace(c, is_update_streamed=c.id % 2 == 0),
    "every_site": lambda c: replace(
        c, optim_tier=Tier.GPU if c.id % 3 == 0 else Tier.CPU, is_update_streamed=c.id % 3 == 1
    ),
    "streamed_param_on_gpu": lambda c: replace(c, param_tier=Tier.GPU, is_update_streamed=True),
    "streamed_persistent": lambda c: replace(c, param_tier=Tier.GPU, is_persistent=True, is_update_streamed=True),
    "mixed_persistent": lambda c: replace(c, param_tier=Tier.GPU, is_persistent=True, is_update_streamed=c.id % 2 == 0),
    "gpu": lambda c: replace(c, param_tier=Tier.GPU, optim_tier=Tier.GPU, is_persistent=True),
    "cast": lambda c: replace(c, param_tier=Tier.GPU, optim_tier=Tier.GPU),
    "some_cast": lambda c: c if c.id % 2 else replace(c, param_tier=Tier.GPU, optim_tier=Tier.GPU),
    "nvme": lambda c: replace(c, optim_tier=Tier.NVME),
    "nvme_some": lambda c: replace(c, optim_tier=Tier.NVME if c.id % 3 else Tier.CPU, is_update_streamed=c.id % 6 == 3),
    "nvme_param_on_gpu": lambda c: replace(c, param_tier=Tier.GPU, optim_tier=Tier.NVME),
    "nvme_param": lambda c: replace(c, param_tier=Tier.NVME, optim_tier=Tier.NVME),
    "nvme_persistent": lambda c: replace(c, param_tier=Tier.GPU, optim_tier=Tier.NVME, is_persistent=True),
}


def plan_for(model: nn.Module, how: How, site: str, world_size: int = 1, **options: Any) -> Plan:
    options = {"chunk_size": 4 * 1024 if how.name in ("conv", "branching", "frozen") else 8 * 1024, **options}
    plan = make_plan(
        model,
        placement_policy="cpu",
        compute_dtype=how.dtype,
        master_weights=how.master,
        world_size=world_size,
        **options,
    )
    is_all = site == "nvme_param"  # frozen parameters, too
    return replace(plan, chunks=tuple(SITES[site](c) if c.requires_grad or is_all else c for c in plan.chunks))


def new_optimizer(model: nn.Module, how: How) -> HybridAdam:
    settings = {"lr": 1e-2, "weight_decay": 0.05, "adamw_mode": how.adamw_mode}
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not how.has_groups:
        return how.optimizer(parameters, **settings)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2]},
        {"params": [p for p in parameters if p.dim() < 2], "lr": 3e-3, "weight_decay": 0.0, "betas": (0.3, 0.8)},
    ]
    return how.optimizer(groups, **settings)


def new_training(how: How, site: str, device: torch.device, **options: Any) -> tuple[ElixirModule, ElixirOptimizer]:
    model = make(how.name)
    inner = new_optimizer(model, how)
    module = ElixirModule(
        model, plan_for(model, how, site, **options), dtype=how.dtype, master_weights=how.master, device=device
    )
    if how.scale and device.type == "cpu":
        module.needs_loss_scale = True  # there is no fp16 on the CPU; scaling works with any dtype
    optimizer = ElixirOptimizer(
        module,
        inner,
        initial_scale=how.scale or 1.0,
        init_step=how.init_step,
        max_norm=how.max_norm,
    )
    return module, optimizer


def train_micro_batch(
    module: ElixirModule, optimizer: ElixirOptimizer, how: How, step: int, micro: int, rank: int = 0
) -> None:
    loss = ZOO[how.name].loss(module, (step * how.micro_batches + micro) * 3 + rank)
    optimizer.backward(loss * float("inf") if step == how.overflow_at else loss)


def train_step(module: ElixirModule, optimizer: ElixirOptimizer, how: How, step: int, rank: int = 0) -> float | None:
    for micro in range(how.micro_batches):
        train_micro_batch(module, optimizer, how, step, micro, rank)
    return end_step(optimizer, how)


def end_step(optimizer: ElixirOptimizer, how: How) -> float | None:
    norm = None
    if how.clip_value:
        optimizer.clip_grad_value_(how.clip_value)
    if how.clip_norm:
        norm = float(optimizer.clip_grad_norm_(how.clip_norm))
    optimizer.step()
    return norm


def result_of(module: ElixirModule, optimizer: ElixirOptimizer) -> Result:
    times = optimizer.last_step_times
    numel = (times.gpu_numel, times.streamed_numel, times.cpu_numel) if times else (0, 0, 0)
    return Result(module.full_state_dict(), copy.deepcopy(optimizer.state_dict()), numel=numel)


def train(how: How, site: str, device: torch.device = CPU) -> Result:
    module, optimizer = new_training(how, site, device)
    norms, skipped = [], []
    for step in range(how.steps):
        norms.append(train_step(module, optimizer, how, step))
        skipped.append(optimizer.is_step_skipped)
    result = result_of(module, optimizer)
    module.close()
    return replace(result, norms=[n for n in norms if n is not None], skipped=skipped)


@computed_once
def train_on_host(how: How, device: torch.device = CPU) -> Result:
    """What every other place and time of updates is to give."""
    return train(how, "host", device)


def assert_same(actual: Result, expected: Result) -> None:
    assert [k for k, v in expected.values.items() if not torch.equal(actual.values[k], v)] == []
    assert list(actual.optimizer_state["state"]) == list(expected.optimizer_state["state"])
    for number, state in expected.optimizer_state["state"].items():
        other = actual.optimizer_state["state"][number]
        assert list(other) == list(state)
        assert [k for k, v in state.items() if not torch.equal(other[k], v)] == [], number
    assert actual.optimizer_state.get("loss_scaler") == expected.optimizer_state.get("loss_scaler")
    assert actual.optimizer_state["param_groups"] == expected.optimizer_state["param_groups"]
    assert actual.skipped == expected.skipped


def use_small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of one or two thousand elements, so that these models take many pieces."""
    monkeypatch.setattr(execution, "StateStream", partial(StateStream, slot_bytes=20 * 1024, scratch_bytes=5 * 4 * 512))


def check_sites_agree(how: How, sites: list[str], device: torch.device, reference: str = "host") -> None:
    expected = train_on_host(how, device) if reference == "host" else train(how, reference, device)
    changed = make(how.name).state_dict()
    assert any(not torch.equal(changed[k], v) for k, v in expected.values.items())
    for site in sites:
        actual = train(how, site, device)
        assert_same(actual, expected)
        assert str(actual.norms) == str(expected.norms)  # nan equals nan
        total = sum(expected.numel)
        on_device, streamed, on_host = actual.numel
        assert on_device + streamed + on_host == total
        if site.startswith("streamed"):
            assert streamed == total
        if site.startswith(("mixed", "every")):
            assert 0 < streamed < total


ORDER = [
    "streamed",
    "host",
    "gpu",
    "cast",
    "streamed",
    "some_cast",
    "streamed_persistent",
    "mixed",
    "cast",
    "gpu",
    "every_site",
    "streamed",
]
NVME_ORDER = [
    "nvme",
    "host",
    "nvme_some",
    "nvme_param",
    "nvme",
    "nvme_param",
    "gpu",
    "nvme_persistent",
    "nvme_param",
    "cast",
    "nvme_param",
    "streamed",
    "nvme",
]


def check_replan(how: How, device: torch.device, order: list[str]) -> None:
    module, optimizer = new_training(how, order[0], device)
    reference, reference_optimizer = new_training(how, "host", device)
    for step, site in enumerate(order):
        if step:
            module.replan(plan_for(module.module, how, site))
        for m, o in ((module, optimizer), (reference, reference_optimizer)):
            train_step(m, o, how, step)
        held = module.stats().held_bytes
        assert "update_slot" not in held
        tiers = ("cpu", "gpu", "nvme")
        assert sum(held.get(f"{tier}_states", 0) for tier in tiers) == sum(optimizer.state_bytes().values())
        assert sum(optimizer.state_bytes().values()) == sum(reference_optimizer.state_bytes().values())
    assert_same(result_of(module, optimizer), result_of(reference, reference_optimizer))
    module.close()
    reference.close()


def check_resume(how: How, device: torch.device, saved_from: str, loaded_into: str) -> None:
    module, optimizer = new_training(how, saved_from, device)
    for step in range(2):
        train_step(module, optimizer, how, step)
    values, state = module.full_state_dict(), copy.deepcopy(optimizer.state_dict())
    other, other_optimizer = new_training(how, loaded_into, device)
    train_step(other, other_optimizer, how, 17)  # what is loaded replaces states that were there
    other.load_full_state_dict(values)
    other_optimizer.load_state_dict(state)
    for step in range(2, 4):
        for m, o in ((module, optimizer), (other, other_optimizer)):
            train_step(m, o, how, step)
    assert_same(result_of(other, other_optimizer), result_of(module, optimizer))
    for m in (module, other):
        m.close()


def train_rank(how: How, site: str, options: dict[str, Any], device_type: str = "cpu") -> Result:
    with pytest.MonkeyPatch.context() as patch:
        use_small_slots(patch)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
        module, optimizer = new_training(how, site, device, world_size=world_size, **options)
        for step in range(how.steps):
            train_step(module, optimizer, how, step, rank)
        result = result_of(module, optimizer)
        module.close()
    return result
