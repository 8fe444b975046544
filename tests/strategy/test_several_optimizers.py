"""Several optimizers under the Trainer, each over its own parameters: plain Lightning's numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_elixir import ElixirStrategy, HybridAdam
from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.types import UpdateTiming
from lightning_elixir.strategy.regimes import with_optimizer
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import crossed, full, telling

BATCHES = 4


class Gan(pl.LightningModule):
    """A generator and a discriminator in one body of registration, so that a chunk holds parameters of both."""

    def __init__(self, toggles: bool = True, rhythm: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggles, self.rhythm = toggles, rhythm
        torch.manual_seed(1)
        self.first_g, self.first_d = nn.Linear(8, 24), nn.Linear(16, 24)
        self.last_g, self.last_d = nn.Linear(24, 16), nn.Linear(24, 1)
        self.seen: list[float] = []

    def generate(self, z: Tensor) -> Tensor:
        out: Tensor = self.last_g(torch.tanh(self.first_g(z)))
        return out

    def judge(self, x: Tensor) -> Tensor:
        out: Tensor = self.last_d(torch.tanh(self.first_d(x)))
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        gen, dis = self.optimizers()  # type: ignore[misc]
        z = batch[:, :8]
        if self.toggles:
            self.toggle_optimizer(gen)
        loss = (self.judge(self.generate(z)) - 1).square().mean()
        self.manual_backward(loss)
        self.clip_gradients(gen, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        gen.step()
        gen.zero_grad()
        if self.toggles:
            self.untoggle_optimizer(gen)
        self.seen.append(loss.item())
        if batch_idx % self.rhythm:
            return
        if self.toggles:
            self.toggle_optimizer(dis)
        else:
            dis.zero_grad()
        loss = self.judge(self.generate(z).detach()).square().mean() + (self.judge(batch) - 1).square().mean()
        self.manual_backward(loss)
        assert self.last_d.weight.grad is not None
        assert self.last_g.weight.grad is None
        dis.step()
        dis.zero_grad()
        if self.toggles:
            self.untoggle_optimizer(dis)
        self.lr_schedulers().step()  # type: ignore[union-attr]
        self.seen.append(loss.item())

    def configure_optimizers(self) -> Any:
        gen = torch.optim.AdamW([*self.first_g.parameters(), *self.last_g.parameters()], lr=0.02, foreach=False)
        dis = torch.optim.SGD([*self.first_d.parameters(), *self.last_d.parameters()], lr=0.05, momentum=0.9)
        return [gen, dis], [torch.optim.lr_scheduler.StepLR(dis, 1, 0.8)]


class Both(Gan):
    """One backward, then the steps of both, with what users look at between."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        gen, dis = self.optimizers()  # type: ignore[misc]
        loss = self.judge(self.generate(batch[:, :8])).square().mean() + self.judge(batch).sin().mean()
        self.manual_backward(loss / 2)
        if batch_idx % 2 == 0:
            gen.step()
            gen.zero_grad()
            if batch_idx == 2:
                self.seen.append(float(self.last_d.weight.grad.sum()))  # type: ignore[union-attr]
                self.last_d.weight.grad.mul_(0.5)  # type: ignore[union-attr]
            return
        # The discriminator's gradients of two batches, the generator's of one.
        dis.step()
        gen.step()
        dis.zero_grad()
        gen.zero_grad()
        self.seen.append(loss.item())


class BothAdam(Both):
    def configure_optimizers(self) -> Any:
        gen = HybridAdam([*self.first_g.parameters(), *self.last_g.parameters()], lr=0.02)
        return [gen, HybridAdam([*self.first_d.parameters(), *self.last_d.parameters()], lr=0.05)]


def _data(world_size: int = 1) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(torch.randn(4 * BATCHES * world_size, 16, generator=generator), batch_size=4)  # type: ignore[arg-type]


def _fit(model: pl.LightningModule, strategy: Any, **kwargs: Any) -> pl.Trainer:
    options: dict[str, Any] = {"max_epochs": 2, "accelerator": "cpu", "devices": 1} | kwargs
    path = options.pop("ckpt_path", None)
    world_size = options["devices"]
    trainer = pl.Trainer(
        strategy=strategy, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(model, _data(world_size), ckpt_path=path)
    return trainer


TIGHT: dict[str, Any] = {"placement_policy": "cpu", "chunk_size": 1600 * 4, "gpu_memory_limit": "24KiB"}
RESIDENT: dict[str, Any] = {"placement_policy": "cuda", "chunk_size": 1600 * 4}
PLACES = {"tight": TIGHT, "resident": RESIDENT}
MODELS = {
    "toggled": lambda: Gan(),
    "not toggled": lambda: Gan(toggles=False),
    "rhythm": lambda: Gan(rhythm=2),
    "both": lambda: Both(),
    "adam": lambda: BothAdam(),
}


def _differing(model: pl.LightningModule, plain: pl.LightningModule) -> list[str]:
    state = model.state_dict()
    return [name for name, value in plain.state_dict().items() if not torch.equal(state[name], value)]


@crossed(kind=MODELS, place=PLACES)
def test_plain_lightnings_numbers(kind: str, place: str) -> None:
    plain, model = MODELS[kind](), MODELS[kind]()
    _fit(plain, "auto")
    trainer = _fit(model, ElixirStrategy(**PLACES[place]))
    # The norm that is clipped to sums in another order.
    close = {"rtol": 0, "atol": 0} if kind == "both" else {"rtol": 1e-5, "atol": 1e-7}
    assert model.seen == pytest.approx(plain.seen, rel=close["rtol"], abs=close["atol"])
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, **close)
    assert place == "resident" or trainer.strategy.stats().evictions > 0  # type: ignore[attr-defined]


