"""What an engine reads of, and calls on, the optimizers over its chunks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Protocol

from lightning_elixir.optim.scaling import LossScaler
from lightning_elixir.runtime.chunk_optimizers import ChunkOptimizers
from lightning_elixir.runtime.gradients import Change


class PendingChanges(Protocol):
    """What an optimizer will do to gradients in its step."""

    @property
    def scaler(self) -> LossScaler:
        """The loss scale that gradients come with."""

    def follow_scale(self, before: float) -> None:
        """The loss scale was `before`, and is another one now: gradients that are there get it."""

    def change_of(self, chunk_id: int, index: int) -> Change | None:
        """That to the gradient of a member, as far as users are to see it; None: nothing, or it is not its own."""

    def apply(self) -> None:
        """Do it now, to all its gradients."""

    def finish(self) -> None:
        """Do it now, before further gradients are added."""

    def forget(self) -> None:
        """Do it no more, since the gradients that it was for are dropped."""


class AttachedOptimizer(Protocol):
    """An optimizer over an engine's chunks."""

    @property
    def states(self) -> ChunkOptimizers:
        """What moves with the chunks."""

    @property
    def gradients(self) -> PendingChanges:
        """Between backward and step."""

    def prepare_move(self) -> None:
        """States are going to move; nothing has moved yet, and nothing can stop the move any more."""

    def finish_move(self) -> None:
        """Everything is in its new place."""


class AttachedOptimizers:
    """Those of one engine, in the order in which they were made. Keeps none of them alive: states go with theirs."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[AttachedOptimizer]] = []

    def add(self, optimizer: AttachedOptimizer) -> None:
        """One more."""
        self._references = [known for known in self._references if known() is not None]
        self._references.append(weakref.ref(optimizer))

    def __iter__(self) -> Iterator[AttachedOptimizer]:
        return iter([optimizer for known in self._references if (optimizer := known()) is not None])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def states(self) -> list[ChunkOptimizers]:
        """Of all of them."""
        return [optimizer.states for optimizer in self]
