"""The order of moves between placements."""

from __future__ import annotations

import itertools
import random

from lightning_elixir.plan.moving import order_of_moves


def _peaks(changes: list[tuple[int, int]], order: list[int]) -> tuple[int, int]:
    device = list(itertools.accumulate((changes[i][0] for i in order), initial=0))
    host = list(itertools.accumulate((changes[i][1] for i in order), initial=0))
    return max(device), max(host)


def test_all_are_moved_once() -> None:
    dice = random.Random(0)
    for count in range(20):
        changes = [(dice.randint(-9, 9), dice.randint(-9, 9)) for _ in range(count)]
        assert sorted(order_of_moves(changes)) == list(range(count))


def test_what_leaves_comes_before_what_comes() -> None:
    to_disk, from_disk, to_device, to_host = (0, -8), (0, 8), (8, -8), (-8, 8)
    changes = [from_disk, to_device, to_host, to_disk] * 5
    order = order_of_moves(changes)
    assert order[0] % 4 == 3
    assert _peaks(changes, order) == (0, 0)


def test_two_memories_that_change_places_need_one_chunk_more_on_the_host() -> None:
    changes = [(8, -8)] * 6 + [(-8, 8)] * 6
    assert _peaks(changes, order_of_moves(changes)) == (0, 8)


def test_a_memory_that_fills_up_anyway_takes_its_own_early() -> None:
    """Where the device holds more at last, what comes to it makes room on the host for what comes from a disk."""
    from_disk, to_device = (0, 8), (8, -8)
    changes = [from_disk] * 10 + [to_device] * 10
    assert _peaks(changes, order_of_moves(changes)) == (80, 0)


def test_many_chunks_among_three_memories_need_one_chunk_more() -> None:
    """Than the placement with more has anyway, on the device and on the host."""
    dice = random.Random(2)
    places = {"device": (12, 0), "host": (0, 14), "disk": (0, 2), "all on disk": (0, 0)}
    for _ in range(200):
        moves = [dice.choices(list(places.values()), k=2) for _ in range(dice.randint(1, 40))]
        changes = [(new[0] - old[0], new[1] - old[1]) for old, new in moves]
        device, host = _peaks(changes, order_of_moves(changes))
        assert device <= max(0, sum(change[0] for change in changes)) + 12
        assert host <= max(0, sum(change[1] for change in changes)) + 14


def test_it_is_about_as_good_as_the_best() -> None:
    dice = random.Random(1)
    for _ in range(100):
        changes = [dice.choice([(0, -4), (0, 4), (4, -4), (-4, 4), (4, 0), (-4, 0)]) for _ in range(6)]
        found = _peaks(changes, order_of_moves(changes))
        best = min(_peaks(changes, list(order)) for order in itertools.permutations(range(6)))
        assert found[0] == best[0]
        assert found[1] <= best[1] + 8  # two chunks
