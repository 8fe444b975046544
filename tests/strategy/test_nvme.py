"""`ElixirStrategy` with optimizer states on NVMe: the same run, bit for bit; options, checkpoints, disks that fail."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elixir._lightning import pl
from lightning_elixir.errors import CapacityError, PlanError, StateError, StorageError
from lightning_elixir.optim import HybridAdam
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.types import Tier
from lightning_elixir.storage.nvme import direct, folders
from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.strategy.callbacks import ElixirStatsMonitor
from lightning_elixir.strategy.shared_plans import Planner
from tests.helpers.dist import run_ranks
from tests.helpers.nvme import failing
from tests.helpers.tiers import crossed, full, telling
from tests.strategy.models import (
    CHUNK,
    TIGHT,
    LateNet,
    Net,
    assert_same_run,
    assert_same_state,
    few_batches,
    fit,
    make_data,
    make_layers,
    make_trainer,
)
from tests.strategy.nets import FrozenNet, TiedNet


class DeepNet(Net):
    """Of so many chunks that the buffers do not take what NVMe saves."""

    def _make(self) -> None:
        torch.manual_seed(7)
        self.layers = make_layers(16)


class DeeperNet(Net):
    """Of so many chunks that not even all parameters and gradients fit where the buffers do."""

    def _make(self) -> None:
        torch.manual_seed(7)
        self.layers = make_layers(48)


class GroupsNet(Net):
    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        return HybridAdam([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}], lr=1e-2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().param_groups[1]["lr"] = 3e-3 / (1 + batch_idx)  # type: ignore[union-attr]


def hybrid(make_model: type[Net] = Net) -> Any:
    return lambda: make_model(optimizer="hybrid")


def on_nvme(tmp_path: Path, **options: Any) -> dict[str, Any]:
    return {**TIGHT, "nvme_offload_fraction": 1.0, "nvme_offload_dir": str(tmp_path / "disk"), **options}


def tiers(strategy: ElixirStrategy) -> set[Tier]:
    return {c.optim_tier for c in strategy.plan.chunks if c.requires_grad}


@pytest.mark.full
@crossed(
    told=["GroupsNet-behind_forward"],
    make_model=[Net, LateNet, GroupsNet, FrozenNet, TiedNet],
    timing=["auto", "after_backward", "behind_forward"],
)
def test_equals_states_in_host_memory(make_model: Any, timing: str, tmp_path: Path) -> None:
    for precision in ("32-true", "bf16-mixed"):
        options = {"precision": precision, "val": lambda: make_data(8, seed=2)}
        expected = fit(ElixirStrategy(**TIGHT), hybrid(make_model), **options)[2]
        strategy = ElixirStrategy(**on_nvme(tmp_path, update_timing=timing))
        actual = fit(strategy, hybrid(make_model), **options)[2]
        assert_same_run(actual, expected)
        assert tiers(strategy) == {Tier.NVME}
        assert strategy.stats().nvme_read_bytes > 0
        assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        full({"gradient_clip_val": 0.05}),
        full({"gradient_clip_val": 0.05, "accumulate_grad_batches": 3}),
        full({"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
        full({"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
        full({"precision": "bf16-true"}),
    ],
    ids=str,
)
def test_ways_to_train(options: dict[str, Any], tmp_path: Path) -> None:
    expected = fit(ElixirStrategy(**TIGHT), hybrid(), max_epochs=2, **options)[2]
    for fraction in (0.4, 1.0):
        strategy = ElixirStrategy(**on_nvme(tmp_path, nvme_offload_fraction=fraction))
        assert_same_run(fit(strategy, hybrid(), max_epochs=2, **options)[2], expected)
        assert tiers(strategy) == ({Tier.NVME} if fraction == 1.0 else {Tier.CPU, Tier.NVME})


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3, "precision": "bf16-mixed"},
        full({"precision": "32-true"}),
        full({"precision": "bf16-true", "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
    ],
    ids=str,
)
def test_parameters_there_as_well(options: dict[str, Any], tmp_path: Path) -> None:
    for make_model in (Net, FrozenNet, TiedNet):
        options |= {"train": few_batches, "val": lambda: make_data(8, seed=2)}
        expected = fit(ElixirStrategy(**TIGHT), hybrid(make_model), **options)[2]
        for fraction in (0.4, 1.0):
            strategy = ElixirStrategy(**on_nvme(tmp_path, nvme_offload_param_fraction=fraction))
            assert_same_run(fit(strategy, hybrid(make_model), **options)[2], expected)
            there = {c.param_tier for c in strategy.plan.chunks}
            assert there == ({Tier.NVME} if fraction == 1.0 else {Tier.CPU, Tier.NVME})
            assert list((tmp_path / "disk").iterdir()) == []


def test_a_share_of_parameters_needs_states_there() -> None:
    with pytest.raises(PlanError, match="give nvme_offload_fraction as well"):
        ElixirStrategy(**TIGHT, nvme_offload_param_fraction=0.5)


def test_equals_plain_lightning(tmp_path: Path) -> None:
    expected = fit("auto", hybrid())[2]
    assert_same_run(fit(ElixirStrategy(**on_nvme(tmp_path)), hybrid())[2], expected)


def test_registered_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a folder: the system's one for temporary files."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(folders, "is_in_memory", lambda _: False)
    trainer, _, actual = fit("elixir_nvme", hybrid())
    assert tiers(trainer.strategy) == {Tier.NVME}
    assert trainer.strategy.plan.policy == "cpu"
    assert_same_run(actual, fit("auto", hybrid())[2])
    assert list((tmp_path / "tmp").iterdir()) == []


def _train(options: dict[str, Any], more: dict[str, Any]) -> Any:
    strategy = ElixirStrategy(**options)
    run = fit(strategy, hybrid(LateNet), devices=2, train=lambda: make_data(64), **more)[2]
    stats = strategy.stats()
    return [x.item() for x in run.losses], run.state, stats.nvme_written_bytes, len(tiers(strategy))


@pytest.mark.full
def test_two_ranks(tmp_path: Path) -> None:
    more = {"precision": "bf16-mixed", "gradient_clip_val": 0.1}
    expected = run_ranks(_train, 2, dict(TIGHT), more, init_group=False)
    actual = run_ranks(_train, 2, on_nvme(tmp_path), more, init_group=False)
    for a, e in zip(actual, expected, strict=True):
        assert a[0] == e[0]
        assert_same_state(a[1], e[1])
        assert a[2] > 0 == e[2]


# The search


DISK = HardwareSpec.nominal().to_dict() | {"nvme_read_bytes_per_s": 2e9, "nvme_write_bytes_per_s": 2e9}
SHORT = {**CHUNK, "gpu_memory_limit": "150KiB", "cpu_memory_limit": "900KiB"}


def hardware() -> HardwareSpec:
    return HardwareSpec.from_dict(DISK)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_auto_goes_there_where_the_host_is_short(precision: str, tmp_path: Path) -> None:
    """States exceed the memory that the host may give."""
    with pytest.raises(CapacityError):
        fit(ElixirStrategy(**SHORT), hybrid(DeepNet), precision=precision)
    expected = fit(ElixirStrategy(**TIGHT), hybrid(DeepNet), precision=precision)[2]
    strategy = ElixirStrategy(**SHORT, nvme_offload_dir=str(tmp_path / "disk"), hardware=hardware())
    assert_same_run(fit(strategy, hybrid(DeepNet), precision=precision)[2], expected)
    assert Tier.NVME in tiers(strategy)
    assert strategy.plan.policy == "auto"
    held = strategy.stats().held_bytes
    if precision == "bf16-mixed":  # plans do not count fp32 masters of fp32 parameters that are on the GPU
        host_bytes = sum(n for kind, n in held.items() if kind.startswith("cpu_"))
        assert host_bytes <= 900 * 1024 + 3 * 3 * 4096  # in buffers, parts begin at blocks


@pytest.mark.full
def test_auto_sends_parameters_there_where_states_are_not_enough(tmp_path: Path) -> None:
    """16-bit parameters and gradients exceed the memory that the host may give."""
    short = {**SHORT, "cpu_memory_limit": "640KiB", "hardware": hardware()}
    roomy = {**TIGHT, "gpu_memory_limit": short["gpu_memory_limit"]}
    expected = fit(ElixirStrategy(**roomy), hybrid(DeeperNet), precision="bf16-mixed")[2]
    strategy = ElixirStrategy(**short, nvme_offload_dir=str(tmp_path / "disk"))
    assert_same_run(fit(strategy, hybrid(DeeperNet), precision="bf16-mixed")[2], expected)
    plan = strategy.plan
    assert tiers(strategy) - {Tier.GPU} == {Tier.NVME}
    assert Tier.NVME in {c.param_tier for c in plan.chunks}
    assert plan.notes["host_bytes"] <= 640 * 1024
    held = strategy.stats().held_bytes
    assert sum(n for kind, n in held.items() if kind.startswith("cpu_")) <= (640 + 64) * 1024  # parts begin at blocks
    assert plan.forecast is not None
    assert plan.forecast.times.nvme_s > 0


@pytest.mark.full
def test_auto_does_not_go_there_where_the_host_has_room(tmp_path: Path) -> None:
    strategy = ElixirStrategy(**CHUNK, gpu_memory_limit="150KiB", nvme_offload_dir=str(tmp_path), hardware=hardware())
    fit(strategy, hybrid())
    assert Tier.NVME not in tiers(strategy)
    assert strategy.stats().nvme_written_bytes == 0


def test_auto_measures_the_disk(tmp_path: Path) -> None:
    strategy = ElixirStrategy(**SHORT, nvme_offload_dir=str(tmp_path / "disk"))
    fit(strategy, hybrid(DeepNet), limit_train_batches=2)
    assert strategy._machine_figures.known is not None
    assert strategy._machine_figures.known.nvme_adam_numel_per_s is not None
    assert Tier.NVME in tiers(strategy)


@pytest.mark.full
def test_auto_goes_without_for_optimizers_of_torch(tmp_path: Path) -> None:
    """Though the first plan, which leaves most of the GPU to activations, has states there."""
    options = {**SHORT, "gpu_memory_limit": "1500KiB", "nvme_offload_dir": str(tmp_path), "hardware": hardware()}
    strategy = ElixirStrategy(**options)
    assert_same_run(fit(strategy, DeepNet)[2], fit("auto", DeepNet)[2])
    assert Tier.NVME not in tiers(strategy)
    with pytest.raises(PlanError, match="AdamW cannot update there"):
        fit(ElixirStrategy(**(options | SHORT)), DeepNet)


@pytest.mark.full
def test_nor_when_it_is_known_what_a_step_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would be too much for the GPU and the host alone."""
    monkeypatch.setattr(Planner, "_counts_activations", property(lambda planner: True))  # as on a GPU
    options = {**SHORT, "gpu_memory_limit": "2200KiB", "nvme_offload_dir": str(tmp_path), "hardware": hardware()}
    strategy = ElixirStrategy(**options)
    assert_same_run(fit(strategy, DeepNet)[2], fit("auto", DeepNet)[2])
    assert Tier.NVME not in tiers(strategy)


