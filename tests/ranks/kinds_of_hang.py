"""A small training, as anybody would write it for torchrun, that hangs or dies in the ways it is told.

``python kinds_of_hang.py KIND…``: each in turn; those that can end go on when the file ``KIND.over`` is there. The file
``KIND.holds`` is there once a rank keeps the others waiting.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


def hold(kind: str) -> None:
    Path(f"{kind}.holds").touch()
    while not Path(f"{kind}.over").exists():
        time.sleep(0.1)


class Samples(Dataset[torch.Tensor]):
    """Reads its samples quickly, but for one that does not come."""

    def __init__(self, count: int, *, slow: bool = False) -> None:
        self.count = count
        self.slow = slow

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow and index == self.count - 1:
            hold("loader")
        return torch.full((8,), float(index))


class Net(nn.Module):
    """Two layers, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.asleep = self.short = False

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        if self.asleep:
            hold("forward")
        result: torch.Tensor = self.first(samples)
        if not self.short:
            result = self.second(result)
        return result


class Training:
    """What all kinds begin with: some steps that go well."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.net = Net()
        self.model = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def epoch(self, batches: int, *, slow: bool = False, workers: int = 0) -> None:
        data = Samples(2 * batches, slow=slow)
        for samples in DataLoader(data, batch_size=2, num_workers=workers):
            self.optimizer.zero_grad()
            self.model(samples).sum().backward()
            self.optimizer.step()

    # ---- hangs that can end

    def loader(self) -> None:
        self.epoch(4, slow=self.rank == 1)

    def worker(self) -> None:
        self.epoch(4, slow=self.rank == 1, workers=1)

    def forward(self) -> None:
        self.net.asleep = self.rank == 1
        self.epoch(2)
        self.net.asleep = False

    def user_code(self) -> None:
        if self.rank == 1:
            hold("user_code")
        self.epoch(2)

    def lock(self) -> None:
        if self.rank == 1:
            lock = threading.Lock()
            with lock:
                Path("lock.holds").touch()
                lock.acquire()
        self.epoch(2)

    def stopped(self) -> None:
        if self.rank == 1:
            Path("stopped.holds").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        self.epoch(2)

    # ---- hangs that cannot

    def only_rank_0(self) -> None:
        if self.rank == 0:
            Path("only_rank_0.holds").touch()
            dist.all_reduce(torch.ones(3))
        dist.barrier()

    def order(self) -> None:
        total, weights = torch.ones(5), torch.ones(5)
        if self.rank == 0:
            dist.all_reduce(total)
            dist.broadcast(weights, 0)
        else:
            dist.broadcast(weights, 0)
            dist.all_reduce(total)

    def uneven(self) -> None:
        self.epoch(6 if self.rank == 0 else 4)
        dist.barrier()

    # ---- deaths

    def shapes(self) -> None:
        dist.all_reduce(torch.ones(1000 if self.rank == 0 else 3))

    def unused(self) -> None:
        self.net.short = True
        self.epoch(2)

    def segfault(self) -> None:
        if self.rank == 1:
            ctypes.string_at(0)
        self.epoch(2)

    def raises(self) -> None:
        if self.rank == 1:
            raise ValueError("sample 7 cannot be read")
        self.epoch(2)

    def memory(self) -> None:
        if self.rank == 1:
            Path(os.environ["SMALL_CGROUP"]).write_text(str(os.getpid()))
            kept = []
            while True:
                kept.append(bytearray(2**20))
        self.epoch(2)

    # ---- slow, but well

    def uneven_steps(self) -> None:
        Path("uneven_steps.holds").touch()
        for _ in range(1000):
            time.sleep(0.5 + 2 * self.rank)
            self.epoch(1)


def main(kinds: list[str]) -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    training = Training()
    training.epoch(12)
    for kind in kinds:
        print(f"now {kind} at {time.time():.3f}", flush=True)
        getattr(training, kind)()
        dist.barrier()
    print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
