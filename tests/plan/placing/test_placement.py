from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.io import plan_from_dict, plan_to_dict
from lightning_elixir.plan.memory import (
    NVME_BUFFER_BYTES,
    NVME_BUFFERS,
    Scheme,
    memory_use,
    nvme_buffers,
)
from lightning_elixir.plan.packing import PackedChunk, pack
from lightning_elixir.plan.placing.placement import Needs, place, with_states_on_nvme
from lightning_elixir.plan.problem import PlacementRequest, Problem
from lightning_elixir.plan.regime import ModelDataBytes, StateCount, states_of
from lightning_elixir.plan.shard_segments import segments_of
from lightning_elixir.plan.simulator.cost import Costs
from lightning_elixir.plan.simulator.timeline import scheme_of
from lightning_elixir.plan.types import ChunkSpec, ParamSpec, Plan, Tier
from lightning_elixir.plan.units import format_bytes
from tests.helpers.tiers import full
from tests.plan.models import accesses_of, random_specs, spec
from tests.plan.problems import KIB, MIXED, layers, layout_of, place_specs, tiers, with_spares


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


# Several optimizers


def test_of_several_optimizers_the_one_that_keeps_the_most_counts_and_the_parameters_of_others() -> None:
    adam, muon, in_8_bits = StateCount(2), StateCount(1), StateCount(0, 3)
    assert states_of([(muon, ["b", "a"]), (adam, ["c"]), (adam, ["d"])]) == (adam, (("a", muon), ("b", muon)))
    assert states_of([(in_8_bits, ["a"]), (muon, ["b"])]) == (muon, (("a", in_8_bits),))
    assert states_of([(adam, ["a"])]) == (adam, ())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("master", [True, False])
def test_each_parameters_states_are_those_of_its_optimizer(world_size: int, master: bool) -> None:
    counts = (StateCount(2), StateCount(1), StateCount(0, 3))
    is_mixed = False
    for seed in range(20):
        specs = random_specs(Random(seed), mixed=False)
        of = {s.fqn: counts[Random(f"{seed} {s.fqn}").randrange(3)] for s in specs}
        regime = replace(MIXED, master_weights=master, other_states=tuple(o for o in of.items() if o[1] != counts[0]))
        plan = place_specs(specs, "cpu", chunk_numel=20_000, world_size=world_size, regime=regime)
        scheme = scheme_of(plan, regime)
        for chunk in plan.chunks:
            fullest = max((of[m.fqn].nbytes(4) for m in chunk.members), default=8)
            is_mixed |= len({of[m.fqn] for m in chunk.members}) > 1
            taken = []
            for rank in range(world_size):
                own = segments_of(chunk, rank, world_size)
                padding = chunk.numel // world_size - sum(s.numel for s in own)
                taken.append(padding * fullest + sum(s.numel * of[s.fqn].nbytes(4) for s in own))
            assert scheme.state_bytes(chunk) == max(taken)
        held = sum(map(scheme.state_bytes, plan.chunks))
        assert plan.notes["host_state_bytes"] == held
    assert is_mixed


def test_fewer_states_fit_where_more_do_not_and_are_told() -> None:
    specs = layers(8)
    regime = replace(MIXED, other_states=tuple((s.fqn, StateCount(1)) for s in specs[2:]))
    host_bytes = 8 * 8 * KIB + (2 * 2 + 6) * 4 * KIB  # parameters and gradients; states
    plan = place_specs(specs, "cpu", cpu=host_bytes, regime=regime)
    assert plan.notes["host_state_bytes"] == 40 * KIB
    assert f"host_state_bytes: {format_bytes(40 * KIB)}" in plan.explain()
    for limit, of in ((host_bytes, MIXED), (host_bytes - 1, regime)):
        with pytest.raises(CapacityError) as caught:
            place_specs(specs, "cpu", cpu=limit, regime=of)
        assert f"optimizer states {format_bytes((64 if of is MIXED else 40) * KIB)}" in str(caught.value)


def test_updates_in_host_memory_read_and_write_fewer_states() -> None:
    plan = place_specs(layers(2), "cpu")
    regime = replace(MIXED, other_states=(("l1.w", StateCount(1)),))
    costs = Costs(HardwareSpec.nominal(), scheme_of(plan, regime))
    adam, muon = map(costs.update_traffic_bytes, plan.chunks)
    assert adam - muon == 2 * 4 * KIB


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


def test_auto_is_searched_for() -> None:
    layout = layout_of(layers(1))
    with pytest.raises(PlanError, match="policy 'auto' is searched for, not placed"):
        place(layout, Problem(PlacementRequest(policy="auto")))


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
    assert plan.notes["host_state_bytes"] == (4 + 8) * 1024  # with the host's own copy of what is on the GPU
    assert plan.notes["host_param_bytes"] == 2 * 4 * 1024


