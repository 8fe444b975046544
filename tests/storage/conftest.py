"""Both back ends under the same tests."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_elixir.storage.nvme import BACKENDS, OffloadFile, open_offload_file

Open = Callable[..., OffloadFile]


def needs_tensornvme() -> None:
    """Skip where the package is not installed, unless somebody has promised that it is."""
    if importlib.util.find_spec("tensornvme") is None:
        if os.environ.get("LIGHTNING_ELIXIR_TEST_TENSORNVME") == "1":
            pytest.fail("LIGHTNING_ELIXIR_TEST_TENSORNVME=1, and the package tensornvme is not installed")
        pytest.skip("the package tensornvme is not installed: `python3 dev.py tensornvme` builds it")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name == "tensornvme":
        needs_tensornvme()
    return name


@pytest.fixture
def open_file(tmp_path: Path, backend: str) -> Iterator[Open]:
    """Opens files of a back end in a folder of the test's own, which is empty afterwards."""
    opened = []

    def open_one(*nbytes: int, **options: object) -> OffloadFile:
        options = {"backend": backend, **options}
        file = open_offload_file(tmp_path / "disk", nbytes, **options)  # type: ignore[arg-type]
        opened.append(file)
        return file

    yield open_one
    for file in opened:
        file.close()
    left = list((tmp_path / "disk").iterdir()) if (tmp_path / "disk").exists() else []
    assert left == []
