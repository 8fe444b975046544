"""Runs one program by both, and tells what differs."""

from __future__ import annotations

import gc
import math
import os
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_elixir import wrapper
from lightning_elixir.errors import DivergenceError, ElixirError, StorageError
from lightning_elixir.profiling import block_visits
from lightning_elixir.runtime import offloading
from lightning_elixir.runtime.hooks import innermost_pack
from lightning_elixir.strategy.precision import ElixirPrecision
from tests.fuzz.backends import Engine, Plain
from tests.fuzz.play import Note, Player, Raised
from tests.fuzz.poison import poisoned_storage
from tests.fuzz.programs import Program
from tests.fuzz.scale import has_scale
from tests.fuzz.trainer import fit

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts; makes its results repeatable

# What is close enough where a sum may be taken in another order: relative and absolute.
CLOSE = {"float32": (1e-4, 1e-5), "bfloat16": (5e-2, 1e-2), "float16": (1e-2, 2e-3)}

NUM_JITTERS = 12
"""So many times plain PyTorch is asked how far it is from itself: an input near a bend crosses it in one of ten."""
MOST_TIMES = 4.0
"""The engine may be so many times as far from plain PyTorch as that is from itself. A jitter moves a value by two units
in the last place at most, and so many times that is less than `CLOSE`: what it does not blow up excuses nothing."""

# Errors of ours that are no refusals: ranks do the same in these programs, and disks work.
_FAULTS = (DivergenceError, StorageError)


@dataclass(frozen=True)
class Doubt:
    """What is different, and may be chaos: whatever was noted before was close at least."""

    index: int
    """Of the note, among plain PyTorch's."""
    distances: dict[str, float]
    """By place in the note, how far the engine is from plain PyTorch, where that is too far."""


@dataclass
class Outcome:
    """What a program gave."""

    seed: int
    verdict: str = "equal"
    """"equal" (bit for bit), "close", "chaotic" (close at first, and plain PyTorch is about as far from itself there
    when some start values are rounded differently), "refused" (an error of ours, where plain PyTorch goes on),
    "useless" (plain PyTorch cannot run it), "different", or "failed" (any other error)."""
    detail: str = ""
    counters: dict[str, int] = field(default_factory=dict)
    doubt: Doubt | None = None
    """Whether what is different is chaos is still to be found out (`settle`)."""

    @property
    def is_finding(self) -> bool:
        return self.verdict in ("different", "failed")


def run_program(program: Program) -> Outcome:
    """Run a program by plain PyTorch and by the engine. With several ranks, call it on each, in a process group."""
    expected = run_plain(program)
    return expected if isinstance(expected, Outcome) else run_engine(program, expected)


def run_plain(program: Program, *, jitter: int = 0) -> list[Note] | Outcome:
    """What a user of plain PyTorch sees; an outcome, where that does not work.

    Args:
        jitter: Some start values differ in the last bits, with each number others; 0: none.
    """
    rank = dist.get_rank() if program.ranks > 1 else 0
    with surroundings():
        try:
            expected = Player(program, Plain(program, rank, jitter=jitter)).run()
        except Exception:
            return Outcome(program.seed, "useless", traceback.format_exc(limit=-4))
        finally:
            while innermost_pack() is not None:  # plain PyTorch leaves them where an error comes from deep inside
                torch._C._autograd._pop_saved_tensors_default_hooks()
    if not _is_sane(program, expected):
        return Outcome(program.seed, "useless", "plain PyTorch gives inf or NaN")
    return expected


def run_engine(program: Program, expected: Sequence[Note], folder: str | None = None) -> Outcome:
    """The same by the engine, compared. Through the Trainer: outside of a process group, which that begins.

    Args:
        folder: For what it writes, the same on all ranks; None: one of this process.
    """
    outcome = Outcome(program.seed)
    found: list[Note] = []
    before = frozenset(threading.enumerate())
    with surroundings(), tempfile.TemporaryDirectory(prefix="fuzz_") as own, poisoned_storage(), _all_is_moved():
        try:
            outcome.counters = _by_engine(program, folder or own, found)
        except ElixirError as error:
            is_fault = isinstance(error, _FAULTS) and "Boom" not in str(error)  # of the program's own, on another rank
            outcome.verdict = "failed" if is_fault else "refused"
            outcome.detail = f"{type(error).__name__}: {error}\n{_where(error)}"
        except Exception as error:
            outcome.verdict, outcome.detail = "failed", f"{type(error).__name__}: {error}\n{_where(error)}"
    judge(program, outcome, expected, found)
    left = left_behind(before)
    if left and (not outcome.is_finding or outcome.doubt):
        outcome.verdict, outcome.detail = "different", f"left behind: {left}; {outcome.detail}"
        outcome.doubt = None
    return outcome


