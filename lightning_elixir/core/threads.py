"""How many threads the host's arithmetic gets, and on which processors this rank runs.

torchrun sets `OMP_NUM_THREADS=1` where the user has set nothing, so that ranks do not fight for processors; an update
on the host would take as many times longer as there are cores. That one is not taken for a user's wish: every rank
takes its part of the machine instead. `LIGHTNING_ELIXIR_NUM_THREADS` is a user's wish.

Threads of updates leave a quarter of a rank's cores, two at most, to those that launch and copy, and stand behind them
where cores are short (`Standing`, `kernels/adam.cpp`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from lightning_elixir.errors import PlanError

log = logging.getLogger(__name__)

_PAUSE_HARD = 2  # of OpenMP 5.0's omp_pause_resource_t: threads end
_SWITCH_S = 5e-4
"""After how long a thread that waits for Python's lock gets it."""

Nodes = Sequence[Sequence[Set[int]]]
"""The processors of every core (its SMT siblings), of every NUMA node."""


@dataclass(frozen=True)
class ThreadPlan:
    """What one rank may use of its host."""

    cpus: frozenset[int]
    """Processors it should run on."""
    num_threads: int
    """Threads of host arithmetic while nothing else runs: one a core."""
    num_update_threads: int
    """Threads of updates that run beside training: leaves cores to the threads that launch and copy."""


def plan_threads(
    available_cpus: Set[int], local_rank: int, local_world_size: int, numa_nodes: Nodes, reserved: int = 2
) -> ThreadPlan:
    """Give each rank of a host its part of the cores, within a NUMA node where that comes out even.

    A mask that leaves out some of the host's processors was set on purpose, and stays. If it holds no more cores
    than an even share of the host, it is taken to be this rank's own; otherwise for all ranks' together.

    Args:
        available_cpus: Processors that this process may run on.
        local_rank: Among the ranks of this host, from 0.
        local_world_size: How many there are.
        numa_nodes: The host, in the order in which ranks are to be spread over it.
        reserved: Cores to leave to others than updates; a quarter of them at most.
    """
    cores = [core & available_cpus for node in numa_nodes for core in node]
    usable = [core for core in cores if core]
    is_whole = all(core <= available_cpus for node in numa_nodes for core in node)
    cpus, count = frozenset(available_cpus), max(1, len(usable))
    if local_world_size > 1:
        first, last = (len(usable) * rank // local_world_size for rank in (local_rank, local_rank + 1))
        if is_whole and first < last:
            cpus, count = frozenset().union(*usable[first:last]), last - first
        elif is_whole or len(usable) * local_world_size > len(cores):
            count = max(1, len(usable) // local_world_size)
    return ThreadPlan(cpus, count, _beside_others(count, reserved))


def _beside_others(count: int, reserved: int = 2) -> int:
    return count - min(reserved, count // 4)


def thread_plan(local_rank: int, local_world_size: int) -> ThreadPlan:
    """The plan for this process on this host, with what the user wishes."""
    wish = wished_num_threads()
    nodes = numa_nodes()
    found = plan_threads(usable_cpus(), local_rank, local_world_size, nodes)
    return found if wish is None else ThreadPlan(found.cpus, wish, wish)


def default_num_threads() -> int:
    """Threads for host arithmetic where no number is given: torch's, unless it is the 1 that torchrun sets.

    Raises:
        PlanError: `LIGHTNING_ELIXIR_NUM_THREADS` is not a number of threads.
    """
    wish = wished_num_threads()
    if wish is not None:
        return wish
    if is_held_back_by_launcher():
        return _share_of_host(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return torch.get_num_threads()


def default_num_update_threads() -> int:
    """As `default_num_threads`, for work beside training: leaves cores to the threads that launch and copy."""
    count = default_num_threads()
    return count if wished_num_threads() is not None else _beside_others(count)


def wished_num_threads() -> int | None:
    """What the user set `LIGHTNING_ELIXIR_NUM_THREADS` to.

    Raises:
        PlanError: That is not a number of threads.
    """
    given = os.environ.get("LIGHTNING_ELIXIR_NUM_THREADS", "")
    if not given:
        return None
    if not given.isdecimal() or int(given) < 1:
        raise PlanError(f"LIGHTNING_ELIXIR_NUM_THREADS must be a number of threads from 1, got {given!r}")
    return int(given)


def is_held_back_by_launcher() -> bool:
    """Whether torch has one thread because torchrun said so, and still has."""
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    return is_launched and torch.get_num_threads() == 1


def apply(plan: ThreadPlan) -> None:
    """Run this process on the plan's processors, and give torch its threads where torchrun held it back.

    Threads that were put elsewhere before stay there. Threads and processes made later inherit it all.
    """
    if is_held_back_by_launcher() or wished_num_threads() is not None:
        torch.set_num_threads(plan.num_threads)
    available = usable_cpus()
    if plan.cpus < available and hasattr(os, "sched_setaffinity"):
        for thread in _own_threads():
            with suppress(OSError):  # it has ended, or we are not allowed to
                if os.sched_getaffinity(thread) == available:
                    os.sched_setaffinity(thread, plan.cpus)
        log.debug("this rank runs on processors %s", sorted(plan.cpus))


def end_openmp_threads() -> None:
    """End this thread's helpers in host arithmetic; the next operation starts others. To be called before this process
    is forked: a fork has the one thread that forked it, and would wait for helpers that it does not have."""
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        paths = {line.split()[-1] for line in lines if re.search(r"/lib(g|i)?omp[^/]*\.so", line)}
        for path in sorted(paths):
            pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
            if pause is not None:
                pause(_PAUSE_HARD)


@contextmanager
def frequent_switches() -> Iterator[None]:
    """Inside, the threads of this process take turns with Python's lock at least every half millisecond. Python's own
    five are what a GPU takes for an operation or two of a large layer: seen on an H200, where updates ran beside
    training, hundreds of gaps of four to five milliseconds between kernels, which went with this."""
    before_s = sys.getswitchinterval()
    if before_s <= _SWITCH_S:
        yield
        return
    sys.setswitchinterval(_SWITCH_S)
    ours_s = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == ours_s:  # what other code has set since stays
            sys.setswitchinterval(before_s)


def usable_cpus() -> frozenset[int]:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def numa_nodes(root: Path = Path("/")) -> list[list[frozenset[int]]]:
    """The cores of every NUMA node of this host; where it does not say, one node of cores with one processor each.

    Args:
        root: Where `/sys` is looked for.
    """
    system = root / "sys/devices/system"
    online = _read_cpus(system / "cpu/online") or usable_cpus()
    folders = sorted((system / "node").glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node")))
    nodes = [cpus & online for cpus in map(_read_cpus, (folder / "cpulist" for folder in folders)) if cpus & online]
    if frozenset().union(*nodes) != online:
        nodes = [online]
    return [_cores(node, system) for node in nodes]


def _cores(cpus: frozenset[int], system: Path) -> list[frozenset[int]]:
    found: dict[frozenset[int], None] = {}
    for cpu in sorted(cpus):
        siblings = _read_cpus(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") & cpus
        found[siblings | {cpu}] = None
    return list(found)


def _read_cpus(path: Path) -> frozenset[int]:
    """A list such as `0-3,8`; empty where there is none."""
    try:
        ranges = [part.partition("-") for part in path.read_text(encoding="ascii").strip().split(",") if part]
        return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return frozenset()


def _own_threads() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return [0]


@cache
def _share_of_host(local_rank: int, local_world_size: int) -> int:
    return thread_plan(local_rank, local_world_size).num_threads
