"""What a LightningModule keeps of the engine that holds its parameters, from one run of a Trainer to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_elixir.core.module_hooks import without_hooks
from lightning_elixir.core.shells import ShellParameter
from lightning_elixir.memory_limits import KeptPlans, MemoryLimits
from lightning_elixir.patterns.apply import take_out
from lightning_elixir.plan.memory import Budget
from lightning_elixir.plan.types import Plan
from lightning_elixir.runtime.agreement import Meeting
from lightning_elixir.strategy.config import ElixirConfig
from lightning_elixir.strategy.model_init import replace_parameters
from lightning_elixir.wrapper import ElixirModule

# The one attribute that we set on a user's module. The engine must live as long as the module does, also when the
# Trainer is gone, and must go with it: a table beside it, whose entries refer to the module, gives only one of these.
_ATTRIBUTE = "_elixir_handle"


@dataclass(frozen=True)
class BuildOptions:
    """All that an engine is built from beside the model: where it is equal, an engine can be kept."""

    config: ElixirConfig
    precision: str
    autocast: bool
    device: torch.device
    world_size: int


class EngineHandle:
    """An engine, and the parameters that it was built over.

    Args:
        engine: Around the module that holds this.
        options: What it was built from.
        budget: What its plans may use.
        skeleton: The model without values, to make further plans with.
        is_warm: Whether the plan is final (policy "auto": made with the memory that a training step takes,
            foreseen or seen).
    """

    def __init__(
        self, engine: ElixirModule, options: BuildOptions, budget: Budget, skeleton: nn.Module, is_warm: bool
    ) -> None:
        self.engine = engine
        self.options = options
        self.budget = budget
        self.limits = MemoryLimits()
        """What the user has said since, in the place of the options."""
        self.given: ElixirConfig = options.config
        """The user's options, in which sizes of parallel patterns may be open that `options` has."""
        self.kept = KeptPlans()
        """What came of limits that the user has set."""
        self.skeleton = skeleton
        self.is_warm = is_warm
        self.is_refinable = False
        """Whether times of a later step may still lead to another plan."""
        self.has_memory_samples = False
        """Whether the engine has seen what a step takes beside the chunks."""
        self.num_steps = 0
        """How many steps fits have taken."""
        self._told: tuple[Plan, Plan] | None = None
        self._names = tuple(name for name, _ in engine.module.named_parameters())
        self._parameters = tuple(engine.module.parameters())
        self._requires_grad = tuple(p.requires_grad for p in self._parameters)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # The copy of a module holds plain parameters, and no engine. This attribute was set last, so it is copied last.
        without_hooks(self.engine.module.modules(), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())

    @staticmethod
    def of(module: nn.Module | None) -> EngineHandle | None:
        """The live handle of `module`, if there is one."""
        handle = EngineHandle.left_in(module)
        return handle if handle is not None and not handle.engine.is_closed else None

    @staticmethod
    def left_in(module: nn.Module | None) -> EngineHandle | None:
        """As `of`, also where the engine has given up or was closed."""
        handle = vars(module).get(_ATTRIBUTE) if module is not None else None
        return handle if isinstance(handle, EngineHandle) else None

    @property
    def plan(self) -> Plan:
        """The plan in force, with the forecast that the last fit has left."""
        plan = self.engine.plan
        return self._told[1] if self._told is not None and self._told[0] is plan else plan

    def leave(self, plan: Plan) -> None:
        """A fit ends.

        Args:
            plan: The one in force, with a forecast of the steps as they were last.
        """
        self._told = self.engine.plan, plan

    def attach(self) -> None:
        object.__setattr__(self.engine.module, _ATTRIBUTE, self)

    def has_same_parameters(self) -> bool:
        """Whether the module's parameters are still those that the engine was built over."""
        now = tuple(self.engine.module.parameters())
        return len(now) == len(self._parameters) and all(a is b for a, b in zip(now, self._parameters, strict=True))

    def changed_requires_grad(self) -> list[str]:
        """Names of parameters that were frozen or unfrozen since. (Layers may have come since, or gone.)"""
        known = zip(self._names, self._parameters, self._requires_grad, strict=True)
        return [name for name, parameter, before in known if parameter.requires_grad is not before]

    def has_changed_requires_grad(self) -> bool:
        """Whether there are any; in less time."""
        pairs = zip(self._parameters, self._requires_grad, strict=True)
        return any(parameter.requires_grad is not before for parameter, before in pairs)

    def can_be_kept(self, options: BuildOptions) -> bool:
        return options == self.options and self.has_same_parameters() and not self.changed_requires_grad()

    def dissolve(self) -> None:
        """Close the engine. Its parameters, where the module still has them, become whole, plain ones on rank 0 and
        empty ones on `meta` elsewhere. Collective."""
        inner = self.engine.engine
        with inner.meeting(Meeting.DISSOLVE):
            values = inner.whole_values(on_all_ranks=False, has_met=True)
        shapes = {m.fqn: inner.groups.whole_shape(m) for c in inner.chunks for m in c.spec.members}
        plain: dict[int, nn.Parameter] = {}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if parameter in inner.ignored:
                continue
            value = values.get(name)
            if value is None and isinstance(parameter, ShellParameter):
                value = parameter.layout_at_elixir.on_meta()
            elif value is None:
                value = torch.empty(shapes[name], dtype=parameter.dtype, device="meta")
            plain[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        self.engine.close()
        vars(self.engine.module).pop(_ATTRIBUTE, None)
        take_out(self.engine.module)
        replace_parameters(self.engine.module, plain)
