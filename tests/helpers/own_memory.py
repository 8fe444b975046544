"""What a process has taken for itself, for tests that compare one with another."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path


def own_bytes() -> int:
    """Resident anonymous memory in bytes, without what the allocator keeps of freed memory, and without pages of files,
    which the system takes away when others need memory: both differ from run to run by tens of MB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) * 1024
