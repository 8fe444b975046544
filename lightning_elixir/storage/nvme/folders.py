"""Folders to offload to: what is wrong with those that are named, and one where none is."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import psutil

from lightning_elixir.errors import StorageError

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


def temporary_folder() -> Path:
    """A folder for temporary files that is on a disk.

    Raises:
        StorageError: There is none that can be written to: what would be offloaded there would stay in host memory.
    """
    usual = (tempfile.gettempdir(), "/var/tmp")  # noqa: S108 (a file without a name is made there, no other)
    tried = list(dict.fromkeys(Path(name).absolute() for name in usual))
    for folder in tried:
        if os.access(folder, os.W_OK | os.X_OK) and not is_in_memory(folder):
            return folder
    raise StorageError(
        f"no folder for temporary files is on a disk ({' and '.join(map(str, tried))} are in memory, or cannot be "
        "written to): name one on the disk to offload to (nvme_offload_dir)"
    )


def problem_of_folder(folder: Path) -> str | None:
    """Why there is no such folder, nor can be; None: there is one, or it may be made."""
    for place in (folder, *folder.parents):
        try:
            mode = os.stat(place).st_mode  # one look: another rank may be making it
        except OSError:
            if not place.is_symlink():
                continue
            kind = "link to nothing"
        else:
            if stat.S_ISDIR(mode):
                return None
            kind = "file" if stat.S_ISREG(mode) else "device or the like"
        return f"{'it' if place == folder else place} is a {kind}, not a folder"
    return None


def check_folder(folder: str | Path) -> None:
    """See that files can be offloaded there, as far as that can be seen without making it.

    Raises:
        StorageError: It is a file, or lies below one.
    """
    folder = Path(folder).absolute()
    problem = problem_of_folder(folder)
    if problem is not None:
        raise StorageError(
            f"{folder} cannot be used to offload to: {problem}. Name a folder on the disk to offload to"
            " (nvme_offload_dir), which is made if it is missing",
            path=folder,
        )


def is_in_memory(folder: Path) -> bool:
    """Whether the folder, or the one that it would be made in, is on a file system that keeps its files in memory.

    Raises:
        StorageError: There is no such folder, and none can be made, as `check_folder` finds.
    """
    real = folder.absolute()
    check_folder(real)
    while not os.path.exists(real) and real != real.parent:
        real = real.parent
    real = real.resolve()
    # The mount point nearest to the folder; of several there, the last hides the others.
    nearest, kind = -1, ""
    for mount in psutil.disk_partitions(all=True):
        point = Path(mount.mountpoint)
        if (real == point or point in real.parents) and len(point.parts) >= nearest:
            nearest, kind = len(point.parts), mount.fstype
    return kind in _IN_MEMORY
