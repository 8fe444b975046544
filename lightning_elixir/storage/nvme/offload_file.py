"""One file on a disk, in which a rank keeps tensors that host memory has no room for.

It is cut into regions when it is opened: what is to be read and written as one (a chunk's states, one state of a chunk,
a 16-bit shard). Reads and writes are requests that are under way until waited for; those that overlap take place in the
order in which they were made, so a buffer may be read into again as soon as the write out of it is over. A pipeline of
three buffers reads k+1 while k is updated and k-1 is written:

    reads[k + 1] = file.read(k + 1, buffers[(k + 1) % 3], will_write=True)   # after writes[k - 2] is over
    reads[k].wait()
    update(buffers[k % 3])
    writes[k] = file.write(k, buffers[k % 3])

A request is an `Event`: a task of a `Worker` can be told to begin when it is over.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from lightning_elixir.core.device import Device
from lightning_elixir.core.signals import DeferringLock, deferred
from lightning_elixir.errors import PlanError, StateError, StorageError
from lightning_elixir.storage.nvme.checksums import Checksums
from lightning_elixir.storage.nvme.direct import DirectBackend, aligned_part
from lightning_elixir.storage.nvme.scratch import ScratchFile
from lightning_elixir.storage.nvme.tensornvme_backend import TensornvmeBackend
from lightning_elixir.storage.nvme.transfer import (
    ALIGNMENT,
    Backend,
    Region,
    Request,
    Transfer,
    aligned,
    aligned_memory,
)

BACKENDS = ("direct", "tensornvme")
DEFAULT_QUEUE_DEPTH = 4


@dataclass(frozen=True)
class OffloadStats:
    """What was asked for since the file was opened."""

    num_reads: int = 0
    num_writes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class OffloadFile:
    """Regions on a disk. `open_offload_file` makes one. Its calls may come from any thread of the process."""

    def __init__(
        self, folder: Path, path: Path, regions: Sequence[Region], backend: Backend, device: Device | None
    ) -> None:
        self.folder = folder
        self.path = path
        """What the file is called, or was before its name was taken away."""
        self.regions = tuple(regions)
        self._backend = backend
        self._device = device
        self._process = os.getpid()
        self._lock = DeferringLock()
        self._requests: list[Request] = []
        self._is_closed = False
        self._stats = OffloadStats()

    @property
    def backend(self) -> str:
        """The back end's name."""
        return self._backend.name

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes pass the page cache by."""
        return self._backend.is_direct

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D uninitialised host tensor that is read and written without a copy: aligned, and in huge pages where the
        system has them; the device's host memory, where transfers to the device are faster from that."""
        if self._device is None or self._device.is_synchronous:
            return torch.frombuffer(aligned_memory(max(1, numel) * dtype.itemsize), dtype=dtype)[:numel]
        return aligned_part(self._device.host_zeros(numel + ALIGNMENT // dtype.itemsize, dtype), numel)

    def write(self, region: int, tensor: Tensor, *, offset: int = 0, order: float = 0.0) -> Request:
        """Begin to write a tensor to a region; it must stay as it is until that is over.

        Args:
            region: Its number.
            tensor: 1-D, contiguous, on the host.
            offset: Bytes in the region, a multiple of `ALIGNMENT`; the end must be one too, or the region's.
            order: Those with the lowest go first, and what a thread waits for goes before all.

        Raises:
            StorageError: The tensor is not of that kind, or does not fit.
            StateError: The file is closed, or another process's.
        """
        return self._submit(True, region, tensor, offset, False, order)

    def read(
        self, region: int, tensor: Tensor, *, offset: int = 0, will_write: bool = False, order: float = 0.0
    ) -> Request:
        """Begin to read from a region into a tensor. What was never written is zeros.

        Args:
            region: As for `write`, as are tensor, offset and order.
            tensor: Holds the values when the request is over.
            offset: Bytes in the region.
            will_write: The caller writes these bytes before it reads them again, and what is there need not stay: saves
                the back end "tensornvme" from writing them back.
            order: Of requests.

        Raises:
            StorageError: As `write`.
            StateError: As `write`.
        """
        return self._submit(False, region, tensor, offset, will_write, order)

    def synchronize(self) -> None:
        """Wait for all requests.

        Raises:
            StorageError: One of them has failed, and that was not raised yet; or the file is not ours any more.
            StateError: The file is closed, or another process's.
        """
        with self._lock:
            self._check_usable()
            requests, self._requests = self._requests, []
        first: StorageError | None = None
        for request in (r for r in requests if r.needs_care):
            try:
                request.wait()
            except StorageError as error:
                first = first or error
        if first is not None:
            raise first
        self._backend.check()

    def stats(self) -> OffloadStats:
        """Requests and bytes so far."""
        return self._stats

    def rest(self) -> None:
        """End the threads, for as long as nothing more is asked for."""
        with self._lock:
            is_usable = not self._is_closed and self._process == os.getpid()
        if is_usable:
            self._backend.rest()

    def close(self) -> None:
        """Free the disk. Requests that have not begun fail, the others are waited for."""
        with deferred():
            with self._lock:
                if self._is_closed or self._process != os.getpid():
                    return
                self._is_closed = True
                self._requests.clear()
            self._backend.close()

    def __enter__(self) -> OffloadFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _submit(
        self, is_write: bool, region: int, tensor: Tensor, offset: int, will_write: bool, order: float
    ) -> Request:
        what = f"{'writing' if is_write else 'reading'} region {region}"
        self._check_tensor(what, region, tensor, offset)
        transfer = Transfer(is_write, region, offset, tensor.detach(), will_write, order)
        with self._lock:  # pieces of which no later request knows could overtake it
            self._check_usable()
            request = Request(self._backend.submit(transfer), self.path, what)
            self._requests = [r for r in self._requests if r.needs_care]
            self._requests.append(request)
            seen = self._stats
            self._stats = OffloadStats(
                seen.num_reads + (not is_write),
                seen.num_writes + is_write,
                seen.read_bytes + (0 if is_write else transfer.nbytes),
                seen.written_bytes + (transfer.nbytes if is_write else 0),
            )
        return request

    def _check_usable(self) -> None:
        if self._process != os.getpid():
            raise StateError(
                f"{self.path} belongs to process {self._process}, which this one was forked from: open one here"
            )
        if self._is_closed:
            raise StateError(f"{self.path} is closed")

    def _check_tensor(self, what: str, region: int, tensor: Tensor, offset: int) -> None:
        if not 0 <= region < len(self.regions):
            raise StorageError(f"{what}: {self.path} has regions 0 to {len(self.regions) - 1}", path=self.path)
        size, end = self.regions[region].nbytes, offset + tensor.nbytes
        problem = None
        if tensor.device.type != "cpu" or tensor.dim() != 1 or not tensor.is_contiguous():
            problem = (
                f"needs a contiguous 1-D tensor on the host, not one of shape {tuple(tensor.shape)} on {tensor.device}"
            )
        elif offset < 0 or end > size:
            problem = f"it holds {size} bytes, and bytes {offset} to {end} were named"
        elif offset % ALIGNMENT or (end % ALIGNMENT and end != size):
            problem = f"bytes {offset} to {end} are not whole blocks of {ALIGNMENT}, nor the end of its {size}"
        if problem is not None:
            raise StorageError(f"{what}: {problem}", path=self.path, offset=offset, nbytes=tensor.nbytes)


def open_offload_file(
    folder: str | Path,
    region_nbytes: Sequence[int],
    *,
    backend: str = "direct",
    rank: int = 0,
    device: Device | None = None,
    queue_depth: int = DEFAULT_QUEUE_DEPTH,
    has_checksums: bool = False,
    keep_name: bool = False,
) -> OffloadFile:
    """Make a file for tensors, gone with this process (Note: nothing stays behind).

    Args:
        folder: Made if it is missing; files of dead processes in it are removed.
        region_nbytes: The size of each region.
        backend: "direct": our own, past the page cache where the file system can. "tensornvme": the package.
        rank: Of this process; each has a file of its own.
        device: What is in the tensors that `empty` gives goes to this device, and comes from there.
        queue_depth: Reads and writes that the disk has before it at a time.
        has_checksums: Check what is read against what was written; slow, for debugging.
        keep_name: Leave the file its name until it is closed, for debugging; "direct" only.

    Raises:
        StorageError: The folder cannot be used or has too little room, or the back end is not there.
        PlanError: There is no such back end.
    """
    if backend not in BACKENDS:
        raise PlanError(f"there is no NVMe back end {backend!r}: choose one of {', '.join(BACKENDS)}")
    if queue_depth < 1 or any(nbytes < 0 for nbytes in region_nbytes):
        raise PlanError(f"queue_depth is {queue_depth}, the smallest region {min(region_nbytes, default=0)} bytes")
    folder = Path(folder).absolute()
    regions, end = [], 0
    for nbytes in region_nbytes:
        regions.append(Region(end, nbytes))
        end += aligned(nbytes)
    file = ScratchFile(folder, rank)
    try:
        mover: Backend
        if backend == "tensornvme":
            mover = TensornvmeBackend(file, regions, queue_depth, Checksums(file.path) if has_checksums else None)
        else:
            if not keep_name and not file.unlink():
                file.close()
                file = ScratchFile(folder, rank)  # one that keeps its name
            checksums = Checksums(file.path) if has_checksums else None
            mover = DirectBackend(file, regions, queue_depth, checksums)
    except BaseException:
        file.close()
        raise
    return OffloadFile(folder, file.path, regions, mover, device)
