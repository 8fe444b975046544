"""FSDP2 loads our sharded checkpoints, and we load its: as Lightning's ModelParallelStrategy saves and loads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import full
from tests.strategy.models import TIGHT, Net, assert_same_state, fit, make_data, make_trainer
from tests.strategy.sharded import SHARDED, assert_same_dump, dump

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def _fsdp2(optimizer_name: str) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(optimizer_name)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
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
        plain.connect(Net())
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


def _load_by_us(path: Path, optimizer_name: str) -> Any:
    trainer = make_trainer(ElixirStrategy(**TIGHT), devices=_world_size(), max_epochs=0)
    trainer.fit(Net(optimizer_name), make_data(), ckpt_path=str(path))
    return dump(trainer)


def _world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def _save_by_us(path: Path, optimizer_name: str) -> Any:
    trainer, _, _ = fit(
        ElixirStrategy(**TIGHT, **SHARDED), lambda: Net(optimizer_name), devices=_world_size(), max_epochs=1
    )
    trainer.save_checkpoint(path)
    return dump(trainer)


@pytest.mark.parametrize(("num_ranks", "optimizer"), [full(1, "adamw"), (3, "hybrid")])
@pytest.mark.filterwarnings("ignore:.*max_epochs=0")
def test_we_load_what_fsdp2_saved(tmp_path: Path, num_ranks: int, optimizer: str) -> None:
    state, states = run_ranks(_save_by_fsdp2, 2, tmp_path / "one")[0]
    actual = run_ranks(_load_by_us, num_ranks, tmp_path / "one", optimizer, init_group=False)[0]
    assert_same_state(actual[0], state)
    expected = _by_number(states)
    assert actual[1]["state"].keys() == expected.keys()
    for number, entries in expected.items():
        assert_same_state(actual[1]["state"][number], {key: entries[key] for key in actual[1]["state"][number]})
    assert actual[1]["param_groups"][0]["lr"] == 1e-2


@pytest.mark.parametrize(("num_ranks", "optimizer"), [(3, "adamw"), full(2, "hybrid")])
def test_fsdp2_loads_what_we_saved(tmp_path: Path, num_ranks: int, optimizer: str) -> None:
    expected = run_ranks(_save_by_us, num_ranks, tmp_path / "one", optimizer, init_group=False)[0]
    state, states = run_ranks(_load_by_fsdp2, 2, tmp_path / "one", optimizer)[0]
    groups = [{k: v for k, v in expected[1]["param_groups"][0].items() if k in states["param_groups"][0]}]
    groups[0]["params"] = list(range(len(groups[0]["params"])))
    found = {**states["param_groups"][0], "params": groups[0]["params"]}
    found = {k: v for k, v in found.items() if k in groups[0]}
    actual = (state, {"state": _by_number(states), "param_groups": [found]})
    assert_same_dump(actual, (expected[0], {**expected[1], "param_groups": groups}))
