"""`sharding=`: nodes that hold all parameters each, and what else may be asked of a fit beside that."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_elixir import ElixirStrategy, ElixirWeightAveraging, HybridAdam
from lightning_elixir._lightning import LightningModule, Trainer, pl
from lightning_elixir.errors import PlanError
from lightning_elixir.patterns import Column, Row
from tests.helpers.dist import RankError, run_ranks
from tests.helpers.patterns import EXPERT, Mixture, difference
from tests.helpers.tiers import full, telling

CLOSE = 2e-6  # gradients are summed node by node
DATA = torch.randn(48, 16, generator=torch.Generator().manual_seed(0))
TENSOR = {"layers.*[02468]": Column(), "layers.*[13579]": Row()}


class Model(LightningModule):
    def __init__(self, frozen: int = 0, optimizer: str = "hybrid", raises_on: int = -1, mixture: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))
        self.mixture = Mixture(is_gated=False) if mixture else nn.Identity()
        self.layers[:frozen].requires_grad_(False)
        self.optimizer, self.raises_on = optimizer, raises_on

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for up, down in zip(self.layers[::2], self.layers[1::2], strict=True):
            batch = batch + down(up(batch).relu())
        if self.raises_on == self.global_rank and index == 2:
            batch.register_hook(self._fail)
        return (batch + self.mixture(batch)).square().mean()

    def _fail(self, grad: Tensor) -> None:
        raise RuntimeError("only this rank")

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer == "whole":
            return torch.optim.Adafactor(trained, lr=1e-2)
        return HybridAdam(trained, lr=1e-2, eps=1e-3)


def describe_node(per_node: int) -> tuple[int, int]:
    """Have the environment be what torchrun makes it on such nodes; returns how many ranks there are, and which this
    is."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.pop("NODE_RANK", None)
    os.environ.update(
        LOCAL_RANK=str(rank % per_node),
        LOCAL_WORLD_SIZE=str(per_node),
        GROUP_RANK=str(rank // per_node),
        TORCHELASTIC_RUN_ID="a test",
    )
    return world, rank


def run(
    model: Model, strategy: Any, places: tuple[int, int], of: tuple[int, int], steps: int = 4, **options: Any
) -> Trainer:
    """A fit on so many nodes with so many ranks; every step has the same samples, whatever the number of batches.

    Args:
        model: Is trained.
        strategy: Of the Trainer.
        places: Nodes, and ranks of each.
        of: How many batches there are at a time, and which this rank has.
        steps: Of the optimizer.
        options: Of the Trainer; `resume` is a checkpoint.
    """
    resume = options.pop("resume", None)
    (nodes, per_node), (batches, own) = places, of
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=per_node,
        num_nodes=nodes,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )
    sampler = DistributedSampler(DATA, num_replicas=batches, rank=own, shuffle=False)
    trainer.fit(model, DataLoader(DATA, batch_size=12 // batches, sampler=sampler), ckpt_path=resume)
    return trainer


TIGHT = {"placement_policy": "cpu", "chunk_size": "4KiB", "gpu_memory_limit": "56KiB"}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # Of the model, of the strategy, of the Trainer
    "clipped": ({"frozen": 4}, {}, {"gradient_clip_val": 0.02, "accumulate_grad_batches": 2}),
    "whole_shards": ({}, {"enable_distributed_storage": False}, {}),
    "resident": ({}, {"placement_policy": "cuda", "gpu_memory_limit": None}, {}),
    "nvme": ({}, {"nvme_offload_fraction": 1.0, "nvme_offload_dir": "states"}, {"gradient_clip_val": 0.02}),
    "whole_parameters": ({"optimizer": "whole"}, {}, {}),
    "tensor": ({}, {"tensor_parallel_size": 2, "patterns": TENSOR}, {"gradient_clip_val": 0.02}),
    "expert": ({"mixture": True}, {"expert_parallel_size": 2, "patterns": EXPERT}, {"gradient_clip_val": 0.02}),
    "averaged": ({}, {}, {"callbacks": "average"}),
}


def _options_of(variant: str, is_plain: bool) -> tuple[Model, dict[str, Any], dict[str, Any]]:
    of_model, of_strategy, of_trainer = VARIANTS[variant]
    options = dict(of_trainer)
    if "callbacks" in options:
        averages = pl.callbacks.EMAWeightAveraging(decay=0.5) if is_plain else ElixirWeightAveraging(decay=0.5)
        options["callbacks"] = [averages]
    return Model(**of_model), {**TIGHT, **of_strategy}, options


def fit(nodes: int, per_node: int, sharding: str, variant: str) -> tuple[dict[str, Tensor], Mapping[str, int], int]:
    world, rank = describe_node(per_node)
    model, of_strategy, options = _options_of(variant, is_plain=False)
    strategy = ElixirStrategy(sharding=sharding, **of_strategy)
    tensor = of_strategy.get("tensor_parallel_size", 1)
    run(model, strategy, (nodes, per_node), (world // tensor, rank // tensor), **options)
    stats, copies = strategy.stats(), strategy.plan.num_copies
    return dict(strategy.lightning_module_state_dict()), stats.as_dict(), copies


def plain(variant: str) -> dict[str, Tensor]:
    model, _, options = _options_of(variant, is_plain=True)
    run(model, "auto", (1, 1), (1, 0), **options)
    return dict(model.state_dict())


CASES = [
    (2, 1, "clipped"),  # more ranks on a node: tests/runtime/test_copies.py
    full(3, 1, "clipped"),
    *(full(2, 2, variant) for variant in VARIANTS),
]


@pytest.mark.parametrize(("nodes", "per_node", "variant"), CASES, ids=str)
def test_nodes_with_copies_train_as_one_process(nodes: int, per_node: int, variant: str) -> None:
    runs = run_ranks(fit, nodes * per_node, nodes, per_node, "node", variant, init_group=False)
    state, stats, copies = runs[0]
    assert copies == nodes
    assert stats["reduced_across_bytes"] > 0
    assert (stats["evictions"] > 0) == (stats["prefetches"] > 0) == (variant != "resident")
    assert difference(state, plain(variant)) < (1e-4 if variant == "whole_parameters" else CLOSE)


def both(nodes: int, per_node: int) -> tuple[int, int, list[int]]:
    environment = dict(os.environ)
    held = []
    for sharding in ("world", "node"):
        _, stats, copies = fit(nodes, per_node, sharding, "clipped")
        held.append(stats["held_bytes"]["cpu_states"])
        os.environ.update(environment)
    return copies, nodes, held


@pytest.mark.full
def test_a_copy_takes_its_memory() -> None:
    for copies, nodes, (world, node) in run_ranks(both, 4, 2, 2, init_group=False):
        assert copies == nodes
        assert node == 2 * world


def on_one_node() -> int:
    return fit(1, 2, "node", "resident")[2]


@pytest.mark.full
def test_one_node_is_as_without() -> None:
    assert run_ranks(on_one_node, 2, init_group=False) == [1, 1]


def resumed(first: str, second: str, path: str, kind: str) -> dict[str, Tensor]:
    world, rank = describe_node(2)
    environment = dict(os.environ)
    one = ElixirStrategy(sharding=first, state_dict_type=kind, **TIGHT)
    trainer = run(Model(), one, (2, 2), (world, rank), steps=4, gradient_clip_val=0.02)
    trainer.save_checkpoint(path)
    os.environ.update(environment)
    other = ElixirStrategy(sharding=second, **TIGHT)
    run(Model(), other, (2, 2), (world, rank), steps=8, gradient_clip_val=0.02, resume=path)
    return dict(other.lightning_module_state_dict())


WAYS = [
    ("node", "world", "sharded"),
    ("world", "node", "full"),
    ("world", "node", "sharded"),
    ("node", "world", "full"),
]


@pytest.mark.full
@pytest.mark.parametrize(("first", "second", "kind"), WAYS)
def test_checkpoints_pass_from_one_to_the_other(first: str, second: str, kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    found = run_ranks(resumed, 4, first, second, path, kind, init_group=False)[0]
    model, again = Model(), Model()
    run(model, "auto", (1, 1), (1, 0), steps=4, gradient_clip_val=0.02).save_checkpoint(tmp_path / "plain.ckpt")
    run(again, "auto", (1, 1), (1, 0), steps=8, gradient_clip_val=0.02, resume=str(tmp_path / "plain.ckpt"))
    assert difference(found, dict(again.state_dict())) < CLOSE


def one_fails() -> None:
    world, rank = describe_node(2)
    run(Model(raises_on=3), ElixirStrategy(sharding="node", **TIGHT), (2, 2), (world, rank))


@pytest.mark.full
def test_an_error_of_one_rank_ends_all() -> None:
    with pytest.raises(RankError, match="only this rank"):
        run_ranks(one_fails, 4, init_group=False, timeout_s=60)


def refused(sharding: str, tensor: int) -> str:
    describe_node(1)
    strategy = ElixirStrategy(sharding=sharding, tensor_parallel_size=tensor, patterns=TENSOR, **TIGHT)
    try:
        run(Model(), strategy, (2, 1), (1, 0))
    except PlanError as error:
        return str(error)
    return ""


def test_what_cannot_be_held_by_each_node_is_refused_on_every_rank() -> None:
    told = run_ranks(refused, 2, "node", 2, init_group=False)
    assert all("sharding='node' needs tensor_parallel_size x expert_parallel_size (2) to divide" in t for t in told)


@pytest.mark.parametrize("value", telling(["host", None, True], "host"))
def test_unknown_values(value: Any) -> None:
    with pytest.raises(PlanError, match="unknown sharding"):
        ElixirStrategy(sharding=value)
