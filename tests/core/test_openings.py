"""Groups of ranks that are opened a second time, after the first try has failed."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from lightning_elixir.core.waits import Call, line_of_process
from lightning_elixir.errors import DivergenceError
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import full

LATE_S = 4.0
"""Longer than it takes a rank to look whether it waits in vain."""


def _after(seconds: float, call: Any, *args: Any) -> None:
    threading.Timer(seconds, call, args).start()


def _open_twice(first_try_of: str) -> bool:
    """With another rank that is not there the first time, and late the second time. What was found out of the first try
    stays in the store.

    Args:
        first_try_of: Which rank waited then: this one, or the other one, which tries again.
    """
    line = line_of_process()
    attempts = {"0": 1} if first_try_of == "this rank" else {"1": 1}
    told = {"of": [["open/groups", 1, attempts]], "text": "they wait for each other", "barriers": []}
    _after(0.3, line._set, "verdict/0", json.dumps(told))
    with (
        pytest.raises(DivergenceError, match="they wait for each other"),
        line.opening("groups", (0, 1), Call("a call")),
    ):
        pass
    if first_try_of == "the other rank":
        line._set("open/groups/1", "0 2")
    _after(LATE_S, line._set, "open/groups/1", "1 2")
    with line.opening("groups", (0, 1), Call("a call")):
        return True


@pytest.mark.parametrize("first_try_of", ["this rank", full("the other rank")])
@pytest.mark.full
def test_what_was_found_out_of_a_first_try_says_nothing_of_the_second(first_try_of: str) -> None:
    assert run_ranks(_open_twice, 1, first_try_of, timeout_s=40.0) == [True]