def _by_engine(program: Program, folder: str, found: list[Note]) -> dict[str, int]:
    """Returns counters; what is seen goes to `found`, as far as the program comes."""
    if program.through == "trainer":
        return fit(program, folder, found)
    backend = Engine(program, dist.get_rank() if program.ranks > 1 else 0, folder)
    player = Player(program, backend)
    player.notes = found
    try:
        player.run()
    finally:
        backend.close()
    return dict(backend.counters)


def left_behind(before: Collection[threading.Thread], *, is_interrupted: bool = False) -> list[str]:
    """What a run must not leave in its process; it is taken away for the next one. A signal may leave on hooks of the
    user's, and modes of checkpointing's: torch's contexts do not defer it where they end.

    Args:
        before: Threads that were there already: a test that has failed keeps its engine, by its traceback.
    """
    found = []
    while (pack := innermost_pack()) is not None:
        if not is_interrupted or type(getattr(pack, "__self__", None)).__module__.startswith("lightning_elixir"):
            found.append(f"hooks for saved tensors: {pack}")
        torch._C._autograd._pop_saved_tensors_default_hooks()
    while torch._C._len_torch_dispatch_stack():
        mode = torch._C._pop_torch_dispatch_stack(None)
        if not is_interrupted:
            found.append(f"a dispatch mode: {mode}")
    if not torch.is_grad_enabled():
        found.append("no gradients")
        torch.set_grad_enabled(True)
    gc.collect()
    end_s = time.monotonic() + 2.0
    while names := [t.name for t in threading.enumerate() if t not in before and "elixir" in t.name.lower()]:
        if time.monotonic() > end_s:
            found.append(f"threads {names}")
            break
        gc.collect()
        time.sleep(0.02)
    return found


def _where(error: BaseException) -> str:
    return "".join(traceback.format_tb(error.__traceback__, limit=-8))


@contextmanager
def surroundings() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(torch.cuda.is_available(), warn_only=True)
    try:
        with warnings.catch_warnings(), _fp16_anywhere():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _all_is_moved() -> Iterator[None]:
    """Inside, no activations are too small to go to host memory."""
    with (
        mock.patch.object(offloading, "LEAST_OFFLOADED_BYTES", 1),
        mock.patch.object(block_visits, "LEAST_OFFLOADED_BYTES", 1),
    ):
        yield


@contextmanager
def _fp16_anywhere() -> Iterator[None]:
    """Inside, the engine takes fp16 on the CPU as well, where it is too slow to be of use."""
    check = wrapper._check

    def check_all_else(plan: Any, dtype: Any, is_given: bool, world_size: int, device: torch.device) -> None:
        check(plan, dtype, is_given, world_size, torch.device("meta"))

    def take(self: ElixirPrecision, device_type: str) -> None:
        self.device_type = device_type

    with (
        mock.patch.object(wrapper, "_check", check_all_else),
        mock.patch.object(ElixirPrecision, "check_device", take),
    ):
        yield


def _is_sane(program: Program, notes: Sequence[Note]) -> bool:
    """Whether all is finite but for gradients that a loss scale has made overflow."""
    may_overflow = ("grad", "norm", "clip") if has_scale(program) else ()
    shown = [note for note in notes if not any(word in note.label for word in may_overflow)]
    return all(bool(torch.isfinite(t).all()) for note in shown for t in _tensors(note.value) if t.is_floating_point())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)


