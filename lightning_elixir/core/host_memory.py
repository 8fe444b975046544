"""Host memory for what a rank keeps there, made ahead by threads where it is known what will be asked for.

[Note: memory ahead] The system gives pages of fresh memory at some 30 GiB/s to 16 cores at once, and a driver locks 40
GiB/s, for all processes together (seen), so memory for 90 GiB of states takes seconds. They pass beside what else comes
before the first step: values are copied, a step is tried without values, placements are compared. What only the host
reads and writes, masters and moments of Adam that no update sends to the device, is not locked: that is three quarters
of all, and a driver locks for one process after the other, while its other calls wait (without them four ranks built a
model of 30e9 parameters in 15 s, with masters locked in 20, with moments too in 24: seen). Memory is made for the plan
in force; what the next one does not need is given back. To unlock and give back what chunks leave takes nearly as long
as to copy them, so threads do that as well. Where a device's memory is given back again and again it may stay instead
(`keep`): the next time it is there, and locked, and filled with zeros only where no values are to come.

Two threads ask for pages, with those that torch starts for them, behind all other work of the process; a third one
locks them, behind nothing. States whose memory is made before a plan is final are not locked until then (before that,
and with locking behind other work, two ranks took 14 s from the begin of the building to the first step, where they
take 9: seen).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_elixir.core.device import Device, working_on
from lightning_elixir.core.host import available_host_bytes
from lightning_elixir.core.signals import DeferringLock
from lightning_elixir.core.storages import storage_use_count
from lightning_elixir.core.worker import Task, Work, Worker


class Extent(NamedTuple):
    """A 1-D tensor in host memory."""

    numel: int
    dtype: torch.dtype
    is_locked: bool = True
    """Page-locked, for the device to take or to bring."""

    @property
    def size(self) -> _Size:
        """What cannot be changed any more when it is there."""
        return self.numel, self.dtype


_Size = tuple[int, torch.dtype]


_NUM_THREADS = 2
_NICENESS = 10
"""Of the threads, to which torch adds as many as there are cores: a step that was tried meanwhile, in Python, took
4.3 s beside them, and takes 2.4 s so (seen, four ranks of 16 cores)."""
# Nothing is made ahead into the last of the host's memory, so much for each rank of it: there every piece is looked for
# when it is needed.
_LEAST_FREE_BYTES = 2 * 2**30
_MOST_RANKS_OF_A_HOST = 16
# So much is made, and so long, until the threads look again how much is free: a look takes 0.2 ms, small pieces less.
_LOOK_EVERY_BYTES = 32 * 2**20
_LOOK_EVERY_S = 0.05


def bytes_of(extents: Iterable[Extent]) -> int:
    """What such tensors take."""
    return sum(extent.numel * extent.dtype.itemsize for extent in extents)


class HostMemory:
    """Gives tensors in host memory.

        memory.prepare([Extent(2**28, torch.float32)] * 3)  # threads begin
        ...
        master = memory.zeros(2**28, torch.float32)  # is there already, or is made now
        memory.drop()  # what was prepared and is not needed

    Args:
        device: The compute device, which knows how memory is got that it transfers fast.
        num_ranks: How many may do the same on this host.
    """

    def __init__(self, device: Device, num_ranks: int) -> None:
        self._device = device
        self._least_free_bytes = _LEAST_FREE_BYTES * min(num_ranks, _MOST_RANKS_OF_A_HOST)
        self._worker = Worker(
            "elixir-memory", num_threads=_NUM_THREADS, context=partial(_beside_others, device.torch_device)
        )
        # One at a time: whatever else the driver is asked for waits behind all of them. Not by the threads above, which
        # others keep from a processor while they have the driver's lock.
        self._locker = Worker("elixir-memory-lock", context=partial(working_on, device.torch_device))
        self._freer = Worker("elixir-free")
        self._lock = DeferringLock()
        self._pieces: defaultdict[_Size, list[_Piece]] = defaultdict(list)
        self._freeing: list[Task] = []
        self._kept: defaultdict[_Size, list[Tensor]] = defaultdict(list)
        self._unseen_bytes = 0
        """What threads have made since they last saw enough free memory."""
        self._seen_until_s = 0.0
        """On the monotonic clock, when they look again."""

    def prepare(self, extents: Iterable[Extent]) -> None:
        """Have such tensors made by threads, in this order, for `zeros` to come; while little memory is free, none."""
        with self._lock:
            for extent in extents:
                if extent.numel:
                    piece = _Piece(self._device, extent, partial(self._ahead, extent), self._worker)
                    if extent.is_locked:
                        piece.lock_behind(self._locker)
                    self._pieces[extent.size].append(piece)

    def in_turn(self, wanted: Sequence[Sequence[Extent]], num_ahead: int) -> Iterator[int]:
        """The numbers of `wanted`, one after the other, while threads make the memory of the next ones.

        Args:
            wanted: What is going to be asked for at each.
            num_ahead: How many of them, with the one that it is at.
        """
        self.prepare(extent for extents in wanted[:num_ahead] for extent in extents)
        for number in range(len(wanted)):
            for later in wanted[number + num_ahead :][:1]:
                self.prepare(later)
            yield number

    def expect(self, extents: Sequence[Extent]) -> None:
        """As `prepare`, but for those that are there, or on the way, which are locked if need be; what else is there
        goes back."""
        wanted, locked = Counter(e.size for e in extents), Counter(e.size for e in extents if e.is_locked)
        surplus, missing = list[_Piece](), list[Extent]()
        with self._lock:
            there = Counter({size: len(pieces) for size, pieces in self._pieces.items()})
            for size, pieces in list(self._pieces.items()):
                pieces.sort(key=lambda piece: not piece.is_begun)
                surplus += pieces[wanted[size] :]
                del pieces[wanted[size] :]
                for piece in sorted(pieces, key=lambda piece: not piece.has_lock)[: locked[size]]:
                    piece.lock_behind(self._locker)
                    locked[size] -= 1
                if not pieces:
                    del self._pieces[size]
        tensors = []
        for piece in surplus:
            tensors += piece.cancel()
        if tensors:
            self.free(tensors)
        self._freeing += [piece.locking for piece in surplus if piece.locking is not None]
        for extent in extents:
            if there[extent.size]:
                there[extent.size] -= 1
                continue
            missing.append(extent._replace(is_locked=locked[extent.size] > 0))
            locked[extent.size] -= 1
        self.prepare(missing)

    def zeros(self, numel: int, dtype: torch.dtype, *, is_locked: bool = True, is_overwritten: bool = False) -> Tensor:
        """1-D zeros; see `Device.host_zeros`. Where little memory is free and none of these is there, what was prepared
        goes back first, as it may be of other sizes, for a plan that is not in force any more; and what goes back is
        waited for.

        Args:
            is_overwritten: All of it will be written before it is read, so it may hold anything.
        """
        extent = Extent(numel, dtype, is_locked)
        piece = self._taken(extent)
        tensor = None if piece is None else piece.wait()
        is_blank = piece is not None and not piece.was_kept
        if tensor is None:
            tensor, is_blank = self._taken_of_kept(extent.size), False
        if tensor is not None:
            if is_locked:
                self._device.lock(tensor)  # nothing, where it is
            return tensor if is_blank or is_overwritten else tensor.zero_()
        has_more = self._pieces or self._kept or self._freeing
        if has_more and available_host_bytes() < bytes_of([extent]) + self._least_free_bytes:
            self.let_go()
        return self._device.host_zeros(numel, dtype, is_locked=is_locked)

    def _ahead(self, extent: Extent) -> _Made:
        """One that was asked for ahead, not locked if it is new; none if too little memory is free."""
        kept = self._taken_of_kept(extent.size)
        if kept is not None:
            return _Made(kept, was_kept=True)
        if not self._has_room_for(bytes_of([extent])):
            return _Made(None)
        return _Made(self._device.host_zeros(extent.numel, extent.dtype, is_locked=False))

    def _has_room_for(self, nbytes: int) -> bool:
        """Whether so much may be made ahead; looks for itself unless a look was enough for that a moment ago."""
        now_s = time.monotonic()
        self._unseen_bytes += nbytes
        if self._unseen_bytes > _LOOK_EVERY_BYTES or now_s >= self._seen_until_s:
            has_room = available_host_bytes() >= nbytes + self._least_free_bytes
            self._unseen_bytes, self._seen_until_s = nbytes, now_s + _LOOK_EVERY_S if has_room else 0.0
            return has_room
        return True

    def _taken_of_kept(self, size: _Size) -> Tensor | None:
        with self._lock:
            of_size = self._kept.get(size)
            return of_size.pop() if of_size else None

    def _taken(self, extent: Extent) -> _Piece | None:
        """One that is there; or else the last one that was asked for, so that the threads go on with the first ones
        while this one makes its own. Of those that are locked, or not, as is asked for, if there are any."""
        with self._lock:
            pieces = self._pieces.get(extent.size)
            if not pieces:
                return None
            fitting = [i for i, piece in enumerate(pieces) if piece.has_lock == extent.is_locked] or range(len(pieces))
            piece = pieces.pop(next((i for i in fitting if pieces[i].is_ready), fitting[-1]))
            if not pieces:
                del self._pieces[extent.size]
            return piece

    def bytes_ahead(self) -> int:
        """What is there and was not asked for yet."""
        with self._lock:
            there = [p.nbytes for pieces in self._pieces.values() for p in pieces if p.tensor is not None]
            return sum(there) + self._kept_bytes()

    def bytes_begun(self) -> int:
        """As `bytes_ahead`, with what is being made, a part of which is taken already."""
        with self._lock:
            begun = [piece.nbytes for pieces in self._pieces.values() for piece in pieces if piece.is_begun]
            return sum(begun) + self._kept_bytes()

    def _kept_bytes(self) -> int:
        return sum(tensor.nbytes for of_size in self._kept.values() for tensor in of_size)

    def free(self, tensors: list[Tensor]) -> None:
        """Have a thread forget these: the memory of those that nothing else refers to is given back.

        Args:
            tensors: Emptied.
        """
        self._have_freed(self._worker, tensors.clear)

    def give_back(self, tensors: list[Tensor]) -> None:
        """As `free`, of memory that is not from here: the user's, in small pages, which the system takes as long to
        take back as to fill, one tensor at a time (seen: 10 GB/s).

        Args:
            tensors: Emptied, and made to have no elements.
        """
        self._have_freed(self._freer, partial(_empty, tensors))

    def _have_freed(self, worker: Worker, work: Work) -> None:
        self._freeing = [task for task in self._freeing if not task.is_over()]
        self._freeing.append(worker.submit(work))

    def keep(self, tensors: list[Tensor], most_bytes: int) -> None:
        """As `free`, but those that nothing else refers to stay, for the next call for their size, until
        `let_go`.

        Args:
            tensors: Emptied. From `zeros`, and no device reads them any more.
            most_bytes: What may stay, with what has stayed before, of which as much goes as is more.
        """
        others, alone = list[Tensor](), torch.empty(0, device="cpu")
        # A call adds one more reference while the compiler's hook is set than without it.
        least = sys.getrefcount(alone)
        with self._lock:
            room = most_bytes - self._kept_bytes()
            for of_size in self._kept.values():
                while room < 0 and of_size:
                    others.append(of_size.pop())
                    room += others[-1].nbytes
            while tensors:
                tensor = tensors.pop()
                is_free = sys.getrefcount(tensor) <= least and _has_own_memory(tensor)
                # One that was made in inference mode may not be written to outside of it.
                if is_free and tensor.nbytes <= room and not tensor.is_inference():
                    room -= tensor.nbytes
                    self._kept[tensor.numel(), tensor.dtype].append(tensor)
                else:
                    others.append(tensor)
                del tensor  # or the next turn would find it in use
        if others:
            self.free(others)

    def settle(self) -> None:
        """Wait until what `free` and `give_back` were told of is given back; the threads end if nothing is there
        ahead."""
        while self._freeing:
            self._freeing.pop().join()
        if not self._pieces:
            self._rest()

    def drop(self) -> None:
        """Give back what was prepared and was not asked for, and end the threads."""
        with self._lock:
            dropped = [piece for pieces in self._pieces.values() for piece in pieces]
            self._pieces.clear()
        for piece in dropped:
            piece.cancel()
        self._rest()

    def let_go(self) -> None:
        """As `drop`, and give back what has stayed as well."""
        with self._lock:
            tensors = [tensor for of_size in self._kept.values() for tensor in of_size]
            self._kept.clear()
        if tensors:
            self.free(tensors)
        self.settle()
        self.drop()

    def _rest(self) -> None:
        for worker in (self._worker, self._locker, self._freer):
            worker.rest()


class _Made(NamedTuple):
    """What a thread has made ahead."""

    tensor: Tensor | None
    was_kept: bool = False
    """It holds what it held before, and not zeros."""


def _empty(tensors: list[Tensor]) -> None:
    while tensors:
        tensor = tensors.pop()
        if not tensor.is_inference():
            tensor.set_()  # type: ignore[call-overload]  # which goes on without the GIL


def _has_own_memory(tensor: Tensor) -> bool:
    """Whether no other tensor shares its memory, and all of that is its own."""
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.nbytes and storage_use_count(storage) <= 2  # the tensor, and `storage`


@contextmanager
def _beside_others(device: torch.device) -> Iterator[None]:
    """Around the work of a thread, and of those that torch starts for it: processors are for others first."""
    if sys.platform == "linux":  # where a thread has a niceness of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    with working_on(device):
        yield


class _Piece:
    """One tensor that was asked for ahead, and that a thread of the worker makes."""

    def __init__(self, device: Device, extent: Extent, make: Callable[[], _Made], worker: Worker) -> None:
        self._device = device
        self._extent = extent
        self._make = make
        self._is_wanted = True
        self.locking: Task | None = None
        """What locks it, if that shall be."""
        self.is_begun = False
        """It is being made, or there."""
        self.tensor: Tensor | None = None
        """Once it is there; it may have to be locked yet."""
        self.was_kept = False
        """See `_Made`."""
        self._task = worker.submit(self._run)  # last: it may begin at once

    def lock_behind(self, locker: Worker) -> None:
        """Have it locked when it is there."""
        if self.locking is None:
            self.locking = locker.submit(self._lock, is_held=True)
            self._task.then(self.locking.release)

    @property
    def has_lock(self) -> bool:
        """It is locked, or will be."""
        return self.locking is not None

    @property
    def is_ready(self) -> bool:
        return self.tensor is not None and (self.locking is None or self.locking.is_over())

    @property
    def nbytes(self) -> int:
        return bytes_of([self._extent])

    def _run(self) -> None:
        self.is_begun = True
        try:
            made = self._make()
            self.tensor, self.was_kept = made.tensor if self._is_wanted else None, made.was_kept
        finally:
            self.is_begun = self.tensor is not None

    def _lock(self) -> None:
        tensor = self.tensor
        if tensor is not None:
            self._device.lock(tensor)

    def cancel(self) -> list[Tensor]:
        """Have it not made, nor locked, where that has not begun; what is there."""
        self._is_wanted = False
        self._task.cancel()
        tensor, self.tensor = self.tensor, None
        return [] if tensor is None else [tensor]

    def wait(self) -> Tensor | None:
        """The tensor, if it is there or being made; the task is not begun any more otherwise."""
        self._task.cancel()
        # Not `wait`: an error that is raised here would hold the frames of all callers, in a cycle. Where memory could
        # not be had, the next try raises what is to be raised.
        self._task.join()
        if self.locking is not None:
            self.locking.join()
        tensor, self.tensor = self.tensor, None  # an error of the locking would keep it
        return tensor
