"""Measured figures kept from run to run, one file for each machine and way of using it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning_elixir.core.cache import PrivateFolder, default_cache_dir
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
        self._stored_at_s: float | None = None
        self.path = None if folder is None else folder / f"hardware-{digest}.json"

    @staticmethod
    def is_empty(folder: Path | None) -> bool:
        """Whether nothing was ever kept there, whatever the machine."""
        return folder is None or next(folder.glob("hardware-*.json"), None) is None

    def load(self) -> HardwareSpec | None:
        """The figures of this machine; None if there are none that can be used."""
        if self.path is None:
            return None
        try:
            with PrivateFolder(self.path.parent) as folder:
                text, self._stored_at_s = folder.read(self.path.name)
            content = json.loads(text.decode("utf-8"))
            if content["identity"] != self._identity:
                raise ValueError("it is about another machine")
            return HardwareSpec.from_dict(content["hardware"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("the measured figures in %s cannot be used and are measured again: %s", self.path, error)
            return None

    def stored_at(self) -> datetime | None:
        """Local time at which the figures that were loaded had been stored; None if there are none."""
        return None if self._stored_at_s is None else datetime.fromtimestamp(self._stored_at_s)

    def store(self, spec: HardwareSpec) -> bool:
        """Keep the figures. Readers see the old file or the new one, never a part.

        Returns:
            Whether they are kept.
        """
        if self.path is None:
            return False
        text = json.dumps({"identity": self._identity, "hardware": spec.to_dict()}, indent=1) + "\n"
        try:
            with PrivateFolder(self.path.parent, make=True) as folder:
                folder.write(self.path.name, text.encode("utf-8"))
        except OSError as error:
            log.warning("the measured figures cannot be kept in %s: %s", self.path.parent, error)
            return False
        return True
