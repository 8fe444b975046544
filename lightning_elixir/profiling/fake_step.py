"""What a training step needs and does, without a GPU and without weights: one run on fake tensors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_elixir.core.checkpointing import switch_off
from lightning_elixir.core.compiled_modules import compiled_regions, run_copy_as_it_is
from lightning_elixir.errors import PlanError
from lightning_elixir.fused import FusedChoice, check_fused_choice, fuse_copy
from lightning_elixir.plan.profile import MemoryProfile
from lightning_elixir.profiling.block_visits import BlockVisits
from lightning_elixir.profiling.closures import rebind
from lightning_elixir.profiling.cuda_paths import CudaPaths
from lightning_elixir.profiling.kept_fp32 import KeepFp32, compute_in_fp32, kept_parameters
from lightning_elixir.profiling.known_values import KnownValues, is_knowable
from lightning_elixir.profiling.parameters import dtype_name
from lightning_elixir.profiling.step_recorder import AroundOperator, StepRecorder

__all__ = ["StepFn", "cuda_memory_profiling", "profile_memory"]

StepFn = Callable[[nn.Module, Mapping[str, Any]], object]
"""Runs forward and backward of one step on (model, inputs)."""

# Of a model's attributes these are not copied: data, and the items of containers that have more than this.
_DATA = (DataLoader, Dataset, Sampler)
_MOST_COPIED = 10_000
_MOST_COPIED_BYTES = 1 << 20
_DEEPEST = 4

_CURE = (
    "It must not read values (.item(), .cpu(), nonzero(), control flow on tensors) or move tensors to a device; where"
    " plans are searched, give non_model_bytes instead"
)
_ROUTING_CURE = (
    "Layers that loop over what was routed to each expert need an implementation with fixed shapes (transformers 5:"
    " experts_implementation='grouped_mm'). "
)


def profile_memory(
    model_or_factory: nn.Module | Callable[[], nn.Module],
    inp: Mapping[str, Any],
    step_fn: StepFn,
    dtype: torch.dtype | None = None,
    *,
    autocast: bool = False,
    keep_fp32: KeepFp32 = None,
    master_weights: bool = True,
    use_fused_kernels: FusedChoice = False,
    blocks: Collection[str] = (),
    stand_ins: Sequence[tuple[object, object]] = (),
    around_operator: AroundOperator | None = None,
) -> MemoryProfile:
    """What one training step needs on a GPU, and which parameters it needs when.

    The step runs once on fake tensors: nothing is computed and no memory is taken, on no device. What a GPU would do is
    told from the operators: torch's CUDA kernels for attention, dropout and norms, their workspaces, the rounding of
    its allocator. Figures are those of a data-centre GPU of compute capability 9.0.

    Neither model nor inputs nor random state change.

    Args:
        model_or_factory: A model on any device (`meta` included), or something that builds one; it builds fake tensors
            then, so models of any size can be described.
        inp: Inputs of one step: real tensors in any nesting. Their shapes and dtypes count, and the values of small
            integer ones (masks, lengths) where the model looks at them.
        step_fn: Called once with a copy of the model and stand-ins for the inputs; runs forward and backward.
        dtype: What parameters are cast to, and floating-point inputs too if it is a 16-bit one; None: as they are.
            Buffers stay as they are.
        autocast: The step runs under `torch.autocast("cuda", dtype)` over parameters of that dtype, as Lightning's
            `16-mixed` and `bf16-mixed` under this package; inputs are not cast then.
        keep_fp32: What stays in fp32 where `dtype` is a 16-bit one, as for `ElixirModule`.
        master_weights: Whether 16-bit parameters have an fp32 master; without, nothing stays in fp32 unasked.
        use_fused_kernels: As for `ElixirModule`. What was swapped in the model already is counted in any case.
        blocks: Names of modules of which `visits` is to tell what they save for backward. They keep all of it: what
            `gradient_checkpointing_enable` has switched on is off for them.
        stand_ins: (object, what the copy of the model has in its place), such as a trainer that the model knows.
        around_operator: Called for each operator of the step with the operator, its positional operands, and what runs
            it; gives its result.

    Raises:
        PlanError: `step_fn` or the factory fails without real values, `autocast` comes without a 16-bit dtype, or
            `keep_fp32` names what the model has not got, or no fused operator can be swapped in.
    """
    if autocast and (dtype is None or dtype.itemsize != 2):
        raise PlanError(f"autocast=True needs dtype=torch.float16 or torch.bfloat16, got {dtype}")
    check_fused_choice(use_fused_kernels)
    # Plain tensors that a module holds outside its buffers come along as they are.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # Copies of modules ask fake tensors for their address, to see whether there is one.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        memo = {id(one): stand_in for one, stand_in in stand_ins}
        model, compiled = _fake_model(
            model_or_factory,
            dtype,
            keep_fp32,
            memo,
            has_autocast=autocast,
            has_master=master_weights,
            use_fused_kernels=use_fused_kernels,
        )
        input_dtype = dtype if dtype is not None and dtype.itemsize == 2 and not autocast else None
        fake_inp = tree_map_only(Tensor, lambda t: _fake_input(t, input_dtype), inp)
        recorder = StepRecorder(around_operator)
        recorder.watch(model, compiled)
        switch_off(model, blocks)
        visits = BlockVisits(recorder, model, blocks)
        inputs = [t for t in tree_leaves(fake_inp) if isinstance(t, Tensor)]
        for tensor in inputs:
            recorder.hold(tensor)
        paths = CudaPaths(recorder.on_call, dtype if autocast else None)
        cpu_autocast = torch.autocast("cpu", dtype=dtype, cache_enabled=False) if autocast else nullcontext()
        try:
            with recorder, paths, cpu_autocast:
                step_fn(model, fake_inp)
        except Exception as error:  # whatever the user's code raises: here it means that it cannot be profiled
            raise _refusal("step_fn", error) from error
    profile = _summary(model, inputs, recorder)
    return replace(profile, visits=visits.found(len(profile.timeline)))


cuda_memory_profiling = profile_memory  # the ancestors' name


def _refusal(what: str, error: Exception) -> PlanError:
    routing = _ROUTING_CURE if isinstance(error, DynamicOutputShapeException) else ""
    return PlanError(f"{what} cannot be profiled without real data ({type(error).__name__}: {error}). {routing}{_CURE}")


def _summary(model: nn.Module, inputs: list[Tensor], recorder: StepRecorder) -> MemoryProfile:
    parameters = list(model.parameters())
    numels: dict[str, int] = {}
    for parameter in parameters:
        name = dtype_name(parameter.dtype)
        numels[name] = numels.get(name, 0) + parameter.numel()
    timeline = recorder.intervals()
    return MemoryProfile(
        dtype=max(numels, key=lambda name: numels[name], default="float32"),
        param_bytes=_total_bytes(parameters),
        buffer_bytes=_total_bytes(model.buffers()),
        grad_bytes=_total_bytes([p.grad for p in parameters if p.grad is not None]),
        input_bytes=_total_bytes(inputs),
        activation_bytes=max(i.activation_bytes for i in timeline),
        peak_bytes=recorder.peak_bytes,
        peak_module=recorder.peak_module,
        flops=sum(i.flops for i in timeline),
        timeline=timeline,
        written=tuple(recorder.written),
    )


def _total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# Fake models


def _fake_model(
    model_or_factory: nn.Module | Callable[[], nn.Module],
    dtype: torch.dtype | None,
    keep_fp32: KeepFp32,
    memo: dict[int, Any],
    *,
    has_autocast: bool,
    has_master: bool,
    use_fused_kernels: FusedChoice,
) -> tuple[nn.Module, frozenset[str]]:
    """A copy of the model whose tensors are fake ones on the CPU, and names of the modules that are compiled in the
    model; none is in the copy. To be called under the fake mode.

    Args:
        memo: Of `copy.deepcopy`: what the copy has in the place of others, by id.
    """
    model: object = model_or_factory
    if not isinstance(model, nn.Module):
        try:
            with KnownValues():
                model = model_or_factory()
        except Exception as error:
            raise _refusal("the factory", error) from error
    if not isinstance(model, nn.Module):
        raise PlanError(f"profile_memory needs a model or a function that returns one, got {type(model).__name__}")
    is_half = dtype is not None and dtype.itemsize == 2
    kept = kept_parameters(model, keep_fp32, has_autocast=has_autocast, has_defaults=is_half and has_master)
    if not is_half:
        kept = frozenset()
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in memo:
            fake = _fake_like(parameter, torch.float32 if fqn in kept else dtype)
            memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _fake_like(buffer, None)
    for module in model.modules():  # what is an attribute and nothing else, such as `example_input_array`
        for name, value in vars(module).items():
            if name == "dynamo_ctx":
                memo[id(value)] = value
            _note(value, memo)
    given = frozenset(memo)
    try:
        fake_model = copy.deepcopy(model, memo)
        rebind(memo, given)
    except Exception as error:
        raise _refusal("copying the model", error) from error
    if dtype is not None and is_half and not has_autocast:
        compute_in_fp32(fake_model, kept, dtype, "cpu")
    run_copy_as_it_is(fake_model)
    fuse_copy(fake_model, model, use_fused_kernels)
    entrances = {id(region.entrance) for region in compiled_regions(model)}
    return fake_model, frozenset(name for name, module in model.named_modules() if id(module) in entrances)


def _note(value: Any, memo: dict[int, Any], depth: int = 0) -> None:
    """Have deep copies make tensors into stand-ins, and share data, which may be larger than the model: large arrays,
    which cannot be written to there, and the items of long containers."""
    if id(value) in memo or isinstance(value, nn.Module):
        return
    is_container = isinstance(value, (list, tuple, set, dict))
    if isinstance(value, Tensor):
        memo[id(value)] = _fake_input(value, None)
    elif isinstance(value, torch.Generator):
        memo[id(value)] = _copy_of(value)
    elif hasattr(value, "__array_finalize__"):  # an array of numpy, which need not be there
        if value.nbytes > _MOST_COPIED_BYTES:
            memo[id(value)] = view = value.view()
            view.setflags(write=False)
    elif isinstance(value, _DATA):
        memo[id(value)] = value
    elif is_container and len(value) > _MOST_COPIED:
        memo[id(value)] = copy.copy(value)
    elif is_container and depth < _DEEPEST:
        for item in dict.values(value) if isinstance(value, dict) else value:
            _note(item, memo, depth + 1)


def _copy_of(generator: torch.Generator) -> torch.Generator:
    """One for the CPU, where the step on fake tensors draws, of the same state if that is for the CPU too. Under the
    fake mode `copy.deepcopy` would make it from a state without values."""
    with unset_fake_temporarily():
        if generator.device.type == "cpu":
            return generator.clone_state()
        return torch.Generator().manual_seed(generator.initial_seed())


def _fake_input(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A stand-in on the CPU: with values where models look at them, fake otherwise."""
    if not is_knowable(tensor):
        return _fake_like(tensor, dtype)
    with unset_fake_temporarily():
        return tensor.detach().to("cpu", copy=True)


def _fake_like(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A fake CPU tensor of this shape; floating-point ones in `dtype` if given."""
    kept = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=kept, device="cpu").requires_grad_(
        tensor.requires_grad and not isinstance(tensor, nn.Parameter)
    )
