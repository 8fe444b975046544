"""Expert: each rank along "expert" has its own experts of a mixture, and tokens travel."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_elixir.errors import PlanError
from lightning_elixir.fused.recognising import COUNTS, TAKES_PAIRS
from lightning_elixir.patterns.adapted_experts import (
    AdaptedParameter,
    SpreadParameters,
    experts_in,
    is_adapted,
    with_own_adapters,
)
from lightning_elixir.patterns.base import Compute, ParallelPattern
from lightning_elixir.patterns.exchanges import ExchangedRows, added_rows, foreseen_rows, repeated_rows, scaled_backward
from lightning_elixir.patterns.peers import Exchange, Peers, is_without_values


class Expert(ParallelPattern):
    """The experts of a mixture, in one module whose parameters have a first dimension over the experts. A token is sent
    once to each rank that has experts of it, and their sum comes back; the router, outside of it, stays whole.

    The module is called with tokens `[n, width]`, the numbers of their experts `[n, k]`, and the experts' weights
    `[n, k]`, where `n` and `k` may be others on each rank; it returns `[n, width]`, the sum over a token's experts of
    what each makes of the token with its weight. transformers' experts (Mixtral, Qwen3-MoE and others) are such
    modules. Each rank calls it with what has come to it and `k` 1, with its own experts numbered from 0. Some ranks may
    get no tokens at all. What it makes of a token must not depend on the others, which come from several ranks: a
    capacity belongs to the router. What it returns is given the dtype of the tokens. Where peft has put LoRA over such
    parameters, adapters go with them.
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
        width, k, size = tokens.shape[-1], experts.shape[-1], peers.size
        # The mean over the ranks that have the same experts leaves out that each gets tokens of `size` batches.
        flat = scaled_backward(tokens.reshape(-1, width), float(size))
        numbers = experts.reshape(-1, k).to(torch.promote_types(experts.dtype, torch.int32))  # -1 has to be among them
        chosen = _Chosen(numbers, scaled_backward(weights.reshape(-1, k), float(size)))
        go = _foreseen_there_and_back if is_without_values(tokens) else _there_and_back
        return scaled_backward(go(flat, chosen, _Way(compute, peers, number)), 1.0 / size).view(tokens.shape)


@dataclass(frozen=True)
class _Chosen:
    """The experts of tokens."""

    experts: Tensor
    """`[n, k]`, numbered over all ranks; once they are sent, over those of this rank, and -1 for another's."""
    weights: Tensor
    """`[n, k]`."""


@dataclass(frozen=True)
class _Rows:
    """What is sent of tokens, rank by rank."""

    token_of_row: Tensor
    """`[m]`, int64."""
    rows_of_token: Tensor
    """`[n, size]`, int64: the row for each rank; -1: none goes there."""
    chosen: _Chosen
    """Of each row, where it goes."""

    def first(self, number: int) -> _Rows:
        """Without those that only stand at the end."""
        chosen = _Chosen(self.chosen.experts[:number], self.chosen.weights[:number])
        return _Rows(self.token_of_row[:number], self.rows_of_token, chosen)

    def of(self, tokens: Tensor) -> Tensor:
        """`[n, width]` to `[m, width]`."""
        return repeated_rows(tokens, self.token_of_row, self.rows_of_token)

    def added(self, rows: Tensor) -> Tensor:
        """`[m, width]` to `[n, width]`, the sums."""
        return added_rows(rows, self.token_of_row, self.rows_of_token)


@dataclass(frozen=True)
class _Way:
    """What tokens go through."""

    compute: Compute
    peers: Peers
    number: int
    """Of experts on each rank."""


def _there_and_back(tokens: Tensor, chosen: _Chosen, way: _Way) -> Tensor:
    """What the experts of all ranks make of tokens, added up. A token is sent once to each rank that has experts of it;
    that rank adds up what they make of it.

    Args:
        tokens: `[n, width]`.
        chosen: Their experts.
        way: What they go through.

    Returns:
        `[n, width]`.

    Raises:
        IndexError: There are no such experts.
    """
    peers, width, k = way.peers, tokens.shape[1], chosen.experts.shape[1]
    goes, num_pairs = _destinations(chosen, way)
    # Before the number of rows is known, since that waits for the device, which has nothing to do then until rows go.
    every = _rows(goes, chosen, way)
    counts: list[int] = torch.cat((goes.sum(0), num_pairs)).tolist()
    num_sent, num_pairs_sent = counts[: peers.size], counts[peers.size :]
    if sum(num_pairs_sent) != chosen.experts.numel():
        raise IndexError(f"tokens are given to experts other than the {way.number * peers.size} from 0 on")
    num_received, num_pairs_here, most = peers.count_rows(num_sent, num_pairs_sent, k, width)
    rows = every.first(sum(num_sent))
    sent = rows.chosen
    if k < most:  # routers may choose more experts on another rank, and rows are as long everywhere
        sent = _Chosen(F.pad(sent.experts, (0, most - k), value=-1), F.pad(sent.weights, (0, most - k)))
    token = torch.zeros(1, device=tokens.device, requires_grad=torch.is_grad_enabled())
    # Rows are made where they are handed on, so that nothing holds them longer than it takes.
    token, here, here_weights = ExchangedRows.apply(  # type: ignore[no-untyped-call]
        token, peers, num_received, num_sent, rows.of(tokens), sent.weights
    )
    here_chosen = _Chosen(peers.exchange_rows(sent.experts, num_received, num_sent), here_weights)
    results = [_sums_here(here, here_chosen, num_pairs_here, way) if here.shape[0] else here]
    del here
    peers.meet(Exchange.ROWS, width)  # on its way through the experts a rank may have needed the others
    _, back = ExchangedRows.apply(token, peers, num_sent, num_received, results.pop())  # type: ignore[no-untyped-call]
    return rows.added(back)


