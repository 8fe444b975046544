"""Reading boxes: of others' checkpoints, of damaged ones, by one thread and by several."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from lightning_elixir.checkpoint import META_FILE, CheckpointIndex
from lightning_elixir.checkpoint import index as index_module
from lightning_elixir.checkpoint.boxes import Extent
from lightning_elixir.checkpoint.index import StoredTensor
from lightning_elixir.errors import StorageError
from tests.helpers.cut_up import cut_up

THREADS = pytest.mark.parametrize("threads", [contextlib.nullcontext, cut_up])


def _saved(path: Path, **tensors: Any) -> CheckpointIndex:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({"state_dict": dict(tensors)}, checkpoint_id=path, no_dist=True)
    torch.save({}, path / "meta.pt")
    return CheckpointIndex(path)


@THREADS
def test_what_others_save(tmp_path: Path, threads: Any) -> None:
    tensors = {
        "plain": torch.randn(7, 5),
        "conjugate": torch.randn(5, 3, dtype=torch.complex64).conj(),
        "negative": torch._neg_view(torch.randn(7)),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "half": torch.randn(9).bfloat16(),
        "transposed": torch.randn(4, 6).t(),
        "flags": torch.tensor([True, False]),
    }
    index = _saved(tmp_path / "one", **tensors)
    with threads():
        for name, value in tensors.items():
            assert torch.equal(index.read_whole(f"state_dict.{name}"), value), name
        run = torch.empty(20)
        index.read_runs([("state_dict.plain", Extent((7, 5), None, 9, 20), run)])
    assert torch.equal(run, tensors["plain"].view(-1)[9:29])


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    value = torch.randn(4, 5)
    index = _saved(tmp_path / "one", a=value)
    with torch.device("meta"):
        found = index.read_whole("state_dict.a")
    assert torch.equal(found, value)


@THREADS
@pytest.mark.parametrize("at", [0.02, 0.5, 0.98])
def test_a_flipped_bit_of_a_large_box(tmp_path: Path, at: float, threads: Any) -> None:
    """Wherever it is among pieces that are read one after the other."""
    index = _saved(tmp_path / "one", a=torch.randn(1000, 1000), b=torch.randn(5))
    ((_, place),) = index.tensors["state_dict.a"].boxes
    _flip(index.folder / place.file, place.offset + int(at * place.length))
    with threads(), pytest.raises(StorageError, match="the checksum of"):
        index.read_whole("state_dict.a")
    index.read_whole("state_dict.b")


def test_an_entry_that_calls_itself_a_folder(tmp_path: Path) -> None:
    """torch.load leaves the values as memory happens to be."""
    index = _saved(tmp_path / "one", a=torch.randn(37, 3))
    ((_, place),) = index.tensors["state_dict.a"].boxes
    path = index.folder / place.file
    data = path.read_bytes()[place.offset : place.offset + place.length]
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(b"archive/data/0"))
    _flip(path, place.offset + entry + 38, 0x10)
    with pytest.raises(StorageError, match="data/0"):
        index.read_whole("state_dict.a")


def _flip(path: Path, at: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


def test_a_box_that_is_named_twice_does_not_count_twice(tmp_path: Path) -> None:
    index = _saved(tmp_path / "one", a=torch.randn(4, 5))
    stored = index.tensors["state_dict.a"]
    index.tensors["state_dict.a"] = StoredTensor((8, 5), stored.dtype, stored.boxes)
    with pytest.raises(StorageError, match="lacks 20 elements"):
        index.read_whole("state_dict.a")
    original = CheckpointIndex._read_metadata

    def twice(self: CheckpointIndex) -> Metadata:
        found = original(self)
        entry: Any = found.state_dict_metadata["state_dict.a"]
        entry.size, entry.chunks = torch.Size((8, 5)), entry.chunks * 2
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointIndex, "_read_metadata", twice)
        index = CheckpointIndex(tmp_path / "one")
    with pytest.raises(StorageError, match="lacks 20 elements"):
        index.read_whole("state_dict.a")


@THREADS
def test_a_box_of_no_bytes(tmp_path: Path, threads: Any) -> None:
    index = _saved(tmp_path / "one", a=torch.randn(4, 5))
    stored = index.tensors["state_dict.a"]
    ((box, place),) = stored.boxes
    index.tensors["state_dict.a"] = StoredTensor(
        stored.shape, stored.dtype, ((box, type(place)(place.file, place.offset, 0)),)
    )
    with threads(), pytest.raises(StorageError, match="damaged"):
        index.read_whole("state_dict.a")


def test_an_interrupted_read_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = _saved(tmp_path / "one", **{f"k{n}": torch.randn(50) for n in range(30)})
    original, calls = index_module._copy, [0]

    def copy(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 5:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        original(*arguments)

    monkeypatch.setattr(index_module, "_copy", copy)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with cut_up(), pytest.raises(KeyboardInterrupt):
            index.read_runs([(f"state_dict.k{n}", Extent((50,), None, 0, 50), torch.empty(50)) for n in range(30)])
    finally:
        signal.signal(signal.SIGINT, handler)
    assert calls[0] < 30  # not all were waited for
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("elixir-checkpoint")]


class _Runs:
    """Runs code where its pickle is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


class _Own:
    """Of a user, and harmless."""


@pytest.mark.parametrize("weights_only", [None, True])
def test_a_foreign_meta_file_runs_nothing(tmp_path: Path, weights_only: bool | None) -> None:
    index = _saved(tmp_path / "one", a=torch.randn(4, 5))
    path, mark = tmp_path / "one" / META_FILE, tmp_path / "mark"
    kept = path.read_bytes()
    foreign = {"run": _Runs(mark)}
    torch.save(foreign, path)
    with pytest.raises(StorageError, match=r"meta\.pt holds objects .*mkdir.*could run code.*weights_only=False"):
        index.meta(weights_only)
    torch.save({"own": _Own()}, path)
    with pytest.raises(StorageError, match=r"meta\.pt holds objects .*_Own.*weights_only=False"):
        index.meta(weights_only)
    assert isinstance(index.meta(weights_only=False)["own"], _Own)
    torch.save(foreign, path, _use_new_zipfile_serialization=False)
    with pytest.raises(StorageError, match=r"cannot read .*meta\.pt: .*Take another checkpoint"):
        index.meta(weights_only)
    path.write_bytes(pickle.dumps(foreign))
    with pytest.raises(StorageError, match=r"cannot read .*meta\.pt: .*Take another checkpoint"):
        index.meta(weights_only)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("meta/version", b"3")
        archive.writestr("meta/data.pkl", b"garbage")
        archive.writestr("meta/byteorder", b"little")
    with pytest.raises(StorageError, match=r"cannot read .*meta\.pt: .*Take another checkpoint"):
        index.meta(weights_only)
    assert not mark.exists()
    path.write_bytes(kept)
    assert index.meta(weights_only) == {}
