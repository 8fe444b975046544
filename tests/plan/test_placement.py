from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.io import plan_from_dict, plan_to_dict
from lightning_elixir.plan.packing import PackedChunk, pack, regular_block_bytes
from lightning_elixir.plan.placement import (
    Budget,
    ModelDataBytes,
    PlacementRequest,
    format_bytes,
    place,
    smallest_rcache,
)
from lightning_elixir.plan.types import DTYPE_BYTES, ParamSpec, Plan, Tier
from tests.plan.models import accesses_of, random_specs, spec

MIXED = {d: ModelDataBytes.of(d, has_master=True) for d in DTYPE_BYTES}
KIB = 1024


def place_specs(
    specs: Sequence[ParamSpec],
    policy: str = "auto",
    *,
    chunk_numel: int = 1024,
    world_size: int = 1,
    gpu: int | None = None,
    cpu: int | None = None,
    other: int = 0,
    data: dict[str, ModelDataBytes] | None = None,
    **options: Any,
) -> Plan:
    packed = pack(specs, chunk_numel, world_size)
    request = PlacementRequest(policy=policy, **{"accesses": accesses_of(list(specs)), **options})
    return place(
        packed,
        request,
        Budget(gpu, cpu, other),
        world_size,
        block_bytes=regular_block_bytes(packed, chunk_numel, world_size),
        compute_dtype="float32",
        data_bytes=data or MIXED,
    )


def layers(count: int, *, dtype: str = "float32", requires_grad: bool = True) -> list[ParamSpec]:
    """`count` modules whose one parameter fills a chunk of 1024 elements."""
    return [spec(f"l{i}.w", 1024, dtype=dtype, requires_grad=requires_grad) for i in range(count)]


def tiers(plan: Plan) -> list[str]:
    """A letter for the parameter tier, one for the optimizer tier, `*` if persistent."""
    return [f"{c.param_tier.value[0]}{c.optim_tier.value[0]}{'*' if c.is_persistent else ''}" for c in plan.chunks]


def gpu_bytes(plan: Plan) -> int:
    return int(plan.notes["gpu_bytes"])


def test_bytes_per_element() -> None:
    def of(dtype: str, **options: Any) -> tuple[int, int, int, int]:
        data = ModelDataBytes.of(dtype, **options)
        return data.compute, data.grad, data.master, data.states

    assert of("bfloat16", has_master=True) == (2, 2, 4, 8)
    assert of("float16", has_master=True, grad_bytes=4) == (2, 4, 4, 8)
    assert of("float32", has_master=True) == (4, 4, 0, 8)
    assert of("bfloat16", has_master=False) == (2, 2, 0, 4)
    assert of("bfloat16", has_master=True, num_states=1) == (2, 2, 4, 4)
    assert of("float32", has_master=False, num_states=0) == (4, 4, 0, 0)


# Policies


def test_cuda_keeps_everything() -> None:
    plan = place_specs(layers(3), "cuda", prefetch_depth=2)
    assert tiers(plan) == ["gg*"] * 3
    assert (plan.policy, plan.rcache_blocks, plan.prefetch_depth) == ("cuda", 0, 2)
    assert plan.is_all_resident


def test_cpu_keeps_nothing() -> None:
    plan = place_specs(layers(5), "cpu", prefetch_depth=2)
    assert tiers(plan) == ["cc"] * 5
    assert plan.rcache_blocks == 3  # one in use, two ahead


def test_cpu_fills_the_gpu_with_blocks() -> None:
    # Blocks of 4 KiB; two of them for gradients.
    assert place_specs(layers(9), "cpu", gpu=28 * KIB).rcache_blocks == 5
    assert place_specs(layers(9), "cpu", gpu=28 * KIB, other=8 * KIB).rcache_blocks == 3
    assert place_specs(layers(9), "cpu", gpu=2**30).rcache_blocks == 9


def test_const_splits_by_bytes_highest_chunks_first() -> None:
    plan = place_specs(
        layers(8), "const", world_size=2, chunk_numel=1024, shard_param_frac=0.5, offload_optim_frac=0.25
    )
    assert tiers(plan) == ["gg*"] * 4 + ["gg", "gg", "gc", "gc"]
    plan = place_specs(layers(8), "static", shard_param_frac=1.0, offload_param_frac=0.25, offload_optim_frac=1.0)
    assert tiers(plan) == ["gc*"] * 6 + ["cc"] * 2  # with one rank a shard on the GPU is the replica
    assert plan.policy == "const"


