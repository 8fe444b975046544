"""Training whose gradients are added up on a thread, which takes long, is held up, or fails."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_elixir.core import device as core_device
from lightning_elixir.core.worker import Task
from lightning_elixir.errors import StateError
from lightning_elixir.plan.types import UpdateTiming
from lightning_elixir.runtime import accumulation
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers import streamed_updates as streamed
from tests.helpers import update_timing as timed
from tests.helpers.streamed_updates import CPU, HOWS, How, Result, assert_same, result_of, use_small_slots
from tests.helpers.zoo import ZOO

ACCUMULATED = {name: how for name, how in HOWS.items() if how.micro_batches > 1} | {
    "fp32_accumulated": How(dtype=torch.float32, micro_batches=3),
    "bf16_true_accumulated": How(master=False, micro_batches=2),
    "scaled_accumulated": How(scale=64.0, overflow_at=2, micro_batches=2),
    "unused_accumulated": How(name="branching", micro_batches=2),
    "late_accumulated": How(name="checkpoint_reentrant", micro_batches=2),
}


AFTER, BEHIND, INSIDE = UpdateTiming.AFTER_BACKWARD, UpdateTiming.BEHIND_FORWARD, UpdateTiming.INSIDE_BACKWARD


class Additions:
    """What the thread does, and when."""

    def __init__(self, seconds: float) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.seconds = seconds
        self.num_done = self.num_running = 0
        self.names: set[str] = set()
        self.failing_at = -1
        self._times = random.Random(0)
        self._run = accumulation.add_up

    def __call__(self, total: Tensor, grad: Tensor, addition: accumulation.Addition) -> None:
        self.num_running += 1
        try:
            self.names.add(threading.current_thread().name)
            assert self.gate.wait(20)
            time.sleep(self._times.random() * self.seconds)
            self.num_done += 1
            if self.num_done == self.failing_at:
                raise RuntimeError("no sum today")
            self._run(total, grad, addition)
        finally:
            self.num_running -= 1


@contextmanager
def additions(seconds: float = 0.003, num_buffers: int = 3) -> Iterator[Additions]:
    """The thread's additions take long, and not all the same: whoever does not wait for them sees half a sum."""
    with pytest.MonkeyPatch.context() as patch:
        slow = Additions(seconds)
        patch.setattr(accumulation, "add_up", slow)
        patch.setattr("lightning_elixir.plan.memory.STAGING_BUFFERS", num_buffers)
        yield slow


def new_training(
    how: How,
    site: str,
    device: torch.device,
    *,
    is_known: bool = False,
    timing: UpdateTiming = AFTER,
    is_reusing: bool = False,
    **options: Any,
) -> tuple[ElixirModule, ElixirOptimizer]:
    module, optimizer = timed.new_training(how, site, device, timing, is_reusing=is_reusing, **options)
    module.engine.reducer.landing.expect_accumulation(is_known)
    return module, optimizer


def train(
    how: How, site: str, device: torch.device = CPU, *, micro_batches: Sequence[int] = (), rank: int = 0, **options: Any
) -> Result:
    """`micro_batches`: of each step, where they differ."""
    module, optimizer = new_training(how, site, device, **options)
    norms, skipped = [], []
    for step in range(how.steps):
        this = replace(how, micro_batches=micro_batches[step]) if micro_batches else how
        norms.append(streamed.train_step(module, optimizer, this, step, rank))
        skipped.append(optimizer.is_step_skipped)
    result = result_of(module, optimizer)
    module.close()
    return replace(result, norms=[n for n in norms if n is not None], skipped=skipped)


def check_bits(
    how: How, device: torch.device, sites: Sequence[str] = ("host", "mixed"), *, num_buffers: int = 3, **options: Any
) -> None:
    expected = train(how, "gpu", device)
    for site in sites:
        for is_known in (False, True):
            with additions(0.001, num_buffers) as slow:
                actual = train(how, site, device, is_known=is_known, **options)
            assert slow.names == {"elixir-gradients-0"}
            assert_same(actual, expected)
            assert str(actual.norms) == str(expected.norms)


def train_rank(how: How, site: str, options: dict[str, Any], device_type: str = "cpu") -> Result:
    with pytest.MonkeyPatch.context() as patch, additions(0.001, 2):
        use_small_slots(patch)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
        return train(how, site, device, rank=rank, world_size=world_size, **options)


def check_backward_goes_on(device: torch.device) -> None:
    """Backward returns while nothing has been added; whoever reads the sum waits."""
    how = HOWS["accumulated"]
    expected, others = new_training(how, "gpu", device)
    with additions(0.005, 100) as held:
        module, optimizer = new_training(how, "host", device, is_known=True)
        num_chunks = len(module.engine.chunks)
        for micro in range(2):
            for m, o in ((module, optimizer), (expected, others)):
                o.backward(ZOO[how.name].loss(m, micro))
            if micro == 0:
                module.engine.synchronize()
                assert held.num_done == num_chunks
                held.gate.clear()
        norms: list[float] = []
        reading = threading.Thread(target=lambda: norms.append(float(optimizer.grad_norm())))
        reading.start()
        reading.join(0.1)
        assert reading.is_alive()
        assert held.num_done == num_chunks
        held.gate.set()
        reading.join(20)
        assert held.num_done == 2 * num_chunks
    assert norms == [float(others.grad_norm())]
    grads = module.full_grads()
    assert [k for k, v in expected.full_grads().items() if not torch.equal(grads[k], v)] == []
    module.close()
    expected.close()


