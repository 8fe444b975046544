"""`lightning-elixir plan --scaling`: what would be chosen on several numbers of hosts, and where more do not pay."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_elixir.cli.plan import Found, content_of, machine_for, place, refusal_of, study
from lightning_elixir.cli.transformers_subject import check_name
from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.sharding import NOTE, describe_sharding
from lightning_elixir.plan.units import format_seconds

_WORTH_A_HOST = 0.8
"""Share of what a GPU does in the first row of a table below which more hosts do not pay."""
_NOT_IN_SCALING = ("fits", "nodes", "save_plan", "html")


@dataclass(frozen=True)
class _Row:
    """What comes of so many hosts, with so many GPUs together."""

    hosts: int
    gpus: int
    found: Found | CapacityError
    share: float | None = None
    """What each GPU does, to what one does in the first row that fits; None: it does not fit."""


def print_scaling(options: argparse.Namespace) -> int:
    """Print what would be chosen on several numbers of hosts, as a table in Markdown or with --json as JSON.

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
    rows: list[_Row] = []
    first_s = 0.0
    for number, machine in zip(numbers, machines, strict=True):
        named = argparse.Namespace(**{**vars(options), "nodes": number})
        gpus = number * options.gpus
        try:
            found = place(subject, profile, machine, named)
        except CapacityError as error:
            rows.append(_Row(number, gpus, error))
            continue
        first_s = first_s or found.step_s  # every GPU has as many samples in a step
        rows.append(_Row(number, gpus, found, first_s / found.step_s))
    pays_no_more = next((row.gpus for row in rows if row.share is not None and row.share < _WORTH_A_HOST), None)
    if options.json:
        content = {
            "fits": bool(first_s),
            "pays_no_more_from_gpus": pays_no_more,
            "rows": [_row_content(row) for row in rows],
        }
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(_scaling_lines(rows, pays_no_more)) + "\n")
    return 0 if first_s else 1


def _row_content(row: _Row) -> dict[str, object]:
    told = refusal_of(str(row.found)) if isinstance(row.found, CapacityError) else content_of(row.found)
    return {"hosts": row.hosts, "gpus": row.gpus, "share_of_first": row.share, **told}


def _scaling_lines(rows: Sequence[_Row], pays_no_more: int | None) -> list[str]:
    lines = [
        "| hosts | GPUs | chosen | step | waiting in it | samples/s | of a GPU, to the first | what was weighed |",
        f"{'| --- ' * 8}|",
    ]
    for row in rows:
        found = row.found
        if isinstance(found, CapacityError):
            lines.append(f"| {row.hosts} | {row.gpus} | does not fit | - | - | - | - | - |")
            continue
        times, weighed = found.timeline.times, found.plan.notes.get(NOTE, "-")
        rate = (found.num_samples or row.gpus) / found.step_s
        lines.append(
            f"| {row.hosts} | {row.gpus} | {describe_sharding(found.plan.mesh)} | {format_seconds(times.total_s)}"
            f" | {times.waiting_s / times.total_s:.0%} | {rate:.4g} | {row.share:.0%} | {weighed} |"
        )
    share = f"{_WORTH_A_HOST:.0%}"
    if pays_no_more is not None:
        lines += ["", f"From {pays_no_more} GPUs on, each does less than {share} of what it does in the first row."]
    elif fitting := [row.gpus for row in rows if row.share is not None]:
        lines += ["", f"Up to {fitting[-1]} GPUs, each does {share} or more of what it does in the first row."]
    return lines
