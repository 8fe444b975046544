"""From a PyTorch model to a `Plan`: reads the model, then leaves the deciding to `plan/`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import torch
from torch import nn

from lightning_elixir.core.device import current_device_memory_bytes
from lightning_elixir.core.host import available_host_bytes
from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.packing import PackedChunk, pack, regular_block_bytes, search_chunk_numel
from lightning_elixir.plan.placement import Budget, ModelDataBytes, PlacementRequest, format_bytes, place
from lightning_elixir.plan.types import ALIGN_NUMEL, DTYPE_BYTES, ParamSpec, Plan
from lightning_elixir.profiling.activations import StepFn, measure_non_model_bytes
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

log = logging.getLogger(__name__)

DEFAULT_PREFETCH_DEPTH = 2
DEFAULT_N_GRIDS = 128


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
    enable_distributed_storage: bool = True,
    prefetch: bool = True,
    prefetch_depth: int = DEFAULT_PREFETCH_DEPTH,
    gpu_margin_mem_ratio: float | None = None,
    compute_dtype: torch.dtype | None = None,
    keep_fp32: Collection[str] = (),
    master_weights: bool = True,
    num_states: int = 2,
    grad_bytes: int | None = None,
    world_size: int = 1,
    gpu_bytes: int | None = None,
    cpu_bytes: int | None = None,
    non_model_bytes: int = 0,
    layout: Plan | None = None,
) -> Plan:
    """Plan where the model's chunks live. Measures nothing: equal arguments give equal plans.

    Args:
        model: The model, on any device.
        placement_policy: "auto", "cpu", "cuda", "const" or "static".
        shard_param_frac: const: share of the parameter bytes that is not persistent.
        offload_optim_frac: const: share of the optimizer bytes on the host.
        offload_param_frac: const: share of the parameter bytes on the host.
        chunk_size: Bytes of a chunk in the compute dtype; None: search for the least waste, and smaller ones where
            `gpu_bytes` cannot hold the blocks of the best.
        chunk_search_range: Bytes above the smallest candidate to search; None: to three times of it.
        chunk_search_n_grids: How many chunk sizes to try; None: 128.
        min_chunk_size: Bytes of the smallest candidate; None: 32 MiB, less for a small model.
        enable_distributed_storage: False: every rank keeps its parameter shards whole.
        prefetch: Whether to fetch ahead of need.
        prefetch_depth: How many chunks to fetch ahead.
        gpu_margin_mem_ratio: auto: share of the GPU memory beside the rCache that optimizer states may take.
        compute_dtype: Dtype of forward and backward; None: each parameter keeps its own.
        keep_fp32: Names of parameters that are computed with in fp32 all the same.
        master_weights: Whether 16-bit parameters have an fp32 master.
        num_states: Optimizer states per element (Adam 2, SGD with momentum 1, without 0).
        grad_bytes: Bytes per element of the gradient shard; None: as the parameter.
        world_size: Ranks that share a chunk.
        gpu_bytes: Device memory of one rank; None: not known, treated as unlimited.
        cpu_bytes: Host memory of one rank; None: not known, treated as unlimited.
        non_model_bytes: Device memory for activations, buffers and temporaries at their peak.
        layout: A plan of the same model whose chunks are kept and only placed anew; the chunk options are not used.

    Returns:
        The plan, with predicted bytes by kind in its `notes`.

    Raises:
        PlanError: The model or an option cannot be used as given.
        CapacityError: A limit cannot hold what the policy needs.
    """
    specs = param_specs(model, compute_dtype, keep_fp32)
    main_dtype = _main_dtype(specs, compute_dtype)
    request = PlacementRequest(
        policy=placement_policy,
        shard_param_frac=shard_param_frac,
        offload_optim_frac=offload_optim_frac,
        offload_param_frac=offload_param_frac,
        prefetch_depth=prefetch_depth if prefetch else 0,
        distributed_storage=enable_distributed_storage,
        gpu_margin_mem_ratio=gpu_margin_mem_ratio,
        accesses=module_accesses(model),
    )
    data_bytes = {
        dtype: ModelDataBytes.of(dtype, has_master=master_weights, num_states=num_states, grad_bytes=grad_bytes)
        for dtype in DTYPE_BYTES
    }
    budget = Budget(gpu_bytes, cpu_bytes, non_model_bytes)

    def placed(packed: tuple[PackedChunk, ...], block_bytes: int) -> Plan:
        return place(
            packed,
            request,
            budget,
            world_size,
            block_bytes=block_bytes,
            compute_dtype=main_dtype,
            data_bytes=data_bytes,
        )

    if layout is not None:
        return placed(_packed_layout(layout, specs, world_size), layout.block_bytes)
    chunk_numel = _chunk_numel(
        specs, main_dtype, world_size, chunk_size, chunk_search_range, chunk_search_n_grids, min_chunk_size
    )
    is_free = chunk_size is None and chunk_search_range is None and min_chunk_size is None and gpu_bytes is not None
    refusal: CapacityError | None = None
    while True:
        packed = pack(specs, chunk_numel, world_size)
        try:
            return placed(packed, regular_block_bytes(packed, chunk_numel, world_size))
        except CapacityError as error:
            # The smallest rCache is a few chunks: where the user left their size to us, smaller ones may fit.
            refusal = refusal or error
            chunk_numel //= 2
            if not is_free or chunk_numel < ALIGN_NUMEL:
                raise refusal from None


def detect_budget(
    local_world_size: int = 1,
    *,
    gpu_bytes: int | None = None,
    cpu_bytes: int | None = None,
    non_model_bytes: int = 0,
) -> Budget:
    """What one rank of this machine may use now. Initialises CUDA where there is one.

    Args:
        local_world_size: Ranks on this host, which share its memory.
        gpu_bytes: Plan as if the device had no more than this.
        cpu_bytes: Plan as if this rank had no more host memory than this.
        non_model_bytes: Passed on.
    """
    device_bytes = current_device_memory_bytes()
    host_bytes = available_host_bytes() // max(1, local_world_size)
    return Budget(
        gpu_bytes=min((b for b in (device_bytes, gpu_bytes) if b is not None), default=None),
        cpu_bytes=host_bytes if cpu_bytes is None else min(host_bytes, cpu_bytes),
        non_model_bytes=non_model_bytes,
    )


def _chunk_numel(
    specs: tuple[ParamSpec, ...],
    dtype: str,
    world_size: int,
    chunk_size: int | None,
    search_range: int | None,
    n_grids: int | None,
    min_chunk_size: int | None,
) -> int:
    if chunk_size is not None:
        if chunk_size < 1:
            raise PlanError(f"chunk_size must be at least 1 byte, got {chunk_size}")
        return max(1, chunk_size // DTYPE_BYTES[dtype])
    return search_chunk_numel(
        specs,
        world_size,
        compute_dtype=dtype,
        search_range_bytes=search_range,
        n_grids=DEFAULT_N_GRIDS if n_grids is None else n_grids,
        min_chunk_bytes=min_chunk_size,
    )


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
) -> Plan:
    """The chunk size that wastes least, placed by policy "auto" on the memory that this machine has now.

    Args:
        model: The model, on any device.
        world_size: Ranks that will train it, all on this host.
        unified_dtype: Compute dtype; a 16-bit one is trained with an fp32 master.
        overlap: Whether to prefetch.
        verbose: Log the plan.
        inp: Not used: this search measures no activations.
        step_fn: Not used.

    Raises:
        PlanError: The model cannot be used as given.
        CapacityError: The machine's memory cannot hold it.
    """
    return simple_search(model, world_size, unified_dtype, overlap, verbose, inp, step_fn)


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
) -> Plan:
    """Like `minimum_waste_search`, within limits of your own.

    Args:
        model: The model, on any device.
        world_size: Ranks that will train it.
        unified_dtype: Compute dtype; a 16-bit one is trained with an fp32 master.
        overlap: Whether to prefetch.
        verbose: Log the plan.
        inp: Not used: this search measures no activations.
        step_fn: Not used.
        gpu_bytes: Plan as if a rank's device had no more than this.
        cpu_bytes: Plan as if a rank had no more host memory than this.
        non_model_bytes: Device memory to leave for activations, buffers and temporaries.
        local_world_size: Ranks on this host; None: all of them.
        chunk_search_range: Bytes above the smallest chunk size to search.
        chunk_search_n_grids: How many chunk sizes to try; None: 128.
        min_chunk_size: Bytes of the smallest chunk size.

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
    plan = make_plan(
        model,
        placement_policy="auto",
        chunk_search_range=chunk_search_range,
        chunk_search_n_grids=chunk_search_n_grids,
        min_chunk_size=min_chunk_size,
        prefetch=overlap,
        compute_dtype=unified_dtype,
        world_size=world_size,
        gpu_bytes=budget.gpu_bytes,
        cpu_bytes=budget.cpu_bytes,
        non_model_bytes=budget.non_model_bytes,
    )
    if verbose:
        log.info("%s", describe(plan))
    return plan


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
) -> Plan:
    """Like `simple_search`, leaving the device memory that a step needs beside the chunks.

    Args:
        model: The model, on any device.
        world_size: Ranks that will train it.
        unified_dtype: Compute dtype; a 16-bit one is trained with an fp32 master.
        overlap: Whether to prefetch.
        verbose: Log the plan.
        inp: Inputs of one step, real tensors; only their shapes and dtypes count.
        step_fn: Runs forward and backward on (model, inp); it is run once on fake tensors.
        gpu_bytes: Plan as if a rank's device had no more than this.
        cpu_bytes: Plan as if a rank had no more host memory than this.
        non_model_bytes: Device memory to leave for activations, buffers and temporaries; None: measured with `step_fn`
            where it is given, else 0.
        local_world_size: Ranks on this host; None: all of them.
        chunk_search_range: Bytes above the smallest chunk size to search.
        chunk_search_n_grids: How many chunk sizes to try; None: 128.
        min_chunk_size: Bytes of the smallest chunk size.

    Raises:
        PlanError: The model, a limit or `step_fn` cannot be used as given.
        CapacityError: The memory cannot hold it.
    """
    if (inp is None) != (step_fn is None):
        raise PlanError("optimal_search needs both inp and step_fn to measure activations, or neither")
    if non_model_bytes is None:
        non_model_bytes = 0
        if inp is not None and step_fn is not None:
            non_model_bytes = measure_non_model_bytes(model, inp, step_fn, unified_dtype)
    return simple_search(
        model,
        world_size,
        unified_dtype,
        overlap,
        verbose,
        gpu_bytes=gpu_bytes,
        cpu_bytes=cpu_bytes,
        non_model_bytes=non_model_bytes,
        local_world_size=local_world_size,
        chunk_search_range=chunk_search_range,
        chunk_search_n_grids=chunk_search_n_grids,
        min_chunk_size=min_chunk_size,
    )


def describe(plan: Plan) -> str:
    """The plan in a few lines, for the log."""
    persistent = sum(c.is_persistent for c in plan.chunks)
    lines = [
        f"plan ({plan.policy}): {len(plan.chunks)} chunks of up to {format_bytes(plan.block_bytes)}, {persistent}"
        f" persistent; rCache of {plan.rcache_blocks} blocks, prefetch {plan.prefetch_depth}; {plan.world_size} ranks"
    ]
    lines += [f"  {name}: {format_bytes(v)}" for name, v in plan.notes.items() if isinstance(v, int)]
    return "\n".join(lines)
