"""`init_step=True` takes the memory of states and steps nothing: torch's own optimizers, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_elixir import HybridAdam
from lightning_elixir.optim.adam_states import SegmentPlace
from lightning_elixir.optim.elementwise import InnerMaker
from lightning_elixir.optim.segments import SegmentOptimizer
from lightning_elixir.plan.types import Tier
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.tiers import crossed, full

STEPS = 4

MAKE: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "SGD_dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "SGD_nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.05),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1),
    "AdamW_amsgrad": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.05, centered=True, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1, lr_decay=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.05),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.05),
    "HybridAdam": lambda p: HybridAdam(p, lr=0.05),
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident": {"placement_policy": "cuda", "chunk_size": 4096},
    "offloaded": {"placement_policy": "cpu", "chunk_size": 4096},
    "half": {"placement_policy": "const", "chunk_size": 4096, "offload_optim_frac": 0.5, "offload_param_frac": 0.5},
}


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 7)
    )


def _loss(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    result: Tensor = model(torch.randn(4, 24, generator=generator)).square().mean()
    return result


def _started(name: str, has_stepped: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _net()
    optimizer = MAKE[name](list(model.parameters()))
    for seed in (100, 101) if has_stepped else ():
        _loss(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _plain(name: str, has_stepped: bool, world_size: int = 1) -> tuple[dict[str, Tensor], dict[int, dict[str, Any]]]:
    """Values and states after training on the mean gradient of all ranks' batches."""
    model, optimizer = _started(name, has_stepped)
    for step in range(STEPS):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(world_size):
            _loss(model, step * world_size + rank).backward()
            for total, p in zip(sums, model.parameters(), strict=True):
                total += p.grad
                p.grad = None
        for total, p in zip(sums, model.parameters(), strict=True):
            p.grad = total / world_size
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict()["state"]


def _wrapped(name: str, has_stepped: bool, init_step: bool, placement: str) -> tuple[ElixirModule, ElixirOptimizer]:
    model, inner = _started(name, has_stepped)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    module = ElixirModule(model, make_plan(model, world_size=world_size, **PLACEMENTS[placement]))
    assert len(module.plan.chunks) > 2
    return module, ElixirOptimizer(module, inner, init_step=init_step)


def _train(module: ElixirModule, optimizer: ElixirOptimizer, world_size: int = 1, rank: int = 0) -> None:
    for step in range(STEPS):
        optimizer.backward(_loss(module, step * world_size + rank))
        optimizer.step()
        optimizer.zero_grad()


def _different(
    values: dict[str, Tensor],
    states: dict[int, dict[str, Any]],
    expected: tuple[dict[str, Tensor], dict[int, dict[str, Any]]],
) -> list[str]:
    found = [key for key, value in expected[0].items() if not torch.equal(values[key], value)]
    for number, state in expected[1].items():
        mine = states.get(number, {})
        found += [f"{number}.{k}" for k, v in state.items() if k not in mine or not _is_equal(mine[k], v)]
    return found


def _is_equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@crossed(together=1, name=MAKE, has_stepped=[False, True], init_step=[False, True])
def test_equals_plain_torch(name: str, has_stepped: bool, init_step: bool) -> None:
    expected = _plain(name, has_stepped)
    for placement in PLACEMENTS:
        module, optimizer = _wrapped(name, has_stepped, init_step, placement)
        _train(module, optimizer)
        values, states = module.full_state_dict(), optimizer.state_dict()["state"]
        assert _different(values, states, expected) == [], placement
        assert placement != "offloaded" or module.stats().evictions > 0
        module.close()


def _train_all(
    names: list[str], init_step: bool, has_stepped: bool
) -> dict[tuple[str, str], tuple[dict[str, Tensor], Any]]:
    results = {}
    for name, placement in itertools.product(names, PLACEMENTS):
        module, optimizer = _wrapped(name, has_stepped, init_step, placement)
        _train(module, optimizer, dist.get_world_size(), dist.get_rank())
        results[name, placement] = module.full_state_dict(), optimizer.state_dict().get("state", {})
        module.close()
    return results


