"""Runs `train_gpt.py` under several precisions and placements and compares losses and memory with plain PyTorch.

    python examples/benchmarks/example_matrix.py --size 350m --precisions 16-mixed bf16-mixed --policies cuda cpu auto
    python examples/benchmarks/example_matrix.py --size 7b --gpu-gib 24 --policies auto --no-plain --steps 5

Every run is a process of its own. `--gpu-gib` makes the card smaller for all of them: torch refuses to allocate more.
The table compares the first losses with those of plain PyTorch under the same precision, and the peak of GPU memory
with what the plan predicts. Raw results go to one JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[1] / "train_gpt.py"

# Runs the example on an imitated smaller card.
LAUNCH = """
import runpy, sys, torch
limit = float(sys.argv.pop(1))
if limit and torch.cuda.is_available():
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit * 2**30 / total))
sys.argv[0] = sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(name: str, gpu_gib: float, arguments: list[str], timeout_s: float) -> dict[str, Any]:
    """One training; its JSON report, or what it died of."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-c", LAUNCH, str(gpu_gib), str(EXAMPLE), *arguments, "--json", str(report)]
        root = str(EXAMPLE.parents[1])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
        start_s = time.perf_counter()
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)  # noqa: S603
            output, code = ended.stdout + ended.stderr, ended.returncode
        except subprocess.TimeoutExpired as error:
            output, code = str(error), -1
        wall_s = time.perf_counter() - start_s
        if code != 0 or not report.exists():
            print(f"--- {name} failed ({code})\n{output[-3000:]}", flush=True)
            return {"name": name, "error": output[-3000:], "wall_s": wall_s}
        result: dict[str, Any] = json.loads(report.read_text())
    print(f"--- {name}: {wall_s:.0f} s", flush=True)
    chunks = [line for line in output.splitlines() if "chunks" in line or "predicted" in line or "held now" in line]
    print("\n".join(chunks), flush=True)
    return {"name": name, "wall_s": wall_s, **result}


def gib(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**30:.2f}"


def compare(results: list[dict[str, Any]]) -> list[str]:
    """A Markdown table; each run beside the plain one of its precision."""
    rows = [
        "| run | first loss | last loss | largest difference from plain | median step s "
        "| peak GPU GiB | predicted GPU GiB | peak host GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain = {r["arguments"]["precision"]: r for r in results if r["name"].startswith("plain") and "losses" in r}
    for r in results:
        if "losses" not in r:
            rows.append(f"| {r['name']} | failed | | | | | | |")
            continue
        other = plain.get(r["arguments"]["precision"])
        pairs = zip(r["losses"], other["losses"], strict=False) if other else ()
        largest = max((abs(a - b) for a, b in pairs), default=None)
        notes = r.get("plan", {}).get("notes", {})
        predicted = notes.get("gpu_bytes")
        difference = "-" if largest is None else f"{largest:.5f}"
        rows.append(
            f"| {r['name']} | {r['losses'][0]:.4f} | {r['losses'][-1]:.4f} | {difference} | {r['median_step_s']:.3f} "
            f"| {gib(r.get('peak_gpu_bytes'))} | {gib(predicted)} | {gib(r.get('peak_host_bytes'))} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="350m")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--precisions", nargs="+", default=["16-mixed", "bf16-mixed"])
    parser.add_argument("--policies", nargs="*", default=["cuda", "cpu", "auto"])
    parser.add_argument("--gpu-gib", type=float, default=0.0, help="imitate a card of this size; 0: the whole card")
    parser.add_argument("--no-plain", action="store_true")
    parser.add_argument("--timeout-s", type=float, default=500.0, help="for each run")
    parser.add_argument("--out", type=Path, default=Path("example_matrix.json"))
    parser.add_argument("rest", nargs="*", help="further arguments of train_gpt.py, after --")
    arguments = parser.parse_args()

    results = []
    for precision in arguments.precisions:
        common = [
            "--size",
            arguments.size,
            "--steps",
            str(arguments.steps),
            "--precision",
            precision,
            "--val-batches",
            "0",
        ]
        common += ["--sample-bytes", "0", *arguments.rest]
        runs = [] if arguments.no_plain else [(f"plain {precision}", ["--plain"])]
        runs += [(f"elixir {policy} {precision}", ["--policy", policy]) for policy in arguments.policies]
        for name, own in runs:
            results.append(run(name, arguments.gpu_gib, common + own, arguments.timeout_s))
            arguments.out.write_text(
                json.dumps({"command": sys.argv, "machine": platform.platform(), "results": results}, indent=1)
            )
    print("\n".join(compare(results)), flush=True)


if __name__ == "__main__":
    main()
