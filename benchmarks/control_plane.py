"""What the launcher needs by number of hosts: start, traffic, CPU, memory, restart, a silent host, stop.

    python benchmarks/control_plane.py --hosts 8 64 512 2048 8192

prints one row of a Markdown table per number of hosts. The launcher and its Slurm transport are the real ones. The hosts are
simulated: another process of this script takes the place of ``srun``, connects once per host, answers every message at once, and
sends the heartbeats of 8 ranks per host every 2 s. The launcher cannot tell the difference.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from torchmuster import __version__
from torchmuster.launch import protocol
from torchmuster.launch.heartbeat import Heartbeat
from torchmuster.launch.job import JobSpec, Limits
from torchmuster.launch.launcher.run import Run
from torchmuster.launch.schedulers.slurm.allocation import Allocation
from torchmuster.launch.transports.channel import allow_open_files
from torchmuster.launch.transports.join.client import open_verified
from torchmuster.launch.transports.join.code import JoinCode, decode_code
from torchmuster.launch.transports.join.messages import (
    Join,
    decode_answer,
)
from torchmuster.launch.transports.join.stream import HEADER_BYTES, Stream
from torchmuster.launch.transports.srun import SrunTransport
from torchmuster.runfolder import RunFolder

FOLDER_VARIABLE = "MUSTER_SIMULATED_HOSTS"  # the folder with ORDER and RESULT
ORDER = "order"  # quiet | chatty | fail HOST | silent HOST
RESULT = "result.json"
RANKS_PER_HOST = 8
HEARTBEAT_EVERY_S = 2.0  # as a real node agent
MEASURE_S = 6.0
SETTLE_S = 8.0  # until the first heartbeats of all hosts have been handled
TICK_S = 0.05
CONNECT_AT_ONCE = 128
CONNECT_WITHIN_S = 600.0
JOIN_WITHIN_S = 1800.0
OUTPUT_LINE = "step 12345 loss 2.3456 lr 1.0e-04 grad_norm 0.98 tokens/s 123456.7\n"
PLAY_SRUN = "srun"  # first argument of the process that plays srun
MEASURE_ONE = "measure"  # first argument of the process that measures one number of hosts

Send = Callable[[protocol.FromAgent], None]


# ---- the simulated hosts


class SimulatedAgent:
    """The node agent of one simulated host."""

    def __init__(self, index: int, send: Send, on_stop: Callable[[], None]) -> None:
        self._index = index
        self._send = send
        self._on_stop = on_stop
        self._attempt = -1
        self._first_rank = 0
        self._moves = 0
        self._is_running = False
        self.is_silent = False
        address = f"10.{index >> 16 & 255}.{index >> 8 & 255}.{index & 255}"
        self._address = protocol.Address(address=address, interface="eth0")

    def begin(self) -> None:
        """Send the greeting of a node agent."""
        record = protocol.NodeRecord(
            host=f"node{self._index:05d}",
            system="linux",
            python="3.11.7",
            torch="2.13.0",
            torchmuster="0",
            cores=96,
            clock_unix_s=time.time(),
            addresses=(self._address,),
        )
        self._send(protocol.Hello(protocol=protocol.PROTOCOL, record=record))

    def answer(self, message: protocol.ToAgent) -> None:
        """Do at once what the launcher asks."""
        if self.is_silent:
            return
        match message:
            case protocol.Prepare():
                self._send(prepared())
            case protocol.Listen():
                self._send(
                    protocol.Listening(
                        port=message.port or 40000, addresses=(self._address,), reason="it is free"
                    )
                )
            case protocol.Reach():
                results = [
                    protocol.ReachResult(
                        target=target, problem="", seconds=0.001, local=self._address
                    )
                    for target in message.targets
                ]
                self._send(protocol.Reached(results=tuple(results)))
            case protocol.Start():
                self._attempt = message.attempt
                self._first_rank = message.first_rank
                self._is_running = True
                self._send(protocol.Done())
            case protocol.Stop() if self._is_running:
                self._on_stop()
                self._is_running = False
                self._send(protocol.Ended(attempt=self._attempt, good=True))

    def fail(self) -> None:
        """Report that a rank was killed."""
        self._is_running = False
        failure = protocol.Failure(rank=self._first_rank, exit_code=-signal.SIGKILL, ago_s=0.0)
        self._send(protocol.Ended(attempt=self._attempt, good=False, failures=(failure,)))

    def beat(self, lines: int) -> None:
        """Send what a node agent sends every 2 s: heartbeats, and the new lines of its ranks."""
        if self.is_silent:
            return
        if not self._is_running:
            self._send(protocol.Alive())
            return
        self._moves += 40
        heartbeats = [self._heartbeat(self._first_rank + local) for local in range(RANKS_PER_HOST)]
        self._send(
            protocol.Heartbeats(attempt=self._attempt, heartbeats=tuple(heartbeats), kept=True)
        )
        if not lines:
            return
        if self._first_rank == 0:  # of many ranks only rank 0's output is sent
            self._send(protocol.Output(rank=0, text=OUTPUT_LINE * lines))

    def _heartbeat(self, rank: int) -> Heartbeat:
        step = self._moves // 40
        return Heartbeat(
            rank=rank,
            pid=rank + 1000,
            beat=step,
            moves=self._moves,
            step=step,
            phase="backward",
            place="train.py:88 in step",
            doing="backward",
            state="R",
            busy=1.013,
            memory_bytes=9_123_456_789,
        )


def prepared() -> protocol.Prepared:
    """Return the answer of a host with one GPU per rank."""
    fingerprint = protocol.Fingerprint(script_sha256="s" * 64, code_sha256="c" * 64)
    return protocol.Prepared(
        ranks=RANKS_PER_HOST,
        devices=tuple(f"GPU {index}" for index in range(RANKS_PER_HOST)),
        fingerprint=fingerprint,
    )


class SimulatedHosts:
    """All simulated hosts, and what is measured on their side."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._agents: dict[int, SimulatedAgent] = {}
        self._has_failed = False
        self._silent_unix_s: float | None = None
        self._stop_unix_s: list[float] = []
        self.received_bytes = 0

    def add(self, index: int, send: Send) -> SimulatedAgent:
        """Return a new host, whose messages go to ``send``."""
        agent = SimulatedAgent(index, send, lambda: self._stop_unix_s.append(time.time()))
        self._agents[index] = agent
        return agent

    async def beat(self) -> None:
        """Send the heartbeats of all hosts, spread over the interval, until cancelled."""
        ticks = round(HEARTBEAT_EVERY_S / TICK_S)
        begun_s, sent = time.monotonic(), 0
        while True:
            await asyncio.sleep(TICK_S)
            lines = self._follow_order()
            # All that are due: while hosts connect, this process may be late by many ticks.
            due = int((time.monotonic() - begun_s) / TICK_S)
            turns = {tick % ticks for tick in range(sent, due)}
            sent = due
            for index, agent in list(self._agents.items()):
                if index % ticks in turns:
                    agent.beat(lines)

    def _follow_order(self) -> int:
        """Follow the order in the folder; return how many lines each rank prints per heartbeat."""
        try:
            order, _, index = (self._folder / ORDER).read_text().partition(" ")
        except OSError:
            return 0
        if order == "fail" and not self._has_failed:
            self._has_failed = True
            self._agents[int(index)].fail()
        if order == "silent" and self._silent_unix_s is None:
            self._agents[int(index)].is_silent = True
            self._silent_unix_s = time.time()
            self._stop_unix_s.clear()  # those of the restart
        return 2 if order == "chatty" else 0

    def write_result(self) -> None:
        """Write the bytes that all hosts received, and the times of the silence and the stops."""
        result = {
            "received_bytes": self.received_bytes,
            "silent_unix_s": self._silent_unix_s,
            "stop_unix_s": sorted(self._stop_unix_s),
        }
        (self._folder / RESULT).write_text(json.dumps(result))


