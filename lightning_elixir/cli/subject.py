"""The model that a plan is made for, one batch of it, and how a training step runs on them."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_elixir._lightning import LightningModule
from lightning_elixir.errors import PlanError

_OPTIONS_OF = {"model": ("--set", "--batch-size", "--seq-len"), "module": ("--init", "--batch")}

StepFn = Callable[[nn.Module, Mapping[str, Any]], object]


@dataclass(frozen=True)
class Subject:
    """What `profile_memory` needs, and what one step is worth."""

    name: str
    model: nn.Module
    """On the meta device."""
    inp: Mapping[str, Any]
    """Real tensors of one micro-batch of one rank."""
    step_fn: StepFn
    num_samples: int | None
    num_tokens: int | None
    """Of that micro-batch, where it has such a thing."""
    remarks: tuple[str, ...] = ()
    """What was assumed, for people."""
    may_guess_values: bool = False
    """Whether the step reads numbers, to log or to check them, where there are none."""


def module_subject(options: argparse.Namespace) -> Subject:
    """A module of the user's own, from `--module`, `--init` and `--batch`.

    Args:
        options: Of the command `plan`.

    Raises:
        PlanError: Something cannot be imported, built without memory, or has no batch; or options of `--model`.
    """
    check_options(options)
    make = _imported(options.module, "--module")
    arguments = key_values(options.init, "--init")
    model = _built(make, arguments, options.module)
    if options.checkpointing:
        enable_checkpointing(model)
    name, is_lightning = type(model).__name__, isinstance(model, LightningModule)
    run: Callable[[nn.Module, Any], Tensor] = _training_step if is_lightning else _forward_step
    remarks: tuple[str, ...] = ()
    if options.batch is not None:
        batch = _given_batch(options.batch)
    else:
        batch = _example_batch(model)
        if is_lightning:
            run = _explaining_stand_in(run)
            remarks = (
                f"a training batch is like example_input_array of {name}, which is what forward takes;"
                " --batch FILE.py:FUNCTION gives a real one",
            )
    samples, tokens = _size_of(batch)

    def step(module: nn.Module, inp: Mapping[str, Any]) -> None:
        backward(run(module, inp["batch"]), options.accumulate)

    return Subject(name, model.train(), {"batch": batch}, step, samples, tokens, remarks, may_guess_values=True)


def check_options(options: argparse.Namespace) -> None:
    """Refuse options that would do nothing, since they belong to the other of `--model` and `--module`.

    Raises:
        PlanError: There are such.
    """
    used, other = ("model", "module") if options.module is None else ("module", "model")
    idle = [option for option in _OPTIONS_OF[other] if getattr(options, option[2:].replace("-", "_"))]
    if idle:
        raise PlanError(f"{', '.join(idle)}: only with --{other}; with --{used} use {', '.join(_OPTIONS_OF[used])}")


def key_values(items: Sequence[str], option: str) -> dict[str, Any]:
    """`["a=1", "b=x"]` -> `{"a": 1, "b": "x"}`: values are JSON where they can be.

    Raises:
        PlanError: An item without `=`.
    """
    found = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise PlanError(f"{option} takes KEY=VALUE, got {item!r}")
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


def _imported(place: str, option: str) -> Callable[..., Any]:
    """What `package.module:name` or `path/to/file.py:name` names."""
    where, colon, name = place.rpartition(":")
    if not colon or not where:
        raise PlanError(f"{option} takes package.module:Name or path/to/file.py:Name, got {place!r}")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:  # whatever the user's code raises
        raise PlanError(f"{option} {place}: importing it failed ({type(error).__name__}: {error})") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise PlanError(f"{option} {place}: {where} has no class or function {name}")
    return found  # type: ignore[no-any-return]


def _from_file(path: Path) -> Any:
    if not path.exists():
        raise PlanError(f"no file {path}")
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise PlanError(f"{path} is not Python")
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as if the file were run: it may import its neighbours
    sys.modules[path.stem] = module  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module


def _built(make: Callable[..., Any], arguments: Mapping[str, Any], place: str) -> nn.Module:
    try:
        with torch.device("meta"):
            model = make(**arguments)
            if isinstance(model, LightningModule):
                model.configure_model()
    except Exception as error:  # whatever the user's code raises
        raise PlanError(
            f"{place} cannot be built without memory ({type(error).__name__}: {error}). It is built under"
            " torch.device('meta'): values cannot be read there, and weights cannot be loaded. --init KEY=VALUE gives"
            " it arguments"
        ) from error
    if not isinstance(model, nn.Module):
        raise PlanError(f"{place} gave a {type(model).__name__}, not a torch module")
    return model


def enable_checkpointing(model: nn.Module) -> None:
    """Turn it on in the outermost submodules that know how (those of transformers).

    Raises:
        PlanError: None of them does.
    """
    names: list[str] = []
    for name, module in model.named_modules():
        # The second is its name before transformers 5.
        enable = getattr(module, "activation_checkpointing_enable", None) or getattr(
            module, "gradient_checkpointing_enable", None
        )
        if callable(enable) and not any(name.startswith(f"{outer}." if outer else "") for outer in names):
            try:
                enable()
            except ValueError as error:
                raise PlanError(f"--checkpointing: {error}") from error
            names.append(name)
    if not names:
        raise PlanError(
            "--checkpointing turns it on in models of transformers; this module has none of them: turn it on in the"
            " module itself (--init KEY=VALUE), and leave --checkpointing out"
        )


# The batch


def _given_batch(place: str) -> Any:
    make = _imported(place, "--batch")
    try:
        return make()
    except Exception as error:  # whatever the user's code raises
        raise PlanError(f"--batch {place} failed ({type(error).__name__}: {error})") from error


def _example_batch(model: Any) -> Any:
    example = getattr(model, "example_input_array", None)
    if example is None:
        raise PlanError(
            f"what does a batch of {type(model).__name__} look like? Give --batch path/to/file.py:function, a function"
            " that returns one, or set example_input_array in the module"
        )
    model.example_input_array = None  # without values it could not be copied with the model
    # Made where the module was; only shapes and dtypes count.
    return tree_map_only(Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype) if t.is_meta else t, example)


def _size_of(batch: Any) -> tuple[int | None, int | None]:
    """(samples, tokens): the first length of the first tensor; the elements of `input_ids`, or else of the first tensor
    if it is a table of integers."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not tensors:
        return None, None
    first = tensors[0]
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if tokens is None and first.dim() == 2 and not first.is_floating_point():
        tokens = first
    return int(first.shape[0]), None if tokens is None else int(tokens.numel())


