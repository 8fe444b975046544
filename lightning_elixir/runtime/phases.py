"""Which phase an engine is in, and since when: forward, backward, neither, or closed for good.

Ctrl-C and other signals come between the events of the engine (a module's begin and end, a gradient, a step), not
inside (Note: signals, `core/signals.py`): the forward or backward is aborted as by any exception, and training can go
on with the next one. Where a signal comes just when a forward or backward has ended, that end is not noted; the next
call sees that a signal was there, and aborts then (`Engine.leave_interrupted`), unless the forward still runs, whose
code has caught what the signal raised. An exception in the middle of a step,
or of a move to another placement, closes the engine for good (`Engine.give_up`): what it holds is not whole, so it must
not be trained on or saved.
"""

from __future__ import annotations

import enum

from lightning_elixir.core.signals import arm, disarm, num_interruptions
from lightning_elixir.errors import StateError
from lightning_elixir.runtime.turns import Held, Turn


class Phase(enum.Enum):
    """What the program is doing. Between forward and backward, and between steps, the engine is IDLE."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    CLOSED = "closed"


class Phases:
    """The phase of one engine.

    Args:
        turn: Is held from the begin of a forward or backward to its end.
    """

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._held: Held | None = None
        self._is_armed = False  # see `core.signals.arm`
        self._num_interruptions = 0  # when the forward or backward began
        self._why_closed = (
            "this ElixirModule was closed: its parameters have no values any more. Make the model anew, and go on"
            " from a checkpoint"
        )
        self.current = Phase.IDLE
        # By themselves, since an enum's members take long to look up.
        self.is_computing = False
        """Whether a forward or a backward runs."""
        self.is_backward = False
        """Whether a backward runs."""

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal has been handled since the forward or backward began, which may have ended it."""
        return num_interruptions() != self._num_interruptions

    def enter(self, phase: Phase, held: Held) -> None:
        """Begin a forward or a backward.

        Args:
            held: The turn, not taken yet.
        """
        if self._held is None:
            held.take()
            self._held = held
        self._num_interruptions = num_interruptions()
        self._is_armed = self._is_armed or arm()
        self._go_to(phase)

    def leave(self) -> None:
        """The forward or backward is over, if there is one."""
        if self._is_armed and disarm():
            self._is_armed = False
        if self.current is not Phase.CLOSED:  # nothing opens an engine again that has failed
            self._go_to(Phase.IDLE)
        held, self._held = self._held, None
        if held is not None:
            held.drop()

    def close(self, why: str | None = None) -> None:
        """For good.

        Args:
            why: What `check_open` says from here on; None: as before.
        """
        self._go_to(Phase.CLOSED)
        self._why_closed = why or self._why_closed

    def _go_to(self, phase: Phase) -> None:
        self.current = phase
        self.is_backward = phase is Phase.BACKWARD
        self.is_computing = self.is_backward or phase is Phase.FORWARD

    def check_open(self) -> None:
        """Raises `StateError` when it is closed."""
        if self.current is Phase.CLOSED:
            raise StateError(self._why_closed)

    def check_idle(self, what: str, cure: str = "") -> None:
        """Raises `StateError` inside a forward or a backward.

        Args:
            what: For the error: "make_room()".
            cure: When it is possible, if that needs saying.
        """
        if self.current is not Phase.IDLE:
            raise StateError(f"{what} is not possible inside {self.current.value}{cure and ': '}{cure}")
