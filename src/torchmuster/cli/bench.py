"""``muster bench``: benchmark this host, and compare two records."""

import dataclasses
import importlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torchmuster.cli import output
from torchmuster.cli.options import Command, JsonOptions, argument, command, count, flag
from torchmuster.cli.setting_options import SettingOptions
from torchmuster.errors import ExitCode, Impossible
from torchmuster.finding import exit_code
from torchmuster.units import KiB, MiB

LARGEST_NUMBER = 10**7  # more is a typo
SCREEN_WIDTH = 100
SIZES = (128, 256, 512, 1024, 2048, 4096)
QUICK_SIZES = (128, 256, 512, 1024)
LENGTHS = (128, 256, 512, 1024, 2048)
QUICK_LENGTHS = (128, 512)
MESSAGES = (4 * KiB, 64 * KiB, MiB, 16 * MiB, 64 * MiB)
QUICK_MESSAGES = (4 * KiB, MiB)

Device = Literal["cpu", "gpu"]


def numbers(text: str, lowest: int = 1) -> tuple[int, ...]:
    """Parse a comma list of whole numbers: ``128,256``."""
    try:
        values = sorted({int(part) for part in text.split(",")})
    except ValueError:
        values = []
    if not values or values[0] < lowest or values[-1] > LARGEST_NUMBER:
        raise ValueError(
            f"{text!r} is not a list of numbers from {lowest} on; write for example 1,2,4"
        )
    return tuple(values)


@dataclass(frozen=True, kw_only=True)
class BenchOptions(JsonOptions):
    """The flags of every bench that measures."""

    device: Device | None = flag(
        "device to measure on (default: a GPU if there is one)", choices=("cpu", "gpu")
    )
    quick: bool = flag("measure less; takes seconds", default=False)
    out: Path | None = flag(
        "folder for the results (default: bench/NAME-DATE-TIME)", parse=Path, metavar="DIR"
    )


@dataclass(frozen=True, kw_only=True)
class MatmulOptions(BenchOptions):
    """The flags of ``muster bench matmul``."""

    sizes: tuple[int, ...] | None = flag(
        "rows of the matrices (default: 128,…,4096)", parse=numbers, metavar="N,N"
    )


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(BenchOptions):
    """The flags of ``muster bench attention``."""

    lengths: tuple[int, ...] | None = flag(
        "sequence lengths (default: 128,…,2048)", parse=numbers, metavar="N,N"
    )


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(BenchOptions):
    """The flags of ``muster bench memory``."""

    batch_size: int = flag("texts of a step (default: 16)", default=16, parse=count, metavar="N")


@dataclass(frozen=True, kw_only=True)
class DataOptions(SettingOptions, BenchOptions):
    """The flags of ``muster bench data``."""

    workers: tuple[int, ...] | None = flag(
        "numbers of workers per rank (default: 0,1,2,4,… up to the cores of a rank)",
        parse=partial(numbers, lowest=0),
        metavar="N,N",
    )
    ranks: int | None = flag(
        "ranks that read at once (default: one per GPU)", parse=count, metavar="N"
    )


@dataclass(frozen=True, kw_only=True)
class CollectivesOptions(BenchOptions):
    """The flags of ``muster bench collectives``."""

    ranks: int | None = flag("ranks (default: one per GPU; 2 on the CPU)", parse=count, metavar="N")


@dataclass(frozen=True, kw_only=True)
class ScalingOptions(BenchOptions):
    """The flags of ``muster bench scaling``."""

    ranks: tuple[int, ...] | None = flag(
        "numbers of ranks (default: 1,2,4; on GPUs 1,2,4,… up to all)",
        parse=numbers,
        metavar="N,N",
    )
    batch_size: int = flag("texts of each rank (default: 8)", default=8, parse=count, metavar="N")


@dataclass(frozen=True, kw_only=True)
class CompareOptions(JsonOptions):
    """The arguments of ``muster bench compare``."""

    before: Path = argument("a record.json, or its folder", required=True, parse=Path)
    after: Path = argument("the same", required=True, parse=Path)


@command(
    MatmulOptions,
    summary="matrix products: TFLOPS by size and dtype, GPU against CPU",
    more="""
    Multiplies square matrices in float32 and bfloat16; with a GPU, also in float16 and on the CPU.
    Large sizes are left out after a product that takes half a second. Checks the results.
    """,
    examples=["muster bench matmul --sizes 1024,8192"],
)
def matmul(options: MatmulOptions) -> int:
    """Measure, save and print."""
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    settings = {"sizes": sizes, "seconds": 0.1 if options.quick else 0.4}
    return _bench("matmul", options, settings)


