"""What users name with globs, classes and predicates: the values of an option such as `keep_fp32`. Names only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from lightning_elixir.errors import PlanError

Entry = str | type | Callable[[str, Any], bool]
"""A glob over names of parameters and modules, a class of modules, or a predicate over (name, module)."""

_GLOB_CHARACTERS = frozenset("*?[")
_MOST_SHOWN = 3


def entries_of(option: str, value: object) -> tuple[Entry, ...]:
    """What was given, one by one.

    Args:
        option: Its name, for the message.
        value: One entry, or a list, a tuple or a set of them.

    Raises:
        PlanError: Something else is among them.
    """
    entries = tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else (value,)
    for entry in entries:
        if not (isinstance(entry, type) or callable(entry) or (isinstance(entry, str) and entry)):
            raise PlanError(
                f"{option} takes names of parameters or modules (globs, such as '*.head'), classes of modules, a"
                f" function (name, module) -> bool, or a list of these, got {entry!r:.60}"
            )
    return entries


def matching(glob: str, names: Collection[str]) -> list[str]:
    """Those of the names that a glob means; `*` and `?` stand for dots as well."""
    if glob in names:
        return [glob]
    if _GLOB_CHARACTERS.isdisjoint(glob):
        return []
    return [name for name in names if fnmatchcase(name, glob)]


def near_misses(glob: str, names: Iterable[str]) -> list[str]:
    """Names that may have been meant by a glob that means none."""
    known = sorted({name for name in names if name})
    wanted = glob.strip("*.?")
    ends = [name for name in known if name.endswith(f".{wanted}") or wanted.endswith(f".{name}")]
    # Names that are close as a whole, or whose last part is.
    last = {name.rpartition(".")[2]: name for name in reversed(known)}
    close = get_close_matches(wanted, known, _MOST_SHOWN)
    close += [last[part] for part in get_close_matches(wanted.rpartition(".")[2], list(last), _MOST_SHOWN)]
    return list(dict.fromkeys([*sorted(ends, key=len), *close]))[:_MOST_SHOWN]
