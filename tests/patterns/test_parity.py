"""Engines whose ranks share operators, and plain PyTorch on one process with all batches.

Sums are taken in another order where a matrix product is cut, where a mean over ranks takes the place of one over a
larger batch, and where tokens travel: fp32 results agree to a few units in the last place, and 1e-5 is far above that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lightning_elixir.patterns import Column, Expert, Row, Sequence, Vocabulary
from lightning_elixir.patterns.apply import pattern_forwards, put_in
from lightning_elixir.plan.memory import Budget
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.plan.problem import PlacementRequest
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.planning import place_anew
from lightning_elixir.profiling.parameters import module_accesses
from lightning_elixir.runtime import offloading
from lightning_elixir.runtime.averages import Averages
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.once import computed_once
from tests.helpers.patterns import (
    EXPERTS,
    IN_PARTS,
    Case,
    Language,
    Mixture,
    check_equal,
    difference,
    train_plain,
    train_ranks,
)
from tests.helpers.plans import make_plan
from tests.helpers.ranks import sent_up
from tests.helpers.tiers import telling

TIGHT = {"placement_policy": "cpu", "chunk_size": 6000}
CLOSE = 1e-5

CASES: dict[str, tuple[int, Case]] = {
    "tensor": (2, Case(tensor=2, plan=TIGHT, options={"is_mixture": False})),
    "tensor_tied": (2, Case(tensor=2, plan=TIGHT, options={"is_tied": True})),
    "tensor_frozen": (2, Case(tensor=2, plan=TIGHT, frozen=("layers.0", "embedding"))),
    "tensor_beside_data": (4, Case(tensor=2, plan=TIGHT, options={"is_mixture": False})),
    "expert": (2, Case(expert=2, plan=TIGHT)),
    "expert_without_tokens": (4, Case(expert=4, plan=TIGHT, is_empty=True)),
    "expert_checkpointed": (2, Case(expert=2, plan=TIGHT, is_empty=True, options={"is_checkpointed": True})),
    "expert_frozen": (2, Case(expert=2, plan=TIGHT, frozen=("layers.1.feed.experts.up", "embedding", "layers.0"))),
    "experts_all_frozen": (2, Case(expert=2, plan=TIGHT, frozen=("layers.1.feed", "embedding", "layers.0"))),
    "expert_beside_data": (4, Case(expert=2, plan=TIGHT, is_empty=True)),
    "both": (4, Case(tensor=2, expert=2, plan=TIGHT)),
    "both_checkpointed": (4, Case(tensor=2, expert=2, plan=TIGHT, is_empty=True, options={"is_checkpointed": True})),
    "both_accumulated_clipped": (4, Case(tensor=2, expert=2, plan=TIGHT, micro_batches=2, clip_norm=0.3)),
    "both_whole_shards": (4, Case(tensor=2, expert=2, plan={**TIGHT, "enable_distributed_storage": False})),
    "both_mixed_tiers": (
        4,
        Case(
            tensor=2,
            expert=2,
            plan={"placement_policy": "const", "shard_param_frac": 0.5, "offload_optim_frac": 0.5, "chunk_size": 6000},
        ),
    ),
}


@computed_once
def plain_of(name: str) -> Any:
    world, case = CASES[name]
    return train_plain(case, world // case.tensor)


@pytest.mark.parametrize("name", telling(CASES, "tensor_tied", "expert_without_tokens"))
def test_equals_one_process_with_all_batches(name: str) -> None:
    world, case = CASES[name]
    check_equal(run_ranks(train_ranks, world, case), plain_of(name), CLOSE)


@pytest.mark.parametrize("name", telling(["tensor", "both"], "tensor"))
def test_cut_values_from_the_host_arrive_piece_by_piece(name: str) -> None:
    world, case = CASES[name]
    directly = run_ranks(train_ranks, world, case)
    for (run, pieces), expected in zip(run_ranks(sent_up, world, train_ranks, case), directly, strict=True):
        assert run[:2] == expected[:2]
        assert difference(run[2], expected[2]) == 0
        assert (pieces > 10) == (expected is directly[0])


@pytest.mark.full
def test_the_same_placement_gives_the_same_bits_again() -> None:
    first, second = (run_ranks(train_ranks, 2, CASES["expert"][1]) for _ in range(2))
    assert first[0][:2] == second[0][:2]
    assert difference(first[0][2], second[0][2]) == 0


def _with_fates(case: Case) -> Any:
    def counts(module: ElixirModule, _: object) -> tuple[int, int]:
        stats = module.stats()
        return stats.recomputed_blocks, stats.activations_in_bytes

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(offloading, "LEAST_OFFLOADED_BYTES", 0)
        return train_ranks(case, counts)


@pytest.mark.full
@pytest.mark.parametrize(
    "fate", telling(["recompute", "offload", "recompute_offloaded", "keep_attention"], "recompute_offloaded")
)
@pytest.mark.parametrize("name", telling(["tensor", "expert", "both"], "expert"))
def test_numbers_do_not_depend_on_what_becomes_of_activations(name: str, fate: str) -> None:
    world, case = CASES[name]
    expected = run_ranks(_with_fates, world, replace(case, activations="keep"))
    actual = run_ranks(_with_fates, world, replace(case, activations=fate))
    for ours, kept in zip(actual, expected, strict=True):
        assert ours[:2] == kept[:2]
        assert difference(ours[2], kept[2]) == 0
        recomputed, brought = ours[4]
        assert (recomputed > 0) == (fate != "offload")
        assert (brought > 0) == fate.endswith(("offload", "offloaded"))


RESIDENT = {"placement_policy": "cuda", "chunk_size": 6000}


@pytest.mark.full
def test_numbers_do_not_depend_on_the_placement() -> None:
    tight = run_ranks(train_ranks, 2, Case(tensor=2, plan=TIGHT))
    resident = run_ranks(train_ranks, 2, Case(tensor=2, plan=RESIDENT))
    assert resident[0][3]["evictions"] == 0
    assert difference(tight[0][2], resident[0][2]) == 0


def test_mixed_precision_is_close() -> None:
    """bf16 has 8 bits: sums in another order differ by that in every product."""
    case = Case(tensor=2, plan={**TIGHT, "master_weights": True}, dtype=torch.bfloat16)
    losses, norms, state = train_plain(case, 1)
    for run in run_ranks(train_ranks, 2, case):
        assert run[0] == pytest.approx(losses, rel=0.02)
        assert run[1] == pytest.approx(norms, rel=0.05)
        assert difference(run[2], state) < 0.05


class InParts(Case):
    """Between `Row` and `Column` every rank has its part of the sequence alone."""

    @property
    def patterns(self) -> dict[Any, Any]:
        return IN_PARTS


def test_sequences_in_parts() -> None:
    case = InParts(tensor=2, plan=TIGHT, options={"is_mixture": False})
    losses, norms, state = train_plain(case, 1)
    for run in run_ranks(train_ranks, 2, case):
        assert run[0] == pytest.approx(losses, abs=CLOSE)
        assert run[1] == pytest.approx(norms, abs=CLOSE)
        assert difference(run[2], state) < CLOSE


class Dropping(Mixture):
    """Each expert has room for its share of a rank's tokens; the router leaves out the others."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, numbers = self.gate(tokens).float().softmax(-1).topk(2, dim=-1)
        chosen = functional.one_hot(numbers.flatten(), EXPERTS)
        has_room = ((chosen.cumsum(0) * chosen).sum(1) <= numbers.numel() // EXPERTS).view_as(numbers)
        assert not has_room.all()
        return self.experts(tokens, numbers, (weights * has_room).to(tokens.dtype)).view(x.shape)


class WithCapacity(Case):
    def make(self) -> Language:
        model = super().make()
        model.layers[1].feed = Dropping(is_gated=False)
        return model


def test_a_capacity_that_the_router_keeps() -> None:
    case = WithCapacity(expert=2, plan=TIGHT)
    check_equal(run_ranks(train_ranks, 2, case), train_plain(case, 2), CLOSE)


class Covering(Mixture):
    """A token has as many experts as it takes for a part of its shares, and all of a batch as many as one needs."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        shares, numbers = self.gate(tokens).float().softmax(-1).sort(descending=True)
        is_needed = shares.cumsum(-1) - shares < 0.33
        k = int(is_needed.sum(-1).max())
        self.seen = [*vars(self).get("seen", ()), k]
        return self.experts(tokens, numbers[:, :k], (shares * is_needed)[:, :k]).view(x.shape)


class WithCovering(Case):
    def make(self) -> Language:
        model = super().make()
        model.layers[1].feed = Covering(is_gated=False)
        return model


def _numbers_of_experts(case: Case) -> Any:
    return train_ranks(case, lambda module, _: module.module.layers[1].feed.seen)


def test_routers_may_choose_more_experts_on_one_rank() -> None:
    case = WithCovering(expert=2, plan=TIGHT)
    runs = run_ranks(_numbers_of_experts, 2, case)
    assert runs[0][4] != runs[1][4]
    check_equal(runs, train_plain(case, 2), CLOSE)


class Chain(nn.Module):
    """Row gives its result in parts, and the next block begins with them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.last = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.down(self.up(x).relu()))).square().mean()


