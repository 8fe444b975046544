"""The random generators that constructors and dropout draw from: their states, taken and set together."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn


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


def kinds_of_generators() -> tuple[type, ...]:
    """Classes of objects that random numbers are drawn from: torch's, Python's and, where that is there, NumPy's."""
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return torch.Generator, random.Random, *kinds


def generators_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Such objects that are attributes of modules, each once."""
    return generators_among(value for module in modules for value in vars(module).values())


def generators_among(values: Iterable[Any]) -> list[Any]:
    """Such objects, each once."""
    kinds = frozenset(kinds_of_generators())
    found = {id(value): value for value in values if type(value) in kinds}
    return list(found.values())


def state_of(generator: Any) -> Callable[[], object]:
    """What puts back the state that such an object has now."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if hasattr(generator, "bit_generator"):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    return partial(generator.set_state, generator.get_state())
