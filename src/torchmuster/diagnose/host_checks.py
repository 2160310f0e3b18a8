"""Run the checks of this host in parallel, each with its own deadline."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from torchmuster.diagnose.check import Check, DevicesSilent, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status


def run_checks(surroundings: Surroundings, checks: Sequence[Check]) -> list[Finding]:
    """Run the checks that apply to this system, in parallel; return their findings in order.

    A check that finds nothing gives a finding with status OK. A check that hangs (a dead network disk) leaves
    a thread behind that dies with the process.
    """
    began_s = time.monotonic()
    running: list[tuple[Check, Future[list[Finding]]]] = []
    for check in checks:
        if check.systems and surroundings.system not in check.systems:
            continue
        future: Future[list[Finding]] = Future()
        thread = threading.Thread(target=_run, args=(check, surroundings, future), daemon=True)
        thread.start()
        running.append((check, future))
    findings: dict[Finding, None] = {}  # several checks may wait for the same driver
    for check, future in running:
        left_s = max(0.0, began_s + check.deadline_s - time.monotonic())
        try:
            findings |= dict.fromkeys(future.result(timeout=left_s))
        except TimeoutError:
            hangs = finding(
                "check-hangs", check=check.name, deadline_s=check.deadline_s, asks=check.asks
            )
            findings[hangs] = None
    return list(findings)


def _run(check: Check, surroundings: Surroundings, future: "Future[list[Finding]]") -> None:
    try:
        findings = list(check.run(surroundings))
    except DevicesSilent:
        findings = [finding("check-hangs:devices")]
    except Exception as error:  # a failing check must not stop the others
        cause = f"{type(error).__name__}: {error}"
        findings = [finding("check-failed", check=check.name, cause=cause)]
    future.set_result(findings or [Finding(name=check.name, status=Status.OK, what=check.asks)])
