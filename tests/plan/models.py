"""Random models, as lists of parameters."""

from __future__ import annotations

from random import Random

from lightning_elixir.plan.types import ParamSpec


def spec(fqn: str, *shape: int, dtype: str = "float32", requires_grad: bool = True) -> ParamSpec:
    return ParamSpec(fqn, shape, dtype, requires_grad)


def random_specs(random: Random, *, largest: int = 40_000, mixed: bool = True) -> list[ParamSpec]:
    """Up to thirty parameters; some empty, some 0-dim, some frozen, some of another dtype, few of them large."""
    specs = []
    for index in range(random.randint(1, 30)):
        shape: tuple[int, ...] = random.choice(
            [
                (),
                (0,),
                (3, 0, 2),
                (random.randint(1, 700),),
                (random.randint(1, 90), random.randint(1, 90)),
                (random.randint(1, largest),),
            ]
        )
        dtype = random.choice(("float32", "float32", "bfloat16")) if mixed else "float32"
        specs.append(ParamSpec(f"layer{index // 3}.p{index}", shape, dtype, not mixed or random.random() < 0.8))
    return specs


def accesses_of(specs: list[ParamSpec]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What each module owns, by the names of the parameters."""
    owned: dict[str, list[str]] = {}
    for s in specs:
        owned.setdefault(s.fqn.rpartition(".")[0], []).append(s.fqn)
    return tuple((name, tuple(fqns)) for name, fqns in owned.items())
