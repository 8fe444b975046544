"""The search: chunk size, rCache, tiers and update sites with the least predicted step time within the limits.

Every candidate is a whole plan that is simulated (`plan/timeline.py`), so that what is compared is what the runtime
would do. Candidates come from a grid of shares and a climb from its best point: how many chunks keep everything on the
GPU, how many only their parameters, which ones, how many of the host's updates are streamed to the GPU, and how far
ahead chunks are fetched. The rCache takes what memory is left. Everything is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.memory import Budget, ModelDataBytes, memory_use
from lightning_elixir.plan.placement import (
    OFFLOADED,
    RESIDENT,
    Layout,
    PlacementRequest,
    Placer,
    Site,
    check_request,
    format_bytes,
    format_seconds,
)
from lightning_elixir.plan.profile import StepInterval, StepProfile
from lightning_elixir.plan.timeline import Timeline, compressed, scheme_of, simulate_step
from lightning_elixir.plan.types import AccessTrace, Acquire, Alternative, ChunkSpec, Drop, Forecast, Plan, Tier

_KEPT = Site(Tier.GPU, Tier.CPU, True)
_SHARDED = Site(Tier.GPU, Tier.GPU, False)
_SHARDED_PARAMS = Site(Tier.GPU, Tier.CPU, False)
_PATTERNS = ("first", "last", "spread", "smallest")
_DEPTHS = (2, 4, 8)
_NUM_ALTERNATIVES = 6
_SAME = 1e-3  # relative difference of predictions below which two placements are as fast
_USUAL_TRANSFER_BYTES = 128 * 2**20
# A climb tries about twenty neighbours a round; more than a few rounds bring nothing.
_MOST_ROUNDS = 6
_MOST_SIMULATIONS = 80
# Where chunks are few, each weighs much and they differ in size: then chunks are also moved and exchanged one by one.
_FEW_CHUNKS = 16
_VERY_FEW_CHUNKS = 6
_NUM_STARTS = 3
_MOST_REFINEMENTS = 400


@dataclass(frozen=True)
class Candidate:
    """A chunk size, and what a step does under it."""

    layout: Layout
    profile: StepProfile


@dataclass(frozen=True)
class Problem:
    """What is given."""

    request: PlacementRequest
    budget: Budget
    world_size: int
    data_bytes: Mapping[str, ModelDataBytes]
    hardware: HardwareSpec
    can_stream: bool = False
    """Whether the optimizer's update may run on the device for states that live on the host."""
    stream_bytes: int = 0
    """Device memory of the buffers that this takes."""
    accumulates: bool = False
    """Gradients of several backwards are added up."""
    is_time_guessed: bool = False
    """Nobody has measured the computing; it is assumed to take as long as fetching."""


@dataclass(frozen=True)
class _Choice:
    """One point of the search space: numbers of chunks."""

    resident: int = 0
    """Everything on the GPU for good."""
    sharded: int = 0
    """Shards and states on the GPU, replicas in the rCache (several ranks)."""
    kept: int = 0
    """Parameters on the GPU for good, states on the host."""
    is_rest_on_gpu: bool = False
    """Parameter shards of the others on the GPU (several ranks)."""
    pattern: str = "first"
    streamed_share: float = 0.0
    depth: int = 0
    sites: tuple[Site, ...] | None = None
    """Every chunk's site by itself, which the numbers above then do not say."""


@dataclass(frozen=True)
class _Outcome:
    choice: _Choice
    chunks: tuple[ChunkSpec, ...]
    gpu_bytes: int
    host_bytes: int
    blocks: int
    timeline: Timeline | None
    """None if it does not fit."""

    @property
    def total_s(self) -> float:
        return float("inf") if self.timeline is None else self.timeline.times.total_s


