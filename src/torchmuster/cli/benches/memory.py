"""``muster bench memory``: memory by stage of a training step, and savings by recomputation."""

import argparse
import dataclasses
import time
from pathlib import Path

from torchmuster.bench import environment, memory, memory_report
from torchmuster.bench.memory import (
    MeasuredMemory,
    MemoryAnswer,
    MemoryForecast,
    MemoryRequest,
    forecast_stages,
)
from torchmuster.cli import output, parsers
from torchmuster.cli.bench import add_common_flags, device_of, finish, now
from torchmuster.cli.config import add_setting_flags, settings_from
from torchmuster.cli.job_flags import count
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import Resolved
from torchmuster.errors import ExitCode
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.request import work_from_settings
from torchmuster.plan.tracing.cache import cache_folder
from torchmuster.plan.tracing.tracer import Tracer
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import parse_bytes

_ROUNDS, _ROUNDS_QUICK = 11, 3
_USUAL_MICRO_BATCH_SIZE = 8
_SMALL_GPT = Work(
    build="torchmuster.bench.probes.small_gpt:make_small_gpt",
    loss="language_model",
    sequence_length=128,
)
_SMALL_GPT_NAME = "a built-in small GPT (8 blocks, 2 million parameters)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster bench memory``."""
    parser.description = (
        f"{parser.description}\nRuns real steps in one process and tracks every tensor before, "
        "during and after "
        "each stage, in fp32\nand in a reduced precision. Then checkpoints the activations of every "
        "block, every 2nd, 3rd,\n… and none, and finds the best: the fastest within --limit, or the "
        "knee of peak memory over time."
    )
    parsers.show_examples(
        parser,
        [
            "muster bench memory                                a built-in small GPT",
            "muster bench memory --config config.yaml           the model of your settings file",
            "muster bench memory --config config.yaml --limit 20GiB",
            "muster bench memory --build my.models:make --set data.sequence_length=512",
        ],
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="a folder, or a name on the Hugging Face hub"
    )
    parser.add_argument(
        "--build", metavar="MODULE:FUNCTION", help="your function that returns the model"
    )
    parser.add_argument(
        "--micro-batch-size",
        type=count,
        metavar="N",
        help="samples per micro-batch (default: from the settings, or 8)",
    )
    parser.add_argument(
        "--limit",
        type=_benches_memory_size,
        metavar="SIZE",
        help="max memory of a step, such as 20GiB",
    )
    add_setting_flags(parser)
    add_common_flags(parser)


def _benches_memory_size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(options: argparse.Namespace) -> ExitCode:
    """Measure, save and print the results."""
    begun = time.monotonic()
    where = device_of(options)
    resolved = _resolved(options)
    model = resolved.settings.model
    if model.build is None and model.model_name_or_path is None:
        name, work = _SMALL_GPT_NAME, dataclasses.replace(_SMALL_GPT, folder=str(Path.cwd()))
    else:
        name = str(model.build or model.model_name_or_path)
        work = work_from_settings(resolved, folder=str(Path.cwd()))
    request = MemoryRequest(
        work=work,
        candidate=_candidate(resolved),
        precision=resolved.settings.train.precision,
        device="cpu" if where.value == "cpu" else "auto",
        rounds=_ROUNDS_QUICK if options.quick else _ROUNDS,
    )
    seen = environment.environment_here(where.value)
    answer = memory.measure_memory(request, device=where.value, say=output.say)
    seen = seen.ended()
    planned = MemoryForecast(planned_bytes={}, not_planned="skipped by --quick")
    if not options.quick:
        planned = _forecast(request, answer)
    report = memory_report.memory_report(
        MeasuredMemory(
            answer=answer,
            model=name,
            micro_batch_size=request.candidate.micro_batch_size,
            limit_bytes=options.limit,
            planned_bytes=planned.planned_bytes,
            not_planned=planned.not_planned,
        ),
        where=where,
        environment=seen,
        settings={
            "work": dataclasses.asdict(work),
            "candidate": dataclasses.asdict(request.candidate),
            "limit_bytes": options.limit,
            "rounds": request.rounds,
        },
        date=now(),
        took_s=time.monotonic() - begun,
    )
    return finish(report, options)


def _resolved(options: argparse.Namespace) -> Resolved:
    for flag, path, value in (
        ("--model", "model.model_name_or_path", options.model),
        ("--build", "model.build", options.build),
        ("--micro-batch-size", "train.micro_batch_size", options.micro_batch_size),
    ):
        if value is not None:
            options.set.append(Flag(flag=flag, path=path, text=str(value)))
    return settings_from(options)


def _candidate(resolved: Resolved) -> Candidate:
    """Return the candidate for one process; accumulation over 2 micro-batches is representative."""
    train = resolved.settings.train
    usual = min(train.global_batch_size or _USUAL_MICRO_BATCH_SIZE, _USUAL_MICRO_BATCH_SIZE)
    size = train.micro_batch_size or usual
    several = train.global_batch_size is not None and train.global_batch_size > size
    return Candidate(
        strategy="single",
        layout=ShardLayout(copies=1, shards=1),
        recompute=train.activation_checkpointing,
        micro_batch_size=size,
        accumulation=2 if several else 1,
    )


def _forecast(request: MemoryRequest, answer: MemoryAnswer) -> MemoryForecast:
    output.say("predicting the same steps, as muster plan does")
    with Tracer(cache=cache_folder(), say=output.say) as tracer:
        return forecast_stages(
            request.work,
            dataclasses.replace(request.candidate, precision=answer.precision),
            [one.recompute for one in answer.ways],
            blocks=answer.blocks,
            kernels="cpu" if answer.device == "cpu" else "cuda",
            look=tracer.records,
        )