@command(
    BenchOptions,
    summary="fp32, tf32, bf16, fp16: speed, memory, loss and overflow",
    more="""
    Trains a small GPT from the same weights on the same texts in each precision, and two models whose
    gradients or activations overflow in fp16.
    """,
)
def precision(options: BenchOptions) -> int:
    """Measure, save and print."""
    settings = {"steps": 60, "seconds": 2.0, "batch_size": 8, "blocks": 8}
    if _device(options) == "cpu":
        settings |= {"batch_size": 2, "blocks": 2}  # CPUs take seconds for a large step in fp16
    if options.quick:
        settings |= {"steps": 20, "seconds": 0.5}
    return _bench("precision", options, settings)


@command(
    AttentionOptions,
    summary="attention implementations by sequence length",
    more="""
    Compares the plain formula with the backends of scaled_dot_product_attention: time, peak memory, outputs and
    gradients, for causal attention with 8 heads of width 64.
    """,
    examples=["muster bench attention --lengths 512,4096"],
)
def attention(options: AttentionOptions) -> int:
    """Measure, save and print."""
    lengths = options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS)
    settings = {"lengths": lengths, "seconds": 0.1 if options.quick else 0.4}
    return _bench("attention", options, settings)


@command(
    MemoryOptions,
    summary="memory of training by stage; activation checkpointing",
    more="""
    Trains a small GPT in fp32, in bf16, and in fp32 with every 4th, 2nd and each block recomputed in the
    backward. muster plan forecasts the memory of your own model.
    """,
)
def memory(options: MemoryOptions) -> int:
    """Measure, save and print."""
    settings = {"batch_size": options.batch_size, "seconds": 0.5 if options.quick else 2.0}
    return _bench("memory", options, settings)


