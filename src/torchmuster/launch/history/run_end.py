"""When a run of ``muster train`` ends, from its own progress; for run folders of any user."""

import contextlib
from typing import Any

from torchmuster import untrusted
from torchmuster.config.resolve import resolve_settings
from torchmuster.errors import MusterError
from torchmuster.launch.history.run_state import unix_s
from torchmuster.runfolder import RunFolder

_LAST_BYTES = 64 * 1024


def expected_end(run: RunFolder) -> float | None:
    """Return when a run ends at its present speed; None if its folder does not show that."""
    try:
        steps = resolve_settings(file=run.config, environment={}).settings.train.steps
        lines = _last_lines(run)
    except (MusterError, OSError, ValueError):
        return None
    timed = []
    for line in lines:
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            timed.append((int(line["step"]), unix_s(line["at_unix_s"])))
    if steps is None or len(timed) < 2:
        return None
    (first, began), (last, ended) = timed[0], timed[-1]
    if last <= first or ended <= began:
        return None
    return ended + max(steps - last, 0) * (ended - began) / (last - first)


def _last_lines(run: RunFolder) -> list[dict[str, Any]]:
    with untrusted.open_regular(run.metrics / "steps.jsonl") as stream:
        stream.seek(max(0, stream.seek(0, 2) - _LAST_BYTES))
        return list(untrusted.json_objects(stream.read(_LAST_BYTES)))
