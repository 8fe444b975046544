"""`lightning-elixir plan`: will it fit, with which placement, and how fast."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from torch import nn

from lightning_elixir.cli.machine import Machine, machine_of
from lightning_elixir.cli.rich_tables import print_plan
from lightning_elixir.cli.subject import Subject, module_subject
from lightning_elixir.cli.transformers_subject import check_name, transformers_subject
from lightning_elixir.cli.wording import size_of, speaking_of_options
from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.activations import ActivationRequest
from lightning_elixir.plan.fates import with_fates
from lightning_elixir.plan.ignored import ignored_in_fp32
from lightning_elixir.plan.io import plan_to_dict, save_plan
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.plan.profile import MemoryProfile
from lightning_elixir.plan.sharding import best_sharding, meshes_of
from lightning_elixir.plan.simulator.timeline import Timeline
from lightning_elixir.plan.types import Plan, Tier
from lightning_elixir.plan.units import format_bytes
from lightning_elixir.planning import (
    ChunkSizes,
    PlacementRequest,
    TrainingRegime,
    make_plan,
    timeline_of,
    with_common_activations,
)
from lightning_elixir.profiling.blocks import blocks_of
from lightning_elixir.profiling.fake_step import profile_memory
from lightning_elixir.profiling.ignored import ignored_parameters
from lightning_elixir.profiling.kept_fp32 import kept_parameters
from lightning_elixir.profiling.known_values import Guesses
from lightning_elixir.profiling.parameters import dtype_name, param_specs
from lightning_elixir.report import ReportData, render_report
from lightning_elixir.report.markup import format_count
from lightning_elixir.strategy.precision import ElixirPrecision
from lightning_elixir.strategy.regimes import fit_regime, guessed_regime, states_of_averages, with_optimizer


@dataclass(frozen=True)
class Found:
    """A plan that fits, and what a step of it is worth."""

    subject: Subject
    machine: Machine
    profile: MemoryProfile
    plan: Plan
    timeline: Timeline
    num_params: int
    num_accumulated: int

    @property
    def step_s(self) -> float:
        """Predicted seconds of one step: so many times forward and backward, and one update."""
        return self.timeline.times.total_s

    @property
    def remarks(self) -> tuple[str, ...]:
        """What to keep in mind."""
        remarks = (*self.subject.remarks, *self.machine.remarks)
        if any(c.optim_tier is Tier.NVME for c in self.plan.chunks):
            remarks += ("states on NVMe: training takes nvme_offload_dir, a folder on that disk",)
        return remarks

    @property
    def num_tokens(self) -> int | None:
        """Of one step over all ranks."""
        return None if self.subject.num_tokens is None else self.subject.num_tokens * self._num_batches

    @property
    def num_samples(self) -> int | None:
        return None if self.subject.num_samples is None else self.subject.num_samples * self._num_batches

    @property
    def _num_batches(self) -> int:
        return self.num_accumulated * self.plan.world_size


def run_plan(options: argparse.Namespace) -> int:
    """The command.

    Returns:
        The exit code: 0 it fits, 1 it does not.

    Raises:
        PlanError: The model, the machine or an option cannot be used as given.
    """
    if options.fits:
        return print_fits(options)
    if (options.model is None) == (options.module is None):
        raise PlanError("which model? Give --model or --module, one of them (`lightning-elixir plan --help`)")
    try:
        found = find(options)
    except CapacityError as error:
        reason = f"{error}{_with_fused_operators(options, error)}"
        if options.json:
            sys.stdout.write(json.dumps(refusal_of(reason)) + "\n")
        else:
            console = Console(stderr=True, soft_wrap=True, highlight=False)
            console.print(f"[bold red]It does not fit.[/] {escape(reason)}")
        return 1
    if options.save_plan:
        _written(options.save_plan, lambda path: save_plan(found.plan, path))
    if options.html:
        page = render_report(_report_data(found, options))
        _written(options.html, lambda path: path.write_text(page, encoding="utf-8"))
    if options.json:
        sys.stdout.write(json.dumps(content_of(found), indent=1) + "\n")
    else:
        print_plan(found, options)
    return 0


def _with_fused_operators(options: argparse.Namespace, refusal: CapacityError) -> str:
    """What fused operators would change about a refusal, as a sentence to end it with; empty if nothing, or if they
    were asked for."""
    if options.use_fused_kernels or refusal.resource != "GPU":
        return ""
    try:
        find(argparse.Namespace(**{**vars(options), "use_fused_kernels": True}))
    except CapacityError as error:
        saved = (refusal.lacking_bytes or 0) - (error.lacking_bytes or 0) if error.resource == "GPU" else 0
        return f" With --use-fused-kernels it lacks {format_bytes(saved)} less." if saved > 0 else ""
    except PlanError:  # nothing can be swapped in it
        return ""
    return " Or with fused operators: it fits with --use-fused-kernels."


def find(options: argparse.Namespace) -> Found:
    """Profile one step and search for the placement.

    Raises:
        PlanError: The model, the machine or an option cannot be used as given.
        CapacityError: Nothing fits.
    """
    if options.model is not None:
        check_name(options.model)
    machine = machine_for(options)
    return place(*study(options), machine, options)


def machine_for(options: argparse.Namespace) -> Machine:
    """The machine that the options describe, with the precision's figures."""
    return machine_of(options, dtype_name(ElixirPrecision(options.precision).compute_dtype or torch.float32))


