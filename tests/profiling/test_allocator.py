"""The sizes that torch's CUDA allocator hands out, against its rules written out by hand."""

from __future__ import annotations

import random

import pytest

from lightning_elixir.profiling.allocator import Block, CachingAllocator

MIB = 1 << 20


@pytest.mark.parametrize(
    ("requested", "allocated"),
    [
        (0, 0),
        (1, 512),
        (512, 512),
        (513, 1024),
        (MIB, MIB),
        (MIB + 1, MIB + 512),  # from a segment of 20 MiB, split
        (19 * MIB, 20 * MIB),  # a segment of its own; what is left, 1 MiB, stays with it
        (13 * MIB + 512, 14 * MIB),
        (13 * MIB - 512, 13 * MIB - 512),  # a little more than 1 MiB is left, and split off
        (32 * MIB, 32 * MIB),
    ],
)
def test_sizes_of_fresh_blocks(requested: int, allocated: int) -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(requested)
    assert allocator.allocated_bytes == allocated
    allocator.free(block)
    assert allocator.allocated_bytes == 0


def test_the_last_piece_of_a_segment_keeps_its_remainder() -> None:
    allocator = CachingAllocator()
    sizes = []
    for _ in range(3):  # 20 MiB hold two blocks of 6.5 MiB and one more with what is left, less than 1 MiB
        before = allocator.allocated_bytes
        allocator.allocate(13 * MIB // 2)
        sizes.append(allocator.allocated_bytes - before)
    assert sizes == [13 * MIB // 2, 13 * MIB // 2, 7 * MIB]


def test_free_neighbours_become_one_block_again() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    for index in (1, 3, 2):
        allocator.free(blocks[index])
    middle = allocator.allocate(9 * MIB)
    assert middle is not None
    assert middle.address == 4 * MIB
    assert middle.nbytes == 9 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(24 * MIB)
    kept = [b.address for b in (large, small) if b is not None]
    allocator.free(large)
    allocator.free(small)
    block = allocator.allocate(24 * MIB)
    assert block is not None
    assert block.address == kept[1]


def test_small_and_large_requests_never_share_a_segment() -> None:
    allocator = CachingAllocator()
    large = allocator.allocate(2 * MIB)
    small = allocator.allocate(MIB)
    assert large is not None
    assert small is not None
    assert small.address >= 20 * MIB


def test_blocks_never_overlap_and_all_come_back() -> None:
    allocator = CachingAllocator()
    generator = random.Random(0)
    living: list[Block] = []
    for _ in range(3000):
        if living and generator.random() < 0.5:
            allocator.free(living.pop(generator.randrange(len(living))))
        else:
            requested = int(2 ** generator.uniform(0, 26))
            block = allocator.allocate(requested)
            assert block is not None
            assert requested <= block.nbytes <= requested + MIB + 512
            living.append(block)
        assert allocator.allocated_bytes == sum(b.nbytes for b in living)
    spans = sorted((b.address, b.address + b.nbytes) for b in living)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
