"""Every test starts from the same state and leaves nothing behind."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch starts its threads, here and in what tests start

import pytest
import torch
import torch.distributed as dist

from lightning_elixir.profiling import measured_hardware
from lightning_elixir.runtime.hooks import innermost_pack
from tests.helpers import processes
from tests.helpers.dist import stop_workers
from tests.helpers.seeds import seed_torch

atexit.register(gc.unfreeze)  # libraries look at their end for what is left; pytest collects five times before that

# Importing all tests makes little garbage; looking for it took a sixth of that time.
gc.disable()

# One thread: results do not depend on the number of cores, and several ranks do not fight for them.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    if importlib.util.find_spec("pytest_timeout") is None:  # known all the same, so that the setting is no error
        parser.addini("timeout", "seconds a test may take (needs pytest-timeout)")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of pytest-xdist, for each test process that it starts."""
    node.workerinput["processes"] = processes.address()


def pytest_configure(config: pytest.Config) -> None:
    if path := getattr(config, "workerinput", {}).get("processes"):
        processes.share(path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        several = item.get_closest_marker("several_gpus")
        needed = several.args[0] if several else 1 if item.get_closest_marker("gpu") else 0
        if needed > found:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, and torch sees {found}"))


def pytest_collection_finish() -> None:
    # What is there by now stays: runs that collect garbage, as many do, need not look through it each time.
    gc.enable()
    gc.freeze()


def pytest_sessionfinish() -> None:
    stop_workers()


@pytest.fixture(autouse=True, scope="module")
def _keep_collections_short() -> None:
    """What the files before have left to stay, as modules that were imported and models that are computed once, need
    not be looked through again and again either: a run whose step is repeated collects several times."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU and, marked `gpu`, the first CUDA device."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _restore_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    before["PYTEST_CURRENT_TEST"] = os.environ.get("PYTEST_CURRENT_TEST", "")  # pytest's own, changing under way
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def _restore_torch_state() -> Iterator[None]:
    seed_torch(0)
    random.seed(0)
    yield
    left = innermost_pack()
    while innermost_pack() is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    if left is not None:
        pytest.fail(f"hooks for saved tensors left behind: {left}")


@pytest.fixture(autouse=True)
def _work_in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs and checkpoints that a Trainer writes into the working directory land in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _no_kept_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of tests do not depend on what somebody has measured on this machine. With a GPU they do: measuring for
    each would take too long."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(measured_hardware, "default_cache_dir", lambda: None)


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    """A non-daemon thread that outlives its test would keep the user's program from ending."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 2.0
    while left := [t.name for t in threading.enumerate() if t not in before and not t.daemon]:
        if time.monotonic() > deadline:
            pytest.fail(f"threads left behind: {left}")
        gc.collect()  # some end with the object that owns them
        time.sleep(0.02)
