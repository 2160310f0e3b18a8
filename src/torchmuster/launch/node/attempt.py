"""One attempt of a host's ranks: start, output, stack dumps, stop and report."""

import asyncio
import codecs
import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from torchmuster.launch import protocol
from torchmuster.launch.hangs.heartbeat import Heartbeat
from torchmuster.launch.history import node_records
from torchmuster.launch.node import engines, heartbeats, process_cleanup
from torchmuster.launch.node.engines import Engine, ExitsOfRanks, NodeShare
from torchmuster.launch.node.heartbeats import HeartbeatReader, MetricsReader
from torchmuster.launch.node.kept_logs import FirstError
from torchmuster.launch.node.memory_evidence import MemoryPeaks, MemoryWatch
from torchmuster.launch.rank.heartbeat import STACKS_SIGNAL
from torchmuster.units import format_bytes

_CHUNK = 64 * 1024
# A progress bar rewrites its line with carriage returns for minutes: it is shown this often.
_PROGRESS_EVERY_S = 2.0


class Tail:
    """One rank's log, read from where it ended when the attempt started."""

    def __init__(self, rank: int, path: Path) -> None:
        self.rank = rank
        self._path = path
        self.began = path.stat().st_size if path.exists() else 0
        self._offset = self.began
        self._unfinished = b""
        self._shown_s = 0.0

    def read(self, now_s: float, *, last: bool = False) -> str:
        """Return the new lines; with ``last`` also an incomplete one."""
        data = self._new_bytes()
        self._unfinished += data
        whole, end, rest = self._unfinished.rpartition(b"\n")
        if end:
            self._unfinished = rest
            self._shown_s = now_s
            return _attempt_text(whole + end)
        if len(rest) >= _CHUNK:
            text, self._unfinished = _whole_letters(rest)
            return f"{text}\n"
        if last:
            self._unfinished = b""
            return _attempt_text(rest + b"\n") if rest else ""
        return self._progress(now_s)

    def skip(self) -> int:
        """Skip all new lines except the last ones; return the number of skipped bytes."""
        try:
            behind = self._path.stat().st_size - self._offset
        except OSError:
            return 0
        skipped = max(0, behind - _CHUNK)
        if skipped:
            self._offset += skipped
            skipped += len(self._unfinished)
            cut, end, self._unfinished = self._new_bytes().partition(b"\n")
            skipped += len(cut) + len(end)
        return skipped

    @property
    def size_bytes(self) -> int:
        """The size of the log."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def _new_bytes(self) -> bytes:
        try:
            with self._path.open("rb") as stream:
                if os.fstat(stream.fileno()).st_size <= self._offset:
                    return b""
                stream.seek(self._offset)
                data = stream.read(_CHUNK)
        except OSError:  # not there yet, or its disk is gone: nothing to show
            return b""
        self._offset += len(data)
        return data

    def _progress(self, now_s: float) -> str:
        states = self._unfinished.split(b"\r")
        if len(states) < 2 or now_s - self._shown_s < _PROGRESS_EVERY_S:
            return ""
        self._shown_s = now_s
        self._unfinished = states[-1]
        shown = next((state for state in reversed(states[:-1]) if state.strip()), b"")
        return _attempt_text(shown + b"\n") if shown else ""


def _whole_letters(data: bytes) -> tuple[str, bytes]:
    """Return the text, and the bytes of an incomplete character at the end."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return decoder.decode(data), decoder.getstate()[0]


def _attempt_text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


_ANSWER_WITHIN_S = 5.0
_SIGNAL_WITHIN_S = 1.0
_LOOK_EVERY_S = 0.1
_LONGEST_STACKS = 200_000
_LONGEST_FLIGHT = 1_500_000
_THREADS_SHOWN = 200
_CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)", re.MULTILINE)


async def dump_stacks(
    records: Path, pids: dict[int, int], ranks: Iterable[int]
) -> Iterator[protocol.Evidence]:
    """Return the stack dumps of those of these ranks that run here; ``pids`` are their processes."""
    asked = [rank for rank in ranks if rank in pids]
    for rank in asked:
        with contextlib.suppress(OSError):
            _attempt_request(records, rank).touch()
    silent = await _wait_attempt(
        lambda rank: not _attempt_request(records, rank).exists(), asked, _ANSWER_WITHIN_S
    )
    signalled = [rank for rank in silent if _signal(pids[rank])]
    await _wait_attempt(lambda rank: bool(_faults(records, rank)), signalled, _SIGNAL_WITHIN_S)
    return _attempt_evidence(records, pids, asked, silent)


