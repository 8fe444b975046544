"""Which chunk lives where: one cell a chunk, in the model's order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lightning_elixir.plan.types import ChunkSpec, Plan, Tier
from lightning_elixir.plan.units import format_bytes
from lightning_elixir.report.markup import Markup, element, joined
from lightning_elixir.report.parts import legend, swatch

WIDTH = 1120.0
LEFT = 44.0

PARAM_PLACES = (
    ("resident", "blue", "always on the {device}"),
    ("sharded", "cyan", "made on the {device} when needed, from shards or masters there"),
    ("host", "sand", "on the host, fetched when needed"),
    ("nvme", "purple", "on NVMe, fetched when needed"),
)
STATE_PLACES = (
    ("gpu", "blue", "on the {device}, updated there"),
    ("streamed", "yellow", "on the host, updated on the {device} as they stream through"),
    ("host", "sand", "on the host, updated there"),
    ("nvme", "purple", "on NVMe"),
    ("frozen", "none", "none (frozen)"),
)

_PARAMS = {key: (colour, text) for key, colour, text in PARAM_PLACES}
_STATES = {key: (colour, text) for key, colour, text in STATE_PLACES}


@dataclass(frozen=True)
class _Cell:
    """Size of a chunk's cell and how many stand in a row."""

    width: float
    height: float
    per_row: int


def param_place(chunk: ChunkSpec) -> str:
    """Where a chunk's parameters live: a key of `PARAM_PLACES`."""
    if chunk.is_persistent:
        return "resident"
    return {Tier.GPU: "sharded", Tier.CPU: "host", Tier.NVME: "nvme"}[chunk.param_tier]


def state_place(chunk: ChunkSpec) -> str:
    """Where a chunk's master and states live and are updated: a key of `STATE_PLACES`."""
    if not chunk.requires_grad:
        return "frozen"
    if chunk.is_update_streamed:
        return "streamed"
    return {Tier.GPU: "gpu", Tier.CPU: "host", Tier.NVME: "nvme"}[chunk.optim_tier]


def chunk_picture(plan: Plan, device_word: str) -> Markup:
    """The map and a legend that counts; upper half of a cell: parameters, lower half: optimizer states."""
    cell = _cell(len(plan.chunks))
    num_rows = -(-len(plan.chunks) // cell.per_row)
    gap = 8.0
    height = num_rows * (cell.height + gap) + 4
    drawn = [_row_label(row, cell, gap) for row in range(num_rows)]
    drawn += [_chunk(plan, chunk, cell, gap, device_word) for chunk in plan.chunks]
    svg = element(
        "svg",
        *drawn,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_label="Chunks by where they live",
        class_="chunks",
    )
    return joined([_legend(plan, device_word), element("div", svg, class_="picture")])


def _cell(num_chunks: int) -> _Cell:
    width = min(64.0, max(14.0, (WIDTH - LEFT) / max(num_chunks, 1)))
    if width == 14.0:  # several rows: cells large enough to point at
        width = (WIDTH - LEFT) / 50
    return _Cell(width, min(max(width * 1.3, 28.0), 52.0), int((WIDTH - LEFT) / width + 1e-6))


def _row_label(row: int, cell: _Cell, gap: float) -> Markup:
    y = row * (cell.height + gap) + 2 + cell.height / 2 + 4
    return element("text", str(row * cell.per_row), class_="soft", x=LEFT - 8, y=y, text_anchor="end")


def _chunk(plan: Plan, chunk: ChunkSpec, cell: _Cell, gap: float, device_word: str) -> Markup:
    row, column = divmod(chunk.id, cell.per_row)
    x, y = LEFT + column * cell.width, row * (cell.height + gap) + 2
    width, half = cell.width - 2.5, cell.height / 2
    title = element("title", _title(plan, chunk, device_word))
    state = state_place(chunk)
    upper, lower = _PARAMS[param_place(chunk)][0], _STATES[state][0]
    inset = 0.6 if state == "frozen" else 0.0  # its outline lies inside the cell
    return element(
        "g",
        title,
        element("rect", class_=upper, x=x, y=y, width=width, height=half),
        element(
            "rect",
            class_=lower,
            x=x + inset,
            y=y + half + inset,
            width=width - 2 * inset,
            height=half - 2 * inset,
        ),
        class_="chunk",
    )


def _title(plan: Plan, chunk: ChunkSpec, device_word: str) -> str:
    params, states = _PARAMS[param_place(chunk)][1], _STATES[state_place(chunk)][1]
    blocks = plan.blocks_of(chunk.id)
    size = f"{format_bytes(chunk.nbytes)} in {chunk.dtype}" + (f", {blocks} blocks" if blocks > 1 else "")
    spare = ", and spare ones" if chunk.has_spare_states else ""
    return (
        f"{chunk}: {size}\nparameters: {params.format(device=device_word)}"
        f"\nstates: {states.format(device=device_word)}{spare}"
    )


def _legend(plan: Plan, device_word: str) -> Markup:
    params = Counter(param_place(c) for c in plan.chunks)
    states = Counter(state_place(c) for c in plan.chunks)
    nbytes: Counter[str] = Counter()
    for chunk in plan.chunks:
        nbytes[param_place(chunk)] += chunk.nbytes
    upper = [
        (
            swatch(colour, "none"),
            f"parameters {text.format(device=device_word)}: {_chunks(params[key])}, {format_bytes(nbytes[key])}",
        )
        for key, colour, text in PARAM_PLACES
        if params[key]
    ]
    lower = [
        (swatch("none", colour), f"states {text.format(device=device_word)}: {_chunks(states[key])}")
        for key, colour, text in STATE_PLACES
        if states[key]
    ]
    return joined([legend(upper), legend(lower)])


def _chunks(count: int) -> str:
    return "1 chunk" if count == 1 else f"{count} chunks"
