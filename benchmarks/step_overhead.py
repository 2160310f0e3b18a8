"""What a step of ``Trainer``, and of other trainers, costs over the same step written by hand.

    python benchmarks/step_overhead.py [--out overhead.json]                Trainer, on 1 and 2 ranks
    python benchmarks/step_overhead.py --peers /tmp/peers/bin/python        accelerate, Lightning, transformers, in one process

The hand-written loop and the other one run in the same process and take turns, block by block (`Turns`). All have the same model, data,
batch and optimizer. ``Trainer`` has its metrics on: lines every 50 steps and the metrics file. Data is read in two ways: by each loop's
own loader, and from batches in memory, where only the loops differ. The peers read with a DataLoader, as their documentation
shows it; "metrics" says whether they log the loss every 50 steps. They need an environment of their own:

    python -m venv /tmp/peers && /tmp/peers/bin/pip install torch==2.13.0 accelerate lightning transformers

Only torch is imported at the top, so that this file also runs there.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

_BARS = "at most +40 us on a ~1 ms step, at most 1.01x on a >= 20 ms step"
LOG_EVERY = 50


# ---- the workload


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A multilayer perceptron on random numbers, of a size that gives a step the time it should take."""

    name: str
    width: int
    layers: int
    batch_size: int  # of each rank
    block: int  # steps after which the other loop has its turn
    pairs: int  # how often both have their turn


SMALL = Workload(name="~1 ms", width=192, layers=2, batch_size=64, block=100, pairs=40)
LARGE = Workload(name=">= 20 ms", width=1024, layers=4, batch_size=96, block=5, pairs=20)
WORKLOADS = {"small": SMALL, "large": LARGE}
_CLASSES = 10
_SAMPLES = 8192


def build_model(workload: Workload) -> nn.Module:
    """Return the model."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(workload.layers):
        layers += [nn.Linear(workload.width, workload.width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(workload.width, _CLASSES))


def build_dataset(workload: Workload) -> TensorDataset:
    """Return the data."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(_SAMPLES, workload.width, generator=generator)
    return TensorDataset(inputs, torch.randint(_CLASSES, (_SAMPLES,), generator=generator))


def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean loss of a batch."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


def ready_batches(workload: Workload, number: int = 16) -> list[Any]:
    """Return batches that lie in memory, for loops that shall not be measured with their reading."""
    tensors = build_dataset(workload).tensors
    size = workload.batch_size
    return [
        tuple(one[place * size : (place + 1) * size] for one in tensors) for place in range(number)
    ]


def batches_of_torch(workload: Workload, rank: int, ranks: int) -> Iterator[Any]:
    """Yield batches without end, as hand-written loops read them."""
    dataset = build_dataset(workload)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, ranks, rank, seed=0)
    loader = DataLoader(dataset, batch_size=workload.batch_size, sampler=sampler)
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


def bare_loop(
    workload: Workload, batches: Iterator[Any], *, ddp: bool = True
) -> Callable[[int], None]:
    """Return the loop that people write by hand, with the loss added up. It takes so many steps."""
    model = build_model(workload)
    if ddp:
        model = DistributedDataParallel(model)
    optimizer = build_optimizer(model.parameters())
    total = 0.0

    def run(steps: int) -> None:
        nonlocal total
        for _ in range(steps):
            batch = next(batches)
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item()

    return run


@dataclass
class Turns:
    """Lets two loops take turns: the other one calls :meth:`step` before each of its steps.

    Whatever the other loop is, its steps ask something for data; that something calls this. So both run in
    one process, in blocks one after the other, and what else the machine does strikes both alike.
    """

    workload: Workload
    bare: Callable[[int], None]
    bare_s: list[float] = field(default_factory=list)  # of one step, block by block
    other_s: list[float] = field(default_factory=list)
    _steps: int = 0
    _begun: float = 0.0

    @property
    def steps(self) -> int:
        """How many steps the other loop must take: a block to warm up, one for each pair, one more to end."""
        return self.workload.block * (self.workload.pairs + 1) + 1

    def step(self) -> None:
        """Give the bare loop its turn after each block."""
        block = self.workload.block
        if self._steps % block == 0:
            if self._steps > block:
                self.other_s.append((time.perf_counter() - self._begun) / block)
            begun = time.perf_counter()
            self.bare(block)
            if self._steps >= block:
                self.bare_s.append((time.perf_counter() - begun) / block)
            self._begun = time.perf_counter()
        self._steps += 1


