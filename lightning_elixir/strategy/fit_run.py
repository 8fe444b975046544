"""What `ElixirStrategy` keeps for the time of one fit: the warm-up, steps that can be repeated, metrics, the report."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from lightning_elixir._lightning import GradientAccumulationScheduler, LightningModule, Trainer
from lightning_elixir.core.waits import SETUP
from lightning_elixir.errors import PlanError
from lightning_elixir.memory_limits import keep_within
from lightning_elixir.optimizer import ElixirOptimizer
from lightning_elixir.patterns.placed import placed_modules
from lightning_elixir.plan.activations import ModelBlock
from lightning_elixir.plan.ignored import ignored_in_fp32
from lightning_elixir.plan.kept_dtypes import kept_in
from lightning_elixir.plan.profile import MemoryProfile, StepProfile
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.simulator.timeline import Timeline, with_times
from lightning_elixir.plan.types import Plan
from lightning_elixir.plan.units import format_seconds
from lightning_elixir.report import ReportData
from lightning_elixir.strategy.averaging import ElixirWeightAveraging
from lightning_elixir.strategy.callbacks import ElixirStatsMonitor
from lightning_elixir.strategy.dry_run import dry_run
from lightning_elixir.strategy.engine_handle import EngineHandle
from lightning_elixir.strategy.oom_retry import RepeatableStep
from lightning_elixir.strategy.reservation import Reservation
from lightning_elixir.strategy.run_report import RunReport
from lightning_elixir.strategy.several_optimizers import last_times, regime_with
from lightning_elixir.strategy.shared_plans import Planner
from lightning_elixir.strategy.step_meter import StepMeter
from lightning_elixir.strategy.warm_up import Stage, WarmUp

log = logging.getLogger(__name__)


def accumulates_gradients(trainer: Trainer, module: LightningModule) -> bool:
    """Whether gradients of several backwards may be added up before a step."""
    return not module.automatic_optimization or most_backwards(trainer) > 1


def most_backwards(trainer: Trainer) -> int:
    """Before a step, under automatic optimization."""
    schedulers = [c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
    return max([trainer.accumulate_grad_batches, *(n for s in schedulers for n in s.scheduling.values())])


def count_averages(trainer: Trainer) -> int:
    """How many averages of the weights callbacks of ours keep."""
    return sum(isinstance(callback, ElixirWeightAveraging) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def loss_of(trainer: Trainer, output: Any) -> Tensor | None:
    """The loss that Lightning makes from what a training step returns."""
    make = trainer.fit_loop.epoch_loop.automatic_optimization.output_result_cls.from_training_step_output
    return make(output, trainer.accumulate_grad_batches).closure_loss


def step_without_values(
    module: LightningModule,
    batch: Any,
    batch_idx: int,
    planner: Planner,
    kept_fp32: frozenset[str],
    blocks: Sequence[ModelBlock],
) -> MemoryProfile:
    """A dry run of one training step. Not collective.

    Args:
        module: In a fit.
        batch: As `training_step` gets it.
        batch_idx: Its number.
        planner: Knows dtypes.
        kept_fp32: Names of the parameters that are computed with in fp32.
        blocks: Those of which the profile is to tell what they save.

    Raises:
        PlanError: The step does not run without values.
        StateError: Training cannot go on after it.
    """
    trainer = module.trainer
    return dry_run(
        module,
        tuple(trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx).values()),
        partial(loss_of, trainer) if module.automatic_optimization else None,
        compute_dtype=planner.compute_dtype,
        has_autocast=planner.has_autocast,
        kept_fp32=kept_fp32,
        blocks=[block.name for block in blocks],
    )


def _ends_with_this_step(trainer: Trainer) -> bool:
    """Whether a fit under automatic optimization is over after the step under way."""
    has_all_steps = 0 <= trainer.max_steps <= trainer.global_step + 1
    return has_all_steps or (trainer.is_last_batch and trainer.max_epochs == trainer.current_epoch + 1)


class FitRun:
    """One fit.

    Args:
        trainer: Whose fit it is; its steps are measured where there is a report, or an `ElixirStatsMonitor`.
        module: The model.
        handle: Its engine.
        optimizers: Those that were set up for this fit.
        planner: Makes the plans of the warm-up.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        handle: EngineHandle,
        optimizers: Sequence[ElixirOptimizer],
        planner: Planner,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._handle = handle
        self._planner = planner
        # Not a method: in a cycle, the states would stay until the collector comes.
        self._regime = partial(regime_with, planner.regime, optimizers, count_averages(trainer))
        self._report = None if planner.config.report_dir is None else RunReport(planner.config.report_dir)
        engine = handle.engine.engine
        keep_within(engine, handle.budget, self._regime())
        engine.reducer.landing.expect_accumulation(module.automatic_optimization and most_backwards(trainer) > 1)
        self._optimizers = tuple(optimizers)
        self.warm_up = WarmUp(handle, planner, self._regime, partial(last_times, self._optimizers))
        self._reservation = Reservation(handle, self.warm_up, lambda: optimizers)
        if self.warm_up.stage is Stage.NEW:
            least = planner.least_host_bytes(engine.plan, handle.budget, self._regime())
            most = None if least is None else max(0, least - engine.host_bytes()) // len(optimizers)
            engine.host_memory.expect([extent for optimizer in optimizers for extent in optimizer.to_come(most)])
        self._step = RepeatableStep(
            module, engine, lambda: trainer._results or {}, self.warm_up.leave_more, may_fuse=planner.config.may_fuse
        )
        self._meter: StepMeter | None = None
        self._waiting: tuple[Plan, Plan] | None = None  # a plan, and the same with a forecast of steps that wait
        self._has_told_of_waiting = False
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._is_monitored = any(isinstance(callback, ElixirStatsMonitor) for callback in callbacks)
        if self._is_monitored or self._report is not None:
            self._meter = StepMeter(
                engine,
                self.warm_up.time_steps,
                partial(last_times, self._optimizers),
                is_reporting=self._report is not None,
                is_read=trainer.is_global_zero,
            )

    # Steps

    def before_batch(self, batch: Any, batch_idx: int) -> None:
        """A batch begins. Collective until the warm-up is over."""
        if self.warm_up.stage is Stage.NEW:
            for optimizer in self._optimizers:  # beside the dry run; the loader has its processes by now
                optimizer.load_kernels(has_norm=self._regime().needs_global_norm)
        self._step.before_batch()
        self.warm_up.before_batch(partial(self._dry_run, batch, batch_idx))
        self._reservation.take()
        if self._meter is not None:
            if batch_idx == 0:
                self._meter.interrupt()
            self._meter.begin_batch(is_wanted=self._is_monitored and self._trainer._logger_connector.should_update_logs)

    def interrupt(self) -> None:
        """What comes until the next batch belongs to no step."""
        if self._meter is not None:
            self._meter.interrupt()

    def after_backward(self) -> None:
        """Gradients are there. Collective until the warm-up is over."""
        self._reservation.take_rest()
        if self._meter is not None:
            self._meter.after_backward()

    def after_step(self) -> None:
        """The optimizer has stepped. Collective until the warm-up is over."""
        is_automatic = self._module.automatic_optimization
        self.warm_up.after_step(may_move=is_automatic and not _ends_with_this_step(self._trainer))
        if self._is_waiting_for_norms and not self._has_told_of_waiting:
            self._has_told_of_waiting = True
            self._tell_of_waiting()
        if is_automatic:
            self._reservation.take()
            self.end_step()

    def end_step(self) -> None:
        """What the Trainer counts as one step is over: under manual optimization that is a batch."""
        if self._meter is not None:
            self._meter.end_step(is_settled=self.warm_up.stage is Stage.DONE)

    def metrics(self) -> dict[str, float]:
        """See `StepMeter.metrics`."""
        return {} if self._meter is None else self._meter.metrics()

    def training_step(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `forward`, a second time if memory runs out."""
        return self._step.forward(lambda: forward(*args, **kwargs), (*args, *kwargs.values()))

    def backward(self, loss: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        """Run `backward`; if memory runs out, the training step and then it a second time."""
        return self._step.backward(loss, backward, partial(loss_of, self._trainer))

    def known_step(self) -> tuple[StepProfile | None, TrainingRegime]:
        """What a step does, if that is known, and what training is like now."""
        return self.warm_up.profile, self._regime()

    def _dry_run(self, batch: Any, batch_idx: int) -> MemoryProfile:
        if next(placed_modules(self._module), None) is not None:
            # Torch keeps masks of DTensors from one operator to the next: one without values would stay for good.
            raise PlanError("parallelize_module() has cut the model, whose DTensors need values")
        plan = self._handle.engine.plan
        kept = kept_in(plan) | ignored_in_fp32(plan.ignored)
        return step_without_values(self._module, batch, batch_idx, self._planner, kept, plan.activations)

    @property
    def plan(self) -> Plan:
        """The plan in force, with a forecast of the steps as they are now on this rank."""
        plan = self._handle.engine.plan
        if not self._is_waiting_for_norms:
            return plan
        if self._waiting is None or self._waiting[0] is not plan:
            self._waiting = plan, self.warm_up.while_waiting(plan)
        return self._waiting[1]

    @property
    def _is_waiting_for_norms(self) -> bool:
        return any(optimizer.is_waiting_for_norms for optimizer in self._optimizers)

    def _tell_of_waiting(self) -> None:
        forecast = self.plan.forecast
        time = "" if forecast is None else f"; they take about {format_seconds(forecast.times.total_s)} then"
        log.info(
            "several of the last steps have run updates twice, since gradients were clipped or have overflowed: for"
            " some steps, now and whenever that is so again, updates wait for the norm of all gradients%s",
            time,
        )

    # The end

    def finish(self) -> None:
        """Wait for the last step's updates and for what goes to a disk: nothing after the training may
        read it, and a fit whose last step is lost must not look like a good one. Collective.

        Raises:
            StateError: An update has failed.
            StorageError: States on a disk are lost.
            PeerLostError: On the other ranks.
        """
        engine = self._handle.engine.engine
        with engine.turn.long_call("the end of trainer.fit()"):
            if not engine.is_closed:
                engine.synchronize()
        if not engine.is_closed:
            self.warm_up.finish()
        self._planner.comm.exchange((), SETUP)  # where the others hear of a rank that has failed

    def close(self) -> None:
        """The fit is over, well or not: its plan goes on to say what it says now."""
        if not self._handle.engine.is_closed:
            self._handle.leave(self.plan)

    def write_report(self) -> None:
        """Write the report, if one is wanted. What goes wrong is logged, since the training itself is over."""
        meter, report, trainer = self._meter, self._report, self._trainer
        if meter is None or report is None or not trainer.is_global_zero:
            return
        if self._handle.engine.is_closed:
            log.warning("no report is written to %s: the engine is closed, and what it knew is gone", report.folder)
            return
        try:
            measured, held_bytes = meter.measured()
            timeline = self._timeline()
            data = ReportData(
                title=type(self._module).__name__,
                plan=self._up_to_date(timeline),
                hardware=self._planner.figures.known,
                timeline=timeline,
                measured=measured,
                num_samples=self._num_samples(),
                facts=self._facts(),
                words=self._handle.budget.words,
            )
            report.write(data, held_bytes)
        except Exception as error:  # whatever it is, it must not hide how the training ended
            log.warning("could not write the report to %s: %s: %s", report.folder, type(error).__name__, error)

    def _timeline(self) -> Timeline | None:
        plan, is_waiting = self._handle.engine.plan, self._is_waiting_for_norms
        return self.warm_up.timeline(plan, is_waiting=is_waiting, is_detailed=True)

    def _up_to_date(self, timeline: Timeline | None) -> Plan:
        """The plan, with what is expected of it by the figures that the report shows."""
        plan, hardware = self.plan, self._planner.figures.known
        if plan.forecast is None or timeline is None or hardware is None or timeline.times == plan.forecast.times:
            return plan
        now = with_times(plan, timeline, hardware.name)
        if now.forecast is None:
            return plan
        return replace(now, forecast=now.forecast.following(plan.forecast, self._handle.num_steps))

    def _num_samples(self) -> int | None:
        """Of one step over all ranks, where the data loader tells; ranks along "tensor" share theirs."""
        batch_size = getattr(self._trainer.train_dataloader, "batch_size", None)
        if not isinstance(batch_size, int):
            return None
        return batch_size * self._trainer.accumulate_grad_batches * self._handle.engine.plan.mesh.num_batches

    def _facts(self) -> tuple[tuple[str, str], ...]:
        trainer = self._trainer
        facts = {
            "precision": trainer.precision,
            "optimizer": ", ".join(type(one.optimizer).__name__ for one in self._optimizers),
            "steps": trainer.global_step,
            "micro-batches in a step": trainer.accumulate_grad_batches,
            "samples in a step": self._num_samples() or "unknown",
        }
        return tuple((name, str(value)) for name, value in facts.items())
