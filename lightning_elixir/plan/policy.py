"""Which chunk to evict and which to prefetch: a next-use index over a recorded trace."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence

from lightning_elixir.plan.types import AccessTrace


class CachePolicy:
    """Immutable next-use index: the victim is the chunk whose next use is furthest (Belady 1966, "A study of
    replacement algorithms for a virtual-storage computer").

    The trace is taken as cyclic: after its last access comes its first.

    Args:
        trace: What one iteration touches. Positions count its `Acquire` events.
    """

    def __init__(self, trace: AccessTrace) -> None:
        self.accesses: tuple[tuple[int, ...], ...] = tuple(e.ids for e in trace.acquires())
        uses: dict[int, list[int]] = {}
        for position, ids in enumerate(self.accesses):
            for chunk_id in ids:
                uses.setdefault(chunk_id, []).append(position)
        self._uses = uses
        self._same_until: list[int] = [0] * len(self.accesses)  # the position behind a row of the same accesses
        for position in range(len(self.accesses) - 1, -1, -1):
            is_last = self.accesses[position] != self.access(position + 1)
            self._same_until[position] = position + 1 if is_last else self._same_until[position + 1]
        # Where a chunk differs from the one touched just before: all that prefetching has to look at.
        self._turns: list[tuple[int, int]] = []
        last: tuple[int, ...] = ()
        for position, ids in enumerate(self.accesses):
            if ids != last:
                self._turns.extend((position, chunk_id) for chunk_id in ids if chunk_id not in last)
                last = ids

    def turns_of(self, chunk_ids: Container[int]) -> Turns:
        """What is ahead of these chunks."""
        ends: list[int] = []
        last: tuple[int, ...] = ()
        for position, ids in enumerate(self.accesses):
            own = tuple([i for i in ids if i in chunk_ids])
            if own and own == last:
                ends[-1] = position
            elif own:
                ends.append(position)
                last = own
        return Turns([turn for turn in self._turns if turn[1] in chunk_ids], ends, len(self.accesses))

    def __len__(self) -> int:
        return len(self.accesses)

    def next_use(self, chunk_id: int, position: int) -> int:
        """Position of the first use at or after `position`; counted on past the end of the trace, and
        `2 * len(self)` for a chunk that the trace never uses."""
        uses = self._uses.get(chunk_id)
        if not uses:
            return 2 * len(self.accesses)
        index = bisect_left(uses, position)
        return uses[index] if index < len(uses) else uses[0] + len(self.accesses)

    def access(self, position: int) -> tuple[int, ...] | None:
        """The chunks of the access at `position`; None past the end."""
        return self.accesses[position] if position < len(self.accesses) else None

    def same_until(self, position: int, ids: tuple[int, ...]) -> int:
        """The first position from `position` on at which the access is another one than `ids`."""
        return self._same_until[position] if self.access(position) == ids else position

    def find(self, ids: tuple[int, ...], position: int, window: int) -> int | None:
        """Position of the first access of exactly `ids` among `window` accesses from `position` on."""
        for at in range(position, min(position + window, len(self.accesses))):
            if self.accesses[at] == ids:
                return at
        return None


class Turns:
    """Where a trace comes to a chunk that the access just before did not touch: all that prefetching has to look at.

    Args:
        turns: (position, chunk id), ascending.
        ends: Positions of the last of each number of accesses in a row that touch the same of these chunks, ascending.
        length: Accesses of the trace.
    """

    def __init__(self, turns: Sequence[tuple[int, int]], ends: Sequence[int], length: int) -> None:
        self._positions = [position for position, _ in turns]
        self._ids = [chunk_id for _, chunk_id in turns]
        self._ends, self._length = ends, length

    def first_absent(self, position: int, known: int, most: int, there: Container[int]) -> tuple[int, int, int]:
        """The first use of a chunk that is not `there`, of those from `position` on.

        Args:
            position: From where on.
            known: What is used before this position is there.
            most: As `upcoming` takes it.
            there: What is there.

        Returns:
            The chunk's id, the position, and the first one at which `upcoming` gives that chunk; past the use if there
            is none. Where no such chunk is used: -1, and past the end.
        """
        positions, ids = self._positions, self._ids
        for index in range(bisect_left(positions, max(position, known)), len(ids)):
            if ids[index] not in there:
                break
        else:
            return -1, self._length, self._length + 1
        before = set[int]()
        for earlier in range(index - 1, -1, -1):
            if positions[earlier] < position:
                break
            before.add(ids[earlier])
            if len(before) == most:
                return ids[index], positions[index], positions[earlier] + 1
        return ids[index], positions[index], position

    def same_uses_until(self, position: int) -> int:
        """The first position after `position` at which chunks that are not in use now may have other next uses."""
        index = bisect_left(self._ends, position)
        return self._ends[index] + 1 if index < len(self._ends) else self._length

    def upcoming(self, position: int, most: int) -> dict[int, int]:
        """The first `most` chunks from `position` to the end of the trace, in that order, with the position of each."""
        found: dict[int, int] = {}
        positions, ids = self._positions, self._ids
        for index in range(bisect_left(positions, position), len(ids)):
            chunk_id = ids[index]
            if chunk_id not in found:
                if len(found) == most:
                    break
                found[chunk_id] = positions[index]
        return found
