"""The programs in examples/ that start from models of transformers run at toy size, and leave what they promise."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("lightning", reason="the examples import lightning, and only pytorch_lightning is installed")

ROOT = Path(__file__).parents[1]
TOKENS = torch.arange(32).view(1, 32)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*`isinstance.treespec, LeafSpec.` is depr",  # Lightning 2.6 on torch 2.13
    "ignore:.*is deprecated and will be removed in v6:FutureWarning",  # transformers, of what peft calls
    "ignore:You're resuming from a checkpoint that ended before the epoch",  # as the example says
    "ignore:fan_in_fan_out is set to False",  # peft, of GPT-2's own layers
)


def _run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """The program in this process and folder; nothing of it is left in `sys.argv`."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=TOKENS).logits
    return logits


def test_fine_tuning_changes_all_weights_and_leaves_a_folder_for_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _run("finetune_hugging_face.py", monkeypatch, "--steps", "2", "--seq-len", "64", "--lr", "1e-2")
    assert "AutoModelForCausalLM reads finetuned" in capsys.readouterr().out
    before = dict(transformers.AutoModelForCausalLM.from_pretrained("toy_gpt2").named_parameters())
    after = transformers.AutoModelForCausalLM.from_pretrained("finetuned")
    assert all(not torch.equal(p, before[name]) for name, p in after.named_parameters())
    with pytest.raises(SystemExit):
        _run("finetune_hugging_face.py", monkeypatch)
    said = capsys.readouterr()
    assert "finetuned exists already" in said.err
    assert "loss" not in said.out  # nothing was trained


def test_lora_leaves_an_adapter_that_changes_the_frozen_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peft: Any = pytest.importorskip("peft")
    _run("lora.py", monkeypatch, "--steps", "3", "--seq-len", "64", "--lr", "1e-1")
    assert "trained 16,384 numbers" in capsys.readouterr().out
    base = transformers.AutoModelForCausalLM.from_pretrained("toy_gpt2")
    frozen = _logits(base)
    assert not torch.equal(_logits(peft.PeftModel.from_pretrained(base, "adapter")), frozen)


@pytest.mark.full
def test_pretraining_from_a_config_goes_on_from_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tight = ("--seq-len", "64", "--gpu-memory-limit", "300KiB", "--save-every", "2")
    _run("pretrain_from_config.py", monkeypatch, "--steps", "2", *tight)
    assert "step 2: loss" in capsys.readouterr().out
    _run("pretrain_from_config.py", monkeypatch, "--steps", "4", "--resume", *tight)
    assert "step 4: loss" in capsys.readouterr().out


@pytest.mark.full  # many searches
def test_plans_for_machines_that_are_not_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"model_type": "gpt2", "n_layer": 2, "n_embd": 128, "n_head": 2, "vocab_size": 1024}
    Path("config.json").write_text(json.dumps(shape))
    _run("plan_for_a_machine.py", monkeypatch, "--config", "config.json", "--seq-len", "64")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all("a step, " in line and "are always on the GPU" in line for line in lines[1:])
    _run("plan_for_a_machine.py", monkeypatch, "--config", "config.json", "--batch-size", "100000", "--seq-len", "1024")
    assert capsys.readouterr().out.count("does not fit") == 3


def test_fabrics_loop_has_the_losses_of_plain_pytorch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--steps", "3", "--layers", "3", "--width", "64", "--memory", "512KiB", "--check", "--save", "m.ckpt"]
    _run("fabric_train.py", monkeypatch, *arguments)
    told = capsys.readouterr().out
    assert "the same losses as with plain PyTorch, bit for bit" in told
    assert not re.search(r"gone 0 times", told)
    assert torch.load("m.ckpt", weights_only=True).keys() == {"model", "optimizer", "step"}
