"""What is asked of a back end, and how its end is told."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from lightning_elixir.core.worker import Task
from lightning_elixir.errors import StorageError

ALIGNMENT = 4096
"""Bytes. What passes the page cache begins and ends at multiples of this, in the file and in memory."""


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def aligned_memory(nbytes: int) -> mmap.mmap:
    """Memory that begins at a page; in huge ones where there are, of which a request takes fewer pieces."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@dataclass(frozen=True)
class Region:
    """A part of the file. Nothing else lies between its end and the next multiple of `ALIGNMENT`."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class Transfer:
    """Bytes to move between a tensor and a region."""

    is_write: bool
    region: int
    offset: int
    """In the region; a multiple of `ALIGNMENT`, as is the end unless it is the region's."""
    tensor: Tensor
    """1-D, contiguous, on the host; kept alive by this."""
    will_write: bool
    """A read: the region is written before it is read again, so what it holds need not stay."""
    order: float

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


class Backend(Protocol):
    """What moves bytes between a file and memory."""

    name: str
    is_direct: bool
    """Whether the page cache is left out."""

    def submit(self, transfer: Transfer) -> Sequence[Task]:
        """Begin to move; over when all tasks are. Transfers that overlap take place in the order of these calls."""

    def check(self) -> None:
        """Whether the file is still what it was.

        Raises:
            StorageError: It is not.
        """

    def rest(self) -> None:
        """End the threads when all that was begun is over; what comes next starts new ones."""

    def close(self) -> None:
        """Drop what has not begun, wait for what has, and let the file go."""


def when_all_over(ones: Sequence[Task | Request], follower: Callable[[], None]) -> None:
    """Call it once when all of them are over, on the thread that finds that out; or right here if that is past."""
    left = [len(ones)]
    lock = threading.Lock()

    def count() -> None:
        with lock:
            left[0] -= 1
            is_last = left[0] == 0
        if is_last:
            follower()

    for one in ones:
        one.then(count)
    if not ones:
        follower()


class Request:
    """A read or a write under way; an `Event`, for which device and host alike wait on the host.

    The tensor belongs to it until it is over.
    """

    def __init__(self, tasks: Sequence[Task], path: Path, what: str) -> None:
        self._tasks = tasks
        self._path = path
        self._what = what
        self._was_raised = False

    def is_over(self) -> bool:
        """Whether it is done, or has failed; waits for nothing."""
        return all(task.is_over() for task in self._tasks)

    def wait(self) -> None:
        """Make the host wait for the end.

        Raises:
            StorageError: It has failed; every time.
        """
        for task in self._tasks:
            task.join()
        error = self.error
        if error is not None:
            self._was_raised = True
            raise error

    synchronize = wait

    def then(self, follower: Callable[[], None]) -> None:
        """Call it once when this is done, or has failed, on the thread that did it last; or right here if that is past.
        It must not wait for this, nor raise."""
        when_all_over(self._tasks, follower)

    def take_care(self) -> StorageError | None:
        """Why it has failed, if it has; counts as told from then on. For followers, which come before the end
        counts."""
        errors = [task.error for task in self._tasks if task.error is not None]
        if not errors:
            return None
        self._was_raised = True
        return self._described(errors)

    @property
    def error(self) -> StorageError | None:
        """Why it has failed, if it is over and has."""
        if not self.is_over():
            return None
        errors = [task.error for task in self._tasks if task.error is not None]
        return self._described(errors) if errors else None

    def _described(self, errors: Sequence[BaseException]) -> StorageError:
        first = errors[0]
        if isinstance(first, StorageError):
            return first
        reason = str(first) or type(first).__name__  # a MemoryError has no words
        error = StorageError(f"{self._what} of {self._path} did not take place: {reason}", path=self._path)
        error.__cause__ = first
        return error

    @property
    def needs_care(self) -> bool:
        """Whether it is under way, or has failed and that has not been told."""
        return not self.is_over() or (self.error is not None and not self._was_raised)
