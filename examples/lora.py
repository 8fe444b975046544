"""LoRA with peft: the large model is frozen and lives wherever there is room, and small matrices beside it are trained.

    pip install peft
    python examples/lora.py                                                    # a toy, in seconds, on a CPU
    python examples/lora.py --model FOLDER --text my.txt --gpu-memory-limit 12GiB

A frozen parameter takes 2 bytes (in 16 bits) instead of 16: no gradient, no master, no optimizer states. FOLDER holds
config.json, the weights (*.safetensors) and the tokenizer, as `huggingface_hub.snapshot_download(name)` returns it.
Without one, a small GPT-2 with random weights, which takes bytes for tokens, stands in.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from lightning_elixir import ElixirStrategy, HybridAdam, pretrained


class LoraTuning(pl.LightningModule):
    """Trains an adapter of the model that is in `folder`."""

    def __init__(self, folder: str, rank: int, lr: float) -> None:
        super().__init__()
        self.folder, self.rank, self.lr = folder, rank, lr
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            config = AutoConfig.from_pretrained(self.folder)
            base = pretrained(lambda: AutoModelForCausalLM.from_config(config), self.folder)
            self.model = get_peft_model(base, LoraConfig(r=self.rank, target_modules="all-linear"))

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return HybridAdam([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def windows(folder: Path, text: str, length: int) -> Tensor:
    """The text as pieces of tokens [number, length]; bytes where the folder has no tokenizer."""
    if any(folder.glob("tokenizer*")):
        ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    else:
        ids = torch.tensor(list(text.encode()))
    return ids[: len(ids) // length * length].view(-1, length)


def make_toy(folder: Path) -> None:
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=256, bos_token_id=0, eos_token_id=0)
    model: nn.Module = GPT2LMHeadModel(config)
    model.save_pretrained(folder)  # type: ignore[operator]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="default: a toy, made in ./toy_gpt2")
    parser.add_argument("--text", type=Path, metavar="FILE", help="what to train on; default: this program")
    parser.add_argument("--out", type=Path, default=Path("adapter"), help="folder for the adapter")
    parser.add_argument("--rank", type=int, default=8, help="of the small matrices")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--gpu-memory-limit", help='plan as if each GPU had no more, such as "12GiB"')
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # slicing a tensor needs none

    pl.seed_everything(1, verbose=False)
    folder = arguments.model or Path("toy_gpt2")
    if arguments.model is None:
        make_toy(folder)
    text = (arguments.text or Path(__file__)).read_text(encoding="utf-8")
    pieces: Any = windows(folder, text, arguments.seq_len)
    data = DataLoader[Tensor](pieces, arguments.batch_size, shuffle=True, drop_last=True)

    module = LoraTuning(str(folder), arguments.rank, arguments.lr)
    strategy = ElixirStrategy(gpu_memory_limit=arguments.gpu_memory_limit)
    trainer = pl.Trainer(
        strategy=strategy,
        precision="bf16-mixed",
        devices=arguments.devices,
        max_steps=arguments.steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    with strategy.full_parameters(trained) as whole:  # on every rank: each has a part
        adapter = {name.removeprefix("model."): p.detach().float().cpu() for name, p in whole.items()}
    if trainer.is_global_zero:
        module.model.save_pretrained(arguments.out, state_dict=adapter)
        frozen = sum(chunk.numel for chunk in strategy.plan.chunks if not chunk.requires_grad)
        numel = sum(p.numel() for p in adapter.values())
        print(f"loss {float(trainer.callback_metrics['loss']):.3f}; trained {numel:,} numbers beside {frozen:,} frozen")
        print(f"PeftModel.from_pretrained(model, {str(arguments.out)!r}) reads the adapter")


if __name__ == "__main__":
    main()
