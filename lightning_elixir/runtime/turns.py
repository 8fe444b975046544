"""Which thread uses an engine. [Note: turns]

Forward, backward and step belong to one thread from begin to end, with those that autograd runs backward on. Chunks
come and go meanwhile, so other threads that touch parameters are refused then, at once: if they waited, training could
wait for them. Between these, a thread that touches parameters has the engine for as long as the call takes, and a
forward, backward or step that would begin meanwhile waits for that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from lightning_elixir.errors import StateError

_CURE = (
    "look at parameters where training runs, between steps (in a callback, such as on_train_batch_end), and give the "
    "other thread a copy (parameter.detach().clone())"
)


class Turn:
    """One engine's.

    Args:
        is_shared: Whether every use may take other ranks, so that only the thread that trains can have it.
    """

    def __init__(self, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._condition = threading.Condition()
        self._owner: int | None = None
        self._depth = 0
        self._is_long = False  # until the end of a forward, a backward or a step
        self._last_long: int | None = None
        self.was_contended = False
        """Whether any other thread than the one that trains has asked."""

    def check(self, what: str) -> None:
        """Raises `StateError` if another thread is in the middle of a forward, a backward or a step."""
        if self._is_long and self._owner != self._thread():
            self._refuse(what)

    def begin(self, what: str) -> None:
        """Have the engine until `end`.

        Args:
            what: For the error: "forward".

        Raises:
            StateError: Another thread is in the middle of a forward, a backward or a step.
        """
        self._take(what, is_long=True)

    def end(self) -> None:
        """As often as `begin`; by whatever thread, since autograd ends a backward on one of its own."""
        with self._condition:
            self._depth -= 1
            if self._depth <= 0:
                self._owner, self._depth, self._is_long = None, 0, False
                self._condition.notify_all()

    @contextmanager
    def brief(self, what: str) -> Iterator[None]:
        """Have the engine inside, for one call between steps.

        Raises:
            StateError: As `begin`; or several ranks train, and this is another thread than the one that does.
        """
        self._take(what, is_long=False)
        try:
            yield
        finally:
            self.end()

    @contextmanager
    def lasting(self, what: str) -> Iterator[None]:
        """`begin`, and `end` after the block."""
        self.begin(what)
        try:
            yield
        finally:
            self.end()

    def _refuse(self, what: str) -> NoReturn:
        """Raises the `StateError` for this thread, which comes while another one has the engine."""
        self.was_contended = True
        name = threading.current_thread().name
        raise StateError(
            f"{what} in thread {name!r} while another thread is in the middle of a forward, a backward or a step, "
            f"which moves parameters: {_CURE}"
        )

    def _take(self, what: str, *, is_long: bool) -> None:
        me = self._thread()
        with self._condition:
            if self._last_long not in (None, me):
                self.was_contended = True
                if self._is_shared and not is_long:
                    raise StateError(
                        f"{what} in thread {threading.current_thread().name!r}, which takes all ranks, and another "
                        f"thread trains: {_CURE}"
                    )
            while self._owner not in (None, me):
                if self._is_long:
                    self._refuse(what)
                self._condition.wait()
            self._owner = me
            self._depth += 1
            if is_long:
                self._is_long, self._last_long = True, me

    def _thread(self) -> int:
        """This thread; for those that autograd runs backward on, the one that trains."""
        me, trains = threading.get_ident(), self._last_long
        if trains is not None and me != trains and torch._C._current_graph_task_id() != -1:
            return trains
        return me
