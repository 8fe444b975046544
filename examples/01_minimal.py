"""The smallest use: one import and `strategy="elixir"`. Runs in seconds on a CPU."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_elixir  # registers "elixir"


class Regression(pl.LightningModule):
    def configure_model(self) -> None:
        if not hasattr(self, "net"):  # Lightning calls this again before each fit, validate and test
            self.net = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return lightning_elixir.HybridAdam(self.parameters(), lr=1e-3)


def main() -> None:
    pl.seed_everything(1)
    trainer = pl.Trainer(strategy="elixir", precision="bf16-mixed", max_epochs=5, devices=1, logger=False)
    x = torch.randn(4096, 32)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    trainer.fit(Regression(), DataLoader(data, batch_size=64))
    print(trainer.strategy.stats())  # type: ignore[attr-defined]
    trainer.save_checkpoint("regression.ckpt")  # a plain checkpoint: loads without lightning_elixir too


if __name__ == "__main__":
    main()
