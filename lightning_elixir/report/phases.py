"""Forward, backward and update on the time axis."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_elixir.plan.timeline import Timeline


@dataclass(frozen=True)
class Phase:
    name: str
    start_s: float
    end_s: float


def phases(timeline: Timeline) -> list[Phase]:
    """The step's phases in order. Forward and backward are told apart where spans of the compute lane say which they
    are."""
    end_s, backward_end_s = timeline.end_s, timeline.backward_end_s
    turn_s = next((s.start_s for s in timeline.spans if s.lane == "compute" and s.label.startswith("backward")), None)
    if turn_s is None:
        found = [Phase("forward and backward", 0.0, backward_end_s)]
    else:
        found = [Phase("forward", 0.0, turn_s), Phase("backward", turn_s, backward_end_s)]
    return [phase for phase in [*found, Phase("update", backward_end_s, end_s)] if phase.end_s > phase.start_s]
