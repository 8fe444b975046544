"""Whatever happens while a sharded checkpoint is saved: the one before stays valid, and half of one is never loaded."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elixir._lightning import pl
from lightning_elixir.checkpoint import folder as folder_module
from lightning_elixir.checkpoint import save as save_module
from lightning_elixir.checkpoint.index import CheckpointIndex
from lightning_elixir.checkpoint.writer import ShardWriter
from lightning_elixir.errors import StorageError
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.dist import run_processes, run_ranks
from tests.helpers.failures import SOON_S
from tests.strategy.models import TIGHT, Net, assert_same_state, fit, make_data, make_trainer
from tests.strategy.test_sharded_checkpoint import OPTIONS, _dump


def _after(owner: Any, name: str, calls: int, action: Any) -> None:
    """Have `action` run in place of call number `calls` of a function."""
    original, seen = getattr(owner, name), []

    def counted(*arguments: Any, **options: Any) -> Any:
        seen.append(1)
        if len(seen) == calls:
            action()
        return original(*arguments, **options)

    setattr(owner, name, counted)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


MOMENTS = {
    "writing": (ShardWriter, "_add", 20),
    "flushing": (save_module, "flush", 1),
    "contents": (save_module, "write_metadata", 1),
    "naming": (save_module, "put_in_place", 1),
    "removing": (folder_module, "remove_folder", 2),  # the first is to have an empty folder
}


def save_and_die(moment: str, victim: str) -> None:
    """Run by a process of its own: saves, trains on, and dies in the second save, if it is the victim."""
    trainer, model, _ = fit(ElixirStrategy(**OPTIONS["tight"]), devices=2)
    trainer.save_checkpoint("one.ckpt")
    first = _dump(trainer)[0]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, make_data())
    rank = os.environ["RANK"]
    if rank == "0":
        torch.save((first, _dump(trainer)[0]), "expected.pt")
    else:
        _dump(trainer)
    if victim in (rank, "all"):
        _after(*MOMENTS[moment], _die)
    started = time.monotonic()
    try:
        trainer.save_checkpoint("one.ckpt")
    except Exception as error:
        Path(f"error_{rank}").write_text(f"{time.monotonic() - started}\n{type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize(
    ("moment", "victim", "is_new"),
    [
        ("writing", "1", False),
        ("writing", "all", False),
        ("flushing", "0", False),
        ("contents", "0", False),
        ("naming", "0", False),
        ("removing", "0", True),
    ],
)
def test_killed_in_a_save(tmp_path: Path, moment: str, victim: str, is_new: bool) -> None:
    code = f"from tests.strategy.test_sharded_faults import save_and_die; save_and_die({moment!r}, {victim!r})"
    codes = run_processes(code, 2)
    victims = ["0", "1"] if victim == "all" else [victim]
    assert [codes[int(rank)] for rank in victims] == [-signal.SIGKILL] * len(victims)
    for rank in {"0", "1"} - set(victims):  # hears of it, soon
        assert codes[int(rank)] == 1
        time_s, error = Path(f"error_{rank}").read_text().split("\n", 1)
        assert float(time_s) < SOON_S
        assert error.startswith(f"PeerLostError: rank {rank} cannot go on: rank {victim} has ended (process ")
    expected = torch.load("expected.pt")[int(is_new)]
    trainer = make_trainer(ElixirStrategy(**TIGHT), max_epochs=1 + is_new)
    trainer.fit(Net(), make_data(), ckpt_path="one.ckpt")
    assert_same_state(_dump(trainer)[0], expected)
    left = [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]
    assert len(left) == ("0" in victims)  # else rank 0 has tidied up
    if moment in ("writing", "flushing", "contents"):
        for path in left:
            with pytest.raises(StorageError, match="not a whole checkpoint"):
                CheckpointIndex(path)
    # The next save there takes away what was left.
    trainer, _, _ = fit(ElixirStrategy(**OPTIONS["tight"]))
    trainer.save_checkpoint("one.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix in (".ckpt", ".partial")) == ["one.ckpt"]


def _save_on_full_disk(full_rank: int) -> Any:
    trainer, _, _ = fit(ElixirStrategy(**OPTIONS["tight"]), devices=2)
    trainer.save_checkpoint("one.ckpt")

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if int(os.environ["RANK"]) == full_rank:
        _after(ShardWriter, "_add", 10, fail)
    with pytest.raises(StorageError) as caught:
        trainer.save_checkpoint("one.ckpt")
    CheckpointIndex(Path("one.ckpt"))
    trainer.save_checkpoint("two.ckpt")  # with the disk as it was again, all goes on
    CheckpointIndex(Path("two.ckpt"))
    return str(caught.value), sorted(path.name for path in Path().iterdir())


@pytest.mark.parametrize("full_rank", [0, 1])
def test_full_disk_is_an_error_on_every_rank(tmp_path: Path, full_rank: int) -> None:
    for message, names in run_ranks(_save_on_full_disk, 2, full_rank, init_group=False, fresh=True):
        assert f"rank {full_rank}: OSError" in message
        assert "No space left" in message
        assert names == ["one.ckpt", "two.ckpt"]


# Saves under way


def _fail_in_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(save_module, "flush", fail)


ASYNC = {**OPTIONS["tight"], "async_save": True}


def test_error_of_a_thread_is_raised_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _, _ = fit(ElixirStrategy(**ASYNC))
    trainer.save_checkpoint("one.ckpt")
    trainer.strategy.teardown()
    with monkeypatch.context() as patch:
        _fail_in_thread(patch)
        trainer.save_checkpoint("one.ckpt")
        with pytest.raises(StorageError, match=r"saving the checkpoint .*one.ckpt has failed \(rank 0: OSError"):
            trainer.save_checkpoint("two.ckpt")
    CheckpointIndex(Path("one.ckpt"))  # the one before
    trainer.save_checkpoint("two.ckpt")
    trainer.strategy.teardown()
    CheckpointIndex(Path("two.ckpt"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.ckpt", "two.ckpt"]


def test_error_of_a_thread_is_raised_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_in_thread(monkeypatch)
    callback = pl.callbacks.ModelCheckpoint("saved", filename="{epoch}")
    with pytest.raises(StorageError, match="has failed"):
        fit(ElixirStrategy(**ASYNC), callbacks=[callback], enable_checkpointing=True)


def test_training_goes_on_while_a_thread_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps taken before the thread is done show in nothing that it saves, nor is an earlier checkpoint removed."""
    trainer, model, _ = fit(ElixirStrategy(**ASYNC))
    trainer.save_checkpoint("zero.ckpt")
    trainer.strategy.teardown()
    expected = _dump(trainer)
    gate, flush = threading.Event(), save_module.flush

    def late(path: Path) -> None:
        gate.wait(30)
        flush(path)

    monkeypatch.setattr(save_module, "flush", late)
    trainer.save_checkpoint("one.ckpt")
    trainer.strategy.remove_checkpoint("zero.ckpt")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    after = _dump(trainer)
    assert not torch.equal(after[0]["layers.4.weight"], expected[0]["layers.4.weight"])
    assert not Path("one.ckpt").exists()
    assert Path("zero.ckpt").exists()
    gate.set()
    trainer.strategy.teardown()
    assert not Path("zero.ckpt").exists()
    other = make_trainer(ElixirStrategy(**TIGHT))
    other.fit(Net(), make_data(), ckpt_path="one.ckpt")
    assert_same_state(_dump(other)[0], expected[0])
