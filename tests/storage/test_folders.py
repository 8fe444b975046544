"""A folder that is none is told of as what it is, whoever is asked to offload there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elixir import HybridAdam
from lightning_elixir.core.comm import SoloComm
from lightning_elixir.errors import StorageError
from lightning_elixir.profiling.nvme_speed import free_disk_bytes
from lightning_elixir.storage.nvme.folders import check_folder, is_in_memory


def _optimize(folder: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(8))
    parameter.grad = torch.ones(8)
    HybridAdam([parameter], nvme_offload_fraction=1.0, nvme_offload_dir=folder).step()


@pytest.mark.parametrize("use", [check_folder, is_in_memory, _optimize])
def test_a_file_is_no_folder(use: Callable[[Path], object], tmp_path: Path) -> None:
    file = tmp_path / "disk"
    file.write_text("a file")
    hint = r"\. Name a folder on the disk to offload to \(nvme_offload_dir\)"
    for folder, problem in (
        (file, "it is a file, not a folder"),
        (file / "below" / "it", f"{file} is a file, not a folder"),
    ):
        with pytest.raises(StorageError, match=f"{folder} cannot be used to offload to: {problem}{hint}") as caught:
            use(folder)
        assert caught.value.path == folder
    assert file.read_text() == "a file"


def test_what_else_is_no_folder(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    with pytest.raises(StorageError, match="it is a link to nothing, not a folder"):
        check_folder(link)
    with pytest.raises(StorageError, match="/dev/null is a device or the like, not a folder"):
        check_folder("/dev/null/below")


def test_what_can_be_a_folder(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for folder in (tmp_path, tmp_path / "to" / "be" / "made", link, link / "to" / "be" / "made"):
        check_folder(folder)


def test_a_file_has_no_disk_to_measure(tmp_path: Path) -> None:
    file = tmp_path / "disk"
    file.write_text("a file")
    with pytest.raises(StorageError, match=re.escape(f"the disk of {file} cannot be measured: it is a file, not a")):
        free_disk_bytes(file, SoloComm())


def test_a_folder_that_another_rank_makes_meanwhile_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, look = tmp_path / "states", os.stat

    def look_and_make(path: Any, **options: Any) -> os.stat_result:
        try:
            return look(path, **options)
        finally:
            with suppress(FileExistsError):
                os.mkdir(folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", look_and_make)
        check_folder(folder)
    assert folder.is_dir()
