"""The rCache: which replicas are resident, under a budget of blocks. Pure bookkeeping.

The runtime and the simulator drive this same class, so predicted and real counters are equal.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Container, Iterable, KeysView, Mapping, Sequence
from dataclasses import asdict, dataclass

from lightning_elixir.errors import StateError
from lightning_elixir.plan.policy import CachePolicy, Turns
from lightning_elixir.plan.types import Plan

# How far ahead of the expected position an unexpected access is looked for in the trace, and how far behind the place
# where it was found the one after it.
_RESYNC_WINDOW = 64
_CONFIRM_WINDOW = 8


@dataclass(frozen=True)
class Decision:
    """What to do at one access, in this order: release `evict`, then fetch `fetch`."""

    evict: tuple[int, ...] = ()
    fetch: tuple[int, ...] = ()


_NOTHING = Decision()


@dataclass(frozen=True)
class CacheCounters:
    """Counts since the last reset."""

    accesses: int = 0
    hits: int = 0
    fetches: int = 0
    """Fetches on demand: the chunk was not there when it was needed."""
    prefetches: int = 0
    evictions: int = 0
    overflows: int = 0
    """Accesses that needed more blocks than the budget because everything resident was in use."""
    misses_of_trace: int = 0
    """Accesses that the recorded trace did not foresee."""


class RCache:
    """Bookkeeping of resident replicas.

    Args:
        cost_blocks: Blocks that each managed (non-persistent) chunk takes when resident.
        budget_blocks: Blocks available; may be changed at any time. More are used only where an access cannot be served
            otherwise.
        prefetch_depth: How many chunks ahead `prefetch_candidates` looks; 0 for none.
    """

    def __init__(self, cost_blocks: Mapping[int, int], budget_blocks: int, prefetch_depth: int = 0) -> None:
        self.cost_blocks = dict(cost_blocks)
        self.budget_blocks = budget_blocks
        self.prefetch_depth = prefetch_depth
        self._resident: dict[int, int] = {}  # chunk id -> time of last use, in order of arrival
        self._pins: dict[int, int] = {}
        self._used_blocks = 0
        self._clock = 0
        self._policy: CachePolicy | None = None
        self._turns: Turns | None = None  # of the policy's trace, to the chunks that come and go
        self._last: tuple[CachePolicy, Turns] | None = None  # of the last iteration with a trace
        self._position = 0
        self._next_uses: dict[int, int] = {}  # as far as they were asked for; those before `_position` are past
        self._suspected: int | None = None  # where the trace goes on if the last, unexpected access was a leap
        # What `_needed_after` has found last, and for which position: while nothing comes, goes, or is used or dropped.
        self._after: tuple[int, list[tuple[int, int]]] | None = None
        self._proposed: tuple[int, ...] = ()  # to other ranks, last
        self._settled_until = 0  # before this position there is nothing to prefetch, unless something goes
        self._there_until = 0  # what the trace uses before this position is resident
        self._absent = -1  # what it uses there, and is not; -1: that is not known
        # Before this position this budget has no room to prefetch, unless something comes, goes or is dropped.
        self._full_until = 0
        self._full_budget = 0
        self._stops: Sequence[int] = ()  # positions, few, at which `serve` serves nothing, ascending
        self.repeats = 0
        """How many more accesses of just the one chunk that `grant` was called for need no call. For each that comes,
        one is taken off here, and it counts as `serve` would have counted it. 0 once anything else is called."""
        self._granted = 0  # `repeats` at first
        self.peak_blocks = 0
        self._counts: dict[str, int] = asdict(CacheCounters())

    @classmethod
    def of(cls, plan: Plan, *, has_prefetch: bool = True) -> RCache:
        """An empty one, as a plan has it.

        Args:
            plan: Whose chunks that come and go it manages.
            has_prefetch: False: chunks are fetched on demand only, whatever the plan's depth.
        """
        cost_blocks = {c.id: plan.blocks_of(c.id) for c in plan.chunks if not c.is_persistent}
        return cls(cost_blocks, plan.rcache_blocks, plan.prefetch_depth if has_prefetch else 0)

    # Queries

    @property
    def counters(self) -> CacheCounters:
        """Counts since the last reset."""
        self._catch_up()
        return CacheCounters(**self._counts)

    @property
    def overflows(self) -> int:
        """One of the counters, by itself: it is read at every access, and `counters` copies them all."""
        return self._counts["overflows"]

    @property
    def resident(self) -> frozenset[int]:
        return frozenset(self._resident)

    @property
    def resident_ids(self) -> KeysView[int]:
        """Live view of what is resident, without a copy."""
        return self._resident.keys()

    @property
    def used_blocks(self) -> int:
        return self._used_blocks

    @property
    def position(self) -> int:
        """How many accesses of the trace have been met, or passed over."""
        self._catch_up()
        return self._position

    def is_pinned(self, chunk_id: int) -> bool:
        return self._pins.get(chunk_id, 0) > 0

    # Events

    def begin(self, policy: CachePolicy | None) -> None:
        """Start an iteration that is expected to follow `policy`'s trace; None: nothing is known."""
        if policy is not None and (self._last is None or self._last[0] is not policy):
            self._last = policy, policy.turns_of(self.cost_blocks)
        self._catch_up()
        self._stops = ()
        self._turns = None if policy is None or self._last is None else self._last[1]
        self._policy = policy
        self._position = 0
        self._next_uses = {}
        self._suspected = self._after = None
        self._settled_until = self._there_until = self._full_until = 0
        self._absent = -1
        self._proposed = ()

    def acquire(self, ids: Iterable[int], *, pin: bool, held: Container[int] = (), is_traced: bool = True) -> Decision:
        """Make `ids` resident.

        Args:
            ids: Chunks needed now.
            pin: Keep them until a matching `drop`.
            held: Resident chunks that must not be evicted now, pinned or not. Asked only of what would go.
            is_traced: Whether this access belongs to the iteration that the trace describes.

        Returns:
            What to evict and fetch. The chunks count as resident from here on.
        """
        self._catch_up()
        ids = tuple(ids)
        needed = tuple(dict.fromkeys([i for i in ids if i in self.cost_blocks]))
        if is_traced:
            self._advance(ids)
        missing = tuple([i for i in needed if i not in self._resident])
        counts = self._counts
        evict: tuple[int, ...] = ()
        if missing or self._used_blocks > self.budget_blocks:
            room = sum([self.cost_blocks[i] for i in missing])
            evict = self._make_room(room, needed, held)
            if self._used_blocks + room > self.budget_blocks:
                counts["overflows"] += 1
            for chunk_id in missing:
                self._add(chunk_id)
        self._use(needed, pin)
        counts["accesses"] += 1
        counts["hits"] += len(needed) - len(missing)
        if not missing and not evict:
            return _NOTHING
        counts["fetches"] += len(missing)
        counts["evictions"] += len(evict)
        return Decision(evict, missing)

    def serve(self, ids: tuple[int, ...], *, pin: bool) -> bool:
        """`acquire` and `prefetch_candidates` where they find nothing to do, as nearly always, at a fraction of their
        cost.

        Args:
            ids: Each once.

        Returns:
            Whether it was so. If not, nothing has changed.
        """
        if self._granted:
            self._catch_up()
        policy, position, resident = self._policy, self._position, self._resident
        if self._used_blocks > self.budget_blocks:
            return False
        has_others = False
        for chunk_id in ids:
            if chunk_id not in resident:
                if chunk_id in self.cost_blocks:
                    return False
                has_others = True
        if policy is not None:
            accesses = policy.accesses
            if position >= len(accesses) or ids != accesses[position] or position in self._stops:
                return False
            position += 1
            is_settled = not self.prefetch_depth or position < self._settled_until or not self._lacks_ahead(position)
            if not is_settled and not self._is_full(position, ids, pin, policy):
                return False
            self._position = position
            self._suspected = None
        if has_others:
            ids = tuple([i for i in ids if i in resident])
        counts = self._counts
        counts["accesses"] += 1
        counts["hits"] += len(ids)
        # As `_use` does.
        self._clock += 1
        self._after = None
        for chunk_id in ids:
            resident[chunk_id] = self._clock
            if pin:
                self._pins[chunk_id] = self._pins.get(chunk_id, 0) + 1
        return True

    def grant(self, chunk_id: int) -> int:
        """After `serve` has served this one chunk without a pin: what `repeats` begins with. That many accesses of the
        same come next in the trace, and `serve` would find nothing to do at any of them."""
        policy, position = self._policy, self._position
        if policy is None or chunk_id not in self._resident:
            return 0
        until = policy.same_until(position, (chunk_id,))
        if self.prefetch_depth:
            full_until = self._full_until if self.budget_blocks == self._full_budget else 0
            until = min(until, max(self._settled_until, full_until) - 1)
        if self._stops:
            until = min([until, *self._stops[bisect_left(self._stops, position) :][:1]])
        self.repeats = self._granted = max(0, until - position)
        return self.repeats

    def end_repeats(self) -> None:
        """Further accesses need a call again."""
        self._catch_up()

    def _catch_up(self) -> None:
        """Count the accesses that came without a call."""
        passed = self._granted - self.repeats
        self.repeats = self._granted = 0
        if passed:
            self._position += passed
            self._counts["accesses"] += passed
            self._counts["hits"] += passed
            self._after = None

    def stop_at(self, positions: Collection[int]) -> None:
        """Have `serve` serve nothing at these accesses of the trace, where something else is to be done as well; until
        the next `begin`."""
        self._catch_up()
        self._stops = sorted(positions)

    def is_at_stop(self) -> bool:
        """Whether the next access is one of those."""
        self._catch_up()
        return self._position in self._stops

    def drop(self, ids: Iterable[int]) -> None:
        """Undo the pins of one `acquire`. The chunks stay resident and become evictable."""
        if self._granted:
            self._catch_up()
        pins = self._pins
        for chunk_id in dict.fromkeys(ids):  # `acquire` pins each once
            if chunk_id not in self.cost_blocks:
                continue
            count = pins.get(chunk_id, 0)
            if count == 0:
                raise StateError(f"chunk {chunk_id} is dropped more often than it was acquired")
            if count == 1:
                del pins[chunk_id]
                self._full_until, self._after = 0, None
            else:
                pins[chunk_id] = count - 1

    def _may_prefetch(self, position: int) -> bool:
        """Whether `prefetch_candidates` may find anything at `position`."""
        is_full = position < self._full_until and self.budget_blocks == self._full_budget
        return position >= self._settled_until and not is_full

    def _lacks_ahead(self, position: int) -> bool:
        """Whether `prefetch_candidates` may find anything at `position`; if not, it need not be asked for a while."""
        turns, resident = self._turns, self._resident
        if turns is None or not self._may_prefetch(position):
            return False
        if self._absent < 0 or position > self._there_until:
            depth, known = self.prefetch_depth, self._there_until
            self._absent, self._there_until, self._settled_until = turns.first_absent(position, known, depth, resident)
        return position >= self._settled_until

    def _is_full(self, position: int, ids: tuple[int, ...], pin: bool, policy: CachePolicy) -> bool:
        """After `_lacks_ahead` has found something at `position`, behind an access of `ids`: whether that has no room,
        and nothing that is needed later can go."""
        if self._used_blocks + self.cost_blocks[self._absent] <= self.budget_blocks:
            return False
        at, pins, next_uses = self._there_until, self._pins, self._next_uses
        for chunk_id in self._resident:
            if chunk_id in pins or (pin and chunk_id in ids):
                continue
            use = next_uses.get(chunk_id, -1)
            if use < position:
                use = policy.next_use(chunk_id, position)
                if chunk_id not in ids:  # else it is needed before
                    next_uses[chunk_id] = use
            if use > at:
                return False
        if self._turns is not None:
            self._full_until, self._full_budget = self._turns.same_uses_until(position), self.budget_blocks
        return True

    def prefetch_candidates(self, held: Container[int] = ()) -> tuple[int, ...]:
        """Chunks worth fetching now, nearest use first: the next `prefetch_depth` absent chunks of the trace for which
        there is room, or a resident chunk that is needed later than they are. Changes nothing."""
        self._catch_up()
        turns, position, resident = self._turns, self._position, self._resident
        if turns is None or self.prefetch_depth == 0 or not self._lacks_ahead(position):
            return ()
        ahead = turns.upcoming(position, self.prefetch_depth)
        absent = [(at, chunk_id) for chunk_id, at in ahead.items() if chunk_id not in resident]
        free = self.budget_blocks - self._used_blocks
        victims: list[tuple[int, int]] | None = None
        found: list[int] = []
        for at, chunk_id in absent:
            free -= self.cost_blocks[chunk_id]
            if free < 0 and victims is None:
                victims = sorted(self._needed_after(at))  # what is absent beside this comes later
                if not victims and not found:
                    self._full_until, self._full_budget = turns.same_uses_until(position), self.budget_blocks
                    return ()
            while free < 0 and victims and victims[-1][0] > at:
                victim = victims.pop()[1]
                free += 0 if victim in held else self.cost_blocks[victim]
            if free < 0:
                break
            found.append(chunk_id)
        return tuple(found)

    def proposals(self, held: Container[int] = (), *, is_meeting: bool) -> tuple[int, ...]:
        """As `prefetch_candidates`, where several ranks fetch together what all of them propose: nothing where the same
        was proposed last, since a rank could not have it then, and a message at every access costs more than it gives.

        Args:
            is_meeting: The ranks tell each other something in any case.
        """
        found = self.prefetch_candidates(held)
        if not is_meeting and found == self._proposed:
            return ()
        self._proposed = found
        return found

    def prefetch(self, ids: Iterable[int], held: Container[int] = ()) -> Decision:
        """Admit `ids`, in order, as far as there is room without evicting what is needed sooner."""
        self._catch_up()
        fetch: list[int] = []
        evict: list[int] = []
        for chunk_id in ids:
            if chunk_id in self._resident or chunk_id not in self.cost_blocks:
                continue
            at = self._next_use(chunk_id)
            released = self._make_room(self.cost_blocks[chunk_id], fetch, held, needed_at=at)
            evict.extend(released)
            if self._used_blocks + self.cost_blocks[chunk_id] > self.budget_blocks:
                break
            self._add(chunk_id)
            self._resident[chunk_id] = self._clock
            fetch.append(chunk_id)
        self._counts["prefetches"] += len(fetch)
        self._counts["evictions"] += len(evict)
        return Decision(tuple(evict), tuple(fetch))

    def release(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Forget `ids` (their replicas are outdated or no longer wanted); returns those that were resident."""
        self._catch_up()
        gone = tuple(i for i in dict.fromkeys(ids) if i in self._resident)
        for chunk_id in gone:
            if self.is_pinned(chunk_id):
                raise StateError(f"chunk {chunk_id} is released while it is pinned")
        for chunk_id in gone:
            self._remove(chunk_id)
        return gone

    def shrink(self, held: Container[int] = ()) -> tuple[int, ...]:
        """Give up what is above the budget, as far as it can go, the furthest next use first; returns it."""
        self._catch_up()
        evict = self._make_room(0, (), held)
        self._counts["evictions"] += len(evict)
        return evict

    def unpin_all(self) -> None:
        """Forget all pins (after an exception in the middle of an iteration)."""
        self._catch_up()
        self._pins.clear()
        self._full_until, self._after = 0, None

    def reset_counters(self) -> None:
        self._catch_up()
        self._counts = asdict(CacheCounters())
        self.peak_blocks = self._used_blocks

    # Internals

    def _advance(self, ids: tuple[int, ...]) -> None:
        """Follow the trace. An access that is not the expected one counts as a miss; it may be one too many (stay) or
        the first after some that were left out (go on there): the next access tells. Believing the first sign would,
        after one access too many in forward, go on at the same chunk's access in backward."""
        policy, self._after = self._policy, None
        if policy is None:
            return
        if ids == policy.access(self._position):
            self._position += 1
            self._suspected = None
            return
        if self._suspected is not None:
            found = policy.find(ids, self._suspected, _CONFIRM_WINDOW)
            if found is not None:
                self._position = found + 1
                self._suspected = None
                return
        self._counts["misses_of_trace"] += 1
        found = policy.find(ids, self._position, _RESYNC_WINDOW)
        self._suspected = None if found is None else found + 1

    def _next_use(self, chunk_id: int) -> int:
        at = self._next_uses.get(chunk_id, -1)
        if at < self._position:
            at = 0 if self._policy is None else self._policy.next_use(chunk_id, self._position)
            self._next_uses[chunk_id] = at
        return at

    def _needed_after(self, at: int) -> list[tuple[int, int]]:
        """(next use, chunk id) of the resident chunks that are not pinned and that nothing needs until after `at`, in
        order of arrival."""
        if self._after is not None and self._after[0] == at:
            return self._after[1]
        found: list[tuple[int, int]] = []
        pins, next_uses, position = self._pins, self._next_uses, self._position
        for chunk_id in self._resident:
            if chunk_id not in pins:
                use = next_uses.get(chunk_id, -1)
                if use < position:
                    use = self._next_use(chunk_id)
                if use > at:
                    found.append((use, chunk_id))
        self._after = at, found
        return found

    def _make_room(
        self, blocks: int, kept: Container[int], held: Container[int], needed_at: int | None = None
    ) -> tuple[int, ...]:
        """Evict until `blocks` fit, or nothing more may go: of what is neither in `kept` nor in `held`, which takes
        longer to ask. With `needed_at`, only what is used later than that, and only if enough of it can go."""
        lacking = self._used_blocks + blocks - self.budget_blocks
        if lacking <= 0:
            return ()
        candidates = self._needed_after(-1 if needed_at is None else needed_at)
        if not candidates:
            return ()
        furthest = max(candidates)[0]
        last = [c for c in candidates if c[0] == furthest]
        if len(last) > 1 or self.cost_blocks[last[0][1]] < lacking or last[0][1] in kept or last[0][1] in held:
            candidates = sorted(candidates, key=lambda c: (-c[0], self._resident[c[1]]))  # of equals, the least recent
        else:  # as mostly
            candidates = last
        chosen: list[int] = []
        for _, chunk_id in candidates:
            if lacking <= 0:
                break
            if chunk_id in kept or chunk_id in held:
                continue
            chosen.append(chunk_id)
            lacking -= self.cost_blocks[chunk_id]
        if needed_at is not None and lacking > 0:
            return ()
        for chunk_id in chosen:
            self._remove(chunk_id)
        return tuple(chosen)

    def _use(self, ids: Iterable[int], pin: bool) -> None:
        """Each of these resident chunks once."""
        self._clock += 1
        self._after = None
        for chunk_id in ids:
            self._resident[chunk_id] = self._clock
            if pin:
                self._pins[chunk_id] = self._pins.get(chunk_id, 0) + 1

    def _add(self, chunk_id: int) -> None:
        if chunk_id == self._absent:
            self._absent = -1
        self._full_until, self._after = 0, None
        self._resident[chunk_id] = self._clock
        self._used_blocks += self.cost_blocks[chunk_id]
        self.peak_blocks = max(self.peak_blocks, self._used_blocks)

    def _remove(self, chunk_id: int) -> None:
        self._full_until, self._after = 0, None
        use = self._next_use(chunk_id)
        if use <= self._there_until:
            self._there_until, self._settled_until, self._absent = use, 0, -1
        del self._resident[chunk_id]
        self._used_blocks -= self.cost_blocks[chunk_id]
