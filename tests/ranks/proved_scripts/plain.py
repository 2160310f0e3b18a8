"""DistributedDataParallel with checkpoints that restore everything; ``--fault`` plants one mistake (see ``faults.py``).

torchrun --standalone --nproc-per-node 2 plain.py --epochs 3
"""

import argparse
import contextlib
import copy
import hashlib
import os
import signal
import time
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=4, help="per rank")
parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per optimizer step")
parser.add_argument("--samples", type=int, default=64)
parser.add_argument("--save-every", type=int, default=3, help="steps between checkpoints")
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--resume", action="store_true", help="fail if there is no checkpoint")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--batch-norm", action="store_true")
parser.add_argument("--scaler", action="store_true", help="fp16 autocast and a loss scaler")
parser.add_argument("--ema", choices=["none", "module", "dict"], default="none")
parser.add_argument("--augment", action="store_true", help="add random noise to the samples")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--shuffle", choices=["sampler", "loader"], default="sampler")
parser.add_argument("--ignored-labels", action="store_true", help="some samples have no loss")
parser.add_argument("--own-all-reduce", action="store_true", help="average gradients without DDP")
parser.add_argument("--fault", default="none")
options = parser.parse_args()
fault = options.fault

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Samples(Dataset):
    """Each sample is a function of its index."""

    def __init__(self, count, first=0, augment=False):
        names = [f"sample-{index}" for index in range(first, first + count)]
        self.names = list(set(names)) if fault == "unordered-files" else names
        self.augment = augment

    def __len__(self):
        return len(self.names)

    def __getitem__(self, place):
        index = int(self.names[place].partition("-")[2])
        inputs = torch.randn(16, generator=torch.Generator().manual_seed(index))
        label = int(inputs[0] * inputs[1] > 0)
        if self.augment:
            inputs = inputs + 0.1 * torch.randn(16)
        return inputs, -100 if options.ignored_labels and index % 3 == 0 else label


def seed_equally(worker):
    torch.manual_seed(options.seed)


def make_loader():
    data = Samples(options.samples, augment=options.augment)
    settings = {
        "batch_size": options.batch_size,
        "num_workers": options.workers,
        "generator": torch.Generator().manual_seed(1000 * options.seed + rank),
        "drop_last": fault == "dropped-batch" and rank == 1,
    }
    if fault == "equal-worker-seeds":
        settings["worker_init_fn"] = seed_equally
    if options.shuffle == "loader":
        return DataLoader(Subset(data, range(rank, len(data), world)), shuffle=True, **settings)
    shard = int(os.environ.get("SLURM_PROCID", "0")) if fault == "same-data" else rank
    return DataLoader(data, sampler=DistributedSampler(data, world, shard), **settings)


def make_model():
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.BatchNorm1d(32) if options.batch_norm else nn.Identity(),
        nn.ReLU(),
        nn.Dropout(options.dropout),
        nn.Linear(32, 2),
    )


def micro_batches(loader):
    """Return the batches of an epoch, as many as the rank with the most batches has."""
    steps = torch.tensor(len(loader))
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    count = 0
    for batch in loader:
        yield batch
        count += 1
    for _ in range(count, int(steps)):  # only with the fault "dropped-batch"
        yield batch


def windows(batches, position):
    """Group micro-batches into optimizer steps."""
    window = []
    for batch in batches:
        window.append(batch)
        position += 1
        if position % options.accumulate == 0:
            yield window
            window = []
    if window:
        yield window


def window_loss(outputs, labels, window, count):
    """Return a loss whose gradients, summed over the window and averaged over ranks, are those of the global mean."""
    if fault == "accumulation-not-divided":
        return cross_entropy(outputs, labels)
    if fault == "mean-of-means":
        return cross_entropy(outputs, labels) / len(window)
    return cross_entropy(outputs, labels, reduction="sum") * world / count


def average_gradients():
    parameters = list(network.parameters())
    for parameter in parameters[1:] if fault == "unsynced-parameter" else parameters:
        dist.all_reduce(parameter.grad)
        if fault != "gradients-summed":
            parameter.grad /= world


def update_ema():
    if options.ema == "module":
        for old, new in zip(ema.parameters(), network.parameters(), strict=True):
            old.data.lerp_(new.data, 0.1)
    elif options.ema == "dict":
        for name, new in network.named_parameters():
            ema[name].lerp_(new.data, 0.1)


def evaluate(epoch):
    network.eval()
    held_out = Samples(32, first=10_000)
    total = torch.zeros(2)
    with torch.no_grad():
        for inputs, labels in DataLoader(Subset(held_out, range(rank, 32, world)), batch_size=8):
            kept = labels != -100
            total[0] += cross_entropy(network(inputs)[kept], labels[kept], reduction="sum")
            total[1] += kept.sum()
    dist.all_reduce(total)
    network.train()
    if rank == 0:
        print(f"epoch {epoch} evaluation loss {total[0] / total[1]:.4f}", flush=True)


def checkpoints():
    return sorted(options.out.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))


def of_all_ranks(state):
    states = [torch.empty_like(state) for _ in range(world)]
    dist.all_gather(states, state)
    return states


