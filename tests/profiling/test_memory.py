"""`profile_memory` against hand-made sums, against real runs on the CPU, and against what was measured on a GPU."""

from __future__ import annotations

import json
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_elixir import cuda_memory_profiling, profile_memory
from lightning_elixir.errors import PlanError
from lightning_elixir.plan.profile import MemoryProfile
from lightning_elixir.profiling.parameters import param_specs
from lightning_elixir.wrapper import ElixirModule
from tests.helpers.plans import make_plan
from tests.helpers.releases import need_experts_in_one_module
from tests.helpers.tiers import telling
from tests.helpers.zoo import ZOO, make

KIB, MIB = 1 << 10, 1 << 20
MATMUL_MIB = 32 + 32 + 1  # cuBLAS of forward and of backward, cuBLASLt
RESULTS = Path(__file__).parents[2] / "examples" / "benchmarks" / "results"


class Layers(nn.Module):
    def __init__(self, mode: str = "plain") -> None:
        super().__init__()
        self.mode = mode
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 2, 256, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.register_buffer("scale", torch.ones(512))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.mode == "plain" else checkpoint(layer, x, use_reentrant=self.mode == "reentrant")
        return x * self.scale[0]


def step(model: nn.Module, inp: Mapping[str, Any]) -> None:
    model(inp["x"]).sum().backward()


def zoo_profile(name: str, dtype: torch.dtype | None = None) -> MemoryProfile:
    return profile_memory(make(name), {}, lambda model, inp: ZOO[name].loss(model, 0).backward(), dtype)


# Bytes


def test_the_peak_of_two_layers_term_by_term() -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.Sigmoid(), nn.Linear(256, 128, bias=False), nn.Sigmoid())
    found = profile_memory(model, {"x": torch.zeros(64, 128)}, step)
    activations = (
        32 * KIB  # the input
        + 64 * KIB  # the first sigmoid's output, saved for both its own and the second product's backward
        + 32 * KIB  # gradient of the second product
        + 128 * KIB  # gradient of its weight, just made and not yet taken over
        + 64 * KIB  # gradient of its input, made before the weight's is taken over
        + 2 * 512  # the loss and its gradient, a scalar each
        + MATMUL_MIB * MIB
    )
    assert found.activation_bytes == activations
    parameters = 4 * (128 * 256 + 256 + 256 * 128)
    assert found.param_bytes == found.grad_bytes == parameters
    assert found.input_bytes == 32 * KIB
    assert found.buffer_bytes == 0
    # At the end all gradients are there beside the first product's own.
    assert found.timeline[-1].grad_bytes == parameters
    assert parameters + activations <= found.peak_bytes <= 2 * parameters + activations
    assert found.flops == 2 * 64 * 128 * 256 * 5  # two products forward, three backward


@pytest.mark.parametrize(("rows", "columns"), [(1024, 1024), (2048, 512), (512, 2048)])
def test_a_causal_mask_leaves_out_what_it_masks(rows: int, columns: int) -> None:
    """All but what tiles have beyond it; backward as well. Two products of scores forward, five backward."""

    def attend(is_causal: bool) -> Callable[[nn.Module, Mapping[str, Any]], None]:
        def run(model: nn.Module, inp: Mapping[str, Any]) -> None:
            query, key = (model(inp[name]).view(1, -1, 2, 64).transpose(1, 2) for name in ("query", "key"))
            F.scaled_dot_product_attention(query, key, key, is_causal=is_causal).sum().backward()

        return run

    inp = {"query": torch.zeros(rows, 128), "key": torch.zeros(columns, 128)}
    masked, whole = (
        profile_memory(nn.Linear(128, 128), inp, attend(is_causal), torch.bfloat16).flops for is_causal in (True, False)
    )
    products = profile_memory(
        nn.Linear(128, 128),
        inp,
        lambda model, inp: sum(model(x).sum() for x in inp.values()).backward(),
        torch.bfloat16,
    ).flops  # type: ignore[union-attr]
    unmasked = sum(min(row + 1, columns) for row in range(rows)) / (rows * columns)
    assert whole - products == pytest.approx(2 * 2 * 64 * rows * columns * (2 * 1.25 + 5 * 1.45), rel=1e-6)
    assert unmasked < (masked - products) / (whole - products) <= unmasked + 128 / columns + 1e-6


