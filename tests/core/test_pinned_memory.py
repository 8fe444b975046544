"""Host memory that is meant for a device, looked at without one."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import pytest
import torch

from lightning_elixir.core.pages import Pages

MIB = 2**20


def flags_of(address: int) -> set[str]:
    """What the kernel says of the mapping that an address lies in."""
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        first, last = (int(number, 16) for number in block.split(maxsplit=1)[0].split("-"))
        if first <= address < last:
            found = re.search(r"^VmFlags: (.*)$", block, re.MULTILINE)
            return set() if found is None else set(found[1].split())
    raise AssertionError("no mapping there")


def test_it_may_have_huge_pages_and_no_child_gets_a_copy() -> None:
    tensor = Pages(8 * MIB).tensor(torch.float32)
    assert tensor.numel() == 2 * MIB
    flags = flags_of(tensor.data_ptr())
    assert "sh" not in flags  # shared memory gets huge pages only where the whole system says so
    assert "dc" in flags  # not copied by fork
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        assert "hg" in flags


def test_a_child_that_lets_go_of_it_does_no_harm() -> None:
    tensor = Pages(4 * MIB).tensor(torch.float32).fill_(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if child == 0:
        try:
            del tensor
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert float(tensor.sum()) == MIB


def test_a_child_keeps_its_own_memory_at_the_same_address() -> None:
    tensor = Pages(64 * MIB).tensor(torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            own = [Pages(64 * MIB).tensor(torch.uint8) for _ in range(4)]
            is_same = any(one.data_ptr() == tensor.data_ptr() for one in own)
            del tensor
            status = 0 if is_same and all(not one.fill_(1)[:0].numel() for one in own) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] in (0, 2 << 8)  # 2: the system gave other addresses


def test_it_goes_back_with_the_last_tensor_over_it() -> None:
    pages = Pages(64 * MIB)
    part = pages.tensor(torch.uint8).fill_(7)[MIB : 2 * MIB]
    address = part.data_ptr()
    del pages
    assert int(part.sum()) == 7 * MIB
    assert "wr" in flags_of(address)
    del part
    with pytest.raises(AssertionError, match="no mapping"):
        flags_of(address)


def test_it_is_zeros_and_no_larger_than_asked() -> None:
    tensor = Pages(3 * 4096 + 8).tensor(torch.float64)
    assert tensor.numel() == 3 * 512 + 1
    assert not tensor.any()


def test_memory_that_is_not_there_is_said_with_its_size() -> None:
    with pytest.raises(OSError, match=f"{2**60} bytes of memory"):
        Pages(2**60)
