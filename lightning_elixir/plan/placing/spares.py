"""Which chunks get spare states where the host has memory for some.

Spare states let a chunk's update begin when its gradients land. Those of the last chunks land first, and so have the
most time, but it is the first chunks that the next forward waits for. Which are the best depends on how long updates
take beside forward and backward: "auto" simulates some patterns, and fewer chunks than would fit, since updates of late
chunks that have begun may hold up early ones. Chunks spread from the last one on come near to the best in most cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lightning_elixir.plan.memory import Scheme
from lightning_elixir.plan.types import ChunkSpec

SPARE_PATTERNS = ("spread", "first", "middle", "last")


def chunks_to_spare(
    chunks: Sequence[ChunkSpec], scheme: Scheme, room: int | None, pattern: str = "spread", most: int | None = None
) -> set[int]:
    """Ids of as many of the chunks that can have spare states as the host's memory holds.

    Args:
        chunks: None of them with spare states.
        scheme: Bytes per element.
        room: Bytes of host memory for them; None: it holds everything.
        pattern: Which chunks come first, one of `SPARE_PATTERNS`.
        most: No more chunks than this; None: as many as fit.
    """
    costs = {c.id: scheme.bytes_to_spare(c) for c in chunks if scheme.can_have_spares(c)}
    room = sum(costs.values()) if room is None else room
    count = sum(total <= room for total in accumulate(sorted(costs.values())))  # no choice has more
    count = count if most is None else min(most, count)
    chosen: set[int] = set()
    for chunk_id in _ordered([c for c in chunks if c.id in costs], count, pattern):
        if len(chosen) < count and costs[chunk_id] <= room:
            chosen.add(chunk_id)
            room -= costs[chunk_id]
    return chosen


def _ordered(able: Sequence[ChunkSpec], count: int, pattern: str) -> list[int]:
    """Ids so that the first `count` of them are the ones that the pattern picks."""
    ids = [c.id for c in able]
    if pattern == "first" or not count:
        return ids
    if pattern == "last":
        return ids[::-1]
    if pattern == "middle":
        begin = (len(ids) - count) // 2
        return ids[begin : begin + count] + ids[begin + count :] + ids[:begin]
    # Over those that the host updates and those that are streamed by themselves, since both work side by side.
    ids = [c.id for c in sorted(able, key=lambda c: (c.is_update_streamed, c.id))][::-1]
    picked = [ids[k * len(ids) // count] for k in range(count)]
    return picked + sorted(set(ids) - set(picked), reverse=True)