@command(
    DataOptions,
    summary="data loading by number of workers",
    more="""
    Reads the data of your settings as training does, with 0, 1, 2, 4, … workers per rank, and checks that the
    batches are the same.
    """,
    examples=[
        "muster bench data --config config.yaml",
        "muster bench data --set data.dataset=own.data:train --workers 0,4,8",
    ],
)
def data(options: DataOptions) -> int:
    """Measure, save and print."""
    import msgspec

    from torchmuster.cli.setting_options import settings_of
    from torchmuster.devices.readers.cpu import usable_cores

    training = settings_of(options).settings
    if not (training.data.dataset or training.data.files or training.data.hugging_face):
        raise Impossible(
            "there is no data to read",
            why="the settings name no data",
            fix="--config FILE with data.dataset, data.files or data.hugging_face, or "
            "--set data.dataset=module:function",
        )
    ranks = options.ranks or 1
    if options.ranks is None and _device(options) == "gpu":
        ranks = _gpus()
    settings = {
        "settings": msgspec.to_builtins(training),
        "workers": options.workers or (0, *doublings(max(2, usable_cores().value // ranks))),
        "seconds": 0.3 if options.quick else 2.0,
    }
    return _bench("data", options, settings, ranks=(ranks,), measuring="torchmuster.worker.reading")


@command(
    CollectivesOptions,
    summary="latency and bandwidth between ranks",
    more="""
    Times all-reduce, all-gather, reduce-scatter and broadcast on the ranks of this host, with the bus bandwidth
    of nccl-tests, and checks every value.
    """,
)
def collectives(options: CollectivesOptions) -> int:
    """Measure, save and print."""
    ranks = options.ranks or 2
    if options.ranks is None and _device(options) == "gpu":
        ranks = max(2, _gpus())
    settings = {"sizes": QUICK_MESSAGES if options.quick else MESSAGES}
    return _bench("collectives", options, settings, ranks=(ranks,))


@command(
    ScalingOptions,
    summary="training on 1, 2, 4 ranks: throughput and efficiency",
    more="""
    Trains a small GPT with DDP on 1, 2, 4 ranks of this host, each rank with its own batch, with and without
    exchanging gradients.
    """,
    examples=["muster bench scaling --ranks 1,2,4,8"],
)
def scaling(options: ScalingOptions) -> int:
    """Measure, save and print."""
    from torchmuster.devices.readers.cpu import usable_cores

    device = _device(options)
    ranks = options.ranks or (1, 2, 4)
    if options.ranks is None and device == "gpu":
        ranks = doublings(_gpus())
    if ranks == (1,):
        raise Impossible(
            "cannot measure scaling with fewer than 2 ranks",
            why="on GPUs, each rank needs its own",
            fix="muster bench scaling --device cpu --ranks 1,2",
        )
    settings = {"batch_size": options.batch_size, "samples": 5 if options.quick else 12}
    if device == "cpu":
        settings["threads"] = max(1, usable_cores().value // max(ranks))
    return _bench("scaling", options, settings, ranks=ranks)


@command(
    CompareOptions,
    summary="compare two records: medians, quartiles, ratio",
    more="""
    A case is slower or faster if its median differs by more than 2 % and the quartile ranges do not overlap.
    Exit code 1 if a case is slower.
    """,
    examples=["muster bench compare bench/before bench/after"],
)
def compare(options: CompareOptions) -> int:
    """Read both records, compare, print."""
    from torchmuster.bench import compare as comparison  # not for --help
    from torchmuster.bench.result import read_record

    before, after = read_record(options.before), read_record(options.after)
    changes = comparison.compare_records(before, after)
    conclusion = comparison.conclusion(changes)
    differences = comparison.host_differences(before, after)
    if options.json:
        cases = []
        for change in changes:
            described = dataclasses.asdict(change)
            cases.append({**described, "ratio": change.ratio, "verdict": change.verdict})
        document = {"conclusion": conclusion, "differences": differences, "cases": cases}
        output.print_json(document)
    else:
        output.print_text(conclusion)
        for line in differences:
            output.print_text(f"  {line}")
        output.print_text()
        head = ("case", "before", "IQR", "after", "IQR", "ratio", "")
        output.print_table([head, *map(comparison.cells, changes)], right=True)
    is_slower = any(change.verdict == "slower" for change in changes)
    return ExitCode.FAILED if is_slower else ExitCode.GOOD


def doublings(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … up to a number."""
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return tuple(counts)


def _gpus() -> int:
    """Return the number of GPUs that a process started here would see."""
    from torchmuster.devices import snapshot  # not for --help
    from torchmuster.devices.visibility import visible

    return len(visible(snapshot.take_snapshot().accelerators, os.environ).devices)


def _device(options: BenchOptions) -> Device:
    """Return the device to measure on: ``--device``, or a GPU if there is one."""
    gpus = _gpus()
    if options.device == "gpu" and not gpus:
        raise Impossible(
            "cannot measure on a GPU",
            why="no GPU is visible here",
            fix="leave out --device to measure on the CPU, or run muster doctor",
        )
    return "cpu" if options.device == "cpu" or not gpus else "gpu"


def _bench(
    name: str,
    options: BenchOptions,
    settings: dict[str, Any],
    *,
    ranks: Sequence[int] = (1,),
    measuring: str = "",
) -> ExitCode:
    """Measure on each number of ranks, summarize, save and print; return the findings' exit code.

    ``torchmuster.bench.NAME`` has ``summarize``, and ``measure`` unless ``measuring`` names another
    module.
    """
    from torchmuster.bench import result, show  # not for --help
    from torchmuster.bench.ranks import measure_on_ranks

    device = _device(options)
    folder = output.new_folder(Path("bench"), f"{name}-", given=options.out)
    output.refuse_unwritable(folder / result.RECORD_FILE)
    module: Any = importlib.import_module(f"torchmuster.bench.{name}")
    rows = []
    for number in ranks:
        output.say(f"measuring on the {device.upper()} ({number} ranks)")
        rows += measure_on_ranks(
            measuring or module.__name__, settings, ranks=number, device=device, say=output.say
        )
    report = module.summarize(rows)
    record = result.Record(
        bench=name,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        host=result.describe_host(),
        settings={"device": device, "ranks": list(ranks), **settings},
        rows=tuple(rows),
        conclusion=report.conclusion,
        advice=report.advice,
    )
    if options.json:
        document = json.loads(result.encode_record(record))
        document["findings"] = [finding.as_json() for finding in report.findings]
        document["folder"] = str(folder)
        output.print_json(document)
    else:
        width = min(shutil.get_terminal_size().columns, SCREEN_WIDTH)
        colour = output.wants_colour(sys.stdout)
        output.print_coloured(show.screen(report, width=width, colour=colour))
    files = show.save(report, record, folder)
    if not options.json:
        output.print_text(f"\nsaved in {folder}: {', '.join(files)}")
    return exit_code(report.findings)


run = Command(
    examples=[
        "muster bench matmul                    speed of matrix products",
        "muster bench scaling --ranks 1,2,4     throughput by number of ranks",
        "muster bench compare before after      slower, faster, or within noise",
    ],
    actions={
        "matmul": matmul,
        "precision": precision,
        "attention": attention,
        "memory": memory,
        "data": data,
        "collectives": collectives,
        "scaling": scaling,
        "compare": compare,
    },
)
