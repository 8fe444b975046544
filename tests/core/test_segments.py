"""Whether segments of device memory can grow: what a driver says is found out once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lightning_elixir.core import device


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the allocator is told, on a machine whose environment says nothing of it."""
    told: list[str] = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    device._grow_segments.cache_clear()
    yield told
    device._grow_segments.cache_clear()


def failing(error: type[Exception]) -> Any:
    def use_mem_pool(pool: object, device: torch.device) -> None:
        raise error

    return use_mem_pool


def test_a_driver_that_cannot_is_asked_once(monkeypatch: pytest.MonkeyPatch, settings: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "use_mem_pool", failing(RuntimeError))
    for index in (0, 0, 1):
        assert not device.segments_grow(torch.device("cuda", index))
    assert settings == ["expandable_segments:True", "expandable_segments:False"] * 2


def test_a_full_device_is_asked_again(monkeypatch: pytest.MonkeyPatch, settings: list[str]) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", failing(torch.OutOfMemoryError))
    for _ in range(2):
        assert not device.segments_grow(torch.device("cuda", 0))
    assert settings == ["max_split_size_mb:512,expandable_segments:True"] * 2


def test_a_driver_that_can_is_asked_once(monkeypatch: pytest.MonkeyPatch, settings: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: nullcontext())
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: None)
    assert all(device.segments_grow(torch.device("cuda", 0)) for _ in range(2))
    assert settings == ["expandable_segments:True"]


@pytest.mark.parametrize("does_grow", [False, True])
def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch, settings: list[str], does_grow: bool) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"max_split_size_mb:512, expandable_segments:{does_grow}")
    assert device.segments_grow(torch.device("cuda", 0)) is does_grow
    assert settings == []
