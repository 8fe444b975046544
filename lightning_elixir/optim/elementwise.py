"""Which optimizers update element by element, and what runs over segments in the place of a user's optimizer.

A class is element-wise or is not, in every program. So what `register_elementwise` has found is kept for the whole
process, by class, in `_registered` below; nothing of it belongs to an engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_elixir.errors import PlanError
from lightning_elixir.optim.elementwise_check import OptimizerMaker, check_elementwise, settings_of
from lightning_elixir.optim.hybrid_adam import HybridAdam
from lightning_elixir.optim.own_steps import check_own_steps

Optimizer = torch.optim.Optimizer

# Their update of one element looks at that element alone, so they may run over any slice of a parameter.
_ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)

# Their update of a parameter looks at all of it, and at no other: each is updated as a whole, by one rank.
_WHOLE = tuple(getattr(torch.optim, name) for name in ("Muon", "Adafactor") if hasattr(torch.optim, name))

_NEEDS_CLOSURE = tuple(getattr(torch.optim, name) for name in ("LBFGS",) if hasattr(torch.optim, name))

# Package and class of others that are taken without being registered. They are checked all the same, as they are used.
_TAKEN_FROM_ELSEWHERE = {
    ("lion_pytorch", "Lion"),
    ("timm", "Lion"),
    ("pytorch_optimizer", "Lion"),
    ("schedulefree", "AdamWScheduleFree"),
    ("schedulefree", "SGDScheduleFree"),
    ("schedulefree", "RAdamScheduleFree"),
}

# Those of bitsandbytes, and how many moments each keeps. In 8 bits they scale these in blocks of a parameter's
# elements, beginning anew with each parameter; LAMB and LARS take norms of it. Any may be told to use 8 bits, or 32.
_MOMENTS = {"Adam": 2, "AdamW": 2, "LAMB": 2, "Lion": 1, "SGD": 1, "RMSprop": 1, "Adagrad": 1, "LARS": 1}
_OF_BITSANDBYTES = {f"{name}{bits}": count for name, count in _MOMENTS.items() for bits in ("", "8bit", "32bit")}
_OF_BITSANDBYTES |= {"AdEMAMix": 3, "AdEMAMix8bit": 3}
_BLOCK_OF_BITSANDBYTES = 256
# Those of torchao, and the bytes of a moment's element. They scale in blocks in the same way.
_OF_TORCHAO = {
    f"{name}{bits}": size for name in ("Adam", "AdamW") for bits, size in (("8bit", 1.0), ("4bit", 0.5), ("Fp8", 1.0))
}
_LEAST_OF_TORCHAO = 4096  # elements of a parameter whose moments are of few bits
_SCALE_BYTES, _FULL_BYTES = 4, 4  # of a block, and of a moment's element that is in fp32
_WHOLE_FROM_ELSEWHERE = {
    ("transformers", "Adafactor"),
    *(("bitsandbytes", name) for name in _OF_BITSANDBYTES),
    *(("torchao", name) for name in _OF_TORCHAO),
}

_registered: weakref.WeakSet[type[Optimizer]] = weakref.WeakSet()

_COUNTERS_OF_TORCH = {"step", "train", "eval", "_step_count", "_opt_called", "_compiled_with_capturable"}
"""What torch, learning-rate schedulers and we set on an optimizer, beside what `Optimizer.__init__` sets."""


def register_elementwise(cls: type[Optimizer], **arguments: Any) -> type[Optimizer]:
    """Declare that an optimizer updates element by element, so that it can run over slices of parameters.

    It is tried on random tensors first: in several steps, whole tensors and the same numbers cut up and in another
    order must come to the same values and the same states. The settings that it is used with later are tried in the
    same way. The declaration holds for the process. May be used as a decorator.

    Args:
        cls: A subclass of `torch.optim.Optimizer`. All that it keeps from step to step must be in `state`, or in
            `param_groups` if it doesn't depend on gradients (step counts, warm-up).
        arguments: For its constructor, if that has arguments without defaults.

    Returns:
        `cls`.

    Raises:
        PlanError: It is not element-wise; says what was seen. Nothing is registered then.
    """
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise PlanError(
            f"register_elementwise() takes a subclass of torch.optim.Optimizer, got {cls!r}: give the class itself"
        )
    if _is_whole(cls):
        raise PlanError(
            f"{full_name(cls)} is not run over slices of parameters, but over whole ones, for which nothing has to be"
            " registered: leave register_elementwise() out, and use it as it is"
        )
    if issubclass(cls, HybridAdam):
        return cls  # known, and run by kernels of ours, not by code of its own that could be tried
    probe = torch.nn.Parameter(torch.zeros(3, device="cpu"))
    try:
        sample = cls([probe], **arguments)
    except Exception as error:
        # One that takes no list of parameters (a model, say) raises whatever it raises.
        told = str(error) if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
        raise PlanError(
            f"{cls.__name__} cannot be made from {f'parameters and {arguments}' if arguments else 'parameters alone'}"
            f" ({told}): give its other arguments, as in register_elementwise({cls.__name__}, lr=1e-3)"
        ) from error
    reason = _known_reason(sample)
    if reason is not None:
        raise PlanError(reason)
    check_elementwise(InnerMaker(cls, sample).make, sample, sample.param_groups)
    _registered.add(cls)
    return cls


@dataclass(frozen=True)
class InnerMaker:
    """Makes what runs over segments in the place of the user's optimizer."""

    cls: type[Optimizer]
    prototype: Optimizer | None = None
    """The user's, whose own attributes the made ones share; None: the class is one of torch or ours, and all that
    counts is in the groups."""

    is_whole: bool = False
    """Whether it looks at whole parameters, so that it runs over these, not over segments."""

    def state_bytes(self, numel: int, group: Mapping[str, Any]) -> float | None:
        """Of the states of a parameter, for each of its elements, where they are of 8 or 32 bits and the like whatever
        the parameter's dtype; None for all other optimizers.

        Args:
            numel: Elements of the parameter.
            group: Its settings.
        """
        package, name = _place_of(self.cls)
        if package == "bitsandbytes" and name in _OF_BITSANDBYTES:
            settings = getattr(self.prototype, "args", None)
            is_small = numel < int(getattr(settings, "min_8bit_size", 4096))
            is_full = getattr(settings, "optim_bits", 32) != 8 or is_small
            of_few_bits, block = 1.0, _BLOCK_OF_BITSANDBYTES
            num_moments = _OF_BITSANDBYTES[name]
        elif package == "torchao" and name in _OF_TORCHAO:
            of_few_bits, block = _OF_TORCHAO[name], int(vars(self.prototype)["block_size"])
            is_full = numel < _LEAST_OF_TORCHAO or numel % block != 0
            num_moments = 3 if group.get("amsgrad") else 2
        else:
            return None
        return num_moments * (_FULL_BYTES if is_full else of_few_bits + _SCALE_BYTES / block)

    @property
    def is_adam(self) -> bool:
        """Whether updates are Adam's, described before they run."""
        return self.cls is HybridAdam

    @property
    def has_modes(self) -> bool:
        """Whether it has `train()` and `eval()`, which change parameters (schedule-free ones)."""
        return self.prototype is not None and all(callable(getattr(self.cls, name, None)) for name in ("train", "eval"))

    def make(self, groups: Sequence[dict[str, Any]]) -> Optimizer:
        """One over these groups, which hold all settings; without states."""
        if self.prototype is None:
            make: Callable[..., Optimizer] = self.cls  # unlike their base, these have defaults for all settings
            return make(groups)
        inner = self.cls.__new__(self.cls)
        Optimizer.__init__(inner, groups, dict(self.prototype.defaults))
        for name, value in vars(self.prototype).items():
            if name not in vars(inner) and name not in _COUNTERS_OF_TORCH:
                vars(inner)[name] = value
        return inner

    def advance(self, groups: Sequence[dict[str, Any]], used: Sequence[bool], method: str = "step") -> bool:
        """Change settings as a call of the user's optimizer would that keeps some of its state in its groups (a step
        count, whether it is in train mode). What runs over segments has changed its own copies alone.

        Args:
            groups: Changed in place.
            used: Whether any parameter of each has a gradient.
            method: "step", "train" or "eval".

        Returns:
            Whether anything has changed.
        """
        if self.prototype is None or self.is_whole:  # those that are known keep nothing there
            return False
        return advance_groups(self.make, groups, used, method)


