"""Users' classes that do something around the `step` of an optimizer that we know.

[Note: own steps] `class Mine(AdamW)` whose `step` counts, warms up or projects, and calls `super().step()`, runs as it
is written, once a step. For that time the user's object is of a class below the user's and one of ours, `class (Mine,
Ours)` with `class Ours(AdamW)`: in its order of resolution, `super().step()` of `Mine` is `Ours.step`, which updates
shards. What `Mine` itself computes is left to it; so a `step` that never calls `super()` is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from lightning_elixir.errors import PlanError, StateError

Update = Callable[[Callable[[], Any] | None], Any]
"""Runs the closure, if there is one, and updates; returns what the closure has returned."""


def classes_with_own_step(cls: type, known: type) -> list[type]:
    """Of `cls`, a subclass of `known`, and those in between: which write a `step` of their own."""
    theirs = inspect.unwrap(known.step)  # type: ignore[attr-defined]
    found = []
    for candidate in cls.__mro__[: cls.__mro__.index(known)]:
        # torch puts a wrapper around inherited ones as well, when the first object is made.
        own = vars(candidate).get("step")
        if own is not None and inspect.unwrap(own) is not theirs:
            found.append(candidate)
    return found


def check_own_steps(optimizer: torch.optim.Optimizer, known: type[torch.optim.Optimizer]) -> None:
    """Whether all that a user's class and object add to `known` is something around its `step`.

    Raises:
        PlanError: It is not.
    """
    name, base = type(optimizer).__name__, known.__name__
    for cls in classes_with_own_step(type(optimizer), known):
        code = getattr(inspect.unwrap(vars(cls)["step"]), "__code__", None)
        # `super()` needs the class, also within functions inside; `super(Mine, self)` does not.
        if code is None or not {"__class__", "super"} & {*code.co_freevars, *code.co_names}:
            raise PlanError(
                f"{cls.__name__}.step() does not call super().step(): under ElixirStrategy and ElixirModule the update"
                f" of {base} runs over shards, and what a subclass may do is around it, in a step() that calls"
                " super().step() once"
            )
    if getattr(type(optimizer), "_init_group", None) is not getattr(known, "_init_group", None):
        raise PlanError(
            f"{name} has an _init_group() of its own, which would not run: updates over shards are those of {base}"
        )
    replaced = vars(optimizer).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        raise PlanError(
            f"step() of this {name} was replaced on the object, which would not run: write a subclass whose step()"
            " calls super().step()"
        )


class OwnStep:
    """The `step` of a user's class, with an update of ours in the place of `known`'s.

    Args:
        optimizer: The user's; its class has passed `check_own_steps`.
        known: The class below it whose updates we run.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, known: type[torch.optim.Optimizer]) -> None:
        self._optimizer = optimizer
        self._update: Update | None = None
        cls = type(optimizer)
        ours = type(known.__name__, (known,), {"step": self._make_step(known.__name__)})
        self._class = type(cls.__name__, (cls, ours), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})

    @staticmethod
    def is_needed(optimizer: torch.optim.Optimizer, known: type[torch.optim.Optimizer]) -> bool:
        """Whether the user's class does something around the step."""
        return bool(classes_with_own_step(type(optimizer), known))

    def _make_step(self, base: str) -> Callable[..., Any]:
        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            update, self._update = self._update, None
            if update is None:
                raise StateError(
                    f"{type(optimizer).__name__}.step() has called the step of {base} twice: the first call has used"
                    " the gradients up; call super().step() once"
                )
            return update(closure)

        step.hooked = True  # type: ignore[attr-defined] # torch shall not put its own around it
        return step

    def run(self, update: Update, *args: Any, **kwargs: Any) -> Any:
        """Call it.

        Args:
            update: What `super().step()` is, this time.
            args: For the user's `step`, as are `kwargs`.

        Returns:
            What that has returned.
        """
        optimizer, cls = self._optimizer, type(self._optimizer)
        step: Any = cls.step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # `ElixirOptimizer.step` runs the hooks, once
        self._update = update
        optimizer.__class__ = self._class
        try:
            return step(optimizer, *args, **kwargs)
        finally:
            optimizer.__class__, self._update = cls, None
