"""The report's figures as bars and tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lightning_elixir.plan.describe import when_foreseen
from lightning_elixir.plan.explain import MARGIN_TEXT
from lightning_elixir.plan.hardware import HardwareSpec, hardware_table
from lightning_elixir.plan.types import Plan, StepTimes
from lightning_elixir.plan.units import format_bytes
from lightning_elixir.report.data import Measured, ReportData
from lightning_elixir.report.markup import Markup, element, format_amount, format_seconds
from lightning_elixir.report.parts import swatch

GPU_KINDS = (
    ("gpu_param_bytes", "parameters", "blue"),
    ("gpu_state_bytes", "master and optimizer states", "purple"),
    ("gpu_grad_bytes", "gradients and their blocks", "yellow"),
    ("rcache_bytes", "rCache", "cyan"),
    ("gpu_stream_bytes", "buffers of updates", "sand"),
    ("non_model_bytes", "activations and other data", "green"),
)
HOST_KINDS = (
    ("host_param_bytes", "parameters", "blue"),
    ("host_state_bytes", "master and optimizer states", "purple"),
    ("host_spare_bytes", "spare master and states", "sand"),
    ("host_grad_bytes", "gradients", "yellow"),
    ("host_buffer_bytes", "buffers for states on NVMe", "cyan"),
    ("host_activation_bytes", "activations", "green"),
)
BAR_WIDTH, BAR_HEIGHT = 1120.0, 26.0

Row = tuple[str | Markup, ...]


def table(heads: Sequence[str], rows: Sequence[Row], *, num_text: int = 1, sums_from: int | None = None) -> Markup:
    """A table whose first `num_text` columns are text and the others numbers.

    Args:
        heads: Column titles.
        rows: Cells.
        num_text: Leading columns that are aligned left.
        sums_from: Rows from this one on sum up the others.
    """

    def row(cells: Row, tag: str, class_: str | None = None) -> Markup:
        drawn = (element(tag, cell, class_="num" if i >= num_text else None) for i, cell in enumerate(cells))
        return element("tr", *drawn, class_=class_)

    body = [
        row(cells, "td", "sum" if sums_from is not None and i >= sums_from else None) for i, cells in enumerate(rows)
    ]
    return element("table", element("thead", row(tuple(heads), "th")), element("tbody", *body))


def memory_tables(data: ReportData) -> Markup:
    """Bytes by kind as bars against the limits, and as numbers."""
    notes, forecast = {**data.plan.notes, **data.plan.gpu_kinds_beside_margin}, data.plan.forecast
    device = f"each {data.device_word}"
    places = [
        (
            device,
            GPU_KINDS,
            forecast.gpu_limit_bytes if forecast else None,
            forecast.peak_gpu_bytes if forecast else None,
        ),
        ("host, for each rank", HOST_KINDS, forecast.host_limit_bytes if forecast else None, None),
        ("NVMe, for each rank", (("nvme_bytes", "states, parameters and gradients", "purple"),), None, None),
    ]
    drawn = []
    for place, kinds, limit, highest in places:
        margin = forecast.margin_bytes if forecast and place == device else 0
        amounts = [(text, colour, int(notes.get(key, 0))) for key, text, colour in kinds]
        if margin:
            amounts.append((MARGIN_TEXT, "grey", margin))
        total = sum(nbytes for *_, nbytes in amounts)
        if not total and place != device:
            continue
        rows: list[Row] = [
            (element("span", swatch(colour), text, class_="key"), format_bytes(nbytes), _percent(nbytes, total))
            for text, colour, nbytes in amounts
        ]
        # Without a forecast not all kinds are at their highest together, and their sum may be above the limit.
        what, nbytes = ("together", total) if highest is None else ("at the highest moment", highest)
        rows.append((what, format_bytes(nbytes), _percent(nbytes, limit, " of the limit")))
        bar = stacked_bar([(text, colour, float(nbytes)) for text, colour, nbytes in amounts], limit, format_bytes_of)
        drawn.append(
            element("div", element("h3", place), bar, table(("", "bytes", "share"), rows, sums_from=len(amounts)))
        )
    return element("div", *drawn, class_="tables")


def stacked_bar(
    amounts: Sequence[tuple[str, str, float]], limit: float | None, shown: object = format_seconds
) -> Markup:
    """Amounts side by side, and what is left up to the limit.

    Args:
        amounts: (what, colour, amount).
        limit: Where the bar ends; None: with the amounts.
        shown: Formats an amount.
    """
    write = shown if callable(shown) else str
    total = sum(amount for *_, amount in amounts)
    end = max(total, limit or 0.0) or 1.0
    x, parts = 0.0, []
    for text, colour, amount in amounts:
        if amount <= 0:
            continue
        width = amount / end * BAR_WIDTH
        title = element("title", f"{text}: {write(amount)}")
        parts.append(element("rect", title, class_=f"{colour} edge", x=x, y=0, width=width, height=BAR_HEIGHT))
        x += width
    if limit is not None and limit > total:
        title = element("title", f"free: {write(limit - total)}")
        parts.append(element("rect", title, class_="free", x=x, y=0.5, width=BAR_WIDTH - x, height=BAR_HEIGHT - 1))
    return element(
        "svg", *parts, viewBox=f"0 0 {BAR_WIDTH:g} {BAR_HEIGHT:g}", class_="bar", preserveAspectRatio="none", role="img"
    )


def format_bytes_of(amount: float) -> str:
    return format_bytes(int(amount))


def step_table(times: StepTimes) -> Markup:
    """How a predicted step is spent: the parts that add up, and what runs beside them."""
    parts = (
        ("forward and backward", "blue", times.compute_s),
        ("waiting for updates", "yellow", times.update_waiting_s),
        ("waiting for chunks or gradient blocks", "red", times.chunk_waiting_s),
        ("between backward and the next forward", "purple", times.step_s),
    )
    rows: list[Row] = [
        (element("span", swatch(colour), text, class_="key"), format_seconds(s), _percent(s, times.total_s))
        for text, colour, s in parts
    ]
    rows.append(("one step", format_seconds(times.total_s), ""))
    beside = (
        ("bus to the device", times.h2d_s),
        ("bus from the device", times.d2h_s),
        ("between ranks", times.collective_s),
        ("updates, wherever they run, added up", times.adam_s),
        ("NVMe, states read and written", times.nvme_s),
    )
    busy: list[Row] = [(text, format_seconds(s), _percent(s, times.total_s)) for text, s in beside if s > 0]
    first = element(
        "div",
        element("h3", "one after the other"),
        stacked_bar(parts, None),
        table(("", "time", "share"), rows, sums_from=len(parts)),
    )
    second = element("div", element("h3", "beside it, overlapping"), table(("busy", "time", "of the step"), busy))
    return element("div", first, second if busy else Markup(""), class_="tables")


def alternatives_table(plan: Plan) -> Markup:
    """The runners-up and why they lost."""
    forecast = plan.forecast
    if forecast is None or not forecast.alternatives:
        return Markup("")
    best_s = forecast.compared_s
    rows: list[Row] = []
    for other in forecast.alternatives:
        time = "does not fit" if other.total_s is None else format_seconds(other.total_s)
        slower = difference(best_s, other.total_s)
        rows.append((other.description, other.reason, time, slower))
    return table(("placement", "why not", "one step", "against this plan"), rows, num_text=2)


def comparison_table(data: ReportData, measured: Measured) -> Markup:
    """Predicted against measured, with the difference; with none between seconds by nominal figures and real ones."""
    forecast, rows, times = data.plan.forecast, list[Row](), data.times
    median_s = statistics.median(measured.step_s) if measured.step_s else None
    peak = data.timeline.peak_gpu_bytes if data.timeline else None
    peak = forecast.allocated_bytes if forecast else peak
    host = forecast.host_bytes if forecast else None
    for what, predicted, real in (
        (f"{data.device_word} memory, highest moment", peak, measured.peak_gpu_bytes),
        ("host memory of a rank", host, measured.host_bytes),
    ):
        if predicted is not None or real is not None:
            shown = tuple("" if value is None else format_bytes(value) for value in (predicted, real))
            rows.append((what, *shown, difference(predicted, real)))
    first = []
    if forecast is not None and forecast.foreseen_s is not None:
        first = [(f"one step, {when_foreseen(forecast)}", False, forecast.foreseen_s, median_s)]
    for what, is_part, seconds, real_s in (
        ("one step, median", False, times.total_s if times else None, median_s),
        *first,
        ("forward and backward, without waiting", False, times.compute_s if times else None, measured.compute_s),
        ("waiting in them", True, times.waiting_s if times else None, measured.waiting_s),
        ("updates by the host's cores", True, data.host_update_s, measured.host_update_s),
        ("from the step's call to the last update's end", True, None, measured.update_s),
    ):
        if real_s is not None and (seconds or real_s):
            off = difference_in_step(seconds, real_s, median_s) if is_part else difference(seconds, real_s)
            off = "" if data.has_nominal_times else off
            rows.append((what, "" if seconds is None else format_seconds(seconds), format_seconds(real_s), off))
    return table(("", "predicted", "measured", "measured is"), rows)


def difference(predicted: float | None, real: float | None) -> str:
    """How much more (+) or less was measured than predicted."""
    if predicted is None or real is None or predicted == 0:
        return ""
    return _signed_percent(real / predicted - 1)


def _signed_percent(part: float) -> str:
    return f"{round(part * 100, 1) + 0.0:+.1f}%"  # what is added leaves no "-0.0"


def difference_in_step(predicted: float | None, real: float, step_s: float | None) -> str:
    """The same for a part of a step, which may be next to nothing: in parts of the measured step."""
    if predicted is None or not step_s:
        return ""
    return f"{_signed_percent((real - predicted) / step_s)} of a step"


def counters_table(measured: Measured) -> Markup:
    rows: list[Row] = []
    if measured.step_s:
        slow, fast = max(measured.step_s), min(measured.step_s)
        rows.append((f"{len(measured.step_s)} steps", f"{format_seconds(fast)} to {format_seconds(slow)}"))
    for name, value in measured.counters.items():
        is_bytes = "bytes" in name and isinstance(value, int)
        rows.append((name.replace("_", " "), format_bytes(int(value)) if is_bytes else format_amount(value)))
    return table(("of the run", ""), rows) if rows else Markup("")


def machine_table(spec: HardwareSpec) -> Markup:
    """The figures that the prediction rests on."""
    return table(("", ""), list(hardware_table(spec)), num_text=2)


def _percent(part: float, whole: float | None, suffix: str = "") -> str:
    return f"{part / whole:.0%}{suffix}" if whole else ""
