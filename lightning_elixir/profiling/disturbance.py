"""Whether something else was at work while a machine was measured."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_elixir.core.comm import Comm
from lightning_elixir.core.host import CoreTimes, core_times, num_usable_cores
from lightning_elixir.core.threads import default_num_threads

# Part of the cores that measuring would use: what the system itself takes is less.
_FELT = 0.15


@dataclass(frozen=True)
class RankUse:
    """What the cores of one rank did while it measured."""

    host: str
    cores: frozenset[int]
    num_threads: int
    """With which the rank computes on the host."""
    wall_s: float
    busy_s: float
    """Of all cores together, for whatever process."""
    own_s: float
    """What the rank's process had of that."""


class CoreWatch:
    """Looks at the cores from now on.

    Args:
        comm: The ranks that measure.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._since_s = time.perf_counter()
        self._since = core_times()

    def others(self) -> str:
        """Which other programs were at work since then, for people, the same on every rank; empty: none, as far as is
        known. Collective."""
        now, since = core_times(), self._since
        use = None if now is None or since is None else self._use(since, now)
        found = [one for one in self._comm.exchange_objects(use) if one is not None]
        return others_at_work(found)

    def _use(self, since: CoreTimes, now: CoreTimes) -> RankUse:
        return RankUse(
            host=socket.gethostname(),
            cores=now.cores,
            num_threads=min(default_num_threads(), num_usable_cores()),
            wall_s=time.perf_counter() - self._since_s,
            busy_s=now.busy_s - since.busy_s,
            own_s=now.own_s - since.own_s,
        )


def others_at_work(uses: Sequence[RankUse]) -> str:
    """Which cores were not there for ranks that measured, for people; empty where they had what they use.

    Args:
        uses: Of each rank. Those with the same cores share them.
    """
    for host, cores in dict.fromkeys((use.host, use.cores) for use in uses):
        ranks = [use for use in uses if (use.host, use.cores) == (host, cores)]
        wall_s = max(use.wall_s for use in ranks)
        others = (max(use.busy_s for use in ranks) - sum(use.own_s for use in ranks)) / max(wall_s, 1e-9)
        wanted = min(len(cores), sum(use.num_threads for use in ranks))
        if wanted - (len(cores) - others) > _FELT * wanted:
            return f"other programs had {others:.1f} of the {len(cores)} cores of {host} at work"
    return ""
