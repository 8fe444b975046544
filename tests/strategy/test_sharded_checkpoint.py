"""Sharded checkpoints: saved by some ranks, loaded by others, bit for bit; and by others than us."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import DataLoader, Dataset

from lightning_elixir._lightning import pl
from lightning_elixir.checkpoint import CheckpointIndex
from lightning_elixir.checkpoint.consolidate import save_one_file
from lightning_elixir.cli import main
from lightning_elixir.errors import PlanError, StorageError
from lightning_elixir.optim import HybridAdam
from lightning_elixir.plan.shard_segments import segments_of
from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.strategy.engine_handle import EngineHandle
from lightning_elixir.strategy.sharded_checkpoints import ShardedCheckpoints
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.cut_up import NUM_THREADS, cut_up
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.seeds import seed_everything
from tests.helpers.tiers import crossed, full, telling
from tests.strategy.models import TIGHT, LateNet, Net, assert_same_state, fit, make_data, make_trainer
from tests.strategy.nets import FrozenNet, GroupsNet, ScheduledNet, TiedNet
from tests.strategy.sharded import OPTIONS, Batches, MixedNet, assert_same_dump, dump, load, save, train_on


def _save_cut_up(*arguments: Any) -> Any:
    with cut_up():
        return save(*arguments)


def _load_cut_up(*arguments: Any) -> Any:
    with cut_up():
        return load(*arguments)


def _on_ranks(function: Any, world_size: int, *arguments: Any) -> Any:
    if world_size == 1:
        return function(*arguments[:3], 1, arguments[3])
    return run_ranks(function, world_size, *arguments[:3], world_size, arguments[3], init_group=False)[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("saved_by", "first", "loaded_by", "second"),
    [
        full(1, "tight", 1, "cuda"),
        full(1, "cuda", 1, "nvme"),
        full(1, "nvme", 1, "tight"),
        full(1, "tight", 2, "const"),
        full(1, "const", 3, "tight"),
        full(2, "tight", 1, "cuda"),
        full(2, "cuda", 2, "tight"),
        full(2, "const", 3, "whole"),
        full(2, "whole", 3, "cuda"),
        full(3, "nvme", 2, "cuda"),
        full(3, "tight", 1, "tight"),
        full(3, "cuda", 3, "nvme"),
        full(3, "whole", 4, "tight"),
        full(4, "tight", 2, "nvme"),
        full(1, "all on nvme", 2, "cuda"),
        full(2, "tight", 1, "all on nvme"),
        (2, "all on nvme", 3, "all on nvme"),
    ],
)
def test_any_ranks_and_placements(tmp_path: Path, saved_by: int, first: str, loaded_by: int, second: str) -> None:
    path = tmp_path / "one.ckpt"
    expected = _on_ranks(save, saved_by, path, OPTIONS[first], MixedNet, {})
    assert_same_dump(_on_ranks(load, loaded_by, path, OPTIONS[second], MixedNet, {}), expected)
    files = [p.name for p in path.iterdir()]
    assert sorted(files) == sorted([".metadata", "meta.pt", *(f"__{rank}_0.distcp" for rank in range(saved_by))])
    assert [p.name for p in tmp_path.iterdir()] == ["one.ckpt"]


@pytest.mark.parametrize(
    ("saved_by", "first", "loaded_by", "second"),
    [
        (1, "cuda", 2, "tight"),
        (2, "tight", 3, "whole"),
        (3, "all on nvme", 1, "nvme"),
        (2, "const", 2, "all on nvme"),
    ],
)
@pytest.mark.full
def test_several_files_and_boxes_of_a_tensor(
    tmp_path: Path, saved_by: int, first: str, loaded_by: int, second: str
) -> None:
    path = tmp_path / "one.ckpt"
    expected = _on_ranks(_save_cut_up, saved_by, path, OPTIONS[first], MixedNet, {})
    assert_same_dump(_on_ranks(_load_cut_up, loaded_by, path, OPTIONS[second], MixedNet, {}), expected)
    index = CheckpointIndex(path)
    assert len(index.tensors["state_dict.layers.1.up.weight"].boxes) >= 32 * 64 // 300
    assert {p.name for p in path.iterdir() if p.suffix} == {
        "meta.pt",
        *(f"__{rank}_{number}.distcp" for rank in range(saved_by) for number in range(NUM_THREADS)),
    }
    used = {place.file for tensor in index.tensors.values() for _, place in tensor.boxes}
    assert len(used) > saved_by
    # As one thread reads it, where boxes are as large as they may be.
    assert_same_dump(load(path, OPTIONS["tight"], MixedNet, 1, {}), expected)


@pytest.mark.parametrize("make_model", telling([LateNet, GroupsNet, ScheduledNet, FrozenNet, TiedNet], "GroupsNet"))
def test_models(tmp_path: Path, make_model: Any) -> None:
    expected = save(tmp_path / "one", OPTIONS["tight"], make_model, 1, {})
    trainer = make_trainer(ElixirStrategy(**OPTIONS["cuda"]))
    trainer.fit(make_model(), make_data(), ckpt_path=str(tmp_path / "one"))
    assert_same_dump(dump(trainer), expected)


@pytest.mark.parametrize(
    ("first", "second"), [("bf16-mixed", "32-true"), full("32-true", "bf16-mixed"), full("bf16-mixed", "bf16-mixed")]
)
def test_precisions_with_masters_keep_all_bits(tmp_path: Path, first: Any, second: Any) -> None:
    expected = save(tmp_path / "one", OPTIONS["tight"], MixedNet, 1, {"precision": first})
    actual = load(tmp_path / "one", OPTIONS["tight"], MixedNet, 1, {"precision": second})
    assert_same_dump(actual, expected)


@pytest.mark.full
def test_precision_without_master_rounds(tmp_path: Path) -> None:
    expected = save(tmp_path / "one", OPTIONS["tight"], Net, 1, {})
    actual = load(tmp_path / "one", OPTIONS["tight"], Net, 1, {"precision": "bf16-true"})
    assert_same_state(actual[0], {k: v.bfloat16() for k, v in expected[0].items()})


# Resumed training


@crossed(
    told=["plain-True-2"],
    more=[pytest.param({}, id="plain"), pytest.param({"accumulate_grad_batches": 2}, id="accumulated")],
    async_save=[True, False],
    num_ranks=[2, 1],
)
def test_resumed_run_equals_the_uninterrupted(
    tmp_path: Path, num_ranks: int, more: dict[str, Any], async_save: bool
) -> None:
    # The model has dropout, and steps 3 is in the middle of an epoch: random states are part of it.
    options = {**OPTIONS["tight"], "async_save": async_save}
    run = run_ranks if num_ranks > 1 else _here
    expected = run(train_on, num_ranks, None, options, num_ranks, more, init_group=False)
    path = (tmp_path / "saved" / "step=3.ckpt").rename(tmp_path / "three.ckpt")
    resumed = run(train_on, num_ranks, path, options, num_ranks, more, init_group=False)
    for (losses, after), (all_losses, reference) in zip(resumed, expected, strict=True):
        assert len(losses) < len(all_losses)
        assert losses == all_losses[-len(losses) :]
        if after[0]:
            assert_same_dump(after, reference)


class _Resumable(DataLoader[Any]):
    """Goes on from where it stopped, with an iterator that is made at once."""

    def __init__(self, dataset: Dataset[Any], *, shuffle: bool = False) -> None:
        super().__init__(dataset, batch_size=4, shuffle=shuffle)
        self._seen = 0

    def __iter__(self) -> Any:
        first, self._seen = self._seen, 0
        indices = super().__iter__()
        for _ in range(first):
            next(indices._sampler_iter)  # type: ignore[attr-defined]
        return map(self._counted, itertools.count(first + 1), indices)

    def _counted(self, number: int, batch: Any) -> Any:
        self._seen = number % len(self)
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"seen": self._seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._seen = state["seen"]


class _Noisy(Dataset[Any]):
    def __init__(self) -> None:
        self._samples = make_data(20).dataset

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        x, y = self._samples[index]
        return x + 0.1 * torch.randn_like(x), y


class _NoisyNet(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]] if self.trainer.training else batch


class _SeedingNet(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(self.trainer.global_step)


def _plain_loader() -> DataLoader[Any]:
    return make_data(20)


_DRAWS: dict[str, tuple[type[Net], Callable[[], Any], Callable[[], Any] | None, int, dict[str, Any]]] = {
    "the end of an epoch": (Net, _plain_loader, None, 5, {}),
    "shuffled": (Net, partial(make_data, 20, shuffle=True), None, 5, {}),
    "validation at the end": (Net, partial(make_data, 20, shuffle=True), _plain_loader, 5, {}),
    "the dataset": (Net, lambda: _Resumable(_Noisy()), None, 3, {}),
    "a hook of batches": (_NoisyNet, lambda: _Resumable(_plain_loader().dataset), None, 3, {}),
    "a seed": (_SeedingNet, lambda: Batches(1), None, 3, {}),
    "validation between": (Net, lambda: _Resumable(_Noisy()), _plain_loader, 3, {"val_check_interval": 3}),
}


@pytest.mark.parametrize("what", telling(_DRAWS, "shuffled", "a hook of batches", "a seed", "validation between"))
def test_what_draws_around_the_first_batch_draws_the_same(what: str) -> None:
    make_model, train, val, step, more = _DRAWS[what]

    def losses(path: str | None) -> list[Tensor]:
        seed_everything(11)
        model, at_end = make_model(optimizer="hybrid"), step == 5
        often = {"every_n_epochs": 1} if at_end else {"every_n_train_steps": step}
        callback = pl.callbacks.ModelCheckpoint("saved", filename="{step}", save_top_k=-1, **often)
        strategy = ElixirStrategy(**OPTIONS["tight"])
        trainer = make_trainer(strategy, max_epochs=2, callbacks=[callback], enable_checkpointing=True, **more)
        trainer.fit(model, train(), None if val is None else val(), ckpt_path=path)
        return model.losses

    expected = losses(None)
    resumed = losses(f"saved/step={step}.ckpt")
    assert len(resumed) == len(expected) - step
    assert all(torch.equal(a, b) for a, b in zip(resumed, expected[step:], strict=True))


@pytest.mark.parametrize(("first", "second"), [("tight", "all on nvme"), ("all on nvme", "cuda")])
@pytest.mark.full
def test_a_resumed_run_equals_the_uninterrupted_elsewhere(tmp_path: Path, first: str, second: str) -> None:
    """With 16-bit parameters, of which masters tell nothing."""
    here, there = ({**OPTIONS[name]} for name in (first, second))
    for options in (here, there):
        if "nvme_offload_fraction" in options:
            options["nvme_offload_dir"] = str(tmp_path)
    more = {"precision": "bf16-mixed"}
    all_losses, reference = train_on(None, here, 1, more)
    path = (tmp_path / "saved" / "step=3.ckpt").rename(tmp_path / "three.ckpt")
    losses, after = train_on(path, there, 1, more)
    assert len(losses) < len(all_losses)
    assert losses == all_losses[-len(losses) :]
    assert_same_dump(after, reference)


def _here(function: Any, world_size: int, *arguments: Any, init_group: bool) -> list[Any]:
    return [function(*arguments)]


# Others


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("save", [full(save), _save_cut_up])
def test_plain_torch_reads_it(tmp_path: Path, save: Any) -> None:
    state, _ = _on_ranks(save, 2, tmp_path / "one", OPTIONS["tight"], MixedNet, {})
    read = {"state_dict": {name: torch.zeros_like(value) for name, value in state.items()}}
    dcp.load(read, checkpoint_id=tmp_path / "one", no_dist=True)
    assert_same_state(read["state_dict"], state)
    dcp_to_torch_save(tmp_path / "one", tmp_path / "one.pt")
    loaded = torch.load(tmp_path / "one.pt", weights_only=True)
    found = {k: v for k, v in loaded["state_dict"].items() if k != "_extra_state"}
    assert_same_state({k: found[k] for k in state}, state)
    assert loaded["state_dict"]["_extra_state"] == {"calls": 4}


@pytest.mark.full
@pytest.mark.parametrize("command", ["lightning.pytorch", "lightning.fabric"])
def test_consolidate_commands_of_lightning(tmp_path: Path, command: str) -> None:
    pytest.importorskip("lightning")
    state, states = save(tmp_path / "one", OPTIONS["tight"], ScheduledNet, 1, {})
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"{command}.utilities.consolidate_checkpoint", str(tmp_path / "one")],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    loaded = torch.load(tmp_path / "one.consolidated", weights_only=True)
    assert_same_state(loaded["state_dict"], state)
    assert_same_state(ScheduledNet.load_from_checkpoint(tmp_path / "one.consolidated").state_dict(), state)
    optimizer = loaded["optimizer_states"][0] if "optimizer_states" in loaded else loaded["optimizer_0"]
    names = optimizer["param_groups"][0]["params"]
    assert_same_state(optimizer["state"][names[0]], states["state"][0])


def test_our_consolidated_file_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    state, states = _on_ranks(save, 2, tmp_path / "one", OPTIONS["tight"], TiedNet, {})
    assert main(["consolidate", str(tmp_path / "one"), "-o", str(tmp_path / "one.ckpt")]) == 0
    loaded = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert_same_state(loaded["state_dict"], state)
    storages = {value.untyped_storage().data_ptr() for value in loaded["state_dict"].values()}
    assert len(storages) == len(state) - 1  # tied
    assert_same_state(TiedNet.load_from_checkpoint(tmp_path / "one.ckpt").state_dict(), state)
    losses = []
    for strategy, path in (
        ("auto", "one.ckpt"),
        (ElixirStrategy(**OPTIONS["tight"]), "one"),
        (ElixirStrategy(**TIGHT), "one.ckpt"),
    ):
        model = TiedNet()
        trainer = make_trainer(strategy, max_epochs=2)
        pl.seed_everything(3, verbose=False)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        trainer.fit(model, make_data(), ckpt_path=str(tmp_path / path))
        losses.append([loss.item() for loss in model.losses])
    assert losses[0] == losses[1] == losses[2]
    assert main(["consolidate", str(tmp_path / "one"), "-o", str(tmp_path / "one.ckpt")]) == 2  # it is there


@pytest.mark.full
def test_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state, _ = _on_ranks(save, 2, tmp_path / "one", OPTIONS["tight"], MixedNet, {})
    assert main(["consolidate", str(tmp_path / "one"), "-o", str(tmp_path / "one.safetensors")]) == 0
    found = safetensors.load_file(tmp_path / "one.safetensors")
    del state["layers.1.up.weight"]  # tied: there once, under its first name
    assert set(found) == set(state)
    assert_same_state({name: found[name] for name in state}, state)
    folder = tmp_path / "several"
    assert main(["consolidate", str(tmp_path / "one"), "-o", str(folder), "--max-file-size", "20KiB"]) == 0
    table = json.loads((folder / "model.safetensors.index.json").read_text())
    assert table["metadata"]["total_size"] == sum(value.nbytes for value in state.values())
    names = set(table["weight_map"].values())
    assert len(names) > 1
    assert {path.name for path in folder.iterdir()} == {*names, "model.safetensors.index.json"}
    merged = {k: v for name in names for k, v in safetensors.load_file(folder / name).items()}
    assert_same_state({name: merged[name] for name in state}, state)
    assert all(name in safetensors.load_file(folder / file) for name, file in table["weight_map"].items())


def test_a_part_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state, _ = save(tmp_path / "one", OPTIONS["tight"], MixedNet, 1, {})
    command = ["consolidate", str(tmp_path / "one"), "--part", "layers.0", "-o"]
    assert main([*command, str(tmp_path / "part")]) == 0
    found = safetensors.load_file(tmp_path / "part" / "model.safetensors")
    assert found
    assert_same_state(
        {f"layers.0.{k}": v for k, v in found.items()}, {k: v for k, v in state.items() if "layers.0." in k}
    )
    assert main([*command, str(tmp_path / "part.ckpt")]) == 2
    assert main(["consolidate", str(tmp_path / "one"), "--part", "layer", "-o", str(tmp_path / "none")]) == 2
    assert "no weights below layer: there are scale, unused," in capsys.readouterr().err


# Lightning's callbacks and hooks


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint")
def test_model_checkpoint_removes_and_links(tmp_path: Path) -> None:
    for async_save in (False, True):
        folder = tmp_path / str(async_save)
        callback = pl.callbacks.ModelCheckpoint(
            folder, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}"
        )
        trainer, model, _ = fit(
            ElixirStrategy(**{**OPTIONS["tight"], "async_save": async_save}),
            val=lambda: make_data(8, seed=2),
            callbacks=[callback],
            max_epochs=4,
            enable_checkpointing=True,
        )
        names = sorted(path.name for path in folder.iterdir())
        assert len(names) == 3
        assert "last.ckpt" in names
        assert all((folder / name / ".metadata").is_file() for name in names)
        best = trainer.test(model, make_data(8), ckpt_path="best", verbose=False, weights_only=False)
        again = make_trainer(ElixirStrategy(**OPTIONS["cuda"]))
        path = callback.best_model_path
        assert again.test(Net(), make_data(8), ckpt_path=path, verbose=False, weights_only=False) == best


def test_hooks_see_and_change_the_state_dict(tmp_path: Path) -> None:
    class ThriftyNet(FrozenNet):
        """Leaves out what is frozen."""

        strict_loading = False

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            for name, parameter in self.named_parameters():
                if not parameter.requires_grad:
                    del checkpoint["state_dict"][name]
            checkpoint["mine"] = 5

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert checkpoint["mine"] == 5

    trainer, model, run = fit(ElixirStrategy(**OPTIONS["tight"]), ThriftyNet)
    trainer.save_checkpoint(tmp_path / "one")
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    metadata = dcp.FileSystemReader(tmp_path / "one").read_metadata()
    assert frozen
    assert not [name for name in frozen if f"state_dict.{name}" in metadata.state_dict_metadata]
    resumed = make_trainer(ElixirStrategy(**OPTIONS["cuda"]))
    resumed.fit(ThriftyNet(), make_data(), ckpt_path=str(tmp_path / "one"))
    assert_same_state(dump(resumed)[0], dump(trainer)[0])


def _halve(model: Net, checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["layers.4.weight"] = checkpoint["state_dict"]["layers.4.weight"] * 0.5


def _keep_aside(model: Net, checkpoint: dict[str, Any]) -> None:
    checkpoint["aside"] = [{"weight": checkpoint["state_dict"]["layers.4.weight"]}]


def _forget_moments(model: Net, checkpoint: dict[str, Any]) -> None:
    for state in checkpoint["optimizer_states"][0]["state"].values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


@pytest.mark.parametrize(
    ("hook", "place"),
    [
        (_halve, r"checkpoint\['state_dict'\]\['layers.4.weight'\]"),
        (_keep_aside, r"checkpoint\['aside'\]\[0\]\['weight'\]"),
        full(
            _forget_moments, r"checkpoint\['optimizer_states'\]\[0\]\['state'\]\['layers.0.norm.weight'\]\['exp_avg'\]"
        ),
    ],
)
def test_what_would_be_saved_without_values_is_refused(tmp_path: Path, hook: Any, place: str) -> None:
    """Values kept aside were tensors on meta in the folder, and so lost."""
    trainer, model, _ = fit(ElixirStrategy(**OPTIONS["tight"]))
    model.on_save_checkpoint = partial(hook, model)
    with pytest.raises(PlanError, match=f"{place} has no values"):
        trainer.save_checkpoint(tmp_path / "one")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_may_be_saved_while_another_is_put_together(tmp_path: Path) -> None:
    class Saves(Net):
        is_inside = False

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if not self.is_inside:
                self.is_inside = True
                self.trainer.save_checkpoint(tmp_path / "inner")

    trainer, _, _ = fit(ElixirStrategy(**OPTIONS["tight"]), Saves)
    trainer.save_checkpoint(tmp_path / "outer")
    expected = dump(trainer)[0]
    for name in ("inner", "outer"):
        loaded = make_trainer(ElixirStrategy(**OPTIONS["cuda"]))
        loaded.fit(Net(), make_data(), ckpt_path=str(tmp_path / name))
        assert_same_state(dump(loaded)[0], expected)


@crossed(
    kind=["full", "sharded"],
    hook=["on_save_checkpoint", "on_load_checkpoint"],
    told=["sharded-on_save_checkpoint", "sharded-on_load_checkpoint"],
)
def test_states_that_a_hook_takes_away_begin_anew(tmp_path: Path, kind: Any, hook: str) -> None:
    class Anew(Net):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.modules():  # a folder has the random states as well
                if isinstance(layer, nn.Dropout):
                    layer.p = 0.0

        def on_hook(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["optimizer_states"] = []

    setattr(Anew, hook, Anew.on_hook)

    def losses(make_strategy: Callable[[], Any], path: Path) -> list[float]:
        trainer, _, _ = fit(make_strategy(), Anew, max_epochs=1)
        trainer.save_checkpoint(path)
        return [loss.item() for loss in fit(make_strategy(), Anew, ckpt_path=str(path), max_epochs=2)[1].losses]

    options = {**OPTIONS["tight"], "state_dict_type": kind}
    expected = losses(lambda: "auto", tmp_path / "plain")
    assert losses(lambda: ElixirStrategy(**options), tmp_path / "one") == expected


class _FirstRankChanges(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.is_global_zero:
            state = checkpoint["state_dict"]
            for name in [name for name in state if name.startswith("layers.4")]:
                state[name] = torch.full(state[name].shape, 0.25)


def _save_what_the_first_rank_changes(path: Path) -> None:
    trainer, _, _ = fit(ElixirStrategy(**OPTIONS["tight"]), _FirstRankChanges, devices=2)
    trainer.save_checkpoint(path)


def test_what_rank_0_alone_puts_in_a_parameters_place_is_saved(tmp_path: Path) -> None:
    """As with DDP. Parts that others had written of the parameter were among it."""
    run_ranks(_save_what_the_first_rank_changes, 2, tmp_path / "one", init_group=False)
    index = CheckpointIndex(tmp_path / "one")
    for name in ("weight", "bias"):
        assert (index.read_whole(f"state_dict.layers.4.{name}") == 0.25).all()
    assert not (index.read_whole("state_dict.layers.3.up.weight") == 0.25).any()


class ForgetfulNet(Net):
    """Leaves out a parameter of a chunk."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["layers.1.up.bias"]


