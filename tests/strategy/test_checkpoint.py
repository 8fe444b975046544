"""Checkpoints: the same next losses, bit for bit; and files that plain PyTorch and plain Lightning read."""

from __future__ import annotations

import copy
import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elixir._lightning import CheckpointIO, Fabric, pl
from lightning_elixir.errors import PlanError
from lightning_elixir.fabric import ElixirStrategy as FabricStrategy
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.tiers import crossed, full, telling
from tests.strategy.models import (
    CHUNK,
    TIGHT,
    LateNet,
    Net,
    ShardedNet,
    assert_same_as_plain,
    assert_same_state,
    fit,
    make_data,
    make_trainer,
)
from tests.strategy.nets import FrozenNet, GroupsNet, ScheduledNet, TiedNet

ELIXIR = {
    "tight": lambda: ElixirStrategy(**TIGHT),
    "other chunks": lambda: ElixirStrategy(placement_policy="cuda", chunk_size="24KiB"),
    "plain": lambda: "auto",
}


def _interrupted(tmp_path: Path, first: str, second: str, make_model: Callable[[], Net], **options: Any) -> list[float]:
    """Losses of an epoch with `first`, a checkpoint, and an epoch with `second` that resumes from it."""
    trainer, model, _ = fit(ELIXIR[first](), make_model, max_epochs=1, **options)
    path = tmp_path / "one.ckpt"
    trainer.save_checkpoint(path)
    pl.seed_everything(5, verbose=False)
    resumed = make_model()
    trainer = make_trainer(ELIXIR[second](), max_epochs=2, **options)
    trainer.fit(resumed, make_data(), ckpt_path=str(path), weights_only=False)
    return [loss.item() for loss in [*model.losses, *resumed.losses]]


def _uninterrupted(make_model: Callable[[], Net], **options: Any) -> list[float]:
    class Reseed(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                torch.set_rng_state(state)

    pl.seed_everything(5, verbose=False)
    make_model()
    state = torch.get_rng_state()
    _, model, _ = fit("auto", make_model, max_epochs=2, callbacks=[Reseed()], **options)
    return [loss.item() for loss in model.losses]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        full("tight", "tight"),
        ("tight", "other chunks"),
        full("tight", "plain"),
        ("plain", "tight"),
        full("other chunks", "tight"),
    ],
)
def test_resume_gives_the_same_next_losses(tmp_path: Path, first: str, second: str) -> None:
    losses = _interrupted(tmp_path, first, second, Net)
    assert losses == _uninterrupted(Net)
    assert len(losses) == 16


@pytest.mark.parametrize("make_model", telling([LateNet, GroupsNet, ScheduledNet, FrozenNet, TiedNet], "GroupsNet"))
def test_models_resume(tmp_path: Path, make_model: Callable[[], Net]) -> None:
    plain = Net if make_model is LateNet else make_model
    assert _interrupted(tmp_path, "tight", "tight", make_model) == _uninterrupted(plain)


@pytest.mark.parametrize("make_model", telling([GroupsNet, FrozenNet], "GroupsNet"))
def test_models_whose_parameters_have_other_numbers_resume_in_plain_lightning(
    tmp_path: Path, make_model: Callable[[], Net]
) -> None:
    assert _interrupted(tmp_path, "tight", "plain", make_model) == _uninterrupted(make_model)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*configure_sharded_model")
def test_deprecated_hook_resumes(tmp_path: Path) -> None:
    assert _interrupted(tmp_path, "tight", "tight", ShardedNet) == _uninterrupted(Net)


@pytest.mark.parametrize("make_model", telling([Net, TiedNet], "TiedNet"))
def test_checkpoint_loads_in_plain_pytorch(tmp_path: Path, make_model: Any) -> None:
    trainer, _, run = fit(ElixirStrategy(**TIGHT), make_model)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    checkpoint = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert_same_state(checkpoint["state_dict"], run.state)
    loaded = make_model.load_from_checkpoint(tmp_path / "one.ckpt")
    assert_same_state(loaded.state_dict(), run.state)
    optimizer = loaded.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])


