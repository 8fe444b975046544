"""What a user's code can change outside of a copy of its model: noted down, and put back.

Other threads may change the same things meanwhile, and what they do must not be undone: while there are any but those
of known libraries, of globals and classes only what holds tensors of the dry run is put back, which no other thread can
have put there; so it is with deques everywhere. Else the batch and the model belong to the training, and are always put
back. Queues, and objects of classes that are not the user's, are left alone always. For iterators see
`used_iterators.py`.
"""

from __future__ import annotations

import array
import collections
import contextlib
import functools
import gc
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import _CheckpointFrame
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_elixir.core.functions import held_by, parts_of
from lightning_elixir.core.random_states import kinds_of_generators, state_of
from lightning_elixir.strategy.users_code import is_installed, is_library, is_users_class, is_users_module

# Those of the same methods. Of subclasses the first one that fits, whose own methods may count or refuse.
_CONTAINERS = (list, set, collections.deque, collections.OrderedDict, dict)
# Threads that change nothing of the user's: ours, progress bars', and those that hand batches and their numbers on to
# and from a DataLoader's processes.
_HARMLESS_THREADS = ("elixir-", "TMonitor", "tqdm_monitor", "_pin_memory_loop", "QueueFeederThread")
# Objects of classes of others whose attributes are the user's.
_WITH_ATTRIBUTES = (
    nn.Module,
    DataLoader,
    Dataset,
    Sampler,
    types.FunctionType,
    types.SimpleNamespace,
    threading.local,
    collections.UserList,
    collections.UserDict,
)
_DEEPEST = 30
_MOST_WALKED = 10_000  # items of one container
_MOST_NOTED = 100_000  # things in all
_MOST_COPIED_BYTES = 16 << 20  # of one array


