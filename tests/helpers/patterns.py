"""Models with parallel patterns, trained by an engine on several ranks and by plain PyTorch on one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lightning_elixir.patterns import Column, Expert, ParallelPattern, Row, Sequence, Vocabulary
from lightning_elixir.patterns.apply import put_in
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.plans import make_plan

STEPS = 3
TOKENS, WIDTH, EXPERTS, VOCABULARY = 8, 16, 8, 24


class Attention(nn.Module):
    """Two heads a rank at most; the number of heads is seen from the width of what `q` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Experts(nn.Module):
    """As transformers has them: one parameter over all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.2)

    def forward(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(tokens)
        for number in experts.unique().tolist():
            token, place = torch.where(experts == number)
            made = functional.silu(functional.linear(tokens[token], self.up[number]))
            made = functional.linear(made, self.down[number]) * weights[token, place, None]
            total = total.index_add(0, token, made.to(total.dtype))
        return total


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class GatedFeed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class GatedExperts(nn.Module):
    """As transformers has them, to the names."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 4 * WIDTH, WIDTH) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.2)
        self.act_fn = nn.SiLU()

    def forward(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            token, place = torch.where(experts == number)
            gate, up = functional.linear(tokens[token], self.gate_up_proj[number]).chunk(2, -1)
            made = functional.linear(self.act_fn(gate) * up, self.down_proj[number]) * weights[token, place, None]
            total = total.index_add(0, token, made.to(total.dtype))
        return total


class Mixture(nn.Module):
    def __init__(self, *, is_gated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = GatedExperts() if is_gated else Experts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        shares = self.gate(tokens).float().softmax(-1)
        weights, numbers = shares.topk(2, dim=-1)
        return self.experts(tokens, numbers, weights.to(tokens.dtype)).view(x.shape)


class Block(nn.Module):
    def __init__(self, *, is_mixture: bool, is_checkpointed: bool, is_gated: bool) -> None:
        super().__init__()
        self.first, self.second = (RMSNorm() if is_gated else nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        dense = GatedFeed if is_gated else Feed
        self.feed: nn.Module = Mixture(is_gated=is_gated) if is_mixture else dense()
        self.is_checkpointed = is_checkpointed

    def _forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_checkpointed and self.training:
            return torch.utils.checkpoint.checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)


class Language(nn.Module):
    """A small language model with all that patterns are for; gated: of what fused operators are for."""

    def __init__(
        self,
        layers: int = 2,
        *,
        is_mixture: bool = True,
        is_tied: bool = False,
        is_checkpointed: bool = False,
        is_gated: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            Block(is_mixture=is_mixture and i % 2 == 1, is_checkpointed=is_checkpointed, is_gated=is_gated)
            for i in range(layers)
        )
        self.norm: nn.Module = RMSNorm() if is_gated else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return self.loss(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


TENSOR: dict[str | type, ParallelPattern] = {
    "*.attention.[qkv]": Column(),
    "*.attention.o": Row(),
    "*.feed.up": Column(),
    "*.feed.down": Row(),
    "embedding": Vocabulary(),
    "head": Vocabulary(gathers=False),
    "loss": Vocabulary(),
    "*.first": Sequence(),
}
EXPERT: dict[str | type, ParallelPattern] = {"*.experts": Expert()}
# Between `Row` and `Column` every rank has its part of the sequence alone.
IN_PARTS: dict[str | type, ParallelPattern] = {
    "*.attention.[qkv]": Column(),
    "*.attention.o": Row(),
    "*.second": Sequence(gathers=False),
    "*.feed.up": Column(sequence_dim=1),
    "*.feed.down": Row(),
    "norm": Sequence(),
    "head": Column(gathers=True),
}


@dataclass(frozen=True)
class Case:
    """How to train: the same words for the oracle and the engine."""

    tensor: int = 1
    expert: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the model."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """As of `tests.helpers.plans.make_plan`."""
    dtype: torch.dtype = torch.float32
    micro_batches: int = 1
    clip_norm: float = 0.0
    frozen: tuple[str, ...] = ()
    """Beginnings of names."""
    device: str = "cpu"
    activations: str | None = None
    is_fused: bool = False
    is_empty: bool = False
    """Route so that some experts, and some ranks, get no tokens."""

    def make(self) -> Language:
        torch.manual_seed(3)
        model = Language(**self.options)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(self.frozen or ("\0",)))
        if self.is_empty:
            for name, parameter in model.named_parameters():
                if name.endswith("gate.weight"):
                    with torch.no_grad():  # the first two experts are always the best
                        parameter[0].fill_(0.0)
                        parameter[2:] = parameter[1:2] * -1.0
        return model

    @property
    def patterns(self) -> dict[str | type, ParallelPattern]:
        found = dict(TENSOR)
        if self.options.get("is_gated"):
            found["*.feed.[gu]*_proj"], found["*.feed.down_proj"] = found.pop("*.feed.up"), found.pop("*.feed.down")
        if any(isinstance(m, Experts | GatedExperts) for m in self.make().modules()):
            found |= EXPERT
        if all(isinstance(layer.feed, Mixture) for layer in self.make().layers):
            found = {key: pattern for key, pattern in found.items() if not str(key).startswith("*.feed")}
        return found


def batch(number: int, of: int) -> Tensor:
    """Which batch the ranks with a common one have."""
    return torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(100 * number + of))


def new_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.05, foreach=False)


def train_plain(case: Case, num_batches: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Plain PyTorch on all batches, in fp32: losses, norms and the final state."""
    model = case.make().to(case.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = new_optimizer(trained)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(case.micro_batches):
            number = step * case.micro_batches + micro
            own = [model(batch(number, of).to(case.device)) for of in range(num_batches)]
            loss = torch.stack(own).mean()
            loss.backward()
            losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(trained, case.clip_norm or 1e9)
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {k: v.detach().to("cpu", copy=True) for k, v in model.state_dict().items()}


def build(case: Case) -> tuple[ElixirModule, ElixirOptimizer, Mesh]:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = Mesh(world, case.tensor, case.expert)
    model = case.make()
    put_in(model, case.patterns, mesh, rank)
    plan = make_plan(model, mesh=mesh, compute_dtype=case.dtype, **case.plan)
    how = {"dtype": case.dtype, "device": case.device, "use_fused_kernels": case.is_fused}
    module = ElixirModule(model, plan, activations=case.activations, **how)
    optimizer = new_optimizer([p for p in model.parameters() if p.requires_grad])
    return module, ElixirOptimizer(module, optimizer, max_norm=case.clip_norm), mesh


def train_ranks(
    case: Case, look: Callable[[ElixirModule, ElixirOptimizer], Any] | None = None
) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, int], Any]:
    """What every rank returns: mean losses, norms, the whole final state, counters, and what `look` gives."""
    module, optimizer, mesh = build(case)
    of = mesh.batch_of(dist.get_rank())
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(case.micro_batches):
            loss = module(batch(step * case.micro_batches + micro, of).to(case.device))
            optimizer.backward(loss)
            mean = loss.detach().float().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / dist.get_world_size())
        norms.append(float(optimizer.grad_norm()))
        optimizer.step()
        optimizer.zero_grad()
    state = {k: v.clone() for k, v in module.full_state_dict(rank0_only=False).items()}
    stats = module.stats()
    seen = None if look is None else look(module, optimizer)
    module.close()
    return losses, norms, state, {"evictions": stats.evictions, "fetches": stats.fetches}, seen


def check_equal(runs: list[Any], plain: Any, tolerance: float) -> None:
    """Every rank's losses, norms and weights are those of one process, weights of all ranks the same bits, and chunks
    have come and gone.

    Args:
        runs: What `train_ranks` gives, of each rank.
        plain: What `train_plain` gives.
        tolerance: Absolute.
    """
    losses, norms, state = plain
    for run in runs:
        assert run[0] == pytest.approx(losses, abs=tolerance)
        assert run[1] == pytest.approx(norms, abs=tolerance)
        assert difference(run[2], state) < tolerance
        assert difference(run[2], runs[0][2]) == 0
        assert run[3]["evictions"] > 0


def difference(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest of all elements; names and shapes must be equal."""
    assert list(state) == list(expected)
    assert [tuple(v.shape) for v in state.values()] == [tuple(v.shape) for v in expected.values()]
    return max(float((state[k].float() - expected[k].float()).abs().max()) for k in state)
