"""From a PyTorch model to a `Plan`: reads the model, then leaves the deciding to `plan/`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_elixir.core.comm import make_comm
from lightning_elixir.core.device import current_device_memory_bytes, make_device, segments_grow
from lightning_elixir.core.host import available_host_bytes
from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.fused import FusedChoice
from lightning_elixir.plan.activations import ActivationRequest, ModelBlock
from lightning_elixir.plan.device_words import DeviceWords
from lightning_elixir.plan.fates import with_fates
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.ignored import ignored_bytes
from lightning_elixir.plan.kept_dtypes import kept_in
from lightning_elixir.plan.memory import Budget, Scheme, host_share, uses_nvme
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.plan.packing import DEFAULT_N_GRIDS, ChunkSizes, PackedChunk, packed_chunks
from lightning_elixir.plan.placing.fallbacks import plan_with_fallbacks
from lightning_elixir.plan.placing.fates_tried import FatesTried, with_alternatives
from lightning_elixir.plan.placing.placement import Layout, Placer, first_on_device, place
from lightning_elixir.plan.placing.search import distance, search, with_forecast
from lightning_elixir.plan.placing.space import Candidate
from lightning_elixir.plan.placing.structure import structural_profile
from lightning_elixir.plan.problem import DEFAULT_PREFETCH_DEPTH, PlacementRequest, Problem
from lightning_elixir.plan.profile import MemoryProfile, StepProfile, step_profile
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.sharding import Sharding, best_sharding, check_sharding, meshes_of
from lightning_elixir.plan.simulator.timeline import Timeline, peak_gpu_bytes, scheme_of, simulate_step
from lightning_elixir.plan.types import ALIGN_NUMEL, TRAINED_DTYPES, IgnoredParam, ParamSpec, Plan, UpdateTiming
from lightning_elixir.plan.units import option_bytes
from lightning_elixir.profiling.blocks import blocks_of
from lightning_elixir.profiling.fake_step import StepFn, profile_memory
from lightning_elixir.profiling.ignored import Ignored, ignored_parameters
from lightning_elixir.profiling.kept_fp32 import KeepFp32, kept_parameters
from lightning_elixir.profiling.measured_hardware import profile_hardware
from lightning_elixir.profiling.parameters import (
    dtype_name,
    module_accesses,
    norm_parameters,
    param_specs,
    recomputed_layers,
)

__all__ = [
    "Budget",
    "ChunkSizes",
    "PlacementRequest",
    "TrainingRegime",
    "detect_budget",
    "make_plan",
    "minimum_waste_search",
    "module_accesses",
    "norm_parameters",
    "optimal_search",
    "param_specs",
    "place_anew",
    "place_to_build",
    "simple_search",
    "timeline_of",
]

ActivationsOption = str | Mapping[str, str] | None
"""None, "auto", the value of a `Fate`, or a dict from globs over names of blocks to values of `Fate`."""

COMMON_SHARE = 0.15
"""Of the device's memory, for activations before anything is known of them: what is too little costs moving some chunks
to the host, what is too much has all of them go through the host's memory."""

_LEAST_PROGRESS = 0.9