class CpuTracker(TorchDispatchMode):
    """Peak bytes of the storages of a real run, each from the operator that makes it until it dies."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.peak_bytes = self.live_bytes = 0
        self.sizes: dict[int, int] = {}
        for tensor in known:
            self.add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self.add(value)
        return result

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = -(-storage.nbytes() // 512) * 512
            self.live_bytes += self.sizes[key]
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self.forget, key).atexit = False

    def forget(self, key: int) -> None:
        self.live_bytes -= self.sizes.pop(key)


@pytest.mark.parametrize(
    "name",
    telling(
        ["mlp", "tied", "checkpoint", "checkpoint_reentrant", "branching", "odd"],
        *["tied", "checkpoint_reentrant", "branching"],
    ),
)
def test_equal_to_a_real_run_on_the_cpu(name: str) -> None:
    model = make(name)
    with CpuTracker([*model.parameters(), *model.buffers()]) as tracker:
        ZOO[name].loss(model, 0).backward()
    found = zoo_profile(name)
    workspaces = found.peak_bytes - tracker.peak_bytes
    assert workspaces in (64 * MIB, 65 * MIB, 66 * MIB)  # cuBLAS twice; cuBLASLt, in backward where it recomputes
    assert found.param_bytes == sum(p.numel() * 4 for p in model.parameters())
    assert found.buffer_bytes == sum(b.numel() * b.element_size() for b in model.buffers())
    assert found.grad_bytes == sum(p.grad.numel() * 4 for p in model.parameters() if p.grad is not None)


@pytest.mark.full
@pytest.mark.parametrize("mode", telling(["plain", "reentrant", "non-reentrant"], "non-reentrant"))
def test_agrees_with_mem_tracker(mode: str) -> None:
    inp = {"x": torch.zeros(8, 64, 64, requires_grad=True)}
    found = profile_memory(Layers(mode), inp, step)
    tracker = MemTracker()
    with FakeTensorMode():
        model, fake = Layers(mode), {"x": torch.zeros(8, 64, 64, requires_grad=True)}
        tracker.track_external(model, fake["x"])
        with tracker:
            step(model, fake)
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    held = {str(kind).rpartition(".")[2]: value for kind, value in peak.items()}
    # Sums of gradients of biases and attention need workspaces on a GPU.
    assert held["Total"] <= found.peak_bytes - MATMUL_MIB * MIB <= held["Total"] + 4 * MIB


def test_checkpointing_and_half_precision_need_less() -> None:
    inp = {"x": torch.zeros(64, 64, 64, requires_grad=True)}

    def activations(mode: str, dtype: torch.dtype | None = None) -> int:
        return profile_memory(Layers(mode), inp, step, dtype).activation_bytes - MATMUL_MIB * MIB

    plain = activations("plain")
    assert activations("non-reentrant") < plain / 2
    assert activations("plain", torch.bfloat16) < 0.7 * plain


def _by_closure(layer: nn.Module) -> Callable[..., Tensor]:
    original = layer.forward
    return lambda x: checkpoint(original, x, use_reentrant=False)  # type: ignore[no-any-return]


def _by_default(layer: nn.Module) -> Callable[..., Tensor]:
    def forward(x: Tensor, *, inner: Callable[..., Tensor] = layer.forward) -> Tensor:
        return checkpoint(inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    return forward


def _by_weak_reference(layer: nn.Module) -> Callable[..., Tensor]:
    def forward(reference: weakref.ref[nn.Module], x: Tensor) -> Tensor:
        found = reference()
        assert found is not None
        return checkpoint(partial(type(found).forward, found), x, use_reentrant=False)  # type: ignore[no-any-return]

    return partial(forward, weakref.ref(layer))


@pytest.mark.parametrize("patched", telling([_by_closure, _by_default, _by_weak_reference], "_by_closure"))
def test_forwards_put_in_the_place_of_others_are_the_copys(
    patched: Callable[[nn.Module], Callable[..., Tensor]],
) -> None:
    """And so are the modules that hooks know; the original's parameters may be anywhere by then."""
    usual = profile_memory(Layers("recomputed"), {"x": torch.randn(16, 64, 64)}, step)
    model, seen = Layers(), set()
    for layer in model.layers:
        layer.forward = patched(layer)  # type: ignore[method-assign]
        norm = layer.norm1

        def note(*_: Any, norm: Any = norm) -> None:
            seen.add(type(norm.weight.data))

        layer.register_forward_pre_hook(note)
    profile = profile_memory(model, {"x": torch.randn(16, 64, 64)}, step)
    assert (profile.activation_bytes, profile.flops) == (usual.activation_bytes, usual.flops)
    assert seen == {FakeTensor}


