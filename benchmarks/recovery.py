"""Measure the downtime of a training after kill -9 of a rank: ``muster train`` and plain torchrun.

    python benchmarks/recovery.py [--rounds 3] [--out benchmarks/results/recovery.md]
    python benchmarks/recovery.py --host-loss      the loss of a host instead: takeover.py

Both train the same model on two ranks and save their state every few steps: ``muster train`` as its settings say,
torchrun's script with torch.save by rank 0 and ``--max-restarts``. Rank 1 is killed several times in each run. The time is
from the kill to the end of the first optimizer step of all new ranks; a run without such a step within a minute is stopped.
The runs are interleaved.
"""

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path.insert(0, str(Path(__file__).parent))
from step_overhead import LARGE, SMALL, Workload, build_dataset, build_model, build_optimizer

_WORKLOADS: dict[str, Workload] = {"small": SMALL, "large": LARGE}
_SAVE_EVERY = 10
_PACE_S = 0.02
_STEPS = 10**6  # it is ended before
_STANDS_STILL_AT_MOST_S = 60.0
_BEGINS_WITHIN_S = 120.0


# What both train.


def model() -> nn.Module:
    """Return the model, and note the steps that this process takes with it."""
    _note_steps()
    return build_model(_WORKLOADS[os.environ["RECOVERY_SIZE"]])


def data() -> Any:
    """Return the data."""
    return build_dataset(_WORKLOADS[os.environ["RECOVERY_SIZE"]])


def _note_steps() -> None:
    """Write down the time of every optimizer step: one clock for all processes of the machine."""
    notes = Path(os.environ["RECOVERY_FOLDER"]) / f"steps-{os.environ['RANK']}.txt"
    stream = notes.open("a", buffering=1)

    def note(*_: object) -> None:
        stream.write(f"{os.getpid()} {time.monotonic()}\n")
        time.sleep(_PACE_S)

    register_optimizer_step_post_hook(note)


