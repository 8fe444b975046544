"""The dry run: what a user's own step does is known before the first one, and the user's code does not notice."""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import gc
import itertools
import logging
import os
import random
import sys
import threading
import types
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Accuracy, MeanMetric, Metric

from lightning_elixir._lightning import LightningModule, Trainer, pl
from lightning_elixir.core.device import CpuDevice
from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.plan.kept_dtypes import kept_in
from lightning_elixir.plan.profile import MemoryProfile
from lightning_elixir.plan.types import Plan
from lightning_elixir.profiling.fake_step import profile_memory
from lightning_elixir.strategy import ElixirStrategy, put_back
from lightning_elixir.strategy import fit_run as fit_run_module
from lightning_elixir.strategy.dry_run import dry_run
from lightning_elixir.strategy.engine_handle import EngineHandle
from lightning_elixir.strategy.put_back import PutBack
from lightning_elixir.strategy.warm_up import WarmUp
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import full, telling
from tests.strategy import models
from tests.strategy.models import (
    CHUNK,
    WIDTH,
    Net,
    UnforeseenNet,
    assert_same_run,
    few_batches,
    make_data,
    make_layers,
    make_trainer,
)

LIMIT = {**CHUNK, "gpu_memory_limit": "96KiB"}

fit = functools.partial(models.fit, train=few_batches)


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> list[MemoryProfile | Exception]:
    """What came out of each dry run."""
    found: list[MemoryProfile | Exception] = []

    def noted(*args: Any, **options: Any) -> MemoryProfile:
        try:
            found.append(dry_run(*args, **options))
        except Exception as error:
            found.append(error)
            raise
        result = found[-1]
        assert isinstance(result, MemoryProfile)
        return result

    monkeypatch.setattr(fit_run_module, "dry_run", noted)
    return found


class Counting(Net):
    """Does in its step what users do there, and keeps what it has seen of it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.num_steps = 0
        self.by_kind: dict[str, list[float]] = {"loss": [], "drawn": [], "lr": []}
        self.mean = MeanMetric()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_steps += 1
        print(f"step {batch_idx}")
        warnings.warn(f"a warning of step {batch_idx}", stacklevel=1)
        loss = super().training_step(batch, batch_idx)
        self.seen += 1
        self.mean.update(loss.detach())
        self.by_kind["loss"].append(loss.item())
        self.by_kind["drawn"] += [random.random(), float(np.random.rand()), torch.rand(()).item()]
        optimizer: Any = self.optimizers()
        self.by_kind["lr"].append(optimizer.param_groups[0]["lr"])
        if torch.isnan(loss):
            return None
        assert self.global_step == batch_idx == self.num_steps - 1
        assert self.trainer.current_epoch == 0
        assert self.trainer.training
        self.log_dict({"mean": self.mean, "seen": self.seen.clone()})
        self.print("printed by the module")
        self.logger.experiment.add_scalar("a", loss.item())  # type: ignore[union-attr]
        return {"loss": loss, "where": torch.zeros(3, device=self.device), "all": self.all_gather(loss.detach())}


class Board:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float]] = []

    def add_scalar(self, name: str, value: float) -> None:
        self.scalars.append((name, value))

    def log_hparams(self, *_: Any) -> None: ...

    def log_metrics(self, *_: Any) -> None: ...

    def save(self) -> None: ...


class BoardLogger(pl.loggers.CSVLogger):
    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        self.board = Board()

    @property
    def experiment(self) -> Any:
        return self.board


def test_the_users_code_does_not_notice(tmp_path: Any, capsys: Any, profiles: list[Any]) -> None:
    def run(strategy: Any) -> Any:
        random.seed(3)
        np.random.seed(3)
        logger = BoardLogger(tmp_path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _, model, result = fit(strategy, Counting, logger=logger)
        told = [str(w.message) for w in caught if "a warning of step" in str(w.message)]
        printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("step", "printed"))]
        assert isinstance(model, Counting)
        return result, model.num_steps, model.by_kind, model.seen.item(), logger.board.scalars, told, printed

    expected, actual = run("auto"), run(ElixirStrategy(**LIMIT))
    (profile,) = profiles
    assert isinstance(profile, MemoryProfile)
    assert_same_run(actual[0], expected[0])
    assert actual[1:] == expected[1:]


class StepsItsScheduler(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scheduler: Any = self.lr_schedulers()
        self.log("lr", scheduler.get_last_lr()[0])
        loss = super().training_step(batch, batch_idx)
        scheduler.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)]


class SetsItsRate(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.param_groups[0]["lr"] *= 0.5
        return super().training_step(batch, batch_idx)


class ZeroesGradients(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        return super().training_step(batch, batch_idx)


class AsksTheTrainerForRates(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (optimizer,), (config,) = self.trainer.optimizers, self.trainer.lr_scheduler_configs
        assert optimizer.param_groups[0]["params"][0] is next(self.parameters())
        self.log("lr", optimizer.param_groups[0]["lr"])
        self.log("last lr", config.scheduler.get_last_lr()[0])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1), "interval": "step"}]


def assert_trains_as_plainly(make: Any) -> None:
    """With the same losses and weights under a plan that a dry run has made, or could not make."""
    _, _, expected = fit("auto", make)
    _, _, actual = fit(ElixirStrategy(**LIMIT), make)
    assert_same_run(actual, expected)


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize(
    "make", [StepsItsScheduler, full(SetsItsRate), full(AsksTheTrainerForRates), full(ZeroesGradients)]
)
def test_optimizers_and_schedulers_do_not_notice(make: type[Net], profiles: list[Any]) -> None:
    assert_trains_as_plainly(make)
    assert isinstance(profiles[0], MemoryProfile)


class DrawsFromItsOwn(Net):
    """Draws from generators of its own: in an attribute, and deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(5)
        self.more = {"masks": [torch.Generator().manual_seed(6)]}

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = x + torch.randn(x.shape, generator=self.noise) + torch.empty_like(x).normal_(generator=self.noise)
        x = x[torch.randperm(len(x), generator=self.noise)]
        return super().loss([x * torch.bernoulli(torch.sigmoid(x), generator=self.more["masks"][0]), y])


