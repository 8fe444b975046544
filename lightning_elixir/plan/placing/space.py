"""The placements of one layout that the search knows: from numbers of chunks to chunks, limits and a simulated step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_elixir.plan.activations import ModelBlock
from lightning_elixir.plan.placing.placement import (
    OFFLOADED,
    RESIDENT,
    Layout,
    Placed,
    Placement,
    Placer,
    Site,
    sites_of,
)
from lightning_elixir.plan.placing.spares import SPARE_PATTERNS
from lightning_elixir.plan.placing.spilling import Spilling
from lightning_elixir.plan.problem import Problem
from lightning_elixir.plan.profile import StepProfile
from lightning_elixir.plan.simulator.timeline import Costs, RCacheScripts, StepSimulator, compressed
from lightning_elixir.plan.types import ChunkSpec, Plan, StepTimes, Tier, UpdateTiming

KEPT = Site(Tier.GPU, Tier.CPU, True)
SHARDED = Site(Tier.GPU, Tier.GPU, False)
SHARDED_PARAMS = Site(Tier.GPU, Tier.CPU, False)
PATTERNS = ("first", "last", "spread", "smallest")
DEPTHS = (2, 4, 8)
_ROUNDING = 1e-9  # of sums of times in another order
_FASTER_HOST = 1.4
"""Beside what is computed: hosts update in training 0.8 to 1.2 times as fast as measured, and computing takes up to 1.1
times as long beside copies. With 1.25 to 2 the same placements are found, but for a few chunks."""


@dataclass(frozen=True)
class Candidate:
    """A chunk size, and what a step does under it."""

    layout: Layout
    profile: StepProfile
    blocks: tuple[ModelBlock, ...] | None = None
    """What the profile has become of activations; None: what the problem says."""
    with_fates: Callable[[tuple[ModelBlock, ...]], Candidate] | None = None
    """The same chunks with other fates of activations, where these are to be chosen."""

    @cached_property
    def brief(self) -> StepProfile:
        """The profile in fewer accesses."""
        return compressed(self.profile)

    @cached_property
    def scripts(self) -> RCacheScripts:
        """Of the brief profile, for every search: they do not depend on where states are, and how these are updated."""
        return RCacheScripts(self.brief.trace)


@dataclass(frozen=True)
class Choice:
    """One point of the search space: numbers of chunks."""

    resident: int = 0
    """Everything on the GPU for good."""
    sharded: int = 0
    """Shards and states on the GPU, replicas in the rCache: see `Space.sharded`."""
    kept: int = 0
    """Parameters on the GPU for good, states on the host: see `Space.kept`."""
    is_rest_on_gpu: bool = False
    """Parameter shards of the others on the GPU (several ranks)."""
    pattern: str = "first"
    streamed_share: float = 0.0
    depth: int = 0
    spare_pattern: str = SPARE_PATTERNS[0]
    """Which chunks have spare states, where updates begin inside backward only with these: see `spares.py`."""
    spares: int | None = None
    """At most so many of them; None: as many as the host has memory for."""
    sites: tuple[Site, ...] | None = None
    """Every chunk's site by itself, which the numbers above then do not say; but for spare states."""


@dataclass(frozen=True)
class Outcome:
    choice: Choice
    chunks: tuple[ChunkSpec, ...]
    gpu_bytes: int
    host_bytes: int
    nvme_bytes: int
    blocks: int
    times: StepTimes | None
    """Of a step; None if it does not fit."""
    handling_s: float = 0.0
    """The host's work to have chunks moved and updated, which is not in `times`."""
    is_glimpsed: bool = False
    """It is slower than it had to be, and no more was found than that: `times` are too short."""

    @property
    def felt_s(self) -> float:
        """What outcomes are compared by."""
        return float("inf") if self.times is None else self.times.total_s + self.handling_s


