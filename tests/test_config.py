"""Every option is checked when the config is made, with an error that says what to do."""

from __future__ import annotations

import dataclasses
import inspect
import math
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

from lightning_elixir.errors import PlanError
from lightning_elixir.optim.scaling import LossScaling
from lightning_elixir.patterns import Column, Expert, Row
from lightning_elixir.plan.hardware import HardwareSpec, save_hardware
from lightning_elixir.plan.packing import ChunkSizes
from lightning_elixir.plan.problem import PlacementRequest
from lightning_elixir.plan.units import parse_bytes
from lightning_elixir.storage.nvme import BACKENDS
from lightning_elixir.storage.nvme.state_file import DiskOptions
from lightning_elixir.strategy.config import ElixirConfig, NvmeBackendName


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("40GiB", 40 * 2**30),
        ("64 MiB", 64 * 2**20),
        ("64mib", 64 * 2**20),
        (" 1.5GB ", 1_500_000_000),
        ("0.5KiB", 512),
        (".5kb", 500),
        ("1TiB", 2**40),
        ("10B", 10),
    ],
)
def test_sizes_are_read(size: int | str, nbytes: int) -> None:
    assert parse_bytes(size) == nbytes


@pytest.mark.parametrize("size", ["", "GiB", "12 parsecs", "2k", "-5MiB", -1, "1e9", "1,5GB", True, 1.5, None])
def test_what_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(PlanError, match="a size must"):
        parse_bytes(size)


def test_defaults_are_valid_and_frozen() -> None:
    config = ElixirConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.prefetch = False  # type: ignore[misc]


def test_sizes_of_options_are_given_in_bytes() -> None:
    config = ElixirConfig(
        chunk_size="64MiB", min_chunk_size=1024, chunk_search_range="1KiB", gpu_memory_limit="1GiB", cpu_memory_limit=7
    )
    assert config.chunk_sizes == ChunkSizes(2**26, 1024, 128, 1024)
    assert (config.gpu_limit_bytes, config.cpu_limit_bytes) == (2**30, 7)
    assert ElixirConfig().chunk_sizes == ChunkSizes()


def test_options_of_the_placement_go_into_one_request() -> None:
    config = ElixirConfig(
        placement_policy="const",
        shard_param_frac=0.1,
        offload_optim_frac=0.2,
        offload_param_frac=0.3,
        enable_distributed_storage=False,
        gpu_margin_mem_ratio=0.4,
    )
    request = PlacementRequest("const", 0.1, 0.2, 0.3, distributed_storage=False, gpu_margin_mem_ratio=0.4)
    assert config.placement_request() == request
    config = ElixirConfig(
        placement_policy="cpu", prefetch=False, nvme_offload_fraction=0.5, nvme_offload_param_fraction=0.6
    )
    on_nvme = PlacementRequest("cpu", nvme_offload_fraction=0.5, nvme_offload_param_fraction=0.6, prefetch_depth=0)
    assert config.placement_request() == on_nvme


def test_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(PlanError, match="'gpu': choose one of auto, cpu, cuda, const$"):
        ElixirConfig(placement_policy="gpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["shard_param_frac", "offload_optim_frac", "offload_param_frac"])
@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, "half", True])
def test_fraction_outside_0_to_1_is_refused(name: str, value: Any) -> None:
    with pytest.raises(PlanError, match=f"{name} must be between 0 and 1"):
        ElixirConfig(placement_policy="const", **{name: value})


def test_a_fraction_of_another_type_is_told_as_such() -> None:
    with pytest.raises(PlanError, match=r"must be between 0 and 1, as an int or a float, got np.float32\(0.5\)"):
        ElixirConfig(placement_policy="const", shard_param_frac=np.float32(0.5))  # type: ignore[arg-type]


def test_margin_ratio_is_a_fraction() -> None:
    assert ElixirConfig(gpu_margin_mem_ratio=0.5).gpu_margin_mem_ratio == 0.5
    with pytest.raises(PlanError, match="gpu_margin_mem_ratio"):
        ElixirConfig(gpu_margin_mem_ratio=1.5)


