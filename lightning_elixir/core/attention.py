"""Operators of fused attention, whose results cost much computing for each byte of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_NAMES = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_flash_attention_for_cpu",
)


def _place(operator: Any) -> int:
    return next(i for i, argument in enumerate(operator._schema.arguments) if argument.name == "dropout_p")


_PLACES = {op: _place(op) for op in (getattr(torch.ops.aten, name).default for name in _NAMES)}

OPERATORS = frozenset((*_PLACES, *(op.overloadpacket for op in _PLACES)))
"""As they may be called in Python."""


def is_attention(operator: Any) -> bool:
    """Whether this is the forward of one of them.

    Args:
        operator: An overload.
    """
    return operator in _PLACES


def can_stand_in(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether results of this call may stand for computing them again. Not with dropout: what comes after it would draw
    other random numbers.

    Args:
        operator: `is_attention`.
        args: Its positional operands.
        kwargs: Its others.
    """
    place = _PLACES[operator]
    return not (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))
