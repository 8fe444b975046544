"""`lightning-elixir plan --patterns`: whether experts or layers should be cut between GPUs."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack

from torch import nn

from lightning_elixir.cli.plan import machine_for, place, study
from lightning_elixir.cli.transformers_subject import check_name
from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.patterns.apply import exchanges_of, put_in
from lightning_elixir.patterns.model_plans import own_patterns
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.plan.units import format_bytes, format_seconds
from lightning_elixir.plan.weighing import Exchanged, Way, advise, exchange_s

_NOT_IN_TABLE = ("fits", "scaling", "module", "save_plan", "html", "json", "activations", "use_fused_kernels")


def print_patterns(options: argparse.Namespace) -> int:
    """Print what each way takes, and which to choose, in Markdown.

    Returns:
        The exit code: 1 if nothing fits.

    Raises:
        PlanError: The model, the machine or an option cannot be used as given, or an option has no place in the table.
    """
    misplaced = [f"--{name.replace('_', '-')}" for name in _NOT_IN_TABLE if getattr(options, name)]
    if misplaced:
        raise PlanError(f"--patterns prints one table, of a --model: leave out {', '.join(misplaced)}")
    if options.model is None:
        raise PlanError("--patterns weighs the patterns that models of transformers bring along: give --model")
    check_name(options.model)
    ways = [_way(mesh, options) for mesh in _meshes(options.gpus, options.nodes)]
    best, why = advise(ways)
    lines = ["| way | step | of it for exchanges | for a micro-batch | GPU | host |", f"{'| --- ' * 6}|"]
    lines += [_line(way) for way in ways]
    sys.stdout.write("\n".join([*lines, "", f"Take {why}."]) + "\n")
    return 0 if best is not None else 1


def _meshes(gpus: int, nodes: int) -> list[Mesh]:
    """Sharding alone first; then sizes by doubling: of "tensor" within a host, of "expert" up to all GPUs."""
    world = gpus * nodes
    sizes = [2**n for n in range(1, world.bit_length())]
    found = [Mesh(world)]
    found += [Mesh(world, tensor=size) for size in sizes if gpus % size == 0]
    return found + [Mesh(world, expert=size) for size in sizes if world % size == 0]


def _way(mesh: Mesh, options: argparse.Namespace) -> Way:
    exchanges: list[Exchanged] = []
    machine = machine_for(options)
    with ExitStack() as stack:

        def cut(model: nn.Module) -> None:
            nonlocal exchanges
            if not mesh.is_trivial:
                put_in(model, own_patterns(model, mesh), mesh, 0)
                exchanges = stack.enter_context(exchanges_of(model))

        try:
            subject, profile = study(options, cut)
            found = place(subject, profile, machine, options, mesh)
        except CapacityError:
            return Way(mesh, None, refusal="does not fit")
        except PlanError as error:
            if mesh.is_trivial:
                raise
            return Way(mesh, None, refusal=str(error).partition(":")[0])
    forecast = found.plan.forecast
    return Way(
        found.plan.mesh,
        found.step_s,
        options.accumulate * exchange_s(exchanges, mesh, machine.hardware),
        0 if forecast is None else forecast.peak_gpu_bytes,
        0 if forecast is None else forecast.host_bytes,
    )


def _line(way: Way) -> str:
    if way.step_s is None or way.batch_s is None:
        return f"| {way} | {way.refusal} | - | - | - | - |"
    step = format_seconds(way.step_s + way.exchange_s)
    memory = f"{format_bytes(way.peak_gpu_bytes)} | {format_bytes(way.host_bytes)}"
    return f"| {way} | {step} | {format_seconds(way.exchange_s)} | {format_seconds(way.batch_s)} | {memory} |"
