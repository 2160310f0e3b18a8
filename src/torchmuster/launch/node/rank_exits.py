"""Exit codes of the ranks that failed, recorded by torchrun's agent, their parent process."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.launch.node import engines
from torchmuster.launch.rank.start import write_record

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import ProcessFailure


class RankExits:
    """The ranks that failed, in a file for the node agent.

    torch reports them after it has stopped the other ranks, with times in whole seconds. That can take a while, and the agent
    may be killed before, so each failure is written as soon as its process exits.
    """

    def __init__(self, report: Path) -> None:
        """Write to ``report``; the ranks' own records are in the same folder."""
        self._report = report
        self._failed: dict[int, engines.RankExit] = {}

    @property
    def some_failed(self) -> bool:
        """Whether a rank has failed, so that torch stops the others."""
        return bool(self._failed)

    def watch(self) -> None:
        """Look for a failed rank whenever a child of this process exits."""
        if hasattr(os, "waitid"):  # macOS has it from Python 3.13 on
            signal.signal(signal.SIGCHLD, self._note)

    def add_all(self, failures: "Mapping[int, ProcessFailure]") -> None:
        """Write torch's final report; earlier records are kept, and stay the earliest."""
        first = min((one.at_unix_s for one in self._failed.values()), default=0.0)
        reported = {
            rank: engines.RankExit(
                pid=one.pid, code=one.exitcode, at_unix_s=max(first, float(one.timestamp))
            )
            for rank, one in failures.items()
        }
        self._failed = reported | self._failed
        self._write()

    def drop_ended_by(self, number: signal.Signals) -> None:
        """Remove the ranks that exited because the agent stopped them."""
        self._failed = {rank: one for rank, one in self._failed.items() if one.code != -number}
        self._write()

    def _note(self, *_: object) -> None:
        if found := {rank: one for rank, one in self._look() if rank not in self._failed}:
            self._failed |= found
            self._write()

    def _look(self) -> Iterator[tuple[int, engines.RankExit]]:
        for rank, pid in engines.rank_pids(self._report.parent).items():
            try:
                # Without collecting the process: torch does that.
                state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # torch has collected it; it reports the exit code at the end
                continue
            if state is not None and state.si_status:
                exited = state.si_code == os.CLD_EXITED
                code = state.si_status if exited else -state.si_status
                yield rank, engines.RankExit(pid=pid, code=code, at_unix_s=time.time())

    def _write(self) -> None:
        failures = [
            {"rank": rank, "pid": one.pid, "exit_code": one.code, "at_unix_s": one.at_unix_s}
            for rank, one in self._failed.items()
        ]
        write_record(self._report, {"failures": failures})
