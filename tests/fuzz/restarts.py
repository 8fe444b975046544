"""Programs whose run is killed, interrupted, told to end, or meets a full disk, at a random moment; another one goes on
from its last checkpoint, in new processes, and must find what plain PyTorch finds that goes on from there."""

from __future__ import annotations

import os
import random
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_elixir.errors import StorageError
from tests.fuzz.backends import Engine
from tests.fuzz.play import Note, Player, Raised
from tests.fuzz.poison import poisoned_storage
from tests.fuzz.programs import P_GRAD, Action, Ending, Program, parse
from tests.fuzz.run import Outcome, judge, run_plain, settle, surroundings, worst_of
from tests.fuzz.trainer import InTrainer, Left, Module, WatchingModule, batches, make_trainer, within_limits
from tests.helpers.dist import run_ranks, start_processes

CHECKPOINT = "last.ckpt"
# A rank that has lost another one hears of it within seconds; the machine may be busy with other things.
LONGEST_END_S = 60.0
# What such a run may do: nothing that it would have to remember beside the checkpoint.
_FORGOTTEN = {
    "read", "write", "copy", "assign", "row", "state_dict", "load_state_dict", "deepcopy", "full_parameters",
    "evaluate", "no_grad_forward", "other_lr", "numpy", "vector", "pickle", "stats", "thread_read",
    "read_parameters", "grads",
    *P_GRAD,
}  # fmt: skip


def restarted(program: Program) -> Program:
    """The same with an end, as a program that can go on from a checkpoint."""
    rng = random.Random(f"{program.seed}/end")
    steps = max(4, program.steps)
    end = Ending(
        rng.choice(("kill", "kill", "ctrl_c", "terminate", "full_disk", "full_disk")),
        step=rng.randrange(steps),
        moment=rng.random(),
        is_of_one=rng.random() < 0.5,
    )
    writes = program.through == "trainer" or any(name.startswith("nvme") for name, _ in program.plan)
    if end.how == "full_disk" and not writes:  # then nothing of ours writes
        end = replace(end, how="kill")
    actions = tuple(a for a in program.actions if a.name in _FORGOTTEN)
    return replace(program, steps=steps, end=end, actions=actions, watcher="")


def run_restarted(program: Program, timeout_s: float) -> Outcome:
    """Both lives, and what plain PyTorch has to say about them. In the process that starts ranks."""
    assert program.end is not None
    outcome = Outcome(program.seed)
    whole = run_ranks(run_plain, program.ranks, program, init_group=program.ranks > 1)
    if isinstance(whole[0], Outcome):
        return whole[0]
    if any(isinstance(note.value, Raised) for notes in whole for note in notes):
        return replace(outcome, verdict="useless", detail="plain PyTorch raises before the program is ended")
    with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
        Path(folder, "program.txt").write_text(repr(program))
        first, wrong = _lives(program, folder, "first", timeout_s)
        if wrong:
            return replace(outcome, verdict="failed", detail=f"the life that ends: {wrong}")
        if any("CapacityError" in life["error"] for life in first):
            return replace(outcome, verdict="refused", detail=first[0]["error"])
        is_ended = any(life["error"] or life["caught"] for life in first)
        outcome.counters = {f"ended by {program.end.how}": int(is_ended)}
        second, wrong = _lives(program, folder, "second", timeout_s)
        if wrong:
            return replace(outcome, verdict="failed", detail=f"the life that goes on: {wrong}")
    errors = [life["error"] for life in second if life["error"]]
    if errors:
        verdict = "refused" if "CapacityError" in errors[0] else "failed"
        return replace(outcome, verdict=verdict, detail=f"the life that goes on: {errors[0]}")
    counts = [  # as far as it came
        next((n for n, note in enumerate(life["notes"]) if _is_of_peers(note)), len(life["notes"])) for life in first
    ]
    expected = [notes[:count] for notes, count in zip(whole, counts, strict=True)]
    outcome = _worst(program, outcome, expected, [life["notes"] for life in first])
    return outcome if outcome.is_finding else _judged(program, outcome, first, second)


def _worst(
    program: Program, outcome: Outcome, expected: list[list[Note]], found: list[list[Note]], begin: int = 0
) -> Outcome:
    """What ranks have seen beside what plain PyTorch saw, from this note on; with an outcome so far."""
    outcomes = [replace(outcome) for _ in expected]
    for own, plain, ours in zip(outcomes, expected, found, strict=True):
        if len(plain) > begin:
            judge(program, own, plain, ours, begin=begin)
    has_group = program.ranks > 1
    settle(program, outcomes, lambda call, *given: run_ranks(call, program.ranks, *given, init_group=has_group))
    return worst_of(outcomes)


