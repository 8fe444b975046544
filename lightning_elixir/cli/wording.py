"""Refusals of the package in the words of the command: its options instead of Python's arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.units import parse_bytes

_OPTIONS = {
    "gpu_memory_limit": "--gpu-memory",
    "gpu_bytes": "--gpu-memory",
    "cpu_memory_limit": "--cpu-memory",
    "cpu_bytes": "--cpu-memory",
    "nvme_bytes": "--nvme-memory",
    "nvme_offload_dir": "--nvme-memory",
    "chunk_size": "--chunk-size",
    "keep_fp32": "--keep-fp32",
    "use_fused_kernels": "--use-fused-kernels",
    "ignored": "--ignored",
    "activations": "--activations",
    "placement_policy": "--policy",
    "precision": "--precision",
    "world_size": "--gpus",
    "sharding": "--sharding",
    "num_backwards": "--accumulate",
    "step_fn": "the training step",
}
# Options that are words, too: meant only where something is said of their value.
_WORDS = ("activations", "ignored", "precision", "sharding")
_PATTERNS = [name + r"(?=\s*=|:|\[|`| must\b)" if name in _WORDS else name for name in _OPTIONS]
# A whole name, with the "=" of an assignment. Not one of a parameter ("layers.chunk_size"), nor an option already.
_NAME = re.compile(rf"(?<![\w.-])({'|'.join(_PATTERNS)})(\s*=\s*|(?![\w-]|\.\w))")

# Advice that the command has no option for.
_USELESS = re.compile(r"; [^;.]*\bnon_model_bytes\b[^;.]*|\bnvme_offload_fraction, ")


def in_options(message: str) -> str:
    """A message with the options of `lightning-elixir plan` in it: `placement_policy="auto"` -> `--policy "auto"`."""
    message = _USELESS.sub("", message)
    return _NAME.sub(lambda match: _OPTIONS[match[1]] + (" " if match[2] else ""), message)


@contextmanager
def speaking_of_options() -> Iterator[None]:
    """Around profiling and planning: what they refuse is refused with `in_options` of the message.

    Raises:
        PlanError: Whose cause, if it is quoted, is quoted as it was: names in there are the user's own. Where the cause
            is a `PlanError` itself, such as of a step that gave no loss, it is raised instead: it says it all.
        CapacityError: Likewise.
    """
    try:
        yield
    except PlanError as error:
        if isinstance(error.__cause__, PlanError):
            raise error.__cause__ from None
        raise PlanError(_reworded(error)) from error
    except CapacityError as error:
        raise CapacityError(_reworded(error), resource=error.resource, lacking_bytes=error.lacking_bytes) from error


def _reworded(error: Exception) -> str:
    quoted = "" if error.__cause__ is None else str(error.__cause__)
    if not quoted:
        return in_options(str(error))
    before, quote, after = str(error).partition(quoted)
    return in_options(before) + quote + in_options(after)


def size_of(text: str | None, option: str, *, may_be_zero: bool = False) -> int | None:
    """Bytes that an option names; None if it was not given.

    Raises:
        PlanError: Not a size, or none at all; the message names the option.
    """
    if text is None:
        return None
    try:
        size = parse_bytes(text)
    except PlanError:
        raise PlanError(f"{option} takes bytes, or a size such as 64MiB, 40GiB or 1.5GB, got {text!r}") from None
    if size == 0 and not may_be_zero:
        raise PlanError(f"{option} must be more than 0, got {text!r}")
    return size
