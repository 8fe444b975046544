"""Ranks that share operators, each on a GPU of its own: the bodies of the CPU tests over NCCL.

Matrix products of cuBLAS round otherwise than the CPU's, so the oracle is the same model on one GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.dist import run_ranks
from tests.helpers.patterns import Case, difference, train_plain, train_ranks

pytestmark = pytest.mark.gpu

TIGHT = {"placement_policy": "cpu", "chunk_size": 6000}
RESIDENT = {"placement_policy": "cuda", "chunk_size": 6000}
CASES: dict[str, tuple[int, Case]] = {
    "tensor": (2, Case(tensor=2, plan=TIGHT, device="cuda")),
    "tensor_resident": (2, Case(tensor=2, plan=RESIDENT, device="cuda")),
    "expert": (2, Case(expert=2, plan=TIGHT, device="cuda")),
    "expert_resident": (2, Case(expert=2, plan=RESIDENT, device="cuda")),
    "expert_without_tokens": (2, Case(expert=2, plan=TIGHT, is_empty=True, device="cuda")),
    "expert_checkpointed": (
        2,
        Case(expert=2, plan=TIGHT, is_empty=True, options={"is_checkpointed": True}, device="cuda"),
    ),
    "accumulated_clipped": (2, Case(tensor=2, plan=TIGHT, micro_batches=2, clip_norm=0.3, device="cuda")),
    "both": (4, Case(tensor=2, expert=2, plan=TIGHT, device="cuda")),
    "tensor_beside_data": (4, Case(tensor=2, plan=TIGHT, device="cuda")),
    "expert_beside_data": (4, Case(expert=2, plan=TIGHT, is_empty=True, device="cuda")),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process_with_all_batches(name: str) -> None:
    world, case = CASES[name]
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices, found {torch.cuda.device_count()}")
    losses, norms, state = train_plain(case, world // case.tensor)
    runs: list[Any] = run_ranks(train_ranks, world, case, device="cuda")
    for run in runs:
        assert run[0] == pytest.approx(losses, abs=1e-4)
        assert run[1] == pytest.approx(norms, abs=1e-4)
        assert difference(run[2], state) < 1e-4
        assert difference(run[2], runs[0][2]) == 0
    again = run_ranks(train_ranks, world, case, device="cuda")
    assert difference(again[0][2], runs[0][2]) == 0
