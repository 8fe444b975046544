"""Which code is the user's, and what code can get at: what the names in it stand for, and what it has been given."""

from __future__ import annotations

import collections
import functools
import inspect
import queue
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

_LIBRARIES = frozenset(
    {"torch", "torchvision", "numpy", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_elixir"}
)
_INSTALLED = ("site-packages", "dist-packages")
_MOST_REACHED = 20_000
_MOST_WALKED = 10_000  # items of one container
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_VALUES = (str, bytes, int, float, bool, type(None))
# Objects of these have what they hold in attributes, and those can be put back.
_PLAIN = (
    nn.Module,
    DataLoader,
    Dataset,
    Sampler,
    collections.ChainMap,
    collections.UserDict,
    collections.UserList,
    types.SimpleNamespace,
    queue.Queue,
    threading.local,
)
_WRAPPERS = (
    staticmethod,
    classmethod,
    functools._lru_cache_wrapper,
    functools.cached_property,
    functools.partialmethod,
)


def is_library(module_name: str) -> bool:
    return module_name.partition(".")[0] in _LIBRARIES or module_name == "builtins"


def is_users(name: str) -> bool:
    """Whether a loaded module is neither Python's own nor installed."""
    if name == "__main__":
        return True
    path = getattr(sys.modules.get(name), "__file__", None)
    if not isinstance(path, str) or is_library(name) or any(part in path for part in _INSTALLED):
        return False
    return not path.startswith(_folders_of_python())


@functools.cache
def _folders_of_python() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return paths["stdlib"], paths["platstdlib"]


def files_of(model: nn.Module) -> set[str]:
    """Names of the files (as modules) that the classes of a model are in, but for libraries that are known."""
    return {c.__module__ for c in classes_of(model)}


def classes_of(model: nn.Module) -> set[type]:
    """The classes of a model's modules, and what they are made from, but for libraries that are known."""
    return {c for kind in {type(m) for m in model.modules()} for c in kind.__mro__ if not is_library(c.__module__)}


def held_by(value: object) -> list[Any]:
    """What a function, a method, a reference or something of the kind has at hand."""
    if isinstance(value, types.FunctionType):
        contents = [one for cell in value.__closure__ or () for one in content_of(cell)]
        return [*contents, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
        return [value.__self__]
    return [value()] if isinstance(value, weakref.ref) else []


def content_of(cell: types.CellType) -> list[Any]:
    """What a variable of an enclosing function holds: one value, or none yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def attributes_of(value: object) -> dict[str, Any] | None:
    """The attributes of an object whose class is the user's, or of a few of the libraries'."""
    if isinstance(value, types.FunctionType) or not (isinstance(value, _PLAIN) or is_users(type(value).__module__)):
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if type(attributes) is dict else None


def slots_of(value: object) -> dict[str, Any]:
    """What an object of a class of the user's has in `__slots__`."""
    if isinstance(value, type) or not is_users(type(value).__module__):
        return {}
    names = [n for c in type(value).__mro__ for n, v in vars(c).items() if isinstance(v, types.MemberDescriptorType)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


class Reach:
    """What code can get at. It is rather too much than too little: each name in the code counts, also as a text.

    Args:
        is_read: Whether the code of the module with this name is looked into.
        is_beside_training: Of an `nn.Module` only what the code names counts, and not all that it has.
    """

    def __init__(self, is_read: Callable[[str], bool] = is_users, *, is_beside_training: bool = False) -> None:
        self._is_read = is_read
        self._is_beside_training = is_beside_training
        self._is_all = False  # it was too much to look through
        self._found: dict[int, object] = {}  # kept alive: ids must stay theirs
        self._names: set[str] = set()  # in all of the code
        self._spaces: dict[int, Mapping[str, Any]] = {}  # of files and the like: of them it has what it names
        self._codes: set[CodeType] = set()
        self._waiting: list[Any] = []
        self._size_looked_up = 0, 0

    def has(self, value: object) -> bool:
        """Whether the code can change this."""
        return self._is_all or id(value) in self._found

    def has_name(self, owner: object, name: str) -> bool:
        """Whether the code can have a name stand for something else, of a class or of the `vars` of a file."""
        return self._is_all or (name in self._names and (id(owner) in self._found or id(owner) in self._spaces))

    def add(self, *values: object) -> None:
        """Add what code that has these can get at."""
        self._waiting += values
        while self._waiting and not self._is_all:
            while self._waiting and not self._is_all:
                self._visit(self._waiting.pop())
                self._is_all = len(self._found) > _MOST_REACHED
            size = len(self._names), len(self._spaces)
            if size != self._size_looked_up:
                self._size_looked_up = size
                for space in self._spaces.values():
                    self._waiting += [space[name] for name in self._names & space.keys()]

    def add_code(self, code: CodeType, names: dict[str, Any]) -> None:
        """Add what code with these global names can get at, if it is to be looked into; `add` completes it."""
        if code in self._codes or not self._is_read(str(names.get("__name__"))):
            return
        self._codes.add(code)
        self._spaces[id(names)] = names
        self._names.update(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self.add_code(constant, names)
            elif isinstance(constant, str):
                self._names.add(constant)

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if kind in _VALUES or id(value) in self._found:
            return
        self._found[id(value)] = value
        if kind is dict and "__builtins__" in value:  # the names of a file
            if self._is_read(str(value.get("__name__"))):
                self._spaces[id(value)] = value
            return
        if kind in _CONTAINERS:
            if len(value) <= _MOST_WALKED:
                self._waiting += value.values() if kind is dict else value
            return
        if isinstance(value, Tensor):
            return
        if isinstance(value, types.ModuleType):
            if self._is_read(value.__name__):
                self._spaces[id(vars(value))] = vars(value)
            return
        if isinstance(value, type):
            if self._is_read(value.__module__):
                self._waiting += [*vars(value).values(), *value.__mro__]
            return
        self._waiting += self._within(value)

    def _within(self, value: Any) -> Iterable[Any]:
        if isinstance(value, _CONTAINERS) and len(value) <= _MOST_WALKED:
            yield from dict.values(value) if isinstance(value, dict) else value
        if isinstance(value, types.FunctionType):
            self.add_code(value.__code__, value.__globals__)
        elif isinstance(value, (types.GeneratorType, types.CoroutineType)):
            frame = value.gi_frame if isinstance(value, types.GeneratorType) else value.cr_frame
            if frame is not None:
                self.add_code(frame.f_code, frame.f_globals)
        elif isinstance(value, property):
            yield from (value.fget, value.fset, value.fdel)
        elif isinstance(value, _WRAPPERS):
            yield getattr(value, "__wrapped__", getattr(value, "func", None))
        yield from held_by(value)
        attributes = attributes_of(value)
        if self._is_beside_training and isinstance(value, nn.Module):
            self._spaces[id(attributes)] = vars(value)
            self._spaces |= {id(c): vars(c) for c in type(value).__mro__ if self._is_read(c.__module__)}
            return
        if attributes is not None:
            self._found[id(attributes)] = attributes
            yield from list(attributes.values())
        yield from slots_of(value).values()
        yield type(value)


def reach_of_other_threads() -> Reach:
    """What the user's code in other threads can get at: those of the user's, and those that call functions of the
    user's. Most threads do not: those of data loaders, loggers, progress bars and notebooks, and idle pools."""
    reach = Reach(is_beside_training=True)
    frames: dict[int, types.FrameType] = sys._current_frames()
    del frames[threading.get_ident()]  # it holds this dict
    threads = {thread.ident: thread for thread in threading.enumerate()}
    for ident in frames:
        thread, frame = threads.get(ident), frames.get(ident)
        begun_by = [] if thread is None else [type(thread), *vars(thread).values()]
        for method in [one for one in begun_by if isinstance(one, types.MethodType)]:
            if attributes_of(method.__self__) is None:  # of a library, such as a server with a handler of the user's
                begun_by += getattr(method.__self__, "__dict__", {}).values()
        reach.add(*begun_by)
        is_users_own = any(_is_of_users(one) for one in begun_by)
        while frame is not None:
            if is_users(str(frame.f_globals.get("__name__"))):
                reach.add_code(frame.f_code, frame.f_globals)
                # Reading them holds them until the call is over: not in a call that lasts as long as the thread.
                if not is_users_own and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                    reach.add(*frame.f_locals.values())
            frame = frame.f_back
        reach.add(None)  # what the names of the code stand for
    return reach


def _is_of_users(value: object) -> bool:
    is_code = isinstance(value, (type, types.FunctionType, types.MethodType))
    return is_code and is_users(str(getattr(value, "__module__", None)))


def reach_of_step(model: nn.Module, args: object) -> Reach:
    """What a training step can get at: from its classes, its attributes and its arguments."""
    files = files_of(model)
    reach = Reach(lambda name: name in files or is_users(name))
    reach.add(*classes_of(model), args)
    for module in model.modules():
        reach.add(*vars(module).values())
    return reach
