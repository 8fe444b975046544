"""What the campaign makes of pytest's output, and where it looks first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.campaign import ROOT, near_files, rest_of, verdict
from tests.faults.table import FAULTS

PASSED = "tests/a.py::test_one[all on nvme-2] PASSED [ 50%]"


@pytest.mark.parametrize(
    ("code", "line", "expected"),
    [
        (0, "tests/a.py::test_two SKIPPED (needs a CUDA device) [100%]", (None, "")),
        (5, "", (None, "")),
        (1, "tests/a.py::test_two[x y] FAILED [100%]", ("tests/a.py::test_two[x y]", "failed")),
        (1, "tests/a.py::test_two ERROR [100%]", ("tests/a.py::test_two", "failed")),
        (2, "ERROR tests/b.py - ImportError: no", ("tests/b.py", "could not be collected")),
        (1, "tests/a.py::test_two \n+++ Timeout +++", ("tests/a.py::test_two", "took too long")),
        (-11, "tests/a.py::test_two ", ("tests/a.py::test_two", "ended pytest with -11")),
        (None, "tests/a.py::test_two ", (None, "the tests took too long")),
    ],
)
def test_the_first_test_that_fails(code: int | None, line: str, expected: tuple[str | None, str]) -> None:
    assert verdict(code, f"{PASSED}\n{line}\n") == expected


def test_a_test_that_hangs_is_named() -> None:
    assert verdict(None, f"{PASSED}\ntests/a.py::test_two ", is_hanging=True) == ("tests/a.py::test_two", "did not end")


def test_tests_of_a_module_are_those_named_after_it_and_those_that_import_it() -> None:
    fault = next(fault for fault in FAULTS if fault.path == "plan/rcache.py")
    near = near_files(ROOT, fault.path)
    assert near[0] == "tests/plan/test_rcache.py"
    assert "tests/plan/test_policy.py" not in near
    assert "tests/runtime/test_nvme.py" in near_files(ROOT, "storage/nvme/direct.py")  # its helper imports that
    rest = rest_of(ROOT, near, fault)
    assert rest[0].startswith("tests/plan/")
    assert not {*near} & {*rest}
    assert not any(name.startswith("tests/faults/") for name in (*near, *rest))
    assert all(Path(ROOT, name).is_file() for name in (*near, *rest))
