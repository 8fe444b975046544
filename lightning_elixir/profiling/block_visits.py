"""What the blocks of a model save for backward, seen in a step on fake tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_elixir.core.device import beside_dispatch_modes
from lightning_elixir.plan.activations import LEAST_OFFLOADED_BYTES
from lightning_elixir.plan.profile import AttentionCall, BlockVisit, Moment
from lightning_elixir.profiling.step_recorder import StepRecorder


@dataclass(eq=False)
class _Visit:
    """One call of a block."""

    name: str
    begin: int
    """First interval of its forward."""
    before_bytes: int
    inputs: dict[int, int]
    """Bytes of the inputs' storages, by address."""
    hooks: Any
    saved: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """Of each storage that is saved, by address: bytes, and whether it was made inside."""
    first_saved: dict[int, int] = field(default_factory=dict)
    """Bytes of those that no visit before has saved."""
    attention: list[AttentionCall] = field(default_factory=list)
    last_save: Moment | None = None
    end: int = 0
    outputs: frozenset[int] = frozenset()
    backward_begin: int = -1
    after_bytes: int = 0


class BlockVisits:
    """Watches the calls of blocks in the step that a recorder records.

    Args:
        recorder: Already watching the model.
        model: Of fake tensors.
        names: Of its blocks.
    """

    def __init__(self, recorder: StepRecorder, model: nn.Module, names: Collection[str]) -> None:
        self._recorder = recorder
        recorder.on_attention = self._note_attention
        self._open: list[_Visit | None] = []
        self._done: list[_Visit] = []
        self._in_backward: _Visit | None = None
        tensors = (*model.parameters(), *model.buffers())
        self._staying = {t.untyped_storage()._cdata for t in tensors}
        self._owner: dict[int, tuple[int, int]] = {}  # of saved storages, by address: when they came, and the bytes
        for name, module in model.named_modules():
            if name in names:
                module.register_forward_pre_hook(partial(self._enter, name), prepend=True, with_kwargs=True)
                module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        is_plain = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        if not is_plain or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            self._open.append(None)
            return
        begin, before_bytes, workspace_bytes = self._recorder.mark(name)
        inputs = self._sizes(tree_leaves((args, dict(kwargs))))
        visit = _Visit(name, begin, before_bytes - workspace_bytes, inputs, None)
        visit.hooks = torch.autograd.graph.saved_tensors_hooks(
            partial(self._pack, visit), lambda saved: self._unpack(visit, saved)
        )
        visit.hooks.__enter__()
        self._open.append(visit)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        visit = self._open.pop() if self._open else None
        if visit is None:
            return
        visit.hooks.__exit__()
        visit.hooks = None
        visit.end, *_ = self._recorder.mark(visit.name)
        visit.outputs = frozenset(self._sizes(tree_leaves(output)))
        self._done.append(visit)

    def _sizes(self, values: list[Any]) -> dict[int, int]:
        found: dict[int, int] = {}
        for value in values:
            if isinstance(value, Tensor) and value.layout is torch.strided:
                key = value.untyped_storage()._cdata
                if key not in self._staying:
                    found[key] = self._recorder.known_bytes(key)[0]
        return found

    def _pack(self, visit: _Visit, tensor: Tensor) -> Tensor:
        visit.last_save = self._recorder.so_far()
        with torch._C.DisableTorchFunction():
            if tensor.layout is torch.strided:
                key = tensor.untyped_storage()._cdata
                if key not in self._staying:
                    nbytes, born = self._recorder.known_bytes(key)
                    visit.saved[key] = nbytes, born >= visit.begin
                    if self._owner.get(key) != (born, nbytes):  # an address may come again
                        self._owner[key] = born, nbytes
                        visit.first_saved[key] = nbytes
            if tensor.grad_fn is None:
                return tensor
            with beside_dispatch_modes():  # an output that is kept as it is would keep its node, and that the output
                return tensor.detach()

    def _unpack(self, visit: _Visit, saved: Tensor) -> Tensor:
        if visit.backward_begin < 0 and torch._C._current_graph_task_id() != -1:
            visit.backward_begin, visit.after_bytes, _ = self._recorder.mark(visit.name)
        return saved

    def _note_attention(self, call: AttentionCall) -> None:
        visit = self._open[-1] if self._open else None
        if visit is not None and torch.is_grad_enabled():
            top = torch._C._autograd._top_saved_tensors_default_hooks(False)
            if top is not None and top[0] is visit.hooks.pack_hook:  # else the user's own decide
                visit.attention.append(call)

    def found(self, num_intervals: int) -> tuple[BlockVisit, ...]:
        """After the step.

        Args:
            num_intervals: Of the whole timeline.
        """
        begins = sorted(v.backward_begin for v in self._done if v.backward_begin >= 0)
        after = dict(zip(begins, (*begins[1:], num_intervals), strict=False))
        had: set[int] = set()
        visits = []
        for visit in self._done:
            begin = visit.backward_begin
            inner = [n for key, (n, is_inner) in visit.saved.items() if is_inner and key not in visit.outputs]
            fresh = {key: nbytes for key, nbytes in visit.inputs.items() if key not in had}
            had.update(visit.inputs)
            visits.append(
                BlockVisit(
                    name=visit.name,
                    forward=(visit.begin, visit.end),
                    backward=(begin, after[begin]) if begin >= 0 else (0, 0),
                    last_save=visit.last_save or Moment(visit.begin, 0, 0, 0, visit.before_bytes),
                    before_bytes=visit.before_bytes,
                    after_bytes=visit.after_bytes,
                    inner_bytes=sum(inner),
                    input_bytes=_large(fresh),
                    offload_bytes=_large(visit.first_saved),
                    attention=tuple(visit.attention),
                )
            )
        return tuple(visits)


def _large(sizes: Mapping[int, int]) -> int:
    return sum(nbytes for nbytes in sizes.values() if nbytes >= LEAST_OFFLOADED_BYTES)
