"""Whatever happens while a checkpoint is saved: the one before stays valid, and half of one is never loaded."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import tempfile
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
from lightning_elixir.strategy.sharded_checkpoints import ShardedCheckpoints
from tests.helpers.cut_up import cut_up
from tests.helpers.dist import run_processes, run_ranks, start_processes
from tests.helpers.failures import SOON_S
from tests.helpers.tiers import full, telling
from tests.strategy.models import TIGHT, Net, assert_same_state, fit, make_data, make_trainer
from tests.strategy.sharded import OPTIONS, Batches, assert_same_dump, dump


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
    first = dump(trainer)[0]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, make_data())
    rank = os.environ["RANK"]
    if rank == "0":
        torch.save((first, dump(trainer)[0]), "expected.pt")
    else:
        dump(trainer)
    if victim in (rank, "all"):
        _after(*MOMENTS[moment], _die)
    started = time.monotonic()
    try:
        with cut_up():  # several threads write
            trainer.save_checkpoint("one.ckpt")
    except Exception as error:
        Path(f"error_{rank}").write_text(f"{time.monotonic() - started}\n{type(error).__name__}: {error}")
        raise


@pytest.mark.full  # kills
@pytest.mark.parametrize(
    ("moment", "victim", "is_new"),
    [
        full("writing", "1", False),
        full("writing", "all", False),
        full("flushing", "0", False),
        full("contents", "0", False),
        full("naming", "0", False),
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
    assert_same_state(dump(trainer)[0], expected)
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


# One file


def _half_copied(action: Any) -> Any:
    """Have the system's temporary folder be on another disk, to the eye of who moves a file from there, and `action`
    run when the half of it has been copied. Returns what undoes it."""
    rename, copy, folder = os.rename, shutil.copyfile, tempfile.gettempdir()

    def other_disk(source: Any, target: Any) -> None:
        if Path(source).parent == Path(folder):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        rename(source, target)

    def copyfile(source: Any, target: Any, **options: Any) -> Any:
        with open(target, "wb") as file:
            file.write(Path(source).read_bytes()[: Path(source).stat().st_size // 2])
        action()

    def undo() -> None:
        os.rename, shutil.copyfile = rename, copy

    os.rename, shutil.copyfile = other_disk, copyfile
    return undo


def save_one_file_and_die(moment: str) -> None:
    """Run by a process of its own: saves, trains on, and dies in the second save."""
    trainer, model, _ = fit(ElixirStrategy(**TIGHT))
    trainer.save_checkpoint("one.ckpt")
    torch.save(dump(trainer)[0], "expected.pt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, make_data())
    if moment == "moving":
        _half_copied(_die)
    else:
        _after(folder_module, moment, 1, _die)
    trainer.save_checkpoint("one.ckpt")


@pytest.mark.parametrize(
    "moment",
    [
        "moving",
        pytest.param("flush", marks=pytest.mark.full),
        pytest.param("put_in_place", marks=pytest.mark.full),
    ],
)
def test_killed_in_a_save_of_one_file(tmp_path: Path, moment: str) -> None:
    code = f"from tests.strategy.test_sharded_faults import save_one_file_and_die; save_one_file_and_die({moment!r})"
    assert run_processes(code, 1) == [-signal.SIGKILL]
    assert Path(".one.ckpt.partial").exists()
    trainer = make_trainer(ElixirStrategy(**TIGHT), max_epochs=1)
    trainer.fit(Net(), make_data(), ckpt_path="one.ckpt")
    assert_same_state(dump(trainer)[0], torch.load("expected.pt"))
    trainer.save_checkpoint("one.ckpt")  # takes away what was left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected.pt", "one.ckpt"]


@pytest.mark.parametrize("name", ["one.ckpt", "n" * 250 + ".ckpt"])
def test_an_error_in_a_save_of_one_file_leaves_the_earlier_one(tmp_path: Path, name: str) -> None:
    trainer, _, _ = fit(ElixirStrategy(**TIGHT))
    trainer.save_checkpoint(name)
    before = Path(name).read_bytes()

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    undo = _half_copied(fail)
    try:
        cure = "; free space there, or save elsewhere"
        with pytest.raises(StorageError, match=rf"has failed \(rank 0: OSError: .*No space left.*{cure}\); earlier"):
            trainer.save_checkpoint(name)
    finally:
        undo()
    assert Path(name).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [name]
    trainer.save_checkpoint(name)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def save_beyond_a_limit(state_dict_type: str) -> None:
    """Run by a process of its own, for which files become too large while it saves."""
    options = {**TIGHT, "state_dict_type": state_dict_type}
    trainer, _, _ = fit(ElixirStrategy(**options))
    trainer.save_checkpoint("one.ckpt")
    before = _contents(Path("one.ckpt"))
    limit = max(map(len, before.values())) // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    with pytest.raises(StorageError, match=r"rank 0: OSError: \[Errno (27|28)\]"):
        trainer.save_checkpoint("one.ckpt")
    assert _contents(Path("one.ckpt")) == before
    assert [path.name for path in Path().iterdir()] == ["one.ckpt"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    trainer.save_checkpoint("one.ckpt")
    assert [path.name for path in Path().iterdir()] == ["one.ckpt"]


def _contents(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in ([path] if path.is_file() else path.iterdir())}


@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
@pytest.mark.full
def test_a_file_that_cannot_grow_is_an_error_and_leaves_the_earlier_one(state_dict_type: str) -> None:
    code = f"from tests.strategy.test_sharded_faults import save_beyond_a_limit as f; f({state_dict_type!r})"
    assert run_processes(code, 1) == [0]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    trainer, _, _ = fit(ElixirStrategy(**TIGHT))
    os.mkfifo("pipe")
    chunks: list[bytes] = []
    reader = threading.Thread(target=lambda: chunks.append(Path("pipe").read_bytes()))
    reader.start()
    undo = _half_copied(lambda: None)  # or the pipe would be replaced by Lightning
    try:
        trainer.save_checkpoint("pipe")
    finally:
        undo()
    reader.join()
    assert Path("pipe").is_fifo()
    assert len(chunks[0]) > 1000


# Asked to stop


class _Progress(pl.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            Path("step").write_text(str(trainer.global_step))


def train_until(name: str, ranks: int, path: str | None, max_steps: int) -> Any:
    """Run by processes of its own, which are asked to stop, and by the ranks that go on from there."""
    options = dict(OPTIONS[name])
    if "nvme_offload_fraction" in options:
        options["nvme_offload_dir"] = "disk"
    pl.seed_everything(11, verbose=False)
    callbacks = [_keep("saved", every_n_train_steps=10**6, save_on_exception=True), _Progress()]
    trainer = make_trainer(
        ElixirStrategy(**options),
        max_epochs=-1,
        max_steps=max_steps,
        devices=ranks,
        callbacks=callbacks,
        enable_checkpointing=True,
    )
    trainer.fit(Net(optimizer="hybrid"), Batches(ranks), ckpt_path=path)
    return dump(trainer)


@pytest.mark.parametrize(
    ("name", "ranks", "order", "gap_s"),
    [
        full("tight", 1, [0], 0.0),
        full("tight", 2, [0, 1], 0.0),
        full("tight", 2, [1, 0], 0.01),
        ("all on nvme", 2, [1], 0.0),
    ],
)
@pytest.mark.full
def test_sigterm_saves_and_the_resumed_run_equals_the_uninterrupted(
    name: str, ranks: int, order: list[int], gap_s: float
) -> None:
    """Wherever the signal meets the ranks, and if it meets one of them alone, all stop before the same batch."""
    code = f"from tests.strategy.test_sharded_faults import train_until; train_until({name!r}, {ranks}, None, -1)"
    processes = start_processes(code, ranks)
    deadline = time.monotonic() + 60
    while not (Path("step").exists() and Path("step").read_text() >= "3") and time.monotonic() < deadline:
        time.sleep(0.01)
    for rank in order:
        processes[rank].send_signal(signal.SIGTERM)
        time.sleep(gap_s)
    assert [process.wait(60) for process in processes] == [0] * ranks  # SIGTERMException is a SystemExit
    (path,) = Path("saved").iterdir()
    step = CheckpointIndex(path).meta(True)["global_step"]
    path = path.rename("stopped.ckpt")
    found = [
        run_ranks(train_until, ranks, name, ranks, start, step + 3, init_group=False)
        if ranks > 1
        else [train_until(name, 1, start, step + 3)]
        for start in (str(path), None)
    ]
    assert_same_dump(found[0][0], found[1][0])


def _save_on_full_disk(full_rank: int) -> Any:
    trainer, _, _ = fit(ElixirStrategy(**OPTIONS["tight"]), devices=2)
    trainer.save_checkpoint("one.ckpt")

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if int(os.environ["RANK"]) == full_rank:
        _after(ShardWriter, "_add", 10, fail)
    with pytest.raises(StorageError) as caught, cut_up():
        trainer.save_checkpoint("one.ckpt")
    CheckpointIndex(Path("one.ckpt"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("elixir-checkpoint")]
    trainer.save_checkpoint("two.ckpt")  # with the disk as it was again, all goes on
    CheckpointIndex(Path("two.ckpt"))
    return str(caught.value), sorted(path.name for path in Path().iterdir())


@pytest.mark.parametrize("full_rank", telling([0, 1], "1"))
def test_full_disk_is_an_error_on_every_rank(tmp_path: Path, full_rank: int) -> None:
    for message, names in run_ranks(_save_on_full_disk, 2, full_rank, init_group=False, fresh=True):
        assert f"rank {full_rank}: OSError" in message
        assert "No space left" in message
        assert names == ["one.ckpt", "two.ckpt"]


# Saves under way

ASYNC = {**OPTIONS["tight"], "async_save": True}


def _keep(folder: str, **options: Any) -> Any:
    return pl.callbacks.ModelCheckpoint(folder, **({"every_n_train_steps": 2, "filename": "{step}"} | options))


def _fit_async(*callbacks: Any, epochs: int = 1, options: Any = ASYNC) -> Any:
    return fit(ElixirStrategy(**options), callbacks=list(callbacks), enable_checkpointing=True, max_epochs=epochs)


def _flush_with(monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
    """Have `action` run with every path before it is flushed."""
    original = save_module.flush

    def flush(path: Path) -> None:
        action(path)
        original(path)

    monkeypatch.setattr(save_module, "flush", flush)


def _fail(path: Path) -> None:
    raise OSError(errno.EIO, "broken")


@pytest.mark.parametrize("is_over", [False, True])
def test_a_failed_save_is_told_by_the_next_and_removes_nothing(monkeypatch: pytest.MonkeyPatch, is_over: bool) -> None:
    """Also where it has failed before the callback asks for the earlier one to be removed."""
    _flush_with(monkeypatch, lambda path: _fail(path) if "step=4" in str(path) else None)
    if is_over:
        original = ShardedCheckpoints.save

        def save(self: ShardedCheckpoints, *arguments: Any, **options: Any) -> None:
            original(self, *arguments, **options)
            if self._running is not None:
                self._running.join()

        monkeypatch.setattr(ShardedCheckpoints, "save", save)
    with pytest.raises(StorageError, match=r"step=4.ckpt has failed \(rank 0: OSError"):
        _fit_async(_keep("saved"), epochs=3)
    assert [path.name for path in Path("saved").iterdir()] == ["step=2.ckpt"]
    CheckpointIndex(Path("saved/step=2.ckpt"))


def test_error_of_a_thread_is_raised_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _flush_with(monkeypatch, _fail)
    with pytest.raises(StorageError, match="has failed"):
        _fit_async(_keep("saved", every_n_train_steps=None))
    assert "has failed (rank 0: OSError" in caplog.text  # when it happened


def test_a_save_after_the_fit_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _, _ = fit(ElixirStrategy(**ASYNC))
    with monkeypatch.context() as patch:
        _flush_with(patch, _fail)
        with pytest.raises(StorageError, match="has failed"):
            trainer.save_checkpoint("one.ckpt")
    trainer.save_checkpoint("one.ckpt")
    CheckpointIndex(Path("one.ckpt"))


@pytest.mark.parametrize("hook", ["on_fit_end", full("teardown")])
def test_a_save_at_the_end_of_the_fit_is_waited_for(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    """Lightning calls these hooks when the strategy has waited for all saves."""
    last = pl.Callback()
    setattr(last, hook, lambda trainer, *_, **__: trainer.save_checkpoint("one.ckpt"))
    _flush_with(monkeypatch, _fail)
    with pytest.raises(StorageError, match="has failed"):
        fit(ElixirStrategy(**ASYNC), callbacks=[last])


class _Reference(pl.Callback):  # type: ignore[misc]
    """The state at each step, and a gate that opens some steps after the first save."""

    def __init__(self) -> None:
        self.dumps: dict[int, Any] = {}
        self.gate = threading.Event()
        self.seen_early: list[bool] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        step = trainer.global_step
        self.dumps[step] = dump(trainer)
        if step in (3, 4):
            self.seen_early.append(Path("saved/step=2.ckpt").exists())
        if step == 4:
            self.gate.set()


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_training_goes_on_while_a_thread_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps taken before the thread is done show in nothing that it saves."""
    reference = _Reference()
    _flush_with(monkeypatch, lambda path: reference.gate.wait(60) and None)
    _fit_async(reference, _keep("saved", every_n_train_steps=2, save_top_k=-1, train_time_interval=None), epochs=3)
    assert reference.seen_early == [False, False]  # two more steps were taken
    before, after = reference.dumps[2][0], reference.dumps[4][0]
    assert not torch.equal(before["layers.4.weight"], after["layers.4.weight"])
    other = make_trainer(ElixirStrategy(**TIGHT), max_epochs=1, max_steps=2)
    other.fit(Net(), make_data(), ckpt_path="saved/step=2.ckpt")
    assert_same_state(dump(other)[0], before)


