"""The last layer and the loss of transformers' language models as one operator.

[Note: logits on demand] In a forward that is given labels, the last layer does not compute: it returns an object that
stands for the logits. The model's loss function, when it gets that object, has the layer compute the loss in one
operator (`linear_loss`). Until then the model may scale the object by a number, as Granite and Cohere do, or have it
`contiguous()` or `float()`: that is kept in mind. Whoever looks at the object in another way, be it the model (which
caps its logits, say) or the user (for a metric), makes it compute the logits as the model would have: so code that
needs them works as before, and pays for them only where it does. Once the layer's weights have changed that is not to
be had any more, and an error says so. The loss is computed within a call of the layer, so all that hangs on the calls
of modules, above all the engine that brings the weight, needs to know nothing of this.

Whether a model's forward looks at its logits is found out by running it, over stand-ins for its parts, up to the loss.
So it is with transformers' own code, which changes nothing outside of what it returns. A user's may count, draw random
numbers or write to buffers: it is swapped without a trial.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import methodcaller
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from lightning_elixir.core.module_hooks import CALL_HOOKS, is_own_hook, own_forward, pattern_around
from lightning_elixir.errors import StateError
from lightning_elixir.fused.linear_loss import linear_cross_entropy
from lightning_elixir.fused.operators import is_plain
from lightning_elixir.fused.recognising import twin

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Running:
    """A model's forward that puts its logits off."""

    head: nn.Module
    """Its last layer."""
    looks: list[str] = field(default_factory=list)
    """What it did with the logits that needed their values."""


# The forward that runs in this context; None: one that computes its logits.
_PUTS_OFF: ContextVar[_Running | None] = ContextVar("lightning_elixir_puts_off", default=None)

_SCALES = ("__mul__", "__rmul__", "__truediv__")
_TRIED = ("transformers", "torch", "builtins")  # packages whose code may run in a trial


def is_language_model(module: Any) -> bool:
    """Whether transformers made it, with a last layer and a loss over the tokens of a vocabulary."""
    # Of the class: wrappers, such as peft's, have all attributes of the model that they hold.
    if not all(hasattr(type(module), name) for name in ("get_output_embeddings", "loss_function")):
        return False
    return module.loss_type in ("ForCausalLM", None) and module.get_output_embeddings() is not None


@dataclass(frozen=True)
class Verdict:
    """Whether the loss of a language model of transformers can be fused."""

    why_not: str | None = None
    """None: it can be."""
    doubt: str | None = None
    """Why it is not known whether that saves the logits."""


def judge(model: Any) -> Verdict:
    """Whether the loss of a language model of transformers can be fused. Reads no values and draws no numbers."""
    why_not = _why_not(model)
    if why_not is not None:
        return Verdict(why_not)
    if any(code.__module__.partition(".")[0] not in _TRIED for code in (*type(model).__mro__, *_forwards(model))):
        return Verdict(doubt="its code is not all of transformers, and running it might change something")
    return _tried(model, model.get_output_embeddings())


def _forwards(model: Any) -> list[Callable[..., Any]]:
    """Of its class and all bases, without decorators."""
    return [inspect.unwrap(vars(c)["forward"]) for c in type(model).__mro__ if "forward" in vars(c)]


def _why_not(model: Any) -> str | None:
    head = model.get_output_embeddings()
    if not any("loss_function" in getattr(getattr(f, "__code__", None), "co_names", ()) for f in _forwards(model)):
        return "its forward computes its loss by itself"
    if vars(model).get("_loss_function") not in (None, fused_loss):  # a copy of a model that has ours keeps it
        return "it was given a loss_function of its own"
    if type(head) is not nn.Linear:
        return f"its last layer is a {type(head).__module__}.{type(head).__qualname__}, not a plain nn.Linear"
    for what, around in (("it", pattern_around(model)), ("its last layer", pattern_around(head))):
        if around is not None:
            return f"{what} has a parallel pattern, {around.pattern!r}"
    if "forward" in vars(head) or "forward" in vars(model):
        return "its forward, or that of its last layer, has been replaced"
    if any(not is_own_hook(hook) for name in CALL_HOOKS for hook in vars(head)[name].values()):
        return "its last layer has hooks"
    return None


