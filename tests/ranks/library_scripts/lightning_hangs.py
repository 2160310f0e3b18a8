"""A small Lightning script for torchrun; rank 1 skips a collective that the other rank calls."""

from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).pow(2).mean()
        if index == 5:
            self.share_score(loss)
        return loss

    def share_score(self, loss: torch.Tensor) -> None:
        if self.global_rank == 0:  # the mistake
            Path("holds").touch()
            torch.distributed.broadcast_object_list([float(loss)], src=0)
            torch.distributed.barrier()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4))
    print("done", flush=True)


if __name__ == "__main__":
    main()
