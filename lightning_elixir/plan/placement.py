"""Chunks to tiers: what stays on the GPU, what goes to the host, and how large the rCache is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.packing import PackedChunk, padding_bytes, waste_bytes
from lightning_elixir.plan.types import DTYPE_BYTES, ChunkSpec, Plan, Tier

POLICIES = ("auto", "cpu", "cuda", "const", "static")

GRAD_BLOCKS = 2
"""Blocks for gradients on the compute device: one fills up while another is being reduced."""


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
    def of(cls, dtype: str, *, has_master: bool, num_states: int = 2, grad_bytes: int | None = None) -> ModelDataBytes:
        """The usual figures: 16-bit with an fp32 master 2, 2, 4, 8; fp32 4, 4, 0, 8; 16-bit without master 2, 2, 0, 4.

        Args:
            dtype: Compute dtype, key of `DTYPE_BYTES`.
            has_master: Whether 16-bit parameters have an fp32 master.
            num_states: Optimizer states per element (Adam 2, SGD with momentum 1).
            grad_bytes: Bytes per element of the gradient shard; None: as the parameter.
        """
        compute = DTYPE_BYTES[dtype]
        master = 4 if has_master and compute == 2 else 0
        return cls(compute, compute if grad_bytes is None else grad_bytes, master, num_states * (master or compute))


@dataclass(frozen=True)
class Budget:
    """What one rank may use. None: not known, treated as unlimited."""

    gpu_bytes: int | None = None
    """Memory of the compute device."""
    cpu_bytes: int | None = None
    """This rank's part of the host's memory."""
    non_model_bytes: int = 0
    """Device memory that activations, buffers and temporaries take at their peak."""


@dataclass(frozen=True)
class PlacementRequest:
    """What the user asked for."""

    policy: str = "auto"
    """One of `POLICIES` ("static" is another name of "const")."""
    shard_param_frac: float = 1.0
    """const: share of the parameter bytes that is sharded and fetched when needed; the rest is persistent."""
    offload_optim_frac: float = 0.0
    """const: share of the optimizer bytes that lives on the host."""
    offload_param_frac: float = 0.0
    """const: share of the parameter bytes whose shards live on the host (and so are not persistent)."""
    prefetch_depth: int = 0
    """How many chunks to fetch ahead; 0: no prefetching."""
    distributed_storage: bool = True
    """False: every rank keeps its parameter shards whole."""
    gpu_margin_mem_ratio: float | None = None
    """auto: share of the GPU memory beside the rCache that optimizer states may take. None: all of it."""
    accesses: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(module name, FQNs of the parameters that it owns directly), for the smallest rCache."""


@dataclass(frozen=True)
class MemoryUse:
    """Predicted bytes of one rank, by kind."""

    gpu_param_bytes: int
    """Persistent replicas and parameter shards on the GPU."""
    gpu_state_bytes: int
    """Master and optimizer states on the GPU."""
    gpu_grad_bytes: int
    """Gradient shards on the GPU, and the blocks that gradients are gathered in."""
    rcache_bytes: int
    host_param_bytes: int
    host_state_bytes: int
    host_grad_bytes: int
    non_model_bytes: int

    @property
    def gpu_bytes(self) -> int:
        return (
            self.gpu_param_bytes + self.gpu_state_bytes + self.gpu_grad_bytes + self.rcache_bytes + self.non_model_bytes
        )

    @property
    def host_bytes(self) -> int:
        return self.host_param_bytes + self.host_state_bytes + self.host_grad_bytes


def place(
    packed: Sequence[PackedChunk],
    request: PlacementRequest,
    budget: Budget,
    world_size: int,
    *,
    block_bytes: int,
    compute_dtype: str,
    data_bytes: Mapping[str, ModelDataBytes],
) -> Plan:
    """Give every chunk its tiers and size the rCache, within the budget.

    Args:
        packed: The chunks; their positions become their ids.
        request: Policy and options.
        budget: Limits of one rank.
        world_size: Ranks that share a chunk.
        block_bytes: Bytes of one rCache block.
        compute_dtype: Written into the plan.
        data_bytes: Bytes per element, for every dtype of `packed`.

    Returns:
        The plan; `notes` holds the predicted bytes of one rank by kind (`MemoryUse`).

    Raises:
        PlanError: An unknown policy, or a fraction outside [0, 1].
        CapacityError: A limit cannot hold what the policy needs.
    """
    _check(request, world_size)
    return _Placer(packed, request, budget, world_size, block_bytes, compute_dtype, data_bytes).plan()


