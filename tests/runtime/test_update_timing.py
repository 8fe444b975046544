"""Updates that run behind the next forward, or begin inside backward, give bit for bit what those inside the step give.

The bodies, in `helpers`, take the device, so that `tests/gpu` runs them with real lanes and page-locked memory.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_elixir.errors import StateError
from lightning_elixir.optim import HybridAdam
from lightning_elixir.optim.updates import FlatUpdate
from lightning_elixir.plan.types import Tier, UpdateTiming
from lightning_elixir.stepping.scheduler import UpdateScheduler
from lightning_elixir.storage.shards import ShardStore
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers import streamed_updates as bodies
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.streamed_updates import CPU, HOWS, How, Result, assert_same, use_small_slots
from tests.helpers.tiers import crossed, telling
from tests.helpers.update_timing import SITES, TIMINGS, Twice, held_updates, new_training, slow_updates, step, train
from tests.helpers.zoo import ZOO, make


def trained(
    how: How, site: str, device: torch.device, timing: UpdateTiming, **options: Any
) -> tuple[ElixirModule, ElixirOptimizer]:
    """After two steps: states and traces are there, and updates may begin inside backward."""
    module, optimizer = new_training(how, site, device, timing, **options)
    for number in range(2):
        step(module, optimizer, how, number)
    return module, optimizer


@crossed(together=1, name=["bf16", "fp32", "clipped", "unused"], site=SITES, timing=TIMINGS)
def test_timing_changes_no_bit(name: str, site: str, timing: UpdateTiming, monkeypatch: pytest.MonkeyPatch) -> None:
    how = HOWS[name]
    use_small_slots(monkeypatch)
    expected = bodies.train_on_host(how)
    with slow_updates(monkeypatch, 0.001):
        actual = train(how, site, timing)
    assert_same(actual, expected)
    assert actual.norms == expected.norms


OTHERS = sorted(set(HOWS) - {"bf16", "fp32", "clipped", "unused"})


@pytest.mark.full  # combinations of test_timing_changes_no_bit
@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("name", telling(OTHERS, "accumulated_clipped", "groups", "scaled", "tied"))
def test_every_way_to_train(name: str, timing: UpdateTiming, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_slots(monkeypatch)
    how = HOWS[name]
    expected = bodies.train_on_host(how)
    with slow_updates(monkeypatch, 0.001):
        assert_same(train(how, "mixed", timing), expected)


@pytest.mark.full  # combinations
@crossed(
    timing=[UpdateTiming.AFTER_BACKWARD, UpdateTiming.BEHIND_FORWARD],
    name=["bf16", "fp32", "accumulated", "scaled", "clipped", "unused", "tied"],
)
def test_gradients_in_the_place_of_parameters(name: str, timing: UpdateTiming, monkeypatch: pytest.MonkeyPatch) -> None:
    how = HOWS[name]
    expected = bodies.train_on_host(how)
    with slow_updates(monkeypatch, 0.001):
        assert_same(train(how, "mixed", timing, is_reusing=True), expected)


def test_gradients_in_the_place_of_parameters_save_their_bytes() -> None:
    held = {}
    for is_reusing in (False, True):
        module, optimizer = new_training(HOWS["bf16"], "host", CPU, UpdateTiming.BEHIND_FORWARD, is_reusing=is_reusing)
        for number in range(2):
            step(module, optimizer, HOWS["bf16"], number)
        held[is_reusing] = module.stats().held_bytes
        module.close()
    assert held[True].get("cpu_grad", 0) == 0 < held[False]["cpu_grad"]
    assert held[True]["cpu_param"] == held[False]["cpu_param"] == held[False]["cpu_grad"]


def test_a_forward_before_the_step_sees_the_old_parameters() -> None:
    """Their memory holds gradients already."""
    how = HOWS["bf16"]
    losses = {}
    for is_reusing in (False, True):
        module, optimizer = new_training(how, "host", CPU, UpdateTiming.BEHIND_FORWARD, is_reusing=is_reusing)
        step(module, optimizer, how, 0)
        optimizer.backward(ZOO[how.name].loss(module, 3))
        with torch.no_grad():
            losses[is_reusing] = float(ZOO[how.name].loss(module, 6))
        if is_reusing:
            assert all(module.engine.store[c.id].is_param_overwritten for c in module.engine.chunks)
        optimizer.zero_grad()
        with torch.no_grad():
            assert float(ZOO[how.name].loss(module, 6)) == losses[is_reusing]
        assert not any(module.engine.store[c.id].is_param_overwritten for c in module.engine.chunks)
        module.close()
    assert losses[True] == losses[False]


def test_step_waits_for_no_update_and_forward_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    how = HOWS["bf16"]
    module, optimizer = trained(how, "host", CPU, UpdateTiming.BEHIND_FORWARD)
    optimizer.synchronize()
    with held_updates(monkeypatch) as gate:
        step(module, optimizer, how, 2)
        updates = [module.engine.store[c.id].update for c in module.engine.chunks]
        assert all(task is not None and not task.is_over() for task in updates)
        assert optimizer.last_step_times is not None  # those of the step before
        first = module.engine.chunks[0].parameters[0]
        waiting = threading.Thread(target=lambda: first.sum())
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        gate.set()
        waiting.join()
    with torch.no_grad():
        after = float(ZOO[how.name].loss(module, 9))
    other, other_optimizer = new_training(how, "host", CPU, UpdateTiming.AFTER_BACKWARD)
    for number in range(3):
        step(other, other_optimizer, how, number)
    with torch.no_grad():
        assert float(ZOO[how.name].loss(other, 9)) == after
    module.close()
    other.close()


def test_updates_begin_inside_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on: the first makes the states."""
    how = HOWS["bf16"]
    module, optimizer = new_training(how, "mixed_persistent", CPU, UpdateTiming.INSIDE_BACKWARD)
    num_chunks = len(module.engine.chunks)
    begun = []
    with slow_updates(monkeypatch) as names:
        for number in range(3):
            with optimizer.unobserved():
                optimizer.backward(ZOO[how.name].loss(module, number * 3))
                begun.append(len(module.engine.reducer.begun))
                optimizer.step()
            assert not module.engine.reducer.begun
        optimizer.synchronize()
    assert begun == [0, num_chunks, num_chunks]
    assert all(name.startswith("elixir-") for name in names)
    # Without the promise, and wherever gradients have to be seen together first, they do not.
    optimizer.backward(ZOO[how.name].loss(module, 0))
    assert not module.engine.reducer.begun
    optimizer.step()
    optimizer.grad_norm()
    with optimizer.unobserved():
        optimizer.backward(ZOO[how.name].loss(module, 0))
        assert not module.engine.reducer.begun
        optimizer.step()
    module.close()


