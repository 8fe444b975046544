from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_elixir import planning
from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.device_words import DeviceWords
from lightning_elixir.plan.hardware import HardwareSpec, load_hardware
from lightning_elixir.plan.memory import Budget, host_bytes_for, host_share
from lightning_elixir.plan.profile import StepProfile
from lightning_elixir.plan.regime import TrainingRegime, UpdateMode
from lightning_elixir.plan.simulator.step import StepSimulator
from lightning_elixir.plan.types import ALIGN_NUMEL, AccessTrace, Plan, Tier, UpdateTiming
from lightning_elixir.planning import (
    PlacementRequest,
    detect_budget,
    minimum_waste_search,
    optimal_search,
    param_specs,
    simple_search,
    timeline_of,
)
from lightning_elixir.profiling.fake_step import profile_memory
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.tiers import telling

KIB = 1024
MIB = 2**20
SEARCHES = [minimum_waste_search, simple_search, optimal_search]


def encoder(num_layers: int = 4) -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)


def step(model: nn.Module, inp: Mapping[str, Any]) -> None:
    model(inp["x"]).sum().backward()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, int | None]:
    """A machine of 3 GiB of device memory and 64 GiB on the host, which is not measured."""
    memory: dict[str, int | None] = {"gpu": 3 * 2**30, "host": 64 * 2**30}
    monkeypatch.setattr(planning, "current_device_memory_bytes", lambda: memory["gpu"])
    monkeypatch.setattr(planning, "available_host_bytes", lambda: memory["host"])
    monkeypatch.setattr(planning, "profile_hardware", lambda **options: HardwareSpec.nominal())
    return memory


def test_everything_is_placed_once_under_its_own_name() -> None:
    model = encoder()
    plan = make_plan(model)
    assert plan.is_all_resident
    shapes = {m.fqn: m.shape for c in plan.chunks for m in c.members}
    assert shapes == {fqn: tuple(p.shape) for fqn, p in model.named_parameters()}


def test_chunk_size_is_bytes_of_the_compute_dtype() -> None:
    model = encoder()
    for dtype, itemsize in ((None, 4), (torch.bfloat16, 2)):
        plan = make_plan(model, chunk_size=160 * KIB, compute_dtype=dtype)
        assert max(c.numel for c in plan.chunks) * itemsize == plan.block_bytes
        assert 120 * KIB < plan.block_bytes <= 160 * KIB
        assert plan.compute_dtype == str(dtype or torch.float32).removeprefix("torch.")


def test_chunk_size_may_be_smaller_than_a_parameter() -> None:
    plan = make_plan(encoder(), placement_policy="cpu", chunk_size=20 * KIB, prefetch=False)
    large = [c for c in plan.chunks if c.nbytes > 20 * KIB]
    assert large
    assert all(len(c.members) == 1 for c in large)
    assert plan.block_bytes <= 20 * KIB
    assert plan.rcache_blocks >= max(plan.blocks_of(c.id) for c in large)


def test_parameters_keep_their_dtypes_unless_told_otherwise() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(8, 8, dtype=torch.bfloat16))
    assert {c.dtype for c in make_plan(model).chunks} == {"float32", "bfloat16"}
    assert make_plan(model).compute_dtype == "float32"
    assert {c.dtype for c in make_plan(model, compute_dtype=torch.float16).chunks} == {"float16"}


