"""Experts spread over GPUs, beside the same model sharded, under FSDP2 on whole cards, and a dense one of its size.

    python examples/benchmarks/experts.py --ranks 2 --gpu-limit 40GiB --out experts_2.json
    python examples/benchmarks/experts.py --ranks 4 --gpu-limit 40GiB --layers 24 --out experts_4.json
    python examples/benchmarks/experts.py --preset toy --device cpu --ranks 2 --tokens 256 512 --out toy_experts.json

The model is Qwen3-30B-A3B's shape with fewer layers: 128 experts of which each token takes 8. `experts`: expert
parallel over all ranks, by the model's own plan; `sharded`: the same strategy without; `dense`: a Qwen3 whose layers
have as many parameters, sharded, which computes with all of them for each token; `fsdp2`, `fsdp2_dense`: FSDP2 without
offload, on as much of the card as it wants. All compute in bf16 beside an fp32 master with AdamW, and recompute each
layer in backward; the loss is taken in pieces, so that logits of all tokens are never there together.

With weights that were only drawn, the routers of deep layers choose the same few experts for most tokens (seen: after
four layers 48 of 128 get none, and one rank 1.4 times its share); those of a model in training are kept balanced by its
loss. So experts are chosen in turn here, a token's far from each other, so that they lie on all ranks, as most do that
are drawn; unless `--routing drawn` is given.

Every case is a run of `--ranks` processes of its own, which is ended after `--case-s` seconds; `--budget-s` bounds all.
Tokens are those of one rank in a micro-batch, in sequences of `--seq`, and `--accumulate` of those make a step; steps
are timed from mark to mark, the median after `--warmup`. `--fused` gives this package's systems
`use_fused_kernels=True`, and has them take the model's own loss, which that swaps. The result has tokens a second of
all ranks together, and how many times the dense model's that is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))

from compare import parse_size
from peers.jobs import Job
from peers.launch import run_job
from peers.model import put_drawn

SYSTEMS = ("experts", "sharded", "dense", "fsdp2", "fsdp2_dense")
PRESETS: dict[str, dict[str, int]] = {
    "qwen3": {"width": 2048, "heads": 32, "head_dim": 128, "kv": 4, "experts": 128, "chosen": 8, "inner": 768},
    "toy": {"width": 64, "heads": 4, "head_dim": 16, "kv": 2, "experts": 8, "chosen": 2, "inner": 32},
}
VOCABULARY = {"qwen3": 151936, "toy": 512}
_PIECE = 4096
"""Tokens whose logits are there at a time."""
_STRIDE = 37
"""From one expert of a token to its next; has no divisor in common with the number of experts."""
_NUM_DRAWN = 2**24 + 1  # odd, so that layers are not alike


@dataclass(frozen=True)
class ExpertsJob:
    """One case."""

    system: str
    preset: str
    layers: int
    seq: int
    tokens: int
    """Of one rank in a step."""
    ranks: int
    device: str
    gpu_limit: int | None
    warmup: int
    steps: int
    routing: str = "balanced"
    fused: bool = False
    """Whether fused operators are swapped into the models of this package."""
    micro_batches: int = 1
    """Of `tokens` each, whose gradients are added up for a step."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


# The model


