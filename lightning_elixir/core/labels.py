"""Names for what we do, in the traces of torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler


def label(name: str) -> AbstractContextManager[Any]:
    """Inside, a profiler's trace says `elixir: name`; costs next to nothing while none runs.

    Traces show our threads only if the profiler looks at all of them (`profile_all_threads` of
    `torch._C._profiler._ExperimentalConfig`).
    """
    return profiler.record_function(f"elixir: {name}") if profiler._is_profiler_enabled else nullcontext()
