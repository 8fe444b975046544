"""What patterns do with activations between the ranks of an axis, each with its backward.

Every function comes with what its backward does, so that gradients are those of one process: where ranks use a value in
different ways its gradient is a sum over them; where all use it alike, it is one rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lightning_elixir.patterns.peers import Exchange, Peers


def shared(tensor: Tensor, peers: Peers) -> Tensor:
    """As it is, for ranks that go on with it in different ways: their gradients are added up."""
    return _applied(_Shared, tensor, peers)


def summed(tensor: Tensor, peers: Peers) -> Tensor:
    """The sum over the ranks, which all go on alike."""
    return _applied(_Summed, tensor, peers)


def gathered(tensor: Tensor, dim: int, peers: Peers, *, is_used_alike: bool) -> Tensor:
    """All ranks' tensors, along a dimension.

    Args:
        is_used_alike: Whether all ranks go on alike; else their gradients are added up.
    """
    return _applied(_Gathered, tensor, peers, dim, is_used_alike)


def sliced(tensor: Tensor, dim: int, peers: Peers) -> Tensor:
    """This rank's part of what all have."""
    return _applied(_Sliced, tensor, peers, dim)


def summed_part(tensor: Tensor, dim: int, peers: Peers) -> Tensor:
    """This rank's part of the sum over the ranks."""
    return _applied(_SummedPart, tensor, peers, dim)


def scaled_backward(tensor: Tensor, factor: float) -> Tensor:
    """As it is; its gradient is multiplied."""
    return _applied(_ScaledBackward, tensor, factor)


def foreseen_rows(tensor: Tensor, peers: Peers, nbytes: int) -> Tensor:
    """As it is, in a step that is foreseen: rows of so many bytes would be exchanged here, and in backward."""
    return _applied(_ForeseenRows, tensor, peers, nbytes)


def _applied(function: type[Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


class _Shared(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.sum(grad), None


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: Peers) -> Tensor:
        return peers.sum(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: Peers, dim: int, is_used_alike: bool) -> Tensor:
        ctx.peers, ctx.dim, ctx.is_used_alike = peers, dim, is_used_alike
        return peers.gather(tensor, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        peers: Peers = ctx.peers
        if ctx.is_used_alike:
            return _own_part(grad, ctx.dim, peers), None, None, None
        return peers.sum_of_parts(grad, ctx.dim), None, None, None


class _Sliced(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: Peers, dim: int) -> Tensor:
        ctx.peers, ctx.dim = peers, dim
        return _own_part(tensor, dim, peers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.peers.gather(grad, ctx.dim), None, None


class _SummedPart(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: Peers, dim: int) -> Tensor:
        ctx.peers, ctx.dim = peers, dim
        return peers.sum_of_parts(tensor, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.peers.gather(grad, ctx.dim), None, None


class _ScaledBackward(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class _ForeseenRows(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: Peers, nbytes: int) -> Tensor:
        ctx.peers, ctx.nbytes = peers, nbytes
        peers.foresee("rows", nbytes)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.peers.foresee("rows", ctx.nbytes)
        return grad, None, None


def _own_part(tensor: Tensor, dim: int, peers: Peers) -> Tensor:
    return tensor.chunk(peers.size, dim)[peers.rank].contiguous()


class ExchangedRows(Function):
    """Rows from each rank to each, of several tensors at once. Returns what came with a token, of which the next
    exchange is a function: so on every rank backward comes to all exchanges, in the reverse order, also where the rows
    that came were used for nothing.

    Args of `apply`:
        token: Of the exchange before; for the first one, any that requires a gradient.
        peers: The ranks.
        num_received: From each rank.
        num_sent: To each rank.
        factors: Of gradients, before they are sent back, and after that.
        sent: Each `[sum(num_sent), ...]`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        peers: Peers,
        num_received: Sequence[int],
        num_sent: Sequence[int],
        factors: tuple[float, float],
        *sent: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.peers, ctx.counts, ctx.factors = peers, (num_received, num_sent), factors
        return token.clone(), *(peers.exchange_rows(rows, num_received, num_sent) for rows in sent)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_token: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        num_received, num_sent = ctx.counts
        peers: Peers = ctx.peers
        before, after = ctx.factors
        peers.meet(Exchange.ROWS, sum(grad.shape[1:].numel() for grad in grads))
        scaled = (grad * before if before != 1 else grad for grad in grads)
        back = [peers.exchange_rows(grad, num_sent, num_received) for grad in scaled]
        return of_token, None, None, None, None, *(grad * after if after != 1 else grad for grad in back)


class Permuted(Function):
    """Rows in another order. Backward is the inverse, and so adds nothing up: the same bits in every run.

    Args of `apply`:
        rows: `[n, ...]`.
        order: `[n]`, which row comes where.
        inverse: Its inverse.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None
