"""Code of users' that looks at `p.grad` and writes to it in Lightning's hooks: as in plain Lightning."""

from __future__ import annotations

import functools
from typing import Any

import torch
from lightning_utilities.core.imports import module_available
from torch import Tensor

from lightning_elixir._lightning import pl
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.tiers import crossed
from tests.strategy import models
from tests.strategy.models import TIGHT, Net, few_batches

assert_same_as_plain = functools.partial(models.assert_same_as_plain, train=few_batches)
fit = functools.partial(models.fit, train=few_batches)

if module_available("lightning"):
    from lightning.pytorch.utilities import grad_norm
else:
    from pytorch_lightning.utilities import grad_norm


class GuardedNet(Net):
    """Drops a step whose gradients are not finite."""

    num_dropped = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 2 else loss

    def on_after_backward(self) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        assert grads
        if not all(bool(g.isfinite().all()) for g in grads):
            self.zero_grad()
            self.num_dropped += 1


class NoisyNet(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        generator = torch.Generator().manual_seed(self.global_step)
        for p in self.parameters():
            if p.grad is not None:
                p.grad.add_(torch.randn(p.grad.shape, generator=generator), alpha=1e-3)


class ClippingNet(Net):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.05, foreach=False)


class NormsNet(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class ManualNet(Net):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.losses.append(loss.detach().clone())
        self.manual_backward(loss)
        for p in self.parameters():
            if p.grad is not None:
                p.grad = p.grad.clamp(-0.01, 0.01)
        optimizer.step()


class Watcher(pl.Callback):
    """Draws a histogram of every gradient."""

    def __init__(self) -> None:
        self.histograms: list[Tensor] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for p in pl_module.parameters():
            if p.grad is not None:
                self.histograms.append(torch.histc(p.grad.float().cpu(), bins=10))


@crossed(
    told=[f"GuardedNet-{TIGHT}", f"ClippingNet-{TIGHT | {'update_timing': 'behind_forward'}}"],
    make=[GuardedNet, NoisyNet, ClippingNet, NormsNet, ManualNet],
    options=[TIGHT, {}, {**TIGHT, "update_timing": "behind_forward"}],
)
def test_as_plain_lightning(make: type[Net], options: dict[str, Any]) -> None:
    _, model = assert_same_as_plain(make, options, max_epochs=2)
    if isinstance(model, GuardedNet):
        assert model.num_dropped == 2


def test_a_watcher_with_every_default() -> None:
    """Where updates may begin inside backward, they wait for who looks."""
    seen = []
    for strategy in ("auto", ElixirStrategy(**TIGHT)):
        watcher = Watcher()
        fit(strategy, lambda: Net(optimizer="hybrid"), callbacks=[watcher], max_epochs=2)
        seen.append(watcher.histograms)
    assert len(seen[0]) > 100
    assert len(seen[0]) == len(seen[1])
    torch.testing.assert_close(seen[1], seen[0])


def test_a_watcher_of_16_bits() -> None:
    watcher = Watcher()
    strategy = ElixirStrategy(**TIGHT)
    fit(strategy, lambda: Net(optimizer="hybrid"), callbacks=[watcher], precision="bf16-mixed")
    assert len(watcher.histograms) > 100
    assert all(float(h.sum()) > 0 for h in watcher.histograms)
