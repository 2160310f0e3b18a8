"""Engines that start a host's ranks: torchrun's agent, or the node agent itself if that cannot run."""

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from torchmuster import untrusted
from torchmuster.errors import ExitCode
from torchmuster.launch import protocol
from torchmuster.launch.node import process_cleanup
from torchmuster.launch.node.heartbeats import GONE, look_at_process
from torchmuster.launch.node.process_cleanup import GRACE_VARIABLE, TOKEN_VARIABLE, USUAL_GRACE_S

_RANK = Path(__file__).parents[1] / "rank" / "start.py"


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    """One host's share of a run: its messages from the launcher, and its folders."""

    prepare: protocol.Prepare
    start: protocol.Start
    ranks: int
    logs: Path
    records: Path
    socket: int | None = None  # the listening socket of the store, on the first host
    own_token: str = ""  # of this attempt's processes, if others of the run must survive it

    @property
    def token(self) -> str:
        """The token in the environment of this attempt's processes."""
        return self.own_token or self.prepare.token

    @property
    def first(self) -> bool:
        """Whether this is the host with rank 0."""
        return self.start.node_rank == 0


def rank_command(share: NodeShare) -> list[str]:
    """Return the command of each rank; the rank number is in the environment."""
    settings = {
        "logs": str(share.logs),
        "records": str(share.records),
        "world_size": share.start.world_size,
        "attempt": share.start.attempt,
        "max_restarts": share.start.max_restarts,
        "first_step": share.start.first_step,
        "module": share.prepare.module,
    }
    return [sys.executable, "-u", str(_RANK), json.dumps(settings), *share.prepare.command]


def agent_command(share: NodeShare) -> list[str]:
    """Return the command of the agent."""
    module = "torchmuster.launch.node.elastic_agent"
    return [sys.executable, "-m", module, *agent_arguments(share)]


def agent_arguments(share: NodeShare, *, socket_name: str | None = None) -> list[str]:
    """Return the arguments of the agent: its report, and torchrun's flags, with no defaults.

    ``socket_name`` replaces the number of the listening socket, if another process has it under another number.
    """
    flags = [
        f"--nnodes={share.start.nodes}",
        f"--nproc-per-node={share.ranks}",
        f"--rdzv-id={share.prepare.run_id}.{share.start.attempt}",
        *_rendezvous(share, socket_name),
        f"--local-addr={share.start.local_address}",
        "--max-restarts=0",  # the launcher restarts: all hosts, with a clean store
        "--monitor-interval=0.1",
        f"--log-dir={share.records / 'torchrun'}",
        "--no-python",
    ]
    # torchrun replaces ${local_rank} and $$ in a command; the user's command must arrive unchanged.
    command = [word.replace("$", "$$") for word in rank_command(share)]
    report = str(share.records / "agent.json")
    return [report, *flags, *command]


def _rendezvous(share: NodeShare, socket_name: str | None) -> list[str]:
    start = share.start
    timeout = round(start.timeout_s)
    if start.backend == "muster":
        conf = f"rank={start.node_rank},timeout={timeout}"
        if share.socket is not None:
            conf += f",socket={socket_name or share.socket}"
        flags = ["--rdzv-backend=torchmuster", f"--rdzv-endpoint={start.endpoint}"]
        return [*flags, f"--rdzv-conf={conf}"]
    # The keep-alive compares the clocks of different hosts, so it must tolerate wrong ones.
    conf = f"rank={start.node_rank},join_timeout={timeout},last_call_timeout=5,keep_alive_interval=5,keep_alive_max_attempt=1000"
    if start.backend == "c10d":
        conf += f",is_host={str(share.first).lower()},read_timeout={timeout}"
    return [
        f"--rdzv-backend=torchmuster-{start.backend}",
        f"--rdzv-endpoint={start.endpoint}",
        f"--rdzv-conf={conf}",
    ]


def agent_environment(
    share: NodeShare, base: Mapping[str, str], devices: Mapping[str, str | None], threads: int
) -> dict[str, str]:
    """Return the environment of the agent and its ranks; the user's variables are never overwritten."""
    return job_environment(share.prepare, base, devices, threads, token=share.token)


