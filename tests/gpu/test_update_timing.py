"""Updates behind forward and inside backward, with real lanes, page-locked memory and threads beside the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_elixir.plan.types import UpdateTiming
from tests.gpu.cuda import CUDA, HERE, late
from tests.helpers import streamed_updates as streamed_bodies
from tests.helpers import update_timing as bodies
from tests.helpers.streamed_updates import HOWS, assert_same, use_small_slots
from tests.helpers.update_timing import SITES, TIMINGS
from tests.helpers.zoo import ZOO

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("name", ["bf16", "fp32", "accumulated", "clipped", "fp16_clipped", "unused", "groups"])
def test_timing_changes_no_bit(name: str, site: str, timing: UpdateTiming, monkeypatch: pytest.MonkeyPatch) -> None:
    how = HERE[name]
    use_small_slots(monkeypatch)
    expected = streamed_bodies.train(how, "host", CUDA)
    with bodies.slow_updates(monkeypatch):
        actual = bodies.train(how, site, timing, CUDA)
    assert_same(actual, expected)
    assert repr(actual.norms) == repr(expected.norms)  # nan where a step overflowed


@pytest.mark.parametrize("lane", ["issue", "resume"])
@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("site", SITES)
def test_slow_lanes_are_waited_for(site: str, timing: UpdateTiming, lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    how = HOWS["bf16"]
    expected = streamed_bodies.train(how, "host", CUDA)
    with late(monkeypatch, lane):
        assert_same(bodies.train(how, site, timing, CUDA), expected)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("site", SITES)
def test_a_busy_compute_stream_reads_old_values(site: str, timing: UpdateTiming) -> None:
    """The device is far behind the host: new values must not come before it has read the old ones."""
    how = HOWS["bf16"]
    expected = streamed_bodies.train(how, "host", CUDA)
    module, optimizer = bodies.new_training(how, site, CUDA, timing)
    for number in range(how.steps):
        torch.cuda._sleep(50_000_000)
        bodies.step(module, optimizer, how, number)
    assert_same(replace(streamed_bodies.result_of(module, optimizer), skipped=expected.skipped), expected)
    module.close()


@pytest.mark.parametrize("timing", [UpdateTiming.AFTER_BACKWARD, UpdateTiming.BEHIND_FORWARD])
@pytest.mark.parametrize("name", ["bf16", "accumulated", "fp16", "unused"])
def test_gradients_in_the_place_of_parameters(name: str, timing: UpdateTiming) -> None:
    how = HERE[name]
    expected = streamed_bodies.train(how, "host", CUDA)
    assert_same(bodies.train(how, "mixed", timing, CUDA, is_reusing=True), expected)


def test_step_returns_while_the_device_still_computes() -> None:
    how = HOWS["bf16"]
    module, optimizer = bodies.new_training(how, "host", CUDA, UpdateTiming.BEHIND_FORWARD)
    for number in range(3):
        bodies.step(module, optimizer, how, number)
    optimizer.synchronize()
    loss = ZOO[how.name].loss(module, 0)  # copies its inputs to the device, and waits for that
    torch.cuda._sleep(500_000_000)  # some tenths of a second
    with optimizer.unobserved(False):
        optimizer.backward(loss)
        optimizer.step()
    is_over = module.engine.device.compute_event()  # making a device would wait
    assert not is_over.is_over()
    optimizer.synchronize()
    assert is_over.is_over()
    module.close()
