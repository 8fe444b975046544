from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_elixir.core.comm import make_comm
from tests.helpers.dist import run_ranks


def open_and_close(ranks: list[int]) -> list[list[list[int]]]:
    group = dist.new_group(ranks, use_local_synchronization=True)
    rank = dist.get_rank()
    if rank not in ranks:
        return []
    heard = []
    for time in range(3):
        comm = make_comm(group, torch.device("cpu"))
        flat = torch.zeros(2 * len(ranks))
        shard = torch.zeros(2)
        pending = comm.reduce_scatter_mean(shard, flat)
        if pending is not None:
            pending.wait()
        heard.append(comm.exchange([rank, time]))
        comm.close()
    return heard


@pytest.mark.parametrize(("world_size", "ranks"), [(2, [0, 1]), (3, [0, 2])])
def test_one_process_group_serves_one_comm_after_the_other(world_size: int, ranks: list[int]) -> None:
    expected = [[[rank, time] for rank in ranks] for time in range(3)]
    for rank, heard in enumerate(run_ranks(open_and_close, world_size, ranks)):
        assert heard == (expected if rank in ranks else [])