def test_automatic_placement_and_mixed_precision() -> None:
    """Manual optimization in bf16: the same numbers wherever chunks are, and near to plain Lightning's."""
    plain, models = Both(), [Both(), Both(), Both()]
    _fit(plain, "auto", precision="bf16-mixed")
    for model, options in zip(models, (TIGHT | {"gpu_memory_limit": "40KiB"}, RESIDENT, {}), strict=True):
        _fit(model, ElixirStrategy(**options), precision="bf16-mixed")
        torch.testing.assert_close(model.seen, plain.seen, rtol=0.05, atol=0.01)
    assert _differing(models[1], models[0]) == _differing(models[2], models[0]) == []


class Matrices(pl.LightningModule):
    """Muon for matrices, another optimizer for the rest: parameters of both lie in each chunk."""

    def __init__(self, rest: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.rest = rest
        torch.manual_seed(2)
        layers = (nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 16)) for _ in range(6))
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self.layers(batch).square().mean())
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        matrices, rest = ([p for p in self.parameters() if (p.dim() == 2) is is_2d] for is_2d in (True, False))
        return [torch.optim.Muon(matrices, lr=0.01), self.rest(rest, lr=0.01)]


@pytest.mark.parametrize(
    ("rest", "precision"),
    [(HybridAdam, "bf16-mixed"), full(HybridAdam, "32-true"), full(torch.optim.AdamW, "32-true")],
)
def test_a_plan_counts_the_states_of_each_parameters_optimizer(rest: Any, precision: str) -> None:
    strategy = ElixirStrategy(gpu_memory_limit="180KiB")
    _fit(Matrices(rest), strategy, precision=precision)  # type: ignore[arg-type]
    held, notes, chunks = strategy.stats().held_bytes, strategy.plan.notes, strategy.plan.chunks
    taken = held.get("gpu_states", 0) + held["cpu_states"]
    masters = held.get("gpu_master", 0) + held.get("cpu_master", 0)
    counted = int(notes["gpu_state_bytes"]) + int(notes["host_state_bytes"]) - masters
    if rest is HybridAdam:  # whose states have the padding of chunks
        assert taken == counted
        return
    matrices = sum(m.numel for chunk in chunks for m in chunk.members if len(m.shape) == 2)
    assert taken == 4 * (2 * sum(m.numel for chunk in chunks for m in chunk.members) - matrices)
    assert counted == 4 * (2 * sum(chunk.numel for chunk in chunks) - matrices)


def _with_matrices(timing: Any, devices: int = 1) -> tuple[UpdateTiming, str, dict[str, Tensor]]:
    model, strategy = Matrices(HybridAdam), ElixirStrategy(gpu_memory_limit="180KiB", update_timing=timing)
    _fit(model, strategy, precision="bf16-mixed", devices=devices)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return strategy.plan.update_timing, strategy.plan.explain(), state


@pytest.mark.parametrize("devices", [1, full(2)])
def test_updates_beside_muon_run_behind_the_next_forward(devices: int) -> None:
    """Those of HybridAdam, where the user has not said otherwise; the plan says so, and no bit depends on it."""
    found = {}
    for timing in ("after_backward", "auto", "inside_backward"):
        each = [_with_matrices(timing)] if devices == 1 else run_ranks(_with_matrices, 2, timing, 2, init_group=False)
        found[timing] = each[0]
    after, first, last = UpdateTiming.AFTER_BACKWARD, *(found[name][2] for name in ("after_backward", "auto"))
    assert [one[0] for one in found.values()] == [after, *[UpdateTiming.BEHIND_FORWARD] * 2]
    assert [name for name, value in first.items() if not torch.equal(value, last[name])] == []
    told = r"run behind the next forward, .* \(.* other optimizers' run in their step, of (\d+) of \d+ chunks\)"
    match = re.search(told, found["auto"][1])
    assert match is not None
    assert int(match[1]) > 0
    assert "other optimizers" not in found["after_backward"][1]


