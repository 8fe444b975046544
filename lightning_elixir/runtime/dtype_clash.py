"""Where a user's forward fails because a parameter is in 16 bits (or is not), the error says so, and what to do.

[Note: clashes of precision] Under plain autocast parameters are in fp32, so code that switches autocast off for a layer
(`layer(h.float())`), or that calls what has no 16-bit form (`torch.slogdet`), works there and fails here: parameters
live in 16 bits beside an fp32 master. torch's words then speak of dtypes that the user has never chosen. We add ours to
the error itself, so that it keeps its type, and code that catches it still does.

They must be true. So parameters are named only where the failing call has them among its operands, as the source line
tells, or where torch says that there is no 16-bit form and the function reads them. Anything else stays as it is. With
no fp32 master (`bf16-true`) 16 bits are what the user has chosen: named are parameters that an option has left in fp32
(`keep_fp32`, `ignored`) and that meet 16 bits.

What we do not do is to give a layer an fp32 copy of its 16 bits where it is called outside of autocast: it would run,
with weights rounded to 16 bits where plain autocast has all of them, and nothing would tell.
"""

from __future__ import annotations

import ast
import linecache
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_elixir.errors import ElixirError
from lightning_elixir.runtime.chunk import Chunk

log = logging.getLogger(__name__)

_ABOUT_DTYPES = re.compile(
    r"d?types?\b|promoting|not implemented for|not supported|expected a tensor with|expected both inputs", re.IGNORECASE
)
# Some name no dtype that they met.
_HALF = re.compile(
    r"bfloat16|float16|\bhalf|mixed dtype|self\.dtype to be equal to|must be either float or double", re.IGNORECASE
)
_NO_HALF_FORM = re.compile(
    r"not implemented for|not supported|unsupported|expected a tensor with|float (and|or) double", re.I
)
# Indices that are no integers, fp64 inputs: plain autocast would not run with them either.
_OTHER_CAUSE = re.compile(r"\b(Long|Int|Byte|Bool)\b|\bindices\b|(got|found).*\b(double|complex\w*)\b", re.IGNORECASE)
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_MOST_SHOWN = 4
_BETWEEN_STEPS = (
    "; or pass copies of them in float32 (`.float()`). For averages of weights: lightning_elixir.ElixirWeightAveraging,"
    " or torch's AveragedModel with avg_fn= in the place of multi_avg_fn=, which takes both dtypes"
)


def explain_dtype_clash(
    error: BaseException,
    chunks: Sequence[Chunk],
    module: nn.Module,
    ignored: Collection[str],
    *,
    has_master: bool,
    is_between_steps: bool = False,
) -> None:
    """Add to an error what precision has to do with it, where that is known; other errors stay as they are.

    Args:
        error: With its traceback.
        chunks: Of the engine in whose forward, or between whose steps, it came up, which computes in 16 bits.
        module: The engine's.
        ignored: Names of the parameters that the user has left out of the plan's chunks.
        has_master: Whether parameters of 16 bits have a master in fp32.
        is_between_steps: Whether it came up outside of forward and backward.
    """
    if not isinstance(error, (RuntimeError, ValueError)) or isinstance(error, ElixirError):
        return
    if not error.args or not isinstance(error.args[0], str):
        return
    message = error.args[0]
    is_told = "This is about precision" in message
    if is_told or not _ABOUT_DTYPES.search(message) or not _HALF.search(message) or _OTHER_CAUSE.search(message):
        return
    try:
        # What is looked at here is not the user's doing.
        with torch._C.DisableTorchFunctionSubclass():
            words = _words(message, error.__traceback__, _Parameters(chunks, module, ignored), module, has_master)
    except Exception:  # the user's own error is what counts
        log.debug("no more can be said about a clash of dtypes", exc_info=True)
        return
    if words and is_between_steps and has_master:
        words = f"{words}{_BETWEEN_STEPS}"
    if words:
        error.args = (f"{message.rstrip('.')}. {words}", *error.args[1:])


