"""Plants one fault after the other in a copy of the tree, and runs the tests over it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tests.faults.table import PACKAGE, Fault

ROOT = Path(__file__).parents[2]
TIERS = ("default", "full")
_OWN = "tests/faults"
_MARK = "LIGHTNING_ELIXIR_FAULT"
"""In the environment of whatever a run starts: processes with sessions of their own are found by it."""
_USAGE, _NO_TESTS = 4, 5  # what pytest exits with where it was called wrongly, and where no test was selected
_RESULT = re.compile(r"^(tests/\S+(?:::.*?)?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_STARTED = re.compile(r"^(tests/\S+::.*?) ?$")
_AT_COLLECTION = re.compile(r"^ERROR (tests/\S+)", re.MULTILINE)

Stage = Literal["first", "near", "rest", "all"]


@dataclass(frozen=True)
class Limits:
    """Seconds that may be taken."""

    test_s: float
    fault_s: float
    """All tests over one fault."""


@dataclass(frozen=True)
class Finding:
    """What the tests made of one fault."""

    fault: str
    test: str | None
    """The first that failed; None: the fault was not found."""
    how: str = ""
    """What was wrong with it."""
    stage: Stage = "all"
    """Among which tests it was."""
    seconds: float = 0.0


def look_for(fault: Fault, tier: str, limits: Limits, *, is_near_first: bool, first: Sequence[str] = ()) -> Finding:
    """Run the tests of a tier over a copy of the tree with the fault, those in the files `first` before all others.
    What fails must pass without it."""
    with _copy(ROOT) as copy:
        path = copy / PACKAGE / fault.path
        text = path.read_text()
        path.write_text(fault.planted(text))
        begin_s = time.monotonic()
        stages: list[tuple[Stage, Sequence[str]]] = [("all", ())]
        if first or is_near_first:
            near = [name for name in near_files(copy, fault.path) if name not in first] if is_near_first else []
            stages = [("first", first), ("near", near), ("rest", rest_of(copy, [*first, *near], fault))]
        for stage, files in stages:
            if stage != "all" and not files:
                continue
            left = replace(limits, fault_s=limits.fault_s - (time.monotonic() - begin_s))
            test, how = _run_tests(copy, files, tier, left, fault.name)
            if not how:
                continue
            seconds = time.monotonic() - begin_s
            path.write_text(text)
            if test is not None and _run_tests(copy, [test], tier, limits, fault.name)[1]:
                test, how = None, f"{test} fails without the fault as well"
            return Finding(fault.name, test, how, stage, seconds)
        return Finding(fault.name, None, "not found", stages[-1][0], time.monotonic() - begin_s)


def near_files(root: Path, path: str) -> list[str]:
    """Test files that are named after a module of the package, or import it, by themselves or through modules of tests
    that they import; the ones with its name first."""
    module = Path(path).with_suffix("")
    dotted = ".".join((PACKAGE, *module.parts))
    package, _, name = dotted.rpartition(".")
    imported = re.compile(
        rf"(?:from|import) {re.escape(dotted)}\b|from {re.escape(package)} import [^\n]*\b{re.escape(name)}\b"
    )
    files = _test_files(root)
    shared = {f for f in (root / "tests").rglob("*.py") if f not in files and imported.search(f.read_text())}
    shared = {".".join(f.relative_to(root).with_suffix("").parts) for f in shared}
    named = [f for f in files if re.fullmatch(rf"test_{re.escape(name)}(?:_\w+)?\.py", f.name)]
    named.sort(key=lambda f: f.stem != f"test_{name}")
    others = [f for f in files if f not in named and (imported.search(f.read_text()) or shared & _tests_used(f))]
    return [str(f.relative_to(root)) for f in (*named, *others)]


def _tests_used(file: Path) -> set[str]:
    """Dotted names of what it imports of `tests`, modules among them."""
    found = re.findall(r"^from (tests[\w.]*) import (\w+)", file.read_text(), re.MULTILINE)
    return {name for module, member in found for name in (module, f"{module}.{member}")}


def rest_of(root: Path, near: Sequence[str], fault: Fault) -> list[str]:
    """All other test files: those about what the fault is about first, as their names tell, and of them those of the
    module's room; then the others of that room."""
    folder, *inside = Path(fault.path).parts
    rooms = (folder,) if inside else ("runtime", "strategy")
    about = fault.room.removesuffix("s")
    names = [str(f.relative_to(root)) for f in _test_files(root)]
    rest = [name for name in names if name not in near]
    return sorted(rest, key=lambda name: (about not in Path(name).name, Path(name).parts[1] not in rooms))


def _test_files(root: Path) -> list[Path]:
    return sorted(f for f in (root / "tests").rglob("test_*.py") if root / _OWN not in f.parents)


def _run_tests(copy: Path, files: Sequence[str], tier: str, limits: Limits, name: str) -> tuple[str | None, str]:
    """As `verdict`."""
    output = copy / "pytest.out"
    command = [sys.executable, "-m", "pytest", "-x", "-v", "--tb=no", "--no-header", "-p", "no:cacheprovider"]
    command += ["-m", _markers(copy, tier), f"--timeout={limits.test_s:g}", f"--ignore={_OWN}", *files]
    mark = f"{name}-{os.getpid()}"
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", _MARK: mark}
    with output.open("wb") as file:
        run = subprocess.Popen(
            command, cwd=copy, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        silent_s = 0.0
        try:
            code: int | None = run.wait(max(1.0, limits.fault_s))
        except subprocess.TimeoutExpired:
            code, silent_s = None, time.time() - output.stat().st_mtime
        finally:
            _end_all(run, f"{_MARK}={mark}")
    return verdict(code, output.read_text(errors="replace"), is_hanging=silent_s > limits.test_s)


def _markers(root: Path, tier: str) -> str:
    has_full = '"full:' in (root / "pyproject.toml").read_text()  # pytest refuses a name that is not registered
    return "not gpu and not full" if tier == "default" and has_full else "not gpu"


def verdict(code: int | None, output: str, *, is_hanging: bool = False) -> tuple[str | None, str]:
    """The first test that failed, if one did, and what is wrong; empty: nothing.

    Args:
        code: Pytest's exit status; None: it was ended, since all tests together took too long.
        output: What it has printed.
        is_hanging: Whether that was because of one test alone.

    Raises:
        RuntimeError: It cannot be called like that.
    """
    failed = last = None
    for line in output.splitlines():
        result, started = _RESULT.match(line), _STARTED.match(line)
        if result is not None:
            last = result[1]
            failed = failed or (last if result[2] in ("FAILED", "ERROR") else None)
        elif started is not None:  # its result has not come
            last = started[1]
    at_collection = _AT_COLLECTION.search(output)
    if failed is not None:
        return failed, "failed"
    if code in (0, _NO_TESTS):
        return None, ""
    if code is None:
        return (last, "did not end") if is_hanging else (None, "the tests took too long")
    if at_collection is not None:
        return at_collection[1], "could not be collected"
    if code == _USAGE:
        raise RuntimeError(output)
    return last, "took too long" if "Timeout" in output else f"ended pytest with {code}"


@contextmanager
def _copy(root: Path) -> Iterator[Path]:
    """The tree as git knows it, with what has changed since."""
    with tempfile.TemporaryDirectory(prefix="elixir-fault-", ignore_cleanup_errors=True) as folder:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, target)
        yield Path(folder)


def _end_all(run: subprocess.Popen[bytes], mark: str) -> None:
    """End the process, its group, and the groups of whatever else it has started."""
    with suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