@pytest.mark.full
def test_generators_of_the_module_are_where_they_were(profiles: list[Any]) -> None:
    _, plain, expected = fit("auto", DrawsFromItsOwn)
    _, ours, actual = fit(ElixirStrategy(**LIMIT), DrawsFromItsOwn)
    assert isinstance(profiles[0], MemoryProfile)
    assert_same_run(actual, expected)
    assert isinstance(plain, DrawsFromItsOwn)
    assert isinstance(ours, DrawsFromItsOwn)
    assert torch.equal(ours.noise.get_state(), plain.noise.get_state())
    assert torch.equal(ours.more["masks"][0].get_state(), plain.more["masks"][0].get_state())


# Metrics


class CountsHits(Net):
    """Its metrics look at values."""

    def __init__(self) -> None:
        super().__init__()
        self.hits = Accuracy("multiclass", num_classes=4)
        self.by_class = Accuracy("multiclass", num_classes=4, average="macro")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.log("hits", self.hits(logits, batch[1]))
        self.by_class.update(logits.argmax(1), batch[1])
        self.log("by class", self.by_class)
        return super().training_step(batch, batch_idx)


class TrainsByAMetric(Net):
    """Its loss comes out of a metric that looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = SquareOfMost()

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.metric(self(batch[0]))
        return loss


class SquareOfMost(Metric):
    is_differentiable = True
    full_state_update = False
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        self.total = self.total + values[values > -10].square().mean()

    def compute(self) -> Tensor:
        return self.total


@pytest.mark.full
def test_metrics_that_need_values_are_left_out(profiles: list[Any]) -> None:
    assert_trains_as_plainly(CountsHits)
    assert isinstance(profiles[0], MemoryProfile)


def test_metrics_that_losses_come_from_are_not(profiles: list[Any]) -> None:
    assert_trains_as_plainly(TrainsByAMetric)
    assert isinstance(profiles[0], Exception)


# Manual optimization


class Adversarial(Net):
    """Two networks against each other: in each batch a forward, a backward and a step of both."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def _make(self) -> None:
        torch.manual_seed(7)
        self.maker = make_layers(3)
        self.judge = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))

    def loss_of_maker(self, batch: Any) -> Tensor:
        return nn.functional.softplus(-self.judge(self.maker(batch[0]))).mean()

    def loss_of_judge(self, batch: Any) -> Tensor:
        return nn.functional.softplus(self.judge(self.maker(batch[0]).detach()) - self.judge(batch[0][:, :4])).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer, loss_of in zip(self.optimizers(), (self.loss_of_maker, self.loss_of_judge), strict=True):
            self.toggle_optimizer(optimizer)
            loss = loss_of(batch)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.detach().clone())
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step()

    def configure_optimizers(self) -> Any:
        maker = torch.optim.AdamW(self.maker.parameters(), lr=1e-2, foreach=False)
        judge = torch.optim.SGD(self.judge.parameters(), lr=1e-2, momentum=0.9)
        return [maker, judge], [torch.optim.lr_scheduler.StepLR(maker, 2), torch.optim.lr_scheduler.StepLR(judge, 2)]


class StepsTogether(Adversarial):
    """One backward for both steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of_maker(batch)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(self.optimizers()[0], 0.1, "value")  # type: ignore[index]
        for optimizer in self.trainer.optimizers:
            optimizer.step()
        self.losses.append(loss.detach().clone())


class StepsByClosures(Adversarial):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer, loss_of in zip(self.optimizers(), (self.loss_of_maker, self.loss_of_judge), strict=True):

            def closure(optimizer: Any = optimizer, loss_of: Any = loss_of) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = loss_of(batch)
                self.manual_backward(loss)
                self.losses.append(loss.detach().clone())
                return loss

            with optimizer.toggle_model():
                optimizer.step(closure=closure)


class OneOfItsOwn(Net):
    """One optimizer, whose gradients two batches add up to."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("make", telling([Adversarial, StepsTogether, StepsByClosures, OneOfItsOwn], "OneOfItsOwn"))
def test_manual_optimization_is_foreseen_and_does_not_notice(make: type[Net], profiles: list[Any]) -> None:
    assert_trains_as_plainly(make)
    assert isinstance(profiles[0], MemoryProfile)


def test_of_several_backwards_the_last_one_counts_with_the_memory_of_the_largest(profiles: list[Any]) -> None:
    fit(ElixirStrategy(**LIMIT), Adversarial)

    def alone(which: str) -> MemoryProfile:
        net = Adversarial()
        net.maker.requires_grad_(which == "maker")
        net.judge.requires_grad_(which == "judge")
        return profile_memory(
            net,
            {"batch": next(iter(make_data()))},
            lambda net, inp: getattr(net, f"loss_of_{which}")(inp["batch"]).backward(),
        )

    (found,), last = profiles, alone("judge")
    assert isinstance(found, MemoryProfile)
    assert found.flops == last.flops
    assert [(i.fqns, i.is_pinned) for i in found.timeline if i.fqns] == [
        (i.fqns, i.is_pinned) for i in last.timeline if i.fqns
    ]
    assert [d for i in found.timeline for d in i.dropped] == [d for i in last.timeline for d in i.dropped]
    assert [name for i in found.timeline for name in i.grads] == [name for i in last.timeline for name in i.grads]
    assert all(name.startswith("judge.") for i in found.timeline for name in i.grads)
    assert max(i.activation_bytes for i in found.timeline) == found.activation_bytes
    assert found.activation_bytes >= alone("maker").activation_bytes > last.activation_bytes


class NeverBackward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


def test_a_batch_without_backward_is_not_foreseen(profiles: list[Any]) -> None:
    fit(ElixirStrategy(**LIMIT), NeverBackward)
    assert "ran no backward" in str(profiles[0])


