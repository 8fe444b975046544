"""Train a byte-level GPT on the Python standard library's own sources with `Trainer(strategy="elixir")`.

    python3 dev.py example                                    # about two minutes on two CPU cores
    python3 dev.py example --policy cuda                      # the same with room for everything: no chunk moves
    python3 dev.py example --plain                            # the same model and data without lightning_elixir
    python3 dev.py example --size 7b --precision bf16-mixed --checkpointing --policy auto --gpu-memory-limit 24GiB

The small model is trained with less GPU memory than its parameters take (without a GPU, a part of host memory plays
it), so its chunks come and go. The program prints the validation loss (nats a byte) as it falls, where the chunks
lived and what was moved, and a sample of what the model has learned to write.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import platform
import resource
import statistics
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Subset

if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    try:
        import lightning.pytorch as pl
    except ModuleNotFoundError:  # the other name of the same package
        import pytorch_lightning as pl

VOCABULARY = 256  # bytes
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
MAX_VALIDATIONS = 7  # besides the one before training
TIGHT_LIMIT = "2MiB"  # the tiny model's parameters alone take 3.2 MiB


# ------------------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class Size:
    """Shape of a GPT and how to train it by default."""

    layers: int
    width: int
    heads: int
    seq_len: int = 1024
    batch_size: int = 4
    steps: int = 20
    lr: float = 2e-4
    val_batches: int = 4


SIZES = {
    "tiny": Size(4, 128, 4, seq_len=128, batch_size=16, steps=400, lr=3e-3, val_batches=16),
    "350m": Size(24, 1024, 16),
    "1.3b": Size(24, 2048, 16),
    "2.7b": Size(32, 2560, 32),
    "4b": Size(32, 3072, 24),
    "7b": Size(32, 4096, 32),
    "10b": Size(48, 4096, 32),
    "13b": Size(40, 5120, 40),
    "20b": Size(24, 8192, 64),
    "30b": Size(48, 7168, 56),
    "66b": Size(64, 9216, 72),
    "175b": Size(96, 12288, 96),
}


class Linear(nn.Linear):
    """Without bias, drawn from N(0, std) and nothing else before: drawing billions of numbers twice takes minutes."""

    def __init__(self, in_features: int, out_features: int, std: float = 0.02) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Block(nn.Module):
    """Causal self-attention and an MLP, each on the normalised residual stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        residual_std = 0.02 / math.sqrt(2 * size.layers)  # keeps the stream's variance independent of the depth
        self.norm_attention = nn.LayerNorm(size.width)
        self.qkv = Linear(size.width, 3 * size.width)
        self.out = Linear(size.width, size.width, residual_std)
        self.norm_mlp = nn.LayerNorm(size.width)
        self.up = Linear(size.width, 4 * size.width)
        self.down = Linear(4 * size.width, size.width, residual_std)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Decoder-only transformer over bytes with learned positions and a head tied to the embedding."""

    def __init__(self, size: Size, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.seq_len, size.width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = Linear(size.width, VOCABULARY)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, length, 256] of the byte after each of `tokens` [batch, length]."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.is_checkpointed and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


# -------------------------------------------------------------------------------------------------------- the data


class Windows(Dataset[Tensor]):
    """Back-to-back pieces of `seq_len + 1` bytes, overlapping by the one that is only predicted."""

    def __init__(self, text: Tensor, seq_len: int) -> None:
        self.text = text  # 1-D, uint8
        self.seq_len = seq_len

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.seq_len

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.seq_len
        return self.text[start : start + self.seq_len + 1].long()


def library_sources() -> tuple[Tensor, Tensor]:
    """The standard library's sources for training and, every tenth file, for validation; 1-D, uint8."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [path for path in sorted(root.rglob("*.py")) if not skipped & set(path.relative_to(root).parts)]
    parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    for index, path in enumerate(files):
        parts[index % 10 == 0].extend(path.read_bytes())
    train, val = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return train, val