def summary(turns: Turns) -> dict[str, float]:
    """Return medians and quartiles of a step's time and of the difference, block by block."""
    number = min(len(turns.bare_s), len(turns.other_s))
    bare = torch.tensor(turns.bare_s[:number], dtype=torch.float64)
    other = torch.tensor(turns.other_s[:number], dtype=torch.float64)
    extra = (other - bare) * 1e6
    low, middle, high = torch.quantile(extra, torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
    return {
        "bare_ms": bare.median().item() * 1e3,
        "other_ms": other.median().item() * 1e3,
        "extra_us": middle,
        "extra_us_low": low,
        "extra_us_high": high,
        "ratio": (other / bare).median().item(),
        "extra_us_of_best_blocks": (other.min() - bare.min()).item() * 1e6,
        "blocks": number,
    }


# ---- Trainer


class Ready:
    """A loader whose batches lie in memory."""

    def __init__(self, batches: list[Any], world: Any) -> None:
        self._batches = batches
        self._samples = len(batches[0][0])
        self._all = self._samples * world.world_size

    def epoch(self, epoch: int, *, begin: int = 0) -> Iterator[Any]:
        """Yield steps without end."""
        from torchmuster.train.data.step import MicroBatch, Step

        for number, batch in zip(count(), cycle(self._batches), strict=False):
            yield Step(
                epoch=epoch,
                number=number,
                rounds=1,
                samples=self._all,
                nominal_samples=self._all,
                micro_batches=(MicroBatch(batch=batch, samples=self._samples),),
            )

    def steps_in_epoch(self) -> int | None:
        """Return None: it does not end."""
        return None

    def state(self) -> dict[str, Any]:
        """Return nothing."""
        return {"epoch": 0}

    def restore(self, state: dict[str, Any]) -> None:
        """Do nothing."""


class TakingTurns(Ready):
    """Any loader, with the other loop's turns between its steps."""

    def __init__(self, loader: Any, turns: Turns) -> None:
        self._loader = loader
        self._turns = turns

    def epoch(self, epoch: int, *, begin: int = 0) -> Iterator[Any]:
        """Yield the steps, and let the other loop run before each block."""
        turn = self._turns.step
        steps = self._loader.epoch(epoch)
        while True:
            turn()
            step = next(steps, None)
            if step is None:
                return
            yield step


def measure(
    workload: Workload, reading: str, world: Any, folder: Path, *, ddp: bool = True
) -> dict[str, Any]:
    """Let both loops take turns; return the times of this rank."""
    from torchmuster.train.data.loader import BatchLoader
    from torchmuster.train.reports import Reports
    from torchmuster.train.strategies.ddp import Ddp
    from torchmuster.train.strategies.single import Single
    from torchmuster.train.trainer import Trainer

    ready = ready_batches(workload)
    if reading == "ready":
        loader: Any = Ready(ready, world)
        bare_batches: Iterator[Any] = cycle(ready)
    else:
        size = workload.batch_size
        loader = BatchLoader(build_dataset(workload), world, micro_batch_size=size)
        bare_batches = batches_of_torch(workload, world.global_rank, world.world_size)
    turns = Turns(workload, bare_loop(workload, bare_batches, ddp=ddp))
    trainer = Trainer(
        world=world,
        model=build_model(workload),
        loss=loss_of,
        optimizer=build_optimizer,
        data=TakingTurns(loader, turns),
        strategy=Ddp(world) if ddp else Single(world),
        reports=Reports(world, folder=folder),
    )
    trainer.fit(steps=turns.steps)
    return {
        "workload": workload.name,
        "reading": reading,
        "ranks": world.world_size,
        **summary(turns),
    }


def be_rank(out: Path, sizes: list[str], readings: list[str], pairs: int | None) -> None:
    """Measure everything on this rank; rank 0 writes the results."""
    from torchmuster.train.world import join_world

    results = []
    with join_world("cpu") as world, tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            for reading in readings:
                workload = WORKLOADS[size]
                if pairs is not None:
                    workload = replace(workload, pairs=pairs)
                with contextlib.redirect_stdout(sys.stderr):
                    results.append(measure(workload, reading, world, Path(folder)))
        if world.is_first:
            out.write_text(json.dumps(results))


def start_ranks(
    ranks: int, sizes: list[str], readings: list[str], pairs: int | None
) -> list[dict[str, Any]]:
    """Run this file on so many ranks and return what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        words = ["--rank-writes", str(out), "--sizes", *sizes, "--readings", *readings]
        words += [] if pairs is None else ["--pairs", str(pairs)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*torchrun, f"--nproc-per-node={ranks}", __file__, *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{ranks} ranks failed:\n{done.stderr[-3000:]}")
        results: list[dict[str, Any]] = json.loads(out.read_text())
        return results


# ---- the peers


class TurningSampler(Sampler[int]):
    """Random indices; before each batch the bare loop may have its turn."""

    def __init__(self, size: int, batch_size: int, turns: Turns) -> None:
        self._size = size // batch_size * batch_size
        self._batch_size = batch_size
        self._turns = turns

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        for place, index in enumerate(torch.randperm(self._size).tolist()):
            if place % self._batch_size == 0:
                self._turns.step()
            yield index


def loader_of(workload: Workload, turns: Turns, collate: Any = None) -> DataLoader[Any]:
    """Return the data as every framework gets it."""
    dataset = build_dataset(workload)
    sampler = TurningSampler(len(dataset), workload.batch_size, turns)
    return DataLoader(dataset, batch_size=workload.batch_size, sampler=sampler, collate_fn=collate)


def endless(batches: DataLoader[Any]) -> Iterator[Any]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from batches


def accelerate(workload: Workload, turns: Turns, metrics: bool) -> None:
    """The loop of accelerate's documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = build_model(workload)
    model, optimizer, batches = accelerator.prepare(
        model, build_optimizer(model.parameters()), loader_of(workload, turns)
    )
    total = 0.0
    for number, batch in enumerate(endless(batches)):
        if number == turns.steps:
            return
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        total += loss.item()
        if metrics and number % LOG_EVERY == 0:
            accelerator.print(f"step {number} loss {total / LOG_EVERY}")
            total = 0.0


def fabric(workload: Workload, turns: Turns, metrics: bool) -> None:
    """The loop of Lightning Fabric's documentation."""
    from lightning.fabric import Fabric

    lightning = Fabric(accelerator="cpu", devices=1)
    model = build_model(workload)
    model, optimizer = lightning.setup(model, build_optimizer(model.parameters()))
    batches = lightning.setup_dataloaders(loader_of(workload, turns))
    total = 0.0
    for number, batch in enumerate(endless(batches)):
        if number == turns.steps:
            return
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        lightning.backward(loss)
        optimizer.step()
        total += loss.item()
        if metrics and number % LOG_EVERY == 0:
            lightning.print(f"step {number} loss {total / LOG_EVERY}")
            total = 0.0


def lightning_trainer(workload: Workload, turns: Turns, metrics: bool) -> None:
    """Lightning's Trainer; metrics go to its CSV logger."""
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model(workload)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = loss_of(self.model, batch)
            if metrics:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return build_optimizer(self.parameters())

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=turns.steps,
            max_epochs=-1,
            accelerator="cpu",
            devices=1,
            logger=CSVLogger(folder) if metrics else False,
            log_every_n_steps=LOG_EVERY,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), loader_of(workload, turns))


