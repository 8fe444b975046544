"""Values that users write for a while and then put back leave the master as it was, wherever it lives."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir.runtime.written import WrittenMasters
from tests.helpers import streamed_updates as bodies
from tests.helpers.dist import run_ranks
from tests.helpers.put_back import BETWEEN, BF16, CPU, copy_wide, different, read_all, swap_data, train
from tests.helpers.tiers import crossed, telling
from tests.helpers.zoo import ZOO


def assign_data(model: nn.Module, shadow: list[Tensor]) -> Callable[[], None]:
    saved = [p.data.clone() for p in model.parameters()]

    def write(values: list[Tensor]) -> None:
        for p, value in zip(model.parameters(), values, strict=True):
            p.data = value

    write(shadow)
    return lambda: write(saved)


def keep_data(model: nn.Module, shadow: list[Tensor]) -> Callable[[], None]:
    """What is kept is no copy: in plain PyTorch the parameter leaves the storage, and here the alias does."""
    kept = [p.data for p in model.parameters()]

    def write(values: list[Tensor]) -> None:
        for p, value in zip(model.parameters(), values, strict=True):
            p.data = value

    write(shadow)
    return lambda: write(kept)


def exchange_data(model: nn.Module, shadow: list[Tensor]) -> Callable[[], None]:
    def swap() -> None:
        for p, average in zip(model.parameters(), shadow, strict=True):
            p.data, average.data = average.data, p.data

    swap()
    return swap


def copy_wide_and_data_back(model: nn.Module, shadow: list[Tensor]) -> Callable[[], None]:
    saved = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p, value in zip(model.parameters(), shadow, strict=True):
            p.copy_(0.7 * p.float() + 0.3 * value.float())  # rounds to something else somewhere

    def put_back() -> None:
        for p, value in zip(model.parameters(), saved, strict=True):
            p.data.copy_(value)

    return put_back


def foreach(model: nn.Module, shadow: list[Tensor]) -> Callable[[], None]:
    saved = [p.detach().clone() for p in model.parameters()]
    parameters = list(model.parameters())
    with torch.no_grad():
        torch._foreach_copy_(parameters, shadow)

    @torch.no_grad()
    def put_back() -> None:
        torch._foreach_copy_(parameters, saved)

    return put_back


def load(model: nn.Module, shadow: list[Tensor]) -> Callable[[], None]:
    saved = model.state_dict()  # in fp32, from the masters
    saved_buffers = dict(model.named_buffers())
    values = {name: s for (name, _), s in zip(model.named_parameters(), shadow, strict=True)}
    model.load_state_dict({**{k: v for k, v in saved.items() if k in saved_buffers}, **values}, strict=False)
    return lambda: [None, model.load_state_dict(saved)][0]


SWAPS = [swap_data, assign_data, keep_data, exchange_data, copy_wide, copy_wide_and_data_back, foreach, load]


@pytest.fixture(scope="module")
def untouched() -> dict[str, Tensor]:
    values, _ = train("gpu", None)
    assert any(not torch.equal(v, v.bfloat16().float()) for v in values.values())  # the master has more bits
    return values


@crossed(
    told=["exchange_data-whole", "swap_data-nothing"],
    swap=SWAPS,
    between=BETWEEN,
)
def test_the_master_is_as_it_was(
    swap: Callable[..., Callable[[], None]], between: str, untouched: dict[str, Tensor]
) -> None:
    for site in ("gpu", "host", *(("nvme", "nvme_param") if between == "evaluate" else ())):
        values, evictions = train(site, swap, between)
        assert different(values, untouched) == [], site
        assert (evictions > 0) == (site != "gpu")


@pytest.mark.parametrize(
    "site", telling(["streamed", "every_site", "mixed_persistent", "nvme_some", "nvme_persistent"], "every_site")
)
def test_other_sites(site: str, untouched: dict[str, Tensor]) -> None:
    assert different(train(site, swap_data, "evaluate")[0], untouched) == []
    assert different(train(site, copy_wide, "read")[0], untouched) == []


def rank_train(site: str, swap_name: str | None, between: str, is_distributed: bool) -> dict[str, Tensor]:
    swap = next((s for s in SWAPS if s.__name__ == swap_name), None)
    return train(site, swap, between, world_size=2, enable_distributed_storage=is_distributed)[0]


@pytest.mark.parametrize(("is_distributed", "is_all"), [(True, False), (True, True), (False, True)])
@pytest.mark.full
def test_two_ranks(is_distributed: bool, is_all: bool) -> None:
    expected = run_ranks(rank_train, 2, "gpu", None, "nothing", is_distributed)[0]
    for site, swap, between in (
        ("host", "copy_wide", "evaluate"),
        ("gpu", "swap_data", "evaluate"),
        ("host", "swap_data", "nothing"),
        ("nvme", "swap_data", "evaluate"),
    )[: None if is_all else 1]:
        values = run_ranks(rank_train, 2, site, swap, between, is_distributed)[0]
        assert different(values, expected) == [], (site, swap, between)


def write_some(model: nn.Module, shadow: list[Tensor]) -> Callable[[], None]:
    """Every other element is put back, the others stay."""
    saved = [p.detach().clone() for p in model.parameters()]
    for p, value in zip(model.parameters(), shadow, strict=True):
        p.data.copy_(value)

    def put_back() -> None:
        for p, value in zip(model.parameters(), saved, strict=True):
            p.data.view(-1)[::2] = value.view(-1)[::2]

    return put_back


@pytest.mark.full
def test_element_by_element() -> None:
    results = {(s, b): train(s, write_some, b)[0] for s in ("gpu", "host", "nvme") for b in ("nothing", "read")}
    expected = results.pop(("gpu", "nothing"))
    for key, values in results.items():
        assert different(values, expected) == [], key
    module, _ = bodies.new_training(BF16, "host", CPU)
    name, p = next((n, p) for n, p in module.module.named_parameters() if p.dim() == 2)
    before = module.full_state_dict()[name]
    saved = p.detach().clone()
    p.data.fill_(0.25)
    read_all(module)
    p.data.view(-1)[::2] = saved.view(-1)[::2]
    after = module.full_state_dict()[name]
    assert torch.equal(after.view(-1)[::2], before.view(-1)[::2])
    assert bool((after.view(-1)[1::2] == 0.25).all())


def test_a_second_copy_in_16_bits_ends_what_the_first_gave() -> None:
    """Also where both round to the same values."""
    module, _ = bodies.new_training(BF16, "host", CPU)
    name, p = next((n, p) for n, p in module.module.named_parameters() if p.dim() == 2)
    given = torch.full(p.shape, 0.1)
    with torch.no_grad():
        p.copy_(given)
        assert torch.equal(module.full_state_dict()[name], given)
        p.copy_(given.bfloat16())
    assert torch.equal(module.full_state_dict()[name], given.bfloat16().float())


def test_it_is_remembered_until_the_next_step_only() -> None:
    module, optimizer = bodies.new_training(BF16, "host", CPU)

    def kept() -> int:
        return module.stats().held_bytes.get("cpu_written_over", 0)

    read_all(module)
    swap_data(module.module, [p.detach().clone() for p in module.module.parameters()])
    module.full_state_dict()
    assert kept() == 0  # what was written is what was there
    module.module.load_state_dict({k: v * 0.5 for k, v in module.module.state_dict().items()}, strict=False)
    assert kept() == 0  # a load is no writing for a while
    p = next(module.module.parameters())
    p.data.mul_(0.5)
    module.full_state_dict()
    assert kept() == p.numel() * 4
    optimizer.backward(ZOO["gpt2"].loss(module, 0))
    optimizer.step()
    assert kept() == 0
    p.data.mul_(0.5)
    module.full_state_dict()
    assert kept() == p.numel() * 4
    module.load_full_state_dict(module.full_state_dict())
    assert kept() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_time_of_absorbing_changes_nothing(dtype: torch.dtype) -> None:
    """Random writes, brought to the master at random moments, only at the end, or after every one."""
    key, size = (0, 0), 12
    for seed in range(300):
        ends = [_random_writes(seed, dtype, key, size, p) for p in (0.0, 0.5, 1.0)]
        assert torch.equal(ends[0], ends[1]), seed
        assert torch.equal(ends[0], ends[2]), seed


def _random_writes(seed: int, dtype: torch.dtype, key: tuple[int, int], size: int, chance: float) -> Tensor:
    dice, when = random.Random(seed), random.Random(seed + 1)
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(size, generator=generator)
    master, written = first.clone(), WrittenMasters()
    values = master.to(dtype)
    seen = [values.clone()]

    def absorb() -> None:
        if not torch.equal(values, master.to(dtype)):
            written.absorb(key, master, values, Tensor.clone)

    for _ in range(dice.randint(1, 6)):
        what = dice.choice(["some", "other", "seen", "wide", "near", "rounded"])
        if what == "some":
            values[:: dice.randint(1, 3)] = torch.randn(1, generator=generator).to(dtype)
        elif what == "other":
            values.copy_(torch.randn(size, generator=generator))
        elif what == "seen":
            values.copy_(dice.choice(seen))
        elif what == "rounded":
            given = dice.choice(seen)
            values.copy_(given)
            if written.has_given(*key):
                written.give_rounded(key, master, given)
        else:
            near = first * (1 + 2e-4 * torch.randn(size, generator=generator))
            given = near if what == "near" else torch.randn(size, generator=generator)
            values.copy_(given)
            written.give(key, master, given, Tensor.clone)
        seen.append(values.clone())
        if when.random() < chance:
            absorb()
    absorb()
    assert torch.equal(master.to(dtype), values)
    if torch.equal(values, seen[0]) and not written.has_given(*key):
        assert torch.equal(master, first)
    return master
