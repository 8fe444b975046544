"""Which parameters stay in fp32 under mixed precision, and how the modules that have them are computed there.

[Note: kept in fp32] By default: parameters of norms with running statistics, which work in the dtype of those; of
modules under `spectral_norm` or `orthogonal`, which have no 16-bit form; under autocast, of routers, which many models
compute in fp32 with autocast switched off, and for which autocast makes the same 16 bits in each forward otherwise; and
on the CPU under autocast those of all norms, since that autocast leaves norms alone and torch refuses 16-bit norm
weights beside an fp32 stream (the engine without Lightning leaves the last to the user). `keep_fp32` adds to that.

What is kept is a matter of the plan alone: names become dtypes of `ParamSpec`s, packing is by dtype, and everything
behind that goes by the dtype of a chunk. Plans are made with names that are found once, on the user's model (later ones
take them from the plan in force, since a skeleton has no classes). A chunk of another dtype has as many bytes as a
regular one, not as many elements, and one more gradient block fills up beside the others. Under autocast nothing is
cast by us; without it, modules that are kept as a whole get two hooks, which cast their inputs and results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _Orthogonal, _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.hooks import RemovableHandle

from lightning_elixir.core.module_hooks import OwnHook, class_forward
from lightning_elixir.errors import PlanError
from lightning_elixir.plan.selection import Entry, entries_of, matching, near_misses
from lightning_elixir.profiling.parameters import norm_parameters

KeepFp32 = Entry | Collection[Entry] | None
"""None: what `default_kept` says; an empty list: nothing; anything else: that, beside what `default_kept` says."""


def is_nothing(keep: KeepFp32) -> bool:
    """Whether the user asks for nothing to be kept."""
    return keep is not None and not entries_of("keep_fp32", keep)


def kept_parameters(
    model: nn.Module, keep: KeepFp32, *, has_autocast: bool, leaves_norms: bool = False, has_defaults: bool = True
) -> frozenset[str]:
    """Names of the parameters that stay in fp32 while the others are cast to 16 bits. A tied parameter is kept under
    all of its names if it is under one.

    Args:
        model: Any model, `meta` parameters included.
        keep: As the user gave it.
        has_autocast: Steps run under `torch.autocast`.
        leaves_norms: That autocast leaves norms alone (the CPU's).
        has_defaults: Whether anything is kept that was not asked for.

    Raises:
        PlanError: A name or a class stands for no parameter. The message has names that may have been meant.
    """
    entries = () if keep is None else entries_of("keep_fp32", keep)
    found: set[str] = set()
    if has_defaults and not is_nothing(keep):
        found |= default_kept(model, has_autocast=has_autocast, leaves_norms=leaves_norms)
    if not found and not entries:
        return frozenset()
    names: dict[int, set[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(fqn)
    for entry in entries:
        found |= selected("keep_fp32", model, entry, {name for same in names.values() for name in same})
    return frozenset(name for same in names.values() if not found.isdisjoint(same) for name in same)


def default_kept(model: nn.Module, *, has_autocast: bool, leaves_norms: bool = False) -> set[str]:
    """What stays in fp32 without being asked for: what 16 bits would not run with, and what plain autocast has in fp32
    where models switch it off.

    - Norms with running statistics, and on the CPU under autocast all norms: see `norm_parameters`.
    - Modules under `spectral_norm` or `orthogonal`: linear algebra that there is no 16-bit form of, beside buffers
      which stay in fp32.
    - Under autocast, routers (`is_router`): many models compute these in fp32, with autocast switched off. Where they
      do not, autocast casts the weight in each forward, to the same bits.
    """
    found = set(norm_parameters(model, is_alone=leaves_norms))
    for name, module in model.named_modules():
        if _is_reparametrized(module):
            found.update(_below(name, module))
        for child_name, child in module.named_children() if has_autocast else ():
            if is_router(child_name, child, module):
                found.update(_below(f"{name}.{child_name}" if name else child_name, child))
    return found


def is_router(name: str, module: nn.Module, parent: nn.Module) -> bool:
    """Whether a module tells which experts get a token: by its name, `router`, or `gate` beside `experts`, or its
    class, `...Router`. Layers that hold the experts themselves are none.

    Args:
        name: What `parent` calls it.
        module: A child of `parent`.
        parent: Whose `experts` are looked for.
    """
    if any("expert" in child for child, _ in module.named_children()):
        return False
    is_gate = name == "gate" and "experts" in parent._modules
    return name == "router" or is_gate or type(module).__name__.endswith("Router")


def _is_reparametrized(module: nn.Module) -> bool:
    if any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()):
        return True
    if not parametrize.is_parametrized(module):
        return False
    lists = module.parametrizations.children()  # type: ignore[union-attr]
    return any(isinstance(one, (_SpectralNorm, _Orthogonal)) for chain in lists for one in chain.children())


def _below(name: str, module: nn.Module) -> Iterator[str]:
    return (f"{name}.{own}" if name else own for own, _ in module.named_parameters(remove_duplicate=False))


def selected(option: str, model: nn.Module, entry: Entry, names: Collection[str]) -> set[str]:
    """Names of the parameters that one entry of an option stands for.

    Args:
        option: Its name, for the message.
        model: Any model.
        entry: A glob, a class of modules or of parameters, or a predicate over (name, module).
        names: Of all parameters, tied ones under all their names.

    Raises:
        PlanError: It stands for none; a predicate may.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found: set[str] = set()
    if isinstance(entry, str):
        found.update(matching(entry, names))
        for name in matching(entry, [name for name in modules if name]):
            found.update(_below(name, modules[name]))
        if not found:
            near = near_misses(entry, [*names, *modules])
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise PlanError(f"{option}: {entry!r} is the name of no parameter, and of no module that has any{hint}")
        return found
    if isinstance(entry, type) and issubclass(entry, Tensor):
        found = {name for name, p in model.named_parameters(remove_duplicate=False) if isinstance(p, entry)}
        if not found:
            raise PlanError(f"{option}: the model has no parameter of class {entry.__name__}")
        return found
    is_chosen: Callable[[str, nn.Module], bool] = (
        (lambda _, module: isinstance(module, entry)) if isinstance(entry, type) else entry
    )
    for name, module in modules.items():
        if is_chosen(name, module):
            found.update(_below(name, module))
    if isinstance(entry, type) and not found:
        near = sorted({type(m).__name__ for m in modules.values() if any(True for _ in m.parameters())})
        raise PlanError(
            f"{option}: the model has no module of class {entry.__name__} with parameters; it has"
            f" {', '.join(near[:10])}{', ...' if len(near) > 10 else ''}"
        )
    return found


# Computing with them where no autocast does it


def compute_in_fp32(
    model: nn.Module, kept: Collection[str], dtype: torch.dtype, device_type: str
) -> list[RemovableHandle]:
    """Where no autocast is on, have the modules all of whose parameters are kept take inputs of `dtype` as fp32 and
    give results of `dtype` again, as torch's own norms do. Where the user passes fp32, they give fp32.

    Args:
        model: Whose modules get hooks.
        kept: Names of its parameters that stay in fp32.
        dtype: What everything else is computed in, 16 bits.
        device_type: Whose autocast is looked at.

    Returns:
        Handles to take the hooks away.
    """
    if not kept:
        return []
    handles: list[RemovableHandle] = []
    of_kept: set[int] = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in kept}
    entered: set[int] = set()  # modules below a module with a hook, and this
    for name, module in model.named_modules():
        own = [id(p) for p in module.parameters()]
        if not name or not own or not of_kept.issuperset(own) or not _has_forward(module):
            continue
        # Norms with running statistics take inputs of 16 bits as they are.
        if isinstance(module, nn.modules.batchnorm._NormBase):
            continue
        island = _Island(dtype, device_type, id(module) not in entered, id(module))
        entered.update(id(m) for m in module.modules())
        handles.append(module.register_forward_pre_hook(island.before, with_kwargs=True))
        handles.append(module.register_forward_hook(island.after, always_call=True))
    return handles


