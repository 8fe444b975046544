"""Signals that must not interrupt what cannot be taken back.

[Note: signals] Python runs the handlers of signals, on the main thread, after any call and where any function begins:
Ctrl-C may raise between the two halves of whatever is not done in one. So what must be whole for anything to go on
after it (a replica that comes, a task that is handed over, the begin and the end of a forward), is `deferred`. Putting
handlers in place takes some us, too much for what is done at every module; between `arm` and `disarm`, so in every
forward and backward, they are in place and do nothing of their own, and `deferred` only counts.

*Doors, not rooms.* It is deferred where the user's program comes in, and nothing inside needs to think of it:

- a call that has the engine defers by that (`Turn.call`, and `Turn.phase` where it has no user code inside);
- so do the events of hooks and autograd that come too often for a turn of their own, and the begin and end of spans;
- what may last (`Turn.long_call`, `Turn.block`) does not: Ctrl-C is heard inside, and pieces are deferred there;
- below the engine, what a lock guards is whole by that lock (`DeferringLock`), and threads are those of a `Worker`.

`tests/test_architecture.py` lists all doors. Between them the user's program runs, or torch, and hears signals as it
does without us.

*Why handlers do not only take a note* that is looked at between events. Where the main thread is in the user's code (a
long loop in a forward, an operator, a hang) or in one of our long calls (a state dict, a save, a wait for a disk), no
event may come for minutes, so a handler must know whether it may raise at once. That takes a mark at every door, as
here, and besides a point in every long loop and wait of ours at which a note is looked at, and a second kind of mark
where even those must not raise (a step). Deferring is that without the points: the note is looked at where the
outermost door is left. A handler could find out from the frames whether it is in our code; but `loss.backward()` is
called from ours and runs for seconds, and handlers would have to stay in place while other programs set theirs.

Between `deferred` blocks, what waits does so by acquiring a lock, which is done or is not: a lock's own `with` lets no
handler run between taking it and the block. `Condition`, `Event` and `Future` do: a signal there leaves their inner
lock taken for good. No thread that runs handlers waits for one, and so the standard library's pools are not used.

Seen with `Condition` and `Event` in place of plain locks: one hang in 50 to 110 interrupts.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any

log = logging.getLogger(__name__)

# The functions below those of `signal`, which make an enum of every handler, by way of an exception.
_raw: Any = getattr(signal, "_signal", signal)
_this_thread = threading.get_ident

INTERRUPTIONS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""What asks a training to stop, or to save itself: Ctrl-C, and what cluster managers send."""


def deferred() -> AbstractContextManager[None]:
    """Signals that come inside are handled when it is left; a second one of a kind is handled at once.

    Only those with a handler in Python (as Ctrl-C has), and only on the main thread, which alone runs such handlers.
    Inside of itself it only counts: the outermost one decides.
    """
    return _DEFERRED


def arm() -> bool:
    """From here to `disarm`, `deferred` takes some 0.3 us; signals between are handled as ever.

    Returns:
        Whether it is so; not on other threads than the main one.
    """
    return _arm(1)


def disarm() -> bool:
    """Undo one `arm`. One too many does nothing.

    Returns:
        Whether it was done; not on other threads than the main one.
    """
    return _arm(-1)


def _arm(change: int) -> bool:
    with _DEFERRED:
        if _Note.active is None or not _is_main_thread():
            return False
        _Note.active.num_armed = max(0, _Note.active.num_armed + change)
        return True


def num_interruptions() -> int:
    """How often a signal has ended, by an exception, what is between `arm` and `disarm`, or `deferred`."""
    return _Note.num_raised


def handle_overdue(longest_s: float) -> None:
    """Called inside `deferred` while it waits for ranks that may never come: handle now what has come longer ago than
    this. Where that raises, nothing of what goes on is kept whole, as after a second signal."""
    note = _Note.active
    if note is None or threading.get_ident() != note.thread or not note.depth or not note.came:
        return
    if time.monotonic() - note.first_came_s >= longest_s:
        depth, note.depth = note.depth, 0
        note.handle_late()
        note.depth = depth


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


