"""`ElixirStrategy`: Lightning's lifecycle turned into calls of the engine. No tensor arithmetic here."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_elixir._lightning import (
    Accelerator,
    BaseFinetuning,
    CheckpointIO,
    ClusterEnvironment,
    CPUAccelerator,
    LightningModule,
    LightningOptimizer,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    Precision,
    TorchCheckpointIO,
    Trainer,
    TrainerFn,
    is_overridden,
)
from lightning_elixir.checkpoint import local_path, replacing_folder, restore_previous, save_together, whole_file
from lightning_elixir.core.comm import SoloComm
from lightning_elixir.core.threads import ThreadPlan, frequent_switches, thread_plan
from lightning_elixir.core.threads import apply as apply_threads
from lightning_elixir.core.together import run_together
from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.optim import HybridAdam
from lightning_elixir.plan.placing.fallbacks import needs_disk
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.types import Plan, UpdateTiming
from lightning_elixir.runtime.stats import Stats
from lightning_elixir.storage.nvme import is_in_memory
from lightning_elixir.strategy.blockwise import compile_by_blocks, take_compiler, without_compiler
from lightning_elixir.strategy.config import (
    ElixirConfig,
    HardwareOption,
    KeepOption,
    NvmeBackendName,
    PlanOption,
    PolicyName,
    StateDictType,
    TimingName,
)
from lightning_elixir.strategy.engine_handle import BuildOptions, EngineHandle
from lightning_elixir.strategy.fit_run import FitRun, accumulates_gradients
from lightning_elixir.strategy.graceful_stop import GracefulStop
from lightning_elixir.strategy.machine_figures import MachineFigures
from lightning_elixir.strategy.model_init import built_by_first_rank, materialise, meta_parameter_names, skeleton_of
from lightning_elixir.strategy.oom_retry import RepeatableStep
from lightning_elixir.strategy.precision import (
    ElixirPrecision,
    elixir_precision,
    is_update_unobserved,
    needs_norm_or_scale,
)
from lightning_elixir.strategy.processes import ProcessStrategy, StartMethod
from lightning_elixir.strategy.regimes import base_regime, fit_regime
from lightning_elixir.strategy.run_report import RunReport
from lightning_elixir.strategy.sharded_checkpoints import SavesOnException, ShardedCheckpoints, sees_saves
from lightning_elixir.strategy.shared_plans import Planner, disk_options, host_bytes_of
from lightning_elixir.strategy.warm_up import move_to_smallest
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer

log = logging.getLogger(__name__)


class ElixirStrategy(ProcessStrategy):
    """Trains models far larger than the GPU's memory: parameters, gradients and optimizer states live in chunks, spread
    over GPU and host memory and over the ranks, and come to the GPU when they are needed.

    One optimizer, element-wise (`HybridAdam`, `CPUAdam`, `torch.optim.AdamW`, `Adam`, `SGD`). Layers may be made in
    `configure_model`, `configure_sharded_model` or `__init__`; where there are several ranks, in `configure_model` only
    rank 0 holds the whole model.
    """

    strategy_name = "elixir"

    def __init__(
        self,
        placement_policy: PolicyName = "auto",
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        chunk_size: int | str | None = None,
        chunk_search_range: int | str | None = None,
        chunk_search_n_grids: int = 128,
        min_chunk_size: int | str | None = None,
        enable_distributed_storage: bool = True,
        pin_memory: bool = True,
        prefetch: bool = True,
        update_timing: TimingName = "auto",
        force_outputs_fp32: bool = False,
        autocast: bool = True,
        keep_fp32: KeepOption = None,
        gpu_margin_mem_ratio: float | None = None,
        gpu_memory_limit: int | str | None = None,
        cpu_memory_limit: int | str | None = None,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_param_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        nvme_backend: NvmeBackendName = "direct",
        nvme_checksums: bool = False,
        plan: PlanOption = None,
        hardware: HardwareOption = None,
        report_dir: str | None = None,
        state_dict_type: StateDictType = "full",
        async_save: bool = False,
        reduce_dtype: torch.dtype | str | None = None,
        use_fused_kernels: bool = False,
        init_step: bool = False,
        initial_scale: float = 2.0**16,
        min_scale: float = 0.0,
        max_scale: float = math.inf,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: StartMethod = "popen",
    ) -> None:
        """All sizes are bytes as an int, or strings such as "64MiB" or "40GiB".

        Args:
            placement_policy: Where chunks live. "auto": on the GPU if everything fits, else what does not fit on the
                host, decided with what a training step takes, known before the first one. "cpu": parameters and
                optimizer states on the host. "cuda": everything on the GPU. "const" or "static": by three fractions.
            shard_param_frac: const: share of the parameters that is sharded and fetched when needed; the rest stays
                whole on the GPU.
            offload_optim_frac: const: share of the optimizer states on the host.
            offload_param_frac: const: share of the parameters on the host.
            chunk_size: Size of a chunk in the compute dtype. Default: the least waste is searched for.
            chunk_search_range: How far above the smallest candidate to search. Default: up to three times of it.
            chunk_search_n_grids: How many chunk sizes to try.
            min_chunk_size: The smallest candidate. Default: 32 MiB, less for small models.
            enable_distributed_storage: Each rank keeps its slice of every parameter. False: each rank keeps them whole,
                and communicates only after an update.
            pin_memory: Page-lock host memory, which makes transfers faster.
            prefetch: Fetch chunks ahead of need.
            update_timing: When updates of states on the host may run. "after_backward": inside the optimizer's step.
                "behind_forward": behind the next forward, where a layer waits for the updates of its own parameters.
                "inside_backward": also as soon as a chunk's gradients are there, under automatic optimization, with
                bf16 mixed precision, one backward a step, no clipping, and no hook between backward and step
                (`on_after_backward`, `on_before_optimizer_step`, ...); an exception between the two then ends the
                run, for nothing may be saved from half an update. With norm clipping or fp16 too, and then whatever
                hooks there are and without that end, for the chunks whose spare states (14 bytes a parameter) the host
                has memory for. Default: the last, where it is possible, else the second. No number depends
                on it.
            force_outputs_fp32: Cast what the steps of the model return to fp32.
            autocast: Mixed precision: run steps under `torch.autocast`. False: cast the inputs instead, and compute all
                in 16 bits.
            keep_fp32: What stays in fp32 where the others are cast to 16 bits: names of parameters or modules (globs,
                such as "*.head"), classes of modules, a function (name, module) -> bool, or a list of these. They come
                on top of the default: norms with running statistics, modules under `spectral_norm` or `orthogonal`,
                under autocast routers, and on the CPU under autocast all norms (16-true, bf16-true: nothing). An empty
                list: nothing. With `autocast=False` modules that are kept as a whole take 16-bit inputs as fp32, and
                give 16-bit results.
            gpu_margin_mem_ratio: auto: share of the GPU memory left beside rCache and activations that optimizer states
                may take. Default: all of it.
            gpu_memory_limit: Plan as if each GPU had no more. On the CPU accelerator this limits the rCache.
            cpu_memory_limit: Plan as if each host had no more. Default: what is free, but for 2 GiB for each rank and a
                fiftieth of it, at most a quarter.
            nvme_offload_fraction: cpu, const: share of the masters and optimizer states in host memory, by elements,
                that lives on NVMe instead; `HybridAdam` and `CPUAdam` only.
            nvme_offload_param_fraction: cpu, const: share of the parameters in host memory whose states are on NVMe,
                and of frozen ones, by elements, that lives there as well, with their gradients.
            nvme_offload_dir: Folder for them, on a fast disk; made if missing. No file of ours stays there. auto:
                states go there where the host's memory is short. Default: the system's folder for temporary files, if
                that is on a disk.
            nvme_backend: What reads and writes there: "direct" (our own) or "tensornvme" (the package of that name).
            nvme_checksums: Check what is read from NVMe against what was written; slow, for debugging.
            plan: A `Plan`, or the path of one that was saved, to obey instead of searching.
            hardware: Figures of the machine to plan with: a `HardwareSpec`, or the path of one that was saved. Default:
                measured on GPUs, once for each machine; round figures on the CPU accelerator.
            report_dir: Folder that receives `plan.json`, `report.json` and `report.html` at the end of `fit`, also
                after an error: what the plan predicted, and what was measured. Made if missing; earlier files are
                overwritten.
            state_dict_type: How checkpoints are saved; either kind is loaded. "full": one file, gathered on rank 0.
                "sharded": a folder in the format of `torch.distributed.checkpoint`, to which each rank writes its own
                part; any number of ranks loads it, with any placement.
            async_save: sharded: go on with training when all is in the system's cache, while a thread waits until it is
                on the disk. The next save, and the end of the run, wait for that and raise its errors.
            reduce_dtype: "float32", "bfloat16" or "float16": dtype in which gradients are reduced. Default: their own.
            use_fused_kernels: Swap in fused operators where they exist; no number changes beyond their rounding.
            init_step: Allocate optimizer states and staging memory at setup instead of in the first step.
            initial_scale: Loss scale at the start (fp16 mixed precision).
            min_scale: Smallest loss scale.
            max_scale: Largest loss scale.
            growth_factor: By how much the loss scale grows.
            backoff_factor: By how much the loss scale shrinks when gradients hold inf or nan.
            growth_interval: After how many good steps in a row the loss scale grows.
            hysteresis: How many bad steps it takes to shrink the loss scale.
            accelerator: As in every strategy of Lightning.
            parallel_devices: As in every strategy of Lightning.
            cluster_environment: As in every strategy of Lightning.
            checkpoint_io: As in every strategy of Lightning.
            precision_plugin: Replaced by `ElixirPrecision` of the same precision.
            process_group_backend: Default: NCCL on GPUs, gloo on CPUs.
            timeout: How long a rank waits for the others.
            start_method: How processes are started: "popen" runs the script once a device, the others use
                multiprocessing.

        Raises:
            PlanError: An option that cannot be used as given.
        """
        given = locals()
        self._given_module: LightningModule | None = None
        self._compiler: Any = None  # of a LightningModule that was compiled
        self._config = ElixirConfig(**{option.name: given[option.name] for option in fields(ElixirConfig)})
        self._elixir_optimizer: ElixirOptimizer | None = None
        self._figures: MachineFigures | None = None
        self._regime = TrainingRegime()
        self._threads: ThreadPlan | None = None
        self._is_timing_told = False
        self._evaluation: RepeatableStep | None = None
        self._fit_run: FitRun | None = None
        self._sharded = ShardedCheckpoints(async_save)
        self._in_place = contextlib.ExitStack()  # what stands in for parts of Lightning, from setup to teardown
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )

    @override
    def __getstate__(self) -> dict[str, Any]:
        """For copies, also pickled ones: options, and the model as a plain one, but nothing of a run."""
        state: dict[str, Any] = super().__getstate__()
        state |= {
            "_elixir_optimizer": None,
            "_figures": None,
            "_evaluation": None,
            "_fit_run": None,
            "_comm": SoloComm(),  # until it runs
            "_compiler": without_compiler(self._compiler),
            "_sharded": ShardedCheckpoints(self._config.async_save),
            "_in_place": contextlib.ExitStack(),
        }
        return state

    # The module

    @property
    def _lightning_module(self) -> LightningModule | None:
        return self._given_module

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        """The Trainer puts a module here before it refuses compiled ones to all strategies but some of its own."""
        compiler = None if module is None else take_compiler(module)
        if compiler is not None or module is not self._given_module:  # it comes here twice
            self._given_module, self._compiler = module, compiler

    # Processes

    @override
    def setup_environment(self) -> None:
        self.precision_plugin.check_device(self.root_device.type)
        super().setup_environment()
        self._sharded.close()  # what was restored between two runs
        self._threads = thread_plan(self.local_rank, max(1, self.num_processes))
        apply_threads(self._threads)
        # Before the model takes memory
        run_together(self._comm, self._check_files if self.is_global_zero else lambda: None)
        run_together(self._comm, self._check_disk)

    def _check_files(self) -> None:
        self._config.given_hardware()
        self._config.given_plan()
        module = self.lightning_module
        is_training = module is not None and module.trainer.state.fn == TrainerFn.FITTING
        if is_training and self._config.report_dir is not None:
            RunReport(self._config.report_dir).prepare()

    def _check_disk(self) -> None:
        if not self._config.may_use_nvme:
            return
        folder = disk_options(self._config).existing_folder()
        if is_in_memory(folder):
            log.warning("nvme_offload_dir: %s is in memory itself, so that nothing is gained by it", folder)

    @property
    @override
    def precision_plugin(self) -> ElixirPrecision:
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, ElixirPrecision) else ElixirPrecision(autocast=self._config.autocast)

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is None:
            self._precision_plugin = None
            return
        plugin = elixir_precision(precision_plugin, autocast=self._config.autocast)
        if isinstance(self.accelerator, CPUAccelerator):
            plugin.check_device("cpu")
        self._precision_plugin = plugin

    # Building

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # Always on the host: the model need not fit the device.
        on_meta = torch.device("meta") if empty_init else nullcontext()
        with on_meta, self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        module = self._module
        build = module.configure_sharded_model if is_overridden("configure_sharded_model", module) else None
        with built_by_first_rank(self._comm, self.root_device, module, build or module.configure_model):
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self._module
        is_training = trainer.state.fn == TrainerFn.FITTING
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        if is_training:
            self._check_callbacks(trainer)
        is_synced = any(isinstance(m, nn.SyncBatchNorm) for m in module.modules())
        if is_training and self._layer_sync is not None and not is_synced:
            self._layer_sync.apply(module)  # for good: another module would lose the engine's hooks
        self._fit_run = None
        ranks = max(1, self.num_processes)
        self._figures = MachineFigures(self._config, self._comm, self.root_device, ranks, self._figures)
        self._figures.prepare(is_training=is_training)
        self._regime = self._regime_of(trainer)
        self.model = self._obtain_engine(module, is_training)
        self._sharded.load_awaited_model(self._engine)
        self._in_place = contextlib.ExitStack()
        on_exception = SavesOnException(self._comm)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, (ModelCheckpoint, OnExceptionCheckpoint)):
                self._in_place.enter_context(on_exception.guarding(callback))
            if isinstance(callback, ModelCheckpoint) and self._config.async_save:
                self._in_place.enter_context(sees_saves(callback, self._sharded))
        if is_training:
            self._in_place.enter_context(frequent_switches())
            self._in_place.enter_context(GracefulStop(trainer, self._comm).installed())
            self.setup_optimizers(trainer)
            self._regime = self._regime_of(trainer)  # again: the optimizer's setup is the user's code
            self._fit_run = FitRun(trainer, module, self._handle, self._wrapped_optimizer, self._planner())
        self.setup_precision_plugin()

    @override
    def model_to_device(self) -> None:
        return  # parameters and buffers are where the engine put them

    def _obtain_engine(self, module: LightningModule, is_training: bool) -> ElixirModule:
        """The engine of an earlier run, if it serves; else a new one."""
        compile_by_blocks(module, self._compiler)
        options = self._build_options()
        handle = EngineHandle.of(module)
        if handle is not None and not handle.can_be_kept(options):
            log.info("building %s anew: parameters or options have changed since the last run", type(module).__name__)
            handle.dissolve()
            handle = None
        _move_metrics(module, self.root_device, is_fresh=handle is None)
        if handle is None:
            handle = self._build(module, options, is_training)
        return handle.engine

    def _build(self, module: LightningModule, options: BuildOptions, is_training: bool) -> EngineHandle:
        plugin, config = self.precision_plugin, self._config
        is_loaded = self._sharded.is_model_awaited
        run_together(self._comm, lambda: materialise(module, is_loaded) if self.is_global_zero else None)
        planner = self._planner()
        plugin.convert_module(module, run_together(self._comm, lambda: planner.kept_fp32(module)))
        planner.check_model(module, is_training=is_training)
        budget = planner.budget(host_bytes_of(module))
        plan, is_final = planner.first_plan(module, budget, is_training=is_training)
        skeleton, disk = skeleton_of(module), disk_options(config)
        engine = ElixirModule(
            module,
            plan,
            prefetch=config.prefetch,
            dtype=plugin.compute_dtype,
            use_fused_kernels=config.use_fused_kernels,
            master_weights=plugin.is_mixed,
            keep_fp32=config.keep_fp32 if plugin.compute_dtype is not None else None,
            autocast=plugin.has_autocast,
            force_outputs_fp32=config.force_outputs_fp32,
            reduce_dtype=config.reduction_dtype,
            pin_memory=config.pin_memory,
            device=self.root_device,
            nvme_offload_dir=disk.folder,
            nvme_backend=disk.backend,
            nvme_checksums=disk.has_checksums,
        )
        handle = EngineHandle(engine, options, budget, skeleton, is_warm=is_final)
        handle.attach()
        return handle

    def _build_options(self) -> BuildOptions:
        plugin = self.precision_plugin
        return BuildOptions(self._config, plugin.precision, plugin.has_autocast, self.root_device, self.world_size)

    def _regime_of(self, trainer: Trainer) -> TrainingRegime:
        """What training is like, as far as that is known without the optimizer."""
        config, plugin, module = self._config, self.precision_plugin, self._module
        if trainer.state.fn != TrainerFn.FITTING:
            return base_regime(is_mixed=plugin.is_mixed)
        is_unscaled = plugin.precision != "16-mixed" and config.reduction_dtype is None
        regime = fit_regime(
            is_mixed=plugin.is_mixed,
            wanted=config.update_timing,
            can_begin_early=is_unscaled and is_update_unobserved(module),
            needs_global_norm=needs_norm_or_scale(module),
            accumulates=accumulates_gradients(trainer, module),
            num_backwards=trainer.accumulate_grad_batches,
        )
        is_inside = regime.update_timing is UpdateTiming.INSIDE_BACKWARD
        if config.update_timing == "inside_backward" and not is_inside and not self._is_timing_told:
            self._is_timing_told = True
            log.warning(
                "update_timing='inside_backward' is not possible here (it takes bf16-mixed precision, automatic "
                "optimization, no clipping by value, no reduce_dtype and no hook between backward and step): updates "
                "run behind the next forward"
            )
        return regime

    def _planner(self) -> Planner:
        plugin = self.precision_plugin
        return Planner(
            self._config,
            self._comm,
            self.root_device,
            self.node_rank,
            plugin.compute_dtype,
            plugin.has_autocast,
            self._regime,
            self._machine_figures,
        )

    @staticmethod
    def _check_callbacks(trainer: Trainer) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BaseFinetuning):
                raise PlanError(
                    f"{type(callback).__name__} unfreezes parameters while training, which ElixirStrategy cannot do:"
                    " chunks are laid out by what trains. Call fit() once with the backbone frozen, and again after"
                    " unfreezing it"
                )

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    @override
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        ProcessStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        for outer in self._lightning_optimizers:
            # Lightning's wrapper inherits the class of what it wraps, and so would keep to itself what methods set.
            for name in ("add_param_group", "clip_grad_norm_", "clip_grad_value_", "grad_norm", "zero_grad"):
                if hasattr(outer.optimizer, name):
                    setattr(outer, name, getattr(outer.optimizer, name))

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self.optimizers, self.lr_scheduler_configs = [], []  # states of an earlier fit go before new ones come
        self._elixir_optimizer = None
        self.precision_plugin.attach_optimizer(None)
        super().setup_optimizers(trainer)
        self.optimizers = [self._wrap(self.optimizers)]

    def _wrap(self, optimizers: Sequence[Optimizer]) -> ElixirOptimizer:
        if len(optimizers) != 1:
            raise PlanError(
                f"ElixirStrategy works with one optimizer, but configure_optimizers() returned {len(optimizers)}. Use"
                " one with several parameter groups"
            )
        optimizer = optimizers[0]
        if not optimizer.param_groups:  # `configure_optimizers` returned None, and Lightning has warned about it
            optimizer = torch.optim.SGD([{"params": []}])
        known = {id(p) for p in self._module.parameters()}
        given = [p for group in optimizer.param_groups for p in group["params"]]
        foreign = [p for p in given if id(p) not in known]
        if foreign:
            raise PlanError(
                f"{len(foreign)} of the {len(given)} parameters of the optimizer ({type(optimizer).__name__}) are not"
                f" the model's, such as one of shape {list(foreign[0].shape)}: create it in configure_optimizers(),"
                " over self.parameters(), and return it"
            )
        config = self._config
        self._avoid_nvme_for(optimizer)
        self._elixir_optimizer = ElixirOptimizer(
            self._engine,
            optimizer,
            **config.loss_scaling(),
            init_step=config.init_step,
            num_update_threads=None if self._threads is None else self._threads.num_update_threads,
        )
        self.precision_plugin.attach_optimizer(self._elixir_optimizer)
        return self._elixir_optimizer

    def _avoid_nvme_for(self, optimizer: Optimizer) -> None:
        """Where placements are searched for, one that is no Adam of ours goes without NVMe."""
        config, handle = self._config, self._handle
        if isinstance(optimizer, HybridAdam) or not config.is_placement_searched:
            return
        handle.budget = replace(handle.budget, nvme_bytes=0)
        plan = handle.engine.plan
        if needs_disk(plan):
            log.info("%s cannot update states on NVMe: placing them without it", type(optimizer).__name__)
            handle.engine.replan(self._planner().guessed_plan(handle.skeleton, plan, handle.budget))

    # Training

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        handle = self._handle
        if batch_idx == 0:
            changed = handle.changed_requires_grad()
            if changed:
                raise PlanError(
                    f"requires_grad of {len(changed)} parameters has changed since setup ({', '.join(changed[:3])}):"
                    " freeze and unfreeze between two calls of fit(), not while training"
                )
        if self._sharded.is_open:  # again: making the data loader's iterator has drawn from them
            if batch_idx > 0:
                self._sharded.restore_random_states(self._comm, self.root_device)
            self._sharded.close()
        if self._fit_run is not None:
            self._fit_run.before_batch(batch, batch_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module, run = self._module, self._fit_run
        if module.automatic_optimization:
            forward = super().training_step
            return forward(*args, **kwargs) if run is None else run.training_step(forward, args, kwargs)
        # Backward and step happen inside, so the step is no one forward of the engine: each module that it calls is.
        with self.precision_plugin.train_step_context(), self._engine.engine.telling():
            output = module.training_step(*args, **kwargs)
        if run is not None:
            run.end_step()
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().predict_step, args, kwargs)

    def _evaluate(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it, a second time with less in the rCache if memory runs out."""
        step, trainer = self._evaluation, self._module.trainer
        if step is None or step.engine is not self._engine.engine:
            engine = self._engine.engine
            step = self._evaluation = RepeatableStep(
                self._module, engine, lambda: trainer._results or {}, self._leave_more_to_evaluation
            )
        try:
            return step.forward(lambda: run(*args, **kwargs), (*args, *kwargs.values()))
        finally:
            step.forget()

    def _leave_more_to_evaluation(self) -> bool:
        """Move to the smallest plan, if the one in force is only a guess. Returns whether there is more room."""
        is_guessed = not self._handle.is_warm and self._config.is_placement_searched
        return is_guessed and move_to_smallest(self._handle, self._planner())

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # Under manual optimization Lightning passes no optimizer.
        run, elixir, fit_run = super().backward, self._elixir_optimizer, self._fit_run
        if fit_run is None:
            return run(closure_loss, elixir, *args, **kwargs)
        if self._module.automatic_optimization:
            result = fit_run.backward(closure_loss, lambda loss: run(loss, elixir, *args, **kwargs))
        else:
            result = run(closure_loss, elixir, *args, **kwargs)
        fit_run.after_backward()
        return result

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._fit_run is not None:
            self._fit_run.after_step()
        return result

    @override
    def on_validation_start(self) -> None:
        if self._fit_run is not None:
            self._fit_run.interrupt()

    @override
    def on_train_end(self) -> None:
        if self._fit_run is not None:
            self._fit_run.finish()
            self._fit_run.write_report()

    @override
    def on_exception(self, exception: BaseException) -> None:
        handle = EngineHandle.of(self.lightning_module)
        if handle is not None:
            handle.engine.engine.comm.leave(exception)
        super().on_exception(exception)
        self._sharded.finish_quietly()
        if self._fit_run is not None:
            self._fit_run.write_report()

    @override
    def teardown(self) -> None:
        self.model = self.lightning_module
        self._fit_run = None
        self._in_place.close()
        self._sharded.close()
        super().teardown()
        self._rest()
        self._free_lost()
        self._sharded.finish()

    def _free_lost(self) -> None:
        """Free what an engine that has failed holds. The garbage collector could not: errors keep frames, these losses,
        and the graphs of losses, into which it cannot look, the engine."""
        handle = EngineHandle.left_in(self.lightning_module)
        if handle is not None and handle.engine.engine.is_lost:
            handle.engine.close()

    def _rest(self) -> None:
        """No thread of ours goes on when a run is over."""
        handle = EngineHandle.of(self.lightning_module)
        if self._elixir_optimizer is not None:
            self._elixir_optimizer.rest()
        elif handle is not None:
            handle.engine.engine.rest()

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole CPU tensors under the model's own names on rank 0, `{}` elsewhere; with `state_dict_type="sharded"` on
        every rank tensors on `meta` in place of parameters, whose values are read when they are saved. Collective."""
        handle = EngineHandle.of(self.lightning_module)
        if handle is None:
            return super().lightning_module_state_dict()
        return self._sharded.model_state(handle.engine) if self._is_sharded else handle.engine.full_state_dict()

    @property
    def _is_sharded(self) -> bool:
        return self._config.state_dict_type == "sharded"

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        self._sharded.finish()
        path, handle = Path(self.broadcast(filepath)), EngineHandle.of(self.lightning_module)
        if self._is_sharded and handle is not None:
            if storage_options is not None:
                raise PlanError("storage_options are the CheckpointIO's, which sharded checkpoints do without")
            optimizer = self._elixir_optimizer
            is_fitting = self._trainer_is_fitting
            self._sharded.save(
                path, checkpoint, handle.engine, optimizer, self._comm, self.root_device, is_waited_for=not is_fitting
            )
            return
        save = partial(super().save_checkpoint, checkpoint, storage_options=storage_options)
        local = local_path(filepath)

        def save_whole() -> None:
            if not self.is_global_zero:
                return
            # Lightning's own moves its file here from the system's temporary folder: over the earlier checkpoint, byte
            # by byte, where that is on another disk. Others write as they do, and perhaps later.
            if local is not None and type(self.checkpoint_io) is TorchCheckpointIO:
                with whole_file(local) as temporary:
                    save(temporary)
            else:
                with replacing_folder(path):
                    save(filepath)

        save_together(self._comm, path, save_whole)

    @property
    def _trainer_is_fitting(self) -> bool:
        """Whether `fit` runs, which comes to its end, or to an exception, later on."""
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        return trainer is not None and trainer.state.fn == TrainerFn.FITTING and trainer.state.status == "running"

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        self._sharded.remove(partial(super().remove_checkpoint, filepath))

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self._sharded.finish()
        self._sharded.close()
        path = Path(self.broadcast(checkpoint_path))
        restore_previous(path)
        if path.is_dir():
            return self._sharded.open(path, self._comm, weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module, handle = self._module, EngineHandle.of(self._module)
        if self._sharded.is_open and "state_dict" not in checkpoint:
            self._sharded.load_model(None if handle is None else handle.engine, strict)
            return
        is_empty = handle is None and self.is_global_zero and bool(meta_parameter_names(module))
        with warnings.catch_warnings():
            # Before there is an engine, ranks that hold no values only check the names: the values come from rank 0.
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            module.load_state_dict(checkpoint["state_dict"], strict=strict, assign=is_empty)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self._is_sharded and isinstance(inner, ElixirOptimizer):
            return self._sharded.optimizer_state(self._engine, inner)
        return inner.state_dict()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._sharded.is_open and not checkpoint["optimizer_states"]:
            self._sharded.load_optimizer(self._engine, self._wrapped_optimizer)
            return
        states = checkpoint["optimizer_states"]
        if len(states) > 1:
            raise PlanError(
                f"the checkpoint holds the states of {len(states)} optimizers, and ElixirStrategy works with one: load"
                " its weights alone (load_from_checkpoint), or leave in it the one state that belongs to this optimizer"
            )
        if not states:  # as plain Lightning does, which says nothing
            log.warning("the checkpoint holds no optimizer state: the optimizer begins anew")
        for state in states:
            if state:  # it is empty where there was no optimizer
                self._wrapped_optimizer.load_state_dict(state)

    @override
    def on_train_start(self) -> None:
        self._sharded.restore_random_states(self._comm, self.root_device)

    # What users look at

    @property
    def plan(self) -> Plan:
        """The plan in force. In a fit its forecast is of the steps as they are now: while updates wait for the norm, as
        gradients are clipped too often, of such steps."""
        return self._engine.plan if self._fit_run is None else self._fit_run.plan

    def stats(self) -> Stats:
        """Fetches, evictions, hits, prefetches and bytes moved since the last reset, and bytes held."""
        return self._engine.stats()

    def reset_stats(self) -> None:
        self._engine.reset_stats()

    def step_metrics(self) -> dict[str, float]:
        """What `ElixirStatsMonitor` logs, by name: counts and means of the training steps since the last call, and
        bytes held at the end of the last one. Empty after a step that was not measured."""
        return {} if self._fit_run is None else self._fit_run.metrics()

    def grad_norm(self) -> Tensor:
        """Total norm of the gradients, unscaled: of the current ones, or after a step of those it used. Collective.

        Returns:
            0-dim, fp32; fp64 with `precision="64-true"`.

        Raises:
            StateError: Outside of `fit`.
        """
        if self._elixir_optimizer is None:
            raise StateError("there are no gradients: grad_norm() works during fit()")
        return self._elixir_optimizer.grad_norm()

    def full_grads(self) -> dict[str, Tensor]:
        """Whole gradients by parameter name: fp32 (fp64 with `precision="64-true"`), on the CPU, unscaled and not
        clipped. Collective."""
        scale = 1.0 if self._elixir_optimizer is None else self._elixir_optimizer.gradient_scale
        return self._engine.full_grads(scale)

    def full_parameters(self, names: Sequence[str] | None = None, modify: bool = False) -> AbstractContextManager[Any]:
        """A context in which the named (or all) parameters are whole. Collective.

        Args:
            names: FQNs; None: all.
            modify: Keep what is written.
        """
        return self._engine.full_parameters(names, modify=modify)

    def close(self) -> None:
        """Free everything that the engine holds, and end its threads. The model's parameters have no values afterwards.
        Collective."""
        handle = EngineHandle.left_in(self.lightning_module)
        self.optimizers, self._elixir_optimizer, self._evaluation = [], None, None
        self.precision_plugin.attach_optimizer(None)
        if handle is not None:
            handle.engine.close()
        self.disconnect()

    # Access

    @property
    def _wrapped_optimizer(self) -> ElixirOptimizer:
        if self._elixir_optimizer is None:
            raise StateError("there is no optimizer: this works during fit()")
        return self._elixir_optimizer

    @property
    def _module(self) -> LightningModule:
        if self.lightning_module is None:
            raise StateError("ElixirStrategy has no model yet: call fit, validate, test or predict first")
        return self.lightning_module

    @property
    def _machine_figures(self) -> MachineFigures:
        if self._figures is None:
            raise StateError("ElixirStrategy is not set up yet: call fit, validate, test or predict first")
        return self._figures

    @property
    def _handle(self) -> EngineHandle:
        handle = EngineHandle.of(self._module)
        if handle is None:
            raise StateError("the engine does not exist yet, or was closed: call fit, validate, test or predict first")
        return handle

    @property
    def _engine(self) -> ElixirModule:
        return self._handle.engine


def _move_metrics(module: nn.Module, device: torch.device, *, is_fresh: bool) -> None:
    """States of torchmetrics are no buffers, so the engine leaves them where they are."""
    from torchmetrics import Metric

    for metric in module.modules():
        if isinstance(metric, Metric) and (is_fresh or next(metric.parameters(), None) is None):
            metric.to(device)