async def play_srun(count: int) -> None:
    """Play all hosts, until the launcher lets them go."""
    hosts = SimulatedHosts(Path(os.environ[FOLDER_VARIABLE]))
    line = await asyncio.to_thread(sys.stdin.buffer.readline)
    code = decode_code(line.decode())
    hosts.received_bytes += len(line) * count  # srun sends its input to every task
    at_once = asyncio.Semaphore(CONNECT_AT_ONCE)
    heartbeats = asyncio.create_task(hosts.beat())
    await asyncio.gather(*(play_host(hosts, index, code, at_once) for index in range(count)))
    heartbeats.cancel()
    hosts.write_result()


async def join_launcher(code: JoinCode, index: int) -> Stream:
    """Connect and prove the secret; try again where a busy launcher dropped the connection, as a node agent does."""
    join = Join(
        protocol=protocol.PROTOCOL,
        place=index,
        secret=code.secret,
        host=f"node{index:05d}",
        torchmuster=__version__,
    )
    give_up_s = time.monotonic() + CONNECT_WITHIN_S
    while time.monotonic() < give_up_s:
        with contextlib.suppress(OSError, TimeoutError):
            stream = await open_verified(code.addresses[0], code.port, code.pin)
            await stream.send(msgspec.json.encode(join))
            answer = await stream.receive(protocol.MESSAGE_LIMIT, decode_answer)
            if answer is not None:
                return stream
            await stream.close()
        await asyncio.sleep(1.0)
    raise ConnectionError(f"host {index} cannot join")


async def play_host(
    hosts: SimulatedHosts, index: int, code: JoinCode, at_once: asyncio.Semaphore
) -> None:
    """Connect as a node agent does, and answer until the launcher closes the connection."""
    async with at_once:
        stream = await join_launcher(code, index)

    def send(message: protocol.FromAgent) -> None:
        data = protocol.encode(message)
        if not stream.writer.is_closing():
            stream.writer.write(len(data).to_bytes(HEADER_BYTES, "big") + data)

    def count_and_decode(data: bytes) -> protocol.ToAgent:
        hosts.received_bytes += len(data) + HEADER_BYTES
        return protocol.decode_to_agent(data)

    agent = hosts.add(index, send)
    agent.begin()
    while True:
        message = await stream.receive(protocol.MESSAGE_LIMIT, count_and_decode)
        if message is None:
            break
        agent.answer(message)
        if isinstance(message, protocol.Leave):
            break
    await stream.close()


