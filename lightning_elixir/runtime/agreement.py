"""How ranks keep their collectives in step.

[Note: agreed collectives] No rank issues a collective on its own. A rank that misses a chunk tells the others what it
wants, and every rank joins the all-gather of every chunk that any rank wants, keeping those it asked for. A rank
whose next gradients are complete tells how far it is in the common order, and what all have ready is reduced. A rank
that has come to the end of its forward, its backward, or to any other collective operation of the engine waits there
and serves the others until all have arrived (at the end of backward it has all gradients it will have, so it is ready
for any). So ranks may take different branches, route to different experts, or evict differently after such a
divergence; nothing can hang and no two ranks can mix different chunks in one collective. On GPUs it also matters that
nobody launches a collective whose peer may be waiting for this rank's host: a kernel that waits for a peer can block
the host in its next memory allocation (seen with two GPUs and a model that branches). What may not differ is the
sequence of meeting points: that is found out at once, on every rank, and is a `DivergenceError`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence

from lightning_elixir.core.comm import Comm
from lightning_elixir.errors import DivergenceError


class Meeting(enum.IntEnum):
    """Points that every rank passes in the same order. The first two are none: they tell how far the gradients are, and
    ask for chunks."""

    READY = -1
    WANT = 0
    FORWARD_END = 1
    BACKWARD_END = 2
    STEP = 3
    STATE = 4
    REPLAN = 5
    GRADIENTS = 6
    BUFFERS = 7


class Agreement:
    """The control messages of one engine.

    Args:
        comm: The ranks.
        join: Called with (ids, mine): take part in the gathering of `ids`, in this order, keeping those in `mine`.
        num_ready: How many chunks, in the common order, this rank could reduce.
        reduce_until: Called with a count: reduce, in the common order, up to that many chunks.
    """

    def __init__(
        self,
        comm: Comm,
        join: Callable[[Sequence[int], Collection[int]], None],
        num_ready: Callable[[], int],
        reduce_until: Callable[[int], None],
    ) -> None:
        self._comm = comm
        self._join = join
        self._num_ready = num_ready
        self._reduce_until = reduce_until

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
        rows = self._comm.exchange([Meeting.WANT, self._num_ready(), len(ids), *ids, *candidates])
        self._serve(rows, ids)
        if any(row[0] != Meeting.WANT for row in rows):
            return ()
        wished = [row[3 + row[2] :] for row in rows]
        common = set(wished[0]).intersection(*wished[1:])
        return tuple(i for i in wished[0] if i in common)

    def announce_ready(self) -> None:
        """Further gradients are complete: reduce those that all ranks have."""
        self._serve(self._comm.exchange([Meeting.READY, self._num_ready()]), ())

    def meet(self, meeting: Meeting, payload: Sequence[int] = ()) -> list[list[int]]:
        """Wait here, serving the others, until all ranks have come to `meeting`.

        Returns:
            Every rank's payload, in rank order.

        Raises:
            DivergenceError: If a rank has come to another meeting.
            PeerLostError: If one is gone.
        """
        while True:
            rows = self._comm.exchange([meeting, *payload])
            kinds = [Meeting(row[0]) for row in rows]
            if all(kind is meeting for kind in kinds):
                return [row[1:] for row in rows]
            if Meeting.WANT not in kinds and Meeting.READY not in kinds:
                where = ", ".join(f"rank {rank}: {kind.name}" for rank, kind in enumerate(kinds))
                raise DivergenceError(
                    f"the ranks are at different points of the program ({where}): every rank must call forward, "
                    "backward, step and the state dict functions equally often and in the same order"
                )
            self._serve(rows, ())

    def _serve(self, rows: Sequence[Sequence[int]], mine: Collection[int]) -> None:
        wanted = {i for row in rows if row[0] == Meeting.WANT for i in row[3 : 3 + row[2]]}
        if wanted:
            self._join(sorted(wanted), mine)
        ready = [row[1] if row[0] <= Meeting.WANT else 0 for row in rows if row[0] != Meeting.BACKWARD_END]
        if ready:
            self._reduce_until(min(ready))