def job_environment(
    prepare: protocol.Prepare,
    base: Mapping[str, str],
    devices: Mapping[str, str | None],
    threads: int,
    *,
    token: str,
) -> dict[str, str]:
    """Return the part of the agent's environment that is known before an attempt starts."""
    merged = {name: value for name, value in base.items() if not name.startswith("PET_")}
    merged |= prepare.environment
    for name, value in devices.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = value
    merged.setdefault("OMP_NUM_THREADS", str(threads))
    merged[TOKEN_VARIABLE] = token
    # Restarted ranks must not read keys of an earlier attempt from a shared store.
    merged["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    merged.setdefault(GRACE_VARIABLE, USUAL_GRACE_S)
    return merged


def direct_environment(share: NodeShare, local_rank: int) -> dict[str, str]:
    """Return the variables that torchrun would set, for systems on which its agent cannot run."""
    start = share.start
    return {
        "RANK": str(start.first_rank + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(start.world_size),
        "LOCAL_WORLD_SIZE": str(share.ranks),
        "GROUP_RANK": str(start.node_rank),
        "GROUP_WORLD_SIZE": str(start.nodes),
        "MASTER_ADDR": start.address,
        "MASTER_PORT": str(start.port),
        "USE_LIBUV": "0",  # the Windows builds of torch do not include it
    }


_LAST_LINES = 30
_LAST_BYTES = 8 * 1024
# The root cause shows one complete failure and compares it with the others; a hundred would be too much.
_TOLD_WHOLE, _TOLD_WHOLE_OF_MANY, _MANY_HOSTS = 16, 2, 64
_SHORT_ERROR = 200
_EXITED = ("Z", GONE)


def rank_pids(records: Path) -> dict[int, int]:
    """Return the PID of each rank that has started."""
    found = {}
    for path in records.glob("rank-*.json"):
        if path.name.count(".") == 1:
            found[int(path.stem.removeprefix("rank-"))] = int(
                untrusted.read_json_object(path).get("pid", 0)
            )
    return found


def living_ranks(records: Path) -> tuple[int, ...]:
    """Return the ranks that have started and not exited."""
    stats = {rank: look_at_process(pid) for rank, pid in rank_pids(records).items()}
    return tuple(sorted(rank for rank, stat in stats.items() if stat and stat.state not in _EXITED))


def ranks_finished(records: Path, ranks: Iterable[int]) -> list[int]:
    """Return the ranks whose script finished."""
    return [rank for rank in ranks if (records / f"rank-{rank}.finished.json").exists()]


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """How a rank's process exited: its exit code (negative: a signal), and when that was noticed."""

    pid: int
    code: int
    at_unix_s: float


def read_failure_files(
    records: Path,
    logs: Path,
    ranks: Iterable[int],
    exits: Mapping[int, RankExit],
    evidence: Mapping[int, str],
    peaks: Mapping[int, int],
    began: Mapping[int, int],
    hosts: int = 1,
) -> list[protocol.Failure]:
    """Return the ranks that failed, with the evidence from each rank and from the host.

    This includes a rank that recorded an error, but was killed before its exit was noticed. ``began`` is the
    offset in each rank's log at which this attempt starts.
    """
    found = []
    for local_rank, rank in enumerate(ranks):
        own = untrusted.read_json_object(records / f"rank-{rank}.error.json")
        if rank not in exits and not own:
            continue
        seen = exits.get(rank)
        at = own.get("at_unix_s") or (seen.at_unix_s if seen else time.time())
        found.append(
            protocol.Failure(
                rank=rank,
                local_rank=local_rank,
                exit_code=_exit_code(seen, own),
                ago_s=max(0.0, time.time() - float(at)),
                error=_engines_text(own, "error"),
                what=_engines_text(own, "what"),
                why=_engines_text(own, "why"),
                fix=_engines_text(own, "fix"),
                traceback=_engines_text(own, "traceback"),
                last_lines=last_output_lines(logs / f"rank-{rank}.log", began.get(rank, 0)),
                peak_rss_bytes=peaks.get(rank),
                evidence=evidence.get(rank, ""),
            )
        )
    whole = _TOLD_WHOLE if hosts <= _MANY_HOSTS else _TOLD_WHOLE_OF_MANY
    return _cut_later(found, whole, _error_alone)


def _exit_code(seen: RankExit | None, own: Mapping[str, Any]) -> int:
    """Return a rank's exit code; one that saved may have got a signal while exiting."""
    if own.get("exit_code") == ExitCode.SAVED or seen is None:
        code = own.get("exit_code")
        return code if isinstance(code, int) else 1
    return seen.code


def fitting_failures(ended: protocol.Ended) -> protocol.Ended:
    """Return a report that fits into a message: if necessary, only the first failure is complete."""
    if len(protocol.to_lines(ended)) <= protocol.MESSAGE_LIMIT:
        return ended
    return msgspec.structs.replace(
        ended, failures=tuple(_cut_later(ended.failures, 1, _short_error_alone))
    )


def _cut_later(
    failures: Sequence[protocol.Failure],
    whole: int,
    cut: Callable[[protocol.Failure], protocol.Failure],
) -> list[protocol.Failure]:
    """Shorten all failures except the earliest ones."""
    by_time = sorted(failures, key=lambda one: -one.ago_s)
    first = {one.rank for one in by_time[:whole]}
    return [one if one.rank in first else cut(one) for one in failures]


def _error_alone(failure: protocol.Failure) -> protocol.Failure:
    if not failure.traceback:  # then only the log shows what happened
        return failure
    return msgspec.structs.replace(failure, traceback="", last_lines="")


def _short_error_alone(failure: protocol.Failure) -> protocol.Failure:
    error, what = failure.error[:_SHORT_ERROR], failure.what[:_SHORT_ERROR]
    return msgspec.structs.replace(
        failure, error=error, what=what, why="", fix="", traceback="", last_lines=""
    )


def agent_exits(records: Path) -> dict[int, RankExit]:
    """Return the exits of the ranks that the agent saw fail."""
    return {
        int(one["rank"]): RankExit(
            pid=int(one["pid"]), code=int(one["exit_code"]), at_unix_s=float(one["at_unix_s"])
        )
        for one in untrusted.read_json_object(records / "agent.json").get("failures", [])
    }


def last_output_lines(path: Path, began: int) -> str:
    """Return the end of a log, ignoring the first ``began`` bytes."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(began, stream.tell() - _LAST_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_LAST_LINES:])


def _engines_text(record: Mapping[str, Any], name: str) -> str:
    """Return a text of a record; lone surrogates, as in odd file names, are escaped."""
    return str(record.get(name, "")).encode("utf-8", errors="backslashreplace").decode("utf-8")


_AGENT_WORDS = 2000
_LOOK_EVERY_S = 0.1
_KILL_WITHIN_S = 5.0
# How long the agent may take to report the exits of all ranks, once none is left.
_REPORT_WITHIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class ExitsOfRanks:
    """How the ranks exited: those that failed, or as text why that is unknown."""

    failed: Mapping[int, RankExit] = field(default_factory=dict)
    words: str = ""


class Engine(Protocol):
    """Starts the ranks and returns how they exited.

    After a failure it stops the other ranks: ``kill_at_s`` (monotonic) is when it kills those that have not stopped,
    and ``killed`` are those that it killed.
    """

    kill_at_s: float | None
    killed: tuple[int, ...]

    async def start(self) -> int:
        """Start the ranks; return a process id."""

    async def wait(self) -> ExitsOfRanks:
        """Wait until all ranks have exited."""

    def terminate(self) -> None:
        """Ask the ranks to stop; each gets one signal, however often this is called."""


class TorchrunEngine:
    """torchrun's elastic agent in a separate process.

    After a failure the agent waits up to 30 s for the other ranks to stop; here they are killed after the grace period.
    """

    def __init__(self, share: NodeShare, environment: Mapping[str, str]) -> None:
        self._share = share
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._early_log: Path | None = None  # output from before the agent has its own log
        self.kill_at_s: float | None = None
        self.killed: tuple[int, ...] = ()

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
                start_new_session=True,  # the node agent handles Ctrl-C
            )
        return self._process.pid

    async def wait(self) -> ExitsOfRanks:
        """Wait for the agent; it has recorded which ranks failed unless it failed itself."""
        assert self._process is not None
        ending = asyncio.create_task(self._end_ranks_after_failure(self._process))
        try:
            code = await self._process.wait()
        finally:
            ending.cancel()
        failed = agent_exits(self._share.records) if code else {}
        if failed or code == 0:
            return ExitsOfRanks(failed=failed)
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"exited with code {code}"
        )
        said = last_output_lines(self._share.records / "agent.log", 0)
        if not said and self._early_log is not None:
            said = last_output_lines(self._early_log, 0)
        said = said[-_AGENT_WORDS:]
        return ExitsOfRanks(words=f"torchrun's agent {how}\n{said}".strip())

    def terminate(self) -> None:
        """Ask the agent to stop; it stops the ranks."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    async def _end_ranks_after_failure(self, agent: asyncio.subprocess.Process) -> None:
        while not (failed := agent_exits(self._share.records)):
            await asyncio.sleep(_LOOK_EVERY_S)
        since_s = time.time() - min(one.at_unix_s for one in failed.values())
        left_s = max(0.0, _grace_s(self._environment) - max(0.0, since_s))
        self.kill_at_s = time.monotonic() + left_s
        await asyncio.sleep(left_s)
        self.killed = living_ranks(self._share.records)
        token = self._share.token
        await asyncio.to_thread(
            process_cleanup.kill_processes, token, within_s=_KILL_WITHIN_S, spare=agent.pid
        )
        await asyncio.sleep(_REPORT_WITHIN_S)
        with contextlib.suppress(ProcessLookupError):
            agent.kill()  # it is waiting for a rank that cannot be killed


def _grace_s(environment: Mapping[str, str]) -> float:
    return float(environment.get(GRACE_VARIABLE, USUAL_GRACE_S))


class DirectEngine:
    """Ranks as child processes of the node agent, for Windows, where torchrun's agent cannot run."""

    def __init__(self, share: NodeShare, environment: Mapping[str, str]) -> None:
        self._share = share
        self._environment = environment
        self._processes: list[asyncio.subprocess.Process] = []
        self._asked = False
        self.kill_at_s: float | None = None
        self.killed: tuple[int, ...] = ()

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

    async def wait(self) -> ExitsOfRanks:
        """Wait for all ranks; stop the others when the first one fails."""
        waits = {asyncio.ensure_future(one.wait()): one for one in self._processes}
        failed: dict[int, RankExit] = {}
        left = set(waits)
        while left:
            until_s = (
                None if self.kill_at_s is None else max(0.0, self.kill_at_s - time.monotonic())
            )
            done, left = await asyncio.wait(
                left, timeout=until_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                self.killed = self.killed or living_ranks(self._share.records)
                self._kill()
                self.kill_at_s = None  # nothing more can be done
            new = {waits[one] for one in done if one.result() != 0}
            if new and not failed:
                for process in new:
                    rank = self._share.start.first_rank + self._processes.index(process)
                    failed[rank] = RankExit(
                        pid=process.pid, code=process.returncode or 0, at_unix_s=time.time()
                    )
                self.terminate()
                self.kill_at_s = time.monotonic() + _grace_s(self._environment)
        return ExitsOfRanks(failed=failed)

    def terminate(self) -> None:
        """Ask every rank to stop, once."""
        asked, self._asked = self._asked, True
        for process in self._processes if not asked else ():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    def _kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def engine_for(
    share: NodeShare, environment: Mapping[str, str], system: str = sys.platform
) -> Engine:
    """Return the engine for this system: torchrun's agent if it can run."""
    return (DirectEngine if system == "win32" else TorchrunEngine)(share, environment)