# ---- the launcher


class SilentConsole:
    """A console that prints nothing."""

    def world(self, size: int) -> None:
        """Ignore the number of ranks."""

    def output(self, rank: int, text: str) -> None:
        """Ignore the output of a rank."""


async def measure(hosts: int, folder: Path) -> dict[str, float]:
    """Start a run, watch it, restart it after a failure, lose a host, and stop; return the figures of a row."""
    (folder / "logs").mkdir()
    running = asyncio.Event()
    console = SilentConsole()
    runner = Run(
        JobSpec(
            name="simulated",
            command=("train.py",),
            folder="/",
            device="gpu",
            max_restarts=1,
            limits=Limits(join_s=JOIN_WITHIN_S),
        ),
        SrunTransport(
            allocation(hosts), environment=environment_with_srun(folder), patience_s=60.0
        ),
        console,
        RunFolder(folder),
    )

    def on_phase(phase: str) -> None:
        if phase == "running":
            running.set()

    begun_s, begun_cpu_s = time.monotonic(), time.process_time()
    job = asyncio.create_task(runner.run(on_phase))

    async def wait_until_running() -> None:
        waiting = asyncio.ensure_future(running.wait())
        await asyncio.wait({job, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            raise RuntimeError(f"the run did not start: {job.result()}")

    def give_order(order: str) -> None:
        (folder / ORDER).write_text(order)

    await wait_until_running()
    row = {"hosts": hosts, "start_s": time.monotonic() - begun_s}
    row["start_cpu_s"] = time.process_time() - begun_cpu_s
    await asyncio.sleep(SETTLE_S)
    row["quiet_cores"] = await cores_in_use(MEASURE_S)
    give_order("chatty")
    await asyncio.sleep(SETTLE_S)
    row["chatty_cores"] = await cores_in_use(MEASURE_S)
    running.clear()
    failed_s = time.monotonic()
    give_order("fail 0")
    await wait_until_running()
    row["restart_s"] = time.monotonic() - failed_s
    give_order(f"silent {hosts // 2}")
    await job
    result = json.loads((folder / RESULT).read_text())
    stops = result["stop_unix_s"]
    row["sent_bytes"] = result["received_bytes"]
    row["notice_s"] = stops[0] - result["silent_unix_s"]
    row["stop_s"] = stops[-1] - stops[0]
    row["memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return row


async def cores_in_use(seconds: float) -> float:
    """Return how many cores this process uses."""
    begun_s, begun_cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - begun_cpu_s) / (time.monotonic() - begun_s)


def allocation(hosts: int) -> Allocation:
    """Return a Slurm job with this number of hosts."""
    return Allocation(
        job="1",
        nodes=tuple(f"node{index:05d}" for index in range(hosts)),
        gpus_per_node=None,
        tasks_per_node=None,
        copies=1,
        restarts=0,
    )


def environment_with_srun(folder: Path) -> dict[str, str]:
    """Return an environment in which ``srun`` is this script."""
    program = folder / "srun"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {PLAY_SRUN} "$@"\n')
    program.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, FOLDER_VARIABLE: str(folder)}


# ---- the table

HEADER = """\
| hosts | ranks | start | launcher's CPU time | sent | cores, heartbeats | cores, a line per rank and second | memory | restart | silent host noticed | stop, first to last host |
|---|---|---|---|---|---|---|---|---|---|---|"""


def table_row(row: dict[str, float]) -> str:
    """Return a row of the table."""
    cells = [
        f"{row['hosts']:,}",
        f"{row['hosts'] * RANKS_PER_HOST:,}",
        f"{row['start_s']:.1f} s",
        f"{row['start_cpu_s']:.1f} s",
        f"{row['sent_bytes'] / 1e6:,.1f} MB",
        f"{row['quiet_cores']:.3f}",
        f"{row['chatty_cores']:.3f}",
        f"{row['memory_bytes'] / 2**20:.0f} MiB",
        f"{row['restart_s']:.1f} s",
        f"{row['notice_s']:.1f} s",
        f"{row['stop_s']:.2f} s",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure each number of hosts in a new process, or be one of the processes of a measurement."""
    if sys.argv[1:2] == [PLAY_SRUN]:
        nodes = next(word for word in sys.argv if word.startswith("--nodes="))
        count = int(nodes.removeprefix("--nodes="))
        allow_open_files(count)
        asyncio.run(play_srun(count))
        return
    if sys.argv[1:2] == [MEASURE_ONE]:
        with tempfile.TemporaryDirectory(prefix="muster-simulated-") as folder:
            print(json.dumps(asyncio.run(measure(int(sys.argv[2]), Path(folder)))))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[8, 64, 512, 2048, 8192])
    options = parser.parse_args()
    print(HEADER)
    for hosts in options.hosts:
        command = [sys.executable, __file__, MEASURE_ONE, str(hosts)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(table_row(json.loads(done.stdout)), flush=True)


if __name__ == "__main__":
    main()
