"""Shapes of well-known public models, as changes to the defaults of their transformers config."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_elixir.errors import PlanError

Shape = tuple[str, Mapping[str, Any]]
"""Model type of transformers, and entries of its config."""

# What names of published files end with, and what says nothing of the shape.
_ENDINGS = re.compile(
    r"-(hf|it|pt|base|instruct|thinking|chat|preview|bf16|fp8|bnb|4bit|\d+k|20\d\d|\d{4}|v\d+(\.\d+)?)$"
)
_MAKERS = re.compile(r"^(meta|google|openai|microsoft|mistralai|deepseek-ai)-")
_SUBJECTS = re.compile(r"(?<=^qwen2\.5)-(coder|math)(?=-)|(?<=^qwen3)-coder(?=-30b)")


def _opt(layers: int, width: int, heads: int) -> Shape:
    sizes = {"hidden_size": width, "word_embed_proj_dim": width, "ffn_dim": 4 * width}
    return "opt", {**sizes, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": 50272}


def _decoder(
    kind: str, layers: int, widths: tuple[int, int], heads: tuple[int, int], vocabulary: int, **more: Any
) -> Shape:
    """A decoder in the style of Llama.

    Args:
        kind: Model type.
        widths: Of the model, and inside its MLP.
        heads: Of queries, and of keys and values.
        more: Further entries.
    """
    entries = {
        "hidden_size": widths[0],
        "intermediate_size": widths[1],
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocabulary,
        **more,
    }
    return kind, entries


def _llama_3(layers: int, widths: tuple[int, int], heads: tuple[int, int], **more: Any) -> Shape:
    return _decoder("llama", layers, widths, heads, 128256, max_position_embeddings=131072, **more)


def _qwen_2(layers: int, widths: tuple[int, int], heads: tuple[int, int], *, is_tied: bool) -> Shape:
    vocabulary = 151936 if is_tied else 152064
    return _decoder("qwen2", layers, widths, heads, vocabulary, tie_word_embeddings=is_tied)


def _qwen_3(layers: int, widths: tuple[int, int], heads: tuple[int, int], *, is_tied: bool = False) -> Shape:
    return _decoder("qwen3", layers, widths, heads, 151936, head_dim=128, tie_word_embeddings=is_tied)


def _qwen_3_moe(layers: int, widths: tuple[int, int], heads: tuple[int, int]) -> Shape:
    width, expert = widths
    experts = {"moe_intermediate_size": expert, "num_experts": 128, "num_experts_per_tok": 8}
    return _decoder(
        "qwen3_moe", layers, (width, 3 * width), heads, 151936, head_dim=128, tie_word_embeddings=False, **experts
    )


def _gemma(kind: str, layers: int, widths: tuple[int, int], heads: tuple[int, int], head_dim: int = 256) -> Shape:
    vocabulary = 262144 if kind == "gemma3_text" else 256000
    return _decoder(kind, layers, widths, heads, vocabulary, head_dim=head_dim)


def _gpt_oss(layers: int, experts: int) -> Shape:
    more = {"head_dim": 64, "num_local_experts": experts, "num_experts_per_tok": 4}
    return _decoder("gpt_oss", layers, (2880, 2880), (64, 8), 201088, **more)


def _deepseek(
    kind: str, layers: int, widths: tuple[int, int, int], experts: tuple[int, int, int], **more: Any
) -> Shape:
    """
    Args:
        widths: Of the model, of its dense MLPs, of an expert.
        experts: Routed, shared, and how many of the routed a token takes.
    """
    width, dense, expert = widths
    routed, shared, taken = experts
    entries = {
        "moe_intermediate_size": expert,
        "n_routed_experts": routed,
        "n_shared_experts": shared,
        "num_experts_per_tok": taken,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    heads = more.pop("heads")
    return _decoder(kind, layers, (width, dense), (heads, heads), more.pop("vocabulary"), **entries, **more)


SHAPES: Mapping[str, Shape] = {
    "gpt2": ("gpt2", {}),
    "gpt2-xl": ("gpt2", {"n_layer": 48, "n_embd": 1600, "n_head": 25}),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-30b": _opt(48, 7168, 56),
    "opt-175b": _opt(96, 12288, 96),
    "llama-2-7b": _decoder("llama", 32, (4096, 11008), (32, 32), 32000, max_position_embeddings=4096),
    "llama-2-13b": _decoder("llama", 40, (5120, 13824), (40, 40), 32000, max_position_embeddings=4096),
    "llama-2-70b": _decoder("llama", 80, (8192, 28672), (64, 8), 32000, max_position_embeddings=4096),
    "llama-3-8b": _llama_3(32, (4096, 14336), (32, 8)),
    "llama-3-70b": _llama_3(80, (8192, 28672), (64, 8)),
    "llama-3.1-8b": _llama_3(32, (4096, 14336), (32, 8)),
    "llama-3.1-70b": _llama_3(80, (8192, 28672), (64, 8)),
    "llama-3.1-405b": _llama_3(126, (16384, 53248), (128, 8)),
    "llama-3.2-1b": _llama_3(16, (2048, 8192), (32, 8), head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _llama_3(28, (3072, 8192), (24, 8), head_dim=128, tie_word_embeddings=True),
    "llama-3.3-70b": _llama_3(80, (8192, 28672), (64, 8)),
    "qwen2.5-0.5b": _qwen_2(24, (896, 4864), (14, 2), is_tied=True),
    "qwen2.5-1.5b": _qwen_2(28, (1536, 8960), (12, 2), is_tied=True),
    "qwen2.5-3b": _qwen_2(36, (2048, 11008), (16, 2), is_tied=True),
    "qwen2.5-7b": _qwen_2(28, (3584, 18944), (28, 4), is_tied=False),
    "qwen2.5-14b": _qwen_2(48, (5120, 13824), (40, 8), is_tied=False),
    "qwen2.5-32b": _qwen_2(64, (5120, 27648), (40, 8), is_tied=False),
    "qwen2.5-72b": _qwen_2(80, (8192, 29568), (64, 8), is_tied=False),
    "qwen3-0.6b": _qwen_3(28, (1024, 3072), (16, 8), is_tied=True),
    "qwen3-1.7b": _qwen_3(28, (2048, 6144), (16, 8), is_tied=True),
    "qwen3-4b": _qwen_3(36, (2560, 9728), (32, 8), is_tied=True),
    "qwen3-8b": _qwen_3(36, (4096, 12288), (32, 8)),
    "qwen3-14b": _qwen_3(40, (5120, 17408), (40, 8)),
    "qwen3-32b": _qwen_3(64, (5120, 25600), (64, 8)),
    "qwen3-30b-a3b": _qwen_3_moe(48, (2048, 768), (32, 4)),
    "qwen3-235b-a22b": _qwen_3_moe(94, (4096, 1536), (64, 4)),
    "mistral-7b": _decoder("mistral", 32, (4096, 14336), (32, 8), 32000),
    "mistral-nemo-12b": _decoder("mistral", 40, (5120, 14336), (32, 8), 131072, head_dim=128),
    "mistral-small-24b": _decoder("mistral", 40, (5120, 32768), (32, 8), 131072, head_dim=128),
    "mistral-large-123b": _decoder("mistral", 88, (12288, 28672), (96, 8), 32768),
    "mixtral-8x7b": _decoder("mixtral", 32, (4096, 14336), (32, 8), 32000, num_local_experts=8, num_experts_per_tok=2),
    "mixtral-8x22b": _decoder("mixtral", 56, (6144, 16384), (48, 8), 32768, num_local_experts=8, num_experts_per_tok=2),
    "gemma-2b": _gemma("gemma", 18, (2048, 16384), (8, 1)),
    "gemma-7b": _gemma("gemma", 28, (3072, 24576), (16, 16)),
    "gemma-2-2b": _gemma("gemma2", 26, (2304, 9216), (8, 4)),
    "gemma-2-9b": _gemma("gemma2", 42, (3584, 14336), (16, 8)),
    "gemma-2-27b": _gemma("gemma2", 46, (4608, 36864), (32, 16), 128),
    "gemma-3-1b": _gemma("gemma3_text", 26, (1152, 6912), (4, 1)),
    "gemma-3-4b": _gemma("gemma3_text", 34, (2560, 10240), (8, 4)),
    "gemma-3-12b": _gemma("gemma3_text", 48, (3840, 15360), (16, 8)),
    "gemma-3-27b": _gemma("gemma3_text", 62, (5376, 21504), (32, 16), 128),
    "phi-2": _decoder("phi", 32, (2560, 10240), (32, 32), 51200, tie_word_embeddings=False),
    "phi-3-mini": _decoder("phi3", 32, (3072, 8192), (32, 32), 32064),
    "phi-3-medium": _decoder("phi3", 40, (5120, 17920), (40, 10), 32064),
    "phi-3.5-moe": _decoder("phimoe", 32, (4096, 6400), (32, 8), 32064, num_local_experts=16, num_experts_per_tok=2),
    "phi-4": _decoder("phi3", 40, (5120, 17920), (40, 10), 100352),
    "phi-4-mini": _decoder("phi3", 32, (3072, 8192), (24, 8), 200064, tie_word_embeddings=True),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "deepseek-llm-7b": _decoder("llama", 30, (4096, 11008), (32, 32), 102400),
    "deepseek-v2-lite": _deepseek(
        "deepseek_v2",
        27,
        (2048, 10944, 1408),
        (64, 2, 6),
        heads=16,
        vocabulary=102400,
        q_lora_rank=None,
        first_k_dense_replace=1,
    ),
    "deepseek-v2": _deepseek(
        "deepseek_v2",
        60,
        (5120, 12288, 1536),
        (160, 2, 6),
        heads=128,
        vocabulary=102400,
        q_lora_rank=1536,
        first_k_dense_replace=1,
    ),
    "deepseek-v3": _deepseek(
        "deepseek_v3",
        61,
        (7168, 18432, 2048),
        (256, 1, 8),
        heads=128,
        vocabulary=129280,
        q_lora_rank=1536,
        first_k_dense_replace=3,
    ),
}
SHAPES_ALIKE: Mapping[str, str] = {
    "deepseek-v3.1": "deepseek-v3",
    "deepseek-r1": "deepseek-v3",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.3-70b",
    "deepseek-r1-distill-qwen-7b": "qwen2.5-7b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b",
    "deepseek-r1-distill-qwen-32b": "qwen2.5-32b",
    "mistral-nemo": "mistral-nemo-12b",
    "phi-3.5-mini": "phi-3-mini",
}
"""Further names."""


def shape_name(name: str) -> str | None:
    """The name in `SHAPES` that this one means, however it is written: that of a repository, with or without what the
    weights were made for at its end. None: there is none."""
    text = _SUBJECTS.sub("", _MAKERS.sub("", name.lower().rpartition("/")[2]))
    while (shorter := _ENDINGS.sub("", text)) != text and _squeezed(text) not in _BY_LETTERS:
        text = shorter
    return _BY_LETTERS.get(_squeezed(text))


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Of the known names those that are most like it, the most similar first."""
    by_letters = {each.lower(): each for each in known}
    like = difflib.get_close_matches(name.lower().rpartition("/")[2], list(by_letters), count, 0.5)
    return [by_letters[each] for each in like]


