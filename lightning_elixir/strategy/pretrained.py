"""Models whose weights are in safetensors files: every rank reads its part, when there are chunks to read it into.

[Note: sources] `pretrained` builds the model with parameters on `meta`, finds for each its place in the files, and
leaves that with the parameter. The engine reads from there (`runtime/build.py`), so no process ever holds the whole
model. Where no engine is awaited, the same is done at once, one parameter after the other, and the model is an ordinary
one.

What the files lack gets values at once, on the first rank for good, drawn while all other parameters are on `meta` and
so neither change nor use up random numbers: those of transformers' `from_pretrained`. In another memory order, all that
lies between the first and the last element of a run is read. Whether an engine is awaited is known to the strategy's
init context and asked by a function that the user calls inside it: a `ContextVar` (`model_init.awaiting_engine`), the
only one, is what both see.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from lightning_elixir.checkpoint import Extent, StoredWeight, WeightFiles
from lightning_elixir.core.first_names import first_names
from lightning_elixir.errors import PlanError
from lightning_elixir.plan.prefixes import Prefix
from lightning_elixir.runtime.chunk import kept_stride
from lightning_elixir.runtime.sources import set_source
from lightning_elixir.strategy.model_init import awaits_engine, parameters_on_meta, replace_parameters

log = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)

# Names that norms had in old checkpoints, such as those of BERT.
_OLD_ENDINGS = {".gamma": ".weight", ".beta": ".bias"}


def pretrained(
    build: Callable[[], M],
    path: str | Path,
    *,
    missing: Literal["error", "initialize"] = "error",
    unexpected: Literal["error", "ignore"] = "error",
    rename: Callable[[str], str] | None = None,
    defer: bool | None = None,
) -> M:
    """A model with the weights that are in safetensors files, as transformers' `from_pretrained` gives it.

    In the `configure_model` of a module under `ElixirStrategy`, parameters are on `meta` when this returns, and each
    rank reads what it keeps of them when the engine is built: take parts of the model, tie, freeze and wrap them as you
    like, but do not look at values. Anywhere else (another strategy, a notebook) they are loaded at once; under
    `torch.device("meta")` nothing is.

    Args:
        build: Makes the model; it runs with parameters on `meta`, without memory for them. Buffers are real.
        path: A folder with `model.safetensors` or with `model.safetensors.index.json` and the files that it names, as
            `save_pretrained` writes them, or one of these files. Names are those of the model's state dict; the
            `base_model_prefix` of transformers' models may be there in one and lack in the other. Values are cast to
            the dtypes of the model.
        missing: What to do about parameters that the files lack: "error", or "initialize" them as transformers'
            `_init_weights`, or the `reset_parameters` of their modules, do it. With several ranks rank 0's values
            count. Buffers that the files lack are as `build` makes them.
        unexpected: What to do about tensors in the files that the model lacks: "error", or "ignore" them.
        rename: Name in the files -> name in the model, where they differ in other ways.
        defer: Leave the values in the files until there is an engine. None: where this runs in `configure_model` under
            `ElixirStrategy`. True is for models that are given to `ElixirModule`, or made in the `__init__` of a
            module; make their optimizer after `ElixirModule`, which replaces the parameters.

    Returns:
        What `build` returns.

    Raises:
        PlanError: There are no such files, or they do not fit the model: names or shapes, the message has the first.
            Or an option that does not exist.
        StorageError: A file is missing, damaged or cut off.
    """
    for option, value, choices in (
        ("missing", missing, ("error", "initialize")),
        ("unexpected", unexpected, ("error", "ignore")),
    ):
        if value not in choices:
            raise PlanError(f"{option}={value!r}: it can be {' or '.join(map(repr, choices))}")
    files = WeightFiles(Path(path))
    model, has_values = _built(build)
    places = _Match(model, files, rename)
    places.check(missing == "error", unexpected == "error")
    sources = {id(p): _FileSource(weight, p.dtype) for p, weight in places.parameters}
    if not has_values:
        _initialise(model, places.missing)
    # After that, for it may reset the statistics of norms.
    for buffer, weight in places.buffers:
        if not buffer.is_meta:
            buffer.copy_(_whole(weight, buffer))
    if (awaits_engine() if defer is None else defer) and not has_values:
        for parameter, _ in places.parameters:
            set_source(parameter, sources[id(parameter)])
        return model
    for parameter, weight in places.parameters:
        _load(model, parameter, weight)
    return model


@dataclass(frozen=True)
class _FileSource:
    """See `runtime/sources.py`."""

    weight: StoredWeight
    dtype: torch.dtype
    """Of the parameter when it was made."""
    shape: tuple[int, ...] | None = None
    """Of a part of it; None: all of it."""
    offsets: tuple[int, ...] = ()
    """Where that begins."""

    def read_run(self, stride: tuple[int, ...] | None, begin: int, target: Tensor, dtype: torch.dtype) -> None:
        extent = Extent(self.shape or self.weight.shape, stride, begin, target.numel(), self.offsets)
        self.weight.read_run(extent, target, (self.dtype, dtype))

    def part(self, shape: tuple[int, ...], offsets: tuple[int, ...]) -> _FileSource:
        return replace(self, shape=shape, offsets=offsets)


def _built(build: Callable[[], M]) -> tuple[M, bool]:
    """The model, and whether it had to be built for real."""
    try:
        with parameters_on_meta():
            model = build()
    except Exception as error:
        # Construction that looks at values fails without them; any other error comes again.
        log.warning("building the model for real, as a whole, since without values it failed: %s", error)
        return build(), True
    if _default_device() != "meta" and any(buffer.is_meta for buffer in model.buffers()):
        log.warning("building the model for real, as a whole, since buffers are computed from its parameters")
        return build(), True
    return model, False


def _default_device() -> str:
    return torch.get_default_device().type


# Names


@dataclass
class _Match:
    """What of a model is where in its files."""

    model: nn.Module
    files: WeightFiles
    rename: Callable[[str], str] | None
    parameters: list[tuple[nn.Parameter, StoredWeight]] = field(default_factory=list)
    buffers: list[tuple[Tensor, StoredWeight]] = field(default_factory=list)
    missing: dict[str, nn.Parameter] = field(default_factory=dict)
    missing_buffers: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        buffers = _persistent_buffers(self.model)
        found = self._find({*parameters, *buffers})
        aliases: dict[int, list[str]] = {}
        for name, parameter in parameters.items():
            aliases.setdefault(id(parameter), []).append(name)
        for names in aliases.values():  # tied ones are in the files once, under any of their names
            known = next((name for name in names if name in found), None)
            if known is None:
                self.missing[names[0]] = parameters[names[0]]
            else:
                self.parameters.append((parameters[known], found[known]))
        for name, buffer in buffers.items():
            if name in found:
                self.buffers.append((buffer, found[name]))
            else:
                self.missing_buffers.append(name)
        shapes = {name: tuple(tensor.shape) for name, tensor in [*parameters.items(), *buffers.items()]}
        self._reshaped = [
            f"{name} {list(weight.shape)} instead of {list(shapes[name])}"
            for name, weight in found.items()
            if weight.shape != shapes[name]
        ]

    def _find(self, wanted: set[str]) -> dict[str, StoredWeight]:
        """By name in the model."""
        found: dict[str, StoredWeight] = {}
        others: dict[str, StoredWeight] = {}
        for stored, weight in self.files.weights.items():
            name = stored if self.rename is None else self.rename(stored)
            (found if name in wanted else others)[name] = weight
        prefix = getattr(self.model, "base_model_prefix", "")
        # Such as rotary tables, which old files have for every layer.
        computed = {_end_of(name) for name, _ in self.model.named_buffers()} - {_end_of(name) for name in wanted}
        for name, weight in others.items():
            known = next((n for n in _other_names(name, prefix) if n in wanted and n not in found), None)
            if known is not None:
                found[known] = weight
            elif not (_end_of(name) in computed or self._is_expendable(name, "_keys_to_ignore_on_load_unexpected")):
                self.unexpected.append(name)
        return found

    def _is_expendable(self, name: str, attribute: str) -> bool:
        """Whether transformers' models say that nothing is wrong about it."""
        patterns: Iterable[str] = getattr(self.model, attribute, None) or ()
        return any(re.search(pattern, name) for pattern in patterns)

    def check(self, needs_all: bool, takes_all: bool) -> None:
        """Raises `PlanError` where files and model do not fit."""
        missing = [*self.missing, *self.missing_buffers]
        missing = [name for name in missing if not self._is_expendable(name, "_keys_to_ignore_on_load_missing")]
        told = []
        if needs_all and missing:
            told.append(f"they lack {first_names(missing)} (missing='initialize' draws values for what is lacking)")
        if takes_all and self.unexpected:
            told.append(f"the model lacks {first_names(self.unexpected)} (unexpected='ignore' leaves that out)")
        if self._reshaped:
            told.append(f"shapes differ: {first_names(self._reshaped)}")
        if told:
            raise PlanError(
                f"the weights in {self.files.path} do not fit {type(self.model).__name__}: {'; '.join(told)}"
            )


