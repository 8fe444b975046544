"""Fabric on a device: the bodies of tests/strategy/test_fabric.py, and what memory is taken there."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_elixir import HybridAdam
from lightning_elixir._lightning import Fabric
from lightning_elixir.fabric import ElixirStrategy

pytestmark = pytest.mark.gpu
MIB = 2**20


def _layers(width: int = 1024, depth: int = 12) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])


def _losses(
    strategy: Any,
    precision: Any,
    *,
    num_modules: int = 1,
    steps: int = 6,
    before: Callable[[int], None] = lambda step: None,
) -> list[float]:
    fabric = Fabric(accelerator="cuda", devices=1, strategy=strategy, precision=precision)
    fabric.launch()
    parts = []
    for _ in range(num_modules):
        net = _layers()
        parts.append(fabric.setup(net, HybridAdam(net.parameters(), lr=1e-4)))
    losses = []
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        before(step)
        x = torch.randn(64, 1024, generator=generator).to(fabric.device)
        y = x
        for model, _ in parts:
            y = model(y)
        loss = (y - x).square().mean()
        fabric.backward(loss)
        for model, optimizer in parts:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_placements_agree_on_the_device(precision: str) -> None:
    expected = _losses(ElixirStrategy(placement_policy="cuda"), precision)
    for options in ({"placement_policy": "cpu"}, {"gpu_memory_limit": "96MiB"}):
        strategy = ElixirStrategy(**options, chunk_size="5MiB")
        assert _losses(strategy, precision) == expected
        strategy.close()
    assert expected[-1] < expected[0]


def test_two_modules_keep_within_the_limit() -> None:
    torch.cuda.empty_cache()
    expected = _losses(ElixirStrategy(placement_policy="cuda"), "bf16-mixed", num_modules=2)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    strategy = ElixirStrategy(gpu_memory_limit="192MiB", chunk_size="5MiB")
    assert _losses(strategy, "bf16-mixed", num_modules=2) == expected
    assert torch.cuda.max_memory_allocated() - before < 192 * MIB
    strategy.close()


def test_memory_is_given_back_and_taken_again() -> None:
    expected = _losses(ElixirStrategy(placement_policy="cuda"), "bf16-mixed", steps=8)
    gc.collect()
    torch.cuda.empty_cache()
    strategy, held = ElixirStrategy(chunk_size="5MiB"), []

    def change(step: int) -> None:
        if step in (4, 6):
            # Near 100 MiB of it are what cuBLAS computes in, on a large GPU; all here takes 200 MiB beside that.
            strategy.set_memory_limit(**({"gpu": "192MiB"} if step == 4 else {}))
            held.append(torch.cuda.memory_reserved())

    assert _losses(strategy, "bf16-mixed", steps=8, before=change) == expected
    assert held[0] < 192 * MIB < held[1]
    strategy.close()
