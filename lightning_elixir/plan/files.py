"""JSON files that users name: plans, figures of a machine."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_elixir.errors import PlanError


def read_json(path: str | Path, kind: str, origin: str) -> object:
    """The content of a file.

    Args:
        path: The file.
        kind: What it should hold, in words.
        origin: A sentence that says what writes such files.

    Raises:
        PlanError: It cannot be read, or is no JSON; the message names it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot read the {kind} {path}: {error.strerror}. {origin}") from error
    except ValueError as error:  # no text; or a path with a zero in it
        raise PlanError(f"{path} is no {kind}: it is not JSON ({error}). {origin}") from error
    if not text.strip():
        raise PlanError(f"{path} is no {kind}: it is empty. {origin}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is no {kind}: it is not JSON ({error}). {origin}") from error
