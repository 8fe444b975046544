"""Runs torch functions over fake CPU tensors the way CUDA runs them: the operators that CUDA would take, so that what
they save and return has the sizes it has there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_elixir.profiling.autocast import cast_operands

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_MAX_FLASH_HEAD_DIM = 256
_GUARDS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_BACKWARD = ("backward", "grad")  # of torch._tensor and torch.autograd

OnCall = Callable[[tuple[Any, ...], Mapping[str, Any]], None]


class CudaPaths(TorchFunctionMode):
    """Enter around a step on fake CPU tensors.

    Args:
        on_call: Told the operands of every outermost call of a function of `torch.nn.functional`.
        autocast_dtype: Cast as `torch.autocast("cuda", autocast_dtype)` does wherever the CPU's autocast is on; None:
            cast nothing.
    """

    def __init__(self, on_call: OnCall, autocast_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._on_call = on_call
        self._autocast_dtype = autocast_dtype
        self._bodies: dict[FunctionType, Callable[..., Any]] = {}
        self._running: list[FunctionType] = []  # bodies inside each other
        self._depth = 0  # how many of them are of `torch.nn.functional`

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, FunctionType):
            return self._call_body(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args, **kwargs)
        if self._autocast_dtype is None or not torch.is_autocast_enabled("cpu"):
            return _CUDA_FUNCTIONS.get(name, func)(*args, **kwargs)
        args, kwargs = cast_operands(name, args, kwargs, self._autocast_dtype)
        function = _autocast_cross_entropy if name == "cross_entropy_loss" else _CUDA_FUNCTIONS.get(name, func)
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    def _call_body(self, func: FunctionType, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Functions written in Python pass a call on to modes before anything else, and modes are off while they handle
        it. So that what such a function calls comes here too, run its body without that first question."""
        body = self._bodies.get(func)
        if body is None:
            body = self._bodies[func] = _without_guard(func)
        # Methods that extend one of the same name come back as themselves.
        if body is func or (self._running and self._running[-1] is func):
            return func(*args, **kwargs)
        is_functional = func.__module__ == "torch.nn.functional"
        if is_functional and self._depth == 0:
            self._on_call(args, kwargs)
        is_backward = func.__name__ in _BACKWARD and self._autocast_dtype is not None
        self._running.append(func)
        self._depth += is_functional
        try:
            # Backward runs outside of the autocast of the forward, as it does in training loops.
            with self, torch.autocast("cpu", enabled=False) if is_backward else nullcontext():
                return body(*args, **kwargs)
        finally:
            self._running.pop()
            self._depth -= is_functional


def _without_guard(func: FunctionType) -> Callable[..., Any]:
    """The function as it runs where its check for overrides (`__torch_function__`) finds none; itself if it has no such
    check."""
    names = [name for name in _GUARDS if name in func.__code__.co_names and name in func.__globals__]
    if not names:
        return func
    scope = {**func.__globals__, **dict.fromkeys(names, _no)}
    body = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _no(*args: Any) -> bool:
    return False


# What CUDA takes where the CPU takes another way


