"""Compiled blocks on a device, with the compiler that people use: the bodies of the CPU tests."""

from __future__ import annotations

import pytest

from tests.helpers.dist import run_processes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("body", ["train_with_inductor('cuda')", "train_with_cuda_graphs()"])
def test_placements_give_the_numbers_of_compiled_plain_pytorch(body: str) -> None:
    code = f"import torch\nfrom tests.runtime.test_compiled import *\ntorch.use_deterministic_algorithms(True)\n{body}"
    assert run_processes(code, 1) == [0]
