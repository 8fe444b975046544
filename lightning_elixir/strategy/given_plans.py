"""Plans of the user's: under which names, and whether they can be obeyed."""

from __future__ import annotations

import torch
from torch import nn

from lightning_elixir.core.shells import held_as
from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.memory import Budget
from lightning_elixir.plan.prefixes import Prefix, with_names_of
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.simulator.timeline import plan_use
from lightning_elixir.plan.types import Plan
from lightning_elixir.plan.units import format_bytes
from lightning_elixir.profiling.parameters import dtype_name
from lightning_elixir.runtime.model_checks import check_names
from lightning_elixir.strategy.config import ElixirConfig


def given_plan(config: ElixirConfig, model: nn.Module) -> tuple[Plan | None, Prefix]:
    """The user's, under the model's names: a LightningModule has its model, of which the command may have made the
    plan, as a part."""
    given = config.given_plan()
    if given is None:
        return None, Prefix()
    return with_names_of(given, [name for name, _ in model.named_parameters(remove_duplicate=False)])


def check_given(
    plan: Plan,
    prefix: Prefix,
    model: nn.Module,
    budget: Budget,
    regime: TrainingRegime,
    compute_dtype: torch.dtype | None,
) -> None:
    """Whether a plan of the user's can be obeyed here.

    Args:
        plan: Under the model's names.
        prefix: What its own names had more, or less.
        model: As it is to be trained.
        budget: Limits of one rank.
        regime: What training is like, as far as that is known.
        compute_dtype: Dtype of forward and backward; None: each parameter keeps its own.

    Raises:
        PlanError: It was made for another model or precision.
        CapacityError: It takes more than there is, activations not counted.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    check_names(plan, named, prefix)
    if compute_dtype is None:
        dtypes = [(dtype_name(held_as(named[m.fqn])[1]), c.dtype) for c in plan.chunks for m in c.members]
    else:
        dtypes = [(dtype_name(compute_dtype), plan.compute_dtype)]
    for ours, planned in dtypes:
        if ours != planned:
            raise PlanError(
                f"the given plan is for parameters in {planned}, and the precision of this Trainer has them in "
                f"{ours}: give the Trainer the precision that the plan was made for, make a plan with this one, or "
                "leave out `plan`"
            )
    use = plan_use(plan, regime)
    for name, nbytes, limit in (
        (budget.words.memory, use.gpu_bytes, budget.gpu_bytes),
        ("host memory", use.host_chunk_bytes, budget.cpu_bytes),
    ):
        if limit is not None and nbytes > limit:
            raise CapacityError(
                f"{name}: the given plan needs {format_bytes(nbytes)} on each rank, without activations, but"
                f" there are {format_bytes(limit)}. Make a plan for this machine, or leave out `plan`"
            )
