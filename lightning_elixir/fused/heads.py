"""The last layer and the loss of transformers' language models as one operator.

[Note: logits on demand] In a forward that is given labels, the last layer does not compute: it returns an object that
stands for the logits. The model's loss function, when it gets that object, has the layer compute the loss in one
operator (`linear_loss`). Whoever looks at the object, be it the model (which scales its logits, say) or the user (for a
metric), makes it compute the logits as the model would have: so code that needs them works as before, and pays for them
only where it does. The loss is computed within a call of the layer, so all that hangs on the calls of modules, above
all the engine that brings the weight, needs to know nothing of this.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_elixir.core.module_hooks import OwnHook, own_forward
from lightning_elixir.fused.linear_loss import linear_cross_entropy

log = logging.getLogger(__name__)

# The last layer whose logits the forward that runs in this context puts off.
_PUTS_OFF: ContextVar[nn.Module | None] = ContextVar("lightning_elixir_puts_off", default=None)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SCALES = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


def is_language_model(module: Any) -> bool:
    """Whether transformers made it, with a last layer and a loss over the tokens of a vocabulary."""
    if not (hasattr(module, "get_output_embeddings") and hasattr(module, "loss_type")):
        return False
    return module.loss_type in ("ForCausalLM", None) and module.get_output_embeddings() is not None


def why_not(model: Any) -> str | None:
    """Why the loss of a language model of transformers cannot be fused; None: it can be."""
    head = model.get_output_embeddings()
    forwards = [inspect.unwrap(vars(c)["forward"]) for c in type(model).__mro__ if "forward" in vars(c)]
    if not any("loss_function" in getattr(getattr(f, "__code__", None), "co_names", ()) for f in forwards):
        return "its forward computes its loss by itself"
    if vars(model).get("_loss_function") not in (None, fused_loss):  # a copy of a model that has ours keeps it
        return "it was given a loss_function of its own"
    if type(head) is not nn.Linear:
        return f"its last layer is a {type(head).__name__}, not a plain nn.Linear"
    if "forward" in vars(head) or "forward" in vars(model):
        return "its forward, or that of its last layer, has been replaced"
    if any(not isinstance(getattr(h, "__self__", h), OwnHook) for n in _HOOKS for h in vars(head)[n].values()):
        return "its last layer has hooks"
    config = model.config.get_text_config()
    scaled = next((name for name in _SCALES if getattr(config, name, None) not in (None, 1, 1.0)), None)
    return None if scaled is None else f"its logits are scaled ({scaled})"


def puts_off_logits(forward: Callable[..., Any]) -> Callable[..., Any]:
    """For a model: its forward, whose last layer's logits are put off where it is given labels."""

    @functools.wraps(forward)
    def model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or kwargs.get("labels") is None:
            return forward(self, *args, **kwargs)
        token = _PUTS_OFF.set(self.get_output_embeddings())
        try:
            return forward(self, *args, **kwargs)
        finally:
            _PUTS_OFF.reset(token)

    return own_forward(model_forward)


def head_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """For the last layer: logits, logits on demand, or a loss."""

    @functools.wraps(forward)
    def layer_forward(self: Any, input: Tensor, fused_loss: _Asked | None = None) -> Any:
        if fused_loss is not None:
            return fused_loss.of(input, self.weight, self.bias)
        if torch.compiler.is_compiling() or _PUTS_OFF.get() is not self:
            return forward(self, input)
        return Logits(self, input)

    return own_forward(layer_forward)


def fused_loss(
    logits: Any,
    labels: Any,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Any = None,
    **kwargs: Any,
) -> Any:
    """In the place of transformers' `ForCausalLMLoss`, with its arguments."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if not isinstance(logits, Logits) or not logits.is_put_off or logits.num_classes != vocab_size:
        logits = logits.computed() if isinstance(logits, Logits) else logits
        options = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
        return ForCausalLMLoss(logits, labels, vocab_size, shift_labels=shift_labels, **options, **kwargs)
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    loss = logits.loss(shift_labels, ignore_index, is_mean=num_items_in_batch is None)
    if num_items_in_batch is None:
        return loss
    return loss / (num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch)


@dataclass(frozen=True)
class _Asked:
    """What the last layer is to compute in the place of logits."""

    targets: Tensor
    ignore_index: int
    is_mean: bool

    def of(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> _Loss:
        targets = self.targets.reshape(-1).to(hidden.device)
        rows = hidden.reshape(-1, hidden.shape[-1])
        reduction = "mean" if self.is_mean else "sum"
        loss = linear_cross_entropy(rows, weight, targets, bias, ignore_index=self.ignore_index, reduction=reduction)
        return _Loss(loss)


@dataclass(frozen=True)
class _Loss:
    """Hides a loss from hooks that cast what the layer returns."""

    value: Tensor


class Logits:
    """Stands for the outputs of a linear layer, and computes them when they are read. See [Note: logits on demand]."""

    def __init__(self, layer: Any, hidden: Tensor) -> None:
        self._layer = layer
        self._hidden = hidden
        self._value: Tensor | None = None
        kind = hidden.device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    @property
    def is_put_off(self) -> bool:
        return self._value is None

    @property
    def num_classes(self) -> int:
        return int(self._layer.weight.shape[0])

    def loss(self, targets: Tensor, ignore_index: int, *, is_mean: bool) -> Tensor:
        """Over targets of the shape of the logits without their last dimension."""
        loss: _Loss = self._layer(self._hidden, fused_loss=_Asked(targets, ignore_index, is_mean))
        return loss.value

    def computed(self) -> Tensor:
        """The logits themselves, with their graph."""
        if self._value is None:
            if _PUTS_OFF.get() is self._layer:
                log.info("a model looks at its logits before the loss: they are computed as without fused kernels")
            with _nothing_put_off(), torch.autocast(*self._autocast[:2], enabled=self._autocast[2]):
                self._value = self._layer(self._hidden)
        return self._value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.computed(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Logits, Logits.computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.computed().detach().clone()

    def __reduce__(self) -> Any:
        return _itself, (self.computed().detach(),)


def _itself(value: Tensor) -> Tensor:
    return value


@contextmanager
def _nothing_put_off() -> Iterator[None]:
    token = _PUTS_OFF.set(None)
    try:
        yield
    finally:
        _PUTS_OFF.reset(token)


def _operator(name: str) -> Callable[..., Any]:
    def operator(self: Logits, *args: Any) -> Any:
        args = tree_map_only(Logits, Logits.computed, args)
        return getattr(self.computed(), name)(*args)

    return operator


# Python looks for these in the class.
for _name in (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__",
    "__matmul__", "__rmatmul__", "__neg__", "__abs__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
    "__getitem__", "__setitem__", "__len__", "__iter__", "__bool__", "__float__", "__int__", "__array__", "__repr__",
    "__format__", "__invert__", "__and__", "__or__", "__xor__", "__floordiv__", "__mod__", "__contains__",
):  # fmt: skip
    setattr(Logits, _name, _operator(_name))
Logits.__hash__ = object.__hash__  # type: ignore[method-assign]