def search(candidates: Sequence[Candidate], problem: Problem) -> Plan:
    """The fastest plan that fits, with its forecast.

    Args:
        candidates: Chunk sizes to choose from; the first is searched most thoroughly.
        problem: Limits, hardware and what training does.

    Raises:
        PlanError: An option out of its range, no candidate, or NVMe space without figures of its speed.
        CapacityError: No placement fits; the message names the binding limit and the nearest change that fits.
    """
    check_request(problem.request, problem.world_size)
    if not candidates:
        raise PlanError("there is no chunk size to search")
    if problem.budget.nvme_bytes and problem.hardware.nvme_adam_numel_per_s is None:
        raise PlanError(
            f"states may take {format_bytes(problem.budget.nvme_bytes)} of NVMe, but nobody has measured how fast it is"
            ": run `lightning-elixir bench-hardware --nvme-dir FOLDER`"
        )
    different: dict[Layout, Candidate] = {}  # some sizes come to the same chunks
    for candidate in candidates:
        different.setdefault(candidate.layout, candidate)
    searches = [_LayoutSearch(c, problem) for c in different.values()]
    best: tuple[_Outcome, _LayoutSearch] | None = None
    seed: _Choice | None = None
    for one in searches:
        outcome = one.best(seed)
        if outcome is None:
            continue
        if best is None or outcome.total_s < best[0].total_s * (1 - 1e-9):
            best = outcome, one
        if seed is None:
            seed = one.relative(outcome.choice)
        if outcome.choice == one.everything:
            break  # everything is on the GPU: no chunk size makes that faster
    if best is None:
        raise min((one.refusal() for one in searches), key=distance)
    outcome, one = best
    outcome = one.refined(outcome)
    return one.plan_of(outcome, [(s, o) for s in searches for o in s.outcomes.values()])


def distance(refusal: CapacityError) -> tuple[bool, int]:
    """How far a chunk size is from fitting, to compare it with others: what the GPU lacks, another size may do without;
    where the GPU has enough, the host is what is left."""
    return refusal.resource != "host", refusal.lacking_bytes or 0


def with_forecast(plan: Plan, profile: StepProfile, problem: Problem) -> Plan:
    """A plan that nobody searched for, with what the simulation expects of it."""
    scheme = scheme_of(plan, problem.data_bytes, problem.stream_bytes)
    timeline = simulate_step(plan, profile, problem.hardware, scheme, accumulates=problem.accumulates)
    forecast = Forecast(
        times=timeline.times,
        peak_gpu_bytes=timeline.peak_gpu_bytes,
        gpu_limit_bytes=problem.budget.gpu_bytes,
        host_bytes=memory_use(plan.chunks, plan.rcache_blocks, scheme).host_bytes,
        host_limit_bytes=problem.budget.cpu_bytes,
        binding=f'the placement policy "{plan.policy}", which leaves nothing to search',
        hardware=problem.hardware.name,
    )
    return replace(plan, forecast=forecast)


