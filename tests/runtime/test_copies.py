"""Parameters that are held several times, once for each node: sharded within a copy, gradients averaged over copies."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.dist import run_ranks
from tests.helpers.ranks import OPTIONS, averaged_plain, train_copies

CASES = [
    (4, 2, "gpt2", "cpu"),
    (2, 2, "gpt2", "cpu"),
    (3, 3, "odd", "cuda"),
    (4, 2, "checkpoint_reentrant", "whole"),
    (4, 2, "branching", "half_persistent"),
    (4, 4, "gpt2", "sharded_gpu"),
]


@pytest.mark.parametrize(("world_size", "copies", "name", "options"), CASES, ids=str)
@pytest.mark.full
def test_equals_averaged_gradients(world_size: int, copies: int, name: str, options: str) -> None:
    expected = averaged_plain(name, world_size, 2)
    results = run_ranks(train_copies, world_size, copies, name, OPTIONS[options])
    state, stats = results[0]
    skipped = {f"transformer.h.{i}.attn.c_attn.bias" for i in range(3)}  # key biases have a true gradient of zero
    for key, value in expected.items():
        if key not in skipped and value.is_floating_point():
            torch.testing.assert_close(state[key], value, rtol=2e-4, atol=2e-5, msg=lambda m, k=key: f"{k}: {m}")
    assert stats["reduced_across_bytes"] > 0
    if options == "cpu":
        assert stats["evictions"] > 0
