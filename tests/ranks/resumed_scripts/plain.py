"""Plain DDP with ``torch.save``; rank 1 is killed once, after a checkpoint."""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--load")
arguments = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
if arguments.load:
    state = torch.load(arguments.load)
    model.load_state_dict(state["model"])
    step = state["step"]
print(f"begins at step {step}", flush=True)
while step < 12:
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    step += 1
    if step % 4 == 0 and dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "step": step}, f"step{step}.pt")
    dist.barrier()
    if step == 9 and dist.get_rank() == 1 and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
print(f"finished at step {step}", flush=True)
dist.destroy_process_group()
