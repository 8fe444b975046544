"""Checkpoints of small models cut up as those of large ones are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from lightning_elixir.checkpoint import index, writer
from lightning_elixir.strategy import engine_state, sharded_checkpoints

NUM_THREADS = 3


@contextlib.contextmanager
def cut_up() -> Iterator[None]:
    """Inside, tensors are saved in boxes of at most 300 elements, every rank writes as many files as it has threads,
    and reads with as many."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (writer, "BOX_NUMEL", 300),
            (engine_state, "FILE_BYTES", 1),
            (index, "_THREAD_BYTES", 1),
            (index, "default_num_threads", lambda: NUM_THREADS),
            (sharded_checkpoints, "default_num_threads", lambda: NUM_THREADS),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
