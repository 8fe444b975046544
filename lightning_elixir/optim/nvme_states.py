"""Adam's moments of parameters in host memory, on a disk: where they lie, and how they pass through host memory.

Parameters are laid one after the other into regions of some MiB, so that no read is small, however small parameters
are, and no buffer large, however large they are: a small parameter shares its region with others, a large one has
several. A region is to its file (`StateFile`) what a chunk is in training with an engine: two parts, the first moments
and the second, and a visit for each update, so that one region is read, another updated and a third written at once.

[Note: moments on a disk] This is `HybridAdam(nvme_offload_fraction=...)` without a strategy. A step visits the regions
that hold a parameter with a gradient; parameters with moments in memory are updated while the first region is read, and
what was never written is not read. The step ends when all is written, so that an error belongs to its own step: then
parameters are partly new and moments lost, the file is given up, and everything but `load_state_dict` raises.
`optimizer.state[p]` has the step count alone; moments that are put there (a loaded state dict, a copy of the optimizer)
are brought to the disk before the next step.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from lightning_elixir.core.labels import label
from lightning_elixir.plan.memory import NVME_BUFFERS
from lightning_elixir.storage.nvme import (
    ALIGNMENT,
    MOMENTS,
    ChunkStates,
    DiskOptions,
    StateFile,
    StateSpec,
    StateTraffic,
    Visit,
    aligned,
    open_state_file,
)

LARGEST_REGION_BYTES = 32 * 2**20
SMALLEST_REGION_BYTES = 4 * 2**20
REGIONS = 16
"""So many at least, where that leaves them large enough: the buffers then take less than a fifth of the states."""

_PART_ALIGNMENT = 64
"""Bytes; each moment of a part begins at a multiple, for the sake of vector instructions."""


@dataclass(frozen=True)
class Part:
    """What a region holds of one parameter."""

    param: Tensor
    start: int
    """First element, in the order in which the parameter's elements lie in memory."""
    numel: int
    is_first: bool
    is_last: bool
    offset: int
    """Elements in the region before the first one."""

    def of(self, moment: Tensor) -> Tensor:
        """A view of its elements, 1-D.

        Args:
            moment: Of the whole region.
        """
        return moment[self.offset : self.offset + self.numel]


@dataclass
class _Region:
    dtype: torch.dtype
    numel: int = 0
    parts: list[Part] = field(default_factory=list)
    states: ChunkStates = field(init=False)
    is_written: bool = False
    """Before that, it is zeros."""

    def visit(self) -> Visit:
        """Have the moments brought to host memory."""
        (piece,) = self.states.file.pieces(self.states.chunk_id)
        return self.states.file.begin(self.states.chunk_id, piece, MOMENTS if self.is_written else ())

    def read(self, moment: str) -> Tensor:
        """A copy of the whole moment."""
        return self.states.read(moment) if self.is_written else torch.zeros(self.numel, dtype=self.dtype, device="cpu")

    def cut(self, moments: Sequence[Tensor], wanted: Callable[[Tensor], bool]) -> Iterator[tuple[Part, Tensor, Tensor]]:
        """The parts of the wanted parameters, each with its views of the two whole moments."""
        for part in self.parts:
            if wanted(part.param):
                first, second = (part.of(moment) for moment in moments)
                yield part, first, second


