"""Which thread uses an engine.

[Note: turns] Forward, backward and step belong to one thread from begin to end, with those that autograd runs backward
on; so does every call between them that looks at parameters, gradients or states. The thread that trains (it ran the
last backward or step) waits while another one's call is served. Other threads wait for each other's calls, and are
refused at once in the middle of a forward, a backward, a step or a `full_parameters` block: chunks come and go there,
and if they waited, training could wait for them. What a thread leaves open when it ends is free.

On a GPU much of a backward runs in a thread of autograd's, and the one that called it waits without Python's lock, so
others run beside it all the time: whatever looks at the engine has a turn, up to its last line, also where a phase has
ended in between, and asks whether the engine is open when it has that turn, not before. `tests/fuzz/like_a_gpu.py` has
the CPU find what does not.

Threads may compute on streams of their own, which know nothing of each other, and what one has fetched may lie where
another's work still has to read. So the engine has one order on the device as well: what begins on another stream than
the last comes after it, and what the thread that trains does next comes after the call of another.

With several ranks other threads are refused always, and until one has trained, all but the one that has made the
engine: what they call takes the other ranks, which are somewhere else. So what they do costs time at most. What is
plain is not intercepted, for any thread: once another one has been seen, chunks that may go are not made plain any
more, and the thread that trains passes by the interception with a guard of its own (`Interception._as_plain`). A thread
that comes for the first time while parameters are plain is not seen, and may read memory as it goes: so one that reads
before training counts as seen, and users are told to have it do so.
"""

from __future__ import annotations

import enum
import threading
import weakref
from types import TracebackType
from typing import NoReturn

import torch

from lightning_elixir.core.device import Device, Stream
from lightning_elixir.core.signals import deferred
from lightning_elixir.errors import StateError

_CURE = (
    "look at parameters where training runs, between steps (in a callback, such as on_train_batch_end), and give the "
    "other thread a copy (parameter.detach().clone())"
)
_POLL_S = 1.0  # the thread that is waited for may end without a word


class _Use(enum.Enum):
    CALL = enum.auto()
    BLOCK = enum.auto()
    """Has user code inside."""
    PHASE = enum.auto()
    """A forward, a backward or a step."""


