"""A small training of the user's."""

from pathlib import Path

from torchmuster.plan.job import Work

MODEL = """\
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return torch.tanh(self.inner(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean(1)

def model():
    return Net()

def data():
    return torch.utils.data.TensorDataset(torch.ones(8, 200, 64), torch.zeros(8, dtype=torch.long))
"""


def write_model(folder: Path) -> Work:
    """Write a model and its samples into a folder, and return what is trained."""
    (folder / "own.py").write_text(MODEL)
    return Work(build="own:model", dataset="own:data", folder=str(folder))