def test_const_takes_the_nearest_chunk() -> None:
    for fraction, chunks in ((0.0, 0), (0.16, 0), (0.17, 1), (0.49, 1), (0.51, 2), (0.84, 3), (1.0, 3)):
        plan = place_specs(layers(3), "const", offload_optim_frac=fraction)
        assert tiers(plan).count("gc*") == chunks, fraction


def test_frozen_chunks_count_as_parameters_and_not_as_optimizer() -> None:
    specs = layers(2) + [spec(f"f{i}.w", 1024, requires_grad=False) for i in range(2)]
    plan = place_specs(specs, "const", offload_optim_frac=0.5, offload_param_frac=0.5)
    assert tiers(plan) == ["gg*", "gc*", "cg", "cg"]
    assert plan.notes["host_state_bytes"] == 8 * 1024
    assert plan.notes["host_param_bytes"] == 2 * 4 * 1024


def test_auto_prefers_everything_then_parameters_then_states() -> None:
    specs = layers(10)  # 4 KiB of parameters, 4 of gradients, 8 of states each
    whole = 10 * 16 * KIB + 8 * KIB
    assert tiers(place_specs(specs, gpu=whole)) == ["gg*"] * 10
    assert tiers(place_specs(specs)) == ["gg*"] * 10
    assert tiers(place_specs(specs, gpu=whole - 1)) == ["gg*"] * 9 + ["gc*"]
    assert tiers(place_specs(specs, gpu=48 * KIB + 24 * KIB)) == ["gg*"] * 2 + ["gc*"] * 8
    assert tiers(place_specs(specs, gpu=48 * KIB)) == ["gc*"] * 10
    plan = place_specs(specs, gpu=48 * KIB - 1, prefetch_depth=2)
    # Two gradient blocks and three blocks of rCache leave 27 KiB: one chunk with all it has, and two more blocks.
    assert tiers(plan) == ["gg*"] + ["cc"] * 9
    assert plan.rcache_blocks == 5
    assert tiers(place_specs(specs, gpu=12 * KIB, prefetch_depth=2)) == ["cc"] * 10


def test_auto_gives_up_prefetch_blocks_before_failing() -> None:
    plan = place_specs(layers(10), gpu=16 * KIB, prefetch_depth=3)
    assert (plan.rcache_blocks, plan.prefetch_depth) == (2, 3)


def test_auto_gives_states_no_more_than_the_margin() -> None:
    specs = layers(10)
    gpu = 48 * KIB + 40 * KIB
    promoted = [tiers(place_specs(specs, gpu=gpu, gpu_margin_mem_ratio=r)).count("gg*") for r in (0.0, 0.5, 1.0)]
    assert promoted == [0, 1, 3]
    offloaded = 40 * KIB
    plan = place_specs(specs, gpu=offloaded, gpu_margin_mem_ratio=0.0)
    assert tiers(plan) == ["cc"] * 10
    assert plan.rcache_blocks == 8  # what states may not take goes to the rCache


def test_auto_with_ranks_keeps_shards_of_promoted_chunks_on_the_gpu() -> None:
    plan = place_specs(layers(8), world_size=2, gpu=32 * KIB)
    assert tiers(plan)[0] == "gg"
    assert not any(c.is_persistent for c in plan.chunks)
    assert plan.rcache_blocks >= 1


def test_whole_shards_on_the_gpu_are_persistent() -> None:
    options = {"world_size": 2, "offload_optim_frac": 1.0}
    assert tiers(place_specs(layers(2), "const", **options)) == ["gc"] * 2
    assert tiers(place_specs(layers(2), "const", distributed_storage=False, **options)) == ["gc*"] * 2


def test_a_model_without_parameters_has_an_empty_plan() -> None:
    for policy in ("auto", "cpu", "cuda", "const"):
        plan = place_specs([], policy, gpu=100, cpu=0)
        assert (plan.chunks, plan.rcache_blocks) == ((), 0)


# The smallest rCache


def test_smallest_rcache_is_the_most_that_one_module_touches() -> None:
    packed = pack([spec("a.w", 1024), spec("b.w", 1024), spec("b.v", 1024), spec("c.w", 3000)], 1024, 1)
    accesses = (("a", ("a.w",)), ("b", ("b.w", "b.v")), ("c", ("c.w",)))
    everything = {0, 1, 2, 3}
    assert smallest_rcache(packed, accesses, 4096, everything) == (3, "c")
    assert smallest_rcache(packed, accesses, 4096, {0, 1, 2}) == (2, "b")
    assert smallest_rcache(packed, accesses, 4096, {0}) == (1, "a")
    assert smallest_rcache(packed, accesses, 4096, set()) == (0, "")


