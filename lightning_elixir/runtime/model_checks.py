"""Whether a plan and a model suit each other, and the ranks' plans."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_elixir.core.comm import Comm
from lightning_elixir.core.shells import held_as
from lightning_elixir.errors import PlanError
from lightning_elixir.plan.prefixes import Prefix
from lightning_elixir.plan.types import Plan


def check_same_on_all_ranks(comm: Comm, plan: Plan) -> None:
    """Raises `PlanError` on every rank if the ranks' plans (and so their models) differ."""
    plans = comm.exchange_objects((plan.fingerprint(), plan.layout_fingerprint(), len(plan.chunks)))
    if len({fingerprint for fingerprint, _, _ in plans}) > 1:
        what = "models" if len({layout for _, layout, _ in plans}) > 1 else "placements"
        raise PlanError(
            f"the ranks have plans for different {what}: {plans}; build the same model and plan on every rank"
        )


def check_modules(module: nn.Module) -> None:
    """Raises `PlanError` if a module writes to its parameters inside forward."""
    writing = [
        name
        for name, m in module.named_modules()
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.max_norm is not None
    ]
    if writing:
        raise PlanError(
            f"{', '.join(writing[:5])}: max_norm rewrites the weight inside forward, where managed parameters may be "
            "released at any time; make the layer without max_norm, and renormalise the weight after optimizer.step()"
        )


def check_names(plan: Plan, named: Mapping[str, nn.Parameter], prefix: Prefix | None = None) -> None:
    """Raises `PlanError` if the plan is not for a model of these parameters (tied ones under all their names).

    Args:
        plan: Under the names of the model, as far as these can be told.
        named: The model's parameters by name.
        prefix: What the plan's names had more, or less, when it was made.
    """
    planned = {m.fqn: m.shape for c in plan.chunks for m in c.members} | {p.fqn: p.shape for p in plan.ignored}
    trains = {m.fqn: c.requires_grad for c in plan.chunks for m in c.members}
    trains |= {p.fqn: p.requires_grad for p in plan.ignored}
    known = {id(named[name]) for name in planned if name in named}
    missing = [name for name in planned if name not in named]
    extra = [name for name, p in named.items() if id(p) not in known]
    left_out = {p.fqn for p in plan.ignored}
    wrong = [
        name
        for name, shape in planned.items()
        if name in named and (tuple(named[name].shape) if name in left_out else held_as(named[name])[0]) != shape
    ]
    frozen = [name for name, is_trained in trains.items() if name in named and named[name].requires_grad != is_trained]
    for what, names in (
        ("parameters that the model lacks", missing),
        ("no place for parameters", extra),
        ("other shapes of parameters", wrong),
        ("another requires_grad of parameters", frozen),
    ):
        if names:
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            under, instead = "", "make a new plan"
            if prefix is not None and prefix.path:
                under = f"{prefix}, "
                if names is extra and not prefix.is_taken_off:  # else it is of another model than that part
                    instead += f", of all that is trained and not of `{prefix.path}` alone: `--module` takes a module"
            raise PlanError(f"the plan was made for another model: {under}it has {what}: {shown}; {instead}")
