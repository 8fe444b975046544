"""Fused operators in the place of a model's own: of this model, not of its classes, and until it is undone.

[Note: swapped forwards] A module is swapped by a forward of its own, as an attribute. It finds all that it needs in the
module that it is called for, so that deep copies (the profiler runs one) have it too and use their own parts; copies
that are given to users are without (`core/module_hooks.py`). Within code that `torch.compile` has made, modules stay as
they are: the compiler fuses by itself.

A module with a parallel pattern is swapped beneath it: the pattern cuts parameters and exchanges what goes in and comes
out, and what it calls in between is the fused operator, over the parts that this rank has. A pattern with a forward of
its own need not call that, so modules with one stay as they are; and so does a loss whose last layer has a pattern,
since no rank has all of its logits. Operands that are DTensors, of a model that torch has cut, are left to the model's
own operators, call by call.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lightning_elixir.core.compiled_modules import compiled_regions
from lightning_elixir.core.functions import copy_of, held_by
from lightning_elixir.core.module_hooks import (
    class_forward,
    drop_own_forward,
    has_own_forward,
    is_replaced,
    own_forward,
    pattern_around,
    set_forward,
)
from lightning_elixir.errors import PlanError
from lightning_elixir.fused import heads, liger
from lightning_elixir.fused.mixtures import mixture
from lightning_elixir.fused.operators import Gate, NormKind, gated_product, is_plain, rms_norm, rope
from lightning_elixir.fused.recognising import TAKES_PAIRS, gate_of, is_rope, mixture_of, norm_formula

log = logging.getLogger(__name__)

FusedChoice = bool | Literal["auto"]

_LOSS, _NORM, _GATED, _ROPE = "linear cross-entropy", "RMS norm", "gated product", "rotary embedding"
_MIXTURE = "experts of a mixture"
_ROPE_NAME = "apply_rotary_pos_emb"


def check_fused_choice(choice: object) -> None:
    """Refuse what is no value of the option `use_fused_kernels`.

    Raises:
        PlanError: It is none.
    """
    if not isinstance(choice, bool) and not (isinstance(choice, str) and choice == "auto"):
        raise PlanError(f"use_fused_kernels must be True, False or 'auto', got {choice!r}")


class Swapped:
    """What was swapped in a model; as a context, undone where an error leaves it."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        """(operator, class of the module) -> how many."""
        self.left: list[str] = []
        """Sentences: what could not be swapped, and why."""
        self._undo: list[Callable[[], object]] = []

    def undo(self) -> None:
        """Give the modules their own forwards back. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Swapped:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.undo()

    def add(self, operator: str, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Have a module run `forward`, a function whose first argument is the module."""
        set_forward(module, MethodType(forward, module))
        self.counts[operator, type(module).__name__] += 1
        self.on_undo(functools.partial(_drop_forward, module))

    def on_undo(self, act: Callable[[], object]) -> None:
        self._undo.append(act)


def _drop_forward(module: nn.Module) -> None:
    drop_own_forward(module)
    if vars(module).get("_loss_function") is heads.fused_loss:
        del vars(module)["_loss_function"]


def fuse(model: nn.Module, choice: FusedChoice, device: torch.device) -> Swapped:
    """Swap fused operators in, in place. What an earlier call has swapped stays, and is undone with what this one does.

    Args:
        model: On any device, also without values.
        choice: The option `use_fused_kernels`. False: nothing is done.
        device: Where it will compute: the kernels of `liger-kernel` run on GPUs; elsewhere, or without the package,
            torch's operators do the same.

    Raises:
        PlanError: The choice is True and nothing can be swapped, or it is none.
    """
    check_fused_choice(choice)
    swapped = Swapped()
    if choice is False:
        return swapped
    has_kernels = liger.runs_on(device)
    modules = list(model.modules())
    earlier = [module for module in modules if has_own_forward(module)]
    for module in earlier:
        swapped.on_undo(functools.partial(_drop_forward, module))
    compiled = _in_compiled_code(model)
    if compiled:
        swapped.left.append("what is compiled stays as it is: torch.compile fuses by itself")
    for name, module in model.named_modules():
        if not has_own_forward(module) and name not in compiled:
            _swap(module, swapped, has_kernels=has_kernels)
    if swapped.counts or not earlier:
        _tell(swapped, model, choice, device, has_kernels=has_kernels)
    return swapped


def fuse_copy(copied: nn.Module, model: nn.Module, choice: FusedChoice) -> None:
    """Swap in a deep copy, whose tensors may be fake, what `fuse` would swap, or has swapped, in the model.

    Raises:
        PlanError: The choice is True and nothing can be swapped.
    """
    is_swapped = any(has_own_forward(module) for module in model.modules())
    if choice is False and not is_swapped:
        return
    compiled, swapped = _in_compiled_code(model), Swapped()
    with unset_fake_temporarily():
        for name, module in copied.named_modules():
            if not has_own_forward(module) and name not in compiled:
                _swap(module, swapped, has_kernels=liger.kernels() is not None)
    if choice is True and not swapped.counts and not is_swapped:
        raise _nothing_to_swap(model, swapped)


def _in_compiled_code(model: nn.Module) -> frozenset[str]:
    """Names of the modules that are compiled, or whose forwards are part of compiled code."""
    inside = {id(m) for region in compiled_regions(model) for m in (region.entrance, *region.inside)}
    return frozenset(name for name, module in model.named_modules() if id(module) in inside)


def _swap(module: nn.Module, swapped: Swapped, *, has_kernels: bool) -> None:
    if "transformers" in sys.modules and heads.is_language_model(module):
        _swap_loss(module, swapped)
        return
    found = None if is_replaced(module) else _found(module, has_kernels=has_kernels)
    if found is None:
        return
    why = _why_left(module)
    if why is None:
        swapped.add(found[0], module, found[1])
        return
    sentence = f"{found[0]}: {type(module).__name__} stays as it is: {why}"
    if sentence not in swapped.left:
        swapped.left.append(sentence)


def _why_left(module: nn.Module) -> str | None:
    """Why ranks that share a module's work go on by its own forward; None: they need not."""
    around = pattern_around(module)
    if around is not None and not around.calls_compute:
        return f"its pattern, {around.pattern!r}, has a forward of its own, which may compute in another way"
    if any(isinstance(getattr(type(module), name, None), property) for name in module._parameters):
        return "its parameters are shown as DTensors"
    return None


def _found(module: nn.Module, *, has_kernels: bool) -> tuple[str, Callable[..., Any]] | None:
    """What to swap a module for: the operator's name, and a forward; None: it computes nothing that is known."""
    own = class_forward(module)
    if own is None:
        return None
    formula = norm_formula(module)
    if formula is not None:
        return _NORM, _norm_forward(own, *formula)
    gate = gate_of(module)
    if gate is not None:
        return _GATED, _gated_forward(own, gate)
    gate = mixture_of(module)
    if gate is not None:
        return _MIXTURE, _mixture_forward(own, gate)
    turned = _with_rope(own) if has_kernels else None
    return None if turned is None else (_ROPE, turned)


def _swap_loss(model: Any, swapped: Swapped) -> None:
    name, verdict = type(model).__name__, heads.judge(model)
    if verdict.why_not is not None:
        swapped.left.append(f"the loss of {name} stays as it is: {verdict.why_not}")
        return
    if verdict.doubt is not None:
        swapped.left.append(
            f"whether the forward of {name} needs its logits is not known ({verdict.doubt}). If it does, the"
            " swapped loss saves nothing, and the log says so at the first step"
        )
    head = model.get_output_embeddings()
    swapped.add(_LOSS, model, heads.puts_off_logits(type(model).forward))
    vars(head)["forward"] = MethodType(heads.head_forward(type(head).forward), head)
    swapped.on_undo(functools.partial(_drop_forward, head))
    model.loss_function = heads.fused_loss


def _norm_forward(own: Callable[..., Any], kind: NormKind, eps: float) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_usual = len(args) == 1 and not kwargs and is_plain(*args) and not torch.compiler.is_compiling()
        return rms_norm(args[0], self.weight, eps, kind) if is_usual else own(self, *args, **kwargs)

    return own_forward(forward)


def _gated_forward(own: Callable[..., Any], kind: Gate) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or torch.compiler.is_compiling():
            return own(self, *args, **kwargs)
        (x,) = args
        gate, up = self.gate_proj(x), self.up_proj(x)
        is_usual = is_plain(gate, up)
        return self.down_proj(gated_product(gate, up, kind) if is_usual else self.act_fn(gate) * up)

    return own_forward(forward)


def _mixture_forward(own: Callable[..., Any], kind: Gate) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(self: Any, *args: Any, num_pairs: int | None = None, **kwargs: Any) -> Any:
        is_usual = len(args) == 3 and not kwargs and is_plain(*args) and all(x.dim() == 2 for x in args)
        if not is_usual or not args[0].shape[0] or torch.compiler.is_compiling():
            return own(self, *args, **kwargs) if num_pairs is None else NotImplemented
        tokens, numbers, weights = args
        return mixture(tokens, numbers, weights, self.gate_up_proj, self.down_proj, kind, num_pairs)

    setattr(forward, TAKES_PAIRS, True)
    return own_forward(forward)


def _with_rope(own: Any) -> Callable[..., Any] | None:
    """A forward whose rotary embedding is the fused one; None where it has none that is known."""
    inner = own
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    names: tuple[str, ...] = getattr(getattr(inner, "__code__", None), "co_names", ())
    theirs = getattr(inner, "__globals__", {}).get(_ROPE_NAME)
    if _ROPE_NAME not in names or theirs is None or not is_rope(theirs):
        return None

    def turned(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        fused = None if args or kwargs or torch.compiler.is_compiling() else rope(query, key, cos, sin)
        return theirs(query, key, cos, sin, *args, **kwargs) if fused is None else fused

    scope = {**inner.__globals__, _ROPE_NAME: turned}
    copied = copy_of(inner, inner.__closure__, scope)
    forward = _around(own, inner, copied)
    return None if forward is None else own_forward(forward)


def _around(outer: Any, inner: Any, new: FunctionType) -> FunctionType | None:
    """What decorators have made of `inner`, made of `new`; None where they do not hold it as a variable."""
    if outer is inner:
        return new
    below = outer.__wrapped__
    made = _around(below, inner, new)
    cells = outer.__closure__ or ()
    holding = [any(held is below for held in held_by(cell)) for cell in cells]
    if made is None or not any(holding):
        return None
    copied = copy_of(outer, tuple(CellType(made) if h else cell for h, cell in zip(holding, cells, strict=True)))
    copied.__dict__["__wrapped__"] = made
    return copied


# Words


def _tell(swapped: Swapped, model: nn.Module, choice: FusedChoice, device: torch.device, *, has_kernels: bool) -> None:
    name = type(model).__name__
    if not swapped.counts:
        if choice is True:
            raise _nothing_to_swap(model, swapped)
        log.info("use_fused_kernels='auto': %s stays as it is (%s)", name, _reasons(swapped))
        return
    by = "liger-kernel" if has_kernels else f"torch ({_why_torch(device)})"
    log.info("use_fused_kernels: swapped in %s, by %s:\n%s", name, by, "\n".join(_table(swapped)))
    for sentence in swapped.left:
        log.info("use_fused_kernels: %s", sentence)


def _reasons(swapped: Swapped) -> str:
    return "; ".join(swapped.left) or (
        "it has no RMS norm, no MLP of gate_proj, up_proj and down_proj, no experts of gate_up_proj and down_proj, and"
        " no loss of transformers' language models"
    )


def _nothing_to_swap(model: nn.Module, swapped: Swapped) -> PlanError:
    return PlanError(
        f"use_fused_kernels=True, and nothing can be swapped in {type(model).__name__} ({_reasons(swapped)}): give"
        " 'auto' to go on without, or call lightning_elixir.linear_cross_entropy in the model's own loss"
    )


def _why_torch(device: torch.device) -> str:
    if device.type != "cuda":
        return f"the kernels of liger-kernel do not run on the {device.type.upper()}"
    return "without liger-kernel: pip install liger-kernel for kernels"


def _table(swapped: Swapped) -> Iterator[str]:
    for (operator, kind), count in sorted(swapped.counts.items()):
        yield f"  {operator:<22}{kind:<32}{count:>5}"
