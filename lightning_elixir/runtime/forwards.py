"""Forwards: of the model, or of any part of it that the user calls, and of what is recomputed in backward.

A forward of the model begins and ends a region, told by `ElixirModule` or, where the user calls a part of the model, by
the hook of the outermost module. Inside, every module's hook has the chunks brought that its own forward needs.

A module all of whose parameters, with those below it, lie in one chunk brings that chunk for the whole of its forward,
and what is below it is *covered*: met there, nothing is left to be done. One whose parameters lie in a few chunks, such
as a layer that the border between two chunks cuts, covers what is below it as well: it holds the chunk that was needed
last, and takes another in its place where a module below it needs that. Chunks that stay on the device are not counted
among these, since nothing has to be held for them: of a frozen layer whose adapters stay the one chunk is held, and the
first use of the adapters' chunk waits for what the last step has left to be done.
The model covers its layers in the same way, so that a chunk stays pinned from layer to layer, and goes when the first
part begins that needs another one. Each layer is an access all the same, since chunks are prefetched and activations
sampled at accesses; of a row of layers in one chunk, those behind the second take a number off (`RCache.grant`). While
a layer runs a part that lies in another chunk, its own may go; what it uses of that by itself is caught then.
Once the trace is known, of modules that were only ever met covered the begin alone is told of, to look whether that is
still so (it is not when such a module is called by itself, or under the user's own hooks for saved tensors), and to
take the module back among the others if not.
What activation checkpointing recomputes in backward is covered too, by one frame above all modules.
What tells of a module stands in the place of its call then: with any hook, torch takes a long way around the forward.
(Code that the compiler makes goes past such a call. So where there is any, modules that bring chunks, and those at
whose begin one above may have to take another, have hooks.) And as long as a frame holds what modules below it need,
these run as they are (`_hush`), but for the model's layers, since nothing is to be done at their begin. What that does
not show are hooks for saved tensors that the user has new inside of a layer. They get parameters as plain PyTorch has
them, for one step: its accesses are not those of the trace, so the next one tells of all; and where a chunk cannot go
because of them, all that comes behind the last layer in it is told of at once.
A hook costs some microseconds a call, an access some tens, and a GPT of 24 layers has 200 modules with parameters.

[Note: compiled regions] Where a module is compiled (`core/compiled_modules.py`), it is one access: all that it and the
modules below it need comes before the compiled code begins, and stays until it ends, so that the code finds plain
parameters with their values, on which the compiler's guards hold. No hook of ours is inside. What the compiled forward
saves is packed as any saved tensor is; its backward unpacks all of it at once, and the tensors that it gets keep their
chunks there until it is over. Code that is compiled in other ways, such as a function that calls modules, meets our
hooks, which the compiler leaves out: a graph ends there, and another begins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lightning_elixir.core.compiled_modules import (
    CompiledRegion,
    CompiledState,
    compiled_regions,
    keep_out,
    leave_out_of_compiled_code,
    methods_with_cuda_graphs,
    num_compiled_graphs,
)
from lightning_elixir.core.device import beside_dispatch_modes, records_graphs
from lightning_elixir.core.module_hooks import class_forward, is_scripted
from lightning_elixir.core.signals import deferred, deferring
from lightning_elixir.errors import PlanError
from lightning_elixir.patterns.apply import check_compiled, uncompiled_modules
from lightning_elixir.runtime.active_plan import is_watching
from lightning_elixir.runtime.agreement import Meeting
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.context_tensors import ContextTensors, modules_to_look_through
from lightning_elixir.runtime.hooks import (
    Begin,
    Hooks,
    Pack,
    SavedTensors,
    ThreadHooks,
    innermost_pack,
    output_hook,
    put_back,
    set_aside,
)
from lightning_elixir.runtime.phases import Phase
from lightning_elixir.runtime.released import tensors_in
from lightning_elixir.runtime.spans import Packing, Span
from lightning_elixir.runtime.transforms import check_untransformed
from lightning_elixir.runtime.turns import Held

if TYPE_CHECKING:
    from lightning_elixir.plan.types import Plan
    from lightning_elixir.runtime.engine import Engine

_FEW_CHUNKS = 4
"""Of a layer. A module with more is a model, which holds one after the other, too, but none for its own parameters."""

# What our hooks run. (Those of islands are not among it: they are part of the model's arithmetic.)
_OF_HOOKS = tuple(f"lightning_elixir.{room}" for room in ("core", "plan", "storage", "optim", "stepping", "runtime"))


def _frames_of_python() -> Iterator[FrameType]:
    """Of the calls that run on this thread, the last first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_of_hooks(frame: FrameType) -> bool:
    """Whether it is what tells the engine of a forward, and may have ended before the forward does."""
    rooms = ("lightning_elixir.runtime.", "lightning_elixir.core.signals", "torch._dynamo.")
    return str(frame.f_globals.get("__name__", "")).startswith(rooms)


