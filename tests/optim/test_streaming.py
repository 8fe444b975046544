"""Streamed updates: bitwise the update of the host, in whatever pieces, and without loss when memory is short."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_elixir.core.device import make_device
from lightning_elixir.errors import CapacityError
from lightning_elixir.kernels import cpu
from lightning_elixir.optim.adam import AdamHyper
from lightning_elixir.optim.execution import ChunkUpdate, UpdateRecord, UpdateRunner
from lightning_elixir.optim.streaming import StateStream
from lightning_elixir.optim.updates import FlatUpdate, UpdatePart
from lightning_elixir.plan.stream_buffers import NUM_SLOTS, SCRATCH_BYTES, SLOT_BYTES, STREAM_BYTES
from tests.helpers.tiers import crossed

NUMEL = 6 * 512 + 100
SMALL: dict[str, int] = {"slot_bytes": 20 * 1024, "scratch_bytes": 5 * 4 * 512}
# (master and states, gradient, compute) dtypes
DTYPES = {
    "mixed": (torch.float32, torch.bfloat16, torch.bfloat16),
    "accumulated": (torch.float32, torch.float32, torch.float16),
    "fp32": (torch.float32, torch.float32, None),
    "true": (torch.bfloat16, torch.bfloat16, None),
    "fp64": (torch.float64, torch.float64, None),
}


def hyper(**changes: Any) -> AdamHyper:
    values = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "adamw_mode": True}
    return AdamHyper(**{**values, "bias_correction": True, "maximize": False, **changes})  # type: ignore[arg-type]


# Two parameters side by side, the first ending inside a block of 512, with other settings and step counts.
PARTS = (UpdatePart(0, 1200, 3, hyper()), UpdatePart(1536, NUMEL - 1536, 1, hyper(lr=1e-3, adamw_mode=False)))


def clamp(grad: Tensor) -> None:
    grad.mul_(0.37).clamp_(-0.3, 0.3)


def new_update(dtypes: str, empty: Callable[[int, torch.dtype], Tensor], seed: int = 0, **changes: Any) -> FlatUpdate:
    work, grad, compute = DTYPES[dtypes]
    generator = torch.Generator().manual_seed(seed)

    def filled(dtype: torch.dtype, scale: float) -> Tensor:
        return empty(NUMEL, dtype).copy_(torch.randn(NUMEL, generator=generator) * scale)

    update = FlatUpdate(
        filled(work, 1.0),
        filled(grad, 1.0),
        filled(work, 0.1),
        filled(work, 0.1).abs_(),
        PARTS,
        compute=None if compute is None else empty(NUMEL, compute).fill_(7.0),
    )
    return replace(update, **changes)


def values(update: FlatUpdate) -> list[Tensor]:
    kept = [update.param, update.exp_avg, update.exp_avg_sq]
    if update.compute is not None:  # padding may be written
        kept += [update.compute[p.start : p.start + p.numel] for p in update.parts]
    return kept


def apart(update: FlatUpdate, empty: Callable[[int, torch.dtype], Tensor]) -> FlatUpdate:
    """The same, to other memory."""
    param, *moments = (empty(NUMEL, x.dtype).fill_(9.0) for x in update.written)
    return replace(update, outputs=(param, moments[0], moments[1]))


def used_results(update: FlatUpdate) -> list[Tensor]:
    """What was written, without padding."""
    kept = [*update.written, *(() if update.compute is None else (update.compute,))]
    return [x[p.start : p.start + p.numel].cpu() for x in kept for p in update.parts]


@crossed(dtypes=DTYPES, change_grad=[None, clamp], how=["host", "by_torch", "streamed"])
def test_results_in_other_memory(
    device: torch.device, dtypes: str, change_grad: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits, and what was there stays."""
    runtime = make_device(device)
    expected = new_update(dtypes, runtime.host_zeros, change_grad=change_grad)
    actual = apart(new_update(dtypes, runtime.host_zeros, change_grad=change_grad), runtime.host_zeros)
    before = [x.clone() for x in (actual.param, actual.grad, actual.exp_avg, actual.exp_avg_sq)]
    expected.run()
    if how == "by_torch":
        monkeypatch.setattr(cpu, "adam_update", lambda *args: False)
    if how == "streamed":
        StateStream(runtime, **SMALL).run([actual])
    else:
        for piece in actual.pieces(1024):
            piece.run()
    for a, b in zip(used_results(actual), used_results(expected), strict=True):
        assert torch.equal(a, b)
    for a, b in zip((actual.param, actual.grad, actual.exp_avg, actual.exp_avg_sq), before, strict=True):
        assert torch.equal(a, b)


