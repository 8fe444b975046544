"""A sharded checkpoint on its way to the disk, by all ranks together.

[Note: two parts of a save] Rank 0 makes `.NAME.partial`; every rank writes its files there, rank 0 `meta.pt` too
(`PendingFolder.write`). From then on nothing that training changes is needed. Then every rank flushes its files, rank 0
writes the table of contents, flushes, and exchanges the two names in one system call (`renameat2`; where the file
system cannot, two renames, which the next load repairs) (`PendingFolder.commit`). With `async_save` a thread does that
second part, with messages over a process group of its own. We considered to let the thread read chunks, and updates
wait for chunks not yet saved; but each of five kinds of update would have had to wait, and the file system's cache does
it with no memory that the system cannot take back. After each part ranks exchange what has failed, and all raise.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from lightning_elixir.checkpoint.folder import (
    META_FILE,
    METADATA_FILE,
    flush,
    make_empty,
    put_in_place,
    remove_folder,
    temporary_sibling,
)
from lightning_elixir.checkpoint.writer import Contents, ShardWriter, Written, write_metadata
from lightning_elixir.core.comm import Comm
from lightning_elixir.core.device import Device
from lightning_elixir.core.waits import Call
from lightning_elixir.errors import StorageError

log = logging.getLogger(__name__)

T = TypeVar("T")

SAVE = Call("save_checkpoint()")


class PendingFolder:
    """A checkpoint that is not there before `commit`.

    Every method is collective; an error on one rank is raised on all.

    Args:
        path: Of the folder to be.
        comm: All ranks.
        past_cache: Have `write` bring it to the disk, where the file system can do that past the system's cache; else
            that is left to `commit`.
    """

    def __init__(self, path: Path, comm: Comm, *, past_cache: bool = True) -> None:
        self.path = path
        self._comm = comm
        self._past_cache = past_cache
        self._temporary = temporary_sibling(path)
        self._written: list[Written] = []
        self._files: list[Path] = []

    def write(
        self, write: Callable[[ShardWriter], None], meta: Mapping[str, Any], device: Device, num_files: int = 1
    ) -> None:
        """Write this rank's files, at least as far as the system's cache. Then nothing of what is saved is needed.

        Args:
            write: Puts this rank's part into the writer.
            meta: The rest of the checkpoint; rank 0's counts.
            device: Where this part may lie, beside host memory.
            num_files: Of this rank, each for a thread; need not be the same on every rank.

        Raises:
            StorageError: This or another rank could not.
        """
        first = self._comm.rank == 0
        try:
            self._together(self._comm, lambda: make_empty(self._temporary) if first else None)
            self._together(self._comm, lambda: self._write(write, meta, device, num_files))
        except BaseException:
            self._give_up()
            raise

    def _write(
        self, write: Callable[[ShardWriter], None], meta: Mapping[str, Any], device: Device, num_files: int
    ) -> None:
        rank, past_cache = self._comm.rank, self._past_cache
        with ShardWriter(self._temporary, rank, device, num_files=num_files, past_cache=past_cache) as writer:
            write(writer)
        self._written, self._files = writer.written, writer.paths
        if self._comm.rank == 0:
            torch.save(dict(meta), self._temporary / META_FILE)

    def commit(self, contents: Contents, comm: Comm | None = None) -> None:
        """Have it on the disk, and then under its name.

        Args:
            contents: Of all ranks' files.
            comm: The same ranks, for another thread.

        Raises:
            StorageError: This or another rank could not; what was there before under the name is there still.
        """
        comm = comm or self._comm
        try:
            self._together(comm, lambda: _flush_all(self._files))
            written = comm.exchange_objects(self._written, SAVE)
            self._together(comm, lambda: self._finish(contents, written) if comm.rank == 0 else None)
        except BaseException:
            self._give_up()
            raise

    def _finish(self, contents: Contents, written: list[list[Written]]) -> None:
        write_metadata(self._temporary / METADATA_FILE, contents.metadata(written))
        for path in (self._temporary / META_FILE, self._temporary / METADATA_FILE, self._temporary):
            flush(path)
        put_in_place(self._temporary, self.path)

    def _give_up(self) -> None:
        if self._comm.rank != 0:
            return
        try:
            remove_folder(self._temporary)
        except OSError as error:
            log.warning("cannot remove %s: %s", self._temporary, error)

    def _together(self, comm: Comm, action: Callable[[], T]) -> T:
        return save_together(comm, self.path, action)


def _flush_all(paths: Sequence[Path]) -> None:
    for path in paths:
        flush(path)


def save_together(comm: Comm, path: Path, action: Callable[[], T]) -> T:
    """Run a part of saving a checkpoint on every rank. Collective.

    Raises:
        StorageError: It has failed on some rank; raised on all.
    """
    result, error = None, None
    try:
        result = action()
    except Exception as exception:  # whatever it is, the others must hear of it
        error = exception
    messages = comm.exchange_objects(None if error is None else _told(error), SAVE)
    failed = {rank: message for rank, message in enumerate(messages) if message is not None}
    if failed:
        told = "; ".join(f"rank {rank}: {message}" for rank, message in failed.items())
        raise StorageError(
            f"saving the checkpoint {path} has failed ({told}); earlier checkpoints are whole", path=path
        ) from error
    return result  # type: ignore[return-value]


def _told(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if "inline_container" in text:  # torch's writer of files says no more than where it stands
        text += "; a full disk gives this, so see whether it is"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += "; free space there, or save elsewhere"
    return text
