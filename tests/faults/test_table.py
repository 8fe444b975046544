"""The faults can still be planted."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.table import FAULTS, PACKAGE, Fault

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_applies_and_compiles(fault: Fault) -> None:
    text = (ROOT / PACKAGE / fault.path).read_text()
    planted = fault.planted(text)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))  # and is not only written otherwise
    compile(planted, fault.path, "exec")


def test_every_room_has_its_faults() -> None:
    rooms = Counter(fault.room for fault in FAULTS)
    assert rooms == {"ranks": 10, "updates": 10, "nvme": 5, "checkpoints": 5, "rcache": 5, "plan": 5}
    kinds = Counter(fault.kind for fault in FAULTS)
    assert kinds["silent"] >= 20
    assert kinds["hang"] >= 4
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
