"""Run the checks of this host in parallel, each with its own deadline."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchmuster.diagnose.check import Check, Cost, DevicesSilent, Surroundings
from torchmuster.finding import Finding, Status

_SILENCE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class CheckResults:
    """The findings and duration of one check; ``ended`` is False if it timed out."""

    check: Check
    findings: tuple[Finding, ...]
    seconds: float
    ended: bool = True


def chosen_of(checks: Sequence[Check], system: str, at_most: Cost) -> list[Check]:
    """Return the checks that cost no more than ``at_most`` and apply to this system."""
    return [
        check
        for check in checks
        if check.cost <= at_most and (not check.systems or system in check.systems)
    ]


def run_checks(
    surroundings: Surroundings,
    checks: Sequence[Check],
    *,
    at_most: Cost = Cost.INSTANT,
    on_silence: Callable[[Sequence[Check]], None] = lambda _: None,
    silence_s: float = _SILENCE_S,
) -> list[CheckResults]:
    """Run the checks that cost no more than ``at_most`` and apply to this system, in parallel.

    A check that hangs (a dead network disk) leaves a thread behind that dies with the process. If
    no check finishes for ``silence_s``, ``on_silence`` is called with the pending checks.
    """
    chosen = chosen_of(checks, surroundings.system, at_most)
    results: queue.Queue[tuple[int, CheckResults]] = queue.Queue()
    began = time.monotonic()
    for place, check in enumerate(chosen):
        threading.Thread(
            target=lambda place=place, check=check: results.put((place, _run(check, surroundings))),
            name=f"check {check.name}",
            daemon=True,
        ).start()
    found: dict[int, CheckResults] = {}
    while pending := [place for place in range(len(chosen)) if place not in found]:
        until = min(began + chosen[place].deadline_s for place in pending)
        try:
            left = max(0.0, until - time.monotonic())
            place, examined = results.get(timeout=min(left, silence_s))
            found.setdefault(place, examined)
        except queue.Empty:
            now = time.monotonic()
            if now < until:
                on_silence([chosen[place] for place in pending])
            for place in pending:
                if began + chosen[place].deadline_s <= now:
                    found[place] = _given_up(chosen[place])
    return _silence_once([found[place] for place in range(len(chosen))])


def _run(check: Check, surroundings: Surroundings) -> CheckResults:
    began, ended = time.monotonic(), True
    try:
        findings = tuple(check.run(surroundings))
    except DevicesSilent as error:
        findings, ended = (_silent(error),), False
    except Exception as error:  # a failing check must not stop the others
        findings = (
            Finding(
                name="check-failed",
                status=Status.NOTE,
                what=f"the check {check.name} could not run",
                why=f"{type(error).__name__}: {error}",
            ),
        )
    seconds = time.monotonic() - began
    return CheckResults(check=check, findings=findings, seconds=seconds, ended=ended)


def _silent(error: DevicesSilent) -> Finding:
    return Finding(
        name="check-hangs",
        status=Status.WARNING,
        what=str(error),
        why="a driver hangs, or initializes its GPUs one by one; every run here waits for it too",
        fix="sudo nvidia-smi -pm 1  # keeps NVIDIA GPUs initialized\n"
        "sudo dmesg | tail -20  # shows driver errors",
    )


def _silence_once(examined: Sequence[CheckResults]) -> list[CheckResults]:
    """Keep a timeout finding that several checks share only with the first of them."""
    reported: set[Finding] = set()
    results = []
    for result in examined:
        if result.ended:
            results.append(result)
            continue
        fresh = tuple(finding for finding in result.findings if finding not in reported)
        reported.update(fresh)
        results.append(replace(result, findings=fresh))
    return results


def _given_up(check: Check) -> CheckResults:
    finding = Finding(
        name="check-hangs",
        status=Status.WARNING,
        what=f"the check {check.name} did not finish within {check.deadline_s:g} s",
        why=f"a disk or a service that the check needs does not respond. The check asks: "
        f"{check.asks}",
    )
    return CheckResults(check=check, findings=(finding,), seconds=check.deadline_s, ended=False)
