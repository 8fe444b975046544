"""Ctrl-C waits for what cannot be taken back; a second one does not."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from lightning_elixir.core.signals import DeferringLock, arm, deferred, deferring, disarm


@pytest.fixture(autouse=True)
def _python_handles_ctrl_c() -> Iterator[None]:
    """A job in the background is started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def send(number: signal.Signals = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def send_and_wait() -> None:
    send()
    time.sleep(5)


def test_it_comes_at_the_end() -> None:
    done = []

    def work() -> None:
        with deferred():
            send()
            done.append("work")

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["work"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_second_comes_at_once() -> None:
    done = []

    def work() -> None:
        with deferred():
            send()
            send()
            done.append("work")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == []


@pytest.mark.parametrize("is_armed", [False, True])
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_function_is_whole(is_armed: bool, is_inside: bool) -> None:
    done: list[Any] = []

    def work(*args: Any) -> None:
        send()
        done.append(args)

    call = deferring(work)

    def inside() -> None:
        with deferred():
            call(1, 2)
            done.append("outer")

    if is_armed:
        arm()
    try:
        with pytest.raises(KeyboardInterrupt):
            inside() if is_inside else call(1, 2)
        assert done == [(1, 2), *(["outer"] if is_inside else [])]
        with pytest.raises(KeyboardInterrupt):  # and from here on they come at once again
            send_and_wait()
    finally:
        if is_armed:
            disarm()


def test_a_function_that_raises_leaves_signals_as_they_were() -> None:
    def work() -> None:
        raise ValueError("inside")

    arm()
    try:
        with pytest.raises(ValueError, match="inside"):
            deferring(work)()
        with pytest.raises(KeyboardInterrupt):
            send_and_wait()
    finally:
        disarm()


@pytest.mark.parametrize("comes", [False, True])
def test_a_function_that_disarms_leaves_handlers_as_they_were(comes: bool) -> None:
    """As a backward does that fails at its first gradient."""
    before = signal.getsignal(signal.SIGINT)
    arm()

    def work() -> None:
        if comes:
            send()
        disarm()

    with pytest.raises(KeyboardInterrupt) if comes else nullcontext():
        deferring(work)()
    assert signal.getsignal(signal.SIGINT) is before


def test_inside_of_itself_the_outermost_decides(caplog: pytest.LogCaptureFixture) -> None:
    done = []

    def work() -> None:
        with deferred():
            with deferred():
                send()
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["outer"]
    assert caplog.text.count("half done is ended first") == 1


def test_own_handlers_are_called_and_errors_stay() -> None:
    seen: list[int] = []

    def work() -> None:
        with deferred():
            send(signal.SIGUSR1)
            assert seen == []
            raise ValueError("enough")

    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(ValueError, match="enough"):
            work()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]


def test_signals_without_a_handler_and_other_threads_are_left_alone() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    found: list[Any] = []

    def look() -> None:
        with deferred():
            found.append(signal.getsignal(signal.SIGINT))

    try:
        with deferred():
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [signal.getsignal(signal.SIGINT)]


def test_what_a_lock_guards_is_whole() -> None:
    lock, done = DeferringLock(), []

    def work() -> None:
        with lock:
            with lock:  # as the garbage collector may
                send()
            done.append("work")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["work"]
    assert _is_free(lock)


def test_the_second_signal_ends_the_wait_for_a_lock_and_defers_nothing_after_it() -> None:
    lock, done = DeferringLock(), []
    is_taken, may_go = threading.Lock(), threading.Lock()
    is_taken.acquire()
    may_go.acquire()

    def hold() -> None:
        with lock:
            is_taken.release()
            may_go.acquire()

    def send_twice() -> None:
        for _ in range(2):
            time.sleep(0.3)  # two that wait for their handler at the same time are one
            send()

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    is_taken.acquire()
    sender = threading.Thread(target=send_twice)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt), lock:
            done.append("inside")
        assert done == []
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        sender.join()
        may_go.release()
        holder.join()
    assert _is_free(lock)


def _is_free(lock: DeferringLock) -> bool:
    found = []

    def take() -> None:
        with lock:
            found.append(True)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(20)
    return bool(found)
