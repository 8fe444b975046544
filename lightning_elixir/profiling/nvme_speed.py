"""How fast a folder's disk reads and writes, past the page cache where the system lets us."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

from lightning_elixir.core.comm import Comm
from lightning_elixir.core.worker import Worker
from lightning_elixir.errors import StorageError
from lightning_elixir.profiling.stopwatch import Stopwatch
from lightning_elixir.storage.nvme.folders import problem_of_folder

_BLOCK_BYTES = 8 * 2**20
_NUM_THREADS = 2
_MIN_BLOCKS = 4
_MAX_BLOCKS = 32


def free_disk_bytes(folder: Path, comm: Comm) -> int:
    """Bytes that may still be written to the folder; the least of all ranks. Collective.

    Raises:
        StorageError: On every rank, if any of them cannot write there; names it and the cause.
    """
    free, problem = 0, problem_of_folder(folder)
    try:
        free = shutil.disk_usage(folder).free
        if problem is None and not os.access(folder, os.W_OK | os.X_OK):
            problem = "it is not writable"
    except OSError as error:
        problem = problem or error.strerror or str(error)
    _raise_on_all(comm, folder, problem)
    return min(row[0] for row in comm.exchange([free]))


def measure_disk(folder: Path, comm: Comm, watch: Stopwatch, max_bytes: int) -> tuple[float, float]:
    """Bytes a second of sequential reads and of writes that have reached the disk, while all ranks do the same.

    A preallocated file without a name is written and read in blocks of 8 MiB by two threads, from aligned memory.
    Collective.

    Args:
        folder: Where the file goes; `free_disk_bytes` has found it fit.
        max_bytes: Most that the file may take.

    Raises:
        StorageError: On every rank, if the disk has no room or fails on any.
    """
    num_blocks = min(max_bytes // _BLOCK_BYTES, _MAX_BLOCKS)
    if num_blocks < _MIN_BLOCKS:
        needed_mib = _MIN_BLOCKS * _BLOCK_BYTES // 2**20
        raise StorageError(f"{folder} has too little free space to be measured: {needed_mib} MiB a rank are needed")
    failures: list[OSError] = []

    def seconds(work: Callable[[], None]) -> float:
        def guarded() -> None:  # one rank's disk may fail: the others still wait for it at every meeting
            try:
                work()
            except OSError as error:
                failures.append(error)

        return watch.usual_seconds(guarded)

    file: _ScratchFile | None = None
    try:
        file = _ScratchFile(folder, num_blocks)
    except OSError as error:
        failures.append(error)
    _raise_on_all(comm, folder, _text(failures))
    if file is None:
        raise StorageError(f"no file could be made in {folder}")
    with file:
        probe_s = seconds(lambda: file.write(_MIN_BLOCKS))
        # A slow disk: fewer blocks, so that the passes stay within the limit.
        num_blocks = max(_MIN_BLOCKS, min(num_blocks, int(_MIN_BLOCKS * watch.limit_s / probe_s)))
        write_s = seconds(lambda: file.write(num_blocks))
        read_s = seconds(lambda: file.read(num_blocks))
    _raise_on_all(comm, folder, _text(failures))
    return num_blocks * _BLOCK_BYTES / read_s, num_blocks * _BLOCK_BYTES / write_s


def _text(failures: list[OSError]) -> str | None:
    return (failures[0].strerror or str(failures[0])) if failures else None


def _raise_on_all(comm: Comm, folder: Path, problem: str | None) -> None:
    for rank, found in enumerate(comm.exchange_objects(problem)):
        if found:
            raise StorageError(f"the disk of {folder} cannot be measured: {found} (rank {rank}); choose another folder")


class _ScratchFile:
    """A preallocated file that is gone when its descriptor is."""

    def __init__(self, folder: Path, num_blocks: int) -> None:
        self._fd, path = tempfile.mkstemp(dir=folder)
        try:
            os.unlink(path)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, 0, num_blocks * _BLOCK_BYTES)
            self._buffers = [mmap.mmap(-1, _BLOCK_BYTES) for _ in range(_NUM_THREADS)]  # aligned to pages
            for buffer in self._buffers:
                buffer[:] = os.urandom(_BLOCK_BYTES)  # some disks compress
            self._is_direct = self._go_direct()
        except BaseException:
            os.close(self._fd)
            raise
        self._worker = Worker("disk", num_threads=_NUM_THREADS)

    def _go_direct(self) -> bool:
        """Leave out the page cache, if the file system can."""
        if not hasattr(os, "O_DIRECT"):
            return False
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwrite(self._fd, self._buffers[0], 0)
        except OSError:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False
        return True

    def write(self, num_blocks: int) -> None:
        self._each_block(num_blocks, lambda buffer, offset: os.pwrite(self._fd, buffer, offset))
        os.fsync(self._fd)

    def read(self, num_blocks: int) -> None:
        if not self._is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._each_block(num_blocks, lambda buffer, offset: os.preadv(self._fd, [buffer], offset))

    def _each_block(self, num_blocks: int, move: Callable[[mmap.mmap, int], int]) -> None:
        def run(thread: int) -> None:
            for index in range(thread, num_blocks, _NUM_THREADS):
                moved = move(self._buffers[thread], index * _BLOCK_BYTES)
                if moved != _BLOCK_BYTES:
                    raise OSError(f"{moved} bytes moved instead of {_BLOCK_BYTES}")

        for task in [self._worker.submit(partial(run, thread)) for thread in range(_NUM_THREADS)]:
            task.wait()

    def __enter__(self) -> _ScratchFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._worker.wait()  # for what uses the buffers
        self._worker.close()
        os.close(self._fd)
        for buffer in self._buffers:
            buffer.close()
