"""How many blocks keep, recompute and offload their activations: a small space, and the way through it.

Blocks of a model are alike, so numbers say nearly all; which ones follows from them: each kind is spread over the
depth, so that copies find computing to hide behind, and the last blocks keep theirs, which backward needs first. Where
a byte of what attention gave saves more computing than a byte of a block that keeps everything, recomputed blocks keep
that: all of them, or some where none keeps everything. The search looks at quarters, and climbs from the best of these
by halved steps. What computes longer than the best step found cannot be better, and is not looked at; what is far from
the best under the first placements that come to hand is not looked at closely. Nothing is random, so equal inputs give
equal fates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_elixir.plan.activations import Fate, ModelBlock

_QUARTERS = 4
_MOST_LOOKS = 40
_HOPELESS = 1.1  # times the best, under the first placements: the best ones were seen to be up to 8% faster


@dataclass(frozen=True)
class Mix:
    """Numbers of blocks; the others keep their activations."""

    recomputed: int = 0
    offloaded: int = 0
    has_inputs_on_host: bool = False
    """Inputs of the recomputed ones are in host memory, but for those that keep attention."""
    attending: int = 0
    """Of the recomputed ones, those that keep what attention gave."""

    def blocks(self, names: Sequence[str]) -> tuple[ModelBlock, ...]:
        """The fates of these blocks, in the order of forward."""
        again = Fate.RECOMPUTE_OFFLOADED if self.has_inputs_on_host else Fate.RECOMPUTE
        wanted = {
            Fate.KEEP: len(names) - self.recomputed - self.offloaded,
            again: self.recomputed - self.attending,
            Fate.OFFLOAD: self.offloaded,
            Fate.KEEP_ATTENTION: self.attending,
        }
        given = dict.fromkeys(wanted, 0)
        fates = []
        for position in range(1, len(names) + 1):  # from the last one on, the kind that lags behind most
            fate = max(wanted, key=lambda kind: wanted[kind] * position - given[kind] * len(names))
            given[fate] += 1
            fates.append(fate)
        return tuple(ModelBlock(name, fate) for name, fate in zip(names, reversed(fates), strict=True))


def best_mix(
    num_blocks: int,
    first_seconds: Callable[[Mix], float],
    seconds: Callable[[Mix], float],
    least_seconds: Callable[[Mix], float],
    *,
    is_attention_worth_it: bool = False,
) -> Mix | None:
    """The mix with the fastest step; of those as fast, the first that was looked at.

    Args:
        num_blocks: Of the model.
        first_seconds: Of a step under some placement; infinite where nothing fits.
        seconds: Of a step under the best placement; asked only for mixes that may be the best by what was seen first.
        least_seconds: What a step cannot be faster than; cheap to tell.
        is_attention_worth_it: Whether recomputed blocks may keep attention.

    Returns:
        None: with none of those that were looked at does anything fit.
    """
    known: dict[Mix, float] = {}

    def best_s() -> float:
        return min(known.values(), default=math.inf)

    def look(mixes: Iterator[Mix], most: int) -> None:
        new = sorted((mix for mix in dict.fromkeys(mixes) if mix not in known), key=least_seconds)
        first: dict[Mix, float] = {}
        for mix in new:
            if len(known) + len(first) < most and least_seconds(mix) < min([best_s(), *first.values()]):
                first[mix] = first_seconds(mix)
        for mix in sorted(first, key=lambda mix: first[mix]):
            known[mix] = first[mix]
            if least_seconds(mix) < best_s() and first[mix] < _HOPELESS * best_s():
                known[mix] = seconds(mix)

    look(_quarters(num_blocks, is_attention_worth_it), _MOST_LOOKS)
    step = max(1, num_blocks // (2 * _QUARTERS))
    while math.isfinite(best_s()):
        best = min(known, key=lambda mix: known[mix])
        before = len(known)
        look(
            _near(best, step, num_blocks, is_attention_worth_it), _MOST_LOOKS + before if step == 1 else 2 * _MOST_LOOKS
        )
        is_better = best_s() < known[best]
        if len(known) >= 2 * _MOST_LOOKS or (not is_better and step == 1):
            break
        if not is_better:
            step = max(1, step // 2)
    best = min(known, key=lambda mix: known[mix])
    return best if math.isfinite(known[best]) else None


def _quarters(num_blocks: int, is_attention_worth_it: bool) -> Iterator[Mix]:
    for again in range(_QUARTERS + 1):
        for away in range(_QUARTERS + 1 - again):
            recomputed = num_blocks * again // _QUARTERS
            offloaded = min(num_blocks - recomputed, -(-num_blocks * away // _QUARTERS))
            yield Mix(recomputed, offloaded, attending=recomputed if is_attention_worth_it else 0)
    if is_attention_worth_it:
        yield Mix(num_blocks, 0)
        yield Mix(num_blocks, 0, has_inputs_on_host=True, attending=num_blocks // 2)
    yield Mix(num_blocks, 0, has_inputs_on_host=True)


def _near(at: Mix, step: int, num_blocks: int, is_attention_worth_it: bool) -> Iterator[Mix]:
    for more_again, more_away in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1)):
        recomputed, offloaded = at.recomputed + step * more_again, at.offloaded + step * more_away
        if recomputed >= 0 and offloaded >= 0 and recomputed + offloaded <= num_blocks:
            attending = recomputed if at.attending == at.recomputed else min(at.attending, recomputed)
            attending = attending if is_attention_worth_it else 0
            yield replace(at, recomputed=recomputed, offloaded=offloaded, attending=attending)
    if is_attention_worth_it and at.recomputed + at.offloaded == num_blocks:
        for attending in (at.attending + step, at.attending - step):
            if 0 <= attending <= at.recomputed:
                yield replace(at, attending=attending)
    if at.recomputed > at.attending:
        yield replace(at, has_inputs_on_host=not at.has_inputs_on_host)
