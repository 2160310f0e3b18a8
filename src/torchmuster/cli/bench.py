"""``muster bench``: benchmark this host, and compare two records."""

import dataclasses
import importlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from torchmuster.cli import output
from torchmuster.cli.options import Command, JsonOptions, argument, command, flag
from torchmuster.cli.setting_options import SettingOptions, settings_of
from torchmuster.errors import ExitCode, Impossible
from torchmuster.finding import exit_code

LARGEST_NUMBER = 10**5  # more ranks are a typo
SCREEN_WIDTH = 100
# The summary and the description of each bench that needs nothing but this host.
BENCHES = {
    "matmul": (
        "matrix products: TFLOPS by size and dtype, GPU against CPU",
        """
        Multiplies square matrices in float32 and bfloat16; with a GPU, also in float16 and on the CPU.
        Large sizes are left out after a product that takes half a second. Checks the results.
        """,
    ),
    "precision": (
        "fp32, bf16, fp16: speed, memory, loss and overflow",
        """
        Trains a small GPT from the same weights on the same texts in each precision, and two models whose
        gradients or activations overflow in fp16.
        """,
    ),
    "attention": (
        "attention implementations by sequence length",
        """
        Compares the plain formula with the backends of scaled_dot_product_attention: time, peak memory, outputs and
        gradients, for causal attention with 8 heads of width 64.
        """,
    ),
    "memory": (
        "memory of training by stage; activation checkpointing",
        """
        Trains a small GPT in fp32, in bf16, and in fp32 with every 4th, 2nd and each block recomputed in the
        backward. muster plan forecasts the memory of your own model.
        """,
    ),
    "collectives": (
        "latency and bandwidth between ranks",
        """
        Times all-reduce, all-gather and reduce-scatter on the ranks of this host, with the bus bandwidth of
        nccl-tests, and checks every value.
        """,
    ),
    "scaling": (
        "training on 1, 2, 4 ranks: throughput and efficiency",
        """
        Trains a small GPT with DDP on 1, 2, 4 ranks of this host, each rank with its own batch, with and without
        exchanging gradients.
        """,
    ),
}

Device = Literal["cpu", "gpu"]


def numbers(text: str) -> tuple[int, ...]:
    """Parse a comma list of positive numbers: ``1,2,4``."""
    try:
        values = sorted({int(part) for part in text.split(",")})
    except ValueError:
        values = []
    if not values or values[0] < 1 or values[-1] > LARGEST_NUMBER:
        raise ValueError(f"{text!r} is not a list of numbers from 1 on; write for example 1,2,4")
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
class RankOptions(BenchOptions):
    """The flags of a bench that measures on several ranks."""

    ranks: tuple[int, ...] | None = flag(
        "numbers of ranks (default: one per GPU; on the CPU 2, of scaling 1,2,4, of data 1)",
        parse=numbers,
        metavar="N,N",
    )


@dataclass(frozen=True, kw_only=True)
class DataOptions(SettingOptions, RankOptions):
    """The flags of ``muster bench data``."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(JsonOptions):
    """The arguments of ``muster bench compare``."""

    before: Path = argument("a record.json, or its folder", required=True, parse=Path)
    after: Path = argument("the same", required=True, parse=Path)


def bench_command(name: str) -> Command:
    """Return the command of a bench of ``BENCHES``."""
    summary, more = BENCHES[name]

    options_type = RankOptions if name in ("collectives", "scaling") else BenchOptions

    @command(options_type, summary=summary, more=more)
    def run_bench(options: BenchOptions) -> int:
        """Measure, save and print."""
        return _bench(name, options)

    return run_bench


@command(
    DataOptions,
    summary="data loading by number of workers",
    more="""
    Reads the data of your settings as training does, with 0, 1, 2, 4, … workers per rank.
    """,
    examples=[
        "muster bench data --config config.yaml",
        "muster bench data --set data.dataset=own.data:train",
    ],
)
def data(options: DataOptions) -> int:
    """Measure, save and print."""
    import msgspec

    training = settings_of(options).settings
    if not (training.data.dataset or training.data.files or training.data.hugging_face):
        raise Impossible(
            "there is no data to read",
            why="the settings name no data",
            fix="--config FILE with data.dataset, data.files or data.hugging_face, or "
            "--set data.dataset=module:function",
        )
    return _bench("data", options, {"settings": msgspec.to_builtins(training)})


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
        cases = [dataclasses.asdict(change) for change in changes]
        output.print_json({"conclusion": conclusion, "differences": differences, "cases": cases})
    else:
        output.print_text(conclusion)
        for line in differences:
            output.print_text(f"  {line}")
        output.print_text()
        head = ("case", "before", "IQR", "after", "IQR", "ratio", "")
        output.print_table([head, *(change.cells for change in changes)], right=True)
    is_slower = any(change.verdict == "slower" for change in changes)
    return ExitCode.FAILED if is_slower else ExitCode.GOOD


def _gpus() -> int:
    """Return the number of GPUs that a process started here would see."""
    from torchmuster.devices import snapshot  # not for --help
    from torchmuster.devices.visibility import visible

    return len(visible(snapshot.take_snapshot().accelerators, os.environ).devices)


def _usual_ranks(name: str, device: Device) -> tuple[int, ...]:
    """Return the numbers of ranks to measure on: one rank per GPU, and as many on a CPU as a bench needs."""
    gpus = _gpus() if device == "gpu" else 0
    if name == "scaling":
        from torchmuster.bench.result import doublings  # not for --help

        return doublings(gpus or 4)
    if name == "collectives":
        return (max(2, gpus),)
    if name == "data":
        return (max(1, gpus),)
    return (1,)


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


def _bench(name: str, options: BenchOptions, more: Mapping[str, Any] | None = None) -> ExitCode:
    """Measure on each number of ranks, summarize, save and print; return the findings' exit code.

    ``torchmuster.bench.NAME`` has ``settings``, which are the arguments of ``measure`` with ``more``,
    and ``summarize``. ``MEASURING`` names the module with ``measure`` if it is another one.
    """
    from torchmuster.bench import result, show  # not for --help
    from torchmuster.bench.ranks import measure_on_ranks

    device = _device(options)
    folder = output.new_folder(Path("bench"), f"{name}-", given=options.out)
    output.refuse_unwritable(folder / result.RECORD_FILE)
    module: Any = importlib.import_module(f"torchmuster.bench.{name}")
    ranks = getattr(options, "ranks", None) or _usual_ranks(name, device)
    settings = {**module.settings(device, quick=options.quick, ranks=ranks), **(more or {})}
    measuring = getattr(module, "MEASURING", module.__name__)
    rows = []
    for number in ranks:
        output.say(f"measuring on the {device.upper()} ({number} ranks)")
        rows += measure_on_ranks(measuring, settings, ranks=number, device=device, say=output.say)
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
        **{name: bench_command(name) for name in BENCHES},
        "data": data,
        "compare": compare,
    },
)
