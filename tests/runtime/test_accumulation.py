"""Gradients of several micro-batches, added up in host memory by a thread, give the bits of those added up in place.

The reference keeps gradients on the compute device, where every addition is one operation in its turn. The bodies take
the device, so that `tests/gpu` runs them with real lanes and page-locked memory.
"""

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
from lightning_elixir.plan.memory import STAGING_BUFFERS
from lightning_elixir.plan.types import Tier, UpdateTiming
from lightning_elixir.runtime import accumulation
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.zoo import ZOO, make
from tests.runtime import test_streamed_updates as streamed
from tests.runtime import test_update_timing as timed
from tests.runtime.test_streamed_updates import CPU, HOWS, How, Result, assert_same, result_of, use_small_slots

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
    module.engine.expect_accumulation(is_known)
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


@pytest.mark.parametrize("name", ACCUMULATED)
def test_same_bits(name: str) -> None:
    check_bits(ACCUMULATED[name], CPU)


@pytest.mark.parametrize("name", ["accumulated", "fp32_accumulated"])
@pytest.mark.parametrize("options", [{"timing": BEHIND}, {"is_reusing": True}, {"num_buffers": 1}], ids=str)
def test_same_bits_however_it_is_done(name: str, options: dict[str, Any]) -> None:
    check_bits(ACCUMULATED[name], CPU, ["mixed"], **options)


@pytest.mark.parametrize("site", ["every_site", "streamed_param_on_gpu", "mixed_persistent"])
def test_same_bits_wherever_the_rest_lies(site: str) -> None:
    check_bits(HOWS["accumulated"], CPU, [site], timing=BEHIND)


@pytest.mark.parametrize("name", ["bf16", "bf16_true", "clipped", "clipped_by_value", "unused"])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_number_of_micro_batches_that_changes(name: str, is_known: bool) -> None:
    """Also steps of one, whose gradients are 16 bits wide or widened."""
    how, numbers = HOWS[name], (1, 3, 1, 2)
    expected = train(how, "gpu", micro_batches=numbers)
    with additions(0.001):
        actual = train(how, "mixed", micro_batches=numbers, is_known=is_known)
    assert_same(actual, expected)
    assert actual.norms == expected.norms