def chain(world: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model, x = Chain(), torch.randn(2, 6, 8)
    if world > 1:
        patterns = {
            "up": Column(),
            "down": Row(sequence_dim=1),
            "norm": Sequence(splits=False, gathers=False),
            "last": Column(sequence_dim=1, gathers=True),
        }
        mesh = Mesh(world, world)
        put_in(model, patterns, mesh, dist.get_rank())
        module = ElixirModule(model, make_plan(model, mesh=mesh, **TIGHT))
        optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.backward(module(x))
        found = module.full_grads()
        module.close()
        return [found[name] for name, _ in model.named_parameters()]
    model(x).backward()
    return [p.grad for p in model.parameters()]


def test_a_result_in_parts_goes_on_in_parts() -> None:
    plain = chain(1)
    for grads in run_ranks(chain, 2, 2):
        assert [g.shape for g in grads] == [p.shape for p in plain]
        assert max(float((g - p).abs().max()) for g, p in zip(grads, plain, strict=True)) < 1e-6


def test_every_pattern_is_in_the_cases() -> None:
    known = {type(pattern) for _, case in CASES.values() for pattern in case.patterns.values()}
    assert known == {Column, Row, Vocabulary, Sequence, Expert}
    assert isinstance(CASES["both"][1].make(), Language)


def _averages_that_come_back() -> tuple[dict[str, bool], bool]:
    """Whether whole averages that are loaded come out again, and whether another placement keeps the layout."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 16, bias=False))
    whole = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    mesh = Mesh(2, tensor=2)
    put_in(model, {"0": Column(), "2": Row()}, mesh, rank)
    budget = Budget(cpu_bytes=10**9)
    plan = make_plan(model, placement_policy="cpu", mesh=mesh, cpu_bytes=10**9, compute_dtype=torch.float32)
    module = ElixirModule(model, plan, device="cpu")
    averages = Averages(module.engine, lambda average, value, count: average)
    averages.load(whole)
    found = averages.whole()
    module.close()
    moved = place_anew(plan, PlacementRequest("cuda", accesses=module_accesses(model)), budget, TrainingRegime())
    same_layout = moved.layout_fingerprint() == plan.layout_fingerprint()
    return {name: torch.equal(value, whole[name]) for name, value in found.items()}, same_layout


def test_averages_are_loaded_by_parts_and_places_change_by_them() -> None:
    """Loading had taken a rank's offsets for those of whole parameters, and places were found as if nothing was cut."""
    (first, same), (_, other) = run_ranks(_averages_that_come_back, 2)
    assert first == {"0.weight": True, "2.weight": True}
    assert same
    assert other


class Casting(nn.Module):
    """Experts that give another dtype than their tokens have, as products under autocast do."""

    def __init__(self, results: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 16) / 16)
        self.results = results

    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        chosen = self.weight.to(torch.bfloat16)[experts[:, 0]]
        made = torch.einsum("nj,nij->ni", tokens.to(torch.bfloat16), chosen)
        return made if self.results == "narrow" else made[:, :8]


