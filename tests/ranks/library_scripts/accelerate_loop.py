"""A loop with Accelerate."""

import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(128, 8), torch.randint(0, 2, (128,)))
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step = 0
for folder in ("first", "second"):
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 4 == 0:
            accelerator.log({"train_loss": loss.item()}, step=step)
            accelerator.print(f"step {step} loss {loss.item()}", flush=True)
    accelerator.save_state(f"out/{folder}")
accelerator.end_training()