# Options


def test_optimizers_of_torch_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"nvme_offload_fraction.*AdamW cannot update there: use HybridAdam"):
        fit(ElixirStrategy(**on_nvme(tmp_path)), Net)


def test_a_folder_that_cannot_be_used_is_told_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").write_text("a file")
    monkeypatch.setattr("lightning_elixir.strategy.ElixirStrategy.setup", lambda *_: pytest.fail("it came too late"))
    with pytest.raises(StorageError, match="cannot be used to offload to: it is a file, not a folder"):
        fit(ElixirStrategy(**on_nvme(tmp_path)), hybrid())


def _refused(options: dict[str, Any]) -> str:
    if os.environ.get("LOCAL_RANK") == "1" or int(os.environ.get("RANK", "0")) == 1:
        options = {**options, "nvme_offload_dir": "/dev/null/nowhere"}
    with pytest.raises((StorageError, PlanError)) as caught:
        fit(ElixirStrategy(**options), hybrid(), devices=2)
    return str(caught.value)


def test_a_folder_that_one_rank_cannot_use_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(_refused, 2, on_nvme(tmp_path), init_group=False)
    assert "rank 1 failed" in first
    assert "cannot be used to offload to" in second


def test_a_folder_in_memory_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_elixir.strategy.engine_strategy.is_in_memory", lambda _: True)
    fit(ElixirStrategy(**on_nvme(tmp_path)), hybrid(), limit_train_batches=1)
    assert "is in memory itself" in caplog.text


