"""Which process groups there are, and what of them engines leave behind."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.plans import make_plan
from tests.helpers.zoo import ZOO, make


def open_groups() -> tuple[int, int]:
    """How many groups torch keeps, and how many threads of gloo's this process has."""
    threads = 0
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            threads += "gloo" in Path(f"/proc/self/task/{task}/comm").read_text()
    return len(_world.pg_map), threads


def engines_one_after_the_other(device_type: str = "cpu") -> list[tuple[int, int]]:
    """`open_groups` before there is an engine, with one and when it was dropped, with a second one, and when that was
    closed, on each rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
    seen = [open_groups()]
    for _ in range(2):
        model = make("mlp", seed=rank)
        plan = make_plan(model, world_size=world_size, placement_policy="cpu", chunk_size=8 * 1024)
        module = ElixirModule(model, plan, device=device)
        optimizer = ElixirOptimizer(module, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
        optimizer.backward(ZOO["mlp"].loss(module, rank))
        optimizer.step()
        seen.append(open_groups())
        if len(seen) == 4:
            module.close()
        del model, module, optimizer
        gc.collect()
        seen.append(open_groups())
    return seen
