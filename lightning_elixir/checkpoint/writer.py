"""One rank's files of a sharded checkpoint, and the table of contents of all.

`torch.distributed.checkpoint` has a writer of its own, which keeps every tensor of a file until the file is written:
with shards on the host, twice the memory. This one writes the same format, one box after the other.

[Note: several files] Checksums, the search for memory and what the system does for every page take more time than a
fast disk: one thread came to a fourth of what the disk of a machine with 16 cores can do. So a rank with much to save
writes several files (as torch's own writer may), each by one thread at a time, in boxes of at most `BOX_NUMEL`
elements. The caller's thread alone reads the engine's state; what lies on the device it sends to page-locked memory,
and goes on with the next box. As many boxes are under way as there are files, and one more.

Loading reads the boxes of a chunk by as many threads as saving has, each of which checks its box before it copies it;
their buffers are used again, and no more than 256 MiB of boxes are under way.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_elixir.checkpoint.boxes import Box, Extent, Shape, whole
from lightning_elixir.checkpoint.direct_file import DirectFile, open_new
from lightning_elixir.core.device import Device
from lightning_elixir.core.signals import deferred
from lightning_elixir.core.worker import Task, Worker
from lightning_elixir.errors import StorageError

BOX_NUMEL = 4 * 2**20
"""A tensor of fp32 in a box takes 16 MiB: less than what the C library asks the system for, page by page, every time
(`M_MMAP_THRESHOLD` grows to 32 MiB), so that threads that load find memory which is there."""
FILE_BYTES = 64 * 2**20
"""Fewer bytes are not worth a further file."""

_VERSION = "1.0.0"

Written = tuple[str, Shape | None, str, int, int]
"""Key, offsets (None: no tensor), file, offset and length in it."""


def file_name(rank: int, number: int = 0) -> str:
    """As `torch.distributed.checkpoint` calls it."""
    return f"__{rank}_{number}.distcp"


class ShardWriter:
    """Writes one rank's files; see [Note: several files]. For one thread.

    Args:
        folder: Of the checkpoint.
        rank: Whose.
        device: Where runs may lie, beside host memory.
        num_files: How many.
        past_cache: Write to the disk at once, where that is possible, instead of into the system's cache.

    Raises:
        OSError: A file cannot be made. What cannot be written comes with a later call, or at the end.
    """

    def __init__(
        self, folder: Path, rank: int, device: Device, *, num_files: int = 1, past_cache: bool = False
    ) -> None:
        self.paths = [folder / file_name(rank, number) for number in range(num_files)]
        self.written: list[Written] = []
        self._device = device
        self._free_files: SimpleQueue[tuple[str, Any]] = SimpleQueue()  # those that no thread writes to
        self._under_way: deque[Task] = deque()
        self._most_under_way = num_files + 1
        self._buffers: list[Tensor] = []  # page-locked, free; never more than may be under way
        self._files: list[Any] = []
        self._worker = Worker("elixir-checkpoint", num_threads=num_files)
        try:
            with deferred():
                for path in self.paths:
                    self._files.append(open_new(path, past_cache=past_cache))
                    self._free_files.put((path.name, self._files[-1]))
        except BaseException:
            self._leave(is_whole=False)
            raise

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_whole = False
        try:
            if error is None:
                self._wait(0)
                is_whole = True
        finally:
            with deferred():
                try:
                    self._end_tasks()
                finally:
                    self._leave(is_whole)

    def _end_tasks(self) -> None:
        """Drop what has not begun, wait for what has, and end the threads: the files are theirs until then."""
        for task in self._under_way:
            task.cancel()
        self._worker.wait()
        self._worker.close()

    def _leave(self, is_whole: bool) -> None:
        """Close all files. If they are not whole, an error is on its way already: an `OSError` here is not raised."""
        first: BaseException | None = None
        while self._files:
            file = self._files.pop()
            try:
                if isinstance(file, DirectFile) and (first is not None or not is_whole):
                    file.abandon()
                else:
                    file.close()
            except BaseException as error:
                if first is None and (is_whole or not isinstance(error, OSError)):
                    first = error
        if first is not None:
            raise first

    def add_run(self, key: str, extent: Extent, run: Tensor, dtype: torch.dtype) -> None:
        """Write a run of a tensor's elements.

        Args:
            run: 1-D, `[extent.numel]`, in host memory or on the device; it must stay as it is until the writer is left.
            dtype: To save it in.
        """
        for box, part in extent.parts(run.detach(), BOX_NUMEL):
            self._wait(self._most_under_way - 1)
            if part.device.type == "cpu":
                self._submit(partial(self._add_part, key, extent, box, part, dtype))
            else:
                self._submit(self._sent(key, extent, box, part, dtype))

    def _sent(self, key: str, extent: Extent, box: Box, part: Tensor, dtype: torch.dtype) -> Callable[[], None]:
        """What writes it, which is on its way to the host."""
        nbytes = part.nbytes
        held = self._buffers.pop() if self._buffers else None
        if held is None or held.numel() < nbytes:
            held = self._device.host_zeros(max(nbytes, BOX_NUMEL * 4), torch.uint8)
        buffer, there = held, held[:nbytes].view(part.dtype)
        there.copy_(part, non_blocking=True)
        arrived = self._device.compute_event()

        def add() -> None:
            arrived.synchronize()
            try:
                self._add_part(key, extent, box, there, dtype)
            finally:
                self._buffers.append(buffer)

        return add

    def _add_part(self, key: str, extent: Extent, box: Box, part: Tensor, dtype: torch.dtype) -> None:
        owner = extent.as_box(box, part).to(dtype).contiguous()
        self._add(key, box.offsets, _alone(owner))

    def add_tensor(self, key: str, value: Tensor) -> None:
        """Write a whole tensor; it must stay as it is until the writer is left."""
        self._wait(self._most_under_way - 1)
        owner = value.detach().to("cpu").contiguous()
        self._submit(partial(self._add_whole, key, owner))

    def _add_whole(self, key: str, owner: Tensor) -> None:
        self._add(key, (0,) * owner.dim(), _alone(owner))

    def add_object(self, key: str, value: Any) -> None:
        """Write something that is no tensor."""
        self._wait(self._most_under_way - 1)
        stream = io.BytesIO()  # first into memory: pickling may run code of the user's, which stays on this thread
        torch.save(value, stream)
        self._submit(partial(self._add, key, None, stream))

    def _add(self, key: str, offsets: Shape | None, value: Any) -> None:
        name, file = self._free_files.get()
        try:
            begin = file.tell()
            if isinstance(value, io.BytesIO):
                file.write(value.getbuffer())
            else:
                torch.save(value, file)  # piece by piece
            self.written.append((key, offsets, name, begin, file.tell() - begin))
        finally:
            self._free_files.put((name, file))

    def _submit(self, work: Callable[[], None]) -> None:
        self._under_way.append(self._worker.submit(work))

    def _wait(self, num_left: int) -> None:
        """Until no more than so many are under way."""
        while len(self._under_way) > num_left:
            self._under_way[0].wait()
            self._under_way.popleft()


def _alone(value: Tensor) -> Tensor:
    """The same memory, without what lies beside it: torch saves whatever a tensor is a view of."""
    if not value.numel():
        return value.clone()
    memory = (ctypes.c_char * value.nbytes).from_address(value.data_ptr())
    # The array does not keep the memory; the caller does until the tensor is written.
    return torch.frombuffer(memory, dtype=value.dtype).view(value.shape)


@dataclass(frozen=True)
class TensorPlan:
    """A tensor of the checkpoint, as all ranks together write it."""

    shape: Shape
    dtype: torch.dtype
    extents: tuple[Extent, ...] = ()
    """The ranks' runs; empty: rank 0 writes it as a whole."""

    def boxes(self) -> list[Box]:
        if not self.extents:
            return [whole(self.shape)]
        return [box for extent in self.extents if extent.numel for box in extent.boxes(BOX_NUMEL)]


