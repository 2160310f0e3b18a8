"""Measure the time from the loss of a host to the next training step, with and without a hot spare.

    python benchmarks/recovery.py --host-loss [--slurm] [--rounds 3] [--base SRC] [--out benchmarks/results/takeover.md]

The hosts are network namespaces with sshd (tests/hosts), or nodes of a real Slurm (tests/slurm): four with a rank of ``muster train``
each, and one more that is the spare. All processes of a host are killed at once. ``--base`` is the ``src`` folder of an older
version, which restarts without a spare; the sides are interleaved. The ranks write down when they join the group, when the model
is built, and when they finish a step, so that the time can be split.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from hosts.lab import Lab  # noqa: E402
from hosts.test_spares import kill_host  # noqa: E402
from slurm.slurm_lab import SlurmLab  # noqa: E402

RANKS = 4
_SAVE_EVERY = 5
_WITHIN_S = 240.0
PHASES = ("notice and stop", "takeover", "import", "rendezvous", "build", "load and first step")

_MINE = """
import os, pathlib, time, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from marks import mark


def model():
    mark("model")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    register_optimizer_step_post_hook(lambda *_: (mark("step"), time.sleep(0.05)))
    return model


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, row):
        return torch.randn(64, generator=torch.Generator().manual_seed(row)), row % 10


def data():
    return Rows()
"""
_MARKS = """
import os, time


def mark(name):
    file = os.path.join(os.environ["TAKEOVER_FOLDER"], f"marks-{os.environ['RANK']}.txt")
    with open(file, "a") as out:
        out.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {name} {time.time()}\\n")
"""
# Marks the rendezvous of the ranks, which is over before code of the user runs.
_SITE = """
import sys
import importlib.machinery

NAME = "torch.distributed.distributed_c10d"


