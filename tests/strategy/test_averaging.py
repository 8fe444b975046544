"""`ElixirWeightAveraging` beside Lightning's callbacks in plain training: the same averages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_elixir import ElixirWeightAveraging, HybridAdam
from lightning_elixir._lightning import pl
from lightning_elixir.checkpoint.consolidate import consolidate
from lightning_elixir.errors import PlanError
from lightning_elixir.patterns import Column, Row
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import crossed, full, telling
from tests.strategy.models import CHUNK, TIGHT, LateNet, Net, assert_same_state, collect, fit, make_data
from tests.strategy.nets import BatchNormNet, FrozenNet, ManualNet, TiedNet
from tests.strategy.sharded import Batches

RESIDENT = {**CHUNK, "placement_policy": "cuda"}


class _Swa(pl.callbacks.WeightAveraging):
    """After each epoch from the second on, as `update_starting_at_epoch=1`."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None and epoch_idx >= 1


CALLBACKS: dict[str, Any] = {
    "ema": (lambda: pl.callbacks.EMAWeightAveraging(decay=0.9), lambda: ElixirWeightAveraging(decay=0.9)),
    "later": (
        lambda: pl.callbacks.EMAWeightAveraging(decay=0.5, update_every_n_steps=2, update_starting_at_step=3),
        lambda: ElixirWeightAveraging(0.5, 2, 3),
    ),
    "swa": (lambda: _Swa(), lambda: ElixirWeightAveraging(None, 0, update_starting_at_epoch=1)),
    "parameters": (
        lambda: pl.callbacks.EMAWeightAveraging(decay=0.9, use_buffers=False),
        lambda: ElixirWeightAveraging(decay=0.9, use_buffers=False),
    ),
}
WITH_VALIDATION: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 4}


def _run(strategy: Any, make_model: Any, callback: Any, **options: Any) -> Any:
    options = WITH_VALIDATION | options
    trainer, model, run = fit(strategy, make_model, callbacks=[callback], val=lambda: make_data(8, seed=2), **options)
    return trainer, model, run


def _assert_same(got: Any, expected: Any) -> None:
    assert [x.item() for x in got.losses] == [x.item() for x in expected.losses]
    assert [x.item() for x in got.val_losses] == [x.item() for x in expected.val_losses]
    assert [name for name, value in expected.state.items() if not torch.equal(got.state[name], value)] == []


@crossed(told=[f"ema-{TIGHT}", "swa-{}"], kind=CALLBACKS, options=[TIGHT, RESIDENT, {}])
def test_lightnings_averages(kind: str, options: dict[str, Any]) -> None:
    theirs, ours = CALLBACKS[kind]
    make_model = BatchNormNet if kind in ("ema", "parameters") else Net
    _, _, expected = _run("auto", make_model, theirs())
    trainer, _, got = _run(ElixirStrategy(**options), make_model, ours())
    _assert_same(got, expected)
    assert options is not TIGHT or trainer.strategy.stats().evictions > 0


@pytest.mark.parametrize("make_model", [TiedNet, full(FrozenNet), full(LateNet), full(ManualNet)])
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model")
def test_models(make_model: Any) -> None:
    theirs, ours = CALLBACKS["ema"]
    _, _, expected = _run("auto", make_model, theirs())
    _, _, got = _run(ElixirStrategy(**TIGHT), make_model, ours())
    # Averages of frozen parameters are rounded in theirs; manual clipping sums in another order.
    torch.testing.assert_close(got.losses, expected.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.val_losses, expected.val_losses, rtol=1e-5, atol=1e-6)
    for name, value in expected.state.items():
        torch.testing.assert_close(got.state[name], value, rtol=1e-5, atol=1e-6)


def test_mixed_precision_averages_the_masters() -> None:
    """Plain mixed precision keeps fp32 weights: the averages differ by what 16-bit gradients do, not by 16-bit sums."""
    _, _, expected = _run("auto", Net, CALLBACKS["ema"][0](), precision="bf16-mixed")
    _, _, got = _run(ElixirStrategy(**TIGHT), Net, CALLBACKS["ema"][1](), precision="bf16-mixed")
    _, _, other = _run(ElixirStrategy(**RESIDENT), Net, CALLBACKS["ema"][1](), precision="bf16-mixed")
    _assert_same(other, got)
    for name, value in expected.state.items():
        torch.testing.assert_close(got.state[name], value, rtol=0.05, atol=0.02)


