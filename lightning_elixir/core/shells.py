"""Tensors whose elements are those of tensors inside of them, kept as one tensor of bytes.

[Note: shells] Quantised weights of torchao and the like are tensor subclasses around plain tensors: values, scales,
zero points. Such a *shell* has no storage that a chunk could hold, but torch has a protocol that takes it apart and
puts it together again (`__tensor_flatten__`, `__tensor_unflatten__`), so the bytes of what is inside can be. The
parameter becomes a `ShellParameter`, a plain tensor of these bytes, which moves, is sharded and saved as all others
are, and acts as the shell in all code that uses it: functions, methods and attributes get a shell that is put together
over the bytes. Only `isinstance` tells the two apart. Values that leave the engine are shells again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import GetSetDescriptorType
from typing import Any, cast

import torch
from torch import Tensor, nn

# Kernels of quantised products read 16 bytes at once, and some need tensors aligned as torch's allocator has them.
_ALIGNED = 256

_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class _Inside:
    """A plain tensor in a shell."""

    offset: int
    """In bytes."""
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Without gaps."""
    dtype: torch.dtype

    def over(self, flat: Tensor) -> Tensor:
        """A view of the bytes of a whole shell."""
        run = flat[self.offset : self.offset + self.nbytes].view(self.dtype)
        return run.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class ShellLayout:
    """How the bytes of a shell lie, and all that it is beside them."""

    kind: type[Tensor]
    parts: tuple[tuple[str, Any], ...]
    """By the names that it has for them: tensors, shells, or values that are neither."""
    context: Any
    """What `__tensor_flatten__` gave beside the parts, and `__tensor_unflatten__` takes."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    """As which it is used, whatever is inside."""
    nbytes: int
    """Of all tensors inside, with the gaps between them."""

    @staticmethod
    def of(tensor: Tensor) -> ShellLayout | None:
        """None for what is no shell, or one that cannot be kept as bytes: what is inside has gaps, is spread over
        devices or ranks, or takes part in autograd, or the class does not put together again what it takes apart."""
        if not is_shell(tensor) or tensor.requires_grad or type(tensor).__name__ == "DTensor":
            return None
        try:
            layout, _ = _laid_out(tensor, 0)
            if layout is None or len({inner.device for inner in tensors_inside(tensor)}) != 1:
                return None
            again, _ = _laid_out(layout.on_meta(), 0)
        except Exception:  # whatever the user's class raises: it stays as it is then
            return None
        return layout if again is not None and layout.fits(again) else None

    def fits(self, other: ShellLayout) -> bool:
        """Whether bytes of one are bytes of the other."""
        return (
            self.kind is other.kind
            and (self.shape, self.stride, self.dtype) == (other.shape, other.stride, other.dtype)
            and list(self._leaves()) == list(other._leaves())
        )

    def opened(self, flat: Tensor) -> Tensor:
        """A shell over bytes.

        Args:
            flat: uint8, 1-D, `[nbytes]`.
        """
        return self._made(lambda inside: inside.over(flat))

    def taken_out(self, flat: Tensor, empty: Callable[[int, torch.dtype], Tensor] | None = None) -> Tensor:
        """As `opened`, in memory of its own for each tensor inside, as torch wants it to save them.

        Args:
            empty: Gives memory, 1-D, for so many elements of a dtype; None: on the device of the bytes.
        """

        def taken(inside: _Inside) -> Tensor:
            numel = torch.Size(inside.shape).numel()
            if empty is None or not numel:
                home = torch.empty(numel, dtype=inside.dtype, device=flat.device)
            else:
                home = empty(numel, inside.dtype)
            return home.as_strided(inside.shape, inside.stride).copy_(inside.over(flat))

        return self._made(taken)

    def on_meta(self) -> Tensor:
        """A shell without values."""
        return self._made(
            lambda inside: torch.empty_strided(inside.shape, inside.stride, dtype=inside.dtype, device="meta")
        )

    def fill(self, flat: Tensor, shell: Tensor) -> None:
        """Put a shell's values into bytes; gaps become zeros.

        Args:
            flat: uint8, 1-D, `[nbytes]`, any device.
            shell: Of this layout, any device.

        Raises:
            ValueError: It has another layout.
        """
        theirs = ShellLayout.of(shell)
        if theirs is None or not self.fits(theirs):
            raise ValueError(f"{_words(shell)} instead of {self}")
        flat.zero_()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for (_, inside), inner in zip(self._leaves(), tensors_inside(shell), strict=True):
                inside.over(flat).copy_(inner)

    def __str__(self) -> str:
        return f"{self.kind.__name__} ({self.dtype}, {list(self.shape)})"

    def _leaves(self, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], _Inside]]:
        """Plain tensors by their names, in the order of `tensors_inside`."""
        for name, part in self.parts:
            if isinstance(part, _Inside):
                yield (*above, name), part
            elif isinstance(part, ShellLayout):
                yield from part._leaves((*above, name))

    def _made(self, tensor: Callable[[_Inside], Tensor]) -> Tensor:
        parts = {
            name: tensor(part)
            if isinstance(part, _Inside)
            else part._made(tensor)
            if isinstance(part, ShellLayout)
            else part
            for name, part in self.parts
        }
        kind: Any = self.kind
        made: Tensor = kind.__tensor_unflatten__(parts, self.context, torch.Size(self.shape), self.stride)
        return made


def is_shell(tensor: Tensor) -> bool:
    """Whether its elements are those of tensors inside of it, as a DTensor's are those of its part."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__")


