"""Ctrl-C waits for what cannot be taken back; a second one does not."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_elixir.core.signals import deferred


@pytest.fixture(autouse=True)
def _python_handles_ctrl_c() -> Iterator[None]:
    """A job in the background is started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def send(number: signal.Signals = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


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
