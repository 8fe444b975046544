"""Names for what we do, in the traces of torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler


def label(name: str, chunk_id: int | None = None) -> AbstractContextManager[Any]:
    """Inside, a profiler's trace says `elixir: name`, and of which chunk; costs next to nothing while none runs. The
    names are those of the spans in a plan's report (`Span.label`), where there is such a one.

    Traces show our threads only if the profiler looks at all of them (`profile_all_threads` of
    `torch._C._profiler._ExperimentalConfig`).
    """
    if not profiler._is_profiler_enabled:
        return nullcontext()
    return profiler.record_function(f"elixir: {name}" if chunk_id is None else f"elixir: {name} {chunk_id}")
