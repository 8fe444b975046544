"""Limits of memory that change while an engine lives: what they leave to a rank, and the move to a plan within them.

[Note: a live budget] Between two steps a user may say how much memory there is from now on: less of it, for something
else that runs beside the training, or more again. The chunks stay; they are only placed anew, and the engine moves as
in any other replan, so that no number changes. A plan is found before anything moves: where none fits, all ranks raise,
and nothing has changed. Limits that are left out are what they were at the beginning. The same limits are set again
and again, so a plan that was found for them is taken again where it still fits, and the host memory that chunks leave
may stay for the next time (`HostMemory.keep`): to get fresh memory and to lock it takes longer than to copy what comes
there.
"""

from __future__ import annotations

import logging
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import nn

from lightning_elixir.core.device import current_device_memory_bytes, segments_grow
from lightning_elixir.core.host import available_host_bytes
from lightning_elixir.core.together import run_together
from lightning_elixir.errors import CapacityError, PlanError, StateError
from lightning_elixir.plan.device_words import DeviceWords
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.memory import Budget, host_share
from lightning_elixir.plan.placing.fallbacks import needs_disk
from lightning_elixir.plan.problem import PlacementRequest
from lightning_elixir.plan.regime import StateCount, TrainingRegime, in_step_of, states_of
from lightning_elixir.plan.simulator.timeline import plan_use
from lightning_elixir.plan.types import Plan
from lightning_elixir.plan.units import format_bytes, parse_bytes
from lightning_elixir.planning import module_accesses, place_anew
from lightning_elixir.runtime.agreement import Meeting
from lightning_elixir.runtime.engine import Engine

log = logging.getLogger(__name__)

_NOMINAL_DISK = 2e9
"""Bytes a second: a common NVMe disk, slower than any host's memory, so that it is taken where nothing else fits."""

_NOT_GIVEN = -1
_NO_SIZE = -2


@dataclass(frozen=True)
class MemoryLimits:
    """What may be used, as the user gives it. None: what there is."""

    gpu_bytes: int | None = None
    """Of each rank's device."""
    cpu_bytes: int | None = None
    """Of each host."""


class KeptPlans:
    """Plans that were found for limits of memory: the same are set again and again, and a search takes a second."""

    _MOST = 8
    _AS_MUCH = 1.05

    def __init__(self) -> None:
        self._by_limits: dict[MemoryLimits, tuple[Plan, Budget, object]] = {}

    def add(self, limits: MemoryLimits, plan: Plan, budget: Budget, about: object) -> None:
        """Keep a plan, in the place of an earlier one for the same limits.

        Args:
            budget: What these limits left.
            about: All else that the plan was made for; compared by `==`.
        """
        self._by_limits.pop(limits, None)
        while len(self._by_limits) >= self._MOST:
            del self._by_limits[next(iter(self._by_limits))]
        self._by_limits[limits] = plan, budget, about

    def get(self, limits: MemoryLimits, budget: Budget, about: object) -> Plan | None:
        """The plan for these limits, if a search would hardly find a better one: nothing else has changed, the host has
        no more memory than then, and nothing is on a disk. Whether it fits is for the caller to see."""
        found = self._by_limits.get(limits)
        if found is None:
            return None
        plan, then, same = found
        has_more = budget.gpu_bytes != then.gpu_bytes or (budget.cpu_bytes or 0) > self._AS_MUCH * (then.cpu_bytes or 0)
        return None if same != about or has_more or needs_disk(plan) else plan


@dataclass(frozen=True)
class RankMemory:
    """One rank's view of the memory that there is."""

    host: int | str
    """Which host it is on."""
    host_bytes: int
    """Free there."""
    own_bytes: int
    """Host memory that the model takes now, and its shards will take over."""
    device_bytes: int | None
    nvme_bytes: int
    """Free on the disk that states may go to."""
    has_growing_segments: bool
    """As in `Budget`."""
    limits: MemoryLimits
    """The user's, of this rank and its host."""


