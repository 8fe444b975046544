"""Who waits for whom, told from what the ranks have written."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest

from lightning_elixir.core.waits import SETUP, _ring, position_of
from tests.helpers.dist import run_processes


def record(number: int, needs: list[int], place: str = "data", **passed: int) -> dict[str, Any]:
    """A rank in collective `number` of a place; `passed`: how many of other places it has come to."""
    return {"place": place, "number": number, "attempt": 0, "needs": needs, "passed": {place: number, **passed}}


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


class _Cycle:
    """Collected, not counted out; lets other threads run then, as torch's process groups do."""

    def __init__(self) -> None:
        self.self = self

    def __del__(self) -> None:
        time.sleep(0)


def look_at_frames() -> None:
    """Run by a process of its own: where the main thread is, asked by another, while collections go on and a third
    starts threads."""
    main, is_over = threading.get_ident(), threading.Event()

    def look() -> None:
        for i in range(600):
            gc.collect(0)
            gc.set_threshold(10 + i % 60)  # wherever in it the collection begins
            for _ in range(5):
                _Cycle()
            assert position_of(SETUP, main).where
        assert gc.isenabled()
        is_over.set()

    threading.Thread(target=look, daemon=True).start()
    while not is_over.is_set():
        thread = threading.Thread(target=time.sleep, args=(0,))
        thread.start()
        thread.join()


@pytest.mark.full  # a long run
def test_looking_at_another_threads_frames_never_hangs() -> None:
    assert run_processes("from tests.core.test_waits import look_at_frames; look_at_frames()", 1, 60.0) == [0]
