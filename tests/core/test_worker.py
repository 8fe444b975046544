"""Tasks on threads: their order, their errors, and their end."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_elixir.core.worker import LateEvent, Task, TaskEvent, Worker
from tests.helpers.processes import run
from tests.helpers.tiers import full


class Moment:
    """An event that comes when the test says so."""

    def __init__(self) -> None:
        self.come = threading.Event()

    def wait(self) -> None:
        self.come.wait()

    def synchronize(self) -> None:
        self.come.wait()

    def is_over(self) -> bool:
        return self.come.is_set()


def held_worker(**options: Any) -> tuple[Worker, threading.Event]:
    """A worker whose threads are busy until the event is set."""
    worker, gate, begun = Worker("test", **options), threading.Event(), []
    count = options.get("num_threads", 1)
    for _ in range(count):
        worker.submit(lambda: begun.append(1) or (gate.wait() and None), order=-1.0)
    while len(begun) < count:
        time.sleep(0.001)
    return worker, gate


def noting(log: list[str], name: str) -> Callable[[], None]:
    return lambda: log.append(name)


def test_a_task_that_has_not_begun_is_cancelled() -> None:
    worker, gate = held_worker()
    log: list[str] = []
    first, second = (worker.submit(noting(log, name)) for name in "ab")
    first.then(lambda: log.append("over"))
    first.cancel()
    assert first.is_over()
    assert log == ["over"]
    first.join()
    with pytest.raises(CancelledError, match="cancelled before it had begun"):
        first.wait()
    gate.set()
    second.wait()
    second.cancel()  # too late
    second.wait()
    worker.wait()
    assert log == ["over", "b"]
    worker.close()


def test_a_task_that_runs_is_not_cancelled_but_may_be_waited_for() -> None:
    worker, gate, begun = Worker("test"), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait()
        raise ValueError("nobody asked")

    task = worker.submit(work)
    begun.wait()
    task.cancel()
    assert not task.is_over()
    gate.set()
    task.join()
    assert task.is_over()
    worker.close()


def test_the_lowest_order_goes_first_and_equals_as_they_came() -> None:
    worker, gate = held_worker()
    log: list[str] = []
    for name, order in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("a2", 1.0)):
        worker.submit(noting(log, name), order=order)
    gate.set()
    worker.wait()
    assert log == ["a", "a2", "b", "c"]
    worker.close()


def test_what_is_waited_for_goes_first() -> None:
    worker, gate = held_worker()
    log: list[str] = []
    tasks = {name: worker.submit(noting(log, name), order=i) for i, name in enumerate("abcd")}
    waiting = threading.Thread(target=tasks["d"].wait)
    waiting.start()
    while tasks["d"]._order != float("-inf"):
        time.sleep(0.001)
    gate.set()
    waiting.join()
    worker.wait()
    assert log == ["d", "a", "b", "c"]
    worker.close()


def test_a_task_comes_after_another_and_what_it_needs_is_hurried_too() -> None:
    worker, gate = held_worker(num_threads=2)
    log: list[str] = []
    first = worker.submit(lambda: time.sleep(0.02) or log.append("first"), order=5.0)
    other = worker.submit(noting(log, "other"), order=4.0)
    second = worker.submit(noting(log, "second"), order=0.0, after=first)
    waiting = threading.Thread(target=second.wait)
    waiting.start()
    while first._order != float("-inf"):
        time.sleep(0.001)
    gate.set()
    waiting.join()
    other.wait()
    assert log.index("first") < log.index("second")
    worker.close()


def test_work_that_must_wait_for_the_device_lets_others_go_before() -> None:
    worker, gate = held_worker()
    log: list[str] = []
    moment = Moment()
    worker.submit(noting(log, "late"), order=0.0, event=moment)
    early = worker.submit(noting(log, "early"), order=1.0)
    gate.set()
    early.wait()
    assert log == ["early"]
    moment.come.set()
    worker.wait()
    assert log == ["early", "late"]
    worker.close()


def test_who_waits_for_the_device_takes_what_comes_first_not_what_is_wanted_most() -> None:
    """Gradients land in the order of backward, and what the next forward needs first lands last."""
    worker = Worker("test", num_threads=2)
    log: list[str] = []
    moments = [Moment() for _ in range(4)]
    tasks = [
        worker.submit(noting(log, str(number)), order=-number, event=moment) for number, moment in enumerate(moments)
    ]
    time.sleep(0.02)  # both threads wait
    for number, moment in enumerate(moments):
        moment.come.set()
        tasks[number].wait()
        assert log == [str(n) for n in range(number + 1)]
    worker.close()


def test_of_what_has_come_meanwhile_the_most_wanted_goes_first() -> None:
    worker = Worker("test")
    log: list[str] = []
    moments = [Moment() for _ in range(3)]
    for number, moment in enumerate(moments):
        worker.submit(noting(log, str(number)), order=-number, event=moment)
    time.sleep(0.02)
    for moment in reversed(moments):
        moment.come.set()
    worker.wait()
    assert log == ["2", "1", "0"]
    worker.close()


def test_a_device_that_fails_while_a_task_waits_for_it_fails_that_task_alone() -> None:
    class Broken(Moment):
        def synchronize(self) -> None:
            super().synchronize()
            raise RuntimeError("device")

    worker = Worker("test")
    broken = Broken()
    failing = worker.submit(lambda: None, event=broken)
    time.sleep(0.02)
    other = worker.submit(lambda: None)
    broken.is_over = lambda: False  # type: ignore[method-assign]
    broken.come.set()
    with pytest.raises(RuntimeError, match="device"):
        failing.wait()
    other.wait()
    worker.close()


def test_whatever_ends_the_waiting_for_the_device_ends_one_task_alone() -> None:
    class Exiting(Moment):
        def synchronize(self) -> None:
            raise SystemExit

    worker = Worker("test")
    failed = worker.submit(lambda: None, event=Exiting())
    with pytest.raises(SystemExit):
        failed.wait()
    worker.submit(lambda: None).wait()
    worker.close()


def test_a_task_on_the_device_is_over_when_its_event_is_and_holds_nobody_up() -> None:
    worker = Worker("test", most_in_flight=2)
    moments = [Moment() for _ in range(3)]
    begun: list[int] = []

    def work(number: int) -> Callable[[], Moment]:
        return lambda: begun.append(number) or moments[number]

    tasks = [worker.submit(work(i)) for i in range(3)]
    while len(begun) < 2:
        time.sleep(0.001)
    time.sleep(0.02)
    assert begun == [0, 1]
    assert not any(t.is_over() for t in tasks)
    moments[0].come.set()
    tasks[0].wait()
    moments[1].come.set()
    moments[2].come.set()
    worker.wait()
    assert begun == [0, 1, 2]
    worker.close()


def test_who_waits_for_what_the_device_does_waits_for_no_thread() -> None:
    """The only thread is in the middle of something else when the moment comes, and has not yet looked."""
    worker, begin = held_worker()
    gate, moment, begun = threading.Event(), Moment(), threading.Event()
    first = worker.submit(lambda: moment)
    log: list[str] = []
    first.then(noting(log, "followed"))
    busy = worker.submit(lambda: begun.set() or (gate.wait() and None))
    begin.set()
    assert begun.wait(10)
    moment.come.set()
    first.wait()
    assert log == ["followed"]
    assert not busy.is_over()
    gate.set()
    busy.wait()
    worker.wait()
    assert log == ["followed"]
    worker.close()


def test_what_is_brief_goes_first_and_is_waited_for_last() -> None:
    worker, gate = held_worker()
    log: list[str] = []
    late, moment = Moment(), Moment()
    worker.submit(noting(log, "brief, late"), event=late, order=-5.0, is_brief=True)
    worker.submit(noting(log, "long, when its moment comes"), event=moment)
    worker.submit(noting(log, "long"), order=-3.0)
    worker.submit(noting(log, "brief"), is_brief=True)
    gate.set()
    moment.come.set()
    while len(log) < 3:
        time.sleep(0.001)
    late.come.set()
    worker.wait()
    assert log[0] == "brief"
    assert log[-1] == "brief, late"
    worker.close()


def test_what_is_brief_takes_no_room_on_the_device() -> None:
    worker, begin = held_worker(most_in_flight=1)
    moment, log = Moment(), list[str]()
    for _ in range(3):
        worker.submit(lambda: moment, is_brief=True)
    worker.submit(noting(log, "long"))
    begin.set()
    give_up_s = time.monotonic() + 10
    while not log:
        assert time.monotonic() < give_up_s
        time.sleep(0.001)
    moment.come.set()
    worker.wait()
    worker.close()


def test_who_waits_for_what_is_brief_does_it_while_the_threads_are_busy() -> None:
    inside: list[bool] = []
    names: list[str] = []

    @contextmanager
    def context():  # type: ignore[no-untyped-def]
        inside.append(True)
        yield
        inside.pop()

    worker, begin = held_worker(context=context)
    gate, begun, moment = threading.Event(), threading.Event(), Moment()
    first = worker.submit(lambda: moment)
    worker.submit(lambda: begun.set() or (gate.wait() and None))
    begin.set()
    assert begun.wait(10)

    def work() -> Moment:
        names.append(f"{threading.current_thread() is threading.main_thread()}, {len(inside)} inside")
        return moment

    task = worker.submit(work, after=first, event=moment, is_brief=True)
    threading.Timer(0.05, moment.come.set).start()
    task.wait()
    assert names == ["True, 2 inside"]
    with pytest.raises(ValueError, match="broken"):
        worker.submit(lambda: [][0] if names.clear() else _raise(ValueError("broken")), is_brief=True).wait()
    gate.set()
    worker.close()


def _raise(error: Exception) -> None:
    raise error


def test_ctrl_c_while_waiting_is_no_failure_of_the_task() -> None:
    class Interrupted(Moment):
        def synchronize(self) -> None:
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            super().synchronize()

    worker, moment = Worker("test"), Interrupted()
    task = worker.submit(lambda: moment)
    while task._end is None:
        time.sleep(0.001)
    with pytest.raises(KeyboardInterrupt):
        task.wait()
    assert not task.is_over()
    moment.come.set()
    worker.wait()
    task.wait()
    worker.close()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT is what it is at a keyboard: a job in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_is_heard_where_what_is_brief_may_not_begin_yet() -> None:
    class Interrupted(Moment):
        def synchronize(self) -> None:
            if threading.current_thread() is threading.main_thread():
                self.come.set()
                signal.raise_signal(signal.SIGINT)
            super().synchronize()

    worker, begin = held_worker()
    log: list[str] = []
    task = worker.submit(noting(log, "done"), event=Interrupted(), is_brief=True)
    with pytest.raises(KeyboardInterrupt):
        task.wait()
    assert not task.is_over()
    begin.set()
    worker.wait()
    assert log == ["done"]
    worker.close()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_leaves_nothing_behind_that_the_waiting_thread_has_begun() -> None:
    class Interrupted(Moment):
        def synchronize(self) -> None:
            super().synchronize()
            if threading.current_thread() is threading.main_thread():
                signal.raise_signal(signal.SIGINT)  # it came meanwhile

    worker, begin = held_worker()
    moment = Interrupted()
    task = worker.submit(lambda: moment, is_brief=True)
    moment.come.set()
    with pytest.raises(KeyboardInterrupt):
        task.wait()
    begin.set()
    other = threading.Thread(target=worker.wait, daemon=True)
    other.start()
    other.join(10)
    assert not other.is_alive()
    task.wait()
    worker.close()


def test_an_error_reaches_everybody_who_waits_and_no_one_else() -> None:
    worker = Worker("test")

    def fail() -> None:
        raise ValueError("broken")

    failing = worker.submit(fail)
    after = worker.submit(lambda: None, after=failing)
    late = LateEvent(failing, lambda: Moment())
    for wait in (failing.wait, failing.wait, after.wait, late.wait, late.synchronize, TaskEvent(failing).wait):
        with pytest.raises(ValueError, match="broken"):
            wait()
    assert not late.is_over()
    worker.submit(lambda: None).wait()
    worker.close()


def test_a_failing_device_leaves_nobody_waiting() -> None:
    class Broken(Moment):
        def synchronize(self) -> None:
            raise RuntimeError("device gone")

    class BrokenLater(Broken):
        def is_over(self) -> bool:
            raise RuntimeError("device gone")

    worker = Worker("test")
    for moment in (Broken(), BrokenLater()):
        with pytest.raises(RuntimeError, match="device gone"):
            worker.submit(lambda moment=moment: moment).wait()  # type: ignore[misc]
        with pytest.raises(RuntimeError, match="device gone"):  # before it begins
            worker.submit(lambda: None, event=moment).wait()
    worker.close()


def test_a_thread_that_dies_leaves_nobody_waiting() -> None:
    @contextmanager
    def context():  # type: ignore[no-untyped-def]
        raise RuntimeError("no such device")
        yield

    worker = Worker("test", context=context)
    with pytest.raises(RuntimeError, match="no such device|takes no more tasks"):  # as far as the thread had come
        worker.submit(lambda: None).wait()
    with pytest.raises(RuntimeError, match="takes no more tasks") as refusal:
        worker.submit(lambda: None)
    assert "no such device" in str(refusal.value.__cause__)
    worker.close()


def test_followers_have_run_when_a_task_is_over() -> None:
    worker, gate = held_worker()
    log: list[str] = []
    task = worker.submit(lambda: None)
    task.then(lambda: time.sleep(0.05) or log.append("followed"))
    gate.set()
    task.wait()
    assert log == ["followed"]
    worker.close()


def test_what_follows_a_task_runs_once_whether_early_or_late() -> None:
    worker, gate = held_worker()
    log: list[str] = []
    task = worker.submit(noting(log, "work"))
    task.then(lambda: log.append(threading.current_thread().name))
    gate.set()
    task.wait()
    worker.wait()
    while len(log) < 2:
        time.sleep(0.001)
    task.then(lambda: log.append("here"))
    assert log == ["work", "test-0", "here"]
    worker.close()


def test_a_late_event_is_issued_when_its_task_is_over() -> None:
    worker, gate = held_worker()
    moment = Moment()
    moment.come.set()
    issued: list[str] = []
    task = worker.submit(lambda: None)
    event = LateEvent(task, lambda: issued.append(threading.current_thread().name) or moment)
    assert issued == []
    assert not event.is_over()
    gate.set()
    event.wait()
    assert issued == ["test-0"]
    assert event.is_over()
    assert LateEvent(task, lambda: moment).is_over()
    worker.close()


def test_threads_work_side_by_side_inside_their_context() -> None:
    entered: list[str] = []

    @contextmanager
    def context():  # type: ignore[no-untyped-def]
        entered.append(threading.current_thread().name)
        yield
        entered.append("left")

    worker = Worker("test", num_threads=2, context=context)
    barrier = threading.Barrier(2)
    tasks = [worker.submit(lambda: (barrier.wait(5), None)[1]) for _ in range(2)]
    for task in tasks:
        task.wait()
    worker.close()
    assert sorted(entered[:2]) == ["test-0", "test-1"]
    assert entered[2:] == ["left", "left"]


def test_work_is_done_and_threads_end_when_the_worker_goes() -> None:
    gc.collect()  # ends the threads of what other tests have left
    before = threading.active_count()
    done: list[int] = []
    worker = Worker("test")
    for i in range(20):
        worker.submit(lambda i=i: done.append(i))  # type: ignore[misc]
    gone = weakref.ref(worker)
    del worker
    gc.collect()
    assert gone() is None
    while threading.active_count() > before:
        time.sleep(0.001)
    assert done == list(range(20))


def test_tensors_of_finished_work_are_not_kept() -> None:
    class Big:
        pass

    worker = Worker("test")
    big = Big()
    gone = weakref.ref(big)

    def use(x: Big) -> Callable[[], None]:
        return lambda: None if x else None

    task: Task = worker.submit(use(big))
    del big
    task.wait()
    worker.submit(lambda: None).wait()
    gc.collect()
    assert gone() is None
    worker.close()


@pytest.mark.parametrize("ending", ["", full("del worker\n")])
def test_the_interpreter_ends_with_work_under_way(ending: str) -> None:
    code = (
        "import time\n"
        "from lightning_elixir.core.worker import Worker\n"
        "worker = Worker('test')\n"
        "for i in range(3): worker.submit(lambda i=i: time.sleep(0.05) or print(i, flush=True))\n" + ending
    )
    done = run(code)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["0", "1", "2"], "")


def test_a_held_task_waits_for_its_release_and_keeps_no_thread_from_others() -> None:
    worker, log = Worker("test"), []
    held = worker.submit(noting(log, "held"), order=-1.0, is_held=True)
    worker.submit(noting(log, "other")).wait()
    after = worker.submit(noting(log, "after"), after=held)
    time.sleep(0.02)
    assert log == ["other"]
    assert not held.is_over()
    held.release()
    after.wait()
    assert log == ["other", "held", "after"]
    worker.close()


def test_a_worker_ends_when_held_tasks_are_released() -> None:
    worker, log = Worker("test"), []
    held = worker.submit(noting(log, "held"), is_held=True)
    threading.Timer(0.05, held.release).start()
    worker.close()
    assert log == ["held"]


def test_a_held_task_may_be_cancelled() -> None:
    worker = Worker("test")
    held = worker.submit(lambda: None, is_held=True)
    held.cancel()
    assert isinstance(held.error, CancelledError)
    worker.close()


def test_what_is_held_is_dropped_at_the_end_if_nobody_wants_it() -> None:
    worker = Worker("test")
    held = worker.submit(lambda: None, is_held=True)
    after = worker.submit(lambda: None, after=held)
    start_s = time.monotonic()
    worker.close(drops_held=True)
    assert time.monotonic() - start_s < 10
    with pytest.raises(CancelledError):
        held.wait()
    with pytest.raises(CancelledError):
        after.wait()


@pytest.mark.full
def test_ctrl_c_after_any_call_leaves_no_lock_taken() -> None:
    """Where Python runs handlers, after calls and where functions begin, one after the other."""
    code = """
