"""Sequence: what works on every token by itself, each rank on its part of the sequence."""

from __future__ import annotations

from typing import Any

from lightning_elixir.patterns.base import ParallelPattern
from lightning_elixir.patterns.exchanges import gathered, scaled_backward, sliced
from lightning_elixir.patterns.peers import Peers


class Sequence(ParallelPattern):
    """A norm, or any module that works on every token by itself: each rank along "tensor" computes it for its part of
    the sequence, so that its activations take that part of the memory. Parameters stay whole.

    Args:
        dim: Of the sequence in the input and the result; its length must be a multiple of the number of ranks.
        splits: The input comes whole. False: it comes in parts, as from `Row(sequence_dim=...)`.
        gathers: The result is put together. False: it stays in parts, for `Column(sequence_dim=...)`.
    """

    def __init__(self, dim: int = 1, splits: bool = True, gathers: bool = True) -> None:
        self.dim = dim
        self.splits = splits
        self.gathers = gathers

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], peers: Peers) -> tuple[tuple[Any, ...], Any]:
        value, *rest = args
        if self.splits:
            if value.shape[self.dim] % peers.size:
                raise ValueError(
                    f"Sequence: {value.shape[self.dim]} tokens cannot be cut into {peers.size} equal parts: pad the"
                    " sequence to a multiple of tensor_parallel_size"
                )
            value = sliced(value, self.dim, peers)
        return (scaled_backward(value, 1 / peers.size), *rest), kwargs

    def outputs(self, output: Any, peers: Peers) -> Any:
        output = scaled_backward(output, peers.size)  # the parameters' gradients are of this rank's tokens alone
        return gathered(output, self.dim, peers, is_used_alike=True) if self.gathers else output


class PartialGradients(ParallelPattern):
    """A module of which every rank along "tensor" uses the whole parameters on other values, such as a norm over the
    heads of an attention that is cut: their gradients are sums over the ranks."""

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], peers: Peers) -> tuple[tuple[Any, ...], Any]:
        value, *rest = args
        return (scaled_backward(value, 1 / peers.size), *rest), kwargs

    def outputs(self, output: Any, peers: Peers) -> Any:
        return scaled_backward(output, peers.size)
