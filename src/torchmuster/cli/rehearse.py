"""``muster rehearse``: what a run on thousands of hosts would need, before there are any."""

import argparse
import shlex
from pathlib import Path

from torchmuster.cli import output, parsers
from torchmuster.cli.job_flags import count, duration
from torchmuster.errors import ExitCode

_AMOUNTS = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_MOST_HOSTS = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster rehearse``."""
    parser.description = (
        f"{parser.description}\nRuns the real launcher on this machine with hosts that only answer its "
        "messages, and puts the\nfigures together with the planner's step time and a published "
        "failure rate."
    )
    parsers.show_examples(
        parser,
        [
            "muster rehearse --nodes 4000                        start, launcher, dead hosts",
            "muster rehearse --nodes 4000 --parameters 70B       and saves, failures, spares",
            "muster rehearse --nodes 512 --config config.yaml --gpu H100   with the planner's step time",
            "muster rehearse --nodes 4000 --parameters 70B --html rehearsal.html",
        ],
    )
    parser.add_argument(
        "--nodes",
        type=host_number,
        required=True,
        metavar="N",
        help="number of hosts, without spares",
    )
    parser.add_argument(
        "--gpus-per-node", type=count, default=8, metavar="N", help="GPUs per host (default: 8)"
    )
    parser.add_argument(
        "--parameters", type=amount, metavar="N", help="parameters of the model, such as 70B"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings of a training, for the planner"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="GPU for the planner, such as H100 (with --config)"
    )
    parser.add_argument(
        "--step-time", type=duration, metavar="DURATION", help="time of a step (default: planned)"
    )
    parser.add_argument(
        "--write-rate",
        type=amount,
        default=1e9,
        metavar="BYTES",
        help="bytes per second that each host writes and reads, such as 2G (default: 1G)",
    )
    parser.add_argument(
        "--spares",
        type=spare_number,
        metavar="N",
        help="spare hosts (default: as many as are worth having)",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="without a spare, the run continues with fewer hosts (default: it waits for the repair)",
    )
    parser.add_argument(
        "--repair",
        type=duration,
        default=86_400.0,
        metavar="DURATION",
        help="time until a failed host can be used again (default: 24h)",
    )
    parser.add_argument(
        "--gpu-hours-per-failure",
        type=amount,
        metavar="N",
        help="mean GPU hours between failures (default: 50.7K, as published for Llama 3)",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures")
    parsers.add_json_flag(parser)
    parser.set_defaults(run=_run_rehearse)


def amount(text: str) -> float:
    """Parse an amount such as 70B or 1.5T."""
    unit = text[-1:].upper()
    try:
        number = float(text[:-1] if unit in _AMOUNTS else text) * _AMOUNTS.get(unit, 1.0)
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount; write for example 70B")
    return number


def host_number(text: str) -> int:
    """Parse a number of hosts."""
    if not spare_number(text):
        raise argparse.ArgumentTypeError("at least one host is needed")
    return int(text)


def spare_number(text: str) -> int:
    """Parse a number of hosts, which may be 0."""
    if not text.isdecimal() or int(text) > _MOST_HOSTS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {_MOST_HOSTS}")
    return int(text)


def _run_rehearse(options: argparse.Namespace) -> int:
    from torchmuster.rehearse import report
    from torchmuster.rehearse.failures import GPU_HOURS_PER_FAILURE
    from torchmuster.rehearse.rehearsal import RehearsalRequest, rehearse
    from torchmuster.runfolder import write_atomically

    _refuse_early(options)
    parameters, step_s = options.parameters, options.step_time
    if options.config is not None:
        parameters, step_s = _planned(options)
    result = rehearse(
        RehearsalRequest(
            hosts=options.nodes,
            gpus_per_host=options.gpus_per_node,
            parameters=parameters,
            step_s=step_s,
            write_bytes_per_s=options.write_rate,
            repair_s=options.repair,
            spares=options.spares,
            elastic=options.elastic,
            gpu_hours_per_failure=options.gpu_hours_per_failure or GPU_HOURS_PER_FAILURE,
        ),
        lambda words: output.say(f"muster: {words}"),
    )
    if options.html is not None:
        write_atomically(options.html, report.rehearsal_page(result))
    if options.json:
        output.print_json(report.rehearsal_json(result))
        return ExitCode.GOOD
    output.print_text(report.rehearsal_text(result))
    if parameters is None:
        output.say("muster: for saves, failures and spares, add --parameters 70B or --config FILE")
    if options.html is not None:
        output.say(f"muster: wrote {options.html}")
    return ExitCode.GOOD


def _refuse_early(options: argparse.Namespace) -> None:
    """Refuse before minutes of measuring what would fail afterwards, or have no effect."""
    from torchmuster.errors import Impossible

    if options.html is not None and not options.html.absolute().parent.is_dir():
        raise Impossible(
            f"cannot write {options.html}",
            why="its folder does not exist",
            fix=f"mkdir -p {shlex.quote(str(options.html.parent))}",
        )
    if options.config is not None and options.gpu is None:
        raise Impossible("--config needs the GPU's name, for the planner", fix="add --gpu H100")
    if options.config is None and options.gpu is not None:
        raise Impossible(
            "--gpu has no effect without --config",
            why="the GPU's name is for the planner, which needs a training",
            fix="add --config config.yaml, or give --parameters and --step-time instead of --gpu",
        )
    if options.config is None and options.parameters is None:
        given = {
            "--spares": options.spares is not None,
            "--elastic": options.elastic,
            "--step-time": options.step_time is not None,
            "--gpu-hours-per-failure": options.gpu_hours_per_failure is not None,
        }
        if useless := [flag for flag, is_given in given.items() if is_given]:
            raise Impossible(
                f"{useless[0]} has no effect without a model",
                why="saves, failures and spares depend on the size of the checkpoint",
                fix="add --parameters 70B, or --config FILE",
            )


def _planned(options: argparse.Namespace) -> tuple[float, float | None]:
    """Return the parameters and the step time of a training, from the planner."""
    from torchmuster.config.resolve import resolve_settings
    from torchmuster.errors import Impossible
    from torchmuster.plan import planning
    from torchmuster.plan.hardware import cluster_file
    from torchmuster.plan.request import request_from_settings
    from torchmuster.plan.timing.rates import usual_rates
    from torchmuster.plan.tracing.cache import cache_folder
    from torchmuster.plan.tracing.tracer import Tracer

    resolved = resolve_settings(file=options.config, environment={}, flags=[])
    hardware = cluster_file.parse_hardware(f"{options.nodes}x{options.gpus_per_node}x{options.gpu}")
    output.say("muster: planning the training")
    with Tracer(cache=cache_folder(), say=output.say) as tracer:
        asked = request_from_settings(resolved, hardware, folder=str(Path.cwd()))
        rates = usual_rates(hardware.card.kind)
        answer = planning.make_plan(asked, tracer.records, rates=rates)
    time = answer.chosen.value.time
    parameters = options.parameters or answer.parameter_count
    if parameters is None:
        raise Impossible("the number of parameters is unknown", fix="add --parameters 70B")
    step_s = options.step_time or (None if time is None else time.step_s)
    return float(parameters), step_s
