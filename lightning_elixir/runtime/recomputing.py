"""A block whose activations are recomputed computes, once more, what it has computed.

Torch's checkpoint gives it autocast and torch's random states of its forward. Here it gets what that leaves out: the
random states of Python and NumPy and of generators that its modules have or that it is given; its buffers, up to
`_MOST_COPIED` elements each, so that running statistics are updated once and spectral norms iterate from where they
began; the parameters (`torch.func.functional_call`), modes (`train()`, `eval()`), forward hooks, numbers, words, lists,
tuples, dicts and tensors that its modules had then, which may be others when backward comes. What it counts, it counts
once, and what it adds to a list is there once. Tensors are kept, not copied: large ones that the block itself replaces,
such as its last output, would be held for longer than they are used, and are not.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from enum import Enum
from functools import partial
from itertools import chain
from numbers import Number
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from lightning_elixir.core.module_hooks import FORWARD_HOOKS, MARKS, is_own_hook, is_scripted
from lightning_elixir.core.random_states import (
    capture_random_states,
    generators_among,
    generators_of,
    restore_random_states,
    state_of,
)
from lightning_elixir.errors import PlanError
from lightning_elixir.runtime.kept_attention import keeping_attention

_MOST_COPIED = 1 << 16
_PLAIN = frozenset((bool, int, float, str, type(None)))
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)
_MOST_ITEMS = 10_000
_SINGLE = (Tensor, Number, str, type(None), Enum, RemovableHandle)
_VALUES = (*_SINGLE, *_CONTAINERS, tuple)
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_NOTHING = object()
_NUM_KINDS = len(FORWARD_HOOKS)
_tables = itemgetter(*FORWARD_HOOKS, *MARKS)
_Hooks = tuple[dict[int, Any], ...]
_NO_HOOKS: _Hooks = tuple({} for _ in range(_NUM_KINDS + len(MARKS)))
_FIRST_CALLS = 2
_LOOK_EVERY = 64
_HOST = torch.device("cpu")

_Context = AbstractContextManager[Any]
_PutBack = Callable[[], object]


class Recomputed:
    """A block, as it is recomputed.

    Which generators, numbers and lists its modules have, and whether it draws from Python's or NumPy's, is looked for
    in its first calls and in each `_LOOK_EVERY`-th: those states are 5 KB, which take longer than all else here.

    Args:
        module: The block.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._num_calls = 0
        self._own: dict[nn.Module, list[str]] = {}  # names of what is neither parameter, buffer nor module
        self._names: list[frozenset[str]] = []  # of all that each has
        self._generators: list[Any] = []
        self._draws = False  # from Python's or NumPy's
        # Torch ends a recomputation by an exception, where the last tensor is saved: TorchScript would make another of
        # it, and `nn.RReLU` has not filled what it saves.
        self._stops_early = not any(is_scripted(part) or isinstance(part, nn.RReLU) for part in module.modules())

    def run(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, keeps_attention: bool
    ) -> Any:
        """Call it under torch's checkpoint, with all tensors among its arguments as inputs of that.

        The forward gets the caller's own containers, to which a block may add (a list of losses), and the recomputation
        copies of them as they were.
        """
        leaves, spec = tree_flatten((args, kwargs))
        # One that comes twice is one again: attention looks whether queries, keys and values are the same tensor.
        places: dict[int, list[int]] = {}
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                places.setdefault(id(leaf), []).append(i)
        tensors = [_saveable(leaves[same[0]]) for same in places.values()]
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        objects = [leaf for leaf in others if type(leaf) not in _PLAIN]
        generators = generators_among(objects) if objects else []

        as_given = [(args, kwargs)]

        def run(*inputs: Tensor) -> Any:
            if as_given:  # gone then: what is held here cannot go to host memory
                given_args, given_kwargs = as_given.pop()
                return call(*given_args, **given_kwargs)
            filled = list(others)
            for same, tensor in zip(places.values(), inputs, strict=True):
                for place in same:
                    filled[place] = tensor
            again_args, again_kwargs = tree_unflatten(filled, spec)
            return call(*again_args, **again_kwargs)

        # Else nothing is saved; and where a mode is on, torch does not take its fast paths for frozen layers in
        # evaluation.
        keeps_attention = keeps_attention and any(t.requires_grad for t in chain(tensors, self.module.parameters()))
        contexts = partial(self._contexts, keeps_attention, generators)
        return checkpoint(
            run,
            *tensors,
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=contexts,
            early_stop=self._stops_early,
        )

    def _contexts(self, keeps_attention: bool, given: Collection[Any]) -> tuple[_Context, _Context]:
        """Around a forward that is about to begin, and around its recomputation.

        Args:
            keeps_attention: What attention gives stays.
            given: Random generators among the arguments.
        """
        parts = list(_parts(self.module))
        is_looking = self._num_calls < _FIRST_CALLS or self._num_calls % _LOOK_EVERY == 0
        self._num_calls += 1
        names = [frozenset(vars(part)) for part in parts]
        if is_looking or names != self._names:
            self._look_at(parts)
            self._names = names
        buffers = [(part, name, b) for part in parts for name, b in part._buffers.items() if b is not None]
        small = [(part, name, b.detach().clone()) for part, name, b in buffers if b.numel() <= _MOST_COPIED]
        # Those of `inference_mode` count no writes: torch refuses them.
        counted = [(name, b) for _, name, b in buffers if b.numel() > _MOST_COPIED and not b.is_inference()]
        large = [(name, b, b._version) for name, b in counted]
        forward: list[_Context] = [_LargeBuffersStay(large)] if large else []
        modules = _ModulesAsBefore(parts, names, self._own)
        at_its_end = ExitStack()
        at_its_end.callback(modules.let_go)
        forward.append(at_its_end)
        again: list[_Context] = [modules, _HooksAsBefore(parts)]
        has_common = self._draws or is_looking
        generators = [*self._generators, *given]
        if generators or has_common:
            numbers = _RandomNumbersAsBefore(generators, has_common=has_common)
            again.append(numbers)
            if not self._draws and is_looking:
                forward.append(_Drawing(numbers, self._note_drawing))
        if small:
            again.append(_BuffersAsBefore(small))
        if keeps_attention:
            keeping, replaying = keeping_attention()
            forward.append(keeping)
            again.append(replaying)
        return _All(forward), _All(again)

    def _look_at(self, parts: list[nn.Module]) -> None:
        own = ((p, [n for n, v in vars(p).items() if _is_own(v) and n not in _OF_ALL_MODULES]) for p in parts)
        self._own = {part: names for part, names in own if names}
        self._generators = generators_of(parts)

    def _note_drawing(self) -> None:
        self._draws = True


