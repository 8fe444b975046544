"""What a rank makes of the others' messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from lightning_elixir.core.comm import SoloComm
from lightning_elixir.core.waits import SETUP, Call
from lightning_elixir.runtime.agreement import Agreement, Meeting


class Told(SoloComm):
    """All ranks have sent this."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def exchange(self, message: object, call: Call = SETUP) -> list[list[int]]:
        assert message in self.rows
        return self.rows


class Work:
    is_computing = True
    num_ready = 0

    def __init__(self) -> None:
        self.joined: list[tuple[list[int], list[int]]] = []

    def join(self, ids: Sequence[int], mine: Collection[int]) -> None:
        self.joined.append((list(ids), list(mine)))

    def reduce_until(self, count: int) -> None:
        assert count == 0


@pytest.mark.parametrize(("wanted", "candidates"), [([5], [2, 7, 3]), ([4], [3, 2])])
def test_all_ranks_gather_and_prefetch_in_one_order(wanted: list[int], candidates: list[int]) -> None:
    """Whatever each needs first: a collective must be of one chunk."""
    work = Work()
    rows = [[Meeting.WANT, 0, 1, 5, 2, 7, 3], [Meeting.WANT, 0, 1, 4, 3, 2]]
    assert Agreement(Told(rows), work).want(wanted, candidates) == (2, 3)
    assert work.joined == [([4, 5], wanted)]
