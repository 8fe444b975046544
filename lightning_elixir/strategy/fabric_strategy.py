"""`lightning_elixir.fabric.ElixirStrategy`: Fabric's calls turned into calls of the engine.

What Fabric has set up it hands back to the strategy: `ElixirModule` as module, `ElixirOptimizer` as optimizer. Several
modules have an engine each, and share the memory by what they want (`ModelShare`).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_elixir._lightning import (
    BackwardSyncControl,
    EmptyInit,
    FabricMultiProcessingLauncher,
    FabricParallelStrategy,
    FabricSubprocessScriptLauncher,
    Sharded,
    unwrap_fabric,
)
from lightning_elixir.checkpoint import restore_previous
from lightning_elixir.core.threads import frequent_switches
from lightning_elixir.core.together import run_together
from lightning_elixir.errors import CapacityError, PlanError, StateError
from lightning_elixir.memory_limits import MemoryLimits, change_limits
from lightning_elixir.optim.elementwise import inner_maker
from lightning_elixir.patterns.placed import placed_modules
from lightning_elixir.profiling.fake_step import StepFn
from lightning_elixir.runtime.agreement import JointMessages
from lightning_elixir.strategy.blockwise import compile_by_blocks
from lightning_elixir.strategy.device_meshes import MeshAccess
from lightning_elixir.strategy.engine_handle import EngineHandle
from lightning_elixir.strategy.engine_strategy import EngineStrategy, move_metrics
from lightning_elixir.strategy.fabric_checkpoints import engine_around, load_folder, save_folder
from lightning_elixir.strategy.fabric_optimizer import SteppedByFabric, point_to, set_up_optimizer
from lightning_elixir.strategy.fabric_precision import FabricElixirPrecision, fabric_precision
from lightning_elixir.strategy.fabric_run import NO_STEP, FabricRun, GivenStep, ModelShare
from lightning_elixir.strategy.model_init import give_meta_buffers_memory, made_by_first_rank
from lightning_elixir.strategy.pattern_sizes import Step
from lightning_elixir.strategy.processes import PreparedStart
from lightning_elixir.strategy.regimes import base_regime, fit_regime
from lightning_elixir.strategy.shared_plans import Planner, wanted_bytes
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)


class _Parallel(FabricParallelStrategy):
    """Fabric's own, with the arguments of the Trainer's."""

    def __init__(self, *, precision_plugin: Any, **rest: Any) -> None:
        super().__init__(precision=precision_plugin, **rest)
        self._backward_sync_control = _ReducesEveryBackward()


class _ReducesEveryBackward(BackwardSyncControl):
    """Gradients leave the device in every backward, reduced, and are added up in the shards: whole ones, to be reduced
    later, would take memory for a model. The sum is the same."""

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()


class _Launcher(PreparedStart, FabricMultiProcessingLauncher):
    """Starts processes out of this one."""


ParallelizeFn = Callable[[nn.Module, "DeviceMesh"], nn.Module]


class ElixirStrategy(EngineStrategy, _Parallel, Sharded):
    """As `lightning_elixir.ElixirStrategy`, and with its options, for `Fabric(strategy=...)`. `report_dir` is for the
    Trainer alone.

    Args:
        parallelize_fn: As of Fabric's `ModelParallelStrategy`: called when a module is set up, with the module and a
            device mesh whose dimension "tensor_parallel" is for `parallelize_module`; gives the module back. It takes
            `tensor_parallel_size`, and no `fully_shard`. Models that are made in `init_module` then have their values
            on every rank.
        step_fn: Runs forward and backward of a step such as those of your loop, on (model, inp), as of
            `profile_memory`: without values, on a copy of each module with something to train that is set up. The first
            plan and sizes of patterns that are "auto" go by it. Where it raises, and without it, the first step is
            watched instead, and of such sizes the first that fits is taken.
        inp: What it gets: a dict of tensors of the shapes of a batch, on any device.
    """

    _script_launcher = FabricSubprocessScriptLauncher
    _process_launcher = _Launcher

    def __init__(
        self,
        *args: Any,
        parallelize_fn: ParallelizeFn | None = None,
        step_fn: StepFn | None = None,
        inp: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._parallelize_fn = parallelize_fn
        self._given_step = GivenStep.of(step_fn, inp)

    # Processes

    @override
    def _begin(self) -> None:
        super()._begin()
        if self._config.report_dir is not None:
            raise PlanError(
                "report_dir is for the Trainer: Fabric does not tell when training is over. `strategy.plan` and"
                " `strategy.stats()` have what a report is made of"
            )
        self._known: list[weakref.ref[FabricRun]] = []
        self._has_switches = False
        self._limits = MemoryLimits()  # in the place of the options, also for modules that are set up later
        self._is_made_by_first = False
        self._is_loading = False  # models were made without values, which a checkpoint will give
        self._in_place = contextlib.ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        """For copies, also pickled ones: options, but nothing of a run."""
        return (
            vars(self)
            | self._without_run()
            | {
                "_known": [],
                "_limits": MemoryLimits(),
                "_in_place": contextlib.ExitStack(),
            }
        )

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes  # where Fabric puts it

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:  # type: ignore[override]
        return super().distributed_sampler_kwargs if self.is_distributed else None

    @override
    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        return self.reduce(tensor, group, reduce_op)

    @property
    @override
    def _plugin(self) -> FabricElixirPrecision:
        return self.precision

    @property
    @override
    def precision(self) -> FabricElixirPrecision:
        plugin = self._precision
        if isinstance(plugin, FabricElixirPrecision):
            return plugin
        return FabricElixirPrecision(autocast=self._config.autocast)

    @precision.setter
    @override
    def precision(self, precision: Any) -> None:
        self._precision = self._taken(precision, fabric_precision)

    # Models

    @property
    @override
    def device_mesh(self) -> MeshAccess | None:
        """As of the Trainer's strategy.

        Raises:
            PlanError: A model was made in `init_module`, with values on the first rank alone.
        """
        if self._is_made_by_first and self._device_mesh is not None:
            raise PlanError(
                "a model was made in init_module(), with values on the first rank alone, and parallelize_module() needs"
                " them on every rank: have it called by ElixirStrategy(parallelize_fn=...), or make the model without"
                " init_module()"
            )
        return self._device_mesh

    @contextmanager
    @override
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # Always on the host: the model need not fit the device.
        self._is_loading = self._is_loading or bool(empty_init)
        is_cut_by_user = self._parallelize_fn is not None or (
            self._device_mesh is not None and self._device_mesh.is_made
        )
        made: AbstractContextManager[None] = nullcontext()
        if empty_init or not is_cut_by_user:
            made = made_by_first_rank(self._comm, self.root_device, is_empty=bool(empty_init))
            self._is_made_by_first = self._is_made_by_first or (self._comm.world_size > 1 and not empty_init)
        with made, EmptyInit(enabled=bool(empty_init)), self.precision.module_init_context():
            yield

    @override
    def module_sharded_context(self) -> AbstractContextManager[None]:
        return self.module_init_context()

    @override
    def module_to_device(self, module: nn.Module) -> None:
        return  # the engine brings parts of it there

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Build an engine around it. Collective.

        Raises:
            PlanError: It cannot be trained as it is.
            CapacityError: It does not fit.
        """
        if next(module.parameters(), None) is None:
            return module.to(self.root_device)  # there is nothing to place
        return self._set_up(module).engine

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Build an engine around the module, and put the optimizers over its shards. Collective. Parameters that the
        optimizers list, and that are on `meta`, are replaced there."""
        names = {id(p): name for name, p in module.named_parameters()}
        for optimizer in optimizers:
            self._check_optimizer(optimizer, names, len(optimizers))
        run = self._set_up(module)
        for optimizer in optimizers:
            point_to(optimizer, names, dict(module.named_parameters()))
        return run.engine, [self._over(run, optimizer) for optimizer in optimizers], scheduler

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Put an optimizer over the shards of the module whose parameters it has. Collective.

        Raises:
            PlanError: Its parameters are not those of one module that was set up.
        """
        given = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = [run for run in self._runs if given & run.parameter_ids]
        if len(found) != 1:
            raise PlanError(
                f"the parameters of the optimizer ({type(optimizer).__name__}) are"
                f" {f'those of {len(found)} modules' if found else 'of no module that was set up'}: set up the module"
                " first (fabric.setup_module), then make the optimizer over its parameters; and one optimizer for each"
                " module, or one module (nn.ModuleDict) around all"
            )
        run = found[0]
        names = {id(p): name for name, p in run.engine.module.named_parameters()}
        self._check_optimizer(optimizer, names, len(run.optimizers) + 1)
        return self._over(run, optimizer)

    def _check_optimizer(self, optimizer: Optimizer, names: Mapping[int, str], count: int) -> None:
        """Before memory is taken.

        Args:
            names: Of the module's parameters, by `id`.
            count: Optimizers of the module, with this one.
        """
        inner_maker(optimizer)  # which refuses what cannot run over shards
        given = [p for group in optimizer.param_groups for p in group["params"]]
        foreign = [p for p in given if id(p) not in names]
        if foreign:
            raise PlanError(
                f"{len(foreign)} of the {len(given)} parameters of the optimizer ({type(optimizer).__name__}) are not"
                f" the module's, such as one of shape {list(foreign[0].shape)}: an optimizer steps one module that was"
                " set up. Give each module its own, or put all parameters into one module"
            )
        if count > 1 and self.precision.precision == "16-mixed":
            raise PlanError(
                f"{count} optimizers over one module with precision '16-mixed': each would have a loss scale of its"
                " own, and a backward has one. Use 'bf16-mixed', or one optimizer with several parameter groups"
            )

    def _set_up(self, module: nn.Module) -> FabricRun:
        if self._runs:
            gc.collect()  # modules that nothing uses any more, and their engines, sit in cycles
        compile_by_blocks(module, None)
        handle = EngineHandle.of(module)
        if handle is not None:
            log.info("building %s anew: it was set up before", type(module).__name__)
            for run in self._runs:
                if run.handle is handle:
                    run.forget()
            handle.dissolve()
        run_together(self._comm, lambda: self._parallelize(module))
        is_training = any(p.requires_grad for p in module.parameters())
        if self._comm.rank > 0:
            give_meta_buffers_memory(module)
        move_metrics(module, self.root_device, is_fresh=True)
        share = ModelShare(wanted_bytes(module, self.precision.compute_dtype), lambda: self._runs)
        make_planner = partial(self._planner, share, is_training=is_training)
        if is_training:  # one that is not leaves them open, which counts as 1
            self._settle_sizes(module, make_planner, partial(self._step_of, module), is_training=True)
        planner = make_planner()
        earlier = self._runs
        try:
            handle = self._build(
                module, planner, is_training=is_training, is_loaded=self._is_loading, limits=self._limits
            )
        except CapacityError as error:
            if not earlier:
                raise
            count, lacking = len(earlier) + 1, error.lacking_bytes
            raise CapacityError(
                f"{error} This is one of {count} modules that share the memory: it gets its part of what is added, so"
                f" that up to {count} times as much may be needed. One that is not needed any more has to be deleted"
                " before, or strategy.engine_of(module).close() frees it",
                resource=error.resource,
                lacking_bytes=None if lacking is None else count * lacking,
            ) from error
        run = FabricRun(handle, planner, share, self._given_step)
        self._known = [weakref.ref(each) for each in (*earlier, run)]
        for other in earlier:
            other.yield_memory()
        return run

    def _step_of(self, module: nn.Module, planner: Planner) -> Step:
        if self._given_step is None:
            raise PlanError(NO_STEP)
        return self._given_step.of_model(module, planner)

    def _parallelize(self, module: nn.Module) -> None:
        if self._parallelize_fn is None or next(placed_modules(module), None) is not None:
            return
        mesh: Any = self._new_mesh_access()  # each engine has its own collectives
        given = self._parallelize_fn(module, mesh)
        if given is not module:
            raise PlanError(
                f"parallelize_fn has to give back the module that it gets ({type(module).__name__}), after"
                f" parallelize_module() has changed it, and it gave {type(given).__name__}"
            )

    def _planner(self, share: ModelShare, *, is_training: bool) -> Planner:
        plugin, wanted = self.precision, self._config.update_timing
        regime = base_regime(is_mixed=plugin.is_mixed)
        if is_training:  # as under manual optimization: what happens between backward and step is the user's affair
            regime = fit_regime(
                is_mixed=plugin.is_mixed,
                wanted=wanted,
                can_begin_early=False,
                needs_global_norm=False,
                accumulates=True,
                num_backwards=1,
            )
            self._tell_of_timing(regime)
        return self._make_planner(regime, self._find_figures(is_training=is_training), share)

    def _over(self, run: FabricRun, optimizer: Optimizer) -> ElixirOptimizer:
        wrapped = self._wrap_optimizer(run.handle, optimizer, run.planner, SteppedByFabric)
        run.add(wrapped)
        if not self._has_switches:
            self._has_switches = True
            self._in_place.enter_context(frequent_switches())
        return wrapped

    # Training

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward and reduce the gradients of all modules that have had a forward since their last step."""
        runs = [run for run in self._runs if run.engine is module or run.may_have_backward()]
        scalers = [optimizer for run in runs for optimizer in run.optimizers if optimizer.scaler.enabled]
        scales = {optimizer.loss_scale for optimizer in scalers}
        if len(scales) > 1:
            raise StateError(
                f"this backward goes through modules whose optimizers have different loss scales ({scales}): with"
                " precision '16-mixed' train them by losses of their own, or use 'bf16-mixed'"
            )
        messages = JointMessages([run.engine.engine.active.agreement for run in runs])
        with contextlib.ExitStack() as stack:
            stack.callback(messages.end)
            for run in runs:
                stack.enter_context(run.engine.engine.backwards.span())
            messages.begin()
            # Activation checkpointing runs the forward again, in the dtype that it had.
            stack.enter_context(self.precision.tensor_init_context())
            loss = scalers[0].scale_loss(tensor) if scalers else tensor
            self.precision.backward(loss, module, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        result = self.precision.optimizer_step(optimizer, **kwargs)
        for run in self._runs:
            if run.engine is getattr(optimizer, "module", None):
                run.after_step()
        return result

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        norm = set_up_optimizer(optimizer).clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped. To"
                " go on all the same, pass error_if_nonfinite=False"
            )
        return norm

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        set_up_optimizer(optimizer).clip_grad_value_(clip_val)

    # Checkpoints

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Whole CPU tensors under the module's own names on rank 0, `{}` elsewhere. Collective."""
        engine = engine_around(module)
        return super().get_module_state_dict(module) if engine is None else engine.full_state_dict()

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        engine = engine_around(module)
        (module if engine is None else engine).load_state_dict(state_dict, strict=strict)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As torch's optimizers have it, with whole CPU tensors; on rank 0, `{}` elsewhere. Collective."""
        return optimizer.state_dict()

    @override
    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save, to a file or, with `state_dict_type="sharded"`, to a folder. Collective."""
        self._sharded.finish()
        path = Path(self.broadcast(path))
        if self._is_sharded:
            if storage_options is not None:
                raise PlanError("storage_options are the CheckpointIO's, which sharded checkpoints do without")
            save_folder(self._sharded, path, state, filter or {}, self._comm, self.root_device)
            return
        whole = self._convert_stateful_objects_in_state(state, filter=filter or {})
        self._save_file(
            path, lambda file: self.checkpoint_io.save_checkpoint(whole, file, storage_options=storage_options)
        )

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load what `save_checkpoint` has saved, or a folder of Lightning's FSDP strategies. Collective."""
        self._sharded.finish()
        self.checkpoint_io.teardown()  # an asynchronous one comes to its end
        path = Path(self.broadcast(path))
        restore_previous(path)
        if not self._reads_folder(path):
            return super().load_checkpoint(path, state, strict, weights_only)
        return load_folder(self._sharded, path, state, self._comm, strict=strict, weights_only=weights_only)

    # Memory

    def set_memory_limit(
        self, gpu: int | str | None = None, cpu: int | str | None = None, *, keep_host_memory: bool = False
    ) -> None:
        """Give memory back, or take it again: between two steps, move to the fastest placement of the same chunks that
        keeps within these limits. Several modules share them, also with those that are set up later. No number changes
        by it, as far as none depends on the placement. Collective, with the same limits on all ranks.

        Args:
            gpu: What each GPU may hold, chunks and a step's activations together: bytes or "16GiB". Where only the
                activations do not fit, the chunks keep within it, and a warning says so. With `accelerator="cpu"`, as
                `gpu_memory_limit`. None: as the options have it.
            cpu: The same of each host. None: as the options have it.
            keep_host_memory: Whether the host memory that chunks leave now stays, page-locked, for the next call: that
                gives GPU memory back in little more than the copies take. As far as the host comfortably has it, and
                until a call without this.

        Raises:
            PlanError: A size that is none, or limits that differ between ranks.
            CapacityError: No placement keeps within the limits. Nothing has changed then.
            StateError: Inside forward or backward, while gradients wait for a step, or before a module was set up.
            DivergenceError: Another rank is in another call.
        """
        runs = self._runs
        if not runs:
            raise StateError("set_memory_limit: no module was set up, so there is nothing to move: call it after setup")
        self._limits = change_limits([run.limited() for run in runs], gpu, cpu, keep_host_memory=keep_host_memory)

    # What users look at

    def engine_of(self, module: nn.Module) -> ElixirModule:
        """The engine of a module that was set up: its plan, `stats()`, `full_parameters()`.

        Args:
            module: What `fabric.setup` took, or gave.

        Raises:
            StateError: It was not set up.
        """
        engine = engine_around(unwrap_fabric(module))
        if engine is None:
            raise StateError(f"{type(module).__name__} was not set up: fabric.setup() builds its engine")
        return engine

    @property
    def _runs(self) -> list[FabricRun]:
        """Of the modules that are still there, in the order in which they were set up."""
        runs = [run for known in self._known if (run := known()) is not None]
        return [run for run in runs if run.is_open]

    @property
    def _only_run(self) -> FabricRun:
        runs = self._runs
        if len(runs) != 1:
            raise StateError(
                "no module was set up: call fabric.setup() first"
                if not runs
                else f"{len(runs)} modules were set up: ask strategy.engine_of(module) of one of them"
            )
        return runs[0]

    @property
    @override
    def _engine(self) -> ElixirModule:
        return self._only_run.engine

    @property
    @override
    def _engines(self) -> Sequence[ElixirModule]:
        return [run.engine for run in self._runs]

    @override
    def _gradient_scale(self) -> float:
        return next((optimizer.gradient_scale for optimizer in self._only_run.optimizers), 1.0)

    def grad_norm(self) -> Tensor:
        """Total norm of the gradients of the one optimizer, unscaled: of the current ones, or after a step of those it
        used. Collective; 0-dim. With several optimizers, ask them."""
        optimizers = self._only_run.optimizers
        if len(optimizers) != 1:
            raise StateError(
                f"there are {len(optimizers)} optimizers: ask optimizer.grad_norm() of one of them"
                if optimizers
                else "there is no optimizer: call it after fabric.setup(model, optimizer), while your program keeps the"
                " optimizer that this has returned"
            )
        return optimizers[0].grad_norm()

    def close(self) -> None:
        """Wait for the checkpoint under way, free everything that engines hold, and end their threads. The modules'
        parameters have no values afterwards. Collective."""
        self._sharded.finish()
        self.checkpoint_io.teardown()
        for run in self._runs:
            run.close()
        self._in_place.close()
        self._end_meshes()
        self.disconnect()
