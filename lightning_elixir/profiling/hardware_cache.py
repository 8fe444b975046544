"""Measured figures kept from run to run, one file for each machine and way of using it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_elixir.plan.hardware import HardwareSpec

log = logging.getLogger(__name__)


def default_cache_dir() -> Path | None:
    """`lightning_elixir` in `$XDG_CACHE_HOME` or `~/.cache`; None where there is no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # the XDG specification has relative paths ignored
        return Path(given) / "lightning_elixir"
    try:
        return Path.home() / ".cache" / "lightning_elixir"
    except RuntimeError:
        return None


class HardwareCache:
    """One file in a folder. Whatever is wrong with file or folder costs a measurement, not the run.

    Args:
        folder: Made when something is stored; None: nothing is kept.
        identity: JSON-like; what the figures depend on.
    """

    def __init__(self, folder: Path | None, identity: Mapping[str, Any]) -> None:
        self._identity = json.loads(json.dumps(identity))
        digest = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()[:16]
        self.path = None if folder is None else folder / f"hardware-{digest}.json"

    def load(self) -> HardwareSpec | None:
        """The figures of this machine; None if there are none that can be used."""
        if self.path is None:
            return None
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["identity"] != self._identity:
                raise ValueError("it is about another machine")
            return HardwareSpec.from_dict(content["hardware"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("the measured figures in %s cannot be used and are measured again: %s", self.path, error)
            return None

    def store(self, spec: HardwareSpec) -> None:
        """Keep the figures. Readers see the old file or the new one, never a part."""
        if self.path is None:
            return
        text = json.dumps({"identity": self._identity, "hardware": spec.to_dict()}, indent=1) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=".hardware-")
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(name, self.path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            log.warning("the measured figures cannot be kept in %s: %s", self.path.parent, error)
