"""A training step that the device has no memory for runs once more, as if it had not run before.

[Note: a step that runs twice] Forward and backward are functions of the batch, the parameters, the random generators
(also those that modules have as attributes) and the running statistics. Parameters do not change in them, the other two
are put back, and so the second run gives the bits of an undisturbed first one. What cannot be put back stops the run
with an error instead: gradients of earlier micro-batches that a failed backward has mixed with its own, a batch that
came from an iterator, and buffers that the model itself has changed. Values given to `self.log` are counted once; only
what the user's code counts by itself sees the batch twice.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_elixir.core.random_states import (
    capture_random_states,
    generators_of,
    restore_random_states,
    state_of,
)
from lightning_elixir.errors import CapacityError, StateError
from lightning_elixir.plan.units import format_bytes
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.runtime.released import tensors_in

log = logging.getLogger(__name__)


def memory_shortage(error: BaseException) -> str | None:
    """What a failed allocation of device memory says: how much was asked for, and how much torch had; None for any
    other error."""
    for candidate in (error, error.__cause__):
        message = str(candidate)
        if isinstance(candidate, torch.OutOfMemoryError) or "CUBLAS_STATUS_ALLOC_FAILED" in message:
            sentences = message.split(". ")
            told = [s for i, s in enumerate(sentences) if i < 2 or "allocated by PyTorch" in s]
            return ". ".join(told).strip() or type(candidate).__name__
    return None


@dataclass(frozen=True)
class _Before:
    """What a step may change beside gradients, as it was before."""

    random_states: dict[str, Any]
    generators: list[Callable[[], object]]
    """Put back the states of those that modules have of their own."""
    statistics: list[Tensor]
    versions: list[tuple[str, int, int]]
    logged: dict[str, dict[str, Any]]
    metric_counts: list[int]
    forward: Any


class RepeatableStep:
    """Runs forwards and backwards of automatic optimization, and once more if memory runs out; a last time if the plan
    can leave more.

    Args:
        module: The LightningModule.
        engine: That holds its parameters.
        logged: What `self.log` keeps: name -> metric.
        replan: Has the engine move to a plan that leaves more than the one in force; returns whether there is one.
        may_fuse: Whether fused operators were not asked for, and could be.
    """

    def __init__(
        self,
        module: nn.Module,
        engine: Engine,
        logged: Callable[[], dict[str, nn.Module]],
        replan: Callable[[], bool],
        *,
        may_fuse: bool,
    ) -> None:
        from torchmetrics import Metric

        self._module = module
        self.engine = engine
        self._logged = logged
        self._replan = replan
        self._may_fuse = may_fuse
        self._device = engine.device.torch_device
        modules = [(name, m) for name, m in module.named_modules() if not isinstance(m, Metric)]
        self._with_statistics = [m for _, m in modules if getattr(m, "track_running_stats", False)]
        others = [(name, m) for name, m in modules if not getattr(m, "track_running_stats", False)]
        self._with_buffers = [(name, m) for name, m in others if m._buffers]
        self._metrics = [m for m in module.modules() if isinstance(m, Metric)]
        self._generators = generators_of(module.modules())
        self._kept: list[Tensor] = []
        self._before: _Before | None = None
        self._forward: Callable[[], Any] | None = None
        self._output: Any = None
        self._is_batch_used_up = False
        self._num_repeats = 0
        self._is_plan_to_go = False

    def before_batch(self) -> None:
        """A batch begins. Where memory has run out while updates were under way, which a step had to end, the plan goes
        now, or the next step would run twice as well."""
        if self._is_plan_to_go and not self.engine.reducer.used:
            self._is_plan_to_go = False
            self._replan()

    def forward(self, forward: Callable[[], Any], batch: Sequence[Any]) -> Any:
        """Run the training step.

        Args:
            forward: Runs it, and can be called twice.
            batch: Its arguments.

        Raises:
            CapacityError: There is not enough memory, in another run either, or there can be no other run.
        """
        self._num_repeats = 0
        self._forward = forward
        self._is_batch_used_up = any(isinstance(value, Iterator) for value in batch)
        self._before = self._capture() if self.engine.comm.world_size == 1 else None
        self._output = self._run_forward(forward)
        return self._output

    def forget(self) -> None:
        """There will be no backward: let go of the batch and of what the step returned."""
        self._forward = self._output = self._before = None

    def _run_forward(self, forward: Callable[[], Any]) -> Any:
        while True:
            try:
                return forward()
            except Exception as error:
                shortage = memory_shortage(error)
                if shortage is None:
                    raise
            # Not inside the except clause: the error holds the frames of the failed run, and these its activations.
            self._make_ready("forward", shortage)

    def backward(
        self, loss: Tensor, backward: Callable[[Tensor], Tensor], loss_of: Callable[[Any], Tensor | None]
    ) -> Tensor:
        """Run the backward of a loss that `forward` led to.

        Args:
            loss: 0-dim. Is detached if it has to be computed again.
            backward: Runs the backward of such a loss, and returns it.
            loss_of: Makes the loss from what the training step returns.

        Raises:
            CapacityError: As above; or gradients of earlier micro-batches are lost.
        """
        while True:
            output, self._output = self._output, None
            try:
                return backward(loss)
            except Exception as error:
                shortage = memory_shortage(error)
                if shortage is None:
                    raise
            if self.engine.has_lost_gradients:
                raise CapacityError(
                    f"the device ran out of memory in a backward ({shortage}), and the gradients of earlier"
                    f" micro-batches cannot be told from those of this one any more: {self._cure}"
                )
            self._make_ready("backward", shortage)
            # Lightning holds the loss and what came with it, and these the failed run's activations.
            for tensor in (loss, *tensors_in((output,))):
                with suppress(RuntimeError):  # a view cannot be detached in place
                    tensor.detach_()
            del output, tensor
            loss = self._loss_again(loss_of)

    def _loss_again(self, loss_of: Callable[[Any], Tensor | None]) -> Tensor:
        if self._forward is None:
            raise StateError("backward came before a training step")
        logged = self._take_logged()  # all of it: the training step had come to its end
        with self._as_training_step():
            self._output = self._run_forward(self._forward)
            loss = loss_of(self._output)
        self._restore_logged(logged)
        if loss is None:
            raise StateError("the training step returned a loss, and none when it was run again")
        return loss

    # What a run changes

    def _capture(self) -> _Before:
        statistics = [b for m in self._with_statistics for b in m._buffers.values() if b is not None]
        _copy_all(statistics, self._kept)
        return _Before(
            capture_random_states(self._device),
            [state_of(generator) for generator in self._generators],
            statistics,
            self._versions(),
            self._take_logged(),
            [m.update_count for m in self._metrics],
            self._module.forward,
        )

    def _versions(self) -> list[tuple[str, int, int]]:
        """Identity and version of every other buffer: tell whether it was written to."""
        return [
            (f"{prefix}.{name}" if prefix else name, id(buffer), buffer._version)
            for prefix, module in self._with_buffers
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]

    def _take_logged(self) -> dict[str, dict[str, Any]]:
        # Logging replaces the tensors in there, it does not write to them.
        return {name: vars(metric).copy() for name, metric in self._logged().items()}

    def _restore_logged(self, states: Mapping[str, dict[str, Any]]) -> None:
        logged = self._logged()
        for name in list(logged):
            if name in states:
                vars(logged[name]).update(states[name])
            else:
                del logged[name]

    # The second run

    def _make_ready(self, phase: str, shortage: str) -> None:
        """Make room, and put back what the failed run has changed.

        Raises:
            CapacityError: The step cannot be run again, or there is no more room to make.
        """
        before = self._before
        if before is None:
            raise CapacityError(
                f"rank {self.engine.comm.rank} ran out of device memory in {phase} ({shortage}). With several ranks a"
                f" step cannot be repeated: {self._cure}"
            )
        why = self._why_not(before)
        if why:
            raise CapacityError(
                f"the device ran out of memory in {phase} ({shortage}), and the step cannot be repeated since {why}:"
                f" {self._cure}"
            )
        held = self.engine.device_bytes()
        gc.collect()  # the failed run's activations, where they sit in cycles
        if not self._make_room():
            raise self._refusal(phase, shortage)
        self._num_repeats += 1
        counted = [m for m, count in zip(self._metrics, before.metric_counts, strict=True) if m.update_count != count]
        log.warning(
            "the device ran out of memory in %s (%s): gave back %s of what the chunks took there, and run the batch"
            " again, with the same result. To avoid this, %s.%s",
            phase,
            shortage,
            format_bytes(max(held - self.engine.device_bytes(), 0)),
            self._cure,
            f" {', '.join(type(m).__name__ for m in counted)} will have seen the batch twice" if counted else "",
        )
        self._put_back(before, is_forward=phase == "forward")

    def _why_not(self, before: _Before) -> str:
        """What keeps the step from being repeated."""
        if self._is_batch_used_up:
            return "training_step takes its batches from an iterator"
        changed = sorted({name for name, *_ in set(before.versions) ^ set(self._versions())})
        return f"it has changed buffers of the model already ({', '.join(changed[:3])})" if changed else ""

    def _make_room(self) -> bool:
        """The first time, the rCache gives what it can; if that is nothing, or not enough, the plan goes, or after the
        step, where there are gradients that it would leave behind."""
        engine = self.engine
        if self._num_repeats == 0:
            has_room = engine.make_room() and not engine.wanted_non_model_bytes
            if not has_room and engine.reducer.used:
                self._is_plan_to_go = True
            elif not has_room:
                self._replan()
            return True  # the failed run's memory is in one piece again, if nothing else
        return not engine.reducer.used and self._replan()

    def _put_back(self, before: _Before, *, is_forward: bool) -> None:
        restore_random_states(before.random_states, self._device)
        for put_back in before.generators:
            put_back()
        with torch.no_grad():
            for buffer, kept in zip(before.statistics, self._kept, strict=True):
                buffer.copy_(kept)
        if is_forward:
            self._restore_logged(before.logged)
        self._module.forward = before.forward  # Lightning sets it for a moment when a step starts

    @property
    def _cure(self) -> str:
        """What is left to do where memory is short."""
        ways = [
            "lower gpu_memory_limit, so that the plan leaves more to activations",
            "take a smaller batch or shorter sequences",
            self.engine.activations.cure() if torch.is_grad_enabled() else "",  # evaluation saves nothing
            "give use_fused_kernels=True if this is a language model of transformers" if self._may_fuse else "",
            "use a GPU with more memory",
        ]
        *first, last = filter(None, ways)
        return f"{', '.join(first)}, or {last}"

    def _refusal(self, phase: str, shortage: str) -> CapacityError:
        plan = self.engine.plan
        return CapacityError(
            f"the device ran out of memory in {phase} again ({shortage}), with {plan.rcache_blocks} blocks of"
            f" {format_bytes(plan.block_bytes)} in the rCache and {format_bytes(self.engine.device_bytes())} of chunks"
            f" on the device in all: {self._cure}"
        )

    @contextmanager
    def _as_training_step(self) -> Iterator[None]:
        """Lightning allows `self.log` by the name of the hook that runs."""
        name = self._module._current_fx_name
        self._module._current_fx_name = "training_step"  # type: ignore[assignment]
        try:
            yield
        finally:
            self._module._current_fx_name = name


def _copy_all(sources: Sequence[Tensor], targets: list[Tensor]) -> None:
    """Keep the values of `sources` in `targets`, which is filled where it does not fit."""
    if [(t.shape, t.dtype, t.device) for t in targets] != [(s.shape, s.dtype, s.device) for s in sources]:
        with torch.inference_mode(False):  # a fit's validation, which has no such mode, writes to what validate() left
            targets[:] = [source.detach().clone() for source in sources]
        return
    with torch.no_grad():
        for dtype in {source.dtype for source in sources}:
            pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if s.dtype is dtype]
            torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs])
