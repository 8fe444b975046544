"""Runs of elements as boxes: together exactly the run, in its order, few of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_elixir.checkpoint.boxes import Box, Extent

SHAPES = [(), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (2, 2, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_run_is_covered_once_and_in_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for begin, end in itertools.combinations(range(whole.numel() + 1), 2):
        extent = Extent(shape, None, begin, end - begin)
        run = whole.view(-1)[begin:end]
        covered = torch.zeros(shape, dtype=torch.int64)
        for box, value in extent.views(run):
            at = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            assert torch.equal(value, whole[at])
            covered[at] += 1
        assert covered.sum() == end - begin
        assert covered.max() == 1
        assert len(extent.boxes()) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_of_a_size(shape: tuple[int, ...], most: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for begin, end in itertools.combinations(range(whole.numel() + 1), 2):
        extent = Extent(shape, None, begin, end - begin)
        found = []
        for box, part in extent.parts(whole.view(-1)[begin:end], most):
            assert 0 < part.numel() <= most
            at = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            assert torch.equal(extent.as_box(box, part), whole[at])
            found.append(part)
        assert torch.equal(torch.cat(found), whole.view(-1)[begin:end])
        least = (most + 1) // 2  # of a box between the ends of rows
        assert len(found) <= max(1, 2 * len(shape) - 1 + (end - begin) // least * len(shape))


def test_other_memory_order() -> None:
    whole = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    flat = whole.as_strided((whole.numel(),), (1,))
    for begin, end in ((0, 120), (1, 119), (17, 18), (30, 100)):
        extent = Extent((2, 3, 4, 5), whole.stride(), begin, end - begin)
        for box, value in extent.views(flat[begin:end]):
            at = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            assert torch.equal(value, whole[at])


def test_common_part_of_boxes() -> None:
    assert Box((0, 0), (2, 4)).common(Box((1, 3), (2, 4))) == Box((1, 3), (1, 1))
    assert Box((0, 0), (2, 4)).common(Box((2, 0), (1, 1))) is None
    assert Box((), ()).common(Box((), ())) == Box((), ())
    assert Box((1, 3), (2, 4)).slices_of(Box((2, 4), (1, 2))) == (slice(1, 2), slice(1, 3))