def _judged(program: Program, outcome: Outcome, first: list[dict[str, Any]], second: list[dict[str, Any]]) -> Outcome:
    end, begin = program.end, second[0]["begin"]
    assert end is not None
    is_late = bool(program.option("async_save"))  # the last one may not have been complete yet
    is_ended = any(life["error"] or life["caught"] for life in first)
    earliest = max(0, end.step - int(is_late)) if is_ended else program.steps
    if begin < earliest:
        detail = f"an earlier checkpoint is lost: the run ended in step {end.step}, and goes on from {begin}"
        return replace(outcome, verdict="different", detail=detail)
    again = (Action(begin - 1, "resume"),) if begin else ()
    known = replace(program, actions=tuple(sorted((*program.actions, *again), key=lambda a: a.step)))
    plain = run_ranks(run_plain, program.ranks, known, init_group=program.ranks > 1)
    if isinstance(plain[0], Outcome):
        return plain[0]
    earlier = sum(_step_of(note) < begin and "final" not in note.label for note in plain[0])
    outcome = _worst(known, outcome, plain, [life["notes"] for life in second], earlier)
    return replace(outcome, detail=f"gone on from step {begin}: {outcome.detail}") if outcome.is_finding else outcome


def _is_of_peers(note: Note) -> bool:
    return isinstance(note.value, Raised) and "ElixirError" in note.value.bases


def _step_of(note: Note) -> int:
    return int(note.label.split()[1].rstrip(":"))


def _lives(program: Program, folder: str, name: str, timeout_s: float) -> tuple[list[dict[str, Any]], str]:
    """What each rank has to tell, and what was wrong with how they ended."""
    end = program.end if name == "first" else None
    processes = start_processes(f"from tests.fuzz.restarts import live; live({folder!r}, {name!r})", program.ranks)
    deadline, codes = time.monotonic() + timeout_s, []
    try:
        for process in processes:
            codes.append(process.wait(max(0.0, deadline - time.monotonic())))
            deadline = min(deadline, time.monotonic() + LONGEST_END_S)
    except Exception as error:
        return [], f"it hangs: {type(error).__name__}: {error}, {codes=}"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    told = []
    for rank, code in enumerate(codes):
        path = Path(folder, f"{name}{rank}.pt")
        is_killed = end is not None and end.how == "kill" and code == -signal.SIGALRM
        is_told = end is not None and end.how == "terminate" and code in (-signal.SIGTERM, 128 + signal.SIGTERM)
        if path.exists():
            told.append(torch.load(path, weights_only=False))
        elif is_killed or is_told:
            told.append({"error": "killed", "caught": "", "notes": [], "begin": 0})
        else:
            return [], f"rank {rank} died, exit code {code}"
        if code not in (0, 1) and not (is_killed or is_told):
            return told, f"rank {rank} ended with exit code {code}: {told[-1]['error']}"
        if told[-1]["error"] and not any(kind in told[-1]["error"] for kind in _expected_errors(end)):
            return told, f"rank {rank}: {told[-1]['error']}"
    return told, ""


def _expected_errors(end: Ending | None) -> tuple[str, ...]:
    """What a life may end with. Capacity is a matter of the plan."""
    of_peers = ("CapacityError", "PeerLostError", "DivergenceError", "killed")
    by_how = {
        "kill": (),
        "ctrl_c": ("KeyboardInterrupt", "SystemExit"),
        "terminate": ("SIGTERMException", "SystemExit"),
        "full_disk": ("StorageError",),
    }
    return ("CapacityError",) if end is None else of_peers + by_how[end.how]


# ---------------------------------------------------------------------------------------------------- in the processes


def live(folder: str, name: str) -> None:
    """One rank's life; leaves what it has seen in a file."""
    program = parse(Path(folder, "program.txt").read_text())
    rank = int(os.environ.get("RANK", "0"))
    if name == "second":  # other chunks
        plan = tuple((k, 8192 if k == "chunk_size" and v != 8192 else v) for k, v in program.plan)
        program = replace(program, plan=plan, end=None)
    told: dict[str, Any] = {"error": "", "caught": "", "notes": [], "begin": 0}
    os.makedirs(Path(folder, f"files{rank}"), exist_ok=True)
    life = _Life(program, folder, rank, told)
    try:
        with surroundings(), poisoned_storage():
            if program.through == "trainer":
                within_limits(program, life.fit)
            else:
                life.train()
    except BaseException as error:
        told["error"] = (
            f"{type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__, limit=-8))}"
        )
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    torch.save(told, Path(folder, f"{name}{rank}.pt"))
    os._exit(0)  # whatever the others do


