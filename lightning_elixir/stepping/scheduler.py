"""Has the chunks of an engine updated: begins updates, in the step or inside backward, and brings their values home.

What an update does is decided in `cases` and described in `describing`; here it is given to the threads, in order.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_elixir.core.device import Event
from lightning_elixir.core.host_memory import Extent, bytes_of
from lightning_elixir.core.signals import deferred
from lightning_elixir.core.together import run_together
from lightning_elixir.core.waits import Call
from lightning_elixir.core.worker import TaskEvent
from lightning_elixir.errors import CapacityError, StateError
from lightning_elixir.optim.execution import ChunkUpdate, UpdateRecord, UpdateRunner
from lightning_elixir.plan.types import Tier, UpdateTiming
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.chunk_optimizers import ChunkOptimizers
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.stepping.cases import Start, Values, Way
from lightning_elixir.stepping.describing import UpdateDescriber
from lightning_elixir.stepping.gradients import StepGradients
from lightning_elixir.stepping.speculation import Begun, Speculation
from lightning_elixir.stepping.torch_steps import TorchSteps
from lightning_elixir.stepping.whole_steps import WholeSteps

# A Trainer comes to it with its first batch.
_RESERVE = Call("taking memory for optimizer states", is_routine=True, is_of_batch=True)


@contextmanager
def all_or_nothing(engine: Engine) -> Iterator[None]:
    """An exception inside ends the engine: some chunks updated and others not is no state to train on, or to save."""
    try:
        yield
    except BaseException as error:
        engine.give_up(f"in the middle of an optimizer step ({type(error).__name__})", error=error)
        raise


@dataclass(frozen=True)
class _Step:
    """What the updates of one step share."""

    record: UpdateRecord
    now: Event
    """All that the compute stream has read of old values comes before."""
    orders: Mapping[int, int]
    """By chunk id: the lowest is needed first."""


class UpdateScheduler:
    """One optimizer's updates: when they begin, and in which order. To the engine it is the `AttachedOptimizer`.

    Args:
        engine: Whose chunks.
        states: Their optimizers.
        gradients: What the step does to gradients.
        runner: Carries updates out.
    """

    def __init__(self, engine: Engine, states: ChunkOptimizers, gradients: StepGradients, runner: UpdateRunner) -> None:
        self._engine = engine
        self.states = states
        self.gradients = gradients
        self._runner = runner
        self._describer = UpdateDescriber(engine, states, gradients)
        steps = WholeSteps if states.maker.is_whole else TorchSteps
        self._torch_steps = None if states.is_adam else steps(engine, states, runner)
        self._speculation = Speculation()
        self._early: dict[int, Begun] = {}  # chunk id -> its update, begun inside backward over the old states
        self._is_step_promised = False

    # Building and moving

    def allocate(self) -> None:
        """Take the memory of states and staging now. Adam's states are known, and zeros change nothing."""
        if self._torch_steps is not None:
            self._torch_steps.allocate()
            return
        chunks = self._chunks
        for chunk in chunks:
            self._reserve_states(chunk)
            inner = self.states.inner[chunk.id]
            inner.start_states({p.member_index for p in inner.places})
        self._reserve_stream(chunks)  # a lack of memory shows now, not in the first step
        self._runner.release_stream()

    def to_come(self, most_bytes: int | None = None) -> list[Extent]:
        """What `reserve` takes in host memory under the plan in force, or the first steps.

        Args:
            most_bytes: No more of it, for another plan may come: states first, not locked, as that may send others to
                the device, and while memory is locked the driver does nothing else. None: all.
        """
        if most_bytes is None:
            return self._all_to_come()
        left, states, gradients = most_bytes, list[Extent](), list[Extent]()
        for chunk in self._on_host:
            landing = self._engine.reducer.landing.to_reserve(chunk)
            own = [*self._states_to_come(chunk), *self._spares_to_come(chunk)]
            left -= bytes_of([*own, *landing])
            if left < 0:
                break
            states += [extent._replace(is_locked=False) for extent in own]
            gradients += landing
        return states + gradients

    @property
    def _chunks(self) -> list[Chunk]:
        """Those that have optimizer states."""
        return [chunk for chunk in self._engine.chunks if chunk.id in self.states.inner]

    @property
    def _on_host(self) -> list[Chunk]:
        """Those that have them in host memory."""
        return [chunk for chunk in self._chunks if chunk.spec.optim_tier is Tier.CPU]

    def reserve(self, *, leaves_spares: bool = False) -> None:
        """Take the memory now that steps keep, without values: of Adam's states wherever they are in memory, and of
        gradients in host memory. Collective.

        Args:
            leaves_spares: Spare states are not taken yet; threads make their memory meanwhile, of several optimizers
                that of the last one. Another call must follow.

        Raises:
            CapacityError: A host runs short of memory, or a device has no room for the states.
        """
        engine, chunks = self._engine, self._chunks
        spares = [extent for chunk in self._on_host for extent in self._spares_to_come(chunk)]
        engine.host_memory.expect([*(e for c in self._on_host for e in self._to_come(c, has_spares=False)), *spares])
        engine.host_room.begin()
        for chunk in self._on_host:
            coming = self._to_come(chunk, has_spares=not leaves_spares)
            engine.host_room.take(chunk.spec, bytes_of(coming), engine.plan, engine.host_bytes)
            self._reserve_states(chunk, has_spares=not leaves_spares)
            engine.reducer.landing.reserve(chunk)
        if not (leaves_spares and spares):
            engine.host_memory.drop()
        if self._torch_steps is None:  # others make theirs in their first step
            run_together(engine.comm, lambda: self._reserve_on_device(chunks), _RESERVE)

    def load_kernels(self, *, has_norm: bool) -> None:
        """Have threads load the code that updates will run, with `has_norm` that of the norm of gradients as well. Not
        while other processes may be forked: these would wait for ever for what a thread is importing."""
        if self._torch_steps is not None:
            return
        in_memory = [c for c in self._chunks if c.spec.optim_tier is not Tier.NVME]
        kinds = {self._engine.is_cast_from_master(c.spec): c for c in reversed(in_memory)}  # else mostly alike
        for is_cast, chunk in kinds.items():
            master = self._engine.store[chunk.id].master
            moments = [moment.dtype for moment in self.states.inner[chunk.id].moments]
            own = chunk.dtype if master is None else master.dtype
            new_values = [] if master is None or is_cast else [chunk.dtype]
            self._runner.load_kernels([own, chunk.dtype, *moments, *new_values])
        if has_norm:
            self._runner.load_norms({chunk.dtype for chunk in kinds.values()})

    def _reserve_on_device(self, chunks: Sequence[Chunk]) -> None:
        try:
            self._reserve([c for c in chunks if c.spec.optim_tier is Tier.GPU])
            self._reserve_stream(chunks)
            if self._engine.plan.update_timing is UpdateTiming.AFTER_BACKWARD:
                self._runner.release_stream()  # forward and backward have its place until then
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"the device has no room for the optimizer states that the plan has on it ({str(error).splitlines()[0]}"
                "): lower gpu_memory_limit, or free what else is on the device",
                resource="GPU",
            ) from error

    def _all_to_come(self) -> list[Extent]:
        return [extent for chunk in self._on_host for extent in self._to_come(chunk)]

    def _to_come(self, chunk: Chunk, *, has_spares: bool = True) -> list[Extent]:
        """What `reserve` takes for a chunk that has its states in host memory."""
        spares = self._spares_to_come(chunk) if has_spares else []
        return [*self._states_to_come(chunk), *spares, *self._engine.reducer.landing.to_reserve(chunk)]

    def _states_to_come(self, chunk: Chunk) -> list[Extent]:
        inner = self.states.inner[chunk.id]
        return [] if inner.state_bytes() else inner.moments

    def _spares_to_come(self, chunk: Chunk) -> list[Extent]:
        inner, shard = self.states.inner[chunk.id], self._engine.store[chunk.id]
        if not chunk.spec.has_spare_states or shard.spare_master is not None or shard.master is None:
            return []
        spare = self._engine.store.master_extent(chunk.spec, shard.master.dtype)
        return [spare, Extent(spare.numel, chunk.dtype), *inner.moments]

    def prepare_move(self, groups: Sequence[dict[str, Any]] | None = None) -> None:
        """States are going to move, or to be in other groups.

        Args:
            groups: The user's parameter groups, if they are others; None: those there are, which may have grown.
        """
        self._speculation.withdraw()
        self._runner.release_stream()
        self.states.group_by(self.states.groups if groups is None else groups)

    def finish_move(self) -> None:
        """They have: updates begin as gradients land there from now on."""
        self.states.note_followed()
        self._engine.reducer.watch(self)

    def _reserve_states(self, chunk: Chunk, *, has_spares: bool = True) -> None:
        """Adam's moments, and the spares of a chunk that shall have them."""
        self.states.inner[chunk.id].allocate_moments()
        if has_spares and self._engine.store.reserve_spares(chunk.spec, chunk.dtype):
            self.states.inner[chunk.id].allocate_spares()

    # Inside backward

    @property
    def is_paused(self) -> bool:
        """Whether updates that the plan has begin into spare states wait for the step, since too many were for
        nothing."""
        return self._engine.plan.has_spare_states and not self._speculation.is_allowed

    @property
    def num_ahead(self) -> int:
        """Chunks whose update has begun, into spare states, and waits for the step."""
        return len(self._speculation)

    @contextmanager
    def step_promised(self) -> Iterator[None]:
        """Inside, backward comes and then the step, and nothing in between changes or reads what updates with: so they
        may begin over the old states. Ctrl-C and the like wait for the end.

        Raises:
            StateError: No step came, though updates had begun. As after any exception in between, the engine is of no
                use then.
        """
        engine = self._engine
        with deferred():
            engine.reducer.watch(self)
            self._is_step_promised = True
            try:
                with engine.reducer.landing.step_next():
                    yield
            finally:
                self._is_step_promised = False
                if self._early:
                    self._early = {}
                    engine.give_up(
                        "between the begin of its updates, inside backward, and the step",
                        ", or use update_timing='behind_forward', which begins no update before its step",
                        sys.exc_info()[1],
                    )
            engine.phases.check_open()

    def gradients_landed(self, chunk: Chunk) -> None:
        """All gradients that a chunk can have are on their way to host memory: its update begins, if that is possible.
        The values that backward reads stay as they are until the step."""
        inner, members = self.states.inner.get(chunk.id), self.states.members.get(chunk.id, set())
        if inner is None or not self.states.is_adam:
            return
        if self._is_step_promised:
            start, is_possible = Start.EARLY, inner.has_states and not self._is_looked_at(chunk)
        else:
            start, is_possible = Start.AHEAD, self._can_speculate(chunk, members)
        way = self._describer.way(chunk, members, start) if is_possible else None
        if way is None or not self._has_stream(chunk):
            return
        with torch.no_grad():
            if start is Start.EARLY:
                self._begin_early(chunk, members, way)
            else:
                self._begin_ahead(chunk, members, way)

    def _is_looked_at(self, chunk: Chunk) -> bool:
        """Whether users keep something of its parameters or gradients, which the update would change too early."""
        return chunk.id in self._engine.writes.touched or self._engine.gradients.is_shown(chunk.id)

    def gradients_change(self, chunk_ids: Collection[int] | None) -> None:
        """Gradients, or what is updated with them, are going to change: see `GradientWatcher`."""
        self._speculation.withdraw(chunk_ids)

    def _begin_early(self, chunk: Chunk, members: set[int], way: Way) -> None:
        """The update of a step that will come: it is counted now."""
        engine, record = self._engine, UpdateRecord()
        landed = engine.reducer.landing.take(chunk.id)
        with all_or_nothing(engine):
            job = self._describer.next_update(chunk, members, way)
            job = replace(job, ready=() if landed is None else (landed,))
            engine.reducer.note_begun(chunk)
            task = self._runner.submit(job, record, order=self._place(chunk))
            self._early[chunk.id] = Begun(way, job.updates, task, record)

    def _begin_ahead(self, chunk: Chunk, members: set[int], way: Way) -> None:
        """The update of a step that may come, as if all gradients were to stay as they are. Everything that can be
        looked at stays as it is: [Note: exact speculation], `stepping/speculation.py`."""
        landed, record = self._engine.reducer.landing.end_of(chunk.id), UpdateRecord()
        updates = self._describer.ahead(chunk, members)
        job = ChunkUpdate(updates, chunk.spec.is_update_streamed, () if landed is None else (landed,))
        task = self._runner.submit(job, record, order=self._place(chunk))
        self._speculation.add(chunk.id, Begun(way, updates, task, record))

    def _can_speculate(self, chunk: Chunk, members: set[int]) -> bool:
        """Whether the chunk's next update can be described already, into spare states that are there."""
        if not self._speculation.is_allowed:
            return False
        inner = self.states.inner[chunk.id]
        has_spares = inner.has_spares and self._engine.store[chunk.id].spare_master is not None
        return has_spares and inner.has_states_of(members)

    def _has_stream(self, chunk: Chunk) -> bool:
        """Whether there is memory to stream the chunk's update, if it shall be streamed; if not, the step says so."""
        if chunk.spec.is_update_streamed:
            try:
                self._runner.reserve_stream()
            except CapacityError:
                return False
        return True

    # In the step

    @torch.no_grad()
    def run(self, used: Mapping[int, set[int]]) -> UpdateRecord:
        """Update what is used, or have that begun, as the plan's timing says.

        Args:
            used: Members, by chunk id, that have a gradient on any rank.
        """
        engine = self._engine
        engine.reducer.make_zeros(used)
        for chunk_id in used:  # memory that the update may overwrite must not hold gradients of other optimizers
            if engine.store[chunk_id].is_param_overwritten and engine.steps.is_shared(
                chunk_id, self.states.members[chunk_id]
            ):
                engine.reducer.rewrite(engine.chunks[chunk_id], lambda shard: None, torch.float32)
        chunks = [engine.chunks[i] for i in sorted(used) if engine.store[i].grad is not None]
        if self._torch_steps is not None:
            engine.host_memory.drop()
            with all_or_nothing(engine):
                return self._torch_steps.run(chunks, used, self.gradients.change)
        self._reserve(chunks)
        self._reserve_stream(chunks)
        engine.host_memory.drop()
        record = UpdateRecord()
        begun = self._take_begun(chunks, used)
        with all_or_nothing(engine):
            near = [c for c in chunks if c.spec.optim_tier is Tier.GPU]
            others = [c for c in chunks if c.spec.optim_tier is not Tier.GPU]
            step = _Step(record, engine.device.compute_event(), {c.id: self._place(c) for c in others})
            if begun.keys() - step.orders.keys():
                raise StateError("gradients were dropped whose updates had begun inside backward")
            # First, since a device that has given a norm has nothing else to do while the others are described.
            updates = [u for c in near for u in self._describer.near(c, used[c.id])]
            has_gone_down = self._runner.run_on_device(updates, record)
            for chunk_id in sorted(step.orders, key=step.orders.__getitem__):
                self._update(engine.chunks[chunk_id], used[chunk_id], begun.get(chunk_id), step)
            if engine.plan.update_timing is UpdateTiming.AFTER_BACKWARD:
                record.wait()
                self._runner.release_stream()
                if has_gone_down:
                    engine.device.compute_event().synchronize()
                record.note_end()
        return record

    def set_mode(self, mode: str) -> dict[int, set[int]]:
        """See `TorchSteps.set_mode`; nothing for optimizers without modes."""
        with all_or_nothing(self._engine):
            return {} if self._torch_steps is None else self._torch_steps.set_mode(mode)

    def end_step(self, *, is_as_assumed: bool) -> bool:
        """A step is over.

        Args:
            is_as_assumed: Nothing was clipped or skipped, as far as all ranks know it.

        Returns:
            Whether an update that had begun was dropped.
        """
        return self._speculation.end_step(is_as_assumed=is_as_assumed)

    def _reserve(self, chunks: Sequence[Chunk]) -> None:
        """Whatever may fail for want of memory comes before the first step is counted."""
        if any(c.spec.optim_tier is Tier.GPU and not self.states.inner[c.id].has_states for c in chunks):
            self._engine.give_back()  # or moments, which last, would come to lie in the gaps that activations have left
        for chunk in chunks:
            self._reserve_states(chunk)

    def _reserve_stream(self, chunks: Sequence[Chunk]) -> None:
        if any(c.spec.is_update_streamed for c in chunks):
            self._runner.reserve_stream()

    def _place(self, chunk: Chunk) -> int:
        """Where a chunk comes in the order in which the next forward needs them; the order of registration is the
        guess."""
        needs = self._engine.steps.first_needs()
        return needs.get(chunk.id, len(needs) + chunk.id)

    def _take_begun(self, chunks: Sequence[Chunk], used: Mapping[int, set[int]]) -> dict[int, Begun]:
        """The updates that have begun and are the step's, by chunk id; those that are not the step's,
        and can be dropped, are."""
        right: set[int] = set()
        for chunk in chunks if self._speculation else ():
            inner, members = self.states.inner[chunk.id], used[chunk.id]
            is_possible = inner.has_spares and inner.has_states_of(members)
            if is_possible and self._speculation.is_right(chunk.id, self._describer.ahead(chunk, members)):
                right.add(chunk.id)
        self._speculation.withdraw(but=right)
        early, self._early = self._early, {}
        return {**early, **self._speculation.take()}

    def _update(self, chunk: Chunk, used: set[int], begun: Begun | None, step: _Step) -> None:
        """The step of a chunk with states on the host or on a disk: its update, unless that has begun, and what brings
        the new values to the parameters."""
        shard = self._engine.store.settle(chunk.id)
        landed = self._engine.reducer.landing.take(chunk.id)
        if begun is None:
            members, way, after = used, self._describer.way(chunk, used, Start.IN_STEP), None
            if way is None:
                raise RuntimeError(f"no way to update {chunk.spec} in its step")
            job = self._describer.next_update(chunk, members, way)
        else:
            members, way, after = self.states.members[chunk.id], begun.way, begun.task
            if way.values is Values.SPARE:
                self._describer.take_up_spares(chunk)
            step.record.adopt(begun.record)
            # What has begun waits for its gradients itself.
            job, landed = ChunkUpdate((), chunk.spec.is_update_streamed), None
        job = self._describer.delivered(job, chunk, members, way)
        ready = (landed, chunk.ready, step.now if way.is_after_backward else None)
        job = replace(job, ready=tuple(event for event in ready if event is not None), may_write=step.now)
        # What needs the new values waits for this.
        shard.update = self._runner.submit(job, step.record, order=step.orders[chunk.id], after=after)
        if chunk.spec.is_persistent:
            chunk.ready = TaskEvent(shard.update)