def structural_profile(
    layout: Layout,
    accesses: Sequence[tuple[str, tuple[str, ...]]],
    hardware: HardwareSpec,
    non_model_bytes: int = 0,
) -> StepProfile:
    """What a step does as far as the order of the modules tells: forward in that order, backward in the reverse.

    Computing is taken to last as long as fetching the same parameters (backward twice that), where overlap matters
    most.

    Args:
        layout: The chunks.
        accesses: (module name, FQNs that it owns directly), in the order of use.
        hardware: For the time of a fetch.
        non_model_bytes: Beside the chunks, all the time.
    """
    chunk_of = {m.fqn: i for i, c in enumerate(layout.packed) for m in c.members}
    size_of = {m.fqn: m.numel * c.nbytes // max(1, c.numel) for c in layout.packed for m in c.members}
    rate = hardware.h2d.bytes_per_s(_USUAL_TRANSFER_BYTES)  # the same for every chunk size
    visits: list[tuple[tuple[int, ...], float]] = []
    for _, fqns in accesses:
        ids = tuple(dict.fromkeys(chunk_of[fqn] for fqn in fqns if fqn in chunk_of))
        if ids:
            visits.append((ids, sum(size_of.get(fqn, 0) for fqn in fqns) / rate))
    events: list[Acquire | Drop] = []
    intervals = [StepInterval(0.0, non_model_bytes)]
    for ids, seconds in visits:
        events += [Acquire(ids, is_pinned=True), Drop(ids)]
        intervals.append(StepInterval(seconds, non_model_bytes))
    first_visit = {i: at for at, (ids, _) in reversed(list(enumerate(visits))) for i in ids}
    for at, (ids, seconds) in reversed(list(enumerate(visits))):
        events.append(Acquire(ids, is_pinned=False))
        finished = tuple(i for i in ids if first_visit[i] == at and layout.packed[i].requires_grad)
        intervals.append(StepInterval(2 * seconds, non_model_bytes, finished))
    return StepProfile(AccessTrace(tuple(events)), tuple(intervals))


class _LayoutSearch:
    """The search among placements of one layout."""

    def __init__(self, candidate: Candidate, problem: Problem) -> None:
        self.problem = problem
        self.layout = candidate.layout
        self.profile = candidate.profile
        self.brief = compressed(candidate.profile)
        self.placer = Placer(
            candidate.layout,
            problem.request,
            problem.budget,
            problem.world_size,
            problem.data_bytes,
            profile=candidate.profile,
            accumulates=problem.accumulates,
            stream_bytes=problem.stream_bytes,
        )
        packed = candidate.layout.packed
        self.trainable = [i for i, c in enumerate(packed) if c.requires_grad]
        self.num_trainable = len(self.trainable)
        self.everything = _Choice(resident=self.num_trainable, kept=len(packed))
        self.is_shared = not self.placer.scheme.is_shard_whole
        self.outcomes: dict[_Choice, _Outcome] = {}
        self._by_sites: dict[tuple[tuple[Site, ...], int], _Outcome] = {}
        self.num_simulations = 0
        self.most_state_bytes = self._most_state_bytes()

    # The climb

    def best(self, seed: _Choice | None) -> _Outcome | None:
        """The fastest outcome; None if nothing fits.

        Args:
            seed: The best choice of another layout, as shares of a thousand, to start from instead of the grid.
        """
        everything = self.look(self.everything)
        if everything.timeline is not None:
            self.look(_Choice(kept=len(self.layout.packed), streamed_share=self._balanced_share()))
            return everything
        starts = list(self._grid() if seed is None else self._near(seed))
        fitting = [o for o in map(self.look, starts) if o.timeline is not None]
        if not fitting:
            depth = self._depths()[-1]
            extremes = (replace(c, depth=depth) for c in (self._least_gpu(), self._least_host()))
            fitting = [o for o in map(self.look, extremes) if o.timeline is not None]
        if not fitting:
            return None
        best = min(fitting, key=_rank)
        most = _MOST_SIMULATIONS if seed is None else self.num_simulations + _MOST_SIMULATIONS // 4
        step = max(1, len(self.layout.packed) // 8)
        for _ in range(_MOST_ROUNDS):
            neighbours = [self.look(c) for c in self._neighbours(best.choice, step) if self.num_simulations < most]
            better = min([best, *neighbours], key=_rank)
            if better is best and step == 1:
                break
            if better is best:
                step = max(1, step // 4)
            best = better
        return best

    def refined(self, outcome: _Outcome) -> _Outcome:
        """The fastest that is reached by moving single chunks and exchanging two, where chunks are few.

        Begins at the fastest placement of every number of chunks with states on the GPU: what is best for another
        number may be many moves away.
        """
        if len(self.layout.packed) > _FEW_CHUNKS or outcome.choice == self.everything:
            return outcome
        starts: dict[int, _Outcome] = {}
        for known in sorted(self.outcomes.values(), key=_rank):
            if known.timeline is not None:
                starts.setdefault(sum(c.optim_tier is Tier.GPU for c in known.chunks), known)
        ordered = sorted(starts.values(), key=_rank)[:_NUM_STARTS]
        most = self.num_simulations + _MOST_REFINEMENTS
        for start in ordered:
            best = start
            while self.num_simulations < most:
                neighbours = [self.look(c) for c in self._one_by_one(best.choice) if self.num_simulations < most]
                better = min([best, *neighbours], key=_rank)
                if better is best:
                    break
                best = better
            outcome = min(outcome, best, key=_rank)
        return outcome

    def relative(self, choice: _Choice) -> _Choice:
        """The choice with its counts as shares of a thousand."""
        total, n = max(1, len(self.layout.packed)), max(1, self.num_trainable)
        return replace(
            choice,
            sites=None,
            resident=choice.resident * 1000 // n,
            sharded=choice.sharded * 1000 // n,
            kept=choice.kept * 1000 // total,
        )

    def _near(self, seed: _Choice) -> Iterator[_Choice]:
        n, total = self.num_trainable, len(self.layout.packed)
        at = replace(
            seed,
            resident=min(seed.resident * n // 1000, self._most_resident(replace(seed, sharded=0, kept=0))),
            sharded=seed.sharded * n // 1000,
            kept=seed.kept * total // 1000,
        )
        yield at
        yield replace(at, kept=self._most_kept(replace(at, kept=0)))

    def _grid(self) -> Iterator[_Choice]:
        depth = self._depths()[-1]
        share = self._balanced_share()
        if share and not self._fits_gpu(self._chunks(_Choice(streamed_share=share))):
            share = 0.0  # no room for the buffers of the stream
        most = self._most_resident(_Choice(streamed_share=share))
        for quarter in range(5):
            base = _Choice(resident=most * quarter // 4, streamed_share=share, depth=depth)
            kept = self._most_kept(base)
            for half in (0, 1, 2) if kept else (0,):
                yield replace(base, kept=kept * half // 2)
        # Where chunks differ in size, others may fit; and more of them without the buffers of the stream.
        bases = [_Choice(pattern=pattern, streamed_share=share, depth=depth) for pattern in _PATTERNS[1:]]
        for base in (*bases, _Choice(depth=depth)):
            full = replace(base, resident=self._most_resident(base))
            yield full
            yield replace(full, kept=self._most_kept(full))
        if self.is_shared:
            for rest in (False, True):
                for quarter in range(5):
                    sharded = self.num_trainable * quarter // 4
                    yield _Choice(sharded=sharded, is_rest_on_gpu=rest, streamed_share=share, depth=depth)

    def _neighbours(self, at: _Choice, step: int) -> Iterator[_Choice]:
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
        if self.is_shared:
            for sharded in (at.sharded + step, at.sharded - step):
                if 0 <= sharded <= self.num_trainable:
                    yield replace(at, sharded=sharded)
            yield replace(at, is_rest_on_gpu=not at.is_rest_on_gpu)
        for pattern in _PATTERNS:
            yield replace(at, pattern=pattern)
        for share in self._shares():
            yield replace(at, streamed_share=share)
        for depth in self._depths():
            yield replace(at, depth=depth)

    def _one_by_one(self, at: _Choice) -> Iterator[_Choice]:
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
        if self.is_shared:
            sites.append(_SHARDED)
        if self.layout.packed[chunk_id].requires_grad:
            sites += [_KEPT, _SHARDED_PARAMS] if self.is_shared else [_KEPT]
            if self.problem.can_stream:
                sites += [replace(s, is_update_streamed=True) for s in sites if s.optim_tier is Tier.CPU]
        return sites

    def _least_gpu(self) -> _Choice:
        """As little on the GPU as possible: nothing but the smallest rCache, or chunks that take less than their
        blocks would."""
        starts = [_Choice(), _Choice(kept=len(self.layout.packed))]
        return self._descend(starts, lambda c: self._gpu_bytes(self._chunks(c)))

    def _least_host(self) -> _Choice:
        """As much on the GPU as it holds."""
        fitting = [c for c in (self._least_gpu(), *self._fullest()) if self._fits_gpu(self._chunks(c))]

        def host_bytes(choice: _Choice) -> float:
            chunks = self._chunks(choice)
            return memory_use(chunks, 0, self.placer.scheme).host_bytes if self._fits_gpu(chunks) else math.inf

        return self._descend(fitting, host_bytes) if fitting else _Choice()

    def _descend(self, starts: Sequence[_Choice], measure: Callable[[_Choice], float]) -> _Choice:
        """The choice with the least measure that single moves and exchanges lead to; nothing is simulated."""
        best = min(starts, key=measure)
        while len(self.layout.packed) <= _FEW_CHUNKS:
            better = min(self._one_by_one(best), key=measure, default=best)
            if measure(better) >= measure(best):
                break
            best = better
        return best

    def _fullest(self) -> Iterator[_Choice]:
        """Choices that fill the GPU."""
        bases = [_Choice(), _Choice(resident=self._most_resident(_Choice()))]
        if self.is_shared:
            for rest in (False, True):
                base = _Choice(is_rest_on_gpu=rest)
                bases.append(replace(base, sharded=self._most_sharded(base)))
        for base in bases:
            yield base
            yield replace(base, kept=self._most_kept(base))

    def _gpu_bytes(self, chunks: Sequence[ChunkSpec]) -> int:
        """With the smallest rCache."""
        return self.placer.gpu_bytes(chunks, self.placer.smallest(chunks))

    def _depths(self) -> tuple[int, ...]:
        return _DEPTHS if self.problem.request.prefetch_depth else (0,)

    def _shares(self) -> tuple[float, ...]:
        if not self.problem.can_stream:
            return (0.0,)
        balanced = self._balanced_share()
        return (0.0, balanced * 0.8, balanced, 0.5 * (1 + balanced), 1.0)

    def _balanced_share(self) -> float:
        """Both the host and the stream end at the same time."""
        if not self.problem.can_stream:
            return 0.0
        hardware = self.problem.hardware
        streamed, host = hardware.streamed_adam_numel_per_s, hardware.cpu_adam_numel_per_s
        return round(streamed / (streamed + host), 3)

    def _most_resident(self, base: _Choice) -> int:
        """The largest number of resident chunks that fits beside the smallest rCache."""
        return self._largest(self.num_trainable, lambda n: replace(base, resident=n))

    def _most_sharded(self, base: _Choice) -> int:
        return self._largest(self.num_trainable, lambda n: replace(base, sharded=n))

    def _most_kept(self, base: _Choice) -> int:
        return self._largest(len(self.layout.packed), lambda n: replace(base, kept=n))

    def _largest(self, most: int, choice_of: Callable[[int], _Choice]) -> int:
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits_gpu(self._chunks(choice_of(middle))):
                low = middle
            else:
                high = middle - 1
        return low

    def _most_state_bytes(self) -> int | None:
        """What the user lets states take of the memory beside rCache and activations."""
        ratio, limit = self.problem.request.gpu_margin_mem_ratio, self.problem.budget.gpu_bytes
        if ratio is None or limit is None:
            return None
        chunks = self.placer.chunks([OFFLOADED] * len(self.layout.packed))
        blocks = self.placer.smallest(chunks) + self.problem.request.prefetch_depth
        return int(max(0, limit - self.placer.gpu_bytes(chunks, blocks)) * ratio)

    # One choice

    def look(self, choice: _Choice) -> _Outcome:
        """Build, check against the limits, and simulate."""
        known = self.outcomes.get(choice)
        if known is not None:
            return known
        sites = tuple(self._sites(choice))
        depth = 0 if all(s.is_persistent for s in sites) else choice.depth
        same = self._by_sites.get((sites, depth))  # other numbers that come to the same
        if same is None:
            same = self._by_sites[sites, depth] = self._looked(choice)
        outcome = self.outcomes[choice] = replace(same, choice=choice)
        return outcome

    def _looked(self, choice: _Choice) -> _Outcome:
        chunks = self._chunks(choice)
        blocks = self.placer.blocks(chunks)
        gpu_bytes = self.placer.gpu_bytes(chunks, blocks)
        use = memory_use(chunks, blocks, self.placer.scheme)
        timeline = None
        if (
            self._fits_gpu(chunks)
            and self._fits_host(use.host_bytes)
            and use.nvme_bytes <= self.problem.budget.nvme_bytes
        ):
            timeline = self._simulate(chunks, blocks, choice.depth, self.brief)
            self.num_simulations += 1
        return _Outcome(choice, chunks, gpu_bytes, use.host_bytes, blocks, timeline)

    def _simulate(self, chunks: tuple[ChunkSpec, ...], blocks: int, depth: int, profile: StepProfile) -> Timeline:
        return simulate_step(
            self._bare_plan(chunks, blocks, depth),
            profile,
            self.problem.hardware,
            self.placer.scheme,
            accumulates=self.problem.accumulates,
        )

    def _bare_plan(self, chunks: tuple[ChunkSpec, ...], blocks: int, depth: int) -> Plan:
        return Plan(
            world_size=self.problem.world_size,
            compute_dtype=self.layout.compute_dtype,
            block_bytes=self.layout.block_bytes,
            rcache_blocks=blocks,
            prefetch_depth=depth,
            chunks=chunks,
            is_storage_distributed=self.problem.request.distributed_storage,
            policy="auto",
        )

    def _fits_gpu(self, chunks: Sequence[ChunkSpec]) -> bool:
        limit = self.problem.budget.gpu_bytes
        if limit is None:
            return True
        if self.most_state_bytes is not None and not _is_all_on_gpu(chunks):
            state_bytes = sum(self.placer.scheme.state_bytes(c) for c in chunks if c.optim_tier is Tier.GPU)
            if state_bytes > self.most_state_bytes:
                return False
        return self._gpu_bytes(chunks) <= limit

    def _fits_host(self, nbytes: int) -> bool:
        limit = self.problem.budget.cpu_bytes
        return limit is None or nbytes <= limit

    def _chunks(self, choice: _Choice) -> tuple[ChunkSpec, ...]:
        sites = self._sites(choice)
        chunks = self.placer.chunks(sites)
        if self.problem.budget.nvme_bytes and not self._fits_host(memory_use(chunks, 0, self.placer.scheme).host_bytes):
            chunks = self._spilled(chunks)
        return chunks

    def _sites(self, choice: _Choice) -> list[Site]:
        if choice.sites is not None:
            return list(choice.sites)
        packed = self.layout.packed
        rest = _SHARDED_PARAMS if choice.is_rest_on_gpu else OFFLOADED
        sites = [rest] * len(packed)
        taken: set[int] = set()
        ordered = self._ordered(self.trainable, choice.resident + choice.sharded, choice.pattern)
        for position, chunk_id in enumerate(ordered[: choice.resident + choice.sharded]):
            sites[chunk_id] = RESIDENT if position < choice.resident else _SHARDED
            taken.add(chunk_id)
        left = [i for i in range(len(packed)) if i not in taken]
        for chunk_id in self._ordered(left, choice.kept, choice.pattern)[: choice.kept]:
            sites[chunk_id] = _KEPT if packed[chunk_id].requires_grad else RESIDENT
        on_host = [i for i in self.trainable if sites[i].optim_tier is Tier.CPU]
        streamed = round(len(on_host) * choice.streamed_share)
        for chunk_id in self._ordered(on_host, streamed, "spread")[:streamed]:
            sites[chunk_id] = replace(sites[chunk_id], is_update_streamed=True)
        return sites

    def _ordered(self, ids: Sequence[int], count: int, pattern: str) -> list[int]:
        """`ids` so that the first `count` of them are the ones that the pattern picks."""
        if pattern == "last":
            return list(reversed(ids))
        if pattern == "smallest":
            return sorted(ids, key=lambda i: self.layout.packed[i].nbytes)
        if pattern == "spread" and 0 < count < len(ids):
            picked = [ids[k * len(ids) // count] for k in range(count)]
            chosen = set(picked)
            return picked + [i for i in ids if i not in chosen]
        return list(ids)

    def _spilled(self, chunks: tuple[ChunkSpec, ...]) -> tuple[ChunkSpec, ...]:
        """States go on to NVMe, the last chunks first, until the host's memory holds the rest."""
        scheme, limit = self.placer.scheme, self.problem.budget.cpu_bytes or 0
        lacking = memory_use(chunks, 0, scheme).host_bytes - limit
        room = self.problem.budget.nvme_bytes
        spilled = list(chunks)
        for chunk in reversed(chunks):
            if lacking <= 0:
                break
            nbytes = scheme.state_bytes(chunk)
            if chunk.requires_grad and chunk.optim_tier is Tier.CPU and nbytes <= room:
                spilled[chunk.id] = replace(chunk, optim_tier=Tier.NVME, is_update_streamed=False)
                lacking -= nbytes
                room -= nbytes
        for chunk in chunks:  # a large one may have made a small one unnecessary
            nbytes = scheme.state_bytes(chunk)
            if spilled[chunk.id] is not chunk and nbytes <= -lacking:
                spilled[chunk.id] = chunk
                lacking += nbytes
        return tuple(spilled)

    # The result

    def plan_of(self, outcome: _Outcome, others: Sequence[tuple[_LayoutSearch, _Outcome]]) -> Plan:
        """The plan, simulated with the whole trace."""
        sites = [Site(c.param_tier, c.optim_tier, c.is_persistent, c.is_update_streamed) for c in outcome.chunks]
        depth = outcome.choice.depth if self.problem.request.prefetch_depth else 0
        plan = self.placer.plan(sites, "auto", prefetch_depth=depth or self.problem.request.prefetch_depth)
        timeline = self._simulate(plan.chunks, plan.rcache_blocks, plan.prefetch_depth, self.profile)
        hardware = self.problem.hardware.name
        if self.problem.is_time_guessed:
            hardware += "; computing assumed to take as long as fetching"
        forecast = Forecast(
            times=timeline.times,
            peak_gpu_bytes=outcome.gpu_bytes,
            gpu_limit_bytes=self.problem.budget.gpu_bytes,
            host_bytes=outcome.host_bytes,
            host_limit_bytes=self.problem.budget.cpu_bytes,
            binding=self._binding(outcome, timeline),
            hardware=hardware,
            alternatives=_alternatives(outcome, others, self),
        )
        return replace(plan, forecast=forecast)

    def _binding(self, outcome: _Outcome, timeline: Timeline) -> str:
        if _is_all_on_gpu(outcome.chunks):
            return "none: everything fits on the GPU, and the step is bound by its own computing"
        everything = self.look(self.everything)
        lacking = everything.gpu_bytes - (self.problem.budget.gpu_bytes or 0)
        times = timeline.times
        where = "the GPU's memory"
        if self.most_state_bytes is not None:
            where += f", of which states may take {format_bytes(self.most_state_bytes)} (gpu_margin_mem_ratio)"
        if any(c.optim_tier is Tier.NVME for c in outcome.chunks):
            where = "the host's memory, which sends states to NVMe"
        costs = {
            "updates of states beside the GPU": times.step_s,
            "waiting for chunks and gradients": times.waiting_s,
        }
        dearest = max(costs, key=lambda name: costs[name])
        return (
            f"{where}: with {format_bytes(max(0, lacking))} more on the GPU everything would stay there. The step takes"
            f" {format_seconds(times.total_s)}, of which {dearest} {format_seconds(costs[dearest])}"
        )

    def refusal(self) -> CapacityError:
        """Why nothing fits, and the nearest change that would."""
        smallest = self._chunks(self._least_gpu())
        if self._fits_gpu(smallest):
            return self._host_refusal()
        placer = self.placer
        limit, needed = self.problem.budget.gpu_bytes or 0, self._gpu_bytes(smallest)
        blocks, module = placer.needs.smallest({c.id for c in smallest if not c.is_persistent})
        other = self.profile.peak_non_model_bytes
        parts = [f"gradient blocks {format_bytes(placer.scheme.grad_block_bytes(smallest))}"]
        if blocks:
            parts.insert(
                0,
                f"the smallest rCache, {blocks} block{'s' * (blocks > 1)} of {format_bytes(self.layout.block_bytes)}"
                f" for {module or 'the model'}",
            )
        kept = memory_use(smallest, 0, placer.scheme).gpu_param_bytes
        if kept:
            parts.append(f"parameters {format_bytes(kept)}")
        parts.append(f"activations and other data {format_bytes(other)}")
        cures = [f"{format_bytes(needed - limit, is_rounded_up=True)} more GPU memory"]
        share = 100 * (limit - needed + other) // other if other else 0
        if share > 0:
            cures.append(f"activations cut to {share}% (a batch that much smaller, or activation checkpointing)")
        cures.append("a smaller chunk_size")
        return CapacityError(
            f"GPU memory: even with as much as possible beside it, a rank needs {format_bytes(needed)}"
            f" ({'; '.join(parts)}), but there are {format_bytes(limit)}. What would fit: {', or '.join(cures)}.",
            resource="GPU",
            lacking_bytes=needed - limit,
        )

    def _host_refusal(self) -> CapacityError:
        """Against the placement that keeps as much as possible on the GPU."""
        problem, scheme = self.problem, self.placer.scheme
        chunks = self._chunks(self._least_host())
        use = memory_use(chunks, 0, scheme)
        limit = problem.budget.cpu_bytes or 0
        lacking = use.host_bytes - limit
        cures = [f"{format_bytes(lacking, is_rounded_up=True)} more host memory for each rank"]
        # What more ranks, each on a host of its own, do not divide.
        whole = 0 if problem.request.distributed_storage else use.host_param_bytes
        if limit > whole:
            hosts = math.ceil((use.host_bytes - whole) * problem.world_size / (limit - whole))
            cures.append(f"{hosts} GPUs on as many hosts")
        on_nvme = self._nvme_bytes(chunks, lacking)
        if on_nvme is not None:
            cures.append(f"{format_bytes(on_nvme, is_rounded_up=True)} of NVMe for each rank's optimizer states")
        return CapacityError(
            f"host memory: with as much on the GPU as it holds, each rank still needs {format_bytes(use.host_bytes)} on"
            f" the host (parameters {format_bytes(use.host_param_bytes)}; optimizer states"
            f" {format_bytes(use.host_state_bytes)}; gradients {format_bytes(use.host_grad_bytes)}), but there are"
            f" {format_bytes(limit)}. What would fit: {', or '.join(cures)}.",
            resource="host",
            lacking_bytes=lacking,
        )

    def _nvme_bytes(self, chunks: Sequence[ChunkSpec], lacking: int) -> int | None:
        """What the states take that have to go on to NVMe, with what is there already; None if that is no cure."""
        scheme = self.placer.scheme
        nbytes = memory_use(chunks, 0, scheme).nvme_bytes
        for chunk in reversed(chunks):
            if lacking <= 0:
                break
            if chunk.requires_grad and chunk.optim_tier is Tier.CPU:
                nbytes += scheme.state_bytes(chunk)
                lacking -= scheme.state_bytes(chunk)
        return nbytes if lacking <= 0 else None


def _is_all_on_gpu(chunks: Sequence[ChunkSpec]) -> bool:
    return all(c.is_persistent and (not c.requires_grad or c.optim_tier is Tier.GPU) for c in chunks)


def describe_placement(chunks: Sequence[ChunkSpec], blocks: int, depth: int) -> str:
    """A placement in one line."""
    n = len(chunks)
    trained = [c for c in chunks if c.requires_grad]
    states = sum(c.optim_tier is Tier.GPU for c in trained)
    kept = sum(c.is_persistent for c in chunks)
    if kept == n and states == len(trained):
        return f"everything on the GPU ({n} chunks)"
    parts = [f"states of {states} of {len(trained)} chunks on the GPU"]
    streamed = sum(c.is_update_streamed for c in trained)
    nvme = sum(c.optim_tier is Tier.NVME for c in trained)
    if streamed:
        parts.append(f"{streamed} streamed to it for their update")
    if nvme:
        parts.append(f"{nvme} on NVMe")
    parts.append("all parameters on the GPU" if kept == n else f"parameters of {kept} on the GPU")
    if kept < n:
        shards = sum(not c.is_persistent and c.param_tier is Tier.GPU for c in chunks)
        if shards:
            parts.append(f"shards of {shards} on the GPU")
        parts.append(f"the others through an rCache of {blocks} block{'s' * (blocks != 1)}, fetched {depth} ahead")
    return ", ".join(parts)


def _alternatives(
    best: _Outcome, others: Sequence[tuple[_LayoutSearch, _Outcome]], winner: _LayoutSearch
) -> tuple[Alternative, ...]:
    """The fastest of each kind that lost, and the simplest that does not fit."""
    kinds: dict[tuple[object, ...], tuple[_LayoutSearch, _Outcome]] = {}
    for one, outcome in others:
        if outcome is best or outcome.timeline is None or outcome.total_s <= best.total_s * (1 + _SAME):
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
        if kind not in kinds or _rank(outcome) < _rank(kinds[kind][1]):
            kinds[kind] = one, outcome
    fitting = sorted(kinds.values(), key=lambda item: _rank(item[1]))[:_NUM_ALTERNATIVES]
    result = []
    for one, outcome in fitting:
        text = describe_placement(outcome.chunks, outcome.blocks, outcome.choice.depth)
        if one is not winner:
            text = f"chunks of {format_bytes(one.layout.block_bytes)}: {text}"
        result.append(Alternative(text, outcome.total_s, _why(outcome, best)))
    most = winner.look(winner.everything)
    if most.timeline is None:
        lacking = most.gpu_bytes - (winner.problem.budget.gpu_bytes or 0)
        reason = f"needs {format_bytes(most.gpu_bytes)} on the GPU, {format_bytes(lacking)} too many"
        result.append(Alternative(describe_placement(most.chunks, most.blocks, 0), None, reason))
    return tuple(result)


def _why(loser: _Outcome, best: _Outcome) -> str:
    if loser.timeline is None or best.timeline is None:
        return "does not fit"
    ours, theirs = best.timeline.times, loser.timeline.times
    more = {
        "in the update": theirs.step_s - ours.step_s,
        "of waiting in forward and backward": theirs.waiting_s - ours.waiting_s,
    }
    parts = [
        f"{format_seconds(abs(seconds))} {'more' if seconds > 0 else 'less'} {name}"
        for name, seconds in sorted(more.items(), key=lambda item: -item[1])
        if abs(seconds) > ours.total_s * _SAME / 10
    ]
    return ", ".join(parts) or "as fast"


def _rank(outcome: _Outcome) -> tuple[float, int, int, int]:
    """The faster, then the one that takes less of the host, then of the GPU, then that fetches less far ahead."""
    return (outcome.total_s, outcome.host_bytes, outcome.gpu_bytes, outcome.choice.depth)
