"""From what is known of a fit to what plans have to know of it: pure, for the strategy and for the command."""

from __future__ import annotations

from dataclasses import replace

from lightning_elixir.plan.regime import OtherStates, TrainingRegime
from lightning_elixir.plan.types import UpdateTiming


def base_regime(*, is_mixed: bool) -> TrainingRegime:
    """What is known without a Trainer.

    Args:
        is_mixed: 16 bits with an fp32 master.
    """
    return TrainingRegime(
        master_weights=is_mixed, can_reuse_compute_shard=is_mixed, update_timing=UpdateTiming.BEHIND_FORWARD
    )


def fit_regime(
    *,
    is_mixed: bool,
    wanted: str,
    can_begin_early: bool,
    needs_global_norm: bool,
    accumulates: bool,
    num_backwards: int,
    most_backwards: int | None = None,
) -> TrainingRegime:
    """What training is like, as far as that is known without the optimizer.

    Args:
        is_mixed: 16 bits with an fp32 master.
        wanted: The user's `update_timing`.
        can_begin_early: Nothing happens between a backward and its step: no clipping, no loss scale, no hook, no other
            dtype of reduction.
        needs_global_norm: What happens there is clipping by the norm, or loss scaling.
        accumulates: Gradients of several backwards may be added up.
        num_backwards: How many of them, as far as that is known.
        most_backwards: More never come before an update; None: not known.
    """
    is_early_possible = is_mixed and can_begin_early
    is_inside_wanted = wanted in ("auto", "inside_backward")
    needs_norm = is_mixed and needs_global_norm and not is_early_possible
    is_inside = is_inside_wanted and (is_early_possible or needs_norm)
    timing = UpdateTiming.INSIDE_BACKWARD if is_inside else UpdateTiming.BEHIND_FORWARD
    return replace(
        base_regime(is_mixed=is_mixed),
        accumulates=accumulates,
        num_backwards=num_backwards,
        most_backwards=most_backwards,
        update_timing=UpdateTiming.AFTER_BACKWARD if wanted == "after_backward" else timing,
        needs_global_norm=is_inside_wanted and needs_norm,
    )


def guessed_regime(regime: TrainingRegime) -> TrainingRegime:
    """What a model is cut into chunks for, before its optimizer is known: an Adam of ours, and no clipping, for which
    spare states come on top."""
    return replace(regime, can_stream=True, needs_global_norm=False)


def states_of_averages(regime: TrainingRegime, num_averages: int) -> int:
    """How many states more so many averages of the weights are, which are in fp32: two of parameters in 16 bits without
    masters."""
    return num_averages * (1 if regime.master_weights else 2)


def with_optimizer(
    regime: TrainingRegime,
    *,
    can_stream: bool,
    in_step: frozenset[str] = frozenset(),
    num_states: int,
    byte_states: int = 0,
    other_states: OtherStates = (),
    whole_update_bytes: int = 0,
) -> TrainingRegime:
    """What training is like with this optimizer.

    Args:
        regime: Without it.
        can_stream: Whether all updates may be streamed to the device, and run behind a forward: `HybridAdam` alone.
        in_step: See `TrainingRegime`.
        num_states: States for each element.
        byte_states: Further ones, of one byte each.
        other_states: See `TrainingRegime`.
        whole_update_bytes: See `TrainingRegime`.
    """
    timing = regime.update_timing
    if not can_stream and not in_step:
        timing = UpdateTiming.AFTER_BACKWARD
    elif in_step and timing is UpdateTiming.INSIDE_BACKWARD:  # between backward and these steps come the others
        timing = UpdateTiming.BEHIND_FORWARD
    return replace(
        regime,
        in_step=in_step,
        can_stream=can_stream,
        num_states=num_states,
        byte_states=byte_states,
        other_states=other_states,
        update_timing=timing,
        whole_update_bytes=whole_update_bytes,
    )
