"""A classifier of images, after Fabric's ``train_fabric.py``: it saves the weights at the end and does not resume."""

import argparse
import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.functional import nll_loss
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A convolution, dropout and two linear layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(72, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.conv(x)), 2)
        x = torch.relu(self.fc1(self.dropout(x.flatten(1))))
        return torch.log_softmax(self.fc2(x), dim=1)


def images(count, seed):
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=random)
    return TensorDataset(
        torch.randn(count, 1, 8, 8, generator=random) + labels.view(-1, 1, 1, 1), labels
    )


def run(hparams):
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(hparams.seed)
    train_loader = DataLoader(images(64, 0), batch_size=hparams.batch_size, shuffle=True)
    test_loader = DataLoader(images(32, 1), batch_size=hparams.batch_size)
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)
    model, optimizer = fabric.setup(
        model := Net(), torch.optim.Adadelta(model.parameters(), lr=hparams.lr)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(hparams.epochs):
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = nll_loss(model(data), target)
            fabric.backward(loss)
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            losses = [nll_loss(model(data), target) for data, target in test_loader]
        fabric.print(f"epoch {epoch} loss {fabric.all_reduce(torch.stack(losses).mean()):.4f}")
    fabric.save("model.pt", {"model": model})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    run(parser.parse_args())
