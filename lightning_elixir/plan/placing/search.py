"""The search: chunk size, rCache, tiers and update sites with the least predicted step time within the limits.

Every candidate is a whole plan that is simulated (`plan/simulator/timeline.py`), so that what is compared is what the
runtime would do. Candidates come from a grid of shares and a climb from its best point: how many chunks keep everything
on the GPU, how many only their parameters, which ones, how many of the host's updates are streamed to the GPU, and how
far ahead chunks are fetched. In the best, chunks are moved between host and stream one by one, as both should end at
the same time. The rCache takes what memory is left. To the predicted time comes what the host has to issue
(`Outcome.felt_s`), a few percent at most, so that fewer moves win; of placements as fast, the one that a faster host
would serve best. Everything is deterministic.

Where updates need the norm of all gradients, plans with spare states for as many chunks as the host has memory for are
searched first; in the fastest of these, other chunks and fewer are tried, down to none (`spares.py`), and other
placements beside them. Plans without follow where these bring nothing (`fallbacks.py`). With several ranks, parameters
that every rank keeps on the device while their states are on the host wait in the step, so the search keeps shards on
the device where updates overlap (`Space.kept`). Nothing is random or timed, so equal inputs give equal plans, on
rank 0, which shares them; a test compares them with every placement of small models.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from typing import overload

from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.describe import describe_placement
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.memory import Budget, MemoryUse
from lightning_elixir.plan.placing.fallbacks import SAME, plan_with_fallbacks
from lightning_elixir.plan.placing.fates_tried import FatesTried, with_alternatives
from lightning_elixir.plan.placing.placement import OFFLOADED, RESIDENT, Layout, Site, sites_of
from lightning_elixir.plan.placing.refusals import gpu_refusal, host_refusal
from lightning_elixir.plan.placing.space import (
    PATTERNS,
    SHARDED,
    SHARDED_PARAMS,
    Candidate,
    Choice,
    Outcome,
    Space,
    is_all_on_gpu,
    rank,
)
from lightning_elixir.plan.placing.spares import SPARE_PATTERNS
from lightning_elixir.plan.problem import Problem
from lightning_elixir.plan.profile import StepProfile
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.simulator.timeline import Timeline, is_time_known, plan_use, scheme_of, simulate_step
from lightning_elixir.plan.tables import Table
from lightning_elixir.plan.types import Alternative, Forecast, Plan, Tier, UpdateTiming
from lightning_elixir.plan.units import format_bytes, format_seconds

_NUM_ALTERNATIVES = 6
# A climb tries about twenty neighbours a round; more than a few rounds bring nothing.
_MOST_ROUNDS = 6
_MOST_SIMULATIONS = 80
_MOST_CLIMBING = 20  # from what is good elsewhere
# Where chunks are few, each weighs much and they differ in size: then chunks are also moved and exchanged one by one.
_FEW_CHUNKS = 16
_VERY_FEW_CHUNKS = 6
_NUM_STARTS = 3
_GUESS_ERROR = 0.02  # guessed times that are no further apart do not tell which chunk size is faster
_AHEAD = 5e-3  # part of the step that it may cost to fetch further ahead
_AS_FAST = 0.01  # placements that are no further apart are compared by what they take with a faster host
_MOST_AS_FAST = 16  # at most so many
_MOST_REFINEMENTS = 400
_MOST_SIZES_WITH_FATES = 3  # chunk sizes for which fates of activations are searched; each takes a second or two
_MOST_BALANCING = 32  # simulations to find out how many chunks to stream, to a chunk
_MOST_SPARE_COUNTS = 32  # numbers of chunks with spare states to choose from
_SPARE_COUNTS_APART = 4  # of these, every so manieth is tried first


def search(candidates: Sequence[Candidate], problem: Problem) -> Plan:
    """The fastest plan that fits, or one that is about as fast and waits for less, with its forecast.

    Args:
        candidates: Chunk sizes to choose from; the first is searched most thoroughly.
        problem: Limits, hardware and what training does.

    Raises:
        PlanError: An option out of its range, no candidate, or NVMe space without figures of its speed.
        CapacityError: No placement fits; the message names the binding limit and the nearest change that fits.
    """
    problem.check()
    if not candidates:
        raise PlanError("there is no chunk size to search")
    if problem.budget.nvme_bytes and problem.hardware.nvme_adam_numel_per_s is None:
        raise PlanError(
            f"states may take {format_bytes(problem.budget.nvme_bytes)} of NVMe, but how fast it is was not measured"
            ": run `lightning-elixir bench-hardware --nvme-dir FOLDER`"
        )
    return plan_with_fallbacks(problem, partial(_searched, candidates), is_choosing=True)


def _searched(candidates: Sequence[Candidate], problem: Problem) -> Plan:
    make = _Searches(problem)
    tried = _fates_tried(candidates[0], make)
    searches, found = _of_each_size(_with_fates(candidates, tried), make)
    if not found:
        raise min((one.refusal() for one in searches), key=distance)
    outcome, one = _of_sizes(found, is_time_guessed=problem.is_time_guessed)
    if problem.serves_to_build:
        return one.plan_of(outcome, [])
    outcome = one.refined(outcome)
    if tried and not one.is_least(outcome):
        outcome, one, tried = _with_fates_of_its_own(candidates, (outcome, one, tried), found, make)
        searches.append(one)
    outcome = one.fetching_ahead(one.waiting_least(one.balanced(one.with_best_spares(outcome))))
    plan = one.plan_of(outcome, [(s, o) for s in searches for o in s.outcomes.values()])
    return plan if plan.forecast is None else with_alternatives(plan, tried)


class _Searches:
    """Makes searches for a problem. Those among placements of the same chunks share what does not depend on the fates
    of activations."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._like: dict[int, _LayoutSearch] = {}  # by `id` of the layout, which the search keeps

    def __call__(self, candidate: Candidate) -> _LayoutSearch:
        one = _LayoutSearch(candidate, self.problem, self._like.get(id(candidate.layout)))
        self._like.setdefault(id(candidate.layout), one)
        return one


