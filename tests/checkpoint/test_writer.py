"""Several threads write one rank's files: what is read is what was given, and an error ends all of them."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elixir.checkpoint import writer as writer_module
from lightning_elixir.checkpoint.boxes import Extent
from lightning_elixir.checkpoint.writer import ShardWriter
from lightning_elixir.core.device import CpuDevice
from tests.helpers.tiers import crossed


def _add_runs(writer: ShardWriter, values: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
    for key, value in values.items():
        writer.add_run(key, Extent(tuple(value.shape), None, 0, value.numel()), value.view(-1), dtype)


def _values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"k{n}": torch.randn(7 + n, 11, generator=generator) for n in range(40)}


@crossed(told=["3-True"], num_files=[1, 3, 8], past_cache=[False, True])
def test_what_is_said_to_be_written_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_files: int, past_cache: bool
) -> None:
    monkeypatch.setattr(writer_module, "BOX_NUMEL", 30)
    values = _values()
    with ShardWriter(tmp_path, 4, CpuDevice(), num_files=num_files, past_cache=past_cache) as writer:
        _add_runs(writer, values, torch.float64)
        writer.add_tensor("whole", torch.arange(5))
        writer.add_object("object", {"a": [1, 2]})
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"__4_{n}.distcp" for n in range(num_files)]
    seen = {key: torch.zeros(value.shape, dtype=torch.int64) for key, value in values.items()}
    places: dict[str, list[tuple[int, int]]] = {}
    for key, offsets, name, begin, length in writer.written:
        places.setdefault(name, []).append((begin, begin + length))
        (tmp_path / "part").write_bytes((tmp_path / name).read_bytes()[begin : begin + length])
        found = torch.load(tmp_path / "part", weights_only=True)
        if key == "object":
            assert (offsets, found) == (None, {"a": [1, 2]})
        elif key == "whole":
            assert offsets == (0,)
            assert torch.equal(found, torch.arange(5))
        else:
            assert offsets is not None
            at = tuple(slice(o, o + n) for o, n in zip(offsets, found.shape, strict=True))
            assert torch.equal(found, values[key][at].double())
            seen[key][at] += 1
    assert all((count == 1).all() for count in seen.values())
    for entries in places.values():  # one after the other, without a gap
        entries.sort()
        assert entries[0][0] == 0
        assert all(end == begin for (_, end), (begin, _) in zip(entries, entries[1:], strict=False))


@pytest.mark.parametrize("failing", [1, 17, 40])
@pytest.mark.parametrize("past_cache", [False, True])
def test_an_error_of_a_thread_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, past_cache: bool
) -> None:
    """Also of the last one, which only leaving the writer can tell."""
    original, lock, calls = ShardWriter._add, threading.Lock(), [0]

    def add(self: ShardWriter, *arguments: Any) -> None:
        with lock:
            calls[0] += 1
            is_it = calls[0] == failing
        if is_it:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        original(self, *arguments)

    monkeypatch.setattr(ShardWriter, "_add", add)
    descriptors = len(os.listdir("/proc/self/fd"))
    with (
        pytest.raises(OSError, match="Input/output"),
        ShardWriter(tmp_path, 0, CpuDevice(), num_files=3, past_cache=past_cache) as writer,
    ):
        _add_runs(writer, _values())
    assert calls[0] <= failing + 2 * 3  # the rest was not begun
    _assert_nothing_left(descriptors)


def test_an_error_of_the_caller_ends_all(tmp_path: Path) -> None:
    def write() -> None:
        with ShardWriter(tmp_path, 0, CpuDevice(), num_files=3, past_cache=True) as writer:
            _add_runs(writer, _values())
            raise KeyboardInterrupt

    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        write()
    _assert_nothing_left(descriptors)


def test_a_file_that_cannot_be_made_leaves_no_other_open(tmp_path: Path) -> None:
    (tmp_path / "__0_2.distcp").mkdir()
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(IsADirectoryError):
        ShardWriter(tmp_path, 0, CpuDevice(), num_files=3)
    _assert_nothing_left(descriptors)


def _assert_nothing_left(descriptors: int) -> None:
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("elixir-checkpoint")]


def test_threads_write_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits, inside, for another one to be there."""
    barrier = threading.Barrier(3)
    original = ShardWriter._add

    def add(self: ShardWriter, *arguments: Any) -> None:
        barrier.wait(30)
        original(self, *arguments)

    monkeypatch.setattr(ShardWriter, "_add", add)
    with ShardWriter(tmp_path, 0, CpuDevice(), num_files=3) as writer:
        _add_runs(writer, dict(list(_values().items())[:6]))
    assert {name for _, _, name, _, _ in writer.written} == {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("past_cache", [False, True])
def test_ctrl_c_while_it_ends_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, past_cache: bool
) -> None:
    """Also where an error is what ends it."""

    def write(is_failing: bool) -> None:
        with ShardWriter(tmp_path, 0, CpuDevice(), num_files=3, past_cache=past_cache) as writer:
            _add_runs(writer, _values())
            close = writer._worker.close

            def interrupted() -> None:
                signal.raise_signal(signal.SIGINT)
                close()

            monkeypatch.setattr(writer._worker, "close", interrupted)
            if is_failing:
                raise OSError

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for is_failing in (False, True):
            descriptors = len(os.listdir("/proc/self/fd"))
            with pytest.raises(KeyboardInterrupt):
                write(is_failing)
            _assert_nothing_left(descriptors)
    finally:
        signal.signal(signal.SIGINT, handler)