def test_checkpoint_equals_that_of_plain_lightning(tmp_path: Path) -> None:
    checkpoints = []
    for name, strategy in (("plain", "auto"), ("elixir", ElixirStrategy(**TIGHT))):
        trainer, _, _ = fit(strategy, ScheduledNet)
        trainer.save_checkpoint(tmp_path / name)
        checkpoints.append(torch.load(tmp_path / name, weights_only=True))
    expected, actual = checkpoints
    assert set(actual) == set(expected)
    assert actual["lr_schedulers"] == expected["lr_schedulers"]
    assert actual["loops"] == expected["loops"]
    for a, e in zip(actual["optimizer_states"], expected["optimizer_states"], strict=True):
        assert a["param_groups"] == e["param_groups"]
        assert a["state"].keys() == e["state"].keys()
        for index in e["state"]:
            assert_same_state(a["state"][index], e["state"][index])


def test_weights_only_checkpoint(tmp_path: Path) -> None:
    trainer, _, run = fit(ElixirStrategy(**TIGHT))
    trainer.save_checkpoint(tmp_path / "one.ckpt", weights_only=True)
    assert "optimizer_states" not in torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert_same_state(Net.load_from_checkpoint(tmp_path / "one.ckpt").state_dict(), run.state)


def _with_states(path: Path, states: Callable[[list[Any]], list[Any] | None]) -> str:
    """A checkpoint of plain Lightning with other optimizer states."""
    trainer, _, _ = fit("auto", max_epochs=1)
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=False)
    left = states(checkpoint.pop("optimizer_states"))
    torch.save(checkpoint if left is None else {**checkpoint, "optimizer_states": left}, path)
    return str(path)


def test_without_optimizer_states_the_optimizer_begins_anew(tmp_path: Path, caplog: Any) -> None:
    path = _with_states(tmp_path / "c.ckpt", lambda states: [])
    with caplog.at_level("WARNING", "lightning_elixir"):
        assert_same_as_plain(ckpt_path=path, max_epochs=2)
    assert "the optimizer begins anew" in caplog.text


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_states_of_too_many_optimizers_are_refused(tmp_path: Path, kind: Any) -> None:
    path = _with_states(tmp_path / "c.ckpt", lambda states: states * 2)
    with pytest.raises(PlanError, match=r"the states of 2 optimizers, and configure_optimizers\(\) returned 1"):
        fit(ElixirStrategy(**TIGHT, state_dict_type=kind), ckpt_path=path, max_epochs=2)


