"""``muster bench data``: measure how fast data can be read, by number of workers."""

import argparse
import dataclasses
import math
import time
from functools import partial
from pathlib import Path

from torchmuster.bench import environment, loader, loader_report
from torchmuster.bench.loader import (
    LoaderRequest,
    Reading,
    join_loader_answers,
    measure_loader,
    readings_for,
)
from torchmuster.cli import output, parsers
from torchmuster.cli.bench import add_common_flags, device_of, finish, now
from torchmuster.cli.config import add_setting_flags, settings_from
from torchmuster.cli.job_flags import count
from torchmuster.config.layers import Flag
from torchmuster.config.settings import Settings
from torchmuster.errors import ExitCode, Impossible
from torchmuster.plan.hardware import here

_ROUNDS, _WINDOW_S = 3, 1.0
_ROUNDS_QUICK, _WINDOW_QUICK_S = 2, 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster bench data``."""
    parser.description = (
        f"{parser.description}\nReads the data as in training, with 0, 1, 2, 4, … workers up to "
        "twice the cores "
        "of a rank.\nChecks that the data is the same in all cases, and reports how short a step can be "
        "before it waits\nfor data."
    )
    parsers.show_examples(
        parser,
        [
            "muster bench data --config config.yaml             the data of your settings file",
            "muster bench data --dataset my.data:train --ranks 8",
            "muster bench data --config config.yaml --needed 1200",
            "muster bench data --config config.yaml --workers 8 16 32",
        ],
    )
    parser.add_argument(
        "--dataset", metavar="MODULE:FUNCTION", help="your function that returns the dataset"
    )
    parser.add_argument(
        "--workers",
        nargs="+",
        type=_data_number,
        metavar="N",
        help="numbers of workers to measure (default: 0, 1, 2, 4, …)",
    )
    parser.add_argument(
        "--ranks",
        type=count,
        metavar="N",
        help="ranks that read at once (default: one per GPU, or 1 on the CPU)",
    )
    parser.add_argument(
        "--needed", type=_data_rate, metavar="N", help="samples/s that each rank needs"
    )
    add_setting_flags(parser)
    add_common_flags(parser)


def _data_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers: 0, 1, 2, …")
    return int(text)


def _data_rate(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of samples per second; write for example 1200"
        )
    return number


def run(options: argparse.Namespace) -> ExitCode:
    """Measure, save and print the results."""
    begun = time.monotonic()
    where = device_of(options)
    if options.dataset is not None:
        flag = Flag(flag="--dataset", path="data.dataset", text=options.dataset)
        options.set.append(flag)
    settings = settings_from(options).settings
    name = _data_data(settings)
    machine = here.hardware_from_settings(settings, ranks=options.ranks, device=where.value)
    seen = environment.environment_here(where.value)
    readings = readings_for(seen.cores, machine.cards)
    if options.workers:
        readings = tuple(Reading(workers=one) for one in sorted(set(options.workers)))
    request = LoaderRequest(
        settings=settings,
        device="cpu" if where.value == "cpu" else "auto",
        readings=readings,
        rounds=_ROUNDS_QUICK if options.quick else _ROUNDS,
        window_s=_WINDOW_QUICK_S if options.quick else _WINDOW_S,
    )
    ask = partial(
        measure_loader,
        ranks=machine.cards,
        device=where.value,
        folder=str(Path.cwd()),
        say=output.say,
    )
    answers = ask(request)
    by_workers = join_loader_answers(answers)
    chosen = loader.best_reading(by_workers, needed_samples_s=options.needed)
    measured = loader_report.MeasuredLoader(
        data=name,
        answer=answers[0],
        ranks=machine.cards,
        cores=seen.cores,
        needed_samples_s=options.needed,
        by_workers=by_workers,
        chosen=chosen,
    )
    if loader.oversubscription(by_workers, cores=seen.cores, ranks=machine.cards):
        usual = max(by_workers, key=lambda one: one.reading.workers)
        output.say("workers use several threads: reading again with one thread each")
        (alone,) = join_loader_answers(
            ask(dataclasses.replace(request, readings=(usual.reading,)), one_thread=True)
        )
        measured = dataclasses.replace(measured, one_thread=(usual, alone))
    report = loader_report.loader_report(
        measured,
        where=where,
        environment=seen.ended(),
        settings={
            "data": dataclasses.asdict(settings.data),
            "ranks": machine.cards,
            "needed": options.needed,
            "rounds": request.rounds,
            "window_s": request.window_s,
        },
        date=now(),
        took_s=time.monotonic() - begun,
    )
    return finish(report, options)


def _data_data(settings: Settings) -> str:
    """Return the name of the data; raise an error if it cannot be read."""
    data = settings.data
    files = data.files if isinstance(data.files, str) else " ".join(data.files or ())
    name = data.dataset or files or data.hugging_face
    if name is None:
        raise Impossible(
            "there is no data to read",
            why="the settings name no data",
            fix="--dataset module:function, or --config with data.dataset, data.files or data.hugging_face",
        )
    has_tokens = name.endswith(".safetensors")
    tokenizer = data.tokenizer or settings.model.model_name_or_path
    if data.dataset is None and not has_tokens and tokenizer is None:
        raise Impossible(
            f"{name} is text, but no tokenizer is set",
            why="tokenizing is a large part of reading text",
            fix="--set data.tokenizer=bytes, a folder, or a name on the hub",
        )
    return name
