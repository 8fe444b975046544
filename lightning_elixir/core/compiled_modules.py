"""Which modules of a model `torch.compile` has compiled, and where their compiled code begins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch._dynamo import external_utils, trace_rules
from torch._dynamo.eval_frame import OptimizeContext
from torch._dynamo.utils import counters

from lightning_elixir.core.module_hooks import class_forward, forward_of, is_scripted, set_forward

log = logging.getLogger(__name__)

# What `torch.compile` makes has both, what `torch.compiler.disable` makes the first.
_ORIGINAL = "_torchdynamo_orig_callable"
_CONFIG = "get_compiler_config"
_CALL = "_compiled_call_impl"  # of a module: what `module.compile()` has made
_INNER = "_orig_mod"  # what `torch.compile(module)` has around it


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
    def compiled(self) -> Any:
        """The function that `torch.compile` has made."""
        return compiled_call_of(self.entrance) if self.is_call else forward_of(self.entrance)

    @property
    def has_cuda_graphs(self) -> bool:
        """Whether it was compiled with `mode="reduce-overhead"` or the like."""
        return _has_cuda_graphs(self.compiled)


def _has_cuda_graphs(compiled: Any) -> bool:
    config_of = getattr(compiled, _CONFIG, None)
    config = None if config_of is None else config_of()
    return bool(config and config.get("triton.cudagraphs"))


def methods_with_cuda_graphs(root: nn.Module, regions: Sequence[CompiledRegion]) -> Iterator[str]:
    """Methods, of modules outside of these regions, that were compiled by themselves, with CUDA graphs, and whose code
    names parameters of their module or parts that have some."""
    inside = {id(m) for region in regions for m in (region.entrance, *region.inside)}
    for name, module in root.named_modules():
        if id(module) in inside:
            continue
        classes = [c for c in type(module).__mro__ if c not in nn.Module.__mro__]
        held = {key: value for owner in (*reversed(classes), module) for key, value in vars(owner).items()}
        parts = {
            key for key, part in module._modules.items() if part is not None and any(True for _ in part.parameters())
        }
        for key, value in held.items():
            if isinstance(value, FunctionType) and _has_cuda_graphs(value):
                code = getattr(getattr(value, _ORIGINAL, None), "__code__", None)
                if code is not None and not (parts | module._parameters.keys()).isdisjoint(code.co_names):
                    yield f"{name}.{key}" if name else key


def compiled_call_of(module: nn.Module) -> Any:
    """What `module.compile()` has made, also where a call of ours stands around it; None if it was not compiled."""
    call = module._compiled_call_impl
    return getattr(call, "compiled", call)


def compiled_regions(root: nn.Module) -> tuple[CompiledRegion, ...]:
    """The outermost compiled regions of a model: made by `module.compile()`, by `torch.compile(module)`, or by
    `torch.compile` over the forward of a module or of its class."""
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
    is_call = compiled_call_of(module) is not None
    if not is_call and _compiled_forward_of(module) is None:
        return None  # nearly all, so nothing is looked for below them
    below = tuple(m for m in module.modules() if m is not module)
    return CompiledRegion(module, (module, *below) if is_call else below, is_call=is_call)


def _compiled_forward_of(module: nn.Module) -> Any:
    """None where it is not compiled: Lightning puts another one in the place of its module's in every step."""
    forward = forward_of(module) if "forward" in module.__dict__ else class_forward(module)  # asked in every step
    return forward if hasattr(forward, _ORIGINAL) and hasattr(forward, _CONFIG) else None


def run_as_it_is(region: CompiledRegion) -> None:
    """Have a region run uncompiled from now on."""
    if region.is_call:
        region.entrance._compiled_call_impl = None
    else:
        set_forward(region.entrance, _uncompiled(region.entrance))


def compiler_of(region: CompiledRegion) -> Any:
    """What torch.compile has compiled it with; None where that cannot be told."""
    if "dynamo_ctx" in vars(region.entrance):
        return region.entrance.dynamo_ctx
    cells = [cell.cell_contents for cell in getattr(region.compiled, "__closure__", None) or ()]
    return next((value for value in cells if isinstance(value, OptimizeContext)), None)


def compile_with(module: nn.Module, compiler: Any) -> None:
    """As `module.compile()`, with what another one was compiled with."""
    call = module._call_impl
    # Compiled by itself, the compiler passes over what is torch's own.
    is_torchs: bool = trace_rules.check(forward_of(module))
    module._compiled_call_impl = compiler(external_utils.wrap_inline(call) if is_torchs else call)


