"""Host memory that is made ahead."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame

from lightning_elixir.core import host_memory
from lightning_elixir.core.device import CpuDevice
from lightning_elixir.core.host_memory import Extent, HostMemory

FLOATS = Extent(1000, torch.float32)
LONGEST_S = 20.0


class Device(CpuDevice):
    """Notes what it makes, and has threads wait while `gate` is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.lock_gate = threading.Event()
        self.lock_gate.set()
        self.lock_niceness: list[int] = []
        self.by_threads: list[Tensor] = []
        self.locked: list[int] = []  # addresses
        self.num_by_caller = self.num_begun = 0
        self.fails = False

    def host_zeros(self, numel: int, dtype: torch.dtype, *, is_locked: bool = True) -> Tensor:
        if threading.current_thread() is threading.main_thread():
            self.num_by_caller += 1
            return super().host_zeros(numel, dtype)
        self.num_begun += 1
        assert self.gate.wait(LONGEST_S)
        if self.fails:
            raise MemoryError("none left")
        tensor = super().host_zeros(numel, dtype)
        self.by_threads.append(tensor)
        return tensor

    def lock(self, tensor: Tensor) -> None:
        assert self.lock_gate.wait(LONGEST_S)
        if tensor.data_ptr() in self.locked:
            return
        self.locked.append(tensor.data_ptr())
        self.lock_niceness.append(_niceness())


