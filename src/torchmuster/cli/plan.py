"""``muster plan``: predict whether a model fits, how to split it, and its speed."""

import importlib.util
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from torchmuster.cli import output
from torchmuster.cli.options import JsonOptions, command, count, flag
from torchmuster.cli.setting_options import SettingOptions, setting_flags, settings_of
from torchmuster.config.resolve import Resolved
from torchmuster.errors import Impossible
from torchmuster.finding import Finding, exit_code
from torchmuster.plan.answer import Answer, as_settings, line_to_paste
from torchmuster.plan.hardware import catalogue, here
from torchmuster.plan.report import plan_json, plan_text
from torchmuster.plan.request import PlanRequest, request_from_settings
from torchmuster.plan.search import make_plan
from torchmuster.plan.tracer import Tracer

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
    sequence_length: str | None = flag(
        "tokens per sample", metavar="N", setting="data.sequence_length", group=TRAINING
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
    details: bool = flag("show all candidates, parts and sources", default=False)


def is_here(options: PlanOptions) -> bool:
    """Return whether the plan is for this machine."""
    return bool(options.hardware.strip().lower() == "here")


def refuse_contradictions(options: PlanOptions, resolved: Resolved) -> None:
    """Reject flags that contradict each other, and a missing library, before the slow tracing."""
    for name in ("find_batch_size", "verify", "num_gpus", "gpu_ids", "ranks"):
        if getattr(options, name) not in (None, False) and not is_here(options):
            raise Impossible(
                f"--{name.replace('_', '-')} is for this machine, but the plan is for "
                f"{options.hardware}",
                fix="leave out one of the two; give the number of GPUs in --hardware: 8xH100",
            )
    model = resolved.settings.model.model_name_or_path
    if model is not None and importlib.util.find_spec("transformers") is None:
        raise Impossible(
            f"{model} is a Hugging Face model, and transformers is not installed",
            fix="pip install 'torchmuster[transformers]'",
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
        "muster plan --set model.build=my.models:make --set data.dataset=my.data:train --hardware 2xL4",
    ],
)
def run(options: PlanOptions) -> int:
    """Plan, print the plan, and return the exit code."""
    resolved = settings_of(options)
    refuse_contradictions(options, resolved)
    with Tracer(say=output.say) as tracer:
        request = _request(options, resolved)
        if options.find_batch_size and request.kernels == "cpu":
            raise Impossible(
                "--find-batch-size needs a GPU",
                why="on a CPU nothing limits a rank before the kernel kills processes of this host",
                fix="muster plan --verify measures the planned micro-batch",
            )
        answer = make_plan(request, tracer.trace)
    settings = _settings(options, resolved, answer)
    flags = {given.path: given.text for given in setting_flags(options)}
    config = None if options.config is None else str(options.config)
    line = line_to_paste(settings, flags, answer.chosen.value.candidate, request, config=config)
    if not options.json:
        width = min(shutil.get_terminal_size().columns, WIDTH)
        colour = output.wants_colour(sys.stdout)
        text = plan_text(answer, line=line, width=width, colour=colour, details=options.details)
        output.print_coloured(text)
    findings = _measure(options, answer)
    if options.json:
        document = plan_json(answer, line=line, settings=settings)
        output.print_json({**document, "proof": [finding.as_json() for finding in findings]})
    elif findings:
        output.print_text()
        output.show_findings(findings, sys.stdout)
    return exit_code(findings)


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
        hardware = catalogue.parse_hardware(options.hardware)
    return request_from_settings(resolved, hardware, folder=str(Path.cwd()))


def _measure(options: PlanOptions, answer: Answer) -> list[Finding]:
    """Compare the plan with real steps on this machine, if requested."""
    from torchmuster.plan import real_steps  # starts the launcher: not for --help

    findings = []
    if options.verify:
        output.say("running real steps on this machine")
        findings.append(real_steps.verify_plan(answer, say=output.say))
    if options.find_batch_size:
        request, candidate = answer.request, answer.chosen.value.candidate
        samples = None
        if request.global_batch_size is not None:
            samples = math.ceil(request.global_batch_size / candidate.layout.ranks)
        finding = real_steps.find_batch_size(
            request.work, candidate, device="gpu", samples=samples, say=output.say
        )
        findings.append(finding)
    return findings
