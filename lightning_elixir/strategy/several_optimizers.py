"""What `configure_optimizers` has returned, where that is several optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from torch import nn
from torch.optim import Optimizer

from lightning_elixir.errors import PlanError
from lightning_elixir.optim.execution import UpdateTimes
from lightning_elixir.optimizer import ElixirOptimizer
from lightning_elixir.plan.regime import TrainingRegime, in_step_of, states_of
from lightning_elixir.strategy.regimes import states_of_averages, with_optimizer


def check_disjoint(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raises `PlanError` if there is no optimizer, or two have a parameter in common."""
    if not optimizers:
        raise PlanError("configure_optimizers() returned no optimizer")
    names = {id(p): name for name, p in module.named_parameters()}
    owners: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            other = owners.setdefault(id(parameter), number)
            if other != number:
                name = names.get(id(parameter), "a parameter that is not the model's")
                raise PlanError(
                    f"optimizers {other} and {number} of configure_optimizers() both hold {name}: a step uses its"
                    " gradients up, so each optimizer needs parameters of its own"
                )


def regime_with(regime: TrainingRegime, optimizers: Sequence[ElixirOptimizer], num_averages: int = 0) -> TrainingRegime:
    """What training is like with these optimizers, as they are now: states come with their first steps. A plan says of
    no chunk whose it is, so it streams only what all can; averages of weights are states more. Where only some can run
    behind the next forward, the others' parameters are updated in the step."""
    more = states_of_averages(regime, num_averages)
    states, others = states_of(
        (optimizer.state_count.and_full(more), optimizer.parameter_names()) for optimizer in optimizers
    )
    return with_optimizer(
        regime,
        can_stream=all(optimizer.can_stream for optimizer in optimizers),
        in_step=in_step_of((optimizer.can_stream, optimizer.parameter_names()) for optimizer in optimizers),
        num_states=states.full,
        byte_states=states.of_a_byte,
        other_states=others,
        whole_update_bytes=max((optimizer.whole_update_bytes for optimizer in optimizers), default=0),
    )


def last_times(optimizers: Sequence[ElixirOptimizer]) -> UpdateTimes | None:
    """Of the last step of each, added up; None while none is over."""
    found = [times for times in (optimizer.last_step_times for optimizer in optimizers) if times is not None]
    if len(found) < 2:
        return found[0] if found else None
    names = [field.name for field in fields(UpdateTimes)]
    return UpdateTimes(**{name: sum(getattr(times, name) for times in found) for name in names})
