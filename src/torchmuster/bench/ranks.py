"""Run a bench's ``measure`` on fresh ranks of this machine, and collect the rows of rank 0.

As a program, one rank: ``python -m torchmuster.bench.ranks REQUEST ANSWERS``.
"""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from torchmuster.bench.result import Row
from torchmuster.errors import MusterError
from torchmuster.launch import local_ranks


def measure_on_ranks(
    module: str,
    settings: dict[str, Any],
    *,
    ranks: int,
    device: Literal["cpu", "gpu"],
    say: Callable[[str], None],
) -> list[Row]:
    """Call ``module.measure(device, **settings)`` on this number of ranks; return rank 0's rows.

    The ranks are new processes, so no bench affects the next one. ``say`` gets a progress text every
    ten seconds. The error of a failed rank has its cause.
    """
    request = {"module": module, "device": device, "settings": settings}
    doing = f"measuring {module.rpartition('.')[2]}"
    run = local_ranks.run_local_ranks(
        "torchmuster.bench.ranks",
        msgspec.json.encode(request).decode(),
        ranks=ranks,
        device=device,
        folder=str(Path.cwd()),
        name="bench",
        typed=("bench",),
        doing=doing,
        say=say,
    )
    if run.trouble is not None:
        why = local_ranks.describe_failure(run.trouble)
        raise MusterError(f"{doing} failed", why=why, fix=run.trouble.fix)
    return msgspec.json.decode(run.texts[0], type=list[Row])


def main(request_file: str, answers: str) -> None:
    """Read the request, measure, and write the rows of rank 0."""
    request = msgspec.json.decode(Path(request_file).read_bytes())
    bench = importlib.import_module(request["module"])
    rows = bench.measure(request["device"], **request["settings"])
    if os.environ.get("RANK", "0") == "0":
        local_ranks.leave_answer(answers, 0, msgspec.json.encode(rows).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
