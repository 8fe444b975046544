"""Tensors that autograd saves, in host memory from forward to backward.

[Note: activations in host memory] A storage goes as a whole, once, however many tensors over it are saved and by
however many blocks, unless it was written to in between. Its copy runs on a lane of its own, behind computing. The
device keeps the storage until the next block of this kind has ended; then the compute stream waits for the copy, if it
is not over, and lets go. So the tensors of two blocks at the most are on the device, whatever the bus does. What is
there still when backward begins is used as it is. In backward, the first tensor of a block that is read has all of that
block's brought, and those of the block before it ahead of need.

Left where they are: parameters and buffers, which stay anyway; small storages (`LEAST_OFFLOADED_BYTES`); subclasses of
tensors, and what is not dense or not on the device; and what finds no room in the host memory that the plan gives, or
that, where the plan foresees nothing, all else leaves of this rank's part.

In-place writes to a saved tensor are an error in plain PyTorch, when backward reads it. Here they are while the device
has the storage; afterwards they cannot do harm, as backward gets the earlier values.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_elixir.core.device import Device, Event, beside_dispatch_modes
from lightning_elixir.core.host import available_host_bytes
from lightning_elixir.core.host_memory import HostMemory
from lightning_elixir.core.signals import deferred
from lightning_elixir.plan.activations import LEAST_OFFLOADED_BYTES
from lightning_elixir.runtime.hooks import SavedBeside, SavedTensors, ThreadHooks
from lightning_elixir.runtime.transport import TransferBytes
from lightning_elixir.runtime.unreadable import set_data

_LEAST_FREE_BYTES = 2**30
"""Host memory that is left free, beside what the plan leaves."""
_MOST_WASTE = 1.25
"""A buffer is used for storages down to this part of it."""


class _Buffer:
    """Host memory for one storage."""

    def __init__(self, host: Tensor) -> None:
        self.host = host  # 1-D, uint8
        self.busy: Event | None = None  # the last copy from or to it


class HostPool:
    """Buffers in host memory, which are used again from step to step.

    Args:
        memory: Gives host memory.
        rank_bytes: What this rank has in host memory now, these buffers included.
    """

    def __init__(self, memory: HostMemory, rank_bytes: Callable[[], int]) -> None:
        self._memory = memory
        self._rank_bytes = rank_bytes
        self.limit_bytes: int | None = 0
        """What all buffers may take together; None: what the host has."""
        self.rank_limit_bytes: int | None = None
        """What they may take together with all else that this rank has in host memory; None: as much."""
        self.held_bytes = 0
        self._free: list[_Buffer] = []
        self._returned: deque[_Buffer] = deque()  # by whatever thread lets go of a graph

    def take(self, nbytes: int) -> _Buffer | None:
        """A buffer of at least so many bytes; None where there is no room for it."""
        self._collect()
        fitting = [b for b in self._free if nbytes <= b.host.numel() <= nbytes * _MOST_WASTE]
        if fitting:
            best = min(fitting, key=lambda b: b.host.numel())
            self._free.remove(best)
            return best
        if self._lacks(nbytes):
            self.drop_free()  # of other sizes
            if self._lacks(nbytes):
                return None
        buffer = _Buffer(self._memory.zeros(nbytes, torch.uint8))
        self.held_bytes += nbytes
        return buffer

    def _lacks(self, nbytes: int) -> bool:
        if self.limit_bytes is not None and self.held_bytes + nbytes > self.limit_bytes:
            return True
        if self.rank_limit_bytes is not None and self._rank_bytes() + nbytes > self.rank_limit_bytes:
            self._memory.let_go()  # of what waits to be used again
            if self._rank_bytes() + nbytes > self.rank_limit_bytes:
                return True
        return available_host_bytes() < nbytes + _LEAST_FREE_BYTES

    def give(self, buffer: _Buffer) -> None:
        """A buffer is not used any more, but for a copy that may still run. May be called at any moment."""
        self._returned.append(buffer)

    def drop_free(self) -> None:
        """Give back what is not in use."""
        self._collect()
        for buffer in self._free:
            if buffer.busy is not None:
                buffer.busy.synchronize()
            self.held_bytes -= buffer.host.numel()
        self._free.clear()

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())


class _WriteCount:
    """Autograd's count of in-place writes to a tensor, and to all that share it; keeps none of them. Tensors over one
    storage may have counts of their own, as the parts have that `unsafe_chunk` gives."""

    def __init__(self, tensor: Tensor) -> None:
        self._witness = tensor.detach()
        set_data((self._witness,), (self._witness.new_empty(0),))

    @property
    def value(self) -> int:
        return self._witness._version

    def is_shared_by(self, tensor: Tensor) -> bool:
        """Whether writes to a tensor are counted here. The one adapter around torch's way to set a count."""
        version = tensor._version
        if version != self.value:
            return False
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version + 1,))
        is_shared = self.value == version + 1
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        return is_shared