def be_torchrun_rank() -> None:
    """Train as a hand-written script does, going on from the file that rank 0 left."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    file = Path(os.environ["RECOVERY_FOLDER"]) / "state.pt"
    replica = DistributedDataParallel(model())
    optimizer = build_optimizer(replica.parameters())
    step = 0
    if file.exists():
        state = torch.load(file, weights_only=True)
        replica.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    dataset = data()
    sampler = torch.utils.data.DistributedSampler(dataset)
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler)
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            cross_entropy(replica(inputs), targets).backward()
            optimizer.step()
            step += 1
            if step % _SAVE_EVERY == 0 and rank == 0:
                state = {
                    "model": replica.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                }
                torch.save(state, file.with_suffix(".new"))
                file.with_suffix(".new").replace(file)


# Killing, and waiting for the next step.


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to train."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


_MUSTER_SETTINGS = {
    "model.build": "recovery:model",
    "data.dataset": "recovery:data",
    "distributed.strategy": "ddp",
    "train.steps": _STEPS,
    "train.micro_batch_size": 8,
    "train.learning_rate": 1e-4,
    "checkpoint.every": _SAVE_EVERY,
}
_SETTINGS = [word for one in _MUSTER_SETTINGS.items() for word in ("--set", "{}={}".format(*one))]
_TORCHRUN = (
    *("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("--max-restarts", "100", str(Path(__file__).absolute()), "--be-torchrun-rank"),
)
SIDES = (
    Side(name="torchrun", command=_TORCHRUN),
    # Its ranks may read what the last attempt left in the store that they share: with this they do not.
    Side(
        name="torchrun, store not shared",
        command=_TORCHRUN,
        environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
    Side(
        name="muster train",
        command=("torchmuster", "train", "--device", "cpu", "--ranks", "2", *_SETTINGS),
    ),
)


@contextlib.contextmanager
def running(side: Side, folder: Path, size: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a side in a folder; at the end nothing of it is left."""
    env = {
        **os.environ,
        **side.environment,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent),
        "RECOVERY_FOLDER": str(folder),
        "RECOVERY_SIZE": size,
        "TORCHMUSTER_CLAIMS_DIR": str(folder / "claims"),
    }
    said = folder / "said.txt"
    with said.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *side.command],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        for pid in {pid for rank in range(2) for pid, _ in steps_of(folder, rank)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def steps_of(folder: Path, rank: int) -> list[tuple[int, float]]:
    """Return the process and the time of each step of a rank."""
    with contextlib.suppress(FileNotFoundError):
        lines = (folder / f"steps-{rank}.txt").read_text().split("\n")[:-1]
        return [(int(pid), float(at_s)) for pid, at_s in (line.split() for line in lines)]
    return []


def recoveries(side: Side, folder: Path, *, size: str, kills: int) -> list[float | None]:
    """Kill rank 1 so many times in a run; return how long each took, None where no step came any more."""
    found: list[float | None] = []
    with running(side, folder, size) as process:
        known: set[int] = set()
        for _ in range(kills):
            if (pid := _await_work(folder, process, known)) is None:
                raise SystemExit(f"{side.name} does not train: see {folder / 'said.txt'}")
            known |= {one for rank in range(2) for one, _ in steps_of(folder, rank)}
            os.kill(pid, signal.SIGKILL)
            killed_s = time.monotonic()
            next_s = _await_next_step(folder, process, known)
            found.append(None if next_s is None else next_s - killed_s)
            if next_s is None:
                break
    return found


def _await_work(folder: Path, process: subprocess.Popen[bytes], known: set[int]) -> int | None:
    """Wait until rank 1 has taken enough steps for something to be saved; return its process."""
    until_s = time.monotonic() + _BEGINS_WITHIN_S
    while time.monotonic() < until_s and process.poll() is None:
        new = [pid for pid, _ in steps_of(folder, 1) if pid not in known]
        if len(new) > 3 * _SAVE_EVERY:
            return new[-1]
        time.sleep(0.02)
    return None


def _await_next_step(
    folder: Path, process: subprocess.Popen[bytes], known: set[int]
) -> float | None:
    """Return when the first step of the new ranks was done; None if there is none in time."""
    until_s = time.monotonic() + _STANDS_STILL_AT_MOST_S
    while time.monotonic() < until_s and process.poll() is None:
        first = [
            next((at_s for pid, at_s in steps_of(folder, rank) if pid not in known), None)
            for rank in range(2)
        ]
        done = [at_s for at_s in first if at_s is not None]
        if len(done) == 2:
            return max(done)
        time.sleep(0.02)
    return None


def render(found: Mapping[str, Sequence[float | None]]) -> str:
    """Return the medians and ranges as a Markdown table, and how often no step came any more."""
    lines = [
        "# Recovery time after kill -9 of a rank",
        "",
        "Written by `benchmarks/recovery.py`. The recovery time runs from the kill to the end of the first optimizer step of all new ranks.",
        "",
        f"Measured with two ranks on {os.cpu_count()} cores and torch {torch.__version__}, at load {os.getloadavg()[0]:.0f}.",
        "",
        "| | kills | never recovered | median | range |",
        "|---|---|---|---|---|",
    ]
    for name, times in found.items():
        done = [one for one in times if one is not None]
        median = f"{statistics.median(done):.1f} s" if done else ""
        span = f"{min(done):.1f} to {max(done):.1f} s" if done else ""
        never = len(times) - len(done)
        lines.append(f"| {name} | {len(times)} | {never} | {median} | {span} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Let them take turns, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--kills", type=int, default=3, help="in each run")
    parser.add_argument("--size", choices=_WORKLOADS, default="small")
    parser.add_argument("--out", type=Path, help="write the table there")
    parser.add_argument(
        "--host-loss", action="store_true", help="lose a host instead, with and without a spare"
    )
    parser.add_argument(
        "--slurm", action="store_true", help="with --host-loss: nodes of a Slurm job"
    )
    parser.add_argument(
        "--base", type=Path, help="with --host-loss: src folder of an older version"
    )
    parser.add_argument("--be-torchrun-rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.be_torchrun_rank:
        be_torchrun_rank()
        return
    if asked.host_loss:
        from takeover import measure_takeovers

        measure_takeovers(rounds=asked.rounds, base=asked.base, out=asked.out, slurm=asked.slurm)
        return
    found: dict[str, list[float | None]] = {side.name: [] for side in SIDES}
    for number in range(asked.rounds):
        for side in SIDES[:: 1 if number % 2 else -1]:  # each is first in turn
            folder = Path(tempfile.mkdtemp(prefix="recovery-"))
            times = recoveries(side, folder, size=asked.size, kills=asked.kills)
            found[side.name] += times
            shown = ", ".join("never" if one is None else f"{one:.2f} s" for one in times)
            print(f"round {number + 1}  {side.name:<26} {shown}", flush=True)
            shutil.rmtree(folder)
    table = render(found)
    print(table)
    if asked.out:
        asked.out.write_text(table)


if __name__ == "__main__":
    main()
