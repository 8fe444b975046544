"""The whole report: one HTML file without scripts and without anything from elsewhere."""

from __future__ import annotations

import statistics

from lightning_elixir.plan.activations import blocks_by_fate
from lightning_elixir.plan.describe import (
    describe_dating,
    describe_disk,
    describe_fetching,
    describe_foreseen,
    describe_ignored,
    describe_spending,
    describe_updates,
    describe_weighing,
)
from lightning_elixir.plan.sharding import sharding_note
from lightning_elixir.plan.simulator.timeline import is_time_known
from lightning_elixir.plan.units import format_bytes
from lightning_elixir.plan.weighing import weighing_lines
from lightning_elixir.report.chunk_picture import chunk_picture
from lightning_elixir.report.data import ReportData
from lightning_elixir.report.markup import Markup, element, format_amount, format_seconds, joined
from lightning_elixir.report.memory_picture import memory_picture
from lightning_elixir.report.parts import hatch
from lightning_elixir.report.style import STYLE
from lightning_elixir.report.tables import (
    alternatives_table,
    comparison_table,
    counters_table,
    difference,
    machine_table,
    memory_tables,
    step_table,
    table,
)
from lightning_elixir.report.timeline_picture import timeline_picture


def render_report(data: ReportData) -> str:
    """The report as one self-contained HTML file.

    Args:
        data: What is known; sections without data are left out.
    """
    head = element(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", f"{data.title}: lightning_elixir"),
        Markup(f"<style>{STYLE}</style>"),
    )
    sections = [
        element("h1", data.title),
        element("p", _subtitle(data), class_="soft"),
        _cards(data),
        _binding(data),
        _sharding(data),
        _weighing(data),
        *(element("p", f"Assumed: {remark}", class_="soft") for remark in data.remarks),
        _not_predicted(data),
        *_pictures(data),
        *_figures(data),
        element("footer", f"Plan {data.plan.fingerprint()[:12]}, drawn by lightning_elixir."),
    ]
    body = element("body", hatch(), joined(sections))
    return "<!doctype html>\n" + element("html", head, body, lang="en") + "\n"


def _subtitle(data: ReportData) -> str:
    plan = data.plan
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    facts = [f"{what}: {value}" for what, value in data.facts]
    return "; ".join([*facts, ranks, f"policy {plan.policy}", f"computes in {plan.compute_dtype}"])


# The cards


def _cards(data: ReportData) -> Markup:
    plan, forecast = data.plan, data.plan.forecast
    cards = [_fits_card(data), _time_card(data), _rate_card(data)]
    if forecast is not None:
        real = data.measured
        cards.append(
            _memory_card(
                f"{data.device_word} memory, highest moment",
                forecast.allocated_bytes if real else forecast.peak_gpu_bytes,
                forecast.gpu_limit_bytes,
                real.peak_gpu_bytes if real else None,
            )
        )
        cards.append(
            _memory_card(
                "host memory of a rank",
                forecast.host_bytes,
                forecast.host_limit_bytes,
                real.host_bytes if real else None,
            )
        )
    persistent = sum(c.is_persistent for c in plan.chunks)
    cards.append(
        _card(
            "chunks",
            str(len(plan.chunks)),
            f"{persistent} always there; rCache of {plan.rcache_blocks} blocks of {format_bytes(plan.block_bytes)};"
            f" {describe_fetching(plan.rcache_blocks, plan.prefetch_depth)}",
        )
    )
    return element("dl", *(card for card in cards if card), class_="cards")


def _binding(data: ReportData) -> Markup:
    forecast = data.plan.forecast
    if forecast is None or not forecast.binding:
        return Markup("")
    spending = (
        f"The predicted step takes {format_seconds(forecast.times.total_s)}, {describe_spending(forecast.times)}."
    )
    return element("p", element("b", "The limit: "), f"{forecast.binding}. {spending}", class_="binding")


def _alternatives_note(data: ReportData) -> str:
    when = "" if data.plan.forecast is None else describe_weighing(data.plan.forecast)
    return f"The best of those that lost{f', {when}' if when else ''}."


