"""What a process has taken for itself, for tests that compare one with another."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path


def own_bytes() -> int:
    """Resident anonymous memory in bytes, without what the allocator keeps of freed memory, and without pages of files,
    which the system takes away when others need memory: both differ from run to run by tens of MB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _resident_bytes()


def _resident_bytes() -> int:
    with Path("/proc/self/status").open(encoding="ascii") as file:
        return int(next(line for line in file if line.startswith("RssAnon")).split()[1]) * 1024


class Peak:
    """What the process takes for itself while this is open, beside what it began with: `nbytes` at most, `left` after.

    The most includes what the allocator keeps of freed memory, since the system cannot have that, either.
    """

    def __enter__(self) -> Peak:
        self._is_over, self._begin, self.nbytes = threading.Event(), own_bytes(), 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._is_over.wait(0.0005):
            self.nbytes = max(self.nbytes, _resident_bytes() - self._begin)

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.left = own_bytes() - self._begin
