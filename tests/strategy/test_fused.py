"""`use_fused_kernels` under the Trainer: real models, the defaults, and chunks that come and go."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_elixir import HybridAdam, profile_memory
from lightning_elixir._lightning import LightningModule, Trainer
from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.strategy.engine_handle import EngineHandle
from tests.helpers.dist import run_ranks
from tests.helpers.fused import make_batch, make_lm
from tests.helpers.tiers import crossed, full
from tests.strategy.models import Net, make_data

TIGHT = {"placement_policy": "cpu", "chunk_size": "16KiB", "gpu_memory_limit": "130KiB"}


class Lm(LightningModule):
    def __init__(self, family: str = "llama", change: str = "") -> None:
        super().__init__()
        self.model = make_lm(family)
        self.losses: list[float] = []
        self.hits: list[float] = []
        if change == "lora":
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(r=4, target_modules=["q_proj", "up_proj", "gate_proj"], task_type="CAUSAL_LM")
            torch.manual_seed(0)
            self.model = get_peft_model(self.model, config)
        if change == "compiled":
            for layer in self.model.model.layers:
                layer.compile(backend="aot_eager")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        out = self.model(**batch)
        self.hits.append((out.logits.argmax(-1) == batch["labels"]).float().mean().item())
        self.losses.append(out.loss.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return HybridAdam([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def _fit(model: LightningModule, strategy: Any, precision: Any = "32-true", **options: Any) -> Trainer:
    data = DataLoader([make_batch(i) for i in range(3)], batch_size=None)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, strategy=strategy, precision=precision, **{**quiet, **options}
    )
    trainer.fit(model, data, DataLoader([make_batch(9)], batch_size=None))
    return trainer


def _losses(model: Lm, strategy: Any, precision: Any = "32-true", **options: Any) -> list[float]:
    _fit(model, strategy, precision, **options)
    return model.losses


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor", "ignore:`is_gradient_checkpointing`:FutureWarning"
)
@crossed(
    told=["-32-true", "lora-bf16-true"],
    change=["", "lora", "compiled"],
    precision=["32-true", "bf16-true", "bf16-mixed"],
)
def test_losses(change: str, precision: Any) -> None:
    """Of fused runs all placements agree; with plain runs they agree within rounding."""
    torch._dynamo.reset()
    fused = {"use_fused_kernels": True}
    tight = Lm(change=change)
    losses = _losses(tight, ElixirStrategy(**TIGHT, **fused), precision)
    handle = EngineHandle.of(tight)
    assert handle is not None
    assert handle.engine.stats().evictions > 0
    assert losses == _losses(Lm(change=change), ElixirStrategy(**fused), precision)
    plain = _losses(Lm(change=change), ElixirStrategy(**TIGHT), precision)
    assert losses == pytest.approx(plain, rel=1e-5 if precision == "32-true" else 1e-2)
    torch._dynamo.reset()


def test_accumulation_and_clipping() -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    fused = _losses(Lm("llama_tied"), ElixirStrategy(**TIGHT, use_fused_kernels=True), **options)
    assert fused == pytest.approx(_losses(Lm("llama_tied"), "auto", **options), rel=1e-5)


class LooksLater(Lm):
    """Returns all that the model gives, and looks at the logits once the batch is over."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.model(**batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append((outputs["logits"] * 1.0).square().mean().item())


@pytest.mark.parametrize("options", [TIGHT, full({})], ids=["tight", "resident"])
def test_logits_of_weights_that_have_changed_are_not_to_be_had(options: dict[str, Any]) -> None:
    model, plain = LooksLater(), LooksLater()
    accumulated = {"accumulate_grad_batches": 2, "num_sanity_val_steps": 0}
    with pytest.raises(StateError, match=r"after the weights that make them had changed.*outputs\.logits\.detach\(\)"):
        _fit(model, ElixirStrategy(**options, use_fused_kernels=True), **accumulated)
    _fit(plain, "auto", **accumulated)
    assert model.losses == pytest.approx(plain.losses[:1], rel=1e-5)  # of the batch that no step was behind


def test_the_model_is_plain_again_when_the_engine_goes(tmp_path: Any) -> None:
    model = Lm()
    trainer = _fit(model, ElixirStrategy(**TIGHT, use_fused_kernels="auto"))
    swapped = [m for m in model.model.modules() if "forward" in vars(m)]
    assert len(swapped) == 5 + 2 + 2  # norms, MLPs, the model and its last layer
    copied = copy.deepcopy(model)
    assert not [m for m in copied.model.modules() if "forward" in vars(m)]
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    _fit(model, ElixirStrategy(**TIGHT))  # other options: the engine is built anew
    assert not [m for m in model.model.modules() if "forward" in vars(m)]


def test_nothing_to_swap(caplog: pytest.LogCaptureFixture) -> None:
    data = make_data()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    with pytest.raises(PlanError, match="nothing can be swapped in Net"):
        Trainer(accelerator="cpu", strategy=ElixirStrategy(use_fused_kernels=True), **quiet).fit(Net(), data)
    with caplog.at_level(logging.INFO, "lightning_elixir"):
        Trainer(accelerator="cpu", strategy=ElixirStrategy(use_fused_kernels="auto"), **quiet).fit(Net(), data)
    assert "Net stays as it is" in caplog.text
    with pytest.raises(PlanError, match="must be True, False or 'auto'"):
        ElixirStrategy(use_fused_kernels="yes")  # type: ignore[arg-type]


@pytest.mark.full
def test_profiles_of_a_model_that_is_swapped_count_what_is_saved() -> None:
    """As the dry run of a fit has it, with the engine attached, whose copies are plain otherwise."""

    def step(model: Any, inp: Any) -> None:
        model.model(**inp).loss.backward()

    def bytes_of(model: LightningModule, *, use_fused_kernels: bool = False) -> int:
        return profile_memory(model, make_batch(0), step, use_fused_kernels=use_fused_kernels).activation_bytes

    model = Lm()
    before, expected = bytes_of(model), bytes_of(model, use_fused_kernels=True)
    _fit(model, ElixirStrategy(**TIGHT, use_fused_kernels=True))
    assert bytes_of(model) == expected < before


def _on_ranks() -> list[float]:
    model = Lm()
    data = DataLoader([make_batch(i) for i in range(4)], batch_size=None)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    strategy = ElixirStrategy(**TIGHT | {"gpu_memory_limit": "190KiB"}, use_fused_kernels=True)
    trainer = Trainer(
        accelerator="cpu", devices=2, max_epochs=1, strategy=strategy, use_distributed_sampler=False, **quiet
    )
    trainer.fit(model, data)
    handle = EngineHandle.of(model)
    assert handle is not None
    assert handle.engine.stats().evictions > 0
    return model.losses


@pytest.mark.full  # as tests/runtime/test_fused.py::test_two_ranks
def test_two_ranks() -> None:
    first, second = run_ranks(_on_ranks, 2, init_group=False)
    assert first == second