class _Access(NamedTuple):
    """What a module's forward needs."""

    ids: tuple[int, ...]
    """From its begin; none where it is changing."""
    covered: Mapping[int, tuple[int, ...]] = MappingProxyType({})
    """Chunks that modules (by id), itself and below, need."""
    is_changing: bool = False
    """Whether these differ."""

    @property
    def chunk_ids(self) -> set[int]:
        """All that modules below need from their begin."""
        return {chunk_id for ids in self.covered.values() for chunk_id in ids}


_NOTHING = _Access(())


@dataclass(slots=True)
class _Frame:
    """A module whose forward runs."""

    module: nn.Module
    ids: tuple[int, ...] = ()
    """Chunks that it holds now."""
    access: _Access = _NOTHING
    depth: int = 0
    """How often the module's forward runs inside itself."""
    hooks: ThreadHooks | None = None
    innermost: object = False
    """What packs the tensors that autograd saves inside; False where it saved none when the forward began."""
    thread: int = 0
    """In which it runs, and which so has the engine."""
    quiet: Sequence[Begin] = ()
    """Of modules that are not told of while it holds what it holds."""


class Forwards:
    """The forward that runs, and which modules tell of theirs.

    Args:
        engine: What the module's parameters belong to.
        saved: Packs the tensors that autograd saves.
        home: Chunk and member index of every parameter, by its id.
    """

    def __init__(self, engine: Engine, saved: SavedTensors, home: Mapping[int, tuple[Chunk, int]]) -> None:
        self._engine = engine
        self._phases = engine.phases
        self._turn = engine.turn
        self._saved = saved
        self._home = home
        self._frames: list[_Frame] = []
        self._is_implicit = False  # a module hook has opened the region, not the model's owner
        self._error_at_entry: BaseException | None = None
        self._region_hooks: ThreadHooks | None = None
        self._begun_in: FrameType | None = None  # the call that the region is as long as
        self._all_modules = modules = list(engine.module.modules())
        self._statistics = [m for m in modules if getattr(m, "track_running_stats", False)]
        self._has_own_statistics = False
        self.modules = [m for m in modules if _has_parameters(m)]
        """Those with parameters."""
        self._looked_through = modules_to_look_through(engine.module, home, engine.interception.class_of)
        self._context_tensors = ContextTensors(saved)
        self._accesses: dict[int, _Access] = {}
        self._staying: frozenset[int] = frozenset()  # chunks that the plan in force keeps on the device
        self._turning: set[int] = set()  # modules (by id) at whose begin the one above may take another chunk in hand
        self._layers: dict[int, frozenset[int]] = {}  # chunks of modules (by id) right below the model, or one like it
        self._watched: list[nn.Module] = []  # that tell of their forwards
        self._state = CompiledState(engine.module)
        self._compiled: frozenset[int] = frozenset()  # modules (by id) whose call begins compiled code
        # What stands above all that backward recomputes, and holds what the module below it needs that runs.
        self._recomputed, self._recomputation = nn.Module(), _NOTHING
        # Met in the first iterations: below a module that brings all they need, and by themselves.
        self._covered_ids: set[int] = set()
        self._entered_ids: set[int] = set()
        self._light: list[nn.Module] = []  # met in the first way only
        self._reached = output_hook(engine.backwards)
        self._told_ids: set[int] = set()  # met below others, under hooks of the user's that are inside of ours
        self._begins: dict[int, Begin] = {}  # of modules (by id) that are not told of where nothing is to be done
        # Of those that need what a module (by id) above them holds, which are these chunks.
        self._quiet: dict[tuple[int, tuple[int, ...]], list[Begin]] = {}
        self._may_hush = True
        # As they are called for modules all the time: whole, whatever signals come.
        self._enter, self._exit = deferring(self._enter_module), deferring(self._exit_module)
        self._hold_next, self._touch = deferring(self._hold), deferring(partial(engine.acquire, pin=False))

    # Regions

    def region(self) -> AbstractContextManager[None]:
        """Run a forward inside. Nested regions, and forwards recomputed in backward, belong to the outer one.

        Raises:
            StateError: If a parameter was written in place inside.
        """
        return Span(self._enter_region, self._end_region, self.abort, self._engine.tell_of)

    def _enter_region(self) -> bool:
        with self.its_turn():
            self._engine.leave_stale()
            if self._phases.current is not Phase.IDLE:
                self._phases.check_open()
                return False
            if not self._state.is_current():
                self._look_for_compiled()
            self._begin_region()
            return True

    def run_block(self, call: Callable[[], Any]) -> Any:
        """Run a block whose call has contexts around its module hooks, such as hooks for saved tensors. Where the user
        calls it by itself, it is a region, which begins before these contexts and ends after them: begun by the module
        hook inside of them, it would take its own hooks to be innermost.

        Args:
            call: Enters the contexts, runs the block, and leaves them.
        """
        if self._turn.is_mine() and self._is_inside() and not self._phases.is_interrupted:
            return call()
        is_outermost = False

        def begin() -> bool:
            nonlocal is_outermost
            is_outermost = self._enter_block()
            return is_outermost

        with Span(begin, self._end_region, self.abort, self._engine.tell_of):
            output = call()
        if is_outermost:
            self.watch_outputs(output)
        return output

    def _enter_block(self) -> bool:
        with self.its_turn():
            self._engine.leave_interrupted()
            self._engine.leave_stale_backward()
            if self._is_inside():
                self._phases.check_open()
                return False
            self._begin_region()
            return True

    def _is_inside(self) -> bool:
        """Whether something that begins now belongs to what has begun already."""
        return self._phases.current is not Phase.IDLE or bool(self._frames)

    def its_turn(self) -> Held:
        """For a forward, not taken yet."""
        return self._turn.phase("a forward", is_of_trainer=False, may_be_of_trainer=torch.is_grad_enabled())

    def _to_the_end(self) -> Held:
        """For what is done when the phase has ended, and its turn with it; not taken yet."""
        return self._turn.phase("a forward", is_of_trainer=False, may_be_of_trainer=False)

    def _begin_region(self) -> None:
        engine = self._engine
        self._phases.check_open()
        engine.leave_hooks()
        if engine.active.cost:
            check_untransformed()
        engine.interception.forget_state_dict()
        with beside_dispatch_modes():  # a region may begin in a recomputation, before anything has told of a backward
            engine.writes.absorb()
            engine.interception.frozen_copies.look()
            if self._has_own_statistics:
                self._share_statistics()
        self._has_own_statistics = engine.comm.world_size > 1 and bool(self._statistics) and torch.is_grad_enabled()
        engine.iterations.begin(is_training=torch.is_grad_enabled())
        self._phases.enter(Phase.FORWARD, self.its_turn())
        self._may_hush = True
        self._begun_in = next((frame for frame in _frames_of_python() if not _is_of_hooks(frame)), None)
        try:
            engine.activations.begin_forward()
            self._region_hooks = self._enter_saved_hooks()
            if torch.is_grad_enabled():
                engine.interception.note_versions()
            self.open_resident()
        except BaseException as error:
            self.abort()
            engine.tell_of(error)
            raise

    def end(self) -> None:
        """This rank has no more forwards: do what the others do before their next one. Collective."""
        if self._has_own_statistics:
            self._has_own_statistics = False
            self._share_statistics()

    def _share_statistics(self) -> None:
        """Running statistics as DDP has them: those of rank 0, after a forward with gradients that changed them."""
        self._engine.active.agreement.meet(Meeting.BUFFERS)
        for module in self._statistics:
            for buffer in module._buffers.values():
                if buffer is not None:
                    self._engine.comm.broadcast_from_first(buffer)

    def open_resident(self) -> None:
        """Where everything is there, parameters are plain in forward and backward, and nothing is intercepted."""
        engine = self._engine
        if not engine.active.is_watching:
            with engine.iterations.sampler.waiting():
                for chunk in engine.chunks:
                    chunk.wait_ready()
                    engine.interception.make_plain(chunk)

    def _end_region(self) -> None:
        with self._to_the_end():
            self._end_forward()

    def _end_forward(self) -> None:
        engine = self._engine
        engine.backwards.leave_inner()
        self._close_region()
        if torch.is_grad_enabled():
            engine.interception.check_unwritten("forward")
        else:  # the versions are those of an earlier region
            engine.interception.check_bound("forward")
        if engine.needs_meetings:
            with engine.iterations.sampler.waiting():
                engine.active.agreement.meet(Meeting.FORWARD_END)
        engine.iterations.end_forward()

    def abort(self) -> None:
        """The forward was ended by an error, or cut short before its end was noted."""
        with self._to_the_end():
            self.clear_frames()
            self._is_implicit = False
            self._engine.active.rcache.unpin_all()
            self._engine.backwards.leave_inner()
            self._close_region()
            self._engine.iterations.abandon()

    @property
    def is_running(self) -> bool:
        """Whether the call that the region is as long as has not ended: a signal that has been handled since was caught
        inside, or came where Python ignores exceptions, as in a `__del__`."""
        if torch._C._current_graph_task_id() != -1:  # what it computes gradients by, on a thread of autograd's on GPUs
            return True
        return self._begun_in is not None and any(frame is self._begun_in for frame in _frames_of_python())

    def _close_region(self) -> None:
        self._begun_in = None
        hooks, self._region_hooks = self._region_hooks, None
        if hooks is not None:
            hooks.__exit__()
        self._engine.writes.unpin_raw()
        self._engine.interception.guard_all()
        self._phases.leave()

    @property
    def is_stale(self) -> bool:
        """Whether a module hook has opened the region, and torch has not called the one that closes it: what has passed
        by the module's exit was no `Exception`. To be asked where the model as a whole, a backward or a step begins."""
        return self._phases.current is Phase.FORWARD and self._is_implicit

    def watch_outputs(self, output: Any) -> None:
        """Notice a backward that starts from `output` without the engine being told."""
        if torch.is_grad_enabled():
            for tensor in tensors_in((output,)):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._reached)

    # Modules

    def enter_module(self, module: nn.Module, inputs: Any = None) -> None:
        """A module's forward begins."""
        if not self._turn.is_mine():
            with self.its_turn():  # until it has begun, which takes it for itself
                self._phases.check_open()
                self.enter_module(module, inputs)
            return
        if self._phases.is_interrupted:
            with deferred():
                self._engine.leave_interrupted()
        if self._frames or self._begins_recomputation():
            above = self._frames[-1]
            needed = above.access.covered.get(id(module))
            if needed is not None:
                if self._saves_through_us(innermost_pack(), above):
                    if above.module is not module:
                        self._covered_ids.add(id(module))
                        if needed != above.ids:
                            self._turning.add(id(module))
                    self._meet_covered(above, module, needed)
                    return
                self._told_ids.add(id(module))
                self._tell_of(module)
        self._enter(module)

    def _enter_module(self, module: nn.Module) -> None:
        if not self._is_inside():
            self._error_at_entry = sys.exc_info()[1]
            self._begin_region()
            self._is_implicit = True
        elif self._frames and self._frames[-1].access.is_changing:
            self._hold(self._frames[-1], ())  # so that no more is held at once than where nothing was covered
        self._entered_ids.add(id(module))
        frame = _Frame(module, thread=get_ident())
        self._frames.append(frame)
        access = self._accesses.get(id(module))
        if access is not None:
            frame.access = access
            # Of parameters beside modules of its own, too: whether their use is met depends on what is there already.
            self._hold(frame, access.ids or access.covered.get(id(module), ()))
            if id(module) in self._compiled:
                self._engine.interception.make_plain_for_compiled(frame.ids)
        frame.hooks = self._enter_saved_hooks()
        if frame.access.covered and torch.is_grad_enabled():
            frame.innermost = innermost_pack()

    def _begins_recomputation(self) -> bool:
        """Whether the first module begins that activation checkpointing recomputes in a backward. Checkpointing calls
        what it was given: a block, with its hooks, or a function inside of one, without. So all that is recomputed is
        covered, from here to the end of the backward; the chunk that was needed last is held for the backward of the
        same block, which comes next."""
        if not self._phases.is_backward or not self._turn.is_mine() or not self._saves_through_us(innermost_pack()):
            return False
        self._frames.append(_Frame(self._recomputed, access=self._recomputation, thread=get_ident()))
        return True

    def end_recomputation(self) -> None:
        """The backward is over."""
        if self._frames and self._frames[-1].module is self._recomputed:
            self._hold(self._frames.pop(), ())

    def _meet_covered(self, above: _Frame, module: nn.Module, needed: tuple[int, ...]) -> None:
        if above.module is module:
            above.depth += 1
        layer = None if above.module is self._recomputed else self._layers.get(id(module))
        if needed == above.ids or not needed:  # of parts in several chunks the first that runs tells what it needs
            if layer is not None and above.ids and layer.issuperset(above.ids):
                self._note_access(above.ids)
        elif len(needed) == 1 and needed[0] in self._staying:
            if layer is not None:
                if above.ids:  # no part of this one
                    self._hold_next(above, ())
                self._note_access(needed)
            elif not self._engine.is_in_use(needed[0]):  # the first use in a forward or a backward
                self._touch(needed)
        else:
            self._hold_next(above, needed)

    def _note_access(self, ids: tuple[int, ...]) -> None:
        """A layer of the model begins, whose chunks are held already, or stay: an access as those of all layers are, at
        which others may be prefetched, and what activations take is looked at."""
        if len(ids) != 1 or not self._engine.is_at_hand(self._engine.chunks[ids[0]]):
            self._touch(ids)

    def make_way(self, ids: Collection[int]) -> None:
        """A parameter of these chunks is used beside the modules' own forwards: what is held only for the module that
        ran last, and will be taken again by the next one, can go."""
        if self._frames and self._turn.is_mine():
            above = self._frames[-1]
            if above.access.is_changing and set(ids) != set(above.ids):
                self._hold(above, ())

    def _hold(self, frame: _Frame, ids: tuple[int, ...]) -> None:
        """Have a frame hold these chunks, in the place of those that it holds."""
        if frame.ids:
            self._look_for_aliases(frame)
            held, frame.ids = frame.ids, ()
            self._listen(frame)
            self._engine.drop(held)
        if ids:
            self._engine.acquire(ids, pin=True)
            frame.ids = ids
            is_foreseen = not self._engine.iterations.traces.is_recording
            if self._begins and self._may_hush and is_foreseen and not self._turn.was_contended:
                self._hush(frame)

    def _hush(self, frame: _Frame) -> None:
        """At the begin of modules below that need what a frame holds nothing is to be done: they run as they are."""
        key = id(frame.module), frame.ids
        quiet = self._quiet.get(key)
        if quiet is None:
            covered, ids = frame.access.covered, frame.ids
            told = () if frame.module is self._recomputed else self._layers
            quiet = self._quiet[key] = [
                begin for key, begin in self._begins.items() if covered.get(key) == ids and key not in told
            ]
        frame.quiet = quiet
        set_aside(quiet)

    def _look_for_aliases(self, frame: _Frame) -> None:
        """What a frame holds is let go: hooks of the user's that are new may keep what modules have saved, of which
        those that were not told of knew nothing. What backward recomputes is kept by checkpointing itself."""
        if frame.quiet and frame.module is not self._recomputed:
            for chunk_id in frame.ids:
                if self._engine.chunks[chunk_id].is_aliased():
                    self._may_hush = False

    def _tell_of(self, module: nn.Module) -> None:
        """Have a module told of wherever it runs."""
        if self._begins.pop(id(module), None) is not None:
            self._quiet.clear()

    @staticmethod
    def _listen(frame: _Frame) -> None:
        """They tell of their begin again."""
        put_back(frame.quiet)
        frame.quiet = ()

    def enter_covered(self, module: nn.Module, inputs: Any = None) -> None:
        """A module's forward that so far ran below others only. Where it does not (it is called by itself, or under the
        user's hooks for saved tensors), it is treated as they are from here on."""
        frames = self._frames
        if (frames or self._begins_recomputation()) and (frames[-1].thread == get_ident() or self._turn.is_mine()):
            above = frames[-1]
            needed = above.access.covered.get(id(module))
            if needed is not None:
                pack = innermost_pack()  # as nearly always the one that it was when the module above began
                if pack is above.innermost or self._saves_through_us(pack, above):
                    if needed != above.ids or above.module is module or id(module) in self._layers:
                        self._meet_covered(above, module, needed)
                    return
        if id(module) not in self._entered_ids:
            self._entered_ids.add(id(module))
            self._hooks.watch_exit(module)  # in time for this very call
            self._tell_of(module)
        self.enter_module(module)

    def exit_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A module's forward is over."""
        frames = self._frames
        if frames and frames[-1].module is not module and self._phases.is_interrupted and self._turn.is_mine():
            with deferred():
                self._leave_unended(module)
        if not frames or frames[-1].module is not module or not self._turn.is_mine():
            return  # a module above covers it, or the region was aborted, or it has been refused
        frame = frames[-1]
        if frame.depth:
            frame.depth -= 1
        else:
            self._exit(frame, inputs, output)

    def _leave_unended(self, module: nn.Module) -> None:
        """Leave the forwards inside a module's that a signal has ended: torch calls no hook of theirs."""
        is_inside = any(frame.module is module for frame in self._frames)
        while is_inside and self._frames[-1].module is not module:
            self._hold(self._frames[-1], ())
            self._leave_frame()

    def _exit_module(self, frame: _Frame, inputs: Any, output: Any) -> None:
        if id(frame.module) in self._looked_through and self._engine.active.cost:
            self._context_tensors.take_out(inputs, output)
        self._look_for_aliases(frame)
        self._leave_frame()
        if frame.ids:
            if id(frame.module) in self._compiled and self._engine.backwards.is_guarded:
                self._engine.interception.guard_again(frame.ids)
            self._engine.drop(frame.ids)
        if self._is_implicit and not self._frames:
            self._is_implicit = False
            error = sys.exc_info()[1]
            if error is not None and error is not self._error_at_entry:
                self.abort()
                self._engine.tell_of(error)
            elif error is not self._error_at_entry:
                self.abort()
            else:
                self._end_region()
                self.watch_outputs(output)

    def _leave_frame(self) -> _Frame:
        """The module whose forward began last saves through others again; what it holds stays."""
        frame = self._frames.pop()
        self._listen(frame)
        if frame.hooks is not None:
            frame.hooks.__exit__()
        return frame

    def clear_frames(self) -> None:
        """After an exception that may have passed by the modules' exits."""
        while self._frames:
            self._leave_frame()

    # Saved tensors

    def packing(self) -> AbstractContextManager[None]:
        """Saved tensors of what runs inside keep no replica alive, and find it again in backward."""
        return Packing(self._enter_saved_hooks)

    def _enter_saved_hooks(self) -> ThreadHooks | None:
        """Have autograd save managed tensors through us from now on; None if it does already, or need not."""
        if not self._engine.active.cost or not torch.is_grad_enabled():
            return None
        hooks = self._saved.context()
        if hooks is not None:
            hooks.__enter__()
        return hooks

    def _saves_through_us(self, pack: Pack | None, above: _Frame | None = None) -> bool:
        """Whether autograd saves managed tensors through us, or need not.

        Args:
            pack: What packs them now.
            above: Notes that down: checkpointing has another one in each recomputation.
        """
        if not self._engine.active.cost or not torch.is_grad_enabled():
            return True
        is_ours = pack is not None and self._saved.is_covered_by(pack)
        if is_ours and above is not None:
            above.innermost = pack
        return is_ours

    def have_backward_hooks(self) -> bool:
        """Whether users have hooks at modules, which backward runs."""
        of_all = nn.modules.module
        return bool(of_all._global_backward_hooks or of_all._global_backward_pre_hooks) or any(
            bool(module._backward_hooks or module._backward_pre_hooks) for module in self._all_modules
        )

    # Which modules tell of their forwards

    def check_addresses(self, plan: Plan) -> None:
        """Look whether the code that is compiled can run under a plan, before chunks are where it has them.

        Raises:
            PlanError: Parameters may not be there yet when a forward meets them, and compiled modules count on that.
        """
        if is_watching(plan) and records_graphs(self._engine.device.torch_device):
            check_addresses(self._engine.module, compiled_regions(self._engine.module))

    def watch(self, hooks: Hooks) -> None:
        """Have modules tell of their forwards, as the plan in force needs it.

        Raises:
            PlanError: As `check_addresses`.
        """
        is_first, self._hooks = not self._accesses, hooks
        staying = frozenset(chunk.id for chunk in self._engine.plan.chunks if chunk.is_persistent)
        if is_first or staying != self._staying:
            self._staying = staying
            self._look_for_compiled()
        else:
            self._watch()

    def _look_for_compiled(self) -> None:
        """Find out what is compiled now; other modules tell of their forwards from here on."""
        self._engine.iterations.outdate()
        leave_out_of_compiled_code(_OF_HOOKS)
        root, engine = self._engine.module, self._engine
        keep_out(root, uncompiled_modules(root))
        check_compiled(root)
        regions = compiled_regions(root)
        self.check_addresses(engine.plan)
        self._compiled = frozenset(id(region.entrance) for region in regions)
        self._accesses, needs = _accesses_by_module(root, self._home, regions, self._looked_through, self._staying)
        self._recomputation = _Access((), needs, is_changing=True)
        self._layers = dict(self._layers_below(root))
        # All in layers, which are few modules; of models their layers, and what calls these.
        self._turning = set(self._layers)
        for access in self._accesses.values():
            if access.is_changing:
                is_model = len(access.chunk_ids) > _FEW_CHUNKS
                self._turning.update(key for key, ids in access.covered.items() if not (ids and is_model))
        inside = {id(m) for region in regions for m in region.inside} - self._compiled
        self._watched = [m for m in root.modules() if id(m) not in inside and _has_parameters(m)]
        self._light = []
        self._covered_ids.clear()
        self._entered_ids.clear()
        self._told_ids.clear()
        self._watch()

    def _layers_below(self, model: nn.Module) -> Iterator[tuple[int, frozenset[int]]]:
        """The modules that a model is made of, by id, and their chunks: few each."""
        for child in model.children():
            ids = frozenset(self._home[id(p)][0].id for p in child.parameters() if id(p) in self._home)
            is_list = class_forward(child) is nn.Module.forward  # nothing calls it
            if is_list or len(ids) > _FEW_CHUNKS:
                yield from self._layers_below(child)
            elif ids:
                yield id(child), ids

    def _watch(self) -> None:
        self._watched += [m for m in self._light if id(m) in self._entered_ids]  # they have turned out otherwise
        self._light = [m for m in self._light if id(m) not in self._entered_ids]
        # Compiled code goes past what stands in the place of a call, and the compiler's guards would find it set aside.
        # Until there is a trace, code may be compiled yet.
        is_by_hooks = bool(num_compiled_graphs()) or "train" not in self._engine.traces
        if self._engine.active.is_watching:
            turning = [m for m in self._light if id(m) in self._turning]
            self._hooks.watch_forwards(self._watched, self._light, [*self._watched, *turning] if is_by_hooks else ())
        else:
            self._hooks.watch_forwards(entrances := self._entrances(), hooked=entrances)
        begins = {} if is_by_hooks else self._hooks.begins()
        self._begins, self._quiet = {key: begin for key, begin in begins.items() if key not in self._told_ids}, {}
        self._state = CompiledState(self._engine.module)  # with what stands around it

    def leave_covered(self) -> None:
        """Once the order of accesses is known, of modules that were only met below others, which bring all that they
        need, the begin alone is told of: a hook costs some microseconds a call."""
        covered = self._covered_ids - self._entered_ids - self._compiled
        if covered and self._engine.active.is_watching and "train" in self._engine.traces:
            self._covered_ids.clear()
            self._light += [m for m in self._watched if id(m) in covered]
            self._watched = [m for m in self._watched if id(m) not in covered]
            self._watch()

    def _entrances(self) -> Sequence[nn.Module]:
        """Where everything is resident no layer needs a hook: only what users call by themselves, the model and the
        models it is made of, so that its parameters are plain inside; and what is compiled, for which they must be."""
        model = self._engine.module
        called = {id(m) for m in (model, *model.children())} | self._compiled
        return [m for m in self._watched if id(m) in called]


