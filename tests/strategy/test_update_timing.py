"""The Trainer decides when updates may run; no number depends on it."""

from __future__ import annotations

import itertools
import json
import logging
import math
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_elixir._lightning import Callback, Trainer
from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.plan.hardware import HardwareSpec, save_hardware
from lightning_elixir.plan.io import load_plan
from lightning_elixir.plan.types import Plan, UpdateTiming
from lightning_elixir.stepping import speculation
from lightning_elixir.strategy import ElixirStrategy, shared_plans, steady_look
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import full, telling
from tests.helpers.update_timing import slow_updates
from tests.strategy.models import TIGHT, Net, assert_same_run, fit, make_data
from tests.strategy.nets import TightNet

BF16 = {"precision": "bf16-mixed"}


class HybridNet(Net):
    """Notes how many updates have begun when backward is over."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"optimizer": "hybrid", **options})
        self.begun: list[int] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:  # of the batch; backward comes later
        reducer = self.trainer.strategy.model.engine.reducer  # type: ignore[union-attr]
        if "flush" in vars(reducer):
            return
        flush = reducer.flush

        def noted(*args: Any) -> None:
            flush(*args)
            self.begun.append(len(reducer.begun))

        reducer.flush = noted


class Looking(Callback):
    """Somebody who sees gradients."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        self.norms.append(float(trainer.strategy.grad_norm()))  # type: ignore[attr-defined]


def num_with_master(trainer: Trainer) -> int:
    """On the CPU, norms are fp32: their parameters are updated in place, and so not before the step."""
    count = sum(c.dtype == "bfloat16" for c in trainer.strategy.plan.chunks)  # type: ignore[attr-defined]
    assert 0 < count < len(trainer.strategy.plan.chunks)  # type: ignore[attr-defined]
    return count


def strategy(timing: str = "auto") -> ElixirStrategy:
    return ElixirStrategy(**TIGHT, update_timing=timing)  # type: ignore[arg-type]


def test_updates_begin_inside_backward_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, expected = fit(strategy("after_backward"), HybridNet, **BF16)
    assert set(model.begun) == {0}
    with slow_updates(monkeypatch):
        trainer, model, actual = fit(strategy(), HybridNet, **BF16)
    assert_same_run(actual, expected)
    assert trainer.strategy.plan.update_timing is UpdateTiming.INSIDE_BACKWARD
    assert model.begun == [0] + [num_with_master(trainer)] * 7  # the first step makes the states
    with slow_updates(monkeypatch):
        trainer, model, actual = fit(strategy("behind_forward"), HybridNet, **BF16)
    assert_same_run(actual, expected)
    assert set(model.begun) == {0}


class OverriddenNet(HybridNet):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class SteppingNet(HybridNet):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


