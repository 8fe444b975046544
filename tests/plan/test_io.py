from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lightning_elixir.errors import PlanError
from lightning_elixir.plan.describe import describe_dating
from lightning_elixir.plan.io import load_plan, plan_from_dict, plan_to_dict, save_plan
from lightning_elixir.plan.types import Plan, Tier, UpdateTiming
from lightning_elixir.plan.units import format_seconds
from tests.helpers.plans import SPARED, with_spares
from tests.plan.models import random_specs
from tests.plan.problems import constant_hardware, layers, place_specs
from tests.plan.traces import make_chunk, make_plan_of


@pytest.fixture
def plan() -> Plan:
    chunks = (make_chunk(0, is_persistent=True, param_tier=Tier.GPU), make_chunk(1, blocks=2), make_chunk(2))
    return replace(make_plan_of(chunks, rcache_blocks=3, prefetch_depth=2), notes={"gpu_bytes": 7, "why": "test"})


def test_a_plan_survives_the_round_trip(plan: Plan, tmp_path: Path) -> None:
    save_plan(plan, tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.notes == plan.notes
    assert loaded.fingerprint() == plan.fingerprint()


def test_random_plans_survive_the_round_trip(tmp_path: Path) -> None:
    random = Random(31)
    for _ in range(50):
        specs = random_specs(random)
        policy = random.choice(("cpu", "cuda", "const"))
        plan = place_specs(specs, policy, world_size=random.choice((1, 3)), offload_optim_frac=0.3)
        save_plan(plan, tmp_path / "plan.json")
        assert load_plan(tmp_path / "plan.json") == plan
        assert plan_from_dict(json.loads(json.dumps(plan_to_dict(plan)))) == plan


def test_an_empty_plan_survives_the_round_trip(tmp_path: Path) -> None:
    empty = make_plan_of((), rcache_blocks=0)
    save_plan(empty, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == empty


@pytest.fixture(scope="module")
def forecast_plan() -> Plan:
    """Searched for: with a forecast, alternatives, and updates that are streamed."""
    hardware = constant_hardware(streamed_adam_numel_per_s=3e9, joint_adam_numel_per_s=1e12)
    plan = place_specs(layers(8), gpu=50_000, hardware=hardware, can_stream=True, prefetch_depth=2)
    assert plan.forecast is not None
    assert any(c.is_update_streamed for c in plan.chunks)
    assert [a.total_s is None for a in plan.forecast.alternatives].count(True) == 1
    return plan


def test_a_forecast_survives_the_round_trip(forecast_plan: Plan, tmp_path: Path) -> None:
    save_plan(forecast_plan, tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == forecast_plan
    assert (loaded.forecast, loaded.notes) == (forecast_plan.forecast, forecast_plan.notes)
    assert loaded.explain() == forecast_plan.explain()
    earlier = edited(forecast_plan, lambda content: content["forecast"].pop("weighed_s"))
    assert plan_from_dict(earlier).forecast == forecast_plan.forecast  # a file of before there was that
    assert [c.is_update_streamed for c in loaded.chunks] == [c.is_update_streamed for c in forecast_plan.chunks]


def test_when_a_forecast_was_made_survives_the_round_trip(forecast_plan: Plan) -> None:
    assert forecast_plan.forecast is not None
    dated = replace(forecast_plan.forecast, after_steps=7, foreseen_s=0.5, foreseen_after_steps=0)
    content = json.loads(json.dumps(plan_to_dict(replace(forecast_plan, forecast=dated))))
    assert plan_from_dict(content).forecast == dated
    for name in ("after_steps", "foreseen_s", "foreseen_after_steps"):
        content["forecast"].pop(name)
    assert plan_from_dict(content).forecast == forecast_plan.forecast  # a file of before there was that


def test_the_first_forecast_is_kept(forecast_plan: Plan) -> None:
    made = forecast_plan.forecast
    assert made is not None
    assert "predicted step" in forecast_plan.explain()
    assert describe_dating(made) == ""
    first = made.following(None, 0)
    assert (first.after_steps, first.foreseen_s) == (0, None)
    assert describe_dating(first) == "predicted before the first step"
    times = replace(made.times, total_s=2 * made.times.total_s)
    second = replace(made, times=times).following(first, 2)
    third = replace(made, times=replace(times, total_s=1.0)).following(second, 7)
    assert (third.after_steps, third.foreseen_s, third.foreseen_after_steps) == (7, made.times.total_s, 0)
    assert f"foreseen before the first step: {format_seconds(made.times.total_s)}" in describe_dating(third)
    late = replace(made, times=times).following(made.following(None, 1), 7)
    assert "foreseen when the plan was chosen, after 1 step: " in describe_dating(late)
    assert describe_dating(late) in replace(forecast_plan, forecast=late).explain()
    assert made.following(made, 3).foreseen_s is None  # nothing is known of when that one was made


def test_the_fingerprint_ignores_the_forecast_and_not_streaming(forecast_plan: Plan) -> None:
    assert replace(forecast_plan, forecast=None).fingerprint() == forecast_plan.fingerprint()
    chunks = tuple(replace(c, is_update_streamed=False) for c in forecast_plan.chunks)
    other = replace(forecast_plan, chunks=chunks)
    assert other.fingerprint() != forecast_plan.fingerprint()
    assert other.layout_fingerprint() == forecast_plan.layout_fingerprint()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda f: f.update(speed=3), "forecast has unknown keys: speed"),
        (lambda f: f.pop("binding"), "forecast has no 'binding'"),
        (lambda f: f.update(binding=None), "forecast: binding must be a string"),
        (lambda f: f.update(peak_gpu_bytes="1"), "forecast: peak_gpu_bytes must be an integer of at least 0"),
        (lambda f: f.update(gpu_kinds=[1]), "forecast, gpu_kinds must be an object, not list"),
        (lambda f: f["gpu_kinds"].pop("rcache_bytes"), "forecast, gpu_kinds has no 'rcache_bytes'"),
        (lambda f: f.update(host_bytes=-1), "forecast: host_bytes must be an integer of at least 0"),
        (lambda f: f.update(gpu_limit_bytes=1.5), "forecast: gpu_limit_bytes must be an integer"),
        (lambda f: f.update(times=[]), "forecast, times must be an object, not list"),
        (lambda f: f["times"].update(total_s="1"), "forecast, times: total_s must be a number"),
        (lambda f: f["times"].update(total_s=True), "forecast, times: total_s must be a number"),
        (lambda f: f["times"].pop("step_s"), "forecast, times has no 'step_s'"),
        (lambda f: f["times"].update(more_s=1), "forecast, times has unknown keys: more_s"),
        (lambda f: f.update(weighed_s="1"), "forecast: weighed_s must be a number"),
        (lambda f: f.update(after_steps=-1), "forecast: after_steps must be an integer of at least 0"),
        (lambda f: f.update(alternatives={}), "forecast: alternatives must be a list"),
        (lambda f: f["alternatives"].append(3), "forecast, alternative .* must be an object, not int"),
        (lambda f: f["alternatives"][0].update(why=""), "forecast, alternative 0 has unknown keys: why"),
        (lambda f: f["alternatives"][0].update(total_s="1"), "forecast, alternative 0: total_s must be a number"),
    ],
)
def test_what_is_refused_of_a_forecast(
    forecast_plan: Plan, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan_from_dict(edited(forecast_plan, lambda content: edit(content["forecast"])))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(is_update_streamed=1), "chunk 1: is_update_streamed must be true or false, got 1"),
        (lambda c: c.pop("is_update_streamed"), "chunk 1 has no 'is_update_streamed'"),
        (
            lambda c: c.update(is_update_streamed=True, optim_tier="gpu"),
            "chunk 1 has its states on the GPU: there is nothing to stream",
        ),
    ],
)
def test_what_is_refused_of_streaming(plan: Plan, edit: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_from_dict(edited(plan, lambda content: edit(content["chunks"][1])))


@pytest.mark.parametrize(
    ("edit", "timing", "message"),
    [
        (lambda c: c.pop("has_spare_states"), "inside_backward", "chunk 1 has no 'has_spare_states'"),
        (
            lambda c: c.update(has_spare_states="no"),
            "inside_backward",
            "chunk 1: has_spare_states must be true or false, got 'no'",
        ),
        (
            lambda c: None,
            "behind_forward",
            r'chunk 1 \[p1\] has spare states, which are for update_timing "inside_back',
        ),
        (lambda c: c.update(optim_tier="gpu"), "inside_backward", "has spare states, but no states in host memory"),
        (lambda c: c.update(optim_tier="nvme"), "inside_backward", "has spare states, but no states in host memory"),
        (lambda c: c.update(requires_grad=False), "inside_backward", "has spare states, but no states in host memory"),
        (lambda c: c.update(dtype="float32"), "inside_backward", "its float32 parameters have no fp32 master"),
    ],
)
def test_what_is_refused_of_spare_states(
    plan: Plan, edit: Callable[[dict[str, Any]], object], timing: str, message: str
) -> None:
    content = plan_to_dict(with_spares(in_bf16(plan), "odd"))
    chunk = content["chunks"][1]  # type: ignore[index]
    edit(chunk)
    content["update_timing"] = timing
    with pytest.raises(PlanError, match=message):
        plan_from_dict(content)


def in_bf16(plan: Plan) -> Plan:
    return replace(plan, chunks=tuple(replace(c, dtype="bfloat16") for c in plan.chunks))


@pytest.mark.parametrize("which", ["all", "odd", "none"])
def test_spare_states_of_each_chunk_survive_the_round_trip(plan: Plan, which: str, tmp_path: Path) -> None:
    spared = with_spares(in_bf16(plan), which)
    assert [c.has_spare_states for c in spared.chunks] == [SPARED[which](c.id) for c in plan.chunks]
    assert spared.has_spare_states is (which != "none")
    save_plan(spared, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == spared
    assert len({with_spares(in_bf16(plan), which).fingerprint() for which in SPARED}) > 2


@pytest.mark.parametrize("timing", UpdateTiming)
def test_when_updates_run_survives_the_round_trip(plan: Plan, timing: UpdateTiming, tmp_path: Path) -> None:
    is_inside = timing is UpdateTiming.INSIDE_BACKWARD
    timed = replace(plan, update_timing=timing, grad_reuses_compute_shard=not is_inside)
    save_plan(timed, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == timed
    assert timed.fingerprint() != plan.fingerprint()
    assert timed.layout_fingerprint() == plan.layout_fingerprint()


def test_the_file_is_readable(plan: Plan, tmp_path: Path) -> None:
    save_plan(plan, tmp_path / "plan.json")
    lines = (tmp_path / "plan.json").read_text().splitlines()
    assert '        {"fqn": "p1", "shape": [1024], "offset": 0}' in lines  # one member a line
    assert '  "rcache_blocks": 3,' in lines


def test_the_fingerprint_tells_placements_apart_and_ignores_notes(plan: Plan) -> None:
    assert replace(plan, notes={}).fingerprint() == plan.fingerprint()
    other = replace(plan, rcache_blocks=4)
    assert other.fingerprint() != plan.fingerprint()
    assert other.layout_fingerprint() == plan.layout_fingerprint()
    assert make_plan_of((make_chunk(0),), 3).layout_fingerprint() != plan.layout_fingerprint()


def edited(plan: Plan, edit: Callable[[dict[str, Any]], object]) -> object:
    content = json.loads(json.dumps(plan_to_dict(plan)))
    edit(content)
    return content


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(schema=99), "the plan has schema 99, this version reads 7"),
        (lambda c: c.pop("schema"), "plan has no 'schema'"),
        (lambda c: c.pop("chunks"), "plan has no 'chunks'"),
        (lambda c: c.update(rcache_block=3), "plan has unknown keys: rcache_block"),
        (lambda c: c.update(rcache_blocks="3"), "rcache_blocks must be an integer of at least 0, got '3'"),
        (lambda c: c.update(rcache_blocks=True), "rcache_blocks must be an integer"),
        (lambda c: c.update(rcache_blocks=1), "rcache_blocks is 1, but one chunk alone needs 2"),
        (lambda c: c.update(world_size=0), "world_size must be an integer of at least 1, got 0"),
        (lambda c: c.update(world_size=5), "chunk 0 has 512 elements, not a multiple of 2560"),
        (lambda c: c.update(compute_dtype="int8"), "compute_dtype must be one of float64, float32"),
        (lambda c: c.update(policy=None), "policy must be a string, got None"),
        (lambda c: c.update(is_storage_distributed=1), "is_storage_distributed must be true or false, got 1"),
        (lambda c: c.update(update_timing="soon"), "update_timing must be one of after_backward, behind_forward"),
        (lambda c: c.pop("update_timing"), "plan has no 'update_timing'"),
        (lambda c: c.update(grad_reuses_compute_shard=1), "grad_reuses_compute_shard must be true or false, got 1"),
        (
            lambda c: c.update(grad_reuses_compute_shard=True, update_timing="inside_backward"),
            "grad_reuses_compute_shard and updates inside backward exclude each other",
        ),
        (lambda c: c.update(notes=[]), "notes must be an object, not list"),
        (lambda c: c.update(notes={"a": []}), "notes: 'a' must be a number or a string"),
        (lambda c: c.update(chunks={}), "chunks must be a list"),
        (lambda c: c["chunks"].reverse(), "chunk 0 has id 2: ids must count up from 0"),
        (lambda c: c["chunks"][1].update(param_tier="disk"), "chunk 1: param_tier must be one of gpu, cpu, nvme"),
        (lambda c: c["chunks"][1].update(numel=1000), "chunk 1 has 1000 elements, not a multiple of 512"),
        (lambda c: c["chunks"][1].pop("dtype"), "chunk 1 has no 'dtype'"),
        (lambda c: c["chunks"][1].update(numel=512), "p1 does not fit where chunk 1 puts it"),
        (lambda c: c["chunks"][1]["members"].append(7), "chunk 1, member 1 must be an object, not int"),
        (lambda c: c["chunks"][1]["members"][0].update(offset=3), "p1 starts at 3, not a multiple of 512"),
        (lambda c: c["chunks"][1]["members"][0].update(fqn="p0"), "parameter p0 is in the plan twice"),
        (lambda c: c["chunks"][1]["members"][0].update(shape=[-1]), "shape must be a list of sizes"),
    ],
)
def test_what_is_refused(plan: Plan, edit: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_from_dict(edited(plan, edit))


def test_members_must_not_overlap(plan: Plan) -> None:
    def overlap(content: dict[str, Any]) -> None:
        content["chunks"][1]["members"].append({"fqn": "q", "shape": [4], "offset": 512})

    with pytest.raises(PlanError, match="q does not fit where chunk 1 puts it"):
        plan_from_dict(edited(plan, overlap))


@pytest.mark.parametrize("content", [None, [], "plan", 3])
def test_what_is_no_plan_at_all(content: object) -> None:
    with pytest.raises(PlanError, match="plan must be an object"):
        plan_from_dict(content)


def test_errors_name_the_file(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read the plan .*missing\.json: No such file"):
        load_plan(tmp_path / "missing.json")
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(PlanError, match=r"broken\.json is no plan: it is not JSON \(Expecting property name"):
        load_plan(path)
    path.write_text(json.dumps(plan_to_dict(replace(plan, schema=1))))
    with pytest.raises(PlanError, match=r"broken\.json: the plan has schema 1, this version reads 7"):
        load_plan(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=r"broken\.json is no plan: it is not JSON \('utf-8' codec"):
        load_plan(path)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("import torch\n", r"it is not JSON \(Expecting value: line 1 column 1"),
        (" \n", "it is empty"),
        ("[" * 100_000, r"it is not JSON \("),
        ("[1, 2]", r"it is JSON, but no object: \[1, 2\]"),
        ('{"schema": 2, "name": "a hardware profile"}', "it is JSON, but an object without 'chunks'"),
    ],
    ids=["code", "empty", "deep", "list", "other"],
)
def test_files_that_are_no_plans(content: str, what: str, tmp_path: Path) -> None:
    """The error says what the file is, and what writes plans."""
    path = tmp_path / "m.py"
    path.write_text(content)
    with pytest.raises(PlanError, match=rf"m\.py is no plan: {what}.*lightning-elixir plan --save-plan FILE\.json"):
        load_plan(path)


def test_a_folder_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read the plan .*: Is a directory.*lightning-elixir plan --save-plan"):
        load_plan(tmp_path)