@pytest.mark.parametrize("make_model", [Net, ForgetfulNet])
def test_what_is_not_read_of_a_chunk_stays(tmp_path: Path, make_model: Any) -> None:
    """And what belongs to no parameter is zeros."""
    expected = save(tmp_path / "one", OPTIONS["tight"], make_model, 1, {})[0]
    trainer = make_trainer(ElixirStrategy(**OPTIONS["tight"]))
    model = make_model()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(9.0)
    trainer.fit(model, make_data(), ckpt_path=str(tmp_path / "one"))
    if make_model is ForgetfulNet:
        expected["layers.1.up.bias"] = torch.full_like(expected["layers.1.up.bias"], 9.0)
    assert_same_state(dump(trainer)[0], expected)
    engine = EngineHandle.of(model).engine.engine
    num_gaps = 0
    for chunk in engine.chunks:
        segments = segments_of(chunk.spec, 0, 1)
        assert len(segments) > 1
        is_gap = torch.ones(chunk.spec.numel, dtype=torch.bool)
        for segment in segments:
            is_gap[segment.shard_offset : segment.shard_offset + segment.numel] = False
        num_gaps += int(is_gap.sum())
        assert not engine.own_shard(chunk)[is_gap].any()
    assert num_gaps


@pytest.mark.full
def test_weights_only(tmp_path: Path) -> None:
    trainer, model, _ = fit(ElixirStrategy(**OPTIONS["tight"]))
    expected = trainer.test(model, make_data(8), verbose=False)
    trainer.save_checkpoint(tmp_path / "one", weights_only=True)
    other = make_trainer(ElixirStrategy(**OPTIONS["cuda"]))
    assert other.test(Net(), make_data(8), ckpt_path=str(tmp_path / "one"), verbose=False) == expected
    with pytest.raises(KeyError, match="contains only the model"):
        make_trainer(ElixirStrategy(**TIGHT)).fit(Net(), make_data(), ckpt_path=str(tmp_path / "one"))


