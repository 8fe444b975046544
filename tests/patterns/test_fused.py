"""Fused operators beneath patterns, and plain PyTorch without either on one process with all batches.

Beside what patterns change (tests/patterns/test_parity.py) fused operators add up rows, columns and tokens in another
order, in fp32: a few units in the last place more, and 1e-5 is far above both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir.core.module_hooks import has_own_forward
from lightning_elixir.errors import PlanError
from lightning_elixir.fused import fuse, swapping
from lightning_elixir.patterns import Expert, ParallelPattern, Peers
from lightning_elixir.patterns.apply import exchanges_of, put_in, take_out
from lightning_elixir.patterns.model_plans import own_patterns
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.profiling.fake_step import profile_memory
from lightning_elixir.wrapper import ElixirModule
from tests.helpers.dist import run_ranks
from tests.helpers.fused import make_batch, make_lm
from tests.helpers.once import computed_once
from tests.helpers.patterns import (
    EXPERT,
    WIDTH,
    Case,
    GatedExperts,
    Language,
    check_equal,
    difference,
    train_plain,
    train_ranks,
)
from tests.helpers.tiers import telling

TIGHT = {"placement_policy": "cpu", "chunk_size": 6000}
CLOSE = 1e-5
GATED = {"is_gated": True}
EMPTY = {"is_empty": True}

CASES: dict[str, tuple[int, Case]] = {
    "tensor": (2, Case(tensor=2, plan=TIGHT, options={**GATED, "is_mixture": False})),
    "expert": (2, Case(expert=2, plan=TIGHT, options=GATED)),
    "expert_without_tokens": (4, Case(expert=4, plan=TIGHT, options=GATED, **EMPTY)),
    "expert_checkpointed": (2, Case(expert=2, plan=TIGHT, options={**GATED, "is_checkpointed": True}, **EMPTY)),
    "expert_recomputed": (2, Case(expert=2, plan=TIGHT, options=GATED, activations="recompute")),
    "expert_frozen": (2, Case(expert=2, plan=TIGHT, options=GATED, frozen=("layers.1.feed.experts.down", "layers.0"))),
    "expert_beside_data": (4, Case(expert=2, plan=TIGHT, options=GATED, **EMPTY)),
    "both": (4, Case(tensor=2, expert=2, plan=TIGHT, options=GATED)),
    "both_accumulated_clipped": (
        4,
        Case(tensor=2, expert=2, plan=TIGHT, options=GATED, micro_batches=2, clip_norm=0.3, **EMPTY),
    ),
}


@computed_once
def plain_of(name: str) -> Any:
    world, case = CASES[name]
    return train_plain(case, world // case.tensor)


def train_fused(case: Case) -> Any:
    """As `train_ranks`, with what was swapped, and how often the experts' operator ran."""
    calls = 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return mixture(*args)

    def look(module: ElixirModule, _: object) -> Any:
        return {operator: count for (operator, _), count in module._swapped.counts.items()}, calls

    mixture = swapping.mixture
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(swapping, "mixture", counted)
        return train_ranks(replace(case, is_fused=True), look)


@pytest.mark.parametrize("name", telling(CASES, "both_accumulated_clipped"))
def test_equals_plain_modules_on_one_process(name: str) -> None:
    world, case = CASES[name]
    runs = run_ranks(train_fused, world, case)
    check_equal(runs, plain_of(name), CLOSE)
    has_mixture = case.options.get("is_mixture", True)
    counts = {"RMS norm": 5, "gated product": 1, "experts of a mixture": 1}
    if not has_mixture:
        counts = {"RMS norm": 5, "gated product": 2}
    assert [run[4][0] for run in runs] == [counts] * world
    assert sum(run[4][1] for run in runs) > 0 or not has_mixture


def test_spread_experts_are_those_of_shared_ones() -> None:
    world, case = CASES["expert"]
    spread, shared = (run_ranks(train_fused, world, c) for c in (case, replace(case, expert=1)))
    for ours, theirs in zip(spread, shared, strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=CLOSE)
        assert difference(ours[2], theirs[2]) < CLOSE
        assert ours[4][1] == theirs[4][1] == 3


# One process, whose model is cut as that of the first of two ranks


CPU = torch.device("cpu")


