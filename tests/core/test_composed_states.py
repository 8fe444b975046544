"""Optimizer states of several tensors: taken apart, as checkpoints hold them, and put together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_elixir.core.composed_states import composed, composed_again, parts_of, spread

SHAPE = (48, 128)


def _of_torchao(name: str) -> dict[str, Any]:
    optimizers = pytest.importorskip("torchao.optim", reason="has these optimizers")
    parameter = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    parameter.grad = parameter.sin()
    optimizer = getattr(optimizers, name)([parameter])
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    return dict(optimizer.state[parameter])


def _two_in_one() -> dict[str, Any]:
    moments = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    return {"step": 3, "state1": moments, "state2": moments[0] * 2, "absmax1": torch.ones(2, 24)}


def _bits(state: dict[str, Any]) -> dict[str, Any]:
    parts = parts_of(state, SHAPE)
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in parts.items()}


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "AdEMAMix"])
def test_what_is_saved_has_the_parameters_shape_or_is_small(name: str) -> None:
    state = _two_in_one() if name == "AdEMAMix" else _of_torchao(name)
    parts = parts_of(state, SHAPE)
    saved = spread(parts, SHAPE)
    tensors = [value for value in saved.values() if isinstance(value, torch.Tensor)]
    assert all(type(value) is torch.Tensor for value in (*tensors, *parts.values()) if value is not state["step"])
    assert sum(tuple(value.shape) == SHAPE for value in tensors) == (3 if name == "AdEMAMix" else 2)
    assert all(value.numel() <= 256 for value in tensors if tuple(value.shape) != SHAPE)
    made: list[int] = []

    def empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
        made.append(numel)
        return torch.empty(numel, dtype=dtype)

    numel = 48 * 128
    for again in (composed(parts, SHAPE, torch.float32), composed_again(saved), composed_again(saved, empty)):
        assert {key: type(value) for key, value in again.items()} == {key: type(value) for key, value in state.items()}
        assert _bits(again) == _bits(state)
    assert made == {"AdamW4bit": [numel // 2] * 2, "AdEMAMix": [2 * numel]}.get(name, [])
