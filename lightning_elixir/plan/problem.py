"""What a plan is made for: what the user asked for, within which limits, trained how, on what machine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lightning_elixir.errors import PlanError
from lightning_elixir.plan.activations import ActivationRequest, ModelBlock
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.memory import Budget, Scheme
from lightning_elixir.plan.regime import TrainingRegime, UpdateMode
from lightning_elixir.plan.units import check_fraction

POLICIES = ("auto", "cpu", "cuda", "const", "static")

DEFAULT_PREFETCH_DEPTH = 2


@dataclass(frozen=True)
class PlacementRequest:
    """What the user asked for."""

    policy: str = "auto"
    """One of `POLICIES` ("static" is another name of "const")."""
    shard_param_frac: float = 1.0
    """const: share of the parameter bytes that is sharded and fetched when needed; the rest is persistent."""
    offload_optim_frac: float = 0.0
    """const: share of the optimizer bytes that lives on the host."""
    offload_param_frac: float = 0.0
    """const: share of the parameter bytes whose shards live on the host (and so are not persistent)."""
    nvme_offload_fraction: float = 0.0
    """Other than auto: share of the states in host memory, by elements, that goes on to NVMe."""
    nvme_offload_param_fraction: float = 0.0
    """Other than auto: share of the parameters in host memory whose states are on NVMe, or that are frozen, by
    elements, that goes there as well, gradients with them."""
    prefetch_depth: int = DEFAULT_PREFETCH_DEPTH
    """How many chunks to fetch ahead ("auto" finds its own); 0: no prefetching."""
    distributed_storage: bool = True
    """False: every rank keeps its parameter shards whole."""
    gpu_margin_mem_ratio: float | None = None
    """auto: share of the GPU memory beside the rCache that optimizer states may take. None: all of it."""
    activations: ActivationRequest = ActivationRequest()
    """What becomes of activations; fixed policies search for that as well, where it is to be chosen."""
    accesses: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(module name, FQNs of the parameters that it owns directly), for the smallest rCache."""


@dataclass(frozen=True)
class Problem:
    """What is given."""

    request: PlacementRequest
    budget: Budget = Budget()
    world_size: int = 1
    """All ranks; they share a chunk whose parameters are not cut."""
    regime: TrainingRegime = TrainingRegime()
    hardware: HardwareSpec = field(default_factory=HardwareSpec.nominal)
    is_time_guessed: bool = False
    """The computing was not measured; it is assumed to take as long as fetching."""
    serves_to_build: bool = False
    """Nothing is trained under the plan: its chunks are placed anew when a step is known. Placements are compared no
    further than the choice of a chunk size takes."""
    ignored_bytes: int = 0
    """Device memory of parameters that are in no chunk; part of the budget's `non_model_bytes`."""
    updates: UpdateMode = UpdateMode()
    """How updates beside the device are to run."""
    blocks: tuple[ModelBlock, ...] = ()
    """What becomes of whose activations."""
    activation_host_bytes: int | None = 0
    """Host memory that they may take; a profile that was made for `blocks` says more. None: what the host has."""
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    num_copies: int = 1
    """See `Plan`."""

    def check(self) -> None:
        """Raises `PlanError` for an unknown policy or an option out of its range."""
        request = self.request
        if request.policy not in POLICIES:
            offered = ", ".join(repr(name) for name in POLICIES if name != "static")
            raise PlanError(f"unknown placement policy {request.policy!r}; known are {offered}")
        for name in (
            "shard_param_frac",
            "offload_optim_frac",
            "offload_param_frac",
            "nvme_offload_fraction",
            "nvme_offload_param_fraction",
            "gpu_margin_mem_ratio",
        ):
            value = getattr(request, name)
            if value is not None:
                check_fraction(name, value)
        if request.prefetch_depth < 0 or self.world_size < 1:
            raise PlanError(f"prefetch_depth ({request.prefetch_depth}) or world_size ({self.world_size}) is too small")

    def scheme(self, block_bytes: int) -> Scheme:
        """What training does to chunks that are fetched into such blocks."""
        return Scheme(
            self.world_size,
            self.request.distributed_storage,
            block_bytes,
            self.regime,
            self.updates,
            self.activation_host_bytes or 0,
            self.tensor_parallel_size,
            self.expert_parallel_size,
            self.num_copies,
        )

    def with_updates(self, updates: UpdateMode) -> Problem:
        return replace(self, updates=updates)

    def in_memory(self) -> Problem:
        """The same without states on NVMe."""
        return replace(self, budget=replace(self.budget, nvme_bytes=0))