def test_bytes_follow_the_precision() -> None:
    model = nn.Linear(512, 512, bias=False)
    n = 512 * 512

    def figures(**options: Any) -> tuple[int, ...]:
        plan = make_plan(model, placement_policy="cpu", prefetch=False, **options)
        return tuple(int(plan.notes[f"host_{kind}_bytes"]) // n for kind in ("param", "grad", "state"))

    assert figures() == (4, 4, 8)
    assert figures(compute_dtype=torch.bfloat16) == (2, 2, 12)
    assert figures(compute_dtype=torch.bfloat16, master_weights=False) == (2, 2, 4)
    # Sums, and a buffer for the one chunk through which gradients come.
    assert figures(compute_dtype=torch.float16, num_states=0, accumulates=True) == (2, 4 + 2, 4)
    assert figures(compute_dtype=torch.float64, accumulates=True) == (8, 8 + 8, 16)


@pytest.mark.parametrize(("num_layers", "num_buffers"), [(1, 1), (2, 2), (3, 3), (5, 3)])
def test_bytes_of_gradients_that_are_added_up(num_layers: int, num_buffers: int) -> None:
    """In fp32, and through a few buffers of the compute dtype; of the ranks' shards each."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(num_layers)])
    for world_size in (1, 2):
        plan = make_plan(
            model,
            placement_policy="cpu",
            chunk_size=64 * 64 * 2,
            compute_dtype=torch.bfloat16,
            accumulates=True,
            world_size=world_size,
        )
        assert len(plan.chunks) == num_layers
        shard = 64 * 64 // world_size
        assert plan.notes["host_grad_bytes"] == shard * (4 * num_layers + 2 * num_buffers)
        on_gpu = make_plan(
            model, placement_policy="cuda", compute_dtype=torch.bfloat16, accumulates=True, world_size=world_size
        )
        assert on_gpu.notes["host_grad_bytes"] == 0


def test_prefetch_options() -> None:
    model = encoder()
    plans = [
        make_plan(model, placement_policy="cpu", chunk_size=100 * KIB, **options)
        for options in ({"prefetch": False}, {}, {"prefetch_depth": 4})
    ]
    assert [p.prefetch_depth for p in plans] == [0, 2, 4]
    blocks = [p.rcache_blocks for p in plans]
    assert [b - blocks[0] for b in blocks] == [0, 2, 4]


def test_storage_that_is_not_distributed() -> None:
    plan = make_plan(encoder(), placement_policy="cpu", world_size=2, enable_distributed_storage=False)
    assert not plan.is_storage_distributed
    assert plan.notes["host_param_bytes"] == sum(c.nbytes for c in plan.chunks)


def test_search_options_reach_the_search() -> None:
    model = encoder()
    assert make_plan(model, min_chunk_size=200 * KIB, chunk_search_range=0).block_bytes >= 150 * KIB
    with pytest.raises(PlanError, match="chunk_search_n_grids must be at least 1, got 0"):
        make_plan(model, chunk_search_n_grids=0)
    with pytest.raises(PlanError, match="chunk_size must be at least 1 byte, got 0"):
        make_plan(model, chunk_size=0)


def test_auto_within_a_limit() -> None:
    model = encoder()
    everything = int(make_plan(model, chunk_size=100 * KIB).notes["gpu_bytes"])
    plan = make_plan(model, chunk_size=100 * KIB, gpu_bytes=everything - 1)
    assert any(c.optim_tier is Tier.CPU for c in plan.chunks)
    with pytest.raises(CapacityError, match=r"rCache, 1 block of 74\.0 KiB for layers\.0\.self_attn"):
        make_plan(model, chunk_size=75 * KIB, gpu_bytes=200 * KIB)


def test_activations_take_their_part_of_the_limit() -> None:
    model = encoder()
    blocks = [
        make_plan(model, placement_policy="cpu", chunk_size=100 * KIB, gpu_bytes=MIB, non_model_bytes=n).rcache_blocks
        for n in (0, 400 * KIB)
    ]
    assert blocks[0] > blocks[1]


def test_equal_arguments_give_equal_plans() -> None:
    plans = [make_plan(encoder(), placement_policy="cpu", gpu_bytes=MIB, chunk_size=50 * KIB) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0].fingerprint() == plans[1].fingerprint()


# Keeping a layout


def test_a_layout_is_placed_anew_without_repacking() -> None:
    model = encoder()
    first = make_plan(model, placement_policy="cuda", chunk_size=60 * KIB)
    second = make_plan(model, placement_policy="cpu", layout=first, chunk_size=MIB)
    assert second.layout_fingerprint() == first.layout_fingerprint()
    assert second.block_bytes == first.block_bytes
    assert {c.param_tier for c in second.chunks} == {Tier.CPU}
    assert make_plan(model, placement_policy="cuda", layout=second) == first


def test_a_layout_of_another_model_is_refused() -> None:
    layout = make_plan(encoder(2))
    with pytest.raises(PlanError, match=r"another model: 12 parameters differ \(layers\.2\.self_attn\.in_proj_weight"):
        make_plan(encoder(3), layout=layout)
    frozen = encoder(2)
    next(frozen.parameters()).requires_grad_(False)
    with pytest.raises(PlanError, match="another model: 1 parameters differ"):
        make_plan(frozen, layout=layout)
    with pytest.raises(PlanError, match="another model"):
        make_plan(encoder(2), layout=layout, compute_dtype=torch.bfloat16)
    with pytest.raises(PlanError, match="made for 1 ranks, not for 2"):
        make_plan(encoder(2), layout=layout, world_size=2)


# Models of all kinds


def random_model(random: Random) -> nn.Module:
    model = nn.Module()
    for index in range(random.randint(0, 12)):
        shape = random.choice([(), (0,), (5,), (random.randint(1, 60), random.randint(1, 60))])
        dtype = random.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64))
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=random.random() < 0.8)
        owner = model
        if random.random() < 0.6:
            owner = nn.Module()
            model.add_module(f"m{index}", owner)
        owner.register_parameter(f"p{index}", parameter)
        if random.random() < 0.2:
            model.register_parameter(f"tied{index}", parameter)
    return model


def test_random_models_are_planned_whole() -> None:
    random = Random(51)
    for _ in range(150):
        model = random_model(random)
        world_size = random.choice((1, 2, 3))
        plan = make_plan(
            model,
            placement_policy=random.choice(("auto", "cpu", "cuda", "const", "static")),
            shard_param_frac=random.random(),
            offload_optim_frac=random.random(),
            chunk_size=random.choice((None, 1, 4 * KIB, MIB)),
            compute_dtype=random.choice((None, torch.bfloat16)),
            world_size=world_size,
        )
        specs = {s.fqn: s for s in param_specs(model)}
        members = [m for c in plan.chunks for m in c.members]
        assert sorted(m.fqn for m in members) == sorted(specs)
        for c in plan.chunks:
            assert c.numel % (world_size * ALIGN_NUMEL) == 0
            assert {specs[m.fqn].requires_grad for m in c.members} == {c.requires_grad}


def test_a_model_without_parameters() -> None:
    plan = make_plan(nn.ReLU(), placement_policy="cpu")
    assert (plan.chunks, plan.rcache_blocks) == ((), 0)


def test_one_huge_parameter_on_meta() -> None:
    plan = make_plan(nn.Embedding(250_000, 16_384, device="meta"), placement_policy="cpu", world_size=8)
    assert len(plan.chunks) == 1
    assert plan.rcache_blocks == 1


@pytest.mark.parametrize("options", [{"num_backwards": 2}, {"accumulates": True}, {}])
def test_updates_inside_backward_need_one_backward(options: dict[str, Any]) -> None:
    inside = UpdateTiming.INSIDE_BACKWARD
    for policy in ("auto", "cpu"):
        plan = make_plan(encoder(), placement_policy=policy, update_timing=inside, **options)
        assert plan.update_timing is (UpdateTiming.BEHIND_FORWARD if options else inside)
        assert make_plan(encoder(), placement_policy=policy).update_timing is UpdateTiming.AFTER_BACKWARD


def test_the_ways_in_which_updates_may_run() -> None:
    after, behind, inside = UpdateTiming
    early = TrainingRegime(update_timing=inside, can_reuse_compute_shard=True)
    assert early.waiting() == UpdateMode(inside)
    assert early.reusing() == UpdateMode(behind, grad_reuses_compute_shard=True)
    assert (early.can_reuse, early.can_speculate) == (True, False)
    clipped = replace(early, needs_global_norm=True)
    assert clipped.waiting() == UpdateMode(behind)
    assert clipped.can_speculate
    assert clipped.speculating() == UpdateMode(inside)
    for several in (replace(clipped, num_backwards=2), replace(clipped, accumulates=True)):
        assert several.waiting() == UpdateMode(behind)
        assert (several.can_reuse, several.can_speculate) == (False, False)
    assert replace(clipped, update_timing=after).waiting() == UpdateMode(after)


def test_a_host_too_small_for_gradients_of_their_own() -> None:
    options: dict[str, Any] = {
        "placement_policy": "cpu",
        "compute_dtype": torch.bfloat16,
        "update_timing": UpdateTiming.INSIDE_BACKWARD,
        "can_reuse_compute_shard": True,
    }
    needed = int(make_plan(encoder(), **options).notes["host_bytes"])
    assert not make_plan(encoder(), cpu_bytes=needed, **options).grad_reuses_compute_shard
    plan = make_plan(encoder(), cpu_bytes=needed - 1, **options)
    assert (plan.grad_reuses_compute_shard, plan.update_timing) == (True, UpdateTiming.BEHIND_FORWARD)
    assert plan.notes["host_bytes"] == needed * 14 // 16
    for refused in ({"can_reuse_compute_shard": False}, {"num_backwards": 2}, {"accumulates": True}):
        with pytest.raises(CapacityError, match="host memory"):
            make_plan(encoder(), cpu_bytes=needed - 1, **{**options, **refused})


@pytest.mark.parametrize("policy", telling(["cpu", "auto"], "cpu"))
def test_a_host_with_room_for_spare_states(policy: str) -> None:
    options: dict[str, Any] = {
        "placement_policy": policy,
        "gpu_bytes": 2**20,
        "compute_dtype": torch.bfloat16,
        "update_timing": UpdateTiming.INSIDE_BACKWARD,
        "needs_global_norm": True,
        "can_reuse_compute_shard": True,
    }
    plan = make_plan(encoder(), **options)
    assert (plan.has_spare_states, plan.update_timing) == (True, UpdateTiming.INSIDE_BACKWARD)
    needed = int(plan.notes["host_bytes"])
    assert make_plan(encoder(), cpu_bytes=needed, **options) == plan
    without = needed - int(plan.notes["host_spare_bytes"])  # room for the states alone
    waiting = make_plan(encoder(), cpu_bytes=without, **options)
    assert (waiting.has_spare_states, waiting.update_timing) == (False, UpdateTiming.BEHIND_FORWARD)
    for refused in ({"needs_global_norm": False}, {"num_backwards": 2}, {"master_weights": False}):
        assert not make_plan(encoder(), **{**options, **refused}).has_spare_states


# To build with


def _guessed(model: nn.Module) -> Plan:
    """Every third chunk on the device, and the parameters of every third one; frozen ones as they are."""
    plan = make_plan(model, placement_policy="cpu", chunk_size=60 * KIB, compute_dtype=torch.bfloat16)
    sites = ((Tier.GPU, Tier.CPU, True), (Tier.CPU, Tier.CPU, False), (Tier.GPU, Tier.GPU, True))
    chunks = [
        replace(c, param_tier=site[0], optim_tier=site[1], is_persistent=site[2]) if c.requires_grad else c
        for c, site in zip(plan.chunks, sites * len(plan.chunks), strict=False)
    ]
    return replace(plan, chunks=tuple(chunks), rcache_blocks=1)


def test_a_model_is_built_with_as_much_on_the_device_as_was_guessed_of_the_first_chunks() -> None:
    model = encoder()
    for p in model.layers[1].parameters():
        p.requires_grad_(False)
    guessed = _guessed(model)
    budget = Budget(gpu_bytes=4 * MIB)
    built = planning.place_to_build(guessed, model, PlacementRequest("auto"), budget, TrainingRegime())
    assert built.layout_fingerprint() == guessed.layout_fingerprint()
    trained = [c for c in built.chunks if c.requires_grad]
    near = [c for c in trained if c.is_persistent]
    assert near == trained[: len(near)]
    assert all((c.param_tier, c.optim_tier) == (Tier.GPU, Tier.GPU) for c in near)
    assert all((c.param_tier, c.optim_tier) == (Tier.CPU, Tier.CPU) for c in trained[len(near) :])
    room = sum(c.nbytes for c in guessed.chunks if c.requires_grad and c.is_persistent and c.optim_tier is Tier.GPU)
    assert 0 <= room - sum(c.nbytes for c in near) < trained[len(near)].nbytes
    frozen = [c for c in guessed.chunks if not c.requires_grad]
    assert frozen
    assert [c for c in built.chunks if not c.requires_grad] == frozen
    assert built.rcache_blocks > 1  # an evaluation may come before the first step
    assert int(built.notes["gpu_bytes"]) <= 4 * MIB


def test_a_placement_that_the_user_has_fixed_is_built_as_it_is() -> None:
    """It is there when a step is known: whatever was elsewhere would have to come back."""
    model, guessed = encoder(), _guessed(encoder())
    request = PlacementRequest("const", offload_optim_frac=0.5, offload_param_frac=0.25)
    assert planning.place_to_build(guessed, model, request, Budget(4 * MIB), TrainingRegime()) == guessed


def test_what_the_host_has_no_room_for_stays_where_it_was_guessed() -> None:
    model, request, regime = encoder(), PlacementRequest("auto"), TrainingRegime()
    guessed = _guessed(model)
    built = planning.place_to_build(guessed, model, request, Budget(4 * MIB), regime)
    assert built != guessed
    needed = int(built.notes["host_bytes"])
    assert planning.place_to_build(guessed, model, request, Budget(4 * MIB, needed), regime) == built
    assert planning.place_to_build(guessed, model, request, Budget(4 * MIB, needed - 1), regime) == guessed
    on_disk = replace(guessed, chunks=(replace(guessed.chunks[0], optim_tier=Tier.NVME), *guessed.chunks[1:]))
    for short in (on_disk, replace(guessed, grad_reuses_compute_shard=True)):
        assert planning.place_to_build(short, model, request, Budget(4 * MIB), regime) == short


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_a_model_is_built_under_a_quick_guess_of_which_little_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-7B of 8 x 2048 at 40 GiB on an H200: less than a third of what left the device again, and of the simulated
    steps; the plan that follows is as fast."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig())
    model.gradient_checkpointing_enable()
    tokens = torch.zeros(8, 2048, dtype=torch.long)
    profile = profile_memory(
        model,
        {"x": tokens},
        lambda model, inp: model(inp["x"], labels=inp["x"]).loss.backward(),
        dtype=torch.bfloat16,
        autocast=True,
    )
    hardware = load_hardware(Path(planning.__file__).parent / "plan" / "machines" / "h200.json")
    request, budget = PlacementRequest("auto"), Budget(40 * 2**30, 120 * 2**30)
    regime = TrainingRegime(update_timing=UpdateTiming.INSIDE_BACKWARD, can_stream=True)
    options: dict[str, Any] = {"regime": regime, "compute_dtype": torch.bfloat16, "hardware": hardware}
    common = replace(budget, non_model_bytes=int(40 * 2**30 * planning.COMMON_SHARE))
    num_simulated = 0
    run = StepSimulator.run

    def counted(simulator: StepSimulator, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_simulated
        num_simulated += 1
        return run(simulator, *args, **kwargs)

    monkeypatch.setattr(StepSimulator, "run", counted)
    thorough = planning.make_plan(model, request, budget=common, **options)
    most, num_simulated = num_simulated, 0
    guessed = planning.make_plan(model, request, budget=common, **options, serves_to_build=True)
    assert 0 < num_simulated < most / 3
    built = planning.place_to_build(guessed, model, request, common, regime)

    def final(layout: Plan) -> Plan:
        return planning.make_plan(model, request, budget=budget, layout=layout, profile=profile, **options)

    def left_the_device(before: Plan) -> int:
        pairs = list(zip(before.chunks, final(before).chunks, strict=True))
        states = sum(4 * a.numel for a, b in pairs if a.optim_tier is Tier.GPU and b.optim_tier is Tier.CPU)
        return states + sum(a.nbytes for a, b in pairs if a.param_tier is Tier.GPU and b.param_tier is Tier.CPU)

    assert 0 < left_the_device(built) < left_the_device(thorough) / 3
    seconds = [plan.forecast.times.total_s for plan in (final(built), final(thorough)) if plan.forecast is not None]
    assert seconds[0] < 1.01 * seconds[1]


# The ancestors' searches


def test_budget_of_this_machine(machine: dict[str, int | None]) -> None:
    cpu, spare = host_share(64 * 2**30, 4)
    words, reserve = DeviceWords(is_limit_usable=False), 16 * 2**30 - cpu
    assert detect_budget(4) == Budget(3 * 2**30, cpu, 0, spare_cpu_bytes=spare, words=words, reserve_bytes=reserve)
    limited = detect_budget(1, gpu_bytes=2**30, cpu_bytes=2**40, non_model_bytes=5)
    assert (limited.gpu_bytes, limited.cpu_bytes, limited.non_model_bytes) == (2**30, 64 * 2**30, 5)
    assert limited.reserve_bytes == 0
    assert detect_budget(1, gpu_bytes=2**40).gpu_bytes == 3 * 2**30
    machine["gpu"] = None
    assert detect_budget().gpu_bytes is None
    assert detect_budget(gpu_bytes=7).gpu_bytes == 7


def test_a_part_of_the_host_is_kept_back() -> None:
    gib = 2**30
    assert host_share(100 * gib, 1) == (
        96 * gib,
        92 * gib,
    )  # 2 GiB, and a fiftieth; what can be done without, twice that
    assert host_share(100 * gib, 4) == (90 * gib // 4, 80 * gib // 4)
    assert host_share(4 * gib, 1) == (3 * gib, 2 * gib)  # no more than a quarter, however small the host
    # A limit of the user's counts as it is, within what is free; spare states go no further than without one.
    assert host_share(100 * gib, 1, 99 * gib) == (99 * gib, 92 * gib)
    assert host_share(100 * gib, 2, 60 * gib) == (30 * gib, 30 * gib)
    assert host_share(100 * gib, 1, 2**50) == (100 * gib, 92 * gib)
    assert host_share(0, 3) == (0, 0)
    # When training is about to begin, half of that may have been taken by what it is for.
    assert host_share(100 * gib, 1, is_begun=True) == (98 * gib, 96 * gib)


@pytest.mark.parametrize("wanted", [1, 10**9, 6 * 2**30, 7 * 2**30, 68_123_456_789])
def test_how_much_a_host_must_have_is_no_more_and_no_less(wanted: int) -> None:
    free = host_bytes_for(wanted)
    assert host_share(free, 1)[0] >= wanted
    assert host_share(free - 2, 1)[0] < wanted


@pytest.mark.parametrize("search", SEARCHES)
def test_searches_take_what_the_ancestors_took(search: Any, machine: dict[str, int | None]) -> None:
    plan = search(encoder(), 1, unified_dtype=torch.float16, overlap=True, verbose=True)
    assert isinstance(plan, Plan)
    assert (plan.compute_dtype, plan.prefetch_depth, plan.policy) == ("float16", 2, "auto")
    assert plan.is_all_resident
    assert search(encoder()).prefetch_depth == 0


@pytest.mark.parametrize("search", SEARCHES)
def test_searches_obey_the_memory_of_the_machine(search: Any, machine: dict[str, int | None]) -> None:
    machine["gpu"] = MIB
    plan = search(encoder())
    assert not plan.is_all_resident or any(c.optim_tier is not Tier.GPU for c in plan.chunks)
    assert int(plan.notes["gpu_bytes"]) <= MIB
    machine["host"] = KIB
    with pytest.raises(CapacityError, match="host memory"):
        search(encoder())


def test_simple_search_takes_limits(machine: dict[str, int | None]) -> None:
    plan = simple_search(encoder(), gpu_bytes=MIB, cpu_bytes=2**30, min_chunk_size=50 * KIB)
    assert int(plan.notes["gpu_bytes"]) <= MIB
    with pytest.raises(CapacityError, match="host memory"):
        simple_search(encoder(), gpu_bytes=MIB, cpu_bytes=KIB)


@pytest.mark.parametrize("cpu_bytes", [None, KIB])
def test_a_refusal_on_a_cpu_speaks_of_no_gpu(cpu_bytes: int | None, machine: dict[str, int | None]) -> None:
    machine["gpu"] = None
    with pytest.raises(CapacityError) as caught:
        simple_search(encoder(), gpu_bytes=KIB if cpu_bytes is None else MIB, cpu_bytes=cpu_bytes)
    assert "GPU" not in str(caught.value)
    assert str(caught.value).startswith("CPU memory (gpu_bytes): " if cpu_bytes is None else "host memory: ")


def test_searches_take_sizes_as_people_write_them(machine: dict[str, int | None]) -> None:
    sizes = {"gpu_bytes": MIB, "cpu_bytes": 2**30, "non_model_bytes": 2 * KIB, "min_chunk_size": 50 * KIB}
    written = {"gpu_bytes": "1MiB", "cpu_bytes": "1GiB", "non_model_bytes": "2KiB", "min_chunk_size": "50KiB"}
    for find in (simple_search, optimal_search):
        assert find(encoder(), **sizes).fingerprint() == find(encoder(), **written).fingerprint()  # type: ignore[operator]
        for name in (*sizes, "chunk_search_range"):
            with pytest.raises(PlanError, match=f"{name}: a size must be .*\"64MiB\".*, got 'big'"):
                find(encoder(), **{name: "big"})  # type: ignore[operator]


@pytest.mark.full
def test_searches_have_gradients_take_the_place_of_parameters_where_the_host_is_too_small(
    machine: dict[str, int | None],
) -> None:
    def least_host_bytes(dtype: torch.dtype) -> tuple[int, Plan]:
        """In steps of an eighth of the model's bytes, and the plan there."""
        unit = sum(p.numel() for p in encoder().parameters()) * dtype.itemsize // 8

        def plan_with(count: int) -> Plan | None:
            try:
                return simple_search(encoder(), unified_dtype=dtype, gpu_bytes=MIB, cpu_bytes=count * unit)
            except CapacityError:
                return None

        count = bisect.bisect_left(range(200), True, lo=1, key=lambda count: plan_with(count) is not None)
        plan = plan_with(count)
        assert plan is not None
        return count * unit, plan

    _, plan = least_host_bytes(torch.bfloat16)
    assert plan.grad_reuses_compute_shard
    assert not simple_search(encoder(), unified_dtype=torch.bfloat16, gpu_bytes=MIB).grad_reuses_compute_shard
    assert not least_host_bytes(torch.float32)[1].grad_reuses_compute_shard  # there is no master


def test_optimal_search_leaves_room_for_activations(machine: dict[str, int | None]) -> None:
    inp = {"x": torch.zeros(4, 32, 64)}
    taken = profile_memory(encoder(), inp, step, torch.float32).activation_bytes
    room = int(optimal_search(encoder(), inp=inp, step_fn=step).notes["non_model_bytes"])
    assert taken < room < 2 * taken  # with a margin
    plan = optimal_search(encoder(), inp=inp, step_fn=step, gpu_bytes=room + 2 * MIB)
    assert int(plan.notes["non_model_bytes"]) > taken
    assert any(c.optim_tier is Tier.CPU for c in plan.chunks)
    assert taken + int(plan.notes["rcache_bytes"]) < int(plan.notes["gpu_bytes"]) <= room + 2 * MIB
    assert optimal_search(encoder(), inp=inp, step_fn=step, non_model_bytes=3).notes["non_model_bytes"] == 3
    assert optimal_search(encoder()).notes["non_model_bytes"] == 0


def test_optimal_search_needs_both_or_neither() -> None:
    with pytest.raises(PlanError, match="needs both inp and step_fn"):
        optimal_search(encoder(), inp={"x": torch.zeros(1)})


def test_verbose_prints_the_plan(machine: dict[str, int | None], capsys: pytest.CaptureFixture[str]) -> None:
    minimum_waste_search(encoder())
    assert capsys.readouterr().out == ""
    minimum_waste_search(encoder(), verbose=True)
    text = capsys.readouterr().out
    assert "plan (auto), 1 rank" in text
    assert "predicted step: " in text


def test_smaller_chunks_are_tried_where_the_limit_is_tight() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))
    wide = make_plan(model, placement_policy="cpu")
    tight = make_plan(model, placement_policy="cpu", gpu_bytes=2 * wide.block_bytes)
    assert tight.block_bytes < wide.block_bytes
    assert tight.notes["gpu_bytes"] <= 2 * wide.block_bytes
    with pytest.raises(CapacityError):  # a size of the user's own is kept
        make_plan(model, placement_policy="cpu", gpu_bytes=2 * wide.block_bytes, chunk_size=wide.block_bytes)
    with pytest.raises(CapacityError, match="the plan needs"):
        make_plan(model, placement_policy="cpu", gpu_bytes=1000)


