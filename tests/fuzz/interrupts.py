"""Programs that get Ctrl-C at random moments, catch it, and go on: what is trained is what plain PyTorch trains."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from lightning_elixir.errors import ElixirError
from tests.fuzz.backends import Engine, Plain
from tests.fuzz.play import Player
from tests.fuzz.poison import poisoned_storage
from tests.fuzz.programs import HAVE_STATE, Layer, Program
from tests.fuzz.run import Outcome, compare_states, left_behind, run_plain, surroundings

NUM_INTERRUPTS = 4
CURES = ("from a checkpoint", "zero_grad()")


def interrupted(program: Program) -> Program:
    """The same, as one that can be interrupted: what a forward changes beside gradients would be changed twice."""
    layers = _stateless(program.layers)
    # Nor can one that keeps bf16 alone: a step that runs again rounds otherwise, and Adam makes much of that.
    left_out = ("init_step", "master_weights")
    options = tuple(o for o in program.options if o[0] not in left_out)
    # A loss scale is part of what a step changes, and here only parameters tell whether it was taken.
    dtype = "bfloat16" if program.dtype == "float16" else program.dtype
    program = replace(program, layers=layers, options=options, dtype=dtype, steps=max(4, program.steps))
    return replace(program.on_one_rank(), actions=(), schedule="", through="module")


def _stateless(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    # functional_call: a signal while torch puts other tensors in the parameters' place leaves them there.
    kinds = HAVE_STATE | {"functional_call"}
    return tuple(replace(x, kind="linear" if x.kind in kinds else x.kind, inner=_stateless(x.inner)) for x in layers)


def run_interrupted(program: Program) -> Outcome:
    """Train; after each Ctrl-C, the parameters must be those before the step that it came in, or those after it."""
    rng, outcome = random.Random(program.seed), Outcome(program.seed)
    if isinstance(expected := run_plain(program), Outcome):
        return expected
    before = frozenset(threading.enumerate())
    with surroundings():
        states = _states_of_steps(Player(program, Plain(program, 0)))
    with surroundings(), tempfile.TemporaryDirectory(prefix="fuzz_") as folder, poisoned_storage():
        begin_s = time.monotonic()
        whole = Player(program, Engine(program, 0, folder))
        whole.run()
        whole.backend.close()
        usual_s = (time.monotonic() - begin_s) / program.steps
        del whole
        with _handlers():
            outcome.verdict, outcome.detail, outcome.counters = _bombard(program, folder, states, rng, usual_s)
    left = left_behind(before, is_interrupted=True)
    if left and not outcome.is_finding:
        outcome.verdict, outcome.detail = "different", f"left behind: {left}"
    return outcome


def _states_of_steps(player: Player) -> list[dict[str, Any]]:
    states = [player.backend.state()]
    for step in range(player.program.steps):
        player.one_step(step)
        states.append(player.backend.state())
    return states


def _bombard(
    program: Program, folder: str, states: list[dict[str, Any]], rng: random.Random, usual_s: float
) -> tuple[str, str, dict[str, int]]:
    backend = Engine(program, 0, folder)
    player, step, count, worst = Player(program, backend), 0, 0, "equal"
    try:
        while step < program.steps:
            player.go_to(step)
            try:
                with _ctrl_c(rng.random() * 1.5 * usual_s if count < NUM_INTERRUPTS else None):
                    player.one_step(step)
                step += 1
                continue
            except KeyboardInterrupt:
                count += 1
            torch.set_grad_enabled(True)  # it may have come when `torch.no_grad` had begun, and its block had not
            backend.zero_grad()
            state = backend.state()
            found = [compare_states(state, states[s], program.dtype) for s in (step, step + 1)]
            if all(verdict == "different" for verdict, _ in found):
                return "different", f"after Ctrl-C in step {step}: {found}", {}
            step += int(found[0][0] == "different" or (found[1][0] == "equal" and found[0][0] != "equal"))
        worst, detail = compare_states(backend.state(), states[-1], program.dtype)
        return worst, detail, {"interrupts": count}
    except ElixirError as error:
        if any(cure in str(error) for cure in CURES):
            return "equal", "", {"interrupts": count, "interrupts that ended the run": 1}
        return "failed", f"after {count} times Ctrl-C: {type(error).__name__}: {error}", {}
    finally:
        backend.close()


@contextmanager
def _handlers() -> Iterator[None]:
    """An alarm is Ctrl-C, which Python's own handler turns into `KeyboardInterrupt`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGALRM, before[1])


@contextmanager
def _ctrl_c(after_s: float | None) -> Iterator[None]:
    """SIGINT after so many seconds, if the block still runs then."""
    try:
        if after_s is not None:
            signal.setitimer(signal.ITIMER_REAL, max(after_s, 1e-5))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
