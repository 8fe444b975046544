"""The only file that registers module and autograd hooks; turns them into engine events."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from threading import get_ident
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_elixir.core.module_hooks import OwnHook
from lightning_elixir.core.shells import ShellParameter, is_shell, opened
from lightning_elixir.core.signals import deferring
from lightning_elixir.errors import StateError
from lightning_elixir.patterns.cuts import cuts_of
from lightning_elixir.plan.rcache import RCache
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.unreadable import GONE


class ForwardEvents(Protocol):
    """Gets the forwards of modules."""

    @property
    def modules(self) -> Sequence[nn.Module]: ...

    def enter_module(self, module: nn.Module, inputs: Any) -> None: ...

    def enter_covered(self, module: nn.Module, inputs: Any = None) -> None: ...

    def exit_module(self, module: nn.Module, inputs: Any, output: Any) -> None: ...


class BackwardEvents(Protocol):
    """Gets the gradients."""

    take: Callable[[int, int, nn.Parameter], object]
    """Gets the chunk, the member index and the parameter at which autograd has put a gradient down."""

    def note_outermost(self, grad: Tensor) -> None: ...

    def tell_of(self, error: BaseException) -> None: ...


class StateDictEvents(Protocol):
    """Gets the begin and end of every module's `state_dict()`, and what its `load_state_dict()` is about to load."""

    def enter_state_dict(self) -> None: ...

    def exit_state_dict(self) -> None: ...

    def take_parts(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None: ...


class _ModuleHook(OwnHook):
    """A hook that does nothing in copies of a module, and knows no engine there. Shallow copies share it: the engine
    knows its own modules only.

    Args:
        watched: Ids of those modules.
    """

    def __init__(self, call: Callable[..., None], watched: Collection[int]) -> None:
        self._call = call
        self._watched = watched

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if id(module) in self._watched:
            self._call(module, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_ModuleHook, (_nothing, ()))


def _nothing(*args: Any) -> None:
    return


_STRIDED = torch.strided
_new = tuple.__new__  # of named tuples, whose own takes three times as long
_PLAIN = frozenset((Tensor, nn.Parameter))  # nothing intercepts what is done with them
_CALL = "_compiled_call_impl"  # what a module is called by, where that is not None

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Gets what runs a module's call, and its arguments; gives its result."""


class _OwnCall:
    """In the place of a module's call: reports the forward around what `module.compile()` has made, which runs the
    module's hooks in compiled code; has an `Around` decide how the whole call runs, hooks included; and reports the
    begin of a covered forward, in less time than a hook takes. Copies of the module have no such calls; in those that
    are made of its `__dict__`, as torch's replicas and meta-learning's clones are, it does nothing."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.compiled: Any = module._compiled_call_impl
        """What the compiler has made; None if the module is not compiled."""
        self.forwards: ForwardEvents | None = None
        self.around: Around | None = None
        self.before: Callable[[nn.Module], None] | None = None
        """Called with the module when its forward begins, as a hook would be."""
        vars(module)[_CALL] = self  # not by its name: what `torch.compile(module)` gives would pass that on

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_locals.get("self")  # what torch's own `__call__` is run for: nothing else tells
        if caller is not self._module and isinstance(caller, nn.Module) and vars(caller).get(_CALL) is self:
            call = caller._call_impl if self.compiled is None else self.compiled
            return call(*args, **kwargs)
        if self.around is not None:
            return self.around(self._run, args, kwargs)
        if self.forwards is not None:
            return self._run(*args, **kwargs)
        if self.before is not None:
            self.before(self._module)
        call = self._module._call_impl if self.compiled is None else self.compiled
        return call(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            self.before(self._module)
        call = self._module._call_impl if self.compiled is None else self.compiled
        if self.forwards is None:
            return call(*args, **kwargs)
        output = None
        try:
            self.forwards.enter_module(self._module, args)
            output = call(*args, **kwargs)
            return output
        finally:
            self.forwards.exit_module(self._module, args, output)

    def __reduce__(self) -> tuple[Any, ...]:
        # torch's parametrized modules copy all their attributes, where others leave this one out.
        return type(None), ()

    def remove(self) -> None:
        attributes = vars(self._module)
        if attributes.get(_CALL) is not self:  # it was compiled again
            return
        if self.compiled is None:
            del attributes[_CALL]
        else:
            attributes[_CALL] = self.compiled


Begin = tuple[dict[str, Any], _OwnCall]
"""A module's attributes, and what stands among them in the place of its call to tell of it, and does no more."""


def set_aside(begins: Iterable[Begin]) -> None:
    """Have these modules run as they are, until `put_back`."""
    for attributes, call in begins:
        if attributes[_CALL] is call:  # else it was compiled since
            attributes[_CALL] = None


def put_back(begins: Iterable[Begin]) -> None:
    """Have these modules tell of their forwards again."""
    for attributes, call in begins:
        if attributes[_CALL] is None:
            attributes[_CALL] = call


class Hooks:
    """Handles of everything registered; `remove` takes all of it away.

    Args:
        forwards: Has the modules with parameters.
        backwards: Gets the gradients; not kept alive.
        state_dicts: Learns of the modules' state dicts.
        chunks: Whose trainable parameters report their gradients.
    """

    def __init__(
        self,
        forwards: ForwardEvents,
        backwards: BackwardEvents,
        state_dicts: StateDictEvents,
        chunks: Iterable[Chunk],
    ) -> None:
        self._forwards = forwards
        self._handles: list[RemovableHandle] = []
        self._forward_handles: list[RemovableHandle] = []
        self._calls: dict[int, _OwnCall] = {}  # by the id of the module
        self._around: list[tuple[nn.Module, Around]] = []
        self._watched_ids: set[int] = set()  # modules whose forwards are reported
        watched = {id(m) for m in forwards.modules}

        def before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            state_dicts.enter_state_dict()

        def after_state_dict(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
            state_dicts.exit_state_dict()

        def before_loading(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            state_dicts.take_parts(module, state, prefix)

        pre, post = _ModuleHook(before_state_dict, watched), _ModuleHook(after_state_dict, watched)
        load = _ModuleHook(before_loading, watched)
        for module in forwards.modules:
            self._handles.append(module.register_state_dict_pre_hook(pre))
            self._handles.append(module.register_state_dict_post_hook(post))
            if any(cuts_of(p) for p in module.parameters(recurse=False)):
                self._handles.append(module.register_load_state_dict_pre_hook(load))
        for chunk in chunks:
            for index, parameter in enumerate(chunk.parameters):
                if parameter.requires_grad:
                    collect = _grad_hook(backwards, chunk, index)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(collect))

    def run_around(self, around: Iterable[tuple[nn.Module, Around]]) -> None:
        """Have these decide how calls of their modules run, and no others; from the next `watch_forwards` on."""
        self._around = list(around)

    def watch_forwards(
        self, modules: Collection[nn.Module], covered: Collection[nn.Module] = (), hooked: Collection[nn.Module] = ()
    ) -> None:
        """Report the forwards of these modules, and of no others, from now on.

        Args:
            covered: Others, whose begin alone is reported, as `enter_covered`.
            hooked: Those of both that are told of in compiled code as well, which runs hooks, but not what stands in
                the place of a call.
        """
        by_hooks = {id(m) for m in hooked}
        for handle in self._forward_handles:
            handle.remove()
        for call in self._calls.values():
            call.remove()
        self._forward_handles.clear()
        self._calls.clear()
        self._watched_ids = {id(m) for m in (*modules, *covered)}
        pre = _ModuleHook(self._forwards.enter_module, self._watched_ids)
        light = _ModuleHook(self._forwards.enter_covered, self._watched_ids)
        for module in modules:
            if module._compiled_call_impl is not None or id(module) not in by_hooks:
                self._call_of(module).forwards = self._forwards
                continue
            self._forward_handles.append(module.register_forward_pre_hook(pre, prepend=True))
            self.watch_exit(module)
        for module in covered:
            if id(module) in by_hooks:
                self._forward_handles.append(module.register_forward_pre_hook(light, prepend=True))
            else:
                self._call_of(module).before = self._forwards.enter_covered
        for module, around in self._around:
            self._call_of(module).around = around

    def begins(self) -> dict[int, Begin]:
        """Of modules, by id, that are told of by what stands in the place of their call, which does no more."""
        return {
            key: (vars(call._module), call)
            for key, call in self._calls.items()
            if call.around is None and call.compiled is None
        }

    def _call_of(self, module: nn.Module) -> _OwnCall:
        call = self._calls.get(id(module))
        if call is None:
            call = self._calls[id(module)] = _OwnCall(module)
        return call

    def watch_exit(self, module: nn.Module) -> None:
        """Report the end of the forwards of a watched module as well; of the one that begins now, too."""
        post = _ModuleHook(self._forwards.exit_module, self._watched_ids)
        self._forward_handles.append(module.register_forward_hook(post, always_call=True))

    def remove(self) -> None:
        self._around.clear()
        self.watch_forwards(())
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


# Weak in what follows: torch keeps such hooks, at parameters and in graphs, where the garbage collector cannot look. A
# cycle through them would stay for ever, as with a module that keeps a list of losses.


def output_hook(backwards: BackwardEvents) -> Callable[[Tensor], None]:
    """For outputs of the model: tells that a bare `loss.backward()` has reached one."""
    reference = weakref.ref(backwards)

    def reached(grad: Tensor) -> None:
        owner = reference()
        if owner is not None:
            owner.note_outermost(grad)

    return reached


def _grad_hook(backwards: BackwardEvents, chunk: Chunk, index: int) -> Callable[[Tensor], None]:
    reference, chunk_id = weakref.ref(backwards), chunk.id

    def collect(parameter: nn.Parameter) -> None:
        owner = reference()
        if owner is None:
            return
        try:
            owner.take(chunk_id, index, parameter)
        except BaseException as error:
            owner.tell_of(error)
            raise

    return deferring(collect)


top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""What packs and unpacks the tensors that autograd saves now; None: nothing does."""


Pack = Callable[[Tensor], Any]
"""Makes what is kept of a tensor that autograd saves."""


def innermost_pack() -> Pack | None:
    """What packs the tensors that autograd saves now."""
    top = top_hooks(False)
    return None if top is None else top[0]


class ThreadHooks(torch.autograd.graph.saved_tensors_hooks):
    """Hooks for saved tensors, which torch keeps for each thread and for each backward: those of another one are not
    taken away. (An exception that leaves autograd's backward takes along what was entered in it.)"""

    _place = (0, 0)

    def __enter__(self) -> None:
        self._place = self._here()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        if self._place == self._here():
            super().__exit__(*error)

    @staticmethod
    def _here() -> tuple[int, int]:
        return threading.get_ident(), torch._C._current_graph_task_id()


class SavedTensors:
    """Saved tensors that lie in managed storage are kept as (chunk, offset, size, stride), so that saving keeps no
    replica alive; unpacking makes the chunk resident again. All others are kept as autograd would keep them, with the
    check that they were not overwritten since, which torch leaves to the hooks.

    Autograd may keep a saved leaf by itself, not by another tensor over its storage, and so may a user's own hooks:
    nothing would tell that its storage is still needed, and it would be brought late, when it is read. So ours are on
    wherever a managed parameter may be saved; torch calls the innermost pair only, so where that is the user's, ours
    pass on to it what is not managed.

    Args:
        chunks: By storage key.
        need: Bound method, whose object is not kept alive, called with a chunk, a function and a packed tensor: gives
            what the function makes of that when the chunk's elements are there.
    """

    def __init__(
        self,
        chunks: dict[int, Chunk],
        need: Callable[[Chunk, Callable[[PackedTensor], Tensor], PackedTensor], Tensor],
    ) -> None:
        self._chunks = chunks
        self._need_of = weakref.WeakMethod(need)
        # What was unpacked or accessed last, where the trace has more of the same chunk next: the thread, and what
        # counts these.
        self._at_hand: Chunk | None = None
        self._at_hand_in = 0
        self._rcache: RCache | None = None

    def note_at_hand(self, chunk: Chunk, rcache: RCache) -> None:
        """A chunk is there for what this thread does, and nothing was to be done for it. As long as `rcache` hears of
        nothing else, that is so for what is unpacked next of the same chunk, of which it then need not hear."""
        if rcache.grant(chunk.id):
            self._at_hand, self._at_hand_in, self._rcache = chunk, get_ident(), rcache

    def take_repeat(self, chunk: Chunk) -> bool:
        """Whether that is so at one more access of a chunk, which is counted with this."""
        rcache = self._rcache
        if chunk is not self._at_hand or rcache is None or not rcache.repeats or self._at_hand_in != get_ident():
            return False
        rcache.repeats -= 1
        return True

    def context(self) -> ThreadHooks | None:
        """Hooks to enter now; None where ours are innermost already, or activation checkpointing's are: those keep no
        tensor in the forward, and in the recomputation another tensor over the storage, which shows as an alias, or a
        frozen parameter itself, which brings its chunk when it is read."""
        top = top_hooks(False)
        if top is None:
            return ThreadHooks(self._pack, self.unpack)
        if self.is_covered_by(top[0]):
            return None
        both = _OverUsers(self, *top)
        return ThreadHooks(both.pack, both.unpack)

    def leave(self) -> None:
        """Take away what a signal has left on, which came where a context had just ended or not yet begun. To be called
        where no forward and no backward is open."""
        while (pack := innermost_pack()) is not None and self._is_own(pack):
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def _is_own(self, pack: Callable[[Tensor], Any]) -> bool:
        owner = getattr(pack, "__self__", None)
        return owner is self or (isinstance(owner, SavedBeside) and owner.outer is self)

    def is_alone(self) -> bool:
        """Whether neither the user's hooks nor activation checkpointing's get what autograd saves now."""
        pack = innermost_pack()
        return pack is None or getattr(pack, "__self__", None) is self

    def is_covered_by(self, pack: Pack) -> bool:
        """Whether `context` is None where this is innermost."""
        return getattr(pack, "__module__", "") == "torch.utils.checkpoint" or self._is_own(pack)

    def packed(self, tensor: Tensor) -> PackedTensor | PackedShell | None:
        """The handle of a tensor in managed storage, or of a shell around one; None for any other."""
        if type(tensor) not in _PLAIN and is_shell(tensor):
            shell = PackedShell.of(tensor.detach(), self.packed)
            return None if any(part is None for part in shell.parts.values()) else shell
        return self._packed_plain(tensor)

    def _packed_plain(self, tensor: Tensor) -> PackedTensor | None:
        """As `packed`, of what is around no others."""
        try:
            chunk = self._chunks.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # tensors without storage: sparse ones, functorch's wrappers
            return None
        return None if chunk is None else self._packed_of(chunk, tensor)

    @staticmethod
    def _packed_of(chunk: Chunk, tensor: Tensor) -> PackedTensor | None:
        """As `_packed_plain`, of what lies in a chunk's storage."""
        offset, dtype = int(tensor.storage_offset()), tensor.dtype
        if tensor.layout is not _STRIDED or tensor.is_neg() or (dtype.is_complex and tensor.is_conj()):
            return None
        at = offset if dtype is chunk.dtype else offset * dtype.itemsize // chunk.dtype.itemsize
        index = chunk.index_at.get(at)  # where a member begins, as nearly always
        if index is None:
            index = chunk.member_at(at)
        member = chunk.parameters[index]
        version = member._version if type(member) in _PLAIN else _version_of(member)
        return _new(PackedTensor, (chunk, tensor.size(), tensor.stride(), offset, dtype, index, version))

    def unpacked(self, packed: PackedTensor | PackedShell) -> Tensor:
        if isinstance(packed, PackedShell):
            return packed.tensor(self.unpacked)
        return self._need(packed)

    def _need(self, packed: PackedTensor) -> Tensor:
        need = self._need_of()
        if need is None:
            raise StateError(f"backward needs {packed.chunk.spec.members[packed.member].fqn} {GONE}")
        return need(packed.chunk, _made, packed)

    def _pack(self, tensor: Tensor) -> Any:
        packed: Any = None
        if type(tensor) in _PLAIN:  # as nearly always; what `packed` and `kept` do, in one call
            try:
                chunk = self._chunks.get(tensor.untyped_storage()._cdata)
                if chunk is None:
                    node = tensor.grad_fn
                    if node is None:
                        return _new(_Kept, (tensor, tensor._version, None))
                    return _new(_Kept, (tensor.detach(), tensor._version, type(node)))
            except (NotImplementedError, RuntimeError):  # without storage or, in inference mode, a version
                chunk = None
            if chunk is not None:
                packed = self._packed_of(chunk, tensor)
            return self.kept(tensor) if packed is None else packed
        with torch._C.DisableTorchFunctionSubclass():
            packed = self.packed(tensor)
            return self.kept(tensor) if packed is None else packed

    @staticmethod
    def kept(tensor: Tensor) -> Any:
        """A tensor in other storage, as it is; to be called without torch functions."""
        if tensor.is_inference():
            return tensor  # nothing can write to it
        node = tensor.grad_fn
        if node is None:
            return _new(_Kept, (tensor, tensor._version, None))
        # An output that is kept as it is keeps the node that keeps it: a graph without a backward would never go.
        return _new(_Kept, (tensor.detach(), tensor._version, type(node)))

    def unpack(self, packed: Any) -> Tensor:
        """What was packed here, or by `packed` and `kept`."""
        kind = type(packed)
        tensor: Tensor = packed
        if kind is _Kept:
            tensor, version, _ = packed
            if (tensor._version if type(tensor) in _PLAIN else _version_of(tensor)) != version:
                raise RuntimeError(_overwritten(packed))
        elif kind is PackedTensor:
            rcache = self._rcache
            is_at_hand = packed.chunk is self._at_hand and self._at_hand_in == get_ident()
            if is_at_hand and rcache is not None and rcache.repeats:
                rcache.repeats -= 1
                return _made(packed)
            tensor = self._need(packed)
        elif kind is PackedShell:
            tensor = self.unpacked(packed)
        return tensor


class PackedTensor(NamedTuple):
    """What is kept of a saved tensor in managed storage."""

    chunk: Chunk
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """In elements of its own dtype."""
    dtype: torch.dtype
    """The chunk's, unless it is a part of a shell, or a view in another dtype."""
    member: int
    """Index of the parameter that it is, or is a view of."""
    version: int
    """Of that parameter, when it was saved."""


class PackedShell(NamedTuple):
    """What is kept of a saved tensor around others."""

    kind: Any
    parts: dict[str, Any]
    """What is kept of these, by the names that the tensor has for them."""
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any, pack: Callable[[Tensor], Any]) -> PackedShell:
        """Args:
        tensor: Which needs no gradient.
        pack: Gives what is to be kept of a tensor inside.
        """
        names, context = tensor.__tensor_flatten__()
        found = {name: getattr(tensor, name) for name in names}  # of newer torch also what is no tensor
        parts = {name: pack(value) if isinstance(value, Tensor) else value for name, value in found.items()}
        return cls(type(tensor), parts, context, tensor.size(), tensor.stride())

    def tensor(self, unpack: Callable[[Any], Tensor]) -> Tensor:
        """One as it was."""
        parts = {
            name: unpack(part) if isinstance(part, (PackedTensor, PackedShell)) else part
            for name, part in self.parts.items()
        }
        made: Tensor = self.kind.__tensor_unflatten__(parts, self.context, self.size, self.stride)
        return made


class _Kept(NamedTuple):
    """A saved tensor in other storage."""

    tensor: Tensor
    version: int
    """Autograd's count of in-place writes to it, when it was saved."""
    node: type | None
    """Of the operator that it is an output of, by whose name it is called; None for a leaf."""


def _version_of(tensor: Tensor) -> int:
    """Autograd's count of in-place writes to it, of which no interception learns."""
    if type(tensor) in _PLAIN:
        return tensor._version
    with torch._C.DisableTorchFunctionSubclass():
        return tensor._version


def _made(packed: PackedTensor) -> Tensor:
    """The tensor again, over elements that are there."""
    chunk, size, stride, offset, dtype, index, expected = packed
    member = chunk.parameters[index]
    version = member._version if type(member) in _PLAIN else _version_of(member)
    if version != expected:
        raise RuntimeError(_updated(packed, version))
    if dtype is not chunk.dtype:
        flat = torch.empty(0, dtype=dtype, device=chunk.flat.device)
        return flat.set_(chunk.flat.untyped_storage(), offset, size, stride)
    if dtype is torch.uint8 and isinstance(member, ShellParameter) and size == (member.layout_at_elixir.nbytes,):
        shell: Tensor = opened(member)  # saved itself, by what torch functions do not learn of
        return shell
    return chunk.flat.as_strided(size, stride, offset)


def _overwritten(kept: _Kept) -> str:
    tensor, origin = kept.tensor, "a leaf" if kept.node is None else f"an output of {kept.node.__name__}"
    return (
        f"a tensor needed for the gradients has been modified by an inplace operation: {tensor.dtype}, shape "
        f"{tuple(tensor.shape)}, {origin}, is at version {tensor._version}; backward needs it at version "
        f"{kept.version}. Write to a copy instead (x = x + y for x += y, or x.clone() first); "
        "torch.autograd.set_detect_anomaly(True) shows the forward call that saved it"
    )


def _updated(packed: PackedTensor, version: int) -> str:
    return (
        f"{packed.chunk.spec.members[packed.member].fqn}, needed for the gradients, has been modified by an inplace "
        f"operation, such as an optimizer step, since the forward: it is at version {version}; backward needs it at "
        f"version {packed.version}. Run backward before the step, or the forward again after it"
    )


class SavedBeside:
    """Hooks for what does not lie in managed storage, on top of those for what does.

    Args:
        outer: Of managed storage.
    """

    def __init__(self, outer: SavedTensors) -> None:
        self.outer = outer


class _OverUsers(SavedBeside):
    """Ours, with the user's for everything else."""

    def __init__(self, outer: SavedTensors, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        super().__init__(outer)
        self._pack = pack
        self._unpack = unpack

    def pack(self, tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            packed = self.outer.packed(tensor)
        return self._pack(tensor) if packed is None else packed

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, (PackedTensor, PackedShell)):
            return self.outer.unpacked(packed)
        return self._unpack(packed)
