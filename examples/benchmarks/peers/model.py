"""The model and its data: the same values and the same tokens in every system."""

from __future__ import annotations

import math
import zlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from peers.jobs import Job, Shape


class Block(nn.Module):
    """Causal self-attention and an MLP, each on the normalised residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(width, bias=False)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm_attention(x)
        q, k, v = (
            project(y).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Its forward is the loss, so that every system wraps the same thing. Each block is recomputed in backward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.is_checkpointed = True  # every block is recomputed in backward
        self.has_logits = True  # all at once; else pieces of them, by this package's loss
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Embedding(shape.seq, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy (0-dim, fp32) of `tokens`, int64 [batch, seq + 1], each predicted from those before."""
        known, wanted = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(known) + self.positions(torch.arange(known.shape[1], device=known.device))
        for block in self.blocks:
            # Nothing random inside: keeping the generators' states would cost host time in every system.
            is_own = self.is_checkpointed
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) if is_own else block(x)
        if not self.has_logits:
            from lightning_elixir import linear_cross_entropy

            return linear_cross_entropy(self.norm(x), self.head.weight, wanted)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def empty_model(job: Job) -> GPT:
    """On `meta`: no memory, no numbers drawn."""
    with torch.device("meta"):
        model = GPT(job.shape)
    if job.is_compiled:
        for block in model.blocks:
            block.compile()
    return model


def drawn(job: Job, name: str, shape: torch.Size, device: torch.device) -> Tensor:
    """The start value of one parameter: bf16 on `device`, a function of seed, name and kind of device alone.

    bf16 in every system, also where a master of it is fp32: so those that build on the host need half the memory, and
    all start from the same numbers.
    """
    if name.endswith("weight") and "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{job.seed} {name}".encode()))
    std = 0.02
    if name.endswith(("out.weight", "down.weight")):
        std /= math.sqrt(2 * job.shape.layers)  # keeps the stream's variance independent of the depth
    return torch.empty(shape, device=device, dtype=torch.float32).normal_(std=std, generator=generator).bfloat16()


def built_model(job: Job, device: torch.device, *, where: torch.device, dtype: torch.dtype) -> GPT:
    """The model with its start values.

    Args:
        device: Where the values are drawn: the compute device, which is fast and has one stream of random numbers.
        where: Where the parameters shall be.
        dtype: Their dtype.
    """
    model = empty_model(job)
    names = {id(p): name for name, p in model.named_parameters()}
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None:
                value = drawn(job, names[id(p)], p.shape, device)
                module._parameters[key] = nn.Parameter(value.to(where, dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what drawing took shall not count as the system's
    return model


def batches(job: Job, count: int, rank: int, device: torch.device) -> list[Tensor]:
    """Tokens of `count` steps, int64 [batch, seq + 1] each, on `device`: copied before the clock runs.

    Small numbers are more frequent (log-uniform, as words are), so there is something to learn in a few steps.
    """
    generator = torch.Generator().manual_seed(1000 * job.seed + rank)
    result = []
    for _ in range(count):
        uniform = torch.rand(job.batch, job.shape.seq + 1, generator=generator, dtype=torch.float64)
        tokens = (job.shape.vocab**uniform).long() - 1
        result.append(tokens.clamp_(0, job.shape.vocab - 1).to(device))
    return result


def put_drawn(target: Tensor, drawn: Tensor, begin: int) -> None:
    """`target` (1-D) becomes what follows `begin` in `drawn`, taken again and again."""
    while target.numel():
        part = drawn[begin % len(drawn) :][: target.numel()]
        target[: part.numel()].copy_(part)
        target, begin = target[part.numel() :], begin + part.numel()
