"""An autoencoder, after Lightning's ``autoencoder.py``: it saves at the end of each epoch."""

import argparse
import hashlib
import os

import lightning
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(lightning.LightningModule):
    """An encoder and a decoder with one hidden layer each."""

    def __init__(self, hidden_dim=16, learning_rate=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 3))
        self.decoder = nn.Sequential(nn.Linear(3, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 64))

    def training_step(self, batch, batch_idx):
        return self._step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self._step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)

    def _step(self, batch, stage):
        images = batch[0].view(len(batch[0]), -1)
        loss = mse_loss(self.decoder(self.encoder(images)), images)
        self.log(f"{stage}_loss", loss, sync_dist=True)
        return loss


class Images(lightning.LightningDataModule):
    """Random images, the same in every process."""

    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        images = torch.rand(96, 8, 8, generator=torch.Generator().manual_seed(0))
        self.train, self.val = TensorDataset(images[:64]), TensorDataset(images[64:])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size)


parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4, help="per rank")
parser.add_argument("--max_epochs", type=int, default=3)
parser.add_argument("--ckpt_path")
options = parser.parse_args()
lightning.seed_everything(0)
model = LitAutoEncoder()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=options.max_epochs,
    callbacks=[lightning.pytorch.callbacks.ModelCheckpoint("out", save_last=True)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, Images(options.batch_size), ckpt_path=options.ckpt_path)
weights = model.state_dict().values()
digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights))
if trainer.is_global_zero:
    print(f"final {digest.hexdigest()[:16]} at step {trainer.global_step}", flush=True)