def _niceness() -> int:
    """Of this thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def memory(device: Device) -> Iterator[HostMemory]:
    memory = HostMemory(device, 1)
    yield memory
    device.gate.set()
    memory.let_go()
    assert not [t for t in threading.enumerate() if "elixir-memory" in t.name]


def _until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LONGEST_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_what_was_prepared_is_given_once_each(memory: HostMemory, device: Device) -> None:
    memory.prepare([FLOATS, Extent(7, torch.bfloat16), FLOATS, Extent(0, torch.float32)])
    _until(lambda: memory.bytes_ahead() == 8000 + 14)
    given = [memory.zeros(*FLOATS[:2]), memory.zeros(7, torch.bfloat16), memory.zeros(*FLOATS[:2])]
    assert {t.data_ptr() for t in given} == {t.data_ptr() for t in device.by_threads}
    assert device.num_by_caller == memory.bytes_ahead() == 0
    given.append(memory.zeros(*FLOATS[:2]))
    assert device.num_by_caller == 1
    assert [Extent(t.numel(), t.dtype) for t in given] == [FLOATS, Extent(7, torch.bfloat16), FLOATS, FLOATS]
    assert not any(t.any() for t in given)


def test_what_no_thread_has_begun_is_made_by_the_caller(memory: HostMemory, device: Device) -> None:
    device.gate.clear()
    memory.prepare([FLOATS] * 4)
    _until(lambda: device.num_begun == 2)
    assert (memory.bytes_ahead(), memory.bytes_begun()) == (0, 8000)
    given = [memory.zeros(*FLOATS[:2]), memory.zeros(*FLOATS[:2])]
    assert device.num_by_caller == 2
    device.gate.set()
    given += [memory.zeros(*FLOATS[:2]), memory.zeros(*FLOATS[:2])]  # are waited for
    assert device.num_by_caller == device.num_begun == 2
    assert len({t.data_ptr() for t in given}) == 4


def test_what_is_not_asked_for_goes_back(memory: HostMemory, device: Device) -> None:
    memory.prepare([FLOATS, FLOATS])
    _until(lambda: memory.bytes_ahead() == 8000)
    kept, left = memory.zeros(*FLOATS[:2]), [weakref.ref(t) for t in device.by_threads]
    device.by_threads.clear()
    memory.drop()
    assert memory.bytes_ahead() == 0
    assert sorted(ref() is kept for ref in left) == [False, True]
    assert sorted(ref() is None for ref in left) == [False, True]
    memory.prepare([FLOATS])  # and again
    _until(lambda: memory.bytes_ahead() == 4000)


def test_what_is_under_way_is_not_made_twice(memory: HostMemory, device: Device) -> None:
    device.gate.clear()
    memory.prepare([FLOATS] * 3)
    _until(lambda: device.num_begun == 2)
    memory.expect([FLOATS, Extent(7, torch.bfloat16), *[FLOATS] * 4])
    device.gate.set()
    _until(lambda: memory.bytes_ahead() == 5 * 4000 + 14)
    memory.expect([FLOATS, Extent(7, torch.bfloat16)])
    assert memory.bytes_begun() == 4000 + 14
    memory.expect([])
    assert memory.bytes_begun() == 0


def test_what_is_not_expected_any_more_is_not_made(memory: HostMemory, device: Device) -> None:
    device.gate.clear()
    memory.prepare([FLOATS] * 5)
    _until(lambda: device.num_begun == 2)
    memory.expect([FLOATS])
    device.gate.set()
    _until(lambda: memory.bytes_ahead() == 4000)
    memory.drop()
    assert device.num_begun == 2


def test_what_is_ready_is_kept_before_what_is_not(memory: HostMemory, device: Device) -> None:
    device.fails = True
    memory.prepare([FLOATS] * 3)
    memory._worker.wait()
    device.fails = False
    memory.prepare([FLOATS] * 2)
    _until(lambda: memory.bytes_ahead() == 8000)
    memory.expect([FLOATS] * 2)
    assert memory.bytes_ahead() == 8000


def test_nothing_keeps_those_that_asked(memory: HostMemory, device: Device) -> None:
    """No error is raised and caught on the way, whose traceback would."""

    class User:
        pass

    def ask() -> weakref.ref[User]:
        user = User()
        memory.zeros(*FLOATS[:2])
        return weakref.ref(user)

    gc.disable()
    try:
        device.gate.clear()
        memory.prepare([FLOATS] * 3)
        _until(lambda: device.num_begun == 2)
        assert ask()() is None  # the third one was cancelled
    finally:
        gc.enable()


def test_a_thread_that_gets_none_harms_nothing(memory: HostMemory, device: Device) -> None:
    device.fails = True
    memory.prepare([FLOATS])
    _until(lambda: device.num_begun == 1)
    memory._worker.wait()
    assert memory.bytes_begun() == 0
    assert memory.zeros(*FLOATS[:2]).numel() == 1000
    assert device.num_by_caller == 1


def test_the_last_of_the_host_is_left(memory: HostMemory, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 2 * 2**30 + 3999)
    memory.prepare([FLOATS])
    memory._worker.wait()
    assert memory.bytes_ahead() == device.num_begun == 0
    memory.zeros(*FLOATS[:2])
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 2 * 2**30 + 4000)
    memory.prepare([FLOATS])
    memory._worker.wait()
    assert memory.bytes_ahead() == 4000


@pytest.mark.parametrize(
    ("every_bytes", "every_s", "least", "most"), [(2**30, 1e9, 1, 2), (0, 1e9, 8, 8), (2**30, 0.0, 8, 8)]
)
def test_a_look_is_enough_for_what_is_made_soon_after(
    memory: HostMemory, monkeypatch: pytest.MonkeyPatch, every_bytes: int, every_s: float, least: int, most: int
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: looks.append(1) or 2**40)
    monkeypatch.setattr(host_memory, "_LOOK_EVERY_BYTES", every_bytes)
    monkeypatch.setattr(host_memory, "_LOOK_EVERY_S", every_s)
    memory.prepare([FLOATS] * 8)
    memory._worker.wait()
    assert memory.bytes_ahead() == 8 * 4000
    assert least <= len(looks) <= most  # two threads may look at once


def test_what_was_prepared_gives_way_to_what_is_asked_for(
    memory: HostMemory, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host has no room for both, and what comes has another size."""
    memory.prepare([FLOATS, FLOATS])
    _until(lambda: memory.bytes_ahead() == 8000)
    left = [weakref.ref(t) for t in device.by_threads]
    device.by_threads.clear()
    memory.zeros(7, torch.float32)  # there is enough for all
    assert memory.bytes_ahead() == 8000
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 2 * 2**30)
    kept = memory.zeros(*FLOATS[:2])  # takes nothing more
    assert [ref() is kept for ref in left].count(True) == 1
    assert memory.bytes_ahead() == 4000
    memory.zeros(7, torch.float32)
    assert memory.bytes_ahead() == 0
    assert [ref() is None for ref in left].count(True) == 1


