"""Tables of safetensors files, and runs of elements read from them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elixir.checkpoint import Extent, WeightFiles, weight_files
from lightning_elixir.checkpoint.weight_files import DTYPE_NAMES
from lightning_elixir.errors import PlanError, StorageError

save_file = pytest.importorskip("safetensors.torch").save_file


def _one(path: Path, **tensors: torch.Tensor) -> WeightFiles:
    save_file(tensors, path)
    return WeightFiles(path)


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_every_dtype_is_read_as_it_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.arange(24).view(4, 6).to(dtype)
    weight = _one(tmp_path / "a.safetensors", first=torch.ones(3), value=value).weights["value"]
    assert (weight.shape, weight.dtype) == ((4, 6), dtype)
    run = torch.empty(24, dtype=dtype)
    weight.read_run(Extent((4, 6), None, 0, 24), run)
    assert torch.equal(run.view(torch.uint8), value.view(-1).view(torch.uint8))


@pytest.mark.parametrize("buffer_bytes", [4, 12, 20, 4 * 2**20])
def test_any_run_in_buffers_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int) -> None:
    monkeypatch.setattr(weight_files, "_BUFFER_BYTES", buffer_bytes)
    value = torch.randn(3, 5)
    weight = _one(tmp_path / "a.safetensors", first=torch.ones(7, dtype=torch.bfloat16), value=value).weights["value"]
    for begin in range(15):
        for end in range(begin, 16):
            run = torch.full((end - begin,), 9.0)
            weight.read_run(Extent((3, 5), None, begin, end - begin), run)
            assert torch.equal(run, value.view(-1)[begin:end])


def test_any_run_in_another_memory_order(tmp_path: Path) -> None:
    value = torch.randn(3, 4, 2, 2)
    weight = _one(tmp_path / "a.safetensors", value=value).weights["value"]
    ordered = value.to(memory_format=torch.channels_last)
    flat = ordered.as_strided((48,), (1,))
    for begin in range(48):
        for end in range(begin + 1, 49):
            run = torch.empty(end - begin)
            weight.read_run(Extent(value.shape, ordered.stride(), begin, end - begin), run)
            assert torch.equal(run, flat[begin:end])


def test_values_are_cast_through_all_dtypes(tmp_path: Path) -> None:
    value = torch.randn(1000, dtype=torch.float64)
    weight = _one(tmp_path / "a.safetensors", value=value).weights["value"]
    run = torch.empty(1000)
    weight.read_run(Extent((1000,), None, 0, 1000), run, (torch.bfloat16,))
    assert torch.equal(run, value.to(torch.bfloat16).float())
    weight.read_run(Extent((1000,), None, 0, 1000), run)
    assert torch.equal(run, value.float())


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    weights = _one(tmp_path / "a.safetensors", scalar=torch.tensor(1.5), empty=torch.empty(0, 3)).weights
    run = torch.empty(1)
    weights["scalar"].read_run(Extent((), None, 0, 1), run)
    assert run.item() == 1.5
    weights["empty"].read_run(Extent((0, 3), None, 0, 0), torch.empty(0))


def test_folder_with_an_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(3), "not listed": torch.ones(3)}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert list(WeightFiles(tmp_path).weights) == ["a", "b"]
    assert list(WeightFiles(index).weights) == ["a", "b"]
    save_file({"c": torch.ones(2)}, tmp_path / "model.safetensors")
    assert list(WeightFiles(tmp_path).weights) == ["c"]  # as transformers


def _table(entry: dict[str, Any], more: bytes = b"") -> bytes:
    text = json.dumps({"a": entry}).encode()
    return struct.pack("<Q", len(text)) + text + more


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut off, or no safetensors"),
        (b"\0" * 7, "cut off, or no safetensors"),
        (struct.pack("<Q", 10**6) + b"{}", "cut off, or no safetensors"),
        (struct.pack("<Q", 2) + b"{]", "cannot read"),
        (struct.pack("<Q", 2) + b"[]", "cannot read"),
        (_table(GOOD, b"1234567"), "is cut off: "),
        (_table({**GOOD, "shape": [3]}, b"0" * 12), "size of a does not fit"),
        (_table({"dtype": "F32"}, b"0" * 12), "cannot read"),
    ],
)
def test_damaged_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=message) as info:
        WeightFiles(tmp_path)
    assert str(path) in str(info.value)


def test_dtype_that_torch_has_not(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(_table({"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}, b"00"))
    with pytest.raises(PlanError, match=r"a is of dtype F4, which cannot be read here"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ('{"weight_map": {"a": "../one.safetensors"}}', "outside of its folder"),
        ('{"weight_map": {"a": "two.safetensors"}}', "two.safetensors, which is missing"),
        ('{"weight_map": {"b": "one.safetensors"}}', "b is in one.safetensors, which has no such tensor"),
        ('{"weight_map": ["a"]}', "cannot read"),
        ("{}", "cannot read"),
        ("{", "cannot read"),
    ],
)
def test_damaged_index(tmp_path: Path, places: str, message: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(places)
    with pytest.raises(StorageError, match=message):
        WeightFiles(tmp_path)


def test_no_such_folder_or_nothing_in_it(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="snapshot_download"):
        WeightFiles(tmp_path / "gpt2")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(PlanError, match=r"neither model.safetensors nor .*there is pytorch_model.bin.*save_pretrained"):
        WeightFiles(tmp_path)
    with pytest.raises(PlanError, match="no safetensors file"):
        WeightFiles(tmp_path / "pytorch_model.bin")


def test_file_that_becomes_shorter(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    weight = _one(path, value=torch.ones(100)).weights["value"]
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(StorageError, match="is cut off: 40 bytes are missing") as info:
        weight.read_run(Extent((100,), None, 0, 100), torch.empty(100))
    assert (info.value.path, info.value.offset, info.value.nbytes) == (path, size - 40, 40)
    path.unlink()
    with pytest.raises(StorageError, match="cannot read"):
        weight.read_run(Extent((100,), None, 0, 100), torch.empty(100))
