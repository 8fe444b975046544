"""Threads that do what the main thread must not wait for, in an order that may change while the work waits.

What waits for the device to end a task looks for that end itself: the threads may be in the middle of other updates for
tens of milliseconds.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from lightning_elixir.core.device import Event
from lightning_elixir.core.labels import label
from lightning_elixir.core.signals import DeferringLock, deferred, start

log = logging.getLogger(__name__)

_LONGEST_END_S = 60.0
"""How long the end of a program waits for work under way: a device that waits for a lost peer never ends."""
_LONGEST_REST_S = 10.0
"""How long `Worker.rest` does: threads that take longer end by themselves."""

Work = Callable[[], Event | None]
"""What a task does. If it returns an event, the task is over when that moment has come, and the thread goes on."""


class Task:
    """Work given to a `Worker`."""

    def __init__(
        self,
        pool: _Pool,
        work: Work,
        order: float,
        after: Task | None,
        event: Event | None,
        is_brief: bool,
        is_held: bool,
    ) -> None:
        self._pool = pool
        self._is_held = is_held
        self._work: Work | None = work
        self._order = order
        self._after = after
        self._event = event
        self._is_brief = is_brief
        self._end: Event | None = None  # of what it has begun on the device
        self._is_ending = False
        self._is_over = False
        self._is_event_past = False  # it has come, or has failed
        self.error: BaseException | None = None
        """What the work raised."""
        self.over_s = 0.0
        """By `time.perf_counter`, when it was over."""
        self._followers: list[Callable[[], None]] = []

    def is_over(self) -> bool:
        """Whether the work is done, or has failed; waits for nothing."""
        return self._is_over

    def wait(self) -> None:
        """Make the host wait until the work is done; if it has not begun, it comes before all other.

        Raises:
            BaseException: What the work raised, every time.
        """
        self.join()
        if self.error is not None:
            raise self.error

    def join(self) -> None:
        """As `wait`, whether or not the work has failed."""
        if not self._is_over:
            with label("wait for update"):
                self._pool.wait_for(self)

    def cancel(self) -> None:
        """Have it not begun any more, where that is possible: then it is over, and failed."""
        self._pool.cancel(self)

    def release(self) -> None:
        """A task that was submitted as held may begin. Waits for nothing."""
        with self._pool.lock:
            self._is_held = False
            self._pool.ring()

    def then(self, follower: Callable[[], None]) -> None:
        """Call it when the work is done, or has failed: on the thread that did it, before the task counts as over; or
        right here if that is past. It must not wait for the task, nor raise."""
        with self._pool.lock:
            if not self._is_over:
                self._followers.append(follower)
                return
        follower()

    # For the pool

    def _can_begin(self) -> bool:
        return not self._is_held and (self._after is None or self._after._is_over)

    def _is_prepared(self) -> bool:
        """Whether the event has come. Once it has, the device is not queried again: other threads wait for the
        microseconds that a query takes."""
        if not self._is_event_past:
            try:
                self._is_event_past = self._event is None or self._event.is_over()
            except Exception:  # the device failed: let the task run, and have it say so
                self._is_event_past = True
        return self._is_event_past

    def _prepare(self, failure: type[BaseException] = BaseException) -> None:
        """Make the host wait for the event, if that has not failed.

        Args:
            failure: What counts as such. On a thread of the pool everything does; what interrupts another one is no
                matter of the task's.
        """
        event = self._event
        try:
            if event is not None:
                event.synchronize()
        except failure:  # likewise, or what it waits for did
            self._is_event_past = True

    def _run(self) -> Event | None:
        work, self._work = self._work, None
        if self._after is not None and self._after.error is not None:
            raise self._after.error
        if self._event is not None:
            self._event.synchronize()
        return work() if work is not None else None


class TaskEvent:
    """The end of a task, as an `Event`: device and host alike wait for it on the host."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def wait(self) -> None:
        self.task.wait()

    def synchronize(self) -> None:
        self.task.wait()

    def is_over(self) -> bool:
        return self.task.is_over()