def _other_names(name: str, prefix: str) -> Iterator[str]:
    """What the model may call a tensor of the files: with and without the prefix of its base model."""
    ending = next((old for old in _OLD_ENDINGS if name.endswith(old)), None)
    names = [name] if ending is None else [name, name.removesuffix(ending) + _OLD_ENDINGS[ending]]
    for one in names:
        yield one
        if prefix:
            yield Prefix(prefix, is_taken_off=True).apply(one)
            yield Prefix(prefix).apply(one)


def _end_of(name: str) -> tuple[str, ...]:
    """The names of a tensor and of its module."""
    return tuple(name.split(".")[-2:])


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


# Values


def _whole(weight: StoredWeight, like: Tensor) -> Tensor:
    """The values of a tensor, in the dtype and memory order of `like`, in host memory."""
    stride = kept_stride(weight.shape, like.stride())
    numel = like.numel()
    run = torch.empty(numel, dtype=like.dtype, device="cpu")
    weight.read_run(Extent(weight.shape, stride, 0, numel), run)
    return run.view(weight.shape) if stride is None else run.as_strided(weight.shape, stride)


def _load(model: nn.Module, parameter: nn.Parameter, weight: StoredWeight) -> None:
    """Give it its values, for real."""
    if not parameter.is_meta:
        with torch.no_grad():
            parameter.copy_(_whole(weight, parameter))
    elif _default_device() != "meta":
        values = _whole(weight, parameter).to(torch.get_default_device())  # where `build` would have made it
        replace_parameters(model, {id(parameter): _with_values(parameter, values)})


