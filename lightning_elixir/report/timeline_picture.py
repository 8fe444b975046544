"""What every lane does over one predicted step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_elixir.plan.simulator.timeline import Span, Timeline
from lightning_elixir.report.markup import Markup, element, format_seconds, joined, time_ticks
from lightning_elixir.report.parts import legend, swatch
from lightning_elixir.report.phases import phases

WIDTH = 1120.0
LEFT, RIGHT, TOP, BOTTOM = 112.0, 52.0, 26.0, 30.0
LANE_HEIGHT, LANE_GAP = 30.0, 9.0

LANES = (
    ("compute", "compute"),
    ("h2d", "host to device"),
    ("d2h", "device to host"),
    ("collective", "between ranks"),
    ("cpu", "host's cores"),
    ("nvme", "NVMe"),
)

KINDS = (
    ("compute", "blue", "on-dark", "forward and backward"),
    ("forward", "blue", "on-dark", "forward"),
    ("backward", "green", "on-dark", "backward"),
    ("wait", "hatched", "", "waiting"),
    ("fetch", "cyan", "on-light", "fetch a chunk"),
    ("gather", "sand", "on-light", "gather a chunk"),
    ("reduce", "yellow", "on-light", "gradients, reduced or on their way"),
    ("gradients", "yellow", "on-light", "gradients, reduced or on their way"),
    ("update", "purple", "on-dark", "update"),
    ("activations", "green", "on-dark", "activations to and from the host"),
    ("read", "cyan", "on-light", "states read from NVMe"),
    ("store", "sand", "on-light", "states written to NVMe"),
    ("write", "grey", "on-light", "write back new values"),
    ("other", "grey", "on-light", "other"),
)
"""Kind of a span, its colour, the text on it, and what it is."""

MAX_RECTANGLES = 700
"""In one lane; more are drawn column by column."""

_STYLE = {kind: (colour, text_class) for kind, colour, text_class, _ in KINDS}


@dataclass
class Bar:
    """One rectangle: a span, or neighbours of one kind that are too narrow to tell apart."""

    kind: str
    start_s: float
    end_s: float
    first: str
    last: str
    busy_s: float


def kind_of(label: str) -> str:
    """The kind that a span's label names: its first word where that is known."""
    word = label.partition(" ")[0].rstrip(",:")
    if word == "chunk":
        return "compute"
    return word if word in _STYLE else "other"


def timeline_picture(timeline: Timeline) -> Markup:
    """The lanes with their legend; empty without spans."""
    lanes = [(key, name, [s for s in timeline.spans if s.lane == key]) for key, name in LANES]
    lanes = [lane for lane in lanes if lane[2]]
    end_s = max([timeline.end_s, *(s.end_s for _, _, spans in lanes for s in spans)], default=0.0)
    if not lanes or end_s <= 0:
        return Markup("")
    height = TOP + len(lanes) * (LANE_HEIGHT + LANE_GAP) + BOTTOM
    drawn = [_axis(timeline, end_s, height)]
    seen: set[str] = set()
    for index, (_, name, spans) in enumerate(lanes):
        y = TOP + index * (LANE_HEIGHT + LANE_GAP)
        bars = lane_bars(spans, end_s)
        seen |= {bar.kind for bar in bars}
        busy = sum(s.end_s - s.start_s for s in spans if kind_of(s.label) != "wait") / end_s
        drawn += [
            element("text", name, x=LEFT - 10, y=y + LANE_HEIGHT / 2 + 4, text_anchor="end"),
            element("text", f"{busy:.0%}", class_="soft", x=WIDTH - 4, y=y + LANE_HEIGHT / 2 + 4, text_anchor="end"),
            *(_bar(bar, y, end_s) for bar in bars),
        ]
    items = {text: swatch(colour) for kind, colour, _, text in KINDS if kind in seen}
    svg = element(
        "svg",
        *drawn,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_label="Lanes over one step",
        class_="timeline",
    )
    return joined([legend([(mark, text) for text, mark in items.items()]), element("div", svg, class_="picture")])


