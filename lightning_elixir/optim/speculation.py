"""Updates that begin inside backward although what they depend on is only known at its end.

[Note: exact speculation] A norm to clip to, or a loss scale, decides about all gradients together. Most steps clip
nothing and overflow nowhere, so an update is begun as if that were known of this one: not in place, but into spare
states, so that nothing is lost. The step then describes the update that it wants. Where that is the one which has begun
(the same factor, settings, step counts, gradients and memory), spares and states change roles, and no bit tells when it
ran; everywhere else the begun one is dropped, and the wanted one runs from the old states. So nobody has to promise
anything about what happens between backward and step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_elixir.core.worker import Task
from lightning_elixir.optim.execution import UpdateRecord
from lightning_elixir.optim.updates import FlatUpdate

_STEPS_SEEN = 8
_MOST_FAILED = 3
_STEPS_OFF = 64


class Caution:
    """Stops speculating for some time where it fails too often: every failure costs an update that nobody needed."""

    def __init__(self) -> None:
        self._has_failed: deque[bool] = deque(maxlen=_STEPS_SEEN)
        self._num_off = 0

    @property
    def is_allowed(self) -> bool:
        """Whether updates of the coming step may begin early."""
        return not self._num_off

    def note(self, *, has_failed: bool) -> None:
        """One more step is over."""
        if self._num_off:
            self._num_off -= 1
            return
        self._has_failed.append(has_failed)
        if sum(self._has_failed) >= _MOST_FAILED:
            self._has_failed.clear()
            self._num_off = _STEPS_OFF


@dataclass(frozen=True)
class Begun:
    """One chunk's update into spare states."""

    updates: Sequence[FlatUpdate]
    task: Task
    record: UpdateRecord


class Speculation:
    """The updates that have begun and that no step has taken up."""

    def __init__(self) -> None:
        self._begun: dict[int, Begun] = {}
        self._caution = Caution()
        self._has_withdrawn = False

    def __len__(self) -> int:
        return len(self._begun)

    @property
    def is_allowed(self) -> bool:
        """See `Caution`."""
        return self._caution.is_allowed

    def add(self, chunk_id: int, begun: Begun) -> None:
        """An update has begun."""
        self._begun[chunk_id] = begun

    def has(self, chunk_id: int) -> bool:
        return chunk_id in self._begun

    def take(self, chunk_id: int, wanted: Sequence[FlatUpdate]) -> Begun | None:
        """What has begun for a chunk, if that is what the step wants; it stays with the others if not."""
        begun = self._begun[chunk_id]
        if len(begun.updates) != len(wanted):
            return None
        if not all(a.is_same_as(b) for a, b in zip(begun.updates, wanted, strict=True)):
            return None
        return self._begun.pop(chunk_id)

    def withdraw(self, chunk_ids: Collection[int] | None = None) -> None:
        """Drop what has begun for these chunks (None: for all): what waits does not begin, what runs is waited for."""
        ids = list(self._begun) if chunk_ids is None else [i for i in chunk_ids if i in self._begun]
        gone = [self._begun.pop(i) for i in ids]
        for begun in gone:
            begun.task.cancel()
        for begun in gone:
            begun.task.wait_quietly()
        self._has_withdrawn |= bool(gone)

    def end_step(self, *, is_as_assumed: bool) -> bool:
        """A step is over.

        Args:
            is_as_assumed: As far as all ranks know it, so that they pause together. Where they do not, since something
                happened to one of them alone, nothing depends on it: no collective comes of an early update.

        Returns:
            Whether something that had begun since the step before was dropped.
        """
        has_withdrawn, self._has_withdrawn = self._has_withdrawn, False
        self._caution.note(has_failed=has_withdrawn or not is_as_assumed)
        return has_withdrawn
