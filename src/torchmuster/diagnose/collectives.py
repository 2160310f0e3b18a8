"""Turn the records of the collectives probe into findings that name rank, host and device."""

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence

from torchmuster.diagnose import wrong_values
from torchmuster.diagnose.blame import Direction, blame
from torchmuster.diagnose.rank_record import RankRecord
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status

_SHOWN = 6
_SLOW_DEVICE = 0.6  # of the median of its model
_SLOW_PAIR = 0.15  # of the median of its kind
_SLOW_PAIR_BYTES_PER_S = 40e6  # slower than a busy processor alone can explain
_LEAST_PAIRS = 6  # both directions of three pairs: of fewer, none is usual
# In the order in which ranks run them.
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
    return [
        *(_hangs(records) or _errors(records)),  # errors during a hang are its consequences
        *wrong_values.judge_values(records, second),
        *_slow_devices(records),
        *_hot(records),
        *_slow_pairs(records),
        *_backend(records),
    ]


def _hangs(records: Sequence[RankRecord]) -> list[Finding]:
    """Return one finding for a hang: the ranks that the others wait for, and the stage."""
    missing = set(range(records[0].world_size if records else 0))
    stages, lines = set(), []
    for record in records:
        if record.ended or record.trouble is not None:
            missing.discard(record.rank)
        else:
            stages.add(record.stage)
    for record in records:
        trouble = record.trouble
        if trouble is not None and trouble.problem in ("absent", "hangs"):
            missing.update(trouble.ranks)
            stages.add(trouble.stage)
            lines.append(f"rank {record.rank}: {trouble.problem} in {trouble.stage}")
    if not missing and not stages:
        return []
    reached = [text for stage, text in _STAGES.items() if stage in stages]
    where = {record.rank: record.where for record in records}
    names = [where.get(rank, f"rank {rank}") for rank in sorted(missing)]
    hosts = sorted({record.host for record in records if record.rank in missing})
    return [
        finding(
            "collective-hangs",
            hosts=tuple(hosts),
            who=", ".join(names[:_SHOWN]) or "at least one rank",
            stage=reached[0] if reached else _STAGES["group"],
            on=", ".join(hosts) or "each host",
            evidence=", ".join(lines[:_SHOWN]),
        )
    ]


def _errors(records: Sequence[RankRecord]) -> list[Finding]:
    findings, lines = [], []
    for record in records:
        trouble = record.trouble
        if trouble is None or trouble.problem != "error":
            continue
        lines.append(f"rank {record.rank} on {record.host}: {trouble.text}")
        findings.append(
            finding(
                "collective-fails",
                hosts=(record.host,),
                where=record.where,
                stages=_STAGES.get(trouble.stage, trouble.stage),
                text=trouble.text,
                evidence="\n".join(lines[:_SHOWN]),
            )
        )
    return findings[:1]  # the others follow from the first


def _backend(records: Sequence[RankRecord]) -> Iterator[Finding]:
    with_gpu = [record for record in records if record.accelerator and record.backend == "gloo"]
    if with_gpu:
        without = sorted({record.host for record in records if not record.accelerator})
        yield finding(
            "gloo-beside-gpus",
            with_gpu=len(with_gpu),
            records=len(records),
            backend_reason=with_gpu[0].backend_reason,
            without=", ".join(without) or "no host",
        )


