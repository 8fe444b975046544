"""Averages of weights beside training, under `ElixirStrategy`."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_avg_fn, get_swa_avg_fn
from typing_extensions import override

from lightning_elixir._lightning import Callback, LightningModule, StochasticWeightAveraging, Trainer, TrainerFn, pl
from lightning_elixir.core.first_names import first_names
from lightning_elixir.errors import PlanError
from lightning_elixir.plan.mesh import AXES
from lightning_elixir.runtime.averages import Average, Averages
from lightning_elixir.strategy.config import ElixirConfig

log = logging.getLogger(__name__)


def check_lightnings_averages(trainer: Trainer, config: ElixirConfig) -> None:
    """Whether Lightning's averages of weights can be kept, before the model takes memory.

    Raises:
        PlanError: They copy the model as its author builds it, and with parallel patterns a rank's weights are parts.
    """
    sizes = {axis: getattr(config, f"{axis}_parallel_size") for axis in AXES}
    said = " and ".join(f"{axis}_parallel_size={size}" for axis, size in sizes.items() if size != 1)
    keys = [key.__name__ if isinstance(key, type) else repr(key) for key in config.patterns or ()]
    of_patterns = f" (patterns for {first_names(keys)})" if keys else ""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if said and isinstance(callback, (pl.callbacks.WeightAveraging, StochasticWeightAveraging)):
            raise PlanError(
                f"{type(callback).__name__} averages whole weights, and with {said}{of_patterns} a rank has parts of"
                " those that are cut: use lightning_elixir.ElixirWeightAveraging, which averages parts"
            )


def takes_whole_models(trainer: Trainer) -> bool:
    """Whether a callback of Lightning's, which copies the whole model, takes models out of what a fit goes on from."""
    is_fitting = trainer.state.fn == TrainerFn.FITTING
    return is_fitting and any(isinstance(c, pl.callbacks.WeightAveraging) for c in trainer.callbacks)  # type: ignore[attr-defined]


def tell_of_averaging(callback: Callback, mixed: str | None) -> None:
    """Warn of what one of Lightning's averaging callbacks does under `ElixirStrategy`, and tell what does not.

    Args:
        callback: A `StochasticWeightAveraging` or `WeightAveraging`.
        mixed: The precision, where parameters in 16 bits have fp32 masters; None: it is another.
    """
    if isinstance(callback, StochasticWeightAveraging):
        cure = (
            "(decay=None, update_every_n_steps=0, update_starting_at_epoch=...) keeps fp32 averages where optimizer"
            " states are. It leaves learning rates alone: give torch.optim.swa_utils.SWALR from configure_optimizers()"
        )
    else:
        cure = " takes the same rhythm, and keeps fp32 averages where optimizer states are"
    log.warning(
        "%s keeps a copy of the whole model on every rank, and brings all parameters to the device for each update%s."
        " lightning_elixir.ElixirWeightAveraging%s",
        type(callback).__name__,
        f"; under {mixed} it averages them rounded to 16 bits, not the fp32 masters that are trained" if mixed else "",
        cure,
    )


