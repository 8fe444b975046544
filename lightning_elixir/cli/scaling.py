"""`lightning-elixir plan --scaling`: what would be chosen on several numbers of hosts, and where more do not pay."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_elixir.cli.plan import Found, machine_for, place, study
from lightning_elixir.cli.transformers_subject import check_name
from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.sharding import NOTE, describe_sharding
from lightning_elixir.plan.units import format_seconds

_WORTH_A_HOST = 0.8
"""Share of what a GPU does in the first row of a table below which more hosts do not pay."""
_NOT_IN_SCALING = ("fits", "nodes", "save_plan", "html", "json")


def print_scaling(options: argparse.Namespace) -> int:
    """Print what would be chosen on several numbers of hosts, as a table in Markdown.

    Returns:
        The exit code: 1 if nothing fits.

    Raises:
        PlanError: The model, the machine or an option cannot be used as given, or an option has no place in a table.
    """
    defaults = {"nodes": 1}
    misplaced = [n for n in _NOT_IN_SCALING if getattr(options, n) != defaults.get(n) and getattr(options, n)]
    if misplaced:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in misplaced)
        raise PlanError(f"--scaling chooses the hosts itself, and prints one table: leave out {names}")
    if (options.model is None) == (options.module is None):
        raise PlanError("which model? Give --model or --module, one of them (`lightning-elixir plan --help`)")
    if options.model is not None:
        check_name(options.model)
    numbers = sorted(set(options.scaling))
    machines = [machine_for(argparse.Namespace(**{**vars(options), "nodes": number})) for number in numbers]
    subject, profile = study(options)
    rows: list[tuple[int, Found | None]] = []
    for number, machine in zip(numbers, machines, strict=True):
        named = argparse.Namespace(**{**vars(options), "nodes": number})
        try:
            rows.append((number, place(subject, profile, machine, named)))
        except CapacityError:
            rows.append((number, None))
    sys.stdout.write("\n".join(_scaling_lines(rows, options.gpus)) + "\n")
    return 0 if any(found is not None for _, found in rows) else 1


def _scaling_lines(rows: Sequence[tuple[int, Found | None]], per_node: int) -> list[str]:
    lines = [
        "| hosts | GPUs | chosen | step | waiting in it | samples/s | of a GPU, to the first | what was weighed |",
        f"{'| --- ' * 8}|",
    ]
    first, last_worth, gone = None, None, None
    for number, found in rows:
        gpus = number * per_node
        if found is None:
            lines.append(f"| {number} | {gpus} | does not fit | - | - | - | - | - |")
            continue
        rate = (found.num_samples or gpus) / found.step_s
        first = rate / gpus if first is None else first
        share = rate / gpus / first
        if share >= _WORTH_A_HOST and gone is None:
            last_worth = gpus
        elif gone is None:
            gone = gpus
        times, weighed = found.timeline.times, found.plan.notes.get(NOTE, "-")
        lines.append(
            f"| {number} | {gpus} | {describe_sharding(found.plan.mesh)} | {format_seconds(times.total_s)}"
            f" | {times.waiting_s / times.total_s:.0%} | {rate:.4g} | {share:.0%} | {weighed} |"
        )
    if gone is not None:
        lines += ["", f"From {gone} GPUs on, each does less than {_WORTH_A_HOST:.0%} of what it does in the first row."]
    elif last_worth is not None:
        lines += [
            "",
            f"Up to {last_worth} GPUs, each does {_WORTH_A_HOST:.0%} or more of what it does in the first row.",
        ]
    return lines
