"""Users' subclasses of optimizers, and hooks of optimizers, under Lightning."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_elixir import HybridAdam
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.dist import run_ranks
from tests.helpers.own_steps import CLASSES, EverySecond, WarmsUp, noted
from tests.helpers.tiers import crossed, full
from tests.strategy.models import CHUNK, TIGHT, Net, assert_same_run, fit, make_data


class OwnNet(Net):
    """Notes in which order things happen."""

    def __init__(self, cls: Any) -> None:
        super().__init__()
        self.cls = cls

    def configure_optimizers(self) -> Any:
        self.own = self.cls(self.parameters(), lr=1e-2)
        self.log_of_all: list[str] = getattr(self.own, "log", [])
        return {"optimizer": self.own, "lr_scheduler": torch.optim.lr_scheduler.StepLR(self.own, 1, gamma=0.9)}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_of_all.append("hook")


# Plain Lightning refuses a step that does not run its closure.
@pytest.mark.parametrize("cls", [full(c) if i % 2 else c for i, c in enumerate(CLASSES) if c is not EverySecond])
def test_under_lightning(cls: Any) -> None:
    _, plain, expected = fit("auto", lambda: OwnNet(cls), max_epochs=2)
    _, model, actual = fit(ElixirStrategy(**TIGHT), lambda: OwnNet(cls), max_epochs=2)
    assert_same_run(actual, expected)
    assert noted(model.own) == noted(plain.own)  # type: ignore[attr-defined]


class HookedNet(OwnNet):
    """Hooks of its optimizer, before a step and behind it, change gradients and weights."""

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        self.own.register_step_pre_hook(self._before)
        self.own.register_step_post_hook(self._after)
        return configured

    def _before(self, *_: Any) -> None:
        self.log_of_all.append("before")
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(0.999)
                if p.grad is not None:
                    p.grad.mul_(0.5)

    def _after(self, *_: Any) -> None:
        self.log_of_all.append("after")
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.3, 0.3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log_of_all.append("forward")
        return super().training_step(batch, batch_idx)


@crossed(together=1, cls=[torch.optim.SGD, HybridAdam], accumulated=[1, 2], placement=["cpu", "cuda"])
def test_hooks_of_optimizers_run_where_plain_lightning_runs_them(cls: Any, accumulated: int, placement: Any) -> None:
    """Those before a step come before the forward of its last batch."""
    options: dict[str, Any] = {"accumulate_grad_batches": accumulated, "gradient_clip_val": 0.01}
    options |= {"gradient_clip_algorithm": "value"}
    strategy = ElixirStrategy(**CHUNK, placement_policy=placement, gpu_memory_limit="1MiB")
    _, plain, expected = fit("auto", lambda: HookedNet(cls), **options)
    _, model, actual = fit(strategy, lambda: HookedNet(cls), **options)
    assert_same_run(actual, expected)
    assert model.log_of_all == plain.log_of_all  # type: ignore[attr-defined]


class SavingNet(OwnNet):
    """Hooks of its optimizer halve what is saved of the momentum, and double what is loaded."""

    def __init__(self) -> None:
        super().__init__(HybridAdam)
        self.hparams.clear()  # a class, which is not loaded with weights alone

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        self.own.register_state_dict_pre_hook(lambda _: self.log_of_all.append("before saving"))
        self.own.register_state_dict_post_hook(partial(self._scaled, 0.5))
        self.own.register_load_state_dict_pre_hook(partial(self._scaled, 2.0))
        self.own.register_load_state_dict_post_hook(lambda _: self.log_of_all.append("after loading"))
        return configured

    def _scaled(self, factor: float, _: Any, state: dict[str, Any]) -> dict[str, Any]:
        self.log_of_all.append(f"times {factor}")
        scaled = {
            n: {k: v * factor if k == "exp_avg" else v for k, v in one.items()} for n, one in state["state"].items()
        }
        return state | {"state": scaled}


def _saved_and_loaded(strategies: list[Any], path: Path) -> tuple[Any, list[Any], list[str]]:
    trainer, first, _ = fit(strategies[0], SavingNet)
    trainer.save_checkpoint(path)
    _, second, run = fit(strategies[1], SavingNet, max_epochs=2, ckpt_path=str(path))
    saved = torch.load(path, weights_only=False)["optimizer_states"][0]["state"]
    return run, [one["exp_avg"] for one in saved.values()], [*first.log_of_all, *second.log_of_all]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_hooks_of_optimizers_see_what_is_saved_and_loaded(tmp_path: Path) -> None:
    expected = _saved_and_loaded(["auto", "auto"], tmp_path / "plain.ckpt")
    got = _saved_and_loaded([ElixirStrategy(**TIGHT) for _ in range(2)], tmp_path / "elixir.ckpt")
    assert_same_run(got[0], expected[0])
    assert [torch.equal(a, b) for a, b in zip(got[1], expected[1], strict=True)] == [True] * len(got[1])
    assert got[2] == expected[2]
    assert {"times 0.5", "times 2.0", "before saving", "after loading"} <= {*got[2]}


def _fit_two() -> Any:
    _, model, run = fit(
        ElixirStrategy(**TIGHT),
        lambda: OwnNet(WarmsUp),
        devices=2,
        train=lambda: make_data(64),
    )
    return [x.item() for x in run.losses], model.own.num_steps  # type: ignore[attr-defined]


def _fit_two_plain() -> Any:
    _, model, run = fit("ddp", lambda: OwnNet(WarmsUp), devices=2, train=lambda: make_data(64))
    return [x.item() for x in run.losses], model.own.num_steps  # type: ignore[attr-defined]


@pytest.mark.full
def test_two_ranks() -> None:
    assert run_ranks(_fit_two, 2, init_group=False) == run_ranks(_fit_two_plain, 2, init_group=False)


def test_updates_do_not_begin_before_an_own_step() -> None:
    """It may change the learning rate, which an update that has begun would not see."""

    class Halves(HybridAdam):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["lr"] *= 0.5
            return super().step(closure)

    class HalvingNet(Net):
        def configure_optimizers(self) -> Any:
            return Halves(self.parameters(), lr=1e-2)

    runs = [
        fit(ElixirStrategy(**CHUNK, placement_policy="cpu", update_timing=timing), HalvingNet, precision="bf16-mixed")
        for timing in ("after_backward", "inside_backward")
    ]
    assert_same_run(runs[1][2], runs[0][2])
