"""Fine-tune a causal language model of Hugging Face's transformers, all of its weights, and get a folder that
`from_pretrained` reads.

    python examples/finetune_hugging_face.py                                   # a toy, in seconds, on a CPU
    python examples/finetune_hugging_face.py --model FOLDER --text my.txt --gpu-memory-limit 24GiB

FOLDER holds config.json, the weights (*.safetensors) and the tokenizer, as `huggingface_hub.snapshot_download(name)`
returns it. Without one, a small GPT-2 with random weights, which takes bytes for tokens, stands in.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from lightning_elixir import ElixirStrategy, HybridAdam, pretrained
from lightning_elixir.cli import main as lightning_elixir_command


class FineTuning(pl.LightningModule):
    """Trains the model that is in `folder`. Its weights stay in the files until each rank reads its own part."""

    def __init__(self, folder: str, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.folder, self.lr = folder, lr
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            config = AutoConfig.from_pretrained(self.folder)
            self.model = pretrained(lambda: AutoModelForCausalLM.from_config(config), self.folder)
            # Activations are recomputed in backward; before transformers 5 the method had another name.
            recompute = getattr(self.model, "activation_checkpointing_enable", None)
            (recompute or self.model.gradient_checkpointing_enable)()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decayed = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return HybridAdam(groups, lr=self.lr)


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
    parser.add_argument("--out", type=Path, default=Path("finetuned"), help="folder for the result; must not exist")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--gpu-memory-limit", help='plan as if each GPU had no more, such as "24GiB"')
    arguments = parser.parse_args()
    if arguments.out.exists():  # said before training, not after it
        parser.error(f"{arguments.out} exists already: give another folder as --out, or remove it first")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # slicing a tensor needs none

    pl.seed_everything(1, verbose=False)
    folder = arguments.model or Path("toy_gpt2")
    if arguments.model is None:
        make_toy(folder)
    text = (arguments.text or Path(__file__)).read_text(encoding="utf-8")
    pieces: Any = windows(folder, text, arguments.seq_len)
    data = DataLoader[Tensor](pieces, arguments.batch_size, shuffle=True, drop_last=True)

    module = FineTuning(str(folder), arguments.lr)
    trainer = pl.Trainer(
        # sharded: every rank writes its own part, and nobody holds the whole
        strategy=ElixirStrategy(gpu_memory_limit=arguments.gpu_memory_limit, state_dict_type="sharded"),
        precision="bf16-mixed",
        devices=arguments.devices,
        max_steps=arguments.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    trainer.save_checkpoint("finetuning.ckpt")  # a folder; to go on: trainer.fit(..., ckpt_path="finetuning.ckpt")
    if trainer.is_global_zero:
        code = lightning_elixir_command(["consolidate", "finetuning.ckpt", "-o", str(arguments.out), "--part", "model"])
        if code:
            raise SystemExit(code)
        module.model.config.save_pretrained(arguments.out)
        print(f"loss {float(trainer.callback_metrics['loss']):.3f}; AutoModelForCausalLM reads {arguments.out}")


if __name__ == "__main__":
    main()
