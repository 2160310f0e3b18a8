"""Jobs of three users that wait in line for GPUs while some are cancelled, killed or ended by a reboot; run as root.

    PYTHONPATH=tests python tests/stress/line_crowd.py FOLDER ARRIVALS SEED

Each job is a process of its user. A witness checks that no GPU is granted twice. A reboot kills
all jobs and deletes the claims; the jobs that have not ended arrive again. The
program prints one JSON line with what happened.
"""

import fcntl
import json
import os
import pwd
import random
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from torchmuster.devices import tickets
from torchmuster.devices.acquire import acquire_devices
from torchmuster.devices.claims import Claims
from torchmuster.devices.model import Node
from torchmuster.devices.readers import cpu, nvml
from torchmuster.devices.request import DeviceRequest
from torchmuster.devices.tickets import read_tickets
from torchmuster.errors import MusterError

USERS = [pwd.getpwnam(name) for name in ("nobody", "daemon", "bin")]
CPU = cpu.read_cpu()
AT_ONCE = 14
LONG_WAIT_S = 3.0
_WITHIN_S = 900.0


def look() -> Node:
    """The GPUs and their links through the real binding, without what else a machine has."""
    seen = nvml.read_nvml()
    return Node(
        hostname="crowd",
        taken_unix_s=time.time(),
        accelerators=seen.devices,
        cpu=CPU,
        links=seen.links,
    )


class Witness:
    """Says whether anybody else believes to own a GPU.

    Opened before any claim: the kernel closes a dead process's files in ascending order, so the
    witness's locks are gone before the claims are.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)

    def enter(self, gpu: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, gpu)
        except OSError:
            return False
        return True

    def leave(self, gpu: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, gpu)


class Cancelled(BaseException):
    """The job's owner cancelled it; no library handles this."""


@dataclass
class Job:
    number: int
    uid: int
    count: int
    hold_s: float
    fate: str  # ends, cancel, kill
    fate_after_s: float
    arrived_unix_s: float = field(default_factory=time.time)


def a_job(number: int, chance: random.Random) -> Job:
    return Job(
        number=number,
        uid=chance.choice(USERS).pw_uid,
        count=chance.choice([1, 1, 1, 2, 2, 3, 4, 8]),
        hold_s=chance.uniform(0.0, 0.3),
        fate=chance.choice(["ends"] * 7 + ["cancel", "kill"]),
        fate_after_s=chance.uniform(0.0, 1.0),
    )


def work(job: Job, folder: Path) -> None:
    """Be one job, as its user; what happened is one line in a file of all."""
    os.setgroups([])
    os.setgid(job.uid)
    os.setuid(job.uid)
    random.seed(job.number)
    tickets.LONG_WAIT_S = LONG_WAIT_S
    witness = Witness(folder / "witness")
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND)

    def cancelled(number: int, frame: FrameType | None) -> None:
        raise Cancelled

    signal.signal(signal.SIGTERM, cancelled)
    outcome, joined_unix_s, started_unix_s = "cancelled", 0.0, 0.0

    def on_wait(_: MusterError) -> None:
        nonlocal joined_unix_s
        joined_unix_s = joined_unix_s or time.time()

    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        with acquire_devices(
            Claims(folder / "claims"),
            look,
            DeviceRequest(count=job.count),
            environment={},
            wait_s=_WITHIN_S,
            command=["job"],
            on_wait=on_wait,
        ) as held:
            started_unix_s = time.time()
            numbers = [device.index for device in held.decision.value]
            alone = [witness.enter(number) for number in numbers]
            outcome = "ended" if all(alone) and len(alone) == job.count else "granted twice"
            time.sleep(job.hold_s)
            for number in numbers:
                witness.leave(number)
    except Cancelled:
        pass
    line = {
        "job": job.number,
        "outcome": outcome,
        "count": job.count,
        "waited_s": time.time() - job.arrived_unix_s,
        "joined_unix_s": joined_unix_s,
        "started_unix_s": started_unix_s,
    }
    os.write(log, f"{json.dumps(line)}\n".encode())


def latest_overtaking_s(lines: list[dict[str, float]]) -> float:
    """Return by how much a request started at most before an earlier one that needed no more GPUs.

    Both get their GPUs at once, but each claims them when it polls next, within about a second.
    """
    waited = sorted(
        (line for line in lines if line["joined_unix_s"] and line["started_unix_s"]),
        key=lambda line: line["joined_unix_s"],
    )
    latest = 0.0
    for place, later in enumerate(waited):
        for earlier in waited[:place]:
            # Tickets are numbered under a lock; these times are taken just after it.
            surely_earlier = later["joined_unix_s"] - earlier["joined_unix_s"] > 0.2
            if surely_earlier and earlier["count"] <= later["count"]:
                latest = max(latest, earlier["started_unix_s"] - later["started_unix_s"])
    return latest


def crowd(folder: Path, arrivals: int, seed: int) -> dict[str, object]:
    chance = random.Random(seed)
    for name in ("witness", "log"):
        (folder / name).touch()
        (folder / name).chmod(0o666)
    to_come = [a_job(number, chance) for number in range(arrivals)]
    reboots = {arrivals // 3, 2 * arrivals // 3}
    alive: dict[int, Job] = {}
    ends: dict[int, float] = {}
    killed, rebooted = 0, 0
    deadline = time.monotonic() + _WITHIN_S
    while to_come or alive:
        if time.monotonic() > deadline:
            break
        if to_come and len(alive) < AT_ONCE:
            job = to_come.pop(0)
            job.arrived_unix_s = time.time()
            # A job that is cancelled before it handles the signal would leave no line in the log.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            child = os.fork()
            if child > 0:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            if child == 0:
                code = 1
                try:
                    work(job, folder)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            alive[child] = job
            ends[child] = time.monotonic() + job.fate_after_s
            if job.number in reboots:
                reboots.discard(job.number)
                rebooted += 1
                for pid in alive:
                    os.kill(pid, signal.SIGKILL)
                for pid in alive:
                    os.waitpid(pid, 0)
                done = {
                    json.loads(line)["job"] for line in (folder / "log").read_text().splitlines()
                }
                to_come = [one for one in alive.values() if one.number not in done] + to_come
                alive, ends = {}, {}
                shutil.rmtree(folder / "claims", ignore_errors=True)
        time.sleep(chance.uniform(0.0, 0.1))
        for pid, job in list(alive.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del alive[pid]
            elif job.fate != "ends" and time.monotonic() > ends.get(pid, float("inf")):
                del ends[pid]
                killed += job.fate == "kill"
                os.kill(pid, signal.SIGKILL if job.fate == "kill" else signal.SIGTERM)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    claims = Claims(folder / "claims")
    with claims.gate():
        claims.remove_left_over()
    return {
        "outcomes": {
            name: sum(line["outcome"] == name for line in lines)
            for name in ("ended", "cancelled", "granted twice")
        },
        "lost": arrivals - len({line["job"] for line in lines}) - killed,
        "killed": killed,
        "reboots": rebooted,
        "latest_overtaking_s": round(latest_overtaking_s(lines), 2),
        "longest_wait_s": round(max(line["waited_s"] for line in lines), 2),
        "stuck": len(alive),
        "tickets_left": len(read_tickets(claims.queue)) + len(list(claims.queue.iterdir())),
        "claims_left": len(claims.read([one.uuid for one in look().accelerators]).claimed),
    }


if __name__ == "__main__":
    print(json.dumps(crowd(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
