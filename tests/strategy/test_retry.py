"""A step that runs out of device memory is run once more, with the same result; or the error says what to do."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_elixir.errors import CapacityError
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.strategy.warm_up import WarmUp
from tests.helpers.dist import RankError, run_ranks
from tests.helpers.metered import MeteredCpuDevice, use_metered_device
from tests.helpers.tiers import crossed, full, telling
from tests.strategy.models import CHUNK, TIGHT, WIDTH, Net, assert_same_run, assert_same_state, fit, make_data
from tests.strategy.nets import MESSAGE, TightNet


def _fit_tight(phase: str, batches: tuple[int, ...], make: Any = TightNet, **options: Any) -> Any:
    """Train with and without shortages."""
    expected = fit(ElixirStrategy(**TIGHT), make, **options)[2]
    trainer, model, actual = fit(ElixirStrategy(**TIGHT), lambda: make(phase, batches), **options)
    assert model.shortage.left == []
    assert "train_loss_epoch" in actual.metrics
    assert_same_run(actual, expected)
    return trainer, model


@crossed(told=["backward-(2, 5)"], phase=["forward", "backward"], batches=[(0,), (2, 5)])
def test_a_repeated_step_gives_the_same_bits(phase: str, batches: tuple[int, ...], caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "lightning_elixir"):
        _fit_tight(phase, batches)
    told = [r.getMessage() for r in caplog.records if "ran out of memory" in r.getMessage()]
    assert len(told) == len(batches)
    assert f"in {phase} (CUDA out of memory. Tried to allocate 2.00 GiB)" in told[0]
    assert "lower gpu_memory_limit" in told[0]


@pytest.mark.parametrize("phase", telling(["forward", "backward"], "backward"))
def test_mixed_precision_and_clipping(phase: str) -> None:
    def make(*args: Any) -> TightNet:
        return TightNet(*args, optimizer="hybrid")

    _fit_tight(phase, (2,), make, precision="bf16-mixed", gradient_clip_val=0.5)


class TalkativeNet(TightNet):
    """Logs before memory runs out as well, in one batch for the first time."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.log("first", batch[0].mean(), on_step=False, on_epoch=True)
        if batch_idx >= 2:
            self.log("sum", batch[0].sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("phase", [full("forward"), "backward"])
def test_logged_values_are_counted_once(phase: str) -> None:
    trainer, _ = _fit_tight(phase, (2, 5), TalkativeNet)
    total = sum(batch[0].sum() for i, batch in enumerate(make_data()) if i >= 2)
    assert trainer.callback_metrics["sum"].item() == pytest.approx(float(total), rel=1e-5)


class TightBatchNormNet(TightNet):
    """Running statistics before and after the place where memory runs out."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.layers[1].norm = nn.BatchNorm1d(WIDTH)
        self.layers[3].norm = nn.BatchNorm1d(WIDTH)


@pytest.mark.parametrize("phase", telling(["forward", "backward"], "forward"))
def test_running_statistics_see_a_batch_once(phase: str) -> None:
    _, model = _fit_tight(phase, (0, 3), TightBatchNormNet)
    assert model.layers[1].norm.num_batches_tracked.item() == 8


class TightNoisyNet(TightNet):
    """Draws from a generator of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.noise = torch.Generator().manual_seed(4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        noisy = batch[0] + 0.1 * torch.rand(batch[0].shape, generator=self.noise)
        return super().training_step([noisy, *batch[1:]], batch_idx)


@pytest.mark.parametrize("phase", telling(["forward", "backward"], "backward"))
def test_generators_of_modules_are_drawn_from_once(phase: str) -> None:
    _fit_tight(phase, (0, 3), TightNoisyNet)


@crossed(told=["backward-(3, 3)"], phase=["forward", "backward"], batches=[(0, 0), (3, 3)])
def test_a_second_failure_is_an_error_with_a_cure(phase: str, batches: tuple[int, ...]) -> None:
    with pytest.raises(CapacityError, match=f"in {phase} again .*lower gpu_memory_limit") as caught:
        fit(ElixirStrategy(**TIGHT), lambda: TightNet(phase, batches))
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    ("activations", "words"),
    [
        (None, "recompute activations (activations='recompute') unless the model does so already, "),
        full({"layers.[01]": "recompute", "layers.2": "keep"}, "recompute activations (activations='recompute'), "),
        full("recompute", "recompute blocks from inputs in host memory (activations='recompute_offloaded'), "),
        full("offload", "recompute blocks from inputs in host memory (activations='recompute_offloaded'), "),
        full("recompute_offloaded", ""),
    ],
)
def test_the_cure_is_not_what_is_done_already(activations: Any, words: str) -> None:
    with pytest.raises(CapacityError) as caught:
        fit(ElixirStrategy(**TIGHT, activations=activations), lambda: TightNet("forward", (0, 0)))
    assert str(caught.value).endswith(
        "lower gpu_memory_limit, so that the plan leaves more to activations, take a smaller batch or shorter"
        f" sequences, {words}give use_fused_kernels=True if this is a language model of transformers, or use a GPU"
        " with more memory"
    )


@pytest.mark.full
def test_the_cure_names_no_operators_that_are_fused() -> None:
    options: dict[str, Any] = {**TIGHT, "use_fused_kernels": "auto", "activations": "recompute"}
    with pytest.raises(CapacityError, match="recompute_offloaded'\\), or use a GPU") as caught:
        fit(ElixirStrategy(**options), lambda: TightNet("forward", (0, 0)))
    assert "fused" not in str(caught.value)


@pytest.mark.full
def test_evaluation_has_nothing_to_recompute() -> None:
    class Short(TightNet):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            raise torch.OutOfMemoryError(MESSAGE)

    with pytest.raises(CapacityError, match="smaller batch or shorter sequences, give use_fused_kernels=True"):
        fit(ElixirStrategy(**TIGHT), lambda: Short("forward", ()), val=lambda: make_data(8))


class TwicePhaseNet(TightNet):
    """Memory runs out in forward, and in the second run in backward."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.shortage.phase = "backward"
        return self.shortage(out)


def test_a_step_is_repeated_only_once() -> None:
    with pytest.raises(CapacityError, match="in backward again"):
        fit(ElixirStrategy(**TIGHT), lambda: TwicePhaseNet("forward", (1, 1)))


class EarlyNet(TightNet):
    """Memory runs out before any gradient is complete."""

    def forward(self, x: Tensor) -> Tensor:
        return self.shortage(self.layers(x))


@pytest.mark.parametrize(
    ("make", "phase", "batch"),
    [
        full(TightNet, "forward", 3),
        full(TightNet, "forward", 4),
        full(TightNet, "backward", 3),
        (EarlyNet, "backward", 4),
    ],
)
def test_accumulated_gradients_are_kept(make: Any, phase: str, batch: int) -> None:
    """Batches 3 and 4 are the first and the second of their step."""
    _fit_tight(phase, (batch,), make, accumulate_grad_batches=3)


def test_accumulated_gradients_that_are_lost_are_missed() -> None:
    with pytest.raises(CapacityError, match="gradients of earlier micro-batches .* lower gpu_memory_limit"):
        fit(ElixirStrategy(**TIGHT), lambda: TightNet("backward", (4,)), accumulate_grad_batches=3)


class BufferNet(TightNet):
    """Changes a buffer of its own in forward."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("count", torch.zeros(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.count += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_buffers_that_the_model_changes_rule_a_second_run_out(phase: str) -> None:
    with pytest.raises(CapacityError, match=r"buffers of the model already \(count\)"):
        fit(ElixirStrategy(**TIGHT), lambda: BufferNet(phase, (2,)))


class IteratorNet(TightNet):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:  # type: ignore[override]
        batch, self.shortage.batch_idx, _ = next(dataloader_iter)
        return self.loss(batch)


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
def test_batches_from_an_iterator_cannot_be_repeated() -> None:
    with pytest.raises(CapacityError, match="takes its batches from an iterator"):
        fit(ElixirStrategy(**TIGHT), lambda: IteratorNet("forward", (2,)))


class MetricNet(TightNet):
    """Counts by itself."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.mean = MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        return {"loss": loss, "logits": loss * 2}


@pytest.mark.parametrize("phase", telling(["forward", "backward"], "forward"))
def test_metrics_that_have_seen_the_batch_are_named(phase: str, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "lightning_elixir"):
        _, model = _fit_tight(phase, (2,), MetricNet)
    assert ("MeanMetric will have seen the batch twice" in caplog.text) == (phase == "backward")
    assert model.mean.update_count == (9 if phase == "backward" else 8)


class WatchedNet(TightNet):
    """Tells whether activations of a failed run are alive when the second one starts."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.runs: list[weakref.ref[Tensor]] = []
        self.num_alive: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.num_alive.append(sum(run() is not None for run in self.runs))
        x = torch.sigmoid(x.requires_grad_())  # saved for backward
        self.runs.append(weakref.ref(x.untyped_storage()))  # type: ignore[arg-type]
        return super().forward(x)


@pytest.mark.parametrize("phase", telling(["forward", "backward"], "backward"))
def test_activations_of_the_failed_run_are_gone(phase: str) -> None:
    gc.disable()
    try:
        _, model = _fit_tight(phase, (2,), WatchedNet)
    finally:
        gc.enable()
    assert len(model.num_alive) == 9
    assert max(model.num_alive) == 0


class MeteredNet(Net):
    """Forward and backward run on a metered device."""

    def __init__(self, meter: MeteredCpuDevice | None = None) -> None:
        super().__init__()
        object.__setattr__(self, "meter", meter)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        assert len(batch[0].nonzero())  # no dry run: it would tell what a GPU takes, not this device
        with self._counting():
            loss = self.loss(batch)
        self.losses[batch_idx:] = [loss.detach().clone()]
        return loss

    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        with self._counting():
            loss.backward()

    def _counting(self) -> Any:
        return self.meter.counting() if self.meter is not None else nullcontext()


def _uneven_data() -> Any:
    """Batches of 16 samples; after five steps one of 100, and later one of 130."""
    generator = torch.Generator().manual_seed(0)
    sizes = [16] * 5 + [100] + [16] * 3 + [130, 16, 16]
    batches = [
        (torch.randn(n, WIDTH, generator=generator), torch.randint(0, 4, (n,), generator=generator)) for n in sizes
    ]
    return DataLoader(batches, batch_size=None)


@pytest.mark.full  # a long run
def test_batches_that_outgrow_the_plan(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Whether it is foreseen that memory will not do, or noticed when it is short, training goes on."""
    expected = fit(ElixirStrategy(**CHUNK), MeteredNet, train=_uneven_data)[2]
    with caplog.at_level(logging.WARNING, "lightning_elixir"):
        for limit in (440_000, 460_000, 490_000, 510_000):
            meter = use_metered_device(monkeypatch, limit)
            strategy = ElixirStrategy(**CHUNK, gpu_memory_limit=limit)
            _, _, run = fit(strategy, partial(MeteredNet, meter), train=_uneven_data)
            assert [x.item() for x in run.losses] == [x.item() for x in expected.losses]
            assert_same_state(run.state, expected.state)
            assert meter.peak_bytes() <= limit
    assert "more than the plan leaves" in caplog.text
    assert "ran out of memory in backward" in caplog.text


def _even_data() -> Any:
    """As many samples in each of 14 batches."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(16, WIDTH, generator=generator), torch.randint(0, 4, (16,), generator=generator))
        for _ in range(14)
    ]
    return DataLoader(batches, batch_size=None)


def test_a_plan_under_which_memory_runs_out_goes(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """The device gives less than it says, as one does whose allocator has gaps: plans leave more from time to time."""
    expected = fit(ElixirStrategy(**CHUNK), MeteredNet, train=_even_data)[2]
    meter = use_metered_device(monkeypatch, 180_000)
    with caplog.at_level(logging.INFO, "lightning_elixir"):
        strategy = ElixirStrategy(**CHUNK, gpu_memory_limit=500_000)
        _, _, run = fit(strategy, partial(MeteredNet, meter), train=_even_data)
    told = [record.getMessage() for record in caplog.records]
    assert any("everything on the GPU" in message for message in told)
    assert 2 <= sum("ran out of memory" in message for message in told) <= 5
    assert not strategy.plan.is_all_resident
    assert [x.item() for x in run.losses] == [x.item() for x in expected.losses]
    assert_same_state(run.state, expected.state)


class LateNet(TightNet):
    """Memory runs out in backward when most gradients are there."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1:](self.shortage(self.layers[0](x)))


def test_a_plan_goes_after_the_step_whose_updates_have_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    asked: list[bool] = []

    def make_room(engine: Engine) -> bool:
        begun.append(bool(engine.reducer.begun))
        return False

    def leave_more(warm_up: WarmUp) -> bool:
        asked.append(bool(warm_up._engine.reducer.used))
        return True

    monkeypatch.setattr(Engine, "make_room", make_room)
    monkeypatch.setattr(WarmUp, "leave_more", leave_more)
    strategy = ElixirStrategy(**TIGHT, update_timing="inside_backward")
    fit(strategy, lambda: LateNet("backward", (5,), optimizer="hybrid"), precision="bf16-mixed")
    assert begun == [True]
    assert asked == [False]


def test_other_errors_pass() -> None:
    class Wrong(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        fit(ElixirStrategy(**TIGHT), Wrong)


class TightOnOneRank(TightNet):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if self.global_rank == 0:
            self.shortage.left = []
        return super().training_step(batch, batch_idx)


def _rank(phase: str) -> None:
    fit(ElixirStrategy(**TIGHT), lambda: TightOnOneRank(phase, (2,)), devices=2)


@pytest.mark.parametrize("phase", [full("forward"), "backward"])
def test_on_several_ranks_the_error_names_the_cure(phase: str) -> None:
    with pytest.raises(RankError, match="rank 1 ran out of device memory .* lower gpu_memory_limit"):
        run_ranks(_rank, 2, phase, init_group=False, timeout_s=60.0)


class ValidatedNet(Net):
    """Runs out of memory in a validation batch, once or always."""

    def __init__(self, num_failures: int = 0) -> None:
        super().__init__()
        self.num_failures = num_failures

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().validation_step(batch, batch_idx)
        if batch_idx == 1 and self.num_failures:
            self.num_failures -= 1
            raise torch.OutOfMemoryError(MESSAGE)
        return loss


def test_a_validation_batch_is_run_again() -> None:
    expected = fit(ElixirStrategy(**TIGHT), ValidatedNet, val=lambda: make_data(seed=3))[2]
    _, model, actual = fit(ElixirStrategy(**TIGHT), lambda: ValidatedNet(1), val=lambda: make_data(seed=3))
    assert model.num_failures == 0
    assert actual.metrics["val_loss"] == expected.metrics["val_loss"]
    assert_same_state(actual.state, expected.state)


@pytest.mark.full
def test_a_validation_batch_that_never_fits_is_refused() -> None:
    with pytest.raises(CapacityError, match="ran out of memory"):
        fit(ElixirStrategy(**TIGHT), lambda: ValidatedNet(100), val=lambda: make_data(seed=3))