def transformers_trainer(workload: Workload, turns: Turns, metrics: bool) -> None:
    """The Trainer of transformers."""
    import transformers

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model(workload)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": loss_of(self.model, (inputs, labels))}

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        inputs, labels = torch.utils.data.default_collate(samples)
        return {"inputs": inputs, "labels": labels}

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(loader_of(workload, turns, collate))

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=turns.steps,
            per_device_train_batch_size=workload.batch_size,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="steps" if metrics else "no",
            logging_steps=LOG_EVERY,
            disable_tqdm=True,
            report_to=[],
        )
        model = Model()
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=build_dataset(workload),
            optimizers=(build_optimizer(model.parameters()), None),
        )
        trainer.train()


PEERS: dict[str, Callable[[Workload, Turns, bool], None]] = {
    "accelerate": accelerate,
    "fabric": fabric,
    "lightning": lightning_trainer,
    "transformers": transformers_trainer,
}


def measure_peer(peer: str, workload: Workload, metrics: bool) -> dict[str, Any]:
    """Let one framework and the bare loop take turns in this process."""
    batches = batches_of_torch(workload, 0, 1)
    turns = Turns(workload, bare_loop(workload, batches, ddp=False))
    PEERS[peer](workload, turns, metrics)
    return summary(turns)


def measure_ours(workload: Workload) -> dict[str, Any]:
    """Measure torchmuster's Trainer in the same way; its metrics are always on."""
    from torchmuster.train.world import join_world

    with join_world("cpu") as world, tempfile.TemporaryDirectory() as folder:
        return measure(workload, "own", world, Path(folder), ddp=False)