@dataclass
class Contents:
    """What a checkpoint consists of; the same on every rank."""

    tensors: dict[str, TensorPlan] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    """Key -> where it belongs in the nested state dict; all keys, in the order of that."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further keys of the same bytes."""

    def metadata(self, written: Iterable[Sequence[Written]]) -> Metadata:
        """The table of contents.

        Args:
            written: By rank.

        Raises:
            StorageError: Something of it has not been written.
        """
        # Where a hook of rank 0 alone has put a value in the place of a parameter, others have written the parameter.
        values = {key for key, tensor in self.tensors.items() if not tensor.extents}
        places = {
            (key, offsets): _StorageInfo(name, begin, length)
            for rank, entries in enumerate(written)
            for key, offsets, name, begin, length in entries
            if rank == 0 or key not in values
        }
        described: dict[str, Any] = {}
        storage: dict[MetadataIndex, _StorageInfo] = {}
        for key in self.paths:
            source = self.aliases.get(key, key)
            tensor = self.tensors.get(source)
            if tensor is None:
                described[key] = BytesStorageMetadata()
                storage[MetadataIndex(key)] = _place(places, source, None)
                continue
            boxes = [box for box in tensor.boxes() if 0 not in box.sizes]
            chunks = [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in boxes]
            properties = TensorProperties(dtype=tensor.dtype)
            described[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
            for box in boxes:
                storage[MetadataIndex(key, box.offsets)] = _place(places, source, box.offsets)
        return Metadata(described, dict(self.paths), storage, StorageMeta(), _VERSION)


def _place(places: Mapping[tuple[str, Shape | None], _StorageInfo], key: str, offsets: Shape | None) -> _StorageInfo:
    found = places.get((key, offsets))
    if found is None:
        raise StorageError(
            f"no rank has written {key} from {offsets}: on_save_checkpoint must change the state dict alike everywhere"
        )
    return found


def write_metadata(path: Path, metadata: Metadata) -> None:
    """Write the table of contents."""
    with path.open("wb") as file:
        pickle.dump(metadata, file)
