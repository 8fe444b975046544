"""What goes to the device through page-locked memory, piece by piece."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from lightning_elixir.core.device import CpuDevice
from lightning_elixir.core.staging import Downloads, Uploads


class Counting(Uploads):
    _MOST_BETWEEN_NUMEL = 64
    sent = 0

    def send(self, target: Tensor) -> object:  # type: ignore[override]
        self.sent += 1
        assert target.numel() <= 1000
        return super().send(target)


def uploads() -> Counting:
    device = CpuDevice()
    return Counting(device, device.new_lane(), 1000)


@pytest.mark.parametrize("seed", range(20))
def test_every_part_arrives_and_what_is_far_between_stays(seed: int) -> None:
    draw = random.Random(seed)
    target, expected, parts, at = torch.full((6000,), 9.0), torch.full((6000,), 9.0), [], 0
    while True:
        gap, numel = draw.choice([0, 0, 3, 64, 65, 700]), draw.choice([1, 5, 999, 1000, 1001, 2300])
        if at + gap + numel > 6000:
            break
        values = torch.randn(numel, generator=torch.Generator().manual_seed(at), dtype=torch.float64)
        at += gap
        parts.append((at, values))
        expected[at : at + numel] = values.float()
        at += numel
    one = uploads()
    one.upload(parts, target)
    ends = [(offset, offset + values.numel()) for offset, values in parts]
    for (_, end), (begin, _) in zip([(0, 0), *ends], [*ends, (6000, 6000)], strict=True):
        between = target[end:begin]  # zeros where it is close, unless a piece ends there
        assert between.eq(9).all() or (begin - end <= 64 and between.eq(0).all())
        expected[end:begin] = between
    assert torch.equal(target, expected)
    assert one.sent <= sum(-(-values.numel() // 1000) + 1 for _, values in parts)


def test_small_parts_share_a_piece() -> None:
    one, target = uploads(), torch.zeros(2000)
    one.upload([(64 * i, torch.full((10,), float(i))) for i in range(30)], target)
    assert one.sent == 2
    assert all(target[64 * i : 64 * i + 10].eq(i).all() for i in range(30))


def test_nothing_is_sent_for_nothing() -> None:
    one, target = uploads(), torch.zeros(0)
    one.upload([], target)
    one.upload([(0, torch.zeros(0))], target)
    assert one.sent == 0


@pytest.mark.parametrize("numel", [0, 1, 1000, 1001, 5300])
def test_what_comes_from_the_device_is_there_when_it_has_settled(numel: int) -> None:
    downloads = Downloads(CpuDevice(), 1000)
    sources = [torch.randn(numel, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    targets = [torch.zeros(numel) for _ in sources]
    for source, target in zip(sources, targets, strict=True):
        downloads.download(source, target)
    downloads.settle()
    assert all(map(torch.equal, sources, targets))
    downloads.close()


def test_a_copy_that_fails_is_told() -> None:
    downloads = Downloads(CpuDevice(), 1000)
    downloads.download(torch.zeros(10), torch.zeros(9))
    with pytest.raises(RuntimeError, match="size"):
        downloads.settle()
    downloads.close()