def lane_bars(spans: Sequence[Span], end_s: float) -> list[Bar]:
    """The rectangles of one lane, at most `MAX_RECTANGLES` or one a column, in order of time."""
    pixel_s = end_s / (WIDTH - LEFT - RIGHT)
    bars: list[Bar] = []
    for span in sorted(spans, key=lambda s: s.start_s):
        kind = kind_of(span.label)
        last = bars[-1] if bars else None
        is_narrow = span.end_s - span.start_s < 3 * pixel_s
        if last and last.kind == kind and is_narrow and span.start_s - last.end_s < 0.5 * pixel_s:
            last.end_s = max(last.end_s, span.end_s)
            last.last = span.label
            last.busy_s += span.end_s - span.start_s
        else:
            bars.append(Bar(kind, span.start_s, span.end_s, span.label, span.label, span.end_s - span.start_s))
    return bars if len(bars) <= MAX_RECTANGLES else _by_column(bars, end_s)


def _by_column(bars: Sequence[Bar], end_s: float) -> list[Bar]:
    """Each column in the kind that takes most of it, columns that are mostly idle left out, equal ones joined."""
    column_s = end_s / MAX_RECTANGLES
    shares: list[dict[str, float]] = [{} for _ in range(MAX_RECTANGLES)]
    labels: list[list[str]] = [[] for _ in range(MAX_RECTANGLES)]
    for bar in bars:
        first = min(int(bar.start_s / column_s), MAX_RECTANGLES - 1)
        for column in range(first, min(int(bar.end_s / column_s), MAX_RECTANGLES - 1) + 1):
            inside = min(bar.end_s, (column + 1) * column_s) - max(bar.start_s, column * column_s)
            if inside > 0:
                shares[column][bar.kind] = shares[column].get(bar.kind, 0.0) + inside
                labels[column] += [bar.first, bar.last]
    joined_bars: list[Bar] = []
    for column, share in enumerate(shares):
        if sum(share.values()) < column_s / 2:
            continue
        kind = max(share, key=lambda k: share[k])
        start_s, until_s = column * column_s, (column + 1) * column_s
        last = joined_bars[-1] if joined_bars else None
        own = [label for label in labels[column] if kind_of(label) == kind]
        if last and last.kind == kind and start_s - last.end_s < column_s / 2:
            last.end_s, last.last = until_s, own[-1]
            last.busy_s += share[kind]
        else:
            joined_bars.append(Bar(kind, start_s, until_s, own[0], own[-1], share[kind]))
    return joined_bars


def _bar(bar: Bar, y: float, end_s: float) -> Markup:
    scale = (WIDTH - LEFT - RIGHT) / end_s
    x, width = LEFT + bar.start_s * scale, max((bar.end_s - bar.start_s) * scale, 0.4)
    colour, text_class = _STYLE[bar.kind]
    name = bar.first if bar.first == bar.last else f"{bar.first} to {bar.last}"
    title = element("title", f"{name}: {format_seconds(bar.busy_s)} from {format_seconds(bar.start_s)}")
    edge = " edge" if width > 3 else ""
    rectangle = element("rect", title, class_=colour + edge, x=x, y=y, width=width, height=LANE_HEIGHT)
    shown = bar.first.partition(" ")[2].removeprefix("back ").removeprefix("chunk ") or bar.first
    if bar.first != bar.last or not text_class or width < 7.5 * len(shown) + 8:
        return rectangle
    middle = element("text", shown, class_=text_class, x=x + width / 2, y=y + LANE_HEIGHT / 2 + 4, text_anchor="middle")
    return joined([rectangle, middle])


def _axis(timeline: Timeline, end_s: float, height: float) -> Markup:
    scale = (WIDTH - LEFT - RIGHT) / end_s
    bottom = height - BOTTOM
    drawn = []
    for at_s, label in time_ticks(end_s):
        x = LEFT + at_s * scale
        drawn.append(element("line", class_="grid", x1=x, x2=x, y1=TOP, y2=bottom))
        drawn.append(element("text", label, class_="soft", x=x, y=bottom + 16, text_anchor="middle"))
    for phase in phases(timeline):
        x, until = LEFT + phase.start_s * scale, LEFT + phase.end_s * scale
        drawn.append(element("line", class_="axis", x1=x, x2=x, y1=4, y2=bottom))
        if until - x > 7.0 * len(phase.name) + 6:
            drawn.append(element("text", phase.name, class_="soft", x=x + 5, y=16))
    drawn.append(element("text", "busy", class_="soft", x=WIDTH - 4, y=16, text_anchor="end"))
    return joined(drawn)
