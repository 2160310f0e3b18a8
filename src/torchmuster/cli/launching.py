"""Launch a job from a command, in the foreground or detached."""

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchmuster.cli import jobs, output
from torchmuster.cli.launch_options import HostOptions, JoinOptions, RunControl
from torchmuster.cli.reporting import with_report
from torchmuster.config.resolve import Resolved
from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec, NodeCounts
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import RunFolder, create_run_folder

if TYPE_CHECKING:
    from torchmuster.launch.schedulers.node_group import NodeGroup
    from torchmuster.launch.transports.join.code import JoinCode

# Of schedulers that start the command on every node (launch/schedulers/node_group.py)
_GROUP = {"TORCHMUSTER_NNODES", "TORCHMUSTER_NODE_RANK"}
# Of schedulers that limit how long ranks may take to stop (launch/schedulers/time_limits.py)
_TIME_LIMITS = {"SLURM_JOB_ID", "TORCHMUSTER_TERMINATION_GRACE_S"}
# How long --detach waits for the run to start.
_STAY_S = 60.0
_SAY_EVERY_S = 9.0
_BEGUN = ("waiting", "running")  # phases


def detach(run: RunFolder, work: Callable[[], int]) -> int:
    """Do the work in a detached process; return when the run has started or failed."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Block Ctrl-C during the fork, until the parent can report the detached run.
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        _work_alone(run, work)
    state, has_exited = None, False
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        state, has_exited = _await_start(run, child)
    except KeyboardInterrupt:  # as printed: Ctrl-C detaches
        state = run_state.read_state(run)
    return _report_start(run, state, has_exited=has_exited)


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


def _await_start(run: RunFolder, child: int) -> tuple[run_state.RunState | None, bool]:
    """Wait until the run has started or is over; return its state, and whether its process has exited."""
    began = reported_s = time.monotonic()
    while True:
        has_exited = os.waitpid(child, os.WNOHANG)[0] != 0
        state = run_state.read_state(run)
        has_begun = state is not None and (state.phase in _BEGUN or not state.active)
        now = time.monotonic()
        if has_exited or has_begun or now - began > _STAY_S:
            return state, has_exited
        if now - reported_s > _SAY_EVERY_S:
            reported_s = now
            output.say("muster: not running yet; Ctrl-C detaches")
        time.sleep(0.05)


def _report_start(run: RunFolder, state: run_state.RunState | None, *, has_exited: bool) -> int:
    is_active = not has_exited if state is None else state.active
    code = ExitCode.FAILED if state is None or state.exit_code is None else state.exit_code
    if not is_active and code != ExitCode.GOOD:
        if run.console.exists():
            output.say(run.console.read_text(encoding="utf-8", errors="replace").rstrip())
        else:
            output.say("muster: the run failed before it started, without a message")
        return code
    output.print_text(run.id)
    if not is_active:
        output.say(f"muster: already finished; to see its output: muster logs {run.id}")
        return ExitCode.GOOD
    phase = state.phase if state and state.phase in _BEGUN else "starting"
    output.say(f"muster: {phase} in the background")
    if phase == "waiting":
        output.say("muster: to see its place in line: muster runs")
    output.say(f"muster: to follow it: muster logs {run.id} -f")
    output.say(f"muster: to stop it:   muster stop {run.id}")
    return ExitCode.GOOD


def job_and_transport(
    options: HostOptions, spec: JobSpec, resolved: Resolved, group: "NodeGroup | None" = None
) -> tuple[JobSpec, Transport]:
    """Return the job for the hosts that the flags or the scheduler give, and the transport to them."""
    if options.sbatch is not None:
        raise Impossible(
            "--sbatch works only with --slurm",
            fix=f"muster {spec.typed[0]} --slurm --sbatch …, or leave --sbatch out",
        )
    if isinstance(options, RunControl) and options.webhook is not None:
        from torchmuster.launch.launcher.webhook import check_address

        check_address(options.webhook)
    nodes = options.nodes
    transport: Transport | None = None
    if group is not None:
        spec = dataclasses.replace(
            jobs.patient(spec, resolved), hosts_return=True, job_uid=group.job_uid
        )
        from torchmuster.cli import node_group

        transport = node_group.transport_to(group)
    elif isinstance(options, JoinOptions) and options.join:
        nodes = nodes or NodeCounts(least=2, most=2)
        spec = jobs.patient(spec, resolved)
        transport = transport_to_joined(nodes, spec, resolved)
    elif "SLURM_JOB_ID" in os.environ:
        from torchmuster.cli import slurm_run

        transport = slurm_run.transport_inside(spec)
    hosts = len(spec.hosts) if transport is None else len(transport.places)
    spec = jobs.with_host_counts(spec, nodes, hosts)
    if transport is None:
        python = resolved.settings.launch.remote_python or sys.executable
        transport = jobs.transport_for(spec, python)
    return spec, transport


def transport_to_joined(nodes: NodeCounts, spec: JobSpec, resolved: Resolved) -> Transport:
    """Return the transport to this machine and to those that join with the code that is printed."""
    from torchmuster.launch.transports.join.code import encode_code
    from torchmuster.launch.transports.join.transport import JoinTransport
    from torchmuster.launch.transports.local import LocalTransport

    if spec.hosts:
        raise Impossible(
            "--join and --hosts (over ssh) are mutually exclusive", fix="give one of the two"
        )
    if nodes.most < 2:
        raise Impossible(
            "--nodes 1 leaves no machine to join", fix="--nodes 2, or leave out --join"
        )

    def show(code: "JoinCode") -> None:
        # Only on the terminal: the code gives access and must not be logged.
        output.say("on every other machine, in a folder with the same code: muster join")
        output.say("then paste this code, which lets a machine join:")
        output.say(f"  {encode_code(code)}")

    return JoinTransport(
        local=LocalTransport(socket.gethostname()),
        count=nodes.most + spec.spares - 1,
        ports=[resolved.settings.launch.join_port or 0],
        on_event=lambda text: output.say(f"muster: {text}"),
        on_code=show,
    )


def take_group(options: RunControl) -> "NodeGroup | None":
    """Return the group of nodes on each of which a scheduler started this command; None if there is none."""
    if os.environ.keys().isdisjoint(_GROUP):
        return None
    from torchmuster.cli import node_group

    return node_group.take_group(options)


def run_folder(options: RunControl, spec: JobSpec, group: "NodeGroup | None" = None) -> RunFolder:
    """Return the folder of the run: a new one, or that of a run that its scheduler started again."""
    if group is not None:
        from torchmuster.cli import node_group

        return node_group.run_folder(group, options.runs, spec)
    earlier = None
    if "SLURM_JOB_ID" in os.environ:
        from torchmuster.cli import slurm_run

        earlier = slurm_run.earlier_run(spec, options.runs)
    return earlier or create_run_folder(options.runs, spec.name)


def launch(
    options: RunControl, spec: JobSpec, transport: Transport, run: RunFolder, resolved: Resolved
) -> int:
    """Start the job, attached or detached, and return its exit code."""
    if not os.environ.keys().isdisjoint(_TIME_LIMITS):
        from torchmuster.launch.schedulers.time_limits import grace_within_limit

        # A grace period that fits into what the scheduler of this process allows.
        given = resolved.settings.launch.grace is not None
        grace = grace_within_limit(spec.limits.grace_s, given=given, environment=os.environ)
        if grace.reason:
            output.say(f"muster: {grace.reason}")
        limits = dataclasses.replace(spec.limits, grace_s=grace.value)
        spec = dataclasses.replace(spec, limits=limits)

    def work() -> int:
        return with_report(run, lambda: _run_job(options, spec, transport, run))

    return detach(run, work) if options.detach else work()


def _run_job(options: RunControl, spec: JobSpec, transport: Transport, folder: RunFolder) -> int:
    """Launch a job and show its output until it is over."""
    from torchmuster.launch.launcher.launch import run_task
    from torchmuster.launch.launcher.run import Run

    console = jobs.console_for(folder)
    task = Run(spec, transport, console, folder)
    if options.webhook is None:
        return run_task(task, console)
    from torchmuster.launch.launcher.webhook import RunWebhook

    webhook = RunWebhook(options.webhook, folder, spec.name)
    with webhook:
        code = run_task(task, console, on_phase=webhook.on_phase)
    if webhook.problem:
        with contextlib.suppress(OSError), folder.console.open("a", encoding="utf-8") as log:
            log.write(f"muster: {webhook.problem}\n")
        output.say(f"muster: {webhook.problem}")
    return code
