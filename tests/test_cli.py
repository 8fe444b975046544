"""The command `lightning-elixir`: what it prints, writes and returns."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytest.importorskip("rich")

from lightning_elixir import ElixirStrategy
from lightning_elixir._lightning import Trainer
from lightning_elixir.cli import main
from lightning_elixir.cli.bench import origin_text
from lightning_elixir.cli.machine import machine_of, named_hardware
from lightning_elixir.cli.options import make_parser
from lightning_elixir.cli.shapes import SHAPES, refuse_unknown, shape_name
from lightning_elixir.cli.subject import key_values, module_subject
from lightning_elixir.cli.wording import in_options, size_of, speaking_of_options
from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.hardware import HardwareSpec, load_hardware, save_hardware
from lightning_elixir.plan.io import load_plan, plan_from_dict
from lightning_elixir.plan.sharding import describe_sharding
from lightning_elixir.plan.units import format_bytes, format_seconds
from lightning_elixir.profiling.disturbance import CoreWatch
from lightning_elixir.profiling.measured_hardware import FoundHardware, HardwareProbe
from lightning_elixir.profiling.stopwatch import Stopwatch
from lightning_elixir.report.tables import GPU_KINDS
from tests.helpers.dist import run_ranks
from tests.helpers.releases import need_experts_in_one_module
from tests.helpers.tiers import full, telling

ROOT = Path(__file__).parents[1]
GIB = 2**30
MEMORY = ["--gpu-memory", "1GiB", "--cpu-memory", "8GiB"]
TINY = ["--set", "n_layer=2", "n_embd=64", "n_head=4", "vocab_size=512", "n_positions=128"]
TINY += ["--batch-size", "2", "--seq-len", "64"]
GPT = ["plan", "--model", "gpt2", *TINY, *MEMORY]

MODULE = """
import torch
from torch import nn

from lightning_elixir._lightning import LightningModule


class Net(LightningModule):
    def __init__(self, width=64):
        super().__init__()
        self.width = width

    def configure_model(self):
        self.layers = nn.Sequential(nn.Linear(16, self.width), nn.ReLU(), nn.Linear(self.width, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"twice": 2 * loss})
        return {"loss": loss, "epoch": self.current_epoch}


class WithExample(Net):
    def __init__(self):
        super().__init__()
        self.example_input_array = (torch.zeros(8, 16), torch.zeros(8, 1))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 32)

    def forward(self, x, y):
        return {"a": self.layer(x), "b": [y]}


class NoLoss(Net):
    def training_step(self, batch):
        return None


class ReadsValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(int(torch.ones(1).item()), 1)


def batch():
    return torch.randn(4, 16), torch.randn(4, 1)


def tokens():
    return {"input_ids": torch.zeros(3, 7, dtype=torch.long)}


class OtherStructure(Net):
    def __init__(self):
        super().__init__()
        self.example_input_array = torch.zeros(8, 16)

    def training_step(self, batch):
        return self.layers(batch["x"]).sum()


