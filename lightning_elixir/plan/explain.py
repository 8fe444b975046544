"""A plan in words."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_elixir.plan.activations import describe_activations
from lightning_elixir.plan.describe import (
    describe_dating,
    describe_disk,
    describe_ignored,
    describe_placement,
    describe_spending,
    describe_updates,
    describe_weighing,
)
from lightning_elixir.plan.sharding import sharding_note
from lightning_elixir.plan.types import DTYPE_BYTES, Forecast, Plan, StepTimes
from lightning_elixir.plan.units import format_bytes, format_seconds
from lightning_elixir.plan.weighing import weighing_lines

MARGIN_TEXT = "left to the allocator and to larger batches"
_PARTS = (
    ("compute_s", "computing in forward and backward"),
    ("waiting_s", "waiting for chunks, their updates and gradient blocks, not hidden"),
    ("step_s", "between backward and the next forward: updates on the device, the program"),
    ("update_waiting_s", "of the waiting: for updates that are not done yet"),
    ("adam_s", "updates, wherever they run, added up"),
    ("nvme_s", "the disk reads and writes states"),
    ("h2d_s", "the bus to the device is busy"),
    ("d2h_s", "the bus from the device is busy"),
    ("collective_s", "collectives"),
)


def _largest_bytes(plan: Plan) -> int:
    return max((c.numel * DTYPE_BYTES[c.dtype] for c in plan.chunks), default=0)


def _blocks_text(plan: Plan) -> str:
    """Parameters that are larger than a block have chunks of their own, which take several."""
    if _largest_bytes(plan) <= plan.block_bytes:
        return ""
    return f", in blocks of {format_bytes(plan.block_bytes)}"


def explain(plan: Plan) -> str:
    """The placement, what it is predicted to take and cost, what limits it, and what lost against it."""
    lines = _placement_lines(plan)
    if plan.forecast is None:
        lines += [f"  {name}: {format_bytes(v)}" for name, v in plan.notes.items() if isinstance(v, int) and v]
    else:
        lines += [*_memory_lines(plan, plan.forecast), *_time_lines(plan, plan.forecast)]
    return "\n".join(lines)


def _placement_lines(plan: Plan) -> list[str]:
    lines = [
        f"plan ({plan.policy}), {plan.world_size} rank{'s' * (plan.world_size > 1)}, {plan.compute_dtype}:"
        f" {len(plan.chunks)} chunks of up to {format_bytes(_largest_bytes(plan))}{_blocks_text(plan)}",
        f"  {describe_placement(plan.chunks, plan.rcache_blocks, plan.prefetch_depth)}",
    ]
    if sharding_note(plan):
        lines.append(f"  {sharding_note(plan)}")
    if not plan.mesh.is_trivial:
        cut = sum(c.nbytes for c in plan.chunks if c.axes)
        lines.append(
            f"  parallel patterns: tensor {plan.tensor_parallel_size}, expert {plan.expert_parallel_size};"
            f" {format_bytes(cut)} of the {format_bytes(sum(c.nbytes for c in plan.chunks))} of parameters that a rank"
            " computes with are its parts of cut ones"
        )
    why, *ways = weighing_lines(plan) or ("",)
    if why:
        lines += [f"  sizes of parallel patterns: {why}", *(f"    {way}" for way in ways)]
    updates = describe_updates(plan)
    if updates:
        lines.append(f"  updates of states beside the GPU run {updates}")
    activations = describe_activations(plan.activations)
    if activations:
        lines.append(f"  activations: {activations}")
    if plan.ignored:
        lines.append(f"  {describe_ignored(plan)}")
    return lines


def _memory_lines(plan: Plan, forecast: Forecast) -> list[str]:
    kinds = {
        "parameters": "gpu_param_bytes",
        "states": "gpu_state_bytes",
        "gradients": "gpu_grad_bytes",
        "rCache": "rcache_bytes",
        "buffers of updates": "gpu_stream_bytes",
        "activations and other data": "non_model_bytes",
    }
    amounts = {name: plan.gpu_kinds_beside_margin[key] for name, key in kinds.items()}
    on_host = {
        "parameters": "host_param_bytes",
        "states": "host_state_bytes",
        "spare states": "host_spare_bytes",
        "gradients": "host_grad_bytes",
        "activations": "host_activation_bytes",
        "buffers for states on NVMe": "host_buffer_bytes",
    }
    lines = [
        f"  limited by {forecast.binding}",
        f"  GPU, at the highest moment: {_of(forecast.peak_gpu_bytes, forecast.gpu_limit_bytes)}",
        f"    {_listed(amounts | {MARGIN_TEXT: forecast.margin_bytes})}",
        f"  host: {_of(forecast.host_bytes, forecast.host_limit_bytes)}",
        f"    {_listed(_amounts(plan, on_host))}",
    ]
    on_nvme = int(plan.notes.get("nvme_bytes", 0))
    if on_nvme:
        lines.append(f"  NVMe: {format_bytes(on_nvme)}")
    return lines


def _time_lines(plan: Plan, forecast: Forecast) -> list[str]:
    step = f"{format_seconds(forecast.times.total_s)}, {describe_spending(forecast.times)}"
    lines = [f"  predicted step: {step}; machine: {forecast.hardware}"]
    dating = describe_dating(forecast)
    if dating:
        lines.append(f"    {dating}")
    lines += [f"    {format_seconds(seconds)} {text}" for text, seconds in step_parts(forecast.times)]
    disk = describe_disk(plan)
    if disk:
        lines.append(f"  {disk}")
    if forecast.alternatives:
        when = describe_weighing(forecast)
        lines.append(f"  looked at as well{f', {when}' if when else ''}:")
        for other in forecast.alternatives:
            time = "does not fit" if other.total_s is None else format_seconds(other.total_s)
            lines.append(f"    {time}: {other.description} ({other.reason})")
    return lines


def step_parts(times: StepTimes) -> list[tuple[str, float]]:
    """(what, seconds) of a step; the first three add up to the whole, the others overlap with them."""
    parts = [(text, float(getattr(times, name))) for name, text in _PARTS]
    return parts[:3] + [(text, seconds) for text, seconds in parts[3:] if seconds > 0]


def _of(nbytes: int, limit: int | None) -> str:
    return format_bytes(nbytes) if limit is None else f"{format_bytes(nbytes)} of {format_bytes(limit)}"


def _amounts(plan: Plan, kinds: Mapping[str, str]) -> dict[str, int]:
    """Bytes of each kind, whose note in the plan is given."""
    return {name: int(plan.notes.get(key, 0)) for name, key in kinds.items()}


def _listed(amounts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in amounts.items() if nbytes) or "nothing"
