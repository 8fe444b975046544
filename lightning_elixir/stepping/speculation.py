"""Updates that begin inside backward although what they depend on is only known at its end.

[Note: exact speculation] A norm to clip to, or a loss scale, decides about all gradients together. Most steps clip
nothing and overflow nowhere, so an update is begun as if that were known of this one: not in place, but into spare
states, so that nothing is lost. The step then describes its update. Where that is the one which has begun
(the same factor, settings, step counts, gradients and memory), spares and states change roles, and no bit tells when it
ran; everywhere else the begun one is dropped, and the step's runs from the old states. So no promise is needed of
what happens between backward and step.

With several ranks, norm and overflow are the same on all of them, and so is what they do about it. Where something
happened to one rank alone (a write, a failed thread), that rank alone runs its updates again: they are of its own
shards, with the same bits, and no collective depends on when they ran.

Spare states are a second set of master and moments, and memory for new values: 14 bytes a parameter more, for chunks
with a master on the host. The plan says which of these have them (`ChunkSpec.has_spare_states`), all, some or none; the
updates of others begin in the step, and the next forward waits for them. Whatever changes gradients or masters before
the step says so to `Reducer.before_change` (a further backward, a late gradient, `zero_grad`, a failed backward, a
user's write), and so do state dicts and moves; norms and gradients can be read without. Dropping cancels what has not
begun and waits for what runs; where a signal ends that waiting, the next drop goes on with it. An update that is seen
to have failed before its step runs again; one that fails later ends the run, as any update does. A chunk of which not
all parameters are updated, or not all have states yet, waits for the step. After three failed steps of eight, `Caution`
pauses for 64.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_elixir.core.worker import Task
from lightning_elixir.optim.execution import UpdateRecord
from lightning_elixir.optim.updates import FlatUpdate
from lightning_elixir.stepping.cases import Way

_STEPS_SEEN = 8
_MOST_FAILED = 3
_STEPS_OFF = 64


class Caution:
    """Stops speculating for some time where it fails too often: every failure costs an update for nothing."""

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
    """One chunk's update that has begun inside backward."""

    way: Way
    updates: Sequence[FlatUpdate]
    task: Task
    record: UpdateRecord
    """Of this update alone, until a step takes it up."""


class Speculation:
    """The updates that have begun into spare states, and that no step has taken up."""

    def __init__(self) -> None:
        self._begun: dict[int, Begun] = {}
        self._dropped: list[Begun] = []  # and not known to be over yet: they may read gradients, and write to spares
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

    def is_right(self, chunk_id: int, wanted: Sequence[FlatUpdate]) -> bool:
        """Whether what has begun for a chunk is the step's update, and has not failed as far as can be seen."""
        begun = self._begun.get(chunk_id)
        if begun is None or begun.task.error is not None or len(begun.updates) != len(wanted):
            return False
        return all(a.is_same_as(b) for a, b in zip(begun.updates, wanted, strict=True))

    def take(self) -> dict[int, Begun]:
        """All that has begun and was not dropped, by chunk id: it is the step's from now on."""
        begun, self._begun = self._begun, {}
        return begun

    def withdraw(self, chunk_ids: Collection[int] | None = None, *, but: Collection[int] = ()) -> None:
        """Drop what has begun for these chunks (None: for all): what waits does not begin, what runs is waited for.
        Where a signal ends the waiting, the next call goes on with it."""
        ids = self._begun if chunk_ids is None else chunk_ids
        for chunk_id in [i for i in ids if i in self._begun and i not in but]:
            self._has_withdrawn = True
            self._dropped.append(self._begun[chunk_id])
            del self._begun[chunk_id]
        for begun in self._dropped:
            begun.task.cancel()
        while self._dropped:
            self._dropped[-1].task.join()
            self._dropped.pop()

    def end_step(self, *, is_as_assumed: bool) -> bool:
        """A step is over.

        Args:
            is_as_assumed: As far as all ranks know it, so that they pause together.

        Returns:
            Whether something that had begun since the step before was dropped.
        """
        has_withdrawn, self._has_withdrawn = self._has_withdrawn, False
        self._caution.note(has_failed=has_withdrawn or not is_as_assumed)
        return has_withdrawn
