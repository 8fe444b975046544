"""Hooks and forwards of ours at the modules of a model, which copies of the model do without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

# Tables of a module's hooks, by the names of their attributes.
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
CALL_HOOKS = (*FORWARD_HOOKS, "_backward_pre_hooks", "_backward_hooks")
_HOOKS = (*FORWARD_HOOKS, "_state_dict_pre_hooks", "_state_dict_hooks")
# Of forward hooks: which keys are of hooks that are called in another way.
MARKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class OwnHook:
    """A hook, or an object whose methods are hooks, that does nothing in copies of a module."""


def is_own_hook(hook: Any) -> bool:
    """Whether it is such an object, or a method of one."""
    return isinstance(getattr(hook, "__self__", hook), OwnHook)


_OWN = "_is_own_forward"
# Of what has a pattern's forward: the module's own, and whether the pattern has that compute.
_COMPUTE, _CALLS_COMPUTE = "compute", "calls_compute"


def pattern_around(module: nn.Module) -> Any:
    """What has a pattern's forward, of which the module's is a method; None where there is none."""
    around = getattr(vars(module).get("forward"), "__self__", None)
    return around if hasattr(around, _CALLS_COMPUTE) and not isinstance(around, nn.Module) else None


def forward_of(module: nn.Module) -> Any:
    """The function that computes: of the module itself (`torch.compile(module)` has one as well), or of its class. Not
    a pattern's, but what that calls."""
    around = pattern_around(module)
    return vars(module).get("forward", class_forward(module)) if around is None else getattr(around, _COMPUTE)


def is_scripted(module: nn.Module) -> bool:
    """Whether a module is TorchScript: it calls what is below it without Python, and takes few hooks."""
    return isinstance(module, torch.jit.ScriptModule)


def class_forward(module: nn.Module) -> Any:
    """The function of its class. None for modules of TorchScript, whose class has one for each of them alone."""
    return getattr(type(module), "forward", None)


def set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Have this compute. A pattern stays around it."""
    around = pattern_around(module)
    if around is None:
        vars(module)["forward"] = forward
    else:
        setattr(around, _COMPUTE, forward)


def is_replaced(module: nn.Module) -> bool:
    """Whether what computes is not the forward of the module's class."""
    forward = forward_of(module)
    return getattr(forward, "__func__", forward) is not class_forward(module)


def own_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that a module gets as its forward, so that copies of the module do without."""
    setattr(forward, _OWN, True)
    return forward


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module's forward is one of ours."""
    return hasattr(getattr(forward_of(module), "__func__", None), _OWN)


def drop_own_forward(module: nn.Module) -> None:
    """Have a module compute by its class again if its forward is one of ours."""
    if not has_own_forward(module):
        return
    if pattern_around(module) is None:
        del vars(module)["forward"]
    else:
        set_forward(module, MethodType(type(module).forward, module))


def without_hooks(modules: Iterable[nn.Module], memo: Mapping[int, Any]) -> None:
    """Take our hooks and forwards out of deep copies: TorchScript cannot compile them.

    Args:
        modules: The originals.
        memo: Of `copy.deepcopy`, which has come past the copies.
    """
    for module in modules:
        copied = memo.get(id(module))
        if isinstance(copied, nn.Module):
            drop_own_forward(copied)
        for name in _HOOKS:
            hooks: dict[int, Any] = memo.get(id(getattr(module, name))) or {}
            for key in [key for key, hook in hooks.items() if is_own_hook(hook)]:
                del hooks[key]
                for mark in MARKS:
                    marked: dict[int, Any] = memo.get(id(getattr(module, mark))) or {}
                    marked.pop(key, None)
