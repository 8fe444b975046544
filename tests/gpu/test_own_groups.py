"""Engines of two GPUs, one after the other: what of their groups ends."""

from __future__ import annotations

import pytest

from tests.helpers.dist import run_ranks
from tests.helpers.groups import engines_one_after_the_other

pytestmark = pytest.mark.gpu


@pytest.mark.several_gpus(2)
def test_groups_of_hosts_end_and_those_of_devices_with_a_close() -> None:
    """Each engine has two, beside the users': one of hosts and one of devices."""
    for before, first, dropped, second, closed in run_ranks(engines_one_after_the_other, 2, device="cuda", fresh=True):
        assert first == dropped
        assert second[1] == first[1]
        assert [seen[0] - before[0] for seen in (first, second, closed)] == [2, 3, 1]
        assert closed[1] < first[1]
