"""Frozen tensors around others, streamed to a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.plans import make_plan
from tests.helpers.shells import check_beside_plain, train, wrapped

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_as_plain_pytorch(is_checkpointed: bool) -> None:
    check_beside_plain("cuda", is_checkpointed)


class Adapted(nn.Module):
    """Layers that torchao has quantised, with adapters beside them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        quantization = pytest.importorskip("torchao.quantization", reason="its weights are what is tried")
        config = {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig", "int4": "Int4WeightOnlyConfig"}[kind]
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(6)).to("cuda", torch.bfloat16)
        for layer in self.layers:
            quantization.quantize_(layer, getattr(quantization, config)())
        self.layers.requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(256, 256) for _ in range(6)).to("cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.pad(x, (0, 256 - x.shape[1]))
        for layer, adapter in zip(self.layers, self.adapters, strict=True):
            x = torch.tanh(layer(x.bfloat16()).float() + adapter(x))
        return x


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_torchao(kind: str) -> None:
    try:
        plain, model = Adapted(kind), Adapted(kind)
    except (ImportError, RuntimeError, AssertionError) as error:
        pytest.skip(f"torchao cannot quantise so here: {error}")
    plan = make_plan(model, placement_policy="cpu", chunk_size=2**18)
    assert not plan.ignored
    module = wrapped(model, "cuda", gpu_bytes=3 * 2**20, chunk_size=2**18)
    assert train(module, device="cuda") == train(plain, device="cuda")
    assert module.stats().evictions > 0
    module.close()
