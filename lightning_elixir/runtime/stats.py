"""What an engine tells of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_elixir.plan.rcache import RCache
from lightning_elixir.plan.units import format_bytes, format_seconds
from lightning_elixir.runtime.sampling import StepSeconds
from lightning_elixir.runtime.transport import TransferBytes
from lightning_elixir.storage.nvme import StateTraffic


@dataclass(frozen=True)
class Stats:
    """Counters since the last reset, and bytes held now."""

    fetches: int
    """Replicas fetched when they were needed."""
    prefetches: int
    """Replicas fetched ahead of need."""
    hits: int
    """Times a chunk was needed and there, or on its way."""
    evictions: int
    """Replicas that were dropped for others."""
    overflows: int
    """Times more replicas were needed at once than the plan's rCache holds: it has grown."""
    misses_of_trace: int
    """Times a chunk was needed elsewhere than in the step that was watched: what comes next was not known."""
    peak_blocks: int
    """Most blocks of the rCache in use at once."""
    h2d_bytes: int
    """Copied from host memory to the device."""
    d2h_bytes: int
    """Copied from the device to host memory."""
    gathered_bytes: int
    """Of the replicas that all-gathers have put together from shards."""
    reduced_bytes: int
    """Of gradients, given to reductions over ranks."""
    held_bytes: dict[str, int]
    """By tier and kind, such as `gpu_states` or `cpu_param`; `replica` and `grad_block` are on the device."""
    compute_s: float | None = None
    """Device time of the operators of the last timed forward and backward, of one micro-batch where a step has several;
    None before there was one."""
    exposed_wait_s: float | None = None
    """Time in the same iteration in which nothing ran because a chunk or a gradient block was not there."""
    redone_steps: int = 0
    """Steps of which updates had begun inside backward and were dropped: they ran again, or the step was skipped."""
    nvme_read_bytes: int = 0
    """Of masters and optimizer states on NVMe."""
    nvme_written_bytes: int = 0
    """Of the same."""
    activations_out_bytes: int = 0
    """Of activations, copied to host memory in forward; not part of `d2h_bytes`."""
    activations_in_bytes: int = 0
    """Of activations, copied back in backward; not part of `h2d_bytes`."""
    activations_left_bytes: int = 0
    """Of activations that were to go to host memory, found no room there, and stayed on the device."""
    recomputed_blocks: int = 0
    """Calls of blocks whose activations were dropped in forward."""
    reduced_across_bytes: int = 0
    """Of the slices of these that copies of the parameters have exchanged (`sharding="node"`)."""
    nvme_wait_s: float = 0.0
    """Time in which updates of such states were wanted, and none had come from the disk that could go on."""

    def __str__(self) -> str:
        """A line for each figure that is not zero, for people: bytes and seconds in suitable units."""
        lines = [f"{name}: {_told(name, value)}" for name, value in self.as_dict().items() if value]
        return "\n".join(lines) or "nothing was counted yet"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _told(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in value.items() if nbytes) or "nothing"
    if name.endswith("_bytes"):
        return format_bytes(value)
    return format_seconds(value) if name.endswith("_s") else f"{value:,}"


def take_stats(
    rcache: RCache,
    moved: TransferBytes,
    held: Mapping[str, int],
    seconds: StepSeconds | None,
    redone_steps: int,
    traffic: StateTraffic,
) -> Stats:
    """What has been counted so far.

    Args:
        held: Bytes by tier and kind.
        seconds: Of the last timed iteration.
        redone_steps: See `Stats`.
        traffic: Of states on NVMe.
    """
    counters = rcache.counters
    return Stats(
        fetches=counters.fetches,
        prefetches=counters.prefetches,
        hits=counters.hits,
        evictions=counters.evictions,
        overflows=counters.overflows,
        misses_of_trace=counters.misses_of_trace,
        peak_blocks=rcache.peak_blocks,
        h2d_bytes=moved.h2d,
        d2h_bytes=moved.d2h,
        gathered_bytes=moved.gathered,
        reduced_bytes=moved.reduced,
        reduced_across_bytes=moved.reduced_across,
        held_bytes=dict(held),
        compute_s=None if seconds is None else seconds.compute_s,
        exposed_wait_s=None if seconds is None else seconds.exposed_wait_s,
        redone_steps=redone_steps,
        activations_out_bytes=moved.activations_out,
        activations_in_bytes=moved.activations_in,
        activations_left_bytes=moved.activations_left,
        recomputed_blocks=moved.recomputed_blocks,
        nvme_read_bytes=traffic.read_bytes,
        nvme_written_bytes=traffic.written_bytes,
        nvme_wait_s=traffic.waited_s,
    )