def advance_groups(make: OptimizerMaker, groups: Sequence[dict[str, Any]], used: Sequence[bool], method: str) -> bool:
    """See `InnerMaker.advance`: an optimizer over parameters of one element, all zeros, does it in place of the user's.

    Args:
        make: Makes it from groups.
        groups: As are `used` and `method`, see there.
    """
    probes = [torch.zeros(1, device="cpu") for _ in groups]
    for probe, is_used in zip(probes, used, strict=True):
        probe.grad = torch.zeros(1, device="cpu") if is_used else None
    one = make([{**settings_of(group), "params": [p]} for group, p in zip(groups, probes, strict=True)])
    call = getattr(type(one), method)
    with torch.no_grad():
        getattr(call, "__wrapped__", call)(one)  # without hooks for all optimizers: this is no step of theirs
    has_changed = False
    for group, changed in zip(groups, one.param_groups, strict=True):
        for key, value in settings_of(changed).items():
            if key not in group or not _is_same(group[key], value):
                group[key], has_changed = value, True
    return has_changed


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    return bool(a == b)


def inner_maker(optimizer: Optimizer) -> InnerMaker:
    """What runs over segments in `optimizer`'s place.

    Raises:
        PlanError: For optimizers that are not element-wise or whose `step` we do not know; names those that work.
    """
    known = next((cls for cls in type(optimizer).__mro__ if _is_known(cls)), None)
    if known is None:
        raise PlanError(_why_not(optimizer))
    check_own_steps(optimizer, known)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise PlanError("a differentiable optimizer step is not possible over shards: use differentiable=False")
    if known is HybridAdam or known in _ELEMENTWISE:
        return InnerMaker(known)
    if known in _WHOLE:
        return InnerMaker(known, is_whole=True)
    if _place_of(known) in _WHOLE_FROM_ELSEWHERE:
        if _is_paged(optimizer):
            raise PlanError(_why_not(optimizer))
        _check_overrides(optimizer)
        return InnerMaker(known, optimizer, is_whole=True)
    maker = InnerMaker(known, optimizer)
    check_elementwise(maker.make, optimizer, optimizer.param_groups)
    return maker


