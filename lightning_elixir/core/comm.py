"""Collectives between the ranks of one process group. The only file of the runtime that calls them.

[Note: who waits for whom] Three groups over the same ranks. *data*: all-gathers of shards, issued only at points where
all ranks have agreed on them. *reduce*: reduce-scatters of gradients, issued in the plan's order, never waited for by
the host before the end of backward. *control*: small messages between hosts (gloo). A host may block on control and, on
gloo, on data, and everyone is then at the same point; nobody ever blocks on a reduction while a peer may want data.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Make the current stream (CUDA) or the host (gloo) wait for the result."""


class PeerLostError(RuntimeError):
    """A collective failed because another rank is gone or did not come in time."""


class Comm(Protocol):
    """What the runtime needs from its process group."""

    rank: int
    world_size: int

    def connect(self, nbytes: int) -> None:
        """Make the connections that messages up to this size need."""

    def all_gather(self, flat: Tensor) -> None:
        """In place: rank r's slice `flat[r * n : (r + 1) * n]` goes to all. 1-D, numel a multiple of the world size."""

    def reduce_scatter_mean(self, shard: Tensor, flat: Tensor) -> Work | None:
        """`shard` receives this rank's slice of the mean of `flat` over the ranks."""

    def scatter_from_first(self, shard: Tensor, flat: Tensor | None) -> None:
        """`shard` receives this rank's slice of rank 0's `flat` (None elsewhere)."""

    def broadcast_from_first(self, tensor: Tensor) -> None: ...

    def all_reduce_max(self, tensor: Tensor) -> None: ...

    def all_reduce_sum(self, tensor: Tensor) -> None: ...

    def gather_host(self, shard: Tensor, on_all_ranks: bool) -> list[Tensor] | None:
        """Host tensors of one size and dtype from all ranks, in rank order; None except on rank 0 unless asked for."""

    def exchange(self, message: Sequence[int]) -> list[list[int]]:
        """Every rank's small integers, in rank order."""

    def exchange_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order. Not for the hot path."""

    def apart(self) -> Comm:
        """The same ranks, for messages (`exchange_objects`) of another thread. Collective."""

    def close(self) -> None: ...


class SoloComm:
    """One rank: everything is already where it should be."""

    rank = 0
    world_size = 1

    def connect(self, nbytes: int) -> None:
        return

    def all_gather(self, flat: Tensor) -> None:
        return

    def reduce_scatter_mean(self, shard: Tensor, flat: Tensor) -> Work | None:
        shard.copy_(flat)
        return None

    def scatter_from_first(self, shard: Tensor, flat: Tensor | None) -> None:
        if flat is not None:
            shard.copy_(flat)

    def broadcast_from_first(self, tensor: Tensor) -> None:
        return

    def all_reduce_max(self, tensor: Tensor) -> None:
        return

    def all_reduce_sum(self, tensor: Tensor) -> None:
        return

    def gather_host(self, shard: Tensor, on_all_ranks: bool) -> list[Tensor] | None:
        return [shard]

    def exchange(self, message: Sequence[int]) -> list[list[int]]:
        return [list(message)]

    def exchange_objects(self, value: Any) -> list[Any]:
        return [value]

    def apart(self) -> Comm:
        return self

    def close(self) -> None:
        return


# Integers that one control message carries in its first round; a longer one takes a second round.
_MESSAGE_NUMEL = 64

# torch 2.13 renamed it and deprecates the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _MeanOfSlices:
    """Reduce-scatter as an exchange of slices and a local sum: the same bytes on the wire, but each element is summed
    in rank order wherever it lies in the chunk (a ring starts at another rank for every slice), and 16-bit gradients
    are summed in fp32. So the numbers do not depend on the chunk layout."""

    def __init__(self, work: Work, received: Tensor, shard: Tensor) -> None:
        self._work = work
        self._received = received  # [world_size, shard numel]
        self._shard = shard

    def wait(self) -> object:
        self._work.wait()
        rows = self._received.unbind(0)
        total = rows[0].to(torch.promote_types(torch.float32, self._shard.dtype), copy=True)
        for row in rows[1:]:
            total.add_(row)
        self._shard.copy_(total.div_(len(rows)))
        return None


class GroupComm:
    """The ranks of a torch process group.

    Args:
        group: The data group. Every rank of it must construct its `GroupComm` at the same point.
        device: Where collectives of the data and reduce groups take their tensors.
        timeout: How long control messages wait for the slowest rank; None: torch's default of the backend.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None = None) -> None:
        self._data = group
        self._device = device
        self._timeout = timeout
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group)
        self._first = ranks[0]
        backend = dist.get_backend(group)
        self._reduce = _new_group(ranks, timeout, backend)
        self._control = _new_group(ranks, timeout, "gloo")

    def connect(self, nbytes: int) -> None:
        # NCCL connects peers at the first message of a kind and size, and blocks the host until both are there: in
        # backward one rank would wait there for a peer that waits for it at the end (seen with two GPUs).
        if dist.get_backend(self._data) == "gloo":
            return
        sent = torch.zeros(-(-nbytes // self.world_size) * self.world_size, dtype=torch.uint8, device=self._device)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._reduce)
        _all_gather(received, sent[: sent.numel() // self.world_size], group=self._data)
        received[0].item()  # wait for both

    def all_gather(self, flat: Tensor) -> None:
        numel = flat.numel() // self.world_size
        mine = flat[self.rank * numel : (self.rank + 1) * numel]
        _all_gather(flat, mine, group=self._data)

    def reduce_scatter_mean(self, shard: Tensor, flat: Tensor) -> Work | None:
        received = torch.empty_like(flat)
        work = cast(Work, dist.all_to_all_single(received, flat, group=self._reduce, async_op=True))
        return _MeanOfSlices(work, received.view(self.world_size, -1), shard)

    def scatter_from_first(self, shard: Tensor, flat: Tensor | None) -> None:
        pieces = None if flat is None else list(flat.view(self.world_size, -1).unbind(0))
        dist.scatter(shard, pieces, src=self._first, group=self._data)

    def broadcast_from_first(self, tensor: Tensor) -> None:
        """`tensor` may live on the host or on the device."""
        staged = tensor.to(self._device)
        dist.broadcast(staged, src=self._first, group=self._data)
        if staged.data_ptr() != tensor.data_ptr():
            tensor.copy_(staged)

    def all_reduce_max(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control)

    def all_reduce_sum(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._control)

    def gather_host(self, shard: Tensor, on_all_ranks: bool) -> list[Tensor] | None:
        pieces = [torch.empty_like(shard) for _ in range(self.world_size)] if self.rank == 0 or on_all_ranks else None
        if on_all_ranks and pieces is not None:
            dist.all_gather(pieces, shard.contiguous(), group=self._control)
        else:
            dist.gather(shard.contiguous(), pieces, dst=self._first, group=self._control)
        return pieces

    def exchange(self, message: Sequence[int]) -> list[list[int]]:
        try:
            return self._exchange(list(message))
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self.rank} lost contact with its peers (one has failed, ended, or did not come in time): "
                f"{error}"
            ) from error

    def _exchange(self, message: list[int]) -> list[list[int]]:
        rows = self._gather_rows([len(message), *message[: _MESSAGE_NUMEL - 1]], _MESSAGE_NUMEL)
        longest = max(row[0] for row in rows)
        if longest >= _MESSAGE_NUMEL:
            rows = self._gather_rows([len(message), *message], longest + 1)
        return [row[1 : 1 + row[0]] for row in rows]

    def _gather_rows(self, values: list[int], numel: int) -> list[list[int]]:
        mine = torch.zeros(numel, dtype=torch.int64)
        mine[: len(values)] = torch.tensor(values, dtype=torch.int64)
        rows = torch.empty(self.world_size * numel, dtype=torch.int64)
        _all_gather(rows, mine, group=self._control)
        gathered: list[list[int]] = rows.view(self.world_size, numel).tolist()
        return gathered

    def exchange_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def apart(self) -> Comm:
        other = copy.copy(self)  # shares the groups that nobody uses through it
        other._control = _new_group(dist.get_process_group_ranks(self._data), self._timeout, "gloo")
        return other

    def close(self) -> None:
        # Groups of some of the ranks stay until the end of the process: see `_new_group`.
        if dist.is_initialized() and dist.get_world_size() == self.world_size:
            for group in (self._reduce, self._control):
                dist.destroy_process_group(group)


def _new_group(ranks: list[int], timeout: timedelta | None, backend: str) -> dist.ProcessGroup:
    # torch numbers groups that all ranks make. Those of some it names after the groups that there are: made again after
    # it was destroyed, one would get its old name, and find the addresses of the old one in the store.
    is_partial = len(ranks) < dist.get_world_size()
    group = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=is_partial)
    return cast(dist.ProcessGroup, group)  # torch annotates what ranks outside the group get as well


def make_comm(group: dist.ProcessGroup | None, device: torch.device) -> Comm:
    """The ranks of `group`, None: the default group; a `SoloComm` without torch.distributed, or for one rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return SoloComm()
    group = group if group is not None else dist.group.WORLD
    if group is None or dist.get_world_size(group) == 1:
        return SoloComm()
    return GroupComm(group, device, _timeout_of(group, device))


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """How long the group's collectives wait for the slowest rank; None where torch does not tell."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None
