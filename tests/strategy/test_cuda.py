"""The strategy on a CUDA device."""

from __future__ import annotations

import csv
import gc
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts; makes its results repeatable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_elixir._lightning import pl
from lightning_elixir.plan.types import Tier
from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.strategy.callbacks import ElixirStatsMonitor
from tests.helpers.dist import run_ranks
from tests.strategy.models import CHUNK, WIDTH, Block, Net, fit, make_data, make_trainer
from tests.strategy.nets import BatchNormNet, ManualNet, ScheduledNet
from tests.strategy.slow_steps import assert_all_micro_batches_are_measured

pytestmark = pytest.mark.gpu

TIGHT: dict[str, Any] = {**CHUNK, "placement_policy": "cpu"}
CUDA: dict[str, Any] = {"accelerator": "cuda", "devices": 1}


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class CalmNet(Net):
    """Without dropout, whose numbers would differ between devices; with metrics and buffers, which must move."""

    def __init__(self, optimizer: str = "hybrid") -> None:
        super().__init__(optimizer)
        from torchmetrics import MeanMetric

        self.mean = MeanMetric()
        self.register_buffer("offset", torch.ones(4))

    def _make(self) -> None:
        super()._make()
        for module in self.layers.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.offset

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.mean.update(self.val_losses[-1])
        self.log("mean", self.mean)


def _fit(strategy: Any, make_model: Any = CalmNet, **options: Any) -> Any:
    return fit(strategy, make_model, val=lambda: make_data(8, seed=2), **(CUDA | options))


def test_policies_give_the_same_bits() -> None:
    runs = {}
    for name, options in {
        "cuda": {"placement_policy": "cuda"},
        "cpu": {"placement_policy": "cpu"},
        "tight": {"placement_policy": "cpu", "gpu_memory_limit": "128KiB", "prefetch": False},
        "const": {"placement_policy": "const", "shard_param_frac": 0.5, "offload_optim_frac": 0.5},
        "auto": {},
    }.items():
        strategy = ElixirStrategy(**CHUNK, **options)
        trainer, model, runs[name] = _fit(strategy, max_epochs=2)
        assert model.offset.is_cuda
        assert all(value.device.type == "cpu" for value in runs[name].state.values())
    plain = _fit("auto", max_epochs=2)[2]
    for name, run in runs.items():
        assert [x.item() for x in run.losses] == [x.item() for x in runs["cuda"].losses], name
        assert all(torch.equal(run.state[k], v) for k, v in runs["cuda"].state.items()), name
        torch.testing.assert_close(
            [x.item() for x in run.losses], [x.item() for x in plain.losses], rtol=1e-4, atol=1e-6
        )


def test_auto_moves_to_the_device_after_one_step() -> None:
    strategy = ElixirStrategy(**CHUNK)
    _fit(strategy, max_epochs=1)
    assert strategy.plan.is_all_resident
    assert all(chunk.optim_tier is Tier.GPU for chunk in strategy.plan.chunks)


def test_auto_stays_within_its_limit() -> None:
    strategy = ElixirStrategy(gpu_memory_limit="700KiB", **CHUNK)
    trainer, _, run = _fit(strategy, max_epochs=2)
    assert not all(chunk.optim_tier is Tier.GPU for chunk in strategy.plan.chunks)
    assert [x.item() for x in run.losses] == [x.item() for x in _fit(ElixirStrategy(**TIGHT), max_epochs=2)[2].losses]


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "16-true", "bf16-true"])
def test_precisions(precision: Any, autocast: bool) -> None:
    if precision.endswith("true") and not autocast:
        pytest.skip("autocast belongs to mixed precision")
    make_model = (lambda: CalmNet("sgd")) if precision == "16-true" else CalmNet
    expected = _fit("auto", make_model, precision=precision, max_epochs=2)[2]
    runs = []
    for options in (TIGHT, {"placement_policy": "cuda", **CHUNK}):
        strategy = ElixirStrategy(**options, autocast=autocast)
        runs.append(_fit(strategy, make_model, precision=precision, max_epochs=2)[2])
    losses = [[x.item() for x in run.losses] for run in runs]
    if precision != "16-true":  # torch's SGD rounds differently on the CPU and on the GPU
        assert losses[0] == losses[1]
    torch.testing.assert_close(losses[0], [x.item() for x in expected.losses], rtol=0.1, atol=0.05)


