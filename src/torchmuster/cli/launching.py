"""Launch a job from a command: choose the transport to its hosts, create its folder, run it here or detached."""

import contextlib
import dataclasses
import os
import shlex
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchmuster.cli import jobs, output, schedulers
from torchmuster.cli.launch_options import HostOptions, JoinOptions, RunControl
from torchmuster.cli.reporting import with_report
from torchmuster.config.resolve import Resolved
from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec, NodeCounts
from torchmuster.launch.transports.channel import Transport
from torchmuster.redaction import redact_command
from torchmuster.runfolder import RunFolder, create_run_folder
from torchmuster.units import plural

if TYPE_CHECKING:
    from torchmuster.launch.schedulers.node_group import NodeGroup
    from torchmuster.launch.transports.join.code import JoinCode

# Of schedulers that limit how long ranks may take to stop (launch/schedulers/time_limits.py)
_TIME_LIMITS = {"SLURM_JOB_ID", "TORCHMUSTER_TERMINATION_GRACE_S"}
# How long --detach waits for the run to start, and how often it says so.
_STAY_S = 60.0
_SAY_EVERY_S = 9.0
_POLL_S = 0.05
_BEGUN = ("waiting", "running")  # phases


def job_and_transport(
    options: HostOptions, spec: JobSpec, resolved: Resolved, group: "NodeGroup | None" = None
) -> tuple[JobSpec, Transport]:
    """Return the transport to the hosts that the flags or the scheduler give, and the job for their number."""
    if options.sbatch is not None and not options.slurm:
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
        transport = schedulers.transport_to_group(group)
    elif isinstance(options, JoinOptions) and options.join:
        nodes = nodes or NodeCounts(least=2, most=2)
        spec = jobs.patient(spec, resolved)
        transport = transport_to_joined(nodes, spec, resolved)
    elif "SLURM_JOB_ID" in os.environ:
        transport = schedulers.transport_inside(spec)
    if transport is None:
        python = resolved.settings.launch.remote_python or sys.executable
        transport = jobs.transport_for(spec, python)
    return jobs.with_host_counts(spec, nodes, len(transport.places)), transport


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
        on_event=output.say_event,
        on_code=show,
    )


def show_dry_run(spec: JobSpec, transport: Transport) -> int:
    """Print the ranks and devices of each host, and the ranks' command; nothing is started or claimed.

    Other hosts choose their devices when they join.
    """
    lines: list[str] = []
    for place, host in enumerate(spec.hosts):
        text = _rank_text(spec, host.ranks)
        if place >= len(spec.hosts) - spec.spares:
            text = "spare; it takes the place of a host that fails"
        lines.append(f"{host.name}: {text}")
    if not lines and len(transport.places) > 1:
        lines = [f"{len(transport.places)} hosts of this job, on each: {_rank_text(spec)}"]
    for line in lines or _lines_of_this_host(spec):
        output.print_text(line)
    module = ["-m"] if spec.module else []
    python = [] if spec.program else ["python", *module]
    command = shlex.join(redact_command([*python, *spec.command]))
    output.print_text(f"each rank runs, in {spec.folder}:\n  {command}")
    output.print_text("nothing was started or claimed")
    return ExitCode.GOOD


def _lines_of_this_host(spec: JobSpec) -> list[str]:
    """Return the devices that this host would claim now, and why these."""
    from torchmuster.launch import protocol
    from torchmuster.launch.launcher.session import environment_of
    from torchmuster.launch.node.device_lease import preview_devices
    from torchmuster.launch.node.process_cleanup import TOKEN_VARIABLE

    lease = preview_devices(
        protocol.Prepare(
            run_id="",
            token=TOKEN_VARIABLE,
            command=spec.command,
            module=spec.module,
            folder=spec.folder,
            device=spec.device,
            ranks=spec.ranks,
            gpu_ids=spec.gpu_ids,
            share=spec.share,
            environment=environment_of(spec),
            typed=spec.typed,
        )
    )
    first = f"this host: {plural(lease.ranks, 'rank')}"
    return [first, *(f"  {line}" for line in (*lease.devices, *lease.reasons))]


