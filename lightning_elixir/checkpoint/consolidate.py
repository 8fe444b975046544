"""A sharded checkpoint -> one file, or safetensors. Needs neither a GPU nor memory for the model."""

from __future__ import annotations

import ctypes
import json
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from lightning_elixir.checkpoint.folder import META_FILE, whole_file
from lightning_elixir.checkpoint.index import CheckpointIndex, StoredTensor
from lightning_elixir.checkpoint.weight_files import DTYPE_NAMES, INDEX_FILE, SINGLE_FILE
from lightning_elixir.core.composed_states import composed_again
from lightning_elixir.core.first_names import first_names
from lightning_elixir.errors import PlanError, StorageError
from lightning_elixir.storage.nvme import MappedMemory

OWN_KEY = "lightning_elixir"
"""Of what `meta.pt` holds for us: the loss scale, the states of the ranks' random generators, and which parameters are
the bytes of tensors around others."""


def consolidate(
    folder: Path, output: Path, *, max_file_bytes: int, weights_only: bool = True, part: str = ""
) -> list[Path]:
    """Put a sharded checkpoint together.

    Args:
        folder: Saved by us, by Lightning's FSDP strategies, or by other programs in the same format.
        output: A path that ends in .safetensors: the weights alone, in one file. A folder, or a path without an ending:
            the weights, in files as transformers names them, with its index where there are several. Any other: a
            checkpoint as Lightning saves it, with optimizer states by number.
        max_file_bytes: Of one file in a folder, where more than one tensor goes into it.
        weights_only: As for `torch.load`, for what is no tensor.
        part: Of the model, where weights alone are written: those below this name, and named from there on. Empty: all.

    Returns:
        The files written.

    Raises:
        PlanError: The output is there already, or something cannot be expressed in it.
        StorageError: The checkpoint is damaged, or the output cannot be written.
    """
    index = CheckpointIndex(folder)
    is_folder = output.is_dir() or not output.suffix
    if part and not is_folder and output.suffix != ".safetensors":
        raise PlanError(f"a part of the model goes into safetensors, not into {output.name}: give a folder")
    try:
        if output.suffix == ".safetensors":
            _refuse_existing(output)
            _write_safetensors(output, index, _weights(index, part, weights_only))
            return [output]
        if is_folder:
            return _write_safetensors_folder(output, index, _weights(index, part, weights_only), max_file_bytes)
        _refuse_existing(output)
        _write_checkpoint(output, index, weights_only)
        return [output]
    except OSError as error:
        raise StorageError(f"cannot write {output}: {error}", path=output) from error


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise PlanError(f"{path} exists already: give another path, or remove it first")


# One checkpoint


def _write_checkpoint(output: Path, index: CheckpointIndex, weights_only: bool) -> None:
    checkpoint = index.meta(weights_only)
    own = checkpoint.pop(OWN_KEY, None) or {}
    root = index.model_root
    _refuse_shells(index, own, index.tensors)
    # Where a file holds the model, or an optimizer, under several names, one is enough.
    names = own.get("names") or {}
    others = {*names.values(), *({"model"} if root != "model" else ())} - {root, *names}
    wanted = [k for k in [*index.tensors, *index.objects] if k.partition(".")[0] not in others]
    output.parent.mkdir(parents=True, exist_ok=True)
    with MappedMemory(output.parent) as memory:
        flat = _values(index, wanted, memory)
        nested = unflatten_state_dict(flat, {key: index.paths[key] for key in flat})
        checkpoint["state_dict"] = nested.pop(root)
        roots = sorted((key for key in nested if re.fullmatch(r"optimizer_\d+", key)), key=lambda key: int(key[10:]))
        states = [_numbered(nested.pop(each), memory) for each in roots]
    if states:
        checkpoint["optimizer_states"] = states
        if own.get("loss_scaler"):
            states[0]["loss_scaler"] = own["loss_scaler"]
    checkpoint.update(nested)
    with _new_file(output) as file:
        save_one_file(checkpoint, file)


