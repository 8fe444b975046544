"""Sums of gradients beside backward, with real lanes and page-locked memory: the bodies of the CPU tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_elixir.plan.types import UpdateTiming
from tests.gpu.cuda import late
from tests.helpers import accumulation as bodies
from tests.helpers.accumulation import ACCUMULATED, AFTER, BEHIND, additions
from tests.helpers.dist import run_ranks
from tests.helpers.streamed_updates import assert_same, use_small_slots

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
HERE = sorted(name for name, how in ACCUMULATED.items() if not how.scale)


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_slots(monkeypatch)


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("options", [{}, {"timing": BEHIND}, {"is_reusing": True}, {"num_buffers": 1}], ids=str)
def test_same_bits(name: str, options: dict[str, Any]) -> None:
    bodies.check_bits(ACCUMULATED[name], CUDA, **options)


@pytest.mark.parametrize("site", ["every_site", "streamed_param_on_gpu", "mixed_persistent"])
def test_same_bits_wherever_the_rest_lies(site: str) -> None:
    bodies.check_bits(ACCUMULATED["accumulated"], CUDA, [site], timing=BEHIND)


@pytest.mark.parametrize("lane", ["issue", "resume"])
@pytest.mark.parametrize("is_known", [False, True])
def test_slow_lanes_are_waited_for(lane: str, is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients come down late: an addition, or another use of a buffer, that does not wait finds old bytes."""
    how = ACCUMULATED["accumulated"]
    expected = bodies.train(how, "gpu", CUDA)
    with late(monkeypatch, lane), additions(0.001, 2):
        assert_same(bodies.train(how, "mixed", CUDA, is_known=is_known), expected)


def test_backward_goes_on() -> None:
    bodies.check_backward_goes_on(CUDA)


@pytest.mark.parametrize("timing", [AFTER, BEHIND])
@pytest.mark.parametrize("is_known", [False, True])
def test_host_memory_stays_from_step_to_step(timing: UpdateTiming, is_known: bool) -> None:
    bodies.check_host_memory_stays(CUDA, timing, is_known=is_known)


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize(
    "options", [{"is_known": False}, {"is_known": True}, {"is_known": False, "is_reusing": True}], ids=str
)
def test_a_backward_that_fails(options: dict[str, bool], is_early: bool) -> None:
    bodies.check_failed_backward(CUDA, is_early=is_early, **options)


@pytest.mark.several_gpus(2)
@pytest.mark.parametrize("name", ["accumulated", "late_accumulated"])
def test_several_ranks(name: str) -> None:
    how = ACCUMULATED[name]
    expected = run_ranks(bodies.train_rank, 2, how, "gpu", {}, "cuda", device="cuda")
    actual = run_ranks(bodies.train_rank, 2, how, "mixed", {"is_known": True}, "cuda", device="cuda")
    assert_same(actual[0], expected[0])
