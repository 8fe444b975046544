"""The `tensornvme` package (0.1.0) as a back end, its traps kept away from the code that uses it.

[Note: what tensornvme does, and what is done about it]

- It decides itself where in the file a tensor goes, and forgets the tensor when it is read. So the file is cut into
  slots of one size, in any place of which any slot may lie, and a region is a row of slots. A slot that is read and
  shall stay is written back; one that is written is read first, if it is there, so that its place becomes free.
- Freeing the last place of the file loses those before it, and the file grows without end. So all places are given out
  at once at the beginning, to a tensor over memory that cannot be touched, of which nothing is written; then one last
  block is written and never read again; then the places are freed. From then on the file keeps the size reserved.
- It looks at no result: a failed or short read or write goes unnoticed. So every slot ends with its number and the
  number of times it was written. A read that does not bring both has failed; so has a write whose read does not.
- It writes the whole storage of a tensor, from where the tensor begins. So it sees tensors that we make over the bytes
  in question alone: the user's memory where a slot is whole and aligned there, a staging buffer otherwise.
- Of its ways to wait only `synchronize` waits for reads, and it waits for everything. It holds the GIL in there. So
  transfers are begun as they come, as many as there are, before all of them are waited for.
- It does not know threads, and crashes when a signal wakes the one that waits in it: one thread of ours makes all
  calls, and handles no signals. (A process that is stopped and continued cannot be kept from waking it.) It makes
  a queue of io_uring without looking whether that fails, and then crashes: we try it first.
- Its end removes the file by name, and complains on stdout if there is none: there is, for that moment.
- It goes through the page cache: where the file system can do without, its descriptor is told so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lightning_elixir.core.labels import label
from lightning_elixir.core.worker import Task, Worker
from lightning_elixir.errors import StorageError
from lightning_elixir.storage.nvme.checksums import Checksums
from lightning_elixir.storage.nvme.scratch import ScratchFile, go_direct
from lightning_elixir.storage.nvme.transfer import ALIGNMENT, Region, Transfer, aligned, aligned_memory

SLOT_BYTES = 8 * 2**20
"""Most that a slot holds, beside its mark."""

_MARK = struct.Struct("<8sQQ")
_MAGIC = b"elixslot"
_NUM_ENTRIES = 64  # of the queues
_MOST_IN_FLIGHT = 56
"""Slots on their way at a time."""
_MOST_TRANSFERS = 16

_OF_A_THREAD = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}

_LEFT = "it was read with will_write, and has not been written since"
"""Why such a slot cannot be read. The write that was promised may come in parts."""
_IO_URING_PARAMS_BYTES = 120
_IO_URING_SETUP = 425  # on every architecture that Linux has io_uring on
_HOW_TO_INSTALL = (
    'Install it with liburing and libaio ("apt-get install liburing-dev libaio-dev") and "pip install -U setuptools '
    'wheel packaging ninja cmake", then "LIBRARY_PATH=/usr/lib/x86_64-linux-gnu WITH_ROOT=1 pip install --no-cache-dir '
    '--no-build-isolation tensornvme==0.1.0"; or choose the back end "direct", which needs nothing'
)


class _Offloader(Protocol):
    """What is used of `tensornvme._C.Offloader`."""

    def async_write(self, tensor: Tensor, key: str) -> None: ...

    def async_writev(self, tensors: Sequence[Tensor], key: str) -> None: ...

    def async_read(self, tensor: Tensor, key: str) -> None: ...

    def async_readv(self, tensors: Sequence[Tensor], key: str, callback: Callable[[], None] | None = None) -> None: ...

    def synchronize(self) -> None: ...


class TensornvmeBackend:
    """One thread over tensornvme's io_uring.

    Args:
        file: New, and with a name; this owns it.
        regions: As the user sees them; where they lie here is another matter.
        queue_depth: Slots that are read or written at a time.
        checksums: To note and check, if any.

    Raises:
        StorageError: The package is missing or does not work, or the disk has no room.
    """

    name = "tensornvme"

    def __init__(
        self, file: ScratchFile, regions: Sequence[Region], queue_depth: int, checksums: Checksums | None
    ) -> None:
        payload = min(SLOT_BYTES, aligned(max((r.nbytes for r in regions), default=0)) or ALIGNMENT)
        self._slots = _Slots(file, regions, payload, min(2 * queue_depth, _MOST_IN_FLIGHT), checksums)
        self.is_direct = self._slots.is_direct
        self._worker = Worker("tensornvme", context=_without_signals, most_in_flight=_MOST_TRANSFERS)
        self._waiting: set[Task] = set()
        self._latest: dict[int, Task] = {}  # by region

    def submit(self, transfer: Transfer) -> list[Task]:
        self._waiting = {task for task in self._waiting if not task.is_over()}
        latest = self._latest.get(transfer.region)
        if latest is not None and latest.is_over():
            latest = None
        work = partial(self._move, transfer)
        task = self._worker.submit(work, order=transfer.order, after=latest)
        self._latest[transfer.region] = task
        self._waiting.add(task)
        return [task]

    def _move(self, transfer: Transfer) -> _Flight | None:
        with label("write states" if transfer.is_write else "read states"):
            return self._slots.begin(transfer)

    def check(self) -> None:
        self._slots.file.check()

    def rest(self) -> None:
        self._worker.rest()

    def close(self) -> None:
        for task in self._waiting:
            task.cancel()
        self._worker.close()
        self._slots.close()


class _Flight:
    """A transfer on its way. An `Event`: the back end's thread lands all that are when it waits for one, others wait
    until it has."""

    def __init__(self, slots: _Slots, transfer: Transfer, parts: Sequence[_Part]) -> None:
        self.transfer = transfer
        self.parts = parts
        self.pages: list[Tensor] = []
        """With the marks, by part."""
        self.arrived: set[int] = set()
        """Slots that were read."""
        self.error: BaseException | None = None
        self._slots = slots
        self._thread = threading.get_ident()
        self._is_landed = False
        self._is_flying = threading.Lock()  # given back when it has landed
        self._is_flying.acquire()

    def note_landed(self, error: BaseException | None = None) -> None:
        """It is over, or has failed."""
        self.error = error
        self._is_landed = True
        self._is_flying.release()

    def is_over(self) -> bool:
        """
        Raises:
            StorageError: It has failed.
        """
        if not self._is_landed:
            return False
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self) -> None:
        """
        Raises:
            StorageError: It has failed.
        """
        if threading.get_ident() == self._thread:
            self._slots.land()
        with self._is_flying:
            pass
        if self.error is not None:
            raise self.error

    wait = synchronize


class _Slots:
    """The slots, on the thread that alone may touch them."""

    def __init__(
        self,
        file: ScratchFile,
        regions: Sequence[Region],
        payload: int,
        depth: int,
        checksums: Checksums | None,
    ) -> None:
        self.file = file
        self._regions = regions
        self._payload = payload
        self._first_slots = first_slots = _first_slots(regions, payload)
        self._checksums = checksums
        self._times_written: dict[int, int] = {}
        self._lost: dict[int, str] = {}
        """Slots that were written, and why they cannot be read any more."""
        slot_bytes, num_slots = payload + ALIGNMENT, first_slots[-1]
        self._flights: list[_Flight] = []
        self._staging = [torch.frombuffer(aligned_memory(payload), dtype=torch.uint8) for _ in range(depth)]
        self._pages = [torch.frombuffer(aligned_memory(ALIGNMENT), dtype=torch.uint8) for _ in range(_MOST_IN_FLIGHT)]
        """For marks: one for each slot that may be on its way; those that are not."""
        self._held = [_open(file.path)]
        self._finalizer = weakref.finalize(self, _end, self._held, file)
        try:
            if not file.unlink():
                raise StorageError(
                    f"{file.path.parent} cannot hold a file without a name, as the back end tensornvme needs it: "
                    'choose another folder, or the back end "direct"',
                    path=file.path.parent,
                )
            file.allocate(slot_bytes * num_slots + ALIGNMENT)
            file.go_direct()
            self.is_direct = file.is_direct and all(go_direct(fd, file.nbytes) for fd in _other_descriptors(file.fd))
            with _without_signals():
                self._reserve(slot_bytes * num_slots)
                if num_slots:
                    self._try_out()
        except BaseException:
            self._finalizer()
            raise

    def begin(self, transfer: Transfer) -> _Flight | None:
        """Begin to move, where nothing but that is to be done; otherwise move, and return None.

        Raises:
            StorageError: As `_Flight.synchronize`.
        """
        if self._checksums is not None and transfer.is_write:
            address = transfer.tensor.data_ptr()
            self._checksums.note(transfer.region, transfer.offset, address, transfer.nbytes)
        parts = self._parts(transfer)
        if self._is_straight(transfer, parts):
            return self._take_off(transfer, parts)
        self.land()
        for at in range(0, len(parts), len(self._staging)):
            group = parts[at : at + len(self._staging)]
            if transfer.is_write:
                self._write(transfer, group)
            else:
                self._read(transfer, group)
        if not transfer.is_write:
            self._check(transfer)
        return None

    def land(self) -> None:
        """Wait for all that is on its way; each transfer is told of its own failure."""
        flights, self._flights = self._flights, []
        problem: BaseException | None = None
        try:
            if flights:
                self._synchronize()
        except BaseException as error:  # then it is not known which transfers are done
            problem = error
        for flight in flights:
            failure = problem
            try:
                if problem is None and not flight.transfer.is_write:
                    self._receive(flight)
                    self._check(flight.transfer)
            except BaseException as error:
                failure = error
            self._pages += flight.pages
            flight.note_landed(failure)

    def close(self) -> None:
        self._finalizer()
        self.file.close()

    def _is_straight(self, transfer: Transfer, parts: Sequence[_Part]) -> bool:
        """Whether it is one request for each slot, from or to the user's memory."""
        if len(parts) > _MOST_IN_FLIGHT or not all(self._fits(part, transfer.tensor.data_ptr()) for part in parts):
            return False
        if transfer.is_write:  # what is there must be read first, so that its place becomes free
            return all(part.slot in self._lost or part.slot not in self._times_written for part in parts)
        return transfer.will_write and all(
            part.slot in self._times_written and part.slot not in self._lost for part in parts
        )

    def _fits(self, part: _Part, address: int) -> bool:
        """Whether a slot is all in the user's memory, and may go from there and to there."""
        return part.nbytes == self._payload and (address + part.first) % ALIGNMENT == 0

    def _take_off(self, transfer: Transfer, parts: Sequence[_Part]) -> _Flight:
        if len(self._pages) < len(parts):
            self.land()
        flight, address = _Flight(self, transfer, parts), transfer.tensor.data_ptr()
        self._flights.append(flight)
        for part in parts:
            page = self._pages.pop()
            flight.pages.append(page)
            memory = _over(address + part.first, self._payload)
            if transfer.is_write:
                self._put(part.slot, memory, page)
            else:
                self._get(part.slot, memory, page, partial(flight.arrived.add, part.slot))
        return flight

    def _receive(self, flight: _Flight) -> None:
        """What was read with `will_write` is in memory now, and nowhere else."""
        missing = [part for part in flight.parts if part.slot not in flight.arrived]
        self._lose(missing)
        address = flight.transfer.tensor.data_ptr()
        for part, page in zip(flight.parts, flight.pages, strict=True):
            if part.slot in flight.arrived:
                if missing:
                    self._put(part.slot, _over(address + part.first, self._payload), page)
                else:
                    self._lost[part.slot] = _LEFT
        if missing:
            self._synchronize()
            raise self._cannot_read(missing[0])

    def _check(self, transfer: Transfer) -> None:
        if self._checksums is not None:
            address = transfer.tensor.data_ptr()
            self._checksums.check(transfer.region, transfer.offset, address, transfer.nbytes)

    def _write(self, transfer: Transfer, group: Sequence[_Part]) -> None:
        """As many slots as there are staging buffers."""
        address = transfer.tensor.data_ptr()
        for part in group:
            if part.is_partial and self._lost.get(part.slot, _LEFT) is not _LEFT:
                raise self._cannot_read(part)
        taken = self._take(group)  # its places become free, and parts of slots are put into what is there
        for part, buffer, page in zip(group, self._staging, self._pages, strict=False):
            if self._fits(part, address):
                self._put(part.slot, _over(address + part.first, self._payload), page)
                continue
            if part.is_partial and part.slot not in taken:
                buffer.zero_()
            ctypes.memmove(buffer.data_ptr() + part.in_slot, address + part.first, part.nbytes)
            self._put(part.slot, buffer, page)
        self._synchronize()

    def _read(self, transfer: Transfer, group: Sequence[_Part]) -> None:
        """As many slots as there are staging buffers."""
        address = transfer.tensor.data_ptr()
        for part in group:
            if part.slot in self._lost:
                raise self._cannot_read(part)
        taken = self._take(group)
        for part, buffer, page in zip(group, self._staging, self._pages, strict=False):
            if part.slot not in taken:  # never written
                ctypes.memset(address + part.first, 0, part.nbytes)
                continue
            ctypes.memmove(address + part.first, buffer.data_ptr() + part.in_slot, part.nbytes)
            if transfer.will_write and not part.is_partial:
                self._lost[part.slot] = _LEFT
            else:
                self._put(part.slot, buffer, page)
        self._synchronize()

    def _parts(self, transfer: Transfer) -> list[_Part]:
        """What it has to do with each of its slots."""
        first_slot = self._first_slots[transfer.region]
        parts: list[_Part] = []
        at = 0
        while at < transfer.nbytes:
            index, in_slot = divmod(transfer.offset + at, self._payload)
            nbytes = min(self._payload - in_slot, transfer.nbytes - at)
            in_region = transfer.offset + at
            holds = min(self._payload, self._regions[transfer.region].nbytes - index * self._payload)
            parts.append(_Part(first_slot + index, transfer.region, in_region, in_slot, at, nbytes, nbytes < holds))
            at += nbytes
        return parts

    def _take(self, group: Sequence[_Part]) -> set[int]:
        """Read into the staging buffers what was written of these slots; tensornvme then forgets it."""
        arrived: set[int] = set()
        asked: set[int] = set()
        for part, buffer, page in zip(group, self._staging, self._pages, strict=False):
            if part.slot in self._times_written and part.slot not in self._lost:
                self._get(part.slot, buffer, page, partial(arrived.add, part.slot))
                asked.add(part.slot)
        if not asked:
            return asked
        self._synchronize()
        failed = [part for part in group if part.slot in asked - arrived]
        self._lose(failed)
        if failed:
            for part, buffer, page in zip(group, self._staging, self._pages, strict=False):
                if part.slot in arrived:
                    self._put(part.slot, buffer, page)
            self._synchronize()
            raise self._cannot_read(failed[0])
        return asked

    def _get(self, slot: int, memory: Tensor, page: Tensor, on_arrival: Callable[[], None]) -> None:
        """Begin to read a slot that is there.

        Args:
            slot: Its number.
            memory: For what it holds, `[payload]`.
            page: For its mark.
            on_arrival: Called when it is over and both have come.
        """
        page.zero_()
        wanted = (_MAGIC, slot, self._times_written[slot])

        def look() -> None:  # tensornvme calls it while other requests are not over
            if _MARK.unpack_from((ctypes.c_char * _MARK.size).from_address(page.data_ptr())) == wanted:
                on_arrival()

        self._held[0].async_readv([memory, page], str(slot), look)

    def _put(self, slot: int, memory: Tensor, page: Tensor) -> None:
        """Begin to write a slot, which tensornvme knows nothing of. Arguments as for `_get`."""
        times = self._times_written[slot] = self._times_written.get(slot, 0) + 1
        self._lost.pop(slot, None)
        _MARK.pack_into((ctypes.c_char * _MARK.size).from_address(page.data_ptr()), 0, _MAGIC, slot, times)
        self._held[0].async_writev([memory, page], str(slot))

    def _lose(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            self._lost[part.slot] = "it could not be read, or had not been written"

    def _reserve(self, nbytes: int) -> None:
        """Have tensornvme know of all places, and of one more that it never gives back."""
        untouchable = None
        if nbytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            untouchable = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.mprotect(ctypes.c_void_p(untouchable.data_ptr()), ctypes.c_size_t(nbytes), 0) != 0:
                raise StorageError(f"no address space for {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
            self._held[0].async_write(untouchable, "all")
            self._synchronize()
        self._held[0].async_write(torch.frombuffer(aligned_memory(ALIGNMENT), dtype=torch.uint8), "last")
        self._synchronize()
        if untouchable is not None:
            self._held[0].async_read(untouchable, "all")
            self._synchronize()

    def _try_out(self) -> None:
        """
        Raises:
            StorageError: What is read is not what was written.
        """
        part = _Part(0, 0, 0, 0, 0, self._payload, False)
        buffer = self._staging[0]
        buffer.copy_(torch.arange(self._payload, dtype=torch.int32, device="cpu").to(torch.uint8))
        wanted = buffer.clone()
        self._put(0, buffer, self._pages[0])
        self._synchronize()
        buffer.zero_()
        self._take([part])
        if not torch.equal(buffer, wanted):
            raise self._cannot_read(part)
        self._times_written.clear()

    def _synchronize(self) -> None:
        self._held[0].synchronize()

    def _cannot_read(self, part: _Part) -> StorageError:
        why = self._lost.get(part.slot, "other bytes came back than were written")
        return StorageError(
            f"{part.nbytes} bytes at offset {part.in_region} of region {part.region} of {self.file.path} cannot be "
            f"read by tensornvme: {why}; start again from a checkpoint, with another folder, or with the back end "
            '"direct", which tells what the system says',
            path=self.file.path,
            offset=part.in_region,
            nbytes=part.nbytes,
        )


@dataclass(frozen=True)
class _Part:
    """What a transfer has to do with one slot."""

    slot: int
    region: int
    in_region: int
    """Offset, as are the next two."""
    in_slot: int
    first: int
    """In the tensor."""
    nbytes: int
    is_partial: bool
    """Whether the slot holds more."""


@contextmanager
def _without_signals() -> Iterator[None]:
    """They wait, or other threads handle them."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OF_A_THREAD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _over(address: int, nbytes: int) -> Tensor:
    """A tensor over memory that the caller keeps alive."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def _first_slots(regions: Sequence[Region], payload: int) -> list[int]:
    """The first slot of each region, and one past the last."""
    first = [0]
    for region in regions:
        first.append(first[-1] - (-region.nbytes // payload))
    return first


def _open(path: Path) -> _Offloader:
    problem = _io_uring_problem()
    try:
        if sys.platform != "linux":
            raise ImportError("it is for Linux only")
        from tensornvme import _C

        if "uring" not in _C.get_backends():
            problem = "it was built without io_uring"
    except (ImportError, OSError) as error:
        raise StorageError(f"the package tensornvme cannot be used ({error}). {_HOW_TO_INSTALL}") from error
    if problem is None:
        try:
            offloader: _Offloader = _C.Offloader(str(path), _NUM_ENTRIES, "uring")
        except RuntimeError as error:
            problem = str(error)
        else:
            return offloader
    raise StorageError(f'tensornvme cannot work here: {problem}; choose the back end "direct", which needs nothing')


def _io_uring_problem() -> str | None:
    """Why the system gives no io_uring, if so."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(_IO_URING_SETUP, _NUM_ENTRIES, ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES))
    if fd < 0:
        return f"the system refuses io_uring ({os.strerror(ctypes.get_errno())})"
    os.close(fd)
    return None


def _other_descriptors(fd: int) -> list[int]:
    """Descriptors of this process for the same file."""
    wanted, found = os.fstat(fd), []
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if int(name) != fd and os.path.samestat(os.fstat(int(name)), wanted):
                    found.append(int(name))
    return found


def _end(held: list[_Offloader], file: ScratchFile) -> None:
    """Let tensornvme's object go, quietly."""
    if not file.is_ours():  # a fork, whose copy would wait for requests of its parent
        for offloader in held:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(offloader))
    else:
        with suppress(OSError):
            os.close(os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    held.clear()
