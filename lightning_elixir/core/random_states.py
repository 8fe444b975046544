"""The random generators that constructors and dropout draw from: their states, taken and set together."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def capture_random_states(device: torch.device) -> dict[str, Any]:
    """The states of the generators that constructors and dropout draw from, by kind."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators to what `capture_random_states` returned; kinds that are not in `states` stay as they are."""
    if "python" in states:
        random.setstate(states["python"])
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)
