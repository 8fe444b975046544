"""The traces of iterations: which kind is open, what it touches, and what is known of it."""

from __future__ import annotations

from lightning_elixir.plan.policy import CachePolicy
from lightning_elixir.plan.types import AccessTrace, Acquire, Drop

# Events that one recorded iteration may have; a program that never comes to a step would fill the memory.
_MAX_EVENTS = 200_000


class Traces:
    """Traces by kind of iteration ("train", "eval"), and the one that is being recorded."""

    def __init__(self) -> None:
        self.kind: str | None = None
        """Of the open iteration."""
        self.is_recording = False
        self.by_kind: dict[str, AccessTrace] = {}
        self._policies: dict[str, CachePolicy] = {}
        self._outdated_kinds: set[str] = set()
        self._recorded: list[Acquire | Drop] = []
        self._misses_at_start = 0

    def begin(self, kind: str, misses: int, *, record: bool = False) -> CachePolicy | None:
        """Open an iteration; none may be open.

        Args:
            misses: Accesses that no trace foresaw, so far.
            record: Record it even if its kind has a trace.

        Returns:
            What is known of its accesses.
        """
        self.kind = kind
        self._recorded = []
        self.is_recording = record or kind not in self._policies or kind in self._outdated_kinds
        self._misses_at_start = misses
        return self._policies.get(kind)

    def record(self, event: Acquire | Drop) -> None:
        self._recorded.append(event)

    def end(self, misses: int) -> AccessTrace | None:
        """Close the open iteration.

        Args:
            misses: As in `begin`.

        Returns:
            The trace that it followed or made; None if it departed from the known one.
        """
        kind, self.kind = self.kind, None
        recorded, self._recorded = self._recorded, []
        is_recording, self.is_recording = self.is_recording, False
        if kind is None:
            return None
        if is_recording and len(recorded) < _MAX_EVENTS:
            self.by_kind[kind] = AccessTrace(tuple(recorded))
            self._policies[kind] = CachePolicy(self.by_kind[kind])
            self._outdated_kinds.discard(kind)
        elif misses > self._misses_at_start:
            self._outdated_kinds.add(kind)  # the next one is recorded from its start
            return None
        return self.by_kind.get(kind)

    def abandon(self) -> None:
        """Forget the open iteration: it was interrupted."""
        self.kind = None
        self._recorded = []
        self.is_recording = False

    def outdate(self) -> None:
        """Iterations are going to have other accesses than those that are known: the next of each kind is recorded."""
        self._outdated_kinds.update(self.by_kind)

    def forget_misses(self) -> None:
        """The count of misses starts again from 0."""
        self._misses_at_start = 0