def _tried(model: Any, head: nn.Linear) -> Verdict:
    """By a run of the model's own forward, up to the loss."""
    num_classes, width = head.weight.shape
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"), torch.no_grad():
        layer = nn.Linear(width, num_classes, bias=head.bias is not None)
        vars(layer)["forward"] = MethodType(head_forward(nn.Linear.forward), layer)
        probe = _stand_in(model, head, layer, _Body(torch.empty(1, 2, width)))
        vars(probe)["_loss_function"] = _reach_loss
        running, tokens = _Running(layer), torch.zeros(1, 2, dtype=torch.long)
        token = _PUTS_OFF.set(running)
        doubt: str | None = "it does not call its loss"
        try:
            type(model).forward(probe, input_ids=tokens, labels=tokens)
        except _AtLoss as reached:
            doubt = None
            if not running.looks and not isinstance(reached.logits, Logits):
                return Verdict("its loss gets something else than what its last layer returns")
            if not running.looks and reached.vocab_size != num_classes:
                return Verdict(f"its loss is over {reached.vocab_size} classes, its last layer has {num_classes}")
        except Exception as error:  # it needs other inputs, or values
            doubt = f"{type(error).__name__}: {error}"
        finally:
            _PUTS_OFF.reset(token)
    if running.looks:
        return Verdict(f"its forward looks at the logits before the loss ({running.looks[0]})")
    return Verdict(doubt=doubt)


def _stand_in(module: nn.Module, head: nn.Module, layer: nn.Module, body: nn.Module) -> nn.Module:
    """A copy of the modules that hold `head`, with `layer` in its place and `body` in that of all others."""
    if module is head:
        return layer
    if all(part is not head for part in module.modules()):
        return body
    parts = module._modules.items()
    return twin(module, modules={n: p if p is None else _stand_in(p, head, layer, body) for n, p in parts})


class _AtLoss(Exception):
    """Ends a trial where the loss would be computed."""

    def __init__(self, logits: Any, vocab_size: int) -> None:
        super().__init__()
        self.logits = logits
        self.vocab_size = vocab_size


def _reach_loss(logits: Any, labels: Any, vocab_size: int, *args: Any, **kwargs: Any) -> Any:
    raise _AtLoss(logits, vocab_size)


class _Body(nn.Module):
    """In a trial, in the place of all parts of a model but its last layer: of hidden states it makes the same, of
    anything else the outputs of a model. Its parts are the same again."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._outputs = _Outputs(hidden)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        is_hidden = bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()
        return args[0] if is_hidden else self._outputs

    def __getattr__(self, name: str) -> Any:
        return self


class _Outputs:
    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


_LOOKS = "%s looks at its logits before the loss (%s): they are computed as without fused kernels"


def puts_off_logits(forward: Callable[..., Any]) -> Callable[..., Any]:
    """For a model: its forward, whose last layer's logits are put off where it is given labels."""
    is_told = False

    @functools.wraps(forward)
    def model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_told
        if torch.compiler.is_compiling() or kwargs.get("labels") is None:
            return forward(self, *args, **kwargs)
        running = _Running(self.get_output_embeddings())
        token = _PUTS_OFF.set(running)
        try:
            return forward(self, *args, **kwargs)
        finally:
            _PUTS_OFF.reset(token)
            if running.looks and not is_told:
                is_told = True
                log.info(_LOOKS, type(self).__name__, running.looks[0])

    return own_forward(model_forward)


