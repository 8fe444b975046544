"""Ranks that share operators, each on a GPU of its own: the bodies of the CPU tests over NCCL.

Matrix products of cuBLAS round otherwise than the CPU's, so the oracle is the same model on one GPU. All with two GPUs
take a minute and a half together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lightning_elixir.patterns import Expert
from tests.helpers.dist import run_ranks
from tests.helpers.pattern_fits import fit, fit_plain
from tests.helpers.patterns import Case, difference, train_plain, train_ranks
from tests.helpers.releases import need_experts_in_one_module

# What Lightning and torch advise (workers of loaders, peers of GPUs) is no matter here.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

TIGHT = {"placement_policy": "cpu", "chunk_size": 6000}
RESIDENT = {"placement_policy": "cuda", "chunk_size": 6000}
CLOSE = 1e-4
CASES: dict[str, tuple[int, Case]] = {
    "tensor_accumulated_clipped": (2, Case(tensor=2, plan=TIGHT, micro_batches=2, clip_norm=0.3, device="cuda")),
    # After 64 exchanges hosts do not meet any more.
    "tensor_resident": (2, Case(tensor=2, plan=RESIDENT, micro_batches=4, device="cuda")),
    "expert_resident": (2, Case(expert=2, plan=RESIDENT, device="cuda")),
    "expert_without_tokens_checkpointed": (
        2,
        Case(expert=2, plan=TIGHT, is_empty=True, options={"is_checkpointed": True}, device="cuda"),
    ),
    "expert_fused": (
        2,
        Case(expert=2, plan=TIGHT, is_empty=True, is_fused=True, options={"is_gated": True}, device="cuda"),
    ),
    "both": (4, Case(tensor=2, expert=2, plan=TIGHT, device="cuda")),
    "tensor_beside_data": (4, Case(tensor=2, plan=TIGHT, device="cuda")),
    "expert_beside_data": (4, Case(expert=2, plan=TIGHT, is_empty=True, device="cuda")),
}


def on_gpus(cases: Mapping[str, tuple[Any, ...]], place: int) -> pytest.MarkDecorator:
    """Parametrize by name; at `place` each case has its number of GPUs."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.several_gpus(case[place])) for name, case in cases.items()]
    )


@on_gpus(CASES, 0)
def test_equals_one_process_with_all_batches(name: str) -> None:
    world, case = CASES[name]
    losses, norms, state = train_plain(case, world // case.tensor)
    runs: list[Any] = run_ranks(train_ranks, world, case, device="cuda")
    for run in runs:
        assert run[0] == pytest.approx(losses, abs=CLOSE)
        assert run[1] == pytest.approx(norms, abs=CLOSE)
        assert difference(run[2], state) < CLOSE
        assert difference(run[2], runs[0][2]) == 0
    if case.plan is TIGHT:
        assert runs[0][3]["evictions"] > 0
    if name == "tensor_accumulated_clipped":
        again = run_ranks(train_ranks, world, case, device="cuda")
        assert difference(again[0][2], runs[0][2]) == 0


# Name of a model, ranks, tensor, expert, options, and of the Trainer
FITS: dict[str, tuple[str, int, int, int, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", 2, 2, 1, {}, {}),
    "mixtral": ("mixtral", 2, 1, 2, {}, {}),
    "qwen3_moe": ("qwen3_moe", 2, 1, 2, {}, {"accumulate_grad_batches": 2}),
    "qwen3_moe_fused": ("qwen3_moe", 2, 1, 2, {"use_fused_kernels": True}, {}),
    "own_mixture": ("mixture", 2, 1, 2, {"patterns": {"*.experts": Expert()}}, {}),
    "llama_dtensors": ("untied_llama+dtensors", 2, 2, 1, {}, {}),
    "language_dtensors": ("language+dtensors-checkpointed", 2, 2, 1, {}, {"accumulate_grad_batches": 2}),
    "qwen3_moe_both": ("qwen3_moe", 4, 2, 2, {}, {}),
    "language_dtensors_beside_data": ("language+dtensors", 4, 2, 1, {}, {}),
}


@on_gpus(FITS, 1)
def test_models_under_a_trainer(name: str) -> None:
    kind, world, tensor, expert, options, of_trainer = FITS[name]
    if expert > 1 and kind != "mixture":
        need_experts_in_one_module()
    expected = fit_plain(kind, world // tensor, "gpu", **of_trainer)
    # A GPU has room for all replicas of models of this size: nothing is evicted, unlike in the cases above.
    found, _ = run_ranks(fit, world, kind, tensor, expert, options, of_trainer, "gpu", device="cuda", init_group=False)[
        0
    ]
    assert difference(found, expected) < CLOSE


@pytest.mark.several_gpus(2)
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_grouped_products_with_experts_that_get_no_tokens(kind: str, is_fused: bool) -> None:
    """In 16 bits transformers' experts go by torch's grouped matrix products on the device. Twice the same bits."""
    need_experts_in_one_module()
    arguments = (kind, 1, 2, {"use_fused_kernels": is_fused}, {"precision": "bf16-mixed"}, "gpu")
    first, second = (run_ranks(fit, 2, *arguments, device="cuda", init_group=False)[0][0] for _ in range(2))
    assert difference(first, second) == 0
    assert all(bool(value.isfinite().all()) for value in first.values())
