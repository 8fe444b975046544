"""Builds the runtime from (module, plan) and carries it through its phases."""

from __future__ import annotations

import enum
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_elixir.core.comm import Comm
from lightning_elixir.core.device import Device, beside_dispatch_modes, release_cached_memory
from lightning_elixir.core.signals import arm, deferred, disarm, num_interruptions
from lightning_elixir.errors import ElixirError, StateError, StorageError
from lightning_elixir.plan.memory import has_params_on_nvme, param_buffers
from lightning_elixir.plan.profile import StepProfile
from lightning_elixir.plan.rcache import RCache
from lightning_elixir.plan.types import AccessTrace, Drop, Plan, Tier, UpdateTiming
from lightning_elixir.runtime.agreement import Agreement, Meeting
from lightning_elixir.runtime.attached import AttachedOptimizer, AttachedOptimizers
from lightning_elixir.runtime.build import Builder, Precision, check_same_on_all_ranks, states_on_nvme
from lightning_elixir.runtime.chunk import Chunk, ChunkState
from lightning_elixir.runtime.chunk_optimizers import hand_over
from lightning_elixir.runtime.dtype_clash import explain_dtype_clash
from lightning_elixir.runtime.fetcher import Fetcher, TransferBytes
from lightning_elixir.runtime.gradients import Change, Gradients
from lightning_elixir.runtime.hooks import Hooks, SavedTensors, ThreadHooks, innermost_pack
from lightning_elixir.runtime.interception import Interception
from lightning_elixir.runtime.iterations import Iterations
from lightning_elixir.runtime.param_reads import ParamReads
from lightning_elixir.runtime.reducer import Reducer
from lightning_elixir.runtime.released import tensors_in
from lightning_elixir.runtime.replan import check_layout, move_chunks
from lightning_elixir.runtime.residency import Residency
from lightning_elixir.runtime.sampling import StepSeconds
from lightning_elixir.runtime.stats import Stats, take_stats
from lightning_elixir.runtime.transforms import check_untransformed, explained
from lightning_elixir.runtime.turns import Held, Turn
from lightning_elixir.runtime.unreadable import serve_under_modes
from lightning_elixir.runtime.whole import own_values, whole_values
from lightning_elixir.storage.nvme import DiskOptions, StateFile, StateTraffic, open_state_file
from lightning_elixir.storage.shards import ShardStore


class Phase(enum.Enum):
    """What the program is doing. Between forward and backward, and between steps, the engine is IDLE."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    CLOSED = "closed"


@dataclass(slots=True)
class _Frame:
    """A module whose forward runs."""

    module: nn.Module
    ids: tuple[int, ...] = ()
    covered: frozenset[int] = frozenset()
    """Modules (by id) for whose parameters nothing is left to be done inside."""
    depth: int = 0
    """How often the module's forward runs inside itself."""
    is_pinned: bool = False
    hooks: ThreadHooks | None = None
    graph_task: int = -1
    """The backward of autograd's in which it is recomputed; -1: none."""
    innermost: object = False
    """What packs the tensors that autograd saves inside; False where it saved none when the forward began."""


class _Span:
    """A forward or a backward, for `with`. Signals are handled inside, but not while it begins and ends; one that comes
    after the block, where this has no say yet, leaves it open: `Engine.leave_interrupted` closes it then.

    Args:
        begin: Returns whether it is an outermost one; others are left alone.
        end: Called after it.
        abort: Called instead if anything was raised.
        tell: Called then with what the block has raised.
    """

    def __init__(
        self,
        begin: Callable[[], bool],
        end: Callable[[], None],
        abort: Callable[[], None],
        tell: Callable[[BaseException], None],
    ) -> None:
        self._begin = begin
        self._end = end
        self._abort = abort
        self._tell = tell
        self._is_open = False

    def __enter__(self) -> None:
        try:
            with deferred():
                self._is_open = self._begin()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with deferred():
            is_open, self._is_open = self._is_open, False
            if not is_open:
                return
            if error is not None:
                self._abort()
                self._tell(error)
                better = explained(error)
                if better is not None:
                    raise better from error
                return
            try:
                self._end()
            except Exception:
                raise
            except BaseException:  # a second Ctrl-C
                self._abort()
                raise


class _Packing:
    """See `Engine.packing`."""

    def __init__(self, enter: Callable[[], ThreadHooks | None]) -> None:
        self._enter = enter
        self._hooks: ThreadHooks | None = None

    def __enter__(self) -> None:
        try:
            with deferred():
                self._hooks = self._enter()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        with deferred():
            hooks, self._hooks = self._hooks, None
            if hooks is not None:
                hooks.__exit__()


class _Access(NamedTuple):
    """What a module's forward needs."""

    ids: tuple[int, ...]
    covered: frozenset[int]
    """Modules (by id) that need no more than that, itself and below."""


