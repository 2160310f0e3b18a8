"""Turn the records of the collectives probe into findings that name rank, host and device."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torchmuster.diagnose import wrong_values
from torchmuster.diagnose.blame import blame
from torchmuster.diagnose.rank_record import RankRecord
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status

_SHOWN = 6
_SLOW_DEVICE = 0.6  # of the median of the others of its model
_SLOW_PAIR = 0.15  # of the median of the others of its kind
_SLOW_PAIR_BYTES_PER_S = 40e6  # slower than a busy processor alone can explain
_STAGES = {
    "group": "creating the process group",
    "devices": "the device test",
    "collectives": "the collectives",
    "pairs": "the point-to-point test",
}


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
        *_slow_devices(records),
        *_hot(records),
        *_slow_pairs(records),
        *_backend(records),
    ]


def _hangs(records: Sequence[RankRecord]) -> Iterator[Finding]:
    """Yield one finding for a hang: the ranks that the others wait for, and the stage."""
    missing = set(range(records[0].world_size if records else 0))
    missing -= {record.rank for record in records}  # never heard of
    stages, lines = [], []
    for record in records:
        trouble = record.trouble
        if trouble is None and not record.ended:
            missing.add(record.rank)
            stages.append(record.stage)
        elif trouble is not None and trouble.problem in ("absent", "hangs"):
            missing |= set(trouble.ranks)
            stages.append(trouble.stage)
            lines.append(f"rank {record.rank}: {trouble.problem} in {trouble.stage}")
    if not missing and not stages:
        return
    order = list(_STAGES)
    stage = min(filter(order.__contains__, stages), key=order.index, default="group")
    what = f"{_STAGES[stage]} did not finish on any rank"
    fix = "check the links between the hosts: muster check names the blocked ones"
    where = {record.rank: record.where for record in records}
    names = [where.get(rank, f"rank {rank}") for rank in sorted(missing)]
    hosts = sorted({record.host for record in records if record.rank in missing})
    if names:
        shown = ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
        verb = "does" if len(names) == 1 else "do"
        what = f"{shown} {verb} not take part in {_STAGES[stage]}: all other ranks wait"
    if hosts:
        fix = (
            f"check the state of the processes on {', '.join(hosts)}: stopped (T), waiting for a "
            "disk (D)?\nps -eo pid,stat,pcpu,wchan:24,args --sort=-pcpu"
        )
    yield finding(
        "collective-hangs",
        hosts=tuple(hosts),
        what=what,
        fix_detail=fix,
        evidence=", ".join(lines[:_SHOWN]),
    )


def _errors(records: Sequence[RankRecord]) -> Iterator[Finding]:
    lines, failed = [], []
    for record in records:
        if record.trouble is not None and record.trouble.problem == "error":
            failed.append((record, record.trouble))
            lines.append(f"rank {record.rank} on {record.host}: {record.trouble.text}")
    for record, trouble in failed[:1]:
        yield finding(
            "collective-fails",
            hosts=(record.host,),
            where=record.where,
            stages=_STAGES.get(trouble.stage, trouble.stage),
            text=trouble.text,
            evidence="\n".join(lines[:_SHOWN]),
        )


def _backend(records: Sequence[RankRecord]) -> Iterator[Finding]:
    with_gpu = [record for record in records if record.accelerator and record.backend == "gloo"]
    if not with_gpu:
        return
    without = sorted({record.host for record in records if not record.accelerator})
    yield finding(
        "gloo-beside-gpus",
        with_gpu=len(with_gpu),
        records=len(records),
        backend_reason=with_gpu[0].backend_reason,
        fix_detail=f"give every rank its own GPU, including on {', '.join(without)}"
        if without
        else "give every rank its own GPU and use a torch build with NCCL",
    )


def _slow_devices(records: Sequence[RankRecord]) -> Iterator[Finding]:
    """Yield a finding for each host with devices that are slower than others of their model."""
    slow: dict[str, list[RankRecord]] = {}
    for record in records:
        if _share(record, records) < _SLOW_DEVICE:
            slow.setdefault(record.host, []).append(record)
    for host, guilty in slow.items():
        command = "top\nlscpu"
        if guilty[0].hip:
            command = "amd-smi metric --clock --power --temperature"
        elif guilty[0].device_uuid:
            command = "nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE"
        lines = []
        for record in guilty[:_SHOWN]:
            for matmul in record.matmuls:
                speed = f"{matmul.flops_per_s / 1e9:,.0f} GFLOP/s {matmul.precision}"
                lines.append(f"rank {record.rank}, {record.device_name}: {speed}")
        yield finding(
            "slow-device",
            hosts=(host,),
            where=", ".join(record.where for record in guilty[:_SHOWN]),
            share=min(_share(record, records) for record in guilty),
            host=host,
            command=command,
            evidence="\n".join(lines),
        )


def _share(record: RankRecord, records: Sequence[RankRecord]) -> float:
    """Return a device's speed relative to the median of the others of its model."""
    shares = [1.0]
    for own in record.matmuls:
        others = []
        for other in records:
            if other.rank != record.rank and other.device_name == record.device_name:
                speeds = {matmul.precision: matmul.flops_per_s for matmul in other.matmuls}
                others += [speeds[own.precision]] if own.precision in speeds else []
        if others:
            shares.append(own.flops_per_s / statistics.median(others))
    return min(shares)


