"""`ElixirStrategy`: Lightning's lifecycle turned into calls of the engine. No tensor arithmetic here."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_elixir._lightning import (
    BaseFinetuning,
    LightningModule,
    LightningOptimizer,
    ModelCheckpoint,
    MultiProcessingLauncher,
    OnExceptionCheckpoint,
    ParallelStrategy,
    Precision,
    StochasticWeightAveraging,
    SubprocessScriptLauncher,
    TorchCheckpointIO,
    Trainer,
    TrainerFn,
    WeightAveraging,
    is_overridden,
    pl,
)
from lightning_elixir.checkpoint import restore_previous
from lightning_elixir.core.frames import with_room
from lightning_elixir.core.threads import frequent_switches
from lightning_elixir.core.together import run_together
from lightning_elixir.core.waits import Call
from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.memory_limits import change_limits
from lightning_elixir.patterns.placed import placed_modules
from lightning_elixir.plan.ignored import ignored_in_fp32
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.plan.placing.fallbacks import needs_disk
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.types import Plan
from lightning_elixir.profiling.blocks import blocks_of
from lightning_elixir.runtime.averages import Average, Averages
from lightning_elixir.strategy.averaging import check_lightnings_averages, takes_whole_models, tell_of_averaging
from lightning_elixir.strategy.blockwise import compile_by_blocks, take_compiler, without_compiler
from lightning_elixir.strategy.device_meshes import MeshAccess
from lightning_elixir.strategy.engine_handle import EngineHandle
from lightning_elixir.strategy.engine_strategy import EngineStrategy, move_metrics
from lightning_elixir.strategy.first_batch import begins_with_its_first_batch, likely_batch
from lightning_elixir.strategy.fit_run import (
    FitRun,
    accumulates_gradients,
    count_averages,
    most_backwards,
    step_without_values,
)
from lightning_elixir.strategy.graceful_stop import GracefulStop
from lightning_elixir.strategy.limited_handle import LimitedHandle
from lightning_elixir.strategy.machine_figures import MachineFigures
from lightning_elixir.strategy.model_init import built_by_first_rank, make_for_loading, meta_parameter_names
from lightning_elixir.strategy.oom_retry import RepeatableStep
from lightning_elixir.strategy.pattern_setup import take_dtensors_over
from lightning_elixir.strategy.pattern_sizes import Step
from lightning_elixir.strategy.precision import (
    ElixirPrecision,
    elixir_precision,
    is_update_unobserved,
    needs_norm_or_scale,
    widen_trained,
)
from lightning_elixir.strategy.processes import PreparedStart
from lightning_elixir.strategy.regimes import base_regime, fit_regime
from lightning_elixir.strategy.run_report import RunReport
from lightning_elixir.strategy.several_optimizers import check_disjoint
from lightning_elixir.strategy.sharded_checkpoints import SavesOnException, sees_saves
from lightning_elixir.strategy.shared_plans import Planner
from lightning_elixir.strategy.uneven_evaluation import UnevenEvaluation
from lightning_elixir.strategy.warm_up import move_to_smallest
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)


class _Launcher(PreparedStart, MultiProcessingLauncher):
    """Starts processes out of this one."""

    @override
    def _recover_results_in_main_process(self, worker_output: Any, trainer: Trainer) -> None:
        """The weights come back into this process's model, whose hooks have made layers in the others alone."""
        if worker_output.weights_path is not None:
            for name in ("configure_model", "configure_sharded_model"):
                if is_overridden(name, trainer.lightning_module):
                    make_for_loading(trainer.lightning_module, getattr(trainer.lightning_module, name))
        super()._recover_results_in_main_process(worker_output, trainer)


