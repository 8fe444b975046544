"""Many programs, each in processes that may die or hang without ending the campaign."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tests.fuzz.interrupts import interrupted, run_interrupted
from tests.fuzz.like_a_gpu import run_like_a_gpu, watched
from tests.fuzz.play import Note
from tests.fuzz.programs import Draw, Program, generate, simpler
from tests.fuzz.restarts import restarted, run_restarted
from tests.fuzz.run import Outcome, run_engine, run_plain, run_program, settle, worst_of
from tests.helpers.dist import RankError, run_ranks, stop_workers

TIMEOUT_S = 180.0
"""Of one program, which usually takes a third of a second; a machine may be busy with other things."""


def run_apart(
    program: Program, timeout_s: float = TIMEOUT_S, *, is_interrupted: bool = False, is_like_a_gpu: bool = False
) -> Outcome:
    """Run a program on its ranks, in worker processes: a crash, and a hang, are outcomes as well.

    Args:
        is_interrupted: With Ctrl-C at random moments; the program comes from `interrupted`.
        is_like_a_gpu: With what is different on a GPU; the program comes from `watched`.
    """
    if program.end is not None:
        return run_restarted(program, timeout_s)
    has_group = program.ranks > 1
    run = run_interrupted if is_interrupted else run_like_a_gpu if is_like_a_gpu else run_program
    options: dict[str, Any] = {"device": program.device, "timeout_s": timeout_s}
    try:
        if program.through == "trainer" and has_group:  # which begins a group itself
            plain = run_ranks(run_plain, program.ranks, program, **options)
            if isinstance(plain[0], Outcome):
                return plain[0]
            with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
                given = (program, plain, folder)
                outcomes = run_ranks(_through_trainer, program.ranks, *given, init_group=False, **options)
        else:
            outcomes = run_ranks(run, program.ranks, program, init_group=has_group, **options)
        settle(
            program,
            outcomes,
            lambda call, *given: run_ranks(call, program.ranks, *given, init_group=has_group, **options),
        )
    except RankError as error:
        return Outcome(program.seed, "failed", str(error))
    except TimeoutError as error:
        return Outcome(program.seed, "failed", f"it hangs: {error}")
    worst = worst_of(outcomes)
    if worst.is_finding:  # what it has left in these processes is no other program's
        stop_workers()
    counters: Counter[str] = Counter()
    for outcome in outcomes:
        counters.update(outcome.counters)
    return replace(worst, counters=dict(counters))


def _through_trainer(program: Program, plain: list[list[Note]], folder: str) -> Outcome:
    return run_engine(program, plain[int(os.environ["RANK"])], folder)


@dataclass
class Summary:
    """What a campaign has found."""

    seconds: float = 0.0
    verdicts: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    """Programs by what they are: ranks, dtype, through what."""
    refusals: dict[str, list[int]] = field(default_factory=dict)
    """Beginnings of messages, and the seeds."""
    close: dict[int, str] = field(default_factory=dict)
    findings: dict[int, Outcome] = field(default_factory=dict)

    def add(self, program: Program, outcome: Outcome) -> None:
        self.verdicts[outcome.verdict] += 1
        self.counters.update(outcome.counters)
        self.kinds.update((f"{program.ranks} ranks", program.dtype, f"through the {program.through}"))
        if outcome.verdict == "refused":
            self.refusals.setdefault(_beginning(outcome.detail), []).append(outcome.seed)
        if outcome.verdict == "close":
            self.close[outcome.seed] = outcome.detail
        if outcome.is_finding:
            self.findings[outcome.seed] = outcome

    def as_json(self) -> dict[str, Any]:
        """What `json` can write."""
        findings = {seed: asdict(outcome) for seed, outcome in self.findings.items()}
        return {**vars(self), "findings": findings}

    def text(self) -> str:
        lines = [f"{sum(self.verdicts.values())} programs in {self.seconds:.0f} s: {_counted(self.verdicts)}"]
        lines.append(f"of them: {_counted(self.kinds)}")
        lines.append(f"chunks: {_counted(self.counters)}")
        lines += [f"refused {len(seeds)}x (seed {seeds[0]}): {text}" for text, seeds in sorted(self.refusals.items())]
        lines += [f"close (seed {seed}): {text.splitlines()[0]:.150}" for seed, text in list(self.close.items())[:10]]
        lines += [f"FINDING (seed {seed}): {o.detail.strip()[:300]}" for seed, o in self.findings.items()]
        return "\n".join(lines)


def _beginning(message: str) -> str:
    """The words of a message, without what changes from program to program."""
    words = [w for w in message.splitlines()[0].split() if not any(c.isdigit() for c in w) and "." not in w[:-1]]
    return " ".join(words)[:110]


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))


def campaign(
    seeds: Iterable[int],
    draw: Draw,
    seconds: float | None = None,
    tell: Callable[[Program, Outcome], None] = lambda program, outcome: None,
    *,
    are_interrupted: bool = False,
    are_restarted: bool = False,
    are_like_a_gpu: bool = False,
) -> Summary:
    """Run the programs of these seeds, one after the other.

    Args:
        seconds: How long; None: all of them.
        tell: Hears of each.
        are_interrupted: With Ctrl-C, which they catch.
        are_restarted: They end at random moments, and go on from a checkpoint.
        are_like_a_gpu: On the CPU, with what is different on a GPU, and a thread that reads meanwhile.
    """
    summary, begin_s = Summary(), time.monotonic()
    for seed in seeds:
        if seconds is not None and time.monotonic() - begin_s > seconds:
            break
        program = generate(seed, draw)
        if are_interrupted:
            program = interrupted(program)
        if are_restarted:
            program = restarted(program)
        if are_like_a_gpu:
            program = watched(program)
        outcome = run_apart(program, is_interrupted=are_interrupted, is_like_a_gpu=are_like_a_gpu)
        summary.add(program, outcome)
        tell(program, outcome)
    summary.seconds = time.monotonic() - begin_s
    return summary


def shrink(
    program: Program,
    outcome: Outcome,
    seconds: float = 300.0,
    run: Callable[[Program], Outcome] | None = None,
    tell: Callable[[Program, Outcome], None] = lambda program, outcome: None,
) -> tuple[Program, Outcome]:
    """A simpler program that fails in the same way.

    Args:
        seconds: How long to try.
        run: By default `run_apart`.
        tell: Hears of every simpler one.
    """
    end_s = time.monotonic() + seconds
    is_simpler = True
    while is_simpler:
        is_simpler = False
        for candidate in _candidates(program):
            if time.monotonic() > end_s:
                return program, outcome
            found = run_apart(candidate, 20.0) if run is None else run(candidate)
            if found.verdict == outcome.verdict and _manner(found) == _manner(outcome):
                program, outcome, is_simpler = candidate, found, True
                tell(program, outcome)
                break
    return program, outcome


def _candidates(program: Program) -> Iterator[Program]:
    seen = {program}
    for candidate in simpler(program):
        if candidate not in seen and candidate.layers:
            seen.add(candidate)
            yield candidate


def _manner(outcome: Outcome) -> str:
    """Crash, hang, kind of error, or other numbers."""
    if outcome.verdict != "failed":
        is_left = outcome.detail.startswith("left behind")
        return _beginning(outcome.detail)[:25] if outcome.verdict == "refused" else f"{outcome.verdict}, {is_left=}"
    for sign in ("it hangs", "Segmentation fault", "died without"):
        if sign in outcome.detail:
            return sign
    return outcome.detail.split(":")[0]
