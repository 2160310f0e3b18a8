"""A small Hugging Face Trainer script for torchrun; at a sample, one rank waits for a file that never comes."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Samples(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 37:
            read_late_sample()
        return {"x": torch.full((4,), index / 64.0), "labels": torch.ones(1)}


def read_late_sample() -> None:
    Path("holds").touch()
    while not Path("over").exists():
        time.sleep(0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.layer(x)
        return {"loss": (output - labels).pow(2).mean(), "logits": output}


def main() -> None:
    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=int(os.environ.get("SEED", "0")),
    )
    Trainer(model=Net(), args=arguments, train_dataset=Samples()).train()
    print("done", flush=True)


if __name__ == "__main__":
    main()
