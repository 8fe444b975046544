"""A chunk's replica: one flat tensor, of which its parameters are views.

[Note: storage identity] `flat` and its storage object live as long as the chunk, and each parameter is a view of it,
always the same one: releasing resizes the storage to zero bytes, fetching resizes it back and refills it. Views that
autograd saved and references that users hold therefore stay valid, and since `p` keeps its own version counter, the
engine's writes through `flat` are invisible to autograd. While the chunk is released the parameters are taken off the
storage (Note: released parameters, `runtime/unreadable.py`), so that nothing reads what is not there.

A chunk may go only while nothing but its parameters and the engine shares its storage, which the storage's use count
tells (`storage_use_count`): views, detached tensors, what checkpointing has recomputed and what users keep hold it.
Between two steps replicas are refilled with equal values only, so a chunk may leave after forward and come back for
backward at any time. Gradients go to blocks of their own: nothing is written over a replica that a backward can read.
"""

from __future__ import annotations

import bisect
import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from lightning_elixir.core.device import Device, Event
from lightning_elixir.core.labels import label
from lightning_elixir.core.storages import storage_use_count
from lightning_elixir.errors import StateError
from lightning_elixir.plan.types import ChunkSpec, Member
from lightning_elixir.runtime.unreadable import set_data, stand_in


class ChunkState(enum.Enum):
    """Whether the replica has bytes, and what may be done with them."""

    __hash__ = object.__hash__  # an enum's own is written in Python

    RELEASED = "released"
    """The storage has no bytes (or, while something still aliases it, outdated ones)."""
    FETCHING = "fetching"
    """Storage is there; a transfer fills it. Only the engine may write."""
    RESIDENT = "resident"
    """The values are there, and the compute stream has been told to wait for them."""
    STALE = "stale"
    """A persistent replica whose own shard was updated; the peers' slices are outdated until it is gathered again."""


_LEGAL = {
    (ChunkState.RELEASED, ChunkState.FETCHING),
    (ChunkState.FETCHING, ChunkState.RESIDENT),
    (ChunkState.FETCHING, ChunkState.RELEASED),
    (ChunkState.RESIDENT, ChunkState.RELEASED),
    (ChunkState.RESIDENT, ChunkState.STALE),
    (ChunkState.STALE, ChunkState.FETCHING),
    (ChunkState.STALE, ChunkState.RESIDENT),
    (ChunkState.STALE, ChunkState.RELEASED),
}


