"""What starts a machine's ranks: torchrun's agent, or the keeper itself where that cannot run."""

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torchmuster.launch.node import process_cleanup, rank_records
from torchmuster.launch.node.agent_command import (
    Share,
    agent_command,
    direct_environment,
    rank_command,
)
from torchmuster.launch.node.elastic_agent import GRACE_VARIABLE, USUAL_GRACE_S

_AGENT_WORDS = 2000
_LOOK_EVERY_S = 0.1
_KILL_WITHIN_S = 5.0
# How long the agent may take to write down how all ranks ended, once none is left.
_REPORT_WITHIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Exits:
    """How the ranks ended: those that failed, or in words why that is not known."""

    failed: Mapping[int, rank_records.Exit] = field(default_factory=dict)
    words: str = ""


class Engine(Protocol):
    """What starts the ranks and tells how they ended."""

    async def start(self) -> int:
        """Start; return a process id."""

    async def wait(self) -> Exits:
        """Wait for the end."""

    def terminate(self) -> None:
        """Ask the ranks to end."""


class TorchrunEngine:
    """torchrun's elastic agent in a process of its own.

    After a failure the agent waits up to 30 s for the ranks that it has asked to end; here they are killed after the grace.
    """

    def __init__(self, share: Share, environment: Mapping[str, str]) -> None:
        self._share = share
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> int:
        """Start the agent."""
        socket = self._share.socket
        with (self._share.records / "agent.log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *agent_command(self._share),
                cwd=self._share.prepare.folder,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=() if socket is None else (socket,),
                start_new_session=True,  # Ctrl-C is the keeper's to deal with
            )
        return self._process.pid

    async def wait(self) -> Exits:
        """Wait for the agent; it wrote down which ranks failed unless it failed itself."""
        assert self._process is not None
        ending = asyncio.create_task(self._end_ranks_after_failure(self._process))
        try:
            code = await self._process.wait()
        finally:
            ending.cancel()
        failed = rank_records.agent_exits(self._share.records) if code else {}
        if failed or code == 0:
            return Exits(failed=failed)
        how = (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        said = rank_records.last_lines(self._share.records / "agent.log", 0)[-_AGENT_WORDS:]
        return Exits(words=f"torchrun's agent {how}\n{said}".strip())

    def terminate(self) -> None:
        """Ask the agent to end; it asks the ranks."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    async def _end_ranks_after_failure(self, agent: asyncio.subprocess.Process) -> None:
        while not rank_records.agent_exits(self._share.records):
            await asyncio.sleep(_LOOK_EVERY_S)
        await asyncio.sleep(float(self._environment.get(GRACE_VARIABLE, USUAL_GRACE_S)))
        token = self._share.prepare.token
        await asyncio.to_thread(
            process_cleanup.kill, token, within_s=_KILL_WITHIN_S, spare=agent.pid
        )
        await asyncio.sleep(_REPORT_WITHIN_S)
        with contextlib.suppress(ProcessLookupError):
            agent.kill()  # it waits for a rank that cannot be killed


class DirectEngine:
    """The ranks as children of the keeper, for Windows, where torchrun's agent cannot run."""

    def __init__(self, share: Share, environment: Mapping[str, str]) -> None:
        self._share = share
        self._environment = environment
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> int:
        """Start every rank."""
        for local_rank in range(self._share.ranks):
            told = direct_environment(self._share, local_rank)
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    *rank_command(self._share),
                    cwd=self._share.prepare.folder,
                    env={**self._environment, **told},
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
        return self._processes[0].pid

    async def wait(self) -> Exits:
        """Wait for all ranks; the first that fails ends the others."""
        waits = {asyncio.ensure_future(one.wait()): one for one in self._processes}
        failed: dict[int, rank_records.Exit] = {}
        left = set(waits)
        grace_s = None
        while left:
            done, left = await asyncio.wait(
                left, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                self._kill()
            new = {waits[one] for one in done if one.result() != 0}
            if new and not failed:
                for process in new:
                    rank = self._share.start.first_rank + self._processes.index(process)
                    failed[rank] = rank_records.Exit(
                        pid=process.pid, code=process.returncode or 0, at_unix_s=time.time()
                    )
                self.terminate()
                grace_s = float(self._environment.get(GRACE_VARIABLE, USUAL_GRACE_S))
        return Exits(failed=failed)

    def terminate(self) -> None:
        """Ask every rank to end."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    def _kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def engine_for(share: Share, environment: Mapping[str, str], system: str = sys.platform) -> Engine:
    """Return torchrun's agent wherever it can run."""
    return (DirectEngine if system == "win32" else TorchrunEngine)(share, environment)
