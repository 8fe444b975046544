"""The look at settled training: what the host's updates take is held against what was foreseen."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elixir._lightning import pl
from lightning_elixir.optim.execution import UpdateRecord, UpdateTimes
from lightning_elixir.optimizer import ElixirOptimizer
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.profile import StepInterval, StepProfile
from lightning_elixir.plan.types import AccessTrace, Plan
from lightning_elixir.plan.units import format_seconds
from lightning_elixir.profiling import measured_hardware
from lightning_elixir.profiling.measured_hardware import HardwareProbe
from lightning_elixir.strategy import ElixirStrategy, warm_up
from lightning_elixir.strategy.steady_look import SteadyLook
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import full, telling
from tests.strategy.fabric_runs import Loop, make_fabric, run_steps, set_up, train
from tests.strategy.models import CHUNK, Net, fit, make_data
from tests.strategy.nets import ManualNet

_TIMES = UpdateTimes(update_s=1.0, host_update_s=1.0, gpu_numel=0, streamed_numel=0, cpu_numel=100)


def _look(seen: list[UpdateTimes | None]) -> tuple[SteadyLook, list[bool]]:
    """A look at as many steps, and what each of them is told to be."""
    times: Iterator[UpdateTimes | None] = iter([None, *seen])
    look = SteadyLook(lambda: next(times))
    return look, [look.after_step(None, None) for _ in seen]


def test_a_usual_step_counts() -> None:
    """Of five steps; the one that is over later is seen twice, and one had another optimizer's part alone."""
    seen = [replace(_TIMES, host_update_s=seconds) for seconds in (9.0, 2.0, 3.0)]
    look, ends = _look([*seen, seen[-1], replace(_TIMES, host_update_s=0.5, cpu_numel=10)])
    assert ends == [False] * 4 + [True]
    assert look.host_update_s(100) == 3.0
    assert look.host_update_s(120) is None  # there is another optimizer, whose part was not seen


@pytest.mark.parametrize("seen", [None, replace(_TIMES, cpu_numel=0)])
def test_nothing_to_go_by(seen: UpdateTimes | None) -> None:
    assert _look([seen] * 5)[0].host_update_s(100) is None


def test_the_median_step_is_the_usual_one() -> None:
    look = SteadyLook(lambda: None)
    assert look.profile is None
    profiles = [StepProfile(AccessTrace(()), (StepInterval(seconds, 0),)) for seconds in (5.0, 1.0, 2.0, 9.0)]
    for profile in (*profiles, None):
        look.after_step(profile, None)
    assert look.profile is profiles[0]


def test_the_median_pause_is_the_usual_one() -> None:
    look = SteadyLook(lambda: None)
    for between_s in (None, 5.0, 1.0, 2.0, None):
        look.after_step(None, between_s)
    assert look.between_s == 2.0
    look = SteadyLook(lambda: None)
    for rare_s in (None, 5.0, None, 1.0, None):
        look.after_step(None, rare_s)
    assert look.between_s is None


def test_two_threads_at_once_count_once() -> None:
    record, early = UpdateRecord(), UpdateRecord()
    early.note_adam(1.0, 2.0)
    for begin_s, end_s in ((4.0, 7.0), (5.0, 6.0), (6.5, 8.0), (10.0, 11.0)):
        record.note_adam(begin_s, end_s)
    record.adopt(early)
    times = record.times()
    assert times is not None
    assert times.host_update_s == pytest.approx(1 + 4 + 1)


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
        return replace(_TIMES, update_s=float(next(number)), host_update_s=callback.factor * foreseen, cpu_numel=10**9)

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
    assert after.hardware == known.name
    assert not re.search(r"\d (us|ms|s)\b", after.binding)
    assert after.weighed_s is not None  # what lost was weighed before that
    when = f"by the times known then, when this plan was to take {format_seconds(after.weighed_s)}:"
    assert f"looked at as well, {when}" in callback.plans[-1].explain()
    expected = fit("auto", Net, train=lambda: make_data(96))[2].losses
    assert all(map(torch.equal, losses, expected))


class Pausing(Slow):
    """The program does something in each step between backward and the next forward."""

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(0.03)


@pytest.mark.parametrize(("clip", "is_measured"), [(1e6, True), full(None, True), full(1e6, False)])
def test_what_the_program_takes_between_steps_is_expected_where_it_waits_for_gradients(
    monkeypatch: pytest.MonkeyPatch, clip: float | None, is_measured: bool
) -> None:
    callback = Pausing(1.0, is_measured=is_measured)
    _fit(callback, monkeypatch, gradient_clip_val=clip)
    before, after = callback.plans[4].forecast, callback.plans[-1].forecast
    assert before is not None
    assert after is not None
    more_s = after.times.step_s - before.times.step_s
    if clip is None or not is_measured:
        assert more_s < 0.01
    else:
        assert more_s > 0.025
        assert after.times.total_s > 0.025
        assert len({plan.fingerprint() for plan in callback.plans[3:]}) == 1


@pytest.mark.parametrize(("factor", "is_measured"), [(1.01, True), full(1000.0, False)])
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