def judge(
    program: Program, outcome: Outcome, expected: Sequence[Note], found: Sequence[Note], *, begin: int = 0
) -> None:
    """Compare what a run by the engine has seen with what plain PyTorch saw, and note the verdict.

    Args:
        begin: Of plain PyTorch's notes, the first that the run was to see.
    """
    tolerance = CLOSE[program.dtype]
    worst: tuple[str, str] = ("equal", "")
    for index, (ours, plain) in enumerate(zip(found, expected[begin:], strict=False), begin):
        if ours.value == {} and program.ranks > 1:  # rank 0 alone has it
            continue
        is_alone = not isinstance(plain.value, Raised) or plain.label != ours.label
        if is_alone and isinstance(ours.value, Raised) and "ElixirError" in ours.value.bases:
            is_fault = any(kind.__name__ in ours.value.bases for kind in _FAULTS) and "Boom" not in ours.value.text
            # Another rank may be some notes ahead where it raises what plain PyTorch raises too.
            is_told = "PeerLostError" in ours.value.bases
            is_told &= any(isinstance(note.value, Raised) and note.label == ours.label for note in expected[index:])
            outcome.verdict = "failed" if is_fault and not is_told else "refused"
            outcome.detail = f"{ours.label}: {ours.value.kind}: {ours.value.text}"
            return
        verdict, detail = _compare(ours, plain, tolerance)
        if verdict == "different":
            outcome.verdict, outcome.detail = verdict, f"{detail}\n{outcome.detail}"
            if worst[0] == "close":
                outcome.doubt = Doubt(index, _too_far(ours.value, plain.value, tolerance))
            return
        if verdict == "close" and worst[0] == "equal":
            worst = verdict, detail
    if outcome.verdict == "equal":
        outcome.verdict, outcome.detail = worst
        labels = [n.label for n in expected[begin:]]
        if len(found) < len(labels) - (1 if "optimizer" in labels[-1] else 0):
            outcome.verdict, outcome.detail = "different", f"the engine's run ended early, before {labels[len(found)]}"


_ORDER = ("equal", "close", "chaotic", "refused", "useless", "different", "failed")


def worst_of(outcomes: Sequence[Outcome]) -> Outcome:
    return max(outcomes, key=lambda outcome: _ORDER.index(outcome.verdict))


def settle(program: Program, outcomes: Sequence[Outcome], run: Callable[..., Sequence[dict[str, float]]]) -> None:
    """Tell chaos from what is different, where all findings are in doubt.

    Args:
        program: What they are of.
        outcomes: By rank.
        run: Calls a function on every rank, and gives what each returns.
    """
    doubts = [outcome.doubt for outcome in outcomes]
    findings = [outcome for outcome in outcomes if outcome.is_finding]
    if findings and all(outcome.doubt for outcome in findings) and _are_chaos(program, doubts, run):
        for outcome in findings:
            outcome.verdict = "chaotic"
    for outcome in outcomes:
        outcome.doubt = None


def _are_chaos(
    program: Program, doubts: Sequence[Doubt | None], run: Callable[..., Sequence[dict[str, float]]]
) -> bool:
    """Whether plain PyTorch is about as far from itself, in every place that is in doubt."""
    farthest: list[dict[str, float]] = [{} for _ in doubts]
    for jitter in range(1, 1 + NUM_JITTERS):
        for most, found in zip(farthest, run(distances_from_itself, program, doubts, jitter), strict=True):
            most.update({place: max(distance, most.get(place, 0.0)) for place, distance in found.items()})
        if all(doubt is None or _is_within(doubt, most) for doubt, most in zip(doubts, farthest, strict=True)):
            return True
    return False


def _is_within(doubt: Doubt, most: dict[str, float]) -> bool:
    return all(distance <= MOST_TIMES * most.get(place, 0.0) for place, distance in doubt.distances.items())


def distances_from_itself(program: Program, doubts: Sequence[Doubt | None], jitter: int) -> dict[str, float]:
    """By place in the note that this rank is in doubt about, how far plain PyTorch is from itself with this jitter."""
    plain, other = run_plain(program), run_plain(program, jitter=jitter)
    doubt = doubts[dist.get_rank() if program.ranks > 1 else 0]
    if doubt is None or isinstance(plain, Outcome) or isinstance(other, Outcome):
        return {}
    if doubt.index >= len(other) or other[doubt.index].label != plain[doubt.index].label:
        return {}
    return _distances(other[doubt.index].value, plain[doubt.index].value)


def _too_far(ours: Any, plain: Any, tolerance: tuple[float, float]) -> dict[str, float]:
    """By place, the distances that are no close ones."""
    a, b = dict(_places(ours)), dict(_places(plain))
    return {
        place: distance
        for place, distance in _distances(ours, plain).items()
        if _compare_values(a.get(place), b.get(place), place, tolerance)[0] == "different"
    }


def _distances(ours: Any, plain: Any) -> dict[str, float]:
    """By place, how far elements are apart at most; infinite where they cannot be compared."""
    a, b = dict(_places(ours)), dict(_places(plain))
    return {place: _distance(a.get(place), b.get(place)) for place in a.keys() | b.keys()}


