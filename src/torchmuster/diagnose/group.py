"""``muster check``: connect to the hosts, check each, test the links between them, run real ranks.

All steps use one session. A failure becomes a finding, and the other steps continue.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from torchmuster.diagnose import collectives, probing, wrong_values
from torchmuster.diagnose.links.judge import judge_links
from torchmuster.diagnose.links.model import Link
from torchmuster.diagnose.links.survey import links_not_tried, survey_links
from torchmuster.diagnose.probing import HostProbe
from torchmuster.diagnose.rank_record import RankRecord
from torchmuster.diagnose.result import GroupResult, Machine, failing_hosts, headline
from torchmuster.diagnose.texts import finding
from torchmuster.errors import MachineLost, MusterError
from torchmuster.finding import Finding, Status, exit_code, from_error
from torchmuster.launch.history import known_failures
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.compare_nodes import compare_all_nodes
from torchmuster.launch.launcher.console import Console
from torchmuster.launch.launcher.host import ConnectedHost
from torchmuster.launch.launcher.run import JobOutcome, Result
from torchmuster.launch.launcher.session import Session
from torchmuster.launch.launcher.waiting import Stopped
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds, name_several

_CHECKED_WITHIN_S = 40.0
_CLOCKS_APART_S = 5.0
_RANK_FAILURES = known_failures.NAMES | {"agent-failed", "host-lost"}
_BAD_LINKS = frozenset({"slow-link", "stalled-link"})
Subject = TypeVar("Subject", ConnectedHost, HostProbe)
Answer = TypeVar("Answer")


def without_consequences(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings without duplicates and without consequences of others."""
    causes_only: dict[tuple[str, str], Finding] = {}
    for found in findings:
        if not any(_follows(found, cause) for cause in findings):
            causes_only.setdefault((found.name, found.what), found)
    return list(causes_only.values())


def _follows(found: Finding, cause: Finding) -> bool:
    """Return whether a finding needs no line of its own because of another one."""
    if found.name == "collective-hangs":  # ranks that wait for a failed rank
        return cause.name in _RANK_FAILURES
    if found.name == "slow-pair":  # the link was also measured without torch
        return cause.name in _BAD_LINKS and set(found.hosts) <= set(cause.hosts)
    return False


