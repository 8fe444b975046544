"""What happens when code touches a managed parameter outside the road of module hooks.

[Note: road and net] The road: module hooks bring the chunks of a module's own parameters before its forward. The net:
whatever the road missed (functional use by a parent, tied weights, writes between steps) reaches a parameter of the
intercepting class, whose chunk is fetched before the call goes on. While a chunk is in use by a forward or a
recomputation its parameters are plain, and nothing is intercepted.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._guards import CompileContext

from lightning_elixir.core.shells import DESCRIBING, ShellParameter, call_opened, described, holds_shells, is_shell
from lightning_elixir.errors import StateError
from lightning_elixir.runtime import released
from lightning_elixir.runtime.agreement import Meeting
from lightning_elixir.runtime.aliases import Aliases
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.frozen_copies import FrozenCopies
from lightning_elixir.runtime.lost_writes import LostWrites
from lightning_elixir.runtime.unreadable import GONE, metadata_only
from lightning_elixir.runtime.whole import whole_value
from lightning_elixir.runtime.written import BITS, WrittenMasters, has_bits_of
from lightning_elixir.storage.shards import Shard

if TYPE_CHECKING:
    from lightning_elixir.runtime.engine import Engine

# How long a call over a parameter in another thread may last.
_CALL_S = 5e-3
_CALL_BYTES_PER_S = 1e9

_WRITE_CURE = (
    "parameters may be written between steps, not between the forward and the backward that uses them: move the write "
    "to after optimizer.step(), which under automatic optimization is on_train_batch_end"
)


class _StateDict(threading.local):
    """The `state_dict()` that a thread is in."""

    depth = 0
    """Modules whose `state_dict()` runs."""
    whole: dict[str, Tensor] | None = None
    """Values by FQN, taken when the first was asked for."""
    num_changes = 0
    """`Interception._num_changes` when it began."""


class _WhileThere:
    """Passes on to an interception, which it does not keep alive: parameters' classes have this. Graphs keep parameters
    where the garbage collector cannot look, and modules keep graphs, as in a list of losses.

    Args:
        interception: Of the engine.
    """

    def __init__(self, interception: Interception) -> None:
        self._reference = weakref.ref(interception)

    def intercept(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        interception = self._reference()
        if interception is not None:
            return interception.intercept(func, args, kwargs)
        if func in released.metadata_functions():
            with torch._C.DisableTorchFunctionSubclass(), metadata_only():
                return func(*args, **kwargs)
        raise StateError(f"a parameter was used {GONE}")

    def plain_copy(self, parameter: nn.Parameter) -> nn.Parameter:
        interception = self._reference()
        if interception is None:
            raise StateError(f"a parameter was copied {GONE}")
        return interception.plain_copy(parameter)


class Interception:
    """Classes of the managed parameters, and the handler of intercepted calls.

    Args:
        engine: Fetches chunks.
        chunks: All of its chunks; their parameters become intercepting ones.
    """

    def __init__(self, engine: Engine, chunks: Sequence[Chunk]) -> None:
        self._engine = engine
        self._chunks = chunks
        self.plain_chunks: set[int] = set()
        """Chunks (by id) whose parameters are not intercepted now."""
        self._state_dict = _StateDict()
        self._versions: list[int] = []  # of parameters, when the forward began
        self.lost_writes = LostWrites(engine)
        self._num_changes = 0  # of values, as far as a state_dict() must not go on over them
        self.written = WrittenMasters()
        self._aliases = Aliases()
        interceptor = _WhileThere(self)
        made: dict[type, type[nn.Parameter]] = {}
        self._classes: list[list[tuple[nn.Parameter, type, type]]] = []  # per chunk: parameter, plain, intercepting
        self._parameters = [p for chunk in chunks for p in chunk.parameters]
        self._frozen = [chunk for chunk in chunks if not chunk.spec.requires_grad]
        has_master, is_first = engine.precision.master is not None, engine.comm.rank == 0
        self.frozen_copies = FrozenCopies(
            chunks, engine.module, self._is_trained, has_master=has_master, tells=is_first
        )
        excepted = _set_to_themselves(engine.module)
        self._counted = [p for p in self._parameters if id(p) not in excepted]
        for chunk in chunks:
            rows = []
            for parameter in chunk.parameters:
                base = type(parameter)
                if base not in made:
                    made[base] = released.make_intercepting_class(base, interceptor)
                rows.append((parameter, base, made[base]))
            self._classes.append(rows)
            self.plain_chunks.add(chunk.id)
            chunk.watch_reads(self._bring)
        self.guard_all()

    def _is_trained(self, chunk_id: int, index: int) -> bool:
        """Whether an optimizer has a member of a chunk."""
        return any(index in states.members.get(chunk_id, ()) for states in self._engine.steps.optimizers.states)

    # Classes

    def class_of(self, chunk: Chunk, index: int) -> type[nn.Parameter]:
        """A parameter's own class, which it has while it is not intercepted."""
        return self._classes[chunk.id][index][1]

    def make_plain(self, chunk: Chunk) -> None:
        """Stop intercepting a chunk that is in use. Not where the chunk may go and threads other than the one that
        trains use parameters: they would not be intercepted either."""
        if chunk.id not in self.plain_chunks and not self._is_read_elsewhere(chunk):
            self._make_plain(chunk.id)

    def make_plain_for_compiled(self, ids: Sequence[int]) -> None:
        """As `make_plain`, for chunks that compiled code is about to use: in any case, since the compiler must see the
        classes that it has seen before. Other threads are waited for when the chunk goes."""
        for chunk_id in ids:
            self._make_plain(chunk_id)

    def _make_plain(self, chunk_id: int) -> None:
        if chunk_id not in self.plain_chunks:
            self.plain_chunks.add(chunk_id)
            for parameter, plain, _ in self._classes[chunk_id]:
                parameter.__class__ = plain

    def guard(self, chunk: Chunk) -> None:
        """From here on, touching the chunk's parameters is intercepted."""
        if chunk.id in self.plain_chunks:
            self.plain_chunks.discard(chunk.id)
            for parameter, _, intercepting in self._classes[chunk.id]:
                parameter.__class__ = intercepting
            if self._is_read_elsewhere(chunk):
                # Another thread may have begun a call over one of them when they were plain.
                time.sleep(_CALL_S + chunk.spec.nbytes / _CALL_BYTES_PER_S)

    def _is_read_elsewhere(self, chunk: Chunk) -> bool:
        """Whether another thread than the one that trains may read its parameters when it goes."""
        return self._engine.turn.was_contended and not chunk.spec.is_persistent

    def guard_again(self, ids: Sequence[int]) -> None:
        """The compiled code is over, where parameters are intercepted."""
        for chunk_id in ids:
            self.guard(self._chunks[chunk_id])

    def guard_all(self) -> None:
        for chunk_id in list(self.plain_chunks):
            self.guard(self._chunks[chunk_id])

    def have_gradient_hooks(self) -> bool:
        """Whether users have hooks at parameters, which backward runs."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._parameters:
                if parameter._backward_hooks or len(parameter._post_accumulate_grad_hooks or ()) > 1:  # 1: our own
                    return True
            return False

    # Writes that must not happen

    def note_versions(self) -> None:
        """A forward begins, over the values that parameters have now.

        Raises:
            StateError: If a parameter that was frozen when the plan was made now requires a gradient.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for chunk in self._frozen:
                for index, parameter in enumerate(chunk.parameters):
                    if parameter.requires_grad:
                        raise StateError(
                            f"{chunk.spec.members[index].fqn} was frozen when the model was set up and now "
                            "requires a gradient: it has no place for gradient and optimizer states; unfreeze it "
                            "before training starts"
                        )
        self._versions = self._count()

    def _count(self) -> list[int]:
        """Autograd's version counters: users' writes and updates show in them, chunks that move do not."""
        with torch._C.DisableTorchFunctionSubclass():
            return [p._version for p in self._counted]

    def forget_versions(self) -> None:
        """No forward waits for its backward any more."""
        self._versions = []
        self.lost_writes.forget()

    def check_bound(self, where: str) -> None:
        """Raises `StateError` if a parameter was given other memory, in which its values would be lost, or was written
        through `p.data`."""
        if lost := self.lost_writes.found(is_after_forward=where == "forward"):
            raise StateError(self._written_inside(where, lost))
        replaced = [c.spec.members[index].fqn for c in self._chunks for index in c.take_replaced()]
        if replaced:
            raise StateError(
                f"parameters were given other values, or another dtype or device, inside {where} (as `p.data = x`, "
                f"`.half()` and `.to(device)` do): {', '.join(replaced[:5])}; {_WRITE_CURE}, and choose the dtype with "
                f"the precision{self._cure_of_frozen(replaced)}"
            )

    def _written_inside(self, where: str, names: Sequence[str]) -> str:
        """The message for parameters that were written where that does not count."""
        shown = ", ".join(names[:5])
        return f"parameters were written inside {where}: {shown}; {_WRITE_CURE}{self._cure_of_frozen(names)}"

    def _cure_of_frozen(self, names: Sequence[str]) -> str:
        """What else serves where all of them are frozen, as a teacher that follows an average."""
        frozen = {member.fqn for chunk in self._frozen for member in chunk.spec.members}
        if not frozen.issuperset(names):
            return ""
        return "; or name them, or their module, in ignored=: out of chunks frozen ones may be written at any time"

    def check_unwritten(self, where: str) -> None:
        """Raises `StateError` if a parameter was written, in place or by assignment, since the forward began."""
        self.check_bound(where)
        if written := self.written_since_forward():
            raise StateError(self._written_inside(where, written))

    def written_since_forward(self) -> list[str]:
        """The parameters that were written in place or by assignment since the last forward with gradients began."""
        versions = self._versions
        if not versions:
            return []
        now = self._count()
        if versions == now:
            return []
        return [self.name_of(p) for p, a, b in zip(self._counted, versions, now, strict=True) if a != b]

    # Intercepted calls

    def intercept(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func in DESCRIBING and holds_shells(args):
            return func(*described(args), **described(dict(kwargs)))
        if func in released.metadata_functions() and not (func in released.factories() and holds_shells(args)):
            if func in released.GRAD_GETTERS:
                return self._grad_of(args[0], func)
            with torch._C.DisableTorchFunctionSubclass(), metadata_only():
                result = func(*args, **kwargs)
            self._check_stays(args[0] if args else None, result)
            return result
        if func in released.GRAD_SETTERS:
            return self._set_grad(func, args)
        engine = self._engine
        if func == released.DETACH and self._is_in_state_dict():
            return self._whole_value(args[0])
        if func in released.BACKWARD_FUNCTIONS:  # a backward has a turn of its own
            with self._made_plain([t for t in released.tensors_in((args, dict(kwargs))) if engine.home_of(t)]):
                return func(*args, **kwargs)
        with engine.turn.call("a parameter was used"):
            engine.phases.check_open()  # now, since a thread that has waited for its turn may have waited for `close`
            engine.leave_interrupted()
            return self._call(func, args, kwargs)

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        engine = self._engine
        managed = [t for t in released.tensors_in((args, dict(kwargs))) if engine.home_of(t) is not None]
        ids = tuple(dict.fromkeys(self._chunk_of(p).id for p in managed))
        if func == released.DATA_SETTER:
            return self._assign_data(args[0], args[1])
        if engine.is_computing:
            result = self._call_in_compute(func, args, kwargs, ids, has_shells=holds_shells(managed))
            if func == released.DATA_GETTER:
                self.lost_writes.watch(self.name_of(args[0]), self._at(args[0])[0], result)
            return result
        has_copies = not self.frozen_copies.chunk_ids.isdisjoint(ids)
        if has_copies:
            self.frozen_copies.touch(managed)
        result = self._call_between_steps(func, args, kwargs, managed, ids)
        if has_copies:
            self.frozen_copies.note(func, args, kwargs, result)
        self._check_stays(managed[0], result)
        if is_shell(result):
            return (
                result
                if func == released.DETACH or not released.is_module_converted()
                else self._kept_shell(args[0], result)
            )
        for chunk_id in ids:
            self._aliases.note(self._chunks[chunk_id], result)
        if func == released.COPY and engine.home_of(args[0]) is not None:
            self._write_master(args[0], args[1] if len(args) > 1 else kwargs["src"])
        return result

    def _kept_shell(self, parameter: Any, result: Tensor) -> Any:
        """What a method of a module's that converts it gets of a shell: the parameter, if it stays as it is.

        Raises:
            StateError: It does not.
        """
        now = parameter.dtype, parameter.device
        if (result.dtype, result.device) == now:
            return parameter
        raise StateError(
            f"{self.name_of(parameter)} ({now[0]}, {now[1]}) is managed by lightning_elixir and cannot become"
            f" {result.dtype}, {result.device} with its module: convert a copy (copy.deepcopy(model))"
        )

    def _check_stays(self, parameter: object, result: object) -> None:
        """Raises `StateError` where a module goes to `meta`: torch would put what has no values in the place of
        the parameter, without a word."""
        if not (isinstance(result, Tensor) and result.is_meta and isinstance(parameter, Tensor)):
            return
        if self._engine.home_of(parameter) is not None and released.is_module_converted():
            raise StateError(
                f"{self.name_of(parameter)} is managed by lightning_elixir and cannot go to the meta device with its "
                "module: convert a copy (copy.deepcopy(model).to('meta')); to have its memory back, call close()"
            )

    def _call_in_compute(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        ids: tuple[int, ...],
        *,
        has_shells: bool,
    ) -> Any:
        engine = self._engine
        if func in released.RAW_POINTER_FUNCTIONS:
            engine.writes.pin_for_pointer(ids)
            with self._as_plain(ids):
                return func(*args, **kwargs)
        engine.forwards.make_way(ids)
        # Pinned while the function runs: it may be a composite that touches its parameters one after the other.
        engine.acquire(ids, pin=True)
        try:
            if has_shells:
                with engine.forwards.packing():
                    return call_opened(func, args, kwargs)  # their class has torch functions of its own
            with self._as_plain(ids), engine.forwards.packing():
                return func(*args, **kwargs)
        finally:
            engine.drop(ids)

    def _as_plain(self, ids: Sequence[int]) -> AbstractContextManager[None]:
        """Inside, this thread is not intercepted at the parameters of these chunks, which are in use."""
        if self.plain_chunks.issuperset(ids):
            return nullcontext()
        return torch._C.DisableTorchFunctionSubclass()

    def _call_between_steps(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        managed: Sequence[Tensor],
        ids: tuple[int, ...],
    ) -> Any:
        engine = self._engine
        if func in released.RAW_POINTER_FUNCTIONS:
            engine.writes.pin_for_pointer(ids)
        engine.acquire(ids, pin=True)
        engine.writes.touch(ids)
        try:
            if holds_shells(managed):  # others among them are intercepted in their turn
                with engine.forwards.packing():
                    return call_opened(func, args, kwargs)
            with self._made_plain(managed), engine.forwards.packing():
                return func(*args, **kwargs)
        finally:
            engine.drop(ids)

    @contextmanager
    def _made_plain(self, managed: Sequence[Tensor]) -> Iterator[None]:
        """Inside, these parameters are not intercepted."""
        if self._engine.turn.was_contended:
            with torch._C.DisableTorchFunctionSubclass():
                yield
            return
        try:
            for tensor in managed:
                tensor.__class__ = self._plain_class(tensor)
            yield
        finally:
            for tensor in managed:  # a backward has brought chunks meanwhile, and let others go
                chunk, index = self._at(tensor)
                _, plain, intercepting = self._classes[chunk.id][index]
                tensor.__class__ = plain if chunk.id in self.plain_chunks else intercepting

    @contextmanager
    def _bring(self, chunk: Chunk) -> Iterator[None]:
        """Keep a chunk resident while its parameters are read in a way that is not intercepted."""
        engine, ids = self._engine, (chunk.id,)
        with engine.turn.call("a parameter was read"):
            engine.phases.check_open()
            engine.leave_interrupted()
            is_between_steps = not engine.is_computing
            engine.acquire(ids, pin=True)
            if is_between_steps:
                engine.writes.touch(ids)
            try:
                yield
            finally:
                engine.drop(ids)

    def _grad_of(self, parameter: Tensor, getter: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        """`parameter.grad` (Note: visible gradients, `runtime/gradients.py`)."""
        with self._engine.turn.call("a gradient was read"):
            self._engine.leave_stale_backward()
            return self._read_grad(parameter, getter)

    def _read_grad(self, parameter: Tensor, getter: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        engine = self._engine
        chunk, index = self._at(parameter)
        access = released.grad_access()
        if access in (released.GradAccess.ZERO_GRAD, released.GradAccess.FILL_GRAD):
            engine.steps.drop_gradient(chunk, index, to_zero=access is released.GradAccess.FILL_GRAD)
            return None
        with torch._C.DisableTorchFunctionSubclass():
            just_accumulated = getter(parameter)  # by autograd, and not taken yet
        is_there = engine.reducer.has_grad(chunk.id, index)
        if just_accumulated is not None and (chunk.id, index) in engine.reducer.used:
            raise StateError(
                f"the gradient of {self.name_of(parameter)} is that of one backward here, without those before it that "
                "it is added to: read it after the last backward and before the step (in on_after_backward or "
                "on_before_optimizer_step)"
            )
        if just_accumulated is not None or engine.is_closed:
            return just_accumulated
        if engine.is_computing:
            # (A compiler that comes upon a parameter of another module looks as well; there it is as if it had none.)
            if not is_there or CompileContext.try_get() is not None:
                return None
            raise StateError(
                f"the gradient of {self.name_of(parameter)} cannot be read inside {engine.phase.value}: read it after "
                "backward and before the step (in on_after_backward or on_before_optimizer_step), or from a hook that "
                "was registered at the parameter before the model was wrapped"
            )
        if access is released.GradAccess.STEP and (engine.reducer.used or engine.reducer.zeros):
            raise StateError(
                f"{self.name_of(parameter)} is managed by lightning_elixir and has its gradient in a shard: a plain "
                "optimizer's step() would not find it. Step the ElixirOptimizer (self.optimizers() under the Trainer, "
                "what setup has returned under Fabric), or take plain parameters from copy.deepcopy(model)"
            )
        return engine.gradients.read(chunk, index)

    def _set_grad(self, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        parameter, value = args
        chunk, index = self._at(parameter)
        with self._engine.turn.call("a gradient was set"):
            self._engine.leave_stale_backward()
            with torch._C.DisableTorchFunctionSubclass():
                # Not taken yet: by a hook from before the model was wrapped, and what it sets is taken.
                is_before_ours = self._engine.is_computing and parameter.grad is not None
                func(parameter, value)  # which checks that it fits
                if value is not None and is_before_ours:
                    return
                func(parameter, None)
            if value is None:
                self._engine.steps.drop_gradient(chunk, index)
            else:
                self._engine.gradients.write(chunk, index, value)

    def _assign_data(self, parameter: Tensor, value: Tensor) -> None:
        """`p.data = value`: the values are taken over, the binding stays (Note: assignment, `runtime/aliases.py`)."""
        if value is parameter:
            return
        if isinstance(parameter, ShellParameter):
            raise StateError(
                f"{self.name_of(parameter)} is managed by lightning_elixir, which keeps the bytes of what is inside:"
                " copy_() new values into it, instead of assigning `.data`"
            )
        if value.shape != parameter.shape or value.dtype != parameter.dtype or value.device != parameter.device:
            cure = (
                "choose the precision with `precision=`, leave the device to the strategy, or deepcopy the model to get"
                " plain parameters"
                if value.shape == parameter.shape
                else "resize a model before it is wrapped (under the Trainer in configure_model or setup), or a copy"
                " (copy.deepcopy(model))"
            )
            raise StateError(
                f"{self.name_of(parameter)} ({parameter.dtype}, {tuple(parameter.shape)}, {parameter.device}) is "
                f"managed by lightning_elixir and cannot become {value.dtype}, {tuple(value.shape)}, {value.device}: "
                f"{cure}"
            )
        if self._engine.is_computing:
            raise StateError(self._written_inside(self._engine.phase.value, [self.name_of(parameter)]))
        chunk, index = self._at(parameter)
        if self._aliases.is_whole(chunk, index, value):
            return
        with torch.no_grad():
            with self._bring(chunk):
                self._aliases.part(chunk, index)
            parameter.copy_(value)

    # Writes between steps

    def absorb(self, chunk: Chunk) -> None:
        """Bring what was written to a resident replica to this rank's shard and master.

        Where there is a master, only the elements whose compute-dtype value changed are taken: the others keep the bits
        that the compute dtype does not have, and those that are as they were before get them back (Note: what is put
        back, `runtime/written.py`).

        Raises:
            StateError: The chunk's update has begun inside backward, so old values cannot be told from written ones.
        """
        engine = self._engine
        if engine.reducer.has_begun(chunk.id):
            raise StateError(
                f"{chunk.spec} was used between backward and step, when its update had begun already: do that after "
                "the step, or use update_timing='behind_forward'"
            )
        shard = engine.store.settle(chunk.id)
        with torch.no_grad():
            mine = engine.groups.mine(chunk.spec, chunk.flat)
            if shard.is_param_on_disk and has_bits_of(mine, shard.read_param()):
                return
            master = self._master_to_change(chunk, shard, mine)
            if master is not None:
                written = mine.to(master.device)
                bits = BITS[written.dtype.itemsize]
                changed = written.view(bits) != master.to(chunk.dtype).view(bits)
                if bool(changed.any()):
                    self._write_over(chunk, shard, master, written, changed)
            if shard.param is not None and not shard.is_param_overwritten:
                shard.param.copy_(mine if engine.plan.is_storage_distributed else chunk.flat)
            shard.keep_param(mine)

    def _write_over(self, chunk: Chunk, shard: Shard, master: Tensor, values: Tensor, changed: Tensor) -> None:
        """Bring a shard's values to its master, where they are not that, rounded (`changed`)."""
        engine = self._engine
        has_changed = False
        for segment in engine.groups.segments(chunk.spec):
            at = slice(segment.shard_offset, segment.shard_offset + segment.numel)
            if bool(changed[at].any()):  # and not only padding, which holds anything
                if not has_changed:
                    engine.reducer.withdraw((chunk.id,))
                has_changed = True
                key = chunk.id, segment.member_index
                self.written.absorb(key, master[at], values[at], engine.store.keeper(chunk.id))
        if has_changed:
            shard.keep_master(master)

    def _master_to_change(self, chunk: Chunk, shard: Shard, values: Tensor) -> Tensor | None:
        """The master that these values of the replica may have to be brought to. One on a disk is only read if they are
        others than those of the compute shard, which is that master, cast."""
        param = shard.param
        if shard.on_disk is None or not shard.has_master or param is None or param.numel() != values.numel():
            return shard.read_master()
        return None if has_bits_of(values, param) else shard.read_master()

    def _write_master(self, parameter: Tensor, value: Tensor) -> None:
        """After `p.copy_(value)`: the master takes the value as given, not as rounded to the compute dtype."""
        engine = self._engine
        chunk, index = self._at(parameter)
        shard = engine.store.settle(chunk.id)
        if not shard.has_master or not isinstance(value, Tensor):
            return
        is_rounded = value.dtype == chunk.dtype
        if is_rounded and not self.written.has_given(chunk.id, index):
            return  # what was written is seen in the replica
        master = shard.read_master()
        if master is None:
            return
        is_load = not is_rounded and (master.dtype == chunk.dtype or released.is_loading())
        if is_load:
            self.written.forget({chunk.id: (index,)})
        engine.reducer.withdraw((chunk.id,))
        stride = chunk.strides[index]
        with torch.no_grad():
            if stride is None:
                exact = torch.empty(chunk.spec.members[index].shape, dtype=master.dtype, device="cpu")
            else:
                exact = torch.empty_strided(chunk.spec.members[index].shape, stride, dtype=master.dtype, device="cpu")
            exact.copy_(value)
            flat = exact.as_strided((exact.numel(),), (1,))
            segment = engine.groups.segment(chunk.spec, index)
            if segment is not None:
                part, own = flat[segment.in_param], master[segment.in_shard]
                if is_rounded:
                    self.written.give_rounded((chunk.id, index), own, part.to(chunk.dtype))
                elif is_load:
                    own.copy_(part)
                else:
                    self.written.give((chunk.id, index), own, part, engine.store.keeper(chunk.id))
            shard.keep_master(master)

    # Copies

    def plain_copy(self, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter of no engine, on the compute device; between steps in the model's own dtype, with all the bits
        that a master has. Collective."""
        engine, (chunk, index) = self._engine, self._at(parameter)
        if isinstance(parameter, ShellParameter):
            with torch.no_grad(), self._bring(chunk), torch._C.DisableTorchFunctionSubclass():
                # Out of the bytes: some classes quantise anew where a shell is copied.
                data = parameter.layout_at_elixir.taken_out(parameter.detach())
            return nn.Parameter(data, requires_grad=False)
        with torch.no_grad():
            if chunk.original_dtypes[index] == chunk.dtype or engine.is_computing:
                data = parameter.clone(memory_format=torch.preserve_format)
            else:
                with engine.meeting(Meeting.STATE):
                    data = whole_value(engine, chunk, index).to(engine.device.torch_device)
        copied = nn.Parameter(data, requires_grad=parameter.requires_grad)
        copied.__class__ = self._plain_class(parameter)
        copied.__dict__.update(parameter.__dict__)
        return copied

    def enter_state_dict(self) -> None:
        mine = self._state_dict
        if not self._is_in_state_dict():
            mine.num_changes = self._num_changes
        mine.depth += 1

    def exit_state_dict(self) -> None:
        mine = self._state_dict
        mine.depth = max(0, mine.depth - 1)
        if mine.depth == 0:
            mine.whole = None

    def take_parts(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """`load_state_dict()` gets whole values, as `state_dict()` gives them: of a module's own parameters that are
        cut, put this rank's parts in their places.

        Args:
            state: What is loaded, by name; a dict of its own.
            prefix: Of the module's names.
        """
        groups = self._engine.groups
        for name, parameter in module._parameters.items():
            home = None if parameter is None else self._engine.home_of(parameter)
            value = state.get(prefix + name)
            if home is not None and isinstance(value, Tensor):
                member = home[0].spec.members[home[1]]
                if tuple(value.shape) == groups.whole_shape(member):
                    state[prefix + name] = groups.part_of(member, value)

    def forget_state_dict(self) -> None:
        """Values change now: what an exception may have left of a `state_dict()` is none."""
        self._num_changes += 1

    def _is_in_state_dict(self) -> bool:
        """Whether this thread is in a `state_dict()`."""
        mine = self._state_dict
        if mine.depth and mine.num_changes != self._num_changes and not released.is_in_state_dict():
            mine.depth, mine.whole = 0, None  # an exception has ended it
        return mine.depth > 0

    @contextmanager
    def whole_state(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, `state_dict()` takes parameters from `values` (by FQN), and asks no other rank."""
        self.enter_state_dict()
        self._state_dict.whole = dict(values)
        try:
            yield
        finally:
            self.exit_state_dict()

    def _whole_value(self, parameter: Tensor) -> Tensor:
        """`state_dict()` of the model or a part of it: whole values on the CPU, in the model's own dtype."""
        mine = self._state_dict
        if mine.whole is None:
            mine.whole = self._engine.whole_values()
        return mine.whole[self.name_of(parameter)]

    def name_of(self, parameter: Tensor) -> str:
        chunk, index = self._at(parameter)
        return chunk.spec.members[index].fqn

    def _at(self, parameter: Tensor) -> tuple[Chunk, int]:
        home = self._engine.home_of(parameter)
        if home is None:
            raise StateError("this tensor is not a managed parameter")
        return home

    def _chunk_of(self, parameter: Tensor) -> Chunk:
        return self._at(parameter)[0]

    def _plain_class(self, parameter: Tensor) -> type:
        chunk, index = self._at(parameter)
        return self._classes[chunk.id][index][1]


def _set_to_themselves(model: nn.Module) -> frozenset[int]:
    """The `id` of each parameter that peft adapts by itself, such as the experts of a mixture in one parameter: in each
    forward torch makes it a parametrized one, by `p.set_(p)`, which counts as a write."""
    wrappers: list[Any] = [module for module in model.modules() if type(module).__name__ == "ParamWrapper"]
    return frozenset(id(wrapper.get_param()) for wrapper in wrappers)
