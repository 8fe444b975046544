"""Which states go on to NVMe, against every choice there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, combinations
from random import Random

import pytest

from lightning_elixir.plan.memory import Scheme, memory_use
from lightning_elixir.plan.placing.spilling import Spilling, in_host_memory
from lightning_elixir.plan.regime import UpdateMode
from lightning_elixir.plan.types import ChunkSpec, Tier
from tests.plan.models import spec
from tests.plan.problems import KIB, MIXED, place_specs

SCHEME = Scheme(1, True, 4 * KIB, MIXED)
UNIT = 8 * KIB
"""States of 1024 fp32 parameters."""


def chunks_of(*sizes: int) -> tuple[ChunkSpec, ...]:
    """Chunks of so many times 1024 parameters, all on the host."""
    return place_specs([spec(f"l{i}.w", 1024 * n) for i, n in enumerate(sizes)], "cpu").chunks


def host_bytes(chunks: Sequence[ChunkSpec], scheme: Scheme = SCHEME) -> int:
    return memory_use(chunks, 0, scheme).host_bytes


def sent(chunks: Sequence[ChunkSpec], lacking: int, room: int | None = None, scheme: Scheme = SCHEME) -> list[int]:
    found = Spilling(scheme).states(chunks, host_bytes(chunks, scheme) - lacking, room)
    assert in_host_memory(found) == tuple(replace(c, is_update_streamed=False) for c in chunks)
    return [c.id for c in found if c.optim_tier is Tier.NVME]


def test_the_last_ones_go_until_the_rest_and_the_buffers_fit() -> None:
    chunks = chunks_of(*[1] * 8)
    assert sent(chunks, 0) == []
    assert sent(chunks, 1) == [4, 5, 6, 7]  # the first three only pay for the buffers
    assert sent(chunks, UNIT) == [4, 5, 6, 7]
    assert sent(chunks, UNIT + 1) == [3, 4, 5, 6, 7]
    assert sent(chunks, 5 * UNIT) == list(range(8))


def test_a_large_chunk_stays_where_small_ones_do() -> None:
    """It would make the buffers large."""
    assert sent(chunks_of(*[1] * 8, 10), 3 * UNIT) == [2, 3, 4, 5, 6, 7]


def test_a_chunk_too_large_for_the_disk_does_not_keep_others_from_it() -> None:
    assert sent(chunks_of(*[1] * 8, 20), 2 * UNIT, room=6 * UNIT) == [3, 4, 5, 6, 7]


def test_large_ones_make_small_ones_unnecessary() -> None:
    # Five of 4 and their buffers bring 8; what was taken first of the small ones goes back.
    assert sent(chunks_of(4, 4, 4, 4, 4, 1, 1), 8 * UNIT) == [0, 1, 2, 3, 4]


def test_streamed_updates_end_there() -> None:
    chunks = tuple(replace(c, is_update_streamed=True) for c in chunks_of(*[1] * 6))
    found = Spilling(SCHEME).states(chunks, host_bytes(chunks) - UNIT, None)
    assert [c.is_update_streamed for c in found] == [True, True, False, False, False, False]


def test_gradients_in_compute_shards_need_memory_of_their_own_again() -> None:
    reusing = replace(SCHEME, updates=UpdateMode(grad_reuses_compute_shard=True))
    chunks = place_specs([spec(f"l{i}.w", 1024, dtype="bfloat16") for i in range(8)], "cpu").chunks
    # 12 KiB of states each, of which 2 KiB come back as gradients: five bring 50, and the buffers take 36.
    assert sent(chunks, 14 * KIB, scheme=reusing) == [3, 4, 5, 6, 7]
    assert sent(chunks, 14 * KIB + 1, scheme=reusing) == [2, 3, 4, 5, 6, 7]
    assert sent(chunks, 24 * KIB) == [3, 4, 5, 6, 7]


def test_where_nothing_fits_as_much_goes_as_helps() -> None:
    assert sent(chunks_of(*[1] * 3), UNIT) == []  # three buffers hold as much
    assert sent(chunks_of(*[1] * 6), 4 * UNIT) == list(range(6))


@pytest.mark.full
def test_against_every_choice() -> None:
    random = Random(1)
    fitting = 0
    for _ in range(300):
        chunks = chunks_of(*(random.choice((1, 1, 2, 5)) for _ in range(random.randint(1, 8))))
        limit = host_bytes(chunks) - random.randint(0, 12) * UNIT // 2
        room = random.choice((None, random.randint(0, 20) * UNIT))
        best: int | None = None
        for ids in chain.from_iterable(combinations(range(len(chunks)), n) for n in range(len(chunks) + 1)):
            moved = [replace(c, optim_tier=Tier.NVME) if c.id in ids else c for c in chunks]
            use = memory_use(moved, 0, SCHEME)
            if use.host_bytes <= limit and (room is None or use.nvme_bytes <= room):
                best = use.nvme_bytes if best is None else min(best, use.nvme_bytes)
        found = memory_use(Spilling(SCHEME).states(chunks, limit, room), 0, SCHEME)
        assert room is None or found.nvme_bytes <= room
        if best is None:
            assert found.host_bytes > limit
        elif room is None:
            fitting += 1
            assert found.host_bytes <= limit
            assert best <= found.nvme_bytes <= best + 2 * UNIT
    assert fitting > 40


def params_sent(chunks: Sequence[ChunkSpec], limit: int, room: int = 10**9) -> list[int] | None:
    found = Spilling(SCHEME).states_and_params(chunks, limit, room)
    if found is None:
        return None
    use = memory_use(found, 0, SCHEME)
    assert use.host_bytes <= limit
    assert use.nvme_bytes <= room
    assert all(c.optim_tier is Tier.NVME for c in found)
    assert in_host_memory(found) == tuple(replace(c, is_update_streamed=False) for c in chunks)
    return [c.id for c in found if c.param_tier is Tier.NVME]


def test_parameters_go_as_far_as_it_takes() -> None:
    # Of 16 chunks of 4 KiB of parameters, 4 of gradients and 8 of states. Buffers: three of 16 KiB for updates, three
    # of 4 for gradients, three of 4 for parameters.
    chunks = chunks_of(*[1] * 16)
    least = (48 + 12 + 12) * KIB
    assert params_sent(chunks, least) == list(range(16))
    assert params_sent(chunks, least - 1) is None
    assert params_sent(chunks, least + 8 * KIB) == list(range(1, 16))
    assert params_sent(chunks, least + 5 * 8 * KIB + 1) == list(range(5, 16))


def test_parameters_take_room_for_gradients_there() -> None:
    chunks = chunks_of(*[1] * 16)
    assert params_sent(chunks, 10**9 - 1, 16 * 8 * KIB + 8 * KIB) == [15]
    assert params_sent(chunks, 10**9 - 1, 16 * 8 * KIB + 8 * KIB - 1) is None


def test_whole_shards_on_every_rank_stay_in_memory() -> None:
    scheme = replace(SCHEME, world_size=2, is_storage_distributed=False)
    assert Spilling(scheme).states_and_params(chunks_of(*[1] * 16), 10**9, 10**9) is None