def _of_each_size(
    candidates: Sequence[Candidate], make: _Searches
) -> tuple[list[_LayoutSearch], list[tuple[Outcome, _LayoutSearch]]]:
    """The searches of all chunk sizes, and the best outcome of each with which anything fits."""
    different: dict[Layout, Candidate] = {}  # some sizes come to the same chunks
    for candidate in candidates:
        different.setdefault(candidate.layout, candidate)
    searches = [make(c) for c in different.values()]
    found: list[tuple[Outcome, _LayoutSearch]] = []
    for one in searches:
        fastest = min(found, key=lambda pair: pair[0].felt_s, default=None)
        outcome = one.best(fastest and fastest[1].relative(fastest[0].choice))
        if outcome is None:
            continue
        found.append((outcome, one))
        if one.is_least(outcome):
            break
    return searches, found


def _fates_tried(candidate: Candidate, make: _Searches, earlier: Sequence[FatesTried] = ()) -> tuple[FatesTried, ...]:
    """The fates of activations that were looked at with such chunks, the best first; none where there is no choice.

    Args:
        candidate: The chunks, and what a step does.
        make: Makes searches.
        earlier: Those that were looked at with chunks of another size.
    """
    if candidate.with_fates is None:
        return ()
    names = [block.name for block in make.problem.blocks]
    best: list[tuple[float, Choice]] = []  # to start from with other fates
    searches = Table[Candidate, _LayoutSearch](make)
    starts = Table[_LayoutSearch, Outcome | None](
        lambda one: one.start(best[0][1] if best else None, is_of_other_fates=True)
    )

    def seconds_of(looked: _LayoutSearch, outcome: Outcome | None) -> float:
        if outcome is None:
            return math.inf
        if not best or outcome.felt_s < best[0][0]:
            best[:] = [(outcome.felt_s, looked.relative(outcome.choice))]
        return outcome.felt_s

    def first_seconds(one: Candidate) -> float:
        looked = searches(one)
        return seconds_of(looked, starts(looked))

    def seconds(one: Candidate) -> float:
        looked = searches(one)
        start = starts(looked)
        return seconds_of(looked, None if start is None else looked.climbed(start))

    num_backwards = make.problem.regime.num_backwards
    return FatesTried.all_of(candidate.with_fates, names, seconds, num_backwards, first_seconds, earlier)


