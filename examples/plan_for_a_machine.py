"""Which machine for my model? A training step is run without values, then planned for machines that are not here.

    python examples/plan_for_a_machine.py                                      # GPT-2 XL on three machines, in seconds
    python examples/plan_for_a_machine.py --config llama_7b.json --batch-size 4 --seq-len 2048
    python examples/plan_for_a_machine.py --machine mine.json                  # adds what `bench-hardware --out` wrote

Speeds of the three machines below are round figures, which are good for comparing placements; put your vendor's in, or
measure: `lightning-elixir bench-hardware --out mine.json`, once, on the machine. `lightning-elixir plan` tells more of
one machine at a time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_elixir import CapacityError, HardwareSpec, Plan, profile_memory
from lightning_elixir.plan.hardware import load_hardware
from lightning_elixir.plan.types import Tier
from lightning_elixir.planning import Budget, TrainingRegime, make_plan

GIB = 2**30
GPT2_XL: dict[str, Any] = {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25}


def machine(name: str, gpu_gib: int, host_gib: int, tflops: float) -> HardwareSpec:
    """One GPU with round figures for everything but its memory and its matrix products."""
    nominal = HardwareSpec.nominal(gpu_gib * GIB, host_gib * GIB)
    return replace(nominal, name=name, matmul_flops_per_s={"bfloat16": tflops * 1e12})


MACHINES = (
    machine("16 GiB GPU, 64 GiB host", 16, 64, 60),
    machine("24 GiB GPU, 128 GiB host", 24, 128, 120),
    machine("80 GiB GPU, 256 GiB host", 80, 256, 400),
)


def train_step(model: nn.Module, inp: Mapping[str, Tensor]) -> None:
    model(**inp, use_cache=False).loss.backward()


def describe(plan: Plan) -> str:
    """Predicted seconds of a step, and where what lives."""
    forecast = plan.forecast
    if forecast is None:
        return "fits; no time is predicted"
    on_gpu = sum(chunk.is_persistent for chunk in plan.chunks)
    states = sum(chunk.optim_tier is Tier.GPU for chunk in plan.chunks)
    return (
        f"{forecast.times.total_s:.2f} s a step, {forecast.peak_gpu_bytes / GIB:.1f} GiB on the GPU and"
        f" {forecast.host_bytes / GIB:.1f} GiB on the host; of {len(plan.chunks)} chunks {on_gpu} are always on the"
        f" GPU, {states} with their states"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, metavar="FILE.json", help="of the model; default: GPT-2 XL")
    parser.add_argument("--machine", type=Path, metavar="FILE.json", help="a machine that was measured")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument(
        "--checkpointing", action=argparse.BooleanOptionalAction, default=True, help="recompute activations in backward"
    )
    arguments = parser.parse_args()

    fields = dict(GPT2_XL) if arguments.config is None else json.loads(arguments.config.read_text(encoding="utf-8"))
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):  # shapes without values
        model = AutoModelForCausalLM.from_config(config)
    if arguments.checkpointing:
        # Before transformers 5 the method had another name.
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    tokens = torch.zeros(arguments.batch_size, arguments.seq_len, dtype=torch.long)
    inp = {"input_ids": tokens, "labels": tokens}
    profile = profile_memory(model.train(), inp, train_step, torch.bfloat16, autocast=True)
    numel = sum(p.numel() for p in model.parameters())
    print(
        f"{numel / 1e9:.2f} billion parameters: {16 * numel / GIB:.1f} GiB with gradients and Adam's states, and"
        f" {profile.activation_bytes / GIB:.1f} GiB of activations"
    )
    machines = MACHINES if arguments.machine is None else (*MACHINES, load_hardware(str(arguments.machine)))
    for hardware in machines:
        try:
            plan = make_plan(
                model,
                compute_dtype=torch.bfloat16,
                budget=Budget(hardware.gpu_bytes, hardware.host_bytes),
                regime=TrainingRegime(can_stream=True, can_reuse_compute_shard=True),  # HybridAdam, one backward a step
                profile=profile,
                hardware=hardware,
            )
        except CapacityError as error:
            print(f"{hardware.name}: does not fit. {error}")
            continue
        print(f"{hardware.name}: {describe(plan)}")


if __name__ == "__main__":
    main()
