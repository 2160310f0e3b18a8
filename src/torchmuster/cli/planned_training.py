"""``muster train --plan``: plan for this machine, and train with the plan."""

import dataclasses
import sys
from pathlib import Path

from torchmuster.cli import output
from torchmuster.cli.launch_options import TrainOptions
from torchmuster.config.here import check_here
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import Resolved
from torchmuster.errors import Impossible
from torchmuster.plan.answer import Answer, as_settings
from torchmuster.plan.hardware import here
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.hardware.described import describe_hardware
from torchmuster.plan.proof.comparison import Promise
from torchmuster.plan.request import request_from_settings
from torchmuster.plan.search import make_plan
from torchmuster.plan.tracing.cache import cache_folder
from torchmuster.plan.tracing.tracer import Tracer


def follow_plan(options: TrainOptions, resolved: Resolved) -> tuple[TrainOptions, Promise]:
    """Plan for this machine; return the options of the plan, and what it predicts."""
    _refuse_other_machines(options, resolved)
    check_here(resolved)  # before tracing, which takes long
    settings = resolved.settings
    hardware = here.hardware_from_settings(settings, ranks=options.ranks, device=options.device)
    answer = _answer(resolved, hardware)
    best, request = answer.chosen.value, answer.request
    output.say(f"plan: {answer.chosen.reason}")
    if answer.findings:
        output.show_findings(list(answer.findings), sys.stderr)
    chosen = as_settings(best.candidate, request, gpu_ids=settings.distributed.gpu_ids)
    flags = [Flag(flag="--plan", path=path, text=text) for path, text in chosen.items()]
    promise = Promise(
        candidate=best.candidate,
        hardware=describe_hardware(request.hardware),
        tensor_bytes=best.memory.tensor_bytes,
        step_s=None if best.time is None else best.time.step_s,
    )
    options = dataclasses.replace(options, set=(*options.set, *flags))
    if request.hardware.card.kind == "cpu":
        return dataclasses.replace(options, ranks=best.candidate.layout.ranks), promise
    # The plan may use fewer GPUs than the flags request.
    return dataclasses.replace(options, ranks=None, num_gpus=None, gpu_ids=None), promise


def _refuse_other_machines(options: TrainOptions, resolved: Resolved) -> None:
    if options.resume:
        raise Impossible(
            "--plan and --resume were both given",
            why="a resumed run keeps the plan that it was started with",
            fix="leave out --plan",
        )
    if options.slurm or resolved.settings.launch.hosts:
        raise Impossible(
            "--plan plans for this machine, but the training would run on others",
            fix="muster plan --hardware … --write plan.yaml, then muster train --config plan.yaml",
        )


def _answer(resolved: Resolved, hardware: Hardware) -> Answer:
    request = request_from_settings(resolved, hardware, folder=str(Path.cwd()))
    with Tracer(cache=cache_folder(), say=output.say) as tracer:
        return make_plan(request, tracer.records)
