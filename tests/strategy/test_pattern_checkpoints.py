"""Checkpoints of ranks that share operators: names and shapes are those of the whole model, whoever had what part."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_elixir import ElixirStrategy, HybridAdam
from lightning_elixir._lightning import LightningModule, Trainer
from lightning_elixir.checkpoint.consolidate import consolidate
from tests.helpers.dist import run_ranks
from tests.helpers.patterns import TOKENS, VOCABULARY, Case, ParallelPattern, difference
from tests.helpers.tiers import full, telling

CLOSE = 1e-5


def case_of(is_fused: bool) -> Case:
    """Its model is of what fused operators are for where they are swapped in."""
    return Case(options={"is_gated": is_fused})


def patterns_of(is_fused: bool) -> dict[str | type, ParallelPattern]:
    found = case_of(is_fused).patterns
    return {f"net.{key}" if str(key)[0] != "*" else key: value for key, value in found.items()}


class Tokens(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8  # two batches: a run is resumed at the end of an epoch

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(index))


class Model(LightningModule):
    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.is_fused = is_fused
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = case_of(self.is_fused).make()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        assert self.net is not None
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        return HybridAdam(self.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.05)


@functools.cache  # Lightning takes the variables away when a run is over
def place() -> tuple[int, int]:
    """Ranks, and which one this is."""
    return int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])


def fit(
    mesh: tuple[int, int],
    steps: int,
    resume: str | None,
    save: str | None,
    sharded: bool = False,
    plain: bool = False,
    is_fused: bool = False,
) -> dict[str, Tensor]:
    """Train on all ranks, with as many samples a step whatever the mesh is; returns the whole model on rank 0.

    Args:
        is_fused: Have a model of which operators can be fused, and fuse them on a mesh of more than one.
    """
    tensor, expert = mesh
    world, rank = (1, 0) if plain else place()
    batches, own = (1, 0) if plain else (world // tensor, rank // tensor)
    model = Model(is_fused)
    strategy: Any = "auto"
    if not plain:
        strategy = ElixirStrategy(
            placement_policy="cpu",
            chunk_size=6000,
            tensor_parallel_size=tensor,
            expert_parallel_size=expert,
            patterns=patterns_of(is_fused) if max(mesh) > 1 else None,
            use_fused_kernels=is_fused and max(mesh) > 1,
            state_dict_type="sharded" if sharded else "full",
        )
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1 if plain else world,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
    )
    sampler = DistributedSampler(Tokens(), num_replicas=batches, rank=own, shuffle=False)
    # Samples in the order that the ranks together have them in, so that each step has the same ones.
    trainer.fit(model, DataLoader(Tokens(), batch_size=4 // batches, sampler=sampler), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    state = trainer.strategy.lightning_module_state_dict()
    if sharded:
        return {}
    return {k: v.detach().clone() for k, v in state.items()}


def resumed(first: Sequence[int], second: Sequence[int], path: str, sharded: bool, is_fused: bool) -> dict[str, Tensor]:
    """Two steps under one mesh, a checkpoint, and two more under the other."""
    place.cache_clear()
    environment = dict(os.environ)
    fit(tuple(first), 2, None, path, sharded, is_fused=is_fused)
    os.environ.update(environment)
    return fit(tuple(second), 4, path, None, is_fused=is_fused)


MESHES = [
    pytest.param((2, 1), (1, 2), False, id="tensor_to_expert"),
    pytest.param((1, 2), (2, 1), False, id="expert_to_tensor"),
    pytest.param((1, 1), (2, 1), False, id="data_to_tensor"),
    pytest.param((1, 2), (1, 1), False, id="expert_to_data"),
    pytest.param((1, 2), (1, 1), True, id="fused_expert_to_data"),
    pytest.param((1, 1), (1, 2), True, id="data_to_fused_expert"),
]


@pytest.mark.parametrize("sharded", [full(False), True], ids=["full", "sharded"])
@pytest.mark.parametrize(("first", "second", "is_fused"), telling(MESHES, "tensor_to_expert"))
def test_saved_under_one_mesh_and_loaded_under_another(
    first: tuple[int, int], second: tuple[int, int], is_fused: bool, sharded: bool, tmp_path: Path
) -> None:
    plain = str(tmp_path / "plain.ckpt")
    fit((1, 1), 2, None, plain, plain=True, is_fused=is_fused)
    expected = fit(
        (1, 1), 4, plain, None, plain=True, is_fused=is_fused
    )  # which Lightning begins with other batches than one run has
    found = run_ranks(resumed, 2, first, second, str(tmp_path / "saved"), sharded, is_fused, init_group=False)[0]
    assert difference(found, expected) < CLOSE


@pytest.mark.parametrize("mesh", [(2, 1), full((1, 2)), full((2, 2))], ids=str)
def test_plain_pytorch_and_consolidation_read_what_a_mesh_has_saved(mesh: tuple[int, int], tmp_path: Path) -> None:
    """And the mesh goes on from what plain PyTorch has saved."""
    plain, whole, folder = str(tmp_path / "plain.ckpt"), str(tmp_path / "whole.ckpt"), tmp_path / "folder"
    expected = fit((1, 1), 2, None, plain, plain=True)
    further = run_ranks(_both_kinds, math.prod(mesh), mesh, plain, whole, str(folder), init_group=False)[0]
    saved, theirs = (torch.load(path, weights_only=False) for path in (whole, plain))
    assert difference(saved["state_dict"], expected) < CLOSE
    ours, theirs = saved["optimizer_states"][0]["state"], theirs["optimizer_states"][0]["state"]
    assert ours.keys() == theirs.keys()
    for number, state in ours.items():
        assert (state["exp_avg"] - theirs[number]["exp_avg"]).abs().max() < CLOSE
    expected = fit((1, 1), 4, plain, None, plain=True)
    assert difference(further, expected) < CLOSE
    assert difference(fit((1, 1), 4, whole, None, plain=True), expected) < CLOSE
    consolidate(folder, tmp_path / "one.ckpt", max_file_bytes=2**30)
    one = torch.load(tmp_path / "one.ckpt", weights_only=False)
    assert difference(one["state_dict"], saved["state_dict"]) == 0
    model = Case().make()
    model.load_state_dict({k.removeprefix("net."): v for k, v in one["state_dict"].items()})


def _both_kinds(mesh: tuple[int, int], plain: str, whole: str, folder: str) -> dict[str, Tensor]:
    """Save two steps in either way; returns the whole model after two more than `plain` has."""
    place.cache_clear()
    environment = dict(os.environ)
    fit(mesh, 2, None, whole)
    os.environ.update(environment)
    fit(mesh, 2, None, folder, sharded=True)
    os.environ.update(environment)
    return fit(mesh, 4, plain, None)