def _has_forward(module: nn.Module) -> bool:
    return class_forward(module) is not nn.Module.forward


class _Island(OwnHook):
    """The hooks of one module. They do nothing in copies, whose parameters are all in fp32; deep copies are without.

    Args:
        dtype: The 16-bit dtype around it.
        device_type: Whose autocast is looked at.
        is_outermost: It is not part of a module that has such hooks.
        module_id: `id` of the module; 0: in a copy.
    """

    def __init__(self, dtype: torch.dtype, device_type: str, is_outermost: bool, module_id: int) -> None:
        self._dtype = dtype
        self._device_type = device_type
        self._is_outermost = is_outermost
        self._module_id = module_id
        self._is_cast: list[bool] = []  # of the calls under way, whether the result goes back to 16 bits

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Island, (self._dtype, self._device_type, False, 0))

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if id(module) != self._module_id:
            return None
        seen: list[torch.dtype] = []
        inputs = map_floating((args, kwargs), lambda tensor: self._widened(tensor, seen))
        # Without floating inputs (an embedding), what comes out goes to modules that work in 16 bits.
        is_wanted = self._dtype in seen or (not seen and self._is_outermost)
        self._is_cast.append(is_wanted and not torch.is_autocast_enabled(self._device_type))
        return inputs if self._is_cast[-1] else (args, kwargs)

    def _widened(self, tensor: Tensor, seen: list[torch.dtype]) -> Tensor:
        seen.append(tensor.dtype)
        return tensor.float() if tensor.dtype is self._dtype else tensor

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._is_cast or not self._is_cast.pop():
            return None
        return map_floating(output, lambda t: t.to(self._dtype) if t.dtype is torch.float32 else t)


def map_floating(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure of tuples, lists and dicts, with every floating-point tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_floating(v, change) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_floating(v, change) for v in value)
    if isinstance(value, dict):
        copied = value.copy()  # keeps the class of transformers' outputs
        for key in value:
            copied[key] = map_floating(value[key], change)
        return copied
    return value