not_callable = 3
"""


@pytest.fixture(scope="module", autouse=True)
def _needs_transformers() -> None:
    pytest.importorskip("transformers")


@pytest.fixture
def module_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the user's own; what importing it leaves in `sys` is taken back."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "user_code", raising=False)
    path = tmp_path / "user_code.py"
    path.write_text(MODULE)
    return path


def parse(*arguments: str) -> argparse.Namespace:
    return make_parser().parse_args(["plan", *arguments])


def shown_number(output: str, label: str) -> float:
    """The number after a label of the printed tables."""
    match = re.search(rf"{label}\s+([\d.,]+)", output)
    assert match, output
    return float(match[1].replace(",", ""))


# plan


def test_plan_prints_and_writes_what_it_finds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*GPT, "--save-plan", "plan.json", "--html", "report.html"]) == 0
    output = capsys.readouterr().out
    assert "It fits: gpt2 with n_layer=2" in output
    for part in ("everything on the GPU", "activations and other data", "forward and backward", "between backward"):
        assert part in output
    step = re.search(r"one step\s+([\d.]+) (us|ms|s)", output)
    assert step
    seconds = float(step[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[step[2]]
    assert shown_number(output, "tokens a second") == pytest.approx(128 / seconds, rel=0.01)
    plan = load_plan("plan.json")
    assert plan.forecast is not None
    assert plan.forecast.gpu_limit_bytes == GIB
    beside = plan.gpu_kinds["non_model_bytes"] - plan.forecast.margin_bytes  # as in `explain()` and in the report
    assert plan.forecast.margin_bytes
    assert re.search(rf"activations and other data\W+{re.escape(format_bytes(beside))}", output)
    assert "left to the allocator and to larger batches" in output
    assert "transformer.h.1.mlp.c_fc.weight" in {m.fqn for c in plan.chunks for m in c.members}
    page = (tmp_path / "report.html").read_text()
    assert "gpt2 with n_layer=2" in page
    assert 'class="memory"' in page


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--gpu_memory_limit", "24GiB"], "there is no option --gpu_memory_limit; did you mean --gpu-memory?"),
        (["--batchsize=3"], "there is no option --batchsize; did you mean --batch-size?"),
        (["--quux"], "there is no option --quux; --help has them all"),
    ],
)
def test_an_option_that_there_is_not_is_told_with_the_nearest(
    capsys: pytest.CaptureFixture[str], given: list[str], told: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--model", "gpt2", *given])
    assert told in capsys.readouterr().err


def test_json_has_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT, "--json", "--gpus", "2", "--accumulate", "3"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["fits"] is True
    assert content["num_params"] == 512 * 64 + 128 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64
    assert content["tokens_per_s"] == pytest.approx(2 * 64 * 2 * 3 / content["step_s"])
    assert content["samples_per_s"] == pytest.approx(2 * 2 * 3 / content["step_s"])
    plan = plan_from_dict(content["plan"])
    assert plan.world_size == 2
    times = content["plan"]["forecast"]["times"]
    assert content["step_s"] == pytest.approx(times["total_s"], rel=1e-3)
    parts = times["compute_s"] + times["waiting_s"] + times["step_s"]
    assert content["step_s"] == pytest.approx(parts, rel=1e-3)
    assert main([*GPT, "--json", "--gpus", "2"]) == 0
    once = json.loads(capsys.readouterr().out)["plan"]["forecast"]["times"]
    assert times["compute_s"] == pytest.approx(3 * once["compute_s"])
    assert content["profile"]["activation_bytes"] > 2 * 64 * 512 * 4  # the logits in fp32
    assert HardwareSpec.from_dict(content["hardware"]).host_bytes == 8 * GIB


@pytest.mark.full
def test_a_clip_value_of_0_clips_nothing_as_in_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    contents = []
    for options in ([], ["--gradient-clip-val", "0"], ["--gradient-clip-val", "1"]):
        assert main([*GPT, "--json", *options]) == 0
        contents.append(json.loads(capsys.readouterr().out))
    assert contents[0] == contents[1]
    assert contents[0]["plan"] != contents[2]["plan"]
    with pytest.raises(SystemExit):
        main([*GPT, "--gradient-clip-val", "-1"])
    assert "must be a positive number, or 0 for no clipping, got -1" in capsys.readouterr().err


def test_fused_operators_are_named_where_they_help(capsys: pytest.CaptureFixture[str]) -> None:
    def reason(limit: str, *more: str) -> str:
        large = [word.replace("vocab_size=512", "vocab_size=50000") for word in TINY]
        training = ["--batch-size", "8", "--seq-len", "128", *more]
        main(["plan", "--model", "gpt2", *large, "--gpu-memory", limit, "--cpu-memory", "8GiB", *training, "--json"])
        return str(json.loads(capsys.readouterr().out).get("reason"))

    assert reason("350MiB").endswith(" Or with fused operators: it fits with --use-fused-kernels.")
    assert reason("350MiB", "--use-fused-kernels") == "None"
    lacking, with_fused = (reason("150MiB", *more) for more in ([], ["--use-fused-kernels"]))
    assert re.search(r"With --use-fused-kernels it lacks [\d.]+ MiB less\.$", lacking)
    assert "use-fused" not in with_fused


@pytest.mark.full
def test_what_does_not_fit_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "gpt2", *TINY, "--gpu-memory", "600KiB", "--cpu-memory", "8GiB"]
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "It does not fit. GPU memory: " in captured.err
    assert "What would fit: " in captured.err
    assert main([*arguments, "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["fits"] is False
    assert "What would fit" in content["reason"]


@pytest.mark.parametrize("policy", telling(["auto", "cpu", "cuda"], "auto"))
def test_refusals_name_options_of_the_command(capsys: pytest.CaptureFixture[str], policy: str) -> None:
    arguments = ["plan", "--model", "gpt2", *TINY, "--gpu-memory", "600KiB", "--cpu-memory", "8GiB"]
    assert main([*arguments, "--policy", policy]) == 1
    message = capsys.readouterr().err
    of_python = [name for name in inspect.signature(ElixirStrategy).parameters if "_" in name]
    assert not [name for name in of_python if name in message]


def test_little_memory_offloads(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["n_layer=4", "n_embd=256", "n_head=4", "vocab_size=8192", "n_positions=128"]
    arguments = ["plan", "--model", "gpt2", "--set", *sizes, "--batch-size", "1", "--gpu-memory", "130MiB"]
    assert main([*arguments, "--cpu-memory", "8GiB"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "stay on the GPU" in output
    assert "does not fit" in output  # everything on the GPU, as a runner-up
    assert "speeds are round figures" in output


@pytest.mark.parametrize("gpus", ["1", "2"])
def test_what_is_made_on_the_gpu_for_each_use_is_told(capsys: pytest.CaptureFixture[str], gpus: str) -> None:
    """Chunks that are gathered from parts that stay on the GPUs, or cast from masters, where no whole chunk stays."""
    arguments = [*SMALL_GPT, "--gpu-memory", "134MiB", "--gpus", gpus]
    assert main([*arguments, "--json"]) == 0
    plan = plan_from_dict(json.loads(capsys.readouterr().out)["plan"])
    made = sum(not c.is_persistent and c.param_tier.value == "gpu" for c in plan.chunks)
    assert made
    assert main(arguments) == 0
    assert f"parameters of {made} are made there when they are needed" in " ".join(capsys.readouterr().out.split())


SMALL_GPT = ["plan", "--model", "gpt2", "--set", "n_layer=4", "n_embd=256", "n_head=4", "vocab_size=1000"]
SMALL_GPT += ["n_positions=128", "--batch-size", "1", "--chunk-size", "256KiB", "--cpu-memory", "8GiB"]


@pytest.mark.full
def test_a_plan_that_fits_is_not_shown_above_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """Though the highest of all kinds together would be: gradients come while activations go. Of each kind it shows
    what that takes at the highest moment."""
    arguments = [*SMALL_GPT, "--gpu-memory", "135MiB", "--html", "plan.html"]
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    notes, kinds = plan["notes"], plan["forecast"]["gpu_kinds"]
    assert sum(int(notes[key]) for key, *_ in GPU_KINDS) > 135 * 2**20 > notes["gpu_bytes"]
    assert main(arguments) == 0
    table = capsys.readouterr().out.partition("Bytes of each rank")[2].partition("One step")[0]
    shown = f"{notes['gpu_bytes'] / 2**20:.1f} MiB"
    assert re.search(rf"at the highest moment\W+{re.escape(shown)}", table)
    assert "together" not in table
    assert "each kind at" not in table
    assert sum(kinds.values()) == notes["gpu_bytes"]
    assert f"{kinds['gpu_state_bytes'] / 2**20:.1f} MiB" in table
    page = Path("plan.html").read_text(encoding="utf-8")
    assert re.search(rf"<td>at the highest moment</td><td[^>]*>{re.escape(shown)}", page)
    assert f"{kinds['gpu_state_bytes'] / 2**20:.1f} MiB" in page


@pytest.mark.parametrize("policy", telling(["auto", "cpu"], "auto"))
def test_checkpointing_is_not_advised_to_those_who_have_it(capsys: pytest.CaptureFixture[str], policy: str) -> None:
    arguments = [*SMALL_GPT, "--gpu-memory", "60MiB", "--policy", policy]
    assert main(arguments) == 1
    assert "activation checkpointing" in capsys.readouterr().err
    assert main([*arguments, "--checkpointing"]) == 1
    advice = capsys.readouterr().err
    assert "checkpointing" not in advice
    assert ("a smaller batch" if policy == "cpu" else "(a batch that much smaller)") in advice


def test_policy_and_chunk_size_are_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT, "--policy", "cpu", "--chunk-size", "64KiB", "--json"]) == 0
    plan = plan_from_dict(json.loads(capsys.readouterr().out)["plan"])
    assert plan.policy == "cpu"
    assert plan.block_bytes <= 64 * 2**10
    assert {c.optim_tier.value for c in plan.chunks} == {"cpu"}


@pytest.mark.parametrize("precision", telling(["64-true", "32-true", "16-mixed", "bf16-true"], "16-mixed", "bf16-true"))
def test_precision_decides_the_bytes(capsys: pytest.CaptureFixture[str], precision: str) -> None:
    assert main([*GPT, "--precision", precision, "--json", "--policy", "cuda"]) == 0
    content = json.loads(capsys.readouterr().out)
    numel = sum(c["numel"] for c in content["plan"]["chunks"])
    notes = content["plan"]["notes"]
    per_param = {"64-true": (8, 16), "32-true": (4, 8), "16-mixed": (2, 12), "bf16-true": (2, 4)}[precision]
    assert (notes["gpu_param_bytes"], notes["gpu_state_bytes"]) == (numel * per_param[0], numel * per_param[1])


def test_states_on_nvme_are_planned_and_the_disk_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["plan", "--model", "gpt2", "--set", "n_layer=12", "n_embd=256", "n_head=4", "vocab_size=1000"]
    arguments += ["--seq-len", "128", "--batch-size", "2", "--chunk-size", "1MiB", "--checkpointing"]
    arguments += ["--gpu-memory", "140MiB", "--cpu-memory", "90MiB", "--nvme-memory", "1GiB"]
    arguments += ["--nvme-read-gb-s", "0.5", "--nvme-write-gb-s", "0.4", "--html", "plan.html"]
    assert main(arguments) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "the disk sets the pace: it reads and writes states for" in out
    assert "buffers for states on NVMe" in out
    assert "busy: NVMe, states read and written" in out
    assert "training takes nvme_offload_dir, a folder on that disk" in out
    assert "cannot be run" not in out
    page = Path("plan.html").read_text(encoding="utf-8")
    assert "The disk sets the pace" in page
    assert "states read from NVMe" in page
    assert main([*arguments[:-10], "--cpu-memory", "300MiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["notes"]["nvme_bytes"] == 0


@pytest.mark.full
def test_checkpointing_saves_activations(capsys: pytest.CaptureFixture[str]) -> None:
    peaks = []
    for extra in ([], ["--checkpointing"]):
        arguments = ["plan", "--model", "llama", "--set", "num_hidden_layers=4", "hidden_size=64", "vocab_size=32"]
        arguments += ["intermediate_size=256", "num_attention_heads=4", "--seq-len", "512", *MEMORY, "--json", *extra]
        assert main(arguments) == 0
        peaks.append(json.loads(capsys.readouterr().out)["profile"]["activation_bytes"])
    assert peaks[1] < 0.7 * peaks[0]


def test_config_file_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 16}
    config |= {"architectures": ["GPT2LMHeadModel"], "torch_dtype": "bfloat16", "transformers_version": "4.0.0"}
    Path("small.json").write_text(json.dumps(config))
    assert main(["plan", "--model", "small.json", *MEMORY, "--json", "--precision", "32-true"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["model"] == "small"
    assert content["num_params"] == 100 * 32 + 16 * 32 + 12 * 32 * 32 + 13 * 32 + 2 * 32
    assert content["plan"]["compute_dtype"] == "float32"


def test_encoder_decoder_models_work(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["num_layers=1", "d_model=32", "d_ff=64", "num_heads=2", "d_kv=16", "vocab_size=100"]
    assert main(["plan", "--model", "t5", "--set", *sizes, "--seq-len", "16", *MEMORY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


# As published, in billions; of models that see pictures too, the part that reads and writes text.
BILLIONS = {
    **{"gpt2": 0.124, "gpt2-xl": 1.56, "opt-1.3b": 1.32, "opt-30b": 30.0, "opt-175b": 174.6},
    **{"llama-2-7b": 6.74, "llama-2-13b": 13.02, "llama-2-70b": 68.98, "llama-3-8b": 8.03, "llama-3-70b": 70.6},
    **{"llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6, "llama-3.1-405b": 405.9, "llama-3.3-70b": 70.6},
    **{"llama-3.2-1b": 1.236, "llama-3.2-3b": 3.21},
    **{"qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.77},
    **{"qwen2.5-32b": 32.76, "qwen2.5-72b": 72.7, "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02},
    **{"qwen3-8b": 8.19, "qwen3-14b": 14.77, "qwen3-32b": 32.76, "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.1},
    **{"mistral-7b": 7.24, "mistral-nemo-12b": 12.25, "mistral-small-24b": 23.57, "mistral-large-123b": 122.6},
    **{"mixtral-8x7b": 46.7, "mixtral-8x22b": 140.6},
    **{"gemma-2b": 2.506, "gemma-7b": 8.54, "gemma-2-2b": 2.614, "gemma-2-9b": 9.24, "gemma-2-27b": 27.23},
    **{"gemma-3-1b": 1.0, "gemma-3-4b": 3.88, "gemma-3-12b": 11.77, "gemma-3-27b": 27.01},
    **{
        "phi-2": 2.78,
        "phi-3-mini": 3.82,
        "phi-3-medium": 13.96,
        "phi-3.5-moe": 41.87,
        "phi-4": 14.66,
        "phi-4-mini": 3.84,
    },
    **{"gpt-oss-20b": 20.91, "gpt-oss-120b": 116.8},
    **{"deepseek-llm-7b": 6.91, "deepseek-v2-lite": 15.71, "deepseek-v2": 235.7, "deepseek-v3": 671.0},
}


@pytest.mark.full
def test_shapes_have_the_size_of_their_name() -> None:
    from lightning_elixir.cli.transformers_subject import _built, _config

    assert BILLIONS.keys() == SHAPES.keys()
    found = {name: sum(p.numel() for p in _built(_config(name, {}), name).parameters()) / 1e9 for name in SHAPES}
    assert {n: found[n] for n in SHAPES if found[n] != pytest.approx(BILLIONS[n], rel=0.005)} == {}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-70B", "llama-3-70b"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("qwen-2.5-7b", "qwen2.5-7b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"),
        ("phi4", "phi-4"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V3.1", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama-3.1-8b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen3-4B-Thinking-2507", "qwen3-4b"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
        ("microsoft/Phi-3.5-mini-instruct", "phi-3-mini"),
        ("unsloth/Llama-3.2-3B-Instruct-bnb-4bit", "llama-3.2-3b"),
        ("llama-3.1-9b", None),
        ("llama", None),
    ],
)
def test_models_have_the_names_that_people_write(written: str, name: str | None) -> None:
    assert shape_name(written) == name


def test_folders_with_a_config_and_classes_are_models(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    from lightning_elixir.cli.transformers_subject import _built, _config

    LlamaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64, architectures=["LlamaForCausalLM"]).save_pretrained(
        tmp_path
    )
    assert type(_built(_config(str(tmp_path), {}), "")).__name__ == "LlamaForCausalLM"
    small = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 64}
    assert type(_built(_config("Qwen3ForCausalLM", small), "")).__name__ == "Qwen3ForCausalLM"
    with pytest.raises(PlanError, match="AutoModelForCausalLM takes any model"):
        _config("AutoModelForCausalLM", {})
    with pytest.raises(PlanError, match="there is no folder or file .*none: give a folder with a config.json"):
        _config(str(tmp_path / "none"), {})


@pytest.mark.parametrize(
    ("written", "like"),
    [
        ("llama-3.1-9b", "llama-3.1-8b"),
        ("Qwen/Qwen3-7B", "qwen3-8b"),
        ("gemma-3-12", "gemma-3-12b"),
        ("Qwen3ForCausalM", "Qwen3ForCausalLM"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], written: str, like: str
) -> None:
    assert main(["plan", "--model", written]) == 2  # before it asks how much memory there is
    assert f"no model '{written}'. Do you mean" in (told := capsys.readouterr().err)
    assert like in told.partition("Known are")[0]


@pytest.mark.parametrize("arguments", [["--model", "lama-7b"], ["--fits", "gpt2", "AutoModel"]])
def test_unknown_names_are_refused_before_torch_is_imported(arguments: list[str]) -> None:
    code = (
        "import sys; sys.argv = ['lightning-elixir']; from lightning_elixir.cli import main;"
        f" print(main(['plan', *{arguments}]), 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["2", "False", "False"]
    assert "no model 'lama-7b'. Do you mean llama-2-7b" in done.stderr or "AutoModel takes any model" in done.stderr


@pytest.mark.parametrize("name", ["llama", "gpt-sw3", "EvollaModel", "Qwen3ForCausalLM", "AutoformerModel", "Llama"])
def test_no_name_that_may_be_known_is_refused_beforehand(name: str) -> None:
    refuse_unknown(name)


def test_table_of_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["n_layer=1", "n_embd=32", "n_head=2", "vocab_size=100"]
    assert main(["plan", "--fits", "gpt2", "--set", *sizes, "--seq-len", "16"]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.startswith("| model | parameters | 24 + 64 GiB | 24 + 128 GiB | 40 + 64 GiB")
    assert [cell.strip() for cell in row.split("|")[3:-1]] == ["GPU"] * 8
    assert main(["plan", "--fits", "gpt2", "--gpu-memory", "1GiB", "--json"]) == 2
    assert "leave out --gpu-memory, --json" in capsys.readouterr().err


@pytest.mark.full
def test_large_model_is_planned_in_little_memory() -> None:
    code = """
        import resource
        from lightning_elixir.cli import main
        arguments = "plan --model opt-30b --seq-len 512 --checkpointing --gpu-memory 40GiB --cpu-memory 600GiB".split()
        assert main(arguments) == 0
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20, "more than 2 GiB"
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "30.0 billion" in done.stdout


