"""A small training in one of four styles, in which rank 1 leaves rank 0 waiting in one of four ways.

``python kinds_of_hang.py STYLE KIND``; it prints when the hang begins.
"""

import os
import signal
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

# More collectives have gone well before than the longer patience at the beginning covers.
HANGS_AT = 12
STEPS = 16


class Net(nn.Module):
    """A layer, in front of which a rank may hang."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.kind = kind
        self.steps = 0

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        self.steps += 1
        if self.steps == HANGS_AT:
            hang(self.kind)
        output = self.layer(x)
        return {"loss": output.pow(2).mean(), "logits": output}


class Samples(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 2 * 4 * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(8), "labels": torch.ones(1)}


def hang(kind: str) -> None:
    print(f"now {kind} at {time.time():.3f}", flush=True)
    if kind == "different":
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3))
        else:
            dist.broadcast(torch.ones(5), src=1)
    if dist.get_rank() == 0:
        return
    match kind:
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "asleep":
            time.sleep(600)
        case "busy":
            while True:
                torch.linalg.inv(torch.rand(50, 50))


def plain(kind: str) -> None:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(Net(kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(Samples(), batch_size=4):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()


def accelerate(kind: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = Net(kind)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(
        net, optimizer, DataLoader(Samples(), batch_size=4)
    )
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()


def transformers(kind: str) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(model=Net(kind), args=arguments, train_dataset=Samples()).train()


def lightning(kind: str) -> None:
    import lightning as library

    class Module(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(kind)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = library.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Samples(), batch_size=4))


STYLES: dict[str, Callable[[str], None]] = {
    "plain": plain,
    "accelerate": accelerate,
    "transformers": transformers,
    "lightning": lightning,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    STYLES[sys.argv[1]](sys.argv[2])
    print("done", flush=True)
