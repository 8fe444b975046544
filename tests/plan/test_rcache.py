from __future__ import annotations

from random import Random

import pytest

from lightning_elixir.errors import StateError
from lightning_elixir.plan.policy import CachePolicy
from lightning_elixir.plan.rcache import CacheCounters, Decision, RCache
from lightning_elixir.plan.types import AccessTrace, Acquire
from tests.plan.traces import fewest_fetches, random_trace, unpinned


def unit_cache(num_chunks: int, budget: int, depth: int = 0) -> RCache:
    return RCache(dict.fromkeys(range(num_chunks), 1), budget, depth)


def follow(cache: RCache, trace: AccessTrace) -> None:
    """Acquire what the trace acquires, without pins."""
    for event in trace.acquires():
        cache.acquire(event.ids, pin=False)


# The choice of victims


def test_fetches_are_the_fewest_possible() -> None:
    random = Random(2)
    for _ in range(400):
        num_chunks, budget = random.randint(2, 5), random.randint(1, 3)
        accesses = [(random.randrange(num_chunks),) for _ in range(random.randint(1, 14))]
        cache = unit_cache(num_chunks, budget)
        cache.begin(CachePolicy(unpinned(*accesses)))
        follow(cache, unpinned(*accesses))
        assert cache.counters.fetches == fewest_fetches(accesses, budget)
        assert cache.peak_blocks <= budget


def test_fetches_are_the_fewest_possible_over_several_iterations() -> None:
    random = Random(3)
    for _ in range(150):
        num_chunks, budget = random.randint(2, 5), random.randint(1, 3)
        accesses = [(random.randrange(num_chunks),) for _ in range(random.randint(1, 8))]
        cache = unit_cache(num_chunks, budget)
        for _ in range(3):  # nothing is released in between, as in evaluation
            cache.begin(CachePolicy(unpinned(*accesses)))
            follow(cache, unpinned(*accesses))
        assert cache.counters.fetches == fewest_fetches(accesses * 3, budget)


def test_known_count_of_moves() -> None:
    # Each of these fetches is matched by one departure: the twelve moves that Elixir's simulator counts here.
    trace = unpinned(0, (1, 2), 3, 3, (1, 2), 0)
    cache = unit_cache(4, 2)
    cache.begin(CachePolicy(trace))
    follow(cache, trace)
    departures = cache.counters.evictions + len(cache.release(cache.resident))
    assert (cache.counters.fetches, departures) == (6, 6)


def test_without_a_trace_the_least_recently_used_goes() -> None:
    cache = unit_cache(4, 2)
    cache.begin(None)
    follow(cache, unpinned(0, 1, 0))
    assert cache.acquire((2,), pin=False) == Decision(evict=(1,), fetch=(2,))


def test_a_chunk_that_the_trace_never_uses_goes_first() -> None:
    cache = unit_cache(4, 2)
    cache.begin(CachePolicy(unpinned(0, 1, 0)))
    cache.acquire((3,), pin=False, is_traced=False)
    cache.acquire((0,), pin=False)
    assert cache.acquire((1,), pin=False) == Decision(evict=(3,), fetch=(1,))


def test_large_chunks_take_their_blocks() -> None:
    cache = RCache({0: 1, 1: 1, 2: 2}, budget_blocks=3)
    cache.begin(CachePolicy(unpinned(0, 1, 2, 0)))
    follow(cache, unpinned(0, 1))
    assert cache.acquire((2,), pin=False) == Decision(evict=(1,), fetch=(2,))
    assert cache.used_blocks == 3


# Pins, held chunks, the budget


def test_pinned_and_held_chunks_stay() -> None:
    cache = unit_cache(4, 2)
    cache.acquire((0,), pin=True)
    cache.acquire((1,), pin=False)
    decision = cache.acquire((2,), pin=False, held=(1,))
    assert decision == Decision(evict=(), fetch=(2,))
    assert cache.counters.overflows == 1
    assert cache.resident == {0, 1, 2}


def test_an_overflow_is_given_back_at_the_next_access() -> None:
    cache = unit_cache(4, 1)
    cache.acquire((0, 1, 2), pin=True)
    assert cache.used_blocks == cache.peak_blocks == 3
    cache.drop((0, 1, 2))
    assert sorted(cache.acquire((1,), pin=False).evict) == [0, 2]
    assert cache.used_blocks == 1


def test_a_smaller_budget_takes_effect_at_the_next_access() -> None:
    cache = unit_cache(4, 3)
    follow(cache, unpinned(0, 1, 2))
    cache.budget_blocks = 2
    assert cache.acquire((2,), pin=False).evict == (0,)