def test_grows_with_the_batch() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    sizes = [profile_memory(model, {"x": torch.zeros(n, 64)}, step).activation_bytes for n in (64, 128, 256, 512)]
    grown = [b - a for a, b in zip(sizes, sizes[1:], strict=False)]
    assert all(x > 0 for x in grown)
    assert 1.9 < grown[1] / grown[0] < 2.1


def test_gradients_stay_in_total_and_leave_the_activations() -> None:
    found = zoo_profile("llama")
    kept = [i.grad_bytes for i in found.timeline]
    assert kept == sorted(kept)
    assert kept[-1] >= found.grad_bytes
    assert {name for i in found.timeline for name in i.grads} == {s.fqn for s in param_specs(make("llama"))}
    last = found.timeline[-1]
    assert last.total_bytes - last.activation_bytes >= found.param_bytes + kept[-2]
    assert found.activation_bytes == max(i.activation_bytes for i in found.timeline)
    assert found.peak_bytes == max(i.total_bytes for i in found.timeline)


def test_gradients_that_are_added_up_and_dropped_count_once() -> None:
    def steps(model: nn.Module, inp: Mapping[str, Any]) -> None:
        for _ in range(3):
            step(model, inp)
        model.zero_grad()
        step(model, inp)

    found = profile_memory(nn.Linear(64, 64, bias=False), {"x": torch.zeros(2, 64)}, steps)
    kept = [i.grad_bytes for i in found.timeline]
    assert max(kept) == kept[-1] == 64 * 64 * 4
    assert 0 in kept[len(kept) // 2 :]
    assert [len(i.grads) for i in found.timeline].count(1) == 1  # complete with the last


def test_operators_are_counted_where_they_run() -> None:
    found = zoo_profile("llama", torch.bfloat16)
    assert found.flops == sum(i.flops for i in found.timeline)
    assert found.timeline[-1].is_backward
    forward, backward = (sum(i.flops for i in found.timeline if i.is_backward is b) for b in (False, True))
    assert 1.9 < backward / forward < 2.5
    norm = next(i for i in found.timeline if i.module.endswith("input_layernorm"))
    assert norm.flops == 0
    assert norm.moved_bytes > 0
    assert 4 <= norm.num_ops <= 8  # square, mean, add, rsqrt and two products


class _OnePair(nn.Module):
    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.operation = operation

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.weight.sum() + self.operation(left, right).detach().sum()


@pytest.mark.parametrize(
    ("shape", "operation", "is_scattered"),
    [
        ((64, 128), torch.mul, False),
        ((128,), torch.mul, False),  # whole rows
        ((64, 1), torch.mul, True),
        ((128, 64), lambda a, b: a * b.t(), True),
        ((64, 256), lambda a, b: a * b[:, ::2], True),
        ((), torch.mul, False),
        ((64, 128), lambda a, b: torch.cat([a, b], 1), True),
        ((64, 128), lambda a, b: torch.cat([a, b]), False),
        ((1, 64, 128), lambda a, b: a * b.as_strided((1, 64, 128), (7, 128, 1))[0], False),
    ],
)
def test_operands_that_lie_otherwise_than_the_result_take_longer(
    shape: tuple[int, ...], operation: Callable[[Tensor, Tensor], Tensor], is_scattered: bool
) -> None:
    inputs = {"left": torch.randn(64, 128), "right": torch.randn(shape)}
    found, nothing = (
        sum(
            i.moved_bytes
            for i in profile_memory(_OnePair(f), inputs, lambda model, inp: model(**inp).backward()).timeline
        )
        for f in (operation, lambda a, b: a[:1])
    )
    result = operation(*inputs.values())
    operands = min(inputs["right"].nbytes, result.nbytes) + inputs["left"].nbytes
    summed = result.nbytes - 4 * 128  # by `sum`, beside what it sums without the operation
    assert (found - nothing - summed) / (result.nbytes + operands) == pytest.approx(
        2.8 if is_scattered else 1.0, rel=0.01
    )


# What is left alone, and what can be profiled


def test_model_inputs_and_random_state_stay_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout())
    x = torch.randn(4, 8, requires_grad=True)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random_state = torch.get_rng_state()
    profile_memory(model, {"x": x}, step, torch.bfloat16)
    profile_memory(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(float(torch.rand(3)[0]))), {"x": x}, step)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert x.grad is None
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_models_on_meta_tied_and_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8, device="meta"), nn.Linear(8, 8, device="meta"))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    found = cuda_memory_profiling(model, {"x": torch.zeros(2, 8)}, step)
    assert found.param_bytes == 4 * (64 + 8 + 8)
    assert found.grad_bytes == 4 * (64 + 8)


