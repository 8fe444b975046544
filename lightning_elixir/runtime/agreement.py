"""How ranks keep their collectives in step.

[Note: agreed collectives] No rank issues a collective on its own. A rank that misses a chunk tells the others which it
needs, and every rank joins the all-gather of every chunk that any rank needs, keeping its own ones. A rank
whose next gradients are complete tells how far it is in the common order, and what all have ready is reduced. A rank
that has come to the end of its forward, its backward, or to any other collective operation of the engine waits there
and serves the others until all have arrived (at the end of backward it has all gradients it will have, so it is ready
for any). One that has no more batches to evaluate, or comes to a message between two of them, serves those that have
more (Lightning pads none that are predicted). So ranks may take different branches, route to different experts, or
evict differently after such a divergence; nothing can hang and no two ranks can mix different chunks in one collective.
On GPUs it also matters that no rank launches a collective whose peer may be waiting for this rank's host: a kernel that
waits for a peer can block the host in its next memory allocation (seen with two GPUs and a model that branches). What
may not differ is the sequence of meeting points: that is found out at once, on every rank, and is a `DivergenceError`.
So every call that takes all ranks begins with a meeting of its own, and what it sends besides comes after that.

So no order of collectives need be recorded, and a rank that leaves it is no error. The price is one small message for
each miss, and for what becomes worth fetching ahead ([Note: messages of one host], `core/shared_messages.py`): without
the latter the device stood still for a whole fetch, wherever what had been fetched ahead came to an end. Hosts meet,
streams do not: on a GPU the host runs ahead of the device. Running statistics (BatchNorm) are rank 0's, as
in DDP: shared before the next forward after one with gradients. A replica of which any rank keeps an alias stays over
the step, and is refilled by all ranks.

Inside a forward users send messages of their own, too: `self.log(..., sync_dist=True)`, `self.all_gather`. A rank that
waited in one would serve none, and the others may need chunks before they come to it. So before each message that
goes through the strategy ranks meet (`Engine.come_to_message`). Those that go past it (`torch.distributed`, groups
of the user's own) need ranks that use the same layers before them.

Outside of forward and backward, users read and write parameters, and run collectives in between of which the engine is
not told: their own, and Lightning's before each batch. A rank that waited for a chunk which another still has would
wait for ever there. So whether ranks meet at a read rests on the calls alone, which are the same on all: they do at the
first use of a chunk, whoever has it, and then all keep it, as far as the plan has room (`Residency.acquire_outside`).
That costs a message for each chunk, also where nothing is missing.

A backward may go through several engines (under Fabric, of several modules), on each rank in another order where ranks
branch. One that waited in one engine would serve none of the others. So inside of such a backward messages of all of
them go one way (`JointMessages`): with each comes how far this rank is with every engine, and each message is served
for every engine, in one order.

The exchanges of parallel patterns come between all that: see [Note: patterns between collectives].
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import Protocol

from lightning_elixir.core.comm import Comm
from lightning_elixir.core.waits import Call
from lightning_elixir.plan.mesh import AXES, Mesh


class Meeting(enum.IntEnum):
    """Points that every rank passes in the same order. The first four are none: one is elsewhere whose message is
    another engine's; at an exchange of a pattern only its peers meet; at the others ranks tell how far their gradients
    are, and which chunks they need."""

    ELSEWHERE = -3
    PATTERN = -2
    READY = -1
    WANT = 0
    FORWARD_END = 1
    BACKWARD_END = 2
    STEP = 3
    STATE = 4
    REPLAN = 5
    GRADIENTS = 6
    BUFFERS = 7
    STATE_DICT = 8
    FULL_STATE_DICT = 9
    LOAD_STATE_DICT = 10
    FULL_PARAMETERS = 11
    WRITE_PARAMETERS = 12
    FULL_GRADS = 13
    GRAD_NORM = 14
    CLIP_GRAD_NORM = 15
    OPTIMIZER_STATE_DICT = 16
    LOAD_OPTIMIZER_STATE_DICT = 17
    SHARDED_STATE_DICT = 18
    SHARDED_OPTIMIZER_STATE = 19
    LOAD_CHECKPOINT = 20
    LOAD_OPTIMIZER_CHECKPOINT = 21
    DISSOLVE = 22
    OVERFLOWS = 23
    MEMORY_LIMIT = 24
    OPTIMIZER_MODE = 25
    OPTIMIZER_STATE = 26
    MESSAGE = 27
    NO_MORE_FORWARDS = 28
    BETWEEN_FORWARDS = 29

    @property
    def call(self) -> Call:
        """In words."""
        return _CALLS[self]

    @property
    def has_user_code(self) -> bool:
        """Whether the user's code runs before all ranks go on."""
        return self in (Meeting.FULL_PARAMETERS, Meeting.WRITE_PARAMETERS)

    @property
    def is_of_states(self) -> bool:
        """Whether what updates read may be written there, or what they write moved."""
        return self not in _NOT_OF_STATES


