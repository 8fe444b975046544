"""What saving and loading take beside the shards: about a chunk."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from lightning_elixir import ElixirModule, ElixirOptimizer, HybridAdam
from lightning_elixir.checkpoint import CheckpointIndex, PendingFolder
from lightning_elixir.checkpoint.direct_file import NUM_PIECES, PIECE_BYTES
from lightning_elixir.core.comm import SoloComm
from lightning_elixir.strategy.engine_state import (
    SavePlan,
    StandIns,
    load_model,
    load_optimizers,
    model_state,
    optimizer_state,
)
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.tiers import telling

MIB = 2**20


class _Peak:
    """The most memory of this process while it is open, beside what it began with."""

    def __enter__(self) -> _Peak:
        self._process, self._is_over = psutil.Process(), threading.Event()
        self._begin = self._process.memory_info().rss
        self.nbytes = 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._is_over.wait(0.001):
            self.nbytes = max(self.nbytes, self._process.memory_info().rss - self._begin)

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def _measure(path: Path, num_files: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(24)])  # 96 MiB, and twice that of moments
    plan = make_plan(model, placement_policy="cpu", chunk_size=8 * MIB)
    module = ElixirModule(model, plan)
    optimizer = ElixirOptimizer(module, HybridAdam(model.parameters(), lr=1e-3), init_step=True)
    optimizer.backward(module(torch.randn(4, 1024)).square().mean())
    optimizer.step()
    optimizer.synchronize()
    stand_ins = StandIns()
    saved = SavePlan(
        module.engine,
        [optimizer],
        model_state(module, stand_ins),
        [optimizer_state(optimizer, module.engine, stand_ins)],
        stand_ins,
    )
    with _Peak() as saving:
        folder = PendingFolder(path, SoloComm())
        folder.write(saved.write, {}, module.engine.device, num_files)
        folder.commit(saved.contents)
    before = {k: v.clone() for k, v in module.full_state_dict().items()}
    with module.full_parameters(modify=True) as parameters, torch.no_grad():
        for parameter in parameters.values():
            parameter.zero_()
    with _Peak() as loading:
        index = CheckpointIndex(path)
        load_model(module, index)
        load_optimizers([optimizer], module.engine, index)
    after = module.full_state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    return saving.nbytes, loading.nbytes


@pytest.mark.parametrize("num_files", telling([1, 3], "3"))
@pytest.mark.full
def test_saving_and_loading_take_a_chunk_or_two(tmp_path: Path, num_files: int) -> None:
    saving, loading = run_ranks(_measure, 1, tmp_path / "one", num_files, fresh=True, init_group=False)[0]
    # Saving: one state of a chunk, and one weight. Loading: a chunk's values, a weight and a state of it.
    assert saving < 24 * MIB + (num_files - 1) * NUM_PIECES * PIECE_BYTES
    assert loading < 32 * MIB