def in_own_process(
    python: str, peer: str, size: str, metrics: bool, pairs: int | None
) -> dict[str, Any]:
    """Measure one framework in its environment."""
    words = [python, __file__, "--measure", peer, "--sizes", size] + ["--metrics"] * metrics
    words += [] if pairs is None else ["--pairs", str(pairs)]
    done = subprocess.run(
        words,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{peer} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    name = {"workload": WORKLOADS[size].name, "trainer": peer, "metrics": metrics}
    return {**result, **name}


# ---- the table and the command


def render(results: list[dict[str, Any]], columns: tuple[str, ...]) -> str:
    """Return the results as a table; ``columns`` say which loop was measured."""
    named = "".join(f"{column:<14}" for column in columns)
    head = f"{'step':<9} {named}{'bare ms':>9} {'its ms':>9} {'extra us (middle half)':>26}"
    lines = [f"{head} {'ratio':>7}"]
    for result in results:
        low, high = result["extra_us_low"], result["extra_us_high"]
        middle = f"{result['extra_us']:+.0f} ({low:+.0f} to {high:+.0f})"
        named = "".join(f"{result[column]!s:<14}" for column in columns)
        lines.append(
            f"{result['workload']:<9} {named}{result['bare_ms']:>9.3f} {result['other_ms']:>9.3f} "
            f"{middle:>26} {result['ratio']:>7.3f}"
        )
    return "\n".join(lines)


def measure_peers(python: str, sizes: list[str], pairs: int | None) -> list[dict[str, Any]]:
    """Measure Trainer here and each peer in its environment, one after the other."""
    results = []
    for size in sizes:
        results.append(in_own_process(sys.executable, "torchmuster", size, True, pairs))
        for peer in PEERS:
            for metrics in (False, True):
                results.append(in_own_process(python, peer, size, metrics, pairs))
    return results


def print_one(options: argparse.Namespace) -> None:
    """Measure one trainer in this process and print the result as JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        workload = WORKLOADS[options.sizes[0]]
        if options.pairs is not None:
            workload = replace(workload, pairs=options.pairs)
        if options.measure == "torchmuster":
            result = measure_ours(workload)
        else:
            result = measure_peer(options.measure, workload, options.metrics)
    print(json.dumps(result))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sizes", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--readings", nargs="+", choices=["own", "ready"], default=["own", "ready"])
    parser.add_argument("--peers", metavar="PYTHON", help="measure the peers of this environment")
    parser.add_argument("--pairs", type=int, help="how often both loops have their turn")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--rank-writes", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", choices=[*PEERS, "torchmuster"], help=argparse.SUPPRESS)
    parser.add_argument("--metrics", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_writes:
        be_rank(options.rank_writes, options.sizes, options.readings, options.pairs)
        return
    if options.measure:
        print_one(options)
        return
    results: list[dict[str, Any]] = []
    if options.peers:
        results = measure_peers(options.peers, options.sizes, options.pairs)
        print(render(results, ("trainer", "metrics")))
    else:
        for ranks in options.ranks:
            results += start_ranks(ranks, options.sizes, options.readings, options.pairs)
        print(render(results, ("ranks", "reading")))
        print(f"wanted: {_BARS}")
    if options.out:
        found = {"torch": torch.__version__, "results": results}
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
