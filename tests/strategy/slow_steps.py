"""Steps of several micro-batches that take a known time, at the least."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.strategy.callbacks import ElixirStatsMonitor
from tests.strategy.models import Net, fit, make_data
from tests.strategy.nets import MemoryLogger

SLOW_S = 0.005


class SlowNet(Net):
    """Each of its micro-batches takes that long, or more."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch[0].is_cuda:
            torch.cuda.synchronize()  # what is measured begins when the device has done what came before
        time.sleep(SLOW_S)
        return super().training_step(batch, batch_idx)


def assert_all_micro_batches_are_measured(folder: Path, options: dict[str, Any], **trained: Any) -> None:
    """In metrics and in the report, under these options of the strategy and of the Trainer."""
    logger = MemoryLogger()
    fit(
        ElixirStrategy(**options, report_dir=str(folder / "r")),
        SlowNet,
        train=lambda: make_data(128),
        accumulate_grad_batches=4,
        callbacks=[ElixirStatsMonitor()],
        logger=logger,
        log_every_n_steps=1,
        **trained,
    )
    rows = [row for _, row in logger.rows if "elixir/compute_s" in row]
    assert len(rows) == 8
    for row in rows:
        assert row["elixir/compute_s"] > 4 * SLOW_S
        assert row["elixir/compute_s"] + row["elixir/exposed_wait_s"] < row["elixir/step_s"]
    times = json.loads((folder / "r" / "report.json").read_text())["measured"]["times"]
    assert times["compute_s"] > 4 * SLOW_S
    seen = [row["elixir/exposed_wait_s"] for row in rows]
    assert min(seen) <= times["waiting_s"] <= max(seen)