def _dropout(input: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
    if train and 0 < p < 1 and input.numel():
        return torch.native_dropout(input, p, train)[0]
    return torch.dropout(input, p, train)


def _rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is None or weight.dtype is input.dtype:
        output: Tensor = _FusedRMSNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
        return output
    return torch.rms_norm(input, normalized_shape, weight, eps)


class _FusedRMSNorm(torch.autograd.Function):
    """What CUDA's kernel takes, returns and saves (the CPU has none)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, num_dims: int) -> Tensor:
        rows = input.shape[: input.dim() - num_dims]
        ctx.save_for_backward(input, weight, torch.empty(*rows, *[1] * num_dims, dtype=torch.float32))
        return input.mul(1.0 if weight is None else weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        input, weight, _ = ctx.saved_tensors
        return grads[0].mul(input), None if weight is None else torch.empty_like(weight), None


def _softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    if input.dtype is torch.float16 and dtype is torch.float32:  # the kernel casts
        return torch._softmax(input, dim, True)
    return torch.softmax(input, dim, dtype=dtype)


def _log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    if input.dtype is torch.float16 and dtype is torch.float32:
        return torch._log_softmax(input, dim, True)
    return torch.log_softmax(input, dim, dtype=dtype)


def _autocast_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Under autocast the log-softmax keeps its dtype, and what it returns is cast for the loss."""
    nn: Any = torch._C._nn
    if target.is_floating_point() or label_smoothing:
        loss: Tensor = nn.cross_entropy_loss(input.float(), target, weight, reduction, ignore_index, label_smoothing)
    else:
        logs = torch.log_softmax(input, 1 if input.dim() > 1 else 0)
        loss = nn.nll_loss_nd(logs.float(), target, weight, reduction, ignore_index)
    return loss


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` by the kernel that torch takes on GPUs of compute capability 9.0 (older
    ones take others, which need about as much)."""
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:
        kept, left_out = (torch.full((), x, dtype=query.dtype) for x in (0.0, -torch.inf))
        mask = torch.where(mask, kept, left_out)
    kernel = _attention_kernel(query, key, value, mask)
    if kernel == "cudnn":
        result: tuple[Tensor, ...] = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, True, dropout_p, is_causal, False, scale=scale
        )
    elif kernel == "flash":
        # Head dimensions are padded to multiples of 8; the scale is that of the unpadded one.
        width = query.shape[-1]
        scale = width**-0.5 if scale is None else scale
        padded = [F.pad(t, (0, -width % 8)) for t in (query, key, value)]
        result = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)
        return result[0][..., :width]
    elif kernel == "efficient":
        if mask is not None:
            mask = _aligned_mask(mask).expand(*query.shape[:-1], key.shape[-2])
        result = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, query.requires_grad, dropout_p, is_causal, scale=scale
        )
    else:
        return _plain_attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
    return result[0]


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Attention written out, as where no kernel fits: in fp32, scores and probabilities kept."""
    dtype = query.dtype
    if dtype in _HALF:
        query, key = query.float(), key.float()
    factor = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    query = query * factor
    if is_causal:
        kept = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        mask = torch.zeros(kept.shape, dtype=query.dtype).masked_fill_(kept.logical_not(), -torch.inf)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query.matmul(key.transpose(-2, -1) * factor)
    if mask is not None:
        scores = scores.add_(mask)
    chances = _dropout(aten._safe_softmax(scores, -1), dropout_p)
    return chances.matmul(value.to(chances.dtype)).to(dtype)


def _attention_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str:
    width = query.shape[-1]
    is_half = query.dtype in _HALF
    if query.dim() != 4 or key.shape[-1] != width or not (is_half or query.dtype is torch.float32):
        return "math"
    if not all(t is None or t.stride(-1) == 1 or t.shape[-1] == 1 for t in (query, key, value, mask)):
        return "math"
    has_mask_grad = mask is not None and mask.requires_grad
    if is_half and width <= _MAX_FLASH_HEAD_DIM:
        if width % 8 == 0 and value.shape[-1] == width and not has_mask_grad:
            return "cudnn"
        if mask is None and value.shape[-1] == width:
            return "flash"
    is_aligned = width % (8 if is_half else 4) == 0 and value.shape[-1] % (8 if is_half else 4) == 0
    return "efficient" if is_aligned and query.shape[1] == key.shape[1] == value.shape[1] else "math"


def _aligned_mask(mask: Tensor) -> Tensor:
    """The efficient kernel needs rows of a mask to start at multiples of 8 elements."""
    columns = mask.shape[-1]
    return mask if columns % 8 == 0 else F.pad(mask, (0, -columns % 8))[..., :columns]


_CUDA_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "log_softmax": _log_softmax,
    "rms_norm": _rms_norm,
    "scaled_dot_product_attention": _attention,
    "softmax": _softmax,
}
