"""The optimizer's side of every chunk, which goes where the chunk goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_elixir.errors import StateError
from lightning_elixir.optim.segments import SegmentOptimizer, SegmentPlace
from lightning_elixir.plan.memory import is_on_nvme
from lightning_elixir.plan.shard_segments import Segment, segments_of
from lightning_elixir.plan.types import Plan
from lightning_elixir.runtime.chunk import Chunk

if TYPE_CHECKING:
    from lightning_elixir.runtime.engine import Engine


class ChunkOptimizers:
    """One `SegmentOptimizer` for each chunk that trains, over this rank's shard of it.

    Args:
        engine: Whose chunks.
        cls: From `elementwise_class`.
        groups: The user's parameter groups.
    """

    def __init__(self, engine: Engine, cls: type[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]]) -> None:
        self._engine = engine
        self._cls = cls
        self.inner: dict[int, SegmentOptimizer] = {}
        """By chunk id."""
        self.segments: dict[int, tuple[Segment, ...]] = {}
        """Of this rank's shard, by chunk id."""
        self.members: dict[int, set[int]] = {}
        """Members that have a parameter group, by chunk id."""
        self._lost: set[int] = set()
        self.group_by(groups)
        self.follow_all()

    def group_by(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """The user's parameter groups, for chunks that are followed from now on."""
        self._groups = groups
        self._group_of = {id(p): g for g, group in enumerate(groups) for p in group["params"]}

    def follow_all(self) -> None:
        """As `follow`, every chunk: where nothing has moved, the same states over the segments that are in groups."""
        for chunk in self._engine.chunks:
            self.follow(chunk)

    def follow(self, chunk: Chunk) -> None:
        """The same states beside the chunk's shard, which has moved. What they leave is free when this returns."""
        if not chunk.spec.requires_grad:
            return
        inner, earlier = self._made(chunk), self.inner.get(chunk.id)
        if earlier is not None and chunk.id not in self._lost:
            inner.take_states(earlier)
            if self._engine.store[chunk.id].spare_master is None:
                inner.drop_spares()
        self.inner[chunk.id] = inner

    def check_kept(self) -> None:
        """Raises `StateError` if a later optimizer has taken the place of any states (see `hand_over`)."""
        if self._lost:
            chunk = self._engine.chunks[min(self._lost)]
            raise StateError(
                f"the states of {chunk.spec} that this optimizer had on NVMe are gone, as another optimizer over"
                " parameters of it was made later: go on with that one, use one optimizer with several parameter"
                " groups, or keep the states in memory"
            )

    def _members_of(self, chunk: Chunk) -> set[int]:
        return {i for i, p in enumerate(chunk.parameters) if id(p) in self._group_of}

    def _made(self, chunk: Chunk) -> SegmentOptimizer:
        engine, group_of = self._engine, self._group_of
        segments = segments_of(chunk.spec, engine.comm.rank, engine.comm.world_size)
        self.segments[chunk.id] = segments
        self.members[chunk.id] = self._members_of(chunk)
        places = [
            SegmentPlace(s.member_index, group_of[id(chunk.parameters[s.member_index])], s.shard_offset, s.numel)
            for s in segments
            if id(chunk.parameters[s.member_index]) in group_of
        ]
        empty = partial(engine.store.empty, tier=chunk.spec.optim_tier)
        on_disk = engine.store[chunk.id].on_disk
        work = on_disk.stand_in() if on_disk is not None and on_disk.has_master else engine.own_shard(chunk)
        return SegmentOptimizer(self._cls, work, places, self._groups, empty, on_disk)


def hand_over(chunks: Sequence[Chunk], plan: Plan, optimizers: Sequence[ChunkOptimizers]) -> None:
    """On NVMe a chunk's states belong to one optimizer, as an update brings and takes back all of them: to the one that
    was made last of those with parameters there. What earlier ones have of it is lost.

    Args:
        chunks: By id.
        plan: Where they are, or are going to be.
        optimizers: In the order in which they were made.
    """
    for chunk in chunks:
        if is_on_nvme(plan.chunks[chunk.id]):
            owners = [one for one in optimizers if one._members_of(chunk)]
            for earlier in owners[:-1]:
                earlier._lost.add(chunk.id)
