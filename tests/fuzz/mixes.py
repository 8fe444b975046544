"""Random mixes of parallel patterns, `sharding` and placements under the Trainer, beside plain training on one process
with all batches."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_elixir import ElixirStrategy
from tests.helpers.pattern_fits import Model, Tokens, fit_plain, trainer_of
from tests.helpers.patterns import EXPERT, TENSOR


@dataclass(frozen=True)
class Mix:
    """One of them."""

    kind: str
    """Of `tests.helpers.pattern_fits.make`."""
    tensor: int
    expert: int
    ranks: int
    nodes: int
    options: dict[str, Any] = field(default_factory=dict)
    """Of `ElixirStrategy`."""
    of_trainer: dict[str, Any] = field(default_factory=dict)

    @property
    def batches(self) -> int:
        """How many ranks have batches of their own."""
        return self.ranks // self.tensor


PLACEMENTS: tuple[dict[str, Any], ...] = (
    {"placement_policy": "cpu", "chunk_size": 9000},
    {"placement_policy": "cpu", "chunk_size": 20000},
    {"placement_policy": "auto", "gpu_memory_limit": "250KiB"},
    {"placement_policy": "cuda"},
    {"placement_policy": "const", "shard_param_frac": 0.5, "offload_optim_frac": 0.5, "chunk_size": 9000},
)


def draw(seed: int, most_ranks: int = 4) -> Mix:
    """The same for a seed."""
    rng = random.Random(seed)
    kind = rng.choice(("language", "mixture", "mixture")) + rng.choice(("", "", "+checkpointed"))
    expert = rng.choice((1, 2)) if kind.startswith("mixture") else 1
    tensor = rng.choice([size for size in (1, 2) if size * expert <= most_ranks])
    ranks = rng.choice([n for n in (2, 4) if n <= most_ranks and n % (tensor * expert) == 0])
    options = dict(rng.choice(PLACEMENTS))
    if rng.random() < 0.2:
        options["enable_distributed_storage"] = False
    if rng.random() < 0.2:
        options["activations"] = rng.choice(("recompute", "offload", "auto"))
    if rng.random() < 0.2:
        options["prefetch"] = False
    nodes = 1
    if ranks == 4 and tensor * expert <= 2 and rng.random() < 0.5:
        nodes, options["sharding"] = 2, rng.choice(("node", "auto", "world"))
    of_trainer: dict[str, Any] = {"accumulate_grad_batches": rng.choice((1, 1, 2))}
    return Mix(kind, tensor, expert, ranks, nodes, options, of_trainer)


def fit_mix(mix: Mix) -> dict[str, Tensor]:
    """On each rank, the whole state after training."""
    rank, on_each = int(os.environ["RANK"]), mix.ranks // mix.nodes
    os.environ.pop("NODE_RANK", None)
    os.environ.update(LOCAL_RANK=str(rank % on_each), LOCAL_WORLD_SIZE=str(on_each))
    os.environ.update(GROUP_RANK=str(rank // on_each), TORCHELASTIC_RUN_ID="a test")
    every = (TENSOR if mix.tensor > 1 else {}) | (EXPERT if mix.expert > 1 else {})
    patterns = {key if str(key).startswith("*") else f"net.{key}": pattern for key, pattern in every.items()}
    strategy = ElixirStrategy(
        tensor_parallel_size=mix.tensor, expert_parallel_size=mix.expert, patterns=patterns or None, **mix.options
    )
    sampler = DistributedSampler(Tokens(), num_replicas=mix.batches, rank=rank // mix.tensor, shuffle=False)
    trainer = trainer_of(strategy, on_each, num_nodes=mix.nodes, gradient_clip_val=1.0, **mix.of_trainer)
    model = Model(mix.kind)
    trainer.fit(model, DataLoader(Tokens(), batch_size=2, sampler=sampler))
    return {name: value.clone() for name, value in model.state_dict().items()}


def fit_without(mix: Mix) -> dict[str, Tensor]:
    """Plain training on all their batches."""
    return fit_plain(mix.kind, mix.batches, **mix.of_trainer)
