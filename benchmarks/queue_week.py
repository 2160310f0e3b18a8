"""A week of a group that shares one server with 8 GPUs: waiting times and use of the GPUs under three rules for the queue.

    python benchmarks/queue_week.py --weeks 20

The arrivals are synthetic, drawn from the distributions below; no real log was used. The rules see the same arrivals. No
process is started: the first-come rules are a few lines here, the rule of ``muster queue`` is the product's own function.
Writes ``docs/measured/queue-week.md`` and its picture.
"""

import argparse
import heapq
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.devices.model import Device, DeviceKind, Node
from torchmuster.devices.queue import LONG_WAIT_S, plan_queue, promise_to
from torchmuster.devices.request import Claim, DeviceRequest
from torchmuster.devices.tickets import QueuedJob, WaitingRequest
from torchmuster.pages.charts import RULES, Axis, Curve, line_chart

ROOT = Path(__file__).parents[1]
GPUS = 8
HOUR = 3600.0
WEEK_S = 7 * 24 * HOUR
USERS = {"ann": 8, "ben": 5, "cem": 3, "dan": 2, "eve": 1, "fay": 1}  # how often each submits
SIZES = {1: 55, 2: 20, 4: 17, 8: 8}
SUBMISSIONS_A_WEEK = 105
SWEEP, SWEEP_JOBS = 0.06, 10  # so often a submission is a sweep of so many jobs with one GPU
MEDIAN_S, SIGMA = 1.2 * HOUR, 1.2  # of the duration, log-normal
SHORTEST_S, LONGEST_S = 0.1 * HOUR, 36 * HOUR
# By hour of the day, how often people submit.
BY_HOUR = [1] * 8 + [6] * 12 + [2] * 4


@dataclass(frozen=True, kw_only=True)
class Job:
    """One arrival. ``limit_s`` is the time limit that its user gives: the duration times 1.1 to 3."""

    number: int
    user: str
    arrival_s: float
    gpus: int
    length_s: float
    limit_s: float


def draw_week(seed: int) -> list[Job]:
    """Draw the arrivals of a week."""
    chance = random.Random(seed)
    jobs: list[Job] = []
    for _ in range(SUBMISSIONS_A_WEEK):
        (hour,) = chance.choices(range(24), BY_HOUR)
        (day,) = chance.choices(range(7), [5, 5, 5, 5, 5, 2, 2])
        (user,) = chance.choices(list(USERS), list(USERS.values()))
        (gpus,) = chance.choices(list(SIZES), list(SIZES.values()))
        at = (day * 24 + hour + chance.random()) * HOUR
        is_sweep = chance.random() < SWEEP
        for _ in range(SWEEP_JOBS if is_sweep else 1):
            length = chance.lognormvariate(math.log(MEDIAN_S), SIGMA)
            length = min(max(length, SHORTEST_S), LONGEST_S)
            jobs.append(
                Job(
                    number=len(jobs),
                    user=user,
                    arrival_s=at,
                    gpus=1 if is_sweep else gpus,
                    length_s=length,
                    limit_s=length * chance.uniform(1.1, 3.0),
                )
            )
    return sorted(jobs, key=lambda job: (job.arrival_s, job.number))


Starts = dict[int, float]


def first_come(jobs: Sequence[Job], *, skips: bool) -> Starts:
    """Serve by arrival; ``skips``: a request that does not fit lets later ones pass (until now, ``--wait``)."""
    starts: Starts = {}
    waiting: list[Job] = []
    running: list[tuple[float, int]] = []
    to_come = list(jobs)
    free = GPUS
    while to_come or waiting:
        arrival = to_come[0].arrival_s if to_come else math.inf
        now = min(arrival, running[0][0] if running else math.inf)
        while running and running[0][0] <= now:
            free += heapq.heappop(running)[1]
        while to_come and to_come[0].arrival_s <= now:
            waiting.append(to_come.pop(0))
        for job in list(waiting):
            if job.gpus <= free:
                free -= job.gpus
                starts[job.number] = now
                heapq.heappush(running, (now + job.length_s, job.gpus))
                waiting.remove(job)
            elif not skips:
                break
    return starts


def _server() -> Node:
    def device(index: int, kind: DeviceKind) -> Device:
        return Device(
            kind=kind,
            index=index,
            uuid=f"{kind}-{index}",
            name="GPU",
            total_bytes=2**36,
            used_bytes=0,
        )

    gpus = tuple(device(index, DeviceKind.CUDA) for index in range(GPUS))
    return Node(
        hostname="server", taken_unix_s=0.0, accelerators=gpus, cpu=device(0, DeviceKind.CPU)
    )