def _saveable(tensor: Tensor) -> Tensor:
    """One that autograd saves: what a validation under `inference_mode` has made, and the model kept, it does not."""
    return tensor.clone() if tensor.is_inference() else tensor


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a block, at each of its calls: `modules()` would take longer than all else that is done there."""
    waiting, seen = [module], set()
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            waiting += [child for child in part._modules.values() if child is not None]
            yield part


class _All:
    """Contexts, as often as they are entered, the first one outside."""

    def __init__(self, contexts: list[_Context]) -> None:
        self._contexts = contexts
        self._entered = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as entering:
            for one in self._contexts:
                entering.enter_context(one)
            self._entered = entering.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)


class _LargeBuffersStay:
    """Raises `PlanError` where a forward has written to one of these.

    Args:
        before: Name, buffer, and its version before.
    """

    def __init__(self, before: list[tuple[str, Tensor, int]]) -> None:
        self._before = before

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, *error: object) -> None:
        changed = [name for name, buffer, version in self._before if buffer._version != version]
        if changed and kind is None:
            raise PlanError(
                f"activations: a block that is to be recomputed has written to its buffer {changed[0]} in forward, and"
                " would do so once more: give that block 'keep' or 'offload'"
            )


class _ModulesAsBefore:
    """Inside, modules have the parameters and modes that they had when this was made, and what of them is neither
    buffer nor module; what they have come to have since is not there, and what they come to have inside goes again.

    Args:
        parts: The modules.
        names: Of all that each of them has.
        own: Names of numbers, words, lists, tuples, tensors and the like, of those that have any.
    """

    def __init__(self, parts: list[nn.Module], names: list[frozenset[str]], own: Mapping[nn.Module, list[str]]) -> None:
        self._before = [
            (part, part.training, dict(part._parameters), _copies(vars(part), own.get(part, ()))) for part in parts
        ]
        self._names = names
        self._now: list[tuple[nn.Module, bool, dict[str, Any], dict[str, Any], Collection[str]]] = []

    def let_go(self) -> None:
        """The forward is over: keep no large tensors that it has replaced, and no graphs."""
        for part, _, _, own in self._before:
            for name, value in [(n, v) for n, v in own.items() if type(v) not in _PLAIN]:
                is_tensor = isinstance(value, Tensor)
                if is_tensor and value.numel() > _MOST_COPIED and vars(part).get(name) is not value:
                    del own[name]
                else:
                    own[name] = _mapped(value, _cut)

    def __enter__(self) -> None:
        for (part, is_training, parameters, own), names in zip(self._before, self._names, strict=True):
            has = vars(part)
            self._now.append((part, part.training, dict(part._parameters), dict(has), own))
            _set(part, is_training, parameters)
            for name in has.keys() - names:
                if isinstance(has[name], _VALUES):
                    del has[name]
            has.update(_copies(own, own))

    def __exit__(self, *error: object) -> None:
        for part, is_training, parameters, now, put in self._now:
            has = vars(part)
            # Functions stay: hooks may have come.
            changed = [
                n for n, v in has.items() if v is not now.get(n, _NOTHING) and (n in put or isinstance(v, _VALUES))
            ]
            for name in changed:
                if name in now:
                    has[name] = now[name]
                else:
                    del has[name]
            has.update({name: now[name] for name in now.keys() - has.keys()})
            _set(part, is_training, parameters)
        self._now = []


class _HooksAsBefore:
    """Inside, modules have the forward hooks that they had when this was made, which may have been for that forward
    alone; ours are those of now.

    Args:
        parts: The modules.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        self._before = [(part, _hooks_of(part)) for part in parts]
        self._now: list[tuple[nn.Module, _Hooks]] = []

    def __enter__(self) -> None:
        for part, before in self._before:
            if _tables(vars(part)) == before:
                self._now.append((part, before))
            else:
                self._now.append((part, _hooks_of(part)))
                _set_hooks(part, before)

    def __exit__(self, *error: object) -> None:
        for part, now in self._now:
            if _tables(vars(part)) != now:
                _set_hooks(part, now)
        self._now = []


