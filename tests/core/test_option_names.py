"""Options that do not exist."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch import nn

from lightning_elixir import ElixirModule, ElixirStrategy, fabric
from lightning_elixir.errors import ElixirError, OptionError, PlanError


class Own(ElixirStrategy):
    def __init__(self, own_size: int = 0, **options: Any) -> None:
        super().__init__(**options)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (ElixirStrategy, "gpu_memory_limits", "'gpu_memory_limits'; did you mean gpu_memory_limit?"),
        (ElixirStrategy, "gpu_memory", "'gpu_memory'; did you mean gpu_memory_limit?"),
        (ElixirStrategy, "zzzz", "'zzzz': help(ElixirStrategy) has them all"),
        (fabric.ElixirStrategy, "gpu_memory_limits", "'gpu_memory_limits'; did you mean gpu_memory_limit?"),
        (fabric.ElixirStrategy, "paralelize_fn", "'paralelize_fn'; did you mean parallelize_fn?"),
        (ElixirStrategy, "precision", "'precision': it is one of the Trainer (or of Fabric)"),
        (Own, "gradient_clip_val", "'gradient_clip_val': it is one of the Trainer"),
        (Own, "own_sizes", "'own_sizes'; did you mean own_size?"),
    ],
)
def test_the_nearest_name_is_proposed(kind: type, given: str, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        kind(**{given: 1})
    assert str(caught.value) == f"{kind.__name__} has no option {message}"
    assert isinstance(caught.value, OptionError)
    assert isinstance(caught.value, (ElixirError, PlanError))


def test_without_lightning() -> None:
    make: Any = ElixirModule
    with pytest.raises(OptionError, match="ElixirModule has no option 'prefetches'; did you mean prefetch"):
        make(nn.Linear(2, 2), None, prefetches=True)


def test_tools_see_the_options_as_they_are_written() -> None:
    parameters = inspect.signature(ElixirStrategy).parameters
    assert list(parameters)[0] == "placement_policy"
    assert not [p for p in parameters.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