class PutBack:
    """Notes what is there when it is added, and puts that back.

    It follows containers, attributes, and what functions keep from where they were made. Of arrays and tensors up to
    16 MiB it keeps a copy; larger arrays of NumPy cannot be written to until `put_back`. Parameters are passed over.
    """

    def __init__(self) -> None:
        self._is_alone = not any(map(_may_change_things, threading.enumerate()))
        self._is_sure = True  # that what is added now is changed by this thread alone
        self._undo: list[Callable[[], object]] = []
        self._seen: dict[int, object] = {}  # kept alive: ids must stay theirs
        self._generators = kinds_of_generators()

    def skip(self, value: object) -> None:
        """Have it as it is, with all that can be reached through it alone."""
        self._seen[id(value)] = value

    def add_code_of(self, model: nn.Module) -> None:
        """Add the attributes of the model's classes, and the names in their files and in the user's own."""
        self._is_sure = self._is_alone
        classes = {c for module in model.modules() for c in type(module).__mro__ if not is_library(c.__module__)}
        for one in classes - {object}:
            self._add_class(one, 0)
        self._add_environment()
        files = {c.__module__ for c in classes}
        for name, module in list(sys.modules.items()):
            if isinstance(module, types.ModuleType) and (name in files or is_users_module(name, module)):
                names = vars(module)
                self._add_names(dict(names), names, names.__setitem__, names.__delitem__, 0)

    def add_model(self, model: nn.Module) -> None:
        """Add the attributes of its modules, other than parameters, buffers and modules."""
        modules = list(model.modules())
        for module in modules:
            self.skip(module)
            for name in ("_parameters", "_buffers", "_modules"):
                self.skip(vars(module)[name])
            for parameter in vars(module)["_parameters"].values():
                self.skip(parameter)  # asking for its gradient may bring it
        for module in modules:
            self._add_container(vars(module), dict, 0)

    def add(self, value: Any, depth: int = 0) -> None:
        """Add whatever can change in a value."""
        if len(self._seen) > _MOST_NOTED:
            return
        if id(value) in self._seen or isinstance(value, (types.ModuleType, str, bytes, int, float, type(None))):
            return
        self.skip(value)
        if isinstance(value, type):
            if is_users_class(value) and depth < _DEEPEST:
                self._add_class(value, depth)
        elif isinstance(value, Tensor) or _is_array(value) or isinstance(value, self._generators):
            self._add_values(value)
        elif depth >= _DEEPEST:
            return
        elif isinstance(value, tuple):
            self._add_all(value, depth)
        elif isinstance(value, types.CellType):
            put, empty = (functools.partial(change, value, "cell_contents") for change in (setattr, delattr))
            self._add_place(functools.partial(held_by, value), put, empty, depth)
        elif type(value) is array.array:
            if self._is_sure:
                self._undo.append(functools.partial(value.__setitem__, slice(None), value[:]))
        else:
            kind = type(value)
            # With something in it already, only what tensors without values are in goes (`left_behind`).
            if kind is functools._lru_cache_wrapper and self._is_sure and not value.cache_info().currsize:
                self._undo.append(value.cache_clear)
            is_users = is_users_class(kind)
            is_plain = kind.__module__ in ("builtins", "collections", "types")
            self._add_all(parts_of(value), depth)
            base = next((base for base in _CONTAINERS if isinstance(value, base)), None)
            if base is not None and (is_users or is_plain):
                self._add_container(value, base, depth)
            if is_users or isinstance(value, _WITH_ATTRIBUTES):
                self._add_attributes(value, depth)

    def put_back(self) -> None:
        """Have everything as it was when it was added."""
        undo = contextlib.ExitStack()  # which goes on where one of them raises
        for one in self._undo:
            undo.callback(one)
        self._undo.clear()
        undo.close()

    def _add_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            self.add(value, depth + 1)

    def _add_values(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif not self._is_sure:
            return
        elif _is_array(value):
            self._add_array(value)
        else:
            self._undo.append(state_of(value))

    def _add_container(self, container: Any, base: Any, depth: int) -> None:
        """Its items, by the methods of the class `base`."""
        is_dict = issubclass(base, dict)

        def items() -> list[Any]:
            return list(base.items(container)) if is_dict else list(base.__iter__(container))

        before = items()
        # Deques are what threads hand things on with.
        is_sure = self._is_sure and (self._is_alone or base is not collections.deque)

        def undo() -> None:
            now = items()
            if not _is_same(now, before, in_pairs=is_dict) and (is_sure or _holds_fakes(now)):
                base.clear(container)
                if is_dict:
                    for key, value in before:
                        base.__setitem__(container, key, value)
                else:
                    (base.update if base is set else base.extend)(container, before)

        self._undo.append(undo)
        if len(before) <= _MOST_WALKED:
            self._add_all([value for _, value in before] if is_dict else before, depth)

    def _add_attributes(self, value: Any, depth: int) -> None:
        """Those in `__dict__`, and those that a class has places for."""
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            self.skip(attributes)
            self._add_container(attributes, dict, depth)
        for one in filter(is_users_class, type(value).__mro__):
            for name, place in vars(one).items():
                if isinstance(place, types.MemberDescriptorType):
                    put, empty = (functools.partial(change, value, name) for change in (setattr, delattr))
                    self._add_place(functools.partial(_attribute, value, name), put, empty, depth)

    def _add_place(
        self, get: Callable[[], list[Any]], put: Callable[[Any], None], empty: Callable[[], None], depth: int
    ) -> None:
        """One that may be empty: `get` gives what is in it, or nothing."""
        before, is_sure = get(), self._is_sure

        def undo() -> None:
            now = get()
            if not _is_same(now, before, in_pairs=False) and (is_sure or _holds_fakes(now)):
                put(before[0]) if before else empty()

        self._undo.append(undo)
        self._add_all(before, depth)

    def _add_class(self, one: type, depth: int) -> None:
        self.skip(one)
        put, remove = functools.partial(setattr, one), functools.partial(delattr, one)
        self._add_names(dict(vars(one)), vars(one), put, remove, depth)

    def _add_environment(self) -> None:
        before = dict(os.environ)

        def undo() -> None:
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            for name, value in before.items():
                if os.environ.get(name) != value:
                    os.environ[name] = value

        if self._is_sure:
            self._undo.append(undo)

    def _add_names(
        self,
        before: dict[str, Any],
        names: Any,
        put: Callable[[str, Any], None],
        remove: Callable[[str], None],
        depth: int,
    ) -> None:
        is_sure = self._is_alone

        def undo() -> None:
            for name, value in list(names.items()):
                is_new = name not in before and not name.startswith("__") and not isinstance(value, types.ModuleType)
                if is_new and (is_sure or _holds_fakes([value])):
                    remove(name)
            for name, value in before.items():
                now = names.get(name, undo)
                if not name.startswith("__") and now is not value and (is_sure or _holds_fakes([now])):
                    put(name, value)

        self._undo.append(undo)
        self._add_all([value for name, value in before.items() if not name.startswith("__")], depth)

    def _add_tensor(self, tensor: Tensor) -> None:
        if tensor.requires_grad and tensor.is_leaf:
            with torch._C.DisableTorchFunctionSubclass():  # another engine's would be brought
                grad = tensor.grad

            def undo_grad() -> None:
                with torch._C.DisableTorchFunctionSubclass():
                    if isinstance(tensor.grad, FakeTensor):
                        tensor.grad = grad

            self._undo.append(undo_grad)
        if not self._is_sure or type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return
        if tensor.requires_grad or tensor.untyped_storage().nbytes() > _MOST_COPIED_BYTES or tensor.is_inference():
            return
        before, version = tensor.detach().clone(), tensor._version

        def undo() -> None:
            if tensor._version != version:
                tensor.detach().copy_(before)

        self._undo.append(undo)

    def _add_array(self, array: Any) -> None:
        if not array.flags.writeable or array.dtype.hasobject:
            return
        if array.nbytes > _MOST_COPIED_BYTES:
            if not array.flags.owndata:
                return  # NumPy would not let it be written to again
            array.flags.writeable = False
            self._undo.append(functools.partial(array.setflags, write=True))
            return
        self._undo.append(functools.partial(array.__setitem__, ..., array.copy()))


def _attribute(value: Any, name: str) -> list[Any]:
    """What an object has under a name; empty where it has nothing."""
    return [getattr(value, name)] if hasattr(value, name) else []


def _may_change_things(thread: threading.Thread) -> bool:
    is_harmless = any(name in thread.name for name in _HARMLESS_THREADS)
    # Threads of installed packages, such as loggers', do not know of the user's globals.
    code = getattr(thread, "_target", None) if type(thread) is threading.Thread else type(thread)
    is_harmless |= is_installed(getattr(code, "__module__", None) or "")
    return thread is not threading.current_thread() and not is_harmless


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # which need not be there
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_same(now: list[Any], before: list[Any], *, in_pairs: bool) -> bool:
    if len(now) != len(before):
        return False
    if in_pairs:
        return all(a[0] is b[0] and a[1] is b[1] for a, b in zip(now, before, strict=True))
    return all(a is b for a, b in zip(now, before, strict=True))


def left_behind(made: Iterable[weakref.ref[Tensor]]) -> list[Tensor]:
    """The tensors without values among these that something still holds; caches of functions (`lru_cache`) forget
    them, and so do checkpoints whose backward has not come: one that was given a container in which another has put
    what it made lies in a cycle through autograd, where the collector does not see it."""
    if not _alive(made):
        return []
    gc.collect()
    if not _alive(made):
        return []
    _drop_hooks(_alive(made))
    for cached in _caches():
        if cached.cache_info().currsize and _holds_fakes(gc.get_referents(cached)):
            cached.cache_clear()
    for one in gc.get_objects():
        if type(one) is _CheckpointFrame and _holds_fakes((vars(one),)):
            vars(one).clear()
    gc.collect()
    return _alive(made)


def _drop_hooks(tensors: list[Tensor]) -> None:
    """Hooks may lead back to their tensor through a graph, where the collector cannot look."""
    for tensor in tensors:
        for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks):
            if hooks is not None:
                hooks.clear()  # which the graph has as well
        if not tensor.is_leaf and not tensor._is_view():
            tensor.detach_()  # from hooks at its node


def _alive(references: Iterable[weakref.ref[Tensor]]) -> list[Tensor]:
    return [tensor for one in references if (tensor := one()) is not None and isinstance(tensor, FakeTensor)]


def _caches() -> list[Any]:
    # The collector does not tell of what is frozen (`gc.freeze`); most caches are names in a file.
    names = [value for module in list(sys.modules.values()) for value in list(getattr(module, "__dict__", {}).values())]
    known = [one for one in (*gc.get_objects(), *names) if type(one) is functools._lru_cache_wrapper]
    return list({id(one): one for one in known}.values())


def _holds_fakes(values: Iterable[Any], depth: int = 0) -> bool:
    """Whether tensors without values are among these, or below them."""
    for value in values:
        if isinstance(value, FakeTensor):
            return True
        is_followed = isinstance(value, (dict, list, tuple)) or type(value).__name__.endswith("lru_list_elem")
        if is_followed and depth < _DEEPEST and _holds_fakes(gc.get_referents(value), depth + 1):
            return True
    return False
