"""Patterns from the plans of models as several releases of transformers write them, of which one is installed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_elixir.errors import PlanError
from lightning_elixir.patterns import Column, Expert, PartialGradients, Row, Vocabulary
from lightning_elixir.patterns.model_plans import own_patterns
from lightning_elixir.plan.mesh import Mesh

WIDTH, HEAD = 8, 2
TENSOR, EXPERTS = Mesh(2, tensor=2), Mesh(2, expert=2)
ATTENTION = {"*.q_proj": "colwise", "*.o_proj": "rowwise"}
CUT = {"0.q_proj": Column, "0.o_proj": Row}
STACKED = {"*.experts.up": "grouped_gemm", "*.experts.down": "grouped_gemm", "*.experts": "moe_tp_experts"}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(4, WIDTH, WIDTH))
        self.down = nn.Parameter(torch.empty(4, WIDTH, WIDTH))


class Layer(nn.Module):
    """Attention, and a mixture beside it where there are experts."""

    def __init__(self, **more: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for name, one in more.items():
            setattr(self, name, one)


class Model(nn.Sequential):
    """One layer, and plans that users see (`tp_plan`), or that are there all the same (`_ep_plan`)."""

    def __init__(self, layer: nn.Module, tensor: dict[str, str], expert: dict[str, str] | None = None) -> None:
        super().__init__(layer)
        self._tp_plan, self._ep_plan = tensor, expert or {}

    @property
    def tp_plan(self) -> dict[str, str]:
        return self._tp_plan


def kinds(model: nn.Module, mesh: Mesh) -> dict[str | type, type]:
    return {name: type(one) for name, one in own_patterns(model, mesh).items()}


def mixture() -> nn.Module:
    return nn.ModuleDict({"gate": nn.Linear(WIDTH, 4), "experts": Experts()})


def test_a_plan_for_experts_that_is_hidden() -> None:
    """As 5.14 to 5.17 have it."""
    model = Model(mixture(), {}, {"*.gate": "ep_router", **STACKED})
    assert kinds(model, EXPERTS) == {"0.experts": Expert}


@pytest.mark.parametrize("style", ["gather", "moe_tp_experts"])  # 5.0, 5.3
def test_experts_that_the_tensor_plan_alone_names(style: str) -> None:
    plan = {"*.experts.up": "local_rowwise", "*.experts.down": "local_rowwise", "*.experts": style}
    model = Model(mixture(), plan)
    assert kinds(model, EXPERTS) == {"0.experts": Expert}
    with pytest.raises(PlanError, match="brings no tp_plan"):  # nothing else is cut, and experts stay whole
        own_patterns(model, TENSOR)


def test_experts_in_a_list_are_not_spread() -> None:
    """As 4.57 has them: a layer calls each by itself."""
    layer = nn.ModuleDict({"experts": nn.ModuleList([Layer(), Layer()])})
    model = Model(layer, {"*.experts.*.q_proj": "colwise", "*.experts.*.o_proj": "rowwise"})
    assert set(kinds(model, TENSOR)) == {f"0.experts.{i}.{name}" for i in (0, 1) for name in ("q_proj", "o_proj")}
    with pytest.raises(PlanError, match="no ep_plan as models of transformers do from 5.0 on"):
        own_patterns(model, EXPERTS)


def test_styles_of_transformers_4() -> None:
    layer = Layer(qkv=nn.Linear(WIDTH, WIDTH), out=nn.Linear(WIDTH, WIDTH), mlp=Layer())
    plan = {"*.qkv": "colwise_rep", "*.out": "rowwise_rep", "*.mlp": "gather"}
    plan |= {"*.mlp.q_proj": "local_colwise", "*.mlp.o_proj": "local_rowwise"}
    found = own_patterns(Model(layer, plan), TENSOR)
    assert {name: type(one) for name, one in found.items()} == {
        "0.qkv": Vocabulary,
        "0.out": Row,
        "0.mlp.q_proj": Column,
        "0.mlp.o_proj": Row,
    }
    assert isinstance(found["0.out"], Row)
    assert found["0.out"].splits


@pytest.mark.parametrize("name", ["q_norm", "act_fn"])
def test_what_a_plan_forgets_between_layers_that_are_cut(name: str) -> None:
    """Each rank has the gradients of its own heads alone."""
    model = Model(Layer(**{name: nn.LayerNorm(HEAD)}), ATTENTION)
    assert kinds(model, TENSOR) == {**CUT, f"0.{name}": PartialGradients}
    model = Model(Layer(**{name: nn.LayerNorm(HEAD)}), {**ATTENTION, f"*.{name}": "replicate"})
    assert kinds(model, TENSOR) == CUT


@pytest.mark.parametrize(
    ("name", "forgotten"),
    [
        ("q_norm", nn.LayerNorm(WIDTH)),  # over all heads, of which a rank has half
        ("kv_a_proj", nn.Linear(WIDTH, WIDTH)),
        ("sinks", nn.Parameter(torch.empty(WIDTH // HEAD))),
        ("indexer", nn.Sequential(nn.Linear(WIDTH, WIDTH))),
    ],
    ids=["q_norm", "kv_a_proj", "sinks", "indexer"],
)
def test_what_a_plan_forgets_and_nobody_knows(name: str, forgotten: nn.Module | nn.Parameter) -> None:
    with pytest.raises(PlanError, match=rf"cuts layers of 0 and says nothing of 0\.{name}, "):
        own_patterns(Model(Layer(**{name: forgotten}), ATTENTION), TENSOR)


def test_what_works_on_whole_values_may_be_forgotten() -> None:
    """Beside layers that are cut in themselves, or gathered."""
    layer = Layer(q_norm=nn.LayerNorm(WIDTH), beside=nn.ModuleDict({"attention": Layer(), "norm": nn.LayerNorm(WIDTH)}))
    plan = {"*.q_proj": "colwise_gather_output", "*.o_proj": "rowwise_split_input"}
    plan |= {"*.beside.attention.q_proj": "colwise", "*.beside.attention.o_proj": "rowwise"}
    assert PartialGradients not in kinds(Model(layer, plan), TENSOR).values()


def test_beside_a_layer_that_does_not_tell_its_width_nothing_fits() -> None:
    model = Model(Layer(q_norm=nn.LayerNorm(HEAD)), ATTENTION)
    del model[0].q_proj.out_features
    with pytest.raises(PlanError, match=r"says nothing of 0\.q_norm, "):
        own_patterns(model, TENSOR)
