"""Parameters to chunks: the packing itself, what it wastes, and the search for the chunk size that wastes least."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_elixir.errors import PlanError
from lightning_elixir.plan.mesh import axes_of
from lightning_elixir.plan.types import ALIGN_NUMEL, DTYPE_BYTES, Member, ParamSpec, Plan

MIN_CHUNK_BYTES = 32 * 2**20
"""Least chunk size that the search looks at: smaller copies do not reach the bandwidth of the bus."""

DEFAULT_N_GRIDS = 128

_TINY_CHUNK_BYTES = 64 * 2**10
# A chunk size is only worth having if the rCache can hold some chunks and not others: a model below
# `_AIMED_CHUNKS * MIN_CHUNK_BYTES` gets smaller chunks, and no candidate makes fewer than `_FEWEST_CHUNKS` of it.
_AIMED_CHUNKS = 8
_FEWEST_CHUNKS = 4
_MOST_CANDIDATES = 6
_PER_OCTAVE = 6
_LEAST_REGULAR = 0.1
"""Of the parameters, by elements, those that are no larger than a chunk."""


@dataclass(frozen=True)
class PackedChunk:
    """A chunk without a place: which parameters it holds, and where inside its flat tensor."""

    dtype: str
    requires_grad: bool
    numel: int
    """Elements of the flat tensor, padding included; a multiple of `world_size * ALIGN_NUMEL`."""
    members: tuple[Member, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """Along which its parameters are cut."""
        return axes_of(self.members[0].cuts) if self.members else ()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole replica in the compute dtype."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def used_bytes(self) -> int:
        """Bytes that hold parameters."""
        return sum(m.numel for m in self.members) * DTYPE_BYTES[self.dtype]


def packed_chunks(plan: Plan) -> tuple[PackedChunk, ...]:
    """A plan's chunks without their places."""
    return tuple(PackedChunk(c.dtype, c.requires_grad, c.numel, c.members) for c in plan.chunks)


