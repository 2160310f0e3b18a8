"""Find the root cause among all failures on all hosts.

When a rank exits, the others lose their connection to it and fail too, often before the first exit is
reported; then the launcher stops the rest. So the first report is not always the cause: reports that a
peer is gone, and exits that the launcher requested, rank below real causes.
"""

import dataclasses
import enum
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torchmuster.finding import Finding, Status
from torchmuster.known_errors import tracebacks
from torchmuster.known_errors.explain import Explanation, explain_text
from torchmuster.known_errors.rule import Role
from torchmuster.launch import protocol
from torchmuster.launch.history import known_failures
from torchmuster.launch.launcher.console import printable, rank_text
from torchmuster.launch.node.memory_evidence import KERNEL_KILLED_IT
from torchmuster.redaction import redact_text
from torchmuster.units import format_bytes

_LINES_SHOWN = 8
_LONGEST_HEADLINE = 240
_CAUSES_SHOWN = 3
_KILLED, _ABORTED = -9, -6
_STOPPED_BY_REQUEST = (-15, -2)
# A rank killed this long after the stop request was killed by us.
_WITH_THE_FIRST_S = 2.0
_SCRIPT_ENDED_ITSELF = "the script exited with: "
_ENDED_BY_REQUEST = re.compile(
    r"^KeyboardInterrupt|SignalException|got signal: (?:15|2)\b|by SIG(?:TERM|INT)"
)
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
    STOPPED = 2  # it was stopped on purpose


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
    def speaks_of_peer(self) -> bool:
        """Whether it only says that another rank is gone or late."""
        if self.only_waited:
            return True
        explanation = self.explanation
        return explanation is not None and explanation.role in (Role.PEER_LATE, Role.PEER_GONE)

    @property
    def only_waited(self) -> bool:
        """Whether it is an error of ours that quotes another rank's."""
        return not self.is_lost and _ONLY_WAITED.match(self.text) is not None

    @property
    def code(self) -> int | None:
        """Its own exit code: a rank that is already exiting may still get a signal."""
        failure = self.failure
        if failure is None:
            return None
        own = failure.error.removeprefix(_SCRIPT_ENDED_ITSELF)
        has_ended_itself = own != failure.error
        if failure.what or failure.traceback or (failure.error and not has_ended_itself):
            return 1
        if has_ended_itself and own.isdecimal():
            return known_failures.by_signal(int(own))
        return known_failures.by_signal(failure.exit_code)

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the kernel killed it for want of memory."""
        return self.failure is not None and self.failure.evidence.startswith(KERNEL_KILLED_IT)

    @property
    def exit(self) -> known_failures.KnownExit:
        """The known meaning of its exit."""
        if self.code == _KILLED and self.ran_out_of_memory:
            return known_failures.OUT_OF_MEMORY
        return known_failures.exit_of(self.code or 0)

    @property
    def cause(self) -> str:
        """Its cause in one line."""
        if self.failure is None:
            return _headline(self.text)
        if self.exit is known_failures.OUT_OF_MEMORY or not self.text:
            return self.exit.words
        if self.code is not None and self.code < 0:
            return f"{self.exit.words}: {_headline(self.text)}"
        return _headline(self.text)


def root_cause_of(
    ends: Sequence[NodeExit],
    *,
    noticed_s: float,
    logs: str,
    world_size: int | None = None,
    grace_s: float = 30.0,
    hang: Finding | None = None,
) -> Finding:
    """Return the finding with the root cause of a failed attempt.

    ``noticed_s`` is when the launcher noticed the failure and asked the other ranks to stop, ``grace_s``
    is the time it gave them; ``logs`` is the folder of the ranks' logs. ``hang`` is the reported hang that was
    not over.
    """
    reports = _reports(ends)
    killed: set[int] = set()
    finished: list[int] = []
    for end in ends:
        if end.ended is not None:
            killed.update(end.ended.killed)
            finished += end.ended.finished
    blames = _blames(reports, noticed_s + min(_WITH_THE_FIRST_S, grace_s / 2), killed)
    if hang is not None and _Blame.CAUSE not in blames.values():
        return _after_hang(hang, [one for one in reports if blames[one] is _Blame.PEER])
    if not reports:
        return Finding(
            name="run-failed",
            status=Status.FAILURE,
            what="the run failed, and no host reported why",
            fix=f"read the logs: {logs}",
        )
    reports.sort(key=lambda report: (blames[report], report.at_s))
    first = reports[0]
    alike = [report for report in reports[1:] if _is_alike(first, report)]
    rest = {report: blames[report] for report in reports[1:] if report not in alike}
    who, aftermath = first.who, []
    if world_size is not None and 1 < world_size == len(_ranks([first, *alike])):
        who = f"all {world_size} ranks"
    elif alike:
        aftermath.append(f"{rank_text(_ranks(alike))} failed in the same way")
    is_peer = blames[first] is _Blame.PEER
    aftermath += _aftermath(rest, killed, grace_s, nobody_failed=is_peer)
    finding = _finding(first, who, aftermath, logs)
    if is_peer and first.failure is not None and finished:
        return _of_early_end(finding, first, finished, aftermath)
    if first.failure and first.failure.rank in finished and first.code == _ABORTED:
        return _of_abort_at_exit(finding, first, aftermath)
    return finding


def _reports(ends: Sequence[NodeExit]) -> list[_Report]:
    reports = []
    for end in ends:
        if end.ended is None:
            if end.lost:
                report = _Report(host=end.host, at_s=end.lost_s, text=end.lost, is_lost=True)
                reports.append(report)
            continue
        for failure in end.ended.failures:
            at_s = end.ended_s - failure.ago_s
            text = _error_text(failure)
            reports.append(_Report(host=end.host, at_s=at_s, text=text, failure=failure))
        if not end.ended.good and not end.ended.failures:
            log = end.ended.words or "the node agent reported no cause"
            text = log.splitlines()[0]
            error = tracebacks.last_error(log)
            if error:
                text += f": {error}"
            reports.append(_Report(host=end.host, at_s=end.ended_s, text=text, log=log))
    return reports


def _error_text(failure: protocol.Failure) -> str:
    """Return the full error text: the exception, or the end of the log."""
    if failure.what:
        return failure.what
    error = tracebacks.exception_text(failure.traceback) or failure.error
    own = error.removeprefix(_SCRIPT_ENDED_ITSELF)
    if error and own == error:
        return error
    if failure.exit_code == _ABORTED:
        return tracebacks.last_cxx_error(failure.last_lines)
    if failure.exit_code < 0:
        return ""  # its other output is unrelated to the exit
    last_error = tracebacks.last_error(failure.last_lines)
    if (
        last_error or own.lstrip("-").isdecimal()
    ):  # sys.exit("no data") is a text, sys.exit(3) is not
        return last_error
    return own


def _blames(
    reports: Sequence[_Report], ours_from_s: float, killed: Collection[int]
) -> dict[_Report, _Blame]:
    """Classify each report; a kill after ``ours_from_s``, or of one of the ``killed`` ranks, is our own."""
    for report in reports:
        # A rank that kept others waiting until they timed out was killed after that, not before.
        if report.explanation is not None and report.explanation.role is Role.PEER_LATE:
            ours_from_s = min(ours_from_s, report.at_s + _WITH_THE_FIRST_S)
    return {report: _blame(report, ours_from_s, killed) for report in reports}


def _blame(report: _Report, ours_from_s: float, killed: Collection[int]) -> _Blame:
    if report.is_lost:
        return _Blame.CAUSE
    was_killed = "by SIGKILL" in report.text
    if report.failure is not None:
        was_killed = report.code == _KILLED and not report.ran_out_of_memory
        if was_killed and report.failure.rank in killed:
            return _Blame.STOPPED
    if report.code in _STOPPED_BY_REQUEST or _ENDED_BY_REQUEST.search(report.text):
        return _Blame.STOPPED
    if was_killed and report.at_s > ours_from_s:
        return _Blame.STOPPED
    return _Blame.PEER if report.speaks_of_peer else _Blame.CAUSE


def _finding(first: _Report, who: str, aftermath: Sequence[str], logs: str) -> Finding:
    why, fix = _reasons(first)
    failure = first.failure
    evidence: list[str] = []
    if failure is not None:
        name, what = first.exit.name, f"{who} failed: {first.cause}"
        if failure.what.startswith(f"{who} "):  # the text already names the rank
            what = first.cause
        if not failure.what:
            evidence.append(
                tracebacks.shortened_traceback(failure.traceback)
                or tracebacks.last_output(failure.traceback or failure.last_lines, _LINES_SHOWN)
            )
        evidence.append(f"log: {logs}/rank-{failure.rank}.log")
    else:
        name, what = "agent-failed", f"{who} failed: {_headline(first.text)}"
        if first.is_lost:
            name, what = "host-lost", f"{who} was lost: {_headline(first.text)}"
        evidence.append(tracebacks.last_output(first.log, _LINES_SHOWN))
    return Finding(
        name=name,
        status=Status.FAILURE,
        what=_clean([what]),
        why=_clean([*why, *aftermath]),
        fix=_clean([fix]),
        evidence=_clean(evidence),
    )


def _reasons(report: _Report) -> tuple[list[str], str]:
    """Return the reasons, one sentence each, and the fix."""
    failure, why, fix = report.failure, "", ""
    if failure is not None and failure.what:
        why, fix = failure.why, failure.fix
    elif report.is_lost:
        why = "the launcher and {host} lost contact"
        fix = "check that {host} is up and on the network, and that its node agent was not killed there"
    elif report.explanation is not None:
        why = "; ".join(filter(None, (report.explanation.what, report.explanation.why)))
        fix = report.explanation.fix
    elif failure is not None and (report.code != 1 or not report.text):
        why, fix = report.exit.why, report.exit.fix
        crash = tracebacks.crashed_at(failure.last_lines)
        if crash is not None:
            why += f"\nit happened at {crash}"
    elif failure is not None and (line := tracebacks.raised_at(failure.traceback)):
        why = f"raised at {line}"
    reasons = [why, _memory_text(report)]
    return [reason.replace("{host}", report.host) for reason in reasons], fix.replace(
        "{host}", report.host
    )


def _memory_text(report: _Report) -> str:
    """Return what is known about the memory of a rank that was killed."""
    failure = report.failure
    if failure is None:
        return ""
    is_known = "its peak" in failure.evidence or failure.peak_rss_bytes is None
    if is_known or report.code != _KILLED:
        return failure.evidence
    peak = f"its peak was {format_bytes(failure.peak_rss_bytes or 0)}"
    return f"{failure.evidence}; {peak}" if failure.evidence else peak


def _aftermath(
    rest: dict[_Report, _Blame], killed: set[int], grace_s: float, *, nobody_failed: bool
) -> list[str]:
    """Return one line each for the other ranks."""
    causes: list[str] = []
    peers: list[int] = []
    stopped: list[int] = []
    slow: list[int] = []
    for report, blame in rest.items():
        ranks = _ranks([report])
        if blame is _Blame.CAUSE:
            verb = "was lost" if report.is_lost else "failed"
            causes.append(f"{report.who} {verb} too: {report.cause}")
        elif blame is _Blame.PEER and not report.only_waited:
            peers += ranks
        elif blame is _Blame.STOPPED and not nobody_failed and killed.isdisjoint(ranks):
            stopped += ranks
        elif blame is _Blame.STOPPED:
            slow += ranks
    lines = causes[:_CAUSES_SHOWN]
    if peers:
        lines.append(
            _of_ranks(peers, "then lost its connection to it", "then lost their connection to it")
        )
    if slow and nobody_failed:
        before = "had not failed but had to be killed: read"
        lines.append(_of_ranks(slow, f"{before} its log first", f"{before} their logs first"))
        return lines
    if stopped:
        lines.append(_of_ranks(stopped, "was then stopped", "were then stopped"))
    if slow:
        late = f"did not stop within {grace_s:g} s and"
        lines.append(_of_ranks(slow, f"{late} was killed", f"{late} were killed"))
    return lines


def _of_ranks(ranks: Sequence[int], of_one: str, of_several: str) -> str:
    return f"{rank_text(ranks)} {of_one if len(ranks) == 1 else of_several}"


def _after_hang(hang: Finding, peers: Sequence[_Report]) -> Finding:
    """Return the root cause if no rank failed by itself: ranks timed out in a reported hang."""
    why = [hang.why]
    ranks = _ranks(peers)
    if ranks:
        first = min(peers, key=lambda report: report.at_s)
        why.append(f"{rank_text(ranks)} then timed out: {first.cause}")
    return dataclasses.replace(
        hang,
        status=Status.FAILURE,
        what=_clean([hang.what]),
        why=_clean(why),
        evidence=_clean([hang.evidence]),
    )


def _of_early_end(
    finding: Finding, first: _Report, finished: Sequence[int], aftermath: Sequence[str]
) -> Finding:
    """Return the root cause for ranks that finished while another one still needed them."""
    why = [
        "the ranks did not run the same number of steps",
        f"{first.who} then failed: {first.cause}",
    ]
    return dataclasses.replace(
        finding,
        name="rank-ended-early",
        what=_of_ranks(
            finished,
            f"finished while {first.who} still needed it",
            f"finished while {first.who} still needed them",
        ),
        why=_clean([*why, *aftermath]),
        fix="give every rank the same number of batches: a DistributedSampler, drop_last=True, or "
        "torch.distributed.algorithms.Join; no collective inside `if rank == 0`",
    )


def _of_abort_at_exit(finding: Finding, first: _Report, aftermath: Sequence[str]) -> Finding:
    """Return the root cause for a rank whose script had finished when its process aborted."""
    why = "a library thread was still running, usually of a process group that the script did not destroy"
    message = f"its message: {_headline(first.text)}" if first.text else ""
    return dataclasses.replace(
        finding,
        name="rank-aborted-at-exit",
        what=f"{first.who} finished, then aborted (SIGABRT) while Python was shutting down",
        why=_clean([why, message, *aftermath]),
        fix="call torch.distributed.destroy_process_group() at the end of the script, on every rank",
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
    return "\n".join(printable(line.replace("\t", "    "), colour=False) for line in lines)
