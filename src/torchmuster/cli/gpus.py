"""``muster gpus``: the accelerators of this machine, their users and their links."""

import argparse
import dataclasses
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchmuster.cli import output, parsers
from torchmuster.decision import Decision
from torchmuster.devices import snapshot
from torchmuster.devices.claims import Claims
from torchmuster.devices.model import Device, Node
from torchmuster.devices.readers import nvml
from torchmuster.devices.request import Claim, DeviceRequest
from torchmuster.devices.tickets import WaitingRequest, read_tickets
from torchmuster.devices.visibility import variables_for, visible
from torchmuster.errors import ExitCode, Impossible, MusterError
from torchmuster.finding import exit_code
from torchmuster.units import MiB, format_seconds, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from torchmuster.devices.acquire import HeldDevices

# Interval of messages while waiting for GPUs.
_REPORT_EVERY_S = 9.0
# Requests that wait are listed up to this number.
_MOST_LINES = 10


def add_parser(actions: Any) -> None:
    """Add ``pick`` to the actions of ``muster gpus``."""
    parser = parsers.add_action(
        actions,
        "pick",
        "choose GPUs and print their UUIDs, or run a command on them",
        usage="muster gpus pick [options] [-- command …]",
        more="A command after -- runs on the GPUs and claims them until it exits, so that other "
        "picks\n"
        "skip them. GPUs in use are skipped unless --share is given.",
        examples=[
            "muster gpus pick --num 2 --min-free 30GiB -- torchrun --nproc-per-node 2 train.py",
            "muster gpus pick --num 4 --wait 2h -- python train.py    wait at most two hours",
            "gpus=$(muster gpus pick --num 2) && export CUDA_VISIBLE_DEVICES=$gpus",
        ],
    )
    parser.add_argument(
        "--num",
        type=_gpus_count,
        metavar="N",
        help="number of GPUs (default: 1, or all of --gpu-ids)",
    )
    parser.add_argument(
        "--gpu-ids", nargs="+", metavar="ID", help="choose from these: indices or UUIDs"
    )
    parser.add_argument(
        "--min-free",
        type=_gpus_size,
        metavar="SIZE",
        help="minimum free memory of each GPU, such as 30GiB",
    )
    parser.add_argument(
        "--min-total",
        type=_gpus_size,
        metavar="SIZE",
        help="minimum total memory of each GPU, such as 40GiB",
    )
    parser.add_argument("--share", action="store_true", help="allow GPUs that are already in use")
    parser.add_argument(
        "--wait",
        nargs="?",
        type=_wait_time,
        const=math.inf,
        default=0.0,
        metavar="DURATION",
        help="wait until GPUs are free: without limit, or for at most DURATION, such as 10m or 2h",
    )
    # No default: ``muster gpus --json pick`` has already set it.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    parser.set_defaults(run=_run_pick, command=None)


def _run_pick(options: argparse.Namespace) -> int:
    # Imported on use: plain ``muster gpus`` does not need it.
    from torchmuster.devices.acquire import acquire_devices
    from torchmuster.devices.choose import choose_devices

    if options.command == []:
        raise Impossible("there is no command after --", fix="give a command, or leave -- out")
    if options.watch:
        raise Impossible(
            "--watch does not work with pick", fix="leave out --watch, or leave out pick"
        )
    claims = Claims.here(os.environ)
    request = _gpus_request(options)
    if not options.command and not options.wait:  # nothing is claimed, so no lock is needed
        node = snapshot.take_snapshot_with_history()
        taken = claims.read(one.uuid for one in node.accelerators).blocking
        decision = choose_devices(node, request, environment=os.environ, claims=taken)
        return _print(decision, options.json)
    held = acquire_devices(
        claims,
        snapshot.take_snapshot_with_history,
        request,
        environment=os.environ,
        wait_s=options.wait,
        on_wait=_reporter(request),
        command=options.command or None,
    )
    if options.command:
        return _become(options.command, held)
    held.release()
    return _print(held.decision, options.json)


def _gpus_request(options: argparse.Namespace) -> DeviceRequest:
    request = DeviceRequest(
        ids=None if options.gpu_ids is None else _ids(options.gpu_ids),
        count=options.num,
        min_free_bytes=options.min_free,
        min_total_bytes=options.min_total,
        share=options.share,
    )
    if request.ids is None and request.count is None:
        request = dataclasses.replace(request, count=1)
    return request


def _ids(words: Sequence[str]) -> tuple[str, ...]:
    """Split ``0 2`` and ``0,2`` into ids."""
    return tuple(one for word in words for one in word.split(",") if one)


