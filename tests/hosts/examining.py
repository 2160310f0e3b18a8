"""Examiners on the hosts of a lab, without a launcher: each is started there and asked by JSON lines."""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from hosts.host import Host, HostProcess
from hosts.lab import Lab
from patience import GIVE_UP_S
from torchmuster.diagnose.links.judge import judge_links
from torchmuster.diagnose.links.model import Link
from torchmuster.diagnose.links.survey import survey_links
from torchmuster.errors import MusterError
from torchmuster.finding import Finding
from torchmuster.launch import protocol

_PROGRAM = [sys.executable, "-m", "torchmuster.diagnose.host_probe"]


class LabExaminer:
    """An examiner on one host."""

    def __init__(self, host: Host, process: HostProcess) -> None:
        self.name = host.name
        self.place = host.number - 1
        self.record = protocol.NodeRecord(
            host=host.name,
            system=sys.platform,
            python="3.11",
            torch=None,
            torchmuster="0",
            cores=2,
            clock_unix_s=0.0,
            addresses=(),
        )
        self._process = process
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, verb: str, argument: Any = None, *, within_s: float) -> Any:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        print(
            json.dumps({"id": number, "verb": verb, "argument": argument}),
            file=self._process.stdin,
            flush=True,
        )
        # Nobody is gone here, and how long one takes that others hold up is not what is looked at.
        async with asyncio.timeout(max(within_s, GIVE_UP_S)):
            said = await self._waiting[number]
        if "error" in said:
            raise MusterError(**said["error"])
        return said["answer"]

    async def listen(self, thread: Executor) -> None:
        """Hear the answers until the program ends."""
        assert self._process.stdout is not None
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(thread, self._process.stdout.readline):
            said = json.loads(line)
            self._waiting[said["id"]].set_result(said)


@asynccontextmanager
async def examiners_on(hosts: Sequence[Host]) -> AsyncIterator[list[LabExaminer]]:
    """Start an examiner on each host, and end them all."""
    processes = [host.popen(_PROGRAM, stdin=-1, stdout=-1) for host in hosts]
    examiners = [LabExaminer(*both) for both in zip(hosts, processes, strict=True)]
    # A thread for each: asyncio's own are fewer than the hosts may be, and each waits for a line.
    threads = ThreadPoolExecutor(len(examiners))
    listening = [asyncio.create_task(one.listen(threads)) for one in examiners]
    try:
        yield examiners
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        await asyncio.gather(*listening)
        for process in processes:
            process.wait(timeout=GIVE_UP_S)
        threads.shutdown()


def surveyed(lab: Lab) -> list[Link]:
    """Try and measure the links between all hosts of a lab."""

    async def run() -> list[Link]:
        async with examiners_on(lab.hosts) as examiners:
            return await survey_links(examiners)

    return asyncio.run(run())


def found_in(lab: Lab) -> list[Finding]:
    """Return what is to be said about the links of a lab."""
    return judge_links(surveyed(lab))
