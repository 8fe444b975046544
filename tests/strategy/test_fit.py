"""Whatever a Trainer does in fit gives the bits of plain Lightning, under a limit that makes chunks come and go."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir._lightning import Trainer, pl
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.seeds import seed_torch
from tests.helpers.tiers import full, telling
from tests.strategy import models
from tests.strategy.models import (
    CHUNK,
    TIGHT,
    Net,
    assert_close_run,
    assert_same_run,
    few_batches,
    make_data,
    make_optimizer,
    make_trainer,
)
from tests.strategy.nets import BatchNormNet, FrozenNet, GroupsNet, ManualNet, OverridingNet, ScheduledNet, TiedNet

fit = functools.partial(models.fit, train=few_batches)
assert_same_as_plain = functools.partial(models.assert_same_as_plain, train=few_batches)


@pytest.mark.parametrize("optimizer", telling(["adamw", "adam", "sgd", "hybrid", "cpu_adam"], "hybrid", "adamw"))
def test_optimizers(optimizer: str) -> None:
    assert_same_as_plain(lambda: Net(optimizer=optimizer))


@pytest.mark.parametrize(
    "options",
    [
        {"placement_policy": "auto"},
        full({"placement_policy": "auto", "gpu_memory_limit": "96KiB"}),
        full({"placement_policy": "cuda"}),
        full({"placement_policy": "cpu"}),
        {"placement_policy": "const", "shard_param_frac": 0.5, "offload_optim_frac": 0.5, "offload_param_frac": 0.25},
        full({"placement_policy": "static", "offload_optim_frac": 1.0}),
        full({"placement_policy": "cpu", "gpu_memory_limit": "96KiB", "prefetch": False}),
        full({"placement_policy": "cpu", "gpu_memory_limit": "96KiB", "enable_distributed_storage": False}),
        {"placement_policy": "cpu", "gpu_memory_limit": "96KiB", "use_fused_kernels": "auto", "init_step": True},
        full({"placement_policy": "cpu", "pin_memory": False, "reduce_dtype": "float32"}),
    ],
)
def test_options_change_no_number(options: dict[str, Any]) -> None:
    assert_same_as_plain(lambda: Net(optimizer="hybrid"), {**CHUNK, **options}, max_epochs=2)


def test_sanity_check_and_validation_every_n_steps() -> None:
    _, model = assert_same_as_plain(
        train=make_data, val=lambda: make_data(8, seed=2), num_sanity_val_steps=2, val_check_interval=3, max_epochs=2
    )
    assert len(model.val_losses) == 2 + 2 * 2 * 2


@pytest.mark.parametrize(
    "clip", [full({}), {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}, {"gradient_clip_val": 0.05}]
)
def test_accumulation(clip: dict[str, Any]) -> None:
    compare = assert_close_run if clip.get("gradient_clip_val") == 0.05 else assert_same_run
    assert_same_as_plain(
        lambda: Net(optimizer="hybrid"), compare=compare, accumulate_grad_batches=3, max_epochs=2, **clip
    )


def test_accumulation_that_changes_between_epochs() -> None:
    def callbacks() -> list[Any]:
        return [pl.callbacks.GradientAccumulationScheduler({0: 2, 1: 4})]

    assert_same_as_plain(callbacks=callbacks, max_epochs=2)


class SteppingNet(Net):
    """Drives its optimizer itself, so that nobody knows how many backwards come."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, *args: Any) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(*args))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("make", "options", "is_expected"),
    [
        (Net, {}, False),
        (Net, {"accumulate_grad_batches": 2}, True),
        (Net, {"callbacks": [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 4})]}, True),
        (SteppingNet, {}, False),
    ],
)
def test_the_engine_is_told_of_accumulation(make: Any, options: dict[str, Any], is_expected: bool) -> None:
    told: list[bool] = []

    class Looking(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            told.append(trainer.strategy._engine.engine.reducer.landing.accumulates)

    fit("elixir", make, **{**options, "callbacks": [*options.get("callbacks", []), Looking()]})
    assert told[0] == is_expected


@pytest.mark.parametrize(
    ("algorithm", "value", "compare"), [("norm", 0.05, assert_close_run), ("value", 0.002, assert_same_run)]
)
def test_clipping(algorithm: str, value: float, compare: Any) -> None:
    assert_same_as_plain(compare=compare, gradient_clip_val=value, gradient_clip_algorithm=algorithm, max_epochs=2)
    unclipped, clipped = (
        fit("auto", max_epochs=2)[2],
        fit("auto", max_epochs=2, gradient_clip_val=value, gradient_clip_algorithm=algorithm)[2],
    )
    assert unclipped.losses[-1] != clipped.losses[-1]


def test_shuffled_data_and_dropout_draw_the_same_numbers() -> None:
    assert_same_as_plain(train=lambda: make_data(shuffle=True), max_epochs=2)


class NormNet(Net):
    """Logs the total gradient norm."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if isinstance(self.trainer.strategy, ElixirStrategy):
            norm = self.trainer.strategy.grad_norm()
        else:
            norm = torch.cat([p.grad.flatten().double() for p in self.parameters()]).norm()  # type: ignore[union-attr]
        self.log("grad_norm", norm)


def test_gradient_norm_can_be_logged() -> None:
    _, _, expected = fit("auto", NormNet, gradient_clip_val=0.05)
    _, _, actual = fit(ElixirStrategy(**TIGHT), NormNet, gradient_clip_val=0.05)
    assert actual.metrics["grad_norm"].item() == pytest.approx(expected.metrics["grad_norm"].item(), rel=1e-6)


class PlateauNet(ScheduledNet):
    kind = "plateau"


@pytest.mark.parametrize("make_model", telling([ScheduledNet, PlateauNet], "PlateauNet"))
def test_lr_schedulers(make_model: Callable[[], Net]) -> None:
    trainer, _ = assert_same_as_plain(make_model, val=lambda: make_data(8, seed=2), max_epochs=3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == {ScheduledNet: 1e-2, PlateauNet: 1e-2 / 8}[make_model]


def test_parameter_groups() -> None:
    assert_same_as_plain(GroupsNet, max_epochs=2)


def test_overridden_hooks() -> None:
    assert_same_as_plain(OverridingNet, compare=assert_close_run, max_epochs=2)


class SkippingNet(Net):
    """Some steps return nothing."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_skipped_training_steps(accumulate: int) -> None:
    assert_same_as_plain(SkippingNet, accumulate_grad_batches=accumulate, max_epochs=2)


def test_manual_optimization() -> None:
    assert_same_as_plain(ManualNet, compare=assert_close_run, max_epochs=2)


class UnusedNet(Net):
    """A layer that takes part in every second step only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.extra = nn.Linear(32, 32)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step([self.extra(x) if batch_idx % 2 else x, y], batch_idx)


class UnlistedNet(Net):
    """The optimizer has some of the parameters that train."""

    def configure_optimizers(self) -> Any:
        return make_optimizer("adamw", self.layers[2:].parameters(), 1e-2)


@pytest.mark.parametrize(
    "make_model",
    telling([FrozenNet, TiedNet, BatchNormNet, UnusedNet, UnlistedNet], "FrozenNet", "UnusedNet"),
)
def test_models(make_model: Callable[[], Net]) -> None:
    assert_same_as_plain(make_model, val=lambda: make_data(8, seed=2), max_epochs=2)


@pytest.mark.parametrize(
    "options",
    [
        {"overfit_batches": 2, "max_epochs": 3},
        full({"limit_train_batches": 3, "limit_val_batches": 1}),
        full({"limit_train_batches": 0.5}),
        full({"detect_anomaly": True}),
        full({"inference_mode": False}),
        {"max_steps": 5, "max_epochs": -1},
        full({"fast_dev_run": 3}),
        full({"deterministic": True}),
        full({"check_val_every_n_epoch": 2, "max_epochs": 4}),
        full({"log_every_n_steps": 1, "profiler": "simple"}),
    ],
    ids=str,
)
def test_trainer_options(options: dict[str, Any]) -> None:
    assert_same_as_plain(val=lambda: make_data(8, seed=2), **options)


class Clamp(pl.Callback):
    """Writes to the parameters between steps, in several ways."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.clamp_(-0.2, 0.2)
            pl_module.layers[0].down.bias.data.mul_(0.5)
            nn.init.ones_(pl_module.layers[1].norm.weight)


def test_parameters_written_between_steps_keep_what_was_written() -> None:
    assert_same_as_plain(callbacks=lambda: [Clamp()], max_epochs=2)


class ChangedNet(Net):
    """Its layers change while it trains: one comes that no optimizer has, one goes, or shares another's weight."""

    change = "comes"

    def on_train_epoch_start(self) -> None:
        layers: Any = self.layers
        if self.current_epoch == 1 and self.change == "comes":
            seed_torch(3)
            layers.insert(2, nn.Linear(32, 32))
        elif self.current_epoch == 1 and self.change == "goes":
            del layers[1]
        elif self.current_epoch == 1:
            layers[0].up.weight = layers[2].up.weight


@pytest.mark.parametrize("change", telling(["comes", "goes", "shares"], "comes", "goes"))
def test_layers_that_change_while_training(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChangedNet, "change", change)
    assert_same_as_plain(ChangedNet, max_epochs=2)


class ScriptedNet(Net):
    """Parts are TorchScript: a layer that trains, the last of a block, a function, and a frozen teacher."""

    def _make(self) -> None:
        super()._make()
        self.extra = torch.jit.script(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32)))
        block: Any = self.layers[1]
        block.down = torch.jit.script(block.down)
        self.act = torch.jit.script(nn.GELU())
        teacher = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
        self.teacher = torch.jit.trace(teacher, torch.zeros(1, 32)).requires_grad_(False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        with torch.no_grad():
            told = self.teacher(x).softmax(1)
        outputs = self(self.act(self.extra(x)))
        return nn.functional.cross_entropy(outputs, y) + nn.functional.cross_entropy(outputs, told)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"activations": "recompute"}, full({"placement_policy": "auto"})])
