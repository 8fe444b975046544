"""From a PyTorch model to a `Plan`: reads the model, then leaves the deciding to `plan/`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_elixir.core.comm import make_comm
from lightning_elixir.core.device import current_device_memory_bytes, make_device
from lightning_elixir.core.host import available_host_bytes
from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.kept_dtypes import kept_in
from lightning_elixir.plan.memory import Budget, ModelDataBytes
from lightning_elixir.plan.packing import PackedChunk, candidate_chunk_numels, pack, regular_block_bytes
from lightning_elixir.plan.placement import Layout, PlacementRequest, check_request, place
from lightning_elixir.plan.profile import MemoryProfile, StepProfile, step_profile
from lightning_elixir.plan.search import could_speculate, distance, search, with_forecast
from lightning_elixir.plan.space import Candidate, Problem
from lightning_elixir.plan.stream_buffers import STREAM_BYTES
from lightning_elixir.plan.structure import structural_profile
from lightning_elixir.plan.timeline import Timeline, scheme_of, simulate_step
from lightning_elixir.plan.types import ALIGN_NUMEL, DTYPE_BYTES, ParamSpec, Plan, UpdateTiming
from lightning_elixir.profiling.fake_step import StepFn, profile_memory
from lightning_elixir.profiling.kept_fp32 import KeepFp32, kept_parameters
from lightning_elixir.profiling.measured_hardware import profile_hardware
from lightning_elixir.profiling.parameters import dtype_name, module_accesses, norm_parameters, param_specs

__all__ = [
    "DEFAULT_PREFETCH_DEPTH",
    "detect_budget",
    "make_plan",
    "minimum_waste_search",
    "module_accesses",
    "norm_parameters",
    "optimal_search",
    "param_specs",
    "simple_search",
]

DEFAULT_PREFETCH_DEPTH = 2
DEFAULT_N_GRIDS = 128
_LEAST_PROGRESS = 0.9


def make_plan(
    model: nn.Module,
    *,
    placement_policy: str = "auto",
    shard_param_frac: float = 1.0,
    offload_optim_frac: float = 0.0,
    offload_param_frac: float = 0.0,
    chunk_size: int | None = None,
    chunk_search_range: int | None = None,
    chunk_search_n_grids: int | None = None,
    min_chunk_size: int | None = None,
    is_chunk_size_searched: bool = True,
    enable_distributed_storage: bool = True,
    prefetch: bool = True,
    prefetch_depth: int = DEFAULT_PREFETCH_DEPTH,
    gpu_margin_mem_ratio: float | None = None,
    compute_dtype: torch.dtype | None = None,
    keep_fp32: Collection[str] = (),
    master_weights: bool = True,
    num_states: int = 2,
    accumulates: bool = False,
    num_backwards: int = 1,
    can_stream: bool = False,
    update_timing: UpdateTiming = UpdateTiming.AFTER_BACKWARD,
    can_reuse_compute_shard: bool = False,
    needs_global_norm: bool = False,
    world_size: int = 1,
    gpu_bytes: int | None = None,
    cpu_bytes: int | None = None,
    nvme_bytes: int = 0,
    nvme_offload_fraction: float = 0.0,
    nvme_offload_param_fraction: float = 0.0,
    non_model_bytes: int = 0,
    profile: MemoryProfile | StepProfile | None = None,
    hardware: HardwareSpec | None = None,
    layout: Plan | None = None,
) -> Plan:
    """Plan where the model's chunks live. Measures nothing: equal arguments give equal plans.

    Args:
        model: The model, on any device.
        placement_policy: "auto", "cpu", "cuda", "const" or "static".
        shard_param_frac: const: share of the parameter bytes that is not persistent.
        offload_optim_frac: const: share of the optimizer bytes on the host.
        offload_param_frac: const: share of the parameter bytes on the host.
        chunk_size: Bytes of a chunk in the compute dtype; None: several sizes are simulated (auto), or the one with the
            least waste is taken, and smaller ones where `gpu_bytes` cannot hold the blocks of the best.
        chunk_search_range: Bytes above the smallest candidate to search; None: to three times of it.
        chunk_search_n_grids: How many chunk sizes to look at for their waste; None: 128.
        min_chunk_size: Bytes of the smallest candidate; None: 32 MiB, less for a small model.
        is_chunk_size_searched: auto: False takes the size with the least waste without simulating others.
        enable_distributed_storage: False: every rank keeps its parameter shards whole.
        prefetch: Whether to fetch ahead of need.
        prefetch_depth: How many chunks to fetch ahead; "auto" finds its own.
        gpu_margin_mem_ratio: auto: share of the GPU memory beside the rCache that optimizer states may take.
        compute_dtype: Dtype of forward and backward; None: each parameter keeps its own.
        keep_fp32: Names of parameters that are computed with in fp32 all the same; with a `layout`, as that has it.
        master_weights: Whether 16-bit parameters have an fp32 master.
        num_states: Optimizer states per element (Adam 2, SGD with momentum 1, without 0).
        accumulates: Gradients of several backwards are added up, in fp32.
        num_backwards: Micro-batches before each update, which count in the predicted step.
        can_stream: Whether the optimizer's updates may be streamed to the device (`HybridAdam`, `CPUAdam`).
        update_timing: When updates of states beside the device may run; what `num_backwards` and `accumulates` do not
            allow is left out.
        can_reuse_compute_shard: Whether gradients may land in compute shards where host memory would not suffice
            otherwise. Training must then have one backward before each update.
        needs_global_norm: Gradients are clipped by their norm, or the loss is scaled: updates begin inside backward
            only into spare states, for which the host must have memory; otherwise behind the next forward.
        world_size: Ranks that share a chunk.
        gpu_bytes: Device memory of one rank; None: not known, treated as unlimited.
        cpu_bytes: Host memory of one rank; None: not known, treated as unlimited.
        nvme_bytes: auto: NVMe space of one rank that states may take where the host's memory is short, and parameters
            where it is short even so.
        nvme_offload_fraction: Other policies: share of the states in host memory that goes on to NVMe.
        nvme_offload_param_fraction: Other policies: share of the parameters in host memory whose states are on NVMe,
            or that are frozen, that goes there as well, gradients with them.
        non_model_bytes: Device memory for activations, buffers and temporaries at their peak, without a `profile`.
        profile: What a step does: from `profile_memory`, or, with `layout`, measured over its chunks.
        hardware: Measured figures to predict times with; None: `HardwareSpec.nominal()`.
        layout: A plan of the same model whose chunks are kept and only placed anew; the chunk options are not used.

    Returns:
        The plan, with predicted bytes by kind in its `notes`, and from "auto" a `forecast`.

    Raises:
        PlanError: The model or an option cannot be used as given.
        CapacityError: A limit cannot hold what the policy needs.
    """
    if isinstance(profile, StepProfile) and layout is None:
        raise PlanError("a profile over chunks needs the layout that it was measured with")
    specs = param_specs(model, compute_dtype, keep_fp32 if layout is None else kept_in(layout))
    main_dtype = _main_dtype(specs, compute_dtype)
    request = PlacementRequest(
        policy=placement_policy,
        shard_param_frac=shard_param_frac,
        offload_optim_frac=offload_optim_frac,
        offload_param_frac=offload_param_frac,
        nvme_offload_fraction=nvme_offload_fraction,
        nvme_offload_param_fraction=nvme_offload_param_fraction,
        prefetch_depth=prefetch_depth if prefetch else 0,
        distributed_storage=enable_distributed_storage,
        gpu_margin_mem_ratio=gpu_margin_mem_ratio,
        accesses=module_accesses(model),
    )
    check_request(request, world_size)
    sizes = _ChunkSizes(
        specs, main_dtype, world_size, chunk_size, chunk_search_range, chunk_search_n_grids, min_chunk_size
    )
    has_one_backward = num_backwards == 1 and not accumulates
    problem = Problem(
        request=request,
        budget=Budget(gpu_bytes, cpu_bytes, non_model_bytes, nvme_bytes),
        world_size=world_size,
        data_bytes=data_bytes_of(master_weights=master_weights, num_states=num_states, accumulates=accumulates),
        hardware=hardware or HardwareSpec.nominal(gpu_bytes, cpu_bytes or 0),
        can_stream=can_stream,
        stream_bytes=STREAM_BYTES,
        accumulates=accumulates,
        num_backwards=num_backwards,
        is_time_guessed=profile is None,
        update_timing=_possible_timing(update_timing, has_one_backward=has_one_backward),
        can_reuse_compute_shard=can_reuse_compute_shard and has_one_backward,
        needs_global_norm=needs_global_norm,
    )

    def decide(layouts: Sequence[Layout]) -> Plan:
        if placement_policy == "auto":
            return search([Candidate(one, _profile_over(one, profile, problem)) for one in layouts], problem)
        try:
            plan = _placed(layouts[0], profile, problem.waiting())
        except CapacityError as error:
            if error.resource != "host" or not problem.can_reuse_compute_shard:
                raise
            return _placed(layouts[0], profile, problem.reusing())
        if could_speculate(plan, problem):
            with suppress(CapacityError):
                return _placed(layouts[0], profile, problem.speculating())
        return plan

    if layout is not None:
        kept = Layout(_packed_layout(layout, specs, world_size), layout.block_bytes, main_dtype)
        return decide([kept])
    has_choice = is_chunk_size_searched and placement_policy == "auto" and gpu_bytes is not None
    numels = sizes.candidates() if has_choice else sizes.candidates()[:1]
    refusal: CapacityError | None = None
    while True:
        try:
            return decide([sizes.layout(numel) for numel in numels])
        except CapacityError as error:
            # The smallest rCache is a few chunks: where the user left their size to us, smaller ones may fit.
            lacking, before = error.lacking_bytes or 0, refusal
            refusal = error if before is None else min(before, error, key=distance)
            numels = (min(numels) // 2,)
            # What the host lacks, and the whole GPU could not take, no chunk size brings.
            is_hopeless = error.resource == "host" and lacking > (gpu_bytes or 0)
            if before is not None and before.resource == error.resource:  # halving has to bring something
                is_hopeless |= lacking > _LEAST_PROGRESS * (before.lacking_bytes or 0)
            if is_hopeless or not sizes.is_free or gpu_bytes is None or numels[0] < ALIGN_NUMEL:
                raise refusal from None


def _possible_timing(wanted: UpdateTiming, *, has_one_backward: bool) -> UpdateTiming:
    """Gradients that are still to be added to cannot be used yet."""
    if wanted is UpdateTiming.INSIDE_BACKWARD and not has_one_backward:
        return UpdateTiming.BEHIND_FORWARD
    return wanted


def _placed(layout: Layout, profile: MemoryProfile | StepProfile | None, problem: Problem) -> Plan:
    """The plan of a fixed policy."""
    known = None if profile is None else _profile_over(layout, profile, problem)
    plan = place(
        layout,
        problem.request,
        problem.budget,
        problem.world_size,
        problem.data_bytes,
        profile=known,
        accumulates=problem.accumulates,
        update_timing=problem.update_timing,
        grad_reuses_compute_shard=problem.grad_reuses_compute_shard,
        has_spare_states=problem.has_spare_states,
    )
    return plan if known is None else with_forecast(plan, known, problem)


def data_bytes_of(*, master_weights: bool, num_states: int = 2, accumulates: bool = False) -> dict[str, ModelDataBytes]:
    """Bytes per element, by compute dtype.

    Args:
        master_weights: Whether 16-bit parameters have an fp32 master.
        num_states: Optimizer states per element.
        accumulates: Gradients of several backwards are added up, in fp32.
    """
    return {
        dtype: ModelDataBytes.of(
            dtype,
            has_master=master_weights,
            num_states=num_states,
            grad_bytes=max(4, itemsize) if accumulates else None,
        )
        for dtype, itemsize in DTYPE_BYTES.items()
    }


def timeline_of(
    plan: Plan,
    profile: MemoryProfile | StepProfile,
    hardware: HardwareSpec,
    *,
    master_weights: bool = True,
    num_states: int = 2,
    accumulates: bool = False,
    num_backwards: int = 1,
) -> Timeline:
    """The simulated step of any plan, with its spans and its memory.

    Args:
        plan: Not necessarily one that was made with this profile.
        profile: By parameter name, or measured over the chunks of this plan.
        hardware: Figures to predict times with.
        master_weights: Whether 16-bit parameters have an fp32 master.
        num_states: Optimizer states per element.
        accumulates: Gradients of several backwards are added up.
        num_backwards: Micro-batches before each update.
    """
    data_bytes = data_bytes_of(master_weights=master_weights, num_states=num_states, accumulates=accumulates)
    packed = tuple(PackedChunk(c.dtype, c.requires_grad, c.numel, c.members) for c in plan.chunks)
    over_chunks = profile if isinstance(profile, StepProfile) else step_profile(profile, packed, hardware)
    scheme = scheme_of(plan, data_bytes, STREAM_BYTES, accumulates=accumulates)
    return simulate_step(
        plan,
        over_chunks,
        hardware,
        scheme,
        accumulates=accumulates,
        num_backwards=num_backwards,
        is_detailed=True,
    )


def _profile_over(layout: Layout, profile: MemoryProfile | StepProfile | None, problem: Problem) -> StepProfile:
    if isinstance(profile, StepProfile):
        return profile
    if profile is not None:
        over_chunks = step_profile(profile, layout.packed, problem.hardware)
        return over_chunks.with_margin(layout.block_bytes)
    budget = problem.budget
    return structural_profile(layout, problem.request.accesses, problem.hardware, budget.non_model_bytes)


def detect_budget(
    local_world_size: int = 1,
    *,
    gpu_bytes: int | None = None,
    cpu_bytes: int | None = None,
    non_model_bytes: int = 0,
) -> Budget:
    """What one rank of this machine may use now. Initialises CUDA where there is one.

    Collective where the default process group has several ranks: all get what the poorest has, so that they plan alike.

    Args:
        local_world_size: Ranks on this host, which share its memory.
        gpu_bytes: Plan as if the device had no more than this.
        cpu_bytes: Plan as if this rank had no more host memory than this.
        non_model_bytes: Passed on.
    """
    device_bytes = current_device_memory_bytes()
    host_bytes = available_host_bytes() // max(1, local_world_size)
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        comm = make_comm(None, make_device().torch_device)
        everyone: list[tuple[int | None, int]] = comm.exchange_objects((device_bytes, host_bytes))
        comm.close()
        device_bytes = min((gpu for gpu, _ in everyone if gpu is not None), default=None)
        host_bytes = min(host for _, host in everyone)
    return Budget(
        gpu_bytes=min((b for b in (device_bytes, gpu_bytes) if b is not None), default=None),
        cpu_bytes=host_bytes if cpu_bytes is None else min(host_bytes, cpu_bytes),
        non_model_bytes=non_model_bytes,
    )


@dataclass(frozen=True)
class _ChunkSizes:
    """What the user said about the size of chunks, in bytes of the compute dtype."""

    specs: tuple[ParamSpec, ...]
    dtype: str
    world_size: int
    chunk_size: int | None
    search_range: int | None
    n_grids: int | None
    min_chunk_size: int | None

    @property
    def is_free(self) -> bool:
        return self.chunk_size is None and self.search_range is None and self.min_chunk_size is None

    def candidates(self) -> tuple[int, ...]:
        """Elements of a chunk; the size with the least waste first."""
        if self.chunk_size is not None:
            if self.chunk_size < 1:
                raise PlanError(f"chunk_size must be at least 1 byte, got {self.chunk_size}")
            return (max(1, self.chunk_size // DTYPE_BYTES[self.dtype]),)
        return candidate_chunk_numels(
            self.specs,
            self.world_size,
            compute_dtype=self.dtype,
            search_range_bytes=self.search_range,
            n_grids=DEFAULT_N_GRIDS if self.n_grids is None else self.n_grids,
            min_chunk_bytes=self.min_chunk_size,
        )

    def layout(self, chunk_numel: int) -> Layout:
        packed = pack(self.specs, chunk_numel, self.world_size, self.dtype)
        return Layout(packed, regular_block_bytes(packed, chunk_numel, self.world_size, self.dtype), self.dtype)


def _main_dtype(specs: tuple[ParamSpec, ...], compute_dtype: torch.dtype | None) -> str:
    """The compute dtype, or the one that most elements have."""
    if compute_dtype is not None:
        return dtype_name(compute_dtype)
    numels: dict[str, int] = {}
    for spec in specs:
        numels[spec.dtype] = numels.get(spec.dtype, 0) + spec.numel
    return max(numels, key=lambda dtype: numels[dtype], default="float32")


def _packed_layout(layout: Plan, specs: tuple[ParamSpec, ...], world_size: int) -> tuple[PackedChunk, ...]:
    if layout.world_size != world_size:
        raise PlanError(f"the layout was made for {layout.world_size} ranks, not for {world_size}: make a new plan")
    theirs = {m.fqn: (m.shape, c.dtype, c.requires_grad) for c in layout.chunks for m in c.members}
    ours = {s.fqn: (s.shape, s.dtype, s.requires_grad) for s in specs}
    if theirs != ours:
        different = [fqn for fqn in {**ours, **theirs} if ours.get(fqn) != theirs.get(fqn)]
        shown = "; ".join(
            f"{fqn}: {theirs.get(fqn)} in the plan, {ours.get(fqn)} in the model" for fqn in different[:3]
        )
        raise PlanError(f"the layout was made for another model: {len(different)} parameters differ ({shown})")
    return tuple(PackedChunk(c.dtype, c.requires_grad, c.numel, c.members) for c in layout.chunks)


# The ancestors' searches


def minimum_waste_search(
    model: nn.Module,
    world_size: int = 1,
    unified_dtype: torch.dtype = torch.float32,
    overlap: bool = False,
    verbose: bool = False,
    inp: Mapping[str, object] | None = None,
    step_fn: StepFn | None = None,
    *,
    keep_fp32: KeepFp32 = None,
) -> Plan:
    """The chunk size that wastes least, and the fastest placement of such chunks in the memory that there is now.

    What a step does is guessed from the order of the modules, and times from round figures: nothing is measured.

    Args:
        model: The model, on any device.
        world_size: Ranks that will train it, all on this host.
        unified_dtype: Compute dtype; a 16-bit one is trained with an fp32 master.
        overlap: Whether to prefetch.
        verbose: Print the plan, on the first rank.
        inp: Not used: this search measures no activations.
        step_fn: Not used.
        keep_fp32: As for `ElixirModule`, which puts what the plan has otherwise into chunks of its own.

    Raises:
        PlanError: The model cannot be used as given.
        CapacityError: The machine's memory cannot hold it.
    """
    budget = detect_budget(world_size)
    return _searched(
        model, world_size, unified_dtype, overlap, verbose, budget, keep_fp32, is_chunk_size_searched=False
    )


def simple_search(
    model: nn.Module,
    world_size: int = 1,
    unified_dtype: torch.dtype = torch.float32,
    overlap: bool = False,
    verbose: bool = False,
    inp: Mapping[str, object] | None = None,
    step_fn: StepFn | None = None,
    *,
    gpu_bytes: int | None = None,
    cpu_bytes: int | None = None,
    non_model_bytes: int = 0,
    local_world_size: int | None = None,
    chunk_search_range: int | None = None,
    chunk_search_n_grids: int | None = None,
    min_chunk_size: int | None = None,
    hardware: HardwareSpec | None = None,
    can_stream: bool = False,
    update_timing: UpdateTiming = UpdateTiming.BEHIND_FORWARD,
    keep_fp32: KeepFp32 = None,
) -> Plan:
    """Like `minimum_waste_search`, within limits of your own, and simulating several chunk sizes.

    Args:
        model: The model, on any device.
        world_size: Ranks that will train it.
        unified_dtype: Compute dtype; a 16-bit one is trained with an fp32 master.
        overlap: Whether to prefetch.
        verbose: Print the plan, on the first rank.
        inp: Not used: this search measures no activations.
        step_fn: Not used.
        gpu_bytes: Plan as if a rank's device had no more than this.
        cpu_bytes: Plan as if a rank had no more host memory than this.
        non_model_bytes: Device memory to leave for activations, buffers and temporaries.
        local_world_size: Ranks on this host; None: all of them.
        chunk_search_range: Bytes above the smallest chunk size to search.
        chunk_search_n_grids: How many chunk sizes to look at for their waste; None: 128.
        min_chunk_size: Bytes of the smallest chunk size.
        hardware: Figures of the machine, such as `profile_hardware()` measures; None: `HardwareSpec.nominal()`.
        can_stream: Whether updates may be streamed to the device: the optimizer is `HybridAdam` or `CPUAdam`.
        update_timing: When updates of states beside the device may run.
        keep_fp32: As for `ElixirModule`, which puts what the plan has otherwise into chunks of its own.

    Raises:
        PlanError: The model or a limit cannot be used as given.
        CapacityError: The memory cannot hold it.
    """
    budget = detect_budget(
        world_size if local_world_size is None else local_world_size,
        gpu_bytes=gpu_bytes,
        cpu_bytes=cpu_bytes,
        non_model_bytes=non_model_bytes,
    )
    return _searched(
        model,
        world_size,
        unified_dtype,
        overlap,
        verbose,
        budget,
        keep_fp32,
        chunk_search_range=chunk_search_range,
        chunk_search_n_grids=chunk_search_n_grids,
        min_chunk_size=min_chunk_size,
        hardware=hardware,
        can_stream=can_stream,
        update_timing=update_timing,
    )


def optimal_search(
    model: nn.Module,
    world_size: int = 1,
    unified_dtype: torch.dtype = torch.float32,
    overlap: bool = False,
    verbose: bool = False,
    inp: Mapping[str, object] | None = None,
    step_fn: StepFn | None = None,
    *,
    gpu_bytes: int | None = None,
    cpu_bytes: int | None = None,
    non_model_bytes: int | None = None,
    local_world_size: int | None = None,
    chunk_search_range: int | None = None,
    chunk_search_n_grids: int | None = None,
    min_chunk_size: int | None = None,
    hardware: HardwareSpec | None = None,
    can_stream: bool = False,
    update_timing: UpdateTiming = UpdateTiming.BEHIND_FORWARD,
    keep_fp32: KeepFp32 = None,
) -> Plan:
    """Like `simple_search`, knowing what a step touches, computes and takes, and what the machine reaches.

    Args:
        model: The model, on any device.
        world_size: Ranks that will train it.
        unified_dtype: Compute dtype; a 16-bit one is trained with an fp32 master.
        overlap: Whether to prefetch.
        verbose: Print the plan, on the first rank.
        inp: Inputs of one step, real tensors; only their shapes and dtypes count.
        step_fn: Runs forward and backward on (model, inp); it is run once on fake tensors.
        gpu_bytes: Plan as if a rank's device had no more than this.
        cpu_bytes: Plan as if a rank had no more host memory than this.
        non_model_bytes: Device memory to leave for activations, buffers and temporaries all the time; None: as the step
            on fake tensors takes it, or 0 without `step_fn`.
        local_world_size: Ranks on this host; None: all of them.
        chunk_search_range: Bytes above the smallest chunk size to search.
        chunk_search_n_grids: How many chunk sizes to look at for their waste; None: 128.
        min_chunk_size: Bytes of the smallest chunk size.
        hardware: Figures of the machine; None: `profile_hardware()` where there is a GPU (collective if the default
            process group has been started, and only then with several ranks), else `HardwareSpec.nominal()`.
        can_stream: Whether updates may be streamed to the device: the optimizer is `HybridAdam` or `CPUAdam`.
        update_timing: When updates of states beside the device may run.
        keep_fp32: As for `ElixirModule`, which puts what the plan has otherwise into chunks of its own.

    Raises:
        PlanError: The model, a limit or `step_fn` cannot be used as given.
        CapacityError: The memory cannot hold it.
    """
    if (inp is None) != (step_fn is None):
        raise PlanError("optimal_search needs both inp and step_fn to measure activations, or neither")
    local = world_size if local_world_size is None else local_world_size
    budget = detect_budget(local, gpu_bytes=gpu_bytes, cpu_bytes=cpu_bytes, non_model_bytes=non_model_bytes or 0)
    profile = None
    if inp is not None and step_fn is not None and non_model_bytes is None:
        profile = profile_memory(model, inp, step_fn, unified_dtype, keep_fp32=keep_fp32)
    # Ranks that measured each for itself would make different plans.
    if (
        hardware is None
        and current_device_memory_bytes() is not None
        and (world_size == 1 or torch.distributed.is_initialized())
    ):
        hardware = profile_hardware(local_world_size=local)
    return _searched(
        model,
        world_size,
        unified_dtype,
        overlap,
        verbose,
        budget,
        keep_fp32,
        chunk_search_range=chunk_search_range,
        chunk_search_n_grids=chunk_search_n_grids,
        min_chunk_size=min_chunk_size,
        hardware=hardware,
        can_stream=can_stream,
        update_timing=update_timing,
        profile=profile,
    )


def _searched(
    model: nn.Module,
    world_size: int,
    dtype: torch.dtype,
    overlap: bool,
    verbose: bool,
    budget: Budget,
    keep_fp32: KeepFp32,
    update_timing: UpdateTiming = UpdateTiming.BEHIND_FORWARD,
    **options: Any,
) -> Plan:
    is_half = dtype.itemsize == 2
    kept = kept_parameters(model, keep_fp32, has_autocast=False, has_defaults=is_half)
    plan = make_plan(
        model,
        placement_policy="auto",
        prefetch=overlap,
        compute_dtype=dtype,
        keep_fp32=kept if is_half else (),
        world_size=world_size,
        gpu_bytes=budget.gpu_bytes,
        cpu_bytes=budget.cpu_bytes,
        non_model_bytes=budget.non_model_bytes,
        update_timing=update_timing,
        can_reuse_compute_shard=is_half,  # there is a master then
        **options,
    )
    if verbose and not (dist.is_initialized() and dist.get_rank()):
        sys.stdout.write(f"{plan.explain()}\n")
    return plan
