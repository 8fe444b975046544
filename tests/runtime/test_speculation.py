"""Updates that begin inside backward and can be taken back give bit for bit what those inside the step give.

The bodies, in `helpers`, take the device, so that `tests/gpu` runs them with real lanes and page-locked memory.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_elixir.core.worker import Task
from lightning_elixir.errors import DivergenceError, StateError
from lightning_elixir.optim import HybridAdam
from lightning_elixir.optim.execution import UpdateRunner
from lightning_elixir.optim.updates import FlatUpdate
from lightning_elixir.plan.types import Tier
from lightning_elixir.stepping.describing import UpdateDescriber
from lightning_elixir.stepping.scheduler import UpdateScheduler
from lightning_elixir.stepping.speculation import Caution
from lightning_elixir.storage.shards import ShardStore
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers import streamed_updates as streamed_bodies
from tests.helpers import update_timing as timing_bodies
from tests.helpers.accumulation import additions as slow_additions
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan, with_spares
from tests.helpers.speculation import (
    ACTIONS,
    AFTER,
    NEVER_CLIPPED,
    SCALED,
    Action,
    Training,
    assert_same_value,
    backward,
    check_action,
    check_between,
    check_every_way,
    check_same_training,
    check_sums,
    new_training,
    num_with_spares,
    save,
    set_lr,
    warm_up,
)
from tests.helpers.streamed_updates import CPU, HOWS, How, Result, assert_same, result_of, use_small_slots
from tests.helpers.tiers import crossed, full, telling
from tests.helpers.update_timing import SITES, Twice, slow_updates
from tests.helpers.zoo import ZOO


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch, begun: list[FlatUpdate] | None = None) -> Iterator[threading.Event]:
    """No update goes on before the event is set."""
    gate, run = threading.Event(), FlatUpdate.run

    def wait(self: FlatUpdate, **options: Any) -> None:
        if begun is not None:
            begun.append(self)
        gate.wait()
        run(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(FlatUpdate, "run", wait)
        try:
            yield gate
        finally:
            gate.set()


# Every way to train


@crossed(
    told=["max_norm-streamed", "unused-streamed_param_on_gpu"],
    name=["bf16", "max_norm", "scaled", "unused"],
    site=SITES,
)
def test_speculation_changes_no_bit(name: str, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_slots(monkeypatch)
    check_every_way(HOWS[name], site, CPU, monkeypatch)


OTHERS = sorted(set(HOWS) - {"bf16", "max_norm", "scaled", "unused"})
TOLD = ["accumulated", "clipped_by_value", "groups", "scaled_clipped", "unused_fp32"]


@pytest.mark.parametrize("name", telling(OTHERS, "accumulated"))
def test_every_way_to_train(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_slots(monkeypatch)
    check_every_way(HOWS[name], "mixed", CPU, monkeypatch)


EARLY = {"clipping": NEVER_CLIPPED, "scaled": SCALED, "groups": HOWS["groups"]}


@crossed(
    told=["clipping-mixed_persistent", "scaled-streamed", "groups-every_site"],
    how=[pytest.param(how, id=name) for name, how in EARLY.items()],
    site=["host", "streamed", "every_site", "mixed_persistent", "streamed_param_on_gpu"],
)
def test_updates_begin_inside_backward_and_take_effect(site: str, how: How, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on, and without a promise that nobody looks; no update runs twice."""
    use_small_slots(monkeypatch)
    module, optimizer = new_training(how, site)
    engine = module.engine
    num_chunks = num_with_spares(module)
    begun, runs = [], []
    run = FlatUpdate.run
    monkeypatch.setattr(FlatUpdate, "run", lambda self, **options: (runs.append(self.used_numel), run(self, **options)))
    total = sum(c.numel for chunk in engine.chunks for c in chunk.spec.members)
    for number in range(4):
        optimizer.synchronize()
        runs.clear()
        masters = [engine.store[c.id].spare_master for c in engine.chunks]
        backward((module, optimizer), how, number)
        begun.append(optimizer.num_ahead)
        optimizer.step()
        assert optimizer.num_ahead == 0
        optimizer.synchronize()
        assert sum(runs) == total
        times = optimizer.last_step_times
        assert times is not None
        assert times.gpu_numel + times.streamed_numel + times.cpu_numel == total
        for chunk, spare in zip(engine.chunks, masters, strict=True):
            assert spare is None or engine.store[chunk.id].master is spare
    assert begun == [0] + 3 * [num_chunks]
    assert module.stats().redone_steps == 0
    module.close()


