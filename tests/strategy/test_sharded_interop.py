"""FSDP2 and plain PyTorch load our sharded checkpoints, saved under whatever mesh, and we load those of FSDP2: as
Lightning's ModelParallelStrategy saves and loads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_elixir.patterns import Column, Expert, ParallelPattern, Row
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.dist import run_ranks
from tests.helpers.patterns import Mixture
from tests.helpers.tiers import full
from tests.strategy.models import TIGHT, Net, assert_same_state, fit, make_data, make_trainer
from tests.strategy.sharded import SHARDED, assert_same_dump, dump

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class MixedNet(Net):
    """With experts before the layers, for what both axes of a mesh can cut."""

    def _make(self) -> None:
        super()._make()
        self.mixture = Mixture(is_gated=False)

    def forward(self, x: Tensor) -> Tensor:
        width = self.mixture.gate.in_features
        return super().forward(torch.cat([self.mixture(x[:, :width]), x[:, width:]], 1))


def _ours(tensor: int, expert: int) -> ElixirStrategy:
    patterns: dict[str, ParallelPattern] = {"layers.*.up": Column(), "layers.*.down": Row()} if tensor > 1 else {}
    if expert > 1:
        patterns["mixture.experts"] = Expert()
    sizes = {"tensor_parallel_size": tensor, "expert_parallel_size": expert, "patterns": patterns or None}
    return ElixirStrategy(**TIGHT, **SHARDED, **sizes)


def _fsdp2(optimizer_name: str) -> tuple[Net, torch.optim.Optimizer]:
    model = MixedNet(optimizer_name)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in [*model.layers, model.mixture.experts]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return get_model_state_dict(model, options=_WHOLE), get_optimizer_state_dict(model, optimizer, options=_WHOLE)


def _save_by_fsdp2(path: Path) -> Any:
    model, optimizer = _fsdp2("adamw")
    for batch in list(make_data(12)):
        model.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    states = get_optimizer_state_dict(model, optimizer)
    dcp.save({"state_dict": get_model_state_dict(model), "optimizer_0": states}, checkpoint_id=path)
    if dist.get_rank() == 0:
        trainer = make_trainer("auto")
        plain = trainer.strategy
        plain.connect(MixedNet())
        loops = {"fit_loop": trainer.fit_loop.state_dict()}
        meta = {"epoch": 0, "global_step": 3, "pytorch-lightning_version": "2.6.0", "loops": loops}
        torch.save({**meta, "callbacks": {}, "lr_schedulers": []}, path / "meta.pt")
    return _whole(model, optimizer)


def _load_by_fsdp2(path: Path, optimizer_name: str) -> Any:
    model, optimizer = _fsdp2(optimizer_name)
    state = {"state_dict": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["state_dict"])
    states = {"optimizer_0": get_optimizer_state_dict(model, optimizer)}
    dcp.load(states, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, optim_state_dict=states["optimizer_0"])
    return _whole(model, optimizer)


def _by_number(states: Any) -> Any:
    names = states["param_groups"][0]["params"]
    return {number: states["state"][name] for number, name in enumerate(names)}


def _load_by_plain_pytorch(path: Path) -> dict[str, Tensor]:
    model = MixedNet()
    with torch.no_grad():  # what is not loaded would show
        for p in model.parameters():
            p.fill_(9.0)
    state = {"state_dict": model.state_dict()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state["state_dict"]


def _load_by_us(path: Path, optimizer_name: str, mesh: tuple[int, int]) -> Any:
    trainer = make_trainer(_ours(*mesh), devices=_world_size(), max_epochs=0)
    trainer.fit(MixedNet(optimizer_name), make_data(), ckpt_path=str(path))
    return dump(trainer)


def _world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def _save_by_us(path: Path, optimizer_name: str, mesh: tuple[int, int]) -> Any:
    trainer, _, _ = fit(_ours(*mesh), lambda: MixedNet(optimizer_name), devices=_world_size(), max_epochs=1)
    trainer.save_checkpoint(path)
    return dump(trainer)


WHOLE, LAYERS, EXPERTS, BOTH = (1, 1), (2, 1), (1, 2), (2, 2)
"""Ranks that share layers, and experts."""


@pytest.mark.parametrize(
    ("num_ranks", "mesh", "optimizer"),
    [
        full(1, WHOLE, "adamw"),
        full(3, WHOLE, "hybrid"),
        (2, LAYERS, "adamw"),
        full(2, EXPERTS, "hybrid"),
        full(4, BOTH, "hybrid"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*max_epochs=0")
def test_we_load_what_fsdp2_saved(tmp_path: Path, num_ranks: int, mesh: tuple[int, int], optimizer: str) -> None:
    state, states = run_ranks(_save_by_fsdp2, 2, tmp_path / "one")[0]
    actual = run_ranks(_load_by_us, num_ranks, tmp_path / "one", optimizer, mesh, init_group=False)[0]
    assert_same_state(actual[0], state)
    expected = _by_number(states)
    assert actual[1]["state"].keys() == expected.keys()
    for number, entries in expected.items():
        assert_same_state(actual[1]["state"][number], {key: entries[key] for key in actual[1]["state"][number]})
    assert actual[1]["param_groups"][0]["lr"] == 1e-2


@pytest.mark.parametrize(
    ("num_ranks", "mesh", "optimizer"),
    [
        (3, WHOLE, "adamw"),
        full(2, WHOLE, "hybrid"),
        full(2, LAYERS, "adamw"),
        full(2, EXPERTS, "hybrid"),
        full(4, BOTH, "adamw"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_fsdp2_and_plain_pytorch_load_what_we_saved(
    tmp_path: Path, num_ranks: int, mesh: tuple[int, int], optimizer: str
) -> None:
    expected = run_ranks(_save_by_us, num_ranks, tmp_path / "one", optimizer, mesh, init_group=False)[0]
    assert_same_state(_load_by_plain_pytorch(tmp_path / "one"), expected[0])
    state, states = run_ranks(_load_by_fsdp2, 2, tmp_path / "one", optimizer)[0]
    groups = [{k: v for k, v in expected[1]["param_groups"][0].items() if k in states["param_groups"][0]}]
    groups[0]["params"] = list(range(len(groups[0]["params"])))
    found = {**states["param_groups"][0], "params": groups[0]["params"]}
    found = {k: v for k, v in found.items() if k in groups[0]}
    actual = (state, {"state": _by_number(states), "param_groups": [found]})
    assert_same_dump(actual, (expected[0], {**expected[1], "param_groups": groups}))
