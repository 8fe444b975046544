"""Measured figures kept from run to run, one file for each machine and way of using it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning_elixir.core.cache import default_cache_dir
from lightning_elixir.plan.hardware import HardwareSpec

__all__ = ["HardwareCache", "default_cache_dir"]

log = logging.getLogger(__name__)


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

    def stored_at(self) -> datetime | None:
        """Local time at which the figures were stored; None if there are none."""
        if self.path is None:
            return None
        try:
            return datetime.fromtimestamp(self.path.stat().st_mtime)
        except OSError:
            return None

    def store(self, spec: HardwareSpec) -> bool:
        """Keep the figures. Readers see the old file or the new one, never a part.

        Returns:
            Whether they are kept.
        """
        if self.path is None:
            return False
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
            return False
        return True