# Modules of the user's own


def test_lightning_module_is_planned(module_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--module", f"{module_file}:Net", "--init", "width=128", "--batch", f"{module_file}:batch"]
    assert main([*arguments, *MEMORY, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["model"] == "Net"
    assert content["num_params"] == 16 * 128 + 128 + 128 + 1
    assert content["tokens_per_s"] is None
    assert content["samples_per_s"] == pytest.approx(4 / content["step_s"])
    fqns = {m["fqn"] for c in content["plan"]["chunks"] for m in c["members"]}
    assert "layers.0.weight" in fqns


def test_example_input_is_the_batch(module_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--module", f"{module_file}:WithExample", *MEMORY, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["samples_per_s"] == pytest.approx(8 / content["step_s"])
    assert "a training batch is like example_input_array" in content["remarks"][0]


def test_module_by_dotted_name(
    module_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(module_file.parent)  # it is looked for where the command is started
    arguments = ["plan", "--module", "user_code:Plain", "--batch", "user_code:batch", *MEMORY]
    assert main(arguments) == 0
    assert "It fits: Plain" in capsys.readouterr().out


def test_a_stand_in_for_a_batch_is_told(module_file: Path) -> None:
    (remark,) = module_subject(parse("--module", f"{module_file}:WithExample")).remarks
    assert "like example_input_array of WithExample" in remark
    assert "--batch" in remark
    for name in ("WithExample", "Plain"):
        given = parse("--module", f"{module_file}:{name}", "--batch", f"{module_file}:batch")
        assert module_subject(given).remarks == ()


def test_tokens_are_counted(module_file: Path) -> None:
    options = parse("--module", f"{module_file}:Plain", "--batch", f"{module_file}:tokens")
    subject = module_subject(options)
    assert (subject.num_samples, subject.num_tokens) == (3, 21)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give --model or --module"),
        (["--model", "gpt2", "--module", "a:B"], "Give --model or --module"),
        (["--model", "gpt5"], "no model 'gpt5'. Do you mean gptj or gpt2"),
        (["--model", "missing.json"], "cannot read missing.json"),
        (["--model", "gpt2", "--set", "layers=3"], "the config of gpt2 has no layers"),
        (["--model", "gpt2", "--set", "n_layer"], "--set takes KEY=VALUE, got 'n_layer'"),
        (["--model", "gpt2", "--seq-len", "2048"], "add --set n_positions=2048"),
        (["--model", "gpt2", "--hardware", "abacus"], "no machine 'abacus'"),
        (["--model", "gpt2", "--gpu-memory", "much"], "--gpu-memory takes bytes, or a size such as"),
        (["--model", "gpt2", "--gpu-memory", "0"], "--gpu-memory must be more than 0"),
        (["--model", "gpt2", "--chunk-size", "much"], "--chunk-size takes bytes, or a size such as"),
        (["--model", "gpt2", "--nvme-memory", "1GiB"], "bench-hardware --nvme-dir FOLDER"),
        (["--model", "vit"], "no language model"),
        (["--module", "Net"], "--module takes package.module:Name"),
        (["--module", "missing.py:Net"], "no file missing.py"),
        (["--module", "no_such_module:Net"], "importing it failed (ModuleNotFoundError"),
        (["--module", "FILE:Nothing"], "no class or function Nothing"),
        (["--module", "FILE:not_callable"], "no class or function not_callable"),
        (["--module", "FILE:Net"], "what does a batch of Net look like"),
        (["--module", "FILE:Net", "--init", "depth=3"], "cannot be built without memory (TypeError"),
        (["--module", "FILE:ReadsValues"], "cannot be built without memory"),
        (["--module", "FILE:batch"], "not a torch module"),
        (["--module", "FILE:Net", "--batch", "FILE:Net", "--checkpointing"], "turn it on in the module itself"),
        (["--module", "FILE:NoLoss", "--batch", "FILE:batch"], "gave no loss, but NoneType"),
        (["--module", "FILE:OtherStructure"], "on example_input_array, which stands in for a training batch"),
        (["--module", "FILE:WithExample", "--batch-size", "2"], "--batch-size: only with --model; with --module use"),
        (
            ["--model", "gpt2", "--init", "a=1", "--batch", "x:y"],
            "--init, --batch: only with --module; with --model use",
        ),
    ],
)
def test_what_cannot_be_used_exits_with_2(
    module_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    arguments = [argument.replace("FILE", str(module_file)) for argument in arguments]
    memory = [] if "--gpu-memory" in arguments else MEMORY
    assert main(["plan", *arguments, *memory]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_names_of_models_may_be_in_upper_case() -> None:
    from lightning_elixir.cli.transformers_subject import _config

    for name in ("GPT2-XL", "Llama-2-7B", "BERT"):
        assert _config(name, {}).to_dict() == _config(name.lower(), {}).to_dict()


@pytest.mark.parametrize("option", [["--batch-size", "0"], ["--h2d-gb-s", "-1"], ["--precision", "8"], ["--gpus", "x"]])
def test_bad_values_are_usage_errors(capsys: pytest.CaptureFixture[str], option: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*GPT, *option])
    assert stopped.value.code == 2
    assert option[0] in capsys.readouterr().err


def test_unwritable_output_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT, "--html", "no/such/folder/report.html"]) == 2
    assert "cannot write no/such/folder/report.html" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Raise gpu_memory_limit, lower chunk_size, or", "Raise --gpu-memory, lower --chunk-size, or"),
        ('Use placement_policy="auto" or "cpu"', 'Use --policy "auto" or "cpu"'),
        ("world_size = 3", "--gpus 3"),
        # Options that are words, too.
        ("activations='auto': no blocks", "--activations 'auto': no blocks"),
        ("activations: the plan names layers", "--activations: the plan names layers"),
        ("blocks 8.0 KiB; activations and other data 3 KiB", "blocks 8.0 KiB; activations and other data 3 KiB"),
        ("activations cut to 80%, an ignored module, sharding", "activations cut to 80%, an ignored module, sharding"),
        ("a disk (nvme_offload_fraction, nvme_offload_dir)", "a disk (--nvme-memory)"),
        # An option already, other arguments, and parameters of a model.
        ("--chunk-size", "--chunk-size"),
        ("min_chunk_size", "min_chunk_size"),
        ("layers.chunk_size, chunk_size.weight", "layers.chunk_size, chunk_size.weight"),
        ("too slow; where plans are searched, give non_model_bytes instead", "too slow"),
    ],
)
def test_messages_speak_of_options(message: str, expected: str) -> None:
    assert in_options(message) == expected
    with pytest.raises(CapacityError) as raised, speaking_of_options():
        raise CapacityError(message, resource="GPU", lacking_bytes=3)
    assert (str(raised.value), raised.value.resource, raised.value.lacking_bytes) == (expected, "GPU", 3)