def test_the_next_forward_has_its_chunks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    how = HOWS["bf16"]
    module, optimizer = trained(how, "host", CPU, UpdateTiming.INSIDE_BACKWARD)
    optimizer.synchronize()
    order: list[int] = []
    gate = threading.Event()
    run = FlatUpdate.run
    at = {module.engine.store[c.id].master.data_ptr(): c.id for c in module.engine.chunks}

    def noted(self: FlatUpdate, **options: Any) -> None:
        order.append(at[self.param.data_ptr()])
        gate.wait()
        run(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(FlatUpdate, "run", noted)
        step(module, optimizer, how, 2)
        needs = module.engine.steps.first_needs()
        gate.set()
        optimizer.synchronize()
    rest = order[2:]  # two threads had taken one each when the step came, of those that had landed when they looked
    assert rest == sorted(rest, key=lambda i: needs[i])
    assert len(order) == len(needs) > 4
    module.close()


@pytest.mark.parametrize("what", ["backward", "between", "no_step"])
def test_no_step_after_updates_have_begun_ends_the_engine(what: str) -> None:
    how = HOWS["bf16"]
    module, optimizer = trained(how, "host", CPU, UpdateTiming.INSIDE_BACKWARD)

    def interrupt(grad: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    def train_without_step() -> None:
        with optimizer.unobserved():
            if what == "backward":
                module.engine.chunks[0].parameters[0].register_hook(interrupt)
            optimizer.backward(ZOO[how.name].loss(module, 0))
            assert module.engine.reducer.begun
            if what == "between":
                raise KeyboardInterrupt

    with pytest.raises(StateError if what == "no_step" else KeyboardInterrupt):
        train_without_step()
    for use in (module.full_state_dict, optimizer.state_dict, optimizer.step):
        with pytest.raises(StateError, match="updates.*from a checkpoint"):
            use()


def test_looking_in_between_is_an_error_and_not_a_wrong_value() -> None:
    how = HOWS["bf16"]
    module, optimizer = trained(how, "host", CPU, UpdateTiming.INSIDE_BACKWARD)
    with optimizer.unobserved():
        optimizer.backward(ZOO[how.name].loss(module, 0))
        for use in (module.full_state_dict, optimizer.state_dict, optimizer.grad_norm, optimizer.zero_grad):
            with pytest.raises(StateError, match="no step has followed"):
                use()
        optimizer.step()
    module.full_state_dict()
    module.close()


def test_a_parameter_used_in_between_is_an_error() -> None:
    """Its old value and the new master differ: that would look like something the user wrote."""
    how = HOWS["bf16"]
    module, optimizer = trained(how, "host", CPU, UpdateTiming.INSIDE_BACKWARD)

    def look_in_between() -> None:
        with optimizer.unobserved():
            optimizer.backward(ZOO[how.name].loss(module, 0))
            next(module.module.parameters()).detach().float().sum()
            optimizer.step()

    with pytest.raises(StateError, match="used between backward and step"):
        look_in_between()
    with pytest.raises(StateError, match="checkpoint"):
        module.full_state_dict()


def test_a_second_backward_after_updates_have_begun_ends_the_engine() -> None:
    how = HOWS["bf16"]
    module, optimizer = trained(how, "host", CPU, UpdateTiming.INSIDE_BACKWARD)

    def train_twice() -> None:
        with optimizer.unobserved():
            optimizer.backward(ZOO[how.name].loss(module, 0))
            optimizer.backward(ZOO[how.name].loss(module, 1))

    with pytest.raises(StateError, match="another gradient"):
        train_twice()
    with pytest.raises(StateError, match="checkpoint"):
        module.full_state_dict()


def test_a_fetch_waits_on_no_thread_for_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica is there at once, and filled when the update is over."""
    how = HOWS["bf16"]
    module, optimizer = trained(how, "host", CPU, UpdateTiming.BEHIND_FORWARD)
    optimizer.synchronize()
    engine = module.engine
    with held_updates(monkeypatch) as gate:
        step(module, optimizer, how, 2)
        engine.active.residency.acquire((0, 1), True, None, False)
        chunk = engine.chunks[1]
        assert chunk.ready is not None
        assert not chunk.ready.is_over()
        gate.set()
        chunk.wait_ready()
    param = engine.store[1].param
    assert param is not None
    for index in range(len(chunk.parameters)):  # what lies between them may be anything, nan as well
        assert torch.equal(chunk.view_of(chunk.flat, index), chunk.view_of(param, index))
    engine.rcache.drop((0, 1))
    module.close()


def test_a_gradient_that_comes_too_late_ends_the_engine() -> None:
    torch.manual_seed(0)
    model = Twice()
    plan = replace(
        make_plan(model, placement_policy="cpu", chunk_size=10 * 1024, compute_dtype=torch.bfloat16),
        update_timing=UpdateTiming.INSIDE_BACKWARD,
    )
    inner = HybridAdam(model.parameters(), lr=0.1)
    module = ElixirModule(model, plan, dtype=torch.bfloat16)
    optimizer = ElixirOptimizer(module, inner)
    x = torch.ones(2, 64)
    for _ in range(2):
        with optimizer.unobserved():
            optimizer.backward(module(x))
            optimizer.step()
    model.is_twice = True
    with pytest.raises(StateError, match=r"shared.*another gradient.*behind_forward"), optimizer.unobserved():
        optimizer.backward(module(x))
    with pytest.raises(StateError, match="checkpoint"):
        module.full_state_dict()


def test_a_failing_update_is_told_to_whoever_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    how = HOWS["bf16"]
    module, optimizer = new_training(how, "host", CPU, UpdateTiming.BEHIND_FORWARD)
    step(module, optimizer, how, 0)
    optimizer.synchronize()

    def fail(self: FlatUpdate, **options: Any) -> None:
        raise RuntimeError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr(FlatUpdate, "run", fail)
        step(module, optimizer, how, 1)
        with pytest.raises(RuntimeError, match="no such luck"):
            ZOO[how.name].loss(module, 0)
    for use in (module.full_state_dict, optimizer.state_dict, optimizer.synchronize):
        with pytest.raises(StateError, match=r"update of chunk.*no such luck.*from a checkpoint"):
            use()
    module.close()


def test_what_users_do_between_steps_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading, writing, saving, evaluating, moving: while updates are under way."""
    how = HOWS["bf16"]

    def run(timing: UpdateTiming) -> list[Any]:
        module, optimizer = new_training(how, "mixed_persistent", CPU, timing)
        seen: list[Any] = []
        parameter = next(module.module.parameters())
        for number in range(6):
            step(module, optimizer, how, number)
            if number == 0:
                seen.append(parameter.detach().float().sum().item())
            elif number == 1:
                with torch.no_grad():
                    parameter.mul_(0.5)
            elif number == 2:
                seen.append({k: v.clone() for k, v in module.full_state_dict().items()})
            elif number == 3:
                with torch.no_grad():
                    seen.append(float(ZOO[how.name].loss(module, 0)))
            elif number == 4:
                module.load_state_dict(module.full_state_dict())
                plan = module.engine.plan
                chunks = tuple(replace(c, param_tier=Tier.CPU, is_persistent=False) for c in plan.chunks)
                module.engine.replan(replace(plan, chunks=chunks, rcache_blocks=len(chunks)))
        seen.append({k: v.clone() for k, v in module.full_state_dict().items()})
        module.close()
        return seen

    expected = run(UpdateTiming.AFTER_BACKWARD)
    for timing in TIMINGS:
        with slow_updates(monkeypatch):
            actual = run(timing)
        assert actual[0] == expected[0]
        assert actual[2] == expected[2]
        for one, other in ((actual[1], expected[1]), (actual[3], expected[3])):
            assert [k for k in other if not torch.equal(one[k], other[k])] == []


def _ranks(timing: UpdateTiming, site: str, name: str, is_distributed: bool) -> list[Result]:
    how, results = HOWS[name], []
    for value in (UpdateTiming.AFTER_BACKWARD, timing):
        module, optimizer = new_training(
            how,
            site,
            CPU,
            value,
            world_size=dist.get_world_size(),
            enable_distributed_storage=is_distributed,
        )
        for number in range(how.steps):
            step(module, optimizer, how, number, dist.get_rank())
        results.append(bodies.result_of(module, optimizer))
        module.close()
    if dist.get_rank() == 0:
        assert_same(results[1], results[0])
    return results


@crossed(
    told=["mixed_persistent-UpdateTiming.BEHIND_FORWARD-2"],
    case=[
        pytest.param((site, is_distributed), id=site)
        for site, is_distributed in {"every_site": True, "mixed": False, "mixed_persistent": True}.items()
    ],
    timing=TIMINGS,
    world_size=[2, 3],
)
def test_timing_changes_no_bit_with_ranks(world_size: int, timing: UpdateTiming, case: tuple[str, bool]) -> None:
    site, is_distributed = case
    name = "unused" if site == "mixed" else "bf16"
    results = run_ranks(_ranks, world_size, timing, site, name, is_distributed)
    assert results


def test_threads_end_with_their_engine() -> None:
    gc.collect()  # what earlier tests have left
    before = set(threading.enumerate())
    module, optimizer = new_training(HOWS["bf16"], "mixed", CPU, UpdateTiming.BEHIND_FORWARD)
    step(module, optimizer, HOWS["bf16"], 0)
    ours = set(threading.enumerate()) - before
    assert sorted(t.name for t in ours) == ["elixir-stream-0", "elixir-update-0", "elixir-update-1"]
    module.close()
    del module, optimizer
    gc.collect()
    for thread in ours:
        thread.join(10)
    assert not any(t.is_alive() for t in ours)


# What must not go wrong


class _LateLane:
    """A reduce lane of a device that is behind: copies to the host are made when somebody waits for them."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def issue(self) -> Iterator[None]:
        yield

    resume = issue

    def catch_up(self) -> None:
        while self.copies:
            target, source = self.copies.pop(0)
            target.copy_(source)

    def record(self) -> _LateLane:
        return self

    def wait(self) -> None:  # a stream waits, the host does not
        return

    def synchronize(self) -> None:
        self.catch_up()

    def is_over(self) -> bool:
        return not self.copies


@pytest.mark.parametrize("what", ["zero_grad", "abandon", "not_in_the_optimizer"])
def test_late_gradients_do_not_come_to_lie_where_parameters_are(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    how = HOWS["bf16"]
    module, optimizer = trained(how, "host", CPU, UpdateTiming.BEHIND_FORWARD, is_reusing=True)
    optimizer.synchronize()
    engine, lane = module.engine, _LateLane()
    set_grad = ShardStore.set_grad

    class Target:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> None:
            lane.copies.append((self.tensor, source.clone()))

    with monkeypatch.context() as patch:
        patch.setattr(ShardStore, "set_grad", lambda *args: Target(set_grad(*args)))
        patch.setattr(engine.device, "reduce_lane", lane)
        optimizer.backward(ZOO[how.name].loss(module, 5))
        assert lane.copies
        if what == "zero_grad":
            optimizer.zero_grad()
        elif what == "abandon":  # as if it had failed after its reductions
            engine.reducer._reduced_now = set(engine.reducer.order)
            engine.reducer.abandon()
        else:
            engine.steps.end({}, {}, {})
        lane.catch_up()
    for chunk in engine.chunks:
        shard = engine.store[chunk.id]
        for index in range(len(chunk.parameters)):
            master = chunk.slice_of(shard.master, index).to(chunk.dtype)
            assert torch.equal(chunk.slice_of(shard.param, index), master), chunk.spec
    module.close()


@pytest.mark.parametrize("timing", telling(TIMINGS, "UpdateTiming.INSIDE_BACKWARD"))
def test_kept_aliases_of_replicas_that_stay_see_new_values(
    timing: UpdateTiming, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an average of weights, or a clamp, keeps them."""
    how = HOWS["bf16"]

    def run(timing: UpdateTiming) -> list[Any]:
        module, optimizer = trained(how, "mixed_persistent", CPU, timing)
        live = [p.data for p in module.module.parameters()]
        seen: list[Any] = []
        for number in range(2, 5):
            step(module, optimizer, how, number)
            for x in live:
                x.clamp_(-0.01, 0.01)
            seen += [x.clone() for x in live]
        seen += list(module.full_state_dict().values())
        module.close()
        return seen

    expected = run(UpdateTiming.AFTER_BACKWARD)
    with slow_updates(monkeypatch):
        actual = run(timing)
    assert all(map(torch.equal, actual, expected))


def test_what_was_read_or_is_kept_does_not_begin_early(monkeypatch: pytest.MonkeyPatch) -> None:
    how = HOWS["bf16"]

    def run(timing: UpdateTiming) -> list[Any]:
        module, optimizer = new_training(how, "host", CPU, timing)
        parameters = list(module.module.parameters())
        kept = parameters[3].data
        for number in range(4):
            with optimizer.unobserved():
                loss = ZOO[how.name].loss(module, number * 3)
                norms = [float(p.detach().float().norm()) for p in parameters]  # between forward and backward
                optimizer.backward(loss)
                optimizer.step()
        values = [norms, kept.clone(), *module.full_state_dict().values()]
        module.close()
        return values

    expected = run(UpdateTiming.AFTER_BACKWARD)
    with slow_updates(monkeypatch):
        actual = run(UpdateTiming.INSIDE_BACKWARD)
    assert actual[0] == expected[0]
    assert all(map(torch.equal, actual[1:], expected[1:]))


def test_new_groups_and_hooks_of_the_step_come_before_updates_begin() -> None:
    how = HOWS["bf16"]
    module, optimizer = trained(how, "host", CPU, UpdateTiming.INSIDE_BACKWARD)
    before = {k: v.clone() for k, v in module.full_state_dict().items()}

    def stand_still(*args: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            group["weight_decay"] = 0.0

    handle = optimizer.register_step_pre_hook(stand_still)
    step(module, optimizer, how, 2)
    handle.remove()
    assert [k for k, v in module.full_state_dict().items() if not torch.equal(v, before[k])] == []
    assert not optimizer._can_begin_early() or not optimizer._optimizer_step_pre_hooks
    module.close()

    model = make("gpt2")
    last = list(model.parameters())[-1]
    inner = HybridAdam([p for p in model.parameters() if p is not last], lr=1e-2)
    plan = replace(bodies.plan_for(model, how, "host"), update_timing=UpdateTiming.INSIDE_BACKWARD)
    module = ElixirModule(model, plan, dtype=torch.bfloat16)
    optimizer = ElixirOptimizer(module, inner)
    for number in range(2):
        step(module, optimizer, how, number)
    optimizer.add_param_group({"params": [last]})
    was = last.detach().clone()
    step(module, optimizer, how, 2)
    assert not torch.equal(last.detach(), was)
    module.close()


def test_the_norm_is_never_taken_of_new_parameters() -> None:
    how = replace(HOWS["max_norm"], init_step=True)
    norms = {}
    for timing in (UpdateTiming.AFTER_BACKWARD, UpdateTiming.INSIDE_BACKWARD):
        module, optimizer = new_training(how, "host", CPU, timing)
        module.engine.replan(module.engine.plan)
        for number in range(3):
            step(module, optimizer, how, number)
        norms[timing] = optimizer._gradients._last_norm
        module.close()
    assert norms[UpdateTiming.INSIDE_BACKWARD] == norms[UpdateTiming.AFTER_BACKWARD]


class _Thrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x.float().sum()


@pytest.mark.parametrize("when", ["replan", "init_step", "resume"])
def test_a_layer_with_several_gradients_a_backward_is_known_before_updates_begin(when: str) -> None:
    def build() -> tuple[ElixirModule, ElixirOptimizer]:
        torch.manual_seed(0)
        model = _Thrice()
        plan = make_plan(model, placement_policy="cpu", chunk_size=10 * 1024, compute_dtype=torch.bfloat16)
        inner = HybridAdam(model.parameters(), lr=0.1)
        module = ElixirModule(model, replace(plan, update_timing=UpdateTiming.INSIDE_BACKWARD), dtype=torch.bfloat16)
        return module, ElixirOptimizer(module, inner, init_step=when == "init_step")

    def one_step(module: ElixirModule, optimizer: ElixirOptimizer) -> None:
        with optimizer.unobserved():
            optimizer.backward(module(torch.ones(2, 64)))
            optimizer.step()

    module, optimizer = build()
    for number in range(3):
        if when == "replan" and number == 1:
            module.engine.replan(module.engine.plan)
        one_step(module, optimizer)
    if when == "resume":
        values, states = module.full_state_dict(), optimizer.state_dict()
        module.close()
        module, optimizer = build()
        module.load_full_state_dict(values)
        optimizer.load_state_dict(states)
        one_step(module, optimizer)
    module.full_state_dict()
    module.close()


def test_a_failure_to_begin_closes_the_engine_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    how = HOWS["bf16"]
    module, optimizer = trained(how, "host", CPU, UpdateTiming.INSIDE_BACKWARD)

    def fail(*args: Any, **options: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(optimizer._runner), "submit", fail)
        with pytest.raises(MemoryError):
            step(module, optimizer, how, 2)
    for use in (module.full_state_dict, optimizer.state_dict):
        with pytest.raises(StateError, match="from a checkpoint"):
            use()
    module.close()
    assert module.stats().held_bytes["replica"] == 0


def test_gradients_of_begun_updates_cannot_be_dropped() -> None:
    how = HOWS["bf16"]
    module, optimizer = trained(how, "host", CPU, UpdateTiming.INSIDE_BACKWARD)
    chunk = module.engine.chunks[-1]

    def drop() -> None:
        with optimizer.unobserved():
            optimizer.backward(ZOO[how.name].loss(module, 0))
            module.engine.reducer.drop_member(chunk, 0)

    with pytest.raises(StateError, match="cannot be changed or dropped"):
        drop()


def test_closing_after_a_failed_update_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    how = HOWS["bf16"]
    module, optimizer = trained(how, "host", CPU, UpdateTiming.BEHIND_FORWARD)
    optimizer.synchronize()
    run, lock, count = FlatUpdate.run, threading.Lock(), []

    def first_fails(self: FlatUpdate, **options: Any) -> None:
        with lock:
            count.append(1)
            is_first = len(count) == 1
        time.sleep(0.02)
        if is_first:
            raise RuntimeError("no such luck")
        run(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(FlatUpdate, "run", first_fails)
        step(module, optimizer, how, 2)
        with pytest.raises(RuntimeError, match="no such luck"):
            ZOO[how.name].loss(module, 0)
        module.close()  # replicas that wait for updates are filled, or not, before their memory goes
    assert optimizer._runner._host._pool._num_unfinished == 0
    assert all(chunk.ready is None for chunk in module.engine.chunks)


@pytest.mark.parametrize(
    "timing", telling(list(UpdateTiming), "UpdateTiming.INSIDE_BACKWARD", "UpdateTiming.BEHIND_FORWARD")
)
def test_ctrl_c_waits_for_the_step(timing: UpdateTiming, monkeypatch: pytest.MonkeyPatch) -> None:
    how = HOWS["bf16"]
    module, optimizer = trained(how, "host", CPU, timing)
    update = UpdateScheduler.run

    def interrupted(self: UpdateScheduler, used: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return update(self, used)

    monkeypatch.setattr(UpdateScheduler, "run", interrupted)

    def interrupted_step() -> None:
        with optimizer.unobserved(timing is UpdateTiming.INSIDE_BACKWARD):
            optimizer.backward(ZOO[how.name].loss(module, 6))
            optimizer.step()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted_step()
    finally:
        signal.signal(signal.SIGINT, before)
        monkeypatch.undo()
    values = module.full_state_dict()
    module.close()
    other, other_optimizer = new_training(how, "host", CPU, UpdateTiming.AFTER_BACKWARD)
    for number in range(3):
        step(other, other_optimizer, how, number)
    assert all(map(torch.equal, values.values(), other.full_state_dict().values()))
    other.close()
