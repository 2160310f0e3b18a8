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
_LINES_SHOWN = 6


def judge_values(
    records: Sequence[RankRecord], second: Sequence[RankRecord] | None = None
) -> list[Finding]:
    """Return a finding for each device that computes wrong values or corrupts transfers.

    ``second`` are the records of another try with the variables of ``SECOND_TRY``.
    """
    findings = []
    known: set[int] = set()
    for record in records:
        values = record.matmul_values
        if values.wrong:
            known.add(record.rank)
            wrong_device = finding(
                "wrong-device",
                hosts=(record.host,),
                where=record.where,
                values=_count(values),
                fix=_leave_out(record),
                device_name=record.device_name,
                first_value=_first(values),
            )
            findings.append(wrong_device)
    guilty = blame_ranks(wrong_pairs(records))
    if not guilty:  # an error that the test of pairs did not reproduce
        wrong = [record.rank for record in records if wrong_operations([record])]
        guilty = [tuple(wrong)] if wrong else []
    for ranks in guilty:
        if not known & set(ranks):
            findings.append(_corruption(ranks, records, second))
    return findings


def wrong_operations(records: Iterable[RankRecord]) -> dict[str, Values]:
    """Return the values of the operations that had wrong ones, over all ranks."""
    wrong: dict[str, Values] = {}
    for record in records:
        for operation in record.operations:
            if operation.values.wrong:
                wrong[operation.name] = wrong.get(operation.name, Values()) + operation.values
    return wrong


def wrong_pairs(records: Iterable[RankRecord]) -> Seen:
    """Return the (receiver, sender) pairs with wrong values, in any test."""
    seen = set()
    for record in records:
        for pair in record.pairs:
            if pair.values.wrong or pair.sums.wrong:
                seen.add((record.rank, pair.peer))
        for operation in record.operations:
            seen |= {(record.rank, source) for source in operation.wrong_from}
    return seen


def blame_ranks(seen: Seen) -> list[tuple[int, ...]]:
    """Return the ranks that explain the observations; several together if it may be any of them.

    A rank that corrupts what it sends or receives does so with several others.
    """
    peers: dict[int, set[int]] = {}
    for receiver, sender in seen:
        peers.setdefault(receiver, set()).add(sender)
        peers.setdefault(sender, set()).add(receiver)
    guilty: list[tuple[int, ...]] = []
    for cause in blame(seen | {(sender, receiver) for receiver, sender in seen}):
        ranks = set(cause.directions[0])
        if cause.end is not None:
            ranks = {cause.end}
            for peer in peers[cause.end]:
                if len(peers[peer]) >= len(peers[cause.end]):
                    ranks.add(peer)
        if not any(ranks <= set(known) for known in guilty):
            guilty.append(tuple(sorted(ranks)))
    return guilty


def _corruption(
    ranks: Sequence[int], records: Sequence[RankRecord], second: Sequence[RankRecord] | None
) -> Finding:
    """Return the finding for ranks that corrupt values; all records if theirs are lost."""
    guilty = [record for record in records if record.rank in ranks] or records
    wrong = wrong_operations(records)
    operations = list(wrong)
    for record in records:
        for pair in record.pairs:
            if pair.values.wrong and {record.rank, pair.peer} & set(ranks):
                wrong[f"rank {pair.peer} to rank {record.rank}"] = pair.values
    if len(wrong) > len(operations):
        operations.append("transfers between ranks")
    lines = [f"{where}: {_count(values)}; {_first(values)}" for where, values in wrong.items()]
    fix = _leave_out(guilty[0])
    again = ""
    if second is not None:
        again = f". {_VARIABLES} does not change this"
        if not second or any(record.trouble for record in second):
            again = f". A second try with {_VARIABLES} did not finish"
        elif not wrong_operations(second) and not wrong_pairs(second):
            again = f". With {_VARIABLES} all values are correct: the direct path between the GPUs is broken"
            fix = f"export {_VARIABLES}\nor {fix}"
    return finding(
        "wrong-values",
        hosts=tuple(dict.fromkeys(record.host for record in guilty)),
        guilty=" and ".join(record.where for record in guilty),
        operations=", ".join(operations),
        why=again,
        fix=fix,
        evidence="\n".join(lines[:_LINES_SHOWN]),
    )


def _leave_out(record: RankRecord) -> str:
    command = "sudo dmesg --level=emerg,alert,crit,err"
    if record.hip:
        command = "amd-smi metric --ecc"
    elif record.device_uuid:
        uuid = record.device_uuid
        if not uuid.startswith(("GPU-", "MIG-")):
            uuid = f"GPU-{uuid}"
        command = f"nvidia-smi -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER -i {uuid}"
    return f"exclude {record.host} until it is repaired; check for errors there with\n{command}"


def _count(values: Values) -> str:
    return f"{values.wrong:,} of {values.compared:,} values are wrong"


def _first(values: Values) -> str:
    got = "not a number" if values.got is None else f"{values.got:g}"
    return f"the first at index {values.place}: {got} instead of {values.expected:g}"


def second_try(records: Sequence[RankRecord]) -> Mapping[str, str]:
    """Return the variables for a second run of the probe; empty if it would not help."""
    for record in records:
        if any(pair.values.wrong for pair in record.pairs):
            return SECOND_TRY
        if record.backend == "nccl" and wrong_operations([record]):
            return SECOND_TRY
    return {}
