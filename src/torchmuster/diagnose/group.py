"""``muster check``: connect to the hosts, check each, test the links between them, run real ranks.

All steps use one session. A failure becomes a finding, and the other steps continue.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from torchmuster.diagnose import collectives, probing, wrong_values
from torchmuster.diagnose.clocks import clock_findings
from torchmuster.diagnose.links.judge import judge_links
from torchmuster.diagnose.links.model import Link
from torchmuster.diagnose.links.survey import survey_links
from torchmuster.diagnose.probing import HostProbe
from torchmuster.diagnose.rank_record import RankRecord
from torchmuster.diagnose.result import GroupResult, Machine, headline
from torchmuster.diagnose.unreachable_hosts import why_all_unreachable
from torchmuster.errors import MachineLost, MusterError
from torchmuster.finding import Finding, Status, exit_code, from_error, worst_first
from torchmuster.launch.history import known_failures
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.console import Console
from torchmuster.launch.launcher.host import ConnectedHost
from torchmuster.launch.launcher.run import JobOutcome, Result
from torchmuster.launch.launcher.session import Session
from torchmuster.launch.launcher.waiting import Stopped
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import RunFolder
from torchmuster.units import name_several

_CHECKED_WITHIN_S = 40.0
# A host's own firewall check is a guess; links that work prove it wrong.
_SHOWN_BY_LINKS = frozenset({"firewall-on"})
# With these, ranks would only report the same problem again.
_NO_TORCH = frozenset({"torch-broken", "torch-missing", "module-shadowed"})
Subject = TypeVar("Subject", ConnectedHost, HostProbe)
Answer = TypeVar("Answer")
# By finding name: if one of the causes was found anywhere, the consequence is not reported.
_CAUSES: dict[str, frozenset[str]] = {
    # Ranks that wait for a failed rank are a consequence; the failed rank has the cause.
    "collective-hangs": known_failures.NAMES | {"agent-failed", "host-lost"},
    "no-carrier": frozenset({"own-cable-out"}),
    "probe-hangs": known_failures.NAMES | {"collective-hangs"},
}
# The same, if the cause is at least as severe and names the same hosts.
_CAUSES_THERE: dict[str, frozenset[str]] = {
    # The link was also measured without torch.
    "slow-pair": frozenset({"slow-link", "stalled-link"}),
}


def without_consequences(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings without duplicates and without consequences of others."""
    names = {finding.name for finding in findings}
    causes_only: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        causes = _CAUSES_THERE.get(finding.name, frozenset())
        there = [other for other in findings if other.name in causes and _covers(other, finding)]
        if not there and not names & _CAUSES.get(finding.name, frozenset()):
            causes_only.setdefault((finding.name, finding.what), finding)
    return list(causes_only.values())


def _covers(cause: Finding, finding: Finding) -> bool:
    """Return whether a cause is at least as severe, and is on all hosts of a finding."""
    as_bad = worst_first([cause, finding])[0] is cause
    return as_bad and set(cause.hosts) >= set(finding.hosts)


def merge_findings(found: Mapping[str, Sequence[Finding]], *, named: bool = True) -> list[Finding]:
    """Merge equal findings of several hosts into one; omit those with status OK.

    With ``named``, each has its hosts, and its text starts with their names.
    """
    same: dict[Finding, dict[str, str]] = {}  # the evidence of each host
    for host, findings in found.items():
        for finding in findings:
            if finding.status is not Status.OK:
                text = dataclasses.replace(finding, evidence="")
                same.setdefault(text, {})[host] = finding.evidence
    merged = []
    for text, by_host in same.items():
        hosts = tuple(by_host)
        finding = dataclasses.replace(text, evidence=_evidence_of(by_host))
        if named:
            what = f"{name_several(hosts)}: {text.what}"
            finding = dataclasses.replace(finding, what=what, hosts=hosts)
        merged.append(finding)
    return merged


