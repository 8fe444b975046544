"""Updates that run behind the next forward, or begin inside backward, give bit for bit what those inside the step give.

The bodies take the device, so that `tests/gpu` runs them with real lanes and page-locked memory.
"""

from __future__ import annotations

import gc
import random
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
from lightning_elixir.planning import make_plan
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.zoo import ZOO, make
from tests.runtime import test_streamed_updates as bodies
from tests.runtime.test_streamed_updates import CPU, HOWS, How, Result, assert_same, use_small_slots

TIMINGS = [UpdateTiming.BEHIND_FORWARD, UpdateTiming.INSIDE_BACKWARD]

SITES = ["host", "streamed", "every_site", "streamed_param_on_gpu", "mixed_persistent"]


def new_training(
    how: How,
    site: str,
    device: torch.device,
    timing: UpdateTiming,
    *,
    is_reusing: bool = False,
    has_spares: bool = False,
    **options: Any,
) -> tuple[ElixirModule, ElixirOptimizer]:
    model = make(how.name)
    inner = bodies.new_optimizer(model, how)
    plan = replace(
        bodies.plan_for(model, how, site, **options),
        update_timing=timing,
        grad_reuses_compute_shard=is_reusing,
        has_spare_states=has_spares,
    )
    module = ElixirModule(model, plan, dtype=how.dtype, master_weights=how.master, device=device)
    if how.scale and device.type == "cpu":
        module.needs_loss_scale = True
    optimizer = ElixirOptimizer(
        module, inner, initial_scale=how.scale or 1.0, init_step=how.init_step, max_norm=how.max_norm
    )
    return module, optimizer


def step(module: ElixirModule, optimizer: ElixirOptimizer, how: How, number: int, rank: int = 0) -> float | None:
    is_clipped = bool(how.clip_norm or how.clip_value)
    for micro in range(how.micro_batches - 1):
        optimizer.backward(ZOO[how.name].loss(module, (number * how.micro_batches + micro) * 3 + rank))
    last = replace(how, micro_batches=1)
    with optimizer.unobserved(not is_clipped):
        return bodies.train_step(module, optimizer, last, (number + 1) * how.micro_batches - 1, rank)


def train(how: How, site: str, timing: UpdateTiming, device: torch.device = CPU, **options: Any) -> Result:
    module, optimizer = new_training(how, site, device, timing, **options)
    norms, skipped = [], []
    for number in range(how.steps):
        norms.append(step(module, optimizer, how, number))
        skipped.append(optimizer.is_step_skipped)
    result = bodies.result_of(module, optimizer)
    module.close()
    return replace(result, norms=[n for n in norms if n is not None], skipped=skipped)


