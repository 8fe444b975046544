from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_elixir.core.comm import make_comm
from lightning_elixir.core.storages import storage_use_count
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


def exchange_of_unequal_lengths() -> list[list[int]]:
    comm = make_comm(None, torch.device("cpu"))
    heard = comm.exchange(list(range(200)) if dist.get_rank() == 0 else [7])
    comm.close()
    return heard


def test_a_long_message_of_one_rank_is_heard_whole_by_all() -> None:
    assert run_ranks(exchange_of_unequal_lengths, 2, timeout_s=30.0) == [[list(range(200)), [7]]] * 2


def mean_of_three() -> float:
    comm = make_comm(None, torch.device("cpu"))
    shard = torch.zeros(1, dtype=torch.bfloat16)
    pending = comm.reduce_scatter_mean(shard, torch.full((3,), 1.0 if dist.get_rank() else 256.0, dtype=torch.bfloat16))
    assert pending is not None
    pending.wait()
    comm.close()
    return float(shard)


def test_gradients_of_16_bits_are_summed_in_fp32() -> None:
    """In bf16, 256 + 1 is 256."""
    assert run_ranks(mean_of_three, 3) == [86.0] * 3


def gathers_that_keep_memory() -> int:
    comm = make_comm(None, torch.device("cpu"))
    flat = torch.zeros(1024 * comm.world_size)
    storage = flat.untyped_storage()
    before, kept = storage_use_count(storage), 0
    for _ in range(300):
        comm.all_gather(flat)
        kept += storage_use_count(storage) > before
    comm.close()
    return kept


def test_what_is_gathered_is_shared_with_nobody_afterwards() -> None:
    """Or it would look as if a user kept a tensor over it, on one rank and not on another."""
    assert run_ranks(gathers_that_keep_memory, 3, timeout_s=60.0) == [0] * 3


def groups_after_rounds(is_closed: bool) -> list[int]:
    """How many groups torch knows after each of several comms, with a part and one apart, which go in one way."""
    numbers = []
    for _ in range(4):
        comm = make_comm(None, torch.device("cpu"))
        part = comm.part([[0, 1], [2]], has_reductions=True)
        apart = comm.apart()
        for one in (comm, apart, part):
            one.exchange([dist.get_rank()])
        if is_closed:
            part.close()
            comm.close()
        del comm, part, apart, one
        gc.collect()
        numbers.append(len(dist.distributed_c10d._world.pg_map))
    return numbers


def closed_after_a_new_start(path: str) -> list[int]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    comm = make_comm(None, torch.device("cpu"))
    part = comm.part([[0, 1], [2]], has_reductions=True)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    part.close()
    comm.close()
    again = make_comm(None, torch.device("cpu"))
    rows = again.exchange([rank])
    again.close()
    return [row[0] for row in rows]


def test_what_is_closed_may_have_lost_its_process_group(tmp_path: Path) -> None:
    """Users have ended it, and begun another one."""
    assert run_ranks(closed_after_a_new_start, 3, str(tmp_path / "store")) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("is_closed", [True, False])
def test_groups_go_with_what_made_them(is_closed: bool) -> None:
    for numbers in run_ranks(groups_after_rounds, 3, is_closed):
        assert len(set(numbers)) == 1
