"""Folders that come into being as a whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from pathlib import Path

METADATA_FILE = ".metadata"
"""What `torch.distributed.checkpoint` calls its table of contents."""
META_FILE = "meta.pt"
"""What Lightning calls the rest of a checkpoint: loops, schedulers, hyperparameters."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def is_checkpoint_folder(path: Path) -> bool:
    """Whether Lightning would take it for a distributed checkpoint."""
    return path.is_dir() and (path / META_FILE).is_file()


def temporary_sibling(path: Path) -> Path:
    """Where a checkpoint lies until it is whole: a hidden name, which nobody looks for, on the same file system. One
    for each target, so that what a killed run has left goes with the next save there."""
    return path.with_name(f".{path.name}.partial")


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
    """Give a folder its name. What has the name until then is removed, after the new one is there.

    At every moment there is a whole checkpoint under the name, if there was one before: the two change names in one
    step, where the file system can do that.
    """
    if target.is_dir() and not target.is_symlink():
        if not _exchange(temporary, target):
            aside = target.with_name(f".{target.name}.previous")
            remove_folder(aside)
            target.rename(aside)
            temporary.rename(target)
            temporary = aside
        flush(target.parent)
        remove_folder(temporary)
        return
    remove_folder(target)  # a link, or a checkpoint of one file
    temporary.rename(target)
    flush(target.parent)


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
    aside = target.with_name(f".{target.name}.previous")
    if aside.is_dir():
        with contextlib.suppress(FileNotFoundError):  # another rank was quicker
            aside.rename(target)
