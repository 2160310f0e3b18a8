"""``muster gpus pick``: choose GPUs by conditions; print them, or run a command that owns them."""

import argparse
import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torchmuster.cli import output, parsers
from torchmuster.decision import Decision
from torchmuster.devices import snapshot
from torchmuster.devices.claims import Claims, folder
from torchmuster.devices.model import Device
from torchmuster.devices.request import Request
from torchmuster.devices.visibility import variables_for
from torchmuster.errors import ExitCode, Impossible, MusterError
from torchmuster.units import format_seconds, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from torchmuster.devices.acquire import Held

# While waiting, somebody is told what stands in the way at least this often.
_REPORT_EVERY_S = 9.0


def add_parser(actions: Any) -> None:
    """Add ``pick`` to the actions of ``muster gpus``."""
    parser = parsers.add_action(
        actions,
        "pick",
        "choose GPUs and print their UUIDs, or run a command on them",
        usage="muster gpus pick [options] [-- command …]",
        more="A command after -- is run on the GPUs, and holds them against everybody else who picks\n"
        "for as long as it runs. GPUs on which others compute are passed over unless --share is given.",
        examples=[
            "muster gpus pick --num 2 --min-free 30GiB -- torchrun --nproc-per-node 2 train.py",
            "muster gpus pick --num 4 --wait 2h -- python train.py    wait two hours at most",
            "muster gpus pick --for-model 14GB        as many as training a 7B model in bf16 takes",
            "export CUDA_VISIBLE_DEVICES=$(muster gpus pick --num 2)",
        ],
    )
    parser.add_argument(
        "--num", type=_count, metavar="N", help="how many (default: 1, or all --gpu-ids)"
    )
    parser.add_argument("--gpu-ids", nargs="+", metavar="ID", help="from these: numbers or UUIDs")
    parser.add_argument("--min-free", type=_size, metavar="SIZE", help="memory free on each: 30GiB")
    parser.add_argument(
        "--min-total", type=_size, metavar="SIZE", help="memory of each in all: 40GiB"
    )
    parser.add_argument(
        "--for-model", type=_size, metavar="SIZE", help="as many as train weights of this size"
    )
    parser.add_argument("--share", action="store_true", help="also GPUs on which others compute")
    parser.add_argument(
        "--wait",
        nargs="?",
        type=_duration,
        const=math.inf,
        default=0.0,
        metavar="TIME",
        help="wait until they are free, for at most 10m, 2h, … if given",
    )
    parsers.add_json_flag(parser)
    parser.set_defaults(run=_run, command=None)


def _run(options: argparse.Namespace) -> ExitCode:
    # Imported on use: plain ``muster gpus`` needs none of it.
    from torchmuster.devices.acquire import acquire
    from torchmuster.devices.for_model import shape_for_model

    if options.command == []:
        raise Impossible("there is nothing to run after --", fix="give a command, or leave -- out")
    request = Request(
        ids=None if options.gpu_ids is None else tuple(options.gpu_ids),
        count=options.num,
        min_free_bytes=options.min_free,
        min_total_bytes=options.min_total,
        share=options.share,
    )
    claims = Claims(folder(os.environ))
    why = ""
    if options.for_model is not None:
        node = snapshot.take()
        shape = shape_for_model(
            node,
            options.for_model,
            request,
            environment=os.environ,
            claims=claims.held_by_others(one.uuid for one in node.accelerators),
        )
        request, why = shape.value.request, f"{shape.reason}; "
    elif request.ids is None and request.count is None:
        request = dataclasses.replace(request, count=1)
    held = acquire(
        claims,
        snapshot.take,
        request,
        environment=os.environ,
        wait_s=options.wait,
        on_wait=_reporter(request),
        command=options.command or None,
    )
    decision = Decision(value=held.decision.value, reason=why + held.decision.reason)
    if options.command:
        return _become(options.command, held, decision)
    held.release()
    return _print(decision, options.json)


def _print(decision: Decision[tuple[Device, ...]], as_json: bool) -> ExitCode:
    variables = variables_for(decision.value)
    if as_json:
        devices = [
            {"number": one.number, "uuid": one.uuid, "name": one.name} for one in decision.value
        ]
        output.print_json({"devices": devices, "environment": variables, "reason": decision.reason})
        return ExitCode.GOOD
    output.say(decision.reason)
    output.say("not claimed: to hold them for a run, put the command after --")
    print(",".join(one.uuid for one in decision.value))
    return ExitCode.GOOD


def _become(command: list[str], held: "Held", decision: Decision[tuple[Device, ...]]) -> ExitCode:
    """Turn into the command: its signals and exit code are its own, and the claim lives with it."""
    environment = _changed(os.environ, variables_for(decision.value))
    output.say(decision.reason)
    held.keep_across_exec()
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        held.release()
        raise Impossible(
            f"cannot run {command[0]!r}", why=str(error), fix="check the command after --"
        ) from error


def _changed(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    merged = {**environment, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _reporter(request: Request) -> Callable[[MusterError], None]:
    """Return what to do at each vain try: say at once, and then regularly, what is in the way."""
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


def _count(text: str) -> int:
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs; write 1, 2, 3, …")
    return number


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _duration(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