def test_locking_keeps_no_other_memory_waiting(memory: HostMemory, device: Device) -> None:
    device.lock_gate.clear()
    memory.prepare([FLOATS, FLOATS, FLOATS._replace(is_locked=False)])
    _until(lambda: memory.bytes_ahead() == 12000)
    assert memory.zeros(*FLOATS[:2], is_locked=False).data_ptr() not in device.locked
    opening = threading.Timer(0.05, device.lock_gate.set)
    opening.start()
    locked = [memory.zeros(*FLOATS[:2]), memory.zeros(*FLOATS[:2])]
    opening.join()
    assert sorted(device.locked) == sorted(tensor.data_ptr() for tensor in locked)
    assert device.num_by_caller == 0


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own elsewhere")
def test_locking_stands_behind_nothing(memory: HostMemory, device: Device) -> None:
    """Whatever the driver is asked for waits until one is locked."""
    memory.prepare([FLOATS] * 3)
    _until(lambda: len(device.lock_niceness) == 3)
    assert set(device.lock_niceness) == {_niceness()}


UNLOCKED = FLOATS._replace(is_locked=False)


def test_what_is_asked_for_is_locked_if_need_be(memory: HostMemory, device: Device) -> None:
    memory.prepare([FLOATS, UNLOCKED, UNLOCKED])
    _until(lambda: memory.bytes_ahead() == 12000 and len(device.locked) == 1)
    unlocked = memory.zeros(*FLOATS[:2], is_locked=False)
    assert unlocked.data_ptr() not in device.locked  # the other one is for what is to be locked
    locked = [memory.zeros(*FLOATS[:2]), memory.zeros(*FLOATS[:2])]
    assert {tensor.data_ptr() for tensor in locked} <= set(device.locked)
    assert unlocked.data_ptr() not in device.locked
    assert device.num_by_caller == 0


def test_what_is_there_is_locked_once_that_is_expected(memory: HostMemory, device: Device) -> None:
    memory.prepare([UNLOCKED] * 3)
    _until(lambda: memory.bytes_ahead() == 12000)
    memory.expect([UNLOCKED, FLOATS, FLOATS, FLOATS])
    _until(lambda: memory.bytes_ahead() == 16000 and len(device.locked) == 3)
    memory.expect([UNLOCKED, UNLOCKED])  # what is locked serves as well
    assert memory.bytes_ahead() == 8000
    given = [memory.zeros(*FLOATS[:2], is_locked=False) for _ in range(2)]
    assert len({tensor.data_ptr() for tensor in given}) == 2
    assert device.num_by_caller == 0
    assert len(device.locked) == 3


@pytest.mark.parametrize("give_back", [lambda memory: memory.expect([]), HostMemory.drop], ids=["expect", "drop"])
def test_what_is_given_back_while_it_is_made_is_not_locked(
    memory: HostMemory, device: Device, give_back: Callable[[HostMemory], None]
) -> None:
    device.gate.clear()
    memory.prepare([FLOATS] * 2)
    _until(lambda: device.num_begun == 2)
    opening = threading.Timer(0.05, device.gate.set)
    opening.start()
    give_back(memory)
    opening.join()
    memory.settle()
    assert device.locked == []


def test_all_is_given_back_when_it_is_settled(memory: HostMemory, device: Device) -> None:
    device.lock_gate.clear()
    memory.prepare([FLOATS])
    _until(lambda: memory.bytes_ahead() == 4000)
    left = weakref.ref(device.by_threads.pop())  # is being locked
    memory.prepare([Extent(7, torch.bfloat16)])
    opening = threading.Timer(0.05, device.lock_gate.set)
    opening.start()
    memory.expect([Extent(7, torch.bfloat16)])
    memory.settle()
    assert left() is None
    opening.join()


def test_what_is_locked_is_left_to_those_that_ask_for_it(memory: HostMemory, device: Device) -> None:
    memory.prepare([FLOATS])
    _until(lambda: len(device.locked) == 1)
    device.gate.clear()
    memory.prepare([UNLOCKED] * 3)
    _until(lambda: device.num_begun == 3)
    assert memory.zeros(*FLOATS[:2], is_locked=False).data_ptr() not in device.locked
    assert device.num_by_caller == 1
    assert memory.zeros(*FLOATS[:2]).data_ptr() in device.locked
    assert device.num_by_caller == 1