def _cast(results: str) -> tuple[float, str]:
    """All tokens go to the experts of rank 0."""
    torch.manual_seed(0)
    model, mesh = nn.ModuleList([Casting(results)]), Mesh(2, expert=2)
    numbers = torch.tensor([[1, 0]]).repeat(6, 1)
    tokens, weights = torch.randn(6, 16), torch.ones(6, 2)
    expected = sum(model[0](tokens, numbers[:, k : k + 1], weights).detach().float() for k in (0, 1))
    put_in(model, {"0": Expert()}, mesh, dist.get_rank())
    module = ElixirModule(model, make_plan(model, mesh=mesh, **TIGHT))
    try:
        found = model[0](tokens, numbers, weights).detach()
    except Exception as error:
        module.engine.comm.leave(error)
        return 0.0, f"{type(error).__name__}: {error}"
    difference = float((found - expected).abs().max())
    module.close()
    return difference, str(found.dtype)


def test_experts_that_give_another_dtype_than_that_of_tokens() -> None:
    """A rank without tokens cannot see which."""
    assert run_ranks(_cast, 2, "narrow") == [(0.0, "torch.float32")] * 2


class Scaling(nn.Module):
    """Experts that multiply each element by one of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16))

    def forward(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return tokens * self.weight[experts[:, 0].long()] * weights


def _rows_sent(dtype: torch.dtype) -> tuple[list[int], float]:
    """How many rows this rank sends each time, and how far results are from those of one process."""
    torch.manual_seed(0)
    model, mesh = nn.ModuleList([Scaling()]), Mesh(2, expert=2)
    numbers = torch.tensor([[1, 0, 0], [3, 2, 3], [0, 2, 1], [1, 1, 1]], dtype=dtype)
    tokens, weights = torch.randn(4, 16), torch.rand(4, 3)
    expected = sum(model[0](tokens, numbers[:, k : k + 1], weights[:, k : k + 1]) for k in range(3)).detach()
    put_in(model, {"0": Expert()}, mesh, dist.get_rank())
    peers, sent = next(pattern_forwards(model)).peers, []
    exchange = peers.exchange_rows

    def counted(rows: Tensor, *counts: Any) -> Tensor:
        sent.append(len(rows))
        return exchange(rows, *counts)

    peers.exchange_rows = counted  # type: ignore[method-assign]
    module = ElixirModule(model, make_plan(model, mesh=mesh, **TIGHT))
    found = model[0](tokens, numbers, weights).detach()
    module.close()
    return sent, float((found - expected).abs().max())


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_a_token_is_sent_once_to_each_rank(dtype: torch.dtype) -> None:
    """Rows, weights and numbers of experts go there, and one sum for each comes back."""
    runs = run_ranks(_rows_sent, 2, dtype)
    assert [sent for sent, _ in runs] == [[5, 5, 5, 6], [5, 5, 5, 4]]
    assert all(far < CLOSE for _, far in runs)


@pytest.mark.full
def test_experts_that_give_another_shape() -> None:
    (_, first), (_, second) = run_ranks(_cast, 2, "short", fresh=True)
    assert "returns a tensor like its tokens, [24, 16], and gave [24, 8]" in first
    assert "PeerLostError" in second
