"""Steps of torch's own optimizers over shards, each where it is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_elixir.errors import StateError
from lightning_elixir.optim.execution import UpdateRecord, UpdateRunner
from lightning_elixir.optim.gradient_change import GradientChange
from lightning_elixir.plan.types import Tier
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.chunk_optimizers import ChunkOptimizers
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.stepping.targets import target_of


class TorchSteps:
    """Runs torch's own code, which updates when it is called: nothing begins early, or goes on behind the step.

    Args:
        engine: Has the shards.
        states: Their optimizers.
        runner: Sends new values to the parameters.
    """

    def __init__(self, engine: Engine, states: ChunkOptimizers, runner: UpdateRunner) -> None:
        self._engine = engine
        self._states = states
        self._runner = runner
        self._scratches: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def allocate(self) -> None:
        """Reserve memory for the states of all chunks: they are made by a first step, which may be special."""
        for chunk_id, inner in self._states.inner.items():
            inner.reserve_states()
            if self._engine.chunks[chunk_id].dtype != inner.work.dtype:
                self._scratch(inner.work, inner.work.dtype)  # gradients are cast there

    def run(self, chunks: Sequence[Chunk], used: Mapping[int, set[int]], change: GradientChange) -> UpdateRecord:
        """Update what is used.

        Args:
            chunks: Those with gradients.
            used: Members to update, by chunk id.
            change: What is done to gradients first.
        """
        engine, record = self._engine, UpdateRecord()
        for chunk in chunks:
            engine.reducer.landing.wait(chunk.id)
        engine.device.compute_event().synchronize()  # backward may still read host shards
        for chunk in chunks:
            if chunk.ready is not None:  # and so may an upload that nothing needed
                chunk.ready.synchronize()
        for chunk in chunks:
            inner, members = self._states.inner[chunk.id], used[chunk.id]
            shard = engine.store.settle(chunk.id)  # of another optimizer's update
            grad, target = shard.grad, target_of(engine, chunk)
            if grad is None:
                continue
            begin_s = time.perf_counter()
            self._update_chunk(chunk, members, grad, target, change)
            numel = sum(p.numel for p in inner.places if p.member_index in members)
            if chunk.spec.optim_tier is Tier.CPU:
                record.note_adam(begin_s, time.perf_counter())
                record.cpu_numel += numel
            else:
                record.gpu_numel += numel
        self._finish()
        engine.device.compute_event().synchronize()  # what has gone down to host memory is there
        has_grad = [any(members) for members in self._grouped(used)]
        self._states.maker.advance(self._states.groups, has_grad)
        record.note_end()
        return record

    def _update_chunk(
        self, chunk: Chunk, members: set[int], grad: Tensor, target: Tensor | None, change: GradientChange
    ) -> None:
        """Update what is used, and bring new values to the parameters.

        Args:
            target: From `target_of`.
        """
        inner = self._states.inner[chunk.id]
        inner.step(self._ready_grad(grad, inner.work.dtype, change), members, self._states.groups)
        if target is not None:
            self._runner.write_back(inner.work, target)

    def _finish(self) -> None:
        """Wait for what goes on beside the compute stream."""

    def _grouped(self, used: Mapping[int, set[int]]) -> list[list[bool]]:
        """Of each group, whether its parameters are used."""
        chunks = self._engine.chunks
        ids = {id(chunks[chunk_id].parameters[index]) for chunk_id, indices in used.items() for index in indices}
        return [[id(p) in ids for p in group["params"]] for group in self._states.groups]

    def set_mode(self, mode: str) -> dict[int, set[int]]:
        """Call `train()` or `eval()` of an optimizer that has these, over all segments and in the user's groups.

        Args:
            mode: "train" or "eval".

        Returns:
            Members whose values may have changed, by chunk id; the same on every rank.

        Raises:
            StateError: Gradients have taken the place of parameters.
        """
        engine, states = self._engine, self._states
        if any(engine.store[chunk_id].is_param_overwritten for chunk_id in states.inner):
            raise StateError(
                f"{mode}() of the optimizer changes parameters: call it before backward, or after the step"
            )
        before = [dict(group) for group in states.groups]
        if not states.maker.advance(states.groups, [False] * len(before), mode):
            return {}
        for chunk_id, inner in states.inner.items():
            chunk = engine.chunks[chunk_id]
            engine.store.settle(chunk_id)
            chunk.wait_ready()
            inner.set_mode(mode, before)
            target = target_of(engine, chunk)
            if target is not None:
                self._runner.write_back(inner.work, target)
        return {chunk_id: set(members) for chunk_id, members in states.members.items() if members}

    def _ready_grad(self, grad: Tensor, dtype: torch.dtype, change: GradientChange) -> Tensor:
        """The gradient as the optimizer takes it: unscaled, clipped and in its dtype; may be scratch memory."""
        if not change.is_nothing and grad.dtype.itemsize < 4:
            grad = self._scratch(grad, torch.float32).copy_(grad)  # factors apply before rounding
        changed = change.applied(grad)
        if changed.dtype == dtype:
            return changed
        return self._scratch(changed, dtype).copy_(changed)

    def _scratch(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Reused memory on `like`'s device: fresh host memory costs more to touch than the arithmetic on it."""
        key = (like.device, dtype)
        held = self._scratches.get(key)
        if held is None or held.numel() < like.numel():
            held = self._scratches[key] = torch.empty(like.numel(), dtype=dtype, device=like.device)
        return held[: like.numel()]
