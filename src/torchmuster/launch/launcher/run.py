"""Run a job from the first connection to its end, and restart it after failures if configured."""

import asyncio
import enum
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchmuster.errors import ExitCode, MachineLost
from torchmuster.finding import Finding, from_error
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec, is_ours
from torchmuster.launch.launcher import restart
from torchmuster.launch.launcher.attempt import Attempt
from torchmuster.launch.launcher.console import Console
from torchmuster.launch.launcher.host import ConnectedHost
from torchmuster.launch.launcher.newcomers import Newcomers
from torchmuster.launch.launcher.restart import (
    PastAttempt,
    TrainingProgress,
    decide_restart,
    needs_user,
    restart_announcement,
    with_reason,
)
from torchmuster.launch.launcher.session import Session
from torchmuster.launch.launcher.stopping import (
    KilledRanks,
    Saved,
    StopCause,
    agent_stop_origin,
    killed_after_request,
    saved_after_request,
    saved_by_ranks,
)
from torchmuster.launch.launcher.waiting import Stopped
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds, name_several, rank_text

if TYPE_CHECKING:
    from torchmuster.launch.history.resume import ResumePlan
    from torchmuster.launch.launcher.webhook import Webhook

logger = logging.getLogger(__name__)

_WARNING = "SIGUSR1"  # of a scheduler; ranks of muster train wait for it
_READ_WITHIN_S = 20.0


class Result(enum.Enum):
    """How a run ended."""

    FINISHED = "finished"
    SAVED = "saved"  # after a stop request; it can go on
    STOPPED = "stopped"
    FAILED = "failed"


