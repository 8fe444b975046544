"""Adam's moments of parameters in host memory, on a disk: where they lie, and how they pass through host memory.

Parameters are laid one after the other into regions of some MiB, so that no read is small, however small parameters
are, and no buffer large, however large they are: a small parameter shares its region with others, a large one has
several. Of each part, a region holds the first moment and then the second. Three buffers go round: while one region is
read, the one before is updated, and the one before that written.

[Note: moments on a disk] This is `HybridAdam(nvme_offload_fraction=...)` without a strategy. A step visits the regions
that hold a parameter with a gradient; parameters with moments in memory are updated while the first region is read, and
what was never written is not read. The step ends when all is written, so that an error belongs to its own step: then
parameters are partly new and moments lost, the file is given up, and everything but `load_state_dict` raises.
`optimizer.state[p]` has the step count alone; moments that are put there (a loaded state dict, a copy of the optimizer)
are brought to the disk before the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lightning_elixir.core.labels import label
from lightning_elixir.errors import StorageError
from lightning_elixir.plan.memory import NVME_BUFFERS
from lightning_elixir.storage.nvme import OffloadFile, Request, aligned, open_offload_file

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
    """Bytes in the region before the first moment."""
    second_offset: int

    def moments(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the two moments, 1-D, in the parameter's dtype.

        Args:
            buffer: uint8, with the region in it.
        """
        nbytes = self.numel * self.param.dtype.itemsize
        first, second = (buffer[at : at + nbytes].view(self.param.dtype) for at in (self.offset, self.second_offset))
        return first, second


@dataclass
class _Region:
    index: int
    nbytes: int
    parts: list[Part]
    file: OffloadFile = field(init=False)
    is_written: bool = False
    """Before that, it is zeros."""


class NvmeStates:
    """The moments of those parameters that were added.

    Args:
        folder: For the files.
        backend: As for `open_offload_file`.
    """

    def __init__(self, folder: Path, backend: str) -> None:
        self.folder, self.backend = folder, backend
        self.nbytes = 0
        """Of all moments."""
        self._regions: list[_Region] = []
        self._buffers: list[Tensor] = []
        self._files: list[OffloadFile] = []
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
        regions = _laid_out(params, most)
        file = open_offload_file(self.folder, [r.nbytes for r in regions], backend=self.backend)
        self._files.append(file)
        for region in regions:
            region.file = file
        largest = max(r.nbytes for r in regions)
        if not self._buffers or self._buffers[0].numel() < largest:
            self._buffers = [file.empty(largest, torch.uint8) for _ in range(NVME_BUFFERS)]
        self._regions += regions
        self.nbytes += nbytes

    def close(self) -> None:
        """Free the disk and the buffers."""
        self._close()
        self._buffers.clear()
        self._regions.clear()

    @property
    def buffer_bytes(self) -> int:
        """Host memory that they pass through."""
        return sum(buffer.nbytes for buffer in self._buffers)

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
        return self._parts(wanted, is_written=True, beside=beside)

    def read(self, wanted: Callable[[Tensor], bool]) -> Generator[tuple[Part, Tensor, Tensor], None, None]:
        """Likewise, with moments that are only to be looked at."""
        return self._parts(wanted, is_written=False)

    def _parts(
        self, wanted: Callable[[Tensor], bool], *, is_written: bool, beside: Callable[[], None] | None = None
    ) -> Generator[tuple[Part, Tensor, Tensor], None, None]:
        regions = [r for r in self._regions if any(wanted(part.param) for part in r.parts)]
        for region, buffer in self._passing(regions, is_written, beside):
            for part in region.parts:
                if wanted(part.param):
                    yield part, *part.moments(buffer)

    def _passing(
        self, regions: Sequence[_Region], is_written: bool, beside: Callable[[], None] | None
    ) -> Iterator[tuple[_Region, Tensor]]:
        """Each region in a buffer; the next is being read meanwhile, and those before are being written."""
        reads: dict[int, Request] = {}
        writes: dict[int, Request] = {}

        def begin(turn: int) -> None:
            if turn >= len(regions):
                return
            if turn - NVME_BUFFERS in writes:
                with label("wait for states to be written"):
                    writes.pop(turn - NVME_BUFFERS).wait()
            region, buffer = regions[turn], self._buffer(turn, regions[turn])
            if region.is_written:
                reads[turn] = region.file.read(region.index, buffer, will_write=is_written)
            else:
                buffer.zero_()

        try:
            begin(0)
            if beside is not None:
                beside()
            for turn, region in enumerate(regions):
                begin(turn + 1)
                if turn in reads:
                    with label("wait for states to be read"):
                        reads.pop(turn).wait()
                buffer = self._buffer(turn, region)
                yield region, buffer
                if is_written:
                    region.is_written = True
                    writes[turn] = region.file.write(region.index, buffer)
            for request in writes.values():
                request.wait()
        finally:  # the next call uses the same buffers
            for request in (*reads.values(), *writes.values()):
                with suppress(StorageError):
                    request.wait()

    def _buffer(self, turn: int, region: _Region) -> Tensor:
        return self._buffers[turn % NVME_BUFFERS][: region.nbytes]


def _close_all(files: list[OffloadFile]) -> None:
    for file in files:
        file.close()


def _laid_out(params: Sequence[Tensor], most: int) -> list[_Region]:
    """Regions of at most so many bytes."""
    regions = [_Region(0, 0, [])]
    for p in params:
        itemsize, start = p.dtype.itemsize, 0
        while start < p.numel():
            region = regions[-1]
            left = (most - region.nbytes) // 2 // _PART_ALIGNMENT * _PART_ALIGNMENT // itemsize
            if left == 0:
                regions.append(_Region(len(regions), 0, []))
                continue
            numel = min(left, p.numel() - start)
            each = aligned(numel * itemsize, _PART_ALIGNMENT)
            part = Part(p, start, numel, start == 0, start + numel == p.numel(), region.nbytes, region.nbytes + each)
            region.parts.append(part)
            region.nbytes += 2 * each
            start += numel
    for region in regions:  # whole blocks of the disk need no copy
        region.nbytes = aligned(region.nbytes)
    return regions
