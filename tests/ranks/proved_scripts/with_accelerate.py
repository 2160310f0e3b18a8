"""A loop with Accelerate that resumes with ``load_state`` and ``skip_first_batches``; ``--fault`` plants one mistake."""

import argparse
import copy
import hashlib
import os
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=4, help="per rank")
parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per optimizer step")
parser.add_argument("--save-every", type=int, default=3, help="steps between checkpoints")
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--resume", action="store_true", help="fail if there is no checkpoint")
parser.add_argument("--dropout", type=float, default=0.0)
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


class Average:
    """An exponential moving average of the weights."""

    def __init__(self, model):
        self.model = copy.deepcopy(model).requires_grad_(False)

    def update(self, model):
        for old, new in zip(self.model.parameters(), model.parameters(), strict=True):
            old.lerp_(new.data, 0.1)

    def state_dict(self):
        return self.model.state_dict()

    def load_state_dict(self, state):
        self.model.load_state_dict(state)


def checkpoints():
    found = options.out.glob("step_*[0-9]")
    if fault == "alphabetical-checkpoint":
        return sorted(found)
    return sorted(found, key=lambda path: int(path.name[5:]))


def save(step):
    temporary, folder = options.out / f"step_{step}.tmp", options.out / f"step_{step}"
    accelerator.save_state(str(temporary))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
        for old in sorted(checkpoints(), key=os.path.getmtime)[:-3]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=options.accumulate,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
)
set_seed(1)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(options.dropout), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
# A generator of its own, because a new iterator draws a seed for workers: from it, not from the one of dropout.
train = DataLoader(
    Samples(0, 64), options.batch_size, shuffle=True, generator=torch.Generator().manual_seed(1)
)
held_out = DataLoader(Samples(10_000, 32), 8, generator=torch.Generator())
# Of all ranks together, because a prepared scheduler steps once for each rank.
total = len(train) // options.accumulate * options.epochs
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
model, optimizer, held_out = accelerator.prepare(model, optimizer, held_out)
if fault != "loader-not-prepared":
    train = accelerator.prepare(train)
if fault != "scheduler-not-prepared":
    scheduler = accelerator.prepare(scheduler)
average = Average(accelerator.unwrap_model(model))
if fault != "ema-not-registered":
    accelerator.register_for_checkpointing(average)
set_seed(1, device_specific=True)  # dropout differs between ranks

step = epoch = skip = 0
updates_per_epoch = -(-len(train) // options.accumulate)
found = checkpoints() if options.out.exists() else []
if options.resume and not found:
    raise SystemExit(f"no checkpoint in {options.out}")
if found and fault != "resume-ignored":
    accelerator.load_state(str(found[-1]))
    step = int(found[-1].name[5:])
    epoch, skip = step // updates_per_epoch, step % updates_per_epoch * options.accumulate
accelerator.print(f"begins at step {step}", flush=True)
while epoch < options.epochs:
    if hasattr(train, "set_epoch"):
        train.set_epoch(epoch)
    batches = accelerator.skip_first_batches(train, skip) if skip and fault != "no-skip" else train
    for inputs, labels in batches:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(inputs), labels)
            if fault == "plain-backward":
                loss.backward()
            else:
                accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            average.update(accelerator.unwrap_model(model))
            step += 1
            if step % options.save_every == 0:
                save(step)
    model.eval()
    with torch.no_grad():
        losses = [cross_entropy(model(inputs), labels) for inputs, labels in held_out]
    loss = accelerator.gather(torch.stack(losses)).mean()
    model.train()
    accelerator.print(f"epoch {epoch} evaluation loss {loss:.4f}", flush=True)
    epoch, skip = epoch + 1, 0
weights = [*accelerator.unwrap_model(model).parameters(), *average.model.parameters()]
digest = hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in weights))
accelerator.print(f"final {digest.hexdigest()[:16]} at step {step}", flush=True)
accelerator.end_training()
