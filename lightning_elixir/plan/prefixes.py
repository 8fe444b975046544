"""Names in a model, and in another one that holds it as a part: `layers.0.weight`, and `model.layers.0.weight`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace

from lightning_elixir.plan.types import Plan


@dataclass(frozen=True)
class Prefix:
    """What names of one model have before them in another. By default nothing."""

    path: str = ""
    """Of the part, without the dot that follows it; empty: the names are the same."""
    is_taken_off: bool = False
    """The names have it, and the other model's have not."""

    def apply(self, name: str) -> str:
        """A name of a parameter or module in the other model; one that lacks what is to be taken off stays."""
        if not self.path:
            return name
        if self.is_taken_off:
            return "" if name == self.path else name.removeprefix(f"{self.path}.")
        return f"{self.path}.{name}" if name else self.path

    def __str__(self) -> str:
        return f"with{'out' * self.is_taken_off} {self.path + '.'!r} before its names"


def prefix_between(names: Collection[str], others: Collection[str]) -> Prefix:
    """The one with which most of `names` are among `others`; none, where none is better than that.

    Args:
        names: Of parameters, with dots.
        others: Of the other model; of several parts that are alike, the first is taken.
    """
    heads: dict[str, list[str]] = defaultdict(list)  # of the other model's names, by what follows them
    for other in others:
        for head, end in _split(other):
            heads[end].append(head)
    known = set(others)
    found: Counter[Prefix] = Counter({Prefix(): sum(name in known for name in names)})
    for name in names:
        found.update(Prefix(head) for head in heads.get(name, ()))
        found.update(Prefix(head, is_taken_off=True) for head, end in _split(name) if end in known)
    return max(found, key=found.__getitem__)  # of equals the first


def _split(name: str) -> list[tuple[str, str]]:
    """At each of its dots."""
    parts = name.split(".")
    return [(".".join(parts[:i]), ".".join(parts[i:])) for i in range(1, len(parts))]


def with_names_of(plan: Plan, names: Collection[str]) -> tuple[Plan, Prefix]:
    """A plan under the names of a model that holds the plan's model, or that is a part of it.

    Args:
        plan: Any plan.
        names: Of the model's parameters, tied ones under all their names.

    Returns:
        The plan, which is `plan` itself where the names are the same, and what its names have got or lost. Whether it
        is a plan for this model is not looked at.
    """
    members = [m.fqn for c in plan.chunks for m in c.members]
    prefix = prefix_between([*members, *(p.fqn for p in plan.ignored)], names)
    if not prefix.path:
        return plan, prefix
    chunks = tuple(
        replace(c, members=tuple(replace(m, fqn=prefix.apply(m.fqn)) for m in c.members)) for c in plan.chunks
    )
    ignored = tuple(replace(p, fqn=prefix.apply(p.fqn)) for p in plan.ignored)
    blocks = tuple(replace(block, name=prefix.apply(block.name)) for block in plan.activations)
    return replace(plan, chunks=chunks, ignored=ignored, activations=blocks), prefix
