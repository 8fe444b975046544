"""How well `profile_memory` foretells the peak of device memory, and how long it takes.

    python examples/benchmarks/profiler_accuracy.py --out accuracy.json              # all cases; needs a GPU
    python examples/benchmarks/profiler_accuracy.py --only gpt2-small llama-7b       # some of them
    python examples/benchmarks/profiler_accuracy.py --large                          # OPT-175B; needs no GPU

Every case runs in a process of its own: first the profile, from a factory and without the GPU, then the real forward
and backward on the GPU, with `torch.cuda.max_memory_allocated` as the measure.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import resource
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from lightning_elixir import profile_memory

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One model and one way to train it."""

    name: str
    build: Callable[[str], nn.Module]
    batch: int
    length: int
    dtype: str = "bfloat16"
    attention: str = "sdpa"
    checkpointing: str = ""
    """"", "reentrant" or "non-reentrant"."""
    autocast: bool = False
    kind: str = "tokens"
    """What the model is given: "tokens", "padded" tokens with a mask, or square "images" of side `length`."""
    is_held_out: bool = False
    """Added after the profiler was made."""


def hf(kind: str, task: str, **options: Any) -> Callable[[str], nn.Module]:
    """A model of transformers from a configuration."""

    def build(attention: str) -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(**options, attn_implementation=attention)
        model: nn.Module = getattr(transformers, kind + task)(config)
        return model

    return build


def gpt2(layers: int, width: int, heads: int) -> Callable[[str], nn.Module]:
    return hf("GPT2", "LMHeadModel", n_layer=layers, n_embd=width, n_head=heads, loss_type="ForCausalLM")


def opt(layers: int, width: int, heads: int) -> Callable[[str], nn.Module]:
    return hf(
        "OPT", "ForCausalLM", num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
        ffn_dim=4 * width, word_embed_proj_dim=width,
    )  # fmt: skip


def decoder(
    kind: str, layers: int, width: int, heads: int, kv_heads: int, inner: int, **options: Any
) -> Callable[[str], nn.Module]:
    return hf(
        kind, "ForCausalLM", num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=inner, **options,
    )  # fmt: skip


def llama(layers: int, width: int, heads: int, kv_heads: int, inner: int) -> Callable[[str], nn.Module]:
    return decoder("Llama", layers, width, heads, kv_heads, inner)


LARGE_ENCODER = {
    "num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096,
}  # fmt: skip

MIXTRAL = decoder("Mixtral", 6, 1024, 16, 4, 3584, num_local_experts=8)
MISTRAL = decoder("Mistral", 16, 2048, 16, 4, 7168, sliding_window=512)
QWEN = decoder("Qwen2", 28, 1536, 12, 2, 8960)
BERT = hf("Bert", "ForMaskedLM", **LARGE_ENCODER)
VIT = hf("ViT", "ForImageClassification", **LARGE_ENCODER, num_labels=1000)
T5 = hf("T5", "ForConditionalGeneration", num_layers=12, d_model=768, d_ff=3072, num_heads=12, decoder_start_token_id=0)
BART = hf("Bart", "ForConditionalGeneration")
BLOOM = hf("Bloom", "ForCausalLM", n_layer=24, hidden_size=1024, n_head=16, vocab_size=50304)
PYTHIA = hf(
    "GPTNeoX", "ForCausalLM", num_hidden_layers=16, hidden_size=2048, num_attention_heads=8, intermediate_size=8192,
    vocab_size=50304,
)  # fmt: skip