class LateEvent:
    """An event that only exists when a task is over: what was issued then.

    Args:
        task: To wait for.
        issue: Called once, when the task is over; gives the event.
    """

    def __init__(self, task: Task, issue: Callable[[], Event]) -> None:
        self._task = task
        self._issue: Callable[[], Event] | None = issue
        self._event: Event | None = None
        self._error: BaseException | None = None
        task.then(self._on_over)

    def wait(self) -> None:
        self._issued().wait()

    def synchronize(self) -> None:
        self._issued().synchronize()

    def is_over(self) -> bool:
        return self._event is not None and self._event.is_over()

    def _on_over(self) -> None:
        issue, self._issue = self._issue, None
        try:
            if self._task.error is not None:
                self._error = self._task.error
            elif issue is not None:
                self._event = issue()
        except BaseException as error:
            self._error = error

    def _issued(self) -> Event:
        if self._event is None and self._error is None:
            self._task.wait()  # it is over when its followers have been called
        if self._error is not None or self._event is None:
            raise self._error or RuntimeError("nothing was issued")
        return self._event


class _Pool:
    """What the threads of one worker share. They know this, and not the worker, so that it may go."""

    def __init__(self, context: Callable[[], AbstractContextManager[None]], most_in_flight: int) -> None:
        # Not a `Condition`, which a signal may leave locked: [Note: signals]
        self.lock = DeferringLock()
        self._bells: list[threading.Lock] = []
        self._context = context
        self._most_in_flight = most_in_flight
        self._waiting: list[Task] = []
        self._num_unfinished = 0
        self._is_stopped = False
        self._failure: BaseException | None = None
        self._process = os.getpid()
        self._num_serving = 0
        self._at_exit: Callable[[], None] | None = None

    def end_at_exit(self, threads: list[threading.Thread], num_threads: int) -> None:
        """Have the end of the program wait for the threads, for as long as one of so many serves, be their worker
        there or not: an ending interpreter frees what they work on, and aborts where it meets them in C++."""
        self._num_serving = num_threads
        self._at_exit = partial(_end, self, threads)
        atexit.register(self._at_exit)

    def ring(self) -> None:
        """Wake all threads that wait: something has changed. Locked."""
        while self._bells:
            self._bells.pop().release()

    def _new_bell(self) -> threading.Lock:
        """What can be acquired when something has changed. Locked; to be waited for when that is past."""
        bell = threading.Lock()
        bell.acquire()
        self._bells.append(bell)
        return bell

    def add(self, task: Task) -> None:
        with self.lock:
            if self._is_stopped:
                raise RuntimeError("a worker that was closed, or has failed, takes no more tasks") from self._failure
            self._waiting.append(task)
            self._num_unfinished += 1
            self.ring()

    def wait_for(self, task: Task) -> None:
        with self.lock:
            needed: Task | None = task
            while needed is not None:
                needed._order = float("-inf")
                needed = needed._after
        while True:
            with self.lock:
                if task._is_over:
                    return
                help_on = self._help_for(task) or self._new_bell().acquire
            help_on()

    def _help_for(self, task: Task) -> Callable[[], object] | None:
        """What the thread that waits for a task can do about it. Those of the pool may be in the middle of other work
        for long, and look after what has ended on the device, and begin what is brief, only after that."""
        while task._after is not None and not task._after._is_over:
            task = task._after
        if task._end is not None and not task._is_ending:
            return partial(self._help_to_end, task, task._end)
        if task._is_brief and task in self._waiting and task._can_begin():
            return partial(self._help_to_begin, task) if task._is_prepared() else partial(task._prepare, Exception)
        return None

    def _help_to_end(self, task: Task, end: Event) -> None:
        error: Exception | None = None
        try:
            end.synchronize()
        except Exception as raised:  # what interrupts this thread is no matter of the task's
            error = raised
        with deferred():
            self._finish(task, error)

    def _help_to_begin(self, task: Task) -> None:
        """To its end, without interruption: no thread of the pool knows of what this one has begun."""
        with deferred(), self._context():
            with self.lock:
                if task not in self._waiting:
                    return
                self._waiting.remove(task)
            end = self._begin(task)
            if end is not None:
                self._land([(task, end)], must_wait=True)

    def cancel(self, task: Task) -> None:
        with deferred():
            with self.lock:
                if task not in self._waiting:
                    return
                self._waiting.remove(task)
                task._work = None
            self._finish(task, CancelledError("this task was cancelled before it had begun"))

    def wait_for_all(self) -> None:
        while True:
            with self.lock:
                if not self._num_unfinished:
                    return
                bell = self._new_bell()
            bell.acquire()

    def stop(self) -> None:
        """Have the threads end when all tasks are done. Waits for nothing: the garbage collector may call it."""
        if os.getpid() != self._process:
            return  # a fork has our lock, perhaps closed, and none of our threads
        with self.lock:
            self._is_stopped = True
            self.ring()

    def drop_held(self) -> None:
        """Have the tasks that are held, and what comes after them, fail: they will not be released any more."""
        if os.getpid() != self._process:
            return
        while True:
            with self.lock:
                held = next((t for t in self._waiting if t._is_held), None)
            if held is None:
                return
            held.cancel()

    def serve(self) -> None:
        """What each thread does."""
        try:
            self._serve()
        except BaseException as error:  # what no thread will do must not be waited for
            with self.lock:
                left, self._waiting = self._waiting, []
                self._is_stopped, self._failure = True, error
            for task in left:
                self._finish(task, error)
            log.exception("a thread of %d tasks that it leaves undone has failed", len(left))
        finally:
            self._leave()

    def _leave(self) -> None:
        with self.lock:
            self._num_serving -= 1
            at_exit = None if self._num_serving else self._at_exit
        if at_exit is not None:
            atexit.unregister(at_exit)

    def _serve(self) -> None:
        in_flight: list[tuple[Task, Event]] = []
        with self._context():
            while True:
                has_room = sum(not t._is_brief for t, _ in in_flight) < self._most_in_flight
                task, is_prepared = self._next(bool(in_flight), has_room)
                if task is not None and not is_prepared:
                    task._prepare()
                elif task is not None:
                    end = self._begin(task)
                    if end is not None:
                        in_flight.append((task, end))
                elif in_flight:
                    self._land(in_flight, must_wait=True)
                elif self._is_stopped:
                    return
                while in_flight and self._land(in_flight, must_wait=False):
                    pass
                task = None  # or its tensors would live until the next one comes

    def _begin(self, task: Task) -> Event | None:
        """Carry it out; returns the end of what goes on on the device."""
        try:
            end = task._run()
        except BaseException as error:  # `Task.wait` raises it
            self._finish(task, error)
            return None
        if end is None:
            self._finish(task, None)
            return None
        with self.lock:
            task._end = end
            self.ring()  # threads that wait may wait for the device rather than for this one
        return end

    def _land(self, in_flight: list[tuple[Task, Event]], *, must_wait: bool) -> bool:
        """Finish the oldest task, if the device has; returns whether it did."""
        task, event = in_flight[0]
        error: BaseException | None = None
        try:
            if must_wait:
                event.synchronize()
            elif not event.is_over():
                return False
        except BaseException as raised:  # the device failed: no thread may wait for ever
            error = raised
        in_flight.pop(0)
        self._finish(task, error)
        return True

    def _next(self, has_in_flight: bool, has_room: bool) -> tuple[Task | None, bool]:
        """The next task, if there is one; waits for one where there is nothing else to do.

        Returns:
            A task, and whether it can begin. If not, it is the one whose turn with the device comes first, as far as
            that is known, and it stays here: when it can begin, another that can may be wanted sooner. A thread that
            took it now would wait for the device while others are prepared. Brief ones hold nothing up: of what can
            begin they come first, and of what cannot they are waited for last.
        """
        while True:
            with self.lock:
                ready = [t for t in self._waiting if t._can_begin()] if has_room else []
                for task in sorted(ready, key=lambda t: (not t._is_brief, t._order)):  # equals as they came
                    if task._is_prepared():
                        self._waiting.remove(task)
                        return task, True
                if ready:
                    return next((t for t in ready if not t._is_brief), ready[0]), False
                if has_in_flight or (self._is_stopped and not self._waiting):
                    return None, False
                bell = self._new_bell()
            bell.acquire()

    def _finish(self, task: Task, error: BaseException | None) -> None:
        with self.lock:
            if task._is_ending:  # a thread of the pool and one that waits may both have seen the end
                return
            task._is_ending = True
            task.error = error
        try:
            while True:
                with self.lock:
                    followers, task._followers = task._followers, []
                    if not followers:
                        self._note_over(task)
                        return
                for follower in followers:
                    follower()
        except BaseException:  # a second Ctrl-C
            with self.lock:
                self._note_over(task)
            raise

    def _note_over(self, task: Task) -> None:
        task.over_s = time.perf_counter()
        task._is_over = True
        task._after = task._event = task._end = None
        self._num_unfinished -= 1
        self.ring()


