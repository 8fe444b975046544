"""How a chunk's new values come to its parameters: one table of all cases.

[Note: ways of an update] An update makes master and moments, and beside them the values in the compute dtype that
forward reads. Which memory it writes these to, and what brings them from there to the parameters in the step, depends
on when it begins, and on where gradients and parameters lie. The table decides; the scheduler does as it says. An
update that begins inside backward must leave the parameters alone until the step, since backward may read them again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Start(enum.Enum):
    """When the update of a chunk begins."""

    IN_STEP = "in its step"
    EARLY = "inside backward, over the old states: the step must follow"
    AHEAD = "inside backward, into spare states: it can be taken back"


class Params(enum.Enum):
    """Where the parameters of this rank's shard lie."""

    DEVICE = "on the compute device"
    HOST = "in host memory"
    HOST_SLICE = "in host memory, within the whole chunk"
    DISK = "on NVMe"


class Grads(enum.Enum):
    """Where the gradients of this rank's shard lie."""

    LIKE_PARAMS = "in host memory of their own, as large as the parameters' and of their dtype"
    OVER_PARAMS = "in the memory of the parameters, which are lost"
    ELSEWHERE = "in memory that new values do not fit into, or there are no new values apart from the update's own"


class Values(enum.Enum):
    """Memory that the update writes new values to, in the compute dtype."""

    GRADS = "over the gradients"
    SPARE = "spare memory"
    PARAMS = "over the parameters, on the host or on a disk"
    DEVICE_PARAMS = "over the parameters on the device: the update sends them there itself"
    MASTER = "none: they are in the master alone"


class Delivery(enum.Enum):
    """What brings new values to the parameters, in the step."""

    NONE = "they are there"
    EXCHANGE = "their memory and that of the parameters change roles"
    UPLOAD = "a copy of the updated elements to the device, after the last read there"
    CAST = "a copy of all elements, cast where the dtypes differ"


@dataclass(frozen=True)
class Case:
    """One chunk's update, as far as its way depends on it."""

    start: Start
    grads: Grads
    params: Params
    is_streamed: bool
    """The device does the arithmetic."""
    is_whole: bool
    """Every element of the shard gets a new value, and no gradient of another optimizer is in the chunk."""


@dataclass(frozen=True)
class Way:
    """What happens to new values."""

    values: Values
    delivery: Delivery
    is_after_backward: bool = False
    """Whether a thread writes host memory that backward may read: it has to wait for the end of backward."""


def way_of(case: Case) -> Way | None:
    """The way of an update; None: it cannot begin at that time. What begins in the step always can."""
    match case.start, case.grads, case.params:
        case Start.AHEAD, _, _ if not case.is_whole:
            return None  # spares would lack what is not updated
        case Start.AHEAD, _, Params.DEVICE:
            return Way(Values.SPARE, Delivery.UPLOAD)
        case Start.AHEAD, _, Params.HOST:
            return Way(Values.SPARE, Delivery.EXCHANGE)
        case Start.AHEAD, _, Params.HOST_SLICE:
            return Way(Values.SPARE, Delivery.CAST, is_after_backward=True)
        case Start.AHEAD, _, _:
            return None
        # Streamed in its step, an update writes to the parameters on the device by itself.
        case _, Grads.LIKE_PARAMS, Params.DEVICE if not (case.is_streamed and case.start is Start.IN_STEP):
            return Way(Values.GRADS, Delivery.UPLOAD)
        case _, Grads.LIKE_PARAMS, Params.HOST if case.is_whole:
            return Way(Values.GRADS, Delivery.EXCHANGE)
        case Start.EARLY, _, _:
            return None
        case _, Grads.OVER_PARAMS, _ if case.is_whole:
            return Way(Values.GRADS, Delivery.NONE)
        case _, Grads.OVER_PARAMS, _:
            return Way(Values.MASTER, Delivery.CAST, is_after_backward=True)
        case _, _, Params.DEVICE:
            return Way(Values.DEVICE_PARAMS, Delivery.NONE)
        case _, _, Params.DISK:
            return Way(Values.PARAMS, Delivery.NONE)
        case _:
            return Way(Values.PARAMS, Delivery.NONE, is_after_backward=True)
