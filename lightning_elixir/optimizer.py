"""`ElixirOptimizer`: the user's optimizer, run over this rank's shards."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lightning_elixir.core.host_memory import Extent
from lightning_elixir.core.labels import label
from lightning_elixir.core.threads import default_num_update_threads
from lightning_elixir.errors import PlanError
from lightning_elixir.optim.elementwise import inner_maker
from lightning_elixir.optim.execution import UpdateRecord, UpdateRunner, UpdateTimes
from lightning_elixir.optim.own_steps import OwnStep
from lightning_elixir.optim.scaling import LossScaler, LossScaling
from lightning_elixir.plan.regime import StateCount
from lightning_elixir.plan.shard_segments import Segment
from lightning_elixir.plan.types import UpdateTiming
from lightning_elixir.runtime.agreement import Meeting
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.chunk_optimizers import ChunkOptimizers
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.runtime.steps import check_same_optimizer
from lightning_elixir.stepping.checks import check_has_no_place, check_parameters
from lightning_elixir.stepping.gradients import StepGradients
from lightning_elixir.stepping.scheduler import UpdateScheduler, all_or_nothing
from lightning_elixir.stepping.state_dicts import Described, ReadSegment, StateDicts, check_settings
from lightning_elixir.stepping.state_reads import StateReads

if TYPE_CHECKING:
    from lightning_elixir.wrapper import ElixirModule


class ElixirOptimizer(torch.optim.Optimizer):
    """Steps an `ElixirModule` with the user's optimizer, over flat shards.

    `param_groups` is the user's own list, so that learning-rate schedulers may be built on either optimizer.

    Args:
        module: The wrapped model.
        optimizer: An element-wise optimizer (`HybridAdam`, `CPUAdam`, `torch.optim.AdamW`, `Adam`, `SGD`, ...) over the
            parameters of the model; may have been built, and have stepped, before the model was wrapped.
        initial_scale: Loss scale to start with. Scaling is on for fp16 with an fp32 master, as in
            `torch.amp.GradScaler`.
        min_scale: The scale does not fall below.
        max_scale: The scale does not grow above.
        growth_factor: What a growing scale is multiplied by.
        backoff_factor: What it is multiplied by after an overflow.
        growth_interval: Steps without overflow between growths.
        hysteresis: Overflows before the scale backs off.
        init_step: Take the memory of optimizer states and staging now rather than in the first step. Nothing is
            stepped, and no number changes.
        max_norm: Clip the total gradient norm to this in every step; 0: do not.
        num_update_threads: Threads that update what lives on the host; None: as many as torch has, less those that
            launch and copy (see `core.threads`), or the environment's `LIGHTNING_ELIXIR_NUM_THREADS`.

    Raises:
        PlanError: If the optimizer is not element-wise, holds parameters that are not the model's, or cannot stream
            updates as the plan says (`can_stream`).
    """

    def __init__(
        self,
        module: ElixirModule,
        optimizer: torch.optim.Optimizer,
        initial_scale: float = 2.0**16,
        min_scale: float = 0.0,
        max_scale: float = math.inf,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        init_step: bool = False,
        max_norm: float = 0.0,
        num_update_threads: int | None = None,
    ) -> None:
        engine = getattr(module, "engine", None)
        if not isinstance(engine, Engine):
            raise PlanError(
                f"ElixirOptimizer takes the ElixirModule around the model, got {type(module).__name__}: "
                "ElixirOptimizer(ElixirModule(model, plan), optimizer)"
            )
        maker = inner_maker(optimizer)
        self._own_step = OwnStep(optimizer, maker.cls) if OwnStep.is_needed(optimizer, maker.cls) else None
        self._engine: Engine = engine
        check_parameters(self._engine, optimizer.param_groups)
        check_has_no_place(optimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self.optimizer = optimizer
        self.module = module
        self.max_norm = max_norm
        scaling = LossScaling(
            initial_scale=initial_scale,
            min_scale=min_scale,
            max_scale=max_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
        )
        self.scaler = self._scaler_of_model(scaling, enabled=module.needs_loss_scale)
        self.is_step_skipped = False
        self._times: UpdateTimes | None = None
        self._last_record: UpdateRecord | None = None  # of the last step, until its updates are over
        self._states = ChunkOptimizers(self._engine, maker, self.param_groups)
        self._state_dicts = StateDicts(self._engine, self._states)
        self._state_dicts.take_over(optimizer)
        self._state_reads = StateReads(self._engine, self._states, self._state_dicts)
        self._gradients = StepGradients(self._engine, self._states, self.scaler)
        if num_update_threads is None:
            num_update_threads = default_num_update_threads()
        self._runner = UpdateRunner(self._engine.device, num_update_threads)
        self._updates = UpdateScheduler(self._engine, self._states, self._gradients, self._runner)
        self._engine.reducer.track_square_sums(self.scaler.enabled or max_norm > 0)
        self._engine.reducer.watch(self._updates)
        self._engine.steps.attach(self._updates)
        self._engine.on_held_bytes(self._states.state_bytes)
        self._engine.on_held_bytes(self._runner.held_bytes)
        if init_step:
            self._updates.allocate()
        if maker.has_modes:
            _route_modes(optimizer, weakref.ref(self))

    @property  # type: ignore[override]
    def state(self) -> StateReads:
        """The states of each parameter, as in plain PyTorch, but copies. Raises `StateError` where it is assigned to,
        or written to: what is written would be lost."""
        return self._state_reads

    @state.setter
    def state(self, value: object) -> None:
        if "_state_reads" in self.__dict__:  # not yet where torch's constructor makes a dict
            self._state_reads.refuse()

    def _scaler_of_model(self, scaling: LossScaling, *, enabled: bool) -> LossScaler:
        """One for all optimizers over the model, since a backward has one loss scale.

        Raises:
            PlanError: Another optimizer over other parameters of the model was made with other options of the scale.
        """
        mine = {id(p) for group in self.param_groups for p in group["params"]}
        for known in self._engine.steps.optimizers if enabled else ():
            if mine.isdisjoint(id(p) for group in known.states.groups for p in group["params"]):
                if known.gradients.scaler.options != scaling:
                    raise PlanError(
                        "the optimizers over one model share its loss scale: give all of them the same options of it"
                        f" (this one has {scaling}, an earlier one {known.gradients.scaler.options})"
                    )
                return known.gradients.scaler
        return LossScaler(scaling, enabled=enabled)

    @contextmanager
    def _meeting(self, meeting: Meeting, payload: Sequence[int] = ()) -> Iterator[list[list[int]]]:
        """As `Engine.meeting`, for one optimizer: the ranks must all mean the same one."""
        with self._engine.meeting(meeting, [self._states.number, *payload]) as rows:
            check_same_optimizer(meeting, rows)
            yield [row[1:] for row in rows]

    def to_come(self, most_bytes: int | None = None) -> list[Extent]:
        """What `reserve` takes in host memory under the plan in force. Threads make it where the engine's `HostMemory`
        is told to expect it; what another plan does not need is given back in `reserve`, or else in the first step.

        Args:
            most_bytes: No more of it, for another plan may come: states first, not locked. None: all.
        """
        return self._updates.to_come(most_bytes)

    def load_kernels(self, *, has_norm: bool = False) -> None:
        """Have threads load the compiled code that the first step will run, and return at once. Not while processes may
        be forked, such as those of a data loader.

        Args:
            has_norm: Steps take the norm of their gradients, or look whether these are finite.
        """
        self._updates.load_kernels(has_norm=has_norm)

    def reserve(self, *, leaves_spares: bool = False) -> None:
        """Take the memory that steps keep now, rather than in the first step: of Adam's states wherever they are in
        memory, and of gradients in host memory. Nothing is stepped, and no number changes. Collective.

        Args:
            leaves_spares: Spare states, which no first backward uses, are not taken yet, but threads make their memory
                from now on. Another call must follow.

        Raises:
            CapacityError: A host runs short of memory, or a device has no room for the states.
        """
        self._updates.reserve(leaves_spares=leaves_spares)

    # What it can do

    @property
    def can_stream(self) -> bool:
        """Whether the plan may stream updates to the device: only where the bits of the result do not depend on where
        they run, that is `HybridAdam` and `CPUAdam`."""
        return self._states.is_adam

    @property
    def state_count(self) -> StateCount:
        """States for each element of a parameter (Adam 2), rounded up; 2 before there are any."""
        return self._states.state_count

    def parameter_names(self) -> list[str]:
        """FQNs of its parameters, as plans have them."""
        return self._states.parameter_names()

    @property
    def is_waiting_for_norms(self) -> bool:
        """Whether updates that the plan has begin inside backward wait for the step now, since too many had to run
        again. Of this rank: others may differ."""
        return self._updates.is_paused

    @property
    def begins_with_users_code(self) -> bool:
        """Whether hooks run before a step and its closure, or the user's optimizer has a step of its own around that of
        its class."""
        return bool(
            self._own_step is not None
            or self._optimizer_step_pre_hooks
            or self.optimizer._optimizer_step_pre_hooks
            or _global_optimizer_pre_hooks
        )

    def check_kept(self) -> None:
        """Raises `StateError` if an optimizer that was made later has taken the place of any states (on NVMe)."""
        self._states.check_kept()

    # Parameter groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model that the optimizer did not have."""
        if "optimizer" in self.__dict__:
            self.optimizer.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    def _follow_groups(self) -> None:
        """Groups have been added, here or to the user's own optimizer: their parameters count from now on."""
        if self._states.has_groups(self.param_groups):
            return
        engine = self._engine
        check_parameters(engine, self.param_groups)
        engine.synchronize()
        self._updates.prepare_move(self.param_groups)
        engine.steps.hand_over_states()
        self._states.check_kept()
        self._states.follow_all()
        self._updates.finish_move()

    def _used(self) -> dict[int, set[int]]:
        """Members of this optimizer, by chunk id, that got a gradient on any rank. Collective."""
        self._follow_groups()
        return self._engine.steps.used(self._states.members)

    # Modes

    @property
    def has_modes(self) -> bool:
        """Whether the user's optimizer has `train()` and `eval()`, as schedule-free ones have."""
        return self._states.maker.has_modes

    def train(self) -> None:
        """Have the parameters be those to train with, as `train()` of the user's optimizer does. Collective."""
        self._set_mode("train")

    def eval(self) -> None:
        """Have the parameters be those to evaluate, as `eval()` of the user's optimizer does. Collective."""
        self._set_mode("eval")

    def _set_mode(self, mode: str) -> None:
        if not self.has_modes:
            raise AttributeError(f"{type(self.optimizer).__name__} has no {mode}()")
        steps = self._engine.steps
        with self._meeting(Meeting.OPTIMIZER_MODE, steps.aliased_ids) as rows, torch.no_grad():
            self._follow_groups()
            changed = self._updates.set_mode(mode)
            with all_or_nothing(self._engine):
                steps.renew(changed, {i for row in rows for i in row})

    # Backward

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward; 1 without loss scaling."""
        return self.scaler.scale

    @property
    def gradient_scale(self) -> float:
        """What the gradients in the shards are multiplied by now; 1 once they have been unscaled there."""
        return 1.0 / self._gradients.change.inverse_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to run backward on."""
        return loss * self.scaler.scale if self.scaler.enabled else loss

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward from `loss` (scaled for fp16) and reduce the gradients. Collective.

        Args:
            loss: 0-dim.
            kwargs: For `torch.Tensor.backward`, such as `retain_graph`.
        """
        with self._engine.backwards.span():
            self.scale_loss(loss).backward(**kwargs)

    @property
    def num_ahead(self) -> int:
        """Chunks whose update has begun, into spare states, and waits for the step."""
        return self._updates.num_ahead

    def unobserved(self, is_unobserved: bool = True) -> AbstractContextManager[None]:
        """Inside, backward comes and then `step`, and nothing in between looks at gradients or parameters, changes a
        learning rate, or leaves the step out. Where the plan says so and nothing global is needed, updates then begin
        inside backward; Ctrl-C and the like then wait for the end of the step.

        Args:
            is_unobserved: False: none of this is promised.

        Raises:
            StateError: No step came, though updates had begun. As after any exception in between, the engine is of no
                use then.
        """
        return self._updates.step_promised() if is_unobserved and self._can_begin_early() else nullcontext()

    def _can_begin_early(self) -> bool:
        """Whether nothing that is known before backward speaks against updates that cannot be taken back."""
        plan = self._engine.plan
        if not self._states.is_adam or plan.update_timing is not UpdateTiming.INSIDE_BACKWARD or plan.has_spare_states:
            return False  # with spare states no promise is needed
        needs_all_gradients = bool(
            self.scaler.enabled
            or self.max_norm > 0
            or self._gradients.change.clips
            or self._engine.reducer.is_tracking_square_sums  # a norm was asked for, and may be again
        )
        return not (needs_all_gradients or self.begins_with_users_code) and self._states.has_groups(self.param_groups)

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this optimizer's parameters (all, where there is no other optimizer). The same call on
        every rank.

        Args:
            set_to_none: False: what has a gradient, or had one at the last step (which drops them), has one of zeros
                then, so that the next step updates it, as in plain PyTorch.
        """
        if type(self.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            self.optimizer.zero_grad(set_to_none)  # the user's class may do more
        with self._engine.turn.call("zero_grad()"):
            self._engine.steps.drop_gradients(self._states.members, to_zero=not set_to_none)
            self._gradients.forget()

    def show_unscaled(self) -> None:
        """Have `.grad` be without the loss scale from now on, until the step, as after `GradScaler.unscale_`."""
        with self._engine.turn.call("show_unscaled()"):
            self._gradients.show_unscaled()

    def find_overflows(self, is_wanted: bool = True) -> None:
        """Have the coming step be skipped if a gradient holds inf or nan now, whatever is done to it until then, as
        after `GradScaler.unscale_`. Collective with loss scaling; without it, nothing.

        Args:
            is_wanted: False: nothing is done to gradients on this rank. If so on all of them, the step itself finds it.
        """
        if not self.scaler.enabled:
            return
        engine = self._engine
        if engine.comm.world_size > 1:
            with engine.turn.long_call(Meeting.OVERFLOWS.call.words):
                engine.phases.check_open()
                rows = engine.active.agreement.meet(Meeting.OVERFLOWS, (int(is_wanted),))
            is_wanted = any(row[0] for row in rows)
        if is_wanted:
            with engine.meeting(Meeting.OVERFLOWS):
                self._gradients.find_overflows(self._used())

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the total norm in the coming step, as `torch.nn.utils.clip_grad_norm_` does. Collective.

        Returns:
            0-dim, fp32 (fp64 where the model computes in that): the norm of all gradients before clipping, unscaled.

        Raises:
            PlanError: For other norms than 2 and inf.
        """
        with self._meeting(Meeting.CLIP_GRAD_NORM):
            self._engine.reducer.track_square_sums()
            return self._gradients.clip(max_norm, self._used(), norm_type)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every gradient to [-clip_value, clip_value] in the coming step."""
        with self._engine.turn.call("clip_grad_value_()"):
            self._gradients.clamp(clip_value)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Total norm of the gradients as they are now (unscaled, clipped if clipping was asked for), or, after a step,
        of those that it found before clipping them. Collective. 0-dim, of the dtype of `clip_grad_norm_`.

        A step that does not clip computes a norm only after the first call of this: nan after one that did not.
        """
        with self._meeting(Meeting.GRAD_NORM):
            self._engine.reducer.track_square_sums()
            return self._gradients.total_norm(self._used(), norm_type)

    # Step

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the parameters and drop the gradients. Collective.

        With loss scaling, a step whose gradients hold inf or nan changes nothing but the scale (`is_step_skipped`).
        Hooks of the user's optimizer run, and so does a `step` of the user's own class: [Note: own steps],
        `optim/own_steps.py`.

        Args:
            closure: Computes the loss and calls `backward`; run first.
            kwargs: For a `step` of the user's own class.

        Returns:
            What the closure, or such a `step`, returned.
        """
        inner = self.optimizer
        args: tuple[Any, ...] = () if closure is None else (closure,)
        for before in list(inner._optimizer_step_pre_hooks.values()):
            changed = before(inner, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        if self._own_step is not None:
            result = self._own_step.run(self._run_step, *args, **kwargs)
        else:
            result = self._run_step(*args, **kwargs)
        for after in list(inner._optimizer_step_post_hooks.values()):
            after(inner, args, kwargs)
        # The `step` that torch has wrapped never runs; a learning-rate scheduler built on it would warn about that.
        inner._opt_called = True  # type: ignore[attr-defined]
        return result

    def _run_step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        engine = self._engine
        # A step is done, or is not: half of it cannot be saved.
        with label("step"), engine.telling(), engine.turn.phase("a step"):
            self._step()
        return result

    def _step(self) -> None:
        engine = self._engine
        self._states.check_kept()
        with all_or_nothing(engine):
            engine.store.check_states()
        engine.steps.begin(self._states.number)
        used = self._used()
        self.is_step_skipped = not self._gradients.prepare_step(used, self.max_norm)
        if self.is_step_skipped:
            self._times = self._last_record = None  # what has begun goes with its gradients
        else:
            record = self._updates.run(used)
            self._times, self._last_record = self.last_step_times, record  # the earlier ones may be asked for yet
        before = self.scaler.scale
        self.scaler.update(self.is_step_skipped)
        with all_or_nothing(engine):
            engine.steps.end({} if self.is_step_skipped else used, used, self._states.members)
        is_as_assumed = not self.is_step_skipped and self._gradients.is_plain
        self._gradients.forget()
        if self.scaler.scale != before:
            engine.steps.follow_loss_scale(before, but=self._gradients)
        engine.steps.note_end(is_redone=self._updates.end_step(is_as_assumed=is_as_assumed))

    @property
    def last_step_times(self) -> UpdateTimes | None:
        """Of the last step all of whose updates are over; None before there was one, and after a step that was skipped.
        Waits for nothing."""
        if self._last_record is not None:
            times = self._last_record.times()
            if times is not None:
                self._times, self._last_record = times, None
        return self._times

    def synchronize(self) -> None:
        """Make the host wait until all updates are over and every shard holds its new values.

        Raises:
            StateError: An update has failed.
        """
        with self._engine.turn.long_call("synchronize()"):
            self._engine.synchronize()

    def rest(self) -> None:
        """End all threads of this optimizer and of its engine when what they do is done, for as long as nothing is
        trained. Raises nothing: what has failed is raised by the next call that needs it."""
        self._runner.rest()
        self._engine.rest()

    # States

    def state_dict(self) -> dict[str, Any]:
        """The state as torch's optimizers give it, with whole tensors on the CPU. Collective.

        Hooks of the user's optimizer run, those that get the state where there is one.

        Returns:
            `state`, `param_groups` and, with loss scaling, `loss_scaler`, on rank 0; `{}` on other ranks.
        """
        inner = self.optimizer
        for before in list(inner._optimizer_state_dict_pre_hooks.values()):
            before(inner)
        state = self._whole_state()
        for after in list(inner._optimizer_state_dict_post_hooks.values()) if state else ():
            changed = after(inner, state)
            state = state if changed is None else changed
        if state and self.scaler.enabled:
            state["loss_scaler"] = self.scaler.state_dict()
        return state

    def _whole_state(self) -> dict[str, Any]:
        """See `state_dict`; without hooks and loss scale."""
        self._states.check_kept()
        with self._meeting(Meeting.OPTIMIZER_STATE_DICT):
            self._follow_groups()
            return self._state_dicts.whole()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of `state_dict()` or of the same torch optimizer over the plain model; the same on every rank.

        Hooks of the user's optimizer run.

        Raises:
            PlanError: If its groups, settings or shapes are not those of this optimizer.
        """
        inner, state_dict = self.optimizer, dict(state_dict)
        for before in list(inner._optimizer_load_state_dict_pre_hooks.values()):
            changed = before(inner, state_dict)
            state_dict = state_dict if changed is None else changed
        with self._meeting(Meeting.LOAD_OPTIMIZER_STATE_DICT):
            self._follow_groups()
            self._state_dicts.load_whole(state_dict, self.optimizer)
            if self.scaler.enabled and state_dict.get("loss_scaler"):
                self.scaler.load_state_dict(state_dict["loss_scaler"])
        for after in list(inner._optimizer_load_state_dict_post_hooks.values()):
            after(inner)

    def __reduce__(self) -> Any:
        """A copy, also a pickled one, is the user's own optimizer over copies of the parameters, with whole states.
        Collective."""
        with self._engine.meeting(Meeting.STATE):
            state = self._whole_state()
            return _plain_optimizer, (self.optimizer, self._engine.comm.exchange_objects(state)[0])

    def described_states(self) -> Described:
        """(chunk id, member index) -> key -> ("tensor", dtype) or ("value", value), over all ranks. Collective."""
        self._follow_groups()
        return self._state_dicts.described()

    def state_runs(self, chunk: Chunk, key: str, dtype: torch.dtype) -> dict[int, Tensor]:
        """One element-wise state of this rank's segments of a chunk, 1-D, by member index: where it lies, unless that
        is a disk. Zeros where there is none."""
        return self._state_dicts.runs(chunk, key, dtype)

    def check_settings(self, saved_groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises `PlanError` if saved groups cannot be those of such an optimizer."""
        check_settings(self.optimizer, saved_groups)

    def load_segments(self, read: ReadSegment, saved: Collection[str]) -> None:
        """Replace all states, one segment after the other, between steps.

        Args:
            read: The state of a segment, as torch's optimizers have it, but element-wise ones 1-D, `[segment.numel]`;
                empty: none.
            saved: Names of the parameters of which there are any.
        """
        self._follow_groups()
        self._state_dicts.load(read, saved)

    @property
    def is_whole(self) -> bool:
        """Whether parameters are updated as a whole, each by one rank, which has all its states."""
        return self._states.maker.is_whole

    @property
    def whole_update_bytes(self) -> int:
        """Device memory that a step takes for that; 0 where parameters are updated in slices."""
        return self._states.whole_update_bytes

    def state_segments(self, chunk: Chunk, rank: int) -> tuple[Segment, ...]:
        """Of which parameters of a chunk, and of what of them, a rank has states."""
        return self._states.state_segments(chunk, rank)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of optimizer states on this rank, by tier; spare ones apart."""
        return self._states.state_bytes()


def _route_modes(optimizer: torch.optim.Optimizer, outer: weakref.ref[ElixirOptimizer]) -> None:
    """Have `train()` and `eval()` of the user's own object do what those of the `ElixirOptimizer` do, while that is
    there: the class's would find no states, and change nothing without a word."""
    for name in ("train", "eval"):

        def call(name: str = name) -> Any:
            elixir = outer()
            return getattr(type(optimizer), name)(optimizer) if elixir is None else getattr(elixir, name)()

        setattr(optimizer, name, call)


def _plain_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> torch.optim.Optimizer:
    """What a copied or pickled `ElixirOptimizer` is restored by."""
    optimizer.load_state_dict(state)
    return optimizer
