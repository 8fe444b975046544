"""Sharded checkpoints from GPUs, with the bodies of the tests for the CPU: loss scale, device generators, NCCL."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts; makes its results repeatable

import pytest
import torch

from lightning_elixir.checkpoint import CheckpointIndex
from tests.helpers.cut_up import cut_up
from tests.helpers.dist import run_ranks
from tests.strategy.models import CHUNK
from tests.strategy.sharded import OPTIONS, SHARDED, MixedNet, assert_same_dump, load, save, train_on

pytestmark = pytest.mark.gpu

CUDA: dict[str, Any] = {"accelerator": "cuda"}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {"placement_policy": "cpu", **CHUNK, **SHARDED},
    "cuda": OPTIONS["cuda"],
    "all on nvme": OPTIONS["all on nvme"],
}


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _resumed(folder: Path, precision: str, placement: str, async_save: bool, devices: int) -> Any:
    torch.use_deterministic_algorithms(True)
    options = {**PLACEMENTS[placement], "async_save": async_save}
    if "nvme_offload_fraction" in options:
        options["nvme_offload_dir"] = str(folder)
    if precision == "16-mixed":  # some steps are skipped, and the scale grows again: it is not what it began with
        options |= {"initial_scale": 2.0**21, "growth_interval": 2}
    more = {**CUDA, "precision": precision}
    expected = train_on(None, options, devices, more)
    path = folder / "saved" / "step=3.ckpt"
    resumed = train_on(path, options, devices, more)
    return expected, resumed


def _assert_continued(expected: Any, resumed: Any) -> None:
    assert len(resumed[0]) < len(expected[0])
    assert resumed[0] == expected[0][-len(resumed[0]) :]
    if resumed[1][0]:
        assert_same_dump(resumed[1], expected[1])


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_resumed_run_equals_the_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, placement: str, async_save: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    _assert_continued(*_resumed(tmp_path, precision, placement, async_save, 1))


def test_the_loss_scale_is_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _resumed(tmp_path, "16-mixed", "cpu", False, 1)
    own = CheckpointIndex(tmp_path / "saved" / "step=3.ckpt").meta(weights_only=True)["lightning_elixir"]
    assert own["loss_scaler"]["scale"] != 2.0**21


@pytest.mark.parametrize("cut", [contextlib.nullcontext, cut_up])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_from_the_gpu_to_the_cpu_and_back(tmp_path: Path, placement: str, cut: Any) -> None:
    path = tmp_path / "one.ckpt"
    with cut():
        expected = save(path, PLACEMENTS[placement], MixedNet, 1, CUDA)
        assert_same_dump(load(path, OPTIONS["tight"], MixedNet, 1, {}), expected)
        assert_same_dump(load(path, PLACEMENTS["all on nvme"], MixedNet, 1, CUDA), expected)
        assert_same_dump(load(path, PLACEMENTS["cuda"], MixedNet, 1, CUDA), expected)


@pytest.mark.several_gpus(2)
@pytest.mark.parametrize(
    ("precision", "placement", "async_save"),
    [("32-true", "cpu", True), ("16-mixed", "cuda", True), ("bf16-mixed", "all on nvme", False)],
)
def test_resuming_on_two_gpus(tmp_path: Path, precision: str, placement: str, async_save: bool) -> None:
    found = run_ranks(_resumed, 2, tmp_path, precision, placement, async_save, 2, device="cuda", init_group=False)
    for expected, resumed in found:
        _assert_continued(expected, resumed)