@pytest.mark.parametrize(
    "callbacks",
    [
        full([{"filename": "model", "save_top_k": 3, "monitor": "step", "mode": "max"}]),
        full([{"save_top_k": -1}, {"every_n_train_steps": 4}]),
        full([{"filename": "model", "save_top_k": -1, "save_last": True}]),
    ],
)
def test_names_are_those_of_saves_that_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, callbacks: list[dict[str, Any]]
) -> None:
    _flush_with(monkeypatch, lambda path: time.sleep(0.01))
    found = []
    for folder, options in (("sync", OPTIONS["tight"]), ("async", ASYNC)):
        made = [_keep(folder, **each) for each in callbacks]
        _fit_async(*made, epochs=3, options=options)
        found.append({path.name: CheckpointIndex(path).meta(True)["global_step"] for path in Path(folder).iterdir()})
        assert all("file_exists" not in vars(callback) for callback in made)
    assert found[0] == found[1]
    assert len(found[0]) >= 2


def test_an_interrupted_wait_leaves_the_save_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the next one would write where its thread still is."""
    gate, interrupted = threading.Event(), []

    def wait(path: Path) -> None:
        if not interrupted:  # the first save; the second one, of the exception, waits for it
            interrupted.append(threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]))
            interrupted.append(threading.Timer(1.5, gate.set))
            for timer in interrupted:
                timer.start()
        gate.wait(60)

    _flush_with(monkeypatch, wait)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # which background jobs do not have
    try:
        with pytest.raises(SystemExit):
            _fit_async(_keep("saved", filename="model", save_top_k=1, save_on_exception=True), epochs=3)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert gate.is_set()
    paths = list(Path("saved").iterdir())
    assert paths
    for path in paths:
        CheckpointIndex(path)


# What had the name before


@pytest.mark.parametrize("can_exchange", telling([True, False], "True"))
def test_a_checkpoint_of_one_file_goes_when_the_folder_is_there(
    monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(folder_module, "_exchange", lambda one, other: False)
    whole, _, _ = fit(ElixirStrategy(**TIGHT))
    whole.save_checkpoint("one.ckpt")
    before = Path("one.ckpt").read_bytes()
    trainer, _, _ = fit(ElixirStrategy(**OPTIONS["tight"]))
    with monkeypatch.context() as patch:

        def rename(self: Path, target: Path) -> Path:
            if self.name.endswith(".partial"):
                _fail(self)
            return original(self, target)

        original = Path.rename
        patch.setattr(Path, "rename", rename)
        patch.setattr(folder_module, "_exchange", lambda one, other: _fail(one) if can_exchange else False)
        with pytest.raises(StorageError, match="earlier checkpoints are whole"):
            trainer.save_checkpoint("one.ckpt")
    assert Path("one.ckpt").read_bytes() == before
    trainer.save_checkpoint("one.ckpt")
    CheckpointIndex(Path("one.ckpt"))
    assert [path.name for path in Path().iterdir()] == ["one.ckpt"]


def test_a_folder_goes_when_the_checkpoint_of_one_file_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _, _ = fit(ElixirStrategy(**OPTIONS["tight"]))
    trainer.save_checkpoint("one.ckpt")
    whole, _, _ = fit(ElixirStrategy(**TIGHT))
    with monkeypatch.context() as patch:
        patch.setattr(whole.strategy.checkpoint_io, "save_checkpoint", lambda *_, **__: _fail(Path()))
        with pytest.raises(StorageError, match=r"saving the checkpoint one.ckpt has failed \(rank 0: OSError"):
            whole.save_checkpoint("one.ckpt")
    CheckpointIndex(Path("one.ckpt"))
    whole.save_checkpoint("one.ckpt")
    assert Path("one.ckpt").is_file()
    assert [path.name for path in Path().iterdir()] == ["one.ckpt"]


def test_what_cannot_be_removed_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, _, _ = fit(ElixirStrategy(**OPTIONS["tight"]))
    trainer.save_checkpoint("one.ckpt")
    original = folder_module.remove_folder

    def remove(path: Path) -> None:
        if (path / ".metadata").exists():
            _fail(path)
        original(path)

    monkeypatch.setattr(folder_module, "remove_folder", remove)
    trainer.save_checkpoint("one.ckpt")
    CheckpointIndex(Path("one.ckpt"))
    assert "cannot remove" in caplog.text


def _save_whole_and_fail() -> Any:
    trainer, _, _ = fit(ElixirStrategy(**TIGHT), devices=2)
    with pytest.raises(StorageError) as caught:
        trainer.save_checkpoint("/proc/one.ckpt")
    return str(caught.value)


@pytest.mark.full
def test_a_whole_checkpoint_that_cannot_be_written_is_an_error_on_every_rank() -> None:
    for message in run_ranks(_save_whole_and_fail, 2, init_group=False, fresh=True):
        assert "saving the checkpoint /proc/one.ckpt has failed (rank 0:" in message
