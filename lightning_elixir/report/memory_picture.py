"""Device memory over one step, by kind, against the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_elixir.plan.simulator.timeline import MemoryPoint, Timeline
from lightning_elixir.plan.units import format_bytes
from lightning_elixir.report.data import ReportData
from lightning_elixir.report.markup import Markup, byte_ticks, element, format_seconds, joined, time_ticks
from lightning_elixir.report.parts import legend, swatch
from lightning_elixir.report.phases import phases

WIDTH, HEIGHT = 1120.0, 350.0
LEFT, RIGHT, TOP, BOTTOM = 74.0, 16.0, 58.0, 34.0

KINDS = (
    ("resident_bytes", "stays there (parameters, shards, states)", "blue"),
    ("rcache_bytes", "rCache (replicas)", "cyan"),
    ("non_model_bytes", "activations and other data", "green"),
    ("grad_bytes", "gradients", "yellow"),
)
"""Field of `MemoryPoint`, what it is, and its colour; from the bottom up."""

MAX_COLUMNS = 500
"""More points than this are thinned out; the highest of each column stays."""

FAR_LIMIT = 5.0
"""A limit this many times above the peak would flatten the picture: it is named instead of drawn."""


@dataclass(frozen=True)
class _Scale:
    """Seconds and bytes to coordinates."""

    end_s: float
    top_bytes: float

    def x(self, at_s: float) -> float:
        return LEFT + at_s / self.end_s * (WIDTH - LEFT - RIGHT)

    def y(self, nbytes: float) -> float:
        return HEIGHT - BOTTOM - nbytes / self.top_bytes * (HEIGHT - TOP - BOTTOM)


def memory_picture(data: ReportData, timeline: Timeline) -> Markup:
    """The picture with its legend; empty without memory points."""
    points = thinned(timeline.memory, timeline.end_s)
    if not points:
        return Markup("")
    measured = data.measured.memory if data.measured else ()
    peak = max(p.total_bytes for p in points)
    peak = max(peak, max((nbytes for _, nbytes in measured), default=0), 1)
    limit = data.gpu_limit_bytes
    is_limit_drawn = limit is not None and limit <= FAR_LIMIT * peak
    top = max(peak, limit if limit is not None and is_limit_drawn else 0) * 1.02
    end_s = max([timeline.end_s, *(at for at, _ in measured)]) or 1.0
    scale = _Scale(end_s, top)
    items = [(swatch(colour), text) for _, text, colour in KINDS]
    if limit is not None:
        items.append((_line_swatch("limit"), f"limit {format_bytes(limit)}"))
    if measured:
        items.append((_line_swatch("measured"), "measured"))
    content = [
        _grid(scale),
        *_areas(points, scale, timeline.end_s),
        _phase_marks(timeline, scale),
        _measured_line(measured, scale),
        _peak_label(points, scale, limit if is_limit_drawn else None),
    ]
    if limit is not None:
        content.append(_limit_line(limit, scale, is_limit_drawn, _highest(points)))
    return joined([legend(items), _svg(content)])


def thinned(points: Sequence[MemoryPoint], end_s: float) -> list[MemoryPoint]:
    """At most `MAX_COLUMNS` points: of each slice of time the one with the most bytes, at the slice's first moment."""
    if len(points) <= MAX_COLUMNS:
        return list(points)
    kept: dict[int, MemoryPoint] = {}
    for point in points:
        column = min(int(point.at_s / (end_s or 1.0) * MAX_COLUMNS), MAX_COLUMNS)
        other = kept.get(column)
        if other is None:
            kept[column] = point
        elif point.total_bytes > other.total_bytes:
            kept[column] = MemoryPoint(
                other.at_s, point.resident_bytes, point.rcache_bytes, point.grad_bytes, point.non_model_bytes
            )
    return list(kept.values())


def _svg(content: Sequence[Markup]) -> Markup:
    svg = element(
        "svg",
        *content,
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        role="img",
        aria_label="Memory of the compute device over one step",
        class_="memory",
    )
    return element("div", svg, class_="picture")


