"""Tensors as the flat runs of elements that they are in memory, whatever their dimensions."""

from __future__ import annotations

from torch import Tensor


def memory_order(x: Tensor) -> list[int] | None:
    """The dimensions as they lie in memory; None: as they are."""
    return None if x.is_contiguous() else sorted(range(x.dim()), key=x.stride, reverse=True)


def flattened(x: Tensor, order: list[int] | None) -> Tensor:
    """The elements with the dimensions in this order (None: as they are), contiguous: a view where that is possible."""
    x = (x if order is None else x.permute(order)).contiguous()
    return x if x.dim() == 1 else x.view(-1)


def write_back(x: Tensor, flat: Tensor, order: list[int] | None) -> None:
    """Where `flattened` gave a copy, because `x` has gaps or another order."""
    if flat.data_ptr() != x.data_ptr():
        view = x if order is None else x.permute(order)
        view.copy_(flat.view(view.shape))


def unflattened(flat: Tensor, shape: tuple[int, ...], order: list[int] | None) -> Tensor:
    """A view of this shape, whose elements lie in memory in this order of its dimensions."""
    if order is None:
        return flat.view(shape)
    back = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([shape[i] for i in order]).permute(back)