@pytest.mark.full  # combinations
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (HybridNet, {"gradient_clip_val": 0.5, **BF16}),
        (HybridNet, {"callbacks": True, **BF16}),
        (HybridNet, {"accumulate_grad_batches": 2, **BF16}),
        (HybridNet, {}),  # the parameters themselves are updated
        (OverriddenNet, BF16),
        (SteppingNet, BF16),
        (lambda: HybridNet(optimizer="adamw"), BF16),
    ],
)
def test_updates_wait_for_the_step_where_somebody_may_look(
    make: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(timing: str) -> Any:
        looking = Looking()
        callbacks = {"callbacks": [looking]} if "callbacks" in options else {}
        return (*fit(strategy(timing), make, **{**options, **callbacks})[1:], looking.norms)

    _, expected, expected_norms = run("after_backward")
    with slow_updates(monkeypatch, 0.001):
        model, actual, norms = run("auto")
    assert_same_run(actual, expected)
    assert norms == expected_norms
    assert set(model.begun) == {0}


class AheadNet(HybridNet):
    """Notes how many updates can be taken back when backward is over."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.begun.append(optimizer.num_ahead)


@pytest.mark.parametrize(("limit", "redone"), [full(1e3, 0), (1e-3, 3)], ids=["never clipped", "always clipped"])
def test_updates_that_can_be_taken_back_begin_under_clipping(
    limit: float, redone: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Whatever hooks look, and in the first steps that have states."""

    def run(timing: str) -> Any:
        looking = Looking()
        trainer, model, seen = fit(
            strategy(timing),
            AheadNet,
            gradient_clip_val=limit,
            callbacks=[looking],
            train=lambda: make_data(64),
            **BF16,
        )
        return trainer, model, seen, looking.norms

    _, _, expected, norms = run("after_backward")
    with slow_updates(monkeypatch, 0.001):
        trainer, model, actual, actual_norms = run("auto")
    assert_same_run(actual, expected)
    assert actual_norms == norms
    assert trainer.strategy.plan.has_spare_states
    assert "into spare states" in trainer.strategy.plan.explain()
    num_chunks = num_with_master(trainer)
    num_tried = len(norms) - 1 if redone == 0 else 2  # the first step, which had nothing to try, was clipped as well
    assert [n for n in model.begun if n] == [num_chunks] * num_tried
    assert trainer.strategy.stats().redone_steps == (0 if redone == 0 else num_tried)


class SparedNet(HybridNet):
    """Notes how many chunks have spare states when forward, backward and step are over."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[int] = []

    def _note(self) -> None:
        engine: Any = self.trainer.strategy.model.engine
        self.seen.append(sum(engine.store[chunk.id].spare_master is not None for chunk in engine.chunks))

    def on_before_backward(self, loss: Any) -> None:
        self._note()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._note()

    def on_train_batch_end(self, *args: Any) -> None:
        self._note()


def test_the_first_backward_is_what_spare_states_are_made_beside() -> None:
    """It has no use for them, and their memory takes long to make."""
    trainer, model, _ = fit(strategy("auto"), SparedNet, gradient_clip_val=1e3, **BF16)
    count = num_with_master(trainer)
    assert model.seen == [0, *[count] * (len(model.seen) - 1)]
    assert not any("elixir-memory" in thread.name for thread in threading.enumerate())
    trainer.fit_loop.max_epochs += 1
    model.seen.clear()
    trainer.fit(model, make_data())
    assert set(model.seen) == {count}


@pytest.mark.parametrize("limit", [full(1e3), 5.0], ids=["never clipped", "sometimes clipped"])
def test_a_host_with_room_for_some_spare_states(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(timing: str, **options: Any) -> Any:
        made = ElixirStrategy(**TIGHT, update_timing=timing, **options)  # type: ignore[arg-type]
        return fit(made, AheadNet, gradient_clip_val=limit, **BF16)

    every, _, _ = run("auto")
    notes, most = every.strategy.plan.notes, num_with_master(every)
    assert sum(c.has_spare_states for c in every.strategy.plan.chunks) == most
    room = int(notes["host_bytes"]) - int(notes["host_spare_bytes"]) // 2
    _, _, expected = run("after_backward")
    with slow_updates(monkeypatch, 0.001):
        trainer, model, actual = run("auto", cpu_memory_limit=room)
    assert_same_run(actual, expected)
    plan = trainer.strategy.plan
    count = sum(c.has_spare_states for c in plan.chunks)
    assert 0 < count < most
    assert f"into spare states for {count} of {len(plan.chunks)} chunks" in plan.explain()
    assert {n for n in model.begun if n} == {count}
    redone, tried = trainer.strategy.stats().redone_steps, sum(map(bool, model.begun))
    assert (redone == 0) if limit == 1e3 else (0 < redone < tried)
    assert int(plan.notes["host_bytes"]) <= room


def test_no_spare_states_where_the_host_has_no_room_or_gradients_are_clamped() -> None:
    for options in ({"gradient_clip_algorithm": "value"}, {"accumulate_grad_batches": 2}):
        trainer, _, _ = fit(strategy(), HybridNet, gradient_clip_val=1e3, **options, **BF16)
        assert not trainer.strategy.plan.has_spare_states
    for timing in ("behind_forward", "after_backward"):
        trainer, _, _ = fit(strategy(timing), HybridNet, gradient_clip_val=1e3, **BF16)
        assert not trainer.strategy.plan.has_spare_states


def test_an_error_between_backward_and_step_leaves_what_can_be_saved(tmp_path: Any) -> None:
    class Failing(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                assert trainer.strategy.optimizers[0].num_ahead > 0  # type: ignore[attr-defined]
                raise ValueError("enough")

        def on_exception(self, trainer: Trainer, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / "whole.ckpt")

    with pytest.raises(ValueError, match="enough"):
        fit(strategy(), HybridNet, gradient_clip_val=1e3, callbacks=[Failing()], **BF16)
    _, _, expected = fit(strategy("after_backward"), HybridNet, gradient_clip_val=1e3, max_steps=3, **BF16)
    saved = torch.load(tmp_path / "whole.ckpt", weights_only=False)["state_dict"]
    assert [k for k, v in expected.state.items() if not torch.equal(saved[k], v)] == []


def test_updates_that_never_begin_before_the_step_are_said_to_run_once(caplog: pytest.LogCaptureFixture) -> None:
    """Though every step is clipped."""
    caplog.set_level("INFO", "lightning_elixir")
    strategy = ElixirStrategy(gpu_memory_limit="96KiB", update_timing="behind_forward")
    fit(strategy, HybridNet, gradient_clip_val=1e-3, train=lambda: make_data(32), **BF16)
    assert not strategy.plan.has_spare_states
    assert "the plan from now on" in caplog.text
    assert "updates twice" not in caplog.text


@pytest.mark.full
def test_the_forecast_tells_of_steps_that_wait_for_the_norm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As long as they do."""

    class Reader(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            plan = trainer.strategy.plan
            told.append((plan.fingerprint(), plan.forecast.binding.startswith("the norm"), plan.forecast.times.total_s))

    told: list[tuple[str, bool, float]] = []
    save_hardware(replace(HardwareSpec.nominal(), cpu_adam_numel_per_s=1e6), tmp_path / "slow.json")
    monkeypatch.setattr(speculation, "_STEPS_OFF", 4)
    monkeypatch.setattr(shared_plans, "LEAST_GAIN", 1.0)  # no move, whatever this machine takes for a step
    monkeypatch.setattr(steady_look, "_NUM_STEPS", 1000)  # and no news of that
    with slow_updates(monkeypatch, 0.001):
        fit(
            ElixirStrategy(gpu_memory_limit="96KiB", hardware=tmp_path / "slow.json"),
            AheadNet,
            gradient_clip_val=1e-3,
            callbacks=[Reader()],
            train=lambda: make_data(64),
            **BF16,
        )
    settled = told[2:]
    assert [waits for waits, _ in itertools.groupby(waits for _, waits, _ in settled)] == [True, False] * 2
    assert len({fingerprint for fingerprint, *_ in settled}) == 1
    usual, waiting = ({total_s for _, waits, total_s in settled if waits is which} for which in (False, True))
    assert len(usual) == len(waiting) == 1  # which is longer depends on how much computing there is to hide behind


@pytest.mark.full
def test_after_the_fit_the_plan_and_the_report_go_on_to_tell_of_steps_that_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Reader(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            told.append(trainer.strategy.plan)

    told: list[Plan] = []
    save_hardware(replace(HardwareSpec.nominal(), cpu_adam_numel_per_s=1e6), tmp_path / "slow.json")
    monkeypatch.setattr(shared_plans, "LEAST_GAIN", 1.0)
    kept = ElixirStrategy(gpu_memory_limit="96KiB", hardware=tmp_path / "slow.json", report_dir=str(tmp_path / "r"))
    clipped = {"gradient_clip_val": 1e-3, "train": lambda: make_data(48), **BF16}
    with slow_updates(monkeypatch, 0.001):
        trainer, module, _ = fit(kept, AheadNet, callbacks=[Reader()], **clipped)
    last = told[-1].forecast
    assert last is not None
    assert last.binding.startswith("the norm")
    assert kept.plan.forecast == last != kept._engine.plan.forecast
    predicted = json.loads((tmp_path / "r" / "report.json").read_text())["predicted"]
    assert predicted["times"] == asdict(last.times) | {"host_update_s": predicted["times"]["host_update_s"]}
    assert (predicted["step_s"], predicted["binding"]) == (last.times.total_s, last.binding)
    assert load_plan(tmp_path / "r" / "plan.json").forecast == last
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, make_data(4))  # one step, which does not wait
    assert kept.plan.forecast is not None
    assert not kept.plan.forecast.binding.startswith("the norm")


class WithdrawingNet(AheadNet):
    """On one rank, updates that have begun are taken back before each step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_rank == 1:
            self.trainer.strategy._engine.engine.reducer.withdraw()


def _one_rank_waits(machine: str) -> list[bool]:
    told: list[bool] = []

    class Reader(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            told.append(trainer.strategy.plan.forecast.binding.startswith("the norm"))

    with pytest.MonkeyPatch.context() as patch, slow_updates(patch, 0.001):
        fit(
            ElixirStrategy(gpu_memory_limit="96KiB", hardware=machine),
            WithdrawingNet,
            gradient_clip_val=1e3,
            callbacks=[Reader()],
            train=lambda: make_data(64),
            devices=2,
            **BF16,
        )
    return told


@pytest.mark.full
def test_one_rank_alone_may_wait_for_norms(tmp_path: Path) -> None:
    """What it does is its own matter, and so is its forecast: the others go on as they are."""
    machine = tmp_path / "slow.json"
    save_hardware(replace(HardwareSpec.nominal(), cpu_adam_numel_per_s=1e6, world_size=2), machine)
    told = run_ranks(_one_rank_waits, 2, str(machine), init_group=False)
    assert [any(one) for one in told] == [False, True]


def test_the_monitor_does_not_count_as_somebody(tmp_path: Any) -> None:
    trainer, model, _ = fit(strategy(), HybridNet, logger=True, default_root_dir=tmp_path, log_every_n_steps=1, **BF16)
    assert trainer.strategy.plan.update_timing is UpdateTiming.INSIDE_BACKWARD
    assert max(model.begun) == num_with_master(trainer)


@pytest.mark.full
@pytest.mark.parametrize("phase", [full("forward"), "backward"])
def test_a_repeated_step_begins_updates_again_that_can_be_taken_back(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*batches: int) -> TightNet:
        return TightNet(phase, batches, optimizer="hybrid")

    expected = fit(strategy("after_backward"), make, gradient_clip_val=1e3, **BF16)[2]
    with slow_updates(monkeypatch):
        trainer, model, actual = fit(strategy(), lambda: make(2, 5), gradient_clip_val=1e3, **BF16)
    assert model.shortage.left == []
    assert trainer.strategy.plan.has_spare_states
    assert_same_run(actual, expected)
    assert trainer.strategy.stats().redone_steps == (2 if phase == "backward" else 0)


@pytest.mark.parametrize("phase", telling(["forward", "backward"], "forward"))
def test_a_repeated_step_takes_up_the_updates_that_have_begun(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those chunks' gradients are not used twice, and nobody else's are lost."""

    def make(*batches: int) -> TightNet:
        return TightNet(phase, batches, optimizer="hybrid")

    expected = fit(strategy("after_backward"), make, **BF16)[2]
    with slow_updates(monkeypatch):
        trainer, model, actual = fit(strategy(), lambda: make(2, 5), **BF16)
    assert model.shortage.left == []
    assert trainer.strategy.plan.update_timing is UpdateTiming.INSIDE_BACKWARD
    assert_same_run(actual, expected)


class InterruptedNet(HybridNet):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3:
            first = next(self.parameters())
            first.register_hook(self._interrupt)
        return loss

    @staticmethod
    def _interrupt(grad: Tensor) -> Tensor:
        raise ValueError("enough")


def test_an_error_inside_backward_saves_nothing_half_done(tmp_path: Any) -> None:
    held: list[Trainer] = []

    class Keep(Callback):
        def on_exception(self, trainer: Trainer, *args: Any) -> None:
            held.append(trainer)
            with pytest.raises(StateError, match="from a checkpoint"):
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    with pytest.raises(ValueError, match="enough"):
        fit(strategy(), InterruptedNet, callbacks=[Keep()], **BF16)
    assert len(held) == 1
    assert not (tmp_path / "half.ckpt").exists()


def test_the_norm_is_known_after_a_step_once_somebody_asks(caplog: pytest.LogCaptureFixture) -> None:
    class After(Callback):
        def __init__(self) -> None:
            self.norms: list[float] = []

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            self.norms.append(float(trainer.strategy.grad_norm()))  # type: ignore[attr-defined]

    looking, after = Looking(), After()
    fit(strategy(), HybridNet, callbacks=[looking], **BF16)
    with caplog.at_level(logging.WARNING, "lightning_elixir"):
        fit(strategy(), HybridNet, callbacks=[after], **BF16)
    assert math.isnan(after.norms[0])
    assert after.norms[1:] == looking.norms[1:]
    assert caplog.text.count("computed from now on") == 1


def test_a_wish_that_cannot_be_met_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lightning_elixir"):
        trainer, _, _ = fit(
            strategy("inside_backward"), HybridNet, gradient_clip_val=1.0, gradient_clip_algorithm="value", **BF16
        )
    assert "update_timing='inside_backward' is not possible here" in caplog.text
    assert trainer.strategy.plan.update_timing is UpdateTiming.BEHIND_FORWARD
    with pytest.raises(PlanError, match="unknown update_timing 'never'.*behind_forward"):
        strategy("never")


def test_validation_and_checkpoints_see_updated_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    class Saving(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / f"{len(list(tmp_path.iterdir()))}.ckpt")

    def run(timing: str) -> Any:
        return fit(
            strategy(timing),
            HybridNet,
            callbacks=[Saving()],
            val=lambda: make_data(8, seed=5),
            val_check_interval=2,
            **BF16,
        )[2]

    expected = run("after_backward")
    with slow_updates(monkeypatch):
        assert_same_run(run("auto"), expected)
    first, second = (torch.load(tmp_path / f"{i}.ckpt", weights_only=False) for i in range(2))
    assert [k for k, v in first["state_dict"].items() if not torch.equal(second["state_dict"][k], v)] == []


def _fit_on_ranks(timing: str) -> Any:
    trainer, model, run = fit(strategy(timing), HybridNet, devices=2, train=lambda: make_data(64), **BF16)
    return [x.item() for x in model.losses], run.state, model.begun


def test_ranks_begin_updates_inside_backward() -> None:
    after = run_ranks(_fit_on_ranks, 2, "after_backward", init_group=False)
    inside = run_ranks(_fit_on_ranks, 2, "auto", init_group=False)
    for one, other in zip(inside, after, strict=True):
        assert one[0] == other[0]
        assert [k for k, v in other[1].items() if not torch.equal(one[1][k], v)] == []
        assert max(one[2]) > 0
        assert max(other[2]) == 0