class _Encoder(nn.Module):
    """A model of plain torch layers, with the interface of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32000, 1024)
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.head = nn.Linear(1024, 32000)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.layers(self.embed(input_ids)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


CASES = (
    Case("gpt2-small", gpt2(12, 768, 12), 8, 1024),
    Case("gpt2-medium", gpt2(24, 1024, 16), 4, 1024, "float16", "eager"),
    Case("gpt2-large", gpt2(36, 1280, 20), 2, 1024, "float32"),
    Case("gpt2-xl", gpt2(48, 1600, 25), 8, 1024, checkpointing="non-reentrant"),
    Case("gpt2-medium autocast", gpt2(24, 1024, 16), 8, 1024, autocast=True),
    Case("opt-350m", opt(24, 1024, 16), 8, 512, "float32", "eager", "reentrant"),
    Case("opt-1.3b", opt(24, 2048, 32), 4, 2048, "float16"),
    Case("opt-2.7b", opt(32, 2560, 32), 4, 1024, "bfloat16", "eager", "non-reentrant"),
    Case("opt-6.7b", opt(32, 4096, 32), 2, 2048, checkpointing="non-reentrant"),
    Case("llama-1.1b", llama(22, 2048, 32, 4, 5632), 4, 2048),
    Case("llama-1.1b autocast", llama(22, 2048, 32, 4, 5632), 8, 1024, "float16", "sdpa", "non-reentrant", True),
    Case("llama-3b", llama(26, 3200, 32, 32, 8640), 1, 1024, "float32"),
    Case("llama-7b", llama(32, 4096, 32, 32, 11008), 1, 2048),
    Case("llama-7b checkpointed", llama(32, 4096, 32, 32, 11008), 8, 2048, checkpointing="non-reentrant"),
    Case("gpt2-small long batch", gpt2(12, 768, 12), 48, 512, "float16", is_held_out=True),
    Case("gpt2-large eager", gpt2(36, 1280, 20), 4, 768, checkpointing="reentrant", attention="eager",
         is_held_out=True),
    Case("opt-1.3b autocast", opt(24, 2048, 32), 2, 2048, autocast=True, is_held_out=True),
    Case("opt-125m", opt(12, 768, 12), 4, 2048, "float32", is_held_out=True),
    Case("llama-1.1b eager", llama(22, 2048, 32, 4, 5632), 2, 1024, "float32", "eager", is_held_out=True),
    Case("llama-3b checkpointed", llama(26, 3200, 32, 32, 8640), 16, 1024, checkpointing="reentrant",
         is_held_out=True),
    Case("bert-large", BERT, 16, 512, "float16", is_held_out=True),
    Case("t5-base", T5, 16, 512, is_held_out=True),
    Case("mixtral-0.6b", MIXTRAL, 4, 1024, is_held_out=True),
    Case("pythia-1b", PYTHIA, 4, 1024, "float16", is_held_out=True),
    Case("pythia-1b eager", PYTHIA, 2, 2048, attention="eager", autocast=True, checkpointing="non-reentrant",
         is_held_out=True),
    Case("qwen2-1.5b padded", QWEN, 4, 1024, kind="padded", is_held_out=True),
    Case("qwen2-1.5b padded fp32", QWEN, 2, 1000, "float32", kind="padded", checkpointing="reentrant",
         is_held_out=True),
    Case("bert-large padded", BERT, 32, 384, autocast=True, kind="padded", is_held_out=True),
    Case("vit-large", VIT, 64, 224, kind="images", is_held_out=True),
    Case("mistral-1b", MISTRAL, 4, 1024, "float16", checkpointing="non-reentrant", is_held_out=True),
    Case("bart-large", BART, 8, 512, is_held_out=True),
    Case("bloom-560m", BLOOM, 4, 1024, attention="eager", is_held_out=True),
    Case("t5-base eager", T5, 8, 512, "float32", "eager", is_held_out=True),
    Case("torch encoder", lambda attention: _Encoder(), 16, 512, is_held_out=True),
    Case("torch encoder autocast", lambda attention: _Encoder(), 16, 512, autocast=True, is_held_out=True),
)  # fmt: skip

LARGE = (
    Case("opt-175b", opt(96, 12288, 96), 1, 2048, "float16"),
    Case("opt-175b checkpointed", opt(96, 12288, 96), 1, 2048, "float16", checkpointing="non-reentrant"),
)


def step(model: nn.Module, inp: Mapping[str, Any]) -> None:
    model(**inp).loss.backward()


def inputs(case: Case) -> dict[str, torch.Tensor]:
    if case.kind == "images":
        pixels = torch.randn(case.batch, 3, case.length, case.length)
        return {"pixel_values": pixels, "labels": torch.randint(0, 1000, (case.batch,))}
    tokens = torch.randint(0, 20000, (case.batch, case.length))
    inp = {"input_ids": tokens, "labels": tokens}
    if case.kind == "padded":
        ends = torch.randint(case.length // 2, case.length, (case.batch, 1))
        inp["attention_mask"] = (torch.arange(case.length) < ends).long()
    return inp


def build(case: Case) -> nn.Module:
    model = case.build(case.attention).train()
    if case.checkpointing:
        options = {"use_reentrant": case.checkpointing == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[operator]
    return model


def profile(case: Case) -> dict[str, Any]:
    dtype = getattr(torch, case.dtype)
    inp = inputs(case)
    start_s = time.perf_counter()
    found = profile_memory(lambda: build(case), inp, step, dtype, autocast=case.autocast)
    return {
        "profile_s": time.perf_counter() - start_s,
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "parameters": found.param_bytes // dtype.itemsize,
        "predicted_bytes": found.peak_bytes,
        "activation_bytes": found.activation_bytes,
        "peak_module": found.peak_module,
    }


def measure(case: Case) -> dict[str, Any]:
    dtype = getattr(torch, case.dtype)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device("cuda"):
        model = build(case)
    torch.set_default_dtype(torch.float32)
    for module in model.modules():  # as under this package: parameters are cast, buffers are not
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[key] = buffer.float()
    input_dtype = torch.float32 if case.autocast else dtype
    inp = {k: v.to("cuda", input_dtype if v.is_floating_point() else v.dtype) for k, v in inputs(case).items()}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if case.autocast:
        with torch.autocast("cuda", dtype, cache_enabled=False):
            loss = model(**inp).loss
        loss.backward()
    else:
        step(model, inp)
    torch.cuda.synchronize()
    return {"measured_bytes": torch.cuda.max_memory_allocated(), "device": torch.cuda.get_device_name()}


def run(case: Case, has_gpu: bool) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    described = {key: value for key, value in asdict(case).items() if key != "build"}
    try:
        found = {**described, **profile(case)}
        return {**found, **measure(case)} if has_gpu else found
    except Exception as error:
        return {**described, "error": f"{type(error).__name__}: {error}"[:500]}


def _run_and_send(case: Case, has_gpu: bool, pipe: Any) -> None:
    pipe.send(run(case, has_gpu))


def run_alone(case: Case, has_gpu: bool) -> dict[str, Any]:
    """In a forked process: a device is first touched there, and its allocator is new."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_run_and_send, args=(case, has_gpu, there))
    process.start()
    there.close()
    try:
        found: dict[str, Any] = here.recv()
    except EOFError:
        found = {"name": case.name, "error": "the process died"}
    process.join()
    return found