def _words(
    message: str, trace: TracebackType | None, managed: _Parameters, module: nn.Module, has_master: bool
) -> str | None:
    has_no_half_form = _NO_HALF_FORM.search(message) is not None
    frames: list[tuple[FrameType, int]] = []
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lasti))
        trace = trace.tb_next
    found: list[str] = []
    dtypes: set[torch.dtype] = set()
    is_operand = True
    for frame, instruction in reversed(frames):
        operands = list(_operands(frame, instruction))
        found = found or managed.names_in(operands)
        dtypes |= {value.dtype for value in operands if isinstance(value, Tensor)}
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            if not found and has_no_half_form:
                found, is_operand = managed.names_in(_read_by(frame)), False
            break  # further out the operands are those of another call
        layer = frame.f_locals.get("self")
        if isinstance(layer, nn.Module) and any(True for _ in layer.parameters(recurse=False)):
            found = managed.names_in(layer.parameters())  # a layer of torch's works in one dtype
            break
    is_half_of_two_kinds = dtypes.issuperset((torch.float16, torch.bfloat16))
    if is_half_of_two_kinds or not dtypes.isdisjoint((torch.float64, torch.complex64, torch.complex128)):
        return None  # plain autocast would not run with these either
    half = [name for name in found if managed.is_half(name)]
    if half and has_master:
        dtype = managed.dtypes[half[0]]
        what = f"{_listed(half)} {'is' if len(half) == 1 else 'are'} in {dtype}"
        if is_operand:
            says = f"under mixed precision {what} here, while plain PyTorch's autocast leaves parameters in float32"
        else:
            says = (
                f"under mixed precision {what} here, so what is made from {'it' if len(half) == 1 else 'them'} may be"
            )
        return f"This is about precision: {says}. To keep float32: keep_fp32={_cure(half, module)}"
    kept = [name for name in found if managed.dtypes[name] == "float32"]
    if kept and not has_no_half_form and not dtypes.isdisjoint((torch.bfloat16, torch.float16)):
        return f"This is about precision: {_of_kept(kept, half, managed, module, has_master)}"
    return None


def _of_kept(
    kept: Sequence[str], half: Sequence[str], managed: _Parameters, module: nn.Module, has_master: bool
) -> str:
    """What to say of parameters in fp32 that meet 16 bits.

    Args:
        kept: Their names.
        half: Names of parameters in 16 bits that they meet.
        managed: Knows them.
        module: The engine's.
        has_master: See `explain_dtype_clash`.
    """
    is_one = len(kept) == 1
    option = " and ".join(dict.fromkeys("ignored" if name in managed.ignored else "keep_fp32" for name in kept))
    says = f"{_listed(kept)} {'stays' if is_one else 'stay'} in float32 ({option}), and {'meets' if is_one else 'meet'}"
    if half:
        dtype = managed.dtypes[half[0]]
        return (
            f"{says} {_listed(half)} in {dtype} here. For one dtype: keep_fp32={_cure(half, module)} as well, or leave"
            f" {_listed(kept)} out of {option}"
        )
    other = "leave autocast on" if has_master else f"leave {'it' if is_one else 'them'} out of {option}"
    return f"{says} 16 bits here: pass float32 (`.float()`), or {other}"


class _Parameters:
    """Names and dtypes of what the chunks hold, and of frozen parameters that are in no chunk.

    Args:
        chunks: Of one engine.
        module: The engine's.
        ignored: Names of what is ignored.
    """

    def __init__(self, chunks: Sequence[Chunk], module: nn.Module, ignored: Collection[str]) -> None:
        self.ignored = ignored
        beside = {name: p for name, p in module.named_parameters() if name in ignored}
        self.dtypes = {name: str(p.dtype).removeprefix("torch.") for name, p in beside.items()}
        self.dtypes |= {m.fqn: c.spec.dtype for c in chunks for m in c.spec.members}
        self._names = {id(p): name for name, p in beside.items()}
        self._names |= {id(p): m.fqn for c in chunks for p, m in zip(c.parameters, c.spec.members, strict=True)}
        self._by_storage = {c.storage_key: c for c in chunks}

    def is_half(self, name: str) -> bool:
        """Whether the engine has it in 16 bits: what is ignored has the dtype that the user gave it."""
        return self.dtypes[name] in ("bfloat16", "float16") and name not in self.ignored

    def names_in(self, values: Iterable[object]) -> list[str]:
        """Of the parameters among these, and of those that these are views of; each once."""
        names = (self._name_of(value) for value in values if isinstance(value, Tensor))
        return list(dict.fromkeys(name for name in names if name is not None))

    def _name_of(self, tensor: Tensor) -> str | None:
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        if tensor.layout is not torch.strided or tensor.is_meta:
            return None
        chunk = self._by_storage.get(tensor.untyped_storage()._cdata)
        if chunk is None:
            return None
        return chunk.spec.members[chunk.member_at(int(tensor.storage_offset()))].fqn


