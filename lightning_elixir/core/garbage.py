"""Python's garbage collector, kept from beginning by itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Inside, no garbage is collected unless it is asked for (`gc.collect`).

    With transformers imported, each collection of the oldest generation goes through a million objects and takes up to
    half a second; what makes many objects that stay, such as a plan or a dry run, brings on several.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