def _evidence_of(by_host: Mapping[str, str]) -> str:
    """Return the evidence of several hosts; with the hosts' names if it differs."""
    hosts: dict[str, list[str]] = {}
    for host, text in by_host.items():
        if text:
            hosts.setdefault(text, []).append(host)
    if len(hosts) <= 1:
        return next(iter(hosts), "")
    return "\n".join(f"{name_several(names)}: {text}" for text, names in hosts.items())


def able_together(
    hosts: Sequence[ConnectedHost], apart: Collection[tuple[int, int]]
) -> list[list[ConnectedHost]]:
    """Divide hosts into groups whose members can train together.

    ``apart`` are pairs of hosts (by place) of which one does not reach the other.
    """
    groups: list[list[ConnectedHost]] = []
    for host in hosts:
        for group in groups:
            if all(_fit(host, member, apart) for member in group):
                group.append(host)
                break
        else:
            groups.append([host])
    return groups


def _fit(host: ConnectedHost, member: ConnectedHost, apart: Collection[tuple[int, int]]) -> bool:
    assert host.record is not None
    assert member.record is not None
    if (host.place, member.place) in apart or (member.place, host.place) in apart:
        return False
    versions = set()
    for torch in (host.record.torch, member.record.torch):
        versions.add((torch or "").partition("+")[0])
    return host.record.system == member.record.system and len(versions) == 1


def partitioned_hosts(links: Sequence[Link]) -> set[tuple[int, int]]:
    """Return the pairs of hosts between which ranks cannot connect or cannot exchange data."""
    apart = set()
    for link in links:
        stalls = link.figures is not None and link.figures.bytes_per_s is None
        if link.problem or link.rendezvous_problem or stalls:
            apart.add(link.places)
    return apart


def reached_hosts(links: Sequence[Link]) -> set[int]:
    """Return the hosts that every other host reached."""
    reached = {link.target.place for link in links}
    return reached - {
        link.target.place for link in links if link.problem or link.rendezvous_problem
    }