def test_what_training_is_like_with_several_optimizers() -> None:
    inside = replace(TrainingRegime(), update_timing=UpdateTiming.INSIDE_BACKWARD)
    after, behind = UpdateTiming.AFTER_BACKWARD, UpdateTiming.BEHIND_FORWARD
    names = frozenset({"a"})
    for regime, can_stream, in_step, timing in (
        (inside, True, frozenset(), inside.update_timing),
        (inside, False, frozenset(), after),
        (inside, False, names, behind),
        (replace(inside, update_timing=behind), False, names, behind),
        (replace(inside, update_timing=after), False, names, after),
    ):
        made = with_optimizer(regime, can_stream=can_stream, in_step=in_step, num_states=2)
        assert (made.update_timing, made.can_stream, made.in_step) == (timing, can_stream, in_step)


def _on_ranks(kind: str, options: dict[str, Any] | None) -> tuple[list[float], dict[str, Tensor]]:
    model = MODELS[kind]()
    _fit(model, "ddp_find_unused_parameters_true" if options is None else ElixirStrategy(**options), devices=2)
    return model.seen, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.full
@pytest.mark.parametrize("kind", telling([*MODELS], "toggled"))
def test_two_ranks_give_what_ddp_gives(kind: str) -> None:
    tight = TIGHT | {"gpu_memory_limit": "32KiB"}  # a block more than one rank's
    expected = run_ranks(_on_ranks, 2, kind, None, init_group=False)
    for got, ddp in zip(run_ranks(_on_ranks, 2, kind, tight, init_group=False), expected, strict=True):
        assert got[0] == pytest.approx(ddp[0], rel=1e-5, abs=1e-7)
        for name, value in ddp[1].items():
            torch.testing.assert_close(got[1][name], value, rtol=1e-5, atol=1e-6)


class Swapped(Both):
    """The same optimizers in the other order."""

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return list(reversed(super().optimizers(use_pl_optimizer)))  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        (gen, dis), (scheduler,) = super().configure_optimizers()
        return [dis, gen], [scheduler]


@pytest.mark.parametrize("kind", telling(["full", "sharded"], "sharded"))
def test_resume(tmp_path: Path, kind: Any) -> None:
    path = str(tmp_path / "c.ckpt")
    plain, first, second = Both(), Both(), Both()
    _fit(plain, "auto", max_epochs=4)
    _fit(first, ElixirStrategy(**TIGHT, state_dict_type=kind)).save_checkpoint(path)
    _fit(second, ElixirStrategy(**TIGHT, state_dict_type=kind), ckpt_path=path, max_epochs=4)
    assert _differing(second, plain) == []
    assert [*first.seen, *second.seen] == plain.seen
    if kind == "full":  # which plain Lightning reads as well
        third = Both()
        _fit(third, "auto", ckpt_path=path, max_epochs=4)
        assert _differing(third, plain) == []
    else:  # by the names of parameters, in whatever order
        swapped = Swapped()
        _fit(swapped, ElixirStrategy(**TIGHT, state_dict_type=kind), ckpt_path=path, max_epochs=4)
        assert _differing(swapped, plain) == []


class Halved(Both):
    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()[0][:1]


class Doubled(Both):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.last_d.parameters(), lr=0.1)]


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_another_number_of_optimizers_is_refused(tmp_path: Path, kind: Any) -> None:
    path = str(tmp_path / "c.ckpt")
    _fit(Both(), ElixirStrategy(**TIGHT, state_dict_type=kind)).save_checkpoint(path)
    with pytest.raises(PlanError, match="2 optimizers.* (returned|has) 1"):
        _fit(Halved(), ElixirStrategy(**TIGHT, state_dict_type=kind), ckpt_path=path, max_epochs=4)


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    with pytest.raises(PlanError, match=r"optimizers 0 and 1 of configure_optimizers\(\) both hold last_d.weight"):
        _fit(Doubled(), ElixirStrategy(**TIGHT))


class Watching(Both):
    """Looks at the states, as callbacks of users do."""

    def on_train_batch_end(self, *args: Any) -> None:
        gen, dis = self.optimizers()  # type: ignore[misc]
        self.seen.append(len(gen.state))
        for optimizer in (gen, dis):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    for key, value in sorted(optimizer.state[p].items()):
                        if value is not None:
                            assert value.shape in (p.shape, ())
                            self.seen.append(float(value.double().abs().sum()))
                            assert key


@pytest.mark.parametrize("place", PLACES)
def test_states_can_be_read(place: str) -> None:
    plain, model = Watching(), Watching()
    _fit(plain, "auto")
    trainer = _fit(model, ElixirStrategy(**PLACES[place]))
    assert model.seen == plain.seen
    state = trainer.strategy.optimizers[0].state
    optimizer = trainer.strategy.optimizers[0]
    assert optimizer.state is state
    with pytest.raises(StateError, match="shows copies"):
        state[next(model.parameters())] = {}
    with pytest.raises(StateError, match="begin anew, load"):  # as plain PyTorch's Adam would
        state.clear()
    with pytest.raises(StateError, match="begin anew, load"):
        optimizer.state = {}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": {}})
    assert len(state) == 0
    with pytest.raises(KeyError):
        state[torch.zeros(3)]