def make_plan(
    model: nn.Module,
    request: PlacementRequest = PlacementRequest(),
    *,
    chunk_sizes: ChunkSizes = ChunkSizes(),
    budget: Budget = Budget(),
    regime: TrainingRegime = TrainingRegime(),
    world_size: int = 1,
    mesh: Mesh | None = None,
    compute_dtype: torch.dtype | None = None,
    keep_fp32: Collection[str] = (),
    ignored: Collection[IgnoredParam] | None = None,
    profile: MemoryProfile | StepProfile | None = None,
    hardware: HardwareSpec | None = None,
    layout: Plan | None = None,
    serves_to_build: bool = False,
) -> Plan:
    """Plan where the model's chunks live. Measures nothing: equal arguments give equal plans.

    Args:
        model: The model, on any device.
        request: Policy and options of the placement; `accesses` are those of the model.
        chunk_sizes: Which sizes chunks may have.
        budget: What one rank may use. "auto": states may take the NVMe space where the host's memory is short, and
            parameters where it is short even so. Activations count as in a `profile`, where there is one.
        regime: What training is like.
        world_size: All ranks; not used with a `mesh`.
        mesh: The ranks where patterns cut parameters between them; None: nothing is cut.
        compute_dtype: Dtype of forward and backward; None: each parameter keeps its own.
        keep_fp32: Names of parameters that are computed with in fp32 all the same; with a `layout`, as that has it.
        ignored: Parameters that are left out of chunks, from `ignored_parameters`; None: frozen ones that no chunk can
            hold. With a `layout`, as that has it.
        profile: What a step does: from `profile_memory`, or, with `layout`, measured over its chunks.
        hardware: Measured figures to predict times with; None: `HardwareSpec.nominal()`.
        layout: A plan of the same model whose chunks are kept and only placed anew; `chunk_sizes` is not used.
        serves_to_build: Only its chunks are to stay, and are placed anew when a step is known: a third of the
            placements are simulated. In 27 simulated fits that did not make the later plans slower by more than 1%, and
            one of them faster by 11%.

    Returns:
        The plan, with predicted bytes by kind in its `notes`, and from "auto" a `forecast`.

    Raises:
        PlanError: The model or an option cannot be used as given.
        CapacityError: A limit cannot hold what the policy needs.
    """
    if isinstance(profile, StepProfile) and layout is None:
        raise PlanError("a profile over chunks needs the layout that it was measured with")
    if layout is not None:
        left_out = layout.ignored
    else:
        left_out = ignored_parameters(model, None) if ignored is None else tuple(ignored)
    names = [p.fqn for p in left_out]
    specs = param_specs(model, compute_dtype, keep_fp32 if layout is None else kept_in(layout), names)
    blocks = blocks_of(model, request.activations) if layout is None else layout.activations
    main_dtype = _main_dtype(specs, compute_dtype)
    mesh = mesh or Mesh(world_size)
    world_size = mesh.world_size
    mesh.check()
    problem = Problem(
        request=replace(request, accesses=module_accesses(model)),
        budget=budget,
        world_size=world_size,
        regime=regime,
        hardware=hardware or HardwareSpec.nominal(budget.gpu_bytes, budget.cpu_bytes or 0),
        is_time_guessed=profile is None,
        serves_to_build=serves_to_build,
        blocks=blocks,
        activation_host_bytes=None if layout is None else layout.activation_host_bytes,
        tensor_parallel_size=mesh.tensor,
        expert_parallel_size=mesh.expert,
        num_copies=mesh.copies,
    )
    problem.check()

    def planned(problem: Problem) -> Plan:
        if layout is not None:
            packed = _packed_layout(layout, specs, world_size)
            return _decided([Layout(packed, layout.block_bytes, main_dtype)], problem, profile, left_out)

        def of_sizes(numels: Sequence[int]) -> Plan:
            layouts = [Layout.of(specs, numel, world_size, main_dtype) for numel in numels]
            return _decided(layouts, problem, profile, left_out)

        numels = chunk_sizes.candidates(specs, world_size, main_dtype)
        if not (chunk_sizes.is_searched and request.policy == "auto" and budget.gpu_bytes is not None):
            numels = numels[:1]
        is_fixed = not chunk_sizes.is_free or budget.gpu_bytes is None
        return of_sizes(numels) if is_fixed else _with_smaller_chunks(numels, of_sizes, budget)

    if profile is None:
        # Layers that are recomputed need more at a time than they show. That is known of the model alone, not whether
        # there will be a backward: where nothing is small enough for that, it is left to the step to show.
        wary = replace(request, accesses=module_accesses(model, recomputed_layers(model, blocks)))
        if wary.accesses != problem.request.accesses:
            with suppress(CapacityError):
                return planned(replace(problem, request=wary))
    return planned(problem)


def place_anew(
    layout: Plan,
    request: PlacementRequest,
    budget: Budget,
    regime: TrainingRegime,
    hardware: HardwareSpec | None = None,
) -> Plan:
    """As `make_plan` with a `layout` and no profile, for a model whose parameters are in the layout's chunks already.

    Args:
        layout: Its chunks are placed anew.
        request: Policy, options and the model's accesses.
        budget: What one rank may use.
        regime: What training is like.
        hardware: As there.

    Raises:
        CapacityError: A limit cannot hold what the policy needs.
    """
    problem = _problem_over(layout, request, budget, regime, hardware)
    return _decided([_layout_of(layout)], problem, None, layout.ignored)