class _Entry:
    """One storage that is in host memory, or on its way.

    Args:
        tensor: Over the storage.
        buffer: Where its copy goes.
        pool: Gets the buffer back.
    """

    def __init__(self, tensor: Tensor, buffer: _Buffer, pool: HostPool) -> None:
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        self.buffer = buffer
        self._pool = pool
        self.address = StorageWeakRef(storage)  # as long as it is held, no other storage has the address
        self.writes = _WriteCount(tensor)
        self._version = self.writes.value
        self.source: torch.UntypedStorage | None = storage
        self.sent: Event | None = None
        self.is_overwritten = False
        self.back: Tensor | None = None  # 1-D, uint8, on the device again
        self.arrived: Event | None = None

    def settle(self) -> None:
        """Let go of the storage on the device, when its copy is over."""
        if self.source is not None and self.sent is not None:
            self.sent.wait()
            self.is_overwritten |= self.writes.value != self._version
        self.source = None

    def has(self, tensor: Tensor) -> bool:
        """Whether the copy is of what a tensor over the storage has now."""
        return self.writes.is_shared_by(tensor) and self.writes.value == self._version

    @property
    def is_on_device(self) -> bool:
        return self.source is not None or self.back is not None

    def storage(self) -> torch.UntypedStorage:
        """On the device, for the compute stream."""
        if self.source is not None:
            self.is_overwritten |= self.writes.value != self._version
        if self.is_overwritten:
            raise RuntimeError(
                f"a tensor needed for the gradients, {self.nbytes} bytes, has been modified by an inplace operation"
                " while it was copied to host memory: write to a copy instead (x = x + y for x += y)"
            )
        if self.source is not None:
            return self.source
        if self.arrived is not None:
            self.arrived.wait()
            self.arrived = None
        if self.back is None:
            raise RuntimeError("what was brought back has been dropped")
        return self.back.untyped_storage()

    def drop_back(self) -> None:
        """Backward is over: what it was for is done."""
        self._finish(self.arrived)
        self.back = self.arrived = None

    def __del__(self) -> None:
        if self.source is not None:
            self._finish(self.sent)
        self._finish(self.arrived)
        self._pool.give(self.buffer)

    @staticmethod
    def _finish(copy: Event | None) -> None:
        """Before memory of the device that a copy reads or writes can be used for something else."""
        if copy is None or copy.is_over():
            return
        if torch._C._current_graph_task_id() != -1:  # in backward, on its stream
            copy.wait()
        else:
            copy.synchronize()


class _Visit:
    """One call of a block: what it has in host memory, and the one before it."""

    def __init__(self, before: _Visit | None) -> None:
        self.before = None if before is None else weakref.ref(before)
        self.entries: list[weakref.ref[_Entry]] = []
        self.is_asked = False

    def living(self) -> list[_Entry]:
        return [entry for entry in (ref() for ref in self.entries) if entry is not None]