def _sharding(data: ReportData) -> Markup:
    """Which ranks share chunks; nothing where all share all."""
    note = sharding_note(data.plan)
    return element("p", element("b", "Ranks: "), note) if note else Markup("")


def _weighing(data: ReportData) -> Markup:
    """Which sizes of parallel patterns were chosen, and why; nothing where there was no choice."""
    lines = weighing_lines(data.plan)
    if not lines:
        return Markup("")
    why, *ways = lines
    return element(
        "div",
        element("p", element("b", "Parallel patterns: "), why),
        element("ul", *(element("li", way) for way in ways)),
    )


def _not_predicted(data: ReportData) -> Markup:
    """Why there is no predicted step, where the reason is a disk."""
    if data.timeline is not None or data.hardware is None or is_time_known(data.plan, data.hardware):
        return Markup("")
    return element(
        "p",
        "No step is predicted: it waits for a disk that was not measured. lightning-elixir bench-hardware --nvme-dir"
        " FOLDER --out FILE measures it, and the strategy's option hardware=FILE has the report count with that.",
        class_="soft",
    )


def _card(what: str, value: str, note: str = "", class_: str | None = None) -> Markup:
    small = element("small", note) if note else Markup("")
    return element("div", element("dt", what), element("dd", element("b", value), small), class_=class_)


def _fits_card(data: ReportData) -> Markup:
    forecast, real = data.plan.forecast, data.measured
    if forecast is None or forecast.gpu_limit_bytes is None:
        return Markup("")
    limit = forecast.gpu_limit_bytes
    if real and real.peak_gpu_bytes is not None:
        is_within = real.peak_gpu_bytes <= limit
        return _card("stayed within the limit?", "yes" if is_within else "no", "", "good" if is_within else "bad")
    is_within = forecast.peak_gpu_bytes <= limit
    return _card("does it fit?", "yes" if is_within else "no", "", "good" if is_within else "bad")


def _time_card(data: ReportData) -> Markup:
    predicted_s, real = data.predicted_s, data.measured
    if real and real.step_s:
        median_s = statistics.median(real.step_s)
        note = "" if predicted_s is None else f"predicted {format_seconds(predicted_s)}"
        if note and data.has_nominal_times:
            note += " by nominal figures"
        off = "" if data.has_nominal_times else difference(predicted_s, median_s)
        first = "" if data.plan.forecast is None else describe_foreseen(data.plan.forecast)
        note = f"{note}, measured is {off}" if off else note
        return _card("one step, measured", format_seconds(median_s), f"{note}; {first}" if first else note)
    return _card("one step, predicted", format_seconds(predicted_s)) if predicted_s is not None else Markup("")


def _rate_card(data: ReportData) -> Markup:
    seconds = statistics.median(data.measured.step_s) if data.measured and data.measured.step_s else data.predicted_s
    if not seconds:
        return Markup("")
    rates = [
        (unit, count / seconds) for unit, count in (("tokens", data.num_tokens), ("samples", data.num_samples)) if count
    ]
    if not rates:
        return Markup("")
    (unit, rate), rest = rates[0], rates[1:]
    note = "; ".join(f"{format_amount(r)} {u} a second" for u, r in rest)
    return _card(f"{unit} a second", format_amount(rate), note)


def _memory_card(what: str, predicted: int, limit: int | None, real: int | None) -> Markup:
    value = predicted if real is None else real
    share = f"{value / limit:.0%} of {format_bytes(limit)}" if limit else "no limit given"
    note = share if real is None else f"{share}; predicted {format_bytes(predicted)}"
    return _card(what, format_bytes(value), note)


# The sections


def _section(title: str, *content: Markup, note: str = "") -> Markup:
    if not any(content):
        return Markup("")
    about = element("p", note, class_="soft") if note else Markup("")
    return element("section", element("h2", title), about, *content)