class _Unbuilt(LateNet):
    def configure_model(self) -> None:
        raise AssertionError("nothing is to be built")


def _averages_of_parts(callback: str) -> str:
    averages = getattr(pl.callbacks, callback)(*([0.1] if callback.startswith("Stochastic") else []))
    strategy = ElixirStrategy(tensor_parallel_size=2, patterns={"net.0": Column()}, **TIGHT)
    try:
        fit(strategy, _Unbuilt, callbacks=[averages], devices=2)
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("callback", telling(["EMAWeightAveraging", "StochasticWeightAveraging"], "EMAWeightAveraging"))
def test_lightnings_averages_of_parts_are_refused_before_the_model_is_built(callback: str) -> None:
    for told in run_ranks(_averages_of_parts, 2, callback, init_group=False):
        assert f"{callback} averages whole weights" in told
        assert "tensor_parallel_size=2 (patterns for 'net.0')" in told
        assert "ElixirWeightAveraging" in told


class _Linear(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(8))
        self.seen: list[Tensor] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.seen.append(batch.clone())
        for up, down in zip(self.layers[::2], self.layers[1::2], strict=True):
            batch = batch + down(up(batch).relu())
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return HybridAdam(self.parameters(), lr=1e-2, eps=1e-3)


def _averaged_with_patterns(data: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """A fit by the sampler that Lightning makes: the batches that a rank has had, and the averages."""
    patterns = {"layers.*[0246]": Column(), "layers.*[1357]": Row()}
    strategy = ElixirStrategy(placement_policy="cpu", chunk_size="2KiB", tensor_parallel_size=2, patterns=patterns)
    model = _Linear()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        callbacks=[ElixirWeightAveraging(decay=0.5)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=4))
    return model.seen, {k: v.clone() for k, v in strategy.lightning_module_state_dict().items()}


@pytest.mark.full  # four ranks
def test_averages_of_parts_by_lightnings_own_sampler() -> None:
    """Two pairs of ranks, which share layers and batches: all samples once, and the averages of plain weights."""
    data = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    runs = run_ranks(_averaged_with_patterns, 4, data, init_group=False)
    for first, second in ((0, 1), (2, 3)):
        assert torch.equal(torch.cat(runs[first][0]), torch.cat(runs[second][0]))
    steps = [torch.cat(both) for both in zip(runs[0][0], runs[2][0], strict=True)]
    assert torch.equal(torch.cat(steps).sort(0).values, data.sort(0).values)
    model = _Linear()
    optimizer = model.configure_optimizers()
    averages = [p.detach().clone() for p in model.parameters()]
    for number, batch in enumerate(steps):
        optimizer.zero_grad()
        model.training_step(batch, number).backward()
        optimizer.step()
        for average, parameter in zip(averages, model.parameters(), strict=True):
            average.copy_(parameter if number == 0 else (average + parameter.detach()) / 2)
    for (name, found), average in zip(runs[0][1].items(), averages, strict=True):
        torch.testing.assert_close(found, average, rtol=0, atol=1e-6, msg=name)


