"""Whether a run that failed is started again, and why: a rule over what is known of its attempts."""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torchmuster.decision import Decision
from torchmuster.finding import Finding
from torchmuster.launch import protocol

# The same error at the same place so many times is no accident.
_LOOP = 3
_LONGEST_PAUSE_S = 30.0
_CANNOT_MEND_ITSELF = re.compile(
    r" failed: (?:(?:ModuleNotFound|Import|Syntax|Indentation|Tab)Error\b|exit code 2$)"
)
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt that failed, and where the work stood; steps are None where nothing is known of them.

    ``got_on`` says that it left a newer checkpoint than there was, ``saved`` is the newest one's step, and
    ``reached`` the last step that was done in it. ``mistake``: another attempt would meet it again.
    """

    finding: Finding
    mistake: bool = False
    got_on: bool = False
    saved: int | None = None
    reached: int | None = None


def decide(history: Sequence[Attempt], *, max_restarts: int) -> Decision[float | None]:
    """Return after which pause to start again, or None to end the run.

    ``max_restarts`` are allowed in a row; a newer checkpoint begins another row. The reason is for
    people: which restart this is, or why there is none.
    """
    last = history[-1]
    row = _in_a_row(history)
    never_worked = len(history) == 1 and last.saved is None and last.reached is None
    if max_restarts == 0 or (never_worked and last.mistake):
        return Decision(value=None, reason="")  # the cause says it all
    if loop := _crash_loop(row):
        return Decision(value=None, reason=loop)
    if len(row) > max_restarts:
        return Decision(value=None, reason=_used_up(row, max_restarts))
    pause_s = 0.0 if len(row) == 1 else min(2.0 ** (len(row) - 1), _LONGEST_PAUSE_S)
    return Decision(value=pause_s, reason=f"restart {len(row)} of {max_restarts}")


def announcement(last: Attempt, pause_s: float, reason: str) -> str:
    """Say what failed and from where it will go on: ``…; starting again from step 100 (restart 1 of 3)``."""
    place = "" if last.saved is None else f" from step {last.saved:,}"
    when = f" in {pause_s:.0f} s" if pause_s else ""
    return f"{last.finding.what}; starting again{place}{when} ({reason})"


def with_reason(finding: Finding, reason: str) -> Finding:
    """Return why the run failed together with why it was not started again."""
    return replace(finding, why="\n".join(part for part in (reason, finding.why) if part))


def cannot_mend_itself(finding: Finding, failures: Iterable[protocol.Failure]) -> bool:
    """Say whether the cause is a mistake that another attempt would meet again.

    That is an error of ours, which says what to change, or code that cannot be read or imported.
    """
    ours = (failure.what.partition("\n")[0] for failure in failures if failure.what)
    return bool(_CANNOT_MEND_ITSELF.search(finding.what)) or any(
        what in finding.what for what in ours
    )


def _in_a_row(history: Sequence[Attempt]) -> list[Attempt]:
    """Return the last attempts, from the one on that left the newest checkpoint."""
    row: list[Attempt] = []
    for attempt in reversed(history):
        row.insert(0, attempt)
        if attempt.got_on:
            break
    return row


def _crash_loop(row: Sequence[Attempt]) -> str:
    """Say that the same happens again and again at the same place; "" if that is not so."""
    last = row[-1]
    alike = list(itertools.takewhile(lambda one: _signature(one) == _signature(last), row[::-1]))
    known = last.saved is not None or last.reached is not None
    if len(alike) < _LOOP or not known or _from_outside(last.finding):
        return ""
    where = "before its first step" if last.reached is None else f"after step {last.reached:,}"
    return f"crash loop: failed {len(alike)} times {where} with the same error; {_standing(last)}"


def _used_up(row: Sequence[Attempt], max_restarts: int) -> str:
    allowed = "1 restart was" if max_restarts == 1 else f"{max_restarts} restarts were"
    if row[-1].saved is None and row[-1].reached is None:
        return f"failed {len(row)} times; {allowed} allowed"
    return (
        f"failed {len(row)} times without a newer checkpoint ({allowed} allowed); "
        f"{_standing(row[-1])}"
    )


def _standing(last: Attempt) -> str:
    if last.saved is None:
        return "there is no checkpoint yet"
    return f"the last good checkpoint is step {last.saved:,}"


def _signature(attempt: Attempt) -> tuple[str, int | None, int | None]:
    """Return what two attempts share that failed alike: the error but for its numbers, and the place."""
    what = attempt.finding.what
    error = what.partition(" failed: ")[2] or what
    return _NUMBERS.sub("#", error), attempt.reached, attempt.saved


def _from_outside(finding: Finding) -> bool:
    """Say whether somebody else ended it, which may strike anywhere and any number of times."""
    return finding.name == "host-lost" or "SIGKILL" in finding.what
