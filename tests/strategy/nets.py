"""Nets of which each needs something more, trained by several test files."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_elixir._lightning import pl
from tests.strategy.models import (
    Net,
    make_optimizer,
)


class ScheduledNet(Net):
    """Warm-up by steps; with `kind` "plateau" by epochs, on the validation loss."""

    kind = "warm_up"

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer("hybrid", self.parameters(), 1e-2)
        if self.kind == "warm_up":
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class GroupsNet(Net):
    """No decay on norms and biases; their learning rate is another one, and changes under way."""

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}],
            lr=1e-2,
            foreach=False,
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().param_groups[1]["lr"] = 3e-3 / (1 + batch_idx)  # type: ignore[union-attr]


class OverridingNet(Net):
    """Overrides every hook between forward and step."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + batch_idx)
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(
            optimizer, gradient_clip_val=0.03 * (1 + self.current_epoch), gradient_clip_algorithm="norm"
        )

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


class ManualNet(Net):
    """Manual optimization: two backwards a step, clipping by hand."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        with self.toggled_optimizer(optimizer):  # type: ignore[arg-type]
            optimizer.zero_grad()  # type: ignore[union-attr]
            for half in (slice(0, 2), slice(2, 4)):
                loss = self.loss([batch[0][half], batch[1][half]])
                self.manual_backward(loss)
                self.losses.append(loss.detach().clone())
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")  # type: ignore[arg-type]
            optimizer.step()  # type: ignore[union-attr]


class FrozenNet(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.layers[:2].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return make_optimizer("hybrid", [p for p in self.parameters() if p.requires_grad], 1e-2)


class TiedNet(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.layers[3].up.weight = self.layers[0].up.weight


class BatchNormNet(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.layers[1].norm = nn.BatchNorm1d(32)


class MemoryLogger(pl.loggers.Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    name = "memory"
    version = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self.hyperparameters = args


MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which ..."


class _Fail(torch.autograd.Function):
    """Raises in backward when told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: Callable[[], bool]) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.fails():
            raise torch.OutOfMemoryError(MESSAGE)
        return grad, None


class Shortage(nn.Module):
    """In the middle of the layers: memory runs out in the given batches.

    Args:
        phase: "forward" or "backward".
        batches: In which batches, each as many times as it is listed.
    """

    def __init__(self, phase: str = "forward", batches: tuple[int, ...] = (2,)) -> None:
        super().__init__()
        self.phase = phase
        self.left = list(batches)
        self.batch_idx = 0

    def _fails(self) -> bool:
        if self.batch_idx not in self.left:
            return False
        self.left.remove(self.batch_idx)
        return True

    def forward(self, x: Tensor) -> Tensor:
        if self.phase == "forward" and self._fails():
            raise torch.OutOfMemoryError(MESSAGE)
        return _Fail.apply(x, self._fails) if self.phase == "backward" else x


class TightNet(Net):
    """Runs out of memory as told; keeps one loss for each batch of an epoch."""

    def __init__(self, phase: str = "forward", batches: tuple[int, ...] = (), **options: Any) -> None:
        super().__init__(**options)
        self.shortage = Shortage(phase, batches)

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(self.shortage(x) if index == 2 else x)
        return x

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        assert self._current_fx_name == "training_step"  # as `self.log` asks
        self.shortage.batch_idx = batch_idx
        loss = self.loss(batch)
        self.losses[batch_idx:] = [loss.detach().clone()]
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


VICTIM = 1


def rank_and_world_size() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class NetThatStumbles(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and rank_and_world_size()[0] == VICTIM:
            raise ValueError("no such luck")
        return super().training_step(batch, batch_idx)


class NetThatLogs(NetThatStumbles):
    """The others wait for the victim where Lightning adds up what they log."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("seen", float(batch_idx), sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and rank_and_world_size()[0] == VICTIM:
            raise ValueError("no such luck")


class NetThatDies(Net):
    victim = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and rank_and_world_size()[0] == self.victim:
            Path("killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)
