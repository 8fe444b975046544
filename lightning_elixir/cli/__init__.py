"""The command `lightning-elixir`. Importing this loads neither torch nor Lightning: its help is there at once."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

from lightning_elixir.cli.options import TRAINING_COMMANDS, make_parser
from lightning_elixir.cli.shapes import refuse_unknown
from lightning_elixir.errors import CapacityError, ElixirError, PlanError

__all__ = ["main"]

FITS, FITS_NOT, UNUSABLE = 0, 1, 2
"""Exit codes: all is well; memory is too small; the arguments, the model or the machine cannot be used as given."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Without the program's name; None: those of this process.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] and given[0] in TRAINING_COMMANDS:
            return _train(None if arguments is None else given)
        return _run(make_parser().parse_args(given))
    except ElixirError as error:
        sys.stderr.write(f"lightning-elixir: {error}\n")
        return FITS_NOT if isinstance(error, CapacityError) else UNUSABLE


def _run(options: argparse.Namespace) -> int:
    if options.command == "consolidate":
        from lightning_elixir.cli.consolidate import run_consolidate

        return run_consolidate(options)
    if importlib.util.find_spec("rich") is None:
        raise PlanError(f"`lightning-elixir {options.command}` prints with rich, which is missing: pip install rich")
    if options.command == "plan":
        for name in (options.model, *(options.fits or ())):
            if name is not None:
                refuse_unknown(name)
    _prepare()
    if options.command == "plan" and options.patterns:
        from lightning_elixir.cli.pattern_table import print_patterns

        return print_patterns(options)
    if options.command == "plan" and options.scaling:
        from lightning_elixir.cli.scaling import print_scaling

        return print_scaling(options)
    if options.command == "plan":
        from lightning_elixir.cli.plan import run_plan

        return run_plan(options)
    from lightning_elixir.cli.bench import run_bench

    return run_bench(options)


def _train(arguments: list[str] | None) -> int:
    _prepare()
    from lightning_elixir.cli.train import run_training

    return run_training(arguments)


def _prepare() -> None:
    """What scripts have and a command lacks: the strategies, which `lightning_elixir/__init__.py` leaves out for this
    command's sake, and the folder that it is started in, where the user's modules are."""
    from lightning_elixir.registration import register_strategies

    register_strategies()
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
