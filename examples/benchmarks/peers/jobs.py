"""What one measured process has to do: a value that travels as JSON. Standard library only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A decoder-only GPT: 4x MLP, separate q, k and v, learned positions, a head of its own, no biases."""

    layers: int
    width: int
    heads: int
    vocab: int = 50304
    seq: int = 1024

    @property
    def num_parameters(self) -> int:
        block = 12 * self.width**2 + 2 * self.width
        return self.layers * block + (2 * self.vocab + self.seq + 1) * self.width


PRESETS = {
    "toy": Shape(2, 64, 2, vocab=256, seq=32),
    "120m": Shape(8, 1024, 16, vocab=8192, seq=64),
    "1.3b": Shape(24, 2048, 16),
    "5b": Shape(22, 4096, 32),
}


class Unsupported(Exception):
    """A system cannot do what is asked of all; no failure of it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One system, one run. Every rank gets the same."""

    system: str
    shape: Shape
    batch: int = 4
    """Sequences a step on each rank."""
    warmup: int = 5
    """Steps before the timed ones. The strategy takes its final placement in the fourth."""
    steps: int = 5
    """Timed steps."""
    precision: str = "bf16"
    """bf16 or fp16: parameters and gradients, beside an fp32 master."""
    clip: float = 0.0
    """Global norm to clip to; 0: no clipping."""
    optimizer: str = "adamw"
    """adamw, or muon: the matrices of the blocks by Muon, all else by AdamW."""
    is_compiled: bool = False
    """Each block by `block.compile()`, inside its checkpoint."""
    ranks: int = 1
    device: str = "cuda"
    """cuda or cpu; a rank takes the GPU of its number."""
    gpu_limit_bytes: int | None = None
    cpu_limit_bytes: int | None = None
    lr: float = 1e-5
    """Small: without a warm-up, the first updates of a wide model otherwise throw the loss up, and what differs between
    systems in the last bits then grows until losses cannot be compared."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    seed: int = 0
    is_deterministic: bool = False
    trace_dir: str | None = None
    hardware: str | None = None
    """JSON of a `HardwareSpec` for the systems that plan; None: measured."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `ElixirStrategy`, or of the search of `elixir_manual`."""

    @property
    def dtype(self) -> str:
        return {"bf16": "bfloat16", "fp16": "float16"}[self.precision]

    @property
    def tokens(self) -> int:
        """Of one step over all ranks."""
        return self.batch * self.shape.seq * self.ranks

    def of(self, system: str) -> Job:
        return replace(self, system=system)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Job:
        content = json.loads(path.read_text())
        content["shape"] = Shape(**content["shape"])
        content["betas"] = tuple(content["betas"])
        return cls(**content)
