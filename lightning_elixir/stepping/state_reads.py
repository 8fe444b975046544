"""`optimizer.state` of an `ElixirOptimizer`: whole states, put together when they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch

from lightning_elixir.errors import StateError
from lightning_elixir.runtime.agreement import Meeting
from lightning_elixir.runtime.chunk_optimizers import ChunkOptimizers
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.runtime.steps import check_same_optimizer
from lightning_elixir.stepping.state_dicts import StateDicts


class StateReads(Mapping[torch.Tensor, dict[str, Any]]):
    """Parameter -> its states, as in plain PyTorch, but copies: tensors of the parameter's shape on the compute device,
    numbers on the host; `{}` before its first step. Each read is collective, and needs the updates to be over. What
    is written to the copies is lost; `load_state_dict` is the way to change states.

    Args:
        engine: Has the shards.
        states: Whose they are.
        reader: Reads them.

    Raises:
        KeyError: A tensor that is no parameter of the optimizer.
        StateError: Inside forward or backward, or when written to.
        DivergenceError: The ranks read those of different parameters.
    """

    def __init__(self, engine: Engine, states: ChunkOptimizers, reader: StateDicts) -> None:
        self._engine = engine
        self._states = states
        self._reader = reader

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        home = self._engine.home_of(parameter)
        if home is None or home[1] not in self._states.members.get(home[0].id, ()):
            raise KeyError(parameter)
        chunk, index = home
        with self._engine.meeting(Meeting.OPTIMIZER_STATE, [self._states.number, chunk.id, index]) as rows:
            check_same_optimizer(Meeting.OPTIMIZER_STATE, rows)
            if any(row[1:] != rows[0][1:] for row in rows):
                names = ", ".join(
                    f"rank {rank}: {self._engine.chunks[row[1]].spec.members[row[2]].fqn}"
                    for rank, row in enumerate(rows)
                )
                raise StateError(
                    f"the ranks read the optimizer's states of different parameters ({names}): read them on every rank,"
                    " in the same order"
                )
            return self._reader.of_member(chunk, index)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([p for group in self._states.groups for p in group["params"] if self[p]])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises `StateError`, in the place of all that would write."""
        raise StateError(
            "optimizer.state shows copies: change states by load_state_dict(). To have the optimizer begin anew, load"
            " optimizer.state_dict() | {'state': {}}"
        )

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = refuse

    def __repr__(self) -> str:
        return f"<states of {sum(len(group['params']) for group in self._states.groups)} parameters, read one by one>"
