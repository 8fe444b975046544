from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest

from lightning_elixir.errors import PlanError
from lightning_elixir.plan.packing import (
    MIN_CHUNK_BYTES,
    candidate_chunk_numels,
    chunk_capacity,
    pack,
    padding_bytes,
    regular_block_bytes,
    round_up,
    search_chunk_numel,
    waste_bytes,
)
from lightning_elixir.plan.types import ALIGN_NUMEL, DTYPE_BYTES, ParamSpec
from tests.plan.models import random_specs, spec

MIB = 2**20


def names(packed: tuple[object, ...]) -> list[list[str]]:
    return [[m.fqn for m in c.members] for c in packed]  # type: ignore[attr-defined]


# Packing


def test_parameters_join_the_open_chunk_of_their_kind() -> None:
    specs = [
        spec("a", 600),
        spec("frozen", 10, requires_grad=False),
        spec("b", 300),
        spec("half", 10, dtype="bfloat16"),
        spec("c", 600),
        spec("frozen2", 10, requires_grad=False),
        spec("d", 512),
    ]
    packed = pack(specs, 2048, world_size=1)
    assert names(packed) == [["a", "b"], ["frozen", "frozen2"], ["half"], ["c", "d"]]
    assert [m.offset for m in packed[0].members] == [0, 1024]
    assert [c.numel for c in packed] == [1536, 1024, 512, 1536]


def test_a_closed_chunk_is_not_opened_again() -> None:
    packed = pack([spec("a", 512), spec("b", 1024), spec("c", 512)], 1024, world_size=1)
    assert names(packed) == [["a"], ["b"], ["c"]]


def test_a_large_parameter_has_a_chunk_of_its_own() -> None:
    packed = pack([spec("a", 512), spec("large", 5000), spec("b", 512)], 1024, world_size=1)
    assert names(packed) == [["a", "b"], ["large"]]
    assert packed[1].numel == 5120


def test_no_parameters_make_no_chunks() -> None:
    assert pack([], 1024, world_size=2) == ()
    assert waste_bytes((), 4096) == padding_bytes(()) == 0
    assert regular_block_bytes((), 1024, 1) > 0


def test_a_chunk_of_empty_parameters_has_a_size() -> None:
    (chunk,) = pack([spec("a", 0), spec("b", 2, 0)], 1024, world_size=3)
    assert chunk.numel == 3 * ALIGN_NUMEL
    assert [(m.numel, m.offset) for m in chunk.members] == [(0, 0), (0, 0)]


def test_an_empty_parameter_fits_into_a_full_chunk() -> None:
    (chunk,) = pack([spec("a", 1024), spec("b", 0)], 1024, world_size=1)
    assert [(m.offset, m.numel) for m in chunk.members] == [(0, 1024), (1024, 0)]


def test_packing_properties() -> None:
    random = Random(11)
    for _ in range(400):
        specs = random_specs(random)
        world_size = random.choice((1, 2, 3, 8))
        chunk_numel = random.choice((1, 511, 512, 4096, random.randint(1, 50_000)))
        capacity = chunk_capacity(chunk_numel, world_size)
        packed = pack(specs, chunk_numel, world_size)
        by_name = {s.fqn: s for s in specs}
        placed = [m.fqn for c in packed for m in c.members]
        assert sorted(placed) == sorted(by_name)  # everything once
        order = {s.fqn: i for i, s in enumerate(specs)}
        firsts = [order[c.members[0].fqn] for c in packed]
        assert firsts == sorted(firsts)
        for chunk in packed:
            assert chunk.numel % (world_size * ALIGN_NUMEL) == 0
            assert chunk.numel <= capacity or len([m for m in chunk.members if m.numel]) == 1
            end = 0
            for member in chunk.members:
                s = by_name[member.fqn]
                assert (s.shape, s.dtype, s.requires_grad) == (member.shape, chunk.dtype, chunk.requires_grad)
                assert member.offset % ALIGN_NUMEL == 0
                assert member.offset >= end
                end = member.offset + member.numel
            assert end <= chunk.numel < max(1, end) + world_size * ALIGN_NUMEL + ALIGN_NUMEL
            assert [order[m.fqn] for m in chunk.members] == sorted(order[m.fqn] for m in chunk.members)
        assert pack(specs, chunk_numel, world_size) == packed