def place_to_build(
    guessed: Plan, model: nn.Module, request: PlacementRequest, budget: Budget, regime: TrainingRegime
) -> Plan:
    """The same plan with as many bytes of persistent chunks with their states on the device, but of the first chunks;
    all other trained chunks, sharded ones too, go to the host. For a model to be built under, before a step is known.

    That is where most of them are to be once a step is known: gradients of the first chunks land last, and the next
    forward needs them first, so that the host has least time for their updates. A guess takes any chunks, and
    parameters without states as well; then most chunks had to be moved before the first step (Llama-7B at 40 GiB took 1
    to 1.7 s for that: seen).

    Args:
        guessed: It stays as it is where the host is short of memory, or the user has fixed the placement.
        model: For the order of its modules; its parameters may be in chunks already.
        request: Policy and options.
        budget: What the plan was made for.
        regime: What training is like.
    """
    if request.policy != "auto" or guessed.grad_reuses_compute_shard or any(map(uses_nvme, guessed.chunks)):
        return guessed
    accesses = module_accesses(model, recomputed_layers(model, guessed.activations))
    nbytes = ignored_bytes(guessed.ignored, scheme_of(guessed, regime))
    budget = replace(budget, non_model_bytes=budget.non_model_bytes + nbytes)
    problem = _problem_over(guessed, replace(request, accesses=accesses), budget, regime).with_updates(regime.waiting())
    placer = Placer(_layout_of(guessed), problem)
    try:
        built = placer.plan(first_on_device(guessed.chunks), guessed.policy, prefetch_depth=guessed.prefetch_depth)
    except CapacityError:
        return guessed
    return replace(
        guessed,
        chunks=built.chunks,
        rcache_blocks=built.rcache_blocks,
        notes={**guessed.notes, **built.notes},
    )


def _problem_over(
    layout: Plan,
    request: PlacementRequest,
    budget: Budget,
    regime: TrainingRegime,
    hardware: HardwareSpec | None = None,
) -> Problem:
    """To place chunks that there are, before anything is known of a step."""
    return Problem(
        request,
        budget,
        layout.world_size,
        regime,
        hardware or HardwareSpec.nominal(budget.gpu_bytes, budget.cpu_bytes or 0),
        is_time_guessed=True,
        blocks=layout.activations,
        activation_host_bytes=layout.activation_host_bytes,
        tensor_parallel_size=layout.tensor_parallel_size,
        expert_parallel_size=layout.expert_parallel_size,
        num_copies=layout.num_copies,
    )


def _layout_of(plan: Plan) -> Layout:
    return Layout(packed_chunks(plan), plan.block_bytes, plan.compute_dtype)


def with_common_activations(make: Callable[[Budget], Plan], budget: Budget) -> Plan:
    """A plan from before anything is known of a step: as if activations took `COMMON_SHARE` of the device, or nothing
    if that leaves too little.

    Args:
        make: Raises `CapacityError` where nothing fits.
        budget: Limits of one rank, which `make` gets with such activations.
    """
    try:
        return make(replace(budget, non_model_bytes=int((budget.gpu_bytes or 0) * COMMON_SHARE)))
    except CapacityError:
        return make(budget)


def _decided(
    layouts: Sequence[Layout],
    problem: Problem,
    profile: MemoryProfile | StepProfile | None,
    ignored: tuple[IgnoredParam, ...],
) -> Plan:
    """The plan for one of these layouts, beside what is in no chunk; a fixed policy takes the first."""
    if ignored:
        nbytes = ignored_bytes(ignored, problem.scheme(layouts[0].block_bytes))
        budget = replace(problem.budget, non_model_bytes=problem.budget.non_model_bytes + nbytes)
        beside = replace(problem, budget=budget, ignored_bytes=nbytes)
        plan = _decided(layouts, beside, profile, ())
        return replace(plan, ignored=ignored, notes={**plan.notes, "ignored_bytes": nbytes})
    fated = cache(partial(_with_fates, profile))  # the same for all chunk sizes
    candidates = [_beside_fates(one, profile, fated, problem)(problem.blocks) for one in layouts]
    if problem.request.policy == "auto":
        return search(candidates, problem)
    candidate = candidates[0]
    if candidate.with_fates is None:
        return _placed(candidate, problem, is_known=profile is not None)
    plans: dict[tuple[ModelBlock, ...], Plan] = {}

    def seconds(one: Candidate) -> float:
        with suppress(CapacityError):
            plan = _placed(one, problem, is_known=True)
            plans[plan.activations] = plan
            return math.inf if plan.forecast is None else plan.forecast.times.total_s
        return math.inf

    names = [block.name for block in problem.blocks]
    tried = FatesTried.all_of(candidate.with_fates, names, seconds, problem.regime.num_backwards)
    best = tried[0].blocks
    plan = plans[best] if best in plans else _placed(candidate.with_fates(best), problem, is_known=True)
    return with_alternatives(plan, tried)


