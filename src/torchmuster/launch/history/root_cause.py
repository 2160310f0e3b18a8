"""Find the root cause among all failures on all hosts.

When a rank exits, the others lose their connection to it and fail too, often before the first exit is
reported; then the launcher stops the rest. So the first report is not always the cause: reports that a
peer is gone, and exits that the launcher requested, rank below real causes.
"""

import dataclasses
import enum
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torchmuster.finding import Finding, Status
from torchmuster.known_errors.explain import Explanation, explain_text
from torchmuster.known_errors.rule import Role
from torchmuster.launch import protocol
from torchmuster.launch.history import known_failures
from torchmuster.launch.launcher.console import printable, rank_text
from torchmuster.launch.node.memory_evidence import KERNEL_KILLED_IT
from torchmuster.redaction import redact_text
from torchmuster.units import format_bytes

_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_BEGINNING = "Traceback (most recent call last):"
_GROUP_BEGINNING = "  + Exception Group Traceback (most recent call last):"
_GROUP_LINE = re.compile(r"  \| (?=\S)")
_CXX_WHAT = re.compile(r"^ *what\(\): +(.*)", re.MULTILINE)
_PYTHON_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Timeout): .*")
_USAGE_ERROR = re.compile(r"^\S+: error: .+")
_FRAME = re.compile(r'^ *(?:\| +)?File "([^"]+)", line (\d+)', re.MULTILINE)
_FATAL_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+) in (\S+)', re.MULTILINE)
_LIBRARY = re.compile(r"[/\\](?:site-packages|dist-packages|lib[/\\]python3[.\d]*)[/\\]|^<frozen ")

# Wherever it is installed.
_OURS = re.compile(r"[/\\]torchmuster[/\\](?:train|launch|worker\.py|distributed\.py)")


def without_torch_prefix(text: str) -> str:
    """Remove torch's ``[rank3]: `` prefix from every line."""
    return _TORCH_PREFIX.sub("", text)


def exception_text(traceback: str) -> str:
    """Return the exception that a traceback ends with, and its whole message."""
    lines = without_torch_prefix(traceback).rstrip().splitlines()
    begins = [n for n, line in enumerate(lines) if line in (_BEGINNING, _GROUP_BEGINNING)]
    start = begins[-1] if begins else 0
    if begins and lines[start] == _GROUP_BEGINNING:
        found = (n for n in range(start + 1, len(lines)) if _GROUP_LINE.match(lines[n]))
        first = next(found, None)
        return "" if first is None else lines[first].removeprefix("  | ")
    # The frames are indented, and so is the source of a syntax error.
    after = range(start + 1 if begins else 0, len(lines))
    first = next((n for n in after if lines[n] and not lines[n][0].isspace()), None)
    return "" if first is None else "\n".join(lines[first:])


def last_cxx_error(output: str) -> str:
    """Return the message of the last C++ exception (``what():``); "" if there is none."""
    spoken: list[str] = _CXX_WHAT.findall(without_torch_prefix(output))
    return spoken[-1].strip() if spoken else ""


def last_error(output: str) -> str:
    """Return the last line of a log that looks like an exception or a usage error; else ""."""
    for line in reversed(without_torch_prefix(output).splitlines()):
        if _PYTHON_ERROR.match(line) or _USAGE_ERROR.match(line):
            return line
    return ""


def raised_at(traceback: str) -> str:
    """Return ``train.py:13``, the last line in the user's own code; "" if there is none."""
    frames: list[tuple[str, str]] = _FRAME.findall(without_torch_prefix(traceback))
    own = [f"{file}:{line}" for file, line in frames if not _LIBRARY.search(file)]
    return own[-1] if own else ""


def crashed_at(output: str) -> str:
    """Return ``train.py:13 in step``, the user's line at a fatal error (a signal); else ""."""
    stack = without_torch_prefix(output).rpartition("Current thread 0x")[2].partition("\n\n")[0]
    for file, line, name in _FATAL_FRAME.findall(stack):  # the innermost first
        if _own(file):
            return f"{file}:{line} in {name}"
    return ""


