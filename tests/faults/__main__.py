"""The command: `python -m tests.faults --near --jobs 2`. Plants each fault, runs the tests, tells which finds it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tests.faults.campaign import ROOT, TIERS, Finding, Limits, look_for
from tests.faults.table import FAULTS, PACKAGE, Fault

RESULTS = Path(__file__).with_name("RESULTS.md")
_FAULT_S = {"default": 1200.0, "full": 5400.0}


def main() -> int:
    options = _options()
    unknown = set(options.only) - {fault.name for fault in FAULTS}
    if unknown:
        print(f"no such fault: {', '.join(sorted(unknown))}")
        return 2
    faults = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    if options.list:
        for fault in faults:
            print(f"{fault.room:12} {fault.kind:7} {fault.name:40} {PACKAGE}/{fault.path}\n    {fault.breaks}")
        return 0
    problems = _problems(faults)
    print("\n".join(problems) or f"{len(faults)} faults apply")
    if options.check or problems:
        return 1 if problems else 0
    limits = Limits(options.test_seconds, options.seconds or _FAULT_S[options.tier])

    def look(fault: Fault) -> Finding:
        finding = look_for(fault, options.tier, limits, is_near_first=options.near, first=options.first)
        print(
            f"{fault.name}: {finding.test or '-'} ({finding.how}, {finding.stage}, {finding.seconds:.0f} s)", flush=True
        )
        return finding

    known = _earlier(options.results, options.tier) if options.only else {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for finding in pool.map(look, faults):
            known[finding.fault] = finding
            _write(options.results, options.tier, known)  # so that what is known stays, however this ends
    return 0 if all(known[fault.name].test for fault in faults) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these faults; the results keep the rest")
    parser.add_argument("--tier", choices=TIERS, default="default")
    parser.add_argument("--jobs", type=int, default=1, help="faults side by side")
    parser.add_argument("--near", action="store_true", help="first the tests of the module that is changed")
    parser.add_argument("--first", nargs="+", default=[], metavar="FILE", help="test files to run before all others")
    parser.add_argument("--list", action="store_true", help="show the faults")
    parser.add_argument("--check", action="store_true", help="see whether they still apply")
    parser.add_argument("--test-seconds", type=float, default=120.0, help="that one test may take")
    parser.add_argument("--seconds", type=float, help="that all tests over one fault may take")
    parser.add_argument("--results", type=Path, default=RESULTS, help="table to write; and JSON beside it")
    return parser.parse_args()


def _problems(faults: Sequence[Fault]) -> list[str]:
    """Of faults that cannot be planted any more."""
    found = []
    for fault in faults:
        try:
            compile(fault.planted((ROOT / PACKAGE / fault.path).read_text()), fault.path, "exec")
        except (OSError, ValueError, SyntaxError) as error:
            found.append(str(error))
    return found


def _earlier(results: Path, tier: str) -> dict[str, Finding]:
    """What is known from an earlier campaign."""
    path = results.with_suffix(".json")
    kept = json.loads(path.read_text()).get(tier, []) if path.exists() else []
    return {one["fault"]: Finding(**one) for one in kept}


def _write(results: Path, tier: str, findings: Mapping[str, Finding]) -> None:
    path = results.with_suffix(".json")
    data = json.loads(path.read_text()) if path.exists() else {}
    data[tier] = [asdict(findings[fault.name]) for fault in FAULTS if fault.name in findings]
    path.write_text(json.dumps(data, indent=1) + "\n")
    lines = ["# Faults and the tests that find them", "", "Written by `python -m tests.faults`.", ""]
    for name, kept in sorted(data.items()):
        lines += _table(name, {one["fault"]: Finding(**one) for one in kept})
    results.write_text("\n".join(lines))


def _table(tier: str, findings: Mapping[str, Finding]) -> list[str]:
    num_found = sum(finding.test is not None for finding in findings.values())
    num_left = len(FAULTS) - len(findings)
    lines = [f"## Tier {tier}: {num_found} of {len(FAULTS)}" + f", {num_left} not looked for yet" * (num_left > 0), ""]
    lines += ["| fault | room | kind | found by | how | among | s |", "|---|---|---|---|---|---|---:|"]
    for fault in FAULTS:
        one = findings.get(fault.name)
        if one is not None:
            test = f"`{one.test}`" if one.test else "**not found**"
            cells = (fault.name, fault.room, fault.kind, test, one.how, one.stage, f"{one.seconds:.0f}")
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


if __name__ == "__main__":
    raise SystemExit(main())
