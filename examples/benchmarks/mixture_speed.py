"""How fast the experts of one layer are: transformers' own, as one operator, and what their matrix products take.

    python examples/benchmarks/mixture_speed.py --tokens 16384 65536 --json mixture.json
    python examples/benchmarks/mixture_speed.py --tokens 256 --width 64 --inner 32 --experts 8 --chosen 2 --device cpu

bf16, Qwen3-30B-A3B's shape unless it is given, experts chosen in turn; medians of runs. `forward` is without gradients,
`both` forward and backward. `products` are the three grouped products of each matrix by themselves, in rows that are
there already: what is above that is spent between them. Needs transformers 5.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_elixir.fused.mixtures import mixture

RUNS = 10


def seconds_of(act: Callable[[], object], device: str) -> float:
    """Median of runs, after two that are not counted."""
    spans = []
    for _ in range(RUNS + 2):
        begin = time.perf_counter()
        act()
        if device == "cuda":
            torch.cuda.synchronize()
        spans.append(time.perf_counter() - begin)
    return statistics.median(spans[2:])


def experts_of(arguments: argparse.Namespace) -> Any:
    """A module of transformers, drawn."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=arguments.width,
        moe_intermediate_size=arguments.inner,
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.chosen,
    )
    config._experts_implementation = "grouped_mm"
    module = Qwen3MoeExperts(config).to(arguments.device, torch.bfloat16)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return module


def measure(module: Any, num_tokens: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds, and how far results are apart."""
    device, experts, chosen = arguments.device, arguments.experts, arguments.chosen
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    tokens = torch.randn(num_tokens, arguments.width, **options).requires_grad_()
    grad = torch.randn_like(tokens)
    numbers = (torch.arange(num_tokens * chosen, device=device) * 37 % experts).view(num_tokens, chosen)
    weights = torch.rand(num_tokens, chosen, **options).requires_grad_()
    gate_up, down = module.gate_up_proj, module.down_proj
    ways: dict[str, Callable[[], Tensor]] = {
        "transformers": lambda: module(tokens, numbers, weights),
        "one operator": lambda: mixture(tokens, numbers, weights, gate_up, down, "silu"),
    }
    found: dict[str, Any] = {"tokens": num_tokens}
    results = []
    for name, way in ways.items():

        def forward(way: Callable[[], Tensor] = way) -> None:
            with torch.no_grad():
                way()

        def both(way: Callable[[], Tensor] = way) -> None:
            for leaf in (tokens, weights, gate_up, down):
                leaf.grad = None
            way().backward(grad)

        found[name] = {"forward_ms": seconds_of(forward, device) * 1e3, "both_ms": seconds_of(both, device) * 1e3}
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            both()
            found[name]["peak_bytes"] = torch.cuda.max_memory_allocated()
        results.append([leaf.grad.float() for leaf in (tokens, weights, gate_up, down) if leaf.grad is not None])
    found["apart"] = [((a - b).norm() / b.norm()).item() for a, b in zip(*results, strict=True)]
    if device == "cuda":
        found["products_ms"] = (
            seconds_of(products(num_tokens, arguments, gate_up.detach(), down.detach()), device) * 1e3
        )
    return found


def products(num_tokens: int, arguments: argparse.Namespace, gate_up: Tensor, down: Tensor) -> Callable[[], None]:
    """All grouped products of a forward and a backward."""
    rows = num_tokens * arguments.chosen
    sizes = torch.full((arguments.experts,), rows // arguments.experts, device="cuda", dtype=torch.int32)
    ends = sizes.cumsum(0, dtype=torch.int32)
    wide, narrow, hidden = (
        torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)
        for n in (arguments.width, arguments.inner, 2 * arguments.inner)
    )

    def run() -> None:
        F.grouped_mm(wide, gate_up.transpose(1, 2), offs=ends)
        F.grouped_mm(narrow, down.transpose(1, 2), offs=ends)
        F.grouped_mm(wide, down, offs=ends)
        F.grouped_mm(hidden, gate_up, offs=ends)
        F.grouped_mm(wide.t(), narrow, offs=ends)
        F.grouped_mm(hidden.t(), wide, offs=ends)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--chosen", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    module = experts_of(arguments)
    cases = [measure(module, num_tokens, arguments) for num_tokens in arguments.tokens]
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    shape = {name: getattr(arguments, name) for name in ("width", "inner", "experts", "chosen")}
    text = json.dumps({"torch": torch.__version__, "device": device, "shape": shape, "cases": cases}, indent=1)
    if arguments.json:
        arguments.json.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