class BySGD(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("kind", telling(["full", "sharded"], "sharded"))
def test_states_of_another_optimizer_are_refused(tmp_path: Path, kind: Any) -> None:
    trainer, _, _ = fit(ElixirStrategy(**TIGHT, state_dict_type=kind), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    with pytest.raises(PlanError, match="another one than SGD, which has dampening, momentum as well: go on with"):
        fit(ElixirStrategy(**TIGHT, state_dict_type=kind), BySGD, ckpt_path=str(tmp_path / "c.ckpt"), max_epochs=2)


@pytest.mark.parametrize("strategy", ["auto", "elixir"])
def test_a_checkpoint_of_weights_alone_does_not_resume(tmp_path: Path, strategy: str) -> None:
    path = _with_states(tmp_path / "c.ckpt", lambda states: None)
    with pytest.raises(KeyError, match="contains only the model"):
        fit(strategy, ckpt_path=path, max_epochs=2)


@pytest.mark.parametrize("make_model", [full(Net), LateNet])
def test_ckpt_path_of_evaluation(tmp_path: Path, make_model: Callable[[], Net]) -> None:
    trainer, _, _ = fit(ElixirStrategy(**TIGHT), make_model)
    path = str(tmp_path / "one.ckpt")
    trainer.save_checkpoint(path)

    def run(strategy: Any) -> Any:
        return make_trainer(strategy).test(make_model(), make_data(8), ckpt_path=path, verbose=False)

    expected = run("auto")
    assert run(ElixirStrategy(**TIGHT)) == expected
    # On a model that is in an engine already, and has gone on since.
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, make_data())
    assert trainer.test(trainer.lightning_module, make_data(8), ckpt_path=path, verbose=False) == expected


@pytest.mark.full
def test_best_checkpoint_of_model_checkpoint(tmp_path: Path) -> None:
    def run(strategy: Any, folder: Path) -> Any:
        callback = pl.callbacks.ModelCheckpoint(folder, monitor="val_loss", save_last=True, filename="{epoch}")
        trainer, model, _ = fit(
            strategy,
            val=lambda: make_data(8, seed=2),
            callbacks=[callback],
            max_epochs=3,
            enable_checkpointing=True,
        )
        tested = trainer.test(model, make_data(8), ckpt_path="best", verbose=False, weights_only=False)
        names = sorted(path.name for path in folder.iterdir())
        return names, callback.best_model_score, tested

    assert run(ElixirStrategy(**TIGHT), tmp_path / "elixir") == run("auto", tmp_path / "plain")


def test_strict_loading_names_what_is_missing(tmp_path: Path) -> None:
    trainer, model, _ = fit(ElixirStrategy(**TIGHT))
    state = trainer.strategy.lightning_module_state_dict()
    del state["layers.0.up.weight"]
    state["surplus"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"(?s)layers.0.up.weight.*surplus|surplus.*layers.0.up.weight"):
        trainer.strategy.load_model_state_dict({"state_dict": state}, strict=True)
    before = trainer.strategy.lightning_module_state_dict()
    state["layers.0.up.bias"] = state["layers.0.up.bias"] + 1
    trainer.strategy.load_model_state_dict({"state_dict": state}, strict=False)
    after = trainer.strategy.lightning_module_state_dict()
    assert torch.equal(after["layers.0.up.bias"], before["layers.0.up.bias"] + 1)
    assert torch.equal(after["layers.0.up.weight"], before["layers.0.up.weight"])


def test_state_dict_works_after_teardown_and_not_after_close() -> None:
    trainer, model, run = fit(ElixirStrategy(**TIGHT))
    strategy = trainer.strategy
    assert_same_state(strategy.lightning_module_state_dict(), run.state)
    assert_same_state(model.state_dict(), run.state)
    assert_same_state(copy.deepcopy(model).state_dict(), run.state)
    strategy.close()
    with pytest.raises(RuntimeError):
        model.state_dict()
    strategy.close()


class HookNet(LateNet):
    """Writes to and reads from the checkpoint; changes the state on its way in."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 5

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["mine"] == 5
        checkpoint["state_dict"] = {k.removeprefix("old."): v for k, v in checkpoint["state_dict"].items()}


class ExtraNet(Net):
    """Keeps more than parameters and buffers: extra state, the state of a metric, a renaming hook."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import SumMetric

        self.metric = SumMetric()
        self.metric.persistent(True)
        self.extra = 0
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: Any, state: Any, *args: Any) -> None:
        for name in [name for name in state if name.startswith("old.")]:
            state[name.removeprefix("old.")] = state.pop(name)

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.extra += 1
        self.metric.update(1.0)
        return super().training_step(batch, batch_idx)


