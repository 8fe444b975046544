"""Iterations: what one trace describes, recorded, measured and watched over.

The forwards and the backwards up to the next forward or step are one ("train"), and so is one forward without gradients
("eval"). The first iteration of a kind is recorded; from the second on its trace tells what comes next. An iteration
that departs from it is correct all the same, and the next one is recorded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from lightning_elixir.core.device import Device, release_cached_memory
from lightning_elixir.plan.types import AccessTrace, Acquire
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.growth import Growth
from lightning_elixir.runtime.sampling import StepSampler
from lightning_elixir.runtime.traces import Traces

if TYPE_CHECKING:
    from lightning_elixir.runtime.active_plan import ActivePlan


class Iterations:
    """Sees every access of forward and backward, on its way to the replicas.

    Args:
        device: Counts bytes and gives marks.
        chunks: By id.
        engine_bytes: Device bytes that the engine takes now.
    """

    def __init__(self, device: Device, chunks: Sequence[Chunk], engine_bytes: Callable[[], int]) -> None:
        self._device = device
        self._chunks = chunks
        self._engine_bytes = engine_bytes
        self.traces = Traces()
        self.sampler = StepSampler(device, self._bytes_in_step)
        self.growth = Growth(device)
        self.has_backward = False
        """Whether the open iteration has come to a backward."""
        self._fixed_bytes = 0  # what chunks, shards and states take that neither forward nor backward changes
        self._grad_bytes_before = 0  # on the device when the open iteration began
        self.is_watching = False
        """Whether something is to be done at every access beside bringing the chunks."""

    def adopt(self, active: ActivePlan, grad_itemsize: int | None) -> None:
        """Go on with a new plan; no iteration is open.

        Args:
            grad_itemsize: Bytes of an element of the gradient shards; None: as in the compute dtype.
        """
        self._has_rcache = not active.plan.is_all_resident
        self._rcache = active.rcache
        self._residency = active.residency
        self._reducer = active.reducer
        self._store = active.store
        self.growth.adopt(active.plan, active.rcache, grad_itemsize)

    def outdate(self) -> None:
        """Iterations are going to have other accesses than those that are known, or to keep other activations."""
        self.traces.outdate()
        self.growth.outdate()

    # From one iteration to the next

    @property
    def is_open(self) -> bool:
        return self.traces.kind is not None

    @property
    def is_evaluation(self) -> bool:
        return self.traces.kind == "eval"

    def begin(self, *, is_training: bool) -> None:
        """A forward, or a backward without one, begins: in the open iteration or a new one."""
        self._residency.forget_common()
        kind = self.traces.kind
        if kind is not None and (self.has_backward or kind != "train"):
            self.end()
        if self.is_open:
            return
        self.has_backward = False
        misses = self._rcache.counters.misses_of_trace
        if not is_training:
            self.sampler.note_evaluation()
            self._rcache.begin(self.traces.begin("eval", misses))
        else:
            has_memory = self.sampler.has_memory or self.growth.wants_sample
            self._rcache.begin(self.traces.begin("train", misses, record=has_memory))
            if self.sampler.is_on or has_memory:
                self._count_fixed_bytes()
                self.sampler.begin(memory=has_memory, has_accesses=self._has_rcache)
            self._grad_bytes_before = self._store.grad_bytes_on_device()
            self.growth.begin(self._engine_bytes, bool(self._reducer.used))
        self._update()

    def end_forward(self) -> None:
        if self.is_evaluation:
            self.end()
        else:
            self._rcache.end_repeats()  # of a backward inside it: users may read what was saved until the next one
            self.sampler.note_end()

    def begin_backward(self) -> None:
        self._residency.forget_common()
        if not self.is_open:
            self.begin(is_training=True)
        self.has_backward = True
        self.sampler.begin_backward()

    def end_backward(self, unfinished: Iterable[int]) -> None:
        """Backward is over but for the reduction of what is left.

        Args:
            unfinished: Chunks of which only now is known that they get no more gradients.
        """
        self.sampler.grads_complete(unfinished, is_at_end=True)
        self.sampler.end_backward()
        self.growth.end_backward(self._taken_bytes())

    def end(self) -> None:
        """A step, or the forward of another iteration, comes next."""
        self._residency.forget_common()
        kind = self.traces.kind
        if kind is None:
            return
        trace: AccessTrace | None = None
        if self._has_rcache:
            trace = self.traces.end(self._rcache.counters.misses_of_trace)
            self._rcache.begin(None)
        else:  # nothing is ever acquired
            self.traces.abandon()
        self.has_backward = False
        if kind == "train":
            memory = self.sampler.finish(trace)
            if memory is not None and trace is not None and self._has_rcache:
                self.growth.learn(memory, trace)
            if self.growth.end():
                # Now that activations are gone: segments that larger ones have left would not go while smaller ones
                # lie in them, and there would be no room for the replicas.
                release_cached_memory(self._device.torch_device)
        self._update()

    def abandon(self) -> None:
        """The open iteration was interrupted by an error."""
        self.traces.abandon()
        self.sampler.abandon()
        self.growth.abandon()
        self.has_backward = False
        self._residency.settle()
        self._update()

    # Accesses

    def acquire(self, ids: tuple[int, ...], pin: bool) -> None:
        """Bring chunks that forward or backward needs, each once; where `is_watching` is not, and `RCache.serve` has
        told that there is nothing to do, this need not be called."""
        if self._rcache.is_at_stop():
            self._look_at_growth(ids)
        if not self.is_watching:
            self._residency.acquire(ids, pin, None, True)
            return
        if not self.sampler.is_on:
            self._acquire(ids, pin)
            return
        self.sampler.before_access()
        has_waited = self._acquire(ids, pin)
        for chunk_id in ids:
            chunk = self._chunks[chunk_id]
            has_waited |= chunk.ready is not None
            chunk.wait_ready()
        self.sampler.after_access(has_waited=has_waited)

    def _acquire(self, ids: tuple[int, ...], pin: bool) -> bool:
        held = None
        if self.traces.is_recording:
            held = self._residency.held()
            self.traces.record(Acquire(ids, pin, tuple(held)))
        elif self._rcache.serve(ids, pin=pin):
            return False
        return self._residency.acquire(ids, pin, held, True)

    # Memory

    def watch(self, *, memory: bool | None = None, times: bool | None = None) -> None:
        """Turn the sampling of iterations on or off; None: as it is. To be called when no forward or backward runs."""
        if self.has_backward:
            self.end()
        if memory:
            self._count_fixed_bytes()
        self.sampler.watch(memory=memory, times=times)
        self._update()

    def relieve(self, needed: Collection[int]) -> bool:
        """There was no memory for a replica: give up all others that can go. Returns whether there were any."""
        self.growth.shortage()
        return self._make_way(needed) > 0

    def _look_at_growth(self, ids: Sequence[int]) -> None:
        if self.growth.look(self._rcache.position, self._taken_bytes()):
            self._make_way(ids)

    def _taken_bytes(self) -> int:
        """What gradients have taken since the iteration began."""
        return self._reducer.block_bytes_held() + self._store.grad_bytes_on_device() - self._grad_bytes_before

    def _make_way(self, needed: Collection[int]) -> int:
        """Evict what is above the budget, but for what is needed, and give its memory back. Returns the blocks."""
        num_blocks = self._residency.shrink(needed)
        self._device.give_back()
        return num_blocks

    def _count_fixed_bytes(self) -> None:
        self._fixed_bytes = 0
        self._fixed_bytes = self._engine_bytes() - self._bytes_in_step()

    def _bytes_in_step(self) -> int:
        """As `engine_bytes`, in a fraction of the time."""
        replicas = sum(c.device_bytes for c in self._chunks)
        return self._fixed_bytes + replicas + self._reducer.block_bytes_held() + self._store.grad_bytes_on_device()

    def _update(self) -> None:
        self.is_watching = self.traces.is_recording or self.sampler.is_on
        self._rcache.stop_at(self.growth.looks)