def from_own_code(text: str) -> str:
    """Remove the frames before the user's own code from each traceback that reaches it."""
    lines = text.splitlines()
    kept: list[str] = []
    at = 0
    while at < len(lines):
        kept.append(lines[at])
        at += 1
        if kept[-1] == _BEGINNING:
            end = at
            while end < len(lines) and lines[end].startswith(" "):
                end += 1
            frames = [
                n for n in range(at, end) if (found := _FRAME.match(lines[n])) and _own(found[1])
            ]
            at = frames[0] if frames else at
    return "\n".join(kept)


def _own(file: str) -> bool:
    return not _LIBRARY.search(file) and not _OURS.search(file)


def last_output(text: str, lines: int = 25) -> str:
    """Return the last lines of a text."""
    return "\n".join(text.rstrip().splitlines()[-lines:])


_LINES_SHOWN = 25
_LONGEST_HEADLINE = 240
_KILLED, _ABORTED = -9, -6
_ASKED_TO_END = (-15, -2)
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
    lost: str = ""
    lost_s: float = 0.0


class _Blame(enum.IntEnum):
    """How a report relates to the root cause, most likely cause first."""

    CAUSE = 0
    PEER = 1  # it reports that a peer is gone or late
    ENDED = 2  # it was stopped on purpose


@dataclass(frozen=True, kw_only=True)
class _Report:
    """One failure: of a rank, or of a whole host if there is no ``failure``."""

    host: str
    at_s: float
    text: str  # the whole error, "" where there is only an exit code
    failure: protocol.Failure | None = None
    log: str = ""  # of the agent
    lost: bool = False


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
    killed = {rank for end in ends if end.ended for rank in end.ended.killed}
    blames = _blamed(_reports(ends), noticed_s + min(_WITH_THE_FIRST_S, grace_s / 2), killed)
    if hang is not None and _Blame.CAUSE not in blames.values():
        return _after_hang(hang, blames)
    if not blames:
        return Finding(
            name="run-failed",
            status=Status.FAILURE,
            what="the run failed, and no host reported why",
            fix=f"read the logs: {logs}",
        )
    first = min(blames, key=lambda report: (blames[report], report.at_s))
    alike = [report for report in blames if report is not first and _alike(first, report)]
    who = f"rank {first.failure.rank} on {first.host}" if first.failure else first.host
    if world_size is not None and 1 < world_size == len(_root_cause_ranks([first, *alike])):
        who = f"all {world_size} ranks"
        alike_words = []
    else:
        alike_words = (
            [f"{rank_text(_root_cause_ranks(alike))} failed in the same way"] if alike else []
        )
    rest = {one: blame for one, blame in blames.items() if one is not first and one not in alike}
    aftermath = alike_words + _aftermath(
        rest, killed, grace_s, nobody_failed=blames[first] is _Blame.PEER
    )
    early = [rank for end in ends if end.ended for rank in end.ended.finished]
    if blames[first] is _Blame.PEER and first.failure is not None and early:
        return _of_early_end(first, early, aftermath, logs)
    finding = _finding(first, who, aftermath, logs)
    if (
        first.failure
        and first.failure.rank in early
        and _root_cause_code(first.failure) == _ABORTED
    ):
        return _of_abort_at_exit(finding, first, aftermath)
    return finding


def _of_abort_at_exit(finding: Finding, first: _Report, aftermath: Sequence[str]) -> Finding:
    """Return the root cause for a rank whose script had finished when its process aborted."""
    left = f"rank {first.failure.rank} on {first.host}" if first.failure else first.host
    said = [f"its message: {_headline(first.text)}"] if first.text else []
    why = "a library thread was still running, usually of a process group that the script did not destroy"
    return dataclasses.replace(
        finding,
        name="rank-aborted-at-exit",
        what=f"{left} finished, then aborted (SIGABRT) while Python was shutting down",
        why=_clean("\n".join([why, *said, *aftermath])),
        fix="call torch.distributed.destroy_process_group() at the end of the script, on every rank",
    )