def assert_same(actual: FlatUpdate, expected: FlatUpdate) -> None:
    for a, b in zip(values(actual), values(expected), strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("change_grad", [None, clamp])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_streamed_is_bitwise_the_host(device: torch.device, dtypes: str, change_grad: Any) -> None:
    runtime = make_device(device)
    changes = {"change_grad": change_grad, "grad_factor": 1.0 if change_grad else 0.37}
    expected = [new_update(dtypes, lambda n, d: torch.empty(n, dtype=d), seed, **changes) for seed in range(4)]
    actual = [new_update(dtypes, runtime.host_zeros, seed, **changes) for seed in range(4)]
    before = [x.clone() for x in values(expected[0])]
    for update in expected:
        update.run()
    stream = StateStream(runtime, **SMALL)
    assert next(iter(actual[0].pieces(stream._piece_numel(actual[0])))).numel < NUMEL
    stream.run(actual)
    for a, b in zip(actual, expected, strict=True):
        assert_same(a, b)
    # Each part was updated by its own settings, and the padding between them was not.
    assert torch.equal(expected[0].param[1200:1536], before[0][1200:1536])
    assert not torch.equal(expected[0].param[:1200], before[0][:1200])
    assert not torch.equal(expected[0].param[1536:], before[0][1536:])
    assert stream.held_bytes() == {}


@pytest.mark.parametrize("is_compute_on_device", [False, True])
@pytest.mark.parametrize("dtypes", ["mixed", "accumulated"])
def test_every_site_writes_the_same_values(device: torch.device, dtypes: str, is_compute_on_device: bool) -> None:
    runtime = make_device(device)
    expected = [new_update(dtypes, lambda n, d: torch.empty(n, dtype=d), seed) for seed in range(9)]
    updates = []
    for seed in range(9):
        # Three of each: states on the device, streamed, on the host.
        place = runtime.host_zeros if seed % 3 else lambda n, d: torch.empty(n, dtype=d, device=device)
        update = new_update(dtypes, place, seed, is_compute_on_device=is_compute_on_device)
        compute = torch.full((NUMEL,), 7.0, dtype=DTYPES[dtypes][2], device=device if is_compute_on_device else "cpu")
        updates.append(replace(update, compute=compute))
    for update in expected:
        update.run()
    runner = UpdateRunner(runtime)
    runner._stream = StateStream(runtime, **SMALL)
    times = runner.run(updates[0::3], updates[1::3], updates[2::3])
    for a, b in zip(updates, expected, strict=True):
        assert_same(a, b)
    used = 3 * (NUMEL - 336)
    assert (times.gpu_numel, times.streamed_numel, times.cpu_numel) == (used, used, used)
    assert 0 < times.host_update_s < times.update_s
    # What goes up beside the used elements is zero or the rounded master, not what lay in the staging memory.
    padding = updates[2].compute[1200:1536].cpu()
    assert not padding.any() if is_compute_on_device else bool((padding == 7.0).all())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_new_values_that_may_not_go_up_yet_hold_no_update_up(device: torch.device, is_streamed: bool) -> None:
    """Backward still reads what they will be written over, for longer than all updates take."""

    class EndOfBackward:
        has_come = threading.Event()

        def wait(self) -> None:
            assert self.has_come.wait(60)

        synchronize = wait

        def is_over(self) -> bool:
            return self.has_come.is_set()

    runtime, end, record = make_device(device), EndOfBackward(), UpdateRecord()
    runner = UpdateRunner(runtime)
    runner._stream = StateStream(runtime, **SMALL)
    runner.reserve_stream()
    expected = [new_update("mixed", lambda n, d: torch.empty(n, dtype=d), seed) for seed in range(12)]
    updates = [new_update("mixed", runtime.host_zeros, seed) for seed in range(12)]
    above = [torch.full((NUMEL,), 5.0, dtype=DTYPES["mixed"][2], device=device) for _ in updates]
    tasks = []
    for update, target in zip(updates, above, strict=True):
        assert update.compute is not None
        job = ChunkUpdate([update], is_streamed, may_write=end, uploads=[(update.compute, target)])
        tasks.append(runner.submit(job, record))
    give_up_s = time.monotonic() + 60
    for update, one in zip(updates, expected, strict=True):
        one.run()
        while not torch.equal(update.param, one.param):  # all updates run, though no value has gone up
            assert time.monotonic() < give_up_s
            time.sleep(0.001)
    assert not any(task.is_over() for task in tasks)
    assert all(bool((target == 5.0).all()) for target in above)
    end.has_come.set()
    for task, target, update in zip(tasks, above, updates, strict=True):
        task.wait()
        assert torch.equal(target.cpu(), update.compute)
    runner.close()


def test_pieces_are_cut_at_blocks_and_cover_everything_once() -> None:
    update = new_update("mixed", lambda n, d: torch.arange(n).to(d))
    for size in (1, 512, 1023, 1024, NUMEL, 10 * NUMEL):
        pieces = list(update.pieces(size))
        assert all(p.numel == max(512, size // 512 * 512) for p in pieces[:-1])
        assert sum(p.numel for p in pieces) == NUMEL
        assert sum(p.used_numel for p in pieces) == update.used_numel == NUMEL - 336
        assert all(0 <= q.start < q.start + q.numel <= p.numel for p in pieces for q in p.parts)
        assert [p.param.data_ptr() for p in pieces] == [
            update.param[i * pieces[0].numel :].data_ptr() for i in range(len(pieces))
        ]


def test_memory_is_bounded_and_known(device: torch.device) -> None:
    runtime = make_device(device)
    stream = StateStream(runtime)
    assert stream.device_bytes == STREAM_BYTES == NUM_SLOTS * SLOT_BYTES + SCRATCH_BYTES
    small = StateStream(runtime, **SMALL)
    small.reserve()
    small.issue(new_update("mixed", runtime.host_zeros)).synchronize()
    assert small.held_bytes() == {"update_slot": small.device_bytes}
    assert small.device_bytes == NUM_SLOTS * SMALL["slot_bytes"] + SMALL["scratch_bytes"]
    small.release()
    assert small.held_bytes() == {}
    small.run([new_update("mixed", runtime.host_zeros)])
    assert small.held_bytes() == {}


class _Narrow(StateStream):
    """A device with so much memory and no more."""

    free_bytes = 0

    def _allocate(self, nbytes: int) -> Tensor:
        if nbytes > self.free_bytes // NUM_SLOTS:
            raise torch.OutOfMemoryError("no memory left")
        return super()._allocate(nbytes)


def test_less_memory_makes_smaller_pieces(caplog: pytest.LogCaptureFixture) -> None:
    stream = _Narrow(make_device(torch.device("cpu")))
    stream.free_bytes = 64 * 1024**2
    expected, actual = (new_update("mixed", lambda n, d: torch.empty(n, dtype=d)) for _ in range(2))
    expected.run()
    with caplog.at_level(logging.WARNING):
        stream.run([actual])
    assert_same(actual, expected)
    assert stream.device_bytes * 4 == STREAM_BYTES
    assert "56.0 MiB" in caplog.text


def test_no_memory_is_said_before_anything_changes() -> None:
    stream = _Narrow(make_device(torch.device("cpu")))
    expected, actual = (new_update("mixed", lambda n, d: torch.empty(n, dtype=d)) for _ in range(2))
    with pytest.raises(CapacityError, match=r"need at least 14\.0 MiB.*gpu_memory_limit"):
        stream.run([actual])
    assert_same(actual, expected)
    stream.free_bytes = 1024**3
    expected.run()
    stream.run([actual])
    assert_same(actual, expected)


def test_an_error_loses_no_piece_under_way(device: torch.device) -> None:
    runtime = make_device(device)
    stream = StateStream(runtime, **SMALL)
    expected, actual = (new_update("mixed", runtime.host_zeros) for _ in range(2))
    expected.run()

    def interrupted() -> Iterator[FlatUpdate]:
        yield actual
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream.run(interrupted())
    assert stream.held_bytes() == {}
    assert_same(actual, expected)  # it had been issued


class _Told:
    """A moment of one piece, which tells when something waits for it."""

    def __init__(self, log: list[str], what: str, number: int) -> None:
        self._log, self._what, self._number = log, what, number

    def wait(self) -> None:
        self._log.append(f"lane waits: {self._what} of {self._number}")

    def is_over(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._log.append(f"host waits: {self._what} of {self._number}")


class _UpLane:
    """Tells which piece goes up on it."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def issue(self) -> AbstractContextManager[None]:
        return nullcontext()

    def resume(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self) -> _Told:
        number = sum(entry.startswith("up") for entry in self._log)
        self._log.append(f"up {self._name}")
        return _Told(self._log, "up", number)


def test_pieces_go_up_on_two_lanes_in_turn_and_wait_for_their_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane has nothing more to copy when its piece is up: what else goes up has the bus then."""
    stream = StateStream(make_device(torch.device("cpu")), **SMALL)
    log: list[str] = []
    issue = StateStream._issue

    def told(self: StateStream, piece: FlatUpdate, number: int, is_free: Any) -> Any:
        issue(self, piece, number, is_free)
        return _Told(log, "end", number)

    monkeypatch.setattr(StateStream, "_issue", told)
    stream._up_lanes = [_UpLane(log, "a"), _UpLane(log, "b")]
    updates = [new_update("mixed", lambda n, d: torch.empty(n, dtype=d)) for _ in range(2)]
    num_pieces = sum(len(list(u.pieces(stream._piece_numel(u)))) for u in updates)
    assert num_pieces > 2 * NUM_SLOTS
    stream.reserve()
    for update in updates:
        stream.issue(update)
    expected = []
    for i in range(num_pieces):
        if i >= 2:
            expected.append(f"host waits: up of {i - 2}")
        if i >= NUM_SLOTS:  # a slot is filled again when the piece that had it has come back
            expected.append(f"lane waits: end of {i - NUM_SLOTS}")
        expected += [f"up {'ab'[i % 2]}", f"lane waits: up of {i}"]
    assert log == expected


def test_pieces_are_cut_for_the_slots_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots become smaller where memory is short, and pieces must fit them."""
    slot_bytes = 8 * 2**20
    stream = StateStream(make_device(torch.device("cpu")), slot_bytes, slot_bytes)
    allocate, calls = stream._allocate, []

    def short(nbytes: int) -> Tensor:
        calls.append(nbytes)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("full")
        return allocate(nbytes)

    monkeypatch.setattr(stream, "_allocate", short)
    numel = slot_bytes // 4
    tensors = [torch.randn(numel) for _ in range(3)] + [torch.rand(numel)]
    part = (UpdatePart(0, numel, 1, hyper()),)
    expected = FlatUpdate(*(t.clone() for t in tensors), part)
    expected.run()
    actual = FlatUpdate(*tensors, part)
    stream.run([actual])
    assert len(calls) > 3
    assert torch.equal(actual.param, expected.param)