def test_what_the_users_code_said_stays_as_it_was() -> None:
    cause = TypeError("forward() got an unexpected keyword argument 'chunk_size'")
    with pytest.raises(PlanError) as raised, speaking_of_options():
        raise PlanError(f"step_fn failed ({cause}). Or change chunk_size") from cause
    assert str(raised.value) == f"the training step failed ({cause}). Or change --chunk-size"
    told = PlanError("the step gave no loss")
    with pytest.raises(PlanError) as raised, speaking_of_options():
        raise PlanError(f"step_fn cannot be profiled ({told})") from told
    assert raised.value is told


def test_sizes_are_read() -> None:
    assert size_of("24GiB", "--gpu-memory") == 24 * GIB
    assert size_of("1073741824", "--gpu-memory") == GIB
    assert size_of(None, "--gpu-memory") is None
    assert size_of("0", "--nvme-memory", may_be_zero=True) == 0
    with pytest.raises(PlanError, match="--chunk-size must be more than 0, got '0MiB'"):
        size_of("0MiB", "--chunk-size")


def test_values_are_json_where_they_can_be() -> None:
    found = key_values(["a=1", "b=1.5", "c=text", "d=[1, 2]", "e=a=b", "f=true"], "--init")
    assert found == {"a": 1, "b": 1.5, "c": "text", "d": [1, 2], "e": "a=b", "f": True}