def _slow_devices(records: Sequence[RankRecord]) -> Iterator[Finding]:
    """Yield a finding for each host with devices that are slower than others of their model."""
    speeds: dict[tuple[str, str], list[float]] = {}
    for record in records:
        for matmul in record.matmuls:
            speeds.setdefault((record.device_name, matmul.precision), []).append(matmul.flops_per_s)
    shares: dict[int, float] = {}  # by rank
    slow: dict[str, list[RankRecord]] = {}
    for record in records:
        shares[record.rank] = 1.0
        for matmul in record.matmuls:
            alike = speeds[record.device_name, matmul.precision]
            share = matmul.flops_per_s / statistics.median_high(alike)  # of two, the faster one
            shares[record.rank] = min(shares[record.rank], share)
        if shares[record.rank] < _SLOW_DEVICE:
            slow.setdefault(record.host, []).append(record)
    for host, guilty in slow.items():
        command = "top\nlscpu"
        if guilty[0].hip:
            command = "amd-smi metric --clock --power --temperature"
        elif guilty[0].device_uuid:
            command = "nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE"
        lines = []
        for record in guilty:
            for matmul in record.matmuls:
                speed = f"{matmul.flops_per_s / 1e9:,.0f} GFLOP/s {matmul.precision}"
                lines.append(f"rank {record.rank}, {record.device_name}: {speed}")
        yield finding(
            "slow-device",
            hosts=(host,),
            where=", ".join(record.where for record in guilty[:_SHOWN]),
            share=min(shares[record.rank] for record in guilty),
            host=host,
            command=command,
            evidence="\n".join(lines[:_SHOWN]),
        )


def _hot(records: Iterable[RankRecord]) -> Iterator[Finding]:
    for record in records:
        causes = record.health.throttled_by if record.health is not None else ()
        if not causes:
            continue
        temperature = record.health and record.health.temperature_c
        evidence = "" if temperature is None else f"{temperature} °C after 1 s of work"
        name, status = "gpu-throttled", Status.WARNING
        if any("heat" in cause for cause in causes):
            name = "gpu-hot"
        elif set(causes) == {"power limit"}:  # it works as designed
            status = Status.NOTE
        yield finding(
            name,
            status=status,
            hosts=(record.host,),
            where=record.where,
            causes=", ".join(causes),
            evidence=evidence,
        )


def _slow_pairs(records: Sequence[RankRecord]) -> Iterator[Finding]:
    """Yield a finding for each rank or pair that moves data much slower than the others."""
    by_rank = {record.rank: record for record in records}
    within: dict[Direction, float] = {}
    between: dict[Direction, float] = {}
    for record in records:
        for pair in record.pairs:
            peer = by_rank.get(pair.peer)
            if peer is None or not pair.bytes_per_s:
                continue
            if peer.host != record.host:
                between[record.rank, pair.peer] = pair.bytes_per_s
            elif record.device == "cpu":
                # Within a host, NVLink may connect only some of the GPUs, which is normal.
                within[record.rank, pair.peer] = pair.bytes_per_s
    for speeds in (within, between):
        if len(speeds) < _LEAST_PAIRS:
            continue
        median = statistics.median(speeds.values())
        slow = []
        for direction, speed in speeds.items():
            on_cpu = by_rank[direction[0]].device == "cpu"
            if speed < min(_SLOW_PAIR * median, _SLOW_PAIR_BYTES_PER_S if on_cpu else median):
                slow.append(direction)
        for cause in blame(slow, speeds):
            ranks = sorted(set(itertools.chain.from_iterable(cause.directions)))
            if cause.end is not None:
                ranks = [cause.end]
            lines = []
            for low, high in cause.directions:
                lines.append(f"ranks {low} and {high}: {speeds[low, high] / 1e6:,.0f} MB/s")
            yield finding(
                "slow-pair",
                hosts=tuple(dict.fromkeys(by_rank[rank].host for rank in ranks)),
                names=" and ".join(by_rank[rank].where for rank in ranks[:_SHOWN]),
                slowest=min(speeds[pair] for pair in cause.directions) / 1e6,
                median=median / 1e6,
                evidence=", ".join(lines[:_SHOWN]),
            )


def judge_gpus(records: Sequence[RankRecord], hosts: Sequence[str]) -> list[Finding]:
    """Return a finding for each host with GPUs of which torch uses none."""
    findings = []
    for host in hosts:
        own = [record for record in records if record.host == host]
        if own and not any(record.accelerator for record in own):
            why = own[0].gpu_error
            findings.append(finding("gpus-not-usable", hosts=(host,), host=host, why=why))
    return findings
