"""The report is one well-formed page whose pictures say what the data says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_elixir.plan.device_words import DeviceWords
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.io import load_plan
from lightning_elixir.plan.sharding import NOTE
from lightning_elixir.plan.simulator.timeline import MemoryPoint, Span, Timeline
from lightning_elixir.plan.types import (
    GPU_BYTE_KINDS,
    Alternative,
    ChunkSpec,
    Forecast,
    Member,
    Plan,
    StepTimes,
    Tier,
    UpdateTiming,
)
from lightning_elixir.report import Measured, ReportData, render_report
from lightning_elixir.report.markup import byte_ticks, element, format_count, format_seconds, time_ticks
from lightning_elixir.report.memory_picture import KINDS, thinned
from lightning_elixir.report.phases import phases
from lightning_elixir.report.timeline_picture import MAX_RECTANGLES, lane_bars
from lightning_elixir.strategy.run_report import RunReport

ROOT = Path(__file__).parents[1]
GIB = 2**30
VOID = {"meta", "rect", "line", "path", "circle", "polyline"}


@dataclass
class Node:
    """An element of the page."""

    tag: str
    attributes: dict[str, str]
    children: list[Node] = field(default_factory=list)
    text: str = ""

    def all(self, tag: str, class_: str = "") -> Iterator[Node]:
        for child in self.children:
            if child.tag == tag and class_ in child.attributes.get("class", "").split(" ") + [""]:
                yield child
            yield from child.all(tag, class_)

    def number(self, name: str) -> float:
        return float(self.attributes[name])

    @property
    def whole_text(self) -> str:
        return self.text + "".join(child.whole_text for child in self.children)


class Tree(HTMLParser):
    """Builds `Node`s, and fails on elements that are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.root = Node("", {})
        self.open = [self.root]
        self.feed(page)
        self.close()
        assert self.open == [self.root], f"not closed: {[node.tag for node in self.open[1:]]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(node)
        if tag not in ("meta",):
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Node(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].text += data


def parsed(page: str) -> Node:
    return Tree(page).root


def make_chunk(index: int, **changes: object) -> ChunkSpec:
    members = (Member(f"layers.{index}.weight", (1024, 1024), 0),)
    chunk = ChunkSpec(index, "bfloat16", True, 2**20, members, Tier.CPU, Tier.CPU, False)
    return replace(chunk, **changes)  # type: ignore[arg-type]


def make_data(
    num_chunks: int = 5, *, limit: int | None = 24 * GIB, num_spans: int = 6, **changes: object
) -> ReportData:
    """A step of 4 s: forward to 1 s, backward to 3 s, update to 4 s; memory up to 20 GiB."""
    times = StepTimes(4.0, 2.5, 1.0, 0.5, 0.0, 0.75, 0.5, 1.0)
    alternatives = (
        Alternative("everything on the GPU", None, "31.0 GiB too many"),
        Alternative("slower", 5.0, "waits"),
    )
    forecast = Forecast(times, 20 * GIB, limit, 60 * GIB, 64 * GIB, "the GPU's memory", "made up", alternatives)
    width = 3.0 / num_spans
    spans = [
        Span("compute", i * width, (i + 1) * width, f"{'forward' if i < num_spans / 3 else 'backward'} chunk {i}")
        for i in range(num_spans)
    ]
    spans += [Span("h2d", 0.0, 0.5, "fetch 1"), Span("compute", 1.0, 1.5, "wait for chunk 1")]
    spans += [Span("cpu", 3.0, 4.0, "update 0")]
    memory = (
        MemoryPoint(0.0, 4 * GIB, 2 * GIB, 0, 1 * GIB),
        MemoryPoint(1.0, 4 * GIB, 2 * GIB, 1 * GIB, 13 * GIB),
        MemoryPoint(3.0, 4 * GIB, 0, 2 * GIB, 0),
    )
    notes: dict[str, float | int | str] = {
        "gpu_param_bytes": 3 * GIB,
        "gpu_state_bytes": 1 * GIB,
        "gpu_grad_bytes": 2 * GIB,
        "rcache_bytes": 2 * GIB,
        "non_model_bytes": 13 * GIB,
        "host_param_bytes": 10 * GIB,
        "host_state_bytes": 45 * GIB,
        "host_grad_bytes": 5 * GIB,
    }
    chunks = tuple(make_chunk(i) for i in range(num_chunks))
    plan = Plan(1, "bfloat16", 2**21, 3, 2, chunks, policy="auto", notes=notes, forecast=forecast)
    timeline = Timeline(times, 20 * GIB, 3.0, tuple(spans), memory)
    machine = replace(HardwareSpec.nominal(80 * GIB, 64 * GIB), name="a machine")
    data = ReportData("a model", plan, machine, timeline)
    return replace(data, **changes)  # type: ignore[arg-type]


