"""``muster runs export``: a run's numbers as files for others, or sent to a tracker, now or once more."""

import argparse
import os
from typing import Any

from torchmuster.cli import output, parsers
from torchmuster.cli.config import add_set_flag
from torchmuster.config.here import SINK_LIBRARIES, check_sinks
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve
from torchmuster.errors import ExitCode, Impossible, MusterError
from torchmuster.launch.history import run_state
from torchmuster.redaction import redact_text
from torchmuster.runfolder import RunFolder, find
from torchmuster.units import plural


def add_parser(actions: Any) -> None:
    """Add ``export`` to the actions of ``muster runs``."""
    parser = parsers.add_action(
        actions,
        "export",
        "write a run's metrics for other programs, or send them to a tracker",
        more="What the run has sent by itself (metrics.sinks) is not sent twice: only what is missing is.\n"
        "Everything comes from the run's folder, so it works after the run, and without the network that it had.",
        examples=[
            "muster runs export last --to parquet      metrics/steps.parquet in the run's folder",
            "muster runs export last --to tensorboard  then: tensorboard --logdir runs",
            "muster runs export last --to mlflow --set metrics.mlflow_uri=http://tracker:5000",
            "muster runs export last --to wandb --anew  everything once more, as a new run there",
        ],
    )
    parsers.add_run_argument(parser)
    parser.add_argument(
        "--to",
        required=True,
        choices=tuple(SINK_LIBRARIES),
        metavar="SINK",
        help=f"who gets them: {', '.join(SINK_LIBRARIES)}",
    )
    parser.add_argument(
        "--anew", action="store_true", help="send everything, as if nothing had been sent before"
    )
    add_set_flag(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from torchmuster.monitor.sinks import sent
    from torchmuster.monitor.sinks.sending import Sending
    from torchmuster.monitor.sinks.sink import open_sink, wanted_by

    run = find(options.which, options.runs)
    if not any((run.metrics / f"{name}.jsonl").is_file() for name in ("steps", "evaluations")):
        raise Impossible(
            f"{run.id} has no metrics",
            why=f"there is neither steps.jsonl nor evaluations.jsonl in {run.metrics}",
            fix="give a run of muster train that has made a step",
        )
    chosen = Flag(flag="--to", path="metrics.sinks", text=options.to)
    resolved = resolve(
        file=run.config if run.config.is_file() else None,
        environment=os.environ,
        flags=[*options.set, chosen],
    )
    check_sinks(resolved)
    wanted = wanted_by(resolved.settings, anew=options.anew)
    with sent.held(run, options.to):
        if options.anew:
            sent.forget(run, options.to)
        sending = Sending(run, options.to, lambda known: open_sink(options.to, run, wanted, known))
        try:
            sending.open()
            count = sending.send_new(last=True)
        except Exception as error:  # whatever a tracker's library raises
            sending.give_up(error)
            sending.close(finished=False)
            raise MusterError(
                f"{run.id} could not be sent to {options.to}",
                why=redact_text(f"{type(error).__name__}: {error}"),
                fix="the same command goes on where this one broke off",
            ) from error
        sending.close(finished=_has_finished(run))
    named = f", as its run {sending.run}" if sending.run else ""
    lines = plural(count, "line")
    output.say(f"{lines} of {run.id} sent to {options.to}{named}")
    return ExitCode.GOOD


def _has_finished(run: RunFolder) -> bool:
    state = run_state.read_state(run)
    return state is not None and state.phase == "finished"
