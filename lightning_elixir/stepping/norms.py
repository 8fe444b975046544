"""How large the gradients of an optimizer are, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_elixir.errors import PlanError
from lightning_elixir.optim.gradient_change import GradientChange
from lightning_elixir.optim.scaling import absolute_max, square_sums
from lightning_elixir.runtime.chunk_optimizers import ChunkOptimizers
from lightning_elixir.runtime.engine import Engine

_UNUSED = -1


class _Sums(NamedTuple):
    """Of the gradients of a chunk's segments."""

    values: Tensor
    """fp64, one for each segment, on any device."""
    factor: float = 1.0
    """What each is yet to be multiplied by."""


class GradientNorms:
    """Norms of gradient shards.

    Args:
        engine: Has the shards.
        states: Which segments are the optimizer's.
    """

    def __init__(self, engine: Engine, states: ChunkOptimizers) -> None:
        self._engine = engine
        self._states = states

    def total(self, used: Mapping[int, set[int]], norm_type: float, change: GradientChange) -> float:
        """The norm of all gradients together. Collective.

        Args:
            used: Members that have a gradient on any rank, by chunk id.
            norm_type: 2 or inf.
            change: What is done to gradients first.

        Raises:
            PlanError: For other norms.
        """
        if norm_type not in (2.0, math.inf):
            raise PlanError(f"gradient norms of type {norm_type} are not supported: use 2 or inf")
        is_max = norm_type == math.inf
        with self._engine.telling():
            parts = self._per_parameter(used, change, is_max)
        if is_max:
            self._engine.comm.all_reduce_max(parts)
            return float(parts.max()) if parts.numel() else 0.0
        self._engine.comm.all_reduce_sum(parts)
        # Exactly rounded, so that the order of the parameters in chunks does not matter.
        values = parts.tolist()
        return math.sqrt(math.fsum(values)) if all(map(math.isfinite, values)) else float(parts.sum().sqrt())

    def are_finite(self, used: Mapping[int, set[int]], change: GradientChange) -> bool:
        """Whether no gradient holds inf or nan. Collective. Arguments as for `total`."""
        parts = self._per_parameter(used, change, is_max=False)
        self._engine.comm.all_reduce_sum(parts)
        return bool(torch.isfinite(parts).all())

    def _per_parameter(self, used: Mapping[int, set[int]], change: GradientChange, is_max: bool) -> Tensor:
        """Square sums (or largest magnitudes) of this rank's part of each used parameter's gradient; fp64 on CPU."""
        pending: dict[torch.device, list[tuple[list[int], _Sums]]] = {}
        row = 0
        for chunk_id in sorted(used):
            rows = {index: row + i for i, index in enumerate(sorted(used[chunk_id]))}
            row += len(rows)
            own = [rows.get(s.member_index, _UNUSED) for s in self._states.segments[chunk_id]]
            if any(place != _UNUSED for place in own) and self._engine.groups.is_counted:
                sums = self._of_chunk(chunk_id, change, is_max)
                pending.setdefault(sums.values.device, []).append((own, sums))
        result = torch.zeros(row, dtype=torch.float64, device="cpu")
        for found in pending.values():
            # In one transfer: a device that has nothing else to do waits for each.
            values = torch.cat([sums.values for _, sums in found]).to("cpu", non_blocking=False)
            factors = torch.tensor([sums.factor for own, sums in found for _ in own], dtype=torch.float64, device="cpu")
            places = torch.tensor([place for own, _ in found for place in own], device="cpu")
            is_used = places != _UNUSED
            result[places[is_used]] = (values * factors)[is_used]
        return result

    def _of_chunk(self, chunk_id: int, change: GradientChange, is_max: bool) -> _Sums:
        """The same of all segments of a chunk."""
        shard, reducer = self._engine.store[chunk_id], self._engine.reducer
        bounds = [(s.shard_offset, s.numel) for s in self._states.segments[chunk_id]]
        if shard.grad is None:
            return _Sums(torch.zeros(len(bounds), dtype=torch.float64, device="cpu"))
        if reducer.has_begun(chunk_id):
            self._engine.check_whole()
        reducer.landing.wait(chunk_id)  # and learn whether adding up has failed
        known = None if is_max or change.clips else reducer.square_sums.get(chunk_id)
        if known is not None:
            return _Sums(known, change.inverse_scale**2)
        grad = shard.read_grad()
        if grad is None:
            raise RuntimeError("a gradient has gone while its norm was computed")
        measure = absolute_max if is_max else square_sums
        if change.clips:
            wide = grad if grad.dtype.itemsize >= 4 else grad.float()
            return _Sums(measure(change.applied(wide), bounds))
        return _Sums(measure(grad, bounds, scale=change.inverse_scale))