def head_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """For the last layer: logits, logits on demand, or a loss."""

    @functools.wraps(forward)
    def layer_forward(self: Any, input: Tensor, fused_loss: _Asked | None = None) -> Any:
        if fused_loss is not None:
            return fused_loss.of(input, self.weight, self.bias)
        if torch.compiler.is_compiling() or not is_plain(input) or _running_of(self) is None:
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
    factor: float
    """What the logits are multiplied by: in the operator the inputs and the bias are."""

    def of(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> _Loss:
        targets = self.targets.reshape(-1).to(hidden.device)
        rows = hidden.reshape(-1, hidden.shape[-1])
        if self.factor != 1:
            rows, bias = rows * self.factor, None if bias is None else bias * self.factor
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
        self._steps: tuple[Callable[[Tensor], Tensor], ...] = ()  # from the layer's outputs to these logits
        self._factor = 1.0  # what these steps multiply by
        self._begun = _parameters_of(layer)
        kind = hidden.device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    @property
    def is_put_off(self) -> bool:
        return self._value is None

    @property
    def num_classes(self) -> int:
        return int(self._layer.weight.shape[0])

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self.num_classes)) if self._value is None else self._value.shape

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    @property
    def _running(self) -> _Running | None:
        """The forward of the model that these are on their way in, to the loss."""
        return _running_of(self._layer) if self.is_put_off else None

    def _followed_by(self, step: Callable[[Tensor], Tensor], factor: float = 1.0) -> Logits:
        made = Logits(self._layer, self._hidden)
        made._begun = self._begun
        made._autocast, made._steps, made._factor = self._autocast, (*self._steps, step), self._factor * factor
        return made

    def contiguous(self, *args: Any, **kwargs: Any) -> Any:
        if self._running is None or args or kwargs:
            return self.computed("contiguous").contiguous(*args, **kwargs)
        return self

    def float(self, *args: Any, **kwargs: Any) -> Any:
        if self._running is None or args or kwargs:
            return self.computed("float").float(*args, **kwargs)
        return self._followed_by(Tensor.float)

    def scaled(self, operator: str, args: tuple[Any, ...]) -> Logits | None:
        """What `operator` makes of these within the model's forward; None: it is no scale by a number."""
        number = args[0] if len(args) == 1 else None
        if operator not in _SCALES or not isinstance(number, int | float) or self._running is None:
            return None
        is_division = operator == "__truediv__"
        factor = (1 / number if number else math.inf) if is_division else float(number)
        return self._followed_by(methodcaller(operator, number), factor) if math.isfinite(factor) else None

    def loss(self, targets: Tensor, ignore_index: int, *, is_mean: bool) -> Tensor:
        """Over targets of the shape of the logits without their last dimension."""
        loss: _Loss = self._layer(self._hidden, fused_loss=_Asked(targets, ignore_index, is_mean, self._factor))
        return loss.value

    def computed(self, look: str = "the loss") -> Tensor:
        """The logits themselves, with their graph.

        Args:
            look: What needs them.
        """
        if self._value is None:
            if _parameters_of(self._layer) != self._begun:
                raise StateError(
                    "logits were looked at after the weights that make them had changed, as an optimizer's step changes"
                    " them: with use_fused_kernels they are computed when they are looked at. Look at them before, in"
                    " training_step: return outputs.logits.detach(), or what you need of it"
                )
            running = self._running
            if running is not None:
                running.looks.append(look)
            with _nothing_put_off(), torch.autocast(*self._autocast[:2], enabled=self._autocast[2]):
                value: Tensor = self._layer(self._hidden)
            self._value = functools.reduce(lambda made, step: step(made), self._steps, value)
        return self._value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.computed(name), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        look = functools.partial(Logits.computed, look=getattr(func, "__name__", "a function of torch"))
        args, kwargs = tree_map_only(Logits, look, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.computed().detach().clone()

    def __reduce__(self) -> Any:
        return _itself, (self.computed().detach(),)


def _running_of(layer: nn.Module) -> _Running | None:
    running = _PUTS_OFF.get()
    return running if running is not None and running.head is layer else None


def _parameters_of(layer: Any) -> tuple[tuple[int, int], ...]:
    """Which ones a layer has, and the state of their version counters: of updates too, and not of chunks that move."""
    return tuple((id(p), 0 if p.is_inference() else p._version) for p in (layer.weight, layer.bias) if p is not None)


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
        scaled = self.scaled(name, args)
        if scaled is not None:
            return scaled
        args = tree_map_only(Logits, Logits.computed, args)
        return getattr(self.computed(name), name)(*args)

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
