"""Kill parts of trainings in real pods at random, and measure the time until the next step.

    python benchmarks/pod_kills.py [--trainings 5] [--kills 6] [--seed 0] [--out docs/measured/pods.md]

The pods are those of the lab in tests/pods: three with two ranks of ``muster train`` each, from the manifest that ``muster
kubernetes render`` prints. Each training gets ``--kills`` random kills, and its weights and losses must be bitwise equal to those of
a training on one machine that nothing disturbed. Needs root and podman.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from pods.lab import PodLab  # noqa: E402
from pods.training import (  # noqa: E402
    KILLS,
    NODES,
    RANKS_PER_NODE,
    Kill,
    Result,
    Training,
    training_files,
    undisturbed,
)

_STEPS_BETWEEN = 12
_WITHIN_S = 420.0
TRAIN = ("--max-restarts", "20", "--", "muster", "train", "--config", "config.yaml")


class NotRecovered(Exception):
    """No step followed a kill."""


def recovery_s(training: Training, kill: Kill, index: int) -> float:
    """Kill, and return the seconds until all new ranks have finished a step."""
    at_s = kill.strike(training.job.pod(index))
    until_s = time.monotonic() + _WITHIN_S
    while (stepped_s := training.recovered_s(at_s)) is None:
        if time.monotonic() > until_s or training.job.done:
            logs = training.job.logs()
            raise NotRecovered(f"{kill.name}, pod {index}\n{logs[-12000:]}")
        time.sleep(0.1)
    return stepped_s - at_s


def render(
    found: Mapping[str, Sequence[float | None]],
    *,
    trainings: int,
    equal: int,
    loads: Sequence[float],
) -> str:
    """Return the times by kind of kill as a Markdown page."""
    count = sum(map(len, found.values()))
    lines = [
        "# Kills of pods",
        "",
        f"Written by `benchmarks/pod_kills.py`: {NODES} pods of podman with {RANKS_PER_NODE} ranks of `muster train` each, from the manifest of "
        f"`muster kubernetes render --kind job --grace 10s`, all on {os.cpu_count()} cores that other work shared (load {min(loads):.0f} to {max(loads):.0f}, "
        f"median {statistics.median(loads):.0f}). The time runs from the kill to the first step of all new ranks. A pod is replaced at once, without "
        "the back-off of Kubernetes.",
        "",
        f"{count} kills at random in {trainings} trainings; {equal} of {trainings} ended with weights and losses that are bitwise equal to those of an "
        "undisturbed training on one machine.",
        "",
        "| killed | kills | never recovered | median | worst |",
        "|---|---|---|---|---|",
    ]
    for name, tried in found.items():
        times = [took_s for took_s in tried if took_s is not None]
        cells = [f"{statistics.median(times):.1f} s", f"{max(times):.1f} s"] if times else ["", ""]
        if tried:
            lost = len(tried) - len(times)
            lines.append(f"| {name} | {len(tried)} | {lost} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the trainings, print each kill, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trainings", type=int, default=5)
    parser.add_argument("--kills", type=int, default=6, help="kills in each training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    # Every kind equally often, in random order.
    total = options.trainings * options.kills
    kinds = (list(KILLS) * (total // len(KILLS) + 1))[:total]
    chance.shuffle(kinds)
    files = training_files(steps=_STEPS_BETWEEN * (options.kills + 1), pause_s=0.1)
    found: dict[str, list[float | None]] = {kill.name: [] for kill in KILLS}
    loads: list[float] = []
    equal = 0
    with tempfile.TemporaryDirectory(prefix="pod-kills-") as name:
        work = Path(name)
        expected = undisturbed(work / "whole", files)
        for number in range(1, options.trainings + 1):
            with PodLab(work / f"lab-{number}", files) as lab:
                training = Training(lab, *TRAIN)
                chosen = [kinds.pop() for _ in range(options.kills)]
                same = disturb(training, chosen, chance, found, loads) and (
                    Result.of(training.runs) == expected
                )
            equal += same
            print(f"training {number}: bitwise equal: {same}", flush=True)
            page = render(found, trainings=number, equal=equal, loads=loads)
            if options.out:
                options.out.write_text(page)
    print(page)
    return 0 if equal == options.trainings else 1


def disturb(
    training: Training,
    kills: Sequence[Kill],
    chance: random.Random,
    found: Mapping[str, list[float | None]],
    loads: list[float],
) -> bool:
    """Kill again and again; return whether the training finished."""
    for number, kill in enumerate(kills, 1):
        training.await_step(_STEPS_BETWEEN * number)
        index = chance.choice(kill.indexes)
        loads.append(os.getloadavg()[0])
        try:
            took_s = recovery_s(training, kill, index)
        except NotRecovered as error:
            found[kill.name].append(None)
            print(f"never recovered: {error}", flush=True)
            return False
        found[kill.name].append(took_s)
        print(f"{kill.name}, pod {index}: {took_s:.1f} s at load {loads[-1]:.1f}", flush=True)
    return training.wait() == "Complete"


if __name__ == "__main__":
    sys.exit(main())
