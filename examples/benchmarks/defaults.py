"""What happens with the defaults, near the edge of the memory: does it train, when is the first step done, how much
memory does it take against what was planned, how long are steps against what was predicted.

    python examples/benchmarks/defaults.py --suite edges --out edges.json
    python examples/benchmarks/defaults.py --suite first --out first_steps.json
    python examples/benchmarks/defaults.py --cases llama_clip llama_plain --gpu-limit 40GiB --out llama.json
    python examples/benchmarks/defaults.py --suite two --touch-first --budget-s 470 --out two.json
    python examples/benchmarks/defaults.py --suite four --touch-first --out four.json
    python examples/benchmarks/defaults.py --cases toy toy_clip toy_plain --device cpu --out toy.json
    python examples/benchmarks/defaults.py --suite toy_two --device cpu --out toy_two.json

Every case is a fit with `ElixirStrategy(gpu_memory_limit=...)` and nothing else but what its name says, under the
Trainer's "bf16-mixed" (or "16-mixed"), or plain PyTorch: bf16 beside an fp32 master with fused AdamW. It runs in a
process of its own, which the kernel may kill: that is a result, too. Those are forks of this one, which has imported
everything and does not compute. Model building is not counted. Memory of some machines grows at its first touch:
`--touch-first` takes it all before, and the time that all cores take to touch what a case took is measured beside it.

Of several ranks (`two_...`, `four_...`), the Trainer forks the processes, the model is made in `configure_model` on
rank 0, and each rank has batches of its own; host bytes are those of all ranks together, each at its peak. Plain
PyTorch is FSDP2 on whole cards then (`fsdp2.py`), with fp32 shards.

Beside each case stands the longest step after the second one, how much of it the garbage collector took, whether the
plan had changed, and what its updates took. That step is to be no longer than 1.5 medians.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

sys.path.insert(0, str(Path(__file__).parent))

from compare import parse_size
from disturbance import Pauses
from fsdp2 import run_fsdp2
from peers.jobs import PRESETS, Shape
from peers.model import GPT, put_drawn

from lightning_elixir import HybridAdam
from lightning_elixir._lightning import pl
from lightning_elixir.core.host import available_host_bytes
from lightning_elixir.errors import CapacityError
from lightning_elixir.fused import fuse
from lightning_elixir.strategy import ElixirStrategy

GIB = 2**30
GPT_SHAPES = PRESETS | {"30b": Shape(48, 7168, 56)}  # the last one as OPT-30B
_MOST_MEDIANS = 1.5  # of a step after the second one
_TO_SAY_WHERE_S = 2.0  # for processes that take too long
_NUM_DRAWN = 2**26 + 1  # odd, so that layers are not alike


@dataclass(frozen=True)
class Case:
    model: str
    batch: int
    seq: int = 1024
    gpu_limit: int | None = None
    cpu_limit: int | None = None
    clip: float = 0.0
    """To which norm; 1e6 never clips, 1e-3 does in each step."""
    precision: str = "bf16-mixed"
    accumulate: int = 1
    is_plain: bool = False
    is_compiled: bool = False
    """Each block by `block.compile()`."""
    is_fused: bool = False
    """`use_fused_kernels=True`; of the GPT, which is no model of transformers, `linear_cross_entropy` in its code."""
    autocast: bool = True
    """Whether bf16 parameters compute under autocast; without, as `ElixirStrategy(autocast=False)` does."""
    activations: str | None = None
    """The strategy's option."""
    by_hand: str = "recompute"
    """What the model does by itself without that option: "keep", "recompute", "save_on_cpu", as torch has it, the same
    around recomputed blocks ("save_inputs_on_cpu"), or "trl": its offloading, around recomputed blocks as well."""
    lora: int = 0
    """Rank of peft's adapters of all linear layers, which are all that is trained then; 0: the whole model is."""
    num_steps: int = 12
    devices: int = 1
    """Ranks, each with batches of its own."""

    @property
    def is_recomputed(self) -> bool:
        return self.activations is None and self.by_hand in ("recompute", "save_inputs_on_cpu", "trl")

    @property
    def is_reentrant(self) -> bool:
        """Whether what recomputed blocks begin from goes through hooks for saved tensors."""
        return self.by_hand in ("save_inputs_on_cpu", "trl")


_LLAMA = Case("llama-7b", 4, 2048, 40 * GIB)
_GPT = Case("5b", 16, 1024, 40 * GIB)
_MOE = Case("moe", 4, 2048, 32 * GIB)
_LLAMA_3 = Case("llama-3-8b", 2, 2048, 40 * GIB, num_steps=5)
_CONV = Case("conv", 16, 3 * 224 * 224, 40 * GIB)
_TOY = Case("toy", 2, 32, 6 * 2**20)

