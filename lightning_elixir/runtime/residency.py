"""Carries out what the rCache decides: which replicas come and go at an access."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable, Sequence

import torch

from lightning_elixir.errors import CapacityError
from lightning_elixir.plan.activations import less_activations
from lightning_elixir.plan.rcache import RCache
from lightning_elixir.plan.types import Plan
from lightning_elixir.plan.units import format_bytes
from lightning_elixir.runtime.agreement import Agreement
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.fetcher import Fetcher
from lightning_elixir.runtime.interception import Interception

log = logging.getLogger(__name__)


class Residency:
    """The replicas of one plan.

    Args:
        plan: What to obey.
        chunks: By id.
        rcache: Decides.
        fetcher: Fills replicas.
        interception: Takes over what users wrote to a replica before it goes.
        agreement: With the other ranks; None where nothing has to be agreed.
        touched: Chunks that users may have written to; those that leave are taken out.
        relieve: Called when there is no memory for a replica, with what is needed now: evict as much of the rest as can
            go. Tells whether anything went.
    """

    def __init__(
        self,
        plan: Plan,
        chunks: Sequence[Chunk],
        rcache: RCache,
        fetcher: Fetcher,
        interception: Interception,
        agreement: Agreement | None,
        touched: set[int],
        relieve: Callable[[Collection[int]], bool],
    ) -> None:
        self._block_bytes = plan.block_bytes
        less = less_activations(plan.activations)
        self._cure = less and f", or {less}"
        self._is_shared = plan.mesh.copy_size > 1
        self._num_blocks = plan.rcache_blocks
        self._managed = {c.id for c in plan.chunks if not c.is_persistent}
        self._chunks = chunks
        self._rcache = rcache
        self._fetcher = fetcher
        self._interception = interception
        self._agreement = agreement
        self._touched = touched
        self._relieve = relieve
        self._needed: Collection[int] = ()  # at the access under way
        # Chunks that all ranks have brought outside of forward and backward, in order of their last use. They stay, so
        # that a rank which makes the same calls as the others knows what these have.
        self._common: dict[int, None] = {}
        self._has_told_of_overflow = False

    def held(self) -> list[int]:
        """Resident chunks that cannot go because something else shares their storage."""
        return [i for i in self._rcache.resident_ids if self._chunks[i].is_aliased()]

    def _staying(self, ids: Collection[int] = ()) -> _Staying:
        """What cannot go, looked at one by one when it would: an alias takes longer to find than a place in a trace.

        Args:
            ids: Others that stay.
        """
        return _Staying(self._chunks, self._common, ids)

    def acquire(self, ids: Sequence[int], pin: bool, held: Collection[int] | None, is_traced: bool) -> bool:
        """Bring chunks, and prefetch others. Where that fails, what did not come counts as absent again.

        Args:
            ids: Needed now.
            pin: Until they are dropped.
            held: As `held()` tells, if that is known already.
            is_traced: Whether the trace of the open iteration describes this access.

        Returns:
            Whether anything was moved.

        Raises:
            CapacityError: There is no device memory for them.
        """
        return self._acquire(ids, pin, held, is_traced, is_meeting=False)

    def acquire_outside(self, ids: Sequence[int], pin: bool) -> None:
        """As `acquire`, outside of forward and backward, where what follows may be a collective of the user's. So
        whether this rank meets the others rests on the calls that it makes, which are theirs too, and not on what it
        has: each has kept other chunks, by its own branches, activations and aliases (Note: agreed collectives).

        Raises:
            CapacityError: There is no device memory for them.
        """
        if self._agreement is None:
            self._acquire(ids, pin, None, False, is_meeting=False, is_asked_for=pin)
            return
        managed = [i for i in dict.fromkeys(ids) if i in self._managed]
        gathered = [i for i in managed if self._fetcher.is_collective(self._chunks[i])]
        common, resident = self._common, self._rcache.resident_ids
        is_meeting = any(i not in common or i not in resident for i in gathered)
        self._make_common_room(managed)
        self._acquire(ids, pin, None, False, is_meeting=is_meeting, is_asked_for=pin)
        for chunk_id in gathered:
            common.pop(chunk_id, None)
            common[chunk_id] = None

    def _make_common_room(self, ids: Sequence[int]) -> None:
        """Of the chunks that all ranks have, those stay that the plan, which is the same everywhere, has room for
        beside `ids`; the one that was used the longest time ago is the first to go."""
        common, cost = self._common, self._rcache.cost_blocks
        num_blocks = sum(cost[i] for i in {*common, *ids})
        for chunk_id in [i for i in common if i not in ids]:
            if num_blocks <= self._num_blocks:
                return
            del common[chunk_id]
            num_blocks -= cost[chunk_id]

    def is_common(self, chunk_id: int) -> bool:
        """Whether the other ranks count on it that this one keeps the chunk."""
        return chunk_id in self._common

    def forget_common(self) -> None:
        """Ranks may come to have other chunks than each other from here on. On all of them at the same point."""
        self._common.clear()

    def _acquire(
        self,
        ids: Sequence[int],
        pin: bool,
        held: Collection[int] | None,
        is_traced: bool,
        *,
        is_meeting: bool,
        is_asked_for: bool = False,
    ) -> bool:
        """See `acquire`.

        Args:
            is_meeting: Whether the ranks meet even if nothing is missing here.
            is_asked_for: Whether the user has asked for these chunks together (`full_parameters`).
        """
        rcache = self._rcache
        staying: Container[int] = self._staying(ids) if held is None else {*held, *ids}
        overflows = rcache.overflows
        decision = rcache.acquire(ids, pin=pin, held=staying, is_traced=is_traced)
        self._needed = ids
        try:
            if decision.evict:
                self.evict(decision.evict)
            # What is common is needed by nothing, and goes with the next step.
            if rcache.overflows > overflows and not self._common and not is_asked_for:
                self._report_overflow(ids)
            together = self._fetch_alone(decision.fetch)
            ahead: tuple[int, ...] = ()
            if self._agreement is not None:
                is_meeting = is_meeting or bool(together)
                wished = rcache.proposals(staying, is_meeting=is_meeting) if is_traced else ()
                if wished or is_meeting:
                    # What is prefetched is what all ranks propose: each leaves out what it would have to wait for.
                    # That they meet must not rest on it, for it may differ between them.
                    candidates = [i for i in wished if not self._fetcher.would_wait(self._chunks[i])]
                    ahead = self._agreement.want(together, candidates)
            elif is_traced:
                ahead = rcache.prefetch_candidates(())
            if ahead:
                self._prefetch(ahead, self._staying(ids))
        except BaseException:
            if pin:
                rcache.drop(ids)
            self.settle()
            raise
        return bool(ahead or decision.fetch or decision.evict)

    def _fetch_alone(self, ids: Sequence[int]) -> list[int]:
        """Fetch what this rank can fetch by itself; returns the others."""
        together = [i for i in ids if self._fetcher.is_collective(self._chunks[i])]
        for chunk_id in ids:
            if chunk_id not in together:
                self.fetch(chunk_id)
        return together

    def join(self, ids: Sequence[int], mine: Collection[int]) -> None:
        """Gather `ids`, in this order, keeping those in `mine`."""
        for chunk_id in ids:
            if chunk_id in mine:
                self.fetch(chunk_id)
            elif self._is_shared and self._fetcher.is_collective(self._chunks[chunk_id]):
                self._fetcher.serve(self._chunks[chunk_id])

    def absorb(self, ids: Iterable[int]) -> None:
        """Bring what users wrote to replicas that are there to shards, where peers find it."""
        for chunk_id in self._touched.intersection(ids):
            if self._chunks[chunk_id].is_usable:
                self._interception.absorb(self._chunks[chunk_id])

    def fetch(self, chunk_id: int) -> None:
        """Fill a replica that the rCache counts as resident; with its peers, if that takes them.

        Raises:
            CapacityError: There is no device memory for it, not even after everything else has gone that can go.
        """
        chunk = self._chunks[chunk_id]
        try:
            self._fetcher.fetch(chunk)
            return
        except torch.OutOfMemoryError as error:
            shortage = error
        if self._relieve((chunk_id, *self._needed)):
            try:
                self._fetcher.fetch(chunk)
                return
            except torch.OutOfMemoryError as error:
                shortage = error
        raise CapacityError(
            f"no device memory for {chunk.spec}: {format_bytes(chunk.spec.nbytes)} beside "
            f"{self._rcache.used_blocks} resident blocks of {format_bytes(self._block_bytes)}; lower "
            "gpu_memory_limit so that the plan leaves more to activations, use a smaller batch or"
            f" chunk_size{self._cure}"
        ) from shortage

    def evict(self, ids: Iterable[int]) -> None:
        """Release what the rCache has given up already."""
        for chunk_id in ids:
            chunk = self._chunks[chunk_id]
            if chunk_id in self._touched:
                self._interception.absorb(chunk)
                self._touched.discard(chunk_id)
            self._interception.lost_writes.leaves(chunk)
            self._interception.guard(chunk)
            chunk.release()

    def release(self, ids: Iterable[int]) -> None:
        """Let resident chunks go; what users wrote to them must have been absorbed."""
        for chunk_id in self._rcache.release(ids):
            self._chunks[chunk_id].release()

    def settle(self) -> None:
        """After an error: what the rCache expected and never came is absent, and what it has given up goes."""
        resident = self._rcache.resident_ids
        self._rcache.release([i for i in resident if not self._chunks[i].is_usable])
        self.evict([i for i in self._managed if i not in resident and self._chunks[i].is_usable])

    def shrink(self, protected: Collection[int]) -> int:
        """Evict what is above the rCache's budget, or as much of it as can go. Returns the blocks given up."""
        before = self._rcache.used_blocks
        coming = [i for i in self._rcache.resident_ids if not self._chunks[i].is_usable]
        self.evict(self._rcache.shrink({*self.held(), *coming, *self._common, *protected}))
        return before - self._rcache.used_blocks

    def _prefetch(self, ids: Sequence[int], held: Container[int]) -> None:
        decision = self._rcache.prefetch(ids, held)
        self.evict(decision.evict)
        try:
            self.join(ids, decision.fetch)
        except CapacityError:
            if self._is_shared:  # the others are gathering it
                raise
            self.settle()

    def _report_overflow(self, ids: Sequence[int]) -> None:
        """Say once that the rCache has grown above its budget."""
        if self._has_told_of_overflow:
            return
        self._has_told_of_overflow = True
        members = [member.fqn for i in ids for member in self._chunks[i].spec.members]
        log.warning(
            "the rCache needs %d blocks of %s at once for %s%s, but the plan allows %d: growing; raise "
            "gpu_memory_limit or use a smaller chunk_size if memory runs out",
            self._rcache.used_blocks,
            format_bytes(self._block_bytes),
            members[0],
            f" and {len(members) - 1} more parameters" if len(members) > 1 else "",
            self._rcache.budget_blocks,
        )


class _Staying:
    """Chunks that must not be evicted now, for `in`.

    Args:
        chunks: By id.
        common: What all ranks count on.
        ids: What is needed now.
    """

    def __init__(self, chunks: Sequence[Chunk], common: Container[int], ids: Container[int]) -> None:
        self._chunks = chunks
        self._common = common
        self._ids = ids

    def __contains__(self, chunk_id: object) -> bool:
        return (
            chunk_id in self._ids
            or chunk_id in self._common
            or (isinstance(chunk_id, int) and self._chunks[chunk_id].is_aliased())
        )