def test_meta_parameters_get_their_values_from_the_folder(tmp_path: Path) -> None:
    class Helpless(nn.Module):
        """Has no `reset_parameters`."""

        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(32))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain

    class MetaNet(Net):
        is_made_in_init = False

        def configure_model(self) -> None:
            with torch.device(self.hparams["where"]):
                super()._make()
                self.layers.insert(0, Helpless())

        def __init__(self, where: str = "meta") -> None:
            super().__init__(seed=None)

    trainer, _, _ = fit(ElixirStrategy(**OPTIONS["tight"]), lambda: MetaNet("cpu"))
    trainer.save_checkpoint(tmp_path / "one")
    other = make_trainer(ElixirStrategy(**OPTIONS["cuda"]))
    other.fit(MetaNet("meta"), make_data(), ckpt_path=str(tmp_path / "one"))
    assert_same_state(dump(other)[0], dump(trainer)[0])


@pytest.mark.full
def test_tuner_leaves_no_trace() -> None:
    trainer = make_trainer(ElixirStrategy(**OPTIONS["tight"]), max_epochs=1)
    model = Net()
    found = pl.tuner.Tuner(trainer).lr_find(model, make_data(64), num_training=4, update_attr=False)
    assert found is not None
    assert_same_state(model.state_dict(), Net().state_dict())
    pl.seed_everything(11, verbose=False)
    Net()  # draws, as that of the reference does
    trainer.fit(model, make_data())
    _, reference, _ = fit(ElixirStrategy(**OPTIONS["tight"]))
    assert [x.item() for x in model.losses[-8:]] == [x.item() for x in reference.losses]


