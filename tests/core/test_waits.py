"""Who waits for whom, told from what the ranks have written."""

from __future__ import annotations

from typing import Any

from lightning_elixir.core.waits import _ring


def record(number: int, needs: list[int], place: str = "data", **passed: int) -> dict[str, Any]:
    """A rank in collective `number` of a place; `passed`: how many of other places it has come to."""
    return {"place": place, "number": number, "needs": needs, "passed": {place: number, **passed}}


def test_ranks_in_one_collective_wait_for_a_third_and_not_for_each_other() -> None:
    """However long: the third one computes, and has written nothing."""
    assert _ring(0, {0: record(5, [1, 2]), 1: record(5, [0, 2])}) == []


def test_ranks_in_collectives_that_the_others_have_not_come_to_are_a_ring() -> None:
    records = {0: record(5, [1], control=0), 1: record(1, [0], place="control", data=4)}
    assert sorted(_ring(0, records)) == [0, 1]
    assert sorted(_ring(1, records)) == [0, 1]


def test_who_only_waits_for_a_ring_is_not_in_it() -> None:
    records = {
        0: record(5, [1], a=0, b=0),
        1: record(1, [2], place="a", data=4, b=0),
        2: record(1, [1], place="b", a=0),
    }
    assert _ring(0, records) == []
    assert sorted(_ring(1, records)) == [1, 2]
