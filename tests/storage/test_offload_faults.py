"""Disks that are full, fail, lie, or are not there: a typed error with path and offset, never wrong numbers."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_elixir.errors import StateError, StorageError
from lightning_elixir.storage.nvme import ALIGNMENT, open_offload_file, remove_stale, tensornvme_backend
from tests.storage.conftest import Open, needs_tensornvme
from tests.storage.files import MIB, noise, read_back, start

NUMEL = 9 * MIB // 4


def test_a_missing_folder_is_made(tmp_path: Path, backend: str) -> None:
    with open_offload_file(tmp_path / "a" / "b", [64], backend=backend):
        assert (tmp_path / "a" / "b").is_dir()


def test_a_folder_that_cannot_be_made(tmp_path: Path, backend: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Not a directory; choose a folder") as caught:
        open_offload_file(tmp_path / "file" / "folder", [64], backend=backend)
    assert caught.value.path == tmp_path / "file" / "folder"


def test_a_folder_that_cannot_be_written(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)  # root may write to any folder
    with pytest.raises(StorageError, match="Permission denied; choose a folder"):
        open_offload_file(tmp_path, [64], backend=backend)


# ------------------------------------------------------------------------------------------------ full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    folder, mount = tmp_path / "small", shutil.which("mount")
    folder.mkdir()
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    deadline = time.monotonic() + 10  # the kernel takes an io_uring down when it has the time
    while subprocess.run(["umount", str(folder)], capture_output=True, check=False).returncode != 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_full_disk_is_seen_before(small_disk: Path, backend: str) -> None:
    with pytest.raises(StorageError, match=r"has 16.0 MiB free, and rank 3 needs [23]\d\.\d MiB there") as caught:
        open_offload_file(small_disk, [20 * MIB], backend=backend, rank=3)
    assert caught.value.path == small_disk
    assert list(small_disk.iterdir()) == []
    with open_offload_file(small_disk, [7 * MIB], backend=backend) as file:
        file.write(0, torch.ones(7 * MIB // 4)).wait()
        assert (read_back(file, 0, 7 * MIB // 4) == 1).all()
        with pytest.raises(StorageError, match="rank 0 needs"):
            open_offload_file(small_disk, [12 * MIB], backend=backend)  # the space is taken already
    assert os.statvfs(small_disk).f_bavail == os.statvfs(small_disk).f_blocks


def test_room_is_looked_for_before_any_is_taken(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("space was taken"))
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=4096))
    with pytest.raises(StorageError, match="has 0.0 MiB free"):
        open_offload_file(tmp_path, [MIB], backend=backend)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_space_is_taken(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", raising(errno.ENOSPC))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError, match="MiB free, and rank 0 needs"):
        open_offload_file(tmp_path, [64], backend=backend)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_limit_of_the_process_is_told_from_a_folder_that_cannot_be_written(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", raising(errno.EFBIG))
    with pytest.raises(StorageError, match=r"File too large; the limit of this process \(ulimit -f\)"):
        open_offload_file(tmp_path, [64], backend=backend)
    assert list(tmp_path.iterdir()) == []


def test_an_error_without_words_is_named(open_file: Open, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend != "direct":
        pytest.skip("tensornvme does not ask the system through Python")
    file = open_file(NUMEL * 4)

    def fail(*_: object) -> int:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        with pytest.raises(StorageError, match="did not take place: MemoryError"):
            file.write(0, noise(NUMEL)).wait()


def test_a_disk_that_cannot_reserve(open_file: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", raising(errno.EOPNOTSUPP))
    file = open_file(NUMEL * 4)
    file.write(0, noise(NUMEL)).wait()
    assert torch.equal(read_back(file, 0, NUMEL), noise(NUMEL))


# ------------------------------------------------------------------------------------------------ reads and writes


def raising(number: int) -> Callable[..., int]:
    def fail(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.EIO, "see the system's log"),
        (errno.ENOSPC, "free some space"),
        (errno.EFBIG, r"the limit of this process \(ulimit -f\)"),
    ],
)
@pytest.mark.parametrize("call", ["read", "write"])
def test_an_error_of_the_system(
    open_file: Open, backend: str, call: str, number: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend != "direct":
        pytest.skip("tensornvme does not ask the system through Python")
    file = open_file(64, NUMEL * 4)
    file.write(1, noise(NUMEL)).wait()
    with monkeypatch.context() as patch:
        real = getattr(os, "preadv" if call == "read" else "pwritev")
        at = 8 * MIB  # the last piece

        def fail_there(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            return raising(number)() if offset == at else real(fd, buffers, offset)

        patch.setattr(os, "preadv" if call == "read" else "pwritev", fail_there)
        request = getattr(file, call)(1, noise(NUMEL))
        with pytest.raises(StorageError, match=f"at offset {at} of .* failed: {os.strerror(number)}; {text}") as caught:
            request.wait()
        assert caught.value is request.error
        assert (caught.value.path, caught.value.offset) == (file.path, at)
        assert caught.value.nbytes == ALIGNMENT + MIB
        file.synchronize()  # somebody has been told
        request = getattr(file, call)(1, noise(NUMEL))
        while not request.is_over():
            time.sleep(0.001)
        with pytest.raises(StorageError, match="failed"):
            file.synchronize()  # nobody had been
    file.write(1, noise(NUMEL, seed=1))  # a failure of the past does no harm
    assert torch.equal(read_back(file, 1, NUMEL), noise(NUMEL, seed=1))


def test_a_failed_write_fails_the_read_behind_it(
    open_file: Open, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend != "direct":
        pytest.skip("tensornvme does not ask the system through Python")
    file = open_file(MIB, queue_depth=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", raising(errno.EIO))
        file.write(0, noise(MIB // 4))
        read = file.read(0, torch.empty(MIB // 4))
        with pytest.raises(StorageError):
            file.synchronize()
        assert read.error is not None or read.is_over()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_what_ends_early_is_continued(
    open_file: Open, backend: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend != "direct":
        pytest.skip("tensornvme does not ask the system through Python")
    file, tensor = open_file(NUMEL * 4 + 40), noise(NUMEL + 10)
    real, counts = getattr(os, call), []

    def half(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        counts.append(offset)
        wanted = len(buffers[0])
        part = wanted if wanted <= ALIGNMENT else wanted // 2 // ALIGNMENT * ALIGNMENT
        return int(real(fd, [buffers[0][:part]], offset))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, half)
        file.write(0, tensor).wait()
        assert torch.equal(read_back(file, 0, NUMEL + 10), tensor)
    assert len(counts) > 3


@pytest.mark.parametrize("call", ["read", "write"])
def test_what_ends_for_good_fails(open_file: Open, backend: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend != "direct":
        pytest.skip("tensornvme does not ask the system through Python")
    file = open_file(MIB)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv" if call == "read" else "pwritev", lambda *_: 0)
        with pytest.raises(StorageError, match="ended after 0: the file was cut off") as caught:
            getattr(file, call)(0, torch.ones(MIB // 4)).wait()
    assert (caught.value.offset, caught.value.nbytes) == (0, MIB)


def test_a_file_that_was_cut_off(open_file: Open, backend: str) -> None:
    file = open_file(NUMEL * 4)
    file.write(0, noise(NUMEL)).wait()
    os.truncate(a_descriptor(file.path), MIB)
    with pytest.raises(StorageError, match="cut off|cannot be read"):
        read_back(file, 0, NUMEL)
    with pytest.raises(StorageError, match="was cut off at 1048576 bytes") as caught:
        file.synchronize()
    assert caught.value.offset == MIB


def test_a_file_that_was_written_over(open_file: Open, backend: str) -> None:
    file = open_file(NUMEL * 4)
    fd = a_descriptor(file.path)
    with open(fd, "r+b", buffering=0) as other:
        other.seek(-ALIGNMENT, os.SEEK_END)
        other.write(b"somebody else's".ljust(ALIGNMENT))
    with pytest.raises(StorageError, match="written over by something else"):
        file.synchronize()


@pytest.mark.parametrize("has_checksums", [False, True])
def test_bytes_that_change_on_the_disk(open_file: Open, backend: str, has_checksums: bool) -> None:
    file = open_file(ALIGNMENT, 3 * ALIGNMENT, has_checksums=has_checksums)
    file.write(1, torch.ones(3 * 1024)).wait()
    with open(a_descriptor(file.path), "r+b", buffering=0) as other:
        content = other.read(2**20)
        at = content.index(b"\x00\x00\x80\x3f" * 1024) + ALIGNMENT
        other.seek(at)
        other.write(bytes(ALIGNMENT))
    if has_checksums:
        with pytest.raises(StorageError, match="region 1 are not those that were written") as caught:
            read_back(file, 1, 3 * 1024)
        assert (caught.value.offset, caught.value.nbytes) == (ALIGNMENT, ALIGNMENT)
    else:
        assert read_back(file, 1, 3 * 1024).sum() == 2 * 1024
    file.write(1, torch.ones(3 * 1024)).wait()
    assert read_back(file, 1, 3 * 1024).sum() == 3 * 1024


def a_descriptor(path: Path) -> str:
    """A way to open a file that has no name any more."""
    for name in os.listdir("/proc/self/fd"):
        if os.path.basename(path) in os.path.realpath(f"/proc/self/fd/{name}"):
            return f"/proc/self/fd/{name}"
    raise FileNotFoundError(path)


# ------------------------------------------------------------------------------------------------ file systems


def test_without_o_direct(open_file: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    file = open_file(NUMEL * 4 + 4)
    assert not file.is_direct
    file.write(0, noise(NUMEL + 1)).wait()
    assert torch.equal(read_back(file, 0, NUMEL + 1), noise(NUMEL + 1))


def test_where_a_file_needs_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.unlink
    monkeypatch.setattr(os, "unlink", raising(errno.EBUSY))
    file = open_offload_file(tmp_path, [MIB])
    assert file.path.exists()
    file.write(0, torch.ones(MIB // 4)).wait()
    file.synchronize()
    assert (read_back(file, 0, MIB // 4) == 1).all()
    monkeypatch.setattr(os, "unlink", real)
    file.close()
    assert not file.path.exists()


def test_tensornvme_cannot_do_with_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_tensornvme()
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", raising(errno.EBUSY))
        with pytest.raises(StorageError, match='choose another folder, or the back end "direct"'):
            open_offload_file(tmp_path, [MIB], backend="tensornvme")


# ------------------------------------------------------------------------------------------------ stale files

KEEPER = """
import sys, time, torch
from lightning_elixir.storage.nvme import open_offload_file
file = open_offload_file(sys.argv[1], [2**20], keep_name=True)
file.write(0, torch.ones(2**18)).wait()
print(file.path, flush=True)
time.sleep(60)
"""


@pytest.mark.full
def test_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    process = start(KEEPER, str(tmp_path))
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    foreign = [tmp_path / "data.bin", path.with_name(f"{path.name}.bak"), tmp_path / f"{path.name[:-8]}00000000"]
    for other in foreign:
        other.write_bytes(b"mine" * 3000)
    elsewhere = tmp_path / "elixir-offload-anotherhost-1-rank0-01234567"
    elsewhere.write_bytes(b"")
    try:
        assert path.exists()
        with open_offload_file(tmp_path, [64]):
            assert path.exists()  # its owner lives
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        assert path.exists()
        with open_offload_file(tmp_path, [64]):
            assert not path.exists()
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()
    assert sorted(tmp_path.iterdir()) == sorted([*foreign, elsewhere])


def test_a_process_that_died_before_it_had_written_anything(tmp_path: Path) -> None:
    with open_offload_file(tmp_path, [64], keep_name=True) as file:
        empty = file.path.with_name(f"{file.path.name[:-8]}ffffffff")
        empty.write_bytes(b"")
        assert remove_stale(tmp_path) == [empty]
        assert file.path.exists()


def test_an_owner_in_another_container_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.pid_exists", lambda _: False)  # its process has another number here
    with open_offload_file(tmp_path, [64], keep_name=True):
        assert remove_stale(tmp_path) == []


def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", raising(errno.ENOLCK))
    with open_offload_file(tmp_path, [64], keep_name=True) as file:
        assert remove_stale(tmp_path) == []  # this process lives
        dead = file.path.with_name(file.path.name.replace(f"-{os.getpid()}-", "-4194305-"))
        shutil.copy(file.path, dead)
        assert remove_stale(tmp_path) == [dead]


@pytest.mark.full
def test_a_named_file_goes_with_an_exception(tmp_path: Path) -> None:
    code = KEEPER.replace("time.sleep(60)", "raise RuntimeError")
    start(code, str(tmp_path)).communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ tensornvme alone


def test_tensornvme_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensornvme", None)
    with pytest.raises(StorageError, match="no-build-isolation tensornvme==0.1.0") as caught:
        open_offload_file(tmp_path, [64], backend="tensornvme")
    assert 'or choose the back end "direct"' in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_system_without_io_uring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_tensornvme()
    libc = SimpleNamespace(syscall=lambda *_: -1)
    monkeypatch.setattr(tensornvme_backend.ctypes, "CDLL", lambda *_, **__: libc)
    with pytest.raises(StorageError, match="the system refuses io_uring"):
        open_offload_file(tmp_path, [64], backend="tensornvme")
    assert list(tmp_path.iterdir()) == []


def test_tensornvme_writes_that_were_lost_are_noticed(tmp_path: Path) -> None:
    needs_tensornvme()
    with open_offload_file(tmp_path, [NUMEL * 4, NUMEL * 4], backend="tensornvme") as file:
        for region in range(2):
            file.write(region, noise(NUMEL)).wait()
        with open(a_descriptor(file.path), "r+b", buffering=0) as other:
            other.write(bytes(8 * MIB + ALIGNMENT))  # as if the first write had not taken place
        with pytest.raises(StorageError, match="offset 0 of region 0 .* cannot be read by tensornvme") as caught:
            read_back(file, 0, NUMEL)
        assert (caught.value.path, caught.value.offset) == (file.path, 0)
        with pytest.raises(StorageError):
            read_back(file, 0, NUMEL)
        assert torch.equal(read_back(file, 1, NUMEL), noise(NUMEL))
        file.write(0, noise(NUMEL, seed=4)).wait()
        assert torch.equal(read_back(file, 0, NUMEL), noise(NUMEL, seed=4))


def test_tensornvme_says_so_when_what_was_taken_is_read_again(tmp_path: Path) -> None:
    needs_tensornvme()
    with open_offload_file(tmp_path, [MIB], backend="tensornvme") as file:
        file.write(0, torch.ones(MIB // 4))
        file.read(0, torch.empty(MIB // 4), will_write=True).wait()
        with pytest.raises(StorageError, match="read with will_write, and has not been written since"):
            read_back(file, 0, MIB // 4)


def test_tensornvme_keeps_within_what_was_reserved(tmp_path: Path) -> None:
    needs_tensornvme()
    with open_offload_file(tmp_path, [NUMEL * 4] * 3, backend="tensornvme") as file:
        size = os.stat(a_descriptor(file.path)).st_size
        buffers = [file.empty(NUMEL, torch.float32) for _ in range(3)]
        for _ in range(20):
            reads = [file.read(region, buffer, will_write=True) for region, buffer in enumerate(buffers)]
            for region in (2, 0, 1):
                reads[region].wait()
                file.write(region, buffers[region].add_(region))
            file.synchronize()
            assert os.stat(a_descriptor(file.path)).st_size == size
        assert [read_back(file, region, NUMEL).unique().tolist() for region in range(3)] == [[0.0], [20.0], [40.0]]


def test_a_closed_file_says_so(open_file: Open) -> None:
    file = open_file(64)
    file.close()
    with pytest.raises(StateError, match="is closed"):
        file.write(0, torch.ones(16))
