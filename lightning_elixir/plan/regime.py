"""What training is like: what a plan has to know of precision, optimizer and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from lightning_elixir.plan.stream_buffers import STREAM_BYTES
from lightning_elixir.plan.types import DTYPE_BYTES, Member, UpdateTiming


@dataclass(frozen=True)
class ModelDataBytes:
    """Bytes per element of everything that a trainable parameter drags along."""

    compute: int
    """The parameter in the compute dtype."""
    grad: int
    """The gradient shard."""
    master: int
    """The optimizer's own copy of the parameter; 0 if it works on the compute shard."""
    states: int
    """Optimizer states, all together."""

    @property
    def optim(self) -> int:
        """What follows the optimizer tier: master, states and the gradient shard."""
        return self.grad + self.master + self.states

    @classmethod
    def of(
        cls,
        dtype: str,
        *,
        has_master: bool,
        num_states: int = 2,
        byte_states: int = 0,
        grad_bytes: int | None = None,
    ) -> ModelDataBytes:
        """The usual figures: 16-bit with an fp32 master 2, 2, 4, 8; fp32 4, 4, 0, 8; 16-bit without master 2, 2, 0, 4.

        Args:
            dtype: Compute dtype, key of `DTYPE_BYTES`.
            has_master: Whether 16-bit parameters have an fp32 master.
            num_states: Optimizer states per element (Adam 2, SGD with momentum 1).
            byte_states: Further ones, of one byte each.
            grad_bytes: Bytes per element of the gradient shard; None: as the parameter.
        """
        compute = DTYPE_BYTES[dtype]
        master = 4 if has_master and compute == 2 else 0
        states = num_states * (master or compute) + byte_states
        return cls(compute, compute if grad_bytes is None else grad_bytes, master, states)


class StateCount(NamedTuple):
    """What an optimizer keeps for each element."""

    full: int = 0
    """States of the dtype that it works in."""
    of_a_byte: int = 0
    """Further ones, of one byte each."""

    def nbytes(self, itemsize: int) -> int:
        """Of an element.

        Args:
            itemsize: Of the dtype that the optimizer works in.
        """
        return self.full * itemsize + self.of_a_byte

    def and_full(self, num: int) -> StateCount:
        """With so many more."""
        return self._replace(full=self.full + num)


OtherStates = tuple[tuple[str, StateCount], ...]
"""FQNs of parameters, and what their optimizer keeps."""


def states_of(counts: Iterable[tuple[StateCount, Iterable[str]]]) -> tuple[StateCount, OtherStates]:
    """What the optimizer keeps that keeps the most, and the parameters of those that keep less.

    Args:
        counts: Of each optimizer, with the FQNs of its parameters.
    """
    known = [(count, tuple(names)) for count, names in counts]
    most = max((count for count, _ in known), key=lambda count: count.nbytes(4), default=StateCount())
    return most, tuple((name, count) for count, names in known if count != most for name in sorted(names))


def in_step_of(optimizers: Iterable[tuple[bool, Iterable[str]]]) -> frozenset[str]:
    """`TrainingRegime.in_step` with these optimizers.

    Args:
        optimizers: Whether updates of each may run behind the next forward, and the FQNs of its parameters.
    """
    known = [(can_run_behind, tuple(names)) for can_run_behind, names in optimizers]
    if not any(can_run_behind for can_run_behind, _ in known):
        return frozenset()
    return frozenset(name for can_run_behind, names in known if not can_run_behind for name in names)


@dataclass(frozen=True)
class UpdateMode:
    """How a plan has updates of states beside the device run."""

    timing: UpdateTiming = UpdateTiming.AFTER_BACKWARD
    grad_reuses_compute_shard: bool = False
    """Gradients land in compute shards."""


