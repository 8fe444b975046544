"""Parameters without values that know where their values are.

Such a parameter is on `meta`, and has its source as an attribute: users take models apart, keep parts and wrap them
before an engine comes, and of all that only the parameter itself stays the same. The engine puts a parameter with
values in its place, which has no such attribute.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

_ATTRIBUTE = "_elixir_source"


@runtime_checkable
class Source(Protocol):
    """Where the values of one parameter are."""

    def read_run(self, stride: tuple[int, ...] | None, begin: int, target: Tensor, dtype: torch.dtype) -> None:
        """Fill a run of the parameter's elements, in memory order.

        Args:
            stride: The memory order, without gaps; None: contiguous.
            begin: First element of the run.
            target: 1-D, in host memory, any floating dtype.
            dtype: Of the parameter: values are cast to it on the way.

        Raises:
            StorageError: They cannot be read.
        """

    def part(self, shape: tuple[int, ...], offsets: tuple[int, ...]) -> Source:
        """Where the values of a part of the parameter are.

        Args:
            shape: Of the part.
            offsets: Where it begins in the parameter, along each dimension.
        """


def set_source(parameter: nn.Parameter, source: Source) -> None:
    """Say where the values of a `meta` parameter are."""
    vars(parameter)[_ATTRIBUTE] = source


def source_of(parameter: Tensor) -> Source | None:
    """Where the values of a parameter are; None: in the parameter, or nowhere."""
    source = vars(parameter).get(_ATTRIBUTE) if parameter.is_meta else None
    return source if isinstance(source, Source) else None


def forget_source(parameter: nn.Parameter) -> None:
    """Its values are elsewhere from now on."""
    vars(parameter).pop(_ATTRIBUTE, None)
