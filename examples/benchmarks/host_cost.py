"""What the engine costs the host: time of the thread that trains, beside plain PyTorch doing the same arithmetic.

    python examples/benchmarks/host_cost.py --json host_cost.json

Models of many tiny modules, on one thread of the CPU, so that next to nothing but the launching of operators is
measured. Steps of both are taken in turns; the figures are medians of `time.thread_time`, and of the smallest tenth
(`low`), which other programs on the machine disturb least. Cases:

- resident: everything stays. hooked: everything could go, and nothing does; a chunk is a layer.
- moving: four blocks of 24 are there. split: the same with layers that are cut into two chunks.
- checkpointed: transformers' Llama with `gradient_checkpointing_enable()`, moving; needs `transformers`.
- autocast: moving, bf16 with norms in fp32, under `torch.autocast`, as `precision="bf16-mixed"` has it.
- trainer: the same under `Trainer(precision="bf16-mixed")`, a whole step, beside a Trainer of bf16 parameters.

`--profile CASE` prints where the time of ours goes, function by function, instead.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_elixir.core.host import cpu_model
from lightning_elixir.optim import HybridAdam
from lightning_elixir.plan.types import Plan
from lightning_elixir.planning import Budget, ChunkSizes, PlacementRequest, make_plan
from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer

LAYERS, WIDTH, TOKENS = 24, 16, 4
CHUNK_BYTES = 30 * 1024  # a layer in fp32, with what aligns its parameters
SPLIT_BYTES = 16 * 1024
MOVING_BLOCKS, MOVING_DEPTH = 4, 2


class Layer(nn.Module):
    """The modules of a GPT's layer: six with parameters, and the layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.proj(q * torch.sigmoid(k) + v)
        further: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + further


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    model.train()
    return model


