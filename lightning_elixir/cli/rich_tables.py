"""What the command prints."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_elixir.plan.activations import describe_activations
from lightning_elixir.plan.describe import (
    describe_disk,
    describe_fetching,
    describe_ignored,
    describe_spending,
    describe_updates,
)
from lightning_elixir.plan.explain import MARGIN_TEXT
from lightning_elixir.plan.hardware import HardwareSpec, hardware_table
from lightning_elixir.plan.types import Plan, Tier
from lightning_elixir.plan.units import format_bytes
from lightning_elixir.report.markup import format_amount, format_count, format_seconds
from lightning_elixir.report.tables import GPU_KINDS, HOST_KINDS

if TYPE_CHECKING:
    from lightning_elixir.cli.plan import Found

NUM_ALTERNATIVES = 3
"""Runners-up that a terminal shows; the report has all."""


def print_plan(found: Found, options: argparse.Namespace) -> None:
    """The plan as tables on standard output."""
    console = Console(highlight=False)
    console.print()
    console.print(_summary(found, options))
    console.print(_memory(found))
    console.print(_times(found))
    forecast = found.plan.forecast
    if forecast is not None:
        console.print(f"\n[bold]The limit:[/] {escape(forecast.binding)}")
        console.print(f"{format_seconds(forecast.times.total_s)} a step, {describe_spending(forecast.times)}")
        if forecast.alternatives:
            console.print(_alternatives(found.plan))
    for remark in found.remarks:
        console.print(f"[dim]assumed: {escape(remark)}[/]")
    for what, path in (("plan", options.save_plan), ("report", options.html)):
        if path:
            console.print(f"{what} written to {escape(path)}")


def print_hardware(spec: HardwareSpec) -> None:
    """Measured figures as a table on standard output."""
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for what, value in hardware_table(spec):
        table.add_row(escape(what), escape(value))
    Console(highlight=False).print(table)


def _summary(found: Found, options: argparse.Namespace) -> Table:
    plan, step_s = found.plan, found.step_s
    table = Table(title=f"[bold green]It fits:[/] {escape(found.subject.name)}", title_justify="left", box=None)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.show_header = False
    table.add_row("parameters", f"{format_count(found.num_params)}, {options.precision}")
    table.add_row("placement", describe_chunks(plan))
    updates = describe_updates(plan)
    if updates:
        table.add_row("updates on the host", updates)
    beside = {
        "activations are": describe_activations(plan.activations),
        "NVMe": describe_disk(plan),
        "ignored": describe_ignored(plan),
    }
    for name, text in beside.items():
        if text:
            table.add_row(name, text)
    table.add_row("one step", format_seconds(step_s))
    for unit, count in (("tokens", found.num_tokens), ("samples", found.num_samples)):
        if count and step_s:
            table.add_row(f"{unit} a second", f"{format_amount(count / step_s)} ({count:,} a step)")
    table.add_row("activations", f"at most {format_bytes(found.profile.activation_bytes)} of each GPU")
    return table


def describe_chunks(plan: Plan) -> str:
    """Where the chunks of a plan live, in one sentence."""
    chunks = plan.chunks
    trained = [c for c in chunks if c.requires_grad]
    if plan.is_all_resident and all(c.optim_tier is Tier.GPU for c in trained):
        return f"everything on the GPU ({len(chunks)} chunk{'s' * (len(chunks) > 1)})"
    parts = [
        f"{len(chunks)} chunks: parameters of"
        f" {sum(c.is_persistent for c in chunks)} and states of"
        f" {sum(c.optim_tier is Tier.GPU for c in trained)} stay on the GPU"
    ]
    made = sum(not c.is_persistent and c.param_tier is Tier.GPU for c in chunks)
    if made:  # of shards, or of masters
        parts.append(f"parameters of {made} are made there when they are needed")
    streamed = sum(c.is_update_streamed for c in trained)
    if streamed:
        parts.append(f"states of {streamed} stream through it for their update")
    on_nvme = sum(c.optim_tier is Tier.NVME for c in trained)
    if on_nvme:
        parts.append(f"states of {on_nvme} are on NVMe")
    params = sum(c.param_tier is Tier.NVME for c in plan.chunks)
    if params:
        parts.append(f"parameters of {params} are on NVMe")
    if not plan.is_all_resident:
        size = format_bytes(plan.block_bytes)
        fetching = describe_fetching(plan.rcache_blocks, plan.prefetch_depth)
        parts.append(f"an rCache of {plan.rcache_blocks} blocks of {size}, chunks {fetching}")
    return "; ".join(parts)


def _memory(found: Found) -> Table:
    plan, forecast = found.plan, found.plan.forecast
    table = _table("Bytes of each rank", "", "GPU", "host")
    host = {text.partition(" and their")[0]: key for key, text, _ in HOST_KINDS}
    on_gpus, margin = plan.gpu_kinds_beside_margin, forecast.margin_bytes if forecast else 0
    for key, text, _ in GPU_KINDS:
        on_gpu, on_host = on_gpus[key], host.get(text.partition(" and their")[0])
        host_bytes = int(plan.notes.get(on_host, 0)) if on_host else 0
        if on_gpu or host_bytes:
            table.add_row(text, _bytes(on_gpu), _bytes(host_bytes))
        host.pop(text.partition(" and their")[0], None)
    if margin:
        table.add_row(MARGIN_TEXT, _bytes(margin), "-")
    for text, key in host.items():  # what only the host has
        if plan.notes.get(key):
            table.add_row(text, "-", _bytes(int(plan.notes[key])))
    table.add_section()
    peak = int(plan.notes.get("gpu_bytes", 0)) if forecast is None else forecast.peak_gpu_bytes
    table.add_row("at the highest moment", _bytes(peak), _bytes(int(plan.notes.get("host_bytes", 0))))
    table.add_row("limit", _bytes(found.machine.budget.gpu_bytes or 0), _bytes(found.machine.budget.cpu_bytes or 0))
    notes = []
    # Without a forecast: gradients come while activations go, so the highest of all kinds are more than there ever is.
    if peak < sum(plan.gpu_kinds.values()):
        notes.append("each kind at its own highest moment")
    on_nvme = int(plan.notes.get("nvme_bytes", 0))
    if on_nvme:
        notes.append(f"and {format_bytes(on_nvme)} on NVMe")
    table.caption = "; ".join(notes) or None
    return table


def _times(found: Found) -> Table:
    times = found.timeline.times
    table = _table("One step", "", "time", "share")
    parts = (
        ("forward and backward", times.compute_s),
        ("waiting for updates", times.update_waiting_s),
        ("waiting for chunks or gradient blocks", times.chunk_waiting_s),
        ("between backward and the next forward", times.step_s),
    )
    for what, seconds in parts:
        table.add_row(what, format_seconds(seconds), f"{seconds / found.step_s:.0%}" if found.step_s else "")
    table.add_section()
    table.add_row("together", format_seconds(found.step_s), "")
    beside = (
        ("bus to the GPU", times.h2d_s),
        ("bus from the GPU", times.d2h_s),
        ("between ranks", times.collective_s),
        ("updates, wherever they run, added up", times.adam_s),
        ("NVMe, states read and written", times.nvme_s),
    )
    table.add_section()
    for what, seconds in beside:
        if seconds:
            table.add_row(f"[dim]busy: {what}[/]", f"[dim]{format_seconds(seconds)}[/]", "")
    return table


def _alternatives(plan: Plan) -> Table:
    forecast = plan.forecast
    table = _table("What else was looked at", "placement", "one step", "why not")
    table.columns[1].no_wrap = True
    table.columns[2].justify = "left"
    table.show_lines = True
    others = forecast.alternatives if forecast else ()
    fitting = [other for other in others if other.total_s is not None][:NUM_ALTERNATIVES]
    for other in [*fitting, *(other for other in others if other.total_s is None)]:
        seconds = "does not fit" if other.total_s is None else format_seconds(other.total_s)
        table.add_row(escape(other.description), seconds, escape(other.reason))
    return table


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 else "right", overflow="fold")
    return table


def _bytes(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"
