"""Two optimizers and a sparse embedding, without a DataLoader and without DDP."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("out"))
options = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
embedding = nn.Embedding(50, 8, sparse=True)
network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
sparse = torch.optim.SparseAdam(embedding.parameters(), lr=0.01)
dense = torch.optim.AdamW(network.parameters(), lr=0.01)
step = 0
path = options.out / "last.pt"
if path.exists():
    state = torch.load(path)
    step = state["step"]
    for part, saved in zip((embedding, network, sparse, dense), state["parts"], strict=True):
        part.load_state_dict(saved)
while step < 30:
    numbers = torch.Generator().manual_seed(2 * step + dist.get_rank())
    words = torch.randint(0, 50, (4, 3), generator=numbers)
    loss = network(embedding(words).mean(1)).square().mean()
    sparse.zero_grad()
    dense.zero_grad()
    loss.backward()
    for parameter in (*embedding.parameters(), *network.parameters()):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    sparse.step()
    dense.step()
    step += 1
    if step % 4 == 0 and dist.get_rank() == 0:
        parts = [part.state_dict() for part in (embedding, network, sparse, dense)]
        options.out.mkdir(exist_ok=True)
        torch.save({"step": step, "parts": parts}, options.out / "new.pt")
        (options.out / "new.pt").replace(path)
    dist.barrier()
dist.destroy_process_group()