class _Life:
    def __init__(self, program: Program, folder: str, rank: int, told: dict[str, Any]) -> None:
        self.program, self.rank, self._told = program, rank, told
        self._path = Path(folder, CHECKPOINT)
        self._folder = str(Path(folder, f"files{rank}"))
        self._usual_s = 0.1

    # Through the module

    def train(self) -> None:
        program, path = self.program, self._path
        if program.ranks > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        backend = Engine(program, self.rank, self._folder)
        player = Player(program, backend)
        player.notes = self._told["notes"]
        begin = 0
        if path.exists():
            saved = torch.load(path, weights_only=False)
            begin = saved["step"]
            player.go_to(begin, saved["number"])
            backend.load_state(saved["model"])
            backend.load_optimizer_state(saved["optimizer"])
            if backend.schedule is not None:
                backend.schedule.load_state_dict(saved["schedule"])
        self._told["begin"] = begin
        for step in range(begin, program.steps):
            with self.ending(step):
                player.one_step(step)
                if program.end is None or program.end.how != "full_disk":
                    self._save(step + 1, player, backend)
            if program.end is not None and program.end.how == "full_disk":  # this file is the user's own
                self._save(step + 1, player, backend)
        player.finish()
        backend.close()

    def _save(self, step: int, player: Player, backend: Engine) -> None:
        model, optimizer = backend.module.full_state_dict(), backend.optimizer.state_dict()
        if self.rank == 0:
            schedule = None if backend.schedule is None else backend.schedule.state_dict()
            saved = {"model": model, "optimizer": optimizer, "schedule": schedule}
            torch.save({**saved, "step": step, "number": player.number}, f"{self._path}.new")
            os.replace(f"{self._path}.new", self._path)

    # Through the Trainer

    def fit(self, limits: dict[str, Any]) -> None:
        program = self.program
        has_hook = any(a.name in {*P_GRAD, "read_parameters", "grads"} for a in program.actions)
        module = (_WatchingLiving if has_hook else _Living)(program)
        module.life = self
        backend = InTrainer(program, module, self._folder)
        self._told["notes"].clear()
        module.player = Player(program, backend)
        module.player.notes = self._told["notes"]
        if self._path.exists():
            backend.earlier = Left(self._path, program.seed, bool(program.option("state_dict_type")))
        trainer = make_trainer(backend, limits, program.steps)
        trainer.fit(module, batches(program), ckpt_path=self._path if backend.earlier is not None else None)
        if trainer.interrupted:
            raise KeyboardInterrupt
        module.player.finish()
        backend.strategy.close()

    def begin(self, step: int) -> None:
        """A checkpoint after so many steps was loaded."""
        self._told["begin"] = step

    def save(self, save: Callable[[Path], None]) -> None:
        """A checkpoint over the earlier one. A full disk is caught, and training goes on without checkpoints."""
        if self._told["caught"]:
            return
        try:
            save(self._path)
        except StorageError as error:
            self._told["caught"] = f"{type(error).__name__}: {error}"

    # The end

    @contextmanager
    def ending(self, step: int) -> Iterator[None]:
        """Inside is a step with its checkpoint."""
        end = self.program.end
        begin_s = time.monotonic()
        if end is None or end.step != step or (end.is_of_one and self.rank != self.program.ranks - 1):
            yield
        elif end.how == "full_disk":
            limit = int(end.moment * _largest(self._path))
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            yield
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        else:
            sent = {"ctrl_c": signal.SIGINT, "terminate": signal.SIGTERM}.get(end.how)
            # Without a handler the kernel ends the process, wherever it is.
            signal.signal(
                signal.SIGALRM, signal.SIG_DFL if sent is None else lambda *_: os.kill(os.getpid(), sent or 0)
            )
            signal.setitimer(signal.ITIMER_REAL, max(1e-4, end.moment * self._usual_s))
            yield
            signal.setitimer(signal.ITIMER_REAL, 0)
        self._usual_s = time.monotonic() - begin_s


def _largest(path: Path) -> int:
    """Bytes of the largest file of a checkpoint."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return max((file.stat().st_size for file in files if file.exists()), default=4096)


class _Living(Module):
    """Writes a checkpoint after each step."""

    life: _Life

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index % self.program.micro_batches == 0:
            self._span = self.life.ending(self.trainer.global_step)
            self._span.__enter__()

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        super().on_train_batch_end(outputs, batch, index)
        if (index + 1) % self.program.micro_batches == 0:
            self.life.save(self.trainer.save_checkpoint)
            self._span.__exit__(None, None, None)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert self.player is not None
        checkpoint["number"] = self.player.number

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert self.player is not None
        self.player.go_to(checkpoint["global_step"], checkpoint["number"])
        self.life.begin(checkpoint["global_step"])


class _WatchingLiving(_Living, WatchingModule):
    """The same, with a hook between backward and step."""
