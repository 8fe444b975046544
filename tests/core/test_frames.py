"""Room for frames: calls at the end of a piece of Python's stack map no memory."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest

from lightning_elixir.core.frames import with_room

_CALLS = 400
_DEPTHS = 150  # frames of the functions below take less than 150 bytes; a piece has 16 KiB


def _nothing() -> None:
    return


# A frame that takes more than one of `_at_depth` does not fit any more at some depth, whatever a Python's frames take.
_nothing.__code__ = _nothing.__code__.replace(co_stacksize=64)


def _faults() -> int:
    """Pages that this process gets while small functions are called again and again. A piece that is mapped anew is one
    at least."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(_CALLS):
        _nothing()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _at_depth(depth: int, call: Callable[[], int]) -> int:
    return _at_depth(depth - 1, call) if depth else call()


def test_small_calls_map_no_memory_however_deep_the_caller_is() -> None:
    without = max(_at_depth(depth, _faults) for depth in range(_DEPTHS))
    with_it = max(_at_depth(depth, with_room(_faults)) for depth in range(_DEPTHS))
    if without < _CALLS:
        pytest.skip("this Python keeps pieces that are free, and `with_room` changes nothing")
    assert with_it < _CALLS // 4


def test_what_it_is_asked_for_is_called() -> None:
    def add(one: int, *, other: int) -> int:
        """Of two."""
        return one + other

    assert with_room(add)(1, other=2) == 3
    assert with_room(add).__doc__ == "Of two."
    assert with_room(add).__name__ == "add"
