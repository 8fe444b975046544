"""Blocks that are recomputed but for attention: bits of keeping everything, and which calls run twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_elixir.core.attention import can_stand_in, is_attention
from lightning_elixir.runtime.kept_attention import keeping_attention
from tests.helpers.activations import PLACEMENTS, WIDTH, Attending, Pair, Stack, planned
from tests.helpers.seeds import seed_torch
from tests.helpers.tiers import full

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]

DEPTH = 3


class Calls(TorchDispatchMode):
    """Counts calls of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += is_attention(func)
        return func(*args, **(kwargs or {}))


def _calls(fate: str, make_block: Callable[[], nn.Module], placement: str = "tight") -> int:
    """In a step of an engine, which has the bits of plain PyTorch."""
    seed_torch(0)
    model = Stack(make_block, DEPTH)
    pair = Pair(model, planned(model, fate, **PLACEMENTS[placement]))
    for seed in range(2):
        pair.step(seed, rows=256)
    with Calls() as plain:
        pair.plain(torch.randn(256, 16)).sum().backward()
    pair.oracle.zero_grad()
    with Calls() as calls:
        pair.step(2, rows=256)
    pair.check()
    assert pair.module.stats().recomputed_blocks == 3 * DEPTH
    return calls.number - plain.number


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_attention_is_not_computed_again(placement: str) -> None:
    assert _calls("keep_attention", Attending, placement) == DEPTH


def test_attention_with_dropout_is() -> None:
    """It draws random numbers, which what comes after it would draw else. (On the CPU it is not fused then.)"""
    before = _calls("keep_attention", lambda: Attending(dropout=0.1))
    assert before == _calls("recompute", lambda: Attending(dropout=0.1))
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    operands = [torch.zeros(1, 1, 8, 8)] * 3
    assert is_attention(flash)
    assert can_stand_in(flash, operands, {})
    assert can_stand_in(flash, (*operands, 0.0), {})
    assert not can_stand_in(flash, (*operands, 0.1), {})
    assert not can_stand_in(flash, operands, {"dropout_p": 0.1})


def test_attention_that_a_checkpoint_inside_has_dropped_is() -> None:
    assert _calls("keep_attention", lambda: Attending(is_checkpointed=True)) == _calls(
        "recompute", lambda: Attending(is_checkpointed=True)
    )


def test_a_graph_may_be_gone_through_again() -> None:
    q = torch.randn(1, 2, 64, 16, requires_grad=True)
    with Calls() as calls:
        y = checkpoint(
            lambda q: scaled_dot_product_attention(q * 2, q, q).exp(),
            q,
            use_reentrant=False,
            context_fn=keeping_attention,
        )
        grads = [torch.autograd.grad(y.sum(), q, retain_graph=True) for _ in range(3)]
    expected = torch.autograd.grad(scaled_dot_product_attention(q * 2, q, q).exp().sum(), q)
    assert all(torch.equal(*grad, *expected) for grad in grads)
    assert calls.number == 1


@pytest.mark.parametrize("times", [0, 1])
def test_nothing_is_held_when_the_graph_is_gone(times: int) -> None:
    seen: list[weakref.ref[torch.UntypedStorage]] = []

    class Seeing(Calls):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if is_attention(func):
                seen.append(weakref.ref(result[0].untyped_storage()))
            return result

    def run() -> None:
        q = torch.randn(1, 2, 64, 16, requires_grad=True)
        y = checkpoint(
            lambda q: scaled_dot_product_attention(q * 2, q, q).exp(),
            q,
            use_reentrant=False,
            context_fn=keeping_attention,
        )
        for _ in range(times):
            torch.autograd.grad(y.sum(), q, retain_graph=True)

    gc.collect()
    gc.disable()
    try:
        with Seeing():
            run()
        assert [one() for one in seen] == [None]
    finally:
        gc.enable()


