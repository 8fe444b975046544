"""The fates of activations that were weighed against each other, each with the placement that suits it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_elixir.plan.activations import ModelBlock, describe_activations
from lightning_elixir.plan.placing.mixes import Mix, best_mix
from lightning_elixir.plan.placing.space import Candidate
from lightning_elixir.plan.types import Alternative, Plan
from lightning_elixir.plan.units import format_seconds

_NUM_ALTERNATIVES = 4
_FAR = 1.35  # times the best


@dataclass(frozen=True)
class FatesTried:
    """Fates of a model's blocks."""

    blocks: tuple[ModelBlock, ...]
    seconds: float
    """Of a step; infinite where nothing fits."""

    @classmethod
    def all_of(
        cls,
        candidate_of: Callable[[tuple[ModelBlock, ...]], Candidate],
        names: Sequence[str],
        seconds: Callable[[Candidate], float],
        num_backwards: int,
        first_seconds: Callable[[Candidate], float] | None = None,
        earlier: Sequence[FatesTried] = (),
    ) -> tuple[FatesTried, ...]:
        """Those that are worth a look, the best first; where nothing fits, those that take least of the device.

        Args:
            candidate_of: The step with such fates.
            names: Of the blocks, in the order of forward.
            seconds: Of a step under the placement that is best for it; infinite where nothing fits.
            num_backwards: Micro-batches of a step.
            first_seconds: As `seconds`, under some placement, which takes less to find; asked before.
            earlier: Those that were looked at with chunks of another size: what was far from the best there is not
                looked at again, but stays among them.
        """
        far_s = _FAR * earlier[0].seconds if earlier else math.inf
        far = {one.blocks: one for one in earlier if far_s < one.seconds < math.inf}
        candidates: dict[Mix, Candidate] = {}
        found: dict[Mix, float] = {}

        def candidate(mix: Mix) -> Candidate:
            if mix not in candidates:
                candidates[mix] = candidate_of(mix.blocks(names))
            return candidates[mix]

        def first(mix: Mix) -> float:
            if mix.blocks(names) in far:
                return math.inf
            found[mix] = seconds(candidate(mix)) if first_seconds is None else first_seconds(candidate(mix))
            return found[mix]

        def look(mix: Mix) -> float:
            if first_seconds is not None:
                found[mix] = seconds(candidate(mix))
            return found[mix]

        def saved_per_byte(mix: Mix) -> float:
            """Seconds of computing that a byte on the device saves, beside recomputing everything."""
            least, more = (candidate(one).profile for one in (Mix(len(names)), mix))
            nbytes = more.peak_non_model_bytes - least.peak_non_model_bytes
            saved_s = least.compute_s - more.compute_s
            return 0.0 if saved_s <= 0 else saved_s / nbytes if nbytes > 0 else math.inf

        best = best_mix(
            len(names),
            first,
            look,
            lambda mix: num_backwards * candidate(mix).profile.compute_s,
            is_attention_worth_it=saved_per_byte(Mix(len(names), attending=len(names))) > saved_per_byte(Mix()),
        )
        if best is None:
            best = Mix(recomputed=len(names))
            found[best] = math.inf
        others = [*(cls(mix.blocks(names), found[mix]) for mix in found if mix != best), *far.values()]
        return (cls(best.blocks(names), found[best]), *sorted(others, key=lambda one: one.seconds))


def with_alternatives(plan: Plan, tried: Sequence[FatesTried]) -> Plan:
    """The plan, which tells of other fates as well: of the fastest, and of the simplest."""
    if plan.forecast is None or len(tried) < 2:
        return plan
    simple = [one for one in tried[1:] if len({block.fate for block in one.blocks}) == 1]
    shown = dict.fromkeys((*tried[1:_NUM_ALTERNATIVES], *simple))
    more = []
    for one in shown:
        text = f"activations: {describe_activations(one.blocks)}"
        if math.isinf(one.seconds):
            more.append(Alternative(text, None, "does not fit beside any placement"))
        else:
            slower_s = one.seconds - tried[0].seconds
            more.append(Alternative(text, one.seconds, f"{format_seconds(max(0.0, slower_s))} more"))
    return replace(plan, forecast=replace(plan.forecast, alternatives=(*plan.forecast.alternatives, *more)))
