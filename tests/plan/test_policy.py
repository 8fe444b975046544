from __future__ import annotations

from random import Random

import pytest

from lightning_elixir.plan.policy import CachePolicy
from lightning_elixir.plan.types import AccessTrace, Acquire, Drop
from tests.plan.traces import unpinned


def test_next_use_counts_on_past_the_end() -> None:
    policy = CachePolicy(unpinned(0, 1, 0, (2, 1)))
    assert [policy.next_use(0, p) for p in range(5)] == [0, 2, 2, 4, 4]
    assert [policy.next_use(1, p) for p in range(5)] == [1, 1, 3, 3, 5]
    assert policy.next_use(7, 0) == 8  # never used: after everything else


def test_next_use_equals_a_linear_search() -> None:
    random = Random(1)
    for _ in range(200):
        accesses = [random.sample(range(4), random.choice((1, 2))) for _ in range(random.randint(1, 12))]
        policy = CachePolicy(unpinned(*accesses))
        twice = accesses * 2
        for position in range(len(accesses) + 1):
            for chunk_id in range(5):
                uses = [p for p in range(position, len(twice)) if chunk_id in twice[p]]
                expected = uses[0] if uses and chunk_id < 4 else 2 * len(accesses)
                assert policy.next_use(chunk_id, position) == expected


def test_positions_count_acquires_only() -> None:
    trace = AccessTrace((Acquire((0,), True), Acquire((1,), False), Drop((0,)), Acquire((2,), False)))
    policy = CachePolicy(trace)
    assert len(policy) == 3
    assert policy.next_use(2, 0) == 2


def test_upcoming_names_each_chunk_once_from_its_next_turn() -> None:
    policy = CachePolicy(unpinned(0, 0, (1, 2), 2, 0, 3))
    turns = policy.turns_of(range(4))
    assert list(turns.upcoming(0, 9).items()) == [(0, 0), (1, 2), (2, 2), (3, 5)]
    assert list(turns.upcoming(0, 2).items()) == [(0, 0), (1, 2)]
    assert list(turns.upcoming(3, 9).items()) == [(0, 4), (3, 5)]
    assert turns.upcoming(6, 9) == {}
    assert list(policy.turns_of({2, 3}).upcoming(0, 2).items()) == [(2, 2), (3, 5)]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_what_is_absent_first_is_told_with_where_it_comes_near(most: int) -> None:
    random = Random(most)
    for _ in range(200):
        accesses = [tuple(random.sample(range(5), random.randint(1, 2))) for _ in range(12)]
        turns, there = CachePolicy(unpinned(*accesses)).turns_of(range(5)), set(random.sample(range(5), 3))
        for position in range(13):
            chunk_id, at, since = turns.first_absent(position, 0, most, there)
            absent = [(i, use) for i, use in turns.upcoming(position, 5).items() if i not in there]
            assert (chunk_id, at) == (absent[0] if absent else (-1, 12))
            near = (p for p in range(position, at + 1) if chunk_id in turns.upcoming(p, most))
            assert since == next(near, at + 1)
            assert turns.first_absent(position, at, most, there) == (chunk_id, at, since)


def test_find_looks_only_inside_its_window() -> None:
    policy = CachePolicy(unpinned(0, 1, 2, 1))
    assert policy.find((1,), 2, 2) == 3
    assert policy.find((1,), 2, 1) is None
    assert policy.find((1, 2), 0, 9) is None
    assert policy.access(4) is None


def test_an_empty_trace_is_fine() -> None:
    policy = CachePolicy(AccessTrace(()))
    assert policy.next_use(0, 0) == 0
    assert policy.turns_of({0}).upcoming(0, 1) == {}