def picture(page: str, name: str) -> Node:
    return next(parsed(page).all("svg", name))


@pytest.mark.parametrize("num_chunks", [1, 5, 300])
def test_page_is_whole_and_needs_nothing_else(num_chunks: int) -> None:
    measured = Measured(
        19 * GIB, 60 * GIB, (4.1, 4.2, 4.3), 2.4, 0.6, 1.1, 0.8, {"fetches": 12}, ((0.0, GIB), (4.2, GIB))
    )
    page = render_report(make_data(num_chunks, measured=measured))
    root = parsed(page)
    assert [node.tag for node in root.children] == ["html"]
    for node in root.all("html"):
        assert list(node.all("script")) + list(node.all("link")) + list(node.all("img")) == []
    assert re.findall(r"https?:|//\w|@import|src=", page) == []
    assert [match for match in re.findall(r"url\(([^)]*)\)", page) if not match.startswith("#")] == []
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_pages_without_a_forecast_timeline_or_measurements_are_whole() -> None:
    data = make_data()
    bare = replace(data.plan, forecast=None, notes={})
    for changed in (replace(data, timeline=None), replace(data, plan=bare), ReportData("x", bare, None, None)):
        root = parsed(render_report(changed))
        assert len(list(next(root.all("svg", "chunks")).all("g", "chunk"))) == 5


def test_text_from_outside_is_escaped() -> None:
    nasty = "<b>&\"'</b>"
    chunk = make_chunk(0, members=(Member(nasty, (2**20,), 0),))
    data = make_data(title=nasty, facts=((nasty, nasty),), measured=Measured(counters={nasty: 1}))
    forecast = replace(data.plan.forecast, binding=nasty, alternatives=(Alternative(nasty, 1.0, nasty),))  # type: ignore[type-var]
    hardware = replace(HardwareSpec.nominal(), name=nasty, versions={nasty: nasty})
    timeline = replace(data.timeline, spans=(Span("compute", 0.0, 1.0, nasty),))  # type: ignore[type-var]
    plan = replace(data.plan, chunks=(chunk,), forecast=forecast)
    page = render_report(replace(data, plan=plan, hardware=hardware, timeline=timeline))
    assert '<b>&"' not in page
    root = parsed(page)
    assert next(root.all("h1")).text == nasty
    assert any(nasty in title.text for title in root.all("title"))


def test_limit_stands_at_its_height() -> None:
    memory = picture(render_report(make_data()), "memory")
    line = next(memory.all("line", "limit"))
    assert line.attributes["data-bytes"] == str(24 * GIB)
    ticks = {text.text: text.number("y") - 4 for text in memory.all("text", "soft") if text.text.endswith(" GiB")}
    per_gib = (ticks["0 GiB"] - ticks["20 GiB"]) / 20
    assert line.number("y1") == pytest.approx(ticks["0 GiB"] - 24 * per_gib, abs=0.1)
    peak = next(memory.all("circle", "dot"))
    assert peak.number("cy") == pytest.approx(ticks["0 GiB"] - 20 * per_gib, abs=0.1)


