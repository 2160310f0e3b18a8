"""FSDP2 with a distributed checkpoint."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(8):
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dcp.save({"model": get_model_state_dict(model)}, checkpoint_id="out/state")
dist.destroy_process_group()