@pytest.mark.full  # long runs
@pytest.mark.parametrize("kind", ["list", "dict", "array"])
def test_long_records_do_not_grow(kind: str, profiles: list[Any]) -> None:
    class Recording(Net):
        def __init__(self) -> None:
            super().__init__()
            self.record: Any = {
                "list": list(range(20_000)),
                "dict": dict.fromkeys(range(20_000)),
                "array": np.zeros(300_000),
            }[kind]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if kind == "list":
                self.record.append(loss)
            elif kind == "dict":
                self.record[-1 - len(self.record)] = loss
            else:
                self.record[0] += 1
            return loss

    _, model, _ = fit(ElixirStrategy(**LIMIT), Recording, limit_train_batches=3)
    assert isinstance(model, Recording)
    assert isinstance(profiles[0], MemoryProfile) == (kind != "array")  # which is not copied, and so not written to
    assert (model.record[0] if kind == "array" else len(model.record)) == (3 if kind == "array" else 20_003)


@pytest.mark.full
def test_a_warning_that_is_told_once_is_told(profiles: list[Any]) -> None:
    class Warning1(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            warnings.warn("told by the default filter, once", stacklevel=1)
            return super().training_step(batch, batch_idx)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        fit(ElixirStrategy(**LIMIT), Warning1)
    assert isinstance(profiles[0], MemoryProfile)
    assert sum("once" in str(w.message) for w in caught) == 1


def test_it_fetches_nothing(profiles: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[Any] = []
    original = dry_run

    def watched(module: Any, *args: Any, **options: Any) -> Any:
        strategy = module.trainer.strategy
        first = strategy.stats()
        found = original(module, *args, **options)
        second = strategy.stats()
        before.append((first.fetches, first.h2d_bytes, second.fetches, second.h2d_bytes))
        return found

    monkeypatch.setattr(fit_run_module, "dry_run", watched)
    fit(ElixirStrategy(**LIMIT))
    ((fetches, moved, fetches_after, moved_after),) = before
    assert (fetches, moved) == (fetches_after, moved_after)


@pytest.mark.full
@pytest.mark.parametrize("precision", telling(["32-true", "bf16-mixed", "bf16-true", "64-true"], "bf16-mixed"))
def test_it_tells_what_the_profiler_tells_of_the_plain_model(precision: str, profiles: list[Any]) -> None:
    strategy = ElixirStrategy(**LIMIT)
    _, model, _ = fit(strategy, Net, precision=precision)
    plugin, batch = strategy.precision_plugin, next(iter(make_data()))
    expected = profile_memory(
        Net(),
        {"batch": batch},
        lambda net, inp: net.loss(inp["batch"]).backward(),  # type: ignore[operator]
        plugin.compute_dtype,
        autocast=plugin.has_autocast,
        keep_fp32=sorted(kept_in(strategy.plan)) or None,
        master_weights=False,
    )
    (found,) = profiles
    assert isinstance(found, MemoryProfile)
    assert found.flops == expected.flops
    assert found.param_bytes == expected.param_bytes
    assert found.activation_bytes == pytest.approx(expected.activation_bytes, rel=1e-3)
    assert [i.fqns for i in found.timeline] == [i.fqns for i in expected.timeline]


# Batches


@dataclass
class Pair:
    x: Tensor
    y: Tensor


class Wrapped(Net):
    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, Pair):
            return super().loss([batch.x, batch.y])
        return super().loss([batch["x"], batch["more"]["y"]])


@pytest.mark.parametrize("kind", telling(["dataclass", "user dict"], "user dict"))
def test_batches_of_other_classes(kind: str, profiles: list[Any]) -> None:
    def collate(samples: Any) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return Pair(x, y) if kind == "dataclass" else UserDict(x=x, more={"y": y})

    def data() -> Any:
        return DataLoader(make_data().dataset, batch_size=4, collate_fn=collate)

    _, _, actual = fit(ElixirStrategy(**LIMIT), Wrapped, train=data)
    _, _, expected = fit("auto", Wrapped, train=data)
    assert isinstance(profiles[0], MemoryProfile)
    assert_same_run(actual, expected)


# Where it cannot be


class AskingTheTrainer(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.trainer.train_dataloader is not None
        return super().training_step(batch, batch_idx)


class SkippingTheFirst(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx else None


class TakingAnIterator(Net):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        loss = self.loss(batch)
        self.losses.append(loss.detach().clone())
        return loss


@pytest.mark.filterwarnings("ignore:.*returned `None`", "ignore:.*dataloader_iter")
@pytest.mark.parametrize(
    "make", telling([UnforeseenNet, AskingTheTrainer, SkippingTheFirst, TakingAnIterator], "TakingAnIterator")
)
def test_steps_that_cannot_be_run_without_values(make: type[Net], profiles: list[Any], caplog: Any) -> None:
    _, _, expected = fit("auto", make)
    with caplog.at_level("INFO", "lightning_elixir"):
        _, _, actual = fit(ElixirStrategy(**LIMIT), make)
    assert isinstance(profiles[0], Exception)
    assert any("the first step is watched" in r.getMessage() for r in caplog.records)
    assert_same_run(actual, expected)


def test_a_step_that_fails_fails_in_the_real_step() -> None:
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("of the user's own")

    with pytest.raises(RuntimeError, match="of the user's own"):
        fit(ElixirStrategy(**LIMIT), Failing)


# What is not copied


class Rows(Dataset[Any]):
    def __init__(self) -> None:
        self.rows = torch.zeros(10, 4)

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("data was copied")

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def test_data_that_a_module_holds_is_not_copied() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_layers(1)
            self.data = Rows()
            self.table = np.zeros((1000, 1000))
            self.words = {"all": list(range(20_000)), "few": [torch.ones(3), {"deep": torch.ones(5)}]}

    model, seen = Holder(), []

    def step(copy: Any, inp: Any) -> None:
        seen.append(copy)
        copy.layers(inp["x"]).sum().backward()

    profile_memory(model, {"x": torch.zeros(2, WIDTH)}, step)
    (copy,) = seen
    assert copy.data is model.data
    assert np.shares_memory(copy.table, model.table)
    with pytest.raises(ValueError, match="read-only"):
        copy.table[0] += 1
    assert all(ours is theirs for ours, theirs in zip(copy.words["all"], model.words["all"], strict=True))
    assert copy.words["all"] is not model.words["all"]
    assert type(copy.words["few"][0]).__name__ == "FakeTensor"
    assert type(copy.words["few"][1]["deep"]).__name__ == "FakeTensor"


# When there is one


def test_the_collector_waits_until_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    in_dry_runs: list[bool] = []
    in_steps: list[bool] = []

    def noted(*args: Any, **options: Any) -> MemoryProfile:
        in_dry_runs.append(gc.isenabled())
        return dry_run(*args, **options)

    class Looking(Net):
        def on_before_backward(self, loss: Tensor) -> None:
            in_steps.append(gc.isenabled())

    monkeypatch.setattr(fit_run_module, "dry_run", noted)
    fit(ElixirStrategy(**LIMIT), Looking)
    assert in_dry_runs == [False]
    assert in_steps
    assert all(in_steps)


@pytest.mark.full
def test_there_is_one_for_each_engine(profiles: list[Any]) -> None:
    strategy = ElixirStrategy(**LIMIT)
    trainer, model, _ = fit(strategy)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, make_data())
    assert len(profiles) == 1


@pytest.mark.full
@pytest.mark.parametrize("options", [{"placement_policy": "cpu"}, {"placement_policy": "cuda"}, {}], ids=str)
def test_there_is_none_where_nothing_is_to_be_decided(options: Any, profiles: list[Any]) -> None:
    fit(ElixirStrategy(**CHUNK, **options))
    assert profiles == []


class Scaled(nn.Linear):
    """Scales its weight whenever it is used."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.9)
        return super().forward(x)


class ScalesWeights(Net):
    def _make(self) -> None:
        super()._make()
        for layer in self.layers[:-1]:
            layer.up.__class__ = Scaled


class Binarised(nn.Linear):
    """Computes with the signs of its weight, which has its values back at the end."""

    def forward(self, x: Tensor) -> Tensor:
        kept = self.weight.data.clone()
        self.weight.data.sign_().mul_(kept.abs().mean())
        result = nn.functional.linear(x, self.weight.clone(), self.bias)
        self.weight.data.copy_(kept)
        return result


class BinarisesWeights(Net):
    def _make(self) -> None:
        super()._make()
        for layer in self.layers[:-1]:
            layer.up.__class__ = Binarised


class FollowsAnAverage(Net):
    """A frozen copy follows the weights at the beginning of each step."""

    def _make(self) -> None:
        super()._make()
        self.teacher = make_layers().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for average, p in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
            average.data.mul_(0.9).add_(p.data, alpha=0.1)
        loss = super().training_step(batch, batch_idx)
        return loss + (self.teacher(batch[0]) - self(batch[0])).square().mean()


@pytest.mark.parametrize(
    ("make", "name"), [(ScalesWeights, r"layers\.\d\.up\.weight"), full(FollowsAnAverage, r"teacher\.0\.up\.weight")]
)
def test_writes_in_the_step_that_would_be_lost_are_an_error(make: type[Net], name: str) -> None:
    with pytest.raises(StateError, match=rf"written inside forward: .*{name}.*move the write") as raised:
        fit(ElixirStrategy(**LIMIT), make)
    assert ("in ignored=" in str(raised.value)) == (make is FollowsAnAverage)


@pytest.mark.full
def test_a_frozen_copy_out_of_chunks_may_follow_an_average_in_the_step() -> None:
    options = {**CHUNK, "gpu_memory_limit": "130KiB"}  # beside the copy chunks move
    assert_same_run(
        fit(ElixirStrategy(**options, ignored=["teacher"]), FollowsAnAverage)[2], fit("auto", FollowsAnAverage)[2]
    )


@pytest.mark.parametrize("make", telling([ScalesWeights, FollowsAnAverage], "FollowsAnAverage"))
def test_writes_in_the_step_count_where_the_values_are(make: type[Net], profiles: list[MemoryProfile]) -> None:
    """All is on the device, without other copies of the values."""
    assert_same_run(fit(ElixirStrategy(**CHUNK, gpu_memory_limit="64MiB"), make)[2], fit("auto", make)[2])
    assert [bool(profile.written) for profile in profiles] == [True]


@pytest.mark.parametrize("precision", telling(["32-true", "bf16-mixed"], "bf16-mixed"))
def test_what_is_put_back_is_no_write(precision: Any, profiles: list[MemoryProfile]) -> None:
    found = fit(ElixirStrategy(**LIMIT), BinarisesWeights, precision=precision)
    whole = fit(ElixirStrategy(**CHUNK, gpu_memory_limit="64MiB"), BinarisesWeights, precision=precision)
    assert_same_run(found[2], whole[2] if precision != "32-true" else fit("auto", BinarisesWeights)[2])
    assert found[0].strategy.stats().evictions > 0
    assert all(profile.written for profile in profiles)


class ClampsInCheckpoints(Net):
    """Keeps the weights of its blocks within bounds, in their forward, by writing to them; nothing is beyond them."""

    def forward(self, x: Tensor) -> Tensor:
        *blocks, head = self.layers
        for block in blocks:
            x = checkpoint(self._run, block, x, use_reentrant=False)
        return head(x)

    def _run(self, block: Any, x: Tensor) -> Tensor:
        block.up.weight.data.clamp_(-50, 50)
        return block(x)


def test_writes_of_a_checkpoint_to_its_weights(profiles: list[MemoryProfile]) -> None:
    run = fit(ElixirStrategy(**CHUNK, gpu_memory_limit="64MiB"), ClampsInCheckpoints)[2]
    assert_same_run(run, fit("auto", ClampsInCheckpoints)[2])
    assert [type(profile) for profile in profiles] == [MemoryProfile]


class SharesThroughCheckpoints(Net):
    """Later blocks take what the first one has put into a container, and the step asks for what no dry run has."""

    def forward(self, x: Tensor) -> Tensor:
        shared: dict[str, Tensor] = {}
        *blocks, head = self.layers
        for block in blocks:
            x = checkpoint(self._run, block, x, shared, use_reentrant=False)
        return head(x)

    def _run(self, block: Any, x: Tensor, shared: dict[str, Tensor]) -> Tensor:
        if block is self.layers[0]:
            shared["first"] = torch.tanh(block.up(x))[:, : x.shape[1]]
        return torch.sin(block(x + shared["first"]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert self.trainer.fit_loop is not None
        return loss


def test_a_forward_without_backward_whose_checkpoints_share_a_container(profiles: list[Exception]) -> None:
    """Which is a cycle that the collector does not see."""
    assert_same_run(fit(ElixirStrategy(**LIMIT), SharesThroughCheckpoints)[2], fit("auto", SharesThroughCheckpoints)[2])
    assert [type(error) for error in profiles] == [PlanError]


class LooksAround(Net):
    """Climbs to where the loss is higher, takes the gradients there, and comes back (SAM). What lies between parameters
    in chunks is anything."""

    def __init__(self) -> None:
        super().__init__("hybrid")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        handle = EngineHandle.of(self)
        for chunk in handle.engine.engine.chunks if handle is not None else ():
            if chunk.is_usable:
                is_padding = torch.ones(len(chunk.flat), dtype=torch.bool)
                for member in chunk.spec.members:
                    is_padding[member.offset : member.offset + member.numel] = False
                chunk.flat[is_padding] = 7
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        before = [p.detach().clone() for p in self.parameters()]
        with torch.no_grad():
            for p in self.parameters():
                p.add_(p.grad, alpha=0.1)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p, value in zip(self.parameters(), before, strict=True):
                p.copy_(value)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("limit", telling(["96KiB", "200KiB"], "200KiB"))
def test_padding_is_no_write(limit: str, profiles: list[MemoryProfile]) -> None:
    found = fit(ElixirStrategy(**CHUNK, gpu_memory_limit=limit), LooksAround)
    assert_same_run(found[2], fit("auto", LooksAround)[2])
    assert [bool(profile.written) for profile in profiles] == [True]


def _one_rank_cannot_tell(rank: int) -> Any:
    class Uneven(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_rank == 1:
                assert len(batch[0].nonzero())
            return super().training_step(batch, batch_idx)

    stages: list[str] = []
    original = WarmUp.before_batch
    with pytest.MonkeyPatch.context() as monkeypatch:

        def before_batch(warm_up: WarmUp, dry: Any) -> None:
            original(warm_up, dry)
            stages.append(warm_up.stage.value)

        monkeypatch.setattr(WarmUp, "before_batch", before_batch)
        _, _, run = fit(ElixirStrategy(**LIMIT), Uneven, devices=2, train=lambda: make_data(64))
    return [loss.item() for loss in run.losses], stages[:4]


def _ddp() -> Any:
    return [loss.item() for loss in fit("ddp", devices=2, train=lambda: make_data(64))[2].losses]


@pytest.mark.full
def test_all_ranks_watch_where_one_cannot_tell() -> None:
    found = run_ranks(_one_rank_cannot_tell, 2, 0, init_group=False)
    assert [stages for _, stages in found] == [["watched", "settling", "timed", "done"]] * 2
    assert [losses for losses, _ in found] == run_ranks(_ddp, 2, init_group=False)


@pytest.mark.full
def test_modules_within_modules_and_the_trainer_in_attributes(profiles: list[Any]) -> None:
    class Inner(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_layers(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    class Callbacking(pl.Callback):
        trainer: Trainer | None = None

        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            self.trainer = trainer

    class Outer(Net):
        def _make(self) -> None:
            torch.manual_seed(7)
            self.layers: Any = Inner()
            self.helper = callback

    callback = Callbacking()
    _, _, expected = fit("auto", Outer, callbacks=[callback])
    _, _, actual = fit(ElixirStrategy(**LIMIT), Outer, callbacks=[callback])
    assert isinstance(profiles[0], MemoryProfile)
    assert_same_run(actual, expected)


def test_the_trainer_that_a_copy_has_does_nothing() -> None:
    from lightning_elixir.strategy.dry_run import _FiguresOf

    trainer = make_trainer("auto")
    figures = _FiguresOf(trainer)
    assert figures.global_step == trainer.global_step
    assert not figures.logger.experiment.log_image("x", [1])
    with pytest.raises(Exception, match=r"trainer\.save_checkpoint"):
        figures.save_checkpoint("x")


# What users change outside of the module


class Opaque:
    """A batch of a class that nothing knows."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.num_seen = x, y, 0


def opaque_data(**options: Any) -> Any:
    def collate(samples: Any) -> Opaque:
        return Opaque(*torch.utils.data.default_collate(samples))

    return DataLoader(make_data().dataset, batch_size=4, collate_fn=collate, **options)


num_global_steps = 0
global_losses: dict[str, list[float]] = {"train": []}
global_counts = np.zeros(2)
global_tensor = torch.zeros(())
global_generator = np.random.default_rng(1)
global_cache: dict[str, Tensor] = {}


@functools.lru_cache
def drawn_once(place: int) -> float:
    return place + float(global_generator.random())


class ChangingAll(Net):
    """Counts wherever one can count, in every step."""

    num_steps = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.counts, self.long = np.zeros(2), list(range(20_000))
        self.seen: list[Any] = []
        in_closure, here = [0], weakref.ref(self)
        self.num_hooks, self.num_weak = 0, 0

        def hook(module: nn.Module, inp: Any, out: Tensor) -> None:
            self.num_hooks += 1
            in_closure[0] += 1
            net = here()
            assert net is not None
            net.num_weak += 1

        self.layers[0].register_forward_hook(hook)
        self.in_closure = lambda: in_closure[0]
        noted: list[int] = []
        self.note, self.num_noted, self.draw = noted.append, noted.__len__, random.Random(1).random

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        global num_global_steps
        num_global_steps += 1
        ChangingAll.num_steps += 1
        global_tensor.add_(1)
        global_counts[0] += 1
        self.counts[0] += 1
        self.long.append(batch_idx)
        batch.num_seen += 1
        batch.x = batch.x * 2
        if "ones" not in global_cache:
            global_cache["ones"] = torch.ones_like(batch.y[:1])
            assert batch.num_seen == 1
        optimizer: Any = self.optimizers()
        optimizer.param_groups[0]["lr"] *= 0.9
        scheduler: Any = self.lr_schedulers()
        loss = super().training_step([batch.x, batch.y * global_cache["ones"]], batch_idx)
        global_losses["train"].append(loss.item())
        counted = [num_global_steps, self.num_steps, len(global_losses["train"]), self.num_hooks, self.num_weak]
        counted += [batch.num_seen, len(self.long), self.in_closure(), scheduler.last_epoch]
        figures = [*global_counts.tolist(), *self.counts.tolist(), global_tensor.item(), global_generator.random()]
        self.note(batch_idx)
        figures += [drawn_once(1), self.draw(), self.num_noted()]
        self.seen.append((counted, figures, optimizer.param_groups[0]["lr"]))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def _run_changing(strategy: Any, train: Any) -> Any:
    global num_global_steps, global_generator
    num_global_steps = ChangingAll.num_steps = 0
    global_losses["train"].clear()
    global_cache.clear()
    global_counts.fill(0)
    global_tensor.zero_()
    global_generator = np.random.default_rng(1)
    drawn_once.cache_clear()
    _, model, result = fit(strategy, ChangingAll, train=train)
    assert isinstance(model, ChangingAll)
    assert type(global_cache["ones"]) is Tensor
    return result, model.seen


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_what_the_step_changes_elsewhere_is_put_back(profiles: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(put_back, "_may_change_things", lambda thread: False)  # threads that other tests have left
    expected, actual = (_run_changing(strategy, opaque_data) for strategy in ("auto", ElixirStrategy(**LIMIT)))
    assert isinstance(profiles[0], MemoryProfile)
    assert_same_run(actual[0], expected[0])
    assert actual[1] == expected[1]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:.*fork:DeprecationWarning")
def test_and_beside_the_processes_of_a_data_loader(profiles: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    others, may_change = set(threading.enumerate()), put_back._may_change_things
    monkeypatch.setattr(put_back, "_may_change_things", lambda thread: thread not in others and may_change(thread))

    data = functools.partial(opaque_data, num_workers=1, multiprocessing_context="fork")
    expected, actual = (_run_changing(strategy, data) for strategy in ("auto", ElixirStrategy(**LIMIT)))
    assert isinstance(profiles[0], MemoryProfile)
    assert_same_run(actual[0], expected[0])
    assert actual[1] == expected[1]


class Slotted:
    __slots__ = ("scale",)


class Listed(list[Any]):
    def append(self, value: Any) -> None:
        raise AssertionError("its own methods are not for putting back")


class Settings:
    scale: float


kept_local = threading.local()
kept_in_context: contextvars.ContextVar[float] = contextvars.ContextVar("kept_in_context")


def _first_answers() -> dict[str, Callable[[], Callable[[Tensor], float]]]:
    """Ways to keep what the first call has found, each by a name; each begins anew."""

    def by_cell() -> Callable[[Tensor], float]:
        found: float | None = None

        def keep(x: Tensor) -> float:
            nonlocal found
            found = 1 / (1 + x.std().item()) if found is None else found
            return found

        return keep

    def by_empty_cell() -> Callable[[Tensor], float]:
        def keep(x: Tensor) -> float:
            nonlocal found
            try:
                return found
            except NameError:
                found = 1 / (1 + x.std().item())
                return found

        if False:
            found = 0.0
        return keep

    def by(get: Callable[[], Any], put: Callable[[float], object]) -> Callable[[Tensor], float]:
        def keep(x: Tensor) -> float:
            if get() is None:
                put(1 / (1 + x.std().item()))
            return float(get())

        return keep

    def by_attribute(of: Any) -> Callable[[Tensor], float]:
        return by(lambda: getattr(of, "scale", None), lambda value: setattr(of, "scale", value))

    def by_items(items: Any, put: Callable[[Any, float], object]) -> Callable[[Tensor], float]:
        return by(lambda: items[0] if len(items) else None, lambda value: put(items, value))

    def by_context() -> Callable[[Tensor], float]:
        return by(lambda: kept_in_context.get(None), kept_in_context.set)

    def by_local() -> Callable[[Tensor], float]:
        vars(kept_local).clear()
        return by_attribute(kept_local)

    deep: Any = collections.deque()
    for _ in range(12):
        deep = {"below": deep}

    def by_depth() -> Callable[[Tensor], float]:
        held = deep
        while isinstance(held, dict):
            held = held["below"]
        held.clear()
        return by(lambda: (deep, held[0])[1] if held else None, held.append)

    def by_class() -> Callable[[Tensor], float]:
        vars(Settings).get("scale") and delattr(Settings, "scale")
        return by_attribute(Settings)

    def by_environment() -> Callable[[Tensor], float]:
        os.environ.pop("SCALE_OF_A_TEST", None)
        return by(
            lambda: os.environ.get("SCALE_OF_A_TEST"), lambda v: os.environ.__setitem__("SCALE_OF_A_TEST", str(v))
        )

    return {
        "class": by_class,
        "class in a cell": lambda: by_attribute(type("Made", (), {"__module__": __name__})),
        "environment": by_environment,
        "cell": by_cell,
        "empty cell": by_empty_cell,
        "attribute of a function": lambda: by_attribute(lambda: None),
        "namespace": lambda: by_attribute(types.SimpleNamespace()),
        "slots": lambda: by_attribute(Slotted()),
        "deque": lambda: by_items(collections.deque(), collections.deque.append),
        "list of another class": lambda: by_items(Listed(), list.append),
        "user list": lambda: by_items(collections.UserList(), collections.UserList.append),
        "array": lambda: by_items(array.array("d"), array.array.append),
        "context": by_context,
        "of this thread": by_local,
        "deep": by_depth,
    }


@pytest.mark.parametrize("how", telling(_first_answers(), "class in a cell", "slots"))
def test_what_the_first_call_finds_is_found_in_the_real_step(
    how: str, profiles: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the dry run a number that is read is 1."""
    monkeypatch.setattr(put_back, "_may_change_things", lambda thread: False)  # threads that other tests have left

    def run(strategy: Any) -> Any:
        class Calibrated(Net):
            def __init__(self) -> None:
                super().__init__()
                keep = _first_answers()[how]()
                self.register_forward_hook(lambda module, args, result: None)
                self.layers[0].register_forward_hook(lambda module, args, result: result * keep(result))

        return contextvars.copy_context().run(lambda: fit(strategy, Calibrated)[2])

    expected, actual = run("auto"), run(ElixirStrategy(**LIMIT))
    assert isinstance(profiles[0], MemoryProfile)
    assert_same_run(actual, expected)


def test_gradients_of_what_is_outside_of_the_model_are_those_of_the_real_step(profiles: list[Any]) -> None:
    def run(strategy: Any) -> Any:
        torch.manual_seed(3)
        outside = nn.Linear(WIDTH, WIDTH)
        bias = torch.zeros(WIDTH, requires_grad=True)

        class Guided(Net):
            def loss(self, batch: Any) -> Tensor:
                x, y = batch
                return super().loss([outside(x) + bias, y])

        result = fit(strategy, Guided)[2]
        return result, [outside.weight.grad, bias.grad]

    (expected, grads), (actual, ours) = run("auto"), run(ElixirStrategy(**LIMIT))
    assert isinstance(profiles[0], MemoryProfile)
    assert_same_run(actual, expected)
    assert all(torch.equal(a, b) for a, b in zip(ours, grads, strict=True))


global_numbers = itertools.count()
next_number = global_numbers.__next__


@pytest.mark.parametrize("has_method", [False, True])
def test_an_iterator_that_the_step_uses_up_is_not_run_twice(profiles: list[Any], has_method: bool) -> None:
    class Numbered(Net):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * (1 + next(global_numbers))

    class NumberedByMethod(Net):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * (1 + next_number())

    def run(strategy: Any) -> Any:
        global global_numbers, next_number
        global_numbers = itertools.count()
        next_number = global_numbers.__next__
        return fit(strategy, NumberedByMethod if has_method else Numbered)[2]

    expected, actual = run("auto"), run(ElixirStrategy(**LIMIT))
    assert "may use up an iterator (count)" in str(profiles[0])
    assert_same_run(actual, expected)


def test_a_loop_until_a_tensor_says_so_ends(profiles: list[Any]) -> None:
    class Endless(Net):
        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            while True:
                x = x * 0.5
                if x.abs().max() < 1e-2:
                    return super().loss([x, y])

    expected, actual = (fit(strategy, Endless)[2] for strategy in ("auto", ElixirStrategy(**LIMIT)))
    assert_same_run(actual, expected)
    assert "1001 numbers were read from tensors without values" in str(profiles[0])


@functools.lru_cache
def _large_mask(size: int) -> Tensor:
    return torch.ones(size, size).tril()


@pytest.mark.full
def test_a_cache_of_a_function_keeps_nothing_without_values(profiles: list[Any]) -> None:
    class Masked(Net):
        def loss(self, batch: Any) -> Tensor:
            return super().loss([batch[0] * _large_mask(3000)[-1, :WIDTH], batch[1]])

    def run(strategy: Any) -> Any:
        _large_mask.cache_clear()
        return fit(strategy, Masked)[2]

    expected, actual = run("auto"), run(ElixirStrategy(**LIMIT))
    assert isinstance(profiles[0], MemoryProfile)
    assert_same_run(actual, expected)


class HookingNet(Net):
    """Hooks that lead back to what they are at, through the graph: no collector finds them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        for p in self.parameters() if batch_idx == 0 else ():
            p.register_hook(lambda grad, p=p: grad + p.new_full((), 1e-3))
            p.register_post_accumulate_grad_hook(lambda _, p=p: self.losses.append(torch.tensor(p.ndim)))
        outputs = []
        for layer in self.layers:
            x = layer(x)
            x.register_hook(lambda grad, x=x: grad * x.abs().mean().detach())
            outputs.append(x)
        assert x.grad_fn is not None
        x.grad_fn.register_prehook(lambda grads, x=x: self.losses.append(x.detach().sum() * grads[0].sum()))
        register_multi_grad_hook(outputs, lambda grads: self.losses.extend(g.sum() for g in grads if g is not None))
        return nn.functional.cross_entropy(x, y)


def test_hooks_that_hold_tensors_keep_nothing_without_values(profiles: list[Any]) -> None:
    expected, actual = (fit(strategy, HookingNet)[2] for strategy in ("auto", ElixirStrategy(**LIMIT)))
    assert isinstance(profiles[0], MemoryProfile)
    assert len(expected.losses) > 40
    assert_same_run(actual, expected)


@pytest.mark.full
def test_tensors_without_values_are_not_trained_with(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("hostile_library")
    library.__file__ = "/somewhere/site-packages/hostile_library.py"
    library.cache = {}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, library.__name__, library)

    class Keeping(Net):
        asks = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert not self.asks or self.trainer.strategy is not None
            cache = sys.modules["hostile_library"].cache
            if "ones" not in cache:
                cache["ones"] = torch.ones_like(batch[0])
            return super().training_step([batch[0] * cache["ones"], batch[1]], batch_idx)

    class Asking(Keeping):
        asks = True

    with pytest.raises(StateError, match=r"training_step keeps 1 tensors .*self\.trainer\.strategy"):
        fit(ElixirStrategy(**LIMIT), Keeping)
    library.cache.clear()
    _, _, expected = fit("auto", Asking)
    library.cache.clear()
    _, _, actual = fit(ElixirStrategy(**LIMIT), Asking)
    assert_same_run(actual, expected)


@pytest.mark.full
def test_errors_are_logged_once_and_what_is_logged_once_is_logged(profiles: list[Any], caplog: Any) -> None:
    user = logging.getLogger("user of the dry run")

    @functools.lru_cache(None)
    def warn_once(self: logging.Logger, message: str) -> None:
        self.warning(message)

    class Complaining(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                user.error("an error")
                user.critical("worse")
            user.warn_once("once")  # type: ignore[attr-defined]
            return super().training_step(batch, batch_idx)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(logging.Logger, "warn_once", warn_once, raising=False)
        fit(ElixirStrategy(**LIMIT), Complaining)
        assert vars(logging.Logger)["warn_once"] is warn_once
    assert isinstance(profiles[0], MemoryProfile)
    told = [r.getMessage() for r in caplog.records if r.name == user.name]
    assert told == ["an error", "worse", "once"]


class Stopping(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        breakpoint()
        return super().training_step(batch, batch_idx)


class Leaving(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if loss.item() == 1:  # which is what a dry run takes it for
            raise SystemExit(3)
        return loss


class Asking(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch[0], FakeTensor):
            input("nobody can answer that")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("make", telling([Stopping, Leaving, Asking], "Leaving"))
def test_it_does_not_stop_or_end_the_process(
    make: type[Net], profiles: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stops: list[int] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(1))
    _, _, expected = fit("auto", make)
    num_stops = len(stops)
    _, _, actual = fit(ElixirStrategy(**LIMIT), make)
    assert isinstance(profiles[0], Exception)
    assert len(stops) == 2 * num_stops
    assert_same_run(actual, expected)


def _talking() -> Any:
    class Talking(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_rank == 1:
                assert len(batch[0].nonzero())
            torch.distributed.barrier()
            return super().training_step(batch, batch_idx)

    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as monkeypatch:

        def noted(*args: Any, **options: Any) -> MemoryProfile:
            try:
                return dry_run(*args, **options)
            except Exception as error:
                seen.append(str(error))
                raise

        monkeypatch.setattr(fit_run_module, "dry_run", noted)
        _, _, run = fit(ElixirStrategy(**LIMIT), Talking, devices=2, train=lambda: make_data(64))
    return [loss.item() for loss in run.losses], seen


def test_it_waits_for_no_other_rank() -> None:
    found = run_ranks(_talking, 2, init_group=False)
    assert [losses for losses, _ in found] == run_ranks(_ddp, 2, init_group=False)
    assert "training_step talks to other ranks" in found[0][1][0]


def test_what_other_threads_do_meanwhile_is_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what holds tensors without values is put back then."""
    others, may_change = set(threading.enumerate()), put_back._may_change_things
    monkeypatch.setattr(put_back, "_may_change_things", lambda thread: thread not in others and may_change(thread))
    counts, cache, feed = {"n": 0}, {"mask": None}, collections.deque([1])
    with FakeTensorMode():
        fake = torch.zeros(3)
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait, daemon=True)
    for is_alone in (True, False):
        if not is_alone:
            thread.start()
        there = PutBack()
        there._is_sure = there._is_alone  # as for globals
        there.add([counts, cache, feed])
        counts["n"] += 1
        cache["mask"] = fake  # type: ignore[assignment]
        feed.append(2)
        there.put_back()
        assert cache == {"mask": None}
        assert counts == {"n": 0 if is_alone else 1}
    assert list(feed) == [1, 2]
    there = PutBack()
    there.add(feed)  # as for what belongs to the model
    feed.append(3)
    there.put_back()
    assert list(feed) == [1, 2, 3]  # the other thread may have put it there
    is_over.set()
    thread.join()


@pytest.mark.full
def test_batches_and_models_are_put_back_beside_other_threads(profiles: list[Any]) -> None:
    class Doubling(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch.num_seen += 1
            batch.x = batch.x * 2
            assert batch.num_seen == 1
            return super().training_step([batch.x, batch.y], batch_idx)

    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait, daemon=True)
    thread.start()
    _, _, expected = fit("auto", Doubling, train=opaque_data)
    _, _, actual = fit(ElixirStrategy(**LIMIT), Doubling, train=opaque_data)
    is_over.set()
    thread.join()
    assert isinstance(profiles[0], MemoryProfile)
    assert_same_run(actual, expected)


def test_what_else_is_on_the_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model of the user's, say, of which a dry run sees nothing. Before, the plan took the room for itself, and
    the first step ran out of memory."""
    expected, place = fit("auto")[2], WarmUp._place
    for foreign_bytes in (0, 300 << 10):
        plans: list[Plan] = []
        strategy = ElixirStrategy(**CHUNK, gpu_memory_limit="700KiB")

        def noted(warm_up: WarmUp, *args: Any, plans: list[Plan] = plans, **options: Any) -> None:
            place(warm_up, *args, **options)
            plans.append(warm_up._engine.plan)

        def allocated(device: CpuDevice, strategy: Any = strategy, foreign_bytes: int = foreign_bytes) -> int:
            held: int = strategy._handle.engine.engine.device_bytes()
            return foreign_bytes + held

        with monkeypatch.context() as patch:
            patch.setattr(CpuDevice, "allocated_bytes", allocated)
            patch.setattr(WarmUp, "_place", noted)
            assert_same_run(fit(strategy)[2], expected)
        assert plans[0].is_all_resident == (foreign_bytes == 0)
        assert plans[0].forecast is not None
        assert foreign_bytes < plans[0].forecast.peak_gpu_bytes <= 700 << 10


@pytest.mark.full
def test_garbage_in_cycles_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an earlier fit, which goes when it is collected."""

    class Node:
        def __init__(self) -> None:
            self.itself = self

    gc.disable()
    try:
        left = weakref.ref(Node())
        strategy = ElixirStrategy(**CHUNK, gpu_memory_limit="700KiB")

        def allocated(device: CpuDevice) -> int:
            held: int = strategy._handle.engine.engine.device_bytes()
            return held if left() is None else held + (1 << 30)

        monkeypatch.setattr(CpuDevice, "allocated_bytes", allocated)
        fit(strategy)
    finally:
        gc.enable()
    assert strategy.plan.is_all_resident
