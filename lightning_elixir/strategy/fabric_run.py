"""One module that `Fabric` has set up: its engine, its optimizers, and the plans of its first steps.

Fabric does not tell what a training step is: the loop is the user's. So the first step can be foreseen only where the
user has given one as well (`GivenStep`). Else it runs with as little on the device as possible and is watched, and the
plan is made from what it took (`strategy/warm_up.py`). A step begins with the first forward with gradients after an
optimizer's step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_elixir.errors import PlanError
from lightning_elixir.memory_limits import keep_within
from lightning_elixir.optimizer import ElixirOptimizer
from lightning_elixir.patterns.placed import placed_modules
from lightning_elixir.plan.activations import ModelBlock
from lightning_elixir.plan.ignored import ignored_in_fp32
from lightning_elixir.plan.kept_dtypes import kept_in
from lightning_elixir.plan.memory import fair_part
from lightning_elixir.plan.profile import MemoryProfile
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.profiling.blocks import blocks_of
from lightning_elixir.profiling.fake_step import StepFn, profile_memory
from lightning_elixir.runtime.phases import Phase
from lightning_elixir.strategy.engine_handle import EngineHandle
from lightning_elixir.strategy.limited_handle import LimitedHandle
from lightning_elixir.strategy.pattern_sizes import Step
from lightning_elixir.strategy.reservation import Reservation
from lightning_elixir.strategy.several_optimizers import last_times, regime_with
from lightning_elixir.strategy.shared_plans import Planner
from lightning_elixir.strategy.warm_up import WarmUp
from lightning_elixir.wrapper import ElixirModule

NO_STEP = (
    "under Fabric the training step is a loop of the user's: ElixirStrategy(step_fn=..., inp=...) has one to look at"
)


@dataclass(frozen=True)
class GivenStep:
    """A step such as those of the user's loop, which is run without values."""

    step_fn: StepFn
    inp: Mapping[str, Any]

    @classmethod
    def of(cls, step_fn: StepFn | None, inp: Mapping[str, Any] | None) -> GivenStep | None:
        """None if none was given.

        Raises:
            PlanError: One of the two is missing.
        """
        if step_fn is None and inp is None:
            return None
        if not callable(step_fn) or not isinstance(inp, Mapping):
            raise PlanError(
                "step_fn and inp belong together: step_fn(model, inp) runs forward and backward of one step, and inp is"
                f" a dict of its inputs; got step_fn={step_fn!r:.60} and inp={inp!r:.60}"
            )
        return cls(step_fn, inp)

    def of_model(self, module: nn.Module, planner: Planner) -> Step:
        """What it does with a model, as that is when the result is called."""
        _check_not_placed(module)
        kept = planner.kept_fp32(module) | ignored_in_fp32(planner.ignored(module))
        blocks = blocks_of(module, planner.config.placement_request().activations)
        return lambda: self._profile(module, planner, kept, blocks)

    def of_engine(self, handle: EngineHandle, planner: Planner) -> MemoryProfile:
        """What it does with a model in an engine."""
        _check_not_placed(handle.engine.module)
        plan = handle.engine.plan
        kept = kept_in(plan) | ignored_in_fp32(plan.ignored)
        return self._profile(handle.engine.module, planner, kept, plan.activations)

    def _profile(
        self, module: nn.Module, planner: Planner, kept_fp32: frozenset[str], blocks: Sequence[ModelBlock]
    ) -> MemoryProfile:
        with torch.compiler.set_stance("force_eager"):
            return profile_memory(
                module,
                self.inp,
                self.step_fn,
                planner.compute_dtype,
                autocast=planner.has_autocast,
                keep_fp32=sorted(kept_fp32) or None,
                master_weights=False,  # what is kept has been decided
                blocks=[block.name for block in blocks],
            )


def _check_not_placed(module: nn.Module) -> None:
    if next(placed_modules(module), None) is not None:
        raise PlanError("parallelize_module() has cut the model, whose DTensors need values")


class ModelShare:
    """What one of several modules may use of the memory that they share.

    Args:
        wanted: By this one, in bytes.
        runs: Of all modules that were set up.
    """

    def __init__(self, wanted: int, runs: Callable[[], list[FabricRun]]) -> None:
        self.wanted = wanted
        self._runs = runs

    def _others(self) -> list[FabricRun]:
        return [run for run in self._runs() if run.share is not self]

    def part_of(self, nbytes: int) -> int:
        others = self._others()
        return fair_part(nbytes, self.wanted, [run.share.wanted for run in others]) if others else nbytes

    def host_bytes(self) -> int:
        return sum(run.engine.engine.host_bytes() for run in self._others())


