"""``muster bench scaling``: speed-up and efficiency of training on 1, 2, 4, … ranks."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torchmuster.cli import output, parsers
from torchmuster.cli.bench import add_common_flags, device_of, finish, now
from torchmuster.cli.config import add_setting_flags, settings_from
from torchmuster.cli.job_flags import count
from torchmuster.config.resolve import Resolved
from torchmuster.decision import Decision
from torchmuster.errors import ExitCode, Impossible
from torchmuster.finding import Finding, Status
from torchmuster.units import plural

if TYPE_CHECKING:
    from torchmuster.bench.environment import Environment
    from torchmuster.bench.scaling import ScalingStudy

_USUAL_RANKS = (1, 2, 4)
_USUAL_SAMPLES_OF_THE_MOST = 2  # per rank, on the largest number of ranks, for strong scaling
_ROUNDS, _PASSES = 8, 2
_QUICK_ROUNDS, _QUICK_PASSES = 4, 1
_SMALL_GPT = "torchmuster.bench.probes.small_gpt:make_small_gpt"
_SMALL_GPT_LENGTH = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster bench scaling``."""
    parser.description = (
        f"{parser.description}\nTrains the model of a settings file, or a small GPT, for some "
        "steps on 1, 2, 4, … ranks of this\nmachine, with and without communication. Shows "
        "speed-up and efficiency for strong scaling (the\nranks share one batch) and weak "
        "scaling (each rank has its own batch), where time is lost, and a\nforecast for the "
        "largest number of ranks from the smallest ones."
    )
    parsers.show_examples(
        parser,
        [
            "muster bench scaling                              a small GPT on 1, 2, 4 ranks",
            "muster bench scaling --config config.yaml         the model of your settings file",
            "muster bench scaling --ranks 1,2,4,8 --batch-size 64",
            "muster bench scaling --strategy fsdp",
        ],
    )
    add_setting_flags(parser)
    parser.add_argument(
        "--ranks",
        type=_numbers,
        metavar="N,N,…",
        help="numbers of ranks (default: 1,2,4; on GPUs 1,2,4,… up to all of them)",
    )
    parser.add_argument(
        "--batch-size",
        type=count,
        metavar="N",
        help="samples per step on one rank (default: train.global_batch_size, or twice "
        "the largest number of ranks)",
    )
    parser.add_argument(
        "--strategy",
        choices=("ddp", "fsdp"),
        help="parallel strategy (default: from the settings, or ddp)",
    )
    parser.add_argument(
        "--rounds", type=count, metavar="N", help=f"samples per pass (default: {_ROUNDS})"
    )
    add_common_flags(parser)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({count(part.strip()) for part in text.split(",")}))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers of ranks; write for example 1,2,4"
        ) from None


def run(options: argparse.Namespace) -> ExitCode:
    """Measure, save and print the results."""
    from torchmuster.bench import environment, scaling
    from torchmuster.bench.scaling_report import scaling_report

    begun_s = time.monotonic()
    device = device_of(options)
    before = environment.environment_here(device.value)
    resolved = settings_from(options)
    study, choices = _study(options, resolved, device, before)
    scaling.check_scaling_request(study)
    output.say(f"on {device.value}: {device.reason}; ranks: {', '.join(map(str, study.ranks))}")
    measured = scaling.measure_scaling(study, say=output.say)
    return finish(
        scaling_report(
            *(study, measured),
            what=_what(options, resolved),
            choices=choices,
            notes=_notes(resolved),
            environment=before.ended(),
            date=now(),
            took_s=time.monotonic() - begun_s,
        ),
        options,
    )


def _has_model(resolved: Resolved) -> bool:
    model = resolved.settings.model
    return model.build is not None or model.model_name_or_path is not None


def _what(options: argparse.Namespace, resolved: Resolved) -> str:
    model = resolved.settings.model
    if not _has_model(resolved):
        return "a small GPT"
    named = model.build or model.model_name_or_path
    return f"{named} ({options.config})" if options.config else str(named)


def _study(
    options: argparse.Namespace,
    resolved: Resolved,
    device: Decision[Literal["cpu", "gpu"]],
    seen: "Environment",
) -> tuple["ScalingStudy", list[Decision[str]]]:
    from torchmuster.bench.scaling import ScalingStudy
    from torchmuster.plan.hardware import here
    from torchmuster.plan.job import Work
    from torchmuster.plan.request import request_from_settings

    settings = resolved.settings
    on_cpu = device.value == "cpu"
    ranks = options.ranks or (_USUAL_RANKS if on_cpu else _doublings(len(seen.devices)))
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    micro_batch_size = settings.train.micro_batch_size
    strategy = options.strategy
    if _has_model(resolved):
        hardware = here.hardware_from_settings(settings, ranks=max(ranks), device=device.value)
        asked = request_from_settings(resolved, hardware, folder=str(Path.cwd()))
        work, precision = asked.work, asked.precision.value
        strategy = strategy or (asked.strategy if asked.strategy != "single" else None)
    else:
        work = Work(
            build=_SMALL_GPT, sequence_length=_SMALL_GPT_LENGTH, loss="language_model",
            folder=str(Path.cwd()),
        )  # fmt: skip
    whole = options.batch_size or settings.train.global_batch_size
    whole = whole or _USUAL_SAMPLES_OF_THE_MOST * max(ranks)
    threads, slots, choice = _cores(ranks, seen, on_cpu=on_cpu)
    study = ScalingStudy(
        work=work,
        strategy=strategy or "ddp",
        precision=precision,
        ranks=ranks,
        whole=whole,
        micro_batch_size=micro_batch_size,
        workers=settings.data.workers if work.dataset else 0,
        device=device.value,
        threads=threads,
        slots=slots,
        rounds=options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS),
        passes=_QUICK_PASSES if options.quick else _PASSES,
    )
    reason = "set by the user" if strategy else "default: every rank holds the whole model"
    return study, [*choice, Decision(value=study.strategy, reason=reason)]


def _cores(
    ranks: tuple[int, ...], seen: "Environment", *, on_cpu: bool
) -> tuple[int | None, int, list[Decision[str]]]:
    """Return the threads of each rank, the number of ranks that can compute at once, and why."""
    if not on_cpu:
        return None, len(seen.devices), []
    threads = max(1, seen.cores // max(ranks))
    words = plural(threads, "thread")
    reason = (
        f"per rank, for every number of ranks: {seen.cores} cores divided by {max(ranks)} ranks, "
        f"so that each rank always has the same compute"
    )
    return threads, max(1, seen.cores // threads), [Decision(value=words, reason=reason)]


def _doublings(most: int) -> tuple[int, ...]:
    numbers = [1]
    while numbers[-1] * 2 <= most:
        numbers.append(numbers[-1] * 2)
    if len(numbers) < 2:
        raise Impossible(
            "cannot measure scaling with fewer than 2 GPUs",
            why="there is one GPU, and each rank needs its own",
            fix="muster bench scaling --device cpu --ranks 1,2",
        )
    return tuple(numbers)


def _notes(resolved: Resolved) -> list[Finding]:
    data = resolved.settings.data
    if not _has_model(resolved) or data.dataset is not None:
        return []
    return [
        Finding(
            name="made-up-data",
            status=Status.NOTE,
            what="the training used synthetic tokens: reading your text is not included",
            fix="muster bench data --config …  # measures data loading",
        )
    ]