def test_parts_that_are_torchscript(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning_elixir"):
        trainer, _ = assert_same_as_plain(
            ScriptedNet,
            {**TIGHT, "gpu_memory_limit": "160KiB", **options},
            val=lambda: make_data(8, seed=2),
            max_epochs=2,
        )
    assert isinstance(trainer.strategy, ElixirStrategy)
    assert len(trainer.strategy.plan.ignored) == 10
    assert "10 parameters stay on the device" in caplog.text


class AutoSummary(pl.Callback):
    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.summary = pl.utilities.model_summary.summarize(pl_module, max_depth=-1)


def test_model_summary_has_true_counts() -> None:
    summaries = []
    for strategy in ("auto", ElixirStrategy(**TIGHT)):
        callback = AutoSummary()
        fit(strategy, FrozenNet, callbacks=[callback])
        summaries.append(callback.summary)
    expected, actual = summaries
    assert actual.total_parameters == expected.total_parameters > 0
    assert actual.trainable_parameters == expected.trainable_parameters > 0
    assert [s.num_parameters for _, s in actual._layer_summary.items()] == [
        s.num_parameters for _, s in expected._layer_summary.items()
    ]


def test_two_fits_of_one_trainer_go_on_where_the_first_ended() -> None:
    def run(strategy: Any) -> Any:
        trainer, model, _ = fit(strategy, lambda: Net(optimizer="hybrid"))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, few_batches())
        return [loss.item() for loss in model.losses], trainer.strategy.lightning_module_state_dict()

    expected_losses, expected = run("auto")
    losses, state = run(ElixirStrategy(**TIGHT))
    assert losses == expected_losses
    assert len(losses) == 10
    assert all(torch.equal(state[k], expected[k]) for k in expected)


