"""Look at plans before there is a GPU: will a model of 1.3 billion parameters fit, where would it live, and how fast
would it be? Runs in seconds on a CPU, and needs no memory for the model.

`lightning-elixir plan` does the same from the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_elixir import CapacityError, HardwareSpec, profile_memory
from lightning_elixir.plan.io import save_plan
from lightning_elixir.planning import Budget, make_plan, timeline_of
from lightning_elixir.report import ReportData, render_report

GIB = 2**30


def make_model(width: int = 2048, depth: int = 24) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(32000, width), layers, nn.Linear(width, 32000))


def train_step(model: nn.Module, inp: Mapping[str, Tensor]) -> None:
    logits = model(inp["tokens"])
    nn.functional.cross_entropy(logits.flatten(0, 1).float(), inp["tokens"].flatten()).backward()


def main() -> None:
    with torch.device("meta"):  # shapes without values
        model = make_model()
    inp = {"tokens": torch.zeros(4, 1024, dtype=torch.long)}
    profile = profile_memory(model, inp, train_step, torch.bfloat16)
    print(f"plain PyTorch: {profile.peak_bytes / GIB:.1f} GiB for forward and backward alone\n")

    # Round figures of no machine in particular; `lightning-elixir bench-hardware --out` writes those of yours.
    hardware = HardwareSpec.nominal(host_bytes=128 * GIB)
    for gpu_gib in (16, 24, 48):
        try:
            plan = make_plan(
                model,
                compute_dtype=torch.bfloat16,
                budget=Budget(gpu_gib * GIB, 128 * GIB),
                profile=profile,
                hardware=hardware,
            )
        except CapacityError as error:
            print(f"{gpu_gib} GiB: {error}\n")
            continue
        print(f"{gpu_gib} GiB: {plan.explain()}\n")
        timeline = timeline_of(plan, profile, hardware)
        page = render_report(ReportData(f"1.3 billion parameters in {gpu_gib} GiB", plan, hardware, timeline))
        Path(f"plan_{gpu_gib}gib.html").write_text(page, encoding="utf-8")
        save_plan(plan, f"plan_{gpu_gib}gib.json")  # for ElixirStrategy(plan=...)


if __name__ == "__main__":
    main()