def unknown_name(name: str, model_types: Iterable[str]) -> str:
    """What is told of a name that stands for no model.

    Args:
        model_types: Of transformers.
    """
    if name.startswith("Auto"):
        return f"{name} takes any model: give the name of one, a config file, or a class such as LlamaForCausalLM"
    if name.endswith("/") or name.startswith(("/", "./", "../", "~")):
        return f"there is no folder or file {name}: give a folder with a config.json, or a config file (FILE.json)"
    classes = (each for each in _transformers_names() if "For" in each) if _may_be_class(name) else ()
    like = nearest(name, dict.fromkeys([*SHAPES, *model_types, *classes]))
    hint = f" Do you mean {' or '.join(like)}?" if like else ""
    return (
        f"no model {name!r}.{hint} Known are {', '.join(SHAPES)}, every model type of transformers and its classes"
        " (LlamaForCausalLM), config files (FILE.json) and folders with a config.json. A model of your own: --module"
    )


def refuse_unknown(name: str) -> None:
    """Refuse what stands for no model, as far as that is seen without importing torch, which takes seconds: what the
    files of transformers do not mention. The others are looked up when transformers is there.

    Raises:
        PlanError: There is no such model.
    """
    spec = importlib.util.find_spec("transformers")
    places = (spec and spec.submodule_search_locations) or ()
    if shape_name(name) is not None or name.endswith(".json") or Path(name).is_dir() or not places:
        return
    folder = Path(next(iter(places)), "models", "auto")
    files = [folder / "configuration_auto.py", folder / "auto_mappings.py"]  # releases differ in which has the names
    text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    model_types = re.findall(r'\(\s*"([\w.-]+)",\s*"\w+Config"', text)
    if not model_types or f'"{name.lower()}"' in text.lower():
        return
    if _may_be_class(name) and name in _transformers_names():
        return
    raise PlanError(unknown_name(name, (each.lower() for each in model_types)))


def _may_be_class(name: str) -> bool:
    return name.isidentifier() and name != name.lower() and re.match("Auto[A-Z]", name) is None


def _transformers_names() -> list[str]:
    """Of its classes and all else; takes a second, and no torch."""
    return dir(importlib.import_module("transformers"))


def _squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name)


_BY_LETTERS = {_squeezed(name): name for name in SHAPES} | {_squeezed(a): b for a, b in SHAPES_ALIKE.items()}
