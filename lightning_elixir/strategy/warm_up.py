"""From the plan that an engine is built with to the one that training goes on with.

When the first batch is there, a dry run ([Note: dry run], `strategy/dry_run.py`) tells what a step takes beside the
chunks, and when, and how long it computes. With that the final plan is made, before the first step. That step is
watched: where it takes more than was foreseen, the plan is made anew. First times are too long, since kernels are
loaded and memory is obtained; so the second step is timed, or the first after it in which no model is compiled, or the
third where the device had too little memory for a moment in the second. Where it departs from what was foreseen, the
search is made again: if another placement promises to be faster by more than `LEAST_GAIN`, or the one in force turns
out too large, the engine moves once more. Some steps later training has settled, and what is expected of a step is
brought up to date (`strategy/steady_look.py`). On a GPU Python's garbage collector runs after the first step that was
timed, and after a search: a dry run and searches leave it so much that it would go through everything in one of the
next steps, which takes tenths of a second (seen: 0.4 s more in one of 0.3 s).

Where there can be no dry run, the first step runs with as little as possible on the device, and is watched; the plan is
made before the second one, and the third one is timed.

Later on a step may take more than the plan leaves even beside the smallest rCache ([Note: growth],
`runtime/growth.py`). Then a step is watched again.

In a fit the layout is chosen before the first step, from the order of the modules, with computing assumed to last as
long as fetching. Moves keep it. A plan leaves room for what the allocator cannot use (`StepProfile.with_margin`).
"""

from __future__ import annotations

import enum
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from lightning_elixir.core.compiled_modules import num_compiled_graphs
from lightning_elixir.core.frames import with_room
from lightning_elixir.core.garbage import no_collections
from lightning_elixir.errors import StateError
from lightning_elixir.memory_limits import keep_within
from lightning_elixir.optim.execution import UpdateTimes
from lightning_elixir.plan.profile import MemoryProfile, StepInterval, StepProfile
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.simulator.timeline import Timeline
from lightning_elixir.plan.types import AccessTrace, Plan, Tier
from lightning_elixir.plan.units import format_bytes, format_seconds
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.strategy.engine_handle import EngineHandle
from lightning_elixir.strategy.graceful_stop import NEXT_BATCH
from lightning_elixir.strategy.shared_plans import Planner, Replanning
from lightning_elixir.strategy.steady_look import SteadyLook

log = logging.getLogger(__name__)

DryRun = Callable[[], MemoryProfile]
"""Raises `PlanError` where there can be none, and `StateError` where training cannot go on after it."""

# So much device memory that something else seems to have may be garbage in cycles, as of an earlier fit: the plan would
# leave it free for all of this one.
_WORTH_COLLECTING_BYTES = 64 * 2**20
# A step that takes more than was foreseen by less than this part has its place in the plan's margin.
_FORESEEN_WITHIN = 0.1
# So many steps may depart from what was recorded before the plan is made from their highest moment alone.
_MOST_STEPS_WATCHED = 3
# So many steps are timed at most until one comes in which nothing is compiled.
_MOST_STEPS_TIMED = 4
# A step that takes another time than was foreseen, by less than this part, needs no other plan, which would have to be
# faster by as much.
_STEP_AS_FORESEEN_WITHIN = 0.05
# Updates that take another time than was foreseen, by less than this part, are as they should be.
_AS_FORESEEN_WITHIN = 0.03
# Of what a step takes, to be left free beside it after memory has run out for the first time.
_MORE_AFTER_SHORTAGE = 0.1
_LINES_LOGGED = 5
# Devices whose steps take so long that a garbage collection in one of them does not matter.
_UNHURRIED = ("cpu",)
_WAITING = "the norm: gradients are clipped, or overflow, so often that updates wait for all of them"
# As many times as much as the last plan was made for has a step to take to have another one made: some programs keep a
# number of each step on the device, and where no plan is small enough, each step would be more than the one before.
_GROWN = 1.01
# With several ranks, looking whether any of them wants another plan takes a message.
_STEPS_BETWEEN_LOOKS = 16


class Stage(enum.Enum):
    """What the step under way is for."""

    NEW = "new"
    """None has begun."""
    WATCHED = "watched"
    """Memory and times, under the smallest plan."""
    SETTLING = "settling"
    """The first one under a plan: it obtains memory, and is like no other. Memory, where that was only foreseen."""
    TIMED = "timed"
    DONE = "done"