def _with_fates_of_its_own(
    candidates: Sequence[Candidate],
    best: tuple[Outcome, _LayoutSearch, tuple[FatesTried, ...]],
    found: Sequence[tuple[Outcome, _LayoutSearch]],
    make: _Searches,
) -> tuple[Outcome, _LayoutSearch, tuple[FatesTried, ...]]:
    """The best outcome, its search, and the fates that were looked at for it, when the sizes that came nearest have
    fates that suit their own chunks: those that suit the first size may be far from the best of another."""
    of_layout, earlier = {c.layout: c for c in reversed(candidates)}, best[2]
    for _, near in sorted(found, key=lambda pair: pair[0].felt_s)[:_MOST_SIZES_WITH_FATES]:
        if near.layout == candidates[0].layout:
            continue
        tried = _fates_tried(of_layout[near.layout], make, earlier)
        one = make(_with_fates([of_layout[near.layout]], tried)[0])
        outcome = one.best(None)
        if outcome is not None:
            best = min(best, (one.refined(outcome), one, tried), key=lambda known: known[0].felt_s)
    return best


def _with_fates(candidates: Sequence[Candidate], tried: Sequence[FatesTried]) -> Sequence[Candidate]:
    """The same with the best of these fates."""
    return [c if c.with_fates is None or not tried else c.with_fates(tried[0].blocks) for c in candidates]


