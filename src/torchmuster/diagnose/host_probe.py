"""``python -m torchmuster.diagnose.host_probe``: serves requests about its host as JSON lines.

A request is ``{"id": 1, "verb": "examine", "argument": …}``, its answer ``{"id": 1, "answer": …}``
or ``{"id": 1, "error": {"what": …, "why": …, "fix": …}}``. Requests are answered one after the other; opened
ports are served meanwhile. The program exits at the end of its input. It does not need torch.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from torchmuster.errors import MusterError


async def answer_request(verb: str, argument: Any) -> Any:
    """Carry out a request. Modules are imported on use: a failing import must not break the other verbs."""
    match verb:
        case "examine":
            return await asyncio.to_thread(_run_checks, Path(argument))
        case "open" | "dial" | "close":
            from torchmuster.diagnose.links import dial

            verbs = {"open": dial.open_ports, "dial": dial.dial, "close": dial.close_ports}
            return await verbs[verb](argument)
        case "find-ranks":
            from torchmuster.diagnose.hang.rank_processes import find_ranks

            return await find_ranks(argument)
        case "take-snapshots":
            from torchmuster.diagnose.hang.rank_stacks import take_snapshots

            return await take_snapshots(argument)
    raise MusterError(f"unknown verb {verb!r}")


def _run_checks(runs: Path) -> list[dict[str, Any]]:
    """Run the checks of this host, with this folder for runs; return the findings."""
    from torchmuster.diagnose.check import Surroundings
    from torchmuster.diagnose.host_checks import run_checks
    from torchmuster.diagnose.machine import all_checks

    findings = run_checks(Surroundings(folder=runs), all_checks.load())
    return [finding.as_json() for finding in findings]


async def reply_to(line: bytes) -> dict[str, Any]:
    """Return the reply to a line: the answer, or the error."""
    number = None
    try:
        request = json.loads(line)
        number = request["id"]
        return {"id": number, "answer": await answer_request(request["verb"], request["argument"])}
    except MusterError as error:
        refusal = {"what": error.what, "why": error.why, "fix": error.fix}
    except Exception as error:  # the caller must get every error
        refusal = {"what": f"{type(error).__name__}: {error}"}
    return {"id": number, "error": refusal}


async def _main() -> None:
    # Output that a library prints must not mix with the answers.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # In a thread, because not every system supports pipes in an event loop.
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        print(json.dumps(await reply_to(line)), file=out, flush=True)
    os._exit(0)  # a hanging check must not block the exit


if __name__ == "__main__":
    asyncio.run(_main())
