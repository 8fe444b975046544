"""Which tensors share their memory."""

from __future__ import annotations

import torch


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many tensors (and Python handles) share this storage. The one adapter around torch's private count."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count
