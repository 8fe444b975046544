"""`lightning-elixir bench-hardware`: measure this machine, alone or under torchrun."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape

from lightning_elixir.cli.rich_tables import print_hardware
from lightning_elixir.errors import PlanError
from lightning_elixir.plan.hardware import save_hardware
from lightning_elixir.profiling.measured_hardware import FoundHardware, HardwareProbe


def run_bench(options: argparse.Namespace) -> int:
    """The command. Collective under torchrun; rank 0 prints and writes.

    Raises:
        PlanError: The figures cannot be written where they should.
        StorageError: `--nvme-dir` cannot be written to.
    """
    with _ranks() as (rank, local_rank, local_world_size):
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = torch.device("cpu") if accelerator is None else torch.device(accelerator.type, local_rank)
        probe = HardwareProbe(
            device=device, local_world_size=local_world_size, nvme_dir=options.nvme_dir, refresh=options.refresh
        )
        found = probe.find()
        if rank != 0:
            return 0
        print_hardware(found.spec)
        say = Console(highlight=False, soft_wrap=True).print
        say(escape(origin_text(found, options.nvme_dir)))
        if options.out:
            try:
                save_hardware(found.spec, options.out)
            except OSError as error:
                raise PlanError(f"cannot write {options.out}: {error.strerror}") from error
            say(escape(f"Written to {options.out}, for `lightning-elixir plan --hardware {shlex.quote(options.out)}`."))
    return 0


def origin_text(found: FoundHardware, nvme_dir: str | None) -> str:
    """Whether figures are kept ones, from when and where, or why not, and how to measure again.

    Args:
        found: The figures.
        nvme_dir: The folder whose disk was measured as well.
    """
    disk = "" if nvme_dir is None else f" --nvme-dir {shlex.quote(nvme_dir)}"
    again = f"lightning-elixir bench-hardware --refresh{disk}"
    if found.disturbance:
        return (
            f"Measured just now, but {found.disturbance} meanwhile: these figures say little, and are not kept. When"
            f" nothing else runs, measure again: {again}"
        )
    if found.path is None:
        return "Measured just now. The figures could not be kept: every run that needs them measures again."
    if found.stored_at is None:
        return f"Measured just now, and kept in {found.path} for the next time."
    return (
        f"Not measured now: kept since {found.stored_at:%Y-%m-%d %H:%M} in {found.path}. Only the sizes of memory are"
        f" today's. To measure again: {again}"
    )


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
