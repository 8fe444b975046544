"""The optimizer's side of every chunk, which goes where the chunk goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.optim.adam_states import SegmentPlace
from lightning_elixir.optim.elementwise import InnerMaker
from lightning_elixir.optim.segments import SegmentOptimizer
from lightning_elixir.optim.whole_parameters import Layout, WholeParameters
from lightning_elixir.plan.memory import is_on_nvme
from lightning_elixir.plan.owners import owners_of, whole_update_bytes
from lightning_elixir.plan.regime import StateCount
from lightning_elixir.plan.shard_segments import Segment
from lightning_elixir.plan.types import Plan, Tier
from lightning_elixir.runtime.chunk import Chunk

if TYPE_CHECKING:
    from lightning_elixir.runtime.engine import Engine


class ChunkOptimizers:
    """One `SegmentOptimizer` for each chunk that trains, over this rank's shard of it.

    Args:
        engine: Whose chunks.
        maker: Of what runs over segments.
        groups: The user's parameter groups.

    Raises:
        PlanError: The plan updates chunks where such an optimizer cannot.
    """

    def __init__(self, engine: Engine, maker: InnerMaker, groups: Sequence[dict[str, Any]]) -> None:
        self._engine = engine
        self.maker = maker
        self.number = 0
        """Of the optimizer, in the order in which those over the engine were made; the same on every rank."""
        self.inner: dict[int, SegmentOptimizer] = {}
        """By chunk id."""
        self.segments: dict[int, tuple[Segment, ...]] = {}
        """Of this rank's shard, by chunk id."""
        self.members: dict[int, set[int]] = {}
        """Members that have a parameter group, by chunk id."""
        self._lost: set[int] = set()
        cut = [c for c in engine.plan.chunks if c.axes and c.requires_grad]
        if maker.is_whole and cut:
            raise PlanError(
                f"an optimizer that updates parameters as a whole cannot have those that a pattern cuts between ranks,"
                f" such as {cut[0].members[0].fqn}: use an element-wise one, such as HybridAdam, or no pattern there"
            )
        self.owners = owners_of(engine.plan.all_chunks, engine.groups.copy.world_size) if maker.is_whole else {}
        """Where parameters are updated as a whole: the rank of a copy that does, by chunk id and member index."""
        self.check_plan(engine.plan)
        self.group_by(groups)
        self.follow_all()
        self.note_followed()

    @property
    def is_adam(self) -> bool:
        """Whether updates are Adam's, described before they run: then they have the same bits wherever that is, and
        their states may be on a disk."""
        return self.maker.is_adam

    @property
    def state_count(self) -> StateCount:
        """States for each element of a parameter (Adam 2), rounded up; 2 before there are any."""
        of_bytes = self._bytes_of_states()
        if of_bytes is not None:
            return StateCount(0, of_bytes)
        if self.maker.is_whole:  # ranks have other shares of them, and must plan alike: Adafactor may have a momentum
            return StateCount(2 if any(group.get("beta1") is not None for group in self.groups) else 1)
        inners = [inner for inner in self.inner.values() if inner.state_bytes()]
        if self.maker.is_adam or not inners:
            return StateCount(2)
        # Step counts and the like are too small to count as a state. Other optimizers may share the chunks.
        own = sum(inner.work.element_size() * sum(place.numel for place in inner.places) for inner in inners)
        return StateCount(math.ceil(sum(inner.state_bytes() for inner in inners) / max(1, own) - 0.1))

    def _bytes_of_states(self) -> int | None:
        """For each element, rounded up over all parameters, where the optimizer has its own dtypes; else None."""
        nbytes, numels = 0.0, 0
        for chunk_id, members in self.members.items():
            chunk = self._engine.chunks[chunk_id]
            for index in members:
                numel = chunk.spec.members[index].numel
                of_element = self.maker.state_bytes(numel, self.group_of(chunk, index))
                if of_element is None:
                    return None
                nbytes, numels = nbytes + numel * of_element, numels + numel
        return math.ceil(nbytes / numels) if numels else None

    def parameter_names(self) -> list[str]:
        """FQNs of the members."""
        chunks = self._engine.plan.all_chunks
        return [chunks[i].members[m].fqn for i, members in self.members.items() for m in members]

    @property
    def whole_update_bytes(self) -> int:
        """Device memory that a step takes where parameters are updated as a whole, else 0; the same on every rank."""
        engine = self._engine
        num_ranks = engine.groups.copy.world_size
        return whole_update_bytes(engine.plan.all_chunks, self.members, num_ranks) if self.owners else 0

    def state_bytes(self) -> dict[str, int]:
        """Bytes of optimizer states on this rank, by tier; spare ones apart."""
        held: dict[str, int] = {}
        for chunk_id, inner in self.inner.items():
            tier = self._engine.plan.all_chunks[chunk_id].optim_tier.value
            held[f"{tier}_states"] = held.get(f"{tier}_states", 0) + inner.state_bytes()
            if inner.has_spares:
                held[f"{tier}_spare"] = held.get(f"{tier}_spare", 0) + inner.spare_bytes()
        return held

    def check_plan(self, plan: Plan) -> None:
        """Raises `PlanError` if the plan has updates run where this class cannot."""
        on_nvme = [c for c in plan.chunks if is_on_nvme(c)]
        if on_nvme and not self.is_adam:
            raise PlanError(
                f"the plan has the optimizer states of {len(on_nvme)} chunks on NVMe (nvme_offload_fraction, "
                f"nvme_offload_dir), which {self.maker.cls.__name__} cannot update there: use HybridAdam (with "
                "adamw_mode=False for Adam), or leave these options out"
            )
        if any(c.is_update_streamed for c in on_nvme):
            raise PlanError("the plan streams updates of states on NVMe to the device: those are the host's to update")
        streamed = [c for c in plan.chunks if c.requires_grad and c.is_update_streamed]
        if streamed and not self.is_adam:
            raise PlanError(
                f"the plan streams the updates of {len(streamed)} chunks to the device, which "
                f"{self.maker.cls.__name__} cannot: its results on CPU and GPU differ. Use "
                "HybridAdam, or make the plan with can_stream=False"
            )

    def group_by(self, groups: Sequence[dict[str, Any]]) -> None:
        """The user's parameter groups, for chunks that are followed from now on."""
        self.groups = groups
        self._group_of = {id(p): g for g, group in enumerate(groups) for p in group["params"]}

    def note_followed(self) -> None:
        """All chunks have been followed with the groups as they are."""
        self._sizes = _sizes(self.groups)

    def has_groups(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether all chunks have been followed with these groups, of as many parameters as they have now."""
        return groups is self.groups and _sizes(groups) == self._sizes

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
            # The device is going to take them, in updates or now.
            taken = earlier.moment_memory() if chunk.spec.is_update_streamed else []
            if chunk.spec.optim_tier is Tier.GPU and earlier.adam.counts:
                taken = [*earlier.adam.moments]
            for moment in taken:
                self._engine.device.lock(moment)
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

    def group_of(self, chunk: Chunk, index: int) -> dict[str, Any]:
        """The parameter group of a member that has one."""
        return self.groups[self._group_of[id(chunk.parameters[index])]]

    def state_segments(self, chunk: Chunk, rank: int) -> tuple[Segment, ...]:
        """Of which parameters, and of what of them, a rank has states; offsets in its shard say nothing where
        parameters are updated as a whole."""
        if not self.maker.is_whole:
            return self._engine.groups.segments(chunk.spec, rank)
        members, place = enumerate(chunk.spec.members), rank % self._engine.groups.copy.world_size
        return tuple(Segment(m.fqn, i, 0, 0, m.numel) for i, m in members if self.owners.get((chunk.id, i)) == place)

    def _made(self, chunk: Chunk) -> SegmentOptimizer:
        engine, group_of = self._engine, self._group_of
        segments = engine.groups.segments(chunk.spec)
        self.segments[chunk.id] = segments
        self.members[chunk.id] = self._members_of(chunk)
        places = [
            SegmentPlace(s.member_index, group_of[id(chunk.parameters[s.member_index])], s.shard_offset, s.numel)
            for s in self.state_segments(chunk, engine.comm.rank)
            if id(chunk.parameters[s.member_index]) in group_of
        ]
        zeros, shard = partial(engine.store.zeros, tier=chunk.spec.optim_tier), engine.store[chunk.id]
        on_disk, is_sent = shard.on_disk, chunk.spec.is_update_streamed
        if is_sent or self.maker.is_whole:  # the device is going to take it, too
            for master in (shard.master, shard.spare_master):
                if master is not None:
                    engine.device.lock(master)
        work = on_disk.stand_in() if on_disk is not None and on_disk.has_master else engine.own_shard(chunk)
        if self.maker.is_whole:
            layouts = {i: Layout(m.shape, chunk.strides[i]) for i, m in enumerate(chunk.spec.members)}
            return WholeParameters(self.maker, work, places, self.groups, zeros, layouts)
        return SegmentOptimizer(self.maker, work, places, self.groups, zeros, on_disk, is_sent=is_sent)


def _sizes(groups: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    return tuple(len(group["params"]) for group in groups)


def hand_over(chunks: Sequence[Chunk], plan: Plan, optimizers: Sequence[ChunkOptimizers]) -> None:
    """On NVMe a chunk's states belong to one optimizer, as an update brings and takes back all of them: to the one that
    was made last of those with parameters there. What earlier ones have of it is lost.

    Args:
        chunks: By id.
        plan: Where they are, or are going to be.
        optimizers: In the order in which they were made.
    """
    for chunk in chunks:
        if is_on_nvme(plan.all_chunks[chunk.id]):
            owners = [one for one in optimizers if one._members_of(chunk)]
            for earlier in owners[:-1]:
                earlier._lost.add(chunk.id)
