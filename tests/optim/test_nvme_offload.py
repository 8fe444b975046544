"""`HybridAdam` with moments on a disk: the same numbers to the bit, and nothing wrong when the disk is."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from lightning_elixir.errors import PlanError, StorageError
from lightning_elixir.optim import CPUAdam, HybridAdam, nvme_moments, nvme_states
from lightning_elixir.storage.nvme import ALIGNMENT, BACKENDS, OffloadFile, folders, temporary_folder
from tests.helpers.tiers import crossed
from tests.storage.conftest import needs_tensornvme

KIB, MIB = 2**10, 2**20
# Larger than a region, small ones that share one, none at all, and one whose moments are not whole vectors.
SHAPES: list[tuple[int, ...]] = [(5,), (50_000,), (17, 33), (0,), (), (7_001, 3), (2, 3, 4, 5), (1,)]


@pytest.fixture(autouse=True)
def small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small parameters take several."""
    monkeypatch.setattr(nvme_states, "SMALLEST_REGION_BYTES", 64 * KIB)
    monkeypatch.setattr(nvme_states, "LARGEST_REGION_BYTES", 64 * KIB)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "tensornvme":
        needs_tensornvme()
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Empty afterwards."""
    yield tmp_path / "disk"
    gc.collect()
    assert not (tmp_path / "disk").exists() or list((tmp_path / "disk").iterdir()) == []


def make_parameters(dtype: torch.dtype = torch.float32, seed: int = 1) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_gradients(parameters: Sequence[Tensor], step: int, skip: Sequence[int] = ()) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for i, p in enumerate(parameters):
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = None if i in skip else grad


def train(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], steps: range, skip: Sequence[int] = ()
) -> None:
    for step in steps:
        set_gradients(parameters, step, skip)
        optimizer.step()


def on_disk(params: Any, folder: Path, fraction: float = 1.0, **options: Any) -> HybridAdam:
    return HybridAdam(params, nvme_offload_fraction=fraction, nvme_offload_dir=folder, **options)


def assert_same_dicts(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(actual["state"]) == list(expected["state"])
    for key, state in expected["state"].items():
        assert list(actual["state"][key]) == list(state)
        for name, value in state.items():
            found = actual["state"][key][name]
            assert torch.equal(found, value), (key, name)
            assert (found.dtype, found.stride()) == (value.dtype, value.stride())
    assert actual["param_groups"] == expected["param_groups"]


def assert_same(ours: HybridAdam, other: torch.optim.Optimizer) -> None:
    for group, theirs in zip(ours.param_groups, other.param_groups, strict=True):
        for p, q in zip(group["params"], theirs["params"], strict=True):
            assert torch.equal(p, q)
    assert_same_dicts(ours.state_dict(), other.state_dict())


# The same numbers


@pytest.mark.full  # combinations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_same_bits_whatever_share_is_on_nvme(fraction: float, dtype: torch.dtype, backend: str, folder: Path) -> None:
    plain, ours = make_parameters(dtype), make_parameters(dtype)
    reference = HybridAdam(plain, lr=1e-2, weight_decay=0.1)
    optimizer = on_disk(ours, folder, fraction, lr=1e-2, weight_decay=0.1, nvme_backend=backend)
    for step in range(5):
        for one, parameters in ((reference, plain), (optimizer, ours)):
            train(one, parameters, range(step, step + 1))
        assert_same(optimizer, reference)
    total = 2 * sum(p.numel() for p in ours) * dtype.itemsize
    assert fraction * total <= optimizer.nvme_bytes <= total
    assert (optimizer.nvme_bytes == 0) == (fraction == 0)
    assert folder.exists() == (fraction > 0)


def test_the_share_is_reached_with_the_first_parameters(folder: Path) -> None:
    parameters = [nn.Parameter(torch.ones(100)) for _ in range(10)]
    for fraction, count in ((0.1, 1), (0.11, 2), (0.5, 5), (0.95, 10)):
        optimizer = on_disk(parameters, folder, fraction)
        train(optimizer, parameters, range(1))
        held = [p for p in parameters if "exp_avg" in optimizer.state[p]]
        assert held == parameters[count:] or [id(p) for p in held] == [id(p) for p in parameters[count:]]
        assert optimizer.nvme_bytes == 2 * 4 * 100 * count
        assert list(optimizer.state[parameters[0]]) == ["step"]


def test_a_parameter_without_gradient_keeps_its_states(folder: Path) -> None:
    plain, ours = make_parameters(), make_parameters()
    reference, optimizer = HybridAdam(plain, weight_decay=0.5), on_disk(ours, folder, weight_decay=0.5)
    for one, parameters in ((reference, plain), (optimizer, ours)):
        train(one, parameters, range(2))
        train(one, parameters, range(2, 4), skip=(0, 1, 5))  # the first shares its region
        train(one, parameters, range(4, 5), skip=range(len(SHAPES)))
        train(one, parameters, range(5, 7))
    assert_same(optimizer, reference)
    assert optimizer.state[ours[1]]["step"].item() == 4.0


def test_a_parameter_that_never_had_a_gradient_has_no_state(folder: Path) -> None:
    ours = make_parameters()
    optimizer = on_disk(ours, folder)
    train(optimizer, ours, range(2), skip=(1, 4))
    assert sorted(optimizer.state_dict()["state"]) == [0, 2, 3, 5, 6, 7]


def test_groups_keep_their_settings_and_may_come_later(backend: str, folder: Path) -> None:
    def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": parameters[:3], "lr": 3e-3}, {"params": parameters[3:6], "betas": (0.8, 0.9), "eps": 1e-3}]

    plain, ours = make_parameters(), make_parameters()
    reference = HybridAdam(groups(plain), weight_decay=0.1)
    optimizer = on_disk(groups(ours), folder, weight_decay=0.1, nvme_backend=backend)
    for one, parameters in ((reference, plain), (optimizer, ours)):
        train(one, parameters[:6], range(2))
        one.add_param_group({"params": parameters[6:], "weight_decay": 0.3})
        train(one, parameters, range(2, 5))
    assert_same(optimizer, reference)
    assert optimizer.nvme_bytes == 8 * sum(p.numel() for p in ours)


def test_parameters_that_begin_to_train_come_later(folder: Path) -> None:
    plain, ours = make_parameters(), make_parameters()
    reference, optimizer = HybridAdam(plain), on_disk(ours, folder)
    for one, parameters in ((reference, plain), (optimizer, ours)):
        parameters[1].requires_grad_(False)
        train(one, parameters, range(2), skip=(1,))
        if one is optimizer:
            assert optimizer.nvme_bytes == 8 * sum(p.numel() for i, p in enumerate(ours) if i != 1)
        parameters[1].requires_grad_(True)
        train(one, parameters, range(2, 4))
    assert_same(optimizer, reference)
    assert optimizer.nvme_bytes == 8 * sum(p.numel() for p in ours)


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer_class", [HybridAdam, CPUAdam])
def test_16_bit_gradients(optimizer_class: type[HybridAdam], grad_dtype: torch.dtype, folder: Path) -> None:
    plain, ours = make_parameters(), make_parameters()
    reference = optimizer_class(plain)
    optimizer = optimizer_class(ours, nvme_offload_fraction=1.0, nvme_offload_dir=str(folder))
    for p in (*plain, *ours):
        p.grad_dtype = grad_dtype
    for step in range(3):
        for one, parameters in ((reference, plain), (optimizer, ours)):
            for i, p in enumerate(parameters):
                seed = torch.Generator().manual_seed(10 * step + i)
                p.grad = torch.randn(p.shape, generator=seed).to(grad_dtype)
            one.step()
    assert_same(optimizer, reference)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "permuted": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "with_gaps": lambda x: torch.stack([x, x], dim=-1)[..., 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_in_memory_does_not_matter(layout: str, folder: Path) -> None:
    value = torch.randn(20, 30, 10, 2)  # several regions
    plain, ours = (nn.Parameter(LAYOUTS[layout](value.clone())) for _ in range(2))
    reference, optimizer = HybridAdam([plain], weight_decay=0.1), on_disk([ours], folder, weight_decay=0.1)
    for step in range(3):
        for one, p in ((reference, plain), (optimizer, ours)):
            train(one, [p], range(step, step + 1))
    assert ours.stride() == plain.stride()
    assert_same(optimizer, reference)
    fresh = nn.Parameter(LAYOUTS[layout](value.clone()))
    loaded = on_disk([fresh], folder)
    loaded.load_state_dict(reference.state_dict())
    assert_same_dicts(loaded.state_dict(), reference.state_dict())


def test_several_optimizers_in_one_process(folder: Path) -> None:
    pairs = [(make_parameters(seed=i), make_parameters(seed=i)) for i in range(3)]
    references = [HybridAdam(plain) for plain, _ in pairs]
    optimizers = [on_disk(ours, folder) for _, ours in pairs]
    for step in range(3):
        for (plain, ours), reference, optimizer in zip(pairs, references, optimizers, strict=True):
            train(reference, plain, range(step, step + 1))
            train(optimizer, ours, range(step, step + 1))
    for reference, optimizer in zip(references, optimizers, strict=True):
        assert_same(optimizer, reference)


def test_nothing_is_read_in_the_first_step_and_no_little_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, list[int]] = {"read": [], "write": []}
    for name in sizes:
        real = getattr(OffloadFile, name)

        def counted(
            file: OffloadFile, region: int, tensor: Tensor, *, _name: str = name, _real: Any = real, **o: Any
        ) -> Any:
            sizes[_name].append(tensor.nbytes)
            return _real(file, region, tensor, **o)

        monkeypatch.setattr(OffloadFile, name, counted)
    parameters = [nn.Parameter(torch.ones(10)) for _ in range(500)] + make_parameters()
    parameters[1:300:2] = [nn.Parameter(torch.ones(10, dtype=torch.bfloat16)) for _ in range(150)]
    optimizer = on_disk(parameters, folder)
    train(optimizer, parameters, range(1))
    assert sizes["read"] == []
    train(optimizer, parameters, range(1, 2))
    moments = sizes["read"]  # two of each region
    assert sizes["write"] == moments * 2
    assert sum(nbytes < 31 * KIB for nbytes in moments) <= 4  # the last region of each dtype
    assert all(nbytes % ALIGNMENT == 0 for nbytes in moments)
    assert sum(moments) < optimizer.nvme_bytes + 508 * 128 + len(moments) * ALIGNMENT  # moments begin at whole vectors


# State dicts


@pytest.mark.parametrize("direction", ["from_torch", "to_torch"])
def test_state_dict_is_interchangeable_with_torch(direction: str, backend: str, folder: Path) -> None:
    theirs, ours = make_parameters(), make_parameters()
    reference = torch.optim.AdamW(theirs, lr=1e-3, foreach=False)
    optimizer = on_disk(ours, folder, 0.6, nvme_backend=backend)
    source, target = (reference, optimizer) if direction == "from_torch" else (optimizer, reference)
    train(source, theirs if direction == "from_torch" else ours, range(3))
    saved = pickle.loads(pickle.dumps(source.state_dict()))
    target.load_state_dict(saved)
    found = target.state_dict()["state"]
    for key, state in saved["state"].items():
        assert all(torch.equal(found[key][name], value) for name, value in state.items())
    train(target, theirs if target is reference else ours, range(3, 5))


def test_loaded_states_go_to_the_disk_and_training_goes_on(backend: str, folder: Path, tmp_path: Path) -> None:
    plain, ours = make_parameters(), make_parameters()
    reference = HybridAdam(plain, lr=1e-2)
    train(reference, plain, range(3), skip=(2,))
    torch.save(reference.state_dict(), tmp_path / "states.pt")
    optimizer = on_disk(ours, folder, nvme_backend=backend)
    train(optimizer, ours, range(7, 9))  # other states, also of the one that has none in the file
    for p, q in zip(ours, plain, strict=True):
        p.data.copy_(q)
    optimizer.load_state_dict(torch.load(tmp_path / "states.pt", mmap=True))
    assert all(list(s) == ["step"] for p, s in optimizer.state.items() if p.numel())
    assert_same(optimizer, reference)
    for one, parameters in ((reference, plain), (optimizer, ours)):
        train(one, parameters, range(3, 6))
    assert_same(optimizer, reference)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_go_on_bitwise_and_apart(duplicate: Callable[[Any], Any], folder: Path) -> None:
    plain, ours = make_parameters(), make_parameters()
    reference, optimizer = HybridAdam(plain), on_disk(ours, folder, 0.7)
    for one, parameters in ((reference, plain), (optimizer, ours)):
        train(one, parameters, range(2))
    other = duplicate(optimizer)
    copies = other.param_groups[0]["params"]
    train(reference, plain, range(2, 4))
    train(other, copies, range(2, 4))
    assert_same(other, reference)
    assert other.nvme_bytes == optimizer.nvme_bytes > 0
    train(optimizer, ours, range(2, 4))
    assert_same(optimizer, reference)


def test_states_come_one_by_one(folder: Path) -> None:
    ours = make_parameters()
    optimizer = on_disk(ours, folder, 0.9)
    train(optimizer, ours, range(2), skip=(2,))
    found = dict(optimizer.iter_states())
    whole = optimizer.state_dict()["state"]
    assert {i for i, p in enumerate(ours) if p in found} == set(whole)
    for i, state in whole.items():
        assert all(torch.equal(found[ours[i]][name], value) for name, value in state.items())


def test_moments_that_are_put_beside_the_disk_are_the_newer_ones(folder: Path) -> None:
    ours = make_parameters()
    optimizer = on_disk(ours, folder)
    train(optimizer, ours, range(2))
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[ours[0]][name] = torch.full_like(ours[0], 0.5).detach()
    saved = optimizer.state_dict()["state"][0]
    assert all(bool((saved[name] == 0.5).all()) for name in ("exp_avg", "exp_avg_sq"))


def test_states_that_are_taken_away_begin_anew(folder: Path) -> None:
    plain, ours = make_parameters(), make_parameters()
    reference, optimizer = HybridAdam(plain), on_disk(ours, folder)
    for one, parameters in ((reference, plain), (optimizer, ours)):
        train(one, parameters, range(2))
        one.state.clear()
        train(one, parameters, range(2, 4))
    assert_same(optimizer, reference)


def test_states_of_another_size_are_refused(folder: Path) -> None:
    ours = make_parameters()
    optimizer = on_disk(ours, folder)
    train(optimizer, ours, range(1))
    saved = optimizer.state_dict()
    saved["state"][1]["exp_avg"] = torch.ones(3)
    with pytest.raises(PlanError, match=r"exp_avg of shape \(3,\) is not of a parameter of shape \(50000,\)"):
        optimizer.load_state_dict(saved)


# What cannot be


def test_parameters_elsewhere_are_refused(folder: Path) -> None:
    p = nn.Parameter(torch.ones(3, device="meta"))
    with pytest.raises(PlanError, match=r"parameters on the CPU, but .* is on meta; leave nvme_offload_fraction at 0"):
        on_disk([p], folder)
    HybridAdam([p])


def test_a_parameter_that_changes_is_refused_before_anything_is_updated(folder: Path) -> None:
    ours = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
    optimizer = on_disk(ours, folder)
    train(optimizer, ours, range(1))
    before = ours[0].detach().clone()
    ours[1].data = ours[1].data.double()
    set_gradients(ours, 1)
    with pytest.raises(PlanError, match=r"was of shape \(4,\) and torch.float32, and is torch.float64 now"):
        optimizer.step()
    assert torch.equal(ours[0], before)


def test_bad_settings_change_nothing_on_the_disk(folder: Path) -> None:
    on_disk(make_parameters(), folder)  # no step, no file
    assert not folder.exists()


# Folders


def test_without_a_folder_a_disk_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = make_parameters()
    monkeypatch.setattr(nvme_moments, "temporary_folder", lambda: tmp_path / "found")
    optimizer = HybridAdam(ours, nvme_offload_fraction=1.0)
    train(optimizer, ours, range(1))
    assert (tmp_path / "found").is_dir()


def test_temporary_folders_in_memory_are_passed_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(folders, "is_in_memory", lambda folder: folder == tmp_path)
    assert temporary_folder() == Path("/var/tmp")
    monkeypatch.setattr(folders, "is_in_memory", lambda folder: True)
    with pytest.raises(StorageError, match="name one on the disk to offload to"):
        temporary_folder()


def test_what_is_in_memory() -> None:
    found = [Path(m.mountpoint) for m in psutil.disk_partitions(all=True) if m.fstype == "tmpfs"]
    if not found:
        pytest.skip("nothing is mounted in memory here")
    assert folders.is_in_memory(found[0])
    assert folders.is_in_memory(found[0] / "missing" / "folder")
    assert not folders.is_in_memory(Path(__file__).parent)


# Disks that fail


def failing(real: Callable[..., int], number: int, after: int) -> Callable[..., int]:
    left = [after]

    def call(*arguments: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    return call


@crossed(together=1, call=["preadv", "pwritev"], after=[0, 3], number=[errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_in_a_step(
    call: str, after: int, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours = make_parameters(), make_parameters()
    reference, optimizer = HybridAdam(plain), on_disk(ours, folder, 0.9)
    for one, parameters in ((reference, plain), (optimizer, ours)):
        train(one, parameters, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    values = [p.detach().clone() for p in ours]
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(getattr(os, call), number, after))
        set_gradients(ours, 2)
        with pytest.raises(StorageError, match=r"the step was cut off: \d of 8 parameters have") as caught:
            optimizer.step()
    assert caught.value.offset is not None
    assert (caught.value.path or folder).parent == folder
    # Nothing goes on with half a step.
    gc.collect()
    set_gradients(ours, 3)
    for refused in (optimizer.step, optimizer.state_dict, lambda: dict(optimizer.iter_states())):
        with pytest.raises(StorageError, match="the step was cut off.*load a checkpoint"):
            refused()
    # But with a checkpoint.
    for p, value in zip(ours, values, strict=True):
        p.data.copy_(value)
    optimizer.load_state_dict(saved)
    assert_same(optimizer, reference)
    for one, parameters in ((reference, plain), (optimizer, ours)):
        train(one, parameters, range(2, 4))
    assert_same(optimizer, reference)


def test_a_step_that_is_interrupted_is_not_gone_on_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_parameters()
    optimizer = on_disk(ours, folder)
    train(optimizer, ours, range(1))

    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(nvme_moments, "adam_update_", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(optimizer, ours, range(1, 2))
    with pytest.raises(StorageError, match=r"1 of 8 parameters have .*KeyboardInterrupt"):
        optimizer.state_dict()


def test_a_full_disk_is_seen_before_anything_is_updated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_parameters()
    optimizer = on_disk(ours, folder)
    before = [p.detach().clone() for p in ours]
    set_gradients(ours, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing(os.posix_fallocate, errno.ENOSPC, 0))
        with pytest.raises(StorageError, match="choose a folder on a larger disk, or offload less"):
            optimizer.step()
    assert all(torch.equal(p, value) for p, value in zip(ours, before, strict=True))
    assert not optimizer.state
    optimizer.step()  # there is room now
    assert optimizer.nvme_bytes > 0


def test_states_that_cannot_be_brought_are_lost_and_said_to_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_parameters()
    optimizer = on_disk(ours, folder)
    train(optimizer, ours, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing(os.pwritev, errno.EIO, 1))
        with pytest.raises(StorageError, match="moments were being brought to NVMe, and are lost"):
            optimizer.load_state_dict(saved)
    with pytest.raises(StorageError, match="load a checkpoint"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    assert_same_dicts(optimizer.state_dict(), saved)


# Nothing stays behind


def test_the_file_goes_with_the_optimizer(folder: Path) -> None:
    ours = make_parameters()
    optimizer = on_disk(ours, folder)
    before, threads = len(os.listdir("/proc/self/fd")), psutil.Process().num_threads()
    train(optimizer, ours, range(2))
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del optimizer
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert psutil.Process().num_threads() <= threads + 4


MEMORY = """
    import gc, sys
    import psutil, torch
    from torch import nn
    from lightning_elixir.optim import HybridAdam

    fraction, folder = float(sys.argv[1]), sys.argv[2]
    parameters = [nn.Parameter(torch.ones(4 * 2**20)) for _ in range(8)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = HybridAdam(parameters, nvme_offload_fraction=fraction, nvme_offload_dir=folder)
    for _ in range(2):
        optimizer.step()
    print(psutil.Process().memory_info().rss)
"""


@pytest.mark.full
def test_resident_memory_is_down_by_the_states(folder: Path) -> None:
    def resident(fraction: float) -> int:
        program = [sys.executable, "-c", textwrap.dedent(MEMORY), str(fraction), str(folder)]
        done = subprocess.run(program, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
        return int(done.stdout)

    states = 8 * 2 * 16 * MIB
    buffers = 3 * 16 * MIB
    saved = resident(0.0) - resident(1.0)
    assert saved == pytest.approx(states - buffers, abs=12 * MIB)


# The example


ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_the_example_shows_equal_losses_and_less_memory(folder: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "nvme_offload.py"), "--quick", "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losses: equal to the last bit" in done.stdout
    assert re.search(r"MiB of moments without 20 MiB of buffers: as expected", done.stdout)


@pytest.mark.parametrize("broken", [{"losses": ["0x1p+2"]}, {"resident_bytes": 900 * MIB}])
def test_the_example_fails_where_that_is_not_so(broken: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "nvme_offload.py"))
    usual = {"losses": ["0x1p+1"], "num_params": 1, "update_s": 1.0, "nvme_bytes": 400 * MIB, "buffer_bytes": 100 * MIB}
    found = {0.0: {**usual, "resident_bytes": 1000 * MIB}, 1.0: {**usual, "resident_bytes": 700 * MIB}}
    monkeypatch.setitem(example["main"].__globals__, "run", lambda options, fraction: found[fraction])
    monkeypatch.setattr(sys, "argv", ["nvme_offload.py"])
    assert example["main"]() == 0
    found[1.0].update(broken)
    assert example["main"]() == 1