def _foreseen_there_and_back(tokens: Tensor, chosen: _Chosen, way: _Way) -> Tensor:
    """The same in a step that is foreseen, as if each rank got as many rows as it sends, and a token's experts, none of
    them twice, were drawn."""
    size, (num_tokens, k) = way.peers.size, chosen.experts.shape
    ways, ways_without_a_rank = (math.comb(way.number * ranks, k) for ranks in (size, size - 1))
    num_rows = round(num_tokens * size * (1 - ways_without_a_rank / max(1, ways)))
    rows = _rows(_destinations(chosen, way)[0], chosen, way).first(num_rows)
    here = foreseen_rows(rows.of(tokens), way.peers)
    results = [_sums_here(here, rows.chosen, num_tokens * k, way)]
    del here
    return rows.added(foreseen_rows(results.pop(), way.peers))


def _destinations(chosen: _Chosen, way: _Way) -> tuple[Tensor, Tensor]:
    """Whether each token goes to each rank, `[n, size]`, and how many times one of these tokens has an expert there,
    `[size]`."""
    ranks = torch.arange(way.peers.size, device=chosen.experts.device)
    is_there = (chosen.experts // way.number).unsqueeze(2) == ranks
    return is_there.any(1), is_there.sum((0, 1))


def _taken(flags: Tensor) -> tuple[Tensor, Tensor]:
    """The elements that are set, put one after the other.

    Args:
        flags: `[a, b]`, bool.

    Returns:
        `[a * b + 1]`, int64: which they are, of all in the order of memory; what comes after the last means nothing.
        `[a, b]`, int64: where each of them is, -1 for those that are not set.
    """
    flat = flags.reshape(-1)
    places = (flat.cumsum(0) - 1).masked_fill_(~flat, -1)
    every = torch.arange(len(flat), device=flat.device)
    found = every.new_zeros(len(flat) + 1).scatter_(0, places.masked_fill(~flat, len(flat)), every)
    return found, places.view(flags.shape)


def _rows(goes: Tensor, chosen: _Chosen, way: _Way) -> _Rows:
    """What is sent. As many rows as may be, of which those at the end mean nothing.

    Args:
        goes: `[n, size]`, whether a token goes to a rank.
        chosen: The experts of the tokens.
        way: What they go through.
    """
    num_tokens, k = chosen.experts.shape
    every, places = _taken(goes.t())
    numbers = every[: num_tokens * min(way.peers.size, k)]  # rank * n + token
    token_of_row, rows_of_token = numbers % max(1, num_tokens), places.t()
    experts = chosen.experts[token_of_row]
    is_there = experts // way.number == (numbers // max(1, num_tokens)).unsqueeze(1)
    weights = repeated_rows(chosen.weights, token_of_row, rows_of_token)
    own = torch.where(is_there, experts % way.number, -1)
    return _Rows(token_of_row, rows_of_token, _Chosen(own, torch.where(is_there, weights, weights.new_zeros(()))))


def _sums_here(rows: Tensor, chosen: _Chosen, num_pairs: int, way: _Way) -> Tensor:
    """What the experts of this rank make of rows, added up.

    Args:
        rows: `[m, width]`.
        chosen: Their experts.
        num_pairs: Of a row and an expert of this rank.
        way: What they go through.
    """
    if hasattr(way.compute, TAKES_PAIRS):
        made = way.compute(rows, chosen.experts, chosen.weights, num_pairs=num_pairs)
        if made is not NotImplemented:
            return _results(made, len(rows), rows)
    every, places = _taken(chosen.experts >= 0)
    pairs = every[:num_pairs]
    row_of_pair = pairs // chosen.experts.shape[1]
    made = way.compute(
        repeated_rows(rows, row_of_pair, places),
        chosen.experts.reshape(-1)[pairs].unsqueeze(1),
        repeated_rows(chosen.weights.reshape(-1, 1), pairs, places.reshape(-1, 1)),
    )
    return added_rows(_results(made, num_pairs, rows), row_of_pair, places)


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


def _results(made: Any, number: int, rows: Tensor) -> Tensor:
    """What experts have made of rows, as ranks expect it that have none to see it by: under autocast it may have
    another dtype."""
    shape = (number, rows.shape[1])
    if not isinstance(made, Tensor) or made.shape != shape:
        what = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise PlanError(f"a module with Expert returns a tensor like its tokens, {list(shape)}, and gave {what}")
    return made.to(rows.dtype)
