"""Slices of flattened tensors as boxes.

[Note: slices as boxes] A rank's shard of a chunk holds a run of a parameter's elements, in memory order. Checkpoints of
`torch.distributed.checkpoint` know boxes only: offsets and sizes along each dimension. A run is cut into few of them:
the end of a row, whole rows, the begin of a row, and so on inside those two rows; at most `2 * dimensions - 1`, where
there is no bound on their size. They follow each other in the run, so each is a view of a slice of it.

So every reader of that format reads ours, and resharding is the intersection of boxes: a rank that loads reads the
stored boxes which meet its own, one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Part of a tensor: where it begins and how long it is, along each dimension."""

    offsets: Shape
    sizes: Shape

    def common(self, other: Box) -> Box | None:
        """What both cover; None: nothing."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
            return None
        return Box(begins, tuple(end - begin for begin, end in zip(begins, ends, strict=True)))

    def slices_of(self, part: Box) -> tuple[slice, ...]:
        """Where in a tensor of this box's values `part`, which it covers, lies."""
        return tuple(slice(b - a, b - a + n) for a, b, n in zip(self.offsets, part.offsets, part.sizes, strict=True))


@dataclass(frozen=True)
class Extent:
    """A run of a tensor's elements, in memory order."""

    shape: Shape
    stride: Shape | None
    """Of a tensor without gaps; None: contiguous."""
    begin: int
    """First element of the run."""
    numel: int
    offsets: Shape = ()
    """Where the tensor begins in a larger one, to which the boxes then belong, along each dimension; empty: it is no
    part of another."""

    def boxes(self, most: int | None = None) -> list[Box]:
        """The run, cut up, in its order.

        Args:
            most: Elements of a box; None: as many as it takes.
        """
        order = self._memory_order()
        most = max(1, self.numel if most is None else most)
        cut = _cut(tuple(self.shape[d] for d in order), self.begin, self.begin + self.numel, most)
        back = [order.index(d) for d in range(len(order))]
        begins = self.offsets or (0,) * len(order)
        return [
            Box(tuple(o[i] + b for i, b in zip(back, begins, strict=True)), tuple(s[i] for i in back)) for o, s in cut
        ]

    def views(self, run: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """The boxes, each with its values.

        Args:
            run: 1-D, `[numel]`: the elements.
        """
        for box, part in self.parts(run):
            yield box, self.as_box(box, part)

    def parts(self, run: Tensor, most: int | None = None) -> Iterator[tuple[Box, Tensor]]:
        """The boxes, each with its slice of the run. Arguments as for `views` and `boxes`."""
        begin = 0
        for box in self.boxes(most):
            numel = math.prod(box.sizes)
            yield box, run[begin : begin + numel]
            begin += numel

    def as_box(self, box: Box, part: Tensor) -> Tensor:
        """The elements of one of the boxes, 1-D and in memory order, in its shape; the same memory."""
        order = self._memory_order()
        return part.view([box.sizes[d] for d in order]).permute([order.index(d) for d in range(len(order))])

    def _memory_order(self) -> list[int]:
        """Dimensions, the slowest first."""
        stride = self.stride
        return sorted(range(len(self.shape)), key=lambda d: 0 if stride is None else -stride[d])


def _cut(shape: Shape, begin: int, end: int, most: int) -> list[tuple[Shape, Shape]]:
    """(offsets, sizes) of boxes of `most` elements that make up elements `begin` to `end` of a contiguous tensor."""
    if begin >= end:
        return []
    if not shape:
        return [((), ())]
    inner = shape[1:]
    row = math.prod(inner)
    first, skipped = divmod(begin, row)
    last, rest = divmod(end, row)
    if first == last:
        return _in_row(first, inner, skipped, rest, most)
    found = []
    if skipped:
        found += _in_row(first, inner, skipped, row, most)
        first += 1
    if row > most:
        for whole_row in range(first, last):
            found += _in_row(whole_row, inner, 0, row, most)
    else:
        rows = most // row
        for at in range(first, last, rows):
            found.append(((at, *[0] * len(inner)), (min(rows, last - at), *inner)))
    return found + _in_row(last, inner, 0, rest, most)


def _in_row(row: int, inner: Shape, begin: int, end: int, most: int) -> list[tuple[Shape, Shape]]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in _cut(inner, begin, end, most)]


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))
