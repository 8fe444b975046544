"""The guard over released storage: reading it is an error, never a fault and never somebody else's values.

[Note: unreadable] A released chunk has no bytes. Python code that touches its parameters is intercepted, but autograd,
hooks and custom Functions may keep the parameter itself and read it from C++, where nothing is intercepted. So while a
chunk is released its parameters lie on no storage at all: `.data` is a tensor of the same shape, strides, dtype and
device whose dispatch keys hold one that no backend uses. Every operator over it, whoever calls it, then ends in
`_refuse`. Shapes and the like can still be asked for, and gradients be accumulated. It works in every build of torch:
the errors that storages themselves can raise are there in CUDA builds only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_elixir.errors import StateError
from lightning_elixir.runtime.released import tensors_in

_KEY = "TESTING_ONLY_GenericWrapper"  # torch has it for wrappers like this one, and uses it nowhere itself
_KEYS = torch._C.DispatchKeySet(torch._C._parse_dispatch_key(_KEY))  # type: ignore[arg-type]
_KEYS_AND_PYTHON = _KEYS.add(torch._C.DispatchKey.Python)  # under inference_mode, or a dispatch mode of the user's
_SET_DATA = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


class _Unreadable(Tensor):
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        _refuse(func, *args, **(kwargs or {}))


def unreadable_like(view: Tensor, name: str) -> Tensor:
    """A tensor of `view`'s shape, strides, dtype and device without elements; only for `set_data`.

    Args:
        name: Of the parameter, for the error.
    """
    made: Tensor = torch.Tensor._make_wrapper_subclass(
        _Unreadable,
        view.shape,
        strides=view.stride(),
        dtype=view.dtype,
        device=view.device,
        _extra_dispatch_keys=_KEYS,
    )
    # On the storage: autograd reads through tensors of its own over it, which are no parameters.
    made.storage_at_elixir = made.untyped_storage()  # type: ignore[attr-defined]
    made.storage_at_elixir.name_at_elixir = name  # type: ignore[attr-defined]
    return made


def set_data(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """`tensor.data = value`, of which either may be unreadable; autograd does not notice."""
    with torch._C.DisableTorchFunctionSubclass(), torch._C._ExcludeDispatchKeyGuard(_KEYS_AND_PYTHON):
        for tensor, value in zip(tensors, values, strict=True):
            _SET_DATA(tensor, value)


def metadata_only() -> Any:
    """A context in which functions that look at no elements can be called with released parameters."""
    return torch._C._ExcludeDispatchKeyGuard(_KEYS)


def _refuse(op: Any, *args: Any, **kwargs: Any) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        found = [getattr(t.untyped_storage(), "name_at_elixir", None) for t in tensors_in((args, kwargs))]
    names = ", ".join(dict.fromkeys(name for name in found if name is not None)) or "a parameter"
    raise StateError(
        f"{op} reads {names} after its memory was given to other parameters: something keeps the parameter itself "
        "where lightning_elixir cannot see it, such as a pack function of saved_tensors_hooks that returns its "
        "argument, or a compiled extension. Keep `parameter.detach()` there, which holds the memory until it is dropped"
    )


# What the dispatcher does for a key belongs to the process. This keeps nothing, and nobody else has a use for the key.
_library = torch.library.Library("_", "IMPL")
_library.fallback(_refuse, _KEY)
