"""Small trainings in pods that are killed, and what must be equal in the end."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from muster_command import muster_argv
from patience import GIVE_UP_S
from pods.controllers import Job, JobSet
from pods.images import bytecode_cache, bytecode_variables
from pods.kubelet import Pod
from pods.lab import PodLab

NODES, RANKS_PER_NODE = 3, 2
NAME = "train"
#: After ``hold`` steps a rank waits for the file ``go``: a training must not be over before it is killed. Every rank writes down when
#: it was started and when it finished a step.
_MINE = """
import os, pathlib, time, torch
from torch.optim.optimizer import register_optimizer_step_post_hook

RUNS = pathlib.Path(os.environ.get("MARKS", "/runs"))


def model():
    started, rank = time.time(), os.environ["RANK"]
    if not model.__dict__.setdefault("noted", False):
        model.noted = True

        def after_step(*_):
            with open(RUNS / f"marks-{{rank}}.txt", "a") as out:
                out.write(f"{{started}} {{time.time()}}\\n")
            model.steps = getattr(model, "steps", 0) + 1
            while model.steps >= {hold} > 0 and not (RUNS / "go").exists():
                time.sleep(0.02)
            time.sleep({pause_s})

        register_optimizer_step_post_hook(after_step)
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 3))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, row):
        return torch.randn(8, generator=torch.Generator().manual_seed(row)), row % 3


def data():
    return Rows()
"""
_SETTINGS = """
model: {{build: 'mine:model'}}
data: {{dataset: 'mine:data'}}
distributed: {{strategy: ddp}}
train: {{steps: {steps}, global_batch_size: 12, log_every: 1}}
checkpoint: {{every: 2}}
"""


def training_files(*, steps: int, hold: int = 0, pause_s: float = 0.0) -> dict[str, str]:
    """Return the user's files of a training."""
    return {
        "mine.py": _MINE.format(hold=hold, pause_s=pause_s),
        "config.yaml": _SETTINGS.format(steps=steps),
    }


@dataclass(frozen=True, kw_only=True)
class Result:
    """What must be equal in the end: the final weights and the loss of every step."""

    weights: str
    losses: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, runs: Path) -> "Result":
        """Return the result of the only run in a folder."""
        (weights,) = runs.glob("*/checkpoints/final/*.safetensors")
        (steps,) = runs.glob("*/metrics/steps.jsonl")
        lines = [json.loads(line) for line in steps.read_text().splitlines()]
        losses = tuple((int(one["step"]), float(one["loss"])) for one in lines if "loss" in one)
        return cls(weights=hashlib.sha256(weights.read_bytes()).hexdigest(), losses=losses)


def undisturbed(folder: Path, files: dict[str, str]) -> Result:
    """Train on this machine, with as many ranks, and return the result."""
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "go").touch()
    words = ["train", "--config", "config.yaml", "--device", "cpu", "--env", f"MARKS={folder}"]
    words += ["--ranks", str(NODES * RANKS_PER_NODE), "--env", "OMP_NUM_THREADS=1"]
    done = subprocess.run(
        muster_argv(words),
        cwd=folder,
        env={**os.environ, **bytecode_variables(bytecode_cache())},
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Result.of(folder / "runs")


def render(lab: PodLab, *words: str, kind: str = "job", nodes: int = NODES) -> str:
    """Return the manifest that the product prints."""
    flags = ["--kind", kind, "--image", lab.image, "--name", NAME, "--nodes", str(nodes)]
    flags += ["--ranks", str(RANKS_PER_NODE), "--shm", "256MiB", "--volume", "runs"]
    flags += ["--env", "OMP_NUM_THREADS=1", "--grace", "10s"]
    done = subprocess.run(
        [sys.executable, "-m", "torchmuster", "kubernetes", "render", *flags, *words],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Training:
    """A job of the product in pods, with its claim and its Secret."""

    def __init__(self, lab: PodLab, *words: str, kind: str = "job", nodes: int = NODES) -> None:
        self.lab = lab
        self.runs = lab.claim("runs")
        lab.secret(f"{NAME}-join", {"secret": "0123456789abcdef0123456789abcdef"})
        self.started = lab.apply(render(lab, *words, kind=kind, nodes=nodes))

    @property
    def job(self) -> Job:
        """The Job that has the pods."""
        return self.started.job if isinstance(self.started, JobSet) else self.started

    @property
    def folder(self) -> Path:
        """The run folder on the claim."""
        (folder,) = [file.parent for file in self.runs.glob("*/events.jsonl")]
        return folder

    def go(self) -> None:
        """Let ranks that wait continue."""
        (self.runs / "go").touch()

    def wait(self) -> str:
        """Wait for the end; return the condition."""
        return self.started.wait()

    def step(self) -> int:
        """Return the last step that is logged; 0 without one."""
        for file in self.runs.glob("*/metrics/steps.jsonl"):
            for line in reversed(file.read_text().splitlines()):
                with suppress(ValueError, KeyError):
                    return int(json.loads(line)["step"])
        return 0

    def await_step(self, step: int) -> None:
        """Wait until a step is logged."""
        self.await_true(f"step {step}", lambda: self.step() >= step)

    def await_true(self, what: str, true: Callable[[], bool]) -> None:
        """Wait for something, as long as the Job runs."""
        until_s = time.monotonic() + GIVE_UP_S
        while not true():
            if time.monotonic() > until_s or (self.job.done and not true()):
                raise AssertionError(f"not so: {what} ({self.job.condition})\n{self.job.logs()}")
            time.sleep(0.05)

    def recovered_s(self, since_s: float) -> float | None:
        """Return when every rank that was started after a moment had finished a step; None: not yet."""
        firsts = []
        for rank in range(NODES * RANKS_PER_NODE):
            file = self.runs / f"marks-{rank}.txt"
            lines = file.read_text().split("\n")[:-1] if file.exists() else []
            pairs = [tuple(map(float, line.split())) for line in lines]
            times = [ended for started, ended in pairs if started > since_s]
            if len(times) < 2:  # the first call creates the optimizer's state
                return None
            firsts.append(sorted(times)[1])
        return max(firsts)

    def events(self, name: str) -> list[dict[str, object]]:
        """Return the events of this name."""
        found = []
        for line in (self.folder / "events.jsonl").read_text().splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
        return [one for one in found if one.get("event") == name]


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kind of loss, and the pods that it may hit."""

    name: str
    indexes: Sequence[int]
    strike: Callable[[Pod], float]


def _kill_rank(pod: Pod) -> float:
    return pod.kill_rank(pod.index * RANKS_PER_NODE)


KILLS = (
    Kill(name="a rank", indexes=range(NODES), strike=_kill_rank),
    Kill(name="the node agent", indexes=range(1, NODES), strike=Pod.kill),
    Kill(name="the launcher", indexes=(0,), strike=Pod.kill),
    Kill(name="a pod, replaced", indexes=range(NODES), strike=Pod.remove),
    Kill(
        name="a pod, cut off first",
        indexes=range(NODES),
        strike=lambda pod: pod.remove(silently=True),
    ),
    Kill(name="a pod, drained", indexes=range(NODES), strike=Pod.evict),
)