def test_limit_far_above_is_named_and_not_drawn() -> None:
    memory = picture(render_report(make_data(limit=500 * GIB)), "memory")
    assert list(memory.all("line", "limit")) == []
    assert any("limit 500.0 GiB" in text.text for text in memory.all("text", "alarm"))


def test_areas_lie_on_each_other_and_reach_the_total() -> None:
    memory = picture(render_report(make_data()), "memory")
    ticks = {text.text: text.number("y") - 4 for text in memory.all("text", "soft") if text.text.endswith(" GiB")}
    per_gib = (ticks["0 GiB"] - ticks["20 GiB"]) / 20
    tops = []
    below = None
    for path in memory.all("path", "edge"):
        corners = [tuple(map(float, pair.split())) for pair in re.findall(r"[\d.]+ [\d.]+", path.attributes["d"])]
        upper, lower = corners[: len(corners) // 2], corners[len(corners) // 2 :][::-1]
        assert below is None or lower == below
        below = upper
        tops.append((ticks["0 GiB"] - upper[2][1]) / per_gib)
    assert tops == pytest.approx([4, 6, 19, 20], abs=0.02)
    assert len(tops) == len(KINDS)


def test_phases_are_marked_where_spans_name_them() -> None:
    page = render_report(make_data())
    for name in ("memory", "timeline"):
        texts = [text.text for text in picture(page, name).all("text", "soft")]
        assert {"forward", "backward", "update"} <= set(texts)


def test_thinning_keeps_the_highest_point() -> None:
    points = [MemoryPoint(i / 5000, 0, 0, 0, i % 977) for i in range(5000)]
    kept = thinned(points, 1.0)
    assert len(kept) <= 502
    assert max(p.total_bytes for p in kept) == 976
    assert [p.at_s for p in kept] == sorted(p.at_s for p in kept)


def test_measured_curve_is_drawn() -> None:
    measured = Measured(memory=((0.0, 5 * GIB), (2.0, 23 * GIB), (4.4, 5 * GIB)))
    memory = picture(render_report(make_data(measured=measured)), "memory")
    assert len(next(memory.all("polyline", "measured")).attributes["points"].split()) == 3


@pytest.mark.parametrize(
    ("changes", "colours", "words"),
    [
        (
            {"is_persistent": True, "param_tier": Tier.GPU, "optim_tier": Tier.GPU},
            ["blue", "blue"],
            "always on the GPU\nstates: on the GPU",
        ),
        (
            {"is_update_streamed": True},
            ["sand", "yellow"],
            "fetched when needed\nstates: on the host, updated on the GPU",
        ),
        ({"has_spare_states": True}, ["sand", "sand"], "states: on the host, updated there, and spare ones"),
        ({"optim_tier": Tier.NVME}, ["sand", "purple"], "states: on NVMe"),
        ({"requires_grad": False}, ["sand", "none"], "states: none"),
        ({"param_tier": Tier.GPU}, ["cyan", "sand"], "made on the GPU when needed, from shards or masters there"),
    ],
)
def test_chunk_shows_where_it_lives(changes: dict[str, object], colours: list[str], words: str) -> None:
    data = make_data()
    plan = replace(data.plan, chunks=(make_chunk(0, **changes),))
    page = render_report(replace(data, plan=plan))
    cell = next(picture(page, "chunks").all("g", "chunk"))
    assert [rect.attributes["class"] for rect in cell.all("rect")] == colours
    title = next(cell.all("title")).text
    assert words in title
    assert "layers.0.weight" in title
    assert "2.0 MiB" in title


@pytest.mark.parametrize("num_chunks", [1, 7, 60, 300, 1000])
def test_chunk_cells_do_not_overlap_and_stay_inside(num_chunks: int) -> None:
    svg = picture(render_report(make_data(num_chunks)), "chunks")
    _, _, width, height = map(float, svg.attributes["viewbox"].split())
    corners = [(next(g.all("rect")).number("x"), next(g.all("rect")).number("y")) for g in svg.all("g", "chunk")]
    assert len(set(corners)) == num_chunks
    size = next(svg.all("rect")).number("width")
    assert size >= 8
    assert max(x for x, _ in corners) + size <= width + 0.1
    assert max(y for _, y in corners) < height
    rows = sorted({y for _, y in corners})
    for y in rows:
        xs = sorted(x for x, other in corners if other == y)
        assert all(b - a >= size for a, b in zip(xs, xs[1:], strict=False))


def test_bars_of_memory_add_up() -> None:
    bars = list(parsed(render_report(make_data())).all("svg", "bar"))
    step, device, host = bars
    for bar, limit, used in ((device, 24, 21), (host, 64, 60)):
        rectangles = list(bar.all("rect"))
        assert sum(r.number("width") for r in rectangles) == pytest.approx(1120, abs=0.1)
        free = next(bar.all("rect", "free"))
        assert free.number("width") == pytest.approx(1120 * (limit - used) / limit, abs=0.1)
    assert [r.number("width") / 280 for r in step.all("rect")] == pytest.approx([2.5, 0.5, 1.0], abs=0.01)


def test_the_page_says_of_which_moment_the_bytes_on_the_device_are() -> None:
    data = make_data()
    assert data.plan.forecast is not None
    known = replace(data.plan.forecast, gpu_kinds=tuple((kind, GIB) for kind in GPU_BYTE_KINDS))
    page = render_report(replace(data, plan=replace(data.plan, forecast=known)))
    assert "On the GPU at the highest moment of all together, elsewhere each kind at its own highest moment." in page
    page = render_report(replace(data, plan=replace(data.plan, forecast=None)))
    assert "Each kind at its own highest moment." in page


def test_the_file_for_programs_has_the_kinds_of_the_highest_moment_as_the_page_has(tmp_path: Path) -> None:
    data = make_data()
    assert data.plan.forecast is not None
    kinds = tuple((kind, (i + 1) * GIB) for i, kind in enumerate(GPU_BYTE_KINDS))
    RunReport(tmp_path).write(
        replace(data, plan=replace(data.plan, forecast=replace(data.plan.forecast, gpu_kinds=kinds))), {}
    )
    found = json.loads((tmp_path / "report.json").read_text())["predicted"]["bytes"]
    assert {kind: found[kind] for kind in GPU_BYTE_KINDS} == dict(kinds)
    assert found["host_param_bytes"] == 10 * GIB


def test_differences_are_in_percent_of_what_was_predicted() -> None:
    measured = Measured(peak_gpu_bytes=19 * GIB, host_bytes=60 * GIB, step_s=(4.0, 4.4, 9.0), waiting_s=0.25)
    root = parsed(render_report(make_data(measured=measured)))
    rows = {cells[0].whole_text: [c.whole_text for c in cells[1:]] for row in root.all("tr") if (cells := row.children)}
    assert rows["GPU memory, highest moment"] == ["20.0 GiB", "19.0 GiB", "-5.0%"]
    assert rows["one step, median"] == ["4.00 s", "4.40 s", "+10.0%"]
    assert rows["waiting in them"] == ["500 ms", "250 ms", "-5.7% of a step"]
    assert "updates by the host's cores" not in rows


def test_seconds_by_nominal_figures_are_in_percent_of_nothing() -> None:
    measured = Measured(peak_gpu_bytes=19 * GIB, host_bytes=60 * GIB, step_s=(4.0, 400.0, 900.0), waiting_s=0.25)
    page = render_report(make_data(measured=measured, hardware=HardwareSpec.nominal(80 * GIB, 64 * GIB)))
    root = parsed(page)
    rows = {cells[0].whole_text: [c.whole_text for c in cells[1:]] for row in root.all("tr") if (cells := row.children)}
    assert rows["GPU memory, highest moment"] == ["20.0 GiB", "19.0 GiB", "-5.0%"]  # no figure of time is in it
    assert rows["one step, median"] == ["4.00 s", "400 s", ""]
    assert rows["waiting in them"] == ["500 ms", "250 ms", ""]
    assert "predicted 4.00 s by nominal figures" in next(root.all("dl")).whole_text
    assert "measured is +" not in page
    assert any("Seconds are predicted by nominal figures" in node.whole_text for node in root.all("p"))


def test_cards_tell_the_result() -> None:
    data = make_data(num_tokens=8192, num_samples=8)
    text = next(parsed(render_report(data)).all("dl")).whole_text
    assert "does it fit?yes" in text
    assert "2,048" in text
    assert "83% of 24.0 GiB" in text
    broken = replace(data, measured=Measured(peak_gpu_bytes=25 * GIB))
    assert "stayed within the limit?no" in next(parsed(render_report(broken)).all("dl")).whole_text


def test_who_shares_what_is_told_where_it_was_weighed() -> None:
    data = make_data()
    assert "Ranks:" not in render_report(data)
    note = "sharded over 2 ranks, in 2 copies: 1.00 s; sharded over all 4 ranks: 2.00 s"
    noted = replace(data, plan=replace(data.plan, notes={**data.plan.notes, NOTE: note}))
    assert f"<b>Ranks: </b>{note}" in render_report(noted)


def test_runners_up_are_listed() -> None:
    root = parsed(render_report(make_data()))
    rows = [[cell.whole_text for cell in row.children] for row in root.all("tr")]
    assert ["everything on the GPU", "31.0 GiB too many", "does not fit", ""] in rows
    assert ["slower", "waits", "5.00 s", "+25.0%"] in rows


def test_runners_up_are_compared_in_the_figures_that_they_were_weighed_with() -> None:
    data = make_data()
    assert data.plan.forecast is not None
    page = render_report(replace(data, plan=replace(data.plan, forecast=replace(data.plan.forecast, weighed_s=2.5))))
    rows = [[cell.whole_text for cell in row.children] for row in parsed(page).all("tr")]
    assert ["slower", "waits", "5.00 s", "+100.0%"] in rows
    told = "The best of those that lost, by the times known then, when this plan was to take 2.50 s."
    assert told in page
    assert "by the times known then" not in render_report(data)


def test_narrow_neighbours_become_one_bar() -> None:
    spans = [Span("h2d", i * 1e-5, (i + 1) * 1e-5, f"fetch {i}") for i in range(50)]
    (bar,) = lane_bars(spans, 1.0)
    assert (bar.first, bar.last, bar.start_s) == ("fetch 0", "fetch 49", 0.0)
    assert bar.busy_s == pytest.approx(5e-4)
    wide = [Span("h2d", i * 0.1, (i + 1) * 0.1, f"fetch {i}") for i in range(10)]
    assert len(lane_bars(wide, 1.0)) == 10


def test_thousands_of_spans_stay_small() -> None:
    step = 3.0 / 20000
    kinds = ("chunk 1", "wait for chunk 2")
    spans = [Span("compute", i * step, (i + 1) * step, kinds[i % 2]) for i in range(20000)]
    bars = lane_bars(spans, 4.0)
    assert len(bars) <= MAX_RECTANGLES
    assert bars[0].start_s == 0.0
    assert bars[-1].end_s == pytest.approx(3.0, abs=0.01)
    data = make_data(300, measured=Measured(memory=tuple((i / 1000, GIB) for i in range(4000))))
    memory = tuple(MemoryPoint(i / 1000, GIB, i, 0, GIB) for i in range(4000))
    timeline = replace(data.timeline, spans=tuple(spans), memory=memory)  # type: ignore[type-var]
    assert len(render_report(replace(data, timeline=timeline))) < 2_000_000


def test_waiting_is_hatched_and_not_busy() -> None:
    timeline = picture(render_report(make_data()), "timeline")
    assert len(list(timeline.all("rect", "hatched"))) == 1
    texts = [text.text for text in timeline.all("text")]
    assert texts[texts.index("compute") + 1] == "75%"
    assert texts[texts.index("host to device") + 1] == "12%"


def test_device_is_no_gpu_where_the_cpu_computes() -> None:
    words = DeviceWords.of("gpu_memory_limit", "cpu_memory_limit", is_cpu=True, is_host_limited=False)
    data = make_data(hardware=HardwareSpec.nominal(8 * 2**20, 64 * GIB), measured=Measured(19 * GIB))
    page = render_report(replace(data, words=words))
    assert "Device memory over one step" in page
    assert "GPU memory" not in page
    assert "always on the GPU" not in page
    assert "GPU memory" in render_report(data)
    rows = [[cell.whole_text for cell in row.children] for row in parsed(page).all("tr")]
    assert ["device memory", "8.0 MiB"] in rows


def test_what_is_not_known_of_a_machine_is_left_out() -> None:
    page = render_report(replace(make_data(), hardware=HardwareSpec.nominal(0, 0)))
    rows = [row.children[0].whole_text for row in parsed(page).all("tr")]
    assert "Adam on the host" in rows
    assert not {"device memory", "host memory"} & set(rows)


def test_nothing_is_less_than_nothing() -> None:
    """Rounding leaves of no waiting for chunks a little less than that."""
    data = make_data(measured=Measured(step_s=(3.9999,), waiting_s=0.49999, host_bytes=60 * GIB - 1))
    assert data.plan.forecast is not None
    times = replace(data.plan.forecast.times, waiting_s=0.3, update_waiting_s=0.1 + 0.2)
    page = render_report(replace(data, plan=replace(data.plan, forecast=replace(data.plan.forecast, times=times))))
    assert times.update_waiting_s > times.waiting_s
    for text in (page, render_report(data)):
        assert "-0%" not in text
        assert "-0.0%" not in text


def test_both_forecasts_stand_beside_what_was_measured() -> None:
    data = make_data(measured=Measured(step_s=(4.4,), host_update_s=0.5, update_s=3.0))
    assert data.plan.forecast is not None
    assert data.timeline is not None
    assert "foreseen before" not in render_report(data)
    forecast = replace(data.plan.forecast, after_steps=7, foreseen_s=2.0, foreseen_after_steps=0)
    timeline = replace(data.timeline, host_update_s=0.25)
    root = parsed(render_report(replace(data, plan=replace(data.plan, forecast=forecast), timeline=timeline)))
    rows = {cells[0].whole_text: [c.whole_text for c in cells[1:]] for row in root.all("tr") if (cells := row.children)}
    assert rows["one step, median"] == ["4.00 s", "4.40 s", "+10.0%"]
    assert rows["one step, foreseen before the first step"] == ["2.00 s", "4.40 s", "+120.0%"]
    assert rows["updates by the host's cores"] == ["250 ms", "500 ms", "+5.7% of a step"]
    assert rows["from the step's call to the last update's end"] == ["", "3.00 s", ""]
    assert rows["updates, wherever they run, added up"] == ["750 ms", "19%"]  # of which none was measured
    notes = [node.whole_text for node in root.all("p")]
    assert any(note.startswith("Brought up to date after 7 steps, by what they were seen to take") for note in notes)
    assert "foreseen before the first step: 2.00 s" in next(root.all("dl")).whole_text


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 us"),
        (2e-14, "0 us"),
        (1.234e-5, "12.3 us"),
        (0.0123, "12.3 ms"),
        (0.99996, "1.00 s"),
        (1.5, "1.50 s"),
        (1234.0, "1,234 s"),
    ],
)
def test_seconds_have_three_digits(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown


@pytest.mark.parametrize("top", [1, 700, 3 * 2**20, 141 * GIB, 5 * 2**40])
def test_byte_ticks_are_few_and_within(top: int) -> None:
    ticks = byte_ticks(top)
    assert ticks[0][0] == 0
    assert 2 <= len(ticks) <= 11
    assert ticks[-1][0] <= top


@pytest.mark.parametrize("end_s", [3e-7, 2e-5, 0.004, 0.7, 4.0, 90.0])
def test_time_ticks_are_few_and_within(end_s: float) -> None:
    ticks = time_ticks(end_s)
    assert 4 <= len(ticks) <= 11
    assert ticks[-1][0] <= end_s * 1.000001


@pytest.mark.parametrize(("count", "shown"), [(20, "20"), (54_321, "54,321"), (124_439_808, "124 million")])
def test_counts_are_short(count: int, shown: str) -> None:
    assert format_count(count) == shown


def test_element_escapes_attributes_and_text() -> None:
    made = element("text", 'a<b & "c"', element("b", "x"), class_='"><', stroke_width=1.50, left_out=None)
    assert made == '<text class="&quot;&gt;&lt;" stroke-width="1.5">a&lt;b &amp; "c"<b>x</b></text>'


@pytest.mark.full
def test_example_inspects_plans(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / "03_inspect_a_plan.py")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "everything on the GPU" in done.stdout
    for gib in (16, 24, 48):
        plan = load_plan(tmp_path / f"plan_{gib}gib.json")
        assert plan.forecast is not None
        assert plan.forecast.peak_gpu_bytes <= gib * GIB
        page = parsed((tmp_path / f"plan_{gib}gib.html").read_text())
        assert len(list(page.all("g", "chunk"))) == len(plan.chunks)


def test_what_the_plan_counts_with_beside_what_is_drawn() -> None:
    data = make_data()
    assert data.plan.forecast is not None
    assert data.timeline is not None
    drawn = data.timeline.peak_gpu_bytes
    for more, is_said in ((0, False), (GIB, True)):
        forecast = replace(data.plan.forecast, peak_gpu_bytes=drawn + more, margin_bytes=more)
        page = render_report(replace(data, plan=replace(data.plan, forecast=forecast)))
        assert ("The plan counts with 1.0 GiB more than is drawn" in page) == is_said
        assert ("left to the allocator and to larger batches" in page) == is_said


def test_when_updates_run_and_what_waits_for_them() -> None:
    data = make_data()
    plan = data.plan
    assert plan.forecast is not None
    times = replace(plan.forecast.times, update_waiting_s=0.125)
    plan = replace(plan, update_timing=UpdateTiming.BEHIND_FORWARD, forecast=replace(plan.forecast, times=times))
    page = render_report(replace(data, plan=plan))
    assert "Updates on the host run behind the next forward" in page
    assert "waiting for updates" in page
    assert "125 ms" in page
    chunks = tuple(replace(c, optim_tier=Tier.GPU) for c in plan.chunks)
    assert "Updates on the host run" not in render_report(replace(data, plan=replace(plan, chunks=chunks)))


def test_every_micro_batch_has_its_phases() -> None:
    names = ("forward", "backward", "backward", "forward", "backward")
    spans = tuple(Span("compute", i, i + 1.0, f"{name} chunk {i}") for i, name in enumerate(names))
    timeline = Timeline(StepTimes(6.0, 5.0, 0, 0, 0, 1, 0, 1.0), 0, 5.0, spans)
    found = [(phase.name, phase.start_s, phase.end_s) for phase in phases(timeline)]
    assert found == [
        ("forward", 0.0, 1.0),
        ("backward", 1.0, 3.0),
        ("forward", 3.0, 4.0),
        ("backward", 4.0, 5.0),
        ("update", 5.0, 6.0),
    ]