class Space:
    """Every placement of one layout: what it is, whether it fits, and how long a step takes.

    Args:
        candidate: The layout, and what a step does.
        problem: Limits, hardware and what training does.
        like: The space of this layout and problem with other fates of activations: what does not depend on these is
            found once for both.
    """

    def __init__(self, candidate: Candidate, problem: Problem, like: Space | None = None) -> None:
        if candidate.blocks is not None:
            problem = replace(problem, blocks=candidate.blocks)
        self.problem = problem
        self.layout = candidate.layout
        self.profile = candidate.profile
        self.placer: Placer = Placer(
            candidate.layout, problem, candidate.profile, None if like is None else like.placer
        )
        self._costs: Costs = Costs(problem.hardware, self.placer.scheme) if like is None else like._costs
        self._brief, self._scripts = candidate.brief, candidate.scripts
        self._simulator = StepSimulator(self._brief, self._costs, self._scripts)
        self._placed: dict[Choice, Placed] = {} if like is None else like._placed
        packed = candidate.layout.packed
        self.trainable = [i for i, c in enumerate(packed) if c.requires_grad]
        self.num_trainable = len(self.trainable)
        self.everything = Choice(resident=self.num_trainable, kept=len(packed))
        is_recomputed = any(block.fate.is_recomputed for block in problem.blocks)
        self.could_compute_less = candidate.with_fates is not None and is_recomputed
        """Fates of activations are to be chosen, and these are not the fastest."""
        self.is_shared = not self.placer.scheme.is_shard_whole
        self.rests = (False, True) if self.is_shared else (False,)
        """Choices of `Choice.is_rest_on_gpu`."""
        # Replicas that several ranks keep are gathered at the step. Hosts wait there for the update, if that is not
        # over, and the device runs dry meanwhile (seen: 1.29 instead of 1.15 s a step on two H200s, for one chunk).
        # Shards wait until there is a need.
        is_waited_for = self.is_shared and problem.updates.timing is not UpdateTiming.AFTER_BACKWARD
        self.kept = [
            SHARDED_PARAMS if is_waited_for and not problem.regime.is_in_step(c.members) else KEPT for c in packed
        ]
        """Of each chunk: where its parameters stay on the GPU, and its states on the host."""
        can_shard = self.placer.scheme.is_smaller_without_replica
        self.sharded = [SHARDED if can_shard(c.dtype, requires_grad=c.requires_grad) else RESIDENT for c in packed]
        """Of each chunk: where its states stay on the GPU, and its replica does not, if that spares memory, as several
        ranks share the chunk, or a master is there to cast from."""
        self.can_shard = SHARDED in self.sharded
        self.outcomes: dict[Choice, Outcome] = {}
        self._by_placement: dict[tuple[Placement, int], Outcome] = {}
        self._spilling = Spilling(self.placer.scheme)
        self._spilled: dict[Placement, Placement] = {}
        self.num_simulations = 0
        self.most_state_bytes = self._most_state_bytes()

    def _depths(self) -> tuple[int, ...]:
        return DEPTHS if self.problem.request.prefetch_depth else (0,)

    def _shares(self) -> tuple[float, ...]:
        if not self.problem.regime.can_stream:
            return (0.0,)
        balanced, hardware = self._balanced_share(), self.problem.hardware
        # Where the two hardly run at the same time, the stream is as fast as alone.
        apart = _share(hardware.streamed_adam_numel_per_s, hardware.cpu_adam_numel_per_s)
        return tuple(sorted({0.0, balanced / 2, balanced, (balanced + apart) / 2, apart, (1 + apart) / 2, 1.0}))

    def _shares_near(self, at: Choice, step: int) -> list[float]:
        """Those with which so many chunks more are streamed, or fewer, where updates can be. Chunk by chunk, since one
        too many has the stream end late by all that it takes for a chunk, and one too few the host."""
        sites = self._sites(at)
        count = sum(sites[i].optim_tier is Tier.CPU for i in self.trainable)
        streamed = sum(site.is_update_streamed for site in sites)
        return [round(n / count, 4) for n in (streamed + step, streamed - step) if 0 < n <= count]

    def _balanced_share(self) -> float:
        """Both the host and the stream end at the same time."""
        if not self.problem.regime.can_stream:
            return 0.0
        hardware = self.problem.hardware
        return _share(hardware.streamed_beside(hardware.cpu_adam_numel_per_s), hardware.cpu_adam_numel_per_s)

    def _most_resident(self, base: Choice) -> int:
        """The largest number of resident chunks that fits beside the smallest rCache."""
        return self._largest(self.num_trainable, lambda n: replace(base, resident=n))

    def _most_sharded(self, base: Choice) -> int:
        return self._largest(self.num_trainable, lambda n: replace(base, sharded=n))

    def _most_kept(self, base: Choice) -> int:
        return self._largest(len(self.layout.packed), lambda n: replace(base, kept=n))

    def _largest(self, most: int, choice_of: Callable[[int], Choice]) -> int:
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits_gpu(self._placement(choice_of(middle))):
                low = middle
            else:
                high = middle - 1
        return low

    def _most_state_bytes(self) -> int | None:
        """What the user lets states take of the memory beside rCache and activations."""
        ratio, limit = self.problem.request.gpu_margin_mem_ratio, self.problem.budget.gpu_bytes
        if ratio is None or limit is None:
            return None
        offloaded = self.placer.at([OFFLOADED] * len(self.layout.packed))
        blocks = offloaded.smallest + self.problem.request.prefetch_depth
        return int(max(0, limit - offloaded.gpu_bytes(blocks)) * ratio)

    # One choice

    def look(self, choice: Choice) -> Outcome:
        """Build, check against the limits, and simulate."""
        return self.glimpse(choice, math.inf)

    def glimpse(self, choice: Choice, limit_s: float) -> Outcome:
        """As `look`, but of a step that feels longer than `limit_s`, no more is found than that."""
        known = self.outcomes.get(choice)
        if known is not None and not (known.is_glimpsed and known.felt_s <= limit_s):
            return known
        wanted = self._at(choice).with_spares(choice.spare_pattern, choice.spares)
        depth = 0 if not wanted.managed else choice.depth
        same = self._by_placement.get((wanted, depth))  # other numbers that come to the same
        if same is None or (same.is_glimpsed and same.felt_s <= limit_s):
            same = self._by_placement[wanted, depth] = self._looked(choice, self._within_host(wanted), limit_s)
        outcome = self.outcomes[choice] = replace(same, choice=choice)
        return outcome

    def _looked(self, choice: Choice, placement: Placement, limit_s: float) -> Outcome:
        """Of a step that feels longer than `limit_s`, only that."""
        blocks, use = placement.blocks, placement.use
        times, handling_s, is_glimpsed = None, 0.0, False
        if (
            self._fits_gpu(placement)
            and self._fits_host(use.host_bytes)
            and use.nvme_bytes <= self.problem.budget.nvme_bytes
        ):
            plan = self.placer.bare_plan(placement.chunks, blocks, choice.depth, "auto")
            handling_s = self._simulator.handling_s(placement.chunks)
            times = self._times(plan, limit_s - handling_s)
            is_glimpsed = times.total_s + handling_s > limit_s
            self.num_simulations += 1
        gpu_bytes = placement.gpu_bytes(blocks)
        found = Outcome(choice, placement.chunks, gpu_bytes, use.host_bytes, use.nvme_bytes, blocks, times)
        return replace(found, handling_s=handling_s, is_glimpsed=is_glimpsed)

    def _times(self, plan: Plan, limit_s: float) -> StepTimes:
        """Of a step; of one that takes longer than `limit_s`, some that say so."""
        if math.isfinite(limit_s):
            least = self._simulator.least(plan.chunks, plan.update_timing)
            if least.total_s > limit_s * (1 + _ROUNDING):
                return least
        return self._simulator.run(plan, limit_s=limit_s).times

    def with_faster_host_s(self, outcome: Outcome) -> float:
        """A step of what fits, if the host updates faster than it was measured to."""
        plan = self.placer.bare_plan(outcome.chunks, outcome.blocks, outcome.choice.depth, "auto")
        return self._faster.run(plan).times.total_s

    @cached_property
    def _faster(self) -> StepSimulator:
        hardware = self.problem.hardware.with_host_slower(1 / _FASTER_HOST)
        return StepSimulator(self._brief, Costs(hardware, self.placer.scheme), self._scripts)

    def _fits_gpu(self, placement: Placement) -> bool:
        limit = self.problem.budget.gpu_bytes
        if limit is None:
            return True
        is_too_much = self.most_state_bytes is not None and placement.use.gpu_state_bytes > self.most_state_bytes
        if is_too_much and not is_all_on_gpu(placement.chunks):
            return False
        return placement.gpu_bytes(placement.smallest) <= limit

    def _fits_host(self, nbytes: int) -> bool:
        limit = self.problem.budget.cpu_bytes
        return limit is None or nbytes <= limit

    def _placement(self, choice: Choice) -> Placement:
        """Without spare states, which take only what is left."""
        return self._within_host(self._at(choice))

    def _at(self, choice: Choice) -> Placement:
        placed = self._placed.get(choice)
        if placed is None:
            placed = self._placed[choice] = self.placer.placed(tuple(self._sites(choice)))
        return self.placer.of_placed(placed)

    def _within_host(self, placement: Placement) -> Placement:
        """With states, and parameters, on NVMe that the host's memory does not hold."""
        if not self.problem.budget.nvme_bytes or self._fits_host(placement.use.host_bytes):
            return placement
        known = self._spilled.get(placement)
        if known is None:
            known = self._spilled[placement] = self.placer.at(sites_of(self._spill(placement.chunks)))
        return known

    def _spill(self, chunks: Sequence[ChunkSpec]) -> Sequence[ChunkSpec]:
        limit, room = self.problem.budget.cpu_bytes or 0, self.problem.budget.nvme_bytes
        without = self._spilling.states(chunks, limit, room)
        if self._fits_host(self.placer.at(sites_of(without)).use.host_bytes):
            return without
        return self._spilling.states_and_params(chunks, limit, room) or without

    def _sites(self, choice: Choice) -> list[Site]:
        if choice.sites is not None:
            return list(choice.sites)
        packed = self.layout.packed
        rest = SHARDED_PARAMS if choice.is_rest_on_gpu else OFFLOADED
        sites = [rest] * len(packed)
        taken: set[int] = set()
        ordered = self._ordered(self.trainable, choice.resident + choice.sharded, choice.pattern)
        for position, chunk_id in enumerate(ordered[: choice.resident + choice.sharded]):
            sites[chunk_id] = RESIDENT if position < choice.resident else self.sharded[chunk_id]
            taken.add(chunk_id)
        left = [i for i in range(len(packed)) if i not in taken]
        for chunk_id in self._ordered(left, choice.kept, choice.pattern)[: choice.kept]:
            sites[chunk_id] = self.kept[chunk_id] if packed[chunk_id].requires_grad else RESIDENT
        on_host = [i for i in self.trainable if sites[i].optim_tier is Tier.CPU]
        streamed = round(len(on_host) * choice.streamed_share)
        for chunk_id in self._ordered(on_host, streamed, "spread")[:streamed]:
            sites[chunk_id] = sites[chunk_id]._replace(is_update_streamed=True)
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


def rank(outcome: Outcome) -> tuple[float, int, int, int, int]:
    """The faster, then the one that takes less of NVMe, then of the host, then of the GPU, then that fetches less far
    ahead."""
    return (outcome.felt_s, outcome.nvme_bytes, outcome.host_bytes, outcome.gpu_bytes, outcome.choice.depth)


def is_all_on_gpu(chunks: Sequence[ChunkSpec]) -> bool:
    return all(c.is_persistent and (not c.requires_grad or c.optim_tier is Tier.GPU) for c in chunks)


def _share(one: float, other: float) -> float:
    """What the one does of all that both do."""
    return round(one / (one + other), 3)
