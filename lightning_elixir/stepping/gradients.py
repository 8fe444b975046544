"""What the coming step does to the gradients of one optimizer, and what users see of that before."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_elixir.optim.gradient_change import GradientChange, Transform
from lightning_elixir.optim.scaling import LossScaler, clip_coefficient
from lightning_elixir.runtime.chunk_optimizers import ChunkOptimizers
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.stepping.norms import GradientNorms

log = logging.getLogger(__name__)


class StepGradients:
    """Gradients between backward and step: they lie in shards as backward has left them, and what was asked for
    meanwhile (unscaling, clipping) is done in the step. A `.grad` that a user holds shows it at once.

    Args:
        engine: Has the shards.
        states: Which segments are the optimizer's.
        scaler: The loss scale that gradients come with.
    """

    def __init__(self, engine: Engine, states: ChunkOptimizers, scaler: LossScaler) -> None:
        self._engine = engine
        self._states = states
        self.scaler = scaler
        self._norms = GradientNorms(engine, states)
        self._clips: tuple[Transform, ...] = ()
        self._is_told_to_clip = False  # as long as these gradients wait; the same on every rank, other than `_clips`
        self._is_seen_unscaled = False  # whether `.grad` is without the loss scale, as after `unscale_`
        self._is_unscaled = False  # whether the gradients themselves are
        self._has_overflowed = False  # as `find_overflows` has seen it; a step forgets it, and `zero_grad` does not
        self._last_norm: float | None = None
        self._wanted_norm_type: float | None = None  # that of the last `total_norm`

    # In the step

    @property
    def change(self) -> GradientChange:
        """What the step does to gradients, as far as that is known now."""
        is_scaled = self.scaler.enabled and not self._is_unscaled
        return GradientChange(self.scaler.inverse_scale if is_scaled else None, self._clips)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is clipped."""
        return all(clip == Transform("factor", 1.0) for clip in self._clips)

    def prepare_step(self, used: Mapping[int, set[int]], max_norm: float) -> bool:
        """Clip, or learn the norm, where the step shall; look for overflows where there is a loss scale. Collective.

        Args:
            used: Members that have a gradient on any rank, by chunk id.
            max_norm: Of all gradients together; 0: not limited.

        Returns:
            Whether the step may use them.
        """
        if max_norm > 0:
            self.clip(max_norm, used)
        elif self._wanted_norm_type is not None and not self._is_told_to_clip:
            self._last_norm = self._norms.total(used, self._wanted_norm_type, self.change)
        if not self.scaler.enabled:
            return True
        has_overflowed, self._has_overflowed = self._has_overflowed, False
        return not has_overflowed and self._are_finite(used)

    # As users ask for it

    def find_overflows(self, used: Mapping[int, set[int]]) -> None:
        """Have the coming step find that its gradients may not be used, if they may not now. Collective."""
        self._has_overflowed = not self._are_finite(used)

    def _are_finite(self, used: Mapping[int, set[int]]) -> bool:
        return self._norms.are_finite(used, GradientChange(self.change.unscale))

    def show_unscaled(self) -> None:
        """Have `.grad` be without the loss scale from now on, until the step."""
        self._add(())

    def clamp(self, clip_value: float) -> None:
        """Clamp every gradient to [-clip_value, clip_value] in the coming step."""
        self._add((Transform("clamp", float(clip_value)),))

    def clip(self, max_norm: float, used: Mapping[int, set[int]], norm_type: float = 2.0) -> Tensor:
        """Clip the total norm in the coming step. Collective.

        Returns:
            The norm before; as of `total_norm`.
        """
        self._last_norm = self._norms.total(used, norm_type, self.change)
        self._add((Transform("factor", clip_coefficient(self._last_norm, max_norm)),))
        return self._as_norm(self._last_norm)

    def total_norm(self, used: Mapping[int, set[int]], norm_type: float) -> Tensor:
        """The norm of the gradients as they are now, or, where there are none, of those that the last step found; nan
        if it did not need that. Collective. 0-dim, fp32 (fp64 where the model computes in that)."""
        self._wanted_norm_type = norm_type
        if used:
            self._last_norm = self._norms.total(used, norm_type, self.change)
        elif self._last_norm is None:
            log.warning("the last step did not need the norm of its gradients; it is computed from now on")
        return self._as_norm(math.nan if self._last_norm is None else self._last_norm)

    def _as_norm(self, value: float) -> Tensor:
        is_double = self._engine.plan.compute_dtype == "float64"
        return torch.tensor(value, dtype=torch.float64 if is_double else torch.float32, device="cpu")

    def _add(self, clips: tuple[Transform, ...]) -> None:
        """Have the step do this to the gradients, after what it is to do already."""
        visible = self._engine.gradients
        visible.absorb()
        change = self.change
        if change.unscale is not None and not self._is_seen_unscaled and not self._clips:
            self._is_seen_unscaled = True
            visible.follow(GradientChange(change.unscale).apply_, self._is_own)
        self._clips += clips
        self._is_told_to_clip |= bool(clips)
        visible.follow(GradientChange(clips=clips).apply_, self._is_own)

    # As the engine asks for it (`PendingChanges`)

    def change_of(self, chunk_id: int, index: int) -> Callable[[Tensor], None] | None:
        """What the step will do to the gradient of a member, as far as users are to see it; None: nothing, or the
        gradient is another optimizer's."""
        change = self.change
        is_unscaled_to_see = change.unscale is not None and self._is_seen_unscaled
        if not (is_unscaled_to_see or change.clips) or not self._is_own(chunk_id, index):
            return None
        return change.apply_

    def apply(self) -> None:
        """Users have written to what they saw changed: the gradients become what is seen."""
        self._change_shards(self.change)
        self._clips, self._is_unscaled = (), self.scaler.enabled

    def finish(self) -> None:
        """What the step was to do to the gradients that there are is done now, since others come, for which it is not
        meant. Like those that come, they are multiplied by the loss scale then."""
        scale = self.scaler.scale if self.scaler.enabled and not self._is_unscaled else 1.0
        clips = tuple(Transform(kind, value * scale if kind == "clamp" else value) for kind, value in self._clips)
        if self._is_unscaled:
            clips += (Transform("factor", self.scaler.scale),)
        if any(clip != Transform("factor", 1.0) for clip in clips):
            self._change_shards(GradientChange(clips=clips))
        self._clips, self._is_unscaled, self._is_told_to_clip = (), False, False

    def follow_scale(self, before: float) -> None:
        """The loss scale was `before`, and is another one now, since another optimizer has stepped: gradients that are
        there get it. Both are powers of two in most cases, and the change is exact then."""
        if not self.scaler.enabled or self._is_unscaled:
            return
        visible, change = (
            self._engine.gradients,
            GradientChange(clips=(Transform("factor", self.scaler.scale / before),)),
        )
        visible.absorb()
        self._change_shards(change)
        if not self._is_seen_unscaled:
            visible.follow(change.apply_, self._is_own)

    def _change_shards(self, change: GradientChange) -> None:
        """Change all gradients of this optimizer's parameters, in fp32 at least."""
        reducer = self._engine.reducer
        for chunk_id, members in self._states.members.items():
            grad = self._engine.store[chunk_id].grad
            if grad is None:
                continue
            spans = [s.in_shard for s in self._states.segments[chunk_id] if s.member_index in members]

            def write(shard: Tensor, spans: Sequence[slice] = spans) -> None:
                for span in spans:
                    change.apply_(shard[span])

            wide = torch.promote_types(torch.float32, grad.dtype)
            reducer.rewrite(self._engine.chunks[chunk_id], write, wide)

    def forget(self) -> None:
        """The gradients that this was for are gone."""
        self._clips, self._is_seen_unscaled, self._is_unscaled, self._is_told_to_clip = (), False, False, False

    def _is_own(self, chunk_id: int, index: int) -> bool:
        return index in self._states.members.get(chunk_id, ())
