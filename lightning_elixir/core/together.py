"""What ranks do each by itself, where an error on one of them must be an error on all.

Whatever ranks can do by themselves is kept apart from collectives (building, loading and saving checkpoints): an error
there is raised by all at a meeting point, and no rank has to leave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lightning_elixir.core.comm import Comm
from lightning_elixir.core.waits import SETUP, Call
from lightning_elixir.errors import CapacityError, ElixirError, PlanError, StorageError

T = TypeVar("T")


def run_together(comm: Comm, action: Callable[[], T], call: Call = SETUP) -> T:
    """Run `action` on every rank; where it raises on one, every rank raises, so that none is left waiting.

    Args:
        action: What this rank does by itself: no collectives, or `hear` before each of them.
        call: Where that is, for the error of ranks that differ.

    Raises:
        StorageError: Another rank failed with one; the message names the rank, and holds its error.
        CapacityError: Likewise.
        PlanError: Another rank failed otherwise. This rank's own error is raised as it is.
    """
    try:
        result, error = action(), None
    except Exception as exception:  # whatever it is, the others must hear of it
        result, error = None, exception
    raise_together(comm, error, call)
    return result  # type: ignore[return-value]


def raise_together(comm: Comm, error: BaseException | None, call: Call = SETUP) -> None:
    """Raise where any rank comes with an error: its own on that rank, elsewhere what `run_together` says."""
    heard = None if error is None else _heard_in(error)
    if error is not None and heard is not None:
        vars(heard).pop(_IS_HEARD)
        raise error
    if not any(row[0] for row in comm.exchange([int(error is not None)], call)):
        return
    by_rank = comm.exchange_objects(None if error is None else _as_told(comm.rank, error))
    if error is not None:
        raise error
    raise next(told for told in by_rank if told is not None)


def hear(comm: Comm) -> None:
    """To be called, inside of `run_together`'s action, before all ranks come to a collective that cannot be left: if
    another one has failed on its way there, raise that, as `run_together` would, and as it then does."""
    try:
        raise_together(comm, None)
    except (StorageError, CapacityError, PlanError) as error:
        vars(error)[_IS_HEARD] = True
        raise


def is_heard(error: BaseException) -> bool:
    """Whether it is another rank's, which all have been told of, or was raised for such a one."""
    return _heard_in(error) is not None


_IS_HEARD = "_is_heard"


def _heard_in(error: BaseException) -> BaseException | None:
    found: BaseException | None = error
    while found is not None and _IS_HEARD not in vars(found):
        found = found.__cause__ or found.__context__
    return found


def _as_told(rank: int, error: BaseException) -> ElixirError:
    """What the others raise: of the same kind, where programs may react to that, as all ranks then must."""
    text = f"rank {rank} failed: {type(error).__name__}: {error}"
    if isinstance(error, StorageError):
        return StorageError(text, path=error.path)
    if isinstance(error, CapacityError):
        return CapacityError(text, resource=error.resource, lacking_bytes=error.lacking_bytes)
    return PlanError(text)
