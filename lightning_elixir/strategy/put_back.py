"""What a user's code can change outside of a copy of its model: noted down, and put back.

Other threads may change the same things meanwhile, and what they do must not be undone: while there are any but those
of known libraries, of globals and classes only what holds tensors of the dry run is put back, which no other thread can
have put there. The batch and the model belong to the training, and are always put back. Queues, and objects of classes
that are not the user's, are left alone always.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import random
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_elixir.core.functions import held_by

_CONTAINERS = (
    list,
    dict,
    set,
    collections.OrderedDict,
    collections.defaultdict,
    collections.Counter,
)
_LIBRARIES = frozenset(
    {"torch", "torchvision", "numpy", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_elixir"}
)
# Threads that change nothing of the user's: ours, progress bars', and those that hand batches and their numbers on to
# and from a DataLoader's processes.
_HARMLESS_THREADS = ("elixir-", "TMonitor", "tqdm_monitor", "_pin_memory_loop", "QueueFeederThread")
_INSTALLED = ("site-packages", "dist-packages")
_DEEPEST = 6
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

    def skip(self, value: object) -> None:
        """Have it as it is, with all that can be reached through it alone."""
        self._seen[id(value)] = value

    def add_code_of(self, model: nn.Module) -> None:
        """Add the attributes of the model's classes, and the names in their files and in the user's own."""
        self._is_sure = self._is_alone
        classes = {c for module in model.modules() for c in type(module).__mro__ if not _is_library(c.__module__)}
        for one in classes - {object}:
            self._add_names(
                dict(vars(one)), vars(one), functools.partial(setattr, one), functools.partial(delattr, one)
            )
        files = {c.__module__ for c in classes}
        for name, module in list(sys.modules.items()):
            if isinstance(module, types.ModuleType) and (name in files or _is_users(name, module)):
                names = vars(module)
                self._add_names(dict(names), names, names.__setitem__, names.__delitem__)

    def add_model(self, model: nn.Module) -> None:
        """Add the attributes of its modules, other than parameters, buffers and modules."""
        modules = list(model.modules())
        for module in modules:
            self.skip(module)
            for name in ("_parameters", "_buffers", "_modules"):
                self.skip(vars(module)[name])
        for module in modules:
            self._add_container(vars(module), 0)

    def add(self, value: Any, depth: int = 0) -> None:
        """Add whatever can change in a value."""
        if len(self._seen) > _MOST_NOTED:
            return
        if id(value) in self._seen or isinstance(value, (type, types.ModuleType, str, bytes, int, float, type(None))):
            return
        self.skip(value)
        if isinstance(value, Tensor) or _is_array(value) or _is_generator(value):
            if self._is_sure:
                self._add_values(value)
        elif depth >= _DEEPEST:
            return
        elif type(value) in _CONTAINERS:
            self._add_container(value, depth)
        elif isinstance(value, tuple):
            self._add_all(value, depth)
        else:
            self._add_all(_reached_by(value), depth)
            is_users = _is_users(type(value).__module__, sys.modules.get(type(value).__module__))
            if is_users or isinstance(value, (nn.Module, DataLoader, Dataset, Sampler)):
                attributes = getattr(value, "__dict__", None)
                if type(attributes) is dict and not isinstance(value, types.FunctionType):
                    self.skip(attributes)
                    self._add_container(attributes, depth)

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
        elif _is_array(value):
            self._add_array(value)
        else:
            self._undo.append(_state_of(value))

    def _add_container(self, container: Any, depth: int) -> None:
        is_dict = isinstance(container, dict)
        before, is_sure = list(container.items()) if is_dict else list(container), self._is_sure

        def undo() -> None:
            now = list(container.items()) if is_dict else list(container)
            if not _is_same(now, before, in_pairs=is_dict) and (is_sure or _holds_fakes(now)):
                container.clear()
                container.update(before) if isinstance(container, (dict, set)) else container.extend(before)

        self._undo.append(undo)
        if len(before) <= _MOST_WALKED:
            self._add_all([value for _, value in before] if is_dict else before, depth)

    def _add_names(
        self, before: dict[str, Any], names: Any, put: Callable[[str, Any], None], remove: Callable[[str], None]
    ) -> None:
        is_sure = self._is_sure

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
        self._add_all([value for name, value in before.items() if not name.startswith("__")], 0)

    def _add_tensor(self, tensor: Tensor) -> None:
        if isinstance(tensor, nn.Parameter) or type(tensor) is not Tensor or tensor.layout is not torch.strided:
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


def _reached_by(value: Any) -> list[Any]:
    """What a function, a method, a reference or something of the kind has at hand."""
    if isinstance(value, types.FunctionType):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [content for cell in value.__closure__ or () for content in held_by(cell)] + defaults
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    return [value()] if isinstance(value, weakref.ref) else []


def _may_change_things(thread: threading.Thread) -> bool:
    is_harmless = any(name in thread.name for name in _HARMLESS_THREADS)
    return thread is not threading.current_thread() and not is_harmless


def _is_generator(value: Any) -> bool:
    return isinstance(value, (torch.Generator, random.Random)) or hasattr(type(value), "bit_generator")


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # which need not be there
    return numpy is not None and isinstance(value, numpy.ndarray)


def _state_of(generator: Any) -> Callable[[], object]:
    """Puts back the state that a generator of random numbers has now."""
    if isinstance(generator, torch.Generator):
        return functools.partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    return functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)


def _is_same(now: list[Any], before: list[Any], *, in_pairs: bool) -> bool:
    if len(now) != len(before):
        return False
    if in_pairs:
        return all(a[0] is b[0] and a[1] is b[1] for a, b in zip(now, before, strict=True))
    return all(a is b for a, b in zip(now, before, strict=True))


def _is_library(module_name: str) -> bool:
    return module_name.partition(".")[0] in _LIBRARIES or module_name == "builtins"


def _is_users(name: str, module: types.ModuleType | None) -> bool:
    """Whether a loaded module is neither Python's own nor installed."""
    if name == "__main__":
        return True
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or _is_library(name) or any(part in path for part in _INSTALLED):
        return False
    return not path.startswith(_folders_of_python())


@functools.cache
def _folders_of_python() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return paths["stdlib"], paths["platstdlib"]


def left_behind(made: Iterable[weakref.ref[Tensor]]) -> list[Tensor]:
    """The tensors without values among these that something still holds; caches of functions (`lru_cache`) forget
    them."""
    if not _alive(made):
        return []
    gc.collect()
    if not _alive(made):
        return []
    for cached in _caches():
        if cached.cache_info().currsize and _holds_fakes(gc.get_referents(cached)):
            cached.cache_clear()
    gc.collect()
    return _alive(made)


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
