"""What a step of other trainers costs over the same step written by hand, on one process.

    python -m venv /tmp/venv-peers
    /tmp/venv-peers/bin/pip install torch==2.13.0 accelerate lightning transformers
    python benchmarks/peers.py --python /tmp/venv-peers/bin/python [--out peers.json]

Each one runs in a process of its own, in the other environment; torchmuster runs in this one, for comparison. All
have the same model, data, batch and optimizer, without DDP, gradient clipping, checkpoints and progress bars. Each
reads with a DataLoader as its documentation shows it. "metrics" says what is logged: nothing, or the loss every 50
steps in the framework's own way.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

sys.path.insert(0, str(Path(__file__).parent))
import workload as of
from workload import WORKLOADS, Turns, Workload, summary

LOG_EVERY = 50


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
    dataset = of.build_dataset(workload)
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
    model = of.build_model(workload)
    model, optimizer, batches = accelerator.prepare(
        model, of.build_optimizer(model.parameters()), loader_of(workload, turns)
    )
    total = 0.0
    for number, batch in enumerate(endless(batches)):
        if number == turns.steps:
            return
        optimizer.zero_grad()
        loss = of.loss_of(model, batch)
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
    model = of.build_model(workload)
    model, optimizer = lightning.setup(model, of.build_optimizer(model.parameters()))
    batches = lightning.setup_dataloaders(loader_of(workload, turns))
    total = 0.0
    for number, batch in enumerate(endless(batches)):
        if number == turns.steps:
            return
        optimizer.zero_grad()
        loss = of.loss_of(model, batch)
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
            self.model = of.build_model(workload)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = of.loss_of(self.model, batch)
            if metrics:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return of.build_optimizer(self.parameters())

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
            self.model = of.build_model(workload)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": of.loss_of(self.model, (inputs, labels))}

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
            train_dataset=of.build_dataset(workload),
            optimizers=(of.build_optimizer(model.parameters()), None),
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
    batches = of.batches_of_torch(workload, 0, 1)
    turns = Turns(workload, of.bare_loop(workload, batches, ddp=False))
    PEERS[peer](workload, turns, metrics)
    return summary(turns)


def measure_ours(workload: Workload) -> dict[str, Any]:
    """Measure torchmuster's Trainer in the same way; its metrics are always on."""
    from overhead import measure

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


def render(results: list[dict[str, Any]]) -> str:
    """Return the results as a table."""
    head = f"{'step':<9} {'trainer':<13} {'metrics':<8} {'bare ms':>9} {'its ms':>9} "
    lines = [head + f"{'extra us (middle half)':>26} {'ratio':>7}"]
    for one in results:
        middle = (
            f"{one['extra_us']:+.0f} ({one['extra_us_low']:+.0f} to {one['extra_us_high']:+.0f})"
        )
        lines.append(
            f"{one['workload']:<9} {one['trainer']:<13} {'on' if one['metrics'] else 'off':<8} "
            f"{one['bare_ms']:>9.3f} {one['other_ms']:>9.3f} {middle:>26} {one['ratio']:>7.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure all frameworks one after the other and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="the interpreter of the environment with the others")
    parser.add_argument("--sizes", nargs="+", choices=WORKLOADS, default=["small"])
    parser.add_argument("--pairs", type=int, help="how often both loops have their turn")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--measure", choices=[*PEERS, "torchmuster"], help=argparse.SUPPRESS)
    parser.add_argument("--metrics", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        with contextlib.redirect_stdout(sys.stderr):
            (size,) = asked.sizes
            workload = WORKLOADS[size]
            if asked.pairs is not None:
                workload = replace(workload, pairs=asked.pairs)
            if asked.measure == "torchmuster":
                result = measure_ours(workload)
            else:
                result = measure_peer(asked.measure, workload, asked.metrics)
        print(json.dumps(result))
        return
    if not asked.python:
        raise SystemExit(f"--python is needed: an environment made by\n{__doc__}")
    results = []
    for size in asked.sizes:
        results.append(in_own_process(sys.executable, "torchmuster", size, True, asked.pairs))
        for peer in PEERS:
            for metrics in (False, True):
                results.append(in_own_process(asked.python, peer, size, metrics, asked.pairs))
    print(render(results))
    if asked.out:
        asked.out.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1))


if __name__ == "__main__":
    main()
