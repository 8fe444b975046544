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

    @property
    def in_shard(self) -> slice:
        """Its elements in the shard."""
        return slice(self.shard_offset, self.shard_offset + self.numel)

    @property
    def in_param(self) -> slice:
        """Its elements in the flattened parameter."""
        return slice(self.param_offset, self.param_offset + self.numel)


def segments_of(spec: ChunkSpec, rank: int, world_size: int) -> tuple[Segment, ...]:
    """The segments of rank `rank`'s shard, in order."""
    found = (segment_of(spec, index, rank, world_size) for index in range(len(spec.members)))
    return tuple(segment for segment in found if segment is not None)


def segment_of(spec: ChunkSpec, index: int, rank: int, world_size: int) -> Segment | None:
    """The part of member number `index` in rank `rank`'s shard; None: it has none."""
    member, shard_numel = spec.members[index], spec.numel // world_size
    first, last = rank * shard_numel, (rank + 1) * shard_numel
    begin, end = max(member.offset, first), min(member.offset + member.numel, last)
    if begin >= end:
        return None
    return Segment(member.fqn, index, begin - first, begin - member.offset, end - begin)