def _after_hang(hang: Finding, blames: Mapping[_Report, _Blame]) -> Finding:
    """Return the root cause if no rank failed by itself: ranks timed out in a reported hang."""
    gave_up = [report for report, blame in blames.items() if blame is _Blame.PEER]
    lines = []
    if gave_up:
        first = min(gave_up, key=lambda report: report.at_s)
        lines = (
            [f"{rank_text(_root_cause_ranks(gave_up))} then timed out: {_cause(first)}"]
            if first.failure
            else []
        )
    return dataclasses.replace(
        hang,
        status=Status.FAILURE,
        what=_clean(hang.what),
        why=_clean("\n".join([hang.why, *lines])),
        evidence=_clean(hang.evidence),
    )


def _of_early_end(
    first: _Report, early: Sequence[int], aftermath: Sequence[str], logs: str
) -> Finding:
    who = rank_text(early)
    left = f"rank {first.failure.rank} on {first.host}" if first.failure else first.host
    lines = [f"{left} then failed: {_cause(first)}", *aftermath]
    finding = _finding(first, left, (), logs)
    return dataclasses.replace(
        finding,
        name="rank-ended-early",
        what=f"{who} finished while {left} still needed {'it' if len(early) == 1 else 'them'}",
        why=_clean("\n".join(["the ranks did not run the same number of steps", *lines])),
        fix="give every rank the same number of batches: a DistributedSampler, drop_last=True, or "
        "torch.distributed.algorithms.Join; no collective inside `if rank == 0`",
    )


def _reports(ends: Sequence[NodeExit]) -> list[_Report]:
    reports = []
    for end in ends:
        if end.ended is None:
            if end.lost:
                reports.append(_Report(host=end.host, at_s=end.lost_s, text=end.lost, lost=True))
            continue
        for failure in end.ended.failures:
            at_s = end.ended_s - failure.ago_s
            text = _said(failure)
            reports.append(_Report(host=end.host, at_s=at_s, text=text, failure=failure))
        if not end.ended.good and not end.ended.failures:
            words = end.ended.words or "the node agent reported no cause"
            error = last_error(words)
            text = words.splitlines()[0] + (f": {error}" if error else "")
            reports.append(_Report(host=end.host, at_s=end.ended_s, text=text, log=words))
    return reports


def _said(failure: protocol.Failure) -> str:
    """Return the full error text: the exception, or the end of the log."""
    if failure.what:
        return failure.what
    error = exception_text(failure.traceback) or failure.error
    own = error.removeprefix(_SCRIPT_ENDED_ITSELF)
    if error and own == error:
        return error
    if failure.exit_code < 0:
        # Its other output is unrelated to the exit.
        aborted = failure.exit_code == _ABORTED
        return last_cxx_error(failure.last_lines) if aborted else ""
    # sys.exit("no data") is an error's text, sys.exit(3) is not
    is_code = own.lstrip("-").isdecimal()
    return last_error(failure.last_lines) or ("" if is_code else own)


def _root_cause_code(failure: protocol.Failure) -> int:
    """Return its own exit code: a rank that is already exiting may still get a signal."""
    own = failure.error.removeprefix(_SCRIPT_ENDED_ITSELF)
    if failure.what or failure.traceback or (own and own == failure.error):
        return 1
    itself = own != failure.error and own.isdecimal()
    return known_failures.by_signal(int(own) if itself else failure.exit_code)