def test_a_factory_allocates_nothing_and_gives_what_the_model_gives() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4096, 1 << 20, bias=False), nn.Linear(1 << 20, 4096, bias=False))  # 32 GiB

    found = profile_memory(build, {"x": torch.zeros(2, 4096)}, step)
    assert found.param_bytes == 2 * 4 * 4096 << 20
    assert profile_memory(make("gpt2"), {}, lambda m, i: ZOO["gpt2"].loss(m, 0).backward()) == profile_memory(
        ZOO["gpt2"].build, {}, lambda m, i: ZOO["gpt2"].loss(m, 0).backward()
    )


def test_constructors_may_read_what_is_tiny_and_draw_until_it_fits() -> None:
    def build() -> nn.Module:
        rates = [x.item() for x in torch.linspace(0, 0.1, 3)]
        model = nn.Sequential(*(nn.Dropout(rate) for rate in rates), nn.Linear(256, 64))
        nn.init.trunc_normal_(model[3].weight)
        return model

    assert profile_memory(build, {"x": torch.zeros(2, 256)}, step).param_bytes == 4 * (256 * 64 + 64)


def test_parameters_held_by_an_engine_stay_there() -> None:
    model = make("llama")
    expected = zoo_profile("llama")
    engine = ElixirModule(model, make_plan(model, placement_policy="cpu", chunk_size=8 * KIB))
    before = engine.full_state_dict()
    assert profile_memory(model, {}, lambda m, i: ZOO["llama"].loss(m, 0).backward()) == expected
    after = engine.full_state_dict()
    assert all(torch.equal(after[k], before[k]) for k in before)
    engine.close()


@pytest.mark.parametrize("name", telling(ZOO, "tied", "odd", "recurrent", "branching"))
def test_every_kind_of_model(name: str) -> None:
    found = zoo_profile(name, torch.bfloat16 if name not in ("conv", "recurrent") else None)
    assert found.peak_bytes > found.param_bytes + found.grad_bytes


class Padded(nn.Module):
    """Takes a mask along only where something is masked."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x if mask.all() else x * mask[:, None].to(x.dtype).exp()


@pytest.mark.parametrize("padding", [0, 5])
def test_values_of_masks_are_known(padding: int) -> None:
    model = nn.Sequential(nn.Linear(16, 16), Padded())
    mask = torch.ones(64, dtype=torch.bool)
    mask[:padding] = False
    inp = {"x": torch.zeros(64, 16), "mask": mask}
    found = profile_memory(model, inp, lambda m, i: m[1](m[0](i["x"]), i["mask"]).sum().backward())
    # The product, all() and sum(), the loss's own gradient; what is done with the mask.
    assert sum(i.num_ops for i in found.timeline if not i.is_backward) == 4 + (0 if padding == 0 else 3)
    assert int(mask.sum()) == 64 - padding


def read_value(model: nn.Module, inp: Mapping[str, Any]) -> None:
    model(inp["x"]).sum().item()


def fail(model: nn.Module, inp: Mapping[str, Any]) -> None:
    raise KeyError("labels")


def route(model: nn.Module, inp: Mapping[str, Any]) -> None:
    model(inp["x"][model(inp["x"])[:, 0].nonzero()])


@pytest.mark.parametrize(
    ("step_fn", "cause"),
    [(read_value, "DataDependent"), (fail, "KeyError: 'labels'"), (route, "DynamicOutputShape.*grouped_mm")],
)
def test_what_cannot_be_profiled_says_so(step_fn: Callable[[nn.Module, Mapping[str, Any]], None], cause: str) -> None:
    with pytest.raises(PlanError, match=f"step_fn cannot be profiled without real data .*{cause}"):
        profile_memory(nn.Linear(2, 2), {"x": torch.zeros(1, 2)}, step_fn)


def test_bad_factories_and_options_are_refused() -> None:
    inp = {"x": torch.zeros(1, 2)}

    def broken() -> nn.Module:
        raise ValueError("no such size")

    with pytest.raises(PlanError, match="the factory cannot be profiled .*ValueError: no such size"):
        profile_memory(broken, inp, step)
    with pytest.raises(PlanError, match="a model or a function that returns one, got int"):
        profile_memory(lambda: 3, inp, step)  # type: ignore[arg-type, return-value]
    with pytest.raises(PlanError, match="autocast=True needs dtype="):
        profile_memory(nn.Linear(2, 2), inp, step, torch.float32, autocast=True)


# Big models


@pytest.mark.parametrize("dtype", telling([torch.bfloat16, torch.float16, None], "torch.bfloat16"))
def test_routing_with_fixed_shapes_works(dtype: torch.dtype | None) -> None:
    """In fp32 and fp16 too, where torch's products of groups have no fake results of their own."""
    transformers = pytest.importorskip("transformers")
    need_experts_in_one_module()
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, num_local_experts=4,
    )  # fmt: skip
    tokens = torch.zeros(2, 16, dtype=torch.long)
    found = profile_memory(
        lambda: transformers.MixtralForCausalLM(config),
        {"tokens": tokens},
        lambda m, i: m(input_ids=i["tokens"], labels=i["tokens"]).loss.backward(),
        dtype,
    )
    assert found.grad_bytes == found.param_bytes
    experts = next(i for i in found.timeline if i.module.endswith("experts") and not i.is_backward)
    assert experts.flops >= 2 * 2 * 32 * 64 * 3 * 128  # two experts a token, three products


