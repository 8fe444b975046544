"""The look at settled training: what the host's updates take is held against what was foreseen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_elixir._lightning import pl
from lightning_elixir.optim.execution import UpdateRecord, UpdateTimes
from lightning_elixir.optimizer import ElixirOptimizer
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.profile import StepInterval, StepProfile
from lightning_elixir.plan.types import AccessTrace, Plan
from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.strategy.steady_look import SteadyLook
from tests.helpers.dist import run_ranks
from tests.strategy.models import CHUNK, Net, fit, make_data
from tests.strategy.nets import ManualNet

_TIMES = UpdateTimes(update_s=1.0, adam_s=1.0, gpu_numel=0, streamed_numel=0, cpu_numel=100)


def _look(seen: list[UpdateTimes | None]) -> tuple[SteadyLook, list[bool]]:
    """A look at as many steps, and what each of them is told to be."""
    times: Iterator[UpdateTimes | None] = iter([None, *seen])
    look = SteadyLook(lambda: next(times))
    return look, [look.after_step(None) for _ in seen]


def test_a_usual_step_counts() -> None:
    """Of five steps; the one that is over later is seen twice, and one had another optimizer's part alone."""
    seen = [replace(_TIMES, adam_s=seconds) for seconds in (9.0, 2.0, 3.0)]
    look, ends = _look([*seen, seen[-1], replace(_TIMES, adam_s=0.5, cpu_numel=10)])
    assert ends == [False] * 4 + [True]
    assert look.host_update_s == 3.0


@pytest.mark.parametrize("seen", [None, replace(_TIMES, cpu_numel=0)])
def test_nothing_to_go_by(seen: UpdateTimes | None) -> None:
    assert _look([seen] * 5)[0].host_update_s is None


def test_the_median_step_is_the_usual_one() -> None:
    look = SteadyLook(lambda: None)
    assert look.profile is None
    profiles = [StepProfile(AccessTrace(()), (StepInterval(seconds, 0),)) for seconds in (5.0, 1.0, 2.0, 9.0)]
    for profile in (*profiles, None):
        look.after_step(profile)
    assert look.profile is profiles[0]


def test_two_threads_at_once_count_once() -> None:
    record, early = UpdateRecord(), UpdateRecord()
    early.note_adam(1.0, 2.0)
    for begin_s, end_s in ((4.0, 7.0), (5.0, 6.0), (6.5, 8.0), (10.0, 11.0)):
        record.note_adam(begin_s, end_s)
    record.adopt(early)
    times = record.times()
    assert times is not None
    assert times.adam_s == pytest.approx(1 + 4 + 1)


class Slow(pl.Callback):
    """Has all updates of the host take so many times as long as foreseen."""

    def __init__(self, factor: float, *, is_measured: bool = True) -> None:
        self.factor = factor
        self.is_measured = is_measured
        self.plans: list[Plan] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy._machine_figures.is_measured = self.is_measured

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.plans.append(trainer.strategy.plan)
        run = trainer.strategy._fit_run
        profile = run.warm_up.profile
        if profile is not None and batch_idx < 5:
            run.foreseen = run._planner.simulated(trainer.strategy.plan, profile, run._regime()).host_update_s


def _fit(callback: Slow, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[ElixirStrategy, list[torch.Tensor]]:
    strategy = ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK)
    number = iter(range(1000))

    def last_step_times(optimizer: ElixirOptimizer) -> UpdateTimes:
        foreseen = getattr(strategy._fit_run, "foreseen", 0.0)
        return replace(_TIMES, update_s=float(next(number)), adam_s=callback.factor * foreseen)

    monkeypatch.setattr(ElixirOptimizer, "last_step_times", property(last_step_times))
    _, _, run = fit(strategy, Net, callbacks=[callback], train=lambda: make_data(96), **options)
    return strategy, run.losses


def _figures(strategy: ElixirStrategy) -> HardwareSpec:
    figures = strategy._machine_figures
    assert figures is not None
    assert figures.known is not None
    return figures.known


def test_a_slow_host_corrects_figures_and_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    nominal = HardwareSpec.nominal()
    callback = Slow(1000.0)
    strategy, losses = _fit(callback, monkeypatch)
    known = _figures(strategy)
    assert known.cpu_adam_numel_per_s < nominal.cpu_adam_numel_per_s / 100
    assert known.joint_adam_numel_per_s == nominal.joint_adam_numel_per_s
    assert known.name.endswith("as seen in training")
    before, after = callback.plans[4].forecast, callback.plans[-1].forecast
    assert before is not None
    assert after is not None
    assert after.times.adam_s > 100 * before.times.adam_s
    expected = fit("auto", Net, train=lambda: make_data(96))[2].losses
    assert all(map(torch.equal, losses, expected))


@pytest.mark.parametrize(("factor", "is_measured"), [(1.01, True), (1000.0, False)])
def test_figures_stay_where_they_are_right_or_the_users(
    monkeypatch: pytest.MonkeyPatch, factor: float, is_measured: bool
) -> None:
    callback = Slow(factor, is_measured=is_measured)
    strategy, _ = _fit(callback, monkeypatch)
    assert _figures(strategy).cpu_adam_numel_per_s == HardwareSpec.nominal().cpu_adam_numel_per_s
    assert len({plan.fingerprint() for plan in callback.plans[3:]}) == 1


def _rank() -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        callback = Slow(1.0)
        callback.on_train_start = lambda trainer, module: _differ(callback, trainer)  # type: ignore[method-assign]
        strategy, losses = _fit(callback, monkeypatch, devices=2)
        fingerprints = [plan.fingerprint() for plan in callback.plans]
        return [x.item() for x in losses], _figures(strategy).cpu_adam_numel_per_s, fingerprints


def _differ(callback: Slow, trainer: Any) -> None:
    """Rank 1 is slow."""
    trainer.strategy._machine_figures.is_measured = True
    callback.factor = 1000.0 if trainer.global_rank else 1.0


def test_the_slowest_rank_counts_on_all() -> None:
    (_, rate, plans), (_, other_rate, other_plans) = run_ranks(_rank, 2, init_group=False)
    assert (rate, plans) == (other_rate, other_plans)
    assert rate < HardwareSpec.nominal().cpu_adam_numel_per_s / 100


def test_under_manual_optimization_steps_are_not_timed_for_ever() -> None:
    timed: list[bool] = []

    class Reader(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            timed.append(trainer.strategy._fit_run.warm_up._is_timed)

    fit(ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK), ManualNet, callbacks=[Reader()], train=lambda: make_data(64))
    assert any(timed)
    assert not timed[-1]
