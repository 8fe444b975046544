"""Operators under autocast over 16-bit parameters: the engine adds none to those of plain PyTorch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_elixir.strategy import ElixirStrategy
from tests.strategy.models import WIDTH, Net, make_data, make_trainer

# What the engine does to bring tensors and to take gradients away: views, copies within a dtype, and questions.
_MOVES = tuple(f"aten.{name}" for name in ("detach", "view", "slice", "as_strided", "alias", "empty", "set_", "copy_"))
_MOVES += ("aten.promote_types",)


class Operators(TorchDispatchMode):
    """Counts operators, with the shapes and dtypes of what they take and give."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, Any, Any]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = (
            tuple((t.dtype, tuple(t.shape)) for t in tree_leaves(each) if isinstance(t, Tensor))
            for each in ((args, kwargs), result)
        )
        name = str(func)
        is_cast = name.startswith("aten.copy_") and len({dtype for dtype, _ in given}) > 1
        if is_cast or not name.startswith(_MOVES):
            self.seen[name, given, made] += 1
        return result

    def num_casts(self) -> int:
        return sum(
            n for (name, given, made), n in self.seen.items() if "_to_copy" in name and given[0][0] != made[0][0]
        )


class Wide(nn.LayerNorm):
    """As a GPU's autocast computes it: in fp32, with casts."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


class Watched(Net):
    """Counts the operators of its fourth step, when plans are final and chunks move.

    Args:
        dtype: Of its parameters, before the strategy sees them.
    """

    def __init__(self, dtype: torch.dtype, *, is_checkpointed: bool) -> None:
        super().__init__()
        for block in self.layers[:-1]:
            block.norm = Wide(WIDTH)
            block.dropout = nn.Identity()
        self.layers.to(dtype)
        self.is_checkpointed = is_checkpointed
        self.operators = Operators()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return x

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx != 3:
            return self.loss(batch)
        with self.operators:
            return self.loss(batch)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.trainer.fit_loop.batch_idx != 3:
            loss.backward()
            return
        with self.operators:
            loss.backward()


def operators_of(strategy: Any, dtype: torch.dtype, *, is_checkpointed: bool) -> Operators:
    module = Watched(dtype, is_checkpointed=is_checkpointed)
    trainer = make_trainer(strategy, precision="bf16-mixed", max_steps=5)
    trainer.fit(module, make_data())
    if strategy != "auto":
        assert trainer.strategy.stats().evictions > 0
    return module.operators


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_no_cast_is_added_to_those_of_plain_pytorch(is_checkpointed: bool) -> None:
    plain = operators_of("auto", torch.bfloat16, is_checkpointed=is_checkpointed)
    tight = ElixirStrategy(placement_policy="cpu", chunk_size="8KiB", gpu_memory_limit="48KiB", keep_fp32=[])
    ours = operators_of(tight, torch.float32, is_checkpointed=is_checkpointed)
    assert plain.num_casts() > 20
    assert ours.seen == plain.seen
