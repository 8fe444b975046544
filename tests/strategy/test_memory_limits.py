"""`strategy.set_memory_limit` from callbacks: losses bit for bit as if nothing had happened."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_elixir._lightning import pl
from lightning_elixir.errors import CapacityError, StateError
from lightning_elixir.plan.types import Plan
from lightning_elixir.strategy import ElixirStrategy, shared_plans
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import telling
from tests.strategy.models import CHUNK, Net, assert_same_as_plain, fit, make_data

SMALL = 60 * 1024
"""Bytes of the device that this net needs more than twice of to be there as a whole."""


class Limits(pl.Callback):
    """Gives memory back, and takes it again.

    Args:
        by_batch: (batch index) -> arguments of `set_memory_limit`, at the end of that batch.
        in_validation: Whether validation has less, too.
    """

    def __init__(self, by_batch: dict[int, dict[str, Any]], in_validation: bool = False) -> None:
        self.by_batch = by_batch
        self.in_validation = in_validation
        self.held: list[tuple[int, int]] = []  # before and after
        self.kept: list[int] = []  # after
        self.refused = 0

    def _set(self, trainer: Any, **limits: Any) -> None:
        strategy = trainer.strategy
        if not hasattr(strategy, "set_memory_limit"):
            return  # the plain Trainer, to compare with
        engine = strategy._engine.engine
        before = engine.device_bytes()
        plan = strategy.plan
        try:
            strategy.set_memory_limit(**limits)
        except (CapacityError, StateError):
            self.refused += 1
            assert strategy.plan is plan
        self.held.append((before, engine.device_bytes()))
        self.kept.append(engine.held_bytes().get("cpu_ahead", 0))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.by_batch:
            self._set(trainer, **self.by_batch[batch_idx])

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if self.in_validation and not trainer.sanity_checking:
            self._set(trainer, gpu=SMALL)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self.in_validation and not trainer.sanity_checking:
            self._set(trainer, keep_host_memory=True)


RUNS: dict[str, tuple[dict[int, dict[str, Any]], dict[str, Any]]] = {
    "given back and taken again": ({1: {"gpu": SMALL}, 3: {}}, {}),
    "before the plan is final": ({0: {"gpu": SMALL}, 4: {"gpu": "100KiB"}}, {"gpu_memory_limit": "200KiB"}),
    "a given policy": ({1: {"gpu": SMALL}, 3: {}}, {"placement_policy": "cpu"}),
    "between micro-batches of a step": ({1: {"gpu": SMALL}, 3: {}}, {"accumulate": 2}),
}


def train(
    by_batch: dict[int, dict[str, Any]], options: dict[str, Any], in_validation: bool = False, **trainer: Any
) -> Limits:
    callback = Limits(by_batch, in_validation)
    options = dict(options)
    trainer["accumulate_grad_batches"] = options.pop("accumulate", 1)
    trainer["val"] = (lambda: make_data(8, seed=2)) if in_validation else None
    assert_same_as_plain(Net, elixir={**CHUNK, **options}, callbacks=lambda: [callback], **trainer)
    return callback


@pytest.mark.parametrize("name", telling(RUNS, "before the plan is final"))
def test_losses_are_as_if_nothing_had_happened(name: str) -> None:
    by_batch, options = RUNS[name]
    callback = train(by_batch, options)
    assert not callback.refused
    assert callback.held[0][1] <= SMALL
    if "placement_policy" not in options:
        assert callback.held[0][0] > SMALL


def test_limits_that_come_again_need_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Plan] = []
    limited = shared_plans.with_or_without_activations

    def counted(*args: Any) -> Plan:
        made.append(limited(*args))
        return made[-1]

    monkeypatch.setattr(shared_plans, "with_or_without_activations", counted)
    again = {1: {"gpu": SMALL}, 2: {}, 3: {"gpu": SMALL}, 4: {}, 5: {"gpu": SMALL}}
    callback = train(again, {})
    assert [after <= SMALL for _, after in callback.held] == [batch % 2 == 1 for batch in again]
    assert len(made) == 2


def test_gradients_that_wait_are_not_moved() -> None:
    assert train({2: {"gpu": SMALL}}, {"accumulate": 2}).refused


def test_validation_in_less_memory() -> None:
    callback = train({}, {}, in_validation=True, val_check_interval=2)
    assert len(callback.held) >= 4
    assert all(after <= SMALL for _, after in callback.held[::2])
    assert not any(callback.kept[::2])
    assert all(callback.kept[1::2])


def test_a_limit_that_cannot_be_met() -> None:
    assert train({1: {"gpu": 1000}}, {}).refused


def test_on_two_ranks() -> None:
    run_ranks(on_ranks, 2, init_group=False)


def on_ranks() -> None:
    callback = Limits({1: {"gpu": SMALL + 24 * 1024}, 3: {"keep_host_memory": True}})
    _, _, expected = fit("ddp", Net, devices=2)
    _, _, actual = fit(ElixirStrategy(**CHUNK), Net, devices=2, callbacks=[callback])
    assert [loss.item() for loss in actual.losses] == [loss.item() for loss in expected.losses]
    assert len(callback.held) == 2
    assert not callback.refused
