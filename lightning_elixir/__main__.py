"""`python -m lightning_elixir` is the command `lightning-elixir`."""

from __future__ import annotations

import sys

from lightning_elixir.cli import main

if __name__ == "__main__":
    sys.exit(main())