# Errors


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_states_of_what_is_frozen_now_are_told_of(tmp_path: Path, kind: Any, caplog: Any) -> None:
    """They are dropped."""
    options = OPTIONS["tight"] | {"state_dict_type": kind}
    trainer, _, _ = fit(ElixirStrategy(**options))
    trainer.save_checkpoint(tmp_path / "one")
    for num_frozen, epochs in [(0, 2), (2, 3)]:
        model = Net()
        model.layers[:num_frozen].requires_grad_(requires_grad=False)
        assert "are not taken over" not in caplog.text
        resumed = make_trainer(ElixirStrategy(**options), max_epochs=epochs)
        resumed.fit(model, make_data(), ckpt_path=str(tmp_path / "one"))
    assert "frozen now (layers.0.norm.weight, layers.0.norm.bias, " in caplog.text
    assert "layers.0.up.bias, layers.0.down.weight and 7 more) are not taken over" in caplog.text


def test_checkpoint_of_another_model(tmp_path: Path) -> None:
    class WiderNet(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2].up = nn.Linear(32, 65)
            self.layers[2].down = nn.Linear(65, 32)
            self.more = nn.Linear(2, 2)
            del self.layers[3].norm.bias
            self.layers[3].norm.bias = None

    trainer, _, _ = fit(ElixirStrategy(**OPTIONS["tight"]))
    trainer.save_checkpoint(tmp_path / "one")
    wanted = (
        r"(?s)one is a checkpoint of another model: it lacks more.weight, more.bias; the model lacks "
        r"layers.3.norm.bias; shapes differ: layers.2.up.weight \[64, 32\] instead of \[65, 32\]"
    )
    with pytest.raises(PlanError, match=wanted):
        make_trainer(ElixirStrategy(**TIGHT)).fit(WiderNet(), make_data(), ckpt_path=str(tmp_path / "one"))


