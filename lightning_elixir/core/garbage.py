"""Python's garbage collector, kept from beginning by itself."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Collector:
    """The process's one, of which threads may be inside `no_collections` at the same time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may come to the same while it is held
        self._num_inside = 0
        self._was_enabled = False

    def enter(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._was_enabled = gc.isenabled()
            self._num_inside += 1
            gc.disable()

    def leave(self) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside and self._was_enabled:
                gc.enable()


_collector = _Collector()


@contextmanager
def no_collections() -> Iterator[None]:
    """Inside, no garbage is collected unless it is asked for (`gc.collect`). The last thread to leave has it as it was.

    With transformers imported, each collection of the oldest generation goes through a million objects and takes up to
    half a second; what makes many objects that stay, such as a plan or a dry run, brings on several.
    """
    _collector.enter()
    try:
        yield
    finally:
        _collector.leave()
