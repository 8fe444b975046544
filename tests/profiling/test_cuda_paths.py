"""What CUDA would take: kernels, dtypes and workspaces as they were seen on an H200 with torch 2.11."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_elixir.profiling.cuda_paths import CudaPaths
from lightning_elixir.profiling.workspaces import workspace_bytes

aten = torch.ops.aten
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Names(TorchDispatchMode):
    """Operators and the dtypes of their first results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) else result
        if isinstance(first, Tensor):
            self.seen.append((func._overloadpacket.__name__, first.dtype))
        return result

    def __contains__(self, name: object) -> bool:
        return any(name == seen for seen, _ in self.seen)


def ignore(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    return


def operators(function: Callable[[], object], autocast: torch.dtype | None = None) -> Names:
    """What runs inside; tensors are to be made in there."""
    names = Names()
    with (
        FakeTensorMode(),
        names,
        CudaPaths(ignore, autocast),
        torch.autocast("cpu", autocast or BF16, enabled=autocast is not None, cache_enabled=False),
    ):
        function()
    return names


def qkv(dtype: torch.dtype, width: int, heads: int = 8, kv_heads: int = 8) -> list[Tensor]:
    return [torch.empty(2, 100, n, width, dtype=dtype, requires_grad=True) for n in (heads, kv_heads, kv_heads)]


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)


KERNELS = {
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
    "math": "_safe_softmax",
}


@pytest.mark.parametrize(
    ("kernel", "dtype", "width", "kv_heads", "mask"),
    [
        ("cudnn", BF16, 64, 8, None),
        ("cudnn", FP16, 256, 8, None),
        ("cudnn", FP16, 80, 2, None),
        ("cudnn", BF16, 64, 2, "bool"),
        ("cudnn", BF16, 128, 8, "float"),
        ("efficient", BF16, 64, 8, "float with gradient"),
        ("math", BF16, 64, 8, "float from the side"),
        ("flash", BF16, 100, 8, None),
        ("math", BF16, 100, 8, "bool"),
        ("efficient", BF16, 264, 8, None),
        ("efficient", FP32, 100, 8, None),
        ("efficient", FP32, 64, 8, "bool"),
        ("math", FP32, 64, 2, None),
        ("math", FP32, 10, 8, None),
        ("math", torch.float64, 64, 8, None),
    ],
)
def test_attention_takes_the_kernel_seen_on_a_gpu(
    kernel: str, dtype: torch.dtype, width: int, kv_heads: int, mask: str | None
) -> None:
    def run() -> None:
        masks = {
            None: lambda: None,
            "bool": lambda: torch.empty(2, 1, 100, 100, dtype=torch.bool),
            "float": lambda: torch.empty(2, 1, 100, 100, dtype=dtype),
            "float with gradient": lambda: torch.empty(1, 8, 100, 100, dtype=dtype, requires_grad=True),
            "float from the side": lambda: torch.empty(100, 100, 8, dtype=dtype).permute(2, 0, 1)[None],
        }
        q, k, v = qkv(dtype, width, 8, kv_heads)
        attended = attend(q, k, v, attn_mask=masks[mask](), is_causal=mask is None, enable_gqa=kv_heads < 8)
        assert attended.shape == (2, 8, 100, width)
        assert attended.dtype == dtype
        attended.sum().backward()
        assert all(t.grad is not None and t.grad.shape == t.shape for t in (q, k, v))

    names = operators(run)
    assert [kind for kind, operator in KERNELS.items() if operator in names] == [kernel]


def test_attention_inside_of_torch_layers_is_seen() -> None:
    def run() -> None:
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dtype=BF16)
        layer(torch.empty(2, 10, 64, dtype=BF16)).sum().backward()

    names = operators(run)
    assert "_scaled_dot_product_cudnn_attention" in names
    assert "native_dropout" in names
    assert "bernoulli_" not in names


def test_recomputation_in_backward_takes_the_same_way() -> None:
    def run() -> None:
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dtype=BF16)
        for use_reentrant in (True, False):
            x = torch.empty(2, 10, 64, dtype=BF16, requires_grad=True)
            checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()

    names = operators(run)
    assert sum(name == "_scaled_dot_product_cudnn_attention" for name, _ in names.seen) == 4
    assert "bernoulli_" not in names


def test_dropout_keeps_a_mask_of_booleans() -> None:
    def run() -> None:
        x = torch.empty(8, 8, dtype=BF16, requires_grad=True)
        F.dropout(x, 0.5).sum().backward()
        torch.dropout(x, 0.5, False)

    names = operators(run)
    assert [n for n, _ in names.seen if "drop" in n] == ["native_dropout", "native_dropout_backward"]


def test_rms_norm_works_in_16_bits() -> None:
    def run() -> None:
        x, w = (torch.empty(*shape, 64, dtype=BF16, requires_grad=True) for shape in ((3, 8), ()))
        F.rms_norm(x, (64,), w).sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        assert (x.grad.shape, w.grad.shape) == (x.shape, w.shape)
        F.rms_norm(x, (8, 64)).sum().backward()

    assert {dtype for name, dtype in operators(run).seen if name not in ("empty",)} == {BF16}


def test_softmax_casts_fp16_in_the_kernel() -> None:
    def run() -> None:
        x = torch.empty(8, 64, dtype=FP16)
        F.softmax(x, -1, dtype=FP32)
        F.softmax(x.to(BF16), -1, dtype=FP32)

    assert operators(run).seen[-4:] == [("_softmax", FP32), ("_to_copy", BF16), ("_to_copy", FP32), ("_softmax", FP32)]


