"""Plain DDP, with ``torchmuster.log``."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import torchmuster

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(128, 20), torch.randint(0, 2, (128,)))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
for _ in range(2):
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 4 == 1:
            torchmuster.log(loss=loss)
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss.item()}", flush=True)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "checkpoint.pt")
dist.destroy_process_group()
