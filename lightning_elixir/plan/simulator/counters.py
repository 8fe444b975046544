"""The runtime minus the bytes: drives the runtime's own `RCache` through a trace and counts what would move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_elixir.errors import PlanError
from lightning_elixir.plan.policy import CachePolicy
from lightning_elixir.plan.rcache import CacheCounters, RCache
from lightning_elixir.plan.simulator.rcache_script import drive
from lightning_elixir.plan.types import AccessTrace, Plan, Tier


@dataclass(frozen=True)
class SimulationResult:
    """What one rank did over the simulated iterations (every rank the same)."""

    counters: CacheCounters
    h2d_bytes: int
    """Host to device, for fetches and prefetches."""
    d2h_bytes: int
    """Device to host, where a whole shard on the host is brought up to date (storage not distributed)."""
    gathered_bytes: int
    """Size of the replicas that were all-gathered."""
    peak_blocks: int
    """Most blocks in use at once."""
    peak_bytes: int
    """Most bytes of non-persistent replicas at once."""


def simulate(
    plan: Plan,
    trace: AccessTrace,
    *,
    iterations: int = 1,
    is_trace_known: bool = True,
    steps: bool = True,
) -> SimulationResult:
    """Run a trace against a plan's rCache.

    Args:
        plan: Chunks, tiers and rCache.
        trace: What one iteration touches.
        iterations: How often to run it.
        is_trace_known: Whether the first iteration is foreseen too (in a real run it is the one that is recorded).
        steps: Whether an optimizer step ends every iteration, which outdates the replicas of all that trains.

    Raises:
        PlanError: The trace touches a chunk that the plan does not have.
        StateError: The trace drops a chunk that it did not acquire.
    """
    return _Run(plan).run(trace, iterations, is_trace_known, steps)


class _Run:
    """The rCache under way, and the bytes that its decisions cost."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rcache = RCache.of(plan)
        self.outdated: set[int] = set()  # whole shards of which only the own slice has seen the last step
        self.h2d_bytes = self.d2h_bytes = self.gathered_bytes = 0
        self.resident_bytes = self.peak_bytes = 0

    def run(self, trace: AccessTrace, iterations: int, is_trace_known: bool, steps: bool) -> SimulationResult:
        num_chunks = len(self.plan.chunks)
        unknown = sorted({i for e in trace.events for i in e.ids if not 0 <= i < num_chunks})
        if unknown:
            raise PlanError(f"the trace touches chunks {unknown}, the plan has {num_chunks}: it is another model's")
        policy = CachePolicy(trace)
        for iteration in range(iterations):
            self.rcache.begin(policy if is_trace_known or iteration > 0 else None)
            self._iterate(trace)
            if steps:
                self._step()
        return SimulationResult(
            counters=self.rcache.counters,
            h2d_bytes=self.h2d_bytes,
            d2h_bytes=self.d2h_bytes,
            gathered_bytes=self.gathered_bytes,
            peak_blocks=self.rcache.peak_blocks,
            peak_bytes=self.peak_bytes,
        )

    def _iterate(self, trace: AccessTrace) -> None:
        for _, *decisions in drive(self.plan, self.rcache, trace, self.outdated):
            for decision in decisions:
                self._move(decision.evict, decision.fetch)

    def _step(self) -> None:
        plan = self.plan
        updated = [c.id for c in plan.chunks if c.requires_grad and not c.is_persistent]
        self.resident_bytes -= self._replica_bytes(self.rcache.release(updated))
        if plan.world_size > 1 and not plan.is_storage_distributed:
            self.outdated = {i for i in updated if plan.num_sharing(plan.chunks[i]) > 1}

    def _move(self, evict: Iterable[int], fetch: tuple[int, ...]) -> None:
        self.resident_bytes += self._replica_bytes(fetch) - self._replica_bytes(evict)
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
        for chunk_id in fetch:
            self._fetch(chunk_id)

    def _fetch(self, chunk_id: int) -> None:
        plan = self.plan
        chunk = plan.chunks[chunk_id]
        is_upload = chunk.param_tier is not Tier.GPU
        is_gathered = self._is_gathered(chunk_id)
        if is_upload:
            self.h2d_bytes += chunk.nbytes // plan.num_sharing(chunk) if is_gathered else chunk.nbytes
        if not is_gathered:
            return
        self.gathered_bytes += chunk.nbytes
        if chunk_id in self.outdated:
            self.outdated.discard(chunk_id)
            self.d2h_bytes += chunk.nbytes if is_upload else 0

    def _is_gathered(self, chunk_id: int) -> bool:
        is_shared = self.plan.num_sharing(self.plan.chunks[chunk_id]) > 1
        return is_shared and (self.plan.is_storage_distributed or chunk_id in self.outdated)

    def _replica_bytes(self, ids: Iterable[int]) -> int:
        return sum(self.plan.chunks[i].nbytes for i in ids)