def test_parameters_of_enclosing_modules_are_in_use_too() -> None:
    packed = pack([spec("token", 1024), spec("block.scale", 1024), spec("block.lin.w", 1024)], 1024, 1)
    accesses = (("", ("token",)), ("block", ("block.scale",)), ("block.lin", ("block.lin.w",)))
    assert smallest_rcache(packed, accesses, 4096, {0, 1, 2}) == (3, "block.lin")


def test_a_parameter_of_no_known_module_counts_by_itself() -> None:
    packed = pack([spec("w", 4000)], 1024, 1)
    assert smallest_rcache(packed, (), 4096, {0}) == (1 if packed[0].nbytes <= 4096 else 4, "w")


# Limits


def test_gpu_error_says_how_much_for_which_module() -> None:
    specs = [*layers(3), spec("attention.w", 1024), spec("attention.v", 1024)]
    with pytest.raises(CapacityError) as caught:
        place_specs(specs, "cpu", gpu=15 * KIB, other=1 * KIB)
    text = str(caught.value)
    assert "needs 17.0 KiB on each rank" in text
    assert "2 blocks of 4.0 KiB for attention, 8.0 KiB" in text
    assert "gradients 8.0 KiB" in text
    assert "there are 15.0 KiB: 2.0 KiB too few" in text
    assert "gpu_memory_limit" in text


@pytest.mark.parametrize("policy", ["auto", "cpu"])
def test_the_smallest_gpu_that_works(policy: str) -> None:
    assert place_specs(layers(4), policy, gpu=12 * KIB).rcache_blocks == 1
    with pytest.raises(CapacityError, match="GPU memory"):
        place_specs(layers(4), policy, gpu=12 * KIB - 1)


def test_cuda_error_names_the_cure() -> None:
    with pytest.raises(CapacityError, match='placement_policy="auto" or "cpu", or more ranks'):
        place_specs(layers(4), "cuda", gpu=60 * KIB)


def test_host_error_says_what_would_fit() -> None:
    with pytest.raises(CapacityError) as caught:
        place_specs(layers(4), "cpu", cpu=16 * KIB)
    text = str(caught.value)
    assert "needs 64.0 KiB for each rank" in text
    assert "parameters 16.0 KiB; optimizer states 32.0 KiB; gradients 16.0 KiB" in text
    assert "there are 16.0 KiB" in text
    assert "about 1,024 of the 4,096 offloaded parameters" in text
    assert place_specs(layers(4), "cpu", cpu=64 * KIB).notes["host_bytes"] == 64 * KIB


def test_unknown_policy() -> None:
    with pytest.raises(PlanError, match="unknown placement policy 'gpu'; known are 'auto', 'cpu', 'cuda'"):
        place_specs(layers(1), "gpu")


@pytest.mark.parametrize(
    "option", ["shard_param_frac", "offload_optim_frac", "offload_param_frac", "gpu_margin_mem_ratio"]
)
@pytest.mark.parametrize("value", [-0.1, 1.01, float("nan")])
def test_fractions_outside_of_zero_to_one(option: str, value: float) -> None:
    with pytest.raises(PlanError, match=f"{option} must be between 0 and 1, got {value}"):
        place_specs(layers(1), "const", **{option: value})


# Predicted bytes


def test_bytes_of_mixed_precision_on_two_ranks() -> None:
    specs = layers(4, dtype="bfloat16")
    plan = place_specs(specs, "const", world_size=2, shard_param_frac=0.5, offload_optim_frac=0.25)
    assert tiers(plan) == ["gg*", "gg*", "gg", "gc"]
    half = 512  # elements of a shard
    expected = {
        "gpu_param_bytes": 2 * 1024 * 2 + 2 * half * 2,  # two replicas, two shards
        "gpu_state_bytes": 3 * half * 12,
        "gpu_grad_bytes": 3 * half * 2 + 2 * 1024 * 2,  # shards, and two blocks
        "rcache_bytes": 1024 * 2,
        "host_param_bytes": 0,
        "host_state_bytes": half * 12,
        "host_grad_bytes": half * 2,
        "padding_bytes": 0,
        "waste_bytes": 0,
    }
    assert {k: plan.notes[k] for k in expected} == expected


def test_whole_shards_on_the_host_are_not_divided() -> None:
    plan = place_specs(layers(2), "cpu", world_size=2, distributed_storage=False)
    assert plan.notes["host_param_bytes"] == 2 * 4096
    assert plan.notes["host_state_bytes"] == 2 * 4096  # two states, half of each
    assert not plan.is_storage_distributed


