"""What tests on a device share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_elixir.core import device as core_device
from tests.helpers.streamed_updates import HOWS, How

HERE = {key: how for key, how in HOWS.items() if not how.scale} | {
    "fp16": How(dtype=torch.float16, scale=256.0, overflow_at=1),
    "fp16_clipped": How(dtype=torch.float16, scale=256.0, overflow_at=2, clip_norm=0.05, micro_batches=2),
    "fp16_clipped_by_value": How(dtype=torch.float16, scale=256.0, clip_value=0.003),
}


CUDA = torch.device("cuda", 0)


@contextmanager
def late(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """Everything that lanes begin this way begins late: who does not wait for it sees old bytes."""
    real = getattr(core_device._CudaLane, name)

    @contextmanager
    def late(self: Any) -> Iterator[None]:
        with real(self):
            torch.cuda._sleep(1_000_000)
            yield

    with monkeypatch.context() as patch:
        patch.setattr(core_device._CudaLane, name, late)
        yield