@pytest.mark.full
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_opt_175b_takes_seconds(is_checkpointed: bool) -> None:
    resource = pytest.importorskip("resource")
    transformers = pytest.importorskip("transformers")
    config = transformers.OPTConfig(
        num_hidden_layers=96, hidden_size=12288, num_attention_heads=96, ffn_dim=49152, vocab_size=50272,
        max_position_embeddings=2048, word_embed_proj_dim=12288, do_layer_norm_before=True,
    )  # fmt: skip

    def build() -> nn.Module:
        model = transformers.OPTForCausalLM(config).train()
        if is_checkpointed:
            model._set_gradient_checkpointing(
                gradient_checkpointing_func=lambda f, *a, **k: checkpoint(f, *a, use_reentrant=False, **k)
            )
        return model

    start_s = time.perf_counter()
    tokens = torch.zeros(1, 2048, dtype=torch.long)
    found = profile_memory(
        build,
        {"tokens": tokens},
        lambda m, i: m(input_ids=i["tokens"], labels=i["tokens"], use_cache=False).loss.backward(),
        torch.float16,
    )
    assert time.perf_counter() - start_s < 60
    unit = 1 if sys.platform == "darwin" else 1024
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit < 2 * 2**30
    assert found.param_bytes == pytest.approx(2 * 174.6e9, rel=1e-3)
    assert (found.activation_bytes < 20 * 2**30) is is_checkpointed
    assert found.flops > (7.5 if is_checkpointed else 5.8) * 174.6e9 * 2048


# What was measured


def _measured(name: str) -> dict[str, Any]:
    (path,) = RESULTS.glob("profiler_h200_*.json")
    return next(c for c in json.loads(path.read_text())["cases"] if c["name"] == name)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["gpt2-small", "gpt2-xl", "llama-1.1b autocast", "bert-large", "torch encoder", "torch encoder autocast"]
)
def test_predictions_stay_what_was_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(RESULTS.parent))
    benchmark = pytest.importorskip("profiler_accuracy")
    case = next(c for c in benchmark.CASES if c.name == name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers renames things
        predicted = benchmark.profile(case)["predicted_bytes"]
    assert -0.02 < predicted / _measured(name)["measured_bytes"] - 1 < 0.05


def test_cross_entropy_of_16_bits_under_autocast_casts_its_logarithms() -> None:
    def loss(model: nn.Module, inp: Mapping[str, Any]) -> None:
        F.cross_entropy(model(inp["x"]), inp["y"]).backward()

    inp = {"x": torch.zeros(4096, 8), "y": torch.zeros(4096, dtype=torch.long)}
    model = nn.Linear(8, 32768, bias=False)
    found = profile_memory(model, inp, loss, torch.bfloat16, autocast=True)
    size = 4096 * 32768
    at_least = 2 * size + 4 * size + 4 * size  # logarithms, in fp32, gradient of those
    assert at_least <= found.activation_bytes - 32 * MIB <= at_least + 2 * MIB


class WithTensor(nn.Module):
    """A tensor that is an attribute and neither parameter nor buffer, as `example_input_array` is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.example_input_array = torch.randn(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x + self.example_input_array)
        return result


def test_tensors_that_are_attributes_come_along() -> None:
    def step(model: nn.Module, inp: Any) -> None:
        model(inp["x"]).sum().backward()

    inp = {"x": torch.zeros(4, 8)}
    made, given = profile_memory(WithTensor, inp, step), profile_memory(WithTensor(), inp, step)
    assert made.param_bytes == given.param_bytes == 4 * 72
    assert made.peak_bytes == given.peak_bytes
