"""Find the root cause among all failures on all hosts.

When a rank exits, the others lose their connection to it and fail too, often before the first exit is
reported; then the launcher stops the rest. So the first report is not always the cause: reports that a
peer is gone, and exits that the launcher requested, rank below real causes.
"""

import dataclasses
import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torchmuster.finding import Finding, Status
from torchmuster.known_errors import tracebacks
from torchmuster.known_errors.explain import Explanation, explain_text
from torchmuster.known_errors.rule import Role
from torchmuster.launch import protocol
from torchmuster.launch.history import known_failures
from torchmuster.launch.node.memory_evidence import KERNEL_KILLED_IT
from torchmuster.redaction import printable_line, redact_text
from torchmuster.units import rank_text

_LINES_SHOWN = 8
_LONGEST_HEADLINE = 240
_CAUSES_SHOWN = 3
_KILLED, _ABORTED = -9, -6
_STOPPED_BY_REQUEST = (-15, -2)
# A rank killed this long after the stop request was killed by us.
_WITH_THE_FIRST_S = 2.0
_ENDED_BY_REQUEST = re.compile(r"^KeyboardInterrupt|by SIG(?:TERM|INT)")
_SOURCE_PLACE = re.compile(r"\[/\S+\.(?:cc|cpp|h|hpp):\d+\] |(?<=enforce fail at )/\S+/")
# Errors of ranks that only waited for another rank (train/first.py, train/data/stream.py). They quote the other rank's error,
# so that text must not be analysed.
_ONLY_WAITED = re.compile(
    r"(?:[\w.]+: )?(?:rank \d+ waited for work that failed on rank \d+: "
    r"|rank \d+ could not read its data: "
    r"|the ranks' store became unreachable while waiting for the first rank)"
)
# Gloo prints its ports in the wrong byte order; an address that is wrong is worse than none.
_GLOO_ADDRESS = re.compile(r" \[[0-9a-fA-F.:]+\]:\d+")
_GLOO_ADVICE = re.compile(r"\. This is typically caused by a remote worker.*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class NodeExit:
    """How one host's ranks exited; times are of the launcher's monotonic clock.

    ``ended`` is the report of its node agent, at ``ended_s``; ``lost`` is why its heartbeats stopped.
    """

    host: str
    ended: protocol.Ended | None = None
    ended_s: float = 0.0
    lost: str | None = None
    lost_s: float = 0.0


class _Blame(enum.IntEnum):
    """How a report relates to the root cause, most likely cause first."""

    CAUSE = 0
    PEER = 1  # it reports that a peer is gone or late
    WAITED = 2  # an error of ours that quotes another rank's
    STOPPED = 3  # it was stopped on purpose
    KILLED = 4  # it did not stop when it was asked to


# What happened to the ranks that are not the cause.
_AFTERMATH = {
    _Blame.PEER: "then lost the connection to it",
    _Blame.STOPPED: "then had to stop",
    _Blame.KILLED: "did not stop within {grace_s:g} s and had to be killed",
}
_UNEXPLAINED = "had not failed but had to be killed: read the log first"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Report:
    """One failure: of a rank, or of a whole host if there is no ``failure``."""

    host: str
    at_s: float
    text: str  # the whole error, "" where there is only an exit code
    failure: protocol.Failure | None = None
    log: str = ""  # of the node agent
    is_lost: bool = False

    @property
    def who(self) -> str:
        """The rank and its host, or the host."""
        return f"rank {self.failure.rank} on {self.host}" if self.failure else self.host

    @cached_property
    def explanation(self) -> Explanation | None:
        """What the text means, unless it matches only incidental messages."""
        if self.is_lost:
            return None
        explanations = explain_text(self.text, host=self.host)
        if not explanations or explanations[0].role is Role.ASIDE:
            return None
        return explanations[0]

    @property
    def code(self) -> int | None:
        """Its exit code, or None for a host."""
        return _code_of(self.failure) if self.failure is not None else None

    @property
    def exit(self) -> known_failures.KnownExit:
        """The known meaning of its exit."""
        if self.code == _KILLED and self.ran_out_of_memory:
            return known_failures.OUT_OF_MEMORY
        return known_failures.exit_of(self.code or 0)

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the kernel killed it for want of memory."""
        return self.failure is not None and self.failure.evidence.startswith(KERNEL_KILLED_IT)

    @property
    def cause(self) -> str:
        """Its cause in one line."""
        if self.failure is None:
            return _headline(self.text)
        if self.exit is known_failures.OUT_OF_MEMORY or not self.text:
            return self.exit.text
        if self.code is not None and self.code < 0:
            return f"{self.exit.text}: {_headline(self.text)}"
        return _headline(self.text)


def root_cause_of(
    ends: Sequence[NodeExit],
    *,
    noticed_s: float,
    logs: str,
    world_size: int,
    grace_s: float = 30.0,
    hang: Finding | None = None,
) -> tuple[Finding, str]:
    """Return the finding with the root cause of a failed attempt, and the error text of the rank or host at its begin.

    ``noticed_s`` is when the launcher noticed the failure and asked the other ranks to stop, ``grace_s``
    is the time it gave them; ``logs`` is the folder of the ranks' logs. ``hang`` is the reported hang that was
    not over.
    """
    reports: list[_Report] = []
    killed: set[int] = set()
    finished: list[int] = []
    for end in ends:
        reports += _reports(end)
        if end.ended is not None:
            killed.update(end.ended.killed)
            finished += end.ended.finished
    blames = _blames(reports, noticed_s + min(_WITH_THE_FIRST_S, grace_s / 2), killed)
    if hang is not None and _Blame.CAUSE not in blames.values():
        peers = [report for report in reports if blames[report] is _Blame.PEER]
        return _after_hang(hang, peers), hang.what
    if not reports:
        finding = Finding(
            name="run-failed",
            status=Status.FAILURE,
            what="the run failed, and no host reported why",
            fix=f"read the logs: {logs}",
        )
        return finding, ""
    reports.sort(key=lambda report: (blames[report], report.at_s))
    first = reports[0]
    alike = [report for report in reports[1:] if _is_alike(first, report)]
    rest = {report: blames[report] for report in reports[1:] if report not in alike}
    who = first.who
    aftermath = []
    if alike and len(alike) + 1 == world_size:
        who = f"all {world_size} ranks"
    elif alike:
        aftermath.append(f"{rank_text(_ranks(alike))} failed in the same way")
    aftermath += _aftermath(rest, grace_s, nobody_failed=blames[first] is not _Blame.CAUSE)
    finding = _finding(first, who, logs)
    why = [finding.why]
    if finished and blames[first] is _Blame.PEER and first.failure:
        why = [
            "the ranks did not run the same number of steps",
            f"{first.who} then failed: {first.cause}",
        ]
        finding = dataclasses.replace(
            finding,
            name="rank-ended-early",
            what=f"{rank_text(finished)} finished while {first.who} was still training",
            fix="give every rank the same number of batches: a DistributedSampler, drop_last=True, or "
            "torch.distributed.algorithms.Join; no collective inside `if rank == 0`",
        )
    return dataclasses.replace(finding, why=_clean([*why, *aftermath])), first.cause


def _reports(end: NodeExit) -> list[_Report]:
    """Return what one host reported: each failed rank, or its own failure."""
    ended = end.ended
    if ended is None:
        if not end.lost:
            return []
        return [_Report(host=end.host, at_s=end.lost_s, text=end.lost, is_lost=True)]
    reports = []
    for failure in ended.failures:
        at_s = end.ended_s - failure.ago_s
        text = _error_text(failure)
        reports.append(_Report(host=end.host, at_s=at_s, text=text, failure=failure))
    if not ended.good and not reports:
        log = ended.text or "the node agent reported no cause"
        texts = filter(None, [log.splitlines()[0], tracebacks.last_error(log)])
        reports.append(_Report(host=end.host, at_s=end.ended_s, text=": ".join(texts), log=log))
    return reports


def _code_of(failure: protocol.Failure) -> int:
    """Return a rank's own exit code: one that is already exiting may still get a signal."""
    if failure.what or failure.traceback or failure.error:
        return 1
    return known_failures.by_signal(failure.exit_code)


def _error_text(failure: protocol.Failure) -> str:
    """Return the full error text: the exception, or the end of the log."""
    text = failure.what or tracebacks.exception_text(failure.traceback)
    code = _code_of(failure)
    if text:
        return text
    if code == _ABORTED:
        return tracebacks.last_cxx_error(failure.last_lines)
    if code < 0:
        return ""  # its other output is unrelated to the exit
    return tracebacks.last_error(failure.last_lines) or failure.error


def _blames(
    reports: Sequence[_Report], ours_from_s: float, killed: set[int]
) -> dict[_Report, _Blame]:
    """Classify each report; a kill after ``ours_from_s``, or of one of the ``killed`` ranks, is our own."""
    for report in reports:
        # A rank that kept others waiting until they timed out was killed after that, not before.
        if report.explanation is not None and report.explanation.role is Role.PEER_LATE:
            ours_from_s = min(ours_from_s, report.at_s + _WITH_THE_FIRST_S)
    return {report: _blame(report, ours_from_s, killed) for report in reports}


def _blame(report: _Report, ours_from_s: float, killed: set[int]) -> _Blame:
    if report.is_lost:
        return _Blame.CAUSE
    was_killed = report.code == _KILLED and not report.ran_out_of_memory
    if was_killed and not killed.isdisjoint(_ranks([report])):
        return _Blame.KILLED
    if report.code in _STOPPED_BY_REQUEST or _ENDED_BY_REQUEST.search(report.text):
        return _Blame.STOPPED
    if was_killed and report.at_s > ours_from_s:
        return _Blame.STOPPED
    if _ONLY_WAITED.match(report.text):
        return _Blame.WAITED
    explanation = report.explanation
    if explanation is not None and explanation.role in (Role.PEER_LATE, Role.PEER_GONE):
        return _Blame.PEER
    return _Blame.CAUSE


def _finding(first: _Report, who: str, logs: str) -> Finding:
    """Return the finding on one report, without what it led to."""
    failure, why, fix = first.failure, "", ""
    evidence: list[str] = []
    name, what = "agent-failed", f"{who} failed: {first.cause}"
    if first.is_lost:
        name, what = "host-lost", f"{who} was lost: {first.cause}"
        why = "the launcher and {host} lost contact"
        fix = "check that {host} is up and on the network, and that its node agent was not killed there"
    elif failure is not None and failure.what:
        why, fix = failure.why, failure.fix
        if failure.what.startswith(f"{who} "):  # the text already names the rank
            what = first.cause
    elif first.explanation is not None:
        known = first.explanation
        why, fix = "; ".join(filter(None, (known.what, known.why))), known.fix
    elif failure is not None and (first.code != 1 or not first.text):
        why, fix = first.exit.why, first.exit.fix
        crash = tracebacks.crashed_at(failure.last_lines)
        if crash is not None:
            why += f"\nit happened at {crash}"
    elif failure is not None:
        line = tracebacks.raised_at(failure.traceback)
        why = f"raised at {line}" if line else ""
    if failure is None:
        evidence.append(tracebacks.last_output(first.log, _LINES_SHOWN))
    else:
        name = first.exit.name
        why = f"{why}\n{failure.evidence}".strip()
        if not failure.what:
            evidence.append(
                tracebacks.shortened_traceback(failure.traceback)
                or tracebacks.last_output(failure.traceback or failure.last_lines, _LINES_SHOWN)
            )
        evidence.append(f"log: {logs}/rank-{failure.rank}.log")
    return Finding(
        name=name,
        status=Status.FAILURE,
        what=_clean([what]),
        why=why.replace("{host}", first.host),
        fix=_clean([fix.replace("{host}", first.host)]),
        evidence=_clean(evidence),
    )


def _aftermath(rest: dict[_Report, _Blame], grace_s: float, *, nobody_failed: bool) -> list[str]:
    """Return one line each for the other ranks."""
    causes: list[str] = []
    ranks: dict[_Blame, list[int]] = {blame: [] for blame in _Blame}
    for report, blame in rest.items():
        ranks[blame] += _ranks([report])
        if blame is _Blame.CAUSE:
            verb = "was lost" if report.is_lost else "failed"
            causes.append(f"{report.who} {verb} too: {report.cause}")
    lines = causes[:_CAUSES_SHOWN]
    if nobody_failed:  # then one of those that did not stop may be the cause
        ranks[_Blame.KILLED] += ranks.pop(_Blame.STOPPED)
    for blame, text in _AFTERMATH.items():
        if ranks.get(blame):
            if nobody_failed and blame is _Blame.KILLED:
                text = _UNEXPLAINED
            lines.append(f"{rank_text(ranks[blame])} {text.format(grace_s=grace_s)}")
    return lines


def _after_hang(hang: Finding, peers: Sequence[_Report]) -> Finding:
    """Return the root cause if no rank failed by itself: ranks timed out in a reported hang."""
    why = [hang.why]
    if peers:
        first = min(peers, key=lambda report: report.at_s)
        why.append(f"{rank_text(_ranks(peers))} then timed out: {first.cause}")
    return dataclasses.replace(
        hang,
        status=Status.FAILURE,
        what=_clean([hang.what]),
        why=_clean(why),
        evidence=_clean([hang.evidence]),
    )


def _is_alike(first: _Report, other: _Report) -> bool:
    """Return whether two ranks failed for the same reason: same text except for numbers."""
    if first.failure is None or other.failure is None:
        return False
    return re.sub(r"\d+", "#", first.cause) == re.sub(r"\d+", "#", other.cause)


def _ranks(reports: Iterable[_Report]) -> list[int]:
    return [report.failure.rank for report in reports if report.failure is not None]


def _headline(text: str) -> str:
    lines = text.strip().splitlines() or [""]
    line = _GLOO_ADVICE.sub("", _GLOO_ADDRESS.sub("", _SOURCE_PLACE.sub("", lines[0])))
    if line.endswith(":") and len(lines) > 1:  # "Error(s) in loading state_dict for Net:"
        line = f"{line} {lines[1].strip()}"
    return line if len(line) <= _LONGEST_HEADLINE else f"{line[:_LONGEST_HEADLINE]}…"


def _clean(parts: Iterable[str]) -> str:
    """Join the output of programs, without secrets and terminal control sequences."""
    lines = redact_text("\n".join(filter(None, parts))).split("\n")
    return "\n".join(printable_line(line.replace("\t", "    "), colour=False) for line in lines)
