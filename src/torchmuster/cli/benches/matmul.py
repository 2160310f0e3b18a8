"""``muster bench matmul``: measure the speed of matrix products."""

import argparse
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torchmuster.cli import output, parsers
from torchmuster.cli.bench import add_common_flags, device_of, finish, now, size
from torchmuster.cli.config import add_setting_flags, settings_from
from torchmuster.config.layers import Flag
from torchmuster.errors import ExitCode, Impossible

if TYPE_CHECKING:
    from torchmuster.bench.matmul import MatmulRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster bench matmul``."""
    parser.description = (
        f"{parser.description}\nMultiplies square matrices, or the matrices of a model's linear "
        "layers, in every "
        "dtype of the\ndevice; with a GPU, also on the CPU. Shows FLOP/s and, if known, the "
        "share of the "
        "GPU's peak.\nChecks the results."
    )
    parsers.show_examples(
        parser,
        [
            "muster bench matmul                          sizes 128 to 4096",
            "muster bench matmul --sizes 1024 4096        these sizes, without a time limit",
            "muster bench matmul --config config.yaml     the linear layers of your model",
            "muster bench matmul --model ./llama-8b       the linear layers of a model (no weights)",
        ],
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=size,
        metavar="N",
        help="sizes of the square matrices (default: 128 … 4096)",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="a folder, or a name on the Hugging Face hub"
    )
    add_setting_flags(parser)
    add_common_flags(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Measure, save and print the results."""
    from torchmuster.bench import environment, matmul

    begun = time.monotonic()
    where = device_of(options)
    request = _matmul_request(options, "cpu" if where.value == "cpu" else "auto")
    seen = environment.environment_here(where.value)
    answer = matmul.measure_matmul(request, device=where.value, say=output.say)
    report = matmul.matmul_report(
        answer,
        where=where,
        environment=seen.ended(),
        settings={
            "shapes": [dataclasses.asdict(one) for one in request.shapes],
            "model": dataclasses.asdict(request.work) if request.work else None,
            "micro_batch_size": request.micro_batch_size if request.work else None,
            "rounds": request.rounds,
        },
        date=now(),
        took_s=time.monotonic() - begun,
    )
    return finish(report, options)


def _matmul_request(options: argparse.Namespace, device: Literal["auto", "cpu"]) -> "MatmulRequest":
    from torchmuster.bench import matmul
    from torchmuster.plan.request import work_from_settings

    rounds = matmul.ROUNDS_QUICK if options.quick else matmul.ROUNDS
    longest_s = matmul.LONGEST_QUICK_S if options.quick else matmul.LONGEST_S
    if not (options.model or options.config or options.set):
        return matmul.MatmulRequest(
            device=device,
            shapes=matmul.squares(tuple(options.sizes or matmul.SIZES)),
            rounds=rounds,
            longest_s=None if options.sizes else longest_s,
        )
    if options.sizes:
        raise Impossible(
            "--sizes and a model were both given",
            why="the shapes come from the model's layers",
            fix="leave one of the two out",
        )
    if options.model is not None:
        flag = Flag(flag="--model", path="model.model_name_or_path", text=options.model)
        options.set.append(flag)
    resolved = settings_from(options)
    return matmul.MatmulRequest(
        device=device,
        work=work_from_settings(resolved, folder=str(Path.cwd())),
        micro_batch_size=resolved.settings.train.micro_batch_size or 1,
        rounds=rounds,
        longest_s=longest_s,
    )
