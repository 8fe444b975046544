"""Shapes of well-known public models, as changes to the defaults of their transformers config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shape = tuple[str, Mapping[str, Any]]
"""Model type of transformers, and entries of its config."""


def _opt(layers: int, width: int, heads: int) -> Shape:
    sizes = {"hidden_size": width, "word_embed_proj_dim": width, "ffn_dim": 4 * width}
    return "opt", {**sizes, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": 50272}


def _llama_2(layers: int, width: int, inner: int, heads: int, kv_heads: int) -> Shape:
    sizes = {"hidden_size": width, "intermediate_size": inner, "max_position_embeddings": 4096, "vocab_size": 32000}
    return "llama", {
        **sizes,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


SHAPES: Mapping[str, Shape] = {
    "gpt2": ("gpt2", {}),
    "gpt2-xl": ("gpt2", {"n_layer": 48, "n_embd": 1600, "n_head": 25}),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-30b": _opt(48, 7168, 56),
    "opt-175b": _opt(96, 12288, 96),
    "llama-2-7b": _llama_2(32, 4096, 11008, 32, 32),
    "llama-2-13b": _llama_2(40, 5120, 13824, 40, 40),
    "llama-2-70b": _llama_2(80, 8192, 28672, 64, 8),
    "mixtral-8x7b": (
        "mixtral",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32000,
        },
    ),
}
