"""Checksums of what was written, for use where the disk is doubted."""

from __future__ import annotations

import ctypes
import zlib
from pathlib import Path

from lightning_elixir.errors import StorageError
from lightning_elixir.storage.nvme.transfer import ALIGNMENT


class Checksums:
    """One for each `ALIGNMENT` bytes of each region. Takes some seconds a GB; for debugging."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._of: dict[tuple[int, int], tuple[int, int]] = {}  # (region, block): (bytes, checksum)

    def note(self, region: int, offset: int, address: int, nbytes: int) -> None:
        """Remember what is written.

        Args:
            region: Where to.
            offset: In the region; a multiple of `ALIGNMENT`.
            address: Of the bytes in memory.
            nbytes: How many.
        """
        for block, start, length in _blocks(offset, nbytes):
            self._of[region, block] = (length, _checksum(address + start, length))

    def check(self, region: int, offset: int, address: int, nbytes: int) -> None:
        """Compare what was read; arguments as for `note`. What was never written, or in another length, passes.

        Raises:
            StorageError: It is not what was written; with the offset in the region.
        """
        for block, start, length in _blocks(offset, nbytes):
            known = self._of.get((region, block))
            if known is None or known[0] != length:
                continue
            if known[1] != _checksum(address + start, length):
                at = block * ALIGNMENT
                raise StorageError(
                    f"{self._path}: bytes {at} to {at + length} of region {region} are not those that were written "
                    "(checksum); the disk or its driver is broken: choose another folder",
                    path=self._path,
                    offset=at,
                    nbytes=length,
                )


def _blocks(offset: int, nbytes: int) -> list[tuple[int, int, int]]:
    """(block, start in memory, bytes) of each."""
    first = offset // ALIGNMENT
    return [
        (first + start // ALIGNMENT, start, min(ALIGNMENT, nbytes - start)) for start in range(0, nbytes, ALIGNMENT)
    ]


def _checksum(address: int, nbytes: int) -> int:
    return zlib.crc32((ctypes.c_char * nbytes).from_address(address))
