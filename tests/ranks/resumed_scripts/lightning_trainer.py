"""Lightning's Trainer; rank 1 is killed once, in the second epoch."""

import argparse
import os
import signal
from pathlib import Path

import lightning
import torch
from torch import nn


class Classifier(lightning.LightningModule):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def on_train_start(self):
        print(f"begins at step {self.global_step}", flush=True)

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def on_train_batch_end(self, *_):
        if self.global_step == 12 and self.global_rank == 1 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


parser = argparse.ArgumentParser()
parser.add_argument("--ckpt_path")
arguments = parser.parse_args()
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(128, 8), torch.randint(0, 2, (128,)))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=2,
    logger=False,
    default_root_dir="out",
    enable_progress_bar=False,
    enable_model_summary=False,
)
loader = torch.utils.data.DataLoader(data, batch_size=8)
trainer.fit(Classifier(), loader, ckpt_path=arguments.ckpt_path)
print(f"finished at step {trainer.global_step}", flush=True)
