"""Muon, Adafactor and 8-bit optimizers under the Trainer: plain Lightning's numbers, on ranks and in checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_elixir import ElixirStrategy
from lightning_elixir.checkpoint.consolidate import consolidate
from lightning_elixir.plan.units import format_bytes
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import crossed, full, telling

TIGHT: dict[str, Any] = {"placement_policy": "cpu", "chunk_size": 4096, "gpu_memory_limit": "30KiB"}


class WithAdafactor(pl.LightningModule):
    """Automatic optimization, with clipping."""

    clip_val: float | None = 0.05
    tight = TIGHT

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4))
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.seen.append(loss.item())
        result: Tensor = loss
        return result

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.05, foreach=False)


class WithMuon(WithAdafactor):
    """For matrices, beside AdamW for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        matrices, rest = ([p for p in self.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
        both = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01, foreach=False)]
        return both, [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in both]


class In8Bits(WithAdafactor):
    """Not clipped: of a norm that is summed in another order, states would be rounded otherwise."""

    clip_val = None

    def configure_optimizers(self) -> Any:
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(self.parameters(), lr=0.01, min_8bit_size=300)


class InTorchaos8Bits(WithAdafactor):
    """With a matrix that is large enough for it."""

    clip_val = None
    tight: dict[str, Any] = {**TIGHT, "gpu_memory_limit": "41KiB"}

    def __init__(self) -> None:
        import torchao.optim  # noqa: F401  # before a checkpoint with its tensors is read

        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))

    def configure_optimizers(self) -> Any:
        import torchao.optim

        optimizer = torchao.optim.AdamW8bit(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class WithTwoInOne(WithAdafactor):
    """Two moments in one tensor."""

    clip_val = None

    def configure_optimizers(self) -> Any:
        import bitsandbytes

        return bitsandbytes.optim.AdEMAMix8bit(self.parameters(), lr=0.01, min_8bit_size=300)


MODELS = {
    "adafactor": WithAdafactor,
    "muon": WithMuon,
    "8 bits": In8Bits,
    "8 bits of torchao": InTorchaos8Bits,
    "two in one": WithTwoInOne,
}
KINDS = telling(MODELS, "adafactor", "muon")


class _AsSaved(TorchCheckpointIO):
    """Lightning's own has torch move what it loads by a function, which torch cannot do with torchao's states."""

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(path, weights_only=False)
        return found


def _fit(model: pl.LightningModule, strategy: Any, **kwargs: Any) -> pl.Trainer:
    options: dict[str, Any] = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, **kwargs}
    if model.automatic_optimization:
        options["gradient_clip_val"] = model.clip_val
    path = options.pop("ckpt_path", None)
    trainer = pl.Trainer(
        strategy=strategy, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip
    data = torch.randn(16 * options["devices"], 16, generator=torch.Generator().manual_seed(3))
    with torch.compiler.set_stance("force_eager"):  # torchao would compile its update, for every shape
        trainer.fit(model, DataLoader(data, batch_size=4), ckpt_path=path)  # type: ignore[arg-type]
    return trainer


def _assert_same(model: pl.LightningModule, plain: pl.LightningModule, atol: float = 1e-6) -> None:
    """Clipping sums a norm in another order."""
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=atol)


def test_a_limit_that_updates_exceed_is_told_with_parts_that_add_up(caplog: pytest.LogCaptureFixture) -> None:
    """Beside the smallest rCache and gradient blocks an update takes 80 bytes for each of 40 x 40 elements."""
    strategy = ElixirStrategy(chunk_size=4096, gpu_memory_limit="40KiB")
    _fit(WithMuon(), strategy, max_epochs=1)
    (warning,) = [r.getMessage() for r in caplog.records if "smallest plan there is" in r.getMessage()]
    assert "as Muon's: up to 80 bytes for each element of the largest, 125.0 KiB" in warning
    match = re.search(r"needs ([\d.]+) KiB \(([^)]*)\), but there are 40\.0 KiB", warning)
    assert match is not None
    parts = [part.split()[-2:] for part in match[2].split("; ")]
    assert sum(float(number) for number, unit in parts if unit == "KiB") == pytest.approx(float(match[1]), abs=0.2)
    plan = strategy.plan
    assert plan.forecast is not None
    lacking = format_bytes(plan.forecast.peak_gpu_bytes - 40 * 1024, is_rounded_up=True)
    assert f"which will exceed the 40.0 KiB of CPU memory (gpu_memory_limit) by {lacking}: " in warning
    assert plan.notes["gpu_stream_bytes"] == 80 * 1600
    assert "updates of states beside the GPU run after backward" in plan.explain()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_tight", [True, False])
