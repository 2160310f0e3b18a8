"""Turn the records of the collectives probe into findings that name rank, host and device."""

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torchmuster.diagnose import wrong_values
from torchmuster.diagnose.blame import Blamed, blame
from torchmuster.diagnose.rank_record import RankRecord
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status

_SLOW_DEVICE = 0.6  # of the median of the others of its model
_SLOW_PAIR = 0.15  # of the median of the others of its kind
_SLOW_PAIR_BYTES_PER_S = 40e6  # slower than a busy processor alone can explain
_SLOW_SHOWN = 6
_STAGES = {
    "group": "creating the process group",
    "devices": "the device test",
    "collectives": "the collectives",
    "suspects": "the search for wrong sums",
    "pairs": "the point-to-point test",
}
_SHOWN = 6


def judge_slowness(records: Sequence[RankRecord]) -> list[Finding]:
    """Return what slows the group down: slow or hot devices, slow pairs."""
    return [*_slow_devices(records), *_hot(records), *_slow_pairs(records)]


def _slow_devices(records: Sequence[RankRecord]) -> Iterator[Finding]:
    slow = {record.rank: share for record in records if (share := _share(record, records))}
    for host in dict.fromkeys(record.host for record in records):
        there = [record for record in records if record.host == host]
        guilty = [record for record in there if record.rank in slow]
        if not guilty:
            continue
        worst = min(slow[record.rank] for record in guilty)
        whole = len(guilty) == len(there) and (len(there) > 1 or there[0].device == "cpu")
        if whole:
            yield _slow(f"{host} computes", "slow-host", guilty, worst)
        else:
            for record in guilty:
                yield _slow(f"{record.where} computes", "slow-device", [record], slow[record.rank])


def _share(record: RankRecord, records: Sequence[RankRecord]) -> float | None:
    """Return a device's speed relative to others of its model, if it is slow; else None."""
    for own in record.matmuls:
        others = [
            matmul.flops_per_s
            for other in records
            if other.rank != record.rank and other.device_name == record.device_name
            for matmul in other.matmuls
            if matmul.precision == own.precision
        ]
        if others and own.flops_per_s < _SLOW_DEVICE * statistics.median(others):
            return own.flops_per_s / statistics.median(others)
    return None


def _slow(subject: str, name: str, guilty: Sequence[RankRecord], share: float) -> Finding:
    first = guilty[0]
    if first.is_amd:
        fix = f"check the clocks of the GPU on {first.host}\namd-smi metric --clock --power --temperature"
    elif first.device_uuid:
        fix = f"check the clocks of the GPU on {first.host}\nnvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE"
    else:
        fix = f"check other processes and the CPU clock on {first.host}\ntop\nlscpu"
    return Finding(
        name=name,
        status=Status.WARNING,
        what=f"{subject} at {max(share, 0.01):.0%} of the speed of the others",
        why="in a distributed run all ranks wait for the slowest, at every step",
        fix=fix,
        evidence="\n".join(
            f"rank {record.rank}, {record.device_name}: "
            + ", ".join(
                f"{matmul.flops_per_s / 1e9:,.0f} GFLOP/s {matmul.precision}"
                for matmul in record.matmuls
            )
            for record in guilty[:_SLOW_SHOWN]
        ),
        hosts=(first.host,),
    )


def _hosts_of(records: Iterable[RankRecord]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(record.host for record in records))


def _hot(records: Iterable[RankRecord]) -> Iterator[Finding]:
    for record in records:
        if record.health is None or not record.health.throttled_by:
            continue
        causes = record.health.throttled_by
        heat = any("heat" in cause for cause in causes)
        now = record.health.temperature_c
        # A GPU at its power limit works as designed.
        harmless = set(causes) == {"power limit"}
        yield Finding(
            name="gpu-hot" if heat else "gpu-throttled",
            status=Status.NOTE if harmless else Status.WARNING,
            what=f"{record.where} is throttled under load: {', '.join(causes)}",
            why="in a distributed run all other ranks wait for it",
            fix="check the fans, the airflow and the room temperature"
            if heat
            else "check its power supply and limit\nnvidia-smi -q -d POWER,PERFORMANCE",
            evidence="" if now is None else f"{now} °C after 1 s of work",
            hosts=(record.host,),
        )


def _slow_pairs(records: Sequence[RankRecord]) -> Iterator[Finding]:
    by_rank = {record.rank: record for record in records}
    speeds: dict[bool, dict[tuple[int, int], float]] = {True: {}, False: {}}
    for record in records:
        for pair in record.pairs:
            if record.rank < pair.peer in by_rank and pair.bytes_per_s:
                inside = by_rank[pair.peer].host == record.host
                speeds[inside][record.rank, pair.peer] = pair.bytes_per_s
    for inside, kind in speeds.items():
        slow = {
            pair: speed for pair, speed in kind.items() if _is_slow(pair, kind, inside, by_rank)
        }
        for names, pairs in _by_common_end(slow, kind, by_rank):
            median = statistics.median(kind.values())
            yield finding(
                "slow-pair",
                hosts=_hosts_of(by_rank[rank] for pair in pairs for rank in pair),
                names=names,
                pairs=min(slow[pair] for pair in pairs) / 1000000.0,
                median=median / 1000000.0,
                evidence=", ".join(
                    (
                        f"ranks {low} and {high}: {slow[low, high] / 1000000.0:,.0f} MB/s"
                        for low, high in pairs[:_SLOW_SHOWN]
                    )
                ),
            )


