"""Collectives between the ranks of one process group. The only file of the runtime that calls them.

[Note: three groups] They have the same ranks. *data*: all-gathers of shards, issued only at points where all ranks have
agreed on them. *reduce*: reduce-scatters of gradients, issued in the plan's order, never waited for by the host before
the end of backward. *control*: small messages between hosts (gloo; integers between ranks of one host go by
memory that these share: [Note: messages of one host]). A host may block on control and, on gloo, on data,
and all ranks are then at the same point; no host ever blocks on a reduction while a peer may need data.

[Note: in step] Whatever ranks tell each other over the control group begins with the call that it belongs to, so that
ranks which are in different calls learn it at once, each which. Where hosts wait, they do so in slices, between which
signals are handled and what `core.waits` has found out is raised. A rank that gives up waiting (Ctrl-C) leaves.

[Note: a rank that fails alone] A rank that cannot go on while others may wait for it calls `leave`, which tells them
and closes this rank's groups. Every collective that fails raises a `PeerLostError`, which names the ranks that caused
it, and leaves likewise: see [Note: lost ranks]. When every rank has left, groups are made anew at the next collective,
so processes that live on (a notebook) may train again.

Every message over the control group begins with a code of its call, which costs nothing: so `strategy.barrier()` is not
taken for a broadcast. Lightning's reductions meet in such a message and then reduce, in place of a barrier of the
device. A signal that came inside `deferred` waits 3 s for the other ranks, and is then handled there. The message of a
rank that leaves is still under way: its group stays open for that (`_leave_open`), and the others hear by the store.

Told are a disk that fails (`Engine.telling`), an engine that gives up, and every exception that passes through
Lightning (`on_exception`). What a caller may get over (memory that ran out, an exception of the user's own loop) is
not: the others wait until that rank comes again, or its process ends. With gloo the data group is one of ours, so that
it can be closed beside the user's default group, and Lightning's reductions go over it. With NCCL communicators are
aborted: kernels end that wait for a peer, and what the device has computed then goes nowhere, since the next message
raises. Groups over some of the ranks cannot be made again after a rank has left: torch would give them their old names.

Ranks that share only some of the chunks, or that cut operators between them, get comms of their own (`part`), made of
the same parts. All of them leave together: a rank that waits in one of them for a peer would not hear what that peer
was told in another. They cannot be made again then, so what was built over them has to be built anew.

A reduce-scatter is an exchange of slices and a local sum in rank order, in fp32 for 16-bit gradients: a ring starts at
another rank for every slice, so its sums would depend on where in a chunk an element lies (seen with three gloo ranks:
other bits for other chunk sizes).
"""

from __future__ import annotations