_FAMILY = "the engine"


def _call(words: str, *, is_routine: bool = False, cure: str = "", is_of_batch: bool = False) -> Call:
    return Call(words, _FAMILY, is_routine, cure, is_of_batch)


def _of_batch(words: str) -> Call:
    return _call(words, is_routine=True, is_of_batch=True)


_READ = _call("a read of a parameter", cure="read parameters")  # which any forward or meeting of the others serves
_CALLS = {
    Meeting.ELSEWHERE: _of_batch("a backward"),
    Meeting.PATTERN: _of_batch("an exchange of a parallel pattern"),
    Meeting.READY: _of_batch("a backward"),
    Meeting.WANT: _of_batch("a forward or a backward"),
    Meeting.FORWARD_END: _of_batch("the end of a forward"),
    Meeting.BACKWARD_END: _of_batch("the end of a backward"),
    Meeting.STEP: _of_batch("the optimizer's step()"),
    Meeting.BUFFERS: _of_batch("the beginning of a forward, which shares running statistics"),
    Meeting.STATE: _call("a call that needs whole states", cure="make it"),
    Meeting.REPLAN: _call("replan()"),
    Meeting.OPTIMIZER_MODE: _call("train() or eval() of the optimizer"),
    Meeting.OPTIMIZER_STATE: _call("a read of the optimizer's `state`", cure="read it"),
    Meeting.GRADIENTS: _call("a read or write of `.grad`", cure="read and write `.grad`"),
    Meeting.STATE_DICT: _call("state_dict()"),
    Meeting.FULL_STATE_DICT: _call("full_state_dict() or lightning_module_state_dict()"),
    Meeting.LOAD_STATE_DICT: _call("load_state_dict()"),
    Meeting.FULL_PARAMETERS: _call("full_parameters()"),
    Meeting.WRITE_PARAMETERS: _call("full_parameters(modify=True)"),
    Meeting.FULL_GRADS: _call("full_grads()"),
    Meeting.GRAD_NORM: _call("grad_norm()"),
    Meeting.CLIP_GRAD_NORM: _call("clip_grad_norm_()"),
    Meeting.OVERFLOWS: _of_batch("the look for overflows, before the optimizer's step()"),
    Meeting.OPTIMIZER_STATE_DICT: _call("the optimizer's state_dict()"),
    Meeting.LOAD_OPTIMIZER_STATE_DICT: _call("the optimizer's load_state_dict()"),
    Meeting.SHARDED_STATE_DICT: _call("lightning_module_state_dict() or save_checkpoint()"),
    Meeting.SHARDED_OPTIMIZER_STATE: _call("optimizer_state() or save_checkpoint()"),
    Meeting.LOAD_CHECKPOINT: _call("load_checkpoint()"),
    Meeting.LOAD_OPTIMIZER_CHECKPOINT: _call("load_checkpoint(), of the optimizer"),
    Meeting.MEMORY_LIMIT: _call("set_memory_limit()"),
    Meeting.MESSAGE: _of_batch("a message between all ranks"),
    Meeting.NO_MORE_FORWARDS: _call("the end of an evaluation", is_routine=True),
    Meeting.BETWEEN_FORWARDS: _call("a message between two batches of an evaluation", is_routine=True),
    Meeting.DISSOLVE: _call("the end of an engine, whose parameters become plain ones", is_routine=True),
}
_NOT_OF_STATES = {
    Meeting.STEP,
    Meeting.GRADIENTS,
    Meeting.FULL_GRADS,
    Meeting.GRAD_NORM,
    Meeting.CLIP_GRAD_NORM,
    Meeting.OVERFLOWS,
    Meeting.MESSAGE,
    Meeting.NO_MORE_FORWARDS,
    Meeting.BETWEEN_FORWARDS,
}
_ENDS = {Meeting.FORWARD_END, Meeting.NO_MORE_FORWARDS, Meeting.BETWEEN_FORWARDS}
"""Of a forward: some ranks have more of them than others, in an evaluation."""