CASES = {
    "llama": _LLAMA,
    "llama_clip": replace(_LLAMA, clip=1e6),
    "llama_clip_each": replace(_LLAMA, clip=1e-3, num_steps=20),
    "llama_clip_108": replace(_LLAMA, clip=1e6, cpu_limit=108 * GIB),
    "llama_clip_64": replace(_LLAMA, clip=1e6, cpu_limit=64 * GIB),
    "llama_24": replace(_LLAMA, gpu_limit=24 * GIB, clip=1e6),
    "llama_fp16": replace(_LLAMA, precision="16-mixed", clip=1e6),
    "llama_accumulate": replace(_LLAMA, accumulate=2),
    "gpt": _GPT,
    "gpt_clip": replace(_GPT, clip=1e6),
    "gpt_16": replace(_GPT, batch=8, gpu_limit=16 * GIB),
    "conv": _CONV,
    "moe": _MOE,
    "moe_clip": replace(_MOE, clip=1e6),
    "llama_compiled": replace(_LLAMA, is_compiled=True),
    "llama_compiled_8": replace(_LLAMA, batch=8, is_compiled=True),
    "gpt_no_autocast": replace(_GPT, autocast=False),
    "two_gpt_16": replace(_GPT, batch=8, gpu_limit=16 * GIB, devices=2),
    "two_gpt": replace(_GPT, devices=2),
    "two_llama_24": replace(_LLAMA, gpu_limit=24 * GIB, devices=2),
    "two_llama_24_clip": replace(_LLAMA, gpu_limit=24 * GIB, clip=1e6, devices=2),
    "two_llama_24_clip_each": replace(_LLAMA, gpu_limit=24 * GIB, clip=1e-3, num_steps=16, devices=2),
    "four_gpt_16": replace(_GPT, batch=8, gpu_limit=16 * GIB, devices=4),
    "four_opt": Case("30b", 16, 1024, 40 * GIB, num_steps=10, devices=4),
    "toy": _TOY,
    "toy_two": replace(_TOY, gpu_limit=576 * 2**10, devices=2),
    "toy_two_clip": replace(_TOY, gpu_limit=576 * 2**10, clip=1e-3, devices=2),
    "toy_two_llama": replace(_TOY, model="toy-llama", gpu_limit=9 * 2**18, devices=2),
    "toy_conv": Case("toy-conv", 2, 3 * 32 * 32, 4 * 2**20),
    "toy_clip": replace(_TOY, clip=1e6),
    "toy_llama": replace(_TOY, model="toy-llama", gpu_limit=12 * 2**20),
    "toy_compiled": replace(_TOY, is_compiled=True),
    "toy_no_autocast": replace(_TOY, autocast=False),
}
CASES |= {f"{name}_whole": replace(CASES[name], gpu_limit=None) for name in ("llama", "llama_compiled")}
CASES |= {  # bf16 modules as they are: the fastest of plain PyTorch
    f"{name}_plain": replace(CASES[name], gpu_limit=None, is_plain=True, autocast=False)
    for name in ("llama", "llama_compiled", "llama_compiled_8", "gpt", "moe", "toy", "toy_compiled")
}
CASES |= {  # on whole cards, under autocast
    f"{name}_plain": replace(CASES[name], gpu_limit=None, is_plain=True)
    for name in ("two_gpt_16", "two_llama_24", "four_opt", "toy_two", "toy_two_llama")
}
# The largest batch that trains, with logits of 128256 tokens and without: run until one says that it does not fit.
_BATCHES = (1, 2, 4, 8, 12, 16, 24, 32)
CASES |= {
    f"llama_3_{limit}_b{batch}{suffix}": replace(_LLAMA_3, batch=batch, gpu_limit=limit * GIB, is_fused=bool(suffix))
    for limit in (24, 40)
    for batch in _BATCHES
    for suffix in ("", "_fused")
}
CASES |= {f"{name}_fused": replace(CASES[name], is_fused=True) for name in ("llama", "llama_compiled", "toy_llama")}
CASES["gpt_autocast_plain"] = replace(_GPT, gpu_limit=None, is_plain=True)
SUITES = {
    "edges": [
        *("llama", "llama_clip", "llama_clip_each", "llama_clip_108", "llama_clip_64", "llama_24", "llama_fp16"),
        *("llama_accumulate", "gpt", "gpt_clip", "gpt_16", "moe", "moe_clip", "conv"),
    ],
    "first": ["llama_plain", "llama_whole", "llama", "gpt_16"],
    "speed": ["llama_plain", "llama", "llama_clip", "llama_clip_each"],
    "two": [
        *("two_llama_24", "two_gpt_16", "two_llama_24_clip", "two_llama_24_clip_each"),
        *("two_llama_24_plain", "two_gpt_16_plain"),
    ],
    "four": ["four_opt", "four_opt_plain", "gpt_16", "two_gpt_16", "four_gpt_16"],
    "toy_two": ["toy_two", "toy_two_clip", "toy_two_llama", "toy_two_plain", "toy_two_llama_plain"],
    "compiled": [
        *("llama_compiled_plain", "llama_compiled_whole", "llama_compiled"),
        *("llama_compiled_8_plain", "llama_compiled_8"),
    ],
    "fused": ["llama", "llama_fused", "llama_compiled", "llama_compiled_fused"],
    **{
        f"fused_{limit}{suffix}": [f"llama_3_{limit}_b{batch}{suffix}" for batch in _BATCHES]
        for limit in (24, 40)
        for suffix in ("", "_fused")
    },
    "autocast": ["gpt_plain", "gpt_autocast_plain", "gpt", "gpt_no_autocast"],
}

