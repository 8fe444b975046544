"""Holding off the garbage collector."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable

import pytest

from lightning_elixir.core.garbage import FullCollections, no_collections


def test_none_begins_inside_and_they_go_on_afterwards() -> None:
    begun: list[str] = []
    gc.callbacks.append(lambda phase, info: begun.append(phase))
    try:
        with no_collections(), no_collections():
            kept = [[] for _ in range(20_000)]  # type: ignore[var-annotated]
            assert not begun
        kept += [[] for _ in range(20_000)]
        assert begun
    finally:
        gc.callbacks.pop()


def test_after_an_error_as_well() -> None:
    with pytest.raises(ValueError, match="inside"), no_collections():
        raise ValueError("inside")
    assert gc.isenabled()


def test_a_user_who_has_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_threads_that_leave_in_another_order() -> None:
    """Each would put back what it has found, which may be what the other has set."""
    is_inside, may_leave = threading.Event(), threading.Event()

    def other() -> None:
        with no_collections():
            is_inside.set()
            assert may_leave.wait(20)

    thread = threading.Thread(target=other)
    with no_collections():
        thread.start()
        assert is_inside.wait(20)
    assert not gc.isenabled()
    may_leave.set()
    thread.join()
    assert gc.isenabled()


def _generations_collected(resume: Callable[[], None] = lambda: None) -> set[int]:
    """While many objects are made that stay, all of which an earlier full collection has not seen."""
    found: set[int] = set()
    note = lambda phase, info: found.add(info["generation"])  # noqa: E731
    gc.collect()
    kept: list[list[int]] = []
    gc.callbacks.append(note)
    try:
        kept += [[] for _ in range(3_000_000)]
        resume()
        kept += [[] for _ in range(1_000_000)]
    finally:
        gc.callbacks.remove(note)
    return found


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="its collector has no oldest generation")
def test_full_collections_are_put_off_and_others_are_not() -> None:
    assert _generations_collected() == {0, 1, 2}
    put_off = FullCollections()
    try:
        assert _generations_collected() == {0, 1}
        assert _generations_collected(put_off.resume) == {0, 1, 2}
    finally:
        put_off.resume()


def test_thresholds_are_as_before_whichever_of_two_ends_first_or_as_the_program_has_set_them_since() -> None:
    before = gc.get_threshold()
    for order in ((0, 1), (1, 0), (0, 1, 0)):
        both = FullCollections(), FullCollections()
        for number in order:
            both[number].resume()
        assert gc.get_threshold() == before
    one = FullCollections()
    gc.set_threshold(500, 7, 9)
    one.resume()
    assert gc.get_threshold() == (500, 7, 9)
    gc.set_threshold(*before)