def test_batch_norm_in_fp16() -> None:
    for autocast in (True, False):
        _, model, _ = _fit(ElixirStrategy(**TIGHT, autocast=autocast), BatchNormNet, precision="16-mixed")
        assert model.layers[1].norm.running_mean.dtype is torch.float32


@pytest.mark.parametrize("make_model", [ManualNet, ScheduledNet])
def test_fp16_models(make_model: Any) -> None:
    _, _, run = _fit(ElixirStrategy(**TIGHT), make_model, precision=16, max_epochs=2)
    assert all(torch.isfinite(x) for x in run.losses)


def test_loss_scale_goes_to_plain_lightning_and_back(tmp_path: Path) -> None:
    strategy = ElixirStrategy(initial_scale=2.0**10, growth_interval=3, **TIGHT)
    trainer, _, _ = _fit(strategy, lambda: CalmNet("adamw"), precision="16-mixed")
    assert strategy._elixir_optimizers[0] is not None
    assert strategy._elixir_optimizers[0].loss_scale == 2.0**12
    path = str(tmp_path / "elixir.ckpt")
    trainer.save_checkpoint(path)
    plain, _, _ = _fit("auto", lambda: CalmNet("adamw"), precision="16-mixed", max_epochs=2, ckpt_path=path)
    assert plain.precision_plugin.scaler.get_scale() == 2.0**15  # it grows with the steps 9, 12 and 15
    path = str(tmp_path / "plain.ckpt")
    plain.save_checkpoint(path)
    again = ElixirStrategy(**TIGHT)
    _fit(again, lambda: CalmNet("adamw"), precision="16-mixed", max_epochs=2, ckpt_path=path)
    assert again._elixir_optimizers[0] is not None
    assert again._elixir_optimizers[0].loss_scale == 2.0**15


