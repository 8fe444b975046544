"""Streamed updates with real lanes, page-locked memory and device memory: the bodies of the CPU tests."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_elixir.core import device as core_device
from lightning_elixir.core.device import make_device
from lightning_elixir.errors import CapacityError
from lightning_elixir.optim import execution
from lightning_elixir.optim.streaming import StateStream
from lightning_elixir.plan.stream_buffers import STREAM_BYTES
from tests.gpu.cuda import HERE
from tests.helpers import streamed_updates as bodies
from tests.helpers.dist import run_ranks
from tests.helpers.streamed_updates import HOWS, ORDER, SITES
from tests.helpers.zoo import make

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies.use_small_slots(monkeypatch)


@pytest.mark.parametrize("how", HERE)
def test_host_streamed_and_device_agree(how: str) -> None:
    bodies.check_sites_agree(HERE[how], ["streamed", "mixed", "gpu"], CUDA)


@pytest.mark.parametrize("how", ["bf16", "fp32", "bf16_true", "clipped_by_value", "unused"])
def test_every_place_of_parameters_and_states(how: str) -> None:
    bodies.check_sites_agree(HOWS[how], [s for s in SITES if s not in ("host", "streamed", "mixed", "gpu")], CUDA)


@pytest.mark.parametrize("how", ["bf16", "fp32", "unused"])
def test_replan_keeps_everything(how: str) -> None:
    bodies.check_replan(HOWS[how], CUDA, ORDER)


@pytest.mark.parametrize(("saved_from", "loaded_into"), [("streamed", "host"), ("gpu", "streamed")])
@pytest.mark.parametrize("how", ["bf16", "fp16"])
def test_resume_from_another_placement(how: str, saved_from: str, loaded_into: str) -> None:
    bodies.check_resume(HERE[how], CUDA, saved_from, loaded_into)


@pytest.mark.parametrize("slow", range(3))
@pytest.mark.parametrize("site", ["streamed", "every_site", "mixed_persistent"])
def test_slow_lanes_are_waited_for(monkeypatch: pytest.MonkeyPatch, site: str, slow: int) -> None:
    """One lane (up, update, down) starts everything late: who does not wait for it works on old or foreign bytes."""
    how = replace(HOWS["clipped"], steps=3)
    expected = bodies.train(how, "host", CUDA)
    real = core_device._CudaLane.resume
    numbers = itertools.count()

    @contextmanager
    def late(self: Any) -> Iterator[None]:
        with real(self):
            if next(numbers) % 3 == slow:
                torch.cuda._sleep(1_000_000)
            yield

    monkeypatch.setattr(core_device._CudaLane, "resume", late)
    bodies.assert_same(bodies.train(how, site, CUDA), expected)


def test_busy_compute_stream_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the slots may be in use by what the compute stream has not come to yet, as may the replica that
    receives the new values."""
    how = HOWS["bf16"]
    expected = bodies.train(how, "host", CUDA)
    reserve = StateStream.reserve

    def late(self: StateStream) -> None:
        scrap = [torch.empty(20 * 1024, dtype=torch.uint8, device=CUDA) for _ in range(8)]
        torch.cuda._sleep(20_000_000)
        for x in scrap:
            x.fill_(255)
        del scrap, x
        reserve(self)

    monkeypatch.setattr(StateStream, "reserve", late)
    bodies.assert_same(bodies.train(how, "streamed_persistent", CUDA), expected)


def test_host_memory_of_states_is_exact_and_locked_where_updates_send_it() -> None:
    module, optimizer = bodies.new_training(HOWS["bf16"], "mixed", CUDA)
    bodies.train_step(module, optimizer, HOWS["bf16"], 0)
    engine = module.engine
    assert len({chunk.spec.is_update_streamed for chunk in engine.chunks}) == 2
    for chunk in engine.chunks:
        inner, shard = optimizer._states.inner[chunk.id], engine.store[chunk.id]
        assert inner.has_states
        assert shard.master is not None
        assert shard.param is not None
        is_sent = chunk.spec.is_update_streamed
        assert {m.is_pinned() for m in (shard.master, *inner.adam.moments)} == {is_sent}
        assert {inner.state_of(i)["exp_avg"].is_pinned() for i in range(len(inner.places))} <= {is_sent}
        assert shard.param.is_pinned()
    assert optimizer.state_bytes()["cpu_states"] == sum(
        2 * 4 * (-(-p.numel() // 512) * 512) for p in make("gpt2").parameters()
    )
    module.close()


def test_device_memory_is_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "StateStream", StateStream)
    how = HOWS["bf16"]
    module, optimizer = bodies.new_training(how, "streamed", CUDA)
    bodies.train_step(module, optimizer, how, 0)
    bodies.train_step(module, optimizer, how, 1)
    torch.cuda.synchronize()
    optimizer.backward(bodies.ZOO[how.name].loss(module, 2))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert STREAM_BYTES <= torch.cuda.max_memory_allocated() - before < STREAM_BYTES + (1 << 20)
    assert torch.cuda.memory_allocated() <= before
    module.close()


def test_little_device_memory_makes_small_slots_and_none_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card's memory is taken by someone else."""
    monkeypatch.setattr(execution, "StateStream", StateStream)
    gc.collect()  # what earlier tests have left in cycles would be room
    torch.cuda.empty_cache()
    device = make_device(CUDA)
    total = torch.cuda.mem_get_info()[1]
    try:
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        taken = _take_free_blocks()
        for left, is_enough in ((60 << 20, True), (4 << 20, False)):
            stream = StateStream(device)
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + left) / total)
            if is_enough:
                stream.reserve()
                assert 0 < stream.device_bytes <= 60 << 20
                stream.release()
            else:
                with pytest.raises(CapacityError, match="streamed updates"):
                    stream.reserve()
            torch.cuda.empty_cache()
        del taken
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _take_free_blocks() -> list[torch.Tensor]:
    """Of segments that what is alive keeps: the memory limit does not count them, they are there already."""
    taken = []
    for num_bytes in (32 << 20, 4 << 20, 1 << 20):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(num_bytes, dtype=torch.uint8, device=CUDA))
    return taken


@pytest.mark.several_gpus(2)
def test_two_gpus() -> None:
    how = replace(HOWS["bf16"], steps=3)
    expected = run_ranks(bodies.train_rank, 2, how, "host", {}, "cuda", device="cuda")[0]
    for site in ("streamed", "every_site", "streamed_persistent"):
        bodies.assert_same(run_ranks(bodies.train_rank, 2, how, site, {}, "cuda", device="cuda")[0], expected)