class ElixirWeightAveraging(Callback):
    """Keeps averages of the weights, as Lightning's `EMAWeightAveraging` and `WeightAveraging` do, for models that are
    larger than the GPU: one fp32 number more for each parameter, beside the optimizer's states, spread over the ranks.

    During validation, and when training is over, the averages are in the place of the weights. A checkpoint holds them
    as `state_dict`, which plain PyTorch and Lightning read, and the weights as `current_model_state`, from which a fit
    goes on. `should_update` may be overridden, as theirs.

    Args:
        decay: Of an exponential moving average (EMA); None: all updates count alike (SWA).
        update_every_n_steps: Optimizer steps from update to update; 0: after epochs only.
        update_starting_at_step: The first step that counts, from 0; None: all do.
        update_starting_at_epoch: Update after each epoch from this one on, from 0; None: not after epochs.
        use_buffers: Average buffers (running statistics) too; False: the averages come with the buffers as they are.
        avg_fn: How averages are made, element by element, as `torch.optim.swa_utils.AveragedModel` takes it; `decay`
            counts no more then.

    Raises:
        PlanError: When `fit` begins: the Trainer has another strategy, states are on NVMe, or `decay` is not in [0, 1].
    """

    def __init__(
        self,
        decay: float | None = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        *,
        use_buffers: bool = True,
        avg_fn: Average | None = None,
    ) -> None:
        if decay is not None and not 0.0 <= decay <= 1.0:
            raise PlanError(f"decay must be in [0, 1], or None for averages that count all updates alike; got {decay}")
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch
        self._use_buffers = use_buffers
        known = get_swa_avg_fn() if decay is None else get_ema_avg_fn(decay)
        self._average: Average = avg_fn or known
        self._averages: Averages | None = None
        self._buffers: dict[str, Tensor] = {}
        self._is_swapped = False
        self._loaded: dict[str, Tensor] = {}  # from a checkpoint, until there is an engine
        self._num_updates = 0
        self._latest_update_step = 0
        self._latest_update_epoch = -1

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to update the averages, after a step or an epoch.

        Args:
            step_idx: Of the step that is over, from 0; None after an epoch.
            epoch_idx: Of the epoch that is over, from 0; None after a step.
        """
        if step_idx is not None:
            has_begun = self.update_starting_at_step is None or step_idx >= self.update_starting_at_step
            return has_begun and self.update_every_n_steps > 0 and step_idx % self.update_every_n_steps == 0
        first = self.update_starting_at_epoch
        return epoch_idx is not None and first is not None and epoch_idx >= first

    # Lifecycle

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        from lightning_elixir.strategy import ElixirStrategy  # which looks for this callback

        if not isinstance(trainer.strategy, ElixirStrategy):
            raise PlanError(
                f"ElixirWeightAveraging averages what ElixirStrategy keeps, and this Trainer has"
                f' {type(trainer.strategy).__name__}: use Lightning\'s EMAWeightAveraging, or strategy="elixir"'
            )
        if stage == "fit":
            trainer.strategy.check_averaging()
            self._num_updates = 0  # they begin anew with each fit, as Lightning's; from a checkpoint they go on

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._averages = trainer.strategy.new_averages(self._average)  # type: ignore[attr-defined]
        self._buffers = {name: b.detach().clone() for name, b in pl_module.named_buffers()}
        self._is_swapped = False
        loaded, self._loaded = self._loaded, {}
        if trainer.strategy.has_saved_averages:  # type: ignore[attr-defined]
            loaded = trainer.strategy.load_saved_averages(self._averages)  # type: ignore[attr-defined]
        elif loaded:
            self._averages.load(loaded)
        if loaded:
            for name, value in self._buffers.items():
                if name in loaded:
                    value.copy_(loaded[name])

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step > self._latest_update_step and self.should_update(step_idx=step - 1):
            self._update(pl_module)
            self._latest_update_step = step

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch
        if epoch > self._latest_update_epoch and self.should_update(epoch_idx=epoch):
            self._update(pl_module)
            self._latest_update_epoch = epoch

    @torch.no_grad()
    def _update(self, pl_module: LightningModule) -> None:
        if self._averages is None:
            return
        self._averages.update(self._num_updates)
        for name, buffer in pl_module.named_buffers():
            kept = self._buffers[name]
            is_averaged = self._use_buffers and self._num_updates > 0
            kept.copy_(self._average(kept, buffer, self._num_updates) if is_averaged else buffer)
        self._num_updates += 1

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap(pl_module, is_wanted=True)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap(pl_module, is_wanted=False)

    @torch.no_grad()
    def _swap(self, pl_module: LightningModule, *, is_wanted: bool) -> None:
        if self._averages is None or self._is_swapped is is_wanted:
            return
        self._averages.swap()
        for name, buffer in pl_module.named_buffers():
            current = buffer.detach().clone()
            buffer.copy_(self._buffers[name])
            self._buffers[name].copy_(current)
        self._is_swapped = is_wanted

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._averages is None:
            return
        self._swap(pl_module, is_wanted=False)
        self._averages.take_effect()
        with torch.no_grad():
            for name, buffer in pl_module.named_buffers():
                buffer.copy_(self._buffers[name])

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.world_size == 1:  # else others may not come to it, and the engine is of no use any more
            self._swap(pl_module, is_wanted=False)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._averages, self._buffers = None, {}

    # Checkpoints

    @property
    @override
    def state_key(self) -> str:
        """That of Lightning's callback with the same arguments: each then finds what the other has saved."""
        return "WeightAveraging" if self.decay is None else "EMAWeightAveraging"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "latest_update_step": self._latest_update_step,
            "latest_update_epoch": self._latest_update_epoch,
            "num_updates": self._num_updates,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._latest_update_step = state_dict["latest_update_step"]
        self._latest_update_epoch = state_dict.get("latest_update_epoch", -1)
        self._num_updates = state_dict.get("num_updates", self._num_updates)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._averages is None:  # training is over: the weights are the averages
            whole = checkpoint["state_dict"]
            # A folder is read by this callback, which finds the count in its own state. Its tensors are on `meta`.
            if self._num_updates and whole and not any(isinstance(v, Tensor) and v.is_meta for v in whole.values()):
                checkpoint["current_model_state"] = whole
                checkpoint["averaging_state"] = {"n_averaged": torch.tensor(self._num_updates)}
            return
        found = trainer.strategy.saved_averages(self._averages)  # type: ignore[attr-defined]
        here = checkpoint["state_dict"]
        if here:  # as the averages, it is not on other ranks where it is whole
            averages = {name: value for name, value in found.items() if name in here}
            buffers = {name: b.detach().cpu().clone() for name, b in self._buffers.items() if name in here}
            aside = {**here, **buffers, **averages}
            checkpoint["state_dict"] = here if self._is_swapped else aside
            checkpoint["current_model_state"] = aside if self._is_swapped else here
        checkpoint["averaging_state"] = {"n_averaged": torch.tensor(self._num_updates)}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        is_folder = trainer.strategy.has_saved_averages  # type: ignore[attr-defined]
        current = checkpoint.get("current_model_state")
        if trainer.state.fn != "fit" or (current is None and not is_folder):
            return  # of a run without averages: both begin as its weights
        # Where another callback has averaged: the step of the checkpoint has been looked at, and does not count again
        # with the micro-batches of the next one.
        self._latest_update_step = checkpoint.get("global_step", 0)
        if is_folder:
            self._num_updates = int(checkpoint["averaging_state"]["n_averaged"])
            trainer.strategy.load_saved_weights(pl_module.strict_loading)  # type: ignore[attr-defined]
            return
        self._loaded = {name: v for name, v in checkpoint["state_dict"].items() if isinstance(v, Tensor)}
        self._num_updates = int(checkpoint["averaging_state"]["n_averaged"])
        trainer.strategy.load_model_state_dict({"state_dict": current}, strict=pl_module.strict_loading)