class OverflowNet(CalmNet):
    """The third step overflows."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if batch_idx == 2 else loss


def test_a_step_that_overflows_changes_nothing_but_the_scale() -> None:
    class Watch(pl.Callback):
        def __init__(self) -> None:
            self.states: list[dict[str, Tensor]] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.states.append(trainer.strategy.lightning_module_state_dict())

    watch = Watch()
    strategy = ElixirStrategy(initial_scale=2.0**10, **TIGHT)
    _fit(strategy, OverflowNet, precision="16-mixed", callbacks=[watch])
    one, two, three, *_ = watch.states
    assert any(not torch.equal(one[k], two[k]) for k in one)
    assert all(torch.equal(two[k], three[k]) for k in two)
    assert strategy._elixir_optimizers[0] is not None
    assert strategy._elixir_optimizers[0].loss_scale == 2.0**9


def test_evaluation_resume_and_a_second_fit(tmp_path: Path) -> None:
    strategy = ElixirStrategy(**TIGHT)
    model, trainer = CalmNet(), make_trainer(strategy, **CUDA)
    before = trainer.validate(model, make_data(8, seed=2), verbose=False)
    trainer.fit(model, make_data())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    after = trainer.test(model, make_data(8, seed=2), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, make_data())
    assert before[0]["val_loss"] != after[0]["test_loss"]
    again = make_trainer(ElixirStrategy(**CHUNK), **CUDA)
    restored = again.test(CalmNet(), make_data(8, seed=2), ckpt_path=str(tmp_path / "one.ckpt"), verbose=False)
    assert restored == after


class WideNet(Net):
    """67 million parameters: with gradients and states about a GiB; with dropout."""

    def _make(self) -> None:
        if not hasattr(self, "layers"):
            torch.manual_seed(7)
            self.layers = nn.Sequential(nn.Linear(WIDTH, 2048), *[Block(2048) for _ in range(4)], nn.Linear(2048, 4))


def _uneven_data() -> Any:
    """Batches of 64 samples, and two of 6000, whose activations take about a GiB."""
    generator = torch.Generator().manual_seed(0)
    sizes = [64] * 5 + [6000] + [64] * 3 + [6000, 64]
    batches = [
        (torch.randn(n, WIDTH, generator=generator), torch.randint(0, 4, (n,), generator=generator)) for n in sizes
    ]
    return DataLoader(batches, batch_size=None)


@pytest.fixture
def _small_gpu() -> Iterator[None]:
    """As if the GPU had 1.75 GiB."""
    gc.collect()  # what an earlier fit has left in cycles would be something else's, for which the plan leaves room
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.75 * 2**30 / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_batch_that_is_too_large_is_run_again(request: pytest.FixtureRequest, caplog: Any) -> None:
    def make() -> WideNet:
        return WideNet("hybrid")

    expected = fit(ElixirStrategy(placement_policy="cuda"), make, train=_uneven_data, **CUDA)[2]
    request.getfixturevalue("_small_gpu")
    strategy = ElixirStrategy()
    with caplog.at_level(logging.WARNING, "lightning_elixir"):
        _, _, run = fit(strategy, make, train=_uneven_data, **CUDA)
    assert "ran out of memory" in caplog.text or "more than the plan leaves" in caplog.text
    # One more loss for each batch whose forward came to its end before memory ran out.
    losses = [x.item() for x in run.losses]
    assert [x for i, x in enumerate(losses) if i == 0 or x != losses[i - 1]] == [x.item() for x in expected.losses]
    assert all(torch.equal(run.state[k], v) for k, v in expected.state.items())


def test_metrics_and_report(tmp_path: Path) -> None:
    strategy = ElixirStrategy(gpu_memory_limit="700KiB", **CHUNK, report_dir=str(tmp_path / "r"))
    logger = pl.loggers.CSVLogger(tmp_path)
    _fit(strategy, logger=logger, callbacks=[ElixirStatsMonitor()], log_every_n_steps=2, max_epochs=2)
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("elixir/gpu_bytes")]
    assert [int(row["step"]) for row in rows] == [1, 3, 5, 7, 9, 11, 13, 15]
    assert all(float(row["elixir/compute_s"]) > 0 for row in rows)
    assert all(float(row["elixir/peak_gpu_bytes"]) >= float(row["elixir/gpu_bytes"]) for row in rows)
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert report["hardware"]["versions"]["torch"] == torch.__version__
    assert report["measured"]["peak_gpu_bytes"] > 0
    assert report["predicted"]["times"]["compute_s"] > 0
    assert report["measured"]["times"]["compute_s"] > 0


def test_of_several_micro_batches_all_are_measured(tmp_path: Path) -> None:
    assert_all_micro_batches_are_measured(tmp_path, {"gpu_memory_limit": "700KiB", **CHUNK}, **CUDA)


def test_steps_that_are_not_logged_wait_for_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With everything resident, a step without loggers and one that is not logged give the host the same to do."""
    fit(ElixirStrategy(placement_policy="cuda", **CHUNK), CalmNet, **CUDA)  # what a process does once is done
    counts = []
    for options in ({}, {"logger": pl.loggers.CSVLogger(tmp_path), "log_every_n_steps": 1000}):
        waits: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "synchronize", lambda *args, to=waits: to.append("device"))
            patch.setattr(torch.cuda.Event, "synchronize", lambda self, to=waits: to.append("event"))
            fit(ElixirStrategy(placement_policy="cuda", **CHUNK), CalmNet, **(CUDA | options))
        counts.append(waits)
    assert counts[0] == counts[1]


def _rank(precision: Any) -> Any:
    strategy = ElixirStrategy(**TIGHT)
    _, _, run = _fit(strategy, devices=2, precision=precision)
    return [x.item() for x in run.losses], run.state


@pytest.mark.several_gpus(2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_two_gpus(precision: Any) -> None:
    first, second = run_ranks(_rank, 2, precision, device="cuda", init_group=False)
    assert first[0] != second[0]
    assert first[1]
    assert second[1] == {}
