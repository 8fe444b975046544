"""Models of every kind that users train, with a batch and a loss for each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.seeds import seed_torch


@dataclass(frozen=True)
class Example:
    """A model and how to train it. `loss(model, seed)` makes a batch from the seed."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, int], Tensor]


def _inputs(seed: int, *shape: int, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def _tokens(seed: int, *shape: int, vocab: int = 96, device: str | torch.device = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, vocab, shape, generator=generator).to(device)


def _device_of(model: Any) -> torch.device:
    return next(model.parameters()).device


def _regression(*shape: int) -> Callable[[Any, int], Tensor]:
    def loss(model: Any, seed: int) -> Tensor:
        device = _device_of(model)
        out = model(_inputs(seed, *shape, device=device))
        return (out.float() - _inputs(seed + 7, *out.shape, device=device)).square().mean()

    return loss


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 64, bias=False), nn.LayerNorm(64), nn.Linear(64, 8)
    )


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(5))
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_() * self.scale
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        # A shared layer inside a region that also uses a parameter by itself.
        y: Tensor = checkpoint(lambda v: self.blocks[0](v) * self.scale, x, use_reentrant=self.use_reentrant)
        return y


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)


def _language(model: Any, seed: int) -> Tensor:
    tokens = _tokens(seed, 2, 12, device=_device_of(model))
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


class Attention(nn.Module):
    """`nn.MultiheadAttention` uses `out_proj`'s parameters without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(16, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, activation="gelu")
        self.out = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        return self.out(self.encoder(x + self.attention(x, x, x, need_weights=False)[0]))


class Conv(nn.Module):
    """BatchNorm buffers, channels-last weights, a parameter that is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 24, 3, groups=4),
            nn.BatchNorm2d(24),
        ).to(memory_format=torch.channels_last)
        self.head = nn.Parameter((torch.randn(6, 24) / 5).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean((2, 3)) @ self.head


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 24, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRUCell(48, 20)
        self.out = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        state = torch.zeros(len(x), 20, dtype=y.dtype, device=y.device)
        for t in range(y.shape[1]):
            state = self.gru(y[:, t], state)
        return self.out(state)


class Odd(nn.Module):
    """0-dim, empty, unused, huge and non-contiguous parameters; a module called twice; a detached use beside a use."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Linear(8, 8)
        self.big = nn.Linear(24, 3000)
        self.twice = nn.Linear(32, 32)
        self.sliced = nn.Parameter(torch.randn(32, 48)[:, ::2])
        self.table = nn.ParameterList(nn.Parameter(torch.randn(32)) for _ in range(3))
        self.scale = nn.ParameterDict({"a": nn.Parameter(torch.ones(32))})
        self.inp = nn.Linear(24, 32)
        self.expand = nn.Linear(3000, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inp(x) + self.expand(torch.relu(self.big(x))) * 0.1
        y = self.twice(torch.tanh(self.twice(y))) * self.gain
        y = y * self.scale["a"] + sum(p for p in self.table)
        y = y + F.linear(y, self.twice.weight.detach()) * 0.5 + self.nothing.sum()
        return y @ self.sliced


class Branching(nn.Module):
    """A branch that depends on the batch: parameters unused in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(16, 32)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(4))
        self.out = nn.Linear(32, 4)
        self.calls = 0

    def forward(self, x: Tensor, expert: int) -> Tensor:
        x = self.inp(x)
        return self.out(x + self.experts[expert](x))


def _branching_loss(model: Any, seed: int) -> Tensor:
    device = _device_of(model)
    return model(_inputs(seed, 4, 16, device=device), seed * 3 % 4).float().square().mean()


class Frozen(nn.Module):
    """A frozen body with trainable low-rank additions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(32, 4, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(4, 32, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = torch.tanh(layer(x) + up(down(x)))
        return x


def _quiet(build: Callable[[], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build()


def gpt2(layers: int = 3, checkpointing: bool | None = None) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=32, n_head=2, vocab_size=96, n_positions=32,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        bos_token_id=1, eos_token_id=2, loss_type="ForCausalLM",
    )  # fmt: skip
    model = _quiet(lambda: GPT2LMHeadModel(config))
    if checkpointing is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # renamed in transformers 5.20
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    return model.train()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=32, loss_type="ForCausalLM",
    )  # fmt: skip
    return _quiet(lambda: LlamaForCausalLM(config)).train()


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=96, dropout_rate=0.0,
        decoder_start_token_id=0, loss_type="ForMaskedLM",
    )  # fmt: skip
    return _quiet(lambda: T5ForConditionalGeneration(config)).train()


def _hf_loss(model: Any, seed: int) -> Tensor:
    tokens = _tokens(seed, 2, 16, device=_device_of(model))
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


ZOO: dict[str, Example] = {
    "mlp": Example(mlp, _regression(5, 24)),
    "checkpoint_reentrant": Example(lambda: Checkpointed(True), _regression(5, 32)),
    "checkpoint": Example(lambda: Checkpointed(False), _regression(5, 32)),
    "tied": Example(Tied, _language),
    "attention": Example(Attention, _regression(3, 7, 16)),
    "conv": Example(Conv, _regression(4, 3, 8, 8)),
    "recurrent": Example(Recurrent, _regression(3, 5, 16)),
    "odd": Example(Odd, _regression(5, 24)),
    "branching": Example(Branching, _branching_loss),
    "frozen": Example(Frozen, _regression(5, 32)),
    "gpt2": Example(gpt2, _hf_loss),
    "gpt2_checkpoint_reentrant": Example(lambda: gpt2(3, True), _hf_loss),
    "gpt2_checkpoint": Example(lambda: gpt2(3, False), _hf_loss),
    "llama": Example(llama, _hf_loss),
    "t5": Example(t5, _hf_loss),
}


def make(name: str, seed: int = 0) -> nn.Module:
    """The model, with values that depend on the seed alone."""
    seed_torch(seed)
    return ZOO[name].build()
