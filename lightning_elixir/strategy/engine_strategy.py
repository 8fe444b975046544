"""What the strategies of the Trainer and of Fabric have in common: from options to engines, and what users look at."""

from __future__ import annotations

import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_elixir._lightning import CPUAccelerator, TorchCheckpointIO
from lightning_elixir.checkpoint import is_checkpoint_folder, local_path, replacing_folder, save_together, whole_file
from lightning_elixir.core.comm import SoloComm
from lightning_elixir.core.frames import with_room
from lightning_elixir.core.garbage import no_collections
from lightning_elixir.core.threads import ThreadPlan, frequent_switches, thread_plan
from lightning_elixir.core.threads import apply as apply_threads
from lightning_elixir.core.together import hear, run_together
from lightning_elixir.core.waits import Call
from lightning_elixir.errors import PlanError
from lightning_elixir.fused import fuse
from lightning_elixir.memory_limits import MemoryLimits
from lightning_elixir.optim import HybridAdam
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.plan.placing.fallbacks import needs_disk
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.types import Plan, UpdateTiming
from lightning_elixir.plan.units import format_seconds
from lightning_elixir.plan.weighing import NOTE, Choice, weighing_lines
from lightning_elixir.runtime.stats import Stats
from lightning_elixir.storage.nvme import is_in_memory
from lightning_elixir.strategy.device_meshes import MeshAccess, mesh_of
from lightning_elixir.strategy.engine_handle import BuildOptions, EngineHandle
from lightning_elixir.strategy.machine_figures import MachineFigures
from lightning_elixir.strategy.model_init import materialise, skeleton_of
from lightning_elixir.strategy.options import StrategyOptions
from lightning_elixir.strategy.pattern_setup import (
    check_mesh,
    check_seeds,
    put_patterns_in,
    take_dtensors_over,
    tell_of_idle_patterns,
)
from lightning_elixir.strategy.pattern_sizes import Step, choose_sizes
from lightning_elixir.strategy.precision import ElixirPrecision
from lightning_elixir.strategy.sharded_checkpoints import ShardedCheckpoints
from lightning_elixir.strategy.shared_plans import ALONE, Neighbours, Planner, disk_options, host_bytes_of
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)

P = TypeVar("P", bound=ElixirPrecision)


