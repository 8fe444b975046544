"""`lightning-elixir bench-hardware`: measure this machine, alone or under torchrun."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lightning_elixir.cli.tables import print_hardware
from lightning_elixir.errors import PlanError
from lightning_elixir.plan.hardware import save_hardware
from lightning_elixir.profiling.hardware import profile_hardware


def run_bench(options: argparse.Namespace) -> int:
    """The command. Collective under torchrun; rank 0 prints and writes.

    Raises:
        PlanError: The figures cannot be written where they should.
        StorageError: `--nvme-dir` cannot be written to.
    """
    with _ranks() as (rank, local_rank, local_world_size):
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = torch.device("cpu") if accelerator is None else torch.device(accelerator.type, local_rank)
        spec = profile_hardware(
            device=device,
            local_world_size=local_world_size,
            nvme_dir=options.nvme_dir,
            refresh=options.refresh,
        )
        if rank != 0:
            return 0
        print_hardware(spec)
        if options.out:
            try:
                save_hardware(spec, options.out)
            except OSError as error:
                raise PlanError(f"cannot write {options.out}: {error.strerror}") from error
    return 0


@contextmanager
def _ranks() -> Iterator[tuple[int, int, int]]:
    """(rank, its number on this host, ranks of this host), with the process group that torchrun asks for."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield 0, 0, 1
        return
    is_ours = not dist.is_initialized()
    if is_ours:
        dist.init_process_group()
    try:
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        yield dist.get_rank(), int(os.environ.get("LOCAL_RANK", "0")), local_world_size
    finally:
        if is_ours:
            dist.destroy_process_group()
