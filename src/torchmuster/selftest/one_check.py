"""Runs one check in a process of its own, so that it can be stopped with everything that it started.

python -m torchmuster.selftest.one_check CHECK PLACE.json RESULT.json [--planted]
"""

import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path

import msgspec

from torchmuster.errors import MusterError, NotNow, TooFewDevices
from torchmuster.selftest.check import Check, Figure, NotHere, Place
from torchmuster.selftest.checks.all_checks import CHECKS
from torchmuster.selftest.record import CheckResult


def judge_check(check: Check, place: Place, *, planted: bool) -> CheckResult:
    """Measure and judge; an error of the check itself is "broken", hardware that is gone is "not run"."""
    begun = time.monotonic()
    try:
        outcome = check.judge(check.measure(place, planted))
    except NotHere as error:
        return CheckResult(id=check.id, verdict="not run", says=str(error))
    except (NotNow, TooFewDevices) as error:
        return CheckResult(id=check.id, verdict="not run", says=error.what)
    except (MusterError, OSError, ValueError, KeyError) as error:
        says = f"{type(error).__name__}: {error}"
        return CheckResult(
            id=check.id, verdict="broken", says=says, seconds=time.monotonic() - begun
        )
    return CheckResult(
        id=check.id,
        verdict="confirmed" if outcome.confirmed else "refuted",
        says=outcome.says,
        figures={name: _plain(figure) for name, figure in outcome.figures.items()},
        seconds=round(time.monotonic() - begun, 1),
    )


def _plain(figure: Figure) -> Figure:
    """Return a figure that JSON can have: text if it is not finite."""
    finite = not isinstance(figure, float) or math.isfinite(figure)
    return figure if finite else str(figure)


def main() -> None:
    """Run the check that the command line names."""
    name, where, result = sys.argv[1:4]
    place = msgspec.json.decode(Path(where).read_bytes(), type=Place)
    check = next(one for one in CHECKS if one.id == name)
    found = judge_check(check, place, planted="--planted" in sys.argv)
    Path(result).write_text(json.dumps(asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
