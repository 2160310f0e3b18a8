"""``muster plan``: predict whether a model fits, how to split it, and its speed."""

import dataclasses
import importlib.util
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchmuster.cli import output
from torchmuster.cli.options import JsonOptions, command, count, flag
from torchmuster.cli.setting_options import SettingOptions, setting_flags, settings_of
from torchmuster.config.here import looks_like_path
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import Resolved, resolve_settings
from torchmuster.config.written import settings_yaml
from torchmuster.errors import Impossible
from torchmuster.finding import Finding, Status, exit_code
from torchmuster.launch.job import parse_hosts
from torchmuster.plan.answer import Answer, as_settings, line_to_paste
from torchmuster.plan.hardware import described, here
from torchmuster.plan.report import plan_json, plan_text
from torchmuster.plan.request import PlanRequest, request_from_settings
from torchmuster.plan.search import make_plan
from torchmuster.plan.tracing.cache import cache_folder
from torchmuster.plan.tracing.tracer import Tracer
from torchmuster.runfolder import write_atomically
from torchmuster.units import plural

SEQUENCE_LENGTH = "data.sequence_length"
TRAINING = "training (all of these are also settings)"
WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SettingOptions, JsonOptions):
    """The flags of ``muster plan``."""

    model: str | None = flag(
        "a folder, or a name on the Hugging Face hub",
        metavar="MODEL",
        setting="model.model_name_or_path",
        group=TRAINING,
    )
    build: str | None = flag(
        "your function that returns the model",
        metavar="MODULE:NAME",
        setting="model.build",
        group=TRAINING,
    )
    dataset: str | None = flag(
        "your dataset; a sample of it gives the input shapes",
        metavar="MODULE:NAME",
        setting="data.dataset",
        group=TRAINING,
    )
    sequence_length: str | None = flag(
        "tokens per sample", metavar="N", setting=SEQUENCE_LENGTH, group=TRAINING
    )
    global_batch_size: str | None = flag(
        "samples per step over all ranks",
        metavar="N",
        setting="train.global_batch_size",
        group=TRAINING,
    )
    precision: str | None = flag(
        "auto, fp32, bf16 or fp16", metavar="TYPE", setting="train.precision", group=TRAINING
    )
    strategy: str | None = flag(
        "auto, ddp or fsdp", metavar="NAME", setting="distributed.strategy", group=TRAINING
    )
    hardware: str = flag(
        "8xH100, 2x8xA100-80GB, or: here (default: here, this machine)",
        default="here",
        metavar="WHAT",
    )
    ranks: int | None = flag("number of ranks on this machine's CPU", parse=count, metavar="N")
    verify: bool = flag("compare with a few real steps here", default=False)
    find_batch_size: bool = flag(
        "find the largest micro-batch size for the plan, with trial runs here",
        default=False,
    )
    write: Path | None = flag("write settings for muster train", parse=Path, metavar="FILE")
    details: bool = flag("show all candidates, parts and sources", default=False)


def is_here(options: PlanOptions) -> bool:
    """Return whether the plan is for this machine."""
    return bool(options.hardware.strip().lower() == "here")


def refuse_contradictions(options: PlanOptions) -> None:
    """Reject flags that contradict each other, and files that cannot be written."""
    for name in ("find_batch_size", "verify", "num_gpus", "gpu_ids", "ranks"):
        if getattr(options, name) not in (None, False) and not is_here(options):
            raise Impossible(
                f"--{name.replace('_', '-')} is for this machine, but the plan is for "
                f"{options.hardware}",
                fix="leave out one of the two; give the number of GPUs in --hardware: 8xH100",
            )
    if options.write is not None:
        output.refuse_unwritable(options.write)
    if options.write is None or options.config is None:
        return
    if options.write.resolve() == options.config.resolve():
        raise Impossible(
            f"--write {options.write} is the file that --config reads",
            why="its content would be overwritten",
            fix="write to another file: --write plan.yaml",
        )


def refuse_missing_model(resolved: Resolved) -> None:
    """Reject a model folder that does not exist, before the slow tracing."""
    name = resolved.settings.model.model_name_or_path
    if name is None:
        return
    if importlib.util.find_spec("transformers") is None:
        raise Impossible(
            f"{name} is a Hugging Face model, and transformers is not installed",
            fix="pip install 'torchmuster[transformers]'",
        )
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        why = "it contains no config.json"
    elif looks_like_path(name) and not folder.is_dir():
        why = f"there is no such folder in {Path.cwd()}"
    else:
        return
    raise Impossible(
        f"there is no model in {name}",
        why=why,
        fix="check the path; a name on the hub is written as owner/name",
    )


