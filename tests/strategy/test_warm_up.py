"""Policy "auto": a safe plan first, and after one step the final one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_elixir._lightning import Trainer, pl
from lightning_elixir.plan.io import load_plan, save_plan
from lightning_elixir.plan.types import Plan, Tier
from lightning_elixir.strategy import ElixirStrategy
from tests.strategy.models import CHUNK, Net, assert_same_as_plain, fit, make_data, make_trainer


class Plans(pl.Callback):
    """The plan in force before each step."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if isinstance(trainer.strategy, ElixirStrategy):
            self.plans.append(trainer.strategy.plan)


def _plans(**options: Any) -> list[Plan]:
    callback = Plans()
    trainer_options = {"accumulate_grad_batches": options.pop("accumulate", 1)}
    assert_same_as_plain(elixir={**CHUNK, **options}, callbacks=lambda: [callback], **trainer_options)
    return callback.plans


def test_without_a_limit_everything_stays_from_the_start() -> None:
    plans = _plans()
    assert len({plan.fingerprint() for plan in plans}) == 1
    assert plans[0].is_all_resident


def test_what_fits_goes_to_the_device_before_step_two() -> None:
    callback = Plans()
    _, _, expected = fit("auto")
    strategy = ElixirStrategy(gpu_memory_limit="8MiB", **CHUNK)
    _, _, actual = fit(strategy, callbacks=[callback])
    assert actual.losses == expected.losses
    plans = callback.plans
    # Strategy hooks come after those of callbacks: the second batch still shows the first plan.
    assert not plans[0].is_all_resident
    assert all(chunk.optim_tier is Tier.CPU for chunk in plans[0].chunks)
    assert plans[-1].is_all_resident
    assert len({plan.fingerprint() for plan in plans}) == 2
    assert strategy.plan.fingerprint() == plans[2].fingerprint()


def test_what_does_not_fit_stays_on_the_host() -> None:
    plans = _plans(gpu_memory_limit="96KiB")
    assert not plans[-1].is_all_resident
    assert any(chunk.param_tier is Tier.CPU for chunk in plans[-1].chunks)
    assert plans[-1].rcache_blocks >= plans[0].rcache_blocks
    assert len({plan.layout_fingerprint() for plan in plans}) == 1


def test_accumulation_makes_the_first_step_longer() -> None:
    plans = _plans(gpu_memory_limit="96KiB", accumulate=3)
    assert len({plan.fingerprint() for plan in plans[:3]}) == 1


class PendingNet(Net):
    """Manual optimization that steps in the middle of a batch and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for step in range(2):
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.losses.append(loss.detach())
            if step == 0:
                optimizer.step()
                optimizer.zero_grad()
        if batch_idx > 3:
            optimizer.zero_grad()


def test_the_plan_waits_for_pending_gradients() -> None:
    callback = Plans()
    _, _, expected = fit("auto", PendingNet)
    _, _, actual = fit(ElixirStrategy(gpu_memory_limit="8MiB", **CHUNK), PendingNet, callbacks=[callback])
    assert actual.losses == expected.losses
    assert len({plan.fingerprint() for plan in callback.plans[:5]}) == 1
    assert callback.plans[-1].is_all_resident


def test_a_final_plan_is_kept_for_the_next_fit() -> None:
    strategy = ElixirStrategy(gpu_memory_limit="8MiB", **CHUNK)
    trainer, model, _ = fit(strategy)
    final = strategy.plan
    callback = Plans()
    trainer.callbacks.append(callback)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, make_data())
    assert {plan.fingerprint() for plan in callback.plans} == {final.fingerprint()}


def test_evaluation_first_leaves_the_warm_up_to_fit() -> None:
    strategy, callback = ElixirStrategy(gpu_memory_limit="8MiB", **CHUNK), Plans()
    model, trainer = Net(), make_trainer(strategy, callbacks=[callback])
    trainer.validate(model, make_data(8), verbose=False)
    trainer.fit(model, make_data())
    assert not callback.plans[0].is_all_resident
    assert strategy.plan.is_all_resident


@pytest.mark.parametrize("as_path", [True, False])
def test_a_given_plan_is_obeyed(tmp_path: Any, as_path: bool) -> None:
    first = ElixirStrategy(placement_policy="const", offload_param_frac=0.5, **CHUNK)
    fit(first)
    save_plan(first.plan, tmp_path / "plan.json")
    given: Any = tmp_path / "plan.json" if as_path else load_plan(tmp_path / "plan.json")
    callback = Plans()
    strategy = ElixirStrategy(plan=given, gpu_memory_limit="1GiB")
    _, _, actual = fit(strategy, callbacks=[callback])
    assert {plan.fingerprint() for plan in callback.plans} == {first.plan.fingerprint()}
    assert [x.item() for x in actual.losses] == [x.item() for x in fit("auto")[2].losses]


def test_stats_norm_gradients_and_parameters_can_be_looked_at() -> None:
    class Looking(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            strategy = self.trainer.strategy
            assert isinstance(strategy, ElixirStrategy)
            grads = strategy.full_grads()
            assert {name: grad.shape for name, grad in grads.items()} == {
                n: p.shape for n, p in self.named_parameters()
            }
            total = torch.cat([grad.flatten().double() for grad in grads.values()]).norm()
            assert strategy.grad_norm().item() == pytest.approx(total.item(), rel=1e-6)

    strategy = ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK)
    trainer, model, run = fit(strategy, Looking)
    stats = strategy.stats().as_dict()
    assert stats["fetches"] + stats["prefetches"] > 0
    strategy.reset_stats()
    assert strategy.stats().fetches == 0
    with strategy.full_parameters(["layers.4.bias"]) as parameters:
        assert torch.equal(parameters["layers.4.bias"], run.state["layers.4.bias"])
    with strategy.full_parameters(modify=True) as parameters, torch.no_grad():
        parameters["layers.4.bias"].fill_(3.0)
    assert strategy.lightning_module_state_dict()["layers.4.bias"].eq(3.0).all()
