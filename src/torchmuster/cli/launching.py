"""Launch a job from a command, in the foreground or detached."""

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.cli import job_flags, joined_hosts, node_group, output, slurm_run
from torchmuster.cli.reporting import with_report
from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import RunFolder, create_run_folder

if TYPE_CHECKING:
    from torchmuster.launch.launcher.console import TerminalConsole
    from torchmuster.launch.launcher.job_runner import JobRunner
    from torchmuster.launch.schedulers.node_group import NodeGroup

# How long --detach waits for the run to start.
_STAY_S = 60.0
_SAY_EVERY_S = 9.0


def detach(run: RunFolder, work: Callable[[], int]) -> int:
    """Do the work in a detached process; return when the run has started or failed."""
    if not hasattr(os, "fork"):
        raise Impossible(
            "--detach does not work on this system",
            why="it needs fork, which Windows does not have",
            fix="leave the terminal open, or run it as a scheduled task",
        )
    sys.stdout.flush()
    sys.stderr.flush()
    # Block Ctrl-C during the fork, until the parent can report the detached run.
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        _work_alone(run, work)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        state = _see_it_begin(run, child)
    except KeyboardInterrupt:  # as printed: Ctrl-C detaches
        state = run_state.read_state(run)
    # A process that has just started has no state yet.
    return _tell_launching(run, state, begun=state is not None or _lives(child))


def _work_alone(run: RunFolder, work: Callable[[], int]) -> None:
    """Do the work in its own session, without a terminal."""
    code = int(ExitCode.FAILED)
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it has no terminal any more
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.close(nothing)
        code = work()
    except BaseException:
        with contextlib.suppress(OSError), run.console.open("a", encoding="utf-8") as console:
            traceback.print_exc(file=console)  # there is no terminal to show it
    finally:
        os._exit(code)


def _see_it_begin(run: RunFolder, child: int) -> run_state.RunState | None:
    """Wait until the run has started or is over; None if it has no state."""
    began = said = time.monotonic()
    while (now := time.monotonic()) - began < _STAY_S:
        gone = os.waitpid(child, os.WNOHANG)[0] != 0
        state = run_state.read_state(run)
        begun = ("waiting", "running")
        if gone or (state is not None and (state.phase in begun or not state.active)):
            return state
        if now - said > _SAY_EVERY_S:
            said = now
            phase = state.phase if state else "starting"
            output.say(f"muster: not running yet ({phase}); Ctrl-C detaches")
        time.sleep(0.05)
    return run_state.read_state(run)