def _print(decision: Decision[tuple[Device, ...]], as_json: bool) -> int:
    variables = variables_for(decision.value)
    if as_json:
        devices = [
            {"number": one.number, "uuid": one.uuid, "name": one.name} for one in decision.value
        ]
        output.print_json({"devices": devices, "environment": variables, "reason": decision.reason})
        return ExitCode.GOOD
    output.say(decision.reason)
    output.say("the GPUs are not claimed; to claim them for a command, put it after --")
    # The value of the vendor's variable, which may not accept UUIDs.
    output.print_text(
        next(iter(variables.values()), None) or ",".join(one.uuid for one in decision.value)
    )
    return ExitCode.GOOD


def _become(command: list[str], held: "HeldDevices") -> int:
    """Replace this process by the command, which keeps the claim until it exits."""
    environment = _changed(os.environ, variables_for(held.decision.value))
    output.say(held.decision.reason)
    held.hand_over(environment)
    sys.stdout.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores these, and programs inherit that
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        held.release()
        raise Impossible(
            f"cannot run {command[0]!r}",
            why=error.strerror or str(error),
            fix="check the command after --",
        ) from error


def _changed(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    merged = {**environment, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _reporter(request: DeviceRequest) -> Callable[[MusterError], None]:
    """Return a callback that reports, at once and then regularly, why no GPUs are available."""
    started = time.monotonic()
    last_said = -math.inf

    def report(error: MusterError) -> None:
        nonlocal last_said
        now = time.monotonic()
        if now - last_said >= _REPORT_EVERY_S:
            last_said = now
            waited = format_seconds(now - started)
            output.say(f"waiting for {request} ({waited}): {error.why}")

    return report


def _gpus_count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs; write 1, 2, 3, …")
    return number


def _gpus_size(text: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size < MiB:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 1 MiB; write the unit: {text}GiB")
    return size


def _wait_time(text: str) -> float:
    if text == "forever":
        return math.inf
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster gpus`` and its action ``pick``."""
    parsers.show_examples(
        parser,
        [
            "muster gpus              show the GPUs once",
            "muster gpus --watch      refresh every second, until Ctrl-C",
            "muster gpus --links      show NVLink and PCIe links between GPUs",
            "muster gpus pick --num 2 -- python train.py    run on two free GPUs",
        ],
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="refresh until Ctrl-C")
    parsers.add_json_flag(how)
    parser.add_argument(
        "--interval",
        type=parsers.interval,
        default=1.0,
        metavar="SECONDS",
        help="refresh interval of --watch (default: 1)",
    )
    parser.add_argument("--links", action="store_true", help="show the links between GPUs")
    parser.add_argument("--uuids", action="store_true", help="show each GPU's UUID")
    parser.set_defaults(run=_run_gpus)
    actions = parser.add_subparsers(title="more", metavar="ACTION")
    add_parser(actions)


def _run_gpus(options: argparse.Namespace) -> ExitCode:
    if options.watch:
        return _watch(options)
    node, held = _look_gpus()
    shown = visible(node.accelerators, os.environ)
    if options.json:
        from torchmuster.devices.as_json import node_as_json

        output.print_json(node_as_json(node, shown, held))
    else:
        from torchmuster.cli import gpus_table

        gpus_table.show(node, shown, held, links=options.links, uuids=options.uuids)
        for line in waiting_lines():
            output.print_text(line)
    return exit_code((*node.findings, *shown.findings))


def waiting_lines() -> list[str]:
    """Return a line for each request that waits for GPUs of this host, in the order of arrival."""
    waiting = read_tickets(Claims.here(os.environ).queue)
    moment = time.time()
    lines = [f"waiting: {_waiting_text(request, moment)}" for request in waiting[:_MOST_LINES]]
    if len(waiting) > _MOST_LINES:
        lines.append(f"… {len(waiting) - _MOST_LINES} more requests wait")
    return lines


def _waiting_text(waiting: WaitingRequest, unix_s: float) -> str:
    since = format_seconds(max(0.0, unix_s - waiting.since_unix_s))
    stopped = "" if waiting.responds else ", stopped"
    return f"{waiting.user} (pid {waiting.pid}), {waiting.request}, for {since}{stopped}"


def _look_gpus() -> tuple[Node, dict[str, Claim]]:
    node = snapshot.take_snapshot_with_history()
    return node, Claims.here(os.environ).read(one.uuid for one in node.accelerators).claimed


def _watch(options: argparse.Namespace) -> ExitCode:
    from torchmuster.cli import gpus_table

    with nvml.keep_nvml_open(), gpus_table.live(links=options.links, uuids=options.uuids) as update:
        while True:
            node, held = _look_gpus()
            update(node, visible(node.accelerators, os.environ), held)
            time.sleep(options.interval)
