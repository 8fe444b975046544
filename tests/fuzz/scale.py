"""The oracle's loss scale: the rule as `docs` and `torch.amp.GradScaler` tell it, in plain numbers."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.fuzz.programs import Program


def has_scale(program: Program) -> bool:
    """The scale is on with fp16 over fp32 masters alone."""
    return program.dtype == "float16" and bool(program.option("master_weights", True))


class Scale:
    """What a program's loss is multiplied by, and how steps change that; an fp32 number all the time."""

    def __init__(self, program: Program) -> None:
        self._option = program.option
        self.value = _as_fp32(program.option("initial_scale", 2.0**16))
        self._good_steps = 0
        """In a row."""
        self._patience = program.option("hysteresis", 1)
        """Overflows until the scale backs off."""

    def update(self, *, is_overflow: bool) -> None:
        """A step has been taken, or left out because of inf or NaN."""
        option = self._option
        if is_overflow:
            self._good_steps = 0
            self._patience -= 1
            if self._patience <= 0:
                self.value = max(_as_fp32(self.value * option("backoff_factor", 0.5)), option("min_scale", 0.0))
            return
        self._good_steps += 1
        if self._good_steps == option("growth_interval", 2000):
            self._good_steps, self._patience = 0, option("hysteresis", 1)
            grown = min(_as_fp32(self.value * option("growth_factor", 2.0)), option("max_scale", math.inf))
            self.value = grown if grown < math.inf else self.value

    def state_dict(self) -> dict[str, Any]:
        """As an optimizer's state has it."""
        return {
            "scale": self.value,
            "growth_factor": self._option("growth_factor", 2.0),
            "backoff_factor": self._option("backoff_factor", 0.5),
            "growth_interval": self._option("growth_interval", 2000),
            "_growth_tracker": self._good_steps,
            "_hysteresis_tracker": self._patience,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._good_steps = state["scale"], state["_growth_tracker"]
        self._patience = state["_hysteresis_tracker"]


def _as_fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
