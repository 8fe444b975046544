"""Lightning's own `ModelParallelStrategy` (FSDP2) goes on from our checkpoints as we do, and we from its as it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_elixir._lightning import Trainer, pl
from lightning_elixir.cli import main
from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.strategy.engine_handle import EngineHandle
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import full
from tests.strategy.models import TIGHT, LateNet, make_optimizer, make_trainer
from tests.strategy.sharded import Batches

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class MeshNet(LateNet):
    """`fully_shard` where there is a mesh, layers that ranks share where it has such an axis, and all that a checkpoint
    of FSDP2 can hold: two parameter groups, neither of which has the model's order, a schedule by steps, a buffer that
    changes and a frozen parameter. No dropout, for `ModelParallelStrategy` saves no random states."""

    def configure_model(self) -> None:
        if hasattr(self, "layers"):
            return
        self._make()
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.layers[1].up.weight.requires_grad_(False)
        self.register_buffer("num_calls", torch.zeros(()))
        mesh: Any = self._device_mesh
        if mesh is not None and mesh["tensor_parallel"].size() > 1:
            for layer in self.layers[:-1]:
                parallelize_module(layer, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if isinstance(mesh, DeviceMesh):  # no chunks take the place of this
            for layer in self.layers:
                fully_shard(layer, mesh=mesh["data_parallel"])
            fully_shard(self, mesh=mesh["data_parallel"])

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = make_optimizer(self.hparams["optimizer"], [p for p in trained if p.ndim <= 1], 1e-2)
        optimizer.add_param_group({"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1, "lr": 3e-3})
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class OrderedMeshNet(MeshNet):
    """All that `ModelParallelStrategy` finds in a file of the whole state that it has not saved: it takes the numbers
    that optimizers give their parameters for places in the model."""

    def configure_model(self) -> None:
        super().configure_model()
        self.requires_grad_()

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.hparams["optimizer"], list(self.parameters()), 1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@dataclass
class Left:
    """What a training left on a rank; of values only rank 0 has any."""

    losses: list[float]
    state: dict[str, Tensor]
    moments: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    place: tuple[int, int, list[Any]]
    """Epoch, step, and what schedules say."""


def _strategy(who: str, num_ranks: int, tensor: int, is_sharded: bool) -> Any:
    if who == "ours":
        kind = "sharded" if is_sharded else "full"
        return ElixirStrategy(**TIGHT, tensor_parallel_size=tensor, state_dict_type=kind)
    return pl.strategies.ModelParallelStrategy(
        data_parallel_size=num_ranks // tensor, tensor_parallel_size=tensor, save_distributed_checkpoint=is_sharded
    )


def _train(
    who: str,
    model_class: type[MeshNet],
    optimizer: str,
    num_ranks: int,
    tensor: int,
    folder: Path,
    path: Path | None,
    is_sharded: bool,
    more: dict[str, Any],
) -> dict[str, Any]:
    """Two epochs, with checkpoints in the middle of the first; with the path of one what is left of them."""
    pl.seed_everything(11, verbose=False)
    model = model_class(optimizer)
    callback = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    trainer = make_trainer(
        _strategy(who, num_ranks, tensor, is_sharded),
        max_epochs=2,
        devices=num_ranks,
        callbacks=[callback],
        enable_checkpointing=True,
        **more,
    )
    trainer.fit(model, Batches(num_ranks // tensor), ckpt_path=None if path is None else str(path))
    return vars(Left([x.item() for x in model.losses], *_values(trainer), _place(trainer)))


def _values(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Any], list[dict[str, Any]]]:
    module = trainer.lightning_module
    handle = EngineHandle.of(module)
    if handle is None:
        state = get_model_state_dict(module, options=_WHOLE)
        found = get_optimizer_state_dict(module, trainer.optimizers[0], options=_WHOLE)
        return state, found.get("state", {}), found.get("param_groups", [])
    names = {id(p): name for name, p in module.named_parameters()}
    ordered = [names[id(p)] for group in trainer.optimizers[0].param_groups for p in group["params"]]
    state, found = handle.engine.full_state_dict(), trainer.strategy._wrapped_optimizers[0].state_dict()
    if not found:
        return {}, {}, []
    moments = {ordered[number]: value for number, value in found["state"].items()}
    return state, moments, [{**g, "params": [ordered[n] for n in g["params"]]} for g in found["param_groups"]]


def _place(trainer: Trainer) -> tuple[int, int, list[Any]]:
    schedules = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    plain = [{k: v for k, v in s.items() if isinstance(v, (int, float, list))} for s in schedules]
    return trainer.current_epoch, trainer.global_step, plain


def _runs(
    tmp_path: Path,
    saver: str,
    loader: str,
    num_ranks: int,
    kind: str,
    optimizer: str = "adamw",
    tensor: int = 1,
    **more: Any,
) -> list[Any]:
    """Of a run that is not interrupted, of the run that goes on from one of its checkpoints, and of another strategy
    that does: what they left, for every rank."""

    # Of files that `ModelParallelStrategy` has not saved itself, it reads no others.
    is_numbered = kind == "consolidated" or (kind, saver) == ("full", "ours")
    model_class = OrderedMeshNet if is_numbered else MeshNet

    def train(who: str, folder: str, path: Path | None, is_sharded: bool) -> Any:
        name = optimizer if who == "ours" else "adamw"
        arguments = (who, model_class, name, num_ranks, tensor, tmp_path / folder, path, is_sharded, more)
        return run_ranks(_train, num_ranks, *arguments, init_group=False)

    whole = train(saver, "saved", None, kind != "full")
    path = tmp_path / "saved" / "step=3.ckpt"
    assert path.is_dir() == (kind != "full")
    if kind == "consolidated":
        assert main(["consolidate", str(path), "-o", str(tmp_path / "one.ckpt")]) == 0
        path = tmp_path / "one.ckpt"
    # Whoever loads takes either kind, whichever it saves.
    return [whole, *(train(who, f"by_{who}", path, kind == "full") for who in (saver, loader))]


def _assert_goes_on(
    actual: list[dict[str, Any]], expected: list[dict[str, Any]], same: Callable[[Any, Any], None]
) -> None:
    """What was trained after the checkpoint is what the run that was not interrupted has trained then."""
    for mine, other in zip(actual, expected, strict=True):
        assert 0 < len(mine["losses"]) < len(other["losses"])
        assert mine["place"] == other["place"]
        same(mine["losses"], other["losses"][-len(mine["losses"]) :])
        same(mine["state"], other["state"])
        same(mine["moments"], other["moments"])
        assert [_settings(group) for group in mine["groups"]] == [_settings(group) for group in other["groups"]]
    assert expected[0]["state"]
    assert expected[0]["moments"]
    assert expected[0]["groups"]


def _equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def _close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def _settings(group: dict[str, Any]) -> Any:
    # Files of the whole state have lists for tuples, and names in another order.
    values = [group[key] for key in ("lr", "initial_lr", "weight_decay", "eps")]
    return sorted(group["params"]), values, [*group["betas"]]


_ELSEWHERE = pytest.mark.filterwarnings("ignore:The dirpath has changed")


@pytest.mark.full  # two programs
@pytest.mark.parametrize(
    ("num_ranks", "kind", "more"),
    [
        full(1, "sharded", {}),
        (2, "sharded", {"accumulate_grad_batches": 2}),
        full(1, "consolidated", {}),
        full(1, "full", {"accumulate_grad_batches": 2}),
        full(2, "full", {}),
        full(2, "sharded", {"tensor": 2}),
        full(2, "full", {"tensor": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize(("saver", "loader"), [full("lightning", "ours"), ("ours", "lightning")])
@_ELSEWHERE
def test_the_other_goes_on_bit_for_bit(
    tmp_path: Path, saver: str, loader: str, num_ranks: int, kind: str, more: dict[str, Any]
) -> None:
    whole, own, other = _runs(tmp_path, saver, loader, num_ranks, kind, **more)
    _assert_goes_on(own, whole, _equal)
    _assert_goes_on(other, whole, _equal)


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize(("saver", "loader"), [("lightning", "ours"), ("ours", "lightning")])
@_ELSEWHERE
@pytest.mark.full
def test_hybrid_adam_and_adamw_go_on_from_each_other(tmp_path: Path, saver: str, loader: str, kind: str) -> None:
    """Their states and settings are the same; their rounding is not."""
    whole, own, other = _runs(tmp_path, saver, loader, 1, kind, "hybrid")
    _assert_goes_on(own, whole, _equal)
    _assert_goes_on(other, whole, _close)
