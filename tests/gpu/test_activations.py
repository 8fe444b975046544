"""Activations on a GPU: copies that begin late are waited for, and the memory that a fate promises is there."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lightning_elixir import profile_memory
from lightning_elixir.plan.activations import Fate, ModelBlock
from lightning_elixir.plan.fates import with_fates
from lightning_elixir.profiling.blocks import found_blocks
from lightning_elixir.runtime.kept_attention import keeping_attention
from lightning_elixir.wrapper import ElixirModule
from tests.gpu.cuda import CUDA, late
from tests.helpers.activations import FATES, PLACEMENTS, Attending, Block, Pair, Stack, planned

pytestmark = pytest.mark.gpu

WIDE, DEPTH, ROWS = 1024, 12, 16384


@pytest.mark.parametrize("way", ["issue", "resume"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("fate", FATES)
def test_copies_that_begin_late_are_waited_for(
    fate: str, placement: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Stack()
    pair = Pair(model, planned(model, fate, **PLACEMENTS[placement]), CUDA)
    with late(monkeypatch, way):
        for seed, rows in enumerate([1024, 1024, 2048, 1024]):
            pair.step(seed, rows)
        torch.cuda.synchronize()
    pair.check()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_kept_attention_has_the_gradients_of_keeping_everything(dropout: float) -> None:
    """With dropout in it attention is computed again, or later layers would drop others. (Not bit for bit: kernels of
    attention add gradients up in any order.)"""
    torch.manual_seed(0)
    model = Stack(lambda: Attending(dropout=dropout))
    plain = copy.deepcopy(model).to(CUDA)
    module = ElixirModule(model, planned(model, "keep_attention"), device=CUDA)
    x = torch.randn(1024, 16, device=CUDA)
    for one in (plain, module):
        torch.manual_seed(1)
        _step(one, {"x": x})
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        assert expected[name] is not None
        torch.testing.assert_close(parameter.grad.to(CUDA), expected[name], rtol=1e-3, atol=1e-6)
    assert module.stats().recomputed_blocks == 5
    module.close()


@pytest.mark.parametrize(
    "kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
)
def test_results_of_each_kernel_of_attention_may_be_kept(kernel: SDPBackend) -> None:
    """Dropout that follows drops the same ones again."""
    torch.use_deterministic_algorithms(kernel is not SDPBackend.CUDNN_ATTENTION)  # cuDNN's has no such form
    torch.manual_seed(0)
    q = torch.randn(2, 4, 256, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)

    def run(q: Tensor) -> Tensor:
        with sdpa_kernel(kernel):
            y = nn.functional.scaled_dot_product_attention(q * 2, q, q, is_causal=True)
        return nn.functional.dropout(y.sin(), 0.5)

    grads = []
    for context_fn in (noop_context_fn, keeping_attention):
        torch.manual_seed(1)
        y = checkpoint(run, q, use_reentrant=False, context_fn=context_fn)
        grads += torch.autograd.grad(y.float().square().sum(), q)
    assert (grads[1] - grads[0]).norm() < 0.01 * grads[0].norm()


def _wide(make_block: Callable[[int], nn.Module] = Block) -> nn.Module:
    torch.manual_seed(0)
    return Stack(lambda: make_block(WIDE), DEPTH, WIDE)


def _step(model: Any, inp: Mapping[str, Tensor]) -> None:
    model(inp["x"]).square().mean().backward()


@pytest.mark.parametrize(
    ("make_block", "fate"),
    [*((Block, fate) for fate in Fate), *((Attending, f) for f in (Fate.KEEP, Fate.RECOMPUTE, Fate.KEEP_ATTENTION))],
)
def test_as_much_memory_is_taken_as_was_foreseen(make_block: Callable[[int], nn.Module], fate: Fate) -> None:
    """Everything resident, so that what changes is activations."""
    model = _wide(make_block)
    names = found_blocks(model)
    x = torch.randn(ROWS, 16, device=CUDA)
    profile = profile_memory(model, {"x": x.cpu()}, _step, blocks=names)
    foreseen = with_fates(profile, [ModelBlock(name, fate) for name in names])
    module = ElixirModule(model, planned(model, fate.value, placement_policy="cuda", chunk_size=1 << 26), device=CUDA)
    for _ in range(3):
        gc.collect()
        torch.cuda.synchronize()
        module.zero_grad()
        before = module.engine.device_bytes()
        torch.cuda.reset_peak_memory_stats()
        _step(module, {"x": x})
        torch.cuda.synchronize()
    blocks = module.stats().held_bytes["grad_block"]
    taken = torch.cuda.max_memory_allocated() - before - blocks
    # Gradients come while activations go, and stay on the device here: at the highest moment there may be all of them.
    assert 0.9 * foreseen.activation_bytes < taken < 1.05 * foreseen.activation_bytes + foreseen.grad_bytes
    stats = module.stats()
    if fate.is_offloaded:
        assert stats.activations_left_bytes == 0
        assert stats.activations_out_bytes == pytest.approx(3 * (foreseen.offloaded_bytes or 0), rel=0.02)
    module.close()