class _Handle(NamedTuple):
    """What autograd keeps of a saved tensor."""

    entry: _Entry
    visit: _Visit
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Offloader:
    """Sends what autograd saves to host memory and brings it back.

    Args:
        device: Where it comes from.
        memory: Of the host.
        saved: Packs what lies in managed storage, and what stays where it is.
        moved: Counts.
        rank_bytes: What this rank has in host memory now.
    """

    def __init__(
        self,
        device: Device,
        memory: HostMemory,
        saved: SavedTensors,
        moved: TransferBytes,
        rank_bytes: Callable[[], int],
    ) -> None:
        self._device = device
        self._saved = saved
        self._moved = moved
        self.pool = HostPool(memory, rank_bytes)
        self._out, self._in = device.new_lane(), device.new_lane()
        self._known: dict[int, weakref.WeakSet[_Entry]] = {}  # by address
        self._brought: weakref.WeakSet[_Entry] = weakref.WeakSet()
        self._asked: weakref.WeakSet[_Visit] = weakref.WeakSet()
        self._last: _Visit | None = None
        self._staying: Collection[int] = ()  # addresses of what stays on the device anyway

    # Forward

    def begin_forward(self, staying: Collection[int]) -> None:
        """A forward begins, of the model or of a block alone.

        Args:
            staying: Addresses of storages that stay on the device anyway.
        """
        self._staying = staying
        self._known = {key: entries for key, entries in self._known.items() if entries}

    def run(self, call: Callable[[], Any]) -> Any:
        """Run a block; what autograd saves in it goes to host memory."""
        visit = _Visit(self._last)
        hooks = _Hooks(self, self._saved, visit)
        with ThreadHooks(hooks.pack, hooks.unpack):
            result = call()
        if visit.entries:
            if self._last is not None:
                self._settle(self._last)
            self._last = visit
        return result

    @staticmethod
    def _settle(visit: _Visit) -> None:
        with deferred():
            for entry in visit.living():
                entry.settle()

    def pack(self, tensor: Tensor, visit: _Visit) -> Any:
        """A handle of a tensor that goes to host memory; None for what stays. Without torch functions."""
        if not self._can_go(tensor):
            return None
        key = tensor.untyped_storage()._cdata
        known = self._known.setdefault(key, weakref.WeakSet())
        entry = next((one for one in known if one.has(tensor)), None)
        if entry is None:
            with deferred(), torch.no_grad(), beside_dispatch_modes():
                entry = self._send(tensor)
            if entry is None:
                return None
            known.add(entry)
        if all(ref() is not entry for ref in visit.entries):
            visit.entries.append(weakref.ref(entry))
        return _Handle(entry, visit, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _can_go(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_inference():
            return False
        if tensor.device != self._device.torch_device or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return False
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # such as functorch's wrappers
            return False
        return storage.nbytes() >= LEAST_OFFLOADED_BYTES and storage._cdata not in self._staying

    def _send(self, tensor: Tensor) -> _Entry | None:
        nbytes = tensor.untyped_storage().nbytes()
        buffer = self.pool.take(nbytes)
        if buffer is None:
            self._moved.activations_left += nbytes
            return None
        entry = _Entry(tensor, buffer, self.pool)
        source = _over(tensor.untyped_storage(), torch.uint8, (nbytes,), (1,), 0)
        with self._out.issue():
            if buffer.busy is not None:
                buffer.busy.wait()
            buffer.host[:nbytes].copy_(source, non_blocking=True)
            entry.sent = buffer.busy = self._out.record()
        self._moved.activations_out += nbytes
        return entry

    # Backward

    def unpack(self, handle: _Handle) -> Tensor:
        """The tensor again, on the device."""
        visit, entry = handle.visit, handle.entry
        with deferred(), torch.no_grad(), beside_dispatch_modes():
            if not visit.is_asked:
                visit.is_asked = True
                self._asked.add(visit)
                for one in visit.living():
                    self._bring(one)
                before = None if visit.before is None else visit.before()
                if before is not None:
                    self._bring_ahead(before)
            self._bring(entry)
            return _over(entry.storage(), handle.dtype, handle.size, handle.stride, handle.offset)

    def _bring_ahead(self, visit: _Visit) -> None:
        try:
            for entry in visit.living():
                self._bring(entry)
        except torch.OutOfMemoryError:
            return  # it comes when it is needed, and there is more room

    def _bring(self, entry: _Entry) -> None:
        if entry.is_on_device or entry.is_overwritten:
            return
        back = torch.empty(entry.nbytes, dtype=torch.uint8, device=self._device.torch_device)
        with self._in.issue():
            if entry.sent is not None:
                entry.sent.wait()
            back.copy_(entry.buffer.host[: entry.nbytes], non_blocking=True)
            entry.arrived = entry.buffer.busy = self._in.record()
        entry.back = back
        self._brought.add(entry)
        self._moved.activations_in += entry.nbytes

    def end_backward(self) -> None:
        """A backward is over: what is kept for another one is in host memory again."""
        for entry in list(self._brought):
            entry.drop_back()
        self._brought.clear()
        for visit in list(self._asked):
            visit.is_asked = False
        self._asked.clear()
        if self._last is not None:
            self._settle(self._last)
        self._last = None

    def held_bytes(self) -> dict[str, int]:
        """Host memory of all buffers, by kind as in `Engine.held_bytes`."""
        return {"cpu_activations": self.pool.held_bytes} if self.pool.held_bytes else {}


class _Hooks(SavedBeside):
    """Those of one visit."""

    def __init__(self, offloader: Offloader, outer: SavedTensors, visit: _Visit) -> None:
        super().__init__(outer)
        self._offloader = offloader
        self._visit = visit

    def pack(self, tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            packed = self.outer.packed(tensor)
            if packed is None:
                packed = self._offloader.pack(tensor, self._visit)
            return self.outer.kept(tensor) if packed is None else packed

    def unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Handle):
            return self.outer.unpack(packed)
        with torch._C.DisableTorchFunctionSubclass():
            return self._offloader.unpack(packed)


def _over(storage: torch.UntypedStorage, dtype: torch.dtype, size: Any, stride: tuple[int, ...], offset: int) -> Tensor:
    """A tensor over a storage."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