def _places(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors, numbers and words in what was noted."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _places(entry, f"{place}[{key}]")
    elif isinstance(value, (list, tuple)) and not isinstance(value, Raised):
        yield from _places(dict(enumerate(value)), place)
    else:
        yield place, value


def _distance(ours: Any, plain: Any) -> float:
    if not isinstance(ours, (int, float, Tensor)) or not isinstance(plain, (int, float, Tensor)):
        return 0.0 if type(ours) is type(plain) and ours == plain else math.inf
    a, b = torch.as_tensor(ours).double(), torch.as_tensor(plain).double()
    if a.shape != b.shape:
        return math.inf
    apart = (a - b).abs()[(a != b) & ~(a.isnan() & b.isnan())]
    return float(apart.nan_to_num(math.inf).max()) if apart.numel() else 0.0


def compare_states(ours: Any, plain: Any, dtype: str) -> tuple[str, str]:
    """ "equal", "close" or "different", and where."""
    return _compare_values(ours, plain, "state", CLOSE[dtype])


def _compare(ours: Note, plain: Note, tolerance: tuple[float, float]) -> tuple[str, str]:
    if isinstance(ours.value, Raised) and isinstance(plain.value, Raised):
        if ours.value.kind == plain.value.kind or "ElixirError" in ours.value.bases:
            return "equal", ""
        return "different", f"{plain.label}: plain raises {plain.value}, the engine {ours.value}"
    if isinstance(ours.value, Raised):
        return "different", f"{plain.label}: the engine alone raises {ours.value}"
    if isinstance(plain.value, Raised):
        return "different", f"{plain.label}: plain alone raises {plain.value}, the engine gives {ours.label}"
    if ours.label != plain.label:
        return "different", f"plain notes {plain.label!r}, the engine {ours.label!r}"
    return _compare_values(ours.value, plain.value, ours.label, tolerance)


def _compare_values(ours: Any, plain: Any, label: str, tolerance: tuple[float, float]) -> tuple[str, str]:
    if isinstance(plain, dict) and isinstance(ours, dict):
        if ours.keys() != plain.keys():
            odd = sorted(map(str, ours.keys() ^ plain.keys()))
            return "different", f"{label}: these are in one of the two only: {odd[:8]}"
        worst = ("equal", "")
        for key in plain:
            verdict = _compare_values(ours[key], plain[key], f"{label}[{key}]", tolerance)
            if verdict[0] == "different":
                return verdict
            worst = worst if verdict[0] == "equal" else verdict
        return worst
    if isinstance(plain, (list, tuple)) and isinstance(ours, (list, tuple)):
        return _compare_values(dict(enumerate(ours)), dict(enumerate(plain)), label, tolerance)
    if isinstance(plain, Tensor) and isinstance(ours, Tensor) and plain.dim() + ours.dim() > 0:
        return _compare_tensors(ours, plain, label, tolerance)
    if isinstance(plain, (int, float, Tensor)) and isinstance(ours, (int, float, Tensor)):
        a, b = float(ours), float(plain)
        if a == b or (math.isnan(a) and math.isnan(b)):
            return "equal", ""
        is_close = math.isclose(a, b, rel_tol=tolerance[0] * 10, abs_tol=tolerance[1] * 10)
        return ("close" if is_close else "different"), f"{label}: {a} for {b}"
    return ("equal", "") if ours == plain else ("different", f"{label}: {ours!r:.80} for {plain!r:.80}")


def _compare_tensors(ours: Tensor, plain: Tensor, label: str, tolerance: tuple[float, float]) -> tuple[str, str]:
    if ours.shape != plain.shape:
        return "different", f"{label}: shape {tuple(ours.shape)} for {tuple(plain.shape)}"
    a, b = ours.double(), plain.double()
    is_same = (a == b) | (a.isnan() & b.isnan())
    if bool(is_same.all()):
        return "equal", ""
    distance = (a - b).abs().masked_fill(is_same, 0.0)
    text = f"{label}: off by {float(distance.max()):.3g} at most, of {float(b.abs().max()):.3g}"
    if torch.isnan(distance).any():
        return "different", f"{label}: NaN"
    # In 16 bits an element near zero may be what is left of large ones.
    scale = (
        b.nan_to_num(0.0, 0.0, 0.0).abs() if tolerance is CLOSE["float32"] else b.nan_to_num(0.0, 0.0, 0.0).abs().max()
    )
    is_close = bool((distance <= tolerance[1] + tolerance[0] * scale).all())
    return ("close" if is_close else "different"), text
