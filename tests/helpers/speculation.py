"""Training whose updates begin before the step, and what happens in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir.plan.types import UpdateTiming
from lightning_elixir.stepping.describing import UpdateDescriber
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers import streamed_updates as streamed_bodies
from tests.helpers import update_timing as timing_bodies
from tests.helpers.accumulation import additions as slow_additions
from tests.helpers.streamed_updates import CPU, HOWS, How, Result, assert_same, result_of, use_small_slots
from tests.helpers.update_timing import slow_updates
from tests.helpers.zoo import ZOO

AFTER, INSIDE = UpdateTiming.AFTER_BACKWARD, UpdateTiming.INSIDE_BACKWARD
NEVER_CLIPPED = How(max_norm=1e6)
SCALED = How(scale=64.0)
Training = tuple[ElixirModule, ElixirOptimizer]


def new_training(
    how: How, site: str, device: torch.device = CPU, *, is_ahead: bool = True, spared: str = "all", **options: Any
) -> Training:
    """With spare states for these chunks, or one whose updates wait for the step and are waited for."""
    timing, which = (INSIDE, spared) if is_ahead else (AFTER, "none")
    return timing_bodies.new_training(how, site, device, timing, spared=which, **options)


def backward(training: Training, how: How, number: int) -> None:
    module, optimizer = training
    optimizer.backward(ZOO[how.name].loss(module, number * 3))


def warm_up(training: Training, how: How) -> None:
    """States come with the first step. Nothing of it is under way any more."""
    for number in range(2):
        backward(training, how, number + 50)
        training[1].step()
    training[1].rest()


def num_with_spares(module: ElixirModule) -> int:
    return sum(c.has_spare_states for c in module.engine.plan.chunks)


def check_every_way(
    how: How, site: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, spared: str = "all"
) -> None:
    expected = streamed_bodies.train_on_host(how, device)
    with slow_updates(monkeypatch, 0.001):
        actual = timing_bodies.train(how, site, INSIDE, device, spared=spared)
    assert_same(actual, expected)
    assert str(actual.norms) == str(expected.norms)


Action = Callable[[Training], Any]


@dataclass
class Seen:
    """What a run has shown."""

    values: list[Any] = field(default_factory=list)
    num_ahead: list[int] = field(default_factory=list)
    redone: list[int] = field(default_factory=list)
    result: Result | None = None


def run_script(training: Training, how: How, between: list[Action | None]) -> Seen:
    """One step for each action, which comes between its backward and its step."""
    module, optimizer = training
    seen = Seen()
    for number, action in enumerate(between):
        backward(training, how, number)
        if action is not None:
            value = action(training)
            seen.values.append(copy.deepcopy(value))
        seen.num_ahead.append(optimizer.num_ahead)
        optimizer.step()
        assert optimizer.num_ahead == 0
        seen.values.append(optimizer.is_step_skipped)
        seen.redone.append(module.stats().redone_steps)
    seen.result = replace(result_of(module, optimizer), numel=(0, 0, 0))
    module.close()
    return seen


def assert_same_value(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def check_between(
    how: How,
    between: list[Action | None],
    monkeypatch: pytest.MonkeyPatch,
    site: str = "mixed",
    device: torch.device = CPU,
    spared: str = "all",
) -> Seen:
    """The same with and without speculation; returns what was seen with it."""
    use_small_slots(monkeypatch)
    trainings = [new_training(how, site, device, is_ahead=is_ahead, spared=spared) for is_ahead in (False, True)]
    for training in trainings:
        warm_up(training, how)
        training[0].reset_stats()
    expected = run_script(trainings[0], how, between)
    with slow_updates(monkeypatch):
        actual = run_script(trainings[1], how, between)
    assert len(actual.values) == len(expected.values)
    for a, b in zip(actual.values, expected.values, strict=True):
        assert_same_value(a, b)
    assert actual.result is not None
    assert expected.result is not None
    assert_same(actual.result, expected.result)
    return actual


def set_lr(factor: float, group: int = 0) -> Action:
    def action(training: Training) -> None:
        training[1].param_groups[group]["lr"] *= factor

    return action


def clip(max_norm: float) -> Action:
    return lambda training: float(training[1].clip_grad_norm_(max_norm))


def clamp(value: float) -> Action:
    return lambda training: training[1].clip_grad_value_(value)


def look_at_gradients(training: Training) -> Any:
    return float(training[1].grad_norm()), training[0].full_grads()


def look_at_parameters(training: Training) -> Any:
    return [p.detach().float().sum().item() for p in training[0].module.parameters()]


def evaluate(training: Training) -> float:
    with torch.no_grad():
        return float(ZOO["gpt2"].loss(training[0], 8))


def a_parameter(training: Training) -> nn.Parameter:
    """One of those whose states are on the host at every site."""
    return training[0].engine.chunks[1].parameters[0]


def write_a_parameter(training: Training) -> None:
    with torch.no_grad():
        a_parameter(training).mul_(0.5)


def copy_in_a_parameter(training: Training) -> None:
    """Which changes nothing but low bits of the master."""
    with torch.no_grad():
        parameter = a_parameter(training)
        parameter.copy_(parameter.float() * (1 + 2.0**-14))


def forget_a_gradient(training: Training) -> None:
    a_parameter(training).grad = None


def accumulate(training: Training) -> None:
    backward(training, HOWS["bf16"], 31)


def begin_again(training: Training) -> None:
    training[1].zero_grad()
    accumulate(training)


def zero_grad(training: Training) -> None:
    training[1].zero_grad()


def save(training: Training) -> Any:
    return training[0].full_state_dict(), training[1].state_dict()["state"]


def load(training: Training) -> None:
    module, optimizer = training
    values, state = module.full_state_dict(), copy.deepcopy(optimizer.state_dict())
    module.load_state_dict({k: v * 1.5 for k, v in values.items()})
    for entry in state["state"].values():
        entry["exp_avg"] *= 0.5
        entry["step"] += 3
    optimizer.load_state_dict(state)


def fail_in_backward(training: Training) -> None:
    """After which the user trains on."""
    module, optimizer = training

    def interrupt(grad: Tensor) -> Tensor:
        raise KeyboardInterrupt

    optimizer.zero_grad()
    handle = module.engine.chunks[0].parameters[0].register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        accumulate(training)
    handle.remove()
    assert optimizer.num_ahead == 0
    accumulate(training)


def fail_between(training: Training) -> None:
    """After which the user trains on with another batch."""
    with pytest.raises(KeyboardInterrupt), training[1].unobserved():
        raise KeyboardInterrupt
    begin_again(training)


ACTIONS: dict[str, tuple[Action, str]] = {
    # and what becomes of what has begun: all kept, some or none
    "look_at_gradients": (look_at_gradients, "all"),
    "look_at_parameters": (look_at_parameters, "all"),
    "evaluate": (evaluate, "all"),
    "clip_high": (clip(1e6), "all"),
    "clip_low": (clip(1e-3), "none"),
    "clamp": (clamp(1e-4), "none"),
    "lr": (set_lr(0.5), "none"),
    "write_a_parameter": (write_a_parameter, "some"),
    "copy_in_a_parameter": (copy_in_a_parameter, "some"),
    "forget_a_gradient": (forget_a_gradient, "some"),
    "accumulate": (accumulate, "none"),
    "begin_again": (begin_again, "all"),
    "zero_grad": (zero_grad, "none"),
    "save": (save, "none"),
    "load": (load, "none"),
    "fail_in_backward": (fail_in_backward, "all"),
    "fail_between": (fail_between, "all"),
}


def check_action(
    name: str, how: How, site: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, spared: str = "all"
) -> None:
    action, kept = ACTIONS[name]
    commits: list[int] = []
    take_up = UpdateDescriber.take_up_spares

    def counted(self: UpdateDescriber, chunk: Any) -> None:
        commits.append(chunk.id)
        take_up(self, chunk)

    counts: list[int] = []

    def noted(training: Training) -> Any:
        value = action(training)
        commits.clear()
        return value

    def after(training: Training) -> None:  # of the step before
        counts.append(len(commits))

    with monkeypatch.context() as patch:
        patch.setattr(UpdateDescriber, "take_up_spares", counted)
        seen = check_between(how, [noted, after, None, noted, after], monkeypatch, site, device, spared)
    num_chunks = seen.num_ahead[2]
    assert num_chunks > 0
    with_speculation = counts[2:]
    assert counts[:2] == [0, 0]
    for count in with_speculation:
        assert {"all": count == num_chunks, "some": 0 < count < num_chunks, "none": count == 0}[kept]
    is_dropped = kept != "all" or name in ("begin_again", "fail_in_backward", "fail_between")
    assert seen.redone == [1, 1, 1, 2, 2] if is_dropped else [0, 0, 0, 0, 0]


def check_same_training(trainings: list[Training]) -> None:
    first, second = [replace(result_of(*training), numel=(0, 0, 0)) for training in trainings]
    assert_same(second, first)
    for module, _ in trainings:
        module.close()


def train_with_sums(
    how: How, micro_batches: list[int], device: torch.device, *, is_ahead: bool, is_known: bool
) -> tuple[Training, list[int]]:
    module, optimizer = new_training(how, "mixed", device, is_ahead=is_ahead)
    module.engine.reducer.landing.expect_accumulation(is_known)
    num_ahead = []
    for step, count in enumerate(micro_batches):
        for micro in range(count):
            backward((module, optimizer), how, step * 4 + micro)
        num_ahead.append(optimizer.num_ahead)
        optimizer.step()
    return (module, optimizer), num_ahead


def check_sums(how: How, is_known: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    micro_batches = [1, 1, 3, 1, 1, 2, 1]
    expected, _ = train_with_sums(how, micro_batches, device, is_ahead=False, is_known=False)
    with slow_updates(monkeypatch), slow_additions() as slow:
        actual, num_ahead = train_with_sums(how, micro_batches, device, is_ahead=True, is_known=is_known)
        actual[1].synchronize()
    assert slow.num_done > 0
    num_chunks = num_with_spares(actual[0])
    # Said: nobody knows which backward is the last. Seen: it is tried, on sums in fp32 after the third step.
    assert num_ahead == ([0] * 7 if is_known else [0, num_chunks, 0, num_chunks, num_chunks, 0, num_chunks])
    assert actual[0].stats().redone_steps == (0 if is_known else 2)
    check_same_training([expected, actual])
