"""Looks whether the host still has memory, while the engine takes it: before the kernel ends a process for want of it.

A plan leaves a reserve (`host_share`, `plan/memory.py`). Where other programs, or the user's own data, take that and
more, all ranks get an error that has the figures, between one piece of memory and the next.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from lightning_elixir.core.comm import Comm
from lightning_elixir.core.host import available_host_bytes
from lightning_elixir.core.host_memory import HostMemory
from lightning_elixir.errors import CapacityError
from lightning_elixir.plan.types import ChunkSpec, Plan
from lightning_elixir.plan.units import format_bytes

_BETWEEN_LOOKS = 32 * 2**20
"""Elements of this rank's shards from one look to the next, at least: the same on all ranks, whatever each has taken
already."""

_ELEMENTS_PER_FREE_BYTE = 1 / 256
"""As many where more is free: an element takes up to 32 bytes, so that an eighth of it is taken by the next look."""

_LEAST_FREE = 512 * 2**20
"""Bytes that each rank of a host must find beside what it is going to take; no more than it has of the plan there."""


class HostRoom:
    """Every method is called by all ranks.

    Args:
        comm: The ranks, which look together.
        memory: What is there ahead counts as free.
    """

    def __init__(self, comm: Comm, memory: HostMemory) -> None:
        self._comm = comm
        self._memory = memory
        self._hosts: list[str] = []  # by rank
        self._num_elements = 0  # since the last look
        self._num_free = 0  # elements that may come until the next look, by what was free at the last one
        self._wanted = 0

    def begin(self) -> None:
        """Memory is going to be taken: what the last look has seen may be hours old. On all ranks."""
        self._num_free = 0

    def take(self, spec: ChunkSpec, nbytes: int, plan: Plan, held_bytes: Callable[[], int]) -> None:
        """A rank is going to take memory of its host for a chunk.

        Args:
            spec: The chunk, the same on all ranks.
            nbytes: How much.
            plan: What for.
            held_bytes: What this rank has taken for it so far.

        Raises:
            CapacityError: A host has too little left. Raised on all ranks.
        """
        self._num_elements += spec.numel // plan.num_sharing(spec)
        self._wanted += nbytes
        if self._num_elements >= max(_BETWEEN_LOOKS, self._num_free):
            self.look(plan, held_bytes)

    def look(self, plan: Plan, held_bytes: Callable[[], int]) -> None:
        """See whether all hosts have memory left: for what `take` was told of since the last look, and for what comes
        until the next one.

        Args:
            plan: The plan in force.
            held_bytes: As there.

        Raises:
            CapacityError: A host has too little. Raised on all ranks.
        """
        self._hosts = self._hosts or self._comm.exchange_objects(socket.gethostname())
        wanted, self._num_elements, self._wanted = self._wanted, 0, 0
        if self._shortage(plan, wanted, held_bytes) is not None:
            # What is being made ahead, or freed, counts as taken, though it is neither free nor there: without it,
            # figures are exact.
            self._memory.let_go()
            self._comm.exchange((0,))  # all have
            shortage = self._shortage(plan, wanted, held_bytes)
            if shortage is not None:
                raise shortage

    def _shortage(self, plan: Plan, wanted_bytes: int, held_bytes: Callable[[], int]) -> CapacityError | None:
        """The same on all ranks."""
        ahead = self._memory.bytes_ahead()  # before the rest: what comes meanwhile is counted neither here nor there
        rows = self._comm.exchange((available_host_bytes(), wanted_bytes, held_bytes(), ahead))
        least_free = min(row[0] // self._hosts.count(name) for row, name in zip(rows, self._hosts, strict=True))
        self._num_free = int(least_free * _ELEMENTS_PER_FREE_BYTE)
        for host in dict.fromkeys(self._hosts):
            of_host = [row for row, name in zip(rows, self._hosts, strict=True) if name == host]
            free = min(row[0] for row in of_host) + sum(row[3] for row in of_host)
            wanted = sum(row[1] + min(_LEAST_FREE, row[1] + row[2]) for row in of_host)
            if free < wanted:
                return _refusal(plan, len(of_host), sum(row[2] for row in of_host), free, wanted)
        return None


def _refusal(plan: Plan, num_ranks: int, held: int, free: int, wanted: int) -> CapacityError:
    """
    Args:
        plan: What memory is taken for.
        num_ranks: On the host.
        held: Bytes that they have taken.
        free: What the host has left.
        wanted: What they are going to take, and must find beside.
    """
    planned = plan.notes.get("host_bytes")
    of_plan = f" of {format_bytes(planned * num_ranks)} that were planned" if isinstance(planned, int) else ""
    fitting = max(0, held + free - 2 * num_ranks * _LEAST_FREE)
    cure = f"What would fit is cpu_memory_limit={fitting} ({format_bytes(fitting)}); or f" if fitting else "F"
    return CapacityError(
        f"the host runs short of memory: its {num_ranks} rank{'s' * (num_ranks > 1)} hold {format_bytes(held)}"
        f"{of_plan}, and {format_bytes(free)} are left. Other programs, or data and loaders of your own, take more than"
        f" there was when the plan was made and than was kept back for them. {cure}ree memory, or have states go to"
        " NVMe (nvme_offload_dir)",
        resource="host",
        lacking_bytes=wanted - free,
    )
