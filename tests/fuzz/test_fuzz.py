"""Some random programs, always the same; `python -m tests.fuzz --seconds 3600 --first-seed 1000` runs others."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.strategy.config import PolicyName, TimingName
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.fuzz.backends import Engine, Plain
from tests.fuzz.campaign import Summary, campaign, run_apart, shrink
from tests.fuzz.interrupts import interrupted
from tests.fuzz.like_a_gpu import watched
from tests.fuzz.mixes import draw as draw_mix
from tests.fuzz.mixes import fit_mix, fit_without
from tests.fuzz.options import NOT_DRAWN, given_options
from tests.fuzz.play import Player
from tests.fuzz.programs import (
    AFTER_FORWARD,
    BEFORE_STEP,
    BETWEEN_STEPS,
    FAULTS,
    NOT_IN_TRAINER,
    P_GRAD,
    Action,
    Draw,
    Layer,
    Program,
    Through,
    generate,
    parse,
    simpler,
)
from tests.fuzz.run import run_program
from tests.fuzz.scale import Scale
from tests.helpers.dist import run_ranks
from tests.helpers.patterns import difference
from tests.helpers.tiers import full, telling

NUM_PROGRAMS = 12
CHEAP_MIXES = (5,)
CLASSES: tuple[Any, ...] = (ElixirStrategy, ElixirModule, ElixirOptimizer)
THROUGH: tuple[Through, ...] = ("module", "trainer")
PLAN = (("chunk_size", 8192), ("placement_policy", "cpu"))


def _run(first_seed: int, draw: Draw, count: int = NUM_PROGRAMS) -> Summary:
    summary = campaign(range(first_seed, first_seed + count), draw)
    assert not summary.findings, summary.text()
    assert summary.verdicts["equal"] > count / 2, summary.text()
    return summary


@pytest.mark.full
@pytest.mark.parametrize("first_seed", range(0, 60, NUM_PROGRAMS))
def test_programs(first_seed: int) -> None:
    summary = _run(first_seed, Draw(through="module"))
    assert summary.counters["evictions"] > 100


@pytest.mark.full
def test_programs_through_the_trainer() -> None:
    summary = _run(200, Draw(through="trainer"), 8)
    assert summary.counters["evictions"] > 100


@pytest.mark.full
@pytest.mark.parametrize("through", THROUGH)
def test_programs_in_fp16(through: Through) -> None:
    summary = _run(40100, Draw(through=through, dtype="float16"))
    assert summary.counters["skipped steps"] > 0


@pytest.mark.parametrize(
    "name", telling(["torch_clip_value", "nan_guard", "drop_gradients"], "nan_guard", "drop_gradients")
)
def test_a_hook_that_takes_an_overflow_away_keeps_no_step_from_being_skipped(name: str) -> None:
    actions = (Action(0, name), Action(1, name, 1))
    options = (("autocast", True), ("initial_scale", 2.0**19))
    layers = (Layer("linear"), Layer("mlp"))
    program = Program(
        3, layers, loss="square", actions=actions, through="trainer", dtype="float16", plan=PLAN, options=options
    )
    outcome = run_program(program)
    assert outcome.verdict == "equal", outcome.detail
    assert outcome.counters["skipped steps"] > 0


@pytest.mark.full
def test_programs_on_two_ranks() -> None:
    summary = _run(300, Draw(ranks=(2,)), 6)
    assert summary.counters["evictions"] > 100


@pytest.mark.full
def test_programs_with_ctrl_c_at_random_moments() -> None:
    summary = campaign(range(500, 512), Draw(), are_interrupted=True)
    assert not summary.findings, summary.text()
    assert summary.counters["interrupts"] > 12


@pytest.mark.full
def test_programs_that_end_at_random_moments_and_go_on() -> None:
    summary = campaign(range(600, 603), Draw((1, 2), through="trainer"), are_restarted=True)
    assert not summary.findings, summary.text()


@pytest.mark.parametrize(("first_seed", "count"), [full(9100214, 1), (9100665, 1), full(700, 30), full(900, 30)])
def test_programs_with_the_threads_of_a_gpu(first_seed: int, count: int) -> None:
    """Beside a thread that reads all the time; the first two are ones in which a GPU showed what was wrong."""
    draw = Draw(device="cuda" if count == 1 else "cpu")  # on which what is drawn depends
    summary = campaign(range(first_seed, first_seed + count), draw, are_like_a_gpu=True)
    assert not summary.findings, summary.text()
    assert summary.counters["refused reads by threads"] > 0


@pytest.mark.parametrize(("seed", "changed"), [(12, watched), full(12, interrupted), full(43, watched)])
def test_programs_of_two_ranks_that_run_on_one(seed: int, changed: Callable[[Program], Program]) -> None:
    """Where there is no process group to give."""
    program = generate(seed, Draw(ranks=(2,)))
    assert program.option("process_group")
    outcome = run_apart(changed(program), is_interrupted=changed is interrupted, is_like_a_gpu=changed is watched)
    assert not outcome.is_finding, outcome.detail


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # Lightning's advice
@pytest.mark.parametrize("seed", [*CHEAP_MIXES, *(full(seed) for seed in range(100, 124))])
def test_mixes_of_patterns_sharding_and_placements(seed: int) -> None:
    mix = draw_mix(seed, 2 if seed in CHEAP_MIXES else 4)
    expected = fit_without(mix)
    for state in run_ranks(fit_mix, mix.ranks, mix, init_group=False):
        assert difference(state, expected) < 2e-5, mix


def test_what_is_simpler_on_one_rank_has_no_process_group() -> None:
    program = generate(0, Draw(ranks=(2,)))
    assert program.option("process_group")
    assert not any(p.option("process_group") for p in simpler(program) if p.ranks == 1)


@pytest.mark.gpu
@pytest.mark.full
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


def test_fp16_is_drawn_as_often_as_bf16() -> None:
    counts = Counter(generate(seed).dtype for seed in range(1500))
    assert 0.7 < counts["float16"] / counts["bfloat16"] < 1.4
    scales = {generate(seed, Draw(dtype="float16")).option("initial_scale") for seed in range(100)}
    assert {1.0, 2.0**24} < scales


@pytest.mark.parametrize("interval", [1, 2, 2000])
def test_the_scale_of_the_oracle_is_that_of_a_grad_scaler(interval: int) -> None:
    options = (("backoff_factor", 0.75), ("growth_factor", 1.5), ("growth_interval", interval), ("initial_scale", 3.0))
    ours = Scale(Program(0, (), dtype="float16", options=options))
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=3.0, growth_factor=1.5, backoff_factor=0.75, growth_interval=interval
    )
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    parameter = optimizer.param_groups[0]["params"][0]
    for is_overflow in (False, True, True, False, False, False, True, False):
        theirs.scale(torch.zeros(()))
        parameter.grad = torch.full((1,), math.inf if is_overflow else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(is_overflow=is_overflow)
        assert ours.value == theirs.get_scale()


def test_the_scale_of_the_oracle_stays_in_its_bounds_and_has_patience() -> None:
    options = (
        ("hysteresis", 2),
        ("growth_interval", 1),
        ("max_scale", 8.0),
        ("min_scale", 1.0),
        ("initial_scale", 4.0),
    )
    scale = Scale(Program(0, (), dtype="float16", options=options))
    found = []
    for is_overflow in (False, False, True, True, True, True, True, False, True, True):
        scale.update(is_overflow=is_overflow)
        found.append(scale.value)
    assert found == [8.0, 8.0, 8.0, 4.0, 2.0, 1.0, 1.0, 2.0, 2.0, 1.0]


class _Step(nn.Module):
    """A training step as the forward of one module, which is what Lightning gives to DDP."""

    def __init__(self, player: Player) -> None:
        super().__init__()
        self.model, self._player = player.backend.model, player

    def forward(self, step: int) -> Tensor:
        loss = self._player.training_loss(step, 0)
        return self._player.after_forward(step, 0, loss)


class _OfDDP(Plain):
    """Leaves to DDP what is shared."""

    def before_forward(self) -> None:
        pass


def _states_by_oracle_and_ddp(action: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    actions = tuple(Action(step, action) for step in (0, 2))
    program = Program(5, (Layer("linear"), Layer("batch_norm")), steps=4, actions=actions, ranks=2, through="trainer")
    rank = torch.distributed.get_rank()
    oracle, other = Plain(program, rank), _OfDDP(program, rank)
    Player(program, oracle).run()
    step = DistributedDataParallel(_Step(Player(program, other)))
    for number in range(program.steps):
        step(number).backward()
        other.optimizer.step()
        other.optimizer.zero_grad()
    return oracle.state(), other.state()


@pytest.mark.parametrize("action", ["evaluate_between", "twice_forward"])
def test_the_oracle_of_a_trainer_shares_running_statistics_when_ddp_does(action: str) -> None:
    states = run_ranks(_states_by_oracle_and_ddp, 2, action)
    for oracle, ddp in states:
        assert oracle.keys() == ddp.keys()
        for name, value in oracle.items():
            torch.testing.assert_close(value, ddp[name], msg=name)
    mean = "body.layers.1.layer.running_mean"
    assert not torch.equal(states[0][0][mean], states[1][0][mean])  # since the last step began


def _drawn() -> dict[str, dict[str, set[str]]]:
    """By class and option, the values that programs pass beside the default."""
    drawn: dict[str, dict[str, set[str]]] = {cls.__name__: {} for cls in CLASSES}
    for seed in range(1500):
        for through in THROUGH:
            for name, options in given_options(generate(seed, Draw((1, 2), through=through))).items():
                for option, value in options.items():
                    drawn[name].setdefault(option, set()).add(repr(value))
    return drawn


def test_every_option_is_drawn_or_named_as_not_drawn() -> None:
    drawn = _drawn()
    for cls in CLASSES:
        parameters = [p for p in inspect.signature(cls).parameters.values() if p.name != "self"]
        given, named = drawn[cls.__name__], NOT_DRAWN[cls.__name__]
        varied = {p.name for p in parameters if given.get(p.name, set()) - {repr(p.default)}}
        assert varied | {*named} == {p.name for p in parameters}, f"{cls.__name__}: neither drawn nor in NOT_DRAWN"
        assert not varied & {*named}, f"{cls.__name__}: drawn, and in NOT_DRAWN"
    for option, values in (("placement_policy", PolicyName), ("update_timing", TimingName)):
        assert drawn["ElixirStrategy"][option] == {repr(value) for value in get_args(values)}


def test_every_action_is_drawn() -> None:
    pools = {*BETWEEN_STEPS, *BEFORE_STEP, *AFTER_FORWARD, *FAULTS, *P_GRAD}
    found: dict[Through, set[str]] = {through: set() for through in THROUGH}
    for seed in range(1500):
        for through, names in found.items():
            names |= {a.name for a in generate(seed, Draw(through=through)).actions}
    assert found == {"module": pools, "trainer": pools - {*NOT_IN_TRAINER}}


@pytest.mark.full
def test_what_goes_wrong_is_found_and_made_simpler(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an engine that moves nothing but loses the gradient of one parameter in every step."""
    monkeypatch.setattr(Engine, "step", _step_that_forgets)
    layers = (Layer("mlp"), Layer("residual", (Layer("linear"), Layer("product"), Layer("attention"))))
    actions = (Action(0, "read"), Action(1, "evaluate"))
    program = Program(1, layers, optimizer="momentum", schedule="step", actions=actions, plan=PLAN)
    outcome = run_program(program)
    assert outcome.verdict == "different", outcome.detail
    found, again = shrink(program, outcome, 240.0, run=run_program)
    assert again.verdict == "different"
    assert found == Program(1, (Layer("product"),), steps=1, plan=PLAN)


def _step_that_forgets(self: Engine) -> None:
    for name in self.named:
        if name.endswith("scale"):
            self.drop_gradient(name)
    self.optimizer.step()