import faulthandler, signal, sys, time
from lightning_elixir.core.signals import deferred
from lightning_elixir.core.worker import LateEvent, Worker

class Moment:
    def wait(self): pass

def use(worker):
    with deferred():
        task = worker.submit(lambda: time.sleep(0.001), is_held=True)
        task.then(lambda: None)
        task.release()
    late = LateEvent(task, Moment)
    with deferred():
        worker.submit(lambda: None, is_held=True).cancel()
    worker.submit(lambda: None, after=task)
    late.wait()
    worker.wait()

def interrupt(number):
    left = [number]
    def look(frame, what, argument):
        if what in ("call", "c_return") and frame.f_code is not interrupt.__code__:
            left[0] -= 1
            if not left[0]:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)
    return look, left

signal.signal(signal.SIGINT, signal.default_int_handler)
worker, number, is_over = Worker("test"), 0, False
use(worker)
while not is_over:
    number += 1
    faulthandler.dump_traceback_later(10, exit=True)
    look, left = interrupt(number)
    try:
        sys.setprofile(look)
        use(worker)
        sys.setprofile(None)
        is_over = left[0] > 0
    except KeyboardInterrupt:
        sys.setprofile(None)
    worker.wait()
worker.close()
print(number)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) > 50


def test_threads_that_rest_begin_again() -> None:
    before = set(threading.enumerate())
    worker, gate = held_worker(num_threads=2)
    log: list[str] = []
    first = worker.submit(noting(log, "a"))
    threading.Timer(0.05, gate.set).start()
    worker.rest()
    assert log == ["a"]  # what was asked for is done
    left = {t for t in threading.enumerate() if t not in before and not isinstance(t, threading.Timer)}
    assert not left
    worker.rest()  # nothing to do
    second = worker.submit(noting(log, "b"), after=first)
    second.wait()
    first.wait()
    assert log == ["a", "b"]
    reference = weakref.ref(worker._threads[0])
    del worker
    gc.collect()
    for thread in [t for t in (reference(),) if t is not None]:
        thread.join(5.0)  # it ends with its worker, as the first ones would have
        assert not thread.is_alive()


def test_an_event_that_has_come_is_not_asked_again() -> None:
    """To ask a device takes time, and those who wait are many."""

    class Counting:
        def __init__(self) -> None:
            self.num_asked = 0

        def wait(self) -> None:
            return

        def synchronize(self) -> None:
            return

        def is_over(self) -> bool:
            self.num_asked += 1
            return True

    worker = Worker("counted")
    gate = threading.Event()
    first = worker.submit(lambda: gate.wait(20) and None)
    events = [Counting() for _ in range(20)]
    tasks = [worker.submit(lambda: None, event=event, order=float(i)) for i, event in enumerate(events)]
    gate.set()
    for task in (first, *tasks):
        task.wait()
    worker.close()
    assert [event.num_asked for event in events] == [1] * 20