def _kept(memory: HostMemory, number: int = 3) -> list[int]:
    """That many tensors that are full and stay; where they are."""
    tensors = [memory.zeros(*FLOATS[:2]).fill_(1.0) for _ in range(number)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    memory.keep(tensors, 4000 * number)
    assert not tensors
    assert memory.bytes_ahead() == memory.bytes_begun() == 4000 * number
    return addresses


def test_what_stays_under_the_hook_of_the_compiler(memory: HostMemory, device: Device) -> None:
    """It calls functions in another way, with one reference more, as long as it is set."""
    before = set_eval_frame(False)
    try:
        assert len(_kept(memory)) == 3
    finally:
        set_eval_frame(before)


def test_what_stays_is_given_again_as_zeros(memory: HostMemory, device: Device) -> None:
    addresses = _kept(memory)
    device.locked.clear()
    memory.drop()  # what was prepared, and no more
    unlocked = memory.zeros(*FLOATS[:2], is_locked=False)
    assert device.locked == []
    memory.prepare([UNLOCKED])
    _until(lambda: memory.bytes_ahead() == 8000)
    given = [unlocked, memory.zeros(*FLOATS[:2], is_locked=False), memory.zeros(*FLOATS[:2])]
    assert sorted(t.data_ptr() for t in given) == sorted(addresses)
    assert device.locked == [given[2].data_ptr()]
    assert not any(t.any() for t in given)
    assert (device.num_by_caller, device.num_begun, memory.bytes_ahead()) == (3, 0, 0)
    memory.zeros(999, torch.float32)
    assert device.num_by_caller == 4


def test_what_others_refer_to_does_not_stay(memory: HostMemory) -> None:
    named, viewed, free = (memory.zeros(*FLOATS[:2]).fill_(1.0) for _ in range(3))
    view = viewed[2:4]
    with torch.inference_mode():  # where a part does not refer to the whole
        part = torch.ones(2000)[:1000]
    addresses, left = [free.data_ptr()], [named, viewed, free, part, named]
    del viewed, free, part
    memory.keep(left, 2**20)
    assert memory.bytes_ahead() == 4000
    assert [memory.zeros(*FLOATS[:2]).data_ptr()] == addresses
    assert named.all()
    assert view.all()


def test_as_much_stays_as_may(memory: HostMemory) -> None:
    _kept(memory, 2)
    left = [memory.zeros(500, torch.float32) for _ in range(4)]
    freed = [weakref.ref(tensor) for tensor in left]
    memory.keep(left, 11_000)
    memory.settle()
    assert memory.bytes_ahead() == 10_000
    assert sum(reference() is None for reference in freed) == 3
    memory.keep([], 7_000)  # less than has stayed
    memory.settle()
    assert memory.bytes_ahead() <= 7_000
    memory.keep([], 0)
    memory.settle()
    assert memory.bytes_ahead() == 0
    assert not [t for t in threading.enumerate() if "elixir-memory" in t.name]


def test_what_stays_is_let_go(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    _kept(memory)
    memory.let_go()
    assert memory.bytes_ahead() == 0
    assert not [t for t in threading.enumerate() if "elixir-memory" in t.name]
    _kept(memory)
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 2**20)
    memory.prepare([FLOATS])  # it is there, however little is free
    memory.zeros(7, torch.bfloat16)
    assert memory.bytes_begun() == 0


def test_what_is_overwritten_is_given_as_it_is(memory: HostMemory, device: Device) -> None:
    _kept(memory)
    kept = memory.zeros(*FLOATS[:2], is_overwritten=True)
    memory.prepare([UNLOCKED])
    _until(lambda: memory.bytes_ahead() == 8000)
    prepared = memory.zeros(*FLOATS[:2], is_overwritten=True)
    assert device.num_by_caller == 3
    assert kept.all()
    assert prepared.all()
    assert not memory.zeros(*FLOATS[:2]).any()
