"""What the host is, and how much of its memory may still be taken."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

# Kernels write "no limit" as "max" (v2) or as a number near 2**63 (v1).
_NO_LIMIT_BYTES = 2**60
# Linux describes each page of 4096 bytes in 64, so it takes that part of all memory itself.
_KERNELS_PART = 64
# Devices by which the host of a virtual machine gives it memory: Linux's drivers for KVM, Hyper-V and Xen.
_GIVING_MEMORY = (
    "sys/bus/virtio/drivers/virtio_mem/virtio*",
    "sys/bus/virtio/drivers/virtio_balloon/virtio*",
    "sys/bus/vmbus/drivers/hv_balloon/*-*",
    "sys/devices/system/xen_memory/xen_memory*",
)


def cpu_model(root: Path = Path("/")) -> str:
    """What the processor is called.

    Args:
        root: Where `/proc` is looked for.
    """
    try:
        for line in (root / "proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def num_usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class CoreTimes:
    """What cores have done since some moment in the past."""

    cores: frozenset[int]
    """Those that this process may run on."""
    busy_s: float
    """Seconds of all of them together, of whatever process, other guests of the machine included."""
    own_s: float
    """What all threads of this process had of that."""


def core_times() -> CoreTimes | None:
    """What the cores of this process have done until now, to look at the difference later; None: the system does not
    say."""
    try:
        rows = psutil.cpu_times(percpu=True)
    except (OSError, RuntimeError, NotImplementedError):
        return None
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(rows))
    if not cores or max(cores) >= len(rows):
        return None
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    busy_s = sum(getattr(rows[core], name, 0.0) for core in cores for name in names)
    return CoreTimes(frozenset(cores), busy_s, time.process_time())


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process may still take: what the system has available, within the control groups
    (v1 or v2) that it runs in.

    Memory of virtual machines may grow on demand: there a control group's limit is larger than the system's total,
    which is small until it is used. Then the limit counts, less what the kernel's own table of pages takes of it. Where
    no device could give the system more, no limit counts for more than the total: containers are often given limits
    that are larger than their machine.

    Args:
        root: Where `/proc` and `/sys` are looked for.
    """
    memory = psutil.virtual_memory()
    limits = _cgroup_limits(root)
    may_grow = any(limit > memory.total for limit, _ in limits) and _can_be_given_memory(root)
    free = [max(0, (limit - limit // _KERNELS_PART if may_grow else limit) - usage) for limit, usage in limits]
    return min(free) if may_grow else min([int(memory.available), *free])


@cache
def _can_be_given_memory(root: Path) -> bool:
    """Whether the system has a device by which its host gives it more memory."""
    return any(True for pattern in _GIVING_MEMORY for _ in root.glob(pattern))


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, usage) in bytes of every control group that bounds this process and has a limit."""
    found: list[tuple[int, int]] = []
    for folder, limit_name, usage_name, cache_key in _cgroup_folders(root):
        limit = _read_number(folder / limit_name)
        if limit is None or limit >= _NO_LIMIT_BYTES:
            continue
        usage = _read_number(folder / usage_name)
        if usage is not None:
            found.append((limit, max(0, usage - _reclaimable(folder / "memory.stat", cache_key))))
    return found


def _cgroup_folders(root: Path) -> list[tuple[Path, str, str, str]]:
    """This process's memory control groups, from its own up to the root of each hierarchy."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    mounted = root / "sys/fs/cgroup"
    folders: list[tuple[Path, str, str, str]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = mounted, ("memory.max", "memory.current", "inactive_file")
            if (mounted / "unified").is_dir():
                base = mounted / "unified"
        elif "memory" in controllers.split(","):
            base = mounted / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be the host's, which is not mounted: the container's own is the base.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folders.append((base.joinpath(*parts[:depth]), *names))
    return folders


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # not there, not readable, or "max"
        return None


def _reclaimable(path: Path, key: str) -> int:
    """Bytes of file cache that count as usage and that the kernel gives back when asked."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name == key and value.isdigit():
            return int(value)
    return 0