def smallest_rcache(
    packed: Sequence[PackedChunk], accesses: Sequence[tuple[str, tuple[str, ...]]], block_bytes: int, managed: set[int]
) -> tuple[int, str]:
    """Blocks that one module's forward needs at once, and that module's name.

    A module that owns parameters keeps them in use while its children run, so theirs are needed together.

    Args:
        packed: The chunks.
        accesses: (module name, FQNs that it owns directly).
        block_bytes: Bytes of one block.
        managed: Ids of the chunks that are not persistent.
    """
    chunk_of = {m.fqn: i for i, c in enumerate(packed) for m in c.members}
    own = {name: {chunk_of[fqn] for fqn in fqns if fqn in chunk_of} & managed for name, fqns in accesses}
    most, module = 0, ""
    for name, ids in own.items():
        needed = set(ids)
        parts = name.split(".") if name else []
        for depth in range(len(parts)):
            needed |= own.get(".".join(parts[:depth]), set())
        blocks = sum(_blocks(packed[i], block_bytes) for i in needed)
        if blocks > most:
            most, module = blocks, name
    # Whatever the modules say (a parameter that none of them is known to own): each chunk must fit by itself.
    for i in sorted(managed):
        blocks = _blocks(packed[i], block_bytes)
        if blocks > most:
            most, module = blocks, packed[i].members[0].fqn
    return most, module


def _check(request: PlacementRequest, world_size: int) -> None:
    if request.policy not in POLICIES:
        raise PlanError(f"unknown placement policy {request.policy!r}; known are {', '.join(map(repr, POLICIES))}")
    for name in ("shard_param_frac", "offload_optim_frac", "offload_param_frac", "gpu_margin_mem_ratio"):
        value = getattr(request, name)
        if value is not None and not 0.0 <= value <= 1.0:
            raise PlanError(f"{name} must be between 0 and 1, got {value}")
    if request.prefetch_depth < 0 or world_size < 1:
        raise PlanError(f"prefetch_depth ({request.prefetch_depth}) or world_size ({world_size}) is too small")


