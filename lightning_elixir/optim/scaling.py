"""Loss scaling, gradient norms and clipping: what a step needs to know about all gradients before it updates any.

[Note: norms] Norms show neither chunk size nor placement: squares are summed per parameter, over blocks of
`ALIGN_NUMEL` elements from its start, in fp64 and in a written order, and parameters and shards begin at multiples of
that, so no block is ever cut. Over parameters `math.fsum` adds, which is exact. `LossScaler` follows
`torch.amp.GradScaler` step by step; one read by the host decides each step.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real

import torch
from torch import Tensor

from lightning_elixir.errors import PlanError
from lightning_elixir.kernels import cpu, gpu
from lightning_elixir.plan.types import ALIGN_NUMEL

_MAX_PIECE_NUMEL = 4 * 1024 * 1024
_CPU_PIECE_NUMEL_PER_THREAD = 256 * 1024

Segment = tuple[int, int]
"""Offset and numel of one parameter's part of a shard; the offset is a multiple of `ALIGN_NUMEL`."""


def _require(is_good: bool, name: str, what: str, value: float) -> None:
    if not is_good:
        raise PlanError(f"{name} must be {what}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """The options of a dynamic loss scale, with `torch.amp.GradScaler`'s defaults.

    Raises:
        PlanError: One is out of range.
    """

    initial_scale: float = 2.0**16
    min_scale: float = 0.0
    """Backing off stops here."""
    max_scale: float = math.inf
    """Growing stops here, or where fp32 would overflow."""
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    """Steps in a row without overflow before the scale grows."""
    hysteresis: int = 1
    """Overflows since the last growth that it takes to back off; every overflow skips its step all the same."""

    def __post_init__(self) -> None:
        for option in fields(LossScaling):
            value = getattr(self, option.name)
            _require(isinstance(value, Real) and not isinstance(value, bool), option.name, "a number", value)
        bounds = f"min_scale={self.min_scale}, max_scale={self.max_scale}"
        _require(self.growth_factor > 1.0, "growth_factor", "> 1", self.growth_factor)
        _require(0.0 < self.backoff_factor < 1.0, "backoff_factor", "in (0, 1)", self.backoff_factor)
        _require(self.growth_interval >= 1, "growth_interval", ">= 1", self.growth_interval)
        _require(self.hysteresis >= 1, "hysteresis", ">= 1", self.hysteresis)
        _require(0.0 <= self.min_scale <= self.max_scale, "min_scale", f"in [0, {self.max_scale}]", self.min_scale)
        is_inside = 0.0 < self.initial_scale < math.inf and self.min_scale <= self.initial_scale <= self.max_scale
        _require(is_inside, "initial_scale", f"positive, finite and within {bounds}", self.initial_scale)


class LossScaler:
    """The dynamic loss scale, step by step that of `torch.amp.GradScaler` with the default bounds and hysteresis.

    Plain numbers without a tensor: the step has read the overflow flag on the host anyway.

    Args:
        options: Where it starts, and how it changes.
        enabled: False: the scale is 1 and stays so.
    """

    def __init__(self, options: LossScaling = LossScaling(), *, enabled: bool = True) -> None:
        self.options = options
        self.enabled = enabled
        self.scale = _round_to_fp32(options.initial_scale) if enabled else 1.0
        """What the loss is to be multiplied by; always an fp32 number."""
        self._growth_tracker = 0
        self._hysteresis_tracker = options.hysteresis

    @property
    def inverse_scale(self) -> float:
        """What gradients of the scaled loss are to be multiplied by."""
        return 1.0 / self.scale if self.scale else math.inf

    def update(self, found_inf: bool) -> None:
        """Adapt the scale after a step: back off if its gradients held inf or nan, else grow every so often."""
        if not self.enabled:
            return
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self.scale = max(_round_to_fp32(self.scale * self.options.backoff_factor), self.options.min_scale)
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.options.growth_interval:
            self._growth_tracker = 0
            self._hysteresis_tracker = self.options.hysteresis
            grown = min(_round_to_fp32(self.scale * self.options.growth_factor), self.options.max_scale)
            if math.isfinite(grown):
                self.scale = grown

    def state_dict(self) -> dict[str, float | int]:
        """The state under `torch.amp.GradScaler`'s keys, and one of our own; empty when disabled."""
        if not self.enabled:
            return {}
        return {
            "scale": self.scale,
            "growth_factor": self.options.growth_factor,
            "backoff_factor": self.options.backoff_factor,
            "growth_interval": self.options.growth_interval,
            "_growth_tracker": self._growth_tracker,
            "_hysteresis_tracker": self._hysteresis_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, float | int]) -> None:
        """Take over a state of this class or of `torch.amp.GradScaler`; does nothing when disabled.

        Raises:
            PlanError: The state dict is empty, as a disabled scaler leaves it, or holds an option out of range.
        """
        if not self.enabled:
            return
        if not state_dict:
            raise PlanError("the loss scaler's state dict is empty: it was saved by a run without loss scaling")
        self.options = replace(
            self.options,
            growth_factor=float(state_dict["growth_factor"]),
            backoff_factor=float(state_dict["backoff_factor"]),
            growth_interval=int(state_dict["growth_interval"]),
        )
        self.scale = float(state_dict["scale"])
        self._growth_tracker = int(state_dict["_growth_tracker"])
        self._hysteresis_tracker = int(state_dict.get("_hysteresis_tracker", self.options.hysteresis))


