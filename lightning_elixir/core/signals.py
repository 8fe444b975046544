"""Signals that must not interrupt what cannot be taken back."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

INTERRUPTIONS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""What asks a training to stop, or to save itself: Ctrl-C, and what cluster managers send."""


@contextmanager
def deferred(numbers: tuple[signal.Signals, ...] = INTERRUPTIONS) -> Iterator[None]:
    """Signals that come inside are handled when it is left; a second one of a kind is handled at once.

    Only those with a handler in Python (as Ctrl-C has), and only on the main thread, which alone runs such handlers.
    Inside of itself it does nothing: the outermost one decides.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in numbers}
    if any(isinstance(handler, _Note) for handler in handlers.values()):
        yield
        return
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    note = _Note(handlers)
    for number in handlers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late, frame in note.came.items():
            note.handle(late, frame)


class _Note:
    """The handler inside."""

    def __init__(self, handlers: Mapping[signal.Signals, Any]) -> None:
        self._handlers = handlers
        self.came: dict[int, FrameType | None] = {}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number in self.came:
            self.handle(number, frame)
            return
        self.came[number] = frame
        log.warning("%s: going on to the end of the step first; once more stops at once", signal.strsignal(number))

    def handle(self, number: int, frame: FrameType | None) -> None:
        """What would have been done at once."""
        self._handlers[signal.Signals(number)](number, frame)
