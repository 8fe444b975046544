"""Gradients -> reduce-scatter -> gradient shards.

A gradient that autograd has accumulated is copied into its chunk's block at once, so that `p.grad` is gone before the
next operator runs. When all of a chunk's gradients are there and its turn has come (the same order on every rank), the
block is reduced over the ranks into this rank's gradient shard and goes down to its tier. In host memory, what is there
already is added to by a thread (Note: sums beside backward, `runtime/accumulation.py`).

[Note: one order of reductions] By the plan at first, then as chunks completed in rank 0's first backward. A rank tells
how far it is in that order, and what all ranks have ready is reduced: a collective that a peer joins only later can
deadlock two GPUs (the kernel that waits blocks a memory allocation of the host that the peer waits for; seen). For the
same reason NCCL's connections are made when the engine is built. Gradients that come after their chunk was reduced are
added by a second reduction at the end. Parameters that no rank has used stay untouched; those that some have used count
as zero on the others, as in DDP with unused parameters.

[Note: updates inside backward] With spare states they can be taken back (Note: exact speculation). Without, one begins
only if nothing looks in between: the strategy drives automatic optimization and no hook runs between backward and step
(`is_update_unobserved`, `strategy/precision.py`), nothing global is needed (clipping, loss scale), there is one
backward a step, as many gradients of the chunk have come as in the backward before, master and states are there, and
nothing that users keep or have read of the chunk could still be written to. A further gradient for such a chunk, or an
exception before the step, closes the engine: saving raises rather than writing half a step. Signals wait for the end of
the step; a second one does not, and what it leaves half done raises from then on. A batch that runs again for want of
memory finds the same gradients, so chunks whose update has begun drop them. Where several backwards a step are
announced (`Landing.expect_accumulation`), nothing begins; where they only happen, what began with the first is dropped
before the second adds to its gradients.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_elixir.core.comm import Work
from lightning_elixir.core.device import Event
from lightning_elixir.core.labels import label
from lightning_elixir.errors import PeerLostError, StateError
from lightning_elixir.optim.scaling import square_sums
from lightning_elixir.plan.memory import GRAD_BLOCKS
from lightning_elixir.plan.shard_segments import Segment
from lightning_elixir.plan.types import Tier
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.landing import Landing
from lightning_elixir.runtime.transport import Transport
from lightning_elixir.runtime.zero_grads import ZeroGrads

# Gradients of no more are copied to their block together, so many at most: a launch costs the host as much as that of a
# matrix product, and of a layer's parameters most are norms and biases. Until then they stay, which no plan counts.
_SMALL_BYTES = 2**16
_MOST_SMALL = 32

# Blocks whose reduction or download may be under way when another begins to collect.
_MAX_IN_FLIGHT = GRAD_BLOCKS - 1


@dataclass
class _Collected:
    """What has arrived for one chunk since its last reduction."""

    block: Tensor  # 1D, compute dtype, [chunk numel]; slices of parameters without a gradient are uninitialised
    expected: int | None = None  # gradients; None: not known
    arrived: set[int] = field(default_factory=set)  # member indices
    count: int = 0  # of gradients, of which a parameter may get several
    small: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Slices of the block and the gradients that are to be copied there."""

    def write_small(self) -> None:
        """Copy what was put off."""
        if self.small:
            torch._foreach_copy_([target for target, _ in self.small], [grad for _, grad in self.small])
            self.small.clear()

    def forget(self) -> None:
        """As if nothing had arrived."""
        self.small.clear()
        self.arrived.clear()
        self.count = 0


@dataclass
class _InFlight:
    chunk: Chunk
    block: Tensor
    result: Tensor  # 1D, [shard numel]; the block itself where no other rank has the chunk
    work: Work | None
    event: Event | None
    is_late: bool
    is_whole: bool  # every parameter that can have one had a gradient, on this rank
    is_of_copy: bool = False  # the mean over the other copies is still to come
    is_kept: bool = False  # see `Reducer._is_kept`
    earlier: Tensor | None = None  # what the result is added to: the lane reads it, the compute stream could reuse it