class NvmeStates:
    """The moments of those parameters that were added.

    Args:
        folder: For the files.
        backend: As for `open_offload_file`.
    """

    def __init__(self, folder: Path, backend: str) -> None:
        self._options = DiskOptions(str(folder), backend)
        self.nbytes = 0
        """Of all moments."""
        self._regions: list[_Region] = []
        self._files: list[StateFile] = []
        self._close = weakref.finalize(self, _close_all, self._files)

    def add(self, params: Sequence[Tensor]) -> None:
        """Make room for the moments of more parameters, which are zeros.

        Args:
            params: Not there yet; none is empty.

        Raises:
            StorageError: The folder cannot be used, or has too little room. Nothing has changed then.
        """
        nbytes = sum(2 * p.numel() * p.dtype.itemsize for p in params)
        most = min(LARGEST_REGION_BYTES, max(SMALLEST_REGION_BYTES, nbytes // REGIONS))
        # A region has one dtype: parameters of the same are to share theirs.
        regions = _laid_out(sorted(params, key=lambda p: str(p.dtype)), most // 2)
        specs = {i: StateSpec(region.numel, region.dtype, has_master=False) for i, region in enumerate(regions)}
        file = open_state_file(specs, self._options, 0, StateTraffic())
        self._files.append(file)
        for index, region in enumerate(regions):
            region.states = ChunkStates(file, index, specs[index])
        self._regions += regions
        self.nbytes += nbytes

    def close(self) -> None:
        """Free the disk and the buffers."""
        self._close()
        self._regions.clear()

    @property
    def buffer_bytes(self) -> int:
        """Host memory that they pass through."""
        return sum(file.buffer_bytes_held() for file in self._files)

    def forget(self) -> None:
        """No moments are there any more: nothing of them needs to be read."""
        for region in self._regions:
            region.is_written = False

    def update(
        self, wanted: Callable[[Tensor], bool], beside: Callable[[], None] | None = None
    ) -> Generator[tuple[Part, Tensor, Tensor], None, None]:
        """Each part of the wanted parameters with its moments, which may be changed until the next one comes.

        Args:
            wanted: Whether a parameter is.
            beside: Called while the first regions are being read.

        Raises:
            StorageError: Reading or writing has failed.
        """
        waiting = iter(self._with(wanted))
        under_way = deque((region, region.visit()) for region in islice(waiting, NVME_BUFFERS))
        try:
            if beside is not None:
                beside()
            while under_way:
                region, visit = under_way[0]
                with label("wait for states to be read"):
                    visit.wait()
                moments = [visit.tensors[name] for name in MOMENTS]
                if not region.is_written:
                    for moment in moments:
                        moment.zero_()
                yield from region.cut(moments, wanted)
                visit.end()
                region.is_written = True
                under_way.popleft()
                under_way.extend((region, region.visit()) for region in islice(waiting, 1))
            with label("wait for states to be written"):
                for file in self._files:
                    file.synchronize()
                    if len(self._files) > 1:
                        file.release_buffers()  # each has its own, and there may be many small ones
        finally:
            for _, visit in under_way:
                visit.drop()

    def read(self, wanted: Callable[[Tensor], bool]) -> Iterator[tuple[Part, Tensor, Tensor]]:
        """Likewise, with copies of the moments."""
        for region in self._with(wanted):
            yield from region.cut([region.read(name) for name in MOMENTS], wanted)

    def _with(self, wanted: Callable[[Tensor], bool]) -> list[_Region]:
        return [region for region in self._regions if any(wanted(part.param) for part in region.parts)]


def _close_all(files: list[StateFile]) -> None:
    for file in files:
        file.close()


def _laid_out(params: Sequence[Tensor], most: int) -> list[_Region]:
    """Regions whose moments take at most so many bytes each."""
    regions: list[_Region] = []
    for p in params:
        itemsize, start = p.dtype.itemsize, 0
        most_numel = max(ALIGNMENT, most) // itemsize
        while start < p.numel():
            if not regions or regions[-1].dtype != p.dtype or regions[-1].numel >= most_numel:
                regions.append(_Region(p.dtype))
            region = regions[-1]
            numel = min(most_numel - region.numel, p.numel() - start)
            region.parts.append(Part(p, start, numel, start == 0, start + numel == p.numel(), region.numel))
            region.numel += aligned(numel * itemsize, _PART_ALIGNMENT) // itemsize
            start += numel
    for region in regions:  # whole blocks of the disk need no copy
        region.numel = aligned(region.numel * region.dtype.itemsize) // region.dtype.itemsize
    return regions
