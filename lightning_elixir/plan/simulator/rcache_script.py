"""What the rCache does in a step whose trace it knows: the same in every step, and so found once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lightning_elixir.plan.policy import CachePolicy
from lightning_elixir.plan.rcache import Decision, RCache
from lightning_elixir.plan.types import AccessTrace, Acquire, Drop, Plan

_NOTHING = Decision()


class ScriptedAccess(NamedTuple):
    """One acquire of the trace, and what the rCache does about it."""

    ids: tuple[int, ...]
    fetches: tuple[tuple[int, bool], ...]
    """(chunk, whether its whole shard has to be gathered first), needed ones before those fetched ahead."""
    used_blocks: int
    awaited: tuple[int, ...]
    """Those of `ids` that nothing has waited for since they were fetched, or since the step began."""


@dataclass(frozen=True)
class RCacheScript:
    """All accesses of one step, in order."""

    accesses: tuple[ScriptedAccess, ...]
    peak_blocks: int
    """Most blocks in use at once."""


class RCacheScripts:
    """The scripts of plans with the same chunks, shared by as many ranks in the same way. Each is found once: the
    rCache does the same in all plans with as many blocks for the same chunks, wherever states are, however updated.

    Args:
        trace: What the step touches; the rCache knows it.
    """

    def __init__(self, trace: AccessTrace) -> None:
        self._trace = trace
        self._policy = CachePolicy(trace)
        self._known: dict[tuple[int, int, tuple[int, ...]], RCacheScript] = {}

    def of(self, plan: Plan) -> RCacheScript:
        """The one of a plan."""
        managed = tuple([c.id for c in plan.chunks if not c.is_persistent])
        key = (plan.rcache_blocks, plan.prefetch_depth, managed)
        script = self._known.get(key)
        if script is None:
            script = self._known[key] = self._found(plan)
        return script

    def _found(self, plan: Plan) -> RCacheScript:
        """Drive the runtime's own rCache through a step after which all that trains is outdated."""
        rcache = RCache.of(plan)
        accesses = _step(plan, self._trace, rcache, self._policy)
        if any(not c.is_persistent and not c.requires_grad for c in plan.chunks):
            accesses = _step(plan, self._trace, rcache, self._policy)  # frozen replicas survive the step
        return RCacheScript(accesses, rcache.peak_blocks)


def drive(
    plan: Plan, rcache: RCache, trace: AccessTrace, outdated: Collection[int]
) -> Iterator[tuple[Acquire, Decision, Decision]]:
    """Run one iteration that has begun.

    Args:
        plan: Chunks, tiers and how they are shared.
        rcache: As the runtime has it.
        trace: What the iteration touches.
        outdated: Chunks of which this rank has a whole shard that must be gathered before it is used; the caller takes
            out what was fetched before it goes on.

    Yields:
        Each acquire, and what happens at it: first for what is needed, then for what is fetched ahead.
    """
    is_alone = plan.mesh.copy_size == 1
    for event in trace.events:
        if isinstance(event, Drop):
            rcache.drop(event.ids)
            continue
        if rcache.serve(event.ids, pin=event.is_pinned):  # as the runtime does
            yield event, _NOTHING, _NOTHING
            continue
        decision, ahead = rcache.acquire(event.ids, pin=event.is_pinned, held=event.held), _NOTHING
        held = {*event.held, *event.ids}
        if is_alone:
            candidates = rcache.prefetch_candidates(held)
        else:
            shared = [i for i in decision.fetch if plan.num_sharing(plan.chunks[i]) > 1]
            is_meeting = bool(shared) if plan.is_storage_distributed else any(i in outdated for i in shared)
            candidates = rcache.proposals(held, is_meeting=is_meeting)
        if candidates:
            ahead = rcache.prefetch(candidates, held)
        yield event, decision, ahead
    rcache.unpin_all()  # what backward has pinned until its end


def _step(plan: Plan, trace: AccessTrace, rcache: RCache, policy: CachePolicy) -> tuple[ScriptedAccess, ...]:
    trained = [c for c in plan.chunks if c.requires_grad]
    is_outdating = plan.world_size > 1 and not plan.is_storage_distributed
    outdated = {c.id for c in trained if plan.num_sharing(c) > 1} if is_outdating else set()
    rcache.begin(policy)
    accesses = []
    there: set[int] = set()  # waited for
    for event, decision, ahead in drive(plan, rcache, trace, outdated):
        ids = event.ids
        fetches: tuple[tuple[int, bool], ...] = ()
        awaited: tuple[int, ...] = ()
        fetched = decision.fetch + ahead.fetch
        if fetched:
            fetches = tuple([(i, i in outdated) for i in fetched])
            outdated.difference_update(fetched)
            there.difference_update(fetched)
        if not there.issuperset(ids):
            awaited = tuple([i for i in ids if i not in there])
            there.update(awaited)
        accesses.append(ScriptedAccess(ids, fetches, rcache.used_blocks, awaited))
    rcache.release([c.id for c in trained if not c.is_persistent])
    return tuple(accesses)
