"""A loop with Lightning Fabric; ``--fault`` plants one mistake."""

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=4, help="per rank")
parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per optimizer step")
parser.add_argument("--save-every", type=int, default=3, help="steps between checkpoints")
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--resume", action="store_true", help="fail if there is no checkpoint")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--batch-norm", action="store_true")
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


def checkpoints():
    return sorted(options.out.glob("step-*.ckpt"), key=lambda path: int(path.stem[5:]))


def save(step):
    states = [torch.empty_like(torch.get_rng_state()) for _ in range(fabric.world_size)]
    dist.all_gather(states, torch.get_rng_state())
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if fault == "optimizer-lost":
        del state["optimizer"]
    path = options.out / f"step-{step}.ckpt"
    fabric.save(path.with_suffix(".tmp"), {**state, "step": step, "rng": states})
    if fabric.is_global_zero:
        os.replace(path.with_suffix(".tmp"), path)
        for old in checkpoints()[:-3]:
            old.unlink()
    fabric.barrier()


def load(path):
    """Load a checkpoint; return its step."""
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if fault == "optimizer-lost":
        del state["optimizer"]
    rest = fabric.load(path, state)
    if fault != "rng-lost":
        torch.set_rng_state(rest["rng"][fabric.global_rank])
    return rest["step"]


fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
fabric.launch()
fabric.seed_everything(1)
network = nn.Sequential(
    nn.Linear(16, 32),
    nn.BatchNorm1d(32) if options.batch_norm else nn.Identity(),
    nn.ReLU(),
    nn.Dropout(options.dropout),
    nn.Linear(32, 2),
)
optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
if fault == "model-not-set-up":
    model, optimizer = network, fabric.setup_optimizers(optimizer)
else:
    model, optimizer = fabric.setup(network, optimizer)
fabric.seed_everything(1000 + fabric.global_rank)  # dropout differs between ranks
data = Samples(0, 64)
if (
    fault == "library-sampler"
):  # Fabric counts epochs from 0 in each process, so also after a resume
    train = fabric.setup_dataloaders(DataLoader(data, options.batch_size, shuffle=True))
elif fault == "loader-not-set-up":
    train = DataLoader(data, options.batch_size, shuffle=True, generator=torch.Generator())
else:
    sampler = DistributedSampler(data, fabric.world_size, fabric.global_rank)
    train = DataLoader(data, options.batch_size, sampler=sampler, generator=torch.Generator())
held_out = DataLoader(Samples(10_000, 32), 8, generator=torch.Generator())
held_out = fabric.setup_dataloaders(held_out)

step = 0
updates_per_epoch = len(train) // options.accumulate
options.out.mkdir(parents=True, exist_ok=True)
if found := checkpoints():
    step = load(found[-1])
elif options.resume:
    raise SystemExit(f"no checkpoint in {options.out}")
fabric.print(f"begins at step {step}", flush=True)
while step < options.epochs * updates_per_epoch:
    epoch, done = divmod(step, updates_per_epoch)
    if isinstance(train.sampler, DistributedSampler):
        train.sampler.set_epoch(epoch)
    for micro, (inputs, labels) in enumerate(train, 1):
        if micro <= done * options.accumulate:
            continue
        inputs, labels = fabric.to_device((inputs, labels))
        last = micro % options.accumulate == 0
        if fault == "model-not-set-up":
            fabric.backward(cross_entropy(model(inputs), labels) / options.accumulate)
        else:
            with fabric.no_backward_sync(model, enabled=not last):
                loss = cross_entropy(model(inputs), labels)
                fabric.backward(loss if fault == "not-divided" else loss / options.accumulate)
        if last:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % options.save_every == 0:
                save(step)
    model.eval()
    with torch.no_grad():
        losses = [cross_entropy(model(inputs), labels) for inputs, labels in held_out]
    loss = fabric.all_reduce(torch.stack(losses).mean())
    model.train()
    fabric.print(f"epoch {epoch} evaluation loss {loss:.4f}", flush=True)
weights = network.state_dict().values()
digest = hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in weights))
fabric.print(f"final {digest.hexdigest()[:16]} at step {step}", flush=True)
