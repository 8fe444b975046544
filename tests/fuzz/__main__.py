"""The command: `python -m tests.fuzz --seconds 3600 --first-seed 1000`."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.campaign import Summary, campaign, run_apart, shrink
from tests.fuzz.like_a_gpu import watched
from tests.fuzz.programs import Draw, Program, generate, parse
from tests.fuzz.restarts import restarted
from tests.fuzz.run import Outcome


def main() -> int:
    options = _options()
    ranks = tuple(int(n) for n in options.ranks.split(","))
    draw = Draw(ranks, options.device, options.through, options.dtype, options.compiled)
    if options.show is not None:
        print(generate(options.show, draw))
        return 0
    if options.program is not None:
        program = parse(Path(options.program).read_text())
        return _one(program, is_shrinking=options.shrink, is_like_a_gpu=options.like_a_gpu)
    if options.seed is not None:
        program = generate(options.seed, draw)
        if options.restarts:
            program = restarted(program)
        if options.like_a_gpu:
            program = watched(program)
        return _one(program, is_shrinking=options.shrink, is_like_a_gpu=options.like_a_gpu)
    summary = _side_by_side(options) if options.jobs > 1 else _campaign(options, draw)
    print(summary.text())
    if options.json:
        Path(options.json).write_text(json.dumps(summary.as_json(), indent=1))
    return 1 if summary.findings else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on")
    parser.add_argument("--count", type=int, help="how many programs at most")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--stride", type=int, default=1, help="from seed to seed")
    parser.add_argument("--jobs", type=int, default=1, help="campaigns side by side, each with seeds of its own")
    parser.add_argument(
        "--ranks", default="1", help="numbers of ranks to choose from, as 1,2; --signals and --like-a-gpu run on one"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--through", choices=("module", "trainer"), help="only this")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="only this")
    parser.add_argument("--compiled", action="store_true", help="with layers that are compiled")
    parser.add_argument("--signals", action="store_true", help="with Ctrl-C at random moments, through ElixirModule")
    parser.add_argument(
        "--restarts", action="store_true", help="that end at random moments, and go on from a checkpoint"
    )
    parser.add_argument(
        "--like-a-gpu", action="store_true", help="on the CPU, with a GPU's threads and late events, and one that reads"
    )
    parser.add_argument("--json", help="file for the summary")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--program", help="run the program in this file alone, as --show prints it")
    parser.add_argument("--show", type=int, help="print the program of this seed")
    parser.add_argument("--shrink", action="store_true", help="make what fails simpler")
    return parser.parse_args()


def _one(program: Program, *, is_shrinking: bool, is_like_a_gpu: bool) -> int:
    outcome = run_apart(program, is_like_a_gpu=is_like_a_gpu)
    if is_shrinking and outcome.verdict not in ("equal", "useless"):
        run = partial(run_apart, timeout_s=20.0, is_like_a_gpu=is_like_a_gpu)
        program, outcome = shrink(program, outcome, run=run, tell=lambda simpler, _: print(f"  {simpler}", flush=True))
    print(program)
    print(outcome.verdict, outcome.counters)
    print(outcome.detail)
    return 1 if outcome.is_finding else 0


def _campaign(options: argparse.Namespace, draw: Draw) -> Summary:
    seeds: Any = itertools.count(options.first_seed, options.stride)
    if options.count is not None:
        seeds = itertools.islice(seeds, options.count)
    return campaign(
        seeds,
        draw,
        options.seconds,
        _tell,
        are_interrupted=options.signals,
        are_restarted=options.restarts,
        are_like_a_gpu=options.like_a_gpu,
    )


def _tell(program: Program, outcome: Outcome) -> None:
    if outcome.is_finding:
        print(f"seed {program.seed}: {outcome.verdict}: {outcome.detail.strip()[:2000]}\n  {program}", flush=True)


def _side_by_side(options: argparse.Namespace) -> Summary:
    given = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
        files = [Path(folder) / f"{job}.json" for job in range(options.jobs)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz", *given, "--jobs", "1", "--json", str(file)]
                + ["--first-seed", str(options.first_seed + job), "--stride", str(options.jobs)]
            )
            for job, file in enumerate(files)
        ]
        for process in processes:
            process.wait()
        return _together([json.loads(file.read_text()) for file in files if file.exists()])


def _together(parts: list[dict[str, Any]]) -> Summary:
    whole = Summary()
    for part in parts:
        whole.seconds = max(whole.seconds, part["seconds"])
        whole.verdicts.update(Counter(part["verdicts"]))
        whole.counters.update(Counter(part["counters"]))
        whole.kinds.update(Counter(part["kinds"]))
        for text, seeds in part["refusals"].items():
            whole.refusals.setdefault(text, []).extend(seeds)
        whole.close.update({int(seed): text for seed, text in part["close"].items()})
        whole.findings.update({int(seed): Outcome(**found) for seed, found in part["findings"].items()})
    return whole


if __name__ == "__main__":
    sys.exit(main())
