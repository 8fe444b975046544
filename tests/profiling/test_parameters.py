from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_elixir.errors import PlanError
from lightning_elixir.profiling.parameters import module_accesses, param_specs


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


def test_registration_order_and_kinds() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2, dtype=torch.bfloat16))
    model[0].bias.requires_grad_(False)
    specs = param_specs(model)
    assert [(s.fqn, s.shape, s.dtype, s.requires_grad) for s in specs] == [
        ("0.weight", (2, 3), "float32", True),
        ("0.bias", (2,), "float32", False),
        ("1.weight", (2,), "bfloat16", True),
        ("1.bias", (2,), "bfloat16", True),
    ]
    assert {s.dtype for s in param_specs(model, torch.float16)} == {"float16"}


def test_tied_parameters_are_one_with_aliases() -> None:
    specs = param_specs(Tied())
    assert [s.fqn for s in specs] == ["embedding.weight", "body.weight", "body.bias"]
    assert specs[0].aliases == ("head.weight",)
    assert specs[1].aliases == ()


def test_a_module_used_twice_has_aliases_for_all_it_owns() -> None:
    shared = nn.Linear(2, 2)
    assert [s.aliases for s in param_specs(nn.Sequential(shared, nn.ReLU(), shared))] == [("2.weight",), ("2.bias",)]


def test_no_parameters_give_no_specs() -> None:
    assert param_specs(nn.ReLU()) == ()
    assert module_accesses(nn.ReLU()) == ()


def test_scalars_empty_and_meta_parameters() -> None:
    model = nn.Module()
    model.scalar = nn.Parameter(torch.tensor(1.0))
    model.empty = nn.Parameter(torch.empty(0, 3))
    model.meta = nn.Parameter(torch.empty(4, device="meta"))
    assert [(s.shape, s.numel) for s in param_specs(model)] == [((), 1), ((0, 3), 0), ((4,), 4)]


def test_what_is_no_dense_float_is_refused_by_name() -> None:
    model = nn.Module()
    model.fine = nn.Parameter(torch.zeros(2))
    model.whole = nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)
    model.complex = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    model.sparse = nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(PlanError) as caught:
        param_specs(model)
    text = str(caught.value)
    assert "complex (torch.complex64" in text
    assert "sparse (torch.float32, torch.sparse_coo)" in text
    assert "fine" not in text
    assert "buffers" in text


def test_parameters_without_a_shape_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    model[1].weight = nn.parameter.UninitializedParameter()
    model[1].bias = nn.parameter.UninitializedParameter()
    with pytest.raises(PlanError, match=r"1\.weight, 1\.bias: have no shape yet"):
        param_specs(model)


def test_a_compute_dtype_that_is_none_is_refused() -> None:
    with pytest.raises(PlanError, match=r"compute dtype torch\.int8 is not supported"):
        param_specs(nn.Linear(2, 2), torch.int8)


def pair(first: torch.Tensor, second: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.first, model.second = nn.Parameter(first), nn.Parameter(second)
    return model


BASE = torch.zeros(6, 4)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (BASE, BASE),
        (BASE, BASE.t()),
        (BASE[:3], BASE[2:]),
        (BASE[2:], BASE[:3]),
        (BASE, BASE[1, 2]),
        (BASE[:, 1:3], BASE[:, 2:]),
        (BASE[0], BASE.view(torch.bfloat16)[0]),
    ],
)
def test_distinct_parameters_that_share_elements_are_refused(first: torch.Tensor, second: torch.Tensor) -> None:
    with pytest.raises(PlanError, match="parameters (first and second|second and first) are distinct but share memory"):
        param_specs(pair(first, second))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (BASE[:3], BASE[3:]),
        (BASE[:, :2], BASE[:, 2:]),
        (BASE[::2], BASE[1::2]),
        (BASE[:, 0], BASE[:, 1]),
        (BASE[:0], BASE),
    ],
)
def test_views_beside_each_other_are_fine(first: torch.Tensor, second: torch.Tensor) -> None:
    assert len(param_specs(pair(first, second))) == 2


def test_sharing_is_seen_without_memory_too() -> None:
    base = torch.empty(8, device="meta")
    with pytest.raises(PlanError, match="share memory"):
        param_specs(pair(base[:5], base[4:]))
    assert len(param_specs(pair(base[:4], base[4:]))) == 2
    assert len(param_specs(nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta")))) == 4


class Wrapped(torch.Tensor):
    """Its elements are another tensor's: it has no storage of its own."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*(a.inner if isinstance(a, Wrapped) else a for a in args), **(kwargs or {}))
        return Wrapped(found) if func is torch.ops.aten.detach.default else found


class Named(torch.Tensor):
    """A subclass with plain elements."""


@pytest.mark.parametrize("number", [1, 2])
def test_subclasses_without_plain_elements_are_refused(number: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for layer in list(model)[:number]:
        layer.weight = nn.Parameter(Wrapped(torch.ones(2, 2)))  # type: ignore[union-attr]
    with pytest.raises(
        PlanError, match=r"^0\.weight \(Wrapped\).*cannot be held in chunks.*register it as a"
    ) as caught:
        param_specs(model)
    assert "clone" not in str(caught.value)
    assert "share memory" not in str(caught.value)


def test_subclasses_with_plain_elements_are_fine() -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Named))
    assert [spec.fqn for spec in param_specs(model)] == ["weight", "bias"]


def test_three_in_one_storage() -> None:
    base = torch.zeros(100)
    model = pair(base[:90], torch.zeros(3))
    model.third = nn.Parameter(base[80:])
    with pytest.raises(PlanError, match="parameters first and third are distinct"):
        param_specs(model)


# Which module touches what


def test_accesses_name_direct_owners() -> None:
    assert module_accesses(Tied()) == (
        ("embedding", ("embedding.weight",)),
        ("body", ("body.weight", "body.bias")),
        ("head", ("embedding.weight",)),
    )


def test_attention_takes_its_projection_along() -> None:
    accesses = dict(module_accesses(nn.MultiheadAttention(4, 2)))
    assert accesses[""] == ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")


def test_every_parameter_is_touched_by_some_module() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    touched = {fqn for _, fqns in module_accesses(model) for fqn in fqns}
    assert touched == {s.fqn for s in param_specs(model)}
