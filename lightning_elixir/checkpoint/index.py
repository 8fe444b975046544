"""What lies where in a sharded checkpoint, ours or another's, and reading it box by box."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from lightning_elixir.checkpoint.boxes import Box, Extent, Shape, whole
from lightning_elixir.checkpoint.folder import META_FILE, METADATA_FILE, restore_previous
from lightning_elixir.errors import PlanError, StorageError


@dataclass(frozen=True)
class Place:
    """Where an entry lies."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint."""

    shape: Shape
    dtype: torch.dtype
    boxes: tuple[tuple[Box, Place], ...]


class CheckpointIndex:
    """A sharded checkpoint, open for reading.

    Args:
        folder: Its path.

    Raises:
        StorageError: It is not whole, or no checkpoint: the message says what is wrong, and with which file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        restore_previous(folder)
        self._check_files_of_format()
        metadata = self._read_metadata()
        self.paths: dict[str, tuple[str | int, ...]] = dict(metadata.planner_data or {})
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, Place] = {}
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                boxes = [Box(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
                placed = tuple((b, self._place(metadata, key, b.offsets)) for b in boxes if 0 not in b.sizes)
                self.tensors[key] = StoredTensor(tuple(entry.size), entry.properties.dtype, placed)
            elif isinstance(entry, BytesStorageMetadata):
                self.objects[key] = self._place(metadata, key, None)
        self._check_sizes()

    @property
    def model_root(self) -> str:
        """The key of the model: Lightning's `FSDPStrategy` calls it otherwise than everybody else.

        Raises:
            StorageError: There is none.
        """
        for root in ("state_dict", "model"):
            if any(key.startswith(f"{root}.") for key in [*self.tensors, *self.objects]):
                return root
        raise StorageError(f"{self.folder} holds no model: no key begins with state_dict or model", path=self.folder)

    def keys_below(self, root: str) -> dict[str, str]:
        """Name -> key of all that lies below `root`."""
        prefix = f"{root}."
        return {key.removeprefix(prefix): key for key in [*self.tensors, *self.objects] if key.startswith(prefix)}

    def meta(self, weights_only: bool | None = None) -> dict[str, Any]:
        """The rest of the checkpoint.

        Args:
            weights_only: As for `torch.load`.

        Raises:
            StorageError: It cannot be read.
        """
        path = self.folder / META_FILE
        try:
            found = torch.load(path, map_location="cpu", weights_only=weights_only)
        except (OSError, RuntimeError, EOFError) as error:
            raise StorageError(f"cannot read {path}: {error}", path=path) from error
        if not isinstance(found, dict):
            raise StorageError(f"{path} is not part of a checkpoint: it holds a {type(found).__name__}", path=path)
        return found

    def read_object(self, key: str) -> Any:
        """What was saved under a key, and is no tensor.

        Raises:
            StorageError: It cannot be read.
        """
        return self._load(self.objects[key])

    def read_whole(self, key: str) -> Tensor:
        """A tensor of the checkpoint, in host memory."""
        stored = self.tensors[key]
        result = torch.empty(stored.shape, dtype=stored.dtype)
        self.read_into(key, result)
        return result

    def read_into(self, key: str, target: Tensor) -> None:
        """Fill a tensor of the same shape, one stored box at a time.

        Raises:
            StorageError: A file cannot be read, or does not hold all of it.
        """
        self._fill(key, [(whole(target.shape), target)])

    def read_run(self, key: str, extent: Extent, target: Tensor) -> None:
        """Fill the run of a tensor's elements, cast to the target's dtype; only boxes that hold some of it are read.

        Args:
            target: 1-D, `[extent.numel]`, any device.

        Raises:
            StorageError: As `read_into`.
        """
        self._fill(key, list(extent.views(target)))

    def _fill(self, key: str, targets: Sequence[tuple[Box, Tensor]]) -> None:
        missing = sum(value.numel() for _, value in targets)
        for box, place in self.tensors[key].boxes:
            parts = [(at, value, part) for at, value in targets if (part := at.common(box)) is not None]
            if not parts:
                continue
            stored = self._load(place)
            if not isinstance(stored, Tensor) or tuple(stored.shape) != box.sizes:
                raise self._damaged(place, f"{key} is not what the table of contents says")
            for at, value, part in parts:
                value[at.slices_of(part)].copy_(stored[box.slices_of(part)])
                missing -= stored[box.slices_of(part)].numel()
        if missing > 0:
            raise StorageError(f"{self.folder} lacks {missing} elements of {key}", path=self.folder)

    # Files

    def _check_files_of_format(self) -> None:
        if not self.folder.is_dir():
            raise StorageError(f"there is no checkpoint folder {self.folder}", path=self.folder)
        for name in (METADATA_FILE, META_FILE):
            if not (self.folder / name).is_file():
                raise StorageError(
                    f"{self.folder} is not a whole checkpoint: it has no file {name}. Take an earlier one",
                    path=self.folder / name,
                )

    def _read_metadata(self) -> Metadata:
        path = self.folder / METADATA_FILE
        try:
            with path.open("rb") as file:
                found = _MetadataUnpickler(file).load()
        except Exception as error:  # whatever a damaged pickle does
            raise StorageError(f"cannot read {path}: {type(error).__name__}: {error}", path=path) from error
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise StorageError(f"{path} is not the table of contents of a checkpoint", path=path)
        return found

    def _place(self, metadata: Metadata, key: str, offsets: Shape | None) -> Place:
        info = metadata.storage_data.get(MetadataIndex(key, offsets))
        if info is None and offsets is not None:
            info = metadata.storage_data.get(MetadataIndex(key))
        if info is None:
            path = self.folder / METADATA_FILE
            raise StorageError(f"{path} does not say where {key} from {offsets} lies", path=path)
        if getattr(info, "transform_descriptors", None):
            raise PlanError(f"{self.folder} was saved compressed, which cannot be read here")
        return Place(str(info.relative_path), int(info.offset), int(info.length))

    def _check_sizes(self) -> None:
        """A file that is missing or cut off is found before anything is overwritten with half of it."""
        ends: dict[str, int] = {}
        for place in [*(p for t in self.tensors.values() for _, p in t.boxes), *self.objects.values()]:
            ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
        for name, end in sorted(ends.items()):
            path = self.folder / name
            if path.resolve().parent != self.folder.resolve():
                raise StorageError(f"{self.folder / METADATA_FILE} names a file outside of its folder: {name}")
            if not path.is_file():
                raise StorageError(f"the checkpoint {self.folder} lacks its file {name}", path=path)
            size = path.stat().st_size
            if size < end:
                raise StorageError(
                    f"{path} is cut off: {size} bytes of {end}",
                    path=path,
                    offset=size,
                    nbytes=end - size,
                )

    def _load(self, place: Place) -> Any:
        path = self.folder / place.file
        try:
            with path.open("rb") as file, io.BufferedReader(_Part(file, place.offset, place.length)) as part:
                os.posix_fadvise(file.fileno(), place.offset, place.length, os.POSIX_FADV_WILLNEED)
                with zipfile.ZipFile(part) as archive:  # torch.load does not compare checksums
                    bad = archive.testzip()
                if bad is not None:
                    raise self._damaged(place, f"the checksum of {bad} does not fit")
                part.seek(0)
                return torch.load(part, map_location="cpu", weights_only=True)
        except StorageError:
            raise
        except Exception as error:  # whatever damaged files do
            raise self._damaged(place, f"{type(error).__name__}: {error}") from error

    def _damaged(self, place: Place, why: str) -> StorageError:
        path = self.folder / place.file
        return StorageError(
            f"{path} is damaged at byte {place.offset} ({why}): take another checkpoint",
            path=path,
            offset=place.offset,
            nbytes=place.length,
        )


class _Part(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        count: int = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return count


_DTYPES = frozenset(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))
_ALLOWED: dict[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch": _DTYPES | {"Size", "device"},
    "torch.serialization": frozenset({"_get_layout"}),
    "pathlib": frozenset({"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}),
    "pathlib._local": frozenset({"Path", "PosixPath"}),
    "collections": frozenset({"OrderedDict"}),
    "builtins": frozenset({"set", "frozenset"}),
}


class _MetadataUnpickler(pickle.Unpickler):
    """The table of contents is a pickle, which could run anything: this one makes nothing but tables of contents."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a table of contents has no use for {module}.{name}")


def first_names(names: Iterator[str] | Sequence[str], limit: int = 5) -> str:
    """The first of them, for a message."""
    listed = list(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")
