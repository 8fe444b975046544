"""Released storage is never read: a read is neither a fault nor finds the values of other parameters.

[Note: released parameters] A released chunk has no bytes. Python code that touches its parameters is intercepted, but
autograd, activation checkpointing, hooks and custom Functions may keep a parameter itself and read it from C++, where
nothing is intercepted. So while a chunk is released its parameters lie on no storage of its own: `.data` is a stand-in
of the same shape, strides, dtype and device whose dispatch keys hold one that no backend uses. Every operator over it,
from Python or C++, then comes to `_read`, which has the chunk brought and calls the operator again. Shapes and the like
can be read without that, and gradients be accumulated. Code in C++ that takes the address without an operator
(`torch.utils.dlpack.to_dlpack`, extensions) gets torch's error for tensors that have none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_elixir.errors import StateError
from lightning_elixir.runtime.released import tensors_in

_C = TypeVar("_C")  # a chunk

_KEY = "TESTING_ONLY_GenericWrapper"  # torch has it for wrappers like this one, and uses it nowhere itself
_KEYS = torch._C.DispatchKeySet(torch._C._parse_dispatch_key(_KEY))  # type: ignore[arg-type]
_KEYS_AND_PYTHON = _KEYS.add(torch._C.DispatchKey.Python)  # under inference_mode, or a dispatch mode of the user's
_ALL_KEYS = _KEYS_AND_PYTHON.add(torch._C.DispatchKey.FuncTorchDynamicLayerBackMode)  # inside vmap it puts others back
_SET_DATA = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


GONE = "after its engine had gone: keep the model, or the ElixirModule, or a copy"


class _StandIn(Tensor):
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _read(func, *args, **(kwargs or {}))


class _Home:
    """Where the elements of a stand-in are to be had. Keeps neither the chunk nor its engine: torch holds it where the
    garbage collector cannot look."""

    def __init__(self, name: str, view: Tensor, chunk: _C, bring: Callable[[_C], AbstractContextManager[None]]) -> None:
        self.name = name
        self.view = view
        self._chunk = weakref.ref(chunk)
        self._bring = weakref.WeakMethod(bring)

    def brought(self) -> AbstractContextManager[None]:
        chunk, bring = self._chunk(), self._bring()
        if chunk is None or bring is None:
            raise StateError(f"{self.name} was read {GONE}")
        found: AbstractContextManager[None] = bring(chunk)
        return found


def stand_in(view: Tensor, name: str, chunk: _C, bring: Callable[[_C], AbstractContextManager[None]]) -> Tensor:
    """A tensor of `view`'s shape, strides, dtype and device without elements; only for `set_data`.

    Args:
        view: Where the elements are when they are there.
        name: Of the parameter, for errors.
        chunk: What they belong to.
        bring: Bound method, called with `chunk`: a context inside which they are there.
    """
    made: Tensor = torch.Tensor._make_wrapper_subclass(
        _StandIn,
        view.shape,
        strides=view.stride(),
        dtype=view.dtype,
        device=view.device,
        _extra_dispatch_keys=_KEYS,
    )
    torch._C._set_throw_on_mutable_data_ptr(made)  # or its address would be 0
    # At the storage: autograd reads through tensors of its own over it, which are no parameters.
    made.storage_at_elixir = made.untyped_storage()  # type: ignore[attr-defined]
    made.storage_at_elixir.home_at_elixir = _Home(name, view, chunk, bring)  # type: ignore[attr-defined]
    return made


def set_data(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """`tensor.data = value`, of which either may be a stand-in; autograd does not notice."""
    with torch._C.DisableTorchFunctionSubclass(), torch._C._ExcludeDispatchKeyGuard(_ALL_KEYS):
        for tensor, value in zip(tensors, values, strict=True):
            _SET_DATA(tensor, value)


def metadata_only() -> Any:
    """A context in which functions that look at no elements can be called with released parameters."""
    return torch._C._ExcludeDispatchKeyGuard(_KEYS)


def _read(op: Any, *args: Any, **kwargs: Any) -> Any:
    """`op`, with the chunks of released parameters among its arguments brought for it."""
    with ExitStack() as stack:
        with torch._C.DisableTorchFunctionSubclass():
            homes = [(t, getattr(t.untyped_storage(), "home_at_elixir", None)) for t in tensors_in((args, kwargs))]
        # None: the thread that trains has just brought them.
        released = [(t, home) for t, home in homes if home is not None]
        for _, home in released:
            stack.enter_context(home.brought())
        set_data((t for t, _ in released), (home.view for _, home in released))
        with torch._C.DisableTorchFunctionSubclass():
            return op(*args, **kwargs)


# What the dispatcher does for a key belongs to the process. This keeps nothing, and nothing else has a use for the key.
_library = torch.library.Library("_", "IMPL")
_library.fallback(_read, _KEY)


@cache
def serve_under_modes() -> tuple[torch.library.Library, ...]:
    """Have reads served inside dispatch modes, too (selective activation checkpointing, counters of operators): torch
    takes no fallback in Python there, but a kernel of each operator. Takes some 0.5 s the first time, none later.

    Returns:
        The registrations, which last as long as they are kept.
    """
    libraries: dict[str, torch.library.Library] = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        packet, _, overload = operator.partition(".")
        try:
            op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        except AttributeError:  # kernels were registered and the operator was not, as by a library that half loads
            continue
        if namespace not in libraries:
            libraries[namespace] = torch.library.Library(namespace, "IMPL")
        libraries[namespace].impl(operator, partial(_read, op), _KEY)
    return tuple(libraries.values())
