"""Where files that may be made again are kept from run to run."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path | None:
    """`lightning_elixir` in `$XDG_CACHE_HOME` or `~/.cache`; None where there is no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # the XDG specification has relative paths ignored
        return Path(given) / "lightning_elixir"
    try:
        return Path.home() / ".cache" / "lightning_elixir"
    except RuntimeError:
        return None
