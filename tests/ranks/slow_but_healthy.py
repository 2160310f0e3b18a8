"""Twenty ways in which the ranks of a healthy script are slow or uneven; none of them is a hang.

``python slow_but_healthy.py [KIND…]``: these, or all, one after the other; ``SLOW_S`` is how long each takes.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

SLOW_S = float(os.environ.get("SLOW_S", "14"))
ASLEEP_S = SLOW_S / 2  # a rank that others wait for may sleep for less than the limit


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.linalg.inv(torch.rand(50, 50))


class SlowSamples(Dataset[torch.Tensor]):
    """Samples that take their time: computed, or waited for."""

    def __init__(self, seconds: float, *, computed: bool) -> None:
        self.seconds = seconds
        self.computed = computed

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.computed:
            compute(self.seconds / 4)
        else:
            time.sleep(self.seconds / 4)
        return torch.full((8,), float(index))


class Kinds:
    """Each method is a kind; all ranks call it."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.model = DistributedDataParallel(nn.Linear(8, 8))

    def step(self, samples: torch.Tensor | None = None) -> None:
        self.model(torch.ones(2, 8) if samples is None else samples).sum().backward()

    def epoch(self, data: Dataset[torch.Tensor], workers: int = 0) -> None:
        for samples in DataLoader(data, batch_size=1, num_workers=workers):
            self.step(samples)

    # ---- all ranks are slow

    def all_sleep(self) -> None:
        time.sleep(SLOW_S)
        self.step()

    def all_compute(self) -> None:
        compute(SLOW_S)
        self.step()

    def all_wait_for_data(self) -> None:
        self.epoch(SlowSamples(SLOW_S, computed=False))

    def all_compute_in_loader_workers(self) -> None:
        self.epoch(SlowSamples(SLOW_S, computed=True), workers=1)

    def all_compute_during_an_async_collective(self) -> None:
        work = dist.all_reduce(torch.ones(8), async_op=True)
        compute(SLOW_S)
        assert work is not None
        work.wait()

    def all_sleep_during_an_async_collective(self) -> None:
        work = dist.all_reduce(torch.ones(8), async_op=True)
        time.sleep(SLOW_S)
        assert work is not None
        work.wait()

    # ---- one rank computes while the other waits

    def one_compiles(self) -> None:
        if self.rank == 1:
            compute(SLOW_S)
        self.step()

    def one_evaluates_behind_a_barrier(self) -> None:
        if self.rank == 0:
            with torch.no_grad():
                compute(SLOW_S)
        dist.barrier()

    def one_computes_in_a_child(self) -> None:
        if self.rank == 1:
            loop = f"import time\nend = time.monotonic() + {SLOW_S}\nwhile time.monotonic() < end: pass"
            subprocess.run([sys.executable, "-c", loop], check=True)
        self.step()

    def one_computes_in_a_thread(self) -> None:
        if self.rank == 1:
            thread = threading.Thread(target=compute, args=(SLOW_S,))
            thread.start()
            thread.join()
        self.step()

    def one_computes_in_a_loader_worker(self) -> None:
        self.epoch(SlowSamples(SLOW_S if self.rank == 1 else 0, computed=True), workers=1)

    def one_saves(self) -> None:
        path = Path(f"saved-{os.getpid()}.pt")
        end = time.monotonic() + SLOW_S
        while self.rank == 0 and time.monotonic() < end:
            torch.save(torch.ones(2**20), path)
        dist.barrier()

    def one_broadcasts_what_it_computed(self) -> None:
        objects: list[object] = [None]
        if self.rank == 0:
            compute(SLOW_S)
            objects = [list(range(1000))]
        dist.broadcast_object_list(objects, src=0)

    def pipeline(self) -> None:
        """Rank 0 computes and sends, then rank 1 computes while rank 0 waits."""
        tensor = torch.ones(8)
        if self.rank == 0:
            compute(ASLEEP_S)
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        else:
            dist.recv(tensor, 0)
            compute(ASLEEP_S)
            dist.send(tensor, 0)

    # ---- one rank sleeps while the other waits, for less than the limit

    def one_sleeps(self) -> None:
        if self.rank == 1:
            time.sleep(ASLEEP_S)
        self.step()

    def one_waits_for_data(self) -> None:
        self.epoch(SlowSamples(ASLEEP_S if self.rank == 1 else 0, computed=False))

    def uneven_steps(self) -> None:
        for _ in range(6):
            time.sleep(0.5 + 2 * self.rank)
            self.step()

    def turns(self) -> None:
        """The ranks sleep in turns, so each waits for the other."""
        for turn in range(4):
            if turn % 2 == self.rank:
                time.sleep(ASLEEP_S / 2)
            self.step()

    def new_groups(self) -> None:
        for group in range(3):
            if self.rank == group % 2:
                time.sleep(ASLEEP_S / 2)
            dist.barrier(dist.new_group())

    def many_small_collectives(self) -> None:
        end = time.monotonic() + SLOW_S
        going = torch.ones(1)
        while going.item():
            time.sleep(0.05)
            going.fill_(float(time.monotonic() < end))
            dist.broadcast(going, src=0)


KINDS = [name for name in vars(Kinds) if name not in ("step", "epoch") and name[0] != "_"]


def main(names: list[str]) -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    kinds = Kinds()
    for name in names or KINDS:
        print(f"now {name} at {time.time():.3f}", flush=True)
        getattr(kinds, name)()
        dist.barrier()
    print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