class RankWork(Protocol):
    """What a rank does for the others while they need it."""

    @property
    def is_computing(self) -> bool:
        """Whether a forward or a backward runs."""

    @property
    def num_ready(self) -> int:
        """How many chunks, in the common order, this rank could reduce."""

    def join(self, ids: Sequence[int], mine: Collection[int]) -> None:
        """Take part in the gathering of `ids`, in this order, keeping those in `mine`."""

    def reduce_until(self, count: int) -> None:
        """Reduce, in the common order, up to that many chunks."""


class Agreement:
    """The control messages of one engine.

    Args:
        comm: The ranks.
        work: What this rank does for them.
        mesh: Which of them are peers of each other in patterns; None: none are.
    """

    def __init__(self, comm: Comm, work: RankWork, mesh: Mesh | None = None) -> None:
        self._comm = comm
        self._work = work
        self._mesh = mesh or Mesh(comm.world_size)
        self._joint: JointMessages | None = None

    def want(self, ids: Sequence[int], candidates: Sequence[int]) -> tuple[int, ...]:
        """Gather `ids`, with all ranks' help.

        Args:
            ids: Chunks that this rank needs now.
            candidates: Chunks that it would like to prefetch, in order.

        Returns:
            Chunks that every rank would like to prefetch, in the same order everywhere: the caller gathers them next.

        Raises:
            PeerLostError: If a peer is gone.
        """
        call = Meeting.WANT.call if self._work.is_computing else _READ
        rows = self._exchange([Meeting.WANT, self._work.num_ready, len(ids), *ids, *candidates], call)
        self._serve(rows, ids)
        if any(row[0] != Meeting.WANT for row in rows):
            return ()
        wished = [row[3 + row[2] :] for row in rows]
        common = set(wished[0]).intersection(*wished[1:])
        return tuple(i for i in wished[0] if i in common)

    def announce_ready(self) -> None:
        """Further gradients are complete: reduce those that all ranks have."""
        self._serve(self._exchange([Meeting.READY, self._work.num_ready], Meeting.READY.call), ())

    def meet(self, meeting: Meeting, payload: Sequence[int] = (), call: Call | None = None) -> list[list[int]]:
        """Wait here, serving the others, until all ranks have come to `meeting`.

        Args:
            call: What comes to it, in words; None: what always does.

        Returns:
            Every rank's payload, in rank order.

        Raises:
            DivergenceError: If a rank has come to another meeting.
            PeerLostError: If one is gone.
        """
        call = meeting.call if call is None else call._replace(family=_FAMILY, is_of_batch=meeting.call.is_of_batch)
        while True:
            rows = self._exchange([meeting, *payload], call)
            kinds = {Meeting(row[0]) for row in rows}
            if kinds == {meeting} or (meeting is Meeting.FORWARD_END and kinds <= _ENDS):
                return [row[1:] for row in rows]
            if not self._goes_on(rows):
                raise self._wire.diverged(call)
            self._serve(rows, ())

    def meet_along(self, axis: int, peers: Sequence[int], message: Sequence[int]) -> list[list[int]]:
        """Wait here, serving the others, until all peers along an axis have come to an exchange of a pattern.

        Args:
            axis: Its number in `AXES`.
            peers: This rank and its peers, in the order of their coordinates.
            message: For them.

        Returns:
            The message of each of them.

        Raises:
            DivergenceError: If no rank can go on.
            PeerLostError: If one is gone.
        """
        call = Meeting.PATTERN.call
        while True:
            rows = self._exchange([Meeting.PATTERN, self._work.num_ready, axis, *message], call)
            self._serve(rows, ())
            if all(rows[rank][0] == Meeting.PATTERN and rows[rank][2] == axis for rank in peers):
                return [rows[rank][3:] for rank in peers]
            if not self._goes_on(rows):
                raise self._wire.diverged(call)

    @property
    def _wire(self) -> Comm:
        """What messages go over."""
        return self._comm if self._joint is None else self._joint.comm

    def _exchange(self, message: Sequence[int], call: Call) -> list[list[int]]:
        if self._joint is None:
            return self._comm.exchange(message, call)
        return self._joint.exchange(self, message, call)

    def _goes_on(self, rows: Sequence[Sequence[int]]) -> bool:
        """Whether some rank goes on after this message, though the ranks have not come to one point."""
        if self._joint is None:
            return self._one_goes_on(rows)
        return any(agreement._one_goes_on(theirs) for agreement, theirs in self._joint.last)

    def _one_goes_on(self, rows: Sequence[Sequence[int]]) -> bool:
        """Whether some rank goes on in this engine: it is served, it and all its peers have come to an exchange of
        theirs, or the others have no more forwards."""
        if any(row[0] in (Meeting.WANT, Meeting.READY) for row in rows):
            return True
        kinds = {row[0] for row in rows}
        if Meeting.FORWARD_END in kinds and kinds <= _ENDS:
            return True
        waiting = {rank: row[2] for rank, row in enumerate(rows) if row[0] == Meeting.PATTERN}
        return any(
            all(waiting.get(rank) == number for rank in group)
            for number, axis in enumerate(AXES)
            if number in waiting.values()
            for group in self._mesh.along(axis)
        )

    def _serve(self, rows: Sequence[Sequence[int]], mine: Collection[int]) -> None:
        if self._joint is None:
            self._serve_one(rows, mine)
            return
        for agreement, theirs in self._joint.last:  # the same order on all ranks, since each begins collectives
            if any(row[0] != Meeting.ELSEWHERE for row in theirs):
                agreement._serve_one(theirs, mine if agreement is self else ())

    def _serve_one(self, rows: Sequence[Sequence[int]], mine: Collection[int]) -> None:
        wanted = {i for row in rows if row[0] == Meeting.WANT for i in row[3 : 3 + row[2]]}
        if wanted:
            self._work.join(sorted(wanted), mine)
        ready = [row[1] if row[0] <= Meeting.WANT else 0 for row in rows if row[0] != Meeting.BACKWARD_END]
        if ready:
            self._work.reduce_until(min(ready))


