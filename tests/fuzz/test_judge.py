"""What is chaos, and what is a fault: by runs of plain PyTorch that are nudged, in the place of the engine's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fuzz.backends import Plain
from tests.fuzz.play import Player
from tests.fuzz.programs import Layer, Program
from tests.fuzz.run import Outcome, judge, run_plain, settle, surroundings

# Which row of a table an input takes is a matter of its last bits.
LAYERS = tuple(Layer(kind) for kind in ("linear", "lookup", "mlp", "lookup", "linear"))
OPTIONS = {True: (("autocast", False),), False: (("autocast", False), ("master_weights", False))}


class Nudged(Plain):
    """One element of a parameter rounds the other way in the first step."""

    def step(self) -> None:
        super().step()
        if self.model.clock.step == 0:
            with torch.no_grad():
                self.named["body.layers.1.layer.weight"].view(-1)[3] *= 1.01


class NudgedAndWrong(Nudged):
    """Its gradients are eight times too large as well, in the last step."""

    def grads(self) -> dict[str, Tensor]:
        factor = 8.0 if self.model.clock.step == 2 else 1.0
        return {name: grad * factor for name, grad in super().grads().items()}


class Wrong(Plain):
    """Nothing but wrong, from the first note on that shows it."""

    def grads(self) -> dict[str, Tensor]:
        return {name: grad * 1.5 for name, grad in super().grads().items()}


def _program(*, has_masters: bool = False, layers: tuple[Layer, ...] = LAYERS) -> Program:
    return Program(5, layers, width=16, records_grads=True, dtype="bfloat16", options=OPTIONS[has_masters])


def _judged(program: Program, kind: Callable[[Program, int], Plain]) -> Outcome:
    expected, outcome = run_plain(program), Outcome(program.seed)
    assert not isinstance(expected, Outcome)
    with surroundings():
        found = Player(program, kind(program, 0)).run()
    judge(program, outcome, expected, found)
    return outcome


def _settled(program: Program, outcome: Outcome) -> Outcome:
    def run(call: Callable[..., dict[str, float]], *given: Any) -> list[dict[str, float]]:
        return [call(*given)]

    settle(program, [outcome], run)
    return outcome


def test_a_run_that_is_as_far_from_plain_pytorch_as_that_is_from_itself_is_chaotic() -> None:
    outcome = _judged(_program(), Nudged)
    assert outcome.verdict == "different"
    assert outcome.doubt is not None
    assert _settled(_program(), outcome).verdict == "chaotic"
    assert outcome.doubt is None


def test_a_run_that_is_much_farther_is_different() -> None:
    outcome = _judged(_program(), NudgedAndWrong)
    assert outcome.doubt is not None
    assert _settled(_program(), outcome).verdict == "different"


def test_what_is_wrong_at_first_sight_is_in_no_doubt() -> None:
    outcome = _judged(_program(), Wrong)
    assert outcome.verdict == "different"
    assert outcome.doubt is None
    assert _settled(_program(), outcome).verdict == "different"


def test_one_rank_that_is_in_no_doubt_decides_for_all() -> None:
    chaotic, wrong = _judged(_program(), Nudged), _judged(_program(), Wrong)

    def run(call: Callable[..., dict[str, float]], *given: Any) -> list[dict[str, float]]:
        return [call(*given), {}]

    settle(_program(), [chaotic, wrong], run)
    assert (chaotic.verdict, wrong.verdict) == ("different", "different")


@pytest.mark.parametrize("has_masters", [True, False])
@pytest.mark.parametrize("jitter", [1, 4])
def test_a_jitter_shows_in_the_dtype_that_is_computed_in_and_by_itself_is_close(has_masters: bool, jitter: int) -> None:
    """So that what it does not blow up excuses nothing."""
    program = _program(has_masters=has_masters, layers=(Layer("linear"), Layer("mlp")))
    plain, other = Plain(program, 0), Plain(program, 0, jitter=jitter)
    moved = [float((p != other.named[name]).float().mean()) for name, p in plain.named.items() if p.dim() == 2]
    assert all(0.04 < share < 0.25 for share in moved)
    outcome = _judged(program, lambda program, rank: Plain(program, rank, jitter=jitter))
    assert outcome.verdict == "close"
