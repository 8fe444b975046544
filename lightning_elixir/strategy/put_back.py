"""What a user's code can change outside of a copy of its model: noted down, and put back.

Other threads may change the same things meanwhile, and what they do must not be undone. So of globals, classes and the
model's attributes, what the user's code in another thread can get at (`users_code.py`) stays as it is; only what holds
tensors of the dry run is put back there, which no other thread can have made. The batch belongs to the training alone,
and is always put back. Objects of classes that are not the user's are left alone, but for those of a few classes that
are known.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import gc
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_elixir.errors import PlanError
from lightning_elixir.strategy.kept_states import REFILLED, Undo, copy_of, goes_on, items_of, note_of, refill
from lightning_elixir.strategy.users_code import (
    Reach,
    attributes_of,
    classes_of,
    content_of,
    files_of,
    held_by,
    is_users,
    reach_of_other_threads,
    slots_of,
)

_PYTHONS = ("builtins", "collections")
_UNCHANGING = (type, types.ModuleType, str, bytes, int, float, complex, type(None), torch.dtype, torch.device)
_DEEPEST = 6
_MOST_WALKED = 10_000  # items of one container
_MOST_NOTED = 100_000  # things in all


class PutBack:
    """Notes what is there when it is added, and puts that back.

    It follows containers, attributes, and what functions keep from where they were made. Of arrays, tensors and the
    like up to 16 MiB it keeps a copy (`kept_states.py`); larger arrays of NumPy cannot be written to until `put_back`.
    What goes on by itself and cannot be set back has a copy in its place until then. Parameters are passed over.

    Args:
        reach_of_step: Finds what the code that is going to run can get at. It is asked where something cannot be put
            back; None: nothing is refused.
    """

    def __init__(self, reach_of_step: Callable[[], Reach] | None = None) -> None:
        self._reach_of_step = reach_of_step
        self._step: Reach | None = None  # once it has been asked for
        self._others = reach_of_other_threads()
        self._is_shared = False  # whether what is added now may be changed by other threads too
        self._undo: list[Undo] = []
        self._seen: dict[int, object] = {}  # kept alive: ids must stay theirs
        self._copies: dict[int, Any] = {}  # by the id of what they stand for

    def skip(self, value: object) -> None:
        """Have it as it is, with all that can be reached through it alone."""
        self._seen[id(value)] = value

    def add_code_of(self, model: nn.Module) -> None:
        """Add the attributes of the model's classes, and the names in their files and in the user's own.

        Raises:
            PlanError: The step can get at what cannot be put back.
        """
        self._is_shared = True
        for one in classes_of(model) - {object}:
            self._add_names(one, vars(one), partial(setattr, one), partial(delattr, one))
        files = files_of(model)
        for name, module in list(sys.modules.items()):
            if isinstance(module, types.ModuleType) and (name in files or is_users(name)):
                self._add_attributes(vars(module), 0)

    def add_process(self) -> None:
        """Add the process's environment."""
        before = dict(os.environ)

        def undo() -> None:
            now = dict(os.environ)
            if now != before:
                for name in now.keys() - before.keys():
                    del os.environ[name]
                os.environ.update({name: value for name, value in before.items() if now.get(name) != value})

        self._undo.append(undo)

    def add_model(self, model: nn.Module) -> None:
        """Add the attributes of its modules, other than parameters, buffers and modules."""
        modules = list(model.modules())
        for module in modules:
            self.skip(module)
            for name in ("_parameters", "_buffers", "_modules"):
                self.skip(vars(module)[name])
        self._is_shared = True
        for module in modules:
            self._add_attributes(vars(module), 0)
        self._is_shared = False

    def add(self, value: Any, depth: int = 0) -> None:
        """Add whatever can change in a value.

        Raises:
            PlanError: The step can get at what cannot be put back.
        """
        if isinstance(value, _UNCHANGING) or id(value) in self._seen or len(self._seen) > _MOST_NOTED:
            return
        self.skip(value)
        note = None if type(value) in (list, dict, tuple) else note_of(value)
        if note is not None:
            undo = note(value) if self._is_ours(value) else None
            if undo is not None:
                self._undo.append(undo)
        elif depth < _DEEPEST:
            self._add_within(value, depth)

    def put_back(self) -> None:
        """Have everything as it was when it was added."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _is_ours(self, value: object) -> bool:
        return not (self._is_shared and self._others.has(value))

    def _add_within(self, value: Any, depth: int) -> None:
        """Add what a container, a function or an object has."""
        if isinstance(value, tuple):
            self._add_all(value, depth)
        elif type(value) in (list, dict, set):  # as most are
            self._add_container(value, depth)
            return
        elif isinstance(value, REFILLED) and (type(value).__module__ in _PYTHONS or is_users(type(value).__module__)):
            self._add_container(value, depth)
        self._add_all(held_by(value), depth)
        if isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                self._add_cell(cell)
        elif isinstance(value, contextvars.ContextVar):
            self.add(value.get(None), depth + 1)  # the variable itself is kept by `contextvars.copy_context`
        attributes, slots = attributes_of(value), slots_of(value)
        if attributes is not None:
            self.skip(attributes)
            self._add_attributes(attributes, depth)
        if slots:
            self._add_slots(value, slots, depth)
        if attributes is None and not slots and goes_on(value) and self._is_in_reach(value):
            raise PlanError(
                f"training_step can get at a {type(value).__name__}"
                f" ({getattr(value, '__qualname__', type(value).__module__)}), and what it takes from that in a dry run"
                " cannot be put back"
            )

    def _is_in_reach(self, value: object) -> bool:
        if self._step is None and self._reach_of_step is not None:
            self._step = self._reach_of_step()
        return self._step is not None and self._step.has(value)

    def _add_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            self.add(value, depth + 1)

    def _stand_in(self, value: Any) -> Any:
        """What is there in the place of a value for now: mostly the value itself."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        other = copy_of(value)
        if other is None or not self._is_ours(value):
            return value
        self.skip(value)
        self._copies[id(value)] = other
        return other

    def _add_container(self, container: Any, depth: int) -> None:
        is_dict = isinstance(container, dict)
        before, is_sure = items_of(container), self._is_ours(container)

        def undo() -> None:
            now = items_of(container)
            if not _is_same(now, before, in_pairs=is_dict) and (is_sure or (_holds_fakes(now) and not is_queue)):
                refill(container, before)

        is_queue = isinstance(container, collections.deque)  # other threads may count on what comes out of it
        self._undo.append(undo)
        if len(before) > _MOST_WALKED:
            return
        values = [value for _, value in before] if is_dict else before
        if not isinstance(container, set) and is_sure:
            for place, value in before if is_dict else enumerate(before):
                if (other := self._stand_in(value)) is not value:
                    container[place] = other
        self._add_all(values, depth)

    def _add_attributes(self, names: dict[str, Any], depth: int) -> None:
        self._add_names(names, names, names.__setitem__, names.__delitem__, depth)

    def _add_names(
        self,
        owner: object,
        names: Mapping[str, Any],
        put: Callable[[str, Any], None],
        remove: Callable[[str], None],
        depth: int = 0,
    ) -> None:
        before, others, is_shared = dict(names), self._others, self._is_shared

        def is_ours(name: str, value: object = None) -> bool:
            return not (is_shared and others.has_name(owner, name)) or _holds_fakes([value])

        def undo() -> None:
            for name, value in list(names.items()):
                is_new = name not in before and not name.startswith("__") and not isinstance(value, types.ModuleType)
                if is_new and is_ours(name, value):
                    remove(name)
            for name, value in before.items():
                now = names.get(name, undo)
                if not name.startswith("__") and now is not value and is_ours(name, now):
                    put(name, value)

        self._undo.append(undo)
        for name, value in before.items():
            if name.startswith("__"):
                continue
            if (other := self._stand_in(value)) is not value and is_ours(name):
                put(name, other)
            self.add(value, depth + 1)

    def _add_slots(self, value: Any, before: dict[str, Any], depth: int) -> None:
        put, is_sure = partial(object.__setattr__, value), self._is_ours(value)

        def undo() -> None:
            now = slots_of(value)
            for name in now.keys() | before.keys():
                is_changed = now.get(name, undo) is not before.get(name, undo)
                if is_changed and (is_sure or _holds_fakes([now.get(name)])):
                    put(name, before[name]) if name in before else object.__delattr__(value, name)

        self._undo.append(undo)
        for name, one in before.items():
            if is_sure and (other := self._stand_in(one)) is not one:
                put(name, other)
        self._add_all(before.values(), depth)

    def _add_cell(self, cell: types.CellType) -> None:
        """Add a variable of an enclosing function: `nonlocal` may have it stand for something else."""
        before = content_of(cell)
        if id(cell) in self._seen or not before or not self._is_ours(cell):
            return
        self.skip(cell)

        def undo() -> None:
            if [id(one) for one in content_of(cell)] != [id(before[0])]:
                cell.cell_contents = before[0]

        self._undo.append(undo)
        if (other := self._stand_in(before[0])) is not before[0]:
            cell.cell_contents = other


def _is_same(now: list[Any], before: list[Any], *, in_pairs: bool) -> bool:
    if len(now) != len(before):
        return False
    if in_pairs:
        return all(a[0] is b[0] and a[1] is b[1] for a, b in zip(now, before, strict=True))
    return all(a is b for a, b in zip(now, before, strict=True))


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