def _operands(frame: FrameType, instruction: int) -> Iterator[object]:
    """The values of the names and attributes in the expression that a frame was at, as far as the source is there."""
    lines = next(islice(frame.f_code.co_positions(), instruction // 2, None), None)
    if lines is None:
        return
    first, last, start, end = lines
    if first is None or last is None or start is None or end is None:
        return
    source = [linecache.getline(frame.f_code.co_filename, n).encode() for n in range(first, last + 1)]
    source[-1] = source[-1][:end]  # of the last line first, which may be the first
    source[0] = source[0][start:]
    try:
        tree = ast.parse(b"(" + b"".join(source) + b")", mode="eval")
    except (SyntaxError, ValueError):
        return
    yield from _values(tree.body, frame.f_locals)


def _values(node: ast.AST, names: Mapping[str, Any]) -> Iterator[object]:
    value = _value(node, names)
    if isinstance(value, (list, tuple, nn.ParameterList)):
        yield from value
    elif value is not None:
        yield value
    else:
        for child in ast.iter_child_nodes(node):
            yield from _values(child, names)


def _value(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """Of a chain such as `self.layers[0].weight`, without running anything of the user's; None of everything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        return _attribute(_value(node.value, names), node.attr)
    if isinstance(node, ast.Subscript):
        base = _value(node.value, names)
        index = node.slice.value if isinstance(node.slice, ast.Constant) else _value(node.slice, names)
        if isinstance(base, (list, tuple, nn.ModuleList, nn.Sequential, nn.ParameterList)) and isinstance(index, int):
            return base[index] if -len(base) <= index < len(base) else None
        if isinstance(base, (dict, nn.ModuleDict, nn.ParameterDict)) and isinstance(index, str):
            return base[index] if index in base else None  # noqa: SIM401  # nn.ModuleDict has no get
    return None


def _attribute(base: Any, name: str) -> Any:
    if not isinstance(base, nn.Module):
        return getattr(base, "__dict__", {}).get(name)
    for table in (base._parameters, base._buffers, base._modules, vars(base)):
        if name in table:
            return table[name]
    parametrizations = base._modules.get("parametrizations")
    if isinstance(parametrizations, nn.ModuleDict) and name in parametrizations:
        return list(parametrizations[name].parameters())
    return None


def _read_by(frame: FrameType) -> Iterator[object]:
    """The own parameters of the module whose method a frame is, as far as the method names them."""
    module = frame.f_locals.get("self")
    if isinstance(module, nn.Module):
        for name in frame.f_code.co_names:
            value = _attribute(module, name)
            yield from value if isinstance(value, (list, nn.ParameterList)) else (value,)


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:_MOST_SHOWN])
    if len(names) > _MOST_SHOWN:
        return f"{', '.join(shown)} and {len(names) - _MOST_SHOWN} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _cure(names: Sequence[str], module: nn.Module) -> str:
    """What to write: the module that has these parameters, where it has no others; else their own names. Of norms there
    are many in a model, and what goes for one goes for all of them."""
    paths = [name.split(".")[:-1] for name in names]
    common = [same[0] for same in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    parent = ".".join(common)
    if parent:
        owner = module.get_submodule(parent)
        if isinstance(owner, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
            return f"[torch.nn.{next(c.__name__ for c in type(owner).__mro__ if c.__module__.startswith('torch.nn.'))}]"
        if {f"{parent}.{own}" for own, _ in owner.named_parameters()}.issubset(names):
            return repr([parent])
    return repr(list(names))