@dataclass(frozen=True)
class TrainingRegime:
    """What training is like, whatever the placement."""

    master_weights: bool = True
    """Whether 16-bit parameters have an fp32 master."""
    num_states: int = 2
    """Optimizer states per element (Adam 2, SGD with momentum 1, without 0)."""
    byte_states: int = 0
    """Further states per element, of one byte each: what optimizers in 8 bits keep, their scales among them."""
    other_states: OtherStates = ()
    """Parameters of which an optimizer beside that one keeps less (Muon 1)."""
    accumulates: bool = False
    """Gradients of several backwards are added up, in fp32."""
    num_backwards: int = 1
    """Micro-batches before each update, as far as that is known; they count in the predicted step."""
    most_backwards: int | None = None
    """No update comes after more of them, ever; None: not known."""
    reduce_bytes: int = 0
    """Of an element of gradients as several ranks reduce them and keep them, where that is given (`reduce_dtype`)."""
    update_timing: UpdateTiming = UpdateTiming.AFTER_BACKWARD
    """When updates of states beside the device may run; what `num_backwards` and `accumulates` do not allow is left
    out."""
    needs_global_norm: bool = False
    """Gradients are clipped by their norm, or the loss is scaled: updates begin inside backward only into spare states,
    for chunks that the host has memory for; otherwise behind the next forward."""
    in_step: frozenset[str] = frozenset()
    """FQNs of parameters that are updated within the step, whatever the timing: those of optimizers other than
    `HybridAdam` and `CPUAdam`, beside one of these."""
    can_stream: bool = False
    """Whether the optimizer's updates may be streamed to the device (`HybridAdam`, `CPUAdam`)."""
    stream_bytes: int = STREAM_BYTES
    """Device memory of the buffers that this takes."""
    whole_update_bytes: int = 0
    """Device memory that an optimizer takes which updates whole parameters (Muon, Adafactor), in its step."""
    can_reuse_compute_shard: bool = False
    """Whether gradients may land in compute shards where host memory would not suffice otherwise; with several
    backwards before an update they never do."""

    @cached_property
    def data_bytes(self) -> Mapping[str, ModelDataBytes]:
        """Bytes per element, by compute dtype."""
        return {
            dtype: ModelDataBytes.of(
                dtype,
                has_master=self.master_weights,
                num_states=self.num_states,
                byte_states=self.byte_states,
                grad_bytes=max(4, itemsize) if self.accumulates else self.reduce_bytes or None,
            )
            for dtype, itemsize in DTYPE_BYTES.items()
        }

    @cached_property
    def fewer_bytes(self) -> Mapping[str, Mapping[str, int]]:
        """By how many bytes an element of some parameters has fewer states than `data_bytes` says, by compute dtype and
        FQN."""
        return {
            dtype: {name: data.states - count.nbytes(data.master or data.compute) for name, count in self.other_states}
            for dtype, data in self.data_bytes.items()
        }

    @property
    def has_one_backward(self) -> bool:
        """Whether every gradient is complete when its backward has made it."""
        return self.num_backwards == 1 and not self.accumulates

    def allowed(self, timing: UpdateTiming) -> UpdateTiming:
        """The same, or what comes next to it: gradients that are still to be added to cannot be used yet."""
        if timing is UpdateTiming.INSIDE_BACKWARD and not self.has_one_backward:
            return UpdateTiming.BEHIND_FORWARD
        return timing

    def without_masters(self) -> TrainingRegime:
        """The same where parameters in 16 bits are updated themselves (precision "bf16-true")."""
        is_after = self.update_timing is UpdateTiming.AFTER_BACKWARD
        return replace(
            self,
            master_weights=False,
            can_reuse_compute_shard=False,
            needs_global_norm=False,
            update_timing=UpdateTiming.AFTER_BACKWARD if is_after else UpdateTiming.BEHIND_FORWARD,
        )

    def is_in_step(self, members: Iterable[Member]) -> bool:
        """Whether any of these is updated within the step, whatever the timing."""
        return bool(self.in_step) and any(member.fqn in self.in_step for member in members)

    # The ways in which updates may run

    @property
    def can_speculate(self) -> bool:
        """Whether spare states would let updates begin earlier."""
        return self.needs_global_norm and self.allowed(self.update_timing) is UpdateTiming.INSIDE_BACKWARD

    @property
    def can_reuse(self) -> bool:
        """Whether gradients may land in compute shards."""
        return self.can_reuse_compute_shard and self.has_one_backward

    def waiting(self) -> UpdateMode:
        """As early as updates may run that cannot be taken back."""
        is_early = not self.can_speculate
        return UpdateMode(self.allowed(self.update_timing) if is_early else UpdateTiming.BEHIND_FORWARD)

    def speculating(self) -> UpdateMode:
        """Inside backward, for the chunks that get spare states."""
        return UpdateMode(UpdateTiming.INSIDE_BACKWARD)

    def reusing(self) -> UpdateMode:
        """With gradients in compute shards; those must stay as they are while backward runs."""
        timing = self.waiting().timing
        if timing is UpdateTiming.INSIDE_BACKWARD:
            timing = UpdateTiming.BEHIND_FORWARD
        return UpdateMode(timing, grad_reuses_compute_shard=True)
