"""Why nothing fits, and the nearest changes that would: errors of the search."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_elixir.errors import CapacityError
from lightning_elixir.plan.memory import host_bytes_for, memory_use
from lightning_elixir.plan.packing import round_up
from lightning_elixir.plan.placing.parts import STREAMABLE, gpu_parts, host_parts
from lightning_elixir.plan.placing.placement import Placement, Placer
from lightning_elixir.plan.placing.spilling import Spilling, in_host_memory
from lightning_elixir.plan.problem import Problem
from lightning_elixir.plan.profile import StepProfile
from lightning_elixir.plan.types import ChunkSpec
from lightning_elixir.plan.units import format_bytes

# Activations cannot be cut to less than this part: of a batch of eight, one sample and checkpointing would be left.
_LEAST_ACTIVATIONS = 10

# To such a part of itself it is found how much more memory a device needs.
_CURE_PARTS = 64

# LoRA trains less than a hundredth of the parameters, with 16 bytes for each, where a frozen one has 2.
_BESIDE_FROZEN = 1.1


def gpu_refusal(smallest: Placement, placer: Placer, problem: Problem, profile: StepProfile) -> CapacityError:
    """The device cannot hold what must be there.

    Args:
        smallest: With as little there as possible.
        placer: Of its layout.
        problem: Whether it is known what a step takes.
        profile: What a step takes beside it.
    """
    limit, needed = placer.budget.gpu_bytes or 0, smallest.gpu_bytes(smallest.smallest)
    blocks, module = placer.needs.smallest(smallest.managed)
    other = profile.peak_non_model_bytes - placer.ignored_bytes
    words = placer.budget.words
    cures = [f"{_least(problem)}{format_bytes(needed - limit, is_rounded_up=True)} {words.more}"]
    share = 100 * (limit - needed + other) // other if other else 0
    if share >= _LEAST_ACTIVATIONS and smallest.update_bytes(blocks) <= limit:
        how = "" if profile.is_recomputing else ", or activation checkpointing"
        cures.append(f"activations cut to {share}% (a batch that much smaller{how})")
    if needed - limit <= placer.saved_by_smaller_chunks(smallest.chunks, blocks):
        cures.append("perhaps a smaller chunk_size")
    parts = gpu_parts(smallest.at_peak, placer.ignored_bytes, placer.scheme, blocks, module)
    return CapacityError(
        f"{words.memory}: even with as much as possible beside it, a rank needs {format_bytes(needed)} ({parts}),"
        f" but there are {format_bytes(limit)}. What would fit{_known(problem)}: {', or '.join(cures)}.",
        resource="GPU",
        lacking_bytes=needed - limit,
    )


def _least(problem: Problem) -> str:
    return "at least " if problem.is_time_guessed else ""


def _known(problem: Problem) -> str:
    """What figures of what would fit leave out, where they are made without a step."""
    if not problem.is_time_guessed:
        return ""
    left_out = "activations" if problem.budget.words.has_activations else "what only a step shows"
    return f", {left_out} not counted"


def host_refusal(
    placement: Placement, placer: Placer, problem: Problem, fits: Callable[[Problem], bool]
) -> CapacityError:
    """The host cannot hold what the device has no room for.

    Args:
        placement: With as much as possible on the device.
        placer: Of its layout.
        problem: Its ranks, and what was asked for.
        fits: Whether the same chunks fit what is given otherwise.
    """
    use = placement.use
    limit = problem.budget.cpu_bytes or 0
    lacking = use.host_bytes - limit
    words = problem.budget.words
    how = f" (raise {words.host_limit})" if words.host_limit else ""
    reserve = problem.budget.reserve_bytes
    kept = f", and {format_bytes(reserve)} kept back for processes, their data and loaders" if reserve else ""
    # With what is kept back of it
    of_host = host_bytes_for(use.host_bytes) - host_bytes_for(limit)
    more = lacking if words.is_limit_usable else of_host
    cures = [f"{_least(problem)}{format_bytes(more, is_rounded_up=True)} more host memory for each rank{how}"]
    on_nvme = _nvme_cure(placement.chunks, placer, _least(problem))
    if on_nvme is not None:
        cures.append(on_nvme)
    on_device = _device_cure(use.host_bytes, problem, fits)
    if on_device is not None:
        cures.append(on_device)
    if problem.regime.master_weights and placer.layout.compute_dtype == "bfloat16":
        bare = problem.regime.without_masters()
        if fits(replace(problem, regime=bare).with_updates(bare.waiting())):
            cures.append('precision="bf16-true" (no fp32 masters)')
    of_all = sum(map(placer.scheme.param_shard_bytes, placement.chunks))
    trained = sum(placer.scheme.param_shard_bytes(c) for c in placement.chunks if c.requires_grad)
    if use.host_state_bytes and 2 * trained > of_all and of_all * _BESIDE_FROZEN + use.host_activation_bytes <= limit:
        cures.append(f"LoRA, if pretrained weights are tuned (frozen, all parameters take {format_bytes(of_all)})")
    cures.append("a smaller model" + ", or an optimizer with fewer states" * (use.host_state_bytes > 0))
    # What more ranks, each on a host of its own, do not divide.
    whole = 0 if problem.request.distributed_storage else use.host_param_bytes
    if limit > whole:
        mesh = placer.scheme.mesh
        hosts = math.ceil((use.host_bytes - whole) * problem.world_size / (limit - whole))
        hosts = round_up(hosts, mesh.tensor * mesh.expert * mesh.copies)
        # Several ranks need more of each device than one (`Scheme.grad_block_bytes`), and what is there no more is here
        counts = (hosts, 2 * hosts)
        fitting = next((count for count in counts if fits(replace(problem, world_size=count))), None)
        if fitting is not None:
            cures.append(f"{fitting} {words.devices}, each on a host of its own")
    return CapacityError(
        f"host memory: with as much on the {words.device} as it holds, each rank still needs"
        f" {format_bytes(use.host_bytes)} on the host ({host_parts(use)}), but there are {format_bytes(limit)}{kept}."
        f" What would fit{_known(problem)}: {', or '.join(cures)}.",
        resource="host",
        lacking_bytes=lacking,
    )


def _device_cure(host_bytes: int, problem: Problem, fits: Callable[[Problem], bool]) -> str | None:
    """How much more the device would have to hold for the host to have enough; None if it is no cure.

    Args:
        host_bytes: What the host would have to hold.
        problem: As for `host_refusal`.
        fits: As there.
    """
    limit = problem.budget.gpu_bytes
    if limit is None:
        return None

    def fits_with(more: int) -> bool:
        return fits(replace(problem, budget=replace(problem.budget, gpu_bytes=limit + more)))

    # The device takes no more for anything than the host does, but for gradients on their way.
    low, high = 0, 2 * host_bytes
    if not fits_with(high):
        return None
    while high - low > max(1, high // _CURE_PARTS):
        middle = (low + high) // 2
        low, high = (low, middle) if fits_with(middle) else (middle, high)
    return f"{_least(problem)}{format_bytes(high, is_rounded_up=True)} {problem.budget.words.more}"


def _nvme_cure(chunks: Sequence[ChunkSpec], placer: Placer, at_least: str) -> str | None:
    """What has to go on to NVMe, with what is there already, or what a disk leaves to the host; None if it is no
    cure. Figures begin with `at_least`."""
    scheme, limit = placer.scheme, placer.budget.cpu_bytes or 0
    if scheme.regime.whole_update_bytes:
        return None  # such states stay in memory
    spilling, whose = Spilling(scheme), "optimizer states"
    use = memory_use(spilling.states(in_host_memory(chunks), limit, None), 0, scheme)
    if use.host_bytes > limit:
        moved = spilling.states_and_params(in_host_memory(chunks), limit, sys.maxsize)
        if moved is None:
            least = format_bytes(use.host_bytes, is_rounded_up=True)
            is_cure = use.nvme_bytes and not placer.budget.nvme_bytes  # with the disk, the host lacks that in any case
            return f"{at_least}{least} on the host beside a disk (nvme_offload_dir; {STREAMABLE})" if is_cure else None
        use, whose = memory_use(moved, 0, scheme), "optimizer states and parameters"
    nbytes = format_bytes(use.nvme_bytes, is_rounded_up=True)
    return f"{at_least}{nbytes} of NVMe for each rank's {whose} (nvme_offload_dir; {STREAMABLE})"
