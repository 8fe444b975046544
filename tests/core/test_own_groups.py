"""Process groups end: with `close`, or, of what was dropped, when others are made."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_elixir.core.comm import make_comm
from lightning_elixir.errors import StateError
from tests.helpers.dist import run_ranks
from tests.helpers.groups import engines_one_after_the_other, open_groups

CPU = torch.device("cpu")


@pytest.mark.full
def test_groups_of_a_dropped_engine_end_with_the_next_one_and_those_of_a_closed_one_at_once() -> None:
    for before, first, dropped, second, closed in run_ranks(engines_one_after_the_other, 2, fresh=True):
        assert first == dropped == second
        assert closed[0] == before[0] == first[0] - 3
        assert closed[1] < first[1]


def drop_with_a_message_under_way() -> float:
    """Rank 0 drops what it waits for others in; rank 1, which never comes there, keeps its end of it."""
    first = make_comm(None, CPU)
    kept = first if dist.get_rank() else None
    if kept is None:
        first.reduce_scatter_mean(torch.zeros(2), torch.zeros(4))
    del first
    begin_s = time.monotonic()
    second = make_comm(None, CPU)
    heard = second.exchange([dist.get_rank()])
    taken_s = time.monotonic() - begin_s
    assert heard == [[0], [1]]
    second.close()
    if kept is not None:
        kept.close()
    return taken_s


def test_a_group_with_a_message_that_never_ends_is_not_waited_for() -> None:
    assert max(run_ranks(drop_with_a_message_under_way, 2, timeout_s=60.0, fresh=True)) < 10


def groups_of_parts() -> list[tuple[int, int]]:
    seen = []
    for _ in range(2):
        world = make_comm(None, CPU)
        part = world.part([[0, 2], [1, 3]], has_reductions=True)
        heard = part.exchange([dist.get_rank()])
        assert heard == ([[0], [2]] if dist.get_rank() % 2 == 0 else [[1], [3]])
        part.close()
        with pytest.raises(StateError, match=r"close\(\) was called"):
            part.exchange([0])
        world.close()
        seen.append(open_groups())
    return [*seen, open_groups()]


@pytest.mark.full
def test_parts_of_the_ranks_end_and_are_made_again() -> None:
    for seen in run_ranks(groups_of_parts, 4):
        assert {groups for groups, _ in seen} == {1}


def the_users_groups() -> bool:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=30))
    comm = make_comm(group, CPU)
    comm.close()
    flat = torch.ones(1)
    dist.all_reduce(flat, group=group)
    dist.all_reduce(flat)
    return float(flat) == 4


def test_the_users_groups_stay() -> None:
    assert run_ranks(the_users_groups, 2) == [True, True]