_EXIT_CODES = {
    Result.FINISHED: ExitCode.GOOD,
    Result.SAVED: ExitCode.SAVED,
    Result.STOPPED: ExitCode.TERMINATED,
    Result.FAILED: ExitCode.FAILED,
}


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """How a run ended; ``headline`` says it in one line.

    ``finding`` is the cause of a failure; ``saved`` what the ranks saved after a stop request. ``killed`` names the ranks that
    had to be killed after it, ``left`` the hosts that did not confirm the end. ``is_reported``: the caller prints the rest itself.
    """

    result: Result
    headline: str
    finding: Finding | None = None
    saved: Saved | None = None
    killed: KilledRanks | None = None
    left: tuple[str, ...] = ()
    is_reported: bool = False

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of this result."""
        return _EXIT_CODES[self.result]


class Run:
    """One run, from the first connection to its end, with all its attempts."""

    def __init__(
        self,
        spec: JobSpec,
        transport: Transport,
        console: Console,
        run: RunFolder,
        webhook: "Webhook | None" = None,
    ) -> None:
        self.spec = spec
        self.run_folder = run
        self._transport = transport
        self._webhook = webhook
        self._session = Session(spec, transport, console, run)
        self._hosts = self._session.hosts
        self._newcomers = Newcomers(self._hosts, run, prepare=self._session.prepare)
        self._can_save = spec.checkpoints is not None
        self._history: list[PastAttempt] = []
        self._warning: StopCause | None = None  # forwarded to the ranks
        self._must_prepare_again = False  # the script's arguments have changed
        self._save_requested = False  # because a host came back
        self._missing: list[str] = []  # the hosts that the last attempt ran without
        self.token = self._session.token

    # ---- the flow

    async def run(self, on_phase: Callable[[str], None]) -> JobOutcome:
        """Run the job to its end."""
        session = self._session
        session.on_phase = on_phase
        outcome = JobOutcome(result=Result.FAILED, headline="stopped")
        try:
            on_phase("waiting" if self.spec.wait_s else "joining")
            await self._transport.open(self._hosts.arrive)
            await self._gather_hosts()
            outcome = await self._run_attempts()
        except Stopped:
            outcome = await self._stop_on_request()
        finally:
            if outcome.result is Result.FINISHED and self.spec.hosts_return:
                # Before the other hosts are released for good: this one may still be killed and replaced.
                on_phase(run_state.FINISHED)
            text = f"the run {outcome.headline}"
            if outcome.finding is not None:
                text = outcome.headline
            await session.leave(outcome.exit_code, text)
        return outcome

    async def _gather_hosts(self) -> None:
        """Wait for all hosts and prepare them; the loss of one of them meanwhile is a failure like one of its ranks."""
        while True:
            try:
                await self._hosts.wait()
                await self._session.prepare(self._hosts.idle)
                return
            except MachineLost as error:
                if self.spec.hosts_return:
                    logger.info(f"{error.what}; waiting for the host that replaces it")
                    continue
                [finding] = from_error(error)
                refusal = await self._restart(PastAttempt(finding=finding), time.time())
                if refusal is not None:
                    error.why = with_reason(finding, refusal).why
                    raise

    async def _restart(
        self, failed: PastAttempt, noticed_unix_s: float, resume: "ResumePlan | None" = None
    ) -> str | None:
        """Wait until the next attempt may begin after a failure; return the reason if there is none."""
        self._history.append(failed)
        decision = decide_restart(self._history, max_restarts=self.spec.max_restarts)
        if decision.value is None:
            return decision.reason
        await self._note_restart(failed.finding.what, failed.from_step, noticed_unix_s)
        text = restart_announcement(failed, decision.value, decision.reason)
        logger.info(text)
        if self._webhook is not None:
            self._webhook.post("failed", text)
        if resume is not None:
            from torchmuster.launch.history.resume import restart_text

            logger.info(restart_text(resume))
        await self._session.waiting.unless_stopped(asyncio.sleep(decision.value))
        return None

    async def _run_attempts(self) -> JobOutcome:
        number, progress = 0, TrainingProgress()
        lost: dict[int, str] = {}
        if self._can_save or any(self.run_folder.metrics.glob("*")):  # of an earlier launch
            progress = await self._read_progress(progress)
            await self._log_resume(progress)
        while True:
            before = progress
            attempt = await self._begin_attempt(number, lost, progress)
            finding = await self._run_attempt(attempt)
            hosts = attempt.hosts
            if finding is None:
                return self._finished(hosts)
            number += 1
            is_replaced = self._lose_replaced_hosts(hosts)
            lost = {host.place: host.why_lost for host in hosts if host.why_lost is not None}
            self._hosts.free(lost)
            progress = await self._read_progress(before)
            saved = self._saved(hosts)
            if saved is not None:
                if self._warning or not (self._save_requested or is_replaced):
                    return JobOutcome(result=Result.SAVED, headline=saved.text, saved=saved)
                if is_replaced:
                    await self._note_restart(saved.text, progress.saved, time.time())
                    logger.info(f"{saved.text}; waiting for the host that replaces the stopped one")
                continue
            failed = PastAttempt(
                finding=finding,
                mistake=needs_user(hosts),
                got_on=progress.checkpoint not in (None, before.checkpoint),
                saved=progress.saved,
                resumes=progress.resume is None or bool(progress.resume.on_restart()),
            )
            refusal = await self._restart(failed, attempt.noticed_unix_s, progress.resume)
            if refusal is not None:
                origin = agent_stop_origin(hosts)
                if origin is not None:
                    return self._stopped(hosts, StopCause(origin=origin))
                return self._failed(with_reason(finding, refusal))

    def _saved(self, hosts: Sequence[ConnectedHost]) -> Saved | None:
        """Return what the ranks saved after a warning, or because a host came back."""
        warned = self._warning is not None or self._save_requested
        origin = self._warning.origin if self._warning else None
        return saved_by_ranks(hosts, warned=warned and self._can_save, origin=origin)

    async def _begin_attempt(
        self, number: int, lost: dict[int, str], progress: TrainingProgress
    ) -> Attempt:
        """Choose the hosts of the next attempt, and the script's arguments."""
        session = self._session
        session.on_phase("starting")
        self._save_requested = False
        self._must_prepare_again = session.resume_script(progress.resume, again=number > 0)
        # A requeued job:
        if self._must_prepare_again and number == 0 and progress.resume is not None:
            from torchmuster.launch.history.resume import restart_text

            logger.info(restart_text(progress.resume))
        hosts = await session.waiting.unless_stopped(self._newcomers.choose(lost))
        if self._hosts.missing != self._missing:
            self._missing = self._hosts.missing
            logger.info(self._continuing_text(hosts, progress.global_batch_size))
        return Attempt(session, hosts, number)

    async def _run_attempt(self, attempt: Attempt) -> Finding | None:
        """Run one attempt; return None on success, else the finding."""
        if self._must_prepare_again:
            try:
                await self._session.prepare(attempt.hosts)
            except MachineLost:
                return await attempt.fail()
        save = self._ask_to_save if self._can_save else None
        async with self._newcomers.looked_after(save):
            return await attempt.run()

    async def _stop_on_request(self) -> JobOutcome:
        """Stop the ranks because the user or a scheduler wants it."""
        attempt, session = self._session.attempt, self._session
        if attempt is None:
            return self._stopped((), session.cause)
        if session.failed_before_stop:
            return self._failed(await attempt.fail())
        await attempt.end()
        return self._stopped(attempt.hosts, session.cause)

    # ---- signals

    def stop(self, origin: str) -> None:
        """Request a stop; a second request kills the ranks."""
        self._session.stop(origin)

    def pass_on(self, name: str) -> None:
        """Forward a scheduler's warning to every rank.

        It would kill a script that does not handle it, so such a script gets SIGTERM instead, and has until the end of the job to
        stop. Ranks of ``muster train`` wait for it, also while they start.
        """
        session = self._session
        if session.cause is not None:
            return  # the ranks are being stopped already
        origin = f"{name} to the launcher"
        if self._can_save or session.handles(name):
            self._warning = self._warning or StopCause(origin=origin)
            session.pass_on(name)
            return
        from torchmuster.launch.schedulers.time_limits import seconds_to_job_end

        within_s = seconds_to_job_end(os.environ)
        logger.info(
            f"the launcher received {name}, which the script does not handle: stopping all ranks with SIGTERM "
            f"within {format_seconds(within_s)}"
        )
        session.stop(origin, warned_s=within_s)

    def _ask_to_save(self) -> None:
        self._save_requested = True
        self._session.pass_on(_WARNING)

    # ---- hosts

    def _lose_replaced_hosts(self, hosts: Sequence[ConnectedHost]) -> bool:
        """Wait no longer for hosts that their scheduler stopped and will replace; return whether there are any."""
        if not self.spec.hosts_return:
            return False
        stopped = [host for host in hosts if host.ended and host.ended.stop_signal]
        for host in stopped:
            host.lose("its scheduler stopped it")
        return bool(stopped)

    def _continuing_text(
        self, hosts: Sequence[ConnectedHost], global_batch_size: int | None
    ) -> str:
        """Return how many hosts a run continues with: ``continuing with 3 of 4 hosts, without d``."""
        text = f"continuing with {len(hosts):,} of {self._hosts.wanted.most:,} hosts"
        if self._hosts.missing:
            text += f", without {name_several(self._hosts.missing)}"
        if global_batch_size is not None:
            text += f"; the global batch size stays {global_batch_size:,}"
        return text

    # ---- ends

    def _finished(self, hosts: Sequence[ConnectedHost]) -> JobOutcome:
        if self._warning and saved_after_request(hosts, self._warning, self.run_folder.metrics):
            return self._stopped(hosts, self._warning)
        return JobOutcome(result=Result.FINISHED, headline="finished")

    def _failed(self, finding: Finding) -> JobOutcome:
        return JobOutcome(result=Result.FAILED, headline=finding.what, finding=finding)

    def _stopped(self, hosts: Sequence[ConnectedHost], cause: StopCause | None) -> JobOutcome:
        """Return the outcome of a run that was stopped on request."""
        killed = killed_after_request(
            hosts, grace_s=self.spec.limits.grace_s, at_once=self._session.killed_at_once
        )
        left = tuple(host.name for host in hosts if host.is_lost and not host.ended)
        saved = saved_after_request(hosts, cause, self.run_folder.metrics)
        if saved is not None:
            return JobOutcome(
                result=Result.SAVED, headline=saved.text, saved=saved, killed=killed, left=left
            )
        headline = f"stopped on request ({cause.origin})" if cause else "stopped on request"
        if killed is not None:
            headline += f"; killed: {rank_text(killed.ranks)}"
        return JobOutcome(result=Result.STOPPED, headline=headline, killed=killed, left=left)

    async def _log_resume(self, progress: TrainingProgress) -> None:
        """Log that training continues from a checkpoint of an earlier launch."""
        if progress.saved is None or not is_ours(self.spec.command):
            return
        await asyncio.to_thread(
            run_state.log_event,
            self.run_folder,
            run_state.RESUMED,
            what=f"resumed from step {progress.saved:,}",
            from_step=progress.saved,
        )

    async def _note_restart(
        self, headline: str, from_step: int | None, noticed_unix_s: float
    ) -> None:
        what = f"{headline.splitlines()[0]}; restarted"
        if from_step is not None:
            what += f" from step {from_step:,}"
        await asyncio.to_thread(
            run_state.log_event,
            self.run_folder,
            run_state.RESTART,
            what=what,
            headline=headline,
            from_step=from_step,
            noticed_unix_s=noticed_unix_s,
        )

    async def _read_progress(self, known: TrainingProgress) -> TrainingProgress:
        """Read the training progress; object storage that does not respond must not block the run."""
        reading = asyncio.to_thread(
            restart.read_training_progress, self.spec, self.run_folder.metrics, known
        )
        try:
            in_time = asyncio.wait_for(reading, _READ_WITHIN_S)
            return await self._session.waiting.unless_stopped(in_time)
        except TimeoutError:
            return known
