"""`load_library`: from a compiler, from the folder, and what is wrong with either."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_elixir.kernels import build
from lightning_elixir.kernels.build import BuildError, find_compiler, load_library

if find_compiler() is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

WORKS = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "deep.cpp"
    path.write_text(WORKS)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kernels"


def check(library: ctypes.CDLL) -> None:
    if library.answer() != 42:
        raise ValueError(f"the answer is {library.answer()}")


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def refuse_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> Path:
        raise AssertionError("compiled although there is a library")

    monkeypatch.setattr(build, "_compiled", refuse)


def test_second_load_compiles_nothing(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_library(source, folder, check)
    assert len(files(folder)) == 1
    refuse_to_compile(monkeypatch)
    assert load_library(source, folder, check).answer() == 42


def test_changed_source_is_compiled_anew(source: Path, folder: Path) -> None:
    load_library(source, folder, check)
    source.write_text(WORKS.replace("42", "43"))
    assert load_library(source, folder, lambda library: None).answer() == 43


def test_without_a_folder_it_works_all_the_same(source: Path) -> None:
    assert load_library(source, None, check).answer() == 42


@pytest.mark.parametrize("damage", ["truncated", "half", "flipped", "empty"])
def test_damaged_file_is_not_loaded_and_is_replaced(source: Path, folder: Path, damage: str) -> None:
    load_library(source, folder, check)
    (path,) = files(folder)
    whole = path.read_bytes()
    broken = {
        "truncated": whole[:-100],
        "half": whole[: len(whole) // 2],
        "flipped": whole.replace(b"answer", b"answes"),
        "empty": b"",
    }[damage]
    path.unlink()  # the process still has the old file mapped
    path.write_bytes(broken)
    assert load_library(source, folder, check).answer() == 42
    assert [p.read_bytes() == whole for p in files(folder)] == [True]


def test_file_of_another_user_is_not_loaded(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_library(source, folder, check)
    (path,) = files(folder)
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, 12345)
    refuse_to_compile(monkeypatch)
    with pytest.raises(AssertionError, match="although there is a library"):
        load_library(source, folder, check)


def test_folder_that_cannot_be_written_is_gone_without(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert load_library(source, tmp_path / "cache" / "kernels", check).answer() == 42


def test_folder_that_nothing_is_loaded_from_is_gone_without(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system mounted noexec."""
    load = ctypes.CDLL

    def refuse(name: str) -> ctypes.CDLL:
        if name.startswith(str(folder)):
            raise OSError(f"{name}: failed to map segment from shared object")
        return load(name)

    monkeypatch.setattr(build.ctypes, "CDLL", refuse)
    assert load_library(source, folder, check).answer() == 42


def test_nothing_can_be_written(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise OSError("Read-only file system")

    monkeypatch.setattr(build.tempfile, "mkstemp", refuse)
    with pytest.raises(BuildError, match="Read-only file system.*XDG_CACHE_HOME"):
        load_library(source, None, check)


def test_no_compiler(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=r"there is no C\+\+ compiler; install g\+\+"):
        load_library(source, folder, check)


def test_no_compiler_but_a_library(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_library(source, folder, check)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert load_library(source, folder, check).answer() == 42


def test_compiler_of_the_environment(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = find_compiler()
    assert compiler is not None
    monkeypatch.setenv("CXX", f"{compiler.command[0]} -DUNUSED=1")
    found = find_compiler()
    assert found is not None
    assert found.command == (compiler.command[0], "-DUNUSED=1")
    assert load_library(source, folder, check).answer() == 42
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(BuildError, match="CXX names .*nowhere"):
        load_library(source, None, check)


def test_source_that_does_not_compile(source: Path, folder: Path) -> None:
    source.write_text("int broken(\n")
    with pytest.raises(BuildError, match=r"could not compile deep.cpp: .*error"):
        load_library(source, folder, check)
    assert files(folder) == []


def test_compiler_that_takes_too_long(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = source.with_name("slow")
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\nexec sleep 60\n')
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(build, "_TIMEOUT_S", 0.1)
    with pytest.raises(BuildError, match="took more than"):
        load_library(source, folder, check)
    assert files(folder) == []


def test_library_that_gives_wrong_results(source: Path, folder: Path) -> None:
    source.write_text(WORKS.replace("42", "41"))
    with pytest.raises(BuildError, match="does not pass its test: the answer is 41"):
        load_library(source, folder, check)


def test_several_processes_at_once(source: Path, folder: Path) -> None:
    code = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("build", sys.argv[1])
build = sys.modules["build"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
print(build.load_library(Path(sys.argv[2]), Path(sys.argv[3]), lambda library: None).answer())
"""
    command = [sys.executable, "-c", code, build.__file__, str(source), str(folder)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate(timeout=60)[0] for process in running] == ["42\n"] * 4
    assert all(path.suffix == ".so" and not path.name.startswith(".") for path in files(folder))
