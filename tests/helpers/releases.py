"""What only some releases of the libraries have that tests use."""

from __future__ import annotations

import pytest


def need_experts_in_one_module() -> None:
    """Skip where mixtures of transformers have their experts in a list, each a module by itself: those cannot be spread
    over ranks, and a step without values does not know which of them it would call."""
    pytest.importorskip("transformers", "5.0")