def move_to_smallest(handle: EngineHandle, planner: Planner) -> bool:
    """Have an engine hold as little on the device as possible; between steps, with no gradients pending. Collective.

    Returns:
        Whether it has moved: it may be there already.
    """
    before = handle.engine.plan
    plan = planner.warm_up_plan(handle.skeleton, before, handle.budget)
    if plan.fingerprint() == before.fingerprint():
        return False
    handle.engine.replan(plan)
    return True


class WarmUp:
    """Watches the first steps of a fit and moves the engine from plan to plan. Every method is called by all ranks.

    Args:
        handle: Whose engine it is, and how far it has come in earlier fits.
        planner: Makes the plans.
        regime: What training is like; asked when a plan is made, since states come with the first step.
        update_times: See `StepMeter`.
    """

    def __init__(
        self,
        handle: EngineHandle,
        planner: Planner,
        regime: Callable[[], TrainingRegime],
        update_times: Callable[[], UpdateTimes | None],
    ) -> None:
        self._handle = handle
        self._update_times = update_times
        self._look: SteadyLook | None = None  # under way
        self._is_look_due = False  # at the step before
        self._has_searched = False  # since garbage was collected
        self._planner = planner
        self._comm = planner.comm
        self._regime = regime
        self._is_searched = planner.config.is_placement_searched
        is_profile_wanted = planner.config.report_dir is not None
        self._is_timed_for_others = False
        self._num_steps = 0
        self._num_timed = 0  # steps that were timed for nothing
        self._begun_with = (0, 0)  # compiled graphs, and times that memory was short, when the stage began
        self._least_bytes = 0  # what every plan must leave beside the chunks from now on
        self._more = _MORE_AFTER_SHORTAGE
        self.profile: StepProfile | None = None
        """What a step under the plan in force does, as far as it is known."""
        self.stage = Stage.NEW
        if handle.is_warm:
            self.stage = Stage.SETTLING if handle.is_refinable or is_profile_wanted else Stage.DONE
            if not handle.num_steps:
                self._engine.take_forecast(self._dated(self._engine.plan))
        self._watch()

    @property
    def _engine(self) -> Engine:
        return self._handle.engine.engine

    def time_steps(self, is_timed: bool) -> None:
        """Whether to time the next steps for metrics, beside those that warm-up times itself."""
        self._is_timed_for_others = is_timed
        self._engine.sample_times(is_timed or self._is_timed)

    def after_step(self, *, may_move: bool) -> None:
        """The optimizer has stepped: the next stage, and perhaps another plan. Collective until all is done.

        Args:
            may_move: More of the fit comes, and nothing more of this batch; otherwise the next batch is waited for.
        """
        self._num_steps += 1
        self._handle.num_steps += 1
        self._is_look_due = True
        if not may_move or self.stage is Stage.NEW:
            return
        if self.stage is Stage.DONE:
            self._look_again()
        else:
            self._advance()

    def finish(self) -> None:
        """No step follows that a look could end with: none is timed for it any more."""
        if self._look is not None:
            self._look = None
            self._watch()

    def timeline(self, plan: Plan, *, is_waiting: bool, is_detailed: bool = False) -> Timeline | None:
        """The predicted step of the plan in force; None: nothing is known to predict it by. Not collective.

        Args:
            is_waiting: Of steps whose updates wait for the norm, though the plan has some begin in backward.
            is_detailed: With spans and memory.
        """
        if self.profile is None or not self._planner.can_predict(plan):
            return None
        if is_waiting:
            plan = replace(plan, chunks=tuple(replace(c, has_spare_states=False) for c in plan.chunks))
        return self._planner.simulated(plan, self.profile, self._regime(), is_detailed=is_detailed)

    def while_waiting(self, plan: Plan) -> Plan:
        """The plan in force with a forecast of steps whose updates wait for the norm, though it has some begin in
        backward; as it is, where there is none. Not collective."""
        if plan.forecast is None or not plan.has_spare_states:
            return plan
        timeline = self.timeline(plan, is_waiting=True)
        if timeline is None:
            return plan
        expected = replace(plan.forecast, times=timeline.times, binding=_WAITING, alternatives=(), weighed_s=None)
        return replace(plan, forecast=expected)

    @with_room
    def before_batch(self, dry_run: DryRun) -> None:
        """A batch begins: the first plan, or one for steps that have grown. Collective until the warm-up is done.

        Args:
            dry_run: Of the training step with this batch.
        """
        if self.stage is Stage.DONE:
            self._look_again()
            self._follow_growth(dry_run)
        elif self.stage is not Stage.NEW:
            self._advance()
        elif not self._has_pending_gradients():
            self._enter(self._begin(dry_run))

    def _advance(self) -> None:
        """From stage to stage, each after a step."""
        if not self._num_steps or self._has_pending_gradients():
            return
        if self.stage is Stage.WATCHED:
            if self._make_final_plan():
                self._enter(Stage.SETTLING)
        elif self.stage is Stage.SETTLING:
            is_to_settle_again = self._is_more_than_foreseen() and self._make_final_plan()
            self._enter(Stage.SETTLING if is_to_settle_again else Stage.TIMED)
        elif self._was_held_up():
            self._num_timed += 1
            self._enter(Stage.TIMED)
        else:
            self._refine()
            self._enter(Stage.DONE)

    def _was_held_up(self) -> bool:
        """Whether another step is to be timed: in this one models were compiled, or memory was short, on any rank. In
        some trainings it is in each step, so that only the first time is left out."""
        if self._num_timed >= _MOST_STEPS_TIMED:
            return False
        (num_graphs, num_shortages), before = self._holdups(), self._begun_with
        is_held_up = num_graphs != before[0] or (num_shortages != before[1] and not self._num_timed)
        return any(row[0] for row in self._comm.exchange([int(is_held_up)], NEXT_BATCH))

    def _holdups(self) -> tuple[int, int]:
        return num_compiled_graphs(), self._engine.device.num_shortages()

    def _enter(self, stage: Stage) -> None:
        self.stage, self._num_steps, self._begun_with = stage, 0, self._holdups()
        self._look = SteadyLook(self._update_times) if stage is Stage.DONE and self.profile is not None else None
        self._is_look_due = False
        is_timed = stage is Stage.DONE or (stage is Stage.TIMED and self._num_timed > 0)
        if is_timed and self._has_searched and self._engine.device.torch_device.type not in _UNHURRIED:
            gc.collect()
            self._has_searched = False
        self._watch()
        self._engine.host_room.look(self._engine.plan, self._engine.host_bytes)

    def start_over(self) -> bool:
        """Back to the smallest plan, and to watching; between steps, with no gradients pending. Collective.

        Returns:
            Whether the engine has moved. If not, there is no smaller plan, or none may be chosen.
        """
        if not self._is_searched or not move_to_smallest(self._handle, self._planner):
            return False
        self._handle.is_warm = False
        self._enter(Stage.WATCHED)
        return True

    def leave_more(self) -> bool:
        """As `start_over`, where memory has run out under the plan in force though a step has taken what it was made
        for, as with gaps between segments of the allocator: later plans leave a tenth more, two tenths after the next
        time, and so on."""
        planned = 0 if self.profile is None else self.profile.peak_non_model_bytes
        taken = max(self._least_bytes, planned, self._engine.peak_non_model_bytes_seen)
        if not self.start_over():
            return False
        self._least_bytes = round(taken * (1 + self._more))
        self._more *= 2
        return True

    def _follow_growth(self, dry_run: DryRun) -> None:
        """Steps take more than the plan leaves, on some rank."""
        if not self._is_searched or (self._comm.world_size > 1 and self._num_steps % _STEPS_BETWEEN_LOOKS):
            return
        wanted = self._engine.wanted_non_model_bytes
        if self._comm.world_size > 1:
            wanted = max(row[0] for row in self._comm.exchange((wanted,)))
        if wanted > _GROWN * self._least_bytes and not self._has_pending_gradients():
            if self._planner.chooses_activations and self._choose_anew(dry_run):
                return
            self._least_bytes = wanted
            if self.start_over():
                log.warning(
                    "a step takes %s beside the chunks, more than the plan leaves: making another one",
                    format_bytes(wanted),
                )

    def _choose_anew(self, dry_run: DryRun) -> bool:
        """Move to a plan with other activations, for steps such as this one. Returns whether there is one."""
        profile, before = self._foreseen(dry_run), self._engine.plan.fingerprint()
        if profile is None:
            return False
        log.info("steps have grown: choosing anew what becomes of activations")
        self._place_foreseen(profile)
        if self._engine.plan.fingerprint() == before:
            return False
        self._handle.has_memory_samples = False
        self._enter(Stage.SETTLING)
        return True

    def _watch(self) -> None:
        """Look at what this stage is about, and at nothing else."""
        engine, has_memory = self._engine, self._handle.has_memory_samples
        is_first_look = self.stage in (Stage.SETTLING, Stage.TIMED) and not has_memory
        engine.sample_activations(self.stage is Stage.WATCHED or is_first_look)
        engine.sample_times(self._is_timed_for_others or self._is_timed)

    @property
    def _is_timed(self) -> bool:
        """Whether this stage is about times."""
        if self._look is not None:
            return True
        is_only_foreseen = self.stage is Stage.SETTLING and not self._handle.has_memory_samples
        return self.stage in (Stage.WATCHED, Stage.TIMED) or is_only_foreseen

    def _has_pending_gradients(self) -> bool:
        """Whether manual optimization goes on with gradients of an earlier batch, on any rank."""
        return any(row[0] for row in self._comm.exchange([int(bool(self._engine.reducer.used))], NEXT_BATCH))

    @no_collections()
    def _begin(self, dry_run: DryRun) -> Stage:
        """Make the plan for the first step."""
        handle, planner, engine = self._handle, self._planner, self._engine
        # Less what has come since: libraries, the user's data and its loaders.
        handle.budget = planner.budget(engine.host_bytes(), earlier=handle.budget, limits=handle.limits)
        keep_within(engine, handle.budget, self._regime())
        profile = self._foreseen(dry_run)
        if profile is None:
            if planner.chooses_activations and engine.plan.activations:
                log.warning(
                    "activations='auto': what a step takes cannot be foreseen, so all %d blocks are recomputed; say"
                    " 'keep', 'offload' or a dict to have it otherwise",
                    len(engine.plan.activations),
                )
            self._move_to(planner.warm_up_plan(handle.skeleton, engine.plan, handle.budget))
            return Stage.WATCHED
        self._place_foreseen(profile)
        engine.interception.lost_writes.suspect(profile.written)
        return Stage.SETTLING

    def _place_foreseen(self, profile: MemoryProfile) -> None:
        """Move to the plan for such a step."""
        foreseen = self._planner.foresee(self._replanning(), profile)
        foreign = self._foreign_bytes(profile)
        beside = profile.with_bytes(lambda nbytes: nbytes + foreign)
        self._place(_beside(foreseen, foreign), is_known=True, is_seen=False, foreseen=beside)

    def _foreign_bytes(self, profile: MemoryProfile) -> int:
        """Device memory that neither the engine has nor the dry run has seen: of the user's other models, or of an
        earlier fit. A step that is watched shows it, a dry run does not."""
        engine = self._engine

        def found() -> int:
            known = engine.device_bytes() + profile.buffer_bytes + profile.input_bytes
            return max(0, engine.device.allocated_bytes() - known)

        if found() >= _WORTH_COLLECTING_BYTES:
            gc.collect()
        return found()

    def _foreseen(self, dry_run: DryRun) -> MemoryProfile | None:
        """What a step will do, if all ranks can tell."""
        found: MemoryProfile | None = None
        started_s = time.perf_counter()
        try:
            found = dry_run()
            log.info("the step was foreseen in %s", format_seconds(time.perf_counter() - started_s))
        except StateError:  # it has left behind what must not be trained with
            raise
        except Exception as error:  # whatever the user's code raises; in the real step it is heard of
            log.info("the first step is watched, as it cannot be foreseen (%s)", error)
        return found if all(self._comm.exchange_objects(found is not None)) else None

    def _is_more_than_foreseen(self) -> bool:
        """Whether the first step has taken more than the plan was made for, on any rank."""
        handle, engine = self._handle, self._engine
        if handle.has_memory_samples or self.profile is None:
            return False
        handle.has_memory_samples = all(self._comm.exchange_objects(engine.step_profile() is not None))
        seen, foreseen = engine.peak_non_model_bytes, self.profile.peak_non_model_bytes
        is_more = any(self._comm.exchange_objects(seen > foreseen * (1 + _FORESEEN_WITHIN)))
        if is_more:
            log.info(
                "the first step took %s beside the chunks, and %s were foreseen: making another plan",
                format_bytes(seen),
                format_bytes(foreseen),
            )
        return is_more

    def _make_final_plan(self) -> bool:
        """False: no step could be watched from end to end."""
        handle, engine = self._handle, self._engine
        profile = engine.step_profile()
        is_known = all(self._comm.exchange_objects(profile is not None))
        if not is_known and self._num_steps < _MOST_STEPS_WATCHED:
            return False
        if profile is None or not is_known:
            profile = StepProfile(AccessTrace(()), (StepInterval(0.0, engine.peak_non_model_bytes),))
        handle.has_memory_samples = True
        self._place(_with_peak(profile, self._least_bytes), is_known=is_known, is_seen=True)
        return True

    def _place(
        self, profile: StepProfile, *, is_known: bool, is_seen: bool, foreseen: MemoryProfile | None = None
    ) -> None:
        """Move to the plan for such a step.

        Args:
            profile: What it does on this rank.
            is_known: Whether that is more than its highest moment.
            is_seen: Whether a real step has done it.
            foreseen: See `Planner.final_plan`.
        """
        handle = self._handle
        self._has_searched = True
        plan = self._planner.final_plan(self._replanning(), profile, is_seen=is_seen, foreseen=foreseen)
        self.profile = profile if foreseen is None else self._planner.over_chunks(foreseen, plan)
        handle.is_warm = True
        handle.is_refinable = is_known and self._is_placed_by_times(plan)
        self._move_to(plan)
        log.info("the plan from now on: %s", _first_lines(plan))

    def _refine(self) -> None:
        handle, engine, foreseen = self._handle, self._engine, self.profile
        profile = engine.step_profile()
        handle.has_memory_samples = True
        is_known = all(self._comm.exchange_objects(profile is not None))
        if profile is not None:
            self.profile = profile = _with_peak(profile, self._least_bytes)
        if profile is None or not is_known:
            return
        is_refinable, handle.is_refinable = handle.is_refinable, False
        step = self._planner.seen_step(self._replanning(), profile)
        if not is_refinable or self._is_as_foreseen(foreseen, profile, step):
            self._expect(step)
            return
        self._has_searched = True
        before = engine.plan
        plan = self._planner.refined_plan(self._replanning(), profile)
        self._move_to(plan)
        if plan.fingerprint() != before.fingerprint():
            log.info("by what a later step has shown, another plan is better: %s", _first_lines(plan))

    def _is_as_foreseen(self, foreseen: StepProfile | None, seen: StepProfile, step: Timeline | None) -> bool:
        """Whether a step takes the memory and the time that the plan in force was made for, on all ranks.

        Args:
            foreseen: What it was made for.
            seen: What a step does.
            step: Such a step under it, predicted.
        """
        plan, limit = self._engine.plan, self._handle.budget.gpu_bytes
        expected = plan.forecast
        if foreseen is None or expected is None or step is None:
            return False
        is_alike = (
            abs(step.times.total_s - expected.times.total_s) <= _STEP_AS_FORESEEN_WITHIN * expected.times.total_s
            and abs(seen.peak_non_model_bytes - foreseen.peak_non_model_bytes) <= plan.block_bytes
            # Else it turns out too large, or was the smallest that there was.
            and (limit is None or max(step.peak_gpu_bytes, expected.peak_gpu_bytes) <= limit)
        )
        return all(self._comm.exchange_objects(is_alike))

    def _is_placed_by_times(self, plan: Plan) -> bool:
        """Where everything is on the device nothing can be gained; and fixed policies leave nothing to choose. Beside
        what a step is seen to take there may be room that the smallest plan does not use."""
        return self._is_searched and not plan.is_all_resident

    def _look_again(self) -> None:
        """If one of the steps of a look at settled training is over, look at it."""
        look = self._look
        if look is None or not self._is_look_due:
            return
        self._is_look_due = False
        if look.after_step(self._engine.step_profile(), self._engine.seconds_between):
            self._look = None
            profile = look.profile
            if all(self._comm.exchange_objects(profile is not None)) and profile is not None:
                self.profile = profile = _with_peak(profile, self._least_bytes)
                self._correct_host(look.host_update_s(_host_numel(self._engine.plan)), profile)
                self.profile = profile = self._with_program(profile, look.between_s)
                self._expect(self._planner.seen_step(self._replanning(), profile))
            self._watch()

    def _correct_host(self, seen_s: float | None, profile: StepProfile) -> None:
        """Correct the machine's figures where the host's updates take another time than they say, on the slowest rank.

        Args:
            seen_s: Seconds of a step's updates by the host, of all that it has to update; None: nothing to go by.
            profile: What a step does.
        """
        if not self._planner.figures.is_measured:
            return
        foreseen_s = self._planner.simulated(self._engine.plan, profile, self._regime()).host_update_s
        slower = seen_s / foreseen_s if seen_s is not None and foreseen_s else None
        found = [factor for factor in self._comm.exchange_objects(slower) if factor is not None]
        if found and abs(max(found) - 1) > _AS_FORESEEN_WITHIN:
            log.info("updates on the host take %.2f times as long in training as foreseen", max(found))
            self._planner.figures.take_host_slower(max(found))

    def _with_program(self, profile: StepProfile, between_s: float | None) -> StepProfile:
        """The same with what the program takes between backward and forward. Only where it has to wait for the device
        there, to learn a norm or whether gradients are finite: elsewhere it is ahead, but not while it is looked at.

        Args:
            between_s: What was seen between them, updates on the device included; None: nothing.
        """
        regime = self._regime()
        is_waiting = regime.needs_global_norm or self._engine.reducer.is_tracking_square_sums
        if between_s is None or not is_waiting or not self._planner.figures.is_measured:
            return profile
        updates_s = self._planner.simulated(self._engine.plan, profile, regime).times.step_s
        return replace(profile, program_s=max(0.0, between_s - updates_s))

    def _expect(self, step: Timeline | None) -> None:
        """Have this step be expected of the plan in force; None: what was expected before."""
        if step is not None:
            self._engine.take_forecast(self._dated(self._planner.expected(self._engine.plan, step)))

    def _dated(self, plan: Plan) -> Plan:
        """A plan that was made now, with what is expected of it: by what it is, and what was expected before."""
        current, num_steps = self._engine.plan, self._handle.num_steps
        if plan.forecast is None or (num_steps and plan.forecast == current.forecast):
            return plan
        # Before the first step a plan is there to build with, or comes from a file, with what others have seen.
        earlier = current.forecast if num_steps and plan.fingerprint() == current.fingerprint() else None
        return replace(plan, forecast=plan.forecast.following(earlier, num_steps))

    def _replanning(self) -> Replanning:
        return Replanning(self._handle.skeleton, self._engine.plan, self._handle.budget, self._regime())

    def _move_to(self, plan: Plan) -> None:
        plan = self._dated(plan)
        if plan.fingerprint() != self._engine.plan.fingerprint():
            self._handle.engine.replan(plan)
        else:
            self._engine.take_forecast(plan)


def _first_lines(plan: Plan) -> str:
    return "\n".join(plan.explain().splitlines()[:_LINES_LOGGED])


def _host_numel(plan: Plan) -> int:
    """Parameters that the host of a rank updates in a step, without padding."""
    chunks = [c for c in plan.chunks if c.requires_grad and c.optim_tier is not Tier.GPU and not c.is_update_streamed]
    return sum(sum(m.numel for m in c.members) // plan.num_sharing(c) for c in chunks)


def _beside(profile: StepProfile, foreign_bytes: int) -> StepProfile:
    """The same step where something else takes so much of the device all the time."""
    return profile.with_bytes(lambda nbytes: nbytes + foreign_bytes) if foreign_bytes else profile


def _with_peak(profile: StepProfile, least_bytes: int) -> StepProfile:
    """A step of the same course that takes no less than this at its highest moment."""
    peak = profile.peak_non_model_bytes
    if not 0 < peak < least_bytes:
        return profile
    return profile.with_bytes(lambda nbytes: round(nbytes * least_bytes / peak))
