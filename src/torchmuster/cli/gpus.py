"""``muster gpus``: the accelerators of this machine and their users; ``muster gpus pick`` chooses free ones."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchmuster.cli import output
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
from torchmuster.devices.model import Device, Node
from torchmuster.devices.processes import age_s
from torchmuster.devices.request import WORTH_MENTIONING_IDLE_S, Claim, DeviceRequest, in_use_by
from torchmuster.devices.tickets import read_tickets
from torchmuster.devices.visibility import Visible, variables_for, visible
from torchmuster.errors import ExitCode, Impossible, MusterError
from torchmuster.finding import exit_code
from torchmuster.pages.columns import aligned_columns
from torchmuster.units import GiB, MiB, format_seconds, parse_bytes, plural

if TYPE_CHECKING:
    from torchmuster.devices.acquire import HeldDevices

REPORT_EVERY_S = 9.0  # while waiting for GPUs
MOST_LINES = 10  # of requests that wait
TITLES = ("GPU", "name", "memory", "busy", "temp", "power", "used by")


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


def table_lines(node: Node, shown: Visible, claims: Mapping[str, Claim]) -> Iterator[str]:
    """Yield the lines: this machine, its devices and their users, and how to use the free ones.

    Lines are as long as the users' commands; a terminal wraps them.
    """
    if not node.accelerators:
        yield f"{node.hostname}  ·  no GPU found; programs run on the CPU"
        return
    free = []
    for device in shown.devices:
        if device.uuid not in claims and not device.trouble and not in_use_by(device):
            free.append(device)
    usable = 0
    for device in node.accelerators:
        usable += device.mig_index is not None or not device.mig_enabled
    facts = [node.hostname, f"{plural(usable, 'GPU')}, {len(free)} free"]
    if node.driver_version:
        facts.append(f"driver {node.driver_version}")
    if node.cuda_version:
        facts.append(f"CUDA up to {node.cuda_version}")
    yield "  ·  ".join(facts)
    rows = [TITLES]
    for device in node.accelerators:
        user = _user(device, shown, claims.get(device.uuid), node.taken_unix_s)
        rows.append((device.number, *_state(device), user))
    yield ""
    yield from aligned_columns(rows)
    yield ""
    if not shown.devices:
        yield f"all GPUs are hidden by {', '.join(sorted(set(shown.hidden_by.values())))}"
    elif not free:
        yield "none free; to wait: muster gpus pick --wait python train.py"
    else:
        whole = [device for device in free if device.mig_index is None]
        pick = f"muster gpus pick --num-gpus {len(whole) or 1} python train.py"
        yield f"{plural(len(free), 'GPU')} free; to use: {pick}"


def _state(device: Device) -> tuple[str, str, str, str, str]:
    """Return name, memory, load, temperature and power; "-" for what the driver does not report."""
    # Without the vendor's prefix; of a MIG slice, the profile.
    name = device.name.removeprefix("NVIDIA ").removeprefix("GeForce ").removeprefix("AMD ")
    if device.mig_index is not None:
        name = f"└ {name.rpartition(' ')[2]}"
    memory = busy = temperature = power = "-"
    if device.total_bytes is not None:
        memory = f"{device.total_bytes / GiB:.0f} GiB"
        if device.used_bytes is not None:
            memory = f"{device.used_bytes / GiB:.1f} / {memory}"
    if device.utilization_percent is not None:
        busy = f"{device.utilization_percent} %"
    if device.temperature_c is not None:
        temperature = f"{device.temperature_c} °C"
    if device.power_w is not None:
        limit = f" / {device.power_limit_w:.0f}" if device.power_limit_w else ""
        power = f"{device.power_w:.0f}{limit} W"
    return name, memory, busy, temperature, power


def _user(device: Device, shown: Visible, claim: Claim | None, now_unix_s: float) -> str:
    if device.trouble:
        return f"does not answer: {device.trouble}"
    if claim is not None:
        since = format_seconds(max(now_unix_s - claim.since_unix_s, 0))
        return f"{claim.user}  claimed {since}  {claim.command}"
    if device.mig_enabled and device.mig_index is None:
        return "split into MIG slices"
    if device.compute_processes:
        return _main_process(device, now_unix_s)
    hidden_by = shown.hidden_by.get(device.uuid)
    if hidden_by:
        return f"hidden by {hidden_by.partition('=')[0]}"
    return in_use_by(device) or "free"


def _main_process(device: Device, now_unix_s: float) -> str:
    """Return the process with the most memory, and the number of others."""
    processes = device.compute_processes
    main = max(processes, key=lambda process: process.memory_bytes or 0)
    facts = [main.user or f"pid {main.pid}"]
    age = age_s(main, now_unix_s)
    if main.idle_s is not None and main.idle_s >= WORTH_MENTIONING_IDLE_S:
        facts.append(f"idle {format_seconds(main.idle_s)}")
    elif age is not None:
        facts.append(format_seconds(age))
    if len(processes) > 1:
        facts.append(f"+{len(processes) - 1} more")
    return "  ".join([*facts, main.command or ""])