def study(
    options: argparse.Namespace, change: Callable[[nn.Module], None] = lambda model: None
) -> tuple[Subject, MemoryProfile]:
    """What a step of the model takes, on any machine.

    Args:
        options: Of the command.
        change: What is done to the model first.
    """
    precision = ElixirPrecision(options.precision)
    with _telling(options, "looking at the model"):
        subject = module_subject(options) if options.module else transformers_subject(options)
    change(subject.model)
    with _telling(options, "running a training step without values"), speaking_of_options():
        left_out = ignored_parameters(subject.model, options.ignored)
        in_fp32 = kept_of(subject, options, precision) | ignored_in_fp32(left_out)
        profile = profile_memory(
            subject.model,
            subject.inp,
            subject.step_fn,
            precision.compute_dtype,
            autocast=precision.has_autocast,
            keep_fp32=sorted(in_fp32) or None,
            use_fused_kernels=options.use_fused_kernels,
            master_weights=False,  # what is kept is known
            blocks=[block.name for block in blocks_of(subject.model, activations_of(options))],
            around_operator=Guesses() if subject.may_guess_values else None,
        )
    return subject, profile


def place(
    subject: Subject,
    profile: MemoryProfile,
    machine: Machine,
    options: argparse.Namespace,
    mesh: Mesh | None = None,
) -> Found:
    """Search for the placement on a machine.

    Args:
        subject: From `study`, as is the profile.
        profile: What its step takes.
        machine: The machine.
        options: Of the command.
        mesh: All ranks; None: nothing is cut between them.

    Raises:
        CapacityError: Nothing fits.
    """
    precision = ElixirPrecision(options.precision)
    regime = regime_of(options, precision)
    num_states = 2 + states_of_averages(regime, options.averages)
    regime = with_optimizer(regime, can_stream=options.optimizer == "hybrid", num_states=num_states)
    with _telling(options, "looking for the fastest placement"), speaking_of_options():
        meshes = meshes_of(mesh or Mesh(options.gpus * options.nodes), options.nodes, options.sharding)
        plan = best_sharding(
            lambda mesh: _fit_plan(subject, machine, profile, options, regime, mesh, is_alone=len(meshes) == 1), meshes
        )
        timeline = timeline_of(plan, profile, machine.hardware, regime)
    num_params = sum(spec.numel for spec in param_specs(subject.model))
    return Found(
        subject, machine, with_fates(profile, plan.activations), plan, timeline, num_params, options.accumulate
    )


