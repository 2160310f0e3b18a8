"""Run folders as launchers, node agents and ranks leave them, of runs that never were."""

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import msgspec

from torchmuster.launch.heartbeat import Heartbeat
from torchmuster.launch.history import node_records, run_state
from torchmuster.runfolder import RunFolder, create_run_folder

NOW = 2_000_000_000.0
LINE: dict[str, Any] = {
    "step": 10,
    "epoch": 0,
    "loss": 2.5,
    "learning_rate": 1e-4,
    "gradient_norm": None,
    "samples_per_s": 640.0,
    "tokens_per_s": None,
    "step_s": 2.0,
    "data_share": 0.1,
    "compute_share": 0.6,
    "communication_share": 0.2,
    "checkpoint_share": 0.1,
    "evaluation_share": 0.0,
    "skipped_steps": 1,
    "memory_peak_bytes": 1000,
}


def a_run(folder: Path, name: str = "llm", phase: str = "running", headline: str = "") -> RunFolder:
    """Make a run that was started 100 s ago and is in a phase since 10 s."""
    run = create_run_folder(folder / "runs", name)
    set_state(run, phase, headline)
    return run


def set_state(
    run: RunFolder,
    phase: str,
    headline: str = "",
    *,
    lasted_s: float = 100.0,
    now: float = NOW,
    **facts: object,
) -> None:
    """Log the phase of a run 10 s ago, and its launch if nothing is logged yet."""
    if not run.events.exists():
        add_event(run, run_state.LAUNCHED, now - lasted_s)
    add_event(run, phase, now - 10, headline=headline, **facts)


def add_lines(run: RunFolder, count: int = 10, *, now: float = NOW, **changed: object) -> None:
    """Write lines about steps 10, 20, …, with a loss that falls like 10, 5, 3.3, …."""
    write_lines(
        run,
        [
            LINE
            | {"step": 10 * at, "loss": 10.0 / at, "samples_per_s": 600.0 + at, "skipped_steps": 0}
            | changed
            for at in range(1, count + 1)
        ],
        now=now,
    )


def write_lines(run: RunFolder, lines: list[dict[str, Any]], *, now: float = NOW) -> None:
    """Write lines about steps, the last of them just now."""
    path = run.metrics / "steps.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    os.utime(path, (now, now))


def add_ranks(
    run: RunFolder,
    count: int,
    *,
    slow: int | None = None,
    silent_s: float = 0.0,
    host: str = "a",
    step: int | None = None,
    now: float = NOW,
    spread: float = 0.0,
) -> None:
    """Write what ranks are doing: each waits for others 40 % of its time, but the slow one."""
    drawn = random.Random(0)
    heartbeats = tuple(
        Heartbeat(
            rank=rank,
            pid=rank,
            beat=1,
            moves=1,
            step=None if step is None else step - (rank == slow),
            data_share=0.1 + spread * drawn.random(),
            communication_share=0.0 if rank == slow else 0.4 + spread * drawn.random(),
            silent_s=silent_s,
        )
        for rank in range(count)
    )
    content = node_records.NodeRanks(host=host, attempt=0, at_unix_s=now, ranks=heartbeats)
    path = node_records.node_record_path(run, host, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(content))


def add_event(run: RunFolder, name: str, at_unix_s: float, **facts: object) -> None:
    """Write an event as the launcher does, at a time of one's own."""
    with (run.events).open("a") as stream:
        stream.write(json.dumps({**facts, "at_unix_s": at_unix_s, "event": name}) + "\n")


def lifelike_lines(count: int, *, bad_from: int | None = None) -> list[dict[str, Any]]:
    """Return lines of a training of some length: noise, a warm-up, an evaluation now and then, a slow hour."""
    drawn = random.Random(1)
    lines = []
    for at in range(1, count + 1):
        done = at / count
        slow = 0.62 < done < 0.7
        noise = drawn.gauss(0, 0.03)
        rate = 3e-4 * min(1.0, done / 0.05) * 0.5 * (1 + math.cos(math.pi * done))
        loss: float | None = 2.1 + 8.0 * math.exp(-6 * done) + noise
        if bad_from is not None and at >= bad_from:
            loss = None
        data = 0.34 if slow else 0.05
        lines.append(
            LINE
            | {
                "step": 50 * at,
                "loss": loss,
                "learning_rate": rate,
                "gradient_norm": 1.0 + abs(noise) * 10,
                "samples_per_s": (410 if slow else 640) * (1 + noise / 2),
                "tokens_per_s": (410 if slow else 640) * 2048 * (1 + noise / 2),
                "step_s": (1.25 if slow else 0.8) * (1 - noise / 2),
                "data_share": data,
                "communication_share": 0.17,
                "checkpoint_share": 0.02,
                "evaluation_share": 0.01,
                "compute_share": 0.8 - data,
                "skipped_steps": 0,
                "memory_peak_bytes": 61 * 2**30,
            }
        )
    return lines