def tensors_inside(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold a tensor's elements: itself, or those in a shell."""
    if not is_shell(tensor):
        yield tensor
        return
    for name in _taken_apart(tensor)[0]:
        value = getattr(tensor, name)
        if isinstance(value, Tensor):
            yield from tensors_inside(value)


def held_as(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype that a chunk has of a parameter: of a shell, and of what stands for one, those of its bytes."""
    layout = layout_of(tensor)
    return (tuple(tensor.shape), tensor.dtype) if layout is None else ((layout.nbytes,), torch.uint8)


def layout_of(tensor: Tensor) -> ShellLayout | None:
    """Of a shell, or of what stands for one; None for all others."""
    return tensor.layout_at_elixir if isinstance(tensor, ShellParameter) else ShellLayout.of(tensor)


def _taken_apart(shell: Tensor) -> tuple[list[str], Any]:
    found: tuple[list[str], Any] = cast(Any, shell).__tensor_flatten__()
    return found


def _laid_out(shell: Tensor, start: int) -> tuple[ShellLayout | None, int]:
    """The layout of a shell whose bytes begin at `start`, and where the next ones may begin."""
    names, context = _taken_apart(shell)
    if any(isinstance(value, Tensor) for value in (context.values() if isinstance(context, Mapping) else (context,))):
        return None, start  # which nothing here would move
    parts: list[tuple[str, Any]] = []
    end = start
    for name in names:
        value = part = getattr(shell, name)
        if isinstance(value, Tensor):
            if is_shell(value):
                part, end = _laid_out(value, end)
            else:
                part, end = _inside(value, end)
            if part is None:
                return None, start
        parts.append((name, part))
    shape, stride = tuple(shell.shape), tuple(shell.stride())
    return ShellLayout(type(shell), tuple(parts), context, shape, stride, shell.dtype, end - start), end


def _inside(tensor: Tensor, start: int) -> tuple[_Inside | None, int]:
    if (
        type(tensor) not in _PLAIN
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.requires_grad
        or tensor.is_conj()
        or tensor.is_neg()
        or not torch.ops.aten.is_non_overlapping_and_dense(tensor)
    ):
        return None, start
    nbytes = tensor.numel() * tensor.element_size()
    found = _Inside(start, nbytes, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    return found, start + -(-nbytes // _ALIGNED) * _ALIGNED


def _words(tensor: Tensor) -> str:
    return f"{type(tensor).__name__} ({tensor.dtype}, {list(tensor.shape)})"


# What stands for a shell

_attributes: Any = Tensor  # annotated for instances; on the class they are descriptors
_SET_DATA = _attributes.data.__set__

_DESCRIBING = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "element_size", "is_floating_point",
    "is_complex", "is_signed", "is_same_size", "dim_order", "__len__",
)  # fmt: skip
_DESCRIBING_ATTRIBUTES = ("shape", "dtype", "ndim", "layout", "itemsize", "nbytes")
_DESCRIBING_FUNCTIONS = ("numel", "is_floating_point", "is_complex", "is_signed", "is_same_size")

DESCRIBING: frozenset[Any] = frozenset((
    *(getattr(Tensor, name) for name in _DESCRIBING),
    *(getattr(Tensor, name).__get__ for name in _DESCRIBING_ATTRIBUTES),
    *(getattr(torch, name) for name in _DESCRIBING_FUNCTIONS),
))  # fmt: skip
"""Functions whose answer is in the layout of a shell."""

# Of the parameter itself, not of the shell: what autograd and hash tables know it by.
_OF_ITSELF: frozenset[Any] = frozenset((
    *(v.__set__ for k, v in vars(torch._C.TensorBase).items() if isinstance(v, GetSetDescriptorType) and k != "data"),
    *(getattr(_attributes, name).__get__ for name in ("requires_grad", "grad", "is_leaf", "grad_fn", "_version")),
    Tensor.__hash__, Tensor.__dir__, Tensor.requires_grad_, Tensor.register_hook,
))  # fmt: skip


class ShellParameter(nn.Parameter):
    """A frozen parameter: the bytes of a shell, in whose place it is.

    Args:
        data: uint8, 1-D, on the compute device.
        layout: Of the shell.
    """

    layout_at_elixir: ShellLayout
    bare_at_elixir: Tensor
    """A shell without values."""

    def __new__(cls, data: Tensor, layout: ShellLayout) -> ShellParameter:
        made = super().__new__(cls, data, requires_grad=False)
        made.layout_at_elixir = layout
        made.bare_at_elixir = layout.on_meta()
        return made

    def __init__(self, data: Tensor, layout: ShellLayout) -> None:  # torch's own takes other arguments
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DESCRIBING:
            return func(*described((*args,)), **described(kwargs))
        if func == _SET_DATA:
            raise RuntimeError(
                f"a quantised parameter ({args[0].layout_at_elixir}) cannot be assigned `.data` while its ElixirModule"
                " holds it: copy_() the new values into it, between two steps"
            )
        if func in _OF_ITSELF:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return call_opened(func, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            found = getattr(self.bare_at_elixir, name)  # raises for what a shell has not got either
            return getattr(self.detach(), name) if isinstance(found, Tensor) or callable(found) else found
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"Parameter around {self.layout_at_elixir}"


def call_opened(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with shells for what stands for them; their bytes must be there."""
    args = opened((*args,))
    name = getattr(func, "__name__", "")
    if args and isinstance(args[0], Tensor) and getattr(Tensor, name, None) is func:
        func = getattr(type(args[0]), name)  # its class may have one of its own
    return func(*args, **opened(dict(kwargs)))


def opened(values: Any) -> Any:
    """The same, with shells for what stands for them, in nested tuples, lists and dicts; their bytes must be there."""
    return _replaced(values, _open)


def described(values: Any) -> Any:
    """As `opened`, with shells without values."""
    return _replaced(values, lambda parameter: parameter.bare_at_elixir)


def holds_shells(tensors: Any) -> bool:
    """Whether there is one that stands for a shell among these."""
    return any(isinstance(tensor, ShellParameter) for tensor in tensors)


def _open(parameter: ShellParameter) -> Tensor:
    # Views that are made anew show, as long as they are there, that the bytes are in use.
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return parameter.layout_at_elixir.opened(parameter.detach())


def _replaced(values: Any, by: Callable[[ShellParameter], Tensor]) -> Any:
    if isinstance(values, ShellParameter):
        return by(values)
    if isinstance(values, (tuple, list)):
        found = [_replaced(value, by) for value in values]
        if all(a is b for a, b in zip(found, values, strict=True)):
            return values
        return type(values)(*found) if hasattr(values, "_fields") else type(values)(found)
    if type(values) is dict:
        return {key: _replaced(value, by) for key, value in values.items()}
    return values
