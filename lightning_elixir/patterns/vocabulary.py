"""Vocabulary: embeddings, output layers and losses over a vocabulary that is cut between the ranks along "tensor"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lightning_elixir.errors import PlanError
from lightning_elixir.patterns.base import Compute, ParallelPattern
from lightning_elixir.patterns.exchanges import gathered, shared, summed
from lightning_elixir.patterns.linear import Column
from lightning_elixir.patterns.peers import Peers


class Vocabulary(ParallelPattern):
    """Each rank has its part of the vocabulary: of an `nn.Embedding` the rows, of the `nn.Linear` that gives the logits
    the outputs, of an `nn.CrossEntropyLoss` the logits that it gets.

    Args:
        gathers: nn.Linear: have all logits on every rank. False: each rank goes on with its own, which only an
            `nn.CrossEntropyLoss` with this pattern takes.

    Layers that are tied have to have the pattern both. A linear layer of peft with LoRA is cut with its adapters.
    """

    def __init__(self, gathers: bool = True) -> None:
        self.gathers = gathers

    def targets(self, module: nn.Module) -> Mapping[str, ParallelPattern]:
        if isinstance(getattr(module, "base_layer", None), nn.Linear):
            return Column(gathers=self.gathers).targets(module)
        return {"": self}

    def cuts(self, module: nn.Module) -> Mapping[str, int]:
        if isinstance(module, nn.CrossEntropyLoss):
            if module.weight is not None or module.label_smoothing:
                raise PlanError("Vocabulary takes nn.CrossEntropyLoss without weight and label_smoothing")
            return {}
        if isinstance(module, nn.Linear):
            return {"weight": 0} if module.bias is None else {"weight": 0, "bias": 0}
        if isinstance(module, nn.Embedding):
            _check_embedding(module)
            return {"weight": 0}
        kind = type(module)  # with its package: layers of peft are called as what they are around
        raise PlanError(
            "Vocabulary is for nn.Embedding, nn.Linear (one with LoRA, too) and nn.CrossEntropyLoss, not for"
            f" {kind.__module__}.{kind.__qualname__}: give it no pattern"
        )

    def attributes(self, module: nn.Module, peers: Peers) -> Mapping[str, Any]:
        if isinstance(module, nn.Linear):
            return {"out_features": module.out_features // peers.size}
        if not isinstance(module, nn.Embedding):
            return {}
        numel = module.num_embeddings // peers.size
        padding = module.padding_idx
        is_here = padding is not None and padding // numel == peers.rank
        own = padding - peers.rank * numel if padding is not None and is_here else None
        return {"num_embeddings": numel, "padding_idx": own}

    def forward(
        self, module: nn.Module, compute: Compute, peers: Peers, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if isinstance(module, nn.Embedding):
            return _embedded(args[0], module.num_embeddings, compute, peers)
        if isinstance(module, nn.CrossEntropyLoss):
            return cross_entropy(*args, **kwargs, peers=peers, like=module)
        logits = compute(shared(args[0], peers), *args[1:], **kwargs)
        return gathered(logits, logits.dim() - 1, peers, is_used_alike=True) if self.gathers else logits


def _check_embedding(module: nn.Embedding) -> None:
    """What looks at the tokens of a batch, or writes to the rows that they take, would be misled on every rank by those
    that it does not have."""
    for option, value, off in (
        ("scale_grad_by_freq", module.scale_grad_by_freq, False),
        ("max_norm", module.max_norm, None),
    ):
        if value != off:
            raise PlanError(
                f"Vocabulary takes nn.Embedding without scale_grad_by_freq and max_norm, and this one has"
                f" {option}={value}: make it with {option}={off}, or give it no pattern"
            )


def _embedded(tokens: Tensor, numel: int, compute: Compute, peers: Peers) -> Tensor:
    own = tokens - peers.rank * numel
    is_elsewhere = (own < 0) | (own >= numel)
    rows: Tensor = compute(own.masked_fill(is_elsewhere, 0))
    return summed(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0), peers)


def cross_entropy(input: Tensor, target: Tensor, *, peers: Peers, like: nn.CrossEntropyLoss) -> Tensor:
    """`nn.functional.cross_entropy` of logits of which this rank has its part of the vocabulary, in fp32 at least.

    Args:
        input: `[n, vocabulary / ranks]`.
        target: `[n]`, numbers of tokens in the whole vocabulary.
        peers: The ranks.
        like: Has `ignore_index` and `reduction`.
    """
    if input.dim() != 2 or target.dim() != 1:
        raise PlanError(
            f"Vocabulary's loss takes logits [n, vocabulary] and targets [n], got {list(input.shape)} and"
            f" {list(target.shape)}: flatten them first"
        )
    losses: Tensor = _CrossEntropy.apply(input, target, peers, like.ignore_index)  # type: ignore[no-untyped-call]
    if like.reduction == "none":
        return losses
    return losses.sum() if like.reduction == "sum" else losses.sum() / (target != like.ignore_index).sum()


class _CrossEntropy(Function):
    """Of each row the logarithm of the sum over all ranks of exp(logit), less the target's logit; 0 where ignored."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, peers: Peers, ignored: int) -> Tensor:
        wide = logits.to(torch.promote_types(torch.float32, logits.dtype))
        largest = peers.gather(wide.amax(dim=1, keepdim=True), 1).amax(dim=1, keepdim=True)
        powers = (wide - largest).exp()
        own = target - peers.rank * wide.shape[1]
        is_here = (own >= 0) & (own < wide.shape[1])
        own = own.masked_fill(~is_here, 0).unsqueeze(1)
        of_target = wide.gather(1, own).masked_fill(~is_here.unsqueeze(1), 0)
        sums = peers.sum(torch.cat([powers.sum(dim=1, keepdim=True), of_target], 1))
        losses = sums[:, 0].log() + largest[:, 0] - sums[:, 1]
        is_ignored = target == ignored
        ctx.save_for_backward(powers.div_(sums[:, :1]), own, is_here, is_ignored)
        ctx.dtype = logits.dtype
        return losses.masked_fill(is_ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        shares, own, is_here, is_ignored = ctx.saved_tensors
        of_logits = shares.clone()
        of_logits.scatter_add_(1, own, -is_here.to(shares.dtype).unsqueeze(1))
        of_logits.mul_(grad.masked_fill(is_ignored, 0).unsqueeze(1))
        return of_logits.to(ctx.dtype), None, None, None
