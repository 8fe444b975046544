"""Files and folders that come into being as a whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

METADATA_FILE = ".metadata"
"""What `torch.distributed.checkpoint` calls its table of contents."""
META_FILE = "meta.pt"
"""What Lightning calls the rest of a checkpoint: loops, schedulers, hyperparameters."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_MAX_NAME_BYTES = 255


def is_checkpoint_folder(path: Path) -> bool:
    """Whether Lightning would take it for a distributed checkpoint."""
    return path.is_dir() and (path / META_FILE).is_file()


def temporary_sibling(path: Path) -> Path:
    """Where a checkpoint lies until it is whole: a hidden name, which nothing else looks for, on the same file system.
    One for each target, so that what a killed run has left goes with the next save there."""
    return _hidden_sibling(path, "partial")


def _hidden_sibling(path: Path, kind: str) -> Path:
    name = f".{path.name}.{kind}"
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:  # the target's own is just short enough
        name = f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()}.{kind}"
    return path.with_name(name)


def flush(path: Path) -> None:
    """Have a file or folder on the disk, not in the system's cache alone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def put_in_place(temporary: Path, target: Path) -> None:
    """Give a folder or a file its name. What has the name until then is removed, after the new one is there.

    At every moment there is a whole checkpoint under the name, if there was one before: a file takes the place of a
    file in one step, and where one of them is a folder the two change names in one, where the file system can do that.

    Raises:
        OSError: It could not be renamed; what had the name has it still.
    """
    old: Path | None = None
    if os.path.lexists(target) and (temporary.is_dir() or target.is_dir()):
        if _exchange(temporary, target):
            old = temporary
        else:
            with set_aside(target) as old:
                temporary.rename(target)
    else:
        temporary.replace(target)
    flush(target.parent)
    for path in (old, _aside(target)):  # or of a run that was killed between two renames
        if path is not None and os.path.lexists(path):
            _remove_old(path)


@contextlib.contextmanager
def set_aside(path: Path) -> Iterator[Path]:
    """Give the name of what is at the path to something else; gives where it is meanwhile, and, if that fails, the name
    back to it."""
    aside = _aside(path)
    remove_folder(aside)
    path.rename(aside)
    try:
        yield aside
    except BaseException:
        remove_folder(path)
        aside.rename(path)
        raise


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """Where Lightning writes a checkpoint of that name, if it is the path of a file and not an address that begins with
    a protocol; None: it is one."""
    name = os.fspath(path)
    if "://" in name or "::" in name or name.startswith(("file:", "local:")):
        return None
    return Path(name).expanduser()  # as fsspec does


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """For writing a checkpoint of one file: gives the path to write it to. After that it is brought to the disk, and
    then it has its name, in place of the file or folder that had it.

    What is neither a file nor a folder (a pipe, `/dev/null`) is written to as it is.

    Raises:
        OSError: It could not be brought there; what had the name has it still.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    temporary = temporary_sibling(path)
    remove_folder(temporary)
    try:
        yield temporary
        flush(temporary)
        put_in_place(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the next save removes it
            remove_folder(temporary)
        raise


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[None]:
    """For writing a file where a checkpoint folder may be, which goes when the file is there."""
    if not path.is_dir():
        yield
        return
    with set_aside(path) as aside:
        yield
    _remove_old(aside)


def _remove_old(path: Path) -> None:
    try:
        remove_folder(path)
    except OSError as error:  # the new one is there: nothing is lost but space
        log.warning("cannot remove %s, which an earlier checkpoint has left: %s", path, error)


def _aside(path: Path) -> Path:
    return _hidden_sibling(path, "previous")


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names; False: not possible here."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def make_empty(path: Path) -> None:
    """Make a folder; what is there goes."""
    remove_folder(path)
    path.mkdir(parents=True)


def restore_previous(target: Path) -> None:
    """After a crash between two renames, where names could not be exchanged: the one from before has its name again."""
    if target.exists() or not target.name:
        return
    aside = _aside(target)
    if os.path.lexists(aside):
        with contextlib.suppress(FileNotFoundError):  # another rank was quicker
            aside.rename(target)
