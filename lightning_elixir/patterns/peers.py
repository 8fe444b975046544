"""The ranks between which one axis cuts operators, as patterns see them.

A pattern is put into a model before there is an engine, so its peers are known by number only at first; the engine
binds them to what messages go over (`runtime/pattern_wire.py`). In compiled code torch's functional collectives send
the same values, for the same bits (Note: patterns between collectives). On fake and `meta` tensors nothing is sent:
what comes out has the right shapes, for the step that is foreseen.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed._functional_collectives  # has what the compiler must know of them
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_elixir.errors import StateError

_UNBOUND = (
    "a module with a parallel pattern was called where no engine connects the ranks: call it during fit, validate, test"
    " or predict, on every rank"
)


class Exchange(enum.IntEnum):
    """What ranks do together."""

    SUM = 1
    GATHER = 2
    ROWS = 3
    OF_TORCH = 4


class Wire(Protocol):
    """What messages go over: made by an engine."""

    @property
    def is_computing(self) -> bool:
        """Whether a forward or a backward runs."""

    def group_name(self, axis: str) -> str:
        """By which torch's functional collectives find a group of the ranks along the axis."""

    def run(self, axis: str, message: Sequence[int], issue: Callable[[Any], Any]) -> Any:
        """Meet the peers along the axis, and issue a collective of torch's.

        Args:
            message: What must be equal on all of them.
            issue: Gets the process group to take, and gives torch's handle.
        """

    def meet(self, axis: str, message: Sequence[int]) -> list[list[int]]:
        """Wait until all ranks along the axis have come to the same exchange, serving all others meanwhile.

        Args:
            message: The kind of exchange first, then what must be equal on all of them, a -1, and what need not be.

        Returns:
            What each of them has told, in the order of their coordinates.
        """

    def sum_over_ranks(self, axis: str, tensor: Tensor) -> None:
        """In place."""

    def gather(self, axis: str, flat: Tensor) -> None:
        """In place: each rank's slice of a 1-D tensor goes to all."""

    def exchange_rows(
        self, axis: str, received: Tensor, sent: Tensor, num_received: Sequence[int], num_sent: Sequence[int]
    ) -> None:
        """As of `Comm`."""


Heard = Callable[[str, str, int, str], None]
"""Is told of an exchange of a step that is foreseen: axis, kind, bytes and module, as of `plan.weighing.Exchanged`."""


