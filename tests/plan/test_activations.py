"""What becomes of activations, as plans see it: values, a step with other fates, and the way to the best."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import nn

from lightning_elixir import profile_memory
from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.activations import (
    ActivationMoves,
    ActivationRequest,
    Fate,
    ModelBlock,
    blocks_by_fate,
    describe_activations,
)
from lightning_elixir.plan.fates import with_fates
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.io import plan_from_dict, plan_to_dict
from lightning_elixir.plan.memory import Budget
from lightning_elixir.plan.placing.mixes import Mix, best_mix
from lightning_elixir.plan.problem import PlacementRequest
from lightning_elixir.plan.profile import AttentionCall, BlockVisit, MemoryProfile, Moment, ProfileInterval
from lightning_elixir.plan.types import Plan, UpdateTiming
from lightning_elixir.planning import TrainingRegime, make_plan, optimal_search, simple_search, timeline_of
from lightning_elixir.profiling.blocks import found_blocks
from tests.helpers.tiers import telling
from tests.plan.problems import constant_hardware

KEEP, AGAIN, AWAY, AGAIN_AWAY, ATTENDING = Fate
MIB = 2**20


def test_options_become_requests() -> None:
    assert ActivationRequest.of(None).is_nothing
    assert ActivationRequest.of("auto") == ActivationRequest(is_searched=True)
    assert ActivationRequest.of("offload") == ActivationRequest(everywhere=AWAY)
    by_glob = ActivationRequest.of({"a.*": "keep", "*": "recompute"}).by_glob
    assert by_glob == (("a.*", KEEP), ("*", AGAIN))


def test_plans_in_files_say_what_becomes_of_activations() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3)))
    plan = make_plan(model, PlacementRequest("cpu", activations=ActivationRequest.of({"0": "keep", "2": "offload"})))
    assert plan.activations == (ModelBlock("0", KEEP), ModelBlock("2", AWAY))
    assert plan.activation_host_bytes is None
    assert plan_from_dict(plan_to_dict(plan)) == plan
    assert plan.fingerprint() != replace(plan, activations=()).fingerprint()
    assert plan.layout_fingerprint() == replace(plan, activations=()).layout_fingerprint()
    assert "activations: 1 kept on the GPU, 1 sent to host memory (of 2 blocks)" in plan.explain()
    content = plan_to_dict(replace(plan, activations=plan.activations * 2))
    with pytest.raises(PlanError, match="block 0 is there twice"):
        plan_from_dict(content)
    content = plan_to_dict(plan)
    content["activations"] = [{"name": "0", "fate": "burn"}]
    with pytest.raises(PlanError, match="block 0: fate must be one of keep, recompute, .*, keep_attention, got"):
        plan_from_dict(content)


def test_words_for_blocks() -> None:
    blocks = [ModelBlock(f"h.{i}", AGAIN if i < 3 else KEEP) for i in range(5)] + [ModelBlock("head", AGAIN)]
    assert describe_activations(blocks) == "2 kept on the GPU, 4 recomputed in backward (of 6 blocks)"
    assert blocks_by_fate(blocks) == [
        ("recomputed in backward", 4, "h.0 to 2, head"),
        ("kept on the GPU", 2, "h.3 to 4"),
    ]
    assert describe_activations(()) == ""


# A step by hand: two blocks of two intervals each, forward and backward


def _interval(activation_bytes: int, *, is_backward: bool, fqn: str, flops: int = 10) -> ProfileInterval:
    return ProfileInterval(
        (fqn,), True, (), fqn, is_backward, activation_bytes, 0, activation_bytes + 1000, flops, 0, 1, ()
    )


TIMELINE = (
    _interval(10, is_backward=False, fqn="in"),
    _interval(50, is_backward=False, fqn="a1"),
    _interval(110, is_backward=False, fqn="a2"),
    _interval(150, is_backward=False, fqn="b1"),
    _interval(210, is_backward=False, fqn="b2"),
    _interval(220, is_backward=False, fqn="out"),
    _interval(215, is_backward=True, fqn="b2"),
    _interval(160, is_backward=True, fqn="b1"),
    _interval(115, is_backward=True, fqn="a2"),
    _interval(60, is_backward=True, fqn="a1"),
)
VISITS = (
    BlockVisit("a", (1, 3), (8, 10), Moment(2, 6, 0, 1, 105), 10, 112, 90, 10, 100),
    BlockVisit("b", (3, 5), (6, 8), Moment(4, 6, 0, 1, 205), 110, 212, 90, 10, 100),
)
STEP = MemoryProfile("float32", 1000, 0, 0, 0, 220, 1220, "out", 100, TIMELINE, VISITS)


def _levels(profile: MemoryProfile) -> list[int]:
    return [interval.activation_bytes for interval in profile.timeline]


def _step(a: Fate, b: Fate) -> MemoryProfile:
    return with_fates(STEP, [ModelBlock("a", a), ModelBlock("b", b)])


def test_what_is_kept_stays_as_it_was() -> None:
    kept = _step(KEEP, KEEP)
    assert _levels(kept) == _levels(STEP)
    assert kept.offloaded_bytes == 0
    assert with_fates(replace(STEP, visits=()), [ModelBlock("a", AWAY)]).offloaded_bytes is None


def test_what_is_recomputed_is_missing_between() -> None:
    again = _step(AGAIN, KEEP)
    # Of a, 90 are missing from its end to its backward, before which its forward comes again: 112 are there with its
    # own 90, and so 22 without, to which its first interval adds 40, and its second 95 until all is saved.
    assert _levels(again) == [10, 50, 110, 60, 120, 130, 125, 70, 62, 117, 115, 60]
    copies = again.timeline[8:10]
    assert [(i.fqns, i.is_backward, i.flops) for i in copies] == [(("a1",), True, 10), (("a2",), True, 6)]
    assert again.flops == 116
    assert again.activation_bytes == 130
    assert again.timeline[10].held == ("a1", "a2")
    assert again.timeline[11].held == ("a1",)


def test_what_is_offloaded_goes_one_block_later_and_comes_one_block_earlier() -> None:
    away = _step(AWAY, AWAY)
    assert away.offloaded_bytes == 200
    # What a has sent is gone when b has ended, and is back when the backward of b begins; what b has sent never goes.
    assert _levels(away) == [10, 50, 110, 150, 210, 120, 215, 160, 115, 60]
    moves = {i: interval.moves for i, interval in enumerate(away.timeline) if interval.moves}
    assert moves == {
        2: ActivationMoves(out_bytes=100),
        4: ActivationMoves(out_bytes=100),
        6: ActivationMoves(in_bytes=100),
        8: ActivationMoves(is_awaited=True),
    }


def test_inputs_go_alone_where_the_rest_is_recomputed() -> None:
    both = _step(AGAIN_AWAY, AGAIN_AWAY)
    assert both.offloaded_bytes == 20
    assert _levels(both)[5] == 220 - 2 * 90 - 10
    assert both.flops == 132


def test_what_attention_gave_stays_and_is_not_computed_again() -> None:
    call = AttentionCall(1, 7, 30)
    timeline = tuple(replace(interval, num_ops=10) for interval in TIMELINE)
    step = replace(STEP, timeline=timeline, visits=(replace(VISITS[0], attention=(call,)), VISITS[1]))
    attending = with_fates(step, [ModelBlock("a", ATTENDING), ModelBlock("b", KEEP)])
    # Of a, 30 of 90 stay. Its second interval once more adds 95, of which these are there.
    assert _levels(attending) == [10, 50, 110, 90, 150, 160, 155, 100, 92, 117, 115, 60]
    copies = attending.timeline[8:10]
    assert [(i.fqns, i.flops, i.num_ops) for i in copies] == [(("a1",), 3, 14), (("a2",), 6, 1)]
    assert [i.num_ops for i in attending.timeline[:4]] == [10, 14, 14, 10]  # each call is looked at
    assert attending.flops == 116 - 7
    assert _levels(with_fates(step, [ModelBlock("a", AGAIN)])) == _levels(_step(AGAIN, KEEP))


# Times


def _plain_plan(model: nn.Module) -> Plan:
    return make_plan(model, PlacementRequest("cuda"))


@pytest.mark.parametrize("bytes_per_s", [1e3, 50.0, 25.0])
def test_copies_hide_behind_computing_as_far_as_the_bus_goes(bytes_per_s: float) -> None:
    names = ["in", "a1", "a2", "b1", "b2", "out"]
    model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in names})

    def named(interval: ProfileInterval) -> ProfileInterval:
        return replace(interval, fqns=tuple(f"{fqn}.weight" for fqn in interval.fqns))

    profile = replace(STEP, timeline=tuple(map(named, TIMELINE)))
    hardware = constant_hardware(
        matmul_flops_per_s={"float32": 10.0},
        launch_s=0.0,
        h2d=bytes_per_s,
        d2h=bytes_per_s,
        duplex_slowdown=1.0,
    )
    plan = replace(_plain_plan(model), activations=(ModelBlock("a", AWAY), ModelBlock("b", AWAY)))
    times = timeline_of(plan, profile, hardware, TrainingRegime()).times
    copy_s = 100 / bytes_per_s
    # Each interval takes a second. b waits at its end, after two seconds, for what a has sent; what comes back for a
    # has two seconds as well; the bus down is busy with what b has sent, and that up with nothing else.
    waits_s = 2 * max(0.0, copy_s - 2)
    assert times.compute_s == pytest.approx(10)
    assert times.waiting_s == pytest.approx(waits_s, abs=1e-3)


# The way to the best mix


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 8, 32])
def test_a_mix_gives_every_block_its_fate(num_blocks: int) -> None:
    names = [f"h.{i}" for i in range(num_blocks)]
    for recomputed, offloaded in itertools.product(range(num_blocks + 1), repeat=2):
        if recomputed + offloaded > num_blocks:
            continue
        blocks = Mix(recomputed, offloaded).blocks(names)
        fates = [block.fate for block in blocks]
        assert [block.name for block in blocks] == names
        assert (fates.count(AGAIN), fates.count(AWAY)) == (recomputed, offloaded)
        some = [block.fate for block in Mix(recomputed, offloaded, attending=recomputed // 2).blocks(names)]
        assert some.count(ATTENDING) == recomputed // 2
        assert some.count(AGAIN) + some.count(ATTENDING) == recomputed
        if num_blocks == 8 and (recomputed, offloaded) == (4, 2):
            assert fates[-1] is not AWAY
            assert max(len(list(run)) for _, run in itertools.groupby(fates)) <= 2


@pytest.mark.parametrize("has_attention", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_the_best_mix_is_found_on_smooth_ground(seed: int, has_attention: bool) -> None:
    """Against all mixes: recomputing costs time, offloading waits beyond what the bus hides, keeping takes room."""
    random = Random(seed)
    n = random.choice((2, 4, 12, 24, 32))
    again_s, bus_s, room = random.random(), 3 * random.random(), random.random() * n
    hidden = random.random() * n
    attention_s = has_attention * again_s * random.uniform(0.15, 0.8)  # for a tenth of what a block keeps

    def seconds(mix: Mix) -> float:
        inputs = 0.1 * (mix.recomputed - mix.attending)
        on_device = 0.2 * mix.attending + (0 if mix.has_inputs_on_host else inputs)
        if n - mix.recomputed - mix.offloaded + on_device > room:
            return math.inf
        exposed = max(0.0, mix.offloaded + (inputs if mix.has_inputs_on_host else 0) - hidden)
        return computing(mix) + bus_s * exposed

    def computing(mix: Mix) -> float:
        return 10 + again_s * mix.recomputed - attention_s * mix.attending

    numbers = ((r, o) for r, o in itertools.product(range(n + 1), repeat=2) if r + o <= n)
    least_s = min(
        seconds(Mix(r, o, h, attending))
        for (r, o), h in itertools.product(numbers, (False, True))
        for attending in range(r * has_attention + 1)
    )
    asked = []

    def first_seconds(mix: Mix) -> float:
        asked.append(mix)
        return seconds(mix) * (1 + 0.08 * random.random())  # under a placement that is not the best

    best = best_mix(n, first_seconds, seconds, computing, is_attention_worth_it=has_attention)
    assert len(asked) == len(set(asked))
    assert (best is None) == math.isinf(least_s)
    if best is not None:
        assert seconds(best) <= least_s + 2 * max(again_s, bus_s)  # about what a block costs: the ground has corners


# From a model to a plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def _model(depth: int = 8) -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(depth)))


def _profiled(model: nn.Module) -> MemoryProfile:
    inp = {"x": torch.zeros(8192, 256)}
    return profile_memory(model, inp, lambda m, i: m(i["x"]).sum().backward(), blocks=found_blocks(model))


def _planned(model: nn.Module, profile: MemoryProfile, gpu: int, cpu: int = 2**33, **figures: float) -> Plan:
    hardware = replace(HardwareSpec.nominal(), matmul_flops_per_s={"float32": figures.get("flops", 20e12)})
    request = PlacementRequest(str(figures.get("policy", "auto")), activations=ActivationRequest.of("auto"))
    return make_plan(
        model,
        request,
        budget=Budget(gpu_bytes=gpu, cpu_bytes=cpu),
        regime=TrainingRegime(update_timing=UpdateTiming.BEHIND_FORWARD, can_stream=True),
        profile=profile,
        hardware=hardware,
    )


def _fates(plan: Plan) -> set[Fate]:
    return {block.fate for block in plan.activations}


@pytest.mark.parametrize("policy", telling(["auto", "cpu"], "auto"))
def test_the_fastest_that_fits_is_chosen(policy: str) -> None:
    model = _model()
    profile = _profiled(model)
    roomy = _planned(model, profile, 4 * 2**30, policy=policy)  # type: ignore[arg-type]
    assert _fates(roomy) == {KEEP}
    tight = 500 * MIB  # everything together takes 840 with its margin
    slow = _planned(model, profile, tight, flops=1e11, policy=policy)  # type: ignore[arg-type]
    assert AGAIN not in _fates(slow)  # there is much time to copy in
    assert AWAY in _fates(slow)
    assert slow.activation_host_bytes
    assert slow.forecast is not None
    assert slow.forecast.peak_gpu_bytes <= tight
    fast = _planned(model, profile, tight, flops=1e16, policy=policy)  # type: ignore[arg-type]
    assert _fates(fast) & {AGAIN, AGAIN_AWAY}  # and hardly any
    assert _planned(model, profile, tight, flops=1e16, policy=policy) == fast  # type: ignore[arg-type]
    assert "activations: 8 kept on the GPU" in fast.explain()


def test_other_chunk_sizes_may_have_less_recomputed_where_everything_stays_on_the_device() -> None:
    """With everything there, a plan with the first chunk size recomputes two blocks."""
    model = _model()
    plan = _planned(model, _profiled(model), 600 * MIB, 2**24, flops=1e12)
    assert [block.fate for block in plan.activations].count(AGAIN) == 1


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 1024), nn.Linear(1024, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + nn.functional.scaled_dot_product_attention(x, x, x)
        return x + self.down(torch.tanh(self.up(y)))


@pytest.mark.parametrize(("shape", "is_worth_it"), [((1, 1, 16384, 64), True), ((1, 2048, 8, 64), False)])
def test_attention_is_kept_where_sequences_are_long(shape: tuple[int, ...], is_worth_it: bool) -> None:
    """A byte of it saves more than one of all that a block keeps."""
    model = nn.Sequential(*(Attending() for _ in range(8)))
    inp = {"x": torch.zeros(shape)}
    profile = profile_memory(model, inp, lambda m, i: m(i["x"]).sum().backward(), blocks=found_blocks(model))
    plan = _planned(model, profile, 600 * MIB, 2**20)
    assert (ATTENDING in _fates(plan)) == is_worth_it
    assert _fates(plan) - {KEEP, ATTENDING} == (set() if is_worth_it else {AGAIN})


@pytest.mark.full
def test_host_memory_counts() -> None:
    model = _model()
    profile = _profiled(model)
    plenty = _planned(model, profile, 500 * MIB, flops=1e11)
    notes, forecast = plenty.notes, plenty.forecast
    assert forecast is not None
    assert notes["host_activation_bytes"] == plenty.activation_host_bytes
    assert forecast.host_bytes >= int(notes["host_activation_bytes"])
    scarce = _planned(model, profile, 500 * MIB, 150 * MIB, flops=1e11)
    assert scarce.forecast is not None
    assert scarce.forecast.host_bytes <= 150 * MIB
    assert (scarce.activation_host_bytes or 0) < (plenty.activation_host_bytes or 0)
    with pytest.raises(CapacityError):
        _planned(model, profile, 60 * MIB)


def test_searches_take_the_option() -> None:
    model = _model(2)
    step = {"inp": {"x": torch.zeros(8, 256)}, "step_fn": lambda m, i: m(i["x"]).sum().backward()}
    plan = optimal_search(model, activations="auto", **step)  # type: ignore[arg-type]
    assert plan.activations == (ModelBlock("0", KEEP), ModelBlock("1", KEEP))
    plan = optimal_search(model, activations={"1": "recompute"}, **step)  # type: ignore[arg-type]
    assert plan.activations == (ModelBlock("1", AGAIN),)
    assert simple_search(model, activations="offload").activations == (ModelBlock("0", AWAY), ModelBlock("1", AWAY))
    for search in (simple_search, optimal_search):
        with pytest.raises(PlanError, match="activations='auto' needs to know what a step takes"):
            search(model, activations="auto")


def _names(blocks: Sequence[ModelBlock]) -> list[str]:
    return [block.name for block in blocks]


def test_a_layout_keeps_its_blocks() -> None:
    """What later plans are made for has lost its classes."""
    model = _model(3)
    request = PlacementRequest("cpu", activations=ActivationRequest.of("auto"))
    first = make_plan(model, request)
    bare = nn.Sequential(*(nn.ModuleDict({"up": b.up, "down": b.down}) for b in model))
    second = make_plan(bare, request, layout=first)
    assert _names(second.activations) == _names(first.activations) == ["0", "1", "2"]


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(12)
        )
        self.head = nn.Linear(1024, 32768)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


@pytest.mark.full
def test_fates_suit_the_chunk_size_that_is_chosen() -> None:
    """Against numbers of blocks that are recomputed, each planned by itself with all chunk sizes. What searches
    compare has the host's work in it, too, which is up to 3% of so short a step."""
    with torch.device("meta"):
        model = Wide()
    hardware = replace(HardwareSpec.nominal(), matmul_flops_per_s={"float32": 1e13, "bfloat16": 3e14})

    def seconds(activations: object) -> float:
        plan = optimal_search(
            model,
            unified_dtype=torch.bfloat16,
            overlap=True,
            inp={"x": torch.zeros(4096, 1024)},
            step_fn=lambda model, inp: model(inp["x"].bfloat16()).backward(),
            gpu_bytes=3072 * MIB,
            cpu_bytes=2**33,
            hardware=hardware,
            can_stream=True,
            activations=activations,  # type: ignore[arg-type]
        )
        assert plan.forecast is not None
        return plan.forecast.times.total_s

    names = [f"blocks.{i}" for i in range(12)]
    mixes = [Mix(count, 0, is_away).blocks(names) for count in (6, 9, 12) for is_away in (False, True)]
    fixed = [seconds({block.name: block.fate.value for block in blocks}) for blocks in mixes]
    assert seconds("auto") <= 1.03 * min(fixed)
