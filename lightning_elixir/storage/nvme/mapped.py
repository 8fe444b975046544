"""Tensors whose memory is a file's: what the host's memory has no room for when a checkpoint is put together.

The system writes such pages to the disk, and frees them, when the memory is needed for something else; a checkpoint is
written from them as from any others. The file has no name, and is gone when the last of its tensors is.

It lies on the disk of the states. Where that is full, ordinary memory takes its place.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_LEAST_BYTES = 256 * 1024
"""Smaller ones are not worth a mapping of their own."""


class MappedMemory:
    """Makes tensors in a new file.

    Args:
        folder: On the disk; exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd: int | None = None
        self._end = 0
        self._is_usable = True

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D, uninitialised, in a storage of its own; in ordinary memory if it is small, or the disk is full."""
        nbytes = numel * dtype.itemsize
        if nbytes >= _LEAST_BYTES and self._is_usable:
            try:
                return torch.frombuffer(self._map(nbytes), dtype=dtype)
            except OSError as error:
                self._is_usable = False
                log.warning("what this disk should hold is put together in host memory: %s: %s", self._folder, error)
        return torch.empty(numel, dtype=dtype, device="cpu")

    def __enter__(self) -> MappedMemory:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)  # what is mapped stays
            self._fd = None
        self._is_usable = False

    def _map(self, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        if self._fd is None:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                self._fd = os.dup(file.fileno())
        length = -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.posix_fallocate(self._fd, self._end, length)  # a full disk is an error here, and the end of us later
        # Not `mmap.mmap`, which keeps a descriptor for every mapping: a model has more tensors than a process may have.
        address = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, self._fd, self._end)
        if address in (None, _FAILED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._end += length
        memory = (ctypes.c_char * nbytes).from_address(address)
        weakref.finalize(memory, _libc.munmap, address, length).atexit = False
        return memory


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