def account(plan: Plan, data: dict[str, ModelDataBytes], other: int) -> tuple[int, int]:
    """GPU and host bytes of one rank, counted anew from the plan alone."""
    world = plan.world_size
    gpu, host = other + plan.rcache_blocks * plan.block_bytes, 0
    for c in plan.chunks:
        shard = c.nbytes // (world if plan.is_storage_distributed else 1)
        if c.is_persistent:
            gpu += c.nbytes
        elif c.param_tier is Tier.GPU:
            gpu += shard
        if c.param_tier is Tier.CPU:
            host += shard
        if c.requires_grad:
            d = data[c.dtype]
            optim = c.numel // world * (d.grad + d.master + d.states)
            if c.optim_tier is Tier.GPU:
                gpu += optim
            else:
                host += optim
    grad_blocks = sorted((max(plan.block_bytes, c.nbytes) for c in plan.chunks if c.requires_grad), reverse=True)
    return gpu + sum(grad_blocks[:2]), host


def test_every_plan_keeps_its_promises() -> None:
    random = Random(21)
    plans = 0
    messages = []
    for _ in range(600):
        specs = random_specs(random, largest=9000)
        world_size = random.choice((1, 1, 2, 3))
        data = random.choice((MIXED, {d: ModelDataBytes.of(d, has_master=False) for d in DTYPE_BYTES}))
        total = sum(s.numel for s in specs) * 16 + 20_000
        gpu = random.choice((None, random.randint(1, total)))
        cpu = random.choice((None, random.randint(1, total * 2)))
        other = random.choice((0, 1000))
        policy = random.choice(("auto", "auto", "cpu", "cuda", "const"))
        options: dict[str, Any] = {
            "prefetch_depth": random.choice((0, 2)),
            "distributed_storage": random.random() < 0.8,
            "shard_param_frac": random.random(),
            "offload_optim_frac": random.random(),
            "offload_param_frac": random.choice((0.0, random.random())),
            "gpu_margin_mem_ratio": random.choice((None, random.random())),
        }
        arguments: dict[str, Any] = {
            "chunk_numel": random.randint(512, 8000),
            "world_size": world_size,
            "gpu": gpu,
            "cpu": cpu,
            "other": other,
            "data": data,
            **options,
        }
        try:
            plan = place_specs(specs, policy, **arguments)
        except CapacityError as error:
            assert gpu is not None or cpu is not None
            messages.append(str(error))
            continue
        plans += 1
        assert place_specs(specs, policy, **arguments) == plan  # equal arguments, equal plans
        assert plan_from_dict(plan_to_dict(plan)) == plan  # which also checks what the runtime relies on
        used_gpu, used_host = account(plan, data, other)
        assert (plan.notes["gpu_bytes"], plan.notes["host_bytes"]) == (used_gpu, used_host)
        assert gpu is None or used_gpu <= gpu
        assert cpu is None or used_host <= cpu
        managed = {c.id for c in plan.chunks if not c.is_persistent}
        packed = [PackedChunk(c.dtype, c.requires_grad, c.numel, c.members) for c in plan.chunks]
        smallest, _ = smallest_rcache(packed, accesses_of(specs), plan.block_bytes, managed)
        everything = sum(plan.blocks_of(i) for i in managed)
        assert smallest <= plan.rcache_blocks <= everything
        for c in plan.chunks:
            # A shard that is the replica must not be dropped with it.
            if c.param_tier is Tier.GPU and (world_size == 1 or not plan.is_storage_distributed):
                assert c.is_persistent
    assert plans > 100
    assert len(messages) > 100
    assert all(re.search(r"needs [\d.]+ \w+", m) for m in messages)


def test_more_gpu_memory_never_offloads_more() -> None:
    random = Random(22)
    for _ in range(40):
        specs = [replace(s, requires_grad=True) for s in random_specs(random, largest=9000)]
        total = int(place_specs(specs, "cuda", chunk_numel=4000).notes["gpu_bytes"])
        host = None
        for gpu in [*range(0, total, total // 25), total]:
            try:
                plan = place_specs(specs, chunk_numel=4000, gpu=gpu)
            except CapacityError:
                assert host is None  # what fits in less, fits in more
                continue
            now = int(plan.notes["host_bytes"])
            assert host is None or now <= host
            host = now
        assert host == 0


def test_format_bytes() -> None:
    assert [format_bytes(b) for b in (0, 1023, 1536, 5 * 2**20, 2**40)] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 MiB", "1.0 TiB",
    ]  # fmt: skip