def make_loaders(size: Size, seed: int) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
    train, val = (Windows(text, size.seq_len) for text in library_sources())
    num_windows = min(len(val), size.val_batches * size.batch_size)
    chosen = range(0, len(val), max(1, len(val) // max(1, num_windows)))  # all over the files, the same each time
    generator = torch.Generator().manual_seed(seed)  # the order of the data depends on nothing else
    return (
        DataLoader(train, size.batch_size, shuffle=True, drop_last=True, generator=generator),
        DataLoader(Subset(val, chosen[:num_windows]), size.batch_size),
    )


# ---------------------------------------------------------------------------------------------------- the training


class LitGPT(pl.LightningModule):
    """The GPT as a LightningModule, made in `configure_model`, so that it can be sharded while it is built."""

    def __init__(self, size: Size, is_checkpointed: bool, sample_bytes: int) -> None:
        super().__init__()
        self.size = size
        self.is_checkpointed = is_checkpointed
        self.sample_bytes = sample_bytes
        self.model: GPT | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPT(self.size, self.is_checkpointed)

    def loss(self, windows: Tensor) -> Tensor:
        logits = self.net(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    @property
    def net(self) -> GPT:
        if self.model is None:
            raise RuntimeError("the model is not built yet")
        return self.model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Continue the prompt `batch` [1, length] by `sample_bytes` bytes, each drawn from the 20 likeliest."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.sample_bytes):
            logits = self.net(batch[:, -self.size.seq_len :])[0, -1].float().cpu() / 0.7
            likeliest = logits.topk(20)
            choice = torch.multinomial(likeliest.values.softmax(0), 1, generator=generator)
            batch = torch.cat([batch, likeliest.indices[choice].view(1, 1).to(batch.device)], dim=1)
        return batch

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Weight decay for matrices, none for norms."""
        parameters = list(self.net.parameters())
        return [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]

    def make_optimizer(self) -> torch.optim.Optimizer:
        from lightning_elixir import HybridAdam

        return HybridAdam(self.parameter_groups(), lr=self.size.lr, betas=BETAS)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer()
        warm_up = max(1, self.size.steps // 20)

        def factor(step: int) -> float:
            progress = (step - warm_up) / max(1, self.size.steps - warm_up)
            return min((step + 1) / warm_up, 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress)))))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class PlainLitGPT(LitGPT):
    """The reference without lightning_elixir: plain Lightning and `torch.optim.AdamW` under the engine's numerics.

    Mixed precision means here what it means there: the parameters live in the 16-bit dtype, and AdamW updates an fp32
    master of them that it feeds with the 16-bit gradients.
    """

    def __init__(self, size: Size, is_checkpointed: bool, sample_bytes: int, mixed_dtype: torch.dtype | None) -> None:
        super().__init__(size, is_checkpointed, sample_bytes)
        self.mixed_dtype = mixed_dtype
        self.masters: dict[nn.Parameter, Tensor] = {}

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device(
                "cpu"
            ):  # where the engine builds too; on the GPU another generator would draw other values
                super().configure_model()
            if self.mixed_dtype is not None:
                self.masters = {p: p.detach().clone() for p in self.net.parameters()}
                self.net.to(self.mixed_dtype)

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.masters = {p: master.to(p.device) for p, master in self.masters.items()}
        groups = self.parameter_groups()
        for group in groups:
            group["params"] = [self.masters.get(p, p) for p in group["params"]]
        return torch.optim.AdamW(groups, lr=self.size.lr, betas=BETAS, foreach=False)

    def on_after_backward(self) -> None:
        for p, master in self.masters.items():
            master.grad = None if p.grad is None else p.grad.float()
            p.grad = None

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            for p, master in self.masters.items():
                p.copy_(master)


class Recorder(pl.Callback):
    """Prints validation losses and keeps losses and times of all steps.

    Args:
        is_timed: Wait for the GPU at the ends of every step, so that its time is the step's alone.
    """

    def __init__(self, is_timed: bool) -> None:
        self.is_timed = is_timed
        self.losses: list[Tensor] = []
        self.step_s: list[float] = []
        self.val_losses: list[tuple[int, float]] = []
        self._start_s = 0.0

    def _now_s(self) -> float:
        if self.is_timed and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._start_s = self._now_s()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        self.losses.append(outputs["loss"].detach())
        self.step_s.append(self._now_s() - self._start_s)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loss = float(trainer.callback_metrics["val_loss"])
        self.val_losses.append((trainer.global_step, loss))
        pace = f", {statistics.median(self.step_s[-20:]):.2f} s a step" if self.step_s else ""
        pl_module.print(f"step {trainer.global_step:5d}: validation loss {loss:.3f}{pace}")


# ------------------------------------------------------------------------------------------------------ the report


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def describe_chunks(strategy: Any) -> Iterator[str]:
    """Where the chunks lived by the strategy's plan, what moved, and what the plan predicted."""
    plan, stats = strategy.plan, strategy.stats()
    kinds: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for chunk in plan.chunks:
        states = f"Adam's states on {chunk.optim_tier.name}" if chunk.requires_grad else "frozen"
        residence = "always on the GPU" if chunk.is_persistent else f"on {chunk.param_tier.name}, come and go"
        kind = f"parameters {residence}; {states}"
        kinds[kind] += 1
        sizes[kind] += chunk.nbytes
    yield f"the parameters live in {len(plan.chunks)} chunks of up to {mib(plan.block_bytes)} ({plan.compute_dtype}):"
    if strategy.root_device.type == "cpu":
        yield '  (there is no GPU: "GPU" is the part of host memory that gpu_memory_limit limits)'
    yield from (f"  {count:3d} chunks, {mib(sizes[kind]):>12}: {kind}" for kind, count in sorted(kinds.items()))
    if plan.rcache_blocks:
        yield f"those that come and go share room for {plan.rcache_blocks} chunks on the GPU (the rCache)"
    yield (
        f"chunks fetched {stats.fetches:,} times when they were needed, and {stats.prefetches:,} times ahead of need; "
        f"evicted {stats.evictions:,} times"
    )
    yield f"bytes moved: {mib(stats.h2d_bytes)} to the GPU, {mib(stats.d2h_bytes)} back"
    notes = plan.notes
    yield f"predicted: {mib(notes.get('gpu_bytes', 0))} on the GPU, {mib(notes.get('host_bytes', 0))} on the host"
    held = ", ".join(f"{name} {mib(value)}" for name, value in stats.held_bytes.items() if value)
    yield f"held now: {held}"


def peak_bytes() -> dict[str, int]:
    """The most memory this process has had at once."""
    peaks = {"peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        peaks["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
        peaks["peak_gpu_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return peaks


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument(
        "--precision", default="32-true", help="32-true (default), 64-true, 16-mixed, bf16-mixed, 16-true, bf16-true"
    )
    parser.add_argument("--policy", help="placement policy: auto (default), cpu, cuda, const")
    parser.add_argument("--gpu-memory-limit", help='plan as if there were no more, such as "24GiB"')
    parser.add_argument("--cpu-memory-limit", help="the same for the host")
    parser.add_argument("--chunk-size", help='bytes of a chunk, such as "64MiB"; found by a search otherwise')
    parser.add_argument(
        "--steps", type=int, help="optimizer steps; this and the next four default to what suits the size"
    )
    parser.add_argument("--batch-size", type=int, help="sequences a step on each rank")
    parser.add_argument("--seq-len", type=int, help="bytes a sequence")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--val-batches", type=int, help="batches of a validation; 0: none")
    parser.add_argument("--devices", default="1")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--checkpointing", action="store_true", help="recompute each layer's activations in backward")
    parser.add_argument("--sample-bytes", type=int, help="length of the sample (default: 400 for tiny, 0 for others)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write losses, times, memory and the plan's notes")
    parser.add_argument("--report-dir", metavar="DIR", help="write what was predicted and what was measured there")
    parser.add_argument("--plain", action="store_true", help="train without lightning_elixir, to compare")
    return parser.parse_args()


def placement_options(arguments: argparse.Namespace) -> dict[str, str]:
    """Options of `ElixirStrategy` that were given, or that make the small model's chunks move."""
    options = {
        "placement_policy": arguments.policy,
        "gpu_memory_limit": arguments.gpu_memory_limit,
        "cpu_memory_limit": arguments.cpu_memory_limit,
        "chunk_size": arguments.chunk_size,
        "report_dir": arguments.report_dir,
    }
    if arguments.size == "tiny" and arguments.policy is None and arguments.gpu_memory_limit is None:
        # It would fit anywhere, and nothing would move.
        is_gpu = arguments.accelerator in ("gpu", "cuda") or (
            arguments.accelerator == "auto" and torch.cuda.is_available()
        )
        options |= {"placement_policy": "cpu"} if is_gpu else {"gpu_memory_limit": TIGHT_LIMIT}
    return {name: value for name, value in options.items() if value is not None}


def make_strategy(arguments: argparse.Namespace) -> Any:
    """ "elixir" as a name where there is no option, else an `ElixirStrategy`; "auto" for --plain."""
    if arguments.plain:
        return "auto"
    import lightning_elixir  # registers "elixir"

    options = placement_options(arguments)
    return lightning_elixir.ElixirStrategy(**options) if options else "elixir"  # type: ignore[arg-type]


def opening(size: Size, arguments: argparse.Namespace) -> str:
    """What is about to be trained, and within what."""
    with torch.device("meta"):
        numel = sum(p.numel() for p in GPT(size).parameters())
    param_bytes = numel * {"64-true": 8, "32-true": 4}.get(arguments.precision, 2)
    all_bytes = numel * {"64-true": 32, "16-true": 8, "bf16-true": 8}.get(arguments.precision, 16)
    options = {} if arguments.plain else placement_options(arguments)
    within = ", ".join(f"{name}={value}" for name, value in options.items())
    return (
        f"a GPT of {numel:,} parameters, {arguments.precision}: {mib(param_bytes)} of parameters, {mib(all_bytes)} with"
        f" gradients and Adam's states; {within or 'no limits'}"
    )


def quieten() -> None:
    """Leave the terminal to what this program prints."""
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # slicing bytes needs none
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")  # Lightning 2.6 on torch 2.13
    for name in (pl.__name__, "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


def main() -> None:
    arguments = parse_arguments()
    overrides = {name: getattr(arguments, name) for name in ("steps", "batch_size", "seq_len", "lr", "val_batches")}
    size = replace(SIZES[arguments.size], **{name: value for name, value in overrides.items() if value is not None})
    sample_bytes = arguments.sample_bytes
    if sample_bytes is None:
        sample_bytes = 400 if arguments.size == "tiny" else 0
    quieten()
    torch.set_float32_matmul_precision("high")

    pl.seed_everything(arguments.seed, verbose=False)
    recorder = Recorder(is_timed=arguments.json is not None)
    trainer = pl.Trainer(
        strategy=make_strategy(arguments),
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        precision=arguments.precision,
        max_steps=size.steps,
        val_check_interval=max(min(10, size.steps), size.steps // MAX_VALIDATIONS),
        limit_val_batches=size.val_batches,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,  # so that the first validation loss is the untrained model's
        gradient_clip_val=CLIP_NORM,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if arguments.plain:
        is_gpu = trainer.strategy.root_device.type == "cuda"
        mixed = {"16-mixed": torch.float16 if is_gpu else torch.bfloat16, "bf16-mixed": torch.bfloat16}
        module: LitGPT = PlainLitGPT(size, arguments.checkpointing, sample_bytes, mixed.get(str(trainer.precision)))
    else:
        module = LitGPT(size, arguments.checkpointing, sample_bytes)

    train, val = make_loaders(size, arguments.seed)
    if trainer.is_global_zero:
        print(opening(size, arguments))
    start_s = time.perf_counter()
    trainer.fit(module, train, val)
    fit_s = time.perf_counter() - start_s
    peaks = peak_bytes()

    chunks = [] if arguments.plain else list(describe_chunks(trainer.strategy))
    median_s = statistics.median(recorder.step_s)
    if trainer.is_global_zero:
        tokens_per_s = size.batch_size * size.seq_len * trainer.world_size / median_s
        speed = f"{tokens_per_s:,.0f} bytes of text a second at the usual step"
        print(f"\ntrained {len(recorder.losses)} steps in {fit_s:.0f} s, {speed}")
        print(*chunks, sep="\n")
        peaks_text = ", ".join(f"{name.removesuffix('_bytes')} {mib(value)}" for name, value in peaks.items())
        print(f"of the whole process: {peaks_text}")
        if arguments.json:
            report = {
                "arguments": {name: str(value) for name, value in vars(arguments).items()},
                "size": asdict(size),
                "versions": {
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "lightning": version(pl.__name__.partition(".")[0]),
                },
                "losses": [float(loss) for loss in recorder.losses],
                "val_losses": recorder.val_losses,
                "step_s": recorder.step_s,
                "median_step_s": median_s,
                "fit_s": fit_s,
                **peaks,
            }
            if not arguments.plain:
                plan = trainer.strategy.plan  # type: ignore[attr-defined]
                report["plan"] = {"policy": plan.policy, "rcache_blocks": plan.rcache_blocks, "notes": plan.notes}
                report["stats"] = trainer.strategy.stats().as_dict()  # type: ignore[attr-defined]
            arguments.json.write_text(json.dumps(report, indent=1))

    if sample_bytes:
        prompts = [torch.tensor(list(b"class "))] * trainer.world_size  # each rank predicts one
        samples = trainer.predict(module, DataLoader(prompts))  # type: ignore[arg-type]
        if trainer.is_global_zero and samples:
            print("\na sample:\n" + bytes(samples[0][0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