def test_methods_that_extend_one_of_the_same_name_end() -> None:
    assert "view" in operators(lambda: torch.empty(8, 6).unflatten(1, (2, 3)))


# Autocast


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: F.linear(x, x), BF16),
        (lambda x: x @ x, BF16),
        (lambda x: torch.einsum("ij,jk->ik", x, x), BF16),
        (lambda x: F.layer_norm(x.to(BF16), (8,)), FP32),
        (lambda x: x.to(BF16).softmax(-1), FP32),
        (lambda x: F.softmax(x.to(BF16), -1), FP32),
        (lambda x: x.to(BF16).sum(), FP32),
        (lambda x: x.to(BF16).pow(2), FP32),
        (lambda x: x.to(BF16) ** 2, FP32),
        (lambda x: x.to(BF16) * 2, BF16),
        (lambda x: F.gelu(x.to(BF16)), BF16),
        (lambda x: F.mse_loss(x.to(BF16), x), FP32),
        (lambda x: F.cross_entropy(x.to(BF16), torch.zeros(8, dtype=torch.long)), FP32),
        (lambda x: torch.cat([x, x.to(BF16)]), FP32),
        (lambda x: x.double() @ x.double(), torch.float64),
    ],
)
def test_autocast_casts_as_on_a_gpu(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    def run() -> None:
        assert function(torch.empty(8, 8)).dtype == dtype

    operators(run, BF16)


def test_autocast_can_be_turned_off_inside_and_is_off_in_backward() -> None:
    states: list[bool] = []

    def run() -> None:
        x = torch.empty(8, 8, requires_grad=True)
        x.register_hook(lambda grad: states.append(torch.is_autocast_enabled("cpu")))
        with torch.autocast("cpu", enabled=False):
            assert (x @ x).dtype == FP32
        y = checkpoint(lambda x: (x @ x).softmax(-1), x, use_reentrant=False)
        y.sum().backward()
        assert torch.is_autocast_enabled("cpu")

    names = operators(run, FP16)
    assert states == [False]
    products = [dtype for name, dtype in names.seen if name == "mm"]
    assert products == [FP32, FP16, FP16, FP16, FP16]  # forward, recomputation, both operands' gradients


# Workspaces


def spaces(packet: Any, *args: Any, output: Tensor | None = None) -> int:
    return sum(workspace_bytes(packet, args, [args[0] if output is None else output]))


@pytest.mark.parametrize(
    ("shape", "dims", "dtype", "measured"),
    [
        ((1024, 512), [0], BF16, 4194816),
        ((1024, 2048), [0], FP32, 16777728),
        ((1024, 1536), [0], BF16, 12583424),
        ((256, 4, 1536), [0, 1], FP32, 12583424),
        ((4, 1024, 2048), [0, 1], FP32, 67109376),
        ((4096, 8192), [0], BF16, 138412544),
        ((16384, 4096), [0], FP32, 138412544),
        ((64, 1024), [0], FP32, 0),
        ((1024, 512), [1], FP32, 0),
    ],
)
def test_sums_over_rows(shape: tuple[int, ...], dims: list[int], dtype: torch.dtype, measured: int) -> None:
    found = spaces(aten.sum, torch.empty(shape, dtype=dtype, device="meta"), dims)
    assert -(-found // 512) * 512 == measured


@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "width", "measured"),
    [(8, 8, 1000, 64, 4160512), (8, 8, 1024, 64, 4260352), (8, 2, 1024, 64, 8454656), (16, 16, 2048, 128, 33817088)],
)
def test_cudnn_attention_backward(heads: int, kv_heads: int, length: int, width: int, measured: int) -> None:
    query = torch.empty(2, heads, length, width, dtype=BF16, device="meta")
    key = torch.empty(2, kv_heads, length, width, dtype=BF16, device="meta")
    found = spaces(aten._scaled_dot_product_cudnn_attention_backward, query, query, key, key)
    assert found == pytest.approx(measured, abs=1024)


@pytest.mark.parametrize(
    ("length", "width", "measured"), [(1024, 64, 4325376), (256, 64, 1081344), (1000, 80, 8456704)]
)
def test_efficient_attention_backward(length: int, width: int, measured: int) -> None:
    query = torch.empty(2, 8, length, width, device="meta")
    found = spaces(aten._scaled_dot_product_efficient_attention_backward, query, query, query, query)
    assert found == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(("num_indices", "measured"), [(2048, 0), (4096, 9427456), (16384, 37709824)])
def test_embedding_backward(num_indices: int, measured: int) -> None:
    grad = torch.empty(num_indices, 512, device="meta")
    table = torch.empty(50257, 512, device="meta")
    found = spaces(aten.embedding_dense_backward, grad, torch.empty(num_indices, device="meta"), 50257, output=table)
    assert found == pytest.approx(measured, rel=0.01)


def test_what_softmax_keeps_for_a_moment() -> None:
    scores = torch.empty(2, 8, 1000, 1000, device="meta")
    assert spaces(aten._softmax_backward_data, scores, scores) == 64000000
    assert spaces(aten._safe_softmax, scores) == pytest.approx(16016896, rel=0.001)
    assert spaces(aten.mul, scores) == 0
