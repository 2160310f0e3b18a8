"""Small trainings with hot spares whose hosts are killed, and their weights and loss curves to compare."""

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hosts.host import HostProcess
from hosts.lab import Lab
from muster_command import muster_argv
from patience import GIVE_UP_S

#: Each attempt writes its ranks and where they run; it ends once it is told to.
WHERE = """
import os, socket, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, number = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.barrier()
print(f"round {number}: rank {rank} on {socket.gethostname()}", flush=True)
on = torch.ones(1)
while on.item():
    on = torch.tensor([float(not os.path.exists("end"))])
    dist.all_reduce(on, op=dist.ReduceOp.MIN)
    time.sleep(0.02)
dist.destroy_process_group()
"""
MINE = """
import os, time, torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def model():
    if not model.__dict__.setdefault("noted", False):
        model.noted = True
        register_optimizer_step_post_hook(lambda *_: time.sleep(0.1))
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


def events(folder: Path, name: str) -> list[dict[str, object]]:
    """Return the events of this name of the run in a folder."""
    (file,) = folder.glob("runs/*/events.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [one for one in found if one["event"] == name]


def log_of(folder: Path, rank: int) -> str:
    """Return the log of a rank of the run in a folder."""
    (log,) = folder.glob(f"runs/*/logs/rank-{rank}.log")
    return log.read_text()


def kill_host(lab: Lab, name: str) -> float:
    """Kill every process of a host except its ssh server; return when that was."""
    host = lab.host(name)
    for pid in host.pids():
        if pid != host.sshd_pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return time.time()


@dataclass(frozen=True, kw_only=True)
class Result:
    """What must be equal in the end: the final weights and the loss of every step."""

    weights: str
    losses: tuple[tuple[int, float], ...]


class Training:
    """A training from ``node1`` on other hosts, one rank on each that is not a spare."""

    def __init__(
        self, lab: Lab, folder: Path, hosts: Sequence[str], *, spares: int, steps: int
    ) -> None:
        self._lab = lab
        self.folder = folder
        self._hosts = list(hosts)
        self._spares = spares
        self._steps = steps
        folder.mkdir(parents=True)
        (folder / "mine.py").write_text(MINE)
        (folder / "config.yaml").write_text(_SETTINGS.format(steps=steps))

    def run_to_the_end(
        self, kills: Sequence[tuple[int, int]] = (), *, await_spare: bool = True
    ) -> Result:
        """Train; kill the host with a node rank once a step is logged, for each pair of step and node rank."""
        process = self._launch()
        try:
            for step, node_rank in kills:
                self._await_step(process, step)
                if await_spare:
                    self._await_spare(process)
                kill_host(self._lab, self.host_of(node_rank))
            code = process.wait(GIVE_UP_S)
        finally:
            process.kill()
            process.wait()
            for host in self._hosts:
                kill_host(self._lab, host)
        assert code == 0, self.said()
        return self.result()

    def host_of(self, node_rank: int) -> str:
        """Return the host that has a node rank now."""
        started = self._events("started")[-1]
        return str(started["hosts"][node_rank]).split()[0]  # type: ignore[index]

    def takeovers(self) -> list[dict[str, object]]:
        """Return the takeovers so far."""
        return [one for one in self._events("takeover") if one["spare"]]

    def said(self) -> str:
        """Return the output of the launcher."""
        return (self.folder / "said.txt").read_text()

    def result(self) -> Result:
        """Return what must be equal."""
        (weights,) = self.folder.glob("runs/*/checkpoints/final/*.safetensors")
        (steps,) = self.folder.glob("runs/*/metrics/steps.jsonl")
        lines = [json.loads(line) for line in steps.read_text().splitlines()]
        losses = tuple((int(one["step"]), float(one["loss"])) for one in lines if "loss" in one)
        return Result(weights=hashlib.sha256(weights.read_bytes()).hexdigest(), losses=losses)

    def _launch(self) -> HostProcess:
        words = ["train", "--config", "config.yaml", "--device", "cpu", "--ranks", "1"]
        words += ["--hosts", ",".join(self._hosts), "--spares", str(self._spares)]
        words += [
            "--max-restarts",
            "9",
            "--set",
            "launch.grace=10s",
            "--set",
            "launch.lost_after=100s",
        ]
        with (self.folder / "said.txt").open("wb") as out:
            return self._lab.hosts[0].popen(
                muster_argv([*words, "--env", "OMP_NUM_THREADS=1"]),
                cwd=self.folder,
                env={"NO_COLOR": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def _await_step(self, process: HostProcess, step: int) -> None:
        until_s = time.monotonic() + GIVE_UP_S
        while True:
            for file in self.folder.glob("runs/*/metrics/steps.jsonl"):
                lines = file.read_text().splitlines()
                with suppress(ValueError, IndexError):
                    if json.loads(lines[-1])["step"] >= step:
                        return
            if time.monotonic() > until_s or process.poll() is not None:
                raise AssertionError(f"step {step} was not reached:\n{self.said()}")
            time.sleep(0.05)

    def _await_spare(self, process: HostProcess) -> None:
        """Wait until a spare has passed its test since the last takeover."""
        until_s = time.monotonic() + GIVE_UP_S
        while time.monotonic() < until_s and process.poll() is None:
            if len(self._events("spare-ready")) > len(self.takeovers()):
                return
            time.sleep(0.05)
        raise AssertionError(f"no spare is ready:\n{self.said()}")

    def _events(self, name: str) -> list[dict[str, object]]:
        found = []
        for file in self.folder.glob("runs/*/events.jsonl"):
            for line in file.read_text().splitlines():
                with suppress(ValueError):
                    found.append(json.loads(line))
        return [one for one in found if one.get("event") == name]