def _blamed(
    reports: Sequence[_Report], ours_from_s: float, killed: Collection[int]
) -> dict[_Report, _Blame]:
    """Classify each report; a kill after ``ours_from_s``, or of one of the ``killed`` ranks, is our own."""
    late = [report.at_s for report in reports if _role(report) is Role.PEER_LATE]
    # A rank that kept others waiting until they timed out was killed after that, not before.
    ours_from_s = min([ours_from_s, *(at_s + _WITH_THE_FIRST_S for at_s in late)])
    return {report: _blame(report, ours_from_s, killed) for report in reports}


def _blame(report: _Report, ours_from_s: float, killed_ranks: Collection[int]) -> _Blame:
    failure = report.failure
    killed = "by SIGKILL" in report.text
    if failure is not None:
        code = _root_cause_code(failure)
        killed = code == _KILLED and not _was_out_of_memory(failure)
        if code in _ASKED_TO_END or (killed and failure.rank in killed_ranks):
            return _Blame.ENDED
    if report.lost:
        return _Blame.CAUSE
    if _ENDED_BY_REQUEST.search(report.text) or (killed and report.at_s > ours_from_s):
        return _Blame.ENDED
    if _only_waited(report):
        return _Blame.PEER
    return _Blame.PEER if _role(report) in (Role.PEER_LATE, Role.PEER_GONE) else _Blame.CAUSE


def _only_waited(report: _Report) -> bool:
    return not report.lost and _ONLY_WAITED.match(report.text) is not None


def _role(report: _Report) -> Role | None:
    found = None if report.lost else _root_cause_known(report)
    return found.role if found else None


def _root_cause_known(report: _Report) -> Explanation | None:
    """Return the explanation of a report's text, unless it matches only incidental messages."""
    found = explain_text(report.text, host=report.host)
    return found[0] if found and found[0].role is not Role.ASIDE else None


def _was_out_of_memory(failure: protocol.Failure) -> bool:
    return failure.evidence.startswith(KERNEL_KILLED_IT)


def _finding(first: _Report, who: str, aftermath: Sequence[str], logs: str) -> Finding:
    why, fix = _explanation(first)
    if failure := first.failure:
        name, what = _exit(failure).name, f"{who} failed: {_cause(first)}"
        if failure.what.startswith(f"{who} "):  # the text already names the rank
            what = _cause(first)
        shown = "" if failure.what else failure.traceback or failure.last_lines
        shown = from_own_code(without_torch_prefix(shown))
        log = f"log: {logs}/rank-{failure.rank}.log"
    else:
        name, verb = ("host-lost", "was lost") if first.lost else ("agent-failed", "failed")
        what = f"{who} {verb}: {_headline(first.text)}"
        shown, log = first.log, ""
    evidence = [last_output(shown, _LINES_SHOWN), log]
    return Finding(
        name=name,
        status=Status.FAILURE,
        what=_clean(what),
        why=_clean("\n".join([*why, *aftermath])),
        fix=_clean(fix),
        evidence=_clean("\n".join(part for part in evidence if part)),
    )


def _clean(text: str) -> str:
    """Return the output of a program without secrets and terminal control sequences."""
    lines = redact_text(text).split("\n")
    return "\n".join(printable(line.replace("\t", "    "), colour=False) for line in lines)


def _cause(report: _Report) -> str:
    """Return a short cause for the headline."""
    if report.failure is None:
        return _headline(report.text)
    exit_ = _exit(report.failure)
    if exit_ is known_failures.OUT_OF_MEMORY or not report.text:
        return exit_.words
    by_signal = _root_cause_code(report.failure) < 0
    return f"{exit_.words}: {_headline(report.text)}" if by_signal else _headline(report.text)


def _exit(failure: protocol.Failure) -> known_failures.KnownExit:
    """Return the known meaning of a rank's exit."""
    code = _root_cause_code(failure)
    if code == _KILLED and _was_out_of_memory(failure):
        return known_failures.OUT_OF_MEMORY
    return known_failures.exit_of(code)