def keep_out(root: nn.Module, apart: Collection[nn.Module]) -> None:
    """Have these modules run as they are. A region that one of them is in is compiled in parts: what modules above it
    do runs as it is, and all other modules below these are compiled by the same settings.

    Args:
        root: With compiled regions.
        apart: Modules in it.
    """
    ids = {id(module) for module in apart}
    for region in compiled_regions(root) if ids else ():
        whole = inner_of(region.entrance)
        if all(id(module) not in ids for module in whole.modules()):
            continue
        compiler = compiler_of(region)
        run_as_it_is(region)
        parts = [] if compiler is None else list(_parts_around(whole, ids))
        for part in parts:
            compile_with(part, compiler)
        log.info("%s is compiled in %d parts, around what is spread over ranks", type(whole).__name__, len(parts))
        keep_out(whole, apart)  # of what users have compiled inside as well


def _parts_around(module: nn.Module, apart: Collection[int]) -> Iterator[nn.Module]:
    if id(module) in apart:
        return
    for child in module.children():
        is_list = type(child).forward is nn.Module.forward  # nothing calls it
        if is_list or any(id(m) in apart for m in child.modules()):
            yield from _parts_around(child, apart)
        elif _region_of(child) is None and next(child.parameters(), None) is not None:
            yield child


def inner_of(module: nn.Module) -> nn.Module:
    """What `torch.compile(module)` was given; any other module itself."""
    inner = None if is_scripted(module) else module._modules.get(_INNER)
    return module if inner is None else inner


def uncompiled_name(name: str) -> str:
    """A name of a module or parameter as it would be if no module around it had gone through `torch.compile`."""
    return ".".join(part for part in name.split(".") if part != _INNER)


def named_modules(root: nn.Module, *, remove_duplicate: bool = True) -> dict[str, nn.Module]:
    """Modules by the names that they would have if none had gone through `torch.compile`, without what that has put
    around them."""
    # Those inside come later, and so take the places.
    return {uncompiled_name(name): m for name, m in root.named_modules(remove_duplicate=remove_duplicate)}


def run_copy_as_it_is(copy: nn.Module) -> None:
    """Have the modules of a deep copy run uncompiled, and not by functions that belong to the original."""
    for module in copy.modules():
        if hasattr(forward_of(module), _ORIGINAL):
            set_forward(module, _uncompiled(module))


def _uncompiled(module: nn.Module) -> Callable[..., Any]:
    """What a module's forward was compiled from, for this module, which may be a copy."""
    wrapped = module._modules.get(_INNER)
    if wrapped is not None:
        return wrapped.__call__
    original = getattr(forward_of(module), _ORIGINAL)
    code = getattr(original, "__code__", None)
    if code is not None and code.co_filename == external_utils.__file__:  # the compiler's own, around torch's modules
        original = original.__wrapped__
    return MethodType(getattr(original, "__func__", original), module)


def leave_out_of_compiled_code(packages: Sequence[str]) -> None:
    """Have `torch.compile` run the functions of these packages as they are, wherever it comes to one: a graph ends
    there, and another begins. The compiler keeps that for the process."""
    for package in packages:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            continue
        folder = spec.origin.removesuffix("__init__.py")
        if not any(folder.startswith(known) for known in trace_rules.SKIP_DIRS):
            trace_rules.add(package)


def num_compiled_graphs() -> int:
    """How many graphs this process has compiled so far."""
    return int(counters["stats"]["unique_graphs"])


class CompiledState:
    """What of a model is compiled now, and whether there is compiled code at all, so that a change shows: one look
    costs a fraction of a microsecond a module."""

    def __init__(self, root: nn.Module) -> None:
        self._has_graphs = num_compiled_graphs() > 0
        self._seen = [
            (
                module,
                vars(module).get(_CALL),
                _compiled_forward_of(module),
                None if "forward" in vars(module) else type(module).forward,  # its class's, compiled or not
                tuple(module._modules.values()),
            )
            for module in root.modules()
            if not is_scripted(module)
        ]

    def is_current(self) -> bool:
        """Whether no module was compiled since, nor the first function of the process, nor another module put in."""
        if (num_compiled_graphs() > 0) is not self._has_graphs:
            return False
        for module, call, forward, of_class, children in self._seen:
            held = module.__dict__
            if held.get(_CALL) is not call:
                return False
            is_same = "forward" not in held and type(module).forward is of_class  # as of nearly all
            if not is_same and _compiled_forward_of(module) is not forward:
                return False
            if (children or module._modules) and tuple(module._modules.values()) != children:  # few have any
                return False
        return True
