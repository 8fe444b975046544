"""Which chunk to evict and which to prefetch: a next-use index over a recorded trace."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

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
        # Where a chunk differs from the one touched just before: all that prefetching has to look at.
        self._turns: list[tuple[int, int]] = []
        last: tuple[int, ...] = ()
        for position, ids in enumerate(self.accesses):
            if ids != last:
                self._turns.extend((position, chunk_id) for chunk_id in ids if chunk_id not in last)
                last = ids

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

    def find(self, ids: tuple[int, ...], position: int, window: int) -> int | None:
        """Position of the first access of exactly `ids` among `window` accesses from `position` on."""
        for at in range(position, min(position + window, len(self.accesses))):
            if self.accesses[at] == ids:
                return at
        return None

    def same_ahead_until(self, position: int) -> int:
        """Where `upcoming` begins to give less than it gives at `position`."""
        index = bisect_left(self._turns, (position, -1))
        return self._turns[index][0] + 1 if index < len(self._turns) else len(self.accesses)

    def upcoming(self, position: int) -> Iterator[tuple[int, int]]:
        """(position, chunk id) of the accesses from `position` to the end of the trace, repeats left out."""
        start = bisect_left(self._turns, (position, -1))
        seen: set[int] = set()
        for index in range(start, len(self._turns)):
            at, chunk_id = self._turns[index]
            if chunk_id not in seen:
                seen.add(chunk_id)
                yield at, chunk_id