@pytest.mark.parametrize(
    ("names", "init_step", "has_stepped"),
    [
        full(["HybridAdam", "NAdam"], True, True),
        *(full([*MAKE], *both) for both in itertools.product([False, True], repeat=2)),
    ],
)
def test_equals_plain_torch_with_two_ranks(names: list[str], init_step: bool, has_stepped: bool) -> None:
    results = run_ranks(_train_all, 2, names, init_step, has_stepped)[0]
    for (name, placement), (values, states) in results.items():
        assert _different(values, states, _plain(name, has_stepped, 2)) == [], (name, placement)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(MAKE.keys() - {"HybridAdam"}))
def test_memory_is_taken_and_states_are_not_made(name: str) -> None:
    calls: list[torch.optim.Optimizer] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: calls.append(optimizer))
    try:
        module, optimizer = _wrapped(name, False, True, "half")
    finally:
        handle.remove()
    assert calls == []  # nobody's step, as far as any watcher can see
    assert all(not _elementwise(s) or name == "Adagrad" for s in optimizer.state_dict()["state"].values())
    reserved = {key: n for key, n in module.engine.held_bytes().items() if key.endswith("_states")}
    assert reserved["cpu_states"] > 0
    assert reserved["gpu_states"] > 0
    _train(module, optimizer)
    assert {key: n for key, n in module.engine.held_bytes().items() if key.endswith("_states")} == reserved
    module.close()


def _elementwise(state: dict[str, Any]) -> list[str]:
    return [key for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0]


def test_no_memory_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: SegmentOptimizer) -> None:
        raise torch.OutOfMemoryError("no room for states")

    monkeypatch.setattr(SegmentOptimizer, "reserve_states", fail)
    with pytest.raises(torch.OutOfMemoryError, match="no room for states"):
        _wrapped("Adam", False, True, "resident")


def test_what_is_reserved_moves_along() -> None:
    expected = _plain("SGD_dampening", False)
    module, optimizer = _wrapped("SGD_dampening", False, True, "resident")
    before = optimizer.state_bytes()
    plan = module.plan
    module.engine.replan(replace(plan, chunks=tuple(replace(c, optim_tier=Tier.CPU) for c in plan.chunks)))
    assert before["gpu_states"] == optimizer.state_bytes()["cpu_states"] > 0
    _train(module, optimizer)
    assert _different(module.full_state_dict(), optimizer.state_dict()["state"], expected) == []
    assert before["gpu_states"] == optimizer.state_bytes()["cpu_states"]


def test_a_first_step_over_some_members_frees_theirs_alone() -> None:
    places = [SegmentPlace(0, 0, 0, 8), SegmentPlace(1, 0, 8, 24)]
    groups = [torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9, dampening=0.5).param_groups[0]]
    work = torch.ones(32)
    inner = SegmentOptimizer(
        InnerMaker(torch.optim.SGD), work, places, groups, lambda numel, dtype, **_: torch.empty(numel, dtype=dtype)
    )
    inner.reserve_states()
    inner.step(torch.ones(32), {1}, groups)
    assert inner.state_of(0) == {}
    assert torch.equal(inner.state_of(1)["momentum_buffer"], torch.ones(24))  # undampened, as the first one is
    assert inner.state_bytes() == 32 * 4
    inner.set_state(0, {})
    assert inner.state_bytes() == 24 * 4


def test_memory_that_was_only_taken_is_no_state() -> None:
    """A parameter without a gradient has no state in a checkpoint, as in plain PyTorch."""
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    module = ElixirModule(model, make_plan(model, placement_policy="cpu", chunk_size=512), device=torch.device("cpu"))
    optimizer = ElixirOptimizer(module, HybridAdam(model.parameters()), init_step=True)
    assert optimizer.state_dict()["state"] == {}
    optimizer.backward(model[1](torch.ones(2, 8)).sum())
    optimizer.step()
    assert sorted(optimizer.state_dict()["state"]) == [2, 3]
