"""Run the checks that fit the hardware, one after the other, within a time limit."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from torchmuster.selftest.check import Check, Place
from torchmuster.selftest.hardware import NEEDS, Hardware
from torchmuster.selftest.record import CheckResult

_SAY_EVERY_S = 9.0
_SHORTEST_LIMIT_S = 180.0
_TIMES_AS_LONG = 5  # as typical: then a check is stopped
_STOP_WITHIN_S = 40.0  # a launcher lets its ranks save


def run_checks(
    checks: Sequence[Check],
    here: Hardware,
    *,
    hosts: Sequence[str] = (),
    minutes: float,
    planted: bool = False,
    say: Callable[[str], None] = lambda _: None,
    save: Callable[[list[CheckResult]], None] = lambda _: None,
) -> list[CheckResult]:
    """Run the checks in order; return a result for each.

    ``say`` receives the progress, and ``save`` the results so far after each check.
    """
    end = time.monotonic() + minutes * 60
    found = []
    with tempfile.TemporaryDirectory(
        prefix="muster-selftest-", ignore_cleanup_errors=True
    ) as folder:
        place = Place(
            device=here.device,
            ranks=here.ranks,
            has=frozenset(here.has),
            folder=folder,
            hosts=tuple(hosts),
        )
        for number, check in enumerate(checks, 1):
            where = f"{number} of {len(checks)}"
            reason = _reason_not_to_run(check, place, end - time.monotonic())
            if reason:
                result = CheckResult(id=check.id, verdict="not run", says=reason)
            else:
                say(f"{where}  {check.id}: {check.question}")
                result = _run_alone(check, place, end, planted=planted, say=say)
            say(f"{where}  {check.id}: {result.verdict}. {result.says.splitlines()[0]}")
            found.append(result)
            save(found)
    return found


def _reason_not_to_run(check: Check, place: Place, left_s: float) -> str:
    missing = [NEEDS[one] for one in check.needs if one not in place.has]
    if missing:
        return f"needs {' and '.join(missing)}"
    if check.seconds > left_s:
        return f"no time left: takes about {check.seconds} s (--minutes)"
    return ""


def _run_alone(
    check: Check, place: Place, end: float, *, planted: bool, say: Callable[[str], None]
) -> CheckResult:
    """Run a check in a process group of its own, which ends with it."""
    limit_s = max(_SHORTEST_LIMIT_S, _TIMES_AS_LONG * check.seconds)
    limit_s = max(min(limit_s, end - time.monotonic()), check.seconds)
    folder = Path(place.folder)
    asked, answer = folder / "place.json", folder / f"{check.id}.json"
    asked.write_bytes(msgspec.json.encode(place))
    command = [sys.executable, "-m", "torchmuster.selftest.one_check", check.id]
    command += [str(asked), str(answer), *(["--planted"] if planted else [])]
    errors = folder / f"{check.id}.stderr"
    with errors.open("wb") as stderr, _process_group(command, stderr.fileno()) as process:
        begun = time.monotonic()
        while process.poll() is None:
            took_s = time.monotonic() - begun
            if took_s > limit_s:
                _stop_group(process)
                out_of_time = time.monotonic() >= end
                return CheckResult(
                    id=check.id,
                    verdict="not run" if out_of_time else "broken",
                    says=f"stopped after {took_s:.0f} s without a result"
                    + (": no time left (--minutes)" if out_of_time else ""),
                    seconds=took_s,
                )
            try:
                process.wait(timeout=min(_SAY_EVERY_S, limit_s - took_s + 0.1))
            except subprocess.TimeoutExpired:
                say(f"        {check.id}: {time.monotonic() - begun:.0f} s so far")
    if not answer.exists():
        last = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        says = f"the check ended with exit code {process.returncode}: {''.join(last)}"
        return CheckResult(id=check.id, verdict="broken", says=says)
    try:
        return msgspec.json.decode(answer.read_bytes(), type=CheckResult)
    except msgspec.DecodeError as error:
        return CheckResult(id=check.id, verdict="broken", says=f"unreadable result: {error}")


@contextmanager
def _process_group(command: Sequence[str], stderr: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that leads its own group; nothing of the group outlives the ``with``."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _stop_group(process)


def _stop_group(process: "subprocess.Popen[bytes]") -> None:
    """Ask the group to end, as a launcher among it has ranks to stop; then kill what is left."""
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
        end = time.monotonic() + _STOP_WITHIN_S
        while _is_alive(process) and time.monotonic() < end:
            time.sleep(0.05)
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()


def _is_alive(process: "subprocess.Popen[bytes]") -> bool:
    """Return whether any process of the group is left: the first may end before a launcher among them."""
    process.poll()  # a process that ended counts until it is waited for
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
