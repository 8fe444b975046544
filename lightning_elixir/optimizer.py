"""`ElixirOptimizer`: the user's optimizer, run over this rank's shards."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lightning_elixir.core.device import Event
from lightning_elixir.core.labels import label
from lightning_elixir.core.signals import deferred
from lightning_elixir.core.worker import Task, TaskEvent
from lightning_elixir.errors import CapacityError, PlanError, StateError
from lightning_elixir.optim.execution import ChunkUpdate, UpdateRecord, UpdateRunner, UpdateTimes
from lightning_elixir.optim.hybrid_adam import HybridAdam
from lightning_elixir.optim.own_steps import OwnStep
from lightning_elixir.optim.scaling import LossScaler, absolute_max, clip_coefficient, square_sums
from lightning_elixir.optim.segments import elementwise_class
from lightning_elixir.optim.speculation import Begun, Speculation
from lightning_elixir.optim.state_layout import is_scalar_state
from lightning_elixir.optim.updates import FlatUpdate
from lightning_elixir.plan.memory import is_on_nvme
from lightning_elixir.plan.shard_segments import Segment
from lightning_elixir.plan.types import Plan, Tier, UpdateTiming
from lightning_elixir.runtime.agreement import Meeting
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.chunk_optimizers import ChunkOptimizers
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.runtime.replan import AttachedOptimizer
from lightning_elixir.runtime.whole import gather_whole, in_memory_order

if TYPE_CHECKING:
    from lightning_elixir.wrapper import ElixirModule

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class _Change(TypedDict):
    grad_factor: float
    change_grad: Callable[[Tensor], None] | None


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
        num_update_threads: Threads that update what lives on the host; None: as many as torch has, or the
            environment's `LIGHTNING_ELIXIR_NUM_THREADS`.

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
        self._cls = elementwise_class(optimizer)
        self._own_step = OwnStep(optimizer, self._cls) if OwnStep.is_needed(optimizer, self._cls) else None
        self._engine: Engine = module.engine
        check_parameters(self._engine, optimizer)
        check_has_no_place(optimizer)
        self._check_sites(module.engine.plan)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self.optimizer = optimizer
        self.module = module
        self.max_norm = max_norm
        self.scaler = LossScaler(
            initial_scale=initial_scale,
            min_scale=min_scale,
            max_scale=max_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            enabled=module.needs_loss_scale,
        )
        self.is_step_skipped = False
        self._transforms: list[tuple[str, float]] = []
        self._shows_unscaled = False  # whether `.grad` is without the loss scale, as after `unscale_`
        self._is_unscaled = False  # whether the gradients themselves are
        self._last_norm: float | None = None
        self._wanted_norm_type: float | None = None  # somebody asks for norms
        self._scratches: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._runner = UpdateRunner(self._engine.device, num_update_threads)
        self._early: dict[int, Task] = {}  # chunk id -> its update, begun inside backward
        self._record: UpdateRecord | None = None  # of the updates begun there
        self._speculation = Speculation()  # updates begun there that can be taken back
        self._last_record: UpdateRecord | None = None  # of the last step, until its updates are over
        self._times: UpdateTimes | None = None
        self._shape = self._group_sizes()
        self._states = ChunkOptimizers(self._engine, self._cls, self.param_groups)
        self._take_over_state(optimizer)
        self._engine.reducer.is_tracking_square_sums = self.scaler.enabled or max_norm > 0
        self._watch_gradients()
        self._engine.steps.attach(
            AttachedOptimizer(
                self._states,
                check=self._check_sites,
                before=self._prepare_move,
                after=self._finish_move,
                change_of_gradient=self._change_of_gradient,
                apply_gradient_changes=self._apply_gradient_changes,
                finish_gradient_changes=self._finish_gradient_changes,
                forget_gradient_changes=self._forget_changes,
            )
        )
        self._engine.on_held_bytes(self.state_bytes)
        self._engine.on_held_bytes(self._runner.held_bytes)
        if init_step:
            self._allocate_states()

    # Building

    def _group_sizes(self) -> tuple[int, ...]:
        return tuple(len(g["params"]) for g in self.param_groups)

    @property
    def can_stream(self) -> bool:
        """Whether the plan may stream updates to the device: only where the bits of the result do not depend on where
        they run, that is `HybridAdam` and `CPUAdam`."""
        return self._cls is HybridAdam

    @property
    def num_states(self) -> int:
        """States for each element of a parameter (Adam 2), rounded up; 2 before there are any."""
        inners = [inner for inner in self._states.inner.values() if inner.state_bytes()]
        if not inners:
            return 2
        # Step counts and the like are too small to count as a state.
        return math.ceil(sum(i.state_bytes() for i in inners) / max(1, sum(i.work.nbytes for i in inners)) - 0.1)

    @property
    def can_offload_to_nvme(self) -> bool:
        """Whether the plan may have states on NVMe: only where updates are described before they run, which is so for
        the same optimizers."""
        return self.can_stream

    def _check_sites(self, plan: Plan) -> None:
        on_nvme = [c for c in plan.chunks if is_on_nvme(c)]
        if on_nvme and not self.can_offload_to_nvme:
            raise PlanError(
                f"the plan has the optimizer states of {len(on_nvme)} chunks on NVMe (nvme_offload_fraction, "
                f"nvme_offload_dir), which {self._cls.__name__} cannot update there: use HybridAdam (with "
                "adamw_mode=False for Adam), or leave these options out"
            )
        if any(c.is_update_streamed for c in on_nvme):
            raise PlanError("the plan streams updates of states on NVMe to the device: those are the host's to update")
        if self.can_stream:
            return
        streamed = [c for c in plan.chunks if c.requires_grad and c.is_update_streamed]
        if streamed:
            raise PlanError(
                f"the plan streams the updates of {len(streamed)} chunks to the device, which {self._cls.__name__} "
                "cannot: its results on CPU and GPU differ. Use HybridAdam, or make the plan with can_stream=False"
            )

    def _prepare_move(self) -> None:
        """States are going to move, or to be in other groups."""
        self._speculation.withdraw()
        self._runner.release_stream()
        self._states.group_by(self.param_groups)

    def _finish_move(self) -> None:
        """They have."""
        self._shape = self._group_sizes()
        self._watch_gradients()

    def _allocate_states(self) -> None:
        """Adam's states are known, and zeros change nothing. For those of others memory is reserved: they are made by a
        first step, which may be special."""
        if self.can_stream:
            for chunk_id, inner in self._states.inner.items():
                self._reserve_states(self._engine.chunks[chunk_id])
                inner.start_states({p.member_index for p in inner.places})
            if any(self._engine.chunks[i].spec.is_update_streamed for i in self._states.inner):
                self._runner.reserve_stream()  # better said now than in the first step
                self._runner.release_stream()
            return
        for chunk_id, inner in self._states.inner.items():
            inner.reserve_states()
            if self._engine.chunks[chunk_id].dtype != inner.work.dtype:
                self._scratch(inner.work, inner.work.dtype)  # gradients are cast there

    def _reserve_states(self, chunk: Chunk) -> None:
        """Adam's moments, and the spares of a chunk that shall have them."""
        self._states.inner[chunk.id].allocate_moments()
        if self._engine.store.reserve_spares(chunk.spec, chunk.dtype):
            self._states.inner[chunk.id].allocate_spares()

    def _take_over_state(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer may have stepped before the model was wrapped."""
        if optimizer.state:
            saved = {
                id(p): optimizer.state[p]
                for group in self.param_groups
                for p in group["params"]
                if p in optimizer.state
            }
            self.load_segments(self._from_whole(saved))
            optimizer.state.clear()

    def _follow_groups(self) -> None:
        """Groups have been added, here or to the user's own optimizer: their parameters count from now on."""
        if self._group_sizes() == self._shape:
            return
        engine = self._engine
        check_parameters(engine, self)
        engine.synchronize()
        self._prepare_move()
        engine.steps.hand_over_states()
        self._states.check_kept()
        self._states.follow_all()
        self._finish_move()

    def _used(self) -> dict[int, set[int]]:
        """Members of this optimizer, by chunk id, that got a gradient on any rank. Collective."""
        self._follow_groups()
        return self._engine.steps.used(self._states.members)

    # Training

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward; 1 without loss scaling."""
        return self.scaler.scale

    @property
    def gradient_scale(self) -> float:
        """What the gradients in the shards are multiplied by now; 1 once they have been unscaled there."""
        return 1.0 / self._inverse_scale

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
    def has_own_step(self) -> bool:
        """Whether the user's optimizer does something around the step of the class that it is made of."""
        return self._own_step is not None

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
        with label("step"), engine.telling(), engine.turn.phase("a step"), deferred():
            self._step()
        return result

    def _step(self) -> None:
        engine = self._engine
        self._states.check_kept()
        with self._all_or_nothing():
            engine.store.check_states()
        engine.steps.begin()
        used = self._used()
        if self.max_norm > 0:
            self._clip(self.max_norm, used)
        elif self._wanted_norm_type is not None and not self._transforms:
            self._last_norm = self._norm(used, self._wanted_norm_type)
        self.is_step_skipped = self.scaler.enabled and not self._is_finite(used)
        if self.is_step_skipped:
            self._times = self._last_record = None  # what has begun goes with its gradients
        else:
            self._update(used)
        is_plain = not self.is_step_skipped and all(change == ("factor", 1.0) for change in self._transforms)
        self.scaler.update(self.is_step_skipped)
        with self._all_or_nothing():
            engine.steps.end({} if self.is_step_skipped else used, used, self._states.members)
        self._forget_changes()
        engine.redone_steps += self._speculation.end_step(is_as_assumed=is_plain)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this optimizer's parameters (all, where there is no other optimizer). The same call on
        every rank.

        Args:
            set_to_none: False: what has a gradient, or had one at the last step (which drops them), has one of zeros
                then, so that the next step updates it, as in plain PyTorch.
        """
        if type(self.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            self.optimizer.zero_grad(set_to_none)  # the user's class may do more
        self._engine.steps.drop_gradients(self._states.members, to_zero=not set_to_none)
        self._forget_changes()

    @torch.no_grad()
    def _update(self, used: Mapping[int, set[int]]) -> None:
        """Update what is used, or have that begun, as the plan's timing says."""
        engine = self._engine
        engine.reducer.make_zeros(used)
        chunks = [engine.chunks[i] for i in sorted(used) if engine.store[i].grad is not None]
        if not self.can_stream:
            with self._all_or_nothing():
                self._times = self._update_by_torch(chunks, used)
            return
        # What may fail for want of memory comes before the first step is counted.
        if any(c.spec.optim_tier is Tier.GPU and not self._states.inner[c.id].has_states for c in chunks):
            engine.give_back()  # or moments, which last, would come to lie in the gaps that activations have left
        for chunk in chunks:
            self._reserve_states(chunk)
        if any(c.spec.is_update_streamed for c in chunks):
            self._runner.reserve_stream()
        early, self._early = self._early, {}
        record, self._record = self._record or UpdateRecord(), None
        record.start()
        ahead = self._confirmed(chunks, used)
        with self._all_or_nothing():
            near = [c for c in chunks if c.spec.optim_tier is Tier.GPU]
            others = [c for c in chunks if c.spec.optim_tier is not Tier.GPU]
            needs = engine.steps.first_needs() if others else {}
            others.sort(key=lambda c: _place(c, needs))
            now = engine.device.compute_event()  # all reads of old values come before
            if early.keys() - {c.id for c in others}:
                raise StateError("gradients were dropped whose updates had begun inside backward")
            begun = {**early, **{i: one.task for i, one in ahead.items()}}
            if begun:
                self._runner.reorder({task: _place(engine.chunks[i], needs) for i, task in begun.items()})
            for chunk in others:
                order = _place(chunk, needs)
                if chunk.id in ahead:
                    self._commit(chunk, now, record, order)
                elif chunk.id in early:
                    self._take_over(chunk, early[chunk.id], now, record, order)
                else:
                    self._begin_update(chunk, used[chunk.id], now, record, order)
            updates = [u for c in near for u in self._adam_updates(c, used[c.id], self._write_back_target(c))]
            has_gone_down = self._runner.run_on_device(updates, record)
            if self._timing is UpdateTiming.AFTER_BACKWARD:
                record.wait()
                self._runner.release_stream()
                if has_gone_down:
                    engine.device.compute_event().synchronize()
                record.note_end()
        self._times, self._last_record = self.last_step_times, record  # somebody may ask for the earlier ones yet

    @property
    def _timing(self) -> UpdateTiming:
        return self._engine.plan.update_timing

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
        self._engine.synchronize()

    def rest(self) -> None:
        """End all threads of this optimizer and of its engine when what they do is done, for as long as nobody trains.
        Raises nothing: what has failed is told to whoever needs it."""
        self._runner.rest()
        self._engine.rest()

    # Updates of what is in host memory

    def _begin_update(self, chunk: Chunk, members: set[int], now: Event, record: UpdateRecord, order: float) -> None:
        """Have a chunk updated, now that its step has come.

        Args:
            now: All that the compute stream has read of the chunk comes before.
        """
        shard = self._engine.store.settle(chunk.id)
        target, grad = self._write_back_target(chunk), shard.grad
        landed = self._engine.reducer.take_download(chunk.id)
        ready = [e for e in (landed, chunk.ready) if e is not None]
        is_near = self._is_param_near(chunk)
        is_streamed = chunk.spec.is_update_streamed
        uploads: list[tuple[Tensor, Tensor]] = []
        cast: tuple[Tensor, Tensor] | None = None
        if grad is not None and self._fits_over_grad(chunk, target, grad, members) and not (is_near and is_streamed):
            updates, uploads = self._adam_updates(chunk, members, grad), self._ways_up(chunk, members)
            self._exchange(chunk)
        elif shard.is_param_overwritten and shard.param is not None and shard.master is not None:
            # Gradients lie where parameters were that get no update: those come from the master again.
            updates, cast = self._adam_updates(chunk, members, None), (shard.master, shard.param)
            shard.is_param_overwritten = False
            ready.append(now)  # backward may still read the parameters that are written
        else:
            updates = self._adam_updates(chunk, members, target, is_compute_on_device=is_near)
            if not is_near and not shard.is_param_on_disk:
                ready.append(now)  # likewise
        on_disk = self._states.inner[chunk.id].take_on_disk(members)
        if on_disk is not None and grad is not None and shard.is_param_on_disk:
            is_whole = sum(update.used_numel for update in updates) == on_disk.states.spec.numel
            on_disk = dataclasses.replace(on_disk, grad_dtype=grad.dtype, is_whole=is_whole)
        job = ChunkUpdate(updates, is_streamed, tuple(ready), now, uploads, cast, on_disk)
        self._announce(chunk, self._runner.submit(job, record, order=order))

    def _begin_early(self, chunk: Chunk) -> None:
        """Have a chunk updated while backward runs, if that is possible: all its gradients are on their way to host
        memory. The values that backward reads stay as they are until the step."""
        inner, shard = self._states.inner.get(chunk.id), self._engine.store[chunk.id]
        members, grad, target = self._states.members.get(chunk.id, set()), shard.grad, self._write_back_target(chunk)
        if inner is None or grad is None or not inner.has_states or shard.is_param_overwritten:
            return
        if chunk.id in self._engine.writes.touched or self._engine.gradients.is_shown(chunk.id):
            return
        if not self._fits_over_grad(chunk, target, grad, members):
            return
        if self._record is None:
            self._record = UpdateRecord()
        is_streamed = chunk.spec.is_update_streamed
        if is_streamed:
            try:
                self._runner.reserve_stream()
            except CapacityError:
                return  # the step says so
        download = self._engine.reducer.take_download(chunk.id)
        with torch.no_grad(), self._all_or_nothing():
            updates = self._adam_updates(chunk, members, grad)
            ready = () if download is None else (download,)
            job = ChunkUpdate(updates, is_streamed, ready, on_disk=inner.take_on_disk(members))
            self._engine.reducer.note_begun(chunk)
            self._early[chunk.id] = self._runner.submit(job, self._record, order=len(self._early))

    def _take_over(self, chunk: Chunk, task: Task, now: Event, record: UpdateRecord, order: float) -> None:
        """The step of an update that has begun in backward: its values take effect."""
        uploads = self._ways_up(chunk, self._states.members[chunk.id])
        if uploads:
            job = ChunkUpdate((), chunk.spec.is_update_streamed, (), now, uploads)
            task = self._runner.submit(job, record, order=order, after=task)
        else:
            self._exchange(chunk)
        self._announce(chunk, task)

    # Updates that can be taken back: [Note: exact speculation], `optim/speculation.py`

    @property
    def num_ahead(self) -> int:
        """Chunks whose update has begun, into spare states, and waits for the step."""
        return len(self._speculation)

    def _watch_gradients(self) -> None:
        """Have updates begin as gradients land, where the plan gives them other memory to write to."""
        reducer = self._engine.reducer
        reducer.withdraw()  # what an earlier optimizer has begun
        is_ahead = self._engine.plan.has_spare_states and self.can_stream
        reducer.on_landed = _weakly(self._begin_ahead) if is_ahead else None
        reducer.before_change = _weakly(self._withdraw) if is_ahead else None

    def _begin_ahead(self, chunk: Chunk) -> None:
        """Have a chunk updated while backward runs, if that is possible, as if the step had come and all gradients were
        to stay as they are. Everything that anybody can look at stays as it is."""
        inner, members = self._states.inner.get(chunk.id), self._states.members.get(chunk.id, set())
        if inner is None or not self._speculation.is_allowed or self._engine.store[chunk.id].spare_master is None:
            return
        is_whole = all(s.member_index in members for s in self._states.segments[chunk.id] if s.numel)
        if not is_whole or not inner.has_spares or not inner.has_states_of(members):
            return  # what is not updated would have to be copied
        if chunk.spec.is_update_streamed:
            try:
                self._runner.reserve_stream()
            except CapacityError:
                return  # the step says so
        download, record = self._engine.reducer.download_of(chunk.id), UpdateRecord()
        with torch.no_grad():
            updates = self._updates_ahead(chunk, members)
        job = ChunkUpdate(updates, chunk.spec.is_update_streamed, () if download is None else (download,))
        with deferred():  # one that runs and that nobody knows of could not be dropped
            task = self._runner.submit(job, record, order=len(self._speculation))
            self._speculation.add(chunk.id, Begun(updates, task, record))

    def _updates_ahead(self, chunk: Chunk, members: set[int]) -> list[FlatUpdate]:
        """The chunk's next update into its spares, as it would be now; nothing is counted."""
        shard = self._engine.store[chunk.id]
        if shard.grad is None:
            return []
        return self._states.inner[chunk.id].describe(
            shard.grad,
            members,
            self.param_groups,
            compute=shard.spare_param,
            apart=shard.spare_master,
            **self._change(),
        )

    def _withdraw(self, chunk_ids: Collection[int] | None) -> None:
        self._speculation.withdraw(chunk_ids)

    def _confirmed(self, chunks: Sequence[Chunk], used: Mapping[int, set[int]]) -> dict[int, Begun]:
        """The updates that have begun and are what the step wants, by chunk id; the others are dropped."""
        found: dict[int, Begun] = {}
        for chunk in chunks if self._speculation else ():
            if self._states.inner[chunk.id].has_spares and self._states.inner[chunk.id].has_states_of(used[chunk.id]):
                begun = self._speculation.find(chunk.id, self._updates_ahead(chunk, used[chunk.id]))
                if begun is not None:
                    found[chunk.id] = begun
        self._speculation.withdraw(but=found)
        return found

    def _commit(self, chunk: Chunk, now: Event, record: UpdateRecord, order: float) -> None:
        """The step of an update that has begun in backward: states and spares change roles."""
        begun = self._speculation.take(chunk.id)
        self._engine.reducer.take_download(chunk.id)  # it waits for that itself
        shard = self._engine.store[chunk.id]
        inner, members = self._states.inner[chunk.id], self._states.members[chunk.id]
        new, values = shard.spare_master, shard.spare_param
        if new is None or values is None:
            raise RuntimeError(f"the spare states of {chunk.spec} are gone, though its update has begun there")
        shard.master, shard.spare_master = new, shard.master
        inner.exchange(new)
        inner.count_step(members)
        record.adopt(begun.record)
        task, target, is_streamed = begun.task, self._write_back_target(chunk), chunk.spec.is_update_streamed
        if target is not None and self._is_param_near(chunk):
            uploads = [(values[span], target[span]) for span in inner.spans(members)]
            job = ChunkUpdate((), is_streamed, (), now, uploads)
            task = self._runner.submit(job, record, order=order, after=task)
        elif target is not None and target is not shard.param:  # a slice of what every rank keeps whole
            ready = (now,) if chunk.ready is None else (now, chunk.ready)
            job = ChunkUpdate((), is_streamed, ready, cast=(values, target))
            task = self._runner.submit(job, record, order=order, after=task)
        else:
            shard.param, shard.spare_param = values, shard.param
        self._announce(chunk, task)

    def _ways_up(self, chunk: Chunk, members: set[int]) -> list[tuple[Tensor, Tensor]]:
        """Where new values that lie over the gradients go, if parameters are on the device."""
        grad, target = self._engine.store[chunk.id].grad, self._write_back_target(chunk)
        if grad is None or target is None or not self._is_param_near(chunk):
            return []
        return [(grad[span], target[span]) for span in self._states.inner[chunk.id].spans(members)]

    def _exchange(self, chunk: Chunk) -> None:
        """The new values come to lie over the gradients: where those are beside the parameters, both change roles."""
        shard = self._engine.store[chunk.id]
        if shard.is_param_overwritten:  # they lie where the parameters were already
            shard.is_param_overwritten = False
        elif not self._is_param_near(chunk):
            shard.param, shard.grad_buffer = shard.grad, shard.param

    def _announce(self, chunk: Chunk, task: Task) -> None:
        """Whoever needs the values waits for this."""
        self._engine.store[chunk.id].update = task
        if chunk.spec.is_persistent:
            chunk.ready = TaskEvent(task)

    def _is_param_near(self, chunk: Chunk) -> bool:
        """Whether the parameters are on the compute device, in the replica or in a shard."""
        if chunk.spec.param_tier is Tier.NVME:
            return False
        return self._engine.store[chunk.id].param is None or chunk.spec.param_tier is Tier.GPU

    def _fits_over_grad(self, chunk: Chunk, target: Tensor | None, grad: Tensor, members: set[int]) -> bool:
        """Whether the new values may be written over the gradients: every one of them is a new value then."""
        if target is None or (target.dtype, target.numel()) != (grad.dtype, grad.numel()):
            return False
        shard = self._engine.store[chunk.id]
        if shard.is_param_on_disk:
            return False  # backward may read the parameters again: they are written in the step
        if shard.param is not None and shard.param.numel() != grad.numel():
            return False  # a whole chunk, of which this rank has updated a slice
        if self._is_param_near(chunk):
            return True
        return all(s.member_index in members for s in self._states.segments[chunk.id] if s.numel)

    @contextmanager
    def unobserved(self, is_unobserved: bool = True) -> Iterator[None]:
        """Inside, backward comes and then `step`, and nobody looks at gradients or parameters in between, changes a
        learning rate, or decides not to step. Where the plan says so and nothing global is needed, updates then begin
        inside backward; Ctrl-C and the like then wait for the end of the step.

        Args:
            is_unobserved: False: none of this is promised.

        Raises:
            StateError: No step came, though updates had begun. As after any exception in between, the engine is of no
                use then.
        """
        engine = self._engine
        if not is_unobserved or not self._can_begin_early():
            yield
            return
        with deferred():
            engine.reducer.on_landed, engine.reducer.is_step_next = self._begin_early, True
            try:
                yield
            finally:
                engine.reducer.on_landed, engine.reducer.is_step_next = None, False
                if self._early:
                    self._early, self._record = {}, None
                    engine.give_up(
                        "between the begin of its updates, inside backward, and the step",
                        "or use update_timing='behind_forward', which begins no update before its step",
                        sys.exc_info()[1],
                    )
            engine.phases.check_open()

    def _can_begin_early(self) -> bool:
        """Whether nothing that is known before backward speaks against it."""
        if not self.can_stream or self._timing is not UpdateTiming.INSIDE_BACKWARD:
            return False
        if self._engine.plan.has_spare_states:  # then nobody has to promise anything
            return False
        if self.scaler.enabled or self.max_norm > 0 or self._transforms:
            return False
        has_new_groups = self._group_sizes() != self._shape
        has_hooks = bool(
            self._optimizer_step_pre_hooks
            or self.optimizer._optimizer_step_pre_hooks
            or _global_optimizer_pre_hooks
            or self._own_step is not None
        )
        return not (has_new_groups or has_hooks or self._engine.reducer.is_tracking_square_sums)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Some chunks updated and others not is a state that nobody must train on, or save."""
        try:
            yield
        except BaseException as error:
            self._engine.give_up(f"in the middle of an optimizer step ({type(error).__name__})", error=error)
            raise

    def _adam_updates(
        self, chunk: Chunk, members: set[int], compute: Tensor | None, *, is_compute_on_device: bool | None = None
    ) -> list[FlatUpdate]:
        """One more step of a chunk, with its values to go to `compute` in the compute dtype."""
        shard = self._engine.store[chunk.id]
        if shard.grad is None:
            return []
        if is_compute_on_device is None:
            is_compute_on_device = chunk.spec.optim_tier is Tier.GPU and self._is_param_near(chunk)
        return self._states.inner[chunk.id].adam_updates(
            shard.grad,
            members,
            self.param_groups,
            compute=compute,
            is_compute_on_device=is_compute_on_device,
            **self._change(),
        )

    def _change(self) -> _Change:
        """What the step does to gradients, as far as that is known now."""
        if all(kind == "factor" for kind, _ in self._transforms):
            factors = [value for _, value in self._transforms]
            return {"grad_factor": math.prod(factors, start=self._inverse_scale), "change_grad": None}
        return {"grad_factor": 1.0, "change_grad": self._change_of_grads()}

    def _update_by_torch(self, chunks: Sequence[Chunk], used: Mapping[int, set[int]]) -> UpdateTimes:
        """One of torch's own optimizers, each shard where it is."""
        start_s = time.perf_counter()
        self._engine.reducer.wait_for_downloads()
        self._engine.device.compute_event().synchronize()  # backward may still read host shards
        for chunk in chunks:
            if chunk.ready is not None:  # and so may an upload that nobody needed
                chunk.ready.synchronize()
        adam_s = 0.0
        numel = dict.fromkeys(Tier, 0)
        for chunk in chunks:
            inner, members, tier = self._states.inner[chunk.id], used[chunk.id], chunk.spec.optim_tier
            grad, target = self._engine.store[chunk.id].grad, self._write_back_target(chunk)
            if grad is None:
                continue
            begin_s = time.perf_counter()
            inner.step(self._optimizer_grad(grad, inner.work.dtype), members, self.param_groups)
            adam_s += time.perf_counter() - begin_s if tier is Tier.CPU else 0.0
            numel[tier] += sum(p.numel for p in inner.places if p.member_index in members)
            if target is not None:
                self._runner.write_back(inner.work, target)
        return UpdateTimes(
            update_s=time.perf_counter() - start_s,
            adam_s=adam_s,
            gpu_numel=numel[Tier.GPU],
            streamed_numel=0,
            cpu_numel=numel[Tier.CPU],
        )

    def _optimizer_grad(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient as the optimizer wants it: unscaled, clipped and in its dtype; may be scratch memory."""
        if self._has_transforms() and grad.dtype.itemsize < 4:
            grad = self._scratch(grad, torch.float32).copy_(grad)  # factors apply before rounding
        transformed = self._transformed(grad)
        if transformed.dtype == dtype:
            return transformed
        return self._scratch(transformed, dtype).copy_(transformed)

    def _scratch(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Reused memory on `like`'s device: fresh host memory costs more to touch than the arithmetic on it."""
        key = (like.device, dtype)
        held = self._scratches.get(key)
        if held is None or held.numel() < like.numel():
            held = self._scratches[key] = torch.empty(like.numel(), dtype=dtype, device=like.device)
        return held[: like.numel()]

    def _write_back_target(self, chunk: Chunk) -> Tensor | None:
        """Where the master goes in the compute dtype: this rank's slice of shard or replica. None without a master."""
        engine, shard = self._engine, self._engine.store[chunk.id]
        if not shard.has_master:
            return None
        if shard.on_disk is not None and shard.on_disk.has_param:
            return shard.on_disk.param_stand_in()
        target = chunk.flat if shard.param is None else shard.param
        if target.numel() != engine.store.optim_numel(chunk.spec):
            target = chunk.shard_of(target, engine.comm.rank, engine.comm.world_size)
        return target

    # Gradients

    @property
    def _is_scaled(self) -> bool:
        """Whether the gradients in the shards are multiplied by the loss scale."""
        return self.scaler.enabled and not self._is_unscaled

    @property
    def _inverse_scale(self) -> float:
        return self.scaler.inverse_scale if self._is_scaled else 1.0

    def _has_transforms(self) -> bool:
        return self._is_scaled or bool(self._transforms)

    def _transformed(self, grad: Tensor) -> Tensor:
        """Unscaled and clipped, of the same dtype; the input is not changed."""
        if not self._has_transforms():
            return grad
        result = grad.clone()
        self._change_of_grads()(result)
        return result

    def _change_of_grads(self) -> Callable[[Tensor], None]:
        """Unscales and clips in place, as it is now: an update may run later."""
        transforms = list(self._transforms)
        if self._is_scaled:
            transforms.insert(0, ("factor", self.scaler.inverse_scale))
        return partial(_change_grad, transforms)

    def _add_changes(self, transforms: Sequence[tuple[str, float]]) -> None:
        """Have the step do this to the gradients, after what it is to do already; who holds a `.grad` sees it."""
        engine = self._engine
        engine.gradients.absorb()
        if self._is_scaled and not self._shows_unscaled and not self._transforms:
            self._shows_unscaled = True
            engine.gradients.follow(partial(_change_grad, [("factor", self._inverse_scale)]), self._is_own)
        self._transforms.extend(transforms)
        engine.gradients.follow(partial(_change_grad, transforms), self._is_own)

    def show_unscaled(self) -> None:
        """Have `.grad` be without the loss scale from now on, until the step, as after `GradScaler.unscale_`."""
        self._add_changes(())

    def _is_own(self, chunk_id: int, index: int) -> bool:
        return index in self._states.members.get(chunk_id, ())

    def _change_of_gradient(self, chunk_id: int, index: int) -> Callable[[Tensor], None] | None:
        is_unscaled_to_see = self._is_scaled and self._shows_unscaled
        if not (is_unscaled_to_see or self._transforms) or not self._is_own(chunk_id, index):
            return None
        return self._change_of_grads()

    def _apply_gradient_changes(self) -> None:
        """Users have written to what they saw changed: the gradients become what is seen."""
        self._change_shards(self._change_of_grads())
        self._transforms, self._is_unscaled = [], self.scaler.enabled

    def _finish_gradient_changes(self) -> None:
        """What the step was to do to the gradients that there are is done now, since others come, for which it is not
        meant. As those that come they are multiplied by the loss scale."""
        scale = self.scaler.scale if self._is_scaled else 1.0
        changes = [(kind, value * scale if kind == "clamp" else value) for kind, value in self._transforms]
        if self._is_unscaled:
            changes.append(("factor", self.scaler.scale))
        if any(change != ("factor", 1.0) for change in changes):
            self._change_shards(partial(_change_grad, changes))
        self._transforms, self._is_unscaled = [], False

    def _change_shards(self, change: Callable[[Tensor], None]) -> None:
        """Change all gradients of this optimizer's parameters, in fp32 at least."""
        reducer = self._engine.reducer
        for chunk_id, members in self._states.members.items():
            grad = self._engine.store[chunk_id].grad
            if grad is None:
                continue
            spans = [s.in_shard for s in self._states.segments[chunk_id] if s.member_index in members]

            def write(shard: Tensor, spans: Sequence[slice] = spans) -> None:
                for span in spans:
                    change(shard[span])

            wide = torch.promote_types(torch.float32, grad.dtype)
            reducer.rewrite(self._engine.chunks[chunk_id], write, wide)

    def _forget_changes(self) -> None:
        self._transforms, self._shows_unscaled, self._is_unscaled = [], False, False

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the total norm in the coming step, as `torch.nn.utils.clip_grad_norm_` does. Collective.

        Returns:
            0-dim, fp32 (fp64 where the model computes in that): the norm of all gradients before clipping, unscaled.

        Raises:
            PlanError: For other norms than 2 and inf.
        """
        engine = self._engine
        with engine.meeting(Meeting.CLIP_GRAD_NORM):
            engine.reducer.is_tracking_square_sums = True
            return self._as_norm(self._clip(max_norm, self._used(), norm_type))

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every gradient to [-clip_value, clip_value] in the coming step."""
        self._add_changes([("clamp", float(clip_value))])

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Total norm of the gradients as they are now (unscaled, clipped if clipping was asked for), or, after a step,
        of those that it found before clipping them. Collective. 0-dim, of the dtype of `clip_grad_norm_`.

        A step that does not clip computes a norm only once somebody has asked for one: nan after one that did not.
        """
        engine = self._engine
        with engine.meeting(Meeting.GRAD_NORM):
            engine.reducer.is_tracking_square_sums = True
            self._wanted_norm_type = norm_type
            if used := self._used():
                self._last_norm = self._norm(used, norm_type)
            elif self._last_norm is None:
                log.warning("the last step did not need the norm of its gradients; it is computed from now on")
            return self._as_norm(math.nan if self._last_norm is None else self._last_norm)

    def _as_norm(self, value: float) -> Tensor:
        is_double = self._engine.plan.compute_dtype == "float64"
        return torch.tensor(value, dtype=torch.float64 if is_double else torch.float32)

    def _clip(self, max_norm: float, used: Mapping[int, set[int]], norm_type: float = 2.0) -> float:
        norm = self._norm(used, norm_type)
        self._last_norm = norm
        self._add_changes([("factor", clip_coefficient(norm, max_norm))])
        return norm

    def _norm(self, used: Mapping[int, set[int]], norm_type: float) -> float:
        if norm_type not in (2.0, math.inf):
            raise PlanError(f"gradient norms of type {norm_type} are not supported: use 2 or inf")
        is_max = norm_type == math.inf
        with self._engine.telling():
            parts = self._per_parameter(used, is_max)
        if is_max:
            self._engine.comm.all_reduce_max(parts)
            return float(parts.max()) if parts.numel() else 0.0
        self._engine.comm.all_reduce_sum(parts)
        # Exactly rounded, so that the order of the parameters in chunks does not matter.
        values = parts.tolist()
        return math.sqrt(math.fsum(values)) if all(map(math.isfinite, values)) else float(parts.sum().sqrt())

    def _per_parameter(self, used: Mapping[int, set[int]], is_max: bool) -> Tensor:
        """Square sums (or largest magnitudes) of this rank's part of each used parameter's gradient; fp64 on CPU."""
        pending: list[tuple[list[int], Tensor]] = []
        row = 0
        for chunk_id in sorted(used):
            rows = {index: row + i for i, index in enumerate(sorted(used[chunk_id]))}
            row += len(rows)
            segments = self._states.segments[chunk_id]
            kept = [i for i, s in enumerate(segments) if s.member_index in rows]
            if kept:
                sums = self._chunk_parts(chunk_id, is_max)
                pending.append(([rows[segments[i].member_index] for i in kept], sums[kept]))
        result = torch.zeros(row, dtype=torch.float64)
        if pending:
            values = torch.cat([sums.to("cpu", non_blocking=False) for _, sums in pending])
            result[torch.tensor([r for rows, _ in pending for r in rows])] = values
        return result

    def _chunk_parts(self, chunk_id: int, is_max: bool) -> Tensor:
        shard = self._engine.store[chunk_id]
        bounds = [(s.shard_offset, s.numel) for s in self._states.segments[chunk_id]]
        if shard.grad is None:
            return torch.zeros(len(bounds), dtype=torch.float64)
        if self._engine.reducer.has_begun(chunk_id):
            self._engine.check_whole()
        self._engine.reducer.wait_for_download(chunk_id)  # and learn whether adding up has failed
        measure = absolute_max if is_max else square_sums
        known = None if is_max or self._transforms else self._engine.reducer.square_sums.get(chunk_id)
        inverse = self._inverse_scale
        if known is not None:
            return known * inverse**2
        grad = shard.read_grad()
        if grad is None:
            raise RuntimeError("a gradient has gone while its norm was computed")
        if self._transforms:
            wide = grad if grad.dtype.itemsize >= 4 else grad.float()
            return measure(self._transformed(wide), bounds)
        return measure(grad, bounds, scale=inverse)

    def _is_finite(self, used: Mapping[int, set[int]]) -> bool:
        earlier, self._transforms = self._transforms, []
        parts = self._per_parameter(used, is_max=False)
        self._transforms = earlier
        self._engine.comm.all_reduce_sum(parts)
        return bool(torch.isfinite(parts).all())

    # State

    def state_dict(self) -> dict[str, Any]:
        """The state as torch's optimizers give it, with whole tensors on the CPU. Collective.

        Returns:
            `state`, `param_groups` and, with loss scaling, `loss_scaler`, on rank 0; `{}` on other ranks.
        """
        self._states.check_kept()
        with self._engine.meeting(Meeting.OPTIMIZER_STATE_DICT):
            return self._whole_state()

    def _whole_state(self) -> dict[str, Any]:
        engine = self._engine
        numbers, groups = self._numbered()
        described = self.described_states()
        whole: dict[str, dict[str, Tensor]] = {}
        with engine.store.checkpoint_memory() or nullcontext() as memory:
            for key in sorted({k for entries in described.values() for k, v in entries.items() if v[0] == "tensor"}):
                pieces = ((c, self._piece(c, key, described)) for c in engine.chunks if c.id in self._states.inner)
                for fqn, value in gather_whole(engine, pieces, on_all_ranks=False, memory=memory).items():
                    whole.setdefault(fqn, {})[key] = value
        if engine.comm.rank != 0:
            return {}
        state: dict[int, dict[str, Any]] = {}
        for chunk in engine.chunks:
            for index, parameter in enumerate(chunk.parameters):
                entries = described.get((chunk.id, index))
                if entries and id(parameter) in numbers:
                    fqn = chunk.spec.members[index].fqn
                    state[numbers[id(parameter)]] = {
                        key: whole[fqn][key] if kind == "tensor" else value for key, (kind, value) in entries.items()
                    }
        result: dict[str, Any] = {"state": {n: state[n] for n in sorted(state)}, "param_groups": groups}
        if self.scaler.enabled:
            result["loss_scaler"] = self.scaler.state_dict()
        return result

    def __reduce__(self) -> Any:
        """A copy, also a pickled one, is the user's own optimizer over copies of the parameters, with whole states.
        Collective."""
        with self._engine.meeting(Meeting.STATE):
            state = self.state_dict()
            return _plain_optimizer, (self.optimizer, self._engine.comm.exchange_objects(state)[0])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of `state_dict()` or of the same torch optimizer over the plain model; the same on every rank.

        Raises:
            PlanError: If its groups or shapes are not those of this optimizer.
        """
        with self._engine.meeting(Meeting.LOAD_OPTIMIZER_STATE_DICT):
            self._load_whole_state(state_dict)

    def _load_whole_state(self, state_dict: Mapping[str, Any]) -> None:
        saved_groups = state_dict["param_groups"]
        if [len(g["params"]) for g in saved_groups] != [len(g["params"]) for g in self.param_groups]:
            raise PlanError(
                f"the optimizer state has groups of {[len(g['params']) for g in saved_groups]} parameters, "
                f"this optimizer has {[len(g['params']) for g in self.param_groups]}"
            )
        saved: dict[int, Mapping[str, Any]] = {}
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            group.update({k: v for k, v in saved_group.items() if k not in ("params", "param_names")})
            for parameter, number in zip(group["params"], saved_group["params"], strict=True):
                if number in state_dict["state"]:
                    saved[id(parameter)] = state_dict["state"][number]
        self.load_segments(self._from_whole(saved))
        if self.scaler.enabled and state_dict.get("loss_scaler"):
            self.scaler.load_state_dict(state_dict["loss_scaler"])

    def _numbered(self) -> tuple[dict[int, int], list[dict[str, Any]]]:
        numbers: dict[int, int] = {}
        groups = []
        for group in self.param_groups:
            for parameter in group["params"]:
                numbers.setdefault(id(parameter), len(numbers))
            packed = {k: v for k, v in group.items() if k != "params"}
            groups.append({**packed, "params": [numbers[id(p)] for p in group["params"]]})
        return numbers, groups

    def described_states(self) -> dict[tuple[int, int], dict[str, tuple[str, Any]]]:
        """(chunk id, member index) -> key -> ("tensor", dtype) or ("value", value), over all ranks. Collective."""
        self._follow_groups()
        self._states.check_kept()
        mine: dict[tuple[int, int], dict[str, tuple[str, Any]]] = {}
        for chunk_id, inner in self._states.inner.items():
            for position, place in enumerate(inner.places):
                entries = {
                    key: ("value", value) if is_scalar_state(key, value) else ("tensor", value.dtype)
                    for key, value in inner.state_of(position).items()
                }
                if entries and not inner.has_only_reserved(position):
                    mine[(chunk_id, place.member_index)] = entries
        merged: dict[tuple[int, int], dict[str, tuple[str, Any]]] = {}
        for described in self._engine.comm.exchange_objects(mine):
            merged.update(described)
        return merged

    def _piece(
        self, chunk: Chunk, key: str, described: Mapping[tuple[int, int], Mapping[str, tuple[str, Any]]]
    ) -> Tensor | None:
        """This rank's shard of one state of a chunk; None if no parameter of the chunk has it."""
        dtypes = [e[key][1] for (chunk_id, _), e in described.items() if chunk_id == chunk.id and key in e]
        if not dtypes:
            return None
        return self._states.inner[chunk.id].flat_state(key, dtypes[0])

    def state_runs(self, chunk: Chunk, key: str, dtype: torch.dtype) -> dict[int, Tensor]:
        """One element-wise state of this rank's segments of a chunk, 1-D, by member index: where it lies, unless that
        is a disk. Zeros where there is none."""
        inner = self._states.inner[chunk.id]
        states = [inner.state_of(position).get(key) for position in range(len(inner.places))]
        if any(state is not None and state.is_meta for state in states):
            flat = inner.flat_state(key, dtype)
            return {p.member_index: flat[p.shard_offset : p.shard_offset + p.numel] for p in inner.places}
        return {
            place.member_index: torch.zeros(place.numel, dtype=dtype) if state is None else state
            for place, state in zip(inner.places, states, strict=True)
        }

    def load_segments(self, read: Callable[[Chunk, Segment], Mapping[str, Any]]) -> None:
        """Replace all states, one segment after the other, between steps.

        Args:
            read: The state of a segment, as torch's optimizers have it, but element-wise ones 1-D, `[segment.numel]`;
                empty: none.
        """
        self._follow_groups()
        self._states.check_kept()
        for chunk in self._engine.chunks:
            if chunk.id in self._states.inner:
                self._load_chunk(chunk, read)

    def _load_chunk(self, chunk: Chunk, read: Callable[[Chunk, Segment], Mapping[str, Any]]) -> None:
        inner = self._states.inner[chunk.id]
        if chunk.spec.optim_tier is Tier.NVME:
            inner.allocate_moments()  # so that there is something to open
        segments = {s.member_index: s for s in self._states.segments[chunk.id]}
        with inner.opened(is_written=True):
            for position, place in enumerate(inner.places):
                inner.set_state(position, read(chunk, segments[place.member_index]))

    @staticmethod
    def _from_whole(saved: Mapping[int, Mapping[str, Any]]) -> Callable[[Chunk, Segment], Mapping[str, Any]]:
        """Reads segments out of whole states, by the `id` of their parameters."""

        def read(chunk: Chunk, segment: Segment) -> Mapping[str, Any]:
            member = chunk.spec.members[segment.member_index]
            state = saved.get(id(chunk.parameters[segment.member_index]), {})
            loaded: dict[str, Any] = {}
            for key, value in state.items():
                if is_scalar_state(key, value):
                    loaded[key] = value.clone() if isinstance(value, Tensor) else value
                    continue
                if tuple(value.shape) != member.shape:
                    raise PlanError(f"{key} of {member.fqn} has shape {tuple(value.shape)}, expected {member.shape}")
                flat = in_memory_order(chunk, segment.member_index, value)
                loaded[key] = flat[segment.param_offset : segment.param_offset + segment.numel]
            return loaded

        return read

    def state_bytes(self) -> dict[str, int]:
        """Bytes of optimizer states on this rank, by tier; spare ones apart."""
        held: dict[str, int] = {}
        for chunk_id, inner in self._states.inner.items():
            tier = self._engine.plan.chunks[chunk_id].optim_tier.value
            held[f"{tier}_states"] = held.get(f"{tier}_states", 0) + inner.state_bytes()
            if inner.has_spares:
                held[f"{tier}_spare"] = held.get(f"{tier}_spare", 0) + inner.spare_bytes()
        return held

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model that the optimizer did not have."""
        if "optimizer" in self.__dict__:
            self.optimizer.add_param_group(param_group)
        else:
            super().add_param_group(param_group)


def _plain_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> torch.optim.Optimizer:
    """What a copied or pickled `ElixirOptimizer` is restored by."""
    optimizer.load_state_dict({key: value for key, value in state.items() if key != "loss_scaler"})
    return optimizer


def _weakly(method: Callable[[_T], None]) -> Callable[[_T], None]:
    """A bound method that keeps its object from nothing: the states shall go with the optimizer."""
    reference = weakref.WeakMethod(method)

    def call(argument: _T) -> None:
        found = reference()
        if found is not None:
            found(argument)

    return call


def _change_grad(transforms: Sequence[tuple[str, float]], grad: Tensor) -> None:
    for kind, value in transforms:
        if kind == "factor":
            grad.mul_(value)
        else:
            grad.clamp_(-value, value)


def _place(chunk: Chunk, needs: Mapping[int, int]) -> float:
    """Where a chunk comes in the order in which the next forward needs them; the order of registration is the guess."""
    return needs.get(chunk.id, len(needs) + chunk.id)


def check_has_no_place(optimizer: torch.optim.Optimizer) -> None:
    """Raises `PlanError` if the optimizer was told where its states shall be, which is the plan's to say."""
    if isinstance(optimizer, HybridAdam) and optimizer.nvme_offload_fraction > 0:
        raise PlanError(
            f"{type(optimizer).__name__}(nvme_offload_fraction={optimizer.nvme_offload_fraction:g}) places its states "
            "by itself, and under ElixirStrategy or ElixirModule the plan does: give nvme_offload_fraction to "
            "ElixirStrategy or make_plan (nvme_offload_dir to ElixirStrategy or ElixirModule), and leave it out here"
        )


def check_parameters(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Raises `PlanError` if the optimizer holds parameters that are not trainable parameters of the engine's model."""
    foreign, unfrozen = [], []
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            home = engine.home_of(parameter)
            if home is None:
                foreign.append(f"group {g}, parameter {i}, shape {tuple(parameter.shape)}")
            elif parameter.requires_grad and not home[0].spec.requires_grad:
                unfrozen.append(home[0].spec.members[home[1]].fqn)
    if foreign:
        raise PlanError(
            f"the optimizer holds {len(foreign)} parameters that are not the wrapped model's: "
            f"{'; '.join(foreign[:5])}. Build it from the parameters of the model that is wrapped (on ranks other than "
            "0, after wrapping if the model was built in configure_model)"
        )
    if unfrozen:
        raise StateError(
            f"frozen when the model was set up, and now in an optimizer to be trained: {', '.join(unfrozen[:5])}"
        )