def test_whole_shards_on_the_gpu_are_persistent() -> None:
    options = {"world_size": 2, "offload_optim_frac": 1.0}
    assert tiers(place_specs(layers(2), "const", **options)) == ["gc"] * 2
    assert tiers(place_specs(layers(2), "const", distributed_storage=False, **options)) == ["gc*"] * 2


def test_a_model_without_parameters_has_an_empty_plan() -> None:
    for policy in ("auto", "cpu", "cuda", "const"):
        plan = place_specs([], policy, gpu=100, cpu=0)
        assert (plan.chunks, plan.rcache_blocks) == ((), 0)


# The smallest rCache


def smallest(
    specs: list[ParamSpec],
    accesses: tuple[tuple[str, tuple[str, ...]], ...],
    managed: set[int],
    block_bytes: int = 4096,
) -> tuple[int, str]:
    return Needs(pack(specs, 1024, 1), accesses, block_bytes).smallest(managed)


def test_smallest_rcache_is_the_most_that_one_module_touches() -> None:
    specs = [spec("a.w", 1024), spec("b.w", 1024), spec("b.v", 1024), spec("c.w", 3000)]
    accesses = (("a", ("a.w",)), ("b", ("b.w", "b.v")), ("c", ("c.w",)))
    assert smallest(specs, accesses, {0, 1, 2, 3}) == (3, "c")
    assert smallest(specs, accesses, {0, 1, 2}) == (2, "b")
    assert smallest(specs, accesses, {0}) == (1, "a")
    assert smallest(specs, accesses, set()) == (0, "")
    assert Needs(pack(specs, 1024, 1), accesses, 4096).all_blocks({0, 3}) == 4


def test_parameters_of_enclosing_modules_are_in_use_too() -> None:
    specs = [spec("token", 1024), spec("block.scale", 1024), spec("block.lin.w", 1024)]
    accesses = (("", ("token",)), ("block", ("block.scale",)), ("block.lin", ("block.lin.w",)))
    assert smallest(specs, accesses, {0, 1, 2}) == (3, "block.lin")
    assert smallest(specs, accesses, {0, 2}) == (2, "block.lin")


def test_a_parameter_of_no_known_module_counts_by_itself() -> None:
    assert smallest([spec("w", 4000)], (), {0}) == (4, "w")
    assert smallest([spec("w", 4000)], (), {0}, block_bytes=16384) == (1, "w")


# Limits


def test_gpu_error_says_how_much_for_which_module() -> None:
    specs = [*layers(3), spec("attention.w", 1024), spec("attention.v", 1024)]
    with pytest.raises(CapacityError) as caught:
        place_specs(specs, "cpu", gpu=15 * KIB, other=1 * KIB)
    text = str(caught.value)
    assert "needs 17.0 KiB on each rank" in text
    assert "2 blocks of 4.0 KiB for attention, 8.0 KiB" in text
    assert "gradients and their blocks 8.0 KiB" in text
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
    assert "about 1,024 of the 4,096 parameters in host memory. Keep optimizer states on a disk (nvme_offload_" in text
    assert "), or keep more on the GPU, or make the model smaller, or take an optimizer with fewer states, or" in text
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
        "gpu_param_bytes": 2 * 1024 * 2 + half * 2,  # two replicas; one shard, as the other is cast from its master
        "gpu_state_bytes": 3 * half * 12,
        # Shards; two blocks and one that waits for the other rank; a slice on its way to the host.
        "gpu_grad_bytes": 3 * half * 2 + 3 * 1024 * 2 + half * 2,
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


def is_cast(plan: Plan, chunk: ChunkSpec, data: Mapping[str, ModelDataBytes]) -> bool:
    """Whether a chunk's replicas are made from a master on the device, so that it has no shard beside that."""
    is_near = chunk.requires_grad and chunk.optim_tier is Tier.GPU and data[chunk.dtype].master > 0
    return is_near and (plan.is_storage_distributed or plan.world_size == 1)


