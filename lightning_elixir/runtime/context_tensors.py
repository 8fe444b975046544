"""Parameters that functions of users keep for their backward without telling autograd.

[Note: kept beside autograd] `torch.autograd.Function`s should keep tensors by `ctx.save_for_backward`, of which saved
tensor hooks learn. Some of quantised layers put them into attributes of `ctx` instead (bitsandbytes' 4-bit product:
`ctx.tensors`), where they would hold their chunk from forward to backward, so that no chunk of a frozen base could ever
go. So when a module with such parameters has run, the graph that it has made is looked through: what lies in a chunk is
replaced by its place there, and comes back right before the node runs, as a saved tensor does when it is unpacked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_elixir.plan.types import TRAINED_DTYPES
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.hooks import PackedShell, PackedTensor, SavedTensors

# Of one module's forward: more than a transformer's layer makes. What lies behind is held, as it would be without this.
_MOST_NODES = 512


def modules_to_look_through(
    root: nn.Module, home: Mapping[int, tuple[Chunk, int]], class_of: Callable[[Chunk, int], type]
) -> frozenset[int]:
    """Modules (by id) with frozen parameters in chunks, somewhere below, of which only special functions make use:
    of a class or a dtype of quantised values.

    Args:
        root: With all of them.
        home: Chunk and member index of every parameter, by its id.
        class_of: A member's own class; those that are not there have another one for the time being.
    """
    found: set[int] = set()

    def is_quantised(parameter: nn.Parameter) -> bool:
        known = home.get(id(parameter))
        if known is None or known[0].spec.requires_grad:
            return False
        return known[0].spec.dtype not in TRAINED_DTYPES or class_of(*known) is not nn.Parameter

    own = {id(m) for m in root.modules() if any(is_quantised(p) for p in m._parameters.values() if p is not None)}
    for module in root.modules() if own else ():
        if any(id(part) in own for part in module.modules()):
            found.add(id(module))
    return frozenset(found)


class ContextTensors:
    """Takes parameters out of the attributes of nodes, and puts them back when these run.

    Args:
        saved: Knows the places of tensors, and brings them.
    """

    def __init__(self, saved: SavedTensors) -> None:
        self._saved = saved

    def take_out(self, inputs: Any, output: Any) -> None:
        """Look through what a module's forward has made.

        Args:
            inputs: Where it began.
            output: What it returned.
        """
        for node in _nodes_between(output, inputs):
            attributes = getattr(node, "__dict__", None)
            if not attributes:
                continue
            kept = {name: value for name, value in attributes.items() if self._holds(value)}
            if kept:
                self._keep(node, tuple(kept))

    def _keep(self, node: Any, names: tuple[str, ...]) -> None:
        reference = weakref.ref(node)  # the node owns its hooks

        def pack(*_: Any) -> None:
            one = reference()
            for name in names if one is not None else ():
                setattr(one, name, self._replaced(getattr(one, name), Tensor))

        def unpack(*_: Any) -> None:
            one = reference()
            for name in names if one is not None else ():
                setattr(one, name, self._replaced(getattr(one, name), (PackedTensor, PackedShell)))

        pack()
        node.register_prehook(unpack)
        node.register_hook(pack)

    def _holds(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                return self._saved.packed(value) is not None
        return type(value) in (tuple, list) and any(isinstance(v, Tensor) and self._holds(v) for v in value)

    def _replaced(self, value: Any, kind: Any) -> Any:
        """The same with places instead of tensors, or tensors instead of places."""
        if type(value) in (tuple, list):
            return type(value)(self._replaced(one, kind) for one in value)
        if not isinstance(value, kind):
            return value
        if isinstance(value, (PackedTensor, PackedShell)):
            return self._saved.unpacked(value)
        with torch._C.DisableTorchFunctionSubclass():
            packed = self._saved.packed(cast(Tensor, value))
        return value if packed is None else packed


def _nodes_between(output: Any, inputs: Any) -> Iterator[Any]:
    """The nodes of the graph from a module's results down to its inputs, as far as these are known."""
    border = {id(node) for node in _grad_fns(inputs)}
    waiting, seen, count = list(_grad_fns(output)), set(border), 0
    while waiting and count < _MOST_NODES:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        count += 1
        yield node
        waiting.extend(following for following, _ in node.next_functions if following is not None)


def _grad_fns(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value.grad_fn
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _grad_fns(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _grad_fns(one)
