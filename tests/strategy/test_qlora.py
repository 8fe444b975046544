"""LoRA over quantised bases: transformers, peft, bitsandbytes and torchao, with the numbers of plain Lightning."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_elixir._lightning import pl
from lightning_elixir.checkpoint.consolidate import consolidate
from lightning_elixir.core.shells import tensors_inside
from lightning_elixir.errors import PlanError
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import crossed, telling
from tests.strategy.models import make_trainer

# To import them takes a second, in every test process.
for _package in ("peft", "bitsandbytes", "torchao"):
    if find_spec(_package) is None:
        pytest.skip(f"{_package} is not installed", allow_module_level=True)

TOKENS = 64
CHUNK = {"chunk_size": "8KiB"}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "auto": {**CHUNK},
    "tight": {**CHUNK, "placement_policy": "cpu", "gpu_memory_limit": "90KiB"},
    "cuda": {**CHUNK, "placement_policy": "cuda"},
    "nvme": {
        **CHUNK,
        "placement_policy": "cpu",
        "nvme_offload_fraction": 1.0,
        "nvme_offload_param_fraction": 1.0,
        "nvme_offload_dir": "states",
    },
}


def _to_4bit(model: nn.Module) -> None:
    import bitsandbytes

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                layer = bitsandbytes.nn.Linear4bit(
                    child.in_features, child.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
                )
                layer.load_state_dict({"weight": child.weight.data})
                setattr(module, name, layer.to("cpu"))
    model.is_loaded_in_4bit = True  # type: ignore[assignment]


def _by_torchao(model: nn.Module, kind: str) -> None:
    import torchao.quantization as quantization
    from torchao.quantization.granularity import PerGroup

    config = {
        "int8": lambda: quantization.Int8WeightOnlyConfig(),
        "int4": lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16)),
        "fp8": lambda: quantization.Float8WeightOnlyConfig(),
    }[kind]()
    quantization.quantize_(model, config, lambda m, name: isinstance(m, nn.Linear) and "lm_head" not in name)


def make(kind: str, is_checkpointed: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=TOKENS,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    if kind == "4bit":
        _to_4bit(model)
    elif kind != "none":
        _by_torchao(model, kind)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    lora = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_alpha=8))
    for name, parameter in lora.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return lora


class QLoRA(pl.LightningModule):
    def __init__(self, kind: str, is_checkpointed: bool) -> None:
        super().__init__()
        self.model = make(kind, is_checkpointed)
        self.losses: list[float] = []

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        from lightning_elixir import HybridAdam

        return HybridAdam([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def data() -> torch.utils.data.DataLoader[Any]:
    tokens = torch.randint(0, TOKENS, (16, 8), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(tokens, batch_size=4)  # type: ignore[arg-type]


def trained(strategy: Any, kind: str, is_checkpointed: bool = False, **options: Any) -> tuple[QLoRA, Any]:
    pl.seed_everything(2, verbose=False)
    module = QLoRA(kind, is_checkpointed)
    if strategy == "ddp":  # which cannot send such weights
        frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, frozen)
    trainer = make_trainer(strategy, **options)
    trainer.fit(module, data())
    state = trainer.strategy.lightning_module_state_dict()
    return module, {k: v for k, v in state.items() if "lora" in k}


def assert_same(actual: tuple[QLoRA, Any], expected: tuple[QLoRA, Any]) -> None:
    assert actual[0].losses == expected[0].losses
    assert [k for k, v in expected[1].items() if not torch.equal(actual[1][k], v)] == []


@pytest.mark.filterwarnings("ignore")
@crossed(told=["tight-int8-True"], placement=PLACEMENTS, kind=["4bit", "int8"], is_checkpointed=[False, True])
def test_as_plain_peft(kind: str, placement: str, is_checkpointed: bool) -> None:
    strategy = ElixirStrategy(**PLACEMENTS[placement])
    actual = trained(strategy, kind, is_checkpointed)
    assert_same(actual, trained("auto", kind, is_checkpointed))
    if placement == "tight":
        assert strategy.stats().evictions > 0
    assert not strategy.plan.ignored
    assert "uint8" in {c.dtype for c in strategy.plan.chunks}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("limit", telling(["64KiB", "100KiB"], "64KiB"))
def test_what_checkpointing_keeps_is_planned_for(limit: str) -> None:
    """A layer that is recomputed needs all of its weights at once, frozen ones too: chunks are cut by that."""
    strategy = ElixirStrategy(gpu_memory_limit=limit)
    assert_same(trained(strategy, "none", True), trained("auto", "none", True))
    stats = strategy.stats()
    assert stats.evictions > 0
    assert stats.overflows == 0
    assert stats.peak_blocks == strategy.plan.rcache_blocks


def on_ranks(kind: str) -> None:
    actual = trained(ElixirStrategy(**PLACEMENTS["tight"]), kind, devices=2)
    expected = trained(ElixirStrategy(**PLACEMENTS["cuda"]), kind, devices=2)
    assert actual[0].losses == expected[0].losses
    plain = trained("ddp", kind, devices=2)
    assert actual[0].losses == pytest.approx(plain[0].losses, rel=1e-5)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["4bit", "int8"])
def test_on_two_ranks(kind: str) -> None:
    run_ranks(on_ranks, 2, kind, init_group=False)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_other_classes_of_torchao(kind: str, precision: Any) -> None:
    strategy = ElixirStrategy(**PLACEMENTS["tight"])
    actual = trained(strategy, kind, True, precision=precision)
    assert not strategy.plan.ignored
    assert strategy.stats().evictions > 0
    if precision == "32-true":
        assert_same(actual, trained("auto", kind, True))
    else:  # parameters in 16 bits are another scheme than plain Lightning's casts: placements agree
        assert_same(actual, trained(ElixirStrategy(**PLACEMENTS["cuda"]), kind, True, precision=precision))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["full", pytest.param("sharded", marks=pytest.mark.full)])
def test_saved_and_gone_on_from(form: str) -> None:
    plain = QLoRA("int8", False)
    make_trainer("auto", max_epochs=2).fit(plain, data())
    module = QLoRA("int8", False)
    trainer = make_trainer(ElixirStrategy(**PLACEMENTS["tight"], state_dict_type=form))
    trainer.fit(module, data())
    trainer.save_checkpoint("half.ckpt")
    for placement in ("tight", "cuda"):
        other = QLoRA("int8", False)
        for parameter in other.parameters():
            for inside in tensors_inside(parameter.data):
                inside.zero_()
        strategy = ElixirStrategy(**PLACEMENTS[placement], state_dict_type=form)
        make_trainer(strategy, max_epochs=2).fit(other, data(), ckpt_path="half.ckpt", weights_only=False)
        assert module.losses + other.losses == plain.losses
    if form == "full":
        state = torch.load("half.ckpt", weights_only=False)["state_dict"]
        plain.load_state_dict(state)
        plain.training_step(next(iter(data())), 0)
        assert plain.losses[-1] == other.losses[0]
    else:
        with pytest.raises(PlanError, match=r"holds 28 quantised parameters as bytes \(model.*Int8Tensor"):
            consolidate(Path("half.ckpt"), Path("one.ckpt"), max_file_bytes=2**30, weights_only=False)


def test_what_is_not_quantised_yet() -> None:
    import bitsandbytes

    from tests.helpers.plans import make_plan

    layer = bitsandbytes.nn.Linear4bit(32, 32, bias=False)
    layer.weight.requires_grad_(False)
    with pytest.raises(PlanError, match=r"are not quantised yet, .* call .to\('cpu'\)"):
        make_plan(nn.Sequential(layer))
