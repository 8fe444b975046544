"""Lightning's own callbacks over an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_elixir._lightning import pl
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.tiers import telling
from tests.strategy import models
from tests.strategy.models import (
    TIGHT,
    LateNet,
    Net,
    assert_close_run,
    assert_same_run,
    few_batches,
    make_data,
    make_trainer,
)
from tests.strategy.nets import BatchNormNet, GroupsNet, MemoryLogger, ScheduledNet

assert_same_as_plain = functools.partial(models.assert_same_as_plain, train=few_batches)
fit = functools.partial(models.fit, train=few_batches)


@pytest.mark.parametrize("make_model", telling([ScheduledNet, GroupsNet, Net], "GroupsNet"))
def test_learning_rate_monitor_and_logger(make_model: Callable[[], Net]) -> None:
    def run(strategy: Any) -> Any:
        logger = MemoryLogger()
        monitor = pl.callbacks.LearningRateMonitor(log_momentum=True, log_weight_decay=True)
        fit(strategy, make_model, callbacks=[monitor], logger=logger, log_every_n_steps=1, max_epochs=2)
        return logger.rows

    expected = run("auto")
    assert run(ElixirStrategy(**TIGHT)) == expected
    assert any("lr" in name for _, row in expected for name in row)


def test_early_stopping() -> None:
    def callbacks() -> list[Any]:
        return [pl.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0)]

    trainer, _ = assert_same_as_plain(callbacks=callbacks, val=lambda: make_data(8, seed=2), max_epochs=9)
    assert trainer.current_epoch == 2


def _swa() -> list[Any]:
    return [pl.callbacks.StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=1, annealing_epochs=2)]


def test_stochastic_weight_averaging() -> None:
    assert_same_as_plain(callbacks=_swa, max_epochs=4)


@pytest.mark.full
def test_stochastic_weight_averaging_with_batch_norm_ends_with_the_average() -> None:
    """Plain Lightning takes one more step, with the gradients of the last one, after the average is in place."""
    _, _, expected = fit("auto", BatchNormNet, callbacks=_swa(), max_epochs=4)
    callbacks = _swa()
    _, _, actual = fit(ElixirStrategy(**TIGHT), BatchNormNet, callbacks=callbacks, max_epochs=4)
    assert actual.losses == expected.losses
    for name, average in callbacks[0]._average_model.named_parameters():
        assert torch.equal(actual.state[name], average)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        name = f"layers.1.norm.{name}"
        assert torch.equal(actual.state[name], expected.state[name])


@pytest.mark.parametrize("make_model", telling([Net, BatchNormNet], "BatchNormNet"))
def test_exponential_moving_average(make_model: Callable[[], Net]) -> None:
    def callbacks() -> list[Any]:
        return [pl.callbacks.EMAWeightAveraging(decay=0.9)]

    assert_same_as_plain(
        make_model, callbacks=callbacks, val=lambda: make_data(8, seed=2), max_epochs=2, val_check_interval=4
    )


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model")
def test_weight_averaging_of_a_model_made_late() -> None:
    def callbacks() -> list[Any]:
        return [pl.callbacks.WeightAveraging()]

    assert_same_as_plain(LateNet, callbacks=callbacks, max_epochs=2)


def test_timer_progress_bar_and_device_stats(capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [pl.callbacks.Timer(), pl.callbacks.TQDMProgressBar(), pl.callbacks.ModelSummary(max_depth=2)]
    fit(ElixirStrategy(**TIGHT), callbacks=callbacks, enable_progress_bar=True, enable_model_summary=True)
    assert "train_loss" not in capsys.readouterr().out


def test_learning_rate_finder() -> None:
    def run(strategy: Any) -> Any:
        pl.seed_everything(1, verbose=False)
        model, trainer = Net(), make_trainer(strategy)
        finder = pl.tuner.Tuner(trainer).lr_find(model, make_data(), num_training=6, min_lr=1e-4, max_lr=1e-1)
        trainer.fit(model, make_data())
        assert finder is not None
        return finder.results, [loss.item() for loss in model.losses]

    assert run(ElixirStrategy(**TIGHT)) == run("auto")


@pytest.mark.full
def test_batch_size_finder() -> None:
    class SizedNet(Net):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return make_data(64, batch_size=self.batch_size)

        def val_dataloader(self) -> Any:
            return make_data(8, seed=2)

    def run(strategy: Any) -> Any:
        pl.seed_everything(1, verbose=False)
        model, trainer = SizedNet(), make_trainer(strategy)
        size = pl.tuner.Tuner(trainer).scale_batch_size(model, max_trials=2, steps_per_trial=1)
        model.losses.clear()
        trainer.fit(model)
        return size, [loss.item() for loss in model.losses]

    assert run(ElixirStrategy(**TIGHT)) == run("auto")


def test_metrics_of_torchmetrics() -> None:
    import torchmetrics

    class MetricNet(Net):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=4)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.accuracy(self(batch[0]), batch[1])
            self.log("accuracy", self.accuracy, on_epoch=True)

    trainer, _ = assert_same_as_plain(MetricNet, val=lambda: make_data(8, seed=2))
    assert "accuracy" in trainer.callback_metrics


def test_ema_swap_by_hand_keeps_what_was_written() -> None:
    class Swap(pl.Callback):
        """Validates with averaged weights, then puts the trained ones back."""

        def on_train_start(self, trainer: Any, module: nn.Module) -> None:
            self.average = {name: p.detach().clone() for name, p in module.named_parameters()}

        def on_train_batch_end(self, trainer: Any, module: nn.Module, *args: Any) -> None:
            for name, parameter in module.named_parameters():
                self.average[name].lerp_(parameter.detach(), 0.1)

        def _swap(self, module: nn.Module) -> None:
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    kept = parameter.clone()
                    parameter.copy_(self.average[name])
                    self.average[name] = kept

        def on_validation_start(self, trainer: Any, module: nn.Module) -> None:
            self._swap(module)

        def on_validation_end(self, trainer: Any, module: nn.Module) -> None:
            self._swap(module)

    assert_same_as_plain(
        callbacks=lambda: [Swap()], val=lambda: make_data(8, seed=2), val_check_interval=3, max_epochs=2
    )


@pytest.mark.parametrize(("kind", "compare"), [("norm", assert_close_run), ("value", assert_same_run)])
def test_accumulation_with_validation_and_clipping(kind: str, compare: Any) -> None:
    assert_same_as_plain(
        ScheduledNet,
        compare=compare,
        val=lambda: make_data(8, seed=2),
        accumulate_grad_batches=2,
        gradient_clip_val=0.01,
        gradient_clip_algorithm=kind,
        max_epochs=2,
    )