def print_fits(options: argparse.Namespace) -> int:
    """Print what lives where on some sizes of machines, as a table in Markdown.

    Returns:
        The exit code.

    Raises:
        PlanError: A model or an option cannot be used as given, or an option has no place in a table.
    """
    misplaced = [f"--{name.replace('_', '-')}" for name in _NOT_IN_TABLES if getattr(options, name)]
    if misplaced:
        raise PlanError(
            f"--fits chooses models and memory itself, and prints one table: leave out {', '.join(misplaced)}"
        )
    for model in options.fits:
        check_name(model)
    sizes = [(gpu, host) for gpu in _GPU_GIB for host in _HOST_GIB]
    write = sys.stdout.write
    write(f"| model | parameters | {' | '.join(f'{gpu} + {host} GiB' for gpu, host in sizes)} |\n")
    write(f"| --- {'| --- ' * (1 + len(sizes))}|\n")
    for model in options.fits:
        named = argparse.Namespace(**{**vars(options), "model": model})
        subject, profile = study(named)
        num_params = sum(spec.numel for spec in param_specs(subject.model))
        cells = [_where_it_lives(subject, profile, named, gpu, host) for gpu, host in sizes]
        write(f"| {subject.name} | {format_count(num_params)} | {' | '.join(cells)} |\n")
        sys.stdout.flush()
    return 0


_GPU_GIB, _HOST_GIB = (24, 40, 80, 141), (64, 128)
_NOT_IN_TABLES = ("model", "module", "gpu_memory", "cpu_memory", "cpu_memory_limit", "save_plan", "html", "json")


def _where_it_lives(
    subject: Subject, profile: MemoryProfile, options: argparse.Namespace, gpu_gib: int, host_gib: int
) -> str:
    """Of a table: "GPU", if all is there; what else holds a part of it; "-", if it does not fit."""
    sized = {"gpu_memory": f"{gpu_gib}GiB", "cpu_memory": f"{host_gib}GiB"}
    named = argparse.Namespace(**{**vars(options), **sized})
    try:
        plan = place(subject, profile, machine_for(named), named).plan
    except CapacityError:
        return "-"
    tiers = {tier for chunk in plan.chunks for tier in (chunk.param_tier, chunk.optim_tier)}
    return "NVMe" if Tier.NVME in tiers else "host" if Tier.CPU in tiers else "GPU"


def _fit_plan(
    subject: Subject,
    machine: Machine,
    profile: MemoryProfile,
    options: argparse.Namespace,
    regime: TrainingRegime,
    mesh: Mesh,
    *,
    is_alone: bool,
) -> Plan:
    """The plan that a fit comes to, which cuts the model into chunks before it knows its optimizer and what a step
    takes, and places them when it does; where that is too late, one to be given to a fit.

    Args:
        is_alone: No other mesh is weighed: a fit looks more closely where one is.
    """
    precision = ElixirPrecision(options.precision)
    make = partial(
        make_plan,
        subject.model,
        PlacementRequest(policy=options.policy, activations=activations_of(options)),
        mesh=mesh,
        compute_dtype=precision.compute_dtype,
        hardware=machine.hardware,
    )
    kept = kept_of(subject, options, precision)
    sizes = ChunkSizes(size_of(options.chunk_size, "--chunk-size"))
    left_out = ignored_parameters(subject.model, options.ignored)
    cut = partial(make, chunk_sizes=sizes, keep_fp32=kept, ignored=left_out)
    budget, guessed = machine.budget, regime_of(options, precision)
    if options.policy == "auto":
        guessed = guessed_regime(guessed)
    guess = partial(cut, regime=guessed, serves_to_build=is_alone)
    layout = with_common_activations(lambda limits: guess(budget=limits), budget)
    try:
        return make(budget=budget, regime=regime, profile=profile, layout=layout)
    except CapacityError:
        return cut(budget=budget, regime=regime, profile=profile)


def kept_of(subject: Subject, options: argparse.Namespace, precision: ElixirPrecision) -> frozenset[str]:
    """Names of the parameters in chunks that stay in fp32 where others are cast."""
    if precision.compute_dtype is None:
        return frozenset()
    return kept_parameters(
        subject.model, options.keep_fp32, has_autocast=precision.has_autocast, has_defaults=precision.is_mixed
    )


