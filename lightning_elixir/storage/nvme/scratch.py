"""A file for as long as this process lives.

[Note: nothing stays behind] The name goes right after the file is made, before it has any size: the kernel then frees
its blocks when the last descriptor is closed, however the process ends. NFS and some FUSE file systems give such a file
a hidden name and remove it at the close, which comes to the same. Where that does not work (the name cannot be removed,
or the file cannot be used without it), it keeps its name and gets a last block that tells whose it is. Its owner holds
a lock on it, which the kernel drops when the owner dies; the next process that opens a file in the folder removes those
of this host that are not locked. Nothing is removed that does not bear our name, or ends in something else than our
block.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import mmap
import os
import re
import secrets
import socket
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from lightning_elixir.errors import StateError, StorageError
from lightning_elixir.storage.nvme.transfer import ALIGNMENT

log = logging.getLogger(__name__)

_MAGIC = "lightning_elixir offload 1"
_NAME = re.compile(r"elixir-offload-(?P<host>[0-9A-Za-z_.-]+)-(?P<pid>\d+)-rank\d+-[0-9a-f]{8}")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TOO_LARGE = "the limit of this process (ulimit -f), or the file system, allows no file so large"
NOT_OFFERED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)
"""What `fallocate` fails with where the file system has no such thing."""
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class ScratchFile:
    """A new, empty file that has a name until `unlink`.

    Args:
        folder: Made if it is missing.
        rank: Of this process; told by the name.

    Raises:
        StorageError: The folder cannot be made, or written to.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.nbytes = 0
        self.is_named = True
        self.is_direct = False
        self._rank = rank
        self._process = os.getpid()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(folder, error) from error
        remove_stale(folder)
        self.path, self.fd = _create(folder, rank)
        self._finalizer = weakref.finalize(self, _let_go, self.fd, self.path, self._process)
        _open_files.add(self)

    def unlink(self) -> bool:
        """Take the name away; returns whether the file can be used without."""
        page = memoryview(b"\x01" * ALIGNMENT)
        try:
            os.unlink(self.path)
            self.is_named = False
            if os.pwrite(self.fd, page, 0) != len(page) or os.pread(self.fd, len(page), 0) != page:
                return False
            os.ftruncate(self.fd, 0)
        except OSError:
            return False
        return True

    def allocate(self, nbytes: int) -> None:
        """Take the space on the disk, zeros, and one more block at the end.

        Raises:
            StorageError: The disk has not that much.
        """
        needed = nbytes + ALIGNMENT
        free = _free_bytes(self.path.parent)
        if free < needed:
            raise self._no_space(needed, free)
        try:
            try:
                os.posix_fallocate(self.fd, 0, needed)
            except OSError as error:
                if error.errno not in NOT_OFFERED:
                    raise
                log.info("%s cannot reserve space: a full disk will show when it is written", self.path.parent)
                os.ftruncate(self.fd, needed)
            self.nbytes = nbytes
            with mmap.mmap(-1, ALIGNMENT) as page:
                page.write(self._label())
                if os.pwrite(self.fd, page, nbytes) != ALIGNMENT:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise self._no_space(needed, _free_bytes(self.path.parent)) from error
            raise _unusable(self.path.parent, error) from error

    def go_direct(self) -> None:
        """Leave out the page cache, if the file system can."""
        self.is_direct = go_direct(self.fd, self.nbytes)

    def check(self) -> None:
        """See that the file has kept its size and its last block.

        Raises:
            StorageError: It was cut off, or written over, from outside.
            StateError: It is closed, or another process's.
        """
        self.check_owner()
        size = os.fstat(self.fd).st_size
        if size < self.nbytes + ALIGNMENT:
            raise StorageError(
                f"{self.path} was cut off at {size} bytes of {self.nbytes + ALIGNMENT}: what lay behind is lost; "
                "start again from a checkpoint, and keep other programs from this folder",
                path=self.path,
                offset=size,
                nbytes=self.nbytes + ALIGNMENT - size,
            )
        with mmap.mmap(-1, ALIGNMENT) as page:
            try:
                os.preadv(self.fd, [page], self.nbytes)
            except OSError as error:
                raise failed("reading", self.path, self.nbytes, ALIGNMENT, error) from error
            if page[:] != self._label():
                raise StorageError(
                    f"{self.path} was written over by something else: its last block is not ours; "
                    "start again from a checkpoint, and keep other programs from this folder",
                    path=self.path,
                    offset=self.nbytes,
                    nbytes=ALIGNMENT,
                )

    def check_owner(self) -> None:
        """
        Raises:
            StateError: The file is closed, or another process's.
        """
        if self._process != os.getpid():
            raise StateError(f"{self.path} belongs to process {self._process}, which this one was forked from")
        if not self._finalizer.alive:
            raise StateError(f"{self.path} is closed")

    def is_ours(self) -> bool:
        """Whether this process made it, and was not forked since."""
        return self._process == os.getpid()

    def close(self) -> None:
        """Free its blocks."""
        self._finalizer()

    def _no_space(self, needed: int, free: int) -> StorageError:
        folder = self.path.parent
        return StorageError(
            f"{folder} has {free / 2**20:.1f} MiB free, and rank {self._rank} needs {needed / 2**20:.1f} MiB there: "
            "free some, choose a folder on a larger disk, or offload less",
            path=folder,
            nbytes=needed,
        )

    def _label(self) -> bytes:
        said = {"host": _host(), "process": self._process, "rank": self._rank, "nbytes": self.nbytes}
        return f"{_MAGIC}\n{json.dumps(said)}\n".encode().ljust(ALIGNMENT, b"\0")


def go_direct(fd: int, offset: int) -> bool:
    """Have a descriptor leave out the page cache; returns whether that works.

    Args:
        fd: Of a file that may be written.
        offset: Of a block in it, which is read and written back.
    """
    if not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, ALIGNMENT) as page:
            if os.preadv(fd, [page], offset) == os.pwritev(fd, [page], offset) == ALIGNMENT:
                return True
    except OSError:
        pass
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return False


def remove_stale(folder: Path) -> list[Path]:
    """Remove what dead processes of this host have left in the folder; returns what it was."""
    removed = []
    for path in _ours(folder):
        with suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
            try:
                if _is_stale(fd, path):
                    os.unlink(path)
                    removed.append(path)
            finally:
                os.close(fd)
    if removed:
        log.info("removed what dead processes had left: %s", ", ".join(map(str, removed)))
    return removed


def _ours(folder: Path) -> Iterator[Path]:
    """Files that bear our name, of this host."""
    with suppress(OSError):
        for path in sorted(folder.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match and match["host"] == _host() and path.is_file():
                yield path


def _is_stale(fd: int, path: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            return False  # its owner lives
        match = _NAME.fullmatch(path.name)
        if match is None or psutil.pid_exists(int(match["pid"])):
            return False
    size = os.fstat(fd).st_size
    last = os.pread(fd, ALIGNMENT, max(0, size - ALIGNMENT))
    return last.startswith(_MAGIC.encode()) or not last.strip(b"\0")


def _create(folder: Path, rank: int) -> tuple[Path, int]:
    """A locked, empty file."""
    while True:
        path = folder / f"elixir-offload-{_host()}-{os.getpid()}-rank{rank}-{secrets.token_hex(4)}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise _unusable(folder, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path):
                return path, fd
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return path, fd
        os.close(fd)  # another process took it for stale before it was locked
        with suppress(OSError):
            os.unlink(path)


def _let_go(fd: int, path: Path, process: int) -> None:
    if os.getpid() != process:
        return  # a fork, which has closed it
    with suppress(OSError):
        if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(fd)):
            os.unlink(path)
    with suppress(OSError):
        os.ftruncate(fd, 0)  # now, even where something else (a fork, a ring that the kernel takes down) still has it
    with suppress(OSError):
        os.close(fd)


def _free_bytes(folder: Path) -> int:
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    return found.f_bavail * found.f_frsize


def _host() -> str:
    return re.sub(r"[^0-9A-Za-z_.-]", "_", socket.gethostname()) or "host"


def _unusable(folder: Path, error: OSError) -> StorageError:
    hint = "choose a folder that can be written to"
    if error.errno == errno.EFBIG:
        hint = f"{_TOO_LARGE}: raise it, choose another folder, or offload less"
    text = f"{folder} cannot be used to offload to: {error.strerror or error}; {hint}"
    return StorageError(text, path=folder)


def failed(what: str, path: Path, offset: int, nbytes: int, error: OSError) -> StorageError:
    """What to raise when a read or a write has failed."""
    hint = "free some space there" if error.errno in _NO_SPACE else "see the system's log, or choose another disk"
    if error.errno == errno.EFBIG:
        hint = _TOO_LARGE
    text = f"{what} {nbytes} bytes at offset {offset} of {path} failed: {error.strerror or error}; {hint}"
    return StorageError(text, path=path, offset=offset, nbytes=nbytes)


_open_files: weakref.WeakSet[ScratchFile] = weakref.WeakSet()


def _close_in_fork() -> None:
    """A fork that outlives us would keep the blocks from being freed."""
    for file in list(_open_files):
        if file._finalizer.alive:
            with suppress(OSError):
                os.close(file.fd)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_fork)