def test_a_step_of_which_all_was_right_moves_no_bytes_on_the_host() -> None:
    """The roles change: the compute shard is the memory that values were written to."""
    module, optimizer = new_training(SCALED, "host")
    warm_up((module, optimizer), SCALED)
    for number in range(2):
        backward((module, optimizer), SCALED, number)
        shards = [module.engine.store[c.id] for c in module.engine.chunks]
        values, old, spares = [[getattr(s, n) for s in shards] for n in ("spare_param", "param", "spare_master")]
        optimizer.step()
        assert all(s.param is v and s.spare_param is o for s, v, o in zip(shards, values, old, strict=True))
        for inner, spare in zip(optimizer._states.inner.values(), spares, strict=True):
            assert inner.work is spare
            for tensor, place in zip(inner._tensors, inner.places, strict=True):
                assert tensor.data_ptr() == spare[place.shard_offset :].data_ptr()
    module.close()


def test_the_step_waits_for_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = new_training(NEVER_CLIPPED, "host")
    warm_up((module, optimizer), NEVER_CLIPPED)
    optimizer.synchronize()  # or the forward would wait for the warm-up's updates
    with held_up(monkeypatch) as gate:
        backward((module, optimizer), NEVER_CLIPPED, 0)
        optimizer.step()
        updates = [module.engine.store[c.id].update for c in module.engine.chunks]
        assert all(task is not None and not task.is_over() for task in updates)
        gate.set()
    module.close()


def test_the_next_forward_has_its_chunks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = new_training(NEVER_CLIPPED, "host")
    warm_up((module, optimizer), NEVER_CLIPPED)
    optimizer.synchronize()
    at = {module.engine.store[c.id].master.data_ptr(): c.id for c in module.engine.chunks}
    begun: list[FlatUpdate] = []
    with held_up(monkeypatch, begun) as gate:
        backward((module, optimizer), NEVER_CLIPPED, 0)
        optimizer.step()
        needs = module.engine.steps.first_needs()
        gate.set()
        optimizer.synchronize()
    rest = [at[update.param.data_ptr()] for update in begun][2:]  # two threads had taken one each when the step came
    assert rest == sorted(rest, key=lambda i: needs[i])
    assert len(rest) == len(needs) - 2 > 2
    module.close()


# What may happen between backward and step


def change_the_scale(training: Training) -> None:
    training[1].scaler.scale *= 0.5


@pytest.mark.parametrize("name", telling(ACTIONS, "write_a_parameter"))
def test_what_happens_between_backward_and_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_action(name, How(), "mixed", CPU, monkeypatch)


