"""The flags with which a run waits in the queue of this machine, and its notifications."""

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.cli import job_flags, output
from torchmuster.cli.which_run import choose_run
from torchmuster.devices.choose import choose_devices
from torchmuster.devices.request import DeviceRequest
from torchmuster.devices.snapshot import take_snapshot
from torchmuster.devices.tickets import HIGHEST_PRIORITY
from torchmuster.errors import Impossible, MusterError, NotNow
from torchmuster.launch.history import queue_entry, run_state
from torchmuster.launch.history.queue_entry import QueueEntry
from torchmuster.launch.job import JobSpec
from torchmuster.runfolder import RunFolder, refuse_foreign

if TYPE_CHECKING:
    from torchmuster.monitor.alerts.watching import Webhook

_SHORTEST_LIMIT_S = 10.0
# Time beyond the grace period until the node agent has released the devices.
_BEYOND_GRACE_S = 15.0


def add_queue_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for jobs that wait in the queue of this host, and for their time limit."""
    queue = parser.add_argument_group("queue of this machine")
    queue.add_argument(
        "--queue",
        action="store_true",
        help="wait in the background until GPUs are free, then start; muster queue lists the queue",
    )
    queue.add_argument(
        "--time-limit",
        type=_time_limit,
        metavar="DURATION",
        help="stop the run with a checkpoint after DURATION; others then know when its GPUs are free",
    )
    queue.add_argument(
        "--after",
        metavar="RUN[,RUN]",
        help="with --queue: start when these runs have finished; cancel the job if one of them fails",
    )
    queue.add_argument(
        "--priority",
        type=priority,
        metavar="N",
        help="with --queue: order among your own jobs, highest first (default: 0)",
    )
    queue.add_argument(
        "--hold", action="store_true", help="with --queue: wait for muster queue release"
    )
    queue.add_argument(
        "--notify",
        metavar="URL",
        help="report the start and the end of the run: a webhook (https://…, Slack's format), "
        "mailto:ADDRESS, or a URL of Apprise",
    )
    queue.add_argument("--queue-run", type=Path, help=argparse.SUPPRESS)


def priority(text: str) -> int:
    """Parse a priority."""
    try:
        number = int(text)
    except ValueError:
        number = HIGHEST_PRIORITY + 1
    if abs(number) > HIGHEST_PRIORITY:
        raise argparse.ArgumentTypeError(f"{text!r} is not a priority; write a whole number")
    return number


def _time_limit(text: str) -> float:
    seconds = job_flags.duration(text)
    if seconds < _SHORTEST_LIMIT_S:
        raise argparse.ArgumentTypeError(f"{text!r} is too short; write at least 10s")
    return seconds


def with_queue(options: argparse.Namespace, spec: JobSpec) -> JobSpec:
    """Return the job as it waits in the queue, if the flags say so; refuse flags that have no effect."""
    if getattr(options, "notify", None) is not None:
        _notifier(options.notify)  # refuses an address that cannot be used
    if not getattr(options, "queue", False):
        _refuse_flags_without_queue(options)
        return spec
    if spec.hosts or options.slurm:
        raise Impossible(
            "--queue works only on this machine",
            why="each machine has its own queue; the hosts of this run are others",
            fix="leave out --queue, or leave out --hosts and --slurm",
        )
    if spec.ranks is None and spec.gpu_ids is None:
        raise Impossible(
            "--queue needs the number of GPUs",
            why="without a number, the run would take all GPUs that are free when it starts",
            fix=f"muster {options.words[0]} --queue --num-gpus 1 …",
        )
    if spec.device == "cpu":
        raise Impossible(
            "--queue is for GPUs, but device is cpu",
            why="runs on the CPU do not wait for devices",
            fix=f"muster {options.words[0]} --detach …",
        )
    _refuse_what_never_starts(options, spec)
    if options.queue_run is None:  # before there is a run folder
        options.after = _folders_of(options)
    options.detach = True
    return replace(spec, queued=True, wait_s=job_flags.FOREVER_S)


def _refuse_what_never_starts(options: argparse.Namespace, spec: JobSpec) -> None:
    """Raise if this machine cannot meet the request at any time."""
    request = DeviceRequest(ids=spec.gpu_ids, count=spec.ranks, share=spec.share)
    node = take_snapshot()
    if not node.accelerators and spec.device != "gpu":
        return  # it runs on the CPU
    try:
        choose_devices(node, request, environment=os.environ)
    except NotNow:
        return
    except MusterError as error:
        error.fix = error.fix.replace("gpus pick", f"{options.words[0]} --queue")
        error.fix = error.fix.replace("--num ", "--num-gpus ")
        raise


def _notifier(address: str) -> "Webhook":
    from torchmuster.monitor.alerts.notify import open_notifier

    return open_notifier(address)


def _refuse_flags_without_queue(options: argparse.Namespace) -> None:
    """Refuse flags that have no effect without ``--queue``."""
    given = {
        "--after": getattr(options, "after", None),
        "--priority": getattr(options, "priority", None),
        "--hold": getattr(options, "hold", False),
    }
    for flag, value in given.items():
        if value not in (None, False):
            raise Impossible(
                f"{flag} has no effect without --queue", fix=f"add --queue, or leave {flag} out"
            )


def queued_before(options: argparse.Namespace) -> RunFolder | None:
    """Return the run that a restart of the machine ended while it was queued."""
    if getattr(options, "queue_run", None) is None:
        return None
    run = RunFolder(options.queue_run)
    refuse_foreign(run, "restore")
    return run


def enter_queue(options: argparse.Namespace, spec: JobSpec, run: RunFolder) -> None:
    """Write the entry of a run that waits in the queue or has a time limit."""
    if not spec.queued and spec.limits.time_s is None:
        return
    now = time.time()
    limit_s = spec.limits.time_s
    lasts_s = None if limit_s is None else limit_s + spec.limits.grace_s + _BEYOND_GRACE_S
    known = None
    if options.queue_run is not None:
        known = queue_entry.read_queue_entry(run)
        run.state.unlink(missing_ok=True)  # the state at the restart of the machine
    entry = known or QueueEntry(
        since_unix_s=now,
        ready_unix_s=now,
        priority=options.priority or 0,
        held=options.hold,
        after=options.after,
    )
    queue_entry.write_queue_entry(run, replace(entry, lasts_s=lasts_s))
    if spec.queued:
        queue_entry.remember_submission(run, _again(options, run), os.environ)


def _folders_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the folders of the runs that must finish first; refuse runs that have failed."""
    named = [name.strip() for name in (options.after or "").split(",") if name.strip()]
    folders = tuple(str(choose_run(name, options.runs, "newest").path.resolve()) for name in named)
    queue_entry.unfinished_runs(folders)
    return folders