class _Deferred:
    """Has no state of its own, and so can be inside of itself."""

    __slots__ = ()

    def __enter__(self) -> None:
        note = _Note.active
        if note is not None and _this_thread() == note.thread:
            note.depth += 1  # no call comes after this, and so no handler before the block
        elif note is None and _is_main_thread():
            _Note().install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        note = _Note.active
        if note is None or _this_thread() != note.thread:
            return
        if note.depth > 1:
            note.depth -= 1
        elif note.num_armed:
            note.depth = 0
            if note.came:
                note.handle_late()
        else:
            note.remove()


_DEFERRED = _Deferred()


def deferring(call: Callable[..., Any]) -> Callable[..., None]:
    """`call` inside of `deferred`, for what comes thousands of times in a backward: between `arm` and `disarm` that is
    one call of a function in the place of three. What it returns is dropped."""

    def run(*args: Any) -> None:
        note = _Note.active
        if note is None or not note.num_armed or _this_thread() != note.thread:
            with _DEFERRED:
                call(*args)
            return
        note.depth += 1
        try:
            call(*args)
        finally:
            if note.depth > 1:
                note.depth -= 1
            elif note.num_armed and not note.came:
                note.depth = 0
            else:
                _DEFERRED.__exit__(None, None, None)

    return run


class DeferringLock:
    """A lock inside which signals are deferred, so that what it guards is whole for this thread as for all others.

    A thread may take it again inside: the garbage collector may come back to what it guards.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        _DEFERRED.__enter__()
        try:
            self._lock.acquire()
        except BaseException as error:  # a second signal
            _DEFERRED.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
        _DEFERRED.__exit__(kind, error, trace)


def start(thread: threading.Thread) -> None:
    """Start it. `Thread.start` waits for an `Event`, which is written in Python (Note: signals)."""
    with deferred():
        thread.start()


class _Note:
    """The handler inside. Only the main thread knows of it."""

    active: _Note | None = None
    """The one that is in place."""
    num_raised = 0

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        found = {number: _raw.getsignal(number) for number in INTERRUPTIONS}
        self._handlers: dict[int, Any] = {number: handler for number, handler in found.items() if callable(handler)}
        self.came: dict[int, FrameType | None] = {}
        self.first_came_s = 0.0
        """When the first of these came."""
        self.depth = 0
        """Of `deferred`; 0: handlers are called at once."""
        self.num_armed = 0

    def install(self) -> None:
        """Put it in place, inside of one `deferred`."""
        self.depth, _Note.active = 1, self
        try:
            for number in self._handlers:
                _raw.signal(number, self)
        except BaseException:  # a signal whose handler was the old one still
            self.remove()
            raise

    def remove(self) -> None:
        """Put the handlers back, and call those that wait."""
        try:
            for number, handler in self._handlers.items():
                if _raw.getsignal(number) is self:
                    _raw.signal(number, handler)
        except BaseException:  # one that is back was called
            self.remove()
            raise
        self.depth, _Note.active = 0, None
        if self.came:
            self.handle_late()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.depth:
            self._handle(number, frame)
        elif number in self.came:
            del self.came[number]
            depth, self.depth = self.depth, 0  # if this raises, nothing of what goes on is kept whole any more
            self._handle(number, frame)
            self.depth = depth
        else:
            if not self.came:
                self.first_came_s = time.monotonic()
            self.came[number] = frame
            log.warning("%s: what is half done is ended first; once more stops at once", signal.strsignal(number))

    def handle_late(self) -> None:
        """Call the handlers of what has come, each, whatever they raise."""
        while self.came:
            number = next(iter(self.came))
            frame = self.came.pop(number)
            try:
                self._handle(number, frame)
            except BaseException:
                self.handle_late()
                raise

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """What would have been done at once."""
        try:
            self._handlers[number](number, frame)
        except BaseException:
            _Note.num_raised += 1
            raise
