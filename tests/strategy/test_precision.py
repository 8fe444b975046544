"""One plugin for every precision that works."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from lightning_elixir import ElixirPrecision, wrapper
from lightning_elixir._lightning import pl
from lightning_elixir.errors import PlanError
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.tiers import crossed, telling
from tests.strategy import models
from tests.strategy.models import (
    CHUNK,
    TIGHT,
    LateNet,
    Net,
    assert_same_run,
    few_batches,
    make_data,
    make_optimizer,
    make_trainer,
)
from tests.strategy.nets import BatchNormNet

fit = functools.partial(models.fit, train=few_batches)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (64, "64-true"),
        ("64-true", "64-true"),
        (32, "32-true"),
        ("32-true", "32-true"),
        ("bf16", "bf16-mixed"),
        ("bf16-mixed", "bf16-mixed"),
        ("bf16-true", "bf16-true"),
    ],
)
def test_plugin_takes_the_place_of_lightnings(given: Any, name: str) -> None:
    trainer = make_trainer("elixir", precision=given)
    assert type(trainer.precision_plugin) is ElixirPrecision
    assert trainer.precision == name


@pytest.mark.parametrize("given", [16, "16", "16-mixed"])
def test_fp16_on_the_cpu_becomes_bf16(given: Any) -> None:
    with pytest.warns(UserWarning, match="Using `precision='bf16-mixed'` instead"):
        trainer = make_trainer("elixir", precision=given)
    assert trainer.precision == "bf16-mixed"


def test_names() -> None:
    assert ElixirPrecision(16).precision == "16-mixed"
    assert ElixirPrecision("bf16-true").compute_dtype is torch.bfloat16
    assert ElixirPrecision().compute_dtype is None
    assert ElixirPrecision("64-true").compute_dtype is torch.float64
    with pytest.raises(PlanError, match="precision '8-true' does not work with ElixirStrategy: choose one of 64-true"):
        ElixirPrecision("8-true")


def test_plugin_of_the_user_is_kept() -> None:
    plugin = ElixirPrecision("bf16-mixed", autocast=False)
    assert make_trainer(ElixirStrategy(precision_plugin=plugin)).precision_plugin is plugin
    assert make_trainer(ElixirStrategy(), plugins=[plugin]).precision_plugin is plugin


class WatchedNet(Net):
    """Notes the dtypes that its parts see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["input"] = x.dtype
        self.seen["parameter"] = self.layers[0].up.weight.dtype
        self.seen["linear"] = self.layers[0].up(x).dtype
        self.seen["norm"] = self.layers[0].norm(x).dtype
        self.seen["made"] = torch.zeros(1).dtype
        return super().forward(x)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        output = self(batch[0])
        self.seen["output"] = output.dtype
        return output


B, F, D = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("precision", "options", "expected", "returned"),
    [
        ("64-true", {}, (D, D, D, D, D, D), D),
        ("32-true", {}, (F, F, F, F, F, F), F),
        ("bf16-mixed", {}, (F, B, B, F, F, B), B),
        ("bf16-mixed", {"autocast": False}, (B, B, B, B, F, B), B),
        ("bf16-mixed", {"autocast": False, "force_outputs_fp32": True}, (B, B, B, B, F, B), F),
        ("bf16-true", {}, (B, B, B, B, B, B), B),
        ("bf16-true", {"force_outputs_fp32": True}, (B, B, B, B, B, B), F),
    ],
)
def test_dtypes(precision: Any, options: dict[str, Any], expected: tuple[torch.dtype, ...], returned: Any) -> None:
    model, trainer = WatchedNet(), make_trainer(ElixirStrategy(**TIGHT, **options), precision=precision)
    (output, *_) = trainer.predict(model, make_data(8))  # type: ignore[misc]
    assert tuple(model.seen[k] for k in ("input", "parameter", "linear", "norm", "made", "output")) == expected
    assert output.dtype is returned
    assert torch.get_default_dtype() is F


class HalfNet(Net):
    def configure_optimizers(self) -> Any:
        return make_optimizer("adamw", self.parameters(), 1e-2)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class LateHalfNet(HalfNet):
    is_made_in_init = False

    def configure_model(self) -> None:
        self._make()


@pytest.mark.parametrize("make_model", telling([HalfNet, LateHalfNet], "HalfNet"))
def test_true_half_precision_equals_plain_lightning(make_model: Any) -> None:
    """Initial values too: layers made in the hook are drawn in bf16, those of `__init__` are rounded."""
    expected = fit("auto", make_model, precision="bf16-true", max_epochs=2, val=lambda: make_data(8, seed=2))[2]
    actual = fit(
        ElixirStrategy(**TIGHT), make_model, precision="bf16-true", max_epochs=2, val=lambda: make_data(8, seed=2)
    )[2]
    assert_same_run(actual, expected)
    assert actual.state["layers.0.up.weight"].dtype is torch.bfloat16


