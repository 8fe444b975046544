"""Staging memory on a real device: copies are under way while the next ones are issued."""

from __future__ import annotations

import pytest
import torch

from lightning_elixir.core.device import make_device
from lightning_elixir.core.staging import Downloads, Uploads
from lightning_elixir.wrapper import ElixirModule
from tests.helpers.plans import make_plan
from tests.helpers.zoo import make

pytestmark = pytest.mark.gpu


def test_what_comes_to_memory_that_is_not_locked_is_what_was_computed() -> None:
    device = make_device("cuda")
    downloads = Downloads(device, 1 << 18)
    targets = [device.host_zeros(1_000_001, torch.float32, is_locked=False) for _ in range(6)]
    expected = []
    for number, target in enumerate(targets):
        torch.cuda._sleep(3_000_000)
        source = torch.arange(target.numel(), dtype=torch.float32, device="cuda") * (number + 1)
        downloads.download(source, target)
        expected.append(source.clone())
        source.fill_(-1)  # after the copies, on the compute stream
        del source
    downloads.settle()
    assert not any(target.is_pinned() for target in targets)
    assert all(torch.equal(target, want.cpu()) for target, want in zip(targets, expected, strict=True))
    downloads.close()


def test_what_is_sent_from_there_comes_after_what_the_device_did_with_the_place() -> None:
    device = make_device("cuda")
    uploads = Uploads(device, device.new_lane(), 1 << 18)
    target = torch.empty(1_000_001, dtype=torch.bfloat16, device="cuda")
    for number in range(4):
        values = torch.randn(target.numel(), generator=torch.Generator().manual_seed(number))
        torch.cuda._sleep(3_000_000)
        target.fill_(7)
        uploads.upload([(0, values)], target)
        assert torch.equal(target.cpu(), values.bfloat16())


def test_a_model_that_is_on_the_device_already_is_taken_from_there() -> None:
    """Its masters go to host memory that is not locked."""
    model = make("gpt2").cuda()
    expected = {name: p.detach().cpu() for name, p in model.named_parameters()}
    plan = make_plan(model, placement_policy="cpu", chunk_size=8 * 1024, compute_dtype=torch.bfloat16)
    module = ElixirModule(model, plan, dtype=torch.bfloat16, device="cuda")
    masters = [module.engine.store[chunk.id].master for chunk in module.engine.chunks]
    assert masters
    assert not any(master is None or master.is_pinned() for master in masters)
    found = module.full_state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    module.close()
