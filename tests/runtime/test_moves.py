"""Optimizer states go where their chunks go, whatever the optimizer and what has become of its groups."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_elixir.core import worker
from lightning_elixir.errors import StateError
from lightning_elixir.optim import HybridAdam
from lightning_elixir.plan.types import Plan
from lightning_elixir.runtime import replan
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers import streamed_updates as bodies
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.streamed_updates import CPU, HOWS, assert_same, result_of
from tests.helpers.tiers import crossed, telling
from tests.helpers.zoo import make

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "AMSGrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def elsewhere(plan: Plan, seed: int, sites: tuple[str, ...] = ("gpu", "cast", "host", "every_site")) -> Plan:
    dice = random.Random(seed)
    moved = []
    for chunk in plan.chunks:
        site = bodies.SITES[dice.choice(sites)](chunk) if chunk.requires_grad else chunk
        moved.append(replace(site, is_update_streamed=False))
    return replace(plan, chunks=tuple(moved))


def train_by(name: str, is_moved: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    how = replace(HOWS["unused_fp32"], steps=6)
    model = make(how.name)
    plan = make_plan(model, placement_policy="cpu", compute_dtype=how.dtype, world_size=world_size, chunk_size=4 * 1024)
    module = ElixirModule(model, plan, dtype=how.dtype, device=CPU)
    optimizer = ElixirOptimizer(module, OPTIMIZERS[name](model.parameters()))
    for number in range(how.steps):
        if is_moved and number != 1:  # before the first step as well
            module.replan(elsewhere(plan, number))
        bodies.train_step(module, optimizer, how, number, rank)
    found = module.full_state_dict(), optimizer.state_dict()
    module.close()
    return found


@crossed(told=["AdamW-2"], name=OPTIMIZERS, world_size=[1, 2])
def test_optimizers_of_torch_move(name: str, world_size: int) -> None:
    if world_size == 1:
        expected, actual = train_by(name, False), train_by(name, True)
    else:
        expected, actual = (run_ranks(train_by, world_size, name, is_moved)[0] for is_moved in (False, True))
    assert [k for k, v in expected[0].items() if not torch.equal(actual[0][k], v)] == []
    assert list(actual[1]["state"]) == list(expected[1]["state"])
    for number, state in expected[1]["state"].items():
        assert [k for k, v in state.items() if not torch.equal(actual[1]["state"][number][k], v)] == []


def remove_last(optimizer: ElixirOptimizer) -> None:
    del optimizer.param_groups[-1]


def split_first(optimizer: ElixirOptimizer) -> None:
    parameters = optimizer.param_groups[0]["params"]
    late = parameters[len(parameters) // 2 :]
    del parameters[len(parameters) // 2 :]
    optimizer.add_param_group({"params": late, "lr": 1e-3})


def give_others(optimizer: ElixirOptimizer) -> None:
    first, second = optimizer.param_groups
    optimizer.param_groups = [{**second, "lr": 5e-3}, {**first, "lr": 1e-3}]


@crossed(
    told=["split_first-nvme", "give_others-every_site"],
    change=[remove_last, split_first, give_others],
    site=["gpu", "nvme", "every_site"],
)
def test_groups_that_have_changed_before_a_move(change: Callable[[ElixirOptimizer], None], site: str) -> None:
    how, results = replace(HOWS["groups"], steps=5), []
    for is_moved in (False, True):
        module, optimizer = bodies.new_training(how, "host", CPU)
        for number in range(how.steps):
            if number == 2:
                change(optimizer)
                if is_moved:
                    module.replan(bodies.plan_for(module.module, how, site))
            bodies.train_step(module, optimizer, how, number)
        results.append(result_of(module, optimizer))
        module.close()
    assert_same(results[1], results[0])


def test_gradients_land_in_the_same_host_memory_after_a_move() -> None:
    """Of a chunk that has its states there before and after; others leave theirs, or make some."""
    how = replace(HOWS["unused_fp32"], dtype=torch.bfloat16)
    module, optimizer = bodies.new_training(how, "host", CPU)
    bodies.train_step(module, optimizer, how, 0)
    store, plan = module.engine.store, module.plan
    trained = [c.id for c in plan.chunks if store[c.id].grad_buffer is not None]
    assert len(trained) > 2
    places = {i: store[i].grad_buffer.data_ptr() for i in trained}  # type: ignore[union-attr]
    leaves, stays = trained[0], trained[1:]
    moved = [bodies.SITES["gpu"](c) if c.id == leaves else c for c in plan.chunks]
    module.replan(replace(plan, chunks=tuple(moved)))
    store = module.engine.store
    assert store[leaves].grad_buffer is None
    assert {i: store[i].grad_buffer.data_ptr() for i in stays} == {i: places[i] for i in stays}  # type: ignore[union-attr]
    module.replan(replace(plan, grad_reuses_compute_shard=True))
    assert all(module.engine.store[i].grad_buffer is None for i in trained)
    bodies.train_step(module, optimizer, how, 1)
    module.close()


def test_a_move_on_a_cpu_starts_no_thread_that_gives_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(worker, "start", lambda thread: (started.append(thread.name), thread.start()))
    how = HOWS["unused_fp32"]
    module, _ = bodies.new_training(how, "host", CPU)
    plan = module.plan
    module.replan(replace(plan, chunks=tuple(bodies.SITES["gpu"](c) for c in plan.chunks)))
    module.replan(plan)  # which leaves the device
    assert not [name for name in started if "unmapping" in name]
    module.close()


def test_memory_that_cannot_be_given_back_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside the move, which goes on."""

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(replan, "release_cached_memory", fail)
    monkeypatch.setattr(replan, "working_on", lambda device: nullcontext())
    unmapping = replan._Unmapping(torch.device("cuda", 0))
    unmapping.begin()
    unmapping.end()
    (record,) = caplog.records
    assert "could not be given back" in record.getMessage()
    assert "unspecified launch failure" in caplog.text


