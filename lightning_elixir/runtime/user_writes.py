"""What users write to parameters between steps, and what of a chunk they keep.

[Note: writes by users] Between steps every operation on a managed parameter is intercepted: its chunk is fetched, the
operation runs, and the chunk counts as *touched*. Before anything reads shards or masters (step, forward, state dict,
eviction), touched chunks are *absorbed*. Where there is a master, only elements whose bits in the compute dtype have
changed are taken, so that reading, or writing back what was read, leaves the master's low bits alone; `p.copy_(fp32)`,
and so `load_state_dict`, writes the master as given (Note: what is put back, `runtime/written.py`). Chunks of which a
user keeps an alias are absorbed every time. Writes between a forward and its backward show in autograd's version
counters, where the engine's own do not, and raise; so does what would unbind a parameter (`.half()`, `.to(device)`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_elixir.core.signals import deferred

if TYPE_CHECKING:
    from lightning_elixir.runtime.engine import Engine


class UserWrites:
    """Which chunks of one engine users may have written to.

    Args:
        engine: Brings the chunks.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._raw_pins: list[int] = []
        self.touched: set[int] = set()
        """Chunks that may have been written to, or may be yet, through what users keep of them."""

    def touch(self, ids: Iterable[int]) -> None:
        """The user may have written to these chunks."""
        self.touched.update(ids)

    def absorb(self) -> None:
        """Bring what users wrote between steps to shards and masters. An alias that they keep may be written again
        later, so its chunk stays touched."""
        self.unpin_raw()
        for chunk_id in list(self.touched):
            chunk = self._engine.chunks[chunk_id]
            if chunk.is_usable:
                self._engine.interception.absorb(chunk)
            if not (chunk.is_usable and chunk.is_aliased()):
                self.touched.discard(chunk_id)

    def pin_for_pointer(self, ids: Iterable[int]) -> None:
        """Keep chunks whose raw address was handed out, until the end of the region or the next synchronisation."""
        pinned = tuple([i for i in ids if i in self._engine.active.cost])
        self._engine.acquire(pinned, pin=True)
        self._raw_pins.extend(pinned)

    def unpin_raw(self) -> None:
        """Let go what `pin_for_pointer` has kept."""
        rcache = self._engine.rcache
        for chunk_id in self._raw_pins:
            if rcache.is_pinned(chunk_id):
                rcache.drop((chunk_id,))
        self._raw_pins.clear()

    @contextmanager
    def resident(self, ids: tuple[int, ...], *, modify: bool) -> Iterator[None]:
        """Keep chunks resident and their parameters plain inside; in a meeting between steps.

        Args:
            modify: Take over what was written; otherwise it is undone.
        """
        engine = self._engine
        is_there = False
        saved: dict[int, Tensor] = {}
        try:
            with deferred():
                engine.acquire(ids, pin=True)
                is_there = True
                saved = {} if modify else {i: engine.chunks[i].flat.clone() for i in ids}
                for chunk_id in ids:
                    engine.interception.make_plain(engine.chunks[chunk_id])
            yield
        finally:
            with deferred():
                for chunk_id in ids if is_there else ():
                    chunk = engine.chunks[chunk_id]
                    engine.interception.guard(chunk)
                    if modify:
                        engine.interception.absorb(chunk)
                    elif chunk_id in saved:
                        chunk.flat.copy_(saved[chunk_id])
                if is_there:
                    engine.drop(ids)