def by_the_rule(jobs: Sequence[Job], *, limited: float) -> Starts:
    """Serve by the rule of ``muster queue``; this share of the jobs has a time limit."""
    node, starts = _server(), Starts()
    claims: dict[str, Claim] = {}
    ends: dict[str, float] = {}
    to_come = list(jobs)
    waiting: dict[str, tuple[Job, WaitingRequest]] = {}
    now = -1.0
    while to_come or waiting:
        arrival = to_come[0].arrival_s if to_come else math.inf
        long_from = [one.job.ready_unix_s + LONG_WAIT_S for _, one in waiting.values()]
        now = min([arrival, *ends.values(), *(time_s for time_s in long_from if time_s > now)])
        for uuid in [uuid for uuid, end in ends.items() if end <= now]:
            del ends[uuid], claims[uuid]
        while to_come and to_come[0].arrival_s <= now:
            job = to_come.pop(0)
            request = _request(job, limited=(job.number * 7919) % 100 < 100 * limited)
            waiting[request.ticket] = (job, request)
        plan = plan_queue(node, [one for _, one in waiting.values()], claims, now_unix_s=now)
        for ticket, uuids in plan.grants.items():
            job, request = waiting.pop(ticket)
            starts[job.number] = now
            for uuid in uuids:
                claims[uuid], ends[uuid] = promise_to(request, now), now + job.length_s
    return starts


def _request(job: Job, *, limited: bool) -> WaitingRequest:
    return WaitingRequest(
        ticket=f"{job.number:05d}",
        pid=1,
        uid=1,
        user=job.user,
        request=DeviceRequest(count=job.gpus),
        job=QueuedJob(
            since_unix_s=job.arrival_s,
            ready_unix_s=job.arrival_s,
            lasts_s=job.limit_s if limited else None,
        ),
    )


