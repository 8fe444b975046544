"""Small models at two places, for what users do with their parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.plans import make_plan
from tests.helpers.zoo import ZOO, make

CPU = torch.device("cpu")
TIGHT: dict[str, Any] = {"placement_policy": "cpu", "chunk_size": 8 * 1024}
RESIDENT: dict[str, Any] = {"placement_policy": "cuda", "chunk_size": 8 * 1024}
OPTIONS = [pytest.param(TIGHT, id="cpu"), pytest.param(RESIDENT, id="cuda")]
PLACEMENTS = pytest.mark.parametrize("options", OPTIONS)


def wrapped(
    name: str = "gpt2", dtype: torch.dtype | None = None, **options: Any
) -> tuple[nn.Module, ElixirModule, ElixirOptimizer]:
    model = make(name)
    module = ElixirModule(model, make_plan(model, compute_dtype=dtype, **options), dtype=dtype, device=CPU)
    optimizer = ElixirOptimizer(
        module, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    )
    return model, module, optimizer


def step(module: Any, optimizer: Any, seed: int) -> float:
    loss = ZOO["gpt2"].loss(module, seed)
    if isinstance(optimizer, ElixirOptimizer):
        optimizer.backward(loss)
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
