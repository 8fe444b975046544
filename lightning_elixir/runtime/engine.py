"""Brings the parts of the runtime together: what a module's parameters belong to from its wrapping to `close`.

Where things happen: `forwards` and `backwards` (what runs), `steps` (what a step takes and leaves), `writes` and
`interception` (what users touch between them), `gradients` (as users see them), `active` (the plan in force).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from lightning_elixir.core.comm import Comm
from lightning_elixir.core.device import Device, beside_dispatch_modes, release_cached_memory
from lightning_elixir.core.host_memory import HostMemory
from lightning_elixir.core.signals import deferred
from lightning_elixir.core.waits import Call
from lightning_elixir.errors import ElixirError, PlanError, StateError, StorageError
from lightning_elixir.patterns.apply import bind_peers, pattern_forwards
from lightning_elixir.patterns.cuts import cuts_of
from lightning_elixir.patterns.placed import check_placed
from lightning_elixir.plan.profile import StepProfile
from lightning_elixir.plan.rcache import RCache
from lightning_elixir.plan.types import DTYPE_BYTES, AccessTrace, ChunkSpec, Drop, Plan
from lightning_elixir.runtime.activations import Activations
from lightning_elixir.runtime.active_plan import ActivePlan
from lightning_elixir.runtime.agreement import Meeting
from lightning_elixir.runtime.backwards import Backwards
from lightning_elixir.runtime.build import Builder, Precision, open_states
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.dtype_clash import explain_dtype_clash
from lightning_elixir.runtime.forwards import Forwards
from lightning_elixir.runtime.gradients import Gradients
from lightning_elixir.runtime.groups import Groups
from lightning_elixir.runtime.hooks import Hooks, SavedTensors
from lightning_elixir.runtime.host_room import HostRoom
from lightning_elixir.runtime.interception import Interception
from lightning_elixir.runtime.iterations import Iterations
from lightning_elixir.runtime.model_checks import check_same_on_all_ranks
from lightning_elixir.runtime.nested_tensors import without_nested_tensors
from lightning_elixir.runtime.pattern_wire import PatternWire
from lightning_elixir.runtime.phases import Phase, Phases
from lightning_elixir.runtime.reducer import Reducer
from lightning_elixir.runtime.replan import check_layout, move_chunks
from lightning_elixir.runtime.sampling import StepSeconds
from lightning_elixir.runtime.stats import Stats, take_stats
from lightning_elixir.runtime.steps import Steps
from lightning_elixir.runtime.transforms import check_untransformed, interpreters, num_modes, tracer
from lightning_elixir.runtime.transport import TransferBytes
from lightning_elixir.runtime.turns import Turn
from lightning_elixir.runtime.unreadable import serve_under_modes
from lightning_elixir.runtime.user_writes import UserWrites
from lightning_elixir.runtime.whole import own_values, whole_values
from lightning_elixir.storage.nvme import DiskOptions, StateFile, StateTraffic
from lightning_elixir.storage.shards import ShardStore


class Engine:
    """Keeps a module's parameters in chunks and brings them to the compute device when they are needed.

    Args:
        module: The model. Its parameters are bound to chunks for good.
        plan: What to obey.
        device: Where to compute.
        comm: All ranks.
        precision: Master dtype.
        reduce_dtype: What gradients are cast to for reduction; None: as they are.
        prefetch: False: fetch on demand only, whatever the plan's depth.
        disk: Where states go that the plan has on NVMe; None: `DiskOptions()`.

    Raises:
        PlanError: If the plan was made for another model or differs between ranks, or parameters have no values.
        StorageError: The disk cannot hold the states that shall go there.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        device: Device,
        comm: Comm,
        precision: Precision,
        reduce_dtype: torch.dtype | None = None,
        prefetch: bool = True,
        disk: DiskOptions | None = None,
    ) -> None:
        _check_unmanaged(module)
        check_same_on_all_ranks(comm, plan)
        self.groups = Groups(comm, plan)
        self.groups.connect(plan.all_chunks)
        self.module = module
        self._check_patterns(plan)
        self.device = device
        self.comm = comm
        self.precision = precision
        self.moved = TransferBytes()
        self.traffic = StateTraffic()
        self._disk = disk or DiskOptions()
        self.turn = Turn(device, is_shared=comm.world_size > 1)
        self.phases = Phases(self.turn)
        self.has_prefetch = prefetch
        self.reduce_dtype = reduce_dtype if comm.world_size > 1 else None  # one rank has nothing to reduce
        self._is_freed = False
        self.host_memory = HostMemory(device, comm.world_size)
        self.host_room = HostRoom(comm, self.host_memory)
        self._holders: list[weakref.WeakMethod[Callable[[], dict[str, int]]]] = []
        self._followers: list[weakref.WeakMethod[Callable[[Chunk], None]]] = []
        self.store = self._new_store(plan, self._open_states(plan))
        try:
            builder = Builder(module, plan, device, self.groups)
            self.ignored = builder.place_ignored()
            """Frozen parameters that are in no chunk."""
            self.chunks = builder.build(self.store, precision)
            self._home = {id(p): (c, i) for c in self.chunks for i, p in enumerate(c.parameters)}
            with self.turn.call("making an ElixirModule"):  # other threads that come upon its parameters wait
                self.interception = Interception(self, self.chunks)
                self.on_held_bytes(self.interception.written.held_bytes)
                self.gradients = Gradients(self)
                self.writes = UserWrites(self)
                self.steps = Steps(self)
                self.iterations = Iterations(device, self.chunks, self.device_bytes)
                self.backwards = Backwards(self)
                self.saved = SavedTensors({c.storage_key: c for c in self.chunks}, self.backwards.need)
                self.activations = Activations(self, self.saved)
                self.on_held_bytes(self.activations.offloader.held_bytes)
                self.forwards = Forwards(self, self.saved, self._home)
                trainable = [c for c in self.chunks if c.spec.requires_grad]
                self._hooks = Hooks(self.forwards, self.backwards, self.interception, trainable)
                self._adopt(ActivePlan(self, plan, self.store))
        except BaseException:
            self.store.close()  # with it the file
            raise
        finally:
            self.host_memory.drop()  # of a build that failed; and no thread waits for what may never come
        self.wire = PatternWire(self)
        """Where the exchanges of parallel patterns go."""
        bind_peers(module, self.wire)

    def _check_patterns(self, plan: Plan) -> None:
        """Raises `PlanError` if modules have peers that are gone, or that the plan does not know, or if parts are in no
        chunk."""
        check_placed(self.module, self.groups.mesh)
        ignored = {p.fqn for p in plan.ignored}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if name in ignored and cuts_of(parameter):
                raise PlanError(f"{name} is in `ignored`, and a pattern cuts it: leave it out of one of the two")
        for forward in pattern_forwards(self.module):
            peers = forward.peers
            if self.groups.mesh.size(peers.axis) != peers.size:
                raise PlanError(
                    f"the model has patterns for {peers.axis}_parallel_size={peers.size}, and the plan was made for"
                    f" {self.groups.mesh.size(peers.axis)}: make the plan with the same sizes"
                )

    def _adopt(self, active: ActivePlan) -> None:
        """Take up a plan whose chunks and shards are in place."""
        self.active = active
        self.iterations.adopt(active, None if self.reduce_dtype is None else self.reduce_dtype.itemsize)
        around = self.activations.adopt(active.plan)
        if active.is_watching:
            around = without_nested_tensors(self.module, around)
        self._hooks.run_around(around)
        self.forwards.watch(self._hooks)

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.active.plan

    @property
    def rcache(self) -> RCache:
        """Decides which replicas come and go, under the plan in force."""
        return self.active.rcache

    @property
    def reducer(self) -> Reducer:
        """Takes gradients to their shards, under the plan in force."""
        return self.active.reducer

    @property
    def phase(self) -> Phase:
        """What the program is doing."""
        return self.phases.current

    @property
    def is_computing(self) -> bool:
        """Whether a forward or a backward runs."""
        return self.phases.is_computing

    @property
    def is_closed(self) -> bool:
        """Whether the parameters have no values any more."""
        return self.phases.current is Phase.CLOSED

    def _open_states(self, plan: Plan, kept: StateFile | None = None) -> StateFile | None:
        return open_states(plan, self.precision, self._disk, self.comm, self.traffic, kept)

    def _new_store(self, plan: Plan, states: StateFile | None) -> ShardStore:
        return ShardStore(
            self.device,
            self.host_memory,
            plan.num_sharing,
            plan.is_storage_distributed,
            plan.grad_reuses_compute_shard,
            states,
        )

    # Access

    def acquire(self, ids: tuple[int, ...], *, pin: bool) -> None:
        """Make chunks resident and their parameters plain; with `pin`, until `drop`.

        Args:
            ids: Each once.
        """
        # Called for every module and every saved parameter, nearly always to find that all is as it shall be.
        active, is_computing, is_there = self.active, self.phases.is_computing, False
        has_modes = num_modes()
        if active.cost and (has_modes or interpreters() is not None or tracer() is not None):
            check_untransformed()
        if has_modes:
            if active.cost:
                serve_under_modes()
            with beside_dispatch_modes():
                self.acquire(ids, pin=pin)
            return
        try:
            if active.cost:
                if not is_computing:
                    active.residency.acquire_outside(ids, pin)
                elif self.iterations.is_watching or not active.rcache.serve(ids, pin=pin):
                    self.iterations.acquire(ids, pin)
            is_there = True
            for chunk_id in ids:
                chunk = self.chunks[chunk_id]
                if chunk.ready is not None or not chunk.is_bound:
                    chunk.wait_ready()
                if is_computing and chunk_id not in self.interception.plain_chunks and not self.backwards.is_guarded:
                    self.interception.make_plain(chunk)
        except BaseException as error:
            if is_there and pin and active.cost:
                active.rcache.drop(ids)
            if isinstance(error, StorageError):
                self.tell_of(error)
            raise

    def is_at_hand(self, chunk: Chunk) -> bool:
        """What `acquire` does for one chunk, without a pin, where nothing has to be brought, as nearly always. A signal
        may come inside: there is nothing that it could leave half done.

        Returns:
            Whether it was so. If not, nothing has changed.
        """
        active = self.active
        if active.cost and (num_modes() or interpreters() is not None or tracer() is not None):
            return False
        if self.saved.take_repeat(chunk):
            return True
        if not (
            self.phases.is_computing
            and chunk.is_bound
            and chunk.ready is None
            and (chunk.id in self.interception.plain_chunks or self.backwards.is_guarded)
            and not self.iterations.is_watching
            and (not active.cost or active.rcache.serve((chunk.id,), pin=False))
        ):
            return False
        if chunk.id in active.cost:  # of others no rCache hears
            self.saved.note_at_hand(chunk, active.rcache)
        return True

    def is_in_use(self, chunk_id: int) -> bool:
        """Whether a chunk that stays on the device has been acquired since the forward or the backward began."""
        chunk = self.chunks[chunk_id]
        return chunk.ready is None and chunk.is_bound and chunk_id in self.interception.plain_chunks

    def drop(self, ids: Sequence[int]) -> None:
        """Undo one pinned `acquire`."""
        active = self.active
        if active.cost:
            traces = self.iterations.traces
            if traces.is_recording and self.phases.is_computing:
                traces.record(Drop(tuple(ids)))
            active.rcache.drop(ids)

    # What is left open, where a forward or a backward has ended without a word

    def leave_stale(self) -> None:
        """As `leave_interrupted`, where the model as a whole, a backward or a step begins: of what is open then, more
        is known to be over."""
        self.leave_interrupted()
        if self.forwards.is_stale:
            self.forwards.abort()
        else:
            self.leave_stale_backward()

    def leave_stale_backward(self) -> None:
        """End a bare backward that has raised, of which autograd does not tell."""
        if self.backwards.is_stale:
            self.backwards.abort()

    def leave_interrupted(self) -> None:
        """End a forward or a backward that a signal cut short before the engine could note its end."""
        if self.phases.is_computing and self.phases.is_interrupted:
            if self.phase is Phase.FORWARD:
                if not self.forwards.is_running:
                    self.forwards.abort()
            elif torch._C._current_graph_task_id() == -1:
                self.backwards.abort()

    def leave_hooks(self) -> None:
        """Take away hooks for saved tensors that a signal has left on."""
        if self.phase is not Phase.FORWARD and torch._C._current_graph_task_id() == -1:
            self.saved.leave()

    @property
    def traces(self) -> dict[str, AccessTrace]:
        """What the last recorded iteration of a kind touched."""
        return self.iterations.traces.by_kind

    # When memory runs out

    @property
    def has_lost_gradients(self) -> bool:
        """Whether a backward that failed has taken the gradients of earlier ones with it; until `zero_grad`."""
        return bool(self.reducer.lost)

    def set_memory_limit(self, limit_bytes: int | None) -> None:
        """Device memory that everything together may take: the rCache gives way when activations grow towards it.

        Args:
            limit_bytes: None: the rCache keeps what the plan gives it. At first it is what the device had when the
                engine was built.
        """
        self.iterations.growth.limit_bytes = limit_bytes

    def make_room(self) -> bool:
        """Call after an out-of-memory error in a forward or a backward, outside of both, before running the batch
        again: evicts every replica that can go, has the rCache keep as few as the model runs with until that batch is
        over, and fewer than planned for some time, and gives all cached memory back. What the failed run computed must
        be gone: the error's traceback holds it.

        Returns:
            Whether there is more room than before. If not, only a plan that leaves more helps.

        Raises:
            StateError: Inside forward or backward.
        """
        with self.turn.call("make_room()"):
            return self._make_room()

    def _make_room(self) -> bool:
        self.leave_stale()
        self.phases.check_open()
        self.phases.check_idle("make_room", "call it when the error is caught")
        self.writes.absorb()
        self.wire.note_rerun()
        is_lower = self.iterations.growth.shortage()
        num_blocks = self.rcache.used_blocks
        residency, resident = self.active.residency, self.rcache.resident_ids
        residency.release([i for i in resident if not self.chunks[i].is_aliased() and not residency.is_common(i)])
        self.give_back()
        return is_lower or self.rcache.used_blocks < num_blocks

    @property
    def wanted_non_model_bytes(self) -> int:
        """What a step takes beside the chunks, where that did not fit even beside the smallest rCache: the plan should
        be made anew with it, between steps. 0: there was no such step under this plan."""
        return self.iterations.growth.wanted_non_model_bytes

    @property
    def peak_non_model_bytes_seen(self) -> int:
        """The most that a step has taken beside the chunks so far: at least so much, as far as that is known without
        sampling it."""
        return self.iterations.growth.peak_non_model_bytes_seen

    # Between steps

    @contextmanager
    def meeting(self, meeting: Meeting, payload: Sequence[int] = ()) -> Iterator[list[list[int]]]:
        """Have the engine inside, for what a call between steps does, together with all ranks; updates under way are
        waited for.

        Returns:
            Every rank's payload, in rank order.

        Raises:
            StateError: Inside forward or backward.
            DivergenceError: If the ranks are at different points.
        """
        use = self.turn.block if meeting.has_user_code else self.turn.long_call
        with use(meeting.call.words):
            with self.telling():
                self.prepare_meeting(meeting)
                if meeting.is_of_states:
                    self.reducer.withdraw()
                self.synchronize()
            yield self.active.agreement.meet(meeting, payload) if self.comm.world_size > 1 else [list(payload)]

    def come_to_message(self, call: Call) -> None:
        """A message between all ranks comes next, of which the engine knows no more. Inside forward and backward wait
        until all have come to it, serving those that need chunks before.

        Args:
            call: Which message, for errors.

        Raises:
            DivergenceError: Another rank comes to something else.
            PeerLostError: If one is gone.
        """
        if self.is_computing and self.active.needs_agreement and self.turn.is_mine():
            with deferred(), self.telling():
                self.active.agreement.meet(Meeting.MESSAGE, call=call)

    def end_forwards(self, *, is_message_next: bool = False) -> None:
        """This rank has no more batches to evaluate: serve those that have, until none has. Collective.

        Args:
            is_message_next: It may have more, and comes to a message between two of them, for which all ranks wait.

        Raises:
            DivergenceError: Another rank comes to something else.
            PeerLostError: If one is gone.
        """
        with self.telling():
            self.forwards.end()
        if self.needs_meetings:
            with self.meeting(Meeting.BETWEEN_FORWARDS if is_message_next else Meeting.NO_MORE_FORWARDS):
                pass

    @property
    def needs_meetings(self) -> bool:
        """Whether ranks meet in forwards; the same on all."""
        return self.active.needs_agreement or self.wire.meets_in_forwards

    def prepare_meeting(self, meeting: Meeting) -> None:
        """Bring what users wrote to where the meeting's call finds it.

        Raises:
            StateError: Inside forward or backward.
        """
        self.phases.check_open()
        with deferred():
            self.leave_stale()
            self.phases.check_idle(meeting.call.words, "call it when that has returned")
            self.writes.absorb()
            if meeting is not Meeting.GRADIENTS:  # which looks at one of them
                self.gradients.absorb()

    def synchronize(self) -> None:
        """Make the host wait until all updates and transfers are over: every shard holds what it shall.

        Raises:
            StateError: An update has failed, or has begun inside backward and waits for its step.
            StorageError: States on a disk are lost.
        """
        self.check_whole()
        with self.telling():
            self.store.settle_all()
            self.reducer.landing.finish()
        self.device.synchronize()  # what the device writes to host shards, or reads of them

    def check_whole(self) -> None:
        """Raises `StateError` between the begin of updates inside backward and their step."""
        if self.reducer.begun:
            self.phases.check_open()  # after a failure, no error shall say how to go on
            raise StateError(
                "updates have begun inside backward, and no step has followed: parameters and optimizer states are not "
                "whole. Look at them after the step, or use update_timing='behind_forward'"
            )

    def replan(self, plan: Plan, most_kept_bytes: int = 0) -> None:
        """Move to another placement of the same chunks, without interruption. Collective; between steps, with no
        gradients pending.

        Args:
            most_kept_bytes: How much of the host memory that chunks leave stays for the next move (`HostMemory.keep`).

        Raises:
            PlanError: If the layout differs, the ranks' plans do, or compiled modules cannot run under it.
            StateError: If there are gradients that no step has used yet.
            StorageError: If the disk has no room for the states that shall come there, beside those that are there.
        """
        with deferred(), self.meeting(Meeting.REPLAN):
            self._replan(plan, most_kept_bytes)

    def take_forecast(self, plan: Plan) -> None:
        """Have the plan in force say what is expected of it as `plan` does, which is the same otherwise."""
        self.active.plan = plan

    def _replan(self, plan: Plan, most_kept_bytes: int) -> None:
        check_layout(self.plan, plan)
        check_same_on_all_ranks(self.comm, plan)
        self.forwards.check_addresses(plan)
        for known in self.steps.optimizers:
            known.states.check_plan(plan)
        if self.reducer.used:
            raise StateError(
                "the placement cannot change while gradients wait for a step: call step() or zero_grad() first"
            )
        earlier = self.store.states
        states = self._open_states(plan, earlier)
        is_another = earlier is not None and earlier is not states
        if earlier is not None and is_another:
            earlier.release_buffers()  # parts are moved one by one, while both placements are there
        self.active.residency.release(list(self.rcache.resident_ids))
        self.iterations.end()
        self.give_back()  # what lasts shall not come to lie in the gaps that activations have left
        self.activations.rest()  # nor wait for host memory that no step uses now
        try:
            for known in self.steps.optimizers:
                known.prepare_move()
            self.steps.hand_over_states(plan)
            before, self.store = self.store, self._new_store(plan, states)
            others = [follow for reference in self._followers if (follow := reference()) is not None]
            followers = [*(states.follow for states in self.steps.optimizers.states), *others]
            move_chunks(self, plan, before, followers, most_kept_bytes)
            self.device.synchronize()  # uploads still read the shards that go now
            self._adopt(ActivePlan(self, plan, self.store, self.active))
            for known in self.steps.optimizers:
                known.finish_move()
        except BaseException as error:
            if states is not None and states is not self.store.states:
                states.close()
            self.give_up(f"half way to another placement ({type(error).__name__})", error=error)
            raise
        finally:
            if earlier is not None and is_another:
                earlier.close()
        self.give_back()

    def give_up(self, where: str, cure: str = "", error: BaseException | None = None) -> None:
        """What the engine holds is not whole any more: everything that needs it raises from here on, on all ranks.

        Args:
            where: At what it failed, for the message.
            cure: How to go on from a checkpoint, after a comma; beside the cure of the error.
            error: Why, if something has failed.
        """
        why = (
            f"this ElixirModule failed {where}, so its parameters and optimizer states are not whole any more: start"
            f" again from a checkpoint{_cure_of(error)}{cure}"
        )
        self.phases.close(why)
        self.comm.leave(error or StateError(why))

    def tell_of(self, error: BaseException) -> None:
        """Have the other ranks raise what ends this one, which they may wait for. What the caller may get over is not
        told: the others wait until then. An error that is about precision says so from here on."""
        self.explain(error)
        if isinstance(error, StorageError):
            self.comm.leave(error)

    def explain(self, error: BaseException, *, is_between_steps: bool = False) -> None:
        """Have an error that is about precision say so.

        Args:
            error: With its traceback.
            is_between_steps: Whether it was raised outside of forward and backward.
        """
        if DTYPE_BYTES[self.plan.compute_dtype] == 2:
            ignored = {p.fqn for p in self.plan.ignored}
            has_master = self.precision.master is not None
            explain_dtype_clash(
                error, self.chunks, self.module, ignored, has_master=has_master, is_between_steps=is_between_steps
            )

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell of errors inside: see `tell_of`."""
        try:
            yield
        except BaseException as error:
            self.tell_of(error)
            raise

    def give_back(self) -> None:
        """Return all device memory that is cached and not in use."""
        self.device.give_back()
        release_cached_memory(self.device.torch_device)

    def own_shard(self, chunk: Chunk) -> Tensor:
        """This rank's up-to-date values of a chunk, 1-D: what an optimizer updates. Not a copy."""
        return own_values(self.store, chunk, self.groups)

    def is_cast_from_master(self, spec: ChunkSpec) -> bool:
        """See `ShardStore.is_cast_from_master`."""
        return self.store.is_cast_from_master(spec, self.precision.master_of(spec))

    # Sampling, statistics, end

    def device_bytes(self) -> int:
        """Device memory that replicas, gradient blocks and shards take now."""
        held = self.held_bytes()
        return sum(n for key, n in held.items() if not key.startswith(("cpu_", "nvme_")))

    def host_bytes(self) -> int:
        """Host memory that shards, states and buffers take now."""
        return sum(nbytes for kind, nbytes in self.held_bytes().items() if kind.startswith("cpu_"))

    def on_held_bytes(self, holder: Callable[[], dict[str, int]]) -> None:
        """Have `held_bytes` include what `holder`, a bound method, reports, for as long as its object lives."""
        self._holders = [known for known in self._holders if known() is not None]
        self._holders.append(weakref.WeakMethod(holder))

    def on_move(self, follow: Callable[[Chunk], None]) -> None:
        """Have `follow`, a bound method, take what it keeps of a chunk to where the plan has its states now, right
        after these have come there, for as long as its object lives."""
        self._followers = [known for known in self._followers if known() is not None]
        self._followers.append(weakref.WeakMethod(follow))

    def held_bytes(self) -> dict[str, int]:
        """Bytes by tier and kind; `replica` and `grad_block` are on the compute device."""
        held = self.store.bytes_by_kind()
        for reference in self._holders:
            holder = reference()
            if holder is not None:
                for key, nbytes in holder().items():
                    held[key] = held.get(key, 0) + nbytes
        if self.ignored.nbytes:
            held["ignored"] = self.ignored.nbytes
        held["replica"] = sum(c.device_bytes for c in self.chunks)
        held["grad_block"] = self.reducer.block_bytes_held()
        buffers = self.active.fetcher.held_bytes()
        beside = {
            "cpu_grad_staging": self.reducer.landing.staging_bytes_held(),
            "cpu_param_buffer": buffers,
            "cpu_ahead": self.host_memory.bytes_begun(),
        }
        return held | {kind: nbytes for kind, nbytes in beside.items() if nbytes}

    def stats(self) -> Stats:
        """Counters since the last reset, and bytes held now."""
        return take_stats(
            self.rcache, self.moved, self.held_bytes(), self.last_seconds, self.steps.num_redone, self.traffic
        )

    def reset_stats(self) -> None:
        self.rcache.reset_counters()
        self.iterations.traces.forget_misses()
        self.steps.reset_counters()
        self.moved.reset()
        self.traffic.reset()

    def rest(self) -> None:
        """End all threads when what they do is done; the next task starts them again. Raises nothing."""
        if not self._is_freed:
            self.reducer.landing.rest()
            self.active.fetcher.rest()
            self.store.rest()
            self.activations.rest()
            self.host_memory.let_go()

    def close(self) -> None:
        """Remove all hooks and free replicas and shards; the parameters raise when they are used.

        Raises:
            StateError: Another thread trains.
        """
        with self.turn.call("close()"):
            if not self._is_freed:
                self._is_freed = True
                self._close()

    def _close(self) -> None:
        self.reducer.withdraw()
        with suppress(ElixirError):  # a failed update has nothing left to lose
            self.store.settle_all()
        for chunk in self.chunks:  # nothing shall be copied to a replica that is gone
            if chunk.ready is not None:
                with suppress(Exception):
                    chunk.ready.synchronize()
                chunk.ready = None
        self.forwards.abort()
        self.saved.leave()
        self.device.synchronize()
        self._hooks.remove()
        self.activations.close()
        bind_peers(self.module, None)
        self.wire.close()
        self.phases.close()
        self.interception.guard_all()
        for chunk in self.chunks:
            chunk.close()
        self.reducer.clear()
        self.reducer.landing.close()
        self.active.fetcher.close()
        self.interception.written.clear()
        self.store.close()
        self.host_memory.let_go()
        self.groups.close()

    def whole_values(self, on_all_ranks: bool = True, *, has_met: bool = False) -> dict[str, Tensor]:
        """Whole parameters on the CPU, in the model's own dtypes, by FQN. Collective.

        Args:
            has_met: Whether the ranks have come together for it.
        """
        with self.turn.long_call(Meeting.STATE_DICT.call.words):
            self.phases.check_open()
            self.check_whole()
            if self.phase is Phase.IDLE:
                self.writes.absorb()
            if self.comm.world_size > 1 and not has_met:
                self.active.agreement.meet(Meeting.STATE_DICT)
            return whole_values(self, on_all_ranks=on_all_ranks)

    @property
    def is_lost(self) -> bool:
        """Whether nothing can be trained on or saved any more. Waits for nothing."""
        return self.is_closed or self.store.has_failed

    def sample_activations(self, is_on: bool) -> None:
        """Watch the device's memory at every access of forward and backward (slow: for a warm-up step)."""
        with self.turn.call("sample_activations()"):
            self.iterations.watch(memory=is_on)

    def sample_times(self, is_on: bool) -> None:
        """Measure compute and waiting at every access of training iterations. Costs some 20 us for each."""
        with self.turn.call("sample_times()"):
            self.iterations.watch(times=is_on)

    @property
    def peak_non_model_bytes(self) -> int:
        """Device bytes beyond the engine's own at the peak since memory began to be watched."""
        return self.iterations.sampler.peak_non_model_bytes

    @property
    def last_seconds(self) -> StepSeconds | None:
        """Of the last forward and backward that was timed. Waits for its end."""
        return self.iterations.sampler.seconds()

    @property
    def all_seconds(self) -> StepSeconds:
        """Of all forwards and backwards that were ever timed, added up. Waits for the end of the last one."""
        return self.iterations.sampler.all_seconds()

    def step_profile(self) -> StepProfile | None:
        """The last sampled training iteration, up to the step or the next forward; None before there was one. Times or
        bytes that it has not got itself are those of an earlier one of the same accesses, or 0. Where everything is
        resident accesses are of nothing, and intervals end where a chunk's gradients begin and end. Waits for its end.
        It is of the plan's own chunks, as those are that plans place: ignored parameters are not in it."""
        profile = self.iterations.sampler.profile()
        return None if profile is None else profile.of_first_chunks(len(self.plan.chunks))

    @property
    def seconds_between(self) -> float | None:
        """See `StepSampler.seconds_between`."""
        return self.iterations.sampler.seconds_between()

    def home_of(self, tensor: Tensor) -> tuple[Chunk, int] | None:
        """The chunk and member index of a managed parameter; None for any other tensor."""
        return self._home.get(id(tensor))


def _cure_of(error: BaseException | None) -> str:
    """What to change when a run begins again that this has ended."""
    if isinstance(error, torch.OutOfMemoryError):
        return ", with a lower gpu_memory_limit"
    if isinstance(error, StorageError):
        return ", with a folder for offloading (nvme_offload_dir) that works and has room"
    return ""


def _check_unmanaged(module: nn.Module) -> None:
    managed = [name for name, p in module.named_parameters() if getattr(type(p), "is_managed_by_elixir", False)]
    if managed:
        raise StateError(
            f"{', '.join(managed[:3])} are managed by lightning_elixir already, in another module that was fitted, set"
            " up or wrapped with them: go on with that one, or take copies, copy.deepcopy(model) or of the part that is"
            " shared, which are plain and have its values"
        )