# The machine


def test_memory_must_be_told() -> None:
    with pytest.raises(PlanError, match="Give --gpu-memory and --cpu-memory"):
        machine_of(parse(), "bfloat16")


def test_figures_are_laid_over_the_profile(tmp_path: Path) -> None:
    save_hardware(replace(HardwareSpec.nominal(40 * GIB, 100 * GIB), name="mine"), tmp_path / "mine.json")
    options = parse("--hardware", str(tmp_path / "mine.json"), "--h2d-gb-s", "10", "--gpu-tflops", "300")
    options.cpu_adam = 2.5
    machine = machine_of(options, "bfloat16")
    spec = machine.hardware
    assert (machine.budget.gpu_bytes, machine.budget.cpu_bytes) == (40 * GIB, 96 * GIB)
    assert spec.h2d.bytes_per_s(GIB) == pytest.approx(10e9)
    assert spec.d2h == HardwareSpec.nominal().d2h
    assert spec.matmul_flops_per_s == {**HardwareSpec.nominal().matmul_flops_per_s, "bfloat16": 300e12}
    assert spec.cpu_adam_numel_per_s == 2.5e9
    assert spec.name == "mine; 3 of the figures given by hand"
    assert machine.remarks == ()


def test_ranks_share_the_host(tmp_path: Path) -> None:
    measured = replace(HardwareSpec.nominal(40 * GIB, 100 * GIB), all_gather=None, reduce_scatter=None)
    save_hardware(measured, tmp_path / "one.json")
    machine = machine_of(parse("--hardware", str(tmp_path / "one.json"), "--gpus", "4"), "bfloat16")
    assert machine.budget.cpu_bytes == (100 - 4 * 2 - 2) * GIB // 4  # less what is kept back
    assert machine.hardware.cpu_adam_numel_per_s == pytest.approx(measured.cpu_adam_numel_per_s / 4)
    assert machine.hardware.all_gather is not None
    assert len(machine.remarks) == 2