def _headline(text: str) -> str:
    lines = text.strip().splitlines() or [""]
    line = _GLOO_ADVICE.sub("", _GLOO_ADDRESS.sub("", _SOURCE_PLACE.sub("", lines[0])))
    if line.endswith(":") and len(lines) > 1:  # "Error(s) in loading state_dict for Net:"
        line = f"{line} {lines[1].strip()}"
    return line if len(line) <= _LONGEST_HEADLINE else f"{line[:_LONGEST_HEADLINE]}…"


def _explanation(report: _Report) -> tuple[list[str], str]:
    """Return the reasons, one sentence each, and the fix."""
    failure = report.failure
    why = fix = ""
    if failure is not None and failure.what:
        why, fix = failure.why, failure.fix
    elif report.lost:
        why = "the launcher and {host} lost contact"
        fix = "check that {host} is up and on the network, and that its node agent was not killed there"
    elif found := _root_cause_known(report):
        why, fix = "; ".join(part for part in (found.what, found.why) if part), found.fix
    elif failure is not None and (_root_cause_code(failure) != 1 or not report.text):
        exit_ = _exit(failure)
        why, fix = exit_.why, exit_.fix
        if place := crashed_at(failure.last_lines):
            why = f"{why}\nit happened at {place}"
    elif failure is not None and (place := raised_at(failure.traceback)):
        why = f"raised at {place}"
    sentences = [why, _of_memory(failure) if failure else ""]
    words = [text.replace("{host}", report.host) for text in sentences if text]
    return words, fix.replace("{host}", report.host)


def _of_memory(failure: protocol.Failure) -> str:
    if "its peak" in failure.evidence or failure.peak_rss_bytes is None:
        return failure.evidence
    if _root_cause_code(failure) != _KILLED:
        return failure.evidence
    peak = f"its peak was {format_bytes(failure.peak_rss_bytes)}"
    return f"{failure.evidence}; {peak}" if failure.evidence else peak


def _alike(first: _Report, other: _Report) -> bool:
    """Return whether two ranks failed for the same reason: same text except for numbers."""
    if first.failure is None or other.failure is None:
        return False
    texts = {re.sub(r"\d+", "#", _cause(report)) for report in (first, other)}
    return len(texts) == 1


def _root_cause_ranks(reports: Sequence[_Report]) -> list[int]:
    return [report.failure.rank for report in reports if report.failure is not None]


def _aftermath(
    rest: dict[_Report, _Blame], killed: Collection[int], grace_s: float, *, nobody_failed: bool
) -> list[str]:
    """Return one line each for the other ranks."""
    lines = []
    for report in [one for one, blame in rest.items() if blame is _Blame.CAUSE][:3]:
        who = f"rank {report.failure.rank} on {report.host}" if report.failure else report.host
        lines.append(f"{who} {'was lost' if report.lost else 'failed'} too: {_cause(report)}")
    gone = [report for report, blame in rest.items() if blame is _Blame.PEER]
    peers = _root_cause_ranks([report for report in gone if not _only_waited(report)])
    ended = _root_cause_ranks([report for report, blame in rest.items() if blame is _Blame.ENDED])
    if peers:
        lines.append(f"{rank_text(peers)} then lost {_its(peers)} connection to it")
    if ended and nobody_failed:
        logs = "its log" if len(ended) == 1 else "their logs"
        lines.append(f"{rank_text(ended)} had not failed but had to be killed: read {logs} first")
        return lines
    slow = [rank for rank in ended if rank in killed]
    if stopped := [rank for rank in ended if rank not in killed]:
        lines.append(f"{rank_text(stopped)} {_was(stopped)} then stopped")
    if slow:
        lines.append(f"{rank_text(slow)} did not stop within {grace_s:g} s and {_was(slow)} killed")
    return lines


def _was(ranks: Sequence[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def _its(ranks: Sequence[int]) -> str:
    return "its" if len(ranks) == 1 else "their"
