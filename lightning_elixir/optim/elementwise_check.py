"""Finds out by trying whether an optimizer updates element by element.

Whole tensors are stepped by one optimizer, and the same numbers, cut up and in another order, by several, as an engine
does: each over some of the pieces, with the settings of the user's groups. After every step both must hold the same
values and the same states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_elixir.errors import PlanError
from lightning_elixir.optim.state_layout import is_scalar_state

OptimizerMaker = Callable[[Sequence[dict[str, Any]]], torch.optim.Optimizer]
"""Makes an optimizer from parameter groups that hold all settings."""

# The last is large enough for optimizers that quantise the states of larger tensors.
_SHAPES = ((6, 4), (5,), (2, 3, 2), (80, 64))
_NUM_STEPS = 5
_UNUSED = {(2, 1), (0, 2)}  # step, tensor: it has no gradient then
_LARGE = {3: 1000.0}  # step: how many times as large gradients are, for norms that count beyond a threshold only
_CUT = 0.3  # where each tensor is cut
# The same operations on other shapes: a vector unit's remainder may be rounded otherwise.
_TOLERANCE = {"rtol": 1e-5, "atol": 1e-7}


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def check_elementwise(make: OptimizerMaker, sample: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Try the optimizer with the settings of each group. Draws no random number that others see.

    Args:
        make: Makes what runs over segments.
        sample: The user's, for its name and attributes; not stepped.
        groups: Whose settings count; not changed.

    Raises:
        PlanError: It is not element-wise, or fails.
    """
    name = type(sample).__name__
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        tried: list[dict[str, Any]] = []
        for group in groups:
            settings = settings_of(group)
            if settings not in tried:
                tried.append(settings)
                try:
                    _Trial(make, copy.deepcopy(settings)).run()
                except _NotElementwiseError as error:
                    raise PlanError(
                        f"{name} is not element-wise: {error}. Updates run over slices of parameters, so what becomes"
                        " of an element may depend on that element, its gradient and its own states alone. Change"
                        " that in its step(), or use HybridAdam or an element-wise optimizer of torch, such as"
                        " torch.optim.AdamW"
                    ) from None
                except Exception as error:
                    raise PlanError(
                        f"{name} failed when it was tried on small tensors, cut up and whole, with the settings"
                        f" {settings} ({type(error).__name__}: {error}): it cannot run over slices of parameters."
                        " Have its step() take tensors of one dimension and any length, or use HybridAdam or an"
                        " element-wise optimizer of torch, such as torch.optim.AdamW"
                    ) from error


class _NotElementwiseError(Exception):
    """What was seen."""