@pytest.mark.parametrize("numbers", [(1, 1), (2, 1)])
def test_several_gradients_in_one_backward_are_added_in_their_own_dtype(
    numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As autograd would, though the sum is wider already."""
    rounded = []
    real = accumulation.add_rounded
    monkeypatch.setattr("lightning_elixir.runtime.reducer.add_rounded", lambda *a: (rounded.append(1), real(*a)))
    how = How(name="checkpoint_reentrant", steps=2)
    expected = train(how, "gpu", micro_batches=numbers)
    with additions(0.001):
        assert_same(train(how, "host", micro_batches=numbers, is_known=True), expected)
    assert rounded


def test_several_gradients_in_a_later_backward_are_added_to_the_sum() -> None:
    """That is wider than they are, for good."""
    how = How(name="checkpoint_reentrant")
    results = []
    for site, is_known in (("gpu", False), ("host", False), ("host", True)):
        module, optimizer = new_training(how, site, CPU, is_known=is_known)
        with additions(0.001):
            for seed in range(6):
                module.engine.reducer._expected.clear()  # as if nobody knew how many come
                optimizer.backward(ZOO[how.name].loss(module, seed))
                if seed % 3 == 2:
                    optimizer.step()
        results.append(result_of(module, optimizer))
        module.close()
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.parametrize("site", ["host", "nvme_param"])
def test_what_gradients_are_reduced_in_is_nothing_to_one_rank(site: str) -> None:
    how = replace(HOWS["fp32"], steps=2, micro_batches=2)
    results = []
    for reduce_dtype in (None, torch.bfloat16):
        model = make(how.name)
        inner = streamed.new_optimizer(model, how)
        plan = streamed.plan_for(model, how, site)
        module = ElixirModule(model, plan, dtype=how.dtype, master_weights=how.master, reduce_dtype=reduce_dtype)
        optimizer = ElixirOptimizer(module, inner)
        for number in range(how.steps):
            streamed.train_step(module, optimizer, how, number)
        results.append(result_of(module, optimizer))
        module.close()
    assert_same(results[1], results[0])


def train_rank(how: How, site: str, options: dict[str, Any], device_type: str = "cpu") -> Result:
    with pytest.MonkeyPatch.context() as patch, additions(0.001, 2):
        use_small_slots(patch)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
        return train(how, site, device, rank=rank, world_size=world_size, **options)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("accumulated", {"is_known": True}),
        ("accumulated_clipped", {"timing": BEHIND}),
        ("unused_accumulated", {"is_known": True, "timing": BEHIND}),
        ("late_accumulated", {"enable_distributed_storage": False}),
    ],
)
def test_several_ranks(name: str, options: dict[str, Any], world_size: int) -> None:
    how = ACCUMULATED[name]
    layout = {k: v for k, v in options.items() if k == "enable_distributed_storage"}
    expected = run_ranks(train_rank, world_size, how, "gpu", layout)
    assert_same(run_ranks(train_rank, world_size, how, "mixed", options)[0], expected[0])


# Who waits


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


def test_backward_goes_on() -> None:
    check_backward_goes_on(CPU)


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


def test_backward_waits_for_a_buffer() -> None:
    how = HOWS["accumulated"]
    module, optimizer = new_training(how, "host", CPU, is_known=True)
    assert len(module.engine.chunks) > STAGING_BUFFERS + 1
    with held_until_waited_for(lambda: module.stats().held_bytes["cpu_grad_staging"]) as held:
        optimizer.backward(ZOO[how.name].loss(module, 0))
        optimizer.synchronize()
    ((num_on_their_way, staging_bytes),) = held.seen
    assert num_on_their_way == STAGING_BUFFERS
    assert staging_bytes == STAGING_BUFFERS * max(c.nbytes for c in module.plan.chunks)
    module.close()


@pytest.mark.parametrize("is_known", [False, True])
def test_gradients_that_are_dropped_are_out_of_the_way(is_known: bool) -> None:
    """What is still under way must not come to lie in the sums of the next step."""
    how = HOWS["accumulated"]
    expected = train(how, "gpu")
    module, optimizer = new_training(how, "host", CPU, is_known=is_known)
    with additions(0.01) as slow:
        for step in range(how.steps):
            for seed in (50, 51):
                optimizer.backward(ZOO[how.name].loss(module, seed))
            optimizer.zero_grad()
            assert slow.num_running == 0
            streamed.train_step(module, optimizer, how, step)
    assert_same(result_of(module, optimizer), replace(expected, skipped=[]))
    module.close()


def test_one_parameter_without_its_gradient() -> None:
    how = HOWS["accumulated"]
    results = []
    for site in ("gpu", "host"):
        module, optimizer = new_training(how, site, CPU, is_known=True)
        with additions(0.01):
            for seed in range(2):
                optimizer.backward(ZOO[how.name].loss(module, seed))
            chunk = module.engine.chunks[0]
            module.engine.reducer.drop_member(chunk, 0)  # what is under way belongs to it
            optimizer.backward(ZOO[how.name].loss(module, 2))
            optimizer.step()
        results.append(result_of(module, optimizer))
        module.close()
    assert_same(results[1], results[0])


# Memory


@contextmanager
def counted_host_memory(device: torch.device) -> Iterator[list[tuple[int, torch.dtype]]]:
    kind = core_device.CpuDevice if device.type == "cpu" else core_device.CudaDevice
    real: Callable[..., Tensor] = kind.host_empty
    taken: list[tuple[int, torch.dtype]] = []

    def counting(self: Any, numel: int, dtype: torch.dtype) -> Tensor:
        taken.append((numel, dtype))
        return real(self, numel, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "host_empty", counting)
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


@pytest.mark.parametrize("timing", [AFTER, BEHIND])
@pytest.mark.parametrize("is_known", [False, True])
def test_host_memory_stays_from_step_to_step(timing: UpdateTiming, is_known: bool) -> None:
    check_host_memory_stays(CPU, timing, is_known=is_known)


@pytest.mark.parametrize("name", ["accumulated", "fp32_accumulated", "bf16_true_accumulated"])
@pytest.mark.parametrize("chunk_size", [4 * 1024, 64 * 1024, 1 << 30])
def test_bytes_are_as_predicted(name: str, chunk_size: int) -> None:
    how = ACCUMULATED[name]
    module, optimizer = new_training(how, "host", CPU, is_known=True, chunk_size=chunk_size)
    predicted = make_plan(
        module.module,
        placement_policy="cpu",
        compute_dtype=how.dtype,
        master_weights=how.master,
        chunk_size=chunk_size,
        accumulates=True,
    )
    assert predicted.layout_fingerprint() == module.plan.layout_fingerprint()
    for step in range(2):
        streamed.train_step(module, optimizer, how, step)
    held = module.stats().held_bytes
    assert held["cpu_grad_staging"] == min(3, len(predicted.chunks)) * max(c.nbytes for c in predicted.chunks)
    assert held["cpu_grad"] + held["cpu_grad_staging"] == predicted.notes["host_grad_bytes"]
    module.close()


def test_no_staging_memory_where_nothing_is_added_up() -> None:
    for how, site in ((HOWS["bf16"], "host"), (HOWS["accumulated"], "gpu")):
        module, optimizer = new_training(how, site, CPU, is_known=True)
        if site == "host":
            module.engine.expect_accumulation(False)
        streamed.train_step(module, optimizer, how, 0)
        assert "cpu_grad_staging" not in module.stats().held_bytes
        module.close()


def test_what_is_known_survives_a_move() -> None:
    how = HOWS["accumulated"]
    module, optimizer = new_training(how, "gpu", CPU)
    streamed.train_step(module, optimizer, how, 0)
    assert not module.engine.reducer.accumulates  # nothing was added up in host memory
    for site in ("host", "mixed"):
        module.replan(streamed.plan_for(module.module, how, site))
        streamed.train_step(module, optimizer, how, 1)
        assert module.engine.reducer.accumulates
    module.replan(streamed.plan_for(module.module, how, "host"))
    optimizer.backward(ZOO[how.name].loss(module, 0))
    assert {s.grad.dtype for s in shards(module)} == {torch.float32}
    module.close()


def shards(module: ElixirModule) -> list[Any]:
    return [module.engine.store[c.id] for c in module.engine.chunks if c.spec.optim_tier is not Tier.GPU]


def test_updates_still_begin_inside_backward() -> None:
    """Where one backward comes before a step all the same, its new values find room over 16-bit gradients."""
    how = HOWS["bf16"]
    expected = train(how, "gpu")
    module, optimizer = new_training(how, "host", CPU, timing=INSIDE, is_known=True)
    begun = []
    for step in range(how.steps):
        with optimizer.unobserved():
            optimizer.backward(ZOO[how.name].loss(module, step * 3))
            begun.append(len(module.engine.reducer.begun))
            optimizer.step()
    assert begun[0] == 0 < begun[1] == len(module.engine.chunks)
    assert_same(result_of(module, optimizer), replace(expected, skipped=[]))
    module.close()


# Errors


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("failing_at", [1, 4])
@pytest.mark.parametrize("read", ["grad_norm", "clip", "full_grads", "loss_scale"])
def test_an_error_on_the_thread_reaches_who_needs_the_sum(read: str, failing_at: int, is_known: bool) -> None:
    how = HOWS["scaled"] if read == "loss_scale" else HOWS["accumulated"]
    how = replace(how, micro_batches=3, overflow_at=-1)
    module, optimizer = new_training(how, "host", CPU, is_known=is_known)
    reads: dict[str, Callable[[], Any]] = {
        "grad_norm": optimizer.grad_norm,
        "clip": lambda: optimizer.clip_grad_norm_(0.1),
        "full_grads": module.full_grads,
        "loss_scale": optimizer.step,
    }
    values = module.full_state_dict()
    with additions(0.001) as failing:
        failing.failing_at = failing_at
        for seed in range(3):  # later additions to the same sum fail as well, and nothing hangs
            optimizer.backward(ZOO[how.name].loss(module, seed))
        for _ in range(2):
            with pytest.raises(StateError, match=r"adding up the gradients of .*RuntimeError: no sum today.*zero_grad"):
                reads[read]()
        # Values are whole.
        saved = module.full_state_dict()
        assert [k for k, v in values.items() if not torch.equal(saved[k], v)] == []
        optimizer.zero_grad()
        failing.failing_at = -1
        for step in range(how.steps):
            streamed.train_step(module, optimizer, how, step)
    assert_same(result_of(module, optimizer), replace(train(how, "gpu"), skipped=[]))
    module.close()


@pytest.mark.parametrize("timing", [AFTER, BEHIND])
def test_an_error_on_the_thread_fails_the_update(timing: UpdateTiming) -> None:
    """Where nobody reads gradients before their update does."""
    how = HOWS["accumulated"]
    module, optimizer = new_training(how, "host", CPU, is_known=True, timing=timing)

    def two_steps() -> None:
        for step in range(2):
            streamed.train_step(module, optimizer, how, step)

    with additions(0.001) as failing:
        failing.failing_at = 5
        with pytest.raises((StateError, RuntimeError), match="no sum today"):
            two_steps()
        with pytest.raises(StateError):
            module.full_state_dict()
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


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize(
    "options", [{"is_known": False}, {"is_known": True}, {"is_known": False, "is_reusing": True}], ids=str
)
def test_a_backward_that_fails(options: dict[str, bool], is_early: bool) -> None:
    check_failed_backward(CPU, is_early=is_early, **options)


def test_closing_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    how = HOWS["accumulated"]
    module, optimizer = new_training(how, "host", CPU, is_known=True)
    with additions(0.01):
        optimizer.backward(ZOO[how.name].loss(module, 0))
        assert [t.name for t in set(threading.enumerate()) - before] == ["elixir-gradients-0"]
        module.close()
    assert set(threading.enumerate()) <= before
