"""Start and stop the sidecar process that sends the metrics of rank 0."""

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
# Time after the last step to send the rest; then the rank exits without waiting.
FINISH_WITHIN_S = 10.0
_END_WITHIN_S = 5.0
# Shorter for a rank that failed or got a stop request: the next attempt sends the rest.
_LEAVE_AFTER_S = 2.0


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of the process."""

    run: str
    wanted: Wanted


@contextlib.contextmanager
def send_in_background(folder: Path, wanted: Wanted) -> Iterator[None]:
    """Send a run's metrics from a separate process as they are written; called in rank 0.

    The process stops when its stdin is closed, so it also stops if this process is killed. Its
    errors do not affect this process.
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
                start_new_session=True,  # must not receive signals for the training
            )
    except OSError as error:  # disk full, process limit: the training continues without it
        print(f"cannot send metrics to {', '.join(wanted.sinks)}: {error}", flush=True)
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
    """Return for each incomplete sink the reason, and where the metrics are."""
    told = []
    for name in sinks:
        far = how_far.read_sent(run, name)
        if far is not None and not far.trouble and not far.open:
            continue
        why = far.trouble if far is not None and far.trouble else "the sending process was killed"
        told.append(
            f"{name} is missing metrics ({why}); {run.metrics} has all of them, and a resumed run "
            "sends the rest"
        )
    return told