def _hooks_of(part: nn.Module) -> _Hooks:
    """Forward hooks of a module, by key, and which of them are called in another way."""
    tables: _Hooks = _tables(vars(part))
    return tuple(map(dict, tables)) if any(tables) else _NO_HOOKS


def _set_hooks(part: nn.Module, hooks: _Hooks) -> None:
    """Give a module other hooks; ours stay. The tables do, too, from which handles remove."""
    tables: _Hooks = _tables(vars(part))
    keys: set[int] = set()
    for held, values in zip(tables[:_NUM_KINDS], hooks, strict=False):
        ours = {key: hook for key, hook in held.items() if is_own_hook(hook)}
        kept = {key: hook for key, hook in values.items() if key in ours or not is_own_hook(hook)}
        _fill(held, kept | ours)
        keys.update(held)
    for held, values in zip(tables[_NUM_KINDS:], hooks[_NUM_KINDS:], strict=True):
        _fill(held, {key: mark for key, mark in (held | values).items() if key in keys})


def _fill(held: dict[int, Any], values: dict[int, Any]) -> None:
    held.clear()
    held.update(values)


def _is_own(value: Any) -> bool:
    return type(value) in _CONTAINERS or isinstance(value, (*_SINGLE, tuple))


def _set(part: nn.Module, is_training: bool, parameters: dict[str, Any]) -> None:
    if part.training is not is_training:
        part.training = is_training
    for name, parameter in parameters.items():  # one by one, as tables of TorchScript's modules take them
        held = part._parameters
        if name in held and held[name] is not parameter:  # `==` of tensors is another tensor
            held[name] = parameter


