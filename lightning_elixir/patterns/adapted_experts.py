"""Experts with adapters of LoRA: peft's wrappers, one around the other, each of which adapts one parameter of experts.

Of an adapter's two matrices the first, `[experts * r, inputs]`, has the experts outermost, and is cut as the experts
are. In the second one, `[outputs, r * experts]`, they alternate, so that a rank's are no part of it that could be cut
out: it stays whole, and each rank computes with the columns of its own experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_elixir.errors import PlanError
from lightning_elixir.patterns.base import Compute, ParallelPattern
from lightning_elixir.patterns.exchanges import scaled_backward
from lightning_elixir.patterns.peers import Peers


def is_adapted(module: nn.Module) -> bool:
    """Whether peft has wrapped it."""
    return isinstance(getattr(module, "base_layer", None), nn.Module)


def experts_in(module: nn.Module) -> nn.Module:
    """The experts that peft may have wrapped, several times."""
    while is_adapted(module):
        module = module.base_layer  # type: ignore[assignment]
    return module


class AdaptedParameter(ParallelPattern):
    """A wrapper of peft around experts that are spread, or around another such wrapper."""

    axis = "expert"

    def cuts(self, module: nn.Module) -> Mapping[str, int]:
        own = [name for name, _ in module.named_parameters() if not name.startswith("base_layer.")]
        known = ("lora_A.", "lora_B.")
        if not hasattr(module, "parameter_name") or any(not n.startswith(known) for n in own):
            raise PlanError(
                "Expert can spread experts that peft has adapted with plain LoRA over their parameters"
                f" (target_parameters), and these have {', '.join(own[:3]) or type(module).__name__}: adapt other"
                " layers, or leave out expert_parallel_size, and ranks share the experts as all else"
            )
        if module.num_experts == 1:  # so peft has it where a parameter has two dimensions
            raise PlanError(
                f"Expert can spread LoRA over parameters [experts, ..., ...], and peft has adapted"
                f" {module.parameter_name} as one matrix: leave it out of target_parameters, or leave out"
                " expert_parallel_size"
            )
        return {name: 0 for name in own if name.startswith("lora_A.")}

    def attributes(self, module: nn.Module, peers: Peers) -> Mapping[str, Any]:
        return {"num_experts": module.num_experts // peers.size}  # type: ignore[operator]

    def forward(
        self, module: nn.Module, compute: Compute, peers: Peers, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return with_own_adapters(module, compute, peers)(*args, **kwargs)


def with_own_adapters(module: nn.Module, compute: Compute, peers: Peers) -> Callable[..., Any]:
    """A wrapper's forward, which finds the adapters of this rank's experts alone."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _own_columns(module, peers):
            return compute(*args, **kwargs)

    return run


@contextmanager
def _own_columns(module: nn.Module, peers: Peers) -> Iterator[None]:
    """Have second matrices be those of this rank's experts. peft reads them by name, and calls no module for them."""
    number: int = module.num_experts  # type: ignore[assignment]
    layers: list[nn.Module] = list(module.lora_B.values())  # type: ignore[operator]
    whole = [layer._parameters["weight"] for layer in layers]
    try:
        for layer, weight in zip(layers, whole, strict=True):
            vars(layer)["_parameters"]["weight"] = _columns(weight, number, peers)
        yield
    finally:
        for layer, weight in zip(layers, whole, strict=True):
            layer._parameters["weight"] = weight


def _columns(weight: Any, number: int, peers: Peers) -> Tensor:
    every = scaled_backward(weight, float(peers.size))  # only this rank has gradients of these
    by_expert: Tensor = every.unflatten(1, (-1, number * peers.size))
    return by_expert.narrow(2, peers.rank * number, number).flatten(1)


class SpreadParameters(ParallelPattern):
    """Experts that are spread, inside wrappers that exchange the tokens.

    Args:
        spread: The pattern that they would have without wrappers.
    """

    axis = "expert"

    def __init__(self, spread: ParallelPattern) -> None:
        self.spread = spread

    def cuts(self, module: nn.Module) -> Mapping[str, int]:
        return self.spread.cuts(module)

    def attributes(self, module: nn.Module, peers: Peers) -> Mapping[str, Any]:
        return self.spread.attributes(module, peers)