def _on_rank(strategy: Any, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    callback = CALLBACKS[kind][strategy is not None]()
    strategy = "ddp" if strategy is None else ElixirStrategy(**strategy)
    _, _, run = _run(strategy, Net, callback, devices=2)
    return [x.item() for x in run.val_losses], run.state


@pytest.mark.parametrize("options", [full(TIGHT), full(RESIDENT)])
def test_two_ranks(options: dict[str, Any]) -> None:
    expected = run_ranks(_on_rank, 2, None, "ema", init_group=False)
    got = run_ranks(_on_rank, 2, options, "ema", init_group=False)
    for mine, ddp in zip(got, expected, strict=True):
        assert mine[0] == ddp[0]
        assert not mine[1] or [n for n, v in ddp[1].items() if not torch.equal(mine[1][n], v)] == []


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # the saver's
def test_checkpoints(tmp_path: Path) -> None:
    """They hold what Lightning's hold, and either goes on from either: a step of several batches counts once."""
    theirs, ours = CALLBACKS["ema"]
    paths = {"auto": tmp_path / "plain", "elixir": tmp_path / "elixir"}
    accumulated = {"accumulate_grad_batches": 2}
    found = {}
    for name, callback in (("auto", theirs()), ("elixir", ours())):
        saver = pl.callbacks.ModelCheckpoint(paths[name], every_n_train_steps=4, save_top_k=-1)
        strategy = name if name == "auto" else ElixirStrategy(**TIGHT)
        options: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 1, **accumulated}
        fit(strategy, BatchNormNet, callbacks=[callback, saver], **options)
        found[name] = torch.load(next(paths[name].iterdir()), weights_only=False)
    for key in ("state_dict", "current_model_state"):
        mine, plain = found["elixir"][key], found["auto"][key]
        assert mine.keys() == plain.keys()
        assert [n for n, v in plain.items() if not torch.equal(mine[n], v)] == []
    plain_model = BatchNormNet()
    plain_model.load_state_dict(found["elixir"]["state_dict"])
    path_of = {name: str(next(path.iterdir())) for name, path in paths.items()}
    _, _, expected = _run("auto", BatchNormNet, theirs(), ckpt_path=path_of["auto"], **accumulated)
    for begun, strategy, callback in (
        ("auto", ElixirStrategy(**TIGHT), ours()),
        ("elixir", ElixirStrategy(**TIGHT), ours()),
        ("elixir", "auto", theirs()),
    ):
        _, _, got = _run(strategy, BatchNormNet, callback, ckpt_path=path_of[begun], **accumulated)
        assert [n for n, v in expected.state.items() if not torch.equal(got.state[n], v)] == []


@pytest.mark.parametrize("kind", telling(["ema", "swa"], "ema"))
def test_a_second_fit_begins_averages_anew(kind: str) -> None:
    ends = []
    for strategy, callback in zip(("auto", ElixirStrategy(**TIGHT)), CALLBACKS[kind], strict=True):
        trainer, model, _ = _run(strategy, BatchNormNet, callback())
        trainer.fit_loop.max_epochs = 4
        trainer.fit(model, make_data(), make_data(8, seed=2))
        ends.append(collect(trainer, model))
    _assert_same(ends[1], ends[0])


def test_a_checkpoint_of_after_training_is_gone_on_from(tmp_path: Path) -> None:
    """By Lightning's callback as by ours, with the count of updates: to the bits of Lightning's own checkpoint."""
    theirs, ours = CALLBACKS["ema"]
    ends = {}
    for name, callback in (("auto", theirs()), ("elixir", ours())):
        strategy = name if name == "auto" else ElixirStrategy(**TIGHT)
        trainer, _, _ = _run(strategy, BatchNormNet, callback, max_epochs=1)
        trainer.save_checkpoint(tmp_path / name)
        ends[name] = (tmp_path / name).stat().st_size
    assert ends["elixir"] < 1.1 * ends["auto"]  # the weights are the averages, and there once
    _, _, expected = _run("auto", BatchNormNet, theirs(), ckpt_path=str(tmp_path / "auto"))
    for strategy, callback in (("auto", theirs()), (ElixirStrategy(**TIGHT), ours())):
        _, _, got = _run(strategy, BatchNormNet, callback, ckpt_path=str(tmp_path / "elixir"))
        assert [n for n, v in expected.state.items() if not torch.equal(got.state[n], v)] == []


class _Seen(pl.callbacks.Callback):
    """What a fit begins with; has to stand after the averages.

    Args:
        averaging: Whose averages.
    """

    def __init__(self, averaging: ElixirWeightAveraging) -> None:
        self.averaging = averaging
        self.averages: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        assert self.averaging._averages is not None
        buffers = {name: b.clone() for name, b in self.averaging._buffers.items()}
        whole = self.averaging._averages.whole()
        self.averages = {**buffers, **whole} if trainer.is_global_zero else {}
        self.weights = trainer.strategy._engine.full_state_dict()


def _save_folder(path: Path, devices: int, precision: Any = "32-true") -> None:
    saver = pl.callbacks.ModelCheckpoint(path, every_n_train_steps=4, save_top_k=-1)
    strategy = ElixirStrategy(**TIGHT, state_dict_type="sharded")
    options: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 1, "precision": precision}
    callbacks = [CALLBACKS["ema"][1](), saver]
    fit(strategy, BatchNormNet, train=lambda: Batches(devices), devices=devices, callbacks=callbacks, **options)


