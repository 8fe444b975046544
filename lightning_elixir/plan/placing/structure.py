"""What a step does as far as the order of a model's modules tells."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.placing.placement import Layout
from lightning_elixir.plan.profile import StepInterval, StepProfile
from lightning_elixir.plan.types import AccessTrace, Acquire, Drop

_USUAL_TRANSFER_BYTES = 128 * 2**20


def structural_profile(
    layout: Layout,
    accesses: Sequence[tuple[str, tuple[str, ...]]],
    hardware: HardwareSpec,
    non_model_bytes: int = 0,
) -> StepProfile:
    """What a step does as far as the order of the modules tells: forward in that order, backward in the reverse.

    Computing is taken to last as long as fetching the same parameters (backward twice that), where overlap matters
    most.

    Args:
        layout: The chunks.
        accesses: (module name, FQNs that it owns directly), in the order of use.
        hardware: For the time of a fetch.
        non_model_bytes: Beside the chunks, all the time.
    """
    chunk_of = {m.fqn: i for i, c in enumerate(layout.packed) for m in c.members}
    size_of = {m.fqn: m.numel * c.nbytes // max(1, c.numel) for c in layout.packed for m in c.members}
    rate = hardware.h2d.bytes_per_s(_USUAL_TRANSFER_BYTES)  # the same for every chunk size
    visits: list[tuple[tuple[int, ...], float]] = []
    for _, fqns in accesses:
        ids = tuple(dict.fromkeys(chunk_of[fqn] for fqn in fqns if fqn in chunk_of))
        if ids:
            visits.append((ids, sum(size_of.get(fqn, 0) for fqn in fqns) / rate))
    events: list[Acquire | Drop] = []
    intervals = [StepInterval(0.0, non_model_bytes)]
    for ids, seconds in visits:
        events += [Acquire(ids, is_pinned=True), Drop(ids)]
        intervals.append(StepInterval(seconds, non_model_bytes))
    first_visit = {i: at for at, (ids, _) in reversed(list(enumerate(visits))) for i in ids}
    for at, (ids, seconds) in reversed(list(enumerate(visits))):
        events.append(Acquire(ids, is_pinned=False))
        finished = tuple(i for i in ids if first_visit[i] == at and layout.packed[i].requires_grad)
        intervals.append(StepInterval(2 * seconds, non_model_bytes, finished))
    return StepProfile(AccessTrace(tuple(events)), tuple(intervals))