def account(plan: Plan, data: Mapping[str, ModelDataBytes], other: int) -> tuple[int, int, int]:
    """GPU bytes with gradients, GPU bytes without, and host bytes of one rank, counted anew from the plan alone."""
    world = plan.world_size
    gpu, grads, host = other + plan.rcache_blocks * plan.block_bytes, 0, 0
    for c in plan.chunks:
        shard = c.nbytes // (world if plan.is_storage_distributed else 1)
        if c.is_persistent:
            gpu += c.nbytes
        elif c.param_tier is Tier.GPU and not is_cast(plan, c, data):
            gpu += shard
        if c.param_tier is Tier.CPU:
            host += shard
        if c.requires_grad:
            d = data[c.dtype]
            master = d.master or (d.compute if c.param_tier is not c.optim_tier else 0)
            states, grad = c.numel // world * (master + d.states), c.numel // world * d.grad
            if c.optim_tier is Tier.GPU:
                gpu += states
                grads += grad
            else:
                host += states + grad
    # Where the states are on the device of a rank alone, the block is the gradient shard.
    apart = [c for c in plan.chunks if c.requires_grad and (world > 1 or c.optim_tier is not Tier.GPU)]
    grad_blocks = sorted((max(plan.block_bytes, c.nbytes) for c in apart), reverse=True)
    num_kinds = len({c.dtype for c in apart})  # each fills up a block of its own
    gpu += sum(grad_blocks[: 1 + max(1, num_kinds) + (world > 1)])  # one waits for other ranks
    if world > 1:  # slices on their way to the host
        sent = (c.nbytes // world for c in plan.chunks if c.requires_grad and c.optim_tier is not Tier.GPU)
        gpu += sum(sorted(sent, reverse=True)[:2])
    return gpu + grads, gpu, host


@pytest.mark.parametrize("num_plans", [full(600), 200])
def test_every_plan_keeps_its_promises(num_plans: int) -> None:
    random = Random(21)
    plans = 0
    messages = []
    for _ in range(num_plans):
        specs = random_specs(random, largest=9000)
        world_size = random.choice((1, 1, 2, 3))
        regime = random.choice((MIXED, replace(MIXED, master_weights=False)))
        total = sum(s.numel for s in specs) * 16 + 20_000
        gpu = random.choice((None, random.randint(1, total)))
        cpu = random.choice((None, random.randint(1, total * 2)))
        other = random.choice((0, 1000))
        policy = random.choice(("auto", "cpu", "cuda", "const", "const"))
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
            "regime": regime,
            **options,
        }
        try:
            plan = place_specs(specs, policy, **arguments)
        except CapacityError as error:
            assert gpu is not None or cpu is not None
            messages.append(str(error))
            continue
        plans += 1
        assert plan_from_dict(plan_to_dict(plan)) == plan  # which also checks what the runtime relies on
        at_once, without_grads, used_host = account(plan, regime.data_bytes, other)
        used_gpu = int(plan.notes["gpu_bytes"])
        assert plan.notes["host_bytes"] == used_host
        if policy == "auto":  # a step is looked at moment by moment: when all gradients are there, activations are gone
            assert without_grads <= used_gpu <= at_once
        else:
            assert used_gpu == at_once
        assert gpu is None or used_gpu <= gpu
        assert cpu is None or used_host <= cpu
        managed = {c.id for c in plan.chunks if not c.is_persistent}
        packed = [PackedChunk(c.dtype, c.requires_grad, c.numel, c.members) for c in plan.chunks]
        needed, _ = Needs(packed, accesses_of(specs), plan.block_bytes).smallest(managed)
        everything = sum(plan.blocks_of(i) for i in managed)
        assert needed <= plan.rcache_blocks <= everything
        for c in plan.chunks:
            # A shard that is the replica must not be dropped with it.
            if c.param_tier is Tier.GPU and (world_size == 1 or not plan.is_storage_distributed):
                assert c.is_persistent
    assert plans > num_plans // 6
    assert len(messages) > num_plans // 6
    assert all(re.search(r"needs [\d.]+ \w+", m) for m in messages)


def test_format_bytes() -> None:
    assert [format_bytes(b) for b in (0, 1023, 1536, 5 * 2**20, 2**40, 3 * 2**50)] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 MiB", "1.0 TiB", "3072.0 TiB",
    ]  # fmt: skip
    assert [format_bytes(b, is_rounded_up=True) for b in (1023, 1536, 1537, 5 * 2**20 + 1)] == [
        "1023 B", "1.5 KiB", "1.6 KiB", "5.1 MiB",
    ]  # fmt: skip


# States on NVMe


def chunks_of(count: int, **options: Any) -> tuple[ChunkSpec, ...]:
    return place_specs(layers(count), "const", **{"offload_optim_frac": 1.0, **options}).chunks


def on_nvme(chunks: Sequence[ChunkSpec]) -> list[int]:
    return [c.id for c in chunks if c.optim_tier is Tier.NVME]


