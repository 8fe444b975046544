"""FSDP2 on several ranks, for `defaults.py`: processes, and a model that is sharded over them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

Shard = Callable[[nn.Module], nn.Module]
"""Takes a model on `meta`, and gives it with this rank's shards on its device."""


def run_fsdp2(work: Callable[[int, Shard], None], num_ranks: int) -> None:
    """Fork as many processes, and have each do `work(rank, shard)`. CUDA must not be in use here.

    Raises:
        ProcessRaisedException, ProcessExitedException: One of them has failed; all have ended.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    run = partial(_rank, work=work, num_ranks=num_ranks, port=port)
    torch.multiprocessing.start_processes(run, nprocs=num_ranks, start_method="fork")


def _rank(rank: int, work: Callable[[int, Shard], None], num_ranks: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if is_cuda else "gloo", rank=rank, world_size=num_ranks)
    work(rank, partial(_sharded, torch.device("cuda", rank) if is_cuda else torch.device("cpu")))
    dist.destroy_process_group()


def _sharded(device: torch.device, model: nn.Module) -> nn.Module:
    """Each layer of a stack by itself, in bf16 beside fp32 shards, with small random values."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for stack in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
        for layer in stack:
            fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            local: Any = parameter.to_local()  # type: ignore[attr-defined]
            local.fill_(1.0) if parameter.dim() == 1 else local.normal_(std=0.02)
        for module in model.modules():
            if isinstance(getattr(module, "inv_freq", None), torch.Tensor) and hasattr(module, "config"):
                rotary: Any = module
                fresh = type(rotary)(rotary.config)
                rotary.inv_freq.copy_(fresh.inv_freq)
                rotary.original_inv_freq = fresh.inv_freq.to(device)
    return model
