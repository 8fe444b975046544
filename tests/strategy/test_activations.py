"""`ElixirStrategy(activations=...)`: whatever becomes of activations, a run is that of the plain Trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir._lightning import Trainer, pl
from lightning_elixir.errors import PlanError
from lightning_elixir.plan.activations import Fate
from lightning_elixir.plan.io import load_plan
from lightning_elixir.plan.types import Plan
from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.strategy.shared_plans import Planner
from lightning_elixir.strategy.warm_up import WarmUp
from tests.helpers.dist import run_ranks
from tests.helpers.seeds import seed_everything
from tests.helpers.tiers import crossed, full
from tests.strategy.models import (
    CHUNK,
    TIGHT,
    WIDTH,
    Block,
    Net,
    Run,
    UnforeseenNet,
    assert_same_run,
    collect,
    fit,
    make_data,
    make_trainer,
)


class WideBatches(Net):
    """Of so many rows that its blocks' activations are worth moving."""

    rows = 2048

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        repeated = [x.repeat(self.rows // 4, 1), y.repeat(self.rows // 4)]
        return super().training_step(repeated, batch_idx)


def fates_of(trainer: Trainer) -> list[str]:
    plan: Plan = trainer.strategy.plan  # type: ignore[attr-defined]
    return [block.fate.value for block in plan.activations]


@crossed(told=["offload-1"], activations=["keep", "recompute", "offload", "auto"], accumulated=[1, 2])
def test_a_run_is_that_of_the_plain_trainer(activations: str, accumulated: int) -> None:
    options: dict[str, Any] = {"train": lambda: make_data(24), "val": lambda: make_data(8, seed=2)}
    options["accumulate_grad_batches"] = accumulated
    _, _, expected = fit("auto", WideBatches, **options)
    trainer, _, actual = fit(ElixirStrategy(**TIGHT, activations=activations), WideBatches, **options)
    assert_same_run(actual, expected)
    stats = trainer.strategy.stats()
    assert stats.evictions > 0
    assert (stats.recomputed_blocks > 0) == (activations == "recompute")
    assert (stats.activations_in_bytes > 0) == (activations == "offload")
    # On a CPU activations take nothing of the limit, so that nothing is gained by moving them.
    assert fates_of(trainer) == ["keep" if activations == "auto" else activations] * 4
    assert "cpu_activations" not in stats.held_bytes  # given back when the run is over


def test_chunks_are_cut_by_what_blocks_keep_that_are_recomputed() -> None:
    """All parameters of a block at once, in its backward: with chunks of one layer's size three did not fit."""
    _, _, expected = fit("auto")
    trainer, _, actual = fit(ElixirStrategy(gpu_memory_limit="48KiB", activations="recompute"))
    assert_same_run(actual, expected)
    stats = trainer.strategy.stats()
    assert stats.evictions > 0
    assert stats.overflows == 0


class CalledByHand(WideBatches):
    """Optimizes by hand. Its layers, which it calls itself, are the first modules of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        for scale in (1, 0.5):
            loss = super().training_step([x * scale, y], batch_idx)
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()


@pytest.mark.full
@crossed(told=["offload"], activations=[fate.value for fate in Fate])
def test_layers_that_a_model_calls_itself_under_manual_optimization(activations: str) -> None:
    _, _, expected = fit("auto", CalledByHand)
    trainer, _, actual = fit(ElixirStrategy(**TIGHT, activations=activations), CalledByHand)
    assert_same_run(actual, expected)
    stats = trainer.strategy.stats()
    assert stats.evictions > 0
    assert (stats.activations_in_bytes > 0) == Fate(activations).is_offloaded


def test_blocks_are_named_from_the_lightning_module(tmp_path: Path) -> None:
    """In plans, and in reports."""
    asked: Any = {"layers.[01]": "recompute", "layers.3": "offload"}
    trainer, _, _ = fit(ElixirStrategy(**TIGHT, activations=asked, report_dir=str(tmp_path)), WideBatches)
    plan = trainer.strategy.plan  # type: ignore[attr-defined]
    assert [(b.name, b.fate.value) for b in plan.activations] == [
        ("layers.0", "recompute"),
        ("layers.1", "recompute"),
        ("layers.3", "offload"),
    ]
    page = (tmp_path / "report.html").read_text()
    for what, which, number in (("recomputed in backward", "layers.0 to 1", 2), ("sent to host memory", "layers.3", 1)):
        assert f'<td>{what}</td><td>{which}</td><td class="num">{number}</td>' in page


@pytest.mark.parametrize("value", ["always", {"layers.9": "keep"}, {"layers.*": "auto"}])
def test_what_is_no_value_is_refused_before_anything_begins(value: Any) -> None:
    with pytest.raises(PlanError, match="activations"):
        fit(ElixirStrategy(**TIGHT, activations=value))


class Shifted(Block):
    """Has a table in a large buffer, which its first call makes."""

    table: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
        if self.table is None:
            self.table = torch.linspace(-1, 1, 1 << 17)
        return super().forward(x + shift * self.table[0])


class KeepsAShift(Net):
    """Made in its first call: in a validation before fit, under `inference_mode`."""

    shift: Tensor | None = None

    def _make(self) -> None:
        self.layers = nn.ModuleList([*(Shifted() for _ in range(4)), nn.Linear(WIDTH, 4)])  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        if self.shift is None:
            self.shift = torch.linspace(-1, 1, WIDTH)
        *blocks, head = self.layers
        for block in blocks:
            x = block(x, self.shift)
        return head(x)


@crossed(told=["recompute"], activations=[fate.value for fate in Fate])
def test_blocks_are_given_what_a_validation_before_has_left(activations: str) -> None:
    def run(strategy: Any) -> Run:
        seed_everything(11)
        model, trainer = KeepsAShift(), make_trainer(strategy)
        trainer.validate(model, make_data(8, seed=2), verbose=False)
        assert model.shift is not None
        assert model.shift.is_inference()
        trainer.fit(model, make_data(24), make_data(8, seed=2))
        return collect(trainer, model)

    assert_same_run(run(ElixirStrategy(**TIGHT, activations=activations)), run("auto"))


@pytest.mark.full
def test_a_given_plan_gets_what_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    fit(ElixirStrategy(**TIGHT, activations="offload", report_dir=str(folder)), WideBatches)
    plan = load_plan(folder / "plan.json")
    assert {block.fate for block in plan.activations} == {Fate.OFFLOAD}
    trainer, _, _ = fit(ElixirStrategy(plan=plan), WideBatches)
    assert fates_of(trainer) == ["offload"] * 4
    trainer, _, _ = fit(ElixirStrategy(plan=plan, activations={"layers.1": "recompute"}), WideBatches)
    assert fates_of(trainer) == ["recompute"]


class _HostBytes(pl.Callback):
    """The most that all ranks of this host have had there after a step."""

    def __init__(self) -> None:
        self.most = 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        held = trainer.strategy.stats().held_bytes
        own = sum(nbytes for kind, nbytes in held.items() if kind.startswith("cpu_"))
        of_all = trainer.strategy.reduce(torch.tensor(float(own)), reduce_op="sum")
        self.most = max(self.most, int(of_all))


def _within(limit: int | None, num_ranks: int) -> tuple[Run, int, int, int]:
    """Of a run: what it leaves, the host memory of all ranks, and what went there, or found no room."""
    watch = _HostBytes()
    strategy = ElixirStrategy(**TIGHT, activations="offload", cpu_memory_limit=limit)
    options: dict[str, Any] = {"devices": num_ranks, "train": lambda: make_data(16), "callbacks": lambda: [watch]}
    trainer, _, run = fit(strategy, WideBatches, **options)
    stats = trainer.strategy.stats()
    return run, watch.most, stats.activations_out_bytes, stats.activations_left_bytes


@pytest.mark.parametrize("num_ranks", [1, full(2)])
def test_what_goes_to_the_host_keeps_within_its_limit(num_ranks: int) -> None:
    """The policy "cpu" foresees no activations; the limit is of the host, with all its ranks."""
    limit = 4 * 2**20

    def run(limit: int | None) -> list[Any]:
        if num_ranks == 1:
            return [_within(limit, 1)]
        return run_ranks(_within, num_ranks, limit, num_ranks, init_group=False)

    for (actual, most, out, left), (expected, most_wanted, _, none_left) in zip(run(limit), run(None), strict=True):
        assert_same_run(actual, expected)
        assert most <= limit < most_wanted
        assert out > 0
        assert left > 0 == none_left


# A CPU that has as much memory as a GPU would have: what is foreseen of activations counts

LIMIT = {**CHUNK, "gpu_memory_limit": "140MiB"}
"""With workspaces (64 MiB) and margins, a step of `LargeBatches` that keeps everything takes 158 MiB, and one that
recomputes 130 MiB."""


class LargeBatches(WideBatches):
    rows = 16384


def few() -> Any:
    return make_data(16)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "_counts_activations", property(lambda planner: True))


def test_auto_makes_room_where_everything_would_not_fit(counting: None, caplog: Any) -> None:
    _, _, expected = fit("auto", LargeBatches, train=few)
    with caplog.at_level(logging.INFO):
        trainer, _, actual = fit(ElixirStrategy(activations="auto", **LIMIT), LargeBatches, train=few)
    assert_same_run(actual, expected)
    plan = trainer.strategy.plan  # type: ignore[attr-defined]
    fates = {block.fate for block in plan.activations}
    assert fates - {Fate.KEEP}
    assert plan.forecast is not None
    assert plan.forecast.peak_gpu_bytes <= 140 * 2**20
    assert "choosing what becomes of the activations of 4 blocks" in caplog.text
    assert "activations: 4 kept on the GPU" in plan.explain()
    stats = trainer.strategy.stats()
    assert stats.recomputed_blocks + stats.activations_out_bytes > 0


def test_auto_keeps_everything_where_that_fits(counting: None) -> None:
    trainer, _, _ = fit(
        ElixirStrategy(activations="auto", **{**LIMIT, "gpu_memory_limit": "1GiB"}), LargeBatches, train=few
    )
    assert fates_of(trainer) == ["keep"] * 4


class UnforeseenLarge(UnforeseenNet, LargeBatches):
    pass


@pytest.mark.full
def test_auto_recomputes_what_it_cannot_foresee(counting: None, caplog: Any) -> None:
    trainer, _, actual = fit(ElixirStrategy(activations="auto", **LIMIT), UnforeseenLarge, train=few)
    assert fates_of(trainer) == ["recompute"] * 4
    assert "cannot be foreseen, so all 4 blocks are recomputed" in caplog.text
    _, _, expected = fit("auto", UnforeseenLarge, train=few)
    assert_same_run(actual, expected)


@pytest.mark.full
def test_auto_chooses_anew_when_steps_grow(counting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer batches from the seventh step on."""
    from lightning_elixir.runtime.engine import Engine

    steps: list[int] = []
    original = WarmUp.after_step

    def after_step(warm_up: WarmUp, **options: bool) -> None:
        steps.append(len(steps))
        original(warm_up, **options)

    class Growing(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            times = 4096 if batch_idx >= 6 else 4
            return super().training_step([x.repeat(times, 1), y.repeat(times)], batch_idx)

    def wanted(engine: Engine) -> int:
        return 2**27 if len(steps) in (6, 7) else 0

    monkeypatch.setattr(WarmUp, "after_step", after_step)
    monkeypatch.setattr(Engine, "wanted_non_model_bytes", property(wanted))
    seen: list[set[str]] = []

    class Fates(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen.append(set(fates_of(trainer)))

    pl.seed_everything(11, verbose=False)
    trainer = make_trainer(ElixirStrategy(activations="auto", **LIMIT), callbacks=[Fates()])
    trainer.fit(Growing(), make_data(40))
    assert seen[0] == {"keep"}
    assert seen[-1] - {"keep"}


def _on_ranks(activations: str) -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Planner, "_counts_activations", property(lambda planner: True))
        pl.seed_everything(11, verbose=False)
        trainer = make_trainer(ElixirStrategy(activations=activations, **LIMIT), devices=2)
        model = LargeBatches()
        trainer.fit(model, make_data(16))
        plan = trainer.strategy.plan  # type: ignore[attr-defined]
        return [x.item() for x in model.losses], plan.fingerprint(), fates_of(trainer)


@pytest.mark.full
def test_ranks_have_the_same_fates_and_numbers() -> None:
    expected = run_ranks(_on_ranks, 2, "keep", init_group=False)
    results = run_ranks(_on_ranks, 2, "auto", init_group=False)
    assert results[0][1:] == results[1][1:]
    assert set(results[0][2]) - {"keep"}
    assert [losses for losses, *_ in results] == [losses for losses, *_ in expected]