def _with_values(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    new = nn.Parameter(values, requires_grad=parameter.requires_grad)
    if type(parameter) is not nn.Parameter:
        new.__class__ = type(parameter)
    vars(new).update(vars(parameter))
    return new


# Initialisation


def _initialise(model: nn.Module, missing: Mapping[str, nn.Parameter]) -> None:
    """Draw values for these parameters, and no others: the others are on `meta`, where drawing does nothing."""
    if not missing or _default_device() == "meta":
        return
    # Not a number until an initialiser has given it a value: they do not say what they left out.
    nothing = {id(p): _with_values(p, _nothing_like(p)) for p in missing.values()}
    replace_parameters(model, nothing)
    with torch.no_grad():
        _initialise_modules(model, {id(p) for p in model.parameters() if not p.is_meta}, None, set())
    left = [name for name in missing if _has_nan(model.get_parameter(name))]
    if left:
        raise PlanError(
            f"nothing initialises {first_names(left)}: their modules have no reset_parameters(). Build the model"
            " without them, and add them afterwards"
        )


def _nothing_like(parameter: Tensor) -> Tensor:
    return torch.full_like(parameter, torch.nan, device=torch.get_default_device())


def _has_nan(parameter: Tensor) -> bool:
    return not parameter.is_meta and bool(parameter.isnan().any())  # on `meta`: a rank that gets rank 0's values


def _initialise_modules(module: nn.Module, missing: set[int], owner: Any, done: set[int]) -> None:
    """Children first, as transformers does it: a module may scale what its children have drawn."""
    if id(module) in done or all(id(p) not in missing for p in module.parameters()):
        return
    done.add(id(module))
    if hasattr(module, "base_model_prefix") and callable(getattr(module, "_init_weights", None)):
        owner = module
    for child in module.children():
        _initialise_modules(child, missing, owner, done)
    if owner is not None:
        owner._init_weights(module)
    reset: Any = getattr(module, "reset_parameters", None)
    if callable(reset) and any(_has_nan(p) for p in module.parameters(recurse=False)):
        reset()
