"""Language models with fused operators beside plain ones: bodies of tests on the CPU and on a GPU."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_elixir.fused import fuse
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.plans import make_plan
from tests.helpers.releases import need_experts_in_one_module

VOCABULARY, LENGTH = 300, 40
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = ("llama", "llama_tied", "qwen3", "gemma", "gpt2", "granite", "cohere", "qwen3_moe")


def make_lm(family: str = "llama", seed: int = 0) -> Any:
    """A tiny model of transformers, in fp32 on the CPU."""
    import transformers as hf

    torch.manual_seed(seed)
    if family == "gpt2":
        shape = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1}
        config = hf.GPT2Config(**shape, eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return hf.GPT2LMHeadModel(config)
    if family == "gemma":
        return hf.GemmaForCausalLM(hf.GemmaConfig(**_SHAPE))
    if family == "granite":
        return hf.GraniteForCausalLM(hf.GraniteConfig(**_SHAPE, logits_scaling=13.0))
    if family == "cohere":
        return hf.CohereForCausalLM(hf.CohereConfig(**_SHAPE, logit_scale=0.3))
    if family == "opt":
        shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2}
        config = hf.OPTConfig(**shape, num_attention_heads=4, word_embed_proj_dim=32, dropout=0.0)
        return hf.OPTForCausalLM(config)
    if family == "qwen3_moe":
        need_experts_in_one_module()
        # Each token has all experts: which ones it gets otherwise changes by jumps where rounding does.
        more = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 4}
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_SHAPE, **more, tie_word_embeddings=False))
    if family == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_SHAPE, tie_word_embeddings=False))
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_SHAPE, tie_word_embeddings=family == "llama_tied"))


def make_batch(seed: int, device: str = "cpu") -> dict[str, Tensor]:
    """Tokens and labels; some labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (8, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[0, : LENGTH // 2] = -100
    return {"input_ids": tokens.to(device), "labels": labels.to(device)}


def gradients(model: nn.Module, batch: dict[str, Tensor], autocast: torch.dtype | None = None) -> dict[str, Tensor]:
    """Of one backward, in fp32, with the loss as "loss"."""
    device = next(iter(batch.values())).device.type
    with nullcontext() if autocast is None else torch.autocast(device, autocast):
        loss = model(**batch).loss
    loss.backward()
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "loss": loss.detach().float()}


def fused_beside_plain(
    family: str, dtype: torch.dtype, device: str = "cpu", autocast: torch.dtype | None = None
) -> tuple[float, float]:
    """How far gradients of a fused, and of a plain model are from those of the plain one in fp64: the largest error of
    a tensor, relative to its norm."""
    plain = make_lm(family).to(dtype).to(device)
    batch = make_batch(1, device)
    wide = copy.deepcopy(plain).double()
    wide.config._experts_implementation = "eager"  # torch has no grouped products of fp64
    exact = gradients(wide, batch)
    fused = copy.deepcopy(plain)
    swapped = fuse(fused, True, torch.device(device))
    assert swapped.counts["linear cross-entropy", type(plain).__name__] == 1
    by_fused, by_plain = gradients(fused, batch, autocast), gradients(plain, batch, autocast)
    assert by_fused.keys() == by_plain.keys() == exact.keys()

    def error(found: dict[str, Tensor]) -> float:
        return max(((found[n] - exact[n]).norm() / exact[n].norm()).item() for n in exact)

    return error(by_fused), error(by_plain)


def train_fused_plain(model: nn.Module, steps: int, dtype: torch.dtype, device: str = "cpu", micro: int = 1) -> Any:
    """Plain PyTorch with swapped operators, 16-bit parameters being copies of an fp32 master if `dtype` is one."""
    fuse(model, True, torch.device(device))
    model.to(device)
    master = [p.detach().clone().float() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():  # not buffers, which the engine leaves as they are
            parameter.data = parameter.to(dtype)
    optimizer = torch.optim.AdamW(master, lr=1e-2, foreach=False)
    losses = []
    for step in range(steps):
        for index in range(micro):
            loss = model(**make_batch(step * micro + index, device)).loss / micro
            loss.backward()
            losses.append(loss.item())
        for one, parameter in zip(master, model.parameters(), strict=True):
            one.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for one, parameter in zip(master, model.parameters(), strict=True):
                parameter.copy_(one)
    return losses, master


def train_fused_elixir(
    model: nn.Module, steps: int, dtype: torch.dtype, device: str = "cpu", micro: int = 1, **options: Any
) -> Any:
    """The engine with few blocks."""
    plan = make_plan(model, **{"placement_policy": "cpu", "chunk_size": 32 * 1024, "compute_dtype": dtype, **options})
    module = ElixirModule(model, plan, dtype=dtype, use_fused_kernels=True, device=device)
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
    losses = []
    for step in range(steps):
        for index in range(micro):
            loss = module(**make_batch(step * micro + index, device)).loss / micro
            optimizer.backward(loss)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, module
