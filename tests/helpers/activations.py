"""Blocks whose activations are worth moving, and a model of them beside itself in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_elixir.plan.activations import ActivationRequest, Fate
from lightning_elixir.plan.types import Plan
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.plans import make_plan

WIDTH, ROWS = 64, 1024  # what a block saves is larger than what stays on the device as too small
FATES = [fate.value for fate in Fate]
PLACEMENTS: dict[str, dict[str, Any]] = {
    "tight": {"placement_policy": "cpu", "chunk_size": 64 * 256 * 4},
    "resident": {"placement_policy": "cuda", "chunk_size": 64 * 256 * 4},
}


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        y = self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return x + (y if scale is None else y * scale)


class Attending(Block):
    """Attention over the rows, by heads of 16, before the MLP.

    Args:
        dropout: Of attention.
        is_checkpointed: By itself, inside.
    """

    def __init__(self, width: int = WIDTH, dropout: float = 0.0, is_checkpointed: bool = False) -> None:
        super().__init__(width)
        self.before = nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout, self.is_checkpointed = dropout, is_checkpointed

    def attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).view(1, len(x), 3, -1, 16).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(*heads, dropout_p=self.dropout, is_causal=True)
        return x + self.drop(self.merge(y.transpose(1, 2).flatten(2)[0]))

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        y: Tensor = checkpoint(self.attend, x, use_reentrant=False) if self.is_checkpointed else self.attend(x)
        return super().forward(y, scale=scale)


class Stack(nn.Module):
    def __init__(self, make_block: Callable[[], nn.Module] = Block, depth: int = 5, width: int = WIDTH) -> None:
        super().__init__()
        self.inp = nn.Linear(16, width)
        self.blocks = nn.ModuleList(make_block() for _ in range(depth))
        self.out = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def planned(model: nn.Module, activations: Any, **options: Any) -> Plan:
    """A plan in which that becomes of activations; tight, unless `options` say otherwise."""
    request = ActivationRequest.of(activations)
    return make_plan(model, activations=request, **{**PLACEMENTS["tight"], **options})


class Pair:
    """A model in plain PyTorch, and the same in an engine."""

    def __init__(self, model: nn.Module, plan: Plan, device: torch.device | str = "cpu", **options: Any) -> None:
        self.plain = copy.deepcopy(model).to(device)
        self.module = ElixirModule(model, plan, device=device, **options)
        self.device = device
        self.optimizer = ElixirOptimizer(self.module, torch.optim.SGD(self._trained(model), lr=0.05, foreach=False))
        self.oracle = torch.optim.SGD(self._trained(self.plain), lr=0.05, foreach=False)

    @staticmethod
    def _trained(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.requires_grad]

    def step(
        self, seed: int, rows: int = ROWS, run: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x)
    ) -> None:
        """One step of both: equal losses."""
        x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed)).to(self.device)
        losses = []
        for model, optimizer in ((self.plain, self.oracle), (self.module, self.optimizer)):
            torch.manual_seed(seed)
            loss = run(model, x).square().mean()
            losses.append(loss.detach())
            optimizer.backward(loss) if isinstance(optimizer, ElixirOptimizer) else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*losses)

    def check(self) -> None:
        state = self.module.state_dict()
        different = [k for k, v in self.plain.state_dict().items() if not torch.equal(state[k], v.cpu())]
        assert different == []