@dataclass(frozen=True)
class ChunkSizes:
    """Which chunk sizes a plan may have, in bytes of the compute dtype."""

    chunk_size: int | None = None
    """The one. None: several are simulated (policy "auto"), or the one with the least waste is taken, and smaller ones
    where the GPU cannot hold the blocks of the best."""
    search_range: int | None = None
    """Bytes above the smallest candidate to search; None: to three times of it."""
    n_grids: int = DEFAULT_N_GRIDS
    """How many chunk sizes to look at for their waste."""
    min_chunk_size: int | None = None
    """Of the smallest candidate; None: 32 MiB, less for a small model."""
    is_searched: bool = True
    """False: the size with the least waste, without simulating others."""

    @property
    def is_free(self) -> bool:
        """Whether the user has left them to us."""
        return self.chunk_size is None and self.search_range is None and self.min_chunk_size is None

    def candidates(self, specs: Sequence[ParamSpec], world_size: int, compute_dtype: str) -> tuple[int, ...]:
        """Elements of a chunk; the size with the least waste first.

        Raises:
            PlanError: No parameter can be put into such chunks.
        """
        if self.chunk_size is not None:
            if self.chunk_size < 1:
                raise PlanError(f"chunk_size must be at least 1 byte, got {self.chunk_size}")
            return (max(1, self.chunk_size // DTYPE_BYTES[compute_dtype]),)
        return candidate_chunk_numels(
            specs,
            world_size,
            compute_dtype=compute_dtype,
            search_range_bytes=self.search_range,
            n_grids=self.n_grids,
            min_chunk_bytes=self.min_chunk_size,
        )


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def chunk_capacity(chunk_numel: int, world_size: int) -> int:
    """Elements that a regular chunk may hold: `chunk_numel`, rounded up so that every rank's shard is aligned."""
    return round_up(max(1, chunk_numel), world_size * ALIGN_NUMEL)


def pack(
    specs: Sequence[ParamSpec], chunk_numel: int, world_size: int, compute_dtype: str | None = None
) -> tuple[PackedChunk, ...]:
    """Pack parameters into chunks, in the order given.

    A parameter joins the last open chunk of its kind (dtype, requires_grad, axes of its cuts) if it fits, else it opens
    a new one. A parameter larger than a chunk gets a chunk of its own. Chunks are numbered by their first parameter.

    Args:
        specs: The parameters in registration order, each once.
        chunk_numel: Elements of a regular chunk (`chunk_capacity` rounds it up).
        world_size: Ranks that share a chunk.
        compute_dtype: Key of `DTYPE_BYTES` in which a regular chunk has so many elements: chunks of another dtype have
            as many bytes. None: all have as many elements.

    Returns:
        The chunks, each trimmed to what it uses, rounded up to `world_size * ALIGN_NUMEL` elements.

    Raises:
        PlanError: A parameter is listed twice, has an unknown dtype, or a size is not positive.
    """
    if chunk_numel < 1 or world_size < 1:
        raise PlanError(f"chunk_numel and world_size must be at least 1, got {chunk_numel} and {world_size}")
    _check_specs(specs)
    filled: list[_Open] = []
    open_chunks: dict[_Kind, _Open] = {}
    for spec in specs:
        kind = _kind(spec)
        numel = spec.numel
        capacity = _capacity_of(spec.dtype, chunk_numel, world_size, compute_dtype)
        chunk = open_chunks.get(kind)
        if chunk is None or chunk.end + numel > capacity:
            chunk = _Open(kind)
            filled.append(chunk)
            if numel <= capacity:
                open_chunks[kind] = chunk  # else the last one stays open for smaller parameters
        chunk.add(spec)
    return tuple(chunk.close(world_size) for chunk in filled)


def _capacity_of(dtype: str, chunk_numel: int, world_size: int, compute_dtype: str | None) -> int:
    """Elements that a regular chunk of `dtype` may hold."""
    capacity = chunk_capacity(chunk_numel, world_size)
    if compute_dtype is None or compute_dtype == dtype:
        return capacity
    unit = world_size * ALIGN_NUMEL
    return max(unit, capacity * DTYPE_BYTES[compute_dtype] // DTYPE_BYTES[dtype] // unit * unit)


def regular_block_bytes(
    packed: Sequence[PackedChunk], chunk_numel: int, world_size: int, compute_dtype: str | None = None
) -> int:
    """Bytes of one rCache block: the largest chunk that is no larger than `chunk_numel` allows, or, where there is
    none (every parameter has a chunk of its own), the smallest chunk. Arguments as for `pack`."""
    regular = [c.nbytes for c in packed if c.numel <= _capacity_of(c.dtype, chunk_numel, world_size, compute_dtype)]
    if regular:
        return max(regular)
    return min((c.nbytes for c in packed), default=chunk_capacity(chunk_numel, world_size))


def padding_bytes(packed: Sequence[PackedChunk]) -> int:
    """Bytes of the chunks that hold no parameter (alignment), in the compute dtype."""
    return sum(c.nbytes - c.used_bytes for c in packed)


def waste_bytes(packed: Sequence[PackedChunk], block_bytes: int) -> int:
    """Bytes of rCache blocks that hold no parameter, were every chunk resident."""
    return sum(round_up(c.nbytes, block_bytes) - c.used_bytes for c in packed)


def search_chunk_numel(
    specs: Sequence[ParamSpec],
    world_size: int,
    *,
    compute_dtype: str = "float32",
    search_range_bytes: int | None = None,
    n_grids: int = DEFAULT_N_GRIDS,
    min_chunk_bytes: int | None = None,
) -> int:
    """The chunk size with the least waste; of equal ones the smallest.

    Args:
        specs: The parameters in registration order.
        world_size: Ranks that share a chunk.
        compute_dtype: Key of `DTYPE_BYTES` in which the sizes below are counted.
        search_range_bytes: How far above the smallest candidate to look; None: to three times of it.
        n_grids: How many candidates, evenly spaced.
        min_chunk_bytes: Smallest candidate, unless the largest parameter is larger. None: `MIN_CHUNK_BYTES`, less for a
            model that would then have too few chunks for eviction to make sense.

    Returns:
        Elements of a chunk, a multiple of `world_size * ALIGN_NUMEL`.

    Raises:
        PlanError: A size or a count that is not positive.
    """
    _check_specs(specs)
    for name, value, least in (
        ("chunk_search_range", search_range_bytes, 0),
        ("chunk_search_n_grids", n_grids, 1),
        ("min_chunk_size", min_chunk_bytes, 1),
    ):
        if value is not None and value < least:
            raise PlanError(f"{name} must be at least {least}, got {value}")
    itemsize = DTYPE_BYTES[compute_dtype]
    total = sum(round_up(s.numel, ALIGN_NUMEL) for s in specs)
    largest = max((s.numel for s in specs), default=0)
    if min_chunk_bytes is None:
        min_chunk_bytes = min(MIN_CHUNK_BYTES, max(_TINY_CHUNK_BYTES, total * itemsize // _AIMED_CHUNKS))
    smallest = max(min_chunk_bytes // itemsize, largest, 1)
    search_range = 2 * smallest if search_range_bytes is None else search_range_bytes // itemsize
    largest_candidate = min(smallest + search_range, max(smallest, total // _FEWEST_CHUNKS))
    # More would find no others, as capacities are whole multiples.
    n_grids = min(n_grids, 2 + (largest_candidate - smallest) // (world_size * ALIGN_NUMEL))
    steps = max(1, n_grids - 1)
    candidates = {
        chunk_capacity(smallest + (largest_candidate - smallest) * i // steps, world_size) for i in range(n_grids)
    }
    kinds = _aligned_ends(specs)
    return min(sorted(candidates), key=lambda capacity: _blocks_bytes(kinds, capacity, world_size))


def candidate_chunk_numels(
    specs: Sequence[ParamSpec],
    world_size: int,
    *,
    compute_dtype: str = "float32",
    search_range_bytes: int | None = None,
    n_grids: int = DEFAULT_N_GRIDS,
    min_chunk_bytes: int | None = None,
) -> tuple[int, ...]:
    """Chunk sizes worth simulating: the one with the least waste first, then the least wasteful of each octave of the
    range. Where the range is not given, sizes below the largest parameter are among them (it takes several blocks), but
    none below nearly all of them: each would have a chunk of its own, as with a larger size, and a block, as large as
    what norms and biases fill, would be a fraction of any.

    Args and errors as for `search_chunk_numel`.
    """
    first = search_chunk_numel(
        specs,
        world_size,
        compute_dtype=compute_dtype,
        search_range_bytes=search_range_bytes,
        n_grids=n_grids,
        min_chunk_bytes=min_chunk_bytes,
    )
    itemsize = DTYPE_BYTES[compute_dtype]
    if search_range_bytes is None and min_chunk_bytes is None:
        low = min(MIN_CHUNK_BYTES // itemsize, max(1, first // 4))
        high = 2 * first
    else:
        low = max(1, (min_chunk_bytes or MIN_CHUNK_BYTES) // itemsize)
        high = low + (2 * low if search_range_bytes is None else search_range_bytes // itemsize)
    sizes = [first]
    while low <= high and len(sizes) <= _MOST_CANDIDATES:
        octave = {
            chunk_capacity(low + (min(low, high - low)) * i // _PER_OCTAVE, world_size) for i in range(_PER_OCTAVE)
        }
        best = min(sorted(octave), key=lambda numel: _packed_bytes(specs, numel, world_size))
        if best not in sizes and _is_filled(specs, best, world_size):
            sizes.append(best)
        low *= 2
    return tuple(sizes)


def _is_filled(specs: Sequence[ParamSpec], chunk_numel: int, world_size: int) -> bool:
    """Whether enough lies in chunks of that size, and not in larger ones of single parameters."""
    capacity = chunk_capacity(chunk_numel, world_size)
    regular = sum(s.numel for s in specs if s.numel <= capacity)
    return regular >= _LEAST_REGULAR * sum(s.numel for s in specs)


def _packed_bytes(specs: Sequence[ParamSpec], chunk_numel: int, world_size: int) -> int:
    """Bytes of the blocks that hold everything, for any chunk size."""
    packed = pack(specs, chunk_numel, world_size)
    block_bytes = regular_block_bytes(packed, chunk_numel, world_size)
    return sum(round_up(c.nbytes, block_bytes) for c in packed)


_Kind = tuple[str, bool, tuple[str, ...]]
"""What all parameters of a chunk have in common: dtype, requires_grad, axes of their cuts."""


def _kind(spec: ParamSpec) -> _Kind:
    return spec.dtype, spec.requires_grad, axes_of(spec.cuts)


class _Open:
    """A chunk that is being filled."""

    def __init__(self, kind: _Kind) -> None:
        self.kind = kind
        self.end = 0  # where the next member would start
        self.members: list[Member] = []

    def add(self, spec: ParamSpec) -> None:
        self.members.append(Member(spec.fqn, spec.shape, self.end, spec.cuts))
        self.end = round_up(self.end + spec.numel, ALIGN_NUMEL)

    def close(self, world_size: int) -> PackedChunk:
        # A chunk of empty parameters only still gets a storage, so that resident and released stay different states.
        numel = round_up(max(1, self.end), world_size * ALIGN_NUMEL)
        dtype, requires_grad, _ = self.kind
        return PackedChunk(dtype, requires_grad, numel, tuple(self.members))


def _check_specs(specs: Sequence[ParamSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.dtype not in DTYPE_BYTES:
            raise PlanError(f"parameter {spec.fqn} has dtype {spec.dtype}; supported are {', '.join(DTYPE_BYTES)}")
        if spec.fqn in seen:
            raise PlanError(f"parameter {spec.fqn} is listed twice")
        seen.add(spec.fqn)


def _aligned_ends(specs: Sequence[ParamSpec]) -> list[tuple[int, list[int]]]:
    """Per kind of chunk: (bytes per element, running sum of the aligned sizes of its parameters)."""
    numels: dict[_Kind, list[int]] = {}
    for spec in specs:
        if spec.numel:
            numels.setdefault(_kind(spec), []).append(round_up(spec.numel, ALIGN_NUMEL))
    return [(DTYPE_BYTES[dtype], list(accumulate(sizes))) for (dtype, _, _), sizes in numels.items()]


def _blocks_bytes(kinds: list[tuple[int, list[int]]], capacity: int, world_size: int) -> int:
    """Bytes of one block for every chunk that `pack` would make: the waste, up to the constant size of the model.

    Args:
        kinds: From `_aligned_ends`.
        capacity: Elements of a chunk, not below the largest parameter.
        world_size: Ranks that share a chunk.
    """
    num_chunks = 0
    block_bytes = 0
    for itemsize, ends in kinds:
        start = 0
        index = 0
        while index < len(ends):
            # Capacity is a multiple of the alignment, so that a parameter fits exactly if its aligned end does.
            index = bisect_right(ends, start + capacity, lo=index)
            numel = round_up(ends[index - 1] - start, world_size * ALIGN_NUMEL)
            block_bytes = max(block_bytes, numel * itemsize)
            num_chunks += 1
            start = ends[index - 1]
    return num_chunks * block_bytes