@pytest.mark.full
def test_the_slowest_rank_counts_on_all() -> None:
    (_, rate, plans), (_, other_rate, other_plans) = run_ranks(_rank, 2, init_group=False)
    assert (rate, plans) == (other_rate, other_plans)
    assert rate < HardwareSpec.nominal().cpu_adam_numel_per_s / 100


@pytest.mark.full
def test_under_manual_optimization_predictions_follow() -> None:
    """Some steps after the plan has become final; then steps are not timed any more."""
    timed: list[bool] = []
    plans: list[Plan] = []

    class Reader(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            timed.append(trainer.strategy._fit_run.warm_up._is_timed)
            plans.append(trainer.strategy.plan)

    fit(ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK), ManualNet, callbacks=[Reader()], train=lambda: make_data(96))
    first = timed.index(True)
    last = len(timed) - 1 - timed[::-1].index(True)
    assert first < last < len(timed) - 1
    assert len({plan.fingerprint() for plan in plans[last:]}) == 1
    forecasts = [plan.forecast for plan in plans]
    assert forecasts[last] is not None
    assert forecasts[last] != forecasts[last + 1] == forecasts[-1]


def _fabric_steps(devices: int = 1) -> tuple[list[bool], list[Plan], list[float]]:
    """Whether each step was timed, and the plan in force after it."""
    loop = Loop(devices=devices, steps=14)
    fabric = make_fabric({"gpu_memory_limit": "96KiB", **CHUNK}, loop)
    model, optimizer = set_up(fabric, loop)
    timed: list[bool] = []
    plans: list[Plan] = []

    def look(step: int) -> None:
        if step:
            timed.append(fabric.strategy._engine.engine.iterations.sampler.is_on)
            plans.append(fabric.strategy.plan)

    run = run_steps(fabric, model, optimizer, loop, look)
    fabric.strategy.close()
    return timed, plans, run.losses


def _assert_followed(timed: list[bool], plans: list[Plan]) -> None:
    last = len(timed) - 1 - timed[::-1].index(True)
    assert last < len(timed) - 1
    assert len({plan.fingerprint() for plan in plans[last:]}) == 1
    before, after = plans[last].forecast, plans[-1].forecast
    assert before is not None
    assert before != plans[last + 1].forecast == after


def test_under_fabric_predictions_follow() -> None:
    timed, plans, losses = _fabric_steps()
    _assert_followed(timed, plans)
    assert losses == train({"placement_policy": "cuda"}, Loop(steps=14)).losses


def _fabric_rank() -> Any:
    timed, plans, _ = _fabric_steps(2)
    assert plans[-1].world_size == 2
    _assert_followed(timed, plans)
    return [(plan.fingerprint(), plan.forecast) for plan in plans]


@pytest.mark.full
def test_ranks_under_fabric_expect_the_same() -> None:
    first, second = run_ranks(_fabric_rank, 2, init_group=False)
    assert first == second


@pytest.mark.full
def test_a_short_fit_leaves_no_step_timed() -> None:
    class Reader(pl.Callback):
        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(trainer.strategy._engine.engine.iterations.sampler.is_on)

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            was_timed.append(trainer.strategy._fit_run.warm_up._is_timed)

    seen: list[bool] = []
    was_timed: list[bool] = []
    strategy = ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK)
    fit(strategy, ManualNet, callbacks=[Reader()], train=lambda: make_data(24))
    assert was_timed[-1]
    assert seen == [False]


@pytest.mark.full
def test_garbage_is_collected_before_training_has_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: searches leave so much that it would come in one of the next steps."""
    monkeypatch.setattr(warm_up, "_UNHURRIED", ())
    stages: list[warm_up.Stage] = []
    strategy = ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK)

    def collect() -> int:
        if strategy._fit_run is not None:
            stages.append(strategy._fit_run.warm_up.stage)
        return 0

    monkeypatch.setattr(gc, "collect", collect)
    fit(strategy, Net, train=lambda: make_data(64))
    assert stages[-1] is warm_up.Stage.DONE
    assert stages.count(warm_up.Stage.DONE) == 1


@pytest.mark.parametrize("is_kept", telling([True, False], "True"))
def test_a_fit_on_the_cpu_goes_by_kept_figures(is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And measures nothing. They are the machine's own, so training corrects them."""
    monkeypatch.setattr(measured_hardware, "default_cache_dir", lambda: tmp_path)
    monkeypatch.setattr(HardwareProbe, "_measured", lambda *args: pytest.fail("measured in a fit on the CPU"))
    kept = replace(HardwareSpec.nominal(), name="kept", cpu_adam_numel_per_s=2e9)
    cpu = HardwareProbe(device=torch.device("cpu"))
    if is_kept:
        with cpu._bench() as (device, ranks):
            assert cpu._facts_and_cache(device, ranks)[2].store(kept)
    strategy = ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK)
    fit(strategy, Net, train=lambda: make_data(8))
    figures = strategy._machine_figures
    assert figures is not None
    assert (figures.is_measured, figures.is_nominal) == (is_kept, not is_kept)
    assert _figures(strategy).cpu_adam_numel_per_s == (2e9 if is_kept else HardwareSpec.nominal().cpu_adam_numel_per_s)
    assert strategy.plan.forecast is not None
    assert strategy.plan.forecast.hardware == ("kept" if is_kept else HardwareSpec.nominal().name)
