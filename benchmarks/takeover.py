"""Measure the time from the loss of a host to the next training step, with and without a hot spare.

    python benchmarks/recovery.py --hosts [--rounds 3] [--base SRC] [--out docs/measured/takeover.md]

The hosts are network namespaces with sshd (tests/hosts): one with the launcher, four with a rank of ``muster train`` each, and
one more that is the spare. All processes of a host are killed at once. ``--base`` is the ``src`` folder of an older version,
which restarts without a spare; the sides are interleaved. The ranks write down when they join the group, when the model
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

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from hosts.host import HostProcess  # noqa: E402
from hosts.lab import Lab  # noqa: E402

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


def launch(lab: Lab, side: Side, folder: Path) -> HostProcess:
    """Start the training from the first host of the lab, on the others."""
    for name, text in {"mine": _MINE, "marks": _MARKS, "sitecustomize": _SITE}.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "config.yaml").write_text(_SETTINGS)
    hosts = [host.name for host in lab.hosts[1 : RANKS + 1 + side.spares]]
    path = f"{folder}:{side.source}"
    for host in lab.hosts:
        host.set(PYTHONPATH=str(side.source))
    command = [sys.executable, "-m", "torchmuster", "train", "--config", "config.yaml"]
    command += [
        "--device",
        "cpu",
        "--ranks",
        "1",
        "--hosts",
        ",".join(hosts),
        "--max-restarts",
        "9",
    ]
    command += ["--env", f"PYTHONPATH={path}", "--env", f"TAKEOVER_FOLDER={folder}"]
    command += ["--env", "OMP_NUM_THREADS=1", "--grace", "10s"]
    command += ["--spares", str(side.spares)] if side.spares else []
    with (folder / "said.txt").open("wb") as out:
        return lab.hosts[0].popen(
            command,
            cwd=folder,
            env={"NO_COLOR": "1", "PYTHONPATH": str(side.source)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def kill_host(lab: Lab, name: str) -> float:
    """Kill every process of a host except its ssh server; return when."""
    host = lab.host(name)
    for pid in host.pids():
        if pid != host.sshd_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return time.time()


def recovery(lab: Lab, side: Side, folder: Path, chance: random.Random) -> dict[str, float]:
    """Train, kill a host, and return how long each phase took until all ranks made a step."""
    process = launch(lab, side, folder)
    try:
        _await_steps(process, folder, 0, 4 * _SAVE_EVERY)
        time.sleep(3.0)  # so that what is prepared in the background is ready
        killed_s = kill_host(lab, f"node{chance.randrange(RANKS) + 2}")
        _await_steps(process, folder, 1, 1)
        return _split(folder, killed_s)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        for host in lab.hosts:
            kill_host(lab, host.name)
        process.wait()


def _await_steps(process: HostProcess, folder: Path, attempt: int, steps: int) -> None:
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
    told = [json.loads(line) for line in events.read_text().splitlines()]
    stopped_s = max(one["at_unix_s"] for one in told if one["event"] == "restart")
    started_s = max(one["at_unix_s"] for one in told if one["event"] == "started")
    moments = [killed_s, stopped_s, started_s]
    moments += [last(name) for name in ("imported", "joined", "model", "step")]
    spans = [after - before for before, after in itertools.pairwise(moments)]
    return dict(zip(PHASES, spans, strict=True)) | {"total": moments[-1] - killed_s}


def render(found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return the medians of all phases as a Markdown table."""
    lines = [
        "# Time from the loss of a host to the next step",
        "",
        f"Written by `benchmarks/recovery.py --hosts`: four hosts with one rank each, on {os.cpu_count()} cores at load "
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


def measure_takeovers(*, rounds: int, base: Path | None, out: Path | None, seed: int = 0) -> None:
    """Let the sides take turns, and print what it took."""
    here = ROOT / "src"
    sides = [Side(name="restart without a spare", source=base or here, spares=0)]
    sides.append(Side(name="a spare takes over", source=here, spares=1))
    found: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    chance = random.Random(seed)
    with Lab(RANKS + 2) as lab:
        for number in range(rounds):
            for side in sides[:: 1 if number % 2 else -1]:
                folder = Path(tempfile.mkdtemp(prefix="takeover-"))
                times = recovery(lab, side, folder, chance)
                found[side.name].append(times)
                shown = ", ".join(f"{name} {span:.2f}" for name, span in times.items())
                print(f"round {number + 1}  {side.name:<24} {shown}", flush=True)
                shutil.rmtree(folder, ignore_errors=True)
    table = render(found)
    print(table)
    if out:
        out.write_text(table)


if __name__ == "__main__":
    measure_takeovers(
        rounds=int(sys.argv[1]), base=Path(sys.argv[2]) if sys.argv[2:] else None, out=None
    )