@pytest.mark.parametrize("given", ["no", 0, None])
@pytest.mark.parametrize("name", ["prefetch", "force_outputs_fp32", "async_save", "nvme_checksums"])
def test_yes_and_no_are_no_words(name: str, given: Any) -> None:
    with pytest.raises(PlanError, match=f"{name} must be True or False"):
        ElixirConfig(**{name: given})


@pytest.mark.parametrize("policy", ["auto", "cpu", "cuda"])
def test_fractions_of_const_are_refused_elsewhere(policy: Any) -> None:
    with pytest.raises(PlanError, match="offload_optim_frac belongs to placement_policy 'const'"):
        ElixirConfig(placement_policy=policy, offload_optim_frac=0.5)
    assert ElixirConfig(placement_policy="static", offload_optim_frac=0.5).offload_optim_frac == 0.5


@pytest.mark.parametrize("name", ["chunk_size", "min_chunk_size", "chunk_search_range", "gpu_memory_limit"])
def test_size_that_is_none_names_its_option(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name}: a size must be"):
        ElixirConfig(**{name: "big"})  # type: ignore[arg-type]


def test_chunks_of_no_size_are_refused() -> None:
    with pytest.raises(PlanError, match="chunk_size must be at least 1 byte, got 0: give bytes"):
        ElixirConfig(chunk_size=0)
    for nothing in (0, "0.5"):
        with pytest.raises(PlanError, match=r"cpu_memory_limit must be at least 1 byte, got '?0(\.5)?'?: give bytes"):
            ElixirConfig(cpu_memory_limit=nothing)


@pytest.mark.parametrize("given", [0, 1.5, "128", None, True])
def test_a_number_of_chunk_sizes_is_a_whole_one(given: Any) -> None:
    with pytest.raises(PlanError, match="chunk_search_n_grids must be a number of chunk sizes, at least 1, got"):
        ElixirConfig(chunk_search_n_grids=given)


@pytest.mark.parametrize("given", ["2.0", None, True, [1]])
@pytest.mark.parametrize("name", [option.name for option in fields(LossScaling)])
def test_options_of_the_loss_scale_are_numbers(name: str, given: Any) -> None:
    with pytest.raises(PlanError, match=f"{name} must be a number, got "):
        ElixirConfig(**{name: given})


def test_a_path_may_begin_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/at/home")
    config = ElixirConfig(nvme_offload_dir="~/states", plan="~/plan.json", hardware="~/h200.json", report_dir="~")
    found = (config.nvme_offload_dir, config.plan, config.hardware, config.report_dir)
    assert found == ("/at/home/states", "/at/home/plan.json", "/at/home/h200.json", "/at/home")
    assert DiskOptions("~/states").chosen_folder() == Path("/at/home/states")


def test_no_path_of_figures_is_refused() -> None:
    with pytest.raises(PlanError, match="hardware must be a HardwareSpec or the path of one .* got ''"):
        ElixirConfig(hardware="")


@pytest.mark.parametrize("given", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_reduce_dtype_by_name_or_dtype(given: Any) -> None:
    assert ElixirConfig(reduce_dtype=given).reduction_dtype is torch.bfloat16


@pytest.mark.parametrize("given", ["int8", torch.float64, "half"])
def test_other_reduce_dtype_is_refused(given: Any) -> None:
    with pytest.raises(PlanError, match="reduce_dtype must be one of float32, bfloat16, float16"):
        ElixirConfig(reduce_dtype=given)


@pytest.mark.parametrize(
    "options",
    [
        {"min_scale": -1.0},
        {"initial_scale": 0.0},
        {"initial_scale": math.inf},
        {"initial_scale": 0.5, "min_scale": 1.0},
        {"max_scale": 2.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
        {"hysteresis": 0},
    ],
)
def test_contradicting_loss_scale_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"(scale|factor|interval|hysteresis) must be "):
        ElixirConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nvme_offload_fraction": 2.0}, "nvme_offload_fraction must be between 0 and 1"),
        ({"nvme_offload_param_fraction": 2.0}, "nvme_offload_param_fraction must be between 0 and 1"),
        ({"nvme_offload_fraction": 0.5}, "placement_policy='cpu' .*not 'auto' .*give nvme_offload_dir alone"),
        ({"nvme_offload_fraction": 0.5, "placement_policy": "cuda"}, "not 'cuda' .*which has none there"),
        ({"nvme_offload_dir": ""}, "nvme_offload_dir must be the path of a folder, got ''"),
        ({"nvme_offload_dir": 3}, "nvme_offload_dir must be the path of a folder, got 3"),
        ({"nvme_backend": "floppy"}, "unknown nvme_backend 'floppy': choose one of direct, tensornvme"),
    ],
)
def test_nvme_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ElixirConfig(**options)


