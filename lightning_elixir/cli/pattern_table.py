"""`lightning-elixir plan --patterns`: whether experts or layers should be cut between GPUs."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack

from torch import nn

from lightning_elixir.cli.plan import machine_for, place, refusal_of, study
from lightning_elixir.cli.transformers_subject import check_name
from lightning_elixir.errors import PlanError
from lightning_elixir.patterns.apply import exchanges_of, put_in
from lightning_elixir.patterns.model_plans import own_patterns
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.plan.units import format_bytes, format_seconds
from lightning_elixir.plan.weighing import Exchanged, Way, advise, meshes_to_weigh, way_of, weigh

_NOT_IN_TABLE = ("fits", "scaling", "module", "save_plan", "html")


def print_patterns(options: argparse.Namespace) -> int:
    """Print what each way takes, and which to choose, in Markdown or with --json as JSON.

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
    meshes = meshes_to_weigh(options.gpus * options.nodes, options.nodes)
    ways = weigh(meshes, lambda mesh: _way(mesh, options))
    best, why = advise(ways)
    if options.json:
        take = None if best is None else _sizes(best)
        content = {"fits": best is not None, "take": take, "why": why}
        sys.stdout.write(json.dumps({**content, "ways": [_content(way) for way in ways]}, indent=1) + "\n")
        return 0 if best is not None else 1
    lines = ["| way | step | of it for exchanges | for a micro-batch | GPU | host |", f"{'| --- ' * 6}|"]
    lines += [_line(way) for way in ways]
    sys.stdout.write("\n".join([*lines, "", f"Take {why}." if best else f"{why.capitalize()}."]) + "\n")
    return 0 if best is not None else 1


def _way(mesh: Mesh, options: argparse.Namespace) -> Way:
    exchanges: list[Exchanged] = []
    machine = machine_for(options)
    with ExitStack() as stack:

        def cut(model: nn.Module) -> None:
            nonlocal exchanges
            if not mesh.is_trivial:
                put_in(model, own_patterns(model, mesh), mesh, 0)
                exchanges = stack.enter_context(exchanges_of(model))

        subject, profile = study(options, cut)
        found = place(subject, profile, machine, options, mesh)
    return way_of(found.plan, found.step_s, exchanges, machine.hardware, options.accumulate)


def _sizes(way: Way) -> dict[str, object]:
    """As options of the strategy."""
    return {"tensor_parallel_size": way.mesh.tensor, "expert_parallel_size": way.mesh.expert}


def _content(way: Way) -> dict[str, object]:
    sizes = {**_sizes(way), "copies": way.mesh.copies}
    if way.step_s is None:
        return {**sizes, **refusal_of(way.refusal)}
    return {
        **sizes,
        "fits": True,
        "step_s": way.step_s + way.exchange_s,
        "exchange_s": way.exchange_s,
        "micro_batch_s": way.batch_s,
        "gpu_bytes": way.peak_gpu_bytes,
        "host_bytes": way.host_bytes,
        "sharding": way.sharding or None,
    }


def _line(way: Way) -> str:
    if way.step_s is None or way.batch_s is None:
        return f"| {way} | {way.refusal} | - | - | - | - |"
    step = format_seconds(way.step_s + way.exchange_s)
    memory = f"{format_bytes(way.peak_gpu_bytes)} | {format_bytes(way.host_bytes)}"
    return f"| {way} | {step} | {format_seconds(way.exchange_s)} | {format_seconds(way.batch_s)} | {memory} |"