async def _wait_attempt(
    done: Callable[[int], bool], ranks: Iterable[int], within_s: float
) -> list[int]:
    """Wait until all ranks are done; return those that are not after ``within_s``."""
    deadline = time.monotonic() + within_s
    while left := [rank for rank in ranks if not done(rank)]:
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(_LOOK_EVERY_S)
    return left


def _attempt_evidence(
    records: Path, pids: dict[int, int], asked: Iterable[int], silent: Iterable[int]
) -> Iterator[protocol.Evidence]:
    for rank in asked:
        if rank in silent:
            why = "Python code cannot run in this process, so it did not answer"
            stacks = _faults(records, rank)
            shown = (
                f"its stacks, innermost call first:\n{stacks}" if stacks else "no stacks available"
            )
            text = (
                f"rank {rank}, process {pids[rank]}\n{why}\n{of_this_system(pids[rank])}\n{shown}"
            )
            yield protocol.Evidence(rank=rank, name="stacks.txt", text=text[:_LONGEST_STACKS])
            continue
        stacks = _dump_text(records / f"rank-{rank}.stacks.txt")[:_LONGEST_STACKS]
        yield protocol.Evidence(rank=rank, name="stacks.txt", text=stacks)
        flight = _dump_text(records / f"rank-{rank}.flight.json")
        if 0 < len(flight) <= _LONGEST_FLIGHT:
            yield protocol.Evidence(rank=rank, name="flight.json", text=flight)


def of_this_system(pid: int) -> str:
    """Return the system's information on a process and its threads: state and wait channel."""
    stat = heartbeats.look_at_process(pid)
    if stat is None:
        return "its process is gone"
    lines = [f"process state: {stat.state}"]
    with contextlib.suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir())[:_THREADS_SHOWN]:
            name, where = (
                _dump_text(task / "comm").strip(),
                _dump_text(task / "wchan").strip(),
            )
            lines.append(
                f"thread {task.name} {name}: in {where if where not in ('', '0') else '-'}"
            )
    if kernel := _dump_text(Path(f"/proc/{pid}/stack")).strip():  # only root may read it
        lines.append(f"in the kernel:\n{kernel}")
    return "\n".join(lines)


def _signal(pid: int) -> bool:
    """Request the stacks by signal; only if the process handles it, as it would kill others."""
    if STACKS_SIGNAL is None or not _is_caught(pid, STACKS_SIGNAL):
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, STACKS_SIGNAL)
        return True
    return False


