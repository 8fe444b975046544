"""Frozen tensors around others (quantised weights) lie in chunks as bytes, and are used as what they are."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_elixir.core.shells import ShellLayout, ShellParameter, tensors_inside
from lightning_elixir.errors import PlanError, StateError
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.shells import (
    WIDTH,
    Model,
    Scaled,
    assert_same_state,
    batch,
    check_beside_plain,
    drawn,
    train,
    wrapped,
)
from tests.helpers.tiers import telling


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_as_plain_pytorch(is_checkpointed: bool) -> None:
    check_beside_plain("cpu", is_checkpointed)


def on_ranks(is_distributed: bool) -> None:
    model = Model()
    if dist.get_rank():  # values come from rank 0
        for block in model.blocks:
            for inside in tensors_inside(block.weight):
                inside.zero_()
    plain = Model()
    module = wrapped(model, enable_distributed_storage=is_distributed)
    assert train(module) == train(plain)
    assert_same_state(module.state_dict(), plain.state_dict())
    if is_distributed:
        kept = {c.id for c in module.engine.chunks if c.dtype is torch.uint8}
        assert all(module.engine.store[i].param.numel() * 2 == module.engine.chunks[i].spec.numel for i in kept)
    module.close()


@pytest.mark.parametrize("is_distributed", telling([True, False], "True"))
def test_on_two_ranks(is_distributed: bool) -> None:
    run_ranks(on_ranks, 2, is_distributed)


def test_what_users_do_between_steps() -> None:
    model, plain = Model(), Model()
    module = wrapped(model)
    weight, own = model.blocks[0].weight, plain.blocks[0].weight
    assert isinstance(weight, ShellParameter)
    assert (weight.shape, weight.dtype, weight.is_copied, weight.numel()) == (own.shape, own.dtype, True, own.numel())
    assert torch.equal(weight.dense(), own.dense())
    assert torch.equal(weight @ batch(0).t(), own @ batch(0).t())
    assert not hasattr(weight, "quant_state")
    assert model.to("cpu") is model
    with pytest.raises(StateError, match=r"blocks.0.weight .* copy_\(\) new values"):
        weight.data = own
    assert_same_state(copy.deepcopy(model).state_dict(), plain.state_dict())
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    assert_same_state(torch.load(file, weights_only=False), plain.state_dict())
    changed = drawn()
    weight.copy_(changed)
    own.copy_(changed)
    assert torch.equal(module(batch(1)), plain(batch(1)))
    with module.full_parameters(["blocks.1.weight"]) as found:
        assert torch.equal(found["blocks.1.weight"].dense(), plain.blocks[1].weight.dense())
    module.close()


def test_a_state_dict_goes_back_in() -> None:
    model = Model()
    torch.manual_seed(9)
    source = {k: drawn() if type(v) is Scaled and "blocks.3" not in k and "blocks.8" not in k else v
              for k, v in Model().state_dict().items()}  # fmt: skip
    module = wrapped(model)
    module.load_state_dict(source)
    assert_same_state(module.state_dict(), source)
    source["blocks.0.weight"] = drawn(torch.ones(1, WIDTH))
    with pytest.raises(PlanError, match=r"values for blocks.0.weight are those of another parameter: Scaled"):
        module.load_state_dict(source)
    module.close()


@pytest.mark.parametrize("what", ["gaps", "broken", "trains"])
def test_what_no_chunk_can_hold_stays_as_it_is(what: str) -> None:
    shell = drawn()
    if what == "gaps":
        shell.scale = torch.rand(1, 1).expand(WIDTH, 1)
    if what == "broken":

        class Broken(Scaled):
            @classmethod
            def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
                return inner["values"]

        shell = Broken(shell.values, shell.scale)
    if what == "trains":
        shell.requires_grad_(True)
    assert ShellLayout.of(shell) is None
    model = nn.Module()
    model.weight, model.bias = nn.Parameter(shell, requires_grad=what == "trains"), nn.Parameter(torch.ones(1))
    if what == "trains":
        with pytest.raises(PlanError, match=r"weight \(Scaled\): cannot be held in chunks"):
            make_plan(model)
    else:
        assert [p.fqn for p in make_plan(model).ignored] == ["weight"]


def test_no_chunk_is_held_from_forward_to_backward() -> None:
    model = Model()
    module = wrapped(model)
    loss = module(batch(0)).square().mean()
    assert [str(c.spec) for c in module.engine.chunks if c.dtype is torch.uint8 and c.is_aliased()] == []
    loss.backward()
    module.close()


def test_under_another_limit() -> None:
    model = Model()
    plain = copy.deepcopy(model)
    module = wrapped(model)
    expected = train(plain)
    module.set_memory_limit(gpu="1MiB", cpu="1GiB")
    assert train(module) == expected
    module.close()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_compiled_code_uses_stays_out_of_chunks() -> None:
    model = Model()
    model.blocks[2].compile()
    assert [p.fqn for p in make_plan(model).ignored] == ["blocks.2.weight"]


class OverNf4(nn.Module):
    """A product with an NF4 weight of torchao, whose function keeps it beside autograd, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor", reason="has the weights")
        self.linear = nf4.linear_nf4
        self.weight = nn.Parameter(nf4.to_nf4(torch.randn(128, 128) / 8), requires_grad=False)
        self.adapter = nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x, self.weight) + self.adapter(x))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_nf4_of_torchao() -> None:
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Linear(WIDTH, 128), *(OverNf4() for _ in range(6)))
    model = nn.Sequential(nn.Linear(WIDTH, 128), *(OverNf4() for _ in range(6)))
    model.load_state_dict(plain.state_dict(), assign=False)
    module = wrapped(model, chunk_size=70_000, gpu_bytes=450_000)
    assert not module.plan.ignored
    assert train(module) == train(plain)
    assert module.stats().evictions > 0
    assert_same_state(module.state_dict(), plain.state_dict())
    module.close()