def _is_slow(
    pair: tuple[int, int],
    kind: dict[tuple[int, int], float],
    inside: bool,
    by_rank: dict[int, RankRecord],
) -> bool:
    on_gpu = by_rank[pair[0]].device != "cpu"
    others = [speed for other, speed in kind.items() if other != pair]
    # Within a host, NVLink may connect only some of the GPUs, which is normal.
    if len(others) < 2 or (inside and on_gpu):
        return False
    few = kind[pair] < _SLOW_PAIR * statistics.median(others)
    return few and (on_gpu or kind[pair] < _SLOW_PAIR_BYTES_PER_S)


def _by_common_end(
    slow: Collection[tuple[int, int]],
    known: Collection[tuple[int, int]],
    by_rank: Mapping[int, RankRecord],
) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield slow pairs; if all pairs of a rank are slow, group them under that rank."""
    for cause in blame(_both_ways(slow), _both_ways(known)):
        pairs = sorted({(min(pair), max(pair)) for pair in cause.directions})
        if cause.end is not None:
            yield f"{by_rank[cause.end].where} and the others", pairs
        elif cause.kind is Blamed.EVERYTHING:
            yield "all ranks", pairs
        else:
            low, high = pairs[0]
            yield f"{by_rank[low].where} and {by_rank[high].where}", pairs


def _both_ways(pairs: Collection[tuple[int, int]]) -> set[tuple[int, int]]:
    return {*pairs, *((high, low) for low, high in pairs)}


def judge_collectives(
    records: Sequence[RankRecord], second: Sequence[RankRecord] | None = None
) -> list[Finding]:
    """Return the findings about a group of ranks; empty if it is healthy.

    ``second`` are the records of another try with the variables from ``second_try``.
    """
    hangs = list(_hangs(records))
    return [
        *hangs,
        *([] if hangs else _errors(records)),  # errors during a hang are its consequences
        *wrong_values.judge_values(records, second),
        *judge_slowness(records),
        *_backend(records),
    ]


def _hangs(records: Sequence[RankRecord]) -> Iterator[Finding]:
    """Yield one finding for a hang: the ranks that the others wait for, and the stage."""
    waiting = [
        record
        for record in records
        if record.trouble and record.trouble.problem in ("absent", "hangs")
    ]
    silent = [record for record in records if not record.ended and not record.trouble]
    size = records[0].world_size if records else 0
    unheard = sorted(set(range(size)) - {record.rank for record in records})
    if not waiting and not silent and not unheard:
        return
    stage = min(
        (
            record.trouble.stage if record.trouble else record.stage
            for record in (*waiting, *silent)
        ),
        key=lambda name: list(_STAGES).index(name) if name in _STAGES else len(_STAGES),
        default="group",
    )
    votes: Counter[int] = Counter()
    for item in waiting:
        assert item.trouble is not None
        votes.update(item.trouble.ranks)
    missing = sorted({*unheard, *(record.rank for record in silent), *votes})
    by_rank = {record.rank: record for record in records}
    names = [by_rank[rank].where if rank in by_rank else f"rank {rank}" for rank in missing]
    hosts = sorted({by_rank[rank].host for rank in missing if rank in by_rank})
    shown = ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
    what = f"{_STAGES.get(stage, stage)} did not finish on any rank"
    if missing:
        verb = "does" if len(missing) == 1 else "do"
        what = f"{shown} {verb} not take part in {_STAGES.get(stage, stage)}: all other ranks wait"
    yield finding(
        "collective-hangs",
        hosts=tuple(hosts),
        what=what,
        fix_detail=f"check the state of the processes on {', '.join(hosts)}: stopped (T), waiting for a disk (D)?\nps -eo pid,stat,pcpu,wchan:24,args --sort=-pcpu"
        if hosts
        else "check the links between the hosts: muster check names the blocked ones",
        evidence=", ".join(
            f"rank {record.rank}: {record.trouble.problem} in {record.trouble.stage}"
            for record in waiting[:_SHOWN]
            if record.trouble
        ),
    )


def _errors(records: Sequence[RankRecord]) -> Iterator[Finding]:
    failed = [record for record in records if record.trouble and record.trouble.problem == "error"]
    if not failed:
        return
    first = failed[0]
    assert first.trouble is not None
    yield finding(
        "collective-fails",
        hosts=(first.host,),
        where=first.where,
        stages=_STAGES.get(first.trouble.stage, first.trouble.stage),
        text=first.trouble.text,
        evidence="\n".join(
            f"rank {record.rank} on {record.host}: {record.trouble.text}"
            for record in failed[:_SHOWN]
            if record.trouble
        ),
    )


def _backend(records: Sequence[RankRecord]) -> Iterator[Finding]:
    with_gpu = [record for record in records if record.accelerator and record.backend == "gloo"]
    if not with_gpu:
        return
    without = [record for record in records if not record.accelerator and record.backend]
    yield finding(
        "gloo-beside-gpus",
        with_gpu=len(with_gpu),
        records=len(records),
        backend_reason=with_gpu[0].backend_reason,
        fix_detail=f"give every rank its own GPU, including on {', '.join(sorted({o.host for o in without}))}"
        if without
        else "give every rank its own GPU and use a torch build with NCCL",
    )