RULES_OF_QUEUE: dict[str, Callable[[Sequence[Job]], Starts]] = {
    "first come, first served": lambda jobs: first_come(jobs, skips=False),
    "first fit (before)": lambda jobs: first_come(jobs, skips=True),
    "`muster queue`, no time limits": lambda jobs: by_the_rule(jobs, limited=0.0),
    "`muster queue`, half with limits": lambda jobs: by_the_rule(jobs, limited=0.5),
    "`muster queue`, all with limits": lambda jobs: by_the_rule(jobs, limited=1.0),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The weeks under one rule: waiting times in hours, and use of the GPUs within the week."""

    waits: list[tuple[Job, float]]
    use: float
    worst_user: float

    def mean(self, gpus: int | None = None) -> float:
        """Return the mean wait of all jobs, or of those with so many GPUs."""
        return statistics.fmean(wait for job, wait in self.waits if gpus in (None, job.gpus))

    def quantile(self, part: float) -> float:
        """Return the wait that this part of the jobs does not exceed."""
        waits = sorted(wait for _, wait in self.waits)
        return waits[min(int(part * len(waits)), len(waits) - 1)]


def judge(weeks: Sequence[Sequence[Job]], rule: Callable[[Sequence[Job]], Starts]) -> Outcome:
    """Run all weeks under a rule."""
    waits: list[tuple[Job, float]] = []
    used_s = 0.0
    worst: list[float] = []
    for jobs in weeks:
        starts = rule(jobs)
        week = [(job, (starts[job.number] - job.arrival_s) / HOUR) for job in jobs]
        waits += week
        used_s += sum(
            job.gpus * max(0.0, min(starts[job.number] + job.length_s, WEEK_S) - starts[job.number])
            for job in jobs
        )
        means = [
            statistics.fmean(w for job, w in week if job.user == user)
            for user in {job.user for job in jobs}
        ]
        worst.append(max(means))
    use = used_s / (len(weeks) * WEEK_S * GPUS)
    return Outcome(waits=waits, use=use, worst_user=statistics.fmean(worst))


TEMPLATE = """# Waiting times of a simulated group

`benchmarks/queue_week.py --weeks {weeks}` simulates {weeks} weeks of a group of six people with one server of {gpus} GPUs. **The arrivals are
synthetic**: no log of a real group was used. No processes run; `muster queue` is the product's own function, the other two rules are a few lines
of the script. All rules get the same arrivals.

| drawn | distribution |
|---|---|
| submissions | {submissions} in a week, most of them from 8 to 20 o'clock, fewer at weekends |
| users | six; the busiest submits eight times as often as the least busy |
| GPUs | 1: 55 %, 2: 20 %, 4: 17 %, 8: 8 % |
| sweeps | {sweep:.0f} % of the submissions are {sweep_jobs} jobs with one GPU |
| duration | log-normal, median {median:.1f} h, sigma {sigma}; between 6 min and 36 h |
| time limit | 1.1 to 3 times the duration |

The {jobs} jobs request {load:.0f} % of the GPU hours of the weeks.

| rule | mean wait | median | 95 % | longest | mean, 1 GPU | mean, 8 GPUs | user with the longest mean | GPUs in use |
|---|---|---|---|---|---|---|---|---|
{rows}

Waits are in hours. "User with the longest mean" is the mean over the weeks. "GPUs in use" counts the GPU hours used within the weeks.

![Share of jobs that have started, by hours waited](../images/queue-week.svg)

{reading}
"""


def reading(outcomes: dict[str, Outcome]) -> str:
    """Return what the table shows."""
    _, fit, unlimited, _, limited = outcomes.values()
    return (
        f"- Without time limits, the longest wait is {unlimited.quantile(1):.0f} h instead of {fit.quantile(1):.0f} h with first fit, "
        f"and the mean wait is {unlimited.mean():.1f} h\n  instead of {fit.mean():.1f} h: when a request has waited for "
        f"{LONG_WAIT_S / HOUR:.0f} h, freed GPUs are kept for it.\n"
        f"- If all jobs have time limits, the mean wait is {limited.mean():.1f} h, jobs with 8 GPUs wait {limited.mean(8):.1f} h instead of "
        f"{fit.mean(8):.1f} h, and the user\n  with the longest mean waits {limited.worst_user:.1f} h instead of {fit.worst_user:.1f} h.\n"
        "- The use of the GPUs hardly differs, because these weeks request only about half of the GPU hours."
    )


def main() -> None:
    """Simulate, and write the page and its picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weeks", type=int, default=20)
    weeks = [draw_week(seed) for seed in range(parser.parse_args().weeks)]
    outcomes: dict[str, Outcome] = {}
    for name, rule in RULES_OF_QUEUE.items():
        outcomes[name] = one = judge(weeks, rule)
        print(
            f"{name}: mean {one.mean():.2f} h, 8 GPUs {one.mean(8):.1f} h, use {one.use:.1%}",
            flush=True,
        )
    rows = [
        f"| {name} | {one.mean():.1f} | {one.quantile(0.5):.1f} | {one.quantile(0.95):.1f} | {one.quantile(1):.0f} "
        f"| {one.mean(1):.1f} | {one.mean(8):.1f} | {one.worst_user:.1f} | {100 * one.use:.0f} % |"
        for name, one in outcomes.items()
    ]
    asked_s = sum(job.gpus * job.length_s for jobs in weeks for job in jobs)
    text = TEMPLATE.format(
        weeks=len(weeks),
        gpus=GPUS,
        submissions=SUBMISSIONS_A_WEEK,
        sweep=100 * SWEEP,
        sweep_jobs=SWEEP_JOBS,
        median=MEDIAN_S / HOUR,
        sigma=SIGMA,
        jobs=sum(map(len, weeks)),
        load=100 * asked_s / (len(weeks) * WEEK_S * GPUS),
        rows="\n".join(rows),
        reading=reading(outcomes),
    )
    (ROOT / "docs" / "measured" / "queue-week.md").write_text(text)
    hours = [0, 0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 10, 12, 15, 18, 24, 30, 36, 48]
    curves = [
        Curve(
            name=name.replace("`muster queue`", "rule").replace(
                "first come, first served", "first come"
            ),
            points=[
                (hour, statistics.fmean(wait <= hour for _, wait in one.waits)) for hour in hours
            ],
            marked=False,
        )
        for name, one in outcomes.items()
    ]
    drawn = line_chart(
        f"Jobs that have started, {len(weeks)} simulated weeks (synthetic arrivals)",
        Axis(title="hours waited"),
        Axis(title="share of the jobs", from_zero=False),
        curves,
        width=960,
    )
    styled = drawn.replace("</title>", f"</title><style>{RULES}</style>", 1)
    (ROOT / "docs" / "images" / "queue-week.svg").write_text(styled + "\n")


if __name__ == "__main__":
    main()
