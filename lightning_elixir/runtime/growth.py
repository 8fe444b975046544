"""Room for activations that have outgrown the plan: the rCache gives way.

[Note: growth] A plan divides the device's memory by what one step was seen to take. Later steps may take more: longer
sequences, larger batches. At a few accesses of every step the engine compares what is in use beside replicas with what
the sampled step had in use there, predicts from the ratio how high this step will rise, and lowers the budget of the
rCache if that would not fit, long before the peak. Blocks above the budget are evicted at once and their memory is
given back to the device, or it would stay with the pool that replicas come from. After some steps that would have
allowed it, the budget grows again. Every rank does this by itself: fetches are agreed, whatever each rank keeps.

Bytes that have merely moved between the beginning of a step and its course (workspaces of cuBLAS) count as no growth.
Evicted blocks alone help nothing: free blocks of a live `MemPool` stay with it, whatever `empty_cache` is told (seen on
torch 2.11), and other allocations fail beside them. So the pool is dropped, which frees what is unused in it; blocks in
use follow when they are freed and an allocation needs them. When the budget grows again, cached segments are given back
first, while no activations lie in them: large segments with small tensors in them left no room for replicas (seen).

Where memory runs out all the same, a replica that finds none takes the place of all others that can go; any other
failure is the caller's, which may call `Engine.make_room()` between regions and run the batch again. For that, a fetch
that fails leaves its chunk released and absent from the rCache, and a backward that fails leaves the gradients of
earlier ones alone, unless some of its own were added to them: then all are dropped, and `step` raises until
`zero_grad`. After a shortage the rCache has what the trace needs at least until the batch is over, and then half of
what it gave back: mostly little is lacking, and the smallest rCache costs a third of the speed (seen: 1.37 for 0.97 s).
So it stays for 16 steps, after the next shortage for 32, and so on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping

from lightning_elixir.core.device import Device
from lightning_elixir.plan.growth_estimate import GrowthModel, StepMemory, needed_blocks, outgrowth
from lightning_elixir.plan.memory import has_grad_block, num_grad_blocks
from lightning_elixir.plan.rcache import RCache
from lightning_elixir.plan.types import DTYPE_BYTES, AccessTrace, Plan, Tier
from lightning_elixir.plan.units import format_bytes

log = logging.getLogger(__name__)

# Steps that must have allowed a larger rCache before it grows. Lengths change from step to step, and giving memory back
# and taking it again costs milliseconds.
_STEPS_TO_GROW = 4
# After memory ran out in spite of all this the rCache stays smaller for so many steps, and twice as many every time.
_STEPS_AFTER_SHORTAGE = 16
# Less than this is no growth.
_TOLERANCE = 1.03
# Of what a step takes, left free: activations are carved out of larger segments.
_RESERVE = 0.1


class Growth:
    """The rCache's budget, step by step.

    Args:
        device: Counts the bytes in use.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.limit_bytes = device.usable_bytes()
        """Device memory that everything together may take; None: the budget never changes."""
        self.looks: Mapping[int, int] = {}
        """Accesses of the open iteration at which `look` is to be called."""
        self.wanted_non_model_bytes = 0
        """What a step was predicted to take beside the chunks at its peak, where even the smallest rCache left too
        little for it; 0: it never did since the plan was adopted."""
        self.peak_non_model_bytes_seen = 0
        """What a step has taken beside the chunks at its peak: at least so much, as far as that is known without
        sampling it."""
        self._sample: StepMemory | None = None
        self._trace = AccessTrace(())
        self._models: dict[bool, GrowthModel] = {}  # by whether gradients of earlier backwards are there already
        self._allowed: deque[int] = deque(maxlen=_STEPS_TO_GROW)
        self.num_shortages = 0
        """How often memory has run out in spite of all this."""
        self._hold_steps = 0
        self._hold_blocks = 0  # what the rCache may take in these
        # The open iteration
        self._is_open = False
        self._model: GrowthModel | None = None  # None: there is nothing to compare with, or to give way
        self._start_bytes = 0  # in use beside replicas when it began
        self._base_bytes = 0  # of these, not the engine's
        self._extra_bytes = 0  # beyond what the sampled step had in use at its beginning
        self._peak_before = 0
        self._budget_before = 0
        self._ratio = 1.0

    def adopt(self, plan: Plan, rcache: RCache, grad_itemsize: int | None) -> None:
        """Watch over a new plan's rCache.

        Args:
            grad_itemsize: Bytes of an element of the gradient shards; None: as in the compute dtype.
        """
        self._plan = plan
        self._rcache = rcache
        self._grad_itemsize = grad_itemsize
        self._cost = {c.id: plan.blocks_of(c.id) for c in plan.chunks if not c.is_persistent}
        self._models.clear()
        self._allowed.clear()
        self._hold_steps = 0
        self.wanted_non_model_bytes = 0
        self.abandon()

    @property
    def is_on(self) -> bool:
        return self.limit_bytes is not None and self._device.is_counting and bool(self._cost)

    @property
    def wants_sample(self) -> bool:
        """Whether nothing is known yet to compare steps with."""
        return self.is_on and self._sample is None

    @property
    def smallest_blocks(self) -> int:
        """The smallest budget that serves every access known, or any single chunk."""
        return max(needed_blocks(self._trace, self._cost), max(self._cost.values(), default=0))

    def learn(self, sample: StepMemory, trace: AccessTrace) -> None:
        """Compare with this step from now on."""
        self._sample, self._trace = sample, trace
        self._models.clear()
        self.peak_non_model_bytes_seen = max(self.peak_non_model_bytes_seen, sample.peak_bytes)

    def outdate(self) -> None:
        """Steps are going to have other accesses, or to take other memory between them, as where other chunks stay or
        blocks are recomputed: what the sampled one took tells nothing about them, and another is sampled."""
        self._sample = None
        self._models.clear()

    # An iteration, in the order of the calls

    def begin(self, engine_bytes: Callable[[], int], has_earlier_grads: bool) -> None:
        """A training iteration begins.

        Args:
            engine_bytes: Device bytes that the engine takes now.
            has_earlier_grads: Gradients of earlier backwards are there.
        """
        self.abandon()
        if self.limit_bytes is None or not self._device.is_counting:
            return
        self._is_open = True
        in_use = self._device.allocated_bytes()
        self._start_bytes = in_use - self._replica_bytes
        self._base_bytes = max(0, in_use - engine_bytes())
        self._peak_before = self._device.peak_bytes()
        self._budget_before = self._rcache.budget_blocks
        if self.is_on and self._sample is not None:
            self._model = self._model_of(has_earlier_grads)
            self.looks = self._model.looks

    def look(self, position: int, step_bytes: int) -> bool:
        """Compare at an access of `looks`, before anything is fetched for it. Returns whether the budget was lowered.

        Args:
            position: In the trace.
            step_bytes: What gradients have taken since the iteration began.
        """
        model = self._model
        if model is None:
            return False
        rise = self._device.allocated_bytes() - self._replica_bytes - step_bytes - self._start_bytes
        extra, ratio = outgrowth(self._base_bytes - model.base_bytes, rise, self.looks[position])
        if extra <= self._extra_bytes and ratio <= max(self._ratio, _TOLERANCE):
            return False
        self._extra_bytes = max(self._extra_bytes, extra)
        if ratio > _TOLERANCE:
            self._ratio = max(self._ratio, ratio)
        return self._lower()

    def end_backward(self, step_bytes: int) -> None:
        """The peak of the iteration is over.

        Args:
            step_bytes: As in `look`.
        """
        if not self._is_open:
            return
        risen = 0 if self._model is None else round(self._ratio * self._model.rise_bytes)
        peak = self._device.peak_bytes()
        if peak > self._peak_before:
            # At least so much: replicas and gradients may have taken less at that moment.
            blocks = max(self._budget_before, self._rcache.used_blocks) if self._cost else 0
            risen = max(risen, peak - self._start_bytes - blocks * self._plan.block_bytes - step_bytes)
        self.peak_non_model_bytes_seen = max(self.peak_non_model_bytes_seen, self._base_bytes + risen)

    def end(self) -> bool:
        """The iteration is over: the next one begins with what the last ones would have allowed. Returns whether the
        budget was raised."""
        if self._model is not None:
            self._allowed.append(self._allowed_blocks())
        budget = min((self._plan.rcache_blocks, *self._allowed))
        if self._hold_steps > 0:
            self._hold_steps -= 1
            budget = min(budget, max(self._hold_blocks, self._rcache.budget_blocks))
        self.abandon()
        if self._rcache.budget_blocks >= budget:
            return False
        log.info("the rCache may take %d blocks again, of %d planned", budget, self._plan.rcache_blocks)
        self._rcache.budget_blocks = budget
        return True

    def abandon(self) -> None:
        """There is no iteration under way."""
        self._is_open = False
        self._model = None
        self._ratio = 1.0
        self._extra_bytes = 0
        self.looks = {}

    def shortage(self) -> bool:
        """Memory has run out: lower the budget as far as it goes. Returns whether it went lower, and counts: where all
        chunks stay, it is of no use."""
        steps = min(_STEPS_AFTER_SHORTAGE << self.num_shortages, 1 << 16)
        self.num_shortages += 1
        self._hold_steps = steps
        smallest = min(self.smallest_blocks, self._rcache.budget_blocks)
        self._hold_blocks = (smallest + self._rcache.budget_blocks) // 2
        is_lower = bool(self._cost) and smallest < self._rcache.budget_blocks
        self._rcache.budget_blocks = smallest
        return is_lower

    # Internals

    @property
    def _replica_bytes(self) -> int:
        return self._rcache.used_blocks * self._plan.block_bytes

    def _lower(self) -> bool:
        """Take the budget down to what the open iteration allows."""
        allowed, smallest = self._allowed_blocks(), self.smallest_blocks
        model = self._model
        if allowed < smallest and model is not None:
            wanted = self._base_bytes + round(self._ratio * model.rise_bytes)
            self.wanted_non_model_bytes = max(self.wanted_non_model_bytes, wanted)
        budget = max(allowed, smallest)
        if budget >= self._rcache.budget_blocks:
            return False
        log.info(
            "this step takes %.2f times what the sampled one took at the same access, and %s beside: the rCache gives"
            " up %d of %d blocks of %s",
            self._ratio,
            format_bytes(self._extra_bytes),
            self._rcache.budget_blocks - budget,
            self._rcache.budget_blocks,
            format_bytes(self._plan.block_bytes),
        )
        self._rcache.budget_blocks = budget
        return True

    def _allowed_blocks(self) -> int:
        """Blocks that the open iteration leaves to replicas; all that were planned if it is as the sampled one."""
        plan, model, limit = self._plan, self._model, self.limit_bytes
        if model is None or limit is None:
            return plan.rcache_blocks
        expected = self._start_bytes - self._base_bytes + model.base_bytes + model.beside_bytes(1.0)
        # What the plan has left free is there to be used, but for a reserve that grows with the activations.
        free = limit - expected - plan.rcache_blocks * plan.block_bytes
        more = self._extra_bytes + model.beside_bytes(self._ratio) - model.beside_bytes(1.0)
        if more <= 0:
            return plan.rcache_blocks
        free -= min(max(free, 0), round(_RESERVE * model.rise_bytes))
        more += round(_RESERVE * (self._ratio - 1) * model.rise_bytes)
        lacking = more - max(free, 0)
        return plan.rcache_blocks - max(0, -(-lacking // plan.block_bytes))

    def _model_of(self, has_earlier_grads: bool) -> GrowthModel:
        model = self._models.get(has_earlier_grads)
        if model is None and self._sample is not None:
            grads = {i: self._grad_bytes(i, has_earlier_grads) for i, c in enumerate(self._plan.all_chunks)}
            plan, sample = self._plan, self._sample
            trained = [c for c in plan.chunks if c.requires_grad]
            gathered = [c for c in trained if has_earlier_grads or has_grad_block(c, plan.num_sharing(c))]
            largest = max((plan.blocks_of(c.id) for c in gathered), default=0)
            num_blocks = num_grad_blocks(gathered, plan.world_size, sample.arrivals)
            model = GrowthModel(sample, grads, num_blocks * largest * plan.block_bytes)
            self._models[has_earlier_grads] = model
        if model is None:
            raise ValueError("no step has been sampled")
        return model

    def _grad_bytes(self, chunk_id: int, has_earlier_grads: bool) -> int:
        """What the gradient shard of a chunk adds to the device in one backward."""
        plan = self._plan
        spec = plan.all_chunks[chunk_id]
        if spec.optim_tier is not Tier.GPU or not spec.requires_grad:
            return 0
        itemsize = self._grad_itemsize or DTYPE_BYTES[spec.dtype]
        numel = spec.numel // plan.num_sharing(spec)
        if has_earlier_grads:  # they become fp32 when more is added
            return numel * max(0, 4 - itemsize)
        return numel * itemsize