class Engine:
    """Keeps a module's parameters in chunks and brings them to the compute device when they are needed.

    Args:
        module: The model. Its parameters are bound to chunks for good.
        plan: What to obey.
        device: Where to compute.
        comm: The ranks that share the chunks.
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
        comm.connect(max((c.nbytes for c in plan.chunks), default=0))
        self.module = module
        self.device = device
        self.comm = comm
        self.precision = precision
        self.moved = TransferBytes()
        self.traffic = StateTraffic()
        self._disk = disk or DiskOptions()
        self.redone_steps = 0
        """Since the last reset: see `Stats`."""
        self.phase = Phase.IDLE
        self.turn = Turn(is_shared=comm.world_size > 1)
        self._held: Held | None = None  # for the forward or backward that runs
        self._is_freed = False
        self._why_closed = "this ElixirModule was closed: its parameters have no values any more"
        self._reduce_dtype = reduce_dtype if comm.world_size > 1 else None  # one rank has nothing to reduce
        self._has_prefetch = prefetch
        self._agreement = Agreement(
            comm,
            lambda ids, mine: self.residency.join(ids, mine),
            lambda: self.reducer.num_ready,
            lambda count: self.reducer.issue_until(count),
            lambda: self.is_computing,
        )
        builder = Builder(module, plan, device, comm)
        states = self._open_states(plan)
        store = self._new_store(plan, states)
        try:
            self.chunks = builder.build(store, precision)
        except BaseException:
            store.close()  # with it the file
            raise
        self._home = {id(p): (c, i) for c in self.chunks for i, p in enumerate(c.parameters)}
        self.interception = Interception(self, self.chunks)
        self.gradients = Gradients(self)
        self._saved = SavedTensors({c.storage_key: c for c in self.chunks}, self._need_in_backward)
        self._accesses = _accesses_by_module(module, self._home)
        # Region and iteration
        self._is_bare_backward = False  # begun by autograd, which does not tell of errors
        self._frames: list[_Frame] = []
        self._is_implicit = False  # the region was opened by a module hook, not by its owner
        self._error_at_entry: BaseException | None = None
        self._is_armed = False  # see `core.signals.arm`
        self._num_interruptions = 0  # when the forward or backward began
        self._region_hooks: ThreadHooks | None = None
        self._raw_pins: list[int] = []
        self._versions: list[int] = []
        self.iterations = Iterations(device, self.chunks, self.device_bytes)
        self._touched: set[int] = set()
        self._aliased_ids: list[int] = []  # on any rank, at the beginning of the step
        self._is_order_known = False
        self._optimizers = AttachedOptimizers()
        self._dropped_by_others: set[tuple[int, int]] = set()  # gradients that one's step dropped and another's needs
        self._holders: list[weakref.WeakMethod[Callable[[], dict[str, int]]]] = []
        self._statistics = [m for m in module.modules() if getattr(m, "track_running_stats", False)]
        self._has_own_statistics = False
        self._watched = [m for m in module.modules() if any(True for _ in m.parameters())]
        # Met in the first iterations: below a module that brings all they need, and by themselves.
        self._covered_ids: set[int] = set()
        self._entered_ids: set[int] = set()
        self._light: list[nn.Module] = []  # met in the first way only
        self.on_held_bytes(self.interception.written.held_bytes)
        self._hooks = Hooks(self._watched, [c for c in self.chunks if c.spec.requires_grad], self)
        self._adopt(plan, store)

    def _adopt(self, plan: Plan, store: ShardStore) -> None:
        """Take up a plan whose chunks and shards are in place."""
        self.plan = plan
        self.store = store
        self._cost = {c.id: plan.blocks_of(c.id) for c in plan.chunks if not c.is_persistent}
        self._needs_agreement = self.comm.world_size > 1 and bool(self._cost)
        # Whether a forward meets parameters that may not be there yet.
        self._is_watching = bool(self._cost) or (
            plan.update_timing is not UpdateTiming.AFTER_BACKWARD
            and any(c.requires_grad and c.optim_tier is not Tier.GPU for c in plan.chunks)
        )
        depth = plan.prefetch_depth if self._has_prefetch else 0
        self.rcache = RCache(self._cost, plan.rcache_blocks, depth)
        before: Fetcher | None = getattr(self, "fetcher", None)
        if before is not None:
            before.close()
        on_nvme = (c.nbytes // plan.world_size for c in plan.chunks if has_params_on_nvme(c))
        reads = ParamReads(self.device, *param_buffers(on_nvme))
        self.fetcher: Fetcher = Fetcher(self.device, self.comm, store, plan.is_storage_distributed, self.moved, reads)
        self.residency = Residency(
            plan,
            self.chunks,
            self.rcache,
            self.fetcher,
            self.interception,
            self._agreement if self._needs_agreement else None,
            self._touched,
            self.iterations.relieve,
        )
        trainable = [c.id for c in reversed(plan.chunks) if c.requires_grad]
        order = self.reducer.order if self._is_order_known else trainable
        earlier: Reducer | None = getattr(self, "reducer", None)
        self.reducer: Reducer = Reducer(
            self.chunks,
            order,
            self.device,
            self.comm,
            store,
            self.moved,
            self._reduce_dtype,
            plan.block_bytes,
            self._agreement.announce_ready,
            self.iterations.sampler.waiting,
        )
        if earlier is not None:
            self.reducer.take_over(earlier)
        grad_itemsize = None if self._reduce_dtype is None else self._reduce_dtype.itemsize
        self.iterations.adopt(plan, self.rcache, self.residency, self.reducer, store, grad_itemsize)
        self._watch_forwards()

    def _leave_covered(self) -> None:
        """Once the order of accesses is known, modules that were only met below others, which bring all that they need,
        keep but one hook: every other costs some microseconds a call."""
        covered = self._covered_ids - self._entered_ids
        if covered and self._is_watching and "train" in self.traces:
            self._covered_ids.clear()
            self._light += [m for m in self._watched if id(m) in covered]
            self._watched = [m for m in self._watched if id(m) not in covered]
            self._watch_forwards()

    def _watch_forwards(self) -> None:
        self._watched += [m for m in self._light if id(m) in self._entered_ids]  # they have turned out otherwise
        self._light = [m for m in self._light if id(m) not in self._entered_ids]
        if self._is_watching:
            self._hooks.watch_forwards(self._watched, self._light)
        else:
            self._hooks.watch_forwards(self._entrances())

    def _open_states(self, plan: Plan, kept: StateFile | None = None) -> StateFile | None:
        """Room on the disk for what the plan has there. Collective.

        Args:
            kept: What there is already; given back if it has room for all, each chunk's where it is.

        Raises:
            PlanError: There is no such back end.
            StorageError: The disk cannot hold it; on every rank, if it is so on one.
        """
        specs = states_on_nvme(plan, self.precision)
        if not specs:
            return None
        if kept is not None and kept.holds(specs):
            return kept
        file, problem = None, None
        try:
            file = open_state_file(specs, self._disk, self.comm.rank, self.traffic)
        except Exception as error:
            problem = error
        problems = self.comm.exchange_objects(None if problem is None else str(problem))
        if any(problems):
            if file is not None:
                file.close()
            if problem is not None:
                raise problem
            rank, text = next((rank, text) for rank, text in enumerate(problems) if text)
            raise StorageError(f"rank {rank} cannot keep optimizer states on NVMe: {text}")
        return file

    def _new_store(self, plan: Plan, states: StateFile | None) -> ShardStore:
        return ShardStore(
            self.device,
            self.comm.world_size,
            plan.is_storage_distributed,
            plan.grad_reuses_compute_shard,
            plan.has_spare_states,
            states,
        )

    def _entrances(self) -> list[nn.Module]:
        """Where everything is resident no layer needs a hook: only what users call by themselves, the model and the
        models it is made of, so that its parameters are plain inside."""
        return [m for m in (self.module, *self.module.children()) if any(True for _ in m.parameters())]

    # Regions: the forward of the model, or of any part of it that the user calls

    def region(self) -> AbstractContextManager[None]:
        """Run a forward inside. Nested regions, and forwards recomputed in backward, belong to the outer one.

        Raises:
            StateError: If a parameter was written in place inside.
        """
        return _Span(self._enter_region, self._end_region, self._abort_region, self.tell_of)

    def _enter_region(self) -> bool:
        with self._turn_of_forward():
            self._leave_stale()
            if self.phase is not Phase.IDLE:
                self.check_open()
                return False
            self._begin_region()
            return True

    def watch_outputs(self, output: Any) -> None:
        """Notice a backward that starts from `output` without the engine being told."""
        if torch.is_grad_enabled():
            for tensor in tensors_in((output,)):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._on_outermost_backward)

    def enter_module(self, module: nn.Module, inputs: Any = None) -> None:
        if self.turn.is_mine():
            self._enter_next(module)
        else:
            with self._turn_of_forward():  # until it has begun, which takes it for itself
                self._enter_next(module)

    def _enter_next(self, module: nn.Module) -> None:
        if num_interruptions() != self._num_interruptions:
            self.leave_interrupted()
        if self._frames:
            above = self._frames[-1]
            if id(module) in above.covered and self._saves_through_us():
                if above.module is module:
                    above.depth += 1
                else:
                    self._covered_ids.add(id(module))
                return
        with deferred():
            self._enter_module(module)

    def _enter_module(self, module: nn.Module) -> None:
        if self.phase is Phase.IDLE and not self._frames:
            self._error_at_entry = sys.exc_info()[1]
            self._begin_region()
            self._is_implicit = True
        self._entered_ids.add(id(module))
        frame = _Frame(module, graph_task=torch._C._current_graph_task_id())
        self._frames.append(frame)
        access = self._accesses.get(id(module))
        if access is not None:
            frame.ids, frame.covered = access
            self.acquire(frame.ids, pin=True)
            frame.is_pinned = True
        frame.hooks = self._enter_saved_hooks()
        if frame.covered and torch.is_grad_enabled():
            frame.innermost = innermost_pack()

    def enter_covered(self, module: nn.Module, inputs: Any = None) -> None:
        """A module's forward that so far ran below others only. Where it does not (it is called by itself, or under the
        user's hooks for saved tensors), it is treated as they are from here on."""
        if self._frames and self.turn.is_mine():
            above = self._frames[-1]
            if id(module) in above.covered and (innermost_pack() is above.innermost or self._saves_through_us()):
                if above.module is module:
                    above.depth += 1
                return
        if id(module) not in self._entered_ids:
            self._entered_ids.add(id(module))
            self._hooks.watch_exit(module)  # in time for this very call
        self.enter_module(module)

    def exit_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._frames or self._frames[-1].module is not module or not self.turn.is_mine():
            return  # a module above covers it, or the region was aborted, or it has been refused
        frame = self._frames[-1]
        if frame.depth:
            frame.depth -= 1
            return
        with deferred():
            self._exit_module(frame, output)

    def _exit_module(self, frame: _Frame, output: Any) -> None:
        self._frames.pop()
        if frame.hooks is not None:
            frame.hooks.__exit__()
        if frame.is_pinned:
            self.drop(frame.ids)
        if self._is_implicit and not self._frames:
            self._is_implicit = False
            error = sys.exc_info()[1]
            if error is not None and error is not self._error_at_entry:
                self._abort_region()
                self.tell_of(error)
            elif error is not self._error_at_entry:
                self._abort_region()
            else:
                self._end_region()
                self.watch_outputs(output)

    def _begin_region(self) -> None:
        self.check_open()
        self._leave_hooks()
        if self._cost:
            check_untransformed()
        self.interception.forget_state_dict()
        self.absorb_touched()
        if self._has_own_statistics:
            self._share_statistics()
        self._has_own_statistics = self.comm.world_size > 1 and bool(self._statistics) and torch.is_grad_enabled()
        self.iterations.begin(is_training=torch.is_grad_enabled())
        self._enter_phase(Phase.FORWARD)
        try:
            self._region_hooks = self._enter_saved_hooks()
            if torch.is_grad_enabled():
                self._versions = self.interception.versions()
            self._open_resident()
        except BaseException as error:
            self._abort_region()
            self.tell_of(error)
            raise

    def _share_statistics(self) -> None:
        """Running statistics as DDP has them: those of rank 0, after a forward with gradients that changed them."""
        self._agreement.meet(Meeting.BUFFERS)
        for module in self._statistics:
            for buffer in module._buffers.values():
                if buffer is not None:
                    self.comm.broadcast_from_first(buffer)

    def _open_resident(self) -> None:
        """Where everything is there, parameters are plain in forward and backward, and nothing is intercepted."""
        if not self._is_watching:
            with self.iterations.sampler.waiting():
                for chunk in self.chunks:
                    chunk.wait_ready()
                    self.interception.make_plain(chunk)

    def _end_region(self) -> None:
        self._close_region()
        if torch.is_grad_enabled():  # else the versions are those of an earlier region
            self.interception.check_unwritten(self._versions, "forward")
        if self._needs_agreement:
            with self.iterations.sampler.waiting():
                self._agreement.meet(Meeting.FORWARD_END)
        self.iterations.end_forward()

    def _abort_region(self) -> None:
        with deferred():
            self._clear_frames()
            self._is_implicit = False
            self.rcache.unpin_all()
            self._close_region()
            self.iterations.abandon()

    def _leave_stale(self) -> None:
        """As `leave_interrupted`, where the model as a whole, a backward or a step begins. Of what is open then, more
        is known to be over: a region that a module hook has opened (what has passed by the module's exit was no
        `Exception`, for which torch calls no hooks), and a backward that the engine was not told of and that does not
        run."""
        self.leave_interrupted()
        if self.phase is Phase.FORWARD and self._is_implicit:
            self._abort_region()
        elif self.phase is Phase.BACKWARD and self._is_bare_backward and torch._C._current_graph_task_id() == -1:
            self.abort_backward()

    def _leave_hooks(self) -> None:
        if self.phase is not Phase.FORWARD and torch._C._current_graph_task_id() == -1:
            self._saved.leave()

    def leave_interrupted(self) -> None:
        """End a forward or a backward that a signal has ended already, where nothing was told of it."""
        if self.is_computing and num_interruptions() != self._num_interruptions:
            if self.phase is Phase.FORWARD:
                self._abort_region()
            elif torch._C._current_graph_task_id() == -1:
                self.abort_backward()

    def _enter_phase(self, phase: Phase) -> None:
        if self._held is None:
            held = self._turn_of_forward() if phase is Phase.FORWARD else self.turn.phase("a backward")
            held.__enter__()
            self._held = held
        self._num_interruptions = num_interruptions()
        self._is_armed = self._is_armed or arm()
        self.phase = phase

    def _turn_of_forward(self) -> Held:
        return self.turn.phase("a forward", is_of_trainer=False, may_be_of_trainer=torch.is_grad_enabled())

    def _close_region(self) -> None:
        hooks, self._region_hooks = self._region_hooks, None
        if hooks is not None:
            hooks.__exit__()
        self._unpin_raw()
        self.interception.guard_all()
        self._become_idle()

    def _become_idle(self) -> None:
        if self._is_armed and disarm():
            self._is_armed = False
        if self.phase is not Phase.CLOSED:  # nothing opens an engine again that has failed
            self.phase = Phase.IDLE
        held, self._held = self._held, None
        if held is not None:
            held.__exit__()

    def _clear_frames(self) -> None:
        """After an exception that may have passed by the modules' exits."""
        while self._frames:
            frame = self._frames.pop()
            # Those of a recomputation are gone already: an exception that leaves autograd's backward takes them along.
            if frame.hooks is not None and frame.graph_task == torch._C._current_graph_task_id():
                frame.hooks.__exit__()

    def _enter_saved_hooks(self) -> ThreadHooks | None:
        """Have autograd save managed tensors through us from now on; None if it does already, or need not."""
        if not self._cost or not torch.is_grad_enabled():
            return None
        hooks = self._saved.context()
        if hooks is not None:
            hooks.__enter__()
        return hooks

    def _saves_through_us(self) -> bool:
        """Whether autograd saves managed tensors through us, or need not."""
        return not self._cost or not torch.is_grad_enabled() or self._saved.is_innermost()

    def packing(self) -> AbstractContextManager[None]:
        """Saved tensors of what runs inside keep no replica alive, and find it again in backward."""
        return _Packing(self._enter_saved_hooks)

    # Backward

    def backward(self) -> AbstractContextManager[None]:
        """Run the backward of a loss inside; the gradients are reduced at the end. Collective."""
        return _Span(self._enter_backward, self.end_backward, self.abort_backward, self.tell_of)

    def _enter_backward(self) -> bool:
        with self.turn.phase("a backward"):
            self._leave_stale()
            if self.phase is Phase.BACKWARD:  # nested: the outer one ends it
                return False
            self._begin_backward()
            return True

    def begin_backward(self) -> None:
        """Call before the backward of a loss."""
        with self.turn.phase("a backward"):
            self._begin_backward()

    def _begin_backward(self) -> None:
        self._leave_stale()
        self.check_open()
        if self.phase is not Phase.IDLE:
            raise StateError(f"backward cannot start in phase {self.phase.value}")
        self._leave_hooks()
        self.gradients.absorb()
        self.gradients.forget_all()
        self.reducer.withdraw()  # with gradients that more are added to
        self._check_late({*self.reducer.begun_now()})
        # What was read before backward was not written; what is still kept then may be, so its update must not begin.
        self.absorb_touched()
        self.interception.check_unwritten(self._versions, "forward and backward")
        self.iterations.begin_backward()
        self._is_bare_backward = False
        self._enter_phase(Phase.BACKWARD)
        try:
            self._open_resident()
        except BaseException:
            self.abort_backward()
            raise

    def end_backward(self) -> None:
        """Call when the outermost backward has returned: reduces what is left. Collective."""
        if self.phase is not Phase.BACKWARD:
            return
        with self.telling():
            self._end_backward()

    def _end_backward(self) -> None:
        reducer = self.reducer
        waiting, late, begun = reducer.waiting_ids(), reducer.late_ids(), reducer.begun_now()
        self.iterations.end_backward(waiting)
        self._close_backward()
        if self.comm.world_size > 1:
            message = [len(waiting), *waiting, len(late), *late, *begun]
            parts = [_split(row) for row in self._agreement.meet(Meeting.BACKWARD_END, message)]
            # What was waiting when this rank came here may have been reduced while it served the others.
            waiting, late, begun = ([i for part in parts for i in part[kind]] for kind in range(3))
        self._check_late({*late} & {*begun})
        order = reducer.finish_order()
        reducer.flush(waiting, late)
        if not self._is_order_known:
            self._is_order_known = True
            reducer.set_order(self.comm.exchange_objects(order)[0])
        self.interception.check_unwritten(self._versions, "forward and backward")

    def _check_late(self, ids: set[int]) -> None:
        """Gradients for chunks whose update has begun, with less; known to all ranks."""
        if ids:
            self.give_up("in a backward that went on after updates had begun")
            raise StateError(
                f"a parameter of {self.chunks[min(ids)].spec} got another gradient when its optimizer step had begun: "
                "its values are not whole any more. Something runs backward several times (reentrant activation "
                "checkpointing around a shared layer): use use_reentrant=False, or update_timing='behind_forward'"
            )

    def abort_backward(self) -> None:
        """Call when backward raised: its gradients are dropped. Those of earlier backwards stay if none of its have
        been added to them yet; otherwise they are lost, and `step` raises until `zero_grad` has dropped the rest."""
        with deferred():
            self._clear_frames()
            self._release_pins()
            try:
                self.reducer.abandon()
                self.iterations.abandon()
            except Exception:
                self._become_idle()
                raise
            self._become_idle()  # last: after a second Ctrl-C, whoever comes next does all of this again

    def _close_backward(self) -> None:
        self._release_pins()
        self._become_idle()

    def _release_pins(self) -> None:
        self.rcache.unpin_all()
        self._unpin_raw()
        self.interception.guard_all()

    def _on_outermost_backward(self, grad: Tensor) -> None:
        """A bare `loss.backward()` has reached an output of the model."""
        with self.turn.phase("a backward"), deferred():
            if self.phase is Phase.IDLE:
                self._begin_backward()
                self._is_bare_backward = True
                # On the outermost graph: from inside reentrant checkpointing it would fire at the nested end.
                torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def _need_in_backward(self, chunk: Chunk) -> None:
        if self.phase is Phase.CLOSED:
            raise StateError("backward needs parameters of an engine that was closed")
        self.acquire((chunk.id,), pin=False)

    def collect_grad(self, chunk: Chunk, index: int, parameter: nn.Parameter) -> None:
        with deferred():
            if self.phase is Phase.IDLE:  # a graph that does not pass through a watched output
                self._on_outermost_backward(parameter)
            with self.telling():
                self._collect_grad(chunk, index, parameter)

    def _collect_grad(self, chunk: Chunk, index: int, parameter: nn.Parameter) -> None:
        sampler = self.iterations.sampler
        if not sampler.is_on:
            self.reducer.collect(chunk, index, parameter)
            return
        sampler.before_collect()
        if self.reducer.collect(chunk, index, parameter):
            sampler.grads_complete((chunk.id,))
        sampler.after_collect()

    def expect_accumulation(self, is_expected: bool) -> None:
        """Say whether several backwards come before each step: then host memory for their sums is taken in the first
        backward, and no update begins inside it. Otherwise, or without a word, that is seen in the second one."""
        self.reducer.expect_accumulation(is_expected)

    # Access

    def acquire(self, ids: Sequence[int], *, pin: bool) -> None:
        """Make chunks resident and their parameters plain; with `pin`, until `drop`."""
        if self._cost:
            check_untransformed()
            if torch._C._len_torch_dispatch_stack():
                serve_under_modes()
        try:
            with beside_dispatch_modes():
                self._acquire(ids, pin)
        except StorageError as error:
            self.tell_of(error)
            raise

    def _acquire(self, ids: Sequence[int], pin: bool) -> None:
        is_computing = self.is_computing
        if self._cost:
            if is_computing:
                self.iterations.acquire(ids, pin)
            else:
                self.residency.acquire(ids, pin, None, False)
        try:
            for chunk_id in ids:
                chunk = self.chunks[chunk_id]
                chunk.wait_ready()
                if is_computing:
                    self.interception.make_plain(chunk)
        except BaseException:
            if pin and self._cost:
                self.rcache.drop(ids)
            raise

    def drop(self, ids: Sequence[int]) -> None:
        """Undo one pinned `acquire`."""
        if self._cost:
            traces = self.iterations.traces
            if traces.is_recording and self.is_computing:
                traces.record(Drop(tuple(ids)))
            self.rcache.drop(ids)

    def pin_for_pointer(self, ids: Iterable[int]) -> None:
        """Keep chunks whose raw address was handed out, until the end of the region or the next synchronisation."""
        pinned = [i for i in ids if i in self._cost]
        self.acquire(pinned, pin=True)
        self._raw_pins.extend(pinned)

    # Iterations: what one trace describes

    @property
    def is_computing(self) -> bool:
        """Whether a forward or a backward runs."""
        return self.phase in (Phase.FORWARD, Phase.BACKWARD)

    @property
    def traces(self) -> dict[str, AccessTrace]:
        """What the last recorded iteration of a kind touched."""
        return self.iterations.traces.by_kind

    # When memory runs out

    @property
    def has_lost_gradients(self) -> bool:
        """Whether a backward that failed has taken the gradients of earlier ones with it; until `zero_grad`."""
        return self.reducer.has_lost_gradients

    def set_memory_limit(self, limit_bytes: int | None) -> None:
        """Device memory that everything together may take: the rCache gives way when activations grow towards it.

        Args:
            limit_bytes: None: the rCache keeps what the plan gives it. At first it is what the device had when the
                engine was built.
        """
        self.iterations.growth.limit_bytes = limit_bytes

    def make_room(self) -> bool:
        """Call after an out-of-memory error in a forward or a backward, outside of both, before running the batch
        again: evicts every replica that can go, has the rCache keep as few as the model runs with for some time, and
        gives all cached memory back. What the failed run computed must be gone: the error's traceback holds it.

        Returns:
            Whether there is more room than before. If not, only a plan that leaves more helps.

        Raises:
            StateError: Inside forward or backward.
        """
        with self.turn.call("make_room()"):
            return self._make_room()

    def _make_room(self) -> bool:
        self._leave_stale()
        self.check_open()
        if self.phase is not Phase.IDLE:
            raise StateError(f"make_room is not possible inside {self.phase.value}: call it when the error is caught")
        self.absorb_touched()
        is_lower = self.iterations.growth.shortage()
        num_blocks = self.rcache.used_blocks
        self.residency.release([i for i in self.rcache.resident_ids if not self.chunks[i].is_aliased()])
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

    def is_touched(self, chunk_id: int) -> bool:
        """Whether the user may have written to a chunk, or may yet, through what they keep of it."""
        return chunk_id in self._touched

    def touch(self, ids: Iterable[int]) -> None:
        """The user may have written to these chunks."""
        self._touched.update(ids)

    def absorb_touched(self) -> None:
        """Bring what users wrote between steps to shards and masters. An alias that they keep may be written again
        later, so its chunk stays touched."""
        self._unpin_raw()
        for chunk_id in list(self._touched):
            chunk = self.chunks[chunk_id]
            if chunk.is_usable:
                self.interception.absorb(chunk)
            if not (chunk.is_usable and chunk.is_aliased()):
                self._touched.discard(chunk_id)

    def begin_step(self) -> None:
        """Call before the optimizer updates shards. Collective."""
        self._prepare_meeting(Meeting.STEP)
        self.interception.forget_state_dict()
        if self.has_lost_gradients:
            raise StateError(
                "a backward has failed when the gradients of earlier ones had been mixed with its own, and all of them "
                "were dropped: call zero_grad() and begin again with the first micro-batch"
            )
        there = [*self.rcache.resident_ids, *(c.id for c in self.chunks if c.spec.is_persistent)]
        mine = [i for i in there if self.chunks[i].is_aliased()]
        rows = self._agreement.meet(Meeting.STEP, mine) if self.comm.world_size > 1 else [mine]
        self._aliased_ids = sorted({i for row in rows for i in row})

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
        use = self.turn.block if meeting.has_user_code else self.turn.call
        with use(meeting.call.words):
            with self.telling():
                self._prepare_meeting(meeting)
                if meeting.is_of_states:
                    self.reducer.withdraw()
                self.synchronize()
            yield self._agreement.meet(meeting, payload) if self.comm.world_size > 1 else [list(payload)]

    def _prepare_meeting(self, meeting: Meeting) -> None:
        self.check_open()
        self._leave_stale()
        if self.phase is not Phase.IDLE:
            raise StateError(
                f"{meeting.call.words} is not possible inside {self.phase.value}: call it when that has returned"
            )
        with deferred():
            self.absorb_touched()
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
            self.reducer.finish_downloads()
        self.device.synchronize()  # what the device writes to host shards, or reads of them

    def check_whole(self) -> None:
        """Raises `StateError` between the begin of updates inside backward and their step."""
        if self.reducer.begun:
            self.check_open()  # after a failure, nobody shall be told to go on
            raise StateError(
                "updates have begun inside backward, and no step has followed: parameters and optimizer states are not "
                "whole. Look at them after the step, or use update_timing='behind_forward'"
            )

    def drop_gradients(self, members: Mapping[int, Collection[int]] | None = None) -> None:
        """What `zero_grad` does.

        Args:
            members: By chunk id, of one optimizer: those of others keep their gradients. None: all.

        Raises:
            StateError: Updates have begun with these gradients.
        """
        with self.turn.call("zero_grad()"), deferred():
            self._leave_stale()
            self._leave_hooks()
            self.check_whole()
            if members is not None and any(self._is_of_another(*key, members) for key in self.reducer.used):
                for chunk_id, indices in members.items():
                    self._dropped_by_others -= {(chunk_id, index) for index in indices}
                    for index in indices:
                        self.drop_gradient(self.chunks[chunk_id], index)
                return
            self._dropped_by_others.clear()
            self.gradients.forget_all()
            self.reducer.clear()
            self._forget_gradient_changes()

    def drop_gradient(self, chunk: Chunk, index: int) -> None:
        """What `p.grad = None` does, by what has the turn. The same call on every rank."""
        self.gradients.forget(chunk, index)
        self.reducer.drop_member(chunk, index)
        if not self.reducer.used:
            self._forget_gradient_changes()

    def _is_of_another(self, chunk_id: int, index: int, members: Mapping[int, Collection[int]]) -> bool:
        """Whether a member, which is none of `members`, is another optimizer's."""
        if index in members.get(chunk_id, ()):
            return False
        return any(index in one.members.get(chunk_id, ()) for one in self._optimizers.states)

    def _forget_gradient_changes(self) -> None:
        for known in self._optimizers:
            known.gradients.forget()

    def change_of_gradient(self, chunk_id: int, index: int) -> Change | None:
        """What an optimizer has been told to do to the gradient of a member in its step, as far as users are to see it;
        None: nothing."""
        for known in self._optimizers:
            if (change := known.gradients.change_of(chunk_id, index)) is not None:
                return change
        return None

    def apply_gradient_changes(self, chunk_id: int, index: int) -> None:
        """Have the optimizer of a member do it now, to all its gradients."""
        for known in self._optimizers:
            if known.gradients.change_of(chunk_id, index) is not None:
                known.gradients.apply()

    def first_needs(self) -> dict[int, int]:
        """Chunk id -> its place in the order in which a forward needs the chunks, as far as that is known."""
        trace = self.traces.get("train", AccessTrace(()))
        ids = dict.fromkeys(i for event in trace.acquires() for i in event.ids)
        return {chunk_id: place for place, chunk_id in enumerate(ids)}

    def end_step(self, updated: Mapping[int, Collection[int]], members: Mapping[int, Collection[int]]) -> None:
        """The shards of `updated` hold new values: replicas made from the old ones go, and so do all gradients.

        Args:
            updated: Members, by chunk id.
            members: All that the optimizer has, by chunk id.
        """
        if len(self._optimizers) > 1:
            self._dropped_by_others |= {key for key in self.reducer.used if self._is_of_another(*key, members)}
        self.iterations.end()
        self._leave_covered()
        self._versions = []  # what was computed before the step is checked one by one, when backward needs it
        self.interception.written.forget(updated)
        for chunk_id in sorted(updated):
            chunk = self.chunks[chunk_id]
            chunk.note_written(updated[chunk_id])
            if chunk.spec.is_persistent:
                if self.comm.world_size > 1 or chunk_id in self._aliased_ids:
                    self.store.settle(chunk_id)
                    chunk.wait_ready()
                if self.comm.world_size > 1:
                    chunk.to_state(ChunkState.STALE)
                    self.fetcher.gather_in_place(chunk)
                continue
            if not self.plan.is_storage_distributed and self.comm.world_size > 1:
                self.store[chunk_id].is_param_outdated = True
            if chunk_id in self._aliased_ids:
                self._refresh(chunk)
            else:
                self.residency.release((chunk_id,))
        self.gradients.forget_all()
        self.reducer.clear()

    def _refresh(self, chunk: Chunk) -> None:
        """Somebody, on some rank, keeps a tensor over this replica's storage: it shall see the new values, and what is
        written through it shall not be lost. So the replica stays where it is aliased, and is filled again."""
        is_kept = chunk.is_usable and chunk.is_aliased()
        if is_kept:
            chunk.release()  # keeps the bytes
            self.residency.fetch(chunk.id)
            chunk.wait_ready()
        else:
            self.residency.release((chunk.id,))
            if self.fetcher.is_collective(chunk):
                self.fetcher.serve(chunk)

    def replan(self, plan: Plan) -> None:
        """Move to another placement of the same chunks, without interruption. Collective; between steps, with no
        gradients pending.

        Raises:
            PlanError: If the layout differs, or the ranks' plans do.
            StateError: If there are gradients that no step has used yet.
            StorageError: If the disk has no room for the states that shall come there, beside those that are there.
        """
        with deferred(), self.meeting(Meeting.REPLAN):
            self._replan(plan)

    def _replan(self, plan: Plan) -> None:
        check_layout(self.plan, plan)
        check_same_on_all_ranks(self.comm, plan)
        for known in self._optimizers:
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
        self.residency.release(list(self.rcache.resident_ids))
        self.iterations.end()
        self.give_back()  # what lasts shall not come to lie in the gaps that activations have left
        try:
            for known in self._optimizers:
                known.prepare_move()
            self.hand_over_states(plan)
            before, self.store = self.store, self._new_store(plan, states)
            move_chunks(self, plan, before, self._optimizers.states)
            self.device.synchronize()  # uploads still read the shards that go now
            self._adopt(plan, self.store)
            for known in self._optimizers:
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

    def give_up(
        self,
        where: str,
        cure: str = "with a lower gpu_memory_limit if memory ran out",
        error: BaseException | None = None,
    ) -> None:
        """What the engine holds is not whole any more: everything that needs it raises from here on, on all ranks.

        Args:
            where: At what it failed, for the message.
            cure: How to go on from a checkpoint.
            error: Why, if something has failed.
        """
        self.phase = Phase.CLOSED
        self._why_closed = (
            f"this ElixirModule failed {where}, so its parameters and optimizer states are not whole any more: start"
            f" again from a checkpoint, {cure}"
        )
        self.comm.leave(error or StateError(self._why_closed))

    def tell_of(self, error: BaseException) -> None:
        """Have the other ranks raise what ends this one, which they may wait for. What the caller may get over is not
        told: the others wait until then. An error that is about precision says so from here on."""
        if self.precision.master is not None:
            explain_dtype_clash(error, self.chunks, self.module)
        if isinstance(error, StorageError):
            self.comm.leave(error)

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

    def hand_over_states(self, plan: Plan | None = None) -> None:
        """See `hand_over`; by default for the plan in force."""
        hand_over(self.chunks, plan or self.plan, self._optimizers.states)

    def attach(self, optimizer: AttachedOptimizer) -> None:
        """The optimizer's states move with the chunks from now on, for as long as they live."""
        self._optimizers.add(optimizer)
        self.hand_over_states()

    def own_shard(self, chunk: Chunk) -> Tensor:
        """This rank's up-to-date values of a chunk, 1-D: what an optimizer updates. Not a copy."""
        return own_values(self.store, chunk, self.comm)

    # Sampling, statistics, end

    def device_bytes(self) -> int:
        """Device memory that replicas, gradient blocks and shards take now."""
        held = self.held_bytes()
        return sum(n for key, n in held.items() if not key.startswith(("cpu_", "nvme_")))

    def on_held_bytes(self, holder: Callable[[], dict[str, int]]) -> None:
        """Have `held_bytes` include what `holder`, a bound method, reports, for as long as its object lives."""
        self._holders = [known for known in self._holders if known() is not None]
        self._holders.append(weakref.WeakMethod(holder))

    def held_bytes(self) -> dict[str, int]:
        """Bytes by tier and kind; `replica` and `grad_block` are on the compute device."""
        held = self.store.bytes_by_kind()
        for reference in self._holders:
            holder = reference()
            if holder is not None:
                for key, nbytes in holder().items():
                    held[key] = held.get(key, 0) + nbytes
        held["replica"] = sum(c.device_bytes for c in self.chunks)
        held["grad_block"] = self.reducer.block_bytes_held()
        beside = {"cpu_grad_staging": self.reducer.staging_bytes_held(), "cpu_param_buffer": self.fetcher.held_bytes()}
        return held | {kind: nbytes for kind, nbytes in beside.items() if nbytes}

    def stats(self) -> Stats:
        """Counters since the last reset, and bytes held now."""
        return take_stats(
            self.rcache, self.moved, self.held_bytes(), self.last_seconds, self.redone_steps, self.traffic
        )

    def reset_stats(self) -> None:
        self.rcache.reset_counters()
        self.iterations.traces.forget_misses()
        self.redone_steps = 0
        self.moved.h2d = self.moved.d2h = self.moved.gathered = self.moved.reduced = 0
        self.traffic.read_bytes = self.traffic.written_bytes = 0
        self.traffic.waited_s = 0.0

    def rest(self) -> None:
        """End all threads when what they do is done; whoever asks for more starts them again. Raises nothing."""
        if not self._is_freed:
            self.reducer.rest()
            self.fetcher.rest()
            self.store.rest()

    def close(self) -> None:
        """Remove all hooks and free replicas and shards; the parameters raise when they are used.

        Raises:
            StateError: Another thread trains.
        """
        with self.turn.call("close()"), deferred():
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
        self._abort_region()
        self._saved.leave()
        self.device.synchronize()
        self._hooks.remove()
        self.phase = Phase.CLOSED
        self.interception.guard_all()
        for chunk in self.chunks:
            chunk.close()
        self.reducer.clear()
        self.reducer.close()
        self.fetcher.close()
        self.interception.written.clear()
        self.store.close()
        self.comm.close()

    def whole_values(self, on_all_ranks: bool = True, *, has_met: bool = False) -> dict[str, Tensor]:
        """Whole parameters on the CPU, in the model's own dtypes, by FQN. Collective.

        Args:
            has_met: Whether the ranks have come together for it.
        """
        with self.turn.call(Meeting.STATE_DICT.call.words):
            self.check_whole()
            if self.phase is Phase.IDLE:
                self.absorb_touched()
            if self.comm.world_size > 1 and not has_met:
                self._agreement.meet(Meeting.STATE_DICT)
            return whole_values(self, on_all_ranks=on_all_ranks)

    @property
    def is_closed(self) -> bool:
        return self.phase is Phase.CLOSED

    def sample_activations(self, is_on: bool) -> None:
        """Watch the device's memory at every access of forward and backward (slow: for a warm-up step)."""
        self.iterations.watch(memory=is_on)

    def sample_times(self, is_on: bool) -> None:
        """Measure compute and waiting at every access of training iterations. Costs some 20 us for each."""
        self.iterations.watch(times=is_on)

    @property
    def peak_non_model_bytes(self) -> int:
        """Device bytes beyond the engine's own at the peak since memory began to be watched."""
        return self.iterations.sampler.peak_non_model_bytes

    @property
    def last_seconds(self) -> StepSeconds | None:
        """Of the last forward and backward that was timed. Waits for its end."""
        return self.iterations.sampler.seconds()

    def step_profile(self) -> StepProfile | None:
        """The last sampled training iteration, up to the step or the next forward; None before there was one. Times or
        bytes that it has not got itself are those of an earlier one of the same accesses, or 0. Where everything is
        resident there are no accesses, and it is one interval. Waits for its end."""
        return self.iterations.sampler.profile()

    @contextmanager
    def resident(self, ids: Sequence[int], *, modify: bool) -> Iterator[None]:
        """Keep chunks resident and their parameters plain inside; between steps only.

        Args:
            modify: Take over what was written; otherwise it is undone.
        """
        self._leave_stale()
        if self.phase is not Phase.IDLE:
            raise StateError(f"parameters cannot be made whole inside {self.phase.value}")
        is_there = False
        saved: dict[int, Tensor] = {}
        try:
            with deferred():
                self.acquire(ids, pin=True)
                is_there = True
                saved = {} if modify else {i: self.chunks[i].flat.clone() for i in ids}
                for chunk_id in ids:
                    self.interception.make_plain(self.chunks[chunk_id])
            yield
        finally:
            with deferred():
                for chunk_id in ids if is_there else ():
                    chunk = self.chunks[chunk_id]
                    self.interception.guard(chunk)
                    if modify:
                        self.interception.absorb(chunk)
                    elif chunk_id in saved:
                        chunk.flat.copy_(saved[chunk_id])
                if is_there:
                    self.drop(ids)

    def globally_used(self, members: Mapping[int, Collection[int]] | None = None) -> dict[int, set[int]]:
        """Members, by chunk id, that got a gradient on any rank since the last step. Collective.

        Args:
            members: By chunk id, of one optimizer; None: all.

        Raises:
            StateError: The step of another optimizer has dropped a gradient of these.
        """
        keys = [(c.id, i) for c in self.chunks if c.spec.requires_grad for i in range(len(c.parameters))]
        marks = [2 if key in self._dropped_by_others else int(key in self.reducer.used) for key in keys]
        of_ranks = torch.tensor(marks, dtype=torch.uint8)
        self.comm.all_reduce_max(of_ranks)
        used: dict[int, set[int]] = {}
        for (chunk_id, index), mark in zip(keys, of_ranks.tolist(), strict=True):
            if members is not None and index not in members.get(chunk_id, ()):
                continue
            if mark == 2 and members is not None:
                raise StateError(
                    f"the gradient of {self.chunks[chunk_id].spec.members[index].fqn} was dropped by the step of "
                    "another ElixirOptimizer over the same model, which takes all gradients: use one optimizer with a "
                    "parameter group for each, or run zero_grad(), backward and step() of the one after the other's"
                )
            if mark:
                used.setdefault(chunk_id, set()).add(index)
        return used

    def home_of(self, tensor: Tensor) -> tuple[Chunk, int] | None:
        """The chunk and member index of a managed parameter; None for any other tensor."""
        return self._home.get(id(tensor))

    def enter_state_dict(self) -> None:
        self.interception.enter_state_dict()

    def exit_state_dict(self) -> None:
        self.interception.exit_state_dict()

    def _unpin_raw(self) -> None:
        for chunk_id in self._raw_pins:
            if self.rcache.is_pinned(chunk_id):
                self.rcache.drop((chunk_id,))
        self._raw_pins.clear()

    def check_open(self) -> None:
        if self.phase is Phase.CLOSED:
            raise StateError(self._why_closed)


