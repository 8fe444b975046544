"""Models that `parallelize_module` has cut in `configure_model`, and the plain Trainer on one process."""

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
from lightning_elixir.errors import PlanError
from tests.helpers.dist import run_ranks
from tests.helpers.patterns import Language, difference

CLOSE = 1e-5
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
LAYER = {
    "self_attn.[qkv]_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}


def parallel_llama(net: Any, mesh: Any) -> None:
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(net, mesh, plan)
    for layer in net.model.layers:
        parallelize_module(layer, mesh, {name.replace("[qkv]", k): style() for name, style in LAYER.items() for k in "qkv"})


def parallel_language(net: Language, mesh: Any) -> None:
    """Activations between the blocks are cut along the sequence."""
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(net, mesh, plan)
    for layer in net.layers:
        whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        of_layer: dict[str, Any] = {"first": SequenceParallel(), "second": SequenceParallel()}
        of_layer |= {"attention": whole, "feed": whole, "attention.[qkv]": ColwiseParallel()}
        of_layer |= {"attention.o": RowwiseParallel(output_layouts=Shard(1)), "feed.up": ColwiseParallel()}
        of_layer |= {"feed.down": RowwiseParallel(output_layouts=Shard(1))}
        parallelize_module(layer, mesh, of_layer)


class Tokens(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, 24, (8,), generator=torch.Generator().manual_seed(index))


class Model(LightningModule):
    def __init__(self, kind: str, is_cut: bool) -> None:
        super().__init__()
        self.kind, self.is_cut = kind, is_cut
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(5)
        if self.kind.startswith("llama"):
            transformers = pytest.importorskip("transformers")
            self.net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
            if self.kind == "llama-checkpointed":
                self.net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                self.net.train()
        else:
            self.net = Language(is_mixture=False, is_checkpointed="checkpointed" in self.kind)
        if self.is_cut:
            cut = parallel_llama if self.kind.startswith("llama") else parallel_language
            cut(self.net, self.device_mesh["tensor_parallel"])

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.kind.startswith("llama"):
            return self.net(input_ids=batch, labels=batch).loss
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        return HybridAdam([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-3, weight_decay=0.05)


def trainer_of(strategy: Any, devices: int, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "use_distributed_sampler": False}
    return Trainer(strategy=strategy, accelerator="cpu", devices=devices, max_epochs=2, **{**quiet, **options})


def fit_plain(kind: str, batches: int, **options: Any) -> dict[str, Tensor]:
    model = Model(kind, is_cut=False)
    trainer_of("auto", 1, gradient_clip_val=1.0, **options).fit(model, DataLoader(Tokens(), batch_size=2 * batches))
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def fit(kind: str, options: dict[str, Any], of_trainer: dict[str, Any]) -> Any:
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    model = Model(kind, is_cut=True)
    strategy = ElixirStrategy(tensor_parallel_size=2, **{**TIGHT, **options})
    sampler = DistributedSampler(Tokens(), num_replicas=world // 2, rank=rank // 2, shuffle=False)
    trainer = trainer_of(strategy, world, gradient_clip_val=1.0, **of_trainer)
    trainer.fit(model, DataLoader(Tokens(), batch_size=2, sampler=sampler))
    evictions = strategy.stats().evictions
    return {k: v.clone() for k, v in strategy.lightning_module_state_dict().items()}, evictions


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # the name that all versions have
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["llama", "llama-checkpointed", "language", "language-checkpointed"])
def test_equals_plain_training(kind: str, world: int) -> None:
    expected = fit_plain(kind, world // 2)
    found, evictions = run_ranks(fit, world, kind, {}, {}, init_group=False)[0]
    assert evictions > 0
    assert difference(found, expected) < CLOSE


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "auto_in_little_memory": ({"placement_policy": "auto", "gpu_memory_limit": "250KiB"}, {}),
    "resident": ({"placement_policy": "cuda"}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 2}),
    "states_on_nvme": ({"nvme_offload_fraction": 0.5, "nvme_offload_dir": "states"}, {}),
    "recomputed": ({"activations": "recompute"}, {}),
    "offloaded": ({"activations": "offload"}, {}),
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("kind", ["llama", "language"])
def test_under_options(kind: str, way: str) -> None:
    options, of_trainer = WAYS[way]
    expected = fit_plain(kind, 1, **of_trainer)
    found, evictions = run_ranks(fit, 2, kind, options, of_trainer, init_group=False)[0]
    assert evictions > 0 or way == "resident"
    assert difference(found, expected) < CLOSE
