"""What the records of the collectives probe mean: findings that name the rank, its machine and device."""

from collections import Counter
from collections.abc import Iterator, Sequence

from torchmuster.diagnose import slowness, wrong_values
from torchmuster.diagnose.rank_record import RankRecord, records_from
from torchmuster.diagnose.wrong_values import second_try
from torchmuster.finding import Finding, Status

__all__ = ["RankRecord", "judge", "records_from", "second_try"]

_STAGES = {
    "group": "forming the group",
    "devices": "the test of the devices",
    "collectives": "the collectives",
    "suspects": "the search for wrong sums",
    "pairs": "the exchange between two ranks",
    "arrival": "the last collectives",
}
_SHOWN = 6


def judge(
    records: Sequence[RankRecord], second: Sequence[RankRecord] | None = None
) -> list[Finding]:
    """Return what is wrong with a group of ranks; nothing if all is well.

    ``second`` are the records of another try with the variables that ``second_try`` asked for.
    """
    hangs = list(_hangs(records))
    return [
        *hangs,
        *([] if hangs else _errors(records)),  # errors beside a hang are its consequences
        *wrong_values.judge(records, second),
        *slowness.judge(records),
        *_backend(records),
    ]


def _hangs(records: Sequence[RankRecord]) -> Iterator[Finding]:
    """One finding for a hang: the ranks that the others wait for, and where."""
    waiting = [one for one in records if one.trouble and one.trouble.problem in ("absent", "hangs")]
    silent = [one for one in records if not one.ended and not one.trouble]
    size = records[0].world_size if records else 0
    unheard = sorted(set(range(size)) - {record.rank for record in records})
    if not waiting and not silent and not unheard:
        return
    stage = min(
        (one.trouble.stage if one.trouble else one.stage for one in (*waiting, *silent)),
        key=lambda name: list(_STAGES).index(name) if name in _STAGES else len(_STAGES),
        default="group",
    )
    votes: Counter[int] = Counter()
    for one in waiting:
        assert one.trouble is not None
        votes.update(one.trouble.ranks)
    missing = sorted({*unheard, *(one.rank for one in silent), *votes})
    by_rank = {record.rank: record for record in records}
    names = [by_rank[rank].where if rank in by_rank else f"rank {rank}" for rank in missing]
    hosts = sorted({by_rank[rank].host for rank in missing if rank in by_rank})
    shown = ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
    what = f"{_STAGES.get(stage, stage)} did not end, on any rank"
    if missing:
        verb = "does" if len(missing) == 1 else "do"
        what = f"{shown} {verb} not take part in {_STAGES.get(stage, stage)}: all others wait"
    yield Finding(
        name="collective-hangs",
        status=Status.FAILURE,
        what=what,
        why="a collective ends only when every rank has joined it; training would hang in the same "
        "way, until its timeout",
        fix=f"look at what they do on {', '.join(hosts)}: stopped (T), waiting for a disk (D)?\n"
        "ps -eo pid,stat,pcpu,wchan:24,args --sort=-pcpu"
        if hosts
        else "look at the links between the machines: muster check names those that are blocked",
        evidence=", ".join(
            f"rank {one.rank}: {one.trouble.problem} in {one.trouble.stage}"
            for one in waiting[:_SHOWN]
            if one.trouble
        ),
    )


def _errors(records: Sequence[RankRecord]) -> Iterator[Finding]:
    failed = [one for one in records if one.trouble and one.trouble.problem == "error"]
    if not failed:
        return
    first = failed[0]
    assert first.trouble is not None
    yield Finding(
        name="collective-fails",
        status=Status.FAILURE,
        what=f"{first.where} failed in {_STAGES.get(first.trouble.stage, first.trouble.stage)}: "
        f"{first.trouble.text}",
        why="training would fail in the same way",
        fix="muster doctor --explain 'the text above'",
        evidence="\n".join(
            f"rank {one.rank} on {one.host}: {one.trouble.text}"
            for one in failed[:_SHOWN]
            if one.trouble
        ),
    )


def _backend(records: Sequence[RankRecord]) -> Iterator[Finding]:
    with_gpu = [one for one in records if one.accelerator and one.backend == "gloo"]
    if not with_gpu:
        return
    without = [one for one in records if not one.accelerator and one.backend]
    yield Finding(
        name="gloo-beside-gpus",
        status=Status.WARNING,
        what=f"{len(with_gpu)} of {len(records)} ranks have a GPU, but all use gloo instead of NCCL",
        why=f"{with_gpu[0].backend_reason}. Gloo passes everything through the processor",
        fix=f"give every rank a GPU of its own, also on {', '.join(sorted({o.host for o in without}))}"
        if without
        else "give every rank a GPU of its own and use a torch that is built with NCCL",
    )
