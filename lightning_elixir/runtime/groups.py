"""Which ranks share which chunk, and what they talk over.

[Note: groups of chunks] A pattern may cut parameters between ranks (`plan/mesh.py`). Ranks that hold the same parts
share the chunk as all ranks share one whose parameters are whole: they keep a slice each, gather it, and reduce its
gradients to their mean. So each set of axes has a `Comm` of its own, which sees slices, ranks and sums of its group
alone; everything that is told or agreed still goes over all ranks.

One order for all groups keeps them from waiting for each other in a ring: all ranks gather the same chunks in the order
of their numbers and reduce them in the common order (Note: agreed collectives, Note: one order of reductions), each in
its own group of each chunk. A rank that fails leaves all groups at once.

Where all parameters are held several times (`sharding="node"`), ranks share chunks within their copy alone. What each
rank of one has as the mean of its group goes on to the ranks with the same place in the other copies (`across`), and
their mean is the gradient: every copy gets the same bits, and makes the same updates of them. A copy can do alone all
that only looks at values; what sums up over all ranks counts one copy.

The mean over a group is what a whole parameter gets whose ranks have different batches. Patterns see to it that it is
right for parts as well (`patterns/base.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_elixir.core.comm import Comm, SoloComm
from lightning_elixir.plan.mesh import AXES, Mesh, offsets_in_whole, whole_shape
from lightning_elixir.plan.shard_segments import Segment, segment_of, segments_of
from lightning_elixir.plan.types import ChunkSpec, Member, Plan


class Groups:
    """The groups of one engine.

    Args:
        world: All ranks.
        plan: Its chunks say along which axes parameters are cut. Every rank makes its `Groups` at the same point.
    """

    def __init__(self, world: Comm, plan: Plan) -> None:
        self.world = world
        self.mesh: Mesh = plan.mesh
        has_copies = self.mesh.copies > 1
        self.copy = world.part(self.mesh.sharing(()), has_reductions=True) if has_copies else world
        """The ranks that hold one copy of all parameters together with this one."""
        self.across = world.part(self.mesh.across(), has_reductions=True) if has_copies else SoloComm()
        """The ranks of all copies that have this one's place there; in the order of the copies."""
        self._by_axes: dict[tuple[str, ...], Comm] = {(): self.copy}
        for axes in sorted({chunk.axes for chunk in plan.chunks}):
            if axes not in self._by_axes:
                self._by_axes[axes] = world.part(self.mesh.sharing(axes), has_reductions=True)
        self.along: dict[str, Comm] = {
            axis: world.part(self.mesh.along(axis), has_reductions=False) for axis in AXES if self.mesh.size(axis) > 1
        }
        """This rank and its peers along each axis, which exchange activations."""

    def of(self, spec: ChunkSpec) -> Comm:
        """The ranks that share a chunk."""
        return self._by_axes[spec.axes]

    def is_shared(self, spec: ChunkSpec) -> bool:
        """Whether another rank has gradients of the same part of this chunk."""
        return self.of(spec).world_size > 1 or self.across.world_size > 1

    @property
    def is_counted(self) -> bool:
        """Whether this rank's slices count in sums over all ranks: those of one copy do."""
        return self.world.rank < self.mesh.copy_size

    def writes(self, spec: ChunkSpec, rank: int) -> bool:
        """Whether a rank writes its slice of a chunk to checkpoints: one copy does, each another chunk."""
        return rank // self.mesh.copy_size == spec.id % self.mesh.copies

    def connect(self, chunks: Iterable[ChunkSpec]) -> None:
        """Make the connections that fetches and reductions of these chunks need, group by group."""
        largest: dict[tuple[str, ...], int] = {}
        slice_bytes = 0
        for chunk in chunks:
            largest[chunk.axes] = max(largest.get(chunk.axes, 0), chunk.nbytes)
            slice_bytes = max(slice_bytes, chunk.nbytes // self.mesh.num_sharing(chunk.axes))
        for axes, comm in self._by_axes.items():
            comm.connect(largest.get(axes, 0))
        self.across.connect(slice_bytes)

    def close(self) -> None:
        """Leave them. Collective."""
        for axes, comm in self._by_axes.items():
            if axes:
                comm.close()
        for comm in (*self.along.values(), *([self.copy, self.across] if self.copy is not self.world else [])):
            comm.close()
        self.world.close()

    # What lies where

    def numel(self, spec: ChunkSpec) -> int:
        """Elements of one rank's slice of a chunk."""
        return spec.numel // self.of(spec).world_size

    def mine(self, spec: ChunkSpec, flat: Tensor) -> Tensor:
        """This rank's slice of a flat tensor of the chunk's length."""
        comm = self.of(spec)
        numel = spec.numel // comm.world_size
        return flat[comm.rank * numel : (comm.rank + 1) * numel]

    def segments(self, spec: ChunkSpec, rank: int | None = None) -> tuple[Segment, ...]:
        """What a rank's slice of a chunk holds of its members; None: this rank's."""
        comm = self.of(spec)
        share = comm.rank
        if rank is not None:
            share = next(ranks.index(rank) for ranks in self.parts(spec) if rank in ranks)
        return segments_of(spec, share, comm.world_size)

    def segment(self, spec: ChunkSpec, index: int) -> Segment | None:
        """What this rank's slice holds of one member; None: nothing."""
        comm = self.of(spec)
        return segment_of(spec, index, comm.rank, comm.world_size)

    # Parts of whole parameters

    def whole_shape(self, member: Member) -> tuple[int, ...]:
        """The shape of the whole parameter, of which `member.shape` is one rank's part."""
        return whole_shape(member.shape, member.cuts, self.mesh)

    def offsets(self, member: Member, rank: int | None = None) -> tuple[int, ...]:
        """Where a rank's part begins in the whole parameter; None: this rank's."""
        return offsets_in_whole(member.shape, member.cuts, self.mesh, self.world.rank if rank is None else rank)

    def part_of(self, member: Member, whole: Tensor, rank: int | None = None) -> Tensor:
        """A rank's part of a whole parameter, a view; None: this rank's."""
        if not member.cuts:
            return whole
        offsets = self.offsets(member, rank)
        return whole[tuple(slice(o, o + n) for o, n in zip(offsets, member.shape, strict=True))]

    def parts(self, spec: ChunkSpec) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that share the same part, for all parts of a chunk, in every copy."""
        return self.mesh.sharing(spec.axes)

    def flats(self, spec: ChunkSpec, rows: list[Tensor]) -> list[tuple[int, Tensor]]:
        """Flat tensors of all parts of a chunk out of the slices of one copy.

        Args:
            rows: 1-D, in rank order.

        Returns:
            The first rank of each part in the first copy, and the part's flat tensor.
        """
        found = []
        for ranks in self.parts(spec)[: self.mesh.num_parts(spec.axes)]:
            pieces = [rows[rank] for rank in ranks]
            found.append((ranks[0], pieces[0] if len(pieces) == 1 else torch.cat(pieces)))
        return found
