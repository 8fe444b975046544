"""A training loop of your own: `Fabric(strategy="elixir")` trains a small GPT in a part of the memory that it takes.

python examples/fabric_train.py                       # seconds on a CPU
python examples/fabric_train.py --check               # beside plain PyTorch: the same losses, bit for bit
python examples/fabric_train.py --devices 2 --precision bf16-mixed --memory 8GiB --width 2048 --layers 24
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_elixir import HybridAdam
from lightning_elixir.fabric import ElixirStrategy

VOCABULARY = 512


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.heads = max(1, width // 64)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, dim=2))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y: Tensor = x + self.mlp(self.norms[1](x))
        return y


class GPT(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def train(fabric: Any, options: argparse.Namespace) -> list[float]:
    """Train; returns the losses."""
    fabric.seed_everything(1, verbose=False)
    with fabric.init_module():  # with several ranks, rank 0 alone holds the whole model
        model = GPT(options.layers, options.width)
    model, optimizer = fabric.setup(model, HybridAdam(model.parameters(), lr=1e-3))
    generator = torch.Generator().manual_seed(fabric.global_rank)
    losses = []
    for step in range(options.steps):
        for micro in range(2):  # two micro-batches make a step
            tokens = torch.randint(0, VOCABULARY // 8, (4, 65), generator=generator).to(fabric.device)
            with fabric.no_backward_sync(model, enabled=micro == 0):
                loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                fabric.backward(loss / 2)
        if options.clip:
            fabric.clip_gradients(model, optimizer, max_norm=options.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 5 == 0:
            fabric.print(f"step {step:3}: loss {losses[-1]:.4f}")
    if options.save:
        fabric.save(options.save, {"model": model, "optimizer": optimizer, "step": options.steps})
        fabric.print(f"saved {options.save}, which plain PyTorch reads")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm of the gradients; 0: as they are")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--memory", default="3MiB", help="GPU memory to train in; without a GPU, of the rCache")
    parser.add_argument("--save", type=Path, help="a file to save to")
    parser.add_argument("--check", action="store_true", help="train with plain PyTorch as well, and compare")
    options = parser.parse_args()

    strategy = ElixirStrategy(gpu_memory_limit=options.memory)
    fabric = Fabric(devices=options.devices, precision=options.precision, strategy=strategy)
    fabric.launch()
    losses = train(fabric, options)
    stats = strategy.stats()
    fabric.print(f"chunks were brought {stats.fetches + stats.prefetches} times, and gone {stats.evictions} times")
    strategy.close()
    if options.check:
        plain = Fabric(devices=options.devices, precision=options.precision, strategy="auto")
        plain.launch()
        if train(plain, options) != losses:
            raise SystemExit("the losses differ from those of plain PyTorch")
        fabric.print("the same losses as with plain PyTorch, bit for bit")


if __name__ == "__main__":
    main()