def test_limits_are_below_the_measured_memory(tmp_path: Path) -> None:
    save_hardware(HardwareSpec.nominal(40 * GIB, 100 * GIB), tmp_path / "mine.json")
    options = parse("--hardware", str(tmp_path / "mine.json"), "--gpu-memory", "24GiB", "--cpu-memory", "1073741824")
    machine = machine_of(options, "bfloat16")
    assert (machine.budget.gpu_bytes, machine.budget.cpu_bytes) == (24 * GIB, GIB * 3 // 4)
    options.cpu_memory_limit = "1GiB"
    assert machine_of(options, "bfloat16").budget.cpu_bytes == GIB
    assert (machine.hardware.gpu_bytes, machine.hardware.host_bytes) == (24 * GIB, GIB)


def test_packaged_machine_is_there() -> None:
    spec = named_hardware("h200")
    assert spec.gpu_bytes is not None
    assert 120 * GIB < spec.gpu_bytes < 150 * GIB
    assert spec.matmul_flops_per_s["bfloat16"] > 100e12
    assert "H200" in spec.name
    assert named_hardware("H200") == spec


# bench-hardware


def _find(probe: HardwareProbe) -> FoundHardware:
    return FoundHardware(replace(HardwareSpec.nominal(None, 8 * GIB), name=f"measured with {probe}"), None, None)


def test_bench_prints_and_writes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(HardwareProbe, "find", _find)
    assert main(["bench-hardware", "--refresh", "--nvme-dir", "disk", "--out", "machine.json"]) == 0
    spec = load_hardware("machine.json")
    for option in ("refresh=True", "nvme_dir='disk'", "local_world_size=1"):
        assert option in spec.name
    output = capsys.readouterr().out
    assert "8.0 GiB" in output
    assert "host to device" in output
    assert "Measured just now. The figures could not be kept" in output
    assert "plan --hardware machine.json" in output


def test_bench_tells_kept_figures_from_measured_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    quick = partial(HardwareProbe, cache_dir=tmp_path, budget_s=0.1, max_bytes=2**24)
    monkeypatch.setattr("lightning_elixir.cli.bench.HardwareProbe", quick)
    monkeypatch.setattr(Stopwatch, "disturbance", lambda self: "")
    monkeypatch.setattr(CoreWatch, "others", lambda self: "other programs had a core")
    assert main(["bench-hardware", "--out", "busy.json"]) == 0
    output = capsys.readouterr().out
    assert (
        "Measured just now, but other programs had a core meanwhile: these figures say little, and are not kept"
        in output
    )
    assert "measure again: lightning-elixir bench-hardware --refresh\n" in output
    assert list(tmp_path.glob("hardware-*.json")) == []
    assert load_hardware("busy.json").name.endswith(", on a busy machine")
    monkeypatch.setattr(CoreWatch, "others", lambda self: "")
    assert main(["bench-hardware"]) == 0
    output = capsys.readouterr().out
    (path,) = tmp_path.glob("hardware-*.json")
    assert f"Measured just now, and kept in {path} " in output
    os.utime(path, (path.stat().st_atime, datetime(2024, 5, 6, 7, 8).timestamp()))
    assert main(["bench-hardware"]) == 0
    output = capsys.readouterr().out
    assert f"Not measured now: kept since 2024-05-06 07:08 in {path}." in output
    assert "lightning-elixir bench-hardware --refresh\n" in output
    assert main(["bench-hardware", "--refresh"]) == 0
    assert "Measured just now" in capsys.readouterr().out


def test_the_way_to_measure_again_names_the_disk() -> None:
    found = FoundHardware(HardwareSpec.nominal(), Path("kept.json"), datetime(2024, 5, 6))
    assert origin_text(found, "my disk").endswith("bench-hardware --refresh --nvme-dir 'my disk'")


def _bench_rank(folder: str) -> None:
    rank = dist.get_rank()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HardwareProbe, "find", _find)
        assert main(["bench-hardware", "--out", f"{folder}/{rank}.json"]) == 0


