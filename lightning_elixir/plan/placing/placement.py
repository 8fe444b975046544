"""Chunks to tiers: what stays on the GPU, what goes to the host, and how large the rCache is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.activations import has_offloaded
from lightning_elixir.plan.describe import IN_STEP_NOTE
from lightning_elixir.plan.memory import MemoryUse, Scheme, memory_use, num_grad_blocks, problem_of_params_on_nvme
from lightning_elixir.plan.packing import PackedChunk, pack, padding_bytes, regular_block_bytes, round_up, waste_bytes
from lightning_elixir.plan.placing.parts import STREAMABLE, gpu_parts, host_parts
from lightning_elixir.plan.placing.spares import chunks_to_spare
from lightning_elixir.plan.placing.spilling import can_move_params
from lightning_elixir.plan.problem import Problem
from lightning_elixir.plan.profile import Course, StepProfile
from lightning_elixir.plan.simulator.timeline import Holding, beside_rcache_bytes, highest_moment
from lightning_elixir.plan.tables import Table
from lightning_elixir.plan.types import ALIGN_NUMEL, DTYPE_BYTES, AccessTrace, ChunkSpec, ParamSpec, Plan, Tier
from lightning_elixir.plan.units import format_bytes

_LATER_ACTIVATIONS = 0.1
"""That part more of them may go to host memory than in the step that was foreseen."""


@dataclass(frozen=True)
class Layout:
    """The model cut into chunks of one size, without places."""

    packed: tuple[PackedChunk, ...]
    """Positions are ids."""
    block_bytes: int
    """Bytes of one rCache block."""
    compute_dtype: str

    @classmethod
    def of(cls, specs: Sequence[ParamSpec], chunk_numel: int, world_size: int, compute_dtype: str) -> Layout:
        """Parameters in chunks of at most so many elements, as far as each fits into one."""
        packed = pack(specs, chunk_numel, world_size, compute_dtype)
        return cls(packed, regular_block_bytes(packed, chunk_numel, world_size, compute_dtype), compute_dtype)

    def for_ranks(self, world_size: int) -> Layout:
        """The same chunks, padded so that so many ranks can share them."""
        packed = tuple(replace(c, numel=round_up(c.numel, world_size * ALIGN_NUMEL)) for c in self.packed)
        chunk_numel = self.block_bytes // DTYPE_BYTES[self.compute_dtype]
        nbytes = regular_block_bytes(packed, chunk_numel, world_size, self.compute_dtype)
        return replace(self, packed=packed, block_bytes=nbytes)


class Site(NamedTuple):
    """Where one chunk is."""

    param_tier: Tier
    optim_tier: Tier
    is_persistent: bool
    is_update_streamed: bool = False
    has_spare_states: bool = False


def sites_of(chunks: Sequence[ChunkSpec]) -> list[Site]:
    """Where each of them is."""
    return [Site(c.param_tier, c.optim_tier, c.is_persistent, c.is_update_streamed, c.has_spare_states) for c in chunks]


RESIDENT = Site(Tier.GPU, Tier.GPU, True)
OFFLOADED = Site(Tier.CPU, Tier.CPU, False)


def first_on_device(chunks: Sequence[ChunkSpec]) -> list[Site]:
    """Sites for as many bytes of parameters on the device with states for good as there are, but of the first chunks;
    all others that are trained go to the host. Frozen ones stay where they are."""
    trained = [c for c in chunks if c.requires_grad]
    room = sum(c.nbytes for c in trained if c.is_persistent and c.optim_tier is Tier.GPU)
    sites = sites_of(chunks)
    for chunk in trained:
        sites[chunk.id] = OFFLOADED
        if chunk.nbytes <= room:
            sites[chunk.id] = RESIDENT
            room -= chunk.nbytes
    return sites


def place(layout: Layout, problem: Problem, profile: StepProfile | None = None) -> Plan:
    """Place chunks by a fixed policy, within the budget; for "auto", see `plan/placing/search.py`.

    Args:
        layout: The chunks.
        problem: Policy, limits, and how updates are to run.
        profile: What a step takes beside the chunks, when; None: `budget.non_model_bytes` all the time.

    Returns:
        The plan; `notes` holds the predicted bytes of one rank by kind (`MemoryUse`).

    Raises:
        PlanError: An unknown policy, or a fraction outside [0, 1].
        CapacityError: A limit cannot hold what the policy needs.
    """
    problem.check()
    request, placer = problem.request, Placer(layout, problem, profile)
    policy = {"static": "const"}.get(request.policy, request.policy)
    if policy == "cuda":
        sites = [RESIDENT] * len(layout.packed)
    elif policy == "cpu":
        sites = [OFFLOADED] * len(layout.packed)
    elif policy == "const":
        sites = _const_sites(placer)
    else:
        raise PlanError(f"policy {request.policy!r} is searched for, not placed")
    chunks = with_states_on_nvme(placer.at(sites).chunks, request.nvme_offload_fraction)
    chunks = with_params_on_nvme(chunks, request.nvme_offload_param_fraction)
    refusal = problem_of_params_on_nvme(chunks, problem.world_size, request.distributed_storage)
    if refusal is not None:
        raise PlanError(refusal)
    return placer.plan(placer.at(sites_of(chunks)).with_spares().sites, policy)


def _const_sites(placer: Placer) -> list[Site]:
    request, packed = placer.request, placer.layout.packed
    param_bytes = [c.nbytes for c in packed]
    scheme = placer.scheme
    chunks = placer.at([RESIDENT] * len(packed)).chunks
    optim_bytes = [(scheme.grad_shard_bytes(c) + scheme.state_bytes(c)) * scheme.num_sharing(c) for c in chunks]
    sharded = _highest(param_bytes, request.shard_param_frac)
    offloaded = _highest(param_bytes, request.offload_param_frac)
    optim_offloaded = _highest(optim_bytes, request.offload_optim_frac)
    sites = []
    for i in range(len(packed)):
        param_tier = Tier.CPU if i in offloaded else Tier.GPU
        optim_tier = Tier.CPU if i in optim_offloaded else Tier.GPU
        is_persistent = param_tier is Tier.GPU and (i not in sharded or placer.scheme.is_shard_whole)
        sites.append(Site(param_tier, optim_tier, is_persistent))
    return sites


class Needs:
    """How many blocks one module's forward needs at once.

    A module that owns parameters keeps them in use while its children run, so theirs are needed together. Where a trace
    is known, it tells what is in use at once.

    Args:
        packed: The chunks.
        accesses: (module name, FQNs that it owns directly).
        block_bytes: Bytes of one block.
    """

    def __init__(
        self,
        packed: Sequence[PackedChunk],
        accesses: Sequence[tuple[str, tuple[str, ...]]],
        block_bytes: int,
    ) -> None:
        chunk_of = {m.fqn: i for i, c in enumerate(packed) for m in c.members}
        own = {name: {chunk_of[fqn] for fqn in fqns if fqn in chunk_of} for name, fqns in accesses}
        self._blocks = [max(1, -(-c.nbytes // block_bytes)) for c in packed]
        self._names = [c.members[0].fqn for c in packed]
        self._sets: dict[frozenset[int], str] = {}
        for name, ids in own.items():
            needed = set(ids)
            parts = name.split(".") if name else []
            for depth in range(len(parts)):
                needed |= own.get(".".join(parts[:depth]), set())
            self._sets.setdefault(frozenset(needed), name)
        # Whatever the modules say (a parameter that none of them is known to own): each chunk must fit by itself.
        for i, name in enumerate(self._names):
            self._sets.setdefault(frozenset((i,)), name)

    def in_step(self, trace: AccessTrace) -> Needs:
        """With what a step that touches this has in use at once."""
        found = copy(self)
        found._sets = dict(self._sets)
        for in_use in trace.in_use():
            if in_use not in found._sets:
                found._sets[in_use] = " and ".join(self._names[i] for i in sorted(in_use)[:3])
        return found

    @cached_property
    def _by_most(self) -> list[tuple[int, frozenset[int]]]:
        """(blocks, ids) of all sets, were no chunk persistent, the largest first."""
        most = [(sum([self._blocks[i] for i in ids]), ids) for ids in self._sets]
        return sorted(most, key=lambda pair: -pair[0])

    def fewest(self, managed: Collection[int]) -> int:
        """As `smallest`, without the module."""
        fewest = 0
        for most, ids in self._by_most:
            if most <= fewest:
                break
            fewest = max(fewest, sum([self._blocks[i] for i in ids if i in managed]))
        return fewest

    def smallest(self, managed: Collection[int]) -> tuple[int, str]:
        """Least blocks that run the model, and the module that needs them.

        Args:
            managed: Ids of the chunks that are not persistent.
        """
        most, module = 0, ""
        for ids, name in self._sets.items():
            blocks = sum([self._blocks[i] for i in ids if i in managed])
            if blocks > most:
                most, module = blocks, name
        return most, module

    def all_blocks(self, managed: Collection[int]) -> int:
        """Blocks that hold every managed chunk."""
        return sum(self._blocks[i] for i in managed)


class Placed:
    """The chunks of a layout at their sites, and what follows from that alone, whatever becomes of activations: each
    thing is found once, when it is asked for."""

    def __init__(self, scheme: Scheme, sites: tuple[Site, ...], chunks: tuple[ChunkSpec, ...]) -> None:
        self._scheme = scheme
        self.sites, self.chunks = sites, chunks
        self._held: tuple[tuple[int, ...], Holding] | None = None  # for which arrivals

    @cached_property
    def use(self) -> MemoryUse:
        """Bytes by kind, without the rCache and activations."""
        return replace(memory_use(self.chunks, 0, self._scheme), host_activation_bytes=0)

    @cached_property
    def managed(self) -> set[int]:
        """Chunks that come and go."""
        return {c.id for c in self.chunks if not c.is_persistent}

    def holding(self, arrivals: tuple[int, ...]) -> Holding:
        """What is on the device while gradients come in that order, as in `Course`."""
        held = self._held
        if held is None or held[0] != arrivals:
            held = self._held = arrivals, Holding.of(self.chunks, arrivals, self._scheme, self.use)
        return held[1]


class Placement:
    """The chunks of a layout at their sites in one step, and what follows from that: each thing is found once, when it
    is asked for. Made by `Placer.at`."""

    def __init__(self, placer: Placer, placed: Placed) -> None:
        self._placer, self._placed = placer, placed
        self.sites, self.chunks = placed.sites, placed.chunks

    @cached_property
    def use(self) -> MemoryUse:
        """Bytes by kind, without the rCache."""
        nbytes = self._placer.scheme.activation_host_bytes
        return replace(self._placed.use, host_activation_bytes=nbytes) if nbytes else self._placed.use

    @property
    def managed(self) -> set[int]:
        """Chunks that come and go."""
        return self._placed.managed

    @cached_property
    def smallest(self) -> int:
        """Blocks of the smallest rCache that runs."""
        return self._placer.needs.fewest(self.managed)

    @cached_property
    def blocks(self) -> int:
        """As many blocks as the budget allows; with no limit known, enough to run and to prefetch. At least the
        smallest number that runs, whether or not that fits."""
        placer = self._placer
        everything, limit = placer.needs.all_blocks(self.managed), placer.budget.gpu_bytes
        if limit is None:
            return min(everything, self.smallest + placer.request.prefetch_depth)
        left = limit - self._beside_rcache
        return min(everything, max(self.smallest, left // placer.layout.block_bytes))

    @cached_property
    def _beside_rcache(self) -> int:
        """Device bytes at the highest moment of a step, without the rCache."""
        placer = self._placer
        if placer.profile is None:
            return self.at_peak.gpu_bytes
        return self._placed.holding(placer.course.arrivals).highest(placer.course).total

    @cached_property
    def at_peak(self) -> MemoryUse:
        """Bytes by kind at that moment; where none is known, as if all kinds came together."""
        placer = self._placer
        if placer.profile is None:
            stream_bytes = placer.scheme.stream_bytes(self.chunks)
            return replace(self.use, gpu_stream_bytes=stream_bytes, non_model_bytes=placer.budget.non_model_bytes)
        return highest_moment(self.chunks, placer.course, placer.scheme, self.use)

    def update_bytes(self, blocks: int) -> int:
        """On the device while updates run, with so many blocks: what no smaller batch makes less."""
        placer = self._placer
        return beside_rcache_bytes(self.chunks, Course(), placer.scheme, self.use) + blocks * placer.layout.block_bytes

    def gpu_bytes(self, blocks: int) -> int:
        """Highest moment of a step on the device, with so many blocks."""
        return self._beside_rcache + blocks * self._placer.layout.block_bytes

    def with_spares(self, pattern: str = "spread", most: int | None = None) -> Placement:
        """The same with spare states as far as the host has memory for them, where updates begin inside backward only
        with these. Arguments as for `chunks_to_spare`."""
        placer = self._placer
        if not placer.scheme.begins_only_into_spares:
            return self
        limit = placer.budget.most_with_spares
        room = None if limit is None else limit - self.use.host_bytes
        chosen = chunks_to_spare(self.chunks, placer.scheme, room, pattern, most)
        return placer.at([s._replace(has_spare_states=True) if i in chosen else s for i, s in enumerate(self.sites)])


def _activation_host_bytes(problem: Problem, profile: StepProfile | None) -> int | None:
    """Host memory that activations may take; None: what the host has."""
    if not has_offloaded(problem.blocks):
        return 0
    if profile is None or profile.offloaded_bytes is None:
        return problem.activation_host_bytes
    return int(profile.offloaded_bytes * (1 + _LATER_ACTIVATIONS))


class Placer:
    """From sites to plans of one layout, within limits. Arguments as for `place`.

    Args:
        like: Another one of this layout and problem, but for what becomes of activations: what does not depend on that
            is found once for both.
    """

    def __init__(
        self, layout: Layout, problem: Problem, profile: StepProfile | None = None, like: Placer | None = None
    ) -> None:
        self.layout, self.profile = layout, profile
        self.request, self.budget, self.blocks = problem.request, problem.budget, problem.blocks
        self.ignored_bytes = problem.ignored_bytes
        self._activation_host_bytes = _activation_host_bytes(problem, profile)
        scheme = problem.scheme(layout.block_bytes) if like is None else like.scheme
        self.scheme: Scheme = scheme.with_activations(self._activation_host_bytes or 0)
        self.course = Course() if profile is None else profile.course
        self._bare_needs: Needs = (
            Needs(layout.packed, problem.request.accesses, layout.block_bytes) if like is None else like._bare_needs
        )
        self.needs = self._bare_needs if profile is None else self._bare_needs.in_step(profile.trace)
        self._placed: dict[tuple[Site, ...], Placed] = {} if like is None else like._placed
        self._at_site: dict[Site, tuple[ChunkSpec, ...]] = {} if like is None else like._at_site  # every chunk there
        self.of_placed = Table[Placed, Placement](partial(Placement, self))

    def at(self, sites: Iterable[Site]) -> Placement:
        """Every chunk at a site; the same object for the same sites."""
        return self.of_placed(self.placed(tuple(sites)))

    def placed(self, sites: tuple[Site, ...]) -> Placed:
        """As `at`, whatever becomes of activations."""
        known = self._placed.get(sites)
        if known is None:
            at_site = self._at_site
            for site in set(sites).difference(at_site):
                at_site[site] = tuple(
                    ChunkSpec(i, c.dtype, c.requires_grad, c.numel, c.members, *site)
                    for i, c in enumerate(self.layout.packed)
                )
            chunks = tuple([at_site[site][i] for i, site in enumerate(sites)])
            known = self._placed[sites] = Placed(self.scheme, sites, chunks)
        return known

    def saved_by_smaller_chunks(self, chunks: Sequence[ChunkSpec], blocks: int) -> int:
        """Device bytes that the blocks of rCache and gradients could at most spare, were every parameter a chunk."""
        largest = max((m.numel * DTYPE_BYTES[c.dtype] for c in chunks for m in c.members), default=0)
        held = [c for c in chunks if self.scheme.has_grad_block(c)]
        num_grads = num_grad_blocks(held, self.scheme.world_size, self.course.arrivals)
        # A gradient waits in its block for those of the chunk's other parameters: by itself it may need no further one.
        is_shared = any(len(c.members) > 1 for c in held)
        least = num_grad_blocks(held, self.scheme.world_size) if is_shared else num_grads
        of_rcache = blocks * max(0, self.layout.block_bytes - largest)
        return of_rcache + max(0, num_grads * self.layout.block_bytes - least * largest)

    def plan(self, sites: Sequence[Site], policy: str, *, prefetch_depth: int | None = None) -> Plan:
        """The plan with these sites and the largest rCache that fits.

        Raises:
            CapacityError: A limit cannot hold it.
        """
        placement = self.at(sites)
        chunks, blocks = placement.chunks, placement.blocks
        use = memory_use(chunks, blocks, self.scheme, self._non_model_bytes())
        gpu_bytes = placement.gpu_bytes(blocks)
        self._check_gpu(placement)
        self._check_host(use, chunks)
        depth = self.request.prefetch_depth if prefetch_depth is None else prefetch_depth
        return replace(
            self.bare_plan(chunks, blocks, depth, policy),
            notes={
                "gpu_param_bytes": use.gpu_param_bytes,
                "gpu_state_bytes": use.gpu_state_bytes,
                "gpu_grad_bytes": use.gpu_grad_bytes,
                "rcache_bytes": use.rcache_bytes,
                "gpu_stream_bytes": self.scheme.stream_bytes(chunks),
                "gpu_bytes": gpu_bytes,
                "host_param_bytes": use.host_param_bytes,
                "host_state_bytes": use.host_state_bytes,
                "host_grad_bytes": use.host_grad_bytes,
                "host_spare_bytes": use.host_spare_bytes,
                "host_bytes": use.host_bytes,
                "host_buffer_bytes": use.host_buffer_bytes,
                "host_activation_bytes": use.host_activation_bytes,
                "nvme_bytes": use.nvme_bytes,
                "non_model_bytes": use.non_model_bytes,
                "padding_bytes": padding_bytes(self.layout.packed),
                "waste_bytes": waste_bytes(self.layout.packed, self.layout.block_bytes),
                **self._in_step_note(chunks),
            },
        )

    def _in_step_note(self, chunks: Sequence[ChunkSpec]) -> dict[str, str]:
        beside = [c for c in chunks if c.requires_grad and c.optim_tier is not Tier.GPU]
        count = sum(self.scheme.regime.is_in_step(c.members) for c in beside)
        return {IN_STEP_NOTE: f"{count} of {len(beside)}"} if count else {}

    def bare_plan(self, chunks: tuple[ChunkSpec, ...], blocks: int, prefetch_depth: int, policy: str) -> Plan:
        """The plan without what is predicted of it, whether or not it fits."""
        return Plan(
            world_size=self.scheme.world_size,
            compute_dtype=self.layout.compute_dtype,
            block_bytes=self.layout.block_bytes,
            rcache_blocks=blocks,
            prefetch_depth=prefetch_depth,
            chunks=chunks,
            is_storage_distributed=self.scheme.is_storage_distributed,
            update_timing=self.scheme.updates.timing,
            grad_reuses_compute_shard=self.scheme.updates.grad_reuses_compute_shard,
            activations=self.blocks,
            activation_host_bytes=self._activation_host_bytes,
            policy=policy,
            tensor_parallel_size=self.scheme.tensor_parallel_size,
            expert_parallel_size=self.scheme.expert_parallel_size,
            num_copies=self.scheme.num_copies,
        )

    # Limits

    def _non_model_bytes(self) -> int:
        return self.budget.non_model_bytes if self.profile is None else self.profile.peak_non_model_bytes

    def _check_gpu(self, placement: Placement) -> None:
        limit, blocks, use = self.budget.gpu_bytes, placement.blocks, placement.at_peak
        gpu_bytes = placement.gpu_bytes(blocks)
        if limit is None or gpu_bytes <= limit:
            return
        if blocks:
            cures = ["raise gpu_memory_limit"]
            if gpu_bytes - limit <= self.saved_by_smaller_chunks(placement.chunks, blocks):
                cures.append("lower chunk_size")
            if use.gpu_param_bytes + use.gpu_state_bytes:
                cures.append(f"keep less on the {self.budget.words.device}")
            if use.non_model_bytes - self.ignored_bytes > gpu_bytes - limit and placement.update_bytes(blocks) <= limit:
                is_recomputing = self.profile is not None and self.profile.is_recomputing
                cures.append(f"use a smaller batch{'' if is_recomputing else ' or activation checkpointing'}")
        else:
            cures = ['use placement_policy="auto" or "cpu"', "more ranks"]
        cure = ", or ".join(cures)
        parts = gpu_parts(use, self.ignored_bytes, self.scheme, blocks, self.needs.smallest(placement.managed)[1])
        raise CapacityError(
            f"{self.budget.words.memory}: the plan needs {format_bytes(gpu_bytes)} on each rank ({parts}), but there"
            f" are {format_bytes(limit)}: {format_bytes(gpu_bytes - limit)} too few. {cure[0].upper()}{cure[1:]}.",
            resource="GPU",
            lacking_bytes=gpu_bytes - limit,
        )

    def _check_host(self, use: MemoryUse, chunks: Sequence[ChunkSpec]) -> None:
        limit = self.budget.cpu_bytes
        if limit is None or use.host_bytes <= limit:
            return
        in_memory = sum(
            c.numel for c in chunks if Tier.CPU in (c.param_tier, c.optim_tier if c.requires_grad else c.param_tier)
        )
        cures = [f"raise {self.budget.words.host_limit}"] if self.budget.words.host_limit else []
        if use.host_state_bytes and not self.scheme.regime.whole_update_bytes:
            cures.append(f"keep optimizer states on a disk (nvme_offload_fraction, nvme_offload_dir; {STREAMABLE})")
        elif use.host_param_bytes and not use.host_state_bytes:
            cures.append("keep parameters on the disk as well (nvme_offload_param_fraction)")
        if use.host_buffer_bytes > limit // 2:
            cures.append("take a smaller chunk_size (buffers hold some chunks)")
        if in_memory:
            cures.append(f"keep more on the {self.budget.words.device}")
        cures.append("make the model smaller")
        if use.host_state_bytes:
            cures.append("take an optimizer with fewer states")
        if in_memory:
            cures.append("spread the model over more hosts")
        fitting = ""
        if in_memory:
            num_fitting = in_memory * max(0, limit - use.host_buffer_bytes) // (use.host_bytes - use.host_buffer_bytes)
            fitting = f" What would fit is about {num_fitting:,} of the {in_memory:,} parameters in host memory."
        cure = ", or ".join(cures)
        raise CapacityError(
            f"host memory: the plan needs {format_bytes(use.host_bytes)} for each rank ({host_parts(use)}), but there"
            f" are {format_bytes(limit)}.{fitting} {cure[0].upper()}{cure[1:]}.",
            resource="host",
            lacking_bytes=use.host_bytes - limit,
        )


def with_states_on_nvme(chunks: Sequence[ChunkSpec], fraction: float) -> tuple[ChunkSpec, ...]:
    """The same chunks with the states of some of those that have them in host memory on NVMe.

    The last ones go there: their gradients land first, and the next forward needs them last, so that their updates have
    the longest time. They are updated by the host.

    Args:
        chunks: With their tiers; positions are ids.
        fraction: Share of the elements with states in host memory that goes. Where that falls within a chunk, the
            number of chunks that comes nearest to it is taken; of two as near, the smaller.

    Raises:
        PlanError: The fraction is outside [0, 1].
    """
    if not 0.0 <= fraction <= 1.0:
        raise PlanError(f"nvme_offload_fraction must be between 0 and 1, got {fraction}")
    sizes = [c.numel if c.requires_grad and c.optim_tier is Tier.CPU else 0 for c in chunks]
    chosen = _highest(sizes, fraction)
    return tuple(
        replace(c, optim_tier=Tier.NVME, is_update_streamed=False) if i in chosen else c for i, c in enumerate(chunks)
    )


def with_params_on_nvme(chunks: Sequence[ChunkSpec], fraction: float) -> tuple[ChunkSpec, ...]:
    """The same chunks with the parameters of some of those in host memory on NVMe: of chunks whose states are there
    already, and of frozen ones. The last ones go there, as in `with_states_on_nvme`.

    Args:
        chunks: With their tiers; positions are ids.
        fraction: Share of the elements of all that may go.

    Raises:
        PlanError: The fraction is outside [0, 1].
    """
    if not 0.0 <= fraction <= 1.0:
        raise PlanError(f"nvme_offload_param_fraction must be between 0 and 1, got {fraction}")
    chosen = _highest([c.numel if can_move_params(c) else 0 for c in chunks], fraction)
    return tuple(replace(c, param_tier=Tier.NVME) if i in chosen else c for i, c in enumerate(chunks))


def _highest(sizes: Sequence[int], fraction: float) -> set[int]:
    """The highest ids whose sizes together come nearest to `fraction` of all (gradients of the last chunks arrive
    first, so that what is done for them on the host overlaps the rest of backward)."""
    wanted = fraction * sum(sizes)
    taken = 0
    chosen: set[int] = set()
    for i in reversed(range(len(sizes))):
        if not sizes[i]:
            continue
        if abs(taken + sizes[i] - wanted) >= abs(taken - wanted):
            break
        taken += sizes[i]
        chosen.add(i)
    return chosen
