"""The only file that registers module and autograd hooks; turns them into engine events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_elixir.runtime.chunk import Chunk


class EngineEvents(Protocol):
    """What the hooks report to."""

    def enter_module(self, module: nn.Module) -> None: ...

    def exit_module(self, module: nn.Module, output: Any) -> None: ...

    def collect_grad(self, chunk: Chunk, index: int, parameter: nn.Parameter) -> None: ...

    def enter_state_dict(self) -> None: ...

    def exit_state_dict(self) -> None: ...


class _ModuleHook:
    """A hook that a deep copy of the module shares and that does nothing there: the engine knows its own modules only."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __deepcopy__(self, memo: dict[int, Any]) -> _ModuleHook:
        return self

    def __call__(self, module: nn.Module, *args: Any) -> None:
        self._call(module, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_ModuleHook, (_nothing,))


def _nothing(*args: Any) -> None:
    return


class Hooks:
    """Handles of everything registered; `remove` takes all of it away.

    Args:
        modules: Modules to watch: those with managed parameters below them.
        chunks: Whose trainable parameters report their gradients.
        engine: Whom to tell.
    """

    def __init__(self, modules: Iterable[nn.Module], chunks: Iterable[Chunk], engine: EngineEvents) -> None:
        self._handles: list[RemovableHandle] = []
        watched = {id(m) for m in modules}

        def enter(module: nn.Module, inputs: Any) -> None:
            if id(module) in watched:
                engine.enter_module(module)

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            if id(module) in watched:
                engine.exit_module(module, output)

        def before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            if id(module) in watched:
                engine.enter_state_dict()

        def after_state_dict(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
            if id(module) in watched:
                engine.exit_state_dict()

        pre, post = _ModuleHook(enter), _ModuleHook(leave)
        pre_state, post_state = _ModuleHook(before_state_dict), _ModuleHook(after_state_dict)
        for module in modules:
            self._handles.append(module.register_forward_pre_hook(pre, prepend=True))
            self._handles.append(module.register_forward_hook(post, always_call=True))
            self._handles.append(module.register_state_dict_pre_hook(pre_state))
            self._handles.append(module.register_state_dict_post_hook(post_state))
        for chunk in chunks:
            for index, parameter in enumerate(chunk.parameters):
                if parameter.requires_grad:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(_grad_hook(engine, chunk, index)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _grad_hook(engine: EngineEvents, chunk: Chunk, index: int) -> Callable[[Tensor], None]:
    def collect(parameter: Tensor) -> None:
        engine.collect_grad(chunk, index, chunk.parameters[index])

    return collect


class SavedTensors:
    """Saved tensors that lie in managed storage are kept as (chunk, offset, size, stride), so that saving keeps no
    replica alive; unpacking makes the chunk resident again.

    Without any saved-tensor hooks autograd keeps a saved leaf by itself, not by another tensor over its storage: nothing would
    tell that its storage is still needed. So ours are on wherever the user's are not.

    Args:
        chunks: By storage key.
        make_resident: Called with the chunk whose elements backward needs now.
    """

    def __init__(self, chunks: dict[int, Chunk], make_resident: Callable[[Chunk], None]) -> None:
        self._chunks = chunks
        self._make_resident = make_resident
        self._active: list[torch.autograd.graph.saved_tensors_hooks] = []

    @staticmethod
    def may_enter() -> bool:
        """False under the user's own saved-tensor hooks (activation checkpointing around a part of the model, say): torch
        calls the innermost pair only, and ours must not hide theirs. What theirs keep holds its chunk by aliasing its
        storage."""
        return torch._C._autograd._top_saved_tensors_default_hooks(False) is None

    def enter(self) -> None:
        """Pack from now on."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._active.append(hooks)

    def exit(self) -> None:
        self._active.pop().__exit__()

    def _pack(self, tensor: Tensor) -> Tensor | tuple[Chunk, torch.Size, tuple[int, ...], int]:
        if tensor.layout is not torch.strided or type(tensor) is not Tensor and not isinstance(tensor, nn.Parameter):
            return tensor
        try:
            chunk = self._chunks.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # tensors without storage, such as functorch wrappers
            return tensor
        if chunk is None or tensor.dtype != chunk.dtype or tensor.is_conj() or tensor.is_neg():
            return tensor
        return chunk, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: Tensor | tuple[Chunk, torch.Size, tuple[int, ...], int]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        chunk, size, stride, offset = packed
        self._make_resident(chunk)
        return chunk.flat.as_strided(size, stride, offset)
