"""Weights in safetensors files, laid out as transformers does: what there is, and runs of elements of it.

The files are read by offset, for the format is little more than that: eight bytes with the length of a table, the table
in JSON, and the values in row-major order. So a run costs the bytes of the run, in one small buffer, and no page of the
file is ever mapped into the process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_elixir.checkpoint.boxes import Box, Extent, Shape
from lightning_elixir.errors import PlanError, StorageError

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_BUFFER_BYTES = 2**20
_MAX_TABLE_BYTES = 100 * 10**6  # what the format allows


@dataclass(frozen=True)
class StoredWeight:
    """A tensor in a file."""

    path: Path
    shape: Shape
    dtype: torch.dtype
    offset: int
    """Of its first byte in the file."""

    def read_run(self, extent: Extent, target: Tensor, via: Sequence[torch.dtype] = ()) -> None:
        """Fill a run of elements.

        Args:
            extent: Which, in which memory order. Contiguous ones are read by themselves; in another order, or of a part
                of the tensor, whole rows.
            target: 1-D, `[extent.numel]`, in host memory.
            via: Dtypes that the values are cast to on the way to the target's.

        Raises:
            StorageError: The file cannot be read, or has become shorter.
        """
        try:
            with self.path.open("rb", buffering=0) as file:
                if extent.stride is not None or extent.offsets:
                    for box, part in extent.views(target):
                        part.copy_(_cast(self._read_box(file, box), via))
                    return
                step = min(_BUFFER_BYTES // self.dtype.itemsize, max(1, target.numel()))
                buffer = bytearray(step * self.dtype.itemsize)
                for begin in range(0, target.numel(), step):
                    part = target[begin : begin + step]
                    part.copy_(_cast(self._read(file, extent.begin + begin, part.numel(), buffer), via))
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error}", path=self.path) from error

    def _read_box(self, file: Any, box: Box) -> Tensor:
        """Everything from the first to the last element is read."""
        strides = [math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        first = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
        span = 1 + sum((n - 1) * s for n, s in zip(box.sizes, strides, strict=True))
        return self._read(file, first, span, bytearray(span * self.dtype.itemsize)).as_strided(box.sizes, strides)

    def _read(self, file: Any, begin: int, numel: int, buffer: bytearray) -> Tensor:
        """1-D, `[numel]`, in the memory of `buffer`."""
        nbytes, offset = numel * self.dtype.itemsize, self.offset + begin * self.dtype.itemsize
        file.seek(offset)
        done = 0
        while done < nbytes:
            count = file.readinto(memoryview(buffer)[done:nbytes])
            if not count:
                raise StorageError(
                    f"{self.path} is cut off: {nbytes - done} bytes are missing at byte {offset + done}",
                    path=self.path,
                    offset=offset + done,
                    nbytes=nbytes - done,
                )
            done += count
        return torch.frombuffer(buffer, dtype=self.dtype, count=numel)


def _cast(values: Tensor, via: Sequence[torch.dtype]) -> Tensor:
    for dtype in via:
        values = values.to(dtype)
    return values


class WeightFiles:
    """The weights of a pretrained model. Only the tables are read.

    Args:
        path: A folder with `model.safetensors`, or with `model.safetensors.index.json` and the files that it names; or
            one of these files itself (any name that ends in `.safetensors` or `.json`).

    Raises:
        PlanError: There is no such thing, or values are in a dtype that torch has not.
        StorageError: A file is missing, damaged or cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        file = _main_file(path)
        self.weights: dict[str, StoredWeight] = {}
        """By name."""
        if file.suffix != ".json":
            self.weights = _read_table(file)
            return
        places = _read_index(file)
        tables = {name: _read_table(file.parent / name) for name in sorted(set(places.values()))}
        for weight, name in places.items():
            if weight not in tables[name]:
                raise StorageError(f"{file} says that {weight} is in {name}, which has no such tensor", path=file)
            self.weights[weight] = tables[name][weight]


def _main_file(path: Path) -> Path:
    if path.is_file():
        if path.suffix in (".safetensors", ".json"):
            return path
        raise PlanError(f"{path} is no safetensors file: save the model with save_pretrained(folder), and name that")
    if not path.is_dir():
        raise PlanError(
            f"there is no folder {path} with pretrained weights. Nothing is downloaded here: for a name on the Hugging"
            " Face hub, call huggingface_hub.snapshot_download(name) first, which returns the folder"
        )
    for name in (SINGLE_FILE, INDEX_FILE):  # in this order, as transformers does
        if (path / name).is_file():
            return path / name
    found = [file.name for file in sorted(path.iterdir()) if file.suffix in (".bin", ".pt", ".pth", ".safetensors")]
    there = f" (there is {', '.join(found[:3])})" if found else ""
    raise PlanError(
        f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}{there}: save the model there with save_pretrained(folder),"
        " or give the path of the file"
    )


def _read_index(file: Path) -> dict[str, str]:
    """Tensor -> name of its file."""
    try:
        places = json.loads(file.read_bytes())["weight_map"]
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise TypeError("weight_map is no table of names")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"cannot read {file}: {type(error).__name__}: {error}", path=file) from error
    for name in set(places.values()):
        if Path(name).name != name:
            raise StorageError(f"{file} names a file outside of its folder: {name}", path=file)
        if not (file.parent / name).is_file():
            raise StorageError(f"{file} names {name}, which is missing", path=file.parent / name)
    return places


def _read_table(file: Path) -> dict[str, StoredWeight]:
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_TABLE_BYTES):
                raise ValueError("it is cut off, or no safetensors file")
            table = json.loads(opened.read(length))
        found = {name: _entry(file, name, entry, 8 + length) for name, entry in table.items() if name != "__metadata__"}
    except PlanError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"cannot read {file}: {type(error).__name__}: {error}", path=file) from error
    end = max((w.offset + math.prod(w.shape) * w.dtype.itemsize for w in found.values()), default=0)
    if size < end:
        raise StorageError(f"{file} is cut off: {size} bytes of {end}", path=file, offset=size, nbytes=end - size)
    return found


def _entry(file: Path, name: str, entry: Mapping[str, Any], base: int) -> StoredWeight:
    dtype, shape = _DTYPES.get(entry["dtype"]), tuple(int(n) for n in entry["shape"])
    begin, end = entry["data_offsets"]
    if dtype is None:
        raise PlanError(f"{file}: {name} is of dtype {entry['dtype']}, which cannot be read here")
    if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"the size of {name} does not fit its shape {list(shape)}")
    return StoredWeight(file, shape, dtype, base + begin)