def _copies(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Those that are there; containers as they are now, with the same things in them."""
    there = [(name, values[name]) for name in names if name in values]
    return {name: value if type(value) in _PLAIN else _mapped(value, _copied_leaf) for name, value in there}


def _copied_leaf(value: Any) -> Any:
    if isinstance(value, _Cut):
        return value.again()
    return value.copy() if type(value) is set else value


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """With that done to a value, or to what is in a container."""
    kind = type(value)
    is_tuple = tuple in (kind, kind.__base__)  # a class below a named one may be made in another way
    if not is_tuple and kind not in _CONTAINERS:
        return change(value)
    is_left = len(value) > _MOST_ITEMS or (is_tuple and _PLAIN.issuperset(map(type, value)))
    return value if is_left else tree_map(change, value)


def _cut(value: Any) -> Any:
    has_graph = isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.grad_fn is not None
    return _Cut(value) if has_graph else value


class _Cut:
    """A tensor without its graph: where no backward frees that, as of outputs that are in no loss, it holds the call
    that made it, which would hold the call before it, and so all calls that there ever were."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()

    def again(self) -> Tensor:
        """A tensor like it for autograd: of a graph, so that it may be written to."""
        made: Tensor = _Apart.apply(torch.empty(0, requires_grad=True), self._tensor)  # type: ignore[no-untyped-call]
        return made


class _Apart(torch.autograd.Function):
    """The second, as a result: gradients go no further."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


class _RandomNumbersAsBefore:
    """Inside, generators are in the states that they were in when this was made.

    Args:
        generators: Of the modules, and among the arguments. One may be there twice.
        has_common: Also Python's and NumPy's own.
    """

    def __init__(self, generators: list[Any], *, has_common: bool) -> None:
        self._generators = generators
        self.common = _common_states() if has_common else {}
        self._before = [state_of(one) for one in generators]
        self._now: list[_PutBack] = []

    def __enter__(self) -> None:
        self._now = [state_of(one) for one in self._generators]
        if self.common:
            self._now.append(partial(restore_random_states, _common_states(), _HOST))
        restore_random_states(self.common, _HOST)
        for put_back in self._before:
            put_back()

    def __exit__(self, *error: object) -> None:
        for put_back in self._now:
            put_back()
        self._now = []


def _common_states() -> dict[str, Any]:
    return {kind: state for kind, state in capture_random_states(_HOST).items() if kind != "torch"}


class _Drawing:
    """Around a forward: notes whether it draws from the generators that all share; if not, its recomputation leaves
    them alone.

    Args:
        numbers: Around the recomputation.
        note: Is told.
    """

    def __init__(self, numbers: _RandomNumbersAsBefore, note: _PutBack) -> None:
        self._numbers, self._note = numbers, note

    def __enter__(self) -> None:
        return

    def __exit__(self, *error: object) -> None:
        if pickle.dumps(_common_states()) == pickle.dumps(self._numbers.common):
            self._numbers.common = {}
        else:
            self._note()


class _BuffersAsBefore:
    """Inside, modules have copies of these buffers with their values of before, and the buffers stay as they are.

    Args:
        before: Modules, names, and values.
    """

    def __init__(self, before: list[tuple[nn.Module, str, Tensor]]) -> None:
        self._before = before
        self._now: list[Tensor | None] = []

    def __enter__(self) -> None:
        self._now = [part._buffers[name] for part, name, _ in self._before]
        for part, name, value in self._before:
            part._buffers[name] = value.clone()

    def __exit__(self, *error: object) -> None:
        for (part, name, _), buffer in zip(self._before, self._now, strict=True):
            part._buffers[name] = buffer
        self._now = []
