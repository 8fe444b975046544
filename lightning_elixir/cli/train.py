"""`lightning-elixir fit` and its likes: Lightning's own command line, with the strategy registered and chosen."""

from __future__ import annotations

import importlib.util
import os

from lightning_elixir._lightning import load_lightning_cli
from lightning_elixir.errors import PlanError


def run_training(arguments: list[str] | None) -> int:
    """Hand everything to `LightningCLI`, whose default strategy is `elixir` here.

    Args:
        arguments: With the subcommand first; None: those of this process.

    Raises:
        PlanError: jsonargparse is not installed.
    """
    if importlib.util.find_spec("jsonargparse") is None:
        raise PlanError(
            "fit, validate, test and predict are LightningCLI's, which needs jsonargparse: pip install"
            " 'jsonargparse[signatures]>=4.39,<5'"
        )
    # Lightning 2.6 calls what newer releases of jsonargparse announce to remove, on every start.
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    load_lightning_cli()(
        args=arguments,
        trainer_defaults={"strategy": "elixir"},
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"prog": "lightning-elixir"},
    )
    return 0
