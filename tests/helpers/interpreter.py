"""Kernels in Triton's language on the CPU, by its interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.helpers.processes import ROOT


def check_under_interpreter(passed: str, *arguments: str) -> None:
    """Run tests in a process of their own, as Triton reads its variable once, when it is imported.

    Args:
        passed: A pattern of how many are to pass.
        arguments: Of pytest: which tests.
    """
    plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:xdist"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert re.search(rf"\b{passed} passed", result.stdout), result.stdout[-500:]