class Own(Expert):
    """Has a forward of its own."""

    def forward(
        self,
        module: nn.Module,
        compute: Callable[..., Any],
        peers: Peers,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        return super().forward(module, compute, peers, args, kwargs)


class Shifting(ParallelPattern):
    """Changes inputs and results alone."""


def cut(patterns: Mapping[str | type, ParallelPattern]) -> Language:
    model = Case(options=GATED).make()
    put_in(model, patterns, Mesh(2, tensor=1, expert=2), 0)
    return model


def test_what_is_swapped_beneath_patterns_and_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    model = Case(options=GATED).make()
    put_in(model, {"*.experts": Own(), "norm": Shifting(), "*.feed": Shifting()}, Mesh(4, tensor=2, expert=2), 0)
    with caplog.at_level(logging.INFO, "lightning_elixir"):
        swapped = fuse(model, True, CPU)
    assert dict(swapped.counts) == {("RMS norm", "RMSNorm"): 5, ("gated product", "GatedFeed"): 1}
    assert len(swapped.left) == 1
    assert (
        "experts of a mixture: GatedExperts stays as it is: its pattern, Own(), has a forward of its own" in caplog.text
    )
    alone = nn.ModuleDict({"experts": Case(options=GATED).make().layers[1].feed.experts})
    put_in(alone, {"experts": Own()}, Mesh(2, expert=2), 0)
    with pytest.raises(PlanError, match=r"nothing can be swapped in ModuleDict \(experts of a mixture.*Own\(\)"):
        fuse(alone, True, CPU)


def test_patterns_stay_when_operators_go() -> None:
    model = cut(EXPERT)
    experts = model.layers[1].feed.experts
    before = experts.forward
    swapped = fuse(model, True, CPU)
    assert has_own_forward(experts)
    assert experts.forward == before
    fuse(model, True, CPU)  # as the engine does after a strategy
    swapped.undo()
    assert not any(has_own_forward(m) for m in model.modules())
    assert experts.forward == before
    take_out(model)
    assert not any("forward" in vars(m) for m in model.modules())


def test_dry_runs_send_16_bits_under_autocast() -> None:
    def step(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        model(**inputs).loss.backward()

    model, mesh = make_lm("qwen3_moe"), Mesh(2, expert=2)
    put_in(model, own_patterns(model, mesh), mesh, 0)
    found = []
    for autocast in (False, True):
        with exchanges_of(model) as exchanges:
            profile_memory(model, make_batch(0), step, torch.bfloat16, autocast=autocast)
        found.append([(one.kind, one.nbytes) for one in exchanges])
    assert found[0] == found[1] != []


def test_dry_runs_count_what_is_saved() -> None:
    """As much traffic as without patterns, since each rank gets as many rows as it sends, and nearly as much memory:
    rows are kept in the place of tokens. What is exchanged is the same."""

    def step(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        model(**inputs).loss.backward()

    def figures(model: nn.Module, is_fused: bool) -> tuple[int, int]:
        profile = profile_memory(model, make_batch(0), step, torch.bfloat16, use_fused_kernels=is_fused)
        return profile.activation_bytes, sum(i.moved_bytes for i in profile.timeline)

    model, mesh, saved, sent = make_lm("qwen3_moe"), Mesh(2, expert=2), [], []
    for patterns in ({}, own_patterns(model, mesh)):
        put_in(model, patterns, mesh, 0)
        with exchanges_of(model) as exchanges:
            plain = figures(model, False)
        sent.append(list(exchanges))
        with exchanges_of(model) as exchanges:
            fused = figures(model, True)
        assert exchanges == sent[-1]
        saved.append([a - b for a, b in zip(plain, fused, strict=True)])
        swapped = fuse(model, True, CPU)
        assert figures(model, False) == fused
        swapped.undo()
    assert len(sent[0]) == 0 < len(sent[1])
    assert saved[1][0] > 0.6 * saved[0][0] > 0
    assert saved[1][1] == pytest.approx(saved[0][1], rel=0.1)


@pytest.mark.parametrize("number", [-1, 16])
def test_tokens_for_experts_that_are_not_there(number: int) -> None:
    """Before anything is sent; with the operator or without."""
    experts, tokens = GatedExperts(), torch.ones(2, WIDTH)
    numbers, weights = torch.tensor([[0], [number]]), torch.ones(2, 1)
    with pytest.raises(IndexError, match="other than the 16 from 0 on"):
        Expert().forward(experts, experts.forward, Peers("expert", 2, 0), (tokens, numbers, weights), {})