def _blocks(chunk: PackedChunk, block_bytes: int) -> int:
    return max(1, -(-chunk.nbytes // block_bytes))


@dataclass(frozen=True)
class _Site:
    """Where one chunk is."""

    param_tier: Tier
    optim_tier: Tier
    is_persistent: bool


_RESIDENT = _Site(Tier.GPU, Tier.GPU, True)
_OFFLOADED = _Site(Tier.CPU, Tier.CPU, False)


class _Placer:
    """One placement: the inputs, and the bytes that follow from a choice of sites."""

    def __init__(
        self,
        packed: Sequence[PackedChunk],
        request: PlacementRequest,
        budget: Budget,
        world_size: int,
        block_bytes: int,
        compute_dtype: str,
        data_bytes: Mapping[str, ModelDataBytes],
    ) -> None:
        self.packed = tuple(packed)
        self.request = request
        self.budget = budget
        self.world_size = world_size
        self.block_bytes = block_bytes
        self.compute_dtype = compute_dtype
        self.data_bytes = data_bytes
        # Then a shard on the GPU is the whole replica, and dropping the one would keep the other.
        self.is_shard_whole = world_size == 1 or not request.distributed_storage
        grads = sorted((max(block_bytes, c.nbytes) for c in self.packed if c.requires_grad), reverse=True)
        self.grad_block_bytes = sum(grads[:GRAD_BLOCKS])

    def plan(self) -> Plan:
        policy = {"static": "const"}.get(self.request.policy, self.request.policy)
        choose: dict[str, Callable[[], Plan]] = {
            "cuda": self._cuda,
            "cpu": self._cpu,
            "const": self._const,
            "auto": self._auto,
        }
        return replace(choose[policy](), policy=policy)

    # Policies

    def _cuda(self) -> Plan:
        return self._finish([_RESIDENT] * len(self.packed), blocks=0)

    def _cpu(self) -> Plan:
        return self._fill_rcache([_OFFLOADED] * len(self.packed))

    def _const(self) -> Plan:
        request = self.request
        param_bytes = [c.nbytes for c in self.packed]
        optim_bytes = [c.numel * self._data(c).optim if c.requires_grad else 0 for c in self.packed]
        sharded = _highest(param_bytes, request.shard_param_frac)
        offloaded = _highest(param_bytes, request.offload_param_frac)
        optim_offloaded = _highest(optim_bytes, request.offload_optim_frac)
        sites = []
        for i in range(len(self.packed)):
            param_tier = Tier.CPU if i in offloaded else Tier.GPU
            optim_tier = Tier.CPU if i in optim_offloaded else Tier.GPU
            is_persistent = param_tier is Tier.GPU and (i not in sharded or self.is_shard_whole)
            sites.append(_Site(param_tier, optim_tier, is_persistent))
        return self._fill_rcache(sites)

    def _auto(self) -> Plan:
        n = len(self.packed)
        resident = [_RESIDENT] * n
        if self._fits(resident, 0):
            return self._finish(resident, 0)
        states_offloaded = [_Site(Tier.GPU, Tier.CPU, True)] * n
        if self._fits(states_offloaded, 0):
            return self._finish(self._promote(states_offloaded, 0, _RESIDENT), 0)
        sites = [_OFFLOADED] * n
        smallest, _ = self._smallest(sites)
        blocks = min(self._all_blocks(sites), smallest + self.request.prefetch_depth)
        while blocks > smallest and not self._fits(sites, blocks):
            blocks -= 1
        # Where the shard is the replica, states on the GPU without it would send every update to the host and back.
        promoted = self._promote(sites, blocks, _Site(Tier.GPU, Tier.GPU, self.is_shard_whole))
        return self._fill_rcache(promoted)

    # Parts of policies

    def _promote(self, sites: list[_Site], blocks: int, better: _Site) -> list[_Site]:
        """Move trainable chunks to `better`, lowest ids first (they are updated last in backward, with least time
        left to hide a transfer), as far as the memory given to states goes."""
        if self.budget.gpu_bytes is None:
            return sites
        left = self.budget.gpu_bytes - self.use(sites, blocks).gpu_bytes
        ratio = 1.0 if self.request.gpu_margin_mem_ratio is None else self.request.gpu_margin_mem_ratio
        left = int(left * ratio)
        promoted = list(sites)
        for i, chunk in enumerate(self.packed):
            if not chunk.requires_grad:
                continue
            cost = self._chunk_gpu_bytes(chunk, better) - self._chunk_gpu_bytes(chunk, sites[i])
            if cost > left:
                break
            left -= cost
            promoted[i] = better
        return promoted

    def _fill_rcache(self, sites: list[_Site]) -> Plan:
        """As many blocks as the budget allows; with no limit known, enough to run and to prefetch."""
        smallest, _ = self._smallest(sites)
        everything = self._all_blocks(sites)
        if self.budget.gpu_bytes is None:
            return self._finish(sites, min(everything, smallest + self.request.prefetch_depth))
        left = self.budget.gpu_bytes - self.use(sites, 0).gpu_bytes
        return self._finish(sites, min(everything, max(smallest, left // self.block_bytes)))

    def _finish(self, sites: list[_Site], blocks: int) -> Plan:
        use = self.use(sites, blocks)
        self._check_gpu(use, sites, blocks)
        self._check_host(use, sites)
        chunks = tuple(
            ChunkSpec(i, c.dtype, c.requires_grad, c.numel, c.members, s.param_tier, s.optim_tier, s.is_persistent)
            for i, (c, s) in enumerate(zip(self.packed, sites, strict=True))
        )
        return Plan(
            world_size=self.world_size,
            compute_dtype=self.compute_dtype,
            block_bytes=self.block_bytes,
            rcache_blocks=blocks,
            prefetch_depth=self.request.prefetch_depth,
            chunks=chunks,
            is_storage_distributed=self.request.distributed_storage,
            notes={
                "gpu_param_bytes": use.gpu_param_bytes,
                "gpu_state_bytes": use.gpu_state_bytes,
                "gpu_grad_bytes": use.gpu_grad_bytes,
                "rcache_bytes": use.rcache_bytes,
                "gpu_bytes": use.gpu_bytes,
                "host_param_bytes": use.host_param_bytes,
                "host_state_bytes": use.host_state_bytes,
                "host_grad_bytes": use.host_grad_bytes,
                "host_bytes": use.host_bytes,
                "non_model_bytes": use.non_model_bytes,
                "padding_bytes": padding_bytes(self.packed),
                "waste_bytes": waste_bytes(self.packed, self.block_bytes),
            },
        )

    # Bytes

    def use(self, sites: list[_Site], blocks: int) -> MemoryUse:
        """Predicted bytes of one rank."""
        gpu_param = gpu_state = gpu_grad = host_param = host_state = host_grad = 0
        for chunk, site in zip(self.packed, sites, strict=True):
            gpu_param += self._gpu_param_bytes(chunk, site)
            if site.param_tier is not Tier.GPU:
                host_param += self._param_shard_bytes(chunk)
            if not chunk.requires_grad:
                continue
            data = self._data(chunk)
            numel = chunk.numel // self.world_size
            if site.optim_tier is Tier.GPU:
                gpu_state += numel * (data.master + data.states)
                gpu_grad += numel * data.grad
            else:
                host_state += numel * (data.master + data.states)
                host_grad += numel * data.grad
        return MemoryUse(
            gpu_param_bytes=gpu_param,
            gpu_state_bytes=gpu_state,
            gpu_grad_bytes=gpu_grad + self.grad_block_bytes,
            rcache_bytes=blocks * self.block_bytes,
            host_param_bytes=host_param,
            host_state_bytes=host_state,
            host_grad_bytes=host_grad,
            non_model_bytes=self.budget.non_model_bytes,
        )

    def _data(self, chunk: PackedChunk) -> ModelDataBytes:
        return self.data_bytes[chunk.dtype]

    def _param_shard_bytes(self, chunk: PackedChunk) -> int:
        return chunk.nbytes if self.is_shard_whole else chunk.nbytes // self.world_size

    def _gpu_param_bytes(self, chunk: PackedChunk, site: _Site) -> int:
        if site.is_persistent:
            return chunk.nbytes  # on the GPU tier the shard is a slice of it
        return self._param_shard_bytes(chunk) if site.param_tier is Tier.GPU else 0

    def _chunk_gpu_bytes(self, chunk: PackedChunk, site: _Site) -> int:
        """What the chunk takes on the GPU whether or not it is in the rCache."""
        optim = 0
        if chunk.requires_grad and site.optim_tier is Tier.GPU:
            optim = chunk.numel // self.world_size * self._data(chunk).optim
        return self._gpu_param_bytes(chunk, site) + optim

    def _all_blocks(self, sites: list[_Site]) -> int:
        return sum(_blocks(c, self.block_bytes) for c, s in zip(self.packed, sites, strict=True) if not s.is_persistent)

    def _smallest(self, sites: list[_Site]) -> tuple[int, str]:
        managed = {i for i, s in enumerate(sites) if not s.is_persistent}
        return smallest_rcache(self.packed, self.request.accesses, self.block_bytes, managed)

    # Limits

    def _fits(self, sites: list[_Site], blocks: int) -> bool:
        return self.budget.gpu_bytes is None or self.use(sites, blocks).gpu_bytes <= self.budget.gpu_bytes

    def _check_gpu(self, use: MemoryUse, sites: list[_Site], blocks: int) -> None:
        limit = self.budget.gpu_bytes
        if limit is None or use.gpu_bytes <= limit:
            return
        parts = [
            f"parameters that stay on it {format_bytes(use.gpu_param_bytes)}",
            f"optimizer states {format_bytes(use.gpu_state_bytes)}",
            f"gradients {format_bytes(use.gpu_grad_bytes)}",
            f"activations and other data {format_bytes(use.non_model_bytes)}",
        ]
        if blocks:
            _, module = self._smallest(sites)
            parts.insert(
                0,
                f"the smallest rCache, {blocks} block{'s' * (blocks > 1)} of {format_bytes(self.block_bytes)} for"
                f" {module or 'the model'}, {format_bytes(use.rcache_bytes)}",
            )
            cure = "Raise gpu_memory_limit, lower chunk_size, or keep less on the GPU"
        else:
            cure = 'Use placement_policy="auto" or "cpu", or more ranks'
        raise CapacityError(
            f"GPU memory: the plan needs {format_bytes(use.gpu_bytes)} on each rank ({'; '.join(parts)}), but there are"
            f" {format_bytes(limit)}: {format_bytes(use.gpu_bytes - limit)} too few. {cure}."
        )

    def _check_host(self, use: MemoryUse, sites: list[_Site]) -> None:
        limit = self.budget.cpu_bytes
        if limit is None or use.host_bytes <= limit:
            return
        offloaded = sum(
            c.numel
            for c, s in zip(self.packed, sites, strict=True)
            if s.param_tier is not Tier.GPU or (c.requires_grad and s.optim_tier is not Tier.GPU)
        )
        fitting = offloaded * max(0, limit) // use.host_bytes
        raise CapacityError(
            f"host memory: the plan needs {format_bytes(use.host_bytes)} for each rank (parameters"
            f" {format_bytes(use.host_param_bytes)}; optimizer states {format_bytes(use.host_state_bytes)}; gradients"
            f" {format_bytes(use.host_grad_bytes)}), but there are {format_bytes(limit)}. What would fit is about"
            f" {fitting:,} of the {offloaded:,} offloaded parameters: keep more on the GPU, spread the model over"
            " more hosts, or make it smaller."
        )


def format_bytes(value: int) -> str:
    """1536 -> "1.5 KiB"."""
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{value} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def _highest(sizes: Sequence[int], fraction: float) -> set[int]:
    """The highest ids whose sizes together come nearest to `fraction` of all (gradients of the last chunks arrive
    first, so that what is done for them on the host overlaps the rest of backward)."""
    wanted = fraction * sum(sizes)
    taken = 0
    chosen: set[int] = set()
    for i in reversed(range(len(sizes))):
        if not sizes[i]:
            continue
        if abs(taken + sizes[i] - wanted) >= abs(taken - wanted):
            break
        taken += sizes[i]
        chosen.add(i)
    return chosen
