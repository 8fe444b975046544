from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from lightning_elixir.errors import PlanError
from lightning_elixir.profiling.activations import measure_non_model_bytes


class Layers(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 2, 256, batch_first=True) for _ in range(4))
        self.register_buffer("scale", torch.ones(512))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.mode == "plain" else checkpoint(layer, x, use_reentrant=self.mode == "reentrant")
        return x * self.scale[0]


def step(model: nn.Module, inp: Mapping[str, Any]) -> None:
    model(inp["x"]).sum().backward()


def test_the_peak_of_two_layers_term_by_term() -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.Sigmoid(), nn.Linear(256, 128, bias=False), nn.Sigmoid())
    kib = 1024
    expected = (
        32 * kib  # the input
        + 64 * kib  # the first sigmoid's output, saved for both its own and the second product's backward
        + 32 * kib  # gradient of the second product
        + 128 * kib  # gradient of its weight, just made and not yet taken over
        + 64 * kib  # gradient of its input, made before the weight's is taken over
        + 2 * 512  # the loss and its gradient, a scalar each
    )
    assert measure_non_model_bytes(model, {"x": torch.zeros(64, 128)}, step) == expected


@pytest.mark.parametrize("mode", ["plain", "reentrant", "non-reentrant"])
def test_agrees_with_mem_tracker(mode: str) -> None:
    inp = {"x": torch.zeros(8, 64, 64, requires_grad=True)}
    ours = measure_non_model_bytes(Layers(mode), inp, step)
    tracker = MemTracker()
    with FakeTensorMode():
        model, fake = Layers(mode), {"x": torch.zeros(8, 64, 64, requires_grad=True)}
        tracker.track_external(model, fake["x"])
        with tracker:
            step(model, fake)
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    held = {str(kind).rpartition(".")[2]: value for kind, value in peak.items()}
    at_peak_of_all = held["Total"] - held["PARAM"] - held["GRAD"]
    # Ours is the peak of what is not model data, theirs its value at the peak of everything.
    assert at_peak_of_all <= ours <= 1.3 * at_peak_of_all


def test_checkpointing_and_half_precision_need_less() -> None:
    inp = {"x": torch.zeros(8, 64, 64, requires_grad=True)}
    plain = measure_non_model_bytes(Layers("plain"), inp, step)
    assert measure_non_model_bytes(Layers("non-reentrant"), inp, step) < plain / 2
    assert measure_non_model_bytes(Layers("plain"), inp, step, torch.bfloat16) < 0.7 * plain


def test_grows_with_the_batch() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    sizes = [measure_non_model_bytes(model, {"x": torch.zeros(n, 64)}, step) for n in (256, 512)]
    assert 1.8 < sizes[1] / sizes[0] <= 2.0


def test_model_inputs_and_random_state_stay_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout())
    x = torch.randn(4, 8, requires_grad=True)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random_state = torch.get_rng_state()
    measure_non_model_bytes(model, {"x": x}, step)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert x.grad is None
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())


def test_models_on_meta_tied_and_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8, device="meta"), nn.Linear(8, 8, device="meta"))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    assert measure_non_model_bytes(model, {"x": torch.zeros(2, 8)}, step) > 0


def read_value(model: nn.Module, inp: Mapping[str, Any]) -> None:
    model(inp["x"]).sum().item()


def fail(model: nn.Module, inp: Mapping[str, Any]) -> None:
    raise KeyError("labels")


@pytest.mark.parametrize(("step_fn", "cause"), [(read_value, "DataDependent"), (fail, "KeyError: 'labels'")])
def test_what_cannot_be_profiled_says_so(step_fn: Callable[[nn.Module, Mapping[str, Any]], None], cause: str) -> None:
    with pytest.raises(PlanError, match=f"step_fn cannot be profiled without real data .*{cause}"):
        measure_non_model_bytes(nn.Linear(2, 2), {"x": torch.zeros(1, 2)}, step_fn)
