"""The fused operators beside the formulas that they stand for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_elixir import linear_cross_entropy
from lightning_elixir.fused import liger
from lightning_elixir.fused.linear_loss import rows_at_once
from lightning_elixir.fused.operators import Gate, NormKind, activation, gated_product, rms_norm, rope
from tests.helpers.processes import ROOT

WIDTH, CLASSES, TOKENS = 16, 700, 600


def _operands(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def _targets() -> Tensor:
    targets = torch.randint(0, CLASSES, (TOKENS,), generator=torch.Generator().manual_seed(1))
    targets[::7] = -100
    return targets


def _same(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], operands: list[Tensor], tolerance: float) -> None:
    results = []
    for function in (ours, theirs):
        value = function(*operands)
        weights = torch.linspace(0.5, 2, value.numel()).view(value.shape).to(value.dtype)
        results.append((value, *torch.autograd.grad((value * weights).sum(), operands)))
    for a, b in zip(*results, strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_cross_entropy(reduction: str, has_bias: bool) -> None:
    assert rows_at_once(TOKENS, WIDTH, CLASSES) < TOKENS  # several pieces
    operands = _operands((TOKENS, WIDTH), (CLASSES, WIDTH), *([(CLASSES,)] if has_bias else []))

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_cross_entropy(hidden, weight, _targets(), bias, reduction=reduction)

    def theirs(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight, bias).float(), _targets(), reduction=reduction)

    _same(ours, theirs, operands, 1e-5 if reduction == "mean" else 1e-3)


def test_loss_of_16_bits_is_no_further_from_the_truth_than_plain() -> None:
    hidden, weight = _operands((TOKENS, WIDTH), (CLASSES, WIDTH), dtype=torch.bfloat16)

    def theirs(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(
            F.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32)), _targets()
        )

    exact = torch.autograd.grad(
        theirs(*(wide := [t.detach().double().requires_grad_() for t in (hidden, weight)])), wide
    )
    plain = torch.autograd.grad(theirs(hidden, weight), (hidden, weight))
    ours = torch.autograd.grad(linear_cross_entropy(hidden, weight, _targets()), (hidden, weight))
    for a, b, truth in zip(ours, plain, exact, strict=True):
        assert (a - truth).norm() <= 1.1 * (b - truth).norm()


@pytest.mark.parametrize("trains", [(True, False), (False, True), (False, False)])
def test_loss_with_frozen_operands(trains: tuple[bool, bool]) -> None:
    hidden, weight = (
        t.requires_grad_(is_on) for t, is_on in zip(_operands((TOKENS, WIDTH), (CLASSES, WIDTH)), trains, strict=True)
    )
    loss = linear_cross_entropy(hidden, weight, _targets())
    expected = F.cross_entropy(F.linear(hidden, weight), _targets())
    torch.testing.assert_close(loss, expected)
    assert loss.requires_grad == any(trains)
    if any(trains):
        loss.backward()
        assert [hidden.grad is not None, weight.grad is not None] == list(trains)


def test_loss_backward_twice_and_without_targets() -> None:
    hidden, weight = _operands((TOKENS, WIDTH), (CLASSES, WIDTH))
    loss = linear_cross_entropy(hidden, weight, _targets())
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, (hidden, weight)), strict=True))
    none = torch.full((TOKENS,), -100)
    assert linear_cross_entropy(hidden, weight, none).isnan()  # as plain
    with pytest.raises(ValueError, match="reduction must be"):
        linear_cross_entropy(hidden, weight, none, reduction="none")
    with pytest.raises(ValueError, match="are of shapes"):
        linear_cross_entropy(hidden, weight, none[1:])


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(kind: NormKind, dtype: torch.dtype) -> None:
    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        normal = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        if kind == "gemma":
            return (normal * (1 + weight.float())).to(x.dtype)
        return weight * normal.to(x.dtype)

    operands = _operands((3, 5, WIDTH), (WIDTH,), dtype=dtype)
    # 2^-8 is the last place of a bf16 number near one; sums over rows have a few of them.
    _same(lambda x, w: rms_norm(x, w, 1e-6, kind), theirs, operands, 1e-5 if dtype is torch.float32 else 3e-2)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_product(kind: Gate, dtype: torch.dtype) -> None:
    operands = _operands((4, 9), (4, 9), dtype=dtype)
    _same(lambda a, b: gated_product(a, b, kind), lambda a, b: activation(a, kind) * b, operands, 0)


def test_what_is_kept_for_backward() -> None:
    """Of a norm its input and a number for each row; of a product its two factors; of a loss two gradients."""
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    x, weight = _operands((64, WIDTH), (WIDTH,), dtype=torch.bfloat16)
    hidden, head = _operands((TOKENS, WIDTH), (CLASSES, WIDTH), dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rms_norm(x, weight, 1e-6, "llama")
        assert sum(kept) == 64 * WIDTH * 2 + WIDTH * 2 + 64 * 4
        kept.clear()
        linear_cross_entropy(hidden, head, _targets())
    assert sum(kept) <= TOKENS * WIDTH * 2 + CLASSES * WIDTH * 4 + 64


class _Traffic(TorchDispatchMode):
    """Bytes that operators read and write."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if isinstance(result, Tensor) and func._overloadpacket not in (aten.new_empty, aten.empty_like, aten.detach):
            tensors = [t for t in tree_leaves((args, result)) if isinstance(t, Tensor)]
            self.nbytes += sum(t.numel() * t.element_size() for t in tensors)
        return result


