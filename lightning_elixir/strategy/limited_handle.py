"""An engine of a strategy, as what limits of memory are changed of ([Note: a live budget], `memory_limits.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_elixir.memory_limits import MemoryLimits
from lightning_elixir.plan.memory import Budget
from lightning_elixir.plan.profile import StepProfile
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.types import Plan
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.strategy.engine_handle import EngineHandle
from lightning_elixir.strategy.shared_plans import Planner, Replanning


@dataclass(frozen=True)
class LimitedHandle:
    """See `Limited`."""

    handle: EngineHandle
    planner: Planner
    profile: StepProfile | None
    """What a step does on this rank, if that is known."""
    regime: TrainingRegime
    """What training is like now."""
    is_evaluated: bool = False
    """Whether there is nothing to train it with."""

    @property
    def engine(self) -> Engine:
        return self.handle.engine.engine

    def budget(self, limits: MemoryLimits) -> Budget:
        return self.planner.budget(self.engine.host_bytes(), earlier=self.handle.budget, limits=limits, is_live=True)

    def finder(self, limits: MemoryLimits, budget: Budget) -> Callable[[], Plan]:
        known = self.handle.kept.get(limits, budget, (self.profile, self.regime))
        now = Replanning(self.handle.skeleton, self.engine.plan, budget, self.regime)
        return self.planner.limited_plan(now, self.profile, earlier=known, is_evaluated=self.is_evaluated)

    def keep(self, limits: MemoryLimits, budget: Budget) -> None:
        self.handle.limits, self.handle.budget = limits, budget
        self.handle.kept.add(limits, self.engine.plan, budget, (self.profile, self.regime))