def save_one_file(checkpoint: Mapping[str, Any], file: IO[bytes]) -> None:
    """`torch.save`, which tells of a full disk by a RuntimeError that follows from the real one."""
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def _values(index: CheckpointIndex, keys: Sequence[str], memory: MappedMemory) -> dict[str, Any]:
    known: dict[Any, Tensor] = {}  # tied parameters are the same boxes, and shall be one tensor
    flat: dict[str, Any] = {}
    for key in keys:
        stored = index.tensors.get(key)
        if stored is None:
            flat[key] = index.read_object(key)
            continue
        same = (stored.shape, stored.boxes) if stored.boxes else key
        if same not in known:
            numel = torch.Size(stored.shape).numel()
            known[same] = memory.empty(numel, stored.dtype).view(stored.shape)
            index.read_into(key, known[same])
        flat[key] = known[same]
    return flat


def _numbered(states: Mapping[str, Any], memory: MappedMemory) -> dict[str, Any]:
    """An optimizer's state dict by parameter names -> by numbers, as torch's optimizers give and take it."""
    names = [name for group in states["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in states["param_groups"]]
    of_names = states.get("state", {})
    state = {numbers[name]: composed_again(of, memory.empty) for name, of in of_names.items()}
    return {"state": state, "param_groups": groups}


# Safetensors


def _refuse_shells(index: CheckpointIndex, own: Mapping[str, Any], keys: Collection[str]) -> None:
    """Raises `PlanError` if one of these keys holds bytes that plain PyTorch would not know as its parameter."""
    shells = own.get("shells") or {}
    found = [f"{name}: {words}" for name, words in shells.items() if f"{index.model_root}.{name}" in keys]
    if found:
        raise PlanError(
            f"{index.folder} holds {len(found)} quantised parameters as bytes ({first_names(found)}), which only a"
            " model with an ElixirModule reads. Save with state_dict_type='full', or take a part without them"
        )


def _weights(index: CheckpointIndex, part: str, weights_only: bool) -> dict[str, str]:
    """Name -> key of the tensors of the model, or of a part of it. A tied one is there once, under its first name, as
    transformers writes it: releases 5.0 to 5.3 do not tie what they find twice."""
    keys = index.keys_below(f"{index.model_root}.{part.rstrip('.')}" if part else index.model_root)
    found: dict[str, str] = {}
    seen = set()
    for name, key in keys.items():
        stored = index.tensors.get(key)
        place = stored and stored.boxes and (stored.shape, stored.boxes)
        if stored is not None and (not place or place not in seen):
            found[name] = key
            seen.add(place)
    if not found:
        names = first_names(list(index.keys_below(index.model_root)))
        raise PlanError(f"{index.folder} has no weights below {part or 'its model'}: there are {names}")
    if (index.folder / META_FILE).exists():  # not in what other programs have saved
        _refuse_shells(index, index.meta(weights_only).get(OWN_KEY) or {}, found.values())
    return found


def _nbytes(stored: StoredTensor) -> int:
    return torch.Size(stored.shape).numel() * stored.dtype.itemsize


def _write_safetensors_folder(
    output: Path, index: CheckpointIndex, weights: Mapping[str, str], max_file_bytes: int
) -> list[Path]:
    files: list[dict[str, str]] = [{}]
    filled = 0
    for name, key in weights.items():
        nbytes = _nbytes(index.tensors[key])
        if files[-1] and filled + nbytes > max_file_bytes:
            files.append({})
            filled = 0
        files[-1][name] = key
        filled += nbytes
    count = len(files)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else [SINGLE_FILE]
    table = output / INDEX_FILE
    paths = [output / name for name in names] + ([table] if count > 1 else [])
    for path in paths:
        _refuse_existing(path)
    output.mkdir(parents=True, exist_ok=True)
    for name, inside in zip(names, files, strict=True):
        _write_safetensors(output / name, index, inside)
    if count > 1:
        total = sum(_nbytes(index.tensors[key]) for key in weights.values())
        places = {weight: name for name, inside in zip(names, files, strict=True) for weight in inside}
        with _new_file(table) as file:
            file.write(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2).encode())
    return paths


def _write_safetensors(path: Path, index: CheckpointIndex, weights: Mapping[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, key in weights.items():
        stored = index.tensors[key]
        if stored.dtype not in DTYPE_NAMES:
            raise PlanError(f"{name} is of {stored.dtype}, which safetensors has no name for")
        begin, end = end, end + _nbytes(stored)
        header[name] = {
            "dtype": DTYPE_NAMES[stored.dtype],
            "shape": list(stored.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with _new_file(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for key in weights.values():
            value = index.read_whole(key)
            if value.numel():
                file.write((ctypes.c_char * value.nbytes).from_address(value.data_ptr()))


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that has its name when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary, temporary.open("wb") as file:
        yield file
