"""``muster gpus``: the accelerators of this machine and their users; ``muster gpus pick`` chooses free ones."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchmuster.cli import output
from torchmuster.cli.gpus_table import table_lines
from torchmuster.cli.options import (
    FOREVER_S,
    JsonOptions,
    ScriptOptions,
    command,
    count,
    flag,
    names,
    wait_time,
)
from torchmuster.decision import Decision
from torchmuster.devices import snapshot
from torchmuster.devices.claims import Claims
from torchmuster.devices.model import Device
from torchmuster.devices.request import DeviceRequest
from torchmuster.devices.tickets import read_tickets
from torchmuster.devices.visibility import variables_for, visible
from torchmuster.errors import ExitCode, Impossible, MusterError
from torchmuster.finding import exit_code
from torchmuster.units import MiB, format_seconds, parse_bytes

if TYPE_CHECKING:
    from torchmuster.devices.acquire import HeldDevices

REPORT_EVERY_S = 9.0  # while waiting for GPUs
MOST_LINES = 10  # of requests that wait


def size(text: str) -> int:
    """Parse a size of memory."""
    parsed = parse_bytes(text)
    if parsed < MiB:
        raise ValueError(f"{text!r} is less than 1 MiB; write the unit: {text}GiB")
    return parsed


@dataclass(frozen=True, kw_only=True)
class PickOptions(ScriptOptions, JsonOptions):
    """The flags of ``muster gpus pick``; the script is the command."""

    num_gpus: int | None = flag(
        "number of GPUs (default: 1, or all of --gpu-ids)", parse=count, metavar="N"
    )
    gpu_ids: tuple[str, ...] | None = flag(
        "choose from these: indices or UUIDs, as in 0,2", parse=names, metavar="IDS"
    )
    min_free: int | None = flag(
        "minimum free memory of each GPU, such as 30GiB", parse=size, metavar="SIZE"
    )
    share: bool = flag("allow GPUs that are already in use", default=False)
    wait: float = flag(
        "wait until GPUs are free: without limit, or for at most --wait=10m",
        default=0.0,
        parse=wait_time,
        metavar="DURATION",
        alone=FOREVER_S,
    )


@command(
    PickOptions,
    summary="choose GPUs and print their UUIDs, or run a command on them",
    usage="muster gpus pick [options] [command …]",
    more="""
    A command runs on the GPUs and claims them until it exits, so that other picks
    skip them. GPUs in use are skipped unless --share is given.
    """,
    examples=[
        "muster gpus pick --num-gpus 2 --min-free 30GiB torchrun --nproc-per-node 2 train.py",
        "muster gpus pick --num-gpus 4 --wait=2h python train.py    wait at most two hours",
        "gpus=$(muster gpus pick --num-gpus 2) && export CUDA_VISIBLE_DEVICES=$gpus",
    ],
)
def pick(options: PickOptions) -> int:
    """Choose GPUs; print them, or become the command."""
    # Imported on use: plain ``muster gpus`` does not need it.
    from torchmuster.devices.acquire import acquire_devices

    number = options.num_gpus
    if options.gpu_ids is None and number is None:
        number = 1
    request = DeviceRequest(
        ids=options.gpu_ids,
        count=number,
        min_free_bytes=options.min_free,
        share=options.share,
    )
    held = acquire_devices(
        Claims.here(os.environ),
        snapshot.take_snapshot_with_history,
        request,
        environment=os.environ,
        wait_s=options.wait,
        on_wait=_reporter(request),
        command=list(options.script) or None,
    )
    if options.script:
        return _become(list(options.script), held)
    held.release()
    return _print(held.decision, as_json=options.json)


@command(
    JsonOptions,
    examples=[
        "muster gpus              show the GPUs",
        "watch muster gpus        refresh every two seconds",
        "muster gpus pick --num-gpus 2 python train.py    run on two free GPUs",
    ],
    actions={"pick": pick},
)
def run(options: JsonOptions) -> int:
    """Show the GPUs."""
    node = snapshot.take_snapshot_with_history()
    claims = Claims.here(os.environ).read(device.uuid for device in node.accelerators).claimed
    shown = visible(node.accelerators, os.environ)
    findings = [*node.findings, *shown.findings]
    if options.json:
        from torchmuster.devices.as_json import node_as_json

        output.print_json(node_as_json(node, shown, claims))
        return exit_code(findings)
    for line in (*table_lines(node, shown, claims), *waiting_lines()):
        output.print_text(line)
    if findings:
        output.print_text()
        output.show_findings(findings, sys.stdout)
    return exit_code(findings)


def waiting_lines() -> list[str]:
    """Return a line for each request that waits for GPUs of this host, in the order of arrival."""
    waiting = read_tickets(Claims.here(os.environ).queue)
    lines = []
    for request in waiting[:MOST_LINES]:
        since = format_seconds(max(0.0, time.time() - request.since_unix_s))
        stopped = "" if request.responds else ", stopped"
        lines.append(
            f"waiting: {request.user} (pid {request.pid}), {request.request}, for {since}{stopped}"
        )
    if len(waiting) > MOST_LINES:
        lines.append(f"… {len(waiting) - MOST_LINES} more requests wait")
    return lines


def _print(decision: Decision[tuple[Device, ...]], *, as_json: bool) -> int:
    variables = variables_for(decision.value)
    if as_json:
        devices = []
        for device in decision.value:
            devices.append({"number": device.number, "uuid": device.uuid, "name": device.name})
        output.print_json({"devices": devices, "environment": variables, "reason": decision.reason})
        return ExitCode.GOOD
    output.say(decision.reason)
    output.say("the GPUs are not claimed; to claim them for a command, write it after the flags")
    # The value of the vendor's variable, which may not accept UUIDs.
    uuids = ",".join(device.uuid for device in decision.value)
    output.print_text(next(iter(variables.values()), None) or uuids)
    return ExitCode.GOOD


def _become(arguments: list[str], held: "HeldDevices") -> int:
    """Replace this process by the command, which keeps the claim until it exits."""
    environment = dict(os.environ)
    for name, value in variables_for(held.decision.value).items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    output.say(held.decision.reason)
    held.hand_over(environment)
    sys.stdout.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores these, and programs inherit that
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(arguments[0], arguments, environment)
    except OSError as error:
        held.release()
        raise Impossible(
            f"cannot run {arguments[0]!r}",
            why=error.strerror or str(error),
            fix="check the command after the flags",
        ) from error


def _reporter(request: DeviceRequest) -> Callable[[MusterError], None]:
    """Return a callback that reports, at once and then regularly, why no GPUs are available."""
    started_s = time.monotonic()
    printed_s = -math.inf

    def report(error: MusterError) -> None:
        nonlocal printed_s
        now_s = time.monotonic()
        if now_s - printed_s >= REPORT_EVERY_S:
            printed_s = now_s
            waited = format_seconds(now_s - started_s)
            output.say(f"waiting for {request} ({waited}): {error.why}")

    return report
