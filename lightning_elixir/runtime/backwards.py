"""Backwards: gradients leave autograd for the reducer, and the ranks reduce together what is left at the end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_elixir.core.signals import deferred
from lightning_elixir.errors import StateError
from lightning_elixir.runtime.agreement import Meeting
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.hooks import PackedTensor
from lightning_elixir.runtime.phases import Phase
from lightning_elixir.runtime.spans import Span
from lightning_elixir.runtime.turns import Held

if TYPE_CHECKING:
    from lightning_elixir.runtime.engine import Engine


class Backwards:
    """The backward that runs.

    Args:
        engine: Whose parameters get the gradients.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._phases = engine.phases
        self._is_bare = False  # begun by autograd, which does not tell of errors
        self._has_users_hooks = False
        self._inner: weakref.ref[Callable[[], None]] | None = None
        """The user's own backward inside a forward: what autograd calls at its end, which autograd alone keeps, for as
        long as it runs. One that raises takes it along."""
        self.take: Callable[[int, int, nn.Parameter], object] = self._take
        """Called, with signals deferred, with the chunk id, the member index and the parameter at which autograd has
        put a gradient down: in a backward that is not timed, the reducer's `collect`."""

    def span(self) -> AbstractContextManager[None]:
        """Run the backward of a loss inside; the gradients are reduced at the end. Collective."""
        return Span(self._enter, self.end, self.abort, self._engine.tell_of)

    def _enter(self) -> bool:
        with self._engine.turn.phase("a backward"):
            self._engine.leave_stale()
            if self._phases.current is Phase.BACKWARD:  # nested: the outer one ends it
                return False
            self._begin()
            return True

    def note_outermost(self, grad: Tensor) -> None:
        """A bare `loss.backward()` has reached an output of the model."""
        with self._engine.turn.phase("a backward"):
            if self._phases.current is Phase.IDLE:
                self._begin(is_bare=True)
                # On the outermost graph: from inside reentrant checkpointing it would fire at the nested end.
                torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def _begin(self, *, is_bare: bool = False) -> None:
        engine = self._engine
        self._phases.check_open()
        self._phases.check_idle("backward")
        engine.leave_hooks()
        self._prepare_gradients()
        # What was read before backward was not written; what is still kept then may be, so its update must not begin.
        engine.writes.absorb()
        engine.interception.check_unwritten("forward and backward")
        engine.iterations.begin_backward()
        self._is_bare = is_bare
        self._has_users_hooks = engine.interception.have_gradient_hooks() or engine.forwards.have_backward_hooks()
        self._phases.enter(Phase.BACKWARD, engine.turn.phase("a backward"))
        try:
            if not self.is_guarded:
                engine.forwards.open_resident()
            if not engine.iterations.sampler.is_on:
                self.take = engine.reducer.collect
        except BaseException:
            self.abort()
            raise

    def _prepare_gradients(self) -> None:
        """More are about to be added to those of earlier backwards."""
        engine = self._engine
        engine.reducer.carry_out_drops()
        engine.gradients.absorb()
        engine.gradients.begin_backward()
        engine.steps.finish_gradient_changes()
        engine.reducer.withdraw()  # with gradients that more are added to
        self._check_late({*engine.reducer.begun_now()})

    def _note_inner(self) -> None:
        """A bare `loss.backward()` inside a forward (a training step that attacks its own model, say) has put a
        gradient down: what such a backward gives is reduced when it ends, as that of any other is. Where one has raised
        before it, what that gave counts as well, as in plain PyTorch: to the reducer this one goes on with it."""
        if self._inner is None:
            self._prepare_gradients()
        elif self._inner() is not None:  # it runs, or reentrant checkpointing inside it
            return
        inner = self._end_inner  # a method object of its own, each time
        self._inner, self._engine.reducer.is_inside_forward = weakref.ref(inner), True
        torch.autograd.Variable._execution_engine.queue_callback(inner)

    def _end_inner(self) -> None:
        """It has returned. Collective."""
        if self._inner is None:
            return
        try:
            with self._engine.telling():
                self._reduce_rest()
        except BaseException:
            self.leave_inner()
            raise
        self._inner, self._engine.reducer.is_inside_forward = None, False

    def leave_inner(self) -> None:
        """The forward ends. A backward inside it that has raised, of which autograd does not tell, gives nothing, if no
        other has followed, but for what backwards of reentrant checkpointing inside it have brought to their end."""
        if self._inner is not None:
            self._inner, self._engine.reducer.is_inside_forward = None, False
            self._drop()

    def end(self) -> None:
        """The outermost backward has returned: reduce what is left. Collective."""
        if self._phases.current is not Phase.BACKWARD:
            return
        with self._to_the_end(), self._engine.telling():
            self._end()

    def _to_the_end(self) -> Held:
        """For what is done when the phase has ended, and its turn with it; not taken yet."""
        return self._engine.turn.phase("a backward", is_of_trainer=False, may_be_of_trainer=False)

    def _end(self) -> None:
        engine, reducer = self._engine, self._engine.reducer
        engine.iterations.end_backward(reducer.waiting_ids())
        self._release_pins()
        self._phases.leave()
        order = reducer.finish_order()
        self._reduce_rest()
        if not reducer.is_order_known:
            reducer.set_order(engine.comm.exchange_objects(order)[0])
        engine.interception.check_unwritten("forward and backward")

    def _reduce_rest(self) -> None:
        """What this backward has left, on all ranks."""
        engine, reducer = self._engine, self._engine.reducer
        waiting, late, begun = reducer.waiting_ids(), reducer.late_ids(), reducer.begun_now()
        shown = [n for key in engine.gradients.keys for n in key]
        if engine.comm.world_size > 1:
            message = [n for part in (waiting, late, begun, shown, engine.wire.counts) for n in (len(part), *part)]
            parts = [_split(row) for row in engine.active.agreement.meet(Meeting.BACKWARD_END, message)]
            engine.wire.check_counts([part[-1] for part in parts])
            # What was waiting when this rank came here may have been reduced while it served the others.
            waiting, late, begun, shown = ([i for part in parts for i in part[kind]] for kind in range(4))
        self._check_late({*late} & {*begun})
        reducer.flush(waiting, late)
        engine.gradients.refresh(zip(shown[::2], shown[1::2], strict=True))

    def _check_late(self, ids: set[int]) -> None:
        """`ids`, the same on all ranks: chunks that get more gradients although their update has begun."""
        if ids:
            self._engine.give_up("in a backward that went on after updates had begun")
            raise StateError(
                f"a parameter of {self._engine.chunks[min(ids)].spec} got another gradient when its optimizer step had "
                "begun: its values are not whole any more. Something runs backward several times (reentrant activation "
                "checkpointing around a shared layer): use use_reentrant=False, or update_timing='behind_forward'"
            )

    def abort(self) -> None:
        """Backward raised: its gradients are dropped. Those of earlier backwards stay if none of its have been added to
        them yet; otherwise they are lost, and `step` raises until `zero_grad` has dropped the rest."""
        with self._to_the_end():
            self._abort()

    def _abort(self) -> None:
        engine = self._engine
        engine.forwards.clear_frames()
        self._release_pins()
        try:
            self._drop()
            engine.iterations.abandon()
        except Exception:
            self._phases.leave()
            raise
        self._phases.leave()  # last: after a second Ctrl-C, what comes next does all of this again

    def _drop(self) -> None:
        """What the backward that has raised has given; see `abort`."""
        self._engine.reducer.abandon()
        if self._engine.has_lost_gradients:
            self._engine.gradients.retire()

    @property
    def is_stale(self) -> bool:
        """Whether a backward that the engine was not told of is open, and does not run."""
        return self._phases.current is Phase.BACKWARD and self._is_bare and torch._C._current_graph_task_id() == -1

    @property
    def is_guarded(self) -> bool:
        """Whether parameters stay intercepted in the backward that runs: nothing tells when a bare one has raised, and
        what users do to gradients then or in hooks, or to parameters, must not pass by."""
        return (self._is_bare or self._has_users_hooks) and self._phases.current is Phase.BACKWARD

    def _release_pins(self) -> None:
        self.take = self._take
        self._engine.forwards.end_recomputation()
        self._engine.activations.end_backward()
        self._engine.active.rcache.unpin_all()
        self._engine.writes.unpin_raw()
        self._engine.interception.guard_all()

    def need(self, chunk: Chunk, make: Callable[[PackedTensor], Tensor], packed: PackedTensor) -> Tensor:
        """`make(packed)`, which makes a tensor that autograd has saved of a chunk's elements, and so keeps these there,
        when they have been brought. Most are unpacked in a backward, which has the engine."""
        engine = self._engine
        is_mine = engine.turn.is_mine()
        if is_mine and engine.is_at_hand(chunk):
            return make(packed)
        with deferred() if is_mine else engine.turn.call("what autograd has saved was read"):
            if not self._phases.is_computing and self._phases.current is Phase.CLOSED:
                raise StateError("backward needs parameters of an engine that was closed")
            engine.forwards.make_way((chunk.id,))
            engine.acquire((chunk.id,), pin=False)
            return make(packed)

    def tell_of(self, error: BaseException) -> None:
        """See `Engine.tell_of`."""
        self._engine.tell_of(error)

    def _take(self, chunk_id: int, index: int, parameter: nn.Parameter) -> None:
        """The first gradient of a backward that nothing has told of, and those of backwards that are timed."""
        if not self._phases.is_backward:
            if self._phases.current is Phase.IDLE:  # a graph that does not pass through a watched output
                self.note_outermost(parameter)
            elif self._phases.current is Phase.FORWARD:
                self._note_inner()
        sampler, reducer = self._engine.iterations.sampler, self._engine.reducer
        if not sampler.is_on:
            reducer.collect(chunk_id, index, parameter)
            return
        sampler.before_collect()
        if not reducer.is_collecting(chunk_id):
            sampler.grads_begin(chunk_id)
        if reducer.collect(chunk_id, index, parameter):
            sampler.grads_complete((chunk_id,))
        sampler.after_collect()


def _split(row: Sequence[int]) -> list[Sequence[int]]:
    """A message at the end of backward: its parts, each of which comes after its length."""
    parts, at = [], 0
    while at < len(row):
        parts.append(row[at + 1 : at + 1 + row[at]])
        at += 1 + row[at]
    return parts