@dataclass
class Held:
    """Gradients that nobody adds up."""

    tasks: set[Task] = field(default_factory=set)
    seen: list[tuple[int, int]] = field(default_factory=list)
    """When the first was waited for: how many had set out, and the bytes asked for."""


@contextmanager
def held_until_waited_for(num_bytes: Callable[[], int]) -> Iterator[Held]:
    """No gradient is brought to its sum before somebody waits for one to be."""
    held, gate = Held(), threading.Event()
    submit, join = accumulation.HostSums._submit, Task.join

    def held_up(self: accumulation.HostSums, grad: Tensor, work: Callable[[Tensor, Tensor], None], earlier: Any) -> Any:
        def when_open(staged: Tensor, blocks: Tensor) -> None:
            assert gate.wait(60)
            work(staged, blocks)

        sent, event = submit(self, grad, when_open, earlier)
        held.tasks.add(event.task)
        return sent, event

    def seen_waiting(self: Task) -> None:
        if self in held.tasks and not gate.is_set():
            held.seen.append((len(held.tasks), num_bytes()))
            gate.set()
        join(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accumulation.HostSums, "_submit", held_up)
        patch.setattr(Task, "join", seen_waiting)
        try:
            yield held
        finally:
            gate.set()


@contextmanager
def counted_host_memory(device: torch.device) -> Iterator[list[tuple[int, torch.dtype]]]:
    kind = core_device.CpuDevice if device.type == "cpu" else core_device.CudaDevice
    real: Callable[..., Tensor] = kind.host_zeros
    taken: list[tuple[int, torch.dtype]] = []

    def counting(self: Any, numel: int, dtype: torch.dtype, *, is_locked: bool = True) -> Tensor:
        taken.append((numel, dtype))
        return real(self, numel, dtype, is_locked=is_locked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "host_zeros", counting)
        yield taken


def check_host_memory_stays(device: torch.device, timing: UpdateTiming, *, is_known: bool) -> None:
    how = HOWS["accumulated"]
    module, optimizer = new_training(how, "host", device, is_known=is_known, timing=timing)
    num_chunks = len(module.engine.chunks)
    with counted_host_memory(device) as taken:
        optimizer.backward(ZOO[how.name].loss(module, 0))
        first = list(taken)
        optimizer.backward(ZOO[how.name].loss(module, 1))
        grads = [(numel, dtype) for numel, dtype in taken if dtype is not torch.uint8]
        wide = [dtype for _, dtype in grads].count(torch.float32)
        narrow = [dtype for _, dtype in grads].count(torch.bfloat16)
        assert (wide, narrow) == (num_chunks, 0 if is_known else num_chunks)
        assert len(taken) - len(grads) == 3  # the staging buffers
        if is_known:
            assert taken == first
        optimizer.step()
        taken.clear()
        for step in range(1, 4):
            streamed.train_step(module, optimizer, how, step)
        assert taken == []
    module.close()


def check_failed_backward(device: torch.device, *, is_known: bool, is_early: bool, is_reusing: bool = False) -> None:
    """In the second micro-batch. With some of its gradients in the sums, all are lost; otherwise none is."""
    how = HOWS["accumulated"]
    module, optimizer = new_training(how, "host", device, is_known=is_known, is_reusing=is_reusing)
    engine = module.engine
    streamed.train_step(module, optimizer, how, 0)
    with additions(0.02) as slow:
        for _ in range(2):
            optimizer.backward(ZOO[how.name].loss(module, 9))
            collect, calls = engine.reducer.collect, []
            last = 1 if is_early else sum(p.requires_grad for p in module.module.parameters()) - 1

            def failing(*args: Any, collect: Any = collect, calls: Any = calls, last: int = last) -> bool:
                result: bool = collect(*args)
                calls.append(1)
                if len(calls) == last:
                    raise RuntimeError("backward stops here")
                return result

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine.reducer, "collect", failing)
                with pytest.raises(RuntimeError, match="backward stops here"):
                    optimizer.backward(ZOO[how.name].loss(module, 77))
            assert engine.has_lost_gradients == (not is_early)
            if is_early:
                break
            assert slow.num_running == 0
            with pytest.raises(StateError, match="zero_grad"):
                optimizer.step()
            optimizer.zero_grad()
        for seed in (10, 11) if is_early else (9, 10, 11):
            optimizer.backward(ZOO[how.name].loss(module, seed))
        optimizer.step()
        for step in range(2, how.steps):
            streamed.train_step(module, optimizer, how, step)
    actual = result_of(module, optimizer)
    module.close()
    module, optimizer = new_training(how, "gpu", device)
    for step in range(how.steps):
        if step == 1:
            for seed in (9, 10, 11):
                optimizer.backward(ZOO[how.name].loss(module, seed))
            optimizer.step()
        else:
            streamed.train_step(module, optimizer, how, step)
    assert_same(actual, result_of(module, optimizer))
    module.close()
