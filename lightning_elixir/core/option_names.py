"""Options whose names do not exist, told in terms of what there is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Concatenate, ParamSpec, TypeVar

from lightning_elixir.errors import OptionError

S = TypeVar("S")
P = ParamSpec("P")


def checks_option_names(init: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """For an `__init__` whose keyword arguments are options: it raises `OptionError` for others, with the nearest name.

    Subclasses may pass theirs on (`**options`): what their own `__init__` takes is among the names that are proposed,
    and its class is the one that the message names. Names in `options_elsewhere`, where its class has that, are
    options of what the values there say.
    """
    signature = inspect.signature(init)

    @functools.wraps(init)
    def checked(self: S, /, *args: P.args, **options: P.kwargs) -> None:
        unknown = [name for name in options if name not in signature.parameters]
        if unknown:
            raise OptionError(_message(type(self), unknown[0], [*signature.parameters][1:]))
        init(self, *args, **options)

    return checked


def _message(kind: type[Any], unknown: str, names: list[str]) -> str:
    elsewhere: Mapping[str, str] = getattr(kind, "options_elsewhere", {})
    if unknown in elsewhere:
        return f"{kind.__name__} has no option {unknown!r}: it is one of {elsewhere[unknown]}"
    own = inspect.signature(kind.__init__).parameters.values()
    named = [p.name for p in own if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    known = list(dict.fromkeys([*names, *named]))
    # What an option begins with is nearer to it than any other of about that length.
    near = [name for name in known if name.startswith(f"{unknown}_")] or get_close_matches(unknown, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f": help({kind.__name__}) has them all"
    return f"{kind.__name__} has no option {unknown!r}{hint}"
