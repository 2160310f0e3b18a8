"""Find the ranks that corrupt values, from which rank received wrong values from which."""

from collections.abc import Iterable, Mapping, Sequence

from torchmuster.diagnose.blame import blame
from torchmuster.diagnose.rank_record import RankRecord, Values
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding

# Pairs of the rank that received a wrong value and the rank that sent it.
Seen = set[tuple[int, int]]
# Makes NCCL copy data between GPUs through host memory, and sum it without NVLink SHARP.
SECOND_TRY = {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
_VARIABLES = " ".join(f"{name}={value}" for name, value in SECOND_TRY.items())

_SUMS = ("all-reduce", "reduce-scatter")
_LINES_SHOWN = 6


def judge_values(
    records: Sequence[RankRecord], second: Sequence[RankRecord] | None = None
) -> list[Finding]:
    """Return a finding for each device that computes wrong values or corrupts transfers.

    ``second`` are the records of another try with the variables of ``SECOND_TRY``.
    """
    broken = [record for record in records if _matmul_values(record).wrong]
    findings = [_wrong_device(record) for record in broken]
    known = {record.rank for record in broken}
    for ranks in _spoilers(records):
        if not known & set(ranks):
            findings.append(_wrong_sums(ranks, records, second))
            known |= set(ranks)
    for ranks in blame_ranks(wrong_pairs(records)):
        if not known & set(ranks):
            findings.append(_wrong_transfers(ranks, records, second))
    return findings


def wrong_pairs(records: Iterable[RankRecord]) -> Seen:
    """Return the (receiver, sender) pairs with wrong values in the point-to-point test."""
    return {
        (record.rank, pair.peer) for record in records for pair in record.pairs if pair.values.wrong
    }


def blame_ranks(seen: Seen) -> list[tuple[int, ...]]:
    """Return the ranks that explain the observations; a pair of ranks if it may be either.

    A rank that corrupts what it sends or receives does so with several others.
    """
    guilty: list[tuple[int, ...]] = []
    for cause in blame(seen | {(sender, receiver) for receiver, sender in seen}):
        if cause.end is not None:
            guilty.append((cause.end,))
        else:
            guilty.append(tuple(sorted(cause.directions[0])))
    return guilty


def _spoilers(records: Sequence[RankRecord]) -> list[tuple[int, ...]]:
    """Return the ranks that corrupted the collectives."""
    suspects = max((record.suspects for record in records), key=len, default=())
    if suspects:
        return list(suspects)
    wrong_sums = [record.rank for record in records if _sum_values(record).wrong]
    if wrong_sums:  # an error that the search did not reproduce
        return [tuple(wrong_sums)]
    seen = {
        (record.rank, source)
        for record in records
        for operation in record.operations
        for source in operation.wrong_from
    }
    return blame_ranks(seen)


def _wrong_device(record: RankRecord) -> Finding:
    values = _matmul_values(record)
    return finding(
        "wrong-device",
        hosts=(record.host,),
        where=record.where,
        values=_count(values),
        fix=_leave_out(record),
        device_name=record.device_name,
        first_value=_first(values),
    )


def _wrong_sums(
    ranks: Sequence[int], records: Sequence[RankRecord], second: Sequence[RankRecord] | None
) -> Finding:
    """Return the finding for ranks that corrupt collectives."""
    guilty = _records_of(ranks, records)
    seen: dict[str, Values] = {}
    for record in records:
        for operation in record.operations:
            if operation.values.wrong:
                seen[operation.name] = seen.get(operation.name, Values()) + operation.values
    still_wrong = any(map(_wrong_operations, second or ()))
    why, fix = _with_second_try(guilty[0], second, still_wrong)
    return finding(
        "wrong-values",
        hosts=tuple(dict.fromkeys(record.host for record in guilty)),
        guilty=_name(guilty),
        operations=", ".join(seen),
        why=why,
        fix=fix,
        evidence=_evidence(seen),
    )


def _wrong_transfers(
    ranks: Sequence[int], records: Sequence[RankRecord], second: Sequence[RankRecord] | None
) -> Finding:
    """Return the finding for ranks between which data arrives changed."""
    guilty = _records_of(ranks, records)
    seen: dict[str, Values] = {}
    for record in records:
        for pair in record.pairs:
            if pair.values.wrong and {record.rank, pair.peer} & set(ranks):
                seen[f"rank {pair.peer} to rank {record.rank}"] = pair.values
    why, fix = _with_second_try(guilty[0], second, bool(wrong_pairs(second or ())))
    return finding(
        "p2p-wrong",
        hosts=tuple(dict.fromkeys(record.host for record in guilty)),
        guilty=_name(guilty),
        why=why,
        fix=fix,
        evidence=_evidence(seen),
    )


def _records_of(ranks: Sequence[int], records: Sequence[RankRecord]) -> Sequence[RankRecord]:
    """Return the records of these ranks; all records if theirs are lost."""
    return [record for record in records if record.rank in ranks] or records


def _with_second_try(
    record: RankRecord, second: Sequence[RankRecord] | None, still_wrong: bool
) -> tuple[str, str]:
    """Return what the second try shows, and the fix."""
    if second is None:
        return "", _leave_out(record)
    if not second or any(again.trouble for again in second):
        return f". A second try with {_VARIABLES} did not finish", _leave_out(record)
    if still_wrong:
        return f". {_VARIABLES} does not change this", _leave_out(record)
    why = f". With {_VARIABLES} all values are correct: the direct path between the GPUs is broken"
    return why, f"export {_VARIABLES}\nor {_leave_out(record)}"


def _evidence(seen: Mapping[str, Values]) -> str:
    lines = [f"{where}: {_count(values)}; {_first(values)}" for where, values in seen.items()]
    return "\n".join(lines[:_LINES_SHOWN])


def _leave_out(record: RankRecord) -> str:
    if record.is_amd:
        return (
            f"exclude {record.host} until this device is repaired; check it there with\n"
            "amd-smi metric --ecc"
        )
    if record.device_uuid:
        return (
            f"exclude {record.host} until this device is repaired; check it there with\n"
            f"nvidia-smi -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER -i {_nvidia_uuid(record.device_uuid)}"
        )
    return (
        f"exclude {record.host} until it is repaired; check for memory and CPU errors there with\n"
        "sudo dmesg --level=emerg,alert,crit,err"
    )


def _nvidia_uuid(uuid: str) -> str:
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _matmul_values(record: RankRecord) -> Values:
    return sum((matmul.values for matmul in record.matmuls), start=Values())


def _sum_values(record: RankRecord) -> Values:
    sums = (operation.values for operation in record.operations if operation.name in _SUMS)
    return sum(sums, start=Values())


def _name(records: Sequence[RankRecord]) -> str:
    names = [record.where for record in records]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _count(values: Values) -> str:
    return f"{values.wrong:,} of {values.compared:,} values are wrong"


def _first(values: Values) -> str:
    got = "not a number" if values.got is None else f"{values.got:g}"
    return f"the first at index {values.place}: {got} instead of {values.expected:g}"


def _wrong_operations(record: RankRecord) -> bool:
    return any(operation.values.wrong for operation in record.operations)


def second_try(records: Sequence[RankRecord]) -> Mapping[str, str]:
    """Return the variables for a second run of the probe; empty if it would not help."""
    in_collectives = any(
        record.backend == "nccl" and _wrong_operations(record) for record in records
    ) and not any(_matmul_values(record).wrong for record in records)
    return SECOND_TRY if in_collectives or wrong_pairs(records) else {}