class Peers:
    """The ranks that differ from this one along one axis alone, and this rank among them.

    Args:
        axis: "tensor" or "expert".
        size: How many they are.
        rank: The coordinate of this one.
    """

    def __init__(self, axis: str, size: int, rank: int) -> None:
        self.axis = axis
        self.size = size
        self.rank = rank
        self._wire: Wire | None = None
        self._group_name = ""
        self._heard: Heard | None = None
        self._forward_of = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Peers:
        return self  # copies of a module talk to the same ranks

    def __reduce__(self) -> Any:
        return Peers, (self.axis, self.size, self.rank)

    def bind(self, wire: Wire | None) -> None:
        """Have messages go over this from now on; None: there are none any more."""
        self._wire = wire
        self._group_name = "" if wire is None else wire.group_name(self.axis)

    def listen(self, heard: Heard | None) -> None:
        """Call this at exchanges that are only foreseen, in which nothing is sent; None: call nothing."""
        self._heard = heard

    def foresee(self, kind: str, nbytes: int) -> None:
        """Tell of an exchange in a step that is foreseen."""
        if self._heard is not None:
            self._heard(self.axis, kind, nbytes, self._forward_of)

    @property
    def is_listened_to(self) -> bool:
        return self._heard is not None

    @contextmanager
    def forward_of(self, name: str) -> Iterator[None]:
        """What is foreseen inside is told of as in the forward of this module."""
        outer, self._forward_of = self._forward_of, name
        try:
            yield
        finally:
            self._forward_of = outer

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, the same bits on all of them; in memory of its own."""
        if torch.compiler.is_compiling():
            return self._issued("all_reduce", tensor, "sum")
        total = tensor.clone(memory_format=torch.contiguous_format)
        if is_without_values(tensor):
            self.foresee("sum", tensor.nbytes)
        else:
            wire = self._bound
            wire.meet(self.axis, [Exchange.SUM, *tensor.shape])
            wire.sum_over_ranks(self.axis, total)
        return total

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """All ranks' tensors, of one shape, one after the other along a dimension."""
        if torch.compiler.is_compiling():
            flat = self._issued("all_gather_into_tensor", tensor.unsqueeze(0), self.size)
            return torch.cat(flat.unbind(0), dim)
        every = tensor.new_empty((self.size, *tensor.shape))
        if is_without_values(tensor):
            self.foresee("gather", every.nbytes)
        else:
            wire = self._bound
            wire.meet(self.axis, [Exchange.GATHER, *tensor.shape])
            every[self.rank].copy_(tensor)
            wire.gather(self.axis, every.view(-1))
        return torch.cat(every.unbind(0), dim)

    def sum_of_parts(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part, of equal ones along a dimension, of the sum over the ranks, added up in rank order, in fp32
        at least."""
        parts = torch.stack(tensor.chunk(self.size, dim))
        if torch.compiler.is_compiling():
            received = self._issued("all_to_all_single", parts, [1] * self.size, [1] * self.size)
        elif is_without_values(tensor):
            received = torch.empty_like(parts)
            self.foresee("part", tensor.nbytes)
        else:
            received = torch.empty_like(parts)
            wire, ones = self._bound, [1] * self.size
            wire.meet(self.axis, [Exchange.GATHER, *parts.shape])
            wire.exchange_rows(self.axis, received, parts, ones, ones)
        del parts
        total = received[0].to(torch.promote_types(torch.float32, tensor.dtype), copy=True)
        for part in received[1:]:
            total.add_(part)
        return total.to(tensor.dtype)

    def count_rows(
        self, num_sent: Sequence[int], num_pairs: Sequence[int], num_chosen: int, width: int
    ) -> tuple[list[int], int, int]:
        """Tell each rank how many rows it is going to get, and how many pairs of a row and an expert of its own.

        Args:
            num_sent: For each rank.
            num_pairs: For each rank.
            num_chosen: Experts of a token of this rank.
            width: Elements of a row, the same everywhere.

        Returns:
            How many rows come from each rank, how many pairs in all, and the most experts of a token of any rank.
        """
        told = self._bound.meet(self.axis, [Exchange.ROWS, width, -1, *num_sent, *num_pairs, num_chosen])
        num_pairs_here = sum(row[self.size + self.rank] for row in told)
        return [row[self.rank] for row in told], num_pairs_here, max(row[-1] for row in told)

    def exchange_rows(self, sent: Tensor, num_received: Sequence[int], num_sent: Sequence[int]) -> Tensor:
        """Rows from each rank to each, in rank order; the ranks have met."""
        received = sent.new_empty((sum(num_received), *sent.shape[1:]))
        if is_without_values(sent):
            return received
        self._bound.exchange_rows(self.axis, received, sent.contiguous(), num_received, num_sent)
        return received

    def meet(self, kind: Exchange, width: int) -> None:
        """As before an exchange of rows of which the counts are known."""
        self._bound.meet(self.axis, [kind, width])

    def _issued(self, collective: str, tensor: Tensor, *options: Any) -> Tensor:
        """What a collective of compiled code gives."""
        if not self._group_name:
            raise StateError(_UNBOUND)
        ours = getattr(torch.ops._c10d_functional, collective)(tensor.contiguous(), *options, self._group_name)
        made: Tensor = torch.ops._c10d_functional.wait_tensor(ours)
        return made

    @property
    def _bound(self) -> Wire:
        if self._wire is None:
            raise StateError(_UNBOUND)
        return self._wire


def is_without_values(tensor: Tensor) -> bool:
    """Whether it only stands for a tensor, in a step that is foreseen."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)