def _foreseen_bytes(shapes: Sequence[tuple[int, ...]], function: Callable[..., Any]) -> tuple[int, int]:
    """What forward and backward move, of tensors without values."""
    with FakeTensorMode():
        operands = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        with _Traffic() as forward:
            results = function(*operands)
        results = (results,) if isinstance(results, Tensor) else results
        grads = [torch.empty_like(result) for result in results]
        with _Traffic() as backward:
            found = torch.autograd.grad(results, [t for t in operands if t.dim() != 3], grads)
    assert [t.shape for t in found] == [t.shape for t in operands if t.dim() != 3]
    return forward.nbytes, backward.nbytes


@pytest.mark.parametrize("has_kernels", [False, True])
def test_a_dry_run_sees_what_kernels_move(has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads its operands and writes its results, once; in backward copies of what it writes over come before."""
    monkeypatch.setattr(liger, "kernels", lambda: object() if has_kernels else None)
    row = 64 * 128 * 2
    forward, backward = _foreseen_bytes([(64, 128), (128,)], lambda x, w: rms_norm(x, w, 1e-6, "llama"))
    if not has_kernels:
        assert forward > 10 * row  # several operators, in fp32 most of them
    else:
        assert forward == 2 * row + 256
        assert backward == 2 * row + 3 * row
    forward, backward = _foreseen_bytes([(64, 128)] * 2, lambda a, b: gated_product(a, b, "silu"))
    assert (forward, backward) == ((3 * row, 2 * (2 + 3) * row) if has_kernels else (5 * row, 11 * row))
    shapes = [(1, 4, 64, 32), (1, 4, 64, 32), (1, 64, 32), (1, 64, 32)]
    if has_kernels:
        assert _foreseen_bytes(shapes, rope) == (8 * row, 8 * row)
    else:
        with FakeTensorMode():
            assert rope(*(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)) is None


KERNELS = """
from contextlib import nullcontext
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from lightning_elixir import linear_cross_entropy
from lightning_elixir.fused import liger, operators

assert liger.runs_on(torch.device("cpu"))
torch.manual_seed(0)
hidden, weight = torch.randn(20, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
targets = torch.randint(0, 30, (20,))
targets[::5] = -100
for reduction in ("mean", "sum"):
    ours = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
    plain = F.cross_entropy(F.linear(hidden, weight), targets, reduction=reduction)
    torch.testing.assert_close(ours, plain)
    for a, b in zip(torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(plain, (hidden, weight))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
class Largest(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = (t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.is_floating_point())
        self.number = max(self.number, *made, 0)
        return result

def largest_of_loss(mode):
    with mode, Largest() as largest:
        hidden, weight = torch.randn(3100, 8, requires_grad=True), torch.randn(64, 8, requires_grad=True)
        linear_cross_entropy(hidden, weight, torch.zeros(3100, dtype=torch.int64)).backward()
    return largest.number

sizes = [largest_of_loss(mode) for mode in (nullcontext(), FakeTensorMode())]
assert sizes == [2048 * 64] * 2, sizes  # of the logits of a piece; a dry run has as many
query, key = torch.randn(2, 4, 5, 8, requires_grad=True), torch.randn(2, 2, 5, 8, requires_grad=True)
angle = torch.randn(1, 5, 4)
cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
def plain_rope(x):
    a, b = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-b, a), -1) * sin.unsqueeze(1)
before = query.detach().clone()
turned = operators.rope(query, key, cos, sin)
assert torch.equal(query, before)
for ours, x in zip(turned, (query, key)):
    torch.testing.assert_close(ours, plain_rope(x))
    weights = torch.randn_like(ours)
    a, = torch.autograd.grad((ours * weights).sum(), x, retain_graph=True)
    b, = torch.autograd.grad((plain_rope(x) * weights).sum(), x)
    torch.testing.assert_close(a, b)
turned = operators.rope(query, key, cos, sin)
first, = torch.autograd.grad((turned[0] ** 3).sum(), query, create_graph=True)
try:
    (first**2).sum().backward()
except RuntimeError as error:
    assert "once_differentiable" in str(error), error
else:
    raise AssertionError("a second derivative, which the kernel has not got")
"""


@pytest.mark.full  # twenty seconds, most of them imports
def test_kernels_by_tritons_interpreter() -> None:
    """Those that it can run: the loss and rotary embeddings, in fp32. The others: tests/gpu/test_fused.py."""
    pytest.importorskip("liger_kernel", reason="needs liger-kernel, which the extra `test` installs")
    program = [sys.executable, "-c", KERNELS]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