def test_checksums_find_what_was_changed_on_the_disk(tmp_path: Path) -> None:
    class Disturb(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                engine = trainer.strategy._engine.engine
                engine.synchronize()
                with mmap.mmap(-1, 4096) as block:  # aligned, as a file without the page cache wants it
                    block[:] = b"x" * 4096
                    os.pwritev(engine.store.states._file._backend._file.fd, [block], 0)

    with pytest.raises(StorageError, match="checksum"):
        fit(ElixirStrategy(**on_nvme(tmp_path, nvme_checksums=True)), hybrid(), callbacks=[Disturb()])


# Checkpoints


PLACES = {
    "nvme": lambda path: ElixirStrategy(**on_nvme(path)),
    "params": lambda path: ElixirStrategy(**on_nvme(path, nvme_offload_param_fraction=1.0)),
    "host": lambda path: ElixirStrategy(**TIGHT),
    "plain": lambda path: "auto",
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(
            full("nvme", "nvme"),
            full("nvme", "host"),
            full("host", "nvme"),
            full("nvme", "plain"),
            full("plain", "nvme"),
        ),
        *(("params", "params"), full("params", "host"), full("plain", "params")),
    ],
)
def test_resume(first: str, second: str, tmp_path: Path) -> None:
    def interrupted(first: str, second: str) -> tuple[list[float], Any]:
        trainer, model, _ = fit(PLACES[first](tmp_path), hybrid(), max_epochs=1)
        trainer.save_checkpoint(tmp_path / "one.ckpt")
        resumed = hybrid()()
        trainer = make_trainer(PLACES[second](tmp_path), max_epochs=2)
        trainer.fit(resumed, make_data(), ckpt_path=str(tmp_path / "one.ckpt"), weights_only=False)
        return [x.item() for x in [*model.losses, *resumed.losses]], trainer.strategy.lightning_module_state_dict()

    torch.manual_seed(3)
    expected = interrupted("host", "host")
    torch.manual_seed(3)
    actual = interrupted(first, second)
    assert actual[0] == expected[0]
    assert_same_state(actual[1], expected[1])


