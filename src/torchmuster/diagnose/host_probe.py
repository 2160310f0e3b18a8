"""``python -m torchmuster.diagnose.host_probe``: serves requests about its host as JSON lines.

A request is ``{"id": 1, "verb": "examine", "argument": …}``, its answer ``{"id": 1, "answer": …}``
or ``{"id": 1, "error": {"what": …, "why": …, "fix": …}}``. Requests are handled in parallel and
answered as they complete. The program exits at the end of its input. It does not need torch.
"""

import asyncio
import importlib
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from torchmuster.errors import MusterError

# Imported on use: most requests need only one, and a failing import must not break the others.
VERBS = {
    "examine": "torchmuster.diagnose.host_probe:run_checks_here",
    "serve": "torchmuster.diagnose.links.serve:open_service",
    "call": "torchmuster.diagnose.links.call:call",
    "close": "torchmuster.diagnose.links.serve:close_service",
    "find-ranks": "torchmuster.diagnose.hang.rank_processes:find_ranks",
    "take-snapshots": "torchmuster.diagnose.hang.rank_stacks:take_snapshots",
}

Verb = Callable[[Any], Awaitable[Any]]


async def run_checks_here(argument: Any) -> list[dict[str, Any]]:
    """Run the checks of this host with ``folder`` for runs; return the findings."""
    from torchmuster.diagnose.check import Surroundings
    from torchmuster.diagnose.host_checks import run_checks
    from torchmuster.diagnose.machine import all_checks

    surroundings = Surroundings(folder=Path(argument["folder"]))
    results = await asyncio.to_thread(run_checks, surroundings, all_checks.load())
    return [finding.as_json() for result in results for finding in result.findings]


async def answer_request(question: Any) -> dict[str, Any]:
    """Return the answer to a request, or its error."""
    number = question.get("id") if isinstance(question, dict) else None
    try:
        return {"id": number, "answer": await _verb(question["verb"])(question.get("argument"))}
    except MusterError as error:
        return _error(number, error)
    except Exception as error:  # the caller must get every error
        return _error(number, MusterError(f"{type(error).__name__}: {error}"))


def _verb(name: str) -> Verb:
    if name not in VERBS:
        raise MusterError(f"unknown verb {name!r}", why=f"the verbs are {', '.join(VERBS)}")
    module, _, function = VERBS[name].partition(":")
    verb: Verb = getattr(importlib.import_module(module), function)
    return verb


def _error(number: object, error: MusterError) -> dict[str, Any]:
    return {"id": number, "error": {"what": error.what, "why": error.why, "fix": error.fix}}


async def _serve() -> None:
    # Output that a library prints must not mix with the answers.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    writing = asyncio.Lock()

    async def deal_with(line: bytes) -> None:
        try:
            reply = await answer_request(json.loads(line))
        except (ValueError, RecursionError) as error:
            reply = _error(None, MusterError(f"not a valid request: {error}"))
        async with writing:
            await asyncio.to_thread(print, json.dumps(reply), file=out, flush=True)

    tasks: set[asyncio.Task[None]] = set()
    lines = _lines()
    while (line := await lines.get()) is not None:
        task = asyncio.create_task(deal_with(line))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _lines() -> "asyncio.Queue[bytes | None]":
    """Return a queue of the lines of stdin, with None at its end.

    A thread reads them, because not every system supports pipes in an event loop.
    """
    lines: asyncio.Queue[bytes | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    return lines


async def _main() -> None:
    await _serve()
    os._exit(0)  # a hanging check must not block the exit


if __name__ == "__main__":
    asyncio.run(_main())