def _lives(child: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(child, os.WNOHANG)[0] == 0
    return False


def _tell_launching(run: RunFolder, state: run_state.RunState | None, *, begun: bool) -> int:
    active = state.active if state is not None else begun
    if not active and (state is None or state.exit_code != ExitCode.GOOD):
        if run.console.exists():
            output.say(run.console.read_text(encoding="utf-8", errors="replace").rstrip())
        else:
            output.say("muster: the run failed before it started, without a message")
        return state.exit_code if state and state.exit_code is not None else ExitCode.FAILED
    output.print_text(run.id)
    if not active:
        output.say(f"muster: already finished; to see its output: muster logs {run.id}")
        return ExitCode.GOOD
    words = state.phase if state and state.phase in ("waiting", "running") else "starting"
    output.say(f"muster: {words} in the background")
    if words == "waiting":
        output.say("muster: to see its place in line: muster runs")
    output.say(f"muster: to follow it: muster logs {run.id} -f")
    output.say(f"muster: to stop it:   muster stop {run.id}")
    return ExitCode.GOOD


InFolder = Callable[[JobSpec, Path], JobSpec]


def start(
    options: argparse.Namespace,
    spec: JobSpec,
    python: str,
    *,
    in_folder: InFolder = lambda spec, _: spec,
    check: Callable[[], None] = lambda: None,
    prepare: Callable[[RunFolder], None] = lambda _: None,
    run: RunFolder | None = None,
    group: "NodeGroup | None" = None,
) -> int:
    """Start a job as the flags request: as a dry run, through Slurm, detached, or attached.

    ``in_folder`` adds the run folder to the job, ``check`` is called before the folder is created,
    ``prepare`` writes the folder's initial files. A given ``run`` is resumed in its folder. This process is the launcher
    of a given ``group``.
    """
    if options.slurm:
        return slurm_run.submit_and_follow(options, spec)
    if getattr(options, "join", False):  # muster train has no such flag
        transport: Transport | None = joined_hosts.transport_to_joined(options, spec, sys.stdout)
    elif group is None:
        transport = slurm_run.transport_inside(spec)
    else:
        transport = node_group.transport_to(group)
        spec = replace(spec, hosts_return=True, job_uid=group.job_uid)
    machines = len(transport.places) if transport is not None else len(spec.hosts)
    spec = job_flags.with_spares(spec, machines)
    spec = slurm_run.for_so_many(options, spec, machines)
    slurm_run.refuse_flags_without_slurm(options)
    if options.dry_run and transport is None:
        from torchmuster.cli import dry_run

        spec = in_folder(spec, run.path if run is not None else options.runs / "RUN")
        return dry_run.show(spec, python, options.runs, as_json=options.json)
    if options.dry_run:
        raise Impossible(
            "--dry-run does not work inside a Slurm job",
            why="the nodes' devices and addresses are known only when their node agents answer",
            fix=f"muster {options.words[0]} --slurm --dry-run …  # outside a job: shows its script",
        )
    transport = transport or transport_for(spec, python)
    spec = _with_grace(options, spec)
    check()
    if getattr(options, "webhook", None) is not None:
        from torchmuster.launch.launcher.webhook import check_address

        check_address(options.webhook)
    if group is not None:
        run = node_group.run_folder(group, options.runs, spec)
    else:
        earlier = slurm_run.earlier_run(spec, options.runs)
        run = earlier or run or create_run_folder(options.runs, spec.name)
    prepare(run)
    spec = in_folder(spec, run.path)

    def work() -> int:
        return _with_webhook(options, spec, transport, run)

    return detach(run, work) if options.detach else work()


def _with_grace(options: argparse.Namespace, spec: JobSpec) -> JobSpec:
    """Return the job with a grace period that fits into what the scheduler of this process allows."""
    from torchmuster.launch.schedulers.time_limits import grace_within_limit

    given = options.grace is not None
    chosen = grace_within_limit(spec.limits.grace_s, given=given, environment=os.environ)
    if chosen.reason:
        output.say(f"muster: {chosen.reason}")
    return replace(spec, limits=replace(spec.limits, grace_s=chosen.value))


def _with_webhook(
    options: argparse.Namespace, spec: JobSpec, transport: Transport, run: RunFolder
) -> int:
    url = getattr(options, "webhook", None)  # some commands have no such flag
    if url is None:
        return _stay_to_the_end(spec, transport, run, lambda _: None)
    from torchmuster.launch.launcher.webhook import RunWebhook

    webhook = RunWebhook(url, run, spec.name)
    with webhook:
        code = _stay_to_the_end(spec, transport, run, webhook.on_phase)
    if webhook.problem:
        with contextlib.suppress(OSError), run.console.open("a", encoding="utf-8") as console:
            console.write(f"muster: {webhook.problem}\n")
        if not options.detach:
            output.say(f"muster: {webhook.problem}")
    return code


def _stay_to_the_end(
    spec: JobSpec, transport: Transport, run: RunFolder, on_phase: Callable[[str], None]
) -> int:
    return with_report(run, lambda: stay(spec, transport, run, on_phase))


def stay(
    spec: JobSpec,
    transport: Transport,
    run: RunFolder,
    on_phase: Callable[[str], None] = lambda _: None,
) -> int:
    """Launch a job and show its output until it is over."""
    from torchmuster.launch.launcher.launch_job import launch_job

    make_task = _task_with_spares if spec.spares else None
    return launch_job(spec, transport, run, job_flags.console_for, make_task, on_phase=on_phase)


def _task_with_spares(
    spec: JobSpec,
    transport: Transport,
    console: "TerminalConsole",
    *,
    run: RunFolder,
    on_phase: Callable[[str], None],
) -> "JobRunner":
    """Return the run, which tests the health of its spares."""
    from torchmuster.diagnose.spare_check import SpareCheck
    from torchmuster.launch.launcher.job_runner import JobRunner

    examine = SpareCheck(spec.folder)
    return JobRunner(spec, transport, console, run=run, on_phase=on_phase, examine=examine)


def transport_for(spec: JobSpec, python: str) -> Transport:
    """Return the transport to the hosts of a job: ssh, or this host only."""
    if spec.hosts:
        from torchmuster.launch.transports.ssh import SshTransport

        return SshTransport(spec.hosts, python, lost_after_s=spec.limits.lost_after_s)
    from torchmuster.launch.transports.local import LocalTransport

    return LocalTransport(socket.gethostname())