@pytest.mark.full
def test_a_checkpoint_in_the_middle_changes_nothing(tmp_path: Path) -> None:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    expected = fit(ElixirStrategy(**TIGHT), hybrid(), precision="bf16-mixed")[2]
    (tmp_path / "host").mkdir()
    actual = fit(ElixirStrategy(**on_nvme(tmp_path)), hybrid(), precision="bf16-mixed", callbacks=[Save()])[2]
    assert_same_run(actual, expected)
    saved = torch.load(tmp_path / "5.ckpt", weights_only=True)
    fit(ElixirStrategy(**TIGHT), hybrid(), precision="bf16-mixed", callbacks=[Save()])
    expected_saved = torch.load(tmp_path / "5.ckpt", weights_only=True)
    assert_same_state(saved["state_dict"], expected_saved["state_dict"])
    for index, state in expected_saved["optimizer_states"][0]["state"].items():
        assert_same_state(saved["optimizer_states"][0]["state"][index], state)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("call", telling(["preadv", "pwritev"], "pwritev"))
def test_a_failing_disk_ends_the_run_and_leaves_the_checkpoint_whole(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SaveAndBreak(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                trainer.save_checkpoint(tmp_path / "before.ckpt")
                patch.setattr(direct.os, call, failing(call, errno.EIO))

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            seen.append(exception)
            left.append(pl_module)

    seen: list[BaseException] = []
    left: list[pl.LightningModule] = []
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="Input/output error"):
        fit(ElixirStrategy(**on_nvme(tmp_path)), hybrid(), callbacks=[SaveAndBreak()])
    assert isinstance(seen[0], StorageError)
    assert list((tmp_path / "disk").iterdir()) == []
    with pytest.raises(StateError, match="Make the model anew, and go on from a checkpoint"):
        next(left[0].parameters()).sum()
    resumed = hybrid()()
    trainer = make_trainer(ElixirStrategy(**on_nvme(tmp_path)))
    trainer.fit(resumed, make_data(), ckpt_path=str(tmp_path / "before.ckpt"), weights_only=False)
    assert trainer.global_step == 8


def test_a_disk_that_fails_in_the_last_step_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing asks for what is written there once the training is over, and it fails when that is so."""

    class Break(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 7:
                patch.setattr(direct.os, "pwritev", fail_late)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            seen.append(exception)

    def fail_late(*args: Any) -> int:
        time.sleep(0.3)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    seen: list[BaseException] = []
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="Input/output error"):
        fit(ElixirStrategy(**on_nvme(tmp_path), update_timing="behind_forward"), hybrid(), callbacks=[Break()])
    assert isinstance(seen[0], StorageError)


@pytest.mark.full
def test_what_has_failed_is_freed_at_the_end_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Break(pl.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            if trainer.global_step == 3:
                patch.setattr(direct.os, "pwritev", failing("pwritev", errno.EIO))

    def train() -> tuple[weakref.ref[Any], weakref.ref[Any]]:
        model = hybrid()()
        trainer = make_trainer(ElixirStrategy(**on_nvme(tmp_path)), callbacks=[Break()])
        with pytest.raises(StorageError, match="Input/output error"):
            trainer.fit(model, make_data())
        files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        assert not [file for file in files if str(tmp_path / "disk") in file]  # whoever keeps the model
        trainer.strategy.close()
        return weakref.ref(model), weakref.ref(trainer)

    with monkeypatch.context() as patch:
        references = train()
    for _ in range(3):  # graphs of losses are freed by the first
        gc.collect()
    assert [reference() for reference in references] == [None, None]


# The rest of a run


@pytest.mark.full
def test_validate_test_predict_and_a_second_fit(tmp_path: Path) -> None:
    results = []
    for options in (dict(TIGHT), on_nvme(tmp_path)):
        torch.manual_seed(0)
        model = hybrid()()
        trainer = make_trainer(ElixirStrategy(**options))
        trainer.validate(model, make_data(8), verbose=False)
        trainer.fit(model, make_data())
        trainer.test(model, make_data(8), verbose=False)
        trainer.predict(model, make_data(8))
        trainer.fit(model, make_data())
        results.append(([x.item() for x in model.losses], trainer.strategy.lightning_module_state_dict()))
        trainer.strategy.close()
    assert results[0][0] == results[1][0]
    assert_same_state(results[1][1], results[0][1])


def test_metrics_and_report(tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path / "logs")
    strategy = ElixirStrategy(**on_nvme(tmp_path, report_dir=str(tmp_path / "report")))
    monitor = ElixirStatsMonitor()
    fit(strategy, hybrid(), logger=logger, callbacks=[monitor], log_every_n_steps=1, precision="bf16-mixed")
    text = (tmp_path / "report" / "report.json").read_text()
    assert "nvme_read_bytes" in text
    header = next((tmp_path / "logs").rglob("metrics.csv")).read_text().splitlines()[0]
    assert {"elixir/nvme_read_bytes", "elixir/nvme_written_bytes", "elixir/nvme_wait_s"} <= set(header.split(","))


class PartsNet(Net):
    """Each fit trains another part of every chunk."""

    part = 0

    def configure_optimizers(self) -> Any:
        return HybridAdam(list(self.parameters())[self.part :: 2], lr=1e-2)


@pytest.mark.full
def test_an_optimizer_over_other_parameters_in_the_next_fit() -> None:
    """The first Trainer, and with it its optimizer, is still there."""
    found = []
    for options in ({}, {"nvme_offload_fraction": 1.0}):
        net, trainers = PartsNet(), []
        for net.part in (0, 1):
            trainers.append(make_trainer(ElixirStrategy(placement_policy="cpu", **CHUNK, **options)))
            trainers[-1].fit(net, make_data())
        found.append({name: value.clone() for name, value in net.state_dict().items()})
        before = PartsNet().state_dict()
        assert not any(torch.equal(value, before[name]) for name, value in found[-1].items())
    assert [name for name, value in found[0].items() if not torch.equal(found[1][name], value)] == []