class GradientWatcher(Protocol):
    """What a reducer tells of gradients: an optimizer."""

    def gradients_landed(self, chunk: Chunk) -> None:
        """All gradients that a chunk can have are on their way to host memory: its update may begin. Where `note_begun`
        tells of that, further gradients of it are an error; where not, `gradients_change` tells of them."""

    def gradients_change(self, chunk_ids: Collection[int] | None) -> None:
        """Called before the gradients of these chunks (None: of all), or what is updated with them, change or go: an
        update that has begun with them and can be taken back is of no use any more."""


class Reducer:
    """Owner of the gradients between autograd and the gradient shards.

    Args:
        transport: What it works with.
        chunks: All chunks; those that need no gradient are ignored.
        order: Chunk ids in the order in which they are reduced, the same on every rank.
        reduce_dtype: What gradients are cast to for the reduction; None: as they are.
        block_bytes: Of the block in which a chunk's gradients are collected.
        announce: With several ranks, called when `num_ready` has grown; leads to `issue_until`.
        waiting: Entered wherever backward may have to wait for a block or for other ranks.
    """

    def __init__(
        self,
        transport: Transport,
        chunks: Sequence[Chunk],
        order: Sequence[int],
        reduce_dtype: torch.dtype | None,
        block_bytes: int,
        announce: Callable[[], None],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._chunks = chunks
        self.order = tuple(order)
        self.is_order_known = False
        """Whether the ranks have agreed on `order` after a first backward."""
        self.landing = Landing(transport, chunks, reduce_dtype)
        self._device = transport.device
        self._groups = transport.groups
        self._is_launching = not transport.device.is_synchronous  # elsewhere a copy costs nothing beside its bytes
        self._has_peers = transport.groups.world.world_size > 1
        self._store = transport.store
        self._moved = transport.moved
        self._reduce_dtype = reduce_dtype
        self._block_bytes = block_bytes
        self._announce = announce
        self._waiting = waiting
        self._trainable = {
            i: frozenset(k for k, p in enumerate(chunks[i].parameters) if p.requires_grad and p.numel() > 0)
            for i in self.order
        }
        # This backward
        self._collected: dict[int, _Collected] = {}
        self._arrivals: dict[int, int] = {}
        self._num_ready = 0  # how much of `order` is complete on this rank
        self._num_issued = 0  # how much of `order` has been reduced in this backward
        self._reduced_now: set[int] = set()
        self._finished: dict[int, None] = {}  # chunk ids, in the order of completion
        self._in_flight: deque[_InFlight] = deque()
        # Earlier backwards
        self._expected: dict[int, int] = {}  # arrivals per chunk in the last complete backward
        # Since the last step
        self.used: set[tuple[int, int]] = set()  # (chunk id, member index) that got a gradient on this rank
        self._used_now: set[tuple[int, int]] = set()  # of these, in this backward for the first time
        self.zeros = ZeroGrads()
        # Chunk id -> members whose gradients lie in the shard and count no more
        self._dropped: dict[int, set[int]] = {}
        self.lost: set[tuple[int, int]] = set()
        """Gradients that a failed backward was mixed with, and that have not been dropped since."""
        self._watcher: weakref.ref[GradientWatcher] | None = None
        self._begun: set[int] = set()  # chunks whose update has begun inside backward, until the step
        self._begun_before: set[int] = set()  # of these, those of an earlier, failed backward over the same batch
        self.is_inside_forward = False
        """Whether the backward that runs is one inside a forward: more gradients come before the step, and how many a
        chunk gets in it says nothing about others."""
        self._is_tracking_square_sums = False
        self.square_sums: dict[int, Tensor] = {}  # chunk id -> fp64, one per segment, of the whole gradient shard

    def watch(self, watcher: GradientWatcher) -> None:
        """Tell this one from now on, and no other, for as long as it lives. What another one has begun is dropped."""
        self.withdraw()
        self._watcher = weakref.ref(watcher)

    @property
    def is_tracking_square_sums(self) -> bool:
        return self._is_tracking_square_sums

    def track_square_sums(self, is_on: bool = True) -> None:
        """Have `square_sums` taken of gradients as they land, since a norm will be asked for."""
        self._is_tracking_square_sums = is_on

    # During backward

    def collect(self, chunk_id: int, index: int, parameter: nn.Parameter) -> bool:
        """Take over `parameter.grad` and reduce what is complete. Returns whether the chunk has become complete.

        Args:
            index: Of the chunk's member that it is.

        Raises:
            StateError: The gradient is to be differentiated again, which what is in chunks cannot be.
        """
        if type(parameter) is nn.Parameter:  # as mostly, where its chunk is in use
            grad, parameter.grad = parameter.grad, None
        else:
            with torch._C.DisableTorchFunctionSubclass():  # this is not the user touching `.grad`
                grad, parameter.grad = parameter.grad, None
        if grad is None or chunk_id in self._begun_before:
            return False
        chunk = self._chunks[chunk_id]
        if grad.requires_grad:
            raise StateError(
                f"the gradient of {chunk.spec.members[index].fqn} was made by backward(create_graph=True): what is "
                "done with it would have no derivative here. Take gradients that are differentiated again from "
                "torch.autograd.grad(loss, parameters, create_graph=True), and call backward on what is made of them"
            )
        try:
            collected = self._collected[chunk_id]
        except KeyError:
            with self._waiting():
                collected = _Collected(self._new_block(chunk), self._expected.get(chunk_id))
            self._collected[chunk_id] = collected
        target = collected.block.as_strided(*chunk.places[index])
        arrived = collected.arrived
        if index in arrived:
            collected.write_small()
            target.add_(grad)
        else:
            if self._is_launching and _is_small(grad, target.dtype):
                collected.small.append((target, grad))
                if len(collected.small) == _MOST_SMALL:
                    collected.write_small()
            else:
                target.copy_(grad)
            arrived.add(index)
        key = (chunk_id, index)
        if key not in self.used:
            self.used.add(key)
            self._used_now.add(key)
        collected.count += 1
        expected = collected.expected
        # Where nothing is known yet, it is complete once all its parameters have one.
        if collected.count < expected if expected is not None else not arrived >= self._trainable[chunk_id]:
            return False
        if chunk_id in self._reduced_now:
            return False
        is_first = chunk_id not in self._finished
        self._finished[chunk_id] = None
        with self._waiting():
            self._advance(chunk_id)
        return is_first

    def is_collecting(self, chunk_id: int) -> bool:
        """Whether gradients of the chunk have come in this backward that are not reduced yet."""
        return chunk_id in self._collected

    # End of backward. Between these calls, the engine agrees with the other ranks.

    @property
    def num_ready(self) -> int:
        """How many chunks, in `order`, this rank has reduced or could reduce."""
        return self._num_ready

    def waiting_ids(self) -> list[int]:
        """Chunks with gradients that are not reduced yet for the first time in this backward."""
        return [i for i in self._collected if i not in self._reduced_now]

    def late_ids(self) -> list[int]:
        """Chunks that got further gradients after they had been reduced."""
        return [i for i in self._collected if i in self._reduced_now]

    def issue_until(self, count: int) -> None:
        """Reduce the first `count` chunks of `order`, as far as this has not been done; agreed between the ranks."""
        while self._num_issued < count:
            self._reduce(self._chunks[self.order[self._num_issued]], is_late=False)
            self._num_issued += 1

    def flush(self, waiting: Iterable[int], late: Iterable[int]) -> None:
        """Reduce what the ranks have left, in the same order everywhere.

        Args:
            waiting: Union of all ranks' `waiting_ids`.
            late: Union of all ranks' `late_ids`.
        """
        wanted, late_ids = set(waiting), set(late)
        behind = {i: self._collected.pop(i) for i in self.late_ids()}
        for chunk_id in self.order[self._num_issued :]:
            if chunk_id in wanted:
                self._reduce(self._chunks[chunk_id], is_late=False)
        self._collected.update(behind)
        for chunk_id in self.order:
            if chunk_id in late_ids:
                self._reduce(self._chunks[chunk_id], is_late=True)
        self._retire(0)
        if not self.is_inside_forward:
            self._expected = {**self._expected, **self._arrivals}
        self._begin()

    def begun_now(self) -> list[int]:
        """Chunks whose update has begun in this backward."""
        return sorted(self._begun - self._begun_before)

    def abandon(self) -> None:
        """Forget this backward (it raised). Earlier gradients stay, unless some of it has been added to them. Those of
        chunks whose update has begun count: a second backward over the same batch finds the same ones."""
        self.withdraw()
        try:
            self._retire(0, is_given_up=True)
        except PeerLostError:  # what was reduced is dropped below; the error that ends this backward tells more
            self._in_flight.clear()
        self._collected.clear()
        self.drop_uncollected()
        self.zeros.note_loss(self.used)
        self.used -= {key for key in self._used_now if key[0] not in self._begun}
        if self._reduced_now - self._begun:
            self.lost |= {key for key in self.used if key[0] not in self._begun}
            self._drop([i for i in self.order if i not in self._begun])
        self._begun_before = set(self._begun)
        self._begin()

    def drop_uncollected(self) -> None:
        """What autograd had put down when a signal, or a hook of the user's, kept `collect` from taking it over: the
        next backward would add to it."""
        with torch._C.DisableTorchFunctionSubclass():  # this is not the user touching `.grad`
            for chunk in self._chunks:
                for parameter in chunk.parameters:
                    parameter.grad = None

    def withdraw(self, chunk_ids: Collection[int] | None = None) -> None:
        """Have updates dropped that have begun and can be taken back: of these chunks, None: of all."""
        watcher = None if self._watcher is None else self._watcher()
        if watcher is not None:
            watcher.gradients_change(chunk_ids)

    def note_begun(self, chunk: Chunk) -> None:
        """The chunk's update has begun, with the gradients that it has now."""
        self._begun.add(chunk.id)

    @property
    def begun(self) -> frozenset[int]:
        """Chunks whose update has begun before the step, which must come."""
        return frozenset(self._begun)

    def has_begun(self, chunk_id: int) -> bool:
        return chunk_id in self._begun

    def drop_member(self, chunk: Chunk, index: int) -> None:
        """Drop the gradient of one parameter, as `p.grad = None` does. The same call on every rank.

        Raises:
            StateError: Its update has begun inside backward.
        """
        self._check_not_begun(chunk)
        self.zeros.forget((chunk.id, index))
        self._drop_member(chunk, index)

    def _drop_member(self, chunk: Chunk, index: int) -> None:
        self.used.discard((chunk.id, index))
        self.lost.discard((chunk.id, index))
        if self._store[chunk.id].grad is not None:
            self.withdraw((chunk.id,))
            self.square_sums.pop(chunk.id, None)
            self._dropped.setdefault(chunk.id, set()).add(index)

    def zero_member(self, chunk: Chunk, index: int, *, is_set: bool) -> None:
        """As `drop_member`, but there is a gradient of zeros then, if there was one, also at an earlier step.

        Args:
            is_set: Whether users have set one that is not in the shard yet.
        """
        self._check_not_begun(chunk)
        key, is_in_chunk = (chunk.id, index), is_set or self._store[chunk.id].grad is not None
        self.zeros.zero(key, has_grad=is_set or key in self.used, is_in_chunk=is_in_chunk)
        self._drop_member(chunk, index)

    def has_grad(self, chunk_id: int, index: int) -> bool:
        """Whether a parameter has a gradient on this rank."""
        return (chunk_id, index) in self.used or (chunk_id, index) in self.zeros

    def make_zeros(self, chunk_ids: Iterable[int]) -> None:
        """Have gradient shards of these chunks be there: what parameters got no gradient but zeros have."""
        for chunk_id in chunk_ids:
            if self._store[chunk_id].grad is None:
                self.rewrite(self._chunks[chunk_id], lambda shard: None, self._chunks[chunk_id].dtype)

    def carry_out_drops(self, chunk_ids: Collection[int] | None = None) -> None:
        """Have gradient shards be without what `drop_member` has dropped, before that is read or added to: each is read
        and written once, or not at all where all of it goes.

        Args:
            chunk_ids: Of these chunks; None: of all. The same on every rank. What goes as a whole does in any case.
        """
        whole = [i for i, members in self._dropped.items() if members >= self._trainable[i]]
        if whole:
            self._drop(whole)
        for chunk_id in [i for i in self._dropped if chunk_ids is None or i in chunk_ids]:
            chunk, members = self._chunks[chunk_id], self._dropped[chunk_id]

            def write(shard: Tensor, chunk: Chunk = chunk, members: Collection[int] = members) -> None:
                for index in members:
                    segment = self._groups.segment(chunk.spec, index)
                    if segment is not None:
                        shard[segment.in_shard].zero_()

            self.rewrite(chunk, write)
            del self._dropped[chunk_id]

    def rewrite(self, chunk: Chunk, write: Callable[[Tensor], None], dtype: torch.dtype | None = None) -> None:
        """Change a chunk's gradient shard between backward and step; where there is none it is made of zeros.

        Args:
            write: Called with the shard, 1-D, to be changed in place.
            dtype: That it shall have; None: as it is.

        Raises:
            StateError: Its update has begun inside backward.
        """
        self._check_not_begun(chunk)
        self.withdraw((chunk.id,))
        self.landing.wait(chunk.id)
        shard = self._store.settle(chunk.id)  # an update of other parameters in it may be under way
        grad = shard.read_grad()
        if grad is None:
            dtype = dtype or torch.promote_types(torch.float32, chunk.dtype)
            grad = self._store.set_grad(chunk.spec, dtype)
            grad = torch.zeros_like(grad, device="cpu") if grad.is_meta else grad.zero_()
        elif dtype is not None and grad.dtype != dtype:
            if shard.is_param_on_disk:
                self._store.set_grad(chunk.spec, dtype)
                grad = grad.to(dtype)
            else:
                grad = self.landing.widened(chunk, grad, dtype)
        with torch.no_grad():
            write(grad)
        shard.keep_grad(grad)
        self.landing.note_rewritten(chunk.id)
        self.square_sums.pop(chunk.id, None)

    def _check_not_begun(self, chunk: Chunk) -> None:
        if chunk.id in self._begun:
            raise StateError(
                f"the gradients of {chunk.spec} cannot be changed or dropped: its step has begun inside backward; use "
                "update_timing='behind_forward'"
            )

    def clear(self) -> None:
        """Drop all gradients."""
        self._clear()
        self.zeros.forget_all()

    def zero(self, also: Collection[tuple[int, int]]) -> None:
        """As `clear`, but every parameter that has a gradient, or had one since `clear`, has one of zeros then.

        Args:
            also: Parameters whose gradient may not be in the shard yet.
        """
        with_grads = [i for i in self.order if self._store[i].grad is not None]
        self.zeros.zero_all({*self.used, *also}, self.order, [*with_grads, *(i for i, _ in also)])
        self._clear()

    def end_step(self, used: Collection[tuple[int, int]], others: Collection[tuple[int, int]]) -> None:
        """A step has used the gradients, and where updates had begun taken them over: they are dropped.

        Args:
            used: Of which parameters of the optimizer that steps, on any rank.
            others: All parameters of other optimizers: theirs stay.
        """
        kept_of: dict[int, set[int]] = {}
        for chunk_id, index in others:
            kept_of.setdefault(chunk_id, set()).add(index)
        kept, kept_lost = self.used.intersection(others), self.lost.intersection(others)
        for chunk_id in kept_of:
            if self._store[chunk_id].grad is not None:
                self._dropped.setdefault(chunk_id, set()).update(self._trainable[chunk_id] - kept_of[chunk_id])
        gone = [i for i in self.order if i not in kept_of or self._dropped.get(i, set()) >= self._trainable[i]]
        self._drop(gone)
        self.used, self.lost = kept, kept_lost
        self.drop_uncollected()  # a bare backward may have failed before it was noticed
        self._begun.clear()
        self._begun_before.clear()
        self.zeros.note_step(used, others)

    def _clear(self) -> None:
        self._drop(self.order)
        for collected in self._collected.values():  # of a backward inside a forward, which has raised
            collected.forget()
        self.drop_uncollected()  # a bare backward may have failed before it was noticed
        self._begun.clear()
        self._begun_before.clear()
        self.lost.clear()

    def _drop(self, chunk_ids: Collection[int]) -> None:
        self.withdraw(chunk_ids)
        self.landing.drop(chunk_ids)
        self.used = {key for key in self.used if key[0] not in chunk_ids}
        for chunk_id in chunk_ids:
            self.square_sums.pop(chunk_id, None)
            self._dropped.pop(chunk_id, None)

    def finish_order(self) -> tuple[int, ...]:
        """`order` rearranged as the chunks completed in the backward under way; incomplete ones last."""
        return (*self._finished, *(i for i in self.order if i not in self._finished))

    def take_over(self, earlier: Reducer) -> None:
        """Go on with what an earlier reducer over the same chunks has learned."""
        self._expected = dict(earlier._expected)
        self.is_order_known = earlier.is_order_known
        self._is_tracking_square_sums = earlier._is_tracking_square_sums
        self.landing.take_over(earlier.landing)
        self.zeros = earlier.zeros

    def set_order(self, order: Sequence[int]) -> None:
        """Reduce in this order from the next backward on. The same call on every rank."""
        self.order = tuple(order)
        self.is_order_known = True

    def block_bytes_held(self) -> int:
        """Device bytes of gradient blocks that are not (yet) gradient shards, and of gradients on their way there."""
        blocks = [c.block for c in self._collected.values()]
        blocks += [grad for collected in self._collected.values() for _, grad in collected.small]
        for item in self._in_flight:
            grad = self._store[item.chunk.id].grad
            if grad is None or grad.data_ptr() != item.block.data_ptr():
                blocks.append(item.block)
        return sum(b.untyped_storage().nbytes() for b in blocks)

    # Internals

    def _begin(self) -> None:
        self._arrivals = {}
        self._num_issued = 0
        self._reduced_now = set()
        self._finished = {}
        self._num_ready = 0
        self._used_now = set()

    def _advance(self, chunk_id: int) -> None:
        """A chunk is complete. One rank reduces it at once; several agree on what is complete everywhere, in order."""
        if not self._has_peers:
            self._reduce(self._chunks[chunk_id], is_late=False)
            return
        before = self._num_ready
        while self._num_ready < len(self.order) and self.order[self._num_ready] in self._finished:
            self._num_ready += 1
        if self._num_ready > before:
            self._announce()

    def _reduce(self, chunk: Chunk, *, is_late: bool) -> None:
        if chunk.id in self._reduced_now and not is_late:
            return
        collected = self._collected.pop(chunk.id, None)
        if collected is None:
            collected = _Collected(self._new_block(chunk))
        else:
            self._arrivals[chunk.id] = self._arrivals.get(chunk.id, 0) + collected.count
            collected.write_small()
        for index, parameter in enumerate(chunk.parameters):
            if index not in collected.arrived and parameter.numel() > 0:
                chunk.slice_of(collected.block, index).zero_()
        self._reduced_now.add(chunk.id)
        is_whole = not is_late and collected.arrived >= self._trainable[chunk.id]
        if not self._groups.is_shared(chunk.spec):
            block = collected.block
            result = block if self._reduce_dtype is None else block.to(self._reduce_dtype)
            item = _InFlight(chunk, block, result, None, None, is_late, is_whole)
        else:
            item = self._start_reduction(chunk, collected.block, is_late, is_whole)
        is_pending = item.work is not None or item.is_of_copy  # until the end of backward: hosts wait for it
        self._in_flight.append(item)  # before it lands, which may fail: the lane has its memory already
        if not is_pending:
            self._land(item)
        if not self._device.is_synchronous:
            self._retire(GRAD_BLOCKS)
        elif not is_pending:
            self._retire(_MAX_IN_FLIGHT)  # now: collectives end in an order, and gradients come in any

    def _start_reduction(self, chunk: Chunk, block: Tensor, is_late: bool, is_whole: bool) -> _InFlight:
        sent = block if self._reduce_dtype is None else block.to(self._reduce_dtype)
        result = torch.empty(self._groups.numel(chunk.spec), dtype=sent.dtype, device=block.device)
        with self._device.reduce_lane.issue():
            work = self._groups.of(chunk.spec).reduce_scatter_mean(result, sent)
            if not self._device.is_synchronous:
                if work is not None:
                    work.wait()  # the lane, not the host
                self._groups.across.mean_over_ranks(result)
                work = None
        self._moved.reduced += sent.nbytes
        has_copies = self._groups.across.world_size > 1
        if has_copies:
            self._moved.reduced_across += result.nbytes
        is_of_copy = has_copies and self._device.is_synchronous
        return _InFlight(chunk, sent, result, work, None, is_late, is_whole, is_of_copy)

    def _retire(self, keep: int, *, is_given_up: bool = False) -> None:
        """Finish the oldest reductions until the blocks of `keep` are under way; those of the others become free.

        Args:
            is_given_up: By this rank, perhaps alone: others may never come to the means over copies.
        """
        while self._in_flight and (not keep or sum(not item.is_kept for item in self._in_flight) > keep):
            item = self._in_flight.popleft()
            is_pending = item.work is not None or item.is_of_copy
            if item.work is not None:
                item.work.wait()
            if item.is_of_copy and is_given_up:
                continue
            if item.is_of_copy:
                self._groups.across.mean_over_ranks(item.result)
            if is_pending:
                self._land(item)
            event = item.event or self._device.reduce_lane.record()  # it has failed to land
            event.wait()

    def _land(self, item: _InFlight) -> None:
        """Bring a reduced gradient to its tier and add it to what is there."""
        chunk, result = item.chunk, item.result[: self._store.optim_numel(item.chunk.spec)]
        shard = self._store.settle(chunk.id)
        item.earlier = shard.grad
        item.is_kept = self._is_kept(chunk)
        if shard.grad is not None:
            self.withdraw((chunk.id,))
        with self._device.reduce_lane.issue(), label("gradients", chunk.id):
            if chunk.ready is not None:  # an upload not waited for yet: it may read what gradients overwrite
                chunk.ready.wait()
            if self._is_tracking_square_sums and shard.grad is None:
                bounds = [(s.shard_offset, s.numel) for s in self._segments(chunk)]
                self.square_sums[chunk.id] = square_sums(result, bounds)
            else:
                self.square_sums.pop(chunk.id, None)
            item.event = self.landing.land(chunk, result, is_late=item.is_late)
        if chunk.spec.optim_tier is Tier.GPU:
            return
        self._moved.d2h += result.nbytes
        is_known = chunk.id in self._expected  # how many gradients it gets in one backward
        is_last = self.landing.is_step_next or not self.landing.is_accumulation_expected
        is_last &= not self.is_inside_forward
        watcher = None if self._watcher is None else self._watcher()
        if watcher is not None and is_last and is_known and item.is_whole and item.earlier is None:
            watcher.gradients_landed(chunk)

    def _segments(self, chunk: Chunk) -> Sequence[Segment]:
        return self._groups.segments(chunk.spec)

    def _is_alone_with_states(self, chunk: Chunk) -> bool:
        """Whether no other rank shares the chunk, and its states are on the device."""
        return not self._groups.is_shared(chunk.spec) and chunk.spec.optim_tier is Tier.GPU

    def _is_kept(self, chunk: Chunk) -> bool:
        """Whether the block of a chunk's next gradients becomes its gradient shard, and none that others wait for. (A
        device that never waits frees blocks at once, and all are alike.)"""
        is_cast = self._reduce_dtype not in (None, chunk.dtype)
        return (
            self._is_alone_with_states(chunk)
            and not (is_cast or self._device.is_synchronous)
            and self._store[chunk.id].grad is None
        )

    def _new_block(self, chunk: Chunk) -> Tensor:
        """Where a chunk's gradients collect. Only now the compute stream waits until an earlier block is free: compiled
        code gives all of its gradients at once, and what is computed next has no use for a block. (Seen on H200s,
        Llama-7B with compiled layers, 8 x 2048: steps waited 0.144 s with five chunks to a layer, 0.088 s with two.)"""
        if not (self._device.is_synchronous or self._is_kept(chunk)):
            self._retire(_MAX_IN_FLIGHT)
        if self._is_alone_with_states(chunk):
            # It becomes the gradient shard, and stays while activations go: it comes from the memory that they leave.
            return torch.empty(chunk.spec.numel, dtype=chunk.dtype, device=self._device.torch_device)
        block = torch.empty(0, dtype=chunk.dtype, device=self._device.torch_device)
        storage = block.untyped_storage()
        self._device.allocate(storage, max(self._block_bytes, chunk.spec.nbytes))
        block.set_(storage, 0, (chunk.spec.numel,), (1,))
        return block


def _is_small(grad: Tensor, dtype: torch.dtype) -> bool:
    """Whether a gradient may wait for others: it is small, and no part of something large."""
    is_plain = type(grad) is Tensor and grad.layout is torch.strided and grad.dtype is dtype
    return is_plain and grad.untyped_storage().nbytes() <= _SMALL_BYTES
