"""What the planner has to know of a model's parameters: specs in registration order, and which module touches which."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_elixir.core.checkpointing import keeps_what_it_recomputes
from lightning_elixir.core.compiled_modules import compiled_regions
from lightning_elixir.core.shells import held_as, layout_of, tensors_inside
from lightning_elixir.errors import PlanError
from lightning_elixir.patterns.cuts import cuts_of
from lightning_elixir.plan.activations import ModelBlock
from lightning_elixir.plan.types import DTYPE_BYTES, TRAINED_DTYPES, ParamSpec


def param_specs(
    model: nn.Module,
    compute_dtype: torch.dtype | None = None,
    keep_fp32: Collection[str] = (),
    ignored: Collection[str] = (),
) -> tuple[ParamSpec, ...]:
    """The model's parameters in registration order, each once.

    Args:
        model: On any device, `meta` and fake tensors included.
        compute_dtype: Dtype that every parameter will have, but for frozen ones of integers, 8-bit floats and complex
            numbers; None: each keeps its own.
        keep_fp32: Names of parameters that are computed with in fp32 all the same.
        ignored: Names of parameters that are left out.

    Returns:
        One spec a parameter; further names of a tied one are its `aliases`.

    Raises:
        PlanError: A parameter has no shape yet, is not a dense tensor of a supported dtype, trains and is not a
            floating-point one, is a tensor subclass without plain elements, or shares memory with another one. The
            message names them.
    """
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
        parameters[id(parameter)] = parameter
    left_out = frozenset(ignored)
    named = [(names[key], p) for key, p in parameters.items() if left_out.isdisjoint(names[key])]
    _refuse(
        "have no shape yet; run one batch through the model, or give the layers their sizes, before planning",
        [fqns[0] for fqns, p in named if isinstance(p, nn.parameter.UninitializedParameter)],
    )
    held = {fqns[0]: held_as(p) for fqns, p in named}
    _refuse(
        f"cannot be trained in chunks: parameters that train must be dense tensors of {', '.join(TRAINED_DTYPES)}."
        " Freeze others (requires_grad=False), or register them as buffers",
        [
            f"{fqns[0]} ({p.dtype}, {p.layout})"
            for fqns, p in named
            if dtype_name(held[fqns[0]][1]) not in (TRAINED_DTYPES if p.requires_grad else DTYPE_BYTES)
            or p.layout is not torch.strided
        ],
    )
    _refuse(
        "are DTensors, as parallelize_module() and fully_shard() make them, and chunks cut parameters between ranks"
        " themselves. Leave fully_shard() out; what parallelize_module() makes is taken by"
        " ElixirStrategy(tensor_parallel_size=...), in configure_model",
        [fqns[0] for fqns, p in named if type(p).__name__ == "DTensor" or type(p.data).__name__ == "DTensor"],
    )
    _refuse(
        "cannot be held in chunks: a tensor subclass with a __torch_dispatch__ of its own keeps its elements in its own"
        " way, and a chunk has plain ones. Replace it with a plain nn.Parameter of its values, or register it as a"
        " buffer if it is not trained: buffers stay as they are",
        [f"{fqns[0]} ({type(p).__name__})" for fqns, p in named if not has_plain_elements(p) and layout_of(p) is None],
    )
    _refuse(
        "are not quantised yet, as bitsandbytes does it when they move: call .to('cpu') or .to('cuda') of their module"
        " first",
        [fqns[0] for fqns, p in named if getattr(p, "bnb_quantized", None) is False and hasattr(p, "quant_state")],
    )
    _check_overlap([(fqns[0], inside) for fqns, p in named for inside in tensors_inside(p)])
    if compute_dtype is not None and dtype_name(compute_dtype) not in TRAINED_DTYPES:
        raise PlanError(f"compute dtype {compute_dtype} is not supported; known are {', '.join(TRAINED_DTYPES)}")
    kept = frozenset(keep_fp32)
    return tuple(
        ParamSpec(
            fqn=fqns[0],
            shape=held[fqns[0]][0],
            dtype=_dtype_in_chunk(held[fqns[0]][1], torch.float32 if kept.intersection(fqns) else compute_dtype),
            requires_grad=p.requires_grad,
            aliases=tuple(fqns[1:]),
            cuts=cuts_of(p),
        )
        for fqns, p in named
    )


def module_accesses(model: nn.Module, recomputed: Collection[str] = ()) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(module name, FQNs of the parameters that one forward of it touches directly), modules without any left out. Of a
    compiled module, all, and none of those below it.

    Tied parameters appear under the FQN that `param_specs` gives them.

    Args:
        model: Any.
        recomputed: Names of layers that are taken as compiled ones are: in backward they need all of their parameters
            at once (`recomputed_layers`).
    """
    fqn_of = {id(p): fqn for fqn, p in model.named_parameters()}
    regions = compiled_regions(model)
    layers = [model.get_submodule(name) for name in recomputed]
    whole = {id(region.entrance) for region in regions} | {id(layer) for layer in layers}
    below = {id(m) for region in regions for m in region.inside} | {id(m) for layer in layers for m in layer.modules()}
    left_out = below - whole
    accesses = []
    for name, module in model.named_modules():
        if id(module) in left_out:
            continue
        own = list(module.parameters(recurse=id(module) in whole))
        if isinstance(module, nn.MultiheadAttention):
            own += module.out_proj.parameters()  # one functional call takes the projection's parameters too
        if own:
            accesses.append((name, tuple(dict.fromkeys(fqn_of[id(p)] for p in own))))
    return tuple(accesses)