def _with_fates(
    profile: MemoryProfile | StepProfile | None, blocks: tuple[ModelBlock, ...]
) -> MemoryProfile | StepProfile | None:
    return with_fates(profile, blocks) if isinstance(profile, MemoryProfile) else profile


def _beside_fates(
    layout: Layout,
    profile: MemoryProfile | StepProfile | None,
    fated: Callable[[tuple[ModelBlock, ...]], MemoryProfile | StepProfile | None],
    problem: Problem,
) -> Callable[[tuple[ModelBlock, ...]], Candidate]:
    """From fates of activations to the chunks and what a step then does to them, each found once. Where the plan is to
    choose fates, and a dry run tells what they mean, candidates have the others as well.

    Args:
        layout: The chunks.
        profile: Of a step, as far as that is known.
        fated: The same with fates.
        problem: What is asked, and limits.
    """
    is_searched = problem.request.activations.is_searched and isinstance(profile, MemoryProfile) and profile.visits

    @cache
    def found(blocks: tuple[ModelBlock, ...]) -> Candidate:
        return Candidate(layout, _profile_over(layout, fated(blocks), problem), blocks, found if is_searched else None)

    return found


def _placed(candidate: Candidate, problem: Problem, *, is_known: bool) -> Plan:
    """The plan by a fixed policy.

    Args:
        candidate: The chunks, and what a step does.
        problem: The policy, and limits.
        is_known: Whether what a step does is known, or only guessed.
    """
    layout, profile = candidate.layout, candidate.profile if is_known else None
    if candidate.blocks is not None:
        problem = replace(problem, blocks=candidate.blocks)

    def placed(way: Problem) -> Plan:
        plan = place(layout, way, profile)
        return plan if profile is None else with_forecast(plan, profile, way.hardware, way.regime, way.budget)

    return plan_with_fallbacks(problem, placed, is_choosing=False)


