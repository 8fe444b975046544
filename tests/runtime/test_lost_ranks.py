"""Without Lightning: a disk that fails on one rank ends the others soon, with an error that names it."""

from __future__ import annotations

import errno
import os
from typing import Any

import torch
import torch.distributed as dist

from lightning_elixir.plan.types import UpdateTiming
from lightning_elixir.storage.nvme import direct
from tests.helpers.dist import run_ranks
from tests.helpers.failures import check_heard, heard_by
from tests.helpers.nvme import BF16
from tests.helpers.tiers import crossed
from tests.helpers.update_timing import new_training, step

VICTIM = 1


def _disk_fails(site: str, call: str) -> Any:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    timing = UpdateTiming.BEHIND_FORWARD
    module, optimizer = new_training(BF16, site, torch.device("cpu"), timing, world_size=world_size)
    for number in range(2):
        step(module, optimizer, BF16, number, rank)
    optimizer.synchronize()

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def train() -> None:
        for number in range(2, 6):
            step(module, optimizer, BF16, number, rank)

    if rank == VICTIM:
        setattr(direct.os, call, fail)
    return heard_by(rank, world_size, train)


@crossed(told=["nvme-preadv-2"], site=["nvme", "nvme_param"], call=["preadv", "pwritev"], world_size=[2, 3])
def test_disk_of_one_rank_fails(site: str, call: str, world_size: int) -> None:
    everyone = run_ranks(_disk_fails, world_size, site, call, fresh=True)
    check_heard(everyone, VICTIM, "StorageError", "Input/output error")