def _begin_from(path: Path, devices: int, precision: Any = "32-true") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    averaging = CALLBACKS["ema"][1]()
    seen = _Seen(averaging)
    options = {"max_steps": 4, "devices": devices, "precision": precision, "ckpt_path": str(path)}
    data = {"train": lambda: Batches(devices)}
    fit(ElixirStrategy(**RESIDENT), BatchNormNet, callbacks=[averaging, seen], **data, **options)
    return seen.averages, seen.weights


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_sharded_checkpoints_hold_what_whole_ones_do(tmp_path: Path) -> None:
    theirs, ours = CALLBACKS["ema"]
    saver = pl.callbacks.ModelCheckpoint(tmp_path / "plain", every_n_train_steps=4, save_top_k=-1)
    data: dict[str, Any] = {"train": lambda: Batches(1), "max_epochs": 2}
    _, _, whole_run = fit("auto", BatchNormNet, callbacks=[theirs(), saver], enable_checkpointing=True, **data)
    _save_folder(tmp_path / "folder", 1)
    plain, folder = (tmp_path / name / "epoch=0-step=4.ckpt" for name in ("plain", "folder"))
    consolidate(folder, tmp_path / "one.ckpt", max_file_bytes=2**30)
    expected, got = (torch.load(path, weights_only=False) for path in (plain, tmp_path / "one.ckpt"))
    for key in ("state_dict", "current_model_state"):
        assert_same_state(got[key], expected[key])
    assert not all(torch.equal(v, got["current_model_state"][n]) for n, v in got["state_dict"].items())
    strategy = ElixirStrategy(**TIGHT)
    _, _, resumed = fit(strategy, BatchNormNet, callbacks=[ours()], ckpt_path=str(folder), **data)
    assert [x.item() for x in resumed.losses] == [x.item() for x in whole_run.losses[4:]]
    assert_same_state(resumed.state, whole_run.state)


@pytest.mark.parametrize("make_model", [BatchNormNet, full(LateNet)])
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model")
def test_lightnings_averages_go_on_from_a_folder(make_model: Any, tmp_path: Path) -> None:
    saver = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    strategies = [ElixirStrategy(**TIGHT, state_dict_type="sharded") for _ in range(2)]
    theirs, data = CALLBACKS["ema"][0], {"train": lambda: Batches(1), "max_epochs": 2}
    _, whole, _ = fit(strategies[0], make_model, callbacks=[theirs(), saver], enable_checkpointing=True, **data)
    folder = str(tmp_path / "epoch=0-step=4.ckpt")
    _, resumed, _ = fit(strategies[1], make_model, callbacks=[theirs()], ckpt_path=folder, **data)
    assert [x.item() for x in resumed.losses] == [x.item() for x in whole.losses[4:]]
    assert_same_state(resumed.state_dict(), whole.state_dict())


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "precision"),
    [(2, 1, "32-true"), full(1, 2, "32-true"), full(2, 3, "bf16-mixed"), full(2, 1, "bf16-true")],
)
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.full
def test_sharded_checkpoints_and_other_ranks(saved_by: int, loaded_by: int, precision: str, tmp_path: Path) -> None:
    run_ranks(_save_folder, saved_by, tmp_path / "folder", saved_by, precision, init_group=False)
    folder = tmp_path / "folder" / "epoch=0-step=4.ckpt"
    averages, weights = run_ranks(_begin_from, loaded_by, folder, loaded_by, precision, init_group=False)[0]
    consolidate(folder, tmp_path / "one.ckpt", max_file_bytes=2**30)
    saved = torch.load(tmp_path / "one.ckpt", weights_only=False)
    assert_same_state(weights, saved["current_model_state"])
    assert averages.keys() <= saved["state_dict"].keys()
    assert [n for n, v in averages.items() if not torch.equal(v, saved["state_dict"][n])] == []
    assert [n for n, v in averages.items() if v.is_floating_point() and not torch.equal(v, weights[n])] != []


