"""Training on several ranks, and what plain PyTorch gives over all their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_elixir.core.staging import Uploads
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.runtime import build
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.once import computed_once
from tests.helpers.plans import make_plan
from tests.helpers.zoo import ZOO, make

STEPS = 3


@computed_once
def averaged_plain(
    name: str, world_size: int, micro_batches: int, expert_of_rank: bool = False
) -> dict[str, torch.Tensor]:
    """Plain PyTorch over the batches of all ranks: gradients averaged over ranks, as DDP does."""
    models = [make(name) for _ in range(world_size)]
    loss_of = ZOO[name].loss
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2, foreach=False) for m in models
    ]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            for micro in range(micro_batches):
                loss_of(model, (step * micro_batches + micro) * world_size + rank).backward()
        for parameters in zip(*(m.parameters() for m in models), strict=True):
            grads = [p.grad for p in parameters if p.grad is not None]
            if grads:
                mean = sum(g for g in grads) / world_size
                for p in parameters:
                    p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return models[0].state_dict()


def train_rank(
    name: str, micro_batches: int, options: dict[str, Any], device_type: str = "cpu"
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, loss_of = make(name, seed=rank), ZOO[name].loss  # only rank 0's values count
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
    module = ElixirModule(model, make_plan(model, world_size=world_size, **options), device=device)
    optimizer = ElixirOptimizer(
        module, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    )
    for step in range(STEPS):
        for micro in range(micro_batches):
            optimizer.backward(loss_of(module, (step * micro_batches + micro) * world_size + rank))
        optimizer.step()
        optimizer.zero_grad()
    state = module.full_state_dict()
    stats = module.stats().as_dict()
    module.close()
    return state, stats


def train_copies(
    copies: int, name: str, options: dict[str, Any], device_type: str = "cpu"
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """As `train_rank`, with so many copies of all parameters."""
    mesh = Mesh(dist.get_world_size(), copies=copies)
    return train_rank(name, 2, {**options, "mesh": mesh}, device_type)


OPTIONS: dict[str, dict[str, Any]] = {
    "cuda": {"placement_policy": "cuda", "chunk_size": 16 * 1024},
    "cpu": {"placement_policy": "cpu", "chunk_size": 8 * 1024},
    "cpu_no_prefetch": {"placement_policy": "cpu", "chunk_size": 8 * 1024, "prefetch": False},
    "whole": {"placement_policy": "cpu", "chunk_size": 8 * 1024, "enable_distributed_storage": False},
    "sharded_gpu": {"placement_policy": "const", "chunk_size": 8 * 1024, "offload_optim_frac": 0.5},
    "half_persistent": {"placement_policy": "const", "chunk_size": 8 * 1024, "shard_param_frac": 0.5},
}


def sent_up(train: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Values take the way from the host to a device on the CPU, in small pieces, as they do on a GPU."""
    pieces = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(build.Builder, "_is_far", staticmethod(lambda flat: True))
        monkeypatch.setattr(build, "_PIECE_NUMEL", 300)
        send = Uploads.send
        monkeypatch.setattr(Uploads, "send", lambda self, target: pieces.append(1) or send(self, target))
        return train(*args), len(pieces)
