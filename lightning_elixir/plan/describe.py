"""A placement in one line."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_elixir.plan.types import ChunkSpec, Forecast, Plan, StepTimes, Tier, UpdateTiming
from lightning_elixir.plan.units import format_bytes, format_seconds

IN_STEP_NOTE = "updated_in_step"
"""Key of a plan's `notes`: of how many chunks with states beside the GPU."""

_TIMINGS = {
    UpdateTiming.AFTER_BACKWARD: "after backward, and the next forward waits for all of them",
    UpdateTiming.BEHIND_FORWARD: "behind the next forward, which waits for each chunk's own when it needs that",
    UpdateTiming.INSIDE_BACKWARD: "from inside backward on, as gradients land, until the next forward needs the chunk",
}


def describe_placement(chunks: Sequence[ChunkSpec], blocks: int, depth: int) -> str:
    """A placement in one line."""
    n = len(chunks)
    trained = [c for c in chunks if c.requires_grad]
    states = sum(c.optim_tier is Tier.GPU for c in trained)
    kept = sum(c.is_persistent for c in chunks)
    if kept == n and states == len(trained):
        return f"everything on the GPU ({n} chunks)"
    plural = "" if len(trained) == 1 else "s"
    some = f"{n} chunk{plural}" if len(trained) == n else f"{len(trained)} trained chunk{plural} ({n} in all)"
    parts = [f"states of {states} of {some} on the GPU"]
    streamed = sum(c.is_update_streamed for c in trained)
    nvme = sum(c.optim_tier is Tier.NVME for c in trained)
    if streamed:
        parts.append(f"{streamed} streamed to it for their update")
    if nvme:
        parts.append(f"{nvme} on NVMe")
    on_nvme = sum(c.param_tier is Tier.NVME for c in chunks)
    if on_nvme:
        parts.append(f"parameters of {on_nvme} on NVMe")
    parts.append("all parameters on the GPU" if kept == n else f"parameters of {kept} on the GPU")
    if kept < n:
        made = sum(not c.is_persistent and c.param_tier is Tier.GPU for c in chunks)
        if made:  # of shards, or of masters
            parts.append(f"those of {made} made there when they are needed")
        parts.append(
            f"the others through an rCache of {blocks} block{'s' * (blocks != 1)}, {describe_fetching(blocks, depth)}"
        )
    return ", ".join(parts)


def describe_fetching(blocks: int, depth: int) -> str:
    """How many chunks can be on their way while one is in use."""
    ahead = min(depth, blocks - 1)
    return f"fetched {ahead} ahead" if ahead > 0 else "fetched when they are needed"


def describe_spending(times: StepTimes) -> str:
    """What most of a predicted step goes to, beside computing."""
    costs = {
        "updates, and the program between steps, take": times.step_s + times.update_waiting_s,
        "waiting for chunks and gradients takes": times.chunk_waiting_s,
    }
    dearest = max(costs, key=lambda name: costs[name])
    if costs[dearest] < _HIDDEN * times.total_s:
        return "nearly all of it computing"
    return f"of which {dearest} {format_seconds(costs[dearest])}"


def describe_weighing(forecast: Forecast) -> str:
    """By which seconds the alternatives were weighed, where the forecast has newer ones; else empty."""
    if forecast.weighed_s is None:
        return ""
    return f"by the times known then, when this plan was to take {format_seconds(forecast.weighed_s)}"


def describe_dating(forecast: Forecast) -> str:
    """When the predicted times were made, from what, and what was predicted before that; empty outside of a fit."""
    if forecast.after_steps is None:
        return ""
    if forecast.after_steps == 0:
        return "predicted before the first step"
    machine = f"what is known of the machine ({forecast.hardware})"
    by = f"{_after(forecast.after_steps)}, by what they were seen to take and {machine}"
    if forecast.foreseen_s is None:
        return f"predicted {by}"
    return f"brought up to date {by}; {describe_foreseen(forecast)}"


def describe_foreseen(forecast: Forecast) -> str:
    """What was predicted when the plan was chosen, where `times` are newer than that; else empty."""
    if forecast.foreseen_s is None:
        return ""
    return f"{when_foreseen(forecast)}: {format_seconds(forecast.foreseen_s)}"


def when_foreseen(forecast: Forecast) -> str:
    """When it was that `Forecast.foreseen_s` was predicted."""
    if not forecast.foreseen_after_steps:
        return "foreseen before the first step"
    return f"foreseen when the plan was chosen, {_after(forecast.foreseen_after_steps)}"


def _after(num_steps: int) -> str:
    return f"after {num_steps} step{'s' * (num_steps != 1)}"


_HIDDEN = 5e-3  # part of the step below which a cost is not worth telling
_PACE = 0.7
_FELT = 0.05


def describe_ignored(plan: Plan) -> str:
    """What is in no chunk; empty if there is nothing."""
    if not plan.ignored:
        return ""
    number, trained = len(plan.ignored), sum(p.requires_grad for p in plan.ignored)
    taken = plan.notes.get("ignored_bytes", sum(p.nbytes for p in plan.ignored))
    return (
        f"{number} parameter{'s' * (number > 1)} in no chunk ({trained} trained): {format_bytes(int(taken))} on the GPU"
        " all the time, with states and gradients, among the other data"
    )


def describe_disk(plan: Plan) -> str:
    """What the disk makes of a predicted step, and what would help, where that is much; else empty."""
    times = None if plan.forecast is None else plan.forecast.times
    if times is None or not times.nvme_s:
        return ""
    waiting_s = times.step_s + times.update_waiting_s
    if times.nvme_s < _PACE * times.total_s or waiting_s < _FELT * times.total_s:
        return ""
    notes = plan.notes
    lacking = int(notes.get("nvme_bytes", 0)) - int(notes.get("host_buffer_bytes", 0))
    memory = f"{format_bytes(lacking, is_rounded_up=True)} more host memory for each rank would keep all states there; "
    return (
        f"the disk sets the pace: it reads and writes states for {format_seconds(times.nvme_s)} of a step of"
        f" {format_seconds(times.total_s)}. {memory if lacking > 0 else ''}more micro-batches before each update give"
        " it more time to hide in, and a faster disk needs less"
    )


def describe_updates(plan: Plan) -> str:
    """When updates of states beside the GPU run, and where their gradients land; empty if there are none."""
    beside = [c for c in plan.chunks if c.requires_grad and c.optim_tier is not Tier.GPU]
    if not beside:
        return ""
    text = _TIMINGS[plan.update_timing]
    in_step = plan.notes.get(IN_STEP_NOTE, "")
    # Without a forecast, it was made for whatever comes.
    if (in_step or plan.forecast is None) and plan.update_timing is not UpdateTiming.AFTER_BACKWARD:
        of_chunks = f", of {in_step} chunks" if in_step else ""
        text += f" (those of HybridAdam and CPUAdam; other optimizers' run in their step{of_chunks})"
    if plan.grad_reuses_compute_shard:
        text += "; gradients take the place of the parameters in host memory, which saves 2 bytes each"
    if plan.has_spare_states:
        spared = sum(c.has_spare_states for c in beside)
        text += ", into spare states"
        if spared < len(beside):
            text += f" for {spared} of {len(beside)} chunks (the updates of the others wait for the step)"
        text += ": where a norm or a loss scale then says otherwise, they run again from the old ones"
    return text
