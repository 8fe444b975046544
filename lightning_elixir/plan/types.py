"""The plan and what it is made from: pure data, standard library only."""

from __future__ import annotations

import enum
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from lightning_elixir.plan.activations import ModelBlock
from lightning_elixir.plan.mesh import AxisCut, Mesh, axes_of

SCHEMA = 7

# Every parameter starts on a multiple of this many elements inside its chunk, and every shard is a multiple
# of it, so that the fixed blocks over which the gradient norm is summed never cross a shard's border: the norm is
# then the same for every chunk size and placement.
ALIGN_NUMEL = 512

_RESIDENT_BYTES = 32 * 2**20

GPU_BYTE_KINDS = (
    "gpu_param_bytes",
    "gpu_state_bytes",
    "gpu_grad_bytes",
    "rcache_bytes",
    "gpu_stream_bytes",
    "non_model_bytes",
)
"""What the device's bytes are for: names of notes in a plan, and of fields of `MemoryUse`."""

TRAINED_DTYPES = ("float64", "float32", "bfloat16", "float16")
"""What parameters that train may have, and what is computed in."""

DTYPE_BYTES = {
    **{"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2},
    **{"int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "bool": 1},
    **{"float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1},
    **{"complex64": 8, "complex128": 16},
}
"""Bytes of an element of a chunk. Chunks of other dtypes than `TRAINED_DTYPES` are frozen, and keep theirs."""


class Tier(enum.Enum):
    """Where a shard lives."""

    GPU = "gpu"
    CPU = "cpu"
    NVME = "nvme"

    __hash__ = object.__hash__  # Enum's own, of the name, is slow; the search looks placements up by their tiers


class UpdateTiming(enum.Enum):
    """When updates by the host, and streamed ones, may run. In this order, each hides more than the one before."""

    AFTER_BACKWARD = "after_backward"
    """Inside `optimizer.step()`, which returns when all is done."""
    BEHIND_FORWARD = "behind_forward"
    """`step()` starts them; what needs a chunk next waits for that chunk's own update alone."""
    INSIDE_BACKWARD = "inside_backward"
    """Also, a chunk's update starts when its gradients have landed, while backward still runs: only where an update
    needs nothing from other chunks (no clipping, no loss scale, one backward a step), or can be taken back
    (`ChunkSpec.has_spare_states`)."""


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the model as the planner sees it."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    """Compute dtype, a key of `DTYPE_BYTES`."""
    requires_grad: bool
    aliases: tuple[str, ...] = ()
    """Further names of the same (tied) parameter."""
    cuts: tuple[AxisCut, ...] = ()
    """How it is cut between ranks by a pattern; `shape` is that of one part."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Member:
    """A parameter's place inside a chunk."""

    fqn: str
    shape: tuple[int, ...]
    offset: int
    """First element inside the chunk's flat tensor, a multiple of `ALIGN_NUMEL`."""
    cuts: tuple[AxisCut, ...] = ()
    """How the parameter is cut between ranks by a pattern; `shape` is that of one part."""

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class IgnoredParam:
    """A parameter that is left out of the chunks: it stays on the compute device, whole, on every rank."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    """As torch calls it; of `TRAINED_DTYPES` if it trains."""
    requires_grad: bool
    nbytes: int
    """What it takes, with what hangs on it (scales of quantised values)."""


@dataclass(frozen=True)
class ChunkSpec:
    """A fixed-numel group of parameters moved as one; homogeneous in dtype, requires_grad and the axes of cuts. Ranks
    that hold the same parts share it (`Mesh.sharing`)."""

    id: int
    dtype: str
    requires_grad: bool
    numel: int
    """Elements of the flat tensor, padding included; a multiple of `world_size * ALIGN_NUMEL`."""
    members: tuple[Member, ...]
    param_tier: Tier
    optim_tier: Tier
    """Where master, optimizer states and the gradient shard live (ignored for frozen chunks)."""
    is_persistent: bool
    """Never evicted: the replica stays on the compute device."""
    is_update_streamed: bool = False
    """States that live beside the device go up to it for their update and come back, instead of being updated by the
    host; only with an `optim_tier` other than GPU."""
    has_spare_states: bool = False
    """There is a second set of master and states, and host memory for new values: the update inside backward goes
    there and can be taken back, so that it may begin whatever the step depends on. Only with states in host memory and
    a master, and with updates inside backward; of the chunks of a plan all, some or none have it."""

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole replica in the compute dtype."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Along which its parameters are cut."""
        return axes_of(self.members[0].cuts) if self.members else ()

    def __str__(self) -> str:
        names = [m.fqn for m in self.members]
        shown = ", ".join(names[:3]) + (f", ... ({len(names)} in all)" if len(names) > 3 else "")
        return f"chunk {self.id} [{shown}]"


@dataclass(frozen=True)
class StepTimes:
    """Predicted seconds of one step, from one forward to the next. The parts overlap, so their sum is more than
    `total_s`."""

    total_s: float
    compute_s: float
    """Forward and backward, had they everything at hand."""
    h2d_s: float
    """The bus to the device is busy."""
    d2h_s: float
    """The bus from the device is busy."""
    collective_s: float
    adam_s: float
    """Updates, wherever they run, each counted by itself and added up."""
    waiting_s: float
    """Forward and backward stand still because a chunk is not there or not updated yet, or a gradient block is not
    free."""
    step_s: float
    """From the end of backward until the next forward begins: updates on the device, and, with what needs all gradients
    (a norm, a loss scale), the program, as far as that was seen in steps. Updates that run behind that are no part."""
    update_waiting_s: float = 0.0
    """The part of `waiting_s` that is for updates which are not done yet."""
    nvme_s: float = 0.0
    """The disk reads or writes states."""

    @property
    def chunk_waiting_s(self) -> float:
        """The part of `waiting_s` that is for chunks and gradient blocks; never less than nothing, which rounding may
        leave."""
        return max(0.0, self.waiting_s - self.update_waiting_s)


@dataclass(frozen=True)
class Alternative:
    """A placement that was looked at and lost."""

    description: str
    total_s: float | None
    """Predicted seconds of one step, by the figures of `Forecast.compared_s`; None if it does not fit."""
    reason: str


@dataclass(frozen=True)
class Forecast:
    """What the search expects of a plan, and why it chose it."""

    times: StepTimes
    peak_gpu_bytes: int
    """Highest moment of the simulated step, with everything that is on the device."""
    gpu_limit_bytes: int | None
    host_bytes: int
    host_limit_bytes: int | None
    binding: str
    """The limit that keeps the plan from being faster, without seconds: these are in `times` alone, which may be made
    anew."""
    hardware: str
    """Whose figures the times come from."""
    alternatives: tuple[Alternative, ...] = ()
    """The best of those that lost, the fastest first."""
    weighed_s: float | None = None
    """Predicted seconds of this plan when `alternatives` were weighed against it, if `times` are newer than that; None:
    they are not."""
    after_steps: int | None = None
    """How many steps had run when `times` were made, by what these were seen to do; 0: none. None: not in a fit."""
    foreseen_s: float | None = None
    """Predicted seconds of one step when the plan was chosen, if `times` are newer than that; None: they are not, or
    that was not in a fit."""
    foreseen_after_steps: int | None = None
    """How many steps had run by then; None: as `foreseen_s`."""
    margin_bytes: int = 0
    """Of `peak_gpu_bytes`: what is left to gaps of the allocator and to batches that take more."""
    gpu_kinds: tuple[tuple[str, int], ...] = ()
    """`peak_gpu_bytes` by kind, as named in `Plan.notes`, which has each kind at its own highest moment. Empty in
    plans of an earlier version."""

    @property
    def allocated_bytes(self) -> int:
        """What tensors take at the highest moment, as `torch.cuda.max_memory_allocated` counts."""
        return self.peak_gpu_bytes - self.margin_bytes

    @property
    def compared_s(self) -> float:
        """Predicted seconds of this plan by the figures that the alternatives' seconds are from."""
        return self.times.total_s if self.weighed_s is None else self.weighed_s

    def following(self, earlier: Forecast | None, after_steps: int) -> Forecast:
        """This forecast, made after so many steps, with what was expected of the plan when it was chosen.

        Args:
            earlier: The one before, of the same plan; None: the plan is chosen now.
            after_steps: See `Forecast`.
        """
        if earlier is None or earlier.after_steps is None:
            return replace(self, after_steps=after_steps, foreseen_s=None, foreseen_after_steps=None)
        first_s, first_after = earlier.foreseen_s, earlier.foreseen_after_steps
        if first_s is None:
            first_s, first_after = earlier.times.total_s, earlier.after_steps
        return replace(self, after_steps=after_steps, foreseen_s=first_s, foreseen_after_steps=first_after)


@dataclass(frozen=True)
class Plan:
    """Everything the runtime obeys: the chunks, their tiers and the rCache."""

    world_size: int
    compute_dtype: str
    block_bytes: int
    """Bytes of one rCache block: the size of a regular chunk in the compute dtype."""
    rcache_blocks: int
    """How many blocks the replicas of non-persistent chunks may take together."""
    prefetch_depth: int
    """How many chunks to fetch ahead of need; 0 turns prefetching off."""
    chunks: tuple[ChunkSpec, ...]
    is_storage_distributed: bool = True
    """False: every rank keeps its parameter shards whole and only gathers after an update."""
    update_timing: UpdateTiming = UpdateTiming.AFTER_BACKWARD
    """When updates by the host, and streamed ones, may run; the runtime takes less where it cannot do this."""
    grad_reuses_compute_shard: bool = False
    """Chunks with parameters and states in host memory and a master have no gradient shard of their own: gradients
    land in the compute shard, which is made again from the master. One backward a step, none inside of it."""
    activations: tuple[ModelBlock, ...] = ()
    """What becomes of what autograd saves in these blocks. Elsewhere, the model does as it does by itself."""
    activation_host_bytes: int | None = 0
    """Host memory that activations may take; what finds no room there stays on the device. None: not
    foreseen, so what the host comfortably has beside the plan."""
    policy: str = "cpu"
    """Which placement policy made the plan."""
    tensor_parallel_size: int = 1
    """Ranks between which patterns cut operators; they share a batch."""
    expert_parallel_size: int = 1
    """Ranks between which patterns cut experts."""
    num_copies: int = 1
    """How many groups of neighbouring ranks hold all parameters and states each; with `sharding="node"` the nodes."""
    notes: dict[str, float | int | str] = field(default_factory=dict, compare=False)
    """Predicted bytes by kind, for people; never read by the runtime and outside the fingerprint."""
    forecast: Forecast | None = field(default=None, compare=False)
    """What the search expects; never read by the runtime and outside the fingerprint."""
    ignored: tuple[IgnoredParam, ...] = ()
    """Parameters that are in no chunk of the plan."""
    schema: int = SCHEMA

    @cached_property
    def mesh(self) -> Mesh:
        """How the ranks stand to each other."""
        return Mesh(self.world_size, self.tensor_parallel_size, self.expert_parallel_size, self.num_copies)

    def num_sharing(self, chunk: ChunkSpec) -> int:
        """How many ranks share a chunk: those that hold the same parts of its parameters."""
        return self.mesh.num_sharing(chunk.axes)

    def blocks_of(self, chunk_id: int) -> int:
        """Blocks that this chunk's replica takes (more than one only for a parameter larger than a chunk)."""
        return max(1, math.ceil(self.chunks[chunk_id].nbytes / self.block_bytes))

    @property
    def gpu_kinds(self) -> dict[str, int]:
        """Bytes on the device by kind: at the highest moment of the step, where that is foreseen and known."""
        if self.forecast is not None and self.forecast.gpu_kinds:
            return dict(self.forecast.gpu_kinds)
        return {key: int(self.notes.get(key, 0)) for key in GPU_BYTE_KINDS}

    @property
    def gpu_kinds_beside_margin(self) -> dict[str, int]:
        """As `gpu_kinds`, without `Forecast.margin_bytes`, which `non_model_bytes` has in it there."""
        kinds, margin = self.gpu_kinds, 0 if self.forecast is None else self.forecast.margin_bytes
        return kinds | {"non_model_bytes": kinds["non_model_bytes"] - margin}

    @property
    def notes_at_peak(self) -> dict[str, float | int | str]:
        """`notes`, with the bytes on the device as `gpu_kinds` has them."""
        return {**self.notes, **self.gpu_kinds}

    @property
    def has_spare_states(self) -> bool:
        """Whether any chunk has them. The updates of all others then wait for their step."""
        return any(c.has_spare_states for c in self.chunks)

    @cached_property
    def all_chunks(self) -> tuple[ChunkSpec, ...]:
        """The chunks, and after them some that never move, of the ignored parameters that train: so their gradients are
        reduced and clipped, their states saved, as those of all others."""
        return self.chunks + resident_chunks(self.ignored, self.world_size, len(self.chunks))

    @property
    def is_all_resident(self) -> bool:
        return all(c.is_persistent for c in self.chunks)

    def explain(self) -> str:
        """The plan in words: placement, predicted memory and step time, the limit that binds, and what lost."""
        from lightning_elixir.plan.explain import explain  # which imports this module

        return explain(self)

    def fingerprint(self) -> str:
        """SHA-256 over the canonical JSON of everything but notes and forecast."""
        from lightning_elixir.plan.io import plan_to_dict  # io imports this module

        content = plan_to_dict(self)
        content.pop("notes")
        content.pop("forecast")
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def layout_fingerprint(self) -> str:
        """Like `fingerprint`, over the chunk layout alone: two plans of one layout differ only in placement."""
        layout = [
            [c.dtype, c.requires_grad, c.numel, [[m.fqn, m.shape, m.offset, _listed(m.cuts)] for m in c.members]]
            for c in self.chunks
        ]
        sizes = [self.world_size, self.tensor_parallel_size, self.expert_parallel_size, self.num_copies]
        ignored = [[p.fqn, p.shape, p.dtype, p.requires_grad] for p in self.ignored]
        return hashlib.sha256(json.dumps([sizes, layout, ignored]).encode()).hexdigest()


def resident_chunks(ignored: Sequence[IgnoredParam], world_size: int, first_id: int) -> tuple[ChunkSpec, ...]:
    """Chunks of the ignored parameters that train: on the device, with their states, for good. As large as the smallest
    that are chosen for others, so that many small parameters are reduced together.

    Args:
        ignored: All of them.
        world_size: Ranks that share the states.
        first_id: Of the first such chunk.
    """
    filled: list[tuple[str, list[Member], int]] = []  # dtype, members, end
    last: dict[str, int] = {}  # by dtype
    for param in ignored:
        if not param.requires_grad:
            continue
        at = last.get(param.dtype)
        numel = _aligned(math.prod(param.shape), ALIGN_NUMEL)
        if at is None or (filled[at][2] + numel) * DTYPE_BYTES[param.dtype] > _RESIDENT_BYTES:
            at = last[param.dtype] = len(filled)
            filled.append((param.dtype, [], 0))
        dtype, members, end = filled[at]
        members.append(Member(param.fqn, param.shape, end))
        filled[at] = (dtype, members, end + numel)
    return tuple(
        ChunkSpec(
            id=first_id + number,
            dtype=dtype,
            requires_grad=True,
            numel=_aligned(max(1, end), world_size * ALIGN_NUMEL),
            members=tuple(members),
            param_tier=Tier.GPU,
            optim_tier=Tier.GPU,
            is_persistent=True,
        )
        for number, (dtype, members, end) in enumerate(filled)
    )


def _aligned(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _listed(cuts: tuple[AxisCut, ...]) -> list[list[str | int]]:
    return [[cut.axis, cut.dim] for cut in cuts]


@dataclass(frozen=True)
class Acquire:
    """The chunks needed by one module call or one saved tensor."""

    ids: tuple[int, ...]
    is_pinned: bool
    """Pinned until a matching `Drop`; otherwise needed at this moment only."""
    held: tuple[int, ...] = ()
    """Resident chunks that could not be evicted at this moment because something still aliased their storage."""


@dataclass(frozen=True)
class Drop:
    """The end of one pinned `Acquire`: the chunks become evictable."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class AccessTrace:
    """What one iteration (or one forward) touches, in order."""

    events: tuple[Acquire | Drop, ...]

    def acquires(self) -> Iterator[Acquire]:
        return (e for e in self.events if isinstance(e, Acquire))

    @cached_property
    def order_of_need(self) -> dict[int, int]:
        """Chunk -> how many others are needed before it."""
        touched = dict.fromkeys(i for event in self.acquires() for i in event.ids)
        return {chunk_id: place for place, chunk_id in enumerate(touched)}

    def in_use(self) -> set[frozenset[int]]:
        """The sets of chunks that are in use at once, at any access: pinned, held and needed."""
        pins: dict[int, int] = {}
        found: set[frozenset[int]] = set()
        for event in self.events:
            ids = dict.fromkeys(event.ids)  # one acquire pins each once
            if isinstance(event, Acquire):
                found.add(frozenset((*pins, *ids, *event.held)))
                if event.is_pinned:
                    for chunk_id in ids:
                        pins[chunk_id] = pins.get(chunk_id, 0) + 1
                continue
            for chunk_id in ids:
                if pins.get(chunk_id, 0) <= 1:
                    pins.pop(chunk_id, None)
                else:
                    pins[chunk_id] -= 1
        return found
