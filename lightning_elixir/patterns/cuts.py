"""Parameters of which each rank has a part: what the parameter itself knows of that.

A pattern puts the part in the place of the whole parameter before there is an engine (`patterns/apply.py`). How it was
cut, and on the first rank the whole values, stay with the new parameter as attributes, as the source of a parameter
without values does (`runtime/sources.py`): between a pattern and an engine users, planning and precision take modules
apart, and of all that only the parameter stays the same.
"""

from __future__ import annotations

from torch import Tensor, nn

from lightning_elixir.plan.mesh import AxisCut

_CUTS = "_elixir_cuts"
_WHOLE = "_elixir_whole"


def set_cuts(part: nn.Parameter, cuts: tuple[AxisCut, ...], whole: nn.Parameter) -> None:
    """Say that this is a part.

    Args:
        part: In the shape of the part; on `meta`.
        cuts: How the whole is cut.
        whole: What it is a part of; on `meta` where another rank has the values.
    """
    vars(part)[_CUTS] = cuts
    vars(part)[_WHOLE] = whole


def cuts_of(parameter: Tensor) -> tuple[AxisCut, ...]:
    """How the parameter is cut; empty: it is whole."""
    cuts: tuple[AxisCut, ...] = vars(parameter).get(_CUTS, ())
    return cuts


def whole_of(parameter: Tensor) -> nn.Parameter | None:
    """What this is a part of, as long as it waits for an engine."""
    whole: nn.Parameter | None = vars(parameter).get(_WHOLE)
    return whole


def forget_whole(parameter: Tensor) -> None:
    """The values are elsewhere from now on."""
    vars(parameter).pop(_WHOLE, None)
