"""Which checkpoint all ranks go on from: the newest that no rank finds fault with."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from torchmuster.checkpoints.store import Store
from torchmuster.checkpoints.verify import Found, look, newest_first, verify_file
from torchmuster.errors import MusterError
from torchmuster.finding import Finding, Status
from torchmuster.train.agreement import tell_all
from torchmuster.train.world import World

T = TypeVar("T")


def newest_good_for_all(store: Store, world: World, group: dist.ProcessGroup) -> Found | None:
    """Return the newest checkpoint whose every file is what was written; None if there is none yet.

    Each rank reads its share of the files. If there are checkpoints and none of them is good, that is an error: to begin
    anew would be to lose all of them without a word.
    """
    names = for_all(lambda: newest_first(store) if world.is_first else [], world, group)[0]
    rejected: list[Finding] = []
    for name in names:
        findings = _findings(store, name, world, group)
        if not findings:
            manifest = look(store, name)[0]
            assert manifest is not None  # it has just been read
            return Found(name=name, manifest=manifest, rejected=tuple(rejected))
        rejected += findings
    if any(one.status is Status.FAILURE for one in rejected):
        raise MusterError(
            f"none of the checkpoints in {store.where} can be used",
            why="\n".join(one.what for one in rejected),
            fix="move them elsewhere to begin anew; to see what is wrong: muster checkpoint verify",
        )
    return None


def for_all(work: Callable[[], T], world: World, group: dist.ProcessGroup) -> list[T]:
    """Do something on each rank and return what each got (plain JSON types); the failure of one is that of all."""
    value: Any = None
    problem = ""
    try:
        value = work()
    except (MusterError, OSError, ValueError) as error:
        problem = "; ".join(str(error).splitlines()) or type(error).__name__
    told = tell_all([value, problem], world, group)
    for rank, (_, theirs) in enumerate(told):
        if theirs:
            raise MusterError(f"rank {rank}: {theirs}" if world.world_size > 1 else theirs)
    return [one for one, _ in told]


def heard_finding(told: dict[str, str]) -> Finding:
    """Return a finding of another rank."""
    return Finding(
        name=told["name"],
        status=Status(told["status"]),
        what=told["what"],
        why=told["why"],
        fix=told["fix"],
        evidence=told["evidence"],
    )


def _findings(store: Store, name: str, world: World, group: dist.ProcessGroup) -> list[Finding]:
    """Return what any rank finds wrong; what several find is told once."""
    told = for_all(lambda: _found_here(store, name, world), world, group)
    findings: dict[str, Finding] = {}
    for rank, theirs in enumerate(told):
        for one in theirs:
            evidence = f"{one['evidence']} (seen by rank {rank})"
            findings.setdefault(
                one["what"],
                heard_finding({**one, "evidence": evidence}),
            )
    return list(findings.values())


def _found_here(store: Store, name: str, world: World) -> list[dict[str, str]]:
    manifest, findings = look(store, name)
    if manifest is not None and not findings:
        files = sorted(manifest.files)
        for file in files[world.global_rank :: world.world_size]:
            findings += verify_file(store, name, file, manifest.files[file])
    return [one.as_json() for one in findings]
