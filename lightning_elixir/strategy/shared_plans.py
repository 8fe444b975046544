"""From a strategy's options to plans that all ranks share."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import nn

from lightning_elixir.core.comm import Comm
from lightning_elixir.core.device import current_device_memory_bytes, segments_grow
from lightning_elixir.core.host import available_host_bytes
from lightning_elixir.core.together import run_together
from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.memory_limits import (
    MemoryLimits,
    RankMemory,
    common_budget,
    fits,
    with_or_without_activations,
)
from lightning_elixir.plan.activations import Fate
from lightning_elixir.plan.describe import describe_placement
from lightning_elixir.plan.device_words import DeviceWords
from lightning_elixir.plan.fates import with_fates
from lightning_elixir.plan.ignored import with_ignored
from lightning_elixir.plan.kept_dtypes import kept_in, with_kept
from lightning_elixir.plan.memory import Budget
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.plan.packing import packed_chunks, round_up
from lightning_elixir.plan.placing.search import with_forecast
from lightning_elixir.plan.profile import MemoryProfile, StepProfile, step_profile
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.sharding import best_sharding, meshes_of
from lightning_elixir.plan.simulator.timeline import Timeline, is_time_known, plan_use, scheme_of, with_times
from lightning_elixir.plan.types import ALIGN_NUMEL, Alternative, IgnoredParam, ParamSpec, Plan, UpdateTiming
from lightning_elixir.plan.units import format_bytes
from lightning_elixir.plan.weighing import with_notes_of
from lightning_elixir.planning import (
    COMMON_SHARE,
    make_plan,
    param_specs,
    place_to_build,
    step_gpu_bytes,
    timeline_of,
    with_common_activations,
)
from lightning_elixir.profiling.blocks import with_activations
from lightning_elixir.profiling.ignored import ignored_parameters, plain_tensors_of
from lightning_elixir.profiling.kept_fp32 import is_nothing, kept_parameters
from lightning_elixir.storage.nvme import DiskOptions
from lightning_elixir.strategy.config import ElixirConfig
from lightning_elixir.strategy.given_plans import check_given, given_plan
from lightning_elixir.strategy.machine_figures import MachineFigures
from lightning_elixir.strategy.model_init import check_same_model
from lightning_elixir.strategy.regimes import guessed_regime, with_optimizer

log = logging.getLogger(__name__)

LEAST_GAIN = 0.05
"""Part of the step that a new placement must save to be worth moving to."""

_SHARES_LEFT = (0.75, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05, 0.03)
"""Of the device's memory, for activations of unknown size: the first that leaves room for the chunks."""

T = TypeVar("T")


def host_bytes_of(model: nn.Module) -> int:
    """Host memory of the model's parameters, as the user built it."""
    tensors = [t for p in model.parameters() if p.device.type == "cpu" for t in plain_tensors_of(p)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.device.type == "cpu"}
    return sum(storage.nbytes() for storage in storages.values())


def disk_options(config: ElixirConfig) -> DiskOptions:
    """Where states on NVMe go."""
    folder = None if config.nvme_offload_dir is None else os.fspath(config.nvme_offload_dir)
    return DiskOptions(folder, config.nvme_backend, config.nvme_checksums)


def _with_blocks(plan: Plan, blocks: int, regime: TrainingRegime) -> Plan:
    """A plan with so many blocks in its rCache. It notes the device memory of these, and of what updates of whole
    parameters take in the step."""
    lacking = scheme_of(plan, regime).stream_bytes(plan.chunks) - int(plan.notes.get("gpu_stream_bytes", 0))
    added = (blocks - plan.rcache_blocks) * plan.block_bytes
    notes = dict(plan.notes)
    for name, nbytes in (("gpu_stream_bytes", lacking), ("rcache_bytes", added), ("gpu_bytes", lacking + added)):
        notes[name] = int(notes.get(name, 0)) + nbytes
    return replace(plan, rcache_blocks=blocks, notes=notes)


def _beside_another(loser: Alternative) -> Alternative:
    """What lost against a plan that was not taken either."""
    return loser if loser.total_s is None else replace(loser, reason=f"beside the fastest found: {loser.reason}")