@crossed(told=["bf16-mixed-True", "32-true-False"], precision=["32-true", "bf16-mixed"], is_live=[False, True])
def test_extra_state_metrics_and_hooks(is_live: bool, precision: Any) -> None:
    _, _, expected = fit("auto", ExtraNet)
    trainer, model, actual = fit(ElixirStrategy(**TIGHT), ExtraNet, precision=precision)
    assert list(actual.state) == list(expected.state)
    assert actual.state["_extra_state"] == {"extra": 8}
    assert actual.state["metric.sum_value"] == 8
    state = {f"old.{k}": v for k, v in actual.state.items()}
    strategy = trainer.strategy
    if not is_live:
        model = ExtraNet()
        strategy = ElixirStrategy(**TIGHT)
        strategy.connect(model)
        strategy.cluster_environment = trainer.strategy.cluster_environment
    else:
        with strategy.full_parameters(modify=True) as parameters, torch.no_grad():
            for parameter in parameters.values():
                parameter.zero_()
    strategy.load_model_state_dict({"state_dict": state})
    assert model.extra == 8
    after = strategy.lightning_module_state_dict()
    assert all(torch.equal(after[k], v) for k, v in actual.state.items() if k != "_extra_state")


def test_checkpoint_hooks_of_the_module(tmp_path: Path) -> None:
    assert _interrupted(tmp_path, "tight", "tight", HookNet) == _uninterrupted(Net)


def test_user_meta_parameters_get_their_values_from_the_checkpoint(tmp_path: Path) -> None:
    class MetaNet(Net):
        is_made_in_init = False

        def configure_model(self) -> None:
            with torch.device("meta"):
                self._make()

    trainer, _, run = fit(ElixirStrategy(**TIGHT))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    trainer = make_trainer(ElixirStrategy(**CHUNK))
    model = MetaNet(seed=None)
    trainer.test(model, make_data(8), ckpt_path=str(tmp_path / "one.ckpt"), verbose=False)
    assert_same_state(trainer.strategy.lightning_module_state_dict(), run.state)


def test_asynchronous_io_of_lightning_is_honoured_for_files_and_refused_for_folders(tmp_path: Path) -> None:
    AsyncCheckpointIO = importlib.import_module(f"{pl.__name__}.plugins.io").AsyncCheckpointIO

    options = {"enable_checkpointing": True, "max_epochs": 2}

    def run(strategy: ElixirStrategy, folder: Path) -> Any:
        saver = pl.callbacks.ModelCheckpoint(folder, save_top_k=-1, every_n_epochs=1)
        return fit(strategy, callbacks=[saver], plugins=[AsyncCheckpointIO()], **options)

    _, _, expected = run(ElixirStrategy(**TIGHT), tmp_path)
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) == 2
    assert_same_state(torch.load(files[-1], weights_only=False)["state_dict"], expected.state)
    with pytest.raises(PlanError, match="AsyncCheckpointIO would have nothing to do.*async_save=True"):
        run(ElixirStrategy(**TIGHT, state_dict_type="sharded"), tmp_path / "folder")


class _InFolders(CheckpointIO):
    """A file for each part of a checkpoint."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        Path(path).mkdir(parents=True)
        for name, value in checkpoint.items():
            torch.save(value, Path(path) / name)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return {file.name: torch.load(file, weights_only=False) for file in Path(path).iterdir()}

    def remove_checkpoint(self, path: Any) -> None:
        shutil.rmtree(path)


def test_folders_of_a_users_checkpoint_io_are_read_by_it(tmp_path: Path) -> None:
    trainer, _, first = fit(ElixirStrategy(**TIGHT), plugins=[_InFolders()])
    trainer.save_checkpoint(tmp_path / "whole")
    assert_same_as_plain(plugins=[_InFolders()], ckpt_path=str(tmp_path / "whole"), max_epochs=2)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=FabricStrategy(**TIGHT), plugins=[_InFolders()])
    fabric.launch()
    found = fabric.load(tmp_path / "whole")
    assert_same_state(found["state_dict"], first.state)
    # Those of sharded checkpoints are ours.
    trainer, _, _ = fit(ElixirStrategy(**TIGHT, state_dict_type="sharded"))
    trainer.save_checkpoint(tmp_path / "sharded")
    loaded = make_trainer(ElixirStrategy(**TIGHT), plugins=[_InFolders()])
    loaded.fit(Net(), make_data(), ckpt_path=str(tmp_path / "sharded"))
    assert_same_state(loaded.strategy.lightning_module_state_dict(), first.state)