def test_pins_are_counted() -> None:
    cache = unit_cache(3, 1)
    cache.acquire((0,), pin=True)
    cache.acquire((0,), pin=True)
    cache.drop((0,))
    assert cache.is_pinned(0)
    cache.drop((0,))
    assert not cache.is_pinned(0)
    with pytest.raises(StateError, match="chunk 0 is dropped more often"):
        cache.drop((0,))


def test_a_chunk_named_twice_is_acquired_and_dropped_once() -> None:
    cache = unit_cache(2, 2)
    assert cache.acquire(iter((1, 1)), pin=True).fetch == (1,)
    cache.drop((1, 1))
    assert not cache.is_pinned(1)
    assert cache.release((1, 1)) == (1,)


def test_ids_may_be_any_iterable() -> None:
    cache = unit_cache(2, 2)
    cache.begin(CachePolicy(unpinned((0, 1))))
    cache.acquire(iter((0, 1)), pin=False)
    assert cache.counters.misses_of_trace == 0


def test_releasing_a_pinned_chunk_changes_nothing() -> None:
    cache = unit_cache(3, 3)
    cache.acquire((0,), pin=False)
    cache.acquire((1,), pin=True)
    with pytest.raises(StateError, match="chunk 1 is released while it is pinned"):
        cache.release((0, 1))
    assert cache.resident == {0, 1}
    cache.unpin_all()
    assert cache.release((0, 1, 2)) == (0, 1)


def test_persistent_chunks_are_none_of_its_business() -> None:
    cache = RCache({1: 1}, budget_blocks=1)
    assert cache.acquire((0,), pin=True) == Decision()
    cache.drop((0,))
    assert cache.acquire((0, 1), pin=True) == Decision(fetch=(1,))


# Prefetching


def test_prefetches_the_nearest_absent_chunks() -> None:
    cache = unit_cache(5, 3, depth=2)
    cache.begin(CachePolicy(unpinned(0, 1, 2, 3)))
    cache.acquire((0,), pin=False)
    assert cache.prefetch_candidates((0,)) == (1, 2)
    assert cache.prefetch((1, 2), (0,)) == Decision(fetch=(1, 2))
    assert cache.counters.prefetches == 2
    assert cache.acquire((1,), pin=False) == Decision()  # a hit
    assert cache.counters.hits == 1


def test_prefetch_evicts_only_what_is_needed_later() -> None:
    cache = unit_cache(4, 2, depth=3)
    cache.begin(CachePolicy(unpinned(0, 1, 0, 2, 1)))
    follow(cache, unpinned(0, 1))
    assert cache.prefetch_candidates((1,)) == ()  # 0 is needed before 2
    cache.acquire((0,), pin=False)
    assert cache.prefetch_candidates((0,)) == (2,)
    assert cache.prefetch((2,), (0,)) == Decision(evict=(1,), fetch=(2,))


def test_what_has_gone_since_is_prefetched_again() -> None:
    cache = unit_cache(3, 3, depth=3)
    cache.begin(CachePolicy(unpinned(0, 1, 2, 0, 1, 2)))
    follow(cache, unpinned(0, 1, 2))
    assert cache.prefetch_candidates() == ()  # all of it is there
    cache.release((1,))
    assert cache.prefetch_candidates() == (1,)


def test_prefetch_needs_a_trace_and_a_depth() -> None:
    cache = unit_cache(3, 3, depth=2)
    cache.begin(None)
    assert cache.prefetch_candidates() == ()
    shallow = unit_cache(3, 3, depth=0)
    shallow.begin(CachePolicy(unpinned(0, 1)))
    assert shallow.prefetch_candidates() == ()


