"""Pretrain a model of transformers from nothing but its config: no weights are needed, and none are downloaded.

    python examples/pretrain_from_config.py                                    # a toy Llama, in seconds, on a CPU
    python examples/pretrain_from_config.py --config llama_7b.json --text corpus.txt --gpu-memory-limit 24GiB
    python examples/pretrain_from_config.py --steps 40 --resume                # go on from the last checkpoint

`--resume` restores weights, optimizer, schedule and random states. Data begin again from the first batch of an epoch,
unless your data loader can be resumed (torchdata's StatefulDataLoader), about which Lightning warns. The config is the
file `config.json` that comes with a model, or one that you write. Tokens are bytes here; put your own in the place of
`ByteWindows`.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_elixir import ElixirStrategy, HybridAdam

TOY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}


class ByteWindows(Dataset[Tensor]):
    """Pieces of `length` bytes of a file, which is not read as a whole."""

    def __init__(self, path: Path, length: int) -> None:
        self.bytes = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return len(self.bytes) // self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.bytes[index * self.length : (index + 1) * self.length].long()


class Pretraining(pl.LightningModule):
    """Made in `configure_model`: with several ranks, rank 0 alone holds the whole while it is built."""

    def __init__(self, config: dict[str, Any], steps: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.config, self.steps, self.lr = config, steps, lr
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            fields = {name: value for name, value in self.config.items() if name != "model_type"}
            self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(self.config["model_type"], **fields))
            # Activations are recomputed in backward; before transformers 5 the method had another name.
            recompute = getattr(self.model, "activation_checkpointing_enable", None)
            (recompute or self.model.gradient_checkpointing_enable)()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = HybridAdam(groups, lr=self.lr, betas=(0.9, 0.95))
        warm_up = max(1, self.steps // 20)

        def factor(step: int) -> float:
            return min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.steps))))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, metavar="FILE.json", help="default: a toy Llama")
    parser.add_argument("--text", type=Path, metavar="FILE", help="what to train on; default: this program")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--gpu-memory-limit", help='plan as if each GPU had no more, such as "24GiB"')
    parser.add_argument("--cpu-memory-limit", help="the same for the host")
    parser.add_argument("--nvme-dir", help="folder on a fast disk, for optimizer states where host memory is short")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS", help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from pretraining/last.ckpt")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # slicing a tensor needs none

    pl.seed_everything(1, verbose=False)
    config = TOY if arguments.config is None else json.loads(arguments.config.read_text(encoding="utf-8"))
    data = DataLoader(
        ByteWindows(arguments.text or Path(__file__), arguments.seq_len),
        arguments.batch_size,
        shuffle=True,
        drop_last=True,
    )
    strategy = ElixirStrategy(
        gpu_memory_limit=arguments.gpu_memory_limit,
        cpu_memory_limit=arguments.cpu_memory_limit,
        nvme_offload_dir=arguments.nvme_dir,
        state_dict_type="sharded",  # each rank writes its part; any number of ranks reads it again
    )
    trainer = pl.Trainer(
        strategy=strategy,
        precision="bf16-mixed",
        devices=arguments.devices,
        max_steps=arguments.steps,
        accumulate_grad_batches=arguments.accumulate,
        gradient_clip_val=1.0,
        callbacks=[
            ModelCheckpoint("pretraining", save_last=True, save_top_k=0, every_n_train_steps=arguments.save_every)
        ],
        logger=False,
        enable_model_summary=False,
    )
    last = "pretraining/last.ckpt" if arguments.resume else None
    trainer.fit(Pretraining(config, arguments.steps, arguments.lr), data, ckpt_path=last)
    if trainer.is_global_zero:
        print(f"step {trainer.global_step}: loss {float(trainer.callback_metrics['loss']):.3f}")
        print("\n".join(strategy.plan.explain().splitlines()[:2]))


if __name__ == "__main__":
    main()
