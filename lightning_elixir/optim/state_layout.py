"""What states an optimizer will make, learnt without stepping it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# State entries that are one number for the whole parameter, whatever its shape.
_SCALAR_STATES = {"step", "eta", "mu", "mu_product", "ax_step"}

_NUMEL = 3  # not 1, so that a state of the parameter's shape is told from a number


def is_scalar_state(key: str, value: Any, shape: Sequence[int] = (1,)) -> bool:
    """Whether an entry of a parameter's optimizer state is one value for the whole parameter.

    Args:
        key: Its name.
        value: The entry.
        shape: Of the parameter; segments are 1-D. Where it is `()`, states for each element look like numbers.
    """
    if key in _SCALAR_STATES or not isinstance(value, Tensor):
        return True
    return value.dim() == 0 and len(shape) > 0


def elementwise_state_dtypes(
    make: Callable[[Sequence[dict[str, Any]]], torch.optim.Optimizer], settings: Mapping[str, Any], like: Tensor
) -> tuple[torch.dtype, ...]:
    """The dtypes of the element-wise states that a first step makes for a parameter.

    Another optimizer of the same class steps a throw-away parameter of a few elements: neither the user's optimizer nor
    any parameter of theirs is stepped, since a first step may be unlike all others (SGD's momentum, NAdam, Rprop).

    Args:
        make: Makes one from groups with all settings.
        settings: Of the parameter's group; not changed.
        like: A tensor of the parameter's dtype and device.
    """
    probe = torch.zeros(_NUMEL, dtype=like.dtype, device=like.device)
    probe.grad = torch.zeros_like(probe)
    optimizer = make([{**copy.deepcopy(dict(settings)), "params": [probe]}])
    # Without the hooks that users may have registered for all optimizers: this is no step of theirs.
    step, train = type(optimizer).step, getattr(type(optimizer), "train", None)
    with torch.no_grad():
        if callable(train):  # schedule-free ones step in this mode alone
            train(optimizer)
        getattr(step, "__wrapped__", step)(optimizer)
    return tuple(
        value.dtype
        for key, value in optimizer.state[probe].items()
        if not is_scalar_state(key, value) and value.shape == probe.shape
    )
