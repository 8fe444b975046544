"""Some random programs, always the same; `python -m tests.fuzz --seconds 3600 --first-seed 1000` runs others."""

from __future__ import annotations

import pytest

from tests.fuzz.campaign import Summary, campaign, run_apart, shrink
from tests.fuzz.programs import Action, Draw, Layer, Program, generate, kinds_in, parse, simpler

NUM_PROGRAMS = 12


def _run(first_seed: int, draw: Draw, count: int = NUM_PROGRAMS) -> Summary:
    summary = campaign(range(first_seed, first_seed + count), draw)
    assert not summary.findings, summary.text()
    assert summary.verdicts["equal"] > count / 2, summary.text()
    return summary


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(0, 72, NUM_PROGRAMS))
def test_programs(first_seed: int) -> None:
    summary = _run(first_seed, Draw(flags=frozenset({"module"})))
    assert summary.counters["evictions"] > 100


@pytest.mark.slow
def test_programs_through_the_trainer() -> None:
    summary = _run(200, Draw(flags=frozenset({"trainer"})))
    assert summary.counters["evictions"] > 100


@pytest.mark.slow
def test_programs_on_two_ranks() -> None:
    summary = _run(300, Draw(ranks=(2,)), 8)
    assert summary.counters["evictions"] > 100


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(400, 400 + 4 * NUM_PROGRAMS, NUM_PROGRAMS))
def test_programs_on_a_gpu(first_seed: int) -> None:
    summary = campaign(range(first_seed, first_seed + NUM_PROGRAMS), Draw(device="cuda"))
    assert not summary.findings, summary.text()
    assert summary.counters["evictions"] > 100


def test_programs_are_the_same_for_a_seed_and_can_be_read_back() -> None:
    for seed in range(50):
        program = generate(seed)
        assert program == generate(seed)
        assert parse(repr(program)) == program
        assert all(other != program for other in simpler(program))


def test_what_goes_wrong_is_found_and_made_simpler() -> None:
    """The engine has no reader of `p.grad` that is told more than plain PyTorch has: a program with two faults of
    which one is refused ends as the one with nothing else."""
    layers = (Layer("mlp"), Layer("residual", (Layer("linear"), Layer("attention"))))
    actions = (Action(0, "read"), Action(0, "write_between", 3), Action(1, "evaluate"))
    plan = (("chunk_size", 8192), ("placement_policy", "cpu"))
    program = Program(1, layers, steps=2, optimizer="adamw", actions=actions, plan=plan)
    outcome = run_apart(program)
    assert outcome.verdict == "refused"
    found, again = shrink(program, outcome, 30.0)
    assert again.verdict == "refused"
    assert [a.name for a in found.actions] == ["write_between"]
    assert kinds_in(found.layers) <= {"linear"}