def _has_parameters(module: nn.Module) -> bool:
    """TorchScript's have none in chunks, and take no hooks."""
    return not is_scripted(module) and any(True for _ in module.parameters())


def check_addresses(root: nn.Module, regions: Sequence[CompiledRegion]) -> None:
    """Raises `PlanError` if compiled modules, or methods of modules, count on parameters that stay where they are.
    (Torch compares addresses before each run, and would record a graph anew for each that has changed: no end.)"""
    names = {id(module): name for name, module in root.named_modules()}
    found = [names[id(r.entrance)] or type(r.entrance).__name__ for r in regions if r.has_cuda_graphs]
    found += methods_with_cuda_graphs(root, regions)
    if found:
        raise PlanError(
            f"{', '.join(found[:5])}: compiled with CUDA graphs (mode='reduce-overhead' or 'max-autotune'), which need"
            " parameters that stay where they are, and under this plan they come and go, or are updated on the host"
            " beside training. Compile with mode='default' or 'max-autotune-no-cudagraphs', or have parameters and"
            " optimizer states stay on the GPU (placement_policy='cuda', or more GPU memory)"
        )


def _accesses_by_module(
    root: nn.Module,
    home: Mapping[int, tuple[Chunk, int]],
    regions: Sequence[CompiledRegion],
    looked_through: Collection[int],
    staying: Collection[int],
) -> tuple[dict[int, _Access], dict[int, tuple[int, ...]]]:
    """What to hold during a module's forward: the chunks of its own parameters, where no module below has any; the one
    chunk that it and all modules below lie in, which then need no access of their own; of several chunks, those that
    the module below needs which runs, and of a few at its begin those of its own parameters. Of a compiled module, all.
    Other parameters (of containers of more chunks, or in functional use) are caught when they are touched.

    Args:
        looked_through: Modules (by id) at whose exit what autograd has saved is looked at: one by one, so that it
            keeps a chunk no longer.
        staying: Chunks for which a module that needs another one, too, holds nothing.

    Returns:
        By the id of the module; and what each module needs from its begin where what is above it holds one chunk after
        the other, but for those that are compiled or looked at.
    """
    found: dict[int, _Access] = {}
    compiled = {id(region.entrance) for region in regions}
    needs: dict[int, tuple[int, ...]] = {}  # by the id of a module: chunks that it needs from its begin
    below: dict[int, tuple[int, ...]] = {}  # those of its parameters and of all below it
    leaves: set[int] = set()  # modules with no parameters below them
    for module in root.modules():
        keys = [id(p) for p in module.parameters()]
        ids = tuple(dict.fromkeys(home[key][0].id for key in keys if key in home))
        own = {id(p): p for p in module._parameters.values() if p is not None}
        needed: tuple[int, ...] = ()
        if own.keys() == {*keys}:
            needed = ids
            leaves.add(id(module))
        elif len(ids) <= _FEW_CHUNKS and id(module) not in looked_through:
            moving = tuple(i for i in ids if i not in staying) or ids
            needed = moving if len(moving) == 1 else tuple(dict.fromkeys(home[k][0].id for k in own if k in home))
        below[id(module)], needs[id(module)] = ids, needed
    for module in root.modules():
        ids = below[id(module)]
        # Not those that are compiled: their parameters must be plain, which others need not be.
        inside = [id(m) for m in module.modules() if id(m) not in compiled]
        if len(ids) == 1 or (ids and id(module) in compiled):
            found[id(module)] = _Access(ids, dict.fromkeys(inside, ids))
        elif ids and id(module) in leaves:
            found[id(module)] = _Access(ids)
        elif len(ids) > 1 and id(module) not in looked_through:
            found[id(module)] = _Access((), {key: needs[key] for key in inside}, is_changing=True)
    return found, {key: ids for key, ids in needs.items() if key not in compiled and key not in looked_through}
