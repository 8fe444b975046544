"""Compiles a C++ source on first use and loads it.

[Note: no locks] Processes that start together compile together: each writes a file of its own and moves it into place,
and none ever waits for another (a lock outlives a killed process, and then hangs the next run). The name of a file
tells what it was compiled from and what is in it, so that one that is stale, truncated or half written is never loaded.
What others could have written is not loaded either (Note: whose files, `core/cache.py`): the bytes that were checked
are those that are loaded, from memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_elixir.core.cache import NotPrivateError, PrivateFolder, private_temporary_folder

log = logging.getLogger(__name__)

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
        folder: Where libraries are kept; made when needed. None, or one that cannot be written, or that others can
            write to (a warning tells): nothing is taken from there, and nothing kept.
        check: Raises if the library does not do what it should.

    Raises:
        BuildError: There is no library that works.
    """
    text = source.read_bytes()
    origin = _digest(text, *(flag.encode() for flag in (*FLAGS, sys.platform, platform.machine())))
    compiler = find_compiler()
    prefix = f"{source.stem}-{origin}-" + ("" if compiler is None else _digest(compiler.version.encode()) + "-")
    for code in _kept(folder, prefix):
        with suppress(BuildError):
            return _loaded(code, check)
    if compiler is None:
        wanted = os.environ.get("CXX")
        what = f"the compiler that CXX names ({wanted}) cannot be run" if wanted else "there is no C++ compiler"
        raise BuildError(f"{what}; install g++ or clang++, or name one in CXX")
    code = _compiled(compiler, source)
    library = _loaded(code, check)
    if folder is not None:
        with suppress(OSError), PrivateFolder(folder, make=True) as kept:  # no room, or read-only
            kept.write(f"{prefix}{_digest(code)}{_LIBRARY_SUFFIX}", code)
    return library


def _kept(folder: Path | None, prefix: str) -> Iterator[bytes]:
    """What is in files in the folder that are ours and whole."""
    if folder is None:
        return
    try:
        kept = PrivateFolder(folder)
    except NotPrivateError as error:
        log.warning(
            "compiled kernels are neither taken from %s nor kept there, since %s; they are compiled for this run alone."
            " Make the folder yours alone, or set XDG_CACHE_HOME",
            folder,
            error,
        )
        return
    except OSError:
        return
    with kept:
        for name in kept.names():
            if not name.startswith(prefix) or not name.endswith(_LIBRARY_SUFFIX):
                continue
            try:
                code, _ = kept.read(name)
            except NotPrivateError as error:
                log.warning("the compiled kernel %s is not loaded, since %s", kept.path / name, error)
                continue
            except OSError:
                continue
            if name.removesuffix(_LIBRARY_SUFFIX).endswith(_digest(code)):
                yield code


def _compiled(compiler: Compiler, source: Path) -> bytes:
    """What the compiler makes, in a folder that no other user can write to."""
    try:
        with private_temporary_folder() as folder:
            path = folder.path / f"made{_LIBRARY_SUFFIX}"
            try:
                command = [*compiler.command, *FLAGS, str(source), "-o", str(path)]
                # Its own temporary files are part of the way, too.
                _run(command, timeout_s=_TIMEOUT_S, environment={**os.environ, "TMPDIR": str(folder.path)})
            except subprocess.TimeoutExpired as error:
                raise BuildError(f"{compiler.command[0]} took more than {_TIMEOUT_S:.0f} s") from error
            except subprocess.CalledProcessError as error:
                said = (error.stderr or "").strip().splitlines()
                first = next(
                    (line for line in said if "error" in line), said[0] if said else f"exit {error.returncode}"
                )
                raise BuildError(f"{compiler.command[0]} could not compile {source.name}: {first}") from error
            return path.read_bytes()
    except OSError as error:
        raise BuildError(f"nothing can be compiled in a temporary folder ({error}); set TMPDIR") from error


def _loaded(code: bytes, check: Check) -> ctypes.CDLL:
    """The library that these bytes are: no other user can exchange them between their check and this."""
    library = _loaded_from_memory(code)
    if library is None:
        try:
            with private_temporary_folder() as folder:
                name = f"{_digest(code)}{_LIBRARY_SUFFIX}"
                folder.write(name, code)
                library = ctypes.CDLL(str(folder.path / name))  # whose calls let go of the GIL
        except OSError as error:
            raise BuildError(
                f"the compiled library cannot be loaded: {error}; set TMPDIR to a folder that is yours, and not noexec"
            ) from error
    try:
        check(library)
    except Exception as error:
        raise BuildError(f"the compiled library does not pass its test: {error}") from error
    return library


def _loaded_from_memory(code: bytes) -> ctypes.CDLL | None:
    """Loaded without a file system, of which some forbid that; None where that is not possible."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = os.memfd_create("lightning_elixir")
    except OSError:
        return None
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(code)
        library = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except OSError:
        os.close(descriptor)
        return None
    # It stays open: the loader knows libraries by name, and would take a later one with this number for this one.
    return library


def _run(command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> str:
    none, pipe = subprocess.DEVNULL, subprocess.PIPE
    done = subprocess.run(  # noqa: S603 - the compiler that the user has
        command,
        check=True,
        stdin=none,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
        timeout=timeout_s,
        env=environment,
    )
    return done.stdout


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
