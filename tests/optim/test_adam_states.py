"""Where Adam's moments live."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_elixir.optim.adam_states import AdamStates, SegmentPlace
from lightning_elixir.plan.types import ALIGN_NUMEL

PLACES = [SegmentPlace(0, 0, 0, 5), SegmentPlace(1, 0, ALIGN_NUMEL, ALIGN_NUMEL + 3)]


def _zeros(numel: int, dtype: torch.dtype, *, is_locked: bool = True, is_overwritten: bool = False) -> Tensor:
    """As host memory that stays gives them: of an earlier use."""
    return torch.full((numel,), torch.nan if is_overwritten else 0.0, dtype=dtype)


def test_values_may_come_to_a_shard_without_segments() -> None:
    """As where what it had has left the optimizer's groups."""
    states = AdamStates([], ALIGN_NUMEL, torch.float32, _zeros, None, is_sent=False)
    states.allocate(is_coming=True)
    assert [moment.numel() for moment in states.moments] == [0, 0]


def test_memory_that_held_something_is_zeros_where_no_values_come() -> None:
    """Between the segments, and where one without states gets some later."""
    states = AdamStates(PLACES, 3 * ALIGN_NUMEL, torch.float32, _zeros, None, is_sent=False)
    states.allocate(is_coming=True)
    for moment in states.at(0).values():
        moment.fill_(1.0)  # they have come
    assert not any(moment.any() for moment in states.begin(1).values())
    for moment in states.moments:
        assert moment.numel() == 3 * ALIGN_NUMEL
        assert moment[:5].all()
        assert not moment[5:].any()
