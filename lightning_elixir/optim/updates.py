"""An Adam update that is described first and carried out later, in pieces, wherever its tensors are then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_elixir.kernels.sequence import Scalars, Table
from lightning_elixir.optim.adam import AdamHyper, Operands, update_parts_
from lightning_elixir.plan.types import ALIGN_NUMEL
from lightning_elixir.storage.nvme import GRAD, MASTER, MOMENTS, PARAM, ChunkStates, Piece, Visit, aligned


@dataclass(frozen=True)
class UpdatePart:
    """Elements with the same settings."""

    start: int
    """First element within the update's tensors."""
    numel: int
    step: int
    """Count of updates including this one, from 1."""
    hyper: AdamHyper


@dataclass(frozen=True)
class FlatUpdate:
    """One Adam update over flat tensors: all 1-D, contiguous, of one numel, and but for `compute` on one device.

    Elements outside the parts are padding of fewer than `ALIGN_NUMEL` elements between them.
    """

    param: Tensor
    """The master, or the compute shard where there is none."""
    grad: Tensor
    """Any floating dtype; read only, unless `compute` is the same memory."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    parts: tuple[UpdatePart, ...]
    """Ascending, not overlapping."""
    grad_factor: float = 1.0
    """Multiplies the gradient (loss unscaling and clipping by norm)."""
    change_grad: Callable[[Tensor], None] | None = None
    """Changes a copy of the gradient, at least fp32, in place and element by element, before the update."""
    compute: Tensor | None = None
    """Receives the new values in its own dtype; None where `param` is what forward reads. May be the gradient's own
    memory, in the gradient's dtype."""
    is_compute_on_device: bool = False
    """Whether `compute` is on the compute device rather than in host memory."""
    outputs: tuple[Tensor, Tensor, Tensor] | None = None
    """What receives `param`, `exp_avg` and `exp_avg_sq`, beside them and in their dtypes; they stay as they are then.
    Padding of these may be written. None: they are written over."""

    @property
    def numel(self) -> int:
        return self.param.numel()

    @property
    def used_numel(self) -> int:
        """Without padding."""
        return sum(part.numel for part in self.parts)

    @property
    def changed_grad_dtype(self) -> torch.dtype:
        """What `change_grad` works on."""
        return torch.promote_types(torch.float32, self.grad.dtype)

    def pieces(self, max_numel: int) -> Iterator[FlatUpdate]:
        """The same update cut into pieces; the bits of the result do not depend on where.

        Args:
            max_numel: Most elements of one piece; rounded down to a multiple of `ALIGN_NUMEL`, and at least that.
        """
        size = max(ALIGN_NUMEL, max_numel // ALIGN_NUMEL * ALIGN_NUMEL)
        if self.numel <= size:
            yield self
            return
        for start in range(0, self.numel, size):
            yield self._cut(start, min(start + size, self.numel))

    def _cut(self, start: int, stop: int) -> FlatUpdate:
        """The same of these elements; the bits of the result do not depend on where that is."""
        return replace(
            self,
            param=self.param[start:stop],
            grad=self.grad[start:stop],
            exp_avg=self.exp_avg[start:stop],
            exp_avg_sq=self.exp_avg_sq[start:stop],
            parts=tuple(_clipped(self.parts, start, stop)),
            compute=None if self.compute is None else self.compute[start:stop],
            outputs=_each_cut(self.outputs, start, stop),
        )

    def run(
        self, *, changed_grad: Tensor | None = None, scratch: Tensor | None = None, num_threads: int | None = None
    ) -> None:
        """Carry the update out where the tensors are; `compute` must be on the same device.

        Args:
            changed_grad: Memory for `change_grad`, 1-D, `changed_grad_dtype`, `[numel]`. None: allocated here.
            scratch: See `update_parts_`.
            num_threads: Host threads of the compiled kernel; None: as `core.threads.default_num_threads` says.
        """
        grad = self.grad
        if self.change_grad is not None:
            if changed_grad is None:
                changed_grad = torch.empty_like(grad, dtype=self.changed_grad_dtype)
            grad = changed_grad.copy_(grad)
            self.change_grad(grad)
        update_parts_(
            Operands(self.param, grad, self.exp_avg, self.exp_avg_sq, self.compute, self.outputs),
            self._table(),
            scratch=scratch,
            num_threads=num_threads,
        )

    def in_piece(self, piece: Piece) -> FlatUpdate | None:
        """What of it lies in a piece of states on a disk; None: nothing. Its moments are on `meta`, slices of the whole
        chunk's."""
        start = int(self.exp_avg.storage_offset())
        found = piece.within(Piece(start, start + self.numel))
        cut = None if found is None else self._cut(found.start, found.stop)
        return cut if cut is not None and cut.parts else None

    def over(self, visit: Visit) -> FlatUpdate:
        """The same over states that were on a disk when it was described, and are in a buffer now.

        Args:
            visit: It has come, with all that this update's tensors on `meta` are slices of.
        """

        def found(stand_in: Tensor, part: str) -> Tensor:
            if not stand_in.is_meta:
                return stand_in
            start = int(stand_in.storage_offset()) - visit.piece.start
            return visit.tensors[part].view(stand_in.dtype)[start : start + stand_in.numel()]

        return replace(
            self,
            param=found(self.param, MASTER),
            grad=found(self.grad, GRAD),
            exp_avg=found(self.exp_avg, MOMENTS[0]),
            exp_avg_sq=found(self.exp_avg_sq, MOMENTS[1]),
            compute=None if self.compute is None else found(self.compute, PARAM),
        )

    @property
    def written(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where the new parameter and moments go."""
        return self.outputs or (self.param, self.exp_avg, self.exp_avg_sq)

    def is_same_as(self, other: FlatUpdate) -> bool:
        """Whether it reads and writes the same memory with the same numbers; False where that cannot be told."""
        if self.change_grad is not None or other.change_grad is not None:
            return False
        settings, others = ((u.parts, u.grad_factor, u.is_compute_on_device) for u in (self, other))
        return settings == others and self._memory() == other._memory()

    def _memory(self) -> list[tuple[int, int, torch.dtype] | None]:
        tensors = (self.param, self.grad, self.exp_avg, self.exp_avg_sq, self.compute, *(self.outputs or ()))
        return [None if x is None else (x.data_ptr(), x.numel(), x.dtype) for x in tensors]

    def _table(self) -> Table:
        """The parts with their numbers, which are the same for most."""
        numbers: dict[tuple[int, int], Scalars] = {}
        table: Table = []
        for part in self.parts:
            key = (part.step, id(part.hyper))
            if key not in numbers:
                numbers[key] = part.hyper.scalars(part.step, self.grad_factor)
            table.append((part.start, part.numel, numbers[key]))
        return table


@dataclass(frozen=True)
class StatesOnDisk:
    """What an update has to know of states that it was described over while they were on a disk."""

    states: ChunkStates
    is_first: bool
    """The moments have never been made: they are zeros, and not read."""
    blank: tuple[Piece, ...] = ()
    """Where in the moments there are zeros, whatever the disk holds."""
    grad_dtype: torch.dtype | None = None
    """Of gradients that are there as well; None: they are in host memory."""
    is_whole: bool = True
    """Whether the update makes a new value of every element."""

    def pieces(self, updates: Sequence[FlatUpdate]) -> list[tuple[Piece, list[FlatUpdate]]]:
        """The pieces in which the states come, as far as they are updated, and what happens to each.

        Args:
            updates: Of the chunk, described over what is on the disk.
        """
        found = []
        for piece in self.states.file.pieces(self.states.chunk_id):
            here = [cut for cut in (update.in_piece(piece) for update in updates) if cut is not None]
            if here:
                found.append((piece, here))
        return found

    def begin(self, piece: Piece, order: float, *, has_landed: Callable[[], bool]) -> Visit:
        """Have a piece brought to host memory.

        Args:
            piece: One of `pieces`.
            order: See `Visit`.
            has_landed: Whether gradients are where they shall be. If so now, they are read as well; otherwise `prepare`
                does that.
        """
        spec = self.states.spec
        read = [part for part in spec.states if part == MASTER or not self.is_first]
        itemsize = self._grad_itemsize if has_landed() else 0
        return self.states.file.begin(self.states.chunk_id, piece, read, order, itemsize, has_landed)

    @property
    def _grad_itemsize(self) -> int:
        return 0 if self.grad_dtype is None else self.grad_dtype.itemsize

    def prepare(self, visit: Visit) -> None:
        """Once they are there, and gradients have landed: read what could not be read before, and make the rest.

        Raises:
            StorageError: Gradients cannot be read.
        """
        piece, itemsize = visit.piece, self._grad_itemsize
        if itemsize and GRAD not in visit.read:
            nbytes = piece.numel * itemsize
            blocks = visit.tensors[GRAD][: aligned(nbytes)]
            self.states.file.read_into(self.states.chunk_id, GRAD, blocks, nbytes, piece.start * itemsize)
        if PARAM in visit.tensors and not self.is_whole:
            visit.tensors[PARAM].copy_(visit.tensors[MASTER])  # for what gets no update, and padding
        zeros = (piece,) if self.is_first else self.blank
        for here in (blank.within(piece) for blank in zeros):
            if here is not None:
                for part in MOMENTS:
                    visit.tensors[part][here].zero_()


def _each_cut(
    outputs: tuple[Tensor, Tensor, Tensor] | None, start: int, stop: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    if outputs is None:
        return None
    param, exp_avg, exp_avg_sq = outputs
    return param[start:stop], exp_avg[start:stop], exp_avg_sq[start:stop]


def _clipped(parts: tuple[UpdatePart, ...], start: int, stop: int) -> Iterator[UpdatePart]:
    """What lies between `start` and `stop`, counted from `start`."""
    for part in parts:
        first, last = max(part.start, start), min(part.start + part.numel, stop)
        if first < last:
            yield replace(part, start=first - start, numel=last - first)
