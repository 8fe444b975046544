"""How ranks stand to each other when parameters are cut: which of them hold the same part of one.

The ranks form a box: data x expert x tensor. Neighbours along the tensor axis have neighbouring numbers, since they
talk most. The ranks of one tensor-parallel group have the same batch; all others have batches of their own.

The box may be held several times, by ranks with neighbouring numbers each: one *copy* of all parameters for each node,
say. Ranks of different copies with the same place in theirs hold the same slices, and have the mean of their gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lightning_elixir.errors import PlanError

AXES = ("expert", "tensor")
"""Along which parameters may be cut."""


@dataclass(frozen=True)
class AxisCut:
    """One dimension of a parameter is cut into equal parts, one for each coordinate along an axis."""

    axis: str
    """Of `AXES`."""
    dim: int
    """Of the parameter."""


@dataclass(frozen=True)
class Mesh:
    """All ranks, and the sizes of the axes along which parameters may be cut."""

    world_size: int = 1
    tensor: int = 1
    expert: int = 1
    copies: int = 1
    """How many groups of ranks hold all parameters each, and share them among themselves alone."""

    def check(self) -> None:
        """Raises `PlanError` if these sizes do not make up a box."""
        for name, size in (("tensor_parallel_size", self.tensor), ("expert_parallel_size", self.expert)):
            if size < 1:
                raise PlanError(f"{name} must be at least 1, got {size}")
        if self.world_size % (self.tensor * self.expert):
            raise PlanError(
                f"tensor_parallel_size={self.tensor} and expert_parallel_size={self.expert} need a number of ranks that"
                f" is a multiple of {self.tensor * self.expert}, and there are {self.world_size}: change the sizes or"
                " the number of devices"
            )
        if self.copies < 1 or self.world_size % self.copies or self.copy_size % (self.tensor * self.expert):
            raise PlanError(
                f"{self.copies} copies of the parameters need a number of ranks that is a multiple of"
                f" {self.copies * self.tensor * self.expert}, and there are {self.world_size}"
            )

    @property
    def copy_size(self) -> int:
        """How many ranks hold one copy of all parameters together."""
        return self.world_size // self.copies

    @property
    def is_trivial(self) -> bool:
        """Whether nothing can be cut."""
        return self.tensor == self.expert == 1

    def size(self, axis: str) -> int:
        """How many ranks there are along an axis."""
        return self.tensor if axis == "tensor" else self.expert

    def coordinate(self, rank: int, axis: str) -> int:
        """Where a rank is along an axis: which part of what is cut along it the rank has."""
        return rank % self.tensor if axis == "tensor" else rank // self.tensor % self.expert

    def num_parts(self, axes: Iterable[str]) -> int:
        """Into how many parts a parameter is cut along these axes together."""
        number = 1
        for axis in axes:
            number *= self.size(axis)
        return number

    def num_sharing(self, axes: Collection[str]) -> int:
        """How many ranks hold the same part of what is cut along these axes, and share it."""
        return self.copy_size // self.num_parts(axes) if axes else self.copy_size

    def part(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """A rank's coordinates along these axes."""
        return tuple(self.coordinate(rank, axis) for axis in axes)

    def sharing(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that hold the same part of what is cut along these axes, and share it; in each, and among
        each other, in rank order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault((rank // self.copy_size, *self.part(rank, axes)), []).append(rank)
        return tuple(tuple(ranks) for ranks in groups.values())

    def across(self) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks with the same place in their copies: they hold the same slices of everything."""
        return tuple(tuple(range(place, self.world_size, self.copy_size)) for place in range(self.copy_size))

    def along(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that differ along one axis alone, in the order of their coordinates."""
        if axis == "tensor":
            return tuple(tuple(range(first, first + self.tensor)) for first in range(0, self.world_size, self.tensor))
        span = self.tensor * self.expert
        return tuple(
            tuple(range(first + own, first + span, self.tensor))
            for first in range(0, self.world_size, span)
            for own in range(self.tensor)
        )

    @property
    def num_batches(self) -> int:
        """How many different batches the ranks have at a time."""
        return self.world_size // self.tensor

    def batch_of(self, rank: int) -> int:
        """Which of them a rank has."""
        return rank // self.tensor


def axes_of(cuts: Iterable[AxisCut]) -> tuple[str, ...]:
    """The axes of a parameter's cuts, in the order of `AXES`."""
    found = {cut.axis for cut in cuts}
    return tuple(axis for axis in AXES if axis in found)


def whole_shape(shape: tuple[int, ...], cuts: Iterable[AxisCut], mesh: Mesh) -> tuple[int, ...]:
    """The shape of a parameter of which each rank has a part of this shape."""
    sizes = list(shape)
    for cut in cuts:
        sizes[cut.dim] *= mesh.size(cut.axis)
    return tuple(sizes)


def offsets_in_whole(shape: tuple[int, ...], cuts: Iterable[AxisCut], mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Where a rank's part of this shape begins in the whole parameter, along each dimension."""
    offsets = [0] * len(shape)
    for cut in cuts:
        offsets[cut.dim] = shape[cut.dim] * mesh.coordinate(rank, cut.axis)
    return tuple(offsets)
