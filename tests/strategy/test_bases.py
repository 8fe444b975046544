"""`ElixirStrategy(ignored=...)` and frozen parameters of other dtypes under the Trainer, checkpoints with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import crossed, telling
from tests.strategy.models import CHUNK, TIGHT, WIDTH, Net, assert_same_as_plain, assert_same_run, fit, make_data

TIGHT = {**TIGHT, "gpu_memory_limit": "152KiB"}


class Adapted(Net):
    """One layer trains, all below it are frozen."""

    def _make(self) -> None:
        super()._make()
        self.layers[:-1].requires_grad_(False)


class BasedNet(Net):
    """With frozen integers and 8-bit floats in front."""

    def _make(self) -> None:
        if hasattr(self, "table"):
            return
        super()._make()
        torch.manual_seed(9)
        self.table = nn.Parameter(torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.small = nn.Parameter(torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.table.to(x.dtype) / 50)
        return self.layers(torch.tanh(x @ self.small.to(x.dtype) / 8))


IGNORED: dict[str, Any] = {
    "nothing": None,
    "trained": ["layers.0", "layers.4.weight"],
    "frozen": ["table", "small"],
    "both": [nn.LayerNorm, "small"],
}


@crossed(told=["both-tight", "trained-auto"], what=IGNORED, placement=["tight", "auto"])
def test_as_plain_lightning(what: str, placement: str) -> None:
    limits = {"trained": "220KiB", "frozen": "128KiB"}  # what is ignored and trains takes more, what is frozen less
    tight = {**TIGHT, **({"gpu_memory_limit": limits[what]} if what in limits else {})}
    elixir = {**(tight if placement == "tight" else CHUNK), "ignored": IGNORED[what]}
    trainer, model = assert_same_as_plain(BasedNet, elixir=elixir)
    left_out = {p.fqn for p in trainer.strategy.plan.ignored}
    assert bool(left_out) is (what != "nothing")
    assert left_out.isdisjoint(m.fqn for c in trainer.strategy.plan.chunks for m in c.members)
    assert model.table.dtype is torch.int8


@pytest.mark.parametrize("ignored", telling(["layers.4", "*"], "layers.4"))
def test_all_that_trains_may_stay_out(ignored: str) -> None:
    limit = "512KiB" if ignored == "*" else "72KiB"
    trainer, _, actual = fit(ElixirStrategy(**{**TIGHT, "gpu_memory_limit": limit}, ignored=ignored), Adapted)
    assert_same_run(actual, fit("auto", Adapted)[2])
    assert {p.fqn for p in trainer.strategy.plan.ignored} >= {"layers.4.weight", "layers.4.bias"}
    assert bool(trainer.strategy.stats().evictions) is (ignored != "*")


@pytest.mark.parametrize("kind", telling(["full", "sharded"], "sharded"))
def test_a_fit_goes_on_from_a_checkpoint(kind: str, tmp_path: Any) -> None:
    path = str(tmp_path / "saved")

    def strategy() -> ElixirStrategy:
        return ElixirStrategy(**TIGHT, ignored=IGNORED["both"], state_dict_type=kind)

    trainer, _, _ = fit(strategy(), BasedNet, max_epochs=1)
    trainer.save_checkpoint(path)
    _, _, actual = fit(ElixirStrategy(**TIGHT, ignored=IGNORED["both"]), BasedNet, max_epochs=2, ckpt_path=path)
    # What is ignored is a matter of a run: the same checkpoint serves one that ignores nothing, and plain Lightning.
    other = ElixirStrategy(**TIGHT) if kind == "sharded" else "auto"
    _, _, expected = fit(other, BasedNet, max_epochs=2, ckpt_path=path)
    assert_same_run(actual, expected)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_other_precisions(precision: Any) -> None:
    strategy = ElixirStrategy(**TIGHT, ignored=["layers.4", "small"])
    _, model, run = fit(strategy, BasedNet, precision=precision)
    assert all(torch.isfinite(loss) for loss in run.losses)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert dtypes["table"] is torch.int8
    assert dtypes["small"] is torch.float8_e4m3fn
    assert dtypes["layers.4.weight"] is torch.float32
    assert dtypes["layers.1.up.weight"] is torch.bfloat16
    assert run.state["layers.4.weight"].dtype is torch.float32


def on_ranks(what: str) -> None:
    data = {"train": lambda: make_data(64), "devices": 2}
    _, _, actual = fit(ElixirStrategy(**TIGHT, ignored=IGNORED[what]), BasedNet, **data)
    _, _, expected = fit(ElixirStrategy(**TIGHT), BasedNet, **data)
    assert [loss.item() for loss in actual.losses] == [loss.item() for loss in expected.losses]
    if actual.state:
        assert [k for k, v in expected.state.items() if not torch.equal(actual.state[k].float(), v.float())] == []


@pytest.mark.full
def test_on_two_ranks() -> None:
    run_ranks(on_ranks, 2, "both", init_group=False)