def _check_overrides(optimizer: Optimizer) -> None:
    """Raises `PlanError` if bitsandbytes was told to treat some parameters otherwise: it knows them by their identity,
    and what is updated here is another tensor over the same values."""
    manager = getattr(optimizer, "mng", None)
    if any(getattr(manager, name, None) for name in ("pid2config", "index2config", "module_weight_config_triple")):
        raise PlanError(
            f"{full_name(type(optimizer))}: this process has set other bits for some parameters, with"
            " GlobalOptimManager or modules such as StableEmbedding, which cannot be followed here. Leave that out, and"
            " give these parameters an optimizer of their own"
        )


def _is_known(cls: type) -> bool:
    is_elementwise = cls is HybridAdam or cls in _ELEMENTWISE or cls in _registered
    return is_elementwise or _is_whole(cls) or _place_of(cls) in _TAKEN_FROM_ELSEWHERE


def _is_whole(cls: type) -> bool:
    return cls in _WHOLE or _place_of(cls) in _WHOLE_FROM_ELSEWHERE


def _is_paged(optimizer: Optimizer) -> bool:
    """Whether it is bitsandbytes', with states that the driver moves."""
    return getattr(optimizer, "is_paged", False) is True


def _place_of(cls: type) -> tuple[str, str]:
    """Package and name."""
    return cls.__module__.partition(".")[0], cls.__name__


def full_name(cls: type) -> str:
    """With the module: several packages have an AdamW."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _names_that_work() -> str:
    return ", ".join(["HybridAdam", "CPUAdam", *(f"torch.optim.{c.__name__}" for c in (*_ELEMENTWISE, *_WHOLE))])


def _why_not(optimizer: Optimizer) -> str:
    name = full_name(type(optimizer))
    return _known_reason(optimizer) or (
        f"{name} is not known to be element-wise: updates run over shards, which hold slices of parameters, so what "
        f"becomes of an element may depend on that element alone. If it does, say so before training: "
        f"lightning_elixir.register_elementwise({type(optimizer).__name__}), which tries it. If it does not, use one of"
        f" {_names_that_work()}"
    )


def _known_reason(optimizer: Optimizer) -> str | None:
    """Why an optimizer cannot run here in any way, where that is known without trying it."""
    cls = type(optimizer)
    name = full_name(cls)
    if isinstance(optimizer, _NEEDS_CLOSURE):
        return (
            f"{name} looks at whole parameters, at all of them together (it is not element-wise), and runs its closure"
            f" several times in a step: none of this is possible over shards. Use one of {_names_that_work()}"
        )
    if any(_place_of(base) == ("bitsandbytes", "AdEMAMix32bit") for base in cls.__mro__):
        return (
            f"{name} of bitsandbytes makes one moment of a parameter where its update writes two, in plain PyTorch too:"
            " use bitsandbytes.optim.AdEMAMix, which has 32 bits as well"
        )
    if _is_paged(optimizer):
        unpaged = cls.__name__.removeprefix("Paged")
        return (
            f"{name} has the driver move its states between GPU and host (is_paged=True), and here the plan does that:"
            f" use {_place_of(cls)[0]}.optim.{unpaged} with is_paged=False, whose states may be offloaded"
        )
    return None