@pytest.mark.parametrize(
    ("fraction", "chosen"),
    [(0.0, []), (0.12, []), (0.13, [3]), (0.5, [2, 3]), (0.62, [2, 3]), (0.88, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3])],
)
def test_the_last_chunks_go_to_nvme(fraction: float, chosen: list[int]) -> None:
    assert on_nvme(with_states_on_nvme(chunks_of(4), fraction)) == chosen


def test_nvme_takes_a_share_of_the_elements() -> None:
    specs = [spec("a.w", 1024), spec("b.w", 3 * 1024), spec("c.w", 1024), spec("d.w", 3 * 1024)]
    chunks = place_specs(specs, "cpu").chunks
    assert on_nvme(with_states_on_nvme(chunks, 0.5)) == [2, 3]  # 4 of 8
    assert on_nvme(with_states_on_nvme(chunks, 0.3)) == [3]


def test_nvme_takes_only_states_in_host_memory() -> None:
    frozen = replace(chunks_of(1)[0], requires_grad=False)
    on_gpu = chunks_of(1, offload_optim_frac=0.0)[0]
    streamed = replace(chunks_of(1)[0], is_update_streamed=True)
    chunks = tuple(replace(c, id=i) for i, c in enumerate((streamed, frozen, on_gpu)))
    moved = with_states_on_nvme(chunks, 1.0)
    assert on_nvme(moved) == [0]
    assert not moved[0].is_update_streamed
    assert moved[1:] == chunks[1:]


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_share_on_nvme_out_of_range_raises(fraction: float) -> None:
    with pytest.raises(PlanError, match="nvme_offload_fraction must be between 0 and 1"):
        with_states_on_nvme(chunks_of(2), fraction)
    with pytest.raises(PlanError, match="nvme_offload_fraction must be between 0 and 1"):
        place_specs(layers(2), "cpu", nvme_offload_fraction=fraction)


def test_policies_send_their_share_to_nvme_and_count_the_buffers() -> None:
    plan = place_specs(layers(8), "cpu", nvme_offload_fraction=0.5)
    assert tiers(plan) == ["cc"] * 4 + ["cn"] * 4
    assert plan.notes["nvme_bytes"] == 4 * 8 * KIB
    assert plan.notes["host_buffer_bytes"] == NVME_BUFFERS * 8 * KIB
    assert plan.notes["host_state_bytes"] == 4 * 8 * KIB
    assert plan.notes["host_bytes"] == 8 * (4 + 4) * KIB + (4 + NVME_BUFFERS) * 8 * KIB


def test_host_memory_has_to_hold_the_buffers() -> None:
    needed = 8 * (4 + 4) * KIB + NVME_BUFFERS * 8 * KIB
    assert tiers(place_specs(layers(8), "cpu", nvme_offload_fraction=1.0, cpu=needed)) == ["cn"] * 8
    advice = (
        r"What would fit is about [78],\d{3} of the 8,192 parameters in .* \(nvme_offload_param_fraction\), or keep"
    )
    with pytest.raises(CapacityError, match=r"host memory.*buffers for states on NVMe 24\.0 KiB.*" + advice):
        place_specs(layers(8), "cpu", nvme_offload_fraction=1.0, cpu=needed - 1)


def test_where_all_is_on_the_disk_a_smaller_chunk_size_is_what_helps() -> None:
    everything = {"nvme_offload_fraction": 1.0, "nvme_offload_param_fraction": 1.0}
    with pytest.raises(CapacityError, match=r"there are 20\.0 KiB\. Take a smaller chunk_size .*, or make the model"):
        place_specs(layers(8), "cpu", cpu=20 * KIB, **everything)


def test_buffers_are_as_large_as_the_largest_and_no_more_than_chunks() -> None:
    assert nvme_buffers([]) == (0, 0)
    assert nvme_buffers([5, 9]) == (2, 9)
    assert nvme_buffers(iter([1, 2, 3, 4])) == (NVME_BUFFERS, 4)
    assert nvme_buffers([NVME_BUFFER_BYTES + 1]) == (2, NVME_BUFFER_BYTES)  # in two pieces
    assert nvme_buffers([100 * NVME_BUFFER_BYTES]) == (NVME_BUFFERS, NVME_BUFFER_BYTES)


def test_spare_states_take_fourteen_bytes_a_parameter() -> None:
    """A master, two moments, and the new values in 16 bits; nothing where the states are on the device."""
    scheme = Scheme(1, True, 4 * KIB, MIXED)
    specs = [spec("a", 1024, dtype="bfloat16")]
    for policy, nbytes in (("cpu", 14 * 1024), ("cuda", 0)):
        chunks = with_spares(place_specs(specs, policy).chunks, scheme, None)
        assert memory_use(chunks, 0, scheme).host_spare_bytes == nbytes