def empty_model(job: ExpertsJob) -> nn.Module:
    """Without values."""
    import transformers

    shape, is_dense = PRESETS[job.preset], job.system.endswith("dense")
    common: dict[str, Any] = {
        "hidden_size": shape["width"],
        "num_hidden_layers": job.layers,
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv"],
        "head_dim": shape["head_dim"],
        "vocab_size": VOCABULARY[job.preset],
        "max_position_embeddings": max(4096, job.seq),
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    with torch.device("meta"):
        if is_dense:
            config = transformers.Qwen3Config(**common, intermediate_size=shape["experts"] * shape["inner"])
            return cast(nn.Module, transformers.Qwen3ForCausalLM(config))
        more: dict[str, Any] = {"moe_intermediate_size": shape["inner"], "num_experts": shape["experts"]}
        moe = transformers.Qwen3MoeConfig(**common, **more, num_experts_per_tok=shape["chosen"])
        return cast(nn.Module, transformers.Qwen3MoeForCausalLM(moe))


def fill(model: Any, part_of: Callable[[Tensor], tuple[Tensor, int]]) -> None:
    """Give a model values, the same in every system.

    Args:
        part_of: Gets a parameter, and gives what of it is on this rank, a contiguous part, and the number of elements
            before that part.
    """
    drawn: dict[torch.device, Tensor] = {}
    with torch.no_grad():
        for parameter in model.parameters():
            part, before = part_of(parameter)
            if parameter.dim() == 1:
                part.fill_(1.0)
                continue
            if part.device not in drawn:
                values = torch.randn(_NUM_DRAWN, generator=torch.Generator().manual_seed(7)) * 0.02
                drawn[part.device] = values.to(part.device)
            put_drawn(part.view(-1), drawn[part.device], before)
        for module in model.modules():
            if hasattr(module, "inv_freq") and hasattr(module, "config"):
                fresh = type(module)(module.config)
                module.inv_freq.copy_(fresh.inv_freq)
                module.original_inv_freq = fresh.inv_freq.clone()


def recompute_layers(model: Any) -> None:
    """Have each layer's forward run again in backward."""
    for layer in model.model.layers:
        inner = layer.forward

        def forward(*args: Any, _inner: Any = inner, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return _inner(*args, **kwargs)
            return checkpoint(_inner, *args, use_reentrant=False, **kwargs)

        layer.forward = forward


def balance(model: Any, job: ExpertsJob) -> None:
    """Have each expert get as many tokens, whatever the router says; its weights for them stay as they are."""
    if job.routing != "balanced" or job.system.endswith("dense"):
        return
    for number, layer in enumerate(model.model.layers):

        def choose(module: nn.Module, args: tuple[Any, ...], number: int = number) -> tuple[Any, ...]:
            tokens, chosen, weights = args
            places = torch.arange(chosen.numel(), device=chosen.device, dtype=chosen.dtype).view_as(chosen)
            return tokens, (places * _STRIDE + number) % PRESETS[job.preset]["experts"], weights

        layer.mlp.experts.register_forward_pre_hook(choose)


def loss_of(model: Any, tokens: Tensor, *, is_own: bool = False) -> Tensor:
    """Mean over all tokens but the last of each sequence.

    Args:
        is_own: Whether the model takes it, all at once.
    """
    if is_own:
        own: Tensor = model(input_ids=tokens, labels=tokens).loss
        return own
    hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1].flatten(0, 1)
    labels = tokens[:, 1:].flatten()

    def piece_of(rows: Tensor, wanted: Tensor) -> Tensor:
        return functional.cross_entropy(model.lm_head(rows).float(), wanted, reduction="sum")

    total = hidden.new_zeros((), dtype=torch.float32)
    for begin in range(0, labels.numel(), _PIECE):
        rows, wanted = hidden[begin : begin + _PIECE], labels[begin : begin + _PIECE]
        total = total + checkpoint(piece_of, rows, wanted, use_reentrant=False)
    mean: Tensor = total / labels.numel()
    return mean


def batch_of(job: ExpertsJob, step: int, rank: int) -> Tensor:
    """`[sequences, seq]`, int64, on the host."""
    seq = min(job.seq, job.tokens)
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY[job.preset], (job.tokens // seq, seq), generator=generator)


def device_of(job: ExpertsJob) -> torch.device:
    """Of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if job.device == "cuda" else torch.device("cpu")


class Marks:
    """When steps have ended on the device, and losses."""

    def __init__(self, job: ExpertsJob, device: torch.device) -> None:
        self._job = job
        self._device = device
        self._at: list[float] = []
        self._losses: list[float] = []

    def note(self, loss: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._at.append(time.perf_counter())
        self._losses.append(float(loss))
        if len(self._at) == self._job.warmup and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def result(self) -> dict[str, Any]:
        spans = [b - a for a, b in zip(self._at, self._at[1:], strict=False)][self._job.warmup - 1 :]
        step_s = statistics.median(spans)
        peak = torch.cuda.max_memory_allocated() if self._device.type == "cuda" else None
        tokens_per_s = self._job.tokens * self._job.micro_batches * self._job.ranks / step_s
        return {
            "step_s": step_s,
            "tokens_per_s": tokens_per_s,
            "steps_s": spans,
            "losses": self._losses,
            "gpu_peak_bytes": peak,
        }


# The systems


def run_elixir(job: ExpertsJob, result: Path) -> None:
    """A Trainer with `ElixirStrategy`."""
    from lightning_elixir import ElixirStrategy, HybridAdam
    from lightning_elixir._lightning import pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = None

        def configure_model(self) -> None:
            if self.net is not None:
                return
            self.net = empty_model(job)
            recompute_layers(self.net)
            balance(self.net, job)
            if self.global_rank == 0:  # the others have no values
                self.net.to_empty(device="cpu")
                fill(self.net, lambda parameter: (parameter, 0))

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return loss_of(self.net, batch, is_own=job.fused)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % job.micro_batches == 0:
                marks.note(outputs["loss"] * job.micro_batches)

        def configure_optimizers(self) -> Any:
            return HybridAdam(self.parameters(), lr=1e-5)

        def train_dataloader(self) -> Any:
            count = (job.warmup + job.steps) * job.micro_batches
            batches: Any = [batch_of(job, step, self.global_rank) for step in range(count)]
            return DataLoader(batches, batch_size=None)

    device = device_of(job)
    if job.gpu_limit is not None and job.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(job.gpu_limit / torch.cuda.mem_get_info()[1])
    marks = Marks(job, device)
    strategy = ElixirStrategy(
        expert_parallel_size=job.ranks if job.system == "experts" else 1,
        gpu_memory_limit=job.gpu_limit,
        use_fused_kernels=job.fused,
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=job.device,
        devices=job.ranks,
        precision="bf16-mixed",
        accumulate_grad_batches=job.micro_batches,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Model())
    if trainer.global_rank == 0:
        forecast = strategy.plan.forecast
        foreseen = None if forecast is None else forecast.times.total_s
        found = marks.result() | {"explained": strategy.plan.explain(), "predicted_s": foreseen}
        result.write_text(json.dumps(found))


def run_fsdp2(job: ExpertsJob, result: Path) -> None:
    """`fully_shard` over every layer, fp32 shards on the device, fused AdamW."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("nccl" if job.device == "cuda" else "gloo")
    rank = dist.get_rank()
    device = device_of(job)
    model: Any = empty_model(job)
    recompute_layers(model)
    balance(model, job)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    # By itself and kept whole, since the loss calls it piece by piece, and once more for each in backward.
    fully_shard(model.lm_head, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model.model, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)

    def part_of(parameter: Any) -> tuple[Tensor, int]:
        rows = -(-len(parameter) // job.ranks)  # of a rank; the last ones may have fewer, or none
        return parameter.to_local(), rank * rows * parameter.shape[1:].numel()

    fill(model, part_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=job.device == "cuda")
    marks = Marks(job, device)
    for step in range(job.warmup + job.steps):
        for index in range(job.micro_batches):
            model.set_requires_gradient_sync(index == job.micro_batches - 1)
            loss = loss_of(model, batch_of(job, step * job.micro_batches + index, rank).to(device))
            (loss / job.micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.note(loss.detach())
    if rank == 0:
        result.write_text(json.dumps(marks.result()))
    dist.destroy_process_group()


# The command


def compared(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each number of tokens: tokens a second of each system, and those of experts over the others'."""
    rows = []
    for tokens in sorted({case["job"]["tokens"] for case in cases}):
        own = {c["job"]["system"]: c.get("tokens_per_s") for c in cases if c["job"]["tokens"] == tokens}
        first = own.get("experts")
        ratios = {f"of_{name}": first / other for name, other in own.items() if first and other and name != "experts"}
        rows.append({"tokens": tokens, **own, **ratios})
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="qwen3")
    parser.add_argument("--layers", type=int, help="12; toy: 2")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 65536], help="of one rank, a step")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS[:4]), metavar="SYSTEM")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpu-limit", type=parse_size, help="of each GPU, for this package; FSDP2 has the whole card")
    parser.add_argument("--routing", choices=("balanced", "drawn"), default="balanced")
    parser.add_argument("--fused", action="store_true", help="use_fused_kernels=True: experts, sharded and dense")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of so many tokens a step")
    parser.add_argument("--touch-first", action="store_true", help="have the machine grow its memory before")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--case-s", type=float, default=240.0, help="longest time of one case")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="no case begins later than that")
    parser.add_argument("--out", type=Path, default=Path("experts.json"))
    return parser.parse_args()


