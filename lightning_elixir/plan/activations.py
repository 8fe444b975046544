"""What becomes of the tensors that autograd saves inside the blocks of a model: values that users, plans and the
runtime share."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_elixir.errors import PlanError

AUTO = "auto"

LEAST_OFFLOADED_BYTES = 256 * 1024
"""Smaller storages stay on the device: a copy of them takes longer to begin than to run."""


class Fate(enum.Enum):
    """What becomes of what autograd saves in one block, from its forward to its backward."""

    KEEP = "keep"
    """It stays on the device, as in plain PyTorch."""
    RECOMPUTE = "recompute"
    """It is dropped, and backward runs the block's forward once more, from its inputs."""
    OFFLOAD = "offload"
    """It goes to host memory behind computing, and comes back ahead of need."""
    RECOMPUTE_OFFLOADED = "recompute_offloaded"
    """As `RECOMPUTE`, with the inputs in host memory meanwhile."""
    KEEP_ATTENTION = "keep_attention"
    """As `RECOMPUTE`, but what fused attention has given stays on the device, and is not computed again."""

    __hash__ = object.__hash__

    @property
    def is_recomputed(self) -> bool:
        return self in (Fate.RECOMPUTE, Fate.RECOMPUTE_OFFLOADED, Fate.KEEP_ATTENTION)

    @property
    def is_offloaded(self) -> bool:
        """Whether anything of the block goes to host memory."""
        return self in (Fate.OFFLOAD, Fate.RECOMPUTE_OFFLOADED)


@dataclass(frozen=True)
class ModelBlock:
    """A module of which a plan says what becomes of its activations."""

    name: str
    """Of the module, from the root of the model."""
    fate: Fate


@dataclass(frozen=True)
class ActivationMoves:
    """What goes to host memory, and comes back, beside the computing of one interval of a step."""

    out_bytes: int = 0
    """Begin to go when the interval ends; the computing goes on when what went before them is there."""
    in_bytes: int = 0
    """Begin to come back when the interval begins."""
    is_awaited: bool = False
    """The computing begins when what was to come back before is there."""

    def __add__(self, later: ActivationMoves) -> ActivationMoves:
        if later is NO_MOVES or self is NO_MOVES:
            return self if later is NO_MOVES else later
        return ActivationMoves(
            self.out_bytes + later.out_bytes, self.in_bytes + later.in_bytes, self.is_awaited or later.is_awaited
        )

    def __bool__(self) -> bool:
        return bool(self.out_bytes or self.in_bytes or self.is_awaited)


NO_MOVES = ActivationMoves()
"""Of nearly all intervals: simulations compare each with it, by identity."""


@dataclass(frozen=True)
class ActivationRequest:
    """What the user asked for."""

    is_searched: bool = False
    """The plan chooses, block by block."""
    everywhere: Fate | None = None
    """Of all blocks that are found."""
    by_glob: tuple[tuple[str, Fate], ...] = ()
    """Of those that a glob over names of modules means; the first glob that means a block counts."""

    @property
    def is_nothing(self) -> bool:
        """Whether the model does as it does by itself."""
        return not self.is_searched and self.everywhere is None and not self.by_glob

    @classmethod
    def of(cls, value: object) -> ActivationRequest:
        """From the value of the option `activations`.

        Raises:
            PlanError: It is none.
        """
        if value is None:
            return cls()
        if value == AUTO:
            return cls(is_searched=True)
        if isinstance(value, str):
            return cls(everywhere=_fate(value, "activations"))
        if not isinstance(value, Mapping) or not value:
            raise PlanError(
                f"activations must be {_known(AUTO)}, or a dict from globs of blocks to those, got {value!r:.60}"
            )
        for glob in value:
            if not isinstance(glob, str) or not glob:
                raise PlanError(f"activations: a block is named by a glob over names of modules, got {glob!r:.60}")
        return cls(by_glob=tuple((glob, _fate(fate, f"activations[{glob!r}]")) for glob, fate in value.items()))


def _fate(value: object, where: str) -> Fate:
    try:
        return Fate(value)
    except ValueError:
        extra = (AUTO,) if where == "activations" else ()
        raise PlanError(f"{where} must be {_known(*extra)}, got {value!r:.60}") from None


def _known(*more: str) -> str:
    return ", ".join(repr(name) for name in (*more, *(fate.value for fate in Fate)))


def has_offloaded(blocks: Iterable[ModelBlock]) -> bool:
    """Whether activations of any of these go to host memory."""
    return any(block.fate.is_offloaded for block in blocks)


def less_activations(blocks: Iterable[ModelBlock], *, recomputes_by_itself: bool = False) -> str:
    """The next choice that has a step take less of the device, for errors; empty where nothing is left to choose.

    Args:
        blocks: What becomes of them now; none: the model does as it does by itself.
        recomputes_by_itself: Whether that is known to recompute its layers.
    """
    fates = {block.fate for block in blocks}
    if fates == {Fate.RECOMPUTE_OFFLOADED}:
        return ""
    if recomputes_by_itself if not fates else Fate.KEEP not in fates:
        return "recompute blocks from inputs in host memory (activations='recompute_offloaded')"
    unless = "" if fates else " unless the model does so already"
    return f"recompute activations (activations='recompute'){unless}"


_WORDS = {
    Fate.KEEP: "kept on the GPU",
    Fate.RECOMPUTE: "recomputed in backward",
    Fate.OFFLOAD: "sent to host memory",
    Fate.RECOMPUTE_OFFLOADED: "recomputed from inputs in host memory",
    Fate.KEEP_ATTENTION: "recomputed but for attention",
}


def describe_activations(blocks: Iterable[ModelBlock]) -> str:
    """What becomes of them, in one line; empty where the model does as it does by itself."""
    names = _by_fate(blocks)
    total = sum(map(len, names.values()))
    if not total:
        return ""
    return ", ".join(f"{len(names[fate])} {_WORDS[fate]}" for fate in Fate if fate in names) + f" (of {total} blocks)"


def blocks_by_fate(blocks: Iterable[ModelBlock]) -> list[tuple[str, int, str]]:
    """(what becomes of them, how many they are, which), for people; those in a row as the first and the last."""
    return [(_WORDS[fate], len(names), ", ".join(_runs(names))) for fate, names in _by_fate(blocks).items()]


def _by_fate(blocks: Iterable[ModelBlock]) -> dict[Fate, list[str]]:
    names: dict[Fate, list[str]] = {}
    for block in blocks:
        names.setdefault(block.fate, []).append(block.name)
    return names


def _runs(names: Iterable[str]) -> list[str]:
    runs: list[list[str]] = []
    for name in names:
        stem, _, number = name.rpartition(".")
        last = runs[-1][-1].rpartition(".") if runs else ("", "", "")
        if last[0] == stem and number.isdecimal() and last[2].isdecimal() and int(number) == int(last[2]) + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return [run[0] if len(run) == 1 else f"{run[0]} to {run[-1].rpartition('.')[2]}" for run in runs]