def common_budget(
    by_rank: Sequence[RankMemory],
    words: DeviceWords,
    *,
    is_begun: bool = False,
    part_of: Callable[[int], int] = int,
) -> Budget:
    """What a rank may use: the same on all of them, and so as small as on the poorest.

    Args:
        by_rank: What each of them sees.
        words: Of the device, for refusals.
        is_begun: As for `host_share`.
        part_of: This model's part of a memory that several share.
    """
    shares, parts = [], []
    for host in {memory.host for memory in by_rank}:
        ranks = [memory for memory in by_rank if memory.host == host]
        free = min(m.host_bytes for m in ranks) + sum(m.own_bytes for m in ranks)
        parts.append(free // len(ranks))
        limit = min((m.limits.cpu_bytes for m in ranks if m.limits.cpu_bytes is not None), default=None)
        shares.append(host_share(free, len(ranks), limit, is_begun=is_begun))
    device = [nbytes for m in by_rank for nbytes in (m.device_bytes, m.limits.gpu_bytes) if nbytes is not None]
    on_disk = [m.nvme_bytes // sum(n.host == m.host for n in by_rank) for m in by_rank]
    cpu, spare = (part_of(min(share)) for share in zip(*shares, strict=True))
    return Budget(
        gpu_bytes=part_of(min(device)) if device else None,
        cpu_bytes=cpu,
        # Half: where the engine moves to another placement, states may be there twice for a moment.
        nvme_bytes=part_of(min(on_disk) // 2),
        spare_cpu_bytes=spare,
        words=words,
        has_growing_segments=all(m.has_growing_segments for m in by_rank),
        reserve_bytes=0 if any(m.limits.cpu_bytes is not None for m in by_rank) else part_of(min(parts)) - cpu,
    )


def agree_on_limits(
    engine: Engine, gpu: int | str | None, cpu: int | str | None, *, keep_host_memory: bool
) -> MemoryLimits:
    """The limits, which are to be the same on all ranks. Collective; waits for updates under way.

    Args:
        engine: Between two steps.
        gpu: As users give it.
        cpu: As users give it.
        keep_host_memory: As users give it.

    Raises:
        PlanError: A size that is none, or other limits than another rank gives; on all ranks.
        StateError: Inside forward or backward, or gradients wait for a step; on all ranks.
        DivergenceError: The ranks are at different points.
    """
    refusal: PlanError | None = None
    try:
        asked = [_NOT_GIVEN if size is None else parse_bytes(size) for size in (gpu, cpu)]
    except PlanError as error:
        refusal, asked = error, [_NO_SIZE, _NO_SIZE]
    with engine.meeting(Meeting.MEMORY_LIMIT, (*asked, int(keep_host_memory), int(bool(engine.reducer.used)))) as rows:
        pass
    if refusal is not None:
        raise PlanError(f"set_memory_limit: {refusal}")
    if len({tuple(row[:3]) for row in rows}) > 1:
        shown = "; ".join(f"rank {rank}: {_shown(row)}" for rank, row in enumerate(rows))
        raise PlanError(f"set_memory_limit takes the same limits on every rank, and got others ({shown})")
    if any(row[3] for row in rows):
        raise StateError(
            "memory limits cannot change while gradients wait for a step: call set_memory_limit() after step() or"
            " the module's zero_grad() (with several optimizers, theirs leave gradients of parameters that none has),"
            " with accumulation after the last micro-batch"
        )
    return MemoryLimits(*(None if size == _NOT_GIVEN else size for size in asked))


def _shown(row: Sequence[int]) -> str:
    if _NO_SIZE in row[:2]:
        return "no size"
    sizes = ", ".join(
        f"{name} {'not given' if size == _NOT_GIVEN else format_bytes(size)}"
        for name, size in zip(("gpu", "cpu"), row, strict=False)
    )
    return sizes + ", keep_host_memory" * row[2]


def fits(plan: Plan, budget: Budget, regime: TrainingRegime) -> bool:
    """Whether what a plan keeps, with its rCache full, is within a budget. Blocks of the rCache and of gradients count,
    though there are none between steps: the limit stays in force, and the next step needs them."""
    use = plan_use(plan, regime)
    gpu_bytes = use.gpu_bytes + budget.non_model_bytes
    return all(
        limit is None or nbytes <= limit
        for nbytes, limit in ((gpu_bytes, budget.gpu_bytes), (use.host_bytes, budget.cpu_bytes))
    )


def _room_beside(plan: Plan, budget: Budget, regime: TrainingRegime) -> int:
    """Bytes of host memory that a rank can comfortably have beside what a plan takes."""
    most = budget.most_with_spares
    return sys.maxsize if most is None else max(0, most - plan_use(plan, regime).host_bytes)


def with_or_without_activations(make: Callable[[Budget], Plan], budget: Budget) -> Plan:
    """The plan within a budget under which steps can run; where there is none, one that keeps within it between steps,
    and a warning.

    Raises:
        CapacityError: There is neither.
    """
    try:
        return make(budget)
    except CapacityError as error:
        if not budget.non_model_bytes:
            raise
        plan = make(replace(budget, non_model_bytes=0))
        log.warning(
            "within the new limit there is room for the chunks, but not for a training step as well: raise it before"
            " the next one (%s)",
            error,
        )
        return plan


class Limited(Protocol):
    """An engine, and what plans it: one of those that share limits."""

    @property
    def engine(self) -> Engine:
        """Between two steps."""

    @property
    def regime(self) -> TrainingRegime:
        """What training is like."""

    def budget(self, limits: MemoryLimits) -> Budget:
        """What a rank may use of it within these limits. Collective."""

    def finder(self, limits: MemoryLimits, budget: Budget) -> Callable[[], Plan]:
        """What finds a plan within the budget on rank 0, or raises `CapacityError`. Collective, the call that it
        returns not."""

    def keep(self, limits: MemoryLimits, budget: Budget) -> None:
        """They are in force."""


def change_limits(
    models: Sequence[Limited], gpu: int | str | None, cpu: int | str | None, *, keep_host_memory: bool
) -> MemoryLimits:
    """Move all engines to plans within these limits, and give back what is not needed any more. Collective.

    Args:
        models: At least one; the same on all ranks.
        gpu: As users give it.
        cpu: As users give it.
        keep_host_memory: Whether host memory that chunks leave stays for the next move, as far as there is room.

    Raises:
        CapacityError: One of them has no such plan: on all ranks, and nothing has changed.
        PlanError: Compiled modules of one cannot run under that plan; nothing has changed.
        PlanError, StateError, DivergenceError: As `agree_on_limits`.
    """
    limits = [agree_on_limits(model.engine, gpu, cpu, keep_host_memory=keep_host_memory) for model in models][0]
    found: list[tuple[Budget, Plan]] = []
    for model in models:
        budget, comm = model.budget(limits), model.engine.comm
        find = model.finder(limits, budget)
        plan = run_together(comm, find if comm.rank == 0 else lambda: None)
        found.append((budget, comm.exchange_objects(plan)[0]))
        model.engine.forwards.check_addresses(found[-1][1])
    for model, (budget, plan) in zip(models, found, strict=True):
        kept_bytes = _room_beside(plan, budget, model.regime) if keep_host_memory else 0
        _move(model.engine, budget, model.regime, plan, kept_bytes)
        model.keep(limits, budget)
    return limits


def keep_within(engine: Engine, budget: Budget, regime: TrainingRegime) -> None:
    """Have what an engine takes beside its plan keep within a budget, of the device and of the host.

    Args:
        engine: Its replicas give way to activations, and these go to the host as far as there is room.
        budget: Of one rank.
        regime: What training is like.
    """
    engine.set_memory_limit(budget.gpu_bytes)
    engine.activations.limit_host(budget, regime)


def _move(engine: Engine, budget: Budget, regime: TrainingRegime, plan: Plan, most_kept_bytes: int) -> None:
    keep_within(engine, budget, regime)
    if plan.fingerprint() == engine.plan.fingerprint():
        engine.take_forecast(plan)
        engine.give_back()
        engine.activations.rest()
        engine.host_memory.keep([], most_kept_bytes)
        engine.host_memory.settle()
    else:
        engine.replan(plan, most_kept_bytes)
    log.info("memory limits have changed; the plan from now on: %s", plan.explain().partition("\n")[0])


@dataclass(frozen=True)
class LimitedModule:
    """An engine that is used without Lightning."""

    engine: Engine
    model: nn.Module
    """What is in it."""
    built_plan: Plan
    """What it was built with, which comes back wherever it fits."""
    nvme_folder: str | None
    """Where states may go; None: nowhere that the plan does not have them."""

    kept: KeptPlans = field(default_factory=KeptPlans)
    """Of earlier limits."""

    def keep(self, limits: MemoryLimits, budget: Budget) -> None:
        """See `Limited`."""
        self.kept.add(limits, self.engine.plan, budget, self.regime)

    def budget(self, limits: MemoryLimits) -> Budget:
        """See `Limited`."""
        engine = self.engine
        own = RankMemory(
            socket.gethostname(),
            available_host_bytes(),
            engine.host_bytes(),
            current_device_memory_bytes(engine.device.torch_device),
            0 if self.nvme_folder is None else shutil.disk_usage(self.nvme_folder).free,
            segments_grow(engine.device.torch_device),
            limits,
        )
        is_cpu = engine.device.torch_device.type == "cpu"
        words = DeviceWords.of("gpu", "cpu", is_cpu=is_cpu, is_host_limited=limits.cpu_bytes is not None)
        budget = common_budget(engine.comm.exchange_objects(own), words, is_begun=True)
        if not self.regime.can_stream:
            budget = replace(budget, nvme_bytes=0)
        seen = 0 if is_cpu else max(engine.comm.exchange_objects(engine.peak_non_model_bytes_seen))
        return replace(budget, non_model_bytes=seen)

    def finder(self, limits: MemoryLimits, budget: Budget) -> Callable[[], Plan]:
        """See `Limited`."""
        plan, regime = self.built_plan, self.regime
        known = self.kept.get(limits, budget, regime)

        def find() -> Plan:
            if limits == MemoryLimits() or fits(plan, budget, regime):
                return plan
            if known is not None and fits(known, budget, regime):
                return known
            request = PlacementRequest(
                distributed_storage=plan.is_storage_distributed, accesses=module_accesses(self.model)
            )
            hardware = HardwareSpec.nominal(budget.gpu_bytes, budget.cpu_bytes or 0)
            if budget.nvme_bytes:  # any figure does where the search only has to find what fits
                hardware = replace(hardware, nvme_read_bytes_per_s=_NOMINAL_DISK, nvme_write_bytes_per_s=_NOMINAL_DISK)
            return with_or_without_activations(
                lambda within: place_anew(plan, request, within, regime, hardware), budget
            )

        return find

    @property
    def regime(self) -> TrainingRegime:
        """What training is like, by the first plan and the optimizers that there are."""
        engine, plan = self.engine, self.built_plan
        states = engine.steps.optimizers.states
        known = [(one.state_count, one.parameter_names()) for one in states]
        count, others = states_of(known) if known else (StateCount(2), ())
        return TrainingRegime(
            master_weights=engine.precision.master is not None,
            num_states=count.full,
            byte_states=count.of_a_byte,
            other_states=others,
            whole_update_bytes=max((one.whole_update_bytes for one in states), default=0),
            update_timing=plan.update_timing,
            in_step=in_step_of((one.is_adam, one.parameter_names()) for one in states),
            needs_global_norm=plan.has_spare_states,
            can_stream=bool(states) and all(one.is_adam for one in states),
            can_reuse_compute_shard=plan.grad_reuses_compute_shard,
        )
