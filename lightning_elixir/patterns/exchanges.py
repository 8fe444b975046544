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

from lightning_elixir.fused.mixtures import added
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


def foreseen_rows(rows: Tensor, peers: Peers) -> Tensor:
    """As many rows, in a step that is foreseen: they would be exchanged here, and in backward."""
    return _applied(_ForeseenRows, rows, peers)


def repeated_rows(tokens: Tensor, token_of_row: Tensor, rows_of_token: Tensor) -> Tensor:
    """A row for each time that a token is wanted. Backward adds a token's gradients up in fp32 at least, always in the
    same order.

    Args:
        tokens: `[n, width]`.
        token_of_row: `[m]`, int64.
        rows_of_token: `[n, k]`, int64: where these rows are; -1: the token has no more.
    """
    return _applied(_RepeatedRows, tokens, token_of_row, rows_of_token)


def added_rows(rows: Tensor, token_of_row: Tensor, rows_of_token: Tensor) -> Tensor:
    """The sum of each token's rows, `[n, width]`, added up in fp32 at least, always in the same order.

    Args:
        rows: `[m, width]`.
        token_of_row: `[m]`, int64.
        rows_of_token: `[n, k]`, int64; -1: the token has no more.
    """
    return _applied(_AddedRows, rows, token_of_row, rows_of_token)


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
    def forward(ctx: Any, rows: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        peers.foresee("rows", rows.nbytes)
        return rows.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.peers.foresee("rows", grad.nbytes)
        return grad.clone(), None


class _RepeatedRows(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token_of_row: Tensor, rows_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(rows_of_token)
        return tokens[token_of_row]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (rows_of_token,) = ctx.saved_tensors
        return added(grad, rows_of_token, None), None, None


class _AddedRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of_row: Tensor, rows_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row)
        return added(rows, rows_of_token, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (token_of_row,) = ctx.saved_tensors
        return grad[token_of_row], None, None


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
        sent: Each `[sum(num_sent), ...]`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        peers: Peers,
        num_received: Sequence[int],
        num_sent: Sequence[int],
        *sent: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.peers, ctx.counts = peers, (num_received, num_sent)
        return token.clone(), *(peers.exchange_rows(rows, num_received, num_sent) for rows in sent)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_token: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        num_received, num_sent = ctx.counts
        peers: Peers = ctx.peers
        peers.meet(Exchange.ROWS, sum(grad.shape[1:].numel() for grad in grads))
        back = (peers.exchange_rows(grad, num_sent, num_received) for grad in grads)
        return of_token, None, None, None, *back
