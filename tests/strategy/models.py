"""LightningModules and Trainers for the tests, and what a run leaves to compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_elixir._lightning import LightningModule, Trainer
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.seeds import seed_everything, seed_torch

WIDTH = 32
# One layer (a weight, a bias and a norm, each padded to 512 elements) fits a chunk; a few chunks fit the limit.
CHUNK = {"chunk_size": "16KiB"}
TIGHT = {**CHUNK, "placement_policy": "cpu", "gpu_memory_limit": "120KiB"}


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


def make_layers(depth: int = 4) -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(depth)], nn.Linear(WIDTH, 4))


class Net(LightningModule):
    """A residual MLP; keeps its losses.

    Args:
        optimizer: "adamw", "adam", "sgd", "hybrid" or "cpu_adam".
        lr: Learning rate.
        seed: Drawn from right before the layers are made, so that every rank and every run starts alike. None: not.
    """

    is_made_in_init = True

    def __init__(self, optimizer: str = "adamw", lr: float = 1e-2, seed: int | None = 7) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.losses: list[Tensor] = []
        self.val_losses: list[Tensor] = []
        if self.is_made_in_init:
            self._make()

    def _make(self) -> None:
        if hasattr(self, "layers"):
            return
        if self.hparams["seed"] is not None:
            seed_torch(self.hparams["seed"])
        self.layers = make_layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x).float(), y)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach().clone())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.val_losses.append(loss.detach().clone())
        self.log("val_loss", loss, sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.hparams["optimizer"], self.parameters(), self.hparams["lr"])


class UnforeseenNet(Net):
    """Looks at values in its step, so that no dry run can tell what that does."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert len(batch[0].nonzero()) > 0
        return super().training_step(batch, batch_idx)


class LateNet(Net):
    """Its layers are made in the current hook."""

    is_made_in_init = False

    def configure_model(self) -> None:
        self._make()


class ShardedNet(Net):
    """Its layers are made in the deprecated hook."""

    is_made_in_init = False

    def configure_sharded_model(self) -> None:
        self._make()


def make_optimizer(name: str, parameters: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    from lightning_elixir import CPUAdam, HybridAdam

    if name == "hybrid":
        return HybridAdam(parameters, lr=lr, weight_decay=0.01)
    if name == "cpu_adam":
        return CPUAdam(parameters, lr=lr, weight_decay=0.01)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[name]
    return kind(parameters, lr=lr, weight_decay=0.01, foreach=False)


def make_data(num_samples: int = 32, batch_size: int = 4, *, shuffle: bool = False, seed: int = 1) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, WIDTH, generator=generator)
    y = torch.randint(0, 4, (num_samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=shuffle)


def few_batches() -> DataLoader[Any]:
    """Five. Enough for a first step, the plan after it, and steps under that plan."""
    return make_data(20)


def make_trainer(strategy: Any, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(strategy=strategy, **(quiet | options))


@dataclass
class Run:
    """What a run of a Trainer left."""

    state: dict[str, Tensor]
    losses: list[Tensor] = field(default_factory=list)
    val_losses: list[Tensor] = field(default_factory=list)
    metrics: dict[str, Tensor] = field(default_factory=dict)


def collect(trainer: Trainer, model: Net) -> Run:
    state = copy.deepcopy(trainer.strategy.lightning_module_state_dict())
    metrics = {k: v.clone() for k, v in trainer.callback_metrics.items()}
    return Run(state, list(model.losses), list(model.val_losses), metrics)


def fit(
    strategy: Any,
    make_model: Callable[[], Net] = Net,
    *,
    train: Callable[[], DataLoader[Any]] = make_data,
    val: Callable[[], DataLoader[Any]] | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> tuple[Trainer, Net, Run]:
    """Train once from a fixed seed."""
    seed_everything(11)
    model = make_model()
    if isinstance(options.get("callbacks"), type) or callable(options.get("callbacks")):
        options["callbacks"] = options["callbacks"]()
    trainer = make_trainer(strategy, **options)
    trainer.fit(model, train(), val() if val is not None else None, ckpt_path=ckpt_path)
    return trainer, model, collect(trainer, model)


def assert_same_state(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    different = [k for k in expected if not torch.equal(actual[k], expected[k])]
    assert not different, f"{len(different)} of {len(expected)} tensors differ: {different[:5]}"


def assert_close_run(actual: Run, expected: Run) -> None:
    """Where the total norm of the gradients takes part: it is summed in another order than torch's, 1e-6 relative."""
    assert actual.losses, "nothing was trained"
    torch.testing.assert_close(actual.losses, expected.losses, rtol=1e-4, atol=1e-6)
    assert actual.state.keys() == expected.state.keys()
    torch.testing.assert_close(actual.state, expected.state, rtol=1e-4, atol=1e-5)


def assert_same_run(actual: Run, expected: Run) -> None:
    assert actual.losses, "nothing was trained"
    assert [loss.item() for loss in actual.losses] == [loss.item() for loss in expected.losses]
    assert [loss.item() for loss in actual.val_losses] == [loss.item() for loss in expected.val_losses]
    assert {k: v.item() for k, v in actual.metrics.items()} == {k: v.item() for k, v in expected.metrics.items()}
    assert_same_state(actual.state, expected.state)


def assert_same_as_plain(
    make_model: Callable[[], Net] = Net,
    elixir: Mapping[str, Any] = TIGHT,
    *,
    compare: Callable[[Run, Run], None] = assert_same_run,
    **options: Any,
) -> tuple[Trainer, Net]:
    """Train with ElixirStrategy, by default under a limit that makes chunks come and go, and with plain Lightning."""
    _, _, expected = fit("auto", make_model, **options)
    strategy = ElixirStrategy(**elixir)
    trainer, model, actual = fit(strategy, make_model, **options)
    compare(actual, expected)
    if "gpu_memory_limit" in elixir:
        assert strategy.stats().evictions > 0
    return trainer, model