def activations_of(options: argparse.Namespace) -> ActivationRequest:
    """What becomes of activations.

    Raises:
        PlanError: The option has other words than it takes, or --checkpointing is there as well.
    """
    words: list[str] = options.activations or []
    if words and options.checkpointing:
        raise PlanError("--activations says what --checkpointing would: give one of them")
    if len(words) == 1 and "=" not in words[0]:
        return ActivationRequest.of(words[0])
    unclear = [word for word in words if "=" not in word]
    if unclear:
        raise PlanError(f"--activations takes one word, or GLOB=WHAT for several blocks, got {unclear[0]!r}")
    return ActivationRequest.of(dict(word.split("=", 1) for word in words) or None)


def regime_of(options: argparse.Namespace, precision: ElixirPrecision) -> TrainingRegime:
    """What training is like, without the optimizer."""
    is_clipped, is_scaled = bool(options.gradient_clip_val), options.precision == "16-mixed"
    is_clamped = is_clipped and options.gradient_clip_algorithm == "value"
    return fit_regime(
        is_mixed=precision.is_mixed,
        wanted=options.update_timing,
        can_begin_early=not (is_clipped or is_scaled),
        needs_global_norm=(is_clipped or is_scaled) and not is_clamped,
        accumulates=options.accumulate > 1,
        num_backwards=options.accumulate,
        most_backwards=options.accumulate,
    )


def _gpus_text(options: argparse.Namespace) -> str:
    count = options.gpus * options.nodes
    return f"{count} GPU{'s' * (count > 1)}" + (f" of {options.nodes} hosts" if options.nodes > 1 else "")


@contextmanager
def _telling(options: argparse.Namespace, what: str) -> Iterator[None]:
    """Say what takes its time, on a terminal."""
    console = Console(stderr=True)
    if options.json or not console.is_terminal:
        yield
        return
    with console.status(f"{what} ..."):
        yield


def _report_data(found: Found, options: argparse.Namespace) -> ReportData:
    micro = f"{found.subject.num_samples} samples on each GPU" if found.subject.num_samples else "as given"
    facts = [
        ("parameters", format_count(found.num_params)),
        ("precision", options.precision),
        ("batch", micro + (f", {found.num_accumulated} times a step" if found.num_accumulated > 1 else "")),
    ]
    if found.subject.num_tokens and found.subject.num_samples:
        facts.append(("tokens of a sample", f"{found.subject.num_tokens // found.subject.num_samples:,}"))
    if options.gradient_clip_val:
        facts.append(
            ("gradients are clipped", f"by {options.gradient_clip_algorithm}, to {options.gradient_clip_val:g}")
        )
    if options.activations:
        facts.append(("activations", " ".join(options.activations)))
    if options.checkpointing:
        facts.append(("activation checkpointing", "on"))
    return ReportData(
        title=f"{found.subject.name} on {_gpus_text(options)}",
        plan=found.plan,
        hardware=found.machine.hardware,
        timeline=found.timeline,
        num_tokens=found.num_tokens,
        num_samples=found.num_samples,
        facts=tuple(facts),
        remarks=found.remarks,
    )


def refusal_of(reason: str) -> dict[str, object]:
    """What `--json` says of a machine that is too small."""
    return {"fits": False, "reason": reason}


def content_of(found: Found) -> dict[str, object]:
    """Everything, for `--json`."""
    profile, step_s = found.profile, found.step_s
    return {
        "fits": True,
        "model": found.subject.name,
        "num_params": found.num_params,
        "step_s": step_s,
        "tokens_per_s": found.num_tokens / step_s if found.num_tokens and step_s else None,
        "samples_per_s": found.num_samples / step_s if found.num_samples and step_s else None,
        "profile": {
            "param_bytes": profile.param_bytes,
            "buffer_bytes": profile.buffer_bytes,
            "grad_bytes": profile.grad_bytes,
            "activation_bytes": profile.activation_bytes,
            "peak_bytes": profile.peak_bytes,
            "peak_module": profile.peak_module,
            "flops": profile.flops,
        },
        "hardware": found.machine.hardware.to_dict(),
        "remarks": list(found.remarks),
        "plan": plan_to_dict(found.plan),
    }


def _written(path: str, write: object) -> None:
    try:
        write(Path(path))  # type: ignore[operator]
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror}") from error
