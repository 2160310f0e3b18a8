"""Situations for each alert, as series that change from minute to minute: some that raise it, some that must not."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.monitor import catalogue
from torchmuster.monitor.metric import Metric

RUN = {"job": "llm", "run": "r1"}
RANKS = [{**RUN, "host": "a", "rank": str(rank)} for rank in range(2)]
GPU = {"host": "a", "gpu_uuid": "GPU-1"}
HOST = {"host": "a"}
Series = tuple[Metric, dict[str, str], Sequence[float]]


@dataclass(frozen=True)
class Scenario:
    """Series with one value a minute; whether the alert is raised at their end."""

    alert: str
    why: str
    series: tuple[Series, ...]
    raised: bool


def _phase(phase: str, minutes: int) -> Series:
    return (catalogue.RUN_PHASE, {**RUN, "phase": phase}, [1.0] * minutes)


def _of_a_run(
    alert: str, metric: Metric, values: Sequence[float], *, raised: bool, why: str, **more: str
) -> Scenario:
    own: Series = (metric, {**RUN, **more}, values)
    return Scenario(alert, why, (own, _phase("running", len(values))), raised)


def _ended(alert: str, phase: str) -> list[Scenario]:
    return [
        Scenario(alert, f"it is {phase}", (_phase(phase, 2),), raised=True),
        Scenario(alert, "it is running", (_phase("running", 2),), raised=False),
    ]


SCENARIOS: list[Scenario] = [
    _of_a_run("MusterStalled", catalogue.STEP_AGE, [10, 70, 310], raised=True, why="no step"),
    _of_a_run("MusterStalled", catalogue.STEP_AGE, [10, 70, 5], raised=False, why="it goes on"),
    Scenario(
        "MusterStalled",
        "a run that is over takes no steps",
        ((catalogue.STEP_AGE, RUN, [500.0]), _phase("finished", 1)),
        raised=False,
    ),
    _of_a_run("MusterLossNotANumber", catalogue.LOSS, [2, math.nan], raised=True, why="NaN"),
    _of_a_run("MusterLossNotANumber", catalogue.LOSS, [2, 1e30], raised=False, why="only large"),
    _of_a_run("MusterLossSpike", catalogue.LOSS, [2] * 9 + [7] * 4, raised=True, why="x 3.5"),
    _of_a_run("MusterLossSpike", catalogue.LOSS, [2] * 9 + [5] * 4, raised=False, why="x 2.5"),
    _of_a_run("MusterLossSpike", catalogue.LOSS, [2] * 9 + [9, 9, 2], raised=False, why="short"),
    _of_a_run("MusterLossSpike", catalogue.LOSS, [-1] * 13, raised=False, why="a log-likelihood"),
    _of_a_run(
        "MusterSkippedSteps",
        catalogue.SKIPPED_STEPS,
        [float(one) for one in range(16)],
        raised=True,
        why="more and more",
    ),
    _of_a_run("MusterSkippedSteps", catalogue.SKIPPED_STEPS, [3.0] * 16, raised=False, why="old"),
    _of_a_run(
        "MusterDataStarved", catalogue.TIME_SHARE, [0.4] * 7, raised=True, why="40 %", part="data"
    ),
    _of_a_run(
        "MusterDataStarved", catalogue.TIME_SHARE, [0.1] * 7, raised=False, why="10 %", part="data"
    ),
    _of_a_run(
        "MusterDataStarved",
        catalogue.TIME_SHARE,
        [0.9] * 7,
        raised=False,
        why="it computes",
        part="compute",
    ),
    Scenario(
        "MusterStraggler",
        "rank 0 waits for rank 1",
        (
            (catalogue.RANK_WAITING, RANKS[0], [0.5] * 7),
            (catalogue.RANK_WAITING, RANKS[1], [0.1] * 7),
            _phase("running", 7),
        ),
        raised=True,
    ),
    Scenario(
        "MusterStraggler",
        "both wait alike",
        (
            (catalogue.RANK_WAITING, RANKS[0], [0.5] * 7),
            (catalogue.RANK_WAITING, RANKS[1], [0.45] * 7),
            _phase("running", 7),
        ),
        raised=False,
    ),
    _of_a_run(
        "MusterCheckpointOld",
        catalogue.CHECKPOINT_AGE,
        [10_801.0 + 60.0 * minute for minute in range(8)],
        raised=True,
        why="none for 3 h",
    ),
    _of_a_run(
        "MusterCheckpointOld",
        catalogue.CHECKPOINT_AGE,
        [10_000.0 + 60.0 * minute for minute in range(8)],
        raised=False,
        why="none for less",
    ),
    _of_a_run("MusterGoodputLow", catalogue.GOODPUT, [0.4] * 32, raised=True, why="40 %"),
    _of_a_run(
        "MusterGoodputLow", catalogue.GOODPUT, [0.4] * 20 + [0.6], raised=False, why="better"
    ),
    *(
        Scenario(
            "MusterRanksLost",
            why,
            (
                (catalogue.RUN_RANKS, RUN, seen),
                (catalogue.RUN_RANKS_STARTED, RUN, started),
                _phase("running", 5),
            ),
            raised=raised,
        )
        for why, seen, started, raised in (
            ("half", [8, 8, 4, 4, 4], [8] * 5, True),
            ("more", [4, 4, 8, 8, 8], [8] * 5, False),
            ("they come one by one", [1, 3, 5, 6, 7], [8] * 5, False),
            ("gone on with half", [8, 8, 4, 4, 4], [8, 8, 4, 4, 4], False),
        )
    ),
    *_ended("MusterRunFailed", "failed"),
    *_ended("MusterLauncherDied", "died"),
    *_ended("MusterRunFinished", "finished"),
]


def _beside(
    alert: str, metric: Metric, limit: Metric, labels: dict[str, str], bad: float, good: float
) -> list[Scenario]:
    return [
        Scenario(
            alert,
            f"{value:g} of 100",
            ((metric, labels, [value] * 8), (limit, labels, [100.0] * 8)),
            raised=value == bad,
        )
        for value in (bad, good)
    ]


SCENARIOS += [
    *_beside(
        "MusterGpuHot",
        catalogue.GPU_TEMPERATURE,
        catalogue.GPU_SLOWDOWN_TEMPERATURE,
        GPU,
        bad=98,
        good=80,
    ),
    Scenario(
        "MusterGpuThrottled",
        "for ten minutes",
        ((catalogue.GPU_THROTTLED, {**GPU, "reason": "heat"}, [1.0] * 12),),
        raised=True,
    ),
    Scenario(
        "MusterGpuThrottled",
        "for three minutes",
        ((catalogue.GPU_THROTTLED, {**GPU, "reason": "heat"}, [1.0] * 4),),
        raised=False,
    ),
    Scenario(
        "MusterGpuMemoryErrors",
        "uncorrected",
        ((catalogue.GPU_ECC, {**GPU, "kind": "uncorrected"}, [1.0]),),
        raised=True,
    ),
    Scenario(
        "MusterGpuMemoryErrors",
        "corrected",
        ((catalogue.GPU_ECC, {**GPU, "kind": "corrected"}, [9.0]),),
        raised=False,
    ),
    *_beside(
        "MusterGpuMemoryNearLimit",
        catalogue.GPU_MEMORY_USED,
        catalogue.GPU_MEMORY_USABLE,
        GPU,
        bad=99,
        good=90,
    ),
    *_beside(
        "MusterHostMemoryLow",
        catalogue.HOST_MEMORY_AVAILABLE,
        catalogue.HOST_MEMORY,
        HOST,
        bad=2,
        good=20,
    ),
    Scenario("MusterDiskFull", "1 GB", ((catalogue.HOST_DISK_FREE, HOST, [1e9] * 3),), raised=True),
    Scenario(
        "MusterDiskFull", "9 GB", ((catalogue.HOST_DISK_FREE, HOST, [9e9] * 3),), raised=False
    ),
]