def _is_caught(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    caught = _CAUGHT.search(_dump_text(Path(f"/proc/{pid}/status")))
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _attempt_request(records: Path, rank: int) -> Path:
    return records / f"rank-{rank}.examine"


def _faults(records: Path, rank: int) -> str:
    return _dump_text(records / f"rank-{rank}.faults.txt")[-_LONGEST_STACKS:]


def _dump_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


_FOLLOW_EVERY_S = 0.05
_SAMPLE_EVERY_S = 1.0
_HEARTBEATS_EVERY_S = 2.0
_KILL_WITHIN_S = 5.0
# How long the agent may take to exit once it has no ranks.
_AGENT_GRACE_S = 2.0
# So that one rank's output blocks neither the other ranks nor the shutdown.
_PIECES_AT_A_TIME = 16
_LAST_WORDS_WITHIN_S = 1.0

Send = Callable[[protocol.FromAgent], Awaitable[None]]


def are_moving(before: Sequence[Heartbeat], now: Sequence[Heartbeat]) -> bool:
    """Return whether all ranks have made progress between two messages, and nothing else is new about them."""
    return len(before) == len(now) > 1 and all(
        one.rank == was.rank
        and one.pid == was.pid
        and one.moves != was.moves
        and (one.handles, one.replaced) == (was.handles, was.replaced)
        and one.state in ("R", "S", "")
        and not one.silent_s
        for was, one in zip(before, now, strict=True)
    )


class RunningAttempt:
    """An attempt of this host's ranks."""

    def __init__(self, share: NodeShare, engine: Engine, send: Send) -> None:
        self._share = share
        self._engine = engine
        self._send = send
        self._ranks = range(share.start.first_rank, share.start.first_rank + share.ranks)
        self._tails = [Tail(rank, share.logs / f"rank-{rank}.log") for rank in self._ranks]
        self._memory = MemoryWatch.begin()
        self._peaks = MemoryPeaks()
        self._heartbeats = HeartbeatReader(share.records, self._ranks)
        self._told: tuple[Heartbeat, ...] = ()  # the heartbeats of the last message
        self._first_error = FirstError()
        self._metrics = MetricsReader(share.records, 0) if 0 in self._ranks else None
        self._run = node_records.seen_here(share.prepare.run, share.prepare.run_id)
        self._stopping = asyncio.Event()
        self._deadline_s = 0.0
        self._asked = ""
        self._killed: tuple[int, ...] = ()
        self.gone = asyncio.Event()  # none of its processes is alive
        self.told = asyncio.Event()  # the launcher has received the report

    async def start(self) -> protocol.Started:
        """Start the ranks; return the message for the launcher."""
        pid = await self._engine.start()
        return protocol.Started(attempt=self._share.start.attempt, pid=pid)

    def stop(self, grace_s: float, asked: str = "") -> None:
        """Ask the ranks to stop, and kill them after the grace period. A later call can only shorten it.

        ``asked`` is the signal of a request that did not come from the launcher.
        """
        deadline = time.monotonic() + grace_s
        if self._stopping.is_set():
            self._deadline_s = min(self._deadline_s, deadline)
            return
        self._deadline_s = deadline
        if self._engine.kill_at_s is None:  # else a rank had failed before
            self._asked = asked
        self._engine.terminate()
        self._stopping.set()

    def pass_on(self, name: str) -> None:
        """Send a signal to the ranks, and only to them."""
        for pid in engines.rank_pids(self._share.records).values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.Signals[name])

    def warn(self, name: str) -> None:
        """Send a scheduler's warning to the ranks that handle it; it would kill the others."""
        number = signal.Signals[name]
        for pid in engines.rank_pids(self._share.records).values():
            if _is_caught(pid, number):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    async def examine(self, message: protocol.DumpStacks) -> None:
        """Send the stack dumps of the requested ranks."""
        pids = engines.rank_pids(self._share.records)
        for evidence in await dump_stacks(self._share.records, pids, message.ranks):
            await self._send(evidence)

    async def watch(self) -> protocol.Ended:
        """Return when no process of this attempt is alive and all its output has been sent."""
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
            process_cleanup.kill_processes, self._share.token, within_s=_KILL_WITHIN_S
        )
        if not left:
            self.gone.set()
        over.set()
        await following
        return self._verdict(waiting.result(), left)

    async def _follow(self, over: asyncio.Event) -> None:
        """Send the ranks' output. Blocks if the launcher no longer reads."""
        sampled_s = told_s = 0.0
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), _FOLLOW_EVERY_S)
            now = time.monotonic()
            await self._forward(now)
            if now - sampled_s > _SAMPLE_EVERY_S:
                sampled_s = now
                self._peaks.sample(engines.rank_pids(self._share.records).values())
            if now - told_s > _HEARTBEATS_EVERY_S:
                told_s = now
                await self._tell_heartbeats()
                await self._tell_metrics()
        await self._tell_metrics()
        await self._forward_the_rest()

    async def _tell_heartbeats(self) -> None:
        # In a thread: finding a rank's children means reading all processes of the host.
        heartbeats = await asyncio.to_thread(self._heartbeats.read)
        stopping = self._stopping_now()
        if heartbeats or stopping:
            attempt, run = self._share.start.attempt, self._run
            moving = run is not None and not stopping and are_moving(self._told, heartbeats)
            self._told = heartbeats
            message = protocol.Heartbeats(
                attempt=attempt,
                heartbeats=heartbeats[:1] if moving else heartbeats,
                moving=moving,
                kept=run is not None,
                stopping=stopping,
            )
            await self._send(message)
            if heartbeats and run is not None:
                host = socket.gethostname()
                await asyncio.to_thread(
                    node_records.write_node_ranks,
                    run,
                    host=host,
                    attempt=attempt,
                    heartbeats=heartbeats,
                )

    async def _tell_metrics(self) -> None:
        """Send what rank 0 recorded, if it runs here."""
        if self._metrics is None:
            return
        while lines := self._metrics.new_lines():
            attempt = self._share.start.attempt
            await self._send(protocol.TrainingMetrics(attempt=attempt, lines=lines))

    def _stopping_now(self) -> protocol.Stopping | None:
        """Return the ranks that were asked to stop and have not, and how long they have left."""
        asked = self._deadline_s if self._stopping.is_set() else None
        kill_at = [at_s for at_s in (asked, self._engine.kill_at_s) if at_s is not None]
        if not kill_at:
            return None
        left_s = max(0.0, min(kill_at) - time.monotonic())
        ranks = engines.living_ranks(self._share.records)
        return protocol.Stopping(ranks=ranks, left_s=left_s, asked=self._asked)

    async def _kill_when_time_is_up(self) -> None:
        await self._stopping.wait()
        alone_s: float | None = None  # when the agent lost its last rank
        while (now := time.monotonic()) < self._deadline_s:
            alone_s = None if self._some_rank_lives() else alone_s or now
            if alone_s is not None and now - alone_s > _AGENT_GRACE_S:
                break  # it waits for other hosts, possibly for minutes
            await asyncio.sleep(min(self._deadline_s - now, 0.1))
        self._killed = engines.living_ranks(self._share.records)
        await asyncio.to_thread(
            process_cleanup.kill_processes, self._share.token, within_s=_KILL_WITHIN_S
        )

    def _some_rank_lives(self) -> bool:
        started = engines.rank_pids(self._share.records)
        return len(started) < len(self._ranks) or bool(engines.living_ranks(self._share.records))

    async def _forward(self, now_s: float) -> None:
        for tail in self._tails:
            for _ in range(_PIECES_AT_A_TIME):
                text = tail.read(now_s)
                await self._tell_output(tail.rank, text)
                if text.count("\n") <= 1:  # newer output is not urgent
                    break

    async def _tell_output(self, rank: int, text: str) -> None:
        if text and self._share.prepare.keep_logs and rank != 0:
            text = self._first_error.look(rank, text)
        if text:
            await self._send(protocol.Output(rank=rank, text=text))

    async def _forward_the_rest(self) -> None:
        """Send the remaining output, however long it takes: the files are deleted with the node agent.

        After a stop request, or if the launcher has the logs, only the last part of a very long output.
        """
        deadline_s: float | None = None
        for tail in self._tails:
            while text := tail.read(time.monotonic(), last=True):
                await self._tell_output(tail.rank, text)
                why = self._why_leave_out(tail.rank)
                if why and deadline_s is None:
                    deadline_s = time.monotonic() + _LAST_WORDS_WITHIN_S
                if deadline_s is None or time.monotonic() < deadline_s:
                    continue
                if skipped := tail.skip():
                    words = f"… {format_bytes(skipped)} more{why}\n"
                    await self._send(protocol.Output(rank=tail.rank, text=words))

    def _why_leave_out(self, rank: int) -> str:
        if self._share.prepare.logs is not None or self._share.prepare.keep_logs:
            return f": see {self._share.logs}/rank-{rank}.log"
        return ", not sent because of the stop request" if self._stopping.is_set() else ""

    def _verdict(self, exits: ExitsOfRanks, left: list[psutil.Process]) -> protocol.Ended:
        pids = engines.rank_pids(self._share.records)
        failures = engines.read_failure_files(
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
            hosts=self._share.start.nodes,
        )
        words = exits.words
        if left:
            words += f"\nprocesses that could not be killed: {[one.pid for one in left]}"
        ended = protocol.Ended(
            attempt=self._share.start.attempt,
            good=not (failures or words),
            failures=tuple(failures),
            finished=tuple(engines.ranks_finished(self._share.records, self._ranks))
            if failures
            else (),
            words=words,
            killed=self._killed or self._engine.killed,
            asked=self._asked,
            log_bytes=sum(tail.size_bytes for tail in self._tails)
            if self._share.prepare.keep_logs
            else 0,
        )
        return engines.fitting_failures(ended)
