"""Fused operators by the kernels of liger-kernel on a GPU: the bodies of the CPU's tests."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_elixir import linear_cross_entropy
from lightning_elixir.fused import liger
from lightning_elixir.fused.operators import NormKind, gated_product, rms_norm, rms_norm_by_torch, rope
from tests.helpers.fused import FAMILIES, fused_beside_plain, make_lm, train_fused_elixir, train_fused_plain

pytestmark = pytest.mark.gpu

PRECISIONS = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "autocast": (torch.float32, torch.bfloat16),
}


@pytest.fixture(params=["kernels", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernels, and as where liger-kernel is not installed."""
    if request.param == "torch":
        monkeypatch.setattr(liger, "kernels", lambda: None)
    elif liger.kernels() is None:
        pytest.skip("liger-kernel is not installed")
    return str(request.param)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_no_further_from_the_truth_than_plain(family: str, precision: str) -> None:
    dtype, autocast = PRECISIONS[precision]
    fused, plain = fused_beside_plain(family, dtype, "cuda", autocast)
    assert fused <= 1.5 * plain + 1e-5  # fp32 products of a GPU are summed in another order by each kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3_moe"])
def test_training_with_chunks_that_move(family: str, dtype: torch.dtype) -> None:
    losses, _ = train_fused_plain(make_lm(family), 4, dtype, "cuda")
    ours, module = train_fused_elixir(make_lm(family), 4, dtype, "cuda", chunk_size=8 * 1024)
    # The optimizer runs on the host here, and on the GPU there.
    assert ours == pytest.approx(losses, rel=1e-4 if dtype is torch.float32 else 2e-2)
    assert module.stats().evictions > 0
    module.close()


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_rms_norm(kind: NormKind) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 40, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for a, b in _values_and_gradients(
        lambda: rms_norm(x, weight, 1e-6, kind), lambda: rms_norm_by_torch(x, weight, 1e-6, kind), (x, weight)
    ):
        assert (a - b).norm() <= 1e-2 * b.norm()


@pytest.mark.parametrize("is_kept", [False, True])
def test_gated_product_leaves_its_operands_where_they_are_read_again(is_kept: bool) -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(64, 300, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    inner = gate * 1, up * 1
    product = gated_product(*inner, "silu")
    grads = torch.ones_like(product)
    first = torch.autograd.grad(product, (gate, up), grads, retain_graph=is_kept)
    if is_kept:
        again = torch.autograd.grad(product, (gate, up), grads)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    expected = torch.autograd.grad(F.silu(gate) * up, (gate, up), grads)
    for a, b in zip(first, expected, strict=True):
        assert (a - b).norm() <= 1e-2 * b.norm()


def test_rope(way: str) -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(2, heads, 33, 64, device="cuda", requires_grad=True) for heads in (8, 2))
    angle = torch.randn(1, 33, 32, device="cuda")
    cos, sin = (torch.cat((f(angle), f(angle)), -1) for f in (torch.cos, torch.sin))
    before = query.detach().clone()
    turned = rope(query, key, cos, sin)
    assert (turned is None) == (way == "torch")
    if turned is None:
        return
    assert torch.equal(query, before)
    for ours, x in zip(turned, (query, key), strict=True):
        first, second = x.chunk(2, -1)
        torch.testing.assert_close(
            ours, x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1), rtol=1e-5, atol=1e-5
        )


def test_memory_of_a_large_vocabulary() -> None:
    """Twice the gradients' memory, and not that of the logits."""
    tokens, width, classes = 4096, 256, 64 * 1024
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(classes, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, classes, (tokens,), device="cuda")
    linear_cross_entropy(hidden[:256], weight, targets[:256]).backward()  # what libraries allocate once
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, targets).backward()
    assert torch.cuda.max_memory_allocated() - before < tokens * classes * 2  # of the logits in 16 bits


def _values_and_gradients(ours: object, theirs: object, operands: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    found = []
    for function in (ours, theirs):
        value = function()  # type: ignore[operator]
        weights = torch.linspace(0.5, 2, value.numel(), device=value.device).view(value.shape).to(value.dtype)
        found.append((value, *torch.autograd.grad((value * weights).sum(), operands)))
    return list(zip(*found, strict=True))