def test_the_refusal_is_of_the_chunk_size_that_comes_nearest() -> None:
    """What is said to be missing is enough, and little more than that."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    for options in ({"gpu_bytes": 30 * KIB}, {"gpu_bytes": 80 * KIB, "cpu_bytes": 100 * KIB}):
        with pytest.raises(CapacityError) as caught:
            make_plan(model, **options)
        lacking = caught.value.lacking_bytes
        assert lacking is not None
        limit = {"GPU": "gpu_bytes", "host": "cpu_bytes"}[str(caught.value.resource)]
        enough = {**options, limit: options[limit] + lacking}
        plan = make_plan(model, **enough)
        assert int(plan.notes["gpu_bytes"]) <= enough["gpu_bytes"]
        less = 1 if limit == "gpu_bytes" else lacking // 20  # of many small chunks, not every combination is tried
        with pytest.raises(CapacityError):
            make_plan(model, **{**enough, limit: enough[limit] - less})


def test_a_profile_leaves_room_for_activations() -> None:
    model = encoder()
    hardware = HardwareSpec.nominal(2 * MIB, 2**30)
    inp = torch.zeros(4, 32, 64)
    profile = profile_memory(model, {"x": inp}, step)
    limit = profile.activation_bytes * 2 + 2 * MIB
    plan = make_plan(model, profile=profile, hardware=hardware, gpu_bytes=limit, cpu_bytes=2**30)
    assert plan.forecast is not None
    assert int(plan.notes["non_model_bytes"]) >= profile.activation_bytes
    assert int(plan.notes["gpu_bytes"]) == plan.forecast.peak_gpu_bytes <= limit
    assert "nominal" in plan.forecast.hardware
    assert "assumed" not in plan.forecast.hardware
    timeline = timeline_of(plan, profile, hardware)
    assert timeline.times == plan.forecast.times
    assert timeline.spans
    fixed = make_plan(model, placement_policy="cpu", profile=profile, hardware=hardware, gpu_bytes=limit)
    assert fixed.forecast is not None
    assert "leaves nothing to search" in fixed.forecast.binding
    assert int(fixed.notes["non_model_bytes"]) >= profile.activation_bytes
    assert int(fixed.notes["gpu_bytes"]) <= limit
    with pytest.raises(PlanError, match="needs the layout"):
        make_plan(model, profile=StepProfile(AccessTrace(()), ()))


def search_with_unequal_memory(rank_bytes: tuple[int, ...]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "current_device_memory_bytes", lambda: 700 * KIB)
        patch.setattr(planning, "available_host_bytes", lambda: rank_bytes[torch.distributed.get_rank()])
        return simple_search(encoder(), 2, overlap=True).fingerprint()


def test_ranks_with_unequal_memory_plan_alike() -> None:
    first, second = run_ranks(search_with_unequal_memory, 2, (10 * MIB, 64 * MIB))
    assert first == second


def test_a_copy_for_each_node_takes_as_many_ranks_on_every_node() -> None:
    with pytest.raises(PlanError, match="world_size=6 is no multiple of local_world_size=4"):
        simple_search(nn.Linear(8, 8), world_size=6, local_world_size=4, sharding="node")
    one = simple_search(nn.Linear(8, 8), world_size=2, local_world_size=4, sharding="node")
    assert one.num_copies == 1
