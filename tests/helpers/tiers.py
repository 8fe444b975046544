"""Cases in two tiers: the telling ones in the default tier, all of them in the full one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def crossed(*, together: int | None = None, told: Iterable[str] = (), **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over all combinations. Those that the default tier can do without carry the mark `full`: of
    two axes the others have each value once, of three each pair of values, and so on.

    Args:
        together: Of how many axes the default tier has every group of values; all but one unless told. 1: each value
            of each axis once.
        told: Ids of the cases that the default tier has instead, as of `telling`.
        axes: Argument name -> its values; of a mapping, its keys. Values whose text is long come in `pytest.param`,
            with an id.

    Raises:
        ValueError: `told` has what is no id.
    """
    named = [[value if isinstance(value, ParameterSet) else _param(value) for value in axis] for axis in axes.values()]
    cases = list(itertools.product(*named))
    names = [tuple(str(value.id) for value in case) for case in cases]
    if not (kept := set(told)):
        kept = {"-".join(names[index]) for index in _covering(names, together or len(named) - 1)}
    parameters = [
        pytest.param(*(value.values[0] for value in case), id="-".join(name))
        for case, name in zip(cases, names, strict=True)
    ]
    return pytest.mark.parametrize(tuple(axes), telling(parameters, *kept))


def telling(values: Iterable[Any], *names: str) -> list[ParameterSet]:
    """Values for `parametrize`, of which the default tier has those with these names, and the full one all.

    Args:
        values: As an axis of `crossed`.
        names: Ids of those that find most; in pairs, say, what another test finds as well is none of them.

    Raises:
        ValueError: A name is none of the ids.
    """
    parameters = [value if isinstance(value, ParameterSet) else _param(value) for value in values]
    if unknown := set(names) - {parameter.id for parameter in parameters}:
        raise ValueError(f"no such case: {', '.join(sorted(unknown))}")
    return [
        pytest.param(*p.values, id=p.id, marks=p.marks if p.id in names else (*p.marks, pytest.mark.full))
        for p in parameters
    ]


def full(*values: Any) -> ParameterSet:
    """A case of `parametrize` that only the full tier has."""
    return pytest.param(*values, marks=pytest.mark.full)


def _param(value: Any) -> ParameterSet:
    name = getattr(value, "__name__", None)
    return pytest.param(value, id=name if isinstance(name, str) else str(value))


def _covering(cases: Sequence[tuple[str, ...]], together: int) -> set[int]:
    """Indices of cases that hold every group of so many values which any case holds: each time the case with the most
    new ones, the first of equals."""
    groups = [set(itertools.combinations(enumerate(case), together)) for case in cases]
    missing, kept = set[Any]().union(*groups), set[int]()
    while missing:
        index = max(range(len(cases)), key=lambda i: len(groups[i] & missing))
        missing -= groups[index]
        kept.add(index)
    return kept
