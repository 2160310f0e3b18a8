"""Lightning's Trainer; ``--fault`` plants one mistake.

It saves at the end of each epoch: a DataLoader without a state begins its epoch again after a resume in the middle of it.
"""

import argparse
import copy
import hashlib
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=4, help="per rank")
parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per optimizer step")
parser.add_argument("--save-every", type=int, default=1, help="epochs between checkpoints")
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--ckpt_path", help="a checkpoint, or last")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--batch-norm", action="store_true")
parser.add_argument("--ema", action="store_true")
parser.add_argument("--fault", default="none")
options = parser.parse_args()
fault = options.fault


class Samples(Dataset):
    """Each sample is a function of its index."""

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        inputs = torch.randn(16, generator=torch.Generator().manual_seed(self.first + index))
        return inputs, int(inputs[0] * inputs[1] > 0)


class Classifier(lightning.LightningModule):
    """A small network."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(16, 32),
            nn.BatchNorm1d(32) if options.batch_norm else nn.Identity(),
            nn.ReLU(),
            nn.Dropout(options.dropout),
            nn.Linear(32, 2),
        )

    def training_step(self, batch, _):
        loss = cross_entropy(self.network(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        loss = cross_entropy(self.network(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_start(self):
        torch.manual_seed(1000 * (1 + self.current_epoch) + self.global_rank)
        self.print(f"begins at step {self.global_step}", flush=True)

    def on_train_epoch_start(self):
        # Lightning does not save the state of the random generator: dropout has a seed for each epoch.
        if fault != "rng-lost":
            torch.manual_seed(1000 * (1 + self.current_epoch) + self.global_rank)


class Average(Callback):
    """An exponential moving average of the weights."""

    def setup(self, trainer, module, stage):
        self.model = copy.deepcopy(module.network).requires_grad_(False)

    def on_train_batch_end(self, trainer, module, *_):
        for old, new in zip(self.model.parameters(), module.network.parameters(), strict=True):
            old.lerp_(new.data, 0.1)

    def state_dict(self):
        return {} if fault == "ema-without-state" else self.model.state_dict()

    def load_state_dict(self, state):
        self.model.load_state_dict(state)


every = {"every_n_epochs": options.save_every, "save_on_train_epoch_end": True}
if fault == "mid-epoch-save":
    every = {"every_n_train_steps": 3}
saves = ModelCheckpoint(
    options.out,
    filename="{epoch}-{step}",
    save_last=True,
    save_top_k=-1,
    save_weights_only=fault == "save-weights-only",
    **every,
)
average = Average()
lightning.seed_everything(int.from_bytes(os.urandom(3)) if fault == "random-seed" else 1)
model = Classifier()
train = DataLoader(Samples(0, 64), options.batch_size, shuffle=True, generator=torch.Generator())
held_out = DataLoader(Samples(10_000, 32), 8, generator=torch.Generator())
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=options.epochs,
    accumulate_grad_batches=options.accumulate,
    callbacks=[saves, average] if options.ema else [saves],
    use_distributed_sampler=fault != "no-distributed-sampler",
    num_sanity_val_steps=0,
    logger=False,
    default_root_dir=options.out,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(
    model, train, held_out, ckpt_path=None if fault == "resume-ignored" else options.ckpt_path
)
weights = [*model.state_dict().values()]
if options.ema:
    weights += average.model.state_dict().values()
digest = hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in weights))
if trainer.is_global_zero:
    print(f"final {digest.hexdigest()[:16]} at step {trainer.global_step}", flush=True)
