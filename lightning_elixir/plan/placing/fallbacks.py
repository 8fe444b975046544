"""What is tried in turn: other ways in which updates run, and NVMe, where the host's memory is short or has room."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from lightning_elixir.errors import CapacityError
from lightning_elixir.plan.memory import uses_nvme
from lightning_elixir.plan.problem import Problem
from lightning_elixir.plan.simulator.timeline import scheme_of
from lightning_elixir.plan.types import Plan

SAME = 1e-3
"""Relative difference of predictions below which two placements are as fast."""
_WORTH_A_DISK = 0.05
"""Part of the step that states on NVMe have to save where another placement needs none: disks are shared, and wear."""

Make = Callable[[Problem], Plan]
"""Raises `CapacityError` where nothing fits."""


def needs_disk(plan: Plan) -> bool:
    return any(uses_nvme(c) for c in plan.chunks)


def plan_with_fallbacks(problem: Problem, make: Make, *, is_choosing: bool) -> Plan:
    """A plan under the way of updates that suits the host's memory: gradients in compute shards where that is short,
    spare states where it has room for them.

    Args:
        problem: What is given; how updates run is found here.
        make: Makes the plan of a problem.
        is_choosing: The fastest is wanted, of all ways that fit, and NVMe only where it is worth that. Otherwise, for
            placements that the user has fixed, the first way that fits, with the spare states that fit.

    Raises:
        CapacityError: Nothing fits.
    """
    waiting = problem.with_updates(problem.regime.waiting())
    if is_choosing and problem.regime.can_speculate and not problem.budget.nvme_bytes:
        # The search for this looks at fewer and fewer spare states down to none, so the other need not be made as well.
        ahead = _ahead(problem, make)
        return ahead if ahead is not None and ahead.has_spare_states else _frugal(waiting, make)
    plan = _frugal(waiting, make) if is_choosing else _reusing_if_short(waiting, make, is_choosing=False)
    if _could_speculate(plan, problem):
        ahead = _ahead(problem, make)
        if ahead is not None and ahead.has_spare_states and _is_worth_spares(ahead, plan, is_choosing=is_choosing):
            return ahead
    return plan


def _ahead(problem: Problem, make: Make) -> Plan | None:
    """A plan with spare states; no states go to NVMe to make room for these. None: nothing fits in memory alone."""
    with suppress(CapacityError):
        return make(problem.in_memory().with_updates(problem.regime.speculating()))
    return None


def _is_worth_spares(ahead: Plan, plan: Plan, *, is_choosing: bool) -> bool:
    """Whether the plan with spare states is faster; where the user has fixed the placement, whether it is no slower, as
    far as that is known."""
    if is_choosing:
        return _seconds(ahead) < _seconds(plan) * (1 - SAME)
    return _seconds(ahead) <= _seconds(plan) * (1 + SAME)


def _could_speculate(plan: Plan, problem: Problem) -> bool:
    """Whether updates of a plan without spare states would begin earlier with them, had the host the memory."""
    scheme = scheme_of(plan, problem.regime)
    is_short = plan.grad_reuses_compute_shard or needs_disk(plan)
    return problem.regime.can_speculate and not is_short and any(map(scheme.can_have_spares, plan.chunks))


def _frugal(problem: Problem, make: Make) -> Plan:
    """The fastest plan; with states on NVMe only where that is worth it, or nothing else fits."""
    plan = _reusing_if_short(problem, make, is_choosing=True)
    if needs_disk(plan):
        with suppress(CapacityError):
            other = _reusing_if_short(problem.in_memory(), make, is_choosing=True)
            if _seconds(plan) >= _seconds(other) * (1 - _WORTH_A_DISK):
                return other
    return plan


def _reusing_if_short(problem: Problem, make: Make, *, is_choosing: bool) -> Plan:
    """A plan with gradients in compute shards where nothing else fits, or only what has states on NVMe and is no
    faster."""
    regime = problem.regime
    try:
        plan = make(problem)
    except CapacityError as error:
        if error.resource != "host" or not regime.can_reuse:
            raise
        return make(problem.with_updates(regime.reusing()))
    if is_choosing and regime.can_reuse and needs_disk(plan):
        other = make(problem.with_updates(regime.reusing()))
        if _seconds(other) < _seconds(plan):
            return other
    return plan


def _seconds(plan: Plan) -> float:
    return math.inf if plan.forecast is None else plan.forecast.times.total_s