class RecomputedNet(HalfNet):
    """Makes tensors in its forward, of which a part runs again in backward."""

    is_recomputed = True

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = checkpoint(self._run, layer, x, use_reentrant=False) if self.is_recomputed else self._run(layer, x)
        return self.layers[-1](x)

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(layer(x) * torch.linspace(0.5, 1.0, x.shape[-1], device=x.device))


class NotRecomputedNet(RecomputedNet):
    is_recomputed = False


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_what_runs_again_in_backward_makes_tensors_of_the_same_dtype(precision: str) -> None:
    """Under plain Lightning it does not, and torch's check of what is recomputed fails."""
    expected = fit("auto", NotRecomputedNet, precision=precision)[2]
    actual = fit(ElixirStrategy(**TIGHT), RecomputedNet, precision=precision)[2]
    assert_same_run(actual, expected)
    assert torch.get_default_dtype() is F


class DoubleNet(Net):
    """Its loss is in its own dtype."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class LateDoubleNet(DoubleNet):
    is_made_in_init = False

    def configure_model(self) -> None:
        self._make()


DOUBLE_PLACES = {
    "cpu": TIGHT,
    "auto": {**CHUNK, "gpu_memory_limit": "192KiB"},
    "cuda": {**CHUNK, "placement_policy": "cuda"},
    "nvme": {**TIGHT, "nvme_offload_fraction": 1.0, "nvme_offload_param_fraction": 1.0, "nvme_offload_dir": "states"},
}


@crossed(told=["hybrid-nvme"], optimizer=["hybrid", "adamw", "sgd"], place=DOUBLE_PLACES)
def test_double_precision_equals_plain_lightning(optimizer: str, place: str) -> None:
    if place == "nvme" and optimizer != "hybrid":
        pytest.skip("states on NVMe are HybridAdam's")

    def run(strategy: Any) -> Any:
        make = DoubleNet if optimizer == "hybrid" else LateDoubleNet
        options: dict[str, Any] = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
        return fit(
            strategy,
            lambda: make(optimizer),
            precision="64-true",
            max_epochs=2,
            accumulate_grad_batches=2,
            val=lambda: make_data(8, seed=2),
            **options,
        )[2]

    strategy = ElixirStrategy(**DOUBLE_PLACES[place])
    actual = run(strategy)
    assert_same_run(actual, run("auto"))
    assert actual.losses[0].dtype is torch.float64
    assert all(value.dtype is torch.float64 for value in actual.state.values())
    assert strategy.stats().evictions > 0 or place == "cuda"


def test_norms_and_gradients_in_double_precision_are_not_rounded() -> None:
    seen: list[tuple[Tensor, ...]] = []

    class Looking(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if trainer.strategy.strategy_name == "elixir":
                grads = list(trainer.strategy.full_grads().values())
                norms = (trainer.strategy.grad_norm(), optimizer.clip_grad_norm_(1e-3))
            else:
                grads = [p.grad.clone() for p in module.parameters()]
                norms = (torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3),) * 2
            seen.append((*norms, *grads))

    for strategy in (ElixirStrategy(**TIGHT), "auto"):
        fit(strategy, DoubleNet, precision="64-true", callbacks=[Looking()])
    half = len(seen) // 2
    assert half == 5
    for actual, expected in zip(seen[:half], seen[half:], strict=True):
        assert all(value.dtype is torch.float64 for value in actual)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)  # summed in another order


def _mixed_oracle(autocast: bool, num_epochs: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    """Plain PyTorch under the same scheme: the model cast (norms only without autocast), and fp32 masters fed with its
    gradients."""
    pl.seed_everything(11, verbose=False)
    model = Net()
    masters = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.01, foreach=False)
    for name, parameter in model.named_parameters():
        if not (autocast and "norm" in name):
            parameter.data = parameter.data.bfloat16()
    losses = []
    for _ in range(num_epochs):
        for x, y in few_batches():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
                loss = nn.functional.cross_entropy(model(x if autocast else x.bfloat16()).float(), y)
            loss.backward()
            losses.append(loss.item())
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad.float()  # type: ignore[union-attr]
                parameter.grad = None
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
    return losses, dict(zip((n for n, _ in model.named_parameters()), masters, strict=True))


@crossed(told=["Net-True", "LateNet-False"], model=[Net, LateNet], autocast=[True, False])
def test_mixed_precision_equals_plain_pytorch(autocast: bool, model: Any) -> None:
    losses, masters = _mixed_oracle(autocast)
    strategy = ElixirStrategy(**(TIGHT | {"chunk_size": "8KiB", "gpu_memory_limit": "64KiB"}), autocast=autocast)
    _, _, actual = fit(strategy, model, precision="bf16-mixed", max_epochs=2)
    assert [loss.item() for loss in actual.losses] == losses
    assert all(torch.equal(actual.state[name], master) for name, master in masters.items())
    assert strategy.stats().evictions > 0


@pytest.mark.parametrize(
    ("precision", "autocast", "dtypes"),
    [("bf16-mixed", True, (F, F, F)), ("bf16-mixed", False, (F, F, B)), ("bf16-true", True, (B, B, B))],
)
def test_buffers_and_norms(precision: Any, autocast: bool, dtypes: Any) -> None:
    _, model, run = fit(ElixirStrategy(**TIGHT, autocast=autocast), BatchNormNet, precision=precision)
    norm = model.layers[1].norm
    assert (norm.running_mean.dtype, norm.weight.dtype, model.layers[0].norm.weight.dtype) == dtypes
    assert run.state["layers.1.norm.running_mean"].dtype is dtypes[0]
    assert norm.num_batches_tracked == 5


class Reseed(pl.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            torch.manual_seed(trainer.current_epoch)


@pytest.mark.parametrize("precision", telling(["bf16-mixed", "bf16-true", "64-true"], "bf16-true", "64-true"))
def test_resumes_bit_for_bit(tmp_path: Any, precision: Any) -> None:
    """In fp64 too, though layers are made in fp32, and plain Lightning loads them before it casts them."""

    def run(max_epochs: int, path: str | None = None) -> Any:
        return fit(
            ElixirStrategy(**TIGHT),
            Net,
            precision=precision,
            max_epochs=max_epochs,
            callbacks=[Reseed()],
            ckpt_path=path,
        )

    trainer, _, first = run(1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    _, _, second = run(2, str(tmp_path / "one.ckpt"))
    _, _, whole = run(2)
    assert [*first.losses, *second.losses] == whole.losses
    assert all(torch.equal(second.state[name], value) for name, value in whole.state.items())


class BornHalfNet(Net):
    """Made in 16 bits, as many models come from the hub; steps of its optimizer are smaller than those differ by."""

    def __init__(self) -> None:
        super().__init__("hybrid", 1e-6)
        self.layers.bfloat16()
        self.mean = MeanMetric()


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_checkpoints_have_all_bits_of_what_was_trained_whatever_the_model_was_made_in(
    tmp_path: Path, kind: Any
) -> None:
    def run(max_epochs: int, path: Path | None = None) -> Any:
        strategy = ElixirStrategy(**TIGHT, state_dict_type=kind)
        options: dict[str, Any] = {"max_epochs": max_epochs, "callbacks": [Reseed()]}
        trainer, model, _ = fit(
            strategy, BornHalfNet, precision="bf16-mixed", ckpt_path=None if path is None else str(path), **options
        )
        trainer.save_checkpoint(tmp_path / str(max_epochs))
        return model.state_dict()

    run(1)
    resumed, whole = run(2, tmp_path / "1"), run(2)
    assert all(value.dtype is torch.float32 for value in whole.values())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in whole.values())
    assert [name for name, value in whole.items() if not torch.equal(resumed[name], value)] == []


class ScaledNet(Net):
    """Computes the same as plain autocast, bit by bit; keeps the loss scales."""

    def _make(self) -> None:
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
        self.scales: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        plugin: Any = self.trainer.precision_plugin
        mine = plugin._optimizer.scaler.scale if isinstance(plugin, ElixirPrecision) else plugin.scaler.get_scale()
        self.scales.append(mine)


def test_a_second_fit_goes_on_with_the_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: fp16 is let through to the CPU."""
    check, meta = wrapper._check, torch.device("meta")
    monkeypatch.setattr(wrapper, "_check", lambda plan, dtype, given, size, _: check(plan, dtype, given, size, meta))
    monkeypatch.setattr(ElixirPrecision, "check_device", lambda self, device: setattr(self, "device_type", device))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=7)
    scaling = {"initial_scale": 2.0**20, "growth_interval": 7}
    ends = []
    for strategy, plugin in (
        ("auto", pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)),
        (ElixirStrategy(**CHUNK, placement_policy="cpu", **scaling), ElixirPrecision("16-mixed")),
    ):
        trainer, model, _ = fit(strategy, lambda: ScaledNet(optimizer="sgd"), plugins=[plugin])
        trainer.fit_loop.max_epochs = 3
        trainer.fit(model, few_batches())
        ends.append((model.scales, models.collect(trainer, model)))  # type: ignore[attr-defined]
    assert ends[1][0] == ends[0][0]
    assert ends[0][0][0] < 2.0**20  # the first steps are skipped
    assert_same_run(ends[1][1], ends[0][1])


class ParameterlessPrecision(pl.plugins.Precision):
    """A user's own plugin, which would be lost without a word."""


@pytest.mark.parametrize("plugin", [ParameterlessPrecision()])
def test_other_plugins_are_refused(plugin: Any) -> None:
    with pytest.raises(PlanError, match=f"{type(plugin).__name__} .* does not work with ElixirStrategy"):
        make_trainer(ElixirStrategy(), plugins=[plugin])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_host_memory_is_within_the_plan_where_states_alone_are_there(precision: str) -> None:
    """In fp32 as well the host then has a copy of the parameters to update."""
    strategy = ElixirStrategy(placement_policy="const", offload_optim_frac=1.0, **CHUNK)
    fit(strategy, precision=precision)
    held = {kind: nbytes for kind, nbytes in strategy.stats().held_bytes.items() if kind.startswith("cpu_")}
    assert held["cpu_master"] > 0
    assert sum(held.values()) <= strategy.plan.notes["host_bytes"]  # padding has no states