def plan_of(model: nn.Module, case: str, dtype: torch.dtype) -> Plan:
    if case == "resident":
        return make_plan(model, PlacementRequest(policy="cuda"), compute_dtype=dtype)
    size = (SPLIT_BYTES if case == "split" else CHUNK_BYTES) * dtype.itemsize // 4
    plan = make_plan(
        model, PlacementRequest(policy="cpu"), chunk_sizes=ChunkSizes(chunk_size=size), budget=Budget(),
        compute_dtype=dtype,
    )  # fmt: skip
    if case == "hooked":
        return replace(plan, rcache_blocks=sum(plan.blocks_of(c.id) for c in plan.chunks), prefetch_depth=4)
    return replace(plan, rcache_blocks=max(MOVING_BLOCKS, plan.rcache_blocks), prefetch_depth=MOVING_DEPTH)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Whose updates, of ours on the host, run beside the thread that trains."""
    return HybridAdam(model.parameters(), lr=1e-3)


def in_bf16(model: nn.Module) -> nn.Module:
    """bf16 but for the norms, as plain PyTorch has it."""
    for module in model.modules():
        if not isinstance(module, nn.LayerNorm):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.bfloat16()
    return model


class Case:
    """Plain PyTorch and ours, a forward and backward at a time."""

    def __init__(self, name: str) -> None:
        is_llama, has_autocast = name == "checkpointed", name == "autocast"
        dtype = torch.bfloat16 if has_autocast else torch.float32
        model: nn.Module = llama() if is_llama else Net()
        plain = copy.deepcopy(model)
        self.plain = in_bf16(plain) if has_autocast else plain
        self.has_autocast = has_autocast
        self.module = ElixirModule(
            model, plan_of(model, name, dtype), device="cpu", autocast=has_autocast,
            keep_fp32=[nn.LayerNorm] if has_autocast else None,
        )  # fmt: skip
        self.optimizer = ElixirOptimizer(self.module, adam(model))
        self.plain_optimizer = adam(self.plain)
        tokens = torch.arange(TOKENS).view(1, -1)
        self.inputs: dict[str, Tensor] = {"input_ids": tokens, "labels": tokens} if is_llama else {}
        self.args = () if is_llama else (torch.randn(TOKENS, WIDTH),)
        self.num_modules = sum(any(True for _ in m.parameters(recurse=False)) for m in model.modules())

    @staticmethod
    def _loss(output: Any) -> Tensor:
        return output if isinstance(output, Tensor) else output.loss

    def plain_pass(self) -> None:
        with torch.autocast("cpu", torch.bfloat16) if self.has_autocast else nullcontext():
            loss = self._loss(self.plain(*self.args, **self.inputs))
        loss.backward()

    def own_pass(self) -> None:
        self.optimizer.backward(self._loss(self.module(*self.args, **self.inputs)))

    def plain_step(self) -> None:
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()

    def own_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.module.engine.synchronize()


def low(values: list[float]) -> float:
    """Median of the smallest tenth."""
    return statistics.median(sorted(values)[: max(1, len(values) // 10)])


def measure(name: str, steps: int) -> dict[str, Any]:
    """Microseconds a pass (forward and backward) and what of these each module with parameters costs."""
    case = Case(name)
    seen: dict[str, list[float]] = {"plain_pass": [], "own_pass": [], "plain_step": [], "own_step": []}
    for step in range(steps + 5):
        for kind in ("plain_pass", "plain_step", "own_pass", "own_step"):
            begin_s = time.thread_time()
            getattr(case, kind)()
            if step >= 5:
                seen[kind].append((time.thread_time() - begin_s) * 1e6)
        if step == 4:
            case.module.reset_stats()
    stats = case.module.stats().as_dict()
    case.module.close()
    median = {kind: statistics.median(values) for kind, values in seen.items()}
    least = {kind: low(values) for kind, values in seen.items()}
    return {
        "modules": case.num_modules,
        "chunks": len(case.module.plan.chunks),
        "median_us": median,
        "low_us": least,
        "us_per_module": (least["own_pass"] - least["plain_pass"]) / case.num_modules,
        "counters_per_step": {k: stats[k] / steps for k in ("fetches", "prefetches", "evictions", "hits")},
    }


class Lit(pl.LightningModule):
    """Takes the time of whole steps."""

    def __init__(self, is_plain: bool) -> None:
        super().__init__()
        self.net = in_bf16(Net()) if is_plain else Net()
        self.is_plain = is_plain
        self.seen: list[float] = []
        self._begin_s = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._begin_s = time.thread_time()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((time.thread_time() - self._begin_s) * 1e6)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.is_plain else nullcontext():
            loss: Tensor = self.net(batch)
            return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adam(self)


def fit(is_plain: bool, steps: int) -> list[float]:
    strategy: Any = "auto"
    if not is_plain:
        plan = plan_of(Lit(True), "moving", torch.bfloat16)
        strategy = ElixirStrategy(
            gpu_memory_limit=3 * plan.block_bytes * MOVING_BLOCKS, chunk_size=CHUNK_BYTES // 2, keep_fp32=[nn.LayerNorm]
        )
    module = Lit(is_plain)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, precision="32-true" if is_plain else "bf16-mixed",
        max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    batches: Any = torch.randn(TOKENS * steps, WIDTH)
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=TOKENS))
    return module.seen[10:]


def measure_trainer(steps: int) -> dict[str, Any]:
    seen: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(3):
        for is_plain in seen:
            seen[is_plain] += fit(is_plain, max(30, steps // 3))
    modules = 6 * LAYERS
    least = {("plain_step" if k else "own_step"): low(v) for k, v in seen.items()}
    return {
        "modules": modules,
        "median_us": {("plain_step" if k else "own_step"): statistics.median(v) for k, v in seen.items()},
        "low_us": least,
        "us_per_module": (least["own_step"] - least["plain_step"]) / modules,
    }


@contextmanager
def profiled(lines: int) -> Iterator[None]:
    profile = cProfile.Profile(time.thread_time)
    profile.enable()
    yield
    profile.disable()
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(lines)


def show_profile(name: str, steps: int) -> None:
    case = Case(name)
    for _ in range(5):
        case.own_pass()
        case.own_step()
    with profiled(45):
        for _ in range(steps):
            case.own_pass()
            case.own_step()
    case.module.close()


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    **{name: (lambda steps, name=name: measure(name, steps))  # type: ignore[misc]
       for name in ("resident", "hooked", "moving", "split", "checkpointed", "autocast")},
    "trainer": measure_trainer,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", choices=[c for c in CASES if c != "trainer"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.profile:
        show_profile(arguments.profile, arguments.steps)
        return
    results = {}
    print("| case | plain pass | own pass | us a module | plain step | own step | fetched | evicted |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in arguments.cases:
        result = results[name] = CASES[name](arguments.steps)
        us = result["low_us"]
        moved = result.get("counters_per_step", {})
        cells = [us.get("plain_pass"), us.get("own_pass"), result["us_per_module"], us["plain_step"], us["own_step"]]
        cells += [sum(moved[k] for k in ("fetches", "prefetches")) if moved else None, moved.get("evictions")]
        print(f"| {name} |" + "|".join(" - " if c is None else f" {c:.1f} " for c in cells) + "|", flush=True)
    if arguments.json:
        machine = {"cpu": cpu_model(), "torch": torch.__version__, "steps": arguments.steps}
        arguments.json.write_text(json.dumps({"machine": machine, "cases": results}, indent=1))


if __name__ == "__main__":
    main()
