"""A model with a part that stays in fp32, trained while its chunks move."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_elixir.optim.hybrid_adam import HybridAdam
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.plans import make_plan

HALF = torch.bfloat16
WIDTH = 32


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        with torch.autocast(x.device.type, enabled=False):
            weights = self.router(h.float()).softmax(-1)
        return x + sum(weights[:, i : i + 1] * expert(h) for i, expert in enumerate(self.experts))


class Net(nn.Module):
    """A spectral norm, routers and a head in fp32; every weight is met by an operation that autocast casts for.

    Args:
        recompute: Whether blocks are checkpointed, and how: None, "reentrant" or "non-reentrant".
    """

    def __init__(self, recompute: str | None = None, *, is_frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recompute = recompute
        self.enter = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Mixture() for _ in range(4))
        self.head = nn.Linear(WIDTH, 8)
        if is_frozen:
            self.blocks[1].requires_grad_(False)
            self.head.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        with torch.autocast(x.device.type, enabled=False):
            return self.head(x.float())


def batch(step: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(6, WIDTH, generator=generator), torch.randint(0, 8, (6,), generator=generator)
    return x.to(device), y.to(device)


def optimizer_over(model: nn.Module) -> torch.optim.Optimizer:
    return HybridAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train_plain(device: str = "cpu", **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    model = Net(**options).to(device)
    optimizer, losses = optimizer_over(model), []
    for step in range(4):
        x, y = batch(step, device)
        with torch.autocast(device, HALF, cache_enabled=False):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


KEEP = ["head", nn.LayerNorm]  # the rest is the default


def train_through_moves(recompute: str | None, is_frozen: bool, device: str) -> None:
    expected, state = train_plain(device, is_frozen=is_frozen)
    model = Net(recompute, is_frozen=is_frozen)
    options: dict[str, Any] = {"chunk_size": 4096, "compute_dtype": HALF}
    plan = make_plan(model, placement_policy="cpu", gpu_bytes=40_000, **options)
    where = torch.device(device)
    module = ElixirModule(model, plan, dtype=HALF, autocast=True, keep_fp32=KEEP, device=where)
    optimizer = ElixirOptimizer(module, optimizer_over(module))
    losses = []
    for step in range(4):
        x, y = batch(step, device)
        loss = F.cross_entropy(module(x), y)
        optimizer.zero_grad()
        optimizer.backward(loss)
        assert all(g.dtype is torch.float32 for g in module.full_grads().values())
        optimizer.step()
        losses.append(loss.item())
        if step == 1:
            assert module.stats().evictions > 0
            module.replan(make_plan(model, placement_policy="cpu", gpu_bytes=60_000, layout=module.plan, **options))
        if step == 2:  # a plan that knows nothing of what is kept
            module.replan(make_plan(model, placement_policy="cuda", **options))
    assert losses == expected
    actual = module.full_state_dict()
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}  # these have no fp32 master
    for name, value in state.items():
        is_rounded = name in frozen and not name.startswith("head") and "norm" not in name and "router" not in name
        assert torch.equal(actual[name], value.to(HALF).float() if is_rounded else value), name
    with module.full_parameters(["head.weight", "blocks.0.experts.0.weight"]) as whole:
        assert [p.dtype for p in whole.values()] == [torch.float32, HALF]
