"""Our own back end: a few threads that read and write large pieces past the page cache.

What is aligned in memory goes from there and to there; anything else passes through a buffer of the thread's own.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from lightning_elixir.core.labels import label
from lightning_elixir.core.worker import Task, Worker
from lightning_elixir.errors import StorageError
from lightning_elixir.storage.nvme.checksums import Checksums
from lightning_elixir.storage.nvme.scratch import ScratchFile, failed
from lightning_elixir.storage.nvme.transfer import ALIGNMENT, Region, Transfer, aligned, aligned_memory

PIECE_BYTES = 4 * 2**20
"""Requests are cut at multiples of this in the file. Smaller pieces cost the disk speed, larger ones keep a request
from the other threads."""


class DirectBackend:
    """Threads over `os.preadv` and `os.pwritev`, which let go of the GIL.

    Args:
        file: New; this owns it.
        regions: Where they lie in it.
        queue_depth: Threads, so reads and writes that the disk has before it.
        checksums: To note and check, if any.
    """

    name = "direct"

    def __init__(
        self,
        file: ScratchFile,
        regions: Sequence[Region],
        queue_depth: int,
        checksums: Checksums | None,
    ) -> None:
        self._file = file
        self._regions = regions
        self._checksums = checksums
        file.allocate(aligned(max((r.offset + r.nbytes for r in regions), default=0)))
        file.go_direct()
        self.is_direct = file.is_direct
        self._worker = Worker("nvme", num_threads=queue_depth)
        self._latest: dict[int, Task] = {}  # by piece of the file: reads and writes of one take place in order
        self._waiting: set[Task] = set()
        self._buffers = threading.local()

    def submit(self, transfer: Transfer) -> list[Task]:
        self._waiting = {task for task in self._waiting if not task.is_over()}
        start = self._regions[transfer.region].offset + transfer.offset
        tasks = []
        at, end = start, start + transfer.nbytes
        while at < end:
            piece = at // PIECE_BYTES
            stop = min(end, (piece + 1) * PIECE_BYTES)
            work = partial(_move, self._file, self._buffers, self._checksums, transfer, at - start, stop - start, start)
            latest = self._latest.get(piece)
            if latest is not None and latest.is_over():
                latest = None  # a failure of the past is no reason to fail now
            task = self._worker.submit(work, order=transfer.order, after=latest)
            self._latest[piece] = task
            self._waiting.add(task)
            tasks.append(task)
            at = stop
        return tasks

    def check(self) -> None:
        self._file.check()

    def rest(self) -> None:
        self._worker.rest()

    def close(self) -> None:
        for task in self._waiting:
            task.cancel()
        self._worker.close()
        self._waiting.clear()
        self._latest.clear()  # with what has failed: see `StateFile.close`
        self._file.close()


class _Buffer:
    """Aligned memory of one thread."""

    def __init__(self) -> None:
        self.mapping = aligned_memory(PIECE_BYTES)
        self.view = memoryview(self.mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))


def _move(
    file: ScratchFile,
    buffers: threading.local,
    checksums: Checksums | None,
    transfer: Transfer,
    first: int,
    last: int,
    start: int,
) -> None:
    """One piece: bytes `first` to `last` of a transfer that begins at `start` in the file."""
    address, nbytes = transfer.tensor.data_ptr() + first, last - first
    in_region = transfer.offset + first
    if checksums is not None and transfer.is_write:
        checksums.note(transfer.region, in_region, address, nbytes)
    straight = nbytes
    if file.is_direct:
        straight = nbytes // ALIGNMENT * ALIGNMENT if address % ALIGNMENT == 0 else 0
    if straight:
        memory = memoryview((ctypes.c_char * straight).from_address(address)).cast("B")
        _move_all(file, transfer.is_write, memory, start + first)
    if straight < nbytes:
        if not hasattr(buffers, "buffer"):
            buffers.buffer = _Buffer()
        buffer, left = buffers.buffer, nbytes - straight
        if transfer.is_write:
            ctypes.memmove(buffer.address, address + straight, left)
        _move_all(file, transfer.is_write, buffer.view[: aligned(left)], start + first + straight)
        if not transfer.is_write:
            ctypes.memmove(address + straight, buffer.address, left)
    if checksums is not None and not transfer.is_write:
        checksums.check(transfer.region, in_region, address, nbytes)


def _move_all(file: ScratchFile, is_write: bool, memory: memoryview, offset: int) -> None:
    what = "writing" if is_write else "reading"
    done, nbytes = 0, len(memory)
    while done < nbytes:
        try:
            call = os.pwritev if is_write else os.preadv
            with label("write states" if is_write else "read states"):
                moved = call(file.fd, [memory[done:]], offset + done)
        except OSError as error:
            raise failed(what, file.path, offset + done, nbytes - done, error) from error
        if file.is_direct:
            moved -= moved % ALIGNMENT  # the rest of the block again
        if moved <= 0:
            raise StorageError(
                f"{what} {nbytes} bytes at offset {offset} of {file.path} ended after {done}: the file was cut off, or "
                "the disk is full; keep other programs from this folder, and start again from a checkpoint",
                path=file.path,
                offset=offset + done,
                nbytes=nbytes - done,
            )
        done += moved


def aligned_part(whole: Tensor, numel: int) -> Tensor:
    """So many elements of a 1-D tensor, from the first that is aligned."""
    skipped = -whole.data_ptr() % ALIGNMENT // whole.element_size()
    return whole[skipped : skipped + numel]