class GroupCheck:
    """One check of a group; ``result`` is set when it has finished, unless it was stopped."""

    def __init__(
        self,
        spec: JobSpec,
        transport: Transport,
        console: Console,
        run: RunFolder,
        *,
        quick: bool = False,
    ) -> None:
        """Check the hosts on which ``spec`` would run; ``quick`` skips the ranks."""
        self.spec = spec
        self.run_folder = run
        self._transport = transport
        self._console = console
        self._quick = quick
        self._output = probing.ProbeOutput()
        self._session = Session(spec, transport, self._output, run)
        self._attempts = 0
        self._findings: list[Finding] = []
        self._links: list[Link] = []
        self._apart: set[tuple[int, int]] = set()
        self._of_hosts: dict[int, list[Finding]] = {}
        self._ranks: list[RankRecord] = []
        self._not_tried: list[str] = []
        self.token = self._session.token
        self.result: GroupResult | None = None

    def stop(self, origin: str) -> None:
        """Stop the check; a second request kills its ranks."""
        self._session.stop(origin)

    def pass_on(self, name: str) -> None:
        """Forward a signal to every rank."""
        self._session.pass_on(name)

    async def run(self, on_phase: Callable[[str], None]) -> JobOutcome:
        """Run the whole check."""
        session = self._session
        session.on_phase = on_phase
        began_s = time.monotonic()
        outcome = JobOutcome(result=Result.STOPPED, headline="the check was stopped")
        try:
            on_phase("joining")
            await self._transport.open(session.hosts.arrive)
            absent = await session.hosts.gather()
            if self._session.is_many:
                self._console.say(session.hosts.words())
            if self.spec.hosts:  # connected over ssh
                looking = why_all_unreachable(absent, self._transport.places)
                absent = await session.waiting.unless_stopped(looking)
            for place, finding in absent.items():
                hosts = (self._transport.places[place],)
                self._findings.append(dataclasses.replace(finding, hosts=hosts))
            on_phase("starting")
            here = [host for host in session.hosts.all if host.place not in absent]
            ready = await session.waiting.unless_stopped(self._check_hosts(here))
            await self._try_ranks(ready)
            self.result = self._result(absent, time.monotonic() - began_s)
            failed = exit_code(self.result.findings)
            result = Result.FAILED if failed else Result.FINISHED
            text = headline(self.result)
            outcome = JobOutcome(result=result, headline=text, is_reported=True)
        except MusterError as error:  # the transport failed as a whole
            self._findings += from_error(error)
            self.result = self._result({}, time.monotonic() - began_s)
            raise
        except Stopped:
            if session.attempt is not None:
                await session.attempt.end()
        finally:
            await session.leave(outcome.exit_code, outcome.headline)
        return outcome

    # ---- each host, and the links between them

    async def _check_hosts(self, hosts: Sequence[ConnectedHost]) -> list[ConnectedHost]:
        """Check hosts and links; return the hosts that can run ranks."""
        examiners = [probe for _, probe in await self._each(hosts, HostProbe.engage)]
        under_way: list[str] = []

        async def doing(what: str, work: Awaitable[Answer]) -> Answer:
            under_way.append(what)
            try:
                return await work
            finally:
                under_way.remove(what)

        async with self._session.waiting.reporting(lambda: ", ".join(under_way)):
            _, ready = await asyncio.gather(
                doing("checking the hosts", self._examine(examiners)),
                doing("reading devices and code", self._each(hosts, self._session.prepare_one)),
            )
            # Not in parallel: the checks would find the survey's open ports in use.
            await doing("measuring the links", self._survey(examiners))
        self._findings += judge_links(self._links)
        self._apart = partitioned_hosts(self._links)
        if self._session.is_many:
            await self._compare([host for host in hosts if not host.is_lost])
        self._add_host_findings()
        return [host for host, _ in ready if not host.is_lost]

    async def _examine(self, examiners: Sequence[HostProbe]) -> None:
        argument = {"folder": self.spec.folder}

        async def examine(examiner: HostProbe) -> list[Finding]:
            answer = await examiner.ask("examine", argument, within_s=_CHECKED_WITHIN_S)
            return [finding_from_json(content) for content in answer]

        for examiner, findings in await self._each(examiners, examine):
            self._of_hosts[examiner.place] = findings

    async def _survey(self, examiners: Sequence[HostProbe]) -> None:
        if len(examiners) < 2:
            return
        try:
            self._links = await survey_links(
                examiners,
                port=self.spec.port,
                address=self.spec.address,
                timeout_s=self.spec.limits.reach_s,
            )
        except MusterError as error:
            self._findings += from_error(error)

    async def _compare(self, hosts: Sequence[ConnectedHost]) -> None:
        try:
            differences = self._session.differences(hosts)
        except MusterError as error:
            differences = from_error(error)
        without = [host for host in hosts if host.record and not host.record.torch]
        if all(self._names_found(host) & _NO_TORCH for host in without):  # reported with the cause
            differences = [finding for finding in differences if finding.name != "torch-missing"]
        self._findings += [*differences, *clock_findings(hosts)]

    def _add_host_findings(self) -> None:
        """Add the findings of the hosts' own checks, except those that the links have tested."""
        reached = reached_hosts(self._links)
        shown: dict[str, list[Finding]] = {}
        for place, findings in self._of_hosts.items():
            hidden = _SHOWN_BY_LINKS if place in reached else frozenset()
            name = self._transport.places[place]
            shown[name] = [finding for finding in findings if finding.name not in hidden]
        self._findings += merge_findings(shown, named=self._session.is_many)

    async def _each(
        self, subjects: Sequence[Subject], work: Callable[[Subject], Awaitable[Answer]]
    ) -> list[tuple[Subject, Answer]]:
        """Run ``work`` for all in parallel; a failure becomes a finding and is not returned."""
        done = []
        answers = await asyncio.gather(*map(work, subjects), return_exceptions=True)
        for subject, answer in zip(subjects, answers, strict=True):
            if isinstance(answer, MusterError):
                refused = isinstance(subject, ConnectedHost) and not isinstance(answer, MachineLost)
                # A node agent does not know its name here.
                if refused and self._session.is_many:
                    answer.what = f"{subject.name}: {answer.what}"
                for finding in from_error(answer):
                    self._findings.append(dataclasses.replace(finding, hosts=(subject.name,)))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                done.append((subject, answer))
        return done

    # ---- real ranks

    async def _try_ranks(self, ready: Sequence[ConnectedHost]) -> None:
        if self._quick:
            self._not_tried.append("ranks (skipped by --quick)")
            return
        able = [host for host in ready if self._has_torch(host)]
        if unable := [host.name for host in ready if host not in able]:
            self._not_tried.append(
                f"ranks on {name_several(unable)}, because torch cannot be used there"
            )
        groups = able_together(able, self._apart)
        if len(groups) > 1:
            names = "; ".join(name_several([host.name for host in group]) for group in groups)
            self._not_tried.append(
                f"ranks on all hosts together, because of the findings (groups: {names})"
            )
        for group in groups:
            await self._probe(group)

    def _has_torch(self, host: ConnectedHost) -> bool:
        return bool(host.record and host.record.torch) and not self._names_found(host) & _NO_TORCH

    def _names_found(self, host: ConnectedHost) -> set[str]:
        return {finding.name for finding in self._of_hosts.get(host.place, ())}

    async def _probe(self, hosts: Sequence[ConnectedHost]) -> None:
        probed = await self._run_probe(hosts, {})
        second = None
        if variables := wrong_values.second_try(probed.records):
            settings = " ".join(f"{name}={value}" for name, value in variables.items())
            self._console.say(f"some values were wrong; running again with {settings}")
            second = (await self._run_probe(hosts, variables)).records
        self._ranks += probed.records
        with_gpus = [host.name for host in hosts if host.has_gpus]
        self._findings += collectives.judge_gpus(probed.records, with_gpus)
        self._findings += [*collectives.judge_collectives(probed.records, second), *probed.trouble]

    async def _run_probe(
        self, hosts: Sequence[ConnectedHost], environment: Mapping[str, str]
    ) -> probing.Probed:
        spec = probing.spec_of(self.spec, environment)
        probed = await probing.run_check_ranks(
            self._session, self._output, hosts, spec, attempt=self._attempts
        )
        self._attempts += 1
        return probed

    # ---- result

    def _result(self, absent: Mapping[int, Finding], seconds: float) -> GroupResult:
        return GroupResult(
            machines=tuple(
                _machine(name, place, self._session.hosts.at(place), absent.get(place))
                for place, name in enumerate(self._transport.places)
            ),
            findings=tuple(without_consequences(self._findings)),
            links=tuple(self._links),
            ranks=tuple(self._ranks),
            not_tried=tuple(self._not_tried),
            seconds=seconds,
        )


def _machine(name: str, place: int, host: ConnectedHost | None, absent: Finding | None) -> Machine:
    record = None if host is None else host.record
    missing = (absent.why or absent.what).partition("\n")[0] if absent else ""
    if host is None or record is None:
        return Machine(name=name, place=place, missing=missing or "it did not connect")
    return Machine(
        name=name,
        place=place,
        missing=host.why_lost or missing,
        host=record.host,
        system=record.system,
        python=record.python,
        torch=record.torch,
        torchmuster=record.torchmuster,
        cores=record.cores,
        addresses=tuple(address.address for address in record.addresses),
        clock_offset_s=host.clock_offset_s,
        devices=host.prepared.devices if host.prepared else (),
        ranks=host.prepared.ranks if host.prepared else None,
    )


def finding_from_json(content: Mapping[str, Any]) -> Finding:
    """Return a finding that a probe program sent."""
    try:
        return msgspec.convert(content, Finding)
    except msgspec.ValidationError as error:
        raise MusterError(f"cannot parse its findings: {error}") from error
