"""What this machine can do, measured by running the package's own operations for a few seconds."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import torch

from lightning_elixir import __version__
from lightning_elixir.core.comm import Comm, make_comm
from lightning_elixir.core.device import (
    Device,
    DeviceFacts,
    current_device,
    current_device_memory_bytes,
    device_facts,
    make_device,
    release_cached_memory,
)
from lightning_elixir.core.host import available_host_bytes, cpu_model, num_usable_cores
from lightning_elixir.core.threads import default_num_threads
from lightning_elixir.errors import PlanError
from lightning_elixir.kernels.cpu import implementation
from lightning_elixir.kernels.means import mean_of_rows
from lightning_elixir.plan.hardware import HARDWARE_SCHEMA, HardwareSpec
from lightning_elixir.profiling.disturbance import CoreWatch
from lightning_elixir.profiling.hardware_cache import HardwareCache, default_cache_dir
from lightning_elixir.profiling.nvme_speed import free_disk_bytes, measure_disk
from lightning_elixir.profiling.rates import Workbench
from lightning_elixir.profiling.stopwatch import Stopwatch

log = logging.getLogger(__name__)

# Curves of seven sizes each way, the same over ranks, Adam (the host's counts more), products of growing size, and the
# rest.
_NUM_MEASUREMENTS = 60
# Raised when figures come to mean something else: kept ones are measured again.
_METHOD = 6
# The disk gets a fixed part of the budget: a file is written and read several times.
_DISK_SHARE = 0.05
_MIN_ARENA_BYTES = 4 * 2**20
# Of what is free, so that other programs keep the rest.
_LARGEST_SHARE = 1 / 8


@dataclass(frozen=True)
class _Memory:
    """What may be used now."""

    host_bytes: int
    gpu_bytes: int | None
    nvme_bytes: int | None


@dataclass(frozen=True)
class FoundHardware:
    """Figures, and where they are from."""

    spec: HardwareSpec
    path: Path | None
    """The file in which they are kept, on rank 0; None: they are not."""
    stored_at: datetime | None
    """Local time at which they were put there, on rank 0, if they were read; None: measured just now."""
    disturbance: str = ""
    """What else was at work while they were measured, for people; then they are not kept. Empty: nothing, as far as is
    known."""


def profile_hardware(
    *,
    device: torch.device | None = None,
    comm: Comm | None = None,
    local_world_size: int = 1,
    nvme_dir: str | Path | None = None,
    refresh: bool = False,
    cache_dir: str | Path | None = None,
    budget_s: float = 10.0,
    max_bytes: int = 4 * 2**30,
) -> HardwareSpec:
    """What one rank may count on while all ranks do the same. Collective: every rank makes the same call.

    Rates are kept in a file for each machine, device, software version, number of ranks and folder, and read from
    there the next time; memory is always looked at anew. What was measured while other programs were at work is not
    kept, which a warning and the name of the figures say. Several ranks measure at once and return the same figures:
    the slowest rank's rates, the least memory.

    Args:
        device: Compute device; default: the current CUDA device, or the CPU where there is none.
        comm: The ranks; default: those of the default process group, if there is one.
        local_world_size: How many of them share this host.
        nvme_dir: Folder whose disk is measured as well; a file of at most 256 MiB a rank is written there for a moment.
        refresh: Measure even if figures were kept.
        cache_dir: Where they are kept; default: `lightning_elixir` in `$XDG_CACHE_HOME` or `~/.cache`.
        budget_s: About how long measuring may take at most. A GPU machine needs less.
        max_bytes: Memory used for it at most, on the host and on the device each; less where little is free.

    Raises:
        PlanError: `local_world_size`, `budget_s` or `max_bytes` out of range.
        StorageError: `nvme_dir` cannot be written to; on every rank.
    """
    probe = HardwareProbe(
        device=device,
        comm=comm,
        local_world_size=local_world_size,
        nvme_dir=nvme_dir,
        refresh=refresh,
        cache_dir=cache_dir,
        budget_s=budget_s,
        max_bytes=max_bytes,
    )
    return probe.find().spec


@dataclass(frozen=True, kw_only=True)
class HardwareProbe:
    """Which machine to find the figures of, and within which time and memory; see `profile_hardware` for each.

    Raises:
        PlanError: `local_world_size`, `budget_s` or `max_bytes` out of range.
    """

    device: torch.device | None = None
    comm: Comm | None = None
    local_world_size: int = 1
    nvme_dir: str | Path | None = None
    refresh: bool = False
    cache_dir: str | Path | None = None
    budget_s: float = 10.0
    max_bytes: int = 4 * 2**30

    def __post_init__(self) -> None:
        if self.local_world_size < 1 or self.budget_s <= 0 or self.max_bytes < 4 * _MIN_ARENA_BYTES:
            raise PlanError(
                "profile_hardware needs local_world_size >= 1, budget_s > 0 and max_bytes >="
                f" {4 * _MIN_ARENA_BYTES}, got {self.local_world_size}, {self.budget_s} and {self.max_bytes}"
            )

    def find(self) -> FoundHardware:
        """The figures, kept ones or new ones. Collective.

        Raises:
            StorageError: `nvme_dir` cannot be written to; on every rank.
        """
        with self._bench() as (device, ranks):
            facts, memory, kept = self._facts_and_cache(device, ranks)
            spec = self._load(kept, ranks)
            stored_at, disturbance = None if spec is None or ranks.rank > 0 else kept.stored_at(), ""
            is_kept = spec is not None
            if spec is None:
                spec, disturbance = self._measured(device, ranks, memory, facts)
                is_kept = ranks.rank == 0 and not disturbance and kept.store(spec)
            path = kept.path if is_kept else None
            return FoundHardware(replace(spec, **asdict(memory)), path, stored_at, disturbance)

    def find_kept(self) -> HardwareSpec | None:
        """Figures of an earlier run; None: there are none. Collective."""
        with self._bench() as (device, ranks):
            # What they depend on takes a compilation to find out where there was none yet.
            if ranks.exchange_objects(self.refresh or HardwareCache.is_empty(self._cache_folder))[0]:
                return None
            _, memory, kept = self._facts_and_cache(device, ranks)
            spec = self._load(kept, ranks)
        return None if spec is None else replace(spec, **asdict(memory))

    def with_computing_rates(self, spec: HardwareSpec) -> HardwareSpec:
        """The same figures, with those of the compute device by itself, measured now: about a second. Collective.

        Args:
            spec: Of the rest of the machine.
        """
        log.info("measuring what the device computes: everything fits there, and no figures were kept")
        with self._bench() as (device, ranks):
            memory = _least_memory(ranks, device.torch_device, None)
            figures, disturbance = self._measured_with_bench(device, ranks, memory, Workbench.measure_computing)
            name = f"{_name(device_facts(device.torch_device), ranks.world_size, disturbance)}, computing only"
            specs: list[HardwareSpec] = ranks.exchange_objects(replace(spec, name=name, **figures))
        return specs[0]

    def _facts_and_cache(self, device: Device, ranks: Comm) -> tuple[DeviceFacts, _Memory, HardwareCache]:
        """What the figures depend on, and where they may be kept."""
        facts = device_facts(device.torch_device)
        kept = HardwareCache(
            self._cache_folder,
            {
                "schema": HARDWARE_SCHEMA,
                "method": _METHOD,
                "world_size": ranks.world_size,
                "local_world_size": self.local_world_size,
                "nvme_dir": None if self._folder is None else str(self._folder),
                "hosts": _distinct(ranks.exchange_objects(_identity(facts))),
            },
        )
        return facts, _least_memory(ranks, device.torch_device, self._folder), kept

    def _load(self, kept: HardwareCache, ranks: Comm) -> HardwareSpec | None:
        """Rank 0 decides for all: one rank alone cannot measure."""
        found = kept.load() if ranks.rank == 0 and not self.refresh else None
        spec: HardwareSpec | None = ranks.exchange_objects(found)[0]
        return spec

    def with_disk_rates(self, spec: HardwareSpec) -> HardwareSpec:
        """The same figures, with those of the disk of `nvme_dir`, measured now. Collective.

        Args:
            spec: Of the rest of the machine.

        Raises:
            StorageError: The folder cannot be written to, or has too little room; on every rank.
        """
        if self._folder is None:
            return spec
        with self._bench() as (device, ranks):
            free = free_disk_bytes(self._folder, ranks)
            found = replace(spec, nvme_bytes=free, **self._disk_rates(device, ranks, free))
            specs: list[HardwareSpec] = ranks.exchange_objects(found)
        return specs[0]

    @property
    def _cache_folder(self) -> Path | None:
        return default_cache_dir() if self.cache_dir is None else Path(self.cache_dir)

    @property
    def _folder(self) -> Path | None:
        return None if self.nvme_dir is None else Path(self.nvme_dir).absolute()

    @contextmanager
    def _bench(self) -> Iterator[tuple[Device, Comm]]:
        device = make_device(self.device)
        ranks = make_comm(None, device.torch_device, mean_of_rows) if self.comm is None else self.comm
        try:
            with current_device(device.torch_device):
                yield device, ranks
        finally:
            if self.comm is None:
                ranks.close()

    def _measured(self, device: Device, comm: Comm, memory: _Memory, facts: DeviceFacts) -> tuple[HardwareSpec, str]:
        """New figures, and what disturbed them."""
        log.info("measuring what this machine can do; this takes up to %.0f s and is done once", self.budget_s)
        figures, disturbance = self._measured_with_bench(device, comm, memory, Workbench.measure)
        if disturbance and comm.rank == 0:
            log.warning(
                "%s while this machine was measured: its figures are not kept, and plans by them may be poor. Run"
                " lightning-elixir bench-hardware once, while nothing else runs",
                disturbance,
            )
        spec = HardwareSpec(
            name=_name(facts, comm.world_size, disturbance),
            gpu_total_bytes=facts.total_bytes,
            world_size=comm.world_size,
            versions=_versions(facts),
            **figures,
            **self._disk_rates(device, comm, memory.nvme_bytes or 0),
            **asdict(memory),
        )
        specs: list[HardwareSpec] = comm.exchange_objects(spec)
        return specs[0], disturbance  # names may differ, figures do not: each was agreed when it was measured

    def _measured_with_bench(
        self, device: Device, comm: Comm, memory: _Memory, measure: Callable[[Workbench], dict[str, Any]]
    ) -> tuple[dict[str, Any], str]:
        """What is measured with a bench, and what disturbed that."""
        arena_bytes = _arena_bytes(_unused(comm, device, memory), self.local_world_size, self.max_bytes)
        try:
            watch = Stopwatch(device, comm, self.budget_s / _NUM_MEASUREMENTS)
            bench, cores = Workbench(device, comm, watch, arena_bytes, self.local_world_size), CoreWatch(comm)
            figures: dict[str, Any] = measure(bench)
            disturbance = cores.others() or watch.disturbance()
            del bench  # with it its memory, page-locked or on the device
        finally:
            release_cached_memory(device.torch_device)
        return figures, disturbance

    def _disk_rates(self, device: Device, comm: Comm, free: int) -> dict[str, Any]:
        """Of the folder's disk, where that is asked for."""
        if self._folder is None:
            return {}
        watch = Stopwatch(device, comm, _DISK_SHARE * self.budget_s)
        room = int(free * _LARGEST_SHARE) // self.local_world_size
        read, write = measure_disk(self._folder, comm, watch, room)
        return {"nvme_read_bytes_per_s": read, "nvme_write_bytes_per_s": write}


