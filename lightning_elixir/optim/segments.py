"""An element-wise optimizer over the segments of one shard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_elixir.errors import PlanError
from lightning_elixir.optim.adam import adam_update_
from lightning_elixir.optim.hybrid_adam import HybridAdam

# Their update of one element looks at that element alone, so they may run over any slice of a parameter.
_ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)

# State entries that are one number for the whole parameter, whatever its shape.
_SCALAR_STATES = {"step", "eta", "mu", "mu_product", "ax_step"}


def elementwise_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The class to run over segments in `optimizer`'s place.

    Raises:
        PlanError: For optimizers that are not element-wise or whose `step` we do not know; names those that work.
    """
    if isinstance(optimizer, HybridAdam):
        return HybridAdam
    for known in _ELEMENTWISE:
        if isinstance(optimizer, known) and type(optimizer).step is known.step:
            if any(group.get("differentiable") for group in optimizer.param_groups):
                raise PlanError("a differentiable optimizer step is not possible over shards: use differentiable=False")
            return known
    names = ", ".join(["HybridAdam", "CPUAdam", *(f"torch.optim.{c.__name__}" for c in _ELEMENTWISE)])
    raise PlanError(
        f"{type(optimizer).__name__} cannot run over shards: only element-wise optimizers can ({names}); an optimizer "
        "that looks at a whole parameter at once (LBFGS, Adafactor, Muon) or overrides step() is not one of them"
    )


def is_scalar_state(key: str, value: Any) -> bool:
    """Whether an entry of a parameter's optimizer state is one value for the whole parameter."""
    return key in _SCALAR_STATES or not isinstance(value, Tensor)


@dataclass(frozen=True)
class SegmentPlace:
    """Where a segment lies and which of the user's parameter groups it belongs to."""

    member_index: int
    group_index: int
    shard_offset: int
    numel: int


class SegmentOptimizer:
    """Updates one chunk's shard in place.

    Args:
        cls: From `elementwise_class`.
        work: 1-D tensor to update: the master, or the compute shard where there is none.
        places: The segments that have a parameter group.
        groups: The user's parameter groups, for settings.
    """

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        work: Tensor,
        places: Sequence[SegmentPlace],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        self.places = tuple(places)
        self.work = work
        self._tensors = [work[p.shard_offset : p.shard_offset + p.numel].detach() for p in places]
        self._group_indices = sorted({p.group_index for p in places})
        inner_groups = [
            {
                **_settings(groups[g]),
                "params": [t for t, p in zip(self._tensors, places, strict=True) if p.group_index == g],
            }
            for g in self._group_indices
        ]
        make: Callable[..., torch.optim.Optimizer] = cls  # unlike their base, these have defaults for all settings
        self._inner = make(inner_groups) if inner_groups else None

    def step(self, grad: Tensor, members: Iterable[int], groups: Sequence[Mapping[str, Any]]) -> None:
        """One update.

        Args:
            grad: 1-D, numel and dtype of `work`; may be overwritten.
            members: Member indices that have a gradient: the others stay untouched.
            groups: The user's groups, whose settings are read now.
        """
        if self._inner is None:
            return
        wanted = set(members)
        for inner_group, group_index in zip(self._inner.param_groups, self._group_indices, strict=True):
            inner_group.update(_settings(groups[group_index]))
        for tensor, place in zip(self._tensors, self.places, strict=True):
            is_used = place.member_index in wanted
            tensor.grad = grad[place.shard_offset : place.shard_offset + place.numel] if is_used else None
        self._inner.step()
        for tensor in self._tensors:
            tensor.grad = None

    @property
    def is_adam(self) -> bool:
        """Whether `step_adam` may be used."""
        return isinstance(self._inner, HybridAdam)

    def step_adam(
        self,
        grad: Tensor,
        factor: float,
        members: Collection[int],
        groups: Sequence[Mapping[str, Any]],
        compute: Tensor | None,
    ) -> None:
        """One update by `HybridAdam`, in one pass: gradients of any dtype, unscaled and clipped on the way.

        Args:
            grad: 1-D, numel of `work`, same device; read only.
            factor: What gradients are multiplied by.
            members: Member indices that have a gradient.
            groups: The user's groups.
            compute: 1-D, numel of `work`, same device: receives the updated values of the used segments in its own
                dtype.
        """
        if not isinstance(self._inner, HybridAdam):
            return
        hyper = {g: HybridAdam.hyper_parameters(groups[g]) for g in self._group_indices}
        for tensor, place in zip(self._tensors, self.places, strict=True):
            if place.member_index not in members:
                continue
            part = slice(place.shard_offset, place.shard_offset + place.numel)
            state = self._inner.state[tensor]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(tensor)
                state["exp_avg_sq"] = torch.zeros_like(tensor)
            state["step"] += 1
            adam_update_(
                tensor,
                grad[part],
                state["exp_avg"],
                state["exp_avg_sq"],
                step=int(state["step"].item()),
                grad_factor=factor,
                compute_param=None if compute is None else compute[part],
                **hyper[place.group_index],
            )

    def state_of(self, position: int) -> dict[str, Any]:
        """State of the segment at `places[position]`; empty before its first update."""
        if self._inner is None:
            return {}
        state: dict[str, Any] = self._inner.state.get(self._tensors[position], {})
        return state

    def set_state(self, position: int, state: Mapping[str, Any]) -> None:
        """Replace the state of the segment at `places[position]`; tensors are used as they are."""
        if self._inner is not None:
            self._inner.state[self._tensors[position]] = dict(state)

    def take_state(self, position: int, state: Mapping[str, Any]) -> None:
        """Take over the state of the same segment of an optimizer on another device."""
        if state:
            device = self.work.device
            self.set_state(position, {k: v if is_scalar_state(k, v) else v.to(device) for k, v in state.items()})

    def reset_step_counts(self) -> None:
        """Take back the step counts of a step that only allocated."""
        for position in range(len(self.places)):
            count = self.state_of(position).get("step")
            if isinstance(count, Tensor):
                count.zero_()

    def state_bytes(self) -> int:
        """Bytes of all element-wise state tensors."""
        if self._inner is None:
            return 0
        states = self._inner.state.values()
        return sum(v.nbytes for s in states for k, v in s.items() if not is_scalar_state(k, v) and v is not None)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
