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


def set_cuts(parameter: nn.Parameter, cuts: tuple[AxisCut, ...], whole: Tensor | None) -> None:
    """Say that this is a part.

    Args:
        parameter: In the shape of the part; on `meta`.
        cuts: How the whole is cut.
        whole: The values of the whole; None: another rank has them.
    """
    vars(parameter)[_CUTS] = cuts
    if whole is not None:
        vars(parameter)[_WHOLE] = whole


def cuts_of(parameter: Tensor) -> tuple[AxisCut, ...]:
    """How the parameter is cut; empty: it is whole."""
    cuts: tuple[AxisCut, ...] = vars(parameter).get(_CUTS, ())
    return cuts


def whole_of(parameter: Tensor) -> Tensor | None:
    """The values of the whole, of which this is a part, where they wait for an engine on this rank."""
    whole: Tensor | None = vars(parameter).get(_WHOLE)
    return whole


def forget_whole(parameter: Tensor) -> None:
    """The values are elsewhere from now on."""
    vars(parameter).pop(_WHOLE, None)