def test_prefetch_properties() -> None:
    random = Random(4)
    for _ in range(300):
        num_chunks = random.randint(2, 7)
        costs = {i: random.choice((1, 1, 1, 2)) for i in range(num_chunks) if random.random() < 0.9}
        cache = RCache(costs, random.randint(1, 6), random.randint(1, 4))
        trace = random_trace(random, num_chunks, 25)
        policy = CachePolicy(trace)
        cache.begin(policy)
        position = 0
        for event in trace.events:
            if not isinstance(event, Acquire):
                cache.drop(event.ids)
                continue
            cache.acquire(event.ids, pin=event.is_pinned, held=event.held)
            position += 1
            held = {*event.held, *event.ids}
            candidates = cache.prefetch_candidates(held)
            assert not cache.resident.intersection(candidates)
            assert len(set(candidates)) == len(candidates) <= cache.prefetch_depth
            for chunk_id in candidates:
                before, used = cache.resident, cache.used_blocks
                pinned = {i for i in before if cache.is_pinned(i)}
                decision = cache.prefetch((chunk_id,), held)
                assert cache.resident == (before - {*decision.evict}) | {*decision.fetch}
                assert not {*decision.evict} & ({*held} | pinned)
                assert cache.used_blocks <= max(used, cache.budget_blocks)
                for gone in decision.evict:
                    assert decision.fetch  # nothing is evicted in vain
                    assert policy.next_use(gone, position) > policy.next_use(chunk_id, position)


def test_prefetching_moves_no_more_in_forward_and_backward() -> None:
    for num_chunks in (4, 9, 20):
        there = list(range(num_chunks))
        trace = unpinned(*there, *reversed(there))
        for budget in range(2, num_chunks):
            moved = []
            for depth in (0, 1, 3):
                cache = unit_cache(num_chunks, budget, depth)
                cache.begin(CachePolicy(trace))
                for event in trace.acquires():
                    cache.acquire(event.ids, pin=False)
                    cache.prefetch(cache.prefetch_candidates(event.ids), event.ids)
                moved.append(cache.counters.fetches + cache.counters.prefetches)
            assert moved == [2 * num_chunks - budget] * 3


# Following the trace


def test_left_out_accesses_are_skipped() -> None:
    cache = unit_cache(6, 2, depth=1)
    cache.begin(CachePolicy(unpinned(0, 1, 2, 3, 4, 5)))
    follow(cache, unpinned(0, 2, 3))
    assert cache.counters.misses_of_trace == 1
    assert cache.prefetch_candidates((3,)) == (4,)


def test_left_out_repeats_are_skipped() -> None:
    cache = unit_cache(4, 2, depth=1)
    cache.begin(CachePolicy(unpinned(0, 0, 1, 1, 2, 2, 3)))
    follow(cache, unpinned(0, 1, 2))
    assert cache.prefetch_candidates((2,)) == (3,)


def test_one_access_too_many_in_forward_does_not_lead_into_backward() -> None:
    cache = unit_cache(6, 3, depth=1)
    cache.begin(CachePolicy(unpinned(0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0)))
    follow(cache, unpinned(0, 1, 1, 2))  # 1 again: a sign of backward, or of nothing
    assert cache.counters.misses_of_trace == 1
    assert cache.prefetch_candidates((2,)) == (3,)


def test_untraced_accesses_do_not_move_the_position() -> None:
    cache = unit_cache(4, 3, depth=1)
    cache.begin(CachePolicy(unpinned(0, 1, 2)))
    cache.acquire((1,), pin=False, is_traced=False)
    cache.acquire((0,), pin=False)
    assert cache.counters.misses_of_trace == 0


def test_another_model_altogether_is_served_all_the_same() -> None:
    random = Random(5)
    cache = unit_cache(6, 3, depth=2)
    cache.begin(CachePolicy(unpinned(0, 1, 2)))
    for _ in range(200):
        ids = random.sample(range(6), 2)
        cache.acquire(ids, pin=False)
        cache.prefetch(cache.prefetch_candidates(ids), ids)
        assert {*ids} <= cache.resident
        assert cache.used_blocks <= 3


# Books


def test_counters_add_up() -> None:
    random = Random(6)
    for _ in range(300):
        num_chunks = random.randint(1, 7)
        costs = {i: random.choice((1, 1, 2)) for i in range(num_chunks)}
        cache = RCache(costs, random.randint(1, 6), random.randint(0, 3))
        trace = random_trace(random, num_chunks, 20) if num_chunks > 1 else unpinned(0, 0)
        resident: set[int] = set()
        accesses = hits = overflows = 0

        def obey(decision: Decision, resident: set[int] = resident) -> None:
            assert resident.issuperset(decision.evict)
            resident.difference_update(decision.evict)
            assert resident.isdisjoint(decision.fetch)
            resident.update(decision.fetch)

        released = 0
        for policy in (None, CachePolicy(trace), CachePolicy(trace)):
            cache.begin(policy)
            for event in trace.events:
                if not isinstance(event, Acquire):
                    cache.drop(event.ids)
                    continue
                accesses += 1
                hits += len(resident.intersection(event.ids))
                pinned_or_held = {i for i in resident if cache.is_pinned(i)} | (resident & {*event.held})
                decision = cache.acquire(event.ids, pin=event.is_pinned, held=event.held)
                assert not pinned_or_held.intersection(decision.evict)
                obey(decision)
                is_over = cache.used_blocks > cache.budget_blocks
                overflows += is_over
                if is_over:  # only because nothing more could go
                    assert resident == pinned_or_held | {*event.ids}
                held = {*event.held, *event.ids}
                obey(cache.prefetch(cache.prefetch_candidates(held), held))
                assert cache.resident == resident
                assert cache.used_blocks == sum(costs[i] for i in resident)
            gone = cache.release(sorted(resident))
            released += len(gone)
            resident.difference_update(gone)
        counters = cache.counters
        assert (counters.accesses, counters.hits, counters.overflows) == (accesses, hits, overflows)
        assert counters.fetches + counters.prefetches == counters.evictions + released
        assert counters.misses_of_trace == 0


