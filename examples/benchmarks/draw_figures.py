"""Tables and pictures of the documentation, from the JSON files in `results/`: no figure there is typed by hand.

    python examples/benchmarks/draw_figures.py            # rewrite README.md, docs/performance.md and docs/figures/
    python examples/benchmarks/draw_figures.py --check    # exit with 1 if that would change anything

In a text, `<!-- figures: NAME -->` and `<!-- end of figures -->` enclose what this program writes.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
TEXTS = (ROOT / "README.md", ROOT / "docs" / "performance.md")
PICTURES = ROOT / "docs" / "figures"
GIB = 2**30
SYSTEMS = {
    "elixir": "lightning_elixir",
    "plain": "plain PyTorch, whole card",
    "fsdp2": "FSDP2, CPU offload",
    "deepspeed_zero2": "DeepSpeed ZeRO-2, offload",
    "torchao": "torchao, CPU offload",
}
DEFAULTS = (  # the latest first
    "defaults_edges_shorter_search_h200_2026-11-29.json",
    "defaults_edges_cast_h200_2026-11-29.json",
    "defaults_edges_h200_2026-11-29.json",
    "defaults_edges_again_h200_2026-11-28.json",
    "defaults_edges_h200_2026-11-28.json",
    "defaults_edges_h200_2026-11-27.json",
    "defaults_compiled_h200_2026-11-25.json",
    "defaults_edges_h200_2026-11-25.json",
    "defaults_looked_at_again_h200_2026-11-25.json",
)
MODELS = {
    "llama-7b": "Llama-7B",
    "5b": "GPT of 4.8B",
    "30b": "OPT-30B",
    "moe": "Qwen3-MoE of 5.1B",
    "conv": "ResNet of 2.7B",
}
PEERS = ("fsdp2", "deepspeed_zero2", "torchao")


@dataclass(frozen=True)
class Run:
    """One file of `compare.py`."""

    file: str
    content: dict[str, Any]

    @property
    def case(self) -> tuple[Any, ...]:
        """What was trained within what; equal for runs that can be compared."""
        job, shape = self.content["job"], self.content["job"]["shape"]
        limits = (job["gpu_limit_bytes"] or 0, job["cpu_limit_bytes"] or 0)
        return (
            self.content["parameters"],
            job["batch"],
            shape["seq"],
            *limits,
            job["ranks"],
            job["precision"],
            job["clip"],
            job.get("optimizer", "adamw"),  # files from before have none
            job.get("is_compiled", False),  # likewise
        )

    @property
    def title(self) -> str:
        parameters, batch, seq, gpu, host, ranks, precision, clip, optimizer, is_compiled = self.case
        parts = [f"{parameters / 1e9:.1f}B, {batch} x {seq}"]
        parts += [f"{ranks} GPUs"] if ranks > 1 else []
        parts += [f"{gpu / GIB:.0f} GiB of GPU" if gpu else "whole GPU"]
        parts += [f"{host / GIB:.0f} GiB of host"] if host else []
        parts += [precision] if precision != "bf16" else []
        parts += [f"clipped to {clip:g}"] if clip else []
        parts += [optimizer.capitalize()] if optimizer != "adamw" else []
        parts += ["blocks compiled"] if is_compiled else []
        return ", ".join(parts)

    @property
    def machine(self) -> str:
        names = {r.get("device_name") for r in self.content["results"].values()} - {None}
        return f"{self.content['job']['ranks']} x {', '.join(sorted(names))}, {self.content['machine']['cores']} cores"

    def result(self, system: str, key: str) -> float | None:
        value = self.content["results"].get(system, {}).get(key)
        return None if value is None else float(value)

    def step_s(self, system: str) -> float | None:
        return self.result(system, "median_step_s")


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def runs() -> list[Run]:
    """Every result of `compare.py` with a step of ours, the newest last."""
    found = [Run(path.name, load(path.name)) for path in sorted(RESULTS.glob("*.json"))]
    ours = [run for run in found if {"job", "results", "parameters"} <= set(run.content) and run.step_s("elixir")]
    return sorted(ours, key=lambda run: (run.content["date"], run.file))


def runs_beside_peers() -> list[Run]:
    """The newest of each case in which a peer ran as well: of those with most of them, the slowest case first."""
    best: dict[tuple[Any, ...], Run] = {}
    for run in runs():
        num_peers = sum(run.step_s(peer) is not None for peer in PEERS)
        before = best.get(run.case)
        if num_peers and (before is None or num_peers >= sum(before.step_s(peer) is not None for peer in PEERS)):
            best[run.case] = run
    return sorted(best.values(), key=lambda run: run.case, reverse=True)


# ----------------------------------------------------------------------------------------------------------- tables


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def gib(value: float | None) -> str:
    return "-" if value is None else f"{value / GIB:.1f}"


def peers_table() -> str:
    """Short: seconds of a step beside the peers."""
    rows = []
    for run in runs_beside_peers():
        times = [seconds(run.step_s(system)) for system in ("elixir", *PEERS, "plain")]
        rows.append([run.title, f"**{times[0]}**", *times[1:], run.content["commit"][:7]])
    names = [SYSTEMS[peer].partition(",")[0] for peer in PEERS]
    return table(["case", "lightning_elixir", *names, "plain, whole card", "commit"], rows)


def memory_table() -> str:
    """Long: every system of these runs, with memory and source."""
    rows = []
    for run in runs_beside_peers():
        ours = run.step_s("elixir") or 0.0
        for system, title in SYSTEMS.items():
            time_s = run.step_s(system)
            if time_s is None and system not in run.content["results"]:
                continue
            ratio = "ran out of memory" if time_s is None else f"{time_s / ours:.2f}"
            memory = [gib(run.result(system, key)) for key in ("peak_gpu_allocated_bytes", "peak_host_used_bytes")]
            if time_s is None:
                memory = ["-", "-"]
            rows.append([run.title, title, seconds(time_s), ratio, *memory, f"`{run.file}`"])
    return table(["case", "system", "step, s", "of ours", "GPU GiB", "host GiB", "file"], rows)


def history_table() -> str:
    """A row for each run: what it was at which commit, on which machine."""
    rows = []
    for run in reversed(runs()):
        times = [seconds(run.step_s(system)) for system in ("elixir", "plain")]
        day = run.content["date"][:10]
        rows.append([day, f"`{run.content['commit']}`", run.machine, run.title, *times, f"`{run.file}`"])
    return table(["date", "commit", "machine", "case", "ours, s", "plain, s", "file"], rows)


def adam_table() -> str:
    name = "adam_speed_h200_2026-11-21.json"
    content = load(name)
    rows = [
        [
            where,
            row["system"].replace("ours", "lightning_elixir"),
            f"{row['gparam_per_s']:.2f}",
            f"{row['gb_per_s']:.0f}",
        ]
        for where, key in (("16 cores", "host"), ("H200", "device"))
        for row in content[key]
    ]
    return table(["where", "system", "Gparam/s", "GB/s"], rows) + f"\n\nFile: `{name}`."


def checkpoint_table() -> str:
    rows = []
    for name in ("checkpoint_speed_1.3b_h200_2026-11-21.json", "checkpoint_speed_120m_two_cores_2026-11-21.json"):
        content = load(name)
        waited, beside = content["sync"], content["async"]
        rows.append(
            [
                f"{waited['nbytes'] / 1e9:.1f} GB, {content['machine']['cores']} cores",
                seconds(waited["blocked_s"]),
                seconds(beside["blocked_s"]),
                seconds(beside["seconds"]),
                f"{content['raw']['write_gb_per_s']:.2f}",
                f"`{name}`",
            ]
        )
    head = [
        "checkpoint",
        "training stands for, s",
        "with `async_save`, s",
        "then on the disk after, s",
        "raw disk, GB/s",
        "file",
    ]
    return table(head, rows)


def defaults_table() -> str:
    """One row a case: its latest run, and what a step took in earlier ones."""
    rows: dict[str, list[str]] = {}
    for run in [run for name in DEFAULTS for run in load(name)["runs"]]:
        plains = [c for c in run["cases"].values() if c["case"]["is_plain"] and "step_s" in c]
        plain = {(*work_of(c["case"]), autocast): c["step_s"] for c in plains for autocast in autocasts_like(c["case"])}
        for found in run["cases"].values():
            case = found["case"]
            if case["is_plain"]:
                continue
            beside = plain.get((*work_of(case), case.get("autocast", True)))
            of_plain = seconds(beside) if case["accumulate"] == 1 else "-"
            measured = [seconds(found["step_s"]), seconds(found["predicted_s"]), of_plain]
            words = case_words(case)
            if words in rows:
                rows[words][4] = ", ".join([rows[words][4], measured[0]]).removeprefix(", ")
            else:
                rows[words] = [words, *measured, "", f"{found['first_step_s']:.0f}", run["commit"]]
    heads = ["step, s", "predicted, s", "plain, whole card, s", "earlier runs, s", "first step done after, s", "commit"]
    return table(["case", *heads], list(rows.values()))


def autocasts_like(plain: dict[str, Any]) -> tuple[bool, ...]:
    """Which fits a plain one stands beside, under autocast or not: one without, which is faster, beside both."""
    return (True,) if plain.get("autocast") else (True, False)


def work_of(case: dict[str, Any]) -> tuple[Any, ...]:
    """What a case of `defaults.py` computes, but for clipping; plain PyTorch has its one road for it."""
    return case["model"], case["batch"], case["seq"], case.get("is_compiled", False), num_devices(case)


def num_devices(case: dict[str, Any]) -> int:
    return int(case.get("devices", 1))  # files from before have none


def case_words(case: dict[str, Any]) -> str:
    """A case of `defaults.py`."""
    size = f"{case['batch']} images" if case["model"] == "conv" else f"{case['batch']} x {case['seq']}"
    limit = case["gpu_limit"]
    words = [MODELS[case["model"]], size]
    words += [f"{num_devices(case)} GPUs"] if num_devices(case) > 1 else []
    words += ["whole GPU" if limit is None else f"{limit // GIB} GiB of GPU"]
    words += [f"{case['cpu_limit'] // GIB} GiB of host"] if case["cpu_limit"] else []
    words += ["blocks compiled"] if case.get("is_compiled") else []
    words += [] if case.get("autocast", True) else ["`autocast=False`"]
    words += ["fp16"] if case["precision"] == "16-mixed" else []
    words += [f"{case['accumulate']} micro-batches"] if case["accumulate"] > 1 else []
    words += [f"clipped {'never' if case['clip'] > 1 else 'in every step'}"] if case["clip"] else []
    return ", ".join(words)


def profiler_table() -> str:
    name = "profiler_h200_2026-11-21.json"
    cases = [case for case in load(name)["cases"] if case.get("measured_bytes")]
    errors = [case["predicted_bytes"] / case["measured_bytes"] - 1 for case in cases]
    held_out = sum(bool(case["is_held_out"]) for case in cases)
    row = [str(len(cases)), str(held_out), f"{min(errors):+.2%}", f"{max(errors):+.2%}", f"`{name}`"]
    return table(["models and steps", "of them never looked at before", "lowest error", "highest error", "file"], [row])


def placement_runs() -> list[tuple[str, float, float]]:
    """(limit, predicted seconds, measured seconds) of each placement that ran."""
    limits = load("placements_gpt_2.5b_h200_2026-11-21.json")["limits"]
    return [
        (limit["limit"], run["predicted"]["total_s"], run["measured_s"])
        for limit in limits
        for run in limit["runs"]
        if run.get("measured_s")
    ]


def placement_table() -> str:
    found = placement_runs()
    errors = [predicted / measured - 1 for _, predicted, measured in found]
    mean = statistics.mean(map(abs, errors))
    row = [str(len(found)), f"{min(errors):+.0%}", f"{max(errors):+.0%}", f"{mean:.0%}"]
    head = ["placements", "lowest error", "highest error", "mean of their sizes", "file"]
    return table(head, [[*row, "`placements_gpt_2.5b_h200_2026-11-21.json`"]])


TABLES: dict[str, Callable[[], str]] = {
    "peers": peers_table,
    "memory": memory_table,
    "history": history_table,
    "defaults": defaults_table,
    "adam": adam_table,
    "checkpoints": checkpoint_table,
    "profiler": profiler_table,
    "placements": placement_table,
}


# --------------------------------------------------------------------------------------------------------- pictures

OURS, OTHER, REFERENCE = "#00897b", "#90a4ae", "#cfd8dc"
STYLE = "font: 13px system-ui, sans-serif; fill: #263238"


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img" aria-label="{escape(title)}">\n<title>{escape(title)}</title>\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" style="{STYLE}{extra}">{escape(words)}</text>'


def peers_picture() -> str:
    """Bars of seconds, a panel a case."""
    parts, y, left, width = [], 30.0, 220, 760
    for run in runs_beside_peers():
        times = {s: t for s in SYSTEMS if (t := run.step_s(s)) is not None}
        scale = (width - left - 80) / max(times.values())
        parts.append(text(16, y, run.title, "; font-weight: 600"))
        y += 12
        for system, time_s in times.items():
            color = OURS if system == "elixir" else REFERENCE if system == "plain" else OTHER
            parts.append(text(24, y + 15, SYSTEMS[system]))
            parts.append(f'<rect x="{left}" y="{y:.1f}" width="{time_s * scale:.1f}" height="20" fill="{color}"/>')
            parts.append(text(left + time_s * scale + 6, y + 15, f"{time_s:.2f} s"))
            y += 25
        y += 34
    return svg(width, round(y - 20), "Seconds of one training step, beside the peers", parts)


def placements_picture() -> str:
    """Measured over predicted seconds, a point a placement."""
    size, left, low = 420, 60, 370
    found = placement_runs()
    top = max(max(p, m) for _, p, m in found) * 1.05
    scale = (low - 20) / top
    colors = dict(zip(dict.fromkeys(limit for limit, _, _ in found), (OURS, "#ef6c00", "#5e35b1"), strict=False))
    parts = [
        f'<path d="M{left} 20V{low}H{left + low - 20}" stroke="#90a4ae" fill="none"/>',
        f'<path d="M{left} {low}L{left + low - 20} 20" stroke="#cfd8dc" stroke-dasharray="4 4"/>',
        text(left + 90, low + 40, "predicted seconds of a step"),
        f'<g transform="translate(16 270) rotate(-90)">{text(0, 0, "measured seconds")}</g>',
    ]
    for tick in (0.5, 1.0, 1.5, 2.0):
        if tick < top:
            parts.append(text(left + tick * scale - 10, low + 18, f"{tick:g}"))
            parts.append(text(left - 28, low - tick * scale + 4, f"{tick:g}"))
    for limit, predicted, measured in found:
        x, y = left + predicted * scale, low - measured * scale
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colors[limit]}" fill-opacity="0.75"/>')
    for index, (limit, color) in enumerate(colors.items()):
        parts.append(f'<circle cx="{left + 26}" cy="{36 + 20 * index}" r="5" fill="{color}"/>')
        parts.append(text(left + 38, 41 + 20 * index, f"GPU limited to {limit}"))
    return svg(size + 20, size, "Predicted and measured seconds of a step", parts)


# ---------------------------------------------------------------------------------------------------------- writing


def with_tables(content: str) -> str:
    """The text with what stands between its marks written anew."""

    def filled(match: re.Match[str]) -> str:
        return f"<!-- figures: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end of figures -->"

    return re.sub(r"<!-- figures: (\w+) -->\n.*?<!-- end of figures -->", filled, content, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something would change")
    arguments = parser.parse_args()
    files = {path: with_tables(path.read_text(encoding="utf-8")) for path in TEXTS}
    files |= {PICTURES / "peers.svg": peers_picture(), PICTURES / "placements.svg": placements_picture()}
    stale = [
        path for path, content in files.items() if not path.exists() or path.read_text(encoding="utf-8") != content
    ]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'is not what the results say' if arguments.check else 'written'}")
        if not arguments.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
