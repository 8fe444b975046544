"""`set_memory_limit` under Fabric: losses and weights bit for bit as if nothing had happened, and memory given back."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_elixir import CapacityError, PlanError, StateError
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import full
from tests.strategy.fabric_runs import Loop, Run, batch_of, collect, make_fabric, run_steps, set_up, train
from tests.strategy.models import CHUNK, assert_same_state

SMALL = 84 * 1024
"""Bytes of the device that this net needs more than twice of to be there as a whole."""

Limits = dict[int, dict[str, Any]]
"""By the number of the step before which they are set: arguments of `set_memory_limit`."""

RUNS: dict[str, tuple[Limits, dict[str, Any]]] = {
    "given back and taken again": ({3: {"gpu": SMALL}, 5: {"keep_host_memory": True}}, CHUNK),
    "before the plan is final": ({1: {"gpu": SMALL}, 4: {"gpu": "500KiB"}}, {**CHUNK, "gpu_memory_limit": "200KiB"}),
    "a given policy": ({2: {"gpu": SMALL}, 4: {}}, {**CHUNK, "placement_policy": "cpu"}),
}


def held_bytes(fabric: Any) -> int:
    return sum(run.engine.engine.device_bytes() for run in fabric.strategy._runs)


def train_within(strategy: dict[str, Any], limits: Limits, loop: Loop) -> tuple[Run, list[tuple[int, int]]]:
    """A run in which limits change, and what the device has held before and after each change."""
    fabric = make_fabric(strategy, loop)
    model, optimizer = set_up(fabric, loop)
    held: list[tuple[int, int]] = []

    def change(step: int) -> None:
        if step in limits:
            before = held_bytes(fabric)
            fabric.strategy.set_memory_limit(**limits[step])
            held.append((before, held_bytes(fabric)))

    run = collect(fabric, model, optimizer, run_steps(fabric, model, optimizer, loop, change))
    held.append((held_bytes(fabric), 0))
    fabric.strategy.close()
    return run, held


def check(actual: Run, held: list[tuple[int, int]], expected: Run, *, is_searched: bool) -> None:
    assert actual.losses == expected.losses
    assert_same_state(actual.state, expected.state)
    (before, after), _, (at_end, _) = held
    assert after <= SMALL
    assert not is_searched or before > SMALL
    assert not is_searched or at_end > SMALL  # taken again


@pytest.mark.parametrize("name", ["given back and taken again", "before the plan is final", full("a given policy")])
def test_losses_are_as_if_nothing_had_happened(name: str) -> None:
    limits, options = RUNS[name]
    loop = Loop(steps=8, micro_batches=2 if "policy" in name else 1)
    check(*train_within(options, limits, loop), train("auto", loop), is_searched=name == "given back and taken again")


@pytest.mark.full
def test_on_two_ranks() -> None:
    loop = Loop(steps=7, devices=2)
    limits, options = RUNS["given back and taken again"]
    expected = run_ranks(train, 2, "ddp", loop, init_group=False)
    actual = run_ranks(train_within, 2, options, limits, loop, init_group=False)
    for (run, held), other in zip(actual, expected, strict=True):
        check(run, held, other, is_searched=True)


def test_modules_share_a_limit_also_those_that_come_later() -> None:
    fabric = make_fabric(CHUNK)
    first, optimizer = set_up(fabric, Loop())
    second, other = set_up(fabric, Loop())
    for _ in range(2):
        run_steps(fabric, first, optimizer, Loop(steps=2))
        run_steps(fabric, second, other, Loop(steps=2))
        assert (held_bytes(fabric) > 3 * SMALL) is (fabric.strategy._limits.gpu_bytes is None)
        fabric.strategy.set_memory_limit(gpu=2 * SMALL)
        assert held_bytes(fabric) <= 2 * SMALL
    fabric.strategy.set_memory_limit(gpu=3 * SMALL)
    third, another = set_up(fabric, Loop())
    assert held_bytes(fabric) <= 3 * SMALL
    run_steps(fabric, third, another, Loop(steps=4))
    run_steps(fabric, first, optimizer, Loop(steps=4))
    assert [run.handle.budget.gpu_bytes for run in fabric.strategy._runs] == [SMALL] * 3
    assert held_bytes(fabric) <= 3 * SMALL
    fabric.strategy.close()


def test_refusals_leave_everything_as_it_was() -> None:
    fabric = make_fabric(CHUNK)
    with pytest.raises(StateError, match="no module was set up"):
        fabric.strategy.set_memory_limit(gpu=SMALL)
    model, optimizer = set_up(fabric, Loop())
    run_steps(fabric, model, optimizer, Loop(steps=2))
    plan, held = fabric.strategy.plan, held_bytes(fabric)
    with pytest.raises(CapacityError):
        fabric.strategy.set_memory_limit(gpu=1000)
    with pytest.raises(PlanError, match="a size must be"):
        fabric.strategy.set_memory_limit(gpu="16 bananas")
    with pytest.raises(PlanError, match="call its set_memory_limit"):
        fabric.strategy.engine_of(model).set_memory_limit(gpu=SMALL)
    fabric.backward(nn.functional.cross_entropy(model(batch_of(0)[0]), batch_of(0)[1]))
    with pytest.raises(StateError, match="memory limits cannot change while gradients wait"):
        fabric.strategy.set_memory_limit(gpu=SMALL)
    assert fabric.strategy.plan.fingerprint() == plan.fingerprint()
    optimizer.zero_grad()
    assert abs(held_bytes(fabric) - held) < SMALL
    fabric.strategy.set_memory_limit(gpu=SMALL)
    assert held_bytes(fabric) <= SMALL
    fabric.strategy.close()