_LLAMA_SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8},
    "toy-llama": {
        "vocab_size": 4096,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
}
_CONV_SHAPES: dict[str, dict[str, Any]] = {
    "conv": {"hidden_sizes": [2048, 4096, 8192, 16384], "depths": [3, 4, 23, 3]},  # 2.8e9 parameters
    "toy-conv": {"hidden_sizes": [64, 128, 256, 512], "depths": [1, 1, 1, 1]},
}

# ------------------------------------------------------------------------------------------- one case's process


class Causal(nn.Module):
    """A model of transformers as one from tokens to a loss."""

    def __init__(self, model: nn.Module, *, is_recomputed: bool, is_reentrant: bool = False) -> None:
        super().__init__()
        self.model = model
        if is_recomputed:
            options = {"use_reentrant": is_reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[operator]

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


class Classifier(nn.Module):
    """A model of transformers as one from tokens, which stand for pixels, to a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        side = round((tokens.shape[1] / 3) ** 0.5)
        pixels = tokens.view(-1, 3, side, side) / tokens.max().clamp(min=1) - 0.5
        loss: Tensor = self.model(pixel_values=pixels, labels=tokens[:, 0] % 1000).loss
        return loss


class SavedOnCpu(nn.Module):
    """A model all of whose saved tensors go through torch's own hook."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=tokens.is_cuda):
            loss: Tensor = self.model(tokens)
            return loss


class OffloadedByTrl(nn.Module):
    """A model under TRL's offloading of activations, with streams on a GPU."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        from accelerate import PartialState
        from trl.models.activation_offloading import get_act_offloading_ctx_manager

        PartialState()  # without which TRL cannot warn
        is_gpu = tokens.is_cuda
        with get_act_offloading_ctx_manager(
            self.model, use_pin_memory=is_gpu, use_streams=is_gpu, warn_if_no_head=False
        ):
            loss: Tensor = self.model(tokens)
            return loss


def make_model(case: Case, *, has_values: bool = True) -> nn.Module:
    """The model in host memory, fp32.

    Args:
        has_values: False: none are drawn, and parameters may be on `meta`.
    """
    if case.model in GPT_SHAPES:
        with torch.device("meta"):
            gpt = GPT(replace(GPT_SHAPES[case.model], seq=case.seq))
        gpt.is_checkpointed, gpt.has_logits = case.is_recomputed, not case.is_fused
        model: nn.Module = gpt.to_empty(device="cpu") if has_values else gpt
    elif case.model in _CONV_SHAPES:
        import transformers
        from transformers.initialization import no_init_weights

        resnet: Any = transformers.AutoConfig.for_model("resnet", num_labels=1000, **_CONV_SHAPES[case.model])
        with no_init_weights():
            model = Classifier(transformers.ResNetForImageClassification(resnet))
    else:
        import transformers
        from transformers.initialization import no_init_weights

        options: dict[str, Any] = {}
        config: Any = transformers.LlamaConfig(max_position_embeddings=max(2048, case.seq))
        if case.model in _LLAMA_SHAPES:
            config = transformers.LlamaConfig(**_LLAMA_SHAPES[case.model], max_position_embeddings=max(2048, case.seq))
        if case.model == "moe":
            sizes: dict[str, Any] = {
                "num_hidden_layers": 8,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
            }
            config, options = transformers.Qwen3MoeConfig(**sizes), {"experts_implementation": "grouped_mm"}
        if case.lora:
            options["dtype"] = torch.bfloat16
        with no_init_weights():
            causal = transformers.AutoModelForCausalLM.from_config(config, **options)
            if case.lora:
                from peft import LoraConfig, get_peft_model

                causal = get_peft_model(causal, LoraConfig(r=case.lora, target_modules="all-linear"))
        model = Causal(causal, is_recomputed=case.is_recomputed, is_reentrant=case.is_reentrant)
    if has_values:
        _fill(model)
    if case.activations is None and case.by_hand in ("save_on_cpu", "save_inputs_on_cpu"):
        model = SavedOnCpu(model)
    if case.activations is None and case.by_hand == "trl":
        model = OffloadedByTrl(model)
    if case.is_compiled:
        for block in blocks_of(model):
            block.compile()
    return model


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """What a stack of layers has."""
    for stack in model.modules():
        if isinstance(stack, nn.ModuleList):
            yield from stack


def _fill(model: nn.Module) -> None:
    """Small random values, the same ones again and again: drawing as many as a model has takes longer than a fit. They
    are numbers of bf16, so that masters of bf16 parameters begin as those of fp32 ones."""
    drawn = (torch.randn(_NUM_DRAWN, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    begin = 0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            put_drawn(parameter.view(-1), drawn, begin)
            begin += parameter.numel()


class Clock:
    """When steps end, without waiting for them but for the first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[Any] = []
        self.start()
        self.aside_s = 0.0
        """What is not to count before the first step ends."""
        self.first_s = 0.0

    def start(self) -> None:
        """What is to count begins now."""
        self.started_s = time.perf_counter()  # the same clock in all processes

    def step_ends(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
        if not self.first_s:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.first_s = time.perf_counter() - self.started_s - self.aside_s

    def step_s(self) -> list[float]:
        """Of all steps but the first."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1000 for a, b in pairs]
        return [b - a for a, b in pairs]


class Lit(pl.LightningModule):
    """A fit's model.

    Args:
        case: Which.
        clock: Building does not count.
        net: Built before; None: in `configure_model`.
    """

    def __init__(self, case: Case, clock: Clock, net: nn.Module | None) -> None:
        super().__init__()
        self._case, self._clock = case, clock
        self.net = net

    def configure_model(self) -> None:
        if self.net is None:
            started_s = time.perf_counter()
            is_first_rank = self.global_rank == 0 and torch.distributed.is_initialized()
            self.net = make_model(self._case, has_values=is_first_rank)
            self._clock.aside_s += time.perf_counter() - started_s

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Empty where ranks are forked: their weights would come back to this process through a file, in minutes."""
        return {} if self._case.devices > 1 else super().state_dict(*args, **kwargs)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(tokens)  # type: ignore[misc]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return HybridAdam([p for p in self.parameters() if p.requires_grad], lr=1e-5)

    def train_dataloader(self) -> Any:
        batches: Any = batches_of(self._case, self.global_rank)
        return torch.utils.data.DataLoader(batches, batch_size=None)


def batches_of(case: Case, rank: int = 0) -> list[Tensor]:
    """Of one fit, int64 `[batch, seq]` each."""
    vocab = 256 if case.model.startswith("toy") else 30000
    generator = torch.Generator().manual_seed(rank)
    count = case.num_steps * case.accumulate
    return [torch.randint(0, vocab, (case.batch, case.seq), generator=generator) for _ in range(count)]


class Seen(pl.Callback):
    """What is seen of a fit in one of its processes.

    Args:
        case: Of which fit.
        clock: Of its steps.
        traced: Number of the batch whose work on the device is looked at.
        out: Of several ranks each writes what it has seen here (`of_rank`).
    """

    def __init__(self, case: Case, clock: Clock, traced: int | None, out: Path) -> None:
        self.case, self.clock, self._out = case, clock, out
        self._host: HostMemory | None = None
        self._pauses: Pauses | None = None
        self.host_peaks: list[int] = []  # bytes, after each batch
        self._trace = None if traced is None else Trace()
        self._traced = traced
        self.plans: list[str] = []
        self.updates: list[dict[str, Any] | None] = []
        self.gc_s: list[float] = []  # in all, after each batch
        self.gpu_shortages: list[int] = []  # as `gpu_retries`, after each batch
        self.losses: list[Tensor] = []
        self.predicted_s: float | None = None
        self.device_work: dict[str, Any] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """In the process that trains."""
        self._host, self._pauses = HostMemory(), Pauses()
        limit_device(self.case, trainer.strategy.root_device)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._trace is not None and batch_idx == self._traced:
            self._trace.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach())
        self.host_peaks.append(self._host.peak_bytes if self._host else 0)
        self.gc_s.append(self._pauses.total_s if self._pauses else 0.0)
        if trainer.strategy.root_device.type == "cuda":
            self.gpu_shortages.append(num_shortages())
        plan = trainer.strategy.plan
        self.predicted_s = None if plan.forecast is None else plan.forecast.times.total_s
        foreseen = "" if plan.forecast is None else f", {plan.forecast.times.total_s:.3f} s"
        self.plans.append(f"{plan.fingerprint()[:8]}{foreseen}")
        times = trainer.optimizers[0].last_step_times
        self.updates.append(None if times is None else asdict(times))
        if self._trace is not None and batch_idx == self._traced:
            self.device_work = self._trace.end()
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.clock.step_ends()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self.case.devices > 1:
            of_rank(self._out, trainer.global_rank).write_text(json.dumps(self.result(trainer.strategy)))

    def result(self, strategy: ElixirStrategy) -> dict[str, Any]:
        """What there is to tell in the end."""
        plan = strategy.plan
        found: dict[str, Any] = {
            "predicted_s": self.predicted_s,
            "predicted_peak_bytes": None if plan.forecast is None else plan.forecast.peak_gpu_bytes,
            "predicted_allocated_bytes": None if plan.forecast is None else plan.forecast.allocated_bytes,
            "fates": [(block.name, block.fate.value) for block in plan.activations],
            "stats": strategy.stats().as_dict(),
            "plan": plan.notes,
            "plans": self.plans,
            "host_peaks": self.host_peaks,
            "host_peak_bytes": max(self.host_peaks, default=0),
            "updates": self.updates,
            "gc_s": self.gc_s,
            "gpu_shortages": self.gpu_shortages,
            "device_work": self.device_work,
            "machine": strategy._machine_figures.best.to_dict(),
            "budget": asdict(strategy._handle.budget) | {"words": None},
            "explained": plan.explain(),
            "losses": [loss.item() for loss in self.losses],
        }
        found |= steps_seen(self.clock)
        return found | {"longest": self._longest(found["steps_s"], found["longest_step"])}

    def _longest(self, steps_s: list[float], number: int | None) -> dict[str, Any] | None:
        """What else was so in the longest step after the second one."""
        if number is None:
            return None
        last = number * self.case.accumulate - 1  # its last batch
        first = last - self.case.accumulate
        return {
            "step": number,
            "seconds": steps_s[number - 2],
            "gc_s": self.gc_s[last] - self.gc_s[first],
            "has_new_plan": self.plans[last][:8] != self.plans[first][:8],
            "has_new_forecast": self.plans[last] != self.plans[first],
            "update": self.updates[last],
        }


def num_shortages() -> int:
    """How often the allocator gave back what it keeps, and waited for the GPU, for want of memory."""
    num: int = torch.cuda.memory_stats()["num_alloc_retries"]
    return num


def steps_seen(clock: Clock) -> dict[str, Any]:
    """What steps took."""
    steps = clock.step_s()
    median_s = statistics.median(steps[3:] or steps)
    later = steps[1:]
    found: dict[str, Any] = {
        "first_step_s": clock.first_s,
        "steps_s": steps,
        "step_s": median_s,
        "longest_after_two": max(later, default=0.0) / median_s,
        "longest_step": later.index(max(later)) + 3 if later else None,
    }
    if clock.device.type == "cuda":
        found["gpu_peak_bytes"] = torch.cuda.max_memory_allocated()
        found["gpu_reserved_bytes"] = torch.cuda.max_memory_reserved()  # with what lies in gaps
        found["gpu_retries"] = num_shortages()
        found["device"] = torch.cuda.get_device_name()
    return found


def limit_device(case: Case, device: torch.device) -> None:
    """Have torch refuse more than the case may use."""
    if case.gpu_limit is not None and device.type == "cuda":
        share = case.gpu_limit / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(share, device)


def of_rank(out: Path, rank: int) -> Path:
    """Where a rank writes to."""
    return out.with_suffix(f".{rank}.json")


class Trace:
    """What the device does in one step: its kernels, and the copies over the bus."""

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def begin(self) -> None:
        torch.cuda.synchronize()
        self._profiler.start()

    def end(self) -> dict[str, Any]:
        torch.cuda.synchronize()
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            return device_work(json.loads(path.read_text())["traceEvents"])


def device_work(events: list[dict[str, Any]]) -> dict[str, Any]:
    """How long kernels ran, each way over the bus was busy, and with how many bytes; all in seconds from the first
    kernel's begin to the last one's end."""
    on_device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels = [e for e in on_device if e["cat"] == "kernel"]
    if not kernels:
        return {}
    found: dict[str, Any] = {
        "span_s": _span_s(kernels),
        "kernels_s": _covered_s(kernels),
        "num_kernels": len(kernels),
        "gaps_s": sorted(_gaps_s(kernels))[-20:],
    }
    for way in ("HtoD", "DtoH", "DtoD"):
        copies = [e for e in on_device if e["cat"] == "gpu_memcpy" and way in e["name"]]
        nbytes = sum(e["args"].get("bytes", 0) for e in copies)
        found[way] = {"count": len(copies), "busy_s": _covered_s(copies), "bytes": nbytes}
    by_name: dict[str, float] = {}
    for event in kernels:
        by_name[event["name"][:80]] = by_name.get(event["name"][:80], 0.0) + event["dur"] / 1e6
    found["longest"] = dict(sorted(by_name.items(), key=lambda item: -item[1])[:12])
    return found


def _covered_s(events: list[dict[str, Any]]) -> float:
    return _span_s(events) - sum(_gaps_s(events))


def _span_s(events: list[dict[str, Any]]) -> float:
    """From the first one's begin to the last one's end."""
    begin, end = min((e["ts"] for e in events), default=0.0), max((e["ts"] + e["dur"] for e in events), default=0.0)
    return (end - begin) / 1e6


def _gaps_s(events: list[dict[str, Any]]) -> list[float]:
    """In which none runs."""
    gaps, last = [], None
    for event in sorted(events, key=lambda e: e["ts"]):
        if last is not None and event["ts"] > last:
            gaps.append((event["ts"] - last) / 1e6)
        last = max(last or 0.0, event["ts"] + event["dur"])
    return gaps


def run_case(case: Case, device: torch.device, traced: int | None, out: Path) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")
    if case.devices > 1 and case.is_plain:
        run_fsdp2(partial(_run_fsdp2_rank, case, device.type, out), case.devices)
    elif case.devices > 1:
        _fit(case, None, Seen(case, Clock(device), traced, out))
    else:
        model, before = make_model(case), HostMemory().now_bytes
        if case.is_plain:
            result = _run_plain(case, model, Clock(device), device)
        else:
            seen = Seen(case, Clock(device), traced, out)
            result = seen.result(_fit(case, model, seen))
        return result | {"outcome": "trained", "host_bytes_before": before}
    ranks: list[dict[str, Any]] = [json.loads(of_rank(out, rank).read_text()) for rank in range(case.devices)]
    kept = (
        "step_s",
        "longest_after_two",
        "host_peak_bytes",
        "gpu_peak_bytes",
        "gpu_reserved_bytes",
        "longest",
        "machine",
    )
    others = [{key: found[key] for key in kept if key in found} for found in ranks]
    host_bytes = sum(found["host_peak_bytes"] for found in ranks)
    return ranks[0] | {"outcome": "trained", "ranks": others, "host_peak_bytes": host_bytes, "host_bytes_before": 0}


def _fit(case: Case, model: nn.Module | None, seen: Seen) -> ElixirStrategy:
    strategy = ElixirStrategy(
        gpu_memory_limit=case.gpu_limit,
        cpu_memory_limit=case.cpu_limit,
        autocast=case.autocast,
        use_fused_kernels=case.is_fused and case.model not in GPT_SHAPES,
        activations=case.activations,  # type: ignore[arg-type]
        start_method="fork",  # all is imported here
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="gpu" if seen.clock.device.type == "cuda" else "cpu",
        devices=case.devices,
        precision=case.precision,  # type: ignore[arg-type]
        max_steps=case.num_steps,
        gradient_clip_val=case.clip or None,
        accumulate_grad_batches=case.accumulate,
        callbacks=[seen],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    lit = Lit(case, seen.clock, model)
    seen.clock.start()  # not before: to make a Trainer imports mpi4py where that is there, 0.7 to 1.2 s on H200s
    trainer.fit(lit)
    return strategy


def _run_fsdp2_rank(case: Case, kind: str, out: Path, rank: int, shard: Callable[[nn.Module], nn.Module]) -> None:
    """In each process."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    host, clock = HostMemory(), Clock(device)
    with torch.device("meta"):
        model = make_model(case, has_values=False)
    model = shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=kind == "cuda")
    losses = []
    for tokens in batches_of(case, rank):
        loss = model(tokens.to(device, non_blocking=True))
        loss.backward()
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        clock.step_ends()
    found = steps_seen(clock) | {"losses": [loss.item() for loss in losses], "host_peak_bytes": host.peak_bytes}
    of_rank(out, rank).write_text(json.dumps(found))


def _run_plain(case: Case, model: nn.Module, clock: Clock, device: torch.device) -> dict[str, Any]:
    """bf16 parameters and gradients, an fp32 master, fused AdamW."""
    host = HostMemory()
    limit_device(case, device)
    if case.is_fused and case.model not in GPT_SHAPES:
        fuse(model, True, device)  # the same operators, without the strategy
    for one in model.parameters():
        one.data = one.data.to(device=device, dtype=torch.bfloat16)
    model.to(device)  # buffers, as they are: rotary embeddings have theirs in fp32
    parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float() for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-5, weight_decay=0.0, fused=True)
    losses = []
    for tokens in batches_of(case):
        with torch.autocast(device.type, torch.bfloat16, enabled=case.autocast):
            loss = model(tokens.to(device, non_blocking=True))
        loss.backward()
        if case.clip:
            nn.utils.clip_grad_norm_(parameters, case.clip)
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        losses.append(loss.detach())
        clock.step_ends()
    return steps_seen(clock) | {"losses": [loss.item() for loss in losses], "host_peak_bytes": host.peak_bytes}


class HostMemory:
    """What this process takes of the host's memory, looked at all the time. Files that it maps, such as libraries, are
    left out: the system takes those pages back where it needs them."""

    _PAUSE_S = 0.05

    def __init__(self) -> None:
        self.peak_bytes = self.now_bytes = 0
        self._look()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(self._PAUSE_S)
            self._look()

    def _look(self) -> None:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        self.now_bytes = sum(int(fields.get(key, "0").split()[0]) * 1024 for key in ("RssAnon", "RssShmem"))
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)


def child(case: Case, gpu_limit: int | None, device: str, traced: int | None, out: Path) -> None:
    case = case if gpu_limit is None or case.is_plain else replace(case, gpu_limit=gpu_limit)
    logging.basicConfig(format="%(relativeCreated)d ms: %(message)s")
    logging.getLogger("lightning_elixir").setLevel(logging.INFO)
    host = HostMemory() if case.devices == 1 else None  # ranks are forked, and threads are not
    try:
        on = torch.device(device, 0) if device == "cuda" else torch.device(device)
        result = run_case(case, on, traced, out)
    except CapacityError as error:
        result = {"outcome": "refused", "why": str(error), "host_peak_bytes": host.peak_bytes if host else 0}
    except torch.OutOfMemoryError as error:
        result = {"outcome": "out of memory", "why": str(error)}
    except (ProcessRaisedException, ProcessExitedException) as error:  # of a rank
        result = {"outcome": _outcome_of_rank(error), "why": str(error)[-2000:]}
    out.write_text(json.dumps(result | {"case": asdict(case)}))


def _outcome_of_rank(error: ProcessRaisedException | ProcessExitedException) -> str:
    if isinstance(error, ProcessExitedException):
        return "killed" if error.signal_name == "SIGKILL" else f"failed ({error.exit_code})"
    told = {"CapacityError": "refused", "OutOfMemoryError": "out of memory"}
    return next((outcome for name, outcome in told.items() if name in str(error)), "failed")


# ------------------------------------------------------------------------------------------------- all of them


def touch_s(nbytes: int) -> float:
    """Seconds in which all cores touch so many bytes of fresh host memory."""
    started = time.perf_counter()
    pieces = [torch.empty(GIB, dtype=torch.uint8) for _ in range(max(1, nbytes // GIB))]
    threads = [threading.Thread(target=_touch, args=(pieces[i :: os.cpu_count() or 1],)) for i in range(len(pieces))]
    for thread in threads[: os.cpu_count() or 1]:
        thread.start()
    for thread in threads[: os.cpu_count() or 1]:
        thread.join()
    return time.perf_counter() - started


def _touch(pieces: list[Tensor]) -> None:
    for piece in pieces:
        piece[::512].zero_()


def run(
    cases: Mapping[str, Case], arguments: argparse.Namespace, started: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, case in cases.items():
        left = arguments.budget_s - (time.monotonic() - started)
        if left < 20:
            yield name, {"outcome": "left out: no time"}
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.json"
            log = Path(arguments.out).with_suffix(f".{name}.log")
            work = partial(child, case, arguments.gpu_limit, arguments.device, arguments.trace, out)
            code = _forked(work, log, min(left, arguments.timeout_s))
            if out.exists():
                yield name, json.loads(out.read_text())
                continue
            outcome = "took too long" if code is None else "killed" if code == -9 else f"failed ({code})"
            yield name, {"outcome": outcome, "why": log.read_text(errors="replace")[-4000:]}


def _forked(work: Callable[[], None], log: Path, timeout_s: float) -> int | None:
    """Run it in a fork of this process, which ends with all that it has started.

    Returns:
        Its exit code, negative for a signal; None: it took too long, and the log ends with where its threads were.
    """
    faulthandler.register(signal.SIGUSR1)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # nothing of the parent's is to be ended
    with suppress(OSError):  # it may have done so, or have ended
        os.setpgid(pid, pid)
    try:
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.killpg(pid, signal.SIGUSR1)
        time.sleep(_TO_SAY_WHERE_S)
        return None
    finally:
        with suppress(ProcessLookupError):  # nothing is left of it, usually
            os.killpg(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def timed_touch(nbytes: int) -> float:
    """`touch_s` in a process of its own: this one starts no threads, since it forks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds"

        def work() -> None:
            out.write_text(str(touch_s(nbytes)))

        _forked(work, Path(folder) / "log", 120.0)
        return float(out.read_text())


def parser_of(
    text: str, cases: Mapping[str, Case], suites: Mapping[str, list[str]], out: str
) -> argparse.ArgumentParser:
    """The command's options, for these cases.

    Args:
        text: What the command does.
        out: Where results go unless told.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=suites)
    parser.add_argument("--cases", nargs="+", choices=cases, default=[])
    parser.add_argument("--gpu-limit", type=parse_size, help="in place of the cases' own")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--timeout-s", type=float, default=200.0, help="of each case")
    parser.add_argument("--budget-s", type=float, default=560.0, help="of all")
    parser.add_argument("--touch-first", action="store_true", help="have the machine grow its memory before")
    parser.add_argument("--stop-at-failure", action="store_true", help="leave out what comes after a case that fails")
    parser.add_argument("--trace", type=int, help="number of the batch whose work on the device is looked at")
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser


def names_of(arguments: argparse.Namespace, suites: Mapping[str, list[str]]) -> list[str]:
    """Of the cases that a command asks for."""
    names: list[str] = suites[arguments.suite] if arguments.suite else arguments.cases
    return names


def measured(cases: Mapping[str, Case], arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the cases, print a line for each, and keep what came of them in the file that was asked for."""
    if any(case.model not in GPT_SHAPES for case in cases.values()):  # seconds, for each of the forks
        from transformers.models.llama import modeling_llama  # noqa: F401
        from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401
    if any(case.lora for case in cases.values()):
        import peft  # noqa: F401
    started = time.monotonic()
    found: dict[str, Any] = {"command": sys.argv, "torch": torch.__version__, "cases": {}}
    if arguments.touch_first:
        found["touch_first_s"] = timed_touch(available_host_bytes() * 9 // 10)
    for name, result in run(cases, arguments, started):
        taken = result.get("host_peak_bytes", 0) - result.get("host_bytes_before", 0)
        if arguments.touch_first and taken > GIB:
            result["touch_s"] = timed_touch(taken)
        found["cases"][name] = result
        arguments.out.write_text(json.dumps(found, indent=1))
        has_failed = result["outcome"] != "trained"
        figures = {
            key: result.get(key)
            for key in ("first_step_s", "step_s", "predicted_s", "longest_after_two", "host_peak_bytes", "touch_s")
        }
        shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items() if value)
        print(f"{name:18s} {result['outcome']}: {shown or result.get('why', '')[-300:]}", flush=True)
        if result.get("longest_after_two", 0) > _MOST_MEDIANS:
            print(f"    a step of more than {_MOST_MEDIANS} medians: {result.get('longest')}", flush=True)
        if has_failed and arguments.stop_at_failure:
            break
    return found


def main() -> None:
    arguments = parser_of(__doc__ or "", CASES, SUITES, "defaults.json").parse_args()
    measured({name: CASES[name] for name in names_of(arguments, SUITES)}, arguments)


if __name__ == "__main__":
    main()