def halves(site: str) -> tuple[ElixirModule, list[ElixirOptimizer], list[torch.nn.Parameter]]:
    how = HOWS["bf16"]
    model = make(how.name)
    module = ElixirModule(model, bodies.plan_for(model, how, site), dtype=how.dtype, device=CPU)
    parameters = list(model.parameters())
    return module, [ElixirOptimizer(module, HybridAdam(parameters[::2], lr=1e-2))], parameters


@pytest.mark.parametrize("is_moved", telling([False, True], "True"))
def test_on_nvme_the_last_optimizer_has_the_states(is_moved: bool) -> None:
    """An earlier one would write over them: it says so where it is used again. Elsewhere both go on."""
    how, gone = (
        HOWS["bf16"],
        "that this optimizer had on NVMe are gone, .* use one optimizer with several parameter groups",
    )
    module, optimizers, parameters = halves("host" if is_moved else "nvme")
    bodies.train_step(module, optimizers[0], how, 0)
    optimizers.append(ElixirOptimizer(module, HybridAdam(parameters[1::2], lr=1e-3)))
    if is_moved:
        bodies.train_step(module, optimizers[1], how, 1)
        optimizers[0].zero_grad()
        bodies.train_step(module, optimizers[0], how, 2)
        module.zero_grad()  # a step takes its own gradients alone
        module.replan(bodies.plan_for(module.module, how, "nvme"))
    for use in (optimizers[0].state_dict, optimizers[0].described_states):
        with pytest.raises(StateError, match=gone):
            use()
    with pytest.raises(StateError, match=gone):
        optimizers[0].load_state_dict(optimizers[1].state_dict())
    with pytest.raises(StateError, match=gone):
        bodies.train_step(module, optimizers[0], how, 3)
    module.zero_grad()
    module.replan(bodies.plan_for(module.module, how, "gpu"))
    bodies.train_step(module, optimizers[1], how, 4)
    with pytest.raises(StateError, match=gone):
        optimizers[0].state_dict()
    assert set(optimizers[1].state_dict()["state"]) == set(range(len(parameters[1::2])))
    module.close()


@pytest.mark.full
@pytest.mark.parametrize("site", telling(["nvme", "host"], "nvme"))
def test_one_optimizer_after_the_other(site: str) -> None:
    """Over other parameters of the same chunks; the first one is still there."""
    how, results = HOWS["bf16"], []
    for where in ("host", site):
        module, optimizers, parameters = halves("host")
        for number in range(6):
            if number == 2:
                module.replan(bodies.plan_for(module.module, how, where))
            if number == 3:
                optimizers.append(ElixirOptimizer(module, HybridAdam(parameters[1::2], lr=1e-3)))
            if number == 4:
                module.replan(bodies.plan_for(module.module, how, "every_site" if where == "host" else "nvme_some"))
            bodies.train_step(module, optimizers[-1], how, number)
            module.zero_grad()  # also those of the first optimizer
        results.append((module.full_state_dict(), optimizers[-1].state_dict()["state"]))
        module.close()
    (values, states), (others, other_states) = results
    assert [k for k, v in values.items() if not torch.equal(others[k], v)] == []
    for number, state in states.items():
        assert [k for k, v in state.items() if not torch.equal(other_states[number][k], v)] == []
