"""What operators give for fake operands: torch is asked once for all operands that are alike.

A model repeats its layers, and finding the shape of a fake result takes torch longer than the real operator takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

# What operators with these tags give, or do to operands, does not follow from what operands look like.
_UNFORESEEABLE = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view))
_PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


@dataclass(frozen=True, slots=True)
class _New:
    """A result that is a tensor of its own."""

    is_view: bool
    """Of the only operand; otherwise it has memory of its own."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    attributes: Mapping[str, Any]
    """What torch keeps with a fake tensor."""


_Recipe = _New | int | None
"""How to make one result; a number: it is that tensor among the operands; None: it is None."""


def _grouped_mm(mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Of operands of another dtype than bfloat16, which torch computes for real ones alone (2.11 to 2.13)."""
    first, second, *others = args
    with mode:
        result: Tensor = func(first.to(torch.bfloat16), second.to(torch.bfloat16), *others, **kwargs)
        return result.to(kwargs.get("out_dtype") or first.dtype)


class FakeResults:
    """Runs operators under a fake mode, and remembers what they gave.

    What they give for operands of the same shapes, strides, dtypes and numbers is made without torch's help if it can
    only be the same: results are operands, views of the one operand that there is, or have memory of their own.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[type | None, list[_Recipe]]] = {}
        self._is_foreseeable: dict[Any, bool] = {}

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """As under the fake mode that is on.

        Args:
            func: The operator.
            types: As `__torch_dispatch__` gets them.
            args: Its positional operands.
            kwargs: Its keyword operands.
        """
        # The mode itself is called: the way to it through torch takes longer than most of what it does.
        with unset_fake_temporarily() as mode:
            result = self._run(mode, func, types, args, kwargs) if isinstance(mode, FakeTensorMode) else NotImplemented
        return func(*args, **kwargs) if result is NotImplemented else result

    def _run(
        self, mode: FakeTensorMode, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        tensors: list[FakeTensor] = []
        key = _key(mode, func, args, kwargs, tensors) if self._can_foresee(func) else None
        known = self._known.get(key) if key is not None else None
        if known is not None:
            kind, recipes = known
            made = [_made(r, tensors) if isinstance(r, _New) else None if r is None else tensors[r] for r in recipes]
            return made[0] if kind is None else kind(made)
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            result = _grouped_mm(mode, func, args, kwargs)
        else:
            result = mode.__torch_dispatch__(func, types, args, kwargs)
        # An operand that looks otherwise than before is one that results are written to.
        if key is not None and _key(mode, func, args, kwargs, []) == key:
            kind = next((kind for kind in (tuple, list) if isinstance(result, kind)), None)  # named tuples are tuples
            found = _recipes((result,) if kind is None else result, tensors)
            if found is not None:
                self._known[key] = kind, found
        return result

    def _can_foresee(self, func: Any) -> bool:
        found = self._is_foreseeable.get(func)
        if found is None:
            found = func.namespace == "aten" and _UNFORESEEABLE.isdisjoint(func.tags)
            self._is_foreseeable[func] = found
        return found


# What results depend on


def _key(
    mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[FakeTensor]
) -> tuple[Any, ...] | None:
    """What results depend on; None: not known. Adds the tensors among the operands to `tensors`."""
    parts: list[Any] = [mode, func, torch.get_default_dtype(), torch.is_inference_mode_enabled(), *kwargs]
    is_known = _add(args, mode, parts, tensors) and _add(kwargs.values(), mode, parts, tensors)
    return tuple(parts) if is_known else None


def _add(values: Iterable[Any], mode: FakeTensorMode, parts: list[Any], tensors: list[FakeTensor]) -> bool:
    for value in values:
        if isinstance(value, FakeTensor):
            if value.fake_mode is not mode or value.constant is not None or not _is_plain(value):
                return False
            tensors.append(value)
            parts += (
                value.shape,
                value.stride(),
                value.storage_offset(),
                value.untyped_storage().nbytes(),
                value.dtype,
                value.fake_device,
                value.requires_grad,
                value.is_inference(),
            )
        elif isinstance(value, (list, tuple)):
            parts += (list, len(value))
            if not _add(value, mode, parts, tensors):
                return False
        elif isinstance(value, _PLAIN):
            parts += (type(value), value)  # 1, 1.0 and True are equal
        else:
            return False
    return True


def _is_plain(tensor: FakeTensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_neg() and not tensor.is_conj()


# Making results


def _recipes(results: Sequence[Any], tensors: list[FakeTensor]) -> list[_Recipe] | None:
    """How to make the like of each of these; None: that is not certain."""
    found: list[_Recipe] = []
    own: set[int] = set()  # addresses of storages
    for result in results:
        index = next((index for index, tensor in enumerate(tensors) if result is tensor), None)
        if result is None or index is not None:
            found.append(index)
            continue
        if type(result) is not FakeTensor or not _is_plain(result):
            return None
        storage = result.untyped_storage()._cdata
        is_view = any(tensor.untyped_storage()._cdata == storage for tensor in tensors)
        if storage in own or (is_view and len(tensors) > 1):
            return None
        if not is_view:
            own.add(storage)
        recipe = _New(
            is_view,
            tuple(result.shape),
            result.stride(),
            int(result.storage_offset()),
            result.dtype,
            result.fake_device,
            vars(result).copy(),
        )
        if any(isinstance(value, Tensor) for value in recipe.attributes.values()):
            return None
        if not _is_same(_made(recipe, tensors), result):
            return None
        found.append(recipe)
    return found


def _is_same(first: Tensor, second: Tensor) -> bool:
    return (
        first.storage_offset() == second.storage_offset()
        and first.untyped_storage().nbytes() == second.untyped_storage().nbytes()
        and first.requires_grad == second.requires_grad
        and torch._C._dispatch_key_set(first) == torch._C._dispatch_key_set(second)
    )


def _made(recipe: _New, tensors: list[FakeTensor]) -> Tensor:
    shape, stride = recipe.shape, recipe.stride
    inner = torch.empty_strided(shape, stride, dtype=recipe.dtype, device="meta")
    if recipe.is_view:
        inner.set_(tensors[0].untyped_storage(), recipe.offset, shape, stride)
    # As fake tensors are made by their constructor, which takes five times as long.
    made = Tensor._make_subclass(FakeTensor, inner, False, dispatch_device=True, device_for_backend_keys=recipe.device)
    vars(made).update(recipe.attributes)
    return made