class Neighbours(Protocol):
    """Other models of this process, which share its memory."""

    def part_of(self, nbytes: int) -> int:
        """This model's part of a memory that they share."""

    def host_bytes(self) -> int:
        """Host memory that the others hold now."""


class _Alone:
    """There is no other model."""

    def part_of(self, nbytes: int) -> int:
        return nbytes

    def host_bytes(self) -> int:
        return 0


ALONE: Neighbours = _Alone()


def wanted_bytes(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """What a model takes of all memory together, roughly: 16 bytes for each element that trains, 32 in fp64.

    Args:
        dtype: What parameters are computed in; None: their own.
    """
    found = 0
    for p in model.parameters():
        itemsize = p.element_size() if dtype is None else dtype.itemsize
        found += round_up(p.numel(), ALIGN_NUMEL) * (max(16, 4 * itemsize) if p.requires_grad else p.element_size())
    return found


@dataclass(frozen=True)
class Replanning:
    """What chunks are placed anew from."""

    model: nn.Module
    """For the parameters and the order of its modules."""
    current: Plan
    """The plan in force, which has the chunks."""
    budget: Budget
    """Limits of one rank."""
    regime: TrainingRegime
    """What training is like, with the optimizer."""


class Planner:
    """Makes plans on rank 0, from what all ranks have, and gives them to every rank.

    Args:
        config: The user's options.
        comm: All ranks; every method must be called by all of them.
        device: The compute device.
        node: Which host this is, and of how many.
        compute_dtype: Dtype of forward and backward; None: each parameter keeps its own.
        has_autocast: Whether steps run under `torch.autocast`.
        regime: What training is like, as far as that is known without the optimizer.
        figures: Of the machine, to predict times with.
        neighbours: Other models that share this rank's memory.
    """

    def __init__(
        self,
        config: ElixirConfig,
        comm: Comm,
        device: torch.device,
        node: tuple[int, int],
        compute_dtype: torch.dtype | None,
        has_autocast: bool,
        regime: TrainingRegime,
        figures: MachineFigures,
        neighbours: Neighbours = ALONE,
    ) -> None:
        self.config = config
        self.comm = comm
        self.regime = regime
        self.figures = figures
        self._device = device
        self._node_rank, self._num_nodes = node
        self._neighbours = neighbours
        self.compute_dtype = compute_dtype
        self.has_autocast = has_autocast

    @property
    def _counts_activations(self) -> bool:
        """Whether what a step takes beside the chunks lies in the memory that these are placed in: on a CPU,
        `gpu_memory_limit` is about chunks alone."""
        return self._device.type != "cpu"

    def check_model(self, model: nn.Module, *, is_training: bool) -> None:
        """Look at the parameters of all ranks, before memory is taken.

        Raises:
            PlanError: Parameters that no plan can hold, none that trains, or other parameters than on rank 0.
        """
        specs = run_together(self.comm, lambda: self._specs(model))
        left_out = self.ignored(model)
        check_same_model(self.comm, specs)
        if not is_training:
            return
        sparse = [name for name, m in model.named_modules() if getattr(m, "sparse", False) is True]
        if sparse:
            raise PlanError(
                f"{', '.join(sparse[:5])}: gradients would be sparse, which chunks cannot hold; make the layers with"
                " sparse=False"
            )
        number = len(specs) + len(left_out)
        if not any(s.requires_grad for s in specs) and not any(p.requires_grad for p in left_out):
            raise PlanError(
                f"{type(model).__name__} has no parameter to train: it has {number} parameters, all of them"
                " frozen. Call requires_grad_() on what is to be trained before the fit"
                if number
                else f"{type(model).__name__} has no parameters. Make layers in __init__ or configure_model"
            )

    def weighed(
        self, model: nn.Module, mesh: Mesh, budget: Budget, profile: MemoryProfile | None
    ) -> tuple[Plan, float | None]:
        """The plan that a fit with these sizes of parallel patterns would come to, with an Adam of ours, and the
        seconds of its step. Not collective.

        Args:
            model: With its patterns.
            mesh: The sizes.
            budget: Limits of one rank.
            profile: What a step does; None: that is not known, and neither are seconds.

        Raises:
            PlanError: The sizes do not suit the nodes, or the model cannot be trained so.
            CapacityError: Nothing fits.
        """
        regime = with_optimizer(self.regime, can_stream=True, num_states=self.regime.num_states)
        if profile is not None and not self._counts_activations:
            profile = profile.with_bytes(lambda nbytes: 0)

        meshes = meshes_of(mesh, self._num_nodes, self.config.sharding)
        is_quick = profile is not None and len(meshes) == 1  # as in a fit: see `_make`

        def make(mesh: Mesh) -> Plan:
            guessed = guessed_regime(self.regime)
            layout = self._unforeseen(
                lambda limits: self._make(model, limits, guessed, mesh=mesh, serves_to_build=is_quick), budget
            )
            return layout if profile is None else self._make(model, budget, regime, layout=layout, profile=profile)

        plan = best_sharding(make, meshes)
        if profile is None:
            return plan, None
        return plan, timeline_of(plan, profile, self.figures.best, regime, is_detailed=False).times.total_s

    def budget(
        self,
        own_bytes: int,
        *,
        earlier: Budget | None = None,
        limits: MemoryLimits | None = None,
        is_live: bool = False,
    ) -> Budget:
        """What a rank may use: the same on all of them, and so as small as on the poorest.

        Args:
            own_bytes: Host memory that the model takes now, which counts as free: as the user built it
                (`host_bytes_of`), or in an engine.
            earlier: What was found before. Half of the reserve may have been taken since by what it is for; the disk's
                part stays, since what is free there now is without our own file.
            limits: Those of the user since the beginning, in the place of the options.
            is_live: They are new: what was found before does not limit the host.
        """
        own = RankMemory(
            self._node_rank,
            available_host_bytes(),
            own_bytes + self._neighbours.host_bytes(),
            current_device_memory_bytes(self._device),
            self._free_nvme_bytes(),
            segments_grow(self._device),
            self._limits_with(limits or MemoryLimits()),
        )
        by_rank: list[RankMemory] = self.comm.exchange_objects(own)
        words = DeviceWords.of(
            "gpu_memory_limit",
            "cpu_memory_limit",
            is_cpu=self._device.type == "cpu",
            is_host_limited=any(memory.limits.cpu_bytes is not None for memory in by_rank),
        )
        found = common_budget(by_rank, words, is_begun=earlier is not None, part_of=self._neighbours.part_of)
        if earlier is None:
            return found
        found = replace(found, nvme_bytes=earlier.nvme_bytes)
        if is_live:
            return found
        cpu, spare = found.cpu_bytes or 0, found.spare_cpu_bytes or 0
        return replace(
            found,
            cpu_bytes=min(cpu, earlier.cpu_bytes or cpu),
            spare_cpu_bytes=min(spare, earlier.most_with_spares or spare),
        )

    def _limits_with(self, limits: MemoryLimits) -> MemoryLimits:
        """The options, where nothing else was said since."""
        config = self.config
        return MemoryLimits(
            config.gpu_limit_bytes if limits.gpu_bytes is None else limits.gpu_bytes,
            config.cpu_limit_bytes if limits.cpu_bytes is None else limits.cpu_bytes,
        )

    def _free_nvme_bytes(self) -> int:
        """Looked for where the search may use it."""
        config = self.config
        if config.placement_policy != "auto" or config.nvme_offload_dir is None:
            return 0
        return shutil.disk_usage(disk_options(config).existing_folder()).free

    def first_plan(self, model: nn.Module, budget: Budget, *, is_training: bool) -> tuple[Plan, bool]:
        """The plan to build with, and whether it is final.

        Args:
            model: For the parameters and the order of its modules.
            budget: Limits of one rank.
            is_training: Whether a fit follows.

        Raises:
            PlanError: An option or a given plan does not suit the model.
            CapacityError: A limit cannot hold what the policy needs.
        """
        if is_training and self.figures.is_pending:
            common = replace(budget, non_model_bytes=int((budget.gpu_bytes or 0) * COMMON_SHARE))
            self._measure_unless(lambda: self._make(model, common, self.regime, policy="cuda"))
            if self.figures.is_pending:
                self.figures.measure_computing()
        return self.share(lambda: self._decide(model, budget, is_training))

    def guessed_plan(self, model: nn.Module, current: Plan, budget: Budget) -> Plan:
        """A placement of `current`'s chunks to build with, before anything is known of a step."""
        return self.share(lambda: self._guessed_over(model, current, budget))

    def least_host_bytes(self, plan: Plan, budget: Budget, regime: TrainingRegime) -> int | None:
        """Host memory that every placement of `plan`'s chunks takes, since the device has no room for it; None: this
        one is not going to be replaced by a search."""
        if budget.gpu_bytes is None or not self.config.is_placement_searched:
            return None
        use = plan_use(plan, regime)
        return use.host_chunk_bytes - max(0, budget.gpu_bytes - (use.gpu_bytes - use.rcache_bytes))

    def warm_up_plan(self, model: nn.Module, current: Plan, budget: Budget) -> Plan:
        """A placement of `current`'s chunks that needs as little device memory as possible."""
        return self.share(lambda: self._safe_plan(model, current, budget))

    def foresee(self, now: Replanning, profile: MemoryProfile) -> StepProfile:
        """What a step will do over the chunks, with times from the machine's figures, which are measured now if not
        everything fits. Collective. Arguments as for `final_plan`, but that the profile is of parameters."""
        found = self.over_chunks(profile, now.current)
        if not self.figures.is_pending:
            return found
        shared = self._shared_profile(found, now, is_seen=False)
        self._measure_unless(lambda: self._make_anew(now, shared, policy="cuda"))
        return self.over_chunks(profile, now.current)

    def final_plan(
        self, now: Replanning, profile: StepProfile, *, is_seen: bool, foreseen: MemoryProfile | None = None
    ) -> Plan:
        """Place the chunks anew, knowing what a training step does.

        Args:
            now: The chunks, limits and training.
            profile: What a step takes and does on this rank, foreseen or seen, over the chunks.
            is_seen: The profile is of a real step.
            foreseen: The step of a dry run that keeps everything, where the plan is to choose what becomes of
                activations.
        """
        if foreseen is not None and self.chooses_activations:
            of_all = self._shared_memory_profile(foreseen)
            if now.current.activations and not foreseen.visits:
                log.warning("activations='auto': the model's own checkpoints or hooks decide in all of its blocks")
            log.info("choosing what becomes of the activations of %d blocks", len(now.current.activations))
            return self.share(lambda: self._final_plan(now, of_all))
        shared = self._shared_profile(profile, now, is_seen=is_seen)
        log.info("a step takes up to %s beside the chunks: placing them", format_bytes(shared.peak_non_model_bytes))
        if is_seen:
            self._measure_unless(lambda: self._make_anew(now, shared, policy="cuda"))
        return self.share(lambda: self._final_plan(now, shared))

    def _measure_unless(self, place_all: Callable[[], Plan]) -> None:
        """Have figures to weigh placements with, if there is more than one. Collective.

        Args:
            place_all: Places everything on the device, or raises `CapacityError`.
        """

        def all_fits() -> bool:
            try:
                place_all()
            except CapacityError:
                return False
            return True

        if self.figures.is_pending and not self.share(all_fits):
            self.figures.measure()

    def refined_plan(self, now: Replanning, profile: StepProfile) -> Plan:
        """By what is known now, a plan faster than the one in force by more than `LEAST_GAIN` of the step, or that fits
        where that one does not; or else that one, with what is expected of it. Arguments as for `final_plan`."""
        current = now.current
        shared = self._shared_profile(profile, now, is_seen=True)

        def decide() -> Plan:
            step = self.simulated(current, shared, now.regime)
            try:
                better = self._make_anew(now, shared)
            except CapacityError:
                binding = "what steps are seen to take: no other plan would fit, so this one stays"
                return with_times(current, step, self.figures.best.name, binding=binding, alternatives=())
            is_same = better.fingerprint() == current.fingerprint()
            if better.forecast is None or is_same:
                return better if is_same else current
            total_s = better.forecast.times.total_s
            is_over = now.budget.gpu_bytes is not None and step.peak_gpu_bytes > now.budget.gpu_bytes
            if is_over or total_s < step.times.total_s * (1 - LEAST_GAIN):
                return better
            other = Alternative(
                describe_placement(better.chunks, better.rcache_blocks, better.prefetch_depth),
                total_s,
                f"not faster by {LEAST_GAIN:.0%}, which a move would have to be worth",
            )
            others = (_beside_another(one) for one in better.forecast.alternatives)
            own = describe_placement(current.chunks, current.rcache_blocks, current.prefetch_depth)
            return with_times(
                current,
                step,
                self.figures.best.name,
                binding=f"{better.forecast.binding}. Searched again with the times that steps take: no placement found"
                f" would save {LEAST_GAIN:.0%} of the step, so this one stays",
                alternatives=tuple(one for one in (other, *others) if one.description != own),
            )

        return self.share(decide)

    def seen_step(self, now: Replanning, profile: StepProfile) -> Timeline | None:
        """The predicted step of the plan in force by what all ranks have seen of one, with the margin that plans leave
        then; None if nothing is expected of it. Collective. Arguments as for `final_plan`."""
        shared, current = self._shared_profile(profile, now, is_seen=True), now.current
        is_known = current.forecast is not None and self.can_predict(current)
        return self.simulated(current, shared, now.regime) if is_known else None

    def expected(self, plan: Plan, step: Timeline) -> Plan:
        """The plan in force with this step expected of it. Collective."""
        return self.share(lambda: with_times(plan, step, self.figures.best.name))

    def limited_plan(
        self, now: Replanning, profile: StepProfile | None, *, earlier: Plan | None = None, is_evaluated: bool = False
    ) -> Callable[[], Plan]:
        """What finds, on rank 0, a placement of the chunks within limits that have changed: as `final_plan`, where it
        is known what a step does; else, on a GPU, the same placement, if it fits. Collective, the call that it returns
        not. That raises `CapacityError` where there is none.

        Args:
            now: As for `final_plan`, with the new limits.
            profile: What a step does on this rank, if that is known.
            earlier: What was found for the same before, which serves if it fits.
            is_evaluated: No step is to come.
        """
        model, current, budget, regime = now.model, now.current, now.budget, now.regime
        is_known = all(self.comm.exchange_objects(profile is not None))
        shared = self._shared_profile(profile, now, is_seen=True) if profile is not None and is_known else None
        given, _ = given_plan(self.config, model)
        if given is not None:
            given = with_ignored(with_kept(given, kept_in(current), is_exact=True), current.ignored)
            host_bytes = current.activation_host_bytes
            given = replace(given, activations=current.activations, activation_host_bytes=host_bytes)

        def make(limits: Budget) -> Plan:
            if shared is None:
                return self._make(model, limits, regime, layout=current)
            is_between = budget.non_model_bytes > 0 and not limits.non_model_bytes
            known = shared.with_bytes(lambda nbytes: 0) if is_between else shared
            return self._make(model, limits, regime, layout=current, profile=known)

        def find() -> Plan:
            wanted = budget if shared is None else replace(budget, non_model_bytes=shared.peak_non_model_bytes)
            if given is not None and fits(given, wanted, regime):
                return given
            if earlier is not None and fits(earlier, wanted, regime):
                return earlier
            if shared is None and self._counts_activations:  # which are not known
                if is_evaluated:
                    return self._evaluation_plan(model, current, budget)
                if fits(current, wanted, regime):
                    return current
            return with_or_without_activations(make, wanted)

        return find

    def over_chunks(self, profile: MemoryProfile, plan: Plan) -> StepProfile:
        """What a step does over a plan's chunks, with its fates of activations, and with times from the hardware's
        rates. On the CPU only chunks count, so what is beside them is left out. Not collective."""
        fated = with_fates(profile, plan.activations)
        found = step_profile(fated, packed_chunks(plan), self.figures.best)
        return found if self._counts_activations else found.with_bytes(lambda nbytes: 0)

    def simulated(
        self, plan: Plan, profile: StepProfile, regime: TrainingRegime, *, is_detailed: bool = False
    ) -> Timeline:
        """The predicted step of a plan, with spans and memory where details are wanted. Not collective."""
        return timeline_of(plan, profile, self.figures.best, regime, is_detailed=is_detailed)

    def can_predict(self, plan: Plan) -> bool:
        """Whether a step of the plan can be predicted: not if the plan needs a disk that was not measured."""
        return is_time_known(plan, self.figures.best)

    def _shared_profile(self, profile: StepProfile, now: Replanning, *, is_seen: bool) -> StepProfile:
        """Rank 0's, with the most memory that any rank saw, or foresees, and a margin."""
        by_rank: list[StepProfile] = self.comm.exchange_objects(profile)
        first = by_rank[0]
        if all(len(p.intervals) == len(first.intervals) for p in by_rank):
            intervals = tuple(
                replace(same[0], non_model_bytes=max(i.non_model_bytes for i in same))
                for same in zip(*(p.intervals for p in by_rank), strict=True)
            )
            first = replace(first, intervals=intervals)
        else:  # ranks that branch: what one of them took at its peak, it may take at any time
            peak = max(p.peak_non_model_bytes for p in by_rank)
            first = first.with_bytes(lambda nbytes: peak)
        # How many tokens come to a rank's experts changes from step to step, whatever was seen.
        is_certain = is_seen and now.current.mesh.expert == 1
        return first.with_margin(
            now.current.block_bytes,
            is_certain=is_certain or self.comm.world_size == 1,
            has_growing_segments=now.budget.has_growing_segments,
        )

    @property
    def chooses_activations(self) -> bool:
        """Whether plans are to choose what becomes of activations."""
        return self.config.placement_request().activations.is_searched and self.config.plan is None

    def _shared_memory_profile(self, profile: MemoryProfile) -> MemoryProfile:
        """Rank 0's, with the most activations that any rank foresees. On the CPU they count for nothing."""
        by_rank: list[MemoryProfile] = self.comm.exchange_objects(profile)
        first = by_rank[0]
        if not self._counts_activations:
            return first.with_bytes(lambda nbytes: 0)
        more = max(p.activation_bytes for p in by_rank) - first.activation_bytes
        return first.with_bytes(lambda nbytes: nbytes + more) if more > 0 else first

    def _decide(self, model: nn.Module, budget: Budget, is_training: bool) -> tuple[Plan, bool]:
        given, prefix = given_plan(self.config, model)
        if given is not None:
            if prefix.path:
                log.info("the given plan is obeyed %s", prefix)
            given = with_activations(model, self._with_kept(given, model), self.config.activations)
            check_given(given, prefix, model, budget, self.regime, self.compute_dtype)
            return given, True
        is_auto = self.config.placement_policy == "auto"
        if is_auto and is_training and budget.gpu_bytes is not None:
            return self._guessed_plan(model, budget), False
        plan = self._unforeseen(lambda limits: self._make(model, limits, self.regime), budget)
        is_resident = plan.is_all_resident or self.config.placement_policy == "cuda"
        is_fixed = budget.gpu_bytes is None if is_auto else is_resident or self._device.type == "cpu"
        if is_fixed:  # nothing is left to decide, or no activations share the memory
            return plan, True
        if is_training:
            return self._guessed_over(model, plan, budget), False
        return self._evaluation_plan(model, plan, budget), False

    def _final_plan(self, now: Replanning, profile: StepProfile | MemoryProfile) -> Plan:
        budget, regime = now.budget, now.regime
        try:
            return self._make_anew(now, profile)
        except CapacityError as error:  # and yet a step may run, or has done so
            plan = self._least_plan(now, profile, error)
            over_chunks = self.over_chunks(profile, plan) if isinstance(profile, MemoryProfile) else profile
            log.warning(
                "going on with the smallest plan there is of these chunks%s: %s%s",
                self._excess(plan, budget, over_chunks, regime),
                error,
                self._advice(plan) if error.resource == "GPU" else "",
            )
            binding = "what a step takes beside the chunks: this is the smallest plan there is of these"
            return with_forecast(plan, over_chunks, self.figures.best, regime, budget, binding=binding)

    def _least_plan(self, now: Replanning, profile: StepProfile | MemoryProfile, refusal: CapacityError) -> Plan:
        """The plan for such a step that takes least of the device: the one that a limit higher by what the refusal
        names would hold. Where the host is what is short, and where the user has fixed the placement, `_safe_plan`."""
        limit, lacking = now.budget.gpu_bytes, refusal.lacking_bytes
        if refusal.resource == "GPU" and limit is not None and lacking and self.config.is_placement_searched:
            higher = replace(now.budget, gpu_bytes=limit + lacking)
            with suppress(CapacityError):  # the host's memory is short as well
                return replace(self._make_anew(replace(now, budget=higher), profile), forecast=None)
        return self._safe_plan(now.model, now.current, now.budget, now.regime)

    def _excess(self, plan: Plan, budget: Budget, profile: StepProfile, regime: TrainingRegime) -> str:
        """By how much such steps are expected to exceed which limit, for people; empty if by nothing."""
        over = [
            f"the {format_bytes(limit)} of {name} by {format_bytes(nbytes - limit, is_rounded_up=True)}"
            for name, nbytes, limit in (
                (budget.words.memory, step_gpu_bytes(plan, profile, self.figures.best, regime), budget.gpu_bytes),
                ("host memory", plan_use(plan, regime).host_bytes, budget.cpu_bytes),
            )
            if limit is not None and nbytes > limit
        ]
        return f", which will exceed {' and '.join(over)}" if over else ""

    def _advice(self, plan: Plan) -> str:
        """To a refusal for want of device memory, which is about the chunks that there are."""
        advice, size = "", plan.block_bytes
        if self.config.chunk_size is None:
            advice = (
                f" That is with chunks as they are (chunk_size={size}, {format_bytes(size)}): under a higher limit"
                " larger ones may be chosen, which take more, and smaller ones (a lower chunk_size) may take less."
            )
        if self.config.may_fuse and self._counts_activations:
            advice += (
                " With a language model of transformers, use_fused_kernels=True takes less: never all logits at once."
            )
        return advice

    def _guessed_plan(self, model: nn.Module, budget: Budget, layout: Plan | None = None) -> Plan:
        """The fastest one if activations take a common share of the device and the optimizer is an Adam of ours. It
        serves to build with, not to train with: what it has on the device need not go through the host's memory first.
        """
        regime, request = guessed_regime(self.regime), self.config.placement_request()

        def make(limits: Budget) -> Plan:
            guessed = self._make(model, limits, regime, layout=layout, serves_to_build=True)
            return place_to_build(guessed, model, request, limits, regime)

        guessed = self._unforeseen(make, budget)
        # Another optimizer may come, which can have no updates streamed.
        return replace(guessed, chunks=tuple(replace(c, is_update_streamed=False) for c in guessed.chunks))

    def _guessed_over(self, model: nn.Module, plan: Plan, budget: Budget) -> Plan:
        try:
            return self._guessed_plan(model, budget, plan)
        except CapacityError:
            return plan

    def _unforeseen(self, make: Callable[[Budget], Plan], budget: Budget) -> Plan:
        """A plan from before anything is known of a step."""
        return with_common_activations(make, budget) if self._counts_activations else make(budget)

    def _safe_plan(self, model: nn.Module, plan: Plan, budget: Budget, regime: TrainingRegime | None = None) -> Plan:
        """As little on the device as possible: what the activations take is not known. No chunk has spare states, which
        a few steps are not worth.

        Args:
            regime: With the optimizer; None: that is not known.
        """
        regime = regime or self.regime
        timing = regime.update_timing
        if regime.needs_global_norm and timing is UpdateTiming.INSIDE_BACKWARD:
            timing = UpdateTiming.BEHIND_FORWARD
        regime = replace(regime, update_timing=timing, needs_global_norm=False)
        light = replace(regime, whole_update_bytes=0)  # they come on top, whether or not that fits
        if self.chooses_activations:
            least = tuple(replace(block, fate=Fate.RECOMPUTE) for block in plan.activations)
            plan = replace(plan, activations=least, activation_host_bytes=0)
        try:
            largest = self._make(model, budget, light, layout=plan, policy="cpu")
            smallest = self._make(model, replace(budget, gpu_bytes=None), light, layout=plan, policy="cpu")
        except CapacityError as error:  # the host cannot hold everything
            log.info("no room to start with everything on the host (%s)", error)
            return self._roomy_plan(model, plan, budget, regime)
        blocks = min(largest.rcache_blocks, smallest.rcache_blocks)
        return _with_blocks(largest, blocks, regime)

    def _roomy_plan(self, model: nn.Module, plan: Plan, budget: Budget, regime: TrainingRegime) -> Plan:
        """As `_safe_plan`, where the device must take what the host cannot: leaves as much to activations as it can."""
        for share in _SHARES_LEFT:
            try:
                roomy = replace(budget, non_model_bytes=int((budget.gpu_bytes or 0) * share))
                return self._make(model, roomy, regime, layout=plan)
            except CapacityError:
                continue
        return plan

    def _evaluation_plan(self, model: nn.Module, plan: Plan, budget: Budget) -> Plan:
        """Half of the device for activations, which are small without a backward."""
        try:
            half = replace(budget, non_model_bytes=(budget.gpu_bytes or 0) // 2)
            return self._make(model, half, self.regime, layout=plan)
        except CapacityError:
            return self._safe_plan(model, plan, budget)

    def _make_anew(self, now: Replanning, profile: StepProfile | MemoryProfile, *, policy: str | None = None) -> Plan:
        return self._make(now.model, now.budget, now.regime, layout=now.current, policy=policy, profile=profile)

    def _make(
        self,
        model: nn.Module,
        budget: Budget,
        regime: TrainingRegime,
        *,
        layout: Plan | None = None,
        policy: str | None = None,
        profile: StepProfile | MemoryProfile | None = None,
        mesh: Mesh | None = None,
        serves_to_build: bool = False,
    ) -> Plan:
        request = self.config.placement_request()
        meshes = [mesh] if mesh else self.config.meshes(self.comm.world_size, self._num_nodes)

        def make(mesh: Mesh) -> Plan:
            return make_plan(
                model,
                request if policy is None else replace(request, policy=policy),
                chunk_sizes=self.config.chunk_sizes,
                budget=budget,
                regime=regime,
                mesh=mesh,
                compute_dtype=self.compute_dtype,
                keep_fp32=self.kept_fp32(model) if layout is None else (),
                ignored=self.ignored(model) if layout is None else None,
                profile=profile,
                hardware=self.figures.best,
                layout=layout,
                serves_to_build=serves_to_build and len(meshes) == 1,  # or it decides which ranks share parameters
            )

        if layout is not None:  # an engine's ranks stay in their groups
            return with_notes_of(make(layout.mesh), layout)
        return best_sharding(make, meshes)

    def kept_fp32(self, model: nn.Module) -> frozenset[str]:
        """Names of the parameters that stay in fp32 where the others are cast to 16 bits. Not collective.

        Args:
            model: As the user built it: further plans take these names from the first one, since what they are made for
                has lost its classes.

        Raises:
            PlanError: The user named what the model has not got.
        """
        kept = kept_parameters(
            model,
            self.config.keep_fp32,
            has_autocast=self.has_autocast,
            # On a GPU autocast casts the operands of norms itself.
            leaves_norms=self.has_autocast and self._device.type == "cpu",
            has_defaults=self.regime.master_weights,
        )
        is_half = self.compute_dtype is not None and self.compute_dtype.itemsize == 2
        return kept if is_half else frozenset()

    def ignored(self, model: nn.Module) -> tuple[IgnoredParam, ...]:
        """The parameters that are left out of chunks. Not collective.

        Args:
            model: As the user built it, as for `kept_fp32`.

        Raises:
            PlanError: The user named what the model has not got, or what cannot be trained so.
        """
        return ignored_parameters(model, self.config.ignored)

    def _specs(self, model: nn.Module) -> tuple[ParamSpec, ...]:
        left_out = [p.fqn for p in self.ignored(model)]
        return param_specs(model, self.compute_dtype, self.kept_fp32(model), left_out)

    def _with_kept(self, given: Plan, model: nn.Module) -> Plan:
        """A plan of the user's, with what is to stay in fp32 beside what the plan itself has in fp32."""
        plan = with_kept(given, self.kept_fp32(model), is_exact=is_nothing(self.config.keep_fp32))
        plan = with_ignored(plan, self.ignored(model))
        if plan is not given:
            log.info("the given plan has parameters otherwise than keep_fp32 and ignored say: it is changed")
        return plan

    def measure_links(self) -> None:
        """Have all of the machine's figures, as where ranks are to share work in other ways. Collective."""
        if self.figures.is_pending:
            self.figures.measure()

    def share(self, decide: Callable[[], T]) -> T:
        """Rank 0 decides, all ranks get it; an error there is raised on all."""
        decision = run_together(self.comm, decide if self.comm.rank == 0 else lambda: None)
        shared: T = self.comm.exchange_objects(decision)[0]
        return shared
