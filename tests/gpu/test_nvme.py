"""States on NVMe with real lanes and page-locked memory: the bodies of the CPU tests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_elixir.plan.types import UpdateTiming
from tests.helpers import nvme as bodies
from tests.helpers import streamed_updates as streamed_bodies
from tests.helpers.nvme import NVME_SITES
from tests.helpers.streamed_updates import HOWS, NVME_ORDER, How

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
HERE = {key: how for key, how in HOWS.items() if not how.scale} | {
    "fp16_clipped": How(dtype=torch.float16, scale=256.0, overflow_at=2, clip_norm=0.05, micro_batches=2),
}


@pytest.mark.parametrize("timing", UpdateTiming)
@pytest.mark.parametrize("site", NVME_SITES)
@pytest.mark.parametrize("name", ["bf16", "fp32", "bf16_true", "unused", "fp16_clipped"])
def test_the_disk_changes_no_bit(name: str, site: str, timing: UpdateTiming, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed_bodies.use_small_slots(monkeypatch)
    bodies.check_every_way(HERE[name], site, timing, CUDA, monkeypatch)


@pytest.mark.parametrize("name", sorted(set(HERE) - {"bf16", "fp32", "bf16_true", "unused", "fp16_clipped"}))
def test_every_way_to_train(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed_bodies.use_small_slots(monkeypatch)
    bodies.check_every_way(HERE[name], "nvme_some", UpdateTiming.INSIDE_BACKWARD, CUDA, monkeypatch)


@pytest.mark.parametrize("name", ["accumulated_clipped", "tied", "frozen", "fp16_clipped"])
def test_parameters_there_as_well(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed_bodies.use_small_slots(monkeypatch)
    bodies.check_every_way(HERE[name], "nvme_param", UpdateTiming.INSIDE_BACKWARD, CUDA, monkeypatch)


def test_parameters_there_with_a_small_rcache(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies.check_losses("nvme_param", CUDA, monkeypatch)


@pytest.mark.parametrize("how", ["bf16", "fp32", "unused"])
def test_replan_keeps_everything(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed_bodies.use_small_slots(monkeypatch)
    streamed_bodies.check_replan(replace(HOWS[how]), CUDA, NVME_ORDER)