def _with_smaller_chunks(numels: Sequence[int], make: Callable[[Sequence[int]], Plan], budget: Budget) -> Plan:
    """The plan with chunks of one of these sizes; where nothing fits, with smaller ones: the smallest rCache is a few
    chunks."""
    refusal: CapacityError | None = None
    while True:
        try:
            return make(numels)
        except CapacityError as error:
            lacking, before = error.lacking_bytes or 0, refusal
            refusal = error if before is None else min(before, error, key=distance)
            numels = (min(numels) // 2,)
            # What the host lacks, and the whole GPU could not take, no chunk size brings.
            is_hopeless = error.resource == "host" and lacking > (budget.gpu_bytes or 0)
            if before is not None and before.resource == error.resource:  # halving has to bring something
                is_hopeless |= lacking > _LEAST_PROGRESS * (before.lacking_bytes or 0)
            if is_hopeless or numels[0] < ALIGN_NUMEL:
                raise refusal from None


def timeline_of(
    plan: Plan,
    profile: MemoryProfile | StepProfile,
    hardware: HardwareSpec,
    regime: TrainingRegime = TrainingRegime(),
    *,
    is_detailed: bool = True,
) -> Timeline:
    """The simulated step of any plan.

    Args:
        plan: Not necessarily one that was made with this profile.
        profile: By parameter name, or measured over the chunks of this plan.
        hardware: Figures to predict times with.
        regime: What training is like.
        is_detailed: Whether to give its spans and its memory, which takes several times as long.
    """
    scheme = scheme_of(plan, regime)
    return simulate_step(plan, _profile_of(plan, profile, hardware, scheme), hardware, scheme, is_detailed=is_detailed)


def step_gpu_bytes(
    plan: Plan, profile: MemoryProfile | StepProfile, hardware: HardwareSpec, regime: TrainingRegime
) -> int:
    """Device bytes of the plan at the highest moment of such a step. Arguments as for `timeline_of`; nothing is
    simulated."""
    scheme = scheme_of(plan, regime)
    return peak_gpu_bytes(plan, _profile_of(plan, profile, hardware, scheme), scheme)


def _profile_of(
    plan: Plan, profile: MemoryProfile | StepProfile, hardware: HardwareSpec, scheme: Scheme
) -> StepProfile:
    if isinstance(profile, MemoryProfile):
        profile = step_profile(with_fates(profile, plan.activations), packed_chunks(plan), hardware)
    if not plan.ignored:
        return profile
    beside = ignored_bytes(plan.ignored, scheme)
    return profile.with_bytes(lambda nbytes: nbytes + beside)


def _profile_over(layout: Layout, profile: MemoryProfile | StepProfile | None, problem: Problem) -> StepProfile:
    beside = problem.ignored_bytes
    if isinstance(profile, StepProfile):
        return profile.with_bytes(lambda nbytes: nbytes + beside) if beside else profile
    if profile is not None:
        over_chunks = step_profile(profile, layout.packed, problem.hardware)
        over_chunks = over_chunks.with_margin(
            layout.block_bytes,
            is_certain=problem.world_size == 1,
            has_growing_segments=problem.budget.has_growing_segments,
        )
        return over_chunks.with_bytes(lambda nbytes: nbytes + beside) if beside else over_chunks
    budget = problem.budget
    return structural_profile(layout, problem.request.accesses, problem.hardware, budget.non_model_bytes)


def detect_budget(
    local_world_size: int = 1,
    *,
    gpu_bytes: int | None = None,
    cpu_bytes: int | None = None,
    non_model_bytes: int = 0,
) -> Budget:
    """What one rank of this machine may use now, less a reserve of the host's memory (`host_share`). Initialises CUDA
    where there is one.

    Collective where the default process group has several ranks: all get what the poorest has, so that they plan alike.

    Args:
        local_world_size: Ranks on this host, which share its memory.
        gpu_bytes: Plan as if the device had no more than this.
        cpu_bytes: Plan as if this rank had no more host memory than this; nothing is kept back of it.
        non_model_bytes: Passed on.
    """
    device_bytes, num_ranks = current_device_memory_bytes(), max(1, local_world_size)
    host_bytes, grow = available_host_bytes(), segments_grow()
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        comm = make_comm(None, make_device().torch_device)
        by_rank: list[tuple[int | None, int, bool]] = comm.exchange_objects((device_bytes, host_bytes, grow))
        comm.close()
        device_bytes = min((gpu for gpu, *_ in by_rank if gpu is not None), default=None)
        host_bytes = min(host for _, host, _ in by_rank)
        grow = all(grow for *_, grow in by_rank)
    cpu, spare = host_share(host_bytes, num_ranks, None if cpu_bytes is None else cpu_bytes * num_ranks)
    return Budget(
        gpu_bytes=min((b for b in (device_bytes, gpu_bytes) if b is not None), default=None),
        cpu_bytes=cpu,
        non_model_bytes=non_model_bytes,
        spare_cpu_bytes=spare,
        words=DeviceWords.of(
            "gpu_bytes", "cpu_bytes", is_cpu=device_bytes is None, is_host_limited=cpu_bytes is not None
        ),
        reserve_bytes=host_bytes // num_ranks - cpu if cpu_bytes is None else 0,
        has_growing_segments=grow,
    )


def _main_dtype(specs: tuple[ParamSpec, ...], compute_dtype: torch.dtype | None) -> str:
    """The compute dtype, or the one that most elements have."""
    if compute_dtype is not None:
        return dtype_name(compute_dtype)
    numels: dict[str, int] = {}
    for spec in specs:
        if spec.dtype in TRAINED_DTYPES:
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
    return packed_chunks(layout)


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
    ignored: Ignored = None,
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
        ignored: As for `ElixirModule`: what is left out of chunks.

    Raises:
        PlanError: The model cannot be used as given.
        CapacityError: The machine's memory cannot hold it.
    """
    return _Search.asked(locals(), is_size_searched=False).plan()


def simple_search(
    model: nn.Module,
    world_size: int = 1,
    unified_dtype: torch.dtype = torch.float32,
    overlap: bool = False,
    verbose: bool = False,
    inp: Mapping[str, object] | None = None,
    step_fn: StepFn | None = None,
    *,
    gpu_bytes: int | str | None = None,
    cpu_bytes: int | str | None = None,
    non_model_bytes: int | str = 0,
    local_world_size: int | None = None,
    sharding: Sharding = "world",
    chunk_search_range: int | str | None = None,
    chunk_search_n_grids: int | None = None,
    min_chunk_size: int | str | None = None,
    hardware: HardwareSpec | None = None,
    can_stream: bool = False,
    update_timing: UpdateTiming = UpdateTiming.BEHIND_FORWARD,
    keep_fp32: KeepFp32 = None,
    ignored: Ignored = None,
    activations: ActivationsOption = None,
) -> Plan:
    """Like `minimum_waste_search`, within limits of your own, and simulating several chunk sizes.

    All sizes are bytes as an int, or strings such as "64MiB" or "40GiB".

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
        sharding: As for `ElixirStrategy`, with `world_size // local_world_size` nodes.
        chunk_search_range: How far above the smallest chunk size to search.
        chunk_search_n_grids: How many chunk sizes to look at for their waste; None: 128.
        min_chunk_size: The smallest chunk size.
        hardware: Figures of the machine, such as `profile_hardware()` measures; None: `HardwareSpec.nominal()`.
        can_stream: Whether updates may be streamed to the device: the optimizer is `HybridAdam` or `CPUAdam`.
        update_timing: When updates of states beside the device may run.
        activations: What becomes of activations, as for `ElixirModule`; the plan says it.
        keep_fp32: As for `ElixirModule`, which puts what the plan has otherwise into chunks of its own.
        ignored: As for `ElixirModule`: what is left out of chunks.

    Raises:
        PlanError: The model or a limit cannot be used as given.
        CapacityError: The memory cannot hold it.
    """
    return _Search.asked(locals()).plan()


def optimal_search(
    model: nn.Module,
    world_size: int = 1,
    unified_dtype: torch.dtype = torch.float32,
    overlap: bool = False,
    verbose: bool = False,
    inp: Mapping[str, object] | None = None,
    step_fn: StepFn | None = None,
    *,
    gpu_bytes: int | str | None = None,
    cpu_bytes: int | str | None = None,
    non_model_bytes: int | str | None = None,
    local_world_size: int | None = None,
    sharding: Sharding = "world",
    chunk_search_range: int | str | None = None,
    chunk_search_n_grids: int | None = None,
    min_chunk_size: int | str | None = None,
    hardware: HardwareSpec | None = None,
    can_stream: bool = False,
    update_timing: UpdateTiming = UpdateTiming.BEHIND_FORWARD,
    keep_fp32: KeepFp32 = None,
    use_fused_kernels: FusedChoice = False,
    ignored: Ignored = None,
    activations: ActivationsOption = None,
) -> Plan:
    """Like `simple_search`, knowing what a step touches, computes and takes, and what the machine reaches.

    Args:
        inp: Inputs of one step, real tensors; only their shapes and dtypes count.
        step_fn: Runs forward and backward on (model, inp); it is run once on fake tensors.
        non_model_bytes: Device memory to leave for activations, buffers and temporaries all the time; None: as the step
            on fake tensors takes it, or 0 without `step_fn`.
        use_fused_kernels: As for `ElixirModule`: what a step takes is counted with fused operators.
        activations: What becomes of activations, as for `ElixirModule`; "auto": what is fastest, block by block.
        hardware: Figures of the machine; None: `profile_hardware()` where there is a GPU (collective if the default
            process group has been started, and only then with several ranks), else `HardwareSpec.nominal()`.

    All other arguments are those of `simple_search`.

    Raises:
        PlanError: The model, a limit or `step_fn` cannot be used as given.
        CapacityError: The memory cannot hold it.
    """
    if (inp is None) != (step_fn is None):
        raise PlanError("optimal_search needs both inp and step_fn to measure activations, or neither")
    search = _Search.asked(locals())
    profile = None
    if inp is not None and step_fn is not None and non_model_bytes is None:
        blocks = [block.name for block in blocks_of(model, ActivationRequest.of(activations))]
        options: dict[str, Any] = {"keep_fp32": keep_fp32, "use_fused_kernels": use_fused_kernels, "blocks": blocks}
        profile = profile_memory(model, inp, step_fn, unified_dtype, **options)
    # Ranks that measured each for itself would make different plans.
    if (
        hardware is None
        and current_device_memory_bytes() is not None
        and (world_size == 1 or torch.distributed.is_initialized())
    ):
        search = replace(search, hardware=profile_hardware(local_world_size=search.num_local_ranks))
    return search.plan(profile)


@dataclass(frozen=True, kw_only=True)
class _Search:
    """What one of them was asked for; `simple_search` says what each is."""

    model: nn.Module
    world_size: int
    unified_dtype: torch.dtype
    overlap: bool
    verbose: bool
    keep_fp32: KeepFp32
    ignored: Ignored
    activations: ActivationsOption = None
    gpu_bytes: int | str | None = None
    cpu_bytes: int | str | None = None
    non_model_bytes: int | str | None = None
    local_world_size: int | None = None
    sharding: Sharding = "world"
    chunk_search_range: int | str | None = None
    chunk_search_n_grids: int | None = None
    min_chunk_size: int | str | None = None
    is_size_searched: bool = True
    """Whether several chunk sizes are simulated."""
    hardware: HardwareSpec | None = None
    can_stream: bool = False
    update_timing: UpdateTiming = UpdateTiming.BEHIND_FORWARD

    @classmethod
    def asked(cls, given: Mapping[str, Any], **more: Any) -> _Search:
        """From the arguments of a search, by their names; those that only some have are passed over."""
        return cls(**{option.name: given[option.name] for option in fields(cls) if option.name in given}, **more)

    def __post_init__(self) -> None:
        for name in ("gpu_bytes", "cpu_bytes", "non_model_bytes", "chunk_search_range", "min_chunk_size"):
            self._size(name)

    @property
    def num_local_ranks(self) -> int:
        return self.world_size if self.local_world_size is None else self.local_world_size

    def _size(self, name: str) -> int | None:
        return option_bytes(name, getattr(self, name))

    def _activations(self, *, is_profiled: bool) -> ActivationRequest:
        request = ActivationRequest.of(self.activations)
        if request.is_searched and not is_profiled:
            raise PlanError(
                "activations='auto' needs to know what a step takes: use optimal_search with inp and step_fn, and"
                " without non_model_bytes; or say what becomes of activations"
            )
        return request

    def plan(self, profile: MemoryProfile | None = None) -> Plan:
        """Search, and print the plan if that is wanted.

        Args:
            profile: What a step takes; None: `non_model_bytes`.
        """
        is_half = self.unified_dtype.itemsize == 2
        kept = kept_parameters(self.model, self.keep_fp32, has_autocast=False, has_defaults=is_half)
        check_sharding(self.sharding)
        is_uneven = self.world_size > self.num_local_ranks and self.world_size % self.num_local_ranks > 0
        if self.sharding != "world" and is_uneven:
            raise PlanError(
                f"sharding={self.sharding!r} needs as many ranks on every node: world_size={self.world_size} is no"
                f" multiple of local_world_size={self.num_local_ranks}"
            )
        make = partial(
            make_plan,
            self.model,
            PlacementRequest(
                prefetch_depth=DEFAULT_PREFETCH_DEPTH if self.overlap else 0,
                activations=self._activations(is_profiled=profile is not None),
            ),
            chunk_sizes=ChunkSizes(
                search_range=self._size("chunk_search_range"),
                n_grids=DEFAULT_N_GRIDS if self.chunk_search_n_grids is None else self.chunk_search_n_grids,
                min_chunk_size=self._size("min_chunk_size"),
                is_searched=self.is_size_searched,
            ),
            budget=detect_budget(
                self.num_local_ranks,
                gpu_bytes=self._size("gpu_bytes"),
                cpu_bytes=self._size("cpu_bytes"),
                non_model_bytes=self._size("non_model_bytes") or 0,
            ),
            regime=TrainingRegime(
                update_timing=self.update_timing,
                can_stream=self.can_stream,
                can_reuse_compute_shard=is_half,  # there is a master then
            ),
            compute_dtype=self.unified_dtype,
            keep_fp32=kept if is_half else (),
            ignored=ignored_parameters(self.model, self.ignored),
            profile=profile,
            hardware=self.hardware,
        )
        meshes = meshes_of(Mesh(self.world_size), max(1, self.world_size // self.num_local_ranks), self.sharding)
        plan = best_sharding(lambda mesh: make(mesh=mesh), meshes)
        if self.verbose and not (dist.is_initialized() and dist.get_rank()):
            sys.stdout.write(f"{plan.explain()}\n")
        return plan
