"""`report_dir`: what the plan promised and what the run made of it, written at the end of fit, also after an error."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_elixir._lightning import pl
from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.optim.execution import UpdateTimes
from lightning_elixir.plan.hardware import BandwidthCurve, HardwareSpec, save_hardware
from lightning_elixir.plan.io import load_plan
from lightning_elixir.plan.profile import StepProfile
from lightning_elixir.plan.types import Forecast
from lightning_elixir.report.markup import format_seconds
from lightning_elixir.strategy import ElixirStrategy, shared_plans
from lightning_elixir.strategy.callbacks import ElixirStatsMonitor
from tests.helpers.dist import RankError, run_ranks
from tests.helpers.tiers import crossed, telling
from tests.strategy.models import CHUNK, TIGHT, Net, fit, make_data, make_trainer
from tests.strategy.nets import MemoryLogger, TightNet
from tests.strategy.slow_steps import SLOW_S, SlowNet, assert_all_micro_batches_are_measured

AUTO: dict[str, Any] = {**CHUNK, "gpu_memory_limit": "96KiB"}
FILES = ["plan.json", "report.html", "report.json"]


def _read(folder: Path) -> dict[str, Any]:
    assert sorted(path.name for path in folder.iterdir()) == FILES
    page = (folder / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def test_what_was_predicted_and_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared_plans, "LEAST_GAIN", 1.0)  # no move, whatever this machine takes for a step
    strategy = ElixirStrategy(**AUTO, report_dir=str(tmp_path / "a" / "b"))
    profiles: list[StepProfile] = []
    host_update_s: list[float] = []
    foreseen: list[float] = []

    class Looking(pl.Callback):
        def on_after_backward(self, *args: Any) -> None:
            assert strategy.plan.forecast is not None
            foreseen.append(strategy.plan.forecast.times.total_s)

        def on_train_end(self, *args: Any) -> None:
            assert strategy._fit_run is not None
            warm_up = strategy._fit_run.warm_up
            timeline = warm_up.timeline(strategy.plan, is_waiting=False)
            assert warm_up.profile is not None
            assert timeline is not None
            profiles.append(warm_up.profile)
            host_update_s.append(timeline.host_update_s)

    _, _, run = fit(strategy, max_epochs=2, callbacks=[Looking()])
    report = _read(tmp_path / "a" / "b")
    assert report["title"] == "Net"
    assert report["facts"]["steps"] == "16"
    assert report["facts"]["samples in a step"] == "4"
    assert load_plan(tmp_path / "a" / "b" / "plan.json").fingerprint() == strategy.plan.fingerprint()
    assert report["plan"]["fingerprint"] == strategy.plan.fingerprint()
    predicted, measured = report["predicted"], report["measured"]
    # Brought up to date five steps after the plan had become final; the first one was made before any step.
    assert (predicted["after_steps"], predicted["foreseen_after_steps"]) == (7, 0)
    assert foreseen[0] == predicted["foreseen_s"] != predicted["step_s"] == foreseen[-1]
    assert predicted["times"]["host_update_s"] == host_update_s[0] > 0
    page = (tmp_path / "a" / "b" / "report.html").read_text()
    assert "Brought up to date after 7 steps, by what they were seen to take" in page
    assert f"foreseen before the first step: {format_seconds(foreseen[0])}" in page
    assert "Device memory over one step" in page
    assert "GPU memory" not in page
    assert "after 7 steps" in strategy.plan.explain()
    assert predicted["hardware"] == HardwareSpec.nominal().name
    assert predicted["gpu_limit_bytes"] == 96 * 2**10
    assert predicted["times"]["total_s"] == predicted["step_s"] > 0
    assert predicted["times"]["compute_s"] == profiles[0].compute_s > 0  # as measured last
    assert measured["step_s"] > 0
    assert 12 <= measured["num_steps"] <= 14  # of 16: not those of the warm-up
    assert measured["times"]["compute_s"] > 0
    assert measured["times"]["update_s"] > 0
    assert measured["times"]["host_update_s"] > 0
    assert measured["times"]["waiting_s"] >= 0
    # Chunks are padded alike, so these are the same to the byte.
    assert measured["bytes"]["cpu_param"] == predicted["bytes"]["host_param_bytes"]
    assert measured["bytes"]["cpu_grad"] == predicted["bytes"]["host_grad_bytes"]
    assert measured["counters"]["evictions"] > 0
    # Measuring changes nothing.
    assert [x.item() for x in run.losses] == [x.item() for x in fit(ElixirStrategy(**AUTO), max_epochs=2)[2].losses]


@pytest.mark.full
@pytest.mark.parametrize("options", [TIGHT, {**CHUNK}, {**CHUNK, "placement_policy": "cuda"}], ids=str)
def test_every_policy_has_a_timeline(tmp_path: Path, options: dict[str, Any]) -> None:
    fit(ElixirStrategy(**options, report_dir=str(tmp_path / "r")))
    report = _read(tmp_path / "r")
    assert report["predicted"]["times"]["compute_s"] > 0
    assert report["measured"]["num_steps"] > 3
    page = (tmp_path / "r" / "report.html").read_text()
    assert 'aria-label="Lanes over one step"' in page
    over = "Predicted when the run was over, by what its steps were seen to take."
    assert (over if "placement_policy" in options else "Brought up to date after 7 steps") in page


@pytest.mark.parametrize("is_measured", telling([False, True], "False"))
def test_a_disk_that_was_not_measured_leaves_the_prediction_out(tmp_path: Path, is_measured: bool) -> None:
    """Of a placement that is not searched, no disk is measured: its speed is known from given figures alone."""
    rates = {"nvme_read_bytes_per_s": 2e9, "nvme_write_bytes_per_s": 1e9} if is_measured else {}
    (tmp_path / "disk").mkdir()
    strategy = ElixirStrategy(
        **TIGHT,
        nvme_offload_fraction=1.0,
        nvme_offload_dir=str(tmp_path / "disk"),
        hardware=replace(HardwareSpec.nominal(host_bytes=2**34), **rates),
        report_dir=str(tmp_path / "r"),
    )
    fit(strategy, lambda: Net("hybrid"))
    report, page = _read(tmp_path / "r"), (tmp_path / "r" / "report.html").read_text()
    assert ("times" in report["predicted"]) is is_measured
    assert ("waits for a disk that was not measured" in page) is not is_measured
    assert report["measured"]["num_steps"] > 3


@pytest.mark.full
def test_accumulation_and_given_plan(tmp_path: Path) -> None:
    first = ElixirStrategy(**AUTO)
    fit(first)
    strategy = ElixirStrategy(plan=first.plan, report_dir=str(tmp_path / "r"))
    fit(strategy, accumulate_grad_batches=2)
    assert strategy.plan.fingerprint() == first.plan.fingerprint()
    report = _read(tmp_path / "r")
    assert report["facts"]["micro-batches in a step"] == "2"
    assert report["facts"]["samples in a step"] == "8"


@pytest.mark.full
def test_of_several_micro_batches_all_are_measured(tmp_path: Path) -> None:
    assert_all_micro_batches_are_measured(tmp_path, TIGHT)


@pytest.mark.full
def test_a_step_that_validation_interrupts_has_no_time(tmp_path: Path) -> None:
    """What is left of it is not the whole step."""
    steps: list[float] = []

    class Looking(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
            meter = trainer.strategy._fit_run._meter  # type: ignore[attr-defined]
            steps.extend(meter._steady.step_s)
            assert meter._steady.num_steps > len(steps)

    strategy = ElixirStrategy(**TIGHT, report_dir=str(tmp_path / "r"))
    options = {"accumulate_grad_batches": 4, "val_check_interval": 6, "limit_val_batches": 1}
    fit(strategy, SlowNet, train=lambda: make_data(128), val=make_data, callbacks=[Looking()], **options)
    assert steps
    assert min(steps) > 4 * SLOW_S


@pytest.mark.full
def test_what_was_foreseen_in_another_run_is_not_said_of_this_one(tmp_path: Path) -> None:
    """A plan from a file was chosen before the first step."""
    first = ElixirStrategy(**AUTO)
    fit(first, max_epochs=2)
    assert first.plan.forecast is not None
    assert first.plan.forecast.after_steps == 7
    foreseen: list[Forecast | None] = []

    class Looking(pl.Callback):
        def on_after_backward(self, *args: Any) -> None:
            foreseen.append(strategy.plan.forecast)

    strategy = ElixirStrategy(plan=first.plan, report_dir=str(tmp_path / "r"))
    fit(strategy, max_epochs=2, callbacks=[Looking()])
    assert foreseen[0] == replace(first.plan.forecast, after_steps=0, foreseen_s=None, foreseen_after_steps=None)
    predicted = _read(tmp_path / "r")["predicted"]
    assert (predicted["foreseen_s"], predicted["foreseen_after_steps"]) == (foreseen[0].times.total_s, 0)


@crossed(
    told=["auto-{}"],
    how=[pytest.param(AUTO, id="auto"), pytest.param(TIGHT, id="cpu")],
    options=[{}, {"precision": "bf16-mixed"}],
)
def test_gradients_that_are_added_up_take_what_was_predicted(
    tmp_path: Path, how: dict[str, Any], options: dict[str, Any]
) -> None:
    fit(ElixirStrategy(**how, report_dir=str(tmp_path)), accumulate_grad_batches=2, max_epochs=2, **options)
    report = _read(tmp_path)
    held = report["measured"]["bytes"]
    assert held["cpu_grad_staging"] > 0
    assert held["cpu_grad"] + held["cpu_grad_staging"] == report["predicted"]["bytes"]["host_grad_bytes"]


class LateUpdates(pl.Callback):
    """Stands in for an optimizer whose updates run behind the next forward, for nobody knows how long.

    What `last_step_times` tells is the last step whose updates are all over; those of a step that nobody asked for
    before the next step are lost.
    """

    def __init__(self, seconds: list[float | None]) -> None:
        self.seconds = iter(seconds)  # of each step; None: it was skipped
        self.running: UpdateTimes | None = None
        self.over: UpdateTimes | None = None
        self.last: UpdateTimes | None = None

    def __call__(self) -> UpdateTimes | None:
        if self.over is not None:
            self.last, self.over = self.over, None
        return self.last

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.strategy._fit_run._meter._update_times = self  # type: ignore[attr-defined]

    def on_train_batch_start(self, *args: Any) -> None:
        self.over, self.running = self.running or self.over, None

    def on_before_optimizer_step(self, *args: Any) -> None:
        update_s = next(self.seconds)
        if update_s is not None:
            self.over, self.running = None, UpdateTimes(update_s, update_s / 2, 0, 0, 1)


def test_updates_that_are_over_later_count_once(tmp_path: Path) -> None:
    logger = MemoryLogger()
    late = LateUpdates([50, 9, 1, 2, None, 3, 4, 5])
    strategy = ElixirStrategy(**TIGHT, report_dir=str(tmp_path / "r"))
    fit(strategy, callbacks=[late, ElixirStatsMonitor()], logger=logger, log_every_n_steps=1)
    assert list(late.seconds) == []
    logged = [row.get("elixir/update_s") for _, row in logger.rows if "elixir/step_s" in row]
    assert logged == [None, 50, 9, 1, 2, 2, 3, 4]
    # The median of 9, 1, 2, 3 and 4: the steps of the warm-up say nothing about the others.
    times = _read(tmp_path / "r")["measured"]["times"]
    assert (times["update_s"], times["host_update_s"]) == (3, 1.5)


def test_updates_of_which_nothing_is_known(tmp_path: Path) -> None:
    logger = MemoryLogger()
    strategy = ElixirStrategy(**TIGHT, report_dir=str(tmp_path / "r"))
    fit(strategy, callbacks=[LateUpdates([None] * 8), ElixirStatsMonitor()], logger=logger, log_every_n_steps=1)
    assert not any("elixir/update_s" in row for _, row in logger.rows)
    times = _read(tmp_path / "r")["measured"]["times"]
    assert times["update_s"] is None
    assert times["host_update_s"] is None
    assert times["compute_s"] > 0


def test_earlier_files_are_overwritten_and_others_left(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "report.json").write_text("old")
    (folder / "mine.txt").write_text("mine")
    fit(ElixirStrategy(**TIGHT, report_dir=str(folder)))
    assert (folder / "mine.txt").read_text() == "mine"
    assert json.loads((folder / "report.json").read_text())["plan"]["policy"] == "cpu"


class FailingNet(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 5:
            raise RuntimeError("something in the middle")
        return super().training_step(batch, batch_idx)


@pytest.mark.full
def test_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="something in the middle"):
        fit(ElixirStrategy(**AUTO, report_dir=str(tmp_path / "r")), FailingNet)
    report = _read(tmp_path / "r")
    assert report["facts"]["steps"] == "5"
    assert report["measured"]["num_steps"] >= 1


@pytest.mark.full
def test_after_memory_ran_out(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="again"):
        fit(ElixirStrategy(**AUTO, report_dir=str(tmp_path / "r")), lambda: TightNet("backward", (5, 5, 5)))
    assert _read(tmp_path / "r")["measured"]["num_steps"] >= 1


def test_an_error_in_the_first_batch_leaves_the_plan(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="again"):
        fit(ElixirStrategy(**AUTO, report_dir=str(tmp_path / "r")), lambda: TightNet("forward", (0, 0, 0)))
    report = _read(tmp_path / "r")
    assert report["measured"]["step_s"] is None
    assert report["measured"]["bytes"]["cpu_param"] > 0


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_that_does_not_fit_leaves_no_folder(tmp_path: Path, is_there: bool) -> None:
    folder = tmp_path / "a" / "b"
    if is_there:
        folder.mkdir(parents=True)
    options: dict[str, Any] = {"placement_policy": "cuda", "gpu_memory_limit": "1KiB"}
    with pytest.raises(CapacityError, match=r"CPU memory \(gpu_memory_limit\)"):
        fit(ElixirStrategy(**options, report_dir=str(folder)))
    assert folder.exists() is is_there
    assert folder.parent.exists() is is_there
    assert not is_there or not list(folder.iterdir())


@pytest.mark.parametrize("below", ["", "r"])
def test_a_folder_that_cannot_be_written_to_is_refused_first(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")

    class Late(Net):
        is_made_in_init = False

        def configure_model(self) -> None:
            pytest.fail("the model was built")

    with pytest.raises(PlanError, match=r"report_dir: cannot write to .*file.*: give the path of a folder"):
        fit(ElixirStrategy(**AUTO, report_dir=str(tmp_path / "file" / below)), Late)


def test_a_report_that_cannot_be_written_in_the_end_is_a_warning(tmp_path: Path, caplog: Any) -> None:
    folder = tmp_path / "r"

    class Blocking(pl.Callback):
        def on_train_end(self, *args: Any) -> None:
            folder.write_text("in the way")

    with caplog.at_level(logging.WARNING, "lightning_elixir"):
        fit(ElixirStrategy(**AUTO, report_dir=str(folder)), callbacks=[Blocking()])
    assert "could not write the report" in caplog.text


def test_evaluation_writes_none(tmp_path: Path) -> None:
    strategy = ElixirStrategy(**AUTO, report_dir=str(tmp_path / "r"))
    make_trainer(strategy).validate(Net(), make_data(8), verbose=False)
    assert not (tmp_path / "r").exists()


@pytest.mark.full
def test_an_engine_is_kept_where_only_the_folder_differs(tmp_path: Path) -> None:
    first = ElixirStrategy(**AUTO)
    _, model, _ = fit(first)
    engine = first._engine
    second = ElixirStrategy(**AUTO, report_dir=str(tmp_path / "r"))
    make_trainer(second).fit(model, make_data())
    assert second._engine is engine
    assert _read(tmp_path / "r")["predicted"]["times"]["compute_s"] > 0


@pytest.mark.full
@pytest.mark.parametrize("as_path", telling([True, False], "True"))
def test_given_figures_are_planned_with(tmp_path: Path, as_path: bool) -> None:
    slow = BandwidthCurve.constant(1e6)
    spec = HardwareSpec.nominal()
    spec = HardwareSpec(**{**vars(spec), "name": "a slow bus", "h2d": slow, "d2h": slow})
    save_hardware(spec, tmp_path / "slow.json")
    given: Any = tmp_path / "slow.json" if as_path else spec
    fit(ElixirStrategy(**AUTO, hardware=given, report_dir=str(tmp_path / "r")))
    report = _read(tmp_path / "r")
    assert report["predicted"]["hardware"] == report["hardware"]["name"] == "a slow bus"
    assert report["predicted"]["times"]["h2d_s"] > 0.1


def test_figures_that_cannot_be_read_are_refused_first(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read the hardware profile"):
        fit(ElixirStrategy(**AUTO, hardware=tmp_path / "none.json"))
    with pytest.raises(PlanError, match="hardware must be a HardwareSpec or the path"):
        ElixirStrategy(hardware=3)  # type: ignore[arg-type]


def _rank(folder: str, options: dict[str, Any]) -> list[float]:
    _, _, run = fit(
        ElixirStrategy(**AUTO, report_dir=folder, **options), devices=2, train=lambda: make_data(64), max_epochs=2
    )
    return [x.item() for x in run.losses]


@pytest.mark.full
def test_two_ranks(tmp_path: Path) -> None:
    run_ranks(_rank, 2, str(tmp_path / "r"), {}, init_group=False)
    report = _read(tmp_path / "r")
    assert report["plan"]["world_size"] == 2
    assert report["facts"]["samples in a step"] == "8"
    assert report["predicted"]["times"]["collective_s"] > 0
    assert report["measured"]["num_steps"] >= 12


def test_two_ranks_hear_of_a_bad_file(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="cannot read the hardware profile"):
        run_ranks(_rank, 2, str(tmp_path / "r"), {"hardware": str(tmp_path / "none.json")}, init_group=False)
