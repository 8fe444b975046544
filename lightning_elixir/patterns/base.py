"""What a parallel pattern is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from lightning_elixir.patterns.peers import Peers

Compute = Callable[..., Any]
"""The module's own forward, over this rank's parts of its parameters."""


class ParallelPattern:
    """How the ranks along one axis share a module's work. Subclass it, or take one of ours.

    One object may serve many modules, so it keeps nothing of any. A pattern has to see to two things, and then the
    engine does the rest (fetching, reducing, clipping, updates, checkpoints under whole names and shapes):

    - What comes out of the module is what the whole module computes, wherever the ranks go on with it alike.
    - The gradient of each parameter is taken as the mean over all ranks that hold the same part of it. A parameter
      that is not cut, of whose gradient this rank has only one summand of `peers.size`, has to get that times
      `peers.size` (`lightning_elixir.patterns.exchanges.scaled_backward`).

    Ranks along "tensor" have the same batch, all others have batches of their own.
    """

    axis = "tensor"
    """The ranks that share the work: "tensor" or "expert"."""

    def targets(self, module: nn.Module) -> Mapping[str, ParallelPattern]:
        """Which modules below this one the pattern is really for, by their names from here on; "": itself."""
        return {"": self}

    def cuts(self, module: nn.Module) -> Mapping[str, int]:
        """Which parameters are cut into equal parts, one for each rank, and along which dimension.

        Args:
            module: As the user built it.

        Returns:
            Names, from the module on -> dimension. Parameters that are left out stay whole.

        Raises:
            PlanError: The pattern is not for such a module.
        """
        return {}

    def attributes(self, module: nn.Module, peers: Peers) -> Mapping[str, Any]:
        """Attributes that the module has to have instead when its parameters are cut."""
        return {}

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], peers: Peers) -> tuple[tuple[Any, ...], Any]:
        """What the module gets in place of these arguments."""
        return args, kwargs

    def outputs(self, output: Any, peers: Peers) -> Any:
        """What others get in place of the module's result."""
        return output

    def forward(
        self, module: nn.Module, compute: Compute, peers: Peers, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The module's forward. Override it where `inputs` and `outputs` do not do."""
        args, kwargs = self.inputs(args, kwargs, peers)
        return self.outputs(compute(*args, **kwargs), peers)

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({options})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), repr(self)))
