"""Training whose parameters are exchanged for others, and put back, between forward and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_elixir.wrapper import ElixirModule
from tests.helpers import streamed_updates as bodies
from tests.helpers.streamed_updates import How
from tests.helpers.zoo import ZOO

CPU = torch.device("cpu")
BF16 = How(dtype=torch.bfloat16)


def swap_data(model: nn.Module, shadow: list[Tensor]) -> Callable[[], None]:
    """As Lightning's `WeightAveraging` does."""

    def swap() -> None:
        for p, average in zip(model.parameters(), shadow, strict=True):
            kept = average.clone()
            average.copy_(p.data)
            p.data.copy_(kept)

    swap()
    return swap


def copy_wide(model: nn.Module, shadow: list[Tensor]) -> Callable[[], None]:
    """The average in fp32, near enough to round to the same values in places."""
    saved = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def write(values: list[Tensor]) -> None:
        for p, value in zip(model.parameters(), values, strict=True):
            p.copy_(value)

    write([0.99 * s.float() + 0.01 * v.float() for s, v in zip(saved, shadow, strict=True)])
    return lambda: write(saved)


def read_all(module: ElixirModule) -> None:
    for p in module.module.parameters():
        p.sum()


@torch.no_grad()
def evaluate(module: ElixirModule) -> None:
    ZOO["gpt2"].loss(module, 77)


def whole(module: ElixirModule) -> None:
    module.full_state_dict()


BETWEEN: dict[str, Callable[[ElixirModule], None]] = {
    "nothing": lambda module: None, "read": read_all, "evaluate": evaluate, "whole": whole,
}  # fmt: skip


def train(
    site: str,
    swap: Callable[[nn.Module, list[Tensor]], Callable[[], None]] | None,
    between: str = "nothing",
    how: How = BF16,
    device: torch.device = CPU,
    **options: Any,
) -> tuple[dict[str, Tensor], int]:
    """Values after four steps, with a swap there and back after two of them; and evictions."""
    module, optimizer = bodies.new_training(how, site, device, **options)
    model, rank = module.module, dist.get_rank() if dist.is_initialized() else 0
    shadow = [p.detach().clone() * 0.9 for p in model.parameters()]
    for step in range(4):
        optimizer.backward(ZOO["gpt2"].loss(module, 2 * step + rank))
        optimizer.step()
        optimizer.zero_grad()
        if swap is not None and step in (1, 2):
            put_back = swap(model, shadow)
            BETWEEN[between](module)
            put_back()
            BETWEEN["nothing" if between == "evaluate" else between](module)
    values, evictions = module.full_state_dict(), module.stats().evictions
    module.close()
    return values, evictions


def different(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, value in expected.items() if not torch.equal(actual[name], value)]
