"""Plans whose parameters get other dtypes; names, globs and what was nearly meant."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from lightning_elixir.errors import PlanError
from lightning_elixir.plan.io import plan_from_dict, plan_to_dict
from lightning_elixir.plan.kept_dtypes import kept_in, with_dtypes, with_kept
from lightning_elixir.plan.packing import pack, regular_block_bytes
from lightning_elixir.plan.selection import entries_of, matching, near_misses
from lightning_elixir.plan.types import ALIGN_NUMEL, ChunkSpec, Plan, Tier, UpdateTiming
from tests.plan.models import random_specs, spec


def plan_of(specs: list, world_size: int = 1, chunk_numel: int = 4096, **options: object) -> Plan:  # type: ignore[type-arg]
    packed = pack(specs, chunk_numel, world_size)
    chunks = tuple(
        ChunkSpec(i, c.dtype, c.requires_grad, c.numel, c.members, Tier.CPU, Tier.CPU, False)
        for i, c in enumerate(packed)
    )
    return Plan(world_size, "bfloat16", regular_block_bytes(packed, chunk_numel, world_size), 2, 1, chunks, **options)  # type: ignore[arg-type]


def half(*names: str, numel: int = 600) -> list:  # type: ignore[type-arg]
    return [spec(name, numel, dtype="bfloat16") for name in names]


def layout(plan: Plan) -> list[tuple[str, list[str]]]:
    return [(c.dtype, [m.fqn for m in c.members]) for c in plan.chunks]


def test_kept_parameters_get_chunks_of_their_own() -> None:
    plan = plan_of(half("a", "norm1", "b", "norm2", "c", "d"))
    assert layout(plan) == [("bfloat16", ["a", "norm1", "b", "norm2"]), ("bfloat16", ["c", "d"])]
    kept = with_kept(plan, {"norm1", "norm2", "c", "unknown"}, is_exact=False)
    assert layout(kept) == [
        ("bfloat16", ["a", "b"]),
        ("float32", ["norm1", "norm2"]),  # as many bytes as a block
        ("bfloat16", ["d"]),
        ("float32", ["c"]),
    ]
    assert [c.id for c in kept.chunks] == [0, 1, 2, 3]
    assert [m.offset for m in kept.chunks[1].members] == [0, 1024]
    assert [c.numel for c in kept.chunks] == [2048, 2048, 1024, 1024]
    assert kept.rcache_blocks == 3
    assert kept_in(kept) == {"norm1", "norm2", "c"}
    assert plan_from_dict(plan_to_dict(kept)) == kept  # which checks what the runtime relies on


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_changes_its_dtype_has_no_spare_states(is_kept: bool) -> None:
    """In fp32 there is no master, and for others the plan has counted no memory."""
    plan = plan_of(half("a", "norm1", "b", "norm2", "c", "d"), update_timing=UpdateTiming.INSIDE_BACKWARD)
    if not is_kept:
        plan = with_kept(plan, {"norm1"}, is_exact=False)  # which comes back to 16 bits
    chunks = tuple(replace(c, has_spare_states=c.dtype == "bfloat16") for c in plan.chunks)
    plan = replace(plan, chunks=chunks)
    found = with_kept(plan, {"norm1"} if is_kept else (), is_exact=True)
    spared = {m.fqn: c.has_spare_states for c in found.chunks for m in c.members}
    assert spared == dict.fromkeys("abcd", True) | {"norm1": False, "norm2": True}
    assert plan_from_dict(plan_to_dict(found)) == found


def test_nothing_changes_where_all_is_as_wanted() -> None:
    plan = plan_of(half("a", "b"))
    assert with_kept(plan, (), is_exact=True) is plan
    kept = with_kept(plan, {"a"}, is_exact=False)
    assert with_kept(kept, {"a"}, is_exact=True) is kept
    assert with_kept(kept, (), is_exact=False) is kept
    assert kept_in(with_kept(kept, (), is_exact=True)) == set()
    full = replace(plan_of([spec("a", 600)]), compute_dtype="float32")
    assert with_kept(full, {"a"}, is_exact=True) is full
    assert kept_in(full) == set()


@pytest.mark.parametrize("dtype", ["complex64", "uint8", "float8_e4m3fn", "int64"])
def test_what_no_precision_casts_is_not_kept_as_fp32(dtype: str) -> None:
    """Quantised weights and complex numbers, which a name such as "*" stands for as well."""
    frozen = replace(spec("frozen", 600, dtype=dtype), requires_grad=False)
    plan = plan_of([*half("a", "b"), frozen])
    found = with_kept(plan, {"a", "b", "frozen"}, is_exact=False)
    assert {name: of for of, names in layout(found) for name in names} == {
        "a": "float32",
        "b": "float32",
        "frozen": dtype,
    }
    assert with_kept(found, {"frozen"}, is_exact=True) == with_kept(plan, (), is_exact=True)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_parameter_stays_once_on_its_tier(world_size: int) -> None:
    random = Random(5)
    for _ in range(60):
        specs = [replace(s, dtype="bfloat16") for s in random_specs(random, largest=6000)]
        plan = plan_of(specs, world_size)
        plan = replace(
            plan,
            chunks=tuple(
                replace(c, param_tier=random.choice(list(Tier)[:2]), is_persistent=random.random() < 0.3)
                for c in plan.chunks
            ),
        )
        kept = {s.fqn for s in specs if random.random() < 0.4}
        found = with_kept(plan, kept, is_exact=True)
        home = {m.fqn: c for c in found.chunks for m in c.members}
        assert sorted(home) == sorted(s.fqn for s in specs)
        assert kept_in(found) == kept
        for chunk in plan.chunks:
            for member in chunk.members:
                new = home[member.fqn]
                assert (new.requires_grad, new.param_tier, new.is_persistent) == (
                    chunk.requires_grad,
                    chunk.param_tier,
                    chunk.is_persistent,
                )
        for index, chunk in enumerate(found.chunks):
            assert chunk.id == index
            assert chunk.numel % (world_size * ALIGN_NUMEL) == 0
            ends = [0, *(m.offset + m.numel for m in chunk.members)]
            assert all(
                m.offset >= end and m.offset % ALIGN_NUMEL == 0 for m, end in zip(chunk.members, ends, strict=False)
            )
            assert chunk.numel >= ends[-1]


def test_the_placement_is_kept_but_not_what_was_predicted() -> None:
    plan = replace(plan_of(half("a", "b")), notes={"gpu_bytes": 1}, prefetch_depth=5)
    found = with_dtypes(plan, {"b": "float32"})
    assert found.notes == {}
    assert found.prefetch_depth == 5


def test_chunks_of_another_dtype_have_as_many_bytes() -> None:
    specs = [*half(*"abcdef"), *(spec(name, 600) for name in "uvwxyz")]
    packed = pack(specs, 4096, 1, "bfloat16")
    assert [c.nbytes for c in packed] == [8192, 4096, 8192, 8192, 8192]
    assert regular_block_bytes(packed, 4096, 1, "bfloat16") == 8192
    assert regular_block_bytes(pack(specs, 4096, 1), 4096, 1) == 16384  # in elements, as without a compute dtype


def test_names_and_globs() -> None:
    names = ["head.weight", "layers.0.mlp.gate.weight", "layers.1.mlp.gate.weight", "odd[0].weight"]
    assert matching("head.weight", names) == ["head.weight"]
    assert matching("*.gate.*", names) == names[1:3]
    assert matching("layers.?.mlp*", names) == names[1:3]
    assert matching("odd[0].weight", names) == ["odd[0].weight"]
    assert matching("head", names) == []
    assert near_misses("head", ["model.head", "head.weight", "model.tail"])[0] == "model.head"
    assert near_misses("model.haed", ["model.head", "tail"]) == ["model.head"]
    assert near_misses("net.model.head", ["model.head"]) == ["model.head"]
    assert near_misses("*.rooter", ["layers.0.router", "layers.1.router"]) == ["layers.0.router"]
    assert near_misses("zzz", ["model.head"]) == []


def test_entries() -> None:
    assert entries_of("keep_fp32", "head") == ("head",)
    assert entries_of("keep_fp32", [int, "x"]) == (int, "x")
    assert entries_of("keep_fp32", ()) == ()
    with pytest.raises(PlanError, match=r"keep_fp32 takes names .* got 3"):
        entries_of("keep_fp32", ["x", 3])
