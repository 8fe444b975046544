"""Which modules of a model `torch.compile` has compiled, and where their compiled code begins."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import MethodType
from typing import Any

from torch import nn

# What `torch.compile` makes has both, what `torch.compiler.disable` makes the first.
_ORIGINAL = "_torchdynamo_orig_callable"
_CONFIG = "get_compiler_config"


@dataclass(frozen=True, eq=False)
class CompiledRegion:
    """A module's forward that runs as compiled code, with those of the modules that it calls."""

    entrance: nn.Module
    """The module whose call begins it. Its hooks run outside of the compiled code, unless `is_call`."""
    inside: tuple[nn.Module, ...]
    """Modules whose forwards, and hooks, are part of the compiled code."""
    is_call: bool
    """Made by `entrance.compile()`, which compiles the call as a whole."""

    @property
    def has_cuda_graphs(self) -> bool:
        """Whether it was compiled with `mode="reduce-overhead"` or the like."""
        config_of = getattr(self.entrance._compiled_call_impl if self.is_call else self.entrance.forward, _CONFIG, None)
        config = None if config_of is None else config_of()
        return bool(config and config.get("triton.cudagraphs"))


def compiled_regions(root: nn.Module) -> tuple[CompiledRegion, ...]:
    """The outermost compiled regions of a model: made by `module.compile()`, by `torch.compile(module)`, or by
    `module.forward = torch.compile(module.forward)`."""
    if "torch._dynamo" not in sys.modules:  # without which nothing can be compiled, and which takes long to import
        return ()
    return tuple(_regions_below(root, set()))


def _regions_below(module: nn.Module, seen: set[int]) -> Iterator[CompiledRegion]:
    if id(module) in seen:
        return
    seen.add(id(module))
    region = _region_of(module)
    if region is not None:
        yield region
        return
    for child in module.children():
        yield from _regions_below(child, seen)


def _region_of(module: nn.Module) -> CompiledRegion | None:
    below = tuple(m for m in module.modules() if m is not module)
    if module._compiled_call_impl is not None:
        return CompiledRegion(module, (module, *below), is_call=True)
    forward = vars(module).get("forward")  # where it has been replaced, or the module is `torch.compile(another)`
    if hasattr(forward, _ORIGINAL) and hasattr(forward, _CONFIG):
        return CompiledRegion(module, below, is_call=False)
    return None


def run_copy_as_it_is(copy: nn.Module) -> None:
    """Have the modules of a deep copy run uncompiled, and not by functions that belong to the original."""
    for module in copy.modules():
        original = getattr(vars(module).get("forward"), _ORIGINAL, None)
        wrapped = module._modules.get("_orig_mod")
        if wrapped is not None:
            vars(module)["forward"] = wrapped.__call__
        elif isinstance(original, MethodType):
            vars(module)["forward"] = MethodType(original.__func__, module)


def leave_out_of_compiled_code(packages: Sequence[str]) -> None:
    """Have `torch.compile` run the functions of these packages as they are, wherever it comes to one: a graph ends
    there, and another begins."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    for package in packages:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            continue
        folder = spec.origin.removesuffix("__init__.py")
        if not any(folder.startswith(known) for known in dynamo.trace_rules.SKIP_DIRS):
            dynamo.trace_rules.add(package)


def num_compiled_graphs() -> int:
    """How many graphs this process has compiled so far."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return 0 if dynamo is None else int(dynamo.utils.counters["stats"]["unique_graphs"])
