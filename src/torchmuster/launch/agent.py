"""torchrun's elastic agent for one machine.

The agent is PyTorch's own, and so are its flags; this file adds four things to it: it dies with the
keeper, it writes down which ranks failed and how, it does not wait for the others of them longer than
it was told to, and it knows the rendezvous ``torchmuster``.
"""

import gc
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchmuster.launch.rank import die_with_parent, write_record

# torch's own, but it does not use it everywhere.
GRACE_VARIABLE, USUAL_GRACE_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5"


def main(arguments: Sequence[str]) -> int:
    """Run the agent; the first argument is where to write which ranks failed."""
    die_with_parent()  # before torch is imported, which takes seconds
    from torch.distributed.elastic import multiprocessing
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from torchmuster.launch import settled_rendezvous

    settled_rendezvous.register()
    report = Path(arguments[0])
    grace_s = int(os.environ.get(GRACE_VARIABLE, USUAL_GRACE_S))
    multiprocessing.SubprocessContext = _remembering(  # type: ignore[misc,assignment]
        multiprocessing.SubprocessContext, report, grace_s
    )
    try:
        run(parse_args(arguments[1:]))  # type: ignore[no-untyped-call]  # torch's own
    except ChildFailedError as error:
        _write(report, error.failures)
        return 1
    return 0


def _remembering(ranks: type, report: Path, grace_s: int) -> type:
    """Return torchrun's keeping of ranks, made to write down who failed before it ends the others.

    Ending them can take a while, and the agent may itself be ended meanwhile: what it saw first
    must be known by then.
    """

    class Remembering(ranks):  # type: ignore[misc]
        def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            failures = {int(self.envs[one]["RANK"]): how for one, how in self._failures.items()}
            if failures and not report.exists():
                _write(report, failures)
            super().close(death_sig, min(timeout, grace_s))

    return Remembering


def _write(report: Path, failures: Mapping[int, Any]) -> None:
    told = [
        {"rank": rank, "pid": one.pid, "exit_code": one.exitcode, "at_unix_s": one.timestamp}
        for rank, one in failures.items()
    ]
    write_record(report, {"failures": told})


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    finally:
        gc.freeze()  # looking through all of torch's objects once more takes long