def test_equal_runs_are_equal() -> None:
    random = Random(7)
    for _ in range(50):
        trace = random_trace(random, 6, 30)
        runs = []
        for _ in range(2):
            cache = unit_cache(6, 3, depth=2)
            cache.begin(CachePolicy(trace))
            decisions = []
            for event in trace.acquires():
                decisions.append(cache.acquire(event.ids, pin=False, held=event.held))
                decisions.append(cache.prefetch(cache.prefetch_candidates(event.ids), event.ids))
            runs.append((decisions, cache.counters))
        assert runs[0] == runs[1]


def test_reset_starts_the_counts_anew() -> None:
    cache = unit_cache(4, 4)
    follow(cache, unpinned(0, 1, 2))
    cache.release((0, 1))
    cache.reset_counters()
    assert cache.counters == CacheCounters()
    assert cache.peak_blocks == 1


# Accesses that find nothing to do


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_short_way_counts_and_decides_as_the_long_one(depth: int) -> None:
    """Two caches follow the same accesses, some of which the trace does not foresee; one tries the short way first."""
    random, num_short = Random(depth), 0
    for _ in range(200):
        num_chunks, budget = random.randint(2, 6), random.randint(2, 6)
        accesses = [(random.randrange(num_chunks),) for _ in range(12) for _ in range(random.randint(1, 3))]
        caches = [unit_cache(num_chunks, budget, depth) for _ in range(2)]
        for cache in caches:
            cache.begin(CachePolicy(unpinned(*accesses)))
        for ids in accesses:
            if random.random() < 0.1:
                ids = (random.randrange(num_chunks),)
            expected = caches[0].acquire(ids, pin=True)
            wanted = caches[0].prefetch_candidates(())
            if caches[1].serve(ids, pin=True):
                num_short += 1
                assert expected == Decision()
                assert wanted == ()
            else:
                assert caches[1].acquire(ids, pin=True) == expected
                assert caches[1].prefetch_candidates(()) == wanted
            for cache in caches:
                cache.prefetch(wanted)
                cache.drop(ids)
            assert caches[0].counters == caches[1].counters
            assert list(caches[0].resident_ids) == list(caches[1].resident_ids)
            assert caches[0].position == caches[1].position
    assert num_short > 500


@pytest.mark.parametrize("depth", [0, 2])
def test_accesses_that_need_no_call_count_and_decide_as_others(depth: int) -> None:
    """Rows of the same access, some longer or shorter than the trace has them: beside one that is called each time."""
    random, num_passed = Random(depth), 0
    for _ in range(200):
        num_chunks, budget = random.randint(2, 6), random.randint(1, 5)
        rows = [random.randrange(num_chunks) for _ in range(8)]
        accesses = [(chunk_id,) for chunk_id in rows for _ in range(random.randint(1, 5))]
        called, short = (unit_cache(num_chunks, budget, depth) for _ in range(2))
        stops = random.sample(range(len(accesses)), 3)
        for cache in (called, short):
            cache.begin(CachePolicy(unpinned(*accesses)))
        short.stop_at(stops)
        granted = -1  # for which chunk
        for ids in accesses:
            if random.random() < 0.1:
                ids = (random.randrange(num_chunks),)
            for _ in range(random.choice((0, 1, 1, 1, 1, 2))):
                is_at_stop = called.position in stops
                expected = called.acquire(ids, pin=False)
                wanted = called.prefetch_candidates(())
                called.prefetch(wanted)
                if short.repeats and granted == ids[0]:
                    short.repeats -= 1
                    num_passed += 1
                    assert (expected, wanted, is_at_stop) == (Decision(), (), False)
                elif short.serve(ids, pin=False):
                    assert (expected, wanted, is_at_stop) == (Decision(), (), False)
                    granted = ids[0] if short.grant(ids[0]) else -1
                else:
                    assert short.is_at_stop() == is_at_stop
                    assert short.acquire(ids, pin=False) == expected
                    assert short.prefetch_candidates(()) == wanted
                    short.prefetch(wanted)
                if random.random() < 0.2:
                    if random.random() < 0.5:  # else a look at the counters ends what was granted
                        short.end_repeats()
                        assert short.repeats == 0
                    assert (short.counters, short.position) == (called.counters, called.position)
                    assert short.repeats == 0
        assert (short.counters, short.position) == (called.counters, called.position)
        assert short.resident == called.resident
    assert num_passed > 500


