"""Run the checks of this host in parallel, each with its own deadline."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from torchmuster.diagnose.check import Check, DevicesSilent, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding


@dataclass(frozen=True, kw_only=True)
class CheckResults:
    """The findings of one check; ``ended`` is False if it timed out."""

    check: Check
    findings: tuple[Finding, ...]
    ended: bool = True


def run_checks(surroundings: Surroundings, checks: Sequence[Check]) -> list[CheckResults]:
    """Run the checks that apply to this system, in parallel.

    A check that hangs (a dead network disk) leaves a thread behind that dies with the process.
    """
    began_s = time.monotonic()
    running: list[tuple[Check, Future[CheckResults]]] = []
    for check in checks:
        if check.systems and surroundings.system not in check.systems:
            continue
        future: Future[CheckResults] = Future()
        thread = threading.Thread(target=_run, args=(check, surroundings, future), daemon=True)
        thread.start()
        running.append((check, future))
    results = []
    reported: set[Finding] = set()  # several checks may wait for the same driver
    for check, future in running:
        left_s = max(0.0, began_s + check.deadline_s - time.monotonic())
        try:
            result = future.result(timeout=left_s)
        except TimeoutError:
            result = _given_up(check)
        if not result.ended:
            fresh = tuple(found for found in result.findings if found not in reported)
            reported.update(fresh)
            result = replace(result, findings=fresh)
        results.append(result)
    return results


def _run(check: Check, surroundings: Surroundings, future: Future[CheckResults]) -> None:
    ended = True
    try:
        findings = tuple(check.run(surroundings))
    except DevicesSilent as error:
        findings, ended = (finding("check-hangs:devices", error=error),), False
    except Exception as error:  # a failing check must not stop the others
        cause = f"{type(error).__name__}: {error}"
        findings = (finding("check-failed", check=check.name, cause=cause),)
    future.set_result(CheckResults(check=check, findings=findings, ended=ended))


def _given_up(check: Check) -> CheckResults:
    hangs = finding("check-hangs", check=check.name, deadline_s=check.deadline_s, asks=check.asks)
    return CheckResults(check=check, findings=(hangs,), ended=False)
