"""A loop with Accelerate; rank 1 is killed once, after a checkpoint."""

import argparse
import os
import signal
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--resume_from_checkpoint", type=str, default=None)
arguments = parser.parse_args()
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randint(0, 2, (96,)))
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
first = 0
if arguments.resume_from_checkpoint:
    accelerator.load_state(arguments.resume_from_checkpoint)
    first = int(arguments.resume_from_checkpoint.rpartition("_")[2])
accelerator.print(f"begins at step {first}", flush=True)
for step, (inputs, targets) in enumerate(accelerator.skip_first_batches(loader, first), first + 1):
    loss = nn.functional.cross_entropy(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step % 4 == 0:
        accelerator.save_state(f"out/step_{step}")
        accelerator.wait_for_everyone()
    if step == 9 and accelerator.process_index == 1 and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
accelerator.print(f"finished at step {step}", flush=True)
accelerator.end_training()
