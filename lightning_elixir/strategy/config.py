"""Every knob of a user in one frozen value object, checked once."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from lightning_elixir.errors import PlanError
from lightning_elixir.fused import FusedChoice, check_fused_choice
from lightning_elixir.optim.scaling import LossScaling
from lightning_elixir.patterns.base import ParallelPattern
from lightning_elixir.plan.activations import ActivationRequest
from lightning_elixir.plan.hardware import HardwareSpec, load_hardware
from lightning_elixir.plan.io import load_plan
from lightning_elixir.plan.mesh import AXES, Mesh
from lightning_elixir.plan.packing import DEFAULT_N_GRIDS, ChunkSizes
from lightning_elixir.plan.problem import DEFAULT_PREFETCH_DEPTH, PlacementRequest
from lightning_elixir.plan.selection import Entry, entries_of
from lightning_elixir.plan.sharding import Sharding, check_sharding, meshes_of
from lightning_elixir.plan.types import Plan
from lightning_elixir.plan.units import check_fraction, option_bytes
from lightning_elixir.plan.weighing import ParallelSize, meshes_to_weigh

PolicyName = Literal["auto", "cpu", "cuda", "const", "static"]
TimingName = Literal["auto", "after_backward", "behind_forward", "inside_backward"]
NvmeBackendName = Literal["direct", "tensornvme"]
StateDictType = Literal["full", "sharded"]
FateName = Literal["keep", "recompute", "offload", "recompute_offloaded", "keep_attention"]
ActivationsOption = Literal["auto"] | FateName | dict[str, FateName] | None

if TYPE_CHECKING:
    KeepOption = Entry | Collection[Entry] | None
    PatternsOption = Mapping[str | type, ParallelPattern] | None
    PlanOption = Plan | str | os.PathLike[str] | None
    HardwareOption = HardwareSpec | str | os.PathLike[str] | None
else:
    # What a configuration file can hold. If the command line knew of the classes, it would open the file that a path
    # names, and hand over what it finds there as text.
    PlanOption = HardwareOption = str | os.PathLike[str] | None
    KeepOption = str | list[str] | None
    PatternsOption = dict[str, ParallelPattern] | None

_FRACTIONS = (
    "shard_param_frac",
    "offload_optim_frac",
    "offload_param_frac",
    "nvme_offload_fraction",
    "nvme_offload_param_fraction",
)
_REDUCE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ElixirConfig(LossScaling):
    """The options of `ElixirStrategy`, which documents each of them; those of the loss scale among them.

    Raises:
        PlanError: An unknown policy, a fraction outside [0, 1], a size that is none, or options that contradict.
    """

    placement_policy: PolicyName = "auto"
    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    chunk_size: int | str | None = None
    chunk_search_range: int | str | None = None
    chunk_search_n_grids: int = DEFAULT_N_GRIDS
    min_chunk_size: int | str | None = None
    enable_distributed_storage: bool = True
    pin_memory: bool = True
    prefetch: bool = True
    update_timing: TimingName = "auto"
    force_outputs_fp32: bool = False
    autocast: bool = True
    keep_fp32: KeepOption = None
    ignored: KeepOption = None
    activations: ActivationsOption = None
    gpu_margin_mem_ratio: float | None = None
    gpu_memory_limit: int | str | None = None
    cpu_memory_limit: int | str | None = None
    nvme_offload_fraction: float = 0.0
    nvme_offload_param_fraction: float = 0.0
    nvme_offload_dir: str | None = None
    nvme_backend: NvmeBackendName = "direct"
    nvme_checksums: bool = False
    plan: PlanOption = None
    hardware: HardwareOption = None
    report_dir: str | None = field(default=None, compare=False)  # an engine can be kept where only this differs
    state_dict_type: StateDictType = field(default="full", compare=False)
    async_save: bool = field(default=False, compare=False)
    reduce_dtype: torch.dtype | str | None = None
    use_fused_kernels: FusedChoice = False
    tensor_parallel_size: ParallelSize = 1
    expert_parallel_size: ParallelSize = 1
    patterns: PatternsOption = None
    sharding: Sharding = "world"
    init_step: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in fields(self):
            if option.name == "use_fused_kernels":
                check_fused_choice(self.use_fused_kernels)
            elif isinstance(option.default, bool) and not isinstance(getattr(self, option.name), bool):
                raise PlanError(f"{option.name} must be True or False, got {getattr(self, option.name)!r}")
        self._expand_paths()
        self._check_policy()
        for name in _FRACTIONS:
            check_fraction(name, getattr(self, name))
        if self.gpu_margin_mem_ratio is not None:
            check_fraction("gpu_margin_mem_ratio", self.gpu_margin_mem_ratio)
        for name in ("chunk_size", "min_chunk_size", "chunk_search_range", "gpu_memory_limit", "cpu_memory_limit"):
            if self._size(name) == 0 and name != "chunk_search_range":
                raise PlanError(
                    f"{name} must be at least 1 byte, got {getattr(self, name)!r}: give bytes, or a string with a unit"
                    " such as '64MiB'"
                )
        grids: object = self.chunk_search_n_grids
        if not isinstance(grids, int) or isinstance(grids, bool) or grids < 1:
            raise PlanError(f"chunk_search_n_grids must be a number of chunk sizes, at least 1, got {grids!r}")
        _parse_reduce_dtype(self.reduce_dtype)
        if self.keep_fp32 is not None:
            entries_of("keep_fp32", self.keep_fp32)
        if self.ignored is not None:
            entries_of("ignored", self.ignored)
        ActivationRequest.of(self.activations)
        self._check_patterns()
        self._check_paths()
        self._check_nvme()
        self._check_checkpoints()

    def _expand_paths(self) -> None:
        """Have "~" mean what it means in a shell, also in a configuration file."""
        for name in ("nvme_offload_dir", "plan", "hardware", "report_dir"):
            path = getattr(self, name)
            if isinstance(path, str) and path.startswith("~"):
                object.__setattr__(self, name, os.path.expanduser(path))

    def _check_policy(self) -> None:
        if self.update_timing not in get_args(TimingName):
            timings = ", ".join(get_args(TimingName))
            raise PlanError(f"unknown update_timing {self.update_timing!r}: choose one of {timings}")
        known = get_args(PolicyName)
        offered = [name for name in known if name != "static"]  # another name of "const"
        if self.placement_policy not in known:
            raise PlanError(f"unknown placement_policy {self.placement_policy!r}: choose one of {', '.join(offered)}")
        if self.placement_policy in ("const", "static"):
            return
        defaults = ElixirConfig.__dataclass_fields__
        for name in ("shard_param_frac", "offload_optim_frac", "offload_param_frac"):
            if getattr(self, name) != defaults[name].default:
                raise PlanError(
                    f"{name} belongs to placement_policy 'const', but the policy is {self.placement_policy!r}: leave it"
                    " out, or choose 'const'"
                )

    def _check_patterns(self) -> None:
        check_sharding(self.sharding)
        for name in ("tensor_parallel_size", "expert_parallel_size"):
            size = getattr(self, name)
            if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise PlanError(f"{name} must be a number of ranks, at least 1, or 'auto', got {size!r}")
        patterns = self.patterns
        if patterns is None:
            return
        if not isinstance(patterns, Mapping):
            raise PlanError(f"patterns must be a dict of patterns by module names or classes, got {patterns!r:.60}")
        for key, pattern in patterns.items():
            if not (isinstance(key, type) or (isinstance(key, str) and key)):
                raise PlanError(f"patterns: a key is a module name, a glob or a class, got {key!r:.60}")
            if not isinstance(pattern, ParallelPattern):
                hint = f": write {pattern.__name__}()" if isinstance(pattern, type) else ""
                raise PlanError(f"patterns: {key!r} must have a ParallelPattern, got {pattern!r:.60}{hint}")
            if pattern.axis not in AXES:
                raise PlanError(f"patterns: {pattern!r} is for an axis {pattern.axis!r}; there are {', '.join(AXES)}")
        if self.expert_parallel_size not in (1, "auto"):
            self.check_pattern_along("expert")

    def check_pattern_along(self, axis: str) -> None:
        """Raises `PlanError` if no given pattern is for an axis. (What is cut along "tensor" may be so by
        `parallelize_module()` instead, which shows when the model is there.)"""
        size = getattr(self, f"{axis}_parallel_size")
        if self.patterns is not None and all(pattern.axis != axis for pattern in self.patterns.values()):
            raise PlanError(
                f"{axis}_parallel_size={size}, but no pattern is for it: all {size} ranks would do the same. Give"
                " one, or leave the size out"
            )

    @property
    def idle_patterns(self) -> dict[str, list[str]]:
        """By axis, the keys of given patterns that cut nothing, since there is one rank along it."""
        found: dict[str, list[str]] = {}
        for key, pattern in (self.patterns or {}).items():
            if getattr(self, f"{pattern.axis}_parallel_size") == 1:
                found.setdefault(pattern.axis, []).append(key.__name__ if isinstance(key, type) else repr(key))
        return found

    @property
    def may_fuse(self) -> bool:
        """Whether fused operators were not asked for, and would leave out logits: tensor parallelism cuts those."""
        return self.use_fused_kernels is False and self.tensor_parallel_size == 1

    def mesh(self, world_size: int) -> Mesh:
        """How so many ranks stand to each other; a size that is still to be chosen counts as 1.

        Raises:
            PlanError: They do not make up a box of these sizes.
        """
        sizes = (self.tensor_parallel_size, self.expert_parallel_size)
        mesh = Mesh(world_size, *(1 if size == "auto" else size for size in sizes))
        mesh.check()
        return mesh

    @property
    def has_open_sizes(self) -> bool:
        """Whether sizes of parallel patterns are still to be chosen."""
        return "auto" in (self.tensor_parallel_size, self.expert_parallel_size)

    def with_sizes_of(self, mesh: Mesh) -> ElixirConfig:
        """The same with this mesh's sizes where they were to be chosen.

        Raises:
            PlanError: No given pattern is for one of them.
        """
        return replace(
            self,
            tensor_parallel_size=mesh.tensor if self.tensor_parallel_size == "auto" else self.tensor_parallel_size,
            expert_parallel_size=mesh.expert if self.expert_parallel_size == "auto" else self.expert_parallel_size,
        )

    def as_chosen(self, mesh: Mesh) -> ElixirConfig:
        """The same with all that was chosen by weighing: a mesh's sizes, and where `sharding` is "auto" its copies."""
        settled = self.with_sizes_of(mesh)
        if self.sharding != "auto":
            return settled
        return replace(settled, sharding="node" if mesh.copies > 1 else "world")

    def with_choices_of(self, earlier: ElixirConfig) -> ElixirConfig:
        """The same with what was chosen for an earlier run of the same options."""
        return replace(
            self,
            tensor_parallel_size=earlier.tensor_parallel_size,
            expert_parallel_size=earlier.expert_parallel_size,
            sharding=earlier.sharding,
        )

    def meshes_to_weigh(self, world_size: int, num_nodes: int) -> tuple[Mesh, ...]:
        """What sizes that are to be chosen may be; the first has 1 in their place."""
        return meshes_to_weigh(world_size, num_nodes, self.tensor_parallel_size, self.expert_parallel_size)

    def meshes(self, world_size: int, num_nodes: int) -> tuple[Mesh, ...]:
        """How they may share the parameters, by `sharding`; of several the plan finds the best.

        Raises:
            PlanError: Ranks that patterns cut parameters between are not all on one node, and `sharding` is "node".
        """
        return meshes_of(self.mesh(world_size), num_nodes, self.sharding)

    def _check_nvme(self) -> None:
        if self.nvme_backend not in get_args(NvmeBackendName):
            names = ", ".join(get_args(NvmeBackendName))
            raise PlanError(f"unknown nvme_backend {self.nvme_backend!r}: choose one of {names}")
        folder = self.nvme_offload_dir
        if folder is not None and (not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder)):
            raise PlanError(f"nvme_offload_dir must be the path of a folder, got {folder!r}")
        if self.nvme_offload_param_fraction > 0 and self.nvme_offload_fraction == 0 and self.plan is None:
            raise PlanError(
                "nvme_offload_param_fraction is a share of the parameters whose optimizer states are on NVMe: give"
                " nvme_offload_fraction as well, or leave both out with placement_policy='auto'"
            )
        if self.nvme_offload_fraction > 0 and self.plan is None and self.placement_policy in ("auto", "cuda"):
            instead = (
                "give nvme_offload_dir alone, and states go there where the host's memory is short"
                if self.placement_policy == "auto"
                else "which has none there"
            )
            raise PlanError(
                "nvme_offload_fraction is a share of the optimizer states that a placement has in host memory: use it"
                f" with placement_policy='cpu' (or 'const'), not {self.placement_policy!r} ({instead})"
            )

    def _check_checkpoints(self) -> None:
        if self.state_dict_type not in get_args(StateDictType):
            raise PlanError(f"state_dict_type must be 'full' or 'sharded', got {self.state_dict_type!r}")
        if self.async_save and self.state_dict_type != "sharded":
            raise PlanError("async_save=True is for sharded checkpoints: add state_dict_type='sharded'")

    def _check_paths(self) -> None:
        if not isinstance(self.plan, (Plan, str, os.PathLike, type(None))) or self.plan == "":
            raise PlanError(f"plan must be a Plan or the path of one that was saved, got {self.plan!r:.60}")
        if not isinstance(self.hardware, (HardwareSpec, str, os.PathLike, type(None))) or self.hardware == "":
            raise PlanError(
                "hardware must be a HardwareSpec or the path of one that save_hardware wrote, got"
                f" {self.hardware!r:.60}"
            )
        if self.report_dir is not None and (not isinstance(self.report_dir, (str, os.PathLike)) or not self.report_dir):
            raise PlanError(f"report_dir must be the path of a folder, got {self.report_dir!r}")

    # The values above in the types that the rest of the package works with

    def _size(self, name: str) -> int | None:
        return option_bytes(name, getattr(self, name))

    @property
    def chunk_sizes(self) -> ChunkSizes:
        return ChunkSizes(
            self._size("chunk_size"),
            self._size("chunk_search_range"),
            self.chunk_search_n_grids,
            self._size("min_chunk_size"),
        )

    def placement_request(self) -> PlacementRequest:
        """Where chunks are to live, without the model's part of it."""
        return PlacementRequest(
            policy=self.placement_policy,
            shard_param_frac=self.shard_param_frac,
            offload_optim_frac=self.offload_optim_frac,
            offload_param_frac=self.offload_param_frac,
            nvme_offload_fraction=self.nvme_offload_fraction,
            nvme_offload_param_fraction=self.nvme_offload_param_fraction,
            prefetch_depth=DEFAULT_PREFETCH_DEPTH if self.prefetch else 0,
            distributed_storage=self.enable_distributed_storage,
            gpu_margin_mem_ratio=self.gpu_margin_mem_ratio,
            activations=ActivationRequest.of(self.activations),
        )

    @property
    def is_placement_searched(self) -> bool:
        """Whether where chunks live is ours to decide: neither a plan nor a fixed policy was given."""
        return self.placement_policy == "auto" and self.plan is None

    @property
    def gpu_limit_bytes(self) -> int | None:
        return self._size("gpu_memory_limit")

    @property
    def cpu_limit_bytes(self) -> int | None:
        return self._size("cpu_memory_limit")

    @property
    def may_use_nvme(self) -> bool:
        """Whether states may go to NVMe, as far as these options tell."""
        return self.nvme_offload_fraction > 0 or self.nvme_offload_dir is not None

    def given_plan(self) -> Plan | None:
        """The plan to obey that the user gave; None: it is to be searched.

        Raises:
            PlanError: The file cannot be read, or is no plan.
        """
        if self.plan is None or isinstance(self.plan, Plan):
            return self.plan
        return load_plan(os.fspath(self.plan))

    def given_hardware(self) -> HardwareSpec | None:
        """The figures to plan with that the user gave; None: to be measured.

        Raises:
            PlanError: The file cannot be read.
        """
        if self.hardware is None or isinstance(self.hardware, HardwareSpec):
            return self.hardware
        return load_hardware(os.fspath(self.hardware))

    def loss_scaling(self) -> dict[str, Any]:
        """The options of the loss scale by name, as `ElixirOptimizer` takes them."""
        return {option.name: getattr(self, option.name) for option in fields(LossScaling)}

    @property
    def reduction_dtype(self) -> torch.dtype | None:
        return _parse_reduce_dtype(self.reduce_dtype)


def _parse_reduce_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    if value is None or value in _REDUCE_DTYPES.values():
        return value if isinstance(value, torch.dtype) else None
    name = str(value).removeprefix("torch.")
    if name not in _REDUCE_DTYPES:
        raise PlanError(f"reduce_dtype must be one of {', '.join(_REDUCE_DTYPES)}, got {value!r}")
    return _REDUCE_DTYPES[name]
