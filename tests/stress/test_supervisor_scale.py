"""The launcher's own work with 10,000 machines: node registry, comparison, meeting place, start, end.

The machines are simulated in this process and answer at once, so what is measured is the job runner.
"""

import asyncio
import gc
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from torchmuster.launch import protocol
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.run import Result, Run
from torchmuster.launch.transports.channel import Arrive
from torchmuster.runfolder import RunFolder

pytestmark = [pytest.mark.stress, pytest.mark.alone]


class Machine:
    """A channel to a machine that does everything at once."""

    def __init__(self, place: int) -> None:
        self._place = place
        self._said: asyncio.Queue[protocol.FromAgent | None] = asyncio.Queue()
        self.messages = 0
        here = protocol.Address(
            address=f"10.{place >> 16}.{place >> 8 & 255}.{place & 255}", interface="eth0"
        )
        self._here = here
        record = protocol.NodeRecord(
            host=f"node{place}",
            user="ana",
            pid=1,
            system="linux",
            machine="x86_64",
            python="3.11.7",
            torch="2.13.0",
            torchmuster="0",
            cores=8,
            clock_unix_s=time.time(),
            addresses=(here,),
        )
        self._say(protocol.Hello(protocol=protocol.PROTOCOL, record=record))

    def _say(self, message: protocol.FromAgent | None) -> None:
        self.messages += not isinstance(message, protocol.Alive)
        self._said.put_nowait(message)

    async def send(self, message: protocol.ToAgent) -> None:
        self.messages += not isinstance(message, protocol.Alive)
        match message:
            case protocol.Prepare():
                code = protocol.Fingerprint(script_sha256="s", code_sha256="c", code_files=1)
                prepared = protocol.Prepared(ranks=8, devices=("CPU",), fingerprint=code)
                self._say(prepared)
            case protocol.Listen():
                self._say(protocol.Listening(port=29400, addresses=(self._here,), reason="free"))
            case protocol.Reach():
                results = tuple(
                    protocol.ReachResult(target=one, problem="", seconds=0.0, local=self._here)
                    for one in message.targets
                )
                self._say(protocol.Reached(results=results))
            case protocol.Start():
                self._say(protocol.Done(request="start"))
                self._say(protocol.Ended(attempt=message.attempt, good=True))
            case protocol.Alive():
                self._say(protocol.Alive())

    async def receive(self) -> protocol.FromAgent | None:
        return await self._said.get()

    def why_closed(self) -> str:
        return ""

    async def close(self) -> None:
        self._say(None)


class Fleet:
    """A transport to machines that are all there."""

    def __init__(self, size: int) -> None:
        self._names = [f"node{place}" for place in range(size)]
        self.machines: list[Machine] = []

    @property
    def places(self) -> Sequence[str]:
        return self._names

    async def open(self, arrive: Arrive) -> None:
        for place in range(len(self._names)):
            self.machines.append(Machine(place))
            arrive(place, self.machines[-1])

    async def reopen(self, place: int) -> None:
        raise AssertionError("nobody is lost")

    def waiting_for(self, place: int) -> str:
        return "on its way"

    def gave_up(self, place: int) -> protocol.Trouble | None:
        return None

    def rejoins(self, place: int) -> bool:
        return False

    async def close(self) -> None:
        pass


class Silent:
    """A console of ranks that print nothing."""

    def world(self, size: int) -> None:
        self.size = size

    def output(self, rank: int, text: str) -> None:
        raise AssertionError("nobody prints")


@dataclass(frozen=True)
class Cost:
    machines: int
    cpu_s: float
    memory_kib: float
    messages: float


def measure(size: int, logs: Path, said: pytest.LogCaptureFixture) -> Cost:
    console, fleet = Silent(), Fleet(size)
    spec = JobSpec(name="big", command=("train.py",), folder="/", device="cpu")

    async def run() -> bool:
        runner = Run(spec, fleet, console, RunFolder(logs.parent))
        return (await runner.run(lambda _: None)).result is Result.FINISHED

    gc.collect()
    gc.disable()  # what Python's collector adds depends on what else is in this process
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    try:
        assert asyncio.run(run())
    finally:
        gc.enable()
    cpu_s = time.process_time() - began
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    # What is said does not grow with the machines, apart from a digit more.
    assert max(map(len, said.messages)) < 700, said.messages
    assert f"{size:,} of {size:,} joined" in said.messages[0]
    said.clear()
    assert console.size == 8 * size
    messages = sum(machine.messages for machine in fleet.machines) / size
    return Cost(size, cpu_s, grown_kib / size, messages)


def test_the_work_of_the_launcher_grows_with_the_machines_and_not_faster(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "torchmuster.launch")
    measure(100, tmp_path, caplog)  # imports and the like
    few, many = measure(1_000, tmp_path, caplog), measure(10_000, tmp_path, caplog)
    for cost in (few, many):
        print(
            f"{cost.machines:>6,} machines: {cost.cpu_s:5.2f} s of CPU time, "
            f"{cost.memory_kib:5.1f} KiB and {cost.messages:.0f} messages per machine"
        )
    assert many.cpu_s / few.cpu_s < 15, "ten times the machines: about ten times the work"
    assert many.messages <= few.messages + 2
    assert many.memory_kib < 100
