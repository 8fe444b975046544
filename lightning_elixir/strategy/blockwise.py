"""Models that are compiled as a whole, compiled block by block.

[Note: block by block] A compiled module needs all of its parameters at once (Note: compiled regions), so one that is
the whole model would have every chunk on the device. Layers of a model that come in lists are compiled one by one
instead, by the same settings: what is between them runs as it is. That does not depend on where chunks are, so that all
placements compute the same. It stays so when the run is over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_elixir._lightning import LightningModule, to_uncompiled
from lightning_elixir.core.compiled_modules import CompiledRegion, compiled_regions

log = logging.getLogger(__name__)

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def take_compiler(module: LightningModule) -> Any:
    """What `torch.compile(module)` compiles with, as Lightning has kept it; its steps run as they are from now on. None
    if it is not compiled."""
    if module._compiler_ctx is None:
        return None
    compiler = module._compiler_ctx["dynamo_ctx"]
    to_uncompiled(module)
    for name in _STEPS:  # the class has them; what users have put in their place stays
        if getattr(vars(module)[name], "__func__", None) is getattr(type(module), name):
            del vars(module)[name]
    return compiler


def compile_by_blocks(model: nn.Module, compiler: Any) -> None:
    """Have blocks compiled in the place of what has most of a model's parameters.

    Args:
        model: Some of its modules may be compiled.
        compiler: Of the model as a whole (`take_compiler`); None: it is not compiled.
    """
    if compiler is not None:
        _compile(model, list(_blocks(model)) or [m for m in model.children() if _has_parts(m)], compiler)
    total = _numel(model)
    for region in compiled_regions(model):
        whole = getattr(region.entrance, "_orig_mod", region.entrance)
        blocks = list(_blocks(whole))
        compiler = _compiler_of(region)
        if 2 * _numel(whole) > total and blocks and compiler is not None:
            _run_as_it_is(region)
            _compile(whole, blocks, compiler)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The items of the outermost lists of layers."""
    items = [item for item in module.children() if _has_parts(item)] if isinstance(module, _LISTS) else []
    if len(items) > 1:
        yield from items
        return
    for child in module.children():
        yield from _blocks(child)


def _has_parts(module: nn.Module) -> bool:
    """Whether there is more to compile than one operator."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _compile(model: nn.Module, blocks: list[nn.Module], compiler: Any) -> None:
    from torch._dynamo import (
        external_utils,
        trace_rules,
    )  # late: takes a second, and is there where models are compiled

    blocks = [block for block in blocks if block._compiled_call_impl is None]
    for block in blocks:
        call = block._call_impl
        # Compiled by itself, the compiler passes over what is torch's own.
        is_torchs: bool = trace_rules.check(block.forward)
        block._compiled_call_impl = compiler(external_utils.wrap_inline(call) if is_torchs else call)
    log.info("%s is compiled block by block: %d of %s", type(model).__name__, len(blocks), _kinds(blocks))


def _kinds(blocks: list[nn.Module]) -> str:
    return ", ".join(dict.fromkeys(type(block).__name__ for block in blocks)) or "nothing that can be"


def _compiler_of(region: CompiledRegion) -> Any:
    """What torch.compile has compiled it with; None where that cannot be told."""
    from torch._dynamo.eval_frame import OptimizeContext

    if not region.is_call and "dynamo_ctx" in vars(region.entrance):
        return region.entrance.dynamo_ctx
    call: Any = region.entrance._compiled_call_impl if region.is_call else region.entrance.forward
    cells = [cell.cell_contents for cell in getattr(call, "__closure__", None) or ()]
    return next((value for value in cells if isinstance(value, OptimizeContext)), None)


def _run_as_it_is(region: CompiledRegion) -> None:
    entrance: Any = region.entrance
    if region.is_call:
        entrance._compiled_call_impl = None
    elif "_orig_mod" in entrance._modules:
        entrance.forward = entrance._orig_mod.__call__
    else:
        entrance.forward = entrance.forward._torchdynamo_orig_callable
