"""Typed errors. Every message says what, which, how much, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class ElixirError(RuntimeError):
    """Base of the errors that lightning_elixir raises on purpose."""


class PlanError(ElixirError, ValueError):
    """A plan, an option or a model that cannot be used as given."""


class OptionError(PlanError, TypeError):
    """There is no option of that name."""


class CapacityError(ElixirError):
    """Memory (GPU, host or disk) cannot hold what the plan needs.

    Args:
        message: For people.
        resource: What there is too little of, "GPU" or "host", where that is known.
        lacking_bytes: How much too little, where that is known.
    """

    def __init__(self, message: str, *, resource: str | None = None, lacking_bytes: int | None = None) -> None:
        super().__init__(message)
        self.resource = resource
        self.lacking_bytes = lacking_bytes


class StateError(ElixirError):
    """A call that the engine's current phase does not allow."""


class StorageError(ElixirError):
    """Reading or writing a shard failed.

    Args:
        message: For people.
        path: The file or folder.
        offset: Where in the file, in bytes, if that is known.
        nbytes: How much was to be moved there.
    """

    def __init__(
        self, message: str, *, path: Path | None = None, offset: int | None = None, nbytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset
        self.nbytes = nbytes


class DivergenceError(ElixirError):
    """Ranks reached different points of the program and cannot go on together."""


class PeerLostError(DivergenceError):
    """Another rank has failed, or its process has ended, so that this one cannot go on.

    Args:
        message: For people.
        ranks: Those that caused it, as far as that is known.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