class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != NAME:
            return None
        spec = super().find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            original = module.init_process_group

            def init_process_group(*words, **named):
                from marks import mark
                mark("imported")
                original(*words, **named)
                mark("joined")

            module.init_process_group = init_process_group

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder)
"""
_SETTINGS = f"""
model: {{build: 'mine:model'}}
data: {{dataset: 'mine:data'}}
distributed: {{strategy: ddp}}
train: {{steps: 1000000, global_batch_size: 16, log_every: 100}}
checkpoint: {{every: {_SAVE_EVERY}}}
"""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A version of the code, and whether it has a spare."""

    name: str
    source: Path
    spares: int


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment in the life of a rank."""

    attempt: int
    name: str
    at_s: float


def marks_of(folder: Path, rank: int) -> list[Mark]:
    """Return what a rank has written down, in all attempts."""
    with contextlib.suppress(FileNotFoundError):
        lines = (folder / f"marks-{rank}.txt").read_text().split("\n")[:-1]
        parts = [line.split() for line in lines]
        return [
            Mark(attempt=int(attempt), name=name, at_s=float(at)) for attempt, name, at in parts
        ]
    return []


class Cluster(Protocol):
    """Hosts on which a training runs: four with ranks, and a spare."""

    def launch(self, side: Side, folder: Path) -> subprocess.Popen[Any]:
        """Start the training; its output goes to ``said.txt``."""

    def kill(self, number: int) -> None:
        """Kill all processes of the run on a host that has a rank."""

    def clean(self) -> None:
        """Kill what a training has left."""


def train_command(side: Side, folder: Path) -> list[str]:
    """Return the command of the training, without its hosts."""
    command = [sys.executable, "-m", "torchmuster", "train", "--config", "config.yaml"]
    command += [
        "--device",
        "cpu",
        "--ranks",
        "1",
        "--max-restarts",
        "9",
        "--set",
        "launch.grace=10s",
    ]
    command += ["--env", f"PYTHONPATH={folder}:{side.source}", "--env", f"TAKEOVER_FOLDER={folder}"]
    command += ["--env", "OMP_NUM_THREADS=1"]
    return command + (["--spares", str(side.spares)] if side.spares else [])


class SshHosts:
    """Network namespaces with sshd; the launcher has a host of its own."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def launch(self, side: Side, folder: Path) -> subprocess.Popen[Any]:
        """Start the training from the first host, on the others."""
        hosts = [host.name for host in self._lab.hosts[1 : RANKS + 1 + side.spares]]
        for host in self._lab.hosts:
            host.set(PYTHONPATH=str(side.source))
        with (folder / "said.txt").open("wb") as out:
            return self._lab.hosts[0].popen(
                [*train_command(side, folder), "--hosts", ",".join(hosts)],
                cwd=folder,
                env={"NO_COLOR": "1", "PYTHONPATH": str(side.source)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def kill(self, number: int) -> None:
        """Kill every process of a host except its ssh server."""
        kill_host(self._lab, f"node{number + 2}")

    def clean(self) -> None:
        """Kill what is left on all hosts."""
        for host in self._lab.hosts:
            kill_host(self._lab, host.name)


class SlurmNodes:
    """Nodes of a real Slurm; the launcher runs on the first one, which is not killed."""

    def __init__(self, lab: SlurmLab) -> None:
        self._lab = lab

    def launch(self, side: Side, folder: Path) -> subprocess.Popen[Any]:
        """Submit the training as a job, and follow it."""
        environment = {**os.environ, **self._lab.variables, "PYTHONPATH": str(side.source)}
        with (folder / "said.txt").open("wb") as out:
            return subprocess.Popen(
                [*train_command(side, folder), "--slurm", "--nodes", str(RANKS)],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def kill(self, number: int) -> None:
        """Kill the node agent of a node, and all that it started."""
        for pid in self._lab.pids_on(f"node{max(number, 1) + 1}"):
            with contextlib.suppress(OSError):
                if b"torchmuster" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    def clean(self) -> None:
        """Cancel all jobs."""
        self._lab.clear()


def recovery(cluster: Cluster, side: Side, folder: Path, chance: random.Random) -> dict[str, float]:
    """Train, kill a host, and return how long each phase took until all ranks made a step."""
    for name, text in {"mine": _MINE, "marks": _MARKS, "sitecustomize": _SITE}.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "config.yaml").write_text(_SETTINGS)
    process = cluster.launch(side, folder)
    try:
        _await_steps(process, folder, 0, 4 * _SAVE_EVERY)
        if side.spares:
            _await_spare(process, folder)
        cluster.kill(chance.randrange(RANKS))
        killed_s = time.time()
        _await_steps(process, folder, 1, 1)
        return _split(folder, killed_s)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        cluster.clean()
        process.kill()
        process.wait()


def _await_spare(process: subprocess.Popen[Any], folder: Path) -> None:
    """Wait until the spare has passed its test, and all hosts have imported torch for the next attempt."""
    until_s = time.monotonic() + _WITHIN_S
    while not any('"spare-ready"' in one.read_text() for one in folder.glob("runs/*/events.jsonl")):
        if time.monotonic() > until_s or process.poll() is not None:
            raise SystemExit(f"no spare: see {folder}")
        time.sleep(0.05)
    time.sleep(10.0)


def _await_steps(process: subprocess.Popen[Any], folder: Path, attempt: int, steps: int) -> None:
    until_s = time.monotonic() + _WITHIN_S
    while True:
        new = [
            sum(one.name == "step" and one.attempt == attempt for one in marks_of(folder, rank))
            for rank in range(RANKS)
        ]
        if min(new) >= steps:
            return
        if time.monotonic() > until_s or process.poll() is not None:
            raise SystemExit(f"no step: see {folder}\n{(folder / 'said.txt').read_text()[-3000:]}")
        time.sleep(0.05)


def _split(folder: Path, killed_s: float) -> dict[str, float]:
    def last(name: str) -> float:
        return max(
            one.at_s
            for rank in range(RANKS)
            for one in marks_of(folder, rank)
            if (one.name, one.attempt) == (name, 1)
        )

    (events,) = folder.glob("runs/*/events.jsonl")
    told = [json.loads(line) for line in events.read_text().splitlines() if line]
    stopped_s = max(one["at_unix_s"] for one in told if one["event"] == "restart")
    started_s = max(one["at_unix_s"] for one in told if one["event"] == "started")
    moments = [killed_s, stopped_s, started_s]
    moments += [last(name) for name in ("imported", "joined", "model", "step")]
    noticed_s = max(
        one.get("noticed_unix_s", stopped_s) for one in told if one["event"] == "restart"
    )
    spans = [after - before for before, after in itertools.pairwise(moments)]
    split = dict(zip(PHASES, spans, strict=True))
    return split | {"total": moments[-1] - killed_s, "of it, notice": noticed_s - killed_s}


def render(found: Mapping[str, Sequence[Mapping[str, float]]], where: str) -> str:
    """Return the medians of all phases as a Markdown table."""
    lines = [
        "# Time from the loss of a host to the next step",
        "",
        f"Written by `benchmarks/recovery.py --host-loss`: four {where} with one rank each, all on {os.cpu_count()} cores at load "
        f"{os.getloadavg()[0]:.0f}; medians in seconds.",
        "",
        f"| | losses | {' | '.join(PHASES)} | total | range |",
        f"|---|---|{'---|' * (len(PHASES) + 2)}",
    ]
    for name, times in found.items():
        if not times:
            continue
        cells = [f"{statistics.median(one[phase] for one in times):.2f}" for phase in PHASES]
        total = [one["total"] for one in times]
        span = f"{min(total):.1f} to {max(total):.1f}"
        median = f"{statistics.median(total):.1f}"
        lines.append(f"| {name} | {len(times)} | {' | '.join(cells)} | {median} | {span} |")
    return "\n".join(lines) + "\n"


def measure_takeovers(
    *, rounds: int, base: Path | None, out: Path | None, slurm: bool = False, seed: int = 0
) -> None:
    """Let the sides take turns, and print what it took."""
    here = ROOT / "src"
    sides = [
        Side(name="restart without a spare", source=base or here, spares=0),
        Side(name="a spare takes over", source=here, spares=1),
    ]
    found: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    chance = random.Random(seed)
    with contextlib.ExitStack() as stack:
        cluster: Cluster
        if slurm:
            short = Path(tempfile.mkdtemp(prefix="slurm-"))
            stack.callback(shutil.rmtree, short, ignore_errors=True)
            cluster = SlurmNodes(
                stack.enter_context(SlurmLab(folder=short / "lab", machines=RANKS + 1))
            )
        else:
            cluster = SshHosts(stack.enter_context(Lab(RANKS + 2)))
        for number in range(rounds):
            for side in sides[:: 1 if number % 2 else -1]:
                folder = Path(tempfile.mkdtemp(prefix="takeover-"))
                times = recovery(cluster, side, folder, chance)
                found[side.name].append(times)
                shown = ", ".join(f"{name} {span:.2f}" for name, span in times.items())
                print(f"round {number + 1}  {side.name:<24} {shown}", flush=True)
                shutil.rmtree(folder, ignore_errors=True)
    table = render(found, "nodes of a Slurm job" if slurm else "hosts over ssh")
    print(table)
    if out:
        out.write_text(table)
