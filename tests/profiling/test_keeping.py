"""What stays in fp32 unasked, and how modules in fp32 take inputs of 16 bits."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir.planning import minimum_waste_search, optimal_search
from lightning_elixir.profiling.fake_step import profile_memory
from lightning_elixir.profiling.kept_fp32 import compute_in_fp32, kept_parameters
from lightning_elixir.wrapper import ElixirModule
from tests.helpers.plans import make_plan

HALF = torch.bfloat16


class TopRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return self.classifier(x.float()).softmax(-1)


class RouterLayer(nn.Module):
    """Holds the experts, and so is no router, whatever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.router = TopRouter()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x)
        return sum(weights[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))  # type: ignore[return-value]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.Linear(8, 8)


class Swiglu(nn.Module):
    """A gate of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 32)
        self.up = nn.Linear(8, 32)


def test_defaults() -> None:
    model = nn.ModuleDict(
        {
            "router": RouterLayer(),
            "gated": Gated(),
            "swiglu": Swiglu(),
            "norm": nn.LayerNorm(8),
            "batch": nn.BatchNorm1d(8),
            "bound": nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
            "old": nn.utils.spectral_norm(nn.Linear(8, 8)),
            "weighted": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        }
    )

    def kept(**options: Any) -> set[str]:
        found = kept_parameters(model, None, **options)
        return {name.rpartition(".")[0].removesuffix(".parametrizations.weight") for name in found}

    always = {"batch", "bound", "old"}
    routers = {"router.router.classifier", "gated.gate"}
    assert kept(has_autocast=False) == always
    assert kept(has_autocast=True) == always | routers
    assert kept(has_autocast=True, leaves_norms=True) == always | routers | {"norm"}
    assert kept(has_autocast=True, has_defaults=False) == set()
    assert kept_parameters(model, (), has_autocast=True) == set()
    assert kept_parameters(model, ["swiglu.up"], has_autocast=True) >= {"swiglu.up.weight", "gated.gate.weight"}


def test_predicates_may_find_nothing_and_get_every_module() -> None:
    model, seen = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []
    assert kept_parameters(model, lambda name, module: seen.append((name, module)), has_autocast=False) == set()
    assert seen == [("", model), ("0", model[0]), ("1", model[1])]


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 8)
        self.inner = nn.Linear(8, 8)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, extra: Any = None) -> Any:
        self.seen.append(x.dtype)
        self.seen.append(self.embed(torch.zeros(1, dtype=torch.long)).dtype)
        if extra is not None:
            self.seen.append(extra["more"][0].dtype)
        return {"y": self.inner(x), "count": torch.ones(1, dtype=torch.long)}


def test_inputs_and_results_are_cast_at_the_outermost_kept_module() -> None:
    model = nn.ModuleDict({"wide": Wide(), "narrow": nn.Linear(8, 8).to(HALF), "embed": nn.Embedding(4, 8)})
    kept = {name for name, _ in model.named_parameters() if not name.startswith("narrow")}
    handles = compute_in_fp32(model, kept, HALF, "cpu")
    wide = model["wide"]
    x = torch.randn(2, 8, dtype=HALF)
    output = wide(x, extra={"more": [x]})
    assert wide.seen == [torch.float32] * 3  # inside, the embedding's result is not cast
    assert output["y"].dtype is HALF
    assert output["count"].dtype is torch.long
    assert torch.equal(output["y"], wide.inner(x.float()).to(HALF))
    assert wide(x.float())["y"].dtype is torch.float32
    assert model["embed"](torch.zeros(1, dtype=torch.long)).dtype is HALF
    with torch.autocast("cpu", HALF):
        wide.seen.clear()
        wide(x)
        assert wide.seen[0] is HALF  # autocast says how it is computed
    with pytest.raises(RuntimeError):
        wide(torch.randn(2, 3, dtype=HALF))
    assert wide(x)["y"].dtype is HALF  # an error leaves nothing behind
    again = pickle.loads(pickle.dumps(copy.deepcopy(model))).float()  # the engine's copies are in fp32
    assert again["wide"](x.float())["y"].dtype is torch.float32
    with pytest.raises(RuntimeError):
        again["wide"](x)  # nothing is cast in a copy
    for handle in handles:
        handle.remove()
    with pytest.raises(RuntimeError):
        wide(x)


def _step(model: Any, inp: Any) -> None:
    model(inp["x"]).float().sum().backward()


@pytest.mark.parametrize("autocast", [True, False])
def test_a_profile_counts_fp32_bytes(autocast: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), RouterLayer(), nn.Linear(8, 8))
    inp = {"x": torch.randn(4, 8)}
    numel = sum(p.numel() for p in model.parameters())
    router = sum(p.numel() for p in model[1].router.parameters())
    found = profile_memory(model, inp, _step, HALF, autocast=autocast, keep_fp32=None if autocast else ["1.router"])
    assert found.param_bytes == found.grad_bytes == 2 * numel + 2 * router
    more = profile_memory(model, inp, _step, HALF, autocast=autocast, keep_fp32=["1.router", "2"])
    assert more.param_bytes == 2 * numel + 2 * router + 2 * 72
    assert profile_memory(model[0], inp, _step, keep_fp32="weight").param_bytes == 4 * 72


def test_searches_put_what_is_kept_into_chunks_of_fp32() -> None:
    model = nn.Sequential(nn.Linear(8, 8), RouterLayer(), nn.Linear(8, 8))
    inp = {"x": torch.randn(4, 8)}
    keep = ["1.router", "2.bias"]
    names = {"1.router.classifier.weight", "1.router.classifier.bias", "2.bias"}
    for plan in (
        minimum_waste_search(model, 1, HALF, keep_fp32=keep),
        optimal_search(model, 1, HALF, inp=inp, step_fn=_step, keep_fp32=["1.router", "2.bias"][:1]),
        minimum_waste_search(model, 1, HALF),
    ):
        module = ElixirModule(
            copy.deepcopy(model), plan, dtype=HALF, autocast=True, keep_fp32=keep, device=torch.device("cpu")
        )
        assert {m.fqn for c in module.plan.chunks if c.dtype == "float32" for m in c.members} == names
        module(inp["x"]).sum().backward()
        module.close()
    assert {c.dtype for c in minimum_waste_search(model, 1, torch.float32, keep_fp32=keep).chunks} == {"float32"}


def test_bytes_of_a_plan_are_those_of_fp32() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    options = {"placement_policy": "cpu", "chunk_size": 8192, "compute_dtype": HALF}
    none, one = (make_plan(model, keep_fp32=keep, **options) for keep in ((), ["2.weight"]))  # type: ignore[arg-type]
    assert [c.nbytes for c in one.chunks] == [8192, 8192, 16384, 8192]
    assert one.blocks_of(2) == 2
    # 4096 elements: 2 + 2 + 12 bytes with a master, 4 + 4 + 8 in fp32.
    assert one.notes["host_bytes"] == none.notes["host_bytes"]
    without = [make_plan(model, keep_fp32=k, master_weights=False, **options) for k in ((), ["2.weight"])]  # type: ignore[arg-type]
    assert int(without[1].notes["host_bytes"]) - int(without[0].notes["host_bytes"]) == 4096 * 8
    pairs = make_plan(model, keep_fp32=["1.weight", "2.weight"], **(options | {"chunk_size": 16384}))  # type: ignore[arg-type]
    assert [(c.dtype, c.nbytes) for c in pairs.chunks] == [("bfloat16", 16384), ("float32", 16384), ("float32", 16384)]
    assert pairs.block_bytes == 16384  # a chunk that is kept makes no larger blocks for all the others
