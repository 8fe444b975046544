"""Holding off the garbage collector."""

from __future__ import annotations

import gc
import threading

import pytest

from lightning_elixir.core.garbage import no_collections


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