def row(found: Mapping[str, Any]) -> str:
    if "error" in found:
        return f"| {found['name']} | {found['error']} |"
    how = ", ".join(
        part
        for part in (
            f"{found['batch']} x {found['length']}",
            found["dtype"] + (" autocast" if found["autocast"] else ""),
            found["attention"],
            found["kind"] if found["kind"] != "tokens" else "",
            f"{found['checkpointing']} checkpointing" if found["checkpointing"] else "",
        )
        if part
    )
    name = found["name"] + (" *" if found["is_held_out"] else "")
    measured, error = "", ""
    if "measured_bytes" in found:
        measured = f"{found['measured_bytes'] / GIB:.3f}"
        error = f"{100 * (found['predicted_bytes'] / found['measured_bytes'] - 1):+.2f}%"
    cells = (
        name,
        f"{found['parameters'] / 1e9:.2f}e9",
        how,
        f"{found['predicted_bytes'] / GIB:.3f}",
        measured,
        error,
        f"{found['profile_s']:.1f}",
        f"{found['rss_bytes'] / GIB:.2f}",
    )
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| model | parameters | step | predicted GiB | measured GiB | error | profile s | profile RSS GiB |\n"
    "|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of cases to run")
    parser.add_argument("--large", action="store_true", help="profile OPT-175B instead, with and without checkpointing")
    parser.add_argument("--no-gpu", action="store_true", help="profile only")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    cases = [c for c in (LARGE if args.large else CASES) if not args.only or c.name in args.only]
    print(HEADER, flush=True)
    rows = []
    for case in cases:
        rows.append(run_alone(case, not args.large and not args.no_gpu))
        print(row(rows[-1]), flush=True)
        if args.out:
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            args.out.write_text(json.dumps({"versions": versions, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
