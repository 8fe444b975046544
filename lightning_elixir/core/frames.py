"""Room for the frames of Python's calls.

[Note: room for frames] CPython keeps the frames of a thread in pieces of 16 KiB: it maps a piece when a call does not
fit any more, and unmaps it when that call returns. Where the end of a piece lies among the small functions of a step,
each call of them does that, and how deep the caller is decides whether: seen, 300 to 25000 pieces in one step without
values of a Llama of 32 layers, by the depth of its script. Each waits, with Python's lock, for threads that have memory
given or page-locked. A frame that takes more gets a larger piece, and what it calls has the rest of that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Of eight bytes each. CPython takes the next power of two above a frame and a little more, here 512 KiB: half of that
# is left for calls, as many as Python lets be in one another.
_NUM_SLOTS = 2**15


def with_room(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, for what calls many small ones in one another; see [Note: room for frames]."""

    def with_large_frame(*args: Any, **kwargs: Any) -> R:
        return function(*args, **kwargs)

    with_large_frame.__code__ = with_large_frame.__code__.replace(co_stacksize=_NUM_SLOTS)
    return wraps(function)(with_large_frame)
