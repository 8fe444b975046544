"""The parameter class that intercepts what is done to a managed parameter outside compute, or while it is released.

Reading freed storage kills the process, so a released parameter must never look like a plain one. Between steps every
managed parameter, resident or not, carries this class, so that what the user writes is noticed and kept.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import FrameType, GetSetDescriptorType
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Interceptor(Protocol):
    """What decides on an intercepted call: the engine."""

    def intercept(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any: ...

    def plain_copy(self, parameter: nn.Parameter) -> nn.Parameter:
        """A whole, unmanaged copy, for `deepcopy` and pickling."""


def is_module_converted() -> bool:
    """Whether a method of a module's that converts it, such as `to` or `to_empty`, is what calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._apply.__code__:
            return True
        frame = frame.f_back
    return False


def make_intercepting_class(base: type[nn.Parameter], interceptor: Interceptor) -> type[nn.Parameter]:
    """A subclass of `base` whose every torch function goes to `interceptor`. One per engine and parameter class."""

    class ReleasedParameter(base):  # type: ignore[misc, valid-type]
        is_managed_by_elixir = True

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return interceptor.intercept(func, args, kwargs or {})

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            copied = memo.get(id(self))
            if copied is None:
                copied = memo[id(self)] = interceptor.plain_copy(self)
            return copied

        def __reduce_ex__(self, protocol: Any) -> Any:
            return interceptor.plain_copy(self).__reduce_ex__(protocol)

    ReleasedParameter.__name__ = ReleasedParameter.__qualname__ = f"Released{base.__name__}"
    return ReleasedParameter


# Attributes whose value needs the elements, or gives a way to write them.
_VALUE_ATTRIBUTES = {"data", "T", "mT", "H", "mH", "real", "imag"}

_METADATA_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "element_size",
    "is_floating_point", "is_complex", "is_signed", "get_device", "requires_grad_", "register_hook",
    "register_post_accumulate_grad_hook", "is_pinned", "is_shared", "is_same_size", "is_inference", "is_neg", "is_conj",
    "retain_grad", "has_names", "dim_order", "_is_view", "__len__", "__hash__", "__dir__", "__format_dim__",
    "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
)  # fmt: skip

_METADATA_FUNCTIONS = (
    "numel", "is_floating_point", "is_complex", "is_signed", "is_same_size", "is_neg", "is_conj", "is_inference",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
)  # fmt: skip


@cache
def metadata_functions() -> frozenset[Any]:
    """Functions that never look at a parameter's elements (the grad getter included)."""
    found: set[Any] = set()
    for name, attribute in vars(torch._C.TensorBase).items():
        if isinstance(attribute, GetSetDescriptorType) and name not in _VALUE_ATTRIBUTES:
            found.add(attribute.__get__)
            if name not in ("grad", "_grad"):
                found.add(attribute.__set__)
    found.update(getattr(Tensor, name) for name in _METADATA_METHODS if hasattr(Tensor, name))
    found.update(getattr(torch, name) for name in _METADATA_FUNCTIONS)
    return frozenset(found)


@cache
def factories() -> frozenset[Any]:
    """Of these, the ones that make other tensors of the same kind."""
    names = [name for name in _METADATA_METHODS if name.startswith("new_")]
    return frozenset((
        *(getattr(Tensor, name) for name in names),
        *(getattr(torch, name) for name in _METADATA_FUNCTIONS if name.endswith("_like")),
    ))  # fmt: skip


_attributes: Any = Tensor  # annotated for instances; on the class they are descriptors
GRAD_GETTERS = frozenset((_attributes.grad.__get__, _attributes._grad.__get__))
GRAD_SETTERS = frozenset((_attributes.grad.__set__, _attributes._grad.__set__))
DATA_GETTER = _attributes.data.__get__
DATA_SETTER = _attributes.data.__set__
COPY = Tensor.copy_
DETACH = Tensor.detach

# These run a backward, which brings what it needs by itself; parameters among their arguments only name gradients.
BACKWARD_FUNCTIONS = frozenset((torch.autograd.grad, torch.autograd.backward, Tensor.backward))

# These hand out the address of the elements: nothing can be seen of how long it is used.
RAW_POINTER_FUNCTIONS = frozenset((
    Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.__dlpack__, Tensor.numpy,
))  # fmt: skip


class GradAccess(enum.Enum):
    """What reads or writes a managed parameter's `.grad`."""

    OTHER = "other"
    STEP = "step"
    """A torch optimizer's step, which would update the parameter without the engine."""
    ZERO_GRAD = "zero_grad"
    """Drops it, and looks whether there is one."""
    FILL_GRAD = "zero_grad(set_to_none=False)"
    """Fills it with zeros, and looks whether there is one."""


# Endings of the files, and the functions in them.
_GRAD_CODE: tuple[tuple[str, str, tuple[str, ...], GradAccess], ...] = (
    ("torch/nn/modules/", "module.py", ("zero_grad",), GradAccess.ZERO_GRAD),
    ("torch/optim/", ".py", ("zero_grad",), GradAccess.ZERO_GRAD),
    ("torch/optim/", ".py", ("step", "_init_group"), GradAccess.STEP),
    ("lightning_elixir/optim/", "hybrid_adam.py", ("step",), GradAccess.STEP),
)
_OUR_FILES = ("runtime/released.py", "runtime/interception.py", "runtime/frozen_copies.py")


def grad_access() -> GradAccess:
    """What kind of code made the `.grad` access that is being intercepted."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.replace("\\", "/").endswith(_OUR_FILES):
        frame = frame.f_back
    for _ in range(2):  # a comprehension is a frame of its own before Python 3.12
        if frame is None:
            break
        filename, function = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
        for folder, ending, functions, access in _GRAD_CODE:
            if folder in filename and filename.endswith(ending) and function in functions:
                if access is GradAccess.ZERO_GRAD and not frame.f_locals.get("set_to_none", True):
                    return GradAccess.FILL_GRAD
                return access
        frame = frame.f_back
    return GradAccess.OTHER


def is_in_state_dict() -> bool:
    """Whether this thread is inside a module's `state_dict()`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "state_dict" and code.co_filename.replace("\\", "/").endswith("torch/nn/modules/module.py"):
            return True
        frame = frame.f_back
    return False


def is_loading() -> bool:
    """Whether the call that is being intercepted is that of `load_state_dict`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.replace("\\", "/").endswith(_OUR_FILES):
        frame = frame.f_back
    return (
        frame is not None
        and frame.f_code.co_name == "_load_from_state_dict"
        and frame.f_code.co_filename.replace("\\", "/").endswith("torch/nn/modules/module.py")
    )


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Tensors anywhere in nested tuples, lists and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
