"""Traces, plans and an exhaustive search that the tests of the rCache share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from random import Random

from lightning_elixir.plan.types import ALIGN_NUMEL, AccessTrace, Acquire, ChunkSpec, Drop, Member, Plan, Tier

BLOCK_BYTES = 4 * ALIGN_NUMEL


def make_chunk(
    chunk_id: int,
    blocks: int = 1,
    *,
    world_size: int = 1,
    is_persistent: bool = False,
    param_tier: Tier = Tier.CPU,
    requires_grad: bool = True,
) -> ChunkSpec:
    """A chunk of `blocks` blocks a rank, with one parameter that fills it."""
    numel = blocks * ALIGN_NUMEL * world_size
    member = Member(f"p{chunk_id}", (numel,), 0)
    return ChunkSpec(
        chunk_id, "float32", requires_grad, numel, (member,), param_tier, Tier.CPU, is_persistent=is_persistent
    )


def make_plan_of(chunks: Sequence[ChunkSpec], rcache_blocks: int, prefetch_depth: int = 0, world_size: int = 1) -> Plan:
    return Plan(world_size, "float32", BLOCK_BYTES * world_size, rcache_blocks, prefetch_depth, tuple(chunks))


def unpinned(*accesses: Sequence[int] | int) -> AccessTrace:
    """Chunks needed one access after the other, at that moment only."""
    return AccessTrace(tuple(Acquire((a,) if isinstance(a, int) else tuple(a), is_pinned=False) for a in accesses))


def random_trace(random: Random, num_chunks: int, length: int) -> AccessTrace:
    """Nested pinned regions and plain accesses of one or two chunks, as modules and saved tensors make them."""
    events: list[Acquire | Drop] = []
    open_ids: list[tuple[int, ...]] = []
    for _ in range(length):
        action = random.random()
        if open_ids and (action < 0.35 or len(open_ids) == 2):
            events.append(Drop(open_ids.pop()))
            continue
        ids = tuple(random.sample(range(num_chunks), random.choice((1, 1, 2))))
        held = tuple(i for i in range(num_chunks) if random.random() < 0.05)
        is_pinned = action < 0.7
        events.append(Acquire(ids, is_pinned, held))
        if is_pinned:
            open_ids.append(ids)
    events += [Drop(ids) for ids in reversed(open_ids)]
    return AccessTrace(tuple(events))


def fewest_fetches(accesses: Sequence[Sequence[int]], budget: int) -> int:
    """Least number of fetches that serves unit-cost `accesses` from an empty cache, by trying every choice."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for needed in map(frozenset, accesses):
        following: dict[frozenset[int], int] = {}
        for resident, count in states.items():
            count += len(needed - resident)
            others = resident - needed
            for size in range(min(len(others), budget - len(needed)) + 1):
                for kept in combinations(sorted(others), size):
                    state = needed | frozenset(kept)
                    following[state] = min(count, following.get(state, count))
        states = following
    return min(states.values())