def _split(row: Sequence[int]) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """A message at the end of backward: the chunks that wait and those that are late, after their number; the begun."""
    late_at = 1 + row[0]
    begun_at = late_at + 1 + row[late_at]
    return row[1:late_at], row[late_at + 1 : begun_at], row[begun_at:]


def _check_unmanaged(module: nn.Module) -> None:
    managed = [name for name, p in module.named_parameters() if getattr(type(p), "is_managed_by_elixir", False)]
    if managed:
        raise StateError(
            f"{', '.join(managed[:3])} belong to another ElixirModule already: use that one, or wrap "
            "copy.deepcopy(model)"
        )


def _accesses_by_module(root: nn.Module, home: Mapping[int, tuple[Chunk, int]]) -> dict[int, _Access]:
    """What to hold during a module's forward: the chunks of its own parameters, where no module below has any; and the
    one chunk that it and all modules below lie in, which then need no access of their own. Other parameters (of
    containers, or in functional use) are caught when they are touched.

    Returns:
        By the id of the module.
    """
    found: dict[int, _Access] = {}
    for module in root.modules():
        keys = [id(p) for p in module.parameters()]
        ids = tuple(dict.fromkeys(home[key][0].id for key in keys if key in home))
        if len(ids) == 1:
            found[id(module)] = _Access(ids, frozenset(id(m) for m in module.modules()))
        elif ids and {*keys} == {id(p) for p in module._parameters.values() if p is not None}:
            found[id(module)] = _Access(ids, frozenset())
    return found
