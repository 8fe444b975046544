"""Files that are written past the system's cache, as they come.

Through the cache, every byte of a checkpoint is copied into memory that the system has to find first, and what else was
in there goes; the disk begins late, and the flush at the end waits for it. Here threads hand pieces to the disk while
the next one is being filled.

Of every file two pieces of 4 MiB are on their way, to space that was reserved. A copy into memory that the system has
to find first may be slower than the disk, so this is how a save goes that is waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from functools import partial
from pathlib import Path
from typing import IO, Any

from lightning_elixir.core.worker import Task, Worker
from lightning_elixir.storage.nvme import ALIGNMENT, NOT_OFFERED, aligned, aligned_memory, go_direct

PIECE_BYTES = 4 * 2**20
NUM_PIECES = 2
_AHEAD_BYTES = 64 * 2**20


def open_new(path: Path, *, past_cache: bool) -> IO[bytes] | DirectFile:
    """A new, empty file to be written from its beginning to its end.

    Args:
        past_cache: Write past the system's cache, if the file system can.

    Raises:
        OSError: It cannot be made.
    """
    if past_cache:
        with contextlib.suppress(NotOffered):
            return DirectFile(path)
    return path.open("wb")


class NotOffered(Exception):
    """The file system cannot do that."""


class DirectFile:
    """A file that takes bytes, and nothing else. For one thread.

    Takes `NUM_PIECES * PIECE_BYTES` of memory, whatever is written. What is written counts after `close`; an error of
    the disk comes with a later `write`, or with `close`.

    Args:
        path: Of the file; what it holds goes.

    Raises:
        NotOffered: The file system has no way around the cache, or cannot reserve space.
        OSError: The file cannot be made, or the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._reserved = 0
        try:
            self._reserve(PIECE_BYTES)
            if not go_direct(self._fd, 0):
                raise NotOffered
        except BaseException:
            os.close(self._fd)
            raise
        self._worker = Worker("elixir-checkpoint-write", num_threads=NUM_PIECES)
        self._pieces = [aligned_memory(PIECE_BYTES) for _ in range(NUM_PIECES)]
        self._under_way: list[Task | None] = [None] * NUM_PIECES
        self._number = self._filled = 0  # of the piece that is being filled, and how far it is

    def write(self, data: Any) -> int:
        """Append bytes (anything with a buffer); returns how many.

        Raises:
            OSError: These, or earlier ones, cannot be written.
        """
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            if not self._filled:
                self._wait(self._number % NUM_PIECES)
            count = min(len(view) - done, PIECE_BYTES - self._filled)
            piece = self._pieces[self._number % NUM_PIECES]
            piece[self._filled : self._filled + count] = view[done : done + count]
            self._filled += count
            done += count
            if self._filled == PIECE_BYTES:
                self._send(PIECE_BYTES)
                self._number, self._filled = self._number + 1, 0
        return done

    def flush(self) -> None:
        """Nothing: a piece goes when it is full, the last one at `close`."""

    def tell(self) -> int:
        return self._number * PIECE_BYTES + self._filled

    def close(self) -> None:
        """Write the rest, and give the file its size.

        Raises:
            OSError: Something could not be written.
        """
        try:
            if self._filled:
                piece, end = self._pieces[self._number % NUM_PIECES], aligned(self._filled)
                piece[self._filled : end] = bytes(end - self._filled)
                self._send(end)
            for slot in range(NUM_PIECES):
                self._wait(slot)
            os.ftruncate(self._fd, self.tell())
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go of the file, whatever it holds."""
        for task in self._under_way:
            if task is not None:
                task.cancel()
        self._worker.wait()  # for what writes to the file
        self._worker.close()
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd = -1

    def _wait(self, slot: int) -> None:
        task, self._under_way[slot] = self._under_way[slot], None
        if task is not None:
            task.wait()

    def _send(self, nbytes: int) -> None:
        offset = self._number * PIECE_BYTES
        if offset + nbytes > self._reserved:
            self._reserve(nbytes)
        slot = self._number % NUM_PIECES
        self._under_way[slot] = self._worker.submit(partial(self._put, memoryview(self._pieces[slot])[:nbytes], offset))

    def _put(self, piece: memoryview, offset: int) -> None:
        done = 0
        while done < len(piece):
            count = os.pwrite(self._fd, piece[done:], offset + done)
            if not count or count % ALIGNMENT:  # a disk that is getting full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += count

    def _reserve(self, least: int) -> None:
        """Take space on the disk, so that no write waits for another one that makes the file longer."""
        if not self._take(_AHEAD_BYTES) and not self._take(least):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _take(self, nbytes: int) -> bool:
        fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
        if fallocate is None:  # not posix_fallocate, which writes everything where it is not offered
            raise NotOffered
        if fallocate(self._fd, 0, ctypes.c_int64(self._reserved), ctypes.c_int64(nbytes)) == 0:
            self._reserved += nbytes
            return True
        code = ctypes.get_errno()
        if code in NOT_OFFERED and not self._reserved:
            raise NotOffered
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return False
        raise OSError(code, os.strerror(code))