class ElixirStrategy(EngineStrategy, ParallelStrategy):
    """Trains models far larger than the GPU's memory: parameters, gradients and optimizer states live in chunks, spread
    over GPU and host memory and over the ranks, and come to the GPU when they are needed.

    Optimizers are element-wise (`HybridAdam`, `CPUAdam`, those of torch, what `register_elementwise` takes), Muon,
    Adafactor, bitsandbytes' or torchao's; several under manual optimization. Layers may be made in `configure_model`,
    `configure_sharded_model` or `__init__`; where there are several ranks, in `configure_model` only rank 0 holds the
    whole model.
    """

    strategy_name = "elixir"
    _script_launcher = SubprocessScriptLauncher
    _process_launcher = _Launcher

    @override
    def _begin(self) -> None:
        super()._begin()
        self._given_module: LightningModule | None = None
        self._compiler: Any = None  # of a LightningModule that was compiled
        self._elixir_optimizers: list[ElixirOptimizer] = []
        self._regime = TrainingRegime()
        self._evaluation: RepeatableStep | None = None
        self._fit_run: FitRun | None = None
        self._shares: UnevenEvaluation | None = None
        self._in_place = contextlib.ExitStack()  # what stands in for parts of Lightning, from setup to teardown

    @override
    def __getstate__(self) -> dict[str, Any]:
        """For copies, also pickled ones: options, and the model as a plain one, but nothing of a run."""
        state: dict[str, Any] = super().__getstate__()
        return (
            state
            | self._without_run()
            | {
                "_elixir_optimizers": [],
                "_evaluation": None,
                "_shares": None,
                "_fit_run": None,
                "_compiler": without_compiler(self._compiler),
                "_in_place": contextlib.ExitStack(),
            }
        )

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
    def _check_options(self) -> None:
        super()._check_options()
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            check_lightnings_averages(module.trainer, self._config)

    @override
    def _check_files(self) -> None:
        super()._check_files()
        module = self.lightning_module
        is_training = module is not None and module.trainer.state.fn == TrainerFn.FITTING
        if is_training and self._config.report_dir is not None:
            RunReport(self._config.report_dir).prepare()

    @property
    @override
    def _plugin(self) -> ElixirPrecision:
        return self.precision_plugin

    @property
    @override
    def precision_plugin(self) -> ElixirPrecision:
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, ElixirPrecision) else ElixirPrecision(autocast=self._config.autocast)

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = self._taken(precision_plugin, elixir_precision)

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
        known: Any = module._device_mesh
        if isinstance(known, MeshAccess) and known.is_made and next(placed_modules(module), None) is not None:
            self._device_mesh = known  # of an earlier run that cut it: a new one would be made in the middle of a step
            known.begin()
            self._meshes.append(known)
        module._device_mesh = self._device_mesh  # type: ignore[assignment]  # which it stands for
        with built_by_first_rank(self._comm, self.root_device, module, build or module.configure_model):
            yield
        run_together(self._comm, lambda: take_dtensors_over(module, self._config, self._comm, self.root_device))

    @override
    def _new_device_mesh(self, mesh: Mesh) -> DeviceMesh:
        if isinstance(self._launcher, _Launcher):
            raise PlanError(
                "configure_model uses device_mesh, and runs once more in the process that has started the others, when"
                " they have trained: there is no mesh in it. Start the program with torchrun, or leave out"
                f" start_method={self._start_method!r}; in a notebook give patterns instead of parallelize_module()"
            )
        return super()._new_device_mesh(mesh)

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
        self._find_figures(is_training=is_training)
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
        self._shares = UnevenEvaluation(trainer, self._end_forwards)
        self._in_place.enter_context(self._shares.installed())
        if is_training:
            self._in_place.enter_context(frequent_switches())
            self._in_place.enter_context(GracefulStop(trainer, self._comm).installed())
            self.setup_optimizers(trainer)
            self._regime = self._regime_of(trainer)  # again: the optimizer's setup is the user's code
            self._fit_run = FitRun(trainer, module, self._handle, self._wrapped_optimizers, self._planner())
        self.setup_precision_plugin()

    @override
    def model_to_device(self) -> None:
        return  # parameters and buffers are where the engine put them

    def _obtain_engine(self, module: LightningModule, is_training: bool) -> ElixirModule:
        """The engine of an earlier run, if it serves; else a new one."""
        compile_by_blocks(module, self._compiler)
        self._settle_sizes(module, self._planner, partial(self._step_of, module), is_training=is_training)
        options = self._build_options()
        handle = EngineHandle.of(module)
        if handle is not None and not handle.can_be_kept(options):
            log.info("building %s anew: parameters or options have changed since the last run", type(module).__name__)
            handle.dissolve()
            handle = None
        move_metrics(module, self.root_device, is_fresh=handle is None)
        if handle is None:
            is_loaded = self._sharded.is_model_awaited
            handle = self._build(module, self._planner(), is_training=is_training, is_loaded=is_loaded)
        return handle.engine

    def _step_of(self, module: LightningModule, planner: Planner) -> Step:
        """A training step of the module as it is when this is called, without values."""
        if next(placed_modules(module), None) is not None:
            raise PlanError("parallelize_module() has cut the model, whose DTensors need values")
        if not module.automatic_optimization:
            raise PlanError("under manual optimization training_step uses the optimizers, which come later")
        self.optimizers, self.lr_scheduler_configs = [], []  # those of an earlier fit are over other parameters
        batch, left_out = likely_batch(module), planner.ignored(module)
        kept = planner.kept_fp32(module) | ignored_in_fp32(left_out)
        blocks = blocks_of(module, planner.config.placement_request().activations)
        return lambda: step_without_values(module, batch, 0, planner, kept, blocks)

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
            most_backwards=most_backwards(trainer) if module.automatic_optimization else None,
        )
        self._tell_of_timing(regime)
        return regime

    def _planner(self) -> Planner:
        return self._make_planner(self._regime, self._machine_figures)

    def _check_callbacks(self, trainer: Trainer) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BaseFinetuning):
                raise PlanError(
                    f"{type(callback).__name__} unfreezes parameters while training, which ElixirStrategy cannot do:"
                    " chunks are laid out by what trains. Call fit() once with the backbone frozen, and again after"
                    " unfreezing it"
                )
            if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)) and self._comm.rank == 0:
                plugin = self.precision_plugin
                tell_of_averaging(callback, plugin.precision if plugin.is_mixed else None)

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    @override
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        ParallelStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        for outer in self._lightning_optimizers:
            # Lightning's wrapper inherits the class of what it wraps, and so would keep to itself what methods set.
            for name in ("add_param_group", "clip_grad_norm_", "clip_grad_value_", "grad_norm", "zero_grad"):
                if hasattr(outer.optimizer, name):
                    setattr(outer, name, getattr(outer.optimizer, name))

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self.optimizers, self.lr_scheduler_configs = [], []  # states of an earlier fit go before new ones come
        self._elixir_optimizers = []
        self.precision_plugin.attach_optimizer(None)
        super().setup_optimizers(trainer)
        given = list(self.optimizers)
        check_disjoint(self._module, given)
        has_averages = count_averages(trainer) > 0
        if len(given) > 1 or has_averages:
            self._avoid_nvme_for(self._handle, given, self._planner(), has_averages=has_averages)
        self._elixir_optimizers = [self._wrap(optimizer) for optimizer in given]
        for elixir in self._elixir_optimizers:
            elixir.check_kept()
        self.precision_plugin.attach_optimizer(self._elixir_optimizers[0])
        self.optimizers = list(self._elixir_optimizers)

    def _wrap(self, optimizer: Optimizer) -> ElixirOptimizer:
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
        return self._wrap_optimizer(self._handle, optimizer, self._planner())

    # Training

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._sharded.is_open and self._module.trainer.training:
            # Again: what begins with its first batch has only now drawn for its beginning. Before hooks draw, or seed.
            if self._is_within_epoch() and begins_with_its_first_batch(self._module.trainer.train_dataloader):
                self._sharded.restore_random_states(self._comm, self.root_device)
            self._sharded.close()
        return super().batch_to_device(batch, device, dataloader_idx)

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
        self._sharded.close()  # where `batch_to_device` was not called
        if self._fit_run is not None:
            self._fit_run.before_batch(batch, batch_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module, run = self._module, self._fit_run
        if module.automatic_optimization:
            forward = super().training_step
            return forward(*args, **kwargs) if run is None else run.training_step(forward, args, kwargs)
        output = self._manual_step(*args, **kwargs)
        if run is not None:
            run.end_step()
        return output

    @with_room
    def _manual_step(self, *args: Any, **kwargs: Any) -> Any:
        # Backward and step happen inside, so the step is no one forward of the engine: each module that it calls is.
        with self.precision_plugin.train_step_context(), self._engine.engine.telling():
            return self._module.training_step(*args, **kwargs)

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
                self._module,
                engine,
                lambda: trainer._results or {},
                self._leave_more_to_evaluation,
                may_fuse=self._config.may_fuse,
            )
        try:
            return step.forward(lambda: run(*args, **kwargs), (*args, *kwargs.values()))
        finally:
            step.forget()

    def _end_forwards(self) -> None:
        self._engine.engine.end_forwards()

    @override
    def _come_to(self, call: Call) -> None:
        if self._shares is not None and self._shares.is_under_way and not self._engine.engine.is_computing:
            self._engine.engine.end_forwards(is_message_next=True)
        else:
            super()._come_to(call)

    def _leave_more_to_evaluation(self) -> bool:
        """Move to the smallest plan, if the one in force is only a guess. Returns whether there is more room."""
        is_guessed = not self._handle.is_warm and self._config.is_placement_searched
        return is_guessed and move_to_smallest(self._handle, self._planner())

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # Under manual optimization Lightning passes no optimizer.
        # Any will do: they share the loss scale.
        run, fit_run = super().backward, self._fit_run
        elixir = self._elixir_optimizers[0] if self._elixir_optimizers else None
        if fit_run is None:
            return run(closure_loss, elixir, *args, **kwargs)
        if self._module.automatic_optimization:
            result = fit_run.backward(closure_loss, lambda loss: run(loss, elixir, *args, **kwargs))
        else:
            result = run(closure_loss, elixir, *args, **kwargs)
        fit_run.after_backward()
        return result

    @override
    @with_room  # forward and backward are inside
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
    def on_validation_end(self) -> None:
        self._sharded.renew_random_states(self._comm, self.root_device)

    @override
    def on_train_end(self) -> None:
        if self._fit_run is not None:
            self._fit_run.finish()
            self._fit_run.write_report()

    @override
    def on_exception(self, exception: BaseException) -> None:
        handle = EngineHandle.of(self.lightning_module)
        if handle is not None:
            handle.engine.engine.explain(exception, is_between_steps=True)  # those of steps have said it themselves
            handle.engine.engine.comm.leave(exception)
        # Ranks that wait for this one, or come to wait, hear of it: it may be the only one that fails.
        self._comm.leave(exception)
        self._sharded.finish_quietly()
        if self._fit_run is not None:
            self._fit_run.write_report()

    @override
    def teardown(self) -> None:
        self.model = self.lightning_module
        if self._fit_run is not None:
            self._fit_run.close()
        self._fit_run = None
        self._in_place.close()
        self._sharded.close()
        # Unlike other strategies: the parameters stay where they are, for checkpoints and the next run.
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self._rest()
        self._free_lost()
        self._sharded.finish()
        self._end_meshes()

    def _free_lost(self) -> None:
        """Free what an engine that has failed holds. The garbage collector could not: errors keep frames, these losses,
        and the graphs of losses, into which it cannot look, the engine."""
        handle = EngineHandle.left_in(self.lightning_module)
        if handle is not None and handle.engine.engine.is_lost:
            handle.engine.close()

    def _rest(self) -> None:
        """No thread of ours goes on when a run is over."""
        handle = EngineHandle.of(self.lightning_module)
        for elixir in self._elixir_optimizers:
            elixir.rest()
        if not self._elixir_optimizers and handle is not None:
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

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        self._sharded.finish()
        path, handle = Path(self.broadcast(filepath)), EngineHandle.of(self.lightning_module)
        if self._is_sharded and handle is not None:
            if storage_options is not None:
                raise PlanError("storage_options are the CheckpointIO's, which sharded checkpoints do without")
            optimizers = self._elixir_optimizers
            is_fitting = self._trainer_is_fitting
            self._sharded.save(
                path, checkpoint, handle.engine, optimizers, self._comm, self.root_device, is_waited_for=not is_fitting
            )
            return
        self._save_file(filepath, partial(super().save_checkpoint, checkpoint, storage_options=storage_options))

    @property
    def _trainer_is_fitting(self) -> bool:
        """Whether `fit` runs, which comes to its end, or to an exception, later on. In `on_fit_end` and in the hooks of
        teardown it has come to it."""
        return self._fit_run is not None and self._module.trainer.state.status == "running"

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        self._sharded.remove(partial(super().remove_checkpoint, filepath))

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self._sharded.finish()
        self._sharded.close()
        path = Path(self.broadcast(checkpoint_path))
        restore_previous(path)
        if self._reads_folder(path):
            # Fabric's folders have nothing of Lightning's loops: a fit begins its first epoch with their values.
            own = {"pytorch-lightning_version": pl.__version__, "lr_schedulers": []}
            found = own | self._sharded.open(path, self._comm, weights_only)
            module = self.lightning_module
            if module is not None and takes_whole_models(module.trainer):
                found |= self._sharded.whole_models(self._comm)
            return found
        if type(self.checkpoint_io) is TorchCheckpointIO:
            # By name: of a function, which is the default there, torch has no tensors around others loaded.
            to_host: Any = "cpu"
            return self.checkpoint_io.load_checkpoint(checkpoint_path, to_host, weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module, handle = self._module, EngineHandle.of(self._module)
        if self._sharded.is_open and "state_dict" not in checkpoint:
            self._sharded.load_model(None if handle is None else handle.engine, strict)
            return
        if handle is not None and not handle.engine.plan.mesh.is_trivial:  # modules know parts of parameters only
            handle.engine.load_full_state_dict(checkpoint["state_dict"], strict)
            return
        if handle is None and self.precision_plugin.precision == "64-true":
            self.precision_plugin.convert_module(module)  # values would be rounded to what it was made in
        if handle is None and self.precision_plugin.is_mixed and module.trainer.state.fn == TrainerFn.FITTING:
            widen_trained(module, checkpoint["state_dict"])
        is_empty = handle is None and self.is_global_zero and bool(meta_parameter_names(module))
        with warnings.catch_warnings():
            # Before there is an engine, ranks that hold no values only check the names: the values come from rank 0.
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            module.load_state_dict(checkpoint["state_dict"], strict=strict, assign=is_empty)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if isinstance(inner, ElixirOptimizer) and inner.module is not self._engine:
            raise StateError(
                "the optimizer states of this Trainer's fit are gone: since then another Trainer, whose strategy has"
                " other options, or a model in which other parameters train, has built the model anew. Save a"
                " checkpoint before that, or with the other Trainer; save_checkpoint(..., weights_only=True) has the"
                " weights as they are now"
            )
        if self._is_sharded and isinstance(inner, ElixirOptimizer):
            return self._sharded.optimizer_state(self._engine, inner)
        return inner.state_dict()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._sharded.restore_random_states(self._comm, self.root_device)  # before data loaders' iterators are made
        states, optimizers = checkpoint["optimizer_states"], self._wrapped_optimizers
        if self._sharded.has_states_for(states):
            self._sharded.load_optimizers(self._engine, optimizers)
            return
        if not states:  # as plain Lightning does, which says nothing
            log.warning("the checkpoint holds no optimizer state: the optimizer begins anew")
            return
        if len(states) != len(optimizers):
            raise PlanError(
                f"the checkpoint holds the states of {len(states)} optimizers, and configure_optimizers() returned"
                f" {len(optimizers)}: load its weights alone (load_from_checkpoint), or leave in it the states that"
                " belong to these optimizers, in their order"
            )
        for optimizer, state in zip(optimizers, states, strict=True):
            if state:  # it is empty where there was no optimizer
                optimizer.load_state_dict(state)

    @override
    def on_train_start(self) -> None:
        if self._is_within_epoch():  # again: the data loader's iterator had been made there before, and has drawn here
            self._sharded.restore_random_states(self._comm, self.root_device)

    def _is_within_epoch(self) -> bool:
        """Whether the fit goes on behind a batch that is not the last of its epoch."""
        progress = self._module.trainer.fit_loop.epoch_loop.batch_progress
        return progress.current.ready > 0 and not progress.is_last_batch

    # Memory

    def set_memory_limit(
        self, gpu: int | str | None = None, cpu: int | str | None = None, *, keep_host_memory: bool = False
    ) -> None:
        """Give memory back, or take it again: between two steps (in callbacks such as `on_train_batch_end` and
        `on_validation_start`), move to the fastest placement of the same chunks that keeps within these limits. No
        number changes by it, as far as none depends on the placement. Collective, with the same limits on all ranks.

        Args:
            gpu: What each GPU may hold, chunks and a step's activations together: bytes or "16GiB". Where only the
                activations do not fit, the chunks keep within it, and a warning says so. On the CPU accelerator, as
                `gpu_memory_limit`. None: as the options have it.
            cpu: The same of each host. None: as the options have it.
            keep_host_memory: Whether the host memory that chunks leave now stays, page-locked, for the next call: that
                gives GPU memory back in little more than the copies take. As far as the host comfortably has it, and
                until a call without this.

        Raises:
            PlanError: A size that is none, or limits that differ between ranks.
            CapacityError: No placement keeps within the limits. Nothing has changed then.
            StateError: Inside forward or backward, while gradients wait for a step, or before there is a model.
            DivergenceError: Another rank is in another call.
        """
        handle, run = self._handle, self._fit_run
        profile, regime = (None, self._regime) if run is None else run.known_step()
        limited = LimitedHandle(handle, self._planner(), profile, regime)
        change_limits([limited], gpu, cpu, keep_host_memory=keep_host_memory)

    # For `ElixirWeightAveraging`

    def check_averaging(self) -> None:
        """Raises `PlanError` if averages of weights cannot be kept under these options."""
        plan = self._config.given_plan()
        if self._config.nvme_offload_fraction > 0 or (plan is not None and needs_disk(plan)):
            raise PlanError("ElixirWeightAveraging keeps averages in memory: leave out what places states on NVMe")

    def new_averages(self, average: Average) -> Averages:
        """Averages of the weights, which begin as the weights are now. Collective."""
        return Averages(self._engine.engine, average)

    def saved_averages(self, averages: Averages) -> dict[str, Tensor]:
        """By names in the module's state dict: whole on rank 0, `{}` elsewhere; with `state_dict_type="sharded"` on
        every rank tensors in their place, as `lightning_module_state_dict` has them. Collective."""
        module, engine = self._engine, self._engine.engine
        by_name = self._sharded.averages_state(module, averages) if self._is_sharded else averages.whole()
        found: dict[str, Tensor] = {}
        for name, parameter in engine.module.named_parameters(remove_duplicate=False):
            home = engine.home_of(parameter)
            fqn = None if home is None else home[0].spec.members[home[1]].fqn
            if fqn in by_name:
                found[name] = by_name[fqn]
        return found

    @property
    def has_saved_averages(self) -> bool:
        """Whether a folder is being loaded that holds averages."""
        return self._sharded.has_averages

    def load_saved_weights(self, strict: bool) -> None:
        """Of such a folder the weights, in the place of the averages. Collective."""
        handle = EngineHandle.of(self._module)
        self._sharded.load_weights(None if handle is None else handle.engine, strict)

    def load_saved_averages(self, averages: Averages) -> dict[str, Tensor]:
        """Of such a folder the averages; returns their buffers by name. Collective."""
        return self._sharded.load_averages(self._engine, averages)

    # What users look at

    @property
    @override
    def plan(self) -> Plan:
        """The plan in force. In a fit its forecast is of the steps as they are now: while updates wait for the norm, as
        gradients are clipped too often, of such steps. After it, of the last ones."""
        return self._handle.plan if self._fit_run is None else self._fit_run.plan

    def step_metrics(self) -> dict[str, float]:
        """What `ElixirStatsMonitor` logs, by name: counts and means of the training steps since the last call, and
        bytes held at the end of the last one. Empty after a step that was not measured."""
        return {} if self._fit_run is None else self._fit_run.metrics()

    def grad_norm(self) -> Tensor:
        """Total norm of the gradients, unscaled: of the current ones, or after a step of those it used; of all
        optimizers together. Collective.

        Returns:
            0-dim, fp32; fp64 with `precision="64-true"`.

        Raises:
            StateError: Outside of `fit`.
        """
        if not self._elixir_optimizers:
            raise StateError("there are no gradients: grad_norm() works during fit()")
        norms = [optimizer.grad_norm() for optimizer in self._elixir_optimizers]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    @override
    def full_grads(self) -> dict[str, Tensor]:
        optimizers = self._elixir_optimizers
        if len(optimizers) < 2:
            return super().full_grads()
        grads, engine = self._engine.full_grads(), self._engine.engine
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                homes = [home for p in group["params"] if (home := engine.home_of(p)) is not None]
                names = [chunk.spec.members[index].fqn for chunk, index in homes]
                grads |= {name: grads[name] / optimizer.gradient_scale for name in names if name in grads}
        return grads

    @override
    def _gradient_scale(self) -> float:
        return next((optimizer.gradient_scale for optimizer in self._elixir_optimizers), 1.0)

    def close(self) -> None:
        """Free everything that the engine holds, and end its threads. The model's parameters have no values afterwards.
        Collective."""
        handle = EngineHandle.left_in(self.lightning_module)
        self.optimizers, self._elixir_optimizers, self._evaluation = [], [], None
        self.precision_plugin.attach_optimizer(None)
        if handle is not None:
            handle.engine.close()
        self._end_meshes()
        self.disconnect()

    # Access

    @property
    def _wrapped_optimizers(self) -> list[ElixirOptimizer]:
        if not self._elixir_optimizers:
            raise StateError("there is no optimizer: this works during fit()")
        return self._elixir_optimizers

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
        if handle is None and isinstance(self._launcher, _Launcher) and self._launcher.procs:
            raise StateError(
                "the engine was in the processes that this one has started, which have ended: ask for it there, in a"
                " callback (on_fit_end, say)"
            )
        if handle is None:
            raise StateError("the engine does not exist yet, or was closed: call fit, validate, test or predict first")
        return handle

    @property
    @override
    def _engine(self) -> ElixirModule:
        return self._handle.engine

    @property
    @override
    def _engines(self) -> Sequence[ElixirModule]:
        handle = EngineHandle.of(self.lightning_module)
        return [] if handle is None else [handle.engine]
