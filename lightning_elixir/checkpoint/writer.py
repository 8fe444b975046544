"""One rank's file of a sharded checkpoint, and the table of contents of all.

`torch.distributed.checkpoint` has a writer of its own, which keeps every tensor of a file until the file is written:
with shards on the host, twice the memory. This one writes the same format, one box after the other.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
from lightning_elixir.errors import StorageError

_VERSION = "1.0.0"

Written = tuple[str, Shape | None, str, int, int]
"""Key, offsets (None: no tensor), file, offset and length in it."""


def file_name(rank: int) -> str:
    """As `torch.distributed.checkpoint` calls it."""
    return f"__{rank}_0.distcp"


class ShardWriter:
    """Writes one rank's file.

    Args:
        folder: Of the checkpoint.
        rank: Whose.
        past_cache: Write to the disk at once, where that is possible, instead of into the system's cache.
    """

    def __init__(self, folder: Path, rank: int, *, past_cache: bool = False) -> None:
        self.path = folder / file_name(rank)
        self.written: list[Written] = []
        self._file: Any = open_new(self.path, past_cache=past_cache)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and isinstance(self._file, DirectFile):
            self._file.abandon()
        else:
            self._file.close()

    def add_run(self, key: str, extent: Extent, run: Tensor, dtype: torch.dtype) -> None:
        """Write a run of a tensor's elements.

        Args:
            run: 1-D, `[extent.numel]`, any device.
            dtype: To save it in.
        """
        for box, value in extent.views(run.detach()):
            owner = value.to("cpu", dtype).contiguous()
            self._add(key, box.offsets, _alone(owner))

    def add_tensor(self, key: str, value: Tensor) -> None:
        """Write a whole tensor."""
        owner = value.detach().to("cpu").contiguous()
        self._add(key, (0,) * value.dim(), _alone(owner))

    def add_object(self, key: str, value: Any) -> None:
        """Write something that is no tensor."""
        self._add(key, None, value)

    def _add(self, key: str, offsets: Shape | None, value: Any) -> None:
        begin = self._file.tell()
        # Into memory first only what is small: a tensor goes to the file piece by piece.
        if isinstance(value, Tensor):
            torch.save(value, self._file)
        else:
            stream = io.BytesIO()
            torch.save(value, stream)
            self._file.write(stream.getbuffer())
        self.written.append((key, offsets, self.path.name, begin, self._file.tell() - begin))


def _alone(value: Tensor) -> Tensor:
    """The same memory, without what lies beside it: torch saves whatever a tensor is a view of."""
    if not value.numel():
        return value.clone()
    memory = (ctypes.c_char * value.nbytes).from_address(value.data_ptr())
    # The array does not keep the memory; whoever calls has it until the tensor is written.
    return torch.frombuffer(memory, dtype=value.dtype).view(value.shape)


@dataclass(frozen=True)
class TensorPlan:
    """A tensor of the checkpoint, as all ranks together write it."""

    shape: Shape
    dtype: torch.dtype
    extents: tuple[Extent, ...] = ()
    """The ranks' runs; empty: one rank writes it as a whole."""

    def boxes(self) -> list[Box]:
        if not self.extents:
            return [whole(self.shape)]
        return [box for extent in self.extents if extent.numel for box in extent.boxes()]


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
        places = {
            (key, offsets): _StorageInfo(name, begin, length)
            for entries in written
            for key, offsets, name, begin, length in entries
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