def _remarks(answer: Answer, resolved: Resolved) -> Iterator[Finding]:
    """Yield what the settings lack for this plan."""
    data = resolved.settings.data
    if not (data.dataset or data.files or data.hugging_face or data.images):
        yield Finding(
            name="no-data",
            status=Status.NOTE,
            what="the command below names no training data",
            fix="add --config FILE with data, or --set data.files=PATTERN",
        )
    hosts = parse_hosts(resolved.settings.launch.hosts or ())
    machines = answer.request.hardware.machines
    if hosts and len(hosts) != machines:
        planned = plural(machines, "machine")
        yield Finding(
            name="other-machines",
            status=Status.WARNING,
            what=f"launch.hosts names {plural(len(hosts), 'host')}, but this plan is for {planned}",
            why=f"a plan ignores launch.hosts ({resolved.sources['launch.hosts'].where})",
            fix=f"--hardware {len(hosts)}x8xH100, with the number and type of GPUs of each host",
        )


@command(
    PlanOptions,
    more="""
    Traces a few layers of the model without its weights and without a GPU, predicts memory within a
    band and, roughly, the time of configurations from simple to complex, and reports the best that fits.
    Settings that you give are fixed; the plan searches over the others.
    """,
    examples=[
        "muster plan --config config.yaml                          on this machine",
        "muster plan --config config.yaml --hardware 8xH100        on eight H100s",
        "muster plan --model ./llama-8b --sequence-length 8192 --hardware 16x8xH100",
        "muster plan --build my.models:make --dataset my.data:train --hardware 2xL4",
        "muster plan --config config.yaml --write plan.yaml        settings for muster train",
    ],
)
def run(options: PlanOptions) -> int:
    """Plan, print the plan, and return the exit code."""
    refuse_contradictions(options)
    resolved = settings_of(options)
    refuse_missing_model(resolved)
    with Tracer(cache=cache_folder(), say=output.say) as tracer:
        request = _request(options, resolved)
        if options.find_batch_size and request.kernels == "cpu":
            raise Impossible(
                "--find-batch-size needs a GPU",
                why="on a CPU nothing limits a rank before the kernel kills processes of this host",
                fix="muster plan --verify measures the planned micro-batch",
            )
        answer = make_plan(request, tracer.records)
        findings = (*answer.findings, *_remarks(answer, resolved))
        answer = dataclasses.replace(answer, findings=findings)
        candidate = answer.chosen.value.candidate
        settings = _settings(options, resolved, answer)
        beside = {given.path: given.text for given in setting_flags(options)}
        config = None if options.config is None else str(options.config)
        line = line_to_paste(settings, beside, candidate, request, config=config)
        if not options.json:
            _show_plan(answer, line, details=options.details)
            _write(options, settings)
        found = _prove(options, answer)
    if options.json:
        document = plan_json(answer, line=line, settings=settings)
        output.print_json({**document, "proof": [finding.as_json() for finding in found]})
        _write(options, settings)
    elif found:
        output.print_text()
        output.show_findings(found, sys.stdout)
    return exit_code(found)


def _settings(options: PlanOptions, resolved: Resolved, answer: Answer) -> dict[str, str]:
    """Return the settings of the plan; given GPU ids are kept if the plan is for this machine."""
    ids = resolved.settings.distributed.gpu_ids
    candidate = answer.chosen.value.candidate
    if is_here(options) or ids is None:
        return as_settings(candidate, answer.request, gpu_ids=ids)
    return {**as_settings(candidate, answer.request), "distributed.gpu_ids": "null"}


def _request(options: PlanOptions, resolved: Resolved) -> PlanRequest:
    if is_here(options):
        hardware = here.hardware_here(resolved.settings, ranks=options.ranks)
    else:
        hardware = described.parse_hardware(options.hardware)
    return request_from_settings(resolved, hardware, folder=str(Path.cwd()))


def _show_plan(answer: Answer, line: str, *, details: bool) -> None:
    width = min(shutil.get_terminal_size().columns, WIDTH)
    colour = output.wants_colour(sys.stdout)
    text = plan_text(answer, line=line, width=width, colour=colour, details=details)
    output.print_coloured(text)


def _write(options: PlanOptions, settings: Mapping[str, str]) -> None:
    """Write the plan's settings, if requested."""
    if options.write is None:
        return
    chosen = [Flag(flag="muster plan", path=path, text=value) for path, value in settings.items()]
    resolved = resolve_settings(
        file=options.config, environment=os.environ, flags=[*setting_flags(options), *chosen]
    )
    write_atomically(options.write, settings_yaml(resolved))


def _prove(options: PlanOptions, answer: Answer) -> list[Finding]:
    """Compare the plan with real steps on this machine, if requested."""
    from torchmuster.plan.proof import trials, verification

    findings: list[Finding] = []
    if options.verify:
        output.say("running real steps on this machine")
        findings += verification.verify_plan(answer, say=output.say)
    if options.find_batch_size:
        request, candidate = answer.request, answer.chosen.value.candidate
        samples = None
        if request.global_batch_size is not None:
            samples = math.ceil(request.global_batch_size / candidate.layout.ranks)
        size, tried = trials.find_batch_size(
            request.work, candidate, samples=samples, say=output.say
        )
        finding = trials.batch_size_finding(size, tried, candidate, samples=samples)
        findings.append(finding)
    return findings
