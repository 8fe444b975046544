"""`nn.TransformerEncoder` in evaluation, where chunks move.

Given a mask of padded positions, torch makes a nested tensor of the input as soon as the parameters of its first layer
are plain and on the device. Every layer must then take the fused path of evaluation, which needs all of its own
parameters at its begin; one whose parameters are to come piece by piece raises, and what is given at padded positions
(zeros, in place of values) would depend on the size of chunks. So inputs stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from lightning_elixir.runtime.hooks import Around

_SWITCH = "use_nested_tensor"


def without_nested_tensors(
    root: nn.Module, around: Iterable[tuple[nn.Module, Around]]
) -> list[tuple[nn.Module, Around]]:
    """What is to run around calls of modules, with what has the encoders of a model make no nested tensors.

    Args:
        root: The model.
        around: Modules, and what runs around their calls besides.
    """
    found = dict(around)
    for module in root.modules():
        if isinstance(module, nn.TransformerEncoder) and getattr(module, _SWITCH, False):
            found[module] = partial(_run, module, found.get(module))
    return list(found.items())


def _run(
    module: nn.Module,
    inside: Around | None,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    before = getattr(module, _SWITCH)
    setattr(module, _SWITCH, False)
    try:
        return call(*args, **kwargs) if inside is None else inside(call, args, kwargs)
    finally:
        setattr(module, _SWITCH, before)