@pytest.mark.full
def test_bench_under_torchrun_speaks_once(tmp_path: Path) -> None:
    run_ranks(_bench_rank, 2, str(tmp_path))
    assert [path.name for path in tmp_path.glob("*.json")] == ["0.json"]
    assert "local_world_size=2" in load_hardware(tmp_path / "0.json").name


# fit and its likes


@pytest.fixture
def _lightning_cli(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    monkeypatch.setattr(sys, "argv", ["lightning-elixir"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # read when jsonargparse is imported


FIT = ["--model=tests.strategy.models.Net", "--data=tests.strategy.test_cli.Data", "--trainer.max_epochs=1"]
FIT += ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
FIT += ["--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
FIT += ["--trainer.enable_model_summary=false"]


@pytest.mark.usefixtures("_lightning_cli")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:.*LeafSpec:FutureWarning")
def test_fit_trains_with_elixir(monkeypatch: pytest.MonkeyPatch) -> None:
    trainers: list[Trainer] = []
    fit = Trainer.fit

    def remember(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        trainers.append(trainer)
        fit(trainer, *args, **kwargs)

    monkeypatch.setattr(Trainer, "fit", remember)
    assert main(["fit", "--seed_everything=1", *FIT]) == 0
    (trainer,) = trainers
    assert isinstance(trainer.strategy, ElixirStrategy)
    assert trainer.global_step == 8


@pytest.mark.usefixtures("_lightning_cli")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:.*LeafSpec:FutureWarning")
def test_options_of_the_strategy_need_its_class(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = ["--trainer.strategy=lightning_elixir.ElixirStrategy", "--trainer.strategy.placement_policy=cuda"]
    assert main(["fit", "--seed_everything=1", *FIT, *strategy, "--trainer.strategy.gpu_memory_limit=1KiB"]) == 1
    assert "memory (gpu_memory_limit): the plan needs" in capsys.readouterr().err


@pytest.mark.usefixtures("_lightning_cli")
@pytest.mark.parametrize("command", ["fit", full("validate"), full("test"), "predict"])
def test_training_commands_are_lightning_clis(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--print_config"])
    assert stopped.value.code == 0
    assert "  strategy: elixir\n" in capsys.readouterr().out


def test_missing_jsonargparse_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jsonargparse" else find(name))
    assert main(["fit"]) == 2
    assert "pip install 'jsonargparse[signatures]" in capsys.readouterr().err


# The command itself


def _fresh(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_help_waits_for_nothing() -> None:
    code = """
        import sys
        sys.argv = ["/usr/bin/lightning-elixir", *sys.argv[1:]]
        from lightning_elixir.cli import main
        try:
            main()
        finally:
            print(sorted({"torch", "lightning", "pytorch_lightning", "rich", "transformers"} & set(sys.modules)))
    """
    for arguments in (["--help"], ["plan", "--help"], ["bench-hardware", "--help"]):
        done = _fresh(code, *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("usage: lightning-elixir")
        assert done.stdout.rstrip().endswith("[]")


def test_module_is_the_command() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "lightning_elixir", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("usage: lightning-elixir")
    assert "torch" not in done.stderr


@pytest.mark.full
def test_command_registers_the_strategies_before_it_runs_anything() -> None:
    code = """
        import sys
        sys.argv = ["lightning-elixir", "plan", "--model", "gpt2"]
        from lightning_elixir.cli import main
        assert main() == 2
        from lightning_elixir._lightning import StrategyRegistry
        print("elixir" in StrategyRegistry)
    """
    done = _fresh(code)
    assert done.stdout.strip() == "True", done.stderr


def test_without_a_command_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


HOSTS = ["--gpus", "2", "--network-gb-s", "1", "--network-us", "20"]


def test_several_hosts_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT, *HOSTS, "--nodes", "2", "--sharding", "node", "--json"]) == 0
    plan = plan_from_dict(json.loads(capsys.readouterr().out)["plan"])
    assert (plan.world_size, plan.num_copies) == (4, 2)


def test_table_of_scaling(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT, *HOSTS, "--scaling", "1", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| 1 | 2 | sharded over all 2 ranks |")
    assert lines[3].startswith("| 4 | 8 | sharded over ")
    assert "copies: " in lines[3]
    assert lines[-1].startswith(("From 8 GPUs on", "Up to 8 GPUs"))
    assert main([*GPT, *HOSTS, "--scaling", "1", "4", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["fits"] is True
    assert content["pays_no_more_from_gpus"] == (8 if lines[-1].startswith("From") else None)
    for row, line in zip(content["rows"], lines[2:4], strict=True):
        plan = plan_from_dict(row["plan"])
        cells = [str(row["hosts"]), str(row["gpus"]), describe_sharding(plan.mesh), format_seconds(row["step_s"])]
        assert line.startswith(f"| {' | '.join(cells)} |")
        assert f"| {row['samples_per_s']:.4g} | {row['share_of_first']:.0%} |" in line
        assert plan.world_size == row["gpus"]
        assert row["share_of_first"] == content["rows"][0]["step_s"] / row["step_s"]


def test_scaling_of_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    little = ["--gpu-memory", "1KiB", "--cpu-memory", "1KiB"]
    assert main([*GPT, *HOSTS, *little, "--scaling", "1", "2", "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert (content["fits"], content["pays_no_more_from_gpus"]) == (False, None)
    assert [(row["gpus"], row["fits"], row["share_of_first"]) for row in content["rows"]] == [
        (2, False, None),
        (4, False, None),
    ]
    assert all("GPU" in row["reason"] for row in content["rows"])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--nodes", "2"], "--network-gb-s and --network-us"),
        (["--scaling", "2", "--save-plan", "plan.json"], "leave out --save-plan"),
        (["--patterns", "--scaling", "2"], "leave out --scaling"),
    ],
)
def test_hosts_that_are_not_described(capsys: pytest.CaptureFixture[str], given: list[str], told: str) -> None:
    assert main([*GPT, *given]) == 2
    assert told in capsys.readouterr().err


def test_table_of_patterns(capsys: pytest.CaptureFixture[str]) -> None:
    need_experts_in_one_module()
    shape = ["hidden_size=64", "num_hidden_layers=2", "num_attention_heads=4", "num_key_value_heads=2"]
    shape += ["num_experts=4", "num_experts_per_tok=2", "moe_intermediate_size=32", "vocab_size=512"]
    model = ["plan", "--model", "qwen3_moe", "--set", *shape, "--batch-size", "2", "--seq-len", "32", *MEMORY]
    assert main([*model, "--gpus", "2", "--patterns"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| sharding alone", "| tensor 2", "| expert 2"]
    assert lines[-1].startswith("Take ")
    assert all(" 0 s " not in line for line in lines[3:5])  # exchanges are seen
    assert main([*model, "--gpus", "2", "--patterns", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["fits"] is True
    assert lines[-1] == f"Take {content['why']}."
    sizes = [(way["tensor_parallel_size"], way["expert_parallel_size"]) for way in content["ways"]]
    assert sizes[:3] == [(1, 1), (2, 1), (1, 2)]
    assert tuple(content["take"].values()) in sizes
    for way, line in zip(content["ways"], lines[2:-2], strict=True):
        times = [format_seconds(way[name]) for name in ("step_s", "exchange_s", "micro_batch_s")]
        memory = [format_bytes(way[name]) for name in ("gpu_bytes", "host_bytes")]
        assert line.endswith(f"| {' | '.join([*times, *memory])} |")


def test_activations_beside_patterns(capsys: pytest.CaptureFixture[str]) -> None:
    """What a recomputed forward exchanges counts as it does where the model itself recomputes; nothing is taken where
    nothing fits."""
    shape = ["hidden_size=64", "num_hidden_layers=2", "num_attention_heads=4", "num_key_value_heads=2"]
    model = ["plan", "--model", "llama", "--set", *shape, "vocab_size=512", "--batch-size", "2", "--seq-len", "32"]
    spent = []
    for how in (["--activations", "keep"], ["--activations", "recompute"]):
        assert main([*model, *MEMORY, *how, "--gpus", "2", "--patterns"]) == 0
        row = capsys.readouterr().out.splitlines()[3].split(" | ")
        assert row[0] == "| tensor 2"
        number, unit = row[2].split()
        spent.append(float(number) * {"us": 1e-6, "ms": 1e-3}[unit])
    assert 1.2 < spent[1] / spent[0] < 1.5
    little = ["--gpu-memory", "1KiB", "--cpu-memory", "1KiB"]
    assert main([*model, *little, "--gpus", "2", "--patterns"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "Nothing fits."
    assert main([*model, *little, "--gpus", "2", "--patterns", "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert (content["fits"], content["take"], content["why"]) == (False, None, "nothing fits")
    assert [way["fits"] for way in content["ways"]] == [False] * 3
    assert [way["reason"] for way in content["ways"][:2]] == ["does not fit"] * 2