def _change(path: Path, change: str) -> str:
    shard = path / "__0_0.distcp"
    if change == "missing":
        shard.unlink()
        return "lacks its file __0_0.distcp"
    if change == "short":
        os.truncate(shard, shard.stat().st_size - 10)
        return "__0_0.distcp is cut off"
    if change == "flipped":
        (_, place), *_ = CheckpointIndex(path).tensors["state_dict.layers.0.up.weight"].boxes
        shard = path / place.file
        data = bytearray(shard.read_bytes())
        data[place.offset + place.length // 2] ^= 1  # one bit of a number
        shard.write_bytes(data)
        return f"{place.file} is damaged"
    if change == "flipped meta":
        meta = path / "meta.pt"
        data = bytearray(meta.read_bytes())
        with zipfile.ZipFile(meta) as archive:
            entry = max(archive.infolist(), key=lambda entry: entry.file_size)  # the random generators' states
        data[entry.header_offset + entry.file_size // 2] ^= 1
        meta.write_bytes(data)
        return "meta.pt is damaged .*: take another checkpoint"
    if change == "no contents":
        (path / ".metadata").unlink()
        return "not a whole checkpoint: it has no file .metadata"
    if change == "no meta":
        (path / "meta.pt").unlink()
        return "not a whole checkpoint: it has no file meta.pt"
    import pickle

    (path / ".metadata").write_bytes(pickle.dumps(os.getcwd))
    return "a table of contents has no use for"


@crossed(
    told=[
        "short-cut_up",
        "flipped-nullcontext",
        "foreign pickle-nullcontext",
    ],
    change=["missing", "short", "flipped", "flipped meta", "no contents", "no meta", "foreign pickle"],
    cut=[contextlib.nullcontext, cut_up],
)
def test_damaged_folders(tmp_path: Path, change: str, cut: Any) -> None:
    trainer, _, _ = fit(ElixirStrategy(**OPTIONS["tight"]))
    with cut():
        trainer.save_checkpoint(tmp_path / "one")
    message = _change(tmp_path / "one", change)
    with pytest.raises(StorageError, match=message), cut():
        make_trainer(ElixirStrategy(**TIGHT)).fit(Net(), make_data(), ckpt_path=str(tmp_path / "one"))


def test_one_file_is_no_sharded_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "whole.ckpt").write_bytes(b"some")
    with pytest.raises(StorageError, match=r"whole\.ckpt is one file, not the folder of a sharded checkpoint"):
        CheckpointIndex(tmp_path / "whole.ckpt")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file that is always full")
def test_a_disk_that_is_full_is_told_of_as_such() -> None:
    """torch tells of what follows from it."""
    with Path("/dev/full").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left on device"):
        save_one_file({"a": torch.zeros(100_000)}, file)


@pytest.mark.parametrize("options", [{"state_dict_type": "half"}, {"async_save": True}])
def test_options_that_are_none(options: Any) -> None:
    with pytest.raises(PlanError, match="state_dict_type|sharded"):
        ElixirStrategy(**options)


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    """What `Trainer` asks for, without one: on the CPU its fp16 becomes bf16."""
    cpu = torch.device("cpu")

    def new(scale: float) -> tuple[ElixirModule, ElixirOptimizer]:
        model = nn.Linear(8, 8)
        module = ElixirModule(model, make_plan(model, placement_policy="cpu"), device=cpu)
        module.needs_loss_scale = True  # fp16 is for GPUs; scaling works with any dtype
        return module, ElixirOptimizer(module, HybridAdam(model.parameters()), initial_scale=scale, growth_interval=2)

    saves, (module, optimizer) = ShardedCheckpoints(False), new(8.0)
    for _ in range(3):
        optimizer.backward(module(torch.ones(1, 8)).square().mean())
        optimizer.step()
    checkpoint = {
        "state_dict": saves.model_state(module),
        "optimizer_states": [saves.optimizer_state(module, optimizer)],
    }
    comm = module.engine.comm
    saves.save(tmp_path / "saved", checkpoint, module, [optimizer], comm, cpu, is_waited_for=True)
    again, resumed = new(4.0)
    saves.open(tmp_path / "saved", comm, None)
    saves.load_model(again, True)
    saves.load_optimizers(again, [resumed])
    saves.close()
    assert resumed.scaler.state_dict() == optimizer.scaler.state_dict()
    assert resumed.loss_scale == 16.0
    module.close()
    again.close()
