"""What parallel patterns talk over, in the engine's order.

[Note: patterns between collectives] A rank that waits in a pattern's exchange serves none. So it goes there when all
its peers do: before each exchange they meet over the messages of all ranks (`Agreement.meet_along`), where a rank that
needs chunks, or has gradients to reduce, is served until then. What must be equal on all peers is told there, too:
ranks of one tensor-parallel group that have batches of other shapes learn so, in place of an error of the network.

Where every chunk is resident no rank needs any, so that hosts need not meet in a forward. In a backward ranks wait for
each other once more, with gradients to reduce; peers along "tensor" do so at the same points of the same graph, so if
nothing else is cut they need not meet there either (ranks that share experts have other tokens, and so other points).
They meet for the first exchanges all the same, to compare, and tell at the end of each backward how many there were.
As long as some rank may meet in a forward all wait at its end, where they serve those that have more exchanges.

A rank that runs a batch again alone, as its memory ran out, would come to the exchanges of that batch anew while its
peers wait in the middle of it, and values would be mixed. So exchanges are numbered, and a run that begins again breaks
the count: all ranks raise.

Compiled code cannot meet ranks, but it can issue torch's functional collectives, in the order of its graph, which all
peers have. They name a group whose host this is (Note: collectives of DTensors), so ranks meet before them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_elixir.core.meeting_group import MeetingGroup, give_name, take_name
from lightning_elixir.core.signals import deferred
from lightning_elixir.errors import DivergenceError
from lightning_elixir.patterns.peers import Exchange
from lightning_elixir.plan.mesh import AXES
from lightning_elixir.runtime.agreement import Meeting
from lightning_elixir.runtime.phases import Phase

if TYPE_CHECKING:
    from lightning_elixir.runtime.engine import Engine

_NUM_COMPARED = 64
_END = -1
_RERUN = 2**40


class PatternWire:
    """Between the ranks of one engine.

    Args:
        engine: Whose collectives the exchanges come between.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._comms = engine.groups.along
        rank, mesh = engine.comm.rank, engine.groups.mesh
        self._ranks = {axis: next(g for g in mesh.along(axis) if rank in g) for axis in self._comms}
        self._num_met = dict.fromkeys(self._comms, 0)
        self._named = {axis: MeetingGroup(comm.rank, comm.world_size, axis) for axis, comm in self._comms.items()}
        for group in self._named.values():
            group.bind(self)
            give_name(group)
        is_like_peers = mesh.expert == 1
        self._free_phases = (Phase.FORWARD, Phase.BACKWARD) if is_like_peers else (Phase.FORWARD,)
        self.meets_in_forwards = not mesh.is_trivial
        """Whether ranks meet in forwards also where every chunk is resident; the same on all."""

    def close(self) -> None:
        """Nothing goes over it any more."""
        for group in self._named.values():
            take_name(group)

    def group_name(self, axis: str) -> str:
        """See `Wire.group_name`."""
        name: str = self._named[axis].group_name
        return name

    def meet(self, axis: str, message: Sequence[int]) -> list[list[int]]:
        """See `Wire.meet`.

        Raises:
            DivergenceError: The peers have come to another exchange, or not all of them come.
        """
        engine = self._engine
        self._num_met[axis] += 1
        message = [self._num_met[axis], *message]
        own = message[message.index(_END) + 1 :] if _END in message else []
        is_known = self._num_met[axis] > _NUM_COMPARED and not own
        if is_known and engine.phase in self._free_phases and not engine.active.needs_agreement:
            return []
        turn = engine.turn
        with deferred() if turn.is_mine() else turn.call(Meeting.PATTERN.call.words), engine.telling():
            rows = engine.active.agreement.meet_along(AXES.index(axis), self._ranks[axis], message)
        common = [row[: row.index(_END)] if _END in row else row for row in rows]
        if any(one != common[0] for one in common):
            error = self._divergence(axis, common, self._ranks[axis])
            engine.comm.leave(error)
            raise error
        return [row[row.index(_END) + 1 :] if _END in row else [] for row in rows]

    @property
    def counts(self) -> list[int]:
        """How many exchanges there were so far, for each axis."""
        return list(self._num_met.values())

    def check_counts(self, counts: Sequence[Sequence[int]]) -> None:
        """Raises `DivergenceError`, on every rank, if peers have come to other numbers of exchanges.

        Args:
            counts: Every rank's.
        """
        for index, axis in enumerate(self._num_met):
            for ranks in self._engine.groups.mesh.along(axis):
                common = [[counts[rank][index]] for rank in ranks]
                if any(one != common[0] for one in common):
                    raise self._divergence(axis, common, ranks)
        if self._engine.groups.mesh.expert == 1:  # else ranks tell in each exchange of tokens how many there are
            self.meets_in_forwards = any(number <= _NUM_COMPARED for row in counts for number in row)

    def note_rerun(self) -> None:
        """This rank runs a batch from its beginning again."""
        for axis in self._num_met:
            self._num_met[axis] += _RERUN

    def _divergence(self, axis: str, common: list[list[int]], ranks: Sequence[int]) -> DivergenceError:
        if len({one[0] // _RERUN for one in common}) > 1:
            less = self._engine.activations.cure()
            return DivergenceError(
                f"a rank ran its batch again, since its memory had run out, while others waited for it in an exchange"
                f" along {axis!r}: that cannot be put together. Leave more memory to activations: lower"
                f" gpu_memory_limit, or take a smaller batch{less and f', or {less}'}"
            )
        told = ", ".join(f"rank {rank}: {one}" for rank, one in zip(ranks, common, strict=True))
        return DivergenceError(
            f"ranks that share the work of an operator along {axis!r} came to different exchanges (number, kind and"
            f" shape; {told}). Ranks of one tensor-parallel group must have the same batch, and all must run the same"
            " modules: use the Trainer's sampler, or one with num_replicas=ranks/tensor_parallel_size"
        )

    def sum_over_ranks(self, axis: str, tensor: Tensor) -> None:
        """See `Wire.sum_over_ranks`."""
        self._comms[axis].sum_over_ranks(tensor)

    def gather(self, axis: str, flat: Tensor) -> None:
        """See `Wire.gather`."""
        self._comms[axis].all_gather(flat)

    def exchange_rows(
        self, axis: str, received: Tensor, sent: Tensor, num_received: Sequence[int], num_sent: Sequence[int]
    ) -> None:
        """See `Wire.exchange_rows`."""
        self._comms[axis].exchange_rows(received, sent, num_received, num_sent)

    @property
    def is_computing(self) -> bool:
        """See `Wire.is_computing`."""
        return self._engine.is_computing

    def run(self, axis: str, message: Sequence[int], issue: Callable[[Any], Any]) -> Any:
        """See `Wire.run`."""
        self.meet(axis, [Exchange.OF_TORCH, *message])
        return self._comms[axis].run(issue)