class _GivesBack(pl.callbacks.Callback):
    def __init__(self) -> None:
        self.held: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not isinstance(trainer.strategy, ElixirStrategy) or batch_idx not in (1, 3):
            return
        trainer.strategy.set_memory_limit(**({"gpu": 60 * 1024} if batch_idx == 1 else {}))
        self.held.append(trainer.strategy.stats().held_bytes.get("gpu_average", 0))


def test_they_move_with_the_states() -> None:
    theirs, ours = CALLBACKS["ema"]
    _, _, expected = _run("auto", Net, theirs())
    gives_back = _GivesBack()
    _, _, got = fit(
        ElixirStrategy(**CHUNK),
        Net,
        callbacks=[ours(), gives_back],
        val=lambda: make_data(8, seed=2),
        **WITH_VALIDATION,
    )
    _assert_same(got, expected)
    assert gives_back.held[0] < 60 * 1024 < gives_back.held[1]


class _Stop(Exception):
    pass


class _StopsInValidation(Net):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.trainer.global_step > 0:
            raise _Stop


def test_an_exception_in_validation_leaves_the_weights() -> None:
    model = _StopsInValidation()
    other = Net()
    with pytest.raises(_Stop):
        fit(
            ElixirStrategy(**TIGHT),
            lambda: model,
            callbacks=[CALLBACKS["ema"][1]()],
            val=lambda: make_data(8),
            max_epochs=1,
        )
    _, _, run = fit("auto", lambda: other, val=lambda: make_data(8), max_epochs=1)
    state = model.state_dict()
    assert [n for n, v in run.state.items() if not torch.equal(state[n], v)] == []


@pytest.mark.parametrize(
    ("strategy", "match"),
    [
        ("auto", "this Trainer has SingleDeviceStrategy"),
        (ElixirStrategy(**TIGHT, nvme_offload_fraction=0.5, nvme_offload_dir="states"), "keeps averages in memory"),
    ],
)
def test_what_is_refused(strategy: Any, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        fit(strategy, callbacks=[ElixirWeightAveraging()], max_epochs=1)
    with pytest.raises(PlanError, match="decay must be in"):
        ElixirWeightAveraging(decay=1.5)


@pytest.mark.parametrize("precision", telling(["32-true", "bf16-mixed"], "32-true"))
@pytest.mark.parametrize(
    ("make", "cure"),
    [
        (lambda: pl.callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1), "swa_utils.SWALR"),
        (lambda: pl.callbacks.EMAWeightAveraging(decay=0.9), "where optimizer states are"),
    ],
)
def test_lightnings_own_callbacks_are_told_of(
    make: Any, cure: str, precision: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fit(ElixirStrategy(**TIGHT), Net, callbacks=[make()], precision=precision, max_epochs=1)
    (told,) = [r.getMessage() for r in caplog.records if "keeps a copy of the whole model" in r.getMessage()]
    assert cure in told
    assert "lightning_elixir.ElixirWeightAveraging" in told
    assert ("under bf16-mixed it averages them rounded to 16 bits" in told) == (precision == "bf16-mixed")


@pytest.mark.full
def test_swa_with_its_learning_rates() -> None:
    """What Lightning's `StochasticWeightAveraging` does, put together from averages and a scheduler as the docs say."""

    class Annealed(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            usual = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
            steady = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=1)
            return [optimizer], [torch.optim.lr_scheduler.SequentialLR(optimizer, [usual, steady], milestones=[1])]

    _, _, expected = _run("auto", Annealed, _Swa(), max_epochs=3)
    callback = ElixirWeightAveraging(None, 0, update_starting_at_epoch=1)
    trainer, _, got = _run(ElixirStrategy(**TIGHT), Annealed, callback, max_epochs=3)
    _assert_same(got, expected)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


def test_memory_is_counted() -> None:
    trainer, model, _ = fit(ElixirStrategy(**TIGHT), callbacks=[ElixirWeightAveraging()], max_epochs=1)
    seen: list[int] = []

    class Look(pl.callbacks.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen.append(trainer.strategy.stats().held_bytes["cpu_average"])

    fit(ElixirStrategy(**TIGHT), callbacks=[ElixirWeightAveraging(), Look()], max_epochs=1)
    assert set(seen) == {4 * sum(c.numel for c in trainer.strategy.plan.chunks)}