@contextmanager
def slow_updates(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.003) -> Iterator[list[str]]:
    """Updates take long, and not all the same: whoever does not wait for them sees old values. Yields the names of the
    threads that ran them."""
    run, names, times = FlatUpdate.run, [], random.Random(0)

    def slow(self: FlatUpdate, **options: Any) -> None:
        names.append(threading.current_thread().name)
        time.sleep(times.random() * seconds)
        run(self, **options)
        time.sleep(times.random() * seconds)

    with monkeypatch.context() as patch:
        patch.setattr(FlatUpdate, "run", slow)
        yield names


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("name", ["bf16", "fp32", "clipped", "unused"])
def test_timing_changes_no_bit(name: str, site: str, timing: UpdateTiming, monkeypatch: pytest.MonkeyPatch) -> None:
    how = HOWS[name]
    use_small_slots(monkeypatch)
    expected = bodies.train(how, "host")
    with slow_updates(monkeypatch, 0.001):
        actual = train(how, site, timing)
    assert_same(actual, expected)
    assert actual.norms == expected.norms


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("name", sorted(set(HOWS) - {"bf16", "fp32", "clipped", "unused"}))
def test_every_way_to_train(name: str, timing: UpdateTiming, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_slots(monkeypatch)
    how = HOWS[name]
    expected = bodies.train(how, "host")
    with slow_updates(monkeypatch, 0.001):
        assert_same(train(how, "mixed", timing), expected)


@pytest.mark.parametrize("name", ["bf16", "fp32", "accumulated", "scaled", "clipped", "unused", "tied"])
@pytest.mark.parametrize("timing", [UpdateTiming.AFTER_BACKWARD, UpdateTiming.BEHIND_FORWARD])
def test_gradients_in_the_place_of_parameters(name: str, timing: UpdateTiming, monkeypatch: pytest.MonkeyPatch) -> None:
    how = HOWS[name]
    expected = bodies.train(how, "host")
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
    module, optimizer = new_training(how, "host", CPU, UpdateTiming.BEHIND_FORWARD)
    for number in range(2):
        step(module, optimizer, how, number)
    optimizer.synchronize()
    gate = threading.Event()
    run = FlatUpdate.run

    def held_up(self: FlatUpdate, **options: Any) -> None:
        gate.wait()
        run(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(FlatUpdate, "run", held_up)
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
    module, optimizer = new_training(how, "host", CPU, UpdateTiming.INSIDE_BACKWARD)
    for number in range(2):
        step(module, optimizer, how, number)
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
        needs = module.engine.first_needs()
        gate.set()
        optimizer.synchronize()
    begun, rest = order[:2], order[2:]  # two threads had taken one each when the step came
    assert begun[0] == max(needs, key=lambda i: needs[i])
    assert rest == sorted(rest, key=lambda i: needs[i])
    assert len(order) == len(needs) > 4
    module.close()


@pytest.mark.parametrize("what", ["backward", "between", "no_step"])
def test_no_step_after_updates_have_begun_ends_the_engine(what: str) -> None:
    how = HOWS["bf16"]
    module, optimizer = new_training(how, "host", CPU, UpdateTiming.INSIDE_BACKWARD)
    for number in range(2):
        step(module, optimizer, how, number)

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
    module, optimizer = new_training(how, "host", CPU, UpdateTiming.INSIDE_BACKWARD)
    for number in range(2):
        step(module, optimizer, how, number)
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
    module, optimizer = new_training(how, "host", CPU, UpdateTiming.INSIDE_BACKWARD)
    for number in range(2):
        step(module, optimizer, how, number)

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
    module, optimizer = new_training(how, "host", CPU, UpdateTiming.INSIDE_BACKWARD)
    for number in range(2):
        step(module, optimizer, how, number)

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
    module, optimizer = new_training(how, "host", CPU, UpdateTiming.BEHIND_FORWARD)
    for number in range(2):
        step(module, optimizer, how, number)
    optimizer.synchronize()
    gate = threading.Event()
    run = FlatUpdate.run

    def held_up(self: FlatUpdate, **options: Any) -> None:
        gate.wait()
        run(self, **options)

    engine = module.engine
    with monkeypatch.context() as patch:
        patch.setattr(FlatUpdate, "run", held_up)
        step(module, optimizer, how, 2)
        engine.residency.acquire((0, 1), True, None, False)
        chunk = engine.chunks[1]
        assert chunk.ready is not None
        assert not chunk.ready.is_over()
        gate.set()
        chunk.wait_ready()
    assert torch.equal(chunk.flat, engine.store[1].param)
    engine.rcache.drop((0, 1))
    module.close()


class _Twice(nn.Module):
    """A layer inside and outside of reentrant checkpointing: its gradient hook fires twice in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.shared = nn.Linear(64, 64)
        self.is_twice = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.is_twice:
            x = checkpoint(self.shared, x, use_reentrant=True)
        return self.shared(x).square().mean()


def test_a_gradient_that_comes_too_late_ends_the_engine() -> None:
    torch.manual_seed(0)
    model = _Twice()
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


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize(
    ("site", "is_distributed"), [("every_site", True), ("mixed", False), ("mixed_persistent", True)]
)
def test_timing_changes_no_bit_with_ranks(
    world_size: int, timing: UpdateTiming, site: str, is_distributed: bool
) -> None:
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
    assert not any(t.is_alive() for t in ours)
