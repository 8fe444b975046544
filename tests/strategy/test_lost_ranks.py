"""A rank that fails by itself, or is killed, ends the others soon, with an error that names it."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_elixir._lightning import pl
from lightning_elixir.checkpoint import CheckpointIndex
from lightning_elixir.storage.nvme import direct
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.dist import run_processes, run_ranks, stop_workers
from tests.helpers.failures import SOON_S, check_heard, heard_by
from tests.helpers.tiers import crossed, full, telling
from tests.strategy.models import TIGHT, Net, assert_same_state, fit, make_data, make_trainer
from tests.strategy.nets import VICTIM, NetThatDies, NetThatLogs, NetThatStumbles, rank_and_world_size

ON_NVME = {
    "placement_policy": "cpu",
    "nvme_offload_fraction": 1.0,
    "nvme_offload_param_fraction": 1.0,
    "chunk_size": "32KiB",
    "nvme_offload_dir": "nvme",
}


@pytest.fixture(scope="module", autouse=True)
def no_others_in_these_processes() -> Iterator[None]:
    """Most of the time goes into starting processes, so these tests share theirs, in which ranks fail time and again;
    what comes after them is spared that."""
    yield
    stop_workers()


class NetOnBadDisk(Net):
    is_broken = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and rank_and_world_size()[0] == VICTIM:
            self.is_broken = True


def _disk_fails() -> Any:
    rank, world_size = rank_and_world_size()
    model, write = NetOnBadDisk("hybrid"), os.pwritev

    def may_fail(*args: Any) -> int:
        if model.is_broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct.os, "pwritev", may_fail)
        return heard_by(rank, world_size, lambda: fit(ElixirStrategy(**ON_NVME), lambda: model, devices=world_size))


@pytest.mark.parametrize("world_size", telling([2, 3], "3"))
def test_disk_of_one_rank_fails(world_size: int) -> None:
    everyone = run_ranks(_disk_fails, world_size, init_group=False)
    check_heard(everyone, VICTIM, "StorageError", "Input/output error")


def _last_writes_fail() -> Any:
    rank, world_size = rank_and_world_size()

    class NetThatBreaks(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.trainer.global_step == 3 and rank == VICTIM:
                patch.setattr(direct.os, "pwritev", fail_late)

    def fail_late(*args: Any) -> int:
        time.sleep(0.3)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        trainer = make_trainer(ElixirStrategy(**ON_NVME, update_timing="behind_forward"), devices=world_size)
        return heard_by(rank, world_size, lambda: trainer.fit(NetThatBreaks("hybrid"), make_data()))


def test_all_hear_of_a_disk_that_fails_in_the_last_step() -> None:
    everyone = run_ranks(_last_writes_fail, 2, init_group=False)
    check_heard(everyone, VICTIM, "StorageError", "Input/output error")


def _step_raises(options: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    rank, world_size = rank_and_world_size()
    heard = heard_by(rank, world_size, lambda: fit(ElixirStrategy(**options), NetThatStumbles, devices=world_size))
    _, _, run = fit(ElixirStrategy(**options), devices=world_size)  # in the same processes
    return heard, run.state


PLACEMENTS = [pytest.param(TIGHT, id="tight"), pytest.param({"placement_policy": "cuda"}, id="resident")]


@pytest.mark.parametrize("options", telling(PLACEMENTS, "tight"))
@pytest.mark.parametrize("world_size", telling([2, 3], "2"))
def test_step_of_one_rank_raises(world_size: int, options: dict[str, Any]) -> None:
    """Where all processes live on, they may train again."""
    results = run_ranks(_step_raises, world_size, options, init_group=False)
    check_heard([heard for heard, _ in results], VICTIM, "ValueError", "no such luck")
    expected = run_ranks(_train, world_size, options, init_group=False)
    assert_same_state(results[0][1], expected[0])


def _train(options: dict[str, Any]) -> dict[str, Tensor]:
    return fit(ElixirStrategy(**options), devices=rank_and_world_size()[1])[2].state


def _logging_waits() -> Any:
    rank, world_size = rank_and_world_size()
    return heard_by(rank, world_size, lambda: fit(ElixirStrategy(**TIGHT), NetThatLogs, devices=world_size))


def test_waiting_in_a_reduction_of_lightning() -> None:
    everyone = run_ranks(_logging_waits, 2, init_group=False)
    check_heard(everyone, VICTIM, "ValueError", "no such luck")


class NetThatAllRefuse(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            time.sleep(0.5 * rank_and_world_size()[0])
            raise ValueError("nobody likes it")
        return super().training_step(batch, batch_idx)


def _all_raise() -> tuple[str, int]:
    strategy = ElixirStrategy(**TIGHT)
    trainer, model = make_trainer(strategy, devices=2), NetThatAllRefuse()
    with pytest.raises(ValueError, match="nobody likes it") as caught:
        trainer.fit(model, make_data())
    state = strategy.lightning_module_state_dict()
    return str(caught.value), len(state)


def test_error_of_all_ranks_stays_their_own() -> None:
    """And what was trained is there."""
    assert [text for text, _ in run_ranks(_all_raise, 2, init_group=False)] == ["nobody likes it"] * 2


# Processes that are killed


def train_and_die(victim: int, options: dict[str, Any]) -> None:
    """Run by a process of its own."""
    NetThatDies.victim = victim
    rank, world_size = rank_and_world_size()
    try:
        fit(ElixirStrategy(**options), NetThatDies, devices=world_size)
    except Exception as error:
        Path(f"error_{rank}").write_text(f"{time.monotonic()}\n{type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize("options", telling(PLACEMENTS, "tight"))
@pytest.mark.parametrize("case", telling(["0 of 2", "1 of 2", "1 of 3"], "0 of 2"))
def test_killed_in_training(case: str, options: dict[str, Any]) -> None:
    victim, world_size = map(int, case.split(" of "))
    code = f"from tests.strategy.test_lost_ranks import train_and_die; train_and_die({victim}, {options!r})"
    codes = run_processes(code, world_size)
    ended = time.monotonic()
    killed = float(Path("killed").read_text())
    assert ended - killed < 2 * SOON_S  # no process is left
    assert codes[victim] == -signal.SIGKILL
    for rank in {*range(world_size)} - {victim}:
        assert codes[rank] == 1
        when, text = Path(f"error_{rank}").read_text().split("\n", 1)
        assert float(when) - killed < SOON_S
        assert text.startswith(f"PeerLostError: rank {rank} cannot go on: rank {victim} has ended (process ")


# Files that one rank cannot read


def _save(path: str) -> None:
    trainer, _, _ = fit(
        ElixirStrategy(**TIGHT, state_dict_type="sharded"), lambda: Net("hybrid"), devices=rank_and_world_size()[1]
    )
    trainer.save_checkpoint(path)


def _load(path: str) -> Any:
    rank, world_size = rank_and_world_size()
    trainer = make_trainer(ElixirStrategy(**TIGHT), devices=world_size, max_epochs=2)
    return heard_by(rank, world_size, lambda: trainer.fit(Net("hybrid"), make_data(), ckpt_path=path))


@pytest.mark.full
@crossed(told=["state_dict.-2"], prefix=["state_dict.", "optimizer_0.state."], world_size=[2, 3])
def test_damaged_file_that_one_rank_reads(tmp_path: Path, world_size: int, prefix: str) -> None:
    path = tmp_path / "saved.ckpt"
    run_ranks(_save, world_size, str(path), init_group=False)
    tensors = CheckpointIndex(path).tensors
    places = [
        place
        for key, stored in tensors.items()
        if key.startswith(prefix) and torch.Size(stored.shape).numel() > 1
        for _, place in stored.boxes
        if place.file == f"__{VICTIM}_0.distcp"
    ]
    place = max(places, key=lambda place: place.length)
    with (path / place.file).open("r+b") as file:
        file.seek(place.offset + place.length // 2)
        old = file.read(4)
        file.seek(place.offset + place.length // 2)
        file.write(bytes(byte ^ 255 for byte in old))
    everyone = run_ranks(_load, world_size, str(path), init_group=False)
    assert [heard["type"] for heard in everyone] == ["StorageError"] * world_size
    assert all(place.file in heard["text"] for heard in everyone)
    for rank in {*range(world_size)} - {VICTIM}:
        assert f"rank {VICTIM} failed: StorageError: " in everyone[rank]["text"]
        assert everyone[rank]["time_s"] - everyone[VICTIM]["time_s"] < SOON_S


# Saving when an exception has come


def _stumbles_and_saves(kind: type[Net], options: dict[str, Any], callback: str = "model") -> tuple[Any, bool]:
    rank, world_size = rank_and_world_size()
    saving: pl.Callback = pl.callbacks.OnExceptionCheckpoint("saved")
    if callback == "model":
        saving = pl.callbacks.ModelCheckpoint("saved", every_n_train_steps=10**6, save_on_exception=True)
    more = {"callbacks": [saving], "enable_checkpointing": True}
    heard = heard_by(rank, world_size, lambda: fit(ElixirStrategy(**options), kind, devices=world_size, **more))
    return heard, any(Path("saved").glob("*"))


# Lightning asks any `Checkpoint` for the best model, and takes the lack of one for a second fit.
_OTHER_CALLBACK = pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=")


@_OTHER_CALLBACK
@pytest.mark.parametrize(
    ("kind", "state_dict_type", "callback"),
    [
        full(NetThatStumbles, "full", "model"),
        (NetThatStumbles, "sharded", "model"),
        full(NetThatLogs, "full", "model"),
        full(NetThatLogs, "sharded", "model"),
        full(NetThatStumbles, "full", "exceptions alone"),
    ],
)
@pytest.mark.full
def test_the_error_of_one_rank_is_not_hidden_by_the_save(kind: type[Net], state_dict_type: str, callback: str) -> None:
    """Which needs all ranks, and the others have not come to it."""
    options = TIGHT | {"state_dict_type": state_dict_type}
    everyone = run_ranks(_stumbles_and_saves, 2, kind, options, callback, init_group=False, fresh=True)
    check_heard([heard for heard, _ in everyone], VICTIM, "ValueError", "no such luck")
    assert not any(is_saved for _, is_saved in everyone)


@pytest.mark.full
@_OTHER_CALLBACK
@pytest.mark.parametrize("callback", telling(["model", "exceptions alone"], "model"))
def test_an_error_of_all_ranks_is_saved_after(callback: str) -> None:
    everyone = run_ranks(_stumbles_and_saves, 2, NetThatAllRefuse, TIGHT, callback, init_group=False, fresh=True)
    assert [heard["text"] for heard, _ in everyone] == ["nobody likes it"] * 2
    assert all(is_saved for _, is_saved in everyone)
