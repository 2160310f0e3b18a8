"""How rank 0 starts the process that sends its numbers, and lets it end."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from torchmuster.monitor.sinks import sent as how_far
from torchmuster.monitor.sinks.sink import Wanted
from torchmuster.runfolder import RunFolder

FINISHED = b"finished"
# After the last step, for what is not sent yet; then the rank goes without.
FINISH_WITHIN_S = 10.0
_END_WITHIN_S = 5.0
# A rank that failed, or was asked to end, has no time for this: the next attempt sends what is left.
_LEAVE_AFTER_S = 2.0


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is told."""

    run: str
    wanted: Wanted


@contextlib.contextmanager
def send_in_background(folder: Path, wanted: Wanted) -> Iterator[None]:
    """Have a run's numbers sent as they are written, by a process of its own; called in rank 0.

    The process is told by its input when to end, so it notices also if this one is killed. What goes wrong there
    does nothing here.
    """
    if not wanted.sinks:
        yield
        return
    process = _started(folder, wanted)
    try:
        yield
    except BaseException:
        _end_sidecar(process, b"", within_s=_LEAVE_AFTER_S)
        raise
    _end_sidecar(process, FINISHED, within_s=FINISH_WITHIN_S + _END_WITHIN_S)


def _started(folder: Path, wanted: Wanted) -> "subprocess.Popen[bytes] | None":
    order = Order(run=str(folder.resolve()), wanted=wanted)
    logs = folder / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / "sinks.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "torchmuster.monitor.sinks"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # signals that are meant for the training are not for it
            )
    except OSError as error:  # no room on the disk, no more processes: a training can do without
        print(f"nothing is sent to {', '.join(wanted.sinks)}: {error}", flush=True)
        return None
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it was killed
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()
    return process


def _end_sidecar(
    process: "subprocess.Popen[bytes] | None", word: bytes, *, within_s: float
) -> None:
    if process is None:
        return
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it was killed
        process.stdin.write(word + b"\n")
        process.stdin.flush()
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def not_sent_finding(run: RunFolder, sinks: tuple[str, ...]) -> list[str]:
    """Say for each sink that has not got everything why, and how to send the rest."""
    told = []
    for name in sinks:
        far = how_far.read_sent(run, name)
        if far is not None and not far.trouble and not far.open:
            continue
        why = far.trouble if far is not None and far.trouble else "the process that sends was ended"
        told.append(
            f"{name} has not got everything ({why}); the rest: "
            f"muster runs export {run.path} --to {name}"
        )
    return told
