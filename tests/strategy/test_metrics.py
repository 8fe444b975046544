"""`ElixirStatsMonitor`: metrics go to the Trainer's loggers, in the steps that are logged, and in no others."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_elixir._lightning import Trainer, pl
from lightning_elixir.errors import PlanError
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.strategy.callbacks import ElixirStatsMonitor
from tests.helpers.dist import run_ranks
from tests.strategy.models import CHUNK, TIGHT, Net, UnforeseenNet, fit, make_data
from tests.strategy.nets import ManualNet

CSVLogger = pl.loggers.CSVLogger

SECONDS = {"elixir/step_s", "elixir/compute_s", "elixir/exposed_wait_s", "elixir/update_s", "elixir/host_update_s"}


def _rows(folder: Path) -> list[dict[str, str]]:
    """Rows with metrics of ours."""
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row.get("elixir/gpu_bytes")]


def _fit_logged(tmp_path: Path, elixir: Any = TIGHT, make: Callable[[], Net] = Net, **options: Any) -> Any:
    strategy = ElixirStrategy(**elixir)
    options = {"log_every_n_steps": 2, "max_epochs": 2, **options}
    options["callbacks"] = [*options.get("callbacks", ()), ElixirStatsMonitor()]
    trainer, model, run = fit(strategy, make, logger=CSVLogger(tmp_path), **options)
    return trainer, strategy, run, _rows(tmp_path)


def test_metrics_come_with_the_step_of_the_models_own(tmp_path: Path) -> None:
    trainer, strategy, _, rows = _fit_logged(tmp_path)
    assert [int(row["step"]) for row in rows] == [1, 3, 5, 7, 9, 11, 13, 15]
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        own = [int(row["step"]) for row in csv.DictReader(file) if row["train_loss"]]
    assert own == [int(row["step"]) for row in rows]
    assert rows[0].keys() >= SECONDS
    assert all(float(row[name]) >= 0 for row in rows for name in SECONDS)
    assert all(float(row["elixir/compute_s"]) > 0 for row in rows)
    held = strategy.stats().held_bytes
    assert {f"elixir/{kind}_bytes" for kind in held} <= rows[0].keys()
    assert float(rows[-1]["elixir/cpu_param_bytes"]) == held["cpu_param"] > 0


def test_counters_are_those_since_the_last_log(tmp_path: Path) -> None:
    _, strategy, _, rows = _fit_logged(tmp_path)
    stats = strategy.stats()
    for name in ("fetches", "prefetches", "evictions", "hits"):
        counts = [float(row[f"elixir/{name}"]) for row in rows]
        assert sum(counts) == getattr(stats, name)
        assert counts[3] == counts[4]  # steps in the steady state are alike
    assert float(rows[3]["elixir/evictions"]) > 0
    assert float(rows[3]["elixir/h2d_bytes"]) > 0


class Resetting(pl.Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.strategy.reset_stats()  # type: ignore[attr-defined]


def test_counters_that_a_user_resets_stay_positive(tmp_path: Path) -> None:
    _, _, _, rows = _fit_logged(tmp_path, callbacks=[Resetting()])
    assert all(float(row["elixir/evictions"]) > 0 for row in rows[2:])


def test_the_plan_of_the_warm_up_is_left_behind(tmp_path: Path) -> None:
    _, _, _, rows = _fit_logged(tmp_path, {**CHUNK, "gpu_memory_limit": "8MiB"}, UnforeseenNet, log_every_n_steps=1)
    assert float(rows[0]["elixir/fetches"]) > 0
    assert float(rows[-1]["elixir/fetches"]) == 0
    assert not float(rows[-1].get("elixir/cpu_param_bytes") or 0)


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 3}, {"val_check_interval": 2}])
def test_steps_are_counted_as_the_trainer_does(tmp_path: Path, options: Any) -> None:
    val = {"val": lambda: make_data(8, seed=2)} if "val_check_interval" in options else {}
    trainer, _, _, rows = _fit_logged(tmp_path, **options, **val)
    num = trainer.fit_loop.epoch_loop._batches_that_stepped
    assert [int(row["step"]) for row in rows] == [step for step in range(num) if step % 2]


def test_manual_optimization(tmp_path: Path) -> None:
    _, _, run, rows = _fit_logged(tmp_path, make=ManualNet)
    assert run.losses
    assert [int(row["step"]) for row in rows] == [1, 3, 5, 7, 9, 11, 13, 15]


@pytest.mark.full
def test_numbers_of_the_training_do_not_change(tmp_path: Path) -> None:
    run = _fit_logged(tmp_path, log_every_n_steps=1)[2]
    expected = fit(ElixirStrategy(**TIGHT), max_epochs=2)[2]
    assert [x.item() for x in run.losses] == [x.item() for x in expected.losses]


@pytest.mark.parametrize(
    "options", [{}, {"log_every_n_steps": 0, "callbacks": [ElixirStatsMonitor()]}], ids=["no_monitor", "never"]
)
def test_without_logging_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    timed: list[bool] = []
    monkeypatch.setattr(Engine, "sample_times", lambda self, is_on: timed.append(is_on))
    monkeypatch.setattr(Engine, "last_seconds", property(lambda self: pytest.fail("waited for the device")))
    fit(ElixirStrategy(**TIGHT), **({"logger": CSVLogger(tmp_path), "log_every_n_steps": 1} | options))
    assert not any(timed)


def test_only_logged_steps_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[tuple[int, bool]] = []
    original = Engine.sample_times

    class Batches(pl.Callback):
        now = -1

        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            self.now = trainer.fit_loop.epoch_loop._batches_that_stepped

    batches = Batches()

    def sample_times(self: Engine, is_on: bool) -> None:
        timed.append((batches.now, is_on))
        original(self, is_on)

    monkeypatch.setattr(Engine, "sample_times", sample_times)
    _fit_logged(tmp_path, log_every_n_steps=4, max_epochs=1, callbacks=[batches])
    assert [t for t in timed if t[0] >= 0] == [(3, True), (3, False), (7, True), (7, False)]


def test_loggers_get_what_they_get_without_us(tmp_path: Path) -> None:
    def logged(strategy: Any, name: str) -> list[list[str]]:
        fit(strategy, logger=CSVLogger(tmp_path / name), log_every_n_steps=2, max_epochs=2)
        (path,) = (tmp_path / name).rglob("metrics.csv")
        with path.open() as file:
            return list(csv.reader(file))

    assert logged(ElixirStrategy(**TIGHT), "elixir") == logged("auto", "auto")


def test_where_there_is_nothing_to_show_or_nobody_to_see_it(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="this Trainer has SingleDeviceStrategy: leave it out"):
        fit("auto", callbacks=[ElixirStatsMonitor()], logger=CSVLogger(tmp_path))
    with pytest.raises(PlanError, match="loggers, and this Trainer has none"):
        fit(ElixirStrategy(**TIGHT), callbacks=[ElixirStatsMonitor()], logger=False)


@pytest.mark.full
def test_a_second_fit_goes_on(tmp_path: Path) -> None:
    trainer, _, _, rows = _fit_logged(tmp_path, max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, make_data())
    assert [int(row["step"]) for row in _rows(tmp_path)] == [1, 3, 5, 7, 9, 11, 13, 15]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = pl.loggers.TensorBoardLogger(tmp_path)
    fit(ElixirStrategy(**TIGHT), logger=logger, log_every_n_steps=2, callbacks=[ElixirStatsMonitor()])
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert {"elixir/gpu_bytes", "elixir/fetches", *SECONDS} <= set(events.Tags()["scalars"])
    assert [e.step for e in events.Scalars("elixir/fetches")] == [1, 3, 5, 7]


def _rank(folder: str) -> list[str]:
    strategy = ElixirStrategy(**TIGHT)
    fit(
        strategy,
        devices=2,
        train=lambda: make_data(64),
        logger=CSVLogger(folder),
        log_every_n_steps=2,
        callbacks=[Resetting(), ElixirStatsMonitor()],
    )
    return sorted(str(path) for path in Path(folder).rglob("metrics.csv"))


def test_two_ranks_log_once(tmp_path: Path) -> None:
    first, second = run_ranks(_rank, 2, str(tmp_path), init_group=False)
    assert first == second
    rows = _rows(tmp_path)
    assert [int(row["step"]) for row in rows] == [1, 3, 5, 7]
    assert float(rows[-1]["elixir/gathered_bytes"]) > 0
