"""Tensors over a parameter's storage that users keep, as `p.data` and `p.detach()` give them.

[Note: assignment] In plain PyTorch `p.data = value` gives the parameter other storage, and what shared the old one
keeps the old values: `kept = p.data; p.data = average; evaluate(); p.data = kept` puts them back, and
`p.data, average.data = average.data, p.data` swaps. Here a parameter stays in its chunk and takes the values over, so
its aliases leave instead, with the old values. (What is not seen: views that were made of an alias; they show the new
values.)
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.unreadable import set_data

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is one of a transform's of `torch.func`, such as `vmap`, which has no storage."""


class Aliases:
    """The aliases that users have got, as long as they keep them."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], list[weakref.ref[Tensor]]] = {}
        """By (chunk id, member index)."""

    def note(self, chunk: Chunk, result: Any) -> None:
        """Remember what a call over a parameter of the chunk has given, if that shares its storage and is a leaf:
        others belong to autograd."""
        if not isinstance(result, Tensor) or isinstance(result, nn.Parameter):  # in-place functions give the parameter
            return
        if result.layout is not torch.strided or result.grad_fn is not None or _is_wrapped(result):
            return
        if result.untyped_storage()._cdata == chunk.storage_key:
            key = (chunk.id, chunk.member_at(int(result.storage_offset())))
            alive = [known for known in self._known.get(key, ()) if known() is not None]
            self._known[key] = [*alive, weakref.ref(result)]

    def is_whole(self, chunk: Chunk, index: int, value: Tensor) -> bool:
        """Whether a tensor is a member of the chunk, element by element in the same place."""
        if value.layout is not torch.strided or value.untyped_storage()._cdata != chunk.storage_key:
            return False
        own = chunk.view_of(chunk.flat, index)
        return value.storage_offset() == own.storage_offset() and value.stride() == own.stride()

    def part(self, chunk: Chunk, index: int) -> None:
        """A member is about to get other values by assignment: its aliases get storage of their own with those that
        they have now. The chunk must be resident."""
        alive = [alias for known in self._known.pop((chunk.id, index), ()) if (alias := known()) is not None]
        shared = [alias for alias in alive if alias.untyped_storage()._cdata == chunk.storage_key]
        if shared:
            own = chunk.slice_of(chunk.flat, index).clone()  # one, as they share theirs
            begin = chunk.spec.members[index].offset
            set_data(shared, [own.as_strided(a.size(), a.stride(), a.storage_offset() - begin) for a in shared])
