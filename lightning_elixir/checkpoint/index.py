"""What lies where in a sharded checkpoint, ours or another's, and reading it box by box.

The table of contents is a pickle, read by an unpickler that makes tables of contents and nothing else. The sizes of all
files are compared before anything is overwritten, and the checksum of every box that is read.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from lightning_elixir.checkpoint.boxes import Box, Extent, Shape, whole
from lightning_elixir.checkpoint.folder import META_FILE, METADATA_FILE, restore_previous
from lightning_elixir.core.threads import default_num_threads
from lightning_elixir.core.worker import Worker
from lightning_elixir.errors import PlanError, StorageError

_MOST_THREADS = 8
_THREAD_BYTES = 8 * 2**20
"""Fewer bytes are not worth a further thread."""
_MOST_HELD_BYTES = 256 * 2**20
"""That threads may have in memory together, beside where it goes; one box may take more."""
_PIECE_BYTES = 2**20
_IS_FOLDER = 0x10  # in what a table of a ZIP file says of an entry


@dataclass(frozen=True)
class Place:
    """Where an entry lies."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class _Task:
    """A stored box to be read, and where parts of it go."""

    key: str
    box: Box
    place: Place
    parts: Sequence[tuple[Box, Tensor]]


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
                boxes = list(dict.fromkeys(boxes))  # one that is named twice fills nothing twice
                placed = tuple((b, self._place(metadata, key, b.offsets)) for b in boxes if 0 not in b.sizes)
                self.tensors[key] = StoredTensor(tuple(entry.size), entry.properties.dtype, placed)
            elif isinstance(entry, BytesStorageMetadata):
                self.objects[key] = self._place(metadata, key, None)
        self._check_sizes()

    @property
    def model_root(self) -> str:
        """The key of the model: Lightning's `FSDPStrategy` has another than all others.

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
            weights_only: As for `torch.load`: unless it is False, nothing in the file can run code.

        Raises:
            StorageError: It cannot be read, or holds what is not loaded with `weights_only`.
        """
        path = self.folder / META_FILE
        try:
            with path.open("rb") as file:
                bad = _damaged_entry(file, file.fileno(), 0)  # torch.load does not compare checksums
                if bad is not None:
                    raise StorageError(
                        f"{path} is damaged (the checksum of {bad} does not fit): take another checkpoint", path=path
                    )
                file.seek(0)
                found = torch.load(file, map_location="cpu", weights_only=weights_only)
        except StorageError:
            raise
        except pickle.UnpicklingError as error:
            raise _not_trusted(path, error) from error
        except Exception as error:  # whatever damaged files do
            first = re.split(r"\.?\s*\n|\.\s", str(error))[0]  # and not torch's advice
            text = f"{type(error).__name__}: {first}"
            raise StorageError(f"cannot read {path}: {text}. Take another checkpoint", path=path) from error
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
        result = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        self.read_into(key, result)
        return result

    def read_into(self, key: str, target: Tensor) -> None:
        """Fill a tensor of the same shape, in host memory, from the stored boxes.

        Raises:
            StorageError: A file cannot be read, or does not hold all of it.
        """
        self._read(self._tasks(key, [(whole(target.shape), target)]))

    def read_runs(self, wanted: Sequence[tuple[str, Extent, Tensor]]) -> None:
        """Fill runs of tensors' elements, cast to the targets' dtypes; only boxes that hold some of them are read.

        Args:
            wanted: Key, run and target (1-D, `[extent.numel]`, in host memory) of each.

        Raises:
            StorageError: As `read_into`.
        """
        self._read([t for key, extent, run in wanted for t in self._tasks(key, list(extent.views(run)))])

    def _tasks(self, key: str, targets: Sequence[tuple[Box, Tensor]]) -> list[_Task]:
        tasks = []
        missing = sum(value.numel() for _, value in targets)
        for box, place in self.tensors[key].boxes:
            parts = [(part, value[at.slices_of(part)]) for at, value in targets if (part := at.common(box)) is not None]
            if parts:
                tasks.append(_Task(key, box, place, parts))
                missing -= sum(value.numel() for _, value in parts)
        if missing > 0:
            raise StorageError(f"{self.folder} lacks {missing} elements of {key}", path=self.folder)
        return tasks

    def _read(self, tasks: Sequence[_Task]) -> None:
        """One box after the other, by as many threads as pays: what the disk gives, one thread cannot check and copy
        fast enough."""
        lengths = [task.place.length for task in tasks]
        num_threads = min(_MOST_THREADS, default_num_threads(), len(tasks), sum(lengths) // _THREAD_BYTES)
        num_threads = min(num_threads, _MOST_HELD_BYTES // max([1, *lengths]))
        if num_threads < 2:
            for task in tasks:
                self._run(task)
            return
        left, has_failed = iter(tasks), False

        def run() -> None:
            nonlocal has_failed
            try:
                for task in left:
                    if has_failed:
                        return
                    self._run(task)
            except BaseException:
                has_failed = True
                raise

        worker = Worker("elixir-checkpoint-read", num_threads=num_threads)
        try:
            for thread in [worker.submit(run) for _ in range(num_threads)]:
                thread.wait()
        except BaseException:
            has_failed = True
            raise
        finally:
            worker.wait()  # what is read goes to the caller's tensors
            worker.close()

    def _run(self, task: _Task) -> None:
        stored = self._load(task.place)
        if not isinstance(stored, Tensor) or tuple(stored.shape) != task.box.sizes:
            raise self._damaged(task.place, f"{task.key} is not what the table of contents says")
        for part, target in task.parts:
            _copy(target, stored[task.box.slices_of(part)])

    # Files

    def _check_files_of_format(self) -> None:
        if self.folder.is_file():
            raise StorageError(f"{self.folder} is one file, not the folder of a sharded checkpoint", path=self.folder)
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
            raise StorageError(
                f"cannot read {path}: {type(error).__name__}: {error}. Take another checkpoint", path=path
            ) from error
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
                raise StorageError(f"the checkpoint {self.folder} lacks its file {name}: take another one", path=path)
            size = path.stat().st_size
            if size < end:
                raise StorageError(
                    f"{path} is cut off: {size} bytes of {end}. Take another checkpoint",
                    path=path,
                    offset=size,
                    nbytes=end - size,
                )

    def _load(self, place: Place) -> Any:
        path = self.folder / place.file
        try:
            with path.open("rb") as file, io.BufferedReader(_Part(file, place.offset, place.length)) as part:
                os.posix_fadvise(file.fileno(), place.offset, place.length, os.POSIX_FADV_WILLNEED)
                bad = _damaged_entry(part, file.fileno(), place.offset)  # torch.load does not compare checksums
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


def _not_trusted(path: Path, error: pickle.UnpicklingError) -> StorageError:
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if found is None:
        return StorageError(f"cannot read {path}: it is not what torch.save writes. Take another checkpoint", path=path)
    return StorageError(
        f"{path} holds objects of other kinds than checkpoints need ({found[1]}), and making them could run code: they"
        " were not loaded. If you trust the file, pass weights_only=False (to fit, validate, test or predict; --trust"
        " to lightning-elixir consolidate), or name the class in torch.serialization.add_safe_globals; else take"
        " another checkpoint",
        path=path,
    )


def _damaged_entry(part: IO[bytes], descriptor: int, offset: int) -> str | None:
    """The name of an entry of an archive whose checksum does not fit; as `ZipFile.testzip`, which takes several times
    as long, most of it with Python's lock.

    Args:
        descriptor: Of the file of which `part` is a part.
        offset: Where the part begins there.
    """
    with zipfile.ZipFile(part) as archive:
        entries = archive.infolist()
        for entry in entries:
            if entry.external_attr & _IS_FOLDER:  # torch.load takes nothing out of one, and says nothing
                return entry.filename
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            return archive.testzip()
    buffer = bytearray(min(_PIECE_BYTES, max((entry.file_size for entry in entries), default=0)))
    for entry in entries:
        # What the table says of the entry's name and extra field need not be as long as what lies before its bytes.
        lengths = os.pread(descriptor, 4, offset + entry.header_offset + 26)
        at = offset + entry.header_offset + 30 + sum(struct.unpack("<HH", lengths))
        if _checksum(descriptor, at, entry.file_size, buffer) != entry.CRC:
            return entry.filename
    return None


def _checksum(descriptor: int, offset: int, nbytes: int, buffer: bytearray) -> int:
    found, done = 0, 0
    while done < nbytes:
        view = memoryview(buffer)[: nbytes - done]
        count = os.preadv(descriptor, [view], offset + done)
        if not count:
            raise EOFError(f"the file ends {nbytes - done} bytes early")
        found = zlib.crc32(view[:count], found)
        done += count
    return found


def _copy(target: Tensor, source: Tensor) -> None:
    """Not by torch where the bytes are the same: it would start threads of its own for each of ours."""
    are_alike = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
    is_as_it_lies = not any(t.is_conj() or t.is_neg() or t.device.type != "cpu" for t in (target, source))
    if are_alike and is_as_it_lies:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.copy_(source)


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