def recomputed_layers(model: nn.Module, blocks: Collection[ModelBlock]) -> tuple[str, ...]:
    """Names of the layers whose backward keeps all that it has computed again, parameters too, until it has used it.

    Args:
        model: Any.
        blocks: What is said of activations; of these the model recomputes nothing by itself.
    """
    fate_of = {block.name: block.fate for block in blocks}
    return tuple(
        name
        for name, module in model.named_modules()
        if (fate_of[name].is_recomputed if name in fate_of else keeps_what_it_recomputes(module))
    )


def norm_parameters(model: nn.Module, *, is_alone: bool) -> frozenset[str]:
    """Names of the parameters of norms that mixed precision computes with in fp32.

    Norms with running statistics work in the dtype of those, which stay fp32. The parameters of other norms are cast as
    all others are, unless autocast leaves them alone.

    Args:
        model: Any model.
        is_alone: An autocast is on that leaves norms alone (that of the CPU): 16-bit parameters would clash with fp32
            inputs, which torch refuses.
    """
    kinds: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._NormBase,)
    if is_alone:
        kinds = (*kinds, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    return frozenset(
        f"{name}.{own}" if name else own
        for name, module in model.named_modules()
        if isinstance(module, kinds)
        for own, _ in module.named_parameters(recurse=False)
    )


def _dtype_in_chunk(dtype: torch.dtype, wanted: torch.dtype | None) -> str:
    own = dtype_name(dtype)
    return own if wanted is None or own not in TRAINED_DTYPES else dtype_name(wanted)


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def has_plain_elements(tensor: Tensor) -> bool:
    """Whether its elements lie in its storage; fake tensors stand for those that do."""
    return isinstance(tensor, FakeTensor) or type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _refuse(reason: str, names: list[str]) -> None:
    if names:
        shown = ", ".join(names[:10]) + (f", ... ({len(names)} in all)" if len(names) > 10 else "")
        raise PlanError(f"{shown}: {reason}")


def _check_overlap(named: list[tuple[str, Tensor]]) -> None:
    """Raise if two distinct parameters share elements: in chunks they would drift apart without a word."""
    spans: dict[object, list[tuple[int, int, str, Tensor]]] = {}
    for fqn, tensor in named:
        if not tensor.numel():
            continue
        extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.is_meta or isinstance(tensor.data, FakeTensor):  # no addresses: compare inside one storage
            memory: object = tensor.untyped_storage()._cdata
            start = int(tensor.storage_offset()) * tensor.element_size()
        else:
            memory = tensor.device
            start = tensor.data_ptr()
        spans.setdefault(memory, []).append((start, start + int(extent) * tensor.element_size(), fqn, tensor))
    for group in spans.values():
        group.sort(key=lambda span: span[:2])
        active: list[tuple[int, int, str, Tensor]] = []
        for span in group:
            active = [other for other in active if other[1] > span[0]]
            for other in active:
                if other[2] != span[2] and _share_elements(other, span):
                    raise PlanError(
                        f"parameters {other[2]} and {span[2]} are distinct but share memory. Tie them by assigning one"
                        " nn.Parameter to both places, or give each its own memory (clone)"
                    )
            active.append(span)


def _share_elements(a: tuple[int, int, str, Tensor], b: tuple[int, int, str, Tensor]) -> bool:
    """Whether two tensors whose address ranges overlap have an element in common."""
    (a_start, a_end, _, first), (b_start, b_end, _, second) = a, b
    itemsize = first.element_size()
    if itemsize != second.element_size() or (b_start - a_start) % itemsize:
        return True
    if first.is_contiguous() and second.is_contiguous():
        return True
    start = min(a_start, b_start)
    # Interleaved views share a range and no element: mark one, look through the other.
    marks = torch.zeros((max(a_end, b_end) - start) // itemsize, dtype=torch.bool)
    marks.as_strided(first.shape, first.stride(), (a_start - start) // itemsize).fill_(True)
    return bool(marks.as_strided(second.shape, second.stride(), (b_start - start) // itemsize).any())
