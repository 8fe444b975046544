"""The kernels of the `liger-kernel` package, where it is installed and a tensor is where Triton runs.

Only its operators are used. What it does to models (it replaces classes and functions of transformers for the whole
process) is not: `swapping` does that, for one model.

Some of its operators write their results over operands that autograd has saved. Those are called here in a way that
leaves operands alone wherever they can still be read.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_elixir.core.device import runs_triton

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """Operators of `liger-kernel`."""

    linear_cross_entropy: Any
    rms_norm: Any
    silu_forward: Any
    silu_backward: Any
    gelu_forward: Any
    gelu_backward: Any
    rope: Any

    @functools.cached_property
    def has_piece_sizes(self) -> bool:
        """Whether the loss can be told how many logits it may have at a time; older versions cannot."""
        return "chunk_mem_const" in inspect.signature(self.linear_cross_entropy).parameters


@functools.cache
def kernels() -> Kernels | None:
    """None where the package is not installed, or is of a version without them."""
    try:
        ops = "liger_kernel.ops."
        loss, norm, silu, gelu, rope = (
            importlib.import_module(ops + name)
            for name in ("fused_linear_cross_entropy", "rms_norm", "swiglu", "geglu", "rope")
        )
        return Kernels(
            loss.fused_linear_cross_entropy_forward,
            _once(norm.LigerRMSNormFunction),
            silu.swiglu_forward,
            silu.swiglu_backward,
            gelu.geglu_forward,
            gelu.geglu_backward,
            _once(rope.LigerRopeFunction),
        )
    except (ImportError, AttributeError) as error:
        log.debug("no kernels of liger-kernel", exc_info=error)
        return None


def _once(function: Any) -> Any:
    """The same function, whose derivatives cannot be differentiated again: its kernels write where autograd does not
    see it, so a second derivative would be wrong without a word. They may write over the gradients that come, too,
    which can be those of other branches."""

    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return function.backward(ctx, *(grad.clone() for grad in grads))

    return type(function.__name__, (function,), {"backward": staticmethod(backward)})


def runs_on(device: torch.device) -> bool:
    """Whether its kernels run there."""
    return runs_triton(device) and kernels() is not None


def kernels_for(*operands: Tensor) -> Kernels | None:
    """The kernels for these operands; None: use torch's operators. They take one device and one dtype."""
    first = operands[0]
    if isinstance(first, FakeTensor) or not _have_one_dtype(operands):
        return None
    return kernels() if runs_on(first.device) else None


def foresees(*operands: Tensor) -> bool:
    """Whether these have no values, and a kernel would take them on a GPU, for which steps are foreseen: an operator
    then takes memory, and reads and writes, as the kernel does. Without the package, as torch's operators do."""
    return isinstance(operands[0], FakeTensor) and _have_one_dtype(operands) and kernels() is not None


def _have_one_dtype(operands: Sequence[Tensor]) -> bool:
    return all(t.dtype is operands[0].dtype for t in operands)