def _rank_text(spec: JobSpec, of_host: int | None = None) -> str:
    ranks = of_host or spec.ranks
    if ranks is None and spec.device != "cpu":
        return "one rank per GPU"
    return plural(ranks or 1, "rank")


def run_folder(options: RunControl, spec: JobSpec, group: "NodeGroup | None" = None) -> RunFolder:
    """Return the folder of the run: a new one, or that of a run that its scheduler started again."""
    if group is not None:
        return schedulers.folder_of_group(group, options.runs, spec)
    earlier = None
    if "SLURM_JOB_ID" in os.environ:
        earlier = schedulers.earlier_run(spec, options.runs)
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

    # In the job that muster run --slurm --detach submitted, Slurm waits for this process.
    if options.detach and not options.slurm:
        return detach(run, work)
    return work()


def _run_job(options: RunControl, spec: JobSpec, transport: Transport, folder: RunFolder) -> int:
    """Launch a job and show its output until it is over."""
    from torchmuster.launch.launcher.launch import run_task
    from torchmuster.launch.launcher.run import Run

    console = jobs.console_for(folder)
    if options.webhook is None:
        return run_task(Run(spec, transport, console, folder), console)
    from torchmuster.launch.launcher.webhook import Webhook

    webhook = Webhook(options.webhook, folder, spec.name)
    code = run_task(Run(spec, transport, console, folder, webhook), console, webhook=webhook)
    webhook.close()
    if webhook.problem:
        with contextlib.suppress(OSError), folder.console.open("a", encoding="utf-8") as log:
            log.write(f"muster: {webhook.problem}\n")
        output.say(f"muster: {webhook.problem}")
    return code


def detach(run: RunFolder, work: Callable[[], int]) -> int:
    """Do the work in a process without a terminal; return when the run has started or failed.

    Ctrl-C while waiting only stops the waiting: the run continues, and the commands to find it are printed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Block Ctrl-C during the fork, until the parent can report the detached run.
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        _work_alone(run, work)
    has_exited = False
    began_s = reported_s = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        while not _has_begun(run) and time.monotonic() - began_s < _STAY_S:
            has_exited = os.waitpid(child, os.WNOHANG)[0] != 0
            if has_exited:
                break
            if time.monotonic() - reported_s > _SAY_EVERY_S:
                reported_s = time.monotonic()
                output.say("muster: not running yet; Ctrl-C detaches")
            time.sleep(_POLL_S)
    state = run_state.read_state(run)
    is_over = has_exited if state is None else not state.active
    code = ExitCode.FAILED if state is None or state.exit_code is None else state.exit_code
    if is_over and code != ExitCode.GOOD:
        text = f"muster: the run ended before it wrote anything into {run.path}"
        with contextlib.suppress(OSError):
            text = run.console.read_text(encoding="utf-8", errors="replace").rstrip()
        output.say(text)
        return code
    output.print_text(run.id)
    phase = "starting" if state is None else state.phase
    if is_over:
        output.say(f"muster: {phase}; to see its output: muster logs {run.reference}")
        return ExitCode.GOOD
    output.say(f"muster: {phase} in the background")
    output.say(f"muster: to follow it: muster logs {run.reference} -f")
    output.say(f"muster: to stop it:   muster stop {run.reference}")
    return ExitCode.GOOD


def _has_begun(run: RunFolder) -> bool:
    state = run_state.read_state(run)
    return state is not None and (state.phase in _BEGUN or not state.active)


def _work_alone(run: RunFolder, work: Callable[[], int]) -> None:
    """Do the work in its own session, without a terminal."""
    code = int(ExitCode.FAILED)
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it has no terminal any more
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        code = work()
    except BaseException:
        with contextlib.suppress(OSError), run.console.open("a", encoding="utf-8") as console:
            traceback.print_exc(file=console)  # there is no terminal to show it
    finally:
        os._exit(code)