def test_plain_lightnings_numbers(kind: str, is_tight: bool) -> None:
    plain, model = MODELS[kind](), MODELS[kind]()
    options = model.tight if is_tight else {}
    _fit(plain, "auto")
    trainer = _fit(model, ElixirStrategy(**options))
    assert model.seen == pytest.approx(plain.seen, rel=1e-5)
    _assert_same(model, plain)
    assert not options or trainer.strategy.stats().evictions > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", telling(KINDS, "muon"))
def test_mixed_precision_is_the_same_everywhere(kind: str) -> None:
    models = [MODELS[kind]() for _ in range(3)]
    policies: list[dict[str, Any]] = [TIGHT, {"placement_policy": "cuda", "chunk_size": 4096}, {}]
    for model, options in zip(models, policies, strict=True):
        _fit(model, ElixirStrategy(**options), precision="bf16-mixed")
    for model in models[1:]:
        assert model.seen == models[0].seen
        state = model.state_dict()
        assert [n for n, v in models[0].state_dict().items() if not torch.equal(state[n], v)] == []


@crossed(told=["full-adafactor", "sharded-8 bits"], how=["full", "sharded"], kind=MODELS)
def test_resume(tmp_path: Path, kind: str, how: Any) -> None:
    path = str(tmp_path / "c.ckpt")
    plain, first, second = (MODELS[kind]() for _ in range(3))
    _fit(plain, "auto", max_epochs=4)
    _fit(first, ElixirStrategy(**MODELS[kind].tight, state_dict_type=how)).save_checkpoint(path)
    _fit(second, ElixirStrategy(**MODELS[kind].tight, state_dict_type=how), ckpt_path=path, max_epochs=4)
    assert [*first.seen, *second.seen] == pytest.approx(plain.seen, rel=1e-5)
    _assert_same(second, plain)
    if how == "sharded":
        path = str(consolidate(Path(path), tmp_path / "one.ckpt", max_file_bytes=2**30)[0])
    third = MODELS[kind]()
    _fit(third, "auto", ckpt_path=path, max_epochs=4, plugins=[_AsSaved()])
    _assert_same(third, plain)


@pytest.mark.parametrize("cls", [In8Bits, InTorchaos8Bits, WithTwoInOne])
def test_plain_states_in_8_bits_are_read(tmp_path: Path, cls: type[WithAdafactor]) -> None:
    path = str(tmp_path / "c.ckpt")
    plain, first, second = (cls() for _ in range(3))
    _fit(plain, "auto", max_epochs=4)
    _fit(first, "auto").save_checkpoint(path)
    _fit(second, ElixirStrategy(**cls.tight), ckpt_path=path, max_epochs=4)
    assert [*first.seen, *second.seen] == plain.seen


def _on_ranks(kind: str, options: dict[str, Any] | None, path: str | None = None, max_epochs: int = 2) -> Any:
    model = MODELS[kind]()
    strategy = "ddp" if options is None else ElixirStrategy(**options)
    trainer = _fit(model, strategy, devices=2, max_epochs=max_epochs, ckpt_path=path if max_epochs > 2 else None)
    if path is not None and max_epochs == 2:
        trainer.save_checkpoint(path)
    return model.seen, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", telling(MODELS, "muon"))
@pytest.mark.parametrize("how", ["sharded", full("full")])
def test_two_ranks_give_what_ddp_gives(tmp_path: Path, kind: str, how: str) -> None:
    path = str(tmp_path / "c.ckpt")
    options = {**MODELS[kind].tight, "state_dict_type": how}
    # Of two ranks the gradients of one more chunk may wait, and slices are on their way to the host.
    options["gpu_memory_limit"] = {"30KiB": "36KiB", "41KiB": "56KiB"}[options["gpu_memory_limit"]]
    expected = run_ranks(_on_ranks, 2, kind, None, None, 4, init_group=False)
    first = run_ranks(_on_ranks, 2, kind, options, path, init_group=False)
    second = run_ranks(_on_ranks, 2, kind, options, path, 4, init_group=False)
    for begun, got, ddp in zip(first, second, expected, strict=True):
        assert [*begun[0], *got[0]] == pytest.approx(ddp[0], rel=1e-5)
        for name, value in ddp[1].items():
            torch.testing.assert_close(got[1][name], value, rtol=1e-5, atol=1e-6)
    alone = MODELS[kind]()  # on another number of ranks
    _fit(alone, ElixirStrategy(**options), ckpt_path=path, max_epochs=2)
    for name, value in first[0][1].items():
        assert torch.equal(alone.state_dict()[name], value)