def _pictures(data: ReportData) -> list[Markup]:
    device, timeline = data.device_word, data.timeline
    memory = memory_picture(data, timeline) if timeline else Markup("")
    lanes = timeline_picture(timeline) if timeline else Markup("")
    return [
        _section(
            f"{device[0].upper()}{device[1:]} memory over one step",
            memory,
            note="Predicted, from the beginning of forward to the end of the update"
            + ("; the thin line is what was measured." if data.measured and data.measured.memory else ".")
            + _margin_note(data),
        ),
        _section(
            "Where the chunks live",
            chunk_picture(data.plan, device),
            note="One cell a chunk, in the model's order: parameters above, master and optimizer states below."
            " Point at a cell for its parameters.",
        ),
        _section(
            "What becomes of activations",
            _activations_table(data),
            note="Of what autograd saves inside these blocks, between their forward and their backward. Other choices"
            " are among what else was looked at.",
        ),
        _section(
            "What happens when",
            lanes,
            note="The predicted step, lane by lane, with the share of the step that each is busy."
            + _updates_note(data),
        ),
    ]


def _activations_table(data: ReportData) -> Markup:
    """Empty where a plan says nothing of them."""
    rows = [(what, which, str(number)) for what, number, which in blocks_by_fate(data.plan.activations)]
    return table(("activations", "of", "blocks"), rows, num_text=2) if rows else Markup("")


def _margin_note(data: ReportData) -> str:
    """The plan counts with more than what is drawn."""
    margin = data.plan.forecast.margin_bytes if data.plan.forecast else 0
    if not margin:
        return ""
    return (
        f" The plan counts with {format_bytes(margin)} more than is drawn, for what the allocator cannot use and for"
        " batches that take a little more."
    )


def _updates_note(data: ReportData) -> str:
    updates = describe_updates(data.plan)
    disk = describe_disk(data.plan)
    disk = f" {disk[0].upper()}{disk[1:]}." if disk else ""
    ignored = describe_ignored(data.plan)
    disk += f" {ignored}." if ignored else ""
    return (f" Updates on the host run {updates}." if updates else "") + disk


def _dating(data: ReportData) -> str:
    """When what is predicted was predicted, as a sentence; empty outside of a fit."""
    forecast = data.plan.forecast
    if forecast is None:  # only a report predicts the steps of such a plan
        is_known = data.measured is not None and data.times is not None
        return "Predicted when the run was over, by what its steps were seen to take." if is_known else ""
    text = describe_dating(forecast)
    return f"{text[0].upper()}{text[1:]}." if text else ""


_NOMINAL_NOTE = (
    " Seconds are predicted by nominal figures, since this machine was not measured: they order placements, and say"
    " little of how long a step takes. lightning-elixir bench-hardware measures it."
)


def _figures(data: ReportData) -> list[Markup]:
    measured, times = data.measured, data.times
    dating, sections = _dating(data), []
    if measured is not None:
        tables = element(
            "div",
            element("div", comparison_table(data, measured)),
            element("div", counters_table(measured)),
            class_="tables",
        )
        note = f"{dating}{_NOMINAL_NOTE}".strip() if times is not None and data.has_nominal_times else dating
        sections.append(_section("Predicted against measured", tables, note=note))
    if times is not None:
        note = f"Predicted seconds of one step. {dating}".rstrip()
        sections.append(_section("Where the time goes", step_table(times), note=note))
    is_known = data.plan.forecast is not None and bool(data.plan.forecast.gpu_kinds)
    when = f"On the {data.device_word} at the highest moment of all together, elsewhere each" if is_known else "Each"
    note = f"{when} kind at its own highest moment."
    sections.append(_section("Where the bytes are", memory_tables(data), note=note))
    sections.append(_section("What else was looked at", alternatives_table(data.plan), note=_alternatives_note(data)))
    if data.hardware is not None:
        sections.append(_section("The machine", machine_table(data.hardware)))
    if data.facts:
        sections.append(_section("What was asked", table(("", ""), list(data.facts), num_text=2)))
    return sections