def _hot(records: Iterable[RankRecord]) -> Iterator[Finding]:
    for record in records:
        causes = record.health.throttled_by if record.health is not None else ()
        if not causes:
            continue
        temperature = record.health and record.health.temperature_c
        evidence = "" if temperature is None else f"{temperature} °C after 1 s of work"
        text, hosts = ", ".join(causes), (record.host,)
        if any("heat" in cause for cause in causes):
            yield finding(
                "gpu-hot", hosts=hosts, where=record.where, causes=text, evidence=evidence
            )
        else:
            # A GPU at its power limit works as designed.
            status = Status.NOTE if set(causes) == {"power limit"} else Status.WARNING
            yield finding(
                "gpu-throttled",
                status=status,
                hosts=hosts,
                where=record.where,
                causes=text,
                evidence=evidence,
            )


def _slow_pairs(records: Sequence[RankRecord]) -> Iterator[Finding]:
    """Yield a finding for each rank or pair that moves data much slower than the others."""
    by_rank = {record.rank: record for record in records}
    speeds: dict[bool, dict[tuple[int, int], float]] = {True: {}, False: {}}
    for record in records:
        for pair in record.pairs:
            peer = by_rank.get(pair.peer)
            # Within a host, NVLink may connect only some of the GPUs, which is normal.
            inside = peer is not None and peer.host == record.host
            if peer is None or not pair.bytes_per_s or (inside and record.device != "cpu"):
                continue
            speeds[inside][record.rank, pair.peer] = pair.bytes_per_s
    for kind in speeds.values():
        for cause in blame(_slow_of(kind, by_rank), kind.keys()):
            ranks = sorted({rank for pair in cause.directions for rank in pair})
            if cause.end is not None:
                ranks = [cause.end]
            names = " and ".join(by_rank[rank].where for rank in ranks[:_SHOWN])
            slowest = min(kind[pair] for pair in cause.directions)
            lines = []
            for low, high in cause.directions:
                if low < high:
                    lines.append(f"ranks {low} and {high}: {kind[low, high] / 1e6:,.0f} MB/s")
            yield finding(
                "slow-pair",
                hosts=tuple(dict.fromkeys(by_rank[rank].host for rank in ranks)),
                names=names if len(ranks) > 1 else f"{names} and the others",
                slowest=slowest / 1e6,
                median=statistics.median(kind.values()) / 1e6,
                evidence=", ".join(lines[:_SHOWN]),
            )


def _slow_of(
    kind: Mapping[tuple[int, int], float], by_rank: Mapping[int, RankRecord]
) -> list[tuple[int, int]]:
    slow = []
    for pair, speed in kind.items():
        others = [other for other_pair, other in kind.items() if set(other_pair) != set(pair)]
        on_gpu = by_rank[pair[0]].device != "cpu"
        if len(others) < 4 or speed >= _SLOW_PAIR * statistics.median(others):
            continue
        if on_gpu or speed < _SLOW_PAIR_BYTES_PER_S:
            slow.append(pair)
    return slow


def judge_gpus(records: Sequence[RankRecord], hosts: Sequence[str]) -> list[Finding]:
    """Return a finding for each host with GPUs of which torch uses none."""
    findings = []
    for host in hosts:
        own = [record for record in records if record.host == host]
        if own and not any(record.accelerator for record in own):
            why = own[0].gpu_error
            findings.append(finding("gpus-not-usable", hosts=(host,), host=host, why=why))
    return findings
