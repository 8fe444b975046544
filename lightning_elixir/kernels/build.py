"""Compiles a C++ source on first use and loads it.

[Note: no locks] Processes that start together compile together: each writes a file of its own and moves it into place,
and none ever waits for another (a lock outlives a killed process, and then hangs the next run). The name of a file
tells what it was compiled from and what is in it, so that one that is stale, truncated or half written is never loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-pthread",
    "-ffp-contract=off",  # a fused multiply-add rounds once where the written sequence rounds twice
    "-fno-math-errno",  # vectorised roots
    "-fno-trapping-math",  # vectorised choices
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
)
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_S = 120.0
_LIBRARY_SUFFIX = ".so"  # on macOS too: what is loaded by its path may be called as it likes

Check = Callable[[ctypes.CDLL], None]


class BuildError(Exception):
    """There is no library that works; says why, and what helps."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that answers."""

    command: tuple[str, ...]
    version: str
    """All that `--version` prints."""


def find_compiler() -> Compiler | None:
    """`$CXX`, or the first compiler in the path that answers."""
    given = shlex.split(os.environ.get("CXX", ""))
    for command in [given] if given else [[name] for name in _COMPILERS]:
        if shutil.which(command[0]) is not None:
            with suppress(OSError, subprocess.SubprocessError):
                return Compiler(tuple(command), _run([*command, "--version"], timeout_s=20.0))
    return None


def load_library(source: Path, folder: Path | None, check: Check) -> ctypes.CDLL:
    """A library compiled from the source, out of the folder or made now.

    Args:
        source: One C++ file.
        folder: Where libraries are kept; made when needed. None, or one that cannot be written: nothing is kept.
        check: Raises if the library does not do what it should.

    Raises:
        BuildError: There is no library that works.
    """
    text = source.read_bytes()
    origin = _digest(text, *(flag.encode() for flag in (*FLAGS, sys.platform, platform.machine())))
    compiler = find_compiler()
    prefix = f"{source.stem}-{origin}-" + ("" if compiler is None else _digest(compiler.version.encode()) + "-")
    for path in _kept(folder, prefix):
        with suppress(BuildError):
            return _loaded(path, check)
    if compiler is None:
        wanted = os.environ.get("CXX")
        what = f"the compiler that CXX names ({wanted}) cannot be run" if wanted else "there is no C++ compiler"
        raise BuildError(f"{what}; install g++ or clang++, or name one in CXX")
    if folder is not None:
        try:
            path = _compiled(compiler, source, folder, prefix)
            return _loaded(path, check)
        except (OSError, _NotLoaded):  # no room, read-only, or mounted noexec: there may be a place that is not
            pass
    try:
        with tempfile.TemporaryDirectory(prefix="lightning_elixir-") as private:
            return _loaded(_compiled(compiler, source, Path(private), prefix), check)
    except OSError as error:
        raise BuildError(f"a library can be written to no folder ({error}); set XDG_CACHE_HOME") from error


class _NotLoaded(BuildError):
    """The system does not load the file."""


def _kept(folder: Path | None, prefix: str) -> Iterator[Path]:
    """Files in the folder that are ours and whole."""
    if folder is None:
        return
    for path in sorted(folder.glob(f"{prefix}*{_LIBRARY_SUFFIX}")):
        with suppress(OSError):
            # In a folder that others may write to, somebody else's file is somebody else's code.
            is_own = not hasattr(os, "getuid") or path.stat().st_uid in (os.getuid(), 0)
            if is_own and path.stem.endswith(_digest(path.read_bytes())):
                yield path


def _compiled(compiler: Compiler, source: Path, folder: Path, prefix: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".building-", suffix=_LIBRARY_SUFFIX)
    os.close(descriptor)
    made = Path(name)
    try:
        try:
            _run([*compiler.command, *FLAGS, str(source), "-o", name], timeout_s=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{compiler.command[0]} took more than {_TIMEOUT_S:.0f} s") from error
        except subprocess.CalledProcessError as error:
            said = (error.stderr or "").strip().splitlines()
            first = next((line for line in said if "error" in line), said[0] if said else f"exit {error.returncode}")
            raise BuildError(f"{compiler.command[0]} could not compile {source.name}: {first}") from error
        path = folder / f"{prefix}{_digest(made.read_bytes())}{_LIBRARY_SUFFIX}"
        os.replace(made, path)
        return path
    finally:
        with suppress(OSError):
            made.unlink()


def _loaded(path: Path, check: Check) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))  # whose calls let go of the GIL
    except OSError as error:
        raise _NotLoaded(f"the compiled library cannot be loaded: {error}") from error
    try:
        check(library)
    except Exception as error:
        raise BuildError(f"the compiled library does not pass its test: {error}") from error
    return library


def _run(command: Sequence[str], timeout_s: float) -> str:
    none, pipe = subprocess.DEVNULL, subprocess.PIPE
    done = subprocess.run(  # noqa: S603 - the compiler that the user has
        command, check=True, stdin=none, stdout=pipe, stderr=pipe, text=True, errors="replace", timeout=timeout_s
    )
    return done.stdout


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
