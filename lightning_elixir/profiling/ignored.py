"""Which parameters are left out of chunks: those that the user names, frozen ones of which no chunk can be made, and
those of TorchScript."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from lightning_elixir.core.compiled_modules import compiled_regions
from lightning_elixir.core.module_hooks import is_scripted
from lightning_elixir.core.shells import is_shell, layout_of
from lightning_elixir.errors import PlanError
from lightning_elixir.patterns.cuts import cuts_of
from lightning_elixir.plan.selection import Entry, entries_of
from lightning_elixir.plan.types import DTYPE_BYTES, TRAINED_DTYPES, IgnoredParam
from lightning_elixir.plan.units import format_bytes
from lightning_elixir.profiling.kept_fp32 import selected
from lightning_elixir.profiling.parameters import dtype_name, has_plain_elements

log = logging.getLogger(__name__)

Ignored = Entry | Collection[Entry] | None
"""None: nothing but what cannot be in a chunk."""

_SHOWN = 3


def ignored_parameters(model: nn.Module, ignored: Ignored) -> tuple[IgnoredParam, ...]:
    """What is left out of chunks, in the order of registration.

    Args:
        model: As the user built it, `meta` parameters included.
        ignored: As the user gave it.

    Raises:
        PlanError: A name or a class stands for no parameter, or one is named that trains and is no dense tensor of a
            floating dtype.
    """
    named: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        named.setdefault(id(parameter), []).append(fqn)
        parameters[id(parameter)] = parameter
    every = {fqn for fqns in named.values() for fqn in fqns}
    found: set[str] = set()
    for entry in () if ignored is None else entries_of("ignored", ignored):
        found |= selected("ignored", model, entry, every)
    kept = _compiled_shells(model) | scripted_parameters(model)
    found |= {fqns[0] for key, fqns in named.items() if key in kept}
    result = []
    for key, fqns in named.items():
        parameter = parameters[key]
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            continue  # which is refused anyhow
        if found.isdisjoint(fqns) and not _is_unchunkable(parameter):
            continue
        result.append(_ignored_param(fqns[0], parameter))
    return tuple(result)


def tell_of_unchunked(model: nn.Module, ignored: Collection[IgnoredParam]) -> None:
    """Log once which parameters stay on the device, though `ignored` does not name them."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    compiled, scripted = _compiled_shells(model), scripted_parameters(model)
    of_scripts = [p for p in ignored if id(parameters[p.fqn]) in scripted]
    unchunked = [
        p
        for p in ignored
        if not p.requires_grad
        and p not in of_scripts
        and (_is_unchunkable(parameters[p.fqn]) or id(parameters[p.fqn]) in compiled)
    ]
    _tell(unchunked, "frozen parameters", "their class or dtype is none that chunks can hold")
    _tell(of_scripts, "parameters", "they are those of TorchScript, which calls its modules without Python")


def _tell(staying: Collection[IgnoredParam], what: str, why: str) -> None:
    if staying:
        shown = ", ".join([p.fqn for p in staying][:_SHOWN]) + (", ..." if len(staying) > _SHOWN else "")
        nbytes = format_bytes(sum(p.nbytes for p in staying))
        log.info("%d %s stay on the device (%s): %s (%s)", len(staying), what, nbytes, why, shown)


def _is_unchunkable(parameter: nn.Parameter) -> bool:
    """Whether a frozen parameter can be in no chunk. Ones that train are refused instead."""
    if parameter.requires_grad:
        return False
    if layout_of(parameter) is not None:
        return bool(cuts_of(parameter))  # its bytes are not cut as its elements would be
    is_dense = parameter.layout is torch.strided and dtype_name(parameter.dtype) in DTYPE_BYTES
    return not is_dense or not has_plain_elements(parameter)


def _compiled_shells(model: nn.Module) -> frozenset[int]:
    """Ids of parameters around other tensors that compiled code uses: it is made for their class, and in chunks they
    have another (Note: shells, `core/shells.py`)."""
    entrances = [region.entrance for region in compiled_regions(model)]
    return frozenset(id(p) for module in entrances for p in module.parameters() if is_shell(p))


def scripted_parameters(model: nn.Module) -> frozenset[int]:
    """Ids of parameters of modules that are TorchScript: these call each other without Python, so that nothing would
    bring what they need."""
    scripted = [module for module in model.modules() if is_scripted(module)]
    return frozenset(id(p) for module in scripted for p in module.parameters())


def _ignored_param(fqn: str, parameter: nn.Parameter) -> IgnoredParam:
    dtype = dtype_name(parameter.dtype)
    if parameter.requires_grad and not (
        dtype in TRAINED_DTYPES and parameter.layout is torch.strided and has_plain_elements(parameter)
    ):
        raise PlanError(
            f"ignored: {fqn} trains, and is no dense tensor of {', '.join(TRAINED_DTYPES)} ({type(parameter).__name__},"
            f" {dtype}): its updates could not be those of the optimizer. Freeze it"
        )
    nbytes = sum(t.numel() * t.element_size() for t in plain_tensors_of(parameter))
    return IgnoredParam(fqn, tuple(parameter.shape), dtype, parameter.requires_grad, nbytes)


def plain_tensors_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold a parameter's elements, and what hangs on it: inner ones, and those in its attributes."""
    seen: set[int] = set()
    waiting: list[object] = [tensor]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            is_inside = not has_plain_elements(one)
            if not is_inside and one.layout is torch.strided:
                yield one
            names = list(one.__tensor_flatten__()[0]) if is_inside and hasattr(one, "__tensor_flatten__") else []
            waiting.extend(getattr(one, name) for name in names)
            if one.layout is not torch.strided and one.layout is torch.sparse_coo:
                waiting.extend((one._indices(), one._values()))
            if isinstance(one, nn.Parameter):
                waiting.extend(v for v in vars(one).values() if _may_hold_tensors(v))
        elif _may_hold_tensors(one):
            waiting.extend(v for v in vars(one).values() if isinstance(v, Tensor) or _may_hold_tensors(v))


def _may_hold_tensors(value: object) -> bool:
    """Tensors, and small objects of quantised parameters that keep some; modules and the like are not looked into."""
    if isinstance(value, Tensor):
        return True
    return type(value).__name__.endswith(("State", "QuantState")) and hasattr(value, "__dict__")
