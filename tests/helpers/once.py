"""`computed_once`: what tests compare with, where many of them compare with the same."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def computed_once(function: Callable[P, R]) -> Callable[P, R]:
    """Compute the result for equal arguments, which must be hashable, once in this process. Every caller gets a copy of
    its own. For what depends on its arguments alone."""
    kept = functools.cache(function)

    @functools.wraps(function)
    def copied(*args: P.args, **options: P.kwargs) -> R:
        return copy.deepcopy(kept(*args, **options))  # type: ignore[arg-type]

    return copied