def save(step, epoch, position):
    state = {"step": step, "epoch": epoch, "position": position}
    state |= {name: part.state_dict() for name, part in parts.items() if f"{name}-lost" != fault}
    if fault == "buffers-lost":
        state["model"] = dict(network.named_parameters())
    if options.ema == "dict" and fault != "ema-lost":
        state["ema"] = ema
    state["rng"] = of_all_ranks(torch.get_rng_state())
    state["loader"] = of_all_ranks(loader_state)
    if rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"step-{step}.pt"
        temporary = path if fault == "torn-save" else path.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, path)
        for old in checkpoints()[:-3]:
            old.unlink()
    dist.barrier()


def load():
    """Return the newest checkpoint, after loading it, or None."""
    found = checkpoints()
    if options.resume and not found:
        raise SystemExit(f"no checkpoint in {options.out}")
    if not found or fault == "resume-ignored":
        return None
    path = found[-1]
    if fault == "oldest-checkpoint":
        path = found[0]
    elif fault == "alphabetical-checkpoint":
        path = sorted(found)[-1]
    saved = torch.load(path, weights_only=True)
    if fault == "renamed-key":
        saved["optimiser"]
    for name, part in parts.items():
        if name in saved and name != "model":
            part.load_state_dict(saved[name])
    if fault == "wrapped-keys":
        model.load_state_dict(saved["model"], strict=False)  # its keys begin with "module."
    else:
        network.load_state_dict(saved["model"], strict=fault != "buffers-lost")
    if options.ema == "dict":
        ema.update(saved.get("ema", {}))
    if fault == "scheduler-stepped-twice":
        scheduler.step()
    return saved


def stop_requested():
    """Return whether any rank got SIGTERM."""
    flag = torch.tensor(int(bool(signals)))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def train_window(window):
    """Accumulate the gradients of one optimizer step; return how many micro-batches it took."""
    count = sum((labels != -100).sum() for _, labels in window)
    dist.all_reduce(count)
    for place, (inputs, labels) in enumerate(window, 1):
        alone = options.own_all_reduce or place == len(window)
        with contextlib.nullcontext() if alone else model.no_sync():
            with torch.autocast("cpu", torch.float16, enabled=options.scaler):
                outputs = model(inputs)
            if fault == "unseeded-noise":
                outputs = outputs * float(numpy.random.default_rng().normal(1, 0.1))
            scaler.scale(window_loss(outputs.float(), labels, window, count)).backward()
        if fault == "save-between-micro-batches" and (position + place) % options.save_every == 0:
            save(step, epoch, position + place)
        if fault == "sigterm-drops-gradients" and place < len(window) and stop_requested():
            return place
    return len(window)


signals = []
signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
if fault == "clock-seed":
    torch.manual_seed(time.time_ns() % 2**31)
elif fault == "seed-per-rank":
    torch.manual_seed(options.seed + rank)
else:
    torch.manual_seed(options.seed)
network = make_model()
torch.manual_seed(1000 * options.seed + rank)  # dropout differs between ranks
if fault == "unseeded-dropout":
    torch.seed()
if options.own_all_reduce:
    model = network
else:
    model = DistributedDataParallel(network, broadcast_buffers=fault != "buffers-not-broadcast")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1.0, (step + 1) / 5) * 0.98**step
)
scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=4, enabled=options.scaler)
parts = {"model": network, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
if options.ema == "module":
    ema = parts["ema"] = copy.deepcopy(network).requires_grad_(False)
elif options.ema == "dict":
    ema = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
loader = make_loader()
loader_state = loader.generator.get_state()

saved = load()
step, epoch, position = (saved["step"], saved["epoch"], saved["position"]) if saved else (0, 0, 0)
if saved and fault != "loader-lost":
    loader.generator.set_state(saved["loader"][rank])
if saved and fault == "epoch-restarted":
    position = 0
if rank == 0:
    print(f"begins at step {step}", flush=True)
while epoch < options.epochs:
    if options.shuffle == "sampler" and fault != "no-set-epoch":
        loader.sampler.set_epoch(epoch)
    loader_state = loader.generator.get_state()
    batches = micro_batches(loader)
    for _ in range(position):
        next(batches)
    if saved and fault != "rng-lost":
        torch.set_rng_state(saved["rng"][rank])
    saved = None
    for window in windows(batches, position):
        used = train_window(window)
        position += used
        if used < len(window):
            save(step, epoch, position)
            raise SystemExit
        if options.own_all_reduce:
            average_gradients()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        update_ema()
        step += 1
        stopping = fault != "sigterm-drops-gradients" and stop_requested()
        if stopping or (step % options.save_every == 0 and fault != "save-between-micro-batches"):
            save(step, epoch, position)
        if stopping:
            raise SystemExit
    evaluate(epoch)
    epoch, position = epoch + 1, 0
weights = list(network.state_dict().values())
if options.ema != "none":
    weights += ema.parameters() if options.ema == "module" else ema.values()
digest = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in weights))
if rank == 0:
    print(f"final {digest.hexdigest()[:16]} at step {step}", flush=True)
dist.destroy_process_group()