class EngineStrategy(StrategyOptions, ABC):
    """Builds engines, wraps optimizers, writes files. To be mixed into a `ParallelStrategy`, before it."""

    def _begin(self) -> None:
        self._given_config = self._config  # in which sizes of patterns may be open that are chosen for a run
        self._choice: Choice | None = None
        self._figures: MachineFigures | None = None
        self._threads: ThreadPlan | None = None
        self._is_timing_told = False
        self._device_mesh: MeshAccess | None = None
        self._meshes: list[MeshAccess] = []  # of this run
        self._sharded = ShardedCheckpoints(self._config.async_save)

    def _without_run(self) -> dict[str, Any]:
        """What a copy has, also a pickled one, in the place of what belongs to a run."""
        return {
            "_config": self._given_config,
            "_choice": None,
            "_figures": None,
            "_device_mesh": None,
            "_meshes": [],
            "_comm": SoloComm(),  # until it runs
            "_sharded": ShardedCheckpoints(self._config.async_save),
        }

    @property
    @abstractmethod
    def _plugin(self) -> ElixirPrecision:
        """The precision plugin."""

    def _taken(self, given: Any, make: Callable[..., P]) -> P | None:
        """The plugin in the place of one that Lightning or the user came with.

        Args:
            make: Finds it.
        """
        if given is None:
            return None
        plugin = make(given, autocast=self._config.autocast)
        if isinstance(self.accelerator, CPUAccelerator):
            plugin.check_device("cpu")
        return plugin

    @property
    @abstractmethod
    def _engine(self) -> ElixirModule:
        """The engine that users look at."""

    @property
    @abstractmethod
    def _engines(self) -> Sequence[ElixirModule]:
        """All that there are, in the same order on all ranks."""

    def _come_to(self, call: Call) -> None:
        for module in self._engines:
            module.engine.come_to_message(call)

    # Processes

    def setup_environment(self) -> None:
        self.check_number_here()
        self._plugin.check_device(self.root_device.type)
        super().setup_environment()
        self._sharded.close()  # what was restored between two runs
        self._threads = thread_plan(self.local_rank, max(1, self.num_processes))
        apply_threads(self._threads)
        self._config, self._choice = self._given_config, None
        run_together(self._comm, self._check_options)  # before the model takes memory
        self._device_mesh = self._new_mesh_access()
        run_together(self._comm, self._check_files if self._comm.rank == 0 else lambda: None)
        run_together(self._comm, self._check_disk)

    @property
    def device_mesh(self) -> MeshAccess | None:
        """What `torch.distributed.tensor.parallel.parallelize_module` takes, by the names of its dimensions:
        `strategy.device_mesh["tensor_parallel"]`; the ranks that differ along "data_parallel" have batches of their
        own. None before the processes are connected."""
        return self._device_mesh

    def _new_mesh_access(self) -> MeshAccess:
        mesh = self._config.mesh(self._comm.world_size)
        access = MeshAccess(partial(self._new_device_mesh, mesh))
        self._meshes.append(access)
        return access

    def _end_meshes(self) -> None:
        for mesh in self._meshes:
            mesh.end()
        self._meshes.clear()

    def _new_device_mesh(self, mesh: Mesh) -> DeviceMesh:
        if self._config.tensor_parallel_size == "auto":
            raise PlanError(
                "device_mesh is used while tensor_parallel_size='auto' is still to be chosen, which takes the whole"
                " model: give the number of ranks, or patterns instead of parallelize_module()"
            )
        reference = weakref.WeakMethod(self._hear)

        def meet() -> None:
            hear_of_others = reference()
            if hear_of_others is not None:
                hear_of_others()

        meet()  # making groups is a collective as well
        return mesh_of(mesh, self.root_device, meet)

    def _hear(self) -> None:
        hear(self._comm)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks of one tensor-parallel group get the same data.

        Raises:
            PlanError: How many these are is still to be chosen.
        """
        if self._config.tensor_parallel_size == "auto":
            raise PlanError(
                "which ranks share batches depends on tensor_parallel_size='auto', which is chosen when the model is"
                " set up: make loaders and count steps after that (Trainer: not yet in the hook setup(), but in"
                " train_dataloader() and configure_optimizers(); Fabric: setup() before setup_dataloaders()), or give a"
                " number"
            )
        of_ranks = super().distributed_sampler_kwargs
        mesh = self._config.mesh(of_ranks["num_replicas"])
        return {"num_replicas": mesh.num_batches, "rank": mesh.batch_of(of_ranks["rank"])}

    def _check_options(self) -> None:
        """Whether so many ranks can train as the options say. On every rank."""
        self.check_number()
        self._take_known_sizes()
        check_mesh(self._config, self._comm.world_size, self.num_nodes)

    def _check_files(self) -> None:
        self._config.given_hardware()
        self._config.given_plan()
        kind = type(self.checkpoint_io)
        if self._is_sharded and kind is not TorchCheckpointIO:
            raise PlanError(
                f"{kind.__name__} would have nothing to do: the files of sharded checkpoints are written by every rank"
                " itself. Leave it out (async_save=True saves beside training), or give state_dict_type='full'"
            )

    def _check_disk(self) -> None:
        if not self._config.may_use_nvme:
            return
        folder = disk_options(self._config).existing_folder()
        if is_in_memory(folder):
            log.warning("nvme_offload_dir: %s is in memory itself, so that nothing is gained by it", folder)

    def _take_known_sizes(self) -> None:
        """Sizes that were left open and that nothing is to be weighed for: those of a given plan, or of one rank."""
        given = self._config.given_plan()
        possible = self._config.meshes_to_weigh(self._comm.world_size, self.num_nodes)
        if given is not None or len(possible) == 1:
            self._config = self._config.with_sizes_of(possible[0] if given is None else given.mesh)

    # Building

    @with_room
    def _settle_sizes(
        self,
        module: nn.Module,
        planner: Callable[[], Planner],
        foresee: Callable[[Planner], Step],
        *,
        is_training: bool,
    ) -> None:
        """Choose the sizes of parallel patterns that are open, before an engine is built or kept. Collective.

        Args:
            module: As the user built it, or in an engine, which is dissolved if it cannot be kept.
            planner: Makes one.
            foresee: What a step of the module does; raises `PlanError` if that cannot be told.
            is_training: Without a fit, ranks share as little as may be, or as the engine that there is has it.
        """
        if not self._config.has_open_sizes:
            return
        asked, handle = self._config, EngineHandle.of(module)
        if handle is not None:
            is_settled = not is_training or weighing_lines(handle.engine.plan) != ()
            if is_settled and handle.given == self._given_config:
                self._config = asked.with_choices_of(handle.options.config)
                if handle.can_be_kept(self._build_options()):
                    return
            handle.dissolve()
        meshes, making = asked.meshes_to_weigh(self._comm.world_size, self.num_nodes), planner()
        self._config = asked.with_sizes_of(meshes[0])  # also for code that asks meanwhile
        if not is_training:
            return
        self._choice = choose_sizes(module, making, meshes, self.root_device, lambda: foresee(making))
        self._config = asked.as_chosen(self._choice.mesh) if self._choice.ways else self._config

    def _find_figures(self, *, is_training: bool) -> MachineFigures:
        """What the machine can do, as far as that costs nothing. Collective."""
        ranks = max(1, self.num_processes)
        self._figures = MachineFigures(self._config, self._comm, self.root_device, ranks, self._figures)
        self._figures.prepare(is_training=is_training)
        return self._figures

    def _make_planner(self, regime: TrainingRegime, figures: MachineFigures, neighbours: Neighbours = ALONE) -> Planner:
        plugin, reduced = self._plugin, self._config.reduction_dtype
        if reduced is not None and self._comm.world_size > 1:
            regime = replace(regime, reduce_bytes=reduced.itemsize)
        return Planner(
            self._config,
            self._comm,
            self.root_device,
            (self.node_rank, self.num_nodes),
            plugin.compute_dtype,
            plugin.has_autocast,
            regime,
            figures,
            neighbours,
        )

    def _tell_of_timing(self, regime: TrainingRegime) -> None:
        """Say once that updates cannot run inside backward, if that was asked for."""
        is_inside = regime.update_timing is UpdateTiming.INSIDE_BACKWARD
        if self._config.update_timing == "inside_backward" and not is_inside and not self._is_timing_told:
            self._is_timing_told = True
            log.warning(
                "update_timing='inside_backward' is not possible here (it takes a Trainer, bf16-mixed precision, "
                "automatic optimization, no clipping by value, no reduce_dtype and no hook between backward and step): "
                "updates run behind the next forward"
            )

    def _build_options(self) -> BuildOptions:
        plugin = self._plugin
        return BuildOptions(self._config, plugin.precision, plugin.has_autocast, self.root_device, self.world_size)

    @with_room
    @no_collections()
    @frequent_switches()  # between what fills chunks and the threads that make and free memory
    def _build(
        self,
        module: nn.Module,
        planner: Planner,
        *,
        is_training: bool,
        is_loaded: bool,
        limits: MemoryLimits | None = None,
    ) -> EngineHandle:
        """An engine around a module. Collective.

        Args:
            is_loaded: The model's values come from a checkpoint, so that none need be drawn.
            limits: In the place of the options; None: there are none.
        """
        plugin, config = self._plugin, self._config
        run_together(self._comm, lambda: take_dtensors_over(module, config, self._comm, self.root_device))
        run_together(self._comm, lambda: materialise(module, is_loaded) if self._comm.rank == 0 else None)
        left_out = () if config.ignored is None else run_together(self._comm, lambda: planner.ignored(module))
        kept = run_together(self._comm, lambda: planner.kept_fp32(module))
        plugin.convert_module(module, kept, [p.fqn for p in left_out])
        planner.check_model(module, is_training=is_training)
        if self._comm.rank == 0:
            tell_of_idle_patterns(self._given_config)
        limits = limits or MemoryLimits()
        budget = planner.budget(host_bytes_of(module), limits=limits)
        check_seeds(config, self._comm)
        others = [engine.module for engine in self._engines]
        run_together(self._comm, lambda: put_patterns_in(module, config, self._comm, others))
        # Before the plan, which counts what they save
        with run_together(self._comm, lambda: fuse(module, config.use_fused_kernels, self.root_device)):
            plan, is_final = planner.first_plan(module, budget, is_training=is_training)
            if self._choice is not None:
                plan, self._choice = replace(plan, notes={**plan.notes, NOTE: self._choice.note}), None
            skeleton, disk = skeleton_of(module), disk_options(config)
            started_s = time.perf_counter()
            engine = ElixirModule(
                module,
                plan,
                prefetch=config.prefetch,
                dtype=plugin.compute_dtype,
                use_fused_kernels=config.use_fused_kernels,
                master_weights=plugin.is_mixed,
                keep_fp32=config.keep_fp32 if plugin.compute_dtype is not None else None,
                ignored=[p.fqn for p in plan.ignored],
                autocast=plugin.has_autocast,
                force_outputs_fp32=config.force_outputs_fp32,
                reduce_dtype=config.reduction_dtype,
                pin_memory=config.pin_memory,
                device=self.root_device,
                nvme_offload_dir=disk.folder,
                nvme_backend=disk.backend,
                nvme_checksums=disk.has_checksums,
            )
        log.info("%d chunks were built in %s", len(plan.chunks), format_seconds(time.perf_counter() - started_s))
        handle = EngineHandle(engine, self._build_options(), budget, skeleton, is_warm=is_final)
        handle.limits, handle.given = limits, self._given_config
        handle.attach()
        return handle

    def _wrap_optimizer(
        self,
        handle: EngineHandle,
        optimizer: Optimizer,
        planner: Planner,
        kind: type[ElixirOptimizer] = ElixirOptimizer,
    ) -> ElixirOptimizer:
        """The user's optimizer over an engine's shards. Collective."""
        self._avoid_nvme_for(handle, [optimizer], planner)
        return kind(
            handle.engine,
            optimizer,
            **self._config.loss_scaling(),
            init_step=self._config.init_step,
            num_update_threads=None if self._threads is None else self._threads.num_update_threads,
        )

    def _avoid_nvme_for(
        self, handle: EngineHandle, optimizers: Sequence[Optimizer], planner: Planner, *, has_averages: bool = False
    ) -> None:
        """Where placements are searched for, what is not one Adam of ours goes without NVMe, and what has averages."""
        is_one_adam = len(optimizers) == 1 and isinstance(optimizers[0], HybridAdam) and not has_averages
        if is_one_adam or not self._config.is_placement_searched:
            return
        handle.budget = replace(handle.budget, nvme_bytes=0)
        plan = handle.engine.plan
        if needs_disk(plan):
            names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
            what = f"{names} with averages of weights" if has_averages else names
            log.info("%s cannot update states on NVMe: placing them without it", what)
            handle.engine.replan(planner.guessed_plan(handle.skeleton, plan, handle.budget))

    # Checkpoints

    @property
    def _is_sharded(self) -> bool:
        return self._config.state_dict_type == "sharded"

    def _reads_folder(self, path: Path) -> bool:
        """Whether a checkpoint is a folder, and not one that a `CheckpointIO` of the user's has written."""
        innermost: Any = self.checkpoint_io
        while (inner := getattr(innermost, "checkpoint_io", None)) is not None:  # an asynchronous one has another
            innermost = inner
        reads_files = type(innermost).load_checkpoint is TorchCheckpointIO.load_checkpoint
        return path.is_dir() and (reads_files or is_checkpoint_folder(path))

    def _save_file(self, filepath: str | Path, save: Callable[[Any], None]) -> None:
        """Have rank 0 write a checkpoint of one file, which is whole or not there. Collective.

        Args:
            save: Writes it to the path that it is given.
        """
        local = local_path(filepath)

        def save_whole() -> None:
            if self._comm.rank != 0:
                return
            # Lightning's own moves its file here from the system's temporary folder: over the earlier checkpoint, byte
            # by byte, where that is on another disk. Others write as they do, and perhaps later.
            if local is not None and type(self.checkpoint_io) is TorchCheckpointIO:
                with whole_file(local) as temporary:
                    save(temporary)
            else:
                with replacing_folder(Path(filepath)):
                    save(filepath)

        save_together(self._comm, Path(filepath), save_whole)

    # What users look at

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._engine.plan

    def stats(self) -> Stats:
        """Fetches, evictions, hits, prefetches and bytes moved since the last reset, and bytes held."""
        return self._engine.stats()

    def reset_stats(self) -> None:
        self._engine.reset_stats()

    @abstractmethod
    def _gradient_scale(self) -> float:
        """What the gradients in the shards are multiplied by."""

    def full_grads(self) -> dict[str, Tensor]:
        """Whole gradients by parameter name: fp32 (fp64 with `precision="64-true"`), on the CPU, unscaled and not
        clipped. Collective."""
        return self._engine.full_grads(self._gradient_scale())

    def full_parameters(self, names: Sequence[str] | None = None, modify: bool = False) -> AbstractContextManager[Any]:
        """A context in which the named (or all) parameters are whole. Collective.

        Args:
            names: FQNs; None: all.
            modify: Keep what is written.
        """
        return self._engine.full_parameters(names, modify=modify)


def move_metrics(module: nn.Module, device: Any, *, is_fresh: bool) -> None:
    """States of torchmetrics are no buffers, so the engine leaves them where they are."""
    from torchmetrics import Metric

    for metric in module.modules():
        if isinstance(metric, Metric) and (is_fresh or next(metric.parameters(), None) is None):
            metric.to(device)