def test_waste_is_blocks_minus_parameters() -> None:
    random = Random(12)
    for _ in range(200):
        specs = random_specs(random)
        world_size = random.choice((1, 2, 3))
        chunk_numel = random.randint(1, 50_000)
        packed = pack(specs, chunk_numel, world_size)
        used = sum(s.numel * DTYPE_BYTES[s.dtype] for s in specs)
        assert padding_bytes(packed) == sum(c.numel * DTYPE_BYTES[c.dtype] for c in packed) - used
        block_bytes = regular_block_bytes(packed, chunk_numel, world_size)
        blocks = sum(-(-c.nbytes // block_bytes) for c in packed)
        assert waste_bytes(packed, block_bytes) == blocks * block_bytes - used


def test_a_block_holds_every_regular_chunk() -> None:
    specs = [spec("a", 900), spec("b", 300), spec("large", 9000), spec("half", 900, dtype="bfloat16")]
    packed = pack(specs, 1024, world_size=1)
    assert regular_block_bytes(packed, 1024, 1) == 4 * 1024
    only_large = pack([spec("x", 5000), spec("y", 9000)], 1024, world_size=1)
    assert regular_block_bytes(only_large, 1024, 1) == only_large[0].nbytes


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([spec("w", 1), spec("w", 1)], "w is listed twice"),
        ([spec("w", 1, dtype="quint8")], "w has dtype quint8; supported are float64"),
    ],
)
def test_bad_parameters(specs: list[ParamSpec], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        pack(specs, 1024, 1)


def test_bad_sizes() -> None:
    with pytest.raises(PlanError, match="chunk_numel and world_size must be at least 1, got 0 and 1"):
        pack([spec("w", 1)], 0, 1)
    for option, value, message in (
        ("search_range_bytes", -1, "chunk_search_range must be at least 0, got -1"),
        ("n_grids", 0, "chunk_search_n_grids must be at least 1, got 0"),
        ("min_chunk_bytes", 0, "min_chunk_size must be at least 1, got 0"),
    ):
        with pytest.raises(PlanError, match=message):
            search_chunk_numel([spec("w", 1)], 1, **{option: value})  # type: ignore[arg-type]


# Search


def by_trying_all(specs: list[ParamSpec], world_size: int, candidates: range) -> int:
    """The candidate with the least waste, from real packings."""

    def waste(numel: int) -> int:
        packed = pack(specs, numel, world_size)
        return waste_bytes(packed, regular_block_bytes(packed, numel, world_size))

    return min(candidates, key=waste)


def test_search_finds_the_least_waste_and_the_smallest_of_equals() -> None:
    random = Random(13)
    for _ in range(25):
        specs = [s for s in random_specs(random, largest=4000) if s.numel]
        if not specs:
            continue
        world_size = random.choice((1, 2, 3))
        step = world_size * ALIGN_NUMEL
        total = sum(round_up(s.numel, ALIGN_NUMEL) for s in specs)
        smallest = round_up(max(1024, *(s.numel for s in specs)), step)
        largest = round_up(min(smallest + 20_000, max(smallest, total // 4)), step)
        found = search_chunk_numel(
            specs, world_size, search_range_bytes=4 * 20_000, n_grids=100_000, min_chunk_bytes=4 * smallest
        )
        assert found == by_trying_all(specs, world_size, range(smallest, largest + 1, step))


def test_search_prefers_a_size_that_the_layers_fill() -> None:
    # Parameters of 6 and 5 MiB in turn: three of each fill 33 MiB, and no candidate near it leaves less.
    specs = [spec(f"{i}.{name}", mib * MIB // 4) for i in range(60) for name, mib in (("a", 6), ("b", 5))]
    numel = search_chunk_numel(specs, 1)
    packed = pack(specs, numel, 1)
    assert regular_block_bytes(packed, numel, 1) == 33 * MIB
    assert waste_bytes(packed, 33 * MIB) == 0


def test_search_starts_at_the_largest_parameter() -> None:
    specs = [spec(f"l{i}", 4 * MIB) for i in range(40)] + [spec("embedding", 30 * MIB)]
    assert search_chunk_numel(specs, 1) >= 30 * MIB


def test_search_respects_the_smallest_size_of_large_models_and_of_the_user() -> None:
    large = [spec(f"l{i}", MIB) for i in range(500)]
    assert search_chunk_numel(large, 1) * 4 >= MIN_CHUNK_BYTES
    assert search_chunk_numel(large, 1, min_chunk_bytes=100 * MIB) * 4 >= 100 * MIB
    small = [spec(f"l{i}", 1000) for i in range(500)]
    assert search_chunk_numel(small, 1, min_chunk_bytes=3 * MIB) * 4 >= 3 * MIB


@pytest.mark.parametrize("layers", [8, 24, 200])
def test_a_small_model_still_gets_several_chunks(layers: int) -> None:
    specs = [spec(f"{i}.{name}", 64, 64) for i in range(layers) for name in "abc"]
    packed = pack(specs, search_chunk_numel(specs, 1), 1)
    assert 4 <= len(packed) <= 16


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "specs",
    [
        [],
        [spec("nothing", 0)],
        [spec("scalar")],
        [spec("a", 1), spec("b", 2)],
        [spec("huge", 12288, 50272)],
        [spec("huge", 2**34), spec("tiny", 1)],
    ],
    ids=["none", "empty", "scalar", "tiny", "huge", "uneven"],
)
def test_search_always_ends_with_a_size_that_works(specs: list[ParamSpec], world_size: int) -> None:
    for dtype in ("float32", "bfloat16"):
        for n_grids in (1, 2, 128):
            numel = search_chunk_numel(specs, world_size, compute_dtype=dtype, n_grids=n_grids)
            assert numel % (world_size * ALIGN_NUMEL) == 0
            packed = pack(specs, numel, world_size)
            assert all(c.numel <= numel for c in packed)


def test_more_sizes_than_there_are_take_no_longer() -> None:
    specs = [spec("a", 1000), spec("b", 3000), spec("c", 700)]
    sizes: dict[str, Any] = {"min_chunk_bytes": 4096, "search_range_bytes": 40_000}
    expected = search_chunk_numel(specs, 2, n_grids=10_000, **sizes)
    start = time.perf_counter()
    assert search_chunk_numel(specs, 2, n_grids=10**9, **sizes) == expected
    assert time.perf_counter() - start < 10


@pytest.mark.full
def test_search_over_a_model_of_175_billion_parameters_is_quick() -> None:
    width = 12288
    specs = [spec("embedding", 50272, width, dtype="float16")]
    for layer in range(96):
        for name in ("q", "k", "v", "o"):
            specs += [spec(f"{layer}.{name}.w", width, width), spec(f"{layer}.{name}.b", width)]
        specs += [spec(f"{layer}.up.w", 4 * width, width), spec(f"{layer}.up.b", 4 * width)]
        specs += [spec(f"{layer}.down.w", width, 4 * width), spec(f"{layer}.down.b", width)]
        specs += [spec(f"{layer}.norm{i}.{name}", width) for i in range(2) for name in "wb"]
    start = time.perf_counter()
    numel = search_chunk_numel(specs, 8, compute_dtype="float16", n_grids=4096)
    assert time.perf_counter() - start < 20  # about one second, on an idle core
    assert numel >= 50272 * width


# Sizes to choose from


def test_candidates_are_few_different_and_aligned() -> None:
    random = Random(14)
    for _ in range(60):
        specs = random_specs(random)
        world_size = random.choice((1, 2, 3))
        sizes = candidate_chunk_numels(specs, world_size)
        assert sizes[0] == search_chunk_numel(specs, world_size)
        assert len(set(sizes)) == len(sizes) <= 7
        assert all(size % (world_size * ALIGN_NUMEL) == 0 for size in sizes)
        assert sizes == candidate_chunk_numels(list(specs), world_size)


def test_candidates_span_octaves_around_the_least_waste() -> None:
    specs = [spec(f"layer{i}.w", 4 * MIB, dtype="bfloat16") for i in range(200)]
    first, *others = candidate_chunk_numels(specs, 1, compute_dtype="bfloat16")
    assert min(others) >= min(MIN_CHUNK_BYTES // 2, first // 4)
    assert max(others) <= 4 * first
    assert max(first, *others) >= 4 * min(first, *others)


def test_candidates_may_be_smaller_than_a_parameter_unless_a_range_is_given() -> None:
    specs = [spec("embedding", 64 * MIB), *(spec(f"layer{i}.w", MIB) for i in range(40))]
    assert min(candidate_chunk_numels(specs, 1)) < 64 * MIB
    options = {"min_chunk_bytes": 8 * MIB, "search_range_bytes": 24 * MIB}
    first, *others = candidate_chunk_numels(specs, 1, **options)
    assert first >= 64 * MIB  # which holds every parameter
    assert all(8 * MIB <= 4 * size <= 32 * MIB + 4 * ALIGN_NUMEL for size in others)
    with pytest.raises(PlanError, match="chunk_search_range must be at least 0"):
        candidate_chunk_numels(specs, 1, search_range_bytes=-1)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_candidates_are_not_below_nearly_all_parameters(world_size: int) -> None:
    """The shape of OPT-30B without biases: chunks of 32 MiB would hold positions and norms, and give every matrix a
    chunk of its own, as larger ones do, with blocks of which a matrix takes dozens."""
    width = 7168
    names = ("q", "k", "v", "out")
    layers = [
        part
        for i in range(48)
        for part in (
            *(spec(f"{i}.{name}", width * width, dtype="bfloat16") for name in names),
            *(spec(f"{i}.{name}", 4 * width * width, dtype="bfloat16") for name in ("up", "down")),
            spec(f"{i}.norm", 2 * width, dtype="bfloat16"),
        )
    ]
    ends = [spec(name, 50304 * width, dtype="bfloat16") for name in ("tokens", "head")]
    specs = [ends[0], spec("positions", 1024 * width, dtype="bfloat16"), *layers, ends[1]]
    sizes = candidate_chunk_numels(specs, world_size, compute_dtype="bfloat16")
    assert len(sizes) > 3
    assert min(sizes) >= width * width
    blocks = [regular_block_bytes(pack(specs, size, world_size), size, world_size) for size in sizes]
    assert min(blocks) >= 2 * width * width
