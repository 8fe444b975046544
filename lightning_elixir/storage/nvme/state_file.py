"""Masters and moments of chunks on a disk, and the buffers in host memory through which they are updated.

[Note: states on NVMe] Each part of a chunk's states (master, first and second moment) has a region of its own in one
file, so that where the master alone is needed, a third is read. Updates borrow one of a few equal buffers for each
piece of a chunk (`StateFile.pieces`; most chunks are one piece): the states are read into it (`StateFile.begin`),
changed there by the caller, and written back (`Visit.end`); the buffer goes to the next visit when that is over. No
thread waits in between: what is read next is decided where a buffer becomes free, on the threads that move the bytes,
by the order of the visits that wait then. So reading one piece, updating another and writing a third go on at once, and
no thread stands still with a buffer that another waits for. Pieces begin at whole blocks in every part, so they share
none.

All others (checkpoints, moves to another placement, writes by users) read and write one part of one chunk at a time, in
memory of their own. Reads and writes of one region take place in the order in which they were asked for, so a read
after a chunk's update was waited for finds what that has written.

After a read for an update or any write has failed, the states are not whole any more: asking for any of them raises
that error, and visits that wait are over at once, so that none of them waits for ever.

An update is described while the states are on the disk, over tensors on `meta` that tell where in a part its slices
lie, and cut into pieces that fit `NVME_BUFFER_BYTES`. A piece's task is *held* until its states have come
(`Worker.submit`), and no thread waits for a visit: one that did could be one of the two that run the updates which free
the buffers it waits for. The chunk's task is over when the values of all pieces are there; only what reads the states
next waits for the write. Moments that were never made are not read: the first update finds zeros, and what
`load_state_dict` has left out is remembered as blank. There are no spare states and no streamed updates for such
chunks, and only Adam of ours, whose updates are described, can have them: of several optimizers the one that was made
last (`hand_over`, `runtime/chunk_optimizers.py`). States are read when their update is handed over, not ahead of that.
A read for a checkpoint that fails loses nothing, and says so.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lightning_elixir.core.signals import DeferringLock, deferred
from lightning_elixir.errors import StateError, StorageError
from lightning_elixir.plan.memory import nvme_buffers
from lightning_elixir.storage.nvme.folders import check_folder, temporary_folder
from lightning_elixir.storage.nvme.mapped import MappedMemory
from lightning_elixir.storage.nvme.offload_file import OffloadFile, open_offload_file
from lightning_elixir.storage.nvme.transfer import ALIGNMENT, Request, aligned, aligned_memory, when_all_over

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")
PARAM = "param"
"""The parameters in the compute dtype, where that is not the master's."""
GRAD = "grad"
"""Gradients on their way to an update, in the dtype that they have come in, from the beginning of the region."""

_MOST_URGENT = float("-inf")

_EVEN_NUMEL = 4 * 2**20
"""Pieces of so many elements and more are multiples of it, which are whole slots of the back end "tensornvme"."""


@dataclass(frozen=True)
class DiskOptions:
    """How states are kept on a disk."""

    folder: str | None = None
    """Of the files; made if missing. None: `temporary_folder()`."""
    backend: str = "direct"
    """One of `storage.nvme.BACKENDS`."""
    has_checksums: bool = False
    """Whether what is read is checked against what was written."""

    def chosen_folder(self) -> Path:
        """Where the files go; it may be missing.

        Raises:
            StorageError: There can be no such folder, or none was given and there is none to take.
        """
        if self.folder is None:
            return temporary_folder()
        folder = Path(os.path.expanduser(self.folder))
        check_folder(folder)
        return folder.absolute()

    def existing_folder(self) -> Path:
        """The folder, made, and tried out.

        Raises:
            StorageError: It cannot be used, none was given and there is none to take, or the back end is not there.
        """
        folder = self.chosen_folder()
        open_offload_file(folder, [ALIGNMENT], backend=self.backend).close()
        return folder


