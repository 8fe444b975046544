"""Models whose work ranks share, under a real Trainer, and the plain Trainer on one process with all batches."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_elixir import ElixirStrategy, HybridAdam
from lightning_elixir._lightning import LightningModule, Trainer
from tests.helpers.patterns import VOCABULARY, Language, Mixture

TIGHT = {"placement_policy": "cpu", "chunk_size": 9000}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
OF_LLAMA = {
    "self_attn.q_proj": ColwiseParallel,
    "self_attn.k_proj": ColwiseParallel,
    "self_attn.v_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}


def make(kind: str) -> nn.Module:
    """A model by its name, up to a "+"; with activation checkpointing where the name ends with "checkpointed", with a
    frozen embedding where it begins with "frozen"."""
    torch.manual_seed(5)
    kind, is_checkpointed = kind.partition("+")[0], kind.endswith("checkpointed")
    if kind in ("language", "mixture", "gated"):
        return Language(is_mixture=kind == "mixture", is_checkpointed=is_checkpointed, is_gated=kind == "gated")
    transformers = pytest.importorskip("transformers")
    if kind == "mixtral":
        config = transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
        return transformers.MixtralForCausalLM(config)
    if kind == "phi_lora":
        config = transformers.Phi3Config(**{**SMALL, "pad_token_id": 0})
        layers = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head", "embed_tokens"]
        return _adapted(transformers.Phi3ForCausalLM(config), layers)
    if kind == "apertus":
        return transformers.ApertusForCausalLM(transformers.ApertusConfig(**SMALL))
    if kind in ("qwen3_moe", "lora_of_experts"):
        more = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL, **more))
        if kind == "qwen3_moe":
            return model
        experts = [n for n, _ in model.named_parameters() if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]
        if experts:  # each in one parameter: from transformers 5 on
            return _adapted(model, ["q_proj", "o_proj"], target_parameters=experts)
        return _adapted(model, ["q_proj", "o_proj", "down_proj"])
    options = {**SMALL, "vocab_size": 63 if kind == "uneven" else 64}
    # parallelize_module() makes two parameters of one that is tied.
    config = transformers.LlamaConfig(**options, tie_word_embeddings=not kind.endswith("untied_llama"))
    model = transformers.LlamaForCausalLM(config)
    model.get_input_embeddings().requires_grad_(not kind.startswith("frozen"))
    if is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    return _adapted(model, ["q_proj", "o_proj", "down_proj"]) if kind == "lora" else model


def _adapted(model: nn.Module, targets: list[str], **more: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **more)
    made: nn.Module = peft.get_peft_model(model, config)
    return made


def cut_by_torch(net: Any, mesh: Any) -> None:
    """`parallelize_module` over a Llama, or over the attention of a mixture; or over a dense `Language`, whose
    activations between blocks are cut along the sequence then."""
    if isinstance(net, Language) and any(isinstance(layer.feed, Mixture) for layer in net.layers):
        for layer in net.layers:
            parallelize_module(layer.attention, mesh, {"[qkv]": ColwiseParallel(), "o": RowwiseParallel()})
        return
    if not isinstance(net, Language):
        plan: dict[str, Any] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(net, mesh, plan)
        for layer in net.model.layers:
            parallelize_module(layer, mesh, {name: style() for name, style in OF_LLAMA.items()})
        return
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(net, mesh, plan)
    for layer in net.layers:
        whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        of_layer: dict[str, Any] = {"first": SequenceParallel(), "second": SequenceParallel()}
        of_layer |= {"attention": whole, "feed": whole, "attention.[qkv]": ColwiseParallel()}
        of_layer |= {"attention.o": RowwiseParallel(output_layouts=Shard(1))}
        for name, _ in layer.feed.named_children():
            if name.startswith(("up", "gate")):
                of_layer[f"feed.{name}"] = ColwiseParallel()
            elif name.startswith("down"):
                of_layer[f"feed.{name}"] = RowwiseParallel(output_layouts=Shard(1))
        parallelize_module(layer, mesh, of_layer)


class Tokens(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, 63, (8,), generator=torch.Generator().manual_seed(index))


class Model(LightningModule):
    """A model by its name; "llama+dtensors": cut by `parallelize_module`, "llama+compiled": by its blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = make(self.kind)
            if self.kind.endswith("+compiled"):
                self.net.compile(backend="aot_eager")
            if "+dtensors" in self.kind:
                cut_by_torch(self.net, self.device_mesh["tensor_parallel"])

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        assert self.net is not None
        if isinstance(self.net, Language):
            return self.net(batch % VOCABULARY)
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("loss", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return HybridAdam(trained, lr=1e-2, eps=1e-3, weight_decay=0.05)


def trainer_of(strategy: Any, devices: int, accelerator: str = "cpu", **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "use_distributed_sampler": False}
    return Trainer(strategy=strategy, accelerator=accelerator, devices=devices, max_epochs=2, **{**quiet, **options})


def fit_plain(kind: str, batches: int, accelerator: str = "cpu", **options: Any) -> dict[str, Tensor]:
    """Train on one device, by batches of so many ranks' together."""
    model = Model(kind.replace("+dtensors", "+"))
    model.configure_model()  # here: the Trainer would draw the weights on the GPU, and otherwise
    trainer = trainer_of("auto", 1, accelerator, gradient_clip_val=1.0, **options)
    trainer.fit(model, DataLoader(Tokens(), batch_size=2 * batches))
    return {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}


def fit(
    kind: str,
    tensor: int,
    expert: int,
    options: dict[str, Any],
    of_trainer: dict[str, Any],
    accelerator: str = "cpu",
) -> Any:
    """What every rank returns: the whole state, and how many replicas were evicted."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    model, folder = Model(kind), options.pop("report_dir", None)
    strategy = ElixirStrategy(
        tensor_parallel_size=tensor, expert_parallel_size=expert, report_dir=folder, **{**TIGHT, **options}
    )
    sampler = DistributedSampler(Tokens(), num_replicas=world // tensor, rank=rank // tensor, shuffle=False)
    trainer = trainer_of(strategy, world, accelerator, gradient_clip_val=1.0, **of_trainer)
    trainer.fit(model, DataLoader(Tokens(), batch_size=2, sampler=sampler))
    evictions = strategy.stats().evictions
    return {k: v.clone() for k, v in strategy.lightning_module_state_dict().items()}, evictions