def main() -> None:
    arguments, begin_s = parse_arguments(), time.monotonic()
    layers = arguments.layers or (2 if arguments.preset == "toy" else 12)
    about: dict[str, Any] = {"torch": torch.__version__, "arguments": {k: str(v) for k, v in vars(arguments).items()}}
    if arguments.touch_first:
        from defaults import timed_touch

        from lightning_elixir.core.host import available_host_bytes

        about["touch_first_s"] = timed_touch(available_host_bytes() * 9 // 10)
    cases: list[dict[str, Any]] = []
    for tokens in arguments.tokens:
        for system in arguments.systems:
            job = ExpertsJob(
                system,
                arguments.preset,
                layers,
                arguments.seq,
                tokens,
                arguments.ranks,
                arguments.device,
                arguments.gpu_limit,
                arguments.warmup,
                arguments.steps,
                arguments.routing,
                arguments.fused,
                arguments.accumulate,
            )
            left_s = arguments.budget_s - (time.monotonic() - begin_s)
            if left_s <= 0:
                cases.append({"job": asdict(job), "error": "the time was over"})
                continue
            command = [sys.executable, __file__, "--one"]
            found = run_job(cast(Job, job), command, min(arguments.case_s, left_s))
            cases.append({"job": asdict(job), **found})
            _show(cases[-1])
            arguments.out.write_text(json.dumps({**about, "cases": cases, "compared": compared(cases)}, indent=1))
    for row in compared(cases):
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


def _show(case: Mapping[str, Any]) -> None:
    job, name = case["job"], f"{case['job']['system']:12s} {case['job']['tokens']:6d} tokens"
    if "step_s" not in case:
        print(f"{name}: {case.get('error')}", flush=True)
        return
    peak = f", {case['gpu_peak_bytes'] / 2**30:.1f} GiB" if case["gpu_peak_bytes"] else ""
    per_rank = case["tokens_per_s"] / job["ranks"]
    print(
        f"{name}: {case['step_s']:.3f} s, {per_rank:.0f} tokens/s a rank{peak}, loss {case['losses'][-1]:.4f}",
        flush=True,
    )


def run_one(path: Path, result: Path) -> None:
    """In each process of a case."""
    import os

    job = ExpertsJob(**json.loads(path.read_text()))
    if job.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    run = run_fsdp2 if job.system.startswith("fsdp2") else run_elixir
    run(job, result)


if __name__ == "__main__":
    if "--one" in sys.argv:
        run_one(Path(sys.argv[-2]), Path(sys.argv[-1]))
    else:
        main()
