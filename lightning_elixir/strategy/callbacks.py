"""Callbacks for users' Trainers."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lightning_elixir._lightning import Callback, LightningModule, Trainer
from lightning_elixir.errors import PlanError


class ElixirStatsMonitor(Callback):
    """Gives `elixir/...` metrics to the Trainer's loggers, in the steps in which the model's own metrics are logged:
    bytes held and moved, fetches and evictions, and where the time of a step goes.

    For `Trainer(strategy="elixir", callbacks=[ElixirStatsMonitor()])`. Only in steps that are logged does the host wait
    for the device.

    Raises:
        PlanError: When `fit` begins: the Trainer has another strategy, or no logger.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        from lightning_elixir.strategy import ElixirStrategy  # which looks for this callback

        if not isinstance(trainer.strategy, ElixirStrategy):
            raise PlanError(
                f"ElixirStatsMonitor shows what ElixirStrategy does, and this Trainer has"
                f' {type(trainer.strategy).__name__}: leave it out, or use Trainer(strategy="elixir")'
            )
        if stage == "fit" and not trainer.loggers:
            raise PlanError("ElixirStatsMonitor gives its metrics to loggers, and this Trainer has none: leave it out")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_logged = trainer._logger_connector.should_update_logs and not trainer.fit_loop._should_accumulate()
        if not (is_logged and trainer.is_global_zero):
            return
        metrics = trainer.strategy.step_metrics()  # type: ignore[attr-defined]
        if metrics:
            step = trainer.fit_loop.epoch_loop._batches_that_stepped  # as for what the model logs in this step
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)
