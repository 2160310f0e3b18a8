"""``muster train --plan``: a plan is made for this machine, the training follows it, and is held against it."""

import argparse
import sys
from pathlib import Path

from torchmuster.cli import output
from torchmuster.cli.config import settings_from
from torchmuster.config.here import check_here
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import Resolved
from torchmuster.errors import Impossible
from torchmuster.plan import planning
from torchmuster.plan.answer import Answer, as_settings
from torchmuster.plan.hardware import here
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.hardware.cluster_file import describe_hardware
from torchmuster.plan.proof.comparison import Promise
from torchmuster.plan.request import request_from_settings
from torchmuster.plan.timing import calibration
from torchmuster.plan.tracing.cache import cache_folder
from torchmuster.plan.tracing.tracer import Tracer


def follow_plan(options: argparse.Namespace, resolved: Resolved) -> tuple[Resolved, Promise]:
    """Plan for this machine, let the settings and flags be those of the plan, and return its promise."""
    _refuse_other_machines(options, resolved)
    check_here(resolved)  # before a trace, which would find it out much later
    settings = resolved.settings
    hardware = here.hardware_from_settings(settings, ranks=options.ranks, device=options.device)
    answer = _answer(resolved, hardware)
    best, asked = answer.chosen.value, answer.asked
    output.say(f"plan: {answer.chosen.reason}")
    if answer.findings:
        output.show_findings(list(answer.findings), sys.stderr)
    chosen = as_settings(best.candidate, asked, gpu_ids=settings.distributed.gpu_ids)
    options.set += [Flag(flag="--plan", path=path, text=text) for path, text in chosen.items()]
    if asked.hardware.card.kind == "cpu":
        options.ranks = best.candidate.layout.ranks
    else:  # the plan may take fewer of them than the flags name
        options.ranks = options.num_gpus = options.gpu_ids = None
    promise = Promise(
        candidate=best.candidate,
        hardware=describe_hardware(asked.hardware),
        tensor_bytes=best.memory.tensor_bytes,
        step_s=None if best.time is None else best.time.step_s,
    )
    return settings_from(options), promise


def _refuse_other_machines(options: argparse.Namespace, resolved: Resolved) -> None:
    if options.resume:
        raise Impossible(
            "--plan and --resume were both given",
            why="a run goes on as it began, and its plan was made then",
            fix="leave out --plan",
        )
    if options.slurm or resolved.settings.launch.hosts:
        raise Impossible(
            "--plan is for this machine, and the training would run on others",
            fix="muster plan --hardware … --write plan.yaml, then muster train --config plan.yaml",
        )


def _answer(resolved: Resolved, hardware: Hardware) -> Answer:
    hardware, rates = calibration.as_known(calibration.saved_calibration(cache_folder()), hardware)
    asked = request_from_settings(resolved, hardware, folder=str(Path.cwd()))
    with Tracer(cache=cache_folder(), say=output.say) as tracer:
        return planning.make_plan(asked, tracer.records, rates=rates)
