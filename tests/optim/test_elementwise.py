"""Optimizers that nobody here knows: what is registered is element-wise, and the error says why another is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lightning_elixir
from lightning_elixir import CPUAdam, HybridAdam
from lightning_elixir.errors import PlanError
from lightning_elixir.optim.elementwise import inner_maker
from tests.helpers.users_optimizers import REFUSED, Lion, ScheduleFree


def _parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3, 2))]


@pytest.mark.parametrize("cls", [Lion, ScheduleFree, torch.optim.AdamW, torch.optim.RMSprop, HybridAdam, CPUAdam])
def test_elementwise_ones_are_registered(cls: type[torch.optim.Optimizer]) -> None:
    before = torch.random.get_rng_state()
    assert lightning_elixir.register_elementwise(cls) is cls
    assert torch.equal(before, torch.random.get_rng_state())
    optimizer = cls(_parameters())
    assert inner_maker(optimizer).cls is (HybridAdam if issubclass(cls, HybridAdam) else cls)


@pytest.mark.parametrize("cls", REFUSED)
def test_others_are_refused_and_the_error_says_why(cls: type[torch.optim.Optimizer]) -> None:
    with pytest.raises(PlanError, match=REFUSED[cls]):
        lightning_elixir.register_elementwise(cls)
    with pytest.raises(PlanError, match=rf"register_elementwise\({cls.__name__}\)"):
        inner_maker(cls(_parameters()))


def test_what_depends_on_settings_is_tried_with_those_that_are_used() -> None:
    class Sometimes(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float, by_norm: bool = False) -> None:
            if lr < 0.0:
                raise ValueError("no")
            super().__init__(params, {"lr": lr})
            self.by_norm = by_norm

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm() if self.by_norm else p.grad)

    with pytest.raises(PlanError, match=r"register_elementwise\(Sometimes, lr=1e-3\)"):
        lightning_elixir.register_elementwise(Sometimes)
    with pytest.raises(PlanError, match=r"cannot be made from parameters and \{'lr': -1\.0\} \(ValueError: no\)"):
        lightning_elixir.register_elementwise(Sometimes, lr=-1.0)
    lightning_elixir.register_elementwise(Sometimes, lr=0.1)
    assert inner_maker(Sometimes(_parameters(), lr=0.1)).cls is Sometimes
    with pytest.raises(
        PlanError, match=r"Sometimes is not element-wise.* Change that in its step\(\), or use HybridAdam"
    ):
        inner_maker(Sometimes(_parameters(), lr=0.1, by_norm=True))


def test_only_optimizers_can_be_registered() -> None:
    with pytest.raises(PlanError, match="takes a subclass of torch.optim.Optimizer"):
        lightning_elixir.register_elementwise(dict)  # type: ignore[arg-type]


def test_quantised_states_that_cannot_be_followed_are_refused() -> None:
    import bitsandbytes
    from bitsandbytes.optim import GlobalOptimManager

    of_bits = bitsandbytes.optim
    for paged in (of_bits.PagedAdamW8bit(_parameters()), of_bits.AdamW8bit(_parameters(), is_paged=True)):
        with pytest.raises(PlanError, match=r"has the driver move its states.*use bitsandbytes.optim.AdamW8bit with"):
            inner_maker(paged)
    with pytest.raises(PlanError, match=r"PagedAdEMAMix has the driver.*use bitsandbytes.optim.AdEMAMix with"):
        inner_maker(of_bits.PagedAdEMAMix(_parameters()))
    with pytest.raises(PlanError, match=r"one moment of a parameter where.*use bitsandbytes.optim.AdEMAMix,"):
        inner_maker(of_bits.AdEMAMix32bit(_parameters()))
    parameters = _parameters()
    manager = GlobalOptimManager.get_instance()
    manager.override_config(parameters[0], "optim_bits", 32)
    try:
        with pytest.raises(PlanError, match="GlobalOptimManager"):
            inner_maker(bitsandbytes.optim.AdamW8bit(parameters))
    finally:
        manager.pid2config.clear()
    assert inner_maker(bitsandbytes.optim.AdamW8bit(parameters)).is_whole
    with pytest.raises(PlanError, match=r"bitsandbytes.optim.adamw.AdamW is not run over slices .* use it as it is"):
        lightning_elixir.register_elementwise(bitsandbytes.optim.AdamW)


def test_names_tell_which_of_several_packages_is_meant() -> None:
    other = type("AdamW", (torch.optim.Optimizer,), {"__module__": "somewhere.optim"})
    with pytest.raises(PlanError, match=r"^somewhere.optim.AdamW is not known.*use one of .*, torch.optim.AdamW,"):
        inner_maker(other(_parameters(), {}))
