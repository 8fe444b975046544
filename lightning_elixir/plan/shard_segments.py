"""FQN <-> (chunk, offset, numel) <-> segment: where each parameter's elements are."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_elixir.plan.types import ChunkSpec


@dataclass(frozen=True)
class Segment:
    """One parameter's part of one rank's shard of a chunk; never empty."""

    fqn: str
    member_index: int
    shard_offset: int
    """First element within the shard."""
    param_offset: int
    """First element within the flattened parameter."""
    numel: int


def segments_of(spec: ChunkSpec, rank: int, world_size: int) -> tuple[Segment, ...]:
    """The segments of rank `rank`'s shard, in order."""
    shard_numel = spec.numel // world_size
    first, last = rank * shard_numel, (rank + 1) * shard_numel
    found = []
    for index, member in enumerate(spec.members):
        begin, end = max(member.offset, first), min(member.offset + member.numel, last)
        if begin < end:
            found.append(Segment(member.fqn, index, begin - first, begin - member.offset, end - begin))
    return tuple(found)
