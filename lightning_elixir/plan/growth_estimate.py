"""How far a step has outgrown the one that was sampled, told from what both take at the same access."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_elixir.plan.types import AccessTrace

# A look at the device's memory takes the host some 50 us, ten times as long as an access without a fetch.
_MAX_LOOKS = 12
# Too little to tell anything from, as a share of the peak.
_LEAST_SHARE = 1 / 16
_SHARE_BETWEEN_LOOKS = 1 / 16
_MAX_POINTS = 16


@dataclass(frozen=True)
class StepMemory:
    """What one forward and backward took beside chunks, shards and gradient blocks."""

    levels: tuple[int, ...]
    """Bytes in use at each access."""
    peaks: tuple[int, ...]
    """Peak between accesses: [0] before the first, [i] after the i-th one."""
    grads: tuple[tuple[int, ...], ...]
    """Chunks that got their first gradient in each of these intervals."""
    arrivals: tuple[int, ...] = ()
    """As in `Course`."""

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks, default=0)


class GrowthModel:
    """Predicts the peak of a step from the ratio between it and the sampled one.

    Args:
        sample: The sampled step.
        grad_bytes: What a chunk's gradient adds to the device for good, by chunk id.
        block_bytes: What gradients take on the device while they are collected and reduced.
    """

    def __init__(self, sample: StepMemory, grad_bytes: Mapping[int, int], block_bytes: int) -> None:
        base = sample.levels[0] if sample.levels else 0
        self.base_bytes = base
        self.rise_bytes = max(0, sample.peak_bytes - base)
        """From the first access to the peak."""
        points, held = [], block_bytes
        for peak, grads in zip(sample.peaks, sample.grads, strict=True):
            held += sum(grad_bytes.get(i, 0) for i in grads)
            points.append((max(0, peak - base), held))
        self._points = _frontier(points)
        self.looks = self._choose_looks(sample.levels)
        """Accesses at which to compare, with the rise that the sampled step had seen there."""

    def beside_bytes(self, ratio: float) -> int:
        """Highest moment of what forward and backward add beside replicas, in a step that takes `ratio` times as much
        at the same access: gradients come while activations go."""
        return max((round(ratio * rise) + held for rise, held in self._points), default=0)

    def _choose_looks(self, levels: Iterable[int]) -> dict[int, int]:
        chosen: list[tuple[int, int]] = []
        last = 0
        for position, level in enumerate(levels):
            rise = level - self.base_bytes
            is_telling = rise > 0 and rise >= self.rise_bytes * _LEAST_SHARE
            if is_telling and abs(rise - last) >= self.rise_bytes * _SHARE_BETWEEN_LOOKS:
                chosen.append((position, rise))
                last = rise
        return dict(chosen[:: max(1, math.ceil(len(chosen) / _MAX_LOOKS))])


def outgrowth(base_bytes: int, rise_bytes: int, expected_rise_bytes: int) -> tuple[int, float]:
    """What tells a step from the sampled one, at one access.

    Args:
        base_bytes: What more was in use at the beginning; may be negative.
        rise_bytes: Rise from there.
        expected_rise_bytes: That of the sampled step, more than 0.

    Returns:
        Bytes that stay as they are until the end of the step, and the ratio (1 or more) between the rises. What has
        only moved from one to the other, such as the workspaces that libraries take in the course of their first step,
        counts as neither.
    """
    more = rise_bytes - expected_rise_bytes
    if base_bytes > 0 > more or base_bytes < 0 < more:
        moved = min(abs(base_bytes), abs(more))
        base_bytes += moved if base_bytes < 0 else -moved
        more += moved if more < 0 else -moved
    return max(0, base_bytes), 1.0 + max(0, more) / expected_rise_bytes


def _frontier(points: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Few (rise, held) that bound all of them: no point has more of both than one of these."""
    kept: list[tuple[int, int]] = []
    for rise, held in sorted(points, reverse=True):
        if not kept or held > kept[-1][1]:
            kept.append((rise, held))
    size = max(1, math.ceil(len(kept) / _MAX_POINTS))
    # Within a group the first has most of the rise, the last most of what is held.
    return [(group[0][0], group[-1][1]) for group in (kept[i : i + size] for i in range(0, len(kept), size))]


def needed_blocks(trace: AccessTrace, cost_blocks: Mapping[int, int]) -> int:
    """The smallest rCache that this trace runs through without more: what is pinned, held and needed at once.

    Args:
        cost_blocks: Blocks of every chunk that is not persistent.
    """
    return max((sum(cost_blocks.get(i, 0) for i in ids) for ids in trace.in_use()), default=0)
