"""Parameters that are left out of the chunks: what they take, and plans that are made without them.

[Note: ignored parameters] What a user names (`ignored=`) stays on the compute device, in its own dtype, and so do
frozen parameters of classes that no chunk can hold. Frozen ones the engine does not touch. Ones that train have
chunks of their own that never move (`Plan.all_chunks`), so that gradients, clipping, states and checkpoints are those
of all others; plans place the others alone, beside what these take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_elixir.plan.memory import Scheme
from lightning_elixir.plan.types import IgnoredParam, Plan, resident_chunks


def ignored_bytes(ignored: Sequence[IgnoredParam], scheme: Scheme) -> int:
    """Device memory of one rank that they take all the time, with states and gradients."""
    trained = resident_chunks(ignored, scheme.world_size, 0)
    frozen = sum(p.nbytes for p in ignored if not p.requires_grad)
    each = [scheme.chunk_bytes(chunk) for chunk in trained]
    block = max((chunk.nbytes for chunk in trained), default=0)  # in which the largest gradient is gathered
    return frozen + block + sum(one.gpu_param + one.gpu_state + one.gpu_grad for one in each)


def with_ignored(plan: Plan, ignored: Sequence[IgnoredParam]) -> Plan:
    """The same placement without these parameters, beside those that it leaves out already. Where they were in a chunk
    a gap is left.

    Args:
        plan: Any plan.
        ignored: Parameters of its model.

    Returns:
        `plan` itself where nothing changes; else one without its predicted figures.
    """
    known = {p.fqn for p in plan.ignored}
    more = tuple(p for p in ignored if p.fqn not in known)
    if not more:
        return plan
    names = {p.fqn for p in more}
    left = [replace(c, members=tuple(m for m in c.members if m.fqn not in names)) for c in plan.chunks]
    chunks = tuple(replace(c, id=i) for i, c in enumerate(c for c in left if c.members))
    result = replace(plan, chunks=chunks, ignored=(*plan.ignored, *more), notes={}, forecast=None)
    everything = sum(result.blocks_of(c.id) for c in chunks if not c.is_persistent)
    return replace(result, rcache_blocks=min(everything, plan.rcache_blocks))


def ignored_in_fp32(ignored: Iterable[IgnoredParam]) -> frozenset[str]:
    """Names of those that are computed with in fp32."""
    return frozenset(p.fqn for p in ignored if p.dtype == "float32")
