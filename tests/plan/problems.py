"""Planning problems that the tests share: layers, layouts, limits, and every placement there is of a small model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from random import Random
from typing import Any

from lightning_elixir.plan.hardware import BandwidthCurve, HardwareSpec
from lightning_elixir.plan.memory import Budget, Scheme, memory_use
from lightning_elixir.plan.packing import pack, regular_block_bytes
from lightning_elixir.plan.placing.placement import OFFLOADED, RESIDENT, Layout, Placer, Site, place
from lightning_elixir.plan.placing.search import search
from lightning_elixir.plan.placing.space import Candidate
from lightning_elixir.plan.placing.spares import chunks_to_spare
from lightning_elixir.plan.placing.structure import structural_profile
from lightning_elixir.plan.problem import PlacementRequest, Problem
from lightning_elixir.plan.profile import StepInterval, StepProfile
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.simulator.timeline import Timeline, simulate_step
from lightning_elixir.plan.types import AccessTrace, ChunkSpec, ParamSpec, Plan, Tier, UpdateTiming
from tests.plan.models import accesses_of, spec

KIB = 1024
MIXED = TrainingRegime(stream_bytes=0)
"""Buffers of the usual size would fill the small GPUs of these tests."""

KEPT = Site(Tier.GPU, Tier.CPU, True)
SHARDED = Site(Tier.GPU, Tier.GPU, False)
SHARDED_PARAMS = Site(Tier.GPU, Tier.CPU, False)


def layers(count: int, *, dtype: str = "float32", requires_grad: bool = True) -> list[ParamSpec]:
    """`count` modules whose one parameter fills a chunk of 1024 elements."""
    return [spec(f"l{i}.w", 1024, dtype=dtype, requires_grad=requires_grad) for i in range(count)]


def layout_of(specs: Sequence[ParamSpec], chunk_numel: int = 1024, world_size: int = 1) -> Layout:
    packed = pack(specs, chunk_numel, world_size)
    return Layout(packed, regular_block_bytes(packed, chunk_numel, world_size), "float32")


def place_specs(
    specs: Sequence[ParamSpec],
    policy: str = "auto",
    *,
    chunk_numel: int = 1024,
    world_size: int = 1,
    gpu: int | None = None,
    cpu: int | None = None,
    other: int = 0,
    regime: TrainingRegime = MIXED,
    hardware: HardwareSpec | None = None,
    can_stream: bool = False,
    **options: Any,
) -> Plan:
    """The plan of a policy; options are those of `PlacementRequest`."""
    layout = layout_of(specs, chunk_numel, world_size)
    request = asked(policy=policy, **{"accesses": accesses_of(list(specs)), **options})
    regime = replace(regime, can_stream=can_stream)
    hardware = hardware or HardwareSpec.nominal()
    problem = Problem(request, Budget(gpu, cpu, other), world_size, regime, hardware, is_time_guessed=True)
    if policy != "auto":
        return place(layout, problem)
    profile = structural_profile(layout, request.accesses, hardware, other)
    return search([Candidate(layout, profile)], problem)


def asked(**options: Any) -> PlacementRequest:
    """Without prefetching, unless that is asked for."""
    return PlacementRequest(**{"prefetch_depth": 0, **options})


def changed(problem: Problem, **changes: Any) -> Problem:
    """With other fields, of the problem or of its regime."""
    own = {f.name for f in fields(TrainingRegime)}
    regime = replace(problem.regime, **{name: value for name, value in changes.items() if name in own})
    return replace(problem, regime=regime, **{name: value for name, value in changes.items() if name not in own})


def tiers(plan: Plan) -> list[str]:
    """A letter for the parameter tier, one for the optimizer tier, `*` if persistent."""
    return [f"{c.param_tier.value[0]}{c.optim_tier.value[0]}{'*' if c.is_persistent else ''}" for c in plan.chunks]


def constant_hardware(**figures: Any) -> HardwareSpec:
    """Every rate a constant without latency; `h2d`, `d2h`, `all_gather`, `reduce_scatter` as bytes a second."""
    for name in ("h2d", "d2h", "all_gather", "reduce_scatter"):
        if isinstance(figures.get(name), (int, float)):
            figures[name] = BandwidthCurve.constant(float(figures[name]))
    base = replace(
        HardwareSpec.nominal(),
        h2d=BandwidthCurve.constant(25e9),
        d2h=BandwidthCurve.constant(25e9),
        duplex_slowdown=1.0,
        all_gather=None,
        reduce_scatter=None,
    )
    return replace(base, **figures)


@dataclass(frozen=True)
class Case:
    """One layout with what a step over it does, and the limits."""

    layout: Layout
    profile: StepProfile
    problem: Problem

    @property
    def placer(self) -> Placer:
        waiting = self.problem.with_updates(self.problem.regime.waiting())
        return Placer(self.layout, waiting, self.profile)

    def search(self) -> Plan:
        return search([Candidate(self.layout, self.profile)], self.problem)

    def simulate(self, plan: Plan, **options: Any) -> Timeline:
        return simulate_step(plan, self.profile, self.problem.hardware, self.placer.scheme, **options)

    def with_budget(self, **limits: Any) -> Case:
        return replace(self, problem=replace(self.problem, budget=replace(self.problem.budget, **limits)))


def plan_of(case: Case, sites: Sequence[Site], depth: int) -> Plan | None:
    """The plan with these sites and all the rCache there is room for; None if it does not fit."""
    placer, budget = case.placer, case.problem.budget
    placement = placer.at(sites)
    chunks, blocks = placement.chunks, placement.blocks
    use = memory_use(chunks, blocks, placer.scheme)
    if budget.gpu_bytes is not None and placement.gpu_bytes(blocks) > budget.gpu_bytes:
        return None
    if budget.cpu_bytes is not None and use.host_bytes > budget.cpu_bytes:
        return None
    if use.nvme_bytes > budget.nvme_bytes:
        return None
    return bare_plan(case, chunks, blocks, depth)


def bare_plan(case: Case, chunks: Sequence[ChunkSpec], blocks: int, depth: int) -> Plan:
    return case.placer.bare_plan(tuple(chunks), blocks, depth, "auto")


def every_placement(case: Case, depths: Sequence[int]) -> Iterator[Plan]:
    """All that fit: every chunk at every site, its update streamed or not, at every depth. What several ranks keep
    whole has its states there, too, where updates overlap: see `Space.kept`."""
    is_shared = not case.placer.scheme.is_shard_whole
    is_waited_for = is_shared and case.problem.regime.waiting().timing is not UpdateTiming.AFTER_BACKWARD
    choices = []
    for chunk in case.layout.packed:
        sites = [RESIDENT, OFFLOADED]
        if chunk.requires_grad and not is_waited_for:
            sites.append(KEPT)
        if is_shared or (chunk.requires_grad and case.problem.regime.data_bytes[chunk.dtype].master):
            sites.append(SHARDED)
        if is_shared and chunk.requires_grad:
            sites.append(SHARDED_PARAMS)
        if chunk.requires_grad and case.problem.regime.can_stream:
            sites += [s._replace(is_update_streamed=True) for s in sites if s.optim_tier is Tier.CPU]
        if chunk.requires_grad and case.problem.budget.nvme_bytes:
            resident = [s for s in sites if s.optim_tier is Tier.CPU and not s.is_update_streamed]
            sites += [s._replace(optim_tier=Tier.NVME) for s in resident]
        choices.append(sites)
    for sites in product(*choices):
        for depth in depths:
            plan = plan_of(case, sites, depth)
            if plan is not None:
                yield plan
            if plan is None or all(s.is_persistent for s in sites):
                break


def with_spares(
    chunks: Sequence[ChunkSpec], scheme: Scheme, limit: int | None, pattern: str = "spread", most: int | None = None
) -> tuple[ChunkSpec, ...]:
    """The same chunks with spare states as far as so much host memory holds them beside what is there; None: all of it.
    Other arguments as for `chunks_to_spare`."""
    room = None if limit is None else limit - memory_use(chunks, 0, scheme).host_bytes
    chosen = chunks_to_spare(chunks, scheme, room, pattern, most)
    return tuple(replace(c, has_spare_states=True) if c.id in chosen else c for c in chunks)


# Random ones

HARDWARE = {
    "nominal": constant_hardware(),
    "slow bus": constant_hardware(h2d=2e9, d2h=2e9),
    "slow host Adam": constant_hardware(cpu_adam_numel_per_s=1e8, streamed_adam_numel_per_s=2e8),
    "streaming is fast": constant_hardware(streamed_adam_numel_per_s=4e9),
    "streaming is slow": constant_hardware(streamed_adam_numel_per_s=2e8),
    "latency": replace(HardwareSpec.nominal(), duplex_slowdown=1.4),
    "slow collectives": constant_hardware(all_gather=3e9, reduce_scatter=3e9),
    "collectives": constant_hardware(all_gather=100e9, reduce_scatter=60e9, duplex_slowdown=1.2),
}
"""Machines on which different resources bind."""


def random_case(
    random: Random,
    *,
    most_chunks: int = 4,
    world_size: int = 1,
    hardware: HardwareSpec | None = None,
    can_stream: bool | None = None,
    **options: Any,
) -> Case:
    """A model of a few chunks of random sizes, some perhaps frozen, and limits between too little and plenty."""
    num_layers = random.randint(2, most_chunks)
    unit = 512 * world_size
    most = random.choice((1, 4, 40))
    is_lora = random.random() < 0.3
    dtype = random.choice(("float32", "bfloat16"))
    specs = [
        spec(
            f"l{i}.w",
            unit * 200 * random.randint(1, most),
            dtype=dtype,
            requires_grad=not is_lora or random.random() < 0.5,
        )
        for i in range(num_layers)
    ]
    layout = layout_of(specs, unit * 200 * random.choice((1, most)), world_size)
    hardware = hardware or HARDWARE[random.choice(list(HARDWARE))]
    activations = random.choice((0, 0, layout.block_bytes, 4 * layout.block_bytes))
    accesses = accesses_of(specs)
    profile = random_times(random, structural_profile(layout, accesses, hardware, 0), activations)
    request = PlacementRequest(accesses=accesses, **options)
    regime = replace(
        MIXED,
        can_stream=random.random() < 0.6 if can_stream is None else can_stream,
        stream_bytes=random.choice((0, layout.block_bytes)),
        accumulates=random.random() < 0.3,
    )
    problem = Problem(request, Budget(), world_size, regime, hardware)
    case = Case(layout, profile, problem)
    return with_random_limits(random, case)


def random_times(random: Random, profile: StepProfile, activation_bytes: int) -> StepProfile:
    """Other computing times, and activations that grow in forward and shrink in backward."""
    scale = random.choice((0.0, 0.3, 1.0, 3.0, 30.0))
    count = len(profile.intervals)
    intervals = []
    for i, interval in enumerate(profile.intervals):
        share = min(i + 1, count - i) / max(1, (count + 1) // 2)
        seconds = interval.compute_s * scale * random.uniform(0.3, 1.7)
        intervals.append(StepInterval(seconds, int(activation_bytes * share), interval.grads))
    return StepProfile(AccessTrace(profile.trace.events), tuple(intervals))


def with_random_limits(random: Random, case: Case) -> Case:
    placer = case.placer
    packed = case.layout.packed
    everything = placer.at([RESIDENT] * len(packed)).gpu_bytes(0)
    offloaded = placer.at([OFFLOADED] * len(packed))
    nothing = offloaded.gpu_bytes(offloaded.smallest)
    host = offloaded.use.host_bytes
    gpu = min(nothing, everything) + int(abs(everything - nothing) * random.uniform(-0.05, 1.0))
    cpu = None if random.random() < 0.6 else int(host * random.uniform(0.2, 1.0))
    return case.with_budget(gpu_bytes=gpu, cpu_bytes=cpu)
