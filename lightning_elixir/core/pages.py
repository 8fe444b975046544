"""Fresh memory from the system, exactly as large as asked.

Its calls go on without the GIL. They wait while another thread has pages of this process given or page-locked, which
takes tens of milliseconds; `mmap.mmap` and its `madvise` keep all other threads waiting with them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache

import torch
from torch import Tensor

_FAILED = ctypes.c_void_p(-1).value


@cache
def _libc() -> ctypes.CDLL:
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    found.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    found.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    found.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return found


class Pages:
    """Zeros of this process alone, in huge pages where the system has them. Given back when this object and the last
    tensor over it are gone.

    Not shared memory, which gets huge pages only where the whole system says so (`shmem_enabled` is usually "never"):
    reads of a disk into it were half as fast (seen). A forked child gets no copy: a write would give one of the two
    other pages than those that a device knows.

    Args:
        nbytes: At least one.

    Raises:
        OSError: The system has no such memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._process, self._process_now = os.getpid(), os.getpid
        self._unmap = _libc().munmap  # functions that are there until this object goes, also when the interpreter ends
        self.address = 0  # there is none
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _libc().mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if address in (None, _FAILED):
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)}: {nbytes} bytes of memory")
        self.address = address
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                _libc().madvise(address, nbytes, getattr(mmap, advice))

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """All of it, 1-D."""
        memory = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        memory.pages = self  # type: ignore[attr-defined]  # the tensor holds `memory`
        return torch.frombuffer(memory, dtype=dtype)

    @property
    def is_own(self) -> bool:
        """Whether this process has it: a forked child may have other memory at the same address."""
        return self._process == self._process_now()

    def __del__(self) -> None:
        if self.address and self.is_own:
            self._unmap(self.address, self.nbytes)
        self.address = 0
