"""Plans of the command, for a model that the LightningModule of the fit holds as a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_elixir import fabric
from lightning_elixir._lightning import Fabric, LightningModule, pl
from lightning_elixir.cli import main
from lightning_elixir.errors import PlanError
from lightning_elixir.plan.io import load_plan
from lightning_elixir.plan.prefixes import Prefix
from lightning_elixir.runtime.model_checks import check_names
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.dist import run_ranks
from tests.strategy.models import assert_same_state, make_optimizer, make_trainer

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 16,
}


class TokenNet(LightningModule):
    def __init__(self, *, has_more: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
        if has_more:
            self.head = nn.Linear(2, 2)
        self.losses: list[Tensor] = []

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        return make_optimizer("adamw", self.parameters(), 1e-2)


class NewLimit(pl.Callback):
    """One in which the given plan fits as well: it stays."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.strategy.set_memory_limit(gpu="1GiB")


def _save(path: Path, num_gpus: int = 1) -> Path:
    """A plan with room for four chunks at a time."""
    sizes = [f"{name}={value}" for name, value in SIZES.items()]
    arguments = ["--model", "llama", "--set", *sizes, "--batch-size", "2", "--seq-len", "8", "--precision", "32-true"]
    arguments += ["--policy", "cpu", "--chunk-size", "32KiB", "--cpu-memory", "4GiB", "--gpus", str(num_gpus)]
    assert main(["plan", *arguments, "--gpu-memory", "1GiB", "--save-plan", str(path)]) == 0
    roomy = load_plan(path)
    assert roomy.forecast is not None
    limit = roomy.forecast.peak_gpu_bytes - (roomy.rcache_blocks - 4) * roomy.block_bytes
    assert main(["plan", *arguments, "--gpu-memory", str(limit), "--save-plan", str(path)]) == 0
    return path


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    return _save(tmp_path / "plan.json")


def _fit(strategy: Any, model: TokenNet, **options: Any) -> Any:
    tokens = torch.randint(0, 64, (8, 8), generator=torch.Generator().manual_seed(1))
    trainer = make_trainer(strategy, **options)
    trainer.fit(model, DataLoader(tokens, batch_size=2))  # type: ignore[arg-type]
    return trainer.strategy


def test_a_fit_obeys_the_plan_of_the_command(plan_file: Path) -> None:
    expected = TokenNet()
    _fit("auto", expected)
    given, model = load_plan(plan_file), TokenNet()
    strategy = _fit(ElixirStrategy(plan=plan_file), model, callbacks=[NewLimit()])
    assert torch.equal(torch.stack(model.losses), torch.stack(expected.losses))
    assert_same_state(strategy.lightning_module_state_dict(), expected.state_dict())
    # It ran: chunks as in the file, under names of the module, and more of them than blocks
    names = [[m.fqn for m in chunk.members] for chunk in strategy.plan.chunks]
    assert names == [[f"model.{m.fqn}" for m in chunk.members] for chunk in given.chunks]
    assert strategy.plan.rcache_blocks == given.rcache_blocks < len(given.chunks)
    assert strategy.stats().evictions > 0


@pytest.mark.full
def test_what_is_trained_beside_the_part_is_named(plan_file: Path) -> None:
    with pytest.raises(
        PlanError,
        match=r"with 'model\.' before its names, it has no place for parameters: head\.weight, head\.bias;.*`--module`",
    ):
        _fit(ElixirStrategy(plan=plan_file), TokenNet(has_more=True))


def test_a_plan_of_a_larger_model_is_of_no_part_of_this_one(plan_file: Path) -> None:
    with pytest.raises(PlanError, match="has parameters that the model lacks: .*; make a new plan$"):
        check_names(load_plan(plan_file), {}, Prefix("model"))


@pytest.mark.full
def test_fabric_obeys_the_plan_of_a_module_that_holds_the_model(plan_file: Path) -> None:
    holding = _fit(ElixirStrategy(plan=plan_file), TokenNet()).plan
    strategy = fabric.ElixirStrategy(plan=holding)
    loop = Fabric(strategy=strategy, accelerator="cpu", devices=1)
    loop.launch()
    results = []
    for is_plain in (True, False):
        model: nn.Module = TokenNet().model
        optimizer = make_optimizer("adamw", model.parameters(), 1e-2)
        if not is_plain:
            model, optimizer = loop.setup(model, optimizer)
        for tokens in torch.arange(32).view(2, 2, 8):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward() if is_plain else loop.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            results.append(loss.detach().clone())
    assert results[2:] == results[:2]
    given = load_plan(plan_file)
    assert [c.members for c in strategy.plan.chunks] == [c.members for c in given.chunks]
    assert strategy.stats().evictions > 0


def _fits_on_ranks(path: str) -> Any:
    runs = []
    for strategy in ("ddp", ElixirStrategy(plan=path)):
        model = TokenNet()
        used = _fit(strategy, model, devices=2, callbacks=[] if strategy == "ddp" else [NewLimit()])
        state = used.lightning_module_state_dict()
        runs.append((model.losses, {name: value.clone() for name, value in state.items()}))
    return runs, used.stats().evictions, used.plan.world_size


@pytest.mark.full
def test_on_two_ranks(tmp_path: Path) -> None:
    path = _save(tmp_path / "plan.json", 2)
    told = run_ranks(_fits_on_ranks, 2, str(path), init_group=False)
    for (plain, ours), evictions, world_size in told:
        assert ours[0] == plain[0]
        assert (evictions > 0, world_size) == (True, 2)
    assert_same_state(told[0][0][1][1], told[0][0][0][1])
