"""Files written past the system's cache hold what was written, and say so when they cannot."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_elixir.checkpoint import direct_file
from lightning_elixir.checkpoint.direct_file import NUM_PIECES, PIECE_BYTES, DirectFile, NotOffered, open_new


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    try:
        DirectFile(path).close()
    except NotOffered:
        pytest.skip("this folder's file system has no way around the cache")
    return path


@pytest.mark.parametrize("sizes", [[], [1], [4096], [PIECE_BYTES - 1, 1, 1], [PIECE_BYTES], [3 * PIECE_BYTES + 5, 7]])
def test_what_was_written_is_there(path: Path, sizes: list[int]) -> None:
    parts = [random.Random(n).randbytes(n) for n in sizes]
    file = open_new(path, past_cache=True)
    assert isinstance(file, DirectFile)
    for part in parts:
        assert file.write(part) == len(part)
    assert file.tell() == sum(sizes)
    file.close()
    assert path.read_bytes() == b"".join(parts)


@pytest.mark.full
def test_many_writes_of_all_sizes_over_more_pieces_than_there_are(path: Path) -> None:
    dice = random.Random(0)
    parts = [dice.randbytes(dice.choice([1, 63, 4095, 70_001, 3_000_000])) for _ in range(160)]
    assert sum(map(len, parts)) > 2 * NUM_PIECES * PIECE_BYTES
    file = DirectFile(path)
    for part in parts:
        file.write(memoryview(part))
    file.close()
    assert path.read_bytes() == b"".join(parts)


def test_nothing_of_an_earlier_file_is_left(path: Path) -> None:
    path.write_bytes(b"x" * 2 * PIECE_BYTES)
    file = DirectFile(path)
    file.write(b"y")
    file.close()
    assert path.read_bytes() == b"y"


def _write_pieces(file: DirectFile, count: int) -> None:
    try:
        for _ in range(count):
            file.write(b"z" * PIECE_BYTES)
        file.close()
    except BaseException:
        file.abandon()
        raise


def _failing(monkeypatch: pytest.MonkeyPatch, after: int) -> list[int]:
    seen: list[int] = []

    def pwrite(fd: int, data: Any, offset: int) -> int:
        seen.append(offset)
        if offset >= after:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, data, offset)

    real = os.pwrite
    monkeypatch.setattr(direct_file.os, "pwrite", pwrite)
    return seen


@pytest.mark.parametrize("failing_piece", [0, 2, 7])
def test_a_write_that_fails_is_told_by_write_or_by_close(
    path: Path, monkeypatch: pytest.MonkeyPatch, failing_piece: int
) -> None:
    _failing(monkeypatch, failing_piece * PIECE_BYTES)
    with pytest.raises(OSError, match="Input/output"):
        _write_pieces(DirectFile(path), 8)
    assert not [t for t in threading.enumerate() if t.name.startswith("elixir-checkpoint-write")]


def test_a_disk_that_fills_up_ends_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DirectFile(path)
    monkeypatch.setattr(file, "_take", lambda nbytes: False)
    with pytest.raises(OSError, match="No space"):
        _write_pieces(file, 200)


def test_where_the_disk_has_little_left_only_what_is_needed_is_taken(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = DirectFile._take

    def take(self: DirectFile, nbytes: int) -> bool:
        asked.append(nbytes)
        return nbytes <= PIECE_BYTES and real(self, nbytes)

    monkeypatch.setattr(DirectFile, "_take", take)
    file = DirectFile(path)
    file.write(b"z" * (2 * PIECE_BYTES + 1))
    file.close()
    assert path.stat().st_size == 2 * PIECE_BYTES + 1
    assert min(asked) == 4096  # the rest


@pytest.mark.parametrize("missing", ["go_direct", "fallocate"])
def test_another_file_system_gets_an_ordinary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "go_direct":
        monkeypatch.setattr(direct_file, "go_direct", lambda fd, offset: False)
    else:
        monkeypatch.setattr(direct_file.ctypes, "CDLL", lambda *_args, **_kwargs: object())
    descriptors = len(os.listdir("/proc/self/fd"))
    with open_new(tmp_path / "file", past_cache=True) as file:
        assert not isinstance(file, DirectFile)
        file.write(b"abc")
    assert (tmp_path / "file").read_bytes() == b"abc"
    assert len(os.listdir("/proc/self/fd")) == descriptors
