"""``muster bench precision``: speed, memory and accuracy of training by dtype."""

import argparse
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torchmuster.cli import output, parsers
from torchmuster.cli.bench import add_common_flags, device_of, finish, now, size
from torchmuster.cli.config import add_setting_flags, settings_from
from torchmuster.errors import ExitCode

if TYPE_CHECKING:
    from torchmuster.bench.precision import PrecisionRequest

_STEPS, _STEPS_QUICK = 40, 6
_ROUNDS, _ROUNDS_QUICK = 15, 5
_MICRO_BATCH_SIZE = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster bench precision``."""
    parser.description = (
        f"{parser.description}\nTrains a model in every dtype of the device, with the same "
        "weights and the "
        "same data. Shows time,\nmemory, loss and outputs, and recommends one. Without a model "
        "of your own, "
        "it trains a small GPT\nand two models that are built to overflow."
    )
    parsers.show_examples(
        parser,
        [
            "muster bench precision                         a small GPT",
            "muster bench precision --config config.yaml    the model of your settings file",
        ],
    )
    parser.add_argument(
        "--steps", type=size, metavar="N", help=f"training steps (default: {_STEPS})"
    )
    add_setting_flags(parser)
    add_common_flags(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Measure, save and print the results."""
    from torchmuster.bench import environment, precision

    begun = time.monotonic()
    where = device_of(options)
    request = _precision_request(options, "cpu" if where.value == "cpu" else "auto")
    seen = environment.environment_here(where.value)
    answer = precision.measure_precision(request, device=where.value, say=output.say)
    report = precision.precision_report(
        request,
        answer,
        where=where,
        units=precision.units_of_cpu() if where.value == "cpu" else None,
        environment=seen.ended(),
        settings={
            "work": dataclasses.asdict(request.work),
            "micro_batch_size": request.micro_batch_size,
            "steps": request.steps,
            "rounds": request.rounds,
        },
        date=now(),
        took_s=time.monotonic() - begun,
    )
    return finish(report, options)


def _precision_request(
    options: argparse.Namespace, device: Literal["auto", "cpu"]
) -> "PrecisionRequest":
    from torchmuster.bench import precision
    from torchmuster.plan.request import work_from_settings

    work, samples = precision.SMALL_GPT, _MICRO_BATCH_SIZE
    own = options.config is not None or bool(options.set)
    if own:
        resolved = settings_from(options)
        work = work_from_settings(resolved, folder=str(Path.cwd()))
        samples = resolved.settings.train.micro_batch_size or 1
    return precision.PrecisionRequest(
        device=device,
        work=work,
        micro_batch_size=samples,
        steps=options.steps or (_STEPS_QUICK if options.quick else _STEPS),
        rounds=_ROUNDS_QUICK if options.quick else _ROUNDS,
        study=not own,
    )