class FabricRun:
    """Follows one module's forwards and steps. Every method is called by all ranks.

    Args:
        handle: Its engine.
        planner: Makes its plans.
        share: What it may use.
        step: One that was given; None: the first one is watched.
    """

    def __init__(self, handle: EngineHandle, planner: Planner, share: ModelShare, step: GivenStep | None) -> None:
        self.handle = handle
        self._step = step
        self.share = share
        self._planner = planner
        self._optimizers: list[weakref.ref[ElixirOptimizer]] = []
        self._warm_up: WarmUp | None = None
        self._reservation: Reservation | None = None
        self._is_new_step = True
        self._is_awaiting_backward = False  # a forward with gradients has come since the last step
        engine = handle.engine
        keep_within(engine.engine, handle.budget, self._regime())
        engine.memory_planner = "Fabric's strategy"
        self._hook = engine.register_forward_pre_hook(self._before_forward)

    @property
    def engine(self) -> ElixirModule:
        return self.handle.engine

    @property
    def planner(self) -> Planner:
        return self._planner

    @property
    def is_open(self) -> bool:
        return not self.engine.is_closed

    @property
    def optimizers(self) -> list[ElixirOptimizer]:
        """Those that are still there, in the order in which they were set up."""
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    @property
    def parameter_ids(self) -> set[int]:
        return {id(p) for p in self.engine.module.parameters()}

    def add(self, optimizer: ElixirOptimizer) -> None:
        """An optimizer was set up."""
        self._optimizers.append(weakref.ref(optimizer))
        if self._warm_up is None:
            self._start_warm_up()
        self.handle.engine.engine.host_memory.expect([e for one in self.optimizers for e in one.to_come()])

    def _start_warm_up(self) -> None:
        self._warm_up = WarmUp(self.handle, self._planner, self._regime, lambda: last_times(self.optimizers))
        self._reservation = Reservation(self.handle, self._warm_up, lambda: self.optimizers)

    def _regime(self) -> TrainingRegime:
        return regime_with(self._planner.regime, self.optimizers)

    def yield_memory(self) -> None:
        """Another module has come, and this one's part of the memory is smaller now: between steps. Collective."""
        handle, planner = self.handle, self._planner
        budget = planner.budget(handle.engine.engine.host_bytes(), limits=handle.limits)
        handle.budget = replace(budget, nvme_bytes=min(budget.nvme_bytes, handle.budget.nvme_bytes))
        keep_within(handle.engine.engine, handle.budget, self._regime())
        if planner.config.plan is not None:
            return
        plan = planner.guessed_plan(handle.skeleton, handle.engine.plan, handle.budget)
        if plan.fingerprint() != handle.engine.plan.fingerprint():
            handle.engine.replan(plan)
        if planner.config.is_placement_searched and self._warm_up is not None:
            handle.is_warm = False
            self._start_warm_up()

    def limited(self) -> LimitedHandle:
        """For limits that change."""
        has_optimizer = bool(self.optimizers)  # else plans have to leave room for the states of one that comes
        regime = self._regime() if has_optimizer else self._planner.regime
        profile = None if self._warm_up is None else self._warm_up.profile
        return LimitedHandle(self.handle, self._planner, profile, regime, is_evaluated=not has_optimizer)

    def _before_forward(self, *_: Any) -> None:
        """A forward begins: perhaps that of a new step, and with another plan."""
        is_outermost = self.engine.engine.phases.current is Phase.IDLE  # and no recomputation
        if not (torch.is_grad_enabled() and is_outermost and not self.engine.is_closed):
            return
        self._is_awaiting_backward = True
        if not self._is_new_step or self._warm_up is None or self._reservation is None:
            return
        self._is_new_step = False
        if self.handle.has_changed_requires_grad():
            changed = self.handle.changed_requires_grad()
            raise PlanError(
                f"requires_grad of {len(changed)} parameters has changed since fabric.setup() ({', '.join(changed[:3])}"
                "): chunks are laid out by what trains. Freeze before setup(); to change it later, save, build the"
                " model anew, and set that up"
            )
        self._warm_up.before_batch(self._foresee)
        self._reservation.take()

    def _foresee(self) -> MemoryProfile:
        if self._step is None:
            raise PlanError(NO_STEP)
        return self._step.of_engine(self.handle, self._planner)

    def may_have_backward(self) -> bool:
        """Whether the loss of a backward that begins now may come from a forward of the module. After one behind which
        parameters were written none can: where it does all the same, the hooks of its outputs find that out."""
        return self._is_awaiting_backward and not self.engine.engine.interception.written_since_forward()

    def after_step(self) -> None:
        """One of the optimizers has stepped."""
        self._is_new_step, self._is_awaiting_backward = True, False
        if self._warm_up is not None:
            self._warm_up.after_step(may_move=False)

    def forget(self) -> None:
        """Follow the module no more."""
        self._hook.remove()

    def close(self) -> None:
        """Free what the engine holds."""
        self.forget()
        self.engine.close()
