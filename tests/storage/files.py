"""Numbers to write into a file, and programs that use one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from lightning_elixir.storage.nvme import OffloadFile

ROOT = Path(__file__).parents[2]
MIB = 2**20


def noise(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def read_back(file: OffloadFile, region: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    tensor = torch.full((numel,), 7).to(dtype)
    file.read(region, tensor).wait()
    return tensor


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
