"""Updates that can be taken back, with real lanes, page-locked memory and threads beside the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_elixir.plan.types import UpdateTiming
from tests.gpu.cuda import CUDA, HERE, late
from tests.helpers import speculation as bodies
from tests.helpers import streamed_updates as streamed_bodies
from tests.helpers import update_timing as timing_bodies
from tests.helpers.speculation import ACTIONS, NEVER_CLIPPED, SCALED
from tests.helpers.streamed_updates import How, assert_same, use_small_slots
from tests.helpers.update_timing import SITES
from tests.helpers.zoo import ZOO

pytestmark = pytest.mark.gpu

FP16 = How(dtype=torch.float16, scale=1024.0, overflow_at=2)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("name", ["bf16", "clipped", "max_norm", "fp16_clipped", "accumulated", "unused", "groups"])
def test_speculation_changes_no_bit(name: str, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_slots(monkeypatch)
    bodies.check_every_way(HERE[name], site, CUDA, monkeypatch)


@pytest.mark.parametrize("how", [HERE["max_norm"], FP16], ids=["clipped", "fp16"])
@pytest.mark.parametrize("site", SITES)
def test_spare_states_of_some_chunks(site: str, how: How, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_slots(monkeypatch)
    bodies.check_every_way(how, site, CUDA, monkeypatch, "odd")


@pytest.mark.parametrize("site", SITES)
def test_fp16_with_its_loss_scale(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies.check_every_way(FP16, site, CUDA, monkeypatch)


@pytest.mark.parametrize("site", ["mixed", "mixed_persistent"])
@pytest.mark.parametrize("name", ACTIONS)
def test_what_happens_between_backward_and_step(name: str, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies.check_action(name, How(), site, CUDA, monkeypatch)


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("how", [NEVER_CLIPPED, SCALED], ids=["clipping", "scaled"])
def test_sums_beside_backward(how: How, is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies.check_sums(how, is_known, CUDA, monkeypatch)


@pytest.mark.parametrize("lane", ["issue", "resume"])
@pytest.mark.parametrize("site", SITES)
def test_slow_lanes_are_waited_for(site: str, lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = streamed_bodies.train(NEVER_CLIPPED, "host", CUDA)
    with late(monkeypatch, lane):
        actual = timing_bodies.train(NEVER_CLIPPED, site, UpdateTiming.INSIDE_BACKWARD, CUDA, spared="all")
    assert_same(actual, expected)


@pytest.mark.parametrize("site", SITES)
def test_a_busy_compute_stream_reads_old_values(site: str) -> None:
    """The device is far behind the host: new values must not come before it has read the old ones."""
    how = SCALED
    expected = streamed_bodies.train(how, "host", CUDA)
    training = module, optimizer = bodies.new_training(how, site, CUDA)
    for number in range(how.steps):
        torch.cuda._sleep(50_000_000)
        optimizer.backward(ZOO[how.name].loss(module, number * 3))
        torch.cuda._sleep(50_000_000)
        optimizer.step()
    assert_same(replace(streamed_bodies.result_of(*training), skipped=expected.skipped), expected)
    module.close()