class JointMessages:
    """Of engines through which one backward goes: see [Note: agreed collectives].

    Args:
        agreements: Of the engines, the same on every rank.
    """

    def __init__(self, agreements: Sequence[Agreement]) -> None:
        self._agreements = list(agreements)
        self.last: list[tuple[Agreement, list[list[int]]]] = []
        """What each engine has of the last message: a row of each rank."""

    @property
    def comm(self) -> Comm:
        """What they go over."""
        return self._agreements[0]._comm

    def begin(self) -> None:
        """From here on messages go together. Where they do already, nothing changes."""
        if len(self._agreements) > 1 and all(each._joint is None for each in self._agreements):
            for each in self._agreements:
                each._joint = self

    def end(self) -> None:
        """Each engine sends its own again."""
        for each in self._agreements:
            if each._joint is self:
                each._joint = None

    def exchange(self, sender: Agreement, message: Sequence[int], call: Call) -> list[list[int]]:
        """Send a message of one engine.

        Returns:
            A row of each rank, as that engine has it.

        Raises:
            DivergenceError: The backward of another rank goes through other engines.
        """
        count, number = len(self._agreements), self._agreements.index(sender)
        ready = [each._work.num_ready for each in self._agreements]
        # Messages of one engine alone, and of other engines together, are told apart by their family.
        rows = self.comm.exchange([number, *ready, *message], call._replace(family=f"{count} engines together"))
        self.last = [
            (each, [row[1 + count :] if row[0] == i else [Meeting.ELSEWHERE, row[1 + i]] for row in rows])
            for i, each in enumerate(self._agreements)
        ]
        return self.last[number][1]
