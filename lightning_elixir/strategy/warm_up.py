"""From the first plan, made before a step was seen, to the one that training goes on with.

The first step runs with as little as possible on the device, and is watched: what it takes beside the chunks, when, and
how long it computes. With that the final plan is made before the second step. First times are too long, since kernels
are loaded and memory is obtained; so the step after the move is left alone, the next one is timed, and if another
placement then promises to be faster by more than `LEAST_GAIN`, the engine moves once more.

Later on a step may take more than the plan leaves even beside the smallest rCache ([Note: growth],
`runtime/growth.py`). Then all this begins anew.

In a fit the layout is chosen before the first step, from the order of the modules, with computing assumed to last as
long as fetching. Moves keep it. A plan leaves room for what the allocator cannot use (`StepProfile.with_margin`).
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import replace

from lightning_elixir.plan.profile import StepInterval, StepProfile
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.types import AccessTrace, Plan
from lightning_elixir.plan.units import format_bytes
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.strategy.engine_handle import EngineHandle
from lightning_elixir.strategy.shared_plans import Planner

log = logging.getLogger(__name__)

# So many steps may depart from what was recorded before the plan is made from their highest moment alone.
_MOST_STEPS_WATCHED = 3
_LINES_LOGGED = 5
# With several ranks, looking whether any of them wants another plan takes a message.
_STEPS_BETWEEN_LOOKS = 16


class Stage(enum.Enum):
    """What the step under way is for."""

    WATCHED = "watched"
    """Memory and times, under the smallest plan."""
    SETTLING = "settling"
    """The first one under a plan: it obtains memory, and is like no other."""
    TIMED = "timed"
    DONE = "done"


class WarmUp:
    """Watches the first steps of a fit and moves the engine from plan to plan. Every method is called by all ranks.

    Args:
        handle: Whose engine it is, and how far it has come in earlier fits.
        planner: Makes the plans.
        regime: What training is like; asked when a plan is made, since states come with the first step.
    """

    def __init__(
        self,
        handle: EngineHandle,
        planner: Planner,
        regime: Callable[[], TrainingRegime],
    ) -> None:
        self._handle = handle
        self._planner = planner
        self._comm = planner.comm
        self._regime = regime
        self._is_searched = planner.config.is_placement_searched
        is_profile_wanted = planner.config.report_dir is not None
        self._is_timed_for_others = False
        self._num_steps = 0
        self._least_bytes = 0  # what every plan must leave beside the chunks from now on
        self.profile: StepProfile | None = None
        """What a step under the plan in force does, as far as it is known."""
        self.stage = Stage.WATCHED
        if handle.is_warm:
            self.stage = Stage.SETTLING if handle.is_refinable or is_profile_wanted else Stage.DONE
        self._watch()

    @property
    def _engine(self) -> Engine:
        return self._handle.engine.engine

    def time_steps(self, is_timed: bool) -> None:
        """Whether to time the next steps for metrics, beside those that warm-up times itself."""
        self._is_timed_for_others = is_timed
        if self.stage is Stage.DONE or self.stage is Stage.SETTLING:
            self._engine.sample_times(is_timed)

    def after_step(self) -> None:
        """The optimizer has stepped."""
        self._num_steps += 1

    def before_batch(self) -> None:
        """A batch begins: take the next stage, and perhaps another plan. Collective until all is done."""
        if self.stage is Stage.DONE:
            self._follow_growth()
            return
        if not self._num_steps or self._has_pending_gradients():
            return
        if self.stage is Stage.WATCHED:
            if not self._make_final_plan():
                return
            self.stage = Stage.SETTLING
        elif self.stage is Stage.SETTLING:
            self.stage = Stage.TIMED
        else:
            self._refine()
            self.stage = Stage.DONE
        self._num_steps = 0
        self._watch()

    def start_over(self) -> bool:
        """Back to the smallest plan, and to watching; between steps, with no gradients pending. Collective.

        Returns:
            Whether the engine has moved. If not, there is no smaller plan, or none may be chosen.
        """
        handle, before = self._handle, self._engine.plan.fingerprint()
        if not self._is_searched:
            return False
        plan = self._planner.warm_up_plan(handle.skeleton, self._engine.plan, handle.budget)
        if plan.fingerprint() == before:
            return False
        self._move_to(plan)
        handle.is_warm = False
        self.stage, self._num_steps = Stage.WATCHED, 0
        self._watch()
        return True

    def _follow_growth(self) -> None:
        """Steps take more than the plan leaves, on some rank."""
        if not self._is_searched or (self._comm.world_size > 1 and self._num_steps % _STEPS_BETWEEN_LOOKS):
            return
        wanted = self._engine.wanted_non_model_bytes
        if self._comm.world_size > 1:
            wanted = max(row[0] for row in self._comm.exchange((wanted,)))
        if wanted > self._least_bytes and not self._has_pending_gradients():
            self._least_bytes = wanted
            if self.start_over():
                log.warning(
                    "a step takes %s beside the chunks, more than the plan leaves: making another one",
                    format_bytes(wanted),
                )

    def _watch(self) -> None:
        """Look at what this stage is about, and at nothing else."""
        engine = self._engine
        has_memory = self._handle.has_memory_samples
        engine.sample_activations(self.stage is Stage.WATCHED or (self.stage is Stage.TIMED and not has_memory))
        engine.sample_times(self.stage in (Stage.WATCHED, Stage.TIMED) or self._is_timed_for_others)

    def _has_pending_gradients(self) -> bool:
        """Whether manual optimization goes on with gradients of an earlier batch, on any rank."""
        return any(self._comm.exchange_objects(bool(self._engine.reducer.used)))

    def _make_final_plan(self) -> bool:
        """False: no step could be watched from end to end."""
        handle, engine = self._handle, self._engine
        profile = engine.step_profile()
        is_known = all(self._comm.exchange_objects(profile is not None))
        if not is_known and self._num_steps < _MOST_STEPS_WATCHED:
            return False
        if profile is None or not is_known:
            profile = StepProfile(AccessTrace(()), (StepInterval(0.0, engine.peak_non_model_bytes),))
        self.profile = profile = _with_peak(profile, self._least_bytes)
        plan = self._planner.final_plan(handle.skeleton, engine.plan, handle.budget, profile, self._regime())
        handle.is_warm = handle.has_memory_samples = True
        # Where everything is on the device nothing can be gained; and fixed policies leave nothing to choose.
        handle.is_refinable = is_known and plan.policy == "auto" and not plan.is_all_resident
        self._move_to(plan)
        log.info("the plan from now on: %s", _first_lines(plan))
        return True

    def _refine(self) -> None:
        handle, engine = self._handle, self._engine
        profile = engine.step_profile()
        handle.has_memory_samples = True
        is_known = all(self._comm.exchange_objects(profile is not None))
        if profile is not None:
            self.profile = profile = _with_peak(profile, self._least_bytes)
        if not handle.is_refinable or profile is None or not is_known:
            return
        handle.is_refinable = False
        plan = self._planner.refined_plan(handle.skeleton, engine.plan, handle.budget, profile, self._regime())
        if plan is not None:
            self._move_to(plan)
            log.info("the times of a later step promise more from another plan: %s", _first_lines(plan))

    def _move_to(self, plan: Plan) -> None:
        if plan.fingerprint() != self._engine.plan.fingerprint():
            self._handle.engine.replan(plan)
        else:
            self._engine.take_forecast(plan)


def _first_lines(plan: Plan) -> str:
    return "\n".join(plan.explain().splitlines()[:_LINES_LOGGED])


def _with_peak(profile: StepProfile, least_bytes: int) -> StepProfile:
    """A step of the same course that takes no less than this at its highest moment."""
    peak = profile.peak_non_model_bytes
    if not 0 < peak < least_bytes:
        return profile
    ratio = least_bytes / peak
    intervals = tuple(replace(i, non_model_bytes=round(i.non_model_bytes * ratio)) for i in profile.intervals)
    return replace(profile, intervals=intervals)