class Turn:
    """One engine's.

    Args:
        is_shared: Whether every use may take other ranks, so that only the thread that trains can have it.
    """

    def __init__(self, device: Device, is_shared: bool) -> None:
        self._device = device
        self._is_shared = is_shared
        # No `Condition` (see [Note: signals]); the garbage collector may come back here in the thread that has it.
        self._lock = threading.RLock()
        self._waiting: list[threading.Lock] = []
        """Of each thread that waits for the engine, one that is taken until the engine may be free."""
        self._owner: threading.Thread | None = None
        self._owner_ident: int | None = None  # asked for at every module of a forward
        self._uses: list[Held] = []  # of the owner, begun and not ended
        self._trainer: threading.Thread | None = threading.current_thread() if is_shared else None
        self._stream: Stream | None = None  # on which the thread that trains computes
        self._visitor: Stream | None = None  # of an owner that does not train, if it is another one
        self._has_trained = False  # else the trainer is the thread that has made the engine, or none
        self._early: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # that were served while none trained
        self.was_contended = False
        """Whether any other thread than the one that trains has asked, before that one began to train or since."""

    def is_mine(self) -> bool:
        """Whether this thread has the engine."""
        if self._owner_ident == threading.get_ident():
            return True
        return self._owner is not None and self._owner is self._thread()

    def call(self, what: str) -> Held:
        """Inside, have the engine for one call between steps, or inside a phase of this thread's. Signals wait for its
        end.

        Args:
            what: For the error: "state_dict()".

        Raises:
            StateError: The thread that trains is in the middle of something, and this is another one; or several ranks
                train.
        """
        return Held(self, what, _Use.CALL)

    def long_call(self, what: str) -> Held:
        """As `call`, for what may last: signals are handled inside, but where that is deferred."""
        return Held(self, what, _Use.CALL, is_whole=False)

    def block(self, what: str) -> Held:
        """As `long_call`, with user code inside."""
        return Held(self, what, _Use.BLOCK, is_whole=False)

    def phase(self, what: str, *, is_of_trainer: bool = True, may_be_of_trainer: bool = True) -> Held:
        """Inside, have the engine for a step, or for the begin of a forward or a backward; signals wait for the end of
        that. A phase with user code inside takes it (`Held.take`) and drops it when it ends, which may be in another
        thread, since autograd ends a backward on one of its own.

        Args:
            what: For the error: "a forward".
            is_of_trainer: This thread is the one that trains from here on.
            may_be_of_trainer: It is, if no other has trained so far.

        Raises:
            StateError: The thread that trains is in the middle of something, and this is another one.
        """
        return Held(self, what, _Use.PHASE, is_of_trainer, may_be_of_trainer)

    def take(self, held: Held) -> None:
        """For `Held`."""
        me = self._thread()
        while True:
            with self._lock:
                if self._try_take(held, me):
                    return
                freed = threading.Lock()
                freed.acquire()
                self._waiting.append(freed)
            freed.acquire(timeout=_POLL_S)

    def _try_take(self, held: Held, me: threading.Thread) -> bool:
        """Whether this thread has it now, and need not wait. Locked."""
        if self._trainer is not None and not self._trainer.is_alive():
            self._trainer, self._has_trained = None, False
        may_begin = held.may_be_of_trainer and not self._has_trained
        if self._trainer not in (None, me) and not may_begin:
            self.was_contended = True
            if self._is_shared and held.use is not _Use.PHASE:
                does = "trains" if self._has_trained else "has made the engine, and none has trained yet"
                raise StateError(
                    f"{held.what} in thread {me.name!r}, which takes all ranks, and another thread {does}: {_CURE}"
                )
        if self._owner not in (None, me):
            if self._owner.is_alive():
                self.was_contended = True
                if any(one.use is not _Use.CALL for one in self._uses) and not self._may_wait(me, held.use):
                    self._refuse(held.what, me)
                return False
            self._uses.clear()
            self._end_visit()
        is_first = not self._uses
        self._owner, self._owner_ident = me, me.ident
        self._uses.append(held)
        if held.is_of_trainer or may_begin:
            self._trainer, self._has_trained = me, True
            self._meet_early(me)
        elif self._trainer is None:
            self._early.add(me)
        if is_first:
            self._line_up(is_guest=self._trainer not in (None, me))
        return True

    def _meet_early(self, me: threading.Thread) -> None:
        """This thread trains: those that were served before may come back inside a forward. Locked."""
        if self._early:
            others = list(self._early)  # not one by one: the last may go between a look and `pop`
            self._early.clear()
            self.was_contended |= any(other is not me and other.is_alive() for other in others)

    def _line_up(self, *, is_guest: bool) -> None:
        """The device does what comes now after what came before. Locked."""
        here = self._device.compute_stream()
        if self._stream is not None and here != self._stream:
            self._stream.hold_up_this_thread()
            self._visitor = here if is_guest else None
        if not is_guest or self._stream is None:
            self._stream = here

    def _end_visit(self) -> None:
        """What the thread that trains does next comes after what another has done. Locked."""
        visitor, self._visitor = self._visitor, None
        if visitor is not None and self._stream is not None:
            self._stream.wait_for(visitor)

    def _may_wait(self, me: threading.Thread, use: _Use) -> bool:
        """For another thread that is in a phase or a block."""
        return me is self._trainer or (self._trainer is None and use is _Use.PHASE)

    def drop(self, held: Held) -> None:
        """For `Held`; nothing, where it has not got the engine."""
        with self._lock:
            if held in self._uses:
                self._uses.remove(held)
            if not self._uses:  # also where a signal came when `take` had half done it
                self._owner = self._owner_ident = None
                while self._waiting:
                    self._waiting.pop().release()
                self._end_visit()

    def _refuse(self, what: str, me: threading.Thread) -> NoReturn:
        raise StateError(
            f"{what} in thread {me.name!r} while another thread is in the middle of a forward, a backward, a step or a "
            f"full_parameters block, which moves parameters: {_CURE}"
        )

    def _thread(self) -> threading.Thread:
        """This thread; for those that autograd runs backward on, the one that trains."""
        me = threading.current_thread()
        stands_for = self._trainer or self._owner
        is_autograds = isinstance(me, threading._DummyThread) and torch._C._current_graph_task_id() != -1
        return stands_for if is_autograds and stands_for is not None else me


class Held:
    """The engine, for one use: see `Turn.call`. A class, since parameters are touched often."""

    __slots__ = ("_is_whole", "_turn", "is_of_trainer", "may_be_of_trainer", "use", "what")

    def __init__(
        self,
        turn: Turn,
        what: str,
        use: _Use,
        is_of_trainer: bool = False,
        may_be_of_trainer: bool = False,
        *,
        is_whole: bool = True,
    ) -> None:
        self._turn = turn
        self.what = what
        self.use = use
        self.is_of_trainer = is_of_trainer
        self.may_be_of_trainer = may_be_of_trainer
        self._is_whole = is_whole

    def take(self) -> None:
        """Have it until `drop`."""
        try:
            self._turn.take(self)
        except BaseException:  # a signal may have come when it had taken it
            self._turn.drop(self)
            raise

    def drop(self) -> None:
        self._turn.drop(self)

    def __enter__(self) -> None:
        try:
            self._turn.take(self)  # which may wait for another thread, and hears signals meanwhile
            if self._is_whole:
                deferred().__enter__()
        except BaseException:
            self._turn.drop(self)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._turn.drop(self)
        finally:
            if self._is_whole:
                deferred().__exit__(kind, error, trace)
