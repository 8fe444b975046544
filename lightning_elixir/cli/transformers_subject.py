"""A model of transformers from its config alone. Nothing is downloaded."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_elixir.cli.shapes import SHAPES, shape_name, unknown_name
from lightning_elixir.cli.subject import Subject, backward, check_options, enable_checkpointing, key_values
from lightning_elixir.errors import PlanError

_DEFAULT_BATCH_SIZE = 8
_DEFAULT_SEQ_LEN = 1024
_POSITIONS = ("n_positions", "max_position_embeddings")
# What a config file says about its making, and not about the model.
_NOT_THE_MODEL = ("model_type", "transformers_version", "_name_or_path", "auto_map")


def transformers_subject(options: argparse.Namespace) -> Subject:
    """The model that `--model` and `--set` name, trained on tokens.

    Args:
        options: Of the command `plan`.

    Raises:
        PlanError: transformers is missing, the config cannot be used, or options of `--module`.
    """
    check_options(options)
    transformers = _transformers()
    transformers.logging.set_verbosity_error()  # advice for those who load weights
    config = _config(options.model, key_values(options.set, "--set"))
    seq_len = _seq_len(config, options.seq_len)
    model = _built(config, options.model)
    if options.checkpointing:
        enable_checkpointing(model)
    batch_size = options.batch_size or _DEFAULT_BATCH_SIZE
    tokens = torch.zeros(batch_size, seq_len, dtype=torch.long)
    inp = {"input_ids": tokens, "labels": tokens}
    if config.is_encoder_decoder:
        inp["decoder_input_ids"] = tokens

    def step(module: nn.Module, inp: Mapping[str, Any]) -> None:
        backward(module(**inp).loss, options.accumulate)

    path = Path(options.model)
    name = path.stem if options.model.endswith(".json") else path.resolve().name if path.is_dir() else options.model
    changes = f" with {' '.join(options.set)}" if options.set else ""
    return Subject(name + changes, model.train(), inp, step, batch_size, tokens.numel())


def check_name(name: str) -> None:
    """Raises `PlanError` where `--model` names nothing, before anything that takes time."""
    if shape_name(name) is None:
        _named(name)


def _transformers() -> Any:
    """The package, which is optional, and typed in some releases only."""
    if importlib.util.find_spec("transformers") is None:
        raise PlanError(
            "--model needs transformers: pip install transformers. Or use --module with a model of your own"
        )
    return importlib.import_module("transformers")


def _config(name: str, changes: Mapping[str, Any]) -> Any:
    model_type, content = _named(name)
    known = _transformers().CONFIG_MAPPING
    make = known[model_type]
    unknown = sorted(set(changes) - set(make().to_dict()) - set(getattr(make, "attribute_map", {})))
    if unknown:
        raise PlanError(f"--set: the config of {model_type} has no {', '.join(unknown)}")
    values = {key: value for key, value in content.items() if key not in _NOT_THE_MODEL}
    try:
        config = make(**{**values, **changes})
    except Exception as error:  # whatever its checks raise
        raise PlanError(f"the config of {name} cannot be used ({type(error).__name__}: {error})") from error
    config.use_cache = False  # keys and values for generation, of no use in training
    return config


def _named(name: str) -> tuple[str, Mapping[str, Any]]:
    """The model type, and the entries of the config, that a name stands for: a known shape, a config file or its
    folder, a model type, or a class of transformers.

    Raises:
        PlanError: There is no such model, or the file is no config.
    """
    path = Path(name)
    if name.endswith(".json") or path.is_dir():
        return _in_file(path / "config.json" if path.is_dir() else path)
    shape = shape_name(name)
    if shape is not None:
        return SHAPES[shape]
    known = {other.lower(): other for other in _transformers().CONFIG_MAPPING}
    if name.lower() in known:
        return known[name.lower()], {}
    # A class of the library, such as LlamaForCausalLM; an Auto class says nothing of the model.
    config = getattr(getattr(_transformers(), name, None) if name.isidentifier() else None, "config_class", None)
    model_type = getattr(config, "model_type", None)
    if model_type in known:
        return str(model_type), {"architectures": [name]}
    raise PlanError(unknown_name(name, known))


def _in_file(path: Path) -> tuple[str, Mapping[str, Any]]:
    content = _file_content(path)
    model_type = content.get("model_type")
    if not isinstance(model_type, str):
        raise PlanError(f"{path} has no model_type: it is not the config of a transformers model")
    known = {other.lower(): other for other in _transformers().CONFIG_MAPPING}
    if model_type.lower() not in known:
        raise PlanError(f"{path} is of model type {model_type!r}, which this transformers does not know: use --module")
    return known[model_type.lower()], content


def _file_content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise PlanError(f"{path} is not the config of a transformers model")
    return content


def _seq_len(config: Any, asked: int | None) -> int:
    """Tokens of a sample: no more than a model with learned positions knows, which a run without values would not
    notice."""
    most = next((value for key in _POSITIONS if isinstance(value := getattr(config, key, None), int)), None)
    if asked is None:
        return min(_DEFAULT_SEQ_LEN, most or _DEFAULT_SEQ_LEN)
    if most is not None and asked > most:
        key = next(key for key in _POSITIONS if getattr(config, key, None) == most)
        raise PlanError(f"--seq-len {asked} is more than the model's {key} ({most}): add --set {key}={asked}")
    return asked


def _built(config: Any, name: str) -> Any:
    transformers = _transformers()
    # The architecture that a config file names, else one with a language model's head.
    named = [getattr(transformers, text, None) for text in config.architectures or ()]
    makers = [cls._from_config for cls in named if cls is not None]
    kinds = (
        ("AutoModelForSeq2SeqLM",) if config.is_encoder_decoder else ("AutoModelForCausalLM", "AutoModelForMaskedLM")
    )
    makers += [getattr(transformers, kind).from_config for kind in kinds]
    refused = ""
    for make in makers:
        try:
            with torch.device("meta"):
                model = make(config, dtype=torch.float32)
        except ValueError as error:  # no model of this kind for this config
            refused = refused or str(error).partition("\n")[0]
        else:
            model.tie_weights()  # transformers 5.0 does not tie on `meta`
            return model
    raise PlanError(f"{name} is no language model that can be built from its config ({refused}): use --module")