@pytest.mark.full  # combinations of test_what_happens_between_backward_and_step
@crossed(
    told=["accumulate-streamed_param_on_gpu", "save-every_site"],
    name=["clip_low", "write_a_parameter", "accumulate", "save"],
    site=["every_site", "mixed_persistent", "streamed_param_on_gpu"],
)
def test_what_happens_in_between_at_every_site(name: str, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_action(name, SCALED, site, CPU, monkeypatch)


def test_another_loss_scale_runs_the_update_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = check_between(SCALED, [None, change_the_scale, None], monkeypatch)
    assert seen.redone == [0, 1, 1]


def test_the_settings_of_one_group_leave_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    how = HOWS["groups"]
    seen = check_between(how, [None, set_lr(0.5, 1), None], monkeypatch)
    assert seen.redone == [0, 1, 1]


@pytest.mark.parametrize(("norms", "redone"), [full([1e6] * 3, [0, 0, 0]), ([1e6, 1e-2, 1e6], [0, 1, 1])])
def test_clipped_never_and_sometimes(norms: list[float], redone: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(max_norm: float) -> Action:
        def action(training: Training) -> None:
            training[1].max_norm = max_norm

        return action

    seen = check_between(NEVER_CLIPPED, [limit(n) for n in norms], monkeypatch)
    assert seen.redone == redone


def test_an_overflow_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(training: Training) -> Any:
        module, optimizer = training
        optimizer.zero_grad()
        optimizer.backward(ZOO["gpt2"].loss(module, 31) * float("inf"))
        return None

    seen = check_between(SCALED, [None, overflow, save, None], monkeypatch)
    assert [v for v in seen.values if v is True] == [True]  # skipped once
    assert seen.redone == [0, 1, 2, 2]


@pytest.mark.full  # a long run
def test_steps_that_always_clip_are_given_up_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    how = How(max_norm=1e-3)
    seen = check_between(how, [None] * 75, monkeypatch, "host")
    num_chunks = seen.num_ahead[0]
    # The first step of the warm-up counts as a failure; its second one had nothing to speculate with either.
    assert seen.num_ahead == [num_chunks] * (1 + 0) + [0] * 64 + [num_chunks] * 3 + [0] * 7
    assert seen.redone[0] == 1
    assert seen.redone[-1] == 4


def test_what_is_saved_in_between_is_the_state_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    training = module, optimizer = new_training(HOWS["bf16"], "host")
    warm_up(training, HOWS["bf16"])
    before = copy.deepcopy(save(training))
    with slow_updates(monkeypatch):
        backward(training, HOWS["bf16"], 0)
        assert optimizer.num_ahead > 0
        assert_same_value(save(training), before)
        assert optimizer.num_ahead == 0
        optimizer.step()
    module.close()


def test_what_has_not_begun_is_cancelled_and_what_runs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    how = HOWS["bf16"]
    training = module, optimizer = new_training(how, "host")
    warm_up(training, how)
    ran: list[FlatUpdate] = []
    with held_up(monkeypatch, ran) as gate:
        backward(training, how, 0)
        while len(ran) < 2:  # two threads take one each
            pass
        dropping = threading.Thread(target=optimizer.zero_grad)
        dropping.start()
        dropping.join(0.05)
        assert dropping.is_alive()
        gate.set()
        dropping.join()
    assert len(ran) == 2 < num_with_spares(module)
    module.close()


def wrapped(model: nn.Module, chunk_size: int, *, is_ahead: bool) -> Training:
    """With spare states, or with updates as a plan has them run that says nothing of it."""
    plan = make_plan(model, placement_policy="cpu", chunk_size=chunk_size, compute_dtype=torch.bfloat16)
    if is_ahead:
        plan = with_spares(plan)
    inner = HybridAdam(model.parameters(), lr=0.1)
    module = ElixirModule(model, plan, dtype=torch.bfloat16)
    return module, ElixirOptimizer(module, inner)


def test_a_gradient_that_comes_late_runs_the_update_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(is_ahead: bool) -> tuple[Any, int]:
        torch.manual_seed(0)
        model = Twice()
        module, optimizer = wrapped(model, 10 * 1024, is_ahead=is_ahead)
        for number in range(6):
            model.is_twice = number == 3
            optimizer.backward(module(torch.ones(2, 64) + number))
            optimizer.step()
        found = module.full_state_dict(), module.stats().redone_steps
        module.close()
        return found

    expected, _ = train(False)
    with slow_updates(monkeypatch):
        actual, redone = train(True)
    assert_same_value(actual, expected)
    assert redone == 1


class _Sometimes(nn.Module):
    """Half of it is used in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.is_whole = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return (self.second(x) if self.is_whole else x).square().mean()


def test_parameters_that_come_and_go_wait_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one of a chunk gets no gradient, or has no states yet."""

    def train(is_ahead: bool) -> tuple[Any, Any, list[int]]:
        torch.manual_seed(0)
        model = _Sometimes()
        module, optimizer = wrapped(model, 20 * 1024, is_ahead=is_ahead)
        assert len(module.plan.chunks) == 1
        num_ahead = []
        for number, is_whole in enumerate([False, False, True, True, True, True, False, True]):
            model.is_whole = is_whole
            if number == 4:
                state = copy.deepcopy(optimizer.state_dict())
                del state["state"][2]
                optimizer.load_state_dict(state)
            optimizer.backward(module(torch.ones(2, 64) + number))
            num_ahead.append(optimizer.num_ahead)
            optimizer.step()
        found = module.full_state_dict(), optimizer.state_dict()["state"], num_ahead
        module.close()
        return found

    *expected, _ = train(False)
    with slow_updates(monkeypatch):
        *actual, num_ahead = train(True)
    assert_same_value(actual, expected)
    assert num_ahead == [0, 0, 0, 1, 0, 1, 0, 0]  # as long as it is taken for what it was the last time


# Threads that fail or are late, signals, several micro-batches


def warm_pair(how: How, site: str = "host") -> list[Training]:
    """Without and with speculation, after two steps."""
    trainings = [new_training(how, site, is_ahead=is_ahead) for is_ahead in (False, True)]
    for training in trainings:
        warm_up(training, how)
        training[1].synchronize()
    return trainings


def one_step(training: Training, how: How, number: int) -> None:
    backward(training, how, number)
    training[1].step()


@contextmanager
def failing_updates(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(self: FlatUpdate, **options: Any) -> None:
        raise RuntimeError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr(FlatUpdate, "run", fail)
        yield


def test_an_update_that_failed_before_its_step_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    how = NEVER_CLIPPED
    trainings = warm_pair(how)
    for training in trainings:
        with failing_updates(monkeypatch):
            backward(training, how, 0)
            for begun in list(training[1]._updates._speculation._begun.values()):
                begun.task.join()
        training[1].step()
        one_step(training, how, 1)
    assert trainings[1][0].stats().redone_steps == 1
    check_same_training(trainings)


def test_an_update_that_fails_after_its_step_is_told_to_whoever_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    how = NEVER_CLIPPED
    module, optimizer = new_training(how, "host")
    warm_up((module, optimizer), how)
    gate, run = threading.Event(), FlatUpdate.run

    def fail(self: FlatUpdate, **options: Any) -> None:
        gate.wait()
        raise RuntimeError("no such luck")

    monkeypatch.setattr(FlatUpdate, "run", fail)
    one_step((module, optimizer), how, 0)
    gate.set()
    monkeypatch.setattr(FlatUpdate, "run", run)
    for use in (module.full_state_dict, optimizer.state_dict):
        with pytest.raises(StateError, match="no such luck.*from a checkpoint"):
            use()
    module.close()


@pytest.mark.full
def test_a_failure_to_begin_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    how = NEVER_CLIPPED
    trainings = warm_pair(how)
    module, optimizer = trainings[1]

    def fail(*args: Any, **options: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(optimizer._runner), "submit", fail)
        with pytest.raises(MemoryError):
            backward(trainings[1], how, 0)
    assert optimizer.num_ahead == 0
    for training in trainings:
        for number in range(2):
            one_step(training, how, number)
    check_same_training(trainings)


def test_waiting_that_was_interrupted_goes_on_before_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while something is dropped: what runs still writes to spares, and reads gradients."""
    how = NEVER_CLIPPED
    trainings = warm_pair(how)
    training = trainings[1]
    begun: list[FlatUpdate] = []
    ended: list[FlatUpdate] = []
    run, join = FlatUpdate.run, Task.join

    def slow(self: FlatUpdate, **options: Any) -> None:
        begun.append(self)
        time.sleep(0.2 * len(begun))
        run(self, **options)
        ended.append(self)

    def interrupted(self: Task) -> None:
        if not self.is_over():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FlatUpdate, "run", slow)
        backward(training, how, 0)
        while len(begun) < 2:  # two threads take one each
            pass
        patch.setattr(Task, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training[1].zero_grad()
        patch.setattr(Task, "join", join)
        assert len(ended) < 2
        assert training[1].num_ahead == 0
        training[1].zero_grad()
        assert len(ended) == len(begun) == 2
    for one in trainings:
        for number in range(1, 3):
            one_step(one, how, number)
    check_same_training(trainings)


@pytest.mark.parametrize("when", telling(["inside_step", "in_between", "inside_backward"], "in_between"))
def test_ctrl_c_leaves_a_whole_step_or_none(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    how = NEVER_CLIPPED
    trainings = warm_pair(how)
    module, optimizer = trainings[1]
    places: dict[str, tuple[type, str]] = {
        "inside_step": (UpdateScheduler, "_take_begun"),
        "inside_backward": (UpdateDescriber, "ahead"),
    }

    def train_on() -> None:
        backward(trainings[1], how, 0)
        if when == "in_between":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        optimizer.step()

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch, slow_updates(monkeypatch):
            if when in places:
                cls, name = places[when]
                found = getattr(cls, name)

                def interrupted(self: object, *args: Any) -> Any:
                    os.kill(os.getpid(), signal.SIGINT)
                    return found(self, *args)

                patch.setattr(cls, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                train_on()
    finally:
        signal.signal(signal.SIGINT, handler)
    if when == "inside_step":
        one_step(trainings[0], how, 0)
    before, after = [copy.deepcopy(save(training)) for training in trainings]  # as `on_exception` checkpoints do
    assert_same_value(after, before)
    for training in trainings:
        training[1].zero_grad()
        for number in range(1, 3):
            one_step(training, how, number)
    check_same_training(trainings)


@pytest.mark.full
def test_ctrl_c_when_an_update_begins_leaves_none_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    how = NEVER_CLIPPED
    trainings = warm_pair(how)
    begun: list[FlatUpdate] = []
    ended: list[FlatUpdate] = []
    run, submit = FlatUpdate.run, UpdateRunner.submit

    def slow(self: FlatUpdate, **options: Any) -> None:
        begun.append(self)
        time.sleep(0.2)
        run(self, **options)
        ended.append(self)

    def interrupted(self: UpdateRunner, *args: Any, **options: Any) -> Task:
        task = submit(self, *args, **options)
        while not begun:
            pass
        os.kill(os.getpid(), signal.SIGINT)
        return task

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(FlatUpdate, "run", slow)
            patch.setattr(UpdateRunner, "submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                backward(trainings[1], how, 0)
            assert len(ended) == len(begun) == 1
    finally:
        signal.signal(signal.SIGINT, handler)
    for training in trainings:
        for number in range(2):
            one_step(training, how, number)
    check_same_training(trainings)


def test_a_hook_of_the_step_may_still_change_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def halve(optimizer: Any, *args: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    how = NEVER_CLIPPED
    trainings = warm_pair(how)
    with slow_updates(monkeypatch, 0.001):
        for training in trainings:
            handle = training[1].register_step_pre_hook(halve)
            one_step(training, how, 0)
            handle.remove()
            one_step(training, how, 1)
    assert trainings[1][0].stats().redone_steps == 1
    check_same_training(trainings)


@crossed(
    told=["scaled-True"],
    how=[
        pytest.param(NEVER_CLIPPED, id="clipping"),
        pytest.param(SCALED, id="scaled"),
        pytest.param(HOWS["bf16"], id="bf16"),
    ],
    is_known=[False, True],
)
def test_sums_beside_backward(how: How, is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates that have begun with the first gradients are dropped before others are added to them on a thread; one
    that begins with a sum waits for it."""
    check_sums(how, is_known, CPU, monkeypatch)


def test_gradients_of_several_micro_batches_are_summed_in_fp32_from_the_first_on() -> None:
    how = NEVER_CLIPPED
    module, optimizer = new_training(how, "host")
    module.engine.reducer.landing.expect_accumulation(True)
    warm_up((module, optimizer), how)
    buffers = set()
    for number in range(2):
        for micro in range(2):
            backward((module, optimizer), how, number + micro)
            grads = [module.engine.store[c.id].grad for c in module.engine.chunks]
            assert all(g is not None and g.dtype is torch.float32 for g in grads)
            buffers.add(tuple(g.data_ptr() for g in grads if g is not None))
        optimizer.step()
    assert len(buffers) == 1
    module.close()


def test_a_sum_that_failed_is_told_and_nothing_of_the_step_is_done() -> None:
    how = NEVER_CLIPPED
    trainings = warm_pair(how)
    for training in trainings:
        for number in range(2):
            backward(training, how, number)
        training[1].step()
        with slow_additions() as failing:
            backward(training, how, 2)
            failing.failing_at = failing.num_done + 3
            backward(training, how, 3)
            with pytest.raises(StateError, match=r"adding up the gradients of .*no sum today.*zero_grad"):
                training[1].step()
        training[1].zero_grad()
        for number in range(3, 6):
            one_step(training, how, number)
    check_same_training(trainings)


@pytest.mark.full
def test_sums_that_fail_under_an_update_that_has_begun() -> None:
    """It fails with them; the norm, or the step, says so before anything has changed."""
    how = NEVER_CLIPPED
    trainings = warm_pair(how)
    for training in trainings:
        for number in range(2):
            backward(training, how, number)
        training[1].step()
        with slow_additions() as failing:
            failing.failing_at = 2
            backward(training, how, 2)  # one backward alone, into sums
            with pytest.raises(StateError, match=r"adding up the gradients of .*no sum today.*zero_grad"):
                training[1].step()
        training[1].zero_grad()
        for number in range(3, 6):
            one_step(training, how, number)
    check_same_training(trainings)


def test_the_step_waits_for_no_sum() -> None:
    how = HOWS["bf16"]
    with slow_additions(num_buffers=100) as slow:
        trainings = warm_pair(how)
        for training in trainings:
            for number in range(2):
                backward(training, how, number)
            training[1].step()
            one_step(training, how, 2)
            training[1].synchronize()
        module, optimizer = trainings[1]
        num_done = slow.num_done
        slow.gate.clear()
        backward(trainings[1], how, 3)
        assert optimizer.num_ahead == num_with_spares(module)
        optimizer.step()
        assert slow.num_done == num_done
        slow.gate.set()
        optimizer.synchronize()
        assert module.stats().redone_steps == 1
        one_step(trainings[0], how, 3)
        check_same_training(trainings)


def test_what_was_said_of_several_backwards_survives_a_move() -> None:
    how = NEVER_CLIPPED
    training = module, optimizer = new_training(how, "host")
    module.engine.reducer.landing.expect_accumulation(True)
    warm_up(training, how)
    module.replan(module.engine.plan)
    for is_expected in (True, False):
        module.engine.reducer.landing.expect_accumulation(is_expected)
        module.replan(module.engine.plan)
        backward(training, how, 0)
        assert (optimizer.num_ahead == 0) == is_expected
        optimizer.step()
    module.close()


@pytest.mark.full
def test_another_optimizer_drops_what_the_first_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both write to the spare masters."""
    how = NEVER_CLIPPED
    trainings = warm_pair(how)
    for i, (module, optimizer) in enumerate(trainings):
        with slow_updates(monkeypatch):
            backward((module, optimizer), how, 0)
            other = ElixirOptimizer(module, HybridAdam(module.module.parameters(), lr=1e-2), max_norm=how.max_norm)
            assert optimizer.num_ahead == 0
            other.step()
            trainings[i] = module, other
            for number in range(1, 4):
                one_step(trainings[i], how, number)
    check_same_training(trainings)


class _LateCopies:
    """Gradients are in host memory when somebody waits for that, and no sooner."""

    def __init__(self, patch: pytest.MonkeyPatch, module: ElixirModule) -> None:
        self._lock, self._copies, self.num_late = threading.Lock(), deque[tuple[Tensor, Tensor]](), 0
        set_grad, late = ShardStore.set_grad, self

        class Target:
            def __init__(self, tensor: Tensor) -> None:
                self.tensor, self.dtype = tensor, tensor.dtype

            def copy_(self, source: Tensor, non_blocking: bool = False) -> None:
                if non_blocking:
                    self.tensor.fill_(float("nan"))
                    late._copies.append((self.tensor, source.clone()))
                else:
                    self.tensor.copy_(source)

        patch.setattr(ShardStore, "set_grad", lambda *args: Target(set_grad(*args)))
        patch.setattr(module.engine.device, "reduce_lane", self)

    @contextmanager
    def issue(self) -> Iterator[None]:
        yield

    resume = issue

    def record(self) -> _LateCopies:
        return self

    def wait(self) -> None:  # a stream waits, the host does not
        return

    def synchronize(self) -> None:
        with self._lock:
            while self._copies:
                target, source = self._copies.popleft()
                target.copy_(source)
                self.num_late += 1

    def is_over(self) -> bool:
        return not self._copies


@pytest.mark.full  # combinations
@pytest.mark.parametrize("what", telling(["step", "zero_grad", "save", "look_at_gradients", "lr"], "save", "lr"))
def test_gradients_that_come_down_late_are_waited_for(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    how = HOWS["bf16"]
    trainings = warm_pair(how, "mixed")
    action = None if what == "step" else ACTIONS[what][0]
    for training in trainings:
        with monkeypatch.context() as patch, slow_updates(monkeypatch, 0.001):
            late = _LateCopies(patch, training[0])
            for number in range(3):
                backward(training, how, number)
                if action is not None:
                    action(training)
                    if what == "zero_grad":
                        backward(training, how, number + 7)
                training[1].step()
            training[1].synchronize()
            assert late.num_late
    check_same_training(trainings)


# Aliases


@pytest.mark.full  # what test_what_happens_between_backward_and_step finds as well
@pytest.mark.parametrize("when", ["between_steps", "in_between"])
@pytest.mark.parametrize("site", ["mixed_persistent", "host"])
def test_what_is_written_through_kept_aliases_is_not_lost(
    site: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = NEVER_CLIPPED

    def train(is_ahead: bool) -> list[Any]:
        training = module, optimizer = new_training(how, site, is_ahead=is_ahead)
        warm_up(training, how)
        live = [p.data for p in list(module.module.parameters())[:3]]
        seen: list[Any] = []
        for number in range(5):
            backward(training, how, number)
            if when == "in_between" and number % 2:
                for x in live:
                    x.mul_(0.5)
            optimizer.step()
            if when == "between_steps":
                for x in live:
                    x.clamp_(-0.01, 0.01)
            seen += [x.clone() for x in live]
        seen += list(module.full_state_dict().values())
        assert not is_ahead or module.stats().redone_steps == (2 if when == "in_between" else 0)
        module.close()
        return seen

    expected = train(False)
    with slow_updates(monkeypatch):
        actual = train(True)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.full
def test_what_was_read_before_backward_hinders_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    how = NEVER_CLIPPED
    trainings = warm_pair(how)
    for training in trainings:
        module, optimizer = training
        for number in range(3):
            loss = ZOO[how.name].loss(module, number * 3)
            with torch.no_grad():
                [float(p.float().norm()) for p in module.module.parameters()]
            with slow_updates(monkeypatch):
                optimizer.backward(loss)
                assert optimizer.num_ahead in (0, num_with_spares(module))
                optimizer.step()
    assert trainings[1][0].stats().redone_steps == 0
    check_same_training(trainings)


# One rank alone


def _one_rank_alone(what: str) -> int:
    how, results, redone = NEVER_CLIPPED, [], 0
    for is_ahead in (False, True):
        module, optimizer = new_training(how, "every_site", is_ahead=is_ahead, world_size=dist.get_world_size())
        with pytest.MonkeyPatch.context() as patch, slow_updates(patch, 0.001):
            for number in range(6):
                optimizer.backward(ZOO[how.name].loss(module, 3 * number + dist.get_rank()))
                if number in (2, 4) and dist.get_rank() == 1:
                    if what == "drops":
                        module.engine.reducer.withdraw()
                    elif what == "fails":
                        for begun in optimizer._updates._speculation._begun.values():
                            begun.task.join()
                            begun.task.error = RuntimeError("no such luck")
                if number in (2, 4) and what == "goes_elsewhere":
                    with pytest.raises(DivergenceError):
                        (optimizer.state_dict if dist.get_rank() == 1 else optimizer.step)()
                optimizer.step()
        redone += module.stats().redone_steps
        results.append(replace(result_of(module, optimizer), numel=(0, 0, 0)))
        module.close()
    if dist.get_rank() == 0:
        assert_same(results[1], results[0])
    return redone


@pytest.mark.parametrize("what", telling(["drops", "fails", "goes_elsewhere"], "fails"))
@pytest.mark.full
def test_a_rank_that_runs_its_updates_again_alone(what: str) -> None:
    """The others need not know: neither bits nor collectives depend on it."""
    assert run_ranks(_one_rank_alone, 2, what) == [0, 2]


# Plans, memory, ranks


@pytest.mark.full
def test_spares_are_counted_and_come_and_go_with_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    how = HOWS["bf16"]
    training = module, optimizer = new_training(how, "host")
    other = reference, reference_optimizer = new_training(how, "host", is_ahead=False)
    numel = sum(c.numel for c in module.engine.plan.chunks)
    spares = []
    for number, has_spares in enumerate([True, True, False, True, True, True]):
        if number >= 2:
            plan = replace(streamed_bodies.plan_for(module.module, how, "every_site" if number > 3 else "host"))
            module.replan(with_spares(plan, "all" if has_spares else "none"))
        with slow_updates(monkeypatch, 0.001):
            for micro in range(2):
                for one in (training, other):
                    backward(one, how, 2 * number + micro)
                    one[1].step()
                assert has_spares or not optimizer.num_ahead
            spares.append(module.stats().held_bytes.get("cpu_spare", 0))
        held = module.stats().held_bytes
        assert held.get("cpu_states", 0) + held.get("gpu_states", 0) == sum(reference_optimizer.state_bytes().values())
    on_host = sum(c.numel for c in module.engine.plan.chunks if c.optim_tier is Tier.CPU)
    moments = sum(inner.spare_bytes() for inner in optimizer._states.inner.values())
    assert spares == [spares[0]] * 2 + [0, spares[0]] + [6 * on_host + moments] * 2
    assert spares[0] <= 14 * numel
    assert_same(replace(result_of(*training), numel=(0, 0, 0)), replace(result_of(*other), numel=(0, 0, 0)))
    module.close()
    reference.close()


def test_replan_with_updates_that_have_begun_asks_for_a_step() -> None:
    how = HOWS["bf16"]
    training = module, optimizer = new_training(how, "host")
    warm_up(training, how)
    backward(training, how, 0)
    with pytest.raises(StateError, match="while gradients wait for a step"):
        module.replan(replace(with_spares(module.engine.plan, "none"), update_timing=AFTER))
    assert optimizer.num_ahead == 0
    optimizer.step()
    module.replan(replace(with_spares(module.engine.plan, "none"), update_timing=AFTER))
    backward(training, how, 1)
    assert optimizer.num_ahead == 0
    module.close()


def test_a_new_group_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameters have no states yet, so their chunks wait for one step."""

    def train(is_ahead: bool) -> Result:
        model = timing_bodies.make("gpt2")
        named = list(model.named_parameters())
        late = [p for n, p in named if ".ln" in n]
        inner = HybridAdam([p for n, p in named if ".ln" not in n], lr=1e-2)
        plan = streamed_bodies.plan_for(model, How(), "host")
        plan = with_spares(plan) if is_ahead else replace(plan, update_timing=AFTER)
        module = ElixirModule(model, plan, dtype=torch.bfloat16)
        optimizer = ElixirOptimizer(module, inner)
        for number in range(5):
            backward((module, optimizer), How(), number)
            if number == 2:
                optimizer.add_param_group({"params": late, "lr": 1e-3})
            optimizer.step()
        result = replace(result_of(module, optimizer), numel=(0, 0, 0))
        module.close()
        return result

    expected = train(False)
    with slow_updates(monkeypatch):
        assert_same(train(True), expected)


def test_states_go_with_their_optimizer() -> None:
    """The engine, which calls it when gradients land, does not keep it."""
    module, optimizer = new_training(How(), "host")
    warm_up((module, optimizer), How())
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None
    ZOO["gpt2"].loss(module, 0).backward()
    module.close()


def _train_on_ranks(how: How, site: str, is_distributed: bool, is_everybody: bool) -> tuple[int, int]:
    results, num_ahead, redone = [], 0, 0
    for is_ahead in (False, True):
        options = {"world_size": dist.get_world_size(), "enable_distributed_storage": is_distributed}
        module, optimizer = new_training(how, site, is_ahead=is_ahead, **options)
        for number in range(7):
            rank = dist.get_rank() if is_everybody else 0
            optimizer.backward(ZOO[how.name].loss(module, 3 * number + rank))
            num_ahead = max(num_ahead, optimizer.num_ahead)
            if number == 4:
                optimizer.max_norm = 1e-3
            optimizer.step()
            optimizer.max_norm = how.max_norm
        redone += module.stats().redone_steps
        results.append(replace(result_of(module, optimizer), numel=(0, 0, 0)))
        module.close()
    if dist.get_rank() == 0:
        assert_same(results[1], results[0])
    return num_ahead, redone


@pytest.mark.full  # test_speculation_changes_no_bit, with ranks
@pytest.mark.parametrize("world_size", telling([2, 3], "2"))
@pytest.mark.parametrize(
    ("name", "site", "is_distributed"),
    [
        full("gpt2", "every_site", True),
        full("gpt2", "mixed", False),
        full("gpt2", "streamed_param_on_gpu", False),
        full("gpt2", "mixed_persistent", True),
        ("branching", "host", True),
    ],
)
def test_speculation_changes_no_bit_with_ranks(name: str, site: str, is_distributed: bool, world_size: int) -> None:
    """Of `branching`, every rank uses other parameters: what begins differs, what comes of it does not."""
    how = How(name=name, max_norm=1e6)
    for num_ahead, redone in run_ranks(_train_on_ranks, world_size, how, site, is_distributed, True):
        assert num_ahead > 0
        assert redone == 1


# When to stop


def test_it_stops_after_three_failures_of_eight_steps() -> None:
    caution = Caution()
    for has_failed in [True, False, False, True, False, False, False, False, True]:  # the first is nine steps ago
        assert caution.is_allowed
        caution.note(has_failed=has_failed)
    assert caution.is_allowed
    caution.note(has_failed=True)
    for _ in range(64):
        assert not caution.is_allowed
        caution.note(has_failed=True)  # nobody tried, so this says nothing
    for has_failed in (True, True):
        assert caution.is_allowed
        caution.note(has_failed=has_failed)
    assert caution.is_allowed
    caution.note(has_failed=True)
    assert not caution.is_allowed
