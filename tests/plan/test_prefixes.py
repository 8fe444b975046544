"""Names of a model in those of one that holds it."""

from __future__ import annotations

import pytest

from lightning_elixir.plan.activations import Fate, ModelBlock
from lightning_elixir.plan.prefixes import Prefix, prefix_between, with_names_of
from lightning_elixir.plan.types import ChunkSpec, IgnoredParam, Member, Plan, Tier

NAMES = ["model.embed.weight", "model.layers.0.weight", "lm_head.weight"]
HELD = [f"net.{name}" for name in NAMES]


@pytest.mark.parametrize(
    ("names", "others", "expected"),
    [
        (NAMES, NAMES, Prefix()),
        (NAMES, HELD, Prefix("net")),
        (HELD, NAMES, Prefix("net", is_taken_off=True)),
        (NAMES, [f"model.{name}" for name in NAMES], Prefix("model")),  # a part of the names is there without, too
        (NAMES, [f"a.b.{name}" for name in NAMES], Prefix("a.b")),
        (NAMES, [*HELD, "head.weight"], Prefix("net")),
        (NAMES, HELD[1:], Prefix("net")),
        (NAMES, [*HELD, *(f"other.{name}" for name in NAMES)], Prefix("net")),
        (NAMES, [*NAMES[:2], "net.bias"], Prefix()),
        (["weight"], ["net.0.weight"], Prefix("net.0")),
        (["bias"], ["weight"], Prefix()),
        ([], NAMES, Prefix()),
    ],
)
def test_the_prefix_with_which_most_names_are_there(names: list[str], others: list[str], expected: Prefix) -> None:
    assert prefix_between(names, others) == expected


def test_what_is_put_before_a_name_can_be_taken_off() -> None:
    for name in (*NAMES, ""):
        held = Prefix("net").apply(name)
        assert Prefix("net", is_taken_off=True).apply(held) == name
    assert Prefix("net").apply("") == "net"
    assert Prefix("net", is_taken_off=True).apply("network.weight") == "network.weight"


def _plan(prefix: str) -> Plan:
    members = tuple(Member(f"{prefix}layers.{i}.weight", (512,), 512 * i) for i in range(2))
    return Plan(
        world_size=1,
        compute_dtype="float32",
        block_bytes=4096,
        rcache_blocks=1,
        prefetch_depth=0,
        chunks=(ChunkSpec(0, "float32", True, 1024, members, Tier.CPU, Tier.CPU, False),),
        ignored=(IgnoredParam(f"{prefix}scale", (1,), "float32", True, 4),),
        activations=(ModelBlock(f"{prefix}layers.0", Fate.RECOMPUTE),),
        notes={"a": 1},
    )


def test_all_names_of_a_plan_change_and_nothing_else() -> None:
    alone, held = _plan(""), _plan("net.")
    names = ["net.scale", "net.layers.0.weight", "net.layers.1.weight", "net.tied.weight"]
    changed, prefix = with_names_of(alone, names)
    assert (changed, changed.notes, str(prefix)) == (held, alone.notes, "with 'net.' before its names")
    back, prefix = with_names_of(held, [name.removeprefix("net.") for name in names])
    assert (back, str(prefix)) == (alone, "without 'net.' before its names")
    assert with_names_of(held, names)[0] is held