def _grid(scale: _Scale) -> Markup:
    lines = []
    for nbytes, label in byte_ticks(int(scale.top_bytes)):
        y = scale.y(nbytes)
        lines.append(element("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
        lines.append(element("text", label, class_="soft", x=LEFT - 8, y=y + 4, text_anchor="end"))
    bottom = HEIGHT - BOTTOM
    for at_s, label in time_ticks(scale.end_s):
        x = scale.x(at_s)
        lines.append(element("line", class_="axis", x1=x, x2=x, y1=bottom, y2=bottom + 4))
        anchor = "end" if x > WIDTH - RIGHT - 20 else "middle"
        lines.append(element("text", label, class_="soft", x=x, y=bottom + 18, text_anchor=anchor))
    return joined(lines)


def _areas(points: Sequence[MemoryPoint], scale: _Scale, end_s: float) -> list[Markup]:
    """One path a kind; every point holds until the next one."""
    floor = [0] * len(points)
    areas = []
    for field, text, colour in KINDS:
        values = [int(getattr(p, field)) for p in points]
        ceiling = [low + value for low, value in zip(floor, values, strict=True)]
        if any(values):
            upper = _steps(points, ceiling, scale, end_s)
            lower = _steps(points, floor, scale, end_s)[::-1]
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in upper + lower) + "Z"
            title = element("title", f"{text}: up to {format_bytes(max(values))}")
            areas.append(element("path", title, class_=f"{colour} edge", d=path))
        floor = ceiling
    return areas


def _steps(
    points: Sequence[MemoryPoint], values: Sequence[int], scale: _Scale, end_s: float
) -> list[tuple[float, float]]:
    ends = [p.at_s for p in points[1:]] + [max(end_s, points[-1].at_s)]
    corners: list[tuple[float, float]] = []
    for point, value, until in zip(points, values, ends, strict=True):
        y = scale.y(value)
        corners += [(scale.x(point.at_s), y), (scale.x(until), y)]
    return corners


def _phase_marks(timeline: Timeline, scale: _Scale) -> Markup:
    marks = []
    for phase in phases(timeline):
        x, until = scale.x(phase.start_s), scale.x(phase.end_s)
        marks.append(element("line", class_="axis", x1=x, x2=x, y1=4, y2=HEIGHT - BOTTOM))
        if until - x > 7.0 * len(phase.name) + 6:
            marks.append(element("text", phase.name, class_="soft", x=x + 5, y=14))
    return joined(marks)


def _limit_line(limit: int, scale: _Scale, is_drawn: bool, peak: MemoryPoint) -> Markup:
    is_peak_left = scale.x(peak.at_s) < WIDTH / 2
    x, anchor = (WIDTH - RIGHT - 4, "end") if is_peak_left else (LEFT + 4, "start")
    if not is_drawn:
        label = f"limit {format_bytes(limit)}, far above this picture"
        return element("text", label, class_="alarm halo", x=x, y=34, text_anchor=anchor)
    y = scale.y(limit)
    label = element("text", f"limit {format_bytes(limit)}", class_="alarm halo", x=x, y=y - 6, text_anchor=anchor)
    line = element("line", class_="limit", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, data_bytes=limit)
    return joined([line, label])


def _highest(points: Sequence[MemoryPoint]) -> MemoryPoint:
    return max(points, key=lambda p: p.total_bytes)


def _peak_label(points: Sequence[MemoryPoint], scale: _Scale, limit: int | None) -> Markup:
    peak = _highest(points)
    x, y = scale.x(peak.at_s), scale.y(peak.total_bytes)
    text_y = y - 8
    if limit is not None and abs(scale.y(limit) - text_y) < 20:  # not on the line, nor on its label
        text_y = min(scale.y(limit), y) - 6
    anchor = "start" if x < WIDTH / 2 else "end"
    return joined(
        [
            element("circle", class_="dot", cx=x, cy=y, r=3.5),
            element(
                "text",
                f"highest: {format_bytes(peak.total_bytes)} at {format_seconds(peak.at_s)}",
                class_="halo",
                x=x,
                y=text_y,
                text_anchor=anchor,
            ),
        ]
    )


def _measured_line(measured: Sequence[tuple[float, int]], scale: _Scale) -> Markup:
    if not measured:
        return Markup("")
    kept: dict[int, tuple[float, int]] = {}
    for at_s, nbytes in measured:
        column = int(at_s / scale.end_s * MAX_COLUMNS)
        if column not in kept or nbytes > kept[column][1]:
            kept[column] = (at_s, nbytes)
    corners = [(scale.x(at_s), scale.y(nbytes)) for at_s, nbytes in kept.values()]
    line = element("polyline", class_="measured", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in corners))
    dots = [element("circle", class_="dot", cx=x, cy=y, r=2.0) for x, y in corners] if len(corners) <= 120 else []
    return joined([line, *dots])


def _line_swatch(class_: str) -> Markup:
    line = element("line", class_=class_, x1=0, x2=14, y1=7, y2=7)
    return element("svg", line, class_="swatch", viewBox="0 0 14 14", aria_hidden="true")