class _Trial:
    """Steps an optimizer over whole tensors, and others over their pieces."""

    def __init__(self, make: OptimizerMaker, settings: dict[str, Any]) -> None:
        self._make = make
        self._random = torch.Generator().manual_seed(1)
        values = [torch.randn(shape, generator=self._random, device="cpu") for shape in _SHAPES]
        self._orders = [torch.randperm(v.numel(), generator=self._random, device="cpu") for v in values]
        self._whole = [v.clone() for v in values]
        self._again = [v.clone() for v in values]
        self._pieces = [list(self._cut(i, v)) for i, v in enumerate(values)]
        # Pieces of one optimizer: the first halves and the second halves, as of two chunks. The second ones come in
        # another order than the user gave, for what depends on a parameter's number among all.
        self._of_whole = make([{**copy.deepcopy(settings), "params": self._whole}])
        self._of_again = make([{**copy.deepcopy(settings), "params": self._again}])
        self._of_pieces = [
            make([{**copy.deepcopy(settings), "params": [pieces[half] for pieces in self._pieces[::order]]}])
            for half, order in ((0, 1), (1, -1))
        ]
        self._settings = copy.deepcopy(settings)  # what the user's group would hold

    def _cut(self, index: int, value: Tensor) -> tuple[Tensor, Tensor]:
        row = value.reshape(-1)[self._orders[index]]
        at = int(_CUT * row.numel())
        return row[:at].clone(), row[at:].clone()

    def run(self) -> None:
        attributes = _attributes(self._of_whole)
        self._call("train")
        for step in range(_NUM_STEPS):
            size = _LARGE.get(step, 1.0)
            grads = [size * torch.randn(shape, generator=self._random, device="cpu") for shape in _SHAPES]
            for index, grad in enumerate(grads):
                is_used = (step, index) not in _UNUSED
                self._whole[index].grad = grad.clone() if is_used else None
                self._again[index].grad = grad.clone() if is_used else None
                for piece, part in zip(self._pieces[index], self._cut(index, grad), strict=True):
                    piece.grad = part if is_used else None
            if step == _NUM_STEPS - 1:  # a scheduler has changed it
                self._set("lr", lambda lr: lr / 2)
            self._call("step")
            self._compare(f"after step {step + 1}")
        for mode in ("eval", "train"):
            if self._call(mode):
                self._compare(f"after {mode}()")
        changed = [k for k, v in _attributes(self._of_whole).items() if k not in attributes or attributes[k] != v]
        if changed:
            raise _NotElementwiseError(
                f"a step changes its attribute {changed[0]}, which every slice would count for itself and no"
                " checkpoint holds; what lasts belongs into state, or into the parameter groups"
            )

    def _set(self, key: str, change: Callable[[Any], Any]) -> None:
        for optimizer in (self._of_whole, self._of_again):
            for group in optimizer.param_groups:
                if isinstance(group.get(key), float):
                    group[key] = change(group[key])
        if isinstance(self._settings.get(key), float):
            self._settings[key] = change(self._settings[key])

    def _call(self, method: str) -> bool:
        """As an engine has it called. Returns whether there is such a method."""
        call = getattr(type(self._of_whole), method, None)
        if not callable(call):
            return False
        call = getattr(call, "__wrapped__", call)
        states = torch.random.get_rng_state()
        call(self._of_whole)
        call(self._of_again)
        if any(not torch.equal(a, b) for a, b in zip(self._whole, self._again, strict=True)):
            raise _NotElementwiseError("two runs over the same numbers differ, so it draws random numbers")
        if not torch.equal(states, torch.random.get_rng_state()):
            raise _NotElementwiseError("it draws random numbers, which would be others for every slice")
        for optimizer in self._of_pieces:
            optimizer.param_groups[0].update(self._settings)
            call(optimizer)
        probe = torch.zeros(1, device="cpu")
        probe.grad = torch.zeros(1, device="cpu")
        one = self._make([{**self._settings, "params": [probe]}])
        call(one)
        self._settings.update(settings_of(one.param_groups[0]))
        return True

    def _compare(self, when: str) -> None:
        for index, whole in enumerate(self._whole):
            shape = list(whole.shape)
            where = f"{when}, a tensor of shape {shape} and the same numbers in pieces"
            self._compare_values(index, whole, self._pieces[index], f"{where} hold other values")
            state = self._of_whole.state.get(whole, {})
            parts = [
                optimizer.state.get(piece, {})
                for optimizer, piece in zip(self._of_pieces, self._pieces[index], strict=True)
            ]
            if any(part.keys() != state.keys() for part in parts):
                raise _NotElementwiseError(f"{where} have other states: {sorted(state)} and {sorted(parts[0])}")
            for key, value in state.items():
                self._compare_state(index, key, value, [part[key] for part in parts], where)
        for key, value in settings_of(self._of_whole.param_groups[0]).items():
            mine = self._settings.get(key)
            if not isinstance(value, Tensor) and mine != value:
                raise _NotElementwiseError(
                    f"{when}, the setting {key} of its group is {value}, and {mine} where gradients are zeros: what"
                    " depends on gradients is other for every slice"
                )

    def _compare_state(self, index: int, key: str, value: Any, parts: Sequence[Any], where: str) -> None:
        whole = self._whole[index]
        if _has_tensors_inside(value):
            raise _NotElementwiseError(
                f"its state {key} is a {type(value).__name__} with tensors in it, which is neither one number nor one"
                " for each element"
            )
        if is_scalar_state(key, value):
            if any(not _is_close(value, part) for part in parts):
                raise _NotElementwiseError(f"{where} have another {key}: {value} and {parts[0]}")
        elif value.shape != whole.shape:
            raise _NotElementwiseError(
                f"its state {key} of a tensor of shape {list(whole.shape)} has shape {list(value.shape)}, which is"
                " neither one number nor one for each element"
            )
        else:
            self._compare_values(index, value, parts, f"{where} have another state {key}")

    def _compare_values(self, index: int, whole: Tensor, pieces: Sequence[Tensor], what: str) -> None:
        expected = self._cut(index, whole)
        # After large gradients what is left of a difference of two large numbers is as exact as these are.
        largest = float(torch.nan_to_num(whole.float(), posinf=0.0, neginf=0.0).abs().amax())
        tolerance = _TOLERANCE | {"atol": _TOLERANCE["atol"] * max(1.0, largest)}
        for part, piece in zip(expected, pieces, strict=True):
            if part.shape != piece.shape or not torch.allclose(
                part.float(), piece.float(), **tolerance, equal_nan=True
            ):
                raise _NotElementwiseError(what)


def _has_tensors_inside(value: Any) -> bool:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | set) else ()
    return any(isinstance(one, Tensor) or _has_tensors_inside(one) for one in inside)


def _is_close(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.allclose(a.double(), b.double(), **_TOLERANCE, equal_nan=True)
    return type(a) is type(b) and bool(a == b)


_KNOWN = frozenset(vars(torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.1)))


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer keeps on itself, where that can be compared."""
    found: dict[str, Any] = {}
    for key, value in vars(optimizer).items():
        if key in _KNOWN or key.startswith("_opt_called"):
            continue
        if isinstance(value, int | float | str | bool | tuple | type(None)):
            found[key] = value
        elif isinstance(value, Tensor):
            found[key] = value.tolist()
        elif isinstance(value, dict | list | set):
            found[key] = len(value)
    return found