@pytest.mark.parametrize(
    "second",
    [
        full({}),
        {"chunk_size": "24KiB", "gpu_memory_limit": "128KiB"},
        {"placement_policy": "cuda", "gpu_memory_limit": None},
    ],
)
def test_a_second_trainer_takes_the_model_over(second: dict[str, Any]) -> None:
    def run(first: Any, second: Any) -> Any:
        _, model, _ = fit(first)
        pl.seed_everything(12, verbose=False)
        trainer = make_trainer(second)
        trainer.fit(model, make_data())
        return [loss.item() for loss in model.losses], trainer.strategy.lightning_module_state_dict()

    expected_losses, expected = run("auto", "auto")
    losses, state = run(ElixirStrategy(**TIGHT), ElixirStrategy(**(TIGHT | second)))
    assert losses == expected_losses
    assert all(torch.equal(state[k], expected[k]) for k in expected)


@pytest.mark.parametrize("given", [{}, {"SLURM_LOCALID": "3", "SLURM_PROCID": "5", "SLURM_NODEID": "1"}], ids=str)
def test_a_single_device_in_a_job_of_slurm(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    """It has rank 0 of one, whatever the scheduler has numbered, or has not."""
    _, _, expected = fit("auto")
    for name, value in {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "job", "SLURM_PROCID": "0", **given}.items():
        monkeypatch.setenv(name, value)
    trainer, _, actual = fit(ElixirStrategy(**TIGHT))
    assert_same_run(actual, expected)
    ranks = (trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size)
    assert ranks == (0, 0, 0, 1)


class IdleNet(Net):
    def configure_optimizers(self) -> None:
        return None


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None.")
def test_without_an_optimizer_nothing_is_trained(tmp_path: Path) -> None:
    strategy = ElixirStrategy(**TIGHT)
    trainer, _, actual = fit(strategy, IdleNet)
    plain, _, expected = fit("auto", IdleNet)
    assert_same_run(actual, expected)
    assert strategy.stats().evictions > 0
    trainer.save_checkpoint(tmp_path / "elixir.ckpt")
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    fit("auto", IdleNet, ckpt_path=str(tmp_path / "elixir.ckpt"), max_epochs=2)
    fit(ElixirStrategy(**TIGHT), IdleNet, ckpt_path=str(tmp_path / "plain.ckpt"), max_epochs=2)
