"""Activations that a plan keeps, recomputes or sends to host memory, beside what can be done by hand.

    python examples/benchmarks/activations.py --suite gpt --touch-first --out gpt_activations.json
    python examples/benchmarks/activations.py --suite llama_8k --touch-first --out llama_8k.json
    python examples/benchmarks/activations.py --suite llama_32k --touch-first --out llama_32k.json
    python examples/benchmarks/activations.py --suite lora_24 --out lora_24.json
    python examples/benchmarks/activations.py --suite lora_40 --out lora_40.json
    python examples/benchmarks/activations.py --suite longest --touch-first --budget-s 470 --out longest.json
    python examples/benchmarks/activations.py --cases llama_8k_auto llama_8k_by_hand_trl --out two.json
    python examples/benchmarks/activations.py --suite toy --device cpu --out toy_activations.json

`gpt`: the 5B model, 16 x 1024 tokens, at 40 GiB with activations="auto", beside plain PyTorch on the whole card that
recomputes all blocks; both with all logits, which are 16 x 1024 x 50304 in fp32, and with `linear_cross_entropy`.
`llama_8k`, `llama_32k`: Llama-7B, 2 x 8192 and 1 x 32768 tokens, at 40 GiB, with the head's
loss in pieces (`use_fused_kernels`), as logits of 32768 x 32000 in fp32 would take 4 GiB each time: "auto" and each
single choice, beside the same strategy where the model keeps all, recomputes all (transformers' own checkpointing),
saves all on the CPU (torch's hook), or only what recomputed blocks begin from, by torch's hook or TRL's (which must be
importable: unpack its wheel onto `PYTHONPATH`). `lora_24`, `lora_40`: adapters (peft, rank 16, all linear layers) of a
frozen Llama-7B, 4 x 2048 tokens at 24 GiB and 2 x 8192 at 40 GiB: "auto" beside the same strategy where the model
recomputes all, and beside plain PyTorch within the same memory, with the same fused operators, that recomputes all,
keeps all, or saves all on the CPU. `longest`: sequences of one sample of an 8B model at 40 GiB with 110 GiB of host,
longer and longer, up to the first that does not train.

Every case is a fit in a process of its own, as in `defaults.py`, which has the parts. Printed at the end: each case
against the best by hand, the largest difference of losses, and what was measured over what was predicted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from defaults import GIB, Case, measured, names_of, parser_of

HANDS = ("recompute", "save_inputs_on_cpu", "trl", "save_on_cpu", "keep")
CHOICES = ("auto", "recompute", "recompute_offloaded", "keep_attention", "offload", "keep")


def _around(base: Case, name: str) -> dict[str, Case]:
    """The choices of a plan, and those by hand."""
    cases = {f"{name}_{choice}": replace(base, activations=choice) for choice in CHOICES}
    return cases | {f"{name}_by_hand_{hand}": replace(base, by_hand=hand) for hand in HANDS}


def _adapters(base: Case, name: str) -> dict[str, Case]:
    """The choice of a plan, and what can be done by hand: under the same strategy, and in plain PyTorch."""
    plain = {
        f"{name}_plain_{hand}": replace(base, by_hand=hand, is_plain=True, num_steps=5 if "cpu" in hand else 8)
        for hand in ("recompute", "keep", "save_on_cpu")
    }
    return {f"{name}_auto": replace(base, activations="auto"), f"{name}_by_hand_recompute": base} | plain


_GPT = Case("5b", 16, 1024, 40 * GIB)
_LLAMA = Case("llama-7b", 2, 8192, 40 * GIB, is_fused=True, num_steps=8)
_LORA = Case("llama-7b", 4, 2048, 24 * GIB, is_fused=True, lora=16, num_steps=8)
_LONG = Case("llama-3-8b", 1, 0, 40 * GIB, 110 * GIB, is_fused=True, activations="auto", num_steps=4)
_TOY = Case("toy", 16, 128, 6 * 2**20, num_steps=5)
_TOY_LLAMA = Case("toy-llama", 2, 128, 12 * 2**20, is_fused=True, num_steps=5)
_LENGTHS = (32, 64, 96, 128, 192, 256)

CASES = {
    "gpt_auto": replace(_GPT, activations="auto"),
    "gpt_auto_bf16": replace(_GPT, activations="auto", autocast=False),
    "gpt_plain_recompute": replace(_GPT, gpu_limit=None, is_plain=True, autocast=False),
    "gpt_fused_auto": replace(_GPT, activations="auto", is_fused=True),
    "gpt_fused_auto_bf16": replace(_GPT, activations="auto", is_fused=True, autocast=False),
    "gpt_fused_plain_recompute": replace(_GPT, gpu_limit=None, is_plain=True, is_fused=True, autocast=False),
    **_around(_LLAMA, "llama_8k"),
    **_around(replace(_LLAMA, batch=1, seq=32768), "llama_32k"),
    **_adapters(_LORA, "lora_24"),
    **_adapters(replace(_LORA, batch=2, seq=8192, gpu_limit=40 * GIB), "lora_40"),
    **_around(_TOY, "toy"),
    **_around(_TOY_LLAMA, "toy_llama"),
    **_adapters(replace(_TOY_LLAMA, lora=4), "toy_lora"),
    **{f"toy_longest_{n}": replace(_LONG, model="toy-llama", seq=n, gpu_limit=12 * 2**20) for n in (128, 256)},
    "toy_plain_recompute": replace(_TOY, gpu_limit=None, is_plain=True, autocast=False),
    "toy_fused_auto": replace(_TOY, activations="auto", is_fused=True),
    "toy_fused_plain_recompute": replace(_TOY, gpu_limit=None, is_plain=True, is_fused=True, autocast=False),
    **{f"longest_{n}k": replace(_LONG, seq=n * 1024) for n in _LENGTHS},
}
SUITES = {
    name: [case for case in CASES if case.startswith(f"{name}_")]
    for name in ("gpt", "llama_8k", "llama_32k", "lora_24", "lora_40", "longest", "toy", "toy_lora")
}


def _step_of(result: Mapping[str, Any]) -> list[Any]:
    """What a step trains, and on how much."""
    return [result["case"].get(key) for key in ("model", "lora", "batch", "seq", "accumulate")]


def compared(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the results say beside each other: of each case that trained, its step over that of the best by hand of the
    same model and tokens, and measured figures over predicted ones."""
    trained = {name: one for name, one in results.items() if one.get("outcome") == "trained"}
    by_hand = [one for one in trained.values() if one["case"]["activations"] is None]
    found: dict[str, dict[str, Any]] = {}
    for name, one in trained.items():
        of_the_same_step = [other for other in by_hand if _step_of(other) == _step_of(one)]
        best = min(of_the_same_step, key=lambda other: other["step_s"], default=None)
        row: dict[str, Any] = {"step_s": one["step_s"], "predicted_s": one.get("predicted_s")}
        for key in ("gpu_peak_bytes", "predicted_allocated_bytes"):  # both without what the allocator cannot use
            row[key.replace("bytes", "gib")] = one[key] / GIB if one.get(key) else None
        if best is not None:
            row["of_best_by_hand"] = one["step_s"] / best["step_s"]
            pairs = zip(one["losses"], best["losses"], strict=False)
            row["loss_difference"] = max((abs(a - b) for a, b in pairs), default=None)
        if one.get("predicted_s"):
            row["of_predicted_step"] = one["step_s"] / one["predicted_s"]
        if one.get("predicted_allocated_bytes") and one.get("gpu_peak_bytes"):
            row["of_predicted_peak"] = one["gpu_peak_bytes"] / one["predicted_allocated_bytes"]
        if one.get("stats"):
            kept = ("recomputed_blocks", "activations_out_bytes", "activations_left_bytes")
            row |= {key: one["stats"][key] for key in kept}
        found[name] = row
    return found


def main() -> None:
    arguments = parser_of(__doc__ or "", CASES, SUITES, "activations.json").parse_args()
    arguments.stop_at_failure |= arguments.suite == "longest"
    found = measured({name: CASES[name] for name in names_of(arguments, SUITES)}, arguments)
    found["compared"] = compared(found["cases"])
    arguments.out.write_text(json.dumps(found, indent=1))
    for name, row in found["compared"].items():
        shown = ", ".join(f"{key} {value:.4g}" for key, value in row.items() if value is not None)
        print(f"{name:28s} {shown}")


if __name__ == "__main__":
    main()