def _least_memory(comm: Comm, device: torch.device, folder: Path | None) -> _Memory:
    nvme = None if folder is None else free_disk_bytes(folder, comm)
    gpu = current_device_memory_bytes(device)
    rows = comm.exchange([available_host_bytes(), gpu or 0])
    return _Memory(
        host_bytes=min(row[0] for row in rows),
        gpu_bytes=None if gpu is None else min(row[1] for row in rows),
        nvme_bytes=nvme,
    )


def _unused(comm: Comm, device: Device, memory: _Memory) -> _Memory:
    """What is left on the device beside a model that is there already."""
    if memory.gpu_bytes is None:
        return memory
    taken = max(row[0] for row in comm.exchange([device.allocated_bytes()]))
    return replace(memory, gpu_bytes=max(0, memory.gpu_bytes - taken))


def _arena_bytes(memory: _Memory, local_world_size: int, max_bytes: int) -> int:
    """Size of each stretch of memory: about half of what may be used, the operations themselves take the rest.

    Args:
        memory: Not what is in use already.
        local_world_size: Ranks that share the host's.
        max_bytes: The most for all of it.
    """
    host = int(memory.host_bytes * _LARGEST_SHARE) // local_world_size
    limits = (
        [max_bytes, host] if memory.gpu_bytes is None else [max_bytes, host, int(memory.gpu_bytes * _LARGEST_SHARE)]
    )
    num_stretches = 4 if memory.gpu_bytes is None else 2  # on the CPU, "device" memory is the host's as well
    share = max(_MIN_ARENA_BYTES, min(limits) // num_stretches)
    return int(2 ** (share.bit_length() - 1))  # a power of two: its half is one of the sizes that are measured


def _identity(facts: DeviceFacts) -> dict[str, Any]:
    """What the rates of this rank depend on."""
    return {
        "host": socket.gethostname(),
        "cpu": cpu_model(),
        "num_cores": num_usable_cores(),
        "num_threads": default_num_threads(),
        "host_adam": implementation(),
        "device": asdict(facts),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "versions": _versions(facts),
    }


def _distinct(identities: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for identity in identities:
        if identity not in found:
            found.append(identity)
    return found


def _versions(facts: DeviceFacts) -> dict[str, str]:
    versions = {"torch": str(torch.__version__), "lightning_elixir": __version__}
    return {**versions, "driver": facts.driver} if facts.driver else versions


def _name(facts: DeviceFacts, world_size: int, disturbance: str) -> str:
    cores = f"{num_usable_cores()} cores of {cpu_model()}"
    where = cores if facts.total_bytes is None else f"{world_size} x {facts.name}, {cores}"
    return f"{where}; measured {date.today().isoformat()}{', on a busy machine' if disturbance else ''}"
