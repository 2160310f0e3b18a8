"""One machine's ranks while they run: started, listened to, ended, and gone."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from torchmuster.launch import wire
from torchmuster.launch.agent import GRACE_VARIABLE, USUAL_GRACE_S
from torchmuster.launch.keeper import records, sweep
from torchmuster.launch.keeper.agent_command import (
    Share,
    agent_command,
    direct_environment,
    rank_command,
)
from torchmuster.launch.keeper.tails import Tail
from torchmuster.launch.memory_evidence import Peaks, Watch
from torchmuster.units import format_bytes

_LOOK_EVERY_S = 0.05
_SAMPLE_EVERY_S = 1.0
_KILL_WITHIN_S = 5.0
_AGENT_WORDS = 2000
# What the agent may take to end once it has no rank any more.
_AGENT_GRACE_S = 2.0
# So that one rank's flood holds up neither the other ranks nor the end.
_PIECES_AT_A_TIME = 16
_LAST_WORDS_WITHIN_S = 1.0

Send = Callable[[wire.FromKeeper], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Exits:
    """How the ranks ended: those that failed, or in words why that is not known."""

    failed: Mapping[int, records.Exit] = field(default_factory=dict)
    words: str = ""


class Engine(Protocol):
    """What starts the ranks: torchrun's agent, or the keeper itself where that cannot run."""

    async def start(self) -> int:
        """Start; return a process id."""

    async def wait(self) -> Exits:
        """Wait for the end."""

    def terminate(self) -> None:
        """Ask the ranks to end."""


class TorchrunEngine:
    """torchrun's elastic agent in a process of its own."""

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
        code = await self._process.wait()
        failed = records.agent_exits(self._share.records) if code else {}
        if failed or code == 0:
            return Exits(failed=failed)
        how = (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        said = records.last_lines(self._share.records / "agent.log", 0)[-_AGENT_WORDS:]
        return Exits(words=f"torchrun's agent {how}\n{said}".strip())

    def terminate(self) -> None:
        """Ask the agent to end; it asks the ranks."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()


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
        failed: dict[int, records.Exit] = {}
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
                    failed[rank] = records.Exit(
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


class Running:
    """An attempt of this machine's ranks."""

    def __init__(self, share: Share, engine: Engine, send: Send) -> None:
        self._share = share
        self._engine = engine
        self._send = send
        self._ranks = range(share.start.first_rank, share.start.first_rank + share.ranks)
        self._tails = [Tail(rank, share.logs / f"rank-{rank}.log") for rank in self._ranks]
        self._memory = Watch.begin()
        self._peaks = Peaks()
        self._stopping = asyncio.Event()
        self._deadline_s = 0.0
        self.gone = asyncio.Event()  # no process of it is alive any more

    async def start(self) -> wire.Started:
        """Start the ranks; return what to say of it."""
        pid = await self._engine.start()
        command = tuple(agent_command(self._share))
        return wire.Started(attempt=self._share.start.attempt, pid=pid, command=command)

    def stop(self, grace_s: float) -> None:
        """Ask the ranks to end; when the grace is over they are killed. A shorter grace counts."""
        deadline = time.monotonic() + grace_s
        if self._stopping.is_set():
            self._deadline_s = min(self._deadline_s, deadline)
            return
        self._deadline_s = deadline
        self._engine.terminate()
        self._stopping.set()

    def pass_on(self, name: str) -> None:
        """Send a signal to the ranks, and only to them."""
        for pid in records.pids(self._share.records).values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.Signals[name])

    async def watch(self) -> wire.Ended:
        """Return when nothing of this attempt is alive any more and all it wrote has been sent."""
        over = asyncio.Event()
        following = asyncio.ensure_future(self._follow(over))
        killer = asyncio.ensure_future(self._kill_when_time_is_up())
        waiting = asyncio.ensure_future(self._engine.wait())
        try:
            await asyncio.wait({waiting, following}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            killer.cancel()
        left = await asyncio.to_thread(
            sweep.kill, self._share.prepare.token, within_s=_KILL_WITHIN_S
        )
        if not left:
            self.gone.set()
        over.set()
        await following
        return self._verdict(waiting.result(), left)

    async def _follow(self, over: asyncio.Event) -> None:
        """Send what the ranks write. To a launcher that takes nothing any more this gets stuck."""
        sampled_s = 0.0
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), _LOOK_EVERY_S)
            now = time.monotonic()
            await self._forward(now)
            if now - sampled_s > _SAMPLE_EVERY_S:
                sampled_s = now
                self._peaks.sample(records.pids(self._share.records).values())
        await self._forward_the_rest()

    async def _kill_when_time_is_up(self) -> None:
        await self._stopping.wait()
        alone_s: float | None = None  # since when the agent has had no rank to wait for
        while (now := time.monotonic()) < self._deadline_s:
            alone_s = None if self._some_rank_lives() else alone_s or now
            if alone_s is not None and now - alone_s > _AGENT_GRACE_S:
                break  # it waits for other machines, which it can do for minutes
            await asyncio.sleep(min(self._deadline_s - now, 0.1))
        await asyncio.to_thread(sweep.kill, self._share.prepare.token, within_s=_KILL_WITHIN_S)

    def _some_rank_lives(self) -> bool:
        pids = records.pids(self._share.records)
        return len(pids) < len(self._ranks) or any(map(psutil.pid_exists, pids.values()))

    async def _forward(self, now_s: float) -> None:
        for tail in self._tails:
            for _ in range(_PIECES_AT_A_TIME):
                text = tail.read(now_s)
                if text:
                    await self._send(wire.Output(rank=tail.rank, text=text))
                if text.count("\n") <= 1:  # what came meanwhile is not urgent
                    break

    async def _forward_the_rest(self) -> None:
        """Send what is left, however long it takes: with the keeper its files go, too.

        Of very much only the last part, where the end was asked for or the launcher has the logs.
        """
        deadline_s: float | None = None
        for tail in self._tails:
            while text := tail.read(time.monotonic(), last=True):
                await self._send(wire.Output(rank=tail.rank, text=text))
                why = self._why_leave_out(tail.rank)
                if why and deadline_s is None:
                    deadline_s = time.monotonic() + _LAST_WORDS_WITHIN_S
                if deadline_s is None or time.monotonic() < deadline_s:
                    continue
                if skipped := tail.skip():
                    words = f"… {format_bytes(skipped)} more{why}\n"
                    await self._send(wire.Output(rank=tail.rank, text=words))

    def _why_leave_out(self, rank: int) -> str:
        if self._share.prepare.logs is not None:
            return f": see {self._share.logs}/rank-{rank}.log"
        return ", not sent because the end was asked for" if self._stopping.is_set() else ""

    def _verdict(self, exits: Exits, left: list[psutil.Process]) -> wire.Ended:
        pids = records.pids(self._share.records)
        failures = records.failures(
            self._share.records,
            self._share.logs,
            self._ranks,
            exits=exits.failed,
            evidence={
                rank: self._memory.explain(one.pid, one.code, self._peaks)
                for rank, one in exits.failed.items()
            },
            peaks={
                rank: peak
                for rank, pid in pids.items()
                if (peak := self._peaks.of(pid)) is not None
            },
            began={tail.rank: tail.began for tail in self._tails},
        )
        words = exits.words
        if left:
            words += f"\nprocesses that could not be ended: {[one.pid for one in left]}"
        ended = wire.Ended(
            attempt=self._share.start.attempt,
            good=not (failures or words),
            failures=tuple(failures),
            words=words,
        )
        return records.fitting(ended)
