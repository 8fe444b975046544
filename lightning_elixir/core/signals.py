"""Signals that must not interrupt what cannot be taken back."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)

INTERRUPTIONS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""What asks a training to stop, or to save itself: Ctrl-C, and what cluster managers send."""


@contextmanager
def deferred(numbers: tuple[signal.Signals, ...] = INTERRUPTIONS) -> Iterator[None]:
    """Signals that come inside are handled when it is left; a second one of a kind is handled at once.

    Only those with a handler in Python (as Ctrl-C has), and only on the main thread, which alone runs such handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in numbers}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    came: dict[int, FrameType | None] = {}

    def note(number: int, frame: FrameType | None) -> None:
        if number not in came:
            came[number] = frame
            log.warning("%s: going on to the end of the step first; once more stops at once", signal.strsignal(number))
            return
        handler = handlers[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    for number in handlers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late, frame in came.items():
            handler = handlers[signal.Signals(late)]
            if callable(handler):
                handler(late, frame)
