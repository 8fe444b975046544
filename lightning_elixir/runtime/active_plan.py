"""The plan in force and what obeys it, made as a whole and exchanged as a whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from lightning_elixir.plan.memory import has_params_on_nvme, param_buffers
from lightning_elixir.plan.rcache import RCache
from lightning_elixir.plan.types import Plan, Tier, UpdateTiming
from lightning_elixir.runtime.agreement import Agreement
from lightning_elixir.runtime.fetcher import Fetcher
from lightning_elixir.runtime.param_reads import ParamReads
from lightning_elixir.runtime.reducer import Reducer
from lightning_elixir.runtime.residency import Residency
from lightning_elixir.runtime.transport import Transport
from lightning_elixir.storage.shards import ShardStore

if TYPE_CHECKING:
    from lightning_elixir.runtime.engine import Engine


def is_watching(plan: Plan) -> bool:
    """Whether a forward under a plan meets parameters that may not be there yet."""
    return not plan.is_all_resident or (
        plan.update_timing is not UpdateTiming.AFTER_BACKWARD
        and any(c.requires_grad and c.optim_tier is not Tier.GPU for c in plan.chunks)
    )


class ActivePlan:
    """One plan's rCache, transfers and reductions, over the engine's chunks.

    Args:
        engine: What it is for.
        plan: Its chunks and shards are in place.
        store: The shards.
        earlier: What was in force so far; ends here.
    """

    def __init__(self, engine: Engine, plan: Plan, store: ShardStore, earlier: ActivePlan | None = None) -> None:
        if earlier is not None:
            earlier.fetcher.close()
        self._phases = engine.phases
        self.plan: Plan = plan
        self.store: ShardStore = store
        self.rcache: RCache = RCache.of(plan, has_prefetch=engine.has_prefetch)
        self.cost = self.rcache.cost_blocks
        """Blocks of each chunk that comes and goes, by id."""
        self.needs_agreement = plan.mesh.copy_size > 1 and bool(self.cost)
        """Whether ranks gather chunks together while they compute."""
        self.is_watching = is_watching(plan)
        """Whether a forward meets parameters that may not be there yet."""
        self.agreement = Agreement(engine.comm, self, plan.mesh)
        on_nvme = (c.nbytes // plan.num_sharing(c) for c in plan.chunks if has_params_on_nvme(c))
        reads = ParamReads(engine.device, *param_buffers(on_nvme))
        transport = Transport(engine.device, engine.groups, store, plan.is_storage_distributed, engine.moved)
        self.fetcher: Fetcher = Fetcher(transport, reads)
        self.residency: Residency = Residency(
            plan,
            engine.chunks,
            self.rcache,
            self.fetcher,
            engine.interception,
            self.agreement if self.needs_agreement else None,
            engine.writes.touched,
            engine.iterations.relieve,
        )
        trainable = [c.id for c in reversed(plan.all_chunks) if c.requires_grad]
        self.reducer: Reducer = Reducer(
            transport,
            engine.chunks,
            earlier.reducer.order if earlier is not None and earlier.reducer.is_order_known else trainable,
            engine.reduce_dtype,
            plan.block_bytes,
            self.agreement.announce_ready,
            engine.iterations.sampler.waiting,
        )
        if earlier is not None:
            self.reducer.take_over(earlier.reducer)

    # What `Agreement` calls on a rank

    @property
    def is_computing(self) -> bool:
        """Whether a forward or a backward runs."""
        return self._phases.is_computing

    @property
    def num_ready(self) -> int:
        """How many chunks, in the common order, this rank could reduce."""
        return self.reducer.num_ready

    def join(self, ids: Sequence[int], mine: Collection[int]) -> None:
        """Take part in the gathering of `ids`, in this order, keeping those in `mine`."""
        if not self.is_computing:  # else it was done when the forward or the backward began
            # A rank that has let a chunk go has absorbed its own slice then; here it may have stayed.
            self.residency.absorb(i for i in ids if i not in mine and not self.reducer.has_begun(i))
        self.residency.join(ids, mine)

    def reduce_until(self, count: int) -> None:
        """Reduce, in the common order, up to that many chunks."""
        self.reducer.issue_until(count)
