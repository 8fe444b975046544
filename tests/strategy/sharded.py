"""Sharded checkpoints: saved from one placement, loaded into another."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_elixir._lightning import pl
from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.strategy.engine_handle import EngineHandle
from tests.strategy.models import CHUNK, TIGHT, Net, assert_same_state, fit, make_data, make_trainer

SHARDED: dict[str, Any] = {"state_dict_type": "sharded"}
OPTIONS: dict[str, dict[str, Any]] = {
    "tight": {**TIGHT, **SHARDED},
    "cuda": {"placement_policy": "cuda", "chunk_size": "24KiB", **SHARDED},
    "const": {"placement_policy": "const", "offload_optim_frac": 0.5, "shard_param_frac": 0.5, **CHUNK, **SHARDED},
    "whole": {**TIGHT, "enable_distributed_storage": False, **SHARDED},
    "nvme": {"placement_policy": "cpu", "nvme_offload_fraction": 1.0, "chunk_size": "32KiB", **SHARDED},
}


OPTIONS["all on nvme"] = {**OPTIONS["nvme"], "nvme_offload_param_fraction": 1.0}


class MixedNet(Net):
    """Weights of odd shapes and another memory order, a scalar, tied weights, buffers and extra state; HybridAdam."""

    def __init__(self) -> None:
        super().__init__(optimizer="hybrid")
        torch.manual_seed(7)
        self.conv = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(6)
        self.odd = nn.Linear(37, 53)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.layers[1].up.weight = self.layers[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        image = self.norm(self.conv(x[:, :27].reshape(-1, 3, 3, 3))).mean()
        return self.layers(x * self.scale + image + self.odd(x.mean(1, keepdim=True).expand(-1, 37)).mean())

    def get_extra_state(self) -> Any:
        return {"calls": len(self.losses)}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def dump(trainer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Whole values and optimizer states, on rank 0."""
    engine = EngineHandle.of(trainer.lightning_module).engine
    state = {k: v for k, v in engine.full_state_dict().items() if isinstance(v, Tensor)}
    return state, trainer.strategy._wrapped_optimizers[0].state_dict()


def _strategy(options: Mapping[str, Any], folder: Path) -> ElixirStrategy:
    return ElixirStrategy(
        **({**options, "nvme_offload_dir": str(folder)} if "nvme_offload_fraction" in options else options)
    )


def save(path: Path, options: dict[str, Any], make_model: Any, devices: int, more: dict[str, Any]) -> Any:
    trainer, _, _ = fit(_strategy(options, path.parent), make_model, devices=devices, **more)
    trainer.save_checkpoint(path)
    return dump(trainer)


def load(path: Path, options: dict[str, Any], make_model: Any, devices: int, more: dict[str, Any]) -> Any:
    trainer = make_trainer(_strategy(options, path.parent), devices=devices, **more)
    model = make_model()
    with torch.no_grad():  # what is not loaded would show
        for p in model.parameters():
            p.fill_(9.0)
    trainer.fit(model, make_data(), ckpt_path=str(path))  # which has ended, so nothing is trained
    return dump(trainer)


def assert_same_dump(actual: Any, expected: Any) -> None:
    assert_same_state(actual[0], expected[0])
    (a, e) = actual[1], expected[1]
    assert a["state"].keys() == e["state"].keys()
    assert a["state"], "nothing to compare"
    for number in e["state"]:
        assert_same_state(a["state"][number], e["state"][number])
    skipped = {"foreach", "fused", "capturable", "differentiable"}
    for x, y in zip(a["param_groups"], e["param_groups"], strict=True):
        assert {k: v for k, v in x.items() if k not in skipped} == {k: v for k, v in y.items() if k not in skipped}


class Batches:
    """A rank's batches, from where a checkpoint stopped."""

    def __init__(self, devices: int) -> None:
        data = list(make_data(64))
        self._own = data[int(os.environ.get("RANK", "0")) :: devices] if devices > 1 else data
        self._seen = 0

    def __len__(self) -> int:
        return len(self._own)

    def __iter__(self) -> Iterator[Any]:
        torch.rand(1)  # draws, as a DataLoader's iterator does
        first, self._seen = self._seen, 0
        for number, batch in enumerate(self._own[first:], start=first):
            self._seen = number + 1
            yield batch
        self._seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self._seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._seen = state["seen"]


class OwnSeed(pl.Callback):
    """Each rank drops out units of its own."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        torch.manual_seed(11 + trainer.global_rank)


def train_on(path: Path | None, options: dict[str, Any], devices: int, more: dict[str, Any]) -> Any:
    """The losses of three epochs; with a path of those from its checkpoint on."""
    pl.seed_everything(11, verbose=False)
    model = Net(optimizer="hybrid")
    callback = pl.callbacks.ModelCheckpoint("saved", every_n_train_steps=3, save_top_k=-1, filename="{step}")
    trainer = make_trainer(
        ElixirStrategy(**options),
        max_epochs=2,
        devices=devices,
        callbacks=[callback, OwnSeed()],
        enable_checkpointing=True,
        **more,
    )
    trainer.fit(model, Batches(devices), ckpt_path=None if path is None else str(path))
    return [loss.item() for loss in model.losses], dump(trainer)
