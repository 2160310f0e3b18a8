"""Examiners on the hosts of a lab, without a launcher: each is started there and asked by JSON lines."""

import asyncio
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
from torchmuster.diagnose.probe_client import ProbeClient
from torchmuster.finding import Finding
from torchmuster.launch import protocol

_PROGRAM = [sys.executable, "-m", "torchmuster.diagnose.host_probe"]


class LabExaminer(ProbeClient):
    """An examiner on one host."""

    def __init__(self, host: Host, process: HostProcess, thread: Executor) -> None:
        super().__init__(host.name)
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
        self._thread = thread

    async def send_line(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    async def receive_line(self) -> str:
        assert self._process.stdout is not None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._process.stdout.readline)

    async def ask(self, verb: str, argument: Any, kind: Any, *, within_s: float) -> Any:
        # Nobody is gone here, and how long one takes that others hold up is not what is looked at.
        return await super().ask(verb, argument, kind, within_s=max(within_s, GIVE_UP_S))


@asynccontextmanager
async def examiners_on(hosts: Sequence[Host]) -> AsyncIterator[list[LabExaminer]]:
    """Start an examiner on each host, and end them all."""
    processes = [host.popen(_PROGRAM, stdin=-1, stdout=-1) for host in hosts]
    # A thread for each: asyncio's own are fewer than the hosts may be, and each waits for a line.
    threads = ThreadPoolExecutor(len(processes))
    try:
        yield [LabExaminer(*both, threads) for both in zip(hosts, processes, strict=True)]
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
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
