"""Importing the package is cheap: no CUDA context, nothing heavy that only some users need, a small surface."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_elixir

ROOT = Path(__file__).parents[1]

PUBLIC = {
    "CPUAdam",
    "CapacityError",
    "DivergenceError",
    "ElixirError",
    "ElixirModule",
    "ElixirOptimizer",
    "ElixirPrecision",
    "ElixirStatsMonitor",
    "ElixirStrategy",
    "ElixirWeightAveraging",
    "HardwareSpec",
    "HybridAdam",
    "PeerLostError",
    "Plan",
    "PlanError",
    "StateError",
    "StorageError",
    "__version__",
    "cuda_memory_profiling",
    "minimum_waste_search",
    "optimal_search",
    "pretrained",
    "linear_cross_entropy",
    "profile_hardware",
    "profile_memory",
    "register_elementwise",
    "simple_search",
}


def _run(code: str) -> str:
    """What a fresh Python prints for the code."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.full
def test_import_takes_neither_cuda_nor_optional_packages() -> None:
    code = """
import sys
import lightning.pytorch
import torch

def refuse(*args, **kwargs):
    raise SystemExit("CUDA was initialised")

torch.cuda._lazy_init = torch.cuda.init = refuse
before = set(sys.modules)
import lightning_elixir
lightning_elixir.ElixirStrategy, lightning_elixir.HybridAdam, lightning_elixir.ElixirModule
print(sorted({"transformers", "jsonargparse", "torch._inductor", "triton", "matplotlib"} & (set(sys.modules) - before)))
"""
    code = code if lightning_installed() else code.replace("lightning.pytorch", "pytorch_lightning")
    assert _run(code) == "[]"


def lightning_installed() -> bool:
    from importlib.util import find_spec

    return find_spec("lightning") is not None


def test_exported_names_are_exactly_these() -> None:
    assert set(lightning_elixir.__all__) == PUBLIC


def test_every_exported_name_resolves() -> None:
    assert [name for name in lightning_elixir.__all__ if getattr(lightning_elixir, name, None) is None] == []