def test_what_was_written_to_is_computed_again() -> None:
    keeping, replaying = keeping_attention()
    q = torch.randn(1, 2, 64, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), keeping:  # as a checkpoint has some
        first = scaled_dot_product_attention(q, q, q)
        second = scaled_dot_product_attention(q, 2 * q, q)
    expected = first.detach().clone()
    first.detach().zero_()
    with Calls() as calls, replaying:
        again = scaled_dot_product_attention(q, q, q)
        other = scaled_dot_product_attention(q, 2 * q, q)
    assert torch.equal(again, expected)
    assert other.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert calls.number == 1


def test_frozen_layers_in_evaluation_take_the_fast_path_as_without() -> None:
    seed_torch(0)
    model = Stack(lambda: nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True).eval(), DEPTH)
    model.inp.requires_grad_(False)
    model.blocks.requires_grad_(False)
    pair = Pair(model, planned(model, "keep_attention", **PLACEMENTS["resident"]))
    pair.step(0, rows=64, run=lambda model, x: model(x[None]))
    pair.check()


class FallingBack(Attending):
    """By a kernel that refuses these operands, then by one that takes them, which another call follows."""

    def attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).view(1, len(x), 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = heads[2]
        with pytest.raises(RuntimeError):
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads[:2], y[..., :8])
        for _ in range(2):
            y = scaled_dot_product_attention(*heads[:2], y)
        return x + y.transpose(1, 2).flatten(2)[0]


def test_a_call_that_raises_has_its_place_among_the_calls() -> None:
    assert _calls("keep_attention", FallingBack) == (3 + 1) * DEPTH


class ByModule(Attending):
    """By torch's module for it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def attend(self, x: Tensor) -> Tensor:
        y = self.before(x)[None]
        return x + self.module(y, y, y, need_weights=False)[0][0]


class ByOperator(Attending):
    """By the kernel's own name."""

    def attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).view(1, len(x), 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads)[0]
        return x + y.transpose(1, 2).flatten(2)[0]


class ByExportedCode(Attending):
    """As modules of exported graphs do."""

    def attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).view(1, len(x), 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = torch.ops.aten.scaled_dot_product_attention.default(*heads)
        return x + y.transpose(1, 2).flatten(2)[0]


class _Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def with_compiled_parts() -> nn.Module:
    block = Attending()
    block.up = _Compiled()  # type: ignore[assignment]
    block.up.compile(backend="aot_eager", fullgraph=True)
    return block


@pytest.mark.parametrize("make_block", [ByModule, ByOperator, ByExportedCode, with_compiled_parts])
def test_attention_is_found_wherever_it_is_called(make_block: Callable[[], nn.Module]) -> None:
    assert _calls("keep_attention", make_block) == DEPTH


class _CompiledAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, x, x)


class WithCompiledAttention(Attending):
    def __init__(self) -> None:
        super().__init__()
        self.part = _CompiledAttention()
        self.part.compile(backend="aot_eager", fullgraph=True)

    def attend(self, x: Tensor) -> Tensor:
        return x + self.part(x.view(1, len(x), 4, -1).transpose(1, 2)).transpose(1, 2).flatten(2)[0]


def test_attention_in_compiled_code_is_computed_again() -> None:
    assert _calls("keep_attention", WithCompiledAttention) == _calls("recompute", WithCompiledAttention)


@pytest.mark.parametrize("when", [full("before"), "after"])
def test_compiled_blocks_keep_nothing_and_say_so(when: str, caplog: pytest.LogCaptureFixture) -> None:
    seed_torch(0)
    model = Stack(Attending, depth=2)
    for block in model.blocks:
        block.drop = nn.Identity()

    def compiled(of: nn.Module) -> None:
        for block in of.blocks:  # type: ignore[union-attr]
            block.compile(backend="aot_eager")

    if when == "before":
        compiled(model)
    pair = Pair(model, planned(model, "keep_attention"))
    if when == "after":
        compiled(pair.plain)
        compiled(model)
    assert ("keeps nothing of 2 compiled blocks" in caplog.text) == (when == "before")
    for seed in range(2):
        pair.step(seed, rows=256)
    pair.check()
    assert pair.module.stats().recomputed_blocks == 4
