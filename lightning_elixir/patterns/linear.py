"""Column and row: linear layers between the ranks along "tensor"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from lightning_elixir.errors import PlanError
from lightning_elixir.patterns.base import Compute, ParallelPattern
from lightning_elixir.patterns.exchanges import gathered, scaled_backward, shared, sliced, summed, summed_part
from lightning_elixir.patterns.peers import Peers


class Column(ParallelPattern):
    """A linear layer of which each rank computes some of the outputs: the weight is cut by rows, the bias with it.

    Args:
        gathers: Have all outputs on every rank; else each goes on with its own, to a layer with `Row`.
        sequence_dim: The input comes in parts along this dimension, as `Sequence` and `Row` may leave it, and is put
            together first. None: it comes whole.

    A layer of peft with LoRA is cut with its adapters.
    """

    def __init__(self, gathers: bool = False, sequence_dim: int | None = None) -> None:
        self.gathers = gathers
        self.sequence_dim = sequence_dim

    def targets(self, module: nn.Module) -> Mapping[str, ParallelPattern]:
        return _with_adapters(self, module, "lora_B")

    def cuts(self, module: nn.Module) -> Mapping[str, int]:
        _check_linear(self, module)
        return {"weight": 0} if module.bias is None else {"weight": 0, "bias": 0}

    def attributes(self, module: nn.Module, peers: Peers) -> Mapping[str, Any]:
        return {"out_features": module.out_features // peers.size}  # type: ignore[operator]

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], peers: Peers) -> tuple[tuple[Any, ...], Any]:
        value, *rest = args
        if self.sequence_dim is None:
            return (shared(value, peers), *rest), kwargs
        return (gathered(value, self.sequence_dim, peers, is_used_alike=False), *rest), kwargs

    def outputs(self, output: Any, peers: Peers) -> Any:
        return gathered(output, output.dim() - 1, peers, is_used_alike=True) if self.gathers else output


class Row(ParallelPattern):
    """A linear layer whose inputs are spread over the ranks: the weight is cut by columns, and the ranks' results are
    added up. The bias stays whole.

    Args:
        splits: Take this rank's part of an input that all ranks have; else it is one already, from a layer with
            `Column`.
        sequence_dim: Each rank goes on with its part of the result along this dimension. None: all go on with all.

    A layer of peft with LoRA is cut with its adapters.
    """

    def __init__(self, splits: bool = False, sequence_dim: int | None = None) -> None:
        self.splits = splits
        self.sequence_dim = sequence_dim

    def targets(self, module: nn.Module) -> Mapping[str, ParallelPattern]:
        return _with_adapters(self, module, "lora_A")

    def cuts(self, module: nn.Module) -> Mapping[str, int]:
        _check_linear(self, module)
        if module.bias is not None and type(module).forward is not nn.Linear.forward:
            raise PlanError(
                f"Row adds the bias after the ranks' results, which it can do for nn.Linear alone, not for"
                f" {type(module).__name__}: give the layer bias=False, or no pattern"
            )
        return {"weight": 1}

    def attributes(self, module: nn.Module, peers: Peers) -> Mapping[str, Any]:
        return {"in_features": module.in_features // peers.size}  # type: ignore[operator]

    def forward(
        self, module: nn.Module, compute: Compute, peers: Peers, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        value, *rest = args
        if self.splits:
            value = sliced(value, value.dim() - 1, peers)
        bias, dim, weight = module.bias, self.sequence_dim, module.weight
        if not isinstance(bias, Tensor) or not isinstance(weight, Tensor):
            output = compute(value, *rest, **kwargs)
            return summed(output, peers) if dim is None else summed_part(output, dim, peers)
        output = functional.linear(value, weight)
        if dim is None:
            output = summed(output, peers)
        else:  # each rank adds the bias to its part alone
            output, bias = summed_part(output, dim, peers), scaled_backward(bias, peers.size)
        return output + bias.to(output.dtype)


def _check_linear(pattern: ParallelPattern, module: nn.Module) -> None:
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear) or weight is None or weight.dim() != 2:
        raise PlanError(f"{type(pattern).__name__} is for linear layers (nn.Linear), not for {type(module).__name__}")


def _with_adapters(pattern: ParallelPattern, module: nn.Module, cut: str) -> Mapping[str, ParallelPattern]:
    """A linear layer that peft has wrapped: its own layer, and the adapters' matrices that are cut with it.

    Args:
        cut: Which of the two matrices of an adapter; the other one stays whole.
    """
    if not isinstance(getattr(module, "base_layer", None), nn.Module):
        return {"": pattern}
    known = ("base_layer", "lora_A", "lora_B", "lora_dropout")
    others = [n for n, _ in module.named_parameters() if n.partition(".")[0] not in known]
    if others:
        raise PlanError(
            f"{type(pattern).__name__} can cut the layers of peft with plain LoRA, and this one has"
            f" {', '.join(others[:3])} as well: give it no pattern"
        )
    adapters = getattr(module, cut, {})
    return {"base_layer": pattern} | {f"{cut}.{name}": pattern for name in adapters}
