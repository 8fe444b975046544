"""Parameters that no optimizer trains, and that users write to again and again: 16 bits keep less than is written.

[Note: frozen copies] A frozen parameter has no master: in mixed precision it is in 16 bits, where plain PyTorch has it
in fp32, and an average that follows what trains in small steps (a momentum encoder, a target network) stands still. So
does one that was not frozen and that no optimizer has: its master takes what changes in 16 bits. What is written to
such a parameter between training forwards, for the second time, is told of once. Writes show in version counters, which
are looked at for parameters alone that a call has touched: the parameter's own, which its views share, and those of
each `p.data`. What is loaded, what is copied from another parameter as it is, and what is written while the module is
in eval mode does not count.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_elixir.runtime import released
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.lost_writes import version_counter_of

log = logging.getLogger(__name__)

_MOST_SHOWN = 4


@dataclass
class _Touched:
    """A parameter that users may have written to, or may yet, through what they keep of it."""

    chunk: Chunk
    index: int
    version: int
    """Of the parameter, as far as writes have been looked at."""
    counters: list[tuple[Tensor, int, weakref.ref[Tensor]]] = field(default_factory=list)
    """Of each `.data`: its version counter, the version as far as it was looked at, and itself."""

    def take(self) -> bool:
        """Whether it was written to since the last call. Parameters must not be intercepted."""
        before, self.version = self.version, self.chunk.parameters[self.index]._version
        is_written = before != self.version or any(counter._version != seen for counter, seen, _ in self.counters)
        alive = [(counter, data) for counter, _, data in self.counters if data() is not None]
        self.counters = [(counter, counter._version, data) for counter, data in alive]
        return is_written


class FrozenCopies:
    """Which parameters users write to that no optimizer has, of those made in more bits than they are kept in.

    Args:
        chunks: All of the engine's.
        module: The engine's.
        is_trained: Whether an optimizer has the member of this chunk, by its id, and index.
        has_master: Whether what trains in 16 bits has a master in more: else the user has chosen 16 bits for all.
        tells: Whether this rank says so.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        module: nn.Module,
        is_trained: Callable[[int, int], bool],
        *,
        has_master: bool,
        tells: bool,
    ) -> None:
        self._module = module
        self._is_trained = is_trained
        self._rounded = {
            id(p): (chunk, index)
            for chunk in (chunks if has_master and tells else ())
            if chunk.dtype in (torch.bfloat16, torch.float16)
            for index, p in enumerate(chunk.parameters)
            if chunk.original_dtypes[index] in (torch.float32, torch.float64)
        }
        self.chunk_ids = frozenset(chunk.id for chunk, _ in self._rounded.values())
        """Chunks that have such parameters."""
        self._touched: dict[int, _Touched] = {}  # by the parameter's id
        self._written_before: set[int] = set()

    def touch(self, parameters: Sequence[Tensor]) -> None:
        """A call over these parameters, of any chunks, begins between steps."""
        with torch._C.DisableTorchFunctionSubclass():
            for p in parameters:
                if (home := self._rounded.get(id(p))) is None or id(p) in self._touched:
                    continue
                if not self._is_trained(home[0].id, home[1]):
                    self._touched[id(p)] = _Touched(*home, p._version)

    def note(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """The call is over.

        Args:
            func: What was called.
            args: Its arguments, a parameter of these or another first.
            kwargs: More of them.
            result: What it has given.
        """
        touched = self._touched.get(id(args[0])) if args else None
        if not self._module.training:
            self._skip(self._touched.values())
        elif touched is not None and func == released.DATA_GETTER and isinstance(result, Tensor):
            touched.counters.append((version_counter_of(result), 0, weakref.ref(result)))
        elif touched is not None and func == released.COPY:
            source = args[1] if len(args) > 1 else kwargs.get("src")
            if isinstance(source, nn.Parameter) or released.is_loading():
                self._skip((touched,))

    def look(self) -> None:
        """A forward begins: tell of what was written before it, if that has happened before."""
        if not self._touched:  # as mostly
            return
        if not self._module.training:
            self._skip(self._touched.values())
            return
        with torch._C.DisableTorchFunctionSubclass():
            written = {key for key, touched in self._touched.items() if touched.take()}
        again = written & self._written_before
        self._written_before |= written
        if again:
            self._tell(again)
            self._rounded, self.chunk_ids, self._touched = {}, frozenset(), {}
            return
        self._touched = {
            key: touched
            for key, touched in self._touched.items()
            if touched.counters or (touched.chunk.is_usable and touched.chunk.is_aliased())
        }

    def _skip(self, touched: Collection[_Touched]) -> None:
        """What was written to these so far does not count."""
        with torch._C.DisableTorchFunctionSubclass():
            for one in touched:
                one.take()

    def _tell(self, written: Collection[int]) -> None:
        homes = [home for key, home in self._rounded.items() if key in written]
        names = [chunk.spec.members[index].fqn for chunk, index in homes]
        dtype = str(homes[0][0].dtype).removeprefix("torch.")
        cure = list(self._parts_of(self._module, "", written))
        more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
        log.warning(
            "parameters that no optimizer trains are written to again and again: %s%s. Under mixed precision they are"
            " kept in %s, and what is written is rounded to it: small steps, as those of a moving average (a momentum"
            " encoder, a target network), are lost, where plain PyTorch keeps them in float32. To have them in float32:"
            " keep_fp32=%s, or ignored= the same, which leaves them out of chunks; lerp_ then takes `p.float()`"
            " (docs/precision.md)",
            ", ".join(names[:_MOST_SHOWN]),
            more,
            dtype,
            cure if len(cure) <= 2 * _MOST_SHOWN else f"[{', '.join(map(repr, cure[:_MOST_SHOWN]))}, ...]",
        )

    def _parts_of(self, module: nn.Module, prefix: str, written: Collection[int]) -> Iterator[str]:
        """Names of modules in which all of these parameters were written to, the largest first met, and of parameters
        that are in none."""
        inside = [id(p) for p in module.parameters() if id(p) in self._rounded]
        if prefix and inside and all(key in written for key in inside):
            yield prefix
            return
        start = f"{prefix}." if prefix else ""
        for name, p in module.named_parameters(prefix, recurse=False):
            if id(p) in written:
                yield name
        for name, child in module.named_children():
            if any(id(p) in written for p in child.parameters()):
                yield from self._parts_of(child, f"{start}{name}", written)