def test_the_short_way_is_not_taken_above_the_budget() -> None:
    cache = unit_cache(3, 3)
    for chunk_id in range(3):
        cache.acquire((chunk_id,), pin=False)
    assert cache.serve((0,), pin=False)
    cache.budget_blocks = 1
    assert not cache.serve((0,), pin=False)


def test_what_is_remembered_of_prefetching_changes_nothing() -> None:
    """Beside one that looks anew each time: pins, aliases, chunks that stay, a budget that changes, departures."""
    random, num_short, num_full, num_kept = Random(8), 0, 0, 0
    for _ in range(400):
        num_chunks = random.randint(2, 7)
        costs = {i: random.choice((1, 1, 2)) for i in range(num_chunks) if random.random() < 0.85}
        budget, depth = random.randint(1, 5), random.randint(1, 3)
        trace = random_trace(random, num_chunks, 30)
        anew, short = (RCache(costs, budget, depth) for _ in range(2))
        for cache in (anew, short):
            cache.begin(CachePolicy(trace))
        for event in trace.events:
            if not isinstance(event, Acquire):
                for cache in (anew, short):
                    cache.drop(event.ids)
                continue
            ids, held = event.ids, {*event.held, *event.ids}
            if not event.is_pinned and random.random() < 0.05:
                ids = (random.randrange(num_chunks),)
            _forget(anew)
            expected = anew.acquire(ids, pin=event.is_pinned, held=held)
            _forget(anew)
            wanted = anew.prefetch_candidates(())
            num_full += short._full_until > short.position
            if short.serve(ids, pin=event.is_pinned):
                num_short += 1
                assert (expected, wanted) == (Decision(), ())
            else:
                assert short.acquire(ids, pin=event.is_pinned, held=held) == expected
                assert short.prefetch_candidates(()) == wanted
            _forget(anew)
            num_kept += short._after is not None and bool(wanted)
            assert anew.prefetch(wanted, held) == short.prefetch(wanted, held)
            if random.random() < 0.1:
                few = random.sample(range(num_chunks), random.randint(0, num_chunks))
                _forget(anew)
                assert anew.shrink(few) == short.shrink(few)
            assert list(anew.resident_ids) == list(short.resident_ids)
            assert (anew.counters, anew.position) == (short.counters, short.position)
            if random.random() < 0.05:
                anew.budget_blocks = short.budget_blocks = random.randint(1, 5)
    assert num_short > 500
    assert num_full > 500
    assert num_kept > 100


def _forget(cache: RCache) -> None:
    cache._settled_until = cache._there_until = cache._full_until = 0
    cache._absent, cache._after = -1, None


def test_what_ranks_could_not_agree_on_is_proposed_again_when_something_else_is() -> None:
    cache = RCache(dict.fromkeys(range(4), 1), 2, prefetch_depth=1)
    cache.begin(CachePolicy(unpinned(0, 0, 0, 1, 1, 2)))
    cache.acquire((0,), pin=False)
    assert cache.proposals((0,), is_meeting=False) == (1,)
    cache.acquire((0,), pin=False)
    assert cache.prefetch_candidates((0,)) == (1,)
    assert cache.proposals((0,), is_meeting=False) == ()  # a message at every access would say the same
    assert cache.proposals((0,), is_meeting=True) == (1,)
    cache.acquire((0,), pin=False)
    assert cache.proposals((0,), is_meeting=False) == ()
    cache.acquire((1,), pin=False)
    assert cache.proposals((1,), is_meeting=False) == (2,)
    cache.begin(CachePolicy(unpinned(1, 2)))
    cache.acquire((1,), pin=False)
    assert cache.proposals((1,), is_meeting=False) == (2,)  # another iteration