@dataclass(frozen=True)
class StateSpec:
    """What a rank keeps of one chunk."""

    numel: int
    dtype: torch.dtype
    """Of master and moments; of the parameters, where there are none."""
    has_master: bool
    param_dtype: torch.dtype | None = None
    """Of the parameters, if they are on the disk as well, and gradients with them; None: they are not."""
    is_trained: bool = True
    """Otherwise there are parameters only."""

    @property
    def states(self) -> tuple[str, ...]:
        """Master and moments."""
        if not self.is_trained:
            return ()
        return (MASTER, *MOMENTS) if self.has_master else MOMENTS

    @property
    def has_own_values(self) -> bool:
        """Whether the parameters have a part of their own: a master of their dtype holds the same bits."""
        return self.param_dtype is not None and (not self.has_master or self.param_dtype != self.dtype)

    @property
    def values_part(self) -> str:
        """Where the parameters are."""
        return PARAM if self.has_own_values else MASTER

    @property
    def written(self) -> tuple[str, ...]:
        """What an update changes."""
        return (*self.states, PARAM) if self.has_own_values else self.states

    @property
    def parts(self) -> tuple[str, ...]:
        has_grads = self.param_dtype is not None and self.is_trained
        return (*self.written, GRAD) if has_grads else self.written

    def bytes_of(self, part: str, numel: int | None = None) -> int:
        """Of a part on the disk, or of so many of its elements. Gradients may be sums in fp32, and are written in whole
        blocks."""
        numel = self.numel if numel is None else numel
        if part == GRAD:
            return aligned(numel * max(4, (self.param_dtype or self.dtype).itemsize))
        return numel * self.dtype_of(part).itemsize

    def dtype_of(self, part: str) -> torch.dtype:
        """Of its elements; bytes for gradients, which come in several."""
        if part == GRAD:
            return torch.uint8
        return self.param_dtype if part == PARAM and self.param_dtype is not None else self.dtype

    def buffer_bytes(self, numel: int | None = None) -> int:
        """All parts, each where a transfer may begin; or so many elements of each."""
        return sum(aligned(self.bytes_of(part, numel)) for part in self.parts)

    def piece_numel(self, most_bytes: int) -> int:
        """The largest piece that a buffer of so many bytes holds, or the smallest that there may be."""
        if self.buffer_bytes() <= most_bytes:
            return self.numel
        least = ALIGNMENT // min(d.itemsize for d in (self.dtype, self.param_dtype) if d is not None)
        numel = most_bytes // self.buffer_bytes(least) * least
        step = _EVEN_NUMEL if numel >= _EVEN_NUMEL else least
        return max(step, numel // step * step)


@dataclass(frozen=True)
class Piece:
    """Elements of a chunk's shard, `start` and up to `stop`."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def within(self, other: Piece) -> slice | None:
        """Where in the other one is what both have; None: nothing."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return slice(start - other.start, stop - other.start) if start < stop else None


@dataclass
class StateTraffic:
    """What states on a disk have taken since the last reset."""

    read_bytes: int = 0
    written_bytes: int = 0
    waited_s: float = 0.0
    """Time in which states were wanted for updates and none had come that could be updated."""

    def reset(self) -> None:
        self.read_bytes = self.written_bytes = 0
        self.waited_s = 0.0


class Visit:
    """A piece of one chunk's states on its way to a buffer, in it, or on its way back. An `Event`: it is in it, or will
    never be.

    Args:
        file: Makes these.
        chunk_id: Whose states.
        piece: Which elements.
        read: Bytes to read, by part.
        order: The lowest comes first.
        has_landed: Whether the gradients that this is for have; it may change.
    """

    def __init__(
        self,
        file: StateFile,
        chunk_id: int,
        piece: Piece,
        read: Mapping[str, int],
        order: float,
        has_landed: Callable[[], bool],
    ) -> None:
        self.chunk_id = chunk_id
        self.piece = piece
        self.tensors: dict[str, Tensor] = {}
        """By part, 1-D, the piece's elements; those that were not to be read are uninitialised."""
        self._file = file
        self.read = dict(read)
        self._order = order
        self._find_landed = has_landed
        self._is_landed = False
        self._buffer: Tensor | None = None
        self._error: BaseException | None = None
        self._has_come = False
        self._is_coming = threading.Lock()  # given back when it has come
        self._is_coming.acquire()
        self._followers: list[Callable[[], None]] = []
        self._is_over = False

    def is_over(self) -> bool:
        return self._has_come

    def wait(self) -> None:
        """Make the host wait until the states are there.

        Raises:
            StorageError: They could not be read, or others could not be written.
        """
        self._file._make_urgent(self)
        with self._is_coming:
            pass
        if self._error is not None:
            raise self._error

    synchronize = wait

    def has_landed(self) -> bool:
        """Whether the gradients that this is for have; it stays so."""
        self._is_landed = self._is_landed or self._find_landed()
        return self._is_landed

    def then(self, follower: Callable[[], None]) -> None:
        """Call it when this is over, on whatever thread finds out; or right here. It must not wait, nor raise."""
        with self._file._lock:
            if not self._has_come:
                self._followers.append(follower)
                return
        follower()

    def end(self) -> None:
        """Begin to write all parts back; `tensors` are of no use afterwards.

        Raises:
            StorageError: That is not possible.
        """
        self._file._write_back(self)

    def drop(self) -> None:
        """Give the buffer back, if that has not been done, and write nothing: the update has failed. The back end
        "tensornvme" then has nothing there any more, and says so."""
        self._file._drop(self)


class StateFile:
    """The states of some chunks.

    Args:
        specs: By chunk id.
        file: With one region for each part of each chunk, in this order.
        traffic: Counts what is done.
    """

    def __init__(self, specs: Mapping[int, StateSpec], file: OffloadFile, traffic: StateTraffic) -> None:
        self.specs = dict(specs)
        self._file = file
        self._traffic = traffic
        self._regions = {key: number for number, key in enumerate(_keys(specs))}
        visited = {chunk_id: spec for chunk_id, spec in specs.items() if spec.is_trained}
        self._num_buffers, most_bytes = nvme_buffers(s.buffer_bytes() for s in visited.values())
        self._piece_numel = {chunk_id: spec.piece_numel(most_bytes) for chunk_id, spec in visited.items()}
        self._buffer_bytes = max((s.buffer_bytes(self._piece_numel[i]) for i, s in visited.items()), default=0)
        self._lock = DeferringLock()  # what is called when a transfer is over may begin others that are over at once
        self._free: list[Tensor] = []
        self._num_made = 0
        self._waiting: list[Visit] = []
        self._num_reading = self._num_ready = 0
        self._looked_at_s = time.perf_counter()
        self._failure: BaseException | None = None
        self._is_closed = False

    @property
    def backend(self) -> str:
        """The name of the file's back end."""
        return self._file.backend

    def mapped_memory(self) -> MappedMemory:
        """Memory in a file, for whole tensors made of states, which may be as large as all states."""
        return MappedMemory(self._file.folder)

    def of(self, chunk_id: int) -> ChunkStates | None:
        """The states of a chunk, if they are here."""
        return ChunkStates(self, chunk_id, self.specs[chunk_id]) if chunk_id in self.specs else None

    def holds(self, specs: Mapping[int, StateSpec]) -> bool:
        """Whether there is room for these, in the places that they have."""
        return all(self.specs.get(chunk_id) == spec for chunk_id, spec in specs.items())

    def bytes_on_disk(self, part_names: Collection[str]) -> int:
        """What these parts take, of all chunks."""
        return sum(s.bytes_of(part) for s in self.specs.values() for part in s.parts if part in part_names)

    def buffer_bytes_held(self) -> int:
        """Host memory of the buffers."""
        return self._num_made * self._buffer_bytes

    def release_buffers(self) -> None:
        """Let go of the host memory of buffers that no visit has; the next ones make them anew."""
        with self._lock:
            self._num_made -= len(self._free)
            self._free.clear()

    # One part at a time

    def read(self, chunk_id: int, part: str) -> Tensor:
        """A copy of a part, 1-D, in host memory of its own.

        Raises:
            StorageError: It cannot be read, or is not whole.
        """
        spec = self.specs[chunk_id]
        dtype = spec.dtype_of(part)
        target = torch.frombuffer(aligned_memory(max(1, spec.bytes_of(part))), dtype=dtype)[: spec.numel]
        self.read_into(chunk_id, part, target)
        return target

    def read_into(self, chunk_id: int, part: str, target: Tensor, nbytes: int | None = None, offset: int = 0) -> None:
        """As `read`, into the caller's memory.

        Args:
            target: 1-D, contiguous, on the host: the whole part, or whole blocks.
            nbytes: How much of that counts; None: all.
            offset: Bytes of the part before it, in whole blocks.
        """
        self.check()
        self._file.read(self._regions[chunk_id, part], target, offset=offset, order=_MOST_URGENT).wait()
        with self._lock:
            self._traffic.read_bytes += target.nbytes if nbytes is None else nbytes

    def read_values(self, chunk_id: int, target: Tensor) -> None:
        """The parameters, for computing. Where that fails nothing here can be relied on any more: the forward or
        backward that needs them is under way.

        Args:
            target: 1-D, `[numel]`, the compute dtype, in host memory.

        Raises:
            StorageError: They cannot be read.
        """
        try:
            self.read_into(chunk_id, self.specs[chunk_id].values_part, target)
        except Exception as error:
            self._fail(error)
            raise

    def write(self, chunk_id: int, part: str, value: Tensor) -> None:
        """Replace a part.

        Args:
            value: 1-D, `[numel]`, on any device.

        Raises:
            StorageError: It cannot be written.
        """
        source = value.detach().to("cpu", self.specs[chunk_id].dtype_of(part)).contiguous()
        self.write_from(chunk_id, part, source)

    def write_from(self, chunk_id: int, part: str, source: Tensor, nbytes: int | None = None, offset: int = 0) -> None:
        """As `write`, out of the caller's memory. Arguments as for `read_into`."""
        self.check()
        try:
            self._file.write(self._regions[chunk_id, part], source, offset=offset, order=_MOST_URGENT).wait()
        except Exception as error:
            self._fail(error)
            raise
        with self._lock:
            self._traffic.written_bytes += source.nbytes if nbytes is None else nbytes

    # Updates

    def pieces(self, chunk_id: int) -> list[Piece]:
        """The pieces in which a chunk's states are visited: ascending, not overlapping, all together the whole."""
        numel, size = self.specs[chunk_id].numel, max(1, self._piece_numel[chunk_id])
        return [Piece(start, min(start + size, numel)) for start in range(0, numel, size)]

    def begin(
        self,
        chunk_id: int,
        piece: Piece,
        read: Collection[str],
        order: float = 0.0,
        grad_itemsize: int = 0,
        has_landed: Callable[[], bool] = lambda: True,
    ) -> Visit:
        """Have states brought to a buffer; that, and the buffer, is waited for in the order of the visits. Those whose
        gradients have not landed come after all others, as they came: a buffer that is filled too early is of no use
        to others. The caller ends the visit, or drops it.

        Args:
            chunk_id: The last visit of this piece must have ended.
            piece: One of `pieces`.
            read: Parts to read; the others are written all the same, so they must be made.
            order: See `Visit`.
            grad_itemsize: Of gradients, which are read as well; none: they have not landed yet, or are elsewhere.
            has_landed: Whether they have, by now. Called on any thread, with the file's lock: it must not wait.
        """
        nbytes = {part: self.specs[chunk_id].bytes_of(part, piece.numel) for part in read}
        if grad_itemsize:
            nbytes[GRAD] = piece.numel * grad_itemsize
        visit = Visit(self, chunk_id, piece, nbytes, order, has_landed)
        with self._lock:
            self._note_time()
            self._waiting.append(visit)
            self._go_on()
        return visit

    @property
    def has_failed(self) -> bool:
        """Whether `check` raises."""
        return self._failure is not None

    def check(self) -> None:
        """Raises what has made the states unusable, if anything has."""
        if self._failure is not None:
            raise self._failure

    def synchronize(self) -> None:
        """Wait until everything is written.

        Raises:
            StorageError: A read for an update, or a write, has failed; or the file is not ours any more.
        """
        self.check()
        self._file.synchronize()
        self.check()

    def rest(self) -> None:
        """End the threads, for as long as nothing more is asked for."""
        self._file.rest()

    def close(self) -> None:
        """Free the disk and the buffers. Visits that wait are over, and have failed."""
        if self._failure is not None:
            # The error keeps the frames of all calls that raised it, with their losses, whose graphs keep the engine,
            # and that this: a cycle of which the garbage collector does not see all.
            self._failure = StorageError(str(self._failure))
        with deferred():
            with self._lock:
                if self._is_closed:
                    return
                self._is_closed = True
            self._fail(StateError("the states on NVMe are closed"))
            self._file.close()
            self._free.clear()

    # Inside

    def _go_on(self) -> None:
        """Begin as many reads as there are buffers. Locked."""
        while self._waiting:
            if self._failure is not None:
                visits, self._waiting = self._waiting, []
                for visit in visits:
                    self._arrive(visit, self._failure)
                return
            if not self._free:
                if self._num_made >= self._num_buffers:
                    return
                try:
                    self._free.append(self._file.empty(self._buffer_bytes, torch.uint8))
                except BaseException as error:  # no memory, or the file is closed
                    self._fail(error)
                    continue
                self._num_made += 1
            landed = [visit for visit in self._waiting if visit.has_landed()]
            visit = min(landed, key=lambda v: v._order) if landed else self._waiting[0]
            self._waiting.remove(visit)
            self._read(visit, self._free.pop())

    def _read(self, visit: Visit, buffer: Tensor) -> None:
        spec = self.specs[visit.chunk_id]
        visit._buffer = buffer
        visit.tensors, start = {}, 0
        for part in spec.parts:
            nbytes = spec.bytes_of(part, visit.piece.numel)
            visit.tensors[part] = buffer[start : start + nbytes].view(spec.dtype_of(part))
            start += aligned(nbytes)
        self._num_reading += 1
        wanted = []
        for part, nbytes in visit.read.items():
            target = visit.tensors[part]
            whole_blocks = target if part != GRAD else target[: aligned(nbytes)]
            offset = visit.piece.start * (nbytes // visit.piece.numel)
            wanted.append((self._regions[visit.chunk_id, part], whole_blocks, offset))
        try:
            requests = [
                self._file.read(region, x, offset=offset, will_write=True, order=visit._order)
                for region, x, offset in wanted
            ]
        except BaseException as error:
            self._on_read(visit, (), _as_error(error))
            return
        self._traffic.read_bytes += sum(visit.read.values())
        when_all_over(requests, partial(self._on_read, visit, requests))

    def _on_read(self, visit: Visit, requests: Sequence[Request], error: BaseException | None = None) -> None:
        with self._lock:
            self._note_time()
            self._num_reading -= 1
            error = error or _first_error(requests)
            if error is not None:
                self._fail(error)
            else:
                self._num_ready += 1
            self._arrive(visit, error)

    def _arrive(self, visit: Visit, error: BaseException | None) -> None:
        visit._error = error
        visit._has_come = True
        visit._is_coming.release()
        followers, visit._followers = visit._followers, []
        for follower in followers:
            follower()
        if visit._is_over:  # dropped on the way
            self._num_ready -= error is None
            self._give_back(visit)

    def _write_back(self, visit: Visit) -> None:
        with self._lock:
            self._note_time()
            if visit._is_over:
                return
            visit._is_over = True
            self._num_ready -= 1
            spec = self.specs[visit.chunk_id]
            try:
                self.check()
                requests = [
                    self._file.write(self._regions[visit.chunk_id, part], x, offset=visit.piece.start * x.itemsize)
                    for part, x in ((part, visit.tensors[part]) for part in spec.written)
                ]
            except BaseException as error:
                self._fail(error)
                raise
            self._traffic.written_bytes += sum(visit.tensors[part].nbytes for part in spec.written)
            when_all_over(requests, partial(self._on_written, visit, requests))

    def _on_written(self, visit: Visit, requests: Sequence[Request]) -> None:
        with self._lock:
            error = _first_error(requests)
            if error is not None:
                self._fail(error)
            self._give_back(visit)

    def _drop(self, visit: Visit) -> None:
        with self._lock:
            self._note_time()
            if visit._is_over:
                return
            visit._is_over = True
            if visit in self._waiting:
                self._waiting.remove(visit)
                self._arrive(visit, StateError("these states are not needed any more"))
            elif visit.is_over() and visit._error is None:
                self._num_ready -= 1
                self._give_back(visit)

    def _give_back(self, visit: Visit) -> None:
        buffer, visit._buffer = visit._buffer, None
        visit.tensors = {}
        if buffer is not None and not self._is_closed:
            self._free.append(buffer)
        self._go_on()

    def _make_urgent(self, visit: Visit) -> None:
        with self._lock:
            visit._order = _MOST_URGENT

    def _fail(self, error: BaseException) -> None:
        """Nothing that is here can be relied on any more."""
        with self._lock:
            self._failure = self._failure or _as_error(error)
            self._go_on()

    def _note_time(self) -> None:
        """Call before anything changes that the waiting depends on."""
        now_s = time.perf_counter()
        if (self._waiting or self._num_reading) and not self._num_ready:
            self._traffic.waited_s += now_s - self._looked_at_s
        self._looked_at_s = now_s


@dataclass(frozen=True)
class ChunkStates:
    """The states of one chunk on a disk."""

    file: StateFile
    chunk_id: int
    spec: StateSpec

    @property
    def has_master(self) -> bool:
        """Whether the master is there as well; otherwise the compute shard is the optimizer's copy."""
        return self.spec.has_master

    @property
    def has_param(self) -> bool:
        """Whether the parameters are there as well, and gradients with them."""
        return self.spec.param_dtype is not None

    def param_stand_in(self) -> Tensor | None:
        """As `stand_in`, for what an update writes in the compute dtype beside the master."""
        if not self.spec.has_own_values:
            return None
        return torch.empty(self.spec.numel, dtype=self.spec.param_dtype, device="meta")

    def read_grad(self, dtype: torch.dtype) -> Tensor:
        """The gradients, which have come in this dtype; 1-D, in memory of their own. See `StateFile.read`."""
        nbytes = self.spec.numel * dtype.itemsize
        blocks = torch.frombuffer(aligned_memory(max(1, aligned(nbytes))), dtype=torch.uint8)
        self.file.read_into(self.chunk_id, GRAD, blocks, nbytes)
        return blocks[:nbytes].view(dtype)

    def write_grad(self, value: Tensor) -> None:
        """Replace them. See `StateFile.write`.

        Args:
            value: 1-D, `[numel]`, in host memory.
        """
        blocks = torch.frombuffer(aligned_memory(max(1, aligned(value.nbytes))), dtype=torch.uint8)
        blocks[: value.nbytes].view(value.dtype).copy_(value)
        self.write_grad_blocks(blocks, value.nbytes)

    def write_grad_blocks(self, blocks: Tensor, nbytes: int) -> None:
        """As `write_grad`, out of whole blocks of bytes, the first `nbytes` of which are the gradients."""
        self.file.write_from(self.chunk_id, GRAD, blocks, nbytes)

    def stand_in(self) -> Tensor:
        """What has the place of a part where tensors are described but not read: without memory, on `meta`."""
        return torch.empty(self.spec.numel, dtype=self.spec.dtype, device="meta")

    def read(self, part: str) -> Tensor:
        """See `StateFile.read`."""
        return self.file.read(self.chunk_id, part)

    def buffers(self, part: str) -> Iterator[tuple[int, Tensor]]:
        """A part piece by piece: the first element and memory for the values, the same for all pieces."""
        dtype = self.spec.dtype_of(part)
        _, most_bytes = nvme_buffers([aligned(self.spec.bytes_of(part))])
        nbytes = max(ALIGNMENT, most_bytes // ALIGNMENT * ALIGNMENT)
        memory = torch.frombuffer(aligned_memory(nbytes), dtype=dtype)
        for start in range(0, self.spec.numel, memory.numel()):
            yield start, memory[: self.spec.numel - start]

    def read_piece(self, part: str, start: int, target: Tensor) -> None:
        """A piece, as `buffers` gives them. See `StateFile.read_into`."""
        self.file.read_into(self.chunk_id, part, target, offset=start * target.itemsize)

    def write_piece(self, part: str, start: int, source: Tensor) -> None:
        """A piece, as `buffers` gives them. See `StateFile.write_from`."""
        self.file.write_from(self.chunk_id, part, source, offset=start * source.itemsize)

    def copy_from(self, other: ChunkStates, part: str) -> None:
        """Replace a part by what another file holds of it.

        Args:
            other: The same chunk's, with the same elements in this part.

        Raises:
            StorageError: It cannot be read or written.
        """
        for start, values in self.buffers(part):
            other.read_piece(part, start, values)
            self.write_piece(part, start, values)

    def write(self, part: str, value: Tensor) -> None:
        """See `StateFile.write`."""
        self.file.write(self.chunk_id, part, value)


def open_state_file(
    specs: Mapping[int, StateSpec], options: DiskOptions, rank: int, traffic: StateTraffic
) -> StateFile:
    """Take room on the disk for the states of these chunks; they are zeros at first.

    Args:
        specs: By chunk id.
        options: Which folder, which back end.
        rank: Of this process.
        traffic: Counts what is done.

    Raises:
        StorageError: The folder cannot be used or has too little room, the back end is not there, or no folder was
            given and there is none to take.
        PlanError: There is no such back end.
    """
    file = open_offload_file(
        options.chosen_folder(),
        [specs[chunk_id].bytes_of(part) for chunk_id, part in _keys(specs)],
        backend=options.backend,
        rank=rank,
        has_checksums=options.has_checksums,
    )
    return StateFile(specs, file, traffic)


def _keys(specs: Mapping[int, StateSpec]) -> list[tuple[int, str]]:
    return [(chunk_id, part) for chunk_id, spec in specs.items() for part in spec.parts]


def _as_error(error: BaseException) -> Exception:
    """What later calls raise: a second Ctrl-C was meant only for the call that it interrupted."""
    if isinstance(error, Exception):
        return error
    failure = StorageError(
        f"states on NVMe were on their way when {type(error).__name__} came a second time, and are not whole any more: "
        "start again from a checkpoint"
    )
    failure.__cause__ = error
    return failure


def _first_error(requests: Sequence[Request]) -> StorageError | None:
    errors = [request.take_care() for request in requests]
    return next((error for error in errors if error is not None), None)
