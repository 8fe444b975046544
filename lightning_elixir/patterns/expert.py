"""Expert: each rank along "expert" has its own experts of a mixture, and tokens travel."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_elixir.errors import PlanError
from lightning_elixir.fused.recognising import COUNTS
from lightning_elixir.patterns.adapted_experts import (
    AdaptedParameter,
    SpreadParameters,
    experts_in,
    is_adapted,
    with_own_adapters,
)
from lightning_elixir.patterns.base import Compute, ParallelPattern
from lightning_elixir.patterns.exchanges import ExchangedRows, Permuted, added_rows, foreseen_rows, repeated_rows
from lightning_elixir.patterns.peers import Exchange, Peers, is_without_values


class Expert(ParallelPattern):
    """The experts of a mixture, in one module whose parameters have a first dimension over the experts. Tokens are sent
    to the ranks that have their experts, and results come back; the router, outside of it, stays whole.

    The module is called with tokens `[n, width]`, the numbers of their experts `[n, k]`, and
    the experts' weights `[n, k]`; it returns `[n, width]`, the sum over a token's experts of what each makes of the
    token with its weight. transformers' experts (Mixtral, Qwen3-MoE and others) are such modules. Each rank calls it
    with what has come to it and `k` 1, with its own experts numbered from 0. Some ranks may get no tokens at all. What
    it makes of a token must not depend on the others, which come from several ranks: a capacity belongs to the router.
    What it returns is given the dtype of the tokens. Where peft has put LoRA over such parameters, adapters go with
    them.
    """

    axis = "expert"

    def targets(self, module: nn.Module) -> Mapping[str, ParallelPattern]:
        found: dict[str, ParallelPattern] = {"": self}
        name = ""
        while is_adapted(module):
            name, module = f"{name}.base_layer" if name else "base_layer", module.base_layer  # type: ignore[assignment]
            found[name] = AdaptedParameter() if is_adapted(module) else SpreadParameters(self)
        return found

    def cuts(self, module: nn.Module) -> Mapping[str, int]:
        if is_adapted(module):
            return AdaptedParameter().cuts(module)
        parameters = dict(module.named_parameters())
        # Of modules below, each of which may be an expert, nothing is known.
        has_own_alone = len(list(module.parameters(recurse=False))) == len(parameters)
        numbers = {p.shape[0] if p.dim() and has_own_alone else 0 for p in parameters.values()}
        told = getattr(module, "num_experts", None)
        if len(numbers) != 1 or 0 in numbers or (isinstance(told, int) and told not in numbers):
            raise PlanError(
                f"Expert is for a module whose parameters have the experts as their first dimension;"
                f" {type(module).__name__} has {', '.join(f'{n} {list(p.shape)}' for n, p in parameters.items())}"
                f"{f' and {told} experts' if told is not None else ''}: put the experts' weights into one parameter"
                " [experts, ...] of each kind"
            )
        if type(self).forward is Expert.forward:
            _check_call(module)
        return dict.fromkeys(parameters, 0)

    def attributes(self, module: nn.Module, peers: Peers) -> Mapping[str, Any]:
        if is_adapted(module):
            return AdaptedParameter().attributes(module, peers)
        number = next(module.parameters()).shape[0]
        return {name: number // peers.size for name in COUNTS if getattr(module, name, None) == number}

    def forward(
        self, module: nn.Module, compute: Compute, peers: Peers, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        tokens, experts, weights = _named(args, kwargs)
        number = next(experts_in(module).parameters()).shape[0]
        if is_adapted(module):
            compute = with_own_adapters(module, compute, peers)
        width, k = tokens.shape[-1], experts.shape[-1]
        flat = experts.reshape(-1)
        order = torch.argsort(flat, stable=True)  # by expert, and so by rank
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        token_of_row, rows_of_token = order // k, inverse.view(-1, k)
        go = _foreseen_there_and_back if is_without_values(tokens) else _there_and_back
        # Rows are made where they are handed on, so that nothing holds them longer than it takes.
        back = go(
            repeated_rows(tokens.reshape(-1, width), token_of_row, rows_of_token),
            Permuted.apply(weights.reshape(-1, 1), order, inverse),  # type: ignore[no-untyped-call]
            flat[order],
            _Way(compute, peers, number),
        )
        # In the order of the experts, as a module that goes through them adds up
        by_expert = torch.argsort(experts.reshape(-1, k), dim=1, stable=True)
        return added_rows(back, token_of_row, rows_of_token.gather(1, by_expert)).view(tokens.shape)


@dataclass(frozen=True)
class _Way:
    """What rows go through."""

    compute: Compute
    peers: Peers
    number: int
    """Of experts on each rank."""


def _there_and_back(rows: Tensor, weights: Tensor, experts: Tensor, way: _Way) -> Tensor:
    """What the experts make of rows.

    Args:
        rows: `[n, width]`, in the order of their experts.
        weights: `[n, 1]`.
        experts: `[n]`, numbered over all ranks.
    """
    peers, width = way.peers, rows.shape[1]
    owners = torch.bincount(experts // way.number, minlength=peers.size)
    num_sent: list[int] = owners.tolist()
    if len(num_sent) != peers.size:
        raise IndexError(f"tokens are given to experts other than the {way.number * peers.size} from 0 on")
    num_received = peers.count_rows(num_sent, width)
    token = torch.zeros(1, device=rows.device, requires_grad=torch.is_grad_enabled())
    token, here, here_weights = ExchangedRows.apply(  # type: ignore[no-untyped-call]
        token, peers, num_received, num_sent, float(peers.size), rows, weights
    )
    del rows
    numbers = peers.exchange_rows((experts % way.number).unsqueeze(1), num_received, num_sent)
    results = _results(way.compute(here, numbers, here_weights), here) if here.shape[0] else here
    del here
    peers.meet(Exchange.ROWS, width)  # on its way through the experts a rank may have needed the others
    # The mean over the ranks that have the same experts leaves out that each gets tokens of `size` batches.
    _, back = ExchangedRows.apply(  # type: ignore[no-untyped-call]
        token, peers, num_sent, num_received, 1.0 / peers.size, results
    )
    return back  # type: ignore[no-any-return]


def _foreseen_there_and_back(rows: Tensor, weights: Tensor, experts: Tensor, way: _Way) -> Tensor:
    """The same in a step that is foreseen, as if each rank got as many rows as it sends."""
    here = foreseen_rows(rows, way.peers)
    del rows
    results = _results(way.compute(here, (experts % way.number).unsqueeze(1), weights), here)
    del here
    return foreseen_rows(results, way.peers)


def _check_call(module: nn.Module) -> None:
    signature = inspect.signature(module.forward)
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        raise PlanError(
            "Expert is for a module that is called with tokens, the numbers of their experts and the experts' weights,"
            f" and {type(module).__name__} is called with ({', '.join(signature.parameters)}): leave out"
            " expert_parallel_size, or give it a pattern of your own"
        ) from error


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts and the weights."""
    if len(args) != 3 or kwargs:
        raise PlanError(
            "a module with Expert is called with tokens, the numbers of their experts and the experts' weights, and got"
            f" {len(args)} arguments and {', '.join(kwargs) or 'none by name'}"
        )
    return args


def _results(made: Any, tokens: Tensor) -> Tensor:
    """What experts have made of tokens, as ranks expect it that have none to see it by: under autocast it may have
    another dtype."""
    if not isinstance(made, Tensor) or made.shape != tokens.shape:
        what = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise PlanError(f"a module with Expert returns a tensor like its tokens, {list(tokens.shape)}, and gave {what}")
    return made.to(tokens.dtype)