# The step


def backward(loss: Tensor, num_backwards: int) -> None:
    """Backward of a loss, of so many before a step, with all operators of the Trainer's."""
    loss = loss / num_backwards
    loss.detach().clone()  # for logs
    torch.autograd.backward(loss)


def _training_step(module: nn.Module, batch: Any) -> Tensor:
    if not isinstance(module, LightningModule):
        raise PlanError(f"{type(module).__name__} is no LightningModule")
    for name in ("log", "log_dict"):  # there is no Trainer that could take it
        object.__setattr__(module, name, _ignore)
    takes_index = len(inspect.signature(module.training_step).parameters) > 1
    result: Any = module.training_step(*(batch, 0) if takes_index else (batch,))
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise PlanError(f"training_step of {type(module).__name__} gave no loss, but {type(result).__name__}")
    return loss


def _explaining_stand_in(run: Callable[[nn.Module, Any], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    """`run` over an `example_input_array` in the place of a batch: where they are shaped differently, errors say so."""

    def step(module: nn.Module, batch: Any) -> Tensor:
        try:
            return run(module, batch)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            if isinstance(error, PlanError):
                raise
            name = type(module).__name__
            raise PlanError(
                f"training_step of {name} failed ({type(error).__name__}: {error}) on example_input_array, which stands"
                " in for a training batch: if that looks different, give --batch path/to/file.py:function, a function"
                " that returns one"
            ) from error

    return step


def _ignore(*arguments: object, **options: object) -> None:
    """In the place of `LightningModule.log`."""


def _forward_step(module: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        result = module(**batch)
    else:
        result = module(*batch) if isinstance(batch, (tuple, list)) else module(batch)
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not outputs:
        raise PlanError(f"nothing that {type(module).__name__} returns depends on its parameters")
    return torch.stack([output.float().sum() for output in outputs]).sum()
