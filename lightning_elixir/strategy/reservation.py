"""Memory that steps under a plan keep, taken when the plan comes into force. That of spare states, which a first
backward does not use, is made beside it and taken when it ends: before, memory was 2.9 s of Llama-7B's first step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from lightning_elixir.errors import CapacityError
from lightning_elixir.optimizer import ElixirOptimizer
from lightning_elixir.plan.types import Plan
from lightning_elixir.strategy.engine_handle import EngineHandle
from lightning_elixir.strategy.warm_up import Stage, WarmUp

log = logging.getLogger(__name__)


class Reservation:
    """Has a lack of memory show when a plan comes into force, not in the middle of a step.

    Args:
        handle: Of the engine.
        warm_up: Makes its plans.
        optimizers: Over its chunks, as they are now.
    """

    def __init__(
        self, handle: EngineHandle, warm_up: WarmUp, optimizers: Callable[[], Sequence[ElixirOptimizer]]
    ) -> None:
        self._handle = handle
        self._warm_up = warm_up
        self._optimizers = optimizers
        self._plan: Plan | None = None  # for which it is taken
        self._has_lacked_room = False  # on the device, for the states of a plan
        self._has_left_spares = False

    def take(self) -> None:
        """Take it, unless that has been done for the plan in force. Collective."""
        plan = self._handle.engine.plan
        if plan is self._plan or self._warm_up.stage in (Stage.NEW, Stage.WATCHED):
            return
        self._plan, is_first = plan, plan.has_spare_states and not self._handle.num_steps
        try:
            for optimizer in self._optimizers():
                optimizer.reserve(leaves_spares=is_first)
            self._has_left_spares = is_first
        except CapacityError as error:
            if error.resource != "GPU" or self._has_lacked_room or not self._warm_up.start_over():
                raise
            self._has_lacked_room = True  # the next plan is made from what was seen
            log.warning("%s. The next step is watched, and another plan made", error)

    def take_rest(self) -> None:
        """Take what `take` has left, after a backward, unless another plan is in force by now. Collective.

        Raises:
            CapacityError: A host runs short of memory.
        """
        is_left, self._has_left_spares = self._has_left_spares, False
        if is_left and self._handle.engine.plan is self._plan:
            for optimizer in self._optimizers():
                optimizer.reserve()