def _again(options: argparse.Namespace, run: RunFolder) -> list[str]:
    """Return the arguments that submit the job again, into the same run folder."""
    folder = str(run.path.resolve())
    if options.words[0] == "train":  # with the settings that it was submitted with
        words = ["train", "--queue", "--queue-run", folder, "--resume", folder]
        if options.time_limit is not None:
            words += ["--time-limit", f"{options.time_limit:g}s"]
        if options.notify is not None:
            words += ["--notify", options.notify]
        for variable in options.env:
            words += ["--env", variable]
        return words
    script = ["--", *options.command] if options.command else []
    return [options.words[0], "--queue-run", folder, *options.words[1:], *script]


@contextlib.contextmanager
def notifications(
    options: argparse.Namespace, spec: JobSpec, run: RunFolder
) -> Iterator[Callable[[str], None]]:
    """Report the start and the end of the run to ``--notify``; yield what is called with each phase."""
    address = getattr(options, "notify", None)
    if address is None:
        yield lambda _: None
        return
    started = False
    with _notifier(address) as notifier:

        def on_phase(name: str) -> None:
            nonlocal started
            if name == "running" and not started:
                started = True
                notifier.send_text(f"{spec.name} started: run {run.id}")

        try:
            yield on_phase
        finally:
            state = run_state.read_state(run)
            how = "ended" if state is None or state.active else state.headline
            notifier.send_text(f"{spec.name}: {how}: run {run.id}")
    if notifier.trouble:
        with contextlib.suppress(OSError), run.console.open("a", encoding="utf-8") as console:
            console.write(f"muster: {notifier.trouble}\n")
        if not options.detach:
            output.say(f"muster: {notifier.trouble}")
