"""LightningCLI builds the strategy from YAML and can print every option."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_elixir._lightning import pl
from lightning_elixir.plan.hardware import HardwareSpec, save_hardware
from lightning_elixir.plan.io import save_plan
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.tiers import telling
from tests.strategy.models import CHUNK, Net, fit, make_data

pytest.importorskip("jsonargparse")


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return make_data()


TRAINER = """
  accelerator: cpu
  devices: 1
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
"""

STRATEGIES = {
    "name": "elixir_cpu",
    "class_path": """
    class_path: lightning_elixir.ElixirStrategy
    init_args:
      placement_policy: cpu
      chunk_size: 16KiB
      gpu_memory_limit: 98304
      reduce_dtype: float32
      prefetch: false
      timeout: 0:01:00
""",
    "plan": """
    class_path: lightning_elixir.ElixirStrategy
    init_args:
      placement_policy: const
      offload_optim_frac: 0.5
      gpu_margin_mem_ratio: null
      max_scale: .inf
""",
}


@pytest.fixture(autouse=True)
def _no_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["cli"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # LightningCLI uses what newer releases deprecate


def _cli(arguments: list[str]) -> Any:
    cli = importlib.import_module(f"{pl.__name__}.cli")
    return cli.LightningCLI(Net, Data, args=arguments, seed_everything_default=1)


@pytest.mark.parametrize("kind", telling(STRATEGIES, "class_path"))
def test_fit_from_yaml(tmp_path: Path, kind: str) -> None:
    config = tmp_path / "options.yaml"
    config.write_text(f"trainer:{TRAINER}  strategy: {STRATEGIES[kind]}\n")
    cli = _cli(["fit", f"--config={config}"])
    strategy = cli.trainer.strategy
    assert isinstance(strategy, ElixirStrategy)
    assert len(cli.model.losses) == 8
    if kind == "class_path":
        assert strategy._config.chunk_size == "16KiB"
        assert strategy.plan.prefetch_depth == 0
        assert strategy.stats().evictions > 0


def test_files_that_are_named_are_read_by_the_strategy(tmp_path: Path) -> None:
    """And not opened by the command line, which would hand over what is in them."""
    fit(first := ElixirStrategy(placement_policy="const", offload_param_frac=0.5, **CHUNK))
    save_plan(first.plan, tmp_path / "plan.json")
    save_hardware(HardwareSpec.nominal(), tmp_path / "machine.json")
    config = tmp_path / "options.yaml"
    config.write_text(
        f"trainer:{TRAINER}  strategy:\n    class_path: lightning_elixir.ElixirStrategy\n    init_args:\n"
        f"      plan: plan.json\n      hardware: {tmp_path}/machine.json\n      report_dir: report\n"
    )
    strategy = _cli(["fit", f"--config={config}"]).trainer.strategy
    assert strategy._config.plan == "plan.json"
    assert strategy.plan.fingerprint() == first.plan.fingerprint()
    assert strategy._config.hardware == f"{tmp_path}/machine.json"
    assert (tmp_path / "report" / "report.html").is_file()


def test_bad_option_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "options.yaml"
    config.write_text(
        f"trainer:{TRAINER}  strategy:\n    class_path: lightning_elixir.ElixirStrategy\n    init_args:\n"
        "      placement_policy: gpu\n"
    )
    with pytest.raises(SystemExit):
        _cli(["fit", f"--config={config}"])
    assert "placement_policy" in capsys.readouterr().err


def test_options_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _cli(["fit", "--trainer.strategy.help=lightning_elixir.ElixirStrategy"])
    shown = capsys.readouterr().out
    assert "--trainer.strategy.placement_policy" in shown
    assert "Where chunks live" in " ".join(shown.split())
    assert "--trainer.strategy.gpu_memory_limit" in shown
    assert "--trainer.strategy.report_dir REPORT_DIR" in shown
    assert "--trainer.strategy.hardware HARDWARE" in shown
    assert "Figures of the machine to plan with" in " ".join(shown.split())
