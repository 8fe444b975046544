"""Carries out what the rCache decides: which replicas come and go at an access."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from lightning_elixir.errors import CapacityError
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
        self._is_shared = plan.world_size > 1
        self._managed = {c.id for c in plan.chunks if not c.is_persistent}
        self._chunks = chunks
        self._rcache = rcache
        self._fetcher = fetcher
        self._interception = interception
        self._agreement = agreement
        self._touched = touched
        self._relieve = relieve
        self._needed: Collection[int] = ()  # at the access under way

    def held(self) -> list[int]:
        """Resident chunks that cannot go because something else shares their storage."""
        return [i for i in self._rcache.resident_ids if self._chunks[i].is_aliased()]

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
        if is_traced and held is None and self._rcache.serve(tuple(dict.fromkeys(ids)), pin=pin):
            return False
        return self._acquire(ids, pin, held, is_traced)

    def _acquire(self, ids: Sequence[int], pin: bool, held: Collection[int] | None, is_traced: bool) -> bool:
        rcache = self._rcache
        resident = rcache.resident_ids
        if held is None:
            is_missing = any(i in self._managed and i not in resident for i in ids)
            held = self.held() if is_missing or rcache.used_blocks > rcache.budget_blocks else ()
        overflows = rcache.overflows
        decision = rcache.acquire(ids, pin=pin, held=held, is_traced=is_traced)
        self._needed = ids
        try:
            if decision.evict:
                self.evict(decision.evict)
            if rcache.overflows > overflows:
                self._report_overflow(ids, overflows)
            together = decision.fetch and self._fetch_alone(decision.fetch)
            ahead: tuple[int, ...] = ()
            if together and self._agreement is not None:
                candidates = rcache.prefetch_candidates({*held, *ids}) if is_traced else ()
                # What is prefetched is what all ranks propose: each leaves out what it would have to wait for.
                candidates = tuple(i for i in candidates if not self._fetcher.would_wait(self._chunks[i]))
                ahead = self._agreement.want(together, candidates)
            elif is_traced and self._agreement is None:
                ahead = rcache.prefetch_candidates(())
                held = self.held() if ahead else ()
            if ahead:
                self._prefetch(ahead, {*held, *ids})
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
            elif self._is_shared:
                self._fetcher.serve(self._chunks[chunk_id])

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
            "gpu_memory_limit so that the plan leaves more to activations, use a smaller batch or chunk_size, or "
            "activation checkpointing"
        ) from shortage

    def evict(self, ids: Iterable[int]) -> None:
        """Release what the rCache has given up already."""
        for chunk_id in ids:
            chunk = self._chunks[chunk_id]
            if chunk_id in self._touched:
                self._interception.absorb(chunk)
                self._touched.discard(chunk_id)
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
        self.evict(self._rcache.shrink({*self.held(), *coming, *protected}))
        return before - self._rcache.used_blocks

    def _prefetch(self, ids: Sequence[int], held: Collection[int]) -> None:
        decision = self._rcache.prefetch(ids, held)
        self.evict(decision.evict)
        try:
            self.join(ids, decision.fetch)
        except CapacityError:
            if self._is_shared:  # the others are gathering it
                raise
            self.settle()

    def _report_overflow(self, ids: Sequence[int], earlier: int) -> None:
        if earlier == 0:
            log.warning(
                "the rCache needs %d blocks of %s at once for %s, but the plan allows %d: growing; raise "
                "gpu_memory_limit or use a smaller chunk_size if memory runs out",
                self._rcache.used_blocks,
                format_bytes(self._block_bytes),
                ", ".join(str(self._chunks[i].spec) for i in ids),
                self._rcache.budget_blocks,
            )