class Chunk:
    """The replica of one chunk on the compute device.

    Args:
        spec: What the plan says about the chunk.
        dtype: Compute dtype, as `spec.dtype` names it.
        device: Where the replica lives.
        storage_bytes: What to allocate when resident: at least the replica; equal for all regular chunks, so that
            the device's pool reuses blocks exactly.
        like: The parameters that will be bound, or others of their dtypes and strides, in the order of `spec.members`.
    """

    def __init__(
        self, spec: ChunkSpec, dtype: torch.dtype, device: Device, storage_bytes: int, like: Sequence[Tensor]
    ) -> None:
        self.spec = spec
        self.id = spec.id
        self.dtype = dtype
        self.flat = torch.empty(0, dtype=dtype, device=device.torch_device)  # 1D, compute dtype, [spec.numel]
        self.parameters: list[nn.Parameter] = []  # bound, in the order of spec.members
        self.strides = [kept_stride(tuple(p.shape), tuple(p.stride())) for p in like]  # None: contiguous
        # Both looked at for every gradient and every saved tensor.
        self.places = [_place(m, stride) for m, stride in zip(spec.members, self.strides, strict=True)]
        """Shape, strides and offset of each member."""
        self._offsets = [m.offset for m in spec.members]
        self.index_at = {m.offset: index for index, m in enumerate(spec.members)}
        """Indices of members by where they begin."""
        self.original_dtypes = [p.dtype for p in like]
        self.state = ChunkState.RELEASED
        self.ready: Event | None = None  # end of the transfer that fills the storage, until it is waited for
        self._device = device
        self._is_on_host = device.torch_device.type == "cpu"  # storages elsewhere count as shared always
        self.storage_bytes = storage_bytes
        self._storage = self.flat.untyped_storage()
        # Never read. `torch.utils.swap_tensors` refuses tensors with weak references; without these it would put others
        # in the parameters' place, unnoticed.
        self._references: list[weakref.ref[nn.Parameter]] = []
        self._stand_ins: list[Tensor] = []  # what takes their place while the chunk is released
        self.is_bound = False  # whether the parameters are the views
        self._unaliased_count = 0  # of the storage, beside the parameters
        self._replaced: set[int] = set()  # members that the user has given other memory while they were bound
        # Torch makes tensors over a storage that is large enough only; they keep their sizes when it is emptied.
        self._storage.resize_(spec.nbytes)
        self.flat.set_(self._storage, 0, (spec.numel,), (1,))
        self._views = [self.view_of(self.flat, index) for index in range(len(spec.members))]
        self._storage.resize_(0)

    @property
    def storage_key(self) -> int:
        """Identity of the storage, the same for every tensor over it."""
        key: int = self._storage._cdata
        return key

    @property
    def device_bytes(self) -> int:
        return self._storage.nbytes()

    @property
    def is_usable(self) -> bool:
        return self.state is ChunkState.RESIDENT

    def bind(self, parameters: Sequence[nn.Parameter], bring: Callable[[Chunk], AbstractContextManager[None]]) -> None:
        """Make the parameters views of the flat tensor, whenever the chunk is there. Call once, with one parameter for
        each of `spec.members`; what shares the storage from then on is an alias.

        Args:
            bring: As in `watch_reads`, for a chunk that is not there: other threads may read at any moment.
        """
        self.parameters = list(parameters)
        self._references = [weakref.ref(parameter) for parameter in parameters]
        if self.state is ChunkState.RELEASED:
            self.watch_reads(bring)
        else:
            set_data(self.parameters, self._views)
            self.is_bound = True
        self._unaliased_count = storage_use_count(self._storage) - (len(self.parameters) if self.is_bound else 0)

    def hide(self, index: int, parameter: nn.Parameter, bring: Callable[[Chunk], AbstractContextManager[None]]) -> None:
        """Have a parameter that is to be bound as member `index`, and has no values yet, come to `bring` when it is
        read."""
        set_data([parameter], [self._stand_in(index, bring)])

    def _stand_in(self, index: int, bring: Callable[[Chunk], AbstractContextManager[None]]) -> Tensor:
        return stand_in(self._views[index], self.spec.members[index].fqn, self, bring)

    def watch_reads(self, bring: Callable[[Chunk], AbstractContextManager[None]]) -> None:
        """From here on, released parameters that are read bring the chunk.

        Args:
            bring: Bound method, called with the chunk: inside the context that it returns the values are there.
        """
        self._stand_ins = [self._stand_in(index, bring) for index in range(len(self._views))]
        if self.state is ChunkState.RELEASED:
            if self.is_bound:
                self._note_replaced()
            set_data(self.parameters, self._stand_ins)
            self.is_bound = False

    def is_aliased(self) -> bool:
        """Whether anything but the bound parameters and the engine shares the storage: views, saved tensors, users.

        A storage that was once seen by numpy, or shared with other processes, counts for good: see `_can_go`.
        """
        own = self._unaliased_count + (len(self.parameters) if self.is_bound else 0)
        return storage_use_count(self._storage) > own or not self._can_go

    @property
    def _can_go(self) -> bool:
        """Whether the storage may be emptied. Torch refuses that once numpy has seen it; one in shared memory
        (`share_memory_()`) it empties, and then crashes where it is to be filled again."""
        return self._storage.resizable() and not (self._is_on_host and self._storage.is_shared())

    def take_replaced(self) -> list[int]:
        """Members that were given other memory since this was last asked (`p.data = x` and `module.half()`, where
        parameters are not intercepted), by index. They are views of the chunk again."""
        if self.is_bound and self._note_replaced():
            set_data(self.parameters, self._views)
        taken = sorted(self._replaced)
        self._replaced.clear()
        return taken

    def _note_replaced(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            start, itemsize = self.flat.data_ptr(), self.dtype.itemsize
            found: list[int] = []
            if [*map(Tensor.data_ptr, self.parameters)] != [start + offset * itemsize for offset in self._offsets]:
                # Not by the list: what has no elements has no address.
                pairs = zip(self.parameters, self._views, strict=True)
                found = [index for index, (p, view) in enumerate(pairs) if p.data_ptr() != view.data_ptr()]
        self._replaced.update(found)
        return bool(found)

    def member_at(self, offset: int) -> int:
        """The index of the member that holds an element of the flat tensor."""
        return (bisect.bisect_right(self._offsets, offset) or 1) - 1

    def note_written(self, indices: Iterable[int]) -> None:
        """Members have new values: as an in-place write does, this makes backward refuse what was saved before."""
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version([self.parameters[index] for index in indices])

    def slice_of(self, flat: Tensor, index: int) -> Tensor:
        """Member `index`'s elements in a flat tensor of this chunk's layout, 1-D, in memory order."""
        member = self.spec.members[index]
        return flat[member.offset : member.offset + member.numel]

    def view_of(self, flat: Tensor, index: int) -> Tensor:
        """Member `index` in a flat tensor of this chunk's layout, in the parameter's shape and memory order."""
        shape, stride, offset = self.places[index]
        return flat.as_strided(shape, stride, flat.storage_offset() + offset)

    def allocate(self) -> None:
        """Give the storage its bytes (on the compute stream). Without memory for them the chunk stays released."""
        if self._storage.nbytes() == 0:
            self._device.allocate(self._storage, self.storage_bytes)
        self.to_state(ChunkState.FETCHING)

    def wait_ready(self) -> None:
        """Make the compute stream wait until the values are there; the parameters can be read then, not before."""
        if self.ready is not None:
            self._wait()
        if not self.is_bound and self.state is ChunkState.RESIDENT:
            set_data(self.parameters, self._views)
            self.is_bound = True

    def _wait(self) -> None:
        if self.ready is not None:
            with label("wait for chunk", self.id):
                self.ready.wait()
            self.ready = None

    def forget_fetch(self) -> None:
        """A fetch has failed. Whether anything still fills the storage is not known: its bytes stay until the chunk is
        released the next time."""
        if self.state is ChunkState.FETCHING:
            self.to_state(ChunkState.RELEASED)

    def release(self) -> None:
        """Take the bytes away, unless something still aliases them."""
        self._wait()
        self.to_state(ChunkState.RELEASED)  # before the look at aliases: no new one can be made after it
        self.free_released()

    def free_released(self) -> None:
        """Take away the bytes that a released chunk has kept, if what aliased them is gone."""
        if self.state is ChunkState.RELEASED and not self.is_aliased():
            self._device.free(self._storage)

    def close(self) -> None:
        """Give the bytes back for good; where something still aliases them, they go with the last of that."""
        self._unbind()
        if not self.is_aliased():
            self._device.free(self._storage)
            return
        self._views.clear()
        self.flat = self.flat.new_empty(0)
        self._storage = self.flat.untyped_storage()

    def to_state(self, state: ChunkState) -> None:
        """Change state along the table of legal changes.

        Raises:
            StateError: On any other change; it names the chunk, its parameters and both states.
        """
        if (self.state, state) not in _LEGAL:
            raise StateError(f"{self.spec}: illegal change {self.state.value} -> {state.value}")
        if state is ChunkState.RELEASED:
            self._unbind()
        self.state = state

    def _unbind(self) -> None:
        if self.is_bound and self._stand_ins:
            self._note_replaced()
            set_data(self.parameters, self._stand_ins)
            self.is_bound = False


def _place(member: Member, stride: tuple[int, ...] | None) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides and offset of a member in a flat tensor.

    Args:
        stride: None: contiguous.
    """
    shape = tuple(member.shape)
    return shape, torch.empty(shape, device="meta").stride() if stride is None else stride, member.offset


def kept_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """The stride to keep for a parameter without gaps in another memory order than the usual; None: contiguous."""
    expected, sizes = 1, sorted((s, n) for s, n in zip(stride, shape, strict=True) if n != 1)
    for step, size in sizes:
        if step != expected:
            return None
        expected *= size
    contiguous = torch.empty(shape, device="meta").stride()
    return None if tuple(contiguous) == stride else stride
