"""Optimizer states of others that are more than one tensor of the parameter's shape, as plain tensors.

torchao keeps a moment as a shell (Note: shells) around codes of 8 or 4 bits, a scale for each block of elements, and
the table of what codes stand for. `AdEMAMix` of bitsandbytes keeps two moments in one tensor, `[2, *shape]`. Such a
state has three forms:

- as the optimizer's step takes it: `{"exp_avg": OptimState8bit(...)}`, `{"state1": ...}`;
- in *parts*, plain tensors that may live on any tier: `{"exp_avg:codes": ..., "exp_avg:scale": ..., ...}`,
  `{"state1": ...}`;
- *spread*, as checkpoints hold it, where all that grows with the parameter has its shape and can be read in slices:
  codes of 4 bits, of which a part has two in a byte, take a byte each, and there are `state1:0` and `state1:1`.

All other states are the same in all forms.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_elixir.core.shells import is_shell
from lightning_elixir.errors import PlanError

Empty = Callable[[int, torch.dtype], Tensor]
"""Gives memory, 1-D, for so many elements of a dtype."""

_CODES, _SCALE, _TABLE = "codes", "scale", "qmap"
_OF_SHELL = {_CODES, _SCALE, _TABLE}
_HALVES = ("0", "1")
_SIGNED = "exp_avg"  # of torchao's states the only one that may be negative
_NUM_CODES_IN_4_BITS = 16


def is_part(key: str) -> bool:
    """Whether an entry is a part of a state, which keeps its dtype whatever the parameter's."""
    return ":" in key


def parts_of(state: Mapping[str, Any], shape: Sequence[int], empty: Empty | None = None) -> dict[str, Any]:
    """The states of one parameter in parts.

    Args:
        state: In any form.
        shape: Of the parameter.
        empty: Where to put what has to be copied; None: on its device.
    """
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and is_shell(value):
            for name in value.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
                inner: Tensor = getattr(value, name)
                found[f"{key}:{name}"] = inner.view(torch.uint8) if name == _CODES else inner
        else:
            found[key] = value
    for stem, inside in _inside(found).items():
        if inside.keys() == {*_HALVES}:
            halves = [found.pop(f"{stem}:{name}") for name in _HALVES]
            found[stem] = torch.stack(halves, out=_home(halves[0], (2, *halves[0].shape), empty))
        elif _has_4_bits(inside) and inside[_CODES].shape == torch.Size(shape):
            flat = inside[_CODES].reshape(-1)
            home = _home(flat, (flat.numel() // 2,), empty)
            found[f"{stem}:{_CODES}"] = torch.bitwise_or(flat[::2] << 4, flat[1::2], out=home)
    return found


def composed(parts: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
    """The states of one parameter as its optimizer takes them, over the same memory.

    Args:
        parts: From `parts_of`.
        shape: Of the parameter.
        dtype: Of the parameter.

    Raises:
        PlanError: They are torchao's, which cannot be imported.
    """
    inside = {stem: of for stem, of in _inside(parts).items() if {_CODES, _SCALE} <= of.keys() <= _OF_SHELL}
    found = {key: value for key, value in parts.items() if key.rpartition(":")[0] not in inside}
    for stem, of in inside.items():
        found[stem] = _shell(stem, of, shape, dtype)
    return found


def spread(parts: Mapping[str, Any], shape: Sequence[int]) -> dict[str, Any]:
    """The states of one parameter as checkpoints hold them.

    Args:
        parts: From `parts_of`, or some of these.
        shape: Of the parameter.
    """
    found: dict[str, Any] = {}
    for key, value in parts.items():
        if not isinstance(value, Tensor):
            found[key] = value
        elif key.endswith(f":{_CODES}") and 2 * value.numel() == torch.Size(shape).numel():
            found[key] = torch.stack([value >> 4, value & 15], dim=-1).view(torch.Size(shape))
        elif tuple(value.shape) == (2, *shape):
            found |= {f"{key}:{name}": half for name, half in zip(_HALVES, value, strict=True)}
        else:
            found[key] = value
    return found


def composed_again(saved: Mapping[str, Any], empty: Empty | None = None) -> dict[str, Any]:
    """As the optimizer takes them, from what `spread` has made.

    Args:
        saved: Of one parameter.
        empty: As of `parts_of`.

    Raises:
        PlanError: They are torchao's, which cannot be imported.
    """
    found = dict(saved)
    for stem, inside in _inside(saved).items():
        large = inside.get(_CODES, inside.get(_HALVES[0]))
        if isinstance(large, Tensor):
            of_stem = {f"{stem}:{name}": found.pop(f"{stem}:{name}") for name in inside}
            found |= composed(parts_of(of_stem, large.shape, empty), large.shape, torch.float32)
    return found


def _home(like: Tensor, shape: tuple[int, ...], empty: Empty | None) -> Tensor:
    return like.new_empty(shape) if empty is None else empty(torch.Size(shape).numel(), like.dtype).view(shape)


def _inside(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each state that is in several entries, these by what follows its name."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        stem, _, name = key.rpartition(":")
        if stem:
            found.setdefault(stem, {})[name] = value
    return found


def _has_4_bits(inside: Mapping[str, Any]) -> bool:
    return inside.keys() == _OF_SHELL and inside[_TABLE].numel() == _NUM_CODES_IN_4_BITS


def _shell(key: str, inside: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    codes, scale = inside[_CODES].contiguous(), inside[_SCALE]  # blocks are those of the shape, not of memory
    is_signed = key == _SIGNED
    if _TABLE not in inside:
        made = _class_of_torchao("fp8", "Fp8")(codes.view(torch.float8_e4m3fn), scale)
    elif _has_4_bits(inside):
        made = _class_of_torchao("4bit", "4bit")(codes, scale, inside[_TABLE], is_signed, torch.Size(shape))
    else:
        made = _class_of_torchao("8bit", "8bit")(codes, scale, inside[_TABLE], is_signed)
    # What dtype it shows has no effect but a compilation more, and before torchao 0.16 it is always fp32.
    result: Tensor = made if made.dtype == dtype else made.to(dtype)
    return result


def _class_of_torchao(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"torchao.optim.subclass_{module}"), f"OptimState{name}")
    except ImportError as error:
        raise PlanError(
            f"these optimizer states are torchao's, which cannot be imported ({error}): install the torchao that"
            " trained with them"
        ) from error