class Worker:
    """Threads that carry out tasks, those with the lowest order first; they end, all tasks done, when this object goes.

    Args:
        name: Of the threads.
        num_threads: More than one, if a thread may be late in taking up its next task.
        context: Entered on every thread, around all of its work.
        most_in_flight: Tasks of one thread that may be under way on the device, when the next is begun, but for brief
            ones.
    """

    def __init__(
        self,
        name: str,
        *,
        num_threads: int = 1,
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
        most_in_flight: int = 2,
    ) -> None:
        self._name = name
        self._num_threads = num_threads
        self._new_pool = partial(_Pool, context, most_in_flight)
        self._change = DeferringLock()  # of pool and threads, while others may submit
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pool = self._new_pool()
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, self._pool.stop)
        self._finalizer.atexit = False

    def submit(
        self,
        work: Work,
        *,
        order: float = 0.0,
        after: Task | None = None,
        event: Event | None = None,
        is_brief: bool = False,
        is_held: bool = False,
    ) -> Task:
        """Have work done.

        Args:
            work: What to do.
            order: The lowest goes first.
            after: It begins when this task of the same worker is over; if that failed, it fails likewise.
            event: It waits for this moment; work that need not wait may go before.
            is_brief: It only gives the device something to do: it goes before work that is not, and a thread that waits
                for it may carry it out.
            is_held: It begins after `Task.release` alone, which must come: see to that under the same `deferred`. No
                thread waits for that, as one does for an event: what comes first may be something that the threads
                themselves have to bring about. The end of the program drops it.
        """
        with self._change:
            if not self._threads:
                self._pool.end_at_exit(self._threads, self._num_threads)
                for number in range(self._num_threads):
                    thread = threading.Thread(target=self._pool.serve, name=f"{self._name}-{number}", daemon=True)
                    start(thread)
                    self._threads.append(thread)
            task = Task(self._pool, work, order, after, event, is_brief, is_held)
            self._pool.add(task)
            return task

    def wait(self) -> None:
        """Make the host wait until all tasks are over; raises nothing."""
        self._pool.wait_for_all()

    def rest(self) -> None:
        """Do what is left and end the threads; the next task starts new ones. Raises nothing."""
        with self._change:
            if not self._threads:
                return
            pool, threads = self._pool, self._threads
            self._finalizer.detach()
            self._begin_anew()
        _end(pool, threads, drops_held=False, longest_s=_LONGEST_REST_S)

    def close(self, *, drops_held: bool = False) -> None:
        """Do what is left and end the threads. No task may follow.

        Args:
            drops_held: Tasks that are still held fail.
        """
        _end(self._pool, self._threads, drops_held=drops_held)


def _end(
    pool: _Pool, threads: list[threading.Thread], *, drops_held: bool = True, longest_s: float = _LONGEST_END_S
) -> None:
    latest_s = time.monotonic() + longest_s
    with deferred():  # `Thread.join` is written in Python
        pool.stop()
        if drops_held:
            pool.drop_held()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, latest_s - time.monotonic()))
