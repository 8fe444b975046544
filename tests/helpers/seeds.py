"""Seeding without what `torch.manual_seed` does beside it: for each kind of device that is not there it notes down
where it was called, which takes longer than many a test."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def seed_torch(value: int) -> None:
    """Seed the numbers that torch draws, on the CPU and on all GPUs."""
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(value)


def seed_everything(value: int) -> None:
    """As Lightning's function of this name."""
    os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"] = str(value), "0"
    random.seed(value)
    np.random.seed(value)
    seed_torch(value)