def square_sums(shard: Tensor, segments: Sequence[Segment], scale: float = 1.0, clamp: float | None = None) -> Tensor:
    """Sum of squares of each segment in fp64, bitwise the same on every device and in whatever shard a segment lies.

    Every element is widened, scaled, clamped to [-clamp, clamp] and squared in fp64; blocks of `ALIGN_NUMEL` elements
    from the segment's start are summed by halving (element i and i + half), then `ALIGN_NUMEL` block sums at a time
    the same way, until one is left; the last block of each level is filled up with zeros. A written sequence of
    additions, because the order within `torch.sum` depends on the device and on the shape.

    Squares of fp32 and 16-bit values cannot overflow fp64: a sum is finite if and only if its segment is. Elements
    outside the segments do not matter, whatever they are.

    Args:
        shard: 1-D, contiguous, any floating dtype, `[numel]`; read only.
        segments: Offset (a multiple of `ALIGN_NUMEL`) and numel of each; numel may be 0.
        scale: Multiplies every element.
        clamp: Limit on the magnitude of the scaled elements.

    Returns:
        fp64, on the shard's device, `[len(segments)]`.

    Raises:
        ValueError: A shard that is not flat, or a segment that is not aligned or not inside it.
    """
    _check_segments(shard, segments)
    compiled: Tensor | None = None
    if shard.device.type == "cuda":
        compiled = gpu.square_sums(shard, tuple(segments), scale, clamp)
    elif shard.device.type == "cpu":
        compiled = cpu.square_sums(shard, segments, scale, clamp)
    if compiled is not None:
        return compiled
    filled = [(offset, numel) for offset, numel in segments if numel]
    first = min((offset for offset, _ in filled), default=0) // ALIGN_NUMEL
    last = max((_num_blocks(offset + numel) for offset, numel in filled), default=first)
    ends = [offset + numel for offset, numel in filled if (offset + numel) % ALIGN_NUMEL]
    sums = torch.zeros(last - first, dtype=torch.float64, device=shard.device)
    piece_blocks = _piece_numel(shard.device) // ALIGN_NUMEL
    buffer = torch.empty(min(piece_blocks, last - first), ALIGN_NUMEL, dtype=torch.float64, device=shard.device)
    with torch.no_grad():
        for start in range(first, last, piece_blocks):
            stop = min(start + piece_blocks, last)
            blocks = buffer[: stop - start]
            _load_blocks(blocks, shard, start * ALIGN_NUMEL, ends)
            if scale != 1.0:
                blocks.mul_(scale)
            if clamp is not None:
                blocks.clamp_(-clamp, clamp)
            sums[start - first : stop - first].copy_(_sum_rows_(blocks.mul_(blocks)))
        return _combine(sums, [(offset // ALIGN_NUMEL - first, _num_blocks(numel)) for offset, numel in segments])


def load_square_sums(device: torch.device, dtype: torch.dtype) -> None:
    """Take the sums of a few zeros of such gradients on a CUDA device, so that the code for it is compiled and
    loaded."""
    numel = 2 * ALIGN_NUMEL  # two levels of sums
    square_sums(torch.zeros(numel, dtype=dtype, device=device), [(0, numel)])


def absolute_max(shard: Tensor, segments: Sequence[Segment], scale: float = 1.0, clamp: float | None = None) -> Tensor:
    """Largest magnitude of each segment (0 of an empty one, nan where there is one); otherwise as `square_sums`."""
    _check_segments(shard, segments)
    largest = torch.zeros(len(segments), dtype=torch.float64, device=shard.device)
    with torch.no_grad():
        for i, (offset, numel) in enumerate(segments):
            if numel:
                low, high = torch.aminmax(shard[offset : offset + numel])
                largest[i].copy_(torch.maximum(high, -low))
        largest.mul_(abs(scale))
        return largest if clamp is None else largest.clamp_(max=clamp)


def clip_coefficient(total_norm: float, max_norm: float) -> float:
    """The factor that `torch.nn.utils.clip_grad_norm_` puts on the gradients: at most 1, nan for a nan norm."""
    coefficient = max_norm / (total_norm + 1e-6)
    return 1.0 if coefficient > 1.0 else coefficient


def _num_blocks(numel: int) -> int:
    return -(-numel // ALIGN_NUMEL)


def _piece_numel(device: torch.device) -> int:
    if device.type == "cpu":
        return min(_CPU_PIECE_NUMEL_PER_THREAD * torch.get_num_threads(), _MAX_PIECE_NUMEL)
    return _MAX_PIECE_NUMEL


def _load_blocks(blocks: Tensor, shard: Tensor, offset: int, ends: list[int]) -> None:
    """Widen the shard from `offset` on into `blocks`, zero from each segment's end to the end of its block.

    The shard may end inside the last block, but never before a segment does.
    """
    flat = blocks.view(-1)
    source = shard[offset : offset + flat.numel()]
    flat[: source.numel()].copy_(source)
    for end in ends:
        if offset < end < offset + flat.numel():
            flat[end - offset : _num_blocks(end) * ALIGN_NUMEL - offset].zero_()


def _sum_rows_(rows: Tensor) -> Tensor:
    """Sum each row of `ALIGN_NUMEL` elements by halving, in place; a view of the first column."""
    while rows.shape[1] > 1:
        rows, right = rows.chunk(2, dim=1)
        rows.add_(right)
    return rows[:, 0]


def _combine(sums: Tensor, segments: list[Segment]) -> Tensor:
    """Sum runs of `sums`, given as (first, count), through levels of `ALIGN_NUMEL`; one number for each run."""
    counts = [max(1, _num_blocks(count)) for _, count in segments]
    rows = torch.zeros(sum(counts), ALIGN_NUMEL, dtype=torch.float64, device=sums.device)
    flat = rows.view(-1)
    firsts = []
    row = 0
    for (first, count), num_rows in zip(segments, counts, strict=True):
        firsts.append(row)
        flat[row * ALIGN_NUMEL : row * ALIGN_NUMEL + count].copy_(sums[first : first + count])
        row += num_rows
    reduced = _sum_rows_(rows)
    if max(counts, default=1) == 1:
        return reduced.clone()
    return _combine(reduced, list(zip(firsts, counts, strict=True)))


def _check_segments(shard: Tensor, segments: Sequence[Segment]) -> None:
    if shard.dim() != 1 or not shard.is_contiguous() or not shard.is_floating_point():
        raise ValueError(f"a shard is 1-D, contiguous and floating, got shape {tuple(shard.shape)} of {shard.dtype}")
    for offset, numel in segments:
        if offset % ALIGN_NUMEL or numel < 0 or not 0 <= offset <= offset + numel <= shard.numel():
            raise ValueError(
                f"segment ({offset}, {numel}) must start at a multiple of {ALIGN_NUMEL} and lie inside the shard of "
                f"{shard.numel()} elements"
            )


def _round_to_fp32(value: float) -> float:
    """The fp32 number nearest to a double, infinite beyond fp32's range; `GradScaler` keeps its scale in fp32."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf
