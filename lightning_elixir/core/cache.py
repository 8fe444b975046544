"""Where files that may be made again are kept from run to run, and what is taken back from there.

[Note: whose files] A compiled kernel is code, and is run; so nothing is read from a folder, or a file, that a user
other than this one (or root) could have written. What is checked is what is used: a folder is opened once, on a way of
folders in which no other user can rename anything, and from then on known by its descriptor; a file is opened in it,
checked by its own descriptor, and read from that. A folder that will not do costs compiling and measuring anew, and a
line in the log.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_WAY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe shall not be waited for
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_UID_MAP = Path("/proc/self/uid_map")
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
_ALL_USERS = (0, 0, 2**32 - 1)  # every user has the same number inside and outside
_OTHER_TEMPORARY_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - looked at before anything is put there


def default_cache_dir() -> Path | None:
    """`lightning_elixir` in `$XDG_CACHE_HOME` or `~/.cache`; None where there is no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # the XDG specification has relative paths ignored
        return Path(given) / "lightning_elixir"
    try:
        return Path.home() / ".cache" / "lightning_elixir"
    except RuntimeError:
        return None


class NotPrivateError(OSError):
    """Other users could have written to a file or folder; says which, and what helps."""


class PrivateFolder:
    """A folder that no other user can write to, held open.

    Args:
        path: Absolute or relative; may lead through symbolic links.
        make: Make it, and folders on the way, for this user alone.

    Raises:
        NotPrivateError: It, or a folder on the way, belongs to another user, or others can write there.
        OSError: There is none, or it cannot be opened or made.
    """

    def __init__(self, path: Path, *, make: bool = False) -> None:
        self.path = Path(os.path.realpath(path))
        self._fd = _opened(self.path, make)

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def names(self) -> list[str]:
        """Of what is in it, sorted."""
        return sorted(os.listdir(self._fd))

    def read(self, name: str) -> tuple[bytes, float]:
        """The content of a file, and when it was written (seconds since the epoch).

        Raises:
            NotPrivateError: It is another user's, others can write to it, or it is no plain file.
            OSError: It cannot be read.
        """
        path = self.path / name
        descriptor = os.open(name, _READ, dir_fd=self._fd)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise NotPrivateError(f"{path} is not a plain file")
            _check_owner(found, path)
            _check_writers(found, path)
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(), found.st_mtime
        finally:
            os.close(descriptor)

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file. Readers see the old one or the new one, never a part.

        Raises:
            OSError: It cannot be written; nothing of it stays.
        """
        made = f".{name}.{os.getpid()}-{os.urandom(6).hex()}"
        descriptor = os.open(made, _WRITE, 0o600, dir_fd=self._fd)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            os.replace(made, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            with suppress(OSError):
                os.unlink(made, dir_fd=self._fd)
            raise


@contextmanager
def private_temporary_folder() -> Iterator[PrivateFolder]:
    """A new folder that is gone afterwards, in the first temporary folder where no other user can exchange it.

    Raises:
        OSError: There is no such place.
    """
    problem: OSError | None = None
    for parent in dict.fromkeys((tempfile.gettempdir(), *_OTHER_TEMPORARY_FOLDERS)):
        try:
            made = tempfile.TemporaryDirectory(prefix="lightning_elixir-", dir=parent)
        except OSError as error:
            problem = problem or error
            continue
        with made as name:
            try:
                folder = PrivateFolder(Path(name))
            except OSError as error:
                problem = problem or error
                continue
            with folder:
                yield folder
                return
    raise problem or FileNotFoundError("there is no temporary folder")


def _opened(path: Path, make: bool) -> int:
    """A descriptor of the folder, every folder on the way to which was checked as it was opened."""
    here = Path(path.anchor)
    parts = path.parts[1:]
    current = os.open(here, _WAY if parts else _FOLDER)
    try:
        for number, part in enumerate(parts):
            _check_way(os.fstat(current), here)
            flags = _FOLDER if number == len(parts) - 1 else _WAY
            try:
                following = os.open(part, flags, dir_fd=current)
            except FileNotFoundError:
                if not make:
                    raise
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=current)
                following = os.open(part, flags, dir_fd=current)
            os.close(current)
            current, here = following, here / part
        found = os.fstat(current)
        _check_owner(found, here)
        _check_writers(found, here)
    except BaseException:
        os.close(current)
        raise
    return current


def _check_way(found: os.stat_result, path: Path) -> None:
    """Others must not be able to put another folder in the place of one that is in this one."""
    if found.st_uid not in (os.geteuid(), 0, _unmapped_user()):
        raise NotPrivateError(f"{path} belongs to {_name_of(found.st_uid)}, who can exchange what is in it")
    if not found.st_mode & stat.S_ISVTX:
        _check_writers(found, path)


def _check_owner(found: os.stat_result, path: Path) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise NotPrivateError(f"{path} belongs to {_name_of(found.st_uid)}")


def _check_writers(found: os.stat_result, path: Path) -> None:
    others = found.st_mode & stat.S_IWOTH
    if others or (found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)):
        writers = "everybody" if others else "its group"
        raise NotPrivateError(f"{writers} can write to {path} (chmod {'o' if others else 'g'}-w changes that)")


def _is_own_group(gid: int) -> bool:
    """Whether the group is the one that many systems give each user, with no other user in it."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and user.pw_gid == gid and not {*group.gr_mem} - {user.pw_name}


def _unmapped_user() -> int | None:
    """The owner of system folders in a container without root of its own: a number that stands for all users
    that it does not know. None outside of one, where that number is a user like any other."""
    try:
        rows = [tuple(map(int, row.split())) for row in _UID_MAP.read_text(encoding="ascii").splitlines()]
        unmapped = int(_OVERFLOW_UID.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if rows == [_ALL_USERS] else unmapped


def _name_of(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"