import copy
import ctypes
import pickle
import threading
import time
import traceback
import uuid
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_elixir.core.labels import label
from lightning_elixir.core.peers import Process, Roster, Watch
from lightning_elixir.core.shared_messages import SharedMessages, open_shared_messages
from lightning_elixir.core.storages import storage_use_count
from lightning_elixir.core.waits import (
    MORE_BATCHES,
    SETUP,
    SETUP_OBJECTS,
    Call,
    CollectiveFailed,
    Place,
    Position,
    Wait,
    differing,
    line_of_process,
    position_of,
)
from lightning_elixir.errors import DivergenceError, ElixirError, PeerLostError, StateError


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Make the current stream (CUDA) or the host (gloo) wait for the result."""


class Comm(Protocol):
    """What the runtime needs from its process group."""

    rank: int
    world_size: int

    def connect(self, nbytes: int) -> None:
        """Make the connections that messages up to this size need."""

    def all_gather(self, flat: Tensor) -> None:
        """In place: rank r's slice `flat[r * n : (r + 1) * n]` goes to all. 1-D, numel a multiple of the world size.
        Where the host has waited for it, nothing of the message shares the memory of `flat` any more."""

    def reduce_scatter_mean(self, shard: Tensor, flat: Tensor) -> Work | None:
        """`shard` receives this rank's slice of the mean of `flat` over the ranks."""

    def mean_over_ranks(self, flat: Tensor) -> None:
        """In place, summed in rank order: the same bits on every rank. 1-D, numel a multiple of the world size. With
        gloo the host waits, else the current stream."""

    def all_to_all(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rank r gets `sent[r]` elements of `flat` from here, in order; returned are the `received[r]` elements of each
        rank, in order. 1-D, on the data group's device."""

    def scatter_from_first(self, shard: Tensor, flat: Tensor | None) -> None:
        """`shard` receives this rank's slice of rank 0's `flat` (None elsewhere)."""

    def broadcast_from_first(self, tensor: Tensor) -> None: ...

    def all_reduce_max(self, tensor: Tensor) -> None: ...

    def all_reduce_sum(self, tensor: Tensor) -> None: ...

    def gather_host(self, shard: Tensor, on_all_ranks: bool) -> list[Tensor] | None:
        """Host tensors of one size and dtype from all ranks, in rank order; None except on rank 0 unless asked for."""

    def exchange(self, message: Sequence[int], call: Call = SETUP) -> list[list[int]]:
        """Every rank's small integers, in rank order.

        Raises:
            DivergenceError: Another rank is in a call of another family; on every rank.
        """

    def exchange_objects(self, value: Any, call: Call = SETUP_OBJECTS) -> list[Any]:
        """Every rank's picklable value, in rank order. Not for the hot path. Raises as `exchange` does."""

    def all_reduce(self, tensor: Tensor, op: Any, call: Call) -> Tensor:
        """In place, over the data group. Raises as `exchange` does.

        Args:
            op: Of torch, or its name; "mean" or "avg": the mean, of whatever dtype.
        """

    def diverged(self, call: Call) -> DivergenceError:
        """The error of ranks that have come here each from another call, as they have found out. Collective."""

    def apart(self) -> Comm:
        """The same ranks, for messages (`exchange_objects`) of another thread. Collective."""

    def part(self, groups: Sequence[Sequence[int]], *, has_reductions: bool) -> Comm:
        """Those of the ranks that are in one group with this one; it leaves when this does, and the other way round.
        Collective.

        Args:
            groups: The same on every rank; all of one size, and each rank in one of them.
            has_reductions: Whether gradients will be reduced over it, which takes a group, and memory of the device.
        """

    def sum_over_ranks(self, tensor: Tensor) -> None:
        """In place, over the data group; the same bits on every rank."""

    def exchange_rows(
        self, received: Tensor, sent: Tensor, num_received: Sequence[int], num_sent: Sequence[int]
    ) -> None:
        """Rows (of the first dimension) of contiguous tensors go from each rank to each, over the data group.

        Args:
            num_received: How many rows come from each rank; `received` has room for all of them, in rank order.
            num_sent: How many of `sent` go to each rank, in rank order.
        """

    def run(self, issue: Callable[[Any], Any]) -> Any:
        """Have another issue a collective over the data group, for a pattern; all ranks have come there.

        Args:
            issue: Gets the group, and gives torch's handle of the collective, which this returns. With gloo it is over
                then.
        """

    def lent(self, call: Call) -> AbstractContextManager[dist.ProcessGroup | None]:
        """When all ranks have come here, a group of them for collectives that others (Lightning) issue inside; None:
        the default one, if there is any. Raises as `exchange` does."""

    def leave(self, error: BaseException) -> None:
        """This rank cannot go on, and others may wait for it: have them raise a `PeerLostError` with this error, or, if
        that is one itself, with what it says of others."""

    def have_all_stumbled(self) -> bool:
        """Whether every rank comes here, each with an error under way that it has not left for; waits some seconds for
        the others. What they are in the middle of is not disturbed."""

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

    def mean_over_ranks(self, flat: Tensor) -> None:
        return

    def all_to_all(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return flat

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

    def exchange(self, message: Sequence[int], call: Call = SETUP) -> list[list[int]]:
        return [list(message)]

    def exchange_objects(self, value: Any, call: Call = SETUP_OBJECTS) -> list[Any]:
        return [value]

    def all_reduce(self, tensor: Tensor, op: Any, call: Call) -> Tensor:
        return tensor

    def diverged(self, call: Call) -> DivergenceError:
        return DivergenceError(f"one rank cannot be in different calls ({call.words})")

    def apart(self) -> Comm:
        return self

    def part(self, groups: Sequence[Sequence[int]], *, has_reductions: bool) -> Comm:
        return self

    def sum_over_ranks(self, tensor: Tensor) -> None:
        return

    def exchange_rows(
        self, received: Tensor, sent: Tensor, num_received: Sequence[int], num_sent: Sequence[int]
    ) -> None:
        received.copy_(sent)

    def run(self, issue: Callable[[Any], Any]) -> Any:
        raise StateError("one rank has no process group")

    def lent(self, call: Call) -> AbstractContextManager[dist.ProcessGroup | None]:
        return nullcontext()

    def leave(self, error: BaseException) -> None:
        return

    def have_all_stumbled(self) -> bool:
        return True

    def close(self) -> None:
        return


# Integers that one control message carries in its first round, with the call and its length; a longer one takes a
# second round.
_MESSAGE_NUMEL = 64
_HEADER_NUMEL = 2

_OF_PATTERN = Call("an exchange of a parallel pattern", is_routine=True, is_of_batch=True)

# How long a host waits for others before it looks around.
_SLICE = timedelta(seconds=0.25)

# torch 2.13 renamed it and deprecates the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# How long gloo may take to let go of a message that has come. After that the chunk counts as one that the user holds a
# tensor of, and stays longer than on other ranks.
_LONGEST_LETTING_GO_S = 1.0

# How long a rank that leaves waits for reductions that it has issued.
_LONGEST_END_S = 2.0

# Groups with a message under way that must not be waited for, and that message: see `_leave_open`.
_LEFT_OPEN: list[tuple[dist.ProcessGroup, dist.Work]] = []


def _wait_until_let_go(storage: torch.UntypedStorage, num_uses: int) -> None:
    """Wait until a collective that is over has let go of its tensors: gloo's thread does so a little later, on a loaded
    machine much later. A replica that shares its storage counts as one that the user holds a tensor of, and stays; by
    chance that would be so on one rank and not on another.

    Args:
        storage: What was gathered into.
        num_uses: Those before the collective.
    """
    end_s = time.monotonic() + _LONGEST_LETTING_GO_S
    while storage_use_count(storage) > num_uses and time.monotonic() < end_s:
        time.sleep(0)


Mean = Callable[[Tensor, Tensor], None]
"""Gets rows and what becomes their mean, as `mean_of_rows` does, which has the numbers that it has to give."""


def mean_of_rows(rows: Tensor, mean: Tensor) -> None:
    """Write the mean of rows, which are added up from the first on, 16-bit ones in fp32.

    Args:
        rows: `[n, numel]`, floating.
        mean: `[numel]`, of any floating dtype.
    """
    first, *others = rows.unbind(0)
    total = first.to(torch.promote_types(torch.float32, mean.dtype), copy=True)
    for row in others:
        total.add_(row)
    mean.copy_(total.div_(len(rows)))


class _MeanOfSlices:
    """Reduce-scatter as an exchange of slices and a local sum: the same bytes on the wire, but each element is summed
    in rank order wherever it lies in the chunk (a ring starts at another rank for every slice), and 16-bit gradients
    are summed in fp32. So the numbers do not depend on the chunk layout."""

    def __init__(self, comm: GroupComm, work: dist.Work, received: Tensor, shard: Tensor, number: int) -> None:
        self._comm = comm
        self._number = number  # among the collectives
        self.work: dist.Work | None = work  # as long as there is one, its connections are
        self._received = received  # [world_size, shard numel]
        self._shard = shard

    def is_over(self) -> bool:
        work = self.work  # which another thread may take away
        return work is None or work.is_completed()

    def wait(self) -> object:
        work = self.work
        if work is None:  # given up with its groups: new ones, for which others may be waiting, know nothing of it
            raise self._comm.loss_of_reduction()
        with self._comm.collective():
            self._comm.finish(work, self._comm._reduce, number=self._number)
        self.work = None
        self._comm._mean(self._received, self._shard)
        return None


_SENT_AS_THEY_ARE = {
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}


def on_the_wire(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that collectives which only move values can take: dtypes that no back end knows, such
    as 8-bit floats, as bytes."""
    if tensor.dtype in _SENT_AS_THEY_ARE:
        return tensor
    return tensor.contiguous().view(-1).view(torch.uint8)


class GroupComm:
    """The ranks of a torch process group.

    Args:
        group: The ranks. Every one of them must construct its `GroupComm` at the same point. With NCCL it is the data
            group as well, since each takes memory of the device; with gloo, the data group can be closed by itself.
        device: Where collectives of the data and reduce groups take their tensors.
        timeout: How long control messages wait for the slowest rank; None: torch's default of the backend.
        beside: All groups that are made at this point, by all ranks of the default group, this one among them. None:
            only the ranks of this group make it.
        has_reductions: See `part`.
        is_lent: Whether the group was made by others, and stays when this is closed.
        mean: What a reduce-scatter computes of the slices that it has received.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta | None = None,
        beside: Sequence[list[int]] | None = None,
        *,
        mean: Mean = mean_of_rows,
        has_reductions: bool = True,
        is_lent: bool = True,
    ) -> None:
        self._given = group
        self._is_lent = is_lent
        self._beside = beside
        self._has_reductions = has_reductions
        self._mean = mean
        self._linked: weakref.WeakSet[GroupComm] = weakref.WeakSet()  # they leave with this one
        self._device = device
        self._timeout = timeout
        self._backend = dist.get_backend(group)
        self._is_apart = False
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._first = self._ranks[0]
        self._line = line_of_process()
        self._reset()
        self._open()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._watch: Watch | None = None
        self._messages: SharedMessages | None = None
        self._loss: PeerLostError | None = None
        self._reductions: weakref.WeakSet[_MeanOfSlices] = weakref.WeakSet()
        self._place = Place("", self._ranks)
        self._call = SETUP
        self._has_own_error = False  # on its way, and left for

    def _open(self) -> None:
        name = f"{self._given.group_name} {self._is_apart}"
        with self._line.opening(name, self._ranks, Call("ElixirModule(), or the first call of a Trainer")):
            self._open_groups()
        if not self._is_apart:
            self._line.add(self._place, self)

    def _open_groups(self) -> None:
        for abandoned in self._line.take_abandoned():
            _destroy(abandoned)
        if not self._is_apart:
            is_own = self._backend == "gloo"
            self._data = _new_group(self._ranks, self._timeout, self._backend, self._beside) if is_own else self._given
            self._reduce = self._data
            if self._has_reductions:
                self._reduce = _new_group(self._ranks, self._timeout, self._backend, self._beside)
        self._control = _new_group(self._ranks, self._timeout, "gloo", self._beside)
        # Without `close()` an engine is collected with its model, and torch would keep its groups, each with threads
        # and open files, for as long as the process lives. NCCL's are closed together with the other ranks alone.
        left = [weakref.ref(one) for one in self._own_groups() if dist.get_backend(one) == "gloo"]
        weakref.finalize(self, self._line.abandoned.extend, left).atexit = False
        # Names come again where a process group is made anew over the same store, with what was written there.
        told = self._exchange_values((Process.this(), uuid.uuid4().hex, self._line.tied))
        processes, names, tied = zip(*told, strict=True)
        self._roster = Roster(f"{self._control.group_name}/{names[0]}", self.rank)
        self._roster.processes = list(processes)
        self._roster.numbers, self._roster.lost = self._ranks, self._line.lost
        if not self._is_apart and self.world_size == dist.get_world_size():
            self._line.tie(names[0], tied, processes, self._exchange_values)
        if not self._is_apart:
            timeout = _timeout_of(self._control, torch.device("cpu"))
            self._messages = open_shared_messages(self.rank, processes, timeout, self._exchange_values)
        # What other threads wait for is of no concern to the line of the program.
        self._place = Place(self._roster.name, self._ranks, self._roster)
        if self._backend != "gloo" and not self._is_apart:
            lose = partial(_lose, weakref.ref(self))
            self._watch = Watch(self._roster.is_anyone_gone, lose, self._roster.tell_orderly_end)
            weakref.finalize(self, self._watch.stop)

    def connect(self, nbytes: int) -> None:
        # NCCL connects peers at the first message of a kind and size, and blocks the host until both are there: in
        # backward one rank would wait there for a peer that waits for it at the end (seen with two GPUs).
        if self._backend == "gloo":
            return
        with self.collective():
            sent = torch.zeros(-(-nbytes // self.world_size) * self.world_size, dtype=torch.uint8, device=self._device)
            received = torch.empty_like(sent)
            self._place.count += 2
            dist.all_to_all_single(received, sent, group=self._reduce)
            _all_gather(received, sent[: sent.numel() // self.world_size], group=self._data)
            received[0].item()  # wait for both

    def all_gather(self, flat: Tensor) -> None:
        sent = on_the_wire(flat)
        numel = sent.numel() // self.world_size
        mine = sent[self.rank * numel : (self.rank + 1) * numel]
        storage = flat.untyped_storage() if self._backend == "gloo" else None
        num_uses = 0 if storage is None else storage_use_count(storage)
        with self.collective():
            self._on_data(lambda is_async: _all_gather(sent, mine, group=self._data, async_op=is_async))
        if storage is not None:
            _wait_until_let_go(storage, num_uses)

    def reduce_scatter_mean(self, shard: Tensor, flat: Tensor) -> Work:
        received = torch.empty_like(flat)
        with self.collective():
            self._place.count += 1
            work = cast(dist.Work, dist.all_to_all_single(received, flat, group=self._reduce, async_op=True))
        reduction = _MeanOfSlices(self, work, received.view(self.world_size, -1), shard, self._place.count)
        self._reductions.add(reduction)
        return reduction

    def mean_over_ranks(self, flat: Tensor) -> None:
        mine = torch.empty(flat.numel() // self.world_size, dtype=flat.dtype, device=flat.device)
        self.reduce_scatter_mean(mine, flat).wait()
        flat[self.rank * mine.numel() : (self.rank + 1) * mine.numel()].copy_(mine)
        self.all_gather(flat)

    def all_to_all(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        result = torch.empty(sum(received), dtype=flat.dtype, device=flat.device)
        sizes = list(received), list(sent)
        with self.collective():
            self._place.count += 1
            work = dist.all_to_all_single(result, flat, *sizes, group=self._reduce, async_op=True)
            self.finish(cast(dist.Work, work), self._reduce)
        return result

    def scatter_from_first(self, shard: Tensor, flat: Tensor | None) -> None:
        pieces = None if flat is None else list(on_the_wire(flat).view(self.world_size, -1).unbind(0))
        received = on_the_wire(shard)
        with self.collective():
            self._on_data(
                lambda is_async: dist.scatter(received, pieces, src=self._first, group=self._data, async_op=is_async),
                self._first,
            )

    def broadcast_from_first(self, tensor: Tensor) -> None:
        """`tensor` may live on the host or on the device."""
        staged = tensor.to(self._device)
        sent = on_the_wire(staged)
        with self.collective():
            self._on_data(
                lambda is_async: dist.broadcast(sent, src=self._first, group=self._data, async_op=is_async),
                self._first,
            )
        if staged.data_ptr() != tensor.data_ptr():
            tensor.copy_(staged)

    def all_reduce_max(self, tensor: Tensor) -> None:
        with self.collective():
            self._on_control(lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX, self._control, async_op=True))

    def all_reduce_sum(self, tensor: Tensor) -> None:
        with self.collective():
            self._on_control(lambda: dist.all_reduce(tensor, dist.ReduceOp.SUM, self._control, async_op=True))

    def gather_host(self, shard: Tensor, on_all_ranks: bool) -> list[Tensor] | None:
        pieces = [torch.empty_like(shard) for _ in range(self.world_size)] if self.rank == 0 or on_all_ranks else None
        mine, group = shard.contiguous(), self._control
        if pieces is not None:
            wired: list[Tensor] | None = [on_the_wire(piece) for piece in pieces]
        else:
            wired = None
        mine = on_the_wire(mine)
        with self.collective():
            if on_all_ranks and wired is not None:
                self._on_control(lambda: dist.all_gather(wired, mine, group=group, async_op=True))
            else:
                issue = partial(dist.gather, mine, wired, dst=self._first, group=group, async_op=True)
                self._on_control(issue, self._first)
        return pieces

    def exchange(self, message: Sequence[int], call: Call = SETUP) -> list[list[int]]:
        with self.collective(call), label("wait for ranks"):
            return self._exchange(message)

    def _exchange(self, message: Sequence[int]) -> list[list[int]]:
        code, room = self._call.code, _MESSAGE_NUMEL - _HEADER_NUMEL
        rows = self._gather_rows([code, len(message), *message[:room]], _MESSAGE_NUMEL)
        if any(row[0] != code for row in rows):
            raise self._diverged()
        longest = max(row[1] for row in rows)
        if longest > room:
            rows = self._gather_rows([code, len(message), *message], longest + _HEADER_NUMEL)
        return [row[_HEADER_NUMEL : _HEADER_NUMEL + row[1]] for row in rows]

    def _gather_rows(self, values: list[int], numel: int) -> list[list[int]]:
        if self._messages is not None and numel <= self._messages.room:
            message = self._messages.send(values)
            self._place.count += 1
            self._wait(message.is_over_within)
            return message.rows(numel)
        mine = torch.frombuffer(array("q", values + [0] * (numel - len(values))), dtype=torch.int64)
        rows = torch.empty(self.world_size * numel, dtype=torch.int64, device="cpu")
        self._on_control(lambda: _all_gather(rows, mine, group=self._control, async_op=True))
        gathered: list[list[int]] = rows.view(self.world_size, numel).tolist()
        return gathered

    def exchange_objects(self, value: Any, call: Call = SETUP_OBJECTS) -> list[Any]:
        with self.collective(call):
            return self._exchange_values(value)

    def _exchange_values(self, value: Any) -> list[Any]:
        data = pickle.dumps(value)
        return self._exchange_bytes(data, [row[0] for row in self._exchange([len(data)])])

    def _exchange_bytes(self, data: bytes, sizes: Sequence[int]) -> list[Any]:
        longest = max(sizes)
        mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        rows = torch.empty(self.world_size * longest, dtype=torch.uint8, device="cpu")
        self._on_control(lambda: _all_gather(rows, mine, group=self._control, async_op=True))
        pieces = zip(rows.view(self.world_size, longest), sizes, strict=True)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in pieces]  # noqa: S301 - of our own ranks

    def diverged(self, call: Call) -> DivergenceError:
        with self.collective(call):
            return self._diverged()

    def _diverged(self) -> DivergenceError:
        data = pickle.dumps(position_of(self._call))
        sizes = [row[0] for row in self._gather_rows([len(data)], 1)]
        told: list[Position] = self._exchange_bytes(data, sizes)
        return DivergenceError(differing(dict(enumerate(told))))

    def all_reduce(self, tensor: Tensor, op: Any, call: Call) -> Tensor:
        is_mean = isinstance(op, str) and op.lower() in ("mean", "avg")
        known = getattr(dist.ReduceOp, op.upper()) if isinstance(op, str) and not is_mean else op
        if is_mean:
            known = dist.ReduceOp.SUM if self._backend == "gloo" else dist.ReduceOp.AVG
        with self.collective(call):
            self._exchange(())
            self._on_data(lambda is_async: dist.all_reduce(tensor, known, self._data, async_op=is_async))
        if is_mean and self._backend == "gloo":
            mean = tensor / self.world_size
            tensor.copy_(mean)
        return tensor

    # How a host waits

    def _on_data(self, issue: Callable[[bool], Any], first: int | None = None) -> None:
        """Issue a collective, and have its result waited for: by the host with gloo, else by the current stream.

        Args:
            issue: Gets whether it shall return at once.
            first: The rank that all others send to or receive from, if they wait for no other.
        """
        self._place.count += 1
        if self._backend == "gloo":
            self.finish(issue(True), self._data, first)
        else:
            issue(False)

    def _on_control(self, issue: Callable[[], Any], first: int | None = None) -> None:
        self._place.count += 1
        self.finish(issue(), self._control, first)

    def finish(
        self, work: dist.Work, group: dist.ProcessGroup, first: int | None = None, number: int | None = None
    ) -> None:
        """Wait for a collective: in slices, where it is the host that waits.

        Args:
            first: See `_on_data`.
            number: Of the collective, if it is not the last one.

        Raises:
            DivergenceError: The ranks wait for each other.
            CollectiveFailed: A peer has left, or its process has ended.
        """
        if self._is_apart or not self._place.name or (group is self._reduce and self._backend != "gloo"):
            work.wait()
            return

        def give_up() -> None:
            if not work.is_completed():  # it may never be
                _leave_open(group, work)

        self._wait(partial(_is_over_within, work), give_up, first, number)

    def _wait(
        self,
        is_over_within: Callable[[timedelta], bool],
        give_up: Callable[[], None] = lambda: None,
        first: int | None = None,
        number: int | None = None,
    ) -> None:
        """Have the host wait in slices for what the other ranks take part in.

        Args:
            is_over_within: Waits so long, and says whether it is over; raises as `finish` does.
            give_up: Called before this rank leaves, where waiting has failed.
            first: See `_on_data`.
            number: See `finish`.
        """
        place = self._place
        needs = place.ranks if first is None or place.ranks[self.rank] == first else (first,)
        wait = Wait(place.name, number or place.count, needs, self._call, threading.get_ident(), place.roster)
        self._line.begin(wait)
        try:
            while not is_over_within(_SLICE):
                wait.check()
        except BaseException as error:
            give_up()
            self._explain(wait, error)
            raise
        finally:
            self._line.end(wait)
            if self._loss is not None:  # left while this was waited for
                self._line.remove(place)

    def _explain(self, wait: Wait, error: BaseException) -> None:
        """Waiting has ended by an error: if the ranks wait for each other, raise that. What comes from this rank itself
        (a signal's handler has raised) has it leave."""
        if self._line.is_decided(wait):
            for group in self._line.barriers_to_end(wait):
                dist.barrier(group, async_op=True)
            verdict = DivergenceError(wait.verdict)
            self._line.leave(verdict)
            raise verdict
        if not isinstance(error, CollectiveFailed):
            self._has_own_error = True
            self.leave(error)

    def apart(self) -> Comm:
        with self.collective():
            other = copy.copy(self)
            del other._data, other._reduce  # a group with a second reference to it cannot be closed
            other._is_apart = True
            other._reset()
            other._open()
        return other

    def part(self, groups: Sequence[Sequence[int]], *, has_reductions: bool) -> Comm:
        if len(groups[0]) == 1:
            return SoloComm()
        named = [[self._ranks[rank] for rank in ranks] for ranks in groups]
        own = next(ranks for ranks in named if self._ranks[self.rank] in ranks)
        beside = named if self.world_size == dist.get_world_size() else None
        with self.collective():
            group = _new_group(own, self._timeout, self._backend, beside)
        made = GroupComm(
            group,
            self._device,
            self._timeout,
            beside,
            mean=self._mean,
            has_reductions=has_reductions,
            is_lent=beside is None,
        )
        for other in (self, *self._linked):
            made._linked.add(other)
            other._linked.add(made)
        return made

    def sum_over_ranks(self, tensor: Tensor) -> None:
        with self.collective(_OF_PATTERN):
            self._on_data(lambda is_async: dist.all_reduce(tensor, group=self._data, async_op=is_async))

    def exchange_rows(
        self, received: Tensor, sent: Tensor, num_received: Sequence[int], num_sent: Sequence[int]
    ) -> None:
        splits = list(num_received), list(num_sent)
        with self.collective(_OF_PATTERN):
            self._on_data(
                lambda is_async: dist.all_to_all_single(received, sent, *splits, group=self._data, async_op=is_async)
            )

    def run(self, issue: Callable[[Any], Any]) -> Any:
        with self.collective(_OF_PATTERN):
            self._place.count += 1
            work = issue(self._data)
            if self._backend == "gloo":
                self.finish(work, self._data)
        return work

    @contextmanager
    def lent(self, call: Call) -> Iterator[dist.ProcessGroup | None]:
        with self.collective(call):
            self._exchange(())
            yield self._data

    # Ranks that are gone

    @contextmanager
    def collective(self, call: Call | None = None) -> Iterator[None]:
        """Every collective is issued, or waited for, inside.

        Args:
            call: What it belongs to; None: to what came before.

        Raises:
            PeerLostError: It has failed, or an earlier one has.
        """
        if self._loss is not None:
            self._open_again()
        if call is not None:
            self._call = call
        self._has_own_error = False
        try:
            yield
        except ElixirError:
            raise
        except Exception as error:
            if self._has_own_error:
                raise
            if not isinstance(error, RuntimeError):
                if self._loss is None:
                    raise
                # While this was on its way to them
                raise self._lost(RuntimeError("the groups are gone")) from error
            traceback.clear_frames(error.__traceback__)  # they keep the message, and that its connections
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> PeerLostError:
        is_news = False
        with self._lock:
            if self._loss is None:
                self._roster.tell()
                self._loss = PeerLostError("not known yet")
                with suppress(Exception):  # the others must hear in any case
                    self._disconnect()
                causes = self._roster.causes()
                why = "; ".join(dict.fromkeys(causes.values())) or "no other rank is known to have failed"
                here = position_of(self._call)
                cure = f". Every rank must {here.cure}" if here.cure and causes else ""
                if here.is_of_batch and self._roster.have_ended_well(causes):
                    cure = f". {MORE_BATCHES}"
                told = "" if causes else f" ({error})"
                text = f"rank {self.rank} cannot go on: {why}{told}. It was in {here}{cure}"
                self._loss = PeerLostError(text, ranks=sorted(causes))
                if causes:
                    self._roster.tell(heard=why)
                is_news = True
            loss = PeerLostError(str(self._loss), ranks=self._loss.ranks)
        if is_news:
            self._end_of_all(loss)
        return loss

    def leave(self, error: BaseException) -> None:
        if self._leave(error):
            self._end_of_all(error)

    def _end_of_all(self, error: BaseException) -> None:
        """This has been left: so are the others, and then this rank may end. Where it goes on, nothing is waited for in
        their places any more: what looks after them rests, however long the comms live."""
        left = [(self._line, self._place)]
        for other in list(self._linked):
            other._leave(error)
            left.append((other._line, other._place))
        self._roster.linger()
        for line, place in left:
            line.remove(place)

    def _leave(self, error: BaseException) -> bool:
        """Returns whether this was not left yet."""
        with self._lock:
            if self._loss is not None:
                return False
            if isinstance(error, PeerLostError):
                # Not this one: raised on, it would keep its frames, and these the model, for as long as this is kept.
                self._loss = PeerLostError(str(error), ranks=error.ranks)
                self._roster.tell(heard=str(error))
            else:
                text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                self._loss = PeerLostError(f"rank {self.rank} has failed itself ({text})", ranks=[self.rank])
                self._roster.tell(failed=text)
            self._disconnect()
            return True

    def loss_of_reduction(self) -> PeerLostError:
        """The error of a reduction that was under way when this rank left."""
        with self._lock:
            if self._loss is None:  # groups have been made anew since
                return PeerLostError(f"rank {self.rank} cannot go on: a reduction was given up when ranks were lost")
            return PeerLostError(str(self._loss), ranks=self._loss.ranks)

    def have_all_stumbled(self) -> bool:
        return self._loss is None and self._roster.have_all_stumbled()

    def _disconnect(self) -> None:
        """Close the groups, so that no peer waits for this rank any more."""
        if self._watch is not None:
            self._watch.stop()
        if self._messages is not None:
            self._messages.leave()
        if not dist.is_initialized():
            return
        if self._backend != "gloo":
            # Kernels of this rank that wait for a peer end with their communicator; those of a peer do when its host
            # hears of this through the control group, or its watch does. The given group stays registered, of no use.
            for group in () if self._is_apart else (self._data, self._reduce):
                with suppress(Exception):
                    group._get_backend(self._device).abort()
        _destroy(self._control)
        del self._control
        if self._is_apart:
            return
        deadline = time.monotonic() + _LONGEST_END_S
        while [r for r in list(self._reductions) if not r.is_over()] and time.monotonic() < deadline:
            time.sleep(0.01)
        for reduction in list(self._reductions):
            work, reduction.work = reduction.work, None
            if work is not None and not work.is_completed():
                _leave_open(self._reduce, work)
        if self._data is not self._given:
            _destroy(self._data)
        if self._has_reductions:
            _destroy(self._reduce)
        del self._data, self._reduce

    def _open_again(self) -> None:
        """When every rank has left, each by itself or because of another: those whose processes live on may begin anew.

        Raises:
            PeerLostError: Not all of them have.
        """
        with self._lock:
            loss = self._loss
            if loss is None:
                return
            can_open = self._backend == "gloo" and not self._is_apart and dist.is_initialized()
            is_whole = can_open and dist.get_world_size() == self.world_size  # see `_new_group`
            if not is_whole or not self._roster.have_all_told() or not self._roster.meet_again():
                raise PeerLostError(str(loss), ranks=loss.ranks)
            self._reset()
            self._open()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._line.remove(self._place)
        if self._loss is not None or self._is_apart or not dist.is_initialized():
            return
        self._roster.tell_closed(self._place.count)
        if self._messages is not None:
            self._messages.leave()
        for group in self._own_groups():
            _destroy(group)

    def _own_groups(self) -> list[dist.ProcessGroup]:
        """What is destroyed when this is closed. Groups that some of the ranks have made by themselves stay until the
        end of the process (see `_new_group`), and so do NCCL's of a part of the ranks."""
        is_partial = dist.get_world_size() != self.world_size
        if is_partial and self._beside is None:
            return []
        own = [self._control]
        if not self._is_apart and not (is_partial and self._backend != "gloo"):
            own += [self._reduce] if self._has_reductions else []
            own += [self._data] if self._data is not self._given else []
            own += [self._given] if self._backend == "gloo" and not self._is_lent else []
        return own


def _lose(comm: weakref.ref[GroupComm]) -> None:
    found = comm()
    if found is not None:
        found._lost(RuntimeError("a peer has gone while this rank waited in its device"))


def _is_over_within(work: dist.Work, longest: timedelta | None) -> bool:
    """Wait for a collective of gloo's; None: which is over.

    Raises:
        CollectiveFailed: It has failed.
    """
    try:
        if longest is None:
            work.wait()
        else:
            work.wait(longest)
    except RuntimeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # a signal's handler has raised it
        if not work.is_completed():
            return False
        if longest is not None:
            return _is_over_within(work, None)  # it may have come to its end after that
        raise CollectiveFailed(str(error)) from error
    return True


def _leave_open(group: dist.ProcessGroup, work: dist.Work) -> None:
    """Keep a group, to the end of the process, as long as its message is under way: closing it would wait for that, and
    so would the end of the interpreter. Ranks that wait for this one there hear by the store."""
    for known, late in list(_LEFT_OPEN):
        if late.is_completed():
            _LEFT_OPEN.remove((known, late))
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(known))
    _LEFT_OPEN.append((group, work))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _destroy(group: dist.ProcessGroup) -> None:
    """Have torch forget a group. It is closed when no other reference to it, or to a message of it, is left."""
    try:
        dist.destroy_process_group(group)
    except (RuntimeError, ValueError, AssertionError):
        return  # it is gone, or was aborted


def _new_group(
    ranks: list[int], timeout: timedelta | None, backend: str, beside: Sequence[list[int]] | None = None
) -> dist.ProcessGroup:
    if beside is not None:  # NCCL makes the communicators of a part with the help of all ranks of the whole
        made = [dist.new_group(one, timeout=timeout, backend=backend) for one in beside]
        return cast(dist.ProcessGroup, made[list(beside).index(ranks)])
    # torch numbers groups that all ranks make. Those of some it names after the groups that there are: made again after
    # it was destroyed, one would get its old name, and find the addresses of the old one in the store.
    is_partial = len(ranks) < dist.get_world_size()
    group = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=is_partial)
    return cast(dist.ProcessGroup, group)  # torch annotates what ranks outside the group get as well


def make_comm(group: dist.ProcessGroup | None, device: torch.device, mean: Mean = mean_of_rows) -> Comm:
    """The ranks of `group`, None: the default group; a `SoloComm` without torch.distributed, or for one rank.

    Args:
        mean: See `GroupComm`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return SoloComm()
    group = group if group is not None else dist.group.WORLD
    if group is None or dist.get_world_size(group) == 1:
        return SoloComm()
    return GroupComm(group, device, _timeout_of(group, device), mean=mean)


def is_default_group(group: Any) -> bool:
    """Whether this names all ranks: None, or torch's own group of them."""
    return group is None or (dist.is_available() and group is dist.group.WORLD)


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """How long the group's collectives wait for the slowest rank; None where torch does not tell."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None
