"""Which operands `torch.autocast("cuda")` casts to what, for tensors that are not on a GPU.

Fake tensors live on the CPU, whose own autocast has other lists. So the profiler enters the CPU's autocast, which makes
what models read of it (`torch.is_autocast_enabled`, nested contexts, checkpointing) come out right, keeps it from
casting, and casts by these lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_LOWER = frozenset((
    "__matmul__", "__rmatmul__", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d",
    "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "einsum",
    "gru", "gru_cell", "linalg_multi_dot", "linalg_vecdot", "linear", "lstm", "lstm_cell", "matmul", "mm", "mv",
    "prelu", "rnn_relu", "rnn_relu_cell", "rnn_tanh", "rnn_tanh_cell", "scaled_dot_product_attention", "tensordot",
))  # fmt: skip

_FP32 = frozenset((
    "__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "binary_cross_entropy_with_logits", "cdist",
    "cosh", "cosine_embedding_loss", "cosine_similarity", "dist", "erfinv", "exp", "expm1", "grid_sampler",
    "group_norm", "hinge_embedding_loss", "huber_loss", "instance_norm", "kl_div", "l1_loss", "layer_norm", "log",
    "log10", "log1p", "log2", "logsumexp", "margin_ranking_loss", "mse_loss", "multi_margin_loss",
    "multilabel_margin_loss", "native_layer_norm", "nll_loss", "nll_loss2d", "nll_loss_nd", "nuclear_norm", "pdist",
    "poisson_nll_loss", "pow", "reciprocal", "renorm", "rms_norm", "rsqrt", "sinh", "smooth_l1_loss",
    "soft_margin_loss", "softplus", "tan", "triplet_margin_loss", "upsample_bicubic2d", "upsample_bilinear2d",
    "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d",
))  # fmt: skip

# These compute in fp32 without a cast copy, unless a dtype is asked for.
_FP32_RESULT = frozenset((
    "cumprod", "cumsum", "linalg_matrix_norm", "linalg_norm", "linalg_vector_norm", "log_softmax", "norm", "prod",
    "softmax", "sum",
))  # fmt: skip

_WIDEST = frozenset((
    "addcdiv", "addcmul", "atan2", "bilinear", "cat", "cross", "dot", "index_put", "scatter_add", "stack", "vdot",
))  # fmt: skip

_DTYPE_POSITION = {"softmax": 2, "log_softmax": 2}


def cast_operands(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The operands with which the function `name` runs under CUDA autocast.

    Args:
        name: Of a torch function or tensor method.
        args: Its positional operands.
        kwargs: Its keyword operands.
        dtype: The 16-bit dtype of the autocast.
    """
    if name in _FP32_RESULT:
        is_asked = kwargs.get("dtype") is not None or len(args) > _DTYPE_POSITION.get(name, len(args))
        if args and _is_castable(args[0]) and not is_asked:
            return args, {**kwargs, "dtype": torch.float32}
        return args, dict(kwargs)
    if name in _LOWER:
        to = dtype
    elif name in _FP32:
        to = torch.float32
    elif name in _WIDEST:
        to = torch.float32 if torch.float32 in _dtypes((*args, *kwargs.values())) else dtype
    else:
        return args, dict(kwargs)
    return tuple(_cast(a, to) for a in args), {key: _cast(a, to) for key, a in kwargs.items()}


def _is_castable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if _is_castable(value):
        return value.to(dtype)
    if isinstance(value, (tuple, list)) and any(isinstance(item, Tensor) for item in value):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _dtypes(values: tuple[Any, ...]) -> set[torch.dtype]:
    found: set[torch.dtype] = set()
    for value in values:
        if isinstance(value, Tensor):
            found.add(value.dtype)
        elif isinstance(value, (tuple, list)):
            found |= _dtypes(tuple(value))
    return found
