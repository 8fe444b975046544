"""Models that are compiled as a whole, compiled block by block.

[Note: block by block] A compiled module needs all of its parameters at once (Note: compiled regions), so one that is
the whole model would have every chunk on the device. Layers of a model that come in lists are compiled one by one
instead, by the same settings: what is between them runs as it is. That does not depend on where chunks are, so that all
placements compute the same. It stays so when the run is over.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from lightning_elixir._lightning import LightningModule, to_uncompiled
from lightning_elixir.core.compiled_modules import (
    compile_with,
    compiled_regions,
    compiler_of,
    inner_of,
    run_as_it_is,
)
from lightning_elixir.errors import PlanError
from lightning_elixir.profiling.blocks import has_parts, items_of_lists, num_elements

log = logging.getLogger(__name__)

_OF_ANOTHER_PROCESS = "a compiler that could not be sent along"
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

    Raises:
        PlanError: The compiler is one that another process had.
    """
    if compiler is _OF_ANOTHER_PROCESS:
        raise PlanError(
            "a compiled LightningModule cannot be sent to the processes that start_method='spawn' begins: compile its"
            " blocks in configure_model, or give start_method='popen' or 'fork'"
        )
    if compiler is not None:
        _compile(model, list(items_of_lists(model)) or [m for m in model.children() if has_parts(m)], compiler)
    for region in compiled_regions(model):
        whole = inner_of(region.entrance)
        blocks = list(items_of_lists(whole)) if 2 * num_elements(whole) > num_elements(model) else []
        compiler = compiler_of(region)
        if blocks and compiler is not None:
            run_as_it_is(region)
            _compile(whole, blocks, compiler)


def without_compiler(compiler: Any) -> Any:
    """What a copy, which may be sent to another process, has of it: compilers cannot be sent."""
    return None if compiler is None else _OF_ANOTHER_PROCESS


def _compile(model: nn.Module, blocks: list[nn.Module], compiler: Any) -> None:
    known = {id(region.entrance) for region in compiled_regions(model)}
    blocks = [block for block in blocks if id(block) not in known]
    for block in blocks:
        compile_with(block, compiler)
    if blocks:
        kinds = ", ".join(dict.fromkeys(type(block).__name__ for block in blocks))
        log.info("%s is compiled block by block: %d of %s", type(model).__name__, len(blocks), kinds)
