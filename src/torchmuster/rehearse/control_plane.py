"""Run the real launcher against simulated hosts, and measure what it needs."""

import asyncio
import json
import os
import resource
import stat
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchmuster.errors import MusterError
from torchmuster.finding import Finding
from torchmuster.launch.job import JobSpec, Limits
from torchmuster.launch.launcher.job_runner import JobRunner
from torchmuster.launch.schedulers.slurm.allocation import Allocation
from torchmuster.launch.transports.srun import SrunTransport
from torchmuster.rehearse import simulated_hosts

_JOIN_S = 1800.0  # on a busy machine, which plays all hosts
_BEFORE_S = 8.0  # after the start, until the first heartbeats have been handled


@dataclass(frozen=True, kw_only=True)
class ControlPlane:
    """What the launcher needed for a number of hosts."""

    hosts: int
    ranks: int
    simulated: int  # hosts with which it was measured
    start_s: float  # until all hosts have started their ranks
    start_cpu_s: float  # of the launcher
    sent_bytes: int  # to all hosts together
    heartbeats_cpu: float  # cores, while the ranks print nothing
    chatty_cpu: float | None  # cores, while every rank prints a line per second
    memory_bytes: int  # largest resident memory of the launcher
    restart_s: float  # from the failure of a rank until all hosts have started their ranks again
    notice_s: float | None  # between a host's last message and the stop of the others
    stop_s: float | None  # between the first and the last host that gets the stop request

    def for_hosts(self, hosts: int) -> "ControlPlane":
        """Return figures for more hosts than were simulated, in proportion: a lower limit."""
        more = hosts / self.hosts
        return replace(
            self,
            hosts=hosts,
            ranks=round(self.ranks * more),
            start_s=self.start_s * more,
            start_cpu_s=self.start_cpu_s * more,
            sent_bytes=round(self.sent_bytes * more),
            heartbeats_cpu=self.heartbeats_cpu * more,
            chatty_cpu=None if self.chatty_cpu is None else self.chatty_cpu * more,
            memory_bytes=round(self.memory_bytes * more),
            restart_s=self.restart_s * more,
            stop_s=None if self.stop_s is None else self.stop_s * more,
        )


class _Quiet:
    """A console that prints nothing."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.lines = 0

    def say(self, text: str) -> None:
        self.words.append(text)

    def world(self, size: int) -> None:
        pass

    def output(self, rank: int, text: str) -> None:
        self.lines += text.count("\n")

    def show(self, findings: Sequence[Finding]) -> None:
        self.words += [one.what for one in findings]


def measure(hosts: int, *, quiet_s: float, chatty_s: float) -> ControlPlane:
    """Start a run on simulated hosts, watch it, restart it, lose a host, and stop; in this process."""
    with tempfile.TemporaryDirectory(prefix="muster-rehearse-") as name:
        return asyncio.run(_measure_launcher(hosts, Path(name), quiet_s, chatty_s))


async def _measure_launcher(
    hosts: int, folder: Path, quiet_s: float, chatty_s: float
) -> ControlPlane:
    transport = SrunTransport(
        _allocation(hosts), environment=_simulated_environment(folder), patience_s=60.0
    )
    spec = JobSpec(
        name="rehearsal",
        command=("train.py",),
        folder="/",
        device="gpu",
        max_restarts=1,
        limits=Limits(join_s=_JOIN_S),
    )
    console = _Quiet()
    running = asyncio.Event()
    (folder / "logs").mkdir()
    runner = JobRunner(
        spec,
        transport,
        console,
        run_id="rehearsal",
        logs=str(folder / "logs"),
        on_phase=lambda phase: running.set() if phase == "running" else None,
    )
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    job = asyncio.create_task(runner.run())

    async def wait_until_running() -> None:
        started = asyncio.ensure_future(running.wait())
        await asyncio.wait({job, started}, return_when="FIRST_COMPLETED")
        if job.done():
            raise RuntimeError(f"the rehearsal did not start: {job.result()}, {console.words}")

    await wait_until_running()
    start_s, start_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    heartbeats_cpu = 0.0
    if quiet_s:
        await asyncio.sleep(_BEFORE_S)
        heartbeats_cpu = await _cpu(quiet_s)
    chatty_cpu = None
    orders = folder / simulated_hosts.ORDERS
    if chatty_s:
        orders.write_text("chatty")
        await asyncio.sleep(_BEFORE_S)
        chatty_cpu = await _cpu(chatty_s)
    running.clear()
    failed_s = time.monotonic()
    orders.write_text("fail 0")
    await wait_until_running()
    restart_s = time.monotonic() - failed_s
    orders.write_text(f"silent {hosts // 2}")
    await job
    result = json.loads((folder / simulated_hosts.RESULT).read_text())
    first, last = result["first_stop_unix_s"], result["last_stop_unix_s"]
    silent = result["silent_unix_s"]
    return ControlPlane(
        hosts=hosts,
        ranks=hosts * simulated_hosts.RANKS_EACH,
        simulated=hosts,
        start_s=round(start_s, 3),
        start_cpu_s=round(start_cpu_s, 3),
        sent_bytes=result["received_bytes"],
        heartbeats_cpu=round(heartbeats_cpu, 4),
        chatty_cpu=None if chatty_cpu is None else round(chatty_cpu, 4),
        memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        restart_s=round(restart_s, 3),
        notice_s=round(first - silent, 3) if first and silent else None,
        stop_s=round(last - first, 3) if first and last else None,
    )


async def _cpu(for_s: float) -> float:
    """Return how many cores this process uses."""
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(for_s)
    return (time.process_time() - began_cpu_s) / (time.monotonic() - began_s)


def _allocation(hosts: int) -> Allocation:
    return Allocation(
        job="1",
        nodes=tuple(f"node{place:05d}" for place in range(hosts)),
        gpus=None,
        cores=None,
        tasks_per_node=None,
        copies=1,
        restarts=0,
    )


def _simulated_environment(folder: Path) -> dict[str, str]:
    """Return an environment in which ``srun`` is the simulation."""
    program = folder / "srun"
    program.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m torchmuster.rehearse.simulated_hosts "$@"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}",
        simulated_hosts.VARIABLE: str(folder),
    }


def main() -> None:
    """Print one measurement as JSON: ``python -m torchmuster.rehearse.control_plane HOSTS``."""
    hosts, quiet_s, chatty_s = int(sys.argv[1]), *map(float, sys.argv[2:4])
    try:
        found = measure(hosts, quiet_s=quiet_s, chatty_s=chatty_s)
    except MusterError as error:
        sys.exit(f"{error.what}\n{error.why}")
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
