"""`lightning-elixir consolidate`: one file out of a sharded checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lightning_elixir.checkpoint.consolidate import consolidate
from lightning_elixir.plan.units import parse_bytes


def run_consolidate(options: argparse.Namespace) -> int:
    """The command.

    Raises:
        PlanError: The output exists, or cannot hold what is asked for.
        StorageError: The checkpoint is damaged, or the output cannot be written.
    """
    folder = Path(options.folder)
    output = Path(options.output) if options.output else folder.with_name(f"{folder.name}.consolidated.ckpt")
    files = consolidate(
        folder,
        output,
        max_file_bytes=parse_bytes(options.max_file_size),
        weights_only=not options.trust,
        part=options.part,
    )
    for path in files:
        sys.stdout.write(f"{path}\n")
    return 0