def merge_findings(found: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Merge findings of several hosts with the same texts into one; omit those with status OK.

    Each starts with the names of its hosts, and has the evidence of the first one.
    """
    same: dict[Finding, list[str]] = {}
    evidence: dict[Finding, str] = {}
    for host, findings in found.items():
        for item in findings:
            if item.status is not Status.OK:
                text = dataclasses.replace(item, evidence="")
                same.setdefault(text, []).append(host)
                evidence.setdefault(text, item.evidence)
    merged = []
    for text, hosts in same.items():
        what = f"{name_several(hosts)}: {text.what}"
        merged.append(
            dataclasses.replace(text, what=what, hosts=tuple(hosts), evidence=evidence[text])
        )
    return merged


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
        self._findings: list[Finding] = []
        self._links: list[Link] = []
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
            hosts = await self._connect()
            on_phase("starting")
            ready = await session.waiting.unless_stopped(self._check_hosts(hosts))
            await self._try_ranks(ready)
            self.result = self._result(time.monotonic() - began_s)
            failed = exit_code(self.result.findings)
            result = Result.FAILED if failed else Result.FINISHED
            text = headline(self.result)
            outcome = JobOutcome(result=result, headline=text, is_reported=True)
        except MusterError as error:  # the transport failed as a whole
            outcome = JobOutcome(result=Result.FAILED, headline=f"the check failed: {error.what}")
            self._findings += from_error(error)
            self.result = self._result(time.monotonic() - began_s)
            raise
        except Stopped:
            if session.attempt is not None:
                await session.attempt.end()
        finally:
            await session.leave(outcome.exit_code, outcome.headline)
        return outcome

    async def _connect(self) -> list[ConnectedHost]:
        """Return the hosts that connect; for each other one there is a finding."""
        session = self._session
        await self._transport.open(session.hosts.arrive)
        absent = await session.hosts.gather()
        if session.is_many:
            self._console.say(session.hosts.describe())
        for place, trouble in absent.items():
            hosts = (self._transport.places[place],)
            self._findings.append(dataclasses.replace(trouble, hosts=hosts))
        return [host for host in session.hosts.all if host.place not in absent]

    # ---- each host, and the links between them

    async def _check_hosts(self, hosts: Sequence[ConnectedHost]) -> list[ConnectedHost]:
        """Check hosts and links; return the hosts that can run ranks."""
        session = self._session
        async with session.waiting.reporting(lambda: "checking the hosts, their devices and code"):
            engaged = await self._each(hosts, HostProbe.engage)
            probes = [probe for _, probe in engaged]
            examined, ready = await asyncio.gather(
                self._each(probes, self._examine), self._each(hosts, session.prepare_one)
            )
        if len(probes) > 1:
            # Not in parallel: the checks would find the survey's open ports in use.
            async with session.waiting.reporting(lambda: "measuring the links"):
                self._links = await survey_links(
                    probes,
                    port=self.spec.port,
                    address=self.spec.address,
                    timeout_s=self.spec.limits.reach_s,
                )
        self._not_tried += links_not_tried(self._links)
        self._findings += judge_links(self._links)
        if session.is_many:
            self._findings += merge_findings({probe.name: found for probe, found in examined})
            self._compare([host for host in hosts if not host.is_lost])
        else:
            for _, found in examined:
                self._findings += [item for item in found if item.status is not Status.OK]
        return [host for host, _ in ready if not host.is_lost]

    async def _examine(self, probe: HostProbe) -> list[Finding]:
        return await probe.ask(
            "examine", self.spec.folder, list[Finding], within_s=_CHECKED_WITHIN_S
        )

    def _compare(self, hosts: Sequence[ConnectedHost]) -> None:
        """Add the differences between hosts, and a note about clocks that differ from the first one."""
        try:
            self._findings += compare_all_nodes(hosts, self.spec)
        except MusterError as error:
            self._findings += from_error(error)
        apart = []
        for host in hosts:
            difference_s = host.clock_offset_s - hosts[0].clock_offset_s
            if abs(difference_s) >= _CLOCKS_APART_S:
                direction = "ahead" if difference_s > 0 else "behind"
                apart.append(f"{host.name} is {format_seconds(abs(difference_s))} {direction}")
        if apart:
            self._findings.append(finding("clocks", first=hosts[0].name, clocks=", ".join(apart)))

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
                for found in from_error(answer):
                    self._findings.append(dataclasses.replace(found, hosts=(subject.name,)))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                done.append((subject, answer))
        return done

    # ---- real ranks

    async def _try_ranks(self, ready: Sequence[ConnectedHost]) -> None:
        """Run ranks on the hosts without a failure."""
        if self._quick:
            self._not_tried.append("ranks (skipped by --quick)")
            return
        failing = failing_hosts(self._findings)
        if not self._session.is_many and exit_code(self._findings):
            failing = [host.name for host in ready]
        able = []
        for host in ready:
            if host.name not in failing and host.record and host.record.torch:
                able.append(host)
        skipped = [host.name for host in ready if host not in able]
        versions = {
            (host.record.system, _release(host.record.torch)) for host in able if host.record
        }
        if len(versions) > 1:
            self._not_tried.append("ranks, because the hosts' systems or versions of torch differ")
            return
        if skipped:
            self._not_tried.append(f"ranks on {name_several(skipped)}, because of the findings")
        if able:
            await self._probe(able)

    async def _probe(self, hosts: Sequence[ConnectedHost]) -> None:
        session, output = self._session, self._output
        records, failures = await probing.run_check_ranks(session, output, hosts, 0, {})
        second = None
        if variables := wrong_values.second_try(records):
            settings = " ".join(f"{name}={value}" for name, value in variables.items())
            self._console.say(f"some values were wrong; running again with {settings}")
            second, _ = await probing.run_check_ranks(session, output, hosts, 1, variables)
        self._ranks = records
        with_gpus = [host.name for host in hosts if host.has_gpus]
        self._findings += collectives.judge_gpus(records, with_gpus)
        self._findings += [*collectives.judge_collectives(records, second), *failures]

    # ---- result

    def _result(self, seconds: float) -> GroupResult:
        findings = without_consequences(self._findings)
        reasons: dict[str, str] = {}
        for found in findings:
            for name in found.hosts:
                reasons.setdefault(name, (found.why or found.what).partition("\n")[0])
        machines = []
        for place, name in enumerate(self._transport.places):
            host = self._session.hosts.at(place)
            if host is None or host.record is None:
                missing = reasons.get(name, "it did not connect")
                machines.append(Machine(name=name, place=place, missing=missing))
                continue
            prepared = host.prepared
            machines.append(
                Machine(
                    name=name,
                    place=place,
                    missing=host.why_lost or "",
                    record=host.record,
                    clock_offset_s=host.clock_offset_s,
                    devices=prepared.devices if prepared else (),
                    ranks=prepared.ranks if prepared else None,
                )
            )
        return GroupResult(
            machines=tuple(machines),
            findings=tuple(findings),
            links=tuple(self._links),
            ranks=tuple(self._ranks),
            not_tried=tuple(self._not_tried),
            seconds=round(seconds, 1),
        )


def _release(torch: str | None) -> str:
    return (torch or "").partition("+")[0]
