"""Folders that nobody else can write to, and what is read from them."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from lightning_elixir.core import cache
from lightning_elixir.core.cache import NotPrivateError, PrivateFolder, private_temporary_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with PrivateFolder(tmp_path / "a" / "b", make=True) as made:
        made.write("file", b"content")
    return tmp_path / "a" / "b"


def test_what_is_made_is_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with PrivateFolder(tmp_path / "a" / "b", make=True) as made:
            made.write("file", b"one")
            made.write("file", b"two")
            assert made.names() == ["file"]
            assert made.read("file")[0] == b"two"
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b", "a/b/file")]
    assert modes == [0o700, 0o700, 0o600]


def test_what_is_not_there(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PrivateFolder(tmp_path / "none")
    with pytest.raises(NotADirectoryError):
        PrivateFolder(folder / "file" / "below", make=True)
    with PrivateFolder(folder) as there, pytest.raises(FileNotFoundError):
        there.read("none")


def test_links_on_the_way_are_followed_once(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    with PrivateFolder(tmp_path / "link") as found:
        assert found.path == folder.resolve()
        assert found.read("file")[0] == b"content"


@pytest.mark.parametrize("mode", [0o702, 0o777, 0o1777])
def test_a_folder_that_others_can_write_to(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(NotPrivateError, match=rf"everybody can write to {folder} \(chmod o-w"):
        PrivateFolder(folder)
    folder.chmod(0o755)
    with PrivateFolder(folder) as found:
        assert found.names() == ["file"]


def test_a_way_on_which_others_can_exchange_folders(folder: Path) -> None:
    folder.parent.chmod(0o777)
    with pytest.raises(NotPrivateError, match=rf"everybody can write to {folder.parent} "):
        PrivateFolder(folder)
    with pytest.raises(NotPrivateError):
        PrivateFolder(folder / "more", make=True)
    assert not (folder / "more").exists()
    folder.parent.chmod(0o1777)
    PrivateFolder(folder).__exit__()


def test_files_that_are_not_ours_alone(folder: Path) -> None:
    (folder / "file").chmod(0o606)
    (folder / "link").symlink_to(folder / "file")
    os.mkfifo(folder / "pipe")
    (folder / "inner").mkdir()
    with PrivateFolder(folder) as found:
        with pytest.raises(NotPrivateError, match="everybody can write"):
            found.read("file")
        with pytest.raises(OSError, match="symbolic links"):
            found.read("link")
        for name in ("pipe", "inner"):
            with pytest.raises(NotPrivateError, match="not a plain file"):
                found.read(name)


def test_what_cannot_be_written_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **settings: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(cache.os, "replace", fail)
    with PrivateFolder(folder) as found, pytest.raises(OSError, match="disk full"):
        found.write("file", b"other")
    assert [p.read_bytes() for p in folder.iterdir()] == [b"content"]


def test_descriptors_are_closed(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    folder.chmod(0o777)
    for _ in range(3):
        with pytest.raises(NotPrivateError):
            PrivateFolder(folder)
    folder.chmod(0o700)
    with PrivateFolder(folder) as found:
        found.read("file")
    with private_temporary_folder() as temporary:
        path = temporary.path
        temporary.write("x", b"")
    assert not path.exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cache, "_OTHER_TEMPORARY_FOLDERS", ())
    with private_temporary_folder() as found:
        assert found.path.parent == tmp_path.resolve()
    tmp_path.chmod(0o777)
    with pytest.raises(NotPrivateError, match="everybody"), private_temporary_folder():
        pass
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_folders_of_others(folder: Path) -> None:
    os.chown(folder, 12345, -1)
    with pytest.raises(NotPrivateError, match=f"{folder} belongs to the user 12345"):
        PrivateFolder(folder)
    os.chown(folder, 0, 12345)
    folder.chmod(0o770)
    with pytest.raises(NotPrivateError, match=rf"its group can write to {folder} \(chmod g-w"):
        PrivateFolder(folder)
    folder.chmod(0o700)
    os.chown(folder.parent, 12345, -1)
    with pytest.raises(NotPrivateError, match="who can exchange what is in it"):
        PrivateFolder(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
@pytest.mark.parametrize(
    ("users", "is_trusted"),
    [
        ("0 0 4294967295", False),
        ("0 100000 65536", True),
        ("0 1000 1\n1 100000 65536", True),
        ("", True),
        (None, False),
    ],
)
def test_a_way_through_folders_of_users_whom_a_container_does_not_know(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: str | None, is_trusted: bool
) -> None:
    """Outside of one the same number is an account that others may have."""
    table = tmp_path / "uid_map"
    if users is not None:
        table.write_text(f"{users}\n")
    monkeypatch.setattr(cache, "_UID_MAP", table)
    os.chown(folder.parent, 65534, -1)
    if is_trusted:
        PrivateFolder(folder).__exit__()
    else:
        with pytest.raises(NotPrivateError, match="who can exchange what is in it"):
            PrivateFolder(folder)