def test_nvme_options_that_can_be() -> None:
    assert not ElixirConfig().may_use_nvme
    assert ElixirConfig(nvme_offload_dir="somewhere").may_use_nvme
    assert ElixirConfig(nvme_offload_fraction=1.0, placement_policy="cpu").may_use_nvme
    assert get_args(NvmeBackendName) == BACKENDS  # config knows nothing of storage


@pytest.mark.parametrize("given", [3, b"there", {"chunks": []}, ""])
def test_plan_is_a_plan_or_a_path(given: Any) -> None:
    with pytest.raises(PlanError, match="plan must be a Plan or the path of one that was saved, got"):
        ElixirConfig(plan=given)


@pytest.mark.parametrize("given", [3, b"there", True])
def test_hardware_is_figures_or_a_path(given: Any) -> None:
    with pytest.raises(PlanError, match="hardware must be a HardwareSpec or the path"):
        ElixirConfig(hardware=given)


def test_hardware_is_read_from_its_file(tmp_path: Path) -> None:
    spec = HardwareSpec.nominal(7)
    save_hardware(spec, tmp_path / "machine.json")
    assert ElixirConfig(hardware=tmp_path / "machine.json").given_hardware() == spec
    assert ElixirConfig(hardware=str(tmp_path / "machine.json")).given_hardware() == spec
    assert ElixirConfig(hardware=spec).given_hardware() is spec
    assert ElixirConfig().given_hardware() is None
    with pytest.raises(PlanError, match="cannot read the hardware profile"):
        ElixirConfig(hardware="none.json").given_hardware()


def test_report_dir_is_a_path_and_makes_no_other_engine() -> None:
    with pytest.raises(PlanError, match="report_dir must be the path of a folder, got ''"):
        ElixirConfig(report_dir="")
    with pytest.raises(PlanError, match="report_dir must be the path of a folder, got 3"):
        ElixirConfig(report_dir=3)  # type: ignore[arg-type]
    assert ElixirConfig(report_dir="a") == ElixirConfig(report_dir="b")
    assert ElixirConfig(hardware="a") != ElixirConfig(hardware="b")


def test_strategy_has_every_option_with_the_same_default() -> None:
    from lightning_elixir.strategy import ElixirStrategy

    parameters = inspect.signature(ElixirStrategy.__init__).parameters
    documented = inspect.getdoc(ElixirStrategy.__init__) or ""
    for option in dataclasses.fields(ElixirConfig):
        assert parameters[option.name].default == option.default
        assert f"\n    {option.name}: " in documented


@pytest.mark.parametrize(
    ("sizes", "idle"),
    [
        ({}, {"tensor": ["'*.up'", "Linear"], "expert": ["'*.experts'"]}),
        ({"tensor_parallel_size": 2}, {"expert": ["'*.experts'"]}),
        ({"expert_parallel_size": 2}, {"tensor": ["'*.up'", "Linear"]}),
        ({"tensor_parallel_size": 2, "expert_parallel_size": 2}, {}),
    ],
)
def test_patterns_without_ranks_to_share_the_work(sizes: dict[str, int], idle: dict[str, list[str]]) -> None:
    config = ElixirConfig(patterns={"*.up": Column(), nn.Linear: Row(), "*.experts": Expert()}, **sizes)  # type: ignore[arg-type]
    assert config.idle_patterns == idle
    assert ElixirConfig(**sizes).idle_patterns == {}  # type: ignore[arg-type]