def _of_sizes(
    found: Sequence[tuple[Outcome, _LayoutSearch]], *, is_time_guessed: bool
) -> tuple[Outcome, _LayoutSearch]:
    """Which chunk size to take, from the best placement with each: the fastest. Where times are guessed, the middle one
    of those that may be: small chunks fill memory and share out updates more evenly, and each gives the program more to
    do, above all in steps that wait for a norm. (Seen with such steps on two H200s, Llama-7B at 40 GiB: the program
    between steps takes 84 ms with 67 chunks, 151 ms with 162.)"""
    least_s = min(outcome.felt_s for outcome, _ in found) * (1 + 1e-9)
    best = next(pair for pair in found if pair[0].felt_s <= least_s)
    if found[-1][1].is_least(found[-1][0]):  # the search ends there
        return found[-1]
    if not is_time_guessed:
        return best
    by_size = sorted(found, key=lambda pair: pair[1].layout.block_bytes)
    close = [pair for pair in by_size if pair[0].felt_s <= least_s * (1 + _GUESS_ERROR)]
    return close[len(close) // 2]


def distance(refusal: CapacityError) -> tuple[bool, int]:
    """How far a chunk size is from fitting, to compare it with others: what the GPU lacks, another size may do without;
    where the GPU has enough, the host is what is left."""
    return refusal.resource != "host", refusal.lacking_bytes or 0


def with_forecast(
    plan: Plan,
    profile: StepProfile,
    hardware: HardwareSpec,
    regime: TrainingRegime,
    budget: Budget,
    *,
    binding: str | None = None,
) -> Plan:
    """A plan that was not searched for, with what the simulation expects of it; without that, where it has states on a
    disk that was not measured, or nothing is known of a step but its memory.

    Args:
        binding: See `Forecast.binding`; None: its policy.
    """
    if not is_time_known(plan, hardware) or not profile.trace.events:
        return plan
    timeline = simulate_step(plan, profile, hardware, scheme_of(plan, regime))
    binding = binding or f'the placement policy "{plan.policy}", which leaves nothing to search'
    return replace(plan, forecast=_forecast(timeline, plan_use(plan, regime), budget, binding, hardware.name))


def _forecast(timeline: Timeline, use: MemoryUse, budget: Budget, binding: str, hardware: str) -> Forecast:
    """What a plan that takes this promises within a budget."""
    timeline = timeline.within(budget.gpu_bytes)
    return Forecast(
        times=timeline.times,
        peak_gpu_bytes=timeline.peak_gpu_bytes,
        margin_bytes=timeline.margin_bytes,
        gpu_kinds=timeline.gpu_kinds,
        gpu_limit_bytes=budget.gpu_bytes,
        host_bytes=use.host_bytes,
        host_limit_bytes=budget.cpu_bytes,
        binding=binding,
        hardware=hardware,
    )


class _LayoutSearch(Space):
    """The search among placements of one layout."""

    def is_least(self, outcome: Outcome) -> bool:
        """Whether no chunk size makes that faster: everything is on the GPU, and no other fates would compute less."""
        return outcome.choice == self.everything and not self.could_compute_less

    # The climb

    def best(self, seed: Choice | None) -> Outcome | None:
        """The fastest outcome; None if nothing fits.

        Args:
            seed: The best choice of another layout, as shares of a thousand, to start from instead of the grid.
        """
        start = self.start(seed)
        if start is None or start.choice == self.everything or self.problem.serves_to_build:
            return start
        if seed is not None:
            return self.climbed(start)
        found = self._climbed(start, _MOST_SIMULATIONS)
        other = self._best_of(self._filled(start.choice.depth, "spread"), None)
        return found if other is None else min(found, self.climbed(other), key=rank)

    def start(self, seed: Choice | None, *, is_of_other_fates: bool = False) -> Outcome | None:
        """An outcome to climb from; None if nothing fits.

        Args:
            seed: As for `best`.
            is_of_other_fates: The seed is the best beside other activations.
        """
        everything = self.look(self.everything)
        if everything.times is not None:
            self.look(Choice(kept=len(self.layout.packed), streamed_share=self._balanced_share()))
            return everything
        starts = list(self._grid() if seed is None else self._near(seed))
        if seed is not None and is_of_other_fates:
            starts += self._filled(seed.depth)
        best = self._best_of(starts, None)
        if best is None:
            depth = self._depths()[-1]
            best = self._best_of((replace(c, depth=depth) for c in (self._least_gpu(), self._least_host())), None)
        return best

    def climbed(self, start: Outcome) -> Outcome:
        """The best that a short climb from there leads to."""
        if start.choice == self.everything:
            return start
        return self._climbed(start, self.num_simulations + _MOST_CLIMBING)

    @overload
    def _best_of(self, choices: Iterable[Choice], best: Outcome, most: float = ...) -> Outcome: ...

    @overload
    def _best_of(self, choices: Iterable[Choice], best: None, most: float = ...) -> Outcome | None: ...

    def _best_of(self, choices: Iterable[Choice], best: Outcome | None, most: float = math.inf) -> Outcome | None:
        """The fastest of these and `best`, of equals the first; until there have been so many simulations. None: there
        is none that fits."""
        for choice in choices:
            if self.num_simulations >= most:
                break
            outcome = self.glimpse(choice, math.inf if best is None else best.felt_s)
            if outcome.times is not None and (best is None or rank(outcome) < rank(best)):
                best = outcome
        return best

    def _climbed(self, best: Outcome, most: int) -> Outcome:
        """The best that neighbours lead to, until there have been so many simulations."""
        step = max(1, len(self.layout.packed) // 8)
        for _ in range(_MOST_ROUNDS):
            better = self._best_of(self._neighbours(best.choice, step), best, most)
            if better is best and step == 1:
                break
            if better is best:
                step = max(1, step // 4)
            best = better
        return best

    def refined(self, outcome: Outcome) -> Outcome:
        """The fastest that is reached by moving single chunks and exchanging two, where chunks are few.

        Begins at the fastest placement of every number of chunks with states on the GPU: what is best for another
        number may be many moves away.
        """
        if len(self.layout.packed) > _FEW_CHUNKS or outcome.choice == self.everything:
            return outcome
        starts: dict[int, Outcome] = {}
        for known in sorted(map(self.look, list(self.outcomes)), key=rank):
            if known.times is not None:
                starts.setdefault(sum(c.optim_tier is Tier.GPU for c in known.chunks), known)
        ordered = sorted(starts.values(), key=rank)[:_NUM_STARTS]
        most = self.num_simulations + _MOST_REFINEMENTS
        for start in ordered:
            best = start
            while self.num_simulations < most:
                better = self._best_of(self._one_by_one(best.choice), best, most)
                if better is best:
                    break
                best = better
            outcome = min(outcome, best, key=rank)
        return outcome

    def with_best_spares(self, outcome: Outcome) -> Outcome:
        """With spare states for the chunks that make the step fastest, and the placement that is best with these; among
        choices as fast, that with the fewest bytes."""
        if not self.placer.scheme.begins_only_into_spares:
            return outcome
        found = self._other_spares(outcome)
        best = min(found, key=rank)
        climbed = self._climbed(best, self.num_simulations + _MOST_SIMULATIONS // 2)
        if climbed is not best:
            found = self._other_spares(climbed)
        return _of_fewest_bytes(found)

    def balanced(self, outcome: Outcome) -> Outcome:
        """The same, with as many chunks streamed as make the step fastest, to a chunk: the host and the stream both end
        late or early by the time that one takes them, which is some per cent of a step where chunks are large."""
        if outcome.choice == self.everything or not self.problem.regime.can_stream:
            return outcome
        most = self.num_simulations + _MOST_BALANCING
        at, balanced_share = outcome.choice, self._balanced_share()
        outcome = self._best_of(self._streamed(at, [balanced_share * k / 8 for k in (8, 7, 6, 5)]), outcome, most)
        step = max(1, len(self.layout.packed) // 32)
        while self.num_simulations < most:
            better = self._best_of(
                self._streamed(outcome.choice, self._shares_near(outcome.choice, step)), outcome, most
            )
            if better is outcome and step == 1:
                break
            step = max(1, step // 2) if better is outcome else step
            outcome = better
        return outcome

    def waiting_least(self, outcome: Outcome) -> Outcome:
        """Of the placements that are about as fast, the one that is fastest if the host updates faster than it was
        measured to. Where a step takes as long as the host, by its figures, placements seem alike that wait for other
        things as well. (Seen on an H200: of two foreseen in 0.369 and 0.370 s one took 0.348 s, the other 0.331 s.)"""
        if outcome.times is None or not outcome.times.update_waiting_s:
            return outcome
        limit_s = outcome.felt_s * (1 + _AS_FAST)
        near = sorted((o for o in self.outcomes.values() if o.felt_s <= limit_s), key=rank)[:_MOST_AS_FAST]
        looked = (self.glimpse(o.choice, limit_s) for o in near)
        as_fast = [outcome, *(o for o in looked if o.times is not None and o.felt_s <= limit_s)]
        faster = [(self.with_faster_host_s(o) + o.handling_s, o) for o in as_fast]
        least_s = min(seconds for seconds, _ in faster) * (1 + SAME)
        best = [o for seconds, o in faster if seconds <= least_s]
        return best[0] if best[0] is outcome else min(best, key=lambda o: (o.nvme_bytes, o.host_bytes, rank(o)))

    def fetching_ahead(self, outcome: Outcome) -> Outcome:
        """The same, with chunks fetched as far ahead as costs next to nothing: real copies are often later than
        simulated ones, where updates use the bus and the host's memory as well."""
        if outcome.choice == self.everything:
            return outcome
        limit_s = outcome.felt_s * (1 + _AHEAD)
        deeper = [self.look(replace(outcome.choice, depth=d)) for d in self._depths() if d > outcome.choice.depth]
        return max((o for o in (outcome, *deeper) if o.felt_s <= limit_s), key=lambda o: o.choice.depth)

    def _other_spares(self, outcome: Outcome) -> list[Outcome]:
        """The same placement, with spare states for other chunks and for more or fewer: some numbers of them first,
        then those near the best. Of those that are not as fast as the fastest, no more is known than that."""
        able = sum(map(self.placer.scheme.can_have_spares, outcome.chunks))
        counts = sorted({math.ceil(able * i / _MOST_SPARE_COUNTS) for i in range(_MOST_SPARE_COUNTS + 1)})
        far_apart = [*counts[:0:-_SPARE_COUNTS_APART], 0]  # none as well: a gain may be too small to be worth any
        found = self._with_spares([outcome], product(SPARE_PATTERNS, reversed(far_apart)))
        best = _of_fewest_bytes(found)
        at = bisect_left(counts, sum(c.has_spare_states for c in best.chunks))
        near = counts[max(0, at - _SPARE_COUNTS_APART + 1) : at + _SPARE_COUNTS_APART]
        return self._with_spares(found, ((best.choice.spare_pattern, count) for count in near))

    def _with_spares(self, found: Sequence[Outcome], others: Iterable[tuple[str, int]]) -> list[Outcome]:
        """`found`, which are of one placement, and the same with spare states by these patterns and numbers."""
        looked, least_s = list(found), min(o.felt_s for o in found)
        for pattern, count in others:
            choice = replace(found[0].choice, spare_pattern=pattern, spares=count)
            looked.append(self.glimpse(choice, least_s * (1 + SAME)))
            least_s = min(least_s, looked[-1].felt_s)
        return looked

    def relative(self, choice: Choice) -> Choice:
        """The choice with its counts as shares of a thousand."""
        total, n = max(1, len(self.layout.packed)), max(1, self.num_trainable)
        return replace(
            choice,
            sites=None,
            resident=choice.resident * 1000 // n,
            sharded=choice.sharded * 1000 // n,
            kept=choice.kept * 1000 // total,
        )

    def _near(self, seed: Choice) -> Iterator[Choice]:
        n, total = self.num_trainable, len(self.layout.packed)
        at = replace(
            seed,
            resident=min(seed.resident * n // 1000, self._most_resident(replace(seed, sharded=0, kept=0))),
            sharded=seed.sharded * n // 1000,
            kept=seed.kept * total // 1000,
        )
        yield at
        yield replace(at, kept=self._most_kept(replace(at, kept=0)))
        # Streaming may pay with chunks of this size alone, or not with these: another's best says nothing of it.
        share = 0.0 if at.streamed_share else self._balanced_share()
        if share != at.streamed_share:
            turned = replace(at, streamed_share=share, kept=0)
            turned = replace(turned, resident=min(at.resident, self._most_resident(turned)))
            yield replace(turned, kept=min(at.kept, self._most_kept(turned)))

    def _filled(self, depth: int, pattern: str = "first") -> Iterator[Choice]:
        """As many states on the GPU for good as it holds: a climb rarely gets there from where parameters fill it, and
        what is best beside other activations says nothing of that."""
        for share in dict.fromkeys((0.0, self._balanced_share() / 2, self._balanced_share())):
            base = Choice(streamed_share=share, depth=depth, pattern=pattern)
            yield replace(base, resident=self._most_resident(base))
            if self.can_shard:
                yield replace(base, sharded=self._most_sharded(base))

    def _grid(self) -> Iterator[Choice]:
        depth = self._depths()[-1]
        share = self._balanced_share()
        if share and not self._fits_gpu(self._placement(Choice(streamed_share=share))):
            share = 0.0  # no room for the buffers of the stream
        most = self._most_resident(Choice(streamed_share=share))
        for quarter in range(5):
            base = Choice(resident=most * quarter // 4, streamed_share=share, depth=depth)
            kept = self._most_kept(base)
            for half in (0, 1, 2) if kept else (0,):
                yield replace(base, kept=kept * half // 2)
        # Where chunks differ in size, others may fit; and more of them without the buffers of the stream.
        bases = [Choice(pattern=pattern, streamed_share=share, depth=depth) for pattern in PATTERNS[1:]]
        if share and self.problem.updates.timing is not UpdateTiming.AFTER_BACKWARD:  # perhaps the host alone hides all
            most = self._most_resident(Choice())
            bases += [Choice(resident=most * quarter // 4, depth=depth) for quarter in range(4)]
        for base in (*bases, Choice(depth=depth)):
            full = replace(base, resident=self._most_resident(base))
            yield full
            yield replace(full, kept=self._most_kept(full))
        if self.can_shard:
            yield from self._sharded_starts(share, depth)

    def _sharded_starts(self, share: float, depth: int) -> Iterator[Choice]:
        for is_rest_on_gpu in self.rests:
            base = Choice(is_rest_on_gpu=is_rest_on_gpu, streamed_share=share, depth=depth)
            most = self._most_sharded(base)
            for sharded in dict.fromkeys(most * quarter // 4 for quarter in range(5)):
                yield replace(base, sharded=sharded)

    def _neighbours(self, at: Choice, step: int) -> Iterator[Choice]:
        total = len(self.layout.packed)
        for resident in (at.resident + step, at.resident - step):
            if 0 <= resident <= self.num_trainable:
                moved = replace(at, resident=resident)
                yield moved
                most = self._most_kept(replace(moved, kept=0))
                if at.kept and most != at.kept:
                    yield replace(moved, kept=most)
        for kept in (at.kept + step, at.kept - step):
            if 0 <= kept <= total:
                yield replace(at, kept=kept)
        if self.can_shard:
            for sharded in (at.sharded + step, at.sharded - step):
                if 0 <= sharded <= self.num_trainable:
                    yield replace(at, sharded=sharded)
            turned = replace(at, resident=0, sharded=at.resident + at.sharded)
            if at.resident:
                yield turned
                yield replace(turned, sharded=self._most_sharded(replace(turned, sharded=0)))
        if self.is_shared:
            yield replace(at, is_rest_on_gpu=not at.is_rest_on_gpu)
        for pattern in PATTERNS:
            yield replace(at, pattern=pattern)
        for share in self._shares():
            yield replace(at, streamed_share=share)
        for depth in self._depths():
            yield replace(at, depth=depth)

    def _streamed(self, at: Choice, shares: Iterable[float]) -> Iterator[Choice]:
        """These shares streamed; also with the parameters on the GPU that the buffers of a stream leave room for."""
        for share in shares:
            moved = replace(at, streamed_share=share)
            yield moved
            most = self._most_kept(replace(moved, kept=0))
            if most != at.kept:
                yield replace(moved, kept=most)

    def _one_by_one(self, at: Choice) -> Iterator[Choice]:
        """One chunk at another site, then two that change places; of very few chunks, any two at any other sites."""
        sites = self._sites(at)
        others = [[s for s in self._sites_of(i) if s != site] for i, site in enumerate(sites)]
        for i, choices in enumerate(others):
            for site in choices:
                yield replace(at, sites=(*sites[:i], site, *sites[i + 1 :]))
        rest = []
        for i, j in combinations(range(len(sites)), 2):
            for a, b in product(others[i], others[j]):
                moved = list(sites)
                moved[i], moved[j] = a, b
                if (a, b) == (sites[j], sites[i]):
                    yield replace(at, sites=tuple(moved))
                elif len(sites) <= _VERY_FEW_CHUNKS:
                    rest.append(replace(at, sites=tuple(moved)))
        yield from rest

    def _sites_of(self, chunk_id: int) -> list[Site]:
        """Where a chunk may be."""
        sites = [RESIDENT, OFFLOADED]
        if self.sharded[chunk_id] != RESIDENT:
            sites.append(SHARDED)
        if self.layout.packed[chunk_id].requires_grad:
            sites.append(self.kept[chunk_id])
            if self.is_shared and self.kept[chunk_id] != SHARDED_PARAMS:
                sites.append(SHARDED_PARAMS)
            if self.problem.regime.can_stream:
                sites += [s._replace(is_update_streamed=True) for s in sites if s.optim_tier is Tier.CPU]
        return sites

    def _least_gpu(self) -> Choice:
        """As little on the GPU as possible: nothing but the smallest rCache, or chunks that take less than their
        blocks would."""
        starts = [Choice(), Choice(kept=len(self.layout.packed))]
        return self._descend(starts, self._least_gpu_bytes)

    def _least_gpu_bytes(self, choice: Choice) -> int:
        """With the smallest rCache."""
        placement = self._placement(choice)
        return placement.gpu_bytes(placement.smallest)

    def _least_host(self) -> Choice:
        """As much on the GPU as it holds."""
        fitting = [c for c in (self._least_gpu(), *self._fullest()) if self._fits_gpu(self._placement(c))]

        def host_bytes(choice: Choice) -> float:
            placement = self._placement(choice)
            return placement.use.host_bytes if self._fits_gpu(placement) else math.inf

        return self._descend(fitting, host_bytes) if fitting else Choice()

    def _descend(self, starts: Sequence[Choice], measure: Callable[[Choice], float]) -> Choice:
        """The choice with the least measure that single moves and exchanges lead to; nothing is simulated."""
        best = min(starts, key=measure)
        while len(self.layout.packed) <= _FEW_CHUNKS:
            better = min(self._one_by_one(best), key=measure, default=best)
            if measure(better) >= measure(best):
                break
            best = better
        return best

    def _fullest(self) -> Iterator[Choice]:
        """Choices that fill the GPU."""
        bases = [Choice(), Choice(resident=self._most_resident(Choice()))]
        if self.can_shard:
            for rest in self.rests:
                base = Choice(is_rest_on_gpu=rest)
                bases.append(replace(base, sharded=self._most_sharded(base)))
        for base in bases:
            yield base
            yield replace(base, kept=self._most_kept(base))

    # The result

    def plan_of(self, outcome: Outcome, others: Sequence[tuple[_LayoutSearch, Outcome]]) -> Plan:
        """The plan, simulated with the whole trace."""
        depth = outcome.choice.depth if self.problem.request.prefetch_depth else 0
        plan = self.placer.plan(
            sites_of(outcome.chunks), "auto", prefetch_depth=depth or self.problem.request.prefetch_depth
        )
        timeline = simulate_step(plan, self.profile, self.problem.hardware, self.placer.scheme)
        hardware = self.problem.hardware.name
        if self.problem.is_time_guessed:
            hardware += "; computing assumed to take as long as fetching"
        use = plan_use(plan, self.problem.regime)
        forecast = _forecast(timeline, use, self.problem.budget, self._binding(outcome), hardware)
        highest = max(outcome.gpu_bytes, timeline.peak_gpu_bytes)
        alternatives = _alternatives(outcome, others, self)
        return replace(plan, forecast=replace(forecast, peak_gpu_bytes=highest, alternatives=alternatives))

    def _binding(self, outcome: Outcome) -> str:
        if is_all_on_gpu(outcome.chunks):
            return "none: everything fits on the GPU"
        everything = self.look(self.everything)
        lacking = everything.gpu_bytes - (self.problem.budget.gpu_bytes or 0)
        where = "the GPU's memory"
        if self.most_state_bytes is not None:
            where += f", of which states may take {format_bytes(self.most_state_bytes)} (gpu_margin_mem_ratio)"
        if outcome.nvme_bytes:
            where = "the host's memory, which sends states to NVMe"
        return f"{where}: with {format_bytes(max(0, lacking))} more on the GPU everything would stay there"

    def refusal(self) -> CapacityError:
        """Why nothing fits, and the nearest change that would."""
        smallest = self._placement(self._least_gpu())
        if self._fits_gpu(smallest):
            return host_refusal(self._placement(self._least_host()), self.placer, self.problem, self._fits)
        return gpu_refusal(smallest, self.placer, self.problem, self.profile)

    def _fits(self, problem: Problem) -> bool:
        """Whether the same chunks would fit what is given otherwise."""
        other = _LayoutSearch(Candidate(self.layout.for_ranks(problem.world_size), self.profile), problem)
        placement = other._placement(other._least_host())
        return other._fits_gpu(placement) and other._fits_host(placement.use.host_bytes)


def _of_fewest_bytes(found: Sequence[Outcome]) -> Outcome:
    """Of the outcomes that are as fast as the fastest, the one that takes the least of the host's memory."""
    limit_s = min(o.felt_s for o in found) * (1 + SAME)
    return min((o for o in found if o.felt_s <= limit_s), key=lambda o: (o.host_bytes, rank(o)))


def _alternatives(
    best: Outcome, others: Sequence[tuple[_LayoutSearch, Outcome]], winner: _LayoutSearch
) -> tuple[Alternative, ...]:
    """The fastest of each kind that lost, and the simplest that does not fit."""
    kinds: dict[tuple[object, ...], tuple[_LayoutSearch, Outcome]] = {}
    for one, outcome in others:
        if outcome is best or outcome.times is None or outcome.felt_s <= best.felt_s * (1 + SAME):
            continue
        choice = outcome.choice
        kind = (
            one.layout.block_bytes,
            choice.resident == 0,
            choice.kept == 0,
            choice.streamed_share > 0,
            choice.is_rest_on_gpu,
            choice.sharded > 0,
        )
        if kind not in kinds or rank(outcome) < rank(kinds[kind][1]):
            kinds[kind] = one, outcome
    kinds = {kind: (one, one.look(outcome.choice)) for kind, (one, outcome) in kinds.items()}
    said = {describe_placement(best.chunks, best.blocks, best.choice.depth)}
    result: list[Alternative] = []
    for one, outcome in sorted(kinds.values(), key=lambda item: rank(item[1])):
        text = describe_placement(outcome.chunks, outcome.blocks, outcome.choice.depth)
        if one is not winner:
            text = f"chunks of {format_bytes(one.layout.block_bytes)}: {text}"
        if text not in said and len(result) < _NUM_ALTERNATIVES:
            said.add(text)
            result.append(
                Alternative(text, None if outcome.times is None else outcome.times.total_s, _why(outcome, best))
            )
    most = winner.look(winner.everything)
    if most.times is None:
        lacking = most.gpu_bytes - (winner.problem.budget.gpu_bytes or 0)
        reason = f"needs {format_bytes(most.gpu_bytes)} on the GPU, {format_bytes(lacking)} too many"
        result.append(Alternative(describe_placement(most.chunks, most.blocks, 0), None, reason))
    return tuple(result)


def _why(loser: Outcome, best: Outcome) -> str:
    if loser.times is None or best.times is None:
        return "does not fit"
    ours, theirs = best.times, loser.times
    more = {
        "between backward and forward": theirs.step_s - ours.step_s,
        "of waiting for updates": theirs.update_waiting_s - ours.update_waiting_s,
        "of waiting for chunks and gradients in forward and backward": (
            theirs.waiting_s - theirs.update_waiting_s - ours.waiting_s + ours.update_waiting_s
        ),
        "of the host's work for chunks, pieces and updates": loser.handling_s - best.handling_s,
    }
    parts = [
        f"{format_seconds(abs(seconds))} {'more' if seconds > 0 else 'less'} {name}"
        for name, seconds in sorted(more.items(), key=lambda item: -item[1])
        if abs(seconds) > ours.total_s * SAME / 10
    ]
    return ", ".join(parts) or "as fast"
