"""`load_library`: from a compiler, from the folder, and what is wrong with either."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lightning_elixir.core import cache
from lightning_elixir.kernels import compilation
from lightning_elixir.kernels.compilation import BuildError, find_compiler, load_library

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
    return sorted(folder.iterdir()) if folder.exists() else []


def refuse_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> bytes:
        raise AssertionError("compiled although there is a library")

    monkeypatch.setattr(compilation, "_compiled", refuse)


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


def plant(source: Path, folder: Path) -> Path:
    """In the place of the library that is kept, one that says 666, under a name that is right for it."""
    compiler = find_compiler()
    assert compiler is not None
    (good,) = files(folder)
    other = source.with_name("other.cpp")
    other.write_text(WORKS.replace("42", "666"))
    code = compilation._compiled(compiler, other)
    bad = folder / f"{good.name.rpartition('-')[0]}-{compilation._digest(code)}.so"
    good.unlink()
    bad.write_bytes(code)
    bad.chmod(0o600)
    return bad


def test_what_is_planted_is_loaded_where_it_is_ours(source: Path, folder: Path) -> None:
    """So that the tests below see something."""
    load_library(source, folder, check)
    plant(source, folder)
    assert load_library(source, folder, lambda library: None).answer() == 666


@pytest.mark.parametrize(
    ("what", "mode"),
    [("file", 0o602), ("folder", 0o702), ("folder", 0o777), ("folder", 0o1777), ("parent", 0o777), ("link", 0)],
)
def test_what_others_can_write_to_is_not_loaded(
    source: Path, folder: Path, what: str, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    load_library(source, folder, check)
    bad = plant(source, folder)
    target = {"file": bad, "folder": folder, "parent": folder.parent, "link": bad}[what]
    if what == "link":
        elsewhere = source.with_name("elsewhere.so")
        bad.rename(elsewhere)
        bad.symlink_to(elsewhere)
    else:
        target.chmod(mode)
    assert load_library(source, folder, check).answer() == 42
    assert what == "link" or f"everybody can write to {target} (chmod o-w" in caplog.text
    if what in ("folder", "parent"):
        assert "Make the folder yours alone, or set XDG_CACHE_HOME" in caplog.text
        assert files(folder) == [bad]  # and nothing is kept there
    else:
        assert len(files(folder)) == 2
        assert load_library(source, folder, check).answer() == 42


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
@pytest.mark.parametrize("what", ["folder", "parent", "group"])
def test_what_belongs_to_others_is_not_loaded(
    source: Path, folder: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    load_library(source, folder, check)
    plant(source, folder)
    target = folder.parent if what == "parent" else folder
    os.chown(target, 0 if what == "group" else 12345, 12345)
    if what == "group":
        target.chmod(0o770)
    assert load_library(source, folder, check).answer() == 42
    said = f"its group can write to {target}" if what == "group" else f"{target} belongs to the user 12345"
    assert said in caplog.text


def test_a_parent_with_a_sticky_bit_will_do(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of /tmp: others can make things there, and exchange none of ours."""
    load_library(source, folder, check)
    folder.parent.chmod(0o1777)
    refuse_to_compile(monkeypatch)
    assert load_library(source, folder, check).answer() == 42


def test_what_is_checked_is_what_is_loaded(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who exchanges files and folders at any moment between check and load."""
    load_library(source, folder, check)
    (good,) = files(folder)
    kept = folder.rename(folder.with_name("kept"))
    folder.mkdir()
    (folder / good.name).write_bytes((kept / good.name).read_bytes())
    bad = plant(source, folder).read_bytes()
    for path in files(folder):
        path.unlink()
    folder.rmdir()
    kept.rename(folder)
    read, load = compilation.PrivateFolder.read, compilation._loaded

    def exchange() -> None:
        if (folder / good.name).read_bytes() != bad:
            (folder / good.name).unlink()
            (folder / good.name).write_bytes(bad)

    def reading(self: compilation.PrivateFolder, name: str) -> tuple[bytes, float]:
        if folder.exists() and not kept.exists():
            folder.rename(kept)  # the folder, after it was opened
            folder.mkdir()
            (folder / good.name).write_bytes(bad)
        return read(self, name)

    def loading(code: bytes, check: compilation.Check) -> ctypes.CDLL:
        exchange()  # the file, after it was read
        return load(code, check)

    monkeypatch.setattr(compilation.PrivateFolder, "read", reading)
    monkeypatch.setattr(compilation, "_loaded", loading)
    refuse_to_compile(monkeypatch)
    assert load_library(source, folder, lambda library: None).answer() == 42


def test_two_libraries_are_two(tmp_path: Path) -> None:
    """The loader knows libraries by their names."""
    sources = [tmp_path / f"{number}.cpp" for number in range(3)]
    for number, path in enumerate(sources):
        path.write_text(WORKS.replace("42", str(number)))
    assert [load_library(path, None, lambda library: None).answer() for path in sources] == [0, 1, 2]


def test_a_temporary_folder_that_others_can_write_to_is_passed_by(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    assert load_library(source, None, check).answer() == 42
    assert files(tmp_path / "shared") == []
    monkeypatch.setattr(cache, "_OTHER_TEMPORARY_FOLDERS", ())
    with pytest.raises(BuildError, match=r"everybody can write to .*shared.*; set TMPDIR"):
        load_library(source, None, check)
    assert files(tmp_path / "shared") == []


def test_folder_that_cannot_be_written_is_gone_without(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert load_library(source, tmp_path / "cache" / "kernels", check).answer() == 42


def test_folder_that_nothing_is_loaded_from_is_gone_without(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system mounted noexec."""
    load = ctypes.CDLL

    def refuse(name: str) -> ctypes.CDLL:
        if name.startswith(("/proc", str(folder))):
            raise OSError(f"{name}: failed to map segment from shared object")
        return load(name)

    monkeypatch.setattr(compilation.ctypes, "CDLL", refuse)
    for _ in range(2):
        assert load_library(source, folder, check).answer() == 42


def test_nothing_can_be_written(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise OSError("Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(BuildError, match="Read-only file system.*set TMPDIR"):
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
    monkeypatch.setattr(compilation, "_TIMEOUT_S", 0.1)
    with pytest.raises(BuildError, match="took more than"):
        load_library(source, folder, check)
    assert files(folder) == []


def test_library_that_gives_wrong_results(source: Path, folder: Path) -> None:
    source.write_text(WORKS.replace("42", "41"))
    with pytest.raises(BuildError, match="does not pass its test: the answer is 41"):
        load_library(source, folder, check)


def test_several_processes_at_once(source: Path, folder: Path) -> None:
    code = """
import importlib.util, sys, types
from pathlib import Path
for name in ("lightning_elixir", "lightning_elixir.core"):  # without torch, which takes long
    sys.modules[name] = types.ModuleType(name)
for name, path in (("lightning_elixir.core.cache", sys.argv[4]), ("compilation", sys.argv[1])):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
compilation = sys.modules["compilation"]
print(compilation.load_library(Path(sys.argv[2]), Path(sys.argv[3]), lambda library: None).answer())
"""
    command = [sys.executable, "-c", code, compilation.__file__, str(source), str(folder), cache.__file__]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate(timeout=60)[0] for process in running] == ["42\n"] * 4
    assert all(path.suffix == ".so" and not path.name.startswith(".") for path in files(folder))
