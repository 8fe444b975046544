"""What is different on a GPU, on the CPU: autograd's own thread, transfers that are not over at once, and more threads
that come between."""

from __future__ import annotations

import _thread
import queue
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_elixir.core import device as core_device
from lightning_elixir.core.device import CpuDevice
from tests.fuzz.programs import WATCHERS, Program
from tests.fuzz.run import Outcome, run_program
from tests.helpers.asynchronous import asynchronous

_SWITCH_S = 1e-5
_TRANSFER_S = 1e-3


def watched(program: Program) -> Program:
    """The same, with one rank, and with a thread that reads meanwhile."""
    watcher = program.watcher or WATCHERS[program.seed % len(WATCHERS)]
    return replace(program.on_one_rank(), device="cpu", watcher=watcher)


def run_like_a_gpu(program: Program) -> Outcome:
    """As `run_program`, with what is different on a GPU."""
    with like_a_gpu():
        return run_program(program)


@contextmanager
def like_a_gpu() -> Iterator[None]:
    """Inside, backward runs in a thread that Python has not begun, while its caller waits without Python's lock, and
    events of the device are over some time after they were recorded. What lanes do is done at once all the same: who
    does not wait for it is seen on a GPU only."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        with _backward_in_another_thread(), _late_events():
            yield
    finally:
        sys.setswitchinterval(before_s)


class _LateEvent:
    def __init__(self) -> None:
        self._over_s = time.monotonic() + _TRANSFER_S

    def wait(self) -> None:
        return

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._over_s - time.monotonic()))

    def is_over(self) -> bool:
        return time.monotonic() >= self._over_s


@contextmanager
def _late_events() -> Iterator[None]:
    with (
        mock.patch.object(core_device, "_CpuEvent", _LateEvent),
        asynchronous(),
        mock.patch.object(CpuDevice, "synchronize", _synchronize),
    ):
        yield


def _synchronize(self: CpuDevice) -> None:
    time.sleep(_TRANSFER_S)


class _DeviceThread:
    """Runs one call after the other. Python sees it as it sees autograd's: it has not begun it."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_over = _thread.allocate_lock()
        self._is_over.acquire()
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # and all that it knows
        self._is_over.release()

    def call(self, function: Callable[[], Any]) -> Any:
        """What the function returns, or raises, there."""
        found: list[Any] = []
        errors: list[BaseException] = []
        is_done = _thread.allocate_lock()
        is_done.acquire()

        def run() -> None:
            try:
                found.append(function())
            except BaseException as error:
                errors.append(error)
            finally:
                is_done.release()

        self._calls.put(run)
        is_done.acquire()
        if errors:
            raise errors.pop()
        return found.pop()

    def end(self) -> None:
        self._calls.put(None)
        self._is_over.acquire()


@contextmanager
def _backward_in_another_thread() -> Iterator[None]:
    run_backward = torch.autograd.graph._engine_run_backward
    thread = _DeviceThread()

    def run_there(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1 or torch._C._len_torch_dispatch_stack():
            return run_backward(*args, **kwargs)  # it is there already; or modes, which do not come along
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        is_intercepted = torch._C._is_torch_function_enabled()

        def run() -> Any:
            with ExitStack() as as_here:
                if hooks is not None:
                    as_here.enter_context(saved_tensors_hooks(*hooks))
                if not is_intercepted:
                    as_here.enter_context(torch._C.DisableTorchFunctionSubclass())
                return run_backward(*args, **kwargs)

        return thread.call(run)

    try:
        with (
            mock.patch.object(torch.autograd.graph, "_engine_run_backward", run_there),
            mock.patch.object(torch.autograd, "_engine_run_backward", run_there),
        ):
            yield
    finally:
        thread.end()
