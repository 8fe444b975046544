"""What is done to one chunk in a step: its update described, by the way that its case has, and its values delivered."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lightning_elixir.optim.execution import ChunkUpdate
from lightning_elixir.optim.updates import FlatUpdate
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.chunk_optimizers import ChunkOptimizers
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.stepping.cases import Case, Delivery, Params, Start, Values, Way, way_of
from lightning_elixir.stepping.gradients import StepGradients
from lightning_elixir.stepping.targets import grads_of, params_of, target_of


class UpdateDescriber:
    """Turns ways into updates over the tensors of a chunk's shard. Runs none of them.

    Args:
        engine: Has the shards.
        states: Their optimizers.
        gradients: What the step does to gradients.
    """

    def __init__(self, engine: Engine, states: ChunkOptimizers, gradients: StepGradients) -> None:
        self._engine = engine
        self._states = states
        self._gradients = gradients

    def way(self, chunk: Chunk, members: set[int], start: Start) -> Way | None:
        """How these members would be updated if that began now: see `way_of`."""
        target = target_of(self._engine, chunk)
        case = Case(
            start,
            grads_of(self._engine, chunk, target),
            params_of(self._engine, chunk, target),
            chunk.spec.is_update_streamed,
            is_whole=all(s.member_index in members for s in self._states.segments[chunk.id])
            and not self._engine.steps.is_shared(chunk.id, self._states.members[chunk.id]),
        )
        return way_of(case)

    # Descriptions

    def next_update(self, chunk: Chunk, members: set[int], way: Way) -> ChunkUpdate:
        """One more step of a chunk with states on the host or on a disk, which counts from now on."""
        shard, inner = self._engine.store[chunk.id], self._states.inner[chunk.id]
        compute = None if way.values is Values.MASTER else self._memory(chunk, way.values)
        updates = self._counted(chunk, members, compute, way.values is Values.DEVICE_PARAMS)
        on_disk = inner.take_on_disk(members)
        if on_disk is not None and shard.grad is not None and shard.is_param_on_disk:
            is_whole = sum(update.used_numel for update in updates) == on_disk.states.spec.numel
            on_disk = replace(on_disk, grad_dtype=shard.grad.dtype, is_whole=is_whole)
        return ChunkUpdate(updates, chunk.spec.is_update_streamed, on_disk=on_disk)

    def near(self, chunk: Chunk, members: set[int]) -> list[FlatUpdate]:
        """One more step of a chunk with states on the device, which counts from now on."""
        target = target_of(self._engine, chunk)
        return self._counted(chunk, members, target, params_of(self._engine, chunk, target) is Params.DEVICE)

    def ahead(self, chunk: Chunk, members: set[int]) -> list[FlatUpdate]:
        """The chunk's next step into its spares, as it would be now; nothing is counted."""
        shard = self._engine.store[chunk.id]
        if shard.grad is None:
            return []
        return self._states.inner[chunk.id].describe(
            shard.grad,
            members,
            self._states.groups,
            self._gradients.change,
            compute=shard.spare_param,
            apart=shard.spare_master,
        )

    def _counted(self, chunk: Chunk, members: set[int], compute: Tensor | None, is_on_device: bool) -> list[FlatUpdate]:
        """One more step of a chunk, which counts from now on.

        Args:
            compute: Receives the values in the compute dtype.
            is_on_device: Whether that is on the compute device.
        """
        inner, grad = self._states.inner[chunk.id], self._engine.store[chunk.id].grad
        if grad is None:
            return []
        inner.start_states(members)
        updates = inner.describe(
            grad,
            members,
            self._states.groups,
            self._gradients.change,
            compute=compute,
            is_compute_on_device=is_on_device,
        )
        inner.count_step(members)
        return updates

    # In the step

    def take_up_spares(self, chunk: Chunk) -> None:
        """The update into spare states counts: these and the ones in use change roles."""
        shard, inner = self._engine.store[chunk.id], self._states.inner[chunk.id]
        new = shard.spare_master
        if new is None or shard.spare_param is None:
            raise RuntimeError(f"the spare states of {chunk.spec} are gone, though its update has begun there")
        shard.master, shard.spare_master = new, shard.master
        inner.exchange(new)
        inner.count_step(self._states.members[chunk.id])

    def delivered(self, job: ChunkUpdate, chunk: Chunk, members: set[int], way: Way) -> ChunkUpdate:
        """An update that also brings its new values to the parameters: by copies, or by memory that changes roles,
        which it does at once.

        Args:
            job: What is left to do of the update: nothing, if that has begun before.
            members: Those that it is of.
        """
        shard = self._engine.store[chunk.id]
        shard.is_param_overwritten = False
        if way.delivery is Delivery.NONE:
            return job
        if way.delivery is Delivery.EXCHANGE:
            if way.values is Values.SPARE:
                shard.param, shard.spare_param = shard.spare_param, shard.param
            else:
                shard.param, shard.grad_buffer = shard.grad, shard.param
            return job
        memory, target = self._memory(chunk, way.values), target_of(self._engine, chunk)
        if memory is None or target is None:
            raise RuntimeError(f"new values of {chunk.spec} have no memory")
        if way.delivery is Delivery.CAST:
            return replace(job, cast=(memory, target))
        spans = self._states.inner[chunk.id].spans(members)
        return replace(job, uploads=[(memory[span], target[span]) for span in spans])

    def _memory(self, chunk: Chunk, values: Values) -> Tensor | None:
        """Where new values are to be found, 1-D, `[numel of the shard]`."""
        shard = self._engine.store[chunk.id]
        match values:
            case Values.GRADS:
                return shard.grad
            case Values.SPARE:
                return shard.spare_param
            case Values.MASTER:
                return shard.master
            case Values.PARAMS | Values.DEVICE_PARAMS:
                return target_of(self._engine, chunk)
