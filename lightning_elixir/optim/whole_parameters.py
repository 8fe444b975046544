"""Optimizers whose update of a parameter looks at all of it (Muon, Adafactor), over whole parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_elixir.core.composed_states import composed, is_part, parts_of, spread
from lightning_elixir.optim.adam_states import SegmentPlace, Zeros
from lightning_elixir.optim.elementwise import InnerMaker
from lightning_elixir.optim.elementwise_check import settings_of
from lightning_elixir.optim.segments import SegmentOptimizer


@dataclass(frozen=True)
class Layout:
    """How a parameter lies in memory without gaps."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    """None: contiguous."""

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def view(self, flat: Tensor) -> Tensor:
        """1-D, `[numel]`, in the parameter's shape."""
        return flat.view(self.shape) if self.stride is None else flat.as_strided(self.shape, self.stride)

    def flat(self, value: Tensor) -> Tensor:
        """A value of the parameter's shape as it lies in memory, 1-D; perhaps a copy."""
        ordered = self.view(torch.empty(self.numel, dtype=value.dtype, device=value.device)).copy_(value)
        return ordered.as_strided((self.numel,), (1,))


class WholeParameters(SegmentOptimizer):
    """The states of the parameters of one chunk that this rank owns, and their updates.

    Args:
        maker: From `inner_maker`.
        work: This rank's shard of the chunk, 1-D: tells the dtype, and the device where states live.
        places: The parameters that this rank owns and that have a group; `numel` is the whole parameter's.
        groups: The user's parameter groups.
        zeros: Makes 1-D tensors of zeros where states shall live.
        layouts: By member index.
    """

    def __init__(
        self,
        maker: InnerMaker,
        work: Tensor,
        places: Sequence[SegmentPlace],
        groups: Sequence[Mapping[str, Any]],
        zeros: Zeros,
        layouts: Mapping[int, Layout],
    ) -> None:
        super().__init__(maker, work, (), groups, zeros)
        self.places = tuple(places)
        self._layouts = layouts
        self._zeros = zeros
        self._states: dict[int, dict[str, Any]] = {}  # by member index, in parts (`composed_states`)

    def update(self, index: int, group: Mapping[str, Any], value: Tensor, grad: Tensor) -> None:
        """One step of a parameter, on the device of `value`; states that live elsewhere come there and go back.

        Args:
            index: Its member index.
            group: The user's, whose settings are read now.
            value: 1-D, `[numel]`, in memory order; updated in place.
            grad: As `value`.
        """
        near = {key: self._near(v, value.device) for key, v in self.states_of(index).items()}
        self.keep(index, self.stepped(index, group, value, grad, near))

    def states_of(self, index: int) -> Mapping[str, Any]:
        """Of a member, where they live; empty before its first step."""
        return self._states.get(index, {})

    def stepped(
        self, index: int, group: Mapping[str, Any], value: Tensor, grad: Tensor, near: dict[str, Any]
    ) -> dict[str, Any]:
        """One step, as `update`, which keeps no states.

        Args:
            near: The states in parts, on the device of `value`; may be written over.

        Returns:
            The new states, there, in parts.
        """
        layout = self._layouts[index]
        parameter = layout.view(value).detach()
        parameter.grad = layout.view(grad)
        one = self._maker.make([{**settings_of(group), "params": [parameter]}])
        if near:
            one.state[parameter] = composed(near, layout.shape, value.dtype)
        step = type(one).step
        getattr(step, "__wrapped__", step)(one)  # without hooks for all optimizers: this is a part of a step
        if parameter.data_ptr() != value.data_ptr():  # it has made itself a contiguous copy
            layout.view(value).copy_(parameter)
        return parts_of(one.state[parameter], layout.shape)

    def keep(self, index: int, states: Mapping[str, Any], *, is_copied: bool = False) -> None:
        """Take new states of a member to where they live.

        Args:
            is_copied: Also from memory of the same device, which is not theirs.
        """
        kept = self.states_of(index)
        if states:
            self._states[index] = {key: self._home(v, kept.get(key), is_copied) for key, v in states.items()}

    @staticmethod
    def _near(value: Any, device: torch.device) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        return value.to(device, non_blocking=True)

    def _home(self, value: Any, earlier: Any, is_copied: bool) -> Any:
        """A state where it lives: the memory that it had before, if it had."""
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if value.device.type == self.work.device.type and not is_copied:
            return value
        if not (isinstance(earlier, Tensor) and (earlier.shape, earlier.dtype) == (value.shape, value.dtype)):
            earlier = self._zeros(value.numel(), value.dtype).as_strided(value.shape, value.stride())
        return earlier.copy_(value, non_blocking=True)

    # States, as `SegmentOptimizer` has them, but in shapes of their own

    def described(self, position: int) -> dict[str, tuple[str, Any]]:
        """As of `SegmentOptimizer`; what has another shape than the parameter is a value, small as it is."""
        shape = self._layout_of(position).shape
        found: dict[str, tuple[str, Any]] = {}
        for key, value in spread(self.state_of(position), shape).items():
            is_like_parameter = isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) == shape
            found[key] = ("tensor", value.dtype) if is_like_parameter else ("value", _copied(value))
        return found

    def state_of(self, position: int) -> dict[str, Any]:
        return self._states.get(self.places[position].member_index, {})

    def run_of(self, position: int, key: str) -> Tensor | None:
        layout = self._layout_of(position)
        perhaps = {name: value for name, value in self.state_of(position).items() if key.startswith(name)}
        value = spread(perhaps, layout.shape).get(key)
        return None if value is None else layout.flat(value)

    def _layout_of(self, position: int) -> Layout:
        return self._layouts[self.places[position].member_index]

    def has_only_reserved(self, position: int) -> bool:
        return False

    def set_state(self, position: int, state: Mapping[str, Any], *, keeps_dtype: bool = False) -> None:
        index = self.places[position].member_index
        kept = getattr(self._maker.prototype, "non_castable_tensor_keys", ())  # what bitsandbytes says of its own
        taken = {
            key: self._taken(index, value, keeps_dtype or key in kept or is_part(key))
            for key, value in parts_of(state, self._layouts[index].shape).items()
        }
        self._states.pop(index, None)
        if taken:
            self._states[index] = taken

    def _taken(self, index: int, value: Any, keeps_dtype: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.dim():
            return value.clone()
        layout = self._layouts[index]
        home = self._zeros(value.numel(), value.dtype if keeps_dtype else self.work.dtype)
        shaped = layout.view(home) if tuple(value.shape) == layout.shape else home.view(value.shape)
        return shaped.copy_(value)

    def take_states(self, earlier: SegmentOptimizer) -> None:
        by_member = {place.member_index: position for position, place in enumerate(earlier.places)}
        for position, place in enumerate(self.places):
            if place.member_index in by_member:
                self.set_state(position, earlier.state_of(by_member[place.member_index]), keeps_dtype=True)

    def state_bytes(self) -> int:
        return sum(
            v.nbytes for state in self._states.values() for v in state.values() if isinstance(v, Tensor) and v.dim()
        )


def _copied(value: Any) -> Any:
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value
