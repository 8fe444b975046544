"""LoRA on a frozen model far larger than the card: Llama-2-70B's shape in bf16, 128 GiB, on 40 GiB.

    python examples/benchmarks/lora_large.py --gpu-limit 40GiB --out lora_70b.json
    python examples/benchmarks/lora_large.py --gpu-limit 40GiB --nvme /mnt/disk --out lora_70b_nvme.json
    python examples/benchmarks/lora_large.py --preset toy --device cpu --gpu-limit 256KiB --tokens 256 --out toy.json

transformers' model and peft's adapters (rank 16, all linear layers), with HF's checkpointing. The base is never there
as a whole: each parameter is made in the chunk where it stays, as `pretrained` reads those of files, here of random
values. Adapters have peft's own values. Everything else is default, under `bf16-mixed`.

Steps are timed from mark to mark, the median after the third. Beside it stand what the device computed (`compute_s`, of
the last step) and the arithmetic of a step: 2 operations a parameter and token in forward, again in the recomputed one,
and in backward, which has no gradients of weights to make but the adapters'.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from defaults import Clock, HostMemory, steps_seen
from peers.model import put_drawn

from lightning_elixir import ElixirStrategy, HybridAdam
from lightning_elixir._lightning import pl
from lightning_elixir.plan.units import parse_bytes
from lightning_elixir.runtime.sources import set_source

PRESETS: dict[str, dict[str, Any]] = {
    "llama-2-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "toy": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 256,
    },
}
_NUM_DRAWN = 2**24


class RandomValues:
    """A `Source` of small random values, the same ones again and again: drawing 70e9 takes minutes.

    Args:
        drawn: 1-D, fp32, in host memory.
        is_norm: All are 1.
    """

    def __init__(self, drawn: Tensor, *, is_norm: bool) -> None:
        self._drawn, self._is_norm = drawn, is_norm

    def read_run(self, stride: tuple[int, ...] | None, begin: int, target: Tensor, dtype: torch.dtype) -> None:
        if self._is_norm:
            target.fill_(1.0)
        else:
            put_drawn(target, self._drawn, begin)

    def part(self, shape: tuple[int, ...], offsets: tuple[int, ...]) -> RandomValues:
        return self  # as random


class Tuning(pl.LightningModule):
    """Trains adapters.

    Args:
        shape: Of the base.
        rank: Of the adapters.
        tokens: Of one rank in a step.
        seq: Of one sequence.
        steps: How many batches there are.
    """

    def __init__(self, shape: dict[str, Any], rank: int, tokens: int, seq: int, steps: int) -> None:
        super().__init__()
        self._shape, self._rank, self._tokens, self._seq, self._steps = shape, rank, tokens, seq, steps
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        with torch.device("meta"):
            base: Any = LlamaForCausalLM(LlamaConfig(**self._shape, use_cache=False))
        base.to(torch.bfloat16)
        base.gradient_checkpointing_enable({"use_reentrant": False})
        drawn = torch.randn(_NUM_DRAWN, generator=torch.Generator().manual_seed(0)) * 0.02
        for parameter in base.parameters():
            set_source(parameter, RandomValues(drawn, is_norm=parameter.dim() == 1))
        rotary = base.model.rotary_emb
        rotary.inv_freq = rotary.original_inv_freq = type(rotary)(base.config).inv_freq
        self.model = get_peft_model(base, LoraConfig(r=self._rank, target_modules="all-linear"))
        with torch.no_grad():
            for adapter in self.model.modules():
                if isinstance(adapter, nn.Linear) and adapter.weight.requires_grad and adapter.weight.is_meta:
                    adapter.to_empty(device="cpu")
                    adapter.reset_parameters()
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:
                nn.init.zeros_(parameter)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return HybridAdam([p for p in self.parameters() if p.requires_grad], lr=1e-4)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        shape = (self._steps * (self._tokens // self._seq), self._seq)
        tokens = torch.randint(0, self._shape["vocab_size"], shape, generator=generator)
        return DataLoader(tokens, batch_size=self._tokens // self._seq)  # type: ignore[arg-type]


class Marks(pl.Callback):
    """When steps end, and losses."""

    def __init__(self, device: torch.device) -> None:
        self.clock, self.losses = Clock(device), list[Tensor]()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= 2:
            trainer.strategy.reset_stats()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.clock.step_ends()
        self.losses.append(outputs["loss"].detach())


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(arguments.device)
    limit = parse_bytes(arguments.gpu_limit)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    host = HostMemory()
    shape = PRESETS[arguments.preset]
    seq = min(arguments.seq, arguments.tokens)
    module = Tuning(shape, arguments.rank, arguments.tokens, seq, arguments.steps)
    strategy = ElixirStrategy(gpu_memory_limit=limit, nvme_offload_dir=arguments.nvme)
    marks = Marks(device)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed",
        max_epochs=1,
        callbacks=[marks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    found = steps_seen(marks.clock)
    with torch.device("meta"):
        numel = sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**shape)).parameters())
    plan, stats = strategy.plan, strategy.stats()
    forecast = plan.forecast
    return found | {
        "parameters": numel,
        "adapter_parameters": sum(c.numel for c in plan.chunks if c.requires_grad),
        "tokens": arguments.tokens,
        "losses": [float(loss) for loss in marks.losses],
        "operations": 6 * numel * arguments.tokens,
        "compute_s": stats.compute_s,
        "predicted_s": None if forecast is None else forecast.times.total_s,
        "explained": plan.explain(),
        "stats": stats.as_dict(),
        "host_peak_bytes": host.peak_bytes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="llama-2-70b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpu-limit", default="40GiB")
    parser.add_argument("--nvme", help="folder on a disk that may take what the host's memory cannot")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192, help="of a step")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    started_s = time.perf_counter()
    found = {
        "command": [Path(__file__).name, *sys.argv[1:]],
        "machine": {"platform": platform.platform(), "cores": torch.get_num_threads()},
        "versions": {name: version(name) for name in ("torch", "lightning", "transformers", "peft")},
        **run(arguments),
        "process_s": time.perf_counter() - started_s,
    }
    print(found["explained"])
    rate = found["operations"] / found["step_s"] / 1e12
    print(
        f"{found['parameters'] / 1e9:.2f}e9 frozen parameters, {found['tokens']} tokens: {found['step_s']:.3f} s a step"
        f" ({rate:.0f} TFLOP/s), predicted {found['predicted_s']:.3f} s; the first one done after"
        f" {found['first_step_s']:.1f} s"
    )
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
