"""Forward, backward and update on the time axis."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_elixir.plan.simulator.timeline import Timeline


@dataclass(frozen=True)
class Phase:
    name: str
    start_s: float
    end_s: float


def phases(timeline: Timeline) -> list[Phase]:
    """The step's phases in order. Forward and backward are told apart where spans of the compute lane say which they
    are; of several micro-batches, each has its own."""
    end_s, backward_end_s = timeline.end_s, timeline.backward_end_s
    turns: list[tuple[str, float]] = []
    for span in timeline.spans:
        name = span.label.partition(" ")[0]
        if span.lane == "compute" and name in ("forward", "backward") and (not turns or turns[-1][0] != name):
            turns.append((name, span.start_s if turns else 0.0))
    if len(turns) < 2:
        turns = [("forward and backward", 0.0)]
    ends = [start_s for _, start_s in turns[1:]] + [backward_end_s]
    found = [Phase(name, start_s, until_s) for (name, start_s), until_s in zip(turns, ends, strict=True)]
    return [phase for phase in [*found, Phase("update", backward_end_s, end_s)] if phase.end_s > phase.start_s]
